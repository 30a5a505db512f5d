"""The model of a step of training gives what layers, losses and optimizers give, step after step.

Sessions of it are in `test_onnx_training_session.py`, and on WebGPU it is in `test_onnx_webgpu.py`.
"""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from cases import rng
from export_cases import LAYERS, B, T, dense, drawn, gru, lstm, random_layers
from graphs import EPS, LOOPS, checked, feeds, named, on_onnxruntime, on_reference, started_on_reference, types
from training_cases import LOSSES, OPTIMIZERS, Training, errors

import onnx_export
from blockcell import GRU, LSTM, Bidirectional, Dense, Stack, loss, optim
from onnx_export.training.losses import LOSS_GRAPHS
from onnx_export.training.optimizers import OPTIMIZER_GRAPHS

LIMIT = 1e-12  # in float64, of the largest entry or of 1, after any number of steps here


def started(model):
    """A function that runs the model on onnxruntime."""
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return lambda given: session.run(None, given)


def check(training, model, steps, start=started, limit=LIMIT):
    """Both train on their own, from the same weights on the same batches; all outputs of all steps agree."""
    run = start(model)
    ours = theirs = training.layer.weights
    our_memory = their_memory = None
    state = our_state = training.state
    for number in range(steps):
        batch = training.batch(number)
        expected = training.step(batch, ours, our_memory, our_state)
        given = training.feeds(batch, theirs, their_memory, state)
        assert {value.name for value in model.graph.input} == given.keys()
        found = named(model, run(feeds(model, given)))
        off = errors(found, expected)
        worst = max(off, key=off.get)
        assert off[worst] <= limit, f"step {number}: {worst} is off by {off[worst]:.2e}"
        assert "new_step" not in found or found["new_step"] == number + 1 == expected["new_step"]
        for name in ours:
            assert np.abs(expected[f"new_{name}"] - ours[name]).max(initial=0) > 0 or not ours[name].size, name
        ours, our_memory = training.after(expected)
        theirs, their_memory = training.after(found)


# ------------------------------------------------------------------------------------------------------------- results
def masked(layer, criterion, optimizer):
    return Training(layer, criterion, optimizer, max_norm=0.5, mask=True, **OPTIMIZERS[optimizer])


