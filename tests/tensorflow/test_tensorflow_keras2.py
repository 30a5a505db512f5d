"""Cells as Keras 2 writes them (TensorFlow 2.0 to 2.15, tf_keras), in graphs made node by node."""

from __future__ import annotations

import numpy as np
import pytest
from tf_cells import B, H, I, T, called, function, kind_of, library, looped, real, scoped_nodes, write
from tf_composed import cells_of, keras_gru, keras_gru_weights, keras_lstm, lstm_weights, renamed, rnn, rnn_weights
from tf_files import node

from blockcell import formulas

EPS = float(np.finfo(np.float32).eps)
X = np.random.default_rng(7).standard_normal((T, B, I)).astype(np.float32)
ONES = {  # arrays of ones, as tf.ones_like gives them where the shape is known and where it is not
    "OnesLike": ("OnesLike", "h_prev"),
    "Const": ("Const", np.ones((B, H), np.float32)),
    "Fill": ("Fill", "shape", "one"),
}


def exact(weights):
    """Return what Keras' GRU computes of X, in float64; its gates are in the order z, r, h."""
    kernel, recurrent, bias = (weights[name].astype(np.float64) for name in ("kernel", "recurrent", "bias"))
    z, r, c = np.split(np.concatenate([kernel, recurrent]), 3, 1)
    arguments = {"w_ru": np.concatenate([r, z], 1), "w_c": c}
    after = bias.ndim == 2
    z, r, c = np.split(bias.sum(0) if after else bias, 3)
    arguments |= {"b_ru": np.concatenate([r, z]), "b_c": c}
    if after:
        arguments |= {"b_c": bias[0, 2 * H :], "b_hc": bias[1, 2 * H :]}
    op = formulas.FORMULAS["block_gru_reset_after" if after else "block_gru"]
    return op(seq_len_max=T, x=X, h_prev=np.zeros((B, H)), **arguments).h


def check_gru(cell, weights):
    """Check that a cell that was found is the GRU with these weights."""
    assert cell.refused is None and cell.attributes == ({"reset_after": True} if weights["bias"].ndim == 2 else {})
    assert cell.check() <= 8
    assert formulas.error_in_eps(cell.layer()(X)[0], exact(weights), EPS) <= 8


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("split", [("Split",), ("SplitV", [H] * 3), ("SplitV", [H, H, -1]), ("SplitV", [-1, H, H])])
def test_products_that_are_split_by_sizes(tmp_path, after, split):
    weights = keras_gru_weights(after)
    (cell,) = cells_of(tmp_path, keras_gru(after, *split), "h", **weights).values()
    check_gru(cell, weights)


def test_biases_of_float16(tmp_path):
    """As mixed precision has them: the layer has their sum rounded to float16, and is compared without that error."""
    weights = {name: value.astype(np.float16) for name, value in keras_gru_weights(True).items()}
    (cell,) = cells_of(tmp_path, keras_gru(True), "h", **weights).values()
    layer = cell.layer()
    assert layer.dtype == np.float16 and cell.check().ok
    bias = weights["bias"][0] + weights["bias"][1]
    np.testing.assert_array_equal(layer.weights["b_ru"], np.concatenate([bias[H : 2 * H], bias[:H]]))


CELLS = {  # nodes, weights and states
    "LSTM": (keras_lstm(), lstm_weights(), ["c", "h"]),
    "GRU": (keras_gru(False), keras_gru_weights(False), ["h"]),
    "GRU that resets after": (keras_gru(True), keras_gru_weights(True), ["h"]),
    "RNN": (rnn(), rnn_weights(), ["h"]),
}


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("widened", [False, True])
def test_weights_that_are_rounded_to_bfloat16(tmp_path, cell, widened):
    """As the policy "mixed_bfloat16" has them, which no layer has."""
    lines, weights, states = CELLS[cell]
    rounded = {name: f"{name}_{'widened' if widened else 'rounded'}" for name in weights}
    lines = {key: tuple(rounded.get(part, part) if isinstance(part, str) else part for part in line)
             for key, line in lines.items()}  # fmt: skip
    for name in weights:
        narrow = {"SrcT": kind_of("float32"), "DstT": kind_of("bfloat16")}
        lines |= {
            f"{name}_rounded": ("Cast", name, narrow),
            f"{name}_widened": ("Cast", f"{name}_rounded", {"SrcT": narrow["DstT"], "DstT": narrow["SrcT"]}),
        }
    (found_cell,) = cells_of(tmp_path, lines, *states, **weights).values()
    assert "is of bfloat16, rounded by the graph from float32" in found_cell.refused
    with pytest.raises(ValueError, match="bfloat16, rounded by the graph from float32"):
        found_cell.layer()


