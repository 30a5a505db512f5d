"""``out=`` is filled and returned, or refused."""

from __future__ import annotations

import numpy as np
import pytest
from calls import WITH_PEEPHOLE, assert_equal, converted, good, refuse, resized
from cases import FUNCTIONS
from forms import Protocol, Subclass, masked, memmap, misaligned, read_only, strided

from blockcell.optable import OPS

pytestmark = pytest.mark.usefixtures("good_calls_afterwards")


def _filled(op, given):
    return [np.full_like(value, 7) for value in FUNCTIONS[op](**given)]


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("op", OPS)
def test_out_is_filled_and_returned(op, dtype, tmp_path):
    for peephole in (True, False) if op in WITH_PEEPHOLE else (True,):
        given = good(op, dtype, peephole)
        expected = FUNCTIONS[op](**given)
        kinds = (np.array, lambda value: value.view(Subclass), lambda value: memmap(value, tmp_path))
        for inputs in (given, given | converted(given, np.asfortranarray)):
            for kind in kinds:
                out = tuple(kind(value) for value in _filled(op, given))
                for given_as in (out, OPS[op].result(*out)):
                    result = FUNCTIONS[op](**inputs, out=given_as)
                    assert type(result) is OPS[op].result
                    assert all(a is b for a, b in zip(result, out, strict=True))
                    assert_equal(result, expected)


@pytest.mark.parametrize("op", OPS)
def test_neighbours_do_not_overlap(op):
    """The arrays of ``out`` and an input are next to each other in one block of memory."""
    given = good(op)
    expected = FUNCTIONS[op](**given)
    block = np.zeros(sum(value.size for value in (*expected, given["x"])), np.float32)
    parts, start = [], 0
    for value in (*expected, given["x"]):
        parts.append(block[start : start + value.size].reshape(value.shape))
        start += value.size
    parts[-1][...] = given["x"]
    result = FUNCTIONS[op](**given | {"x": parts[-1]}, out=tuple(parts[:-1]))
    assert_equal(result, expected)


@pytest.mark.parametrize("op", OPS)
def test_wrong_out(op):
    given = good(op)
    out = _filled(op, given)
    for bad in (list(out), out[0], "out", 1, {}, iter(out), np.zeros((len(out), 3, 5), "f")):
        refuse(op, given | {"out": bad}, TypeError, "out")
    for bad in ((), tuple(out[:-1]), (*out, out[0].copy()), (out[0],) if len(out) > 1 else ()):
        refuse(op, given | {"out": bad}, ValueError, "out")


@pytest.mark.parametrize(("op", "k"), [(op, k) for op in OPS for k in range(len(OPS[op].outputs))])
def test_wrong_array_in_out(op, k):
    """Whether or not the inputs have to be converted."""
    for given in (good(op), good(op) | {"x": good(op)["x"].tolist()}):
        _refuse_arrays_in_out(op, given, k)


def _refuse_arrays_in_out(op, given, k):
    out = _filled(op, given)
    right = out[k]
    name = rf"out\[{k}\] \({OPS[op].outputs[k].name}"

    def bad(array, exception):
        refuse(op, given | {"out": (*out[:k], array, *out[k + 1 :])}, exception, name)

    other_kinds = (None, right.tolist(), 0.5, "out", memoryview(right), Protocol(right), np.ma.array(right))
    for value in (*other_kinds, masked(right)):
        bad(value, TypeError)
    for dtype in (np.float64, np.float16, np.int32, np.complex64, object, right.dtype.newbyteorder()):
        bad(right.astype(dtype), TypeError)
    for axis in range(right.ndim):
        bad(resized(right, axis, 1), ValueError)
        bad(resized(right, axis, -1), ValueError)
    for reshaped in (right[None], right[..., None], right.reshape(-1)[:0], right.reshape(-1)[0, ...]):
        bad(reshaped, ValueError)
    bad(read_only(right), ValueError)
    bad(strided(right), ValueError)
    bad(misaligned(right), ValueError)
    if right.ndim > 1:
        bad(np.asfortranarray(right), ValueError)
    # Its first number is the last one of an input, or of another output.
    for tensor in OPS[op].inputs:
        if isinstance(given[tensor.name], np.ndarray):
            memory = np.zeros(given[tensor.name].size + right.size, np.float32)
            shared = memory[: given[tensor.name].size].reshape(given[tensor.name].shape)
            shared[...] = given[tensor.name]
            last = memory[shared.size - 1 : shared.size - 1 + right.size].reshape(right.shape)
            overlapping = given | {tensor.name: shared, "out": (*out[:k], last, *out[k + 1 :])}
            refuse(op, overlapping, ValueError, name)
    for m, other in enumerate(out):
        if m < k:
            memory = np.zeros(other.size + right.size, np.float32)
            first = memory[: other.size].reshape(other.shape)
            second = memory[other.size - 1 : other.size - 1 + right.size].reshape(right.shape)
            twice = list(out)
            twice[m], twice[k] = first, second
            refuse(op, given | {"out": tuple(twice)}, ValueError, name)


@pytest.mark.parametrize("op", OPS)
def test_out_between_the_elements_of_an_input(op):
    """This is allowed: their address ranges overlap, but no byte belongs to both."""
    given = good(op)
    expected = FUNCTIONS[op](**given)
    batch, hidden = given["h_prev"].shape
    for k, array in enumerate(expected):
        memory = np.zeros((batch, hidden + array.size), np.float32)
        memory[:, :hidden] = given["h_prev"]
        out = _filled(op, given)
        out[k] = memory[0, hidden:].reshape(array.shape)
        assert_equal(FUNCTIONS[op](**given | {"h_prev": memory[:, :hidden]}, out=tuple(out)), expected)
