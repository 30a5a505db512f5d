"""Models with weights in int8: those of the rounded layer, in a quarter of the bytes, on every runtime."""

from __future__ import annotations

import re

import numpy as np
import onnx
import pytest
from bits import same
from export_cases import DEPTH, LAYERS, STREAMING, B, Case, I, T, exported, flat, lstm, random_state
from graphs import EPS, on_onnxruntime, on_reference
from runtimes import RUNTIMES

import onnx_export
from blockcell import GRU, LSTM, Dense, convert

F32 = np.dtype(np.float32)
LOOPS = ["scan", "unroll", "loop", "native"]


CLIPS, PROJECTS = "is not exact: ONNX's clip bounds", "is not possible: ONNX's LSTM has no projection"
REFUSED = {"LSTM with all": CLIPS, "Stack": CLIPS, "Projected": CLIPS, "Variants": PROJECTS}
"""The layers that ONNX's own nodes do not compute, and why."""


def is_refused(name, loop):
    """Whether it is one that cannot be exported so, after a look at the error, with and without a storage."""
    if loop != "native" or name not in REFUSED:
        return False
    for storage in (None, "int8"):
        with pytest.raises(ValueError, match=f"loop='native' {REFUSED[name]}"):
            onnx_export.export(LAYERS[name]("float32"), None, loop=loop, storage=storage)
    return True


def both(layer, case, **options):
    """The model with codes, and that of the rounded layer."""
    rounded = layer.rounded_to("int8")
    return exported(layer, case, storage="int8", **options), exported(rounded, case, **options)


# ------------------------------------------------------------------------------------------------------------- results
@pytest.mark.meet(1)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", LAYERS)
def test_same_bits_as_the_rounded_layer(name, loop):
    if is_refused(name, loop):
        return
    layer = LAYERS[name]("float32")
    for options in ({"lengths": True, "reset": loop != "native"}, {"lengths": False, "state": False}):
        case = Case(layer, **options)
        codes, floats = both(layer, case, loop=loop)
        for value, found, right in zip(
            codes.graph.output, on_onnxruntime(codes, case.feeds), on_onnxruntime(floats, case.feeds), strict=True
        ):
            assert same(found, right), value.name


@pytest.mark.parametrize("name", LAYERS)
def test_same_bits_on_the_reference(name):
    layer = LAYERS[name]("float32")
    case = Case(layer, reset=True)
    codes, floats = both(layer, case, functions=False)
    for found, right in zip(on_reference(codes, case.feeds), on_reference(floats, case.feeds), strict=True):
        assert same(found, right)


@pytest.mark.parametrize("name", STREAMING)
def test_same_bits_in_steps(name):
    layer = STREAMING[name]("float32")
    g = np.random.default_rng(1)
    feeds = {"x": g.uniform(-1, 1, (B, I)).astype(F32)}
    feeds |= {f"{part}_prev": value for part, value in flat(layer, random_state(layer, g)).items()}
    codes, floats = both(layer, None, streaming=True)
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
@pytest.mark.parametrize("name", ["Reverse", "Classifier", "Dense within"])
def test_other_runtimes(name, runtime, form, tmp_path):
    pytest.importorskip(runtime.lower())
    layer = LAYERS[name]("float32").rounded_to("int8")
    case = Case(layer, reset=form["loop"] != "native")
    model = exported(layer, case, storage="int8", functions=False, sizes={"T": T, "B": B}, **form)
    limit = 24 * EPS[F32] * DEPTH.get(name, 1)
    case.check(model, lambda model, given: RUNTIMES[runtime](model, given, tmp_path / "a.onnx"), limit=limit, dtype=F32)


@pytest.mark.parametrize(("inputs", "cells"), [(0, 3), (3, 0), (0, 0)])
@pytest.mark.parametrize("kind", [LSTM, GRU])
def test_sizes_of_zero(kind, inputs, cells):
    layer = kind.init(inputs, cells, seed=1)
    feeds = {"x": np.ones((2, 3, inputs), F32), "lengths": np.arange(3)}
    y = on_onnxruntime(exported(layer, storage="int8", state=False), feeds)[0]
    np.testing.assert_allclose(y, layer.rounded_to("int8")(feeds["x"], lengths=feeds["lengths"])[0], atol=1e-6)


# -------------------------------------------------------------------------------------------------- what it is made of
@pytest.mark.parametrize("loop", LOOPS)
def test_a_quarter_of_the_bytes(loop, tmp_path):
    layer = lstm(96, "float32", 64)
    sizes = []
    for storage in (None, "int8"):
        model = onnx_export.export(layer, tmp_path / "a.onnx", storage=storage, loop=loop, sizes={"T": T, "B": B})
        sizes.append((tmp_path / "a.onnx").stat().st_size)
        weights = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    assert sizes[0] - sizes[1] == pytest.approx(3 * layer.weights["w"].size, abs=4000)
    matrices = ["W", "R"] if loop == "native" else ["w"]
    assert [name for name, array in weights.items() if array.dtype == np.int8] == matrices
    assert all(weights[f"{name}.scale"].size == 4 * 96 for name in matrices)
    made = {name: node.op_type for node in model.graph.node for name in node.input}
    assert all(made[name] == "Cast" and made[f"{name}.scale"] == "Mul" for name in matrices)  # in the graph, not a loop


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", LAYERS)
def test_gives_back_the_rounded_layer(name, loop):
    if is_refused(name, loop):
        return
    layer = LAYERS[name]("float32")
    codes, floats = both(layer, None, loop=loop)
    found, right = convert.from_onnx(codes), convert.from_onnx(floats)
    assert repr(found) == repr(right)
    for key, array in right.weights.items():
        assert same(found.weights[key], array), key


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", ["LSTM", "GRU after", "Classifier"])
def test_session(name, loop):
    layer = LAYERS[name]("float32")
    case = Case(layer.rounded_to("int8"))
    found = case.by_name(onnx_export.Session(exported(layer, case, storage="int8", loop=loop))(**case.arguments))
    for key, right in case.expected.items():
        np.testing.assert_allclose(found[key], right, rtol=0, atol=24 * EPS[F32] * 3, err_msg=key)


# ------------------------------------------------------------------------------------------------------------ refusals
@pytest.mark.parametrize(
    ("dtype", "options", "message"),
    [
        ("float32", {"storage": "float16"}, "storage is 'float16'; expected None or 'int8'; for the function of"),
        ("float32", {"storage": 8}, "storage is 8; expected None or 'int8'"),
        ("float32", {"train": True}, "storage is 'int8' and train True; expected one: weights are inputs in training"),
        ("float32", {"dtype": "float16"}, "storage is 'int8' and dtype float16; expected float32"),
        ("float64", {}, "storage is 'int8' and the layer's dtype float64; expected float32: make a layer of"),
    ],
)
def test_refused(dtype, options, message):
    with pytest.raises(ValueError, match=re.escape(f"export: {message}")):
        onnx_export.export(lstm(4, dtype), None, **{"storage": "int8"} | options)


def test_weights_that_have_no_codes():
    layer = Dense(np.array([[1, np.inf]], F32), np.zeros(2, F32))
    with pytest.raises(ValueError, match=re.escape("export: w[0, 1] is inf; expected finite weights")):
        onnx_export.export(layer, None, storage="int8")
