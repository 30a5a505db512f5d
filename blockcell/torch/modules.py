"""The modules that stand in for ``torch.nn.LSTM`` and ``torch.nn.GRU``."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Proxy
from torch.nn.modules.rnn import RNNBase
from torch.nn.utils.rnn import PackedSequence

from . import narrow, op
from .packed import Packing


class Recurrent(RNNBase):
    """What `LSTM` and `GRU` have in common.

    They do not derive from PyTorch's LSTM and GRU, into which torch.compile refuses to look, but have the same base:
    that has parameters and their initial values, the checks of the constructor's arguments, repr and pickling.
    """

    _op: ClassVar[op.Op]
    _narrow_op: ClassVar[narrow.Op]
    storage: str | None = None  # what `replace` was given; set there
    activations: str = "float32"

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        mode = self._op.name.upper()
        if proj_size:
            raise ValueError(f"{_caller(mode)}: proj_size is {proj_size}; expected 0, or use torch.nn.{mode}")
        place = torch.get_default_device() if device is None else torch.device(device)
        if place.type not in ("cpu", "meta"):
            raise ValueError(f"{_caller(mode)}: device is {place}; expected cpu, or use torch.nn.{mode}")
        _check_dtype(mode, "dtype is", torch.get_default_dtype() if dtype is None else dtype)
        options = num_layers, bias, batch_first, dropout, bidirectional, 0, device, dtype
        super().__init__(mode, input_size, hidden_size, *options)

    def forward(self, input: Any, hx: Any = None) -> Any:
        """As that of torch.nn.LSTM and torch.nn.GRU."""
        given = input.data if isinstance(input, PackedSequence) else input
        if not isinstance(given, Tensor):
            if isinstance(given, Proxy) and (path := given.tracer.path_of_module(self)):
                # a leaf of the graph that torch.fx traces, as torch.nn's modules are
                return given.tracer.create_proxy("call_module", path, (given,) if hx is None else (given, hx), {})
            kind = type(given).__name__
            raise TypeError(f"{_caller(self.mode)}: input is of type {kind}; expected a tensor or a PackedSequence")
        weights = self._weights()
        x = self._cast("input", given, weights[0][0])
        dims, is_packed = x.dim(), isinstance(input, PackedSequence)
        if is_packed and dims != 2:
            raise RuntimeError(f"input must have 2 dimensions, got {dims}")
        if dims not in (2, 3):
            raise ValueError(f"{self.mode}: Expected input to be 2D or 3D, got {dims}D instead")
        if x.shape[-1] != self.input_size:
            sizes = f"Expected {self.input_size}, got {x.shape[-1]}"
            raise RuntimeError(f"input.size(-1) must be equal to input_size. {sizes}")
        if is_packed:
            return self._packed(input, x, weights, hx)
        is_batched = dims == 3
        if not is_batched:
            x = x.unsqueeze(1)
        elif self.batch_first:
            x = x.transpose(0, 1)
        if x.shape[0] == 0:
            raise RuntimeError("Expected sequence length to be larger than 0 in RNN")
        states = self._states(hx, x, weights, is_batched)
        y, lasts = self._run(x, None, weights, states, self._narrower(given, hx, x, False))
        if not is_batched:
            y, lasts = y.squeeze(1), [last.squeeze(1) for last in lasts]
        elif self.batch_first:
            y = y.transpose(0, 1)
        return y, self._like_hx(lasts)

    def _packed(self, sequences: PackedSequence, data: Tensor, weights: list[op.Tensors], hx: Any) -> Any:
        """`forward` of a PackedSequence with these data."""
        batch_sizes, to_sorted, from_sorted = sequences[1:]
        packing = Packing(batch_sizes, len(data), batch_sizes[0] if to_sorted is None else len(to_sorted))
        x = packing.pad(data)
        states = self._states(hx, x, weights, True)
        if to_sorted is not None:
            states = [state.index_select(1, to_sorted) for state in states]
        y, lasts = self._run(x, packing, weights, states, self._narrower(sequences.data, hx, x, True))
        if from_sorted is not None:
            lasts = [last.index_select(1, from_sorted) for last in lasts]
        return PackedSequence(packing.pack(y), *sequences[1:]), self._like_hx(lasts)

    def _run(
        self,
        x: Tensor,
        packing: Packing | None,
        weights: list[op.Tensors],
        states: list[Tensor],
        dtype: torch.dtype | None,
    ) -> tuple[Tensor, list[Tensor]]:
        """y of the last layer [T,B,D*H], and the last states of all [L*D,B,H], rounded to a dtype if one is given."""
        count, D = self.num_layers, 2 if self.bidirectional else 1
        marks = None if packing is None else packing.marks
        if self.storage is not None:
            self._check_inference(weights)
            lengths = None if packing is None else packing.lengths()
        lasts = []
        for layer in range(count):
            first = [s[layer * D : (layer + 1) * D] for s in states] if count > 1 else states
            if self.storage is not None:
                stored = self.storage, self.activations
                x, *last = self._narrow_op(x, weights[layer], self.bidirectional, first, lengths, *stored)
            else:
                apart = layer == count - 1 and marks is None and dtype is None  # callers get this y, not a copy of it
                x, *last = self._op(x, weights[layer], self.bidirectional, apart, first, marks)
            lasts.append(last)
            if self.training and self.dropout and layer < count - 1:
                if packing is None:
                    x = torch.nn.functional.dropout(x, self.dropout)
                else:  # only of what is there, so that the same numbers are drawn as by torch.nn
                    x = packing.pad(torch.nn.functional.dropout(packing.pack(x), self.dropout))
        every_last = lasts[0] if count == 1 else [torch.cat(parts) for parts in zip(*lasts, strict=True)]
        return (x, every_last) if dtype is None else (x.to(dtype), [last.to(dtype) for last in every_last])

    def _apply(self, *arguments: Any, **options: Any) -> Any:
        narrow.forget(self._parameters.values())  # to another dtype, say; some ways there take no weak references
        return super()._apply(*arguments, **options)

    def extra_repr(self) -> str:
        stored: str = super().extra_repr()
        if self.storage is not None:
            stored += f", storage={self.storage!r}"
        if self.activations != "float32":
            stored += f", activations={self.activations!r}"
        return stored

    # -------------------------------------------------------------------------------------------------------- arguments
    def _weights(self) -> list[op.Tensors]:
        """The weights of each layer, by name at each call: parametrizations and functional_call replace them."""
        parameters = self._parameters
        each: list[Any] = [
            [parameters[name] if name in parameters else getattr(self, name) for name in names]
            for names in self._all_weights
        ]
        return [each[k] + each[k + 1] for k in range(0, len(each), 2)] if self.bidirectional else each

    def _check_inference(self, weights: list[op.Tensors]) -> None:
        """Refuse what weights in fewer bytes are not for."""
        dtype, caller = weights[0][0].dtype, _caller(self.mode)
        if dtype != torch.float32:
            expected = "expected torch.float32: call model.float(), or blockcell.torch.replace(model) without a storage"
            raise TypeError(f"{caller}: storage is {self.storage!r} and the weights are {dtype}; {expected}")
        if self.training and torch.is_grad_enabled() and any([w.requires_grad for each in weights for w in each]):
            raise RuntimeError(
                f"{caller}: it is in training mode with gradients enabled, and weights in {self.storage}, which are"
                " rounded, have no gradient; for inference call model.eval(), or compute under torch.no_grad(); to"
                " train call blockcell.torch.replace(model) without a storage"
            )

    def _cast(self, what: str, tensor: Tensor, weight: Any) -> Tensor:
        """The tensor, on the CPU and of the weights' dtype."""
        if not (tensor.is_cpu and weight.is_cpu):
            where = f"{what} is on {tensor.device}, the weights on {weight.device}"
            raise ValueError(f"{_caller(self.mode)}: {where}; expected cpu, or use torch.nn.{self.mode}")
        _check_dtype(self.mode, "the weights are", weight.dtype)
        if tensor.dtype == weight.dtype:
            return tensor
        if torch.is_autocast_enabled("cpu"):
            return tensor.to(weight.dtype)
        raise ValueError(
            f"RNN {what} dtype ({tensor.dtype}) does not match weight dtype ({weight.dtype}). Convert {what}:"
            f" {what}.to({weight.dtype}), or convert model: model.to({tensor.dtype})"
        )

    def _narrower(self, given: Tensor, hx: Any, x: Tensor, is_packed: bool) -> torch.dtype | None:
        """The dtype of torch.nn's results under autocast, where it is narrower than what x was cast to; else None."""
        if not torch.is_autocast_enabled("cpu") or x.dtype != torch.float32:
            return None
        dtype, is_lstm = torch.get_autocast_dtype("cpu"), len(self._op.states) == 2
        if not is_lstm or is_packed or given.dtype == torch.float16:  # only its products are in autocast's dtype then
            state = given if hx is None else hx[0] if is_lstm else hx
            dtype = torch.promote_types(dtype, state.dtype)
        return dtype if dtype.itemsize < x.dtype.itemsize else None

    def _states(self, hx: Any, x: Tensor, weights: list[op.Tensors], is_batched: bool) -> list[Tensor]:
        """hx as a list, [L*D,B,H] each; none if there is no hx."""
        names = self._op.states
        if hx is None:
            return []
        given = (hx,) if len(names) == 1 else hx
        if not (
            isinstance(given, (tuple, list)) and len(given) == len(names) and all(isinstance(s, Tensor) for s in given)
        ):
            form = "a tensor" if len(names) == 1 else "a pair of tensors (h_0, c_0)"
            raise TypeError(f"{_caller(self.mode)}: hx is of type {type(hx).__name__}; expected {form}")
        sizes = self.num_layers * (2 if self.bidirectional else 1), x.shape[1], self.hidden_size
        expected = sizes if is_batched else sizes[::2]
        states: list[Tensor] = []
        for k, state in enumerate(given):
            if state.shape != expected:
                number = f"[{k}]" if len(names) > 1 else ""
                raise RuntimeError(f"Expected hidden{number} size {tuple(expected)}, got {list(state.shape)}")
            state = self._cast("hx", state, weights[0][0])
            states.append(state if is_batched else state.unsqueeze(1))
        return states

    def _like_hx(self, lasts: list[Tensor]) -> Any:
        return lasts[0] if len(lasts) == 1 else tuple(lasts)


