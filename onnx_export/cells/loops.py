"""Loops over the steps of a sequence: a Scan, a Loop, or all steps written out.

Nodes that need no other step run before or after the loop, for all steps at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from onnx import GraphProto, NodeProto, TensorProto, ValueInfoProto, helper

from ..nodes import Nodes, make_node, make_value_info, names_written, rename_values, select_needed

BOOLS = ("fresh", "h_inside")  # the arrays of bool that a step may read a row of; all others are of floats
SPLIT_MOST = 7  # outputs: with the input as many arrays as every WebGPU lets a shader have
CONCAT_MOST = 32  # inputs: onnxruntime captures no CUDA graph of a Concat with more


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
    """Whether a Split may have few outputs only, and a Concat few inputs."""
    distinct_outputs: bool
    """Whether each output is a copy that no node of the body reads, as tract demands of a Scan."""

    def renamed_nodes(self, rename: Callable[[str], str]) -> Nodes:
        """Return the nodes with new names for all values that differ between steps."""
        return rename_values(
            self.nodes, {name: rename(name) for name in {*self.carried, *self.scan_inputs, *names_written(self.nodes)}}
        )


def last_name(name: str) -> str:
    """Return the name of a carried value after the last step."""
    return f"{name}_last"


# ------------------------------------------------------------------------------------------------------ dividing a step
def names_with_time(nodes: Iterable[NodeProto], timed: Iterable[str]) -> set[str]:
    """Return the names of values that have a time axis if `timed` have one."""
    names = set(timed)
    for node in nodes:
        if node.op_type != "Shape" and names.intersection(node.input):
            names.update(node.output)
    return names


def divide_step(nodes: Nodes, carried: Mapping[str, str], names_after: Collection[str]) -> tuple[Nodes, Nodes, Nodes]:
    """Divide the nodes of a step into three lists: they can run before the loop, must run in it, can run after it."""
    nodes = select_needed(nodes, {*names_after, *carried.values()})
    waiting = set(carried)
    before, waiting_nodes = [], []
    for node in nodes:
        if waiting.isdisjoint(node.input):
            before.append(node)
        else:
            waiting.update(node.output)
            waiting_nodes.append(node)
    readers = {node.output[0] for node in waiting_nodes if not carried.keys().isdisjoint(node.input)}
    inside = select_needed(waiting_nodes, {*carried.values(), *readers})
    return before, inside, [node for node in waiting_nodes if node not in inside]


# ----------------------------------------------------------------------------------------------------- past seq_len_max
class StepMask:
    """Sets arrays to zero at padding steps, those from seq_len_max on; all other steps are called live, in graphs too.

    It does so by a Where, as NaN times zero is NaN. If all steps are known to be live, a result is another name of its
    array.
    """

    LENGTH: ClassVar = [
        make_node("Squeeze", ["T_1"], ["T"]),
        make_node("Equal", ["seq_len_max", "T"], ["all_live"]),
    ]
    CONDITIONS: ClassVar = [
        make_node("Greater", ["seq_len_max", "int_0"], ["any_live"]),
        make_node("Range", ["int_0", "T", "int_1"], ["steps"]),
        make_node("Less", ["steps", "seq_len_max"], ["live_steps"]),
        make_node("Unsqueeze", ["live_steps", "at_1_2"], ["live"]),
        make_node("Slice", ["live", "at_last", "at_minimum", "at_0", "at_last"], ["live_back"]),
    ]

    def __init__(self, all_live: bool) -> None:
        self.all_live = all_live
        self.aliases: dict[str, str] = {}

    def __call__(self, array: str, result: str, condition: str = "live") -> Nodes:
        """Return the nodes of ``result``, which is ``array`` where the condition holds, else zero."""
        if self.all_live:
            self.aliases[result] = array
            return []
        return [make_node("Where", [condition, array, "zero"], [result])]


# ---------------------------------------------------------------------------------------------------------- three loops
def _step_name(name: str) -> str:
    return f"{name}_t"


def _reversed_name(name: str) -> str:
    return f"{name}_back"


def _reverse_node(array: str, result: str) -> NodeProto:
    return make_node("Slice", [array, "at_last", "at_minimum", "at_0", "at_last"], [result])


def _with_reversal(body: LoopBody, mask: StepMask, loop_node: NodeProto) -> Nodes:
    """Return a Scan or Loop; if the last step runs first, with its arrays reversed before and after it.

    A Scan can run backwards by itself, but not in onnx.reference and tract.
    """
    if not body.reverse:
        return [loop_node]
    nodes = []
    for name in body.scan_inputs:
        nodes += [_reverse_node(name, f"{name}_turned"), *mask(f"{name}_turned", _reversed_name(name), "live_back")]
    nodes += rename_values(
        [loop_node], {name: _reversed_name(name) for name in [*body.scan_inputs, *body.scan_outputs]}
    )
    return [*nodes, *(_reverse_node(_reversed_name(name), name) for name in body.scan_outputs)]


def _step_graph(body: LoopBody, name: str, rows: Nodes, inputs: list[ValueInfoProto], more_nodes: Nodes) -> GraphProto:
    """Return the graph of one step. Each output has its own name, even if two of them are the same value."""
    inner = [*rows, *body.renamed_nodes(_step_name), *more_nodes]
    outputs = [make_value_info(name, TensorProto.BOOL, []) for node in more_nodes for name in node.output]
    for values, ending in ((body.carried.values(), "next"), (body.scan_outputs, "row")):
        for value in map(_step_name, values):
            output = value
            if body.distinct_outputs or value in {known_output.name for known_output in outputs}:
                output = f"{value}_{ending}"
                inner.append(make_node("Identity", [value], [output]))
            # Old onnxruntimes do not always find the rank.
            outputs.append(make_value_info(output, body.dtype, [None, None]))
    return helper.make_graph(inner, name, inputs, outputs)


def scan(body: LoopBody, mask: StepMask) -> Nodes:
    """Return the steps as one Scan."""
    inputs = [
        make_value_info(_step_name(name), TensorProto.BOOL if name in BOOLS else body.dtype, None)
        for name in [*body.carried, *body.scan_inputs]
    ]
    graph = _step_graph(body, "step", [], inputs, [])
    finals = [last_name(name) for name in body.carried.values()]
    scan_node = make_node(
        "Scan",
        [*body.carried, *body.scan_inputs],
        [*finals, *body.scan_outputs],
        body=graph,
        num_scan_inputs=len(body.scan_inputs),
    )
    return _with_reversal(body, mask, scan_node)


def loop(body: LoopBody, mask: StepMask) -> Nodes:
    """Return the steps as one Loop."""
    # Arrays of numbers: onnxruntime's Gather of bools on WebGPU, in 1.27, reads past the end of its indices.
    stored = {name: f"{name}_number" if name in BOOLS else name for name in body.scan_inputs}
    numbers, rows = [], [make_node("Gather", [name, "step"], [_step_name(name)]) for name in stored.values()]
    for name in BOOLS:
        if name in stored:
            numbers.append(make_node("Cast", [name], [stored[name]], to=body.dtype))
            rows.append(make_node("Cast", [_step_name(stored[name])], [_step_name(name)], to=TensorProto.BOOL))
    inputs = [
        make_value_info("step", TensorProto.INT64, []),
        make_value_info("go_on", TensorProto.BOOL, []),
        *(make_value_info(_step_name(name), body.dtype, None) for name in body.carried),
    ]
    graph = _step_graph(body, "step", rows, inputs, [make_node("Identity", ["go_on"], ["going_on"])])
    finals = [last_name(name) for name in body.carried.values()]
    loop_node = make_node("Loop", ["T", "true", *body.carried], [*finals, *body.scan_outputs], body=graph)
    return numbers + _with_reversal(replace(body, scan_inputs=[*stored.values()]), mask, loop_node)


def unroll(body: LoopBody, mask: StepMask, T: int) -> Nodes:
    """Return the nodes of all steps, one step after the other, on the arrays' rows [B, ...]."""
    order = [*range(T)[::-1]] if body.reverse else [*range(T)]
    before = dict(zip(order[1:], order, strict=False))

    def value_at(name: str, t: int) -> str:
        if name in body.carried:
            return value_at(body.carried[name], before[t]) if t in before else name
        return last_name(name) if name in body.carried.values() and t == order[-1] else f"{name}_{t}"

    nodes: Nodes = []
    for name in body.scan_inputs:
        array = name
        if body.reverse:
            array = f"{name}_live"
            nodes += mask(name, array)
        nodes += _cut_steps(array, [value_at(name, t) for t in range(T)], body)
    for t in order:
        nodes += body.renamed_nodes(lambda name, t=t: value_at(name, t))  # type: ignore[misc]
    for name in body.scan_outputs:
        flat, width, shape = (f"{name}_{word}" for word in "flat width shape".split())
        nodes += _join_steps([value_at(name, t) for t in range(T)], flat, body)
        if body.rows is None:
            nodes.append(make_node("Shape", [flat], [width], start=1, end=2))
            nodes.append(make_node("Concat", ["T_1", "B_1", width], [shape], axis=0))
        else:
            nodes.append(make_node("Constant", [], [shape], value_ints=[T, body.rows, -1]))
        nodes.append(make_node("Reshape", [flat, shape], [name], allowzero=1))
    return nodes


