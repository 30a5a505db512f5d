"""What TensorFlow wrote is read as TensorFlow reads it; everything else is a FormatError that names the file."""

from __future__ import annotations

import json
import os
import re
import struct
from pathlib import Path

import numpy as np
import pytest
import tf_files
from fresh import printed
from tf_files import constant, entry, field, graph, node, shape, tensor, varint, write_checkpoint
from traced import peak

import blockcell.tensorflow
from blockcell import FormatError
from blockcell.tensorflow import checkpoint, crc32c, graphs
from blockcell.tensorflow import open as opened
from blockcell.tensorflow.checkpoint import FULL, Slice


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    """Return a folder with TensorFlow's files, and what TensorFlow reads from them."""
    folder = tmp_path_factory.mktemp("golden")
    return folder, tf_files.unpack(folder)


# -------------------------------------------------------------------------------------------------- TensorFlow's files
PATHS = {
    "v2": ["v2", "v2/model.ckpt", "v2/model.ckpt.index", "v2/model.ckpt.data-00001-of-00002", "v2/model.ckpt.meta"],
    "saved": ["saved", "saved/saved_model.pb", "saved/variables/variables"],
    "objects": ["objects", "objects/ckpt-1"],
}
SKIPPED = {"v2": {"text": "string"}, "objects": {"_CHECKPOINTABLE_OBJECT_GRAPH": "string"}}


@pytest.mark.parametrize("name, path", [(name, path) for name in PATHS for path in PATHS[name]])
def test_variables(golden, name, path):
    folder, values = golden
    model = opened(folder / path)
    expected = {
        key.removeprefix(f"variable/{name}/"): value
        for key, value in values.items()
        if key.startswith(f"variable/{name}/")
    }
    left = {"save_counter"} if name == "objects" else set()
    assert set(model.variables) - left == {key.removesuffix("/.ATTRIBUTES/VARIABLE_VALUE") for key in expected}
    for key, value in expected.items():
        array = model.variables[key]
        np.testing.assert_array_equal(array, value, strict=True, err_msg=key)
        assert array.tobytes() == value.tobytes() and not array.flags.writeable
        stored = model.variables.stored[model.variables.name_of(key)]
        assert stored.shape == value.shape and stored.dtype in (value.dtype.name, "bfloat16")
    assert model.variables.skipped == SKIPPED.get(name, {})
    assert model.path == str(folder / path) and not model.frozen


def test_a_mapping_that_tells_what_it_has(golden):
    variables = opened(golden[0] / "v2").variables
    assert "scope/kernel" in variables and "nothing" not in variables and len(variables) == len(list(variables)) == 16
    lines = repr(variables).split("\n    ")
    assert lines[0] == "<16 variables>"
    assert {"scope/kernel  float32 [3, 8]", "text  string, not read", "scope/bfloat16  bfloat16 [2, 3]"} <= {*lines}
    assert repr(variables) in repr(opened(golden[0] / "v2"))
    with pytest.raises(KeyError, match="text is of string, which is not read"):
        variables["text"]
    with pytest.raises(KeyError, match="nothing"):
        variables["nothing"]


@pytest.mark.parametrize("path", ["graph.pb", "graph.pbtxt"])
def test_constants(golden, path):
    folder, values = golden
    model = opened(folder / path)
    expected = {key.removeprefix("constant/"): value for key, value in values.items() if key.startswith("constant/")}
    assert model.frozen and set(model.variables) == set(expected) and model.variables.skipped == {"text": "string"}
    for key, value in expected.items():
        np.testing.assert_array_equal(model.variables[key], value, strict=True, err_msg=key)
        assert model.variables[key].tobytes() == value.tobytes(), key


def shown(value):
    """Return an attribute as the golden file has it."""
    if isinstance(value, graphs.Called):
        return {"name": value.name, "attrs": {}}
    if isinstance(value, graphs.Tensor):
        return {"dtype": value.dtype, "shape": list(value.shape)}
    return [shown(item) for item in value] if isinstance(value, (list, tuple)) else value


def described(nodes):
    return {node.name: [node.op, list(node.inputs), {key: shown(value) for key, value in node.attrs.items()}]
            for node in nodes.values()}  # fmt: skip


