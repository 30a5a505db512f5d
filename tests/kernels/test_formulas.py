"""The formulas against TensorFlow's own numbers and against differences of themselves."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from cases import FORWARD, arguments, arguments_of, derivative, golden, rng
from kernel_cases import compare_with_tensorflow

from blockcell.formulas import FORMULAS
from blockcell.optable import OPS

# The functions that also give the weights' gradients, which the golden files hold beside the raw gradients.
VJP = {"GRUBlockCellGrad": "gru_block_cell_vjp", "LSTMBlockCellGrad": "lstm_block_cell_vjp"}


def _results(case):
    with np.errstate(invalid="ignore"):
        results = FORMULAS[case["op"]](**case["inputs"], **case["attrs"])._asdict()
        if case["op"] in VJP:
            results |= FORMULAS[VJP[case["op"]]](**case["inputs"], **case["attrs"])._asdict()
    return results


@pytest.mark.parametrize("case", golden(), ids=lambda case: f"{case['op']}-{case['case']}")
def test_tensorflow(case):
    """TF computes in float32 or, badly, in float16: the bounds are its errors, in its eps of the largest entry."""
    results = _results(case)
    assert set(case["outputs"]) <= set(results)
    compare_with_tensorflow(case, results, saturated=20, usual=12)


GRADIENTS = {  # gradient op: the input that each of its outputs belongs to
    "GRUBlockCellGrad": {"d_x": "x", "d_h_prev": "h_prev"},
    "gru_block_cell_vjp": {f"d_{name}": name for name in ("x", "h_prev", "w_ru", "w_c", "b_ru", "b_c")},
    "block_gru_grad": {f"{name}_grad": name for name in ("x", "h_prev", "w_ru", "w_c", "b_ru", "b_c")},
    "block_rnn_grad": {f"{name}_grad": name for name in ("x", "h_prev", "w", "b")},
    "LSTMBlockCellGrad": {f"{name}_grad": name for name in ("cs_prev", "wci", "wcf", "wco")},
} | {
    op: {f"{name}_grad": name for name in ("x", "cs_prev", "h_prev", "w", "wci", "wcf", "wco", "b")}
    for op in ("lstm_block_cell_vjp", "BlockLSTMGrad", "BlockLSTMGradV2")
}
CHOICES = {
    "use_peephole": [True, False],
    "forget_bias": [0.0, -0.7],
    "cell_clip": [0.0],
    "activation": ["tanh", "sigmoid", "softplus", "linear"],  # without kinks, which differences might cross
}


def _gradient_cases():
    for op in GRADIENTS:
        names = [attribute.name for attribute in OPS[FORWARD[op]].attributes]
        for seq_len_max in [4, 3, 1, 0] if OPS[op].sequence else [None]:
            for values in itertools.product(*(CHOICES[name] for name in names)):
                yield op, seq_len_max, dict(zip(names, values, strict=True))


@pytest.mark.parametrize(("op", "seq_len_max", "attributes"), list(_gradient_cases()))
def test_gradient_is_the_derivative(op, seq_len_max, attributes):
    """Of a random linear functional of the outputs that have an incoming gradient."""
    forward = FORMULAS[FORWARD[op]]
    inputs = arguments(op, dtype=np.float64, seq_len_max=seq_len_max, **attributes)
    functional = {name: inputs[key] for name, key in _incoming(op).items()}
    grads = FORMULAS[op](**inputs)._asdict()
    at = arguments_of(FORWARD[op], inputs)

    for output, name in GRADIENTS[op].items():

        def loss(value, name=name):
            states = forward(**{**at, **attributes, name: value})._asdict()
            return sum((states[key] * weights).sum() for key, weights in functional.items())

        assert grads[output].shape == at[name].shape
        for trial in range(3):
            direction = rng(op, name, trial).standard_normal(at[name].shape)
            expected = derivative(loss, at[name], direction)
            assert (grads[output] * direction).sum() == pytest.approx(expected, rel=1e-8, abs=1e-9), output


def _incoming(op):
    """The outputs that the loss is made of, and the op's argument that holds the loss's gradient to each."""
    if "d_h" in (names := {tensor.name for tensor in OPS[op].inputs}):
        return {"h": "d_h"}
    return {"cs": "cs_grad", "h": "h_grad"} if "cs_grad" in names else {"h": "h_grad"}


@pytest.mark.parametrize("op", ["LSTMBlockCellGrad", "lstm_block_cell_vjp", "BlockLSTMGrad", "BlockLSTMGradV2"])
def test_clip_is_straight_through(op):
    """At the bound the true derivative to cs_prev is zero; TF's, and ours, is that of the cell without its clip."""
    clip = 0.05
    inputs = arguments(op, {"T": 1}, dtype=np.float64, use_peephole=False, cell_clip=clip)
    at_bound = np.abs(inputs["cs"]) == clip
    assert at_bound.any()
    shape = inputs["cs_prev"].shape
    inputs["h_grad"] = np.zeros_like(inputs["h_grad"])
    result = FORMULAS[op](**inputs).cs_prev_grad
    np.testing.assert_array_equal(result, (inputs["cs_grad"] * inputs["f"]).reshape(shape))

    forward = arguments_of(FORWARD[op], inputs)

    def clipped(cs_prev):
        return FORMULAS[FORWARD[op]](**{**forward, "cs_prev": cs_prev, "cell_clip": clip}).cs.reshape(shape)

    difference = derivative(clipped, inputs["cs_prev"], np.ones(shape), step=1e-6)
    assert (difference[at_bound.reshape(shape)] == 0).all()
    assert (np.abs(result) > 0)[at_bound.reshape(shape)].all()


@pytest.mark.parametrize("op", [name for name in OPS if OPS[name].sequence])
def test_zeros_past_seq_len_max(op):
    """And what lies there is never read."""
    inputs = arguments(op, dtype=np.float64, seq_len_max=2, cell_clip=0.0)
    clean = FORMULAS[op](**inputs)
    dirty = {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in inputs.items()}
    for tensor in OPS[op].inputs:
        if tensor.shape.startswith("T "):
            dirty[tensor.name][2:] = np.nan
    for tensor, expected, result in zip(OPS[op].outputs, clean, FORMULAS[op](**dirty), strict=True):
        np.testing.assert_array_equal(result, expected)
        if tensor.shape.startswith("T "):
            assert (result[2:] == 0).all()
            assert (result[:2] != 0).all()


@pytest.mark.parametrize("op", OPS)
def test_arguments_follow_the_table(op):
    """The formula takes the op's arguments, with its defaults, and no others, and gives float64 of any dtype."""
    table = OPS[op]
    defaults = {attribute.name: attribute.default for attribute in table.attributes if attribute.default is not None}
    inputs = {name: value for name, value in arguments(op, use_peephole=False).items() if name not in defaults}
    if "cs_prev" in inputs:
        inputs["cs_prev"] = 80 * inputs["cs_prev"]  # so that cells clip
    result = FORMULAS[op](**inputs)
    np.testing.assert_equal(result, FORMULAS[op](**inputs, **defaults))
    assert result._fields == tuple(tensor.name for tensor in table.outputs)
    assert {value.dtype for value in inputs.values() if isinstance(value, np.ndarray)} == {np.dtype(np.float32)}
    assert {value.dtype for value in result} == {np.dtype(np.float64)}
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        FORMULAS[op](**inputs, out=None)
