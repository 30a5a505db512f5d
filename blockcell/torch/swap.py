"""`replace` and `restore`: the modules of a model, by assigning their class."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.nn.modules.rnn import RNNBase, RNNCellBase

from ..quantization import FLOAT32, read_schemes
from ..replacement import Report
from . import op, quantized
from .cells import GRUCell, LSTMCell, RNNCell
from .modules import GRU, LSTM, RNN

_REPLACEMENTS = {
    torch.nn.LSTM: LSTM,
    torch.nn.GRU: GRU,
    torch.nn.RNN: RNN,
    torch.nn.LSTMCell: LSTMCell,
    torch.nn.GRUCell: GRUCell,
    torch.nn.RNNCell: RNNCell,
}
_ORIGINALS = {replacement: original for original, replacement in _REPLACEMENTS.items()}
_NAMES = {replacement.__name__ for replacement in _ORIGINALS}
_UNQUANTIZED = "load the model without that (in EasyOCR by quantize=False), then replace(model, quantize='int8')"

Schemes = str | Mapping[str, str] | None


def replace(model: torch.nn.Module, quantize: Schemes = None) -> Report:
    """Make every LSTM, GRU and RNN of torch.nn's in a model, and every cell of one, the module of that name here, in
    place.

    Modules keep their parameters, buffers, hooks and names, so that optimizers, references to them and state_dicts stay
    valid.  Only their class changes.  So does that of TorchRL's LSTMModule and GRUModule, for their recurrent mode.

    .. code-block:: python

        print(blockcell.torch.replace(model))

    With `quantize` they compute with quantized weights, for inference alone: a call has the bits of
    ``blockcell.convert.from_torch(module).quantize(scheme)``.  Parameters stay as they are, and the quantized weights
    follow them.

    Parameters
    ----------
    model : torch.nn.Module
        The model itself may be such a module.  Modules that were replaced before are quantized like the others.
    quantize : {"int8", "float16"} or mapping of str to str, optional
        How modules quantize their matrices of weights beside the parameters, all of them or, by a mapping of names of
        modules, those that it names: their scheme, or "float32".  A name stands for the modules within it, too; the
        longest one counts.

    Returns
    -------
    Report
        What was replaced, and what was left and why: weights that are not on the CPU, or not of float32 or, where it is
        not quantized, float64; classes derived from PyTorch's, whose forward may be another one; modules that PyTorch
        has quantized or compiled by ``torch.jit``; and of what is to be quantized RNNs and a ``proj_size``.

    Raises
    ------
    TypeError, ValueError
        `model` is not a module; `quantize` is something else, or names a module that the model does not have.
    """
    _check_model("replace", model)
    names = [f"{name}." if name else "" for name, _ in model.named_modules(remove_duplicate=False)]
    if quantize is None:
        schemes = dict.fromkeys(names, FLOAT32)
    else:
        schemes = read_schemes("blockcell.torch.replace", quantize, names, np.dtype(np.float32), "quantize")
    return _swap("replace", model, _REPLACEMENTS, {name.removesuffix("."): scheme for name, scheme in schemes.items()})


def restore(model: torch.nn.Module) -> Report:
    """Undo `replace`: every module of blockcell's in a model becomes torch.nn's, in place.

    Parameters
    ----------
    model : torch.nn.Module

    Returns
    -------
    Report
        What was restored, and what was left and why.

    Raises
    ------
    TypeError
        `model` is not a module.
    """
    _check_model("restore", model)
    return _swap("restore", model, _ORIGINALS, {})


def _check_model(caller: str, model: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"blockcell.torch.{caller}: model is of type {type(model).__name__}; expected a torch.nn.Module"
        )


def _swap(caller: str, model: Any, classes: dict[Any, Any], schemes: Mapping[str, str]) -> Report:
    report = Report(action=f"{caller}d")
    torchrl = _torchrl_adapters()
    kept = torchrl.derived_modules(model) if torchrl and classes is _REPLACEMENTS else {}
    inner_modules: set[torch.nn.Module] = set()
    for name, module in model.named_modules():  # each once, however often it occurs
        if module in inner_modules:
            continue
        scheme = schemes.get(name, FLOAT32)
        reason, kind = kept.get(module) or _reason(module, classes, scheme), type(module)
        if kind in _ORIGINALS:
            quantized.forget(module.parameters())
        if reason:
            report.left[name] = reason
            inner_modules.update(module.modules() if _is_quantized(module) else ())
        elif kind in _REPLACEMENTS or kind in _ORIGINALS:
            module.__class__ = classes.get(kind, kind)
            vars(module).pop("quantization", None)
            if scheme != FLOAT32:
                module.quantization = scheme
            report.changed[name] = repr(module)
    if torchrl:
        report.changed |= torchrl.adapt(model)
    return report


def _torchrl_adapters() -> Any:
    """Return the module for TorchRL's modules, which imports TorchRL; None in a program that has not imported it."""
    if "torchrl.modules" not in sys.modules:
        return None
    from . import torchrl

    return torchrl


def _reason(module: torch.nn.Module, classes: dict[Any, Any], scheme: str) -> str | None:
    """Return why a recurrent module stays as it is; None if it does not, or is none."""
    kind, quantizes = type(module), scheme != FLOAT32
    if _is_quantized(module):
        advice = f"; {_UNQUANTIZED}" if classes is _REPLACEMENTS else ""
        return f"it is {kind.__module__}.{kind.__name__}, for PyTorch's quantization{advice}"
    if isinstance(module, torch.jit.ScriptModule):
        is_recurrent = getattr(module, "original_name", "") in _NAMES
        return "it is compiled by torch.jit; do this before" if is_recurrent else None
    if not isinstance(module, (RNNBase, RNNCellBase)):
        return None
    if kind in classes.values() and (getattr(module, "quantization", None) or FLOAT32) == scheme:
        return "it is one already"
    if kind not in _REPLACEMENTS and kind not in _ORIGINALS:
        bases = [base.__name__ for base in (*_REPLACEMENTS, *_ORIGINALS) if issubclass(kind, base)]
        return f"{kind.__name__} is derived from {(*bases, 'RNNBase')[0]}, and may compute something else"
    if getattr(module, "nonlinearity", "tanh") not in op.RNN:
        return f"its nonlinearity is {module.nonlinearity!r}"
    if quantizes:
        if hasattr(module, "nonlinearity"):
            return f"it has no gates, and is not quantized to {scheme}"
        if isinstance(module, RNNBase) and module.proj_size:
            return f"proj_size is {module.proj_size}, and it is not quantized to {scheme}"
    for weight in module.parameters():
        if weight.device.type not in op.DEVICES:
            return f"its weights are on {weight.device}"
        if weight.dtype not in op.DTYPES:
            return f"its weights are {weight.dtype}"
        if quantizes and weight.dtype != torch.float32:
            return f"its weights are {weight.dtype}; to be quantized to {scheme} they have to be torch.float32"
    return None


def _is_quantized(module: torch.nn.Module) -> bool:
    """Return whether a module is PyTorch's own LSTM, GRU or RNN with quantized weights, or the one to be quantized."""
    kind = type(module)
    packages = ("torch.ao.nn.quantized.", "torch.ao.nn.quantizable.")
    return kind.__name__ in _NAMES and f"{kind.__module__}.".startswith(packages)
