"""Activations in a graph: which one a value has gone through, whichever nodes TensorFlow and Keras write for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from ....activations import Activation, canonical
from .graph_reader import Place, Reader, Unknown

LINEAR = "linear"
_NEAR = 1e-6  # of the numbers of a hard sigmoid: a sixth may have been computed in float32


class Activated(NamedTuple):
    """A value behind an activation."""

    activation: Activation
    inner: Place
    """What the activation is applied to."""
    added: float = 0.0
    """A number that is part of the activation, and has been added to that already."""


def activated(reader: Reader, place: Place) -> Activated | None:
    """The activation that makes a value; None if it is none that layers have."""
    place = reader.past(place)
    node, op, inputs = reader.node(place), reader.op(place), reader.given(place)
    if node is None:
        return None
    with suppress(Unknown):
        if op.activation and len(inputs) == 1:
            return Activated(_with_options(node.attrs, op.activation), inputs[0])
        if op.name == "Select" and len(inputs) == 3:
            return _elu(reader, inputs)
        if op.name in ("RealDiv", "Mul"):
            return _hard_sigmoid(reader, op.name, inputs)
        if op.name in ("Maximum", "Minimum", "ClipByValue"):
            return _leaky(reader, op.name, inputs) or _clipped_line(reader, place)
    return None


def clipped(reader: Reader, place: Place) -> tuple[Place, float, float] | None:
    """What is clipped, and to which numbers."""
    place = reader.past(place)
    op, inputs = reader.op(place).name, reader.given(place)
    if op == "ClipByValue" and len(inputs) == 3:
        return inputs[0], reader.value(inputs[1]), reader.value(inputs[2])
    other = {"Maximum": "Minimum", "Minimum": "Maximum"}.get(op)
    if other is None:
        return None
    for inner, bound in _with_number(reader, inputs):
        inner = reader.past(inner)
        if reader.op(inner).name == other:
            for value, second in _with_number(reader, reader.given(inner)):
                return (value, bound, second) if op == "Maximum" else (value, second, bound)
    return None


def described(reader: Reader, place: Place) -> str:
    """What a value has gone through that layers do not have as an activation: its name or its op; "" if nothing."""
    place = reader.past(place)
    node, op = reader.node(place), reader.op(place)
    if node is None:
        return ""
    if op.name == "IdentityN":  # around what has a gradient of its own
        inputs = reader.given(place)
        return described(reader, inputs[place.output]) if place.output < len(inputs) else ""
    name = f"the node {node.name!r} is a {node.op}"
    if op.name == "Mul":
        return f"{name} that makes a swish" if _is_swish(reader, reader.given(place)) else ""
    return name if op.shows else ""


def _is_swish(reader: Reader, inputs: tuple[Place, ...]) -> bool:
    """Whether it is x * sigmoid(x), or x * sigmoid(beta * x)."""
    for value, gate in (inputs, inputs[::-1]) if len(inputs) == 2 else ():
        with suppress(Unknown):
            found = activated(reader, gate)
            if found is not None and found.activation == "sigmoid":
                inner = reader.past(found.inner)
                scaled = reader.given(inner) if reader.op(inner).name == "Mul" else ()
                return any(reader.same(each, value) for each in (inner, *scaled))
    return False


def _with_options(attrs: dict[str, object], activation: str) -> Activation:
    if activation != "leaky_relu":
        return activation
    alpha = attrs.get("alpha", 0.2)
    if not isinstance(alpha, float):
        raise Unknown(f"the attribute alpha is {alpha!r}; expected a float")
    return _made(activation, alpha if attrs.get("T") == "float64" else _shortest(alpha))


def _made(name: str, *values: float) -> Activation:
    """In the form that layers have."""
    if name == "leaky_relu" and values == (0,):
        return "relu"
    try:
        return canonical(name, (name, *values))
    except ValueError as error:
        raise Unknown(str(error)) from None


def _hard_sigmoid(reader: Reader, op: str, inputs: tuple[Place, ...]) -> Activated | None:
    """relu6(x + 3) / 6, as Keras 3 has it."""
    for value, number in _with_number(reader, inputs):
        if op == "RealDiv" and value != inputs[0]:
            continue
        if _near(number if op == "RealDiv" else 1 / number if number else 0, 6):
            value = reader.past(value)
            if reader.op(value).name == "Relu6":
                return Activated("hard_sigmoid", reader.given(value)[0], 3.0)
            found = clipped(reader, value)
            if found is not None and found[1:] == (0, 6):
                return Activated("hard_sigmoid", found[0], 3.0)
    return None


def _clipped_line(reader: Reader, place: Place) -> Activated | None:
    """clip(alpha * x + beta, 0, 1), a hard sigmoid as Keras 2 has it."""
    found = clipped(reader, place)
    if found is None or found[1:] != (0, 1):
        return None
    inner = reader.past(found[0])
    if reader.op(inner).name != "Add":
        return None
    for line, beta in _with_number(reader, reader.given(inner)):
        line = reader.past(line)
        op, inputs = reader.op(line).name, reader.given(line)
        for value, alpha in _with_number(reader, inputs) if op in ("Mul", "RealDiv") else ():
            if op == "RealDiv":
                if value != inputs[0] or not alpha:
                    continue
                alpha = 1 / alpha
            if _near(alpha, 1 / 6) and _near(beta, 0.5):
                return Activated("hard_sigmoid", value)
            return Activated(_made("hard_sigmoid", _shortest(alpha), _shortest(beta)), value)
    return None


def _leaky(reader: Reader, op: str, inputs: tuple[Place, ...]) -> Activated | None:
    """max(alpha * x, x), as TensorFlow wrote it before 1.13."""
    if op != "Maximum" or len(inputs) != 2:
        return None
    for scaled, value in (inputs, inputs[::-1]):
        scaled = reader.past(scaled)
        if reader.op(scaled).name == "Mul":
            for x, alpha in _with_number(reader, reader.given(scaled)):
                if reader.same(x, value) and 0 <= alpha <= 1:
                    return Activated(_made("leaky_relu", _shortest(alpha)), value)
    return None


def _elu(reader: Reader, inputs: tuple[Place, ...]) -> Activated | None:
    """elu(x) where x > 0, else alpha * elu(x), as Keras has it for an alpha other than 1."""
    condition, above, below = map(reader.past, inputs)
    compared, elu = reader.given(condition), reader.given(above)
    if reader.op(condition).name != "Greater" or reader.op(above).name != "Elu" or len(compared) != 2 or not elu:
        return None
    if not reader.same(compared[0], elu[0]) or reader.value(compared[1]) != 0 or reader.op(below).name != "Mul":
        return None
    for scaled, alpha in _with_number(reader, reader.given(below)):
        again = reader.past(scaled)
        twice = reader.op(again).name == "Elu" and reader.same(reader.given(again)[0], elu[0])
        if twice or reader.same(scaled, above):
            return Activated(_made("elu", _shortest(alpha)), elu[0])
    return None


def _with_number(reader: Reader, inputs: tuple[Place, ...]) -> Iterator[tuple[Place, float]]:
    """Of two inputs one that is a constant number, with the other."""
    if len(inputs) == 2:
        for value, number in (inputs, inputs[::-1]):
            with suppress(Unknown):
                yield value, reader.value(number)


def _near(number: float, wanted: float) -> bool:
    return abs(number - wanted) <= _NEAR * wanted


def _shortest(number: float) -> float:
    """Of a number in float32 the one that was meant: 0.2, and not 0.20000000298023224."""
    short = np.float32(number)
    return float(str(short)) if float(short) == number else number
