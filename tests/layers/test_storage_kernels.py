"""Streams and `Packed` layers with weights in fewer bytes: the bits of the float32 layer with the weights as stored."""

# ruff: noqa: E741 (I is the number of inputs, as everywhere)
from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from bits import leaves, like, on_threads, same
from cases import rng
from guarded import SIDES, guarded
from layer_cases import CELLS, LAYERS, SINGLE, dense, draw, gru, lstm, reset_after
from storage_cases import numbers

from blockcell import GRU, LSTM, Bidirectional, Dense, Stack, _kernels, load
from blockcell._cpu import CACHES
from blockcell.layers import base
from blockcell.layers.shared import CellWeights, SharedWeights
from blockcell.layers.storage import keeps_widened, narrowed, widened, widens
from blockcell.optable import WEIGHT_STORAGES

F32 = np.float32
FLOATS = range(1, 1 + len(WEIGHT_STORAGES))  # numbers of storages
STREAMED = {name: LAYERS[name] for name in SINGLE} | {
    "stack": lambda I, H, dtype: Stack(
        [
            dense(I, H, dtype, "tanh"),
            Stack([lstm(H, H + 2, dtype), reset_after(H + 2, H, dtype)]),
            gru(H, 9, dtype),
            dense(9, 3, dtype, "softmax", last=True),
        ]
    )
}


@pytest.fixture(autouse=True)
def any_way(request, monkeypatch):
    """Weights are kept widened, or widened by a call, or read as they are stored, whatever their sizes are."""
    g = rng("ways", request.node.name)
    monkeypatch.setattr(base, "keeps_widened", lambda number, *_: number in FLOATS and g.random() < 0.25)
    monkeypatch.setattr(base, "widens", lambda number, *_: number in FLOATS and g.random() < 0.5)
    return monkeypatch


def always(monkeypatch, keeps, widens):
    monkeypatch.setattr(base, "keeps_widened", lambda number, *_: number in FLOATS and keeps)
    monkeypatch.setattr(base, "widens", lambda number, *_: number in FLOATS and widens)


every_storage = pytest.mark.parametrize("storage", WEIGHT_STORAGES)
# I, H: nothing, less than a line, tails of lines, panels and blocks of 64 values of k; several panels for each thread
SIZES = [(0, 1), (3, 0), (1, 1), (5, 7), (16, 16), (0, 33), (70, 40), (33, 16), (130, 100), (64, 128)]
BATCHES = [*range(1, 14), 24, 40, 50, 100]  # what registers, tiles and groups of tiles take, and one more


def sizes_for(g):
    """Three of each."""
    return [(*SIZES[i], int(B)) for i, B in zip(g.permutation(len(SIZES))[:3], g.permutation(BATCHES)[:3], strict=True)]


@pytest.mark.meet(2)
@pytest.mark.usefixtures("level")
@every_storage
@pytest.mark.parametrize("name", LAYERS)
def test_calls(name, storage, level):
    g = rng("calls", name, storage, level)
    for I, H, B in [*sizes_for(g), (70, 40, 1), (70, 40, 5)]:
        layer = LAYERS[name](I, H, F32)
        rounded, packed = layer.rounded_to(storage), layer.packed(storage)
        for T in (1, int(g.integers(2, 9))):
            x, state, lengths, reset = draw(layer, T, B)
            options = [{}, {"state": state}, {"state": state, "lengths": lengths, "reset": reset}, {"mask": ~reset}]
            for given in options:
                threads = int(g.integers(1, 5))
                with on_threads(1):
                    expected = rounded(x, **given)
                with on_threads(threads):
                    assert same(packed(x, **given), expected), (I, H, B, T, threads, given.keys())
            turned = {"reset": reset.T, "masked": "repeat", "lengths": lengths, "batch_first": True}
            x = np.ascontiguousarray(x.swapaxes(0, 1))
            assert same(packed(x, state, **turned), rounded(x, state, **turned)), (I, H, B, T)


