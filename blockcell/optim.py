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

All functions raise a TypeError where an argument's kind or dtype is wrong, and a ValueError where names or shapes
differ between the arguments, or a number is out of range.

`OPTIMIZERS` has a row for each: what it keeps, and which settings it takes. The checks here and `onnx_export` read it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import Parameter, signature
from math import inf, isfinite
from numbers import Real

import numpy as np
from numpy.typing import ArrayLike

from . import _training
from .argument_reader import as_kernels_take
from .misnamed_arguments import explain_arguments
from .optable import DTYPE_NAMES, DTYPES, Array, compute_dtype

__all__ = ["adam", "clip_global_norm", "momentum", "sgd"]

Arrays = dict[str, Array]


@explain_arguments
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
    """
    return _step("sgd", weights, grads, state, learning_rate)


@explain_arguments
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

    Notes
    -----
    Source: the equations of TensorFlow's ``MomentumOptimizer`` and of PyTorch's ``SGD`` with momentum, which agree.
    """
    return _step("momentum", weights, grads, state, learning_rate, momentum)


@explain_arguments
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

    Notes
    -----
    Source: Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2015, algorithm 1; PyTorch computes the same.
    TensorFlow and Keras add epsilon before they correct v's bias: their epsilon at step t is
    ``epsilon / sqrt(1 - beta2^t)`` here, which matters only where gradients are about as small as it.
    """
    return _step("adam", weights, grads, state, learning_rate, beta1, beta2, epsilon)


@explain_arguments
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
    clipped = {
        name: np.asarray(grad * compute_dtype(grad.dtype).type(scale), grad.dtype) for name, grad in arrays.items()
    }
    return clipped, norm


# ------------------------------------------------------------------------------------------------------------ the table
@dataclass(frozen=True)
class Optimizer:
    """What an optimizer takes and keeps; the docstring of its function has the equations."""

    function: Callable[..., tuple[Arrays, Arrays]]
    kernel: Callable[..., tuple[Arrays, Arrays] | None]
    settings: Mapping[str, float]
    """The settings in the kernel's order, each with the number that it must be below; all are at least 0."""
    slots: tuple[str, ...] = ()
    """The arrays that are kept for each weight; the state has them as ``SLOT.WEIGHT``."""
    counts_steps: bool = False
    """Whether the state has ``step``, the number of steps taken."""

    @property
    def defaults(self) -> dict[str, float]:
        """The function's defaults, of those settings that have one."""
        defaults = {name: signature(self.function).parameters[name].default for name in self.settings}
        return {name: default for name, default in defaults.items() if default is not Parameter.empty}


OPTIMIZERS = {
    "sgd": Optimizer(sgd, _training.sgd, {"learning_rate": inf}),
    "momentum": Optimizer(momentum, _training.momentum, {"learning_rate": inf, "momentum": 1}, slots=("velocity",)),
    "adam": Optimizer(
        adam,
        _training.adam,
        {"learning_rate": inf, "beta1": 1, "beta2": 1, "epsilon": inf},
        slots=("m", "v"),
        counts_steps=True,
    ),
}


# -------------------------------------------------------------------------------------------- what the optimizers share
def _step(
    name: str,
    weights: Mapping[str, ArrayLike],
    grads: Mapping[str, ArrayLike],
    state: Mapping[str, ArrayLike] | None,
    *settings: float,
) -> tuple[Arrays, Arrays]:
    """Take a step of an optimizer; convert the arrays to what its kernel takes, or raise."""
    row = OPTIMIZERS[name]
    bounds = row.settings.items()
    numbers = [_number(name, key, value, below) for (key, below), value in zip(bounds, settings, strict=True)]
    step = row.kernel(weights, grads, state, *numbers)
    if step is not None:
        return step
    own_weights, own_grads = _arrays(name, "weights", weights), _arrays(name, "grads", grads)
    if own_weights.keys() != own_grads.keys():
        missing, unknown = sorted(own_weights.keys() - own_grads.keys()), sorted(own_grads.keys() - own_weights.keys())
        raise ValueError(f"{name}: expected grads with the names of weights; missing {missing}, unknown {unknown}")
    for key, weight in own_weights.items():
        if own_grads[key].shape != weight.shape:
            expected = f"expected {weight.shape}, that of weights[{key!r}]"
            raise ValueError(f"{name}: grads[{key!r}] has shape {own_grads[key].shape}; {expected}")
    if state is not None and not isinstance(state, Mapping):
        raise TypeError(f"{name}: state is of type {type(state).__name__}; expected what the step before returned")
    dtypes = {key: compute_dtype(weight.dtype) for key, weight in own_weights.items()}
    arrays, gradients = (
        {key: as_kernels_take(values[key], dtype) for key, dtype in dtypes.items()}
        for values in (own_weights, own_grads)
    )
    step = row.kernel(arrays, gradients, _read_state(name, arrays, state) if state else {}, *numbers)
    assert step is not None  # all arrays have been converted
    new_weights, new_state = step
    return {key: weight.astype(own_weights[key].dtype, copy=False) for key, weight in new_weights.items()}, new_state


def _read_state(name: str, weights: Arrays, state: Mapping[str, ArrayLike]) -> Arrays:
    """Check and return the state as the step before left it."""
    row, arrays = OPTIMIZERS[name], {}
    if row.counts_steps:
        step = np.asarray(state.get("step"))
        if step.dtype.kind not in "iu" or step.shape or step < 0:
            raise ValueError(f"{name}: state['step'] is no count of steps; expected what the step before returned")
        arrays["step"] = np.array(int(step), np.int64)  # of C's long, where long long has the same size
    for key, weight in weights.items():
        for place in [f"{slot}.{key}" for slot in row.slots]:
            array = np.asarray(state.get(place))
            if array.shape != weight.shape or array.dtype != weight.dtype:
                has = f"has shape {array.shape} and dtype {array.dtype}" if place in state else "is missing"
                raise ValueError(
                    f"{name}: state[{place!r}] {has}; expected {weight.shape} and {weight.dtype}: what the step before"
                    f" returned, or None at the first"
                )
            arrays[place] = as_kernels_take(array, weight.dtype)
    return arrays


def _arrays(caller: str, argument: str, values: Mapping[str, ArrayLike]) -> Arrays:
    """Return the values of a dict of arrays, checked."""
    if not isinstance(values, Mapping):
        raise TypeError(f"{caller}: {argument} is of type {type(values).__name__}; expected a dict of arrays")
    arrays = {name: np.asarray(value) for name, value in values.items()}
    for name, array in arrays.items():
        if array.dtype not in DTYPES:
            raise TypeError(f"{caller}: {argument}[{name!r}] has dtype {array.dtype}; expected {DTYPE_NAMES}")
    return arrays


def _number(caller: str, name: str, value: float, below: float = inf) -> float:
    """Return a number of at least 0, and below a limit, as a float."""
    if type(value) is not float and (not isinstance(value, Real) or isinstance(value, bool)):
        raise TypeError(f"{caller}: {name} is of type {type(value).__name__}; expected a real number")
    if not 0 <= value < below:
        raise ValueError(f"{caller}: {name} is {value}; expected 0 <= {name} < {below:g}")
    return float(value)