@pytest.mark.parametrize("path", ["graph.pb", "graph.pbtxt", "v2/model.ckpt.meta", "saved/saved_model.pb"])
def test_nodes(golden, path):
    folder, values = golden
    expected = json.loads(values[f"nodes/{path.removesuffix('txt')}"].tobytes())
    graphs = opened(folder / path).graphs
    assert len(graphs) == len(expected)
    for read_graph, wanted in zip(graphs, expected, strict=True):
        assert described(read_graph.nodes) == wanted["nodes"] and list(read_graph.nodes) == list(wanted["nodes"])
        assert set(read_graph.functions) == set(wanted["functions"])
        for name, function in read_graph.functions.items():
            expected_body = wanted["functions"][name]
            assert function.name == name and function.returned == expected_body["returned"]
            assert list(function.inputs) == expected_body["inputs"]
            assert list(function.outputs) == expected_body["outputs"]
            assert described(function.nodes) == expected_body["nodes"]
    if path.startswith("graph.pb"):
        assert {"While", "StatelessWhile"} & {node.op for node in graphs[0].nodes.values()} and graphs[0].functions


def test_graphs_of_a_checkpoint_are_beside_it(golden):
    folder, _ = golden
    (read_graph,) = opened(folder / "v2" / "model.ckpt").graphs
    assert "scope/kernel" in read_graph.nodes and read_graph.tags == ()
    assert opened(folder / "objects").graphs == []
    (saved,) = opened(folder / "saved").graphs
    assert saved.tags == ("serve",) and repr(saved).startswith("<graph: serve: ")
    assert repr(read_graph.nodes["scope/kernel"]) == "<VarHandleOp 'scope/kernel'>"


# ---------------------------------------------------------------------------------------- what TensorFlow is not asked
def test_memory_mapped_package(tmp_path):
    """Tensors are where they lie in the file."""
    kernel = np.random.default_rng(0).standard_normal((5, 8)).astype(np.float32)
    nodes = graph(tf_files.immutable("kernel", "float32", (5, 8)), constant("c", tensor("float32", (), field(5, 2.0))))
    for lengths in (True, False):
        path = tmp_path / "a.pbmm"
        path.write_bytes(tf_files.package({"other": b"123", "kernel": kernel.tobytes(), ".": nodes}, lengths))
        model = opened(path)
        assert model.frozen and list(model.variables) == ["kernel", "c"] and model.variables["c"] == 2
        np.testing.assert_array_equal(model.variables["kernel"], kernel, strict=True)
        (read_graph,) = model.graphs
        mapped = np.frombuffer(read_graph.nodes["kernel"]._message.file.buffer, np.uint8)
        assert np.shares_memory(model.variables["kernel"], mapped)


def test_large_contents_are_not_copied(tmp_path):
    values = np.arange(2**20, dtype=np.float32)
    (tmp_path / "a.pb").write_bytes(graph(constant("c", tensor("float32", values.shape, field(4, values.tobytes())))))
    data = values.tobytes()
    stored = crc32c.masked(crc32c.crc32c(data))
    write_checkpoint(tmp_path / "b", {b"c": entry("float32", values.shape, data, stored=stored)}, data)
    for path in ("a.pb", "b"):
        model = opened(tmp_path / path)
        array, used = peak(lambda model=model: model.variables["c"])
        assert array[:9].tolist() == [*range(9)] and len(array) == 2**20
        assert used < 2**22 - 2**20, path  # the checksum takes two megabytes, of any size


def test_layers_take_weights_where_they_lie(tmp_path):
    """Unaligned, in a file."""
    layer = blockcell.LSTM.init(2, 3, seed=0)
    nodes = [constant(name * (k + 1), tensor("float32", value.shape, field(4, value.tobytes())))
             for k, (name, value) in enumerate(layer.weights.items())]  # fmt: skip
    for start in range(4):
        (tmp_path / "a.pb").write_bytes(graph(constant("x" * (start + 1), tensor("float32", ())), *nodes))
        weights = dict(zip("xwb", opened(tmp_path / "a.pb").variables.values(), strict=True))
        again = blockcell.LSTM(weights["w"], weights["b"])
        x = np.ones((2, 1, 2), np.float32)
        np.testing.assert_array_equal(again(x)[0], layer(x)[0])


def slice_proto(*extents: tuple[int, int] | None) -> bytes:
    return b"".join(
        field(1, b"" if extent is None else field(1, extent[0]) + field(2, extent[1])) for extent in extents
    )


def partitioned(tmp_path: Path, sizes, slices, dtype="float32", **changes) -> Path:
    """Write a checkpoint of one variable in slices, each filled with its number."""
    data, entries, protos = b"", {}, b""
    for k, (starts, lengths) in enumerate(slices):
        part = [size if length == FULL else length for length, size in zip(lengths, sizes, strict=True)]
        values = np.full(part, k, np.float32).tobytes()
        entries[Slice(tuple(starts), tuple(lengths)).key("v")] = entry(dtype, part, values, len(data))
        protos += field(7, slice_proto(*(None if length == FULL else (start, length)
                                         for start, length in zip(starts, lengths, strict=True))))  # fmt: skip
        data += values
    entries[b"v"] = field(1, 1) + field(2, shape(*sizes)) + protos
    return write_checkpoint(tmp_path / "sliced", entries | changes.get("entries", {}), data)


