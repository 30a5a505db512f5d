"""The modules that stand in for torch.nn's LSTMCell, GRUCell and RNNCell, for loops over single steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.rnn import RNNCellBase

from . import op, quantized
from .base import Base

_NAMES = ["weight_ih", "weight_hh", "bias_ih", "bias_hh"]


class CellModule(Base, RNNCellBase):
    """The base of `LSTMCell`, `GRUCell` and `RNNCell`.

    Parameters, their initial values and repr are those of the base that torch.nn's cells have, too.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._check_new(device, dtype)
        super().__init__(input_size, hidden_size, bias, self._op.gates, device=device, dtype=dtype)

    def forward(self, input: Any, hx: Any = None) -> Any:
        """Compute one step, as torch.nn's cell does."""
        if not isinstance(input, Tensor):
            return self._trace_call(input, (input, hx), {}, "a tensor")
        weights = self._read_weights(_NAMES if self.bias else _NAMES[:2])
        x = self._cast("input", input, weights[0])
        dims = x.dim()
        if dims not in (1, 2):
            raise ValueError(f"{self._name}: Expected input to be 1D or 2D, got {dims}D instead")
        if x.shape[-1] != self.input_size:
            sizes = f"got {x.shape[-1]}, expected {self.input_size}"
            raise RuntimeError(f"input has inconsistent input_size: {sizes}")
        states: list[Tensor] = []
        if hx is not None:
            states = self._read_states(hx, [(*x.shape[:-1], self.hidden_size)] * len(self._op.states), weights[0])
        if dims == 1:
            x, states = x.unsqueeze(0), [state.unsqueeze(0) for state in states]
        if self.quantization is None:
            outputs = self._op(x, weights, False, True, states, None)
        else:
            self._check_inference(weights)
            outputs = self._quantized_op(x, weights, False, states, None, None, self.quantization)
        if dims == 1:
            outputs = [state.squeeze(0) for state in outputs]
        if (dtype := self._result_dtype(input, hx, x)) is not None:
            outputs = [state.to(dtype) for state in outputs]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _result_dtype(self, input: Tensor, hx: Any, x: Tensor) -> torch.dtype | None:
        """Return `_autocast_dtype` for an input that was cast to x."""
        return self._autocast_dtype(x, input if hx is None else hx[1] if len(self._op.states) == 2 else hx)


class LSTMCell(CellModule):
    """``torch.nn.LSTMCell`` on blockcell's kernels, for the CPU: one step of an LSTM.

    .. code-block:: python

        cell = blockcell.torch.LSTMCell(10, 20)
        h, c = cell(torch.randn(3, 10))
        h, c = cell(torch.randn(3, 10), (h, c))

    Constructor, parameters, initial values and calls are PyTorch's: a batch or a single row, with or without hx.  A
    state_dict of either loads into the other.  Results differ by rounding alone.  What is not as in torch.nn is said at
    `LSTM`, which is faster where all steps of the input are there before the first one.

    Parameters
    ----------
    input_size, hidden_size : int
    bias : bool
    device : optional
        Only the CPU, or "meta" for weights that come later.
    dtype : torch.dtype, optional
        torch.float32 or torch.float64.

    Raises
    ------
    ValueError
        Another device.
    TypeError
        Another dtype, or an argument of the wrong kind.
    """

    _name, _op, _quantized_op = "LSTMCell", op.LSTM_CELL, quantized.LSTM_CELL


class GRUCell(CellModule):
    """``torch.nn.GRUCell`` on blockcell's kernels, for the CPU: one step of a GRU.

    .. code-block:: python

        cell = blockcell.torch.GRUCell(10, 20)
        h = cell(torch.randn(3, 10))
        h = cell(torch.randn(3, 10), h)

    Parameters and errors are those of `LSTMCell`.
    """

    _name, _op, _quantized_op = "GRUCell", op.GRU_CELL, quantized.GRU_CELL


class RNNCell(CellModule):
    """``torch.nn.RNNCell`` on blockcell's kernels, for the CPU: one step of an RNN.

    .. code-block:: python

        cell = blockcell.torch.RNNCell(10, 20, nonlinearity="relu")
        h = cell(torch.randn(3, 10))
        h = cell(torch.randn(3, 10), h)

    Parameters and errors are those of `LSTMCell`, and:

    Parameters
    ----------
    nonlinearity : {"tanh", "relu"}
        Behind `bias` in the order of the arguments, as in torch.nn.
    """

    _name = "RNNCell"

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        nonlinearity: str = "tanh",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if nonlinearity not in op.RNN_CELL:
            raise ValueError(f"{self._caller()}: nonlinearity is {nonlinearity!r}; expected 'tanh' or 'relu'")
        self.nonlinearity = nonlinearity
        super().__init__(input_size, hidden_size, bias, device, dtype)

    @property
    def _op(self) -> op.LayerOp:  # type: ignore[override]
        return op.RNN_CELL[self.nonlinearity]

    def _result_dtype(self, input: Tensor, hx: Any, x: Tensor) -> torch.dtype | None:
        return self._autocast_dtype(x, None)
