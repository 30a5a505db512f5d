"""Cells from the checkpoints of TensorFlow 1, by the names of its classes' variables, against the float64 formulas."""

from __future__ import annotations

import numpy as np
import pytest
from convert_cases import B, H, I, T, assert_same, rng, sigmoid, warned

from blockcell import convert, formulas
from blockcell.convert import ConversionError
from blockcell.convert.tf1 import FORGET_BIAS
from blockcell.formulas import FORMULAS
from blockcell.layers import Bidirectional

NEW_DIAGONALS, OLD_DIAGONALS = ([f"{w}_{gate}_diag" for gate in gates] for w, gates in (("w", "ifo"), ("W", "IFO")))


def tf1_lstm(scope="rnn/lstm_cell/", peephole=False, names=("kernel", "bias", *NEW_DIAGONALS)):
    """Draw the variables of an LSTM."""
    g = rng()
    shapes = [(I + H, 4 * H), (4 * H,), *([(H,)] * 3 if peephole else [])]
    return {scope + name: g.uniform(-1, 1, s).astype(np.float32) for name, s in zip(names, shapes, strict=False)}


def tf1_gru(scope="rnn/gru_cell/", names=("w_ru", "w_c", "b_ru", "b_c")):
    """Draw the variables of a GRUBlockCell."""
    g = rng()
    shapes = (I + H, 2 * H), (I + H, H), (2 * H,), (H,)
    return {scope + name: g.uniform(-1, 1, s).astype(np.float32) for name, s in zip(names, shapes, strict=True)}


def other_variables(scope):
    """Return other variables that a checkpoint may have."""
    kernel = np.ones((H, 8), np.float32)
    optimizer = {f"{scope}{leaf}/{slot}": kernel for leaf in ("kernel", "w_ru") for slot in ("Adam", "Adam_1")}
    averages = {f"{scope}kernel/ExponentialMovingAverage": kernel}
    dense = {
        "dense/kernel": kernel,
        "dense/bias": kernel[0],
        "global_step": np.int64(7),
        "beta1_power": np.float32(0.9),
    }
    return optimizer | averages | dense | {f"{scope}bias_cudnn_0": kernel[0], f"{scope}bias_cudnn_1": kernel[0]}


def expected_lstm(variables, x, forget_bias, cell_clip=0.0):
    """Compute h by BlockLSTM's formula, from the variables in the order w, b, wci, wcf, wco."""
    w, b, *peepholes = variables.values()
    wci, wcf, wco = peepholes or (None,) * 3
    zeros, weights = np.zeros((B, H)), {"w": w, "b": b, "wci": wci, "wcf": wcf, "wco": wco}
    options = {"forget_bias": forget_bias, "cell_clip": cell_clip, "use_peephole": bool(peepholes)}
    return FORMULAS["BlockLSTM"](seq_len_max=T, x=x, cs_prev=zeros, h_prev=zeros, **weights, **options).h


def random_x():
    """Draw x in float32."""
    return rng().standard_normal((T, B, I)).astype(np.float32)


@pytest.mark.parametrize("peephole", [False, True])
@pytest.mark.parametrize(
    ("scope", "names", "default"),
    [
        ("rnn/lstm_cell/", ("kernel", "bias", *NEW_DIAGONALS), 1.0),
        ("input/lstm_fused_cell/", ("kernel", "bias", *NEW_DIAGONALS), 1.0),
        ("rnn/basic_lstm_cell_2/", ("kernel", "bias", *NEW_DIAGONALS), 1.0),
        ("rnn/multi_rnn_cell/cell_0/cudnn_compatible_lstm_cell/", ("kernel", "bias", *NEW_DIAGONALS), 0.0),
        ("", ("kernel", "bias", *NEW_DIAGONALS), 1.0),
        ("RNN/LSTMCell/", ("weights", "biases", *NEW_DIAGONALS), 1.0),
        ("RNN/LSTMCell/", ("W_0", "B", *OLD_DIAGONALS), 1.0),
        ("RNN/BasicLSTMCell/", ("Linear/Matrix", "Linear/Bias", *NEW_DIAGONALS), 1.0),
    ],
)
def test_tf1_lstm(scope, names, default, peephole):
    variables = tf1_lstm(scope, peephole, names)
    x, everything = random_x(), (other_variables(scope) if scope else {}) | variables
    for forget_bias in (0.0, 0.5):
        layer = convert.from_tf1(everything, forget_bias=forget_bias, cell_clip=0.5)
        np.testing.assert_allclose(layer(x)[0], expected_lstm(variables, x, forget_bias, 0.5), rtol=0, atol=1e-6)
        assert layer.forget_bias == forget_bias and layer.cell_clip == 0.5
    with pytest.warns(UserWarning, match=f"checkpoints do not hold forget_bias; {default} is taken"):
        layer = convert.from_tf1(everything)
    np.testing.assert_allclose(layer(x)[0], expected_lstm(variables, x, default), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("cell", "default"), FORGET_BIAS.items())
