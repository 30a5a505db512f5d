"""Whole models: which of their layers are one behind the other, their initial states, and what is dropped."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from typing import Any, NamedTuple

from ..layers import Dense, Layer, Stack
from ..layers.structure import read_state, state_sizes

_RECURRENT = "LSTM)", "GRU)", "RNN)"  # what the labels of recurrent layers end with

Converted = Layer | dict[str, Layer]
"""What a model becomes: a layer, or several by their keys."""


class Step(NamedTuple):
    """A layer or a node of a model, as far as its conversion depends on it."""

    label: str
    """Its name and kind, for messages."""
    inputs: tuple[str | None, ...] | None
    """The keys of the steps whose main result it reads, None for anything else; or None if they are not known."""
    layer: Layer | None = None
    """What it becomes."""
    initial_state: Any = None
    """The state that it starts from, None for zeros, as `read_initial_state` takes it."""
    dense_last: str | None = None
    """`last` of a `Dense` behind a recurrent layer that returns the last output alone, "last" for True, or "ends"."""
    activation: str | None = None
    """Its name, if the step is nothing but an activation that a `Dense` may have."""
    is_identity: bool = False
    """Whether its result is its input, as that of dropout in inference."""
    hint: str = ""
    """What is dropped of it even if it is converted, or what to do instead."""
    source: Any = None
    """The description that it was made of, for the run of a model."""


class Assembly(NamedTuple):
    """What the steps of a model become."""

    layers: Converted
    initial_states: Any
    """Of a dict of layers, too, by its keys; None for zeros."""
    keys: tuple[str, ...]
    """The keys of the steps that the layers were made of."""
    left_out: list[str]
    """The labels of needed steps that are not converted, or not all of what they do."""
    needed_keys: tuple[str, ...] = ()
    """The keys of the steps that the layers and the model's outputs need."""


def assemble(caller: str, steps: Mapping[str, Step], outputs: Iterable[str | None] | None, hint: str = "") -> Assembly:
    """Put the recurrent layers of a model together.

    The result is the only layer, a `Stack` if they are one chain, to which the dense layers of the chain belong, or a
    dict of them by their keys. The `hint` says what to do if there is no recurrent layer.
    """
    recurrent = {
        key: step.layer for key, step in steps.items() if step.layer is not None and not isinstance(step.layer, Dense)
    }
    if not recurrent:
        labels = join_labels([step.label for step in steps.values()]) or "an empty one"
        raise ValueError(f"{caller}: expected a model with an LSTM, a GRU or an RNN, found {labels}{hint}")
    results = [] if outputs is None else [*outputs]
    needed_keys = _needed_keys(steps, [*steps] if outputs is None else [*results, *recurrent])
    anchor = next(iter(recurrent))
    longest = _chain_with(steps, anchor, needed_keys, results)
    keys: tuple[str, ...] = (*recurrent,)
    result: tuple[Converted, Any] = recurrent, {key: steps[key].initial_state for key in recurrent}
    if recurrent.keys() <= {*longest.keys}:
        keys, result = longest.keys, longest.layer_and_state()
    return Assembly(*result, keys, labels_left_out(steps, needed_keys, keys), needed_keys)


def labels_left_out(steps: Mapping[str, Step], needed_keys: Iterable[str], keys: Collection[str]) -> list[str]:
    """Return the labels of needed steps that are not converted, or not all of what they do."""
    return [
        steps[key].label + (f": {steps[key].hint}" if steps[key].hint else "")
        for key in needed_keys
        if steps[key].hint or not (steps[key].is_identity or key in keys)
    ]


def warn_once(caller: str, left_out: Iterable[str], remarks: Iterable[str], stacklevel: int) -> None:
    """Warn of labels that are left out, and of what else there is to say about a conversion, in one warning."""
    labels = join_labels(left_out)
    texts = [*([f"left out: {labels}"] if labels else []), *remarks]
    if texts:
        warnings.warn(f"{caller}: {'; '.join(texts)}", stacklevel=stacklevel + 1)


def join_labels(labels: Iterable[str]) -> str:
    """Join the first twelve labels, those of recurrent layers before all others."""
    ordered = sorted(labels, key=lambda label: not label.endswith(_RECURRENT))
    return ", ".join(ordered[:12] + ([f"and {len(ordered) - 12} more"] if len(ordered) > 12 else []))


# -------------------------------------------------------------------------------------------------------------- states
def read_initial_state(caller: str, layers: Converted, initial_state: Any) -> Any:
    """Read the state of a layer, or of each of them, as calls take it; None if it is zeros.

    `initial_state` is None for zeros, a mapping of arrays [B,.] of a cell, or a sequence of these for the parts of a
    layer. An array of one row is meant for all rows, and so is then the state.
    """
    if isinstance(layers, dict):
        return {key: read_initial_state(caller, layer, initial_state[key]) for key, layer in layers.items()}
    cells = flatten_state(layers, initial_state)
    row_counts = [len(array) for cell in cells for array in cell.values()]
    if not row_counts:
        return None
    all_sizes = filter(None, map(state_sizes, layers._leaves().values()))
    complete = ({name: cell.get(name) for name in sizes} for cell, sizes in zip(cells, all_sizes, strict=True))
    return read_state(layers, caller, nest_states(layers, complete), max(row_counts))


