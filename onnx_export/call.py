"""`LayerCall` and `StepCall`: arguments of a layer, or of a step of its training, become the inputs of its model, and
the model's outputs become results.
"""

from __future__ import annotations

import itertools
import json
import warnings
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from onnx import ModelProto, helper

from blockcell.argument_reader import ArgumentReader, conversion, form, is_array
from blockcell.convert import from_onnx
from blockcell.errors import short
from blockcell.files import ArrayInFile, check_arrays, leaf_descriptions, weights_of
from blockcell.layers import Layer
from blockcell.layers.loading import build_layer, described_output, described_sizes, described_state
from blockcell.layers.structure import STATES, read_parts
from blockcell.loss import LOSSES
from blockcell.optable import DTYPES, Array, sizes_of
from blockcell.optim import OPTIMIZERS, clip_global_norm

from .cells.config import NODE_WEIGHTS
from .layers.signature import (
    NEW,
    LayerArrays,
    Signature,
    layer_signature,
    put_first,
    step_memory,
    step_signature,
)

KINDS = [helper.np_dtype_to_tensor_dtype(dtype) for dtype in DTYPES]
Tree = Mapping[str, Any]  # a layer as `blockcell.files` describes it


class ModelCall:
    """Translates arguments to the inputs of a layer's model, and the model's outputs to results.

    Raises
    ------
    ValueError
        The model's inputs and outputs are not those of such a layer.
    """

    _required: tuple[str, ...]
    _takes: list[str]

    def __init__(self, model: ModelProto, tree: Tree) -> None:
        self.tree = tree
        self._model = model
        self._reader = ArgumentReader(tree["type"])
        self._inputs = {value.name: value.type.tensor_type for value in model.graph.input}
        self._dims = {name: _dims(type_) for name, type_ in self._inputs.items()}
        self._outputs = [value.name for value in model.graph.output]
        self._states = [
            prefix + name for prefix, cell in leaf_descriptions(tree) for name in STATES[cell["type"]]._fields
        ]
        self._with_state = not self._states or any(name.endswith("_prev") for name in self._inputs)
        shapes = self._weight_shapes()
        names = (prefix + tensor.name for prefix, cell in leaf_descriptions(tree) for tensor in weights_of(cell))
        self._weights = {name: shapes[name] for name in names if name in shapes}

    def _weight_shapes(self) -> Mapping[str, Sequence[Any]]:
        """Return the shapes of arrays of which some are weights."""
        return self._dims

    def _arrays(self) -> LayerArrays:
        """Check the layer's arrays and return their shapes."""
        kind, x = self._inputs["x"].elem_type if "x" in self._inputs else 0, _dims(self._inputs.get("x"))
        rows = x[:-1]
        if kind not in KINDS or not all(
            size == letter or (isinstance(size, int) and size > 0)
            for size, letter in itertools.zip_longest(rows[::-1], "BT"[: max(1, len(rows))])
        ):
            raise ValueError(f"its input x has the type {kind} and shape {x}; expected floats of (T, B, I) or (B, I)")
        dtype = helper.tensor_dtype_to_np_dtype(kind)
        check_arrays(self.tree, {name: ArrayInFile(dtype, tuple(shape), 0) for name, shape in self._weights.items()})
        sizes = {prefix: described_sizes(cell, prefix, self._weights) for prefix, cell in leaf_descriptions(self.tree)}
        states = {
            prefix + name: [rows[-1], sizes[prefix][name]]
            for prefix, cell in leaf_descriptions(self.tree)
            for name in STATES[cell["type"]]._fields
        }
        return LayerArrays(kind, x, described_output(self.tree, "", rows, sizes), states, self._weights)

    def _compare(self, signature: Signature) -> None:
        """Raise a ValueError unless the model's inputs and outputs have these types; keep the inputs' dtypes."""
        graph = self._model.graph
        for side, values, expected in zip(("input", "output"), (graph.input, graph.output), signature, strict=True):
            names = [value.name for value in values]
            if sorted(names) != sorted(expected):
                raise ValueError(f"it has the {side}s {short(', '.join(names))}; expected {', '.join(expected)}")
            for value in values:
                tensor_type, (element_type, shape) = value.type.tensor_type, expected[value.name]
                dims = _dims(tensor_type)
                if (tensor_type.elem_type, dims) != (element_type, shape):
                    has = f"its {side} {value.name} has the type {tensor_type.elem_type} and shape {dims}"
                    raise ValueError(f"{has}; expected {element_type}, {shape}")
        types = self._inputs.items()
        self._dtypes = {name: np.dtype(helper.tensor_dtype_to_np_dtype(type_.elem_type)) for name, type_ in types}

    def feeds(self, arguments: Mapping[str, Any]) -> dict[str, Array]:
        """Check the arguments; return all inputs of the model."""
        caller, expected = self._reader.caller, ", ".join(self._takes)
        if unknown := [name for name in arguments if name not in self._takes]:
            without = [name for name in unknown if name in ("lengths", "reset", "state")]
            hint = f"; the model was exported without {' and '.join(without)}" if without else ""
            raise TypeError(f"{caller}: {', '.join(unknown)} unknown; expected {expected}{hint}")
        values_given = {name: arguments.get(name) for name in self._takes}
        if missing := [name for name in self._required if name in values_given and values_given[name] is None]:
            raise TypeError(f"{caller}: {', '.join(missing)} missing; expected {expected}")
        values: dict[str, tuple[str, Any]] = {}  # by the model's names: the name in messages, and the value
        for name, value in values_given.items():
            if name == "state":
                values |= {f"{key}_prev": pair for key, pair in self._parts(self.tree, "", name, value)}
            elif name == "d_state":
                values |= {f"d_{key}": pair for key, pair in self._parts(self.tree, "", name, value)}
            elif name == "weights":
                values |= self._read_weights(value)
            else:
                values[name] = name, value
        sizes: dict[str, int] = {}
        return {name: self._read(name, *values[name], sizes) for name in self._inputs}

    def _state_of(self, feeds: Mapping[str, Array], form: str) -> Any:
        """Return the state whose arrays have names of this form among the inputs; None if they are no inputs."""
        if not self._states or form.format(self._states[0]) not in feeds:
            return None
        return self._state(self.tree, "", lambda name: feeds[form.format(name)])

    def _layer(self, feeds: Mapping[str, Array]) -> Layer:
        """Return the layer with the weights that are inputs, or that are in the model."""
        if next(iter(self._weights)) in feeds:
            return build_layer(self.tree, feeds)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of weights that quantize_dynamic has rounded
            layer: Layer = from_onnx(self._model)
            return layer

    # ----------------------------------------------------------------------------------------------------------- states
    def _parts(self, tree: Tree, prefix: str, label: str, value: Any) -> Iterator[tuple[str, tuple[str, Any]]]:
        """Yield the names of a state's arrays in the model, each with the name in messages and the value."""
        fields, children = described_state(tree)
        expected = f"({', '.join(fields)})"
        parts = read_parts(self._reader, label, value, fields, expected)
        for field, (part, part_value) in zip(fields, parts.items(), strict=True):
            if field in children:
                yield from self._parts(children[field], f"{prefix}{field}.", part, part_value)
            else:
                yield prefix + field, (part, part_value)

    def _state(self, tree: Tree, prefix: str, find: Callable[[str], Array]) -> Any:
        """Return the state whose arrays `find` gives by their names."""
        fields, children = described_state(tree)
        if children:
            return tuple(self._state(children[field], f"{prefix}{field}.", find) for field in fields)
        return STATES[tree["type"]](*(find(prefix + field) for field in fields))

    # ----------------------------------------------------------------------------------------------------------- arrays
    def _read_weights(self, value: Any) -> dict[str, tuple[str, Any]]:
        caller, expected = self._reader.caller, ", ".join(self._weights)
        if not isinstance(value, Mapping):
            raise TypeError(f"{caller}: weights is of type {type(value).__name__}; expected a dict with {expected}")
        if missing := [name for name in self._weights if value.get(name) is None]:
            raise TypeError(f"{caller}: weights has no {', '.join(missing)}; expected {expected}")
        if unknown := [name for name in value if name not in self._weights]:
            raise TypeError(f"{caller}: weights has {', '.join(map(str, unknown))}; expected {expected}")
        return {name: (f"weights[{name!r}]", value[name]) for name in self._weights}

    def _read(self, name: str, label: str, value: Any, sizes: dict[str, int]) -> Array:
        caller = self._reader.caller
        dtype, letters = self._dtypes[name], self._dims[name]
        shape = [sizes.get(size, size) if isinstance(size, str) else size for size in letters]
        if value is None:
            default = sizes["T"] if name == "lengths" else name == "mask"
            return np.full(shape, default, dtype)  # type: ignore[arg-type]
        array = self._reader.array(label, value)
        is_same = array.dtype.newbyteorder("=") == dtype or (dtype == np.int64 and array.dtype.kind in "iu")
        if not is_same and (is_array(value) or array.dtype.kind not in {"f": "fiu", "i": "iu", "b": "b"}[dtype.kind]):
            is_mended = dtype.kind == "f" and array.dtype.kind in "fiub"
            hint = f"; {conversion(label, value, dtype)}" if is_mended else ""
            raise TypeError(f"{caller}: {label} has dtype {array.dtype}; expected {dtype}{hint}")
        fits = array.ndim == len(shape) and all(
            isinstance(size, str) or size == actual for size, actual in zip(shape, array.shape, strict=True)
        )
        if not fits:
            fixed = ", ".join(f"{letter}={size}" for letter, size in sizes.items() if letter in letters)
            where = f", with {fixed} from x" if fixed else ""
            raise ValueError(
                f"{caller}: {label} has shape {array.shape}; expected {form(' '.join(map(str, shape)))}{where}"
            )
        if name == "x":
            sizes |= dict(zip("TB"[-array.ndim + 1 :], array.shape, strict=False))
        if name == "lengths" and array.size and not 0 <= array.min() <= array.max() <= sizes["T"]:
            raise ValueError(f"{caller}: lengths is {array}; expected 0 to T = {sizes['T']}")
        return np.asarray(array, dtype, order="C")


