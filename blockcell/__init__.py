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
    if error.name not in ("blockcell._cpu", "blockcell._cyutility"):  # the first imports the second
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
    from . import keras as keras
    from . import tensorflow as tensorflow
    from . import torch as torch

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
    """Import `convert`, `keras`, `tensorflow` or `torch` when it is first used; most programs do without them."""
    if name in ("convert", "keras", "tensorflow", "torch"):
        return importlib.import_module(f".{name}", __name__)
    places = [module.__name__ for module in (raw_ops, ops, loss, optim) if name in module.__all__]
    advice = f"; expected {places[0]}.{name}" if places else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{advice}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
