"""The kernels that take weights as PyTorch has them, beside the layers: the same bits in everything that they return.

Weights, states, sizes, the layout in memory, lengths, directions, threads and what is asked for are drawn at random.
"""

import itertools
import sys

import numpy as np
import pytest
from bits import on_threads, same
from torch_layout import SAVED, STATES, Lent, backward, forward, lent, pass_of, weights_of

from blockcell import GRU, LSTM, RNN
from blockcell._layers import step_mask_of


def move_in_memory(g, array):
    """Return the same values, with the rows of the first two axes somewhere else in memory."""
    T, B, size = array.shape
    place = g.integers(3)
    if place == 0:
        return array.copy()
    if place == 1:  # batch_first
        return array.transpose(1, 0, 2).copy().transpose(1, 0, 2)
    wider_array = np.full((T, B, size + int(g.integers(1, 20))), np.nan, array.dtype)  # a part of the columns
    at = int(g.integers(wider_array.shape[2] - size + 1))
    wider_array[..., at : at + size] = array
    return wider_array[..., at : at + size]


def seldom_reorder(g, array):
    """Return the same values, seldom in another order in memory."""
    return array if g.random() < 0.9 else np.asfortranarray(array)


def random_sizes(g):
    """Draw T, B, I, H: single steps with few and many rows, of few and many weights; sequences."""
    single = g.random() < 0.4
    T = 1 if single else int(g.integers(2, 40))
    B = int(g.choice([1, 2, 3, 5, 16, 17, 40, 130] if single else [1, 2, 3, 4, 7, 16, 33]))
    inputs, hidden = (int(g.integers(1, top)) for top in ((300, 300) if B < 40 and g.random() < 0.3 else (70, 70)))
    return T, B, 0 if g.random() < 0.03 else inputs, hidden