LONG = [("LSTM", "mean_squared_error"), ("Classifier", "softmax_cross_entropy"), ("Bidirectional", LOSSES[0])]
SLOW = [(*case, started) for case in product(LAYERS, LOSSES) if case not in LONG]
SLOW += [(*case, started_on_reference) for case in LONG]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("name", "criterion", "start"),
    [*((*case, started) for case in LONG), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_a_hundred_steps(name, criterion, start, optimizer):
    training = Training(LAYERS[name]("float64"), criterion, optimizer, rate=0.01, max_norm=1.0, **OPTIMIZERS[optimizer])
    check(training, training.model(), 100, start)


@pytest.mark.meet(1)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("criterion", LOSSES)
@pytest.mark.parametrize("name", LAYERS)
def test_several_steps(name, criterion, optimizer):
    training = masked(LAYERS[name]("float64"), criterion, optimizer)
    model = training.model()
    check(training, model, 10)
    check(training, model, 1, started_on_reference)
    check(training, training.model(functions=False), 3, started_on_reference)


OPTIONS = {
    "nothing": {"lengths": False},
    "mask alone": {"lengths": False, "mask": True},
    "all": {"reset": True, "mask": True, "state": True, "max_norm": 0.3},
    "states without lengths": {"lengths": False, "state": True, "max_norm": 100.0},
}


@pytest.mark.parametrize("criterion", LOSSES)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", ["LSTM with all", "Bidirectional", "Classifier", "Both ends", "Dense"])
def test_options(name, options, criterion):
    training = Training(LAYERS[name]("float64"), criterion, "adam", **OPTIONS[options])
    check(training, training.model(), 2)


@pytest.mark.meet(2)
@pytest.mark.parametrize("functions", [True, False])
@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", ["Reverse", "Both ends", "Variants"])
def test_forms(name, loop, static, functions):
    training = Training(LAYERS[name]("float64"), "mean_squared_error", "adam", reset=True, state=True, max_norm=0.5)
    check(training, training.model(loop=loop, static=static, functions=functions), 2)


@pytest.mark.parametrize("fixed", [{"T": T}, {"B": B}, {"T": T, "B": B}])
@pytest.mark.parametrize("lengths", [True, False])
def test_fixed_sizes(lengths, fixed):
    for criterion in LOSSES:
        training = Training(LAYERS["Bidirectional"]("float64"), criterion, "momentum", lengths=lengths)
        model = training.model(sizes=fixed)
        check(training, model, 1)
        x = model.graph.input[0].type.tensor_type.shape.dim
        assert [dim.dim_value or dim.dim_param for dim in x][:2] == [fixed.get("T", "T"), fixed.get("B", "B")]


@pytest.mark.parametrize("opset", [18, 19, 20, 21])
def test_opsets(opset):
    training = Training(LAYERS["Classifier"]("float64"), "softmax_cross_entropy", "adam", max_norm=0.5)
    check(training, training.model(opset=opset), 1)


@pytest.mark.meet(2)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("criterion", LOSSES)
@pytest.mark.parametrize("name", ["LSTM", "LSTM with all", "GRU", "GRU after", "RNN", "Bidirectional", "Dense"])
def test_other_dtypes(name, criterion, optimizer, dtype):
    """One step, against float64 of the same numbers. In float16 everything between layers and the weights is rounded,
    and what the optimizer keeps is float32."""
    layer = LAYERS[name](dtype)
    training = masked(layer, criterion, optimizer)
    found, expected = training.first_step(training.model())
    off = errors(found, expected)
    assert max(off.values()) <= 24 * EPS[np.dtype(dtype)], off
    for key, array in found.items():
        narrow = {"y", *(f"new_{name}" for name in layer.weights)}
        assert array.dtype == (np.int64 if key == "new_step" else dtype if key in narrow else np.float32), key


def test_another_dtype_than_the_layers():
    training = Training(LAYERS["Classifier"]("float64"), "mean_squared_error", "adam")
    narrow = drawn(LAYERS["Classifier"]("float32"))
    model = onnx_export.training_step(narrow, None, loss="mean_squared_error", optimizer="adam", dtype="float64")
    check(training, model, 2)


# -------------------------------------------------------------------------------------------------------- random layers
SLOW_CASES = [pytest.param(case, marks=pytest.mark.slow) for case in range(25, 400)]


@pytest.mark.parametrize("case", [*range(25), *SLOW_CASES])
def test_random_training(case, seed):
    g = rng("training", seed, case)
    layers = random_layers(g, 3, "float64", 6)
    if g.integers(2):
        last = [True, False, "ends"][g.integers(3 if isinstance(layers[-1], Bidirectional) else 2)]
        layers.append(dense(int(g.integers(2, 5)), "float64", layers[-1].output_size, last=last))
    layer = Stack(layers) if len(layers) > 1 or g.integers(2) else layers[0]
    optimizer = str(g.choice([*OPTIMIZERS]))
    settings = dict(OPTIMIZERS[optimizer]) if g.integers(2) or "epsilon" in OPTIMIZERS[optimizer] else {}
    takes = {name: bool(g.integers(2)) for name in ("lengths", "reset", "mask", "state")}
    sizes = int(g.integers(1, 9)), int(g.integers(1, 6))
    max_norm = [None, 0.1, 10.0][g.integers(3)]
    form = {"loop": str(g.choice(LOOPS)), "static": bool(g.integers(2)), "functions": bool(g.integers(2))}
    said = {"sizes": sizes, "max_norm": max_norm, **takes, **settings}
    training = Training(layer, str(g.choice(LOSSES)), optimizer, seed=case, **said)
    print(f"{layer!r} {training.options} T, B = {sizes} {form}")
    off = errors(*training.first_step(training.model(**form)))
    assert max(off.values()) <= LIMIT, off


# ------------------------------------------------------------------------------------ losses, norms, adam's first steps
def of_logits(logits, label, run):
    """The loss and its gradient, which sgd makes of weights of 0 where x is 1; the logits are the biases."""
    dtype = logits.dtype
    layer = Dense(np.zeros((1, len(logits)), dtype), logits)
    model = onnx_export.training_step(layer, None, loss="softmax_cross_entropy", optimizer="sgd", lengths=False)
    given = {**layer.weights, "x": np.ones((1, 1, 1), dtype), "target": np.array([[label]])}
    given["learning_rate"] = np.ones((), dtype)
    found = named(model, run(checked(model), given))
    return found["loss"], -found["new_w"][0]


LOGITS = [
    [0.0, -40.0, -41.0],  # a small loss
    [1.0, 1.0, 1.0],  # the largest three times
    [2.0, 2.0, -1.0],
    [1e4, -1e4, 3.0],
    [0.0, -9.0, -np.inf],
    [-3.0, -20.0, -4.0],
]


@pytest.mark.parametrize("run", [on_onnxruntime, on_reference])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("logits", LOGITS)
def test_the_digits_of_small_losses(logits, dtype, run):
    logits = np.array(logits, dtype)
    for label in range(3):
        if np.isinf(logits[label]):
            continue
        value, d_y = of_logits(logits, label, run)
        right, d_right = loss.softmax_cross_entropy(logits[None, None], [[label]])
        np.testing.assert_allclose(value, right, rtol=8 * EPS[np.dtype(dtype)], atol=1e-300)
        np.testing.assert_allclose(d_y, d_right[0, 0], rtol=8 * EPS[np.dtype(dtype)], atol=1e-300)


@pytest.mark.parametrize("criterion", LOSSES)
@pytest.mark.parametrize("name", ["LSTM", "Classifier"])
def test_nothing_counts(name, criterion):
    """The loss is 0, and so are all gradients."""
    training = Training(LAYERS[name]("float64"), criterion, "sgd", mask=True, max_norm=1.0)
    model, batch = training.model(), training.batch(0)
    batch["mask"][...] = False
    batch["target"] = np.full_like(batch["target"], -1 if criterion.startswith("s") else np.nan)
    found = named(model, on_onnxruntime(model, training.feeds(batch, training.weights, None)))
    assert found["loss"] == found["norm"] == 0
    for key, weight in training.weights.items():
        np.testing.assert_array_equal(found[f"new_{key}"], weight)


def of_gradient(grad, **options):
    """The outputs of a step of a layer whose gradients to w and b are both [grad]: x is 1, y is 0, target -grad / 2."""
    dtype = grad.dtype
    layer = Dense(np.zeros((1, 1), dtype), np.zeros(1, dtype))
    model = onnx_export.training_step(layer, None, loss="mean_squared_error", lengths=False, **options)
    given = {**layer.weights, "x": np.ones((1, 1, 1), dtype), "target": -grad.reshape(1, 1, 1) / dtype.type(2)}
    given |= {"learning_rate": np.ones((), dtype), "step": np.array(0)}
    given |= {f"{slot}.{name}": np.zeros_like(array) for slot in "mv" for name, array in layer.weights.items()}
    return named(model, on_onnxruntime(model, given))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-3, 0.5, 1e10, 1e30])