def _cut_steps(array: str, steps: list[str], body: LoopBody) -> Nodes:
    """Cut an array [T, B, ...] into steps [B, ...], slice by slice where one Split may not have all of them."""
    nodes = []
    limit = SPLIT_MOST if body.static else len(steps)
    for start in range(0, len(steps), limit):
        names, cut = steps[start : start + limit], array
        begin, end, flat, count, sizes = (f"{array}_{word}_{start}" for word in "begin end flat count sizes".split())
        if len(names) < len(steps):
            cut = f"{array}_some_{start}"
            nodes += [
                make_node("Constant", [], [begin], value_ints=[start]),
                make_node("Constant", [], [end], value_ints=[start + len(names)]),
                make_node("Slice", [array, begin, end], [cut]),
            ]
        if len(names) == 1:
            nodes.append(make_node("Flatten", [cut], names, axis=-1))
            continue
        nodes.append(make_node("Flatten", [cut], [flat], axis=-1))
        if body.rows is None:
            nodes.append(make_node("Constant", [], [count], value_ints=[len(names)]))
            nodes.append(make_node("Expand", ["B_1", count], [sizes]))
        else:
            nodes.append(make_node("Constant", [], [sizes], value_ints=[body.rows] * len(names)))
        nodes.append(make_node("Split", [flat, sizes], names, axis=0))
    return nodes


def _join_steps(steps: list[str], joined: str, body: LoopBody) -> Nodes:
    """Join steps [B, ...] to one array [T B, ...], in groups where one Concat may not have all of them."""
    nodes: Nodes = []
    while body.static and len(steps) > CONCAT_MOST:
        groups = {f"{joined}_{len(nodes) + k}": steps[k : k + CONCAT_MOST] for k in range(0, len(steps), CONCAT_MOST)}
        nodes += [make_node("Concat", group, [name], axis=0) for name, group in groups.items()]
        steps = [*groups]
    return [*nodes, make_node("Concat", steps, [joined], axis=0)]
