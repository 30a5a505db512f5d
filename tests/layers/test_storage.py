"""Weights in fewer bytes: what is stored, against exact arithmetic; the layers that are left; and what it costs."""

# ruff: noqa: E741 (I is the number of inputs, as everywhere)
from __future__ import annotations

import json
import os
import re
from fractions import Fraction

import numpy as np
import pytest
from bits import same
from layer_cases import LAYERS, dense, draw, gru, lstm
from storage_cases import F32, LARGEST, numbers

from blockcell import GRU, LSTM, Bidirectional, Dense, Stack, load
from blockcell.command import cli
from blockcell.layers.storage import narrowed, widened
from blockcell.optable import WEIGHT_STORAGES


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
    if name == "bfloat16":
        return [nearest(w, 8, -133) for w in column]
    scale = max(float32(max(map(abs, column)) / 127), Fraction(2) ** -126)
    while float32(127 * scale) >= 2**128:
        scale -= Fraction(2) ** (127 - 6 - 23)
    codes = [round(float32(w / scale)) for w in column]
    assert all(-127 <= code <= 127 for code in codes)
    return [float32(code * scale) for code in codes]


@pytest.mark.parametrize("name", WEIGHT_STORAGES)
def test_definition(name):
    """Against exact fractions, number for number."""
    for seed in range(12):
        w = numbers(np.random.default_rng(seed), name, (9, 60))
        narrow = narrowed(w, name)
        found = widened(narrow)
        assert narrow.codes.dtype == WEIGHT_STORAGES[name] and found.dtype == F32 and found.shape == w.shape
        expected = [left([*map(Fraction, column.tolist())], name) for column in w.T]
        np.testing.assert_array_equal(found.T, np.array(expected, dtype=np.float64), err_msg=f"seed {seed}")
        if name == "int8":
            assert narrow.scale.dtype == F32 and narrow.scale.shape == (60,)
        else:
            assert narrow.scale is None
            assert (np.signbit(found) == np.signbit(w)).all()  # also of zeros


@pytest.mark.parametrize("name", WEIGHT_STORAGES)
def test_again(name):
    """To store what is left changes no bit, of no number of float32."""
    for seed in range(200):
        g = np.random.default_rng(seed)
        w = numbers(g, name, (int(g.integers(0, 9)), 500))
        first = narrowed(w, name)
        again = narrowed(widened(first), name)
        assert same(first, again), f"seed {seed}"


