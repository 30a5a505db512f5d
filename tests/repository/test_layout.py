"""What the parts of the project may know of each other."""

import ast
import graphlib
import os
import re
import subprocess
import sys
import tarfile
import tomllib
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest
from fresh import printed
from tracked import tracked_files

import blockcell

ROOT = Path(__file__).resolve().parents[2]


def test_import_loads_little():
    """numpy and the standard library, but for what takes long: zipfile and pathlib would bring along a dozen modules,
    hashlib OpenSSL."""
    new = {*printed("import sys, numpy; old = {*sys.modules}; import blockcell; print(*{*sys.modules} - old)").split()}
    others = {name.partition(".")[0] for name in new} - set(sys.stdlib_module_names) - {"blockcell"}
    # compiled modules bring cython_runtime, _cython_3_3_1 and _cyutility
    assert not {name for name in others if not name.startswith("numpy") and "cython" not in name} - {"_cyutility"}
    slow = {"bz2", "hashlib", "ipaddress", "shutil", "subprocess", "urllib", "zipfile"}
    slow |= {f"blockcell.{name}" for name in ("convert", "keras", "tensorflow", "torch")}
    assert "blockcell.files" in new and not slow & new


def test_modules_that_are_imported_when_they_are_used():
    code = "import blockcell; print(blockcell.convert.from_keras.__module__, blockcell.tensorflow.open.__module__)"
    assert printed(code).split()[0] == "blockcell.convert.keras"
    assert printed("from blockcell import convert; print(convert.__name__)") == "blockcell.convert"
    assert printed("from blockcell import *; print(convert.__name__)") == "blockcell.convert"
    assert {*blockcell.__all__} <= {*dir(blockcell)}
    with pytest.raises(AttributeError, match="module 'blockcell' has no attribute 'loda'"):
        _ = blockcell.loda


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("BlockLSTM", "; expected blockcell.raw_ops.BlockLSTM"),
        ("GRUBlockCellGrad", "; expected blockcell.raw_ops.GRUBlockCellGrad"),
        ("block_gru", "; expected blockcell.ops.block_gru"),
        ("adam", "; expected blockcell.optim.adam"),
        ("softmax_cross_entropy", "; expected blockcell.loss.softmax_cross_entropy"),
        ("nothing", ""),
    ],
)
def test_names_of_its_modules(name, place):
    with pytest.raises(AttributeError, match=f"^module 'blockcell' has no attribute '{name}'{place}$"):
        getattr(blockcell, name)


# -------------------------------------------------------------------------------------------------------------- imports
PURE = sorted([*ROOT.glob("blockcell/**/*.py"), *ROOT.glob("onnx_export/**/*.py")])
COMPILED = sorted(ROOT.glob("pyx/_*.pyx"))


def _name(source: Path) -> str:
    """The name of a source file's module."""
    if source in COMPILED:
        return f"blockcell.{source.stem}"
    return ".".join(part for part in source.relative_to(ROOT).with_suffix("").parts if part != "__init__")


@cache
def _imported(source: Path) -> set[tuple[str, str]]:
    """The imports of a source file, wherever they stand: ("a.b", "c") for ``from a.b import c``, else ("a.b", "")."""
    if source in COMPILED:  # ast does not know Cython
        return {(name, "") for name in re.findall(r"^\s*(?:from|import) ([\w.]+)", source.read_text(), re.MULTILINE)}
    package = _name(source).split(".")[: None if source.name == "__init__.py" else -1]
    imported = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            imported |= {(alias.name, "") for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*start, *([node.module] if node.module else [])])
            imported |= {(module, alias.name) for alias in node.names}
    return imported


def test_imports_point_one_way():
    """No module needs itself by way of others, not even for an import in a function or for types."""
    modules = {_name(source): source for source in [*PURE, *COMPILED]}
    graph: dict[str, set[str]] = {}
    for name, source in modules.items():
        imported = {f"{a}.{b}" if f"{a}.{b}" in modules else a for a, b in _imported(source)} & modules.keys()
        packages = {module[:k] for module in imported for k, letter in enumerate(module) if letter == "."}
        graph[name] = imported | {package for package in packages if not f"{name}.".startswith(f"{package}.")}
    assert {"blockcell.layers", "blockcell.layers.loading"} <= graph["blockcell"]
    assert "blockcell._team" in graph["blockcell._layers"] and "blockcell.files" in graph["blockcell.layers.calls"]
    graphlib.TopologicalSorter(graph).prepare()  # a CycleError names the modules


