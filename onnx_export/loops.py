"""From one step to a sequence: nodes that need no other step run before or after the loop, for all steps at once; the
others run in a Scan, in a Loop, or are written out for every step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from onnx import GraphProto, NodeProto, TensorProto, ValueInfoProto, helper

node = helper.make_node
Nodes = list[NodeProto]
BOOLS = ("fresh", "h_inside")  # the arrays of bool that a step may read a row of; all others are of floats
SPLIT_MOST = 7  # outputs: with the input as many arrays as every WebGPU lets a shader have


@dataclass(frozen=True)
class LoopBody:
    """What runs at every step, in ONNX's terms."""

    nodes: Nodes
    carried: Mapping[str, str]
    """The names that a step reads, each with the name under which the step before it computed the value."""
    scan_inputs: list[str]
    """Arrays of which each step reads its row."""
    scan_outputs: list[str]
    """Values of which each step gives a row of an array."""
    reverse: bool
    """Whether the last step runs first. Then scan inputs are zero past seq_len_max, where no gradient comes from."""
    dtype: int
    """ONNX's number of the values' type."""
    rows: int | None
    """B, if it is fixed."""
    static: bool
    """Whether a Split may have few outputs only."""
    distinct_outputs: bool
    """Whether each output is a copy that no node of the body reads, as tract demands of a Scan."""

    def named(self, rename: Callable[[str], str]) -> Nodes:
        """The nodes, with new names for all values that differ between steps."""
        return renamed(
            self.nodes, {name: rename(name) for name in {*self.carried, *self.scan_inputs, *writes(self.nodes)}}
        )


def last(name: str) -> str:
    """The name of a carried value after the last step."""
    return f"{name}_last"


# ------------------------------------------------------------------------------------------------------ dividing a step
def reads(nodes: Iterable[NodeProto]) -> set[str]:
    """The names that nodes read, including those that their bodies take from outside."""
    names: set[str] = set()
    for each in nodes:
        names.update(name for name in each.input if name)
        for attribute in each.attribute:
            if attribute.HasField("g"):
                body = attribute.g
                inside = {value.name for value in body.input} | writes(body.node)
                names |= (reads(body.node) | {value.name for value in body.output}) - inside
    return names


def writes(nodes: Iterable[NodeProto]) -> set[str]:
    """The names that nodes give values."""
    return {name for each in nodes for name in each.output if name}


def renamed(nodes: Iterable[NodeProto], names: Mapping[str, str]) -> Nodes:
    """The nodes with other names, in bodies too."""
    copies = []
    for each in nodes:
        copy = NodeProto()
        copy.CopyFrom(each)
        copy.input[:] = [names.get(name, name) for name in each.input]
        copy.output[:] = [names.get(name, name) for name in each.output]
        for attribute in copy.attribute:
            if attribute.HasField("g"):
                inner = renamed(attribute.g.node, names)
                del attribute.g.node[:]
                attribute.g.node.extend(inner)
                for value in [*attribute.g.input, *attribute.g.output]:
                    value.name = names.get(value.name, value.name)
        copies.append(copy)
    return copies


def needed(nodes: Iterable[NodeProto], wanted: Iterable[str]) -> Nodes:
    """The nodes that the wanted names need."""
    names, kept = set(wanted), []
    for each in reversed(list(nodes)):
        if names.intersection(each.output):
            kept.append(each)
            names |= reads([each])
    return kept[::-1]


def with_time(nodes: Iterable[NodeProto], timed: Iterable[str]) -> set[str]:
    """The names of values that have a time axis if `timed` have one."""
    names = set(timed)
    for each in nodes:
        if each.op_type != "Shape" and names.intersection(each.input):
            names.update(each.output)
    return names


def divided(nodes: Nodes, carried: Mapping[str, str], wanted: Collection[str]) -> tuple[Nodes, Nodes, Nodes]:
    """The nodes of a step that can run before the loop, must run in it, and can run after it."""
    nodes = needed(nodes, {*wanted, *carried.values()})
    waiting = set(carried)
    before, rest = [], []
    for each in nodes:
        if waiting.isdisjoint(each.input):
            before.append(each)
        else:
            waiting.update(each.output)
            rest.append(each)
    readers = {each.output[0] for each in rest if not carried.keys().isdisjoint(each.input)}
    inside = needed(rest, {*carried.values(), *readers})
    return before, inside, [each for each in rest if each not in inside]


