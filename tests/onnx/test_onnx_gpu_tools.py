"""What the benchmarks for GPUs read out of profiles, logs and other programs, which needs no GPU to test."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from placement import left, left_in_loops

from onnx_export import runtime, verification

PATHS = [*sys.path]
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import dispatches  # noqa: E402
import gpu_check  # noqa: E402

sys.path[:] = PATHS  # to which they add this checkout, which need not be where the package is


# ------------------------------------------------------------------------------------------------------------- profiles
def event(name, op=None, provider="WebGpu", ts=0, cat="Node"):
    args = {"op_name": op, "provider": f"{provider}ExecutionProvider"} if op else {}
    return {"cat": cat, "name": name, "ts": ts, "dur": 1, "args": args}


def run(start, steps):
    """A Scan's: two nodes a step on the GPU and one on the CPU, and copies around it."""
    step = [("t", "Tanh"), ("m", "Mul"), ("i", "Identity", "CPU")]
    nodes = [
        event("a_kernel_time", "MatMul"),
        event("Memcpy_1_kernel_time", "MemcpyToHost"),
        *[event(f"{name}_kernel_time", *what) for name, *what in step * steps],
        event("scan_kernel_time", "Scan", "CPU"),
        event("Memcpy_2_kernel_time", "MemcpyFromHost"),
        event("Memcpy_3_kernel_time", "MemcpyFromHost"),
        event("less_kernel_time", "Less", "CPU"),
        event("more_kernel_time", "Less", "CPU"),
    ]
    others = [event("a_fence_before", "MatMul"), event("t&Tanh&Tanh", cat="Api"), event("model_run", cat="Session")]
    others[-1]["ts"] = start
    return [each | {"ts": start + k} for k, each in enumerate([*nodes, *others[:-1]])] + others[-1:]


def test_the_last_run_of_a_profile_is_counted():
    session = event("session_initialization", cat="Session")
    counts, on_cpu = dispatches.count_nodes([session, *run(100, steps=9), *run(200, steps=3)])
    assert counts == {"nodes": 4 + 3 * 3, "to the GPU": 2, "from the GPU": 1}
    assert on_cpu == {"Scan": 1, "Less": 2, "Identity": 1}


def test_a_row_tells_steps_from_the_rest():
    row = dispatches.table_row("op", "scan", lambda case, form, T: dispatches.count_nodes(run(0, T)))
    expected = ["op", "scan", "Identity, Less 2, Scan", "3", "4", "0", "2", "0", "1"]
    assert [*row.values()] == expected

    def fail(case, form, T):
        raise RuntimeError("no kernel; and more\nthan that")

    failed = dispatches.table_row("op", "native", fail)
    heads, _, *lines = dispatches.table([failed, row]).splitlines()
    assert [cell.strip() for cell in heads.split("|")[1:-1]] == [*row]
    assert [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines] == [
        ["op", "native", "no kernel", *[""] * 6],
        expected,
    ]


@pytest.mark.parametrize(
    ("case", "form", "there", "back"),
    [  # states and rows, as vkCmdCopyBuffer was counted on both packages; a Loop also sends the number of the step
        ("BlockLSTM", "scan", 2 + 1, 2 + 6),
        ("BlockLSTM", "loop", 2 + 1, 2 + 6),
        ("BlockLSTM", "unroll", 0, 0),
        ("block_gru", "scan", 1 + 2, 1 + 4),
        ("block_gru", "loop", 1 + 1, 1 + 4),
        ("block_gru_reset_after", "scan", 1 + 2, 1 + 5),
        ("block_gru_reset_after_grad", "scan", 1 + 3, 1 + 2),
        ("BlockLSTMGrad", "scan", 2 + 5, 2 + 1),
        ("BlockLSTMGrad", "loop", 2 + 1, 2 + 1),
        ("LSTM layer", "scan", 2 + 1, 2 + 2),
        ("LSTM layer, training", "scan", 10, 11),
    ],
)
def test_trips_of_a_loop(case, form, there, back):
    assert dispatches.count_copies(dispatches.build_model(case, form, 3)) == (there, back)


@pytest.mark.parametrize(("case", "form"), [("BlockLSTMGrad", "scan"), ("block_gru_grad", "loop")])
def test_a_profile_and_the_list_of_nodes_agree(case, form):
    """On the CPU, where onnxruntime makes no other nodes of these."""
    T = 3
    counts, on_cpu = dispatches.count_by_profile(case, form, T, "cpu")
    listed, _ = dispatches.count_by_list(case, form, T)
    model = dispatches.build_model(case, form, T)
    assert counts == listed == {"nodes": len(left(model)) + 2 * len(left_in_loops(model))}
    assert len(left_in_loops(model)) in (8, 17)
    assert on_cpu == {"all": 1}


