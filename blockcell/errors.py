"""What is raised besides Python's own."""


class FormatError(ValueError):
    """A file is damaged, or is of another kind than expected. The message says where, and what to do."""


FormatError.__module__ = "blockcell"  # what tracebacks show
