"""`KerasLayer`, the description of a layer or a model of Keras, whether it is in memory or in a file.

`keras_config` and `keras_stored` describe layers in files so, `describe` those in memory, and `keras_layers` converts
them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..activations import PARAMETERS
from .shared import is_of

CELLS = ("LSTM", "GRU", "SimpleRNN")  # an RNN has one or several of these with "Cell" behind the name
WITHOUT_EFFECT = (  # in inference
    "ActivityRegularization",
    "AlphaDropout",
    "Dropout",
    "GaussianDropout",
    "GaussianNoise",
    "Identity",
    "InputLayer",
    "Masking",
    "SpatialDropout1D",
)
CUDNN = {"CuDNNLSTM": "LSTM", "CuDNNGRU": "GRU"}
"""Keras 2's layers for cuDNN, and what computes the same, with arrays in another layout."""
CUDNN_CONFIG = {"activation": "tanh", "recurrent_activation": "sigmoid", "use_bias": True, "reset_after": True}
KERAS_2_HARD_SIGMOID = ("hard_sigmoid", 0.2, 0.5)
LONGEST_NAME = 2**8  # of a layer, with the names of the models that it is in
_PACKAGES = "keras", "tf_keras", "tensorflow"


class KerasLayer(NamedTuple):
    """A layer or a model of Keras."""

    kind: str
    """The name of its class."""
    name: str
    config: Mapping[str, Any]
    """What its get_config() returns in Keras 2 and 3. Activations are as `known_activation` gives them."""
    arrays: Sequence[Any] = ()
    """What its get_weights() returns; empty for kinds that have no counterpart here."""
    layers: tuple[KerasLayer, ...] = ()
    """The layers of a model, the two of a Bidirectional, the cells of an RNN, or the one of a TimeDistributed."""
    is_model: bool = False
    module: str = ""
    """The module of a class that is not one of Keras' own; empty for Keras' own."""
    has_mask: bool = False
    """Whether the call of a recurrent layer in a model gets a mask as an argument."""
    instance: Any = None
    """The layer or the model itself, if it is in memory."""

    @property
    def is_cell(self) -> bool:
        """Whether it is one of Keras' LSTM, GRU and SimpleRNN, or a cell of these."""
        return self.kind.removesuffix("Cell") in CELLS and not self.module

    @property
    def is_recurrent(self) -> bool:
        """Whether it is a cell, or named like a layer of Keras that has cells."""
        return self.is_cell or self.kind in ("RNN", "Bidirectional")

    @property
    def cells(self) -> tuple[KerasLayer, ...]:
        """The layers that have the weights: of an RNN its cells, one on the other, else the layer itself."""
        return self.layers if self.kind == "RNN" and not self.module else (self,)


def known_activation(value: Any, *, is_older: bool) -> Any:
    """Return the activation of a config as layers here have it, or the value itself if they have none.

    `is_older` says whether the function is Keras 2's, whose hard_sigmoid is another.
    """
    if value is None:
        return "linear"
    return KERAS_2_HARD_SIGMOID if value == "hard_sigmoid" and is_older else value


def tensors_of(nodes: Any, *, with_masks: bool = False) -> Iterator[tuple[str, int]]:
    """Yield the results that nodes of a model's config read: the layer and the index of its result."""
    waiting = [nodes]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Mapping):
            waiting += [value for name, value in part.items() if with_masks or name != "mask"][::-1]
        elif isinstance(part, (list, tuple)):
            if [type(item) for item in part[:3]] == [str, int, int]:  # with the number of the layer's call
                yield part[0], part[2]
                part = part[3:]
            waiting += part[::-1]


# ------------------------------------------------------------------------------------------ layers and models in memory
def is_model(source: Any) -> bool:
    """Return whether an object is a model of Keras: it has a list of layers."""
    return isinstance(getattr(source, "layers", None), (list, tuple))


def describe(source: Any) -> KerasLayer:
    """Describe a layer or a model of Keras."""
    return _describe(source)._replace(instance=source)


def _describe(source: Any) -> KerasLayer:
    kind, name = type(source).__name__, getattr(source, "name", "")
    if is_model(source):
        layers = tuple(map(describe, source.layers))
        call = getattr(type(source), "call", None)
        has_own_call = call is not None and str(call.__module__).split(".")[0] not in _PACKAGES
        is_sequential = any(_is_of_keras(base, "Sequential") for base in type(source).__mro__) and not has_own_call
        kind = "Sequential" if is_sequential else "Model" if kind == "Sequential" else kind
        try:
            config = {} if has_own_call else source.get_config()  # which does not tell what another call() computes
        except NotImplementedError:
            config = {}
        return KerasLayer(kind, name, config, layers=layers, is_model=True)
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
    if not isinstance(value, str):
        return value
    if not _is_of_keras(function, value):
        return {"class_name": "function", "config": value, "module": module} if value in PARAMETERS else value
    package = str(module).split(".")[0]
    is_newer = package == "keras" and not str(getattr(sys.modules[package], "__version__", "")).startswith("2.")
    return known_activation(value, is_older=not is_newer)


def _is_of_keras(thing: Any, name: str) -> bool:
    """Return whether an object is the class or function of that name of Keras' own."""
    return is_of(_PACKAGES, thing, name)