def test_slices(tmp_path):
    slices = [((0, 0), (100, FULL)), ((100, 0), (70, 3)), ((100, 3), (70, 1))]
    array = opened(partitioned(tmp_path, (170, 4), slices)).variables["v"]
    expected = np.zeros((170, 4), np.float32)
    expected[100:, :3], expected[100:, 3:] = 1, 2
    np.testing.assert_array_equal(array, expected, strict=True)


def test_names_of_slices_are_in_order():
    """The property that OrderedCode has; TensorFlow's own files have the rest."""
    edges = [sign * 2**k + more for k in range(5, 63) for more in (-1, 0, 1) for sign in (1, -1)]
    values = sorted({*range(-200, 200), *edges})
    keys = [Slice((value,), (7,)).key("n") for value in values]
    assert sorted(keys) == keys and len(set(keys)) == len(values)


@pytest.mark.parametrize(
    "slices, words",
    [
        ([((0,), (5,))], "are not the whole of its shape"),
        ([((0,), (6,)), ((4,), (6,))], "are not the whole of its shape"),
        ([((0,), (5,)), ((4,), (5,))], "overlap"),
        ([((5,), (6,))], "a slice is 5:11 of a dimension of its variable, which has 10"),
        ([((-1,), (6,))], "a slice is -1:5"),
        ([((2,), (FULL,))], "a slice is"),
        ([((2**62,), (2**62,))], "a slice is"),
    ],
)
def test_slices_that_are_not_the_whole(tmp_path, slices, words):
    lengths = [(starts, [min(length, 10) for length in lengths]) for starts, lengths in slices]
    data = np.zeros(10, np.float32).tobytes()
    entries = {
        Slice(tuple(starts), tuple(its)).key("v"): entry("float32", its, data[: 4 * its[0]], 40 * k)
        if its[0] > 0
        else b""
        for k, (starts, its) in enumerate(lengths)
    }
    protos = b"".join(
        field(7, field(1, field(1, starts[0]) + (b"" if its[0] == FULL else field(2, its[0]))))
        for starts, its in slices
    )
    entries[b"v"] = field(1, 1) + field(2, shape(10)) + protos
    with pytest.raises(FormatError, match=words):
        opened(write_checkpoint(tmp_path / "c", entries, data * 2)).variables["v"]


# ---------------------------------------------------------------------------------------------------------- checkpoints
ONE = struct.pack("<f", 1)


@pytest.mark.parametrize(
    "entries, words",
    [
        ({b"v": entry("float32", (2,), ONE)}, "float32 and shape \\(2,\\) is said to be 4 bytes at 0"),
        ({b"v": entry("float32", (2**40, 2**40), ONE)}, "more than 281474976710656 bytes"),
        ({b"v": entry("float32", (0, 2**62, 2**62), b"")}, "more than 281474976710656 bytes"),
        ({b"v": entry("float32", [1] * 33, ONE)}, "more than 32 dimensions"),
        ({b"v": entry("float32", (-1,), ONE)}, "expected one without unknown sizes"),
        ({b"v": entry("float32", (-2,), ONE)}, "the size -2"),
        ({b"v": entry("float32", (), ONE, shard=1)}, "in data file 1; there are 1"),
        ({b"v": entry("float32", (), ONE, shard=-1)}, "in data file -1"),
        ({b"v": entry("float32", (), ONE, offset=-4)}, "4 bytes at -4"),
        ({b"v": entry("float32", (), ONE, offset=2**62)}, "should end"),
        ({b"v": entry("float32", (), ONE, offset=1)}, "ends before byte 5"),
        ({b"v": entry("float32", (), b"abcd")}, "checksum of the tensor"),
        ({b"v": b"\x80"}, "goes on past"),
        ({b"v\xff": entry("float32", (), ONE)}, "not UTF-8"),
        ({b"v": entry("float32", (1,), ONE, more=field(7, slice_proto((0, 1))))}, "there is no slice"),
        ({b"v": entry("float32", (1,), ONE, more=field(7, slice_proto((0, 1), (0, 1))))}, "has 2 dimensions"),
        ({b"v": entry("float32", (1,), ONE, more=field(7, slice_proto((0, 1)))),
          Slice((0,), (1,)).key("v"): entry("int32", (1,), ONE)}, "a slice of shape \\(1,\\) has int32"),
        ({b"v": entry("float32", (1,), ONE, more=field(7, slice_proto((0, 1)))),
          Slice((0,), (1,)).key("v"): entry("string", (1,), ONE)}, "is of string"),
        ({b"v": entry("float32", (1,), ONE, more=2 * field(7, slice_proto((0, 1)))),
          Slice((0,), (1,)).key("v"): entry("float32", (1,), ONE)}, "there is no slice"),
    ],
)  # fmt: skip
def test_what_is_no_checkpoint(tmp_path, entries, words):
    path = write_checkpoint(tmp_path / "model", entries, ONE)

    def read():
        with pytest.raises(FormatError, match=f"model\\.(index|data-00000-of-00001), byte \\d+: .*{words}.*; "):
            opened(path).variables["v"]

    assert peak(read)[1] < 2**24


