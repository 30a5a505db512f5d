"""`KerasLayer`, the description of a layer or a model of Keras, whether it is in memory or in a file.

`keras_config` and `keras_stored` describe layers in files so, `keras_objects` those in memory, and `keras_layers`
converts them. This module knows none of these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

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
"""Keras 2's layers for cuDNN, and what computes the same."""
CUDNN_CONFIG = {"activation": "tanh", "recurrent_activation": "sigmoid", "use_bias": True, "reset_after": True}
ACTIVATION_LAYERS = {"LeakyReLU": "leaky_relu", "ELU": "elu", "ReLU": "relu"}  # which may be activations, too
KERAS_2_HARD_SIGMOID = ("hard_sigmoid", 0.2, 0.5)
LONGEST_NAME = 2**8  # of a layer, with the names of the models that it is in
LEAKY_RELU_SLOPE = 0.3  # of the layer, by default; of the function it is 0.2


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

    `is_older` says whether the function is Keras 1's or 2's, whose hard_sigmoid is another.
    """
    if value is None:
        return "linear"
    if isinstance(value, str):
        return KERAS_2_HARD_SIGMOID if value == "hard_sigmoid" and is_older else value
    if not isinstance(value, Mapping) or not isinstance(options := value.get("config"), Mapping):
        return value
    kind = value.get("class_name")
    if kind == "ReLU":
        slope = options.get("negative_slope") or 0
        return "relu" if (options.get("max_value"), options.get("threshold") or 0, slope) == (None, 0, 0) else value
    if kind not in ("LeakyReLU", "ELU"):
        return value
    numbers = [options[key] for key in ("negative_slope", "alpha") if options.get(key) is not None]
    number = numbers[0] if numbers else LEAKY_RELU_SLOPE if kind == "LeakyReLU" else 1.0
    if isinstance(number, Mapping):  # {"type": "ndarray", "value": 0.3}, or in Keras 3 {"config": {"value": ...}}
        inner = number.get("config")
        number = (inner if isinstance(inner, Mapping) else number).get("value")
    if isinstance(number, bool) or not isinstance(number, (int, float, np.number, np.ndarray)) or not number > 0:
        return value
    return ACTIVATION_LAYERS[kind], float(number)


def tensors_of(nodes: Any) -> Iterator[tuple[str, int]]:
    """Yield the results that nodes of a model's config read, except masks: the layer and the index of its result."""
    waiting = [nodes]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Mapping):
            waiting += [value for name, value in part.items() if name != "mask"][::-1]
        elif isinstance(part, (list, tuple)):
            if [type(item) for item in part[:3]] == [str, int, int]:  # with the number of the layer's call
                yield part[0], part[2]
                part = part[3:]
            waiting += part[::-1]
