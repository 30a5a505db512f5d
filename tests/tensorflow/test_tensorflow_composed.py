"""Cells of many nodes, as TensorFlow and Keras wrote them and with nodes changed: right, or refused for a reason."""

from __future__ import annotations

import re

import numpy as np
import pytest
from tf_cells import B, H, I, T, drawn, kind_of, looped, of_all_kinds, real, scoped_nodes, write, write_variables
from tf_composed import GOLDEN, cells_of, cudnn_gru, gru_weights, keras_lstm, lstm_weights, of_other_kinds, renamed
from tf_files import constant, field, graph, node, tensor

from blockcell import formulas
from blockcell.tensorflow import open as opened
from blockcell.tensorflow.cells.graph.op_table import OPS

EPS = float(np.finfo(np.float32).eps)
KINDS = {
    "keras lstm": "Keras LSTM",
    "keras gru": "Keras GRU",
    "cudnn_gru": "CudnnCompatibleGRUCell",
    "keras_lstm": "Keras LSTM",
    "keras_gru": "Keras GRU",
    "other_lstm": "LSTM",
    "apart_lstm": "LSTM",
    "keras simple rnn": "Keras SimpleRNN",
    "coupled": "LSTM",
    "projection": "LSTM",
    "relu": "LSTM",
    "hard_sigmoid": "LSTM",
}
ATTRIBUTES = {  # that are not those of every cell of the kind
    "keras lstm of relu": {"activation": "relu"},
    "keras lstm of hard sigmoid": {"recurrent_activation": "hard_sigmoid"},
    "keras gru of softsign": {"activation": "softsign"},
    "keras gru of hard sigmoid": {"recurrent_activation": "hard_sigmoid"},
    "keras simple rnn": {"activation": "tanh"},
    "coupled": {"coupled": True, "forget_bias": 1},
    "projection": {"proj_clip": 0, "forget_bias": 1},
    "relu": {"activation": "relu"},
    "hard_sigmoid": {"recurrent_activation": ("hard_sigmoid", 0.2, 0.5)},
    "other_lstm": {"forget_bias": 0.5},
}
REASONS = {
    "layer_norm": "layer normalization, which the block cells do not have: the node",
    "ugrnn": "is not what a GRU has there",
    "zoneout": "is not that of the step before, but comes from",
    "random_zoneout": "it changes its state at random|its state is kept at random, by the node",
    "minimal": "is no RNN, LSTM or GRU",
}


def names():
    with np.load(GOLDEN) as golden:
        return [name.removeprefix("graph/") for name in golden.files if name.startswith("graph/")]


@pytest.mark.parametrize("name", names())
def test_what_tensorflow_wrote(tmp_path, name):
    with np.load(GOLDEN) as golden:
        definition, x, y = (golden[f"{kind}/{name}"] for kind in ("graph", "x", "y"))
    path = tmp_path / "graph.pb"
    path.write_bytes(definition.tobytes())
    cells = opened(path).cells
    (cell,) = cells.values()
    if name in REASONS:
        assert cell.refused is not None and any(reason in cell.refused for reason in REASONS[name].split("|"))
        assert "node '" in cell.refused or "from '" in cell.refused or "product '" in cell.refused
        return
    assert cell.refused is None and cell.kind == next(kind for key, kind in KINDS.items() if name.startswith(key))
    assert (cell.input_size, cell.output_size) == (x.shape[2], y.shape[2])
    assert cell.hidden_size == y.shape[2] + (name == "projection")
    usual: dict = {}
    if cell.kind.endswith("LSTM"):
        usual = {"forget_bias": 0, "cell_clip": 0, "use_peephole": False}
        usual |= {} if name == "coupled" else {"gate_order": cell.attributes["gate_order"]}
    elif name.startswith("cudnn") or ("gru" in name and "before" not in name):
        usual = {"reset_after": True}
    assert cell.attributes == usual | ATTRIBUTES.get(name, {})
    assert cell.initial_state is None and cell.check() <= 8
    assert formulas.error_in_eps(cell.layer()(x)[0], y.astype(np.float64), EPS) <= 8


