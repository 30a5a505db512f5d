"""Files of Keras in all forms, written with h5py alone, and random layers to put into them.

A model is the JSON that Keras writes, and arrays are lists by the names of its layers: what get_weights() returns.
"""

from __future__ import annotations

import io
import json
import re
import zipfile

import numpy as np

ROLES = "kernel", "recurrent_kernel", "bias"
COLUMNS = {"LSTM": 4, "GRU": 3, "SimpleRNN": 1}


def entry(kind, name, **config):
    """A layer in the JSON of Keras 2."""
    return {"class_name": kind, "config": {"name": name} | config}


def sequential(*entries, **outside):
    return {"class_name": "Sequential", "config": {"name": "sequential", "layers": [*entries]}} | outside


def functional(*entries, nodes, results):
    """A functional model of Keras 2: `nodes` has for each layer the names of the layers that it reads."""
    layers = [
        part
        | {"name": part["config"]["name"], "inbound_nodes": [[[name, 0, 0, {}] for name in names]] if names else []}
        for part, names in zip(entries, nodes, strict=True)
    ]
    ends = {"input_layers": [[layers[0]["name"], 0, 0]], "output_layers": [[name, 0, 0] for name in results]}
    return {"class_name": "Functional", "config": {"name": "model", "layers": layers} | ends}


def drawn(g, kind, inputs, units, *, use_bias=True, reset_after=False, dtype=np.float32):
    """The arrays of a layer, as get_weights() returns them."""
    columns = COLUMNS.get(kind, 1) * units
    shapes = [(inputs, columns), (units, columns), (2, columns) if reset_after else (columns,)]
    shapes = shapes[::2] if kind == "Dense" else shapes
    return [g.uniform(-1, 1, shape).astype(dtype) for shape in (shapes if use_bias else shapes[:-1])]


def inner_of(part):
    """The layers in a layer of a model, which may be a model."""
    config = part["config"]
    return config if isinstance(config, list) else config.get("layers", [])


def name_of(part):
    return part.get("name") or part["config"]["name"]


# --------------------------------------------------------------------------------------- a group for each layer's name
def named_arrays(part, arrays):
    """The names and arrays of a layer as Keras 2 writes them, or of a model all one after the other."""
    name, kind = name_of(part), part["class_name"]
    if inner_of(part):
        return [pair for inner in inner_of(part) for pair in named_arrays(inner, arrays)]
    own = arrays.get(name, [])
    if kind == "Bidirectional":
        half = len(own) // 2
        halves = [("forward", own[:half]), ("backward", own[half:])]
        return [(f"{name}/{side}_x/{role}:0", a) for side, part in halves for role, a in zip(ROLES, part, strict=False)]
    if kind in ("Dense", "TimeDistributed"):
        roles = ROLES if len(own) == 3 else ROLES[::2]
        return [(f"{name}/{role}:0", array) for role, array in zip(roles, own, strict=False)]
    if kind == "RNN":
        return [(f"{name}/cell_{k // 3}/{ROLES[k % 3]}:0", array) for k, array in enumerate(own)]
    known = kind.removeprefix("CuDNN") in COLUMNS
    roles = ROLES if known else ["embeddings"] if kind == "Embedding" else [f"weight_{k}" for k in range(len(own))]
    return [(f"{name}/cell/{role}:0", array) for role, array in zip(roles, own, strict=False)]


def write_groups(group, model, arrays, version):
    """What model.save_weights writes to a .h5."""
    group.attrs["layer_names"] = np.array([name_of(part).encode() for part in inner_of(model)])
    if version:
        group.attrs["keras_version"] = version
    for part in inner_of(model):
        pairs = named_arrays(part, arrays)
        inner = group.create_group(name_of(part))
        inner.attrs["weight_names"] = np.array([name.encode() for name, _ in pairs])
        for name, array in pairs:
            inner[name] = array


def write_h5(path, model, arrays, version="2.15.0"):
    """What model.save writes to a .h5."""
    import h5py

    with h5py.File(path, "w") as file:
        if version:
            file.attrs["keras_version"] = version
        file.attrs["model_config"] = json.dumps(model)
        write_groups(file.create_group("model_weights"), model, arrays, version)
    return path


def write_h5_weights(path, model, arrays, version="2.15.0"):
    """What model.save_weights writes to a .h5."""
    import h5py

    with h5py.File(path, "w") as file:
        write_groups(file, model, arrays, version)
    return path


# ------------------------------------------------------------------------------------------ a group for each attribute
def snake_case(name):
    """simple_rnn of SimpleRNN, lstm_cell of LSTMCell."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def class_names(parts):
    """The names of the layers' groups: their classes', numbered from the second of a class on."""
    counts, names = {}, []
    for part in parts:
        kind = snake_case(part["class_name"])
        counts[kind] = counts.get(kind, -1) + 1
        names.append(f"{kind}_{counts[kind]}" if counts[kind] else kind)
    return names


def write_variables(group, model, arrays, names=True, container="layers"):
    """What Keras 3 writes for a model, with the layers' names or without."""
    inside = group.create_group(container)
    for part, name in zip(inner_of(model), class_names(inner_of(model)), strict=True):
        write_layer(inside.create_group(name), part, arrays, names, container)
    return group


def write_layer(group, part, arrays, names, container):
    """What Keras 3 writes for a layer."""
    kind, own = part["class_name"], arrays.get(name_of(part), [])
    variables = group.create_group("vars")
    if names:
        variables.attrs["name"] = name_of(part)
    if inner_of(part):
        write_variables(group, part, arrays, names, container)
    elif kind == "Bidirectional":
        half = len(own) // 2
        write_cell(group.create_group("forward_layer/cell"), own[:half])
        write_cell(group.create_group("backward_layer/cell"), own[half:])
    elif kind == "RNN" and part["config"]["cell"]["class_name"] == "StackedRNNCells":
        for k, name in enumerate(class_names(part["config"]["cell"]["config"]["cells"])):
            write_cell(group.create_group(f"cell/cells/{name}"), own[3 * k : 3 * k + 3])
    elif kind in (*COLUMNS, "RNN", "TimeDistributed"):
        write_cell(group.create_group("layer" if kind == "TimeDistributed" else "cell"), own)
    else:
        for k, array in enumerate(own):
            variables[str(k)] = array


def write_cell(group, arrays):
    for k, array in enumerate(arrays):
        group[f"vars/{k}"] = array


def write_weights(path, model, arrays, **options):
    """What model.save_weights writes to a .weights.h5."""
    import h5py

    with h5py.File(path, "w") as file:
        write_variables(file, model, arrays, **options)
    return path


def write_keras(path, model, arrays, version="3.9.0", compression=zipfile.ZIP_STORED, **options):
    """What model.save writes to a .keras."""
    content = io.BytesIO()
    write_weights(content, model, arrays, **options)
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("metadata.json", json.dumps({"keras_version": version, "date_saved": "2024-01-01@00:00:00"}))
        archive.writestr("config.json", json.dumps(model))
        archive.writestr("model.weights.h5", content.getvalue())
    return path
