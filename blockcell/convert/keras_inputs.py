"""Random inputs for a model or a layer of Keras in memory, as its own inputs, or the shapes it was built for, say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..layers import Layer
from ..optable import Array
from .comparison import NotCompared
from .keras_objects import is_model
from .models import Converted, Step


class ModelInput(NamedTuple):
    """An input of a model."""

    name: str
    """The name of its InputLayer; empty if the model tells none."""
    shape: tuple[int | None, ...]
    """None for an axis of any size."""
    dtype: str


def map_leaves(function: Any, structure: Any) -> Any:
    """Apply a function to the leaves of nested lists, tuples and dicts."""
    if isinstance(structure, Mapping):
        return {key: map_leaves(function, part) for key, part in structure.items()}
    if isinstance(structure, (list, tuple)) and not isinstance(structure, ModelInput):
        return [map_leaves(function, part) for part in structure]
    return function(structure)


def flatten(structure: Any) -> list[Any]:
    """Return the leaves of nested lists, tuples and dicts, except None."""
    leaves: list[Any] = []
    map_leaves(leaves.append, structure)
    return [leaf for leaf in leaves if leaf is not None]


# ---------------------------------------------------------------------------------------------------------- the inputs
def inputs_of(source: Any, steps: Mapping[str, Step], layers: Converted, fixes_steps: bool = False) -> Any:
    """Return the inputs of a model or a layer: a `ModelInput`, or a structure of these.

    A model of one's own has as many steps as are asked for or, with `fixes_steps`, as it was first called with.
    """
    try:
        if not is_model(source):
            return _input_of_layer(source, layers)
        if symbolic := getattr(source, "inputs", None):
            is_functional = len(symbolic) > 1 or isinstance(getattr(source, "input", None), Mapping)
            return map_leaves(_model_input, source.input if is_functional else symbolic[0])
        shape = _built_shape(source)
        if shape is None or len(shape) < 2:
            raise NotCompared("it does not tell the shape of its input; call it once")
        has_ids = len(shape) == 2 and any(step.source.kind == "Embedding" for step in steps.values())
        free = (None,) * (2 if (has_ids or len(shape) > 2) and not fixes_steps else 1)
        return ModelInput("", free + shape[len(free) :], "int32" if has_ids else str(source.compute_dtype))
    except (AttributeError, TypeError) as error:
        raise NotCompared("it does not tell its inputs as models of Keras do") from error


def _model_input(tensor: Any) -> ModelInput:
    """Describe a symbolic tensor of Keras."""
    dtype = tensor.dtype
    return ModelInput(tensor._keras_history[0].name, tuple(tensor.shape), getattr(dtype, "name", dtype))


def _input_of_layer(source: Any, layers: Converted) -> ModelInput:
    """Describe the input of one layer: of a stateful one, with the number of rows that its states have."""
    states = [*flatten(getattr(source, "states", None))] if getattr(source, "stateful", False) else []
    size = layers.input_size if isinstance(layers, Layer) else None
    return ModelInput("", (states[0].shape[0] if states else None, None, size), str(source.compute_dtype))


def _built_shape(source: Any) -> tuple[int | None, ...] | None:
    """Return the shape of the only input that a model of one's own was built for or first called with."""
    shapes = getattr(source, "_build_shapes_dict", None) or getattr(source, "_build_input_shape", None)
    if isinstance(shapes, Mapping):
        shapes = next(iter(shapes.values())) if len(shapes) == 1 else None
    try:
        shape = tuple(shapes)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    return shape if all(size is None or isinstance(size, int) for size in shape) else None


# --------------------------------------------------------------------------------------------------------------- draws
def draw_inputs(inputs: Any, steps: Mapping[str, Step], T: int, B: int, seed: int, scale: float) -> Any:
    """Draw arrays for inputs: normal numbers, and ids for an Embedding.

    Where the model makes a mask of an input, the steps behind a row's length are masked, and one row has all steps.
    """
    g = np.random.default_rng([seed, T, B])
    shares = g.random(B)
    shares[int(g.integers(B))] = 1.0

    def draw(model_input: ModelInput) -> Array:
        """Draw one input."""
        name, shape, dtype = model_input
        sizes = [(T if axis else B) if size is None else size for axis, size in enumerate(shape)]
        readers = [step.source for key, step in steps.items() if _reads(steps, key, name)]
        steps_of_rows = sizes[1] if len(sizes) > 1 else 1
        is_step = np.arange(steps_of_rows) < np.ceil(shares * steps_of_rows)[:, None]
        ids = [reader.config for reader in readers if reader.kind == "Embedding"]
        if dtype == "bool":
            return np.broadcast_to(is_step, sizes) if len(sizes) == 2 else g.random(sizes) < 0.5
        array: Array
        if ids or dtype.startswith(("int", "uint")):
            array = g.integers(0, min((config["input_dim"] for config in ids), default=4), sizes)
            if any(config.get("mask_zero") for config in ids):
                array = np.where(is_step, np.maximum(array, 1), 0)
        elif dtype.startswith(("float", "bfloat")):
            array = g.standard_normal(sizes) * scale
            for reader in readers:
                if reader.kind == "Masking":
                    array[~is_step] = reader.config.get("mask_value", 0.0)
        else:
            raise NotCompared(f"its input {name} is of dtype {dtype}")
        result: Array = array.astype("float32" if dtype == "bfloat16" else dtype)
        return result

    return map_leaves(draw, inputs)


def _reads(steps: Mapping[str, Step], key: str, name: str) -> bool:
    """Return whether a step that makes ids or a mask reads an input, itself or behind steps without effect."""
    if steps[key].source.kind not in ("Embedding", "Masking"):
        return False
    sources = steps[key].inputs
    while sources and sources[0] is not None and steps[sources[0]].is_identity:
        key = sources[0]
        sources = steps[key].inputs
    return sources is None or key == name or (not sources and steps[key].source.kind != "InputLayer")
