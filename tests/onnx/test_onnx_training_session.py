"""A `TrainingSession` trains a layer as layers, losses and optimizers do; what it keeps, gives back and refuses."""

from __future__ import annotations

import copy
import re
from types import SimpleNamespace

import numpy as np
import onnxruntime
import pytest
from bits import same
from export_cases import LAYERS, LENGTHS, B, I, T, dense, flat, lstm
from graphs import named
from refusals import refusal
from training_cases import LOSSES, OPTIMIZERS, Training, errors

import onnx_export
from blockcell import Stack, loss, optim
from onnx_export import TrainingSession
from onnx_export.runtime import KeptValues

LIMIT = 1e-12


def model_of(layer, **options):
    usual = {"loss": LOSSES[0], "optimizer": "adam"}
    return onnx_export.training_step(layer, None, **usual | options)


def classifier(dtype="float64"):
    return Stack([lstm(4, dtype), dense(3, dtype, 4, last=True)])


def batch(dtype="float64", seed=0, target=None):
    g = np.random.default_rng(seed)
    x = g.uniform(-1, 1, (T, B, I)).astype(dtype)
    return {"x": x, "target": g.integers(0, 3, B) if target is None else target}


def started(model):
    """Return a function that runs a step's model on onnxruntime, and gives its outputs by name."""
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return lambda given: named(model, session.run(None, given))


# ---------------------------------------------------------------------------------------------------------------- steps
@pytest.mark.meet(2)
@pytest.mark.parametrize("options", [{}, {"max_norm": 0.5, "reset": True, "mask": True, "state": True}])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("criterion", LOSSES)
@pytest.mark.parametrize("name", ["LSTM with all", "Bidirectional", "Classifier", "Projected"])
def test_trains_as_layers_do(name, criterion, optimizer, options, tmp_path):
    training = Training(LAYERS[name]("float64"), criterion, optimizer, **options)
    before = {key: weight.copy() for key, weight in training.weights.items()}
    onnx_export.training_step(training.layer, tmp_path / "step.onnx", **training.options)
    session = TrainingSession(tmp_path / "step.onnx", training.layer)
    weights, memory, state, first = training.weights, None, training.state, training.state
    for number in range(10):
        data = training.batch(number)
        expected = training.step(data, weights, memory, state)
        result = session(**data, learning_rate=training.rate, **{"state": state} if first else {})
        fields = ["loss", *["norm"] * ("max_norm" in options), "y", *["state"] * ("state" in options)]
        assert result._fields == tuple(fields) and type(result.loss) is float
        weights, memory = training.after(expected)
        found = {name: np.asarray(getattr(result, name)) for name in fields if name != "state"}
        if first:
            state = result.state
            found |= flat(training.layer, state)
        found |= {f"new_{key}": array for key, array in (session.weights | session.optimizer_state).items()}
        assert max(errors(found, expected).values()) <= LIMIT
    assert list(session.weights) == list(weights) and list(session.optimizer_state) == list(memory)
    for key, weight in training.layer.weights.items():
        np.testing.assert_array_equal(weight, before[key])  # the layer given is as it was
    trained = session.layer()
    assert repr(trained) == repr(training.layer) and same(trained.weights, session.weights | trained.weights)
    for key, weight in trained.weights.items():
        np.testing.assert_array_equal(weight, session.weights[key])


def test_the_state_is_one_of_optim():
    """A run goes on in a new session, or with the function of `blockcell.optim`, from where it was."""
    layer, data = classifier(), batch()
    model = model_of(layer)
    whole = TrainingSession(model, layer)
    for _ in range(6):
        whole(**data, learning_rate=0.1)
    first = TrainingSession(model, layer)
    for _ in range(3):
        first(**data, learning_rate=0.1)
    second = TrainingSession(model, first.layer(), optimizer_state=first.optimizer_state)
    for _ in range(3):
        second(**data, learning_rate=0.1)
    assert same(second.weights, whole.weights) and same(second.optimizer_state, whole.optimizer_state)
    assert second.optimizer_state["step"] == 6

    trained, state = first.layer(), first.optimizer_state
    for _ in range(3):
        y, _, tape = trained.forward(data["x"])
        grads = trained.backward(tape, loss.softmax_cross_entropy(y, data["target"])[1])[2]
        weights, state = optim.adam(trained.weights, grads, state, learning_rate=0.1)
        trained.set_weights(**weights)
    for name, weight in whole.weights.items():
        np.testing.assert_allclose(trained.weights[name], weight, rtol=0, atol=LIMIT)
    again = TrainingSession(model, trained, optimizer_state=state)
    np.testing.assert_allclose(again(**data).loss, whole(**data).loss, rtol=LIMIT)


