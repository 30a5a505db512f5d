"""Private names of PyTorch's; blockcell has them here alone.

Such names come and go.  `COMPLETE` is whether all of them are there, as they are in PyTorch 2.4 to 2.13.  Without it,
every call goes through PyTorch's dispatcher, which asks nothing of the kind and takes more time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

_C: Any = torch._C

COMPLETE = hasattr(_C, "_len_torch_dispatch_stack") and hasattr(_C, "_are_functorch_transforms_active")


def modes_are_active() -> bool:
    """Return whether a ``TorchDispatchMode`` sees operators, as tracers of graphs do."""
    return bool(_C._len_torch_dispatch_stack())


def transforms_are_active() -> bool:
    """Return whether a transform of ``torch.func`` is at work."""
    return bool(_C._are_functorch_transforms_active())


def forward_mode_is_active() -> bool:
    """Return whether forward-mode derivatives may be asked for; without the private name, as if they always were."""
    return getattr(forward_ad, "_current_level", 0) >= 0
