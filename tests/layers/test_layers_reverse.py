"""Layers that run backwards alone."""

# ruff: noqa: E741 (I is the number of inputs, as everywhere)
from __future__ import annotations

import numpy as np
import pytest
from bits import same
from kernel_cases import DTYPES
from layer_cases import ATTRIBUTES, LAYERS, draw, reversed_cell
from refusals import refusal

import blockcell
from blockcell import GRU, LSTM, Bidirectional, Stack, convert
from onnx_export import export

KINDS = ["lstm", "lstm without peepholes", "lstm ifco", "gru", "gru reset after"]
T, B, I, H = 7, 5, 3, 6


def pair(kind, dtype="float32"):
    """Return a layer that runs forwards, and the same backwards."""
    forwards = LAYERS[kind](I, H, np.dtype(dtype), **(ATTRIBUTES if "lstm" in kind else {}))
    return forwards, reversed_cell(forwards)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_backward_half_of_a_bidirectional(kind, dtype):
    """With resets too. That a Bidirectional is right, test_layers.py and test_layers_ragged.py say."""
    forwards, backwards = pair(kind, dtype)
    x, state, lengths, reset = draw(forwards, T, B, kind)
    both = Bidirectional(forwards, forwards)
    y, (_, last), tape = both.forward(x, (state, state), lengths=lengths, reset=reset)
    alone, own_last, own_tape = backwards.forward(x, state, lengths=lengths, reset=reset)
    assert same((alone, own_last), (np.ascontiguousarray(y[:, :, H:]), last))
    d_y = np.random.default_rng(0).standard_normal((T, B, H)).astype(dtype)
    _, (_, d_first), grads = both.backward(tape, np.concatenate([0 * d_y, d_y], axis=2))
    _, own_d_first, own_grads = backwards.backward(own_tape, d_y)
    assert same(own_d_first, d_first)
    for name, grad in own_grads.items():
        np.testing.assert_array_equal(grad, grads[f"bw.{name}"])


def test_in_stacks():
    """Among others; in a stack that a Bidirectional runs backwards, it runs forwards."""
    forwards, backwards = pair("gru")
    after = GRU.init(H, 2, seed=0)
    x = draw(forwards, T, B)[0]
    lengths = [T, 2, 0, 4, 1]
    assert same(
        Stack([backwards, after])(x, lengths=lengths)[0], after(backwards(x, lengths=lengths)[0], lengths=lengths)[0]
    )
    y, _ = Bidirectional(Stack([forwards]), Stack([backwards]))(x, lengths=lengths)
    expected = forwards(x, lengths=lengths)[0]
    assert same(y, np.concatenate([expected, expected], axis=2))


def test_files_of_layers_that_run_forwards_are_as_they_were(tmp_path):
    assert GRU.init(2, 3, seed=0)._description() == {"type": "GRU"}
    path = tmp_path / "a.safetensors"
    GRU.init(2, 3, seed=0, reverse=True).save(path)
    path.write_bytes(path.read_bytes().replace(rb"\"reverse\": true", rb"\"reverse\": null"))
    with pytest.raises(ValueError, match="its GRU has reverse None; expected true, or nothing"):
        blockcell.load(path)


def test_refused():
    layer = LSTM.init(2, 3, seed=0, reverse=True)
    for candidate in (layer, Stack([layer, GRU.init(3, 1, seed=1)])):
        with pytest.raises(TypeError, match=r"LSTM.stream: the layer has reverse=True and so begins at the last step"):
            candidate.stream()
        with refusal("TypeError: has reverse=True and begins at the last step; it cannot be str"):
            export(candidate, None, streaming=True)
    for name in ("fw", "bw"):
        layers = {"fw": LSTM.init(2, 3, seed=0), "bw": LSTM.init(2, 3, seed=0), name: layer}
        with pytest.raises(ValueError, match=f"Bidirectional: {name} has reverse=True; expected False, as bw is run b"):
            Bidirectional(**layers)
    with pytest.raises(TypeError, match="GRU: reverse is 1; expected True or False"):
        GRU.init(2, 3, seed=0, reverse=1)
    for to in (convert.to_torch, convert.to_keras):
        with pytest.raises(convert.ConversionError, match=r"has reverse=True, .*, as weights do not tell it"):
            to(layer)
