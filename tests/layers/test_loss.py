"""The losses against formulas written once more in float64, against differences, and against PyTorch's and Keras's."""

from __future__ import annotations

import math
import os

import numpy as np
import pytest
from forms import byte_swapped
from refusals import refusal

from blockcell import Dense
from blockcell.loss import mean_squared_error, softmax_cross_entropy

DTYPES = [np.float64, np.float32, np.float16]
# Of the gradient and the loss, relative to the largest entry. exp, the sum of up to 12 terms and two divisions take a
# few roundings; float16 is computed in float32 and rounded once, to half an eps.
BOUNDS = {np.float64: 16 * 2.0**-52, np.float32: 16 * 2.0**-23, np.float16: 0.51 * 2.0**-10}
LOSS_BOUNDS = BOUNDS | {np.float16: BOUNDS[np.float32]}


def cross_entropy(logits, labels, counted):
    """One entry at a time, in Python floats."""
    total, grad = 0.0, np.zeros(logits.shape)
    for index in map(tuple, np.argwhere(counted)):
        row, label = [float(value) for value in logits[index]], labels[index]
        powers = [math.exp(value - row[label]) for value in row]
        total += math.log(math.fsum(powers))
        grad[index] = [power / math.fsum(powers) for power in powers]
        grad[index][label] = -math.fsum(powers[:label] + powers[label + 1 :]) / math.fsum(powers)
    n = max(int(counted.sum()), 1)
    return total / n, grad / n


def squared_error(y, target, counted):
    error = np.where(counted[..., None], y.astype(np.float64) - target.astype(np.float64), 0)
    n = max(int(counted.sum()) * y.shape[-1], 1)
    return float(np.sum(error**2)) / n, 2 * error / n


def random_case(name, shape, dtype, rng):
    """The arguments of a loss, read-only."""
    values = rng.normal(0, 2, shape).astype(dtype)
    other = rng.normal(0, 2, shape).astype(dtype)
    if name == "softmax_cross_entropy":
        other = rng.integers(shape[-1], size=shape[:-1])
    values.flags.writeable = other.flags.writeable = False
    return values, other


LOSSES = {
    "softmax_cross_entropy": (softmax_cross_entropy, cross_entropy),
    "mean_squared_error": (mean_squared_error, squared_error),
}
SHAPES = [(5,), (1, 1), (4, 1), (1, 3), (6, 12), (7, 3, 5), (1, 1, 2), (2, 3, 4, 5)]
EMPTY = [(0, 3), (0, 2, 3), (4, 0, 3), (0, 0, 3)]


def compare(results, expected, dtype, message=""):
    (loss, grad), (exact_loss, exact_grad) = results, expected
    assert type(loss) is float and type(grad) is np.ndarray and grad.dtype == dtype and grad.flags.c_contiguous
    assert abs(loss - exact_loss) <= LOSS_BOUNDS[dtype] * max(exact_loss, 1), message
    # half's smallest numbers are further apart than its eps says
    least = 2.0**-25 if dtype == np.float16 else 0
    bound = BOUNDS[dtype] * np.abs(exact_grad).max(initial=0) + least
    np.testing.assert_allclose(grad, exact_grad, rtol=0, atol=bound, err_msg=message)


# --------------------------------------------------------------------------------------------------- values, gradients
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES + EMPTY, ids=str)
def test_formula(shape, dtype, name, seed):
    function, formula = LOSSES[name]
    values, other = random_case(name, shape, dtype, np.random.default_rng([seed, *shape]))
    compare(function(values, other), formula(values, other, np.ones(shape[:-1], bool)), dtype)


@pytest.mark.parametrize("name", LOSSES)
def test_gradient_is_that_of_the_loss(name, seed):
    """Of each entry, by central differences, with a mask and lengths."""
    rng, step = np.random.default_rng(seed), 1e-5
    function, _ = LOSSES[name]
    values, other = random_case(name, (4, 3, 5), np.float64, rng)
    options = {"mask": rng.random((4, 3)) < 0.7, "lengths": rng.integers(1, 5, 3)}
    _, grad = function(values, other, **options)
    for index in np.ndindex(values.shape):
        sides = []
        for sign in (1, -1):
            moved = values.copy()
            moved[index] += sign * step
            sides.append(function(moved, other, **options)[0])
        assert (sides[0] - sides[1]) / (2 * step) == pytest.approx(grad[index], abs=1e-9)


