"""A cell that was found: its kind, attributes and weights, and the layer that computes the same.

In come the sources of weights and the step of its nodes; out go a layer and its check against the nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ....activations import Activation, canonical
from ....errors import plain
from ....layers import GRU, LSTM, RNN
from ....optable import OPS, WEIGHTS, Array, Op, Tensor, lstm_weights, sizes_of
from ..graph.graph_reader import Place
from ..weights.weight_sources import AVERAGE, WeightSource
from .layer_check import Check, State, Weights, compare, draw_rows

SequenceOrigin = tuple[int, Place, int | None]
"""The number of a graph, a place in it, and the axis of time there."""
Step = Callable[[Weights, Array, State, Mapping[str, Any]], State]
"""Computes one step in float64, from weights, x, the state (h, or cs and h) and attributes to the next state."""

FLOATS = ("float16", "float32", "float64", "bfloat16")
_WHOLE = 2**20  # entries of the largest kernel that is checked as a whole
_UNITS = 64  # inputs and cells that are checked of a larger one
_EPS = 24.0  # the bound of `blockcell verify` for sequences, which is for I + H up to 256
_DEPTH = 256
_MOST_OFF = 1e-6  # of the largest entry, in float64, where rounding gives 1e-15 and another cell some tenths


class _CellKind(NamedTuple):
    """A kind of cell."""

    layer: type[LSTM | GRU | RNN]
    op: Op
    main: str
    """The weight that tells the sizes and the dtype."""


_CELL_KINDS = {
    "LSTM": _CellKind(LSTM, OPS["BlockLSTM"], "w"),
    "GRU": _CellKind(GRU, OPS["block_gru"], "w_c"),
    "GRU that resets after": _CellKind(GRU, OPS["block_gru_reset_after"], "w_c"),
    "RNN": _CellKind(RNN, OPS["block_rnn"], "w"),
}


class CellInGraph(NamedTuple):
    """The nodes of a cell in a graph, for one step or for all steps."""

    body: str
    x: Place
    states: tuple[Place, ...]
    """The states before the step: h, or cs and h."""
    h: Place
    all_steps: bool = False
    """Whether the node is an op that runs over all steps."""

    @property
    def state(self) -> Place | None:
        """The place of h before the step; None for an op that runs over all steps."""
        return None if self.all_steps else self.states[-1]


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


class Found:
    """A cell that was found in a model.

    Attributes
    ----------
    name : str
        The scope of its weights.
    kind : str
        What it is in TensorFlow: an op such as ``"BlockLSTM"``, or a class such as ``"BasicLSTMCell"``.
    input_size, hidden_size, output_size : int or None
        I and H, and the size of h, which is another one where an LSTM has a projection; None if it is refused.
    attributes : dict
        ``forget_bias``, ``cell_clip`` and ``use_peephole`` of an LSTM, and its ``gate_order``; ``coupled`` and
        ``proj_clip`` of one that is coupled or has a projection; ``reset_after`` of a GRU that is one; the
        ``activation`` of an RNN; ``activation`` and ``recurrent_activation`` of others if these are not tanh and
        sigmoid. None is what the file does not say.
    dtype : str
        Of the weights; bfloat16 becomes float32 in a layer.
    weights : dict of str to str
        Where each weight of the layer comes from.
    nodes : tuple of str
        The nodes that it is in the graph: several steps, or copies in several functions. Empty in a bare checkpoint.
    reverse : bool or None
        Whether the graph gives it x in reverse, by ReverseSequence or ReverseV2, against the order that x has in the
        end, or that the x has of the cells below. None if the file does not tell: there is no graph, the order of the
        steps is not understood, or all of x is reversed while each row has a length of its own.
    refused : str or None
        Why there is no layer for it.
    """

    def __init__(
        self,
        name: str,
        kind: str,
        nodes: Sequence[str] = (),
        *,
        cell: str = "LSTM",
        sources: Mapping[str, WeightSource] | None = None,
        attributes: Mapping[str, Any] | None = None,
        step: Step | None = None,
        parts: Mapping[str, WeightSource] | None = None,
        in_graph: CellInGraph | None = None,
        refused: str | None = None,
    ) -> None:
        self.name, self.kind, self.nodes = name, kind, tuple(nodes)
        self._cell, self._sources, self._step = cell, dict(sources or {}), step
        self._parts = parts  # the weights of the step, if not those of the layer
        self.attributes = dict(attributes or {})
        self.in_graph = in_graph
        self.reverse: bool | None = None
        self.input_cells: tuple[Found, ...] = ()
        self.input_cells_vary = False
        """Whether the cell runs several times, and does not read the same cells each time."""
        self.concatenated_after: set[Found] = set()
        """The cells whose h is concatenated after this cell's h, in all steps or else in the last one."""
        self.merged_with: set[Found] = set()
        """The cells whose h is added to this cell's h, multiplied with it or merged with it in another way."""
        self.input_origins: frozenset[SequenceOrigin] = frozenset()
        self.initial_states: tuple[InitialState, ...] = ()
        """The states before the first step; empty in a bare checkpoint."""
        self.input_size: int | None = None
        self.hidden_size: int | None = None
        self.output_size: int | None = None
        self.dtype = next((source.dtype for source in self._sources.values()), "")
        self.weights = {role: source.name for role, source in self._sources.items()}
        reason = refused or self._misfit()
        self.refused = None if reason is None else plain(reason)

    def _misfit(self) -> str | None:
        """Find the sizes, and return what is wrong with the weights; None if they fit."""
        main, tensors = self._kind.main, {tensor.name: tensor for tensor in self._tensors}
        for role, source in self._sources.items():
            if missing := [leaf[1:] for leaf in source.leaves if leaf[0] == "?"]:
                return f"{role} is the variable {missing[0]!r}, which is not in the checkpoint"
            if source.dtype not in FLOATS:
                return f"{role}, which is {source.name}, is of {source.dtype}; expected float32, float64 or float16"
            if source.dtype != self.dtype:
                return f"{role} is of {source.dtype}, and {main} of {self.dtype}"
        form, shape = tensors[main].shape, self._sources[main].shape
        rows, columns = shape if len(shape) == 2 else (0, 0)
        hidden, remainder = divmod(columns, len(_blocks(form.split()[1], {"H": 1})))
        sizes = {"H": hidden}
        if "w_p" in self._sources:
            sizes["P"] = [0, *self._sources["w_p"].shape][-1]
        sizes["I"] = rows - sizes.get("P", hidden)
        if remainder or min(sizes.values()) < 1:
            expected = f"({form.replace(' ', ', ')})"
            return f"{main}, which is {self.weights[main]}, has shape {shape}; expected {expected}"
        for role, source in self._sources.items():
            needed = sizes_of(tensors[role].shape, sizes)
            if source.shape != needed:
                where = f"{role}, which is {self.weights[role]}"
                return f"{where}, has shape {source.shape}; expected {needed} beside {main} of shape {(rows, columns)}"
        self.input_size, self.hidden_size, self.output_size = sizes["I"], hidden, sizes.get("P", hidden)
        return None

    @property
    def _kind(self) -> _CellKind:
        return _CELL_KINDS["GRU that resets after" if self.attributes.get("reset_after") else self._cell]

    @property
    def _tensors(self) -> tuple[Tensor, ...]:
        """The weights that a cell of this kind may have."""
        if self._cell != "LSTM":
            return self._kind.op.weights
        return lstm_weights(bool(self.attributes.get("coupled")), "w_p" in self._sources)

    @property
    def kernel_names(self) -> set[str]:
        """The names of the variables and constants that the kernels are made of."""
        return {leaf for source in self._sources.values() if len(source.shape) == 2 for leaf in source.leaves}

    @property
    def state_sizes(self) -> tuple[int, ...]:
        """The sizes of cs, if there is one, and of h."""
        return (self.hidden_size or 0, self.output_size or 0)[-self._count_of_states :]

    @property
    def _count_of_states(self) -> int:
        return sum(tensor.kind == "state" for tensor in self._kind.op.inputs)

    @property
    def initial_state(self) -> dict[str, Array | None] | None:
        """What the graph begins with, by the names that layers have for it: "h", and "cs" of an LSTM.

        Each array has a row for each row of a batch, or one for all of them; None for zeros. It is None as a whole if
        all of it is zero, which is what layers begin with; if it is fed or computed, as `state_from` says; and if there
        is no graph. A layer does not keep it: pass it, with as many rows as x has, as ``state=``.
        """
        names = ("cs", "h")[-self._count_of_states :]
        read = {name: start.read() for name, start in zip(names, self.initial_states, strict=False)}
        return None if all(array is None for array in read.values()) else read

    @property
    def state_from(self) -> str | None:
        """What the state before the first step is, or comes from: variables, constants or nodes; None for zeros."""
        states = [state for state in self.initial_states if state.source is None or state.read() is not None]
        return ", ".join(dict.fromkeys(state.name for state in states if state.name)) or None

    @property
    def unsaid(self) -> list[str]:
        """The attributes that the file does not say, and `layer` has to be given."""
        return [name for name, value in self.attributes.items() if value is None]

    @property
    def input_from(self) -> tuple[str, ...]:
        """The cells whose h is x, side by side: one, or both directions. Empty where there is none, or none is sure.

        Dropout, for one, is not passed: what the graph computes is not h alone then.
        """
        return tuple(cell.name for cell in self.input_cells)

    @property
    def input(self) -> str | None:
        """The node that x comes from, if that is no cell and is known."""
        return ", ".join(sorted({place.name for _, place, _ in self.input_origins})) or None

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
        """The layer with the cell's weights, with ``reverse=True`` if the graph reverses x.

        The cell and the layer run on random numbers first, both in float64: the layer computes what the graph's nodes
        do. In a bare checkpoint there are no nodes, and nothing to compare with. `check` tells the layer's error in its
        own dtype.

        Its y is in the order of x, as behind a second reversal in the graph. If that is ReverseSequence, call the layer
        with the same `lengths`; if it is ReverseV2, without.

        Parameters
        ----------
        forget_bias, cell_clip, proj_clip : float, optional
            What the file does not say: a checkpoint without graph has none of them. A clip of 0 means that there is
            none.
        activation : str or tuple, optional
            Likewise, of an RNN.
        average : bool
            Whether the weights are the moving averages, ``.../ExponentialMovingAverage``.
        reverse : bool, optional
            The direction, if not that of the graph; False where the file does not tell it.

        Raises
        ------
        ValueError
            The cell is refused, what is needed is not given, or what is given is not what the file says; or the layer
            does not compute what the graph's nodes do.
        """
        backward = bool(self.reverse if reverse is None else reverse)
        attributes, arrays = self._completed(forget_bias, cell_clip, proj_clip, activation), self._read_weights(average)
        eps = float(np.finfo(np.float64).eps)
        if self.nodes and (off := self._compare(arrays, attributes, average, np.float64) * eps) > _MOST_OFF:
            message = f"its layer does not compute what its nodes do: it is off by {off:.1g} of the largest entry"
            raise ValueError(f"the cell {self.name!r}: {message}")
        return self._make_layer(arrays, attributes, backward)

    def _completed(
        self,
        forget_bias: float | None,
        cell_clip: float | None,
        proj_clip: float | None,
        activation: Activation | None,
    ) -> dict[str, Any]:
        """Return the attributes, completed by arguments for those that the file does not say."""
        subject = f"the cell {self.name!r}"
        if self.refused is not None:
            raise ValueError(f"{subject} is refused: {self.refused}")
        arguments: dict[str, Any] = {"forget_bias": forget_bias, "cell_clip": cell_clip, "proj_clip": proj_clip}
        arguments["activation"] = None if activation is None else canonical(f"{subject}: activation", activation)
        completed = dict(self.attributes)
        for name, value in arguments.items():
            if value is None:
                continue
            if name not in completed:
                kind = "a GRU" if self._cell == "GRU" else f"an {self._cell}"
                raise ValueError(f"{subject} is {kind}, which has no {name} to be given; leave {name} out")
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

    def _read_weights(self, average: bool) -> dict[str, Array]:
        """Read the weights, or their moving averages."""
        return {role: self._read_weight(role, source, average) for role, source in self._sources.items()}

    def _read_weight(self, role: str, source: WeightSource, average: bool) -> Array:
        try:
            return source.read(AVERAGE if average else "")
        except KeyError as error:
            if not average:
                raise
            name = f"{source.name}{AVERAGE}"
            raise ValueError(f"there is no moving average of {role}: {name!r} is not in the file") from error

    def _first_units(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Return the weights of the first inputs and units."""
        first_weights = {}
        sizes = {"I": self.input_size or 0, "H": self.hidden_size or 0}
        tensors = {tensor.name: tensor for tensor in self._tensors}
        for role, array in arrays.items():
            for axis, word in enumerate(tensors[role].shape.split()):
                blocks = _blocks(word, sizes)
                starts = np.cumsum([0, *blocks[:-1]])
                parts = [slice(k, k + min(n, _UNITS)) for k, n in zip(starts, blocks, strict=True)]
                array = np.concatenate([array[(slice(None),) * axis + (part,)] for part in parts], axis)
            first_weights[role] = array
        return first_weights

    def _make_layer(
        self, arrays: Mapping[str, Array], attributes: Mapping[str, Any], reverse: bool = False
    ) -> LSTM | GRU | RNN:
        dtype = arrays[self._kind.main].dtype
        weights = {role: np.require(array, dtype, ["A", "C"]) for role, array in arrays.items()}
        arguments: dict[str, Any] = {**weights, **attributes, "reverse": reverse}
        arguments.pop("use_peephole", None)  # there are peephole weights, or none
        return self._kind.layer(**arguments)

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
        """Compare the layer, in its own dtype, with the cell as the graph has it, node by node in float64.

        Both compute one step of the same random rows, which are so scaled that large weights and biases do not saturate
        all gates. Of a cell of more than a million weights without a projection, the first inputs and units are
        checked.

        Parameters
        ----------
        forget_bias, cell_clip, proj_clip, activation, average
            As in `layer`.

        Returns
        -------
        Check
            The largest error in eps of the largest entry, a float; with ``bound``, how large it may be, and ``ok``,
            whether it is within the bound. That is 24 eps, more where I + H is more than 256, and in float64 1e-13 of
            the largest entry; or, if large weights amplify rounding errors more, 16 times what the rounding errors of
            float32 make of the step.
        """
        attributes, arrays = self._completed(forget_bias, cell_clip, proj_clip, activation), self._read_weights(average)
        return self._compare(arrays, attributes, average, arrays[self._kind.main].dtype)

    def _compare(self, arrays: Mapping[str, Array], attributes: Mapping[str, Any], average: bool, dtype: Any) -> Check:
        """Compare the layer of a dtype with the cell's nodes."""
        step = self._step
        assert step is not None
        # what is projected comes from all cells
        large = "w_p" not in arrays and max(array.size for array in arrays.values()) > _WHOLE
        arrays, most = (self._first_units(arrays), _UNITS) if large else (arrays, max(self.state_sizes))
        layer = self._make_layer({role: array.astype(dtype) for role, array in arrays.items()}, attributes)
        sizes = [layer.input_size, *(min(size, most) for size in self.state_sizes)]
        kinds = {tensor.name: tensor.kind for tensor in self._tensors}
        by_kind = {kind: [array for role, array in arrays.items() if kinds[role] == kind] for kind in WEIGHTS}
        weights: Weights = {role: array.astype(np.float64) for role, array in arrays.items()}
        if self._parts is not None:
            weights = {name: self._read_weight(name, part, average) for name, part in self._parts.items()}
        with np.errstate(all="ignore"):  # weights may be anything
            rows = draw_rows(sizes, by_kind, dtype, may_overflow="exponential" in attributes.values())
            return compare(layer, lambda w, x, state: step(w, x, state, attributes), weights, rows, self._floor)

    @property
    def bound(self) -> float:
        """The bound of `check()`; the least one if the cell is refused, or if `check` has to be given an attribute."""
        return self._floor if self.refused is not None or self.unsaid else self.check().bound

    @property
    def _floor(self) -> float:
        """The least bound: 24 eps, more where I + H is more than 256; in float64 1e-13 of the largest entry."""
        eps = 1e-13 / float(np.finfo(np.float64).eps) if self.dtype == "float64" else _EPS
        return eps * max(1.0, ((self.input_size or 0) + (self.hidden_size or 0)) / _DEPTH)

    def __repr__(self) -> str:
        sizes = "" if self.input_size is None else f" {self.input_size} -> {self.hidden_size}"
        says = [f"{name}={format_attribute(value)}" for name, value in self.attributes.items()]
        head = " ".join([f"{self.kind}{sizes}", self.dtype, *says, *["reversed"] * bool(self.reverse)]).rstrip()
        below = f"; input: {', '.join(self.input_from)}" if self.input_cells else ""
        return plain(f"<{self.name}: {head}{below}{'' if self.refused is None else f'; refused: {self.refused}'}>")


def format_attribute(value: Any) -> str:
    """Format an attribute; "?" stands for what the file does not say."""
    if value is None:
        return "?"
    if isinstance(value, tuple):
        return f"({','.join(map(format_attribute, value))})"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _blocks(word: str, sizes: Mapping[str, int]) -> list[int]:
    """Return the sizes of the blocks of a dimension: ``"I+H"`` has two blocks, and ``"4H"`` four."""
    return [sizes[part[-1]] for part in word.split("+") for _ in range(int(part[:-1] or 1))]
