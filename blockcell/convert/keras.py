"""Weights from and to Keras."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..layers import GRU, Bidirectional, Layer, Stack
from ..optable import Array
from .shared import (
    KINDS,
    Cell,
    ConversionError,
    cells_of,
    check_shapes,
    count_gates,
    make_cell,
    read_arrays,
    refuse_extras,
    split_cell,
)


def from_keras(source: Any, *, reset_after: bool | None = None) -> Layer:
    """A layer with the weights of a Keras LSTM or GRU.

    .. code-block:: python

        layer = convert.from_keras(model.get_layer("lstm"))
        y, state = layer(x.swapaxes(0, 1))          # Keras reads x as [B,T,I]

    Parameters
    ----------
    source : Keras layer, or sequence
        A ``keras.layers.LSTM``, ``GRU`` or ``Bidirectional`` of one of them; or what its ``get_weights()`` returned:
        ``[kernel, recurrent_kernel, bias]`` or, with ``use_bias=False``, the first two, and these twice for
        ``Bidirectional``. A list of any of these becomes a `blockcell.Stack`.
    reset_after : bool, optional
        Whether a GRU resets after the product. Needed for arrays without a bias, which do not show it; must be False.

    Returns
    -------
    LSTM, GRU, Bidirectional or Stack
        ``unit_forget_bias`` does not matter: it only sets the initial bias. A lone layer with ``go_backwards=True`` has
        ``reverse=True`` here.

    Raises
    ------
    TypeError
        The source is none of these, or an array has a dtype other than float32, float64 and float16.
    ConversionError
        A GRU with ``reset_after=True``, which is Keras's default; activations other than tanh and sigmoid;
        ``go_backwards=True`` of a lone layer with ``return_sequences=True``, whose output Keras leaves in the order in
        which it is computed; a ``merge_mode`` other than "concat".
    ValueError
        The number of arrays or their shapes are wrong, or they may be those of a Bidirectional with I = H as well as
        those of two stacked layers.

    Notes
    -----
    TensorFlow's block GRU multiplies h by the reset gate before the product with the recurrent kernel, as Keras does
    with ``reset_after=False``. With ``reset_after=True`` Keras does so after the product, which is another function.
    """
    caller = "from_keras"
    if hasattr(source, "get_config"):
        return _layer(caller, source)
    if isinstance(source, (str, bytes)) or not isinstance(source, Sequence):
        expected = (
            "expected a Keras LSTM, GRU or Bidirectional layer, the arrays of its get_weights(), or a list of these"
        )
        raise TypeError(f"{caller}: the source is of type {type(source).__name__}; {expected}")
    if source and all(hasattr(part, "get_config") or isinstance(part, (list, tuple)) for part in source):
        return Stack([from_keras(part, reset_after=reset_after) for part in source])
    return _from_arrays(caller, source, reset_after)


def to_keras(layer: Layer) -> list[Any]:
    """The arrays for ``set_weights`` of a Keras layer.

    .. code-block:: python

        keras_layer.set_weights(convert.to_keras(layer))

    Parameters
    ----------
    layer : LSTM, GRU, Bidirectional or Stack
        For a ``keras.layers.LSTM``, a ``GRU`` with ``reset_after=False``, or a ``Bidirectional`` with its default
        ``merge_mode``, all with ``use_bias=True`` and the default activations.

    Returns
    -------
    list of ndarray
        ``[kernel, recurrent_kernel, bias]``, twice for `Bidirectional`; for a `Stack` a list of such lists.
        An LSTM's forget_bias is added into the bias.

    Raises
    ------
    ConversionError
        An LSTM has peepholes or clips its cell state: Keras has neither. A layer has ``reverse=True``.
    """
    caller = "to_keras"
    if isinstance(layer, Stack):
        return [to_keras(part) for part in layer.layers]
    arrays: list[Array] = []
    for cell in cells_of(caller, layer):
        refuse_extras(caller, cell, "Keras's LSTM")
        kernel, recurrent, bias, recurrent_bias = split_cell(cell, f"Keras {type(cell).__name__}")
        both = isinstance(cell, GRU) and cell.reset_after
        arrays += kernel, recurrent, np.stack([bias, recurrent_bias]) if both else bias
    return arrays


def _is_of_keras(thing: Any, name: str) -> bool:
    """Whether it is the class or function of that name in one of Keras's modules, and not another of the same name."""
    module = getattr(thing, "__module__", None) or ""
    ours = module.split(".")[0] in ("keras", "tf_keras", "tensorflow")
    return ours and getattr(sys.modules.get(module), name, None) is thing


