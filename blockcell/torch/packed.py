"""PackedSequences as padded tensors and back, by one index, and step masks of resets; torch.compile can trace both."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..layers.shared import FINISHED, INITIAL, RESET


class Packing:
    """How the rows of a PackedSequence, the longest one first, lie in a tensor [T,B,.].

    Parameters
    ----------
    batch_sizes : Tensor (T,)
        Of a PackedSequence.
    count : int
        The sum of the batch sizes.
    B : int
        The first of them.
    """

    def __init__(self, batch_sizes: Tensor, count: int, B: Any) -> None:
        T, B = self.sizes = len(batch_sizes), int(B)
        self.step_mask: Tensor | None = None
        """The step mask of `blockcell._layers.step_mask_of` in both directions; None if all rows are of one length."""
        if count == T * B:
            return
        is_finished = torch.arange(B, device="cpu") >= batch_sizes[:, None]
        self.index = (~is_finished).view(-1).nonzero_static(size=count).view(-1)
        fw = is_finished.to(torch.uint8) * FINISHED
        bw = fw.add(torch.cat([fw[1:], fw.new_ones(1, B)]) - fw, alpha=INITIAL // FINISHED)
        fw[0] = INITIAL
        self.step_mask = torch.stack([fw, bw])

    def lengths(self) -> Tensor | None:
        """Return the lengths of the rows; None if all rows are of one length."""
        return None if self.step_mask is None else (self.step_mask[0] != FINISHED).sum(0)

    def pad(self, data: Tensor) -> Tensor:
        """Return data [N,.] as [T,B,.], with zeros behind the rows."""
        T, B = self.sizes
        if self.step_mask is not None:
            data = _pad(data, self.index, T * B)
        return data.reshape(T, B, data.shape[1])

    def pack(self, padded: Tensor) -> Tensor:
        """Return the rows of [T,B,.] as [N,.]."""
        rows = padded.view(-1, padded.shape[2])
        return rows if self.step_mask is None else _Pack.apply(rows, self.index)


def _pad(data: Tensor, index: Tensor, rows: int) -> Tensor:
    return data.new_zeros(rows, data.shape[1]).index_copy_(0, index, data)


class _Pack(torch.autograd.Function):
    """``padded[index]``, whose own gradient would be summed up, as if the index could repeat."""

    @staticmethod
    def forward(padded: Tensor, index: Tensor) -> Any:
        return padded.index_select(0, index)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.rows = len(inputs[0])
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return _pad(grad, ctx.saved_tensors[0], ctx.rows), None


def step_mask_of(reset: Tensor) -> Tensor:
    """Return the step mask of resets [T,B] in both directions.

    The step that is processed first needs no flag where no row ends.
    """
    flags = reset.to(torch.uint8) * RESET
    steps = torch.cat([flags, flags.new_zeros(1, reset.shape[1])])  # the other direction has that of the step after
    return torch.stack([steps[:-1], steps[1:]])
