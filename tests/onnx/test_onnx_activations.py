"""Activations in graphs: float32's operators, the kinks, and ONNX's own nodes, which not all runtimes get right.

That every activation and its gradient are those of the formulas in float64 is tested in `test_onnx_export.py`.
"""

from __future__ import annotations

import re
from functools import partial

import numpy as np
import onnx
import pytest
from cases import SIZES, arguments
from export_cases import B, Case, T, exported, gru, lstm, rnn
from graphs import EPS, FLOAT64, ONNX, compare, converted, exact, on_onnxruntime
from runtimes import RUNTIMES

import onnx_export
from blockcell.activations import DEFAULTS, PARAMETERS
from blockcell.convert.onnx_activations import WRITTEN
from blockcell.formulas import FORMULAS

F32 = np.dtype(np.float32)
LIMIT = 24 * EPS[F32]
MAKERS = {"RNN": rnn, "LSTM": lstm, "GRU": gru, "GRU after": partial(gru, reset_after=True)}
WRONG = {  # of ONNX's own nodes: "wrong" without an error, or "no"
    "onnxruntime": {},
    "onnx.reference": {"RNN": "no", "LSTM": "wrong" if ONNX >= (1, 23) else "no", "GRU": "wrong"},  # no cs before
    "OpenVINO": {"RNN": "no", "LSTM": "no", "GRU": "no"},
    "tract": {"RNN": "wrong", "LSTM": "wrong", "GRU": "wrong"},
}


def run(runtime, model, given, folder):
    if runtime not in ("onnxruntime", "onnx.reference"):
        pytest.importorskip(runtime.lower())
    return RUNTIMES[runtime](model, given, folder / "a.onnx")


# -------------------------------------------------------------------------------------------------- the graphs of cells
@pytest.mark.meet(2)
@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("op", ["block_rnn", "block_rnn_grad"])
@pytest.mark.parametrize("activation", PARAMETERS)
def test_float32(activation, op, runtime, tmp_path):
    """Where a value is an operator of its own."""
    args = arguments(op, activation=activation)
    model = onnx_export.build(op, attrs={"activation": activation}, sizes=SIZES, loop="unroll", functions=False)
    given = {value.name: np.asarray(args[value.name]) for value in model.graph.input}
    compare(op, run(runtime, model, given, tmp_path), exact(op, args), LIMIT)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(
    ("activation", "bias", "slope"),
    [
        ("relu", [0, -1, 1], [0, 0, 1]),
        ("hard_sigmoid", [-3, 3, 0, -4, 4], [0, 0, 1 / 6, 0, 0]),
        (("leaky_relu", 0.25), [0, -1, 1], [0.25, 0.25, 1]),
        (("elu", 0.5), [0, 1], [0.5, 1]),
    ],
    ids=str,
)
def test_slopes_at_kinks(activation, bias, slope, dtype):
    H = len(bias)
    values = {
        "x": np.zeros((1, 1, 1)),
        "h_prev": np.zeros((1, H)),
        "w": np.zeros((1 + H, H)),
        "b": np.array(bias, float),
    }
    (h,) = FORMULAS["block_rnn"](seq_len_max=1, activation=activation, **values)
    values |= {"h": h, "h_grad": np.ones((1, 1, H))}
    given = {name: value.astype(dtype) for name, value in values.items()} | {"seq_len_max": 1}
    model = onnx_export.build("block_rnn_grad", dtype=dtype, attrs={"activation": activation})
    np.testing.assert_allclose(on_onnxruntime(model, given)[3], slope, rtol=1e-7)


@pytest.mark.parametrize("name", MAKERS)
def test_the_usual_activations_change_nothing(name):
    usual = {key: value for key, value in DEFAULTS.items() if name != "RNN" or key == "activation"}
    made = MAKERS[name](4, "float32"), MAKERS[name](4, "float32", **usual)
    for options in ({}, {"train": True}, {"loop": "native"}):
        plain, given = (exported(layer, **options) for layer in made)
        del plain.graph.initializer[:], given.graph.initializer[:]
        assert plain == given
        words = {"Activation", "Recurrent", "ActivationSlope", "RecurrentSlope"}
        assert not words & {node.op_type for part in (plain.graph, *plain.functions) for node in part.node}


def test_float64_has_numbers_of_float64():
    """An attribute of an operator is float32."""
    args = arguments("block_rnn", dtype=np.float64, activation=("leaky_relu", 0.1))
    model = onnx_export.build("block_rnn", dtype="float64", attrs={"activation": ("leaky_relu", 0.1)}, functions=False)
    compare("block_rnn", on_onnxruntime(model, args), exact("block_rnn", args), FLOAT64)
    assert "LeakyRelu" not in str(model)


