"""What layers accept, and the messages with which they refuse everything else."""

# ruff: noqa: E741 (I is the number of inputs, as everywhere)
from __future__ import annotations

import copy
import inspect
import pickle
import re
from types import MappingProxyType

import numpy as np
import pytest
from bits import leaves, like, same, zeros
from cases import rng
from forms import byte_swapped, read_only, strided
from kernel_cases import DTYPES
from layer_cases import LAYERS, OPTIONS, draw, run_all, with_option

import blockcell
from blockcell import GRU, LSTM, RNN, Bidirectional, Dense, GRUState, LSTMState, Stack, optim
from blockcell.misnamed_arguments import REPLACEMENTS
from blockcell.optable import LAYER_OPTIONS


# ---------------------------------------------------------------------------------------------------- what is accepted
@pytest.mark.parametrize(("cell", "name"), OPTIONS)
def test_every_option_is_kept_and_computed(cell, name, tmp_path):
    """What a new argument of a constructor needs: `init`, a property, `_arguments`, `__repr__`, files, and kernels."""
    layer, value = with_option(cell, name)
    assert np.array_equal(layer.weights[name] if name in layer.weights else getattr(layer, name), value)
    assert name in layer._arguments(), "copies and conversions would drop it"
    plain = cell.init(layer.input_size, layer.hidden_size)
    assert repr(layer) != repr(plain) and (name in layer.weights or f"{name}={value!r}" in repr(layer))
    layer.save(tmp_path / "layer.npz")
    for twin in (blockcell.load(tmp_path / "layer.npz"), pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):
        assert repr(twin) == repr(layer) and np.array_equal(twin._arguments()[name], value)

    if name in ("coupled", "reset_after"):  # which change the shapes of weights
        return
    other = -value if name in layer.weights else inspect.signature(cell).parameters[name].default
    changed = cell(**layer._arguments() | {name: other})
    x = rng("options", name).uniform(-2, 2, (5, 2, layer.input_size)).astype(np.float32)
    assert not np.array_equal(layer(x)[0], changed(x)[0]), "the kernels do not get it"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["lstm", "gru", "stack"])
def test_any_layout_of_memory(name, dtype):
    layer = LAYERS[name](3, 4, DTYPES[dtype])
    x, state, lengths, reset = draw(layer, 5, 6, name)
    d_y = rng("layout").standard_normal((5, 6, 4)).astype(dtype)
    expected = run_all(layer, x, state, d_y, lengths=lengths, reset=reset)

    for other in (np.asfortranarray, strided, read_only, byte_swapped):
        options = {"lengths": other(lengths), "reset": other(reset)}
        results = run_all(layer, other(x), like(state, other), other(d_y), **options)
        for result, exact in zip(results, expected, strict=True):
            assert same(result, exact)
        assert same(leaves(layer(other(x))), leaves(layer(x)))
        assert same(leaves(layer(other(x), like(state, other))), leaves(layer(x, state)))
        swapped = copy.copy(layer)
        swapped.set_weights(**{key: other(value) for key, value in layer.weights.items()})
        assert same([swapped(x)[0]], [layer(x)[0]])
    results = run_all(
        layer, x.tolist(), like(state, lambda a: a)[:], d_y.tolist(), lengths=lengths.tolist(), reset=reset.tolist()
    )
    for result, exact in zip(results, expected, strict=True):
        assert same(result, exact)


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_lists_make_float32_layers(name):
    layer = LAYERS[name](2, 3, np.float32)
    layer_of_lists = type(layer)(**{key: value.tolist() for key, value in layer.weights.items()})
    assert layer_of_lists.dtype == np.float32
    x = rng("lists").uniform(-1, 1, (4, 2, 2)).astype(np.float32)
    assert same([layer_of_lists(x.tolist(), [a.tolist() for a in layer(x)[1]])[0]], [layer(x, layer(x)[1])[0]])