def test_scales_near_their_least():
    """Every maximum near 127 of the least scale, in steps of one ulp, and columns of subnormal numbers and zeros."""
    start = (F32(127) * np.finfo(F32).smallest_normal).view(np.uint32)
    most = np.concatenate([start + np.arange(-300, 300), np.arange(300), start // 2 + np.arange(300)]).astype(np.uint32)
    w = np.stack([most.view(F32), -most.view(F32) / 2, most.view(F32) / 3])
    narrow = narrowed(w, "int8")
    expected = [left([*map(Fraction, column.tolist())], "int8") for column in w.T]
    np.testing.assert_array_equal(widened(narrow).T, np.array(expected, dtype=np.float64))
    assert (narrow.scale >= np.finfo(F32).smallest_normal).all()
    assert same(narrowed(widened(narrow), "int8"), narrow)


def test_largest_weights():
    """They have the code 127 and come back but for one ulp; those near the largest float32 stay finite."""
    g = np.random.default_rng(0)
    w = np.concatenate([g.standard_normal((50, 3000)), g.uniform(0.98, 1, (50, 3000)) * np.finfo(F32).max], 1).astype(
        F32
    )
    w[0, -1] = np.finfo(F32).max
    narrow = narrowed(w, "int8")
    place = np.abs(w).argmax(axis=0), np.arange(w.shape[1])
    assert (np.abs(narrow.codes[place]) == 127).all()
    np.testing.assert_array_max_ulp(widened(narrow)[place], w[place], 1)
    assert np.isfinite(widened(narrow)).all() and same(narrowed(widened(narrow), "int8"), narrow)
    expected = [left([*map(Fraction, column.tolist())], "int8") for column in w.T[-20:]]
    np.testing.assert_array_equal(widened(narrow).T[-20:], np.array(expected, dtype=np.float64))


def test_zeros():
    """int8 has no negative one, and a column of numbers up to 2**-127 is zeros."""
    least = np.ldexp(F32(1), -127)
    w = np.array([[-0.0, -0.0, least, np.nextafter(least, F32(1))], [127, 0, -least, -least]], F32)
    assert same(widened(narrowed(w, "int8")), np.array([[0, 0, 0, 2 * least], [127, 0, 0, 0]], F32))
    for name in ("float16", "bfloat16"):
        zeros = np.array([[0.0, -0.0]], F32)
        assert same(widened(narrowed(zeros, name)), zeros)


def test_other_layouts():
    w = numbers(np.random.default_rng(0), "float16", (8, 6))
    for name in WEIGHT_STORAGES:
        for other in (np.asfortranarray(w), np.repeat(w, 2, axis=1)[:, ::2]):
            assert same(widened(narrowed(other, name)), widened(narrowed(w, name)))
        assert widened(narrowed(np.zeros((0, 3), F32), name)).shape == (0, 3)


# ------------------------------------------------------------------------------------------------------ what is refused
@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        *((name, value, "expected finite weights") for name in WEIGHT_STORAGES for value in (np.nan, -np.inf)),
        ("float16", 65520.0, "expected a number that float16 holds; int8 holds any"),
        ("bfloat16", float(np.finfo(F32).max), "expected a number that bfloat16 holds; int8 holds any"),
    ],
)
def test_weights_that_cannot_be_stored(name, value, said, tmp_path):
    layer = Stack([LAYERS["bidirectional gru"](3, 4, F32), LSTM.init(8, 4, seed=0)])
    w_c = layer.weights["0.bw.w_c"].copy()
    w_c[3, 1] = value
    layer.set_weights(**{"0.bw.w_c": w_c})
    calls = {"rounded_to": lambda: layer.rounded_to(name), "save": lambda: layer.save(tmp_path / "a.npz", storage=name)}
    for call, run in calls.items():
        with pytest.raises(
            ValueError, match=rf"^Stack.{call}: 0.bw.w_c\[3, 1\] is {re.escape(str(F32(value)))}; {said}"
        ):
            run()
    assert not [*tmp_path.iterdir()]


def test_the_largest_that_can_be_stored():
    for name, value in (("float16", 65519.996), ("bfloat16", float.fromhex("0x1.fefffep127"))):
        assert widened(narrowed(np.full((1, 1), value, F32), name)) == LARGEST[name]


@pytest.mark.parametrize("call", ["rounded_to", "save", "storage_error"])
def test_storages_that_are_none(call, tmp_path):
    def run(layer, name):
        if call == "save":
            layer.save(tmp_path / "a.npz", name)
        elif call == "rounded_to":
            layer.rounded_to(name)
        else:
            layer.storage_error(name, np.zeros((1, 1, 3)))

    for name in ("int4", "float32", "f2", ""):
        with pytest.raises(ValueError, match=f"storage is '{name}'; expected one of 'float16', 'bfloat16', 'int8'"):
            run(GRU.init(3, 4), name)
    for value in (8, np.float16, ["int8"]):
        with pytest.raises(TypeError, match=r"storage is .*; expected one of 'float16', 'bfloat16', 'int8'"):
            run(GRU.init(3, 4), value)
    for dtype in ("float64", "float16"):
        said = f"storage is 'int8' and the layer's dtype {dtype}; expected float32: make a layer of weights.astype"
        with pytest.raises(ValueError, match=said):
            run(GRU.init(3, 4, dtype=dtype), "int8")
    assert not [*tmp_path.iterdir()]


# ----------------------------------------------------------------------------------------------------------- the layers
MORE = {
    "lstm backwards": lambda I, H, dtype: lstm(I, H, dtype, reverse=True, forget_bias=0.5, cell_clip=2.0),
    "both ends": lambda I, H, dtype: Stack(
        [Bidirectional(gru(I, H, dtype), gru(I, H, dtype, 1)), dense(2 * H, 3, dtype, "tanh", last="ends")]
    ),
    "last": lambda I, H, dtype: Dense.init(I, H, seed=3, last=True),
    "nothing": lambda I, H, dtype: LSTM.init(0, 0),
}


