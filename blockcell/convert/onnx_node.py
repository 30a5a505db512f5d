"""A layer from an LSTM, GRU or RNN node of ONNX's: its attributes and inputs, and what cannot be expressed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..activations import Activation
from ..activations import parts as parts_of
from ..layers import Bidirectional, Layer
from ..optable import Array
from .onnx_activations import read_activations
from .onnx_clip import refuse_clip
from .onnx_graph import FOLDED, QUANTIZED, Graph, is_quantized, is_recurrent
from .shared import KINDS, ORDERS, Cell, ConversionError, check_shapes, make_cell, read_arrays, reorder

_PLACES = {
    "LSTM": ("X", "W", "R", "B", "sequence_lens", "initial_h", "initial_c", "P"),
    "GRU": ("X", "W", "R", "B", "sequence_lens", "initial_h"),
}
_PLACES["RNN"] = _PLACES["GRU"]
_PLACES[QUANTIZED] = (*_PLACES["LSTM"], "W_scale", "W_zero_point", "R_scale", "R_zero_point")
_ATTRIBUTES = {
    "activation_alpha": "FLOATS",
    "activation_beta": "FLOATS",
    "activations": "STRINGS",
    "clip": "FLOAT",
    "direction": "STRING",
    "hidden_size": "INT",
    "input_forget": "INT",
    "layout": "INT",
    "linear_before_reset": "INT",
    "output_sequence": "INT",
}
_STATES = {"initial_h": "h", "initial_c": "cs"}
_ARGUMENTS = {"sequence_lens": "lengths"} | dict.fromkeys(_STATES, "state")  # of a layer's calls


class Remark(NamedTuple):
    """What calls of a layer must have, or how they differ from the node that it was made of."""

    node: str
    inputs: list[str]
    """Those from which the node has lengths and states."""
    arguments: set[str]
    """What these are in a call."""
    learned: list[str]
    """The states that are constants."""
    quantized: bool


def key_of(node: Any) -> str:
    """What a node is called: nodes need no names."""
    return node.name or next(filter(None, node.output), "")


def is_reset_after(node: Any) -> bool:
    """Whether a GRU node applies its reset gate after the product with the recurrent weights."""
    return any(attribute.name == "linear_before_reset" and attribute.i != 0 for attribute in node.attribute)


def from_graph_node(
    caller: str, graph: Graph, node: Any, remarks: list[Remark], ignore_clip: bool
) -> tuple[Layer, Any]:
    """The layer of a node in a graph, whose weights are constants there, and the state that it starts from."""
    values = {key: value for key in node.input if (value := graph.constant(key)) is not None}
    return from_node(caller, node, values, graph, remarks, ignore_clip)


def from_node(
    caller: str,
    source: Any,
    values: Mapping[str, Any],
    graph: Graph | None,
    remarks: list[Remark],
    ignore_clip: bool,
) -> tuple[Layer, Any]:
    """The layer of a node with the values that its inputs are known to have, and the state that it starts from.

    What is left to calls is a remark.
    """
    if not is_recurrent(source):
        raise ConversionError(
            f"{caller}: the node is a {source.domain}::{source.op_type}; expected an ONNX LSTM, GRU or RNN"
        )
    what, places = f"{caller}: {source.op_type} {source.name!r}", _PLACES[source.op_type]
    kind = "LSTM" if is_quantized(source) else source.op_type
    attributes = _read_attributes(what, source)
    direction = attributes["direction"].s.decode() if "direction" in attributes else "forward"
    if direction not in ("forward", "reverse", "bidirectional"):
        raise ValueError(f"{what} has direction={direction!r}; expected 'forward', 'reverse' or 'bidirectional'")
    directions = 2 if direction == "bidirectional" else 1
    coupled = "input_forget" in attributes and attributes["input_forget"].i != 0
    if coupled and kind != "LSTM":
        raise ConversionError(f"{what} has input_forget={attributes['input_forget'].i}, which only an LSTM has")
    if len(source.input) > len(places):
        raise ValueError(f"{what} has {len(source.input)} inputs; expected at most {len(places)}: {', '.join(places)}")
    given = {place: name for place, name in zip(places, source.input, strict=False) if name}
    weights = [place for place in places if place in given and place not in ("X", *_ARGUMENTS)]
    unknown = {k: place for k, place in enumerate(places) if place in weights and given[place] not in values}
    _refuse_computed(what, given, unknown, graph)
    needed = [place for place in places if place in ("W", "R") or place.endswith("scale")]
    if missing := [place for place in needed if place not in given]:
        raise ValueError(f"{what} has no {' and no '.join(missing)}")
    found = {place: values[given[place]] for place in weights}
    arrays = read_arrays(what, _dequantized(what, found) if is_quantized(source) else found)
    gates = next(gates for gates, name in KINDS.items() if name == kind)
    W, R = arrays["W"], arrays["R"]
    hidden = R.shape[-1] if R.ndim == 3 else 0
    if "hidden_size" in attributes and attributes["hidden_size"].i != hidden:
        raise ValueError(f"{what} has hidden_size={attributes['hidden_size'].i}, but its R has shape {R.shape}")
    columns = gates * hidden
    B = arrays.get("B", np.zeros((directions, 2 * columns), W.dtype))
    check_shapes(what, {"W": (W, (directions, columns, None)), "R": (R, (directions, columns, hidden))})
    check_shapes(what, {"B": (B, (directions, 2 * columns))})
    if "P" in arrays:
        check_shapes(what, {"P": (arrays["P"], (directions, 3 * hidden))})
    activations = read_activations(what, kind, attributes, directions, W.dtype)
    parts = [W, R, B, *([arrays["P"]] if "P" in arrays else [])]
    if "clip" in attributes and not ignore_clip:
        refuse_clip(what, source, attributes["clip"].f, parts, activations, coupled, graph)
    options: dict[str, Any] = {"reset_after": True} if kind == "GRU" and is_reset_after(source) else {}
    options |= {"coupled": coupled, "reverse": direction == "reverse"}
    cells = [cell_of(what, kind, [array[d] for array in parts], **options, **activations[d]) for d in range(directions)]
    batch_first = "layout" in attributes and attributes["layout"].i == 1
    constants = {
        place: _learned(what, place, given[place], values, graph, W, hidden, batch_first)
        for place in _STATES
        if place in given
    }
    states = {place: array for place, array in constants.items() if array is not None}
    left = [place for place in _left_to_calls(given, values, graph) if place not in states]
    if left or states or is_quantized(source):
        texts = [_described(place, given[place], places.index(place), graph) for place in left]
        learned = [_described(place, given[place], places.index(place), None) for place in states]
        arguments = {_ARGUMENTS[place] for place in left}
        remarks.append(Remark(what.removeprefix(f"{caller}: "), texts, arguments, learned, is_quantized(source)))
    firsts = [{_STATES[place]: array[d] for place, array in states.items()} for d in range(directions)]
    if directions == 1:
        return cells[0], firsts[0]
    return Bidirectional(*cells), firsts


def _read_attributes(what: str, node: Any) -> dict[str, Any]:
    attributes: dict[str, Any] = {}
    for attribute in node.attribute:
        kind = _ATTRIBUTES.get(attribute.name)
        if kind is None:
            raise ConversionError(f"{what} has the attribute {attribute.name!r}, which ONNX does not know")
        if attribute.type != getattr(attribute, kind) or attribute.ref_attr_name or attribute.name in attributes:
            raise ValueError(f"{what} has the attribute {attribute.name} twice or not as {kind}, as ONNX has it")
        attributes[attribute.name] = attribute
    return attributes


def cell_of(what: str, kind: str, arrays: Sequence[Array], *, coupled: bool = False, **options: Any) -> Cell:
    """A cell of one direction's W, R, B and perhaps P."""
    W, R, B, *P = arrays
    Wb, Rb = np.split(B, 2)
    if coupled:
        Wb, Rb, W, R = (_without_forget(array) for array in (Wb, Rb, W, R))
        Wb[: len(Wb) // 3] += forget_shift(what, options.get("recurrent_activation", "sigmoid"))
        P = [np.concatenate([-array[: len(array) // 3], array[len(array) // 3 : -len(array) // 3]]) for array in P]
        return make_cell("ONNX coupled LSTM", W.T, R.T, Wb, Rb, peepholes=P[0] if P else None, **options)
    peepholes = reorder(P[0], ORDERS["ONNX peepholes"], ORDERS["peepholes"]) if P else None
    return make_cell(f"ONNX {kind}", W.T, R.T, Wb, Rb, peepholes=peepholes, **options)


def _without_forget(array: Array) -> Array:
    """Of the rows of i, o, f and c those of f = 1 - i, which are those of i negated; of o; and of c."""
    i, o, _, c = np.split(array, 4)
    return np.concatenate([-i, o, c])


def with_forget(array: Array) -> Array:
    """The reverse; the rows of f are zero."""
    f, o, c = np.split(array, 3)
    return np.concatenate([-f, o, np.zeros_like(f), c])


def forget_shift(what: str, activation: Activation) -> float:
    """What is added to the negated i, so that its activation is 1 less that of i."""
    name, values = parts_of(activation)
    if name == "sigmoid":
        return 0.0
    if name == "hard_sigmoid" and values[0] != 0:  # 1 - (scale z + shift) = scale (-z + (1 - 2 shift) / scale) + shift
        return (1 - 2 * values[1]) / values[0]
    raise ConversionError(
        f"{what} has input_forget=1 and the activation {name!r} for its gates: f = 1 - i then has another form than i;"
        f" expected sigmoid or hard_sigmoid"
    )


def _described(place: str, name: str, k: int, graph: Graph | None) -> str:
    """An input of a node, and what it comes from."""
    origins = graph.origins(name, ())[1] if graph is not None else []
    source = "" if name in origins or not origins else f", of {' and '.join(map(repr, origins[:3]))}"
    return f"{place} {name!r} (input[{k}]{source})"


def _learned(
    what: str, place: str, name: str, values: Mapping[str, Any], graph: Graph | None, W: Array, hidden: int,
    batch_first: bool,
) -> Array | None:  # fmt: skip
    """An initial state [D,B,H] that is constant and not zero, or None. It has one row if all rows are equal."""
    if name in values:
        array = read_arrays(what, {"W": W[:0], place: values[name]})[place]
        if not np.any(array):
            return None
        form = (None, len(W), hidden) if batch_first else (len(W), None, hidden)
        check_shapes(what, {place: (array, form)}, "B")
        tried = [array]
    elif graph is not None:  # perhaps it has as many rows as the batch
        tried = [found for size in (2, 3) if (found := graph.constant(name, size)) is not None]
        if len(tried) < 2 or any(array.ndim != 3 or array.dtype != W.dtype for array in tried):
            return None
    else:
        return None
    arrays = [array.swapaxes(0, 1) if batch_first else array for array in tried]
    if any(array.size == 0 or array.shape[::2] != (len(W), hidden) for array in arrays):
        return None
    row = arrays[0][:, :1]
    if all(np.all(array == row) for array in arrays):
        return row if np.any(row) else None
    return arrays[0] if all(np.array_equal(array, arrays[0]) for array in arrays) else None


def _left_to_calls(given: Mapping[str, str], values: Mapping[str, Any], graph: Graph | None) -> list[str]:
    """The lengths and states that are not simply arguments of the model, nor zero: a layer gets them at each call."""
    left = []
    for place in (place for place in _ARGUMENTS if place in given):
        name, constant = given[place], values.get(given[place])
        if constant is not None:
            is_left = place == "sequence_lens" or bool(np.any(np.asarray(constant)))
        else:
            is_zero = graph is not None and place != "sequence_lens" and graph.is_zero(name)
            is_left = graph is not None and not graph.is_argument(name) and not is_zero
        left += [place] if is_left else []
    return left


def _refuse_computed(what: str, given: Mapping[str, str], places: dict[int, str], graph: Graph | None) -> None:
    """Refuse weights that are not known, by their positions among the inputs."""
    if not places:
        return
    which = " and ".join(f"{place} {given[place]!r} (input[{k}])" for k, place in places.items())
    plural = "are" if len(places) > 1 else "is"
    if graph is None:
        arrays = ", ".join(f"{given[place]!r}: ..." for place in places.values())
        raise ConversionError(
            f"{what}: its {which} {plural} not among the initializers; expected"
            f" convert.from_onnx(node, {{{arrays}, ...}})"
        )
    inputs = {each for place in places.values() for each in graph.origins(given[place], ())[1]} & graph.inputs
    if inputs:
        raise ConversionError(
            f"{what}: its {which} {plural} given to the model with each call, as"
            f" {' and '.join(map(repr, sorted(inputs)))}; expected constants. If you have the arrays, convert the node:"
            f" convert.from_onnx(node, arrays)"
        )
    raise ConversionError(
        f"{what}: its {which} {plural} not made of constants by {', '.join(sorted(FOLDED))} alone. If all of it is"
        f" constant, onnxruntime computes it: options = onnxruntime.SessionOptions();"
        f' options.optimized_model_filepath = "folded.onnx"; onnxruntime.InferenceSession("model.onnx", options)'
    )


def _dequantized(what: str, given: Mapping[str, Any]) -> dict[str, Array]:
    """The weights of a DynamicQuantizeLSTM as those of an LSTM."""
    arrays = {place: np.asarray(value) for place, value in given.items()}
    for name in ("W", "R"):
        ends = {end: arrays.pop(name + end) for end in ("", "_scale", "_zero_point") if name + end in arrays}
        arrays[name] = dequantize(what, name, ends, transposed=True)
    return arrays


def dequantize(what: str, name: str, arrays: Mapping[str, Array], *, transposed: bool) -> Array:
    """The weight that onnxruntime's integers stand for.

    `arrays` has these as "", their "_scale" and perhaps their "_zero_point": those of a DynamicQuantizeLSTM
    [D,I,4H], which an LSTM has `transposed`, as [D,4H,I], with one scale for each direction or column; or those of a
    matrix [I,H], with one scale for all or for each column.
    """
    whole, form = arrays[""], "[D,.,4H]" if transposed else "[I,H]"
    if whole.ndim != (3 if transposed else 2) or whole.dtype not in (np.int8, np.uint8):
        raise ValueError(
            f"{what}: {name} is of dtype {whole.dtype} and shape {whole.shape}; expected int8 or uint8, {form}"
        )
    if "_scale" not in arrays:
        raise ValueError(f"{what}: there is no {name}_scale")
    allowed = (whole.shape[:1], (whole.shape[0], whole.shape[2])) if transposed else ((), (1,), whole.shape[1:])
    scale, zero = arrays["_scale"], arrays.get("_zero_point", np.zeros(arrays["_scale"].shape, whole.dtype))
    for part, array in (("scale", scale), ("zero_point", zero)):
        if array.shape not in allowed:
            raise ValueError(
                f"{what}: {name}_{part} has shape {array.shape}; expected {' or '.join(map(str, allowed))}"
            )
    if transposed:
        scale, zero = (array.reshape(len(array), 1, -1) for array in (scale, zero))
    found = ((whole.astype(np.int32) - zero) * scale).astype(scale.dtype)
    return found.swapaxes(1, 2) if transposed else found
