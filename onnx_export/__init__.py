"""The ops and layers of `blockcell` as ONNX graphs: `build` makes models of ops, `export` writes layers, `link`
completes models from TensorFlow, `Session` runs them on onnxruntime, `verify` compares what kernels and runtimes give.
`training_step` writes a step of a layer's training, which `TrainingSession` runs.
"""

from typing import TYPE_CHECKING, Any

try:
    import onnx  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "onnx":
        raise
    from blockcell.installing import how_to_install

    message = f"onnx_export needs onnx, which is not installed: {how_to_install('onnx')}"
    raise ModuleNotFoundError(message, name="onnx") from None

from .build import build
from .export import export
from .link import link
from .training import training_step

if TYPE_CHECKING:
    from .session import Session
    from .training_session import TrainingSession
    from .verification import verify

__all__ = ["Session", "TrainingSession", "build", "export", "link", "training_step", "verify"]


def __getattr__(name: str) -> Any:
    if name == "Session":  # onnxruntime is loaded by those who run graphs, not by those who only make them
        from .session import Session

        return Session
    if name == "TrainingSession":
        from .training_session import TrainingSession

        return TrainingSession
    if name == "verify":
        from .verification import verify

        return verify
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
