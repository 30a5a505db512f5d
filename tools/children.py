"""Start child processes, and copy the checkout: what programs that build and test share. It is no program itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run(
    *command: object, cwd: Path = ROOT, environment: Mapping[str, str] = os.environ, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command in an environment with some more variables, and capture what it prints."""
    words, pipe = [str(word) for word in command], subprocess.PIPE
    return subprocess.run(
        words, cwd=cwd, env={**environment, **variables}, stdout=pipe, stderr=subprocess.STDOUT, text=True
    )


def run_successfully(
    *command: object, cwd: Path = ROOT, environment: Mapping[str, str] = os.environ, hint: str = "", **variables: str
) -> str:
    """Run a command, exit with its output and a hint if it fails, and return what it prints."""
    result = run(*command, cwd=cwd, environment=environment, **variables)
    if result.returncode:
        words = " ".join(map(str, command))
        sys.exit(f"{words}\n{result.stdout[-20000:]}\nexit status {result.returncode}{hint}")
    return result.stdout


def last_line(text: str) -> str:
    """Return the last line of what a command prints; pytest's without its frame."""
    return text.rstrip().rpartition("\n")[2].strip("= ")


def copy_checkout(folder: Path) -> None:
    """Copy the checkout as it is now, without anything built, into a folder, beside what is there."""
    ignored = shutil.ignore_patterns(".*", "build", "dist", "*.so", "__pycache__")
    shutil.copytree(ROOT, folder, ignore=ignored, dirs_exist_ok=True)
