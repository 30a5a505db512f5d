"""Bad calls of every op: wrong tensors, sizes and names. Each raises the right exception, which names the argument.

Which argument is named follows from two rules: x fixes T, B and I, cs_prev (LSTM) or h_prev (GRU) fixes H; and of the
arguments that do not agree with these, the first is named. All calls are made in one process, and good ones afterwards.
Files of their own have conversions (`test_validation_conversion.py`), numbers and switches
(`test_validation_numbers.py`), and ``out`` (`test_validation_out.py`).
"""

from __future__ import annotations

import datetime
import inspect
import json
import re
from pathlib import Path

import numpy as np
import pytest
from calls import WITH_PEEPHOLE, assert_equal, check, converted, good, refuse, resized
from cases import FUNCTIONS, SIZES, arguments
from forms import Raising, masked

from blockcell.optable import OPS, sizes_of

pytestmark = pytest.mark.usefixtures("good_calls_afterwards")

# ---------------------------------------------------------------------------- the probes that TensorFlow was tried with
PROBES = json.loads((Path(__file__).parent / "probes.json").read_text())


class BFloat16:
    """Stands for a bfloat16 tensor of another library, which numpy gets as two bytes of kind void."""

    def __init__(self, value):
        self.value = value.view(np.uint32)

    def __array__(self, dtype=None, copy=None):
        return (self.value >> 16).astype(np.uint16).view("V2")


def probe_arguments(op, description):
    """The arguments that a probe's description stands for, of the sizes SIZES unless it says otherwise."""
    empty = {"batch 0": "B", "input 0": "I", "cell 0": "H", "time 0": "T"}
    if description in empty:
        args = arguments(op, {empty[description]: 0}, use_peephole=False)
        # The probes left seq_len_max at 4, for T = 0 too.
        return args | ({"seq_len_max": SIZES["T"]} if OPS[op].sequence else {})
    args = good(op, use_peephole=False)
    if match := re.fullmatch(r"(\w+) rank\+1 .*", description):
        return args | {match[1]: args[match[1]][..., None]}
    if match := re.fullmatch(r"(\w+) rank-1 \(flat\)", description):
        value = args[match[1]]
        return args | {match[1]: value.reshape(-1) if value.ndim > 1 else value[0]}
    if match := re.fullmatch(r"(\w+) dim(\d)([+-]1)", description):
        return args | {match[1]: resized(args[match[1]], int(match[2]), int(match[3]))}
    if match := re.fullmatch(r"peephole=(True|False), (wci|all wc\*) len (\d)", description):
        names = ["wci"] if match[2] == "wci" else ["wci", "wcf", "wco"]
        return args | dict.fromkeys(names, np.ones(int(match[3]), np.float32)) | {"use_peephole": match[1] == "True"}
    if match := re.fullmatch(r"seq_len_max=np.int64\((-?\d+)\)", description):
        return args | {"seq_len_max": np.int64(match[1])}
    others = {
        "seq_len_max=array([0])": {"seq_len_max": np.zeros(1, np.int64)},
        "seq_len_max int32": {"seq_len_max": np.int32(SIZES["T"])},
        "x half others float": {"x": args.get("x").astype(np.float16)},
        "dtype double": converted(args, lambda value: value.astype(np.float64)),
        "dtype half": converted(args, lambda value: value.astype(np.float16)),
        "dtype bfloat16": converted(args, BFloat16),
    }
    return args | others[description]


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: f"{probe['op']}-{probe['description']}")
def test_probe(probe):
    args = probe_arguments(probe["op"], probe["description"])
    if probe["verdict"] == "ok":
        check(probe["op"], args)
    else:
        exception = {"TypeError": TypeError, "ValueError": ValueError}[probe["verdict"]]
        refuse(probe["op"], args, exception, probe["argument"])


# -------------------------------------------------------------------------------------------------------------- tensors


def _structured(value):
    return np.zeros(value.shape, [("re", np.float32), ("im", np.float32)])