# ----------------------------------------------------------------------------------------------------- past seq_len_max
class Live:
    """Sets the rows of steps from seq_len_max on to zero. Multiplication would not do: NaN times zero is NaN.

    If all steps are known to be live, there is nothing to do, and a result is another name of its array.
    """

    LENGTH: ClassVar = [
        node("Squeeze", ["T_1"], ["T"]),
        node("Equal", ["seq_len_max", "T"], ["all_live"]),
    ]
    CONDITIONS: ClassVar = [
        node("Greater", ["seq_len_max", "int_0"], ["any_live"]),
        node("Range", ["int_0", "T", "int_1"], ["steps"]),
        node("Less", ["steps", "seq_len_max"], ["live_steps"]),
        node("Unsqueeze", ["live_steps", "at_1_2"], ["live"]),
        node("Slice", ["live", "at_last", "at_minimum", "at_0", "at_last"], ["live_back"]),
    ]

    def __init__(self, known: bool) -> None:
        self.known = known
        self.aliases: dict[str, str] = {}

    def __call__(self, array: str, result: str, condition: str = "live") -> Nodes:
        """``result`` is ``array`` where the condition holds, else zero."""
        if self.known:
            self.aliases[result] = array
            return []
        return [node("Where", [condition, array, "zero"], [result])]


# ---------------------------------------------------------------------------------------------------------- three loops
def _now(name: str) -> str:
    return f"{name}_t"


def _back(name: str) -> str:
    return f"{name}_back"


def value_of(name: str, dtype: int, shape: Sequence[int | None] | None = None) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def _reversed(array: str, result: str) -> NodeProto:
    return node("Slice", [array, "at_last", "at_minimum", "at_0", "at_last"], [result])


def _around(body: LoopBody, live: Live, loop: Callable[[Callable[[str], str]], NodeProto]) -> Nodes:
    """The loop; if the last step runs first, its arrays are reversed before and after it.

    A Scan can run backwards by itself, but not in onnx.reference and tract. ``loop`` is told the arrays' names.
    """
    if not body.reverse:
        return [loop(lambda name: name)]
    nodes = []
    for name in body.scan_inputs:
        nodes += [_reversed(name, f"{name}_turned"), *live(f"{name}_turned", _back(name), "live_back")]
    return [*nodes, loop(_back), *(_reversed(_back(name), name) for name in body.scan_outputs)]


def _graph(body: LoopBody, name: str, rows: Nodes, inputs: list[ValueInfoProto], more: Nodes) -> GraphProto:
    """The graph of one step. Each output has its own name, even if two of them are the same value."""
    inner = [*rows, *body.named(_now), *more]
    outputs = [value_of(name, TensorProto.BOOL, []) for extra in more for name in extra.output]
    for values, ending in ((body.carried.values(), "next"), (body.scan_outputs, "row")):
        for value in map(_now, values):
            output = value
            if body.distinct_outputs or value in {made.name for made in outputs}:
                output = f"{value}_{ending}"
                inner.append(node("Identity", [value], [output]))
            outputs.append(value_of(output, body.dtype, [None, None]))  # old onnxruntimes do not always find the rank
    return helper.make_graph(inner, name, inputs, outputs)


def scan(body: LoopBody, live: Live, T: int) -> Nodes:
    """One Scan."""
    inputs = [
        value_of(_now(name), TensorProto.BOOL if name in BOOLS else body.dtype)
        for name in [*body.carried, *body.scan_inputs]
    ]
    graph = _graph(body, "step", [], inputs, [])
    finals = [last(name) for name in body.carried.values()]
    return _around(
        body,
        live,
        lambda array: node(
            "Scan",
            [*body.carried, *map(array, body.scan_inputs)],
            [*finals, *map(array, body.scan_outputs)],
            body=graph,
            num_scan_inputs=len(body.scan_inputs),
        ),
    )


