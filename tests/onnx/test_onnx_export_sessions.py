"""A layer's model as an `onnx_export.Session`: it is called like the layer, and refuses wrong arguments."""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from cases import rng
from export_cases import LAYERS, LENGTHS, B, Case, I, T, dense, exported, flat, gru, lstm, random_state
from graphs import saturates

import onnx_export
from blockcell import Bidirectional, Stack


@pytest.mark.parametrize("name", LAYERS)
def test_a_session_is_called_like_the_layer(name, tmp_path):
    layer = LAYERS[name]("float64")
    onnx_export.export(layer, tmp_path / "layer.onnx", reset=True)
    g = rng("session", name)
    x, state, reset = g.uniform(-1, 1, (T, B, I)), random_state(layer, g), g.random((T, B)) < 0.3
    session = onnx_export.Session(str(tmp_path / "layer.onnx"))
    for given in ({}, {"state": state}, {"state": None, "lengths": LENGTHS.tolist(), "reset": reset}):
        result = session(x=x, **given)
        y, last = layer(x, given.get("state"), lengths=given.get("lengths"), reset=given.get("reset"))
        np.testing.assert_allclose(result.y, y, rtol=0, atol=1e-14)
        found = flat(layer, result.state)
        for part, right in flat(layer, last).items():
            np.testing.assert_allclose(found[part], right, rtol=0, atol=1e-14, err_msg=part)


# ------------------------------------------------------------------------------------------------------ nothing to run
FORMS = {
    "scan": {},
    "without lengths": {"lengths": False, "reset": True},
    "without states": {"state": False, "loop": "loop"},
    "native": {"loop": "native"},
    "float16 weights": {"scheme": "float16"},
    "int8 weights": {"scheme": "int8", "activations": "float32"},
    "int8": {"scheme": "int8"},
    "train": {"train": True},
    "train, without states": {"train": True, "state": False},
}
EMPTY = ["Bidirectional", "Reverse", "Classifier", "Both ends", "Dense", "Projected"]


@pytest.mark.meet(2)
@pytest.mark.parametrize("sizes", [(0, B), (T, 0), (0, 0)])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", EMPTY)
def test_no_steps_or_no_rows(name, form, sizes):
    """A session gives what the layer gives; without steps the states stay, and so do the gradients to them."""
    layer, options = LAYERS[name]("float32"), dict(FORMS[form])
    scheme = options.pop("scheme", None)
    if options.get("loop") == "native" and name == "Projected":
        pytest.skip("ONNX's nodes have no projection")
    made_of = layer if scheme is None else layer.quantize(scheme)
    session = onnx_export.Session(onnx_export.export(made_of, None, **options))
    layer = layer if scheme is None else made_of.dequantize()
    takes = {key: options[key] for key in ("lengths", "reset", "state", "train") if key in options}
    case = Case(layer, sizes=sizes, **takes)
    given = case.arguments
    if sizes == (0, B) and options.get("lengths") is False:
        with pytest.raises(ValueError, match="expected at least one step, as the model was exported without lengths"):
            session(**given)
        return
    found = case.by_name(session(**given))
    y, last, tape = layer.forward(given["x"], given.get("state"), **case.given)
    right = {"y": y, "state": last}
    if "train" in takes:
        gradients = layer.backward(tape, given["d_y"], given.get("d_state"))
        right |= zip(("d_x", "d_state", "grads"), gradients, strict=True)
    expected = case.by_name(SimpleNamespace(**right))
    assert found.keys() == expected.keys()
    for key, array in expected.items():
        assert (found[key].shape, found[key].dtype) == (array.shape, array.dtype)
        np.testing.assert_allclose(found[key], array, rtol=0, atol=1e-7, err_msg=key)


@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_no_steps_in_other_dtypes(dtype):
    layer = LAYERS["Classifier"](dtype)
    result = onnx_export.Session(onnx_export.export(layer, None))(x=np.zeros((0, B, I), dtype))
    np.testing.assert_array_equal(result.y, layer(np.zeros((0, B, I), dtype))[0], strict=True)


# ----------------------------------------------------------------------------------------------------------- quantized
QUANTIZED = {
    "LSTM": lambda: lstm(16, "float32", use_peephole=True),
    "Reverse": lambda: lstm(16, "float32", reverse=True),
    "Bidirectional": lambda: Bidirectional(lstm(16, "float32"), lstm(16, "float32")),
    "Classifier": lambda: Stack([lstm(16, "float32"), gru(8, "float32", 16), dense(4, "float32", 8, last=True)]),
}