# ---------------------------------------------------------------------------------------------------- masks and lengths
def masks(T, B, rng):
    """Of every kind, each with the lengths that go with it."""
    lengths = rng.integers(0, T + 1, B)
    left = np.arange(T)[:, None] >= T - lengths
    yield "padding on the left", {"mask": left}
    yield "at random", {"mask": rng.random((T, B)) < 0.5}
    yield "lengths", {"lengths": lengths}
    yield "lengths, and a mask", {"mask": rng.random((T, B)) < 0.7, "lengths": lengths.astype(np.uint8)}
    yield "lists", {"mask": left.tolist(), "lengths": lengths.tolist()}
    yield "the last step", {"mask": np.arange(T)[:, None] == np.full(B, T - 1)}
    yield "all", {"mask": np.ones((T, B), bool), "lengths": np.full(B, T)}
    yield "none by lengths", {"lengths": np.zeros(B, int)}
    yield "none by mask", {"mask": np.zeros((T, B), bool)}
    yield "none by both", {"mask": ~left, "lengths": lengths, "full": left}


def counted_by(T, B, mask=True, lengths=None):
    """One entry at a time."""
    row_ends = [T] * B if lengths is None else lengths
    mask = np.broadcast_to(mask, (T, B))
    return np.array([[bool(mask[t, b]) and t < row_ends[b] for b in range(B)] for t in range(T)]).reshape(T, B)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(6, 5, 4), (9, 1, 3), (1, 7, 1)], ids=str)
def test_what_counts(sizes, dtype, name, seed):
    """And NaN, infinity and impossible labels where nothing counts change no bit."""
    function, formula = LOSSES[name]
    T, B, _ = sizes
    rng = np.random.default_rng([seed, *sizes])
    for kind, options in masks(T, B, rng):
        options.pop("full", None)
        counted = counted_by(T, B, **options)
        values, other = random_case(name, sizes, dtype, rng)
        results = function(values, other, **options)
        compare(results, formula(values, other, counted), dtype, kind)
        assert not results[1][~counted].any(), kind
        spoilt, other = values.copy(), other.copy()
        spoilt[~counted] = rng.choice([np.nan, np.inf, -np.inf], (int((~counted).sum()), sizes[-1]))
        other[~counted] = -100 if name == "softmax_cross_entropy" else np.nan
        again = function(spoilt, other, **options)
        assert again[0] == results[0] and again[1].tobytes() == results[1].tobytes(), kind


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("shape", [(4,), (5, 4), (2, 3, 2, 4)], ids=str)
def test_masks_of_other_shapes(shape, name, seed):
    function, formula = LOSSES[name]
    rng = np.random.default_rng([seed, *shape])
    for share in (0, 0.5, 1):
        values, other = random_case(name, shape, np.float64, rng)
        mask = np.asarray(rng.random(shape[:-1]) < share)
        compare(function(values, other, mask=mask), formula(values, other, mask), np.float64, str(share))


def test_empty_lists():
    """numpy makes float64 of them, whatever they should hold."""
    for options in ({}, {"mask": []}):
        for loss, grad in (
            softmax_cross_entropy(np.zeros((0, 3)), [], **options),
            mean_squared_error(np.zeros((0, 3)), np.zeros((0, 3)), **options),
        ):
            assert loss == 0 and grad.shape == (0, 3)
    assert softmax_cross_entropy(np.zeros((2, 0, 3)), [[], []], lengths=[])[0] == 0
    loss, grad = mean_squared_error(np.zeros((3, 0)), np.zeros((3, 0)))
    assert loss == 0 and grad.shape == (3, 0)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_does_not_count_could_be_missing(dtype, name, seed):
    """The same bits as of the entries that count, by themselves."""
    function, _ = LOSSES[name]
    rng = np.random.default_rng(seed)
    values, other = random_case(name, (20, 9, 11), dtype, rng)
    mask = rng.random((20, 9)) < 0.6
    loss, grad = function(values, other, mask=mask)
    alone, alone_grad = function(values[mask], other[mask])
    assert loss == alone
    np.testing.assert_array_equal(grad[mask], alone_grad)