@pytest.mark.parametrize(
    "header, words",
    [
        (field(1, 0), "0 data files"),
        (field(1, 10**6), "1000000 data files"),
        (field(1, -1), "-1 data files"),
        (field(1, 1) + field(2, 1), "its numbers are big-endian; save it again on a little-endian machine"),
    ],
)
def test_headers(tmp_path, header, words):
    path = write_checkpoint(tmp_path / "model", {b"v": entry("float32", (), ONE)}, ONE, header=header)
    with pytest.raises(FormatError, match=words):
        opened(path)


def test_a_table_without_a_header(tmp_path):
    (tmp_path / "m.index").write_bytes(tf_files.table({b"v": entry("float32", (), ONE)}))
    with pytest.raises(FormatError, match="the table has no header"):
        opened(tmp_path / "m")


def test_too_many_variables(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "MOST_VARIABLES", 20)
    entries = {b"%02d" % k: entry("float32", (), ONE) for k in range(40)}
    with pytest.raises(FormatError, match=r"more than 2\d variables"):
        opened(write_checkpoint(tmp_path / "model", entries, ONE))


def test_tensors_do_not_overlap(tmp_path):
    """All that is read together is no more than the files, then."""
    entries = {b"a": entry("float32", (2,), ONE * 2), b"b": entry("float32", (1,), ONE, 4)}
    with pytest.raises(FormatError, match=r"overlap in data file 0, at byte 4"):
        opened(write_checkpoint(tmp_path / "model", entries, ONE * 3))
    entries[b"b"] = entry("float32", (1,), ONE, 8)
    entries[b"c"] = entry("float32", (0,), b"", 4)
    assert opened(
        write_checkpoint(tmp_path / "model", entries | {b"c": entry("float32", (0,), b"", 8)}, ONE * 3)
    ).variables


def test_slices_cannot_multiply(tmp_path):
    """Each has the bytes of all, so the variable would be larger than the file by as many times."""
    data, count = bytes(2**20), 64
    slices = [Slice((k * 2**18,), (2**18,)) for k in range(count)]
    entries = {
        saved_slice.key("v"): entry("float32", (2**18,), data, k * 2**20, stored=0)
        for k, saved_slice in enumerate(slices)
    }
    protos = b"".join(field(7, slice_proto((k * 2**18, 2**18))) for k in range(count))
    entries[b"v"] = field(1, 1) + field(2, shape(count * 2**18)) + protos
    model = opened(write_checkpoint(tmp_path / "model", entries, data))
    with pytest.raises(FormatError, match="said to have 67108864 bytes, in a file of 1048576 bytes"):
        model.variables["v"]


# --------------------------------------------------------------------------------------------------------------- graphs
def read_all(path: Path) -> None:
    model = opened(path)
    for model_graph in model.graphs:
        for nodes in [model_graph.nodes, *(function.nodes for function in model_graph.functions.values())]:
            for graph_node in nodes.values():
                assert isinstance(graph_node.inputs, tuple) and isinstance(graph_node.attrs, dict)
    for name in model.variables:
        model.variables[name]


FUNCTION = field(1, field(1, "f")) + field(3, node("n", "Add"))
LISTED = node("n", "Op", a=field(1, field(3, varint(5) * 70_000)))


