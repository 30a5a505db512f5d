"""A computation as a function of JAX, for Keras' backend "jax": also under ``jit``.

Callbacks call no JAX, which could wait for the thread that runs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from .computation import Computation


def compute(
    computation: Computation, x: Any, mask: Any, states: Sequence[Any], weights: Sequence[Any], training: bool
) -> list[Any]:
    """Return y and the last states, as arrays that know their gradients."""
    return [*_compute(computation, mask, x, tuple(states), tuple(weights))]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _compute(computation: Computation, mask: Any, x: Any, states: Any, weights: Any) -> Any:
    def run(mask: Any, x: Any, states: Any, weights: Any) -> Any:
        x, mask, states, weights = _arrays((x, mask, states, weights))
        return tuple(computation.forward(x, mask, states, weights, False)[0])

    return _call_back(run, _result_shapes(computation, x, states), mask, x, states, weights)


def _forward(computation: Computation, mask: Any, x: Any, states: Any, weights: Any) -> Any:
    def run(mask: Any, x: Any, states: Any, weights: Any) -> Any:
        x, mask, states, weights = _arrays((x, mask, states, weights))
        return tuple(computation.forward_with_token(x, mask, states, weights, True))

    shapes = (
        jax.ShapeDtypeStruct((), np.int64 if jax.config.jax_enable_x64 else np.int32),
        *_result_shapes(computation, x, states),
    )
    token, *results = _call_back(run, shapes, mask, x, states, weights)
    return tuple(results), (token, mask, x, states, weights)


def _backward(computation: Computation, residuals: Any, d_results: Any) -> Any:
    def run(token: Any, mask: Any, x: Any, states: Any, weights: Any, d_results: Any) -> Any:
        arrays = _arrays((x, mask, states, weights, d_results))
        grads = computation.backward_of_token(int(np.asarray(token)), *arrays)
        return grads[0], tuple(grads[1 : 1 + len(states)]), tuple(grads[1 + len(states) :])

    token, mask, x, states, weights = residuals
    shapes = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), (x, states, weights))
    return None, *_call_back(run, shapes, token, mask, x, states, weights, d_results)


_compute.defvjp(_forward, _backward)


def _call_back(function: Any, shapes: Any, *arguments: Any) -> Any:
    return jax.pure_callback(function, shapes, *arguments, vmap_method="sequential")


def _arrays(value: Any) -> Any:
    """Return arrays of JAX on the CPU, in tuples, as numpy's."""
    if isinstance(value, tuple):
        return tuple(map(_arrays, value))
    return None if value is None else np.asarray(value)


def _result_shapes(computation: Computation, x: Any, states: Any) -> Any:
    shapes = [computation.y_shape(x, states[0].shape[-1]), *(state.shape for state in states)]
    return tuple(jax.ShapeDtypeStruct(shape, x.dtype) for shape in shapes)


def device(weight: Any) -> str:
    """Return where Keras computes: "cpu", or another place."""
    return str(jax.default_backend())
