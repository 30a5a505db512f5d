"""The optimizers against their equations in numpy, bit for bit, and against PyTorch's and Keras's."""

from __future__ import annotations

import inspect
import math
import os
from types import MappingProxyType

import numpy as np
import pytest
from refusals import refusal

from blockcell import LSTM, _training, optim

STEPS = 6
SHAPES = {"w": (3, 4), "fw.b": (4,), "scalar": (), "empty": (0, 2)}


def problem(dtype, seed=0):
    rng = np.random.default_rng(seed)
    weights = {name: np.asarray(rng.standard_normal(shape), dtype) for name, shape in SHAPES.items()}
    grads = [
        {name: np.asarray(rng.standard_normal(shape), dtype) for name, shape in SHAPES.items()} for _ in range(STEPS)
    ]
    for arrays in (weights, *grads):
        for array in arrays.values():
            array.flags.writeable = False
    return weights, grads


def train(name, weights, grads, **settings):
    state = None
    for step in grads:
        weights, state = getattr(optim, name)(weights, step, state, **settings)
    return weights, state


CASES = [
    ("sgd", {"learning_rate": 0.1}),
    ("momentum", {"learning_rate": 0.1}),
    ("momentum", {"learning_rate": 0.02, "momentum": 0.5}),
    ("adam", {}),
    ("adam", {"learning_rate": 0.1, "beta1": 0.8, "beta2": 0.95, "epsilon": 0.01}),
]


def test_rows_are_those_of_the_functions():
    """A row has the keyword arguments of its function, and there is a case for each."""
    assert {*optim.OPTIMIZERS} == {*optim.__all__} - {"clip_global_norm"} == {name for name, _ in CASES}
    for name, row in optim.OPTIMIZERS.items():
        parameters = inspect.signature(row.function).parameters
        assert row.function is getattr(optim, name)
        assert [*parameters] == ["weights", "grads", "state", *row.settings]


def test_state_is_flat_and_can_be_saved(tmp_path):
    """A run that is saved in the middle goes on as if it had not been."""
    weights, grads = problem(np.float32)
    expected, _ = train("adam", weights, grads)
    weights, state = train("adam", weights, grads[:3])
    assert sorted(state) == sorted(["step"] + [f"{slot}.{name}" for slot in "mv" for name in SHAPES])
    assert state["step"] == 3 and all(isinstance(value, np.ndarray) for value in state.values())
    np.savez(tmp_path / "state.npz", **state)
    with np.load(tmp_path / "state.npz") as saved:
        state = dict(saved)
    for step in grads[3:]:
        weights, state = optim.adam(weights, step, state)
    for name, value in expected.items():
        np.testing.assert_array_equal(weights[name], value)


@pytest.mark.parametrize("kind", [np.longlong, np.ulonglong, np.int8, np.uint32, int])
def test_counts_of_any_integers(kind):
    """C's long long too, which is another type than int64 where it has as many bytes."""
    weights, grads = problem(np.float32)
    right, expected = train("adam", weights, grads[:2])
    weights, state = train("adam", weights, grads[:1])
    weights, state = optim.adam(weights, grads[1], state | {"step": np.asarray(kind(1))})
    assert bits(weights) == bits(right) and bits(state) == bits(expected)


def test_half_weights_learn_from_small_gradients():
    """1e-4 squared is nothing in half, where v would stay 0."""
    weights, _ = optim.adam({"w": np.ones(1, np.float16)}, {"w": np.full(1, 1e-4, np.float16)}, learning_rate=0.25)
    assert weights["w"] == np.float16(0.75)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_clip_global_norm(dtype):
    grads = {"a": np.array([[3.0, 0.0]], dtype), "b": np.array([-4.0], dtype), "none": np.zeros((0, 3), dtype)}
    clipped, norm = optim.clip_global_norm(grads, 2.5)
    assert norm == 5 and isinstance(norm, float)
    for name, value in grads.items():
        assert clipped[name].dtype == dtype
        np.testing.assert_array_equal(clipped[name], value / 2)
    assert grads["b"] == -4
    for limit in (5, 7.0):
        unchanged, norm = optim.clip_global_norm(grads, limit)
        assert norm == 5 and unchanged["a"] is not grads["a"]
        np.testing.assert_array_equal(unchanged["a"], grads["a"])


