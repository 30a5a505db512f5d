"""A computation as a function of TensorFlow, for Keras' backend "tensorflow": eager, and in ``tf.function``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from .computation import Computation


def compute(
    computation: Computation, x: Any, mask: Any, states: Sequence[Any], weights: Sequence[Any], training: bool
) -> list[Any]:
    """Return y and the last states, as tensors that know their gradients."""
    states, weights = [*map(tf.convert_to_tensor, states)], [*map(tf.convert_to_tensor, weights)]  # no variables
    masks, count = [] if mask is None else [mask], 1 + len(states)

    def split(arrays: Sequence[Any]) -> tuple[Any, Any, Any, Any]:
        """Return x, mask, states and weights of the arrays of a call."""
        return arrays[0], arrays[count] if masks else None, arrays[1:count], arrays[count + len(masks) :]

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def function(*inputs: Any) -> Any:
        tensors = [*inputs[:count], *masks, *inputs[count:]]
        token, *results = tf.numpy_function(
            lambda *arrays: computation.forward_with_token(*split(arrays), training),
            tensors,
            [tf.int64, *[x.dtype] * count],
        )

        def gradient(*d_results: Any) -> Any:
            d_inputs = tf.numpy_function(
                lambda token, *arrays: computation.backward_of_token(
                    int(token), *split(arrays[:-count]), arrays[-count:]
                ),
                [token, *tensors, *d_results],
                [x.dtype] * len(inputs),
            )
            for d_input, of_input in zip(d_inputs, inputs, strict=True):
                d_input.set_shape(of_input.shape)
            return d_inputs

        results[0].set_shape(computation.y_shape(x, weights[1].shape[0]))
        for result, state in zip(results[1:], states, strict=True):
            result.set_shape(state.shape)
        return results, gradient

    return [*function(x, *states, *weights)]


def device(weight: Any) -> str:
    """Return where Keras computes: "cpu", or another place."""
    return "gpu" if tf.config.list_logical_devices("GPU") else "cpu"
