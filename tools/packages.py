"""Build wheel, source distribution and editable install, and try each in a clean environment outside the checkout.

    python tools/packages.py

Builds as a user's pip does, isolated and with every CPU level, and prints sizes and seconds; fails at the first thing
that is wrong.  The editable install has the oldest CPU level alone, to save time.

Run by CI on every push, and by hand before a release.  Takes three whole builds, each of minutes, and some tests.
"""

import hashlib
import os
import re
import subprocess
import sysconfig
import tarfile
import tempfile
import time
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from children import ROOT, run_successfully

GOLDEN = "kernels/test_kernels.py::test_tensorflow"
LEVELS = ["base", "v3", "v4"] if sysconfig.get_platform() == "linux-x86_64" else ["base"]
MAX_SECONDS = 2 * 210  # of CPUs, to install from source: three and a half minutes on two
MAX_BYTES = 8_000_000  # of a wheel, with the OpenMP runtime or without

# The installed package is used, whole and under its one version; then the numbers: TensorFlow's stored results and the
# formulas, at every CPU level.
INSTALLED = """
import importlib.metadata, pathlib, sys
import blockcell
place = pathlib.Path(blockcell.__file__).resolve()
assert place.is_relative_to(sys.argv[1]), f"blockcell is imported from {place}, not from {sys.argv[1]}"
assert blockcell.__version__ == importlib.metadata.version("blockcell")
info = blockcell.build_info()
levels = sys.argv[2].split(",")
assert info["levels"] == tuple(levels), info  # also those that this CPU does not run
print(f"    {info['version']} at {place.parent}: levels {', '.join(info['levels'])}, OpenMP {info['openmp']}")
"""
TYPED = """
from typing import Any, assert_type

import numpy as np

import blockcell
from blockcell import GRU, LSTM, Bidirectional, GRUState, LSTMState, Stack, ops, raw_ops
from blockcell.layers import Layer
from blockcell.optable import Array, GRUCellVjp, GRUStates

x, h = np.zeros((2, 3), np.float32), np.zeros((2, 4), np.float32)
w_ru, w_c, b_ru, b_c = (np.zeros(shape, np.float32) for shape in [(7, 8), (7, 4), 8, 4])
states = raw_ops.GRUBlockCell(x=x, h_prev=h, w_ru=w_ru, w_c=w_c, b_ru=b_ru, b_c=b_c, num_threads=1)
assert_type(states, GRUStates)
assert_type(states.h, Array)
grads = ops.gru_block_cell_vjp(
    x=x, h_prev=h, w_ru=w_ru, w_c=w_c, b_ru=b_ru, b_c=b_c, r=states.r, u=states.u, c=states.c, d_h=h
)
assert_type(grads, GRUCellVjp)
assert_type(blockcell.get_num_threads(), int)

lstm, gru = LSTM.init(3, 4), GRU.init(3, 4)
sequence = np.zeros((5, 2, 3), np.float32)
y, state = lstm(sequence)
assert_type(y, Array)
assert_type(state, LSTMState)
y, state, tape = lstm.forward(sequence, [state.cs, None], lengths=[5, 3])
assert_type(lstm.backward(tape, y, state), tuple[Array, LSTMState, dict[str, Array]])
assert_type(gru(sequence), tuple[Array, GRUState])
assert_type(lstm.stream().state, LSTMState)
assert_type(Bidirectional(lstm, gru)(sequence)[1], tuple[LSTMState, GRUState])
assert_type(Stack([lstm, gru.init(4, 4)])(sequence)[1], tuple[Any, ...])


def last(layer: Layer) -> LSTMState | GRUState | tuple[Any, ...]:
    return layer(sequence)[1]


last(Bidirectional(lstm, lstm))
"""
MISTYPED = """
import numpy as np

from blockcell import GRU, raw_ops

raw_ops.GRUBlockCell(x=[[1.0]], h_prev=[[1.0]])  # weights are missing
raw_ops.GRUBlockCell([[1.0]]).hh  # positional, and no such result
GRU.init(1, 1)([[[1.0]]])[1].cs  # a state of an LSTM
GRU.init(1, 1)([[[1.0]]], np.zeros((1, 1)))  # an array that is not a part of a state
"""
MISTAKES = (
    "Missing named argument",
    'has no attribute "hh"',
    '"GRUState" has no attribute "cs"',
    'Argument 2 to "__call__" of "Layer" has incompatible type "ndarray',
)


