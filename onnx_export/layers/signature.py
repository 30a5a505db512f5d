"""The inputs and outputs of the models of layers: `export` and `training_step` write them, and sessions check them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from onnx import TensorProto, helper

from blockcell.loss import Loss
from blockcell.optable import compute_dtype
from blockcell.optim import Optimizer

Shape = Sequence[int | str]
Shapes = Mapping[str, Shape]
Types = dict[str, tuple[int, Shape]]  # by names: ONNX's number of the elements' type, and the shape

NEW = "new_"  # in front of the name of an input that an output replaces


class Signature(NamedTuple):
    """The types of a model's inputs and outputs, by their names, in their order."""

    inputs: Types
    outputs: Types


class LayerArrays(NamedTuple):
    """The shapes of a layer's arrays, which have one type of elements; states and weights are by their names."""

    element_type: int
    x: Shape
    y: Shape
    states: Shapes
    weights: Shapes

    def types(self, shapes: Shapes) -> Types:
        return {name: (self.element_type, shape) for name, shape in shapes.items()}

    def first_states(self) -> Types:
        """Return the types of the states before the first step."""
        return self.types({f"{name}_prev": shape for name, shape in self.states.items()})

    def row_inputs(self, takes: Collection[str]) -> Types:
        """Return the types of those of lengths and reset that the model takes."""
        types: Types = {"lengths": (TensorProto.INT64, self.x[1:-1]), "reset": (TensorProto.BOOL, self.x[:-1])}
        return {name: types[name] for name in types if name in takes}


def layer_signature(arrays: LayerArrays, takes: Collection[str], train: bool) -> Signature:
    """Return the signature of a layer's model and, with `train`, of its gradients.

    `takes` has those of lengths, reset, state and d_state that are inputs.
    """
    x, first = arrays.types({"x": arrays.x}), arrays.first_states() if "state" in takes else {}
    inputs, outputs = x | arrays.row_inputs(takes) | first, arrays.types({"y": arrays.y, **arrays.states})
    if train:
        d_inputs = arrays.types({"y": arrays.y, **(arrays.states if "d_state" in takes else {})})
        weights = arrays.types(arrays.weights)
        inputs |= weights | {f"d_{name}": type_ for name, type_ in d_inputs.items()}
        outputs |= {f"d_{name}": type_ for name, type_ in (x | first | weights).items()}
    return Signature(inputs, outputs)


def step_signature(
    arrays: LayerArrays, takes: Collection[str], loss: Loss, optimizer: Optimizer, clips: bool
) -> Signature:
    """Return the signature of a step of a layer's training.

    `takes` has those of lengths, reset, mask and state that are inputs; `clips` says whether gradients are clipped.
    """
    dtype = helper.tensor_dtype_to_np_dtype(arrays.element_type)
    scalar: tuple[int, Shape] = helper.np_dtype_to_tensor_dtype(compute_dtype(dtype)), []
    entries, states = arrays.y[:-1], arrays.types(arrays.states) if "state" in takes else {}
    updated = arrays.types(arrays.weights) | step_memory(optimizer, arrays.weights, scalar[0])
    target = (TensorProto.INT64, entries) if loss.target == "classes" else (arrays.element_type, arrays.y)
    inputs: Types = {"x": (arrays.element_type, arrays.x)} | arrays.row_inputs(takes)
    inputs |= {"mask": (TensorProto.BOOL, entries)} if "mask" in takes else {}
    inputs |= {"target": target} | (arrays.first_states() if states else {}) | {"learning_rate": scalar}
    outputs: Types = {"loss": scalar} | ({"norm": scalar} if clips else {}) | arrays.types({"y": arrays.y}) | states
    return Signature(inputs | updated, outputs | {NEW + name: type_ for name, type_ in updated.items()})


def step_memory(optimizer: Optimizer, weights: Shapes, element_type: int) -> Types:
    """Return the types of what an optimizer keeps from step to step."""
    count: Types = {"step": (TensorProto.INT64, [])} if optimizer.counts_steps else {}
    slots = {f"{slot}.{name}": (element_type, shape) for name, shape in weights.items() for slot in optimizer.slots}
    return count | slots