@pytest.mark.parametrize("layer", [LSTM, GRU, RNN, Dense])
def test_defaults_of_options(layer):
    """Constructors, `init` and the table that files and reprs read say the same."""
    expected = {option.name: option.default for option in LAYER_OPTIONS[layer.__name__]}
    for function in (layer, layer.init):
        parameters = inspect.signature(function).parameters
        assert {name: parameters[name].default for name in expected} == expected


@pytest.mark.parametrize("zero", "TBIH")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["lstm", "lstm without peepholes", "gru", "bidirectional lstm", "stack"])
def test_sizes_of_zero(name, dtype, zero):
    sizes = {"T": 3, "B": 2, "I": 4, "H": 5} | {zero: 0}
    T, B, I, H = sizes.values()
    layer = LAYERS[name](I, H, DTYPES[dtype])
    x, zero_state = np.ones((T, B, I), dtype), zeros(layer, B)
    state = like(zero_state, lambda a: np.ones_like(a) / 2)
    marked = np.ones((T, B), bool)
    for options in ({}, {"lengths": [T] * B, "reset": ~marked}, {"mask": marked}, {"mask": marked, "masked": "repeat"}):
        y, last, tape = layer.forward(x, state, **options)
        assert y.shape == (T, B, layer.output_size) and y.dtype == dtype
        if zero in "TB":
            assert same(leaves(last), leaves(state))
            assert all(a is not b for a, b in zip(leaves(last), leaves(state), strict=True))
        d_x, d_state, grads = layer.backward(tape, np.ones_like(y), last)
        assert d_x.shape == x.shape
        assert [a.shape for a in leaves(d_state)] == [a.shape for a in leaves(state)]
        assert {key: a.shape for key, a in grads.items()} == {key: a.shape for key, a in layer.weights.items()}
        if zero in "TB":
            assert same(leaves(d_state), leaves(last))
            assert not any(a.any() for a in grads.values())
        if zero == "H" and name != "stack":
            assert not d_x.any()
        assert same([y], [layer(x, state, **options)[0]])
    assert not any(a.any() for a in leaves(zero_state))


def test_states_by_name():
    """In any order; those of a stack by numbers too. For calls, gradients and streams."""
    layer = Stack([LSTM.init(3, 4, seed=0), Bidirectional(GRU.init(4, 2, seed=1), LSTM.init(4, 2, seed=2))])
    x, state, _, _ = draw(layer, 5, 6)
    lstm, (fw, bw) = state
    by_name = {"1": {"bw": bw._asdict(), "fw": {"h": fw.h}}, "0": {"h": lstm.h, "cs": lstm.cs}}
    by_number = {1: [fw, {"h": bw.h, "cs": bw.cs}], 0: MappingProxyType(lstm._asdict())}
    y, last, tape = layer.forward(x, state)
    expected = layer.backward(tape, y, state)
    for states in (by_name, by_number):
        assert same((y, last), layer(x, states)) and same((y, last), layer.forward(x, states)[:2])
        assert same(expected, layer.backward(tape, y, states))
    assert same(
        layer(x, {0: None, 1: {"fw": fw, "bw": {"cs": bw.cs, "h": None}}}), layer(x, (None, (fw, (bw.cs, None))))
    )

    for streamed, value in ((layer.layers[0], lstm), (Stack([layer.layers[0], GRU.init(4, 3, seed=3)]), None)):
        stream = streamed.stream(6)
        if value is None:
            value = (lstm, GRUState(np.full((6, 3), 0.5, np.float32)))
            stream.state = {"1": {"h": value[1].h}, 0: {"h": lstm.h, "cs": lstm.cs}}
        else:
            stream.state = {"h": lstm.h, "cs": lstm.cs}
        assert same(stream.state, value)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_states_of_one_row(dtype):
    """They are every row's, in calls and streams; of other arrays each row counts, and of gradients."""
    layer = Stack([LSTM.init(3, 4, seed=0, dtype=dtype), GRU.init(4, 4, seed=1, dtype=dtype)])
    x, (lstm, gru), _, _ = draw(layer, 5, 6)
    x = x.astype(dtype)
    one = LSTMState(*(array[:1].astype(dtype) for array in lstm)), gru.h[:1].astype(dtype)
    many = [LSTMState(*(array.repeat(6, 0) for array in one[0])), {"h": one[1].repeat(6, 0)}]
    y, last, tape = layer.forward(x, many)
    for states in ((one[0], [one[1]]), {0: {"cs": one[0].cs, "h": many[0].h}, 1: {"h": np.asfortranarray(one[1])}}):
        assert same((y, last), layer(x, states)) and same((y, last), layer.forward(x, states)[:2])
        assert same(layer.backward(tape, y, last), layer.backward(layer.forward(x, states)[2], y, last))
        stream = layer.stream(6)
        stream.state = states
        assert same(stream.state, tuple(map(tuple, (many[0], many[1].values()))))
        assert same(stream.run(x), y)
    with pytest.raises(ValueError, match=r"state.0.h has shape \(2, 4\); expected \(B, H\) = \(6, 4\)"):
        layer(x, {0: {"h": many[0].h[:2], "cs": None}, 1: None})
    with pytest.raises(ValueError, match=r"d_state.1.h has shape \(1, 4\)"):
        layer.backward(tape, y, (None, (one[1],)))


