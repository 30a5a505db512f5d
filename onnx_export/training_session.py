"""Runs the model of a training step, again and again."""

from __future__ import annotations

import copy
import json
import os
from collections import namedtuple
from collections.abc import Mapping
from typing import Any

import numpy as np
from onnx import ModelProto

from blockcell.argument_reader import ArgumentReader
from blockcell.errors import short
from blockcell.layers import Layer
from blockcell.layers.structure import description_of
from blockcell.loss import LOSSES
from blockcell.optable import Array
from blockcell.optim import OPTIMIZERS, clip_global_norm

from .call import ModelCall, Tree
from .layers.signature import NEW, put_first, step_memory, step_signature
from .layers.writing import check_layer_and_path
from .runtime import KeptValues, SteppingModel, why_no_dtype
from .session import BaseSession, check_provider, foreign_message, load_model, read_metadata, warn_of_slow


class TrainingSession(BaseSession[SteppingModel]):
    """Trains a layer with the model of a step that `training_step` made of it.

    .. code-block:: python

        training_step(layer, "step.onnx", loss="softmax_cross_entropy", optimizer="adam")
        session = TrainingSession("step.onnx", layer)
        for x, target in batches:
            value, y = session(x=x, target=target, learning_rate=0.01)
        layer = session.layer()

    The weights and what the optimizer keeps stay where the model runs: a step reads them from one set of memory and
    writes them to another, and the two change places. A session is for one thread at a time, and on WebGPU no other
    thread may use the provider meanwhile.

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
        model = path if isinstance(path, ModelProto) else load_model(path)
        metadata = read_metadata(model)
        if not metadata.is_step or metadata.tree is None:
            name = short(model.graph.name)
            raise ValueError(f"{caller}: the model {name} is no training step; expected one that training_step made")
        if (description := json.loads(json.dumps(description_of(layer)))) != metadata.tree:
            of_model = short(json.dumps(metadata.tree))
            message = f"the model is of {of_model}, but layer is {short(json.dumps(description))}"
            raise ValueError(f"{caller}: {message}; expected a layer that differs in nothing but its weights")
        try:
            self._call = StepCall(model, metadata.tree, metadata.training)
        except ValueError as error:
            raise ValueError(foreign_message(model, error)) from None
        super().__init__(model.graph.name, provider, model)
        self._layer = copy.copy(layer)
        if reason := why_no_dtype(provider, self._call.dtype):
            raise ValueError(f"{caller}: dtype is {self._call.dtype} and provider {provider!r}, but {reason}")
        warn_of_slow(model.graph.name, model, provider)
        weights = self._call.read_weights(layer.weights)
        self._kept = KeptValues(weights | self._call.read_memory(optimizer_state), provider)
        if provider == "cpu":
            self._running[()] = self._start({})

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
        if 0 in feeds["x"].shape[:2]:  # onnxruntime's Scan fails on no steps, and some providers end without rows
            outputs = self._call.without_steps(feeds | self.weights | self.optimizer_state)
            self._kept = KeptValues({name: outputs[NEW + name] for name in self._kept.inputs}, self.provider)
            for running in self._running.values():
                running.keep(self._kept)
        else:
            outputs = self._model_for(self._free_sizes(feeds)).step(feeds)
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

    def _start(self, sizes: dict[str, int]) -> SteppingModel:
        return SteppingModel(self.model, self.provider, self._kept, sizes)


class StepCall(ModelCall):
    """Translates the arguments of a step to the inputs of its model, and the model's outputs to the step's results."""

    _required = ("x", "target", "learning_rate")

    def __init__(self, model: ModelProto, tree: Tree, training: Any) -> None:
        super().__init__(model, tree)
        settings = training if isinstance(training, dict) else {}
        loss, optimizer = settings.get("loss"), settings.get("optimizer")
        if loss not in [*LOSSES] or optimizer not in [*OPTIMIZERS]:
            raise ValueError(f"blockcell.training is {short(json.dumps(training))}; expected a loss and an optimizer")
        self.weight_names = [*self._weights]
        self._loss, self._optimizer, self._max_norm = LOSSES[loss], OPTIMIZERS[optimizer], settings.get("max_norm")
        self._settings = {name: settings[name] for name in self._optimizer.defaults if name in settings}
        self._rate = self._optimizer.defaults.get("learning_rate")
        self.memory_names = [*put_first(step_memory(self._optimizer, self._weights, 0), ["step"])]
        row_inputs = [name for name in ("lengths", "reset", "mask") if name in self._inputs]
        state = ["state"] * (self._with_state and bool(self._states))
        self._takes = ["x", "target", "learning_rate", *row_inputs, *state]
        arrays = self._arrays()
        self._compare(step_signature(arrays, self._takes, self._loss, self._optimizer, self._max_norm is not None))
        self._classes = arrays.y[-1] if self._loss.target == "classes" else None
        self.dtype = self._dtypes["x"]
        for name in [*self._weights, *self.memory_names]:  # which are no arguments of a step
            del self._inputs[name]
        self._result: Any = namedtuple("Step", ["loss", *["norm"] * ("norm" in self._outputs), "y", *state])  # type: ignore[misc]

    def feeds(self, arguments: Mapping[str, Any]) -> dict[str, Array]:
        if self._rate is not None and arguments.get("learning_rate") is None:
            arguments = {**arguments, "learning_rate": self._rate}
        feeds = super().feeds(arguments)
        if not 0 <= feeds["learning_rate"] < np.inf:
            value = short(arguments["learning_rate"])
            raise ValueError(f"{self._reader.caller}: learning_rate is {value}; expected 0 <= learning_rate < inf")
        if isinstance(self._classes, int):
            self._check_labels(feeds, self._classes)
        return feeds

    def _check_labels(self, feeds: Mapping[str, Array], classes: int) -> None:
        """Raise a ValueError if a label that counts is no class."""
        target = feeds["target"]
        is_wrong = (target < 0) | (target >= classes)
        if is_wrong.any() and "mask" in feeds:
            is_wrong &= feeds["mask"]
        if is_wrong.any() and "lengths" in feeds and target.ndim == 2:
            is_wrong &= np.arange(len(target))[:, None] < feeds["lengths"]
        if is_wrong.any():
            index = np.argwhere(is_wrong)[0].tolist()
            expected = f"expected 0 to {classes - 1}, for {classes} classes"
            raise ValueError(f"{self._reader.caller}: target{index} is {target[tuple(index)]}; {expected}")

    def read_weights(self, weights: Mapping[str, Array]) -> dict[str, Array]:
        """Check the shapes of a layer's weights; return them in the model's dtype."""
        for name, dims in self._weights.items():
            if (shape := weights[name].shape) != (expected := tuple(dims)):
                message = f"layer.weights[{name!r}] has shape {shape}; expected {expected}"
                raise ValueError(f"{self._reader.caller}: {message}")
        return {name: weights[name].astype(self.dtype) for name in self._weights}

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
            dtype, shape = self._dtypes[name], tuple(map(int, self._dims[name]))
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
