"""From a layer to the ONNX model of a step of its training: `LayerGraph` connects the cells, forward and backward, and
this module adds the loss and the optimizer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from math import factorial, log
from os import PathLike
from typing import Any

import numpy as np
from numpy.typing import DTypeLike
from onnx import FunctionProto, GraphProto, ModelProto, TensorProto, helper

import blockcell.loss
import blockcell.optim
from blockcell._read import ArgumentReader, short
from blockcell.layers import Layer
from blockcell.optable import Array

from . import losses, optimizers
from .build import DOMAIN, check_form, constant, dtype_of
from .export import check_places, fixed_sizes, written
from .layer_graph import LayerGraph
from .loops import node, reads, renamed, writes
from .text import TextParser

OLDEST_OPSET = 18  # ReduceMax with axes as an input
TERMS = 5  # of the series in `optimizers`, beside 1
SMALLEST_LOG = -1000.0  # in place of log(0): exp of it is 0

LOSSES = {
    "softmax_cross_entropy": ("SoftmaxCrossEntropy", losses.SOFTMAX_CROSS_ENTROPY),
    "mean_squared_error": ("MeanSquaredError", losses.MEAN_SQUARED_ERROR),
}
OPTIMIZERS: Mapping[str, tuple[str, str, tuple[str, ...]]] = {  # function, text, and what is kept for each weight
    # onnx.reference takes a function of ONNX's own name for that operator, as there are Momentum and Adam.
    "sgd": ("SgdUpdate", optimizers.SGD, ()),
    "momentum": ("MomentumUpdate", optimizers.MOMENTUM, ("velocity",)),
    "adam": ("AdamUpdate", optimizers.ADAM, ("m", "v")),
}
DEFAULTS: Mapping[str, Mapping[str, float]] = {
    name: {
        key: argument.default
        for key, argument in signature(getattr(blockcell.optim, name)).parameters.items()
        if argument.kind is argument.KEYWORD_ONLY and argument.default is not argument.empty
    }
    for name in OPTIMIZERS
}
"""What the optimizers take if nobody says otherwise, by the names of `blockcell.optim`."""


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
    opset: int = 18,
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

    A new value of anything is called as it, with ``new_`` in front. The weights are inputs and outputs, under the names
    that they have in ``layer.weights``, and so is what the optimizer keeps, under the names that `blockcell.optim` has
    for it. Of a layer of dtype D and an optimizer that computes in C, which is float32 for float16 and otherwise D, the
    inputs are

    ===================  ==========  =====  ==========================================================================
    ``x``                [T, B, I]   D
    ``lengths``          [B]         int64  steps of each row that count, 0 to T (with ``lengths``)
    ``reset``            [T, B]      bool   where a new episode starts (with ``reset``)
    ``mask``             [T, B]      bool   which rows of y count in the loss (with ``mask``)
    ``target``           [T, B]      int64  the right classes; for ``mean_squared_error`` of y's shape, and D
    ``0.fw.cs_prev``     [B, H]      D      states before the first step, as of `export` (with ``state``)
    ``learning_rate``    []          C
    ``0.fw.w``           ..          D      the weights
    ``step``             []          int64  of adam: how many steps there were before, 0 at the first
    ``m.0.fw.w``         ..          C      of adam, with ``v.0.fw.w``; of momentum ``velocity.0.fw.w``: 0 at the first
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
    loss : {"softmax_cross_entropy", "mean_squared_error"} or callable
        The name of a function of `blockcell.loss`, or the function. The cross-entropy takes logits, so the layer should
        not end in a softmax of its own.
    optimizer : {"sgd", "momentum", "adam"} or callable
        The name of a function of `blockcell.optim`, or the function.
    max_norm : float, optional
        Clips the gradients, as `blockcell.optim.clip_global_norm` does. None: not at all.
    provider, loop, dtype, sizes, functions, opset, static
        As of `export`, but for the loop "native", which has no gradients; ``opset`` is at least 18.
    lengths, reset, mask, state : bool
        Which inputs there are. Without ``state``, states before the first step are zero.
    **settings : float
        Those of the optimizer: ``momentum``, or ``beta1``, ``beta2`` and ``epsilon``, with the defaults of
        `blockcell.optim`. They are constants of the model.

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
    A model cannot raise errors: it takes a target that is no class for one of no part in the row. `TrainingSession`
    refuses it.

    The texts of the graphs: those of `build`, `onnx_export.losses` and `onnx_export.optimizers`.
    """
    caller = "training_step"
    check_places(caller, layer, path)
    loss_name = _name_of(caller, "loss", loss, blockcell.loss, LOSSES)
    optimizer_name = _name_of(caller, "optimizer", optimizer, blockcell.optim, OPTIMIZERS)
    if loss_name == "softmax_cross_entropy" and not layer.output_size:
        raise ValueError(f"{caller}: loss is {loss_name!r}, but layer.output_size is 0; expected at least one class")
    numbers = _settings(caller, optimizer_name, settings)
    limit = None if max_norm is None else _number(caller, "max_norm", max_norm)
    if limit == 0:
        raise ValueError(f"{caller}: max_norm is 0; expected a number above 0, or None")
    fixed = fixed_sizes(caller, sizes)
    kind = dtype_of(caller, layer.dtype if dtype is None else dtype)

    def make(loop: str, static: bool) -> ModelProto:
        check_form(caller, loop, opset)
        if opset < OLDEST_OPSET:
            raise ValueError(f"{caller}: opset is {opset}; expected {OLDEST_OPSET} or newer")
        return _StepGraph(
            caller,
            layer,
            kind,
            {},
            False,
            sizes=fixed,
            options={"dtype": kind, "loop": loop, "opset": opset, "static": static},
            inlined=not functions,
            streaming=False,
            train=True,
            lengths=lengths,
            reset=reset,
            state=state,
            mask=mask,
            loss=loss_name,
            optimizer=optimizer_name,
            settings=numbers,
            max_norm=limit,
        ).model()

    return written(caller, path, provider, loop, static, make)


