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
import re
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, count, pairwise, permutations
from typing import IO, Any, NamedTuple

from ..activations import Activation
from ..errors import FormatError
from ..files import LONGEST_TEXT, StrPath, check_regular
from ..optable import Array
from . import hdf5
from .hdf5 import MOST_DEFLATED, SMALL, Group, StoredArray
from .keras_description import KerasLayer, Version, default_gates, describe_config, snake_case
from .shared import KINDS

_KINDS = "Keras' .h5, .hdf5, .keras, .weights.h5, or the .json of an architecture"
_EXPECTED = f"expected {_KINDS}"
_HDF5, _ZIP = b"\x89HDF\r\n\x1a\n", b"PK\3\4"
_SMALL_CONFIG = 2**18  # bytes that a config may have in any case
_MOST_LISTS = 2**17  # and mappings of a config
VARIABLES = ("layers", "_layer_checkpoint_dependencies")
"""The group of a model's layers in the format of Keras 3, and its name in Keras 2.12."""
_KERAS_KINDS = {count: "SimpleRNN" if kind == "RNN" else kind for count, kind in KINDS.items()}
_GATE_COUNTS = {kind: count for count, kind in _KERAS_KINDS.items()}
_MOST_ORDERED = 7  # layers of a file that has no config, of which each order is tried

Options = Mapping[str, Any]
"""activation, recurrent_activation and reset_after of all cells."""


class KerasFile(NamedTuple):
    """A model in a file."""

    model: KerasLayer
    default_gates: Activation | None = None
    """The default recurrent_activation if the file has arrays alone, whose shapes tell what there is."""


def read_model(path: StrPath, weights: StrPath | None, options: Options) -> KerasFile:
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
            return _read_hdf5(name, size, options=options)
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


def _read_zip(name: str, size: int) -> KerasFile:
    try:
        with zipfile.ZipFile(name) as archive:
            most = min(LONGEST_TEXT, size + _SMALL_CONFIG)  # a config of many layers deflates well, and takes time
            metadata = _parse_json("metadata.json", _member(archive, size, "metadata.json", most))
            version = Version.parse(str(metadata.get("keras_version") if isinstance(metadata, dict) else metadata))
            text = _member(archive, size, "config.json", most)
            content = _member(archive, size, "model.weights.h5", MOST_DEFLATED * size + SMALL)
    except FormatError:
        raise
    except (zipfile.BadZipFile, zlib.error, EOFError, *hdf5.DAMAGE) as error:
        raise FormatError(f"the zip cannot be read: {error}") from error
    return _read_hdf5(io.BytesIO(content), size, text, version)


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
    return _read_hdf5(weights, size, text)


def _read_hdf5(
    source: str | IO[bytes],
    size: int,
    text: str | bytes | None = None,
    version: Version | None = None,
    options: Options | None = None,
) -> KerasFile:
    """Read a model in HDF5, whose config and version may stand elsewhere; the options are for arrays alone."""
    with hdf5.opened(source, size) as root:
        if text is None and root.has_attribute("model_config"):
            text = root.text("model_config")
        config = None if text is None else _parse_json("its config", text)
        version = version or _version_of(root, config)
        if text is None:
            return KerasFile(describe_arrays(root, version, options or {}), default_gates(version))
        model = describe_config(config, version)
        if not model.is_model:
            raise FormatError(f"its config is of {model.kind} {model.name!r}; expected a model")
        if any(name in root for name in VARIABLES):
            return KerasFile(with_variables(model, root))
        group = root.group("model_weights") if "model_weights" in root else root
        return KerasFile(with_named_arrays(model, group))


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


# ----------------------------------------------------------------------------------------- arrays by the layers' names
def with_named_arrays(model: KerasLayer, group: Group) -> KerasLayer:
    """Return the model with the arrays of Keras 2's format, which has a group for each layer."""
    names = dict.fromkeys(group.texts("layer_names"))
    stored_name_of = {layer.name: layer.name for layer in model.layers}
    is_known = names.keys() <= stored_name_of.keys()
    stored_names = [] if is_known else [name for name in names if group.group(name).texts("weight_names")]
    if extra_names := {*stored_names} - stored_name_of.keys():
        weighted = [layer.name for layer in model.layers if _needs_arrays(layer) or layer.kind == "Embedding"]
        if len(weighted) != len(stored_names):
            raise FormatError(f"{group.path}/{min(extra_names)} has arrays of a layer that the config does not have")
        stored_name_of |= zip(weighted, stored_names, strict=True)  # a model that was built anew: Keras goes by order
    layers = [*model.layers]
    for k, layer in enumerate(layers):
        if _needs_arrays(layer):
            if (name := stored_name_of[layer.name]) not in names:
                raise FormatError(f"there are no arrays of the layer {name!r}, but of {', '.join([*names][:12])}")
            inner = group.group(name)
            layers[k] = _with_arrays(layer, inner, inner.texts("weight_names"))
    return model._replace(layers=tuple(layers))