def test_conversions_import_from_modules_above_them():
    """The docstring of `convert` lists its modules in this order."""
    package = ROOT / "blockcell" / "convert"
    docstring = ast.get_docstring(ast.parse((package / "__init__.py").read_text()))
    modules = {f"blockcell.convert.{path.stem}" for path in package.glob("[!_]*.py")}
    above: set[str] = set()
    for name in re.findall(r"^``(\w+)\.py``", docstring, re.MULTILINE):
        imported = {part for pair in _imported(package / f"{name}.py") for part in (pair[0], ".".join(pair))}
        assert imported & modules <= above, name
        above.add(f"blockcell.convert.{name}")
    assert above == modules


@pytest.mark.parametrize("source", [path for path in PURE if path.is_relative_to(ROOT / "blockcell")], ids=_name)
def test_blockcell_needs_numpy_alone(source):
    """Only the command needs other packages, `blockcell.torch` needs PyTorch and for modules of TorchRL TorchRL,
    `blockcell.keras` needs Keras and what Keras computes by, `convert` needs onnx and, to compare, onnxruntime for
    models of ONNX and h5py for files of Keras, progress is drawn by rich, and type checkers come with
    typing_extensions."""
    needed = {module.partition(".")[0] for module, _ in _imported(source)} - set(sys.stdlib_module_names)
    more = {"onnx_export", "matplotlib", "rich", "sklearn", "threadpoolctl"}
    if _name(source).startswith("blockcell.command."):
        assert needed <= {"blockcell", "numpy"} | more
    elif f"{_name(source)}.".startswith("blockcell.torch."):
        torchrl = {"tensordict", "torchrl"} if _name(source) == "blockcell.torch.torchrl" else set()
        assert needed <= {"blockcell", "numpy", "torch"} | torchrl
    elif f"{_name(source)}.".startswith("blockcell.keras."):
        backends = {"by_jax": {"jax"}, "xla_calls": {"jax"}, "by_tf": {"tensorflow"}, "by_torch": {"torch"}}
        assert needed <= {"blockcell", "keras", "numpy"} | backends.get(source.stem, set())
    elif _name(source) == "blockcell.convert.onnx_run":
        assert needed <= {"blockcell", "numpy", "onnx", "onnxruntime"}
    else:
        others = dict.fromkeys(("blockcell.convert.onnx", "blockcell.convert.onnx_graph"), "onnx")
        others |= {"blockcell.convert.hdf5": "h5py", "blockcell.convert.torch_run": "torch"}
        others |= {"blockcell.layers.shared": "typing_extensions", "blockcell.progress": "rich"}
        assert needed <= {"blockcell", "numpy", others.get(_name(source))}


@pytest.mark.parametrize("source", sorted(ROOT.glob("onnx_export/**/*.py")), ids=_name)
def test_onnx_export_imports_no_kernels(source):
    """It imports nothing private, and one module alone needs onnxruntime."""
    imported = {f"{module}.{name}" for module, name in _imported(source)}
    assert {name for name in imported if re.match(r"blockcell\b.*\._", name)} <= {"blockcell.__version__"}
    assert source.name == "runtime.py" or not any(name.partition(".")[0] == "onnxruntime" for name in imported)


USERS = {"layers": {"convert", "tensorflow", "torch", "onnx_export"}, "convert": {"keras", "tensorflow", "onnx_export"}}


@pytest.mark.parametrize(("package", "importers"), USERS.items())
def test_packages_import_the_interface(package, importers):
    """Its docstring says for whom it is and which modules it has, beside the names of the package."""
    text = ast.get_docstring(ast.parse((ROOT / "blockcell" / package / "__init__.py").read_text()))
    sentence = re.search(r"^The interface for (.*?) consists of (.*?)\.(?: [A-Z]|$)", text, re.MULTILINE | re.DOTALL)
    assert {*re.findall(r"``(\w+)``", sentence[1])} == importers
    modules = {_name(source) for source in PURE if _name(source).startswith(f"blockcell.{package}.")}
    interface = {f"blockcell.{package}.{name}" for name in re.findall(r"``(\w+)\.py``", sentence[2])}
    assert interface <= modules
    for source in PURE:
        if _name(source).removeprefix("blockcell.").partition(".")[0] in importers:
            imported = {name for module, part in _imported(source) for name in (module, f"{module}.{part}")}
            assert not imported & modules - interface, _name(source)


# ------------------------------------------------------------------------------------------- the map in CONTRIBUTING.md
SOURCES = {".py", ".pyi", ".pyx", ".pxd", ".h", ".c", ".js", ".html", ".css", ".yml"}
NEEDS_NO_NAME = {"__init__.py", "conftest.py"}


def _map_lines() -> dict[str, tuple[str, str]]:
    """Return each folder of the map, with its line and the docstring that lists its modules, or ""."""
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("\n## Map\n")[2].partition("\n## ")[0]
    lines = {}
    for folder, line in re.findall(r"^\| `([\w./]+/)` \| (.+) \|$", text, re.MULTILINE):
        package = ast.parse((ROOT / folder / "__init__.py").read_text()) if "`__init__.py`" in line else ast.Module([])
        lines[folder] = (line, ast.get_docstring(package) or "")
    return lines


