"""The arrays of a model in an HDF5 file, in both formats that Keras has; models of files that have no config."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import FormatError
from ..optable import Array
from .hdf5 import Group, StoredArray
from .keras_config import Version, default_gates, snake_case
from .keras_description import CUDNN_CONFIG, LONGEST_NAME, WITHOUT_EFFECT, KerasLayer
from .shared import KINDS

VARIABLES = ("layers", "_layer_checkpoint_dependencies")
"""The group of a model's layers in the format of Keras 3, and its name in Keras 2.12."""
_KERAS_KINDS = {count: "SimpleRNN" if kind == "RNN" else kind for count, kind in KINDS.items()}
_GATE_COUNTS = {kind: count for count, kind in _KERAS_KINDS.items()}
_KERAS_1_GATES = {"LSTM": (0, 2, 1, 3), "GRU": (0, 1, 2)}
"""Where Keras' gates i, f, c, o stand among Keras 1's i, c, f, o, and z, r, h among z, r, h."""
_KERAS_1_COUNTS = {3 * len(gates): len(gates) for gates in _KERAS_1_GATES.values()}  # of gates, by that of arrays
_KERAS_1_ROLE = r"_(W|U|b)(_[cfhiorz])?\Z"
_MOST_PAIRS = 2**15  # of layers and groups that are compared by their shapes
_MOST_CHOICES = 2**16  # of layers that are tried one behind the other
_MOST_ARRAYS = 3  # of a cell in Keras 3's format
_MOST_LAYERS, _MOST_NESTED = 2**12, 8  # in a file that has no config
_SIDES = "forward", "backward"

Options = Mapping[str, Any]
"""activation, recurrent_activation and reset_after of all cells."""


# ----------------------------------------------------------------------------------------- arrays by the layers' names
def with_named_arrays(model: KerasLayer, group: Group) -> KerasLayer:
    """Return the model with the arrays of Keras 1's and 2's format, which has a group for each layer."""
    names = group.texts("layer_names")
    stored_name_of = {name: name for name in names}
    needed_names = [layer.name for layer in model.layers if _needs_arrays(layer)]
    if not stored_name_of.keys() >= {*needed_names}:  # those of the same model, built in another process
        stored_names = [name for name in names if group.group(name).texts("weight_names")]
        weighted_names = [layer.name for layer in model.layers if layer.kind not in WITHOUT_EFFECT]
        candidates = (needed_names, weighted_names)
        matching_names = next((layers for layers in candidates if len(layers) == len(stored_names)), None)
        if matching_names is None:
            missing = next(name for name in needed_names if name not in stored_name_of)
            raise FormatError(f"there are no arrays of the layer {missing!r}, but of {', '.join(stored_names[:12])}")
        stored_name_of = dict(zip(matching_names, stored_names, strict=True))
    elif extra_names := [
        name
        for name in stored_name_of.keys() - {layer.name for layer in model.layers}
        if group.group(name).texts("weight_names")
    ]:
        raise FormatError(f"{group.path}/{min(extra_names)} has arrays of a layer that the config does not have")
    layers = [*model.layers]
    for k, layer in enumerate(layers):
        if _needs_arrays(layer):
            inner = group.group(stored_name_of[layer.name])
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
        shares = _shares_by_name(layer, names) or _shares_by_count(layer, names)
    elif layer.kind == "Bidirectional":
        half = len(names) // 2
        shares = [[name for name in names if ("backward_" in name) == is_backward] for is_backward in (False, True)]
        shares = shares if all(shares) else [names[:half], names[half:]]
    elif len(layer.layers) == 1:
        shares = [names]
    else:
        shares = _shares_by_count(layer, names)
    parts = zip(layer.layers, shares, strict=True)
    return layer._replace(layers=tuple(_with_arrays(inner, group, share) for inner, share in parts))


def _shares_by_name(model: KerasLayer, names: Sequence[str]) -> list[Sequence[str]] | None:
    """Divide names of arrays among the layers of a nested model by the layers' names in them; None if these are not."""
    names_with: dict[str, list[str]] = {}
    for name in names:
        for part in {*name.split("/")[:-1]}:
            names_with.setdefault(part, []).append(name)
    shares: list[Sequence[str]] = []
    shared_names: set[str] = set()
    for layer in model.layers:
        share = names_with.get(layer.name, []) if _needs_arrays(layer) else []
        if (_needs_arrays(layer) and len(share) != _count(layer)) or not shared_names.isdisjoint(share):
            return None
        shared_names.update(share)
        shares.append(share)
    return shares if len(shared_names) == sum(map(len, shares)) else None


