"""A layer's weights: setting, copying and pickling them, and drawing them by `init`."""

# ruff: noqa: E741 (I is the number of inputs, as everywhere)
from __future__ import annotations

import copy
import itertools
import pickle
import re
import sys
import typing

import numpy as np
import pytest
from bits import same
from cases import rng
from layer_cases import LAYERS, draw, reset_after

import blockcell
from blockcell import GRU, LSTM, Bidirectional, Dense, Stack, convert


def test_weights_are_copies():
    w, b = np.ones((6, 12), np.float32), np.zeros(12, np.float32)
    layer = LSTM(w, b)
    w[:] = 0
    assert (layer.weights["w"] == 1).all()
    with pytest.raises(ValueError, match="read-only"):
        layer.weights["w"][0] = 0
    stack = Stack([layer, layer])
    layer.set_weights(w=w)
    assert (stack.weights["0.w"] == 1).all()
    stack.set_weights(**{"1.w": w})
    assert (
        (stack.weights["0.w"] == 1).all() and not stack.weights["1.w"].any() and not stack.layers[1].weights["w"].any()
    )
    stack.layers[0].set_weights(w=w)
    assert not stack.weights["0.w"].any()


def test_weights_is_a_dict_that_cannot_be_changed():
    """Its arrays are those of the layer, so a change would train nothing."""
    layer = Stack([LSTM.init(3, 4, seed=0), Dense.init(4, 2, seed=1)])
    weights, w = layer.weights, np.zeros((7, 16), np.float32)
    expected = {"0.w": weights["0.w"], "0.b": weights["0.b"], "1.w": weights["1.w"], "1.b": weights["1.b"]}

    def union():
        layer.weights |= {"0.w": w}

    changes = [
        lambda: weights.__setitem__("0.w", w),
        lambda: weights.__delitem__("0.w"),
        lambda: weights.__ior__({"0.w": w}),
        lambda: weights.update({"0.w": w}),
        lambda: weights.setdefault("2.w", w),
        lambda: weights.pop("0.w"),
        weights.popitem,
        weights.clear,
        union,
    ]
    for change in changes:
        with pytest.raises(TypeError, match=r"weights is read-only: .*; expected layer\.set_weights\(\*\*arrays\), or"):
            change()
    assert isinstance(weights, dict) and weights == expected and [*weights] == [*expected] and len(weights) == 4
    assert {**weights} == weights | {} == {} | weights == expected and repr(weights) == repr(expected)
    assert "0.w" in weights and weights.get("2.w") is None and [*weights.items()] == [*expected.items()]
    copies = dict(weights), weights.copy(), copy.copy(weights), copy.deepcopy(weights), weights | {}, {**weights}
    for changed in (*copies, *(pickle.loads(pickle.dumps(weights, k)) for k in range(6))):
        assert type(changed) is dict and all(map(np.array_equal, changed.values(), expected.values()))
        changed["0.w"] = w
    layer.set_weights(**{"0.w": w})
    assert not layer.weights["0.w"].any()


@pytest.mark.parametrize("name", ["w", "weights", "forget_biass", "forget_bias", "hidden_size", "layers"])
def test_attributes_that_would_change_nothing(name):
    first = LSTM.init(3, 4, seed=0)
    stack = Stack([first, GRU.init(4, 4, seed=0)])
    for layer in (first, stack, Bidirectional(first, first), Dense.init(3, 4), first.quantize("int8")):
        expected = "cannot be set; expected set_weights for weights, and arguments of the constructor for options"
        with pytest.raises(AttributeError, match=f"^{type(layer).__name__}: {name} {expected}$"):
            setattr(layer, name, first.weights["w"])
        assert copy.copy(layer).dtype == np.float32


def test_attributes_of_a_users_subclass():
    class Named(LSTM):
        def __init__(self, *arrays, name="none", **options):
            self.name = name
            super().__init__(*arrays, **options)
            self.uses = 0

        def __call__(self, *arguments, **options):
            self.uses += 1
            return super().__call__(*arguments, **options)

    layer = Named(*LSTM.init(3, 4, seed=0).weights.values(), name="first")
    layer(np.zeros((1, 1, 3), np.float32))
    layer.note = "of its user"
    assert (layer.name, layer.uses, layer.note, copy.copy(layer).name) == ("first", 1, "of its user", "none")
    stack = Stack([layer])
    stack.forward = lambda x: "traced"  # as mocks do
    assert stack.forward(None) == "traced"


