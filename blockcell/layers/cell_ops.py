"""The passes of a layer's cells in the terms of the table of ops, for `onnx_export`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from ..activations import Activation, unusual
from ..optable import OPS, Op, Tensor
from .cell import Cell
from .lstm_gru import GRU, LSTM


class CellPass(NamedTuple):
    """A pass of a cell."""

    op: Op
    """A row like those of the table, with the gates and weights of the cell."""
    attrs: Mapping[str, float | bool | Activation]
    sizes: Mapping[str, int]
    """I, H and, with a projection, P."""


def _without_time(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    return tuple(replace(tensor, shape=tensor.shape.removeprefix("T ")) for tensor in tensors)


def _op_of_step(op: Op) -> Op:
    """Return a sequence's op without the time axis, as the op of a single step."""
    return replace(op, inputs=_without_time(op.inputs), outputs=_without_time(op.outputs))


RESET_AFTER, PLAIN = OPS["block_gru_reset_after"], OPS["block_rnn"]
OPS_OF = {
    "icfo": {"Step": OPS["LSTMBlockCell"], "": OPS["BlockLSTM"], "Grad": OPS["BlockLSTMGrad"]},
    "ifco": {"Step": OPS["LSTMBlockCell"], "": OPS["BlockLSTMV2"], "Grad": OPS["BlockLSTMGradV2"]},
    "before": {"Step": OPS["GRUBlockCell"], "": OPS["block_gru"], "Grad": OPS["block_gru_grad"]},
    "after": {"Step": _op_of_step(RESET_AFTER), "": RESET_AFTER, "Grad": OPS["block_gru_reset_after_grad"]},
    "plain": {"Step": _op_of_step(PLAIN), "": PLAIN, "Grad": OPS["block_rnn_grad"]},
}
"""The ops of a step, of all steps and of their gradient, by the order of an LSTM's gates, by where a GRU resets, and of
an RNN."""


def describe_cell(
    cell: Cell,
    pass_name: str,
    outputs: Collection[str] | None = None,
    last_states: Iterable[str] = (),
    unused: Collection[str] = (),
) -> CellPass:
    """Describe a pass of a cell; `pass_name` is "Step", "" for all steps, or "Grad", as in `OPS_OF`.

    `outputs` names outputs of the op, None all of them; `last_states` names states that are outputs after the last
    step; `unused` names inputs and outputs that are left out.
    """
    attrs: dict[str, float | bool | Activation] = {}
    if isinstance(cell, LSTM):
        ops = OPS_OF[cell.gate_order]
        attrs["use_peephole"] = "wcf" in cell.weights
        if pass_name != "Grad":
            attrs |= {"forget_bias": cell.forget_bias, "cell_clip": cell.cell_clip}
        if "w_p" in cell.weights:
            attrs["proj_clip"] = cell.proj_clip
    else:
        ops = OPS_OF[("after" if cell.reset_after else "before") if isinstance(cell, GRU) else "plain"]
    op = _with_weights_of(ops[pass_name], cell)
    shapes = {tensor.name: tensor.shape.removeprefix("T ") for tensor in op.outputs}
    selected = [tensor for tensor in op.outputs if outputs is None or tensor.name in outputs]
    selected += [Tensor(f"{name}_last", shapes[name], "output") for name in last_states]
    sides = ([tensor for tensor in tensors if tensor.name not in unused] for tensors in (op.inputs, selected))
    op_inputs, op_outputs = map(tuple, sides)
    sizes = {"I": cell.input_size, "H": cell.hidden_size}
    sizes |= {"P": cell.output_size} if "w_p" in cell.weights else {}
    return CellPass(replace(op, inputs=op_inputs, outputs=op_outputs), attrs | unusual(cell._activations), sizes)


def _with_weights_of(op: Op, cell: Cell) -> Op:
    """Return the op with the gates and weights of a cell, which may be an LSTM that is coupled or has a projection."""
    weights: dict[str, Tensor] = {tensor.name: tensor for tensor in cell._tensors if tensor.name in cell.weights}
    missing = {tensor.name for tensor in op.weights} - weights.keys()

    def with_cell_shape(tensor: Tensor) -> Tensor:
        if weight := weights.get(tensor.name.removesuffix("_grad")):
            return replace(tensor, shape=weight.shape)
        of_h = "w_p" in weights and tensor.name in ("h", "h_prev", "h_grad", "h_prev_grad")
        return replace(tensor, shape=tensor.shape.replace("H", "P")) if of_h else tensor

    inputs, outputs = (
        [with_cell_shape(tensor) for tensor in tensors if tensor.name.removesuffix("_grad") not in missing]
        for tensors in (op.inputs, op.outputs)
    )
    if "w_p" in weights:
        inputs.append(weights["w_p"])
        if "grad" in op.kernel:
            outputs.append(Tensor("w_p_grad", weights["w_p"].shape, "output"))
    return replace(op, gates=cell._gates, inputs=tuple(inputs), outputs=tuple(outputs))
