"""LSTMs and GRUs from and to PyTorch: its formulas in numpy, and the refusal of all others.

`tests/torch` compares with PyTorch itself.
"""

from __future__ import annotations

import re
import types

import numpy as np
import pytest
from convert_cases import (
    B,
    H,
    I,
    T,
    assert_same,
    from_torch,
    gru,
    lstm,
    rng,
    rnn,
    sigmoid,
    torch_weights,
    warned,
)

from blockcell import convert
from blockcell.convert import ConversionError
from blockcell.layers import Bidirectional, Dense, Stack


def torch_lstm(x, weight_ih, weight_hh, bias_ih, bias_hh, weight_hr=None):
    """Compute torch.nn.LSTM as its documentation writes it: gates i, f, g, o."""
    h, c, ys = np.zeros((B, weight_hh.shape[1])), np.zeros((B, H)), []
    rows = [slice(k * H, (k + 1) * H) for k in range(4)]
    for step in x:
        i, f, g, o = (step @ weight_ih[r].T + bias_ih[r] + h @ weight_hh[r].T + bias_hh[r] for r in rows)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        h = h if weight_hr is None else h @ weight_hr.T
        ys.append(h)
    return np.stack(ys)


def torch_rnn(x, weight_ih, weight_hh, bias_ih, bias_hh, nonlinearity=np.tanh):
    """Compute torch.nn.RNN as its documentation writes it."""
    h, ys = np.zeros((B, H)), []
    for step in x:
        h = nonlinearity(step @ weight_ih.T + bias_ih + h @ weight_hh.T + bias_hh)
        ys.append(h)
    return np.stack(ys)


def torch_gru(x, weight_ih, weight_hh, bias_ih, bias_hh):
    """Compute torch.nn.GRU as its documentation writes it: gates r, z, n."""
    h, ys = np.zeros((B, H)), []
    for step in x:
        x_r, x_z, x_n = np.split(step @ weight_ih.T + bias_ih, 3, axis=1)
        h_r, h_z, h_n = np.split(h @ weight_hh.T + bias_hh, 3, axis=1)
        z = sigmoid(x_z + h_z)
        h = (1 - z) * np.tanh(x_n + sigmoid(x_r + h_r) * h_n) + z * h
        ys.append(h)
    return np.stack(ys)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("gates", "formula"), [(4, torch_lstm), (3, torch_gru)])
def test_torch_formulas(gates, formula, bias, layers, bidirectional):
    """Of torch.nn's module with so many layers and directions; `to_torch` gives its weights."""
    g, weights, last = rng(), {}, []
    x = y = g.standard_normal((T, B, I))
    for layer in range(layers):
        outputs = []
        for suffix, order in [("", 1), ("_reverse", -1)][: 1 + bidirectional]:
            shapes = torch_weights(suffix=f"_l{layer}{suffix}", inputs=y.shape[2], gates=gates)
            own = {name: g.uniform(-1, 1, a.shape) for name, a in shapes.items() if bias or "weight" in name}
            weights |= own
            biases = () if bias else (np.zeros(gates * H),) * 2
            outputs.append(formula(y[::order], *own.values(), *biases)[::order])
            last.append(outputs[-1][-1 if order == 1 else 0])
        y = np.concatenate(outputs, axis=2)
    converted = from_torch(weights)
    result, state = converted(x)
    np.testing.assert_allclose(result, y, rtol=0, atol=1e-14)
    parts = state if layers > 1 else [state]
    cells = [cell for part in parts for cell in (part if bidirectional else [part])]
    np.testing.assert_allclose([cell.h for cell in cells], last, rtol=0, atol=1e-14)
    back = convert.to_torch(converted, prefix="net.")
    assert_same(converted, from_torch(back))
    for name, array in weights.items():
        assert "bias" in name or np.array_equal(back[f"net.{name}"], array)
        assert back[f"net.{name}"].flags.c_contiguous


@pytest.mark.parametrize("gates", [3, 4])
def test_torch_names(gates):
    """Of weights and of a module; the names of an LSTMCell and a GRUCell have no _l0."""
    weights, of_cell = (torch_weights("encoder.rnn.", suffix, gates=gates) for suffix in ("_l0", ""))
    expected = from_torch(weights)
    assert_same(from_torch(of_cell), expected)
    module = type("Module", (), {"state_dict": lambda self: weights | {"encoder.out.weight": np.ones(1)}})()
    with pytest.warns(UserWarning, match=r"^from_torch: left out: encoder.out \(weight\)$"):
        assert_same(from_torch(module), expected)
    assert_same(from_torch(module, prefix="encoder.rnn."), expected)


