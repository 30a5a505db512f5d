"""Models on onnxruntime and its providers. No other module imports onnxruntime."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, inliner, parser, shape_inference

from blockcell.errors import short
from blockcell.optable import Array

from .layers.signature import NEW
from .nodes import graphs

try:
    import onnxruntime
except ModuleNotFoundError as error:
    if error.name != "onnxruntime":
        raise
    message = "onnx_export needs onnxruntime, which is not installed: pip install onnxruntime"
    raise ModuleNotFoundError(message, name="onnxruntime") from None


PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider", "webgpu": "WebGpuExecutionProvider"}
OPTIONS = {"cuda": {"use_tf32": "0"}}
CONTROL_FLOW = {"If", "Loop", "Scan"}
# What WebGPU may leave to the CPU beside control flow: lengths, masks and indices, for which it has few kernels.
NO_FLOATS = {TensorProto.BOOL, TensorProto.INT32, TensorProto.INT64}
HALF = '<ir_version: 8, opset_import: ["": 18]> half (float16[1] a) => (float[1] b) { b = Cast <to = 1> (a) }'
ANY = '<ir_version: 8, opset_import: ["": 18]> any (float[1] a) => (float[1] b) { b = Tanh (a) }'
_ON_WEBGPU = Lock()
"""Whoever starts or runs a model on WebGPU holds it: two sessions at once have ended the process."""


class KeptValues:
    """Values that stay on a provider's device from run to run, in two sets of memory that change places.

    A run reads the one and writes the other, because its inputs and outputs must not share memory.
    """

    def __init__(self, arrays: Mapping[str, Array], provider: str) -> None:
        # onnxruntime uses the memory of an array, where it can, so each value has an array of its own.
        self.inputs = {name: _ort_value(np.array(array, order="C"), provider) for name, array in arrays.items()}
        """The values that the next run reads."""
        self.outputs = {name: _ort_value(np.zeros_like(array, order="C"), provider) for name, array in arrays.items()}
        """The values that the next run writes."""
        self.turn = 0

    def exchange(self) -> None:
        """Exchange the two sets: the next run reads what the last one has written."""
        self.inputs, self.outputs, self.turn = self.outputs, self.inputs, 1 - self.turn

    def array(self, name: str) -> Array:
        """Return a copy of a value."""
        return np.array(self.inputs[name].numpy())


def _ort_value(array: Array, provider: str) -> Any:
    """Return an array as an onnxruntime.OrtValue in the provider's memory."""
    # Numbers that are no floats are read by the CPU too, and WebGPU has few kernels for them. Python has no way to the
    # memory of the WebGPU provider that is built in.
    on_cpu = provider == "cpu" or array.ndim == 0
    if provider == "webgpu":
        on_cpu = on_cpu or array.dtype.kind != "f" or _plugin() is None
    if on_cpu:
        return onnxruntime.OrtValue.ortvalue_from_numpy(array)
    return onnxruntime.OrtValue.ortvalue_from_numpy(array, provider, 0)


class NodePlacement(NamedTuple):
    """A node of the graph that onnxruntime made of the model, and the provider that runs it."""

    op_type: str
    name: str
    provider: str


