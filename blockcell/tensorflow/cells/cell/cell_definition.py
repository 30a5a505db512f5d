"""The definition of a cell: its class, weights and attributes, and how its nodes compute a step.

In come the sources of weights that a search found; out go the sizes of the layer that has these weights, or the reason
why there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ....errors import plain
from ....layers import GRU, LSTM, RNN
from ....optable import OPS, Array, Op, Tensor, lstm_weights, sizes_of
from ..graph.graph_reader import Place
from ..weights.weight_sources import WeightSource
from .layer_check import State, Weights

StepFunction = Callable[[Weights, Array, State, Mapping[str, Any]], State]
"""Computes one step in float64, from weights, x, the state (h, or cs and h) and attributes to the next state."""

FLOATS = ("float16", "float32", "float64", "bfloat16")


class _LayerKind(NamedTuple):
    """A kind of layer."""

    layer: type[LSTM | GRU | RNN]
    op: Op
    main: str
    """The weight that tells the sizes and the dtype."""


_LAYER_KINDS = {
    "LSTM": _LayerKind(LSTM, OPS["BlockLSTM"], "w"),
    "GRU": _LayerKind(GRU, OPS["block_gru"], "w_c"),
    "GRU that resets after": _LayerKind(GRU, OPS["block_gru_reset_after"], "w_c"),
    "RNN": _LayerKind(RNN, OPS["block_rnn"], "w"),
}


class LayerSizes(NamedTuple):
    """The sizes I and H of a layer, and the size of h, which is another one where an LSTM has a projection."""

    input: int
    hidden: int
    output: int


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


class CellDefinition:
    """A cell as a search defines it, before it has a name and is connected with other cells.

    Attributes
    ----------
    tf_class : str
        An op such as ``"BlockLSTM"``, or a class such as ``"BasicLSTMCell"``.
    layer_kind : str
        ``"LSTM"``, ``"GRU"`` or ``"RNN"``.
    nodes : tuple of str
        The node that it is, or its last one; empty in a bare checkpoint.
    sources : dict of str to WeightSource
        Each weight of the layer.
    attributes : dict
        Attributes of the layer; None is what the file does not say.
    step : StepFunction or None
        Computes what the nodes do.
    step_sources : dict of str to WeightSource, or None
        The weights of `step`; None if they are those of the layer.
    in_graph : CellInGraph or None
        Its nodes; None in a bare checkpoint, and if it is refused for what it reads.
    sizes : LayerSizes or None
        None if it is refused.
    refusal : str or None
        The reason why there is no layer for it.
    """

    def __init__(
        self,
        tf_class: str,
        nodes: Sequence[str] = (),
        *,
        layer_kind: str = "LSTM",
        sources: Mapping[str, WeightSource],
        attributes: Mapping[str, Any] | None = None,
        step: StepFunction | None = None,
        step_sources: Mapping[str, WeightSource] | None = None,
        in_graph: CellInGraph | None = None,
        refusal: str | None = None,
    ) -> None:
        self.tf_class, self.layer_kind, self.nodes = tf_class, layer_kind, tuple(nodes)
        self.sources, self.attributes = dict(sources), dict(attributes or {})
        self.step, self.step_sources = step, step_sources
        self.in_graph = in_graph
        self.dtype = next((source.dtype for source in self.sources.values()), "")
        self.weights = {role: source.name for role, source in self.sources.items()}
        """The name of each weight's source."""
        sizes = refusal or self._find_sizes()
        self.sizes = None if isinstance(sizes, str) else sizes
        self.refusal = plain(sizes) if isinstance(sizes, str) else None

    def _find_sizes(self) -> LayerSizes | str:
        """Return the sizes that the shapes of the weights have, or what is wrong with the weights."""
        main, tensors = self.main_weight, {tensor.name: tensor for tensor in self.tensors}
        for role, source in self.sources.items():
            if missing := [leaf[1:] for leaf in source.leaves if leaf[0] == "?"]:
                return f"{role} is the variable {missing[0]!r}, which is not in the checkpoint"
            if source.dtype not in FLOATS:
                return f"{role}, which is {source.name}, is of {source.dtype}; expected float32, float64 or float16"
            if source.dtype != self.dtype:
                return f"{role} is of {source.dtype}, and {main} of {self.dtype}"
        form, shape = tensors[main].shape, self.sources[main].shape
        rows, columns = shape if len(shape) == 2 else (0, 0)
        hidden, remainder = divmod(columns, len(block_sizes(form.split()[1], {"H": 1})))
        sizes = {"H": hidden}
        if "w_p" in self.sources:
            sizes["P"] = [0, *self.sources["w_p"].shape][-1]
        sizes["I"] = rows - sizes.get("P", hidden)
        if remainder or min(sizes.values()) < 1:
            expected = f"({form.replace(' ', ', ')})"
            return f"{main}, which is {self.weights[main]}, has shape {shape}; expected {expected}"
        for role, source in self.sources.items():
            needed = sizes_of(tensors[role].shape, sizes)
            if source.shape != needed:
                where = f"{role}, which is {self.weights[role]}"
                return f"{where}, has shape {source.shape}; expected {needed} beside {main} of shape {(rows, columns)}"
        return LayerSizes(sizes["I"], hidden, sizes.get("P", hidden))

    @property
    def _kind(self) -> _LayerKind:
        return _LAYER_KINDS["GRU that resets after" if self.attributes.get("reset_after") else self.layer_kind]

    @property
    def layer_class(self) -> type[LSTM | GRU | RNN]:
        """The class of the layer."""
        return self._kind.layer

    @property
    def main_weight(self) -> str:
        """The weight that tells the sizes and the dtype."""
        return self._kind.main

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The weights that a layer of this kind may have."""
        if self.layer_kind != "LSTM":
            return self._kind.op.weights
        return lstm_weights(bool(self.attributes.get("coupled")), "w_p" in self.sources)

    @property
    def state_names(self) -> tuple[str, ...]:
        """The names that layers have for the state: "h", or "cs" and "h"."""
        return ("cs", "h")[-sum(tensor.kind == "state" for tensor in self._kind.op.inputs) :]

    @property
    def state_sizes(self) -> tuple[int, ...]:
        """The sizes of cs, if there is one, and of h."""
        sizes = self.sizes[1:] if self.sizes else (0, 0)
        return sizes[-len(self.state_names) :]


def block_sizes(word: str, sizes: Mapping[str, int]) -> list[int]:
    """Return the sizes of the blocks of a dimension: ``"I+H"`` has two blocks, and ``"4H"`` four."""
    return [sizes[part[-1]] for part in word.split("+") for _ in range(int(part[:-1] or 1))]