# ------------------------------------------------------------------------------------------------------------ arguments
def _name_of(caller: str, argument: str, value: Any, module: Any, known: Collection[str]) -> str:
    """The name of a function of the module, which is given by its name or itself."""
    for name in known:
        if value is getattr(module, name) or (isinstance(value, str) and value == name):
            return name
    expected = ", ".join(map(repr, known))
    raise ValueError(f"{caller}: {argument} is {short(value)}; expected one of {expected}, or such a function")


def _settings(caller: str, optimizer: str, given: Mapping[str, Any]) -> dict[str, float]:
    defaults = {name: value for name, value in DEFAULTS[optimizer].items() if name != "learning_rate"}
    if unknown := [name for name in given if name not in defaults]:
        known = f"expected {', '.join(defaults)}" if defaults else "it has no settings"
        mend = "; learning_rate is an input of the model" if "learning_rate" in unknown else ""
        raise TypeError(f"{caller}: {', '.join(unknown)} unknown to the optimizer {optimizer!r}; {known}{mend}")
    numbers = {**defaults, **given}
    return {name: _number(caller, name, value, np.inf if name == "epsilon" else 1) for name, value in numbers.items()}


def _number(caller: str, name: str, value: Any, below: float = np.inf) -> float:
    if isinstance(value, bool):
        raise TypeError(f"{caller}: {name} is {value}; expected a real number")
    number = ArgumentReader(caller).number(name, value)
    if not 0 <= number < below:
        raise ValueError(f"{caller}: {name} is {number}; expected 0 <= {name} < {below:g}")
    return number


