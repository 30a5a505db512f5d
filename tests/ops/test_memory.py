"""What a call needs beside its inputs and results: packed weights, and at most one array of T x B x 4H."""

import platform

import numpy as np
import pytest
from cases import FUNCTIONS, arguments
from fresh import printed
from traced import peak

import blockcell
from blockcell import raw_ops

T, B, I, H = 40, 32, 96, 128  # noqa: E741
SEQUENCES = ["BlockLSTM", "BlockLSTMGrad", "block_gru", "block_gru_grad"]
BLOCK = 256  # rows (t, b) of a weight gradient whose inputs are packed at once


def sizes(nested):
    """Bytes of all arrays."""
    if isinstance(nested, np.ndarray):
        return nested.nbytes
    return sum(map(sizes, nested.values() if isinstance(nested, dict) else nested))


def beside_results(call):
    """The bytes that a call has allocated at its peak, beyond those of its results."""
    call()  # what is made once is made here
    results, most = peak(call)
    return most - sizes(results)


def allowed(itemsize, training):
    weights = (I + H + 1) * 4 * (H + 4) * itemsize
    gates = T * B * 4 * H * itemsize
    states = 4 * B * (H + 32) * itemsize
    packed_rows = BLOCK * (I + H + 1024) * itemsize if training else 0  # and lines of gate gradients for each thread
    return 1.02 * (weights + gates) + states + packed_rows + 50_000  # edges are padded; Python's own objects


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("name", SEQUENCES)
def test_sequences(name, dtype):
    args = arguments(name, {"T": T, "B": B, "I": I, "H": H}, dtype=np.dtype(dtype).type)
    training = name.lower().endswith("grad")
    limit = allowed(8 if dtype == "float64" else 4, training)
    used = beside_results(lambda: FUNCTIONS[name](**args))
    print(f"{name} {dtype}: {used / limit:.2f} of {limit / 1e6:.1f} MB")
    assert used <= limit


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", [blockcell.LSTM, blockcell.GRU])
def test_layers(kind, dtype):
    layer = kind.init(I, H, seed=0, dtype=dtype)
    x, d_y = np.ones((T, B, I), dtype), np.ones((T, B, H), dtype)
    itemsize = np.dtype(dtype).itemsize
    weights = sizes(layer.weights)
    # Inference has its weights packed already, and keeps the input products of few steps.
    assert beside_results(lambda: layer(x)) <= allowed(itemsize, False) - weights
    tape = layer.forward(x)[2]
    assert beside_results(lambda: layer.backward(tape, d_y)) <= allowed(itemsize, True)


def begins_a_line(array):
    return array.ctypes.data % 64 == 0


def test_large_results_begin_a_cache_line():
    """So that no line belongs to two rows' threads; also where arguments take the long way."""
    args = arguments("BlockLSTM", {"T": T, "B": B, "I": I, "H": H})
    for x in (args["x"], args["x"][::-1]):
        assert all(map(begins_a_line, raw_ops.BlockLSTM(**args | {"x": x})))
    layer = blockcell.LSTM.init(I, H, seed=0)
    y, _, tape = layer.forward(args["x"].astype(np.float32))
    d_x, _, grads = layer.backward(tape, y)
    assert all(map(begins_a_line, (layer(args["x"].astype(np.float32))[0], y, d_x, grads["w"])))


PAGES = """
import resource
import numpy as np
import blockcell

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

layer = blockcell.LSTM.init(40, 40, seed=0)
x = np.ones((20, 256, 40), np.float32)
for _ in range(3):
    layer.backward(layer.forward(x)[2], x)
before = faults()
for _ in range(10):
    layer.backward(layer.forward(x)[2], x)
print((faults() - before) / 10)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators have other rules")
def test_calls_do_not_map_their_memory_anew():
    """11 MB pass through each of these calls, 2700 pages."""
    pages = float(printed(PAGES))
    print(pages)
    assert pages < 200