def _needs_arrays(layer: KerasLayer) -> bool:
    """Return whether the layer has weights and a counterpart here, or one in it has."""
    if layer.is_model or layer.layers:
        return not layer.module and any(map(_needs_arrays, layer.layers))
    return layer.is_cell or (layer.kind == "Dense" and not layer.module)


def _with_arrays(layer: KerasLayer, group: Group, names: Sequence[str]) -> KerasLayer:
    """Return the layer with the arrays of these names, in the order of its get_weights()."""
    if not _needs_arrays(layer):
        return layer
    if not layer.layers:
        return layer._replace(arrays=_arrays_of(layer, group.path, [group.array(name) for name in names]))
    if layer.is_model:
        shares = _shares_by_name(layer, names)
    elif layer.kind == "Bidirectional":
        half = len(names) // 2
        shares = [[name for name in names if ("backward_" in name) == is_backward] for is_backward in (False, True)]
        shares = shares if all(shares) else [names[:half], names[half:]]
    else:  # an RNN has cells one on the other
        ends = [*accumulate((_count(inner) for inner in layer.layers[:-1]), initial=0), len(names)]
        shares = [names[start:end] for start, end in pairwise(ends)]
    parts = zip(layer.layers, shares, strict=True)
    return layer._replace(layers=tuple(_with_arrays(inner, group, share) for inner, share in parts))


def _shares_by_name(model: KerasLayer, names: Sequence[str]) -> list[Sequence[str]]:
    """Divide names of arrays among the layers of a nested model by the layers' names in them."""
    names_with: dict[str, list[str]] = {}
    for name in names:
        for part in {*name.split("/")[:-1]}:
            names_with.setdefault(part, []).append(name)
    shares: list[Sequence[str]] = []
    shared_names: set[str] = set()
    for layer in model.layers:
        share = names_with.get(layer.name, []) if _needs_arrays(layer) else []
        if (_needs_arrays(layer) and len(share) != _count(layer)) or not shared_names.isdisjoint(share):
            label = f"{model.kind} {model.name!r}"
            raise FormatError(f"the arrays of {label} do not tell to which of its layers they belong")
        shared_names.update(share)
        shares.append(share)
    return shares


def _count(layer: KerasLayer) -> int:
    """Return how many arrays a layer has."""
    if layer.layers:
        return sum(map(_count, layer.layers))
    return 0 if not _needs_arrays(layer) else (2 if layer.is_cell else 1) + layer.config["use_bias"]


def _arrays_of(layer: KerasLayer, path: str, stored: Sequence[StoredArray]) -> list[Array]:
    """Read the arrays of a cell or a Dense; refuse shapes that contradict its config."""
    shapes = [array.shape for array in stored]
    units, use_bias = layer.config["units"], layer.config["use_bias"]
    columns = units * _GATE_COUNTS.get(layer.kind.removesuffix("Cell"), 1)
    expected: list[tuple[int, ...]] = [(shapes[0][0] if shapes and shapes[0] else 0, columns)]
    expected += [(units, columns)] * layer.is_cell
    expected += [(columns,)] * use_bias
    if use_bias and layer.config.get("reset_after") is not False and shapes[2:] == [(2, columns)]:
        expected[2] = (2, columns)
    if layer.is_cell and shapes[2:] == [(2 * columns,)]:  # a CuDNNLSTM's or CuDNNGRU's, which any of them may have
        expected[2] = (2 * columns,)
    if shapes != expected:
        label = f"{path}: {layer.kind} {layer.name!r}"
        raise FormatError(f"{label} has arrays of shapes {str(shapes)[:200]}; expected {expected}")
    return [array.read() for array in stored]


