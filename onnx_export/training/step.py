"""`training_step`: the ONNX model of a step of a layer's training.

`LayerGraph` connects the cells, forward and backward; `TrainingGraph` adds the loss and the optimizer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

import numpy as np
from numpy.typing import DTypeLike
from onnx import FunctionProto, ModelProto, helper

from blockcell.argument_reader import ArgumentReader
from blockcell.errors import short
from blockcell.layers import Layer
from blockcell.layers.structure import ends_in_softmax
from blockcell.loss import LOSSES, Loss
from blockcell.optim import OPTIMIZERS, Optimizer

from ..cells.config import DEFAULT_OPSET, REDUCE_AXES_OPSET, Form, check_dtype, check_sizes, read_number
from ..forms import choose_form
from ..layers.layer_graph import LayerGraph
from ..layers.signature import step_signature
from ..layers.writing import check_layer_and_path, write_model
from ..nodes import DOMAIN, constant, names_read, names_written, rename_values
from ..text import TextParser
from .losses import LOSS_GRAPHS
from .optimizers import CLIP_SCALE, LARGEST, NORM, OPTIMIZER_GRAPHS, SQUARES, UNIT

CONSTANTS = {"zero": 0.0, "one": 1.0, "at_last": [-1], "int_1": 1, "int_1_1": [1, 1]}  # that any text may name


def training_step(
    layer: Layer,
    path: str | PathLike[str] | None,
    *,
    loss: str | Callable[..., Any],
    optimizer: str | Callable[..., Any],
    max_norm: float | None = None,
    provider: str = "cpu",
    loop: str | None = None,
    dtype: DTypeLike | None = None,
    lengths: bool = True,
    reset: bool = False,
    mask: bool = False,
    state: bool = False,
    sizes: Mapping[str, int | None] | None = None,
    functions: bool = True,
    opset: int = DEFAULT_OPSET,
    static: bool = False,
    **settings: float,
) -> ModelProto:
    """Write a step of a layer's training as an ONNX model: forward, loss, backward and update.

    The model computes what these lines do, and any runtime runs it: it consists of ONNX's usual operators.

    .. code-block:: python

        y, state, tape = layer.forward(x, state, lengths=lengths, reset=reset)
        value, d_y = loss(y, target, lengths=lengths, mask=mask)
        _, _, grads = layer.backward(tape, d_y)
        grads, norm = optim.clip_global_norm(grads, max_norm)
        weights, memory = optimizer(layer.weights, grads, memory, learning_rate=learning_rate, **settings)

    The name of a new value is that of the old one with ``new_`` in front. The weights are inputs and outputs, with
    their names in ``layer.weights``, and so is the optimizer's state, with its names in `blockcell.optim`. Of a layer
    of dtype D and an optimizer that computes in C, which is float32 for float16 and otherwise D, the inputs are

    ===================  ==========  =====  ==========================================================================
    ``x``                [T, B, I]   D
    ``lengths``          [B]         int64  steps of each row that count, 0 to T (with ``lengths``)
    ``reset``            [T, B]      bool   where a new episode starts (with ``reset``)
    ``mask``             [T, B]      bool   which rows of y count in the loss (with ``mask``)
    ``target``           [T, B]      int64  the right classes; of a loss that takes values of y's shape, and D
    ``0.fw.cs_prev``     [B, H]      D      states before the first step, as of `export` (with ``state``)
    ``learning_rate``    []          C
    ``0.fw.w``           ..          D      the weights
    ``step``             []          int64  of an optimizer that counts them: the steps before, 0 at the first
    ``m.0.fw.w``         ..          C      what the optimizer keeps for a weight (here adam), 0 at the first step
    ===================  ==========  =====  ==========================================================================

    and the outputs

    ===================  ==========  =====  ==========================================================================
    ``loss``             []          C      the mean over what counts
    ``norm``             []          C      the gradients' global norm before clipping (with ``max_norm``)
    ``y``                [T, B, ..]  D      the prediction before the update
    ``0.fw.cs``          [B, H]      D      states after each row's last step (with ``state``)
    ``new_0.fw.w``       ..          D      the weights after the update
    ``new_step``, ..                        what the optimizer keeps, after the update
    ===================  ==========  =====  ==========================================================================

    Where a `Dense` with `last` stands at the end, y has no axis T, and neither have ``mask`` and ``target``. Every row
    counts in the loss then, also one of length 0, unless ``mask`` leaves it out.

    Parameters
    ----------
    layer : LSTM, GRU, RNN, Dense, Bidirectional or Stack
    path : path_like or None
        Where to write; the file is written as a whole or not at all. None: nowhere, the model is only returned.
    loss : str or callable
        The name of a function of `blockcell.loss`, such as ``"softmax_cross_entropy"``, or the function. The
        cross-entropy takes logits, so the layer must not end in a softmax of its own.
    optimizer : str or callable
        The name of an optimizer of `blockcell.optim`, such as ``"adam"``, or its function.
    max_norm : float, optional
        Clips the gradients, as `blockcell.optim.clip_global_norm` does. None: not at all.
    provider, loop, dtype, sizes, functions, opset, static
        As of `export`, but for the loop "native", which has no gradients; ``opset`` is at least 18.
    lengths, reset, mask, state : bool
        Which inputs there are. Without ``state``, states before the first step are zero.
    **settings : float
        Settings of the optimizer, such as ``beta1``, with the defaults of `blockcell.optim`. They are constants of the
        model.

    Returns
    -------
    onnx.ModelProto
        What was written. `TrainingSession` runs it.

    Raises
    ------
    TypeError
        ``layer`` is not a layer, or an argument is of a wrong kind or not known to the optimizer.
    ValueError
        An argument is not what is listed above; the message says what is possible.
    OSError
        The file cannot be written.

    Notes
    -----
    A model cannot raise errors. For a target that is no class, every class has the target 0; a `TrainingSession` raises
    an error instead.

    The texts of the graphs: those of `build`, `losses.py` and `optimizers.py`.
    """
    caller = "training_step"
    check_layer_and_path(caller, layer, path)
    loss_name = _find_row(caller, "loss", loss, LOSSES)
    optimizer_name = _find_row(caller, "optimizer", optimizer, OPTIMIZERS)
    if LOSSES[loss_name].target == "classes" and not layer.output_size:
        raise ValueError(f"{caller}: loss is {loss_name!r}, but layer.output_size is 0; expected at least one class")
    if loss_name == "softmax_cross_entropy" and ends_in_softmax(layer):
        message = "takes logits, but the layer ends in a Dense with activation='softmax'; expected activation=None"
        raise ValueError(f"{caller}: loss is {loss_name!r}, which {message}")
    numbers = _read_settings(caller, optimizer_name, settings)
    limit = None if max_norm is None else _number(caller, "max_norm", max_norm)
    if limit == 0:
        raise ValueError(f"{caller}: max_norm is 0; expected a number above 0, or None")
    fixed = check_sizes(caller, sizes, "TB", least=1)
    kind = check_dtype(caller, layer.dtype if dtype is None else dtype)
    inputs = {"lengths": lengths, "reset": reset, "mask": mask, "state": state}
    takes = [name for name, is_input in inputs.items() if is_input]

    def graph_in(form: Form) -> LayerGraph:
        return LayerGraph(caller, layer, kind, fixed, form, takes, train=True)

    form = Form(opset=opset, static=static, inlined=not functions)
    form = choose_form(caller, provider, loop, form, lambda form: graph_in(form).configs())
    if opset < REDUCE_AXES_OPSET:
        raise ValueError(f"{caller}: opset is {opset}; expected {REDUCE_AXES_OPSET} or newer")
    graph = TrainingGraph(graph_in(form), loss_name, optimizer_name, numbers, limit)
    return write_model(caller, path, graph.model)


# ------------------------------------------------------------------------------------------------------------ arguments
def _find_row(caller: str, argument: str, value: Any, rows: Mapping[str, Loss] | Mapping[str, Optimizer]) -> str:
    """Return the name of a row; `value` is this name or the row's function."""
    for name, row in rows.items():
        if value is row.function or (isinstance(value, str) and value == name):
            return name
    expected = ", ".join(map(repr, rows))
    raise ValueError(f"{caller}: {argument} is {short(value)}; expected one of {expected}, or such a function")


