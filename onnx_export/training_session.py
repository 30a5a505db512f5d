"""Runs the model of a training step, again and again."""

from __future__ import annotations

import copy
import json
import os
from collections import namedtuple
from collections.abc import Mapping
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper

from blockcell.argument_reader import ArgumentReader
from blockcell.errors import short
from blockcell.files import leaf_descriptions, weights_of
from blockcell.layers import Layer
from blockcell.layers.structure import description_of
from blockcell.loss import LOSSES
from blockcell.optable import Array
from blockcell.optim import OPTIMIZERS, clip_global_norm

from .call import LayerCall, Shapes, Tree, Types, compare_types
from .export import check_layer_and_path
from .runtime import NEW, KeptValues, NodePlacement, SteppingModel, why_no_dtype
from .session import check_provider, foreign_message, load_model, read_metadata, warn_of_slow


class TrainingSession:
    """Trains a layer with the model of a step that `training_step` made of it.

    .. code-block:: python

        training_step(layer, "step.onnx", loss="softmax_cross_entropy", optimizer="adam")
        session = TrainingSession("step.onnx", layer)
        for x, target in batches:
            value, y = session(x=x, target=target, learning_rate=0.01)
        layer = session.layer()

    The weights and what the optimizer keeps stay where the model runs: a step reads them from one set of memory and
    writes them to another, and the two change places. A session is for one thread at a time.

    Parameters
    ----------
    path : path_like or onnx.ModelProto
        The model, or its file.
    layer : LSTM, GRU, RNN, Dense, Bidirectional or Stack
        What is trained; its weights are those before the first step. It is not changed. Its weights may be others than
        those of the layer that the model was made of, nothing else.
    provider : {"cpu", "cuda", "webgpu"}
        Where it runs, as of `Session`. WebGPU needs ``training_step(provider="webgpu", sizes={"T": ...})``.
    optimizer_state : mapping, optional
        What `optimizer_state` was, or what a function of `blockcell.optim` returned, to go on from there.

    Raises
    ------
    TypeError
        An argument's kind or dtype is wrong.
    ValueError
        The model is no training step, or one of another layer; or the state is not one of the optimizer's for it.
    OSError
        The model cannot be read.
    RuntimeError
        onnxruntime has no such provider here, or it cannot run all of the model.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | ModelProto,
        layer: Layer,
        *,
        provider: str = "cpu",
        optimizer_state: Mapping[str, Any] | None = None,
    ) -> None:
        caller = type(self).__name__
        check_provider(provider)
        check_layer_and_path(caller, layer, None)
        if not isinstance(path, (str, os.PathLike, ModelProto)):
            raise TypeError(f"{caller}: path is of type {type(path).__name__}; expected a path or an onnx.ModelProto")
        self.model = path if isinstance(path, ModelProto) else load_model(path)
        facts = read_metadata(self.model)
        if "training" not in facts or "layer" not in facts:
            name = short(self.model.graph.name)
            raise ValueError(f"{caller}: the model {name} is no training step; expected one that training_step made")
        if (description := json.loads(json.dumps(description_of(layer)))) != facts["layer"]:
            message = (
                f"the model is of {short(json.dumps(facts['layer']))}, but layer is {short(json.dumps(description))}"
            )
            raise ValueError(f"{caller}: {message}; expected a layer that differs in nothing but its weights")
        try:
            self._call = StepCall(self.model, facts["layer"], facts["training"])
        except ValueError as error:
            raise ValueError(foreign_message(self.model, error)) from None
        self.provider = provider
        self._layer = copy.copy(layer)
        if reason := why_no_dtype(provider, self._call.dtype):
            raise ValueError(f"{caller}: dtype is {self._call.dtype} and provider {provider!r}, but {reason}")
        warn_of_slow(self.model.graph.name, self.model, provider)
        weights = self._call.read_weights(layer.weights)
        self._kept = KeptValues(weights | self._call.read_memory(optimizer_state), provider)
        self._running: dict[tuple[tuple[str, int], ...], SteppingModel] = {}
        if provider == "cpu":
            self._running[()] = SteppingModel(self.model, provider, self._kept)

    def __repr__(self) -> str:
        return f"<TrainingSession of {self.model.graph.name} on {self.provider}>"

    def __call__(self, **arguments: Any) -> Any:
        """Take a step.

        Takes x, target and learning_rate, which may be left out where the function of `blockcell.optim` has a default,
        and those of lengths, reset, mask and state that the model was made with, which may be left out, too: all steps
        of all rows count, and states are zero.

        Returns
        -------
        tuple
            A named tuple: ``loss``, a float; with ``max_norm`` also ``norm``, a float; ``y``, of the weights before the
            step; with ``state`` also ``state``, for the next call.

        Raises
        ------
        TypeError
            An argument is missing or unknown, or an array's dtype is not the model's.
        ValueError
            A rank, size or range is wrong. In any case the weights stay as they are.
        """
        feeds = self._call.feeds(arguments)
        if 0 in feeds["x"].shape[:2]:  # onnxruntime's Scan cannot run no steps, and some providers end without rows
            outputs = self._call.without_steps(feeds | self.weights | self.optimizer_state)
            self._kept = KeptValues({name: outputs[NEW + name] for name in self._kept.inputs}, self.provider)
            for running in self._running.values():
                running.keep(self._kept)
        else:
            outputs = self._model_for(feeds).step(feeds)
        return self._call.step_result(outputs)

    @property
    def weights(self) -> dict[str, Array]:
        """Copies of the present weights, by their names in ``layer.weights``."""
        return {name: self._kept.array(name) for name in self._call.weight_names}

    @property
    def optimizer_state(self) -> dict[str, Array]:
        """Copies of what the optimizer keeps, as its function in `blockcell.optim` returns it."""
        return {name: self._kept.array(name) for name in self._call.memory_names}

    def layer(self) -> Any:
        """A new layer with the present weights, of the kind and dtype of the layer given."""
        trained, dtype = copy.copy(self._layer), self._layer.dtype
        trained.set_weights(**{name: weight.astype(dtype, copy=False) for name, weight in self.weights.items()})
        return trained

    @property
    def placement(self) -> list[NodePlacement]:
        """Where every node runs, also in loops. On a GPU, there must have been a step."""
        if not self._running:
            raise RuntimeError(f"{type(self).__name__}: on a GPU there is a graph for every set of sizes; take a step")
        return [*self._running.values()][-1].placement()

    def _model_for(self, feeds: Mapping[str, Array]) -> SteppingModel:
        if self.provider == "cpu":
            return self._running[()]
        sizes = self._call.free_sizes(feeds)
        key = tuple(sorted(sizes.items()))
        if key not in self._running:
            self._running[key] = SteppingModel(self.model, self.provider, self._kept, sizes)
        return self._running[key]


class StepCall(LayerCall):
    """Translates the arguments of a step to the inputs of its model, and the model's outputs to the step's results.

    Raises
    ------
    ValueError
        The model's inputs and outputs are not those of such a step.
    """

    _required = ("x", "target", "learning_rate")

    def __init__(self, model: ModelProto, tree: Tree, training: Any) -> None:
        self._read_types(model, tree)
        settings = training if isinstance(training, dict) else {}
        loss, optimizer = settings.get("loss"), settings.get("optimizer")
        if loss not in [*LOSSES] or optimizer not in [*OPTIMIZERS]:
            raise ValueError(f"blockcell.training is {short(json.dumps(training))}; expected a loss and an optimizer")
        self.caller = self._reader.caller
        self._shapes = dict(self._dims)
        names = (prefix + tensor.name for prefix, cell in leaf_descriptions(tree) for tensor in weights_of(cell))
        self.weight_names = self._weights = [name for name in names if name in self._shapes]
        self._loss, self._optimizer, self._max_norm = LOSSES[loss], OPTIMIZERS[optimizer], settings.get("max_norm")
        memory = [f"{slot}.{name}" for name in self._weights for slot in self._optimizer.slots]
        self._settings = {name: settings[name] for name in self._optimizer.defaults if name in settings}
        self._rate = self._optimizer.defaults.get("learning_rate")
        self.memory_names = ["step"] * self._optimizer.counts_steps + memory
        with_state = bool(self._states) and any(name.endswith("_prev") for name in self._inputs)
        about_rows = [name for name in ("lengths", "reset", "mask") if name in self._inputs]
        self._takes = ["x", "target", "learning_rate", *about_rows, *["state"] * with_state]
        self._classes = self._check_step(model, memory, with_state, settings.get("max_norm") is not None)
        self.dtype = self._dtype_of("x")
        self._fixed = {name: self._inputs.pop(name) for name in [*self._weights, *self.memory_names]}
        fields = ["loss", *["norm"] * ("norm" in self._outputs), "y", *["state"] * with_state]
        self._result = namedtuple("Step", fields)  # type: ignore[misc]

    def _check_step(self, model: ModelProto, memory_of_weights: list[str], with_state: bool, clips: bool) -> int:
        """Check the model's inputs and outputs; return the number of classes, 0 where the target is none."""
        kind, x, y, states, weights = self._shapes_of_layer()
        compute = max(kind, TensorProto.FLOAT) if kind != TensorProto.FLOAT16 else TensorProto.FLOAT
        shape, by_class = y["y"], self._loss.target == "classes"
        states = states if with_state else {}
        memory: Types = {name: (compute, self._dims[name.partition(".")[2]]) for name in memory_of_weights}
        memory |= {"step": (TensorProto.INT64, [])} if self._optimizer.counts_steps else {}
        target = (TensorProto.INT64, shape[:-1]) if by_class else (kind, shape)
        inputs: Types = {"x": (kind, x), "target": target, "learning_rate": (compute, [])}
        inputs |= self._row_types(x[:-1]) | _typed(kind, {f"{name}_prev": size for name, size in states.items()})
        inputs |= {"mask": (TensorProto.BOOL, shape[:-1])} if "mask" in self._inputs else {}
        outputs: Types = {"loss": (compute, []), "y": (kind, shape)} | _typed(kind, states)
        outputs |= {"norm": (compute, [])} if clips else {}
        updated = _typed(kind, weights) | memory
        compare_types("input", model.graph.input, inputs | updated)
        compare_types("output", model.graph.output, outputs | {NEW + name: type_ for name, type_ in updated.items()})
        return int(shape[-1]) if by_class else 0

    def feeds(self, arguments: Mapping[str, Any]) -> dict[str, Array]:
        if self._rate is not None and arguments.get("learning_rate") is None:
            arguments = {**arguments, "learning_rate": self._rate}
        feeds = super().feeds(arguments)
        if not 0 <= feeds["learning_rate"] < np.inf:
            value = short(arguments["learning_rate"])
            raise ValueError(f"{self.caller}: learning_rate is {value}; expected 0 <= learning_rate < inf")
        if self._classes:
            self._check_labels(feeds)
        return feeds

    def _check_labels(self, feeds: Mapping[str, Array]) -> None:
        target = feeds["target"]
        wrong = (target < 0) | (target >= self._classes)
        if not wrong.any():
            return
        counts = feeds["mask"] if "mask" in feeds else np.ones(target.shape, np.bool_)
        if "lengths" in feeds and target.ndim == 2:
            counts = counts & (np.arange(len(target))[:, None] < feeds["lengths"])
        for index in np.argwhere(wrong & counts)[:1].tolist():
            expected = f"expected 0 to {self._classes - 1}, for {self._classes} classes"
            raise ValueError(f"{self.caller}: target{index} is {target[tuple(index)]}; {expected}")

    def free_sizes(self, feeds: Mapping[str, Array]) -> dict[str, int]:
        """Return the values of the sizes that the model leaves open."""
        sizes = zip(self._dims["x"], feeds["x"].shape, strict=True)
        return {letter: size for letter, size in sizes if isinstance(letter, str)}

    def read_weights(self, weights: Mapping[str, Array]) -> dict[str, Array]:
        dtype, arrays = self.dtype, {}
        for name in self._weights:
            shape, expected = weights[name].shape, tuple(self._dims[name])
            if shape != expected:
                raise ValueError(f"{self.caller}: layer.weights[{name!r}] has shape {shape}; expected {expected}")
            arrays[name] = weights[name].astype(dtype)
        return arrays

    def read_memory(self, state: Mapping[str, Any] | None) -> dict[str, Array]:
        """Check and return what the optimizer keeps, zeros before the first step."""
        names, reader = self.memory_names, ArgumentReader("TrainingSession")
        if state is not None and not isinstance(state, Mapping):
            kind = type(state).__name__
            raise TypeError(f"{reader.caller}: optimizer_state is of type {kind}; expected a dict of arrays")
        if state and {*state} != {*names}:
            names_given, expected = ", ".join(map(str, state)), ", ".join(names) or "nothing"
            raise ValueError(f"{reader.caller}: optimizer_state has {short(names_given)}; expected {expected}")
        arrays = {}
        for name in names:
            kind = self._fixed[name]
            dtype = np.dtype(helper.tensor_dtype_to_np_dtype(kind.elem_type))
            shape = tuple(map(int, self._dims[name]))
            array = reader.array(f"optimizer_state[{name!r}]", state[name]) if state else np.zeros(shape, dtype)
            is_same = array.dtype.kind in "iu" if name == "step" else array.dtype.newbyteorder("=") == dtype
            if array.shape != shape or not is_same or (name == "step" and array < 0):
                message = f"optimizer_state[{name!r}] has shape {array.shape} and dtype {array.dtype}"
                origin = "what the step before returned"
                raise ValueError(f"{reader.caller}: {message}; expected {shape} and {dtype}, {origin}")
            arrays[name] = array.astype(dtype)
        return arrays

    def without_steps(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Compute the outputs of a step, by name, where T or B is 0: by the layer, the loss and the optimizer.

        ``feeds`` are all inputs of the model, with the weights and what the optimizer keeps.
        """
        layer = self._layer(feeds)
        y, _, tape = layer.forward(feeds["x"], self._state_of(feeds, "{}_prev"))
        value, d_y = self._loss.function(y, feeds["target"], mask=feeds.get("mask"))
        grads, outputs = layer.backward(tape, d_y)[2], {"loss": np.array(value), "y": y}
        if self._max_norm is not None:
            grads, norm = clip_global_norm(grads, self._max_norm)
            outputs["norm"] = np.array(norm)
        memory = {name: feeds[name] for name in self.memory_names} or None
        rate = float(feeds["learning_rate"])
        for after in self._optimizer.function(layer.weights, grads, memory, learning_rate=rate, **self._settings):
            outputs |= {NEW + name: array for name, array in after.items()}
        return outputs | {name: feeds[f"{name}_prev"] for name in self._states if f"{name}_prev" in feeds}

    def step_result(self, outputs: Mapping[str, Array]) -> Any:
        """Return the step's results, from the outputs by name."""
        fields: dict[str, Any] = {"y": outputs["y"]}
        fields |= {name: float(outputs[name]) for name in ("loss", "norm") if name in outputs}
        if "state" in self._result._fields:
            fields["state"] = self._state(self.tree, "", outputs.__getitem__)
        return self._result(**fields)


def _typed(kind: int, shapes: Shapes) -> Types:
    return {name: (kind, shape) for name, shape in shapes.items()}
