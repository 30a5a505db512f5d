"""What layers accept, and the messages with which they refuse everything else."""

# ruff: noqa: E741 (I is the number of inputs, as everywhere)
from __future__ import annotations

import copy
import inspect
import pickle
import re
from functools import partial
from types import MappingProxyType

import numpy as np
import pytest
from bits import leaves, like, same, zeros
from cases import rng
from forms import byte_swapped, read_only, strided
from kernel_cases import DTYPES
from layer_cases import LAYERS, OPTIONS, can_stream, draw, run_all, with_option
from refusals import refusal

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


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_forms_of_states(dtype):
    """By names in any order, or by numbers; None is zeros, also in place of a part, and a `Dense` has no state; one row
    is every row's. For calls, gradients and streams."""
    lstm, gru, dense = (partial(kind.init, seed=0, dtype=dtype) for kind in (LSTM, GRU, Dense))
    layer = Stack([lstm(3, 4), Stack([dense(4, 4), dense(4, 4)]), gru(4, 2), dense(2, 5)])
    x, (cell, _, other, _), _, _ = draw(layer, 5, 6)
    (cs, h), (g,) = cell, other
    compare_states(layer, x, (cell, ((), ()), other, ()), {0: cell, 2: other}, {2: other, "3": (), 0: cell})
    compare_states(layer, x, (cell, ((), ()), other, ()), {0: {"h": h, "cs": cs}, 1: {"1": ()}, 2: {"h": g}})
    compare_states(layer, x, (cell, ((), ()), other, ()), {2: [g], "0": MappingProxyType(cell._asdict())})
    nothing = zeros(layer, 6)
    compare_states(layer, x, nothing, None, (None,) * 4, {0: None, 2: {"h": None}})
    half = nothing[0]._replace(h=h), *nothing[1:]
    compare_states(layer, x, half, ((None, h), None, None, ()), {0: {"cs": None, "h": h}, 2: None})
    one = LSTMState(*(array[:1].repeat(6, 0) for array in cell)), ((), ()), GRUState(g[:1].repeat(6, 0)), ()
    for form in ((LSTMState(cs[:1], h[:1]), None, [g[:1]], None), {0: {"cs": cs[:1], "h": one[0].h}, 2: (g[:1],)}):
        compare_states(layer, x, one, form, gradients=False)

    layer = Stack([lstm(3, 4), Bidirectional(gru(4, 2), lstm(4, 2))])
    x, (cell, (fw, bw)), _, _ = draw(layer, 5, 6)
    compare_states(layer, x, (cell, (fw, bw)), {"1": {"bw": bw._asdict(), "fw": {"h": fw.h}}, "0": cell._asdict()})
    half = zeros(layer, 6)[0], (fw, zeros(layer, 6)[1][1]._replace(cs=bw.cs))
    compare_states(layer, x, half, {0: None, 1: {"fw": fw, "bw": {"cs": bw.cs, "h": None}}})


