"""`LSTMModule` and `GRUModule`: TorchRL's modules whose layer is one of blockcell's.

`replace` imports this in a program that has imported TorchRL.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from tensordict.nn import dispatch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torchrl import modules

from .modules import Recurrent


class Adapter:
    """Computes TorchRL's recurrent mode by one call of the layer, with the trajectories of all rows packed.

    TorchRL's own code calls layers that are no ``nn.LSTM`` or ``nn.GRU`` with a mask.
    """

    theirs: ClassVar[type]
    """TorchRL's class."""
    layer_name: ClassVar[str]
    """The attribute that has the layer."""

    in_keys: list[Any]
    out_keys: list[Any]
    recurrent_mode: bool
    recurrent_backend: str

    @dispatch  # type: ignore[untyped-decorator]
    def forward(self, tensordict: Any) -> Any:
        """Compute y and the last states of all trajectories in a tensordict [...,T].

        A trajectory starts with the states that are stored at its first step. Its last states are stored at its last
        step; the other steps have zeros there. TorchRL computes single steps, and its backend "scan".
        """
        layer, shape = getattr(self, self.layer_name), tensordict.shape
        computes = self.recurrent_mode and self.recurrent_backend != "scan" and isinstance(layer, Recurrent)
        if not computes or 0 in (len(shape), *shape):
            return super().forward(tensordict)  # type: ignore[misc]

        def select_steps(value: Tensor, steps: Tensor) -> Tensor:
            return value.flatten(0, len(shape) - 1).index_select(0, steps)

        packed, batch_sizes, starts, ends = _pack_trajectories(tensordict["is_init"].reshape(-1, shape[-1]))
        x_key, *state_keys = self.in_keys[: len(self.out_keys)]
        states = [tensordict.get(key, None) for key in state_keys]
        initial = [select_steps(state, starts).transpose(0, 1) for state in states if state is not None]
        x = PackedSequence(select_steps(tensordict[x_key], packed), batch_sizes)
        y, last = layer(x, layer._like_hx(initial) if initial else None)
        rows = torch.empty_like(y.data).index_copy_(0, packed, y.data)
        tensordict.set(self.out_keys[0], rows.unflatten(0, shape))
        for key, state in zip(self.out_keys[1:], last if isinstance(last, tuple) else (last,), strict=True):
            zeros = state.new_zeros(len(packed), len(state), state.shape[2])
            tensordict.set(key, zeros.index_copy_(0, ends, state.transpose(0, 1)).unflatten(0, shape))
        return tensordict


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _pack_trajectories(is_init: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the packed steps by number among B*T, the batch sizes, and the first and last step of each trajectory."""
    is_start = is_init.clone()
    is_start[:, 0] = True
    starts = is_start.flatten().nonzero().squeeze(1)
    lengths = torch.cat([starts[1:], starts.new_tensor([is_init.numel()])]) - starts
    # Dropout draws the numbers that it draws in TorchRL, which sorts trajectories unless they are whole rows.
    lengths, order = lengths.sort(descending=True, stable=len(starts) == len(is_init))
    starts, steps = starts[order], torch.arange(int(lengths[0])).unsqueeze(1)
    has_step = steps < lengths
    return (starts + steps)[has_step], has_step.sum(1), starts, starts + lengths - 1


class LSTMModule(Adapter, modules.LSTMModule):
    """``torchrl.modules.LSTMModule`` with a `blockcell.torch.LSTM`."""

    theirs, layer_name = modules.LSTMModule, "lstm"


class GRUModule(Adapter, modules.GRUModule):
    """``torchrl.modules.GRUModule`` with a `blockcell.torch.GRU`."""

    theirs, layer_name = modules.GRUModule, "gru"


def derived_modules(model: torch.nn.Module) -> dict[torch.nn.Module, str]:
    """Return the layers of modules in classes that are derived from TorchRL's, and why these layers stay."""
    reasons = {}
    for module in model.modules():
        for ours in (LSTMModule, GRUModule):
            if isinstance(module, ours.theirs) and type(module) not in (ours, ours.theirs):
                reason = f"{type(module).__name__} is derived from {ours.__name__}, and may compute something else"
                reasons[getattr(module, ours.layer_name)] = reason
    return reasons


def adapt(model: torch.nn.Module) -> dict[str, str]:
    """Give each of TorchRL's modules in a model the class that fits its layer; return the new classes by name."""
    changed = {}
    for name, module in model.named_modules():
        for ours in (LSTMModule, GRUModule):
            if type(module) in (ours, ours.theirs):
                kind = ours if isinstance(getattr(module, ours.layer_name), Recurrent) else ours.theirs
                if type(module) is not kind:
                    module.__class__ = kind
                    changed[name] = f"{kind.__module__}.{kind.__name__}"
    return changed