@pytest.mark.meet(2)
@pytest.mark.usefixtures("level")
@every_storage
@pytest.mark.parametrize("name", STREAMED)
def test_streams(name, storage, level):
    """Whatever is done with a stream; the model is a stream of the rounded layer."""
    g = rng("streams", name, storage, level)
    for I, H, B in sizes_for(g):
        layer = STREAMED[name](I, H, F32)
        streams = [layer.stream(B, storage), layer.packed(storage).stream(B), layer.rounded_to(storage).stream(B)]
        for k in range(12):
            what = ["step", "run", "reset", "state", "pickle", "weights"][k] if k < 6 else "step"
            with on_threads(int(g.integers(1, 5))):
                if what in ("step", "run"):
                    x = g.standard_normal((*[int(g.integers(0, 9))] * (what == "run"), B, I), F32)
                    y, *others = (getattr(stream, what)(x) for stream in streams)
                    assert all(same(y, other) for other in others), (I, H, B, k)
                elif what == "reset":
                    for stream in streams:
                        stream.reset(np.arange(B) % 2 == 0)
                elif what == "state":
                    state = like(streams[0].state, lambda a: g.standard_normal(a.shape, F32))
                    for stream in streams:
                        stream.state = state
                elif what == "pickle":
                    streams = [pickle.loads(pickle.dumps(stream)) for stream in streams]
                    assert [stream.storage for stream in streams] == [storage, storage, None]
                else:  # of which the stream of a Packed sees nothing
                    layer = streams[0].layer
                    layer.set_weights(**{name: array * F32(1.5) for name, array in layer.weights.items()})
                    state = streams[0].state
                    before = layer.rounded_to(storage)
                    streams[0].refresh()
                    streams[1:] = [layer.packed(storage).stream(B), before.stream(B)]
                    for stream in streams:
                        stream.state = state
            assert same(streams[0].state, streams[1].state) and same(streams[0].state, streams[2].state)