# ----------------------------------------------------------------------------------------------- bits of each number
def by_whole_arrays(logits, labels):
    """By numpy's operations on whole arrays, one after the other: what compiled code must give, bit for bit."""
    z = np.array(logits, np.result_type(logits.dtype, np.float32), order="C").reshape(-1, logits.shape[-1])
    label, n, rows = labels.reshape(-1), max(len(z), 1), np.arange(len(z))
    top = z.argmax(axis=-1)
    z -= z[rows, top, None]
    p = np.exp(z)
    p[rows, top] = 0
    others = p.sum(axis=-1)
    losses = np.log1p(others) - z[rows, label]
    p[rows, top] = 1
    p[rows, label] = np.where(label == top, -others, p[rows, label] - (1 + others))
    p /= ((1 + others) * n)[:, None]
    return float(losses.sum(dtype=np.float64)) / n, p.reshape(logits.shape).astype(logits.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [*SHAPES, *EMPTY, (1, 2), (8, 2), (3, 16), (4, 17), (5, 33), (300, 10), (9000, 3), (40, 1000)], ids=str
)
@pytest.mark.parametrize("kind", ["usual", "ties", "odd"])
def test_same_bits_as_by_whole_arrays(kind, shape, dtype, seed):
    rng = np.random.default_rng([seed, *shape])
    logits = np.asarray(rng.normal(0, 5, shape))
    if kind == "ties":
        logits = np.round(logits / 4)
    elif kind == "odd":
        logits = np.where(rng.random(shape) < 0.15, rng.choice([np.inf, -np.inf, np.nan, -0.0, 1e4], shape), logits)
    logits, labels = logits.astype(dtype), np.asarray(rng.integers(shape[-1], size=shape[:-1]))
    with np.errstate(all="ignore"):
        loss, grad = by_whole_arrays(logits, labels)
        for array in (logits, np.asfortranarray(logits), np.repeat(logits, 2, axis=0)[::2], byte_swapped(logits)):
            for classes in (labels, labels.astype(np.uint8) if shape[-1] < 256 else labels.astype(np.int16)):
                loss_found, grad_found = softmax_cross_entropy(array, classes)
                assert np.float64(loss_found).tobytes() == np.float64(loss).tobytes()
                assert grad_found.tobytes() == grad.tobytes() and grad_found.dtype == dtype


# ------------------------------------------------------------------------------------------------------------- numerics
@pytest.mark.parametrize("dtype", DTYPES)
def test_big_logits(dtype):
    logits = np.array([[1e4, 0, -1e4], [1e4, 1e4, -1e4], [-1e4, -1e4, -1e4]], dtype)
    loss, grad = softmax_cross_entropy(logits, [2, 0, 1])
    assert loss == pytest.approx((2 * float(dtype(1e4)) + math.log(2) + math.log(3)) / 3, rel=1e-6)
    expected = np.array([[1, 0, -1], [-0.5, 0.5, 0], [1 / 3, -2 / 3, 1 / 3]]) / 3
    np.testing.assert_allclose(grad, expected, rtol=0, atol=BOUNDS[dtype])


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_small_losses_keep_their_digits(dtype):
    """Where a label's probability rounds to 1, neither the loss nor its gradient is 0 or an eps."""
    far = float(dtype(40 if dtype == np.float64 else 20))
    loss, grad = softmax_cross_entropy(np.array([[far, 0.0, 0.0]], dtype), [0])
    assert 1 - dtype(2 * math.exp(-far)) == 1
    bound = 8 * float(np.finfo(dtype).eps)
    assert loss == pytest.approx(2 * math.exp(-far), rel=bound)
    np.testing.assert_allclose(grad[0], math.exp(-far) * np.array([-2, 1, 1]), rtol=bound)


def test_infinite_logits():
    """-inf excludes a class; of a label's logit it makes an infinite loss, with a gradient that is none the less."""
    loss, grad = softmax_cross_entropy([[0.0, -np.inf, 0.0], [0.0, -np.inf, 0.0]], [0, 2])
    assert loss == pytest.approx(math.log(2), rel=1e-6)
    np.testing.assert_array_equal(grad, [[-0.25, 0, 0.25], [0.25, 0, -0.25]])
    loss, grad = softmax_cross_entropy([[0.0, -np.inf]], [1])
    assert loss == math.inf
    np.testing.assert_array_equal(grad, [[1, -1]])


@pytest.mark.parametrize("name", LOSSES)
def test_nan_that_counts_is_seen(name, seed):
    function, _ = LOSSES[name]
    values, other = random_case(name, (3, 4), np.float32, np.random.default_rng(seed))
    values = values.copy()
    values[1, 2] = np.nan
    loss, grad = function(values, other)
    assert math.isnan(loss) and np.isnan(grad[1, 2]) and not np.isnan(grad[[0, 2]]).any()