# What the caller's environment says about Python and CPU levels must not reach the new ones.
OWN = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "BLOCKCELL_LEVELS")
INHERITED = {key: value for key, value in os.environ.items() if key not in OWN}
run = partial(run_successfully, environment=INHERITED)


@contextmanager
def timed(step: str) -> Iterator[list[float]]:
    """Print a step and how long it takes; yields a list that in the end has the seconds of CPU time."""
    start, start_times, seconds = time.perf_counter(), os.times(), [0.0]
    print(step, flush=True)
    yield seconds
    end_times = os.times()
    seconds[0] = (
        end_times.children_user + end_times.children_system - start_times.children_user - start_times.children_system
    )
    print(f"    {time.perf_counter() - start:.0f} s, in which CPUs computed for {seconds[0]:.0f} s", flush=True)


def new_environment(folder: Path) -> Path:
    """Make a virtual environment, and return its Python."""
    venv.create(folder, with_pip=True)
    return folder / "bin" / "python"


def check_sources(sdist: Path) -> None:
    """Check that a source distribution has what it is built and tested from, and nothing generated."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for path in (
        "setup.py",
        "pyx/product/tile.pxd",
        "tests/kernels/test_kernels.py",
        "docs/mathematics.md",
        "LICENSE",
        "README.md",
    ):
        assert path in names, f"{path} is not in {sdist.name}"
    generated = {name for name in names if re.search(r"\.(so|c|o|pyc)$", name)} - {"tools/malloc_shim.c"}
    assert not generated, f"{sdist.name} contains {generated}"
    print(f"    {sdist.name}: {sdist.stat().st_size / 2**20:.2f} MiB, {len(names)} files")


def check_wheel(wheel: Path, levels: list[str]) -> None:
    """Check a wheel: its packages, the compiled modules of these CPU levels, the license, and its size."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    packages = {name.partition("/")[0] for name in names if not name.split("/")[0].endswith(".dist-info")}
    assert packages <= {"blockcell", "blockcell.libs", "onnx_export"}, packages
    modules = {"_args", "_cpu", "_cyutility", "_integer", "_layers", "_stream", "_team", "_tensors", "_training"}
    modules |= {"_ops"} | {f"_engine_{real}_{level}" for real in ("float", "double") for level in levels}
    assert {Path(name).name.partition(".")[0] for name in names if name.endswith(".so")} == modules
    assert {"blockcell/py.typed", "blockcell/__pyinstaller/hook-blockcell.py"} <= {*names}
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    sources = [name for name in names if re.search(r"\.(c|h|o|pyx|pxd|pyc)$", name)]
    assert not sources, f"{wheel.name} contains {sources}"
    size = wheel.stat().st_size
    assert size < MAX_BYTES, f"{wheel.name} has {size} bytes, more than {MAX_BYTES}"
    print(f"    {wheel.name}: {size / 2**20:.2f} MiB, {len(modules)} compiled modules")


