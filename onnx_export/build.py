"""From an op's name and configuration to its ONNX model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from types import ModuleType
from typing import Any

import numpy as np
import onnx
from numpy.typing import DTypeLike
from onnx import FunctionProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from blockcell import __version__
from blockcell._read import short
from blockcell.activations import DEFAULTS, Activation, Numbers, canonical
from blockcell.convert.onnx_activations import attributes_of
from blockcell.optable import DTYPE_NAMES, DTYPES, LETTERS, OPS, Array, Op, Tensor, sizes_of

from . import activations, gru, gru_reset_after, lstm, rnn
from .integers import CONSTANTS, IntegerProducts
from .loops import (
    Live,
    LoopBody,
    Nodes,
    divided,
    last,
    loop,
    needed,
    node,
    of_any_rank,
    reads,
    renamed,
    scan,
    unroll,
    value_of,
    with_time,
    writes,
)
from .text import Program, TextParser

DOMAIN = "blockcell"
PACKED = ("W", "R", "B", "P")  # what ONNX's own LSTM, GRU and RNN call their weights
CELLS = ("LSTM", "GRU", "RNN")  # ONNX's own
LOOPS = ("scan", "unroll", "native", "loop")
# What is built for a provider of onnxruntime where nobody chooses a loop: the first of these that is possible.
FORMS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "cpu": [{"loop": "scan"}],
    # TF32 has ten bits of fraction; whether `Session` keeps it out of cuDNN's LSTM and GRU is not known.
    "cuda": [{"loop": "scan", "static": True}],
    "webgpu": [{"loop": "native", "static": True}, {"loop": "unroll", "static": True}],
}
# What a provider has of ONNX's own cells: the nodes, and their activations.
OF_NATIVE = {"webgpu": (("LSTM", "GRU"), (b"Sigmoid", b"Tanh", b"Relu"))}
# Nodes that the CPU runs, which fetches the states from the GPU at every step.
SLOW = {"webgpu": ("Scan", "Loop")}
OLDEST_OPSET = 15  # functions; Shape with a start


Value = float | bool | Activation
LoopMaker = Callable[[LoopBody, Live, int], Nodes]  # `scan`, `loop` or `unroll`, told T where it is fixed


@dataclass(frozen=True)
class Config:
    """What an op's graph depends on, after every check."""

    op: Op
    dtype: np.dtype[Any]
    sizes: Mapping[str, int]
    attrs: Mapping[str, Value]
    """Those of the op, or of the layer."""
    loop: str
    opset: int
    static: bool
    inlined: bool = False
    full_length: bool = False
    """Whether a sequence always runs all T steps. Then seq_len_max is no argument, and the states after the last step,
    ``cs_last`` and ``h_last``, can be outputs."""
    fresh: bool = False
    """Whether such a sequence takes an argument ``fresh`` [T,B,1] of bool: where the state before a step is zero."""
    lengths: bool = False
    """Whether ONNX's own LSTM takes the rows' ``lengths``."""
    direct: tuple[str, ...] = ()
    """Values in the text of one of ONNX's own nodes that are arguments, instead of computed from the op's: `PACKED`,
    ``h_first``."""
    integers: bool = False
    """Whether products are in integers. Each matrix is unsigned bytes then, with an argument ``w_scale``."""

    @property
    def half(self) -> bool:
        return self.dtype == np.float16

    @property
    def compute(self) -> np.dtype[Any]:
        """The dtype that a step computes in: float16 is only for storage."""
        return np.dtype(np.float32) if self.half else self.dtype

    def attribute(self, name: str) -> float:
        """An attribute as the step uses it, rounded to float16 in float16 as TensorFlow does."""
        with np.errstate(over="ignore"):
            return float(self.dtype.type(self.attrs.get(name, 0.0)))

    @property
    def activation_of(self) -> dict[str, Activation]:
        """The activations, by the names that layers have for them."""
        return {name: self.attrs.get(name, usual) for name, usual in DEFAULTS.items()}  # type: ignore[misc]

    @property
    def projected(self) -> bool:
        """Whether h is a projection of what an LSTM's step gives."""
        return any(tensor.name == "w_p" for tensor in self.op.inputs)

    def is_always_zero(self, output: Tensor) -> bool:
        """Return whether an output is the gradient to a peephole weight that is not used."""
        return output.peephole and "peephole" not in self.conditions

    @property
    def forward(self) -> bool:
        return "grad" not in self.op.kernel and "vjp" not in self.op.kernel

    @property
    def module(self) -> ModuleType:
        """The module that has the op's text."""
        if (kind := node_of(self.op)) != "GRU":
            return {"LSTM": lstm, "RNN": rnn}[kind]
        return gru_reset_after if any(tensor.name == "b_hc" for tensor in self.op.inputs) else gru

    @property
    def conditions(self) -> set[str]:
        """The conditions of the text's lines that hold."""
        clip, p_clip = self.attribute("cell_clip"), self.attribute("proj_clip")
        cell, bias = not self.op.sequence or self.loop == "native", self.attribute("forget_bias") != 0
        coupled, peephole = "f" in self.op.gates and "i" not in self.op.gates, bool(self.attrs.get("use_peephole"))
        sigmoid = self.activation_of["recurrent_activation"] == "sigmoid"
        holds = {
            "cell": cell,
            "joint": cell and not self.integers,
            "apart": not cell or self.integers,
            "sequence": self.op.sequence and self.loop != "native",
            "peephole": peephole,
            "plain": not peephole,
            "i_sees": peephole and not coupled,
            "coupled": coupled,
            "single": not coupled,
            "project": self.projected,
            "entire": not self.projected,
            "p_clip": self.projected and 0 < p_clip < np.inf,
            "ending": self.op.sequence and any(tensor.name == "cs_grad" for tensor in self.op.inputs),
            "sigmoid": sigmoid,
            "other": not sigmoid,
            "bias": bias and not self.integers,
            "late": bias and self.integers,
            "clip": 0 < clip < np.inf,
            "rounded": self.half and self.op.sequence,
        }
        return {word for word, there in holds.items() if there}