def test_what_is_not_compared():
    """Weights alone have no forward, nor has a stand-in for a module; one warning says so with all else."""
    weights = torch_weights("rnn.", gates=1)
    expected = from_torch(weights, nonlinearity="tanh")
    reason = "not compared with the model, because only weights were given: pass the module, or check=False"
    layer, message = warned(convert.from_torch, weights, prefix="rnn.", nonlinearity="tanh")
    assert_same(layer, expected)
    assert message == f"from_torch: {reason}"
    _, message = warned(convert.from_torch, weights | {"head.weight": np.ones((2, H))})
    assert re.fullmatch(rf"from_torch: left out: head \(weight\); weights do not tell .*'relu'; {reason}", message)
    module = types.SimpleNamespace(state_dict=torch_weights)
    for check in (None, True):
        _, message = warned(convert.from_torch, module, check=check)
        expected_text = "because it is no PyTorch module: pass the module, or check=False"
        assert message == f"from_torch: not compared with the model, {expected_text}"


@pytest.mark.parametrize("suffix", ["_l0", ""])
@pytest.mark.parametrize("nonlinearity", ["tanh", "relu"])
def test_torch_rnn(nonlinearity, suffix):
    """A module tells its nonlinearity; weights do not, and without the argument it is tanh, with a warning."""
    weights = torch_weights(prefix="rnn.", suffix=suffix, gates=1)
    x = rng().standard_normal((T, B, I))
    formulas = {"tanh": np.tanh, "relu": lambda z: np.maximum(z, 0)}
    expected = torch_rnn(x, *weights.values(), formulas[nonlinearity])
    layer = from_torch(weights, nonlinearity=nonlinearity)
    assert layer.activation == nonlinearity
    np.testing.assert_allclose(layer(x)[0], expected, rtol=0, atol=1e-14)
    plain, text = warned(from_torch, weights)
    assert plain.activation == "tanh"
    assert text == (
        "from_torch: weights do not tell the nonlinearity of plain RNNs; here it is tanh: 'rnn.'. Pass"
        " nonlinearity='tanh' or 'relu'"
    )
    inner = types.SimpleNamespace(nonlinearity=nonlinearity)
    module = types.SimpleNamespace(state_dict=lambda: weights, named_modules=lambda: [("", None), ("rnn", inner)])
    assert_same(from_torch(module), layer)
    assert_same(from_torch(module, prefix="rnn."), layer)
    back = convert.to_torch(layer)
    np.testing.assert_allclose(torch_rnn(x, *back.values(), formulas[nonlinearity]), expected, rtol=0, atol=1e-14)
    with pytest.raises(ValueError, match="nonlinearity is 'sigmoid'; expected 'tanh', 'relu' or None"):
        from_torch(weights, nonlinearity="sigmoid")
    with pytest.raises(ValueError, match="nonlinearity is 'relu', and there is no plain RNN; expected None"):
        from_torch(torch_weights(), nonlinearity="relu")


