"""Layers in files: ``layer.save(path)`` and ``blockcell.load(path)``.

Two formats, by the file's suffix: ``.npz``, numpy's own, and ``.safetensors``, which needs the package of that name.
Both hold the arrays of ``layer.weights`` under their names, and one JSON text named "blockcell":

.. code-block:: text

    {"version": 1, "layer": {"type": "LSTM", "forget_bias": 0.0, "cell_clip": 0.0, "gate_order": "icfo"}}
    {"version": 1, "layer": {"type": "Bidirectional", "fw": {"type": "GRU"}, "bw": {"type": "GRU"}}}
    {"version": 1, "layer": {"type": "Stack", "layers": [{...}, ...]}}

Reading never unpickles, so that files from others do no harm.
"""

from __future__ import annotations

import json
import os
import uuid
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from .layers import GRU, LSTM, Bidirectional, Layer, Stack
from .optable import Array

__all__ = ["load", "save"]

VERSION = 1
KEY = "blockcell"
ATTRIBUTES = ("forget_bias", "cell_clip", "gate_order")  # of an LSTM

StrPath = str | os.PathLike[str]
F = TypeVar("F")


def save(layer: Layer, path: StrPath) -> None:
    """Write a layer to a file, which `load` reads.

    Either the whole file is written or nothing is: what stood there before stays until the new one is complete.

    Parameters
    ----------
    layer : Layer
        An `LSTM`, `GRU`, `Bidirectional` or `Stack`.
    path : path_like
        Ends in ``.npz`` or ``.safetensors``.

    Raises
    ------
    ValueError
        The path ends otherwise.
    ImportError
        ``.safetensors`` without that package.
    OSError
        The file cannot be written.
    """
    form = _of_suffix(path, {".npz": _npz, ".safetensors": _safetensors})
    text = json.dumps({"version": VERSION, "layer": describe(layer)})
    write(path, form(text, {name: np.ascontiguousarray(array) for name, array in layer.weights.items()}))


def write(path: StrPath, content: bytes) -> None:
    """Write a file as a whole or not at all."""
    target = Path(os.path.realpath(path))  # behind a link
    part = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        with part.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(target)
    except OSError as error:  # which names a file that nobody knows
        raise type(error)(error.errno, error.strerror, os.fspath(path)) from None
    finally:
        part.unlink(missing_ok=True)


def load(path: StrPath) -> Layer:
    """Read a layer that `save` wrote.

    Parameters
    ----------
    path : path_like
        Ends in ``.npz`` or ``.safetensors``.

    Returns
    -------
    Layer
        An `LSTM`, `GRU`, `Bidirectional` or `Stack`, with the same weights, bit for bit, and attributes.

    Raises
    ------
    ValueError
        The file is damaged, holds something else, or has a format version that this blockcell does not know.
    ImportError
        ``.safetensors`` without that package.
    OSError
        The file cannot be read.
    """
    read = _of_suffix(path, {".npz": _read_npz, ".safetensors": _read_safetensors})
    with open(path, "rb"):  # its errors are the user's
        pass
    try:
        text, arrays = read(path)
        document = json.loads(text)
        if document["version"] != VERSION:
            found = repr(document["version"])
            raise ValueError(f"its format version is {found}; this blockcell reads {VERSION}; a newer one may read it")
        layer = _build(document["layer"], arrays, "")
        if arrays:
            raise ValueError(f"it has arrays that belong to no layer: {', '.join(arrays)}")
    except ImportError:
        raise
    except Exception as error:  # of any kind, as a damaged file may hold anything
        raise ValueError(f"{os.fspath(path)} cannot be read as a layer of blockcell: {_words(error)}") from error
    return layer


# ----------------------------------------------------------------------------------------------------------- the layers
def describe(layer: Layer) -> dict[str, Any]:
    """The layer without its weights, as far as JSON holds it."""
    if isinstance(layer, LSTM):
        return {"type": "LSTM"} | {name: getattr(layer, name) for name in ATTRIBUTES}
    if isinstance(layer, GRU):
        return {"type": "GRU"}
    if isinstance(layer, Bidirectional):
        return {"type": "Bidirectional", "fw": describe(layer.fw), "bw": describe(layer.bw)}
    if isinstance(layer, Stack):
        return {"type": "Stack", "layers": [describe(part) for part in layer.layers]}
    raise TypeError(f"save: the layer is of type {type(layer).__name__}; expected an LSTM, GRU, Bidirectional or Stack")


def _build(description: Any, arrays: dict[str, Array], prefix: str) -> Layer:
    """The layer of a description; its arrays are taken out of `arrays`."""
    kind, *rest = description["type"], *sorted(description.keys() - {"type"})
    expected = {"LSTM": sorted(ATTRIBUTES), "GRU": [], "Bidirectional": ["bw", "fw"], "Stack": ["layers"]}
    if kind not in expected:
        raise ValueError(f"it has a layer of type {kind!r}")
    if rest != expected[kind]:
        raise ValueError(f"its {kind} has the attributes {rest}; expected {expected[kind]}")
    if kind == "Bidirectional":
        return Bidirectional(*(_build(description[name], arrays, f"{prefix}{name}.") for name in ("fw", "bw")))
    if kind == "Stack":
        return Stack([_build(part, arrays, f"{prefix}{k}.") for k, part in enumerate(description["layers"])])
    names = [name for name in arrays if name.startswith(prefix) and "." not in name.removeprefix(prefix)]
    weights: dict[str, Any] = {name.removeprefix(prefix): arrays.pop(name) for name in names}
    if kind == "GRU":
        return GRU(**weights)
    return LSTM(**weights, **{name: description[name] for name in ATTRIBUTES})


# ---------------------------------------------------------------------------------------------------------- the formats
def _of_suffix(path: StrPath, formats: dict[str, F]) -> F:
    suffix = Path(path).suffix
    if suffix not in formats:
        raise ValueError(f"{os.fspath(path)}: expected a path that ends in {' or '.join(formats)}")
    return formats[suffix]


def _npz(text: str, arrays: dict[str, Array]) -> bytes:
    buffer = BytesIO()
    entries: dict[str, Any] = {KEY: np.array(text)} | arrays
    np.savez(buffer, **entries)
    return buffer.getvalue()


def _read_npz(path: StrPath) -> tuple[str, dict[str, Array]]:
    with open(path, "rb") as file:  # np.load would leave it open where it fails
        content = np.load(file, allow_pickle=False)
        if not isinstance(content, np.lib.npyio.NpzFile):
            raise ValueError("it is no .npz file")
        arrays = dict(content)
    if KEY not in arrays:
        raise ValueError(f"it has no entry {KEY!r}")
    return str(arrays.pop(KEY)), arrays


def _safetensors(text: str, arrays: dict[str, Array]) -> bytes:
    content: bytes = _library().numpy.save(arrays, metadata={KEY: text})
    return content


def _read_safetensors(path: StrPath) -> tuple[str, dict[str, Array]]:
    with _library().safe_open(path, framework="numpy") as file:
        metadata = file.metadata() or {}
        arrays = {name: file.get_tensor(name) for name in file.keys()}
    if KEY not in metadata:
        raise ValueError(f"it has no metadata {KEY!r}")
    return metadata[KEY], arrays


def _library() -> Any:
    try:
        import safetensors.numpy
    except ImportError as error:
        raise ImportError(
            "files that end in .safetensors need the package safetensors: pip install 'blockcell[safetensors]';"
            " or use .npz"
        ) from error
    return safetensors


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
