"""Quantized matrices against exact arithmetic; the layers that are left; schemes, bytes, reports and the command."""

# ruff: noqa: E741 (I is the number of inputs, as everywhere)
from __future__ import annotations

import copy
import gc
import json
import os
import pickle
import re
import types
from fractions import Fraction

import numpy as np
import pytest
from bits import same
from layer_cases import LAYERS, dense, draw, gru, lstm, reset_after
from quantization_cases import F32, LARGEST, numbers

from blockcell import GRU, LSTM, Bidirectional, Dense, Quantized, Stack
from blockcell.command import cli
from blockcell.optable import SCHEMES
from blockcell.quantization import dequantize_matrix, quantize_matrix


# ----------------------------------------------------------------------------------------------- the definition, slowly
def nearest(q: Fraction, digits: int, quantum: int) -> Fraction:
    """The nearest number of so many binary digits that is a multiple of 2**quantum; of two, the even one."""
    if q == 0:
        return q
    exponent = abs(q.numerator).bit_length() - q.denominator.bit_length()
    exponent -= abs(q) < Fraction(2) ** exponent
    assert Fraction(2) ** exponent <= abs(q) < Fraction(2) ** (exponent + 1)
    ulp = Fraction(2) ** max(exponent - digits + 1, quantum)
    return round(q / ulp) * ulp


def float32(q: Fraction) -> Fraction:
    return nearest(q, 24, -149)


def left(column: list[Fraction], name: str) -> list[Fraction]:
    """What is left of a column of weights."""
    if name == "float16":
        return [nearest(w, 11, -24) for w in column]
    scale = max(float32(max(map(abs, column)) / 127), Fraction(2) ** -126)
    while float32(127 * scale) >= 2**128:
        scale -= Fraction(2) ** (127 - 6 - 23)
    codes = [round(float32(w / scale)) for w in column]
    assert all(-127 <= code <= 127 for code in codes)
    return [float32(code * scale) for code in codes]


@pytest.mark.parametrize("name", SCHEMES)
def test_definition(name, seed):
    """Against exact fractions, number for number."""
    for case in range(12):
        w = numbers(np.random.default_rng([seed, case]), name, (9, 60))
        matrix = quantize_matrix(w, name)
        dequantized = dequantize_matrix(matrix)
        assert matrix.codes.dtype == SCHEMES[name] and dequantized.dtype == F32 and dequantized.shape == w.shape
        expected = [left([*map(Fraction, column.tolist())], name) for column in w.T]
        np.testing.assert_array_equal(dequantized.T, np.array(expected, dtype=np.float64), err_msg=f"case {case}")
        if name == "int8":
            assert matrix.scale.dtype == F32 and matrix.scale.shape == (60,)
        else:
            assert matrix.scale is None
            assert (np.signbit(dequantized) == np.signbit(w)).all()  # also of zeros


@pytest.mark.parametrize("name", SCHEMES)
def test_again(name, seed):
    """To quantize what is left changes no code, of no number of float32."""
    for case in range(200):
        g = np.random.default_rng([seed, case])
        w = numbers(g, name, (int(g.integers(0, 9)), 500))
        first = quantize_matrix(w, name)
        again = quantize_matrix(dequantize_matrix(first), name)
        assert same(first, again), f"case {case}"