# ------------------------------------------------------------------------------------ arrays by the paths of attributes
def with_variables(layer: KerasLayer, group: Group) -> KerasLayer:
    """Return the layer or model with the arrays of Keras 3's format, which has a group for each attribute."""
    if not _needs_arrays(layer):
        return layer
    if not layer.layers:
        is_layer = layer.is_cell and not layer.kind.endswith("Cell")
        stored = _variables(group.group("cell") if is_layer else group)
        return layer._replace(arrays=_arrays_of(layer, group.path, stored))
    container = _container(group) if layer.is_model else group
    if layer.is_model and len(container.names()) > len(layer.layers):
        raise FormatError(f"{container.path} has more layers than the config: {len(container.names())}")
    paths = _class_names(layer.layers) if layer.is_model else _inner_paths(layer)
    layers = [
        with_variables(inner, container.group(path)) if _needs_arrays(inner) else inner
        for inner, path in zip(layer.layers, paths, strict=True)
    ]
    return layer._replace(layers=tuple(layers))


def _container(group: Group) -> Group:
    """Return the group of the layers of a model."""
    name = next((name for name in VARIABLES if name in group), None)
    if name is None:
        raise FormatError(f"{group.path or 'its HDF5'} has no group {VARIABLES[0]}")
    return group.group(name)


def _inner_paths(layer: KerasLayer) -> list[str]:
    """Return the paths of the groups of the layers in a layer."""
    if layer.kind == "Bidirectional":
        return ["forward_layer", "backward_layer"]
    if layer.kind == "TimeDistributed":
        return ["layer"]
    if layer.config["cell"]["class_name"] != "StackedRNNCells":
        return ["cell"]
    return [f"cell/cells/{name}" for name in _class_names(layer.layers)]


def _class_names(layers: Sequence[KerasLayer]) -> list[str]:
    """Return the names of layers' groups, as Keras makes them of classes, numbered from the second of a class on."""
    names = [snake_case(layer.kind.rpartition(">")[2]) for layer in layers]
    numbers = defaultdict[str, Iterator[int]](count)
    return [f"{name}_{number}" if (number := next(numbers[name])) else name for name in names]


def _variables(group: Group) -> list[StoredArray]:
    """Return the arrays of a group, which have numbers in place of names."""
    variables = group.group("vars")
    names = variables.names()
    if {*names} != {str(k) for k in range(len(names))}:
        raise FormatError(f"{variables.path} has the members {', '.join(names[:12])}; expected 0, 1 and so on")
    return [variables.array(str(k)) for k in range(len(names))]


# --------------------------------------------------------------------------------------------------------- arrays alone
def describe_arrays(root: Group, version: Version, options: Options) -> KerasLayer:
    """Describe the model whose arrays are in a file that has no config.

    The shapes of arrays tell which cell they are of. What they do not tell is the same for all cells: `options` has
    activation, recurrent_activation and reset_after, None for the default of Keras. Dense layers have no activation,
    and all layers return sequences.
    """
    options = dict(options, activation=options["activation"] or "tanh")
    options["recurrent_activation"] = options["recurrent_activation"] or default_gates(version)
    if any(name in root for name in VARIABLES):
        layers = [*_layers_by_attributes(_container(root), "", options)]
        ordered = _only_order(layers)
    else:
        layers = [layer for name in root.texts("layer_names") for layer in _layers_by_name(root, name, options)]
        ordered = layers
    if not layers:
        raise FormatError("it has neither a config nor arrays of layers")
    return KerasLayer("Model" if ordered is None else "Sequential", "", {}, (), tuple(ordered or layers), True)


def _only_order(layers: Sequence[KerasLayer]) -> list[KerasLayer] | None:
    """Return the layers one behind the other, if their sizes allow one order alone; else None."""
    unsized = [layer for layer in layers if not (layer.arrays or layer.layers)]
    sized = [layer for layer in layers if layer.arrays or layer.layers]
    if len(sized) > _MOST_ORDERED or any(layer.kind != "embedding" for layer in unsized):
        return None
    orders = [
        order
        for order in permutations(sized)
        if all(_sizes(one)[1] == _sizes(other)[0] for one, other in pairwise(order))
    ]
    return [*unsized, *orders[0]] if len(orders) == 1 else None


