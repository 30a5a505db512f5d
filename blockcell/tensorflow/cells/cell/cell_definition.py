"""The definition of a cell: its class, weights and attributes, and how its nodes compute a step.

In come the sources of weights that a search found; out go the sizes of the layer that has these weights, or the reason
why there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ....errors import plain
from ....formulas import FORMULAS, lstm_layer
from ....gates import COUPLED_GATES, GATE_ORDERS
from ....layers import GRU, LSTM, RNN
from ....optable import OPS, Array, Op, Tensor, layer_sizes, lstm_weights, sizes_of
from ..graph.graph_reader import FLOATS, Place
from ..weights.weight_slices import WeightSource
from .layer_check import State, Weights

_LSTM_NUMBERS = ("forget_bias", "cell_clip", "proj_clip")
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
        default it is the formula of the layer
    in_graph : the places of its x, states and h; None in a bare checkpoint, and if it is refused for what it reads
    sizes, refusal : I, H and the size of h, which is another one with a projection; or the reason why there is no layer
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
        self.step, self.step_sources = step or self._formula_step, step_sources
        self.in_graph = in_graph
        self.dtype = next((source.dtype for source in self.sources.values()), "")
        self.weights = {role: source.name for role, source in self.sources.items()}
        sizes_or_refusal = refusal or self._find_sizes()
        self.sizes = None if isinstance(sizes_or_refusal, str) else sizes_or_refusal
        self.refusal = plain(sizes_or_refusal) if isinstance(sizes_or_refusal, str) else None

    def _find_sizes(self) -> tuple[int, int, int] | str:
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
        sizes = layer_sizes(form, shape, [0, *self.sources["w_p"].shape][-1] if "w_p" in self.sources else None)
        if sizes_of(form, sizes) != shape or min(sizes.values()) < 1:
            expected = f"({form.replace(' ', ', ')})"
            return f"{main}, which is {self.weights[main]}, has shape {shape}; expected {expected}"
        for role, source in self.sources.items():
            needed = sizes_of(tensors[role].shape, sizes)
            if source.shape != needed:
                where = f"{role}, which is {self.weights[role]}"
                return f"{where}, has shape {source.shape}; expected {needed} beside {main} of shape {shape}"
        return sizes["I"], sizes["H"], sizes.get("P", sizes["H"])

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

    def _formula_step(self, weights: Weights, x: Array, state: State, attributes: Mapping[str, Any]) -> State:
        """Compute a step by the formula of the layer."""
        op, arguments = self.layer_spec.op, dict[str, Any](weights)
        if self.layer_kind == "LSTM":
            arguments["gates"] = COUPLED_GATES if attributes.get("coupled") else GATE_ORDERS[attributes["gate_order"]]
            arguments |= {name: attributes[name] for name in _LSTM_NUMBERS if name in attributes}
            states = lstm_layer(x=x[None], cs_prev=state[0], h_prev=state[1], **arguments)
            return states.cs[0], states.h[0]
        arguments |= {attribute.name: attributes[attribute.name] for attribute in op.attributes}
        result = FORMULAS[op.name](seq_len_max=1, x=x[None], h_prev=state[0], **arguments)
        return (result.h[0],)