# ------------------------------------------------------------------------------------------------------------ arguments
def config(
    op: str | Op,
    dtype: DTypeLike = "float32",
    sizes: Mapping[str, int | None] | None = None,
    attrs: Mapping[str, Value] | None = None,
    loop: str = "scan",
    opset: int = 18,
    static: bool = False,
) -> Config:
    """The checked configuration."""
    if not isinstance(op, Op) and op not in OPS:
        raise ValueError(f"op is {op!r}; expected one of {', '.join(OPS)}")
    row = op if isinstance(op, Op) else OPS[op]
    op = row.name
    kind = dtype_of(op, dtype)
    given = checked_sizes(op, sizes or {}, LETTERS)
    given = {letter: size for letter, size in given.items() if letter in row.sources}  # a cell has no T
    values = checked_attributes(row, attrs or {})
    check_form(op, loop, opset)
    checked = Config(row, kind, given, values, loop, opset, static)
    if row.sequence and loop == "unroll" and "T" not in given:
        raise ValueError(f"{op}: loop='unroll' writes every step out and so needs sizes['T']; 'scan' and 'loop' do not")
    check_native(op, checked)
    return checked


def node_of(op: Op) -> str:
    """Which of ONNX's own nodes is such a cell."""
    return "LSTM" if "f" in op.gates else "GRU" if "r" in op.gates else "RNN"


def check_native(caller: str, c: Config) -> None:
    """Raise a ValueError if ONNX's own node is to compute what it does not."""
    if c.loop == "native" and (reason := _not_native(c)):
        raise ValueError(f"{caller}: loop='native' {reason}")


def check_form(caller: str, loop: str, opset: int) -> None:
    """Raise a ValueError unless there are such a loop and such operators."""
    if loop not in LOOPS:
        raise ValueError(f"{caller}: loop is {loop!r}; expected one of {', '.join(LOOPS)}")
    if not isinstance(opset, int) or not OLDEST_OPSET <= opset <= onnx.defs.onnx_opset_version():
        newest = f"{onnx.defs.onnx_opset_version()}, the newest that onnx {onnx.__version__} knows"
        raise ValueError(f"{caller}: opset is {opset!r}; expected an integer from {OLDEST_OPSET} to {newest}")


def in_form(
    caller: str, provider: str, loop: str | None, static: bool, make: Callable[[str, bool], ModelProto]
) -> ModelProto:
    """What ``make(loop, static)`` makes with the given loop or, without one, in the provider's first possible form."""
    if provider not in FORMS:
        raise ValueError(f"{caller}: provider is {provider!r}; expected one of {', '.join(FORMS)}")
    forms = FORMS[provider]
    if loop is not None:
        return make(loop, static or bool(forms[0].get("static")))
    refusals = []
    for form in forms:
        try:
            model = make(form["loop"], static or bool(form.get("static")))
            if form["loop"] == "native" and provider in OF_NATIVE:
                _check_kernels(caller, provider, model)
            return model
        except ValueError as error:
            refusals.append(error)
    if len({str(error) for error in refusals}) == 1:  # of an argument that is wrong in any form
        raise refusals[0]
    reasons = "; ".join(str(error).removeprefix(f"{caller}: ") for error in refusals)
    raise ValueError(f"{caller}: there is no form for provider={provider!r}: {reasons}")