def test_squares_of_half_are_float32():
    """Half could not hold 300 squared."""
    loss, grad = mean_squared_error(np.full((2, 4), 300, np.float16), np.zeros((2, 4), np.float16))
    assert loss == 90000 and (grad == 75).all()


def test_sums_are_of_float64():
    """A float32 that starts with 2^24 stays there however often 1 is added."""
    y = np.ones(100_000, np.float32)
    y[0] = 4096
    assert mean_squared_error(y, np.zeros_like(y))[0] == (2**24 + 99_999) / 100_000
    logits = np.zeros((100_000, 2), np.float32)
    logits[:, 1] = 32
    logits[0, 1] = 2**30  # losses of 32 and 2^30, whose sum is no float32
    assert softmax_cross_entropy(logits, np.zeros(100_000, int))[0] == (2**30 + 32 * 99_999) / 100_000
    assert mean_squared_error(np.full(4, 1e30, np.float32), np.zeros(4, np.float32))[0] == pytest.approx(1e60, rel=1e-6)


# ----------------------------------------------------------------------------------------------------------- the errors
Z, Y = np.zeros((5, 3, 4), np.float32), np.zeros((5, 3), int)


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        (("a", Y), {}, "TypeError: logits is made of <U1; expected an array of real numbers"),
        ((None, Y), {}, "TypeError: logits is None; expected an array of real numbers"),
        ((Z.astype(int), Y), {}, "TypeError: logits has dtype int64; expected float32, float64 or float16"),
        ((1.0, 0), {}, "ValueError: logits has shape (); expected (..., C)"),
        ((Z[..., :0], Y), {}, "ValueError: logits has shape (5, 3, 0); expected (..., C) with at least one class"),
        ((Z, Y.astype(float)), {}, "TypeError: labels has dtype float64; expected integers, the right classes"),
        ((Z, Y == 0), {}, "TypeError: labels has dtype bool; expected integers, the right classes"),
        ((Z, Y.T), {}, "ValueError: labels has shape (3, 5); expected (5, 3), that of logits but for the classes"),
        (
            (Z, Y - np.eye(5, 3, dtype=int)[::-1]),
            {},
            "ValueError: labels[2, 2] is -1; expected 0 to 3, for the 4 classes of logits; mask leaves out what has"
            " no label",
        ),
        (
            (Z[0, 0], 4),
            {},
            "ValueError: labels is 4; expected 0 to 3, for the 4 classes of logits; mask leaves out what has no label",
        ),
        (
            (Z, Y + 4),
            {"lengths": [0, 2, 0]},
            "ValueError: labels[0, 1] is 4; expected 0 to 3, for the 4 classes of logits; mask leaves out what has"
            " no label",
        ),
    ],
)
def test_errors_of_softmax_cross_entropy(arguments, options, said):
    with refusal(said, "softmax_cross_entropy"):
        softmax_cross_entropy(*arguments, **options)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((Z, Z[0]), "ValueError: target has shape (3, 4); expected (5, 3, 4), that of y"),
        (
            (Z, Z.astype(float)),
            "TypeError: target has dtype float64; expected float32, that of y; target.astype(np.float32) converts it",
        ),
        (
            (Z, Y),
            "TypeError: target has dtype int64; expected float32, that of y; target.astype(np.float32) converts it",
        ),
        ((Y, Y), "TypeError: y has dtype int64; expected float32, float64 or float16"),
        ((1.0, 1.0), "ValueError: y has shape (); expected (..., H)"),
        ((Z, None), "TypeError: target is None; expected an array of real numbers"),
    ],
)
def test_errors_of_mean_squared_error(arguments, said):
    with refusal(said, "mean_squared_error"):
        mean_squared_error(*arguments)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(
    ("values", "options", "said"),
    [
        (Z, {"mask": Y}, "TypeError: mask has dtype int64; expected bool, True for what counts: mask != 0 of numbers"),
        (
            Z,
            {"mask": Y.T == 0},
            "ValueError: mask has shape (3, 5); expected (5, 3), that of NAME but for its last axis",
        ),
        (Z, {"mask": True}, "ValueError: mask has shape (); expected (5, 3), that of NAME but for its last axis"),
        (Z, {"lengths": [5, 5, 6]}, "ValueError: lengths[2] is 6; expected 0 to T = 5"),
        (Z, {"lengths": [5, -1, 5]}, "ValueError: lengths[1] is -1; expected 0 to T = 5"),
        (Z, {"lengths": [1.0, 1.0, 1.0]}, "TypeError: lengths has dtype float64; expected integers"),
        (Z, {"lengths": [1] * 5}, "ValueError: lengths has shape (5,); expected (B,) = (3,) with B from NAME"),
        (
            Z[0],
            {"lengths": [1, 1, 1]},
            "ValueError: lengths needs NAME of shape (T, B, LAST), but it has shape (3, 4); use mask",
        ),
    ],
)
def test_errors_of_masks_and_lengths(values, options, said, name):
    function, _ = LOSSES[name]
    first, last, other = "y", "H", values
    if name == "softmax_cross_entropy":
        first, last, other = "logits", "C", np.zeros(values.shape[:-1], int)
    with refusal(said.replace("NAME", first).replace("LAST", last), name):
        function(values, other, **options)