def test_states_by_name_without_those_that_have_none():
    """A `Dense` has no state, so nobody has to name one."""
    heads = Stack([Dense.init(4, 4, seed=3), Dense.init(4, 4, seed=4)])
    layer = Stack([LSTM.init(3, 4, seed=0), heads, GRU.init(4, 2, seed=1), Dense.init(2, 5, seed=2)])
    x, (lstm, _, gru, _), _, _ = draw(layer, 5, 6)
    state = (lstm, ((), ()), gru, ())
    y, last, tape = layer.forward(x, state)
    expected = layer.backward(tape, y, state)
    stream = layer.stream(6)
    for states in ({0: lstm, 2: gru}, {2: gru, "3": (), 0: lstm}, {0: lstm, 1: {"1": ()}, 2: gru}):
        assert same((y, last), layer(x, states)) and same((y, last), layer.forward(x, states)[:2])
        assert same(expected, layer.backward(tape, y, states))
        stream.state = states
        assert same(stream.state, state)
    assert same(heads(y[..., :4], {}), heads(y[..., :4])) and same(heads.layers[0](y[..., :4], {})[1], ())

    for states, names, mend in (
        ({0: lstm}, "0", "; give None for zeros"),
        ({0: lstm, 1: (), 3: ()}, "0, 1, 3", "; give None for zeros"),
        ({0: lstm, 2: gru, 4: ()}, "0, 2, 4", ""),
    ):
        message = f"state has the names {names}; expected 0, 2, and perhaps 1, 3{mend}"
        with pytest.raises(ValueError, match=f"^Stack: {message}$"):
            layer(x, states)
        with pytest.raises(ValueError, match=f"^Stack.stream: {message}$"):
            stream.state = states
        assert same(stream.state, state)


