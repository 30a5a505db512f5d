"""Plain, projected and coupled cells, other activations, and initial states, in graphs made node by node."""

from __future__ import annotations

import numpy as np
import pytest
from tf_cells import B, H, I, T, X, block, inputs, looped, real, scoped_nodes, write
from tf_composed import (
    cells_of,
    keras_lstm,
    lstm_weights,
    projected_lstm,
    projected_weights,
    renamed,
    rnn,
    rnn_weights,
)
from tf_files import graph, node

from blockcell import formulas
from blockcell.activations import PARAMETERS
from blockcell.command import main
from blockcell.tensorflow import open as opened

EPS = float(np.finfo(np.float32).eps)
ZEROS = np.zeros((B, H))


def behind(operand, out, activation):
    """Return the nodes of an activation, as lines."""
    number = iter(f"{out}_{k}" for k in range(9))

    def const(value):
        lines[name := next(number)] = ("Const", float(value))
        return name

    def op(kind, *of):
        lines[name := next(number)] = (kind, *of)
        return name

    lines: dict = {}
    match activation:
        case "hard_sigmoid":
            lines[out] = ("RealDiv", op("Relu6", op("AddV2", operand, const(3))), const(6))
        case "hard_sigmoid by a sixth":
            lines[out] = ("Mul", const(np.float32(1 / 6)), op("Relu6", op("AddV2", operand, const(3))))
        case ("hard_sigmoid", a, b):
            line = op("AddV2", op("Mul", const(a), operand), const(b))
            lines[out] = ("Maximum", op("Minimum", line, const(1)), const(0))
        case "leaky_relu by a product":  # as TensorFlow wrote it before 1.13
            lines[out] = ("Maximum", op("Mul", const(0.25), operand), operand)
        case "elu of another alpha":
            elu = op("Elu", operand)
            lines[out] = ("SelectV2", op("Greater", operand, const(0)), elu, op("Mul", const(0.5), elu))
        case "swish":
            lines[out] = ("Mul", operand, op("Sigmoid", operand))
        case "linear":
            lines[out] = ("Identity", operand)
        case name:
            ops = {"leaky_relu": "LeakyRelu", "exponential": "Exp"}
            lines[out] = (ops.get(name, name.capitalize()), operand)
    return lines


ACTIVATIONS = [*PARAMETERS, "hard_sigmoid by a sixth", ("hard_sigmoid", 0.2, 0.5)]
ELSE = {"hard_sigmoid by a sixth": "hard_sigmoid"}


def agrees(y, exact):
    assert np.abs(y - exact).max() <= 16 * EPS * max(1, np.abs(exact).max())


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("kernels", [1, 2])
def test_rnn(tmp_path, activation, kernels):
    """In a loop, with one kernel for [x, h] and with two, of which nothing but the loop tells which is for h."""
    weights = {name: value / (8 if activation == "exponential" else 1) for name, value in rnn_weights().items()}
    lines = rnn() | behind("z", "h", activation)
    if kernels == 2:
        lines |= {"from_x": ("MatMul", "x", "v"), "from_h": ("MatMul", "h_prev", "u"),
                  "product": ("AddV2", "from_h", "from_x")}  # fmt: skip
    kernels_apart = {"v": weights["kernel"][:I], "u": weights["kernel"][I:], "bias": weights["bias"]}
    (cell,) = cells_of(tmp_path, lines, "h", **(weights if kernels == 1 else kernels_apart)).values()
    known = ELSE.get(activation, activation)
    assert (cell.kind, cell.refused) == ("RNN" if kernels == 1 else "Keras SimpleRNN", None)
    assert cell.attributes == {"activation": known} and cell.check().ok
    exact = formulas.FORMULAS["block_rnn"](seq_len_max=T, x=X, h_prev=ZEROS, w=weights["kernel"], b=weights["bias"],
                                           activation=known).h  # fmt: skip
    agrees(cell.layer()(X)[0], exact)