class LayerCall(ModelCall):
    """Calls a model that `export` made of a layer as the layer is called.

    The arguments are those of the layer that the model takes: x, state, lengths and reset; with ``train`` also d_y and
    d_state, those of `Layer.backward`, and weights, a dict. All but x and weights may be left out or None, which means
    zeros, or rows of full length. The results are y and state; with ``train`` also d_x, d_state and grads.
    """

    _required = ("x", "weights")

    def __init__(self, model: ModelProto, tree: Tree) -> None:
        super().__init__(model, tree)
        row_inputs = [name for name in ("lengths", "reset") if name in self._inputs]
        self._takes = ["x", *["state"] * self._with_state, *row_inputs]
        fields, train = ["y", "state"], "d_y" in self._inputs
        if train:
            self._takes += ["weights", "d_y", *["d_state"] * self._with_state]
            fields += ["d_x", *["d_state"] * self._with_state, "grads"]
        self._result: Any = namedtuple("Outputs", fields)  # type: ignore[misc]
        self._compare(layer_signature(self._arrays(), self._takes, train))

    def _weight_shapes(self) -> Mapping[str, Sequence[Any]]:
        if "d_y" in self._inputs:
            return self._dims
        stored = {tensor.name: [*tensor.dims] for tensor in self._model.graph.initializer}
        shapes: dict[str, Sequence[Any]] = dict(stored)
        for full_name, shape in stored.items():
            if full_name.endswith("_quantized"):  # by onnxruntime's quantize_dynamic
                name = full_name.removesuffix("_quantized")
                is_transposed = name.rpartition(".")[2] in NODE_WEIGHTS
                shapes.setdefault(name, [*shape[:1], *shape[:0:-1]] if is_transposed else shape)
        return shapes | _shapes_of_native(self.tree, shapes)

    def without_rows(self, sizes: Mapping[str, int]) -> list[Array]:
        """Return the model's outputs where B is 0: nothing, and gradients of zero."""
        shapes = (value.type.tensor_type.shape.dim for value in self._model.graph.output)
        sizes_of_outputs = ([sizes.get(dim.dim_param, dim.dim_value) for dim in shape] for shape in shapes)
        return [np.zeros(sizes_of_output, self._dtypes["x"]) for sizes_of_output in sizes_of_outputs]

    def without_steps(self, feeds: Mapping[str, Array]) -> Any:
        """Compute the layer's results where T is 0 by the layer itself, as onnxruntime's Scan fails on no steps."""
        layer = self._layer(feeds)
        y, last, tape = layer.forward(feeds["x"], self._state_of(feeds, "{}_prev"))
        fields = {"y": y, "state": last}
        if "grads" in self._result._fields:
            d_last = self._state_of(feeds, "d_{}")
            fields["d_x"], d_first, fields["grads"] = layer.backward(tape, feeds["d_y"], d_last)
            fields |= {"d_state": d_first} if "d_state" in self._result._fields else {}
        return self._result(**fields)

    def result(self, outputs: Iterable[Array]) -> Any:
        """Return the layer's results."""
        arrays = dict(zip(self._outputs, outputs, strict=True))
        fields = {"y": arrays["y"], "state": self._state(self.tree, "", arrays.__getitem__)}
        if "d_x" in arrays:
            fields["d_x"] = arrays["d_x"]
            fields["grads"] = {name: arrays[f"d_{name}"] for name in self._weights}
        if "d_state" in self._result._fields:
            fields["d_state"] = self._state(self.tree, "", lambda name: arrays[f"d_{name}_prev"])
        return self._result(**fields)