NO_LAYER_HAS = {
    "erf": ({"c": ("Erf", "c_bar")}, "it has an activation that layers do not have: the node 'net/thing/c' is a Erf"),
    "swish": (
        {"gate": ("Sigmoid", "c_bar"), "c": ("Mul", "gate", "c_bar")},
        "what follows the product 'net/thing/from_h' with net/thing/recurrent is no RNN, LSTM or GRU",
    ),
}


@pytest.mark.parametrize("activation", NO_LAYER_HAS)
def test_the_reason_is_the_activation(tmp_path, activation):
    """Keras has a step before the loop, to learn shapes, which shows less than the loop itself."""
    change, reason = NO_LAYER_HAS[activation]
    step = keras_gru(False, **change)
    weights = [real(f"net/thing/{name}", value) for name, value in keras_gru_weights(False).items()]
    state = "net/thing/h_prev"
    body = function("body", ["x", state], ["x", "net/thing/h"], *weights, *scoped_nodes("net/thing", step))
    loop = node("loop", "While", ["x", state], body=called("body"), cond=called("cond"))
    before = [
        node("x", "Placeholder"),
        real(state, np.zeros((B, H), np.float32)),
        *weights,
        *scoped_nodes("net/thing", step),
    ]
    model = write(tmp_path, *before, loop, more=library(body, function("cond", ["x", state], ["x"])))
    (cell,) = model.cells.values()
    assert cell.refused == reason


@pytest.mark.parametrize("sizes", [[H, H, H + 1], [H, -1, -1], [H, H], [-1, 2 * H, 2 * H], [H, 2 * H, 0]])
def test_sizes_that_do_not_fit(tmp_path, sizes):
    (cell,) = cells_of(tmp_path, keras_gru(True, sizes=sizes), "h", **keras_gru_weights(True)).values()
    assert cell.refused is not None


def lstm_of_states_times_ones():
    """LSTMCell.call with implementation=1 and recurrent_dropout: a product with ones for each gate's own product."""
    lines = {
        "one": ("Const", 1.0),
        "shape": ("Const", np.int32([B, H])),
        "strides": ("Const", np.int32([1, 1])),
        "from_x": ("MatMul", "x", "kernel"),
        "x_bar": ("BiasAdd", "from_x", "bias"),
    }
    for k, name in enumerate(("i", "f", "g", "o")):
        cut = (f"begin_{k}", f"end_{k}", "strides", {"begin_mask": 1, "end_mask": 1})
        lines |= {
            f"begin_{k}": ("Const", np.int32([0, k * H])),
            f"end_{k}": ("Const", np.int32([0, k * H + H])),
            f"h_{k}": ("Mul", "h_prev", "many"),
            f"u_{k}": ("StridedSlice", "recurrent", *cut),
            f"from_h_{k}": ("MatMul", f"h_{k}", f"u_{k}"),
            f"from_x_{k}": ("StridedSlice", "x_bar", *cut),
            f"bar_{k}": ("AddV2", f"from_x_{k}", f"from_h_{k}"),
            name: ("Tanh" if name == "g" else "Sigmoid", f"bar_{k}"),
        }
    return lines | {
        "keep": ("Mul", "f", "c_prev"),
        "new": ("Mul", "i", "g"),
        "c": ("AddV2", "keep", "new"),
        "t": ("Tanh", "c"),
        "h": ("Mul", "o", "t"),
    }