def test_torch_projection():
    """weight_hr, and h of another size than the cell."""
    g = rng()
    weights = torch_weights() | {"weight_hr_l0": g.uniform(-1, 1, (2, H))}
    weights["weight_hh_l0"] = weights["weight_hh_l0"][:, :2]
    x = g.standard_normal((T, B, I))
    layer = from_torch(weights)
    assert (layer.hidden_size, layer.output_size) == (H, 2)
    np.testing.assert_allclose(layer(x)[0], torch_lstm(x, *weights.values()), rtol=0, atol=1e-14)
    back = convert.to_torch(layer)
    assert back.keys() == weights.keys() and back["weight_hr_l0"].flags.c_contiguous
    np.testing.assert_allclose(torch_lstm(x, *back.values()), layer(x)[0], rtol=0, atol=1e-14)
    both = Bidirectional(*(lstm(g, projection=2) for _ in "fb"))
    stack = Stack([both, Bidirectional(*(lstm(g, inputs=4, projection=2) for _ in "fb"))])
    assert_same(from_torch(convert.to_torch(stack, prefix="a.")), stack)
    left = {name: value for name, value in weights.items() if name != "weight_hr_l0"}
    with pytest.raises(ValueError, match=r"weight_hh_l0 has shape \(16, 2\); expected"):
        from_torch(left)
    two = {name.replace("l0", f"l{k}"): value for k in (0, 1) for name, value in weights.items()}
    del two["weight_hr_l1"]
    with pytest.raises(ValueError, match="weight_hr_l1 is missing"):
        from_torch(two)
    for shape in ((2, H + 1), (3, H), (H,), ()):
        with pytest.raises(ValueError, match=r"weight_h[rh]_l0 has shape"):
            from_torch(weights | {"weight_hr_l0": np.ones(shape)})


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda w: w | {"weight_hr_l0": np.ones((2, H))}, ValueError, r"hh_l0 has shape \(16, 4\); expected \(16, 2\)"),
        (lambda w: {}, ValueError, "no name ends in weight_hh_l0"),
        (lambda w: {k: v for k, v in w.items() if k != "weight_ih_l0"}, ValueError, "weight_ih_l0 is missing"),
        (lambda w: {k: v for k, v in w.items() if k != "weight_hh_l0"}, ValueError, "weight_hh_l0 is missing"),
        (lambda w: w | {"weight_ih_l999999999": np.ones(1)}, ValueError, "weight_ih_l1 is missing"),
        (lambda w: w | {"weight_ih_l00": np.ones(1)}, ValueError, "weight_ih_l00 would be left over"),
        (lambda w: w | {"weight_hh_l0_rest": np.ones(1)}, ValueError, "weight_hh_l0_rest would be left over"),
        (lambda w: w | {"weight_hh_l0_raw": np.ones(1)}, ValueError, r"weight_hh_l0 has shape \(1,\); expected"),
        (lambda w: w | {"weight_hh": np.ones(1)}, ValueError, "weight_hh would be left over"),
        (lambda w: w | {"b.bias_hh_l0": np.ones(1)}, ValueError, "b.weight_ih_l0 is missing; beside b.bias_hh_l0"),
        (lambda w: w | {"bias_hh_l0": np.ones(3)}, ValueError, r"bias_hh_l0 has shape \(3,\); expected \(16,\)"),
        (
            lambda w: w | {"weight_ih_l0": np.ones((8, I))},
            ValueError,
            r"weight_ih_l0 has shape \(8, 3\); expected \(16, I\)",
        ),
        (
            lambda w: w | {"weight_hh_l0": np.ones((9, H))},
            ValueError,
            r"weight_hh_l0 has shape \(9, 4\); expected \(4H, H\) for an LSTM, \(3H, H\) for a GRU or \(H, H\)",
        ),
        (
            lambda w: w | {"bias_hh_l0": np.ones(16, np.float32)},
            TypeError,
            "bias_hh_l0 has dtype float32; expected float64",
        ),
        (lambda w: [w], TypeError, "the source is of type list; expected a module or a state_dict"),
        (lambda w: w | {3: np.ones(1)}, TypeError, "there is a name of type int; expected those of type str"),
    ],
)
def test_torch_errors(change, error, message):
    with pytest.raises(error, match=f"^from_torch: .*{message}"):
        from_torch(change(torch_weights()))


def test_torch_with_a_weight_missing():
    """Of three layers in two directions. The error names the missing one, whichever it is."""
    weights = {}
    for k in range(3):
        for direction in ("", "_reverse"):
            weights |= torch_weights("rnn.", f"_l{k}{direction}", inputs=2 * H if k else I)
    assert len(from_torch(weights).layers) == 3
    for name in weights:
        left = {key: value for key, value in weights.items() if key != name}
        with pytest.raises(
            ValueError, match=f"from_torch: {name} is missing; beside rnn.*, expected weight_ih, weight_hh, b"
        ):
            from_torch(left)
    for part in ("bias_ih", "bias_hh"):
        left = {key: value for key, value in weights.items() if part not in key}
        with pytest.raises(ValueError, match=f"rnn.{part}_l0 is missing"):
            from_torch(left)
    left = {key: value for key, value in weights.items() if "bias" not in key}
    for name, value in from_torch(left).weights.items():
        assert value.any() == name.endswith("w")


