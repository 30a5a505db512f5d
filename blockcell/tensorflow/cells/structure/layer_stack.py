"""All cells of a model, by names, and the layer that they are together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ....activations import Activation
from ....errors import plain
from ....layers import GRU, LSTM, RNN, Bidirectional, Stack
from ..cell.found_cell import Found

_SHOWN = 60


class Cells(Mapping[str, Found]):
    """The cells that were found, by names."""

    def __init__(self, found: Mapping[str, Found]) -> None:
        self._found = found

    def __getitem__(self, name: str) -> Found:
        if name not in self._found:
            raise KeyError(f"{name}; there are {', '.join(self._found) or 'none'}")
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def layer(
        self,
        *,
        forget_bias: float | None = None,
        cell_clip: float | None = None,
        proj_clip: float | None = None,
        activation: Activation | None = None,
        average: bool = False,
    ) -> LSTM | GRU | RNN | Bidirectional | Stack:
        """The layer of all cells that are not refused, as the graph has them on top of each other and side by side.

        A cell is its own layer, a forward and a reversed one of the same x are a `Bidirectional`, and what is on top of
        each other is a `Stack`. y is in the order of x. States are zero unless given; `initial_state` is what the graph
        begins with.

        Parameters
        ----------
        forget_bias, cell_clip, proj_clip, activation, average
            As in `Found.layer`, for each cell.

        Raises
        ------
        ValueError
            The cells are not known to be one layer, as something else is between them or they read several inputs; or
            `Found.layer` raises it.
        """
        levels = self.levels()
        given: dict[str, Any] = {"forget_bias": forget_bias, "cell_clip": cell_clip, "proj_clip": proj_clip}
        given |= {"activation": activation, "average": average}
        layers: list[Any] = []
        for level in levels:
            if len(level) == 1:
                layers += [each.layer(**given) for each in level[0]]
            else:
                halves = [[each.layer(reverse=False, **given) for each in chain] for chain in level]
                layers.append(Bidirectional(*(half[0] if len(half) == 1 else Stack(half) for half in halves)))
        return layers[0] if len(layers) == 1 else Stack(layers)

    @property
    def initial_state(self) -> dict[Any, Any] | None:
        """The state that the graph begins with, in the form that a call of `layer` takes as ``state=``.

        That is `Found.initial_state` of each cell, in a `Bidirectional` by "fw" and "bw", and in a `Stack` by the
        number of the layer. None stands for zeros, and for what is fed or computed.

        Raises
        ------
        ValueError
            As in `layer`: the cells are not one layer.
        """
        states: list[Any] = []
        for level in self.levels():
            if len(level) == 1:
                states += [each.initial_state for each in level[0]]
            else:
                halves = [_stacked([each.initial_state for each in chain]) for chain in level]
                begins = any(half is not None for half in halves)
                states.append(dict(zip(("fw", "bw"), halves, strict=True)) if begins else None)
        return _stacked(states)

    def sharing(self, name: str) -> tuple[str, ...]:
        """Name the other cells whose kernels are made of the same variables or constants as those of a cell."""
        kernels = self[name].kernel_names
        return tuple(other for other, cell in self._found.items() if other != name and kernels & cell.kernel_names)

    def levels(self) -> list[tuple[list[Found], ...]]:
        """What `layer` puts on top of each other: cells, or those of the forward and of the backward direction."""
        usable = [each for each in self._found.values() if each.refused is None]
        if len(usable) < 2 and not any(each.mixed for each in usable):
            if not usable:
                raise ValueError("no cell is left" if self._found else "there is no cell")
            return [(usable,)]
        for each in usable:
            if each.mixed:
                raise ValueError(f"{plain(each.name)} runs several times, and does not read the same cells each time")
            if each.reverse is None:
                raise ValueError(
                    f"the file does not tell in which direction {plain(each.name)} runs, or what its input is"
                )
        read = {below for each in usable for below in each.below}
        here = tuple(sorted((each for each in usable if each not in read), key=lambda each: bool(each.reverse)))
        if not 1 <= len(here) <= 2 or (len(here) == 2 and [each.reverse for each in here] != [False, True]):
            raise ValueError(f"the output of several cells is read by none of them: {_inputs(here)}")
        if len(here) == 2 and here[0] in here[1].behind and here[1] not in here[0].behind:
            one, other = (plain(each.name) for each in here)
            raise ValueError(f"the graph has the output of {other} before that of {one}")
        if len(here) == 2 and here[1] in here[0].merged:
            one, other = (plain(each.name) for each in here)
            raise ValueError(f"the graph merges the outputs of {one} and {other} by other nodes than a concatenation")
        found: list[tuple[list[Found], ...]] = []
        while here:
            chains = tuple([each] for each in here)
            if len(chains) > 2 or (len(chains) == 2 and [each.reverse for each in here] != [False, True]):
                raise ValueError(f"{_inputs(here)}: these are side by side, and not forward and then backward")
            while len(chains) == 2 and chains[0][0].below != chains[1][0].below:
                below = [chain[0].below for chain in chains]
                if any(len(each) != 1 or each[0].reverse != here[k].reverse for k, each in enumerate(below)):
                    raise ValueError(f"forward and backward do not read the same: {_inputs(here)}")
                for chain, (each,) in zip(chains, below, strict=True):
                    chain.insert(0, each)
            first = [chain[0] for chain in chains]
            if not first[0].below and len({each.origins or each for each in first}) != 1:
                raise ValueError(f"forward and backward do not read the same: {_inputs(first)}")
            found.insert(0, chains)
            here = first[0].below
        dtypes = {"float32" if each.dtype == "bfloat16" else each.dtype for each in usable}
        if len(dtypes) > 1:
            raise ValueError(f"the cells are of {' and '.join(sorted(dtypes))}; a layer is of one dtype")
        return found

    def __repr__(self) -> str:
        lines = [repr(each) for each in self._found.values()]
        left = len(lines) - _SHOWN
        lines[_SHOWN:] = [f"... {left} more"] if left > 0 else []
        return "\n    ".join([f"<{len(self)} cells>", *lines])


def _stacked(states: list[Any]) -> dict[Any, Any] | None:
    """The state of a stack, of those of its layers; that of a layer, if it is one."""
    if len(states) == 1:
        one: dict[Any, Any] | None = states[0]
        return one
    return None if all(state is None for state in states) else dict(enumerate(states))


def _inputs(cells: Iterable[Found]) -> str:
    """Cells, and what they read."""
    said = (f"{each.name} (of {', '.join(each.input_from) or each.input or 'something'})" for each in cells)
    return plain(", ".join(said))
