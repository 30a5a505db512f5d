"""Damaged files, models and weights are refused in words, or read as what they were: `fuzz` makes and reads them.

`make test-all`: 100,000 of them, 10,000 of Keras' files, 100,000 of TensorFlow's, and 30,000 of its graphs with one
input of a node rewired or one whole number changed; takes about fifteen minutes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tf_files
from tf_cells import block, inputs
from tf_files import field, graph, node
from traced import peak

from blockcell import FormatError
from blockcell.tensorflow import open as opened

FUZZ = Path(__file__).parents[2] / "tools" / "fuzz.py"
BUDGET = {
    "npz": 30_000,
    "safetensors": 30_000,
    "from_torch": 5_000,
    "from_tf1": 5_000,
    "from_keras": 5_000,
    "from_onnx": 10_000,
    "link": 7_500,
    "session": 7_500,
}
KERAS = {"keras_files": 10_000}
TENSORFLOW = {"tf_checkpoint": 35_000, "tf_graph": 20_000, "tf_cells": 25_000, "tf_names": 20_000}
REWIRED = {"tf_rewired": 30_000}

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems have no such limits")


def check_fuzzer(target: str, seed: int, count: int, folder: Path) -> None:
    """Read mutants in a process of its own, which a mutant may end."""
    note = folder / "number"
    command = [sys.executable, "-W", "error", str(FUZZ), target, str(seed), str(count), str(note)]
    result = subprocess.run(command, capture_output=True, text=True)
    number = note.read_text().strip() if note.exists() else "none"
    outcome = f"{target}: mutant {number} ended with {result.returncode}"
    assert result.returncode == 0, f"{outcome}\n{result.stderr[-4000:]}"
    counts = json.loads(result.stdout.splitlines()[-1])  # onnxruntime may print before it
    done = f"{counts['refused']} refused, {counts['taken']} taken"
    most = f"at most {counts['seconds']:.2f} s of the CPU's time and {counts['mb']:.0f} MB"
    print(f"{target}: {count} mutants, {done}; {most}")
    assert counts["refused"] + counts["taken"] == count
    assert min(counts["refused"], counts["taken"]) > count / 200, "hardly any of one kind: the mutants show nothing"


def test_budget():
    assert sum(BUDGET.values()) == sum(TENSORFLOW.values()) == 100_000


@pytest.mark.parametrize("target", BUDGET | KERAS | TENSORFLOW | REWIRED)
def test_some(target, tmp_path, seed):
    check_fuzzer(target, seed, 50 if target in REWIRED else 100, tmp_path)  # whose mutants take longest


@pytest.mark.slow
@pytest.mark.parametrize("target", BUDGET | KERAS | TENSORFLOW | REWIRED)
def test_many(target, tmp_path, seed):
    check_fuzzer(target, seed, (BUDGET | KERAS | TENSORFLOW | REWIRED)[target], tmp_path)


INSPECT = """
import sys, time
from blockcell.command import main
status = main(["inspect", sys.argv[1]])
peak = open("/proc/self/status").read().split("VmHWM:")[1].split()[0]
print(status, time.process_time(), int(peak) / 1024)
"""


@pytest.mark.slow
def test_a_package_of_190_mb_is_inspected_in_place(tmp_path):
    """As large as DeepSpeech's, with an LSTM of 2048 cells: 2 s of the CPU's time and 100 MB, all that Python has."""
    g = np.random.default_rng(0)
    shapes = {"kernel": (4096, 8192), "bias": (8192,), "dense": (7000, 2048)}
    arrays = {name: g.standard_normal(shape, np.float32) * np.float32(0.02) for name, shape in shapes.items()}
    nodes = [tf_files.immutable(name, "float32", shape) for name, shape in shapes.items()]
    nodes += [*inputs(), block("BlockLSTM", "cell", {"w": "kernel", "b": "bias"}, cell_clip=0.0)]
    regions = {name: array.tobytes() for name, array in arrays.items()}
    (tmp_path / "large.pbmm").write_bytes(tf_files.package(regions | {".": graph(*nodes)}))
    command = [sys.executable, "-c", INSPECT, str(tmp_path / "large.pbmm")]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    *shown, last = result.stdout.splitlines()
    status, seconds, megabytes = map(float, last.split())
    size = (tmp_path / "large.pbmm").stat().st_size / 2**20
    print(f"a package of {size:.0f} MB: {seconds:.2f} s of the CPU's time and {megabytes:.0f} MB at most")
    assert status == 0 and any("BlockLSTM" in line and " ok" in line for line in shown)
    assert size > 180 and seconds < 2 and megabytes < 100


NAMES = [f"{k:x}" for k in range(2**18)]
ARGUMENTS = b"".join(field(2, field(1, name)) for name in NAMES[: 2**15])
EMPTY = field(1, 1) + field(2, tf_files.shape(0))
TINY = {  # what takes few bytes in a file, and more in memory, as often as a file may have it or more
    "nodes.pb": lambda: graph(*(node(name, "A") for name in NAMES)),
    "constants.pb": lambda: graph(*(tf_files.constant(name, field(1, 1)) for name in NAMES)),
    "functions.pb": lambda: graph(node("a", "A")) + field(2, b"".join(field(1, field(1, field(1, k))) for k in NAMES)),
    "arguments.pb": lambda: graph(node("a", "A")) + field(2, b"".join(
        field(1, field(1, field(1, name) + ARGUMENTS)) for name in NAMES[:8])),
    "inputs.pb": lambda: graph(node("a", "A", [""] * 2**20)),
    "attributes.pb": lambda: graph(node("a", "A") + b"".join(field(5, field(1, name)) for name in NAMES)),
    "lists.pb": lambda: graph(node("a", "A", list=field(1, field(9, b"") * 2**16))),
    "fields.pb": lambda: graph(node("a", "A")) + field(15, b"") * 2**20,
    "varints.pb": lambda: graph(tf_files.constant("a", tf_files.tensor("int64", (2**22,), field(10, bytes(2**22))))),
    "floats.pb": lambda: graph(tf_files.constant("a", tf_files.tensor("float32", (2**20,), field(5, 0.0) * 2**20))),
    "saved_model.pb": lambda: field(2, field(2, b"")) * 2**20,
    "regions.pbmm": lambda: b"".join(field(1, field(2, name)) for name in NAMES) + bytes(8),
    "text.pbtxt": lambda: b"".join(b"node{name:'%s'op:'A'}" % name.encode() for name in NAMES),
    "entries.index": lambda: tf_files.table(
        {b"": field(1, 1)} | {name.encode(): EMPTY for name in sorted(NAMES[: 2**16])}, 2**20),
    "old": lambda: tf_files.table({b"": field(1, b"".join(field(1, field(1, name) + field(3, 1)) for name in NAMES))}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_memory_is_bounded_by_the_file(name, tmp_path):
    """Four times the file and 64 MB, whatever of it is asked for."""
    content = TINY[name]()
    (tmp_path / name).write_bytes(content)

    def read():
        try:
            model = opened(tmp_path / name)
            for part in model.graphs:
                for nodes in [part.nodes, *(function.nodes for function in part.functions.values())]:
                    for node_read in nodes.values():
                        assert node_read.inputs is not None and node_read.attrs is not None
            assert np.sum([model.variables[key].size for key in model.variables]) >= 0 and repr(model)
        except (FormatError, FileNotFoundError) as error:
            return error
        return model

    assert peak(read)[1] < 4 * len(content) + 2**26