def _check_kernels(caller: str, provider: str, model: ModelProto) -> None:
    """Raise a ValueError if the provider does not have all of ONNX's own cells in the model."""
    nodes, names = OF_NATIVE[provider]
    for each in (each for part in (model.graph, *model.functions) for each in part.node if each.op_type in CELLS):
        used = [name for part in each.attribute if part.name == "activations" for name in part.strings]
        if each.op_type not in nodes or not {*used} <= {*names}:
            what = f"{each.op_type} with {b', '.join(used).decode()}" if each.op_type in nodes else each.op_type
            raise ValueError(f"{caller}: loop='native' is not possible: {provider!r} has no {what}; expected another")


def dtype_of(caller: str, dtype: DTypeLike) -> np.dtype[Any]:
    """The dtype, one of those of the ops."""
    try:
        return DTYPES[DTYPES.index(np.dtype(dtype))]
    except (TypeError, ValueError):
        raise ValueError(f"{caller}: dtype is {dtype!r}; expected {DTYPE_NAMES}") from None


def _not_native(c: Config) -> str:
    """Why ONNX's own LSTM, GRU or RNN does not compute the same; empty if it does."""
    cell = node_of(c.op)
    if not c.forward:
        return f"is not possible: ONNX's {cell} has no gradient; expected 'scan', 'unroll' or 'loop'"
    if not c.op.sequence:
        return "is not possible: a cell has no loop; expected 'scan', the default"
    if "clip" in c.conditions:
        return (
            "is not exact: ONNX's clip bounds what goes into the gates, not the cell state; "
            f"expected a cell_clip of 0, not {c.attrs['cell_clip']}, or another loop"
        )
    if c.projected:
        return "is not possible: ONNX's LSTM has no projection; expected another loop"
    if reason := activations.not_in_node(cell, c.activation_of, "coupled" in c.conditions, c.dtype):
        return f"is not exact: {reason}; expected another loop"
    if c.half:
        return "is not exact: the states would not be rounded to half at every step; expected float32 or float64"
    if c.sizes.get("I") == 0 and cell != "RNN":
        return f"is not possible: onnxruntime's {cell} is wrong, or crashes, without inputs; expected sizes['I'] > 0"
    if "H" not in c.sizes:
        return f"needs sizes['H']: it is an attribute of ONNX's {cell}"
    return ""


def checked_sizes(caller: str, sizes: Mapping[str, int | None], letters: str) -> dict[str, int]:
    """The sizes that are not None, after a check of all."""
    given = {}
    for letter, size in sizes.items():
        if letter not in tuple(letters):
            raise ValueError(f"{caller}: sizes has {letter!r}; expected the letters {', '.join(letters)}")
        if size is None:
            continue
        if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 0:
            raise ValueError(f"{caller}: sizes[{letter!r}] is {size!r}; expected an integer >= 0 or None, any size")
        given[letter] = int(size)
    return given


def checked_attributes(op: Op, attrs: Mapping[str, Value]) -> dict[str, Value]:
    names = [attribute.name for attribute in op.attributes]
    for name in attrs:
        if name not in names:
            expected = f"expected {', '.join(names)}" if names else "the op has none"
            raise ValueError(f"{op.name}: attrs has {name!r}; {expected}")
    values: dict[str, Value] = {}
    for attribute in op.attributes:
        value = attrs.get(attribute.name, attribute.default)
        if attribute.kind is Numbers:
            try:
                values[attribute.name] = canonical(f"{op.name}: attrs[{attribute.name!r}]", value)
            except TypeError as error:
                raise ValueError(str(error)) from None
        elif attribute.kind is bool:
            if not isinstance(value, (bool, np.bool_)):
                raise ValueError(f"{op.name}: attrs[{attribute.name!r}] is {value!r}; expected True or False")
            values[attribute.name] = bool(value)
        else:
            if isinstance(value, (bool, np.bool_)) or not isinstance(value, Real):
                raise ValueError(f"{op.name}: attrs[{attribute.name!r}] is {value!r}; expected a real number")
            try:
                values[attribute.name] = float(value)
            except OverflowError:
                shown = f"{op.name}: attrs[{attribute.name!r}] is {short(value)}"
                raise ValueError(f"{shown}; expected a number that a float holds") from None
    return values