def test_tf1_class(cell, default):
    variables = tf1_lstm("my/cell/")
    if cell.startswith("Coupled"):
        variables = {name: value[..., : 3 * H] for name, value in variables.items()}
    with pytest.warns(UserWarning, match="checkpoints do not hold forget_bias"):
        assert convert.from_tf1(variables, cell=cell).forget_bias == default


@pytest.mark.parametrize("names", [("kernel", "bias"), ("weights", "biases"), ("W_0", "B")])
@pytest.mark.parametrize("peephole", [False, True])
def test_tf1_coupled_and_projected(names, peephole):
    """With the equations of the layer, which have tests of their own."""
    g = np.random.default_rng(0)
    scope = "rnn/coupled_input_forget_gate_lstm_cell"
    w, b, w_p = (g.standard_normal(shape) for shape in ((5 + 2, 3 * H), (3 * H,), (H, 2)))
    variables = {f"{scope}/{names[0]}": w, f"{scope}/{names[1]}": b}
    variables[f"{scope}/{'W_P_0' if names[0] == 'W_0' else f'projection/{names[0]}'}"] = w_p
    diagonals = {f"wc{gate}": g.standard_normal(H) for gate in "fo"} if peephole else {}
    variables |= {f"{scope}/w_{role[-1]}_diag": value for role, value in diagonals.items()}
    options = {"forget_bias": 0.5, "cell_clip": 0.75, "proj_clip": 0.25, "activation": "softsign"}
    layer = convert.from_tf1(variables, **options)
    x = g.standard_normal((4, 3, 5))
    exact = formulas.lstm_layer(x=x, cs_prev=np.zeros((3, H)), h_prev=np.zeros((3, 2)), w=w, b=b, w_p=w_p, **diagonals,
                                **options, gates=("ci", "f", "o")).h  # fmt: skip
    np.testing.assert_allclose(layer(x)[0], exact, rtol=0, atol=1e-13)
    with pytest.raises(ValueError, match="LSTM: proj_clip is 1 and w_p is None; expected the weights of a projection"):
        convert.from_tf1(tf1_lstm(), forget_bias=1.0, proj_clip=1.0)


def test_tf1_rnn():
    g = np.random.default_rng(0)
    w, b, x = g.standard_normal((7, 4)), g.standard_normal(4), g.standard_normal((3, 2, 3))
    variables = {"rnn/basic_rnn_cell/kernel": w, "rnn/basic_rnn_cell/bias": b}
    for source in (variables, {name.replace("basic_rnn_cell", "my"): value for name, value in variables.items()}):
        layer = convert.from_tf1(source, cell="BasicRNNCell", activation=("leaky_relu", 0.01))
        h = np.zeros((2, 4))
        for t in range(3):
            z = np.concatenate([x[t], h], 1) @ w + b
            h = np.where(z > 0, z, 0.01 * z)
        np.testing.assert_allclose(layer(x)[0][-1], h, rtol=0, atol=1e-13)
    assert convert.from_tf1(variables).activation == "tanh"
    with pytest.raises(ValueError, match="is an RNN, which has no forget_bias"):
        convert.from_tf1(variables, forget_bias=1.0)