def test_two_sets_of_memory_change_places():
    """No step reads what it writes, and none allocates weights."""
    layer, data = classifier("float32"), batch("float32")
    session = TrainingSession(model_of(layer), layer)
    kept = session._kept

    def addresses(values):
        return [value.data_ptr() for value in values.values()]

    one, other = addresses(kept.inputs), addresses(kept.outputs)
    assert not {*one} & {*other} and len({*one, *other}) == 2 * len(one)
    before = session.weights
    for number in range(5):
        assert (addresses(kept.inputs), addresses(kept.outputs)) == ((one, other) if number % 2 == 0 else (other, one))
        session(**data)
        old = {name: kept.outputs[name].numpy() for name in before}
        for name, weight in before.items():
            np.testing.assert_array_equal(old[name], weight)  # what the step has read is as it was
        before = session.weights
    before[next(iter(before))][...] = 7
    assert not same(before, session.weights)  # copies


def test_kept_values_are_copies():
    array = np.arange(6.0).reshape(2, 3).T
    kept = KeptValues({"a": array}, "cpu")
    array[...] = 0
    np.testing.assert_array_equal(kept.array("a"), np.arange(6.0).reshape(2, 3).T)


@pytest.mark.parametrize(("steps", "rows"), [(0, 3), (3, 0)])
def test_no_steps_or_rows(steps, rows):
    """They are refused, and the weights stay as they are."""
    layer = classifier()
    session = TrainingSession(model_of(layer, optimizer="sgd", max_norm=1), layer)
    with pytest.raises(ValueError, match=rf"x has shape \({steps}, {rows}, {I}\); expected at least a step and a row"):
        session(x=np.zeros((steps, rows, I)), target=np.zeros(rows, int), learning_rate=0.1)
    assert same({**session.weights}, {name: np.array(weight) for name, weight in layer.weights.items()})


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_other_dtypes(dtype):
    """A layer of one dtype, a model of another: the layer that comes back has its own."""
    layer, data = classifier(dtype), batch()
    session = TrainingSession(model_of(layer, dtype="float64"), layer)
    values = [session(**data, learning_rate=0.1).loss for _ in range(20)]
    assert values[-1] < 0.8 * values[0]
    assert session.weights["1.w"].dtype == np.float64 and session.layer().dtype == dtype
    own = TrainingSession(model_of(layer), layer)
    first = own(**batch(dtype), learning_rate=0.1)
    assert first.y.dtype == dtype and abs(first.loss - values[0]) < 1e-3
    assert own.weights["1.w"].dtype == dtype and own.optimizer_state["m.1.w"].dtype == np.float32


def test_what_may_be_left_out():
    """Lengths, masks, resets and states; of adam the learning rate too, which is optim's then."""
    layer, data = classifier(), batch()
    model = model_of(layer, reset=True, mask=True, state=True)
    short, full = (TrainingSession(model, layer) for _ in range(2))
    a = short(**data)
    lists = {"x": data["x"].tolist(), "target": data["target"].tolist(), "reset": np.zeros((T, B), bool).tolist()}
    b = full(**lists, lengths=[T] * B, mask=[True] * B, state=None, learning_rate=0.001)
    assert a.loss == b.loss and same(short.weights, full.weights)
    sgd = TrainingSession(model_of(layer, optimizer="sgd"), layer)
    with pytest.raises(TypeError, match=r"^Stack: learning_rate missing; expected x, target, learning_rate, lengths$"):
        sgd(**data)


