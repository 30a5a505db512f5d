"""A computation as a function of TensorFlow, for Keras' backend "tensorflow": eager, and in ``tf.function``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import tensorflow as tf

from .computation import Computation


def compute(computation: Computation, inputs: Sequence[Any], training: bool) -> list[Any]:
    """Return y and the last states, as tensors that know their gradients."""
    inputs = [*map(tf.convert_to_tensor, inputs)]  # no variables
    count, dtype = 1 + computation.state_count, inputs[0].dtype

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def function(*inputs: Any) -> Any:
        token, *results = tf.numpy_function(
            lambda *arrays: computation.forward_with_token(arrays, training), inputs, [tf.int64, *[dtype] * count]
        )
        for result, shape in zip(results, computation.result_shapes(inputs), strict=True):
            result.set_shape(shape)

        sources = inputs[: count + computation.weight_count]

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def differentiate(*all_inputs: Any) -> Any:  # of all that the result depends on, so that no tape passes it over
            d_sources = tf.numpy_function(
                lambda token, *arrays: computation.backward_of_token(int(token), arrays[:-count], arrays[-count:]),
                all_inputs,
                [dtype] * len(sources),
            )
            for d_source, source in zip(d_sources, sources, strict=True):
                d_source.set_shape(source.shape)
            return d_sources, _refuse

        def gradient(*d_results: Any) -> Any:
            return [*differentiate(token, *inputs, *d_results), *[None] * (len(inputs) - len(sources))]

        return results, gradient

    return [*function(*inputs)]


def _refuse(*_: Any) -> NoReturn:
    raise ValueError(
        "blockcell.keras: a gradient of a gradient is not computed; call blockcell.keras.restore(model) before"
    )
