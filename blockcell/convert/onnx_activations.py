"""The activations of ONNX's nodes as those of layers, and back; and from where on a `clip` changes nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from ..activations import DEFAULTS, PARAMETERS, Activation, parts
from ..layers import LSTM
from .shared import Cell, ConversionError

_USUAL = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"], "RNN": ["Tanh"]}
_ALPHA_BETA: dict[str, tuple[float | None, ...]] = {  # which of them each has, and their defaults
    "Affine": (None, None),
    "Elu": (1.0,),
    "HardSigmoid": (0.2, 0.5),
    "LeakyRelu": (0.01,),
    "Relu": (),
    "ScaledTanh": (None, None),
    "Sigmoid": (),
    "Softplus": (),
    "Softsign": (),
    "Tanh": (),
    "ThresholdedRelu": (1.0,),
}
_BY_NAME = {name.lower(): name for name in _ALPHA_BETA}
_WRITTEN = {  # ONNX's names of those of layers that it has
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


def read_activations(
    what: str, kind: str, attributes: Mapping[str, Any], directions: int, dtype: np.dtype[Any]
) -> list[dict[str, Any]]:
    """A cell's arguments, for each direction of a node."""
    names = _USUAL[kind] * directions
    if "activations" in attributes:
        names = [name.decode(errors="replace") for name in attributes["activations"].strings]
        if len(names) != len(_USUAL[kind]) * directions:
            raise ValueError(f"{what} has {len(names)} activations; expected {len(_USUAL[kind]) * directions}")
    alphas, betas = (
        iter(attributes[name].floats if name in attributes else ()) for name in ("activation_alpha", "activation_beta")
    )
    found = [_read(what, name, alphas, betas, dtype) for name in names]
    cells = []
    for d in range(directions):
        *recurrent, activation = found[d * len(_USUAL[kind]) : (d + 1) * len(_USUAL[kind])]
        if kind == "LSTM" and recurrent.pop() != activation:
            raise ConversionError(
                f"{what} has activations={names}, of which the second is for the candidate and the third for the"
                f" cell state: here both are the layer's activation, so they must be equal"
            )
        cells.append({"activation": activation} | ({"recurrent_activation": recurrent[0]} if recurrent else {}))
    return cells


def _read(what: str, given: str, alphas: Iterator[float], betas: Iterator[float], dtype: np.dtype[Any]) -> Activation:
    """An activation, which takes as many of the parameters as it has."""
    name = _BY_NAME.get(given.lower(), "")
    if not name:
        raise ConversionError(f"{what} has the activation {given!r}; expected one of {', '.join(_ALPHA_BETA)}")
    numbers = [next(source, default) for source, default in zip((alphas, betas), _ALPHA_BETA[name], strict=False)]
    values = [_as_written(number, dtype) for number in numbers if number is not None]
    found: Activation | None = next((ours for ours, theirs in _WRITTEN.items() if theirs == name), None)
    if name == "HardSigmoid" and all(map(math.isfinite, values)):
        found = ("hard_sigmoid", *values)
    elif name in ("LeakyRelu", "Elu", "ThresholdedRelu") and values == [0]:
        found = "relu"
    elif name in ("LeakyRelu", "Elu") and 0 < values[0] < math.inf:
        found = (str(found), *values)
    elif name == "ScaledTanh" and values == [1, 1]:
        found = "tanh"
    elif values and not (name == "Affine" and values == [1, 0]):
        found = None
    if found is None or len(values) < len(numbers):
        text = ", ".join(f"{key}={number:g}" for key, number in zip(("alpha", "beta"), values, strict=False))
        raise ConversionError(
            f"{what} has the activation {name} with {text or 'no alpha'}, and layers have none that is equal; expected"
            f" one of {', '.join(PARAMETERS)} (Affine with 1 and 0, ScaledTanh with 1 and 1, ThresholdedRelu with 0)"
        )
    return found


def _as_written(number: float, dtype: np.dtype[Any]) -> float:
    """A parameter, which ONNX has in float32: if that is a layer's precision, too, the number that was meant."""
    if dtype == np.float64 or not math.isfinite(number):
        return float(number)
    defaults = [value for values in PARAMETERS.values() for value in values.values()]  # such as 1 / 6
    single = np.float32(number)
    return next((value for value in defaults if np.float32(value) == single), float(str(single)))


def written_activations(caller: str, cells: Iterable[Cell]) -> dict[str, list[Any]]:
    """The attributes of a node with these cells; none if its activations are the usual ones."""
    names, alphas, betas = list[str](), list[float](), list[float]()
    usual = True
    for cell in cells:
        arguments = cell._arguments()
        given = [arguments[name] for name in ("recurrent_activation", "activation") if name in arguments]
        usual &= given == [DEFAULTS["recurrent_activation"], DEFAULTS["activation"]][-len(given) :]
        for activation in [*given, *given[-1:]] if isinstance(cell, LSTM) else given:
            name, values = parts(activation)
            if name not in _WRITTEN:
                raise ConversionError(f"{caller}: the activation {name!r} is none that ONNX's nodes have")
            if cell.dtype == np.float64 and any(float(np.float32(value)) != value for value in values):
                raise ConversionError(
                    f"{caller}: the activation {activation!r} has parameters that are not exact in float32, in which"
                    f" ONNX's nodes have them; expected a layer of dtype float32, or other parameters"
                )
            names.append(_WRITTEN[name])
            alpha_beta = (1.0, 0.0) if name == "linear" else values
            alphas += alpha_beta[:1]
            betas += alpha_beta[1:]
    return {} if usual else {"activations": names, "activation_alpha": alphas, "activation_beta": betas}


def refuse_clip(what: str, clip: float, activations: Iterable[Activation], dtype: np.dtype[Any]) -> None:
    """Refuse a bound of what goes into these activations, unless they have the same values without it."""
    limit = max(_saturated(activation, dtype) for activation in activations)
    if not clip >= min(limit, float(np.finfo(np.float32).max)):
        begin = f", and only from {limit:.4g} on that changes nothing" if limit < math.inf else ""
        raise ConversionError(
            f"{what} has clip={clip:g}, which limits what goes into the activations{begin}; the cell_clip of an LSTM"
            f" here limits the cell state. If the limit is never reached, remove the attribute"
        )


def _saturated(activation: Activation, dtype: np.dtype[Any]) -> float:
    """From which distance from 0 on an activation has one value on each side, in this precision."""
    name, values = parts(activation)
    info: Any = np.finfo(np.promote_types(dtype, np.float32))  # float16 is computed in float32
    if name == "tanh":
        return math.log(8 / info.eps) / 2  # there 1 - tanh is a quarter of eps, half of what is between 1 and the next
    if name == "sigmoid":
        return -math.log(info.smallest_normal) + math.log(2 / info.eps)  # where exp(-z) rounds to 0
    if name == "hard_sigmoid" and values[0] != 0:
        return max(abs(values[1]), abs(1 - values[1])) / abs(values[0])
    return math.inf
