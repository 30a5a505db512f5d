"""Write the nodes of an op: some run for all steps at once, and a loop runs the others."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from onnx import FunctionProto, NodeProto, TensorProto, helper

from blockcell.convert.onnx_activations import attributes_of
from blockcell.optable import LETTERS, OPS, Op, Tensor, sizes_of

from .. import activations
from ..nodes import (
    DOMAIN,
    Nodes,
    constant,
    make_node,
    make_value_info,
    names_read,
    names_written,
    nodes_within,
    rename_values,
    select_needed,
)
from ..text import Program, TextParser
from .config import Config, input_tensors, native_cell
from .integers import CONSTANTS, replace_gemms
from .loops import LoopBody, StepMask, divide_step, last_name, loop, names_with_time, scan, unroll

CELLS = ("LSTM", "GRU", "RNN")  # ONNX's own
ARGUMENTS = ("fresh", "lengths")  # that only layers have
ABSENT = {"w_p", *(tensor.name for op in OPS.values() for tensor in op.inputs)}  # in texts, perhaps not in an op


def op_nodes(c: Config) -> tuple[Nodes, list[str]]:
    """Return the op's nodes, and the names of the arguments that they read."""
    empty = any(c.sizes.get(letter) == 0 for letter in "TBH")  # no step, no row or no cell: nothing to compute with
    if empty:
        nodes, results = _expanded_zeros(c)
    else:
        zeros, zero_results = _summed_zeros([tensor for tensor in c.op.outputs if c.is_always_zero(tensor)])
        computing, computed = _computing_nodes(c)
        nodes, results = [*zeros, *computing], zero_results | computed
    nodes = _named_outputs(c, nodes, results)
    if c.node_inputs:
        nodes = [node for node in nodes if not set(c.node_inputs).intersection(node.output)]
        nodes = select_needed(nodes, (tensor.name for tensor in c.op.outputs))
    names = names_read(nodes)
    constants = [constant(name, value) for name, value in _values(c).items() if name in names]
    sizes = [node for name, shape in _shapes(c).items() if name in names for node in _shape(c, name, shape.split())]
    nodes = [*constants, *sizes, *nodes]
    for node in nodes_within(nodes):
        _finish_node(c, node)
    read_names = names_read(nodes)
    inputs = [tensor.name for tensor in input_tensors(c.op)]
    arguments = [*inputs, *ARGUMENTS, *c.node_inputs, *_scales(c).values()]
    undefined = read_names - {*arguments} - names_written(nodes)
    assert not undefined, f"{c.op.name} reads {undefined}"
    return nodes, [name for name in arguments if name in read_names]


def op_function(c: Config, name: str | None = None) -> FunctionProto:
    """Return the op as a function of the domain `blockcell`; its inputs are the arguments that matter.

    One with a name of its own says for which dtype and attributes it is.
    """
    nodes, inputs = op_nodes(c)
    outputs = [tensor.name for tensor in c.op.outputs]
    opset = [helper.make_opsetid("", c.form.opset)]
    result: FunctionProto = helper.make_function(DOMAIN, name or c.op.name, inputs, outputs, nodes, opset)
    result.doc_string = doc_string(c) if name is None else f"{c.dtype}, {json.dumps(c.attrs)}\n\n{doc_string(c)}"
    return result


def doc_string(c: Config) -> str:
    """Return the equations, from the module that has the text."""
    return f"{c.op.name} of blockcell.{c.op.module}.\n\n{c.module.__doc__}"


# ------------------------------------------------------------------------------------------------------- an op's text
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


def _text_nodes(c: Config) -> TextNodes:
    """Return the nodes of the op's text where `Config.conditions` hold."""
    program: Program = c.module.FORWARD if c.forward else c.module.BACKWARD
    names = [*(tensor.name for tensor in c.op.inputs), *ARGUMENTS, *c.node_inputs, *program.carried]
    names += [*_values(c), *_shapes(c)]
    parser = TextParser(c.conditions, c.op.gates, names, ABSENT)
    parser.alias["cs_grad"] = "cs_grad_next"  # where it is no input
    before, step = parser.nodes(program.before), parser.nodes(program.step)
    step = activations.expand_activations(step, c.activation_of, c.compute)
    if c.integers:
        step = replace_gemms(before, step, _scales(c))
    carried = {name: parser.name(value) for name, value in program.carried.items()}
    if c.native:
        native = rename_values(parser.nodes(c.module.NATIVE), {} if c.lengths else {"lengths": ""})
        before, step, carried = before + native, [], {}
    text = TextNodes(before, step, parser.nodes(program.after), carried, {})
    if c.reset:
        text = _with_resets(c, text)
    outputs = [tensor for tensor in c.op.outputs if not c.is_always_zero(tensor)]
    results = {tensor.name: parser.name(_in_text(c, tensor)) for tensor in outputs}
    for name, value in text.carried.items():
        if (last_state := last_name(name.removesuffix("_prev"))) in results:
            results[last_state] = last_name(value)
    return replace(text, results=results)


