"""Conversion of one LSTM, GRU or RNN node of ONNX: its attributes, weights and states, and what is refused."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..activations import Activation
from ..activations import parts as parts_of
from ..gates import ORDERS, reorder
from ..layers import Bidirectional, Layer
from ..optable import Array
from .onnx_activations import read_activations
from .onnx_graph import CALLER, FOLDED, OnnxGraph, integer_attribute, is_recurrent, schema_of
from .onnx_run import trial_of
from .shared import GATE_COUNTS, ConversionError, RecurrentCell, check_shapes, make_cell, read_arrays

_STATES = {"initial_h": "h", "initial_c": "cs"}
_ARGUMENTS = {"sequence_lens": "lengths"} | dict.fromkeys(_STATES, "state")  # of a layer's calls


class Remarks(NamedTuple):
    """What calls of the layers must have that were made of nodes."""

    calls: list[str]
    """Nodes and the inputs from which they have lengths and states."""
    arguments: set[str]
    """The arguments of calls that have these."""
    constants: list[str]
    """Nodes and their initial states that are constants."""


class _Node(NamedTuple):
    """A recurrent node, and what is known of its inputs."""

    label: str
    """The caller and the node, for messages."""
    proto: Any
    attributes: Mapping[str, Any]
    names: Mapping[str, str]
    """The names of the inputs that the node has, by their roles."""
    values: Mapping[str, Any]
    """The values of inputs that are known, by name."""
    graph: OnnxGraph

    @property
    def kind(self) -> str:
        return str(self.proto.op_type)

    @property
    def direction(self) -> str:
        return self.attributes["direction"].s.decode() if "direction" in self.attributes else "forward"

    @property
    def directions(self) -> int:
        return 2 if self.direction == "bidirectional" else 1

    def describe(self, role: str, source: str = "") -> str:
        """Describe an input for messages."""
        return f"{role} {self.names[role]!r} (input[{_roles(self.kind).index(role)}]{source})"


def from_node(graph: OnnxGraph, source: Any, remarks: Remarks, ignore_clip: bool) -> tuple[Layer, Any]:
    """Convert a node of a graph, whose weights are constants there; return the layer and its initial state.

    Add a remark of what calls have to bring along.
    """
    node = _read_node(graph, source)
    weights = _read_weights(node)
    W, coupled = weights[0], integer_attribute(source, "input_forget") != 0
    activations = read_activations(node.label, node.kind, node.attributes, node.directions, W.dtype)
    clip = node.attributes["clip"].f if "clip" in node.attributes and not ignore_clip else np.inf
    if not clip >= float(np.finfo(np.float32).max):
        raise ConversionError(
            f"{node.label} has clip={clip:g}, which limits what goes into the activations; the cell_clip of an LSTM"
            f" here limits the cell state. If your inputs never reach the limit, pass ignore_clip=True"
        )
    options: dict[str, Any] = {"coupled": coupled, "reverse": node.direction == "reverse"}
    if node.kind == "GRU" and integer_attribute(source, "linear_before_reset") != 0:
        options["reset_after"] = True
    cells = [
        make_node_cell(node.label, node.kind, [array[d] for array in weights], **options, **activations[d])
        for d in range(node.directions)
    ]
    hidden = weights[1].shape[-1]
    states = {
        role: array
        for role in _STATES
        if role in node.names and (array := _constant_state(node, role, W, hidden)) is not None
    }
    _add_remarks(remarks, node, states)
    initial_states = [{_STATES[role]: array[d] for role, array in states.items()} for d in range(node.directions)]
    return (cells[0], initial_states[0]) if node.directions == 1 else (Bidirectional(*cells), initial_states)


def _read_node(graph: OnnxGraph, source: Any) -> _Node:
    """Read the attributes of a node and the names of its inputs."""
    if not is_recurrent(source):
        raise ConversionError(
            f"{CALLER}: the node is a {source.domain}::{source.op_type}; expected an ONNX LSTM, GRU or RNN"
        )
    label, roles = f"{CALLER}: {source.op_type} {source.name!r}", _roles(source.op_type)
    values = {key: value for key in source.input if (value := graph.constant(key)) is not None}
    names = {role: name for role, name in zip(roles, source.input, strict=False) if name}
    node = _Node(label, source, _read_attributes(label, source), names, values, graph)
    if node.direction not in ("forward", "reverse", "bidirectional"):
        expected = "expected 'forward', 'reverse' or 'bidirectional'"
        raise ValueError(f"{label} has direction={node.direction!r}; {expected}")
    if (layout := integer_attribute(source, "layout")) != 0:
        raise ConversionError(
            f"{label} has layout={layout}, the batch first, which onnxruntime does not compute either;"
            f" expected 0, and a Transpose in front of its X and behind its results"
        )
    if len(source.input) > len(roles):
        raise ValueError(f"{label} has {len(source.input)} inputs; expected at most {len(roles)}: {', '.join(roles)}")
    return node


def _roles(kind: str) -> list[str]:
    """Return ONNX's own names of a node's inputs: X, W, R, B, sequence_lens, initial_h and, of an LSTM, two more."""
    return [str(described.name) for described in schema_of(kind).inputs]


def _read_attributes(label: str, node: Any) -> dict[str, Any]:
    """Return the attributes of a node by name, each of ONNX's type."""
    kinds = {name: described.type.name for name, described in schema_of(node.op_type).attributes.items()}
    attributes: dict[str, Any] = {}
    for attribute in node.attribute:
        if (kind := kinds.get(attribute.name)) is None:
            raise ConversionError(f"{label} has the attribute {attribute.name!r}, which ONNX does not know of its kind")
        if attribute.type != getattr(attribute, kind) or attribute.ref_attr_name or attribute.name in attributes:
            raise ValueError(f"{label} has the attribute {attribute.name} twice or not as {kind}, as ONNX has it")
        attributes[attribute.name] = attribute
    return attributes


