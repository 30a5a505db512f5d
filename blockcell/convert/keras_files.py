"""Files of Keras 2 and 3, read without Keras, as `KerasLayer` describes the model in them.

=================================  ====================================================================
``.h5``, ``.hdf5``                 a config, as JSON in an attribute, and arrays for each layer by name
``.keras``                         a zip of configs and of ``model.weights.h5``
``.weights.h5``, or ``.h5``        arrays alone, as ``save_weights`` writes them
``.json``                          a config alone, as ``to_json`` returns it
=================================  ====================================================================

A file need not be trusted. What is wrong in it is a `blockcell.FormatError`, and nothing in it is executed: a Lambda or
a class of one's own is a name.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..activations import Activation
from ..errors import FormatError
from ..files import LONGEST_TEXT, StrPath, check_regular
from . import hdf5
from .hdf5 import MOST_DEFLATED, SMALL, Group
from .keras_config import Version, describe_config
from .keras_description import KerasLayer
from .keras_stored import VARIABLES, describe_arrays, with_named_arrays, with_variables

_KINDS = "Keras' .h5, .hdf5, .keras, .weights.h5, or the .json of an architecture"
_EXPECTED = f"expected {_KINDS}"
_HDF5, _ZIP = b"\x89HDF\r\n\x1a\n", b"PK\3\4"
_SMALL_CONFIG = 2**18  # bytes that a config may have in any case
_MOST_LISTS = 2**17  # and mappings of a config


class KerasFile(NamedTuple):
    """A model in a file."""

    model: KerasLayer
    version: Version
    has_config: bool
    """Whether the file has a config; else the shapes of arrays tell what there is."""


def read_model(path: StrPath, weights: StrPath | None, options: Mapping[str, bool | Activation | None]) -> KerasFile:
    """Describe the model in a file. What is wrong in it is a FormatError that names the file.

    `weights` is the path of the arrays for a config alone, and `options` are for arrays alone: the config of all cells.
    """
    name = os.fspath(path)
    start, size = _read_start(name)
    is_zip = start[: len(_ZIP)] == _ZIP
    if weights is not None and (is_zip or start == _HDF5):
        raise ValueError(f"weights is given, and {name} has weights of its own; expected the .json of an architecture")
    try:
        if is_zip:
            return _read_zip(name, size)
        if start == _HDF5:
            return _read_hdf5(name, size, options)
        if weights is not None:
            return _read_json(name, size, os.fspath(weights))
    except FormatError as error:
        raise FormatError(f"{name}: {error}") from error
    if start[:1] in (b"{", b" ", b"\n"):
        raise ValueError(f"{name} is an architecture without weights; pass the path of these, too: weights=")
    raise FormatError(f"{name} is of an unknown kind; {_EXPECTED}")


def _read_start(name: str) -> tuple[bytes, int]:
    """Return the first bytes of a file, and how many it has."""
    if os.path.isdir(name):
        inside = os.listdir(name)
        hint = ": a SavedModel is for blockcell.tensorflow.open" if "saved_model.pb" in inside else ""
        hint = ': pass "config.json" in it, with weights="model.weights.h5"' if "config.json" in inside else hint
        raise FormatError(f"{name} is a folder{hint}; {_EXPECTED}")
    check_regular(name, _KINDS)
    with open(name, "rb") as file:
        return file.read(len(_HDF5)), file.seek(0, os.SEEK_END)


def _read_hdf5(name: str, size: int, options: Mapping[str, bool | Activation | None]) -> KerasFile:
    with hdf5.opened(name, size) as root:
        version = _version_of(root, None)
        if root.has_attribute("model_config"):
            model = _describe_model(_parse_json("model_config", root.text("model_config")), version)
            return KerasFile(with_named_arrays(model, root.group("model_weights")), version, True)
        return KerasFile(describe_arrays(root, version, options), version, False)


def _read_zip(name: str, size: int) -> KerasFile:
    try:
        with zipfile.ZipFile(name) as archive:
            most = min(LONGEST_TEXT, size + _SMALL_CONFIG)  # a config of many layers deflates well, and takes time
            metadata = _parse_json("metadata.json", _member(archive, size, "metadata.json", most))
            version = Version.parse(str(metadata.get("keras_version") if isinstance(metadata, dict) else metadata))
            config = _parse_json("config.json", _member(archive, size, "config.json", most))
            model = _describe_model(config, version)
            content = _member(archive, size, "model.weights.h5", MOST_DEFLATED * size + SMALL)
    except FormatError:
        raise
    except (zipfile.BadZipFile, zlib.error, EOFError, *hdf5.DAMAGE) as error:
        raise FormatError(f"the zip cannot be read: {error}") from error
    with hdf5.opened(io.BytesIO(content), size) as root:
        return KerasFile(with_variables(model, root), version, True)


def _member(archive: zipfile.ZipFile, size: int, name: str, most: int) -> bytes:
    """Read a member of the archive of that size; refuse more than `most` bytes, and more than the archive has."""
    try:
        member = archive.getinfo(name)
    except KeyError:
        raise FormatError(f"there is no {name} in it; {_EXPECTED}") from None
    is_known = member.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
    if not is_known or member.file_size > most or member.compress_size > size:
        sizes = f"{member.file_size} bytes, {member.compress_size} of them in the archive"
        raise FormatError(f"{name} has {sizes}, compressed by method {member.compress_type}")
    with archive.open(member) as stream:  # `archive.read` would inflate all, whatever the directory says of its size
        return stream.read(most)


def _read_json(name: str, size: int, weights: str) -> KerasFile:
    if size > LONGEST_TEXT:
        raise FormatError(f"it has {size} bytes; expected at most {LONGEST_TEXT}")
    with open(name, "rb") as file:
        text = file.read()
    start, size = _read_start(weights)
    if start != _HDF5:
        raise FormatError(f"its weights, {weights}, are no HDF5")
    with hdf5.opened(weights, size) as root:
        config = _parse_json("it", text)
        version = _version_of(root, config)
        model = _describe_model(config, version)
        if any(container in root for container in VARIABLES):
            return KerasFile(with_variables(model, root), version, True)
        group = root.group("model_weights") if "model_weights" in root else root
        return KerasFile(with_named_arrays(model, group), version, True)


def _version_of(root: Group, config: Any) -> Version:
    """Return the version of Keras, as the config or the arrays say it; in the JSON of a model Keras 3 does not."""
    if isinstance(config, dict) and isinstance(text := config.get("keras_version"), str):
        return Version.parse(text)
    if root.has_attribute("keras_version"):
        return Version.parse(root.text("keras_version"))
    is_newer = any(name in root for name in VARIABLES) or (isinstance(config, dict) and "module" in config)
    if not is_newer:
        raise FormatError("it does not tell its version, so it is of Keras 1; load it with Keras 2, and save it again")
    return Version(3, 0)


def _describe_model(config: Any, version: Version) -> KerasLayer:
    model = describe_config(config, version)
    if not model.is_model:
        raise FormatError(f"its config is of {model.kind} {model.name!r}; expected a model")
    return model


def _parse_json(label: str, text: str | bytes) -> Any:
    if len(text) > LONGEST_TEXT:
        raise FormatError(f"{label} has a length of {len(text)}; expected at most {LONGEST_TEXT}")
    marks: Any = (b"[", b"{") if isinstance(text, bytes) else ("[", "{")
    if (count := sum(map(text.count, marks))) > _MOST_LISTS:  # they take fifty bytes for each byte of a text
        raise FormatError(f"{label} has {count} lists and mappings; expected at most {_MOST_LISTS}")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{label} is not JSON: {error}") from error