def test_norm_does_not_overflow():
    clipped, norm = optim.clip_global_norm({"a": np.full(4, 60000, np.float16)}, 1)
    assert norm == 120000 and np.all(clipped["a"] == np.float16(0.5))
    _, norm = optim.clip_global_norm({"a": np.full(4, 1e30, np.float32)}, 1)
    assert norm == pytest.approx(2e30, rel=1e-6)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_norm_that_is_not_finite(bad):
    clipped, norm = optim.clip_global_norm({"a": np.array([1.0, bad]), "b": np.ones(2)}, 1)
    assert not math.isfinite(norm) and all(np.isnan(value).all() for value in clipped.values())
    assert optim.clip_global_norm({}, 1) == ({}, 0.0)


W = {"w": np.ones(2, np.float32)}


# ----------------------------------------------------------------------------------------------- bits of each number
def by_arrays(name, weights, grads, state, **settings):
    """One step by numpy's operations on whole arrays, one after the other; compiled code must give the same bits."""
    new, after = {}, {}
    if name == "adam":
        after["step"] = np.asarray((state or {"step": 0})["step"] + 1, np.int64)
    for key, weight in weights.items():
        dtype = np.result_type(weight.dtype, np.float32)
        w, g = weight.astype(dtype), grads[key].astype(dtype)

        def before(slot, key=key, w=w):
            return state[f"{slot}.{key}"] if state else np.zeros_like(w)

        rate = settings.get("learning_rate", 0.001)
        if name == "sgd":
            change = rate * g
        elif name == "momentum":
            after[f"velocity.{key}"] = velocity = settings.get("momentum", 0.9) * before("velocity") + g
            change = rate * velocity
        else:
            beta1, beta2 = settings.get("beta1", 0.9), settings.get("beta2", 0.999)
            small, t = settings.get("epsilon", 1e-8), int(after["step"])
            after[f"m.{key}"] = m = beta1 * before("m") + (1 - beta1) * g
            after[f"v.{key}"] = v = beta2 * before("v") + (1 - beta2) * g * g
            size = np.sqrt(v / (1 - beta2**t)) + small
            if small == 0:
                size = np.where(size == 0, np.inf, size)
            change = rate / (1 - beta1**t) * m / size
        new[key] = np.asarray(w - change, weight.dtype)
    return new, after


def bits(arrays):
    return {key: (value.dtype, value.shape, value.tobytes()) for key, value in arrays.items()}


SIZES = [(), (1,), (3,), (2, 0), (5, 7), (17, 64), (16,), (3, 33, 5), (70000,)]  # a large one runs without the GIL


def arrays_of(kind, dtype, rng):
    arrays = {}
    for k, shape in enumerate(SIZES):
        values = np.asarray(rng.standard_normal(shape) * 10.0 ** rng.integers(-6, 3, shape))
        if kind == "odd" and values.size:
            values[rng.random(shape) < 0.3] = 0
            values[rng.random(shape) < 0.1] = rng.choice([np.inf, -np.inf, np.nan, 1e-42, -0.0])
        arrays[f"{k}.w"] = np.asarray(values, dtype)
    return arrays


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
@pytest.mark.parametrize("kind", ["usual", "odd"])
@pytest.mark.parametrize(
    ("name", "settings"),
    [*CASES, ("adam", {"epsilon": 0}), ("adam", {"epsilon": 1e-60, "beta1": 0}), ("sgd", {"learning_rate": 0})],
)
def test_same_bits_as_by_whole_arrays(name, settings, kind, dtype):
    rng = np.random.default_rng(0)
    weights = expected = arrays_of("usual", dtype, rng)
    state = expected_state = None
    with np.errstate(all="ignore"):
        for _ in range(4):
            grads = arrays_of(kind, dtype, rng)
            weights, state = getattr(optim, name)(weights, grads, state, **settings)
            expected, expected_state = by_arrays(name, expected, grads, expected_state, **settings)
            assert bits(weights) == bits(expected) and bits(state) == bits(expected_state)
            assert [*state] == [*expected_state]


