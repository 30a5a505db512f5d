"""The definition of a cell: its class, weights and attributes, and how its nodes compute a step.

In come the sources of weights that a search found; out go the sizes of the layer that has these weights, or the reason
why there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ....errors import plain
from ....formulas import FORMULAS
from ....layers import GRU, LSTM, RNN
from ....optable import OPS, Array, Op, Tensor, lstm_weights, sizes_of
from ..graph.graph_reader import FLOATS, Place
from ..weights.weight_sources import WeightSource
from .layer_check import State, Weights

StepFunction = Callable[[Weights, Array, State, Mapping[str, Any]], State]
"""Computes one step in float64, from weights, x, the state (h, or cs and h) and attributes to the next state."""


class LayerSpec(NamedTuple):
    """The class, the op and the main weight of a layer."""

    layer_class: type[LSTM | GRU | RNN]
    op: Op
    main_weight: str
    """The weight that tells the sizes and the dtype."""


LAYER_SPECS = {
    "LSTM": LayerSpec(LSTM, OPS["BlockLSTM"], "w"),
    "GRU": LayerSpec(GRU, OPS["block_gru"], "w_c"),
    "GRU that resets after": LayerSpec(GRU, OPS["block_gru_reset_after"], "w_c"),
    "RNN": LayerSpec(RNN, OPS["block_rnn"], "w"),
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
    results: tuple[Place, ...]
    """The states after the step."""
    all_steps: bool = False
    """Whether the node is an op that runs over all steps."""

    @property
    def h(self) -> Place:
        """The place of h after the step."""
        return self.results[-1]

    @property
    def state(self) -> Place | None:
        """The place of h before the step; None for an op that runs over all steps."""
        return None if self.all_steps else self.states[-1]


class CellDefinition:
    """A cell as a search defines it, before it has a name and is connected with other cells.

    tf_class : an op such as "BlockLSTM", or a class such as "BasicLSTMCell"
    layer_kind : "LSTM", "GRU" or "RNN"
    nodes : the node that it is, or its last one; empty in a bare checkpoint
    sources : each weight of the layer
    attributes : those of the layer; None is what the file does not say
    step : computes what the nodes do, with the weights `step_sources`, or with those of the layer if these are None; by
        default it is the formula of the layer's op
    in_graph : the places of its x, states and h; None in a bare checkpoint, and if it is refused for what it reads
    sizes, refusal : the sizes of the layer, or the reason why there is none
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
        self.layer_spec = LAYER_SPECS["GRU that resets after" if self.attributes.get("reset_after") else layer_kind]
        self.step, self.step_sources = step or formula_step(self.layer_spec.op), step_sources
        self.in_graph = in_graph
        self.dtype = next((source.dtype for source in self.sources.values()), "")
        self.weights = {role: source.name for role, source in self.sources.items()}
        sizes_or_refusal = refusal or self._find_sizes()
        self.sizes = None if isinstance(sizes_or_refusal, str) else sizes_or_refusal
        self.refusal = plain(sizes_or_refusal) if isinstance(sizes_or_refusal, str) else None

    def _find_sizes(self) -> LayerSizes | str:
        """Return the sizes that the shapes of the weights have, or what is wrong with the weights."""
        main, tensors = self.layer_spec.main_weight, {tensor.name: tensor for tensor in self.tensors}
        for role, source in self.sources.items():
            if missing := [leaf[1:] for leaf in source.leaves if leaf[0] == "?"]:
                return f"{role} is the variable {missing[0]!r}, which is not in the checkpoint"
            if source.dtype not in FLOATS:
                return f"{role}, which is {source.name}, is of {source.dtype}; expected float32, float64 or float16"
            if source.dtype != self.dtype:
                return f"{role} is of {source.dtype}, and {main} of {self.dtype}"
        form, shape = tensors[main].shape, self.sources[main].shape
        rows, columns = shape if len(shape) == 2 else (0, 0)
        [gates] = sizes_of(form.split()[1], {"H": 1})
        hidden, remainder = divmod(columns, gates)
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
    def tensors(self) -> tuple[Tensor, ...]:
        """The weights that a layer of this kind may have."""
        if self.layer_kind != "LSTM":
            return self.layer_spec.op.weights
        return lstm_weights(bool(self.attributes.get("coupled")), "w_p" in self.sources)

    @property
    def state_sizes(self) -> dict[str, int]:
        """The sizes of the state, by the names that layers have for it: "h", or "cs" and "h"."""
        _, hidden, output = self.sizes or (0, 0, 0)
        count = sum(tensor.kind == "state" for tensor in self.layer_spec.op.inputs)
        return {"cs": hidden, "h": output} if count == 2 else {"h": output}


def formula_step(op: Op) -> StepFunction:
    """Return the function that computes a step by the formula of an op."""
    formula = FORMULAS[op.name]

    def step(weights: Weights, x: Array, state: State, attributes: Mapping[str, Any]) -> State:
        """Compute a step by the formula of the op, in the order of the op's inputs."""
        arguments: dict[str, Any] = dict(weights)
        arguments |= {attribute.name: attributes[attribute.name] for attribute in op.attributes}
        names = [tensor.name for tensor in op.inputs if tensor.name.endswith("_prev")]
        arguments |= dict(zip(names, state, strict=True))
        if op.sequence:
            result = formula(seq_len_max=1, x=x[None], **arguments)
            return tuple(getattr(result, name.removesuffix("_prev"))[0] for name in names)
        result = formula(x=x, **arguments)
        return tuple(getattr(result, name.removesuffix("_prev")) for name in names)

    return step


def block_sizes(word: str, sizes: Mapping[str, int]) -> list[int]:
    """Return the sizes of the blocks of a dimension: ``"I+H"`` has two blocks, and ``"4H"`` four."""
    return [sizes[part[-1]] for part in word.split("+") for _ in range(int(part[:-1] or 1))]