def test_scales_near_their_least():
    """Every maximum near 127 of the least scale, in steps of one ulp, and columns of subnormal numbers and zeros."""
    start = (F32(127) * np.finfo(F32).smallest_normal).view(np.uint32)
    most = np.concatenate([start + np.arange(-300, 300), np.arange(300), start // 2 + np.arange(300)]).astype(np.uint32)
    w = np.stack([most.view(F32), -most.view(F32) / 2, most.view(F32) / 3])
    matrix = quantize_matrix(w, "int8")
    expected = [left([*map(Fraction, column.tolist())], "int8") for column in w.T]
    np.testing.assert_array_equal(dequantize_matrix(matrix).T, np.array(expected, dtype=np.float64))
    assert (matrix.scale >= np.finfo(F32).smallest_normal).all()
    assert same(quantize_matrix(dequantize_matrix(matrix), "int8"), matrix)


def test_largest_weights():
    """They have the code 127 and come back but for one ulp; those near the largest float32 stay finite."""
    g = np.random.default_rng(0)
    w = np.concatenate([g.standard_normal((50, 3000)), g.uniform(0.98, 1, (50, 3000)) * np.finfo(F32).max], 1).astype(
        F32
    )
    w[0, -1] = np.finfo(F32).max
    matrix = quantize_matrix(w, "int8")
    place = np.abs(w).argmax(axis=0), np.arange(w.shape[1])
    assert (np.abs(matrix.codes[place]) == 127).all()
    np.testing.assert_array_max_ulp(dequantize_matrix(matrix)[place], w[place], 1)
    weights = dequantize_matrix(matrix)
    assert np.isfinite(weights).all() and same(quantize_matrix(weights, "int8"), matrix)
    expected = [left([*map(Fraction, column.tolist())], "int8") for column in w.T[-20:]]
    np.testing.assert_array_equal(dequantize_matrix(matrix).T[-20:], np.array(expected, dtype=np.float64))


def test_zeros():
    """int8 has no negative one, and a column of numbers up to 2**-127 is zeros."""
    least = np.ldexp(F32(1), -127)
    w = np.array([[-0.0, -0.0, least, np.nextafter(least, F32(1))], [127, 0, -least, -least]], F32)
    assert same(dequantize_matrix(quantize_matrix(w, "int8")), np.array([[0, 0, 0, 2 * least], [127, 0, 0, 0]], F32))
    zeros = np.array([[0.0, -0.0]], F32)
    assert same(dequantize_matrix(quantize_matrix(zeros, "float16")), zeros)


def test_other_layouts():
    w = numbers(np.random.default_rng(0), "float16", (8, 6))
    for name in SCHEMES:
        for other in (np.asfortranarray(w), np.repeat(w, 2, axis=1)[:, ::2]):
            assert same(dequantize_matrix(quantize_matrix(other, name)), dequantize_matrix(quantize_matrix(w, name)))
        assert dequantize_matrix(quantize_matrix(np.zeros((0, 3), F32), name)).shape == (0, 3)


# ------------------------------------------------------------------------------------------------------ what is refused
@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        *((name, value, "expected finite weights") for name in SCHEMES for value in (np.nan, -np.inf)),
        ("float16", 65520.0, "expected a number that float16 holds; int8 holds any"),
    ],
)
def test_weights_that_cannot_be_quantized(name, value, said):
    layer = Stack([LAYERS["bidirectional gru"](3, 4, F32), LSTM.init(8, 4, seed=0)])
    w_c = layer.weights["0.bw.w_c"].copy()
    w_c[3, 1] = value
    layer.set_weights(**{"0.bw.w_c": w_c})
    with pytest.raises(ValueError, match=rf"^Stack.quantize: 0.bw.w_c\[3, 1\] is {re.escape(str(F32(value)))}; {said}"):
        layer.quantize(name)
    assert layer.quantize({"1": name, "0.fw": name}).quantization == {"1": name, "0.fw": name}


def test_the_largest_weight_that_can_be_quantized():
    dequantized = dequantize_matrix(quantize_matrix(np.full((1, 1), 65519.996, F32), "float16"))
    assert dequantized == LARGEST["float16"]


def test_schemes_that_are_none():
    layer, x = Stack([GRU.init(3, 4)]), np.zeros((1, 1, 3), F32)
    for call in (layer.quantize, lambda scheme: layer.quantization_report(scheme, x)):
        for name in ("int4", "float32", "f2", "", "bfloat16"):
            with pytest.raises(ValueError, match=f"scheme is '{name}'; expected one of 'float16', 'int8'"):
                call(name)
            if name != "float32":
                with pytest.raises(ValueError, match=rf"scheme\['0'\] is '{name}'; expected one of 'float16', 'int8'"):
                    call({"0": name})
        for value in (8, np.float16, ["int8"], None):
            with pytest.raises(TypeError, match=r"scheme is .*; expected one of 'float16', 'int8'"):
                call(value)
            with pytest.raises(TypeError, match=r"scheme\['0'\] is .*; expected one of 'float16', 'int8'"):
                call({"0": value})
        for key in ("1", "0.w", "0.", 0):
            with pytest.raises(ValueError, match=r"scheme has the key .*; expected '', '0', of the weights' names"):
                call({key: "int8"})
    for dtype in ("float64", "float16"):
        message = f"scheme is 'int8' and the layer's dtype {dtype}; expected float32: make a layer of weights.astype"
        with pytest.raises(ValueError, match=message):
            GRU.init(3, 4, dtype=dtype).quantize("int8")


