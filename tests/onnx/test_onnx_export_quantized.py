"""Models of quantized layers with float32 activations: those of the dequantized layer, in fewer bytes."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import onnx
import pytest
from bits import same
from export_cases import DEPTH, LAYERS, STREAMING, B, Case, I, T, exported, flat, lstm, random_state
from graphs import EPS, on_onnxruntime
from refusals import refusal
from runtimes import RUNTIMES

import onnx_export
from blockcell import GRU, LSTM, RNN, Dense, RNNState, Stack, convert
from blockcell.optable import SCHEMES

F32 = np.dtype(np.float32)
LOOPS = ["scan", "unroll", "loop", "native"]


CLIPS, PROJECTS = "is not exact: ONNX's clip bounds", "is not possible: ONNX's LSTM has no projection"
REFUSED = {"LSTM with all": CLIPS, "Stack": CLIPS, "Projected": CLIPS, "Variants": PROJECTS}
"""The layers that ONNX's own nodes do not compute, and why."""


def is_refused(name, loop):
    """Whether it is one that cannot be exported so, after a look at the error, quantized and not."""
    if loop != "native" or name not in REFUSED:
        return False
    layer = LAYERS[name]("float32")
    for each in (layer, layer.quantize("float16")):
        with pytest.raises(ValueError, match=f"loop='native' {REFUSED[name]}"):
            onnx_export.export(each, None, loop=loop)
    return True


def both(layer, scheme, case, **options):
    """Return the model with codes, and that of the dequantized layer."""
    quantized = layer.quantize(scheme)
    return exported(quantized, case, activations="float32", **options), exported(
        quantized.dequantize(), case, **options
    )


every_scheme = pytest.mark.parametrize("scheme", SCHEMES)


# ------------------------------------------------------------------------------------------------------------- results
@pytest.mark.meet(1)
@pytest.mark.parametrize("loop", LOOPS)
@every_scheme
@pytest.mark.parametrize("name", LAYERS)
def test_same_bits_as_the_dequantized_layer(name, scheme, loop):
    if is_refused(name, loop):
        return
    layer = LAYERS[name]("float32")
    for options in ({"lengths": True, "reset": loop != "native"}, {"lengths": False, "state": False}):
        case = Case(layer, **options)
        codes, floats = both(layer, scheme, case, loop=loop)
        for value, found, right in zip(
            codes.graph.output, on_onnxruntime(codes, case.feeds), on_onnxruntime(floats, case.feeds), strict=True
        ):
            assert same(found, right), value.name


@every_scheme
@pytest.mark.parametrize("name", STREAMING)
def test_same_bits_in_steps(name, scheme):
    layer = STREAMING[name]("float32")
    g = np.random.default_rng(1)
    feeds = {"x": g.uniform(-1, 1, (B, I)).astype(F32)}
    feeds |= {f"{part}_prev": value for part, value in flat(layer, random_state(layer, g)).items()}
    codes, floats = both(layer, scheme, None, streaming=True)
    for found, right in zip(on_onnxruntime(codes, feeds), on_onnxruntime(floats, feeds), strict=True):
        assert same(found, right)


@pytest.mark.parametrize(
    ("runtime", "form"),
    [
        ("OpenVINO", {"loop": "loop"}),
        ("OpenVINO", {"loop": "unroll"}),
        ("OpenVINO", {"loop": "native"}),
        ("tract", {"loop": "scan", "static": True}),
        ("tract", {"loop": "unroll"}),
    ],
    ids=lambda part: part if isinstance(part, str) else " ".join(map(str, part.values())),
)
@every_scheme
@pytest.mark.parametrize("name", ["Reverse", "Classifier", "Dense within"])
def test_other_runtimes(name, scheme, runtime, form, tmp_path):
    pytest.importorskip(runtime.lower())
    quantized = LAYERS[name]("float32").quantize(scheme)
    case = Case(quantized.dequantize(), reset=form["loop"] != "native")
    options = {"activations": "float32", "functions": False, "sizes": {"T": T, "B": B}}
    model = exported(quantized, case, **options, **form)
    limit = 24 * EPS[F32] * DEPTH.get(name, 1)
    case.check(model, lambda model, given: RUNTIMES[runtime](model, given, tmp_path / "a.onnx"), limit=limit, dtype=F32)


@pytest.mark.parametrize(
    "layer", [Dense.init(64, 32, seed=1), LSTM.init(64, 32, seed=2), LSTM.init(64, 32, seed=3, proj_size=16)]
)
@pytest.mark.parametrize("runtime", ["onnxruntime", "OpenVINO", "tract"])
def test_no_runtime_rounds_activations(layer, runtime, tmp_path):
    """Of a product with the matrix as it is stored, which runtimes like to fuse."""
    pytest.importorskip(runtime.lower())
    quantized = layer.quantize("int8")
    x = np.random.default_rng(4).standard_normal((B, 64)).astype(F32)
    model = onnx_export.export(quantized, None, activations="float32", streaming=True, functions=False, sizes={"B": B})
    sizes = {value.name: [d.dim_value for d in value.type.tensor_type.shape.dim] for value in model.graph.input}
    feeds = {name: np.zeros(shape, F32) for name, shape in sizes.items()} | {"x": x}
    y = RUNTIMES[runtime](model, feeds, tmp_path / "a.onnx")[0]
    np.testing.assert_allclose(y, quantized.dequantize()(x[None])[0][0], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("inputs", "cells"), [(0, 3), (3, 0), (0, 0)])
