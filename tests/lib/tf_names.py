"""Checkpoints and SavedModels with the nodes that restore their variables."""

from __future__ import annotations

import numpy as np
from tf_cells import H, I, block, drawn, function, inputs, library, number
from tf_files import constant, field, graph, node, save_variables, shape, tensor, tracked, write_objects

from blockcell.tensorflow import open as opened

VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"
W, BIAS = drawn("w", "b").values()


def texts(name, *values):
    return constant(name, tensor("string", (len(values),), b"".join(field(8, value) for value in values)))


def restoring(scope, restored):
    """Return the nodes of a Saver: what it assigns to each variable, as a name and a slice."""
    parts = [texts(f"{scope}/names", *(name for name, _ in restored.values()))]
    parts += [texts(f"{scope}/slices", *(where for _, where in restored.values()))]
    parts += [node(f"{scope}/RestoreV2", "RestoreV2", ["file", f"{scope}/names", f"{scope}/slices"])]
    for k, variable in enumerate(restored):
        parts += [node(f"{scope}/Identity_{k}", "Identity", [f"{scope}/RestoreV2:{k}"])]
        parts += [node(f"{scope}/Assign_{k}", "AssignVariableOp", [variable, f"{scope}/Identity_{k}"])]
    return [*parts, node(f"{scope}/restore_all", "NoOp")]


def variable(name, *sizes):
    return node(name, "VarHandleOp", shape=field(7, shape(*sizes)), dtype=field(6, 1), shared_name=field(2, name))


def write_all(tmp_path, values, *parts, saver="save/restore_all"):
    """Write a checkpoint beside a graph of one cell, and find the cell."""
    save_variables(tmp_path / "m", values)
    (tmp_path / "m.meta").write_bytes(field(2, graph(*inputs(), *parts)) + field(3, field(3, saver)))
    (cell,) = opened(tmp_path / "m").cells.values()
    return cell


def one_cell(*sizes):
    """Return the nodes of a cell of two variables, the first of them in parts."""
    parts = [variable("s/kernel", I + H, 4 * H)] if not sizes else []
    parts += [variable(f"s/kernel/part_{k}", size, 4 * H) for k, size in enumerate(sizes)]
    parts += [
        number("axis", 0),
        node("whole", "ConcatV2", [f"s/kernel/part_{k}" for k in range(len(sizes))] + ["axis"]),
    ]
    kernel = "whole" if sizes else "s/kernel"
    return [*parts, variable("s/bias", 4 * H), block("BlockLSTM", "s/cell", {"w": kernel, "b": "s/bias"})]


GIVEN = {"s/kernel": ("k", ""), "s/bias": ("b", "")}


def write_saved(folder, *, called, numbers=(2, 3), names=("w", "b"), constants=()):
    """Write a SavedModel with a function that captured its variables and that the graph may call; find its cell."""
    keys = [f"{name}{VALUE}" for name in "wb"]
    checkpoint = [tracked({"w": 1, "b": 2}), *(tracked({}, (f"s/{n}", key)) for n, key in zip("wb", keys, strict=True))]
    (folder / "variables").mkdir(parents=True)
    write_objects(folder / "variables" / "variables", dict(zip(keys, (W, BIAS), strict=True)), graph(*checkpoint))
    saved = [tracked({"f": 1, names[0]: 2, names[1]: 3}), tracked({})]
    saved += [
        tracked({}, kind=field(9, field(1, operation)) if operation else field(7, b""))
        for operation in (*constants, "", "")[:2]
    ]
    bound = b"".join(field(2, number) for number in numbers)
    captured = field(7, b"".join(field(1, message) for message in saved) + field(2, field(1, "f") + field(2, bound)))
    arguments = ["x", "zeros", "steps", "kernel", "bias"]
    body = function("f", arguments, arguments[:1], block("BlockLSTM", "cell", {"w": "kernel", "b": "bias"}))
    assigned = zip(("one", "two"), range(2), strict=True)
    restore = function(
        "restore", ["file", "one", "two"], [], texts("names", *keys), texts("slices", "", ""),
        node("RestoreV2", "RestoreV2", ["file", "names:output:0", "slices:output:0"]),
        *(node(f"assign{k}", "AssignVariableOp", [argument, f"RestoreV2:tensors:{k}"]) for argument, k in assigned)
    )  # fmt: skip
    parts = [variable("v", I + H, 4 * H), variable("u", 4 * H), *inputs(), node("file", "Placeholder")]
    parts += [constant("c", tensor("float32", W.shape, field(4, (W * 2).tobytes())))]
    parts += [node("load", "StatefulPartitionedCall", ["file", "v", "u"], f=field(10, field(1, "restore")))]
    if called:
        input_names = ["x", "zeros", "steps", "v", "u"]
        parts += [node("call", "StatefulPartitionedCall", input_names, f=field(10, field(1, "f")))]
    meta = field(2, graph(*parts) + library(body, restore)) + field(3, field(3, "load")) + captured
    (folder / "saved_model.pb").write_bytes(field(2, meta))
    (cell,) = opened(folder).cells.values()
    return cell


def cell_of_keras(kernel, recurrent, bias=(), dtype=np.float32, cells=H, inputs=I):
    """Return the variables of a cell of Keras and of an optimizer, by their keys, and the objects."""
    g = np.random.default_rng(3)
    sizes = {"kernel": (inputs, kernel * cells), "recurrent_kernel": (cells, recurrent * cells), "bias": bias}
    values = {name: (g.standard_normal(size) / (2 * cells**0.5)).astype(dtype) for name, size in sizes.items() if size}
    keys = {f"m/cell/{name}{VALUE}": value for name, value in values.items()}
    slots = {f"{key.removesuffix(VALUE)}/.OPTIMIZER_SLOT/o/m{VALUE}": value for key, value in keys.items()}
    edges = {name: k + 3 for k, name in enumerate(values)}
    objects = [tracked({"m": 1}), tracked({"cell": 2}), tracked(edges)]
    objects += [tracked({}, (f"gru/gru_cell/{name}", key)) for name, key in zip(values, keys, strict=True)]
    objects += [tracked({}, (f"m/gru/gru_cell/{name}", key)) for name, key in zip(values, slots, strict=True)]
    return keys | slots, graph(*objects)