@pytest.mark.parametrize("activation", ["tanh", "relu", "linear"])
def test_an_rnn_that_is_written_out(tmp_path, activation):
    """Three steps, and behind each a dense layer in the cell's scope."""
    weights, lines = rnn_weights(), {"out_kernel": ("Const", np.ones((H, 2), np.float32))}
    for k in range(3):
        step = rnn() | behind("z", "h", activation) | {"out": ("MatMul", "h", "out_kernel"), "y": ("Tanh", "out")}
        lines |= renamed(step, {name: f"{name}_{k}" for name in step} | {"h_prev": f"h_{k - 1}" if k else "zeros"})
    lines["zeros"] = ("Const", np.zeros((B, H), np.float32))
    (cell,) = cells_of(tmp_path, lines, **weights).values()
    assert (len(cell.nodes), cell.refused, cell.attributes) == (3, None, {"activation": activation})
    assert cell.initial_state is None and cell.state_from is None and cell.check().ok


@pytest.mark.parametrize(("scope", "is_found"), [("net/basic_rnn_cell", True), ("net/dense", False)])
def test_one_step_of_an_rnn_is_told_by_its_name(tmp_path, scope, is_found):
    lines = rnn() | {"h_prev": ("Placeholder",)}
    cells = cells_of(tmp_path, lines, scope=scope, **rnn_weights())
    assert [(cell.kind, cell.attributes) for cell in cells.values()] == [
        ("BasicRNNCell", {"activation": "tanh"})
    ] * is_found


@pytest.mark.parametrize(("reader", "is_used"), [("ZerosLike", False), ("Identity", True)])
def test_a_step_before_the_loop(tmp_path, reader, is_used):
    """Keras has one to learn shapes; a step whose result is used is a step of the cell."""
    first = renamed(rnn(), {name: f"{name}_0" for name in rnn()} | {"h_prev": "start"})
    (cell,) = cells_of(tmp_path, rnn() | first | {"y": (reader, "h_0")}, "h", **rnn_weights()).values()
    assert cell.refused is None and len(cell.nodes) == 1 + is_used


NO_CELLS = {
    "what another layer gave": {"other": ("Tanh", "h"), "h_next": ("NextIteration", "other")},
    "what does not change": {"h_next": ("NextIteration", "h_prev")},
    "twice": {"again": ("BiasAdd", "h", "bias"), "h_next": ("NextIteration", "again")},
}


@pytest.mark.parametrize("change", NO_CELLS)
def test_dense_layers_in_loops_are_no_cells(tmp_path, change):
    """Only what reads its own last output is one."""
    assert not cells_of(tmp_path, rnn("Relu", **NO_CELLS[change]), "h", **rnn_weights())


@pytest.mark.parametrize("op", ["Relu6", "Softmax", "Sin"])
def test_an_rnn_of_another_activation_is_refused(tmp_path, op):
    (cell,) = cells_of(tmp_path, rnn(op), "h", **rnn_weights()).values()
    assert cell.refused == f"the node 'net/thing/h' is a {op}, which is no activation of layers"


@pytest.mark.parametrize("states", [["h"], []])
@pytest.mark.parametrize("activation", ["leaky_relu by a product", "elu of another alpha", "swish"])
def test_an_rnn_of_an_activation_of_several_nodes_is_refused(tmp_path, activation, states):
    """In a loop and in a single step, which is not taken for a linear one or one of a part of the activation."""
    lines = rnn() | behind("z", "h", activation) | ({} if states else {"h_prev": ("Placeholder",)})
    (cell,) = cells_of(tmp_path, lines, *states, scope="net/basic_rnn_cell", **rnn_weights()).values()
    assert cell.refused is not None


