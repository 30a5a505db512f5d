"""Losses: plain functions that return a mean and its gradient, for ``layer.backward``.

.. code-block:: python

    y, state, tape = layer.forward(x, lengths=lengths)
    value, d_y = loss.mean_squared_error(y, target, lengths=lengths)
    d_x, d_state, grads = layer.backward(tape, d_y)

Entries count or do not: all of them do unless `mask` or `lengths` says otherwise.  What does not count may hold
anything, NaN too.  Its gradient is zero, and the mean is over the rest; where nothing counts it is 0.

Where a `Dense` with `last` gives one entry for each row, a row without steps has one, too, and counts, as in Keras.
Pass ``mask=lengths > 0`` to leave such rows out.

Arrays are float32, float64 or float16, and the gradient has their dtype.  float16 is computed in float32, and its
gradient is rounded once, at the end.  Means are summed in float64.

Both functions raise a TypeError where an argument's kind or dtype is wrong, and a ValueError where a shape does not
fit, or a label or a length is out of range.

`LOSSES` has a row for each: its kind of target. The checks here and `onnx_export` read it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from . import _training
from .argument_reader import ArgumentReader, is_array
from .layers.arguments import read_lengths
from .optable import DTYPES, Array, compute_dtype

__all__ = ["mean_squared_error", "softmax_cross_entropy"]


def softmax_cross_entropy(
    logits: ArrayLike, labels: ArrayLike, *, mask: ArrayLike | None = None, lengths: ArrayLike | None = None
) -> tuple[float, Array]:
    """The cross-entropy between the softmax of logits and classes, and its gradient.

    .. code-block:: text

        p = exp(logits) / (sum of exp(logits) over the classes)
        loss = mean of -log(p[label])
        d_logits = (p - (1 at the label, else 0)) / (number of entries that count)

    Parameters
    ----------
    logits : array_like (..., C)
        One number for each of C classes, such as (B, C) or (T, B, C). float32, float64 or float16; lists are converted.
    labels : array_like (...) of int
        The right class of each entry, from 0 to C - 1.
    mask : array_like (...) of bool, optional
        Which entries count.
    lengths : array_like (B,) of int, optional
        For logits (T, B, C): how many steps of each row count, 0 to T. With `mask`, what both say counts.

    Returns
    -------
    loss : float
        0 where nothing counts.
    d_logits : ndarray (..., C)
        The gradient of the loss to the logits; zero where an entry does not count.

    Warns
    -----
    UserWarning
        The logits are probabilities: none is negative and each row sums to 1, as from a `Dense` with softmax. This
        function takes the softmax again.

    Notes
    -----
    The largest logit is subtracted first, so that large ones do not overflow, and its share of the sum, 1, is kept
    apart, so that small losses and gradients keep their digits. A logit of -inf excludes a class.

    Source: the equations of PyTorch's ``cross_entropy``, which agrees on integer labels (`mask` does what its
    ``ignore_index`` does), and of Keras's ``SparseCategoricalCrossentropy(from_logits=True)``.
    """
    if mask is None and lengths is None and (result := _training.cross_entropy(logits, labels)) is not None:
        _warn_of_probabilities(np.asarray(logits))
        return result
    values, label, index = _read("softmax_cross_entropy", logits, labels, mask, lengths)
    grad = np.zeros(values.shape, values.dtype)
    if not label.size:
        return 0.0, grad
    rows = _copy(values[index])
    _warn_of_probabilities(values[index])
    result = _training.cross_entropy(rows.reshape(-1, values.shape[-1]), label)
    assert result is not None  # all arrays have been converted
    mean, d_rows = result
    grad[index] = d_rows.reshape(rows.shape)
    return mean, grad


def mean_squared_error(
    y: ArrayLike, target: ArrayLike, *, mask: ArrayLike | None = None, lengths: ArrayLike | None = None
) -> tuple[float, Array]:
    """The mean of the squared differences, and its gradient.

    .. code-block:: text

        loss = mean of (y - target)^2
        d_y = 2 * (y - target) / (number of numbers that count)

    Parameters
    ----------
    y : array_like (..., H)
        What is compared, such as (B, H) or (T, B, H). float32, float64 or float16; lists are converted.
    target : array_like (..., H)
        What it is compared with: y's shape and dtype.
    mask : array_like (...) of bool, optional
        Which entries count; an entry is H numbers.
    lengths : array_like (B,) of int, optional
        For y (T, B, H): how many steps of each row count, 0 to T. With `mask`, what both say counts.

    Returns
    -------
    loss : float
        0 where nothing counts.
    d_y : ndarray (..., H)
        The gradient of the loss to y; zero where an entry does not count.

    Notes
    -----
    Source: the equations of PyTorch's ``mse_loss`` and of Keras's ``MeanSquaredError``.
    """
    values, expected, index = _read("mean_squared_error", y, target, mask, lengths)
    error = _copy(values[index])
    error -= expected
    n = max(error.size, 1)
    loss = float(np.square(error, dtype=np.float64).sum()) / n
    error /= n / 2
    grad = np.zeros(values.shape, values.dtype)
    grad[index] = error
    return loss, grad


# ------------------------------------------------------------------------------------------------------------ the table
@dataclass(frozen=True)
class Loss:
    """What a loss takes; the docstring of its function has the equations."""

    function: Callable[..., tuple[float, Array]]
    target: Literal["classes", "values"]
    """One class for each entry of logits (..., C), or an array like y (..., H)."""


LOSSES = {
    "softmax_cross_entropy": Loss(softmax_cross_entropy, "classes"),
    "mean_squared_error": Loss(mean_squared_error, "values"),
}


# ----------------------------------------------------------------------------------------------- what the losses share
def _read(
    name: str, values: ArrayLike, target: ArrayLike, mask: ArrayLike | None, lengths: ArrayLike | None
) -> tuple[Array, Array, Array | EllipsisType]:
    """Check the arguments of a loss.

    Returns
    -------
    values : ndarray (..., C or H)
        The logits, or y.
    target : ndarray
        The entries of the target that count. Classes are in one row.
    index : ndarray or Ellipsis
        Which entries count: an index into all axes but the last.
    """
    reader = ArgumentReader(name)
    if LOSSES[name].target == "classes":
        [logits] = _arrays(reader, "C", logits=values)
        if not logits.shape[-1]:
            raise ValueError(f"{name}: logits has shape {logits.shape}; expected (..., C) with at least one class")
        labels = _labels(reader, target, logits.shape)
        index = _counted_entries(reader, "logits", logits.shape, "C", mask, lengths)
        return logits, _labels_in_range(reader, labels, index, logits.shape[-1]), index
    y, expected = _arrays(reader, "H", y=values, target=target)
    if expected.shape != y.shape:
        raise ValueError(f"{name}: target has shape {expected.shape}; expected {y.shape}, that of y")
    index = _counted_entries(reader, "y", y.shape, "H", mask, lengths)
    return y, expected[index], index


def _arrays(reader: ArgumentReader, last: str, **values: Any) -> list[Array]:
    """Return the values as arrays of one dtype, with one axis at least; `last` is the letter of the last axis."""
    arrays = [(name, value, reader.array(name, value)) for name, value in values.items()]
    dtype = DTYPES[reader.dtype_number(arrays)]
    for name, _, array in arrays:
        if not array.ndim:
            raise ValueError(f"{reader.caller}: {name} has shape (); expected (..., {last})")
    return [array.astype(dtype, copy=False) for _, _, array in arrays]


def _labels(reader: ArgumentReader, value: Any, shape: tuple[int, ...]) -> Array:
    """Return the classes as integers, one for each row of logits of this shape."""
    labels = reader.array("labels", value)
    if labels.dtype.kind not in "iu" and (labels.size or is_array(value)):
        raise TypeError(f"{reader.caller}: labels has dtype {labels.dtype}; expected integers, the right classes")
    if labels.shape != shape[:-1]:
        expected = f"expected {shape[:-1]}, that of logits but for the classes"
        raise ValueError(f"{reader.caller}: labels has shape {labels.shape}; {expected}")
    return labels


def _labels_in_range(reader: ArgumentReader, labels: Array, index: Array | EllipsisType, classes: int) -> Array:
    """Return the labels that count, in one row."""
    is_wrong = np.zeros(labels.shape, np.bool_)
    is_wrong[index] = (labels[index] < 0) | (labels[index] >= classes)
    if is_wrong.any():
        first = np.argwhere(is_wrong)[0].tolist()
        raise ValueError(
            f"{reader.caller}: labels{first or ''} is {labels[tuple(first)]}; expected 0 to {classes - 1}, for the"
            f" {classes} classes of logits; mask leaves out what has no label"
        )
    return labels[index].astype(np.intp).reshape(-1)


def _counted_entries(
    reader: ArgumentReader,
    name: str,
    shape: tuple[int, ...],
    last: str,
    mask: ArrayLike | None,
    lengths: ArrayLike | None,
) -> Array | EllipsisType:
    """Return which entries count, as an index into all axes but the last."""
    index: Array | EllipsisType = ...
    if mask is not None:
        index = reader.array("mask", mask)
        if index.dtype != np.bool_ and (index.size or is_array(mask)):
            raise TypeError(
                f"{reader.caller}: mask has dtype {index.dtype}; expected bool, True for what counts: mask != 0 of"
                f" numbers"
            )
        if index.shape != shape[:-1]:
            raise ValueError(
                f"{reader.caller}: mask has shape {index.shape}; expected {shape[:-1]}, that of {name} but for its"
                f" last axis"
            )
        index = index.astype(np.bool_, copy=False)
    if lengths is not None and len(shape) != 3:
        raise ValueError(
            f"{reader.caller}: lengths needs {name} of shape (T, B, {last}), but it has shape {shape}; use mask"
        )
    if len(shape) == 3 and (ends := read_lengths(reader, lengths, shape[0], shape[1], name)) is not None:
        within = np.arange(shape[0])[:, None] < ends
        index = within if index is ... else index & within
    return index


def _warn_of_probabilities(logits: Array) -> None:
    """Warn, at the caller's caller, if all rows of logits are what a softmax gives; rows of zeros are padding.

    Whole numbers are logits that somebody has written.
    """
    if logits.shape[-1] < 2 or not (0 <= logits.item(0) <= 1 and 0 <= logits.item(1) <= 1):
        return  # as of most logits, without a look at the rest
    tolerance = 1e-5 + np.finfo(logits.dtype).eps

    def is_softmax(rows: Array) -> bool:
        sums = rows.sum(axis=-1, dtype=np.float64)
        return bool(rows.min() >= 0 and ((abs(sums - 1) < tolerance) | (sums == 0)).all())

    first_row = logits.reshape(-1, logits.shape[-1])[:1]
    if is_softmax(first_row) and is_softmax(logits) and (logits != np.rint(logits)).any():
        warnings.warn(
            "softmax_cross_entropy: logits are probabilities, as none is negative and each row sums to 1; expected what"
            " a softmax is taken of, such as y of a Dense with activation=None",
            stacklevel=3,
        )


def _copy(array: Array) -> Array:
    """Return a copy in the dtype that is computed in, and in C order, so that sums have one order."""
    return np.array(array, compute_dtype(array.dtype), order="C", copy=True)
