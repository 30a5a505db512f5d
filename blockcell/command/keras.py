"""`blockcell inspect` and `extract` for Keras' files."""

from __future__ import annotations

import argparse
import warnings
from itertools import pairwise
from typing import Any

from ..convert import from_keras
from ..layers import Layer, Stack
from .terminal import print_json, print_table, say

OPTIONS = ("weights", "activation", "recurrent_activation", "reset_after")
"""Of both commands, as `from_keras` has them."""


def inspect_layers(options: argparse.Namespace) -> int:
    """Show the layers that a file of Keras becomes, and what is left out."""
    layer, messages = _read(options)
    layers = _parts(layer)
    if options.json:
        described = [_described(name, part) for name, part in layers.items()]
        is_one = not isinstance(layer, dict)
        print_json({"path": options.path, "layers": described, "one_layer": is_one, "warnings": messages, "ok": True})
        return 0
    rows = [[name, type(part).__name__, part.input_size, part.output_size, part.dtype] for name, part in layers.items()]
    title = f"{len(rows)} layer{'s' * (len(rows) > 1)} in {options.path}"
    print_table(title, ["layer", "kind", "inputs:", "outputs:", "dtype"], rows, fold=0)
    for name, part in layers.items():
        say(f"{name}: {part!r}")
    for message in messages:
        say(message)
    if len(rows) > 1:
        say("They are not one layer." if isinstance(layer, dict) else "Together they are one layer.")
    return 0


def read_chosen(options: argparse.Namespace) -> tuple[Layer, list[str]]:
    """Read the layer that `blockcell extract` writes, and the lines about it."""
    layer, messages = _read(options)
    messages.append(
        "Not compared with the model, as files are never run: convert.from_keras compares models in memory."
    )
    layers = _parts(layer)
    if options.cell is None:
        if isinstance(layer, dict):
            names = ", ".join(layers)
            raise ValueError(
                f"{options.path} has {len(layers)} layers that are not one; say which with --cell: {names}"
            )
        return layer, messages
    if unknown := [name for name in options.cell if name not in layers]:
        raise ValueError(f"{options.path} has no layer {unknown[0]}; there are: {', '.join(layers)}")
    chosen = [layers[name] for name in options.cell]
    for (below, lower), (above, upper) in pairwise(zip(options.cell, chosen, strict=True)):
        if lower.output_size != upper.input_size:
            gives = f"{below} gives {lower.output_size} numbers a step"
            raise ValueError(f"{gives}, and {above}, which is named behind it, takes {upper.input_size}")
    return chosen[0] if len(chosen) == 1 else Stack(chosen), messages


def _read(options: argparse.Namespace) -> tuple[Layer | dict[str, Layer], list[str]]:
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        layer = from_keras(options.path, check=False, **{name: getattr(options, name) for name in OPTIONS})
    return layer, [str(warning.message).removeprefix("from_keras: ") for warning in record]


def _parts(layer: Layer | dict[str, Layer]) -> dict[str, Layer]:
    """Return the layers by their names; those of a Stack have their places, as in the names of its weights."""
    if isinstance(layer, dict):
        return layer
    return {str(k): part for k, part in enumerate(layer.layers if isinstance(layer, Stack) else [layer])}


def _described(name: str, layer: Layer) -> dict[str, Any]:
    return {
        "layer": name,
        "kind": type(layer).__name__,
        "input_size": layer.input_size,
        "output_size": layer.output_size,
        "dtype": str(layer.dtype),
        "repr": repr(layer),
    }
