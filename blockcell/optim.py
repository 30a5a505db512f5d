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

from collections.abc import Mapping
from math import isfinite
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from . import _training
from .argument_reader import as_kernels_take
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
    rate = _number("sgd", "learning_rate", learning_rate)
    if (step := _training.sgd(weights, grads, state, rate)) is not None:
        return step
    update = _Update("sgd", weights, grads, state)
    return update.finished(_training.sgd(update.weights, update.grads, None, rate))


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
    rate, kept = _number("momentum", "learning_rate", learning_rate), _number("momentum", "momentum", momentum, below=1)
    if (step := _training.momentum(weights, grads, state, rate, kept)) is not None:
        return step
    update = _Update("momentum", weights, grads, state)
    return update.finished(_training.momentum(update.weights, update.grads, update.before("velocity"), rate, kept))


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
    numbers = (
        _number("adam", "learning_rate", learning_rate),
        _number("adam", "beta1", beta1, below=1),
        _number("adam", "beta2", beta2, below=1),
        _number("adam", "epsilon", epsilon),
    )
    if (step := _training.adam(weights, grads, state, *numbers)) is not None:
        return step
    update = _Update("adam", weights, grads, state)
    before = update.steps() | update.before("m", "v")
    return update.finished(_training.adam(update.weights, update.grads, before, *numbers))


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
class _Update:
    """The arguments of one step of an optimizer, checked, and converted to what is computed in."""

    def __init__(
        self,
        caller: str,
        weights: Mapping[str, ArrayLike],
        grads: Mapping[str, ArrayLike],
        state: Mapping[str, ArrayLike] | None,
    ) -> None:
        self.caller = caller
        given, found = _arrays(caller, "weights", weights), _arrays(caller, "grads", grads)
        if given.keys() != found.keys():
            missing, unknown = (sorted(a.keys() - b.keys()) for a, b in ((given, found), (found, given)))
            raise ValueError(
                f"{caller}: expected grads with the names of weights; missing {missing}, unknown {unknown}"
            )
        for name, weight in given.items():
            if found[name].shape != weight.shape:
                raise ValueError(
                    f"{caller}: grads[{name!r}] has shape {found[name].shape}; expected {weight.shape},"
                    f" that of weights[{name!r}]"
                )
        if state is not None and not isinstance(state, Mapping):
            raise TypeError(
                f"{caller}: state is of type {type(state).__name__}; expected what the step before returned"
            )
        self.state = state or {}
        self.dtypes = {name: weight.dtype for name, weight in given.items()}
        """The weights' own."""
        self.weights = {name: as_kernels_take(weight, _between(weight)) for name, weight in given.items()}
        self.grads = {name: as_kernels_take(found[name], _between(weight)) for name, weight in given.items()}

    def before(self, *slots: str) -> Arrays:
        """The state's arrays as the step before left them; none at the first step."""
        arrays = {}
        for name, weight in self.weights.items() if self.state else ():
            for key in [f"{slot}.{name}" for slot in slots]:
                value = np.asarray(self.state.get(key))
                if value.shape != weight.shape or value.dtype != weight.dtype:
                    what = f"has shape {value.shape} and dtype {value.dtype}" if key in self.state else "is missing"
                    raise ValueError(
                        f"{self.caller}: state[{key!r}] {what}; expected {weight.shape} and {weight.dtype}:"
                        f" what the step before returned, or None at the first"
                    )
                arrays[key] = as_kernels_take(value, weight.dtype)
        return arrays

    def steps(self) -> Arrays:
        """The number of steps before this one; nothing at the first."""
        if not self.state:
            return {}
        step = np.asarray(self.state.get("step"))
        if step.dtype.kind not in "iu" or step.shape or step < 0:
            raise ValueError(
                f"{self.caller}: state['step'] is no count of steps; expected what the step before returned"
            )
        return {"step": np.array(int(step), np.int64)}  # of C's long, where that and long long have the same size

    def finished(self, step: tuple[Arrays, Arrays] | None) -> tuple[Arrays, Arrays]:
        """The results, with weights in their own dtypes."""
        assert step is not None  # all has been converted
        weights, state = step
        return {name: weight.astype(self.dtypes[name], copy=False) for name, weight in weights.items()}, state


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
    if type(value) is not float and (not isinstance(value, Real) or isinstance(value, bool)):
        raise TypeError(f"{caller}: {name} is of type {type(value).__name__}; expected a real number")
    if not 0 <= value < below:
        raise ValueError(f"{caller}: {name} is {value}; expected 0 <= {name} < {below:g}")
    return float(value)
