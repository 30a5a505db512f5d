"""What the parts of the project may know of each other."""

import ast
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from fresh import printed

ROOT = Path(__file__).parent.parent


def test_import_loads_numpy_and_the_standard_library_alone():
    new = printed(
        "import sys, numpy; before = set(sys.modules); import blockcell; "
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before})"
    )
    others = set(new.split()) - set(sys.stdlib_module_names) - {"numpy", "blockcell"}
    # compiled modules bring cython_runtime, _cython_3_3_1 and _cyutility
    assert not {name for name in others if "cython" not in name and name != "_cyutility"}


def _imported(source: Path) -> set[str]:
    """The modules that a source file names in its imports."""
    imported = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported |= {f"{node.module or ''}.{alias.name}" for alias in node.names} | {node.module or ""}
    return imported


@pytest.mark.parametrize("source", sorted(ROOT.glob("onnx_export/*.py")), ids=lambda path: path.name)
def test_onnx_export_imports_no_kernels(source):
    """It knows the ops from the table; and one module alone needs onnxruntime."""
    imported = _imported(source)
    private = {name for name in imported if name.startswith("blockcell._") and name != "blockcell.__version__"}
    assert not {name for name in private if not name.startswith("blockcell._read")}
    assert source.name == "session.py" or not any(name.partition(".")[0] == "onnxruntime" for name in imported)


@pytest.mark.parametrize("source", sorted(ROOT.glob("pyx/*.p[yx][xd]")), ids=lambda path: path.name)
def test_kernels_use_no_c_interface_of_numpy(source):
    """Arrays come in through the buffer protocol.  Only what leads to the kernels is built against numpy, for speed: it
    looks at every array of every call and makes the results."""
    assert source.name in ("_args.pyx", "_stream.pyx", "arrays.pxd") or not re.search(
        r"^\s*cimport numpy|^\s*from numpy\S* cimport", source.read_text(), re.MULTILINE
    )


@pytest.mark.parametrize("source", sorted(ROOT.glob("tests/test_*.py")), ids=lambda path: path.name)
def test_no_test_takes_the_time(source):
    """A test that compares times fails on a busy machine; that is what benchmarks are for."""
    imported = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module)
    assert not imported & {"time", "timeit"}


def test_source_distribution_can_be_built_from(tmp_path):
    pytest.importorskip("setuptools")
    pytest.importorskip("Cython")
    command = [sys.executable, "setup.py", "-q", "egg_info", "-e", str(tmp_path), "sdist", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    wanted = [
        *ROOT.glob("pyx/*.p*"),
        *ROOT.glob("blockcell/*.py*"),
        *ROOT.glob("blockcell/*/*.py"),
        *ROOT.glob("tests/*.py"),
        ROOT / "LICENSE",
    ]
    assert {path.relative_to(ROOT).as_posix() for path in wanted} <= packed
    assert not {name for name in packed if name.endswith((".so", ".pyc", ".c"))} - {"tests/malloc_shim.c"}
