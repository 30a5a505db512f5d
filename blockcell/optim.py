"""Optimizers: plain functions over flat dicts of arrays, such as ``layer.weights`` and the gradients of
``layer.backward``.

.. code-block:: python

    state = None
    for x, target in batches:
        ...
        grads, norm = optim.clip_global_norm(grads, 1.0)
        weights, state = optim.adam(weights, grads, state, learning_rate=0.01)
        layer.set_weights(**weights)

`sgd`, `momentum` and `adam` are called alike, so that one may take another's place.  They return new arrays and modify
none.  Weights keep their dtype; what is between is computed in float32, or in float64 for float64 weights, and so are
the arrays of the state.  The state is a flat dict of arrays too, which `numpy.savez` takes; it belongs to the caller.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isfinite
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from .optable import DTYPE_NAMES, DTYPES, Array

__all__ = ["adam", "clip_global_norm", "momentum", "sgd"]

Arrays = dict[str, Array]


def sgd(
    weights: Mapping[str, ArrayLike],
    grads: Mapping[str, ArrayLike],
    state: Mapping[str, ArrayLike] | None = None,
    *,
    learning_rate: float,
) -> tuple[Arrays, Arrays]:
    """One step of gradient descent.

    .. code-block:: text

        w = w - learning_rate * g

    Parameters
    ----------
    weights, grads : mapping of str to array_like
        The weights and the gradients of the loss to them: the same names and shapes. float32, float64 or float16.
    state : mapping, optional
        Not used: this optimizer has none.
    learning_rate : float
        At least 0.

    Returns
    -------
    weights, state : dict of str to ndarray
        The new weights, and an empty dict.

    Raises
    ------
    TypeError
        An argument's kind or dtype is wrong.
    ValueError
        Names or shapes differ between the arguments, or a number is out of range.
    """
    update = _Update("sgd", weights, grads, state)
    rate = update.number("learning_rate", learning_rate)
    for entry in update:
        update.finish(entry, rate * entry.grad)
    return update.weights, update.state


def momentum(
    weights: Mapping[str, ArrayLike],
    grads: Mapping[str, ArrayLike],
    state: Mapping[str, ArrayLike] | None = None,
    *,
    learning_rate: float,
    momentum: float = 0.9,
) -> tuple[Arrays, Arrays]:
    """One step of gradient descent with momentum.

    .. code-block:: text

        v = momentum * v + g            v is 0 before the first step
        w = w - learning_rate * v

    Parameters
    ----------
    weights, grads : mapping of str to array_like
        The weights and the gradients of the loss to them: the same names and shapes. float32, float64 or float16.
    state : mapping, optional
        What the step before returned; None or empty at the first.
    learning_rate : float
        At least 0.
    momentum : float
        From 0 to less than 1.

    Returns
    -------
    weights, state : dict of str to ndarray
        The new weights, and ``velocity.NAME`` for each of them.

    Raises
    ------
    TypeError
        An argument's kind or dtype is wrong.
    ValueError
        Names or shapes differ between the arguments, or a number is out of range.

    Notes
    -----
    Source: the equations of TensorFlow's ``MomentumOptimizer`` and of PyTorch's ``SGD`` with momentum, which agree.
    """
    update = _Update("momentum", weights, grads, state)
    rate, kept = update.number("learning_rate", learning_rate), update.number("momentum", momentum, below=1)
    for entry in update:
        velocity = update.slot("velocity", entry, kept * update.before("velocity", entry) + entry.grad)
        update.finish(entry, rate * velocity)
    return update.weights, update.state


def adam(
    weights: Mapping[str, ArrayLike],
    grads: Mapping[str, ArrayLike],
    state: Mapping[str, ArrayLike] | None = None,
    *,
    learning_rate: float = 0.001,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
) -> tuple[Arrays, Arrays]:
    """One step of Adam.

    .. code-block:: text

        m = beta1 * m + (1 - beta1) * g             m and v are 0 before the first step, t = 1
        v = beta2 * v + (1 - beta2) * g * g
        w = w - learning_rate * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + epsilon)

    Parameters
    ----------
    weights, grads : mapping of str to array_like
        The weights and the gradients of the loss to them: the same names and shapes. float32, float64 or float16.
    state : mapping, optional
        What the step before returned; None or empty at the first.
    learning_rate, epsilon : float
        At least 0.
    beta1, beta2 : float
        From 0 to less than 1.

    Returns
    -------
    weights, state : dict of str to ndarray
        The new weights; ``step``, the number t of steps taken, and ``m.NAME`` and ``v.NAME`` for each weight.

    Raises
    ------
    TypeError
        An argument's kind or dtype is wrong.
    ValueError
        Names or shapes differ between the arguments, or a number is out of range.

    Notes
    -----
    Source: Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2015, algorithm 1; PyTorch computes the same.
    TensorFlow and Keras add epsilon before they correct v's bias: their epsilon at step t is
    ``epsilon / sqrt(1 - beta2^t)`` here, which matters only where gradients are about as small as it.
    """
    update = _Update("adam", weights, grads, state)
    rate, small = update.number("learning_rate", learning_rate), update.number("epsilon", epsilon)
    decay1, decay2 = update.number("beta1", beta1, below=1), update.number("beta2", beta2, below=1)
    step = update.count()
    for entry in update:
        m = update.slot("m", entry, decay1 * update.before("m", entry) + (1 - decay1) * entry.grad)
        v = update.slot("v", entry, decay2 * update.before("v", entry) + (1 - decay2) * entry.grad * entry.grad)
        size = np.sqrt(v / (1 - decay2**step)) + small
        if small == 0:
            size = np.where(size == 0, np.inf, size)  # no gradient ever came: there is nowhere to go
        update.finish(entry, rate / (1 - decay1**step) * m / size)
    return update.weights, update.state


def clip_global_norm(grads: Mapping[str, ArrayLike], max_norm: float) -> tuple[Arrays, float]:
    """Scale all gradients by one factor so that their common norm is at most `max_norm`.

    .. code-block:: text

        norm = sqrt(sum of the squares of all entries of all arrays)
        g = g * max_norm / max(norm, max_norm)

    Parameters
    ----------
    grads : mapping of str to array_like
        float32, float64 or float16.
    max_norm : float
        Above 0.

    Returns
    -------
    grads : dict of str to ndarray
        New arrays; all NaN where the norm is not finite, so that it cannot pass unnoticed.
    norm : float
        Before the scaling; summed in float64.

    Raises
    ------
    TypeError
        An argument's kind or dtype is wrong.
    ValueError
        max_norm is not above 0.

    Notes
    -----
    Source: the equations of TensorFlow's ``clip_by_global_norm``. PyTorch's ``clip_grad_norm_`` divides by
    ``norm + 1e-6`` instead.
    """
    caller = "clip_global_norm"
    arrays = _arrays(caller, "grads", grads)
    limit = _number(caller, "max_norm", max_norm)
    if limit == 0:
        raise ValueError(f"{caller}: max_norm is 0; expected a number above 0")
    norm = float(np.sqrt(sum(float(np.square(grad, dtype=np.float64).sum()) for grad in arrays.values())))
    scale = limit / max(norm, limit) if isfinite(norm) else np.nan
    return {name: np.asarray(grad * _between(grad).type(scale), grad.dtype) for name, grad in arrays.items()}, norm


# -------------------------------------------------------------------------------------------- what the optimizers share
class _Entry(NamedTuple):
    """One weight and its gradient, in the dtype that is computed in."""

    name: str
    weight: Array
    grad: Array
    dtype: np.dtype[Any]
    """The weight's own."""