def test_what_keras_exported(tmp_path):
    with np.load(GOLDEN) as golden:
        for name in golden.files:
            if name.startswith("saved/"):
                path = tmp_path / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(golden[name].tobytes())
        x, y = golden["x/saved"], golden["y/saved"]
    cells = opened(tmp_path / "saved").cells
    expected = [("Keras GRU", False), ("Keras GRU", True), ("Keras LSTM", False)]
    assert sorted((cell.kind, cell.reverse) for cell in cells.values()) == expected
    assert all(cell.check() <= 8 for cell in cells.values())
    result, _ = cells.layer()(x, batch_first=True)
    assert formulas.error_in_eps(result, y.astype(np.float64), EPS) <= 8


# ------------------------------------------------------------------------------------------------------ node by node
X = np.random.default_rng(7).standard_normal((T, B, I)).astype(np.float32)


def test_a_gru_that_resets_after(tmp_path):
    weights = gru_weights()
    (cell,) = cells_of(tmp_path, cudnn_gru(), "h", **weights).values()
    assert (cell.kind, cell.refused, cell.attributes) == ("CudnnCompatibleGRUCell", None, {"reset_after": True})
    assert cell.weights["w_c"] == "net/thing/w_cx + net/thing/w_ch" and cell.weights["b_hc"] == "net/thing/b_hc"
    w_c = np.concatenate([weights.pop("w_cx"), weights.pop("w_ch")])
    exact = formulas.FORMULAS["block_gru_reset_after"](
        seq_len_max=T, x=X, h_prev=np.zeros((B, H)), w_c=w_c, **weights
    ).h
    assert formulas.error_in_eps(cell.layer()(X)[0], exact, EPS) <= 4
    assert cell.check() <= 8


NAMES = {"w_ru": "gates/kernel", "b_ru": "gates/bias", "w_cx": "candidate/input_projection/kernel",
         "b_c": "candidate/input_projection/bias", "w_ch": "candidate/hidden_projection/kernel",
         "b_hc": "candidate/hidden_projection/bias"}  # fmt: skip


def test_a_gru_that_resets_after_in_a_checkpoint(tmp_path):
    """By its names alone it has the weights that it has in a graph."""
    weights = gru_weights()
    (other,) = cells_of(tmp_path, cudnn_gru(), "h", **weights).values()
    values = {f"rnn/cudnn_compatible_gru_cell/{NAMES[name]}": value for name, value in weights.items()}
    (cell,) = write_variables(tmp_path, values).cells.values()
    assert (cell.kind, cell.refused, cell.attributes) == (other.kind, None, other.attributes)
    for role, value in other.layer().weights.items():
        np.testing.assert_array_equal(cell.layer().weights[role], value)
    assert cell.check() <= 8
    values["rnn/cudnn_compatible_gru_cell/candidate/hidden_projection/kernel"] = weights["w_ch"][:, :-1].copy()
    (cell,) = write_variables(tmp_path, values).cells.values()
    assert cell.refused.endswith("candidate/hidden_projection/kernel, has shape (); expected (I+H, H)")


