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

ROOT = Path(__file__).resolve().parents[2]


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
    assert {name.rpartition("_")[2] for name in names if name.startswith("blockcell._lstm_")} == set(levels.split())
    assert {f"blockcell.{name}" for name in (*setup.PLAIN, "_cyutility")} <= names


def test_every_list_of_levels_has_all(setup):
    assert tuple(setup.LEVELS) == _cpu.LEVELS
    pages = "docs/settings.md", "docs/platforms.md", "docs/engine.md"
    for path in ("tools/packages.py", "benchmarks/ceiling.py", *pages):
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
    pytest.importorskip(f"blockcell._for_tests_{level}", reason="only built in a checkout")
    stems = [*(path.name for path in (ROOT / "pyx" / "modules").iterdir()), "_dense", "_for_tests"]
    files = {stem: importlib.util.find_spec(f"blockcell.{stem}_{level}").origin for stem in stems}
    modules = {stem: Path(file).read_bytes() for stem, file in files.items()}
    assert all(b"GOMP_parallel" in module for module in modules.values())
    assert [stem for stem, module in modules.items() if b"GOMP_barrier" in module] == ["_for_tests"]


@pytest.mark.skipif(not sys.platform.startswith("linux") or not shutil.which("cc"), reason="needs a compiler")
def test_a_compiler_tells_what_this_cpu_runs(setup):
    """Before anything is built the same as afterwards."""
    from setuptools._distutils import ccompiler, sysconfig

    command = build_command(setup)
    command.compiler = ccompiler.new_compiler()
    sysconfig.customize_compiler(command.compiler)
    assert command.runnable_levels() == [*_cpu.supported_levels()]


# ------------------------------------------------------------------------------------------------------------- Makefile
@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
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
    for name in ("Makefile", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".venv").mkdir()
    for name in ("tools", *there):
        (tmp_path / ".venv" / name).touch()
    environment = os.environ | {"BLOCKCELL_LEVELS": wanted}
    result = subprocess.run(["make", "-n", target], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    runs = [line for line in result.stdout.splitlines() if "pip install" in line]
    assert [line.split()[0] for line in runs] == [f"BLOCKCELL_LEVELS={compiled}"] * (compiled is not None)


# -------------------------------------------------------------------------------------------------------- emulated CPUs
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="QEMU emulates programs of Linux")
@pytest.mark.parametrize("version", ["7.2.22 (Debian 1:7.2)", "10.0.8", "7.1.0", "6.2.0 (Debian 1:6.2)", None])
def test_qemu_before_avx2_is_refused(monkeypatch, tmp_path, version):
    cpus = pytest.importorskip("cpus")
    if version:
        (tmp_path / "qemu-x86_64").write_text(f"#!/bin/sh\necho 'qemu-x86_64 version {version}'\n")
        (tmp_path / "qemu-x86_64").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    if version and version.startswith(("7.2", "10")):
        cpus.check_qemu()
    else:
        with pytest.raises(SystemExit, match=r"qemu-x86_64 7\.2 or later is needed, .* found: "):
            cpus.check_qemu()
