"""Activations in a graph: which one made a value, whichever nodes TensorFlow and Keras write for it.

In comes a place; out go the activation as layers name it and the place that it is applied to.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from ....activations import Activation, canonical
from .graph_reader import GraphReader, Place, UnknownValue

LINEAR = "linear"
_NEAR = 1e-6  # of the numbers of a hard sigmoid: a sixth may have been computed in float32


class ActivatedValue(NamedTuple):
    """An activation and what it is applied to."""

    activation: Activation
    inner: Place
    """The place that the activation is applied to."""


def find_activation(reader: GraphReader, place: Place) -> ActivatedValue | None:
    """Return the activation that makes a value; None if layers have no such activation."""
    place = reader.resolve_in_step(place)
    op, inputs = reader.op(place), reader.inputs_at(place)
    with suppress(UnknownValue):
        if op.activation and len(inputs) == 1:
            return ActivatedValue(_with_options(reader.attrs(place), op.activation), inputs[0])
        if op.name in ("RealDiv", "Mul"):
            return _hard_sigmoid(reader, op.name, inputs)
        if op.name in ("Maximum", "Minimum", "ClipByValue"):
            return _clipped_line(reader, place)
    return None


def find_clip(reader: GraphReader, place: Place) -> tuple[Place, float, float] | None:
    """Return what a clip is applied to, with its lower and its upper bound; None if there is no clip."""
    place = reader.resolve_in_step(place)
    op, inputs = reader.op(place).name, reader.inputs_at(place)
    if op == "ClipByValue" and len(inputs) == 3:
        return inputs[0], reader.constant_number(inputs[1]), reader.constant_number(inputs[2])
    opposite = {"Maximum": "Minimum", "Minimum": "Maximum"}.get(op)
    if opposite is None:
        return None
    for inner, bound in _with_constant(reader, inputs):
        for value, second in _with_constant(reader, reader.inputs_of(inner, opposite)):
            return (value, bound, second) if op == "Maximum" else (value, second, bound)
    return None


def _with_options(attrs: dict[str, object], activation: str) -> Activation:
    if activation != "leaky_relu":
        return activation
    alpha = attrs.get("alpha", 0.2)
    if not isinstance(alpha, float):
        raise UnknownValue(f"the attribute alpha is {alpha!r}; expected a float")
    return _canonical_activation(activation, alpha if attrs.get("T") == "float64" else _shortest_decimal(alpha))


def _canonical_activation(name: str, *values: float) -> Activation:
    """Return an activation in the form that layers have."""
    if name == "leaky_relu" and values == (0,):
        return "relu"
    try:
        return canonical(name, (name, *values))
    except ValueError as error:
        raise UnknownValue(str(error)) from None


def _hard_sigmoid(reader: GraphReader, op: str, inputs: tuple[Place, ...]) -> ActivatedValue | None:
    """Match relu6(x + 3) / 6, a hard sigmoid as Keras 3 has it."""
    for value, number in _with_constant(reader, inputs):
        if op == "RealDiv" and value != inputs[0]:
            continue
        if _is_near(number if op == "RealDiv" else 1 / number if number else 0, 6):
            clip = find_clip(reader, value)
            clipped = clip[:1] if clip is not None and clip[1:] == (0, 6) else reader.inputs_of(value, "Relu6")
            for place, shift in _with_constant(reader, reader.inputs_of(clipped[0], "Add") if clipped else ()):
                if shift == 3:
                    return ActivatedValue("hard_sigmoid", place)
    return None


def _clipped_line(reader: GraphReader, place: Place) -> ActivatedValue | None:
    """Match clip(alpha * x + beta, 0, 1), a hard sigmoid as Keras 2 has it."""
    clip = find_clip(reader, place)
    if clip is None or clip[1:] != (0, 1):
        return None
    for line, beta in _with_constant(reader, reader.inputs_of(clip[0], "Add")):
        line = reader.resolve_in_step(line)
        op, inputs = reader.op(line).name, reader.inputs_at(line)
        for value, alpha in _with_constant(reader, inputs) if op in ("Mul", "RealDiv") else ():
            if op == "RealDiv":
                if value != inputs[0] or not alpha:
                    continue
                alpha = 1 / alpha
            if _is_near(alpha, 1 / 6) and _is_near(beta, 0.5):
                return ActivatedValue("hard_sigmoid", value)
            numbers = _shortest_decimal(alpha), _shortest_decimal(beta)
            return ActivatedValue(_canonical_activation("hard_sigmoid", *numbers), value)
    return None


def _with_constant(reader: GraphReader, inputs: tuple[Place, ...]) -> Iterator[tuple[Place, float]]:
    """Yield each of two inputs whose other input is a constant number, with that number."""
    if len(inputs) == 2:
        for value, number in (inputs, inputs[::-1]):
            with suppress(UnknownValue):
                yield value, reader.constant_number(number)


def _is_near(number: float, target: float) -> bool:
    return abs(number - target) <= _NEAR * target


def _shortest_decimal(number: float) -> float:
    """Return the shortest decimal of a float32 number: 0.2, and not 0.20000000298023224."""
    short = np.float32(number)
    return float(str(short)) if float(short) == number else number
