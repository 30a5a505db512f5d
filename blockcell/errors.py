"""What is raised besides Python's own, and how names and values are shown."""

import reprlib
from typing import Any


def plain(text: str) -> str:
    """Escape what a terminal would obey in a text: names come from files that anybody may have made."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def short(value: Any) -> str:
    """Describe a value in a message: shortened, or only its type where it is neither a number nor text."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return reprlib.repr(value)
    return f"of type {type(value).__name__}"


class FormatError(ValueError):
    """A file is damaged, or is of another kind than expected. The message says where, and what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(plain(message))


FormatError.__module__ = "blockcell"  # what tracebacks show