def _with_resets(c: Config, text: TextNodes) -> TextNodes:
    """Return the text with states, or gradients to them, set to zero before the steps at which ``fresh`` is true."""

    def where(name: str, result: str) -> NodeProto:
        return make_node("Where", ["fresh", "zero", name], [result])

    carried = text.carried
    if c.forward:
        kept_names = {name: f"{name}_kept" for name in carried}
        reset_states = [where(*names) for names in kept_names.items()]
        return replace(text, step=reset_states + rename_values(text.step, kept_names))
    kept_names = {name: f"{name}_kept" for name in sorted(names_written(text.before)) if name.endswith("_before")}
    step = rename_values(text.step, kept_names | {name: f"{name}_free" for name in carried.values()})
    return replace(
        text,
        before=[*text.before, *(where(*names) for names in kept_names.items())],
        step=step + [where(f"{name}_free", name) for name in carried.values()],
        after=rename_values(text.after, kept_names),
    )


def _in_text(c: Config, output: Tensor) -> str:
    """Return an output's name in the text, where gradients of a GRU and arrays of sequences have other names."""
    name = output.name
    if c.runs_all_steps and c.forward:
        if c.native:
            return {"h": "h_native", "h_last": "h_end", "cs_last": "cs_end"}[name]
        # With o and co there, one product for all steps is cheaper than a copy of the state at each.
        computes_h = name == "h" and not c.projected and any(tensor.name == "co" for tensor in c.op.outputs)
        return "h_live" if computes_h else name
    if name == "dicfo":
        return "d_bars"
    if native_cell(c.op) == "GRU" and name.endswith("_grad"):
        name = f"d_{name.removesuffix('_grad')}"
    return f"{name}_live" if output.shape.startswith("T ") else name


def _scales(c: Config) -> dict[str, str]:
    """Return the arguments that are scales of matrices, by the matrices' names."""
    return {tensor.name: f"{tensor.name}_scale" for tensor in c.op.inputs if tensor.kind == "matrix"}


# ------------------------------------------------------------------------------------------------- a cell, a sequence
def _computing_nodes(c: Config) -> tuple[Nodes, dict[str, str]]:
    """Return the nodes that compute outputs, and the outputs' values by their names.

    Nodes of a sequence's step that need no other step run before or after the loop, for all steps at once. A Scan may
    have two versions, of which the one for sequences of full length needs no masks.
    """
    text = _text_nodes(c)
    if not c.op.sequence:
        return [*text.before, *text.step, *text.after], dict(text.results)
    last_states = _last_states(c, text)
    after = select_needed(text.after, text.results.values())
    values_after = names_read(after) | {value for name, value in text.results.items() if name not in last_states}
    before_loop, in_loop, after_loop = divide_step(text.step, text.carried, values_after)
    before = [*text.before, *before_loop]
    timed = names_with_time(before, [*(t.name for t in c.op.inputs if t.shape.startswith("T ")), "fresh"])
    body = LoopBody(
        in_loop,
        text.carried,
        scan_inputs=sorted(names_read(in_loop) & timed),
        scan_outputs=sorted(names_written(in_loop) & (names_read(after_loop) | values_after)),
        reverse=not c.forward,
        dtype=helper.np_dtype_to_tensor_dtype(c.compute),
        rows=c.sizes.get("B"),
        static=c.form.static,
        distinct_outputs=c.form.inlined and c.form.static,
    )
    before = [*StepMask.LENGTH, *before, *([] if c.forward else _last_gradients(c, text.carried))]
    after = [*after_loop, *after]
    if c.form.loop == "scan" and not (c.form.static or c.runs_all_steps):
        full_length, masked = (_loop_nodes(c, text, body, after, StepMask(is_full)) for is_full in (True, False))
        return [*before, _two_versions(c, full_length, masked)], {name: f"{name}_result" for name in text.results}
    nodes, results = _loop_nodes(c, text, body, after, StepMask(all_live=c.runs_all_steps))
    return [*before, *nodes], results


