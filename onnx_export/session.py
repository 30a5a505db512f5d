"""`Session`: a model that is called with arrays, like its op or layer."""

from __future__ import annotations

import os
import warnings
from abc import ABC, abstractmethod
from collections import namedtuple
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
from onnx import ModelProto, TensorProto, helper

from blockcell.argument_reader import ArgumentReader, conversion, form, is_array
from blockcell.convert.onnx_graph import read_model
from blockcell.errors import short
from blockcell.files import check, parse
from blockcell.optable import LETTERS, OPS, Array, Op, sizes_of

from .build import build
from .call import KINDS, LayerCall, StepCall
from .cells.config import LOOPS, Value, check_attributes, input_tensors
from .forms import SLOW
from .nodes import nodes_of
from .runtime import PROVIDERS, NodePlacement, RuntimeModel, why_no_dtype, why_not

Model = TypeVar("Model", bound=RuntimeModel)


class BaseSession(ABC, Generic[Model]):
    """The models that run for a session: on the CPU one for all sizes, on a GPU one for each set of sizes."""

    def __init__(self, name: str, provider: str, model: ModelProto) -> None:
        self._name, self.provider, self.model = name, provider, model
        self._free = [  # the sizes that the model leaves open, and where they are
            (dim.dim_param, value.name, axis)
            for value in model.graph.input
            for axis, dim in enumerate(value.type.tensor_type.shape.dim)
            if dim.dim_param
        ]
        self._running: dict[tuple[tuple[str, int], ...], Model] = {}

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._name} on {self.provider}>"

    @abstractmethod
    def _start(self, sizes: dict[str, int]) -> Model:
        """Make the model ready to run for these sizes, or for all of them if there are none."""

    def _model_for(self, sizes: dict[str, int]) -> Model:
        key = () if () in self._running else tuple(sorted(sizes.items()))
        if key not in self._running:
            self._running[key] = self._start(sizes)
        return self._running[key]

    def _free_sizes(self, feeds: Mapping[str, Array]) -> dict[str, int]:
        """Return the values of the sizes that the model leaves open."""
        return {letter: feeds[name].shape[axis] for letter, name, axis in self._free}

    @property
    def placement(self) -> list[NodePlacement]:
        """Where every node runs, also in loops. On a GPU, an op or layer must have been called once before."""
        if not self._running:
            message = "on a GPU there is a graph for every set of sizes; call the session first"
            raise RuntimeError(f"{self._name}: {message}")
        return [*self._running.values()][-1].placement()


