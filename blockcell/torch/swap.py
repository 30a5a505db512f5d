"""`replace` and `restore`: the modules of a model, by assigning their class."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.nn.modules.rnn import RNNBase, RNNCellBase

from .._read import ArgumentReader
from ..layers.storage import read_activations, read_storage
from . import narrow, op
from .cells import GRUCell, LSTMCell, RNNCell
from .modules import GRU, LSTM, RNN

_OURS = {
    torch.nn.LSTM: LSTM,
    torch.nn.GRU: GRU,
    torch.nn.RNN: RNN,
    torch.nn.LSTMCell: LSTMCell,
    torch.nn.GRUCell: GRUCell,
    torch.nn.RNNCell: RNNCell,
}
_THEIRS = {ours: theirs for theirs, ours in _OURS.items()}
_STORED = ("storage", "activations")  # attributes of our modules
_NOT_STORED = (None, "float32")


@dataclass(repr=False)
class Report:
    """What `replace` or `restore` did to a model; its repr is for reading.

    Attributes
    ----------
    changed : dict of str to str
        The modules that are of another class now, by name, and what they are. The model itself has the name "".
    left : dict of str to str
        The recurrent modules that are as before, and why.
    """

    changed: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    action: str = "replaced"

    def __repr__(self) -> str:
        count = len(self.changed)
        lines = [f"{self.action} {count} module{'s' * (count != 1)}{':' * (count > 0)}", *_listed(self.changed)]
        if self.left:
            lines += [f"left {len(self.left)}:", *_listed(self.left)]
        elif not self.changed:
            lines[0] += ": the model has no LSTM, no GRU and no RNN"
        return "\n".join(lines)


def _listed(modules: dict[str, str]) -> list[str]:
    return [f"  {name or '(the model)'}: {what}" for name, what in modules.items()]


def replace(model: torch.nn.Module, storage: str | None = None, activations: str = "float32") -> Report:
    """Make every LSTM, GRU and RNN of torch.nn's in a model, and every cell of one, the module of that name here, in
    place.

    Modules keep their parameters, buffers, hooks and names, so that optimizers, references to them and state_dicts stay
    valid.  Only their class changes.

    .. code-block:: python

        print(blockcell.torch.replace(model))

    With a `storage` they compute with weights that are rounded, for inference alone: a call has the bits of
    ``blockcell.convert.from_torch(module).packed(storage, activations)``.  Parameters stay as they are, and what is
    packed follows them.

    Parameters
    ----------
    model : torch.nn.Module
        The model itself may be such a module.  Modules that were replaced before get this `storage`, too.
    storage : {None, "float16", "bfloat16", "int8"}
        How modules store their matrices of weights beside the parameters; None: not at all.
    activations : {"float32", "int8", "int16"}
        With ``storage="int8"``: to what x and h are rounded at each step, for products in integers.

    Returns
    -------
    Report
        What was replaced, and what was left and why: weights that are not on the CPU, not of float32 or, without a
        `storage`, float64, classes derived from PyTorch's, whose forward may be another one, and with a `storage` RNNs
        and a ``proj_size``.

    Raises
    ------
    TypeError, ValueError
        `model` is not a module; `storage` or `activations` is something else, or one does not go with the other.
    """
    reader = ArgumentReader("blockcell.torch.replace")
    if storage is not None:
        storage = read_storage(reader, storage, np.dtype(np.float32))
    read_activations(reader, activations, storage)
    return _swap("replace", model, _OURS, (storage, activations))


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
    return _swap("restore", model, _THEIRS, _NOT_STORED)


def _swap(caller: str, model: Any, classes: dict[Any, Any], stored: tuple[str | None, str]) -> Report:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"blockcell.torch.{caller}: model is of type {type(model).__name__}; expected a torch.nn.Module"
        )
    report = Report(action=f"{caller}d")
    for name, module in model.named_modules():  # each once, however often it occurs
        reason, kind = _reason(module, classes, stored), type(module)
        if kind in _THEIRS:
            narrow.forget(module.parameters())
        if reason:
            report.left[name] = reason
        elif kind in _OURS or kind in _THEIRS:
            module.__class__ = classes.get(kind, kind)
            for attribute in _STORED:
                vars(module).pop(attribute, None)
            if stored != _NOT_STORED:
                vars(module).update(zip(_STORED, stored, strict=True))
            report.changed[name] = repr(module)
    return report


def _reason(module: torch.nn.Module, classes: dict[Any, Any], stored: tuple[str | None, str]) -> str | None:
    """Why a recurrent module stays as it is; None if it does not, or is none."""
    kind = type(module)
    if isinstance(module, torch.jit.ScriptModule):
        known = getattr(module, "original_name", "") in [theirs.__name__ for theirs in _OURS]
        return "it is compiled by torch.jit; do this before" if known else None
    if not isinstance(module, (RNNBase, RNNCellBase)):
        return None
    if kind in classes.values() and tuple(map(getattr, [module] * 2, _STORED, _NOT_STORED)) == stored:
        return "it is one already"
    if kind not in _OURS and kind not in _THEIRS:
        bases = [base.__name__ for base in (*_OURS, *_THEIRS) if issubclass(kind, base)]
        return f"{kind.__name__} is derived from {(*bases, 'RNNBase')[0]}, and may compute something else"
    if getattr(module, "nonlinearity", "tanh") not in op.RNN:
        return f"its nonlinearity is {module.nonlinearity!r}"
    if stored != _NOT_STORED:
        if hasattr(module, "nonlinearity"):
            return f"it has no gates, and is not stored in {stored[0]}"
        if isinstance(module, RNNBase) and module.proj_size:
            return f"proj_size is {module.proj_size}, and it is not stored in {stored[0]}"
    for weight in module.parameters():
        if weight.device.type not in ("cpu", "meta"):
            return f"its weights are on {weight.device}"
        if weight.dtype not in op.DTYPES:
            return f"its weights are {weight.dtype}"
        if stored != _NOT_STORED and weight.dtype != torch.float32:
            return f"its weights are {weight.dtype}; to be stored in {stored[0]} they have to be torch.float32"
    return None