def _shares_by_count(model: KerasLayer, names: Sequence[str]) -> list[Sequence[str]]:
    """Divide names of arrays among layers by how many each has, one layer after the other."""
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
    """Return how many arrays a layer has."""
    if layer.layers:
        return sum(map(_count, layer.layers))
    return 0 if not _needs_arrays(layer) else (2 if layer.is_cell else 1) + layer.config["use_bias"]


def _arrays_of(layer: KerasLayer, path: str, stored: Sequence[StoredArray]) -> list[Array]:
    """Read the arrays of a cell or a Dense; refuse shapes that contradict its config."""
    gates = _KERAS_1_GATES.get(layer.kind.removesuffix("Cell"), ())
    if not gates or len(stored) != 3 * len(gates):
        _check_shapes(layer, path, stored)
        return [array.read() for array in stored]
    for k in range(len(gates)):
        _check_shapes(layer, path, stored[3 * k : 3 * k + 3], gates=1)
    arrays = [array.read() for array in stored]
    return [np.concatenate([arrays[3 * gate + k] for gate in gates], axis=-1) for k in range(3)]


def _check_shapes(layer: KerasLayer, path: str, stored: Sequence[StoredArray], gates: int | None = None) -> None:
    """Refuse arrays whose shapes contradict the config; these are of a cell, of one of its gates, or of a Dense."""
    shapes = [array.shape for array in stored]
    units, use_bias = layer.config["units"], layer.config["use_bias"]
    columns = units * (gates or _GATE_COUNTS.get(layer.kind.removesuffix("Cell"), 1))
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


# ------------------------------------------------------------------------------------ arrays by the paths of attributes
def with_variables(layer: KerasLayer, group: Group) -> KerasLayer:
    """Return the layer or model with the arrays of Keras 3's format, which has a group for each attribute."""
    if not _needs_arrays(layer):
        return layer
    if not layer.layers:
        return layer._replace(arrays=_arrays_of(layer, group.path, _variables_of(layer, group)))
    layers = [*layer.layers]
    container = _container(group) if layer.is_model else group
    paths = _groups_of_layers(layer, container) if layer.is_model else dict(enumerate(_inner_paths(layer)))
    for k, path in paths.items():
        layers[k] = with_variables(layers[k], container.group(path))
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
    """Return the names of groups: those of classes in snake_case, numbered from the second of a class on."""
    counts: dict[str, int] = {}
    names = []
    for layer in layers:
        name = snake_case(layer.kind)
        counts[name] = counts.get(name, -1) + 1
        names.append(f"{name}_{counts[name]}" if counts[name] else name)
    return names


def _variables_of(layer: KerasLayer, group: Group) -> list[StoredArray]:
    """Return the arrays of a cell or a Dense."""
    is_layer = layer.is_cell and not layer.kind.endswith("Cell")
    group = group.group("cell") if is_layer and "cell" in group else group  # a CuDNNLSTM has no cell
    return _variables(group, _MOST_ARRAYS)


def _variables(group: Group, most: int = _MOST_LAYERS) -> list[StoredArray]:
    """Return the arrays of a group, which have numbers in place of names."""
    variables = group.group("vars")
    names = variables.names()
    if len(names) > most or {*names} != {str(k) for k in range(len(names))}:
        raise FormatError(f"{variables.path} has the members {', '.join(names[:12])}; expected 0, 1 and so on")
    return [variables.array(str(k)) for k in range(len(names))]


def _groups_of_layers(model: KerasLayer, container: Group) -> dict[int, str]:
    """Return the groups of the layers of a model that need arrays, by their positions among its layers."""
    layers = {k: layer for k, layer in enumerate(model.layers) if _needs_arrays(layer)}
    class_names = _class_names(model.layers)
    if len(container.names()) > len(model.layers):
        raise FormatError(f"{container.path} has more layers than the config: {len(container.names())}")
    problem: FormatError | None = None
    for names in _possible_groups(layers, class_names, container):
        try:
            for k, layer in layers.items():
                _check_fit(layer, container.group(names.get(k, "")))
        except FormatError as error:
            problem = error if problem is None or names == {k: class_names[k] for k in layers} else problem
        else:
            if len({*names.values()}) == len(layers):
                return names
    raise problem or FormatError(f"{container.path} has one group for several layers")