GRU_CHANGES = {
    "another activation": ({"c": ("Softmax", "c_bar")}, "'net/thing/c' is a Softmax"),
    "no sigmoid": ({"gates": ("Relu6", "bar")}, "'net/thing/gates' is a Relu6"),
    "gates of two kinds": ({"other": ("Softsign", "bar"), "reset_by": ("Split", "axis", "other", {"num_split": 2}),
                            "reset": ("Mul", "from_h_b", "reset_by")}, "have different activations, r a softsign"),
    "a part of another sigmoid": ({"other": ("Sigmoid", "product"),
                                   "parts": ("Split", "axis", "other", {"num_split": 2}),
                                   "reset": ("Mul", "from_h_b", "parts")}, "only some of its gates have a bias"),
    "reset twice": ({"c_bar": ("AddV2", "reset", "reset")}, "is no RNN, LSTM or GRU"),
    "a number": ({"three": ("Const", 3.0), "more": ("AddV2", "bar", "three"), "gates": ("Sigmoid", "more")},
                 "a number, 3, is added to r"),
    "something else added": ({"other": ("Exp", "x"), "sum": ("AddV2", "from_x_b", "other"),
                              "c_bar": ("AddV2", "reset", "sum")}, "is not what a GRU has there"),
    "no reset": ({"reset": ("Identity", "from_h_b")}, "is not what a GRU has there"),
    "another input": ({"other": ("Exp", "x"), "from_x": ("MatMul", "other", "w_cx")},
                      "its gate r, from 'x' and 'net/thing/h_prev', is not computed from the input and the state"),
    "another state": ({"other": ("Exp", "h_prev"), "from_h": ("MatMul", "other", "w_ch")},
                      "'net/thing/reset', which is a Mul, is added to the candidate"),
    "twice as much": ({"two": ("Const", 2.0), "rest": ("Sub", "two", "split:1")}, "is no RNN, LSTM or GRU"),
    "another update": ({"rest": ("Sub", "one", "split")}, "is no RNN, LSTM or GRU"),
    "transposed": ({"from_h": ("MatMul", "h_prev", "w_ch", {"transpose_a": True})},
                   "'net/thing/reset', which is a Mul, is added to the candidate"),
}  # fmt: skip

OTHER_EQUATIONS = "is no RNN, LSTM or GRU|is not what|is not computed from|in none of the cells"
"""What is said of a cell with other equations, with a node, as the page on refused cells promises."""


def names_a_node(reason):
    return re.search(OTHER_EQUATIONS, reason) is None or re.search("'net/thing/[^']+'", reason) is not None


@pytest.mark.parametrize("change", GRU_CHANGES)
def test_changed_grus_are_refused(tmp_path, change):
    lines, reason = GRU_CHANGES[change]
    (cell,) = cells_of(tmp_path, cudnn_gru(**lines), "h", **gru_weights()).values()
    assert cell.refused is not None and reason in cell.refused and names_a_node(cell.refused)


@pytest.mark.parametrize("bias", ["one", "none", "two rows"])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (3, 1, 0, 2)])
@pytest.mark.parametrize("inputs", [I, H])
def test_an_lstm_of_two_kernels(tmp_path, bias, order, inputs):
    """Gates in any order, with as many inputs as cells, too: the loop shows which kernel is for the state."""
    weights = lstm_weights(inputs, rows=2 if bias == "two rows" else 0)
    (cell,) = cells_of(tmp_path, keras_lstm(bias, order), "c", "h", **weights).values()
    assert cell.refused is None and (cell.input_size, cell.hidden_size) == (inputs, H)
    assert cell.attributes["gate_order"] == {(0, 1, 2, 3): "ifco", (0, 2, 1, 3): "icfo"}.get(order, "icfo")
    columns = np.concatenate([np.arange(4 * H).reshape(4, H)[order[k]] for k in (0, 2, 1, 3)])
    w = np.concatenate([weights["kernel"], weights["recurrent"]])[:, columns]
    b = weights["bias"].reshape(-1, 4 * H).sum(0)[columns] * (bias != "none")
    x_values = X[..., :inputs]
    zeros = np.zeros((B, H))
    exact = formulas.FORMULAS["BlockLSTM"](seq_len_max=T, x=x_values, cs_prev=zeros, h_prev=zeros, w=w, b=b,
                                           forget_bias=0.0, cell_clip=0.0, use_peephole=False).h  # fmt: skip
    assert formulas.error_in_eps(cell.layer()(x_values)[0], exact, EPS) <= 4
    assert cell.check() <= 8