def test_what_native_code_writes_is_logged(capfd):
    assert dispatches.capture_log(lambda: os.write(2, b"Starting program")) == (16, "Starting program")
    os.write(2, b"afterwards")
    assert capfd.readouterr().err == "afterwards"


# ------------------------------------------------------------------------------------------------------------- adapters
def summary(*devices):
    """As vulkaninfo --summary prints it, shortened."""
    text = "VULKANINFO\n==========\n\nVulkan Instance Version: 1.3.239\n\nDevices:\n========\n"
    for k, (kind, name, driver, info) in enumerate(devices):
        facts = {"apiVersion": "1.3.0", "deviceType": f"PHYSICAL_DEVICE_TYPE_{kind}", "deviceName": name}
        facts |= {"driverID": "DRIVER_ID_X", "driverName": driver, "driverInfo": info}
        text += f"GPU{k}:\n" + "".join(f"\t{key:<18} = {value}\n" for key, value in facts.items())
    return text


SWIFTSHADER = "CPU", "SwiftShader Device (Subzero)", "SwiftShader driver", ""
LLVMPIPE = "CPU", "llvmpipe (LLVM 15.0.6, 256 bits)", "llvmpipe", "Mesa 25.0.7"
REAL = "DISCRETE_GPU", "NVIDIA L4", "NVIDIA", "550.54.15"


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([], None),
        ([SWIFTSHADER], ("SwiftShader Device (Subzero), SwiftShader driver", True)),
        ([LLVMPIPE], ("llvmpipe (LLVM 15.0.6, 256 bits), llvmpipe Mesa 25.0.7", True)),
        ([LLVMPIPE, REAL], ("NVIDIA L4, NVIDIA 550.54.15", False)),
        ([REAL, ("INTEGRATED_GPU", "A", "B", "1")], ("NVIDIA L4, NVIDIA 550.54.15 or A, B 1", False)),
    ],
)
def test_vulkan_devices(found, expected):
    assert gpu_check.devices(summary(*found)) == expected


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, ("unknown: install vulkan-tools", None)),
        ({"VK_ICD_FILENAMES": "/a/vk_swiftshader_icd.json"}, ("/a/vk_swiftshader_icd.json", True)),
        ({"VK_DRIVER_FILES": "/a/lvp_icd.x86_64.json"}, ("/a/lvp_icd.x86_64.json", True)),
        ({"VK_ICD_FILENAMES": "/a/nvidia_icd.json"}, ("/a/nvidia_icd.json", None)),
    ],
)
def test_adapter_without_vulkaninfo(monkeypatch, variables, expected):
    monkeypatch.setattr(gpu_check.shutil, "which", lambda name: None)
    for name in ("VK_ICD_FILENAMES", "VK_DRIVER_FILES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert gpu_check.adapter() == expected


def test_adapter_by_vulkaninfo(monkeypatch, tmp_path):
    program = tmp_path / "vulkaninfo"
    program.write_text(f"#!/bin/sh\n[ \"$1\" = --summary ] && cat <<'END'\n{summary(LLVMPIPE)}\nEND\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert gpu_check.adapter() == ("llvmpipe (LLVM 15.0.6, 256 bits), llvmpipe Mesa 25.0.7", True)


# ------------------------------------------------------------------------------------------------------------ providers
@pytest.mark.parametrize(
    ("here", "asked", "expected"),
    [
        (["cpu", "cuda", "webgpu"], None, "cuda"),
        (["cpu", "webgpu"], None, "webgpu"),
        (["cpu", "webgpu"], "webgpu", "webgpu"),
        (["cpu"], "cpu", "cpu"),
        (["cpu"], None, "provider 'cuda': install it\nprovider 'webgpu': install it"),
        (["cpu"], "webgpu", "provider 'webgpu': install it"),
    ],
)
def test_provider(monkeypatch, here, asked, expected):
    """The one that is chosen, or what the program says at its end."""
    monkeypatch.setattr(runtime, "why_not", lambda provider: "" if provider in here else "install it")
    try:
        found = gpu_check.choose_provider(asked)
    except SystemExit as end:
        found = end.code
    assert found == expected


@pytest.mark.parametrize(
    ("provider", "adapter", "what"),
    [("cpu", None, "the CPU"), ("webgpu", ("llvmpipe", True), "llvmpipe"), ("webgpu", ("unknown", None), "unknown")],
)
def test_pages_are_for_gpus(monkeypatch, capsys, provider, adapter, what):
    """Elsewhere the output must be named, before anything runs."""
    monkeypatch.setattr(runtime, "why_not", lambda provider: "")
    monkeypatch.setattr(gpu_check, "adapter", lambda: adapter)
    monkeypatch.setattr(gpu_check, "check_results", None)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--provider", provider])
    with pytest.raises(SystemExit) as caught:
        gpu_check.main()
    assert caught.value.code == 2
    assert f"--output is needed where no GPU is known to compute; here it is {what}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "expected", "warned"),
    [
        (("L4", False), "webgpu.md", False),
        (("llvmpipe", True), "given.md", True),
        (("unknown", None), "given.md", False),
    ],
)
@pytest.mark.parametrize("ok", [True, False])
def test_page(monkeypatch, tmp_path, given, expected, warned, ok):
    rows = [["GRUBlockCell", "float32", "scan", "1e-7", "c", "ok"]]
    monkeypatch.setattr(runtime, "why_not", lambda provider: "" if provider == "webgpu" else "no")
    monkeypatch.setattr(gpu_check, "adapter", lambda: given)
    monkeypatch.setattr(gpu_check, "check_results", lambda provider: (rows, ok))
    monkeypatch.setattr(gpu_check, "time_forms", lambda *_: [["BlockLSTM", "scan", "7.25"]])
    monkeypatch.setattr(gpu_check, "PAGES", {"webgpu": tmp_path / "webgpu.md"})
    output = [] if given[1] is False else ["--output", str(tmp_path / "given.md")]
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--quick", *output])
    with pytest.raises(SystemExit) as caught:
        gpu_check.main()
    assert caught.value.code == (0 if ok else 1)
    (page,) = tmp_path.iterdir()
    text = page.read_text()
    assert page.name == expected
    assert text.startswith("# On a GPU, by WebGPU\n") and f"Vulkan device: {given[0]};" in text
    assert ("its times mean nothing" in text) == warned
    assert "| BlockLSTM | scan | 7.25 |" in text and "| GRUBlockCell | float32 | scan | 1e-7 | c | ok |" in text


def test_forms():
    """ONNX's own node where there is one."""
    assert gpu_check.forms_to_check("GRUBlockCell", "float32", "webgpu") == ["scan"]
    assert gpu_check.forms_to_check("BlockLSTM", "float32", "webgpu") == ["scan", "unroll", "loop", "native"]
    for what in [("BlockLSTM", "float16", "webgpu"), ("BlockLSTMGrad", "float32", "cuda")]:
        assert gpu_check.forms_to_check(*what) == ["scan", "unroll", "loop"]


@pytest.mark.parametrize(
    ("failure", "loop", "verdict"),
    [
        (RuntimeError("GRU would run on the CPU"), "native", "refused: GRU would run on the CPU"),
        (RuntimeError("Split would run on the CPU\nand more"), "scan", "RuntimeError: Split would run on the CPU"),
        (ValueError("bad"), "native", "ValueError: bad"),
    ],
)
def test_what_fails_is_told(monkeypatch, failure, loop, verdict):
    def fail(*args, **options):
        raise failure

    monkeypatch.setattr(verification, "compare", fail)
    assert gpu_check.check_case("block_gru", "float32", loop, "webgpu") == ("", "", verdict)


@pytest.mark.parametrize(("scale", "verdict"), [(1.0, "ok"), (1.001, "above 9.5e-07")])
def test_what_is_wrong_is_told(monkeypatch, scale, verdict):
    genuine = verification._results
    monkeypatch.setattr(verification, "_results", lambda *args: [scale * result for result in genuine(*args)])
    error, output, found = gpu_check.check_case("GRUBlockCell", "float32", "scan", "cpu")
    assert found == verdict and output in ("r", "u", "c", "h")
    assert (float(error) < 9.5e-7) == (scale == 1)


@pytest.mark.parametrize("form", ["scan", gpu_check.CAPTURED])
def test_times_on_the_cpu(monkeypatch, form):
    """A figure, or why there is none."""
    monkeypatch.setattr(gpu_check, "FORMS", [form])
    monkeypatch.setattr(gpu_check, "SECONDS", 0)
    monkeypatch.setattr(gpu_check, "prepare_torch", lambda *_: 1 / 0)
    rows = gpu_check.time_forms(3, [(8, 2)], "cpu")
    assert [row[0] for row in rows] == ["BlockLSTM", "", "block_gru", "", "block_gru_reset_after", ""]
    for row in rows[::2]:
        assert row[2] == "needs CUDA" if form == gpu_check.CAPTURED else float(row[2]) > 0
