"""How to install what is missing, for messages; the one place to change once blockcell is on a package index."""

import sys

PACKAGE = "."  # "blockcell" once an index has it; tests/repository/test_install.py then names what else must change


def how_to_install(extra: str) -> str:
    """The command for an extra of pyproject.toml."""
    command = f'pip install "{PACKAGE}[{extra}]"'
    return f"{command} in a checkout of blockcell" if PACKAGE == "." else command


def not_built(folder: str) -> str:
    """That the package in this folder has no native code, or only that for another Python."""
    python = f"{sys.implementation.name} {sys.version_info.major}.{sys.version_info.minor}"
    return (
        f"{folder} is blockcell's source without native code for {python}: run Python in another folder, to import "
        "blockcell from where it is installed, or build it here with `pip install -e .`"
    )