def _layer(caller: str, source: Any) -> Layer:
    kind = type(source).__name__
    if kind not in ("LSTM", "GRU", "Bidirectional") or not _is_of_keras(type(source), kind):
        raise ConversionError(
            f"{caller}: the source is a {type(source).__module__}.{kind}; expected Keras's LSTM, GRU or Bidirectional."
            f" Of a model, pass the recurrent layers of model.layers in a list; of another class that computes the"
            f" same, pass its get_weights()"
        )
    config = source.get_config()
    what = f"{caller}: {kind} {getattr(source, 'name', '')!r}"
    if kind == "Bidirectional":
        if config["merge_mode"] != "concat":
            raise ConversionError(
                f"{what} has merge_mode={config['merge_mode']!r}; only 'concat' can be expressed. Convert its"
                f" get_weights() and combine the two halves of y outside"
            )
        fw, bw = source.forward_layer, source.backward_layer
        if fw.get_config()["go_backwards"]:
            raise ConversionError(
                f"{what} has a forward layer with go_backwards=True; only the backward layer may run backwards"
            )
        return Bidirectional(_cell(caller, fw), _cell(caller, bw))
    if config["go_backwards"] and config["return_sequences"]:
        raise ConversionError(
            f"{what} has go_backwards=True and return_sequences=True: its output begins with the last step, that of a"
            f" layer with reverse=True with the first. Convert its get_weights() and call the layer with x[::-1]: y is"
            f" then in Keras's order"
        )
    return _cell(caller, source, config["go_backwards"])


def _cell(caller: str, source: Any, reverse: bool = False) -> Cell:
    kind, config = type(source).__name__, source.get_config()
    what = f"{caller}: {kind} {getattr(source, 'name', '')!r}"
    if kind not in ("LSTM", "GRU") or not _is_of_keras(type(source), kind):
        raise ConversionError(f"{what} is neither Keras's LSTM nor its GRU")
    for name, expected in (("activation", "tanh"), ("recurrent_activation", "sigmoid")):
        function = getattr(source, name, None)
        if config[name] != expected or not _is_of_keras(function, expected):
            named = getattr(function, "__module__", None) if config[name] == expected else None
            found = f"{config[name]!r}{f' of {named}' if named else ''}"
            raise ConversionError(
                f"{what} has {name}={found}; only Keras's own {expected!r} can be expressed. Train it with that one, or"
                f" stay with Keras"
            )
    arrays = source.get_weights()
    if not arrays:
        raise ValueError(f"{what} has no weights yet; build it, or call it once")
    return _cell_from_arrays(caller, arrays, kind == "GRU" and config["reset_after"], reverse=reverse)


def _from_arrays(caller: str, source: Sequence[Any], reset_after: bool | None) -> Layer:
    if len(source) in (2, 3):
        return _cell_from_arrays(caller, source, reset_after)
    if len(source) not in (4, 6):
        raise ValueError(
            f"{caller}: got {len(source)} arrays; expected kernel, recurrent_kernel and, unless use_bias=False, bias,"
            f" twice for Bidirectional"
        )
    half = len(source) // 2
    fw, bw = (_cell_from_arrays(caller, part, reset_after) for part in (source[:half], source[half:]))
    if fw.input_size != bw.input_size or fw.hidden_size != bw.hidden_size:
        raise ValueError(
            f"{caller}: the two layers have I={fw.input_size}, H={fw.hidden_size} and I={bw.input_size},"
            f" H={bw.hidden_size}, so they are no Bidirectional; pass stacked layers as a list of lists"
        )
    if fw.input_size == fw.hidden_size:
        raise ValueError(
            f"{caller}: with I = H = {fw.hidden_size}, the {len(source)} arrays are those of a Bidirectional or of two"
            f" layers, one on the other; pass the Keras layers, or convert both halves of the list and put them into a"
            f" blockcell.Bidirectional or a blockcell.Stack"
        )
    return Bidirectional(fw, bw)


def _cell_from_arrays(caller: str, source: Sequence[Any], reset_after: bool | None, reverse: bool = False) -> Cell:
    names = ["kernel", "recurrent_kernel", "bias"][: len(source)]
    arrays = read_arrays(caller, dict(zip(names, source, strict=True)))
    kernel, recurrent = arrays["kernel"], arrays["recurrent_kernel"]
    gates = count_gates(caller, "recurrent_kernel", recurrent, axis=1)
    columns = gates * len(recurrent)
    bias = arrays.get("bias")
    if gates == 3 and bias is None and reset_after is None:
        raise ConversionError(
            f"{caller}: a GRU without a bias does not show whether it has reset_after=True (Keras's default); pass the"
            f" layer itself, or reset_after="
        )
    if bias is not None and bias.shape == (2 * columns,):
        raise ConversionError(
            f"{caller}: bias has shape {bias.shape}, that of Keras 2's CuDNNLSTM and CuDNNGRU, whose kernels are laid"
            f" out differently. Load the weights into a keras.layers.LSTM or GRU first, which converts them"
        )
    if reset_after is None:
        reset_after = bias is not None and bias.ndim == 2
    reset_after = reset_after and gates == 3
    shape = (2, columns) if reset_after else (columns,)
    if bias is None:
        bias = np.zeros(shape, kernel.dtype)
    check_shapes(caller, {"kernel": (kernel, (None, columns)), "bias": (bias, shape)})
    biases = bias if reset_after else (bias, None)
    return make_cell(f"Keras {KINDS[gates]}", kernel, recurrent, *biases, reset_after=reset_after, reverse=reverse)