def loop(body: LoopBody, live: Live, T: int) -> Nodes:
    """One Loop."""
    array = _back if body.reverse else lambda name: name
    # Arrays of numbers: onnxruntime's Gather of bools on WebGPU, in 1.27, reads past the end of its indices.
    stored = {name: f"{name}_number" if name in BOOLS else name for name in body.scan_inputs}
    numbers, rows = [], [node("Gather", [array(name), "step"], [_now(name)]) for name in stored.values()]
    for name in BOOLS:
        if name in stored:
            numbers.append(node("Cast", [name], [stored[name]], to=body.dtype))
            rows.append(node("Cast", [_now(stored[name])], [_now(name)], to=TensorProto.BOOL))
    inputs = [
        value_of("step", TensorProto.INT64, []),
        value_of("go_on", TensorProto.BOOL, []),
        *(value_of(_now(name), body.dtype) for name in body.carried),
    ]
    graph = _graph(body, "step", rows, inputs, [node("Identity", ["go_on"], ["going_on"])])
    finals = [last(name) for name in body.carried.values()]
    return numbers + _around(
        replace(body, scan_inputs=[*stored.values()]),
        live,
        lambda array: node("Loop", ["T", "true", *body.carried], [*finals, *map(array, body.scan_outputs)], body=graph),
    )


def unroll(body: LoopBody, live: Live, T: int) -> Nodes:
    """The nodes of all steps, one step after the other, on the arrays' rows [B, ...]."""
    order = [*range(T)[::-1]] if body.reverse else [*range(T)]
    before = dict(zip(order[1:], order, strict=False))

    def value_at(name: str, t: int) -> str:
        if name in body.carried:
            return value_at(body.carried[name], before[t]) if t in before else name
        return last(name) if name in body.carried.values() and t == order[-1] else f"{name}_{t}"

    nodes: Nodes = []
    for name in body.scan_inputs:
        array = name
        if body.reverse:
            array = f"{name}_live"
            nodes += live(name, array)
        nodes += _cut(array, [value_at(name, t) for t in range(T)], body)
    for t in order:
        nodes += body.named(lambda name, t=t: value_at(name, t))  # type: ignore[misc]
    for name in body.scan_outputs:
        flat, width, shape = (f"{name}_{word}" for word in "flat width shape".split())
        nodes.append(node("Concat", [value_at(name, t) for t in range(T)], [flat], axis=0))
        if body.rows is None:
            nodes.append(node("Shape", [flat], [width], start=1, end=2))
            nodes.append(node("Concat", ["T_1", "B_1", width], [shape], axis=0))
        else:
            nodes.append(node("Constant", [], [shape], value_ints=[T, body.rows, -1]))
        nodes.append(node("Reshape", [flat, shape], [name], allowzero=1))
    return nodes


def _cut(array: str, steps: list[str], body: LoopBody) -> Nodes:
    """The steps [B, ...] of an array [T, B, ...]; slices of a few of them where no Split may have them all."""
    nodes = []
    most = SPLIT_MOST if body.static else len(steps)
    for start in range(0, len(steps), most):
        part, some = steps[start : start + most], array
        begin, end, flat, count, sizes = (f"{array}_{word}_{start}" for word in "begin end flat count sizes".split())
        if len(part) < len(steps):
            some = f"{array}_some_{start}"
            nodes += [
                node("Constant", [], [begin], value_ints=[start]),
                node("Constant", [], [end], value_ints=[start + len(part)]),
                node("Slice", [array, begin, end], [some]),
            ]
        if len(part) == 1:
            nodes.append(node("Flatten", [some], part, axis=-1))
            continue
        nodes.append(node("Flatten", [some], [flat], axis=-1))
        if body.rows is None:
            nodes.append(node("Constant", [], [count], value_ints=[len(part)]))
            nodes.append(node("Expand", ["B_1", count], [sizes]))
        else:
            nodes.append(node("Constant", [], [sizes], value_ints=[body.rows] * len(part)))
        nodes.append(node("Split", [flat, sizes], part, axis=0))
    return nodes


def of_any_rank(each: NodeProto) -> Nodes:
    """The node without Gemm, which takes only matrices."""
    if each.op_type != "Gemm":
        return [each]
    left, right, addend = each.input
    product = f"{each.output[0]}_product"
    return [node("MatMul", [left, right], [product]), node("Add", [product, addend], each.output)]