@pytest.mark.parametrize("name", WEIGHT_STORAGES)
@pytest.mark.parametrize("kind", [*LAYERS, *MORE])
def test_rounded_to(kind, name):
    """Matrices are as stored, and all else as it was."""
    layer = (LAYERS | MORE)[kind](5, 7, F32)
    before = {key: array.copy() for key, array in layer.weights.items()}
    rounded = layer.rounded_to(name)
    assert type(rounded) is type(layer) and repr(rounded) == repr(layer)
    assert rounded._description() == layer._description()
    assert [*rounded.weights] == [*before]
    for key, array in rounded.weights.items():
        np.testing.assert_array_equal(layer.weights[key], before[key])
        wanted = widened(narrowed(before[key], name)) if array.ndim == 2 else before[key]
        assert array.tobytes() == wanted.tobytes() and array.dtype == F32
        assert array.ndim == 1 or not array.size or not np.array_equal(array, before[key])
    x, state, _, _ = draw(layer, 4, 3, kind) if kind != "nothing" else (np.zeros((4, 3, 0), F32), None, None, None)
    again = rounded.rounded_to(name)
    assert same(again(x, state), rounded(x, state)) and same(again.weights, rounded.weights)


def test_weights_that_are_replaced_meanwhile(monkeypatch):
    """Another thread may do so: all are rounded from the old ones."""
    layer = Stack([GRU.init(3, 4, seed=0), Dense.init(4, 2, seed=1)])
    expected, stored = layer.rounded_to("int8").weights, Stack._stored

    def replacing(self, *arguments):
        layer.set_weights(**{name: array + 1 for name, array in layer.weights.items()})
        return stored(self, *arguments)

    monkeypatch.setattr(Stack, "_stored", replacing)
    assert same(layer.rounded_to("int8").weights, expected)


def test_subclasses():
    class Mine(LSTM):
        pass

    assert type(Mine.init(2, 3, seed=0).rounded_to("int8")) is Mine


# -------------------------------------------------------------------------------------------------------- what it costs
@pytest.mark.parametrize("name", WEIGHT_STORAGES)
@pytest.mark.parametrize("kind", ["lstm", "gru reset after", "stack with dense", "both ends"])
def test_storage_error(kind, name):
    layer = (LAYERS | MORE)[kind](5, 7, F32)
    x, state, lengths, reset = draw(layer, 6, 4, kind)
    cost = layer.storage_error(name, x, state, lengths=lengths, reset=reset)
    y, other = (each(x, state, lengths=lengths, reset=reset)[0] for each in (layer, layer.rounded_to(name)))
    off = other.astype(float) - y
    most, rms = np.abs(off).max(), np.linalg.norm(off) / np.sqrt(off.size)
    found = cost.max, cost.rms, cost.relative_max, cost.relative_rms
    expected = most, rms, most / np.abs(y).max(), rms / np.sqrt(np.mean(y.astype(float) ** 2))
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert 0 < cost.rms < cost.max < 0.1
    itemsize = {"float16": 2, "bfloat16": 2, "int8": 1}[name]
    sizes = [
        array.size * itemsize + 4 * array.shape[1] * (name == "int8") if array.ndim == 2 else array.nbytes
        for array in layer.weights.values()
    ]
    assert cost.nbytes == sum(sizes) and cost.nbytes_float32 == sum(a.nbytes for a in layer.weights.values())
    assert layer.rounded_to(name).storage_error(name, x, state).max == 0
    assert cost.activations == "float32"
    shown = f"StorageError(storage='{name}', max={cost.max:.3g}, rms={cost.rms:.3g}, relative_max="
    assert repr(cost).startswith(shown) and repr(cost).endswith(f"nbytes_float32={cost.nbytes_float32})")