@pytest.mark.parametrize("name", LAYERS)
def test_set_weights(name):
    layer, other = LAYERS[name](3, 4, np.float32), LAYERS[name](3, 4, np.float32)
    x, state, _, _ = draw(layer, 5, 4, name)
    new = {key: np.float32(0.5) * value for key, value in layer.weights.items()}
    before = layer(x, state)[0]
    some = list(new)[::2]
    layer.set_weights(**{key: new[key] for key in some})
    assert layer.weights.keys() == new.keys()
    for key, value in layer.weights.items():
        np.testing.assert_array_equal(value, new[key] if key in some else other.weights[key])
    between = layer(x, state)[0]
    layer.set_weights(**new)
    after = layer(x, state)[0]
    assert not np.array_equal(before, between) and not np.array_equal(between, after)
    layer.set_weights(**other.weights)
    assert same([layer(x, state)[0]], [before])
    first = next(iter(new))
    for bad in (
        {first: new[first][:-1]},
        {first: new[first].astype(np.float64)},
        {"nothing": new[first]},
        {first: None},
    ):
        with pytest.raises((TypeError, ValueError), match=re.escape(next(iter(bad)))):
            layer.set_weights(**new | bad)
        assert same([layer(x, state)[0]], [before])


def weights_of_copy(layer):
    return copy.copy(layer).weights


def weights_of_deep_copy(layer):
    return copy.deepcopy(layer).weights


def weights_of_pickle(layer):
    return pickle.loads(pickle.dumps(layer)).weights


def weights_of_onnx(layer):
    return convert.to_onnx(layer)[1]


COPIES = [weights_of_copy, weights_of_deep_copy, weights_of_pickle, convert.to_torch]
KINDS_COPIED = [
    *itertools.product(["projected lstm", "bidirectional", "stack"], COPIES),
    *itertools.product(["bidirectional", "stack"], [convert.to_keras]),  # which has no projections; nor has ONNX
    ("bidirectional", weights_of_onnx),  # a node of ONNX is one layer
]


@pytest.mark.parametrize(("kind", "weights_of"), KINDS_COPIED)
def test_copies_are_of_one_moment(kind, weights_of):
    """Weights that are replaced at some lines of a copy or a conversion are all the old or all the new ones in it."""
    layer = reset_after(3, 4, np.float32)
    if kind == "projected lstm":
        layer = LSTM.init(3, 4, seed=0, proj_size=2)
    if kind in ("bidirectional", "stack"):
        layer = Bidirectional(layer, layer)
    if kind == "stack":
        layer = Stack([layer, Bidirectional(*[reset_after(8, 4, np.float32)] * 2)])
    g = rng("one moment", kind, weights_of.__name__)
    possible = [{name: np.full_like(array, k) for name, array in layer.weights.items()} for k in (1, 2)]
    expected = []
    for weights in possible:
        layer.set_weights(**weights)
        expected.append(weights_of(layer))

    def replace(frame, event, arg):
        if frame.f_globals["__name__"].startswith("blockcell") and g.random() < 0.1:
            layer.set_weights(**possible[g.integers(2)])
        return replace

    tracer, count = sys.gettrace(), [0, 0]
    for _ in range(20):
        sys.settrace(replace)
        try:
            result = weights_of(layer)
        finally:
            sys.settrace(tracer)
        count[[same(result, weights) for weights in expected].index(True)] += 1
    assert all(count), count


@pytest.mark.parametrize("name", ["LSTM", "GRU", "Dense", "Bidirectional", "Stack", "LSTMState", "GRUState"])
def test_pickles_name_the_package(name):
    """So pickles can be read after a class has moved to another file. Its annotations can be resolved, too."""
    assert typing.get_type_hints(getattr(blockcell, name))
    assert pickle.loads(f"cblockcell.layers\n{name}\n.".encode()) is getattr(blockcell, name)
    assert pickle.dumps(getattr(blockcell, name), 0) == f"cblockcell.layers\n{name}\np0\n.".encode()


def test_repr():
    net = Stack([Bidirectional(LSTM.init(8, 16, seed=0), LSTM.init(8, 16, seed=1)), GRU.init(32, 4, seed=2)])
    cell = "LSTM(input_size=8, hidden_size=16, dtype=float32)"
    assert (
        repr(net) == f"Stack([Bidirectional(fw={cell}, bw={cell}), GRU(input_size=32, hidden_size=4, dtype=float32)])"
    )
    layer = LSTM.init(2, 3, seed=0, dtype="float64", use_peephole=True, forget_bias=1, gate_order="ifco")
    more = "dtype=float64, use_peephole=True, forget_bias=1.0, gate_order='ifco'"
    assert repr(layer) == f"LSTM(input_size=2, hidden_size=3, {more})"
    layer = LSTM.init(2, 5, seed=0, proj_size=3, proj_clip=0.5, coupled=True, reverse=True)
    more = "dtype=float32, proj_size=3, proj_clip=0.5, coupled=True, reverse=True"
    assert repr(layer) == f"LSTM(input_size=2, hidden_size=5, {more})"
    assert (layer.input_size, layer.hidden_size, layer.output_size) == (2, 5, 3)
    assert (net.input_size, net.hidden_size, net.output_size, net.dtype) == (8, 4, 4, np.float32)
    assert (net.layers[0].input_size, net.layers[0].hidden_size, net.layers[0].output_size) == (8, 16, 32)