def _last_states(c: Config, text: TextNodes) -> list[str]:
    """Return the outputs that are states, or gradients to them, after the loop's last step."""
    return [
        tensor.name
        for tensor in c.op.outputs
        if text.results.get(tensor.name) in text.carried.values() and not tensor.shape.startswith("T ")
    ]


def _loop_nodes(
    c: Config, text: TextNodes, body: LoopBody, after: Nodes, mask: StepMask
) -> tuple[Nodes, dict[str, str]]:
    """Return the nodes of the loop and of what runs after it, and the outputs' values by their names."""
    nodes = [] if mask.all_live else [*StepMask.CONDITIONS]
    if body.nodes and c.form.loop == "unroll":
        nodes += unroll(body, mask, c.sizes["T"])
    elif body.nodes:
        nodes += loop(body, mask) if c.form.loop == "loop" else scan(body, mask)
    for node in after:
        nodes += mask(*node.input, *node.output) if node.op_type == "Live" else [node]
    results = dict(text.results)
    for name in _last_states(c, text):
        results[name] = f"{name}_live"
        nodes += mask(last_name(text.results[name]), results[name], "any_live")
    return rename_values(nodes, mask.aliases), {name: mask.aliases.get(value, value) for name, value in results.items()}


def _last_gradients(c: Config, carried: Iterable[str]) -> Nodes:
    """Return zeros for the gradients that the last step reads, as no step runs after it."""
    nodes, shapes = [make_node("Shape", ["h_prev"], ["state_shape"])], dict.fromkeys(carried, "state_shape")
    if c.projected:
        nodes.append(make_node("Shape", ["cs_prev"], ["cs_shape"]))
        shapes["cs_grad_next"] = "cs_shape"
    return [*nodes, *(make_node("Expand", ["zero", shape], [name]) for name, shape in shapes.items())]


def _two_versions(
    c: Config, full_length: tuple[Nodes, dict[str, str]], masked: tuple[Nodes, dict[str, str]]
) -> NodeProto:
    """Return an If with two versions of the loop: sequences of full length need no masks."""
    branches = {}
    for key, (nodes, results) in {"then_branch": full_length, "else_branch": masked}.items():
        outputs = [make_value_info(name, helper.np_dtype_to_tensor_dtype(c.compute), None) for name in results.values()]
        branches[key] = helper.make_graph(select_needed(nodes, results.values()), key, [], outputs)
    return make_node("If", ["all_live"], [f"{name}_result" for name in full_length[1]], **branches)


# ------------------------------------------------------------------------------------------------ sizes and constants
def _zeros_of(array: str) -> Nodes:
    """Return nodes that compute zeros of an array's shape: onnxruntime may copy constants while a GPU computes."""
    return [make_node("Less", [array, array], ["never"]), make_node("Where", ["never", array, "zero"], ["zero_rows"])]


def _summed_zeros(outputs: Collection[Tensor]) -> tuple[Nodes, dict[str, str]]:
    """Return nodes that compute zeros [H] from cs_prev [B, H], and the zeros' names."""
    names = {tensor.name: f"{tensor.name}_zeros" for tensor in outputs}
    sums = [make_node("ReduceSum", ["zero_rows", "at_0"], [name], keepdims=0) for name in names.values()]
    return [*_zeros_of("cs_prev"), *sums], names


def _expanded_zeros(c: Config) -> tuple[Nodes, dict[str, str]]:
    """Return nodes that make zeros of all outputs' shapes, and the zeros' names; free sizes come from the inputs."""
    array = next(tensor.name for tensor in c.op.inputs if tensor.read and not tensor.peephole)
    nodes = [*_zeros_of(array), make_node("ReduceSum", ["zero_rows"], ["nothing"], keepdims=0)]
    for tensor in c.op.outputs:
        nodes += _shape(c, f"{tensor.name}_shape", tensor.shape.split())
        nodes.append(make_node("Expand", ["nothing", f"{tensor.name}_shape"], [f"{tensor.name}_zeros"]))
    return nodes, {tensor.name: f"{tensor.name}_zeros" for tensor in c.op.outputs}


