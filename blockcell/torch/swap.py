"""`replace` and `restore`: the modules of a model, by assigning their class."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.modules.rnn import RNNBase, RNNCellBase

from . import op
from .modules import GRU, LSTM

_OURS = {torch.nn.LSTM: LSTM, torch.nn.GRU: GRU}
_THEIRS = {ours: theirs for theirs, ours in _OURS.items()}


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
            lines[0] += ": the model has no LSTM and no GRU"
        return "\n".join(lines)


def _listed(modules: dict[str, str]) -> list[str]:
    return [f"  {name or '(the model)'}: {what}" for name, what in modules.items()]


def replace(model: torch.nn.Module) -> Report:
    """Make every ``torch.nn.LSTM`` and ``torch.nn.GRU`` of a model `LSTM` and `GRU`, in place.

    Modules keep their parameters, buffers, hooks and names, so that optimizers, references to them and state_dicts stay
    valid.  Only their class changes.

    .. code-block:: python

        print(blockcell.torch.replace(model))

    Parameters
    ----------
    model : torch.nn.Module
        The model itself may be such a module.

    Returns
    -------
    Report
        What was replaced, and what was left and why: a ``proj_size``, weights that are not on the CPU, not of float32
        or float64, classes derived from PyTorch's, whose forward may be another one, and other kinds of modules.

    Raises
    ------
    TypeError
        `model` is not a module.
    """
    return _swap("replace", model, _OURS)


def restore(model: torch.nn.Module) -> Report:
    """Undo `replace`: every `LSTM` and `GRU` of a model becomes ``torch.nn.LSTM`` and ``torch.nn.GRU``, in place.

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
    return _swap("restore", model, _THEIRS)


def _swap(caller: str, model: Any, classes: dict[Any, Any]) -> Report:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"blockcell.torch.{caller}: model is of type {type(model).__name__}; expected a torch.nn.Module"
        )
    report = Report(action=f"{caller}d")
    for name, module in model.named_modules():  # each once, however often it occurs
        if reason := _reason(module, classes):
            report.left[name] = reason
        elif type(module) in classes:
            module.__class__ = classes[type(module)]
            report.changed[name] = repr(module)
    return report


def _reason(module: torch.nn.Module, classes: dict[Any, Any]) -> str | None:
    """Why a recurrent module stays as it is; None if it does not, or is none."""
    kind = type(module)
    if isinstance(module, torch.jit.ScriptModule):
        known = getattr(module, "original_name", "") in ("LSTM", "GRU")
        return "it is compiled by torch.jit; do this before" if known else None
    if isinstance(module, RNNCellBase):
        return f"{kind.__name__} computes single steps"
    if not isinstance(module, RNNBase):
        return None
    if kind in classes.values():
        return "it is one already"
    if kind not in classes:
        bases = [base.__name__ for base in (*_OURS, *_THEIRS) if issubclass(kind, base)]
        return (
            f"{kind.__name__} is derived from {bases[0]}, and may compute something else"
            if bases
            else "it has no gates"
        )
    if module.proj_size:
        return f"proj_size is {module.proj_size}"
    for weight in module.parameters():
        if weight.device.type not in ("cpu", "meta"):
            return f"its weights are on {weight.device}"
        if weight.dtype not in op.DTYPES:
            return f"its weights are {weight.dtype}"
    return None