@pytest.mark.parametrize("scope", ["net/sru_cell", "net/thing"])
def test_an_sru_is_refused(tmp_path, scope):
    """Its state goes into no product."""
    lines = {"axis": ("Const", np.int32(1)), "product": ("MatMul", "x", "kernel"),
             "split": ("Split", "axis", "product", {"num_split": 2}), "f": ("Sigmoid", "split"),
             "one": ("Const", 1.0), "rest": ("Sub", "one", "f"), "keep": ("Mul", "f", "c_prev"),
             "new": ("Mul", "rest", "split:1"), "c": ("AddV2", "keep", "new")}  # fmt: skip
    kernel = np.ones((I, 2 * H), np.float32)
    (cell,) = cells_of(tmp_path, lines, "c", scope=scope, kernel=kernel).values()
    assert cell.refused == f"what goes into the node '{scope}/split', which is a Split, is not what a GRU has there"


@pytest.mark.parametrize("recurrent", ["sigmoid", "hard_sigmoid", ("hard_sigmoid", 0.2, 0.5), "softsign"], ids=str)
@pytest.mark.parametrize("activation", ["sigmoid", "relu", "hard_sigmoid", "leaky_relu", "linear"], ids=str)
def test_an_lstm_of_other_activations(tmp_path, activation, recurrent):
    weights, lines = lstm_weights(), keras_lstm()
    for out, operand, kind in (("i", "part_0", recurrent), ("f", "part_1", recurrent), ("g", "part_2", activation),
                             ("o", "part_3", recurrent), ("t", "c", activation)):  # fmt: skip
        lines |= behind(operand, out, kind)
    (cell,) = cells_of(tmp_path, lines, "c", "h", **weights).values()
    expected = {"activation": activation} | ({} if recurrent == "sigmoid" else {"recurrent_activation": recurrent})
    assert cell.refused is None and {key: cell.attributes[key] for key in expected} == expected
    assert cell.attributes["forget_bias"] == 0 and cell.check().ok
    w = np.concatenate([weights["kernel"], weights["recurrent"]]) / 4
    (cell,) = cells_of(tmp_path, lines, "c", "h", **{name: value / 4 for name, value in weights.items()}).values()
    exact = formulas.lstm_layer(x=X, cs_prev=ZEROS, h_prev=ZEROS, w=w, b=weights["bias"] / 4, activation=activation,
                                recurrent_activation=recurrent, gates=("i", "f", "ci", "o")).h  # fmt: skip
    agrees(cell.layer()(X)[0], exact)


def test_a_projected_lstm(tmp_path):
    weights = projected_weights()
    (cell,) = cells_of(tmp_path, projected_lstm(), "c", "h", **weights).values()
    assert (cell.refused, cell.input_size, cell.hidden_size, cell.output_size) == (None, I, H, H - 1)
    assert cell.attributes["proj_clip"] == 0.25 and cell.weights["w_p"] == "net/thing/projection"
    w = np.concatenate([weights["kernel"], weights["recurrent"]])
    exact = formulas.lstm_layer(x=X, cs_prev=ZEROS, h_prev=ZEROS[:, 1:], w=w, b=weights["bias"], proj_clip=0.25,
                                w_p=weights["projection"], gates=("i", "f", "ci", "o")).h  # fmt: skip
    agrees(cell.layer()(X)[0], exact)
    assert cell.check().ok


def test_a_large_projected_cell_is_checked_in_part(tmp_path):
    inputs, size, out = 300, 700, 200
    g = np.random.default_rng(5)
    shapes = {
        "kernel": (inputs, 4 * size),
        "recurrent": (out, 4 * size),
        "projection": (size, out),
        "bias": (4 * size,),
    }
    weights = {name: (g.standard_normal(shape) / 30).astype(np.float32) for name, shape in shapes.items()}
    lines = projected_lstm()
    for k in range(4):
        lines |= {f"begin_{k}": ("Const", np.int32([0, k * size])),
                  f"end_{k}": ("Const", np.int32([0, k * size + size]))}  # fmt: skip
    (cell,) = cells_of(tmp_path, lines, "c", "h", **weights).values()
    assert (cell.input_size, cell.hidden_size, cell.output_size) == (inputs, size, out) and cell.check() <= 8