WRONG_KINDS = {
    "text": lambda value: "0.5",
    "bytes": lambda value: b"0.5",
    "bytearray": lambda value: bytearray(8),
    "object": lambda value: object(),
    "dict": lambda value: {0: value},
    "set": lambda value: {1.0, 2.0},
    "generator": lambda value: (row for row in value),
    "function": lambda value: np.zeros,
    "dtype class": lambda value: np.float32,
    "list of text": lambda value: np.full(value.shape, "0.5").tolist(),
    "list of None": lambda value: np.full(value.shape, None).tolist(),
    "list of complex": lambda value: value.astype(complex).tolist(),
    "list of bool": lambda value: (value > 0).tolist(),
    "list of dates": lambda value: [datetime.date(2020, 1, 1)] * len(value),
    "complex": lambda value: value.astype(np.complex64),
    "bool": lambda value: value > 0,
    "int": lambda value: value.astype(np.int32),
    "longdouble": lambda value: value.astype(np.longdouble),
    "dates": lambda value: value.astype("datetime64[s]"),
    "durations": lambda value: value.astype("timedelta64[s]"),
    "strings": lambda value: value.astype("U8"),
    "StringDType": lambda value: value.astype(np.dtypes.StringDType()),
    "objects": lambda value: value.astype(object),
    "structured": _structured,
    "void": lambda value: value.astype(np.float16).view("V2"),
    "bfloat16": BFloat16,
    "masked": masked,
    "raising": Raising,
    "bool scalar": lambda value: np.True_,
}


def _tensor_cases(names):
    return [pytest.param(op, tensor, id=f"{op}-{tensor.name}") for op in names for tensor in OPS[op].inputs]


@pytest.mark.parametrize("kind", WRONG_KINDS)
@pytest.mark.parametrize("op", OPS)
def test_wrong_kind(op, kind):
    """For each tensor in turn, whether the kernel reads it or not."""
    args = good(op)
    for tensor in OPS[op].inputs:
        bad = WRONG_KINDS[kind](args[tensor.name])
        refuse(op, args | {tensor.name: bad}, TypeError, tensor.name)


@pytest.mark.parametrize(("op", "tensor"), _tensor_cases(OPS))
def test_wrong_array(op, tensor):
    args, name = good(op), tensor.name
    value, float64 = args[name], args[name].astype(np.float64)
    refuse(op, args | {name: None}, TypeError, name)
    ragged = [*np.atleast_1d(value).tolist(), [[1.0, 2.0], [3.0]]]
    refuse(op, args | {name: ragged}, ValueError, name)
    for scalar in (0.5, 1, np.float32(1), np.float64(1), np.array(1, np.float32)):
        refuse(op, args | {name: scalar}, ValueError, name)
    refuse(op, args | {name: []}, ValueError, name)
    refuse(op, args | {name: value[None]}, ValueError, name)
    refuse(op, args | {name: value[..., None].tolist()}, ValueError, name)
    # The first array fixes the dtype: if x is the odd one, the next argument is named.
    second = OPS[op].inputs[1].name
    refuse(op, args | {name: float64}, TypeError, second if name == "x" else name)
    refuse(op, args | {name: value.astype(">f8")}, TypeError, second if name == "x" else name)
    if name != "x":
        named = OPS[op].inputs[2].name if name == second else name
        refuse(op, args | {"x": args["x"].tolist(), name: float64}, TypeError, named)


def blamed(op, tensor, axis):
    """The argument that an error names if this dimension of this tensor is wrong; None if no other has the letter."""
    letter = tensor.shape.split()[axis]
    if OPS[op].sources.get(letter) != tensor.name:
        return tensor.name
    for other in OPS[op].inputs:
        if other.name != tensor.name and letter in other.shape:
            return other.name
    return None


@pytest.mark.parametrize(("op", "tensor"), _tensor_cases(OPS))
def test_wrong_size(op, tensor):
    """One more, one less, none, and more than fits into memory, by a stride of 0."""
    args, name = good(op), tensor.name
    for axis in range(tensor.rank):
        argument = blamed(op, tensor, axis)
        if argument is None:  # T of a forward op
            continue
        for change in (1, -1):
            refuse(op, args | {name: resized(args[name], axis, change)}, ValueError, argument)
        for size in (0, 2**31, 2**40):
            shape = list(args[name].shape)
            shape[axis] = size
            strides = [0] * tensor.rank
            huge = np.lib.stride_tricks.as_strided(args[name], shape, strides, writeable=False)
            refuse(op, args | {name: huge}, ValueError, argument)
    if tensor.rank == 2 and tensor.shape != "B I":
        refuse(op, args | {name: np.ascontiguousarray(args[name].T)}, ValueError, blamed(op, tensor, 0))


