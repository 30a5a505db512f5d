"""One quantized layer of the stack: an operator of PyTorch's, for inference, and the layers that it quantizes.

Weights are quantized by the first call that reads them, and anew by the first one after they have changed.  Modules
keep nothing of it, so that they are copied, saved and compiled like any other.
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
from .._tensors import array_of, hold_storage
from ..argument_reader import rows_as_kernels_take
from ..layers import Quantized
from . import internals, op
from .op import Tensors, check_count, check_rank, check_tensors, layout_of_weights, needs_dispatcher
from .step_mask import expected_lengths, read_lengths, read_reset

_NAMES = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")

_library = torch.library.Library("blockcell", "FRAGMENT")


class QuantizedOp:
    """A layer of one kind, as the operator ``blockcell::lstm_quantized``, or a GRU's.

    The inputs are x, the weights in the order of torch.nn, whether there are two directions, the states, none where
    they are zero, the lengths of the rows, the resets [T,B], the scheme as of ``layer.quantize``, and the states at
    resets, as `op.LayerOp` has them.

    Parameters
    ----------
    kind : str
    exact : op.LayerOp
        The operator with float32 weights, of a sequence.
    """

    _suffixes = "", ""  # of the operator's and the module's name

    def __init__(self, kind: str, exact: op.LayerOp) -> None:
        self.states, self._exact = exact.states, exact
        name, self.module = (form + end for form, end in zip((kind, kind.upper()), self._suffixes, strict=True))
        inputs = "Tensor x, Tensor[] weights, bool bidirectional, Tensor[] states, Tensor? lengths, Tensor? reset"
        _library.define(f"{name}_quantized({inputs}, str scheme, Tensor[]? reset_states=None) -> Tensor[]")
        _library.impl(f"{name}_quantized", self.forward, "CPU")
        fake = partial(self.forward, has_values=False)
        torch.library.register_fake(f"blockcell::{name}_quantized", fake, lib=_library)
        self._op = getattr(torch.ops.blockcell, f"{name}_quantized").default

    def __call__(
        self,
        x: Tensor,
        weights: Tensors,
        bidirectional: bool,
        states: Tensors,
        lengths: Tensor | None,
        reset: Tensor | None,
        scheme: str,
        reset_states: Tensors = (),
    ) -> Tensors:
        """Compute y and the last states, without a gradient; refuse an x or a state that asks for one."""
        inputs = x, *states, *reset_states
        dispatches = needs_dispatcher(x, weights, (*states, *reset_states), reset)
        if torch.is_grad_enabled() and any([tensor.requires_grad for tensor in inputs]):
            raise self._refusal("input or hx requires a gradient", scheme, "compute under torch.no_grad(), or")
        if not torch.compiler.is_compiling() and internals.forward_mode_is_active():
            if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in inputs):
                raise self._refusal("input or hx has a forward-mode derivative", scheme)
        if dispatches:
            op.refuse_onnx_export(self.module)
            with torch.no_grad():
                outputs: Tensors = self._op(x, weights, bidirectional, states, lengths, reset, scheme, reset_states)
        elif internals.transforms_are_active():
            raise self._refusal("a transform of torch.func is at work", scheme)
        else:
            outputs = self.forward(x, weights, bidirectional, states, lengths, reset, scheme, reset_states)
        return outputs

    def _refusal(self, reason: str, scheme: str, advice: str = "for that") -> RuntimeError:
        return RuntimeError(
            f"blockcell.torch.{self.module}: {reason}, and weights quantized to {scheme} are for inference alone;"
            f" {advice} call blockcell.torch.replace(model) without quantize"
        )

    def _check_weights(self, weights: Tensors, bidirectional: bool) -> int:
        """Refuse weights of other shapes or dtypes; return H."""
        check_rank("w_ih", weights[0].shape, f"({self._exact.gates} H, I)")
        check_rank("w_hh", weights[1].shape, f"({self._exact.gates} H, H)")
        H: int = weights[1].shape[1]
        sizes = op.LayerSizes(0, 0, weights[0].shape[1], H, H)
        self._exact.check_weights(weights, sizes, layout_of_weights(len(weights), bidirectional), torch.float32)
        return H

    def forward(
        self,
        x: Tensor,
        weights: Tensors,
        bidirectional: bool,
        states: Tensors,
        lengths: Tensor | None,
        reset: Tensor | None,
        scheme: str,
        reset_states: Tensors = (),
        has_values: bool = True,
    ) -> list[Tensor]:
        """Compute y and the last states; of tensors without values the results have none either."""
        check_rank("x", x.shape, "(T, B, I)")
        check_count("weights", len(weights), [2 + 2 * bidirectional, 4 + 4 * bidirectional])
        if has_values:
            layer = _layer_of(self, weights, bidirectional, scheme)
            I, H = layer.input_size, layer.hidden_size  # noqa: E741
        else:
            op.refuse_onnx_export(self.module)
            H, I = self._check_weights(weights, bidirectional), weights[0].shape[1]  # noqa: E741
        (T, B, _), D = x.shape, 1 + bidirectional
        sizes = op.LayerSizes(T, B, I, H, H)
        resets = ("reset", reset, (T, B), torch.bool)
        check_tensors([("x", x, (T, B, I), torch.float32), expected_lengths(lengths, B), resets])
        self._exact.check_states(sizes, D, torch.float32, states, reset_states, reset is not None)
        if not has_values:
            return [x.new_empty(shape) for shape in ((T, B, D * H), *[(D, B, H)] * len(self.states))]
        x_array, initial_state = array_of("x", x), None
        if x_array.strides[2] != x_array.itemsize:
            x_array = np.ascontiguousarray(x_array)
        row_lengths = None if lengths is None else read_lengths(lengths, T, B)
        reset_array = None if reset is None else read_reset(reset, T, B)
        if states:
            arrays = [np.ascontiguousarray(array_of(*pair)) for pair in zip(self.states, states, strict=True)]
            directions = [tuple([array[d] for array in arrays[::-1]]) for d in range(D)]  # h is last
            initial_state = tuple(directions) if bidirectional else directions[0]
        named = zip(self.states, reset_states, strict=False)
        rows = [rows_as_kernels_take(array_of(f"{name}_reset", state), x_array.dtype) for name, state in named]
        threads = _threads.num_threads(torch.get_num_threads())
        reset_state = tuple(rows[::-1]) or None
        y, last = layer._compute(x_array, initial_state, row_lengths, reset_array, threads, reset_state)
        last_states = [np.stack(both) for both in zip(*last, strict=True)] if bidirectional else [a[None] for a in last]
        return [torch.from_numpy(array) for array in (y, *last_states[::-1])]


class QuantizedCellOp(QuantizedOp):
    """A single step, as the operator ``blockcell::lstm_cell_quantized``: x is [B,I], and states, all that there is of
    results, are [B,H]."""

    _suffixes = "_cell", "Cell"

    def forward(
        self, x: Tensor, weights: Tensors, bidirectional: bool, states: Tensors, *others: Any, **options: Any
    ) -> list[Tensor]:
        if bidirectional:
            raise ValueError("blockcell: a single step has one direction")
        check_rank("x", x.shape, "(B, I)")
        for name, state in zip(self.states, states, strict=False):
            check_rank(name, state.shape, "(B, H)")
        for name, tensor in zip(("x", *self.states), (x, *states), strict=False):
            if options.get("has_values", True):
                hold_storage(name, tensor)  # in our words; `unsqueeze` has its own
        steps = x.unsqueeze(0), weights, False, [state.unsqueeze(0) for state in states]
        outputs = super().forward(*steps, *others, **options)
        return [state.squeeze(0) for state in outputs[1:]]


# ---------------------------------------------------------------------------------------------------- quantized layers
class _CachedLayer(NamedTuple):
    """A quantized layer, and how its weights were: their version, and a tensor that shares or, without a version,
    copies their memory, which therefore no other weights can get."""

    layer: Quantized
    versions: list[int | None]
    tensors: list[Tensor]
    finalizers: list[weakref.ref[Tensor]]
    """References that remove this from the cache where one of the weights goes."""


_cache: dict[tuple[Any, ...], _CachedLayer] = {}


def _layer_of(owner: QuantizedOp, weights: Tensors, bidirectional: bool, scheme: str) -> Quantized:
    """Return the quantized layer with these weights, from an earlier call if they have not changed since."""
    key = scheme, bidirectional, *map(id, weights)
    cached = _cache.get(key)
    if cached is not None and all(map(_is_as_before, weights, cached.versions, cached.tensors)):
        return cached.layer
    from ..convert import from_torch  # only here, since it takes a while to import

    owner._check_weights(weights, bidirectional)
    versions = [None if weight.is_inference() else weight._version for weight in weights]
    tensors = [weight.detach() for weight in weights]
    suffixes = ("", "_reverse")[: 1 + bidirectional]
    names = [name + suffix for suffix in suffixes for name in _NAMES[: len(weights) // len(suffixes)]]
    for name, tensor in zip(names, tensors, strict=True):
        hold_storage(name, tensor)
    try:
        layer: Quantized = from_torch(dict(zip(names, tensors, strict=True)), check=False).quantize(scheme)
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"blockcell.torch.{owner.module}: its weights cannot be quantized to {scheme}: {error}"
        ) from error
    tensors = [tensor.clone() if version is None else tensor for tensor, version in zip(tensors, versions, strict=True)]
    remove = partial(_cache.pop, key)
    _cache[key] = _CachedLayer(layer, versions, tensors, [weakref.ref(weight, remove) for weight in weights])
    return layer


def _is_as_before(weight: Tensor, old_version: int | None, old_tensor: Tensor) -> bool:
    """Return whether a weight is as it was when a `_CachedLayer` with this version and tensor was made."""
    if old_version is None:  # PyTorch does not count the changes of a tensor that was made under inference_mode
        hold_storage("a weight", weight)
        return bool(torch.equal(weight, old_tensor))
    # Of a tensor that is to be negated, `is_set_to` would read all memory before `hold_storage` has looked at it.
    return bool(weight._version == old_version and not weight.is_neg() and weight.is_set_to(old_tensor))


def forget(weights: Iterable[Tensor]) -> None:
    """Quantize these weights anew at the next call, whether they have changed or not."""
    ids = set(map(id, weights))
    for key in [*_cache]:
        if not ids.isdisjoint(key):
            _cache.pop(key, None)


LSTM = QuantizedOp("lstm", op.LSTM)
GRU = QuantizedOp("gru", op.GRU)
LSTM_CELL = QuantizedCellOp("lstm", op.LSTM)
GRU_CELL = QuantizedCellOp("gru", op.GRU)