def test_a_dense_layer_behind_an_lstm_is_no_projection(tmp_path):
    lines = keras_lstm() | {"p": ("MatMul", "h", "projection")}
    (cell,) = cells_of(tmp_path, lines, "c", "h", **lstm_weights(), projection=np.ones((H, 3), np.float32)).values()
    assert cell.refused is None and "w_p" not in cell.weights and cell.output_size == H


def test_a_coupled_lstm(tmp_path):
    """Of a kernel with four gates, of which three are used, the input gate being 1 - f."""
    weights = lstm_weights()
    lines = keras_lstm() | {"one": ("Const", 1.0), "i": ("Sub", "one", "f")}
    (cell,) = cells_of(tmp_path, lines, "c", "h", **weights).values()
    assert cell.refused is None and cell.attributes["coupled"] is True and cell.check().ok
    columns = np.concatenate([np.arange(4 * H).reshape(4, H)[k] for k in (2, 1, 3)])
    w = np.concatenate([weights["kernel"], weights["recurrent"]])[:, columns]
    exact = formulas.lstm_layer(x=X, cs_prev=ZEROS, h_prev=ZEROS, w=w, b=weights["bias"][columns],
                                gates=("ci", "f", "o")).h  # fmt: skip
    agrees(cell.layer()(X)[0], exact)


# ------------------------------------------------------------------------------------------------------ initial states
ROWS = np.random.default_rng(8).uniform(-1, 1, (B, H)).astype(np.float32)
STARTS = {  # the nodes, what the state is, and where it is said to come from
    "a constant": ({"start": ("Const", ROWS)}, ROWS, "net/thing/start"),
    "a row": ({"row": ("Const", ROWS[:1]), "times": ("Const", np.int32([B, 1])), "start": ("Tile", "row", "times")},
              ROWS[:1], "net/thing/row"),
    "a vector beside zeros": ({"row": ("Const", ROWS[0]), "of": ("Placeholder",), "zeros": ("ZerosLike", "of"),
                               "start": ("AddV2", "zeros", "row")}, ROWS[:1], "net/thing/row"),
    "a number": ({"half": ("Const", 0.5), "dims": ("Placeholder",), "start": ("Fill", "dims", "half")},
                 np.full((1, H), 0.5), "net/thing/start"),
    "zeros": ({"zero": ("Const", 0.0), "dims": ("Placeholder",), "start": ("Fill", "dims", "zero")}, None, None),
    "constant zeros": ({"start": ("Const", 0 * ROWS)}, None, None),
    "fed": ({}, None, "net/thing/start"),
    "computed": ({"given": ("Placeholder",), "start": ("Tanh", "given")}, None, "net/thing/start"),
    "integers": ({"start": ("Const", np.ones((B, H), np.int32))}, None, "net/thing/start"),
    "of another size": ({"start": ("Const", ROWS[:, :3])}, None, "net/thing/start"),
}  # fmt: skip


@pytest.mark.parametrize("start", STARTS)
def test_initial_states(tmp_path, start):
    lines, rows, name = STARTS[start]
    weights = rnn_weights()
    (cell,) = cells_of(tmp_path, rnn(**lines), "h", **weights).values()
    assert cell.refused is None and cell.state_from == name
    if rows is None:
        assert cell.initial_state is None
        return
    np.testing.assert_array_equal(cell.initial_state["h"], rows)
    first = np.broadcast_to(rows, (B, H))
    exact = formulas.FORMULAS["block_rnn"](seq_len_max=T, x=X, h_prev=first, w=weights["kernel"], b=weights["bias"]).h
    agrees(cell.layer()(X, {"h": first.astype(np.float32)})[0], exact)