@pytest.mark.meet(2)
@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("kind", ["lstm", "gru", "rnn"])
def test_equals_the_layer(kind, dtype, seed):
    dtype = np.dtype(dtype)
    for k in range(80):
        g = np.random.default_rng([seed, k])
        T, B, inputs, hidden = sizes = random_sizes(g)
        training, threads, D = g.random() < 0.8, int(g.integers(1, 4)), int(g.integers(1, 3))
        bias, zero = g.random() < 0.9, g.random() < 0.2
        projection = int(g.integers(1, hidden + 1)) if kind == "lstm" and g.random() < 0.3 else 0
        where = f"configuration {k}: {sizes=}, {projection=}, {D=}, {bias=}, {zero=}, {threads=}"
        layer_of, options = {
            "lstm": (LSTM, {"gate_order": "ifco"}),
            "gru": (GRU, {"reset_after": True}),
            "rnn": (RNN, {}),
        }[kind]
        each = [weights_of(g, kind, inputs, hidden, dtype, bias, projection) for _ in range(D)]
        weights, n = [array for given, _ in each for array in given], len(STATES[kind])
        layers = [layer_of(**named, reverse=d == 1, **options) for d, (_, named) in enumerate(each)]
        P = projection or hidden
        x, d_y = (g.standard_normal((T, B, size)).astype(dtype) for size in (inputs, D * P))
        states, d_last = ([g.uniform(-1, 1, (D, B, size)).astype(dtype) for size in (P, hidden)[:n]] for _ in range(2))
        if zero:
            states = [np.zeros_like(state) for state in states]
        lengths = g.integers(0, T + 1, B) if g.random() < 0.4 else None
        reset = g.random((T, B)) < 0.2 if D == 1 and g.random() < 0.4 else None
        reset_states = [g.uniform(-1, 1, (T, B, size)).astype(dtype) for size in (P, hidden)[:n]]
        if reset is None or g.random() < 0.2:
            reset_states = []
        if lengths is None and reset is None:
            step_mask = None
        else:
            step_mask = np.stack([step_mask_of(T, B, lengths, reset, reverse) for reverse in (0, 1)])

        x, y, last = move_in_memory(g, x), np.empty((T, B, D * P), dtype), [np.empty_like(state) for state in states]
        tape = np.empty((D, SAVED[kind], T, B, hidden), dtype)
        kept = [tape, np.empty_like(y)][: int(g.integers(1, 3))] if training else []
        first, given = [seldom_reorder(g, array) for array in states], [seldom_reorder(g, array) for array in weights]
        options = D, projection, [move_in_memory(g, array) for array in reset_states]
        forward(kind, sizes, threads, x, given, [] if zero else first, step_mask, [y, *last, *kept], *options)
        assert len(kept) < 2 or same(kept[1], y), where
        wants_x, wants_weights = g.random() < 0.7, g.random() < 0.7
        missing = g.random(1 + n) < 0.1  # gradients that are zero, which callers leave out
        for array, is_missing in zip((d_y, *d_last), missing, strict=True):
            if is_missing:
                array[...] = 0
        incoming = [
            None if none else array for none, array in zip(missing, (move_in_memory(g, d_y), *d_last), strict=True)
        ]
        shapes = [x.shape] * wants_x + [array.shape for array in given] * wants_weights
        results = [np.full(shape, np.nan, dtype) for shape in shapes]
        d_first = [] if zero else [np.full_like(state, np.nan) for state in states]
        d_reset_states = [np.full_like(state, np.nan) for state in reset_states] if g.random() < 0.7 else []
        if training:
            of = x if wants_weights else None, [] if zero else first, step_mask
            matrices = [array for k, array in enumerate(given) if array.ndim == 2]
            outputs = [*results, *d_first, *d_reset_states]
            backward(
                kind, sizes, threads, y, tape, matrices, incoming, *of, wants_x, outputs, *options, d_reset_states != []
            )
        d_x = None
        for d, layer in enumerate(layers):
            state, d_state = ([array[d] for array in arrays[::-1]] for arrays in (states, d_last))
            at = slice(d * P, (d + 1) * P)
            with on_threads(int(g.integers(1, 4))):
                masks = {"lengths": lengths, "reset": reset, "reset_state": tuple(reset_states[::-1]) or None}
                expected_y, expected_last, layer_tape = layer.forward(x, tuple(state), **masks)
                expected_d_x, expected_d_first, grads, expected_d_reset = layer.backward(
                    layer_tape, d_y[:, :, at], tuple(d_state), return_d_reset_state=True
                )
            found_last = [array[d] for array in last[::-1]]
            pairs_of_forward = zip((y[:, :, at], *found_last), (expected_y, *expected_last), strict=True)
            for found, wanted in pairs_of_forward:
                assert same(np.ascontiguousarray(found), np.ascontiguousarray(wanted)), where
            if not training:
                continue
            d_x = expected_d_x if d_x is None else d_x + expected_d_x
            pairs = {}
            if d_reset_states:
                resets = d_reset_states[::-1], expected_d_reset
                pairs |= {f"d_reset {number}": both for number, both in enumerate(zip(*resets, strict=True))}
            if not zero:
                firsts = [array[d] for array in d_first[::-1]], expected_d_first
                pairs |= {f"d_first {number}": both for number, both in enumerate(zip(*firsts, strict=True))}
            if wants_weights:
                each_of = results[wants_x:][d * len(given) // D : (d + 1) * len(given) // D]
                w = grads["w"] if kind != "gru" else np.concatenate([grads["w_ru"], grads["w_c"]], axis=1)
                if projection:
                    pairs["d_w_hr"] = each_of[-1], grads["w_p"].T
                pairs |= {"d_w_ih": (each_of[0], w[:inputs].T), "d_w_hh": (each_of[1], w[inputs:].T)}
                if bias:
                    b = [grads.get("b")] * 2
                    if kind == "gru":
                        b = [np.concatenate([grads["b_ru"], grads[name]]) for name in ("b_c", "b_hc")]
                    pairs |= {"d_b_ih": (each_of[2], b[0]), "d_b_hh": (each_of[3], b[1])}
            for name, (found, wanted) in pairs.items():
                assert same(found, wanted), f"{where}: {name}"
        if training and wants_x and (D == 1 or dtype != np.float16):  # of float16 the sum is not that of rounded ones
            assert same(results[0], d_x), where


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("kind", ["lstm", "projected lstm", "gru", "rnn"])
def test_single_steps(kind, dtype, seed):
    """Which have no y beside the state h; with rows for several threads, some of which have ended, and few rows."""
    dtype, projection = np.dtype(dtype), 33 if kind == "projected lstm" else 0
    layer_of, options = {
        "lstm": (LSTM, {"gate_order": "ifco"}),
        "gru": (GRU, {"reset_after": True}),
        "rnn": (RNN, {}),
    }[kind := kind.removeprefix("projected ")]
    for k, (B, threads) in enumerate(itertools.product((1, 7, 201), (1, 2, 3))):
        g = np.random.default_rng([seed, k])
        T, B, inputs, hidden = sizes = 1, B, 40, 70
        given, named = weights_of(g, kind, inputs, hidden, dtype, projection=projection)
        x = g.standard_normal((B, inputs)).astype(dtype)
        widths = (projection or hidden, hidden)[: len(STATES[kind])]
        states = [g.uniform(-1, 1, (B, width)).astype(dtype) for width in widths]
        last, tape = [np.empty_like(state) for state in states], np.empty((1, SAVED[kind], T, B, hidden), dtype)
        compute = pass_of(kind, sizes, dtype, threads=threads, projection=projection, single=True)
        for lengths in (None, np.append(g.integers(0, 2, B - 1), 1)):
            step_mask = None if lengths is None else np.stack([step_mask_of(T, B, lengths, None, False)] * 2)
            compute(*map(lent, (x, given, states, step_mask, [*last, tape])))
            _, expected, of_layer = layer_of(**named, **options).forward(x[None], tuple(states[::-1]), lengths=lengths)
            assert same(last[::-1], [*expected]), (k, lengths)
            assert same(tape[0], of_layer.content.saved), (k, lengths)


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("kind", ["lstm", "projected lstm", "gru", "rnn"])
def test_any_step_mask(kind, seed):
    """Rows end and start anew: y and the last states are those without the steps past the end."""
    hidden, inputs, projection = 40, 24, 33 if kind == "projected lstm" else 0
    kind, widths = kind.removeprefix("projected "), (projection or hidden, hidden)
    for k in range(10):
        g = np.random.default_rng([seed, k])
        T, B = int(g.integers(1, 30)), int(g.integers(1, 20))
        weights = weights_of(g, kind, inputs, hidden, np.float64, projection=projection)[0]
        step_mask = g.choice([0, 2, 4], (T, B), p=[0.8, 0.1, 0.1]).astype(np.uint8)
        step_mask[np.arange(T)[:, None] >= g.integers(0, T + 1, B)] = 1
        x = g.standard_normal((T, B, inputs))
        states = [g.uniform(-1, 1, (1, B, width)) for width in widths[: len(STATES[kind])]]

        def run_pass(x, states, step_mask, threads, weights=weights):
            y = np.full((*step_mask.shape, widths[0]), np.nan)
            outputs = [y, *(np.full_like(state, np.nan) for state in states)]
            sizes = *x.shape, hidden
            forward(kind, sizes, threads, x, weights, states, np.stack([step_mask] * 2), outputs, 1, projection)
            return outputs

        y, *last = run_pass(x, states, step_mask, 1 + k % 3)
        for b in range(B):
            row, counted = slice(b, b + 1), step_mask[:, b] != 1
            first = [state[:, row].copy() for state in states]
            y_alone, *last_alone = run_pass(x[counted, row], first, np.ascontiguousarray(step_mask[counted, row]), 1)
            assert same(y[counted, row], y_alone) and not y[~counted, row].any(), (k, b)
            assert same([state[:, row].copy() for state in last], last_alone), (k, b)


class Resizable(Lent):
    """A tensor whose storage may be resized until `numpy` is called; it may be that of another tensor."""

    is_cpu, device = True, "cpu"

    def __init__(self, array, storage=None):
        super().__init__(array)
        self.storage, self.held = storage or self, False

    def untyped_storage(self):
        return self.storage

    def resizable(self):
        return not self.held

    def numpy(self, force=False):
        self.held = True


def small_pass(kind="gru", D=2):
    """Return the pass of a layer, its arguments and its outputs."""
    g, dtype = np.random.default_rng(0), np.dtype(np.float32)
    T, B, inputs, hidden = sizes = 3, 2, 4, 5
    arrays = [array for _ in range(D) for array in weights_of(g, kind, inputs, hidden, dtype)[0]]
    states = [Resizable(np.zeros((D, B, hidden), dtype)) for _ in STATES[kind]]
    outputs = [Lent(np.full(shape, np.nan, dtype)) for shape in [(T, B, D * hidden)] + len(states) * [(D, B, hidden)]]
    x, step_mask = g.standard_normal((T, B, inputs)).astype(dtype), np.zeros((2, T, B), np.uint8)
    arguments = Resizable(x), [*map(Resizable, arrays)], states, Resizable(step_mask)
    return pass_of(kind, sizes, dtype, D), arguments, outputs


def replaceable_tensors(arguments):
    """Yield every tensor, and a function that puts another one in its place among the arguments."""
    for k, value in enumerate(arguments):
        if not isinstance(value, list):
            yield value, lambda other, k=k: (*arguments[:k], other, *arguments[k + 1 :])
            continue
        for j, tensor in enumerate(value):
            yield (
                tensor,
                lambda other, k=k, j=j, value=value: (
                    *arguments[:k],
                    [*value[:j], other, *value[j + 1 :]],
                    *arguments[k + 1 :],
                ),
            )


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_what_is_refused(kind):
    """Shapes, dtypes and numbers of tensors that differ, and storages that are too small or elsewhere."""
    compute, arguments, outputs = small_pass(kind)
    count = 0
    for tensor, put in replaceable_tensors(arguments):
        array = tensor.array
        count += 1
        short, before, elsewhere = (Resizable(array) for _ in range(3))
        short.size -= 1
        before.begin += 1
        elsewhere.begin += 1 << 20
        wrong = [Resizable(array[:-1]), Resizable(array[None]), Resizable(array.astype(np.float64))]
        wrong += [Resizable(array, storage) for storage in (short, before, elsewhere)]
        wrong.append(Resizable(array, Resizable(np.empty(0))))  # as after `resize_(0)`
        for other in wrong:
            with pytest.raises(ValueError, match="blockcell: "):
                compute(*put(other), outputs)
    assert count == 2 + 8 + len(STATES[kind])
    x, weights, states, step_mask = arguments
    for others in ((weights[:-1], states), (weights + weights[:1], states), (weights, states + states[:1])):
        with pytest.raises(ValueError, match=r"blockcell: there are \d+ "):
            compute(x, *others, step_mask, outputs)
    assert all(np.isnan(output.array).all() for output in outputs)  # nothing was computed
    compute(*arguments, outputs)
    assert not any(np.isnan(output.array).any() for output in outputs)


class Unreadable(Resizable):
    """A tensor whose copies would be made beyond its storage."""

    is_negated = False

    def is_neg(self):
        return self.is_negated

    def as_strided(self, *_):
        return self

    def short(self):
        return self

    def set_(self, storage):
        return storage

    def refuse(self):
        raise AssertionError("read before its storage was looked at")

    resolve_neg = contiguous = clone = refuse


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_what_has_to_be_copied_is_refused_before(kind):
    """Tensors with gaps, misaligned or negated ones, whose storages are too small: copies would be read beyond."""
    compute, arguments, outputs = small_pass(kind)
    for tensor, put in replaceable_tensors(arguments):
        array = tensor.array
        with_gaps = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)[..., ::2]
        misaligned = np.zeros(array.nbytes + 1, np.uint8)[1:].view(array.dtype).reshape(array.shape)
        for other in (with_gaps, misaligned, array):
            if other is misaligned and array.itemsize == 1:
                continue
            unreadable = Unreadable(other)
            unreadable.is_negated = other is array
            unreadable.size -= 1
            with pytest.raises(ValueError, match=r"blockcell: \w+ has shape .*, but its storage has \d+ bytes alone"):
                compute(*put(unreadable), outputs)
            assert unreadable.held


