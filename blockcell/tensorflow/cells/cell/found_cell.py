"""A cell that was found: its kind, attributes and weights, and the layer that computes the same.

In come its definition and what comes before it in its graph; out go a layer and its check against the nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ....activations import Activation, canonical
from ....errors import plain
from ....layers import GRU, LSTM, RNN
from ....optable import WEIGHTS, Array
from ..graph.graph_reader import Place
from ..weights.weight_slices import AVERAGE, WeightSource
from .cell_definition import CellDefinition
from .layer_check import Check, Weights, compare, draw_rows

SequenceOrigin = tuple[int, Place, int | None]
"""The number of a graph, a place in it, and the axis of time there."""

_LARGE_KERNEL = 2**20  # entries; of a larger one, a part is checked
_CHECKED_UNITS = 64  # inputs and cells that are checked of a large kernel
_LEAST_BOUND = 24.0  # Smallest bound, in eps, up to I + H = 256, as in `blockcell verify` for sequences.
_BOUNDED_SIZE = 256
_LARGEST_ERROR = 1e-6  # Largest relative error in float64; a right layer gives 1e-15, a wrong one tenths.


class InitialState(NamedTuple):
    """The state of a cell before the first step."""

    name: str
    """The name of the variable or constant that it is, or of the node that it comes from; "" for zeros."""
    source: WeightSource | None = None
    size: int = 0

    def read(self) -> Array | None:
        """Read the rows of the state, or one row if all are alike; None for zeros, and if they are not known."""
        if self.source is None:
            return None
        rows = self.source.read("").reshape(-1, self.size)
        return rows if rows.any() else None


class CellLinks(NamedTuple):
    """What comes before a cell in its graph; the defaults are for a bare checkpoint."""

    reverse: bool | None = None
    source_cells: tuple[str, ...] = ()
    """The names of the cells whose h is x."""
    input_varies: bool = False
    """Whether the cell runs several times, and does not read the same cells each time."""
    input_origins: frozenset[SequenceOrigin] = frozenset()
    """The sources of those parts of x that are no cell's h."""
    initial_states: tuple[InitialState, ...] = ()
    """The states before the first step."""


UNLINKED = CellLinks()


