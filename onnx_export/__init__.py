"""The ops of `blockcell` as ONNX graphs: `build` makes models, `link` completes those from TensorFlow, `Session` runs
them on onnxruntime.
"""

from typing import TYPE_CHECKING, Any

from .build import build
from .link import link

if TYPE_CHECKING:
    from .session import Session

__all__ = ["Session", "build", "link"]


def __getattr__(name: str) -> Any:
    if name == "Session":  # onnxruntime is loaded by those who run graphs, not by those who only make them
        from .session import Session

        return Session
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