class Session(BaseSession[RuntimeModel]):
    """An op or a model that is called with arrays. The model of a layer is called like the layer.

    Parameters
    ----------
    op_or_model : str, path_like or onnx.ModelProto
        The name of an op, for which `build` makes the model; a model; or the path of one, a str that ends in ``.onnx``
        or a path object.
    provider : {"cpu", "cuda", "webgpu"}
        Where it runs: on the CPU; on a GPU of NVIDIA's with the package onnxruntime-gpu; on any GPU with one of the
        packages onnxruntime-ep-webgpu and onnxruntime-webgpu, which has no float64. On a GPU, a node that the provider
        cannot run is an error instead of a silent detour over the CPU (WebGPU leaves control flow and what has no
        floats to the CPU); float32 products are computed in float32, not TF32; and an op gets a graph of its own for
        every set of sizes it is called with, so that no sizes are left to compute, as does a layer's model. Any number
        of threads may call a session. On the CPU they run at once; on CUDA one runs a graph, and on WebGPU one runs any
        graph of the process, while the others wait.
    **build_options
        For an op: what `build` takes, such as ``dtype`` and ``attrs``. Without ``loop``, the form of a sequence is the
        provider's, as in `build`.

    Raises
    ------
    TypeError
        ``op_or_model`` is neither a name nor a path nor a model, or there are options for a model.
    ValueError
        The provider is unknown or has no numbers of this kind, `build` cannot make the model, or a model is damaged or
        its metadata are not those of `build` and `export`.
    OSError
        The model cannot be read.
    RuntimeError
        onnxruntime has no such provider here, or it cannot run all of the model.

    Warns
    -----
    RuntimeWarning
        The model is slow on this provider: it has a Scan or Loop, whose steps WebGPU leaves to the CPU.
    """

    def __init__(
        self, op_or_model: str | os.PathLike[str] | ModelProto, *, provider: str = "cpu", **build_options: Any
    ) -> None:
        check_provider(provider)
        if isinstance(op_or_model, os.PathLike) or (isinstance(op_or_model, str) and op_or_model.endswith(".onnx")):
            op_or_model = read_model(op_or_model)
        if isinstance(op_or_model, str):
            model = build(op_or_model, **build_options)
        elif not isinstance(op_or_model, ModelProto):
            kind = type(op_or_model).__name__
            raise TypeError(f"op_or_model is of type {kind}; expected an op's name, an onnx.ModelProto or a path")
        elif build_options:
            raise TypeError(f"{', '.join(build_options)}: options for building an op, but op_or_model is a model")
        else:
            model = op_or_model
        metadata = read_metadata(model)
        if isinstance(metadata.call, StepCall):
            raise ValueError(f"{model.graph.name}: the model is a training step; expected TrainingSession for it")
        super().__init__(metadata.op.name if metadata.op else model.graph.name, provider, model)
        self.op, self.attributes = metadata.op, metadata.attributes
        self._layer = metadata.call
        self.dtype = _dtype(model)
        self._reader = ArgumentReader(self._name)
        self._inputs = [value.name for value in model.graph.input]
        outputs = [value.name for value in self.model.graph.output]
        self._result: Any = self.op.result if self.op else namedtuple("Outputs", outputs, rename=True)
        is_op_name = isinstance(op_or_model, str)
        self._rebuilt = build_options | {"op": op_or_model, "provider": provider} if is_op_name else {}
        if self.op and metadata.loop == "native":  # of an older blockcell; without rows it may end the process
            raise ValueError(f"{self._name}: the model is an op with loop='native'; expected one that is built anew")
        if metadata.loop == "native" and provider == "cpu" and self.dtype == np.float64:
            raise ValueError(f"{self._name}: loop='native' of float64 does not run on onnxruntime's CPU provider")
        if reason := why_no_dtype(provider, self.dtype):
            raise ValueError(f"{self._name}: dtype is {self.dtype} and provider {provider!r}, but {reason}")
        if not self._rebuilt:
            warn_of_slow(self._name, self.model, provider)
        if provider == "cpu" or not (self._rebuilt or self._layer):
            self._running[()] = RuntimeModel(model, provider)

    def __call__(self, **arguments: Any) -> Any:
        """Run it.

        Takes all of the op's arguments by name. Those that cannot influence the results may be left out, as may
        ``name`` and the attributes; an attribute that is given must be the one that the model was built with.

        The model of a layer takes x and, where it was exported with them, state, lengths and reset, which may be left
        out as in the layer's calls; one for training also takes weights, a dict, and d_y and d_state, which may be left
        out as in ``backward``.

        Returns
        -------
        tuple
            The op's named tuple of numpy arrays. Of a layer, a named tuple (y, state), for training (y, state, d_x,
            d_state, grads), each in the form that the layer gives it. Of another model, a named tuple of its outputs.

        Raises
        ------
        TypeError
            An argument is missing or unknown, or an array's dtype is not the model's.
        ValueError
            A rank, size or range is wrong, or an attribute is not the model's.
        """
        if self._layer:
            feeds = self._layer.feeds(arguments)
            sizes = self._free_sizes(feeds)
            if sizes.get("B") == 0:  # on which onnxruntime fails, before 1.32, where it multiplies in integers
                return self._layer.result(self._layer.without_rows(sizes))
            has_steps = sizes.get("T") != 0
            feeds = feeds if has_steps else self._layer.with_a_step(feeds)
            return self._layer.result(self._model_for(self._free_sizes(feeds)).run(feeds), has_steps)
        self._check_names(arguments)
        feeds = {name: self._read(name, arguments[name]) for name in self._inputs}
        sizes = self._check_sizes(feeds)
        # onnxruntime's Scan fails on no steps, and some providers end the process without rows or cells.
        if self.op and (sizes.get("T") == 0 or (0 in (sizes.get("B"), sizes.get("H")) and self.provider != "cpu")):
            return self._result(*self._zeros(self.op, sizes))
        return self._result(*self._model_for(sizes).run(feeds))

    def _zeros(self, op: Op, sizes: dict[str, int]) -> list[Array]:
        """Return the results without a step, a row or a cell, from the call's sizes and those that the model has."""
        for value, tensor in zip(self.model.graph.output, op.outputs, strict=False):
            for dim, word in zip(value.type.tensor_type.shape.dim, tensor.shape.split(), strict=False):
                if dim.dim_param in ("", "0"):  # as `build` writes the size 0
                    sizes.setdefault(word, dim.dim_value)
        return [np.zeros(sizes_of(tensor.shape, sizes), self.dtype) for tensor in op.outputs]

    def _start(self, sizes: dict[str, int]) -> RuntimeModel:
        """Build an op for these sizes, or start a model."""
        if not self._rebuilt:
            return RuntimeModel(self.model, self.provider, sizes)
        return RuntimeModel(build(**self._rebuilt | {"sizes": sizes, "static": True}), self.provider)

    # -------------------------------------------------------------------------------------------------------- arguments
    def _check_names(self, arguments: Mapping[str, Any]) -> None:
        if missing := [name for name in self._inputs if arguments.get(name) is None]:
            raise TypeError(f"{self._name}: {', '.join(missing)} missing; expected {', '.join(self._inputs)}")
        ignored = [tensor.name for tensor in input_tensors(self.op)] if self.op else []
        expected_names = {*self._inputs, *ignored, *self.attributes, "name"}
        if unknown := [name for name in arguments if name not in expected_names]:
            raise TypeError(f"{self._name}: {', '.join(unknown)} unknown; expected {', '.join(self._inputs)}")
        for name, built_value in self.attributes.items():
            value = arguments.get(name, built_value)
            if name == "activation":
                value = self._reader.activation(name, value)
            if value != built_value and not (
                isinstance(built_value, float) and np.isnan(value) and np.isnan(built_value)
            ):
                raise ValueError(f"{self._name}: {name} is {value!r}; expected {built_value!r}, as the model was built")

    def _read(self, name: str, value: Any) -> Array:
        if name == "seq_len_max":
            return np.array(self._reader.integer(name, value), np.int64)
        array = self._reader.array(name, value)
        if not is_array(value):
            self._reader.dtype_number([(name, value, array)])
        elif array.dtype.newbyteorder("=") != self.dtype and self.op:
            raise TypeError(
                f"{self._name}: {name} has dtype {array.dtype}; expected {self.dtype}, as the model was built;"
                f" {conversion(name, value, self.dtype)}"
            )
        dtype = self.dtype if self.op else array.dtype
        return np.ascontiguousarray(array, dtype)

    def _check_sizes(self, feeds: Mapping[str, Array]) -> dict[str, int]:
        """Check every shape against the table and the model; return the sizes of this call."""
        sizes: dict[str, int] = {}
        if self.op is None:
            return sizes
        sources: dict[str, str] = {}
        tensors = [(tensor, feeds[tensor.name]) for tensor in self.op.inputs if tensor.name in feeds]
        for tensor, array in tensors:
            words = tensor.shape.split()
            if array.ndim != len(words):
                expected = f"expected rank {len(words)}, {form(tensor.shape)}"
                raise ValueError(f"{self._name}: {tensor.name} has shape {array.shape}; {expected}")
            for word, size in zip(words, array.shape, strict=True):
                if word in LETTERS and word not in sizes:
                    sizes[word], sources[word] = size, tensor.name
        for tensor, array in tensors:  # where a gradient needs neither x nor a state
            word = tensor.shape.split()[-1]
            if "H" not in sizes and word[0].isdigit():
                sizes["H"], sources["H"] = array.shape[-1] // int(word[0]), tensor.name
            if "I" not in sizes and tensor.shape.startswith("I+H") and "H" in sizes:
                sizes["I"], sources["I"] = max(0, len(array) - sizes["H"]), tensor.name
        for tensor, array in tensors:
            expected_shape = sizes_of(tensor.shape, sizes)
            if array.shape != expected_shape:
                origin = [f"{k}={sizes[k]} from {sources[k]}" for k in sources if k in tensor.shape]
                expected = f"expected {form(tensor.shape)} = {expected_shape} with {', '.join(origin)}"
                raise ValueError(f"{self._name}: {tensor.name} has shape {array.shape}; {expected}")
        for value in self.model.graph.input:
            dims = value.type.tensor_type.shape.dim  # `build` writes 0, which onnxruntime must not know, as a name
            built_sizes = [0 if dim.dim_param == "0" else dim.dim_value or None for dim in dims]
            shape = feeds[value.name].shape
            if any(fixed not in (None, size) for fixed, size in zip(built_sizes, shape, strict=True)):
                fixed_sizes = ", ".join("any" if fixed is None else str(fixed) for fixed in built_sizes)
                expected = f"expected ({fixed_sizes}), as the model was built"
                raise ValueError(f"{self._name}: {value.name} has shape {shape}; {expected}")
        if "seq_len_max" in feeds and not 0 <= feeds["seq_len_max"] <= sizes.get("T", 0):
            expected = f"expected 0 <= seq_len_max <= T = {sizes.get('T', 0)} from x"
            raise ValueError(f"{self._name}: seq_len_max is {feeds['seq_len_max']}; {expected}")
        return sizes