def _named_in(folder: str, line: str, docstring: str) -> set[str]:
    """Return the paths of files that a line names, or a table in a docstring, whose rows stand below their folder."""
    names = {f"{folder}{name}" for name in re.findall(r"`([\w./*-]+\.(?:py|pyx|pxd|h|c|js|html|css|yml))`", line)}
    subfolder = ""
    table = re.search(r"^==+ +==+\n(.*)^==+ +==+$", docstring, re.DOTALL | re.MULTILINE)
    for row in table[1].splitlines() if table else ():
        if not row or row.startswith("===="):
            subfolder = ""
        elif start := re.match(r"``(\w+/)``", row):
            subfolder = start[1]
        names |= {f"{folder}{subfolder}{name}" for name in re.findall(r"``([\w.]+\.py)``", row)}
    return {name.removeprefix("./") for name in names}


def _tracked_sources() -> list[str]:
    return [str(path) for path in tracked_files() if path.suffix in SOURCES]


def _is_named(path: str, names: set[str]) -> bool:
    """Return whether a file has a name in the map, or is the C or the types of a file that has one."""
    if Path(path).suffix == ".pyi":
        path = f"pyx/{Path(path).stem}.pyx"
    variants = {path, f"{path[:-2]}.pxd"} if path.endswith(".h") else {path}
    return any(fnmatch(variant, name) for variant in variants for name in names)


def test_every_source_is_in_the_map():
    """The line of its folder, or the docstring of its package, has the file's name."""
    lines = _map_lines()
    names = {name for folder, line in lines.items() for name in _named_in(folder, *line)}
    names.add("tests/*/test_*.py")
    assert not [
        path for path in _tracked_sources() if Path(path).name not in NEEDS_NO_NAME and not _is_named(path, names)
    ]


def test_the_map_names_no_file_that_is_not_there():
    for folder, line in _map_lines().items():
        assert (ROOT / folder).is_dir()
        for path in re.findall(r"`([\w./]+/)`", line[0]):
            assert (ROOT / folder / path).is_dir(), f"{folder} has no {path}"
        if folder != "tests/":  # whose files stand in its folders
            for name in _named_in(folder, *line):
                assert any(ROOT.glob(name)), f"the map names {name}"


# ---------------------------------------------------------------------------------------------------------- other rules
ENGINE = [path for room in ("passes", "schedule", "product") for path in sorted(ROOT.glob(f"pyx/{room}/*.pxd"))]


@pytest.mark.parametrize("source", ENGINE, ids=lambda path: path.name)
def test_the_engine_names_no_cell(source):
    """Plans, passes and products know a cell by its traits; docstrings and comments may give examples."""
    code = re.sub(r"#.*", "", re.sub(r'""".*?"""', "", source.read_text(), flags=re.DOTALL))
    assert "cdef" in code
    assert not re.findall(r"lstm|gru|rnn|reset_?after", code, re.IGNORECASE)


COMPILED_ONCE = [path for path in sorted(ROOT.glob("pyx/_*.pyx")) if path.stem not in ("_engine", "_for_tests")]


@pytest.mark.parametrize("source", COMPILED_ONCE, ids=lambda path: path.name)
def test_modules_without_a_level_know_no_tile(source):
    """The tile's sizes differ between CPU levels, so plans are made by the engine, and other modules see its bytes."""
    code = re.sub(r"#.*", "", re.sub(r'""".*?"""', "", source.read_text(), flags=re.DOTALL))
    assert not re.findall(r"\b(?:ROWS|LINES|SUB_LINES|LATENCY_ROWS|product\.(?:tile|panels)|schedule\.plan)\b", code)


@pytest.mark.parametrize("source", sorted(ROOT.glob("pyx/**/*.p[yx][xd]")), ids=lambda path: path.name)
def test_kernels_use_no_c_interface_of_numpy(source):
    """Arrays come in through the buffer protocol.  Only what leads to the kernels is built against numpy, for speed: it
    looks at every array of every call and makes the results."""
    assert source.name in (
        "_args.pyx",
        "_layers.pyx",
        "_stream.pyx",
        "_training.pyx",
        "numpy_arrays.pxd",
    ) or not re.search(r"^\s*cimport numpy|^\s*from numpy\S* cimport", source.read_text(), re.MULTILINE)


