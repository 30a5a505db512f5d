"""Whole models: which of their layers stand one behind the other, what they start from, and what is left out."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ..argument_reader import ArgumentReader
from ..layers import Bidirectional, Dense, Layer, Stack
from ..layers.cell import Cell

_RECURRENT = "LSTM)", "GRU)", "RNN)"  # what names end with that say a kind


class Step(NamedTuple):
    """A layer or a node of a model, as far as it matters here."""

    what: str
    """Its name and kind, for messages."""
    inputs: tuple[str | None, ...] | None
    """The keys of the steps whose main result it reads, None for anything else; or None if they are not known."""
    layer: Layer | None = None
    """What it becomes."""
    first: Any = None
    """The state that this starts from, None for zeros, as `state_of` takes it."""
    last: bool | str = False
    """Of a recurrent layer that returns its last output only: `last` of a `Dense` behind it."""
    activation: str | None = None
    """Which, if it is nothing but an activation that a `Dense` may have."""
    nothing: bool = False
    """Whether its result is its input, as that of dropout in inference."""
    hint: str = ""
    """What is left out of it even if it is carried over, or what to do instead."""


def assemble(
    caller: str, steps: Mapping[str, Step], outputs: Iterable[str | None] | None, stacklevel: int, hint: str = ""
) -> tuple[Layer | dict[str, Layer], Any]:
    """The recurrent layers of a model: the only one, a stack of a chain of them, or each by its key; and their states.

    Dense layers of the chain belong to the stack. What the `outputs` need and is not carried over is said in a warning.
    The `hint` says what to do if there is no recurrent layer.
    """
    recurrent = [key for key, step in steps.items() if step.layer is not None and not isinstance(step.layer, Dense)]
    if not recurrent:
        others = listed([step.what for step in steps.values()]) or "an empty one"
        raise ValueError(f"{caller}: expected a model with an LSTM, a GRU or an RNN, found {others}{hint}")
    live = _needed(steps, outputs if outputs is None else [*outputs, *recurrent])
    sources = {key: [_origin(steps, each) for each in steps[key].inputs or ()] for key in live}
    readers: dict[str | None, list[str | None]] = {key: [] for key in live}
    for key in live:
        if not steps[key].nothing:
            for source in sources[key]:
                readers.setdefault(source, []).append(key)
    for output in outputs or ():
        readers.setdefault(_origin(steps, output), []).append(None)
    behind = {
        source: key
        for key in live
        if not steps[key].nothing and len(sources[key]) == 1
        if (source := sources[key][0]) is not None and readers[source] == [key]
    }
    layers, firsts, carried = _chain(steps, behind, recurrent[0])
    found: Layer | dict[str, Layer]
    if all(key in carried for key in recurrent):
        found, first = (layers[0], firsts[0]) if len(layers) == 1 else (Stack(layers), firsts)
    else:
        carried = recurrent
        found = {key: layer for key in recurrent if (layer := steps[key].layer) is not None}
        first = {key: steps[key].first for key in found}
    left = [
        step.what + (f": {step.hint}" if step.hint else "")
        for key, step in steps.items()
        if key in live and (step.hint or not (step.nothing or key in carried))
    ]
    if left:
        warnings.warn(f"{caller}: left out: {listed(left)}", stacklevel=stacklevel)
    return found, first


def state_of(caller: str, found: Layer | dict[str, Layer], first: Any) -> Any:
    """What calls of the layer, or of each of them, take as their state; None if that is zeros.

    `first` is None for zeros, a mapping of arrays [B,.] of a cell, or a sequence of these for the parts of a layer. An
    array of one row is meant for all rows, and so is then the state.
    """
    if isinstance(found, dict):
        return {key: state_of(caller, layer, first[key]) for key, layer in found.items()}
    counts = [len(array) for array in _arrays(first)]
    if not counts:
        return None
    return found._read_state(ArgumentReader(caller), "state", _parts(found, first), max(counts))


def _arrays(first: Any) -> list[Any]:
    if isinstance(first, Mapping):
        return [*first.values()]
    return [array for part in first or () for array in _arrays(part)]


def _parts(layer: Layer, first: Any) -> Any:
    """The same with a place for everything that the layer has."""
    if first is None:
        return None
    if isinstance(layer, (Bidirectional, Stack)):
        parts = layer.layers if isinstance(layer, Stack) else (layer.fw, layer.bw)
        return tuple(map(_parts, parts, first))
    return {name: first.get(name) for name in layer._state._fields} if isinstance(layer, Cell) else None


def listed(names: list[str]) -> str:
    """The first of them in words, those of recurrent layers before all others."""
    names = sorted(names, key=lambda name: not name.endswith(_RECURRENT))
    return ", ".join(names[:12] + ([f"and {len(names) - 12} more"] if len(names) > 12 else []))


def _needed(steps: Mapping[str, Step], outputs: Iterable[str | None] | None) -> list[str]:
    """The steps that the outputs need, in the order in which they are given."""
    waiting = [*steps] if outputs is None else [key for key in outputs if key is not None]
    seen: set[str] = set()
    while waiting:
        key = waiting.pop()
        if key not in seen:
            seen.add(key)
            waiting += [each for each in steps[key].inputs or () if each is not None]
    return [key for key in steps if key in seen]


def _origin(steps: Mapping[str, Step], key: str | None) -> str | None:
    """The step that a result really comes from."""
    while key is not None and steps[key].nothing:
        key = (*(steps[key].inputs or ()), None)[0]
    return key


def _chain(steps: Mapping[str, Step], behind: Mapping[str, str], key: str) -> tuple[list[Layer], list[Any], list[str]]:
    """The layers that stand in one line with this one, what they start from, and the keys of what they were made of."""
    before = {after: key for key, after in behind.items()}
    line = [key]
    while (each := before.get(line[0])) is not None:
        line.insert(0, each)
    while (each := behind.get(line[-1])) is not None:
        line.append(each)
    layers: list[Layer] = []
    firsts: list[Any] = []
    carried: list[str] = []
    last: bool | str = False  # whether what comes now gets the last output only
    for each in line:
        step = steps[each]
        top = layers[-1] if layers and isinstance(layers[-1], Dense) else None
        if isinstance(step.layer, Dense) and not (top and top.last):
            layers.append(_changed(step.layer, last="ends") if last == "ends" else step.layer)
            firsts.append(None)
        elif step.layer is not None and not (last or (top and top.last)):
            parts = step.layer.layers if isinstance(step.layer, Stack) else (step.layer,)
            layers += parts
            firsts += [step.first] if len(parts) == 1 else step.first or [None] * len(parts)
            last = step.last
        elif step.activation and top and top.activation is None:
            layers[-1] = _changed(top, activation=step.activation)
        elif key in carried:
            break
        else:  # what stands before it does not lead up to the layer
            layers, firsts, carried, last = [], [], [], False
            continue
        carried.append(each)
    if last is True and isinstance(layers[-1], Dense):  # in a Stack, the top alone may have it
        layers[-1] = _changed(layers[-1], last=True)
    return layers, firsts, carried


def _changed(dense: Dense, **options: Any) -> Dense:
    arguments: dict[str, Any] = {"activation": dense.activation, "last": dense.last} | options
    return Dense(dense.weights["w"], dense.weights["b"], **arguments)
