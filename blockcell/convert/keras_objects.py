"""Layers and models of Keras in memory, as `KerasLayer` describes them."""

from __future__ import annotations

import sys
from typing import Any

from ..activations import PARAMETERS
from .keras_description import ACTIVATION_LAYERS, CELLS, CUDNN, CUDNN_CONFIG, KerasLayer, known_activation
from .shared import is_of


def is_model(source: Any) -> bool:
    """Return whether an object is a model of Keras: it has a list of layers."""
    return isinstance(getattr(source, "layers", None), (list, tuple))


def describe(source: Any) -> KerasLayer:
    """Describe a layer or a model of Keras."""
    kind, name = type(source).__name__, getattr(source, "name", "")
    if is_model(source):
        is_sequential = any(_is_of_keras(base, "Sequential") for base in type(source).__mro__)
        try:
            config = source.get_config()
        except NotImplementedError:  # a model with a call() of its own
            config = {}
        layers = tuple(map(describe, source.layers))
        return KerasLayer("Sequential" if is_sequential else kind, name, config, layers=layers, is_model=True)
    config = source.get_config()
    if not _is_of_keras(type(source), kind):
        return KerasLayer(kind, name, config, module=type(source).__module__)
    names = [key for key in ("activation", "recurrent_activation") if key in config]
    config = config | {key: _activation(source, key, config[key]) for key in names}
    if kind in CUDNN:
        kind, config = CUDNN[kind], config | CUDNN_CONFIG
    has_weights = kind.removesuffix("Cell") in CELLS or kind == "Dense"
    return KerasLayer(kind, name, config, source.get_weights() if has_weights else (), _inner_layers(source, kind))


def _inner_layers(source: Any, kind: str) -> tuple[KerasLayer, ...]:
    """Describe the layers in one of Keras' own layers."""
    if kind == "Bidirectional":
        return describe(source.forward_layer), describe(source.backward_layer)
    if kind == "TimeDistributed":
        return (describe(source.layer),)
    if kind != "RNN":
        return ()
    is_stacked = _is_of_keras(type(source.cell), "StackedRNNCells")
    return tuple(map(describe, source.cell.cells if is_stacked else [source.cell]))


def _activation(source: Any, key: str, value: Any) -> Any:
    """Return an activation of a config as layers here have it; a function of one's own as a mapping with its module."""
    function = getattr(source, key, None)
    module = getattr(function, "__module__", None)
    if isinstance(value, str):
        if not _is_of_keras(function, value):
            return {"class_name": "function", "config": value, "module": module} if value in PARAMETERS else value
        package = str(module).split(".")[0]
        is_newer = package == "keras" and not str(getattr(sys.modules[package], "__version__", "")).startswith("2.")
        return known_activation(value, is_older=not is_newer)
    kind = type(function).__name__
    if function is None or kind not in ACTIVATION_LAYERS or not _is_of_keras(type(function), kind):
        return value
    activation = known_activation({"class_name": kind, "config": function.get_config()}, is_older=False)
    return value if isinstance(activation, dict) else activation


def _is_of_keras(thing: Any, name: str) -> bool:
    """Return whether an object is the class or function of that name of Keras' own."""
    return is_of(("keras", "tf_keras", "tensorflow"), thing, name)