# -------------------------------------------------------------------------------------------------------- the op's body
def body(c: Config) -> tuple[Nodes, list[str]]:
    """The op's nodes and those of its arguments that they read."""
    empty = any(c.sizes.get(letter) == 0 for letter in "TBH")  # no step, no row or no cell: nothing to compute with
    nodes, results = _zeros(c, c.op.outputs) if empty else _output_nodes(c)
    nodes = _finished(c, nodes, results)
    if c.direct:
        nodes = [each for each in nodes if not set(c.direct).intersection(each.output)]
        nodes = needed(nodes, (tensor.name for tensor in c.op.outputs))
    nodes = [*_given(c, reads(nodes)), *nodes]
    for each in nodes:
        _named(c, each)
    read = reads(nodes)
    arguments = [*(tensor.name for tensor in arguments_of(c.op)), "fresh", "lengths", *c.direct, *_scales(c).values()]
    return nodes, [name for name in arguments if name in read]


@dataclass(frozen=True)
class TextNodes:
    """The nodes of an op's text: before all steps, of one step, after all steps."""

    before: Nodes
    step: Nodes
    after: Nodes
    carried: Mapping[str, str]
    """Each name that a step reads from the step before it, with the name of the value there."""
    results: Mapping[str, str]
    """The values of outputs, by the outputs' names."""


@dataclass(frozen=True)
class SequenceNodes:
    """The nodes of a sequence's op: before the loop, in it and after it."""

    before: Nodes
    loop: LoopBody
    after: Nodes
    """Among them nodes Live, which each version of the loop replaces."""
    results: Mapping[str, str]
    """As of `TextNodes`."""
    last_states: Sequence[str]
    """The outputs that are states after the last step."""


def _output_nodes(c: Config) -> tuple[Nodes, dict[str, str]]:
    """Return nodes that compute the outputs, and the outputs' values by their names."""
    nodes, results = _zeros(c, [tensor for tensor in c.op.outputs if c.is_always_zero(tensor)])
    computing, computed = (LOOP_FORMS[c.loop] if c.op.sequence else _single_step)(c)
    return [*nodes, *computing], results | computed


def _single_step(c: Config) -> tuple[Nodes, dict[str, str]]:
    text = _text_nodes(c)
    return [*text.before, *text.step, *text.after], dict(text.results)


def _scan_form(c: Config) -> tuple[Nodes, dict[str, str]]:
    """Run the steps in a Scan: in one version of it or, for sequences of full length and others, in two."""
    sequence = _sequence_nodes(c)
    if c.static or c.full_length:
        return _with_loop(c, sequence, scan)
    full_length, masked = (_after_before(c, sequence, scan, Live(known)) for known in (True, False))
    return [*sequence.before, _either(c, full_length, masked)], {name: f"{name}_result" for name in sequence.results}


def _loop_form(c: Config) -> tuple[Nodes, dict[str, str]]:
    """Run the steps in a Loop."""
    return _with_loop(c, _sequence_nodes(c), loop)


def _unrolled_form(c: Config) -> tuple[Nodes, dict[str, str]]:
    """Write every step out."""
    return _with_loop(c, _sequence_nodes(c), unroll)


def _native_form(c: Config) -> tuple[Nodes, dict[str, str]]:
    """Run the steps in ONNX's own LSTM, GRU or RNN, and an LSTM's cs, which it does not give, in a loop."""
    return _with_loop(c, _sequence_nodes(c), unroll if c.static and "T" in c.sizes else scan)


LOOP_FORMS = {"scan": _scan_form, "unroll": _unrolled_form, "native": _native_form, "loop": _loop_form}


def _text_nodes(c: Config) -> TextNodes:
    """Return the nodes of the op's text where `Config.conditions` hold."""
    program: Program = c.module.FORWARD if c.forward else c.module.BACKWARD
    parser = TextParser(c.conditions, c.op.gates, [*(tensor.name for tensor in c.op.inputs), *program.carried])
    parser.alias["cs_grad"] = "cs_grad_next"  # where it is no input
    before, step = parser.nodes(program.before), parser.nodes(program.step)
    step = activations.expanded(step, c.activation_of, c.compute == np.float64)
    if c.integers:
        step = IntegerProducts().of_gemms(before, step, _scales(c))
    carried = {name: parser.name(value) for name, value in program.carried.items()}
    text = TextNodes(before, step, [], carried, {})
    if c.loop == "native":
        text = _with_native_node(c, parser, text)
    text = replace(text, after=parser.nodes(program.after))
    if c.fresh:
        text = _with_resets(c, text)
    outputs = [tensor for tensor in c.op.outputs if not c.is_always_zero(tensor)]
    results = {tensor.name: parser.name(_in_text(c, tensor)) for tensor in outputs}
    for name, value in text.carried.items():
        if (last_state := last(name.removesuffix("_prev"))) in results:
            results[last_state] = last(value)
    return replace(text, results=results)


