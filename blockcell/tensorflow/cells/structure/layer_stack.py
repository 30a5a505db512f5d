"""All cells of a model, by names, and the layer that they are together: a cell, a Bidirectional or a Stack.

In come cells with the names of their input cells and their directions; out go levels of cells on top of each other, and
their layer. `Cells.levels` says why cells cannot be stacked, ``connection_check.py`` where the graph joins others.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ....activations import Activation
from ....convert.comparison import NotCompared
from ....errors import plain
from ....layers import GRU, LSTM, RNN, Bidirectional, Stack
from ..cell.found_cell import Found
from ..graph.graph_reader import UnknownValue
from .connection_check import CALLER, GraphConnections, MadeLayer

_MOST_SHOWN = 60  # cells in the text of all cells


class Cells(Mapping[str, Found]):
    """The cells that were found, by names."""

    def __init__(
        self, cells: Mapping[str, Found], connections: Sequence[tuple[GraphConnections, Sequence[str]]] = ()
    ) -> None:
        """Keep cells by their names; `connections` are those of each graph, with the name of the cell of each run."""
        self._cells, self._connections = cells, connections

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
        check: bool | None = None,
    ) -> LSTM | GRU | RNN | Bidirectional | Stack:
        """Make the layer of all cells that are not refused, on top of each other and side by side as in the graph.

        A single cell is a layer, a forward and a reversed cell of the same x are a `Bidirectional`, and cells that read
        each other are a `Stack`. y is in the order of x. The layer starts from zeros; `initial_state` is the graph's
        initial state.

        Parameters
        ----------
        forget_bias, cell_clip, proj_clip, activation, average
            As in `Found.layer`, for each cell.
        check : bool, optional
            Whether the nodes between the cells run on random numbers and must connect the cells as the layer does. None
            and True compare; if some nodes are not understood, a warning says so. False does not compare.

        Raises
        ------
        ConversionError
            The layer computes something else than the graph. It is a `ValueError`.
        ValueError
            The cells are not one layer: there are other nodes between them, or they read several inputs; or
            `Found.layer` raises it.
        """
        levels = self.levels()
        leaves: list[tuple[str, Any]] = []

        def make(chain: Iterable[Found], **arguments: Any) -> list[Any]:
            """Make the layers of cells, and keep them by names."""
            made = [(cell.name, cell.layer(**arguments)) for cell in chain]
            leaves.extend(made)
            return [leaf for _, leaf in made]

        arguments: dict[str, Any] = {"forget_bias": forget_bias, "cell_clip": cell_clip, "proj_clip": proj_clip}
        arguments |= {"activation": activation, "average": average}
        layers: list[Any] = []
        for level in levels:
            if len(level) == 1:
                layers += make(level[0], **arguments)
            else:
                halves = [make(chain, reverse=False, **arguments) for chain in level]
                layers.append(Bidirectional(*(half[0] if len(half) == 1 else Stack(half) for half in halves)))
        layer = layers[0] if len(layers) == 1 else Stack(layers)
        if check is not False:
            made = MadeLayer(layer, leaves, self._cells, tuple(chain[-1].name for chain in levels[-1]))
            for remark in self._compare(made):
                warnings.warn(f"{CALLER}: {remark}", stacklevel=2)
        return layer

    def _compare(self, made: MadeLayer) -> list[str]:
        """Compare a layer of all cells with the graphs; return remarks."""
        try:
            if not self._connections:
                raise NotCompared("the file has no graph")
            remarks = (remark for graph, names in self._connections for remark in graph.compare(made, names))
            return [*dict.fromkeys(remarks)]
        except (NotCompared, UnknownValue) as error:
            for graph, names in self._connections:
                graph.refuse_sums(made.top, names)
            reason = error if isinstance(error, NotCompared) else f"this is not understood: {plain(str(error))}"
            return [f"not compared with the graph, because {reason}"]

    @property
    def initial_state(self) -> dict[Any, Any] | None:
        """The initial state of the graph, in the form that a call of `layer` takes as ``state=``.

        It holds `Found.initial_state` of each cell, in a `Bidirectional` by "fw" and "bw", and in a `Stack` by the
        number of the layer. None means zeros, or a state that is fed or computed.

        Raises
        ------
        ValueError
            The cells are not one layer, as in `layer`.
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
        if len(usable) < 2 and not any(cell.links.input_varies for cell in usable):
            if not usable:
                raise ValueError("no cell is left" if self._cells else "there is no cell")
            return [(usable,)]
        for cell in usable:
            if cell.links.input_varies:
                raise ValueError(f"{plain(cell.name)} runs several times, and does not read the same cells each time")
            if cell.reverse is None:
                name = plain(cell.name)
                raise ValueError(f"the file does not tell in which direction {name} runs, or what its input is")
        level = self._top_level(usable)
        levels: list[tuple[list[Found], ...]] = []
        while level:
            chains = self._extend_down(level)
            lowest = [chain[0] for chain in chains]
            if not lowest[0].source_cells and len({cell.links.input_origins or cell for cell in lowest}) != 1:
                raise ValueError(f"forward and backward do not read the same: {_list_inputs(lowest)}")
            levels.insert(0, chains)
            level = self._input_cells(lowest[0])
        dtypes = {"float32" if cell.dtype == "bfloat16" else cell.dtype for cell in usable}
        if len(dtypes) > 1:
            raise ValueError(f"the cells are of {' and '.join(sorted(dtypes))}; a layer is of one dtype")
        return levels

    def _input_cells(self, cell: Found) -> list[Found]:
        """Return the cells whose h a cell reads."""
        return [self._cells[name] for name in cell.source_cells]

    def _top_level(self, usable: Sequence[Found]) -> list[Found]:
        """Return the cells that no cell reads: one, or a forward and a backward one."""
        read_names = {name for cell in usable for name in cell.source_cells}
        top = sorted((cell for cell in usable if cell.name not in read_names), key=lambda cell: bool(cell.reverse))
        if not _is_level(top):
            raise ValueError(f"the output of several cells is read by none of them: {_list_inputs(top)}")
        return top

    def _extend_down(self, level: Sequence[Found]) -> tuple[list[Found], ...]:
        """Return a chain of cells for each cell of a level, which it ends with; both chains have the same input."""
        if not _is_level(level):
            raise ValueError(f"{_list_inputs(level)}: these are side by side, and not forward and then backward")
        chains = [[cell] for cell in level]
        while len(chains) == 2 and chains[0][0].source_cells != chains[1][0].source_cells:
            for chain in chains:
                inputs = self._input_cells(chain[0])
                if len(inputs) != 1 or inputs[0].reverse != chain[0].reverse:
                    raise ValueError(f"forward and backward do not read the same: {_list_inputs(level)}")
                chain.insert(0, inputs[0])
        return tuple(chains)

    def __repr__(self) -> str:
        lines = [repr(cell) for cell in self._cells.values()]
        if len(lines) > _MOST_SHOWN:
            lines[_MOST_SHOWN:] = [f"... {len(lines) - _MOST_SHOWN} more"]
        return "\n    ".join([f"<{len(self)} cells>", *lines])


def _is_level(cells: Sequence[Found]) -> bool:
    """Return whether cells may be one level of a stack: one cell, or a forward and a backward one."""
    return len(cells) == 1 or [cell.reverse for cell in cells] == [False, True]


def _stack_states(states: Sequence[dict[Any, Any] | None]) -> dict[Any, Any] | None:
    """Return the state of a stack by the states of its layers, or the state of its only layer."""
    if len(states) == 1:
        return states[0]
    return None if all(state is None for state in states) else dict(enumerate(states))


def _list_inputs(cells: Iterable[Found]) -> str:
    """List cells with what they read."""
    descriptions = (f"{cell.name} (of {', '.join(cell.source_cells) or cell.input or 'something'})" for cell in cells)
    return plain(", ".join(descriptions))