class Found:
    """A cell that was found in a model.

    Attributes
    ----------
    name : str
        The scope of its weights.
    kind : str
        The TensorFlow op, such as ``"BlockLSTM"``, or class, such as ``"BasicLSTMCell"``.
    input_size, hidden_size, output_size : int or None
        I and H, and the size of h, which differs from H in an LSTM with a projection; None if the cell is refused.
    attributes : dict
        An LSTM has ``forget_bias``, ``cell_clip``, ``use_peephole`` and ``gate_order``, and possibly ``coupled`` and
        ``proj_clip``; a GRU possibly ``reset_after``; an RNN ``activation``. Other cells have ``activation`` and
        ``recurrent_activation`` unless they are tanh and sigmoid. None means that the file does not contain the value.
    dtype : str
        The dtype of the weights; bfloat16 becomes float32 in a layer.
    weights : dict of str to str
        The variable or constant of each weight of the layer.
    nodes : tuple of str
        The nodes of the cell in the graph: several steps, or copies in several functions. Empty without a graph.
    reverse : bool or None
        Whether the cell reads x in reverse, by ReverseSequence or ReverseV2, compared with the order of the network's
        input or of the cells below. None if it is unknown: there is no graph, the order of the steps is not understood,
        or all of x is reversed while each row has its own length.
    refused : str or None
        The reason why there is no layer for it.
    """

    def __init__(
        self, name: str, definition: CellDefinition, nodes: Sequence[str] = (), links: CellLinks = UNLINKED
    ) -> None:
        self.name, self.kind, self.nodes = name, definition.tf_class, tuple(nodes)
        self.attributes, self.dtype, self.weights = definition.attributes, definition.dtype, definition.weights
        sizes: tuple[int | None, ...] = definition.sizes or (None, None, None)
        self.input_size, self.hidden_size, self.output_size = sizes
        self.reverse, self.refused = links.reverse, definition.refusal
        self.links, self._definition = links, definition

    @property
    def kernel_names(self) -> set[str]:
        """The names of the variables and constants of the kernels."""
        kernels = [source for source in self._definition.sources.values() if len(source.shape) == 2]
        return {leaf for kernel in kernels for leaf in kernel.leaves}

    @property
    def state_sizes(self) -> tuple[int, ...]:
        """The sizes of cs, if there is one, and of h."""
        return tuple(self._definition.state_sizes.values())

    @property
    def initial_state(self) -> dict[str, Array | None] | None:
        """The initial state in the graph, by the names of layers: "h", and "cs" of an LSTM.

        An array has a row for each row of a batch, or one row for all; None means zeros. The whole is None if
        everything is zero, like the initial state of layers; if it is fed or computed (see `state_from`); and without a
        graph. A layer does not store it: pass it to calls as ``state=``, with as many rows as x has, or one.
        """
        names = self._definition.state_sizes
        states = {name: state.read() for name, state in zip(names, self.links.initial_states, strict=False)}
        return None if all(array is None for array in states.values()) else states

    @property
    def state_from(self) -> str | None:
        """The source of the initial state: variables, constants or nodes; None for zeros."""
        states = [state for state in self.links.initial_states if state.source is None or state.read() is not None]
        return ", ".join(dict.fromkeys(state.name for state in states if state.name)) or None

    @property
    def unsaid(self) -> list[str]:
        """The attributes that the file does not contain and `layer` needs as arguments."""
        return [name for name, value in self.attributes.items() if value is None]

    @property
    def source_cells(self) -> tuple[str, ...]:
        """The cells whose h is x: one, or both directions side by side. Empty if there is none, or if it is not sure.

        The search does not pass nodes that compute, such as dropout: x is then not h alone.
        """
        return self.links.source_cells

    @property
    def input(self) -> str | None:
        """The node that computes x, if it is known and no cell does."""
        return ", ".join(sorted({place.name for _, place, _ in self.links.input_origins})) or None

    # ------------------------------------------------------------------------------------------------------ the layer
    def layer(
        self,
        *,
        forget_bias: float | None = None,
        cell_clip: float | None = None,
        proj_clip: float | None = None,
        activation: Activation | None = None,
        average: bool = False,
        reverse: bool | None = None,
    ) -> LSTM | GRU | RNN:
        """Make the layer with the cell's weights, with ``reverse=True`` if the graph reverses x.

        The nodes of the graph and the layer first run on random numbers, both in float64, and must agree. A checkpoint
        without graph has no nodes to compare with. `check` measures the error of the layer in its own dtype.

        y is in the order of x, as behind a second reversal in the graph. For ReverseSequence, call the layer with the
        same `lengths`; for ReverseV2, without.

        Parameters
        ----------
        forget_bias, cell_clip, proj_clip : float, optional
            Attributes that the file does not contain: a checkpoint without graph has none of them. 0 means no clip.
        activation : str or tuple, optional
            The activation of an RNN, if the file does not contain it.
        average : bool
            Whether to take the moving averages of the weights, ``.../ExponentialMovingAverage``.
        reverse : bool, optional
            The direction. By default the graph's, or False if the file does not contain it.

        Raises
        ------
        ValueError
            The cell is refused, an argument is missing or contradicts the file, or the layer and the graph's nodes do
            not agree.
        """
        backward = bool(self.reverse if reverse is None else reverse)
        options = {"forget_bias": forget_bias, "cell_clip": cell_clip, "proj_clip": proj_clip, "activation": activation}
        attributes = self._complete_attributes(options)
        arrays = self._read_weights(self._definition.sources, average)
        if self.nodes:
            eps = float(np.finfo(np.float64).eps)
            error = self._compare(arrays, attributes, average, np.float64) * eps
            if error > _LARGEST_ERROR:
                message = f"its layer does not compute what its nodes do: it is off by {error:.1g} of the largest entry"
                raise ValueError(f"the cell {self.name!r}: {message}")
        return self._make_layer(arrays, attributes, backward)

    def _complete_attributes(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the attributes, completed by options of `layer` for those that the file does not say."""
        subject = f"the cell {self.name!r}"
        if self.refused is not None:
            raise ValueError(f"{subject} is refused: {self.refused}")
        completed = dict(self.attributes)
        for name, option in options.items():
            if option is None:
                continue
            value: Any = canonical(f"{subject}: activation", option) if name == "activation" else option
            if name not in completed:
                raise ValueError(f"{subject} has no {name}; leave {name} out")
            stored = completed[name]
            agrees = stored == value if name == "activation" else np.float32(stored or 0) == np.float32(value)
            if stored is not None and not agrees:
                stated = format_attribute(stored)
                raise ValueError(f"{name} is {value}, but the graph has {stated} for {subject}; leave {name} out")
            completed[name] = value
        for name, value in completed.items():
            if value is None:
                hints = {"forget_bias": "TensorFlow's cells have 1.0 by default", "activation": "tanh by default"}
                hint = hints.get(name, "0 if it had none")
                raise ValueError(f"{subject}: the file does not say its {name}; pass {name}= ({hint})")
        return completed

    def _read_weights(self, sources: Mapping[str, WeightSource], average: bool) -> dict[str, Array]:
        """Read weights, or their moving averages."""
        arrays = {}
        for role, source in sources.items():
            try:
                arrays[role] = source.read(AVERAGE if average else "")
            except KeyError as error:
                if not average:
                    raise
                name = f"{source.name}{AVERAGE}"
                raise ValueError(f"there is no moving average of {role}: {name!r} is not in the file") from error
        return arrays

    def _first_units(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Return the weights of the first inputs and units."""
        sizes = {"I": self.input_size or 0, "H": self.hidden_size or 0}

        def first_indices(word: str) -> Array:
            """Return the indices of the first entries of each block of a dimension: "I+H" has two, and "4H" four."""
            blocks = [sizes[part[-1]] for part in word.split("+") for _ in range(int(part[:-1] or 1))]
            starts = np.cumsum([0, *blocks[:-1]])
            ranges = [start + np.arange(min(size, _CHECKED_UNITS)) for start, size in zip(starts, blocks, strict=True)]
            return np.concatenate(ranges)

        shapes = {tensor.name: tensor.shape.split() for tensor in self._definition.tensors}
        return {role: array[np.ix_(*map(first_indices, shapes[role]))] for role, array in arrays.items()}

    def _make_layer(
        self, arrays: Mapping[str, Array], attributes: Mapping[str, Any], reverse: bool = False
    ) -> LSTM | GRU | RNN:
        """Make the layer of arrays, in the dtype of its main weight."""
        dtype = arrays[self._definition.layer_spec.main_weight].dtype
        weights = {role: np.require(array, dtype, ["A", "C"]) for role, array in arrays.items()}
        arguments: dict[str, Any] = {**weights, **attributes, "reverse": reverse}
        arguments.pop("use_peephole", None)  # there are peephole weights, or none
        return self._definition.layer_spec.layer_class(**arguments)

    # ------------------------------------------------------------------------------------------------------ the check
    def check(
        self,
        *,
        forget_bias: float | None = None,
        cell_clip: float | None = None,
        proj_clip: float | None = None,
        activation: Activation | None = None,
        average: bool = False,
    ) -> Check:
        """Compare the layer, in its own dtype, with the graph's nodes in float64.

        Both compute one step of the same random rows, scaled so that large weights and biases do not saturate all
        gates. In a cell of more than a million weights without a projection, only the first inputs and units are
        checked.

        Parameters
        ----------
        forget_bias, cell_clip, proj_clip, activation, average
            As in `layer`.

        Returns
        -------
        Check
            The largest error in eps of the largest entry, a float, with attributes ``bound`` and ``ok``, whether it is
            within the bound. The bound is 24 eps, more if I + H is more than 256, and in float64 1e-13 of the largest
            entry. If large weights amplify rounding errors, it is 16 times the effect of float32's rounding errors on
            the step.
        """
        options = {"forget_bias": forget_bias, "cell_clip": cell_clip, "proj_clip": proj_clip, "activation": activation}
        attributes = self._complete_attributes(options)
        arrays = self._read_weights(self._definition.sources, average)
        return self._compare(arrays, attributes, average, arrays[self._definition.layer_spec.main_weight].dtype)

    def _compare(self, arrays: Mapping[str, Array], attributes: Mapping[str, Any], average: bool, dtype: Any) -> Check:
        """Compare the layer of a dtype with the cell's nodes."""
        step, step_sources = self._definition.step, self._definition.step_sources
        state_sizes = self.state_sizes
        # a projection reads all cells, so that a part of them would not give its h
        if "w_p" not in arrays and max(array.size for array in arrays.values()) > _LARGE_KERNEL:
            arrays, state_sizes = self._first_units(arrays), tuple(min(size, _CHECKED_UNITS) for size in state_sizes)
        layer = self._make_layer({role: array.astype(dtype) for role, array in arrays.items()}, attributes)
        kind_by_role = {tensor.name: tensor.kind for tensor in self._definition.tensors}
        arrays_by_kind = {kind: [array for role, array in arrays.items() if kind_by_role[role] == kind]
                          for kind in WEIGHTS}  # fmt: skip
        weights: Weights = {role: array.astype(np.float64) for role, array in arrays.items()}
        if step_sources is not None:
            weights = self._read_weights(step_sources, average)
        with np.errstate(all="ignore"):  # weights may be anything
            rows = draw_rows([layer.input_size, *state_sizes], arrays_by_kind, dtype,
                             may_overflow="exponential" in attributes.values())  # fmt: skip
            return compare(layer, lambda w, x, state: step(w, x, state, attributes), weights, rows, self._floor)

    @property
    def _floor(self) -> float:
        """The least bound: 24 eps, more where I + H is more than 256; in float64 1e-13 of the largest entry."""
        bound = 1e-13 / float(np.finfo(np.float64).eps) if self.dtype == "float64" else _LEAST_BOUND
        return bound * max(1.0, ((self.input_size or 0) + (self.hidden_size or 0)) / _BOUNDED_SIZE)

    def __repr__(self) -> str:
        sizes = "" if self.input_size is None else f" {self.input_size} -> {self.hidden_size}"
        attributes = [f"{name}={format_attribute(value)}" for name, value in self.attributes.items()]
        head = " ".join([f"{self.kind}{sizes}", self.dtype, *attributes, *["reversed"] * bool(self.reverse)]).rstrip()
        inputs = f"; input: {', '.join(self.source_cells)}" if self.source_cells else ""
        return plain(f"<{self.name}: {head}{inputs}{'' if self.refused is None else f'; refused: {self.refused}'}>")


def format_attribute(value: Any) -> str:
    """Format an attribute; "?" stands for what the file does not say."""
    if value is None:
        return "?"
    if isinstance(value, tuple):
        return f"({','.join(map(format_attribute, value))})"
    return f"{value:g}" if isinstance(value, float) else str(value)