def warn_of_slow(name: str, model: ModelProto, provider: str) -> None:
    """Warn of a node of the model's, in functions and bodies too, that is slow on the provider."""
    if slow := next((node.op_type for node in nodes_of(model) if node.op_type in SLOW.get(provider, ())), ""):
        warnings.warn(
            f"{name}: its steps run in a {slow}, which {provider!r} leaves to the CPU, with copies of arrays "
            f"at every step; expected a model that was built or exported with provider={provider!r}",
            RuntimeWarning,
            stacklevel=3,
        )


def check_provider(provider: str) -> None:
    """Raise an error unless there is such a provider here."""
    if provider not in PROVIDERS:
        raise ValueError(f"provider is {provider!r}; expected one of {', '.join(PROVIDERS)}")
    if reason := why_not(provider):
        raise RuntimeError(f"provider is {provider!r}, but {reason}")


def _dtype(model: ModelProto) -> np.dtype[Any]:
    """Return the dtype of the first output."""
    outputs = model.graph.output
    kind = outputs[0].type.tensor_type.elem_type if outputs else TensorProto.UNDEFINED
    if kind not in helper.get_all_tensor_dtypes():
        raise ValueError(f"{model.graph.name}: the model has no output, or the first is no tensor of a known dtype")
    return helper.tensor_dtype_to_np_dtype(kind)