@pytest.mark.parametrize(
    "data, words",
    [
        (b"", "no nodes"),
        (b"some text, not a graph", "a field"),
        (graph(node("", "Const")), "the name ''"),
        (graph(node("a", "")), "the op ''"),
        (graph(node("a", "Add"), node("a", "Add")), "'a' is there twice"),
        (graph(node("a", "Const")), "the node 'a': a Const has no value"),
        (graph(node("a", "Const", value=field(3, 5))), "a Const has no value"),
        (graph(constant("a", tensor("float32", (-1,)))), "without unknown sizes"),
        (graph(constant("a", tensor("float32", (2,), field(4, ONE)))), "shape \\(2,\\) has 4 bytes"),
        (graph(constant("a", tensor("float32", (1,), field(5, ONE * 2)))), "shape \\(1,\\) has 2 numbers"),
        (graph(constant("a", tensor("float32", (), field(5, b"abc")))), "3 bytes hold numbers of 4"),
        (graph(constant("a", tensor("float32", (2**30,), field(5, 1.0)))), "said to have 4294967296 bytes"),
        (graph(constant("a", tensor("float32", (2**30,)))), "said to have 4294967296 bytes"),
        (graph(constant("a", tensor("int32", (1,), field(7, b"\x80")))), "goes on past"),
        (graph(tf_files.immutable("a", "float32", (1,))), "memory region 'memmapped_package://a' is not in this file"),
        (graph(node("a", "Op", b=field(7, b"".join(field(2, b"") for _ in range(33))))), "more than 32 dimensions"),
        (graph(LISTED), "more than 65536 items"),
        (graph(node("a", "Op", b=field(1, field(4, b"abc")))), "3 bytes hold numbers of 4"),
        (graph(node("a", "Op")) + field(2, field(1, field(3, node("n", "Add")))), "no signature"),
        (graph(node("a", "Op")) + field(2, field(1, FUNCTION) * 2), "function 'f' is there twice"),
        (graph(field(1, b"\xff") + field(2, "Op")), "not UTF-8"),
    ],
)
def test_what_is_no_graph(tmp_path, data, words):
    path = tmp_path / "a graph.pb"
    path.write_bytes(data)

    def read():
        with pytest.raises(FormatError, match=f"a graph\\.pb, byte \\d+: .*{words}"):
            read_all(path)

    assert peak(read)[1] < 2**24


def test_too_many_nodes(tmp_path, monkeypatch):
    monkeypatch.setattr(graphs, "MOST_NODES", 10)
    nodes = [node(str(k), "Add") for k in range(6)]
    functions = field(2, b"".join(field(1, field(1, field(1, f"f{k}")) + field(3, node("n", "Add"))) for k in range(4)))
    for data in (graph(*nodes) + functions, graph(*nodes, *(node(f"x{k}", "Add") for k in range(20)))):
        (tmp_path / "a.pb").write_bytes(data)
        with pytest.raises(FormatError, match=r"more than 1\d nodes"):
            opened(tmp_path / "a.pb")
    (tmp_path / "saved_model.pb").write_bytes(field(2, field(2, b"")) * 30)
    with pytest.raises(FormatError, match=r"more than 1\d nodes"):
        opened(tmp_path)


def test_too_many_inputs_and_attributes(tmp_path, monkeypatch):
    monkeypatch.setattr(graphs, "MOST_ITEMS", 10)
    attrs = {f"a{k}": field(3, k) for k in range(11)}
    (tmp_path / "a.pb").write_bytes(graph(node("a", "Add", ["x"] * 11), node("b", "Add", **attrs)))
    nodes = opened(tmp_path / "a.pb").graphs[0].nodes
    for look in (lambda: nodes["a"].inputs, lambda: nodes["b"].attrs):
        with pytest.raises(FormatError, match="more than 10 inputs or such"):
            look()
    assert nodes["a"].attrs == {} and nodes["b"].inputs == ()


UNTYPED = node("k", "ImmutableConst", memory_region_name=field(2, "memmapped_package://."))
REGION = field(1, field(1, 0) + field(2, "memmapped_package://k"))


@pytest.mark.parametrize(
    "data, words",
    [
        (b"", "a memory-mapped package, complete"),
        (b"1234567", "a memory-mapped package, complete"),
        (struct.pack("<Q", 1), "said to be at byte 1"),
        (struct.pack("<Q", 2**63), "said to be at byte 9223372036854775808"),
        (tf_files.package({"a": b"123"}), "names no graph"),
        (field(1, field(1, 50) + field(2, "memmapped_package://.") + field(3, 9)) + bytes(8), "at byte 50, of 9 bytes"),
        (field(1, field(1, 2**63) + field(2, "memmapped_package://.")) + bytes(8), "at byte -9223372036854775808"),
        (tf_files.package({"k": bytes(7), ".": graph(tf_files.immutable("k", "float32", (2,)))}), "region of 7 bytes"),
        (tf_files.package({"k": bytes(8), ".": graph(tf_files.immutable("k", "float32", (-1,)))}), "shape \\(None,\\)"),
        (tf_files.package({"k": bytes(8), ".": graph(tf_files.immutable("j", "float32", (2,)))}), "is not in"),
        (tf_files.package({".": graph(UNTYPED)}), "has dtype None"),
        (2 * REGION + bytes(8), "is there twice"),
    ],
)  # fmt: skip
def test_what_is_no_package(tmp_path, data, words):
    (tmp_path / "a.pbmm").write_bytes(data)
    with pytest.raises(FormatError, match=f"a\\.pbmm, byte \\d+: .*{words}"):
        read_all(tmp_path / "a.pbmm")