# ---------------------------------------------------------------------------------------------------------------- init
@pytest.mark.parametrize(
    ("cls", "options", "biases"),
    [
        (LSTM, {"use_peephole": True}, [0, 0, 1, 0]),
        (LSTM, {"gate_order": "ifco"}, [0, 1, 0, 0]),
        (LSTM, {"forget_bias": 1.0, "cell_clip": 3.0}, [0, 0, 0, 0]),
        *((LSTM, {"use_peephole": True, "coupled": True, "proj_size": P}, [0, 1, 0]) for P in (20, 50, 70)),
        (GRU, {}, [1, 1, 0]),
    ],
)
def test_init(cls, options, biases):
    """Numbers of each gate's own: uniform ones for x; for h orthonormal rows, or columns if these are fewer."""
    I, H, P = 30, 50, options.get("proj_size", 50)
    weights = dict(cls.init(I, H, seed=3, dtype=np.float64, **options).weights)
    peepholes = [weights.pop(name) for name in ("wci", "wcf", "wco") if name in weights]
    w_p = weights.pop("w_p", None)
    gates = [gate for w in weights.values() if w.ndim == 2 for gate in np.split(w, w.shape[1] // H, axis=1)]
    for gate in gates:
        x_part, h_part = gate[:I], gate[I:] if P <= H else gate[I:].T
        bound = np.sqrt(6 / (I + H))
        assert 0.99 * bound < np.abs(x_part).max() <= bound and abs(x_part.mean()) < 0.05 * bound
        np.testing.assert_allclose(h_part @ h_part.T, np.eye(min(P, H)), rtol=0, atol=1e-13)
    assert all(np.abs(p - q).max() > 0.1 for p, q in itertools.combinations(gates, 2))
    np.testing.assert_array_equal(np.concatenate([b for b in weights.values() if b.ndim == 1]), np.repeat(biases, H))
    assert len(peepholes) == options.get("use_peephole", 0) * (2 if "coupled" in options else 3)
    assert all(0 < np.abs(peephole).max() <= np.sqrt(3 / H) for peephole in peepholes)
    if w_p is not None:
        assert w_p.shape == (H, P) and 0.99 * np.sqrt(6 / (P + H)) < np.abs(w_p).max() <= np.sqrt(6 / (P + H))


@pytest.mark.parametrize("cls", [LSTM, GRU])
def test_init_is_seeded(cls):
    layer, again, other = (cls.init(3, 4, seed=seed) for seed in (1, np.random.default_rng(1), 2))
    for key, value in layer.weights.items():
        assert same([value], [again.weights[key]]) and value.dtype == np.float32
    assert not np.array_equal(*(next(iter(drawn.weights.values())) for drawn in (layer, other)))
    for random in ({}, {"seed": None}):
        assert not np.array_equal(*(next(iter(cls.init(3, 4, **random).weights.values())) for _ in range(2)))
    for sizes in ((0, 3), (3, 0), (0, 0)):
        layer = cls.init(*sizes, seed=0, dtype="float16")
        assert (layer.input_size, layer.hidden_size, layer.dtype) == (*sizes, np.float16)
    for bad, error in (((-1, 3), ValueError), ((3, 2.5), TypeError)):
        with pytest.raises(error, match=f"{cls.__name__}.init: (input|hidden)_size"):
            cls.init(*bad, seed=0)
    with pytest.raises(TypeError, match="dtype is int64"):
        cls.init(2, 3, seed=0, dtype=int)


def test_set_weights_takes_no_more_than_there_are():
    """A peephole that the layer does not have is unknown, although other LSTMs have it; and nothing is replaced."""
    layer = LSTM.init(2, 3, seed=0)
    before = layer.weights
    with pytest.raises(TypeError, match="LSTM: there is no weight wci; expected w, b"):
        layer.set_weights(b=np.ones(12, np.float32), wci=np.zeros(3, np.float32))
    assert all(layer.weights[name] is array for name, array in before.items())
