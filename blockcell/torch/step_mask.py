"""Lengths and resets as step masks, which the kernels read: an operator of PyTorch's, ``blockcell::step_mask``."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from .._layers import check_lengths, step_mask_of
from .._tensors import array_of
from ..optable import Array
from . import internals
from .op import Expected, check_rank, check_tensors, needs_dispatcher

_library = torch.library.Library("blockcell", "FRAGMENT")


def make_step_mask(x: Tensor, lengths: Tensor | None, reset: Tensor | None) -> Tensor:
    """Return the step masks [2,T,B] of both directions (`blockcell._layers.step_mask_of`) of lengths, resets or both.

    Parameters
    ----------
    x : Tensor (T, B, I)
        Only for its sizes, which ``torch.jit.trace`` would record as constants.
    lengths : Tensor (B,) of int64 or uint64, optional
        0 to T each; others are refused where the mask is computed, so by compiled and exported programs, too.
    reset : Tensor (T, B) of bool, optional
    """
    tensors = [tensor for tensor in (lengths, reset) if tensor is not None]
    if needs_dispatcher(x, tensors, (), None) or internals.transforms_are_active():
        step_mask: Tensor = torch.ops.blockcell.step_mask.default(x, lengths, reset)
        return step_mask
    return _compute(x, lengths, reset)


def _compute(x: Tensor, lengths: Tensor | None, reset: Tensor | None, has_values: bool = True) -> Tensor:
    """Compute the step masks; of tensors without values they have none either."""
    check_rank("x", x.shape, "(T, B, I)")
    T, B, _ = x.shape
    if not has_values:
        check_tensors([expected_lengths(lengths, B), ("reset", reset, (T, B), torch.bool)])
        return x.new_empty((2, T, B), dtype=torch.uint8)
    row_lengths = None if lengths is None else read_lengths(lengths, T, B)
    resets = None if reset is None else read_reset(reset, T, B)
    if row_lengths is None and resets is None:
        raise ValueError("blockcell: there are neither lengths nor resets")
    return torch.from_numpy(np.array([step_mask_of(T, B, row_lengths, resets, reverse) for reverse in (False, True)]))


def expected_lengths(lengths: Tensor | None, B: int) -> Expected:
    """Return what `check_tensors` needs to refuse lengths that are not int64 or uint64, [B]."""
    is_unsigned = lengths is not None and lengths.dtype == torch.uint64
    return "lengths", lengths, (B,), torch.uint64 if is_unsigned else torch.int64


def read_lengths(lengths: Tensor, T: int, B: int) -> Array:
    """Return lengths [B] as an array of int64 without gaps; refuse others than 0 to T."""
    check_tensors([expected_lengths(lengths, B)])
    array = np.ascontiguousarray(array_of("lengths", lengths))
    row_lengths = array.view(np.int64)  # of unsigned ones, those that do not fit become negative
    check_lengths("blockcell", row_lengths, T, array)
    return row_lengths


def read_reset(reset: Tensor, T: int, B: int) -> Array:
    """Return resets [T,B] as an array of bool without gaps."""
    check_tensors([("reset", reset, (T, B), torch.bool)])
    return np.ascontiguousarray(array_of("reset", reset))


_library.define("step_mask(Tensor x, Tensor? lengths, Tensor? reset) -> Tensor")
_library.impl("step_mask", _compute, "CPU")
torch.library.register_fake("blockcell::step_mask", partial(_compute, has_values=False), lib=_library)
