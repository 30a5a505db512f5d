"""Calls and streams of quantized layers: of float16 the bits of the dequantized layer; of int8 those of one call."""

# ruff: noqa: E741 (I is the number of inputs, as everywhere)
from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from bits import leaves, on_threads, same
from cases import rng
from guarded import SIDES, guarded
from layer_cases import CELLS, LAYERS, SINGLE, draw
from quantization_cases import numbers

from blockcell import GRU, LSTM, Bidirectional, Dense, Quantized, Stack
from blockcell.layers import BaseLayer
from blockcell.optable import SCHEMES
from blockcell.quantization import quantize_matrix

F32 = np.float32
every_scheme = pytest.mark.parametrize("scheme", SCHEMES)
# I, H: nothing, less than a line, tails of lines, panels and blocks of 64 values of k; several panels for each thread
SIZES = [(0, 1), (3, 0), (1, 1), (5, 7), (16, 16), (0, 33), (70, 40), (33, 16), (130, 100), (64, 128)]
BATCHES = [*range(1, 14), 24, 40, 50, 100]  # what registers, tiles and groups of tiles take, and one more


def sizes_for(g):
    """Three of each."""
    return [(*SIZES[i], int(B)) for i, B in zip(g.permutation(len(SIZES))[:3], g.permutation(BATCHES)[:3], strict=True)]


@pytest.mark.meet(2)
@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("name", LAYERS)
def test_calls(name, level):
    g = rng("calls", name, "float16", level)
    for I, H, B in [*sizes_for(g), (70, 40, 1), (70, 40, 5)]:
        quantized = LAYERS[name](I, H, F32).quantize("float16")
        left = quantized.dequantize()
        for T in (1, int(g.integers(2, 9))):
            x, state, lengths, reset = draw(left, T, B)
            options = [{}, {"state": state}, {"state": state, "lengths": lengths, "reset": reset}, {"mask": ~reset}]
            for extras in options:
                threads = int(g.integers(1, 5))
                with on_threads(1):
                    expected = left(x, **extras)
                with on_threads(threads):
                    assert same(quantized(x, **extras), expected), (I, H, B, T, threads, extras.keys())
            turned = {"reset": reset.T, "masked": "repeat", "lengths": lengths, "batch_first": True}
            x = np.ascontiguousarray(x.swapaxes(0, 1))
            assert same(quantized(x, state, **turned), left(x, state, **turned)), (I, H, B, T)


