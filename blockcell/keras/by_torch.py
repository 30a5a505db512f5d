"""A computation as a function of PyTorch, for Keras' backend "torch"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .computation import Computation


class _Compute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, computation: Computation, training: bool, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results, ctx.tape = computation.forward([tensor.detach().numpy() for tensor in tensors], training)
        ctx.computation, ctx.input_count = computation, len(tensors)
        return tuple(map(torch.from_numpy, results))

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *d_results: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grads = ctx.computation.backward(ctx.tape, [d_result.numpy() for d_result in d_results])
        mask_count = ctx.input_count - len(grads)
        return None, None, *map(torch.from_numpy, grads), *[None] * mask_count


def compute(computation: Computation, inputs: Sequence[Any], training: bool) -> list[Any]:
    """Return y and the last states, as tensors that know their gradients."""
    if inputs[0].device.type == "meta":  # Keras asks for the shapes alone, before it trains
        return [inputs[0].new_empty(shape) for shape in computation.result_shapes(inputs)]
    return [*_Compute.apply(computation, torch.is_grad_enabled(), *inputs)]
