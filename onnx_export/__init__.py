"""The ops and layers of `blockcell` as ONNX graphs: `build` makes models of ops, `export` writes layers, `link`
completes models from TensorFlow, `Session` runs them on onnxruntime, `verify` compares what kernels and runtimes give.
`training_step` writes a step of a layer's training, which `TrainingSession` runs.

A file or folder imports from those above it. All models consist of what ``cells/`` makes, so a change there changes
`build`, `link`, `export` and `training_step`; ``layers/`` is in the models of layers, which `export` and
`training_step` make.

=======================  ===========================================================================================
``text.py``              graph text: ONNX's textual syntax with two additions
``nodes.py``             nodes of any kind: made, read, renamed, selected
``activations.py``       activations and their slopes as graph text

``cells/``               the nodes of an op or of a layer's cell
``lstm.py``              the equations of an LSTM as graph text; so ``gru.py``, ``gru_reset_after.py``, ``rnn.py``
``config.py``            `Config`: what the graph of an op depends on, checked; a layer has checked its own attributes
``loops.py``             loops over steps: Scan, Loop, unrolled; `StepMask` is how ops have ``seq_len_max``
``integers.py``          int8 GEMM with quantized activations
``body.py``              `op_function`: the nodes of an op, for all steps at once or in a loop

``forms.py``             the form of a loop, which callers or providers choose

``layers/``              the graph of a layer
``graph_builder.py``     `GraphBuilder`: nodes over the sequences of a batch; `zero_padding` is how layers have lengths
``signature.py``         inputs and outputs of the models of layers
``weights.py``           weights as a model has them: in its dtype, in codes, in the layout of ONNX's own nodes
``layer_graph.py``       `LayerGraph`: the cells of a layer, connected
``writing.py``           arguments that `export` and `training_step` have both, and the file

``training/``            what `training_step` alone needs
``losses.py``            losses as graph text
``optimizers.py``        optimizers as graph text
``step.py``              `training_step`

``build.py``             `build`: the model of an op
``link.py``              `link`: functions for the block ops in models from TensorFlow
``export.py``            `export`: the model of a layer, with its weights

``runtime.py``           onnxruntime, its providers, and what works around their faults
``call.py``              `LayerCall`, `StepCall`: arguments and results of a layer or a step as those of its model
``session.py``           `Session`
``training_session.py``  `TrainingSession`
``verification.py``      `verify`: kernels and runtimes against the formulas in float64
=======================  ===========================================================================================
"""

from importlib import import_module
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
from .training.step import training_step

if TYPE_CHECKING:
    from .session import Session
    from .training_session import TrainingSession
    from .verification import verify

__all__ = ["Session", "TrainingSession", "build", "export", "link", "training_step", "verify"]


def __getattr__(name: str) -> Any:
    modules = {"Session": "session", "TrainingSession": "training_session", "verify": "verification"}
    if name in modules:  # onnxruntime is loaded by those who run graphs, not by those who only make them
        return getattr(import_module(f".{modules[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