def compare_states(layer, x, state, *forms, gradients=True):
    """Compare calls and streams from a state with those from other forms of it."""
    y, last, tape = layer.forward(x, state)
    for form in forms:
        assert same((y, last), layer(x, form)) and same((y, last), layer.forward(x, form)[:2])
        assert not gradients or same(layer.backward(tape, y, state), layer.backward(tape, y, form))
        if can_stream(layer):
            stream = layer.stream(x.shape[1])
            stream.state = like(state, np.ones_like)
            stream.state = form
            assert same(stream.state, state) and same(stream.run(x), y)


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
    for state, message in [
        ({1: None}, "Stack: d_state has the names 1; expected 0, 1"),
        ((None, (None, [ones(1, 5)])), "Stack: d_state.1.bw.h has shape (1, 5)"),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            layer.backward(tape, y, state)
    for streamed, state, message in [
        (LSTM.init(3, 2, seed=0), {"h": a, "c": a}, "LSTM.stream: state has the names h, c; expected cs, h"),
        (Stack(layer.layers[:1]), {"h": a, "cs": a}, "Stack.stream: state has the names h, cs; expected 0"),
        (Stack(layer.layers[:1]), {0: {"h": a}}, "LSTM.stream: state has the names h; expected cs, h"),
        *(
            (
                Stack([LSTM.init(3, 2), Stack([Dense.init(2, 2)]), GRU.init(2, 2), Dense.init(2, 5)]),
                dict.fromkeys(map(int, names.split(", "))),
                f"Stack.stream: state has the names {names}; expected 0, 2, and perhaps 1, 3{end}",
            )
            for names, end in (("0", "; give None for zeros"), ("0, 1, 3", "; give None for zeros"), ("0, 2, 4", ""))
        ),
    ]:
        stream = streamed.stream(4)
        with pytest.raises(ValueError, match=re.escape(message)):
            stream.state = state
        assert not any(array.any() for array in leaves(stream.state))


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


def lstm_with(**given):
    """A constructor's call that is right but for what is given."""
    return partial(LSTM, **{"w": ones(5, 12), "b": ones(12)} | given)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lstm_with(w=ones(5, 13)), "ValueError: LSTM: w has shape (5, 13); expected (I+H, 4H)"),
        (lstm_with(w=ones(2, 12)), "ValueError: LSTM: w has shape (2, 12); expected (I+H, 4H), so at least"),
        (lstm_with(w=ones(12)), "ValueError: LSTM: w has shape (12,); expected (I+H, 4H), rank 2"),
        (lstm_with(b=ones(11)), "ValueError: LSTM: b has shape (11,); expected (4H,) = (12,) with I=2, H=3"),
        (lstm_with(b=ones(12, dtype=np.float64)), "TypeError: LSTM: b has dtype float64; expected float32"),
        (lstm_with(w=None), "TypeError: LSTM: w is None; expected an array of shape (I+H, 4H)"),
        (lstm_with(wci=ones(3)), "TypeError: LSTM: wcf is None; expected an array of shape (H,)"),
        (
            lstm_with(wci=ones(3), wcf=ones(3), wco=ones(4)),
            "ValueError: LSTM: wco has shape (4,); expected (H,) = (3,)",
        ),
        (lambda: LSTM(8, 16), "ValueError: LSTM: w has shape (); expected (I+H, 4H), rank 2; LSTM.init makes new"),
        (lambda: GRU(8, 16), "TypeError: missing 2 required positional arguments: 'b_ru' and 'b_c'"),
        (lambda: GRU(8, 16, 16, 16), "ValueError: GRU: w_ru has shape (); expected (I+H, 2H), rank 2; GRU.init makes"),
        (lstm_with(forget_bias="1"), "TypeError: LSTM: forget_bias is '1'; expected a real"),
        (lstm_with(gate_order="ifgo"), "ValueError: LSTM: gate_order is 'ifgo'; expected 'icfo'"),
        (lstm_with(gate_order=[]), "TypeError: LSTM: gate_order is of type list; expected 'icfo'"),
        (
            lstm_with(coupled=True, gate_order="ifco"),
            "ValueError: LSTM: gate_order is 'ifco' and coupled is True; expected 'icfo', as the gates are then "
            "ci, f, o",
        ),
        (
            lstm_with(coupled=True, wci=ones(3), wcf=ones(3), wco=ones(3)),
            "ValueError: LSTM: wci is given and coupled is True; expected wcf and wco alone",
        ),
        (
            lstm_with(coupled=True, w=ones(5, 10)),
            "ValueError: LSTM: w has shape (5, 10); expected (I+H, 3H), so 3 times as many columns as cells",
        ),
        (
            lstm_with(proj_clip=2),
            "ValueError: LSTM: proj_clip is 2 and w_p is None; expected the weights of a projection, w_p, or no "
            "proj_clip",
        ),
        (
            lstm_with(w_p=ones(3, 6)),
            "ValueError: LSTM: w has shape (5, 12); expected (I+P, 4H), so at least P = 6 rows",
        ),
        (
            lstm_with(w_p=ones(4, 2)),
            "ValueError: LSTM: w_p has shape (4, 2); expected (H, P) = (3, 2) with I=3, H=3, P=2",
        ),
        *(
            (
                lstm_with(w_p=ones(*shape)),
                f"ValueError: LSTM: w_p has shape {shape}; expected (H, P) with H=3 from w and P at least 1",
            )
            for shape in ((3,), (3, 0))
        ),
        (lambda: LSTM.init(2, 3, proj_size=-1), "ValueError: LSTM.init: proj_size is -1; expected at least 0"),
        (
            lambda: GRU(ones(5, 7), ones(5, 3), ones(6), ones(3)),
            "ValueError: GRU: w_ru has shape (5, 7); expected (I+H, 2H)",
        ),
        (lambda: Bidirectional(GRU.init(2, 3, seed=0), "x"), "TypeError: Bidirectional: bw is 'x'; expected a layer"),
        (
            lambda: Bidirectional(GRU.init(2, 3, seed=0), GRU.init(2, 4, seed=0)),
            "ValueError: Bidirectional: bw has output_size 4; expected 3, that of fw",
        ),
        (
            lambda: Bidirectional(GRU.init(2, 3, seed=0), GRU.init(2, 3, seed=0, dtype="float64")),
            "TypeError: Bidirectional: bw has dtype float64; expected float32, that of fw",
        ),
        (lambda: Stack([]), "ValueError: Stack: layers is empty; expected at least one layer"),
        (lambda: Stack(3), "TypeError: Stack: layers is 3; expected a sequence of layers"),
        (
            lambda: Stack(GRU.init(2, 3, seed=0)),
            "TypeError: Stack: layers is of type GRU; expected a sequence of layers",
        ),
        (lambda: Stack([GRU.init(2, 3, seed=0), None]), "TypeError: Stack: 1 is None; expected a layer"),
        (
            lambda: Stack([GRU.init(2, 3, seed=0), GRU.init(4, 3, seed=0)]),
            "ValueError: Stack: layer 1 has input_size 4; expected 3, the output_size of layer 0",
        ),
    ],
)
def test_constructors_refuse(make, said):
    with refusal(said):
        make()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"x": ones(5, 4, 2)}, "ValueError: Stack: x has shape (5, 4, 2); expected (T, B, I) with I=3 from the layer"),
        *(
            (
                {"x": ones(5, 4, 3, dtype=dtype)},
                f"TypeError: Stack: x has dtype {dtype}; expected float32, that of the layer; x.astype(np.float32) "
                "converts it",
            )
            for dtype in ("float64", "float16", "int64", "bool")
        ),
        (
            {"x": memoryview(ones(5, 4, 3, dtype="d"))},
            "TypeError: expected float32, that of the layer; np.asarray(x, np.float32) converts it",
        ),
        ({"x": None}, "TypeError: Stack: x is None; expected an array of real numbers"),
        ({"state": ones(4, 3)}, "TypeError: Stack: state is of type ndarray; expected (0, 1) or None"),
        ({"state": (None,)}, "ValueError: Stack: state has 1 parts; expected (0, 1)"),
        (
            {"state": (ones(4, 2), None)},
            "TypeError: Stack: state.0 is of type ndarray; expected LSTMState(cs, h) or None",
        ),
        ({"state": (GRUState(ones(4, 2)), None)}, "ValueError: Stack: state.0 has 1 parts; expected LSTMState(cs, h)"),
        (
            {"state": (LSTMState(ones(4, 2), ones(3, 2)), None)},
            "ValueError: Stack: state.0.h has shape (3, 2); expected (B, H) = (4, 2) with B from x, H from the layer",
        ),
        (
            {"state": (None, (None, [ones(4, 5, dtype="e")]))},
            "TypeError: Stack: state.1.bw.h has dtype float16; expected",
        ),
        ({"lengths": ones(4)}, "TypeError: Stack: lengths has dtype float32; expected integers"),
        ({"lengths": [True] * 4}, "TypeError: Stack: lengths has dtype bool; expected integers"),
        ({"lengths": [1, 2, 3]}, "ValueError: Stack: lengths has shape (3,); expected (B,) = (4,)"),
        ({"lengths": [1, 6, -1, 2]}, "ValueError: Stack: lengths[1] is 6; expected 0 to T = 5"),
        ({"lengths": [1, 2, -1, 2]}, "ValueError: Stack: lengths[2] is -1; expected 0 to T = 5"),
        (
            {"lengths": np.full(4, 2**64 - 1, np.uint64)},
            "ValueError: Stack: lengths[0] is 18446744073709551615; expected",
        ),
        ({"reset": np.zeros((5, 4))}, "TypeError: Stack: reset has dtype float64; expected bool"),
        ({"reset": np.zeros((4, 5), bool)}, "ValueError: Stack: reset has shape (4, 5); expected (T, B) = (5, 4)"),
    ],
)
def test_calls_refuse(given, said):
    layer = Stack([LSTM.init(3, 2, seed=0), Bidirectional(GRU.init(2, 5, seed=1), GRU.init(2, 5, seed=2))])
    for call in (layer, layer.forward):
        with refusal(said):
            call(**{"x": ones(5, 4, 3)} | given)


def test_backward_refuses():
    layer, other = (LSTM.init(3, 2, seed=seed) for seed in (0, 1))
    y, last, tape = layer.forward(ones(5, 4, 3))
    for arguments, said in [
        ((None, y), "TypeError: LSTM: tape is None; expected that of this layer's forward"),
        ((other.forward(ones(5, 4, 3))[2], y), "ValueError: LSTM: tape is that of another layer"),
        ((tape, y[1:]), "ValueError: LSTM: d_y has shape (4, 4, 2); expected (5, 4, 2), that of y"),
        ((tape, y.astype("d")), "TypeError: expected float32, that of the layer; d_y.astype(np.float32) converts it"),
        ((tape, y, last[:1]), "ValueError: LSTM: d_state has 1 parts; expected LSTMState(cs, h)"),
        ((tape, y, (last.cs, last.h[1:])), "ValueError: LSTM: d_state.h has shape (3, 2); expected (B, H) = (4, 2)"),
    ]:
        with refusal(said):
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