# ------------------------------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"target": None}, TypeError, "Stack: target missing"),
        ({"reset": np.zeros((T, B), bool)}, TypeError, "Stack: reset unknown; expected x, target, learning_rate, len"),
        ({"target": [0, 1]}, ValueError, "Stack: target has shape (2,); expected (5,), with B=5 from x"),
        ({"target": np.zeros(B)}, TypeError, "Stack: target has dtype float64; expected int64"),
        ({"target": [0, 1, 3, -1, 0]}, ValueError, "Stack: target[2] is 3; expected 0 to 2, for 3 classes"),
        ({"target": [0, 1, 2, 1, -1]}, ValueError, "Stack: target[4] is -1; expected 0 to 2"),
        ({"lengths": [0, 1, 2, 3, 7]}, ValueError, "Stack: lengths is [0 1 2 3 7]; expected 0 to T = 6"),
        ({"mask": np.ones((T, B), bool)}, ValueError, "Stack: mask has shape (6, 5); expected (5,), with B=5 from x"),
        ({"mask": np.ones(B)}, TypeError, "Stack: mask has dtype float64; expected bool"),
        ({"learning_rate": -0.1}, ValueError, "Stack: learning_rate is -0.1; expected 0 <= learning_rate < inf"),
        ({"learning_rate": np.nan}, ValueError, "Stack: learning_rate is nan; expected 0 <= learning_rate < inf"),
        ({"learning_rate": np.inf}, ValueError, "Stack: learning_rate is inf; expected 0 <= learning_rate < inf"),
        ({"learning_rate": [0.1]}, ValueError, "Stack: learning_rate has shape (1,); expected ()"),
        ({"learning_rate": "fast"}, TypeError, "Stack: learning_rate has dtype"),
    ],
)
def test_mistakes(changed, error, message):
    """They leave everything as it was."""
    layer = classifier()
    session = TrainingSession(model_of(layer, mask=True), layer)
    before = session.weights, session.optimizer_state
    with pytest.raises(error, match=re.escape(message)):
        session(**batch() | changed)
    assert same(before, (session.weights, session.optimizer_state))
    session(**batch())


def test_labels_that_do_not_count_may_be_anything():
    layer = classifier()
    session = TrainingSession(model_of(layer, mask=True), layer)
    given = {"lengths": [6, 0, 6, 6, 6], "mask": [True, True, False, True, True]}
    session(**batch(target=[0, 1, 99, 2, 1]), **given)
    for number, target in enumerate([[5, 1, 99, 2, 1], [0, -1, 99, 2, 1]]):  # a row without steps counts
        with pytest.raises(ValueError, match=re.escape(f"target[{number}] is {target[number]}")):
            session(**batch(target=target), **given)
    over_time = lstm(4, "float64")
    session = TrainingSession(model_of(over_time), over_time)
    target = np.where(np.arange(T)[:, None] < LENGTHS, 3, 4)
    session(x=batch()["x"], target=target, lengths=LENGTHS)
    with pytest.raises(ValueError, match=re.escape("LSTM: target[3, 0] is 4; expected 0 to 3")):
        session(x=batch()["x"], target=target, lengths=LENGTHS + (np.arange(B) == 0))


def test_a_failing_run_changes_nothing(monkeypatch):
    layer = classifier()
    session, steady = (TrainingSession(model_of(layer), layer) for _ in range(2))
    running = session._running[()]

    def fail(*_):
        raise RuntimeError("no more")

    for failing in ("io_binding", "run_with_iobinding", "run_with_iobinding"):
        before = session.weights, session.optimizer_state
        attributes = {name: getattr(running.session, name) for name in ("io_binding", "run_with_iobinding")}
        with monkeypatch.context() as patch:
            patch.setattr(running, "session", SimpleNamespace(**attributes | {failing: fail}))
            with pytest.raises(RuntimeError, match="no more"):
                session(**batch())
        assert same(before, (session.weights, session.optimizer_state))
        for data in (batch(), {"x": np.full((2, 3, I), 0.1), "target": [0, 1, 2]}, batch()):  # an odd number
            assert same(session(**data), steady(**data))
        assert same(session.weights, steady.weights)