def any_weights(g, storage, shape):
    """Also a column of zeros, and zeros of either sign elsewhere."""
    w = numbers(g, storage, shape)
    w[g.random(shape) < 0.1] *= F32(0)
    w[:, shape[1] // 2] *= F32(0)
    return w


@pytest.mark.meet(2)
@pytest.mark.usefixtures("level")
@every_storage
@pytest.mark.parametrize("name", SINGLE)
def test_any_weights(name, storage, level, tmp_path):
    """Subnormal numbers, huge ones and zeros of either sign: packed, in a stream, in a pickle and in a file."""
    g, path = rng("any weights", name, storage, level), tmp_path / "a.npz"
    for I, H in [(3, 5), (64, 16), (70, 33), (5, 64)]:
        layer = LAYERS[name](I, H, F32)
        matrices = {name: array for name, array in layer.weights.items() if array.ndim == 2}
        layer.set_weights(**{name: any_weights(g, storage, array.shape) for name, array in matrices.items()})
        rounded, packed = layer.rounded_to(storage), layer.packed(storage)
        layer.save(path, storage)
        assert same(load(path).weights, rounded.weights)
        for B in BATCHES:
            x, state, lengths, _ = draw(layer, 3, B)
            x[:, ::2] = np.exp2(np.floor(4 * x[:, ::2]))  # products that are exact
            expected = rounded(x, state, lengths=lengths)
            assert same(packed(x, state, lengths=lengths), expected), (I, H, B)
            assert same(pickle.loads(pickle.dumps(packed))(x, state, lengths=lengths), expected), (I, H, B)
            stream = layer.stream(B, storage)
            stream.state = state
            y, last = rounded(x, state)
            assert same(stream.run(x), y) and same(stream.state, last), (I, H, B)
            x[1, 0, 0], x[1, -1, -1] = np.inf, np.nan
            for found, wanted in zip(leaves(packed(x, state)), leaves(rounded(x, state)), strict=True):
                np.testing.assert_array_equal(found, wanted, err_msg=f"{I}, {H}, {B}")  # any NaN will do


@pytest.mark.usefixtures("level")
@every_storage
def test_each_weight_is_what_is_stored(storage, level):
    """By a product with each unit vector."""
    g = rng("each weight", storage, level)
    for I, H in [(3, 5), (70, 16), (64, 33), (130, 64)]:
        w = any_weights(g, storage, (I, H))
        packed = Dense(w, np.zeros(H, F32)).packed(storage)
        for step in (1, 2, 7, I):  # rows at once
            x = np.eye(I, dtype=F32)
            y = np.concatenate([packed(x[None, k : k + step])[0][0] for k in range(0, I, step)])
            assert same(y, widened(narrowed(w, storage)) + F32(0)), (I, H, step)  # the sum has no negative zero


@every_storage
def test_a_stream_keeps_its_weights(storage):
    layer = LSTM.init(7, 33, seed=1)
    x = rng("keeps").standard_normal((6, 2, 7), F32)
    expected = layer.rounded_to(storage)(x)[0]
    stream, packed = layer.stream(2, storage), layer.packed(storage)
    layer.set_weights(w=layer.weights["w"] * F32(2))
    assert same(stream.run(x), expected) and same(packed(x)[0], expected) and same(packed.stream(2).run(x), expected)
    copied = copy.deepcopy(stream)
    copied.reset()
    assert same(copied.run(x), expected)
    stream.reset()
    stream.refresh()
    assert same(stream.run(x), layer.rounded_to(storage)(x)[0])


@pytest.mark.meet(2)
@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("storage", [None, *WEIGHT_STORAGES])
@pytest.mark.parametrize("name", LAYERS)
def test_pickles(name, storage, any_way):
    for I, H in SIZES:
        always(any_way, keeps=I % 2 == 0, widens=H % 2 == 0)  # a pickle is read as its layer was made
        layer = LAYERS[name](I, H, F32)
        packed = layer.packed(storage)
        x, state, lengths, _ = draw(layer, 4, 3)
        data = pickle.dumps(packed)
        again = pickle.loads(data)
        assert same(again(x, state, lengths=lengths), packed(x, state, lengths=lengths))
        assert repr(again) == repr(packed) and same(again.__reduce__()[1], packed.__reduce__()[1])
    weights = sum(array.nbytes for array in layer.weights.values())
    parts = 2 if storage is None else 4 // WEIGHT_STORAGES[storage].itemsize
    assert storage is None or len(data) < weights / parts * 1.2 + 5000


@every_storage
def test_what_is_stored(storage):
    """A Packed layer has no float32 matrix, and what it has is what was stored."""
    layer = LAYERS["stack"](33, 40, F32)
    packed, rounded = layer.packed(storage), layer.rounded_to(storage).weights
    for prefix, cell in packed._layer._cells().items():
        weights = packed._layer._shared.weights[cell]
        assert all(array.ndim == 1 for array in weights.arrays.values())
        for name, narrow in cell._matrices(weights.stored or weights).items():
            assert np.array_equal(widened(narrow), rounded[prefix + name])


@every_storage
@pytest.mark.parametrize("name", SINGLE)
def test_bytes(name, storage, any_way):
    """Of what a step reads: a half or a quarter, and biases, scales and padding of lines; also what is kept widened."""
    always(any_way, keeps=False, widens=False)
    layer = LAYERS[name](256, 256, F32)
    matrices = sum(array.nbytes for array in layer.weights.values() if array.ndim == 2)
    full, packed = layer.packed(), layer.packed(storage)
    always(any_way, keeps=True, widens=False)
    assert layer.packed(storage).nbytes == packed.nbytes + full.nbytes
    assert matrices <= full.nbytes < 1.02 * matrices
    part = WEIGHT_STORAGES[storage].itemsize / 4
    assert part * matrices <= packed.nbytes < (part + 0.02) * matrices


@pytest.mark.usefixtures("level")
def test_several_threads_call_one():
    layer = LAYERS["stack with dense"](40, 48, F32)
    x, state, lengths, reset = draw(layer, 7, 5)
    for storage in WEIGHT_STORAGES:
        packed = layer.packed(storage)
        calls = [partial(packed, x), partial(packed, x, state, lengths=lengths, reset=reset), partial(packed, x[:, :1])]
        expected = [call() for call in calls]
        with ThreadPoolExecutor(4) as pool:
            found = [pool.submit(calls[k % 3]) for k in range(60)]
            assert all(same(each.result(), expected[k % 3]) for k, each in enumerate(found))


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("side", SIDES)
@every_storage
@pytest.mark.parametrize("name", [*CELLS, "dense alone"])
def test_guards(name, storage, side, any_way):
    """Panels that begin or end beside a protected page, and are not written; also those that are made of them."""
    always(any_way, keeps=False, widens=False)
    for I, H in [(1, 1), (7, 19), (70, 33), (16, 48), (64, 64)]:
        layer = LAYERS[name](I, H, F32)
        packed, rounded = layer.packed(storage), layer.rounded_to(storage)
        [(cell, weights)] = packed._layer._shared.weights.items()
        start = -weights.packed.ctypes.data % 64  # scratch is aligned by what is beyond the panels' own size
        panels = weights.packed[start : start + weights.packed.size - 64]
        packed._layer._shared.weights = {cell: weights._replace(packed=guarded(panels, side))}
        for B in (1, 2, 5, 13):
            x = draw(layer, 2, B)[0]
            for widening in (False, True):
                always(any_way, keeps=False, widens=widening)
                assert same(packed(x), rounded(x)), (I, H, B)
                assert same(packed.stream(B).run(x), rounded(x)[0]), (I, H, B)
        [full] = rounded._shared.weights.values()
        wide = guarded(np.empty(full.packed.size // 64 * 64 - 64, np.uint8), side, writable=True)
        for threads in (1, 3):
            wide[...] = 0xFF
            codes = packed._layer._shared.weights[cell].packed
            arguments = I, H, *cell._form, codes, wide, weights.narrow
            _kernels.compute(f"{cell._kernel}_widen", cell._number, (1, 1, I, H, 4), threads, arguments)
            layer._share(SharedWeights({layer: CellWeights(weights.arrays, wide)}))
            assert same(layer(x), rounded(x)), (I, H, threads)


# ------------------------------------------------------------------------------------------------------------ the rule
NEAR, FAR = 100_000, 10_000_000  # bytes: more than the second-level cache, more than half the third


@pytest.fixture
def small_caches(monkeypatch):
    monkeypatch.setitem(CACHES, "L2", 50_000)
    monkeypatch.setitem(CACHES, "L3", 2_000_000)
    monkeypatch.setattr(base, "keeps_widened", keeps_widened)
    monkeypatch.setattr(base, "widens", widens)


@pytest.mark.usefixtures("small_caches")
def test_what_is_kept_widened():
    for number in FLOATS:
        assert keeps_widened(number, 50_000) and keeps_widened(number, 50_000, 1)
        assert not keeps_widened(number, NEAR) and not keeps_widened(number, NEAR, 1)
        assert keeps_widened(number, NEAR, 3) and not keeps_widened(number, FAR, 8) and keeps_widened(number, FAR, 9)
    assert not any(keeps_widened(number, 1, 100) for number in (0, *range(4, 6)))  # float32; products in integers


@pytest.mark.usefixtures("small_caches")
@every_storage
@pytest.mark.parametrize("packs", [False, True])
def test_a_few_rows_of_a_stream_read_fewer_bytes(storage, packs, monkeypatch):
    """As in a stream of so few: what all rows read was widened, and what it was widened from is kept."""
    layer = LSTM.init(90, 80, seed=0)
    layer = layer.packed(storage) if packs else layer
    stream = layer.stream(5) if packs else layer.stream(5, storage)
    cell = layer._layer if packs else layer
    read, plan = [], cell._plan
    monkeypatch.setattr(cell, "_plan", lambda name, narrow, *rest: read.append(narrow) or plan(name, narrow, *rest))
    for n in range(1, 6):
        stream.step(np.zeros((n, 90), F32), rows=range(n))
    number = 1 + [*WEIGHT_STORAGES].index(storage)
    assert read == [number if n <= (1 if storage == "int8" else 2) else 0 for n in range(1, 6)]


@pytest.mark.usefixtures("small_caches")
def test_what_a_call_widens():
    for number in FLOATS:
        assert widens(number, NEAR, 100, 2) and widens(number, NEAR, 3, 13) and widens(number, NEAR, 1, 145)
        assert not widens(number, NEAR, 100, 1) and not widens(number, NEAR, 1, 12) and not widens(number, NEAR, 2, 13)
        assert not widens(number, FAR, 100, 12) and not widens(number, FAR, 9, 13) and widens(number, FAR, 10, 13)
    assert not any(widens(number, 1, 1000, 1000) for number in (0, *range(4, 6)))


@pytest.mark.usefixtures("level", "small_caches")
@every_storage
@pytest.mark.parametrize("name", CELLS)
def test_both_sides_of_the_rule(name, storage):
    """Calls one after the other, of one layer and one stream, that read weights in several ways."""
    layer = LAYERS[name](90, 80, F32)
    rounded, packed = layer.rounded_to(storage), layer.packed(storage)
    assert [weights.narrow for weights in packed._layer._shared.weights.values()] != [0]
    g = rng("rule", name, storage)
    for k in g.permutation(14):
        T, B = [(1, 1), (9, 1), (1, 2), (9, 2), (40, 2), (1, 12), (2, 13), (3, 13), (1, 49), (3, 49)][k % 10]
        x, state, lengths, reset = draw(layer, T, B)
        with on_threads(int(g.integers(1, 4))):
            assert same(packed(x, state, lengths=lengths, reset=reset), rounded(x, state, lengths=lengths, reset=reset))
            assert same(packed.stream(B).run(x), rounded(x)[0]), (T, B)


# -------------------------------------------------------------------------------------------------------- what is said
def test_repr(any_way):
    layer = LSTM.init(8, 16, seed=1)
    always(any_way, keeps=False, widens=False)
    said = "<LSTM(input_size=8, hidden_size=16, dtype=float32), packed, storage='int8', nbytes="
    assert repr(layer.packed("int8")).startswith(said)
    assert repr(layer.stream(2, "int8")) == f"<Stream of {layer!r}, batch=2, storage='int8'>"
    assert repr(layer.stream(2)) == f"<Stream of {layer!r}, batch=2>"
    packed = Stack([layer]).packed("float16")
    assert repr(packed.stream(3)) == f"<Stream of {packed!r}, batch=3>" and packed.stream(3).layer is packed
    stream = Stack([layer]).stream(3, "float16")
    assert repr(stream) == f"<Stream of {Stack([layer])!r}, batch=3, storage='float16'>"


@pytest.mark.parametrize(
    ("storage", "error", "message"),
    [
        ("int4", ValueError, "storage is 'int4'; expected one of 'float16', 'bfloat16', 'int8'"),
        (np.float16, TypeError, "storage is .*; expected one of 'float16', 'bfloat16', 'int8'"),
        (True, TypeError, "storage is True; expected one of"),
    ],
)
@pytest.mark.parametrize("kind", [LSTM, GRU, Dense])
def test_unknown_storage(kind, storage, error, message):
    layer = kind.init(3, 4)
    for of, what in ((layer, kind.__name__), (Stack([layer]), "Stack")):
        with pytest.raises(error, match=rf"{what}\.packed: {message}"):
            of.packed(storage)
    with pytest.raises(error, match=rf"{kind.__name__}\.stream: {message}"):
        layer.stream(1, storage)


@pytest.mark.parametrize("dtype", [np.float64, np.float16])
def test_other_dtypes(dtype):
    layer = LAYERS["stack with dense"](5, 7, dtype)
    with pytest.raises(ValueError, match=r"Stack\.packed: storage is 'int8' and the layer's dtype float.*float32"):
        layer.packed("int8")
    x, state, lengths, reset = draw(layer, 4, 3)
    packed = layer.packed()
    assert packed.storage is None and packed.dtype == dtype
    assert same(packed(x, state, lengths=lengths, reset=reset), layer(x, state, lengths=lengths, reset=reset))
    assert (packed.input_size, packed.hidden_size, packed.output_size) == (5, 7, 7)


def test_weights_that_cannot_be_stored():
    layer = Stack([dense(3, 5, F32), lstm(5, 4, F32)])
    stream, x = layer.stream(2, "float16"), rng("refused").standard_normal((3, 2, 3), F32)
    expected = layer.rounded_to("float16")(x)[0]
    w = layer.weights["1.w"].copy()
    w[2, 3] = 77777
    layer.set_weights(**{"0.w": layer.weights["0.w"] * F32(2), "1.w": w})
    with pytest.raises(ValueError, match=r"Stack\.packed: 1\.w\[2, 3\] is 77777\.0"):
        layer.packed("float16")
    with pytest.raises(ValueError, match=r"LSTM\.stream: w\[2, 3\] is 77777\.0"):
        stream.refresh()
    assert same(stream.run(x), expected)  # the stream stays as it was, with all of its layers
    layer.set_weights(**{"1.w": w / F32(2)})
    stream.refresh()
    stream.reset()
    assert same(stream.run(x), layer.rounded_to("float16")(x)[0])


def test_no_streams():
    both = Bidirectional(GRU.init(2, 3), GRU.init(2, 3))
    for layer in (both, both.packed("int8")):
        with pytest.raises(TypeError, match="backward begins at the last step"):
            layer.stream()
    with pytest.raises(TypeError, match="reverse=True"):
        LSTM.init(2, 3, reverse=True).packed("int8").stream()