def test_names_of_states_are_refused():
    layer = Stack([LSTM.init(3, 2, seed=0), Bidirectional(GRU.init(2, 5, seed=1), GRU.init(2, 5, seed=2))])
    x, a = ones(5, 4, 3), ones(4, 2)
    for state, message in [
        ({"h": a, "c": a}, "Stack: state has the names h, c; expected 0, 1"),
        ({0: {"h": a, "c": a}, 1: None}, "Stack: state.0 has the names h, c; expected cs, h"),
        ({0: {"h": a}, 1: None}, "Stack: state.0 has the names h; expected cs, h; give None for zeros"),
        ({0: {}, 1: None}, "Stack: state.0 has the names nothing; expected cs, h; give None for zeros"),
        ({0: None, 1: {"forward": None, "bw": None}}, "Stack: state.1 has the names forward, bw; expected fw, bw"),
        ({0: None, "0": None, 1: None}, "Stack: state has the names 0, 0, 1; expected 0, 1"),
        ({0: None, 1: None, 2: None}, "Stack: state has the names 0, 1, 2; expected 0, 1"),
        ({0: {"h": a, "cs": ones(3, 2)}, 1: None}, "Stack: state.0.cs has shape (3, 2); expected (B, H) = (4, 2)"),
    ]:
        for call in (layer, layer.forward):
            with pytest.raises(ValueError, match=re.escape(message)):
                call(x, state)
    y, _, tape = layer.forward(x)
    with pytest.raises(ValueError, match="Stack: d_state has the names 1; expected 0, 1"):
        layer.backward(tape, y, {1: None})
    for streamed, state, message in [
        (LSTM.init(3, 2, seed=0), {"h": a, "c": a}, "LSTM.stream: state has the names h, c; expected cs, h"),
        (Stack(layer.layers[:1]), {"h": a, "cs": a}, "Stack.stream: state has the names h, cs; expected 0"),
        (Stack(layer.layers[:1]), {0: {"h": a}}, "LSTM.stream: state has the names h; expected cs, h"),
    ]:
        stream = streamed.stream(4)
        with pytest.raises(ValueError, match=re.escape(message)):
            stream.state = state
        assert not any(array.any() for array in leaves(stream.state))


def test_none_stands_for_zeros_in_calls_and_in_streams():
    """In place of a state or of any part of it, whether by name or by position."""
    layer = Stack([LSTM.init(3, 2, seed=0), GRU.init(2, 4, seed=1), Dense.init(4, 2, seed=2)])
    x, h, stream = ones(5, 4, 3), 0.5 * ones(4, 2), layer.stream(4)
    zeros = LSTMState(0 * h, 0 * h), GRUState(np.zeros((4, 4), np.float32)), ()
    half = (zeros[0]._replace(h=h), *zeros[1:])
    for part_of_state, whole in (
        (None, zeros),
        ((None, None, None), zeros),
        ({0: None, 1: {"h": None}}, zeros),
        (((None, h), None, ()), half),
        ({0: {"cs": None, "h": h}, 1: None}, half),
    ):
        expected = layer(x, whole)
        assert same(layer(x, part_of_state), expected)
        stream.state = half
        stream.state = part_of_state
        assert same(stream.state, whole) and same(stream.run(x), expected[0])


def test_results_are_the_users():
    """Results and arguments may be overwritten after a call: a tape has copies."""
    for name in LAYERS:
        layer = LAYERS[name](3, 4, np.float64)
        x, state, lengths, reset = draw(layer, 5, 4, name)
        y, last, tape = layer.forward(x, state, lengths=lengths, reset=reset)
        d_y = np.ones_like(y)
        expected = layer.backward(tape, d_y)
        for array in (x, y, lengths, reset, *leaves(state), *leaves(last)):
            array[...] = 0
        layer.set_weights(**{key: np.zeros_like(value) for key, value in layer.weights.items()})
        results = layer.backward(tape, d_y)
        assert same([results[0], *results[2].values()], [expected[0], *expected[2].values()])
        assert (d_y == 1).all()


# -------------------------------------------------------------------------------------------------------------- errors
F = np.float32


