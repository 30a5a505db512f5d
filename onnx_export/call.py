"""`LayerCall` and `StepCall`: arguments of a layer, or of a step of its training, become the inputs of its model, and
the model's outputs become results.
"""

from __future__ import annotations

import itertools
import json
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from onnx import ModelProto, helper

from blockcell.argument_reader import ArgumentReader, conversion, form, is_array
from blockcell.errors import short
from blockcell.files import leaf_descriptions, weights_of
from blockcell.layers.loading import described_state
from blockcell.layers.structure import STATES, read_parts
from blockcell.loss import LOSSES
from blockcell.optable import DTYPES, Array
from blockcell.optim import OPTIMIZERS

from .layers.signature import LayerArrays, Signature, layer_signature, step_memory, step_signature

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
        self._output_dims = {value.name: _dims(value.type.tensor_type) for value in model.graph.output}
        self._states = [
            prefix + name for prefix, cell in leaf_descriptions(tree) for name in STATES[cell["type"]]._fields
        ]
        self._with_state = not self._states or any(name.endswith("_prev") for name in self._inputs)
        self._weights: dict[str, Sequence[Any]] = {}
        """The shapes of the weights that are inputs, by name."""
        if not {"d_y", "target"}.isdisjoint(self._inputs):
            tensors = ((prefix, tensor) for prefix, cell in leaf_descriptions(tree) for tensor in weights_of(cell))
            is_optional = {prefix + tensor.name: tensor.kind == "peephole" for prefix, tensor in tensors}
            names = [name for name in is_optional if name in self._dims or not is_optional[name]]
            self._weights = {name: self._dims.get(name, []) for name in names}

    def _arrays(self) -> LayerArrays:
        """Return the shapes of the layer's arrays as the model's inputs and outputs have them."""
        kind, x = self._inputs["x"].elem_type if "x" in self._inputs else 0, _dims(self._inputs.get("x"))
        rows = x[:-1]
        if kind not in KINDS or not all(
            size == letter or (isinstance(size, int) and size > 0)
            for size, letter in itertools.zip_longest(rows[::-1], "BT"[: max(1, len(rows))])
        ):
            raise ValueError(f"its input x has the type {kind} and shape {x}; expected floats of (T, B, I) or (B, I)")
        states = {name: self._output_dims.get(name, []) for name in self._states}
        return LayerArrays(kind, x, self._output_dims.get("y", []), states, self._weights)

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

    def without_rows(self, sizes: Mapping[str, int]) -> list[Array]:
        """Return the model's outputs where B is 0: nothing, and gradients of zero."""
        shapes = (
            [sizes.get(size, 0) if isinstance(size, str) else size for size in dims]
            for dims in self._output_dims.values()
        )
        return [np.zeros(shape, self._dtypes["x"]) for shape in shapes]

    def with_a_step(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Return inputs with one step, behind the ends of all rows: onnxruntime's Scan fails on no steps."""
        if "lengths" not in feeds:
            expected = "expected at least one step, as the model was exported without lengths"
            raise ValueError(f"{self._reader.caller}: x has shape {feeds['x'].shape}; {expected}")
        return {
            name: np.zeros((1, *array.shape[1:]), array.dtype) if self._dims[name][:1] == ["T"] else array
            for name, array in feeds.items()
        }

    def result(self, outputs: Iterable[Array], has_steps: bool = True) -> Any:
        """Return the layer's results; the inputs of a run that has no steps are those of `with_a_step`."""
        arrays = dict(zip(self._output_dims, outputs, strict=True))
        if not has_steps:
            arrays |= {name: arrays[name][:0] for name, dims in self._output_dims.items() if dims[:1] == ["T"]}
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
        loss_row, optimizer_row = LOSSES[loss], OPTIMIZERS[optimizer]
        self._rate = optimizer_row.defaults.get("learning_rate")
        self.memory_names = [*step_memory(optimizer_row, self._weights, 0)]
        row_inputs = [name for name in ("lengths", "reset", "mask") if name in self._inputs]
        state = ["state"] * (self._with_state and bool(self._states))
        self._takes = ["x", "target", "learning_rate", *row_inputs, *state]
        arrays = self._arrays()
        clips = settings.get("max_norm") is not None
        self._compare(step_signature(arrays, self._takes, loss_row, optimizer_row, clips))
        self._classes = arrays.y[-1] if loss_row.target == "classes" else None
        self.dtype = self._dtypes["x"]
        for name in [*self._weights, *self.memory_names]:  # which are no arguments of a step
            del self._inputs[name]
        fields = ["loss", *["norm"] * clips, "y", *state]
        self._result: Any = namedtuple("Step", fields)  # type: ignore[misc]

    def feeds(self, arguments: Mapping[str, Any]) -> dict[str, Array]:
        if self._rate is not None and arguments.get("learning_rate") is None:
            arguments = {**arguments, "learning_rate": self._rate}
        feeds = super().feeds(arguments)
        if not 0 <= feeds["learning_rate"] < np.inf:
            value = short(arguments["learning_rate"])
            raise ValueError(f"{self._reader.caller}: learning_rate is {value}; expected 0 <= learning_rate < inf")
        if 0 in feeds["x"].shape[:-1]:  # onnxruntime's Scan fails on no steps, and some providers end without rows
            shape = feeds["x"].shape
            raise ValueError(f"{self._reader.caller}: x has shape {shape}; expected at least a step and a row")
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
