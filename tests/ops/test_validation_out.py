"""``out=`` is filled and returned, or refused."""

from __future__ import annotations

import numpy as np
import pytest
from calls import WITH_PEEPHOLE, assert_equal, converted, good, refuse, resized
from cases import FUNCTIONS
from forms import Protocol, Subclass, masked, memmap, misaligned, read_only, strided

from blockcell.optable import OPS

pytestmark = pytest.mark.usefixtures("good_calls_afterwards")


def _filled(op, args):
    return [np.full_like(value, 7) for value in FUNCTIONS[op](**args)]


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("op", OPS)
def test_out_is_filled_and_returned(op, dtype, tmp_path):
    for peephole in (True, False) if op in WITH_PEEPHOLE else (True,):
        args = good(op, dtype, peephole)
        expected = FUNCTIONS[op](**args)
        kinds = (np.array, lambda value: value.view(Subclass), lambda value: memmap(value, tmp_path))
        for inputs in (args, args | converted(args, np.asfortranarray)):
            for kind in kinds:
                out = tuple(kind(value) for value in _filled(op, args))
                for given_as in (out, OPS[op].result(*out)):
                    result = FUNCTIONS[op](**inputs, out=given_as)
                    assert type(result) is OPS[op].result
                    assert all(a is b for a, b in zip(result, out, strict=True))
                    assert_equal(result, expected)


@pytest.mark.parametrize("op", OPS)
def test_neighbours_do_not_overlap(op):
    """The arrays of ``out`` and an input are next to each other in one block of memory."""
    args = good(op)
    expected = FUNCTIONS[op](**args)
    block = np.zeros(sum(value.size for value in (*expected, args["x"])), np.float32)
    parts, start = [], 0
    for value in (*expected, args["x"]):
        parts.append(block[start : start + value.size].reshape(value.shape))
        start += value.size
    parts[-1][...] = args["x"]
    result = FUNCTIONS[op](**args | {"x": parts[-1]}, out=tuple(parts[:-1]))
    assert_equal(result, expected)


@pytest.mark.parametrize("op", OPS)
def test_wrong_out(op):
    args = good(op)
    out = _filled(op, args)
    for bad in (list(out), out[0], "out", 1, {}, iter(out), np.zeros((len(out), 3, 5), "f")):
        refuse(op, args | {"out": bad}, TypeError, "out")
    for bad in ((), tuple(out[:-1]), (*out, out[0].copy()), (out[0],) if len(out) > 1 else ()):
        refuse(op, args | {"out": bad}, ValueError, "out")


@pytest.mark.parametrize(("op", "k"), [(op, k) for op in OPS for k in range(len(OPS[op].outputs))])
def test_wrong_array_in_out(op, k):
    """Whether or not the inputs have to be converted."""
    for args in (good(op), good(op) | {"x": good(op)["x"].tolist()}):
        _refuse_arrays_in_out(op, args, k)


def _refuse_arrays_in_out(op, args, k):
    out = _filled(op, args)
    output = out[k]
    name = rf"out\[{k}\] \({OPS[op].outputs[k].name}"

    def bad(array, exception):
        refuse(op, args | {"out": (*out[:k], array, *out[k + 1 :])}, exception, name)

    other_kinds = (None, output.tolist(), 0.5, "out", memoryview(output), Protocol(output), np.ma.array(output))
    for value in (*other_kinds, masked(output)):
        bad(value, TypeError)
    for dtype in (np.float64, np.float16, np.int32, np.complex64, object, output.dtype.newbyteorder()):
        bad(output.astype(dtype), TypeError)
    for axis in range(output.ndim):
        bad(resized(output, axis, 1), ValueError)
        bad(resized(output, axis, -1), ValueError)
    for reshaped in (output[None], output[..., None], output.reshape(-1)[:0], output.reshape(-1)[0, ...]):
        bad(reshaped, ValueError)
    bad(read_only(output), ValueError)
    bad(strided(output), ValueError)
    bad(misaligned(output), ValueError)
    if output.ndim > 1:
        bad(np.asfortranarray(output), ValueError)
    # Its first number is the last one of an input, or of another output.
    for tensor in OPS[op].inputs:
        if isinstance(args[tensor.name], np.ndarray):
            memory = np.zeros(args[tensor.name].size + output.size, np.float32)
            shared = memory[: args[tensor.name].size].reshape(args[tensor.name].shape)
            shared[...] = args[tensor.name]
            last = memory[shared.size - 1 : shared.size - 1 + output.size].reshape(output.shape)
            overlapping = args | {tensor.name: shared, "out": (*out[:k], last, *out[k + 1 :])}
            refuse(op, overlapping, ValueError, name)
    for m, other_output in enumerate(out):
        if m < k:
            memory = np.zeros(other_output.size + output.size, np.float32)
            first = memory[: other_output.size].reshape(other_output.shape)
            second = memory[other_output.size - 1 : other_output.size - 1 + output.size].reshape(output.shape)
            twice = list(out)
            twice[m], twice[k] = first, second
            refuse(op, args | {"out": tuple(twice)}, ValueError, name)


@pytest.mark.parametrize("op", OPS)
def test_out_between_the_elements_of_an_input(op):
    """This is allowed: their address ranges overlap, but no byte belongs to both."""
    args = good(op)
    expected = FUNCTIONS[op](**args)
    batch, hidden = args["h_prev"].shape
    for k, array in enumerate(expected):
        memory = np.zeros((batch, hidden + array.size), np.float32)
        memory[:, :hidden] = args["h_prev"]
        out = _filled(op, args)
        out[k] = memory[0, hidden:].reshape(array.shape)
        assert_equal(FUNCTIONS[op](**args | {"h_prev": memory[:, :hidden]}, out=tuple(out)), expected)
