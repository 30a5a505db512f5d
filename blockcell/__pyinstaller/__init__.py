"""What PyInstaller needs to freeze a program that imports blockcell; the entry point `pyinstaller40` names it."""

from pathlib import Path


def get_hook_dirs() -> list[str]:
    """Return the folder of the hook."""
    return [str(Path(__file__).parent)]