def test_norms_of_any_size(size, dtype):
    """Squares of these overflow in float32, or are nothing."""
    grad = np.array(size, dtype)
    found = of_gradient(grad, optimizer="sgd", max_norm=0.5)
    clipped, norm = optim.clip_global_norm({"w": grad, "b": grad}, 0.5)
    np.testing.assert_allclose(found["norm"], norm, rtol=4 * EPS[np.dtype(dtype)])
    np.testing.assert_allclose(-found["new_b"][0], clipped["b"], rtol=8 * EPS[np.dtype(dtype)])


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_norms_that_are_not_finite(bad, dtype):
    found = of_gradient(np.array(bad, dtype), optimizer="sgd", max_norm=0.5)
    assert not np.isfinite(found["norm"]) and np.isnan(found["new_w"]).all() and np.isnan(found["new_b"]).all()


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.5), (0.99, 0.99999), (0.5, 0.0)])
def test_adam_after_any_number_of_steps(betas, dtype):
    """In float32, too, 1 - beta^t has all its digits."""
    settings = {"beta1": betas[0], "beta2": betas[1], "epsilon": 1e-3}
    layer = Dense(np.ones((1, 1), dtype), np.zeros(1, dtype))
    model = onnx_export.training_step(
        layer, None, loss="mean_squared_error", optimizer="adam", lengths=False, **settings
    )
    run = started(model)
    for before in (0, 1, 2, 3, 9, 50, 249, 250, 1000, 24_999, 10**6):
        memory = {"step": np.array(before), "m.w": [[0.03]], "v.w": [[0.002]], "m.b": [0.01], "v.b": [0.5]}
        memory = {key: np.asarray(value, None if key == "step" else dtype) for key, value in memory.items()}
        given = {**layer.weights, **memory, "x": np.ones((1, 1, 1), dtype), "target": np.full((1, 1, 1), 0.9, dtype)}
        given["learning_rate"] = np.array(0.1, dtype)
        found = named(model, run(given))
        d_y = loss.mean_squared_error(given["x"], given["target"])[1]
        grads = {"w": d_y.reshape(1, 1), "b": d_y.reshape(1)}
        weights, after = optim.adam(layer.weights, grads, memory, learning_rate=0.1, **settings)
        assert found["new_step"] == after["step"] == before + 1
        for key, right in (weights | after).items():
            moved, right_move = (array - layer.weights.get(key, 0) for array in (found[f"new_{key}"], right))
            # In float64, optim itself has 1 - beta^t to an eps of 1 only.
            limit = LIMIT if dtype == "float64" else 16 * EPS[np.dtype(dtype)]
            np.testing.assert_allclose(moved, right_move, rtol=0, atol=limit * abs(right).max())


