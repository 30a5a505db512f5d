"""Build the package for a Python without a GIL, in a copy of the checkout and a new environment, and try it there.

    python3.13t tools/freethreading.py

No import may switch the GIL on again; the tests of the native code pass without it; then eight threads share ops and
layers, whose weights are replaced meanwhile: all results have the bits of one thread.

Run by hand after a change of native code; CI never runs it.  Takes a whole build and minutes of tests.
"""

from __future__ import annotations

import sys
import sysconfig
import tempfile
import time
import venv
from functools import partial
from pathlib import Path

from children import last_line, run_successfully
from sanitizers import copy_source, find_test_files

NEEDED = ["setuptools>=77", "cython>=3.3", "numpy>=2", "pytest>=8", "mpmath>=1.3"]
IMPORTS = """
import sys, importlib
from pathlib import Path
import numpy
assert not sys._is_gil_enabled(), "numpy switches the GIL on"
import blockcell
for module in Path(blockcell.__file__).parent.glob("_*.so"):
    name = module.name.partition(".")[0]
    importlib.import_module(f"blockcell.{name}")
    assert not sys._is_gil_enabled(), f"{name} switches the GIL on"
print(f"Python {sys.version.split()[0]}, numpy {numpy.__version__}: no GIL after all imports")
"""
SOAK = """
import sys
import races
while sum(races.comparisons.values()) < int(sys.argv[1]):
    races.check_python_threads("")
    assert not races.differences, races.differences
assert not sys._is_gil_enabled()
print(f"{sum(races.comparisons.values())} results of {races.PYTHON_THREADS} threads at once: the bits of one thread")
"""
RESULTS = 100_000


def main() -> None:
    """Build the checkout for this Python, and try imports, tests and threads without a GIL."""
    if not sysconfig.get_config_var("Py_GIL_DISABLED"):
        sys.exit(f"{sys.executable} has a GIL: take another Python, such as python3.13t")
    start = time.perf_counter()
    checkout = copy_source("freethreading")
    with tempfile.TemporaryDirectory() as name:
        venv.create(name, with_pip=True)
        python = Path(name, "bin", "python")
        run = partial(run_successfully, python, cwd=checkout)
        run("-m", "pip", "install", "--quiet", "--only-binary=:all:", *NEEDED)
        run("setup.py", "build_ext", "--inplace")
        path = {"PYTHONPATH": f"{checkout}:{checkout}/tools"}
        print(last_line(run("-W", "error", "-c", IMPORTS, **path)), flush=True)
        run = partial(run, **path, PYTHON_GIL="0")
        files = [*find_test_files(checkout), "tests/kernels/test_formulas.py"]
        options = ["-q", "-W", "error", "-p", "no:cacheprovider", "-m", "not slow"]
        print(last_line(run("-m", "pytest", *options, *files)), flush=True)
        print(last_line(run("-W", "error", "-c", SOAK, RESULTS)), flush=True)
    print(f"{time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
