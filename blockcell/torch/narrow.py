"""One layer of the stack with its weights in fewer bytes: an operator of PyTorch's, for inference, and what it packs.

Weights are packed by the first call that reads them, and anew by the first one after they have changed.  Modules keep
nothing of it, so that they are copied, saved and compiled like any other.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import _threads
from ..layers.packed import Packed
from ..optable import Array
from . import internals
from .op import Tensors, _dispatches

_FLOAT32, _INT64, _BOOL = np.dtype(np.float32), np.dtype(np.int64), np.dtype(np.bool_)
_NAMES = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")

_library = torch.library.Library("blockcell", "FRAGMENT")


class Op:
    """A layer of one kind, as the operator ``blockcell::lstm_narrow``, or a GRU's.

    The inputs are x, the weights in the order of torch.nn, whether there are two directions, the states, none where
    they are zero, the lengths of the rows, the resets [T,B], and ``storage`` and ``activations`` as of
    ``layer.packed``.

    Parameters
    ----------
    kind : str
    states : tuple of str
    """

    _suffixes = "", ""  # of the operator's and the module's name

    def __init__(self, kind: str, states: tuple[str, ...]) -> None:
        self.kind, self.states = kind.upper(), states
        name, self.module = (form + end for form, end in zip((kind, self.kind), self._suffixes, strict=True))
        inputs = "Tensor x, Tensor[] weights, bool bidirectional, Tensor[] states, Tensor? lengths, Tensor? reset"
        _library.define(f"{name}_narrow({inputs}, str storage, str activations) -> Tensor[]")
        _library.impl(f"{name}_narrow", self.forward, "CPU")
        torch.library.register_fake(f"blockcell::{name}_narrow", self._outputs, lib=_library)
        self._op = getattr(torch.ops.blockcell, f"{name}_narrow").default

    def __call__(
        self,
        x: Tensor,
        weights: Tensors,
        bidirectional: bool,
        states: Tensors,
        lengths: Tensor | None,
        reset: Tensor | None,
        storage: str,
        activations: str,
    ) -> Tensors:
        """y and the last states, without a gradient; an error if x or a state asks for one."""
        given, dispatches = (x, *states), _dispatches(x, weights, states, reset)
        if torch.is_grad_enabled() and any([tensor.requires_grad for tensor in given]):
            raise self._refusal("input or hx requires a gradient", storage, "compute under torch.no_grad(), or")
        if not torch.compiler.is_compiling() and internals.forward_mode_is_active():
            if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in given):
                raise self._refusal("input or hx has a forward-mode derivative", storage)
        if dispatches:
            with torch.no_grad():
                outputs: Tensors = self._op(x, weights, bidirectional, states, lengths, reset, storage, activations)
        elif internals.transforms_are_active():
            raise self._refusal("a transform of torch.func is at work", storage)
        else:
            outputs = self.forward(x, weights, bidirectional, states, lengths, reset, storage, activations)
        return outputs

    def _refusal(self, what: str, storage: str, mend: str = "for that") -> RuntimeError:
        return RuntimeError(
            f"blockcell.torch.{self.module}: {what}, and weights in {storage} are for inference alone;"
            f" {mend} call blockcell.torch.replace(model) without a storage"
        )

    def _outputs(
        self, x: Tensor, weights: Tensors, bidirectional: bool, states: Tensors, lengths: Any, *others: Any
    ) -> list[Tensor]:
        """What `forward` returns, without values."""
        (T, B, _), D, H = x.shape, 1 + bidirectional, weights[1].shape[1]
        return [x.new_empty(shape) for shape in ((T, B, D * H), *[(D, B, H)] * len(self.states))]

    def forward(
        self,
        x: Tensor,
        weights: Tensors,
        bidirectional: bool,
        states: Tensors,
        lengths: Tensor | None,
        reset: Tensor | None,
        storage: str,
        activations: str,
    ) -> list[Tensor]:
        """y and the last states."""
        packed = _packed(self.kind, self.module, weights, bidirectional, storage, activations)
        x_array, ends, first, fresh = _steps(x), None, None, None
        T, B, _ = x_array.shape
        _check("x", x_array, (T, B, packed.input_size), _FLOAT32)
        if lengths is not None:
            ends = np.ascontiguousarray(lengths.numpy())
            _check("lengths", ends, (B,), _INT64)
            if B and not 0 <= ends.min() <= ends.max() <= T:
                raise ValueError(f"blockcell: lengths are {ends.min()} to {ends.max()}; expected 0 to {T}, the steps")
        if reset is not None:
            fresh = np.ascontiguousarray(reset.numpy())
            _check("reset", fresh, (T, B), _BOOL)
        if states:
            D, H = 1 + bidirectional, packed.hidden_size
            arrays = [np.ascontiguousarray(state.numpy(force=True)) for state in states]
            for name, array in zip(self.states, arrays, strict=True):
                _check(name, array, (D, B, H), _FLOAT32)
            each = [tuple([array[k] for array in arrays[::-1]]) for k in range(D)]
            first = tuple(each) if bidirectional else each[0]
        y, last = packed._run(x_array, first, ends, fresh, _threads.num_threads(torch.get_num_threads()))
        lasts = [np.stack(both) for both in zip(*last, strict=True)] if bidirectional else [a[None] for a in last]
        return [torch.from_numpy(array) for array in (y, *lasts[::-1])]


class CellOp(Op):
    """A single step, as the operator ``blockcell::lstm_cell_narrow``: x is [B,I], and states, all that there is of
    results, are [B,H]."""

    _suffixes = "_cell", "Cell"

    def _outputs(
        self, x: Tensor, weights: Tensors, bidirectional: bool, states: Tensors, lengths: Any, *others: Any
    ) -> list[Tensor]:
        return [x.new_empty(x.shape[0], weights[1].shape[1]) for _ in self.states]

    def forward(self, x: Tensor, weights: Tensors, bidirectional: bool, states: Tensors, *others: Any) -> list[Tensor]:
        if bidirectional:
            raise ValueError("blockcell: a single step has one direction")
        _, *last = super().forward(x.unsqueeze(0), weights, False, [state.unsqueeze(0) for state in states], *others)
        return [state.squeeze(0) for state in last]


# ------------------------------------------------------------------------------------------------------ packed weights
class _Kept(NamedTuple):
    """A packed layer, and how its weights were: their version, and a tensor that shares or, without a version, copies
    their memory, which therefore no other weights can get."""

    packed: Packed
    versions: list[int | None]
    tensors: list[Tensor]
    ends: list[weakref.ref[Tensor]]
    """They remove this where one of the weights goes."""


_kept: dict[tuple[Any, ...], _Kept] = {}


def _packed(kind: str, module: str, weights: Tensors, bidirectional: bool, storage: str, activations: str) -> Packed:
    """The layer with these weights, from an earlier call if they have not changed since."""
    key = storage, activations, bidirectional, *map(id, weights)
    kept = _kept.get(key)
    if kept is not None and all(map(_is_unchanged, weights, kept.versions, kept.tensors)):
        return kept.packed
    from ..convert import from_torch  # only here, since it takes a while to import

    versions = [None if weight.is_inference() else weight._version for weight in weights]
    tensors = [weight.detach() for weight in weights]
    suffixes = ("", "_reverse")[: 1 + bidirectional]
    names = [name + suffix for suffix in suffixes for name in _NAMES[: len(weights) // len(suffixes)]]
    try:
        layer = from_torch(dict(zip(names, tensors, strict=True)))
        packed: Packed = layer.packed(storage, activations)
    except (TypeError, ValueError) as error:
        raise type(error)(f"blockcell.torch.{module}: its weights cannot be stored in {storage}: {error}") from error
    if {type(cell).__name__ for cell in layer._cells().values()} != {kind}:
        raise ValueError(f"blockcell.torch.{module}: the weights are those of {layer!r}")
    tensors = [tensor.clone() if version is None else tensor for tensor, version in zip(tensors, versions, strict=True)]
    end = partial(_kept.pop, key)
    _kept[key] = _Kept(packed, versions, tensors, [weakref.ref(weight, end) for weight in weights])
    return packed


def _is_unchanged(weight: Tensor, version: int | None, tensor: Tensor) -> bool:
    if version is None:  # PyTorch does not count the changes of a tensor that was made under inference_mode
        return bool(torch.equal(weight, tensor))
    return bool(weight._version == version and weight.is_set_to(tensor))


def _steps(tensor: Tensor) -> Array:
    """The memory of a tensor [T,B,.], with any strides but that of the last axis."""
    array: Array = tensor.numpy(force=True)
    return array if array.strides[2] == array.itemsize else np.ascontiguousarray(array)


def _check(name: str, array: Array, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Kernels read as far as shapes say, so an operator that is called by hand must not lie."""
    if array.shape != shape or array.dtype != dtype:
        raise ValueError(
            f"blockcell: {name} has shape {array.shape} and dtype {array.dtype}; expected {shape} and {dtype}"
        )


def forget(weights: Iterable[Tensor]) -> None:
    """Pack these weights anew at the next call, whether they have changed or not."""
    found = set(map(id, weights))
    for key in [*_kept]:
        if not found.isdisjoint(key):
            _kept.pop(key, None)


LSTM = Op("lstm", ("h", "c"))
GRU = Op("gru", ("h",))
LSTM_CELL = CellOp("lstm", ("h", "c"))
GRU_CELL = CellOp("gru", ("h",))