def _possible_groups(
    layers: Mapping[int, KerasLayer], class_names: Sequence[str], container: Group
) -> Iterator[dict[int, str]]:
    """Yield the groups that layers may have. Keras names them after classes; newer versions note layers' names, too."""
    by_name = {_name_in(container, member): member for member in container.names()}
    yield {k: by_name.get(layer.name, "") for k, layer in layers.items()}
    yield {k: class_names[k] for k in layers}
    yield {k: layer.name for k, layer in layers.items()}
    yield _groups_by_shape(layers, container)


def _name_in(container: Group, member: str) -> str:
    """Return the name of a layer that Keras 3 writes into its group; empty if there is none."""
    group = container.member(member)
    if not isinstance(group, Group) or "vars" not in group:
        return ""
    variables = group.group("vars")
    name = variables.text("name") if variables.has_attribute("name") else ""
    if len(name) > LONGEST_NAME:
        raise FormatError(f"{variables.path} is of a layer with a name of more than {LONGEST_NAME} letters")
    return name


def _groups_by_shape(layers: Mapping[int, KerasLayer], container: Group) -> dict[int, str]:
    """Return the groups that fit layers, in the order of the numbers in their names; none unless as many fit."""
    members = sorted(container.names(), key=lambda name: [int(part) for part in re.findall(r"\d{1,9}", name)])
    if len(layers) * len(members) > _MOST_PAIRS:
        return {}
    places: dict[int, str] = {}
    alike: dict[tuple[str, ...], list[int]] = {}
    for k, layer in layers.items():
        alike.setdefault(tuple(name for name in members if _fits(layer, container, name)), []).append(k)
    for names, numbers in alike.items():
        places |= dict(zip(numbers, names, strict=False)) if len(names) == len(numbers) else {}
    return places


def _fits(layer: KerasLayer, container: Group, name: str) -> bool:
    """Return whether a group has the arrays that a layer needs."""
    try:
        _check_fit(layer, container.group(name))
    except FormatError:
        return False
    return True


def _check_fit(layer: KerasLayer, group: Group) -> None:
    """Refuse a group that has not the arrays that the layer needs; of a nested model only that it has layers."""
    if layer.is_model:
        _container(group)
    elif layer.layers and _needs_arrays(layer):
        for inner, path in zip(layer.layers, _inner_paths(layer), strict=True):
            _check_fit(inner, group.group(path))
    elif not layer.layers:
        _check_shapes(layer, group.path, _variables_of(layer, group))


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
        layers = [*_layers_by_attributes(_container(root), "", options, [0])]
        ordered = _only_order(layers)
    else:
        layers = [layer for name in root.texts("layer_names") for layer in _layers_by_name(root, name, options)]
        ordered = layers
    if not layers:
        raise FormatError("it has neither a config nor arrays of layers")
    return KerasLayer("Model" if ordered is None else "Sequential", "", {}, (), tuple(ordered or layers), True)


def _layers_by_name(root: Group, name: str, options: Options) -> list[KerasLayer]:
    """Return the layers whose arrays are in the group of a layer or of a nested model."""
    group = root.group(name)
    parts: dict[str, list[tuple[str, StoredArray]]] = {}
    for full_name in group.texts("weight_names"):
        path, _, role = re.sub(r":\d+\Z", "", full_name).rpartition("/")
        if not path:  # Keras 1: lstm_1_W_i
            path, role = re.sub(_KERAS_1_ROLE, "", role), (re.search(_KERAS_1_ROLE, role) or [""])[0].strip("_")
        parts.setdefault(path, []).append((role, group.array(full_name)))
    layers: list[KerasLayer] = []
    waiting = ""
    for path, pairs in parts.items():
        roles, stored = [role for role, _ in pairs], [array for _, array in pairs]
        is_recurrent = any(role in ("recurrent_kernel", "U") or role.startswith("U_") for role in roles)
        kind = "Embedding" if roles == ["embeddings"] else "unknown"
        kind = "Dense" if not is_recurrent and roles[0] in ("kernel", "W") else kind
        inner = name if len(parts) == 1 or "ward" in path else f"{name}/{path.split('/')[0]}"
        layer = _layer_of(inner, group.path, stored, options, is_recurrent, kind)
        if waiting and "backward" in path:
            layers[-1] = _bidirectional(name, layers[-1], layer)
        else:
            layers.append(layer)
        waiting = path if "forward" in path else ""
    return layers