def test_tf1_zoneout():
    for draw, options in ((tf1_lstm, {"forget_bias": 1.0}), (tf1_gru, {})):
        layer, message = warned(convert.from_tf1, draw("decoder/zoneout_cell/a_cell/"), **options)
        assert_same(layer, convert.from_tf1(draw(), **options))
        assert message.startswith("from_tf1: the cell 'decoder/zoneout_cell/a_cell' has zoneout by its name")


def test_tf1_class_and_name_disagree():
    """DeepSpeech gives its LSTMBlockFusedCell the scope and the forget_bias of a CudnnCompatibleLSTMCell."""
    variables = tf1_lstm("cell_0/cudnn_compatible_lstm_cell/")
    with pytest.raises(ValueError, match=r"which has forget_bias 0.0, but cell is LSTMBlockFusedCell, which has 1.0"):
        convert.from_tf1(variables, cell="LSTMBlockFusedCell")
    assert convert.from_tf1(variables, cell="LSTMBlockFusedCell", forget_bias=0.0).forget_bias == 0


GRU_NAMES = [
    ("w_ru", "w_c", "b_ru", "b_c"),
    ("gates/kernel", "candidate/kernel", "gates/bias", "candidate/bias"),
    ("gates/weights", "candidate/weights", "gates/biases", "candidate/biases"),
    ("Gates/Linear/Matrix", "Candidate/Linear/Matrix", "Gates/Linear/Bias", "Candidate/Linear/Bias"),
    ("w_c", "w_ru", "b_ru", "b_c"),  # in one build of TensorFlow
    ("w_c", "w_ru", "b_c", "b_ru"),
]


@pytest.mark.parametrize("cell", [None, "GRUBlockCell", "GRUBlockCellV2", "GRUCell"])
@pytest.mark.parametrize("names", GRU_NAMES)
def test_tf1_gru(names, cell):
    variables, x = tf1_gru(names=names), random_x()
    w_ru, w_c, b_ru, b_c = variables.values()
    weights = {"w_ru": w_ru, "w_c": w_c, "b_ru": b_ru, "b_c": b_c}
    expected = FORMULAS["block_gru"](seq_len_max=T, x=x, h_prev=np.zeros((B, H)), **weights).h
    layer = convert.from_tf1(
        {f"{name}:0": value for name, value in (variables | other_variables("rnn/gru_cell/")).items()}, cell=cell
    )
    np.testing.assert_allclose(layer(x)[0], expected, rtol=0, atol=1e-6)


def test_tf1_scopes():
    """Of several cells in one checkpoint, each has its scope."""
    variables = {}
    for k, direction in enumerate(("fw", "bw")):
        variables |= {key: value * (k + 1) for key, value in tf1_lstm(f"net/{direction}/lstm_cell/").items()}
    fw, bw = (convert.from_tf1(variables, scope=f"net/{d}/lstm_cell", forget_bias=1.0) for d in ("fw", "bw"))
    np.testing.assert_array_equal(2 * fw.weights["w"], bw.weights["w"])
    assert Bidirectional(fw, bw).output_size == 2 * H
    with pytest.raises(
        ValueError, match=r"expected one cell, found \['net/fw/lstm_cell', 'net/bw/lstm_cell'\]; say which"
    ):
        convert.from_tf1(variables)
    with pytest.raises(ValueError, match="expected one cell in the scope 'net'"):
        convert.from_tf1(variables, scope="net/")


def cudnn_gru(scope="rnn/multi_rnn_cell/cell_0/cudnn_compatible_gru_cell/"):
    """Draw the variables of a CudnnCompatibleGRUCell."""
    g = rng()
    shapes = {"gates": (I + H, 2 * H), "candidate/input_projection": (I, H), "candidate/hidden_projection": (H, H)}
    variables = {}
    for name, shape in shapes.items():
        variables[f"{scope}{name}/kernel"] = g.uniform(-1, 1, shape).astype(np.float32)
        variables[f"{scope}{name}/bias"] = g.uniform(-1, 1, shape[1:]).astype(np.float32)
    return variables


