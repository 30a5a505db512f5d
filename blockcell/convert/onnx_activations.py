"""The activations of ONNX's nodes as those of layers, and back; the attribute `clip`, which bounds their inputs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import cycle
from typing import Any

import numpy as np

from ..activations import DEFAULTS, PARAMETERS, Activation, parts
from .shared import ConversionError, RecurrentCell

USES = {
    "LSTM": ("recurrent_activation", "activation", "activation"),
    "GRU": ("recurrent_activation", "activation"),
    "RNN": ("activation",),
}
"""What the activations of a node are as arguments of a layer, in the node's order."""
WRITTEN = {
    "tanh": "Tanh",
    "sigmoid": "Sigmoid",
    "relu": "Relu",
    "leaky_relu": "LeakyRelu",
    "elu": "Elu",
    "softplus": "Softplus",
    "softsign": "Softsign",
    "hard_sigmoid": "HardSigmoid",
    "linear": "Affine",
}
"""ONNX's names of the activations of layers that its nodes have."""
_OURS = {theirs: ours for ours, theirs in WRITTEN.items()}
_BY_NAME = {name.lower(): name for name in _OURS}
_ALPHA_BETA: dict[str, tuple[float | None, ...]] = {  # the parameters of those that have some, and their defaults
    "Affine": (None, None),
    "Elu": (1.0,),
    "HardSigmoid": (0.2, 0.5),
    "LeakyRelu": (0.01,),
}


def read_activations(
    label: str, kind: str, attributes: Mapping[str, Any], directions: int, dtype: np.dtype[Any]
) -> list[dict[str, Any]]:
    """Read the activations of a node as a cell's arguments, for each direction."""
    uses = USES[kind]
    names = [WRITTEN[str(DEFAULTS[argument])] for argument in uses] * directions
    if "activations" in attributes:
        names = [name.decode(errors="replace") for name in attributes["activations"].strings]
        if len(names) != len(uses) * directions:
            raise ValueError(f"{label} has {len(names)} activations; expected {len(uses) * directions}")
    alphas, betas = (
        iter(attributes[name].floats if name in attributes else ()) for name in ("activation_alpha", "activation_beta")
    )
    activations = [_read_activation(label, name, alphas, betas, dtype) for name in names]
    cells = []
    for d in range(directions):
        cell: dict[str, Any] = {}
        for argument, activation in zip(uses, activations[d * len(uses) : (d + 1) * len(uses)], strict=True):
            if cell.setdefault(argument, activation) != activation:
                raise ConversionError(
                    f"{label} has activations={names}, of which the second is for the candidate and the third for the"
                    f" cell state: here both are the layer's activation, so they must be equal"
                )
        cells.append(cell)
    return cells


def _read_activation(
    label: str, text: str, alphas: Iterator[float], betas: Iterator[float], dtype: np.dtype[Any]
) -> Activation:
    """Read an activation, which takes as many numbers of alphas and betas as it has parameters."""
    name = _BY_NAME.get(text.lower(), "")
    if not name:
        raise ConversionError(f"{label} has the activation {text!r}; expected one of {', '.join(sorted(_OURS))}")
    defaults = _ALPHA_BETA.get(name, ())
    numbers = [next(source, default) for source, default in zip((alphas, betas), defaults, strict=False)]
    values = [_as_written(number, dtype) for number in numbers if number is not None]
    activation = _activation_of(name, values)
    if activation is None or len(values) < len(numbers):
        parameters = ", ".join(f"{key}={number:g}" for key, number in zip(("alpha", "beta"), values, strict=False))
        raise ConversionError(
            f"{label} has the activation {name} with {parameters or 'no alpha'}, and layers have none that is equal;"
            f" expected one of {', '.join(PARAMETERS)} (Affine with 1 and 0)"
        )
    return activation


def _activation_of(name: str, values: list[float]) -> Activation | None:
    """Return the activation of layers that equals one of ONNX's with these parameters; None if there is none."""
    if name == "Affine":
        return "linear" if values == [1, 0] else None
    if not all(map(math.isfinite, values)) or (name in ("Elu", "LeakyRelu") and values[0] <= 0):
        return None
    return (_OURS[name], *values) if values else _OURS[name]


def _as_written(number: float, dtype: np.dtype[Any]) -> float:
    """Return a parameter, which ONNX has in float32; if layers have no more precision, the number that was meant."""
    if dtype == np.float64 or not math.isfinite(number):
        return float(number)
    defaults = [value for values in PARAMETERS.values() for value in values.values()]  # such as 1 / 6
    single = np.float32(number)
    return next((value for value in defaults if np.float32(value) == single), float(str(single)))


def written_activations(caller: str, kind: str, cells: Sequence[RecurrentCell]) -> dict[str, list[Any]]:
    """Return the attributes of a node with the activations of these cells; none if they are the defaults."""
    directions = [cell._activations for cell in cells]
    for cell, activations in zip(cells, directions, strict=True):
        for activation in activations.values():
            name, values = parts(activation)
            if name not in WRITTEN:
                raise ConversionError(f"{caller}: the activation {name!r} is none that ONNX's nodes have")
            if cell.dtype == np.float64 and not are_exact(values):
                raise ConversionError(
                    f"{caller}: the activation {activation!r} has parameters that are not exact in float32, in which"
                    f" ONNX's nodes have them; expected a layer of dtype float32, or other parameters"
                )
    return attributes_of(kind, directions)


def are_exact(values: Iterable[float]) -> bool:
    """Return whether ONNX's nodes can have these parameters, which are float32 there."""
    return all(float(np.float32(value)) == value for value in values)


def attributes_of(kind: str, directions: Iterable[Mapping[str, Activation]]) -> dict[str, list[Any]]:
    """Return the attributes of an LSTM, GRU or RNN node whose directions have these activations, which must be in
    `WRITTEN`; none if they are the defaults."""
    used = [activations[argument] for activations in directions for argument in USES[kind]]
    if all(activation == DEFAULTS[argument] for activation, argument in zip(used, cycle(USES[kind]), strict=False)):
        return {}
    parameters = [(1.0, 0.0) if name == "linear" else values for name, values in map(parts, used)]
    attributes: dict[str, list[Any]] = {
        "activations": [WRITTEN[parts(activation)[0]] for activation in used],
        "activation_alpha": [number for values in parameters for number in values[:1]],
        "activation_beta": [number for values in parameters for number in values[1:]],
    }
    return {name: values for name, values in attributes.items() if values}