def test_what_a_quantized_layer_is_not_for():
    q = GRU.init(3, 4).quantize("int8")
    for name in ("forward", "backward", "quantize", "weights", "set_weights", "no_such_name"):
        with pytest.raises(AttributeError, match=rf"a quantized layer has no {name}; expected .* dequantize"):
            getattr(q, name)
    with pytest.raises(TypeError, match=r"Stack: 0 is .*; expected a layer"):
        Stack([q])


# ----------------------------------------------------------------------------------------------------------- the layers
MORE = {
    "lstm backwards": lambda I, H, dtype: lstm(I, H, dtype, reverse=True, forget_bias=0.5, cell_clip=2.0),
    "both ends": lambda I, H, dtype: Stack(
        [Bidirectional(gru(I, H, dtype), gru(I, H, dtype, 1)), dense(2 * H, 3, dtype, "tanh", last="ends")]
    ),
    "last": lambda I, H, dtype: Dense.init(I, H, seed=3, last=True),
    "nothing": lambda I, H, dtype: LSTM.init(0, 0),
}


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("kind", [*LAYERS, *MORE])
def test_dequantize(kind, name):
    """Matrices are as their codes say, and all else as it was."""
    layer = (LAYERS | MORE)[kind](5, 7, F32)
    before = {key: array.copy() for key, array in layer.weights.items()}
    quantized = layer.quantize(name)
    left = quantized.dequantize()
    assert type(left) is type(layer) and repr(left) == repr(layer)
    assert left._description() == layer._description()
    assert [*left.weights] == [*before]
    for key, array in left.weights.items():
        np.testing.assert_array_equal(layer.weights[key], before[key])
        expected = dequantize_matrix(quantize_matrix(before[key], name)) if array.ndim == 2 else before[key]
        assert array.tobytes() == expected.tobytes() and array.dtype == F32
        assert array.ndim == 1 or not array.size or not np.array_equal(array, before[key])
    x, state, _, _ = draw(layer, 4, 3, kind) if kind != "nothing" else (np.zeros((4, 3, 0), F32), None, None, None)
    again = left.quantize(name)
    assert same(again(x, state), quantized(x, state)) and same(again.dequantize().weights, left.weights)


def test_subclasses():
    class Mine(LSTM):
        pass

    assert type(Mine.init(2, 3, seed=0).quantize("int8").dequantize()) is Mine


# -------------------------------------------------------------------------------------------------------- mixed schemes
@pytest.mark.parametrize(
    "scheme",
    [
        {"0": "int8", "1": "float32"},
        {"0": "float16", "0.bw": "int8", "2": "int8"},
        {"": "int8", "1": "float16", "0.fw": "float32"},
        {"1": "float32"},
        {},
    ],
)
def test_mixed(scheme, tmp_path):
    """Each part has the bits that it has alone; the longest prefix counts, and the rest stays float32."""
    parts = [Bidirectional(gru(5, 7, F32), gru(5, 7, F32, 1)), lstm(14, 6, F32), dense(6, 3, F32, "tanh")]
    layer = Stack(parts)
    expected = {
        ("0", "fw"): scheme.get("0.fw", scheme.get("0", scheme.get("", "float32"))),
        ("0", "bw"): scheme.get("0.bw", scheme.get("0", scheme.get("", "float32"))),
        ("1", ""): scheme.get("1", scheme.get("", "float32")),
        ("2", ""): scheme.get("2", scheme.get("", "float32")),
    }
    quantized = layer.quantize(scheme)
    assert quantized.quantization == scheme and repr(scheme) in repr(quantized)
    left = quantized.dequantize().weights
    for (number, side), name in expected.items():
        for key, array in layer.weights.items():
            if key.startswith(f"{number}.{side}"):
                codes = array.ndim == 2 and name != "float32"
                exact = dequantize_matrix(quantize_matrix(array, name)) if codes else array
                assert left[key].tobytes() == exact.tobytes(), key
    x, state, lengths, reset = draw(layer, 6, 4)
    y, last = quantized(x, state, lengths=lengths, reset=reset)
    z, last_states = x, []
    for k, part in enumerate(parts):
        own = {side: name for (number, side), name in expected.items() if number == str(k)}
        z, end = part.quantize(own)(z, state[k], lengths=lengths, reset=reset)
        last_states.append(end)
    assert same(y, z) and same(last, tuple(last_states))
    quantized.save(tmp_path / "a.npz")
    again = Quantized.load(tmp_path / "a.npz")
    for other in (again, pickle.loads(pickle.dumps(quantized)), copy.deepcopy(quantized)):
        assert other.quantization == scheme and other.nbytes == quantized.nbytes
        assert same(other(x, state, lengths=lengths, reset=reset), (y, last))
    quantized.quantization.clear()
    assert quantized.quantization == scheme


