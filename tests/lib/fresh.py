"""Runs code in a new interpreter, for what depends on the environment or on what is already imported."""

import os
import subprocess
import sys
from pathlib import Path


def run(arguments: list[str], minutes: float, environment: dict[str, str | None]) -> subprocess.CompletedProcess[str]:
    changed = os.environ | environment
    return subprocess.run(
        [sys.executable, *arguments],
        env={name: value for name, value in changed.items() if value is not None},
        capture_output=True,
        text=True,
        timeout=60 * minutes,
    )


def python(code: str, **environment: str | None) -> subprocess.CompletedProcess[str]:
    """Run `code` with these environment variables on top of ours; None takes one away."""
    return run(["-c", code], 2, environment)


def script(
    path: Path, *arguments: str, minutes: float = 2, **environment: str | None
) -> subprocess.CompletedProcess[str]:
    """Run a file with arguments."""
    return run([str(path), *arguments], minutes, environment)


def printed(code: str, **environment: str | None) -> str:
    """What `code` prints; it must succeed."""
    result = python(code, **environment)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()