def _sizes(layer: KerasLayer) -> tuple[int, int]:
    """Return the numbers of inputs and of outputs."""
    if layer.layers:
        return _sizes(layer.layers[0])[0], sum(_sizes(half)[1] for half in layer.layers)
    return len(layer.arrays[0]), layer.config["units"]


def _layers_by_name(root: Group, name: str, options: Options) -> list[KerasLayer]:
    """Return the layers whose arrays are in the group of a layer or of a nested model."""
    group = root.group(name)
    parts: dict[str, list[tuple[str, StoredArray]]] = {}
    for full_name in group.texts("weight_names"):
        path, _, role = re.sub(r":\d+\Z", "", full_name).rpartition("/")
        parts.setdefault(path, []).append((role, group.array(full_name)))
    layers: list[KerasLayer] = []
    waiting = ""
    for path, pairs in parts.items():
        roles, stored = [role for role, _ in pairs], [array for _, array in pairs]
        is_recurrent = "recurrent_kernel" in roles
        kind = "unknown" if is_recurrent else {"embeddings": "Embedding", "kernel": "Dense"}.get(roles[0], "unknown")
        side = "".join(re.findall(r"(?:\A|/)(forward|backward)_", path)[:1])
        inner = name if len(parts) == 1 or side else f"{name}/{path.split('/')[0]}"
        layer = _layer_of(inner, group.path, stored, options, is_recurrent, kind)
        if waiting and side == "backward":
            layers[-1] = _bidirectional(name, layers[-1], layer)
        else:
            layers.append(layer)
        waiting = path if side == "forward" else ""
    return layers


def _layers_by_attributes(container: Group, prefix: str, options: Options) -> Iterator[KerasLayer]:
    """Yield the layers of a model and of those within it, in no order."""
    for member in container.names():
        group, name = container.group(member), prefix + member
        kind = re.sub(r"_\d+\Z", "", member)
        if any(inner in group for inner in VARIABLES):
            yield from _layers_by_attributes(_container(group), f"{name}/", options)
        elif "forward_layer" in group and "backward_layer" in group:
            halves = (_cell(name, group.group(f"{side}_layer/cell"), options) for side in ("forward", "backward"))
            yield _bidirectional(name, *halves)
        elif "cell" in group and "cells" in group.group("cell"):
            cells = group.group("cell/cells")
            yield from (_cell(f"{name}/{inner}", cells.group(inner), options) for inner in cells.names())
        elif "cell" in group:
            yield _cell(name, group.group("cell"), options)
        else:
            inside = group.group("layer") if "layer" in group else group
            if stored := _variables(inside):
                dense = "Dense" if kind in ("dense", "time_distributed") else kind
                yield _layer_of(name, group.path, stored, options, False, dense)


def _cell(name: str, group: Group, options: Options) -> KerasLayer:
    return _layer_of(name, group.path, _variables(group), options, True)


def _layer_of(
    name: str, path: str, stored: Sequence[StoredArray], options: Options, is_recurrent: bool, kind: str = "unknown"
) -> KerasLayer:
    """Return the layer with these arrays: a cell by their shapes, a Dense by its name, or one that is not known."""
    shapes = [array.shape for array in stored]
    if is_recurrent and len(shapes) > 1 and len(shapes[1]) == 2 and shapes[1][0]:
        units, columns = shapes[1]
        kind = _KERAS_KINDS.get(columns // units, kind)
        config = {"units": units, "use_bias": len(shapes) != 2, "go_backwards": False, "return_sequences": True}
        layer = KerasLayer(kind, name, {**config, **options})
        if layer.is_cell:
            return layer._replace(arrays=_arrays_of(layer, path, stored))
    if kind == "Dense" and shapes[0][1:] == shapes[-1][-1:] and len(shapes) < 3:
        layer = KerasLayer("Dense", name, {"units": shapes[0][1], "use_bias": len(shapes) == 2, "activation": "linear"})
        return layer._replace(arrays=_arrays_of(layer, path, stored))
    return KerasLayer(kind, name, {}, module="unknown")


def _bidirectional(name: str, fw: KerasLayer, bw: KerasLayer) -> KerasLayer:
    module = "" if fw.is_cell and bw.is_cell else "unknown"
    return KerasLayer("Bidirectional", name, {"merge_mode": "concat"}, layers=() if module else (fw, bw), module=module)
