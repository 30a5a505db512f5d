"""The modules that stand in for ``torch.nn.LSTM``, ``torch.nn.GRU`` and ``torch.nn.RNN``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.rnn import RNNBase
from torch.nn.utils.rnn import PackedSequence

from . import op, quantized
from .base import Base
from .packed import Packing
from .step_mask import make_step_mask

_SIGNED = torch.int64, torch.int32, torch.int16, torch.int8
_INTEGERS = *_SIGNED, torch.uint8, torch.uint16, torch.uint32, torch.uint64


class Recurrent(Base, RNNBase):
    """The base of `LSTM`, `GRU` and `RNN`.

    They do not derive from PyTorch's LSTM and GRU, into which torch.compile refuses to look, but have the same base:
    that has parameters and their initial values, the checks of the constructor's arguments, repr and pickling.
    """

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
        if proj_size and not self._op.projects:
            raise ValueError(f"{self._caller()}: proj_size is {proj_size}; expected 0, or an LSTM")
        self._check_new(device, dtype)
        options = num_layers, bias, batch_first, dropout, bidirectional, proj_size, device, dtype
        super().__init__(self._mode, input_size, hidden_size, *options)

    @property
    def _mode(self) -> str:
        """The name that torch.nn has for the cell."""
        return self._name

    def forward(
        self, input: Any, hx: Any = None, *, lengths: Any = None, reset: Any = None, reset_state: Any = None
    ) -> Any:
        """Compute a sequence as torch.nn's module does, also of padded rows and with resets.

        Parameters
        ----------
        input : Tensor or PackedSequence
        hx : Tensor or pair of Tensor, optional
        lengths : Tensor (B,) or list of int, optional
            How many steps each row has, 0 to T. Steps beyond are padding: input is not read there, the output is zero,
            and the last state is the one at the row's end, of a row without steps hx. The other direction starts at the
            row's last step. Only with a batch, and not with a PackedSequence.
        reset : Tensor (T, B), optional
            Of bool: where a new episode starts; the state is zero before these steps, or `reset_state`, and hx before a
            first one. In the other direction no state goes from such a step to the one before it. (B, T) with
            ``batch_first``, (T,) without a batch; not with a PackedSequence. No gradient goes from an episode to the
            one before.
        reset_state : Tensor (L, T, B, H) or pair of Tensor, optional
            The states from which these episodes start, in the form of hx with an axis for steps: those that were stored
            when they were played, say. They are read only where `reset` is true, and get gradients as hx does. A view
            by ``expand`` is not copied. (L, B, T, H) with ``batch_first``, (L, T, H) without a batch; not with
            ``bidirectional``.
        """
        options = {"lengths": lengths, "reset": reset, "reset_state": reset_state}
        data = input.data if isinstance(input, PackedSequence) else input
        if not isinstance(data, Tensor):
            return self._trace_call(data, (data, hx), options, "a tensor or a PackedSequence")
        weights = self._weights()
        x = self._cast("input", data, weights[0][0])
        dims, is_packed = x.dim(), isinstance(input, PackedSequence)
        if is_packed and dims != 2:
            raise RuntimeError(f"input must have 2 dimensions, got {dims}")
        if dims not in (2, 3):
            raise ValueError(f"{self._name}: Expected input to be 2D or 3D, got {dims}D instead")
        if x.shape[-1] != self.input_size:
            sizes = f"Expected {self.input_size}, got {x.shape[-1]}"
            raise RuntimeError(f"input.size(-1) must be equal to input_size. {sizes}")
        if is_packed:
            for name, option in options.items():
                if option is not None:
                    reason = "is given and input is a PackedSequence; expected a padded tensor with it"
                    raise ValueError(f"{self._caller()}: {name} {reason}")
            return self._packed(input, x, weights, hx)
        is_batched = dims == 3
        reset_states = [] if reset_state is None else self._reset_states(reset_state, x, weights, reset)
        lengths, reset = self._read_options(x.shape[:-1], lengths, reset)
        if not is_batched:
            x = x.unsqueeze(1)
        elif self.batch_first:
            x = x.transpose(0, 1)
        if x.shape[0] == 0:
            raise RuntimeError("Expected sequence length to be larger than 0 in RNN")
        states = self._states(hx, x, weights, is_batched)
        dtype = self._result_dtype(data, hx, x, False)
        y, last_states = self._run(x, None, lengths, reset, reset_states, weights, states, dtype)
        if not is_batched:
            y, last_states = y.squeeze(1), [state.squeeze(1) for state in last_states]
        elif self.batch_first:
            y = y.transpose(0, 1)
        return y, self._like_hx(last_states)

    def _packed(self, sequences: PackedSequence, data: Tensor, weights: list[op.Tensors], hx: Any) -> Any:
        """Compute `forward` of a PackedSequence whose data are cast already."""
        batch_sizes, to_sorted, from_sorted = sequences[1:]
        for name, tensor in zip(PackedSequence._fields, (data, *sequences[1:]), strict=True):
            if tensor is not None:
                op.check_memory("input" if name == "data" else name, tensor)
        packing = Packing(batch_sizes, len(data), batch_sizes[0] if to_sorted is None else len(to_sorted))
        x = packing.pad(data)
        states = self._states(hx, x, weights, True)
        if to_sorted is not None:
            for state in states:
                op.check_memory("hx", state)
            states = [state.index_select(1, to_sorted) for state in states]
        dtype = self._result_dtype(sequences.data, hx, x, True)
        y, last_states = self._run(x, packing, packing.lengths, None, [], weights, states, dtype)
        if from_sorted is not None:
            last_states = [state.index_select(1, from_sorted) for state in last_states]
        return PackedSequence(packing.pack(y), *sequences[1:]), self._like_hx(last_states)

    def _run(
        self,
        x: Tensor,
        packing: Packing | None,
        lengths: Tensor | None,
        reset: Tensor | None,
        reset_states: list[Tensor],
        weights: list[op.Tensors],
        states: list[Tensor],
        dtype: torch.dtype | None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Compute y of the last layer [T,B,D*P] and all last states [L*D,B,.], rounded to a dtype unless it is None."""
        count, D = self.num_layers, 2 if self.bidirectional else 1
        if self.quantization is not None:
            self._check_inference([weight for of_layer in weights for weight in of_layer])
        else:
            step_mask = None if lengths is None and reset is None else make_step_mask(x, lengths, reset)
        copied = dtype is not None or (packing is not None and lengths is not None)  # callers get a copy of y
        last_states = []
        for layer in range(count):
            initial = [s[layer * D : (layer + 1) * D] for s in states] if count > 1 else states
            starts = [state[layer] for state in reset_states]
            if self.quantization is not None:
                options = initial, lengths, reset, self.quantization, starts
                x, *last = self._quantized_op(x, weights[layer], self.bidirectional, *options)
            else:
                separate_y = layer == count - 1 and not copied
                x, *last = self._op(x, weights[layer], self.bidirectional, separate_y, initial, step_mask, starts)
            last_states.append(last)
            if self.training and self.dropout and layer < count - 1:
                if packing is None:
                    x = torch.nn.functional.dropout(x, self.dropout)
                else:  # only of what is there, so that the same numbers are drawn as by torch.nn
                    x = packing.pad(torch.nn.functional.dropout(packing.pack(x), self.dropout))
        joined = last_states[0] if count == 1 else [torch.cat(layers) for layers in zip(*last_states, strict=True)]
        return (x, joined) if dtype is None else (x.to(dtype), [state.to(dtype) for state in joined])

    # -------------------------------------------------------------------------------------------------------- arguments
    def _weights(self) -> list[op.Tensors]:
        """Return the weights of each layer."""
        directions: list[Any] = [self._read_weights(names) for names in self._all_weights]
        if not self.bidirectional:
            return directions
        return [directions[k] + directions[k + 1] for k in range(0, len(directions), 2)]

    def _read_options(self, shape: tuple[int, ...], lengths: Any, reset: Any) -> tuple[Tensor | None, Tensor | None]:
        """Read lengths as [B] and resets as [T,B], for an input with these sizes before its last one."""
        batch_axis = None if len(shape) == 1 else 0 if self.batch_first else 1
        if lengths is not None:
            if batch_axis is None:
                expected = "expected 3 dimensions with it, or input[:length]"
                raise ValueError(f"{self._caller()}: lengths is given and input has 2 dimensions; {expected}")
            if isinstance(lengths, list) and all([isinstance(length, int) for length in lengths]):
                lengths = torch.tensor(lengths, dtype=torch.int64, device="cpu")
            meaning = "one for each row of input"
            self._check_option("lengths", lengths, _INTEGERS, "integers", (shape[batch_axis],), meaning)
            if lengths.dtype not in (torch.int64, torch.uint64):
                op.check_memory("lengths", lengths)
                lengths = lengths.to(torch.int64)
        if reset is not None:
            meaning = "as that of input without its last dimension"
            self._check_option("reset", reset, (torch.bool,), "torch.bool", shape, meaning)
            if batch_axis != 1:
                op.check_memory("reset", reset)
                reset = reset.unsqueeze(1) if batch_axis is None else reset.transpose(0, 1)
        return lengths, reset

    def _check_option(
        self, name: str, value: Any, dtypes: tuple[Any, ...], contents: str, shape: tuple[int, ...], meaning: str
    ) -> None:
        """Refuse what is no tensor on the CPU with one of these dtypes and this shape."""
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        if kind not in dtypes:
            raise TypeError(f"{self._caller()}: {name} is of type {kind}; expected a tensor of {contents}")
        if value.shape != shape:
            expected = f"expected {tuple(shape)}, {meaning}"
            raise ValueError(f"{self._caller()}: {name} has shape {tuple(value.shape)}; {expected}")
        if not value.is_cpu:
            raise ValueError(f"{self._caller()}: {name} is on {value.device}; expected cpu")

    def _result_dtype(self, data: Tensor, hx: Any, x: Tensor, is_packed: bool) -> torch.dtype | None:
        """Return `_autocast_dtype` for data that were cast to x."""
        is_lstm = len(self._op.states) == 2
        if is_lstm and not is_packed and data.dtype != torch.float16:
            return self._autocast_dtype(x, None)
        return self._autocast_dtype(x, data if hx is None else hx[0] if is_lstm else hx)

    def _states(self, hx: Any, x: Tensor, weights: list[op.Tensors], is_batched: bool) -> list[Tensor]:
        """Read hx as a list of tensors [L*D,B,.]; an empty one if there is no hx."""
        if hx is None:
            return []
        cells, rows = self.num_layers * (2 if self.bidirectional else 1), (x.shape[1],) if is_batched else ()
        widths = (self.proj_size or self.hidden_size, self.hidden_size)[: len(self._op.states)]
        states = self._read_states(hx, [(cells, *rows, width) for width in widths], weights[0][0])
        return states if is_batched else [state.unsqueeze(1) for state in states]

    def _reset_states(self, reset_state: Any, x: Tensor, weights: list[op.Tensors], reset: Any) -> list[Tensor]:
        """Read the states at resets as a list of tensors [L,T,B,.]; x is in the form of the caller's."""
        caller = self._caller()
        if reset is None or self.bidirectional:
            expected = "one direction, not bidirectional=True" if self.bidirectional else "reset, too"
            raise ValueError(f"{caller}: reset_state is given; expected {expected}")
        widths = self.proj_size or self.hidden_size, self.hidden_size
        states: list[Tensor] = []
        for state, width in zip(self._state_tensors("reset_state", reset_state), widths, strict=False):
            shape = self.num_layers, *x.shape[:-1], width
            if state.shape != shape:
                expected = f"expected {tuple(shape)}, the sizes of hx with those of input's steps and rows"
                raise ValueError(f"{caller}: reset_state has shape {tuple(state.shape)}; {expected}")
            state = self._cast("reset_state", state, weights[0][0])
            states.append(state.unsqueeze(2) if x.dim() == 2 else state.transpose(1, 2) if self.batch_first else state)
        return states

    def _like_hx(self, states: list[Tensor]) -> Any:
        return states[0] if len(states) == 1 else tuple(states)