@dataclass(frozen=True)
class Metadata:
    """What the metadata of a model say, checked; nothing, if blockcell did not make it."""

    loop: str = ""
    op: Op | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict)
    """Of the op."""
    call: LayerCall | StepCall | None = None
    """How the model of a layer, or of a step of its training, is called."""


def read_metadata(model: ModelProto) -> Metadata:
    """Check and return the metadata of a model."""
    entries = [(entry.key, entry.value) for entry in model.metadata_props if entry.key.startswith("blockcell.")]
    texts = {key.removeprefix("blockcell."): text for key, text in entries}
    name = f"the metadata of the model {short(model.graph.name)}"
    if len(texts) < len(entries):
        raise ValueError(f"{name} have an entry of blockcell's twice: {', '.join(sorted(key for key, _ in entries))}")
    if ("op" in texts or "layer" in texts) and texts.get("loop") not in LOOPS:
        raise ValueError(f"{name} have blockcell.loop {short(texts.get('loop'))}; expected one of {', '.join(LOOPS)}")
    if "op" in texts and ("layer" in texts or texts["op"] not in OPS):
        expected = f"expected one of {', '.join(OPS)}, and no blockcell.layer"
        raise ValueError(f"{name} have blockcell.op {short(texts['op'])}; {expected}")
    loop = texts.get("loop", "")
    try:
        if "op" in texts:
            op = OPS[texts["op"]]
            attributes = _read_attributes(op, texts.get("attributes", "{}"))
            _check_model(op, model)
            return Metadata(loop, op, attributes)
        if "layer" in texts:
            tree = parse(texts["layer"])
            check(tree)
            is_step = "training" in texts
            call: LayerCall | StepCall
            call = StepCall(model, tree, parse(texts["training"])) if is_step else LayerCall(model, tree)
            return Metadata(loop, call=call)
    except (RecursionError, ValueError) as error:
        raise ValueError(f"{name} and the model are not those that blockcell makes: {error}") from None
    return Metadata(loop)


def _read_attributes(op: Op, text: str) -> dict[str, Value]:
    attributes, names = parse(text), [attribute.name for attribute in op.attributes]
    if not isinstance(attributes, dict) or sorted(attributes) != sorted(names):
        raise ValueError(f"blockcell.attributes is {short(text)}; expected {', '.join(names) or 'none'}")
    return check_attributes(op.name, op, attributes)


def _check_model(op: Op, model: ModelProto) -> None:
    """Raise a ValueError unless the model's inputs and outputs are the op's."""
    ranks = {tensor.name: tensor.rank for tensor in input_tensors(op)}
    inputs = [value.name for value in model.graph.input]
    outputs = [value.name for value in model.graph.output]
    results = [tensor.name for tensor in op.outputs]
    if len({*inputs} & ranks.keys()) < len(inputs) or outputs != results:
        has = f"inputs {short(', '.join(inputs))} and the outputs {short(', '.join(outputs))}"
        raise ValueError(f"it has the {has}; expected some of {', '.join(ranks)}, and {', '.join(results)}")
    kind = model.graph.output[0].type.tensor_type.elem_type
    for value in model.graph.input:
        tensor_type = value.type.tensor_type
        expected_type = TensorProto.INT64 if value.name == "seq_len_max" else kind
        if (
            kind not in KINDS
            or tensor_type.elem_type != expected_type
            or len(tensor_type.shape.dim) != ranks[value.name]
        ):
            raise ValueError(f"its input {value.name} has another dtype or rank than the op's")