@pytest.mark.parametrize("op", WITH_PEEPHOLE)
def test_peephole_weights(op):
    args = good(op)
    for name in ("wci", "wcf", "wco"):
        for bad in (
            {name: None},
            {name: args[name][:-1]},
            {name: np.zeros((5, 5), np.float32)},
            {name: np.zeros(0, "f")},
        ):
            refuse(op, args | bad, TypeError if bad[name] is None else ValueError, name)
        with pytest.raises(TypeError, match=f"{name} is None; .* because use_peephole is True"):
            FUNCTIONS[op](**args | {name: None})
    unused = good(op, use_peephole=False)
    plain = check(op, unused)
    for name in ("wci", "wcf", "wco"):
        for weight in (None, np.zeros(0, "f"), np.full(3, np.nan, "f"), np.full(2, np.inf, "f")[::-1], [1, 2, 3], []):
            result = check(op, unused | {name: weight})
            if f"{name}_grad" in result._fields:
                length = SIZES["H"] if weight is None else len(weight)
                np.testing.assert_array_equal(getattr(result, f"{name}_grad"), np.zeros(length, "f"))
            for field in ("cs", "h", "x_grad", "cs_prev_grad"):
                if field in result._fields:
                    np.testing.assert_array_equal(getattr(result, field), getattr(plain, field))
        without = {k: v for k, v in unused.items() if k != name}
        check(op, without)
        refuse(op, unused | {name: np.zeros((1, 5), "f")}, ValueError, name)
        refuse(op, unused | {name: np.float32(0)}, ValueError, name)
        refuse(op, unused | {name: np.zeros(5)}, TypeError, name)
        refuse(op, unused | {name: "none"}, TypeError, name)


# ---------------------------------------------------------------------------------------------------------------- sizes
@pytest.mark.parametrize("letters", ["T", "B", "I", "H", "BI", "BH", "IH", "BIH", "TBIH"])
@pytest.mark.parametrize("op", OPS)
def test_zero_sizes(op, letters):
    for dtype in (np.float32, np.float16):
        result = check(op, arguments(op, dict.fromkeys(letters, 0), dtype=dtype))
        filled = tuple(np.full_like(value, 7) for value in result)
        again = FUNCTIONS[op](**arguments(op, dict.fromkeys(letters, 0), dtype=dtype), out=filled)
        assert_equal(again, result)


def _empty(op, sizes):
    """Arguments of any size in no memory: every tensor is a view of one number with strides of 0."""
    number = np.zeros(1, np.float32)
    args = {}
    for tensor in OPS[op].inputs:
        shape = sizes_of(tensor.shape, sizes)
        args[tensor.name] = np.lib.stride_tricks.as_strided(number, shape, [0] * len(shape), writeable=False)
    args |= {"seq_len_max": 0} if OPS[op].sequence else {}
    return args | ({"use_peephole": True} if op in WITH_PEEPHOLE else {})


@pytest.mark.parametrize("op", OPS)
def test_huge_sizes_of_nothing(op):
    """Sizes of 2**58 are fine in arrays without elements."""
    for sizes in ({"T": 1, "B": 0, "I": 2**58, "H": 0}, {"T": 2**58, "B": 0, "I": 0, "H": 0}):
        result = FUNCTIONS[op](**_empty(op, sizes))
        for tensor, value in zip(OPS[op].outputs, result, strict=True):
            assert value.shape == sizes_of(tensor.shape, sizes)
            assert value.size == 0


@pytest.mark.parametrize("op", ["BlockLSTM", "BlockLSTMV2", "block_gru"])
def test_results_that_no_address_reaches(op):
    """The inputs agree and are empty, but the results' shape is too large for numpy."""
    args = _empty(op, {"T": 2**50, "B": 0, "I": 0, "H": 2**20})
    refuse(op, args, ValueError, OPS[op].outputs[0].name)


# ----------------------------------------------------------------------------------------------------------- signatures
@pytest.mark.parametrize("op", OPS)
def test_signature_follows_the_table(op):
    parameters = inspect.signature(FUNCTIONS[op]).parameters
    table = OPS[op]
    expected = ["seq_len_max"] * table.sequence + [part.name for part in (*table.inputs, *table.attributes)]
    expected += ["out", "num_threads"] + ["name"] * (table.module == "raw_ops")
    assert list(parameters) == expected
    assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in parameters.values())
    defaults = {part.name: part.default for part in table.attributes if part.default is not None}
    defaults |= dict.fromkeys(["wci", "wcf", "wco", "out", "num_threads", "name"])
    for name, parameter in parameters.items():
        assert parameter.default == defaults.get(name, parameter.empty)