def _with_native_node(c: Config, parser: TextParser, text: TextNodes) -> TextNodes:
    """Return the text with ONNX's own LSTM, GRU or RNN in place of the steps that it runs."""
    before = text.before + renamed(parser.nodes(c.module.NATIVE), {} if c.lengths else {"lengths": ""})
    if not c.full_length:
        parser.conditions.add("sequence")
    if c.full_length or "h" in writes(before):
        return replace(text, before=before, step=[], carried={})
    # It gives the h of all steps, so the cell's text computes the rest for all steps at once.
    step = [part for whole in renamed(text.step, {"h_prev": "h_before"}) for part in of_any_rank(whole)]
    carried = {name: value for name, value in text.carried.items() if name != "h_prev"}
    return replace(text, before=before, step=step, carried=carried)


def _sequence_nodes(c: Config) -> SequenceNodes:
    """Divide the text's nodes into those that must run in the loop, and others, which run for all steps at once."""
    text = _text_nodes(c)
    last_states = [
        tensor.name
        for tensor in c.op.outputs
        if text.results.get(tensor.name) in text.carried.values() and not tensor.shape.startswith("T ")
    ]
    after = needed(text.after, text.results.values())
    wanted = reads(after) | {value for name, value in text.results.items() if name not in last_states}
    early, inside, late = divided(text.step, text.carried, wanted)
    before = [*text.before, *early]
    timed = with_time(before, [*(t.name for t in c.op.inputs if t.shape.startswith("T ")), "fresh"])
    loop_body = LoopBody(
        inside,
        text.carried,
        scan_inputs=sorted(reads(inside) & timed),
        scan_outputs=sorted(writes(inside) & (reads(late) | wanted)),
        reverse=not c.forward,
        dtype=helper.np_dtype_to_tensor_dtype(c.compute),
        rows=c.sizes.get("B"),
        static=c.static,
        distinct_outputs=c.inlined and (c.static or c.loop == "native"),
    )
    before = [*Live.LENGTH, *before, *([] if c.forward else _last_gradients(c, text.carried))]
    return SequenceNodes(before, loop_body, [*late, *after], text.results, last_states)


def _last_gradients(c: Config, carried: Iterable[str]) -> Nodes:
    """Return zeros for the gradients that the last step reads, as no step runs after it."""
    nodes, shapes = [node("Shape", ["h_prev"], ["state_shape"])], dict.fromkeys(carried, "state_shape")
    if c.projected:
        nodes.append(node("Shape", ["cs_prev"], ["cs_shape"]))
        shapes["cs_grad_next"] = "cs_shape"
    return [*nodes, *(node("Expand", ["zero", shape], [name]) for name, shape in shapes.items())]


def _with_loop(c: Config, sequence: SequenceNodes, loop_nodes: LoopMaker) -> tuple[Nodes, dict[str, str]]:
    """Return the nodes of a sequence with one version of its loop, and the outputs' values."""
    nodes, results = _after_before(c, sequence, loop_nodes, Live(known=c.full_length))
    return [*sequence.before, *nodes], results


def _after_before(
    c: Config, sequence: SequenceNodes, loop_nodes: LoopMaker, live: Live
) -> tuple[Nodes, dict[str, str]]:
    """Return the nodes of the loop and of what runs after it, and the outputs' values."""
    nodes = [] if live.known else [*Live.CONDITIONS]
    if sequence.loop.nodes:
        nodes += loop_nodes(sequence.loop, live, c.sizes.get("T", 0))
    for late in sequence.after:
        nodes += live(*late.input, *late.output) if late.op_type == "Live" else [late]
    results = dict(sequence.results)
    for name in sequence.last_states:
        results[name] = f"{name}_live"
        nodes += live(last(sequence.results[name]), results[name], "any_live")
    return renamed(nodes, live.aliases), {name: live.aliases.get(value, value) for name, value in results.items()}


def _scales(c: Config) -> dict[str, str]:
    """The arguments with the scales of matrices, by the names of these."""
    return {tensor.name: f"{tensor.name}_scale" for tensor in c.op.inputs if tensor.kind == "matrix"}


def _with_resets(c: Config, text: TextNodes) -> TextNodes:
    """Return the text with states, or gradients to them, set to zero before the steps at which ``fresh`` is true."""

    def where(name: str, result: str) -> NodeProto:
        return node("Where", ["fresh", "zero", name], [result])

    carried = text.carried
    if c.forward:
        kept = {name: f"{name}_kept" for name in carried}
        return replace(text, step=[where(*names) for names in kept.items()] + renamed(text.step, kept))
    kept = {name: f"{name}_kept" for name in sorted(writes(text.before)) if name.endswith("_before")}
    step = renamed(text.step, kept | {name: f"{name}_free" for name in carried.values()})
    return replace(
        text,
        before=[*text.before, *(where(*names) for names in kept.items())],
        step=step + [where(f"{name}_free", name) for name in carried.values()],
        after=renamed(text.after, kept),
    )