def test_torch_unreadable_tensor():
    class Elsewhere:
        def __array__(self, dtype=None, copy=None):
            raise RuntimeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu()")

    with pytest.raises(TypeError, match=r"weight_ih_l0 cannot be read as an array: .*Tensor.cpu"):
        from_torch(torch_weights() | {"weight_ih_l0": Elsewhere()})
    with pytest.raises(ValueError, match=r"no LSTM, GRU or RNN has the prefix 'b.'; there are"):
        from_torch(torch_weights("a."), prefix="b.")


WEIGHT_DROPS = {  # the names of the weights before the drop and after it, as libraries store them
    "fastai": ("rnns.0.weight_hh_l0_raw", "rnns.0.module.weight_hh_l0"),
    "fastai, without the copy": ("rnns.0.weight_hh_l0_raw", ""),
    "AWD-LSTM": ("rnns.0.module.weight_hh_l0_raw", ""),
    "in the module": ("rnns.0.module.weight_hh_l0_raw", "rnns.0.module.weight_hh_l0"),
}


@pytest.mark.parametrize("form", WEIGHT_DROPS)
def test_weight_drop(form):
    """The layer has the weights before the drop, never the stored copy in which entries are dropped."""
    inner, (raw, copy) = "rnns.0.module.", WEIGHT_DROPS[form]
    weights = torch_weights(inner)
    expected = from_torch(weights)
    source = dict(weights, **{raw: weights[f"{inner}weight_hh_l0"]})
    del source[f"{inner}weight_hh_l0"]
    if copy:
        source[copy] = weights[f"{inner}weight_hh_l0"] * (rng().uniform(size=(4 * H, H)) < 0.5)
    names = [*source]
    for prefix in (None, inner):
        assert_same(from_torch(source, prefix=prefix), expected)
    for prefix in ("", "rnns.0."):
        with pytest.raises(ValueError, match=rf"no LSTM, .* has the prefix '{prefix}'; there are \['{inner}'\]"):
            from_torch(source, prefix=prefix)
    assert [*source] == names


@pytest.mark.parametrize("prefix", [None, "decoder.zoneout.lstm."])
def test_zoneout_by_a_name(prefix):
    """Weights do not tell what is around a cell, so the name counts, also where nothing is compared."""
    _, text = warned(convert.from_torch, torch_weights("decoder.zoneout.lstm."), prefix=prefix, check=False)
    assert text.startswith(
        "from_torch: 'decoder.zoneout.lstm' has zoneout by its name, which is not converted: it mixes"
    )


QUANTIZED = {
    "LSTM": "0._all_weight_values.0.param",
    "LSTMCell": "0._packed_weight_ih",
    "quantizable LSTM": "0.layers.0.layer_fw.cell.igates.weight",
    "quantizable LSTMCell": "0.hgates.weight",
}


@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantized_by_torch(kind):
    source = {QUANTIZED[kind]: object()}
    advice = r"If PyTorch has quantized it: load the model without that .*layer.quantize\('int8'\)$"
    with pytest.raises(ValueError, match=rf"^from_torch: .* no name ends in weight_hh_l0\. {advice}"):
        from_torch(source)
    source |= torch_weights("1.")
    with pytest.raises(ValueError, match=rf"has the prefix '0.'; there are \['1.'\]\. {advice}"):
        from_torch(source, prefix="0.")
    layer, message = warned(from_torch, source)
    assert_same(layer, from_torch(torch_weights()))
    assert message.startswith("from_torch: left out: 0")


def test_to_torch_refused():
    g = rng()
    with pytest.raises(ConversionError, match=r"the layer is a GRU with reset_after=False.*no weights are equal"):
        convert.to_torch(gru(g))
    for stack in (
        Stack([lstm(g), lstm(g, inputs=H, hidden=2)]),
        Stack([lstm(g), Bidirectional(*[lstm(g, inputs=H)] * 2)]),
        Stack([lstm(g), Dense.init(H, 2, dtype=np.float64)]),
        Stack([lstm(g, projection=2), lstm(g, inputs=2, projection=3)]),
    ):
        with pytest.raises(ConversionError, match=r"Convert layer.layers one by one"):
            convert.to_torch(stack)
    with pytest.raises(ConversionError, match=r"the layers have the activations .*; a torch.nn.RNN has one"):
        convert.to_torch(Stack([rnn(g), rnn(g, inputs=H, activation="relu")]))
    with pytest.raises(ConversionError, match=r"the RNN has activation='elu', torch.nn.RNN has no such thing"):
        convert.to_torch(rnn(g, activation="elu"))