class StepCall(ModelCall):
    """Translates the arguments of a step to the inputs of its model, and the model's outputs to the step's results."""

    _required = ("x", "target", "learning_rate")

    def __init__(self, model: ModelProto, tree: Tree, training: Any) -> None:
        super().__init__(model, tree)
        settings = training if isinstance(training, dict) else {}
        loss, optimizer = settings.get("loss"), settings.get("optimizer")
        if loss not in [*LOSSES] or optimizer not in [*OPTIMIZERS]:
            raise ValueError(f"blockcell.training is {short(json.dumps(training))}; expected a loss and an optimizer")
        self.weight_names = [*self._weights]
        self._loss, self._optimizer, self._max_norm = LOSSES[loss], OPTIMIZERS[optimizer], settings.get("max_norm")
        self._settings = {name: settings[name] for name in self._optimizer.defaults if name in settings}
        self._rate = self._optimizer.defaults.get("learning_rate")
        self.memory_names = [*put_first(step_memory(self._optimizer, self._weights, 0), ["step"])]
        row_inputs = [name for name in ("lengths", "reset", "mask") if name in self._inputs]
        state = ["state"] * (self._with_state and bool(self._states))
        self._takes = ["x", "target", "learning_rate", *row_inputs, *state]
        arrays = self._arrays()
        self._compare(step_signature(arrays, self._takes, self._loss, self._optimizer, self._max_norm is not None))
        self._classes = arrays.y[-1] if self._loss.target == "classes" else None
        self.dtype = self._dtypes["x"]
        for name in [*self._weights, *self.memory_names]:  # which are no arguments of a step
            del self._inputs[name]
        self._result: Any = namedtuple("Step", ["loss", *["norm"] * ("norm" in self._outputs), "y", *state])  # type: ignore[misc]

    def feeds(self, arguments: Mapping[str, Any]) -> dict[str, Array]:
        if self._rate is not None and arguments.get("learning_rate") is None:
            arguments = {**arguments, "learning_rate": self._rate}
        feeds = super().feeds(arguments)
        if not 0 <= feeds["learning_rate"] < np.inf:
            value = short(arguments["learning_rate"])
            raise ValueError(f"{self._reader.caller}: learning_rate is {value}; expected 0 <= learning_rate < inf")
        if isinstance(self._classes, int):
            self._check_labels(feeds, self._classes)
        return feeds

    def _check_labels(self, feeds: Mapping[str, Array], classes: int) -> None:
        """Raise a ValueError if a label that counts is no class."""
        target = feeds["target"]
        is_wrong = (target < 0) | (target >= classes)
        if is_wrong.any() and "mask" in feeds:
            is_wrong &= feeds["mask"]
        if is_wrong.any() and "lengths" in feeds and target.ndim == 2:
            is_wrong &= np.arange(len(target))[:, None] < feeds["lengths"]
        if is_wrong.any():
            index = np.argwhere(is_wrong)[0].tolist()
            expected = f"expected 0 to {classes - 1}, for {classes} classes"
            raise ValueError(f"{self._reader.caller}: target{index} is {target[tuple(index)]}; {expected}")

    def read_weights(self, weights: Mapping[str, Array]) -> dict[str, Array]:
        """Check the shapes of a layer's weights; return them in the model's dtype."""
        for name, dims in self._weights.items():
            if (shape := weights[name].shape) != (expected := tuple(dims)):
                message = f"layer.weights[{name!r}] has shape {shape}; expected {expected}"
                raise ValueError(f"{self._reader.caller}: {message}")
        return {name: weights[name].astype(self.dtype) for name in self._weights}

    def read_memory(self, state: Mapping[str, Any] | None) -> dict[str, Array]:
        """Check and return what the optimizer keeps, zeros before the first step."""
        names, reader = self.memory_names, ArgumentReader("TrainingSession")
        if state is not None and not isinstance(state, Mapping):
            kind = type(state).__name__
            raise TypeError(f"{reader.caller}: optimizer_state is of type {kind}; expected a dict of arrays")
        if state and {*state} != {*names}:
            names_given, expected = ", ".join(map(str, state)), ", ".join(names) or "nothing"
            raise ValueError(f"{reader.caller}: optimizer_state has {short(names_given)}; expected {expected}")
        arrays = {}
        for name in names:
            dtype, shape = self._dtypes[name], tuple(map(int, self._dims[name]))
            array = reader.array(f"optimizer_state[{name!r}]", state[name]) if state else np.zeros(shape, dtype)
            is_same = array.dtype.kind in "iu" if name == "step" else array.dtype.newbyteorder("=") == dtype
            if array.shape != shape or not is_same or (name == "step" and array < 0):
                message = f"optimizer_state[{name!r}] has shape {array.shape} and dtype {array.dtype}"
                origin = "what the step before returned"
                raise ValueError(f"{reader.caller}: {message}; expected {shape} and {dtype}, {origin}")
            arrays[name] = array.astype(dtype)
        return arrays

    def without_steps(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Compute the outputs of a step, by name, where T or B is 0: by the layer, the loss and the optimizer.

        ``feeds`` are all inputs of the model, with the weights and what the optimizer keeps.
        """
        layer = self._layer(feeds)
        y, _, tape = layer.forward(feeds["x"], self._state_of(feeds, "{}_prev"))
        value, d_y = self._loss.function(y, feeds["target"], mask=feeds.get("mask"))
        grads, outputs = layer.backward(tape, d_y)[2], {"loss": np.array(value), "y": y}
        if self._max_norm is not None:
            grads, norm = clip_global_norm(grads, self._max_norm)
            outputs["norm"] = np.array(norm)
        memory = {name: feeds[name] for name in self.memory_names} or None
        rate = float(feeds["learning_rate"])
        for after in self._optimizer.function(layer.weights, grads, memory, learning_rate=rate, **self._settings):
            outputs |= {NEW + name: array for name, array in after.items()}
        return outputs | {name: feeds[f"{name}_prev"] for name in self._states if f"{name}_prev" in feeds}

    def step_result(self, outputs: Mapping[str, Array]) -> Any:
        """Return the step's results, from the outputs by name."""
        fields: dict[str, Any] = {"y": outputs["y"]}
        fields |= {name: float(outputs[name]) for name in ("loss", "norm") if name in outputs}
        if "state" in self._result._fields:
            fields["state"] = self._state(self.tree, "", outputs.__getitem__)
        return self._result(**fields)


def _dims(kind: Any) -> list[int | str]:
    """Return the shape of a tensor type, with 0 for a size that is not known."""
    return [] if kind is None else [dim.dim_param or dim.dim_value for dim in kind.shape.dim]


def _shapes_of_native(tree: Tree, stored: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights of cells whose arrays have the layout of ONNX's own LSTM, GRU or RNN."""
    shapes: dict[str, tuple[int, ...]] = {}
    for prefix, cell in leaf_descriptions(tree):
        packed_shapes = {name: tuple(stored[prefix + name]) for name in NODE_WEIGHTS if prefix + name in stored}
        if "R" not in packed_shapes:
            continue
        inputs, hidden = ((packed_shapes.get(name) or (0,))[-1] for name in ("W", "R"))
        rows = {"LSTM": 4, "GRU": 3}.get(cell["type"], 1) * hidden
        expected = {"W": (1, rows, inputs), "R": (1, rows, hidden), "B": (1, 2 * rows)}
        if "P" in packed_shapes:
            expected["P"] = (1, 3 * hidden)
        if packed_shapes != expected:
            names = f"its {prefix}W, R and B" if "P" not in packed_shapes else f"its {prefix}W, R, B and P"
            raise ValueError(f"{names} have the shapes {[*packed_shapes.values()]}; expected {[*expected.values()]}")
        tensors = [tensor for tensor in weights_of(cell) if tensor.kind != "peephole" or "P" in packed_shapes]
        shapes |= {prefix + tensor.name: sizes_of(tensor.shape, {"I": inputs, "H": hidden}) for tensor in tensors}
    return shapes