def _either(c: Config, full_length: tuple[Nodes, dict[str, str]], masked: tuple[Nodes, dict[str, str]]) -> NodeProto:
    """An If, so that sequences of full length need no masks."""
    branches = {}
    for key, (nodes, found) in {"then_branch": full_length, "else_branch": masked}.items():
        outputs = [value_of(name, helper.np_dtype_to_tensor_dtype(c.compute)) for name in found.values()]
        branches[key] = helper.make_graph(needed(nodes, found.values()), key, [], outputs)
    return node("If", ["all_live"], [f"{name}_result" for name in full_length[1]], **branches)


def _in_text(c: Config, output: Tensor) -> str:
    """The output's name in the text, which is that of the cell's gradient to all arguments."""
    name = output.name
    if c.full_length and c.forward:
        if c.loop == "native":
            return {"h": "h_native", "h_last": "h_end", "cs_last": "cs_end"}[name]
        # With o and co there, one product for all steps is cheaper than a copy of the state at each.
        again = name == "h" and not c.projected and any(tensor.name == "co" for tensor in c.op.outputs)
        return "h_live" if again else name
    if name == "dicfo":
        return "d_bars"
    if "r" in c.op.gates and name.endswith("_grad"):
        name = f"d_{name.removesuffix('_grad')}"
    return f"{name}_live" if output.shape.startswith("T ") else name


def _zeros(c: Config, outputs: Collection[Tensor]) -> tuple[Nodes, dict[str, str]]:
    """Zeros of the outputs' shapes; sizes that are not fixed are those of the inputs."""
    nodes = []
    for tensor in outputs:
        nodes += _shape(c, f"{tensor.name}_shape", tensor.shape.split())
        nodes.append(node("Expand", ["zero", f"{tensor.name}_shape"], [f"{tensor.name}_zeros"]))
    return nodes, {tensor.name: f"{tensor.name}_zeros" for tensor in outputs}


def _shape(c: Config, name: str, words: Sequence[str]) -> Nodes:
    """A vector of sizes such as I, H and 4H, from the inputs where they are not fixed."""
    if all(letter in c.sizes for word in words for letter in word if letter in LETTERS):
        return [constant(name, np.array(sizes_of(" ".join(words), dict(c.sizes)), np.int64))]
    nodes: Nodes = []
    parts = {}
    for word in dict.fromkeys(words):
        parts[word] = f"{name}_{word.replace('+', '_')}"
        if source := _source(c.op, word):
            nodes.append(node("Shape", [source[0]], [parts[word]], start=source[1], end=source[1] + 1))
        elif word[0].isdigit():  # that many gates, whose weights are no input or are two
            nodes += [*_shape(c, f"{name}_cells", ["H"]), constant(f"{name}_gates", np.array([int(word[0])], np.int64))]
            nodes.append(node("Mul", [f"{name}_cells", f"{name}_gates"], [parts[word]]))
        else:  # x is no input of the cell's gradient: I is what the weights' rows have more than H
            nodes += [*_shape(c, f"{name}_rows", ["I+H"]), *_shape(c, f"{name}_cells", ["H"])]
            nodes.append(node("Sub", [f"{name}_rows", f"{name}_cells"], [parts[word]]))
    return [*nodes, node("Concat", [parts[word] for word in words], [name], axis=0)]


def _source(op: Op, word: str) -> tuple[str, int] | None:
    """An input whose values matter and that has a dimension of this size, and which dimension that is."""
    for tensor in op.inputs:
        if tensor.read and not tensor.peephole and word in tensor.shape.split():
            return tensor.name, tensor.shape.split().index(word)
    return None


def _finished(c: Config, nodes: Nodes, results: Mapping[str, str]) -> Nodes:
    """The nodes that the outputs need, which they give under their names; float16 is cast on the way in and out."""
    nodes = needed(nodes, results.values())
    if c.half:
        arrays = [tensor.name for tensor in c.op.inputs if tensor.name in reads(nodes)]
        inner = {name: f"{name}_float" for name in [*arrays, *results]}
        nodes = renamed(nodes, inner)
        casts = [node("Cast", [name], [inner[name]], to=TensorProto.FLOAT) for name in arrays]
        back = [node("Cast", [inner.get(v, v)], [name], to=TensorProto.FLOAT16) for name, v in results.items()]
        return [*casts, *nodes, *back]
    names = {name: f"{name}_all" for name in results} | {value: name for name, value in results.items()}
    return renamed(nodes, names)


def constant(name: str, value: Any) -> NodeProto:
    return node("Constant", [], [name], name=name, value=numpy_helper.from_array(np.asarray(value), f"{name}_value"))