# ------------------------------------------------------------------------------------------------------------ the graph
@dataclass
class _StepGraph(LayerGraph):
    mask: bool = False
    loss: str = ""
    optimizer: str = ""
    settings: Mapping[str, float] = field(default_factory=dict)
    max_norm: float | None = None
    texts: dict[str, FunctionProto] = field(default_factory=dict)
    """The functions of the loss and the optimizer."""

    @property
    def _takes_d_state(self) -> bool:
        return False

    @property
    def functions(self) -> list[FunctionProto]:
        return [*super().functions, *self.texts.values()]

    @property
    def facts(self) -> dict[str, str]:
        told = {"loss": self.loss, "optimizer": self.optimizer, "max_norm": self.max_norm, **self.settings}
        return super().facts | {"training": json.dumps(told)}

    def graph(self) -> GraphProto:
        layer, states, shapes = self.layer, self._states() if self.state else {}, self._shapes()
        weights, kept = self.layer.weights, [*OPTIMIZERS[self.optimizer][2]]
        compute = helper.np_dtype_to_tensor_dtype(self.compute)
        rows = shapes["y"][:-1]
        target = (rows, TensorProto.INT64) if self.loss == "softmax_cross_entropy" else (shapes["y"], None)
        memory = [(f"{slot}.{name}", array.shape) for name, array in weights.items() for slot in kept]
        steps = [self._value("step", [], TensorProto.INT64)] if self.optimizer == "adam" else []
        self.inputs = [
            self._value("x", shapes["x"]),
            *self._about_rows(),
            *([self._value("mask", rows, TensorProto.BOOL)] if self.mask else []),
            self._value("target", *target),
            *(self._value(f"{name}_prev", shape) for name, shape in states.items()),
            self._value("learning_rate", [], compute),
            *(self._value(name, array.shape) for name, array in weights.items()),
            *steps,
            *(self._value(name, shape, compute) for name, shape in memory),
        ]

        self.results["y"], tape = self._forward(layer, "", self._live("x"), False)
        self._backward(layer, "", tape, self._loss(self.results["y"], rows), wanted=False)
        grads = {name: self.results[f"d_{name}"] for name in weights}
        if self.max_norm is not None:
            grads = self._clipped(grads)
        self._update(grads)
        outputs = [
            self._value("loss", [], compute),
            *([] if self.max_norm is None else [self._value("norm", [], compute)]),
            self._value("y", shapes["y"]),
            *(self._value(name, shape) for name, shape in states.items()),
            *(self._value(f"new_{name}", array.shape) for name, array in weights.items()),
            *(self._value(f"new_{value.name}", [], TensorProto.INT64) for value in steps),
            *(self._value(f"new_{name}", shape, compute) for name, shape in memory),
        ]
        return self._made_of(outputs)

    def _loss(self, y: str, rows: Sequence[int | str]) -> str:
        """The gradient to y."""
        name, text = LOSSES[self.loss]
        counts = self._counts()
        if counts:
            one, zero = (self._constant(np.array(value, self.compute)) for value in (1, 0))
            count = self._add("ReduceSum", self._add("Where", counts, one, zero), keepdims=0)
            counts = self._add("Unsqueeze", counts, self._ints(-1))
        else:
            count = self._size("B")
            if len(rows) == 2:
                count = self._add("Mul", self._size("T"), count)
            count = self._add("Cast", self._add("Squeeze", count), to=helper.np_dtype_to_tensor_dtype(self.compute))
        target = "target" if self.loss == "softmax_cross_entropy" else self._computed("target")
        given = {"y": self._computed(y), "target": target, "count": count, "counts": counts}
        numbers = {"two": 2.0, "width": self.layer.output_size}
        integers = {"classes": np.arange(self.layer.output_size)}
        conditions = ["masked" if counts else "full"]
        found = self._run(name, text, given, ["loss", "d_y"], conditions, numbers, integers)
        self.results["loss"] = found["loss"]
        return self._stored(found["d_y"])

    def _counts(self) -> str:
        """Which rows of y count; empty where all do."""
        if not (self.lengths and self.layer._over_time):
            return "mask" if self.mask else ""
        live = self._add("Less", self._steps(), "lengths")
        return self._add("And", live, "mask") if self.mask else live

    def _clipped(self, grads: Mapping[str, str]) -> dict[str, str]:
        limits = np.finfo(self.compute)
        numbers = {"least": limits.tiny, "most": limits.max, "max_norm": self.max_norm}

        def joined(name: str, text: str, wanted: str, **given: str) -> str:
            """What a text gives of each gradient, as a vector."""
            found = [self._run(name, text, {"g": g, **given}, [wanted], [self._precision], {})[wanted] for g in counted]
            return self._concat(*(self._add("Unsqueeze", each, self._ints(0)) for each in found))

        wide = {name: self._computed(grad) for name, grad in grads.items()}
        counted = [wide[name] for name, weight in self.layer.weights.items() if weight.size]
        norm = self._zero_of_compute()
        if counted:
            unit = {}
            if self._precision == "single":
                every = joined("Largest", optimizers.LARGEST, "largest")
                unit = self._run("Unit", optimizers.UNIT, {"every": every}, ["unit"], [], numbers)
            every = joined("Squares", optimizers.SQUARES, "squares", **unit)
            norm = self._run("Norm", optimizers.NORM, {"every": every, **unit}, ["norm"], [self._precision], {})["norm"]
        scale = self._run("ClipScale", optimizers.CLIP_SCALE, {"norm": norm}, ["scale"], [], numbers)["scale"]
        self.results["norm"] = norm
        return {name: self._stored(self._add("Mul", grad, scale)) for name, grad in wide.items()}

    def _update(self, grads: Mapping[str, str]) -> None:
        """The weights and what the optimizer keeps, after the step."""
        name, text, kept = OPTIMIZERS[self.optimizer]
        shared, conditions = {"learning_rate": "learning_rate"}, []
        numbers: dict[str, Any] = dict(self.settings)
        if self.optimizer == "adam":
            betas = [numbers["beta1"], numbers["beta2"]]
            numbers |= {"beta1_rest": 1 - betas[0], "beta2_rest": 1 - betas[1], "betas": betas, "quarter": 0.25}
            numbers["rates"] = [-log(beta) if beta else -SMALLEST_LOG for beta in betas]
            numbers |= {f"factor_{k}": (-1) ** k / factorial(k + 1) for k in range(1, TERMS + 1)}
            given = {"step": "step", "learning_rate": "learning_rate"}
            wanted = ["new_step", "rate", "correct2"]
            rate = self._run("AdamRate", optimizers.ADAM_RATE, given, wanted, [self._precision], numbers)
            self.results["new_step"] = rate["new_step"]
            shared = {"rate": rate["rate"], "correct2": rate["correct2"]}
            conditions = ["uneven" if numbers["epsilon"] else "even"]
        for weight, grad in grads.items():
            slots = {slot[0]: f"{slot}.{weight}" for slot in kept}  # v is the text's short name for velocity, too
            given = {"w": self._computed(weight), "g": self._computed(grad), **slots, **shared}
            found = self._run(name, text, given, ["new_w", *(f"new_{slot}" for slot in slots)], conditions, numbers)
            self.results[f"new_{weight}"] = self._stored(found["new_w"])
            self.results |= {f"new_{value}": found[f"new_{slot}"] for slot, value in slots.items()}

    # ----------------------------------------------------------------------------------------------- texts as functions
    @property
    def _precision(self) -> str:
        return "double" if self.compute == np.float64 else "single"

    def _zero_of_compute(self) -> str:
        return self._constant(np.zeros((), self.compute))

    def _run(
        self,
        name: str,
        text: str,
        given: Mapping[str, str],
        wanted: Sequence[str],
        conditions: Collection[str],
        numbers: Mapping[str, Any],
        integers: Mapping[str, Any] | None = None,
    ) -> dict[str, str]:
        """The values of a text's results, by the names that these have in it, from the values given."""
        if name not in self.texts:
            arrays = {key: np.asarray(value, self.compute) for key, value in {"zero": 0, "one": 1, **numbers}.items()}
            numbered = {"at_last": [-1], "int_1": 1, "int_1_1": [1, 1], **(integers or {})}
            arrays |= {key: np.asarray(value, np.int64) for key, value in numbered.items()}
            self.texts[name] = _function(name, text, given, wanted, conditions, arrays, self.options["opset"])
        made = self.texts[name]
        where = f"{name}_{len(self.nodes)}"
        found = {output: f"{where}.{output}" for output in made.output}
        inputs = [given[each] for each in made.input]
        self.nodes.append(node(made.name, inputs, [*found.values()], name=where, domain=DOMAIN))
        return found


def _function(
    name: str,
    text: str,
    given: Collection[str],
    wanted: Sequence[str],
    conditions: Collection[str],
    arrays: Mapping[str, Array],
    opset: int,
) -> FunctionProto:
    """A text as a function of the domain `blockcell`; its inputs are those given that it reads."""
    parser = TextParser(conditions, (), given)
    nodes = parser.nodes(text)
    nodes = renamed(nodes, {parser.name(each): each for each in wanted})
    read = reads(nodes)
    constants = [constant(key, array) for key, array in arrays.items() if key in read - {*given}]
    for each in nodes:
        each.name = each.output[0]
    assert {*wanted} <= writes(nodes) and read <= {*given, *arrays, *writes(nodes)}
    inputs = [each for each in given if each in read]
    imports = [helper.make_opsetid("", opset)]
    made: FunctionProto = helper.make_function(DOMAIN, name, inputs, wanted, [*constants, *nodes], imports)
    return made