@pytest.mark.parametrize("op", OPS)
def test_names_of_arguments(op):
    args = good(op)
    for name in args:
        optional = name in ("wci", "wcf", "wco") or any(
            part.name == name and part.default is not None for part in OPS[op].attributes
        )
        if not optional:
            with pytest.raises(TypeError, match=rf"{op}\(\) missing .*'{name}'"):
                FUNCTIONS[op](**{key: value for key, value in args.items() if key != name})
    with pytest.raises(TypeError, match=rf"{op}\(\) got an unexpected keyword argument 'weights'"):
        FUNCTIONS[op](**args, weights=1)
    with pytest.raises(TypeError, match=rf"{op}\(\) takes 0 positional arguments"):
        FUNCTIONS[op](*args.values())
    if OPS[op].module == "raw_ops":
        for name in (None, "cell", 3, object()):
            check(op, args | {"name": name})


# ------------------------------------------------------------------------------------------------------------- messages
F = np.float32
CELL = {"x": np.zeros((2, 3), F), "cs_prev": np.zeros((2, 5), F), "h_prev": np.zeros((2, 5), F)}
CELL |= {"w": np.zeros((8, 20), F), "b": np.zeros(20, F)}
B_FROM_X, H_FROM_CS_PREV = "B=2 from x (shape (2, 3))", "H=5 from cs_prev (shape (2, 5))"
MESSAGES = [
    (
        {"w": np.zeros((7, 16), F)},
        f"w has shape (7, 16); expected (I+H, 4H) = (8, 20) with I=3 from x (shape (2, 3)), {H_FROM_CS_PREV}",
    ),
    ({"x": np.zeros(3, F)}, "x has shape (3,); expected rank 2, (B, I)"),
    ({"cs_prev": np.zeros((4, 5), F)}, f"cs_prev has shape (4, 5); expected (B, H) = (2, 5) with {B_FROM_X}"),
    ({"b": np.zeros(21, F)}, f"b has shape (21,); expected (4H,) = (20,) with {H_FROM_CS_PREV}"),
    ({"wci": np.zeros((5, 1), F)}, "wci has shape (5, 1); expected rank 1, of any length while use_peephole is False"),
    ({"use_peephole": True}, "wci is None; expected an array of shape (H,) because use_peephole is True"),
    ({"x": None}, "x is None; expected an array of shape (B, I)"),
    ({"x": "abc"}, "x is made of <U3; expected an array of real numbers"),
    ({"b": np.zeros(20)}, "b has dtype float64; expected float32, that of x; b.astype(np.float32) converts it"),
    (
        {"x": np.zeros((2, 3))},
        "cs_prev has dtype float32; expected float64, that of x; x.astype(np.float32) converts it",
    ),
    ({"b": np.zeros(20, complex)}, "b has dtype complex128; expected float32, float64 or float16"),
    ({"forget_bias": "1"}, "forget_bias is '1'; expected a real number"),
    ({"use_peephole": 1}, "use_peephole is 1; expected True or False"),
    ({"num_threads": 0}, "num_threads must be at least 1, got 0"),
    ({"out": ()}, "out has 0 arrays; expected 7: (i, cs, f, o, ci, co, h)"),
    (
        {"out": (np.zeros((2, 4), F),) * 7},
        f"out[0] (i) has shape (2, 4); expected (B, H) = (2, 5) with {B_FROM_X}, {H_FROM_CS_PREV}",
    ),
]


@pytest.mark.parametrize(("bad", "message"), MESSAGES, ids=lambda value: value[:30] if isinstance(value, str) else "")
def test_message(bad, message):
    with pytest.raises((TypeError, ValueError)) as caught:
        FUNCTIONS["LSTMBlockCell"](**CELL | bad)
    assert str(caught.value) == f"LSTMBlockCell: {message}"


def test_message_of_seq_len_max():
    args = good("BlockLSTM") | {"seq_len_max": 5}
    with pytest.raises(ValueError) as caught:
        FUNCTIONS["BlockLSTM"](**args)
    expected = "expected 0 <= seq_len_max <= T = 4 from x (shape (4, 3, 2))"
    assert str(caught.value) == f"BlockLSTM: seq_len_max is 5; {expected}"