@pytest.mark.meet(2)
@pytest.mark.parametrize("reduce_range", [True, False])
@pytest.mark.parametrize("functions", [True, False])
@pytest.mark.parametrize("lengths", [True, False])
@pytest.mark.parametrize("name", QUANTIZED)
def test_quantize_dynamic(name, lengths, functions, reduce_range, tmp_path):
    """onnxruntime's tool finds the LSTMs of "native" and dense layers' products. A session calls what it makes."""
    if saturates() and not reduce_range:
        pytest.skip("onnxruntime's products of bytes saturate on this CPU, unless weights have 7 bits")
    quantization = pytest.importorskip("onnxruntime.quantization")  # needs sympy in 1.25 and 1.26
    layer = QUANTIZED[name]()
    before, after = tmp_path / "before.onnx", tmp_path / "after.onnx"
    onnx_export.export(layer, before, loop="native", lengths=lengths, functions=functions)
    quantization.quantize_dynamic(before, after, reduce_range=reduce_range)
    kinds = [node.op_type for node in onnx.load(after).graph.node]
    cells = [type(cell).__name__ for cell in layer._leaves().values()]
    assert kinds.count("DynamicQuantizeLSTM") == cells.count("LSTM") and "LSTM" not in kinds
    assert kinds.count("MatMulInteger") == cells.count("Dense") and "MatMul" not in kinds
    assert kinds.count("GRU") == cells.count("GRU")  # onnxruntime has nothing for it
    x = rng("quantized", name).uniform(-1, 1, (T, B, I)).astype(np.float32)
    given = {"lengths": LENGTHS} if lengths else {}
    y, right = onnx_export.Session(after)(x=x, **given).y, layer(x, **given)[0]
    # Weights, x and h have steps of 1/127 of their largest entries, or weights of 1/63; errors of half a step each add
    # up, over steps too.
    if lengths:
        assert onnx_export.Session(after)(x=x[:0]).y.shape == layer(x[:0])[0].shape
    assert 1e-4 < np.abs(y - right).max() < 4 / (63 if reduce_range else 127) * np.abs(right).max()


@pytest.mark.parametrize("name", LAYERS)
def test_a_session_that_trains(name):
    case = Case(LAYERS[name]("float64"), train=True)
    model = exported(case.layer, case)
    result = onnx_export.Session(model)(**case.arguments)
    assert result._fields == ("y", "state", "d_x", "d_state", "grads")
    found = case.by_name(result)
    case.check(model, lambda *_: found.values())


X = np.zeros((4, 2, 3), np.float32)


@pytest.mark.parametrize(
    ("given", "exception", "message"),
    [
        ({}, TypeError, "Bidirectional: x missing; expected x, state, lengths"),
        ({"x": X, "inputs": X}, TypeError, "Bidirectional: inputs unknown; expected x, state, lengths"),
        ({"x": X, "reset": X}, TypeError, "Bidirectional: reset unknown; expected x, state, lengths; the model was ex"),
        ({"x": X[0]}, ValueError, "x has shape (2, 3); expected (T, B, 3)"),
        ({"x": X[:, :, :2]}, ValueError, "x has shape (4, 2, 2); expected (T, B, 3)"),
        ({"x": X.astype(np.float64)}, TypeError, "x has dtype float64; expected float32; x.astype(np.float32) "),
        ({"x": X, "lengths": [1]}, ValueError, "lengths has shape (1,); expected (2,), with B=2 from x"),
        ({"x": X, "lengths": [1, 5]}, ValueError, "lengths is [1 5]; expected 0 to T = 4"),
        ({"x": X, "lengths": [-1, 4]}, ValueError, "lengths is [-1  4]; expected 0 to T = 4"),
        ({"x": X, "lengths": [1.0, 2.0]}, TypeError, "lengths has dtype float64; expected int64"),
        ({"x": X, "state": X}, TypeError, "state is of type ndarray; expected (fw, bw) or None"),
        ({"x": X, "state": (None,)}, ValueError, "state has 1 parts; expected (fw, bw)"),
        ({"x": X, "state": (None, (X[0],))}, ValueError, "state.bw.h has shape (2, 3); expected (2, 5), with B=2"),
    ],
)  # fmt: skip
def test_bad_calls(given, exception, message):
    session = onnx_export.Session(onnx_export.export(LAYERS["Bidirectional"]("float32"), None))
    with pytest.raises(exception, match=re.escape(message)):
        session(**given)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (None, "LSTM: weights missing; expected x, state, lengths, weights, d_y, d_state"),
        ([1], "LSTM: weights is of type list; expected a dict with w, b"),
        ({"w": X}, "LSTM: weights has no b; expected w, b"),
        ({"w": X, "b": X, "c": X}, "LSTM: weights has c; expected w, b"),
    ],
)
def test_bad_weights(weights, message):
    session = onnx_export.Session(onnx_export.export(lstm(4, "float32"), None, train=True))
    with pytest.raises(TypeError, match=re.escape(message)):
        session(x=X, weights=weights)