def ones(*shape, dtype=F):
    return np.ones(shape, dtype)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: LSTM(ones(5, 13), ones(12)), ValueError, "LSTM: w has shape (5, 13); expected (I+H, 4H)"),
        (lambda: LSTM(ones(2, 12), ones(12)), ValueError, "LSTM: w has shape (2, 12); expected (I+H, 4H), so at least"),
        (lambda: LSTM(ones(12), ones(12)), ValueError, "LSTM: w has shape (12,); expected (I+H, 4H), rank 2"),
        (
            lambda: LSTM(ones(5, 12), ones(11)),
            ValueError,
            "LSTM: b has shape (11,); expected (4H,) = (12,) with I=2, H=3",
        ),
        (
            lambda: LSTM(ones(5, 12), ones(12, dtype=np.float64)),
            TypeError,
            "LSTM: b has dtype float64; expected float32",
        ),
        (lambda: LSTM(None, ones(12)), TypeError, "LSTM: w is None; expected an array of shape (I+H, 4H)"),
        (
            lambda: LSTM(ones(5, 12), ones(12), wci=ones(3)),
            TypeError,
            "LSTM: wcf is None; expected an array of shape (H,)",
        ),
        (lambda: LSTM(8, 16), ValueError, "LSTM: w has shape (); expected (I+H, 4H), rank 2; LSTM.init makes new"),
        (lambda: GRU(8, 16), TypeError, "missing 2 required positional arguments: 'b_ru' and 'b_c'"),
        (lambda: GRU(8, 16, 16, 16), ValueError, "GRU: w_ru has shape (); expected (I+H, 2H), rank 2; GRU.init makes"),
        (
            lambda: LSTM(ones(5, 12), ones(12), wci=ones(3), wcf=ones(3), wco=ones(4)),
            ValueError,
            "LSTM: wco has shape (4,); expected (H,) = (3,)",
        ),
        (lambda: LSTM(ones(5, 12), ones(12), forget_bias="1"), TypeError, "LSTM: forget_bias is '1'; expected a real"),
        (
            lambda: LSTM(ones(5, 12), ones(12), gate_order="ifgo"),
            ValueError,
            "LSTM: gate_order is 'ifgo'; expected 'icfo'",
        ),
        (
            lambda: LSTM(ones(5, 12), ones(12), gate_order=[]),
            TypeError,
            "LSTM: gate_order is of type list; expected 'icfo'",
        ),
        (
            lambda: LSTM(ones(5, 9), ones(9), coupled=True, gate_order="ifco"),
            ValueError,
            "LSTM: gate_order is 'ifco' and coupled is True; expected 'icfo', as the gates are then ci, f, o",
        ),
        (
            lambda: LSTM(ones(5, 9), ones(9), coupled=True, wci=ones(3), wcf=ones(3), wco=ones(3)),
            ValueError,
            "LSTM: wci is given and coupled is True; expected wcf and wco alone",
        ),
        (
            lambda: LSTM(ones(5, 10), ones(10), coupled=True),
            ValueError,
            "LSTM: w has shape (5, 10); expected (I+H, 3H), so 3 times as many columns as cells",
        ),
        (
            lambda: LSTM(ones(5, 12), ones(12), proj_clip=2),
            ValueError,
            "LSTM: proj_clip is 2 and w_p is None; expected the weights of a projection, w_p, or no proj_clip",
        ),
        (
            lambda: LSTM(ones(5, 12), ones(12), w_p=ones(3, 6)),
            ValueError,
            "LSTM: w has shape (5, 12); expected (I+P, 4H), so at least P = 6 rows",
        ),
        (
            lambda: LSTM(ones(5, 12), ones(12), w_p=ones(4, 2)),
            ValueError,
            "LSTM: w_p has shape (4, 2); expected (H, P) = (3, 2) with I=3, H=3, P=2",
        ),
        (
            lambda: LSTM(ones(5, 12), ones(12), w_p=ones(3)),
            ValueError,
            "LSTM: w_p has shape (3,); expected (H, P) with H=3 from w and P at least 1",
        ),
        (
            lambda: LSTM(ones(5, 12), ones(12), w_p=ones(3, 0)),
            ValueError,
            "LSTM: w_p has shape (3, 0); expected (H, P) with H=3 from w and P at least 1",
        ),
        (lambda: LSTM.init(2, 3, proj_size=-1), ValueError, "LSTM.init: proj_size is -1; expected at least 0"),
        (
            lambda: GRU(ones(5, 7), ones(5, 3), ones(6), ones(3)),
            ValueError,
            "GRU: w_ru has shape (5, 7); expected (I+H, 2H)",
        ),
        (lambda: Bidirectional(GRU.init(2, 3, seed=0), "x"), TypeError, "Bidirectional: bw is 'x'; expected a layer"),
        (
            lambda: Bidirectional(GRU.init(2, 3, seed=0), GRU.init(2, 4, seed=0)),
            ValueError,
            "Bidirectional: bw has output_size 4; expected 3, that of fw",
        ),
        (
            lambda: Bidirectional(GRU.init(2, 3, seed=0), GRU.init(2, 3, seed=0, dtype="float64")),
            TypeError,
            "Bidirectional: bw has dtype float64; expected float32, that of fw",
        ),
        (lambda: Stack([]), ValueError, "Stack: layers is empty; expected at least one layer"),
        (lambda: Stack(3), TypeError, "Stack: layers is 3; expected a sequence of layers"),
        (
            lambda: Stack(GRU.init(2, 3, seed=0)),
            TypeError,
            "Stack: layers is of type GRU; expected a sequence of layers",
        ),
        (lambda: Stack([GRU.init(2, 3, seed=0), None]), TypeError, "Stack: 1 is None; expected a layer"),
        (
            lambda: Stack([GRU.init(2, 3, seed=0), GRU.init(4, 3, seed=0)]),
            ValueError,
            "Stack: layer 1 has input_size 4; expected 3, the output_size of layer 0",
        ),
    ],
)
def test_constructors_refuse(make, error, message):
    with pytest.raises(error, match=re.escape(message)) as caught:
        make()
    assert type(caught.value) is error


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"x": ones(5, 4, 2)}, ValueError, "Stack: x has shape (5, 4, 2); expected (T, B, I) with I=3 from the layer"),
        *(
            (
                {"x": ones(5, 4, 3, dtype=dtype)},
                TypeError,
                f"Stack: x has dtype {dtype}; expected float32, that of the layer; x.astype(np.float32) converts it",
            )
            for dtype in ("float64", "float16", "int64", "bool")
        ),
        (
            {"x": memoryview(ones(5, 4, 3, dtype="d"))},
            TypeError,
            "expected float32, that of the layer; np.asarray(x, np.float32) converts it",
        ),
        ({"x": None}, TypeError, "Stack: x is None; expected an array of real numbers"),
        ({"state": ones(4, 3)}, TypeError, "Stack: state is of type ndarray; expected (0, 1) or None"),
        ({"state": (None,)}, ValueError, "Stack: state has 1 parts; expected (0, 1)"),
        (
            {"state": (ones(4, 2), None)},
            TypeError,
            "Stack: state.0 is of type ndarray; expected LSTMState(cs, h) or None",
        ),
        ({"state": (GRUState(ones(4, 2)), None)}, ValueError, "Stack: state.0 has 1 parts; expected LSTMState(cs, h)"),
        (
            {"state": (LSTMState(ones(4, 2), ones(3, 2)), None)},
            ValueError,
            "Stack: state.0.h has shape (3, 2); expected (B, H) = (4, 2) with B from x, H from the layer",
        ),
        (
            {"state": (None, (None, [ones(4, 5, dtype="e")]))},
            TypeError,
            "Stack: state.1.bw.h has dtype float16; expected",
        ),
        ({"lengths": ones(4)}, TypeError, "Stack: lengths has dtype float32; expected integers"),
        ({"lengths": [True] * 4}, TypeError, "Stack: lengths has dtype bool; expected integers"),
        ({"lengths": [1, 2, 3]}, ValueError, "Stack: lengths has shape (3,); expected (B,) = (4,)"),
        ({"lengths": [1, 6, -1, 2]}, ValueError, "Stack: lengths[1] is 6; expected 0 to T = 5"),
        ({"lengths": [1, 2, -1, 2]}, ValueError, "Stack: lengths[2] is -1; expected 0 to T = 5"),
        (
            {"lengths": np.full(4, 2**64 - 1, np.uint64)},
            ValueError,
            "Stack: lengths[0] is 18446744073709551615; expected",
        ),
        ({"reset": np.zeros((5, 4))}, TypeError, "Stack: reset has dtype float64; expected bool"),
        ({"reset": np.zeros((4, 5), bool)}, ValueError, "Stack: reset has shape (4, 5); expected (T, B) = (5, 4)"),
    ],
)
def test_calls_refuse(given, error, message):
    layer = Stack([LSTM.init(3, 2, seed=0), Bidirectional(GRU.init(2, 5, seed=1), GRU.init(2, 5, seed=2))])
    for call in (layer, layer.forward):
        with pytest.raises(error, match=re.escape(message)) as caught:
            call(**{"x": ones(5, 4, 3)} | given)
        assert type(caught.value) is error


