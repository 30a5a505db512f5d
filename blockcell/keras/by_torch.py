"""A computation as a function of PyTorch, for Keras' backend "torch"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .computation import Computation


class _Compute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, computation: Computation, mask: Any, training: bool, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        x, *others = (tensor.detach().numpy() for tensor in tensors)
        states, weights = others[: computation.state_count], others[computation.state_count :]
        mask = None if mask is None else mask.numpy()
        results, ctx.tape = computation.forward(x, mask, states, weights, training)
        ctx.computation = computation
        return tuple(map(torch.from_numpy, results))

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *d_results: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grads = ctx.computation.backward(ctx.tape, [d_result.numpy() for d_result in d_results])
        return None, None, None, *map(torch.from_numpy, grads)


def compute(
    computation: Computation, x: Any, mask: Any, states: Sequence[Any], weights: Sequence[Any], training: bool
) -> list[Any]:
    """Return y and the last states, as tensors that know their gradients."""
    if x.device.type == "meta":  # Keras asks for the shapes alone, before it trains
        return [x.new_empty(computation.y_shape(x, len(weights[1]))), *map(torch.empty_like, states)]
    return [*_Compute.apply(computation, mask, torch.is_grad_enabled(), x, *states, *weights)]


def device(weight: Any) -> str:
    """Return where Keras computes: "cpu", or another place."""
    return str(weight.device.type)