@pytest.mark.parametrize("op", [name for name, op in OPS.items() if op.forwards == "step" and name != "Switch"])
@pytest.mark.parametrize("behind", ["part_1", "f", "new", "c", "t"])
def test_what_passes_a_value_on_is_no_part_of_a_cell(tmp_path, op, behind):
    """Such as StopGradient, or the CheckNumerics that a debugged model has everywhere."""
    lines = {"passed": (op, behind)}
    for name, line in keras_lstm().items():
        lines[name] = tuple("passed" if isinstance(part, str) and part == behind else part for part in line)
    (cell,) = cells_of(tmp_path, lines, "c", "h", **lstm_weights()).values()
    assert cell.refused is None and cell.check().ok


def test_steps_that_share_a_kernel_of_parts(tmp_path):
    """Written out, from one tensor of zeros for both states: the join is computed once, for the steps before, too."""
    lines = {"zeros": ("Placeholder",), "kernel": ("ConcatV2", "part_of_0", "part_of_1", "zero_0")}
    for k in range(3):
        names = {f"{state}_prev": f"{state}_{k - 1}" if k else "zeros" for state in "ch"}
        step = keras_lstm()
        lines |= renamed(step, names | {name: f"{name}_{k}" for name in step})
    lines["y"] = ("Identity", "h_2")
    weights = lstm_weights()
    kernel = weights.pop("kernel")
    (cell,) = cells_of(tmp_path, lines, part_of_0=kernel[:2], part_of_1=kernel[2:], **weights).values()
    assert cell.refused is None and len(cell.nodes) == 3 and cell.check().ok


def test_kernels_that_are_not_told_apart(tmp_path):
    """Without a loop, and with as many inputs as cells, x might be the state."""
    ends = {"c_prev": ("Placeholder",), "h_prev": ("Placeholder",)}
    cells = cells_of(tmp_path, keras_lstm(**ends), **lstm_weights())
    assert [cell.refused for cell in cells.values()] == [None]
    (cell,) = cells_of(tmp_path, keras_lstm(**ends), scope="net/lstm_cell", **lstm_weights(H)).values()
    kernels = "net/lstm_cell/kernel and net/lstm_cell/recurrent"
    assert f"it cannot be told which of its kernels, {kernels}, is" in cell.refused