# ---------------------------------------------------------------------------------------------------------------- bytes
def arrays_in(thing):
    """Every array that an object refers to, however far away, but for what modules and classes have."""
    arrays, visited_ids, waiting = {}, set(), [thing]
    while waiting:
        value = waiting.pop()
        if id(value) in visited_ids or isinstance(value, (type, types.ModuleType, types.FunctionType)):
            continue
        visited_ids.add(id(value))
        if isinstance(value, np.ndarray):
            base = value if value.base is None else value.base
            arrays[id(base)] = base
        waiting += gc.get_referents(value)
    return arrays.values()


@pytest.mark.parametrize("scheme", [*SCHEMES, {"0": "int8"}, {"0": "float16", "1": "int8"}, {}])
def test_nbytes_is_of_all_arrays(scheme):
    for layer in (
        Stack([LSTM.init(33, 40, use_peephole=True), dense(40, 5, F32, None)]),
        Stack([reset_after(33, 8, F32), Bidirectional(gru(8, 7, F32), gru(8, 7, F32, 1))]),
    ):
        quantized = layer.quantize(scheme)
        quantized(draw(layer, 40, 30)[0])  # which keeps nothing
        assert quantized.nbytes == sum(array.nbytes for array in arrays_in(quantized))


@pytest.mark.parametrize("name", SCHEMES)
def test_bytes_of_a_wide_layer(name):
    """A half or a quarter of float32's, and what is beside the matrices; also where float32 fits into the L2 cache."""
    part = SCHEMES[name].itemsize / 4
    for H in (64, 256):
        layer = LSTM.init(H, H, seed=0)
        matrices = layer.weights["w"].nbytes
        assert part * matrices <= layer.quantize(name).nbytes < (part + 0.02) * matrices + 6 * layer.weights["b"].nbytes


# -------------------------------------------------------------------------------------------------------- what it costs
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("kind", ["lstm", "gru reset after", "stack with dense", "both ends"])
def test_report(kind, name):
    layer = (LAYERS | MORE)[kind](5, 7, F32)
    x, state, lengths, reset = draw(layer, 6, 4, kind)
    report = layer.quantization_report(name, x, state, lengths=lengths, reset=reset)
    y, other = (caller(x, state, lengths=lengths, reset=reset)[0] for caller in (layer, layer.quantize(name)))
    off = other.astype(float) - y
    most, rms = np.abs(off).max(), np.linalg.norm(off) / np.sqrt(off.size)
    errors = report.max, report.rms, report.relative_max, report.relative_rms
    expected = most, rms, most / np.abs(y).max(), rms / np.sqrt(np.mean(y.astype(float) ** 2))
    np.testing.assert_allclose(errors, expected, rtol=1e-12)
    assert 0 < report.rms < report.max < 0.1
    itemsize = {"float16": 2, "int8": 1}[name]
    sizes = [
        array.size * itemsize + 4 * array.shape[1] * (name == "int8") if array.ndim == 2 else array.nbytes
        for array in layer.weights.values()
    ]
    assert report.nbytes == sum(sizes) and report.nbytes_float32 == sum(a.nbytes for a in layer.weights.values())
    assert report.quantization == name and report.layers == {}
    shown = f"QuantizationReport(quantization='{name}', max={report.max:.3g}, rms={report.rms:.3g}, relative_max="
    assert repr(report).startswith(shown) and repr(report).endswith(f"nbytes_float32={report.nbytes_float32})")
    if name == "float16":
        assert layer.quantize(name).dequantize().quantization_report(name, x, state).max == 0


