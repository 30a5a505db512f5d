"""Evaluation of a graph in plain numpy, from given values: calls, loops and lists of arrays, node by node.

In comes a place, and the frame that it is in: a body, and in a loop the number of the step. Out comes its value. Only
the nodes that it needs are evaluated, each once in each frame. What is not understood raises `UnknownValue`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ....optable import Array
from ...graphs import Node
from .array_slices import slice_index
from .graph_reader import Caller, GraphReader, Place, UnknownValue
from .node_functions import canonical, check_size, find_function
from .op_table import RANDOM, GraphOp, graph_op
from .while_loops import WhileLoops

_MOST_VALUES = 2**16  # besides four for each node
_MOST_ENTRIES = 2**22  # of all arrays together
_MOST_STEPS = 4096  # of a loop, or in a list
DEEPEST = 32  # frames within each other
_OTHER_NUMBERS = ("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum", "Conv2D", "MaxPool", "AvgPool",
                  "DepthwiseConv2dNative", "Conv3D", "LogSoftmax", "Gelu", "TopKV2", "ArgMax", "LRN", "L2Loss",
                  "FusedBatchNorm", "BatchNormWithGlobalNormalization")  # fmt: skip
"""Ops that compute other numbers, which need not be known."""


class Frame(NamedTuple):
    """One run of a body."""

    body: str
    outer: Frame | None = None
    """The frame that the body is called from."""
    caller: str = ""
    """The node that calls a function; for a loop of TensorFlow 1, the name of its frame."""
    step: int | None = None
    """The number of the step of a loop; None in no loop."""
    is_inline: bool = False
    """Whether it is a loop of TensorFlow 1, in the body that it is called from."""


class OtherNumbers(UnknownValue):
    """A value is computed by a node that gives other numbers than it takes."""


class TensorList(tuple[Array | None, ...]):
    """A TensorList or TensorArray; None is an entry that is not written yet."""


class _Missing(Exception):
    """A value needs other values first: the argument lists their frames and places."""


_DEAD = TensorList()
"""The value of a branch of TensorFlow 1 that does not run."""
Value = Array | TensorList


class GraphEvaluation:
    """The values of places, by frames, once some places have given values."""

    def __init__(
        self,
        reader: GraphReader,
        loops: WhileLoops,
        given: Mapping[Place, Callable[[Frame], Array]],
        read_source: Callable[[Place, Node], Array],
    ) -> None:
        """`given` has values by places; `read_source` reads variables and what is fed."""
        self._reader, self._loops, self._given, self._read_source = reader, loops, given, read_source
        self._values: dict[tuple[Frame, Place], Value | UnknownValue] = {}
        self._counts: dict[Frame, int] = {}
        self._values_left = _MOST_VALUES + 4 * sum(map(len, reader.bodies.values()))
        self._entries_left = _MOST_ENTRIES

    def array(self, frame: Frame, place: Place) -> Array:
        """Return the array at a place."""
        self._evaluate(frame, place)
        return self._array(frame, place)

    def _array(self, frame: Frame, place: Place) -> Array:
        value = self._get(frame, place)
        if isinstance(value, TensorList):
            raise UnknownValue(f"{place.name!r}, which is no array")
        return value

    def _evaluate(self, frame: Frame, place: Place) -> None:
        """Evaluate a place, and all that it needs first."""
        waiting = [(frame, place)]
        opened: set[tuple[Frame, Place]] = set()
        while waiting:
            key = waiting[-1]
            if key in self._values:
                waiting.pop()
                continue
            self._values_left -= 1
            if self._values_left < 0:
                raise UnknownValue(f"too many nodes before {place.name!r}")
            try:
                value = self._compute(*key)
                self._entries_left -= len(value) if isinstance(value, TensorList) else value.size
                if self._entries_left < 0:
                    raise UnknownValue(f"too many numbers before {key[1].name!r}")
                self._values[key] = value
            except _Missing as missing:
                [keys] = missing.args
                if key in opened and not opened.isdisjoint(keys):
                    self._values[key] = UnknownValue(f"{key[1].name!r}, which comes from itself")
                opened.add(key)
                waiting += keys
            except UnknownValue as unknown:
                self._values[key] = unknown

    def _get(self, frame: Frame, place: Place) -> Value:
        """Return a value that is evaluated; raise `_Missing` if it is not."""
        return self._get_all(frame, [place])[0]

    def _get_all(self, frame: Frame, places: Sequence[Place]) -> list[Value]:
        """Return values that are evaluated; raise `_Missing` if some are not."""
        missing = [(frame, place) for place in places if (frame, place) not in self._values]
        if missing:
            raise _Missing(missing)
        values = [self._values[frame, place] for place in places]
        known = [value for value in values if not isinstance(value, UnknownValue)]
        if len(known) < len(values) and not any(value is _DEAD for value in known):
            unknown = next(value for value in values if isinstance(value, UnknownValue))
            raise type(unknown)(str(unknown))
        return known

    # ----------------------------------------------------------------------------------------------------- single nodes
    def _compute(self, frame: Frame, place: Place) -> Value:
        """Compute a value from values that are known; raise `_Missing` if some are not."""
        if place in self._given:
            return self._given[place](frame)
        node = self._reader.node(place)
        if node is None:
            return self._argument(frame, place)
        op, inputs = graph_op(node), self._reader.inputs_at(place)
        if op.name in ("Enter", "Merge", "Switch", "Exit"):
            return self._control_flow(frame, place, node, inputs)
        called = self._reader.called_functions(node)
        if op.name == "While":
            return self._after_loop(frame, place, node, inputs, called)
        if called:
            name = called[0] if op.name != "If" or np.any(self._array(frame, inputs[0])) else called[-1]
            return self._in(Frame(name, frame, node.name), self._reader.function_result(name, place.output))
        if op.forwards or op.name in ("IdentityN", "LoopCond", "PlaceholderWithDefault"):
            return self._get(frame, inputs[place.output if op.name == "IdentityN" else 0])
        stored = self._reader.graph.constant(node)
        if stored is not None:
            if not stored.is_readable:
                raise UnknownValue(f"the node {node.name!r}, which is of {stored.dtype}")
            check_size(stored.shape)
            return canonical(stored.read())
        if op.variable or op.name == "Placeholder":
            return canonical(self._read_source(place, node))
        if op.name in _OTHER_NUMBERS:
            raise OtherNumbers(f"the node {node.name!r}, which is a {node.op}")
        if op.name == "ZerosLike" and isinstance(self._values.get((frame, inputs[0])), UnknownValue):
            return np.zeros(())  # of some shape, to which it broadcasts
        return self._apply(place, node, op, self._get_all(frame, inputs))

    def _apply(self, place: Place, node: Node, op: GraphOp, operands: list[Value]) -> Value:
        """Apply the function of a node."""
        if any(value is _DEAD for value in operands):
            return _DEAD
        if op.input_count not in (None, len(operands)):
            raise UnknownValue(f"the node {node.name!r}, which is a {node.op} of {len(operands)} inputs")
        function = find_function(node)
        array = operands[op.array_inputs][0] if op.view and function is None else None
        if isinstance(array, np.ndarray):
            return np.asarray(array[slice_index(self._reader, place, array.shape)])
        try:
            if op.tensor_list or op.name in _LIST_FUNCTIONS:
                return self._list_value(op, operands)
            if function is not None and not any(isinstance(value, TensorList) for value in operands):
                with np.errstate(all="ignore"):
                    results = function(self._reader.attrs(place), *operands)
                return canonical(np.asarray(results[place.output] if isinstance(results, tuple) else results))
        except UnknownValue as unknown:
            raise UnknownValue(f"the node {node.name!r}, which makes {unknown}") from None
        except (ArithmeticError, LookupError, TypeError, ValueError):
            shapes = " and ".join(str(np.shape(value)) for value in operands[:4] if not isinstance(value, TensorList))
            raise UnknownValue(f"the node {node.name!r}, which is a {node.op} of the shapes {shapes}") from None
        error = OtherNumbers if op.refusal not in ("", RANDOM) else UnknownValue
        raise error(f"the node {node.name!r}, which is a {node.op}")

    def _list_value(self, op: GraphOp, operands: list[Any]) -> Value:
        """Return a list of arrays, or what is read from one."""
        if op.name in _LIST_FUNCTIONS:
            return _LIST_FUNCTIONS[op.name](*operands)
        by_role = {role: operands[number] for role, number in op.slots.items()}
        indices = [int(k) for k in np.ravel(by_role["index"])] if "index" in by_role else None
        if op.tensor_list == "fill":
            rows = by_role["value"]
            return _written(TensorList(), dict(zip(indices or range(len(rows)), rows, strict=True)))
        array = by_role["array"]
        if not isinstance(array, TensorList):
            raise UnknownValue("something of what is no list")
        if op.tensor_list == "write" and indices:
            return _written(array, {indices[0]: by_role["value"]})
        numbers = range(len(array)) if indices is None else indices
        rows = [row for k in numbers if 0 <= k < len(array) and (row := array[k]) is not None]
        if not rows or len(rows) < len(numbers):
            raise UnknownValue("something of entries that a list does not have")
        check_size((sum(row.size for row in rows),))
        return rows[0] if op.tensor_list == "read" else np.stack(rows)

    # ----------------------------------------------------------------------------------------------- calls and branches
    def _in(self, frame: Frame, place: Place) -> Value:
        """Return a value in another frame."""
        outer, depth = frame, 0
        while outer.outer is not None:
            outer, depth = outer.outer, depth + 1
        if depth > DEEPEST:
            raise UnknownValue(f"{place.name!r}, in functions that call each other {depth} times")
        return self._get(frame, place)

    def _argument(self, frame: Frame, place: Place) -> Value:
        """Return what is passed for an argument of a function."""
        number = self._reader.argument_numbers[place.body][place.name]
        if frame.outer is None:
            return self._in(Frame(""), self._reader.captured(place))
        node = self._reader.bodies[frame.outer.body][frame.caller]
        if frame.step:
            body = self._reader.called_functions(node)[-1]
            return self._in(
                Frame(body, frame.outer, frame.caller, frame.step - 1), self._reader.function_result(body, number)
            )
        caller = Caller(frame.outer.body, node, graph_op(node).first_argument, "")
        return self._in(frame.outer, self._reader.passed_argument(caller, place))

    def _after_loop(
        self, frame: Frame, place: Place, node: Node, inputs: Sequence[Place], called: Sequence[str]
    ) -> Value:
        """Return an output of a While."""
        count = self._step_count(Frame(called[0], frame, node.name, 0), self._reader.function_result(called[0], 0))
        if count == 0:
            return self._get(frame, inputs[place.output])
        last = Frame(called[-1], frame, node.name, count - 1)
        return self._in(last, self._reader.function_result(called[-1], place.output))

    def _step_count(self, first: Frame, condition: Place) -> int:
        """Count the steps of a loop by its first frame: the condition holds before each of them."""
        for step in range(self._counts.get(first, 0), _MOST_STEPS):
            self._counts[first] = step
            holds = self._in(first._replace(step=step), condition)
            if isinstance(holds, TensorList) or not holds.any():
                return step
        raise UnknownValue(f"the loop {first.caller!r} of more than {_MOST_STEPS} steps")

    def count_steps(self, first: Frame, condition: Place) -> int:
        """Count the steps of a loop, whose condition is at a place in its first frame."""
        while True:
            try:
                return self._step_count(first, condition)
            except _Missing as missing:
                for key in missing.args[0]:
                    self._evaluate(*key)

    # ---------------------------------------------------------------------------- frames and branches of TensorFlow 1
    def _control_flow(self, frame: Frame, place: Place, node: Node, inputs: Sequence[Place]) -> Value:
        """Return the value of an Enter, Merge, Switch or Exit."""
        if node.op.endswith("Enter"):
            name = self._reader.attrs(place).get("frame_name")
            if not frame.is_inline or frame.outer is None or frame.caller != name:
                raise UnknownValue(f"the node {node.name!r}, which is in a loop")
            return self._in(frame.outer, inputs[0])
        if node.op.endswith("Exit"):
            return self._behind_frame(frame, inputs[0])
        if node.op.endswith("Switch"):
            if self._reader.op(self._reader.resolve_in_step(inputs[1])).name == "LoopCond":
                return self._get(frame, inputs[0])
            value, condition = self._get_all(frame, inputs)
            is_alive = not isinstance(condition, TensorList) and bool(condition.any()) == bool(place.output)
            return value if is_alive else _DEAD
        if place.output:
            raise UnknownValue(f"the number of the input that the node {node.name!r} merges")
        variable = self._loops.loop_variable(place)
        if variable is not None:
            if frame.step is None or not frame.is_inline:
                raise UnknownValue(f"the node {node.name!r}, which is in a loop")
            if frame.step:
                return self._in(frame._replace(step=frame.step - 1), variable.next)
            return self._in(frame.outer or frame, variable.initial)
        alive = [value for value in self._get_all(frame, inputs) if value is not _DEAD]
        return alive[0] if alive else _DEAD

    def _behind_frame(self, frame: Frame, place: Place) -> Value:
        """Return the last value of a loop variable of TensorFlow 1."""
        origin = self._reader.resolve_in_step(place)
        variable = self._loops.loop_variable(origin)
        if variable is None or self._reader.op(place).name != "Switch":
            raise UnknownValue(f"the node {place.name!r}, behind a loop that is not understood")
        first = self.first_frame(frame, variable.place)
        count = self._step_count(first, self._reader.inputs_at(place)[1])
        return self._in(first._replace(step=count), variable.place)

    def first_frame(self, outer: Frame, merge: Place) -> Frame:
        """Return the first frame of a loop of TensorFlow 1, by one of its variables."""
        names = [
            self._reader.attrs(place).get("frame_name")
            for place in self._reader.inputs_at(merge)
            if self._reader.op(place).name == "Enter"
        ]
        if len(names) != 1 or not isinstance(names[0], str):
            raise UnknownValue(f"the loop of the node {merge.name!r}")
        return Frame(outer.body, outer, names[0], 0, is_inline=True)


def _written(array: TensorList, changes: Mapping[int, Array]) -> TensorList:
    """Return a list with other entries, as long as they need."""
    length = max([len(array), *(k + 1 for k in changes)])
    if length > _MOST_STEPS or min(changes, default=0) < 0:
        raise UnknownValue(f"a list of {length} entries")
    entries = [*array, *[None] * (length - len(array))]
    for k, value in changes.items():
        entries[k] = value
    return TensorList(entries)


def _empty(length: Array) -> TensorList:
    count = int(length)
    if not 0 <= count <= _MOST_STEPS:
        raise UnknownValue(f"a list of {count} entries")
    return TensorList([None] * count)


_LIST_FUNCTIONS: dict[str, Callable[..., Value]] = {
    "TensorArrayV3": lambda size: _empty(size),
    "TensorListReserve": lambda shape, size: _empty(size),
    "EmptyTensorList": lambda shape, size: TensorList(),
    "TensorListPushBack": lambda array, value: _written(array, {len(array): value}),
    "TensorListLength": lambda array: np.array(len(array)),
    "TensorArraySizeV3": lambda handle, array: np.array(len(array)),
}
