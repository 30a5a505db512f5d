"""All cells of a model, by names, and the layer that they are together: a cell, a Bidirectional or a Stack.

In come cells that know their input cells and directions; out go levels of cells on top of each other, and their layer.
"""

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

    def __init__(self, cells: Mapping[str, Found]) -> None:
        self._cells = cells

    def __getitem__(self, name: str) -> Found:
        if name not in self._cells:
            raise KeyError(f"{name}; there are {', '.join(self._cells) or 'none'}")
        return self._cells[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._cells)

    def __len__(self) -> int:
        return len(self._cells)

    def layer(
        self,
        *,
        forget_bias: float | None = None,
        cell_clip: float | None = None,
        proj_clip: float | None = None,
        activation: Activation | None = None,
        average: bool = False,
    ) -> LSTM | GRU | RNN | Bidirectional | Stack:
        """Make the layer of all cells that are not refused, on top of each other and side by side as in the graph.

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
        arguments: dict[str, Any] = {"forget_bias": forget_bias, "cell_clip": cell_clip, "proj_clip": proj_clip}
        arguments |= {"activation": activation, "average": average}
        layers: list[Any] = []
        for level in levels:
            if len(level) == 1:
                layers += [cell.layer(**arguments) for cell in level[0]]
            else:
                halves = [[cell.layer(reverse=False, **arguments) for cell in chain] for chain in level]
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
                states += [cell.initial_state for cell in level[0]]
            else:
                halves = [_stack_states([cell.initial_state for cell in chain]) for chain in level]
                begins = any(half is not None for half in halves)
                states.append(dict(zip(("fw", "bw"), halves, strict=True)) if begins else None)
        return _stack_states(states)

    def sharing(self, name: str) -> tuple[str, ...]:
        """Name the other cells whose kernels are made of the same variables or constants as those of a cell."""
        kernels = self[name].kernel_names
        return tuple(other for other, cell in self._cells.items() if other != name and kernels & cell.kernel_names)

    def levels(self) -> list[tuple[list[Found], ...]]:
        """List what `layer` stacks, lowest level first: cells, or cells of the forward and the backward direction."""
        usable = [cell for cell in self._cells.values() if cell.refused is None]
        if len(usable) < 2 and not any(cell.input_cells_vary for cell in usable):
            if not usable:
                raise ValueError("no cell is left" if self._cells else "there is no cell")
            return [(usable,)]
        for cell in usable:
            if cell.input_cells_vary:
                raise ValueError(f"{plain(cell.name)} runs several times, and does not read the same cells each time")
            if cell.reverse is None:
                name = plain(cell.name)
                raise ValueError(f"the file does not tell in which direction {name} runs, or what its input is")
        read_cells = {below for cell in usable for below in cell.input_cells}
        sides = tuple(sorted((cell for cell in usable if cell not in read_cells), key=lambda cell: bool(cell.reverse)))
        if not 1 <= len(sides) <= 2 or (len(sides) == 2 and [cell.reverse for cell in sides] != [False, True]):
            raise ValueError(f"the output of several cells is read by none of them: {_list_inputs(sides)}")
        if len(sides) == 2:
            (forward, backward), names = sides, [plain(cell.name) for cell in sides]
            if forward in backward.concatenated_after and backward not in forward.concatenated_after:
                raise ValueError(f"the graph has the output of {names[1]} before that of {names[0]}")
            if backward in forward.merged_with:
                outputs = " and ".join(names)
                raise ValueError(f"the graph merges the outputs of {outputs} by other nodes than a concatenation")
        levels: list[tuple[list[Found], ...]] = []
        while sides:
            chains = tuple([cell] for cell in sides)
            if len(chains) > 2 or (len(chains) == 2 and [cell.reverse for cell in sides] != [False, True]):
                raise ValueError(f"{_list_inputs(sides)}: these are side by side, and not forward and then backward")
            while len(chains) == 2 and chains[0][0].input_cells != chains[1][0].input_cells:
                below = [chain[0].input_cells for chain in chains]
                if any(len(inputs) != 1 or inputs[0].reverse != sides[k].reverse for k, inputs in enumerate(below)):
                    raise ValueError(f"forward and backward do not read the same: {_list_inputs(sides)}")
                for chain, (cell,) in zip(chains, below, strict=True):
                    chain.insert(0, cell)
            first = [chain[0] for chain in chains]
            if not first[0].input_cells and len({cell.input_origins or cell for cell in first}) != 1:
                raise ValueError(f"forward and backward do not read the same: {_list_inputs(first)}")
            levels.insert(0, chains)
            sides = first[0].input_cells
        dtypes = {"float32" if cell.dtype == "bfloat16" else cell.dtype for cell in usable}
        if len(dtypes) > 1:
            raise ValueError(f"the cells are of {' and '.join(sorted(dtypes))}; a layer is of one dtype")
        return levels

    def __repr__(self) -> str:
        lines = [repr(cell) for cell in self._cells.values()]
        left = len(lines) - _SHOWN
        lines[_SHOWN:] = [f"... {left} more"] if left > 0 else []
        return "\n    ".join([f"<{len(self)} cells>", *lines])


def _stack_states(states: list[Any]) -> dict[Any, Any] | None:
    """Return the state of a stack by the states of its layers, or the state of its only layer."""
    if len(states) == 1:
        state: dict[Any, Any] | None = states[0]
        return state
    return None if all(state is None for state in states) else dict(enumerate(states))


def _list_inputs(cells: Iterable[Found]) -> str:
    """List cells with what they read."""
    descriptions = (f"{cell.name} (of {', '.join(cell.input_from) or cell.input or 'something'})" for cell in cells)
    return plain(", ".join(descriptions))
