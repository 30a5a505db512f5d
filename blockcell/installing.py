"""What an import says in a checkout that is not built."""

import sys


def not_built(folder: str) -> str:
    """That the package in this folder has no native code, or only that for another Python."""
    python = f"{sys.implementation.name} {sys.version_info.major}.{sys.version_info.minor}"
    return (
        f"{folder} is blockcell's source without native code for {python}: run Python in another folder, to import "
        "blockcell from where it is installed, or build it here with `pip install -e .`"
    )