# ------------------------------------------------------------------------------------------------------------- training
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("classes", [2, 10, 1000])
@pytest.mark.parametrize("options", [{}, {"lengths": [2, 3]}, {"mask": np.arange(6).reshape(3, 2) > 2}], ids=str)
def test_probabilities_are_no_logits(dtype, classes, options):
    """What a Dense with softmax gives is warned of, also where rows have ended; its logits are not."""
    g = np.random.default_rng(0)
    x, labels = g.standard_normal((3, 2, 4)).astype(dtype), g.integers(0, classes, (3, 2))
    head = Dense.init(4, classes, seed=1, dtype=dtype)
    probabilities = Dense(**head.weights, activation="softmax")(x, lengths=[3, 2])[0]
    with pytest.warns(UserWarning, match="^softmax_cross_entropy: logits are probabilities, ") as caught:
        value, _ = softmax_cross_entropy(probabilities, labels, **options)
    assert np.isfinite(value) and [message.filename for message in caught] == [__file__]
    softmax_cross_entropy(head(x)[0], labels, **options)


@pytest.mark.parametrize(
    "logits",
    [[[0.0, 1.0]], [[1.0, 0.0], [0.0, 1.0]], [[1.0]], [[0.25, 0.75], [0.25, 0.76]], [[1.5, -0.5]], [[0.3, np.nan]]],
    ids=str,
)
def test_logits_that_are_no_probabilities(logits):
    softmax_cross_entropy(np.array(logits), np.zeros(len(logits), np.intp))


# ------------------------------------------------------------------------------------------------------------ the peers
@pytest.mark.peers
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_against_pytorch(dtype, seed):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(seed)
    bound = {"float64": 1e-14, "float32": 2e-6}[dtype]
    mask = rng.random((7, 5)) < 0.6
    values, labels = random_case("softmax_cross_entropy", (7, 5, 6), dtype, rng)
    theirs = torch.tensor(values, requires_grad=True)
    ignored = torch.tensor(np.where(mask, labels, -100))
    expected = torch.nn.functional.cross_entropy(theirs.reshape(-1, 6), ignored.reshape(-1))
    expected.backward()
    loss, grad = softmax_cross_entropy(values, labels, mask=mask)
    assert loss == pytest.approx(expected.item(), rel=bound)
    np.testing.assert_allclose(grad, theirs.grad.numpy(), rtol=0, atol=bound)

    y, target = random_case("mean_squared_error", (7, 5, 6), dtype, rng)
    theirs = torch.tensor(y, requires_grad=True)
    expected = torch.nn.functional.mse_loss(theirs[torch.tensor(mask)], torch.tensor(target[mask]))
    expected.backward()
    loss, grad = mean_squared_error(y, target, mask=mask)
    assert loss == pytest.approx(expected.item(), rel=bound)
    np.testing.assert_allclose(grad, theirs.grad.numpy(), rtol=0, atol=bound)


@pytest.mark.peers
@pytest.mark.parametrize("name", LOSSES)
def test_against_keras(name, seed):
    """Keras takes masks with the outputs, and the mean over what they leave."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    keras = pytest.importorskip("keras")
    rng = np.random.default_rng(seed)
    mask = rng.random((7, 5)) < 0.6
    values, other = random_case(name, (7, 5, 6), np.float32, rng)
    if name == "softmax_cross_entropy":
        theirs = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    else:
        theirs = keras.losses.MeanSquaredError()
    output = keras.ops.convert_to_tensor(values)
    output._keras_mask = keras.ops.convert_to_tensor(mask)
    expected = float(theirs(keras.ops.convert_to_tensor(other), output))
    assert LOSSES[name][0](values, other, mask=mask)[0] == pytest.approx(expected, rel=4e-6)
