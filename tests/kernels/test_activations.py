"""Activations and half precision of the kernels, at every CPU level, against the true values."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache

import mpmath
import numpy as np
import pytest
from kernel_cases import for_tests

from blockcell._kernels import available_levels
from blockcell.activations import PARAMETERS, canonical, numbers
from blockcell.formulas import SELU, activated, slope

LANES = {np.float32: 16, np.float64: 8}  # a kernel's line
MOST_ULP = 2

at_every_level = pytest.mark.parametrize("level", available_levels())
of_both = pytest.mark.parametrize("name", ["sigmoid", "tanh"])
in_both_types = pytest.mark.parametrize("dtype", LANES, ids=["float32", "float64"])


def call(level, name, x, dtype=None, **options):
    """The function's values, from an array whose end is guarded."""
    guarded = np.full(x.size + 32, 77, dtype or x.dtype)
    getattr(for_tests(level, x.dtype), name)(x, guarded[: x.size], **options)
    assert (guarded[x.size :] == 77).all()
    return guarded[: x.size]


def activate(level, activation, x, **options):
    return call(level, "activate", x, activation=numbers(canonical("activation", activation)), **options)


def codes(x):
    return x.view(f"u{x.itemsize}")


def near(values, dtype, reach=2):
    """The values of a type next to given ones, both signs."""
    values = np.abs(np.asarray(values, np.float64)).astype(dtype)
    steps = np.arange(-reach, reach + 1).astype(f"i{values.itemsize}")
    close = (codes(values)[:, None].astype(steps.dtype) + steps).clip(0).ravel().view(dtype)
    return np.concatenate([close, -close])


def thresholds(dtype):
    """Where the functions switch: clamps, and multiples of log(2), as the exponential is a power of two and a rest."""
    info = np.finfo(dtype)
    clamps = {np.float32: [110, 40, 9.1], np.float64: [760, 40, 20]}[dtype]
    switches = np.concatenate([clamps, np.arange(0, 1100, 0.25) * np.log(2)])
    exact = [0, info.smallest_subnormal, info.smallest_normal, info.eps, 0.5, 1, 2]
    return np.concatenate([near(switches, dtype), near(exact, dtype), near([info.max], dtype, reach=0)])


def last_place(true, dtype):
    """The unit in the last place of a number of `dtype`, subnormal ones included, at float64 values."""
    info = np.finfo(dtype)
    power_of_two = (true.view(np.uint64) & np.uint64(0x7FF << 52)).view(np.float64)
    return np.maximum(power_of_two * float(info.eps), float(info.smallest_subnormal))


def errors(name, x, values):
    """In ulp of the true value; infinite where NaN, a limit or a sign is wrong."""
    assert values.dtype == x.dtype == np.float32
    with np.errstate(over="ignore", invalid="ignore"):
        true = activated(x, name)
        error = np.abs(values - true) / last_place(true, np.float32)
    right_sign = np.signbit(values) == np.signbit(true)
    return np.where(np.isnan(x), np.where(np.isnan(values), 0, np.inf), np.where(right_sign, error, np.inf))


