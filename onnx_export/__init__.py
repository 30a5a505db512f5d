"""The ops and layers of `blockcell` as ONNX graphs: `build` makes models of ops, `export` writes layers, `link`
completes models from TensorFlow, `Session` runs them on onnxruntime, `verify` compares what kernels and runtimes give.
`training_step` writes a step of a layer's training, which `TrainingSession` runs.

=======================  ===========================================================================================
``lstm.py``              the equations of an LSTM as graph text; so ``gru.py``, ``gru_reset_after.py``, ``rnn.py``
``activations.py``       activations and their slopes as graph text
``text.py``              graph text: ONNX's textual syntax with two additions
``config.py``            `Config`: what the graph of an op depends on, and checks of that; the oldest opsets
``build.py``             `build`, the model of an op; its `FORMS` choose the form of the loop for each provider
``body.py``              the nodes of an op: for all steps at once, or in a loop
``nodes.py``             nodes of any kind: made, read, renamed, selected
``loops.py``             loops over steps: Scan, Loop, unrolled; `StepMask` is how ops have ``seq_len_max``
``export.py``            `export`, the model of a layer
``layer_graph.py``       `LayerGraph`: the cells of a layer, connected
``graph_builder.py``     `GraphBuilder`: nodes over the sequences of a batch; `zero_padding` is how layers have lengths
``integers.py``          int8 GEMM with quantized activations
``signature.py``         the inputs and outputs of the models of layers
``call.py``              `LayerCall`: arguments and results of a layer as those of its model
``link.py``              `link`: functions for the block ops in models from TensorFlow
``training.py``          `training_step`; ``losses.py`` and ``optimizers.py`` have their graph text
``training_session.py``  `TrainingSession`
``session.py``           `Session`
``runtime.py``           onnxruntime, its providers, and what works around their faults
``verification.py``      `verify`: kernels and runtimes against the formulas in float64
=======================  ===========================================================================================
"""

from typing import TYPE_CHECKING, Any

try:
    import onnx  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "onnx":
        raise
    raise ModuleNotFoundError("onnx_export needs onnx, which is not installed: pip install onnx", name="onnx") from None

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
