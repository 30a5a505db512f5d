"""Files of Keras 1, 2 and 3, read without Keras, as `KerasLayer` describes the model in them.

=================================  ====================================================================
``.h5``, ``.hdf5``                 a config, as JSON in an attribute, and arrays for each layer by name
=================================  ====================================================================

A file need not be trusted. What is wrong in it is a `blockcell.FormatError`, and nothing in it is executed: a Lambda or
a class of one's own is a name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import FormatError, plain
from ..files import LONGEST_TEXT, StrPath, check_regular
from ..optable import Array
from . import hdf5
from .hdf5 import Group
from .keras_config import Version, describe_config
from .keras_layers import WITHOUT_EFFECT, KerasLayer

_EXPECTED = "expected Keras' .h5 or .hdf5"
_HDF5 = b"\x89HDF\r\n\x1a\n"
_KERAS_1 = "1"  # what files without a version are of
_GATES = {"LSTM": 4, "GRU": 3, "SimpleRNN": 1}
_KERAS_1_GATES = {"LSTM": (0, 2, 1, 3), "GRU": (0, 1, 2)}
"""Where Keras' gates i, f, c, o stand among Keras 1's i, c, f, o, and z, r, h among z, r, h."""


def read_model(path: StrPath) -> KerasLayer:
    """Describe the model in a file. What is wrong in it is a FormatError that names the file."""
    name = os.fspath(path)
    if os.path.isdir(name):
        hint = ": a SavedModel is for blockcell.tensorflow.open" if "saved_model.pb" in os.listdir(name) else ""
        raise FormatError(f"{name} is a folder{hint}; {_EXPECTED}")
    check_regular(name, _EXPECTED)
    with open(name, "rb") as file:
        start = file.read(len(_HDF5))
        size = file.seek(0, os.SEEK_END)
    try:
        if start == _HDF5:
            return _read_hdf5(name, size)
    except FormatError as error:
        raise FormatError(f"{name}: {error}") from error
    raise FormatError(f"{name} is of an unknown kind; {_EXPECTED}")


def _read_hdf5(name: str, size: int) -> KerasLayer:
    with hdf5.opened(name, size) as root:
        if not root.has_attribute("model_config"):
            raise FormatError("it has no config of a model")
        version = root.text("keras_version") if root.has_attribute("keras_version") else _KERAS_1
        described = describe_config(_parsed("model_config", root.text("model_config")), Version.parse(version))
        if not described.is_model:
            raise FormatError(f"its config is of {described.kind} {described.name!r}; expected a model")
        return with_named_arrays(described, root.group("model_weights"))


def _parsed(label: str, text: str) -> Any:
    if len(text) > LONGEST_TEXT:
        raise FormatError(f"{label} has {len(text)} characters; expected at most {LONGEST_TEXT}")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{label} is not JSON: {error}") from error


# ----------------------------------------------------------------------------------------- arrays by the layers' names
def with_named_arrays(model: KerasLayer, group: Group) -> KerasLayer:
    """The model with the arrays of Keras 1's and 2's format, which has a group for each layer."""
    names = group.texts("layer_names")
    places = {name: name for name in names}
    needing = [layer.name for layer in model.layers if _needs_arrays(layer)]
    if not places.keys() >= {*needing}:  # those of the same model, built in another process
        filled = [name for name in names if group.group(name).texts("weight_names")]
        others = [layer.name for layer in model.layers if layer.kind not in WITHOUT_EFFECT]
        matching = next((layers for layers in (needing, others) if len(layers) == len(filled)), None)
        if matching is None:
            missing = next(name for name in needing if name not in places)
            raise FormatError(f"there are no arrays of the layer {missing!r}, but of {', '.join(filled[:12])}")
        places = dict(zip(matching, filled, strict=True))
    layers = []
    for layer in model.layers:
        if _needs_arrays(layer):
            inner = group.group(places[layer.name])
            layer = _with_arrays(layer, inner, inner.texts("weight_names"))
        layers.append(layer)
    return model._replace(layers=tuple(layers))


def _needs_arrays(layer: KerasLayer) -> bool:
    """Whether the layer has weights and a counterpart here, or one in it has."""
    if layer.is_model or layer.layers:
        return not layer.module and any(map(_needs_arrays, layer.layers))
    return layer.is_cell or (layer.kind == "Dense" and not layer.module)


def _with_arrays(layer: KerasLayer, group: Group, names: Sequence[str]) -> KerasLayer:
    """The layer with the arrays of these names, which are those of its get_weights()."""
    if not _needs_arrays(layer):
        return layer
    if not layer.layers:
        return layer._replace(arrays=_arrays_of(layer, group, names))
    if layer.is_model:
        shares = _shares_by_name(layer, names) or _shares_by_count(layer, names)
    elif layer.kind == "Bidirectional":
        directions = (
            [name for name in names if "backward_" not in name],
            [name for name in names if "backward_" in name],
        )
        half = len(names) // 2
        shares = [*directions] if all(directions) else [names[:half], names[half:]]
    elif len(layer.layers) == 1:
        shares = [names]
    else:
        shares = _shares_by_count(layer, names)
    parts = zip(layer.layers, shares, strict=True)
    return layer._replace(layers=tuple(_with_arrays(inner, group, share) for inner, share in parts))


def _shares_by_name(model: KerasLayer, names: Sequence[str]) -> list[Sequence[str]] | None:
    """The names of the arrays of each layer of a nested model, by the layers' names in them; None if these are not."""
    shares: list[Sequence[str]] = []
    for layer in model.layers:
        share = [name for name in names if layer.name in name.split("/")[:-1]]
        if _needs_arrays(layer) and len(share) != _count(layer):
            return None
        shares.append(share if _needs_arrays(layer) else ())
    taken = [name for share in shares for name in share]
    return shares if len({*taken}) == len(taken) else None


