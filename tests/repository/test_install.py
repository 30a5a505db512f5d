"""What is said to those who have not installed or built what they need."""

import os
import re
import shutil
import sysconfig
import tomllib
from pathlib import Path

import pytest
from fresh import run
from tracked import tracked_files

import blockcell

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("module", ["blockcell", "blockcell.layers.shared", "blockcell.torch", "onnx_export"])
def test_a_checkout_that_is_not_built(tmp_path, monkeypatch, module):
    """Whoever imports from it is told so, whether or not blockcell is installed elsewhere."""
    for package in ("blockcell", "onnx_export"):
        ignored = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(ROOT / package, tmp_path / package, ignore=ignored)
    monkeypatch.chdir(tmp_path)
    # Without `site`, since the finder of an editable install would find the native code of the other folder.
    packages = os.pathsep.join([sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"], str(ROOT)])
    result = run(["-S", "-c", f"import {module}"], 1, {"PYTHONPATH": packages})
    assert result.returncode == 1
    message = result.stderr.splitlines()[-1]
    assert message.startswith(f"ImportError: {tmp_path / 'blockcell'} is blockcell's source without native code for ")
    assert "run Python in another folder" in message and message.endswith("or build it here with `pip install -e .`")
    assert "circular" not in result.stderr
    frozen = run(["-S", "-c", f"import sys; sys.frozen = True; import {module}"], 1, {"PYTHONPATH": packages})
    message = frozen.stderr.splitlines()[-1]
    assert message.startswith("ImportError: this program was frozen without the compiled modules of blockcell. PyInst")
    assert "--collect-submodules blockcell" in message and "pip install" not in message


def test_another_error_of_native_code_is_not_taken_for_that(tmp_path, monkeypatch):
    shutil.copytree(ROOT / "blockcell", tmp_path / "blockcell", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (tmp_path / "blockcell" / "_cpu.py").write_text("import no_such_library")
    monkeypatch.chdir(tmp_path)
    assert run(["-c", "import blockcell"], 1, {}).stderr.endswith("No module named 'no_such_library'\n")


# No package index has blockcell, so what one got by that name would be somebody else's.
IS_PUBLISHED = False
NOT_PUBLISHED = re.compile(r"pip install[^`\n]*(?<!checkout of)[\s\"']blockcell\b|[\"'`]blockcell\[")
PUBLISHED = re.compile(r"pip install \"?\.\[|not on a package index|no package index has it")
WRONG = PUBLISHED if IS_PUBLISHED else NOT_PUBLISHED


def test_nobody_is_told_to_install_what_is_not_published():
    """And once it is, nobody to do without."""
    extras = {
        "pyproject.toml",
        "tools/packages.py",
        "tests/repository/test_install.py",
    }  # of the package that is there already
    found = []
    for name in map(str, tracked_files()):
        path = ROOT / name
        if name not in extras and path.is_file() and path.suffix in {".md", ".py", ".pyx", ".pxd", ".yml", ".toml", ""}:
            found += [f"{name}: {line.strip()}" for line in path.read_text().splitlines() if WRONG.search(line)]
    assert not found
    examples = ('pip install "blockcell[onnx]"', "`pip install blockcell onnx`", 'pip install ".[onnx]"')
    assert [bool(NOT_PUBLISHED.search(line)) for line in examples] == [True, True, False]
    assert [bool(PUBLISHED.search(line)) for line in examples] == [False, False, True]


def test_version_and_addresses_are_the_same_everywhere():
    version, project = blockcell.__version__, tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    cited = dict(re.findall(r"^([\w-]+): (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE))
    assert cited["version"] == version and cited["license"] == project["license"]
    assert f"\n## [{version}] - " in (ROOT / "CHANGELOG.md").read_text()
    assert cited.get("repository-code") == project.get("urls", {}).get("Repository")


def test_packages_that_messages_name():
    """Each is one that an extra of pyproject.toml installs. An extra itself would compile blockcell again."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    known = {re.split(r"[>\[;]", package)[0] for packages in extras.values() for package in packages}
    paths = [path for package in ("blockcell", "onnx_export") for path in (ROOT / package).rglob("*.py")]
    text = "\n".join(path.read_text() for path in paths)
    named = set(" ".join(re.findall(r"pip install ([a-z\d -]+)", text)).split())
    named |= set(re.findall(r'"([\w-]+)"', "".join(re.findall(r" require\((.*)\)", text))))
    assert {"h5py", "onnx", "onnxruntime-ep-webgpu", "torch", "matplotlib", "scikit-learn"} <= named
    assert named - {"-e"} <= known
