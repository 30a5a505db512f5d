"""What the modules for sequences and for single steps have in common."""

from __future__ import annotations

import warnings
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Proxy

from . import op, quantized


class Base(torch.nn.Module):
    """Reads the weights, tensors and states of a module's call, and refuses others."""

    _name: ClassVar[str]
    """Of the class in torch.nn, too."""
    _op: ClassVar[op.LayerOp]
    _quantized_op: ClassVar[quantized.QuantizedOp]
    quantization: str | None = None  # the scheme; set by `replace`

    @classmethod
    def _caller(cls) -> str:
        return f"blockcell.torch.{cls._name}"

    @classmethod
    def _check_new(cls, device: Any, dtype: torch.dtype | None) -> None:
        """Refuse weights that are to be elsewhere or of another dtype."""
        place = torch.get_default_device() if device is None else torch.device(device)
        if place.type not in op.DEVICES:
            raise ValueError(f"{cls._caller()}: device is {place}; expected cpu, or use torch.nn.{cls._name}")
        cls._check_dtype("dtype is", torch.get_default_dtype() if dtype is None else dtype)

    @classmethod
    def _check_dtype(cls, label: str, dtype: torch.dtype) -> None:
        if dtype not in op.DTYPES:
            raise TypeError(f"{cls._caller()}: {label} {dtype}; expected {op.DTYPE_NAMES}")

    def _trace_call(self, data: Any, inputs: tuple[Any, ...], options: dict[str, Any], expected: str) -> Any:
        """Return the call in a graph that torch.fx traces, where a module is a leaf, as torch.nn's are.

        Raise an error if `data`, which is no tensor, is no proxy of a tracer either."""
        if isinstance(data, Proxy) and (path := data.tracer.path_of_module(self)):
            inputs = tuple([value for value in inputs if value is not None])
            options = {name: value for name, value in options.items() if value is not None}
            return data.tracer.create_proxy("call_module", path, inputs, options)
        raise TypeError(f"{self._caller()}: input is of type {type(data).__name__}; expected {expected}")

    def _read_weights(self, names: list[str]) -> list[Tensor]:
        """Return weights, by name at each call: parametrizations and functional_call replace them."""
        parameters: Any = self._parameters
        return [parameters[name] if name in parameters else getattr(self, name) for name in names]

    def _cast(self, name: str, tensor: Tensor, weight: Any) -> Tensor:
        """Return a tensor with the weights' dtype, which autocast may make of it; refuse devices but the CPU."""
        if not (tensor.is_cpu and weight.is_cpu):
            devices = f"{name} is on {tensor.device}, the weights on {weight.device}"
            raise ValueError(f"{self._caller()}: {devices}; expected cpu, or use torch.nn.{self._name}")
        self._check_dtype("the weights are", weight.dtype)
        if tensor.dtype == weight.dtype:
            return tensor
        if torch.is_autocast_enabled("cpu"):
            op.check_memory(name, tensor)
            return tensor.to(weight.dtype)
        raise ValueError(
            f"RNN {name} dtype ({tensor.dtype}) does not match weight dtype ({weight.dtype}). Convert {name}:"
            f" {name}.to({weight.dtype}), or convert model: model.to({tensor.dtype})"
        )

    def _autocast_dtype(self, x: Tensor, state: Tensor | None) -> torch.dtype | None:
        """Return the dtype of torch.nn's results under autocast, if it has fewer bytes than that of x; else None.

        Where only products are in autocast's dtype, `state` is the one that results depend on, too.
        """
        if not torch.is_autocast_enabled("cpu") or x.dtype != torch.float32:
            return None
        dtype = torch.get_autocast_dtype("cpu")
        if state is not None:
            dtype = torch.promote_types(dtype, state.dtype)
        return dtype if dtype.itemsize < x.dtype.itemsize else None

    def _state_tensors(self, name: str, hx: Any) -> Any:
        """Return the tensors of hx, or an argument of its form: a tensor or a pair of them, not None."""
        names = self._op.states
        tensors = (hx,) if len(names) == 1 else hx
        if not isinstance(tensors, (tuple, list)) or [isinstance(s, Tensor) for s in tensors] != [True] * len(names):
            form = "a tensor" if len(names) == 1 else "a pair of tensors (h_0, c_0)"
            raise TypeError(f"{self._caller()}: {name} is of type {type(hx).__name__}; expected {form}")
        return tensors

    def _read_states(self, hx: Any, shapes: list[tuple[int, ...]], weight: Tensor) -> list[Tensor]:
        """Read hx as a list of tensors of these shapes; x has been cast to the weight's dtype."""
        states = [*self._state_tensors("hx", hx)]
        for k, (state, expected) in enumerate(zip(states, shapes, strict=True)):
            if state.shape != expected:
                number = f"[{k}]" if len(states) > 1 else ""
                raise RuntimeError(f"Expected hidden{number} size {expected}, got {list(state.shape)}")
            if state.dtype != weight.dtype or not state.is_cpu:
                states[k] = self._cast("hx", state, weight)
        return states

    def _check_inference(self, weights: op.Tensors) -> None:
        """Refuse other dtypes than float32 and training: quantized weights are for inference."""
        dtype, caller = weights[0].dtype, self._caller()
        if dtype != torch.float32:
            expected = "expected torch.float32: call model.float(), or blockcell.torch.replace(model) without quantize"
            raise TypeError(f"{caller}: quantization is {self.quantization!r} and the weights are {dtype}; {expected}")
        if self.training and torch.is_grad_enabled() and any([weight.requires_grad for weight in weights]):
            raise RuntimeError(
                f"{caller}: it is in training mode with gradients enabled, and weights quantized to {self.quantization}"
                " have no gradient; for inference call model.eval(), or compute under torch.no_grad(); to train call"
                " blockcell.torch.replace(model) without quantize"
            )

    def __setattr__(self, name: str, value: Any) -> None:
        """Warn where torch.ao.quantization gives the module a `qconfig`, as it does to every module of a model."""
        if name == "qconfig" and self.quantization is None:
            warnings.warn(
                f"{self._caller()}: torch.ao.quantization does not quantize it, as it is no torch.nn.{self._name}; for"
                " products of 8-bit integers call blockcell.torch.replace(model, quantize='int8'), or"
                " blockcell.torch.restore(model) before the quantization",
                stacklevel=2,
            )
        super().__setattr__(name, value)

    def _apply(self, *arguments: Any, **options: Any) -> Any:
        quantized.forget(self._parameters.values())  # to another dtype, say; some ways there take no weak references
        return super()._apply(*arguments, **options)

    def extra_repr(self) -> str:
        shown: str = super().extra_repr()
        return shown if self.quantization is None else f"{shown}, quantization={self.quantization!r}"
