"""The activations of cells: their names, which are Keras', their parameters, and how they are given.

.. code-block:: text

    tanh          tanh(z)
    sigmoid       1 / (1 + exp(-z))
    relu          max(z, 0)
    leaky_relu    z if z > 0 else negative_slope * z                    negative_slope = 0.2, above 0
    elu           z if z > 0 else alpha * (exp(z) - 1)                  alpha = 1.0, above 0
    selu          scale * elu(z), with fixed constants
    softplus      log(1 + exp(z))
    softsign      z / (1 + abs(z))
    exponential   exp(z)
    hard_sigmoid  min(max(scale * z + shift, 0), 1)                     scale = 1 / 6, shift = 1 / 2
    linear        z

An argument is a name, or a tuple of a name and its parameters: ``("leaky_relu", 0.01)``. The gradient of each follows
from its value, which is all that is kept of a forward pass; at the kinks of relu and hard_sigmoid it is 0. What a layer
has is canonical: the name alone where the parameters have their defaults, otherwise the tuple.

The functions themselves are in `blockcell.formulas`, in numpy, and in ``pyx/cells/activations.pxd``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Real
from typing import Any, NamedTuple

from .errors import short

Activation = str | tuple[str | float, ...]

PARAMETERS: dict[str, dict[str, float]] = {
    "tanh": {},
    "sigmoid": {},
    "relu": {},
    "leaky_relu": {"negative_slope": 0.2},
    "elu": {"alpha": 1.0},
    "selu": {},
    "softplus": {},
    "softsign": {},
    "exponential": {},
    "hard_sigmoid": {"scale": 1 / 6, "shift": 0.5},
    "linear": {},
}
"""The parameters of each activation and their defaults, those of Keras 3, in the order of
``pyx/cells/activations.pxd``."""
POSITIVE = ("negative_slope", "alpha")
"""Parameters that must be above 0: the sign of the value says on which side of 0 it is from."""
DEFAULTS: dict[str, Activation] = {"activation": "tanh", "recurrent_activation": "sigmoid"}
"""Of the arguments of layers."""


class Numbers(NamedTuple):
    """An activation as kernels take it."""

    number: int
    a: float
    b: float


def canonical(name: str, value: Any) -> Activation:
    """Return the canonical form of an argument, or raise a TypeError or ValueError that begins with its name."""
    kind, *parameters = value if isinstance(value, (tuple, list)) and value else (value,)
    if not isinstance(kind, str):
        raise TypeError(f"{name} is {short(value)}; expected a name or a tuple of a name and parameters, {_example}")
    if kind not in PARAMETERS:
        raise ValueError(f"{name} is {short(kind)}; expected one of {', '.join(PARAMETERS)}")
    defaults = PARAMETERS[kind]
    if len(parameters) > len(defaults):
        expected = ", ".join(defaults) or "none"
        raise ValueError(f"{name} has {len(parameters)} parameters for {kind}; expected {expected}")
    values = defaults | dict(zip(defaults, parameters, strict=False))
    for parameter, value in values.items():
        description = f"{name} has the {parameter} {short(value)}"
        if not isinstance(value, Real) or isinstance(value, bool):
            raise TypeError(f"{description}; expected a real number")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not abs(number) < math.inf or (parameter in POSITIVE and not number > 0):
            raise ValueError(f"{description}; expected a finite number{' above 0' if parameter in POSITIVE else ''}")
        values[parameter] = number
    return kind if values == defaults else (kind, *values.values())


_example = 'such as "relu" or ("leaky_relu", 0.01)'


def parts(activation: Activation) -> tuple[str, tuple[float, ...]]:
    """Return the name and all parameters of an activation in its canonical form."""
    if isinstance(activation, str):
        return activation, tuple(PARAMETERS[activation].values())
    return str(activation[0]), tuple(map(float, activation[1:]))


def numbers(activation: Activation) -> Numbers:
    """Return an activation in its canonical form as kernels take it."""
    name, values = parts(activation)
    return Numbers([*PARAMETERS].index(name), *(*values, 0.0, 0.0)[:2])


def unusual(activations: dict[str, Activation]) -> dict[str, Activation]:
    """Return those of a layer's activations that are not the defaults."""
    return {name: value for name, value in activations.items() if value != DEFAULTS[name]}


BOUNDED = ("tanh", "sigmoid", "softsign", "hard_sigmoid")


def may_overflow(activations: Iterable[Activation]) -> bool:
    """Return whether a cell with these activations can reach inf or NaN from finite weights, if it runs for long."""
    return any(parts(activation)[0] not in BOUNDED for activation in activations)
