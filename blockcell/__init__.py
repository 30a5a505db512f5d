"""TensorFlow's fused RNN block cells, forward and backward, without TensorFlow.

`raw_ops` has TensorFlow's eight ops, `ops` more in the same style; `LSTM`, `GRU`, `RNN`, `Dense`, `Bidirectional` and
`Stack` are whole layers, `convert` brings them weights from other packages, `loss` and `optim` train them, `load` reads
their files, `Scorer` runs them on many sequences, `Sessions` on many whose input comes bit by bit.  numpy arrays in,
numpy arrays out.
"""

import importlib
from typing import TYPE_CHECKING, Any

try:
    from ._cpu import SOURCES as _built  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "blockcell._cpu":
        raise
    from .installing import not_built

    raise ImportError(not_built(__path__[0])) from None

from . import loss, ops, optim, raw_ops
from ._kernels import build_info
from ._threads import get_num_threads, set_num_threads
from ._version import __version__ as __version__
from .errors import FormatError
from .layers import GRU, LSTM, RNN, Bidirectional, Dense, GRUState, LSTMState, Quantized, RNNState, Stack
from .layers.loading import load
from .scorer import Scorer
from .sessions import Sessions

if TYPE_CHECKING:
    from . import convert as convert

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "Bidirectional",
    "Dense",
    "FormatError",
    "GRUState",
    "LSTMState",
    "Quantized",
    "RNNState",
    "Scorer",
    "Sessions",
    "Stack",
    "build_info",
    "convert",
    "get_num_threads",
    "load",
    "loss",
    "ops",
    "optim",
    "raw_ops",
    "set_num_threads",
]


def __getattr__(name: str) -> Any:
    """Import `convert` when it is first used; most programs do without it."""
    if name == "convert":
        return importlib.import_module(".convert", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
