"""Which CPU levels are compiled: setup.py goes by BLOCKCELL_LEVELS, and the Makefile knows by its stamps which were."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from sanitizers import leave_out_barriers

import blockcell
from blockcell import _cpu, _kernels
from blockcell.optable import REALS

ROOT = Path(__file__).resolve().parents[2]
CAN_COMPILE = pytest.mark.skipif(not sys.platform.startswith("linux") or not shutil.which("cc"), reason="needs cc")


# ------------------------------------------------------------------------------------------------------------- setup.py
@pytest.fixture
def setup(monkeypatch):
    """setup.py as a module, as on x86-64."""
    pytest.importorskip("Cython")
    pytest.importorskip("setuptools")
    monkeypatch.chdir(ROOT)
    spec = importlib.util.spec_from_file_location("blockcell_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "HAS_LEVELS", True)
    return module


def build_command(setup):
    from setuptools import Distribution

    command = setup.BuildExt(Distribution())
    command.extensions = list(setup.extensions())
    return command


@pytest.mark.parametrize(
    ("wanted", "levels"),
    [("all", "base v3 v4"), ("runnable", "base v3"), ("best", "v3"), ("v4", "v4"), ("base, v3", "base v3")],
)
def test_levels_that_are_built(setup, monkeypatch, wanted, levels):
    """On a CPU with AVX2 and without AVX-512."""
    monkeypatch.setattr(setup, "WANTED_LEVELS", wanted)
    monkeypatch.setattr(setup.BuildExt, "runnable_levels", lambda self: ["base", "v3"])
    names = {extension.name for extension in build_command(setup).chosen_extensions()}
    engines = {f"blockcell._engine_{kind}_{level}" for kind in setup.TYPES for level in levels.split()}
    assert {name for name in names if name.startswith("blockcell._engine_")} == engines
    once = {f"blockcell.{path.stem}" for path in Path("pyx").glob("_*.pyx") if path.stem not in setup.KERNELS}
    assert once | {setup.SHARED} <= names


def test_every_list_of_levels_and_types_has_all(setup):
    assert tuple(setup.LEVELS) == _cpu.LEVELS
    assert set(setup.TYPES) == {*REALS.values()}
    pages = "docs/settings.md", "docs/platforms.md", "docs/engine.md"
    for path in ("tools/packages.py", "benchmarks/machine.py", *pages):
        words = set(re.findall(r"\w+", (ROOT / path).read_text()))
        assert words >= {*setup.LEVELS}, path


def test_everything_that_a_kernel_includes_is_hashed(setup):
    """Else a package would take kernels that were built before a header changed."""
    files = {path for path in Path("pyx").rglob("*") if path.is_file() and path.suffix != ".pyx"}
    assert files == set(setup.headers())
    for extension in setup.extensions():
        assert {str(path) for path in files} <= set(extension.depends) or extension.name == setup.SHARED


def test_sanitizers_leave_out_every_barrier(tmp_path):
    """In turn, in a copy of the checkout: `threads` of tools/sanitizers.py."""
    shutil.copytree(ROOT / "pyx", tmp_path / "pyx")
    barriers = [
        line
        for path in (ROOT / "pyx").rglob("*.p*")
        for line in re.findall(r"^ +\w*barrier\(&team\)", path.read_text(), re.M)
    ]
    assert len(leave_out_barriers(tmp_path)) == len(barriers)


def test_unknown_levels_are_refused(setup, monkeypatch):
    monkeypatch.setattr(setup, "WANTED_LEVELS", "v9")
    with pytest.raises(SystemExit, match="BLOCKCELL_LEVELS=v9: expected all, runnable, best, or levels out of "):
        setup.levels()


@pytest.mark.skipif(not _cpu.OPENMP or "gcc" not in blockcell.build_info()["compiler"], reason="about gcc's OpenMP")
@pytest.mark.parametrize("level", _kernels.available_levels())
def test_gcc_adds_no_barrier_to_the_loops_of_kernels(level):
    """It would if team.h did not define Cython's `lastprivate` away; a loop without team.h has such a barrier."""
    pytest.importorskip(f"blockcell._for_tests_float_{level}", reason="only built in a checkout")
    stems = [f"{kernels}_{real}" for kernels in ("_engine", "_for_tests") for real in sorted({*REALS.values()})]
    files = {stem: importlib.util.find_spec(f"blockcell.{stem}_{level}").origin for stem in stems}
    modules = {stem: Path(file).read_bytes() for stem, file in files.items()}
    assert all(b"GOMP_parallel" in module for module in modules.values())
    assert [stem for stem, module in modules.items() if b"GOMP_barrier" in module] == stems[2:]