LSTM_CHANGES = {
    "one gate of another size": ({"end_1": ("Const", np.int32([0, 2 * H - 1]))}, "a Mul of the shapes (3, 3) and"),
    "rows": ({"begin_1": ("Const", np.int32([1, H])),
              "part_1": ("StridedSlice", "z", "begin_1", "end_1", "ones", {"end_mask": 1})},
             "its cell state is not what the block cells have"),
    "a stride": ({"part_1": ("StridedSlice", "z", "begin_1", "end_1", "twos", {"begin_mask": 1, "end_mask": 1}),
                  "twos": ("Const", np.int32([1, 2]))}, "its cell state is not what the block cells have"),
    "past the end": ({"begin_1": ("Const", np.int32([0, 4 * H])), "end_1": ("Const", np.int32([0, 5 * H]))},
                     "its cell state is not what the block cells have"),
    "a mask of states": ({"mask": ("Placeholder",), "kept": ("Mul", "h", "mask"),
                          "h_next": ("NextIteration", "kept")}, "but comes from 'net/thing/kept'"),
    "a mask of cell states": ({"mask": ("Placeholder",), "kept": ("Mul", "c", "mask"),
                               "c_next": ("NextIteration", "kept")},
                              "its cell state is not that of the step before, but comes from 'net/thing/kept'"),
    "a random choice": ({"size": ("Const", np.int32([B, H])), "random": ("RandomUniform", "size"),
                         "half": ("Const", 0.5), "mask": ("Less", "random", "half"),
                         "kept": ("SelectV2", "mask", "h_prev", "h"), "h_next": ("NextIteration", "kept")},
                        "its state is kept at random, by the node 'net/thing/random'"),
    "coupled to another gate": ({"one": ("Const", 1.0), "i": ("Sub", "one", "o")},
                                "its cell state is not what the block cells have"),
    "relu": ({"g": ("Relu", "part_2")}, "its cell state is not what the block cells have"),
    "relu of the state": ({"t": ("Relu", "c")}, "its cell state is not what the block cells have"),
    "relu6": ({"g": ("Relu6", "part_2")}, "an activation that layers do not have: the node 'net/thing/g' is a Relu6"),
    "swish": ({"s": ("Sigmoid", "part_2"), "g": ("Mul", "part_2", "s")},
              "its cell state is not what the block cells have"),
    "one gate of another kind": ({"o": ("Softsign", "part_3")}, "have different activations, i a sigmoid"),
    "unknown": ({"t": ("Mystery", "c")}, "'net/thing/t', which is a Mystery, is in none of the cells"),
    "a Sub of one": ({"i": ("Sub", "f")}, "its cell state is not what the block cells have"),
    "a join of three": ({"axis": ("Const", np.int32(1)), "beside": ("ConcatV2", "h_prev", "part_3", "t", "axis"),
                         "from_h": ("MatMul", "beside", "recurrent")},
                        "'net/thing/beside' joins 3 arrays; a cell joins its input and its state"),
    "a join of one": ({"axis": ("Const", np.int32(1)), "beside": ("ConcatV2", "h_prev", "axis"),
                       "from_h": ("MatMul", "beside", "recurrent")}, "'net/thing/beside' joins 1 arrays"),
    "a join of rows": ({"beside": ("ConcatV2", "h_prev", "t", "zero"), "from_h": ("MatMul", "beside", "recurrent")},
                       "'net/thing/beside' joins rows, along the axis 0; a cell joins columns"),
    "one-sided clip": ({"top": ("Const", 1.0), "low": ("Const", -2.0), "clip": ("ClipByValue", "c", "low", "top"),
                        "t": ("Tanh", "clip"), "c_next": ("NextIteration", "clip")}, "clips to -2 to 1"),
}  # fmt: skip


@pytest.mark.parametrize("change", LSTM_CHANGES)
def test_changed_lstms_are_refused(tmp_path, change):
    """Under a name that says nothing."""
    lines, reason = LSTM_CHANGES[change]
    (cell,) = cells_of(tmp_path, keras_lstm(**lines), "c", "h", **lstm_weights()).values()
    assert cell.refused is not None and reason in cell.refused and names_a_node(cell.refused)
    assert cell.name == "net/thing"


def test_gates_of_the_same_weights(tmp_path):
    """The layer has them twice, and computes the same."""
    lines = keras_lstm(begin_1=("Const", np.int32([0, 0])), end_1=("Const", np.int32([0, H])))
    (cell,) = cells_of(tmp_path, lines, "c", "h", **lstm_weights()).values()
    assert cell.refused is None and cell.check() <= 8 and cell.layer().hidden_size == H


def test_selection_by_lengths_is_understood(tmp_path):
    """As dynamic_rnn and masks do it."""
    lines = keras_lstm(mask=("Placeholder",))
    for state in ("c", "h"):
        lines |= {f"{state}_kept": ("SelectV2", "mask", state, f"{state}_prev"),
                  f"{state}_next": ("NextIteration", f"{state}_kept")}  # fmt: skip
    (cell,) = cells_of(tmp_path, lines, "c", "h", **lstm_weights()).values()
    assert cell.refused is None and cell.check() <= 8


