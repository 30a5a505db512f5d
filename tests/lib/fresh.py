"""Runs code in a new interpreter, for what depends on the environment or on what is already imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


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
    """Return what `code` prints; it must succeed."""
    result = python(code, **environment)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def on_terminal(code: str) -> str:
    """Return what `code` prints where standard output and error are a terminal."""
    pty = pytest.importorskip("pty")
    master, slave = pty.openpty()
    environment = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")} | {"TERM": "xterm"}
    with subprocess.Popen([sys.executable, "-c", code], stdout=slave, stderr=slave, env=environment) as process:
        os.close(slave)
        chunks = []
        try:
            while chunk := os.read(master, 65536):
                chunks.append(chunk)
        except OSError:  # how Linux says that the other side has closed
            pass
    os.close(master)
    assert process.returncode == 0
    return b"".join(chunks).decode()