def test_backward_refuses():
    layer, other = (LSTM.init(3, 2, seed=seed) for seed in (0, 1))
    y, last, tape = layer.forward(ones(5, 4, 3))
    for arguments, error, message in [
        ((None, y), TypeError, "LSTM: tape is None; expected that of this layer's forward"),
        ((other.forward(ones(5, 4, 3))[2], y), ValueError, "LSTM: tape is that of another layer"),
        ((tape, y[1:]), ValueError, "LSTM: d_y has shape (4, 4, 2); expected (5, 4, 2), that of y"),
        ((tape, y.astype("d")), TypeError, "expected float32, that of the layer; d_y.astype(np.float32) converts it"),
        ((tape, y, last[:1]), ValueError, "LSTM: d_state has 1 parts; expected LSTMState(cs, h)"),
        ((tape, y, (last.cs, last.h[1:])), ValueError, "LSTM: d_state.h has shape (3, 2); expected (B, H) = (4, 2)"),
    ]:
        with pytest.raises(error, match=re.escape(message)):
            layer.backward(*arguments)


# ------------------------------------------------------------------------------------- arguments of another library's
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: LSTM(input_size=8, hidden_size=16), "LSTM: {} input_size; expected init, which makes new weights"),
        (lambda: GRU(units=16), "GRU: {} units; expected hidden_size in init, or output_size of a Dense"),
        (lambda: LSTM(8, 16, bidirectional=True), "LSTM: {} bidirectional; expected Bidirectional(fw, bw), of two "),
        (lambda: RNN.init(8, 16, nonlinearity="relu"), "RNN.init: {} nonlinearity; expected activation"),
        (lambda: LSTM.init(8, 16, wci=3), "LSTM.init: {} wci; expected use_peephole"),
        (lambda: GRU.init(8, 16, b_hc=3), "GRU.init: {} b_hc; expected the constructor, which takes weights"),
        (lambda: LSTM.init(8, 16, forget_biass=1), "LSTM.init: {} forget_biass; expected forget_bias"),
        (lambda: RNN.init(8, 16, x=1), "RNN.init: {} x; expected input_size, hidden_size, seed, dtype, activation, "),
        (lambda: optim.adam({}, {}, lr=0.1), "adam: {} lr; expected learning_rate"),
        (lambda: optim.clip_global_norm({}, clip_norm=1), "clip_global_norm: {} clip_norm; expected max_norm"),
    ],
)
def test_arguments_of_other_libraries(call, message):
    with pytest.raises(TypeError, match="^" + re.escape(message.format("there is no argument"))):
        call()


def test_other_errors_pass_unchanged():
    with pytest.raises(TypeError, match=r"^Stack: 0 is 3; expected a layer$"):
        Stack([3])
    assert inspect.signature(Stack).parameters.keys() == {"layers"} and RNN.init.__qualname__ == "RNN.init"


@pytest.mark.parametrize("name", [text.split()[0].strip(",") for text in REPLACEMENTS.values() if "(" not in text])
def test_names_that_messages_advise(name):
    constructors = LSTM, GRU, RNN, Dense, Bidirectional
    functions = [*constructors, *(getattr(kind, "init", kind) for kind in constructors)]
    functions += [optim.sgd, optim.momentum, optim.adam, optim.clip_global_norm]
    assert any(name in {*inspect.signature(f).parameters, "init", "the", "dropout"} for f in functions)