def dense(scope, operand, steps=1):
    """Layers of [x, h], with a gate, one behind the other."""
    lines = {"axis": ("Const", np.int32(1)), "other": ("Placeholder",)}
    for k in range(steps):
        lines |= {f"concat{k}": ("ConcatV2", operand if k == 0 else f"y{k - 1}", "other", "axis"),
                  f"product{k}": ("MatMul", f"concat{k}", f"kernel{k}"),
                  f"sum{k}": ("BiasAdd", f"product{k}", f"bias{k}"),
                  f"split{k}": ("Split", "axis", f"sum{k}", {"num_split": 2}),
                  f"gate{k}": ("Sigmoid", f"split{k}"), f"value{k}": ("Tanh", f"split{k}:1"),
                  f"y{k}": ("Mul", f"gate{k}", f"value{k}")}  # fmt: skip
    weights = {f"{name}{k}": np.ones(shape, np.float32) for k in range(steps)
               for name, shape in {"kernel": (I + H, 2 * H), "bias": (2 * H,)}.items()}  # fmt: skip
    consts = [real(f"{scope}/{name}", value) for name, value in weights.items()]
    return [*consts, *scoped_nodes(scope, lines)]


@pytest.mark.parametrize("where", ["outside", "behind a loop's step"])
def test_dense_layers_are_no_cells(tmp_path, where):
    cells = [] if where == "outside" else scoped_nodes("net/thing", keras_lstm() | looped("c", "h"))
    consts = [real(f"net/thing/{name}", value) for name, value in lstm_weights().items()]
    parts = [node("x", "Placeholder"), *consts, *cells, *dense("mlp", "x" if not cells else "=net/thing/h", 3)]
    assert [*write(tmp_path, *parts).cells] == ["net/thing"][: bool(cells)]


CONSTANTS = {"complex64": field(4, np.complex64(1j).tobytes()), "qint8": field(4, b"1"), "string": field(8, b"1"),
             "bool": field(4, b"\1")}  # fmt: skip


@pytest.mark.parametrize("dtype", CONSTANTS)
def test_constants_that_are_no_real_numbers(tmp_path, dtype):
    """They may be anywhere beside a cell, such as 1j in front of an inverse STFT."""
    unit = constant("unit", tensor(dtype, (), CONSTANTS[dtype]))
    behind = [unit, node("turned", "Mul", ["net/thing/h", "unit"]), node("spectrum", "AddV2", ["turned", "unit"])]
    consts = [real(f"net/thing/{name}", value) for name, value in lstm_weights().items()]
    cells = scoped_nodes("net/thing", keras_lstm() | looped("c", "h"))
    model = write(tmp_path, node("x", "Placeholder"), *consts, *cells, *behind)
    (cell,) = model.cells.values()
    assert (cell.refused, model.variables.skipped) == (None, {} if dtype == "bool" else {"unit": dtype})
    assert cell.check() <= 8


def test_gradients_are_no_cells(tmp_path):
    """A loop that goes back through a cell, and adds up what its kernel gets."""
    lines = {"times": ("MatMul", "d_prev", "kernel", {"transpose_b": True}), "sigmoid": ("SigmoidGrad", "x", "times"),
             "scaled": ("Mul", "sigmoid", "x"), "tanh": ("Tanh", "scaled"),
             "d": ("MatMul", "tanh", "kernel")}  # fmt: skip
    assert not cells_of(tmp_path, lines, "d", kernel=np.ones((H, H), np.float32))


def test_a_decoder_that_reads_what_it_wrote(tmp_path):
    """Its output layer is on the way around the loop, and no cell."""
    lines = keras_lstm() | {"from_x": ("MatMul", "y_prev", "kernel"), "y_bar": ("MatMul", "h", "out"),
                            "scaled": ("Mul", "y_bar", "=x"), "y": ("Tanh", "scaled")}  # fmt: skip
    weights = lstm_weights() | {"out": drawn("w")["w"][:H, :I]}
    consts = [real(f"net/thing/{name}", value) for name, value in weights.items() if name != "out"]
    consts.append(real("decoder/out", weights["out"]))
    lines["y_bar"] = ("MatMul", "h", "=decoder/out")
    nodes = scoped_nodes("net/thing", lines | looped("c", "h", "y"))
    (cell,) = write(tmp_path, node("x", "Placeholder"), *consts, *nodes).cells.values()
    assert cell.refused is None and cell.name == "net/thing" and cell.check() <= 8


