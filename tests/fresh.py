"""Runs code in a new interpreter, for what depends on the environment or on what is already imported."""

import os
import subprocess
import sys


def python(code: str, **environment: str | None) -> subprocess.CompletedProcess[str]:
    """Run `code` with these environment variables on top of ours; None takes one away."""
    changed = os.environ | environment
    return subprocess.run(
        [sys.executable, "-c", code],
        env={name: value for name, value in changed.items() if value is not None},
        capture_output=True,
        text=True,
        timeout=120,
    )


def printed(code: str, **environment: str | None) -> str:
    """What `code` prints; it must succeed."""
    result = python(code, **environment)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()
