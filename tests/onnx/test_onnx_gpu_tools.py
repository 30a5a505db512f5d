"""What benchmarks/gpu_check.py says of providers, results and failures, which needs no GPU to test."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from onnx_export import runtime, verification

PATHS = [*sys.path]
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import gpu_check  # noqa: E402

sys.path[:] = PATHS  # to which they add this checkout, which need not be where the package is


@pytest.mark.parametrize("ok", [True, False])
def test_page(monkeypatch, tmp_path, ok):
    """It has the largest error of a dtype, and every result that is out of bounds."""
    rows = [["BlockLSTM", "float32", form, error, "c", "ok"] for form, error in zip("abc", "121", strict=True)]
    rows += [["BlockLSTM", "float64", form, "", "", "RuntimeError"] for form in "ab"]
    monkeypatch.setattr(runtime, "why_not", lambda provider: "" if provider == "webgpu" else "no")
    monkeypatch.setattr(gpu_check, "check_results", lambda provider: (rows, ok))
    monkeypatch.setattr(gpu_check, "time_forms", lambda *_: [["BlockLSTM", "scan", "7.25"]])
    page = tmp_path / "new" / "page.md"
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--quick", "--output", str(page)])
    with pytest.raises(SystemExit) as caught:
        gpu_check.main()
    assert caught.value.code == (0 if ok else 1)
    text = page.read_text()
    assert text.startswith("# ONNX models on a GPU, by WebGPU: times and errors\n") and "Vulkan devices: " in text
    assert "| BlockLSTM | scan | 7.25 |" in text
    assert "\n3 of 5 results of an op, a dtype and a form are within bounds:\n" in text
    assert text.endswith(
        "| BlockLSTM | float32 | b | 2 | c | ok |\n"
        "| BlockLSTM | float64 | a |  |  | RuntimeError |\n"
        "| BlockLSTM | float64 | b |  |  | RuntimeError |\n"
    )


def test_what_fails_is_told(monkeypatch):
    def fail(*args, **options):
        raise RuntimeError("Split would run on the CPU\nand more")

    monkeypatch.setattr(verification, "compare", fail)
    verdict = "RuntimeError: Split would run on the CPU"
    assert gpu_check.check_case("block_gru", "float32", "scan", "webgpu") == ("", "", verdict)


@pytest.mark.parametrize(("scale", "verdict"), [(1.0, "ok"), (1.001, "above 9.5e-07")])
def test_what_is_wrong_is_told(monkeypatch, scale, verdict):
    genuine = verification._results
    monkeypatch.setattr(verification, "_results", lambda *args: [scale * result for result in genuine(*args)])
    error, output, found = gpu_check.check_case("GRUBlockCell", "float32", "scan", "cpu")
    assert found == verdict and output in ("r", "u", "c", "h")
    assert (float(error) < 9.5e-7) == (scale == 1)


def test_times_on_the_cpu(monkeypatch):
    """A figure, or why there is none."""
    monkeypatch.setattr(gpu_check, "FORMS", ["scan", gpu_check.CAPTURED])
    monkeypatch.setattr(gpu_check, "SECONDS", 0)
    monkeypatch.setattr(gpu_check, "prepare_torch", lambda *_: 1 / 0)
    rows = gpu_check.time_forms(3, [(8, 2)], "cpu")
    assert [row[0] for row in rows] == ["BlockLSTM", "", "block_gru", "block_gru_reset_after", ""]
    assert all(float(row[2]) > 0 for row in rows if row[0])
    assert {row[2] for row in rows if not row[0]} == {"ZeroDivisionError: division by zero"}