def _shares_by_count(model: KerasLayer, names: Sequence[str]) -> list[Sequence[str]]:
    """The names of the arrays of each layer, one layer after the other."""
    shares: list[Sequence[str]] = []
    start = 0
    for layer in model.layers:
        count = _count(layer)
        shares.append(names[start : start + count])
        start += count
    has_unknown = any(not _needs_arrays(layer) and layer.kind not in WITHOUT_EFFECT for layer in model.layers)
    if start != len(names) or has_unknown:
        raise FormatError(f"the arrays of {model.kind} {model.name!r} do not tell to which of its layers they belong")
    return shares


def _count(layer: KerasLayer) -> int:
    """How many arrays a layer has."""
    if layer.layers:
        return sum(map(_count, layer.layers))
    return 0 if not _needs_arrays(layer) else (2 if layer.is_cell else 1) + layer.config["use_bias"]


def _arrays_of(layer: KerasLayer, group: Group, names: Sequence[str]) -> list[Array]:
    """The arrays of a cell or a Dense."""
    stored = [group.array(name) for name in names]
    kind = layer.kind.removesuffix("Cell")
    is_by_gate = kind in _KERAS_1_GATES and len(stored) == 3 * _GATES[kind]
    shapes = [array.shape for array in stored]
    for own, start in (
        ((shapes[3 * k : 3 * k + 3], 3 * k) for k in range(_GATES[kind])) if is_by_gate else ((shapes, 0),)
    ):
        if problem := _misfit(layer, own, 1 if is_by_gate else None):
            raise FormatError(f"{group.path}: {names[start] if names else 'no array'}: {problem}")
    arrays = [array.read() for array in stored]
    if not is_by_gate:
        return arrays
    return [np.concatenate([arrays[3 * gate + k] for gate in _KERAS_1_GATES[kind]], axis=-1) for k in range(3)]


def _misfit(layer: KerasLayer, shapes: Sequence[tuple[int, ...]], gates: int | None = None) -> str:
    """How the shapes of a layer's arrays contradict its config; empty if they do not."""
    units, use_bias = layer.config["units"], layer.config["use_bias"]
    columns = units * (gates or _GATES.get(layer.kind.removesuffix("Cell"), 1))
    expected: list[tuple[int, ...]] = [(shapes[0][0] if shapes and shapes[0] else 0, columns)]
    expected += [(units, columns)] * layer.is_cell
    expected += [(columns,)] * use_bias
    if use_bias and len(shapes) == 3 and shapes[2] == (2, columns) and layer.config.get("reset_after") is not False:
        expected[2] = (2, columns)
    if [*shapes] == expected:
        return ""
    return f"{layer.kind} {layer.name!r} has arrays of shapes {plain(str([*shapes])[:200])}; expected {expected}"