class RuntimeModel:
    """A model that onnxruntime has made ready on a provider, which must be here.

    ``sizes`` are the values of sizes that the model leaves open. ``settings``, attributes of onnxruntime's
    SessionOptions, and ``provider_options`` come on top of what a `Session` needs. ``session`` is onnxruntime's own.

    Raises
    ------
    ValueError
        onnxruntime cannot load the model.
    RuntimeError
        The provider cannot run all of it.
    """

    def __init__(
        self,
        model: ModelProto,
        provider: str,
        sizes: Mapping[str, int] | None = None,
        settings: Mapping[str, Any] | None = None,
        provider_options: Mapping[str, str] | None = None,
    ) -> None:
        self.provider = provider
        self._sizes, self._settings, self._provider_options = sizes or {}, settings or {}, provider_options or {}
        self._model = _name_nodes(model) if provider == "webgpu" else model
        # On CUDA, because memory of a Scan is free for other runs of the session before its kernels have run.
        turns: dict[str, AbstractContextManager[Any]] = {"cuda": Lock(), "webgpu": _ON_WEBGPU}
        self._turn = turns.get(provider, nullcontext())
        with self._turn:
            self.session = self._start_session(self._options())
        if provider == "webgpu" and (misplaced := self._float_nodes_on_cpu()):
            nodes = ", ".join(f"{node.op_type} {node.name}" for node in misplaced[:3])
            raise RuntimeError(
                f"provider is 'webgpu', but onnxruntime {onnxruntime.__version__} would run {nodes} of "
                f"{model.graph.name} on the CPU; expected a model without them or, of an op or a layer, another `loop`"
            )

    def run(self, feeds: Mapping[str, Array]) -> list[Array]:
        """Run the model; return its outputs in their order.

        onnxruntime gives them on the CPU, so that nothing is left to copy to a GPU behind the run.
        """
        try:
            with self._turn:
                return self.session.run(None, feeds)  # type: ignore[no-any-return]
        except Exception as error:  # onnxruntime's own class
            if "Too many storage buffers" not in str(error):
                raise
            raise RuntimeError(
                f"{self._model.graph.name}: a node has more inputs and outputs than WebGPU lets it have; expected a "
                f"model that is built or exported with static=True (onnxruntime: {error})"
            ) from error

    def placement(self) -> list[NodePlacement]:
        """Return where every node runs, also in bodies."""
        assigned = self._assignments()
        if self.provider != "webgpu" or any(node.provider == PROVIDERS["webgpu"] for node in assigned):
            return assigned
        # onnxruntime 1.30 and older do not tell WebGPU's nodes, so they are what is left in the graph.
        with tempfile.TemporaryDirectory() as folder:
            options = self._options()
            options.optimized_model_filepath = str(Path(folder) / "model.onnx")
            self._start_session(options)
            model = onnx.load(options.optimized_model_filepath)
        names = {node.name for node in assigned}
        others = (node for graph, _ in graphs(model.graph) for node in graph.node if node.name not in names)
        return [*assigned, *(NodePlacement(node.op_type, node.name, PROVIDERS["webgpu"]) for node in others)]

    # ---------------------------------------------------------------------------------------------------------- private
    def _options(self) -> Any:
        options = onnxruntime.SessionOptions()
        for name, size in self._sizes.items():
            options.add_free_dimension_override_by_name(name, size)
        options.log_severity_level = 4  # errors come as exceptions; the log would repeat them
        # Idle threads look for the next run for 50 microseconds instead of tens of milliseconds, which runs one after
        # the other do not notice, but blockcell's calls in between do (benchmarks/beside.py).
        options.add_session_config_entry("session.intra_op.spin_duration_us", "50")
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        for name, value in self._settings.items():
            setattr(options, name, value)
        if self.provider == "cuda":
            options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
            if hasattr(onnxruntime, "preload_dlls"):
                onnxruntime.preload_dlls()
        return options

    def _start_session(self, options: Any) -> Any:
        """Return an onnxruntime.InferenceSession, which has no types."""
        name, content = PROVIDERS[self.provider], self._model.SerializeToString()
        try:
            if self.provider == "webgpu" and (device := _plugin()) is not None:
                options.add_provider_for_devices([device], dict(self._provider_options))
                session = onnxruntime.InferenceSession(content, options, enable_fallback=0)
            else:
                choice = [(name, OPTIONS.get(self.provider, {}) | dict(self._provider_options))]
                session = onnxruntime.InferenceSession(content, options, providers=choice, enable_fallback=0)
        except Exception as error:  # onnxruntime's own classes
            if "fallback to CPU EP" in str(error):
                raise RuntimeError(
                    f"provider is {self.provider!r}, but it has no kernel for a part of {self._model.graph.name}; "
                    "expected a model of opset 15 to 20 and, of layers, another loop: 'native' has kernels for LSTMs "
                    "without peephole and GRUs that reset after the product alone, and 'loop' needs sizes T and B "
                    f"(onnxruntime: {error})"
                ) from error
            if type(error).__name__ in ("Fail", "InvalidArgument", "InvalidGraph", "InvalidProtobuf"):
                graph_name = short(self._model.graph.name)
                raise ValueError(f"onnxruntime cannot load the model {graph_name}: {error}") from error
            raise
        active = session.get_providers()
        if active[0] != name:
            raise RuntimeError(f"provider is {self.provider!r}, but onnxruntime fell back to {', '.join(active)}")
        return session

    def _assignments(self) -> list[NodePlacement]:
        """Return where nodes run, as far as onnxruntime tells it."""
        if not hasattr(self.session, "get_provider_graph_assignment_info"):
            raise RuntimeError(f"onnxruntime {onnxruntime.__version__} does not tell where nodes run; 1.24 does")
        return [
            NodePlacement(node.op_type, node.name, assignment.ep_name)
            for assignment in self.session.get_provider_graph_assignment_info()
            for node in assignment.get_nodes()
        ]

    def _float_nodes_on_cpu(self) -> list[NodePlacement]:
        on_cpu = [node for node in self._assignments() if node.provider == PROVIDERS["cpu"]]
        suspects = [node for node in on_cpu if node.op_type not in CONTROL_FLOW]
        if not suspects:
            return []
        floats: dict[str, bool] = {}  # by the nodes' names
        for graph, types in graphs(shape_inference.infer_shapes(self._model).graph):
            for node in graph.node:
                names = filter(None, (*node.input, *node.output))
                floats[node.name] = floats.get(node.name, False) or any(types.get(n) not in NO_FLOATS for n in names)
        return [node for node in suspects if floats.get(node.name, True)]


