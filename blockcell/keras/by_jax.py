"""A computation as a function of JAX, for Keras' backend "jax": also under ``jit``.

Compiled programs call `Computation` by XLA's foreign function interface (``xla_calls.py``), which hands over the memory
of arrays.  ``jax.pure_callback`` would copy every array by JAX, which takes longer than a small layer, and may wait for
the thread that runs the callback.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from . import xla_calls
from .computation import Computation


def compute(computation: Computation, inputs: Sequence[Any], training: bool) -> list[Any]:
    """Return y and the last states, as arrays that know their gradients."""
    return [*_compute(computation, *inputs)]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _compute(computation: Computation, *inputs: Any) -> Any:
    return xla_calls.call("forward", computation, _result_shapes(computation, inputs), inputs)


def _forward(computation: Computation, *inputs: Any) -> Any:
    shapes = [jax.ShapeDtypeStruct((), np.int32), *_result_shapes(computation, inputs)]
    token, *results = xla_calls.call("forward_with_token", computation, shapes, inputs)
    return tuple(results), (token, *inputs)


def _backward(computation: Computation, residuals: Any, d_results: Any) -> Any:
    inputs = residuals[1:]
    sources = inputs[: 1 + computation.state_count + computation.weight_count]
    shapes = [jax.ShapeDtypeStruct(source.shape, source.dtype) for source in sources]
    d_sources = xla_calls.call("backward_of_token", computation, shapes, (*residuals, *d_results))
    return *d_sources, *[None] * (len(inputs) - len(sources))


_compute.defvjp(_forward, _backward)


def _result_shapes(computation: Computation, inputs: Sequence[Any]) -> list[Any]:
    return [jax.ShapeDtypeStruct(shape, inputs[0].dtype) for shape in computation.result_shapes(inputs)]
