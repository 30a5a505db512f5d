"""Layers quantized to int8: sums, z and steps number for number as in plain numpy; what it costs."""

# ruff: noqa: E741 (I is the number of inputs, as everywhere)
from __future__ import annotations

import numpy as np
import pytest
from bits import same
from layer_formulas import add_product_in_integers, row_codes
from quantization_cases import ROWS

from blockcell import GRU, LSTM, RNN, Dense, _integer, build_info
from blockcell.quantization import quantize_matrix

F32 = np.float32
WAYS = _integer.available_instruction_sets()
KINDS = ["LSTM", "LSTM(w_p)", "LSTM(coupled, w_p)", "GRU", "GRU(reset_after)", "RNN"]


@pytest.fixture(params=WAYS)
def way(request):
    """Every set of instructions that this CPU has, and the stand-ins in C for AMX and AVX-VNNI."""
    before = _integer.in_use()
    _integer.use(request.param)
    yield request.param
    _integer.use(before)


def drawn(rng, *shape):
    """Rows of very different sizes, some of them zero."""
    values = rng.standard_normal(shape).astype(F32)
    return values * (rng.choice([0, 1e-30, 1e-3, 1, 50], (*shape[:-1], 1)).astype(F32))


def layers(rng, I, H):
    seeds = iter(rng.integers(1 << 30, size=6))
    projected = {"proj_size": H // 2 + 2, "proj_clip": 0.2} if H else {}  # one without cells projects nothing
    return {
        "LSTM": LSTM.init(I, H, seed=next(seeds), forget_bias=0.5),
        "GRU": GRU.init(I, H, seed=next(seeds)),
        "GRU(reset_after)": GRU.init(I, H, seed=next(seeds), reset_after=True),
        "LSTM(w_p)": LSTM.init(I, H, seed=next(seeds), use_peephole=True, **projected),
        "LSTM(coupled, w_p)": LSTM.init(I, H, seed=next(seeds), coupled=True, **projected),
        "RNN": RNN.init(I, H, seed=next(seeds), activation="softsign"),
    }


# ------------------------------------------------------------------------------------------------------ the definition
@pytest.mark.parametrize("K", [0, 1, 3, 4, 5, 63, 64, 65, 130, 1000])
def test_sums_are_exact(K, way):
    """Integers for weights and inputs: all scales are 1, and y is the sum of int64 in float32."""
    rng = np.random.default_rng(K)
    w = rng.integers(-127, 128, (K, 70)).astype(F32)
    x = rng.integers(-127, 128, (50, 1, K)).astype(F32)  # rows of several tiles
    w[:1], x[:, :, :1] = 127, 127
    y, _ = Dense(w, np.zeros(70, F32)).quantize("int8")(x)
    rows, columns = x[:, 0].astype(np.int64), w.astype(np.int64)
    assert np.array_equal(y[:, 0], (rows @ columns).astype(F32))
    assert np.array_equal(y[:, 0], add_product_in_integers(np.zeros((50, 70)), rows, columns, np.ones(70)))


@pytest.mark.parametrize("K", [70, 1030])
def test_any_number_of_rows_and_columns(K, way):
    """Every shape of a tile, with K in one block of its sums and in several."""
    rng = np.random.default_rng(K)
    x = drawn(rng, 16, 1, K)
    for columns in (3, 8, 20, 40, 64, 66, 200):
        w, b = rng.standard_normal((K, columns), F32), rng.standard_normal(columns, F32)
        layer, (codes, scale) = Dense(w, b).quantize("int8"), quantize_matrix(w, "int8")
        expected = add_product_in_integers(np.tile(b, (16, 1)), x[:, 0], codes, scale)
        for rows in range(1, 17):
            assert same(layer(x[:rows])[0][:, 0], expected[:rows]), (columns, rows)


@pytest.mark.parametrize("K", [0, 3])
def test_a_negative_zero_and_a_sum_of_zero_are_zero(K, way):
    """As the equation says, also where there is nothing to add up."""
    w, b, x = np.zeros((K, 3), F32), np.full(3, -0.0, F32), np.zeros((2, 1, K), F32)
    y, _ = Dense(w, b).quantize("int8")(x)
    expected = add_product_in_integers(np.stack([b, b]), x[:, 0], w, np.ones(3))
    assert same((y[:, 0], expected), (np.zeros((2, 3), F32),) * 2)


def test_the_largest_sums_are_exact(way):
    """All codes at their ends, for more values of k than fit into one sum of 32 bits; nor does 128 times the sum of a
    row's codes, and where that overflows, `sanitizers.py memory` sees it.  Other rows and columns are drawn, so that
    it matters which codes are multiplied, and these columns fill more than a line of a panel."""
    K = 2 * 65536 + 2000
    x = np.full((3, 1, K), 127, F32)
    x[1] = -127
    w = np.full((K, 20), 127, F32)
    w[:, 1] = -127
    rng = np.random.default_rng(K)
    x[2, :, 1:], w[1:, 2:] = rng.integers(-127, 128, K - 1), rng.integers(-127, 128, (K - 1, 18))
    y, _ = Dense(w, np.zeros(20, F32)).quantize("int8")(x)
    expected = add_product_in_integers(np.zeros((3, 20)), x[:, 0], w, np.ones(20))
    assert np.array_equal(y[:, 0], expected)
    np.testing.assert_allclose(expected, x[:, 0].astype(float) @ w, rtol=1e-6)


def test_rows_of_any_numbers_are_those_of_the_formulas(way):
    """Without a bias, beside which small ones would not show."""
    rows, w = np.array([*ROWS.values()], F32), np.random.default_rng(6).standard_normal((5, 40)).astype(F32)
    y, _ = Dense(w, np.zeros(40, F32)).quantize("int8")(rows[:, None])
    codes, scale = quantize_matrix(w, "int8")
    with np.errstate(all="ignore"):
        expected = add_product_in_integers(np.zeros((len(rows), 40), F32), rows, codes, scale)
    assert np.array_equal(y[:, 0], expected, equal_nan=True)
    assert (y[[*ROWS].index("least scale"), 0] != 0).any()


def zero_layer(layer, **biases):
    """One of the same kind whose z are the biases: what the cell makes of them."""
    weights = {name: np.zeros_like(w) for name, w in layer.weights.items()} | biases
    names = {LSTM: ("forget_bias", "proj_clip", "coupled"), GRU: ("reset_after",), RNN: ("activation",)}[type(layer)]
    return type(layer)(**weights, **{name: getattr(layer, name) for name in names})


def step_of(layer, x, state):
    """A step of one row [I]: z by the formulas, and of z what the float32 layer's cell makes."""
    I, w = layer.input_size, layer.weights
    stored = {name: quantize_matrix(matrix, "int8") for name, matrix in w.items() if matrix.ndim == 2}

    def product(z, rows, name, of_x):
        codes, scale = stored[name]
        return add_product_in_integers(z, rows, codes[:I] if of_x else codes[I:], scale)

    def both(bias, name, h):
        return product(product(bias[None], x[None], name, True), h, name, False)[0]

    nothing = np.zeros((1, 1, I), F32)
    if isinstance(layer, RNN):
        return zero_layer(layer, b=both(w["b"], "w", state.h))(nothing, state)[1]
    if isinstance(layer, LSTM):
        peepholes = {name: array for name, array in w.items() if name.startswith("wc")}
        cell = zero_layer(layer, b=both(w["b"], "w", state.h), **peepholes)
        if "w_p" not in w:
            return cell(nothing, state)[1]
        _, after, tape = cell.forward(nothing, state)
        _, _, _, o, _, co = tape.content.saved[:, 0]
        codes, scale = stored["w_p"]
        h = add_product_in_integers(np.zeros((1, len(scale)), F32), o * co, codes, scale)
        return type(after)(after.cs, np.clip(h, -F32(layer.proj_clip), F32(layer.proj_clip)))
    gates = both(w["b_ru"], "w_ru", state.h)
    if layer.reset_after:
        b_c = product(w["b_c"][None], x[None], "w_c", True)[0]
        b_hc = product(w["b_hc"][None], state.h, "w_c", False)[0]
        return zero_layer(layer, b_ru=gates, b_c=b_c, b_hc=b_hc)(nothing, state)[1]
    H = layer.hidden_size
    r = zero_layer(layer, b_ru=np.r_[gates[:H], np.full(H, 100, F32)], b_c=np.zeros(H, F32))
    r = r.forward(nothing, state)[2].content.saved[0][0]
    candidate = both(w["b_c"], "w_c", state.h * r)
    return zero_layer(layer, b_ru=gates, b_c=candidate)(nothing, state)[1]


@pytest.mark.meet(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("I, H", [(1, 3), (5, 16), (70, 37)])
def test_every_step_is_that_of_the_formulas(kind, I, H, way):
    rng = np.random.default_rng([I, H])
    layer = layers(rng, I, H)[kind]
    layer.set_weights(
        **{name: w + F32(0.3) * rng.standard_normal(w.shape).astype(F32) for name, w in layer.weights.items()}
    )
    x, stream = drawn(rng, 4, 2, I), layer.quantize("int8").stream(2)
    for t in range(4):
        before = stream.state
        stream.step(x[t])
        for b in range(2):
            expected = step_of(layer, x[t, b], type(before)(*(part[b : b + 1] for part in before)))
            assert same(expected, type(before)(*(part[b : b + 1] for part in stream.state))), f"step {t}, row {b}"


def test_codes_of_rows():
    rows = np.array(
        [[127, -1.5, 0.5, 2.5], [0, 0, 0, 0], [1e-45, 0, -1e-45, 0], [np.inf, 1, 2, 3], [np.nan, 1, 2, 3]], F32
    )
    codes, scale = row_codes(rows)
    assert codes[0].tolist() == [127, -2, 0, 2] and codes[1:].tolist() == [[0] * 4] * 4
    assert scale[:3].tolist() == [1, 2.0**-126, 2.0**-126] and np.isnan(scale[3:]).all()


@pytest.mark.meet(2)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_stays_in_its_row(kind, bad, way):
    rng = np.random.default_rng(4)
    quantized = layers(rng, 5, 18)[kind].quantize("int8")
    x, reset = rng.standard_normal((6, 4, 5)).astype(F32), np.zeros((6, 4), bool)
    reset[4, 1] = True
    good, _ = quantized(x, reset=reset)
    x[2, 1, 3] = bad
    y, _ = quantized(x, reset=reset)
    assert np.isnan(y[2:4, 1]).all()
    y[2:4, 1] = good[2:4, 1]
    assert same(y, good)


# -------------------------------------------------------------------------------------------------------- what it costs
@pytest.mark.parametrize("kind", KINDS)
def test_error(kind):
    """Rounding rows, too, costs less than as much again as rounding the weights."""
    rng = np.random.default_rng(5)
    layer = layers(rng, 64, 96)[kind]
    x = rng.standard_normal((30, 8, 64)).astype(F32)
    exact, quantized = layer(x)[0].astype(float), layer.quantize("int8")

    def error(y):
        return np.sqrt(np.square(y - exact).mean() / np.square(exact).mean())

    weights = error(quantized.dequantize()(x)[0])
    assert weights < error(quantized(x)[0]) < 2 * weights


def test_what_is_reported():
    assert build_info()["integer_products"] == _integer.in_use()


@pytest.mark.parametrize("I, H", [(0, 5), (3, 0), (0, 0)])
def test_sizes_of_zero(I, H):
    x = np.ones((2, 3, I), F32)
    for layer in layers(np.random.default_rng(1), I, H).values():
        for scheme in ("int8", "float16"):
            y, _ = layer.quantize(scheme)(x)
            assert y.shape == (2, 3, layer.output_size) and np.isfinite(y).all()
