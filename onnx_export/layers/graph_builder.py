"""`GraphBuilder`: the nodes of an ONNX graph over the sequences of a batch.

T is the number of steps and B of batch rows; [T, B, ..] is the shape of an array with any further axes. A value is the
name that a node gives it. ``x``, ``lengths`` and ``reset`` are inputs of the graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import FunctionProto, TensorProto, ValueInfoProto, helper

from blockcell.optable import Array, compute_dtype

from ..nodes import DOMAIN, Nodes, constant, make_node


@dataclass
class GraphBuilder:
    """Collects the nodes of a graph. A node that is asked for twice is made once."""

    dtype: np.dtype[Any]
    """The dtype of inputs and outputs."""
    sizes: dict[str, int]
    """T and B, where they are fixed."""
    streaming: bool
    """Whether x is a single step, [B, I]."""
    lengths: bool
    """Whether the graph has the input ``lengths``, [B]: the steps of each row that count."""
    nodes: Nodes = field(default_factory=list)
    _values: dict[Any, str] = field(default_factory=dict)
    """The values of nodes, by operator, inputs and attributes."""
    _reversed: dict[str, str] = field(default_factory=dict)
    """Arrays and the same with reversed steps, each by the other."""

    @property
    def compute(self) -> np.dtype[Any]:
        """The dtype that is computed in."""
        return compute_dtype(self.dtype)

    def typed_value(self, name: str, element_type: int, shape: Sequence[int | str]) -> ValueInfoProto:
        """Return an input or output of the graph; `element_type` is ONNX's number of its dtype."""
        # onnxruntime 1.31 fails on a size that it knows to be 0: that one stays unknown.
        sizes = [self.sizes.get(size, size) if isinstance(size, str) else (size or None) for size in shape]
        return helper.make_tensor_value_info(name, element_type, sizes)

    # ---------------------------------------------------------------------------------------------- nodes and constants
    def add(self, op_type: str, *inputs: str, **attributes: Any) -> str:
        """Return the value of a node with one output, which is added unless there is the same already."""
        key = op_type, inputs, *attributes.items()
        if key not in self._values:
            name = f"{op_type}_{len(self.nodes)}"
            self.nodes.append(make_node(op_type, inputs, [name], name=name, **attributes))
            self._values[key] = name
        return self._values[key]

    def constant(self, array: Array) -> str:
        key = "Constant", array.dtype, array.shape, array.tobytes()
        if key not in self._values:
            name = f"Constant_{len(self.nodes)}"
            self.nodes.append(constant(name, array))
            self._values[key] = name
        return self._values[key]

    def ints(self, *numbers: int) -> str:
        """Return a constant vector of int64."""
        return self.constant(np.array(numbers, np.int64))

    def zero(self) -> str:
        return self.constant(np.zeros((), self.dtype))

    def concat(self, *arrays: str, axis: int = 0) -> str:
        return self.add("Concat", *arrays, axis=axis)

    def cast_to_compute(self, array: str) -> str:
        return array if self.dtype == self.compute else self.add("Cast", array, to=TensorProto.FLOAT)

    def cast_to_storage(self, array: str) -> str:
        return array if self.dtype == self.compute else self.add("Cast", array, to=TensorProto.FLOAT16)

    def call(self, function: FunctionProto, arguments: Mapping[str, str], name: str) -> dict[str, str]:
        """Add a call of a function with this name; return its results by the names of the function's outputs.

        `arguments` are values by the names of the function's inputs, and may be more than these.
        """
        results = {output: f"{name}.{output}" for output in function.output}
        inputs = [arguments[argument] for argument in function.input]
        self.nodes.append(make_node(function.name, inputs, [*results.values()], name=name, domain=DOMAIN))
        return results

    # --------------------------------------------------------------------------------------------------- steps and rows
    def size(self, letter: str) -> str:
        """Return T or B as a vector of one."""
        if letter in self.sizes:
            return self.ints(self.sizes[letter])
        axis = 0 if letter == "T" or self.streaming else 1
        return self.add("Shape", "x", start=axis, end=axis + 1)

    def indices(self, letter: str) -> str:
        """Return the vector 0, 1, ..., T - 1 or B - 1."""
        if letter in self.sizes:
            return self.constant(np.arange(self.sizes[letter]))
        zero, one = (self.constant(np.array(number, np.int64)) for number in (0, 1))
        return self.add("Range", zero, self.add("Squeeze", self.size(letter)), one)

    def step_indices(self) -> str:
        """Return the numbers of the steps as a column, [T, 1]."""
        if "T" in self.sizes:
            return self.constant(np.arange(self.sizes["T"])[:, None])
        return self.add("Unsqueeze", self.indices("T"), self.ints(1))

    def last_steps(self, lengths: str = "lengths") -> str:
        """Return the number of each row's last step, [B], -1 for a row without steps; [1] without lengths."""
        return self.add("Sub", lengths if self.lengths else self.size("T"), self.ints(1))

    def is_step(self, steps: str) -> str:
        """Return where each row has the step of this number, [T, B, 1]; [T, 1, 1] if all rows have the same number."""
        return self.add("Unsqueeze", self.add("Equal", self.step_indices(), steps), self.ints(2))

    def nonempty_rows(self) -> str:
        """Return which rows have a length of at least 1, [B, 1]."""
        return self.add("Unsqueeze", self.add("Greater", "lengths", self.ints(0)), self.ints(1))

    def zero_padding(self, array: str, lengths: str = "lengths") -> str:
        """Set the array [T, B, ..] to zero past the rows' lengths."""
        if not self.lengths:
            return array
        is_live = self.add("Unsqueeze", self.add("Less", self.step_indices(), lengths), self.ints(2))
        return self.add("Where", is_live, array, self.zero())

    def zero_empty_rows(self, array: str) -> str:
        """Set the array [B, ..] to zero in rows without steps."""
        return self.add("Where", self.nonempty_rows(), array, self.zero()) if self.lengths else array

    def gather_steps(self, array: str, steps: str) -> str:
        """Return the array [T, B, ..] at one or more steps of each row; rows with the step -1 get any values."""
        flat_array = self.add("Flatten", array, axis=2)
        flat_indices = self.add("Add", self.add("Mul", steps, self.size("B")), self.indices("B"))
        return self.add("Gather", flat_array, flat_indices, axis=0)

    def reverse_steps(self, array: str) -> str:
        """Return the array [T, B, ..] with each row's steps in reversed order.

        What is past a row's length stays there, because indices below zero count from the end.
        """
        if array not in self._reversed:
            if self.lengths:
                result = self.gather_steps(array, self.add("Sub", self.last_steps(), self.step_indices()))
            else:
                result = self.add("Slice", array, self.ints(-1), self.ints(-(2**31)), self.ints(0), self.ints(-1))
            self._reversed |= {array: result, result: array}
        return self._reversed[array]

    def reset_steps(self, reverse: bool) -> str:
        """Return before which steps the state is zero, [T, B, 1], in the order in which they run."""
        starts = self.add("Unsqueeze", "reset", self.ints(2))
        if not reverse:
            return starts
        # An episode that starts at a step hands no state to the step that runs after it, the one before it in time.
        # Numbers are reversed, because onnxruntime's Gather of bools on WebGPU, in 1.27, reads past its indices' end.
        starts = self.add("Cast", starts, to=helper.np_dtype_to_tensor_dtype(self.dtype))
        none = self.add("Expand", self.zero(), self.concat(self.ints(1), self.size("B"), self.ints(1)))
        others = self.add("Slice", self.reverse_steps(starts), self.ints(0), self.ints(-1), self.ints(0))
        return self.add("Cast", self.concat(none, others), to=TensorProto.BOOL)