def _read_weights(node: _Node) -> list[Array]:
    """Return W [D,.,I], R [D,.,H], B [D,.] and, if the node has peepholes, P [D,3H]."""
    label, roles = node.label, _roles(node.kind)
    roles_of_weights = [role for role in roles if role in node.names and role not in ("X", *_ARGUMENTS)]
    _refuse_computed(node, [role for role in roles_of_weights if node.names[role] not in node.values])
    if missing := [role for role in ("W", "R") if role not in node.names]:
        raise ValueError(f"{label} has no {' and no '.join(missing)}")
    arrays = read_arrays(label, {role: node.values[node.names[role]] for role in roles_of_weights})
    W, R = arrays["W"], arrays["R"]
    hidden = R.shape[-1] if R.ndim == 3 else 0
    if (hidden_size := integer_attribute(node.proto, "hidden_size", hidden)) != hidden:
        raise ValueError(f"{label} has hidden_size={hidden_size}, but its R has shape {R.shape}")
    directions, columns = node.directions, GATE_COUNTS[node.kind] * hidden
    arrays.setdefault("B", np.zeros((directions, 2 * columns), W.dtype))
    shapes = {
        "W": (directions, columns, None),
        "R": (directions, columns, hidden),
        "B": (directions, 2 * columns),
        "P": (directions, 3 * hidden),
    }
    check_shapes(label, {role: (arrays[role], shape) for role, shape in shapes.items() if role in arrays})
    return [arrays[role] for role in shapes if role in arrays]


def _add_remarks(remarks: Remarks, node: _Node, states: Collection[str]) -> None:
    """Say what calls have to bring along, beside the states that are constants."""
    name = node.label.removeprefix(f"{CALLER}: ")
    roles = [role for role in _roles_left_to_calls(node) if role not in states]
    remarks.arguments.update(_ARGUMENTS[role] for role in roles)
    if roles:
        remarks.calls.append(f"{name} has {' and '.join(_describe_with_origins(node, role) for role in roles)}")
    if states:
        remarks.constants.append(f"{name} has {' and '.join(map(node.describe, states))}")


