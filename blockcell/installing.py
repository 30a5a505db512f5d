"""What an import says in a checkout that is not built, and in a program that was frozen without native code."""

import sys


def not_built(folder: str) -> str:
    """That the package in this folder has no native code, or only that for another Python."""
    if getattr(sys, "frozen", False):
        return (
            "this program was frozen without the compiled modules of blockcell. PyInstaller finds them where blockcell"
            " is installed by pip; else freeze it with `--collect-submodules blockcell`, or with what makes another"
            " freezer take whole packages"
        )
    python = f"{sys.implementation.name} {sys.version_info.major}.{sys.version_info.minor}"
    return (
        f"{folder} is blockcell's source without native code for {python}: run Python in another folder, to import "
        "blockcell from where it is installed, or build it here with `pip install -e .`"
    )
