"""A cell's nodes, one by one: what each gives, and what is refused before anything is computed, by the node's name."""

from __future__ import annotations

import numpy as np
import pytest
from tf_cells import composed_lstm, looped, lstm_consts, real, scoped_nodes, write, write_variables
from tf_composed import cells_of, keras_lstm, lstm_weights
from tf_files import constant, field, graph, node, shape, tensor
from traced import peak

from blockcell.tensorflow import open as opened
from blockcell.tensorflow.cells.cell.layer_check import ROWS
from blockcell.tensorflow.cells.cell.node_evaluation import StepProgram
from blockcell.tensorflow.cells.graph.graph_reader import GraphReader, Place, UnknownValue
from blockcell.tensorflow.cells.weights.weight_sources import WeightSources

I, H = 5, 4  # noqa: E741
G = np.random.default_rng(3)
X, STATE, W = G.standard_normal((ROWS, I)), G.standard_normal((ROWS, H)), G.standard_normal((I, 3 * H))
B = np.linspace(-1, 1, H)


def body(tmp_path, lines, *weights):
    """Compile the nodes from "/x" and "/h" to "/y"."""
    placeholders = [node(f"net/{name}", "Placeholder") for name in ("x", "h") if name not in lines]
    weights = [
        *(weights or (real("net/w", W), real("net/b", B))),
        *(real(f"net/{k}", np.int32(k)) for k in range(-3, 4)),
    ]
    lines = {
        name: tuple("=net/x" if isinstance(text, str) and text == "x" else text for text in line)
        for name, line in lines.items()
    }
    (read,) = write(tmp_path, *placeholders, *weights, *scoped_nodes("net", lines)).graphs
    x, h, y = (Place("", f"net/{name}") for name in "xhy")
    return StepProgram(WeightSources(GraphReader(read), None), x, [h], [y], [I, H])


def ints(*numbers):
    return ("Const", np.int32(numbers))


PRODUCT = {"p": ("MatMul", "x", "w")}
PARTS = {
    "a split": {"y": ("Split", "1", "p", {"num_split": 3})},
    "a split from behind": {"s": ("Split", "-1", "p", {"num_split": 3}), "y": ("Identity", "s")},
    "a slice": {"from": ints(0, 0), "to": ints(0, H), "by": ints(1, 1),
                "y": ("StridedSlice", "p", "from", "to", "by", {"begin_mask": 1, "end_mask": 1})},
    "a slice from behind": {"from": ints(0, -12), "to": ints(0, -8), "by": ints(1, 1),
                            "y": ("StridedSlice", "p", "from", "to", "by", {"begin_mask": 1, "end_mask": 1})},
    "a row": {"from": ints(-3), "to": ints(0), "by": ints(1), "t": ("Split", "1", "p", {"num_split": 3}),
              "row": ("StridedSlice", "t", "from", "to", "by", {"shrink_axis_mask": 1}),
              "zero": ("Sub", "t", "row"), "y": ("Add", "zero", "row")},
}  # fmt: skip


@pytest.mark.parametrize("case", PARTS)
def test_parts(tmp_path, case):
    program = body(tmp_path, PRODUCT | PARTS[case])
    sources = {name: source.read("") for name, source in program.sources.items()}
    (y,) = program.step(sources, X, (STATE,), {})
    np.testing.assert_allclose(y, (X @ W)[:, :H], rtol=1e-13)