def make_node_cell(
    label: str, kind: str, arrays: Sequence[Array], *, coupled: bool = False, **options: Any
) -> RecurrentCell:
    """Make a cell of one direction's W, R, B and perhaps P."""
    W, R, B, *P = arrays
    Wb, Rb = np.split(B, 2)
    if coupled:
        Wb, Rb, W, R = (_without_forget(array) for array in (Wb, Rb, W, R))
        Wb[: len(Wb) // 3] += forget_shift(label, options.get("recurrent_activation", "sigmoid"))
        P = [np.concatenate([-array[: len(array) // 3], array[len(array) // 3 : -len(array) // 3]]) for array in P]
        return make_cell("ONNX coupled LSTM", W.T, R.T, Wb, Rb, peepholes=P[0] if P else None, **options)
    peepholes = reorder(P[0], ORDERS["ONNX peepholes"], ORDERS["peepholes"]) if P else None
    return make_cell(f"ONNX {kind}", W.T, R.T, Wb, Rb, peepholes=peepholes, **options)


def _without_forget(array: Array) -> Array:
    """Return the rows of f = 1 - i, which are those of i negated, of o and of c, from those of i, o, f and c."""
    i, o, _, c = np.split(array, 4)
    return np.concatenate([-i, o, c])


def with_forget(array: Array) -> Array:
    """Undo `_without_forget`; the rows of f are zero."""
    f, o, c = np.split(array, 3)
    return np.concatenate([-f, o, np.zeros_like(f), c])


def forget_shift(label: str, activation: Activation) -> float:
    """Return what to add to the negated input of i, so that its activation is 1 - i."""
    name, values = parts_of(activation)
    if name == "sigmoid":
        return 0.0
    if name == "hard_sigmoid" and values[0] != 0:  # 1 - (scale z + shift) = scale (-z + (1 - 2 shift) / scale) + shift
        return (1 - 2 * values[1]) / values[0]
    raise ConversionError(
        f"{label} has input_forget=1 and the activation {name!r} for its gates: f = 1 - i then has another form than i;"
        f" expected sigmoid or hard_sigmoid"
    )


def _describe_with_origins(node: _Node, role: str) -> str:
    """Describe an input of a node for messages, and what it comes from."""
    name = node.names[role]
    origins = node.graph.origins(name, ())[1]
    return node.describe(role, "" if name in origins or not origins else f", of {' and '.join(map(repr, origins[:3]))}")


def _constant_state(node: _Node, role: str, W: Array, hidden: int) -> Array | None:
    """Return an initial state [D,B,H] that is constant and not zero, of one row if all are equal; None for others."""
    name = node.names[role]
    if name in node.values:
        value = node.values[name]
        if isinstance(value, np.ndarray) and not np.any(value):
            return None
        array = read_arrays(node.label, {"W": W[:0], role: value})[role]
        check_shapes(node.label, {role: (array, (len(W), None, hidden))}, "B")
        states = [array]
    else:  # perhaps it has as many rows as the batch
        states = trial_of(node.graph).fixed_values(name)
        if any(state.ndim != 3 or state.dtype != W.dtype for state in states):
            return None
    if not states or any(state.size == 0 or state.shape[::2] != (len(W), hidden) for state in states):
        return None
    row = states[0][:, :1]
    if all(np.all(state == row) for state in states):
        return row if np.any(row) else None
    return states[0] if all(np.array_equal(state, states[0]) for state in states) else None


def _roles_left_to_calls(node: _Node) -> list[str]:
    """Return the lengths and states that are neither arguments of the model nor zero: each call brings them along."""
    roles = []
    for role in (role for role in _ARGUMENTS if role in node.names):
        name, graph, is_lengths = node.names[role], node.graph, role == "sequence_lens"
        constant = node.values.get(name)
        if constant is not None:
            is_left = is_lengths or bool(np.any(np.asarray(constant)))
        else:
            is_left = not graph.is_argument(name) and (is_lengths or not trial_of(graph).is_zero(name))
        roles += [role] if is_left else []
    return roles


def _refuse_computed(node: _Node, roles: list[str]) -> None:
    """Refuse weights whose values are not known, by their roles."""
    if not roles:
        return
    label, names = node.label, [node.names[role] for role in roles]
    inputs = " and ".join(map(node.describe, roles))
    plural = "are" if len(roles) > 1 else "is"
    arrays = ", ".join(f"{name!r}: ..." for name in names)
    raise ConversionError(
        f"{label}: its {inputs} {plural} neither among the initializers nor made of constants by"
        f" {', '.join(sorted(FOLDED))} alone. If you have the arrays: convert.from_onnx(node, {{{arrays}, ...}}). If"
        f" all of it is constant, onnxruntime computes it: options = onnxruntime.SessionOptions();"
        f' options.optimized_model_filepath = "folded.onnx"; onnxruntime.InferenceSession("model.onnx", options)'
    )