def test_adam_without_epsilon():
    """A weight that never had a gradient stays where it is."""
    found = of_gradient(np.array(0.0), optimizer="adam", epsilon=0)
    assert found["new_w"] == found["new_b"] == 0
    found = of_gradient(np.array(3.0), optimizer="adam", epsilon=0)
    np.testing.assert_allclose(found["new_b"], [-1], rtol=1e-14)


# ------------------------------------------------------------------------------------------------------------ the model
def test_every_loss_and_optimizer_has_a_row_here_and_is_in_the_page():
    page = (Path(__file__).parents[2] / "docs/onnx/training.md").read_text()
    assert [*LOSS_GRAPHS] == LOSSES and [*OPTIMIZER_GRAPHS] == [*optim.OPTIMIZERS]
    assert all(f'"{name}"' in page for name in (*LOSSES, *OPTIMIZERS))
    for name, row in optim.OPTIMIZERS.items():
        assert len(OPTIMIZER_GRAPHS[name].slots) == len(row.slots)
        assert all(f"`{setting}`" in page for setting in row.settings)


def test_names():
    layer = Stack([Bidirectional(lstm(2, "float16"), gru(2, "float16")), dense(4, "float16", 4, last=True)])
    model = checked(
        onnx_export.training_step(
            layer, None, loss=LOSSES[0], optimizer="adam", max_norm=1, reset=True, mask=True, state=True
        )
    )
    states, weights = ["0.fw.cs", "0.fw.h", "0.bw.h"], [*layer.weights]
    memory = ["step", *(f"{slot}.{name}" for name in weights for slot in "mv")]
    inputs = ["x", "lengths", "reset", "mask", "target", *(f"{name}_prev" for name in states), "learning_rate"]
    assert [value.name for value in model.graph.input] == [*inputs, *weights, *memory]
    outputs = ["loss", "norm", "y", *states, *(f"new_{name}" for name in [*weights, *memory])]
    assert [value.name for value in model.graph.output] == outputs
    assert not model.graph.initializer
    shapes = types(model)
    kind = onnx.TensorProto
    assert shapes["x"] == (kind.FLOAT16, ["T", "B", 3]) and shapes["y"] == (kind.FLOAT16, ["B", 4])
    assert shapes["target"] == (kind.INT64, ["B"]) and shapes["mask"] == (kind.BOOL, ["B"])
    assert shapes["reset"] == (kind.BOOL, ["T", "B"]) and shapes["lengths"] == (kind.INT64, ["B"])
    assert shapes["learning_rate"] == shapes["loss"] == shapes["norm"] == (kind.FLOAT, [])
    assert shapes["step"] == shapes["new_step"] == (kind.INT64, [])
    assert shapes["0.fw.w"] == shapes["new_0.fw.w"] == (kind.FLOAT16, [5, 8])
    assert shapes["m.0.fw.w"] == shapes["new_v.0.fw.w"] == (kind.FLOAT, [5, 8])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_functions_of_the_model(optimizer):
    """One for each kind of cell and direction, the loss and the optimizer, whose nodes are as many as the weights."""
    layer = Training(LAYERS["Classifier"]("float32"), LOSSES[0], optimizer).layer
    model = onnx_export.training_step(layer, None, loss=LOSSES[0], optimizer=optimizer, max_norm=1.0)
    update = f"{optimizer.title()}Update"
    usual = ["LSTM", "LSTMGrad", "SoftmaxCrossEntropy", "Largest", "Unit", "Squares", "Norm", "ClipScale"]
    assert [made.name for made in model.functions] == [*usual, *["AdamRate"] * (optimizer == "adam"), update]
    kinds = [node.op_type for node in model.graph.node]
    assert all(kinds.count(each) == len(layer.weights) for each in (update, "Largest", "Squares"))
    alone = onnx_export.training_step(layer, None, loss=LOSSES[0], optimizer=optimizer, functions=False)
    assert not alone.functions and all(node.domain == "" for node in alone.graph.node)
    assert [entry.domain for entry in alone.opset_import] == [""]


