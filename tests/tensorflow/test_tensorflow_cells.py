"""Cells that are found in graphs and checkpoints: what they are, that their layers compute it, and what is refused."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest
from tf_cells import (
    BLOCKS,
    LSTM_BIASES,
    NAMES,
    PEEPHOLES,
    B,
    H,
    I,
    T,
    V,
    W,
    X,
    agrees,
    block,
    called,
    checkpoint_of,
    composed_gru,
    composed_lstm,
    drawn,
    exact,
    function,
    inputs,
    kind_of,
    library,
    lstm_consts,
    number,
    real,
    write,
    write_variables,
)
from tf_files import field, graph, node, shape

import blockcell
from blockcell import formulas
from blockcell.command import main
from blockcell.tensorflow import Found
from blockcell.tensorflow import open as opened
from blockcell.tensorflow.cells.cell.layer_check import Check
from blockcell.tensorflow.cells.graph.array_slices import slice_index
from blockcell.tensorflow.cells.graph.graph_reader import GraphReader, Place, UnknownValue

# -------------------------------------------------------------------------------------------------------- block nodes


OPTIONS = [
    ("LSTMBlockCell", {}),
    ("LSTMBlockCell", {"forget_bias": 0.5, "cell_clip": 0.75, "use_peephole": True}),
    ("BlockLSTM", {"forget_bias": 0.0, "cell_clip": -1.0}),
    ("BlockLSTM", {"use_peephole": True}),
    ("BlockLSTMV2", {}),
    ("BlockLSTMV2", {"cell_clip": 0.5, "use_peephole": True}),
    ("GRUBlockCell", {}),
]


@pytest.mark.parametrize("where", ["plain", "frame", "function"])
@pytest.mark.parametrize(("op", "options"), OPTIONS)
def test_block_nodes(tmp_path, op, options, where):
    roles = [role for role in BLOCKS[op] if role in NAMES and (options.get("use_peephole") or role not in PEEPHOLES)]
    weights = drawn(*roles)
    scope = NAMES[roles[0]].removesuffix("/kernel").removesuffix("/gates")
    parts = [*inputs(), *(real(NAMES[role], value) for role, value in weights.items())]
    parts += [node(f"{NAMES[role]}/read", "Identity", [NAMES[role]]) for role in roles]
    names = {role: f"{NAMES[role]}/read" for role in roles}
    more = b""
    if where == "plain":
        parts.append(block(op, "cell", names, **options))
    elif where == "frame":
        parts += [node(f"while/{role}", "Enter", [name]) for role, name in names.items()]
        for role in roles:  # a weight that goes around the loop
            parts.append(node(f"while/{role}/merge", "Merge", [f"while/{role}", f"while/{role}/next"]))
            parts.append(node(f"while/{role}/switch", "Switch", [f"while/{role}/merge", "steps"]))
            parts.append(node(f"while/{role}/next", "NextIteration", [f"while/{role}/switch:1"]))
        parts.append(block(op, "while/cell", {role: f"while/{role}/switch:1" for role in roles}, **options))
    else:
        inner = block(op, "cell", {role: f"{role}_read:output:0" for role in roles}, **options)
        arguments = ["x", "zeros", "steps", *roles]
        reads = [node(f"{role}_read", "Identity", [role]) for role in roles]
        body = function("body", arguments, arguments, *reads, inner)
        cond = function("cond", arguments, ["steps"])
        outer = function("outer", arguments, ["x"], node("loop", "StatelessWhile", arguments, body=called("body"),
                                                         cond=called("cond")))  # fmt: skip
        input_names = ["x", "zeros", "steps", *names.values()]
        parts.append(node("call", "PartitionedCall", input_names, f=called("outer")))
        more = library(body, cond, outer)
    model = write(tmp_path, *parts, more=more)
    (cell,) = model.cells.values()
    assert (cell.name, cell.kind, cell.refused) == (scope, op, None)
    assert (cell.input_size, cell.hidden_size, cell.dtype) == (I, H, "float32")
    assert cell.weights == {role: NAMES[role] for role in roles}
    expected = {}
    if op != "GRUBlockCell":
        forget_bias, cell_clip, order = (0.0, 0.0, "ifco") if op.endswith("V2") else (1.0, 3.0, "icfo")
        expected = {"forget_bias": forget_bias, "cell_clip": cell_clip, "use_peephole": False} | options
        assert cell.attributes == expected | {"gate_order": order}
        if op.endswith("V2"):
            del expected["forget_bias"]
    agrees(cell.layer(), exact(op, weights, X, **expected), X)
    assert cell.check() <= 8
    assert repr(cell) in repr(model) and op in repr(cell)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_put_together_and_converted(tmp_path, dtype):
    """Parts of a partitioned variable, a conversion, and a split of two biases in one variable."""
    w, b = drawn("w", "b", dtype=dtype).values()
    parts = [real("k/part_0", w[:3]), real("k/part_1", w[3:]), number("axis", 0)]
    parts += [node("k", "ConcatV2", ["k/part_0", "k/part_1", "axis"])]
    parts += [real("both", np.concatenate([b + 1, b]).astype(dtype))]
    for name, role in (("k", "w"), ("both", "b")):
        parts.append(node(f"to/{role}", "Cast", [name], SrcT=kind_of(dtype), DstT=kind_of("float64")))
    parts += [node("halves", "Split", ["axis", "to/b"], num_split=field(3, 2))]
    names = {"w": "to/w", "b": "halves:1"}
    (cell,) = write(tmp_path, *inputs(), *parts, block("BlockLSTM", "cell", names)).cells.values()
    assert cell.weights == {"w": "k/part_0 + k/part_1", "b": "both[16:32]"} and cell.dtype == "float64"
    layer = cell.layer()
    np.testing.assert_array_equal(layer.weights["w"], w.astype(np.float64), strict=True)
    np.testing.assert_array_equal(layer.weights["b"], b.astype(np.float64), strict=True)
    assert cell.check().ok


def test_steps_are_one_cell_and_scopes_are_two(tmp_path):
    w, b = drawn("w", "b").values()
    names = {"w": "rnn/lstm_cell/kernel", "b": "rnn/lstm_cell/bias"}
    nodes = [block("LSTMBlockCell", name, names) for name in ("fw/cell", "fw/cell_1", "fw/cell_2", "bw/cell")]
    nodes += [block("LSTMBlockCell", "fw/cell_3", names, cell_clip=1.0)]
    model = write(tmp_path, *inputs(), real(names["w"], w), real(names["b"], b), *nodes)
    summaries = {name: (cell.nodes, cell.attributes["cell_clip"]) for name, cell in model.cells.items()}
    assert summaries == {
        "fw": (("fw/cell", "fw/cell_1", "fw/cell_2"), 3.0),
        "bw": (("bw/cell",), 3.0),
        "fw (2)": (("fw/cell_3",), 1.0),
    }


def test_the_gradient_of_a_cell_is_no_cell(tmp_path):
    """It multiplies with the same kernel."""
    name = "rnn/lstm_cell/kernel"
    parts = [*inputs(), real(name, W), real("b", drawn("b")["b"]), block("LSTMBlockCell", "a", {"w": name, "b": "b"})]
    parts += [node("grad", "MatMul", ["x", name], transpose_b=field(5, 1))]
    (cell,) = write(tmp_path, *parts).cells.values()
    assert (cell.name, cell.nodes, cell.refused) == ("rnn/lstm_cell", ("a",), None)


REFUSED = {
    "a cycle": ([node("w", "Identity", ["v"]), node("v", "Identity", ["w"])], "nothing but itself"),
    "nowhere": ([node("w", "Identity", ["gone"])], "'gone', which is not in the graph"),
    "an input": ([node("w", "Placeholder")], "'w', which is a Placeholder"),
    "computed": ([real("v", W), node("w", "Mul", ["v", "v"])], "'w', which is a Mul"),
    "integers": ([real("w", W.astype(np.int32))], "is of int32; expected float32"),
    "another dtype": ([real("w", W.astype(np.float64))], "b is of float32, and w of float64"),
    "a shape": ([real("w", W[:, :-1])], "expected (I+H, 4H)"),
    "no inputs": ([real("w", W[:H])], "expected (I+H, 4H)"),
    "another shape": ([real("w", np.zeros((I + H, 8 * H), np.float32) + W[0, 0])], "b, which is b, has shape (16,)"),
    "two": ([real("u", W), real("v", V), node("w", "Merge", ["u", "v"])], "u or v: not one weight"),
    "itself": (
        [real("v", W), number("axis", 0), node("w", "ConcatV2", ["v", "v", "axis"])],
        "joins a variable with itself",
    ),
    "parts": (
        [real("u", W), real("v", V[:, :-1]), number("axis", 0), node("w", "ConcatV2", ["u", "v", "axis"])],
        "do not fit together",
    ),
    "axis": (
        [real("u", W), real("v", V), number("axis", 2), node("w", "ConcatV2", ["u", "v", "axis"])],
        "an axis that they do not have",
    ),
    "split": (
        [real("v", W), number("axis", 0), node("w", "Split", ["axis", "v"], num_split=field(3, 2))],
        "part 0 of the node 'w', which makes 2 of an axis of 9",
    ),
    "call": ([node("w", "PartitionedCall", ["x"], f=called("gone"))], "a function that is not in the graph"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_weights(tmp_path, case):
    nodes, reason = REFUSED[case]
    names = {"w": "w", "b": "b"}
    parts = [*inputs(), *nodes, real("b", drawn("b")["b"]), block("BlockLSTM", "cell", names)]
    (cell,) = write(tmp_path, *parts).cells.values()
    assert reason in cell.refused
    assert cell.refused in repr(cell)
    for call in (cell.layer, cell.check):
        with pytest.raises(ValueError, match=re.escape(reason)):
            call()


@pytest.mark.parametrize("op", ["StatefulPartitionedCall", "RemoteCall"])
@pytest.mark.parametrize("same", [True, False])
def test_a_function_that_is_called_twice(tmp_path, same, op):
    """With the same weights it is one cell; with others it is none that is known.

    RemoteCall has the device before the function's arguments.
    """
    b = drawn("b")["b"]
    body = function("body", ["x", "zeros", "steps", "w", "b"], ["x"], block("BlockLSTM", "cell", {"w": "w", "b": "b"}))
    device = ["device"] * (op == "RemoteCall")
    calls = [
        node(name, op, [*device, "x", "zeros", "steps", w, "b"], f=called("body"))
        for name, w in (("one", "w"), ("two", "w" if same else "v"))
    ]
    parts = [*inputs(), node("device", "Placeholder"), real("w", W), real("v", V), real("b", b), *calls]
    (cell,) = write(tmp_path, *parts, more=library(body)).cells.values()
    assert (cell.refused is None) == same
    assert same or "v or w: not one weight" in cell.refused


def test_weights_from_behind_a_loop(tmp_path):
    """What a loop leaves as it is, of which its condition, with one result, has no such output."""
    arguments = ["x", "zeros", "steps", "w", "b"]
    loop = node("loop", "While", arguments, body=called("body"), cond=called("cond"))
    functions = library(function("body", arguments, arguments), function("cond", arguments, ["steps"]))
    parts = [*inputs(), real("w", W), real("b", drawn("b")["b"]), loop]
    parts.append(block("BlockLSTM", "cell", {"w": "loop:3", "b": "loop:4"}))
    (cell,) = write(tmp_path, *parts, more=functions).cells.values()
    assert (cell.refused, cell.weights) == (None, {"w": "w", "b": "b"})


def test_inputs_that_a_node_does_not_have_are_unknown(tmp_path):
    path = tmp_path / "few.pb"
    path.write_bytes(graph(node("x", "Placeholder"), node("zeros", "Fill", ["x", "^y"])))
    read = opened(path).graphs[0]
    places = GraphReader(read).inputs_at(Place("", "zeros"))
    assert [place.name for place in places] == ["x"] and places[:1] == places
    with pytest.raises(UnknownValue, match="the node has too few inputs"):
        places[1]


def test_deep_and_entangled_graphs_end(tmp_path):
    """A chain of 5,000 nodes, functions that call themselves, and joins of joins; no recursion, no explosion."""
    chain = [node(f"n{k}", "Identity", [f"n{k + 1}"]) for k in range(5000)] + [real("n5000", W)]
    names = {"w": "n0", "b": "b"}
    parts = [*inputs(), real("b", drawn("b")["b"]), *chain, block("BlockLSTM", "cell", names)]
    (cell,) = write(tmp_path, *parts).cells.values()
    assert cell.refused is None and cell.weights["w"] == "n5000"
    itself = function("f", ["x"], ["g:0:0"], node("g", "PartitionedCall", ["x"], f=called("f")))
    parts[-1] = block("BlockLSTM", "cell", {"w": "call", "b": "b"})
    model = write(tmp_path, *parts, node("call", "PartitionedCall", ["n0"], f=called("f")), more=library(itself))
    (cell,) = model.cells.values()
    assert "nothing but itself" in cell.refused
    joins = [node(f"j{k}", "ConcatV2", [f"j{k + 1}"] * 50 + ["axis"]) for k in range(20)] + [real("j20", W)]
    parts = [*inputs(), real("b", drawn("b")["b"]), number("axis", 0), *joins]
    (cell,) = write(tmp_path, *parts, block("BlockLSTM", "cell", {"w": "j0", "b": "b"})).cells.values()
    assert "beyond" in cell.refused


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1, True])
def test_refused_attributes(tmp_path, value):
    parts = [*inputs(), real("w", W), real("b", drawn("b")["b"])]
    nodes = block("BlockLSTM", "cell", {"w": "w", "b": "b"}, cell_clip=value)
    (cell,) = write(tmp_path, *parts, nodes).cells.values()
    assert "the attribute cell_clip is" in cell.refused


# ---------------------------------------------------------------------------------------------- cells of many nodes


@pytest.mark.parametrize("loop", [True, False])
@pytest.mark.parametrize("order", ["icfo", "ifco"])
@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("peephole", [True, False])
def test_composed_lstm(tmp_path, peephole, clip, order, loop):
    weights, consts = lstm_consts(peephole)
    nodes = composed_lstm(peephole, clip, order=order, loop=loop)
    (cell,) = write(tmp_path, node("x", "Placeholder"), *consts, *nodes).cells.values()
    assert (cell.name, cell.kind, cell.refused) == ("rnn/lstm_cell", "LSTMCell", None)
    expected = {"forget_bias": 0.5, "cell_clip": 0.25 if clip else 0.0, "use_peephole": peephole}
    assert cell.attributes == expected | {"gate_order": order}
    if order == "ifco":
        columns = np.arange(4 * H).reshape(4, H)[[0, 2, 1, 3]].ravel()
        weights |= {"w": weights["w"][:, columns], "b": weights["b"][columns]}
    agrees(cell.layer(), exact("BlockLSTM", weights, X, **expected), X)
    assert cell.check() <= 8


def test_composed_gru(tmp_path):
    weights = drawn("w_ru", "w_c", "b_ru", "b_c")
    consts = [real(NAMES[role], value) for role, value in weights.items()]
    (cell,) = write(tmp_path, node("x", "Placeholder"), *consts, *composed_gru()).cells.values()
    assert (cell.name, cell.kind, cell.refused, cell.attributes) == ("rnn/gru_cell", "GRUCell", None, {})
    agrees(cell.layer(), exact("GRUBlockCell", weights, X), X)
    assert cell.check() <= 8


PROJECTED = {"projected": ("MatMul", "h", "=rnn/lstm_cell/projection/kernel"), "h_next": ("NextIteration", "projected")}
CHANGES = {
    "hard sigmoid": {"o": ("HardSigmoid", "split:3")},
    "bias on i": {"more": ("Const", 1.0), "plus": ("Add", "split", "more"), "i": ("Sigmoid", "plus")},
    "another split": {"other": ("Split", "axis", "MatMul", {"num_split": 4}), "o": ("Sigmoid", "other:3")},
    "one peephole": {"times": ("Mul", "=rnn/lstm_cell/w_o_diag", "c"), "plus": ("Add", "split:3", "times"),
                     "o": ("Sigmoid", "plus")},
    "one-sided clip": {"below": ("Minimum", "total", "top"), "c": ("Identity", "below")},
    "uneven clip": {"bottom": ("Const", -0.5), "c": ("Identity", "clipped")},
    "normalized": {"normal": ("FusedBatchNorm", "BiasAdd"), "split": ("Split", "axis", "normal", {"num_split": 4})},
    "a projection with a bias": PROJECTED | {"h_next": ("NextIteration", "more"),
                                             "more": ("BiasAdd", "projected", "=rnn/lstm_cell/projection/bias")},
    "another state": {"h_next": ("NextIteration", "co")},
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_changed_lstms_are_refused(tmp_path, change):
    """Each node has its meaning: with any other there is no layer."""
    _, consts = lstm_consts(True)
    consts.append(real("rnn/lstm_cell/projection/kernel", drawn("w")["w"][:H, :H]))
    parts = [node("x", "Placeholder"), *consts, *composed_lstm(False, False, change=CHANGES[change])]
    (cell,) = write(tmp_path, *parts).cells.values()
    assert cell.name == "rnn/lstm_cell" and cell.refused is not None
    with pytest.raises(ValueError, match="refused"):
        cell.layer()


@pytest.mark.parametrize("line", [("concat", "ConcatV2", "x", "h", "axis"), ("keep", "Mul", "f", "c")])
def test_a_step_that_reads_its_own_state_is_refused(tmp_path, line):
    """There is a cycle in the graph, and not around the loop."""
    _, consts = lstm_consts(False)
    nodes = composed_lstm(False, False, change={line[0]: line[1:]})
    cells = write(tmp_path, node("x", "Placeholder"), *consts, *nodes).cells
    assert cells and all(cell.refused is not None for cell in cells.values())


GRU_CHANGES = {
    "relu6": {"c": ("Relu6", "BiasAdd_1")},
    "reset after": {"concat_1": ("ConcatV2", "x", "h_prev", "axis"), "c_bar": ("Mul", "split", "BiasAdd_1"),
                    "c": ("Tanh", "c_bar")},
    "two": {"one": ("Const", 2.0)},
    "another rest": {"rest": ("Sub", "one", "split")},
}  # fmt: skip


@pytest.mark.parametrize("change", GRU_CHANGES)
def test_changed_grus_are_refused(tmp_path, change):
    consts = [real(NAMES[role], value) for role, value in drawn("w_ru", "w_c", "b_ru", "b_c").items()]
    parts = [node("x", "Placeholder"), *consts, *composed_gru(GRU_CHANGES[change])]
    (cell,) = write(tmp_path, *parts).cells.values()
    assert cell.name == "rnn/gru_cell" and cell.refused is not None


def test_other_products_are_no_cells(tmp_path):
    dense = [
        node("x", "Placeholder"),
        real("after_lstm/dense/kernel", W),
        node("y", "MatMul", ["x", "after_lstm/dense/kernel"]),
    ]
    model = write(tmp_path, *dense)
    assert len(model.cells) == 0 and "<0 cells>" in repr(model)
    with pytest.raises(KeyError, match="there are none"):
        model.cells["lstm"]


# ---------------------------------------------------------------------------------------------------- checkpoints


def test_checkpoint_asks(tmp_path):
    values = checkpoint_of()
    slots = {f"{name}/{slot}": value + 1 for name, value in values.items() for slot in ("Adam", "Adam_1")}
    averages = {f"{name}/ExponentialMovingAverage": value * 2 for name, value in values.items()}
    model = write_variables(tmp_path, values | slots | averages | {"global_step": np.int64(3).reshape(())})
    (cell,) = model.cells.values()
    assert (cell.name, cell.unsaid) == ("rnn/lstm_cell", ["forget_bias", "cell_clip"])
    assert "forget_bias=?" in repr(cell)
    with pytest.raises(ValueError, match="does not say its forget_bias; pass forget_bias="):
        cell.layer(cell_clip=0)
    with pytest.raises(ValueError, match="does not say its cell_clip; pass cell_clip="):
        cell.check(forget_bias=1.0)
    weights = drawn("w", "b", *PEEPHOLES)
    expected = exact("BlockLSTM", weights, X, **LSTM_BIASES, use_peephole=True)
    agrees(cell.layer(**LSTM_BIASES), expected, X)
    assert cell.check(**LSTM_BIASES) <= 8
    doubled = {role: value * 2 for role, value in weights.items()}
    agrees(cell.layer(**LSTM_BIASES, average=True), exact("BlockLSTM", doubled, X, **LSTM_BIASES, use_peephole=True), X)


def test_checkpoint_classes(tmp_path):
    values = checkpoint_of("a/basic_lstm_cell", ("w", "b")) | checkpoint_of("a/cudnn_compatible_lstm_cell", ("w", "b"))
    values |= {name: value for name, value in checkpoint_of("", ("w_ru", "w_c", "b_ru", "b_c")).items()}
    values |= checkpoint_of("a/lstm_v2", ("w", "b")) | checkpoint_of("dense", ("w", "b"))
    values |= {f"a/coupled_input_forget_gate_lstm_cell/{name}": value[..., : 3 * H]
               for name, value in (("kernel", W), ("bias", W[0]))}  # fmt: skip
    for scope in "pq":
        values |= checkpoint_of(f"{scope}/lstm_cell", ("w", "b")) | {f"{scope}/lstm_cell/projection/kernel": W[:H, :3]}
    values["q/lstm_cell/projection/bias"] = W[0, :3]
    values |= {"r/basic_rnn_cell/kernel": W[:, :H], "r/basic_rnn_cell/bias": W[0, :H]}
    values |= checkpoint_of("s/ugrnn_cell", ("w", "b")) | checkpoint_of("t/ZoneoutLSTM/lstm_cell", ("w", "b"))
    values |= checkpoint_of("n/layer_norm_basic_lstm_cell", ("w", "b")) | {
        "n/layer_norm_basic_lstm_cell/input/gamma": W[0]
    }
    cells = write_variables(tmp_path, values).cells
    open_ = ["forget_bias", "cell_clip"]
    summaries = {name: (cell.kind, cell.unsaid, (cell.refused or "")[:22]) for name, cell in cells.items()}
    assert summaries == {
        "a/basic_lstm_cell": ("BasicLSTMCell", ["forget_bias"], ""),
        "a/cudnn_compatible_lstm_cell": ("CudnnCompatibleLSTMCell", [], ""),
        "rnn/gru_cell": ("GRUCell", [], ""),
        "a/lstm_v2": ("LSTMCell", open_, "the order of its gates"),
        "a/coupled_input_forget_gate_lstm_cell": ("CoupledInputForgetGateLSTMCell", open_, ""),
        "p/lstm_cell": ("LSTMBlockCell", [*open_, "proj_clip"], ""),
        "q/lstm_cell": ("LSTMBlockCell", [*open_, "proj_clip"], "it has a projection wi"),
        "r/basic_rnn_cell": ("BasicRNNCell", ["activation"], ""),
        "s/ugrnn_cell": ("LSTMCell", open_, "it is another cell by "),
        "t/ZoneoutLSTM/lstm_cell": ("LSTMBlockCell", open_, "it has zoneout by its "),
        "n/layer_norm_basic_lstm_cell": ("LSTMCell", open_, "it has layer normaliza"),
    }
    assert cells["a/cudnn_compatible_lstm_cell"].layer().forget_bias == 0
    options = {"forget_bias": 1, "cell_clip": 0.5}
    options_of = {"a/coupled_input_forget_gate_lstm_cell": options, "p/lstm_cell": options | {"proj_clip": 0.25},
                  "r/basic_rnn_cell": {"activation": ("leaky_relu", 0.01)}}  # fmt: skip
    assert all(cells[name].check(**arguments).ok for name, arguments in options_of.items())
    layer = cells["p/lstm_cell"].layer(**options, proj_clip=0.25)
    assert (layer.input_size, layer.hidden_size, layer.output_size, layer.proj_clip) == (I + H - 3, H, 3, 0.25)
    assert cells["r/basic_rnn_cell"].layer(activation="relu").activation == "relu"
    with pytest.raises(ValueError, match=r"does not say its activation; pass activation= \(tanh by default\)"):
        cells["r/basic_rnn_cell"].layer()
    weights = drawn("w_ru", "w_c", "b_ru", "b_c")
    agrees(cells["rnn/gru_cell"].layer(), exact("GRUBlockCell", weights, X), X)
    with pytest.raises(ValueError, match="has no forget_bias; leave forget_bias out"):
        cells["rnn/gru_cell"].layer(forget_bias=1)
    with pytest.raises(ValueError, match="there is no moving average of w_ru"):
        cells["rnn/gru_cell"].layer(average=True)


def test_swapped_names_are_told_by_shape(tmp_path):
    values = checkpoint_of("", ("w_ru", "w_c", "b_ru", "b_c"))
    names = [NAMES[role] for role in ("w_ru", "w_c", "b_ru", "b_c")]
    swapped = dict(zip([names[1], names[0], names[3], names[2]], values.values(), strict=True))
    (cell,) = write_variables(tmp_path, swapped).cells.values()
    agrees(cell.layer(), exact("GRUBlockCell", drawn("w_ru", "w_c", "b_ru", "b_c"), X), X)


def test_graph_beside_a_checkpoint(tmp_path):
    """Variables, one of them in parts, and attributes from the .meta; what it says is not changed."""
    values = checkpoint_of("s", ("w", "b"))
    write_variables(tmp_path, values | {"s/kernel/ExponentialMovingAverage": values["s/kernel"] + 1})
    rows = (4, I + H - 4)
    parts = [node(f"s/kernel/part_{k}", "VariableV2", shape=field(7, shape(n, 4 * H)), dtype=kind_of("float32"))
             for k, n in enumerate(rows)]  # fmt: skip
    parts += [number("axis", 0), node("s/kernel", "ConcatV2", ["s/kernel/part_0", "s/kernel/part_1", "axis"])]
    parts += [node("s/bias", "VarHandleOp", shared_name=field(2, "s/bias")), node("read", "ReadVariableOp", ["s/bias"])]
    parts += [*inputs(), block("BlockLSTM", "s/cell", {"w": "s/kernel", "b": "read"}, **LSTM_BIASES)]
    (tmp_path / "model.ckpt.meta").write_bytes(field(2, graph(*parts)))
    (cell,) = opened(tmp_path / "model.ckpt").cells.values()
    assert cell.weights == {"w": "s/kernel", "b": "s/bias"} and cell.unsaid == []
    agrees(cell.layer(), exact("BlockLSTM", drawn("w", "b"), X, **LSTM_BIASES), X)
    agrees(cell.layer(forget_bias=0.5), exact("BlockLSTM", drawn("w", "b"), X, **LSTM_BIASES), X)
    with pytest.raises(ValueError, match=r"forget_bias is 1\.0, but the graph has 0\.5"):
        cell.layer(forget_bias=1.0)
    with pytest.raises(ValueError, match="no moving average of b: 's/bias/ExponentialMovingAverage'"):
        cell.layer(average=True)
    (tmp_path / "model.ckpt.meta").write_bytes(field(2, graph(*parts[1:])))
    (cell,) = opened(tmp_path / "model.ckpt").cells.values()
    assert "part_0', which is not in the graph" in cell.refused


def test_variables_that_are_gone(tmp_path):
    write_variables(tmp_path, checkpoint_of("s", ("b",)))
    parts = [node("w", "VariableV2", shape=field(7, shape(I + H, 4 * H)), dtype=kind_of("float32"))]
    parts += [node("s/bias", "VariableV2"), *inputs(), block("BlockLSTM", "s/cell", {"w": "w", "b": "s/bias"})]
    (tmp_path / "model.ckpt.meta").write_bytes(field(2, graph(*parts)))
    (cell,) = opened(tmp_path / "model.ckpt").cells.values()
    assert cell.refused == "w is the variable 'w', which is not in the checkpoint"


def test_large_cells_are_checked_in_part(tmp_path):
    """A wrong order of gates shows in the first units, too; here the layer is right, and the error small."""
    inputs_, cells = 300, 1000
    g = np.random.default_rng(3)
    w = (g.standard_normal((inputs_ + cells, 4 * cells)) / 30).astype(np.float32)
    b = g.standard_normal(4 * cells).astype(np.float32)
    (cell,) = write(
        tmp_path, *inputs(), real("w", w), real("b", b), block("BlockLSTM", "cell", {"w": "w", "b": "b"})
    ).cells.values()
    assert (cell.input_size, cell.hidden_size) == (inputs_, cells)
    arrays = cell._first_units(cell._read_weights(cell._definition.sources, False))
    columns = np.concatenate([np.arange(k, k + 64) for k in range(0, 4 * cells, cells)])
    rows = np.concatenate([np.arange(64), np.arange(inputs_, inputs_ + 64)])
    np.testing.assert_array_equal(arrays["w"], w[np.ix_(rows, columns)])
    np.testing.assert_array_equal(arrays["b"], b[columns])
    assert cell.check() <= 8


# -------------------------------------------------------------------------------------------------------- commands
def two_cells(tmp_path):
    weights, consts = lstm_consts(False)
    parts = [node("x", "Placeholder"), *consts, *composed_lstm(False, False, change={"j": ("Relu", "split:1")})]
    names = {"w": NAMES["w"], "b": NAMES["b"]}
    parts += [*inputs()[1:], block("BlockLSTM", "fused/cell", names, **LSTM_BIASES)]
    path = tmp_path / "graph.pb"
    path.write_bytes(graph(*parts))
    return path, weights


def test_inspect(tmp_path, capsys):
    path, _ = two_cells(tmp_path)
    assert main(["inspect", str(path)]) == 0
    out = capsys.readouterr().out
    assert "BlockLSTM" in out and "cell_clip=0.75" in out and " ok" in out and f"w is {NAMES['w']}" in out
    assert main(["inspect", str(path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    cell, other = sorted(document["cells"], key=lambda summary: summary["refused"] or "")
    assert "its cell state is not what the block cells have" in other["refused"]
    assert other["error_eps"] is None
    assert cell["refused"] is None and cell["error_eps"] <= 8 and cell["attributes"]["forget_bias"] == 0.5


def test_inspect_what_is_refused_and_unsaid(tmp_path, capsys):
    write_variables(tmp_path, checkpoint_of() | checkpoint_of("p/ugrnn_cell", ("w", "b")))
    assert main(["inspect", str(tmp_path / "model.ckpt")]) == 0
    out = capsys.readouterr().out
    assert "not in the file: forget_bias, cell_clip" in out
    assert "refused: it is another cell by its name, ugrnn_cell" in out
    assert main(["inspect", str(tmp_path / "model.ckpt"), "--json"]) == 0
    cells = {cell["cell"]: cell for cell in json.loads(capsys.readouterr().out)["cells"]}
    assert cells["rnn/lstm_cell"]["attributes"]["forget_bias"] is None and cells["rnn/lstm_cell"]["error_eps"] is None


def test_commands_escape_what_a_terminal_would_obey(tmp_path, capsys):
    """PATH, OUT, names of cells and variables, and reasons: whatever others have named."""
    name, folder = "a\x1b[2Jb\x07/lstm_cell", tmp_path / "\x1b]0;title\x07"
    folder.mkdir()
    parts = [*inputs(), real(f"{name}/kernel", W), real("b", drawn("b")["b"])]
    parts += [block("BlockLSTM", "cell", {"w": f"{name}/kernel", "b": "b"})]
    parts += [block("BlockLSTM", "\u202ecell\x9b", {"w": f"{name}/kernel", "b": "\x1bmissing"})]
    path, none = folder / "graph.pb", folder / "none.pb"
    path.write_bytes(graph(*parts))
    none.write_bytes(graph(node("x", "Placeholder")))
    out = folder / "layer.npz"
    for arguments, status in (
        (["inspect", path], 0),
        (["inspect", none], 0),
        (["inspect", folder], 1),
        (["extract", path, out, "--cell", "\x1b"], 1),
        (["extract", path, out], 0),
        (["extract", path, folder / "layer.onnx"], 0),
        (["info", out], 0),
        (["info", folder / "no.npz"], 1),
    ):
        assert main([*map(str, arguments)]) == status, arguments
    for wrong in (["info", "--x\x1b"], ["extract", str(path), "x\x1b.pdf"], ["verify", "\x1b"], ["\x1b"]):
        with pytest.raises(SystemExit):
            main(wrong)
    output, err = capsys.readouterr()
    assert r"a\x1b[2Jb\x07/lstm_cell" in output and r"\x1b]0;title\x07/layer.npz is LSTM" in output and r"\x07" in err
    assert r"\u202ecell\x9b" in output and r"\x1bmissing" in output
    assert all(line.isprintable() for line in (output + err).split("\n"))
    cells = opened(path).cells
    texts = [repr(cells), *(cell.refused or "" for cell in cells.values())]
    assert all(line.isprintable() for text in texts for line in text.split("\n"))


def test_inspect_without_cells(tmp_path, capsys):
    write_variables(tmp_path, {"dense/kernel": W})
    assert main(["inspect", str(tmp_path / "model.ckpt")]) == 0
    assert "There is no RNN, LSTM or GRU in" in capsys.readouterr().out


@pytest.mark.parametrize("ending", [".npz", ".safetensors"])
def test_extract(tmp_path, capsys, ending):
    path, weights = two_cells(tmp_path)
    out = tmp_path / f"layer{ending}"
    assert main(["extract", str(path), str(out)]) == 0
    assert "off by" in capsys.readouterr().out
    agrees(blockcell.load(out), exact("BlockLSTM", weights, X, **LSTM_BIASES), X)


def test_extract_asks(tmp_path, capsys):
    model, out = str(tmp_path / "model.ckpt"), tmp_path / "layer.npz"
    first, second = checkpoint_of(), checkpoint_of("b/lstm_cell", seed=1)
    averages = {f"{name}/ExponentialMovingAverage": value * 2 for name, value in second.items()}
    write_variables(tmp_path, first | second | averages)
    options = ["--forget-bias", "0.5", "--cell-clip", "0.75"]
    for arguments, message in (
        (options, "has 2 cells; say which with --cell: b/lstm_cell, rnn/lstm_cell. Not all: the file does not tell"),
        (["--cell", "c"], "has no cell c; there are: b/lstm_cell"),
        (["--cell", "b/lstm_cell", *options[2:]], "does not say forget_bias of b/lstm_cell; pass --forget-bias"),
        (["--cell", "b/lstm_cell", "--streaming", *options], "--streaming is for .onnx"),
        (["--cell", "rnn/lstm_cell", "--average", *options], "no moving average"),
    ):
        assert main(["extract", model, str(out), *arguments]) == 1
        assert message in capsys.readouterr().err and not out.exists()
    assert main(["extract", model, str(out), "--cell", "b/lstm_cell", "--average", "--json", *options]) == 0
    assert [cell["cell"] for cell in json.loads(capsys.readouterr().out)["cells"]] == ["b/lstm_cell"]
    weights = {role: value * 2 for role, value in drawn("w", "b", *PEEPHOLES, seed=1).items()}
    agrees(blockcell.load(out), exact("BlockLSTM", weights, X, **LSTM_BIASES, use_peephole=True), X)


def test_commands_on_a_trained_model(tmp_path, capsys, monkeypatch):
    """Two cells on top of each other, that TensorFlow trained; its results are in test_readme.py's page."""
    zipfile.ZipFile(Path(__file__).parents[1] / "golden" / "digits.zip").extractall(tmp_path)
    model, out = str(tmp_path / "digits"), tmp_path / "layer.npz"
    names = [f"rnn/multi_rnn_cell/cell_{k}" for k in ("0/lstm_cell", "1/gru_cell")]
    assert main(["inspect", model, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["one_layer"] and document["ok"]
    summaries = [(cell["cell"], cell["input"], cell["input_from"], cell["reverse"]) for cell in document["cells"]]
    assert summaries == [(names[0], "x", [], False), (names[1], None, names[:1], False)]
    for name in names:
        assert main(["extract", model, str(tmp_path / f"{name[-8:]}.npz"), "--cell", name, "--json"]) == 0
        assert [cell["cell"] for cell in json.loads(capsys.readouterr().out)["cells"]] == [name]
    assert main(["extract", model, str(out), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [cell["cell"] for cell in document["cells"]] == names and document["layer"].startswith("Stack([LSTM(")
    stack = blockcell.load(out)
    lstm, gru = (blockcell.load(tmp_path / f"{name[-8:]}.npz") for name in names)
    x = np.load(tmp_path / "digits" / "tf.npz")["x"]
    np.testing.assert_array_equal(stack(x)[0], gru(lstm(x)[0])[0])
    out.unlink()
    monkeypatch.setattr(Found, "check", lambda *_, **__: Check(25.0, 24.0))
    assert main(["inspect", model]) == 1 and "FAILED" in capsys.readouterr().out
    assert main(["extract", model, str(out)]) == 1 and "25 eps, and 24 are allowed" in capsys.readouterr().err
    assert not out.exists()


def test_named_cells_are_a_stack(tmp_path, capsys):
    """In the order of their names, and forget_bias is for the LSTM among them."""
    g = np.random.default_rng(2)
    shapes = {
        "low/basic_lstm_cell": {"kernel": (5 + 6, 24), "bias": (24,)},
        "high/gru_cell": {"gates/kernel": (6 + 5, 10), "gates/bias": (10,), "candidate/kernel": (11, 5)},
    }
    shapes["high/gru_cell"]["candidate/bias"] = (5,)
    names = {f"{scope}/{name}": shape for scope, by_name in shapes.items() for name, shape in by_name.items()}
    model = write_variables(tmp_path, {name: g.standard_normal(shape).astype("f4") for name, shape in names.items()})
    path, out, (low, high) = str(tmp_path / "model.ckpt"), tmp_path / "layer.npz", shapes
    assert main(["extract", path, str(out), "--cell", low, "--cell", high, "--forget-bias", "1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [cell["cell"] for cell in document["cells"]] == [low, high] and document["layer"].startswith("Stack([LSTM(")
    x = g.standard_normal((3, 2, 5)).astype("f4")
    below, above = model.cells[low].layer(forget_bias=1.0), model.cells[high].layer()
    np.testing.assert_array_equal(blockcell.load(out)(x)[0], above(below(x)[0])[0])
    assert main(["extract", path, str(out), "--cell", high, "--cell", low, "--forget-bias", "0"]) == 0
    assert blockcell.load(out).input_size == 6  # the other one is below
    assert main(["extract", path, str(out), "--cell", high, "--cell", low]) == 1
    assert f"does not say forget_bias of {low}" in capsys.readouterr().err
    assert main(["extract", path, str(out), "--cell", high, "--forget-bias", "1"]) == 1
    assert "has no forget_bias" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("a/lstm_cell", "b/lstm_cell"), ["a/lstm_cell gives 4", "b/lstm_cell, which is named behind it, takes 5"]),
        (("a/lstm_cell", "c/lstm_cell"), ["no cell c/lstm_cell", "a/lstm_cell, b/lstm_cell"]),
    ],
)
def test_named_cells_that_do_not_fit(tmp_path, capsys, names, words):
    write_variables(tmp_path, checkpoint_of("a/lstm_cell", ("w", "b")) | checkpoint_of("b/lstm_cell", ("w", "b")))
    out = tmp_path / "layer.npz"
    options = [*(text for name in names for text in ("--cell", name)), "--forget-bias", "1", "--cell-clip", "0"]
    assert main(["extract", str(tmp_path / "model.ckpt"), str(out), *options]) == 1
    error = capsys.readouterr().err
    assert all(word in error for word in words) and not out.exists()


def test_cells_that_share_weights_are_named(tmp_path, capsys):
    """A program for training, validation and testing has each layer three times, with the same variables."""
    layers, parts = [], []
    for k in (0, 1):
        layers.append({"w": f"rnn/cell_{k}/kernel", "b": f"rnn/cell_{k}/bias"})
        parts += [real(layers[k][role], value) for role, value in drawn("w", "b", seed=k).items()]
    parts += [
        block("LSTMBlockCell", f"{graph}/cell_{k}/op", names)
        for graph in ("train", "valid", "test")
        for k, names in enumerate(layers)
    ]
    cells = write(tmp_path, *inputs(), *parts).cells
    assert len(cells) == 6
    of_layer = [[name for name in cells if cells[name].weights == layer] for layer in layers]
    expected = {name: tuple(other for other in cell if other != name) for cell in of_layer for name in cell}
    assert {name: cells.sharing(name) for name in cells} == expected
    assert {len(names) for names in expected.values()} == {2}
    assert main(["inspect", str(tmp_path / "graph.pb"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {cell["cell"]: tuple(cell["shares_weights_with"]) for cell in document["cells"]} == expected
    assert main(["inspect", str(tmp_path / "graph.pb")]) == 0
    out = capsys.readouterr().out
    assert all(f"it shares these with {', '.join(names)}" in out for names in expected.values())


def test_cells_of_one_shape_do_not_share_weights(tmp_path):
    model = write_variables(tmp_path, checkpoint_of("a/lstm_cell") | checkpoint_of("b/lstm_cell"))
    assert [model.cells.sharing(name) for name in model.cells] == [(), ()]


@pytest.mark.parametrize("streaming", [False, True])
def test_extract_to_onnx(tmp_path, capsys, streaming):
    runtime = pytest.importorskip("onnxruntime")
    path, weights = two_cells(tmp_path)
    out = tmp_path / "layer.onnx"
    assert main(["extract", str(path), str(out), *["--streaming"] * streaming]) == 0
    session = runtime.InferenceSession(str(out), providers=["CPUExecutionProvider"])
    names = {argument.name: argument for argument in session.get_inputs()}
    zeros = {name: np.zeros((B, H), np.float32) for name in names if name.endswith("_prev")}
    if "lengths" in names:
        zeros["lengths"] = np.full(B, T)
    x = X[0] if len(names["x"].shape) == 2 else X[:1] if streaming else X
    y = session.run(["y"], {"x": x, **zeros})[0].reshape(-1, B, H)
    expected = exact("BlockLSTM", weights, X, **LSTM_BIASES)[: len(y)]
    assert formulas.error_in_eps(y, expected, float(np.finfo(np.float32).eps)) <= 16


@pytest.mark.parametrize("axes", [[1], [-2], [1, 1], [-2, 1], [3], [-4], [1.5]], ids=str)
def test_axes_that_a_squeeze_drops(tmp_path, axes):
    listed = field(1, b"".join(field(3, axis) if isinstance(axis, int) else field(4, axis) for axis in axes))
    reader = GraphReader(write(tmp_path, node("s", "Squeeze", ["x"], squeeze_dims=listed)).graphs[0])
    if {*axes} <= {1, -2}:
        assert slice_index(reader, Place("", "s"), (2, 1, 3)) == (slice(None), 0, slice(None))
    else:
        with pytest.raises(UnknownValue, match="which drops"):
            slice_index(reader, Place("", "s"), (2, 1, 3))
