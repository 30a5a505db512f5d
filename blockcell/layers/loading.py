"""Layers from files: `blockcell.load`; and what the description of a layer in a file tells of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import IO, Any

from .. import files
from ..optable import Array
from ..quantization import dequantize_matrix, read_matrices
from .containers import Bidirectional, Stack
from .dense import Dense
from .layer import Layer
from .lstm_gru import GRU, LSTM, RNN
from .quantized import Quantized
from .structure import STATES


def load(path: str | os.PathLike[str] | IO[bytes]) -> Layer:
    """Read a layer that ``layer.save`` wrote.

    Parameters
    ----------
    path : path_like or file object
        A path that ends in ``.npz`` or ``.safetensors``; or a binary file object to read and seek in, such as an
        `io.BytesIO`, of which all is read, whatever its position. It stays open, and its first bytes say which it is.

    Returns
    -------
    Layer
        An `LSTM`, `GRU`, `RNN`, `Dense`, `Bidirectional` or `Stack`, with the same weights, bit for bit, and
        attributes.

    Raises
    ------
    TypeError
        ``path`` is neither a path nor such a file object.
    FormatError
        The file is damaged, holds something else, such as a `Quantized` layer, or has a format version that this
        blockcell does not know; or the path is that of a pipe, a device or a folder.
    ValueError
        The path has another ending.
    OSError
        The file cannot be read.
    """
    return _read(path, False)  # type: ignore[return-value]


def _read_quantized(path: str | os.PathLike[str] | IO[bytes]) -> Quantized[Any]:
    """Read a quantized layer, for `Quantized.load`."""
    return _read(path, True)  # type: ignore[return-value]


Quantized._read = _read_quantized


def read_any(path: str | os.PathLike[str] | IO[bytes]) -> Layer | Quantized[Any]:
    """Read a layer, quantized or not."""
    return _read(path, None)


def _read(path: str | os.PathLike[str] | IO[bytes], expects_quantized: bool | None) -> Layer | Quantized[Any]:
    with files.reading(path) as (description, arrays, sha256, quantization, schemes):
        if expects_quantized is False and quantization is not None:
            expected = "expected a file of a layer's own save: read this one with blockcell.Quantized.load(path)"
            raise ValueError(f"it is quantized, to {quantization!r}; {expected}")
        if expects_quantized and quantization is None:
            raise ValueError("it is not quantized; read it with blockcell.load(path), and then call quantize(scheme)")
        matrices = read_matrices(arrays, schemes)
        weights = arrays | {name: dequantize_matrix(matrix) for name, matrix in matrices.items()}
        layer: Layer | Quantized[Any] = build_layer(description, weights)
        if quantization is not None:
            layer = Quantized(layer, quantization)
        if sha256 is not None and files.checksum(layer._description(), layer._arrays_of_file()) != sha256:
            raise ValueError("it is not what was saved: its sha256 is another")
    return layer


def build_layer(description: Mapping[str, Any], arrays: Mapping[str, Array]) -> Layer:
    """Build the layer that is described; its weights are the arrays with their prefixed names."""

    def build_leaf_of(leaf: Mapping[str, Any], prefix: str) -> Layer:
        names = [tensor.name for tensor in files.weights_of(leaf)]
        return build_leaf(leaf, {name: arrays[prefix + name] for name in names if prefix + name in arrays})

    return build_from_leaves(description, build_leaf_of)


def build_from_leaves(
    description: Mapping[str, Any], leaf_of: Callable[[Mapping[str, Any], str], Layer], prefix: str = ""
) -> Layer:
    """Build the layer that is described of its cells and dense layers.

    `leaf_of` gets the description of one of these and what the names of its weights begin with.
    """
    kind = description["type"]
    if kind == "Bidirectional":
        return Bidirectional(*(build_from_leaves(description[d], leaf_of, f"{prefix}{d}.") for d in ("fw", "bw")))
    if kind == "Stack":
        parts = enumerate(description["layers"])
        return Stack([build_from_leaves(part, leaf_of, f"{prefix}{k}.") for k, part in parts])
    return leaf_of(description, prefix)


def build_leaf(description: Mapping[str, Any], weights: Mapping[str, Array]) -> Layer:
    """Build the cell or the `Dense` that is described with these weights."""
    attributes: dict[str, Any] = {name: value for name, value in description.items() if name != "type"}
    classes: dict[str, type[Layer]] = {"LSTM": LSTM, "GRU": GRU, "RNN": RNN, "Dense": Dense}
    return classes[description["type"]](**weights, **attributes)


# --------------------------------------------------------------------------------------------------------- descriptions
def described_state(description: Mapping[str, Any]) -> tuple[tuple[str, ...], dict[str, Mapping[str, Any]]]:
    """Return the names of a state's parts, and the layers among these parts."""
    if description["type"] == "Stack":
        children = {str(k): child for k, child in enumerate(description["layers"])}
    else:
        children = {name: description[name] for name in ("fw", "bw") if name in description}
    return tuple(children) or STATES[description["type"]]._fields, children