def _layers_by_attributes(container: Group, prefix: str, options: Options, count: list[int]) -> Iterator[KerasLayer]:
    """Yield the layers of a model and of those within it, in no order."""
    for member in container.names():
        count[0] += 1
        if count[0] > _MOST_LAYERS or prefix.count("/") > _MOST_NESTED:
            raise FormatError(f"{container.path} has too many layers, or layers within layers")
        group = container.group(member)
        name = prefix + (_name_in(container, member) or member)
        kind = re.sub(r"_\d+\Z", "", member)
        if any(inner in group for inner in VARIABLES):
            yield from _layers_by_attributes(_container(group), f"{name}/", options, count)
        elif "forward_layer" in group and "backward_layer" in group:
            yield _bidirectional(name, *(_recurrent(name, group.group(f"{side}_layer"), options)[0] for side in _SIDES))
        elif "cell" in group:
            yield from _recurrent(name, group, options)
        else:
            inside = group.group("layer") if "layer" in group else group
            if stored := _variables(inside):
                dense = "Dense" if kind in ("dense", "time_distributed") else kind
                yield _layer_of(name, group.path, stored, options, False, dense)


def _recurrent(name: str, group: Group, options: Options) -> list[KerasLayer]:
    """Return the cells of a recurrent layer, one on the other."""
    cell = group.group("cell")
    cells = [cell]
    if "cells" in cell:
        inside = cell.group("cells")
        cells = [inside.group(member) for member in inside.names()]
    names = [name] if len(cells) == 1 else [f"{name}/{k}" for k in range(len(cells))]
    pairs = zip(names, cells, strict=True)
    layers = [_layer_of(own, part.path, _variables(part), options, True) for own, part in pairs]
    return layers if len(layers) == 1 else _only_order(layers) or layers


def _layer_of(
    name: str, path: str, stored: Sequence[StoredArray], options: Options, is_recurrent: bool, kind: str = "unknown"
) -> KerasLayer:
    """Return the layer with these arrays: a cell by their shapes, a Dense by its name, or one that is not known."""
    shapes = [array.shape for array in stored]
    if is_recurrent and len(shapes) > 1 and len(shapes[1]) == 2 and shapes[1][0]:
        units, columns = shapes[1]
        gates = _KERAS_1_COUNTS.get(len(shapes)) if columns == units else columns // units
        kind = _KERAS_KINDS.get(gates or 1, kind)
        config = {"units": units, "use_bias": len(shapes) != 2, "go_backwards": False, "return_sequences": True}
        is_of_cudnn = shapes[2:] == [(2 * columns,)]
        layer = KerasLayer(kind, name, {**config, **options, **(CUDNN_CONFIG if is_of_cudnn else {})})
        if layer.is_cell:
            return layer._replace(arrays=_arrays_of(layer, path, stored))
    if kind == "Dense" and shapes[0][1:] == shapes[-1][-1:] and len(shapes) < 3:
        layer = KerasLayer("Dense", name, {"units": shapes[0][1], "use_bias": len(shapes) == 2, "activation": "linear"})
        return layer._replace(arrays=_arrays_of(layer, path, stored))
    return KerasLayer(kind, name, {}, module="unknown")


def _bidirectional(name: str, fw: KerasLayer, bw: KerasLayer) -> KerasLayer:
    module = "" if fw.is_cell and bw.is_cell else "unknown"
    return KerasLayer("Bidirectional", name, {"merge_mode": "concat"}, layers=() if module else (fw, bw), module=module)


def _only_order(layers: Sequence[KerasLayer]) -> list[KerasLayer] | None:
    """Return the layers one behind the other, if their sizes allow one order alone; else None."""
    sized = [layer for layer in layers if layer.arrays or layer.layers]
    embeddings = [layer for layer in layers if not (layer.arrays or layer.layers)]
    if any(layer.kind != "embedding" for layer in embeddings):
        return None
    followers: dict[int, list[int]] = {}
    for k, layer in enumerate(sized):
        followers.setdefault(_sizes(layer)[0], []).append(k)
    orders: list[list[int]] = []
    order: dict[int, None] = {}
    choices = [iter(range(len(sized)))]  # of the layer at each place of the order
    for _ in range(_MOST_CHOICES):
        if not choices or len(orders) > 1:
            break
        number = next(choices[-1], None)
        if number is None:
            choices.pop()
            if order:
                order.popitem()
        elif number not in order:
            order[number] = None
            orders += [[*order]] if len(order) == len(sized) else []
            choices.append(iter(followers.get(_sizes(sized[number])[1], ())))
    return [*embeddings, *(sized[k] for k in orders[0])] if len(orders) == 1 and not choices else None


def _sizes(layer: KerasLayer) -> tuple[int, int]:
    """Return the numbers of inputs and of outputs."""
    if layer.layers:
        return _sizes(layer.layers[0])[0], sum(_sizes(half)[1] for half in layer.layers)
    return len(layer.arrays[0]), layer.config["units"]
