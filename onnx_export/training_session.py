"""Runs the model of a training step, again and again."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from typing import Any

from onnx import ModelProto

from blockcell.convert.onnx_graph import read_model
from blockcell.errors import short
from blockcell.layers import Layer
from blockcell.optable import Array

from .call import StepCall
from .layers.writing import check_layer_and_path
from .runtime import KeptValues, SteppingModel, why_no_dtype
from .session import BaseSession, check_provider, read_metadata, warn_of_slow


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
        model = path if isinstance(path, ModelProto) else read_model(path)
        call = read_metadata(model).call
        if not isinstance(call, StepCall):
            name = short(model.graph.name)
            raise ValueError(f"{caller}: the model {name} is no training step; expected one that training_step made")
        if (description := json.loads(json.dumps(layer._description()))) != call.tree:
            of_model = short(json.dumps(call.tree))
            message = f"the model is of {of_model}, but layer is {short(json.dumps(description))}"
            raise ValueError(f"{caller}: {message}; expected a layer that differs in nothing but its weights")
        super().__init__(model.graph.name, provider, model)
        self._call, self._layer = call, copy.copy(layer)
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
        return self._call.step_result(self._model_for(self._free_sizes(feeds)).step(feeds))

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