@pytest.mark.parametrize("kind", [LSTM, GRU])
def test_sizes_of_zero(kind, inputs, cells):
    layer = kind.init(inputs, cells, seed=1)
    feeds = {"x": np.ones((2, 3, inputs), F32), "lengths": np.arange(3)}
    for scheme in SCHEMES:
        quantized = layer.quantize(scheme)
        y = on_onnxruntime(exported(quantized, state=False, activations="float32"), feeds)[0]
        np.testing.assert_allclose(y, quantized.dequantize()(feeds["x"], lengths=feeds["lengths"])[0], atol=1e-6)


@every_scheme
def test_native_rnn_without_inputs(scheme):
    quantized = RNN.init(0, 3, seed=1).quantize(scheme)
    model = exported(quantized, activations="float32", loop="native", lengths=False)
    feeds = {"x": np.ones((2, 4, 0), F32), "h_prev": np.random.default_rng(2).standard_normal((4, 3)).astype(F32)}
    right = quantized.dequantize()(feeds["x"], RNNState(feeds["h_prev"]))[0]
    np.testing.assert_allclose(on_onnxruntime(model, feeds)[0], right, rtol=0, atol=1e-6)


# -------------------------------------------------------------------------------------------------- what it is made of
@every_scheme
@pytest.mark.parametrize("loop", LOOPS)
def test_fewer_bytes(loop, scheme, tmp_path):
    layer, dtype = lstm(96, "float32", 64), SCHEMES[scheme]
    sizes = []
    for each in (layer, layer.quantize(scheme)):
        model = onnx_export.export(
            each,
            tmp_path / "a.onnx",
            activations=None if each is layer else "float32",
            loop=loop,
            sizes={"T": T, "B": B},
        )
        sizes.append((tmp_path / "a.onnx").stat().st_size)
        weights = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    assert sizes[0] - sizes[1] == pytest.approx((4 - dtype.itemsize) * layer.weights["w"].size, abs=4000)
    matrices = ["W", "R"] if loop == "native" else ["w"]
    assert [name for name, array in weights.items() if array.dtype == dtype] == matrices
    made = {name: node.op_type for node in model.graph.node for name in node.input}
    assert all(made[name] == "Cast" for name in matrices)  # in the graph, not a loop
    if scheme == "int8":
        assert all(weights[f"{name}.scale"].size == 4 * 96 and made[f"{name}.scale"] == "Mul" for name in matrices)


@pytest.mark.meet(2)
@every_scheme
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", LAYERS)
def test_gives_back_the_dequantized_layer(name, scheme, loop):
    if is_refused(name, loop):
        return
    layer = LAYERS[name]("float32")
    codes, floats = both(layer, scheme, None, loop=loop)
    found, right = convert.from_onnx(codes), convert.from_onnx(floats, check=False)
    assert repr(found) == repr(right)
    for key, array in right.weights.items():
        assert same(found.weights[key], array), key


@pytest.mark.parametrize("activations", ["int8", "float32"])
def test_mixed(activations):
    """A model has each part as the quantized layer has it."""
    layer = Stack([lstm(7, "float32"), GRU.init(7, 6, seed=1), Dense.init(6, 3, seed=2), Dense.init(3, 2, seed=3)])
    quantized = layer.quantize({"0": "int8", "1": "float16", "3": "int8"})
    case = Case(layer)
    model = exported(quantized, case, activations=activations)
    kinds = [node.op_type for part in (model.graph, *model.functions) for node in part.node]
    arrays = {tensor.name: onnx.numpy_helper.to_array(tensor).dtype for tensor in model.graph.initializer}
    codes = np.dtype(np.uint8 if activations == "int8" else np.int8)
    assert [arrays[f"{k}.{name}"] for k, name in enumerate(("w", "w_ru", "w", "w"))] == [codes, np.float16, F32, codes]
    assert ("MatMulInteger" in kinds) == (activations == "int8")
    expected = quantized if activations == "int8" else quantized.dequantize()
    found = on_onnxruntime(model, case.feeds)[0]
    np.testing.assert_allclose(found, expected(**case.arguments)[0], atol=2e-6 if activations == "float32" else 5e-3)
    said = "not compared with the model, because it rounds x and h to 8 bits"
    with pytest.warns(UserWarning, match=said) if activations == "int8" else nullcontext():
        converted = convert.from_onnx(model)
    for key, array in quantized.dequantize().weights.items():
        assert same(converted.weights[key], array), key


# ------------------------------------------------------------------------------------------------------------ refusals
FLOAT = lstm(4, "float32")
QUANTIZED = FLOAT.quantize("int8")


@pytest.mark.parametrize(
    ("layer", "options", "message"),
    [
        (QUANTIZED, {"train": True}, "layer is quantized and train is True; expected the float32 layer: weights"),
        (QUANTIZED, {"dtype": "float16"}, "layer is quantized and dtype float16; expected float32, which scales are"),
        (QUANTIZED, {"activations": "int16"}, "activations is 'int16'; expected 'int8' or 'float32'"),
        (QUANTIZED, {"activations": 8}, "activations is 8; expected 'int8' or 'float32'"),
        (FLOAT, {"activations": "int8"}, "activations is 'int8' and the layer is not quantized; expected layer.quan"),
    ],
)
def test_refused(layer, options, message):
    with refusal(f"ValueError: export: {message}"):
        onnx_export.export(layer, None, **options)


def test_training():
    said = "TypeError: layer is quantized, and has no gradients; expected the float"
    with refusal(said):
        onnx_export.training_step(QUANTIZED, None, loss="mse", optimizer="sgd")
    with refusal(said):
        onnx_export.TrainingSession("a.onnx", QUANTIZED)


@pytest.mark.parametrize("to", ["to_keras", "to_torch", "to_onnx"])
def test_conversions(to):
    with pytest.raises(TypeError, match=f"{to}: the layer is quantized, .*; expected the float32 layer, or"):
        getattr(convert, to)(QUANTIZED)