class LSTM(Recurrent):
    """``torch.nn.LSTM`` on blockcell's kernels, for the CPU.

    .. code-block:: python

        rnn = blockcell.torch.LSTM(10, 20, num_layers=2)
        y, (h_n, c_n) = rnn(torch.randn(5, 3, 10))

    Constructor, parameters, initial values and calls are PyTorch's: a batch or a single sequence, ``batch_first``, hx,
    and PackedSequences.  A state_dict of either loads into the other.  Results differ by rounding alone, and have the
    same bits for any number of threads.  Calls use at most
    ``torch.get_num_threads()`` threads, whatever `blockcell.set_num_threads` says.

    A call takes two more keywords. ``lengths`` [B] has the number of steps of each row of a padded batch: the padding
    is not read and costs next to nothing. ``reset`` [T,B] marks steps where a row starts anew, from a state of zeros.

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
        P, below `hidden_size`: h is projected to so many numbers, by weights [P,H]; 0 for not at all.
    device : optional
        Only the CPU, or "meta" for weights that come later.
    dtype : torch.dtype, optional
        torch.float32 or torch.float64.

    Raises
    ------
    ValueError
        Another device, or what torch.nn.LSTM refuses with it.
    TypeError
        Another dtype, or an argument of the wrong kind.

    Notes
    -----
    What else is not as in torch.nn:

    * ``isinstance(module, torch.nn.LSTM)`` is False. Tools that look for that class, such as those that quantize, do
      not find it; `restore` a model for them, and for ``torch.jit.script``.
    * ``torch.compile(fullgraph=True)`` and ``torch.export`` trace it, as one operator, ``blockcell::lstm``, per layer.
    * `replace` with `quantize` makes it compute with quantized weights, for inference: the attribute `quantization`,
      None otherwise.
    * There are no second derivatives, and no transforms of ``torch.func`` such as ``vmap``.
    * Under ``torch.autocast`` it computes in the weights' dtype, and rounds results to the dtypes of torch.nn's.
    """

    _name, _op, _quantized_op = "LSTM", op.LSTM, quantized.LSTM


