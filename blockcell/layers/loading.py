"""Layers from files: `blockcell.load`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import IO, Any

from .. import files
from ..optable import Array
from .base import Layer
from .containers import Bidirectional, Stack
from .dense import Dense
from .lstm_gru import GRU, LSTM, RNN
from .storage import read_stored, stored_arrays, widened


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
        attributes. If it was saved with `storage`, the float32 layer with the weights as they were stored.

    Raises
    ------
    TypeError
        ``path`` is neither a path nor such a file object.
    ValueError
        The file is damaged, holds something else, or has a format version that this blockcell does not know; or the
        path is that of a pipe, a device or a folder.
    OSError
        The file cannot be read.
    """
    return read(path)[0]


def read(path: str | os.PathLike[str] | IO[bytes]) -> tuple[Layer, str | None]:
    """The layer, and in what the file has its weights, None for as they are."""
    with files.reading(path) as (description, arrays, sha256, storage):
        narrow = {} if storage is None else read_stored(arrays, files.matrices_of(description), storage)
        layer = build_layer(description, arrays | {name: widened(each) for name, each in narrow.items()})
        found = stored_arrays(layer.weights, narrow)
        if sha256 is not None and files.checksum(layer._description(), found) != sha256:
            raise ValueError("it is not what was saved: its sha256 is another")
    return layer, storage


def build_layer(description: Mapping[str, Any], arrays: Mapping[str, Array], prefix: str = "") -> Layer:
    """Build the layer that is described; its weights are the arrays whose names begin with the prefix."""
    kind = description["type"]
    if kind == "Bidirectional":
        return Bidirectional(*(build_layer(description[name], arrays, f"{prefix}{name}.") for name in ("fw", "bw")))
    if kind == "Stack":
        return Stack([build_layer(part, arrays, f"{prefix}{k}.") for k, part in enumerate(description["layers"])])
    names = [tensor.name for tensor in files.weights_of(description)]
    weights: dict[str, Any] = {name: arrays[prefix + name] for name in names if prefix + name in arrays}
    attributes = {name: value for name, value in description.items() if name != "type"}
    made: dict[str, type[LSTM | GRU | RNN | Dense]] = {"LSTM": LSTM, "GRU": GRU, "RNN": RNN, "Dense": Dense}
    return made[kind](**weights, **attributes)