@pytest.mark.parametrize("activations", ["int8", "int16"])
@pytest.mark.parametrize("kind", ["lstm", "gru reset after", "stack with dense", "both ends"])
def test_storage_error_with_activations(kind, activations):
    """It is that of the packed layer, in as many bytes as with float32 activations."""
    layer = (LAYERS | MORE)[kind](5, 7, F32)
    x, state, lengths, reset = draw(layer, 6, 4, kind)
    cost = layer.storage_error("int8", x, state, activations=activations, lengths=lengths, reset=reset)
    plain = layer.storage_error("int8", x, state, lengths=lengths, reset=reset)
    y, other = (
        each(x, state, lengths=lengths, reset=reset)[0].astype(float)
        for each in (layer, layer.packed("int8", activations))
    )
    assert cost.max == np.abs(other - y).max() > 0 and cost.max != plain.max
    assert (cost.storage, cost.activations) == ("int8", activations)
    assert (cost.nbytes, cost.nbytes_float32) == (plain.nbytes, plain.nbytes_float32)
    assert repr(cost).startswith(f"StorageError(storage='int8', activations='{activations}', max={cost.max:.3g}, ")


def test_storage_errors_of_activations_that_do_not_go():
    layer, x = GRU.init(3, 4), np.zeros((1, 1, 3), F32)
    said = "GRU.storage_error: activations is 'int8' and storage 'float16'; expected storage='int8'"
    with pytest.raises(ValueError, match=said):
        layer.storage_error("float16", x, activations="int8")
    with pytest.raises(ValueError, match=r"GRU\.storage_error: activations is 'int4'; expected one of"):
        layer.storage_error("int8", x, activations="int4")


def test_errors_by_hand():
    layer = Dense(np.array([[127, 2.25]] * 1, F32), np.zeros(2, F32))
    cost = layer.storage_error("int8", np.ones((1, 1, 1), F32))
    assert cost.max == cost.relative_max == cost.rms == cost.relative_rms == 0  # a column's largest weight is exact
    layer = Dense(np.array([[127.0], [2.25]], F32), np.zeros(1, F32))
    cost = layer.storage_error("int8", np.array([[[0, 2], [0, 0]]], F32))  # y is 4.5 and 0, and becomes 4 and 0
    assert (cost.max, cost.relative_max) == (0.5, 0.5 / 4.5)
    np.testing.assert_allclose((cost.rms, cost.relative_rms), (0.5 / np.sqrt(2), 0.5 / 4.5), rtol=1e-15)
    assert (cost.nbytes, cost.nbytes_float32) == (2 + 4 + 4, 12)
    layer = Dense(np.array([[127.0], [2.25], [-2.25]], F32), np.zeros(1, F32))
    for x, share in (([0, 0, 0], 0), ([0, 1, 1], 0)):
        assert layer.storage_error("int8", np.array([[x]], F32)).relative_max == share
    layer = Dense(np.array([[127.0], [2.25], [4.5]], F32), np.zeros(1, F32))
    cost = layer.storage_error("int8", np.array([[[0, 2, -1]]], F32))  # y is 0, and becomes 0: 4.5 is halfway as well
    assert (cost.max, cost.relative_max, cost.relative_rms) == (0, 0, 0)
    layer = Dense(np.array([[127.0], [2.25], [6.75]], F32), np.zeros(1, F32))
    cost = layer.storage_error("int8", np.array([[[0, 3, -1]]], F32))  # y is 0, and becomes -1
    assert (cost.max, cost.relative_max, cost.relative_rms) == (1, np.inf, np.inf)
    assert layer.storage_error("int8", np.zeros((0, 1, 3), F32)).max == 0


# ---------------------------------------------------------------------------------------------------------- the command
def said(arguments, capsys, status=0):
    assert cli.main(["info", *map(str, arguments)]) == status
    out, err = capsys.readouterr()
    assert err.count("\n") == (status != 0)
    return err if status else out


