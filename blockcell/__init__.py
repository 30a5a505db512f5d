"""TensorFlow's fused RNN block cells, forward and backward, without TensorFlow.

`raw_ops` has TensorFlow's eight ops, `ops` four more in the same style; `LSTM`, `GRU`, `Dense`, `Bidirectional` and
`Stack` are whole layers, `convert` brings them weights from other packages, `loss` and `optim` train them, `load` reads
their files.  numpy arrays in, numpy arrays out.
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
from .layers import GRU, LSTM, Bidirectional, Dense, GRUState, LSTMState, Stack

if TYPE_CHECKING:
    from . import convert as convert
    from .layers.loading import load as load

__all__ = [
    "GRU",
    "LSTM",
    "Bidirectional",
    "Dense",
    "FormatError",
    "GRUState",
    "LSTMState",
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


_LATER = {"convert": ".convert", "load": ".layers.loading"}  # what they import takes as long as everything else


def __getattr__(name: str) -> Any:
    """Import what _LATER names when it is first used."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(_LATER[name], __name__)
    globals()[name] = found = module if name == "convert" else getattr(module, name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