def test_other_layers_and_models(tmp_path):
    layer = classifier()
    model = model_of(layer)
    other = Stack([lstm(4, "float64", forget_bias=1.0), layer.layers[1]])
    wider = Stack([lstm(5, "float64"), dense(3, "float64", 5, last=True)])
    plain, gradients = (onnx_export.export(layer, None, train=train) for train in (False, True))
    for source, given, said in (
        (model, lstm(4, "float64"), "ValueError: expected a layer that"),
        (model, other, "ValueError: expected a layer that"),
        (model, wider, "ValueError: layer.weights['0.w'] has shape (8, 20); expected (7, 16)"),
        (plain, layer, "ValueError: TrainingSession: the model 'Stack' is no training step; expected"),
        (gradients, layer, "ValueError: TrainingSession: the model 'Stack' is no training step; expected"),
        (model, "LSTM", "TypeError: TrainingSession: layer is of type str; expected an LSTM"),
        (3, layer, "TypeError: TrainingSession: path is of type int; expected a path or an onnx"),
    ):
        with refusal(said):
            TrainingSession(source, given)
    with refusal("ValueError: Stack: the model is a training step; expected TrainingSession for it"):
        onnx_export.Session(model)
    with refusal("ValueError: provider is 'npu'; expected one of cpu, cuda, webgpu"):
        TrainingSession(model, layer, provider="npu")
    with pytest.raises(FileNotFoundError):
        TrainingSession(tmp_path / "missing.onnx", layer)


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        ([1], TypeError, "TrainingSession: optimizer_state is of type list; expected a dict of arrays"),
        ({"step": 1}, ValueError, "TrainingSession: optimizer_state has 'step'; expected step, m.w, v.w, m.b, v.b"),
        ({"m.w": np.zeros((3, 2))}, ValueError, "state['m.w'] has shape (3, 2) and dtype float64; expected (3, 3)"),
        ({"v.b": np.zeros(3, np.float32)}, ValueError, "state['v.b'] has shape (3,) and dtype float32; expected"),
        ({"step": -1}, ValueError, "optimizer_state['step'] has shape () and dtype int64"),
        ({"step": 1.5}, ValueError, "optimizer_state['step'] has shape () and dtype float64; expected () and int64"),
    ],
)  # fmt: skip
def test_states_of_other_optimizers(state, error, message):
    layer = dense(3, "float64")
    model = model_of(layer, lengths=False)
    if isinstance(state, dict) and state != {"step": 1}:
        state = TrainingSession(model, layer).optimizer_state | state
    with pytest.raises(error, match=re.escape(message)):
        TrainingSession(model, layer, optimizer_state=state)


def changed(model, change):
    model = copy.deepcopy(model)
    change(model)
    return model


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: model.graph.input.pop(), "it has the inputs"),
        (lambda model: model.graph.output.pop(), "it has the outputs"),
        (lambda model: setattr(model.metadata_props[-1], "value", '{"loss": "hinge"}'), "blockcell.training is"),
        (lambda model: setattr(model.metadata_props[-1], "value", "[3"), "not those that blockcell makes"),
        (lambda model: setattr(model.metadata_props[-1], "value", "[3]"), "blockcell.training is '[3]'; expected a"),
        (lambda model: setattr(model.graph.input[0].type.tensor_type, "elem_type", 7), "its input x has the type 7"),
        (lambda model: setattr(model.graph.output[0].type.tensor_type, "elem_type", 1), "its output loss has the type"),
    ],
)  # fmt: skip
def test_damaged_models(change, message):
    layer = classifier()
    model = model_of(layer)
    assert model.metadata_props[-1].key == "blockcell.training"
    with pytest.raises(ValueError, match=re.escape(message)):
        TrainingSession(changed(model, change), layer)