WRONG = {
    "no such rows": ({"y": ("MatMul", "h", "w")}, "'net/y', which is a MatMul of the shapes (3, 4) and (5, 12)"),
    "a product of a vector": ({"y": ("MatMul", "x", "b")}, "'net/y', which is a MatMul of the shapes (3, 5) and (4,)"),
    "a product of weights": ({"t": ("MatMul", "w", "w"), "y": ("Add", "h", "t")}, "'net/t', which is a MatMul"),
    "one input": ({"y": ("MatMul", "x")}, "'net/y', which is a MatMul of 1 inputs"),
    "three inputs": ({"y": ("Add", "x", "x", "x")}, "'net/y', which is a Add of 3 inputs"),
    "sizes": ({"y": ("Add", "x", "h")}, "'net/y', which is a Add of the shapes (3, 5) and (3, 4)"),
    "a bias of another size": (PRODUCT | {"y": ("BiasAdd", "p", "b")}, "a BiasAdd of the shapes (3, 12) and (4,)"),
    "a join of other sizes": ({"t": ("ConcatV2", "x", "b", "1"), "y": ("Tanh", "t")}, "'net/t', which is a ConcatV2"),
    "a join of other rows": ({"t": ("ConcatV2", "x", "w", "1"), "y": ("Tanh", "t")}, "(3, 5) and (5, 12)"),
    "a join along no axis": ({"y": ("ConcatV2", "x", "h", "2")}, "'net/y', which is a ConcatV2 along the axis 2 of 2"),
    "a join along none before": ({"y": ("ConcatV2", "x", "h", "-3")}, "along the axis -3 of 2"),
    "a join along a vector": ({"y": ("ConcatV2", "x", "h", "b")}, "'net/b', which is not one number"),
    "a join of rows": ({"y": ("ConcatV2", "h", "h", "0")}, "'net/y', which gives the shape (6, 4) for 3 rows of 4"),
    "a split along no axis": (PRODUCT | {"y": ("Split", "2", "p", {"num_split": 3})}, "a Split along the axis 2 of 2"),
    "a split that is uneven": (PRODUCT | {"y": ("Split", "1", "p", {"num_split": 5})}, "makes 5 of an axis of 12"),
    "a split in none": (PRODUCT | {"y": ("Split", "1", "p", {"num_split": 0})}, "which makes 0 of an axis of 12"),
    "a split in less": (PRODUCT | {"y": ("Split", "1", "p", {"num_split": -3})}, "which makes -3 of an axis of 12"),
    "a split in more": (PRODUCT | {"y": ("Split", "1", "p", {"num_split": 2**62})}, "of an axis of 12"),
    "a split that does not say": (PRODUCT | {"y": ("Split", "1", "p")}, "which makes None of an axis of 12"),
    "a part too many": (PRODUCT | {"t": ("Split", "1", "p", {"num_split": 3}), "y": ("Tanh", "t:3")},
                        "part 3 of the node 'net/t', which makes 3 of an axis of 12"),
    "a second sum": ({"t": ("Add", "h", "h"), "y": ("Tanh", "t:1")}, "'net/t:1', which is no output of a node"),
    "a slice of more axes": ({"by": ints(1, 1, 1), "y": ("StridedSlice", "h", "by", "by", "by")},
                             "'net/y', which takes a part of the shape (3, 4) that it does not have"),
    "a row too far": ({"from": ints(3), "by": ints(1), "y": ("StridedSlice", "h", "from", "by", "by",
                                                            {"shrink_axis_mask": 1})}, "that it does not have"),
    "no columns": ({"from": ints(0, 9), "to": ints(0, 4), "by": ints(1, 1),
                    "y": ("StridedSlice", "h", "from", "to", "by", {"begin_mask": 1, "end_mask": 1})},
                   "'net/y', which gives the shape (3, 0)"),
    "a squeeze of more": ({"t": ("Squeeze", "h", {"squeeze_dims": field(1, field(3, 1))}), "y": ("Tanh", "t")},
                          "'net/t', which drops the axes [1] of the shape (3, 4)"),
    "another unstack": ({"t": ("Unpack", "h", {"num": 5, "axis": 1}), "y": ("Tanh", "t")},
                        "part 0 of the node 'net/t', which makes 5 of the shape (3, 4)"),
    "an unstack too many": ({"t": ("Unpack", "h", {"num": 4, "axis": 1}), "y": ("Tanh", "t:4")}, "part 4 of the node"),
    "another dtype": ({"k": ints(1, 2, 3, 4), "y": ("Mul", "h", "k")}, "'net/k', which is of int32"),
    "what is fed": ({"k": ("Placeholder",), "y": ("Mul", "h", "k")}, "'net/k', which is a Placeholder"),
    "another result": (PRODUCT | {"y": ("Tanh", "p")}, "'net/y', which gives the shape (3, 12) for 3 rows of 4"),
    "a circle": ({"t": ("Tanh", "y"), "y": ("Add", "t", "h")}, "which is computed from itself"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_refused_by_its_name(tmp_path, case):
    lines, reason = WRONG[case]
    with pytest.raises(UnknownValue) as caught:
        body(tmp_path, lines)
    assert reason in str(caught.value)


def test_an_input_that_is_computed_from_the_step(tmp_path):
    """No program writes it: x is what a gate gives, in the same step."""
    lines = keras_lstm(from_x=("MatMul", "t", "kernel"))
    (cell,) = cells_of(tmp_path, lines, "c", "h", **lstm_weights(H)).values()
    assert "', which is computed from itself" in cell.refused


def test_weights_in_pieces_that_steps_share(tmp_path):
    """Steps that are written out read what joins the pieces of a variable from one node: none is computed from itself.

    The state is what the step before has made.
    """
    joined = G.standard_normal((H, H))
    lines = {
        "first": ("Placeholder",),
        "w": ("ConcatV2", "top", "bottom", "0"),
        "h": ("MatMul", "first", "w"),
        "p": ("MatMul", "h", "w"),
        "y": ("Tanh", "p"),
    }
    program = body(tmp_path, lines, real("net/top", joined[:1]), real("net/bottom", joined[1:]))
    (result,) = program.step({name: source.read("") for name, source in program.sources.items()}, X, (STATE,), {})
    np.testing.assert_allclose(result, np.tanh(STATE @ joined), rtol=1e-13)


@pytest.mark.parametrize("size", [2**20, 2**24, 2**40])
def test_huge_sizes_take_no_memory(tmp_path, size):
    """Two vectors that a file has in 30 bytes each, and that make size * size numbers; and joins of joins."""
    column = constant("net/column", tensor("float64", (size, 1), field(6, b"")))
    row = constant("net/row", tensor("float64", (1, size), field(6, b"")))
    joins = {f"j{k + 1}": ("ConcatV2", f"j{k}", f"j{k}", "1") for k in range(60)}
    for lines in (
        {"t": ("Mul", "column", "row"), "y": ("Add", "h", "t")},
        {"t": ("Split", "0", "s", {"num_split": size}), "s": ("Mul", "column", "row"), "y": ("Add", "h", "t")},
        {"j0": ("Identity", "h")} | joins | {"y": ("Split", "1", "j60", {"num_split": 2**60})},
    ):

        def read_it(lines=lines):
            with pytest.raises(UnknownValue):
                body(tmp_path, lines, column, row)

        assert peak(read_it)[1] < 2**20


def test_a_state_that_is_a_weight(tmp_path):
    _, consts = lstm_consts(True)
    change = {"concat": ("ConcatV2", "x", "=rnn/lstm_cell/w_f_diag", "axis")}
    nodes = composed_lstm(True, False, change=change)
    (cell,) = write(tmp_path, node("x", "Placeholder"), *consts, *nodes).cells.values()
    assert "its input or a state is of rnn/lstm_cell/w_f_diag, of the shape (4,)" in cell.refused


@pytest.mark.parametrize("state", ["c_prev", "h_prev"])
def test_a_state_that_is_a_part_of_a_weight(tmp_path, state):
    """With as many rows as a check has, so that the shapes fit."""
    weights = lstm_weights(ROWS)
    lines = keras_lstm() | looped("c", "h") | {"parts": ("Split", "one", "kernel", {"num_split": 4})}
    lines |= {"one": ("Const", np.int32(1)), state: ("Identity", "parts:3")}
    for k in range(4):  # the product with each gate's kernel by itself, as Keras has it
        lines |= {f"product_{k}": ("MatMul", "x", f"parts:{k}"), f"z_{k}": ("AddV2", f"product_{k}", f"from_h_{k}"),
                  f"from_h_{k}": ("StridedSlice", "from_h", f"begin_{k}", f"end_{k}", "ones",
                                  {"begin_mask": 1, "end_mask": 1}), f"part_{k}": ("Identity", f"z_{k}")}  # fmt: skip
    (cell,) = cells_of(tmp_path, lines, **weights).values()
    assert cell.refused == "its input or a state is of net/thing/kernel, of the shape (3, 4)"


def test_averages_of_another_shape(tmp_path):
    """A moving average that is not like its variable is an error that names it, in layer and check."""
    values = {f"net/thing/{name}": value for name, value in lstm_weights().items()}
    averages = {f"{name}/ExponentialMovingAverage": value for name, value in values.items()}
    averages["net/thing/kernel/ExponentialMovingAverage"] = np.ones((I, 3), np.float32)
    write_variables(tmp_path, values | averages)
    variables = [node(name, "VariableV2", dtype=field(6, 1)) for name in values]
    nodes = scoped_nodes("net/thing", keras_lstm() | {"c_prev": ("Placeholder",), "h_prev": ("Placeholder",)})
    (tmp_path / "model.ckpt.meta").write_bytes(field(2, graph(node("x", "Placeholder"), *variables, *nodes)))
    (cell,) = opened(tmp_path / "model.ckpt").cells.values()
    message = "'net/thing/kernel/ExponentialMovingAverage' is float32 of the shape .5, 3.; expected float32 of .5, 16."
    for call in (cell.layer, cell.check):
        with pytest.raises(ValueError, match=message):
            call(average=True)
    assert cell.layer().input_size == I


def test_a_layer_is_checked_once_made(tmp_path, monkeypatch):
    """Against the nodes, in float64; what rounding amplifies is no reason to refuse it."""
    _, consts = lstm_consts(False)
    (cell,) = write(tmp_path, node("x", "Placeholder"), *consts, *composed_lstm(False, False)).cells.values()
    for name, value in {"gate_order": "ifco", "forget_bias": 0.625, "cell_clip": 0.5}.items():
        with monkeypatch.context() as patch:
            patch.setitem(cell.attributes, name, value)
            check = cell.check()
            assert check > 1000 > check.bound and not check.ok
            with pytest.raises(ValueError, match="its layer does not compute what its nodes do: it is off by"):
                cell.layer()
    assert cell.layer().hidden_size == H


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("scale", [1, 100, 10_000, np.inf])
def test_layers_of_any_weights(tmp_path, dtype, scale):
    """Large weights amplify what float32 rounds, and float16 overflows: the layer is right nevertheless."""
    with np.errstate(all="ignore"):
        weights = {name: (value.astype(np.float64) * scale).astype(dtype) for name, value in lstm_weights().items()}
    ends = {"c_prev": ("Placeholder",), "h_prev": ("Placeholder",)}
    (cell,) = cells_of(tmp_path, keras_lstm(**ends), **weights).values()
    assert cell.refused is None and cell.layer().dtype == dtype


@pytest.mark.parametrize(
    "attrs", [{"num": field(1, field(3, 1))}, {"axis": field(2, "1")}, {"num": field(7, shape(1))}]
)
def test_attributes_of_other_kinds(tmp_path, attrs):
    with pytest.raises(UnknownValue, match="'net/t'"):
        body(tmp_path, {"t": ("Unpack", "h", attrs), "y": ("Tanh", "t")})
