"""`verify` and its command: they find what is wrong, and where."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from fresh import python
from refusals import refusal

import onnx_export
from blockcell.command import cli
from blockcell.optable import OPS
from onnx_export import runtime, verification

SMALL = {"T": 3, "B": 2, "I": 4, "H": 5}
MISSING = [name for name in ("matplotlib", "rich", "sklearn") if importlib.util.find_spec(name) is None]
DRAWS = "matplotlib" not in MISSING


@pytest.fixture(scope="module")
def report():
    return onnx_export.verify(sizes=SMALL, dtypes=["float32", "float64"])


def test_every_output_everywhere(report):
    assert report.ok
    assert report.providers[0] == "blockcell" and {"cpu", "reference"} <= set(report.providers)
    found = {(row.op, row.dtype, row.provider, row.output) for row in report.rows}
    assert found == {
        (op, dtype, provider, tensor.name)
        for op in OPS
        for dtype in ("float32", "float64")
        for provider in report.providers
        for tensor in OPS[op].outputs
    }
    assert len(report.rows) == len(found)
    assert any(row.error > 0 for row in report.rows)
    assert all(row.ok == (row.error <= row.bound) for row in report.rows)


def test_table(report):
    lines = report.table().splitlines()
    assert lines[0].split() == ["op", "on", "error", "in"]
    assert [line.split()[0] for line in lines[1:] if not line.startswith(" ")] == [op for op in OPS for _ in range(2)]
    assert len(lines) == 1 + len(OPS) * 2 * len(report.providers)
    assert all(line.endswith("ok") for line in lines[1:]) and max(map(len, lines)) < 80


@pytest.mark.skipif(not DRAWS, reason="matplotlib is not installed")
def test_plot(report, tmp_path):
    report.plot(tmp_path / "errors.png")
    assert (tmp_path / "errors.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("wrong", [3e-6, np.nan])
@pytest.mark.parametrize("provider", ["blockcell", "cpu", "reference"])
def test_what_is_wrong_is_found(provider, wrong, monkeypatch, tmp_path, capsys):
    """One entry of one output, on one of them: by the report, the table, the command and its exit status."""
    genuine = verification._results

    def spoilt(asked, op, *rest):
        results = [np.array(result) for result in genuine(asked, op, *rest)]
        if (asked, op.name) == (provider, "LSTMBlockCell"):
            results[3][1, 2] += wrong
        return results

    monkeypatch.setattr(verification, "_results", spoilt)
    report = onnx_export.verify(["GRUBlockCell", "LSTMBlockCell"], sizes=SMALL, dtypes="float32")
    assert not report.ok
    (row,) = (row for row in report.rows if not row.ok)
    assert (row.op, row.provider, row.output, row.at) == ("LSTMBlockCell", provider, "o", (1, 2))
    assert re.findall(r"(\w+) +\S+ of \d+ +o\[1,2\] +FAILED$", report.table(), re.MULTILINE) == [provider]
    monkeypatch.chdir(tmp_path)
    command = ["verify", "LSTMBlockCell", "--dtypes", "float32", "--sizes", "B=2,H=5"]
    assert cli.main(command) == 1
    assert f"FAILED: LSTMBlockCell on {provider}" in capsys.readouterr().out
    assert cli.main([*command, "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert [row["output"] for row in facts["rows"] if not row["ok"]] == ["o"]
    assert [path.name for path in tmp_path.iterdir()] == [facts["picture"]] * DRAWS


def test_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = ["verify", "block_gru", "--sizes", "T=2,B=1", "T=3,H=4", "--providers", "cpu", "--output", "e.png"]
    assert cli.main(command) == 0
    out = capsys.readouterr().out
    cases = [line.split()[:3] for line in out.splitlines() if line.startswith("    float")]
    dtypes = "float32", "float64", "float16"
    assert cases == [[dtype, *sizes] for dtype in dtypes for sizes in (["T2", "B1"], ["T3", "B5"])]
    assert "reference" not in out
    assert (tmp_path / "e.png").exists() == DRAWS


@pytest.mark.parametrize("spoilt", [False, True])
def test_command_without_matplotlib(spoilt, tmp_path, monkeypatch, capsys):
    """No picture, and a line that says so; the exit status is that of the comparison."""
    find_spec, genuine = importlib.util.find_spec, verification._results
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find_spec(name))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr(verification, "_results", lambda *given: [a + spoilt for a in genuine(*given)])
    monkeypatch.chdir(tmp_path)
    command = ["verify", "GRUBlockCell", "--providers", "cpu", "--dtypes", "float32"]
    assert cli.main(command) == spoilt
    out, err = capsys.readouterr()
    assert not err and out.splitlines()[-2:] == [
        "There is no picture, as matplotlib is not installed: pip install matplotlib",
        "FAILED: GRUBlockCell on blockcell, GRUBlockCell on cpu" if spoilt else "All 8 errors are within their bounds.",
    ]
    assert cli.main([*command, "--json"]) == spoilt
    assert json.loads(capsys.readouterr().out)["picture"] is None
    assert not [*tmp_path.iterdir()]


# ----------------------------------------------------------------------------------------------- packages that it needs
@pytest.mark.parametrize("package", ["onnx", "onnxruntime"])
@pytest.mark.parametrize(
    "code", ["import onnx_export", "from onnx_export import Session, verify; verify('GRUBlockCell')"]
)
def test_missing_package(code, package):
    result = python(f"import sys; sys.modules['{package}'] = None\n{code}")
    if code == "import onnx_export" and package == "onnxruntime":  # graphs can be made without it
        assert result.returncode == 0
    else:
        said = f"onnx_export needs {package}, which is not installed: pip install {package}"
        assert result.stderr.splitlines()[-1] == f"ModuleNotFoundError: {said}"


def test_another_missing_module_is_not_taken_for_onnx():
    result = python("import sys; sys.modules['onnx.inliner'] = None\nimport onnx_export")
    assert "onnx.inliner" in result.stderr and "pip install" not in result.stderr


DEMO = pytest.param("demo", marks=pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} not installed"))


@pytest.mark.parametrize("command", ["verify", DEMO])
@pytest.mark.parametrize("other", ["onnx_export.py", "onnx_export/__init__.py"])
def test_another_onnx_export(other, command, tmp_path, monkeypatch):
    """One in the working directory is named, and not run."""
    (tmp_path / other).parent.mkdir(exist_ok=True)
    (tmp_path / other).write_text("raise SystemExit('it was run')")
    monkeypatch.chdir(tmp_path)
    result = python(f"import sys; from blockcell.command import main; sys.exit(main(['{command}']))")
    said = f"blockcell {command}: ImportError: onnx_export is {tmp_path / other}, which hides blockcell's own, "
    assert result.returncode == 1 and not result.stdout
    assert result.stderr == f"{said}{Path(onnx_export.__file__)}: rename it, or run blockcell elsewhere\n"


def test_the_command_knows_all_providers():
    assert tuple(cli.RUNTIMES) == verification.RUNTIMES


@pytest.mark.parametrize("option", ["--providers", "--provider"])
@pytest.mark.parametrize("provider", ["cuda", "webgpu"])
def test_a_provider_that_is_not_here(option, provider, monkeypatch, tmp_path, capsys):
    """One line, which says what to install; and no picture."""
    monkeypatch.setattr(runtime, "why_not", lambda provider: f"{provider} is missing: install it")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["verify", option, provider]) == 1
    out, err = capsys.readouterr()
    line = f"blockcell verify: RuntimeError: provider is '{provider}', but {provider} is missing: install it\n"
    assert (out, err) == ("", line)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    "words", [["LSTM"], ["--providers", "tpu"], ["--sizes", "T=x"], ["--sizes", "N=3"], ["--dtypes", "half"]]
)
def test_wrong_usage_of_the_command(words):
    with pytest.raises(SystemExit) as caught:
        cli.main(["verify", *words])
    assert caught.value.code == 2


def test_mistakes():
    for options, said in (
        ({"ops": "LSTM"}, "op is 'LSTM'; expected one of GRUBlockCell"),
        ({"dtypes": ["int32"]}, "dtype is 'int32'; expected float32"),
        ({"providers": ["tpu"]}, "provider is 'tpu'; expected one of cpu, cuda, webgpu, reference"),
        ({"ops": "GRUBlockCell", "sizes": {"N": 3}}, "sizes has 'N'"),
    ):
        with refusal(f"ValueError: {said}"):
            onnx_export.verify(**options)


def test_numbers_tell_gates_and_states_apart():
    """Saved states are the forward op's, and no two arguments are the same."""
    for op in OPS.values():
        values = [
            v for v in verification.numbers(op, SMALL, np.dtype(np.float64)).values() if isinstance(v, np.ndarray)
        ]
        assert len(values) == len(op.inputs)
        for k, value in enumerate(values):
            assert not any(value.shape == other.shape and (value == other).all() for other in values[:k])