def test_pages_say_what_ci_runs():
    """All commands of docs/development.md are in a workflow, and those of its first table in `make test-all`."""
    workflows = "".join(path.read_text() for path in sorted(ROOT.glob(".github/workflows/*.yml")))
    if not workflows:
        pytest.skip("not a checkout")
    page = (ROOT / "docs" / "development.md").read_text().partition("## Longer tests")[2]
    tables = [re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE) for table in page.split("For other CPUs")]
    assert [command for table in tables for command in table if command not in workflows] == [
        "python3.13t tools/freethreading.py"  # as the page says
    ]
    on_push = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    rows = re.findall(r"^\| `([^`]+)` \| (.*) \|$", page, re.MULTILINE)
    assert [command for command, text in rows if "on every push" in text and command not in on_push] == []
    makefile = (ROOT / "Makefile").read_text().partition("\ntest-all:")[2].partition("\n\n")[0]
    programs = {command.removeprefix("python ") for command in tables[0] if command.startswith("python ")}
    assert programs == set(re.findall(r"\(BIN\)/python (.*)", makefile))
    marks = {command.split()[2] for command in tables[0] if command.startswith("pytest -m ")}
    assert marks == set(re.findall(r"\w+", " ".join(re.findall(r" -m '?([^'\n]+)", makefile)))) - {"or"}


def test_ci_runs_the_oldest_versions_that_the_page_names():
    page = (ROOT / "docs" / "onnx.md").read_text()
    oldest = re.search(r"the oldest versions \((onnx .*), (onnxruntime .*), (numpy .*)\)", page)
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert oldest
    assert not [name for name in oldest.groups() if name.replace(" ", "==") not in workflow]


def test_tests_import_what_they_share_from_its_folders():
    """Test files import from `tests/lib`, `tests/golden`, `tools` and `benchmarks`, never from each other.

    None takes the time: a test that compares times fails on a busy machine; that is what benchmarks are for. It may
    sleep.
    """
    folders = [ROOT / name for name in ("tests/lib", "tests/golden", "tools", "benchmarks")]
    shared = {path.stem for folder in folders for path in folder.glob("*.py")}
    tests = {path.stem: path for path in ROOT.glob("tests/*/test_*.py")}
    assert not shared & set(tests)
    for name, path in tests.items():
        modules = {module for module, _ in _imported(path) - {("time", "sleep")}}
        assert not [each for each in modules if each.startswith("test_") or each in ("time", "timeit")], name


def test_every_test_is_in_a_folder():
    """That of its room, so that a part can be moved or run alone. `lib` has what tests share, `tools` programs."""
    assert [path.name for path in ROOT.glob("tests/*.py")] == ["conftest.py"]
    assert not [*ROOT.glob("tests/lib/test_*.py"), *ROOT.glob("tools/test_*.py")]


def test_classifiers_name_the_versions_that_are_tested():
    """Those that ci.yml tests with and wheels are built for, which are also built without a GIL."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    named = [line.split()[-1] for line in project["project"]["classifiers"] if "Python :: 3." in line]
    tested = re.search(r"python: \[(.*)\]", (ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert named == re.findall(r"[\d.]+", tested[1])
    wheels = [f"cp{name.replace('.', '')}-*" for name in named]
    assert [*wheels, "cp314t-*"] == project["tool"]["cibuildwheel"]["build"].split()


def test_source_distribution_can_be_built_from(tmp_path):
    """And has the same bytes a second later, with other permissions, if SOURCE_DATE_EPOCH says when it is from."""
    pytest.importorskip("setuptools")
    pytest.importorskip("Cython")
    built = []
    for umask in ("022", "077"):
        command = [
            sys.executable,
            "setup.py",
            "-q",
            "egg_info",
            "-e",
            str(tmp_path),
            "sdist",
            "-d",
            str(tmp_path / umask),
        ]
        environment = os.environ | {"SOURCE_DATE_EPOCH": "1800000000"}
        subprocess.run(command, cwd=ROOT, env=environment, umask=int(umask, 8), check=True, capture_output=True)
        built += (tmp_path / umask).glob("*.tar.gz")
    first, second = built
    assert first.read_bytes() == second.read_bytes()
    with tarfile.open(first) as archive:
        assert {member.mtime for member in archive} == {1800000000}
        packed = {name.partition("/")[2] for name in archive.getnames()}
    wanted = [
        *(path for path in ROOT.glob("pyx/**/*") if path.is_file()),
        *ROOT.glob("blockcell/*.py*"),
        *ROOT.glob("blockcell/*/*.py"),
        *ROOT.glob("tests/**/*.py"),
        *ROOT.glob("tools/*.py"),
        ROOT / "LICENSE",
    ]
    assert {path.relative_to(ROOT).as_posix() for path in wanted} <= packed
    assert not {name for name in packed if name.endswith((".so", ".pyc", ".c"))} - {"tools/malloc_shim.c"}