def _read_settings(caller: str, optimizer: str, values: Mapping[str, Any]) -> dict[str, float]:
    """Check the settings of an optimizer; return them with defaults for missing ones."""
    row = OPTIMIZERS[optimizer]
    defaults = {name: value for name, value in row.defaults.items() if name != "learning_rate"}
    if unknown := [name for name in values if name not in defaults]:
        expected = f"expected {', '.join(defaults)}" if defaults else "it has no settings"
        hint = "; learning_rate is an input of the model" if "learning_rate" in unknown else ""
        raise TypeError(f"{caller}: {', '.join(unknown)} unknown to the optimizer {optimizer!r}; {expected}{hint}")
    return {name: _number(caller, name, value, row.settings[name]) for name, value in {**defaults, **values}.items()}


def _number(caller: str, name: str, value: Any, below: float = np.inf) -> float:
    number = read_number(ArgumentReader(caller), name, value)
    if not 0 <= number < below:
        raise ValueError(f"{caller}: {name} is {number}; expected 0 <= {name} < {below:g}")
    return number


# ------------------------------------------------------------------------------------------------------------ the graph
@dataclass
class TrainingGraph:
    """Adds the loss and the optimizer to the graph of a layer. g, in methods, is the builder of its nodes."""

    layer_graph: LayerGraph
    loss: str
    optimizer: str
    settings: Mapping[str, float]
    max_norm: float | None
    functions: dict[str, FunctionProto] = field(default_factory=dict)
    """The functions of the loss and the optimizer, by their names."""

    def __post_init__(self) -> None:
        self.graph, self.layer = self.layer_graph.graph, self.layer_graph.layer
        self.results = self.layer_graph.results
        self.loss_row, self.optimizer_row = LOSSES[self.loss], OPTIMIZERS[self.optimizer]

    def model(self) -> ModelProto:
        """Return the model of a step of training."""
        g, layer, layer_graph = self.graph, self.layer, self.layer_graph
        arrays = layer_graph.arrays()
        clips = self.max_norm is not None
        signature = step_signature(arrays, layer_graph.takes, self.loss_row, self.optimizer_row, clips)

        self.results["y"], tape = layer_graph.forward(layer, "", g.zero_padding("x"), False)
        layer_graph.backward(layer, "", tape, self._add_loss(self.results["y"], arrays.y[:-1]), needs_d_x=False)
        grads = {name: self.results[f"d_{name}"] for name in layer.weights}
        self._update(grads if self.max_norm is None else self._clip(grads))
        settings = {"loss": self.loss, "optimizer": self.optimizer, "max_norm": self.max_norm, **self.settings}
        layer_graph.functions |= self.functions  # after those of the cells
        return layer_graph.finish(signature, {"training": json.dumps(settings)})

    def _add_loss(self, y: str, rows: Sequence[int | str]) -> str:
        """Add the loss; return the gradient to y. `rows` is the shape of y without its last axis."""
        g = self.graph
        row = LOSS_GRAPHS[self.loss]
        counts = self._counted_rows()
        if counts:
            one, zero = (g.constant(np.array(number, g.compute)) for number in (1, 0))
            count = g.add("ReduceSum", g.add("Where", counts, one, zero), keepdims=0)
            counts = g.add("Unsqueeze", counts, g.ints(-1))
        else:
            count = g.size("B")
            if len(rows) == 2:
                count = g.add("Mul", g.size("T"), count)
            count = g.add("Cast", g.add("Squeeze", count), to=helper.np_dtype_to_tensor_dtype(g.compute))
        target = "target" if self.loss_row.target == "classes" else g.cast_to_compute("target")
        arguments = {"y": g.cast_to_compute(y), "target": target, "count": count, "counts": counts}
        conditions = ["masked" if counts else "full"]
        constants = row.constants(self.layer.output_size)
        name = self.loss.title().replace("_", "")
        results = self._call(name, row.text, arguments, ["loss", "d_y"], conditions, constants)
        self.results["loss"] = results["loss"]
        return g.cast_to_storage(results["d_y"])

    def _counted_rows(self) -> str:
        """Return which rows of y count in the loss, "" where all do."""
        mask = "mask" if "mask" in self.layer_graph.takes else ""
        if not (self.layer_graph.lengths and self.layer._over_time):
            return mask
        live = self.graph.add("Less", self.graph.step_indices(), "lengths")
        return self.graph.add("And", live, "mask") if mask else live

    def _clip(self, grads: Mapping[str, str]) -> dict[str, str]:
        """Clip the gradients by their global norm, which is a result."""
        g, limits = self.graph, np.finfo(self.graph.compute)
        numbers = {"least": limits.tiny, "most": limits.max, "max_norm": self.max_norm}
        computed = {name: g.cast_to_compute(grad) for name, grad in grads.items()}
        nonempty = [computed[name] for name, weight in self.layer.weights.items() if weight.size]

        def compute_each(name: str, text: str, result: str, **arguments: str) -> str:
            """Return the vector of a text's result for each gradient."""
            numbers = []
            for grad in nonempty:
                results = self._call(name, text, {"g": grad, **arguments}, [result], [self._precision], {})
                numbers.append(results[result])
            return g.concat(*(g.add("Unsqueeze", number, g.ints(0)) for number in numbers))

        zero = g.constant(np.zeros((), g.compute))
        if nonempty:
            unit = {"unit": ""}
            if self._precision == "float32":
                largest = compute_each("Largest", LARGEST, "largest")
                unit = self._call("Unit", UNIT, {"every": largest}, ["unit"], [], numbers)
            squares = {"every": compute_each("Squares", SQUARES, "squares", **unit)}
            norm = self._call("Norm", NORM, squares | unit, ["norm"], [self._precision], {})["norm"]
        else:  # zero, but computed: no output may be a constant
            loss = self.results["loss"]
            norm = g.add("Where", g.add("Less", loss, loss), loss, zero)
        scale = self._call("ClipScale", CLIP_SCALE, {"norm": norm}, ["scale"], [], numbers)["scale"]
        self.results["norm"] = norm
        return {name: g.cast_to_storage(g.add("Mul", grad, scale)) for name, grad in computed.items()}

    def _update(self, grads: Mapping[str, str]) -> None:
        """Add the optimizer: new weights, and what it keeps for the next step."""
        g = self.graph
        row, optimizer, name = OPTIMIZER_GRAPHS[self.optimizer], self.optimizer_row, self.optimizer.title()
        constants, conditions = row.constants(self.settings), [self._precision, *row.conditions(self.settings)]
        shared = {name: name for name in [*["step"] * optimizer.counts_steps, "learning_rate"]}
        if row.rate_text:
            shared |= self._call(f"{name}Rate", row.rate_text, shared, row.rate_outputs, conditions, constants)
        if optimizer.counts_steps:
            self.results["new_step"] = shared["new_step"]
        outputs = ["new_w", *(f"new_{slot}" for slot in row.slots)]
        for weight, grad in grads.items():
            slots = {key: f"{slot}.{weight}" for key, slot in zip(row.slots, optimizer.slots, strict=True)}
            # Before 1.27, onnxruntime loses sums with a constant that has no entries, as such a gradient is.
            grad = grad if self.layer.weights[weight].size else weight
            arguments = {"w": g.cast_to_compute(weight), "g": g.cast_to_compute(grad), **slots, **shared}
            results = self._call(f"{name}Update", row.text, arguments, outputs, conditions, constants)
            self.results[f"new_{weight}"] = g.cast_to_storage(results["new_w"])
            self.results |= {f"new_{value}": results[f"new_{slot}"] for slot, value in slots.items()}

    # ----------------------------------------------------------------------------------------------- texts as functions
    @property
    def _precision(self) -> str:
        return "float64" if self.graph.compute == np.float64 else "float32"

    def _call(
        self,
        name: str,
        text: str,
        arguments: Mapping[str, str],
        outputs: Sequence[str],
        conditions: Collection[str],
        constants: Mapping[str, Any],
    ) -> dict[str, str]:
        """Add a call of the function with this text; return its results by the names of the outputs in the text.

        In a model a name stands for one text, with the same conditions and constants in all calls. The function's
        inputs are the arguments that the text reads. `constants` has numbers and arrays that it may name; integers
        become int64, others what is computed in.
        """
        if name not in self.functions:
            arrays = {key: np.asarray(value) for key, value in {**CONSTANTS, **constants}.items()}
            integers = [key for key, array in arrays.items() if array.dtype.kind in "iu"]
            parser = TextParser(conditions, (), [*arguments, *arrays])
            nodes = rename_values(parser.nodes(text), {parser.name(output): output for output in outputs})
            for node in nodes:
                node.name = node.output[0]
            assert {*outputs} <= names_written(nodes)
            read_names = names_read(nodes)
            constant_nodes = [
                constant(key, arrays[key].astype(np.int64 if key in integers else self.graph.compute))
                for key in sorted(arrays, key=integers.__contains__)
                if key in read_names and key not in arguments
            ]
            inputs = [argument for argument in arguments if argument in read_names]
            imports = [helper.make_opsetid("", self.layer_graph.form.opset)]
            function = helper.make_function(DOMAIN, name, inputs, outputs, [*constant_nodes, *nodes], imports)
            self.functions[name] = function
        return self.graph.call(self.functions[name], arguments, f"{name}_{len(self.graph.nodes)}")
