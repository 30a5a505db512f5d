"""Layers from files: `blockcell.load`; and what the description of a layer in a file tells of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import IO, Any

from .. import files
from ..optable import Array
from ..quantization import dequantize_matrix, read_matrices
from .containers import Bidirectional, Stack
from .layer import Layer
from .quantized import Quantized
from .structure import LEAVES, STATES


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
    return read_any(path, False)  # type: ignore[return-value]


def rebuild(description: Any, arrays: dict[str, Array], quantization: Any) -> Layer | Quantized[Any]:
    """Build a layer, perhaps a quantized one, from what a file or a pickle has of it."""
    matrices = read_matrices(arrays, files.schemes_of(description, quantization))
    weights = arrays | {name: dequantize_matrix(matrix) for name, matrix in matrices.items()}
    layer = build_layer(description, weights)
    return layer if quantization is None else Quantized(layer, quantization)


def read_any(path: str | os.PathLike[str] | IO[bytes], expects_quantized: bool | None = None) -> Layer | Quantized[Any]:
    """Read a layer, quantized or not, or refuse what is not expected."""
    with files.reading(path) as (description, arrays, sha256, quantization):
        if expects_quantized is False and quantization is not None:
            expected = "expected a file of a layer's own save: read this one with blockcell.Quantized.load(path)"
            raise ValueError(f"it is quantized, to {quantization!r}; {expected}")
        if expects_quantized and quantization is None:
            raise ValueError("it is not quantized; read it with blockcell.load(path), and then call quantize(scheme)")
        layer = rebuild(description, arrays, quantization)
        if sha256 is not None and files.checksum(layer._description(), layer._arrays_of_file()) != sha256:
            raise ValueError("it is not what was saved: its sha256 is another")
    return layer


Quantized._read, Quantized._rebuild = read_any, rebuild


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
    described = files.parts_of(description).items()
    parts = [build_from_leaves(part, leaf_of, f"{prefix}{name}.") for name, part in described]
    if not parts:
        return leaf_of(description, prefix)
    return Stack(parts) if description["type"] == "Stack" else Bidirectional(*parts)


def build_leaf(description: Mapping[str, Any], weights: Mapping[str, Array]) -> Layer:
    """Build the cell or the `Dense` that is described with these weights."""
    attributes: dict[str, Any] = {name: value for name, value in description.items() if name != "type"}
    leaf: Layer = LEAVES[description["type"]](**weights, **attributes)
    return leaf


# --------------------------------------------------------------------------------------------------------- descriptions
def described_state(description: Mapping[str, Any]) -> tuple[tuple[str, ...], dict[str, Mapping[str, Any]]]:
    """Return the names of a state's parts, and the layers among these parts."""
    children = files.parts_of(description)
    return tuple(children) or STATES[description["type"]]._fields, children