def test_no_graph_in_other_files(tmp_path):
    (tmp_path / "saved_model.pb").write_bytes(field(1, 1))
    (tmp_path / "a.meta").write_bytes(field(1, b""))
    for name in ("saved_model.pb", "a.meta"):
        with pytest.raises(FormatError, match=f"{name}, byte 0: it has no graph"):
            opened(tmp_path / name)


# ----------------------------------------------------------------------------------------------------------------- text
TENSOR = """node { name: "c" op: "Const" attr { key: "value" value { tensor { %s } } } }"""


@pytest.mark.parametrize(
    "tensor, values",
    [
        ("dtype: DT_FLOAT float_val: 1.5e-05", np.float32(1.5e-5)),
        ("dtype: DT_FLOAT, tensor_shape { dim { size: 2 } }; float_val: -inf float_val: 1e39", [-np.inf, np.inf]),
        ("dtype: 1 tensor_shape: < unknown_rank: false >  # text\n float_val: .5", 0.5),
        ("dtype: DT_DOUBLE_REF double_val: 0.1", 0.1),
        ("dtype: DT_INT32 int_val: -0x10", -16),
        ("dtype: DT_BOOL bool_val: true", True),
        ("dtype: DT_UINT64 uint64_val: 18446744073709551615", 2**64 - 1),
        ("dtype: DT_HALF half_val: 15360", 1),
        (r"dtype: DT_INT8 tensor_shape { dim { size: 6 } } tensor_content: 'a\n\'' " '"\\x7f\\001\\\\"',
         [97, 10, 39, 127, 1, 92]),
        ("unknown { more { a: 1 b: x c: 'd' [a.b/c] { e: 1 } } } other: y dtype: DT_INT32 string_val: 'x'", 0),
        ("[type.googleapis.com/x] { a: 1 } dtype: DT_INT32 int_val: 3", 3),
    ],
)  # fmt: skip
def test_text(tmp_path, tensor, values):
    (tmp_path / "a.pbtxt").write_text(f"# a comment\n{TENSOR % tensor}\n# the end")
    np.testing.assert_array_equal(opened(tmp_path / "a.pbtxt").variables["c"], values)


def test_text_of_a_saved_model(golden, tmp_path):
    nodes = "node { name: 'a' op: 'Add' input: 'x' input: '^y' attr { key: 'l' value { list { s: 'p' s: 'q' 'r' } } } }"
    folder = tmp_path / "saved"
    folder.mkdir()
    (folder / "saved_model.pbtxt").write_text(
        f"meta_graphs {{ meta_info_def {{ tags: 'train' }} graph_def {{ {nodes} }} }}"
    )
    for path in (folder, folder / "saved_model.pbtxt"):
        (read_graph,) = opened(path).graphs
        assert read_graph.tags == ("train",) and read_graph.nodes["a"].inputs == ("x", "^y")
        assert read_graph.nodes["a"].attrs == {"l": ["p", "qr"]}


@pytest.mark.parametrize(
    "text, words",
    [
        (b"", "no nodes"),
        (b"node", "there is 'the end'; expected a message, in braces"),
        (b"node {", "there is 'the end'; expected a field"),
        (b"node }", "there is '}'"),
        (b"}", "there is '}'; expected a field"),
        (b"node { name: { } }", "there is '{'; expected a text"),
        (b"node { name: 5 }", "there is '5'; expected a text"),
        (b"node { name: 'a }", "what follows is no text"),
        (b"node { name: 'a\nb' }", "what follows is no text"),
        (b"node { name: ['a'] }", "there is '\\['; expected a text"),
        (b"[", "there is 'the end'"),
        (b"\xff", "what follows is no text"),
        (b"node { name: 'a' op: 'b' } ?", "byte 26: what follows"),
        (b"node {" * 101, "nested more than 100 deep"),
        (b"x {" * 10**5, "nested more than 100 deep"),
        ((TENSOR % "dtype: DT_NOTHING").encode(), "there is 'DT_NOTHING'; expected an integer of 64 bits"),
        ((TENSOR % f"dtype: {2**64}").encode(), "expected an integer of 64 bits"),
        ((TENSOR % ("dtype: " + "9" * 10_000)).encode(), "expected an integer of 64 bits"),
        ((TENSOR % "float_val: x").encode(), "there is 'x'; expected a number"),
        ((TENSOR % "float_val: 'x'").encode(), "expected a number"),
        (b"#" * 10**6 + b"\n?", "what follows is no text"),
        (b" #" * 10**6 + b"\n?", "what follows is no text"),
        (b": " * 10**6, "expected a field"),
        (b"'" + b"\\a" * 10**6, "what follows is no text"),
        (b"node { name: 'a' op: '' }", "in binary, byte 2: a node has the name 'a' and the op ''"),
    ],
)
def test_what_is_no_text(tmp_path, text, words):
    (tmp_path / "a.pbtxt").write_bytes(text)
    with pytest.raises(FormatError, match=f"a\\.pbtxt.*, .*{words}"):
        read_all(tmp_path / "a.pbtxt")