def test_weights_of_a_layer_need_no_conversion():
    layer = LSTM.init(3, 4, seed=0)
    grads = {name: np.ones_like(w) for name, w in layer.weights.items()}
    expected = bits(optim.sgd(dict(layer.weights), grads, learning_rate=0.1)[0])
    step = _training.sgd(layer.weights, grads, None, 0.1)
    assert step is not None and bits(step[0]) == bits(optim.sgd(layer.weights, grads, learning_rate=0.1)[0]) == expected


@pytest.mark.parametrize("name", optim.OPTIMIZERS)
def test_arrays_that_have_to_be_converted(name):
    """Of any layout, kind and mixture of dtypes: the bits of contiguous ones."""
    rng, function = np.random.default_rng(0), getattr(optim, name)
    plain = {
        "a": rng.standard_normal((6, 5)).astype(np.float32),
        "b": rng.standard_normal(8),
        "c": rng.standard_normal(4).astype(np.float16),
        "d": rng.standard_normal(3),
    }

    def turned(arrays):
        raw = np.zeros(65, np.uint8)[1:].view(np.float64)  # not aligned
        raw[:] = arrays["b"]
        return MappingProxyType(
            {"a": np.asfortranarray(arrays["a"]), "b": raw, "c": arrays["c"][::-1][::-1], "d": arrays["d"].tolist()}
        )

    grads = [{key: np.asarray(rng.standard_normal(w.shape), w.dtype) for key, w in plain.items()} for _ in range(3)]
    expected, expected_state, weights, state = plain, None, plain, None
    for step in grads:
        expected, expected_state = function(expected, step, expected_state, learning_rate=0.1)
        weights, state = function(turned(weights), turned(step), state, learning_rate=0.1)
        assert bits(weights) == bits(expected) and bits(state) == bits(expected_state)
        state = MappingProxyType(
            {key: np.asfortranarray(value) if value.ndim else int(value) for key, value in state.items()}
        )
    mixed, _ = function({"a": plain["a"]}, {"a": grads[0]["a"].astype(np.float16)}, learning_rate=0.1)
    wide, _ = function({"a": plain["a"]}, {"a": grads[0]["a"].astype(np.float16).astype(np.float32)}, learning_rate=0.1)
    assert bits(mixed) == bits(wide)


def test_an_empty_state_is_none():
    for function in (row.function for row in optim.OPTIMIZERS.values()):
        assert bits(function(W, W, {}, learning_rate=0.1)[0]) == bits(function(W, W, learning_rate=0.1)[0])


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: optim.sgd(W, {}, learning_rate=1), "ValueError: missing ['w'], unknown []"),
        (lambda: optim.sgd(W, W | {"b": np.ones(1)}, learning_rate=1), "ValueError: missing [], unknown ['b']"),
        (lambda: optim.sgd(W, {"w": np.ones(1)}, learning_rate=1), "ValueError: grads['w'] has shape (1,)"),
        (lambda: optim.sgd([1], W, learning_rate=1), "TypeError: weights is of type list; expected a dict"),
        (lambda: optim.sgd(W, {"w": [1, 2]}, learning_rate=1), "TypeError: grads['w'] has dtype int64"),
        (lambda: optim.sgd(W, W, learning_rate=-1), "ValueError: sgd: learning_rate is -1; expected 0 <= learn"),
        (lambda: optim.sgd(W, W, learning_rate=math.nan), "ValueError: learning_rate is nan"),
        (lambda: optim.sgd(W, W, learning_rate="1"), "TypeError: learning_rate is of type str"),
        (lambda: optim.sgd(W, W, 0.1, learning_rate=1), "TypeError: state is of type float"),
        (lambda: optim.momentum(W, W, learning_rate=1, momentum=1), "ValueError: expected 0 <= momentum < 1"),
        (lambda: optim.adam(W, W, beta2=1.0), "ValueError: expected 0 <= beta2 < 1"),
        (lambda: optim.adam(W, W, {"step": 1}), "ValueError: adam: state['m.w'] is missing"),
        (lambda: optim.adam(W, W, {"m.w": W["w"]}), "ValueError: state['step'] is no count"),
        (lambda: optim.adam(W, W, {"step": 1, "m.w": np.ones(3)}), "ValueError: state['m.w'] has shape (3,)"),
        (lambda: optim.clip_global_norm(W, 0), "ValueError: max_norm is 0; expected a number above 0"),
        (lambda: optim.clip_global_norm(W, True), "TypeError: max_norm is of type bool"),
    ],
)
def test_errors(call, said):
    with refusal(said):
        call()