@cache
def float32_sample():
    """Every 1021st bit pattern, both zeros and infinities, NaNs, and what surrounds the thresholds."""
    patterns = np.arange(0, 2**32, 1021, np.uint32).view(np.float32)
    nan = np.array([0x7F800001, 0x7FC00000, 0xFF800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    return np.concatenate([patterns, nan, np.float32([np.inf, -np.inf]), thresholds(np.float32)])


@pytest.mark.slow
@of_both
def test_exhaustive(name, capsys):
    """Every float32 there is."""
    chunk = 2**20

    def worst_of(start):
        x = np.arange(start, start + chunk, dtype=np.uint32).view(np.float32)
        worst = []
        for level in available_levels():
            error = errors(name, x, activate(level, name, x))
            worst.append((error.max(), x[error.argmax()]))
        return worst

    with ThreadPoolExecutor() as pool:
        worst = [max(chunks) for chunks in zip(*pool.map(worst_of, range(0, 2**32, chunk)), strict=True)]
    with capsys.disabled():
        for level, (error, x) in zip(available_levels(), worst, strict=True):
            print(f"\n{name} at {level}: at most {error:.4f} ulp, at {x!r}", end="")
    assert max(worst)[0] <= MOST_ULP


@cache
def float64_sample():
    g = np.random.default_rng(2)
    tiny = np.exp(g.uniform(np.log(5e-324), 0, 400))
    x = np.concatenate([tiny, np.exp(g.uniform(-3, 7, 1500)), g.uniform(0, 3, 1000), g.uniform(700, 750, 200)])
    return np.concatenate([x, -x, g.choice(thresholds(np.float64), 1500, replace=False)])


@at_every_level
@in_both_types
def test_special_values(level, dtype):
    info = np.finfo(dtype)
    x = np.array([0.0, -0.0, np.inf, -np.inf, info.max, info.min, np.nan, -np.nan], dtype)
    expected = np.array([0.5, 0.5, 1, 0, 1, 0, np.nan, np.nan], dtype)
    np.testing.assert_array_equal(activate(level, "sigmoid", x), expected)
    tanh = activate(level, "tanh", x)
    np.testing.assert_array_equal(tanh, np.array([0.0, -0.0, 1, -1, 1, -1, np.nan, np.nan], dtype))
    np.testing.assert_array_equal(np.signbit(tanh[:6]), np.signbit(x[:6]))
    tiny = near([info.smallest_subnormal, info.smallest_normal, info.smallest_normal * 1000, info.eps**2], dtype)
    np.testing.assert_array_equal(codes(activate(level, "tanh", tiny)), codes(tiny))


@at_every_level
@of_both
@in_both_types
def test_position(level, name, dtype):
    """Nothing about a result depends on the lane, the tail, the neighbours or the threads."""
    lanes = LANES[dtype]
    x = np.random.default_rng(3).normal(0, 8, 3 * lanes).astype(dtype)
    expected = codes(activate(level, name, x))
    for start in range(lanes + 1):
        for stop in range(start, x.size + 1):
            np.testing.assert_array_equal(codes(activate(level, name, x[start:stop])), expected[start:stop])
    many = np.tile(x, 1000)
    np.testing.assert_array_equal(codes(activate(level, name, many, num_threads=3)), np.tile(expected, 1000))


# ---------------------------------------------------------------------------------------------- those of cells, by name
MORE = [*PARAMETERS, ("leaky_relu", 0.01), ("elu", 0.75), ("hard_sigmoid", 0.2, 0.5)]
named = pytest.mark.parametrize("activation", MORE, ids=str)
ULP = {"selu": 4, "elu": 3, "softplus": 3}
OF_MPMATH = {
    "sigmoid": lambda z: 1 / (1 + mpmath.exp(-z)),
    "tanh": mpmath.tanh,
    "elu": lambda z, a: z if z > 0 else a * mpmath.expm1(z),
    "selu": lambda z: mpmath.mpf(SELU[0]) * (z if z > 0 else mpmath.mpf(SELU[1]) * mpmath.expm1(z)),
    "softplus": lambda z: mpmath.log1p(mpmath.exp(z)),
    "softsign": lambda z: z / (1 + abs(z)),
    "exponential": mpmath.exp,
}


@at_every_level
@named
def test_float32_of(activation, level):
    x = float32_sample()
    with np.errstate(over="ignore", invalid="ignore"):
        true = activated(x, activation)
        y = activate(level, activation, x)
        name = activation if isinstance(activation, str) else activation[0]
        # The sum in a hard_sigmoid may be about 0.
        ulp = np.finfo(np.float32).eps if name == "hard_sigmoid" else last_place(true, np.float32)
        error = np.abs(y - true) / ulp
        exact = (y == true.astype(np.float32)) | (np.isnan(y) & np.isnan(true))  # infinities and NaN too
    error = np.where(exact, 0, np.where(np.isnan(error), np.inf, error))
    worst = error.argmax()
    assert error[worst] <= ULP.get(name, MOST_ULP), f"{error[worst]:.3f} ulp at {x[worst]!r}"


@cache
def float64_truth(name):
    """The true values as sums of two float64."""
    with mpmath.workprec(200):
        true = [OF_MPMATH[name](mpmath.mpf(float(x)), *PARAMETERS[name].values()) for x in float64_sample()]
        high = [float(y) for y in true]
        low = [float(y - h) if np.isfinite(h) else 0.0 for y, h in zip(true, high, strict=True)]
        return np.array(high), np.array(low)


@at_every_level
@pytest.mark.parametrize("name", OF_MPMATH)
def test_float64(name, level):
    x, (high, low) = float64_sample(), float64_truth(name)
    y = activate(level, name, x)
    assert np.array_equal(np.isinf(y), np.isinf(high))
    finite = np.isfinite(high)
    error = np.abs(y[finite] - high[finite] - low[finite]) / last_place(high[finite], np.float64)
    worst = error.argmax()
    assert error[worst] <= ULP.get(name, MOST_ULP), f"{error[worst]:.3f} ulp at {x[finite][worst]!r}"


@at_every_level
@in_both_types
@named
def test_slopes(activation, dtype, level):
    """At values that the activation takes, and at NaN; where both sides of a kink meet it is 0, or that of the left."""
    y = activated(np.linspace(-5, 5, 1001), activation).astype(dtype)
    y = np.concatenate([y, np.array([0, -0.0, np.nan], dtype)])
    result, expected = activate(level, activation, y, derivative=True), slope(y, activation)
    assert np.array_equal(np.isnan(result), np.isnan(expected))
    largest = np.nanmax(np.abs(expected))
    assert np.nanmax(np.abs(result - expected)) <= 2 * np.finfo(dtype).eps * largest
    if activation in ("relu", "hard_sigmoid"):
        assert result[np.isin(y, [0, 1] if activation == "hard_sigmoid" else [0])].max() == 0


@named
def test_slopes_are_derivatives(activation):
    """Of the formulas, by differences that cross no kink."""
    z = np.linspace(-6, 6, 481) + 1 / 300
    z = z[np.min([np.abs(np.abs(z) - kink) for kink in (0, 2.5, 3)], axis=0) > 0.001]
    difference = (activated(z + 1e-5, activation) - activated(z - 1e-5, activation)) / 2e-5
    np.testing.assert_allclose(slope(activated(z, activation), activation), difference, rtol=1e-8, atol=1e-9)


@named
@at_every_level
@in_both_types
def test_special_values_of(activation, level, dtype):
    """NaN stays NaN, but where a slope does not depend on it; infinities are numpy's."""
    x = np.array([np.inf, -np.inf, np.nan, -np.nan, 0.0], dtype)
    with np.errstate(invalid="ignore"):
        expected = activated(x, activation)
    np.testing.assert_allclose(activate(level, activation, x), expected, rtol=1e-6)


ALL_HALVES = np.arange(2**16, dtype=np.uint16)


@at_every_level
def test_from_half(level):
    values = call(level, "from_half", ALL_HALVES, np.float32)
    with np.errstate(invalid="ignore"):  # some CPUs say so of signaling NaNs
        expected = ALL_HALVES.view(np.float16).astype(np.float32)
    nan = np.isnan(expected)
    np.testing.assert_array_equal(codes(values)[~nan], codes(expected)[~nan])
    np.testing.assert_array_equal(np.isnan(values), nan)


def to_half(level, x):
    return call(level, "to_half", x, np.uint16).view(np.float16)


@at_every_level
def test_to_half(level):
    """All halves, the floats on and next to the middle of two halves, and every 1021st float."""
    with np.errstate(invalid="ignore"):
        halves = ALL_HALVES.view(np.float16).astype(np.float32)
    lower = np.arange(0x7C00, dtype=np.uint16)
    upper = (lower + 1).view(np.float16).astype(np.float64)
    upper[-1] = 65536  # what would follow the largest half
    middles = near((lower.view(np.float16).astype(np.float64) + upper) / 2, np.float32)
    x = np.concatenate([halves, middles, float32_sample()])
    with np.errstate(over="ignore", invalid="ignore"):
        expected = x.astype(np.float16)
    result = to_half(level, x)
    nan = np.isnan(x)
    np.testing.assert_array_equal(codes(result)[~nan], codes(expected)[~nan])
    np.testing.assert_array_equal(codes(result)[nan], np.where(np.signbit(x[nan]), 0xFE00, 0x7E00))  # nothing carried
    for start in range(17):
        np.testing.assert_array_equal(codes(to_half(level, halves[start : start + 40])), ALL_HALVES[start : start + 40])