# ---------------------------------------------------------------------------------------------------------------- paths
def test_missing_files(golden, tmp_path):
    folder, _ = golden
    for name in ("nothing", "nothing.pb", "saved_model.pb", "nothing.index", "nothing.meta", "a/b.pbmm"):
        with pytest.raises(FileNotFoundError, match=re.escape(name)):
            opened(tmp_path / name)
    (tmp_path / "model.index").write_bytes((folder / "v2" / "model.ckpt.index").read_bytes())
    model = opened(tmp_path / "model")  # says what there is
    with pytest.raises(FileNotFoundError, match="model\\.data-00000-of-00002"):
        model.variables["scope/float32"]
    (tmp_path / "model.data-00001-of-00003").touch()
    with pytest.raises(FormatError, match=r"model\.index is for 2 data files, but there is .*data-00001-of-00003"):
        model.variables["scope/float32"]
    (tmp_path / "b.meta").write_bytes((folder / "v2" / "model.ckpt.meta").read_bytes())
    assert len(opened(tmp_path / "b.meta").variables) == 0
    with pytest.raises(FileNotFoundError, match="no \\.index"):
        opened(tmp_path / "b")


def test_what_is_none_of_the_formats(tmp_path):
    expected = "expected a checkpoint .*SavedModel.*frozen graph"
    with pytest.raises(FormatError, match=f"has neither 'saved_model.pb' nor 'checkpoint'; {expected}"):
        opened(tmp_path)
    for name, words in [
        ("notes.txt", expected),
        ("a.KERAS", r"from_keras, .* read such models, layer.save\(out\) saves a layer"),
    ]:
        (tmp_path / name).write_bytes(b"\x89HDF")
        with pytest.raises(FormatError, match=f"{name} is of an unknown kind; .*{words}"):
            opened(tmp_path / name)
    with pytest.raises(FormatError, match=r"there is a\.KERAS: open that"):
        opened(tmp_path)
    (tmp_path / "a.pb").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 4\n")
    with pytest.raises(FormatError, match=r"a\.pb is a pointer of Git LFS's.*git lfs pull"):
        opened(tmp_path / "a.pb")
    with pytest.raises(TypeError, match="path is of type bytes"):
        opened(b"a.pb")
    os.mkfifo(tmp_path / "pipe.pb")
    with pytest.raises(FormatError, match="no regular file"):
        opened(tmp_path / "pipe.pb")


@pytest.mark.parametrize("path", ["v1", "v1/model.ckpt", ""])
def test_old_checkpoints_are_refused_by_name(golden, tmp_path, path):
    """Also those of several files, by their name with question marks."""
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "m-?????-of-00002"')
    with pytest.raises(FormatError, match=r"is a checkpoint in V1 format, .*load it with tf\.train\.load_checkpoint"):
        opened(golden[0] / path if path else tmp_path)


@pytest.mark.parametrize(
    "state, name",
    [
        (b'model_checkpoint_path: "m"\nall_model_checkpoint_paths: "other"', "m"),
        (b"# a comment\n  model_checkpoint_path : 'm'", "m"),
        (b'model_checkpoint_path: "/where/it/was/m"', "m"),
        (b'model_checkpoint_path: "C:\\\\\\\\models\\\\m"', "m"),
        (b'model_checkpoint_path: "sub/m"', "sub/m"),
        (b'model_checkpoint_path: "Ger\\303\\244t\\x27s"', "Gerät's"),
        (b'model_checkpoint_path: "it\'s \\"\\303\\244\\""', 'it\'s "ä"'),
        (b'model_checkpoint_path: "../m"', None),
        (b'model_checkpoint_path: "sub/../../m"', None),
        (b'model_checkpoint_path: ".."', None),
        (b'model_checkpoint_path: "other"', None),
        (b'model_checkpoint_path: "' + b"long" * 999 + b'"', None),
        (b'model_checkpoint_path: "/"', None),
        (b'model_checkpoint_path: ""', None),
        (b'model_checkpoint_path: "a\\000b"', None),
        (b'all_model_checkpoint_paths: "m"', None),
        (b'model_checkpoint_path: "m', None),
        (b"\n" * 2**20, None),
        (b" " * 2**20, None),
        (b"x" * (2**20 + 1), None),
        (b"", None),
    ],
)
def test_state(tmp_path, state, name):
    """Nothing outside the folder is opened."""
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    for place in (tmp_path, folder, folder / "sub"):
        write_checkpoint(place / "m", {b"v": entry("float32", (), ONE)}, ONE)
    (folder / "checkpoint").write_bytes(state)
    if name is None:
        with pytest.raises(FormatError, match="checkpoint, byte"):
            opened(folder)
    else:
        if name not in ("m", "sub/m"):
            write_checkpoint(folder / name, {b"v": entry("float32", (), ONE)}, ONE)
        assert opened(folder).variables["v"] == 1


