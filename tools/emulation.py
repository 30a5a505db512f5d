"""Run tests under QEMU's emulation of a CPU: what arm.py and cpus.py share. It is no program itself."""

from __future__ import annotations

import os
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from children import last_line, run

NO_TESTS = 5  # pytest's exit status where a file has markers or names of tests alone that are not run
SKIPPED = {  # and why
    "tests/layers/test_files.py::test_without_memory[.onnx]": "a limit on memory is the emulator's, too",
}


def write_python(command: Path, emulator: str, python: Path, *path: Path) -> None:
    """Write a command that behaves as this Python, emulated, also for programs that it runs by `sys.executable`.

    The folders in `path` come first in PYTHONPATH.
    """
    command.write_text(
        f"#!/bin/sh\n"
        f"export PYTHONPATH={':'.join(map(str, path))}${{PYTHONPATH:+:$PYTHONPATH}}\n"
        f'exec {emulator} -0 {command} {python} "$@"\n'
    )
    command.chmod(0o755)


def files_of(checkout: Path, folders: list[str]) -> list[str]:
    """Return the files of tests in these folders, the largest first, so that no CPU waits for the last one."""
    files = [file for folder in folders for file in (checkout / "tests" / folder).glob("test_*.py")]
    files.sort(key=lambda file: file.stat().st_size, reverse=True)
    return [str(file.relative_to(checkout)) for file in files]


def run_tests(checkout: Path, jobs: list[tuple[str, Path, str]], options: tuple[str, ...] = ()) -> None:
    """Run files of tests, as many at once as there are CPUs, and say how many tests passed.

    A job has the name by which it is reported, a Python, and a file.  `options` are pytest's.
    """
    start = time.perf_counter()
    options = ("-q", "-p", "no:cacheprovider", *options, *(f"--deselect={name}" for name in SKIPPED))

    def run_file(job: tuple[str, Path, str]) -> tuple[bool, str]:
        """Return whether the tests of a file passed, and what pytest printed."""
        _, python, file = job
        result = run(python, "-m", "pytest", *options, file, cwd=checkout)
        return result.returncode in (0, NO_TESTS), result.stdout.rstrip()

    passed, failed = 0, []
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for (name, _, _), (passes, output) in zip(jobs, pool.map(run_file, jobs), strict=True):
            print(f"{name}: {last_line(output)}" if passes else f"{output[-20000:]}\n{name} failed", flush=True)
            passed += sum(int(count) for count in re.findall(r"(\d+) passed", last_line(output)))
            failed += [] if passes else [name]
    for name, reason in SKIPPED.items():
        print(f"left out: {name}, as {reason}")
    print(f"{passed} tests passed in {(time.perf_counter() - start) / 60:.0f} minutes")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")