@pytest.mark.parametrize("cell", [None, "CudnnCompatibleGRUCell"])
@pytest.mark.parametrize("scope", ["", "rnn/multi_rnn_cell/cell_0/cudnn_compatible_gru_cell/"])
def test_tf1_cudnn_gru(scope, cell):
    """As the class computes it: gates r, u; the reset gate after a product with a bias of its own."""
    variables, x = cudnn_gru(scope), random_x()
    w_ru, b_ru, w_cx, b_cx, w_ch, b_hc = variables.values()
    h, expected = np.zeros((B, H)), []
    for step in x.astype(np.float64):
        r, u = np.split(sigmoid(np.concatenate([step, h], axis=1) @ w_ru + b_ru), 2, axis=1)
        h = u * h + (1 - u) * np.tanh(step @ w_cx + b_cx + r * (h @ w_ch + b_hc))
        expected.append(h)
    layer = convert.from_tf1((other_variables(scope) if scope else {}) | variables, cell=cell)
    np.testing.assert_allclose(layer(x)[0], expected, rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="expected one cell: "):
        convert.from_tf1(variables, cell="GRUBlockCell")
    with pytest.raises(ValueError, match="expected one cell: "):
        convert.from_tf1(tf1_gru(names=GRU_NAMES[1]), cell="CudnnCompatibleGRUCell")
    for name in variables:
        with pytest.raises(ValueError, match=r"expected one cell|has shape"):
            convert.from_tf1({key: value for key, value in variables.items() if key != name})
        with pytest.raises(ValueError, match=r"has shape .*; expected"):
            convert.from_tf1(variables | {name: variables[name][..., :-1]})


@pytest.mark.parametrize(
    ("variables", "options", "message"),
    [
        ({}, {"cell": "NASCell"}, "cell is 'NASCell'; expected one of LSTMBlockCell"),
        (
            tf1_lstm() | {"rnn/lstm_cell/projection/bias": np.ones(2, np.float32)},
            {},
            "has a projection with a bias",
        ),
    ],
)
def test_tf1_refused(variables, options, message):
    with pytest.raises(ConversionError, match=f"^from_tf1: .*{message}"):
        convert.from_tf1(variables, forget_bias=1.0, **options)


@pytest.mark.parametrize(
    ("variables", "options", "error", "message"),
    [
        ([], {}, TypeError, "variables is of type list; expected names and arrays"),
        ({}, {}, ValueError, "Of these there are none"),
        ({3: np.ones(1)}, {}, TypeError, "there is a name of type int; expected those of type str"),
        ({"a/kernel": np.ones(1)}, {}, ValueError, r"there are \['a/kernel'\]"),
        (tf1_gru(), {"forget_bias": 1.0}, ValueError, "is a GRU, which has no forget_bias"),
        (tf1_gru(), {"cell": "LSTMCell"}, ValueError, "expected one cell"),
        ({f"{name}/part_0": value for name, value in tf1_lstm().items()}, {}, ValueError, "there are none"),
        ({"layer_norm_basic_lstm_cell/kernel": np.ones((7, 16))}, {}, ValueError, "kernel and bias of an LSTM"),
        (tf1_lstm() | {"rnn/lstm_cell/bias": np.ones(15, np.float32)}, {}, ValueError, r"b has shape \(15,\);"),
        (
            tf1_lstm() | {"rnn/lstm_cell/w_i_diag": np.ones(H, np.float32)},
            {},
            TypeError,
            "LSTM: wcf is None; expected an array",
        ),
        (tf1_gru() | {"rnn/gru_cell/b_c": np.ones(3, np.float32)}, {}, ValueError, r"b_c has shape \(3,\)"),
        (tf1_lstm() | {"rnn/lstm_cell/bias": np.ones(16)}, {}, TypeError, "has dtype float64; expected float32"),
    ],
)
def test_tf1_errors(variables, options, error, message):
    with pytest.raises(error, match=f"^from_tf1: .*{message}"):
        convert.from_tf1(variables, **options)
