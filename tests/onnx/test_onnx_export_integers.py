"""Models of layers quantized to int8: sums and z as of the formulas, number for number; results as of the kernels."""

from __future__ import annotations

import re

import numpy as np
import onnx
import pytest
from bits import same
from export_cases import LAYERS, STREAMING, B, Case, I, exported, flat, lstm, random_state
from graphs import on_onnxruntime, on_reference
from layer_formulas import add_product_in_integers
from quantization_cases import ROWS
from runtimes import RUNTIMES

import onnx_export
from blockcell import GRU, LSTM, Dense

F32 = np.dtype(np.float32)
KINDS = {"LSTM": (LSTM, {}), "GRU": (GRU, {}), "GRU(reset_after)": (GRU, {"reset_after": True})}


def layer_of(kind, I, H):  # noqa: E741
    made, options = KINDS[kind]
    return made.init(I, H, seed=1, **options)


def drawn(g, *shape):
    """Rows of very different sizes, some of them zero."""
    return (g.standard_normal(shape) * g.choice([0, 1e-30, 1e-3, 1, 50], (*shape[:-1], 1))).astype(F32)


# ---------------------------------------------------------------------------------------------- the sums, step by step
@pytest.mark.parametrize("run", [on_onnxruntime, on_reference])
@pytest.mark.parametrize(("inputs", "cells"), [(1, 3), (70, 37)])
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_the_formulas(kind, inputs, cells, run):
    """Every product of a step: its integers, and what it adds to the bias or to the product before it."""
    layer, g = layer_of(kind, inputs, cells), np.random.default_rng(inputs)
    model = exported(layer.quantize("int8"), streaming=True, functions=False)
    feeds = {"x": drawn(g, 6, inputs)}
    feeds |= {f"{name}_prev": drawn(g, 6, cells) for name in flat(layer, layer.stream(1).state)}
    makers = {name: each for each in model.graph.node for name in each.output}
    known = feeds | {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    sums = [each for each in model.graph.node if each.op_type == "MatMulInteger"]
    ends = [each for each in model.graph.node if each.op_type == "Add" and "_term" in each.input[1]]
    assert len(sums) == len(ends) == (4 if kind == "GRU" else 2)
    products, wanted = [], {each.output[0]: onnx.TensorProto.INT32 for each in sums}
    for each, end in zip(sums, ends, strict=True):
        w = each.input[1]
        rows, scale = makers[makers[end.input[1]].input[0]].input
        while makers[rows].op_type != "Abs":  # from a row's scale to what it is made of
            rows = makers[rows].input[0]
        rows = makers[rows].input[0]
        products.append((each.output[0], rows, w, scale, end.input[0], end.output[0]))
        wanted |= {name: onnx.TensorProto.FLOAT for name in (rows, scale, end.input[0], end.output[0])}
        wanted[w] = onnx.TensorProto.UINT8
    del model.graph.output[:]
    names = [name for name in wanted if name not in known]
    model.graph.output.extend(onnx.helper.make_tensor_value_info(name, wanted[name], None) for name in names)
    known |= dict(zip(names, run(model, feeds), strict=True))
    for total, rows, w, scale, addend, result in products:
        rows, codes = known[rows], known[w].astype(np.int64) - 128
        expected = add_product_in_integers(known[addend], rows, codes, known[scale])
        assert np.array_equal(known[result], expected)
        share = rows / np.maximum(np.abs(rows).max(axis=1, keepdims=True) / np.float32(127), np.float32(2.0**-126))
        assert np.array_equal(known[total], np.rint(share).astype(np.int64) @ codes)


@pytest.mark.parametrize("K", [1, 5, 300, 2000])
def test_a_dense_layer_has_the_bits_of_the_quantized_one(K):
    """Also where all codes are at their ends, which saturates where bytes of both signs are multiplied in 16 bits."""
    g = np.random.default_rng(K)
    w = g.standard_normal((K, 33)).astype(F32)
    w[:, 0], w[:, 1] = 1, -1
    layer = Dense(w, g.standard_normal(33).astype(F32))
    x = drawn(g, 3, 4, K)
    x[0, :2], x[1, 0, ::2], x[1, 0, 1::2] = 1, -1, 1
    model = exported(layer.quantize("int8"), lengths=False)
    y = layer.quantize("int8")(x)[0]
    assert same(on_onnxruntime(model, {"x": x})[0], y)
    assert same(on_reference(model, {"x": x})[0], y)


# ------------------------------------------------------------------------------------------------------------- results
@pytest.mark.parametrize("name", STREAMING)
def test_a_step_is_that_of_the_quantized_layer(name):
    """But for a last bit of h, as the same h and x have the same codes."""
    layer, g = STREAMING[name]("float32"), np.random.default_rng(2)
    x, first = g.uniform(-1, 1, (B, I)).astype(F32), random_state(layer, g)
    feeds = {"x": x} | {f"{part}_prev": value for part, value in flat(layer, first).items()}
    model = exported(layer.quantize("int8"), streaming=True)
    y, state = layer.quantize("int8")(x[None], first)
    expected = [y[0] if y.ndim == 3 else y, *flat(layer, state).values()]
    for found, right in zip(on_onnxruntime(model, feeds), expected, strict=True):
        np.testing.assert_allclose(
            found, right, rtol=0, atol=0.01 if name in ("Stack", "Classifier", "Variants") else 2e-6
        )


@pytest.mark.parametrize("name", LAYERS)
def test_sequences(name):
    """In every loop the same bits, near those of the quantized layer."""
    layer = LAYERS[name]("float32")
    case = Case(layer, reset=True)
    y = layer.quantize("int8")(**case.arguments)[0]
    results = []
    for loop in ("scan", "unroll", "loop"):
        model = exported(layer.quantize("int8"), case, loop=loop)
        results.append(on_onnxruntime(model, case.feeds))
        np.testing.assert_allclose(results[-1][0], y, rtol=0, atol=2e-4 * np.abs(y).max())
        assert all(map(same, results[-1], results[0]))


@pytest.mark.meet(1)
@pytest.mark.parametrize(
    ("runtime", "form"),
    [
        ("onnxruntime", {"loop": "scan"}),
        ("onnx.reference", {"loop": "scan"}),
        ("OpenVINO", {"loop": "loop"}),
        ("OpenVINO", {"loop": "unroll"}),
        ("tract", {"loop": "scan", "static": True}),
        ("tract", {"loop": "unroll"}),
    ],
    ids=lambda part: part if isinstance(part, str) else part["loop"],
)
@pytest.mark.parametrize("kind", [*KINDS, "Dense"])
def test_rows_of_any_numbers(kind, runtime, form, tmp_path):
    """As of the quantized layer, on every runtime: numbers but for the last bits, and NaN from there on."""
    if runtime not in ("onnxruntime", "onnx.reference"):
        pytest.importorskip(runtime.lower())
    g = np.random.default_rng(5)
    dense = Dense(g.standard_normal((5, 7)).astype(F32), g.standard_normal(7).astype(F32))
    layer = dense if kind == "Dense" else layer_of(kind, 5, 7)
    x = np.array([[*ROWS.values()], g.standard_normal((len(ROWS), 5))], F32)
    options = {"functions": False, "sizes": {"T": 2, "B": len(ROWS)}}
    model = exported(layer.quantize("int8"), lengths=False, state=False, **options, **form)
    found = RUNTIMES[runtime](model, {"x": x}, tmp_path / "a.onnx")[0]
    y = layer.quantize("int8")(x)[0]
    if runtime == "tract" and kind != "Dense":  # whose sigmoid and tanh make numbers of NaN
        good = [k for k, row in enumerate(ROWS.values()) if np.isfinite(row).all()]
        found, y = found[:, good], y[:, good]
    assert np.array_equal(np.isnan(found), np.isnan(y))
    largest = np.abs(np.where(np.isfinite(y[0]), y[0], 1)).max(axis=1, keepdims=True, initial=1)
    assert np.isclose(found[0], y[0], rtol=0, atol=2e-6 * largest, equal_nan=True).all()


# ------------------------------------------------------------------------------------------------------------ refusals
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loop": "native"}, "activations is 'int8' and loop 'native', whose nodes multiply in float32"),
        ({"opset": 17}, "activations is 'int8' and opset 17; expected 18 or newer"),
    ],
)
def test_refused(options, message):
    with pytest.raises(ValueError, match=re.escape(f"export: {message}")):
        onnx_export.export(lstm(4, "float32").quantize("int8"), None, **options)


@pytest.mark.parametrize(("inputs", "outputs"), [(0, 3), (65537, 1)])
def test_rows_that_are_too_short_or_long(inputs, outputs):
    layer = Dense(np.zeros((inputs, outputs), F32), np.zeros(outputs, F32))
    with pytest.raises(ValueError, match=f"the layer has rows of {inputs}; expected 1 to 65536 numbers in a row"):
        onnx_export.export(layer.quantize("int8"), None)
