"""`LSTM`, `GRU`, `RNN`, `LSTMCell`, `GRUCell` and `RNNCell` in place of ``torch.nn``'s on the CPU.

`replace` puts them into a model that is there, sharing its parameters, and `restore` takes them out again.  The extra
``torch`` installs what this needs; ``import blockcell`` alone does not import it.

================  ==================================================================================================
``modules.py``    `LSTM`, `GRU` and `RNN`
``cells.py``      `LSTMCell`, `GRUCell` and `RNNCell`
``base.py``       what modules and cells share
``swap.py``       `replace` and `restore`
``op.py``         a layer or a single step as an operator of PyTorch, with its gradient
``quantized.py``  a quantized layer as an operator
``step_mask.py``  lengths and resets as step masks, an operator
``packed.py``     PackedSequences
``torchrl.py``    modules of TorchRL whose layer is one of these
``internals.py``  names of PyTorch that are not public
================  ==================================================================================================
"""

from .. import _kernels

try:
    with _kernels.briefly_awake():  # PyTorch's runtime too, where it is another one and is loaded only now
        import torch as _torch  # noqa: F401
except ImportError as error:
    raise ImportError(f"blockcell.torch needs PyTorch: pip install torch ({error})") from error

from ..replacement import Report
from .cells import GRUCell, LSTMCell, RNNCell
from .modules import GRU, LSTM, RNN
from .swap import replace, restore

__all__ = ["GRU", "LSTM", "RNN", "GRUCell", "LSTMCell", "RNNCell", "Report", "replace", "restore"]
for _module in (LSTM, GRU, RNN, LSTMCell, GRUCell, RNNCell):
    _module.__module__ = __name__  # pickles have it