class _Update:
    """One step of an optimizer: its arguments, checked, and its results, which fill up as it goes."""

    def __init__(
        self,
        caller: str,
        weights: Mapping[str, ArrayLike],
        grads: Mapping[str, ArrayLike],
        state: Mapping[str, ArrayLike] | None,
    ) -> None:
        self.caller = caller
        self.old = _arrays(caller, "weights", weights)
        self.grads = _arrays(caller, "grads", grads)
        if self.old.keys() != self.grads.keys():
            missing, unknown = (
                sorted(a.keys() - b.keys()) for a, b in ((self.old, self.grads), (self.grads, self.old))
            )
            raise ValueError(
                f"{caller}: expected grads with the names of weights; missing {missing}, unknown {unknown}"
            )
        for name, weight in self.old.items():
            if self.grads[name].shape != weight.shape:
                raise ValueError(
                    f"{caller}: grads[{name!r}] has shape {self.grads[name].shape}; expected {weight.shape},"
                    f" that of weights[{name!r}]"
                )
        if state is not None and not isinstance(state, Mapping):
            raise TypeError(
                f"{caller}: state is of type {type(state).__name__}; expected what the step before returned"
            )
        self.given = state or {}
        self.weights: Arrays = {}
        self.state: Arrays = {}

    def number(self, name: str, value: float, below: float = np.inf) -> float:
        return _number(self.caller, name, value, below)

    def __iter__(self) -> Iterator[_Entry]:
        for name, weight in self.old.items():
            dtype = _between(weight)
            yield _Entry(
                name, weight.astype(dtype, copy=False), self.grads[name].astype(dtype, copy=False), weight.dtype
            )

    def before(self, slot: str, entry: _Entry) -> Array:
        """The state's array as the step before left it; zeros at the first step."""
        if not self.given:
            return np.zeros_like(entry.weight)
        key = f"{slot}.{entry.name}"
        value = np.asarray(self.given.get(key))
        if value.shape != entry.weight.shape or value.dtype != entry.weight.dtype:
            what = f"has shape {value.shape} and dtype {value.dtype}" if key in self.given else "is missing"
            raise ValueError(
                f"{self.caller}: state[{key!r}] {what}; expected {entry.weight.shape} and {entry.weight.dtype}:"
                f" what the step before returned, or None at the first"
            )
        return value

    def count(self) -> int:
        """The number of this step."""
        step = np.asarray(self.given.get("step", 0) if not self.given or "step" in self.given else None)
        if step.dtype.kind not in "iu" or step.shape or step < 0:
            raise ValueError(
                f"{self.caller}: state['step'] is no count of steps; expected what the step before returned"
            )
        self.state["step"] = np.asarray(step + 1, np.int64)
        return int(step) + 1

    def slot(self, slot: str, entry: _Entry, value: Array) -> Array:
        self.state[f"{slot}.{entry.name}"] = np.asarray(value)  # numpy makes a number of what has no dimensions
        return value

    def finish(self, entry: _Entry, change: Array) -> None:
        self.weights[entry.name] = np.asarray(entry.weight - change, entry.dtype)


def _between(array: Array) -> np.dtype[Any]:
    """What is computed in: half is storage, as everywhere in blockcell."""
    return np.result_type(array.dtype, np.float32)


def _arrays(caller: str, what: str, values: Mapping[str, ArrayLike]) -> Arrays:
    if not isinstance(values, Mapping):
        raise TypeError(f"{caller}: {what} is of type {type(values).__name__}; expected a dict of arrays")
    arrays = {name: np.asarray(value) for name, value in values.items()}
    for name, array in arrays.items():
        if array.dtype not in DTYPES:
            raise TypeError(f"{caller}: {what}[{name!r}] has dtype {array.dtype}; expected {DTYPE_NAMES}")
    return arrays


def _number(caller: str, name: str, value: float, below: float = np.inf) -> float:
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{caller}: {name} is of type {type(value).__name__}; expected a real number")
    if not 0 <= value < below:
        raise ValueError(f"{caller}: {name} is {value}; expected 0 <= {name} < {below:g}")
    return float(value)