def _shape(c: Config, name: str, words: Sequence[str]) -> Nodes:
    """Return nodes that make a vector of sizes such as I, H and 4H; free sizes come from the inputs."""
    if all(letter in c.sizes for word in words for letter in word if letter in LETTERS):
        return [constant(name, np.array(sizes_of(" ".join(words), dict(c.sizes)), np.int64))]
    nodes: Nodes = []
    sizes = {}
    for word in dict.fromkeys(words):
        sizes[word] = f"{name}_{word.replace('+', '_')}"
        if source := _source(c.op, word):
            nodes.append(make_node("Shape", [source[0]], [sizes[word]], start=source[1], end=source[1] + 1))
        elif word[0].isdigit():  # that many gates, whose weights are no input or are two
            nodes += [*_shape(c, f"{name}_cells", ["H"]), constant(f"{name}_gates", np.array([int(word[0])], np.int64))]
            nodes.append(make_node("Mul", [f"{name}_cells", f"{name}_gates"], [sizes[word]]))
        else:  # x is no input of the cell's gradient: I is what the weights' rows have more than H
            nodes += [*_shape(c, f"{name}_rows", ["I+H"]), *_shape(c, f"{name}_cells", ["H"])]
            nodes.append(make_node("Sub", [f"{name}_rows", f"{name}_cells"], [sizes[word]]))
    return [*nodes, make_node("Concat", [sizes[word] for word in words], [name], axis=0)]


def _source(op: Op, word: str) -> tuple[str, int] | None:
    """Return an input that the op reads and its axis with a dimension of this size."""
    for tensor in op.inputs:
        if tensor.read and not tensor.peephole and word in tensor.shape.split():
            return tensor.name, tensor.shape.split().index(word)
    return None


def _named_outputs(c: Config, nodes: Nodes, results: Mapping[str, str]) -> Nodes:
    """Return the nodes that the outputs need, with the outputs' names for their values; float16 is cast in and out."""
    nodes = select_needed(nodes, results.values())
    if c.half:
        arrays = [tensor.name for tensor in c.op.inputs if tensor.name in names_read(nodes)]
        inner = {name: f"{name}_float" for name in [*arrays, *results]}
        nodes = rename_values(nodes, inner)
        casts = [make_node("Cast", [name], [inner[name]], to=TensorProto.FLOAT) for name in arrays]
        casts_back = [
            make_node("Cast", [inner.get(v, v)], [name], to=TensorProto.FLOAT16) for name, v in results.items()
        ]
        return [*casts, *nodes, *casts_back]
    names = {name: f"{name}_all" for name in results} | {value: name for name, value in results.items()}
    return rename_values(nodes, names)


def _values(c: Config) -> dict[str, Any]:
    """Return the numbers that the texts name."""
    clip, p_clip = c.attribute("cell_clip"), c.attribute("proj_clip")
    floats = {"zero": 0.0, "one": 1.0, "forget_bias": c.attribute("forget_bias"), "clip_low": -clip, "clip_high": clip}
    floats |= {"p_low": -p_clip, "p_high": p_clip} | activations.numbers(c.activation_of)
    integers = {"at_0": [0], "at_last": [-1], "at_1": [1], "at_1_2": [1, 2], "at_minimum": [-(2**31)]}
    return {
        **{name: c.compute.type(value) for name, value in floats.items()},
        **{name: np.array(value, np.int64) for name, value in {**integers, "int_0": 0, "int_1": 1}.items()},
        "true": np.bool_(True),
        **(CONSTANTS if c.integers else {}),
    }


def _shapes(c: Config) -> dict[str, str]:
    """Return the vectors of sizes that the texts name, as words such as I, H and 4H."""
    gates = {f"T_B_{word}": f"T B {word}" for word in ("H", "2H", "3H", "4H")}
    sizes = {"T_1": "T", "B_1": "B", "I_H": "I P" if c.projected else "I H", "HH_H": "2H H"}
    return sizes | {"H_H": "H H", "H_H_H": "H H H", "H_H_H_H": "H H H H"} | gates


def _finish_node(c: Config, node: NodeProto) -> None:
    """Give a node the name of its first output, for graphs and profiles, and ONNX's own cells their attributes."""
    node.name = node.output[0]
    if node.op_type in CELLS:
        node.attribute.append(helper.make_attribute("hidden_size", c.sizes["H"]))
        if node.op_type == "LSTM" and "coupled" in c.conditions:
            node.attribute.append(helper.make_attribute("input_forget", 1))
        for name, value in attributes_of(node.op_type, [c.activation_of]).items():
            node.attribute.append(helper.make_attribute(name, value))