def _given(c: Config, names: set[str]) -> Nodes:
    """Constants for those of the numbers and sizes named in the texts that are read."""
    clip, p_clip = c.attribute("cell_clip"), c.attribute("proj_clip")
    floats = {"zero": 0.0, "one": 1.0, "forget_bias": c.attribute("forget_bias"), "clip_low": -clip, "clip_high": clip}
    floats |= {"p_low": -p_clip, "p_high": p_clip} | activations.numbers(c.activation_of)
    integers = {
        "at_0": [0],
        "at_last": [-1],
        "at_1": [1],
        "at_1_2": [1, 2],
        "at_minimum": [-(2**31)],
        "int_0": 0,
        "int_1": 1,
    }
    sizes = {"T_1": "T", "B_1": "B", "I_H": "I P" if c.projected else "I H", "HH_H": "2H H"}
    sizes |= {"H_H": "H H", "H_H_H": "H H H", "H_H_H_H": "H H H H"}
    sizes |= {"T_B_H": "T B H", "T_B_2H": "T B 2H", "T_B_3H": "T B 3H", "T_B_4H": "T B 4H"}
    return [
        *(constant(name, c.compute.type(value)) for name, value in floats.items() if name in names),
        *(constant(name, np.array(value, np.int64)) for name, value in integers.items() if name in names),
        *(constant(name, np.bool_(True)) for name in ("true",) if name in names),
        *(constant(name, value) for name, value in (CONSTANTS if c.integers else {}).items() if name in names),
        *(part for name, words in sizes.items() if name in names for part in _shape(c, name, words.split())),
    ]


def _named(c: Config, each: NodeProto) -> None:
    """Give a node the name of its first output, which makes graphs and profiles readable."""
    each.name = each.output[0]
    if each.op_type in CELLS:
        each.attribute.append(helper.make_attribute("hidden_size", c.sizes["H"]))
        if each.op_type == "LSTM" and "coupled" in c.conditions:
            each.attribute.append(helper.make_attribute("input_forget", 1))
        for name, value in attributes_of(each.op_type, [c.activation_of]).items():
            each.attribute.append(helper.make_attribute(name, value))
    for attribute in each.attribute:
        for inner in attribute.g.node:
            _named(c, inner)


# ------------------------------------------------------------------------------------------------------------ the model
def function(c: Config, name: str | None = None) -> FunctionProto:
    """The op as a function of the domain `blockcell`; its inputs are the arguments that matter."""
    nodes, inputs = body(c)
    outputs = [tensor.name for tensor in c.op.outputs]
    opset = [helper.make_opsetid("", c.opset)]
    made: FunctionProto = helper.make_function(DOMAIN, name or c.op.name, inputs, outputs, nodes, opset)
    made.doc_string = _doc(c)
    return made


def packed(c: Config, weights: Mapping[str, Array]) -> dict[str, Array]:
    """An op's weights in the layout of ONNX's own LSTM, GRU or RNN; none where there is nothing to compute with."""
    from onnx.reference import ReferenceEvaluator  # takes a while to load, and few need it

    nodes, _ = body(c)
    names = [name for name in PACKED if name in writes(nodes)]
    nodes = needed(nodes, names)
    inputs = [name for name in weights if name in reads(nodes)]
    made = helper.make_function(DOMAIN, "packed", inputs, names, nodes, [helper.make_opsetid("", c.opset)])
    with np.errstate(all="ignore"):
        arrays = ReferenceEvaluator(made).run(names, {name: weights[name] for name in inputs}, attributes={})
    return dict(zip(names, arrays, strict=True))