def test_hostile_views_end(tmp_path):
    """Parts of parts of parts, a thousand times, and sums without end."""
    weights = lstm_weights()
    lines = {"kernel_0": ("Identity", "kernel"), "zero": ("Const", np.int32(0))}
    for k in range(1000):
        lines[f"kernel_{k + 1}"] = ("Split", "zero", f"kernel_{k}", {"num_split": 1})
        lines[f"sum_{k}"] = ("AddV2", f"sum_{(k + 1) % 1000}", f"sum_{(k + 7) % 1000}")
    lines |= keras_lstm(from_x=("MatMul", "x", "kernel_1000"), z=("AddV2", "sum", "sum_0"))
    cells = cells_of(tmp_path, lines, "c", "h", **weights)
    assert all(cell.refused is not None for cell in cells.values())


def test_averages_are_checked_as_averages(tmp_path):
    """The check reads the variables that the layer reads; what is a constant in the graph stays as it is."""
    weights = lstm_weights()
    values = {f"net/thing/{name}": value for name, value in weights.items()}
    averages = {f"{name}/ExponentialMovingAverage": value / 2 for name, value in values.items()}
    write_variables(tmp_path, values | averages)
    variables = [node(name, "VariableV2", dtype=kind_of("float32")) for name in values]
    nodes = scoped_nodes("net/thing", keras_lstm() | looped("c", "h"))
    (tmp_path / "model.ckpt.meta").write_bytes(field(2, graph(node("x", "Placeholder"), *variables, *nodes)))
    (cell,) = opened(tmp_path / "model.ckpt").cells.values()
    assert cell.check() <= 8 and cell.check(average=True) <= 8
    half = np.concatenate([weights["kernel"], weights["recurrent"]]) / 2
    np.testing.assert_array_equal(cell.layer(average=True).weights["w"], half)


def test_a_large_cell_is_checked_in_part(tmp_path):
    """Its nodes take parts at places that depend on the number of cells."""
    inputs, size = 300, 700
    g = np.random.default_rng(5)
    weights = {"kernel": g.standard_normal((inputs, 4 * size)), "recurrent": g.standard_normal((size, 4 * size))}
    weights = {name: (value / 30).astype(np.float32) for name, value in weights.items()}
    weights["bias"] = g.standard_normal(4 * size).astype(np.float32)
    lines = keras_lstm()
    for k in range(4):
        lines |= {f"begin_{k}": ("Const", np.int32([0, k * size])),
                  f"end_{k}": ("Const", np.int32([0, k * size + size]))}  # fmt: skip
    (cell,) = cells_of(tmp_path, lines, "c", "h", **weights).values()
    assert (cell.input_size, cell.hidden_size) == (inputs, size) and cell.check() <= 8


BESIDE = {
    "all": (of_all_kinds(), ["BlockLSTM", "GRUCell", "LSTMBlockCell", "LSTMCell"]),
    "others": (of_other_kinds(), ["CudnnCompatibleGRUCell", "Keras GRU", *["Keras LSTM"] * 3, "RNN", "unknown cell"]),
}


@pytest.mark.parametrize("case", BESIDE)
def test_kinds_beside_each_other(tmp_path, case):
    definition, kinds = BESIDE[case]
    (tmp_path / "graph.pb").write_bytes(definition)
    cells = opened(tmp_path / "graph.pb").cells
    assert sorted(cell.kind for cell in cells.values()) == kinds
    assert [cell.kind for cell in cells.values() if cell.refused is not None] == kinds[6:]