class SteppingModel(RuntimeModel):
    """A model that runs again and again, of which some inputs are kept values and some outputs their next ones."""

    def __init__(
        self, model: ModelProto, provider: str, kept: KeptValues, sizes: Mapping[str, int] | None = None
    ) -> None:
        super().__init__(model, provider, sizes)
        outputs = [value.name for value in model.graph.output]
        self._others = [name for name in outputs if name.removeprefix(NEW) not in kept.inputs]
        self._kept = kept
        self._bound: dict[int, tuple[Any, list[tuple[int, ...]], list[Any]]] = {}
        """A binding, the inputs' shapes and the other outputs, by the set of kept values that is read."""

    def step(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run the model once; return the outputs that are not kept, by name."""
        turn = self._kept.turn
        if turn not in self._bound:
            self._bound[turn] = self._bind_kept(), [], []
        bound, shapes, values = self._bound.pop(turn)  # to be put back when it has run
        for name, array in feeds.items():
            bound.bind_ortvalue_input(name, _ort_value(array, self.provider))
        new_shapes = [array.shape for array in feeds.values()]
        if shapes != new_shapes:
            for name in self._others:  # in place of arrays of other shapes
                bound.bind_output(name)
            values = []
        with self._turn:
            self.session.run_with_iobinding(bound)
        self._kept.exchange()
        values = values or bound.get_outputs()[: len(self._others)]
        self._bound[turn] = bound, new_shapes, values
        return {name: np.array(value.numpy()) for name, value in zip(self._others, values, strict=True)}

    def _bind_kept(self) -> Any:
        """Bind the kept values, once: to bind all of them at each step took a small model a sixth of its time."""
        bound = self.session.io_binding()
        for name in self._others:  # first, so that they are the first of the outputs
            bound.bind_output(name)
        for name, value in self._kept.inputs.items():
            bound.bind_ortvalue_input(name, value)
        for name, value in self._kept.outputs.items():
            bound.bind_ortvalue_output(NEW + name, value)
        return bound


def _name_nodes(model: ModelProto) -> ModelProto:
    """Return the model with the names that nodes have in onnxruntime: without functions, and with no empty name."""
    inlined: ModelProto = inliner.inline_local_functions(model)
    for graph, _ in graphs(inlined.graph):
        for node in graph.node:
            node.name = node.name or next(filter(None, node.output))
    return inlined


# ------------------------------------------------------------------------------------------------------ what is here
def why_not(provider: str) -> str:
    """Return what a provider lacks here and what to install, "" if it can run models."""
    if provider == "webgpu":
        return _why_no_webgpu()
    available = onnxruntime.get_available_providers()
    if PROVIDERS[provider] not in available:
        return (
            f"onnxruntime {onnxruntime.__version__} has only {', '.join(available)} here; the package onnxruntime-gpu "
            "has CUDA"
        )
    return ""


def why_no_dtype(provider: str, dtype: np.dtype[Any]) -> str:
    """Return why an installed provider has no numbers of this dtype, "" if it has them."""
    if provider == "webgpu" and dtype == np.float64:
        return "WebGPU has no float64; expected float32 or float16"
    if provider == "webgpu" and dtype == np.float16 and not _has_half():
        return "this GPU or its driver has no float16 (WebGPU's shader-f16); expected float32"
    return ""


@cache
def _why_no_webgpu() -> str:
    try:
        RuntimeModel(parser.parse_model(ANY), "webgpu")
    except Exception as error:  # of which there are many, in onnxruntime's own words
        message = str(error).strip().splitlines()[-1]
        if "Failed to get a WebGPU adapter" not in message:
            return message
        return (
            "there is no GPU with a Vulkan driver; install the Vulkan loader (Debian: libvulkan1) and a driver; "
            "one that computes on the CPU (Debian: chromium-common) needs its ICD file's name in VK_ICD_FILENAMES"
        )
    return ""


@cache
def _has_half() -> bool:
    try:
        RuntimeModel(parser.parse_model(HALF), "webgpu").run({"a": np.ones(1, np.float16)})
    except Exception:  # onnxruntime's own class, when it makes the shader
        return False
    return True


@cache
def _plugin() -> Any:
    """Return the device of the WebGPU plugin, a package of its own; None if onnxruntime has the provider built in."""
    name = PROVIDERS["webgpu"]
    if name in onnxruntime.get_available_providers():
        return None
    if not hasattr(onnxruntime, "register_execution_provider_library"):
        raise RuntimeError(f"onnxruntime {onnxruntime.__version__} takes no plugins; 1.24.4 does")
    if importlib.util.find_spec("onnxruntime_ep_webgpu") is None:
        raise RuntimeError("the package onnxruntime-ep-webgpu is missing: pip install onnxruntime-ep-webgpu")
    import onnxruntime_ep_webgpu

    def devices() -> list[Any]:
        return [device for device in onnxruntime.get_ep_devices() if device.ep_name == name]

    if not devices():
        onnxruntime.register_execution_provider_library("blockcell", onnxruntime_ep_webgpu.get_library_path())
    if not devices():
        raise RuntimeError(
            "onnxruntime finds no GPU; install its driver and the Vulkan loader (Debian: libvulkan1); for a Vulkan "
            "driver that computes on the CPU set ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER=1"
        )
    return devices()[0]