def test_other_devices_are_refused():
    compute, given, outputs = small_pass()
    for tensor, put in replaceable_tensors(given):
        elsewhere = Resizable(tensor.array)
        elsewhere.is_cpu, elsewhere.device = False, "meta"
        with pytest.raises(ValueError, match=r"blockcell: \w+ is on meta; expected cpu"):
            compute(*put(elsewhere), outputs)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_storages_are_held(kind):
    """None can be resized while a kernel reads it, nor goes with its tensor."""
    compute, given, outputs = small_pass(kind)
    storages = []
    for tensor, _ in replaceable_tensors(given):
        tensor.storage = Resizable(tensor.array)
        storages.append(tensor.storage)

        def numpy(force, storage=tensor.storage):
            storage.held = True

        tensor.numpy = numpy
    before = [sys.getrefcount(storage) for storage in storages]
    seen = []

    class Watching(Lent):
        def data_ptr(self):  # the last thing that is asked for before the kernel runs
            seen.append([sys.getrefcount(storage) for storage in storages])
            return super().data_ptr()

    compute(*given, [Watching(outputs[0].array), *outputs[1:]])
    assert all(storage.held for storage in storages)
    assert len(seen) == 1 and all(a > b for a, b in zip(seen[0], before, strict=True))
    assert [sys.getrefcount(storage) for storage in storages] == before


def test_other_layouts_are_copied():
    """What is misaligned, or has gaps where kernels know none."""
    compute, given, outputs = small_pass("lstm")
    compute(*given, outputs)
    expected = [output.array.copy() for output in outputs]
    for tensor, put in replaceable_tensors(given):
        array = tensor.array
        memory = np.zeros(array.nbytes + 1, np.uint8)
        misaligned = memory[1:].view(array.dtype).reshape(array.shape)
        wide = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)[..., ::2]
        for other in (misaligned, wide):
            other[...] = array
            for output in outputs:
                output.array[...] = np.nan
            compute(*put(Resizable(other)), outputs)
            assert same([output.array for output in outputs], expected)
