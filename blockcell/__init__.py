"""TensorFlow's fused RNN block cells, forward and backward, without TensorFlow.

`raw_ops` has TensorFlow's eight ops, `ops` four more in the same style; `LSTM`, `GRU`, `Bidirectional` and `Stack` are
whole layers.  numpy arrays in, numpy arrays out.
"""

from . import ops, raw_ops
from ._kernels import build_info, get_num_threads, set_num_threads
from .layers import GRU, LSTM, Bidirectional, GRUState, LSTMState, Stack

__all__ = [
    "GRU",
    "LSTM",
    "Bidirectional",
    "GRUState",
    "LSTMState",
    "Stack",
    "build_info",
    "get_num_threads",
    "ops",
    "raw_ops",
    "set_num_threads",
]
__version__ = "0.1.0.dev0"