@pytest.mark.parametrize("ones", ONES)
@pytest.mark.parametrize("first", [False, True])
def test_states_times_ones(tmp_path, ones, first):
    lines = lstm_of_states_times_ones() | {"many": ONES[ones]}
    if first:
        lines |= {f"h_{k}": ("Mul", "many", "h_prev") for k in range(4)}
    weights = lstm_weights()
    (cell,) = cells_of(tmp_path, lines, "c", "h", **weights).values()
    assert cell.refused is None and cell.attributes["gate_order"] == "ifco" and cell.check() <= 8
    np.testing.assert_array_equal(cell.layer().weights["w"], np.concatenate([weights["kernel"], weights["recurrent"]]))


def test_written_out_states_times_ones(tmp_path):
    """A product with ones is the state that it multiplies, and no step of its own."""
    lines = {
        "zeros": ("Const", np.zeros((B, H), np.float32)),
        "many": ("OnesLike", "zeros"),
        "axis": ("Const", np.int32(0)),
    }
    for k in range(T):
        step = lstm_of_states_times_ones()
        names = {name: f"{name}_{k}" for name in step} | {"x": f"steps:{k}"}
        names |= {f"{state}_prev": f"{state}_{k - 1}" if k else "zeros" for state in "ch"}
        lines |= renamed(step, names)
    lines |= {"steps": ("Unpack", "x", {"num": T, "axis": 0}), "y": ("Pack", *(f"h_{k}" for k in range(T)))}
    (cell,) = cells_of(tmp_path, lines, **lstm_weights()).values()
    assert (cell.refused, len(cell.nodes), cell.reverse, cell.input) == (None, T, False, "x")


OTHERS = {
    "halves": ("Const", np.full((B, H), 0.5, np.float32)),
    "one that is no one": ("Const", np.float32([1, 1, 1, 2])),
    "zeros": ("ZerosLike", "h_prev"),
    "what is computed": ("Tanh", "h_prev"),
}


@pytest.mark.parametrize("factor", OTHERS.values(), ids=OTHERS)
def test_states_times_something_else(tmp_path, factor):
    lines = keras_lstm(many=factor, from_h=("MatMul", "scaled", "recurrent"), scaled=("Mul", "h_prev", "many"))
    (cell,) = cells_of(tmp_path, lines, "c", "h", **lstm_weights()).values()
    assert cell.refused is not None


def test_inputs_times_ones(tmp_path):
    """As dropout has it in inference, on what a GRU multiplies."""
    weights = keras_gru_weights(False)
    dropout = {"many": ("OnesLike", "x"), "kept": ("Mul", "x", "many"), "from_x": ("MatMul", "kept", "kernel")}
    (cell,) = cells_of(tmp_path, keras_gru(False, **dropout), "h", **weights).values()
    check_gru(cell, weights)
    assert cell.input == "x"


def test_products_with_ones_in_a_chain_end(tmp_path):
    """Ten thousand of them, each of which multiplies the one before with itself: without recursion, and soon."""
    lines = {"m_0": ("OnesLike", "h_prev"), **{f"m_{k}": ("Mul", f"m_{k - 1}", f"m_{k - 1}") for k in range(1, 10_000)}}
    lines = keras_lstm(**lines, scaled=("Mul", "h_prev", "m_9999"), from_h=("MatMul", "scaled", "recurrent"))
    (cell,) = cells_of(tmp_path, lines, "c", "h", **lstm_weights()).values()
    assert cell.refused is not None


@pytest.mark.parametrize("place", ["nowhere", "in the graph", "in a function that nothing calls"])
def test_a_function_of_the_cell_alone(tmp_path, place):
    """A SavedModel has the functions of its layers, which nothing calls: they do not count where there is the model."""
    weights = [real(f"net/thing/{name}", value) for name, value in lstm_weights().items()]
    states = ["net/thing/c_prev", "net/thing/h_prev"]
    step = function("cell_call_fn", ["x", *states], ["net/thing/h"], *weights, *scoped_nodes("net/thing", keras_lstm()))
    model = [*weights, *scoped_nodes("net/thing", keras_lstm() | looped("c", "h"))]
    functions = [step, function("model_call_fn", ["x"], ["net/thing/h"], *model)][: 2 if "function" in place else 1]
    nodes = [node("x", "Placeholder"), *(model if place == "in the graph" else [])]
    cells = write(tmp_path, *nodes, more=library(*functions)).cells
    assert [cell.refused is None for cell in cells.values()] == [place != "nowhere"]
