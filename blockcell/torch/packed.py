"""PackedSequences as padded tensors and back, by one index; torch.compile can trace it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


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
        self.lengths: Tensor | None = None
        """The lengths of the rows; None if all rows are of one length."""
        if count == T * B:
            return
        is_active = torch.arange(B, device="cpu") < batch_sizes[:, None]
        self.index = is_active.view(-1).nonzero_static(size=count).view(-1)
        self.lengths = is_active.sum(0)

    def pad(self, data: Tensor) -> Tensor:
        """Return data [N,.] as [T,B,.]. Nothing is written behind the rows, where kernels do not read."""
        T, B = self.sizes
        if self.lengths is not None:
            data = _pad(data, self.index, T * B)
        return data.reshape(T, B, data.shape[1])

    def pack(self, padded: Tensor) -> Tensor:
        """Return the rows of [T,B,.] as [N,.]."""
        rows = padded.view(-1, padded.shape[2])
        return rows if self.lengths is None else _Pack.apply(rows, self.index)


def _pad(data: Tensor, index: Tensor, rows: int) -> Tensor:
    return data.new_empty(rows, data.shape[1]).index_copy_(0, index, data)


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