def any_weights(g, scheme, shape):
    """Also a column of zeros, and zeros of either sign elsewhere."""
    w = numbers(g, scheme, shape)
    w[g.random(shape) < 0.1] *= F32(0)
    w[:, shape[1] // 2] *= F32(0)
    return w


@pytest.mark.meet(2)
@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("name", SINGLE)
def test_any_weights(name, level, tmp_path):
    """Subnormal numbers, huge ones and zeros of either sign: in a call, in a stream, in a pickle and in a file."""
    g, path = rng("any weights", name, "float16", level), tmp_path / "a.npz"
    for I, H in [(3, 5), (64, 16), (70, 33), (5, 64)]:
        layer = LAYERS[name](I, H, F32)
        matrices = {name: array for name, array in layer.weights.items() if array.ndim == 2}
        layer.set_weights(**{name: any_weights(g, "float16", array.shape) for name, array in matrices.items()})
        quantized = layer.quantize("float16")
        left = quantized.dequantize()
        quantized.save(path)
        assert same(Quantized.load(path).dequantize().weights, left.weights)
        for B in BATCHES:
            x, state, lengths, _ = draw(layer, 3, B)
            x[:, ::2] = np.exp2(np.floor(4 * x[:, ::2]))  # products that are exact
            expected = left(x, state, lengths=lengths)
            assert same(quantized(x, state, lengths=lengths), expected), (I, H, B)
            assert same(pickle.loads(pickle.dumps(quantized))(x, state, lengths=lengths), expected), (I, H, B)
            stream = quantized.stream(B)
            stream.state = state
            y, last = left(x, state)
            assert same(stream.run(x), y) and same(stream.state, last), (I, H, B)
            x[1, 0, 0], x[1, -1, -1] = np.inf, np.nan
            for result, exact in zip(leaves(quantized(x, state)), leaves(left(x, state)), strict=True):
                np.testing.assert_array_equal(result, exact, err_msg=f"{I}, {H}, {B}")  # any NaN will do


@every_scheme
def test_a_quantized_layer_keeps_its_weights(scheme):
    layer = LSTM.init(7, 33, seed=1)
    x = rng("keeps").standard_normal((6, 2, 7), F32)
    quantized = layer.quantize(scheme)
    expected, stream = quantized(x)[0], quantized.stream(2)
    layer.set_weights(w=layer.weights["w"] * F32(2))
    assert same(stream.run(x), expected) and same(quantized(x)[0], expected)
    copied = copy.deepcopy(stream)
    copied.reset()
    assert same(copied.run(x), expected)
    stream.reset()
    stream.refresh()
    assert same(stream.run(x), expected) and not same(layer.quantize(scheme)(x)[0], expected)
    assert copy.copy(quantized) is copy.deepcopy(quantized) is quantized  # which nothing changes


@pytest.mark.meet(2)
@pytest.mark.usefixtures("level")
@every_scheme
@pytest.mark.parametrize("name", LAYERS)
def test_pickles(name, scheme):
    for I, H in SIZES:
        layer = LAYERS[name](I, H, F32)
        quantized = layer.quantize(scheme)
        x, state, lengths, _ = draw(layer, 4, 3)
        data = pickle.dumps(quantized)
        again = pickle.loads(data)
        assert same(again(x, state, lengths=lengths), quantized(x, state, lengths=lengths))
        assert repr(again) == repr(quantized) and same(again.__reduce__()[1], quantized.__reduce__()[1])
    weights = sum(array.nbytes for array in layer.weights.values())
    assert len(data) < weights / (4 // SCHEMES[scheme].itemsize) * 1.2 + 5000


@every_scheme
def test_what_is_held(scheme):
    """No float32 matrix, and the codes that were made."""
    layer = LAYERS["stack"](33, 40, F32)
    quantized = layer.quantize(scheme)
    for prefix, cell in quantized._layer._leaves().items():
        weights = quantized._shared.weights[cell]
        assert all(array.ndim == 1 for array in weights.arrays.values())
        for name, matrix in cell._matrices(weights).items():
            assert same(matrix, quantize_matrix(layer.weights[prefix + name], scheme))


@pytest.mark.meet(2)
@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("side", SIDES)
@every_scheme
@pytest.mark.parametrize("name", [*CELLS, "dense alone"])
def test_guards(name, scheme, side):
    """Packed weights begin or end beside a protected page, and are not written."""
    for I, H in [(1, 1), (7, 19), (70, 33), (16, 48), (64, 64)]:
        layer = LAYERS[name](I, H, F32)
        quantized, model = layer.quantize(scheme), layer.quantize(scheme)
        [(cell, weights)] = quantized._shared.weights.items()
        start = -weights.packed.ctypes.data % 64  # scratch is aligned by what is beyond the panels' own size
        panels = weights.packed[start : start + weights.packed.size - 64]
        quantized._shared.weights = {cell: weights._replace(packed=guarded(panels, side))}
        for B in (1, 2, 5, 13):
            x = draw(layer, 2, B)[0]
            expected = model.dequantize()(x)[0] if scheme == "float16" else model(x)[0]
            assert same(quantized(x)[0], expected), (I, H, B)
            assert same(quantized.stream(B).run(x), expected), (I, H, B)


# -------------------------------------------------------------------------------------------------------- what is said
def test_repr():
    layer = LSTM.init(8, 16, seed=1)
    text = "<LSTM(input_size=8, hidden_size=16, dtype=float32), quantized to 'int8', nbytes="
    assert repr(layer.quantize("int8")).startswith(text)
    assert repr(layer.stream(2)) == f"<Stream of {layer!r}, batch=2>"
    for quantized in (layer.quantize("int8"), Stack([layer]).quantize("float16")):
        stream = quantized.stream(3)
        assert repr(stream) == f"<Stream of {quantized!r}, batch=3>" and stream.layer is quantized


def test_sizes():
    quantized = Stack([LSTM.init(5, 7), Dense.init(7, 3)]).quantize("int8")
    assert (quantized.input_size, quantized.hidden_size, quantized.output_size) == (5, 3, 3)
    assert quantized.dtype == F32 and isinstance(quantized, BaseLayer)


def test_no_streams():
    both = Bidirectional(GRU.init(2, 3), GRU.init(2, 3))
    for layer in (both, both.quantize("int8")):
        with pytest.raises(TypeError, match="backward begins at the last step"):
            layer.stream()
    with pytest.raises(TypeError, match="reverse=True"):
        LSTM.init(2, 3, reverse=True).quantize("int8").stream()