@CAN_COMPILE
def test_a_compiler_tells_what_this_cpu_runs(setup):
    """Before anything is built the same as afterwards."""
    from setuptools._distutils import ccompiler, sysconfig

    command = build_command(setup)
    command.compiler = ccompiler.new_compiler()
    sysconfig.customize_compiler(command.compiler)
    assert command.runnable_levels() == [*_cpu.supported_levels()]


def run_build_ext(folder, *options, **environment):
    """Run setup.py on the folder's pyx, with the rest of the checkout."""
    pytest.importorskip("Cython")
    pytest.importorskip("setuptools")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "blockcell/_version.py"):
        if not (folder / name).exists():
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    command = [sys.executable, "setup.py", "build_ext", *options]
    return subprocess.run(command, cwd=folder, env=os.environ | environment, capture_output=True, text=True)


@CAN_COMPILE
@pytest.mark.parametrize("lacks", ["compiler", "headers"])
def test_what_to_install_is_said_before_anything_is_translated(tmp_path, lacks):
    shutil.copytree(ROOT / "pyx", tmp_path / "pyx")
    compiler = tmp_path / "cc"
    if lacks == "headers":  # it finds no Python.h, as it is not told where that is
        compiler.write_text(
            '#!/bin/sh\nfor a; do shift; case "$a" in -I*) ;; *) set -- "$@" "$a" ;; esac; done\ncc "$@"\n'
        )
        compiler.chmod(0o755)
    result = run_build_ext(tmp_path, CC=str(compiler))
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith("blockcell needs gcc ") and "`apt install gcc python3-dev python3-venv` on Debian" in last
    assert ("Python.h" in result.stderr.replace(last, "")) == (lacks == "headers")  # the compiler says what it lacks
    assert not (tmp_path / "build" / "cython").exists()


def test_what_has_not_changed_is_not_translated_again(setup, monkeypatch, tmp_path):
    """Even if a file is newer than its C file, as Cython's own are in an environment that pip has made for a build."""
    source, c_file = tmp_path / "pyx" / "_tiny.pyx", tmp_path / "build" / "cython" / "pyx" / "_tiny.c"
    source.parent.mkdir()
    shutil.copy(ROOT / "setup.py", tmp_path)
    monkeypatch.chdir(tmp_path)

    def is_translated(text, seconds):
        """Return whether a source with this text, which was written at this time, is translated."""
        source.write_text(text)
        os.utime(source, (seconds, seconds))
        before = c_file.stat().st_mtime_ns if c_file.exists() else 0
        command = build_command(setup)
        command.parallel = 1
        assert command.translated({"_tiny": ["pyx/_tiny.pyx"]}) == {"_tiny": "build/cython/pyx/_tiny.c"}
        return c_file.stat().st_mtime_ns != before

    now = source.parent.stat().st_mtime
    assert is_translated("first = 1", now)
    assert not is_translated("first = 1", now + 1000)
    assert is_translated("second = 1", now + 1000) and "second" in c_file.read_text()
    assert is_translated("third = 1", now - 1000) and "third" in c_file.read_text()  # the C file is a copy, and newer
    monkeypatch.setattr(setup.numpy, "__version__", "3.0.0")
    assert is_translated("third = 1", now - 1000)
    c_file.unlink()
    assert is_translated("third = 1", now - 1000)