@pytest.mark.parametrize("scheme", ["int8", {"0": "float16", "1.bw": "int8", "2": "int8"}])
def test_report_by_layer(scheme):
    """What each costs alone."""
    layer = Stack([lstm(5, 7, F32), Bidirectional(gru(7, 4, F32), gru(7, 4, F32, 1)), dense(8, 3, F32, None)])
    x, state, lengths, _ = draw(layer, 6, 4)
    report = layer.quantization_report(scheme, x, state, by_layer=True, lengths=lengths)
    schemes = scheme if isinstance(scheme, dict) else dict.fromkeys(("0", "1.fw", "1.bw", "2"), scheme)
    assert report.layers.keys() == schemes.keys()
    for name, part in report.layers.items():
        assert part == layer.quantization_report({name: schemes[name]}, x, state, lengths=lengths)
        assert 0 < part.max and report.nbytes < part.nbytes < part.nbytes_float32
    first, head, *lines = repr(report).split("\n")
    assert first == repr(report._replace(layers={})) and "layers" not in first
    names = head.split()[1:]
    for line, (name, part) in zip(lines, report.layers.items(), strict=True):
        assert len(line) == len(head) <= 80
        assert line.split() == [repr(name), *[f"{getattr(part, key):.3g}" for key in names[:-1]], str(part.nbytes)]
    assert names == ["max", "rms", "relative_max", "relative_rms", "nbytes"]
    single = lstm(5, 7, F32)
    assert [*single.quantization_report("int8", x, by_layer=True).layers] == [""]
    with pytest.raises(TypeError, match=r"quantization_report: by_layer is 1"):
        layer.quantization_report(scheme, x, by_layer=1)


def test_reports_by_hand():
    def report(w, x):
        w = np.array(w, F32)
        return Dense(w, np.zeros(w.shape[1], F32)).quantization_report("int8", np.array(x, F32))

    errors = report([[127, 254]], [[[127.0]]])
    assert errors.max == errors.relative_max == errors.rms == errors.relative_rms == 0  # a column's largest is exact
    errors = report([[127.0], [2.25]], [[[0, 127], [0, 0]]])  # y is 285.75 and 0, and becomes 254 and 0
    assert (errors.max, errors.relative_max) == (31.75, 31.75 / 285.75)
    np.testing.assert_allclose((errors.rms, errors.relative_rms), (31.75 / np.sqrt(2), 31.75 / 285.75), rtol=1e-15)
    assert (errors.nbytes, errors.nbytes_float32) == (2 + 4 + 4, 12)
    errors = report([[127.0], [2.25], [-2.25]], [[[0, 127, 127]]])  # y is 0, and becomes 0
    assert (errors.max, errors.relative_max, errors.relative_rms) == (0, 0, 0)
    errors = report([[127.0], [0], [2.75], [1.375]], [[[0, 127, 50, -100]]])  # y is 0, and becomes 50
    assert (errors.max, errors.relative_max, errors.relative_rms) == (50, np.inf, np.inf)
    assert report([[127.0], [2.25]], np.zeros((0, 1, 2))).max == 0


# ---------------------------------------------------------------------------------------------------------- the command
def run_info(arguments, capsys, status=0):
    assert cli.main(["info", *map(str, arguments)]) == status
    out, err = capsys.readouterr()
    assert err.count("\n") == (status != 0)
    return err if status else out


@pytest.mark.parametrize("scheme", [None, "float16", {"0": "int8", "1": "float32"}], ids=str)
def test_info_of_a_layer(scheme, tmp_path, capsys):
    path = tmp_path / "a.safetensors"
    layer = Stack([LSTM.init(3, 40, seed=0), Dense.init(40, 2, seed=1, last=True)])
    (layer.quantize(scheme) if scheme else layer).save(path)
    out = run_info([path], capsys)
    assert out.startswith(f"{path}\n") and repr(layer) in out
    assert re.search(r"file bytes +" + format(path.stat().st_size, ","), out)
    shown = "0: int8, 1: float32" if isinstance(scheme, dict) else scheme
    assert re.search(rf"quantization +{shown}\n", out)
    info = json.loads(run_info([path, "--json"], capsys))
    assert info["quantization"] == scheme and info["layer"] == repr(layer)
    assert info["weights"] == sum(array.size for array in layer.weights.values())
    assert (info["input_size"], info["output_size"]) == (3, 2)


def test_errors_of_info(tmp_path, capsys):
    path = tmp_path / "a.npz"
    assert "FileNotFoundError" in run_info([tmp_path / "b.npz"], capsys, status=1)
    os.mkfifo(tmp_path / "pipe.npz")
    assert "pipe.npz is no regular file" in run_info([tmp_path / "pipe.npz"], capsys, status=1)
    path.write_bytes(b"nonsense")
    assert "cannot be read as a layer of blockcell" in run_info([path], capsys, status=1)