@pytest.mark.parametrize("operand", ["start:1", "missing", "start:x"])
def test_initial_states_that_no_node_gives(tmp_path, operand):
    """In a damaged graph the cell may still be right."""
    lines = rnn(start=("Const", ROWS), h_enter=("Enter", operand))
    cells = cells_of(tmp_path, lines, "h", **rnn_weights())
    assert all(cell.initial_state is None and cell.state_from for cell in cells.values() if cell.refused is None)


def test_initial_states_of_a_stack_and_what_commands_say(tmp_path, capsys):
    """One of two cells begins with its output at zeros and its cell state not."""
    lstm, gru = lstm_weights(), rnn_weights()
    parts = [node("x", "Placeholder"), *(real(f"a/{name}", value) for name, value in lstm.items())]
    parts += [*(real(f"b/{name}", value[: H + H] if name == "kernel" else value) for name, value in gru.items())]
    lines = keras_lstm() | looped("c", "h") | {"c_enter": ("Enter", "first"), "first": ("Const", ROWS)}
    lines |= {"h_enter": ("Enter", "zeros"), "zeros": ("Const", 0 * ROWS)}
    on_top = rnn(concat=("ConcatV2", "=a/h", "h_prev", "axis")) | looped("h")
    path = tmp_path / "graph.pb"
    kernel = np.concatenate([gru["kernel"][:H], gru["kernel"][-H:]])
    parts = [part for part in parts if b"b/kernel" not in part] + [real("b/kernel", kernel)]
    path.write_bytes(graph(*parts, *scoped_nodes("a", lines), *scoped_nodes("b", on_top)))
    cells = opened(path).cells
    assert cells["a"].initial_state["h"] is None and cells["b"].initial_state is None
    np.testing.assert_array_equal(cells["a"].initial_state["cs"], ROWS)
    with pytest.warns(UserWarning, match="not compared with the graph, because"):  # its loop has no condition
        layer, state = cells.layer(), cells.initial_state
    y, _ = layer(X, state)
    stream = layer.stream(B)
    stream.state = state
    np.testing.assert_array_equal(stream.run(X), y)
    w = np.concatenate([lstm["kernel"], lstm["recurrent"]])
    below = formulas.lstm_layer(x=X, cs_prev=ROWS, h_prev=ZEROS, w=w, b=lstm["bias"], gates=("i", "f", "ci", "o")).h
    start = {"h_prev": np.zeros((B, H)), "b": gru["bias"]}
    agrees(y, formulas.FORMULAS["block_rnn"](seq_len_max=T, x=below, w=kernel, **start).h)
    assert main(["inspect", str(path)]) == 0
    message = "begins with the state a/first: pass the cell's initial_state to calls as state="
    assert f"  it {message}" in capsys.readouterr().out
    assert main(["extract", str(path), str(tmp_path / "layer.npz")]) == 0
    assert f"a {message}, which is not in" in capsys.readouterr().out


@pytest.mark.parametrize("op", ["BlockLSTM", "LSTMBlockCell"])
def test_initial_states_of_ops(tmp_path, op):
    g = np.random.default_rng(0)
    w, b = g.standard_normal((I + H, 4 * H)).astype(np.float32), np.zeros(4 * H, np.float32)
    names = {"w": "net/lstm_cell/kernel", "b": "net/lstm_cell/bias", "cs_prev": "first", "h_prev": "zero"}
    parts = [*inputs(), real("net/lstm_cell/kernel", w), real("net/lstm_cell/bias", b), real("first", ROWS)]
    parts += [real("zero", 0 * ROWS), block(op, "net/lstm_cell/op", names)]
    (cell,) = write(tmp_path, *parts).cells.values()
    assert cell.state_from == "first" and cell.initial_state["h"] is None
    np.testing.assert_array_equal(cell.initial_state["cs"], ROWS)