def _caller(mode: str) -> str:
    return f"blockcell.torch.{mode}"


def _check_dtype(mode: str, what: str, dtype: torch.dtype) -> None:
    if dtype not in op.DTYPES:
        raise TypeError(f"{_caller(mode)}: {what} {dtype}; expected torch.float32 or torch.float64")


class LSTM(Recurrent):
    """``torch.nn.LSTM`` on blockcell's kernels, for the CPU.

    .. code-block:: python

        rnn = blockcell.torch.LSTM(10, 20, num_layers=2)
        y, (h_n, c_n) = rnn(torch.randn(5, 3, 10))

    Constructor, parameters, initial values and calls are PyTorch's: a batch or a single sequence, ``batch_first``, hx,
    and PackedSequences.  A state_dict of either loads into the other.  Results differ by rounding alone, and have the
    same bits for any number of threads.  Calls use at most
    ``torch.get_num_threads()`` threads, whatever `blockcell.set_num_threads` says.

    Parameters
    ----------
    input_size, hidden_size : int
    num_layers : int
    bias : bool
    batch_first : bool
        Whether input and output are (B, T, .). Nothing is copied for it.
    dropout : float
        Of the outputs of all layers but the last, in training.
    bidirectional : bool
    proj_size : int
        Only 0.
    device : optional
        Only the CPU, or "meta" for weights that come later.
    dtype : torch.dtype, optional
        torch.float32 or torch.float64.

    Raises
    ------
    ValueError
        A `proj_size`, another device, or what torch.nn.LSTM refuses with it.
    TypeError
        Another dtype, or an argument of the wrong kind.

    Notes
    -----
    What else is not as in torch.nn:

    * ``isinstance(module, torch.nn.LSTM)`` is False. Tools that look for that class, such as those that quantize, do
      not find it; `restore` a model for them, and for ``torch.jit.script``.
    * ``torch.compile(fullgraph=True)`` and ``torch.export`` trace it, as one operator, ``blockcell::lstm``, per layer.
    * `replace` with a ``storage`` makes it compute with rounded weights, for inference: attributes `storage` and
      `activations`, None and "float32" otherwise.
    * There are no second derivatives, and no transforms of ``torch.func`` such as ``vmap``.
    * Under ``torch.autocast`` it computes in the weights' dtype, and rounds results to the dtypes of torch.nn's.
    """

    _op, _narrow_op = op.LSTM, narrow.LSTM


class GRU(Recurrent):
    """``torch.nn.GRU`` on blockcell's kernels, for the CPU.

    .. code-block:: python

        rnn = blockcell.torch.GRU(10, 20, num_layers=2)
        y, h_n = rnn(torch.randn(5, 3, 10))

    Parameters, errors and what is not as in torch.nn are those of `LSTM`.
    """

    _op, _narrow_op = op.GRU, narrow.GRU