def test_the_gradient_to_x_is_not_computed():
    """Nobody reads it: neither that of the first layer of a stack nor that of a direction of its."""
    model = onnx_export.training_step(LAYERS["Stack"]("float32"), None, loss=LOSSES[1], optimizer="sgd")
    given = [node for node in model.graph.node if "Grad" in node.op_type]
    without = [node.name for node in given if not any(output.endswith(".x_grad") for output in node.output)]
    assert {name.partition("Grad")[0] for name in without} == {"0.fw.GRU", "0.bw.LSTM"} and len(given) == 8


def test_the_file_is_the_model(tmp_path):
    layer = LAYERS["Stack"]("float32")
    options = {"loss": loss.mean_squared_error, "optimizer": optim.adam, "max_norm": 2, "beta2": 0.99}
    model = onnx_export.training_step(layer, tmp_path / "step.onnx", **options)
    assert onnx.load(tmp_path / "step.onnx") == model
    facts = {entry.key: entry.value for entry in model.metadata_props}
    assert json.loads(facts["blockcell.layer"])["type"] == "Stack" and facts["blockcell.loop"] == "scan"
    assert json.loads(facts["blockcell.training"]) == {
        "loss": "mean_squared_error", "optimizer": "adam", "max_norm": 2, "beta1": 0.9, "beta2": 0.99, "epsilon": 1e-8,
    }  # fmt: skip


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_defaults_are_those_of_optim(optimizer):
    training = Training(LAYERS["LSTM"]("float64"), LOSSES[1], optimizer)
    check(training, training.model(), 3)
    facts = {entry.key: entry.value for entry in training.model().metadata_props}
    assert json.loads(facts["blockcell.training"]).keys() == {"loss", "optimizer", "max_norm", *OPTIMIZERS[optimizer]}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"loss": "hinge"}, ValueError, "loss is 'hinge'; expected one of 'softmax_cross_entropy', 'mean_squared_er"),
        ({"loss": None}, ValueError, "loss is None; expected one of"),
        ({"optimizer": "lion"}, ValueError, "optimizer is 'lion'; expected one of 'sgd', 'momentum', 'adam'"),
        ({"optimizer": np.zeros(3)}, ValueError, "optimizer is of type ndarray; expected one"),
        ({"momentum": 0.5}, TypeError, "momentum unknown to the optimizer 'adam'; expected beta1, beta2, epsilon"),
        ({"optimizer": "sgd", "beta1": 0.5}, TypeError, "beta1 unknown to the optimizer 'sgd'; it has no settings"),
        ({"learning_rate": 0.1}, TypeError, "epsilon; learning_rate is an input of the model"),
        ({"beta1": 1.0}, ValueError, "beta1 is 1.0; expected 0 <= beta1 < 1"),
        ({"beta2": -0.1}, ValueError, "beta2 is -0.1; expected 0 <= beta2 < 1"),
        ({"beta2": "much"}, TypeError, "beta2 is 'much'; expected a real number"),
        ({"epsilon": np.nan}, ValueError, "epsilon is nan; expected 0 <= epsilon < inf"),
        ({"max_norm": 0}, ValueError, "max_norm is 0; expected a number above 0, or None"),
        ({"max_norm": -1}, ValueError, "max_norm is -1.0; expected 0 <= max_norm < inf"),
        ({"max_norm": True}, TypeError, "max_norm is True; expected a real number"),
        ({"loop": "native"}, ValueError, "loop='native' is not possible: ONNX's LSTM has no gradient"),
        ({"loop": "while"}, ValueError, "loop is 'while'; expected one of scan, unroll, native, loop"),
        ({"provider": "webgpu"}, ValueError, "there is no form for provider='webgpu'"),
        ({"opset": 17}, ValueError, "opset is 17; expected 18 or newer"),
        ({"dtype": "int8"}, ValueError, "dtype is 'int8'; expected float32, float64 or float16"),
        ({"sizes": {"T": 0}}, ValueError, "sizes['T'] is 0; expected an integer >= 1"),
    ],
)
def test_mistakes(options, error, message, tmp_path):
    with pytest.raises(error, match=f"^training_step: (.*: )?.*{re.escape(message)}"):
        usual = {"loss": LOSSES[0], "optimizer": "adam"}
        onnx_export.training_step(lstm(4, "float32"), tmp_path / "step.onnx", **usual | options)
    assert not [*tmp_path.iterdir()]