def build(
    op: str,
    *,
    dtype: DTypeLike = "float32",
    sizes: Mapping[str, int | None] | None = None,
    attrs: Mapping[str, Value] | None = None,
    provider: str = "cpu",
    loop: str | None = None,
    functions: bool = True,
    opset: int = 18,
    static: bool = False,
) -> ModelProto:
    """An op as an ONNX model.

    The graph's inputs and outputs have the op's argument and result names. Arguments that cannot influence the results
    (the peephole weights without ``use_peephole``, say) are not inputs; attributes are constants in the graph.
    ``seq_len_max`` is an int64 scalar input; any value from 0 to T is right when T >= 1.

    Parameters
    ----------
    op : str
        Any op: ``"BlockLSTM"``, ``"block_gru_grad"``, ...
    dtype : str or numpy dtype
        float32, float64 or float16. float16 is for storage: a step computes in float32, as `blockcell.raw_ops` does.
    sizes : dict, optional
        Any of T, B, I and H that are to be fixed; those missing or None stay symbolic. A cell ignores T.
        With T = 0, which has no step to run, the model is a constant.
    attrs : dict, optional
        The op's attributes, such as ``forget_bias``; TensorFlow's defaults for those missing. ``use_peephole`` of a
        gradient has no default. An ``activation`` is a name or a tuple, as of `blockcell.RNN`.
    provider : {"cpu", "cuda", "webgpu"}
        Which of onnxruntime's providers is to run the model; chooses ``loop`` where it is None, and ``static``.
    loop : {"scan", "unroll", "native", "loop"}, optional
        What runs the steps of a sequence: a Scan; nothing, as every step is written out (needs ``sizes["T"]``); ONNX's
        own LSTM, GRU or RNN (forward without clip, needs ``sizes["H"]``), which leaves only the LSTM's cs to a Scan; a
        Loop.
        The results are the same. None: "scan"; for "webgpu", where each step of a Scan copies arrays to the host and
        back, "native" where it is possible, else "unroll".
    functions : bool
        True: one node, named like the op, with a body that the model brings along. False: the body's nodes themselves,
        for runtimes that know no functions. With ``static``, a Scan's body then ends in copies of its results, as tract
        demands.
    opset : int
        The version of ONNX's operators, 15 or newer.
    static : bool
        A Scan form has two versions of the loop, of which the one for sequences of full length is spared the masks that
        zero what lies past ``seq_len_max``; and steps that are written out read their arrays from one Split. True: for
        runtimes that do without: only the other version, in "native" a loop only where T is free, and no Split with
        more than 7 outputs, which WebGPU needs. For the providers of a GPU it is True in any case.

    Returns
    -------
    onnx.ModelProto
        Its metadata say which version of blockcell made it of which op, with which attributes.

    Raises
    ------
    ValueError
        An argument is not what is listed above; the message says what is possible.

    Notes
    -----
    Source of the equations: `blockcell.formulas`. The texts of the graphs: `onnx_export.lstm`, `onnx_export.gru`,
    `onnx_export.gru_reset_after`, `onnx_export.rnn`, `onnx_export.activations`.
    """

    def make(loop: str, static: bool) -> ModelProto:
        return _model(op, replace(config(op, dtype, sizes, attrs, loop, opset, static), inlined=not functions))

    return in_form(op, provider, loop, static, make)


def _model(op: str, c: Config) -> ModelProto:
    imports = [helper.make_opsetid("", c.opset)]
    made: list[FunctionProto] = []
    if not c.inlined:
        made = [function(c)]
        inputs = list(made[0].input)
        nodes = [node(made[0].name, inputs, made[0].output, name=op, domain=DOMAIN)]
        imports.append(helper.make_opsetid(DOMAIN, 1))
    else:
        nodes, inputs = body(c)
    graph = helper.make_graph(
        nodes,
        c.op.name,
        [_typed(c, tensor) for tensor in arguments_of(c.op) if tensor.name in inputs],
        [_typed(c, tensor) for tensor in c.op.outputs],
        doc_string=_doc(c),
    )
    model: ModelProto = helper.make_model(
        graph,
        opset_imports=imports,
        functions=made,
        ir_version=max(8, helper.find_min_ir_version_for(imports[:1])),
        producer_name="blockcell",
        producer_version=__version__,
    )
    provenance = {"version": __version__, "op": op, "attributes": json.dumps(c.attrs), "loop": c.loop}
    helper.set_model_props(model, {f"blockcell.{key}": value for key, value in provenance.items()})
    return model


def arguments_of(op: Op) -> list[Tensor]:
    """The op's tensors, seq_len_max among them."""
    return [Tensor("seq_len_max", "", "input")] * op.sequence + list(op.inputs)


def _typed(c: Config, tensor: Tensor) -> ValueInfoProto:
    """The tensor's type and shape, sizes that are not fixed as symbols such as ``I+H`` and ``4*H``."""
    if tensor.name == "seq_len_max":
        return helper.make_tensor_value_info(tensor.name, TensorProto.INT64, [])
    shape: list[int | str] = []
    for word in tensor.shape.split():
        # onnxruntime 1.31's fusion of MatMul and Add fails on a size that it knows to be 0: that one stays unknown.
        free = [letter for letter in word if letter in LETTERS and not c.sizes.get(letter)]
        if free:
            parts = re.sub(r"(\d)([A-Z])", r"\1*\2", word)
            shape.append("".join(str(c.sizes.get(letter, letter)) for letter in parts))
        else:
            shape.append(sizes_of(word, dict(c.sizes))[0])
    return helper.make_tensor_value_info(tensor.name, helper.np_dtype_to_tensor_dtype(c.dtype), shape)


def _doc(c: Config) -> str:
    """The equations, from the module that has the text."""
    return f"{c.op.name} of blockcell.{c.op.module}.\n\n{c.module.__doc__}"
