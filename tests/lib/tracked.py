"""The files of the checkout that git tracks, for tests of pages, layout and names."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def tracked_files() -> list[Path]:
    """Return the tracked files, from the root; skip the test in a source distribution, which has no list of them."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this is no checkout of git's")
    return [*map(Path, listed.stdout.splitlines())]
