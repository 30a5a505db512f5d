"""Run tests/onnx with every minor version of onnxruntime that pyproject.toml promises, each in a new environment.

    python tools/onnxruntime_versions.py
    python tools/onnxruntime_versions.py 1.20 1.25.1     with these alone

The compiled modules are those of the checkout; the environments have the newest numpy, onnx and pytest, and nothing
that the tests can do without.  Prints the table of docs/onnx/runtimes.md, then the first failures.

Run by CI weekly, and by hand before a change of the bound.  Takes minutes for each version.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
import tomllib
from pathlib import Path

import children
from children import ROOT
from packages import new_environment, run

NEEDED = ["numpy", "onnx", "pytest", "pytest-xdist", "sympy"]  # onnxruntime.quantization imports sympy in 1.25 and 1.26
OPTIONS = ["-q", "-n", "auto", "-W", "error", "-p", "no:cacheprovider", "--tb=line", "-rfE"]
COUNTS = {"passed": "passed", "failed": "failed|errors?", "skipped": "skipped"}
FAILURES_SHOWN = 5
"""Of each version."""


def promised_versions() -> list[str]:
    """Return the newest release of each minor version from pyproject.toml's lower bound on, oldest first."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (oldest,) = re.findall(r"onnxruntime>=(\d+)\.(\d+)", extras["onnx"][1])
    releases = run(sys.executable, "-m", "pip", "index", "versions", "onnxruntime", cwd=ROOT)
    versions = [tuple(map(int, release)) for release in re.findall(r"\b(\d+)\.(\d+)\.(\d+)\b", releases)]
    newest = {version[:2]: version for version in sorted(versions) if version[:2] >= tuple(map(int, oldest))}
    return [".".join(map(str, version)) for version in newest.values()]


def prepare_environment(folder: Path, version: str) -> tuple[Path, str, str]:
    """Make an environment with a version of onnxruntime; return its Python and its versions of onnxruntime and onnx."""
    python = new_environment(folder)
    requirement = f"onnxruntime=={version}" + (".*" if version.count(".") == 1 else "")
    run(python, "-m", "pip", "install", "--quiet", "--only-binary=:all:", *NEEDED, requirement, cwd=folder)
    installed = run(python, "-m", "pip", "list", "--format=freeze", cwd=folder)
    found = dict(re.findall(r"^(onnx|onnxruntime)==(.*)$", installed, re.MULTILINE))
    return python, found["onnxruntime"], found["onnx"]


def run_tests(python: Path) -> tuple[dict[str, int], list[str]]:
    """Run tests with the checkout's packages; return how many passed, failed and were skipped, and the failures."""
    result = children.run(python, "-m", "pytest", *OPTIONS, "tests/onnx", PYTHONPATH=str(ROOT))
    *lines, summary = result.stdout.strip().splitlines() or [""]
    counts = {name: sum(map(int, re.findall(rf"(\d+) (?:{words})", summary))) for name, words in COUNTS.items()}
    failures = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    if result.returncode and not failures:  # pytest did not end as it should
        failures = [f"exit status {result.returncode}", *result.stdout.splitlines()[-20:]]
    return counts, failures


def main() -> None:
    """Run the tests with every version, print a line for each, and exit with 1 if a test failed."""
    failures_by_version = {}
    print("| onnxruntime | onnx | passed | failed | skipped | seconds |\n|---|---|---|---|---|---|", flush=True)
    for version in sys.argv[1:] or promised_versions():
        with tempfile.TemporaryDirectory() as folder:
            python, *found = prepare_environment(Path(folder), version)
            start = time.perf_counter()
            counts, failures = run_tests(python)
        row = [*found, *map(str, counts.values()), f"{time.perf_counter() - start:.0f}"]
        print(f"| {' | '.join(row)} |", flush=True)
        failures_by_version[version] = failures
    for version, failures in failures_by_version.items():
        print(*(f"{version}: {failure}" for failure in failures[:FAILURES_SHOWN]), sep="\n", end="\n" * bool(failures))
    sys.exit(any(failures_by_version.values()))


if __name__ == "__main__":
    main()