# ----------------------------------------------------------------------------------------------------- ONNX's own nodes
@pytest.mark.meet(2)
@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize(
    "activation", [name for name in WRITTEN if name not in ("tanh", "sigmoid", "relu", "softplus")]
)
@pytest.mark.parametrize("name", MAKERS)
def test_native(name, activation, runtime, tmp_path):
    """As runtimes.md says: right on onnxruntime; others refuse the node, or take it for one with tanh and sigmoid."""
    options = {"activation": activation}
    if name != "RNN":
        options["recurrent_activation"] = ("hard_sigmoid", 0.3, 0.4)
    layer = MAKERS[name](4, "float32", **options)
    case = Case(layer, lengths=False)
    model = exported(layer, case, loop="native", sizes={"T": T, "B": B})
    (node,) = (node for node in model.graph.node if node.op_type in ("LSTM", "GRU", "RNN"))
    verdict = WRONG[runtime].get(node.op_type, "yes")
    if runtime == "onnx.reference" and (node.op_type, activation) == ("RNN", "linear"):
        verdict = "yes"
    given = case.feeds
    try:
        results = run(runtime, model, given, tmp_path)
    except Exception:
        assert verdict == "no"
        return
    close = all(
        np.abs(result - right).max() <= LIMIT * np.abs(right).max()
        for result, right in zip(results, case.expected.values(), strict=True)
    )
    assert verdict == ("yes" if close else "wrong")


@pytest.mark.parametrize("runtime", ["onnxruntime", "OpenVINO"])
@pytest.mark.parametrize("name", MAKERS)
def test_native_with_relu_and_tanh(name, runtime, tmp_path):
    options = {"activation": "relu"} | ({} if name == "RNN" else {"recurrent_activation": "tanh"})
    layer = MAKERS[name](4, "float32", **options)
    case = Case(layer, lengths=False)
    model = exported(layer, case, loop="native", sizes={"T": T, "B": B})
    case.check(model, lambda model, given: run(runtime, model, given, tmp_path), limit=LIMIT, dtype=F32)


@pytest.mark.parametrize(
    ("made", "dtype", "message"),
    [
        (lambda d: rnn(4, d, activation="selu"), "float32", "is not exact: ONNX's RNN has no activation 'selu'"),
        (lambda d: gru(4, d, recurrent_activation="exponential"), "float32",
         "is not exact: ONNX's GRU has no recurrent_activation 'exponential'"),
        (lambda d: lstm(4, d, activation="softplus"), "float32",
         "is not exact: in its LSTM, onnxruntime's softplus of more than 88 is infinite"),
        (lambda d: rnn(4, d, activation="leaky_relu"), "float64",
         "is not exact: ONNX's RNN has the numbers of its activations in float32, not 'leaky_relu'"),
    ],
)  # fmt: skip
def test_native_refused(made, dtype, message):
    with pytest.raises(ValueError, match=re.escape(f"export: loop='native' {message}")):
        onnx_export.export(made(dtype), None, loop="native")


# ------------------------------------------------------------------------------------------------------------- the rest
def test_a_session_has_the_activation_that_it_was_built_with():
    args = arguments("block_rnn", activation=("leaky_relu", 0.1))
    session = onnx_export.Session("block_rnn", attrs={"activation": ["leaky_relu", 0.1]})
    for given in (args, {name: value for name, value in args.items() if name != "activation"}):
        compare("block_rnn", session(**given), exact("block_rnn", args), LIMIT)
    with pytest.raises(ValueError, match=r"activation is 'relu'; expected \('leaky_relu', 0.1\), as the model"):
        session(**args | {"activation": "relu"})
    again = onnx_export.Session(session.model)  # by the model's metadata
    assert again.attributes == {"activation": ("leaky_relu", 0.1)}


def test_link_takes_an_activation():
    args = arguments("block_rnn", activation="relu")
    model = converted("block_rnn", args)
    compare("block_rnn", on_onnxruntime(onnx_export.link(model), args), exact("block_rnn", args), LIMIT)
    model.graph.node[0].attribute[0].CopyFrom(onnx.helper.make_attribute("activation", 1.0))
    with pytest.raises(ValueError, match=r"block_rnn node 'cell' has activation 1.0; expected a string"):
        onnx_export.link(model)