def test_info_of_a_layer(tmp_path, capsys):
    path, data = tmp_path / "a.safetensors", tmp_path / "x.npy"
    layer = Stack([LSTM.init(3, 40, seed=0), Dense.init(40, 2, seed=1, last=True)])
    x = np.random.default_rng(1).uniform(-1, 1, (7, 5, 3))
    np.save(data, x)
    layer.save(path)
    out = said([path, "--data", data], capsys)
    assert out.startswith(f"{path}\n") and repr(layer) in out and f"x is {data}" in out
    assert re.search(r"file bytes +" + format(path.stat().st_size, ","), out)
    found = json.loads(said([path, "--data", data, "--json"], capsys))
    assert found["storage"] == "float32" and found["data"] == str(data) and found["layer"] == repr(layer)
    assert found["weights"] == sum(array.size for array in layer.weights.values())
    assert (found["input_size"], found["output_size"], found["refused"]) == (3, 2, {})
    choices = [*((name, "float32") for name in WEIGHT_STORAGES), ("int8", "int8"), ("int8", "int16")]
    for (name, activations), cost in zip(choices, found["storages"], strict=True):
        expected = layer.storage_error(name, x.astype(F32), activations=activations)
        assert cost == expected._asdict() and (cost["storage"], cost["activations"]) == (name, activations)
        label = name if activations == "float32" else f"{name}, activations in {activations}"
        row = next(line for line in out.splitlines() if line.startswith(f"  {label}  "))
        row = row.removeprefix(f"  {label}").split()
        shown = [f"{expected.nbytes:,}", f"{expected.max:.2g}", f"{100 * expected.relative_max:.2g}", "%"]
        assert row == [*shown, f"{expected.rms:.2g}", f"{100 * expected.relative_rms:.2g}", "%"]


def test_info_without_data(tmp_path, capsys):
    """The data are drawn, and the seed is told."""
    path = tmp_path / "a.npz"
    GRU.init(3, 4, seed=0).save(path, "bfloat16")
    found = json.loads(said([path, "--json"], capsys))
    assert found["data"] == "standard normal, (100, 8, 3), seed 0" and found["storage"] == "bfloat16"
    x = np.random.default_rng(0).standard_normal((100, 8, 3)).astype(F32)
    assert found["storages"][2]["max"] == load(path).storage_error("int8", x).max > found["storages"][1]["max"] == 0
    out = said([path], capsys)
    assert re.search(r"storage +bfloat16", out) and "x is standard normal, (100, 8, 3), seed 0" in out


def test_info_of_layers_that_cannot_be_stored_so(tmp_path, capsys):
    path = tmp_path / "a.npz"
    Dense(np.full((2, 1), 1e6, F32), np.zeros(1, F32)).save(path)
    found = json.loads(said([path, "--json"], capsys))
    assert [cost["storage"] for cost in found["storages"]] == ["bfloat16"] + ["int8"] * 3
    assert "w[0, 0] is 1e+06; expected a number that float16 holds" in found["refused"]["float16"]
    assert "Not float16: Dense.storage_error: w[0, 0] is 1e+06" in said([path], capsys)
    Dense(np.full((2, 1), np.nan, F32), np.zeros(1, F32)).save(path)
    assert len(json.loads(said([path, "--json"], capsys))["refused"]) == 3
    assert said([path], capsys).count("expected finite weights") == 3
    Dense(np.ones((2, 1), F32), np.full(1, np.nan, F32)).save(path)
    found = json.loads(said([path, "--json"], capsys))
    assert [cost["relative_max"] for cost in found["storages"]] == [None] * 5
    for dtype in ("float64", "float16"):
        GRU.init(3, 4, dtype=dtype).save(path)
        assert json.loads(said([path, "--json"], capsys))["storages"] == []
        assert "Only weights of float32 layers can be stored in fewer bytes." in said([path], capsys)


def test_errors_of_info(tmp_path, capsys):
    path, data = tmp_path / "a.npz", tmp_path / "x.npy"
    GRU.init(3, 4, seed=0).save(path)
    np.save(data, np.zeros((2, 5)))
    assert "--data is for a saved layer: expected its PATH" in said(["--data", data], capsys, status=2)
    assert "FileNotFoundError" in said([tmp_path / "b.npz"], capsys, status=1)
    assert "x has shape (2, 5); expected (T, B, I) with I=3" in said([path, "--data", data], capsys, status=1)
    assert "is no array of numbers" in said([path, "--data", path], capsys, status=1)
    np.save(data, np.zeros((2, 5, 3), "U1"))
    assert "is no array of numbers" in said([path, "--data", data], capsys, status=1)
    for kind, arguments in ((".npy", [path, "--data"]), (".npz", [])):
        os.mkfifo(tmp_path / f"pipe{kind}")
        assert f"pipe{kind} is no regular file" in said([*arguments, tmp_path / f"pipe{kind}"], capsys, status=1)
    path.write_bytes(b"nonsense")
    assert "cannot be read as a layer of blockcell" in said([path], capsys, status=1)