def tests_alone(sdist: Path, folder: Path) -> tuple[Path, Path]:
    """Unpack a source distribution; return the folder of its tests and the folder of the rest.

    The tests are moved away from the package, so that they import the one that is installed."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "source", filter="data")
    source = next((folder / "source").iterdir())
    tests = folder / "tests"
    (source / "tests").rename(tests)
    (folder / "pyproject.toml").write_text((source / "pyproject.toml").read_text())  # pytest's options
    return tests, source


def check_installed(python: Path, place: Path, levels: list[str], tests: Path, *selection: str) -> None:
    """Check that a Python imports blockcell from `place`, with these CPU levels, and passes a selection of tests."""
    empty = tests.parent / "elsewhere"
    empty.mkdir(exist_ok=True)
    print(run(python, "-c", INSTALLED, place.resolve(), ",".join(levels), cwd=empty), end="", flush=True)
    files = [tests / name for name in selection]
    command = [python, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", *files]
    print("   ", run(*command, cwd=empty).splitlines()[-1], flush=True)


def check_types(python: Path, folder: Path) -> None:
    """Check that mypy accepts TYPED, and finds every mistake of MISTYPED, with the installed package's types."""
    run(python, "-m", "pip", "install", "--quiet", "mypy", cwd=folder)
    (folder / "typed.py").write_text(TYPED)
    (folder / "mistyped.py").write_text(MISTYPED)
    run(python, "typed.py", cwd=folder)
    print("   ", run(python, "-m", "mypy", "--strict", "typed.py", cwd=folder).strip())
    command = [python, "-m", "mypy", "--strict", "mistyped.py"]
    mypy_run = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert all(mistake in mypy_run.stdout for mistake in MISTAKES), mypy_run.stdout
    print("    mypy sees mistakes too:", mypy_run.stdout.strip().splitlines()[-1])


def main() -> None:
    """Build both distributions twice, and try the wheel, an install from source and an editable install."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tools = new_environment(folder / "tools")
        run(tools, "-m", "pip", "install", "--quiet", "build", "twine", cwd=folder)
        with timed("source distribution, and a wheel from it"):
            run(tools, "-m", "build", "--outdir", folder, ROOT, cwd=folder, SOURCE_DATE_EPOCH="1800000000")
        sdist, wheel = next(folder.glob("*.tar.gz")), next(folder.glob("*.whl"))
        check_sources(sdist)
        check_wheel(wheel, LEVELS)
        twine_output = run(tools, "-m", "twine", "--no-color", "check", "--strict", sdist, wheel, cwd=folder)
        print("    twine check:", *(line.rpartition(" ")[2] for line in twine_output.splitlines()), flush=True)
        with timed("both again: the same bytes?"):
            second_folder = folder / "again"
            run(tools, "-m", "build", "--outdir", second_folder, ROOT, cwd=folder, SOURCE_DATE_EPOCH="1800000000")
        for built in (sdist, wheel):
            digests = [
                hashlib.sha256((place / built.name).read_bytes()).hexdigest() for place in (folder, second_folder)
            ]
            assert digests[0] == digests[1], f"{built.name}: {digests}"
            print(f"    {built.name}: SHA-256 {digests[0]}, twice")
        tests, source = tests_alone(sdist, folder)

        print("wheel")
        python = new_environment(folder / "wheel")
        run(python, "-m", "pip", "install", "--quiet", f"{wheel}[test]", cwd=folder)
        print("   ", run(python.parent / "blockcell", "--version", cwd=folder).strip())
        files = [
            f"{name}.py"
            for name in ("kernels/test_kernels", "kernels/test_formulas", "ops/test_validation", "command/test_cli")
        ]
        check_installed(python, folder / "wheel", LEVELS, tests, *files)
        check_types(python, folder / "elsewhere")

        python = new_environment(folder / "installed")
        with timed("pip install of the source distribution") as seconds:
            run(python, "-m", "pip", "install", "--quiet", sdist, cwd=folder)
        assert seconds[0] < MAX_SECONDS, f"CPUs computed for more than {MAX_SECONDS} s"
        run(python, "-m", "pip", "install", "--quiet", "blockcell[test]", cwd=folder)  # only what tests need
        check_installed(python, folder / "installed", LEVELS, tests, GOLDEN)

        with timed("editable install, one CPU level"):
            python = new_environment(folder / "editable")
            run(python, "-m", "pip", "install", "--quiet", "--editable", f"{source}[test]", cwd=folder,
                BLOCKCELL_LEVELS="base")  # fmt: skip
        check_installed(python, source, ["base"], tests, GOLDEN)
    print("all packages are as they should be")


if __name__ == "__main__":
    main()