def _parts_of(layer: Layer) -> Sequence[Layer]:
    """Return the layers that a `Stack` or a `Bidirectional` consists of; none for others."""
    return [*getattr(layer, "_layers", {}).values()]


def nest_states(layer: Layer, states: Iterator[Any]) -> Any:
    """Return the states of single cells, in the order of layers and of directions, in the form of a layer's parts."""
    if parts := _parts_of(layer):
        return [nest_states(part, states) for part in parts]
    return None if isinstance(layer, Dense) else next(states)


def flatten_state(layer: Layer, state: Any) -> list[dict[str, Any]]:
    """Return the arrays of single cells in an initial state, in the order in which `nest_states` takes them."""
    if parts := _parts_of(layer):
        pairs = zip(parts, state or repeat(None), strict=False)
        return [cell for part, part_state in pairs for cell in flatten_state(part, part_state)]
    return [] if isinstance(layer, Dense) else [dict(state or {})]


def cell_states(state: Any) -> list[Any]:
    """Return the states of single cells in the last state of a call, in the order in which `nest_states` takes them."""
    if state is None:
        return []
    return [state] if hasattr(state, "h") else [cell for part in state for cell in cell_states(part)]


# -------------------------------------------------------------------------------------------------------------- graphs
def _needed_keys(steps: Mapping[str, Step], outputs: Iterable[str | None]) -> tuple[str, ...]:
    """Return the keys of the steps that the outputs need, in the order of `steps`."""
    waiting = [key for key in outputs if key is not None]
    seen: set[str] = set()
    while waiting:
        key = waiting.pop()
        if key not in seen:
            seen.add(key)
            waiting += [source for source in steps[key].inputs or () if source is not None]
    return tuple(key for key in steps if key in seen)


# -------------------------------------------------------------------------------------------------------------- chains
class _Chain(NamedTuple):
    """Layers that a `Stack` can have one behind the other, and the steps that they are made of."""

    keys: tuple[str, ...] = ()
    layers: tuple[Layer, ...] = ()
    initial_states: tuple[Any, ...] = ()
    """One for each layer; None for zeros."""
    dense_last: str | None = None
    """`Step.dense_last` of the topmost recurrent layer: unless it is None, nothing but dense layers may follow."""

    def extend(self, key: str, step: Step) -> _Chain | None:
        """Return the chain with a step behind it, None if a `Stack` cannot have it there."""
        longer, layer = self._replace(keys=(*self.keys, key)), step.layer
        top = self.layers[-1] if self.layers and isinstance(self.layers[-1], Dense) else None
        if top is not None and step.activation and top.activation is None and layer is None:
            return longer._replace(layers=(*self.layers[:-1], _copy_dense(top, activation=step.activation)))
        if layer is None or (top is not None and top.last):
            return None
        if isinstance(layer, Dense):
            dense = _copy_dense(layer, last="ends") if self.dense_last == "ends" else layer
            return longer._replace(layers=(*self.layers, dense), initial_states=(*self.initial_states, None))
        if self.dense_last is not None:
            return None
        layers: tuple[Layer, ...] = layer.layers if isinstance(layer, Stack) else (layer,)
        states = (step.initial_state,) if len(layers) == 1 else step.initial_state or (None,) * len(layers)
        return longer._replace(
            layers=(*self.layers, *layers),
            initial_states=(*self.initial_states, *states),
            dense_last=step.dense_last,
        )

    def layer_and_state(self) -> tuple[Layer, Any]:
        """Return the only layer or a `Stack` of all, and the initial state."""
        *lower, top = self.layers
        if self.dense_last == "last" and isinstance(top, Dense):  # the top alone may have last=True in a Stack
            top = _copy_dense(top, last=True)
        return (Stack([*lower, top]), self.initial_states) if lower else (top, self.initial_states[0])


def _chain_with(
    steps: Mapping[str, Step], anchor: str, needed_keys: Iterable[str], outputs: Iterable[str | None]
) -> _Chain:
    """Return the longest chain with the anchor, of steps that read nothing but the one before, as its only readers."""
    origins: dict[str | None, str | None] = {}  # the steps that compute results: identities pass them on
    for key, step in steps.items():  # each is behind those that it reads
        origins[key] = origins.get((*(step.inputs or ()), None)[0]) if step.is_identity else key
    keys = [key for key in needed_keys if not steps[key].is_identity]
    sources = {key: [origins.get(source) for source in steps[key].inputs or ()] for key in keys}
    counts = Counter(chain.from_iterable([*sources.values(), map(origins.get, outputs)]))
    chains: dict[str | None, _Chain] = {}  # by their last steps
    for key, keys_read in sources.items():
        source = keys_read[0] if len(keys_read) == 1 == counts[keys_read[0]] else None
        longer = chains[source].extend(key, steps[key]) if source in chains else None
        if longer is not None:
            del chains[source]
        if longer := longer or _Chain().extend(key, steps[key]):
            chains[key] = longer
    return next(part for part in chains.values() if anchor in part.keys)


def _copy_dense(dense: Dense, **options: Any) -> Dense:
    arguments: dict[str, Any] = {"activation": dense.activation, "last": dense.last} | options
    return Dense(dense.weights["w"], dense.weights["b"], **arguments)