def test_what_is_no_layer_and_no_path():
    with pytest.raises(TypeError, match=r"^training_step: layer is of type str; expected an LSTM, GRU"):
        onnx_export.training_step("LSTM", None, loss=LOSSES[0], optimizer="sgd")
    with pytest.raises(TypeError, match=r"^training_step: path is 3; expected a path or None"):
        onnx_export.training_step(lstm(4, "float32"), 3, loss=LOSSES[0], optimizer="sgd")
    with pytest.raises(ValueError, match=r"layer.output_size is 0; expected at least one class"):
        onnx_export.training_step(lstm(0, "float32"), None, loss=LOSSES[0], optimizer="sgd")


def test_softmax_before_the_cross_entropy():
    head = Dense.init(4, 3, seed=0, activation="softmax", last=True)
    for layer in (head, Stack([lstm(4, "float32"), head]), Stack([lstm(4, "float32"), Stack([head])])):
        with pytest.raises(ValueError, match="ends in a Dense with activation='softmax'; expected activation=None"):
            onnx_export.training_step(layer, None, loss="softmax_cross_entropy", optimizer="sgd")
        onnx_export.training_step(layer, None, loss="mean_squared_error", optimizer="sgd")


@pytest.mark.parametrize(("inputs", "cells", "batch"), [(0, 3, 2), (3, 2, 0), (3, 0, 2), (0, 0, 0)])
def test_sizes_of_zero(inputs, cells, batch):
    criterion = LOSSES[0] if cells else LOSSES[1]  # there must be classes
    both = Bidirectional(*(GRU.init(inputs, cells, seed=seed, dtype="float64") for seed in (1, 2)))
    layer = Stack([both, LSTM.init(2 * cells, cells, seed=3, dtype="float64")])
    training = Training(layer, criterion, "adam", sizes=(2, batch), max_norm=1.0, mask=True)
    assert max(errors(*training.first_step(training.model())).values()) <= LIMIT