# ------------------------------------------------------------------------------------------------------------ the peers
@pytest.mark.peers
@pytest.mark.parametrize(("name", "settings"), CASES)
def test_against_pytorch(name, settings):
    torch = pytest.importorskip("torch")
    weights, grads = problem(np.float64)
    parameters = {key: torch.nn.Parameter(torch.tensor(value)) for key, value in weights.items()}
    if name == "adam":
        options = {"lr": settings.get("learning_rate", 0.001), "eps": settings.get("epsilon", 1e-8)}
        betas = settings.get("beta1", 0.9), settings.get("beta2", 0.999)
        theirs = torch.optim.Adam(parameters.values(), betas=betas, **options)
    else:
        kept = settings.get("momentum", 0.9) if name == "momentum" else 0
        theirs = torch.optim.SGD(parameters.values(), lr=settings["learning_rate"], momentum=kept)
    for step in grads:
        for key, parameter in parameters.items():
            parameter.grad = torch.tensor(step[key])
        theirs.step()
    for key, value in train(name, weights, grads, **settings)[0].items():
        np.testing.assert_allclose(value, parameters[key].detach().numpy(), rtol=1e-12, atol=1e-15)


@pytest.mark.peers
def test_clip_against_pytorch():
    torch = pytest.importorskip("torch")
    _, (grads, *_) = problem(np.float64)
    parameters = {key: torch.nn.Parameter(torch.zeros(value.shape)) for key, value in grads.items()}
    for key, parameter in parameters.items():
        parameter.grad = torch.tensor(grads[key]).float()
    clipped, norm = optim.clip_global_norm(grads, 1.5)
    assert float(torch.nn.utils.clip_grad_norm_(parameters.values(), 1.5)) == pytest.approx(norm, rel=1e-6)
    for key, value in clipped.items():
        np.testing.assert_allclose(value, parameters[key].grad.numpy(), rtol=1e-5)


@pytest.mark.peers
def test_adam_against_keras():
    """Keras adds epsilon to the root of v before its correction."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    keras = pytest.importorskip("keras")
    weights, grads = problem(np.float32)
    variables = {key: keras.Variable(value) for key, value in weights.items()}
    theirs = keras.optimizers.Adam(0.1, beta_1=0.8, beta_2=0.9, epsilon=0.25)
    state = None
    for t, step in enumerate(grads, start=1):
        theirs.apply_gradients([(keras.ops.convert_to_tensor(step[key]), variables[key]) for key in weights])
        settings = {"learning_rate": 0.1, "beta1": 0.8, "beta2": 0.9, "epsilon": 0.25 / math.sqrt(1 - 0.9**t)}
        weights, state = optim.adam(weights, step, state, **settings)
    for key, value in weights.items():
        np.testing.assert_allclose(value, variables[key].numpy(), rtol=2e-6, atol=2e-6)