class GRU(Recurrent):
    """``torch.nn.GRU`` on blockcell's kernels, for the CPU.

    .. code-block:: python

        rnn = blockcell.torch.GRU(10, 20, num_layers=2)
        y, h_n = rnn(torch.randn(5, 3, 10))

    Parameters, errors and what is not as in torch.nn are those of `LSTM`, but for `proj_size`, which has to be 0.
    """

    _name, _op, _quantized_op = "GRU", op.GRU, quantized.GRU


class RNN(Recurrent):
    """``torch.nn.RNN`` on blockcell's kernels, for the CPU.

    .. code-block:: python

        rnn = blockcell.torch.RNN(10, 20, nonlinearity="relu")
        y, h_n = rnn(torch.randn(5, 3, 10))

    Parameters, errors and what is not as in torch.nn are those of `LSTM`, but that there is no ``proj_size``, that
    `replace` does not quantize it, and:

    Parameters
    ----------
    nonlinearity : {"tanh", "relu"}
        Behind `num_layers` in the order of the arguments, as in torch.nn.
    """

    _name = "RNN"

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: str = "tanh",
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if nonlinearity not in op.RNN:
            raise ValueError(f"{self._caller()}: nonlinearity is {nonlinearity!r}; expected 'tanh' or 'relu'")
        self.nonlinearity = nonlinearity
        options = bias, batch_first, dropout, bidirectional, 0, device, dtype
        super().__init__(input_size, hidden_size, num_layers, *options)

    @property
    def _op(self) -> op.LayerOp:  # type: ignore[override]
        return op.RNN[self.nonlinearity]

    @property
    def _mode(self) -> str:
        return f"RNN_{self.nonlinearity.upper()}"

    def _result_dtype(self, data: Tensor, hx: Any, x: Tensor, is_packed: bool) -> torch.dtype | None:
        return self._autocast_dtype(x, None)