@CAN_COMPILE
def test_objects_are_used_again(setup, monkeypatch, tmp_path):
    """By editable and other installs, until the source or the compiler's flags change."""
    monkeypatch.setattr(setup, "FLAGS", ["-O0"])
    source = tmp_path / "pyx" / "_team.pyx"  # one of those that are compiled for one level alone
    source.parent.mkdir()
    source.write_text("first = 1")
    shared = tmp_path / "build" / "cython" / "_cyutility.c"  # Cython's own would take most of the time
    shared.parent.mkdir(parents=True)
    shared.write_text("#include <Python.h>\nPyMODINIT_FUNC PyInit__cyutility(void) { return NULL; }\n")
    (tmp_path / "blockcell").mkdir()
    shutil.copy(ROOT / "setup.py", tmp_path)
    monkeypatch.chdir(tmp_path)

    def times(flags="", in_place=True):
        """Return when the object and the modules, in place or not, were written, after a build."""
        monkeypatch.setenv("CFLAGS", flags)
        command = build_command(setup)
        command.distribution.ext_modules, command.inplace = command.extensions, in_place
        command.ensure_finalized()
        command.run()
        files = {pattern: [*tmp_path.glob(pattern)] for pattern in ("build/**/_team.o", "build/lib*/**/_team*.so")}
        files |= {"blockcell": [*tmp_path.glob("blockcell/_team*.so")]}
        return [file.stat().st_mtime_ns for found in files.values() for file in found]

    first = times(in_place=False)
    assert len(first) == 2 and times(in_place=False) == first
    in_place = times()
    assert in_place[:2] == first and len(in_place) == 3
    others = times("-DOTHER=1")
    assert others[0] > first[0] and others[2] > in_place[2]
    source.write_text("second = 1")
    last = times("-DOTHER=1")
    assert last[0] > others[0] and last[2] > others[2]
    assert b"second" in next(tmp_path.glob("blockcell/_team*.so")).read_bytes()


# ------------------------------------------------------------------------------------------------------------- Makefile
needs_make = pytest.mark.skipif(not shutil.which("make"), reason="needs make")


def make(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run make in a folder that has what it reads, as old as in the checkout."""
    for name in ("Makefile", "pyproject.toml", "setup.py"):
        shutil.copy2(ROOT / name, folder)
    command = ["make", *arguments]
    return subprocess.run(command, cwd=folder, env=os.environ | environment, capture_output=True, text=True)


@needs_make
@pytest.mark.parametrize(
    ("there", "target", "wanted", "compiled"),
    [
        ([], "demo", "", "best"),
        ([], "test", "", "runnable"),
        (["demo-best"], "demo", "", None),
        (["demo-best"], "test", "", "runnable"),
        (["built-runnable"], "demo", "", None),
        (["built-runnable"], "test", "", None),
        (["built-runnable"], "test", "all", "all"),
        (["built-all"], "test", "all", None),
        (["built-runnable"], "demo", "base, v3", "base,v3"),
        (["built-v4"], "demo", "", "best"),
        (["built-v4"], "demo", "v4", None),
    ],
)
def test_make_compiles_what_is_missing(tmp_path, there, target, wanted, compiled):
    (tmp_path / ".venv").mkdir()
    for name in ("tools", *there):
        (tmp_path / ".venv" / name).touch()
    result = make(tmp_path, "-n", target, BLOCKCELL_LEVELS=wanted)
    assert result.returncode == 0, result.stderr
    runs = [line for line in result.stdout.splitlines() if "pip install" in line]
    assert [line.split()[0] for line in runs] == [f"BLOCKCELL_LEVELS={compiled}"] * (compiled is not None)


OLD = "#!/bin/sh\ntest $1 = --version || exit 1\necho Python 3.10.12\n"  # which is too old


@needs_make
@pytest.mark.parametrize("goal", ["demo", "test"])
def test_make_refuses_an_old_python(tmp_path, goal):
    old = tmp_path / "python3.10"
    old.write_text(OLD)
    old.chmod(0o755)
    result = make(tmp_path, goal, f"PYTHON={old}")
    message = f"blockcell needs Python 3.11 or later, and {old} is Python 3.10.12: say which one to use"
    assert result.returncode
    assert f"{message}, as in make {goal} PYTHON=python3.11" in result.stderr.splitlines()
    assert not (tmp_path / ".venv").exists()


@needs_make
@pytest.mark.parametrize("there", [None, "old", "without pip", "fit"])
def test_make_replaces_an_old_environment(tmp_path, there):
    """And one that Debian's Python has left without pip, as it lacks ensurepip."""
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    python, new = tmp_path / ".venv" / "bin" / "python", tmp_path / "new"
    if there:
        fits = "false" if there == "old" else "! echo $2 | grep -q 'import pip'" if there == "without pip" else "true"
        python.write_text(f"#!/bin/sh\n{fits}\n")
        python.chmod(0o755)
    new.write_text('#!/bin/sh\ntest $1 = -c || echo "$@"\n')
    new.chmod(0o755)
    result = make(tmp_path, ".venv/tools", f"PYTHON={new}")
    made = [] if there == "fit" else ["-m venv --clear .venv"]  # by a program that only says what it would do
    assert [line for line in result.stdout.splitlines() if line.startswith("-m")] == made