def test_imported_only_when_asked_for():
    code = "import sys, blockcell; before = 'blockcell.tensorflow' in sys.modules; import blockcell.tensorflow"
    assert printed(f"{code}; print(before, blockcell.tensorflow.open, 'tensorflow' in sys.modules)").endswith("False")
    assert printed(f"{code}; print(before)") == "False"
    assert FormatError is blockcell.FormatError and issubclass(FormatError, ValueError)


# ------------------------------------------------------------------------------------------------------ symbolic links
FOLDERS = {"checkpoint": "v2", "saved model": "saved"}


def linked(folder: Path, name: str, to: Path) -> None:
    """Put a link to a file or folder in its place, and move it."""
    to.parent.mkdir(parents=True, exist_ok=True)
    (folder / name).rename(to)
    (folder / name).symlink_to(os.path.relpath(to, folder))


@pytest.mark.parametrize("name", FOLDERS.values(), ids=FOLDERS)
def test_links_that_stay_in_the_folder(tmp_path, name):
    """Of all files, in a folder that is a link itself and lies behind another one."""
    tf_files.unpack(tmp_path / "real")
    folder = tmp_path / "real" / name
    expected = [*opened(folder).variables]
    for path in sorted(folder.iterdir()):
        linked(folder, path.name, folder / "data" / path.name)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "model").symlink_to(tmp_path / "link" / name)
    model = opened(tmp_path / "model")
    assert [*model.variables] == expected
    assert all(model.variables[expected_name] is not None for expected_name in expected)


OUTSIDE = {
    "the index": ("v2", "model.ckpt.index", "v2"),
    "by its name": ("v2", "model.ckpt.index", "v2/model.ckpt"),
    "by its data": ("v2", "model.ckpt.data-00000-of-00002", "v2/model.ckpt.index"),
    "the graph": ("v2", "model.ckpt.meta", "v2"),
    "the state": ("v2", "checkpoint", "v2"),
    "the model": ("saved", "saved_model.pb", "saved"),
    "the model itself": ("saved", "saved_model.pb", "saved/saved_model.pb"),
    "the variables": ("saved", "variables", "saved"),
}


@pytest.mark.parametrize("case", OUTSIDE)
def test_links_out_of_the_folder(tmp_path, case):
    folder, name, opened_path = OUTSIDE[case]
    tf_files.unpack(tmp_path)
    outside = tmp_path / f"{folder} too" / name  # which begins alike
    linked(tmp_path / folder, name, outside)
    with pytest.raises(FormatError, match=r"is a symbolic link to .* too.*, outside of the folder .*; copy the folder"):
        read_all(tmp_path / opened_path)


def test_what_is_named_may_be_a_link(tmp_path):
    """Its name is not the file's, but the user's."""
    tf_files.unpack(tmp_path)
    (tmp_path / "links").mkdir()
    for source, name in (("graph.pb", "graph.pb"), ("v2/model.ckpt.meta", "other.meta")):
        (tmp_path / "links" / name).symlink_to(tmp_path / source)
        assert opened(tmp_path / "links" / name).path.endswith(name)


def test_escapes_in_names_are_escaped(tmp_path):
    """In errors and in what `print` shows."""
    folder = tmp_path / "a\x1b[2Jb"
    folder.mkdir()
    (folder / "graph.pb").write_bytes(graph(node("x\x1b[31m", "Placeholder"), constant("y\x07", tensor("float32", ()))))
    (folder / "model.onnx").write_bytes(b"")
    for name in ("", "model.onnx"):
        with pytest.raises(FormatError) as caught:
            opened(folder / name)
        assert str(caught.value).isprintable() and r"a\x1b[2Jb" in str(caught.value)
    shown = repr(opened(folder / "graph.pb"))
    assert all(line.isprintable() for line in shown.split("\n")) and r"y\x07" in shown
