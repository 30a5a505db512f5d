"""Weights from and to ONNX's LSTM and GRU nodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..layers import GRU, LSTM, Bidirectional, Layer, Stack
from ..optable import Array
from .shared import (
    ORDERS,
    Cell,
    ConversionError,
    cells_of,
    check_shapes,
    clips,
    has_peepholes,
    make_cell,
    read_arrays,
    reorder,
    split_cell,
)

if TYPE_CHECKING:
    import onnx


def from_onnx(source: Any, initializers: Mapping[str, Any] | None = None, *, name: str | None = None) -> Layer:
    """A layer with the weights of an ONNX LSTM or GRU node.

    .. code-block:: python

        layer = convert.from_onnx(onnx.load("model.onnx"), name="lstm_1")

    Parameters
    ----------
    source : onnx.ModelProto or onnx.NodeProto
        A model, or a node and its `initializers`.
    initializers : mapping of str to array_like, optional
        The values of a node's inputs W, R, B and P under the names that they have in the node.
    name : str, optional
        Name of the node in a model, or of one of its outputs. Needed if the model has more than one LSTM or GRU node.

    Returns
    -------
    LSTM, GRU or Bidirectional
        X, sequence_lens, initial_h and initial_c become arguments of its calls: x, ``lengths=`` and ``state=``. ONNX's
        bidirectional Y is [T,2,B,H]; y here is [T,B,2H].

    Raises
    ------
    TypeError
        The source is neither a model nor a node, or weights have a dtype other than float32, float64 and float16.
    ConversionError
        ``clip``, ``input_forget=1``, ``linear_before_reset=1``, ``layout=1``, other activations than the default ones,
        weights that other nodes compute, and lengths or initial states that are constant or
        that other nodes compute, unless the states are zero.
    ValueError
        The node is not found, or its inputs, attributes or shapes are not as ONNX specifies them.
    """
    caller = "from_onnx"
    graph = getattr(source, "graph", None)
    if graph is not None:
        if initializers is not None:
            raise TypeError(f"{caller}: initializers belong to a node; a model has its own")
        source, initializers = _find(caller, graph, name)
    elif not hasattr(source, "op_type"):
        what = "expected an onnx.ModelProto or an onnx.NodeProto"
        raise TypeError(f"{caller}: the source is of type {type(source).__name__}; {what}")
    kind = source.op_type
    if kind not in ("LSTM", "GRU") or source.domain not in ("", "ai.onnx"):
        raise ConversionError(f"{caller}: the node is a {source.domain}::{kind}; expected an ONNX LSTM or GRU")
    what = f"{caller}: {kind} {source.name!r}"
    attributes = _read_attributes(what, source)
    direction = attributes["direction"].s.decode() if "direction" in attributes else "forward"
    directions = 2 if direction == "bidirectional" else 1
    _refuse(what, kind, attributes, direction)
    reset_after = "linear_before_reset" in attributes and attributes["linear_before_reset"].i != 0
    places = ("X", "W", "R", "B", "sequence_lens", "initial_h", "initial_c", "P")[: 8 if kind == "LSTM" else 6]
    if len(source.input) > len(places):
        raise ValueError(f"{what} has {len(source.input)} inputs; expected at most {len(places)}: {', '.join(places)}")
    given = {place: name for place, name in zip(places, source.input, strict=False) if name}
    values = initializers or {}
    _check_states(what, given, values, graph)
    for place in ("W", "R", "B", "P"):
        if place in given and given[place] not in values:
            raise ConversionError(
                f"{what}: its {place}, {given[place]!r}, is not among the initializers; if nodes compute it, fold"
                f" constants first, as onnxruntime does when it saves an optimized model"
            )
    if missing := [place for place in ("W", "R") if place not in given]:
        raise ValueError(f"{what} has no {' and no '.join(missing)}")
    arrays = read_arrays(what, {place: values[given[place]] for place in ("W", "R", "B", "P") if place in given})
    gates = 4 if kind == "LSTM" else 3
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
    cells = []
    for d in range(directions):
        peepholes = arrays["P"][d] if "P" in arrays else None
        parts = W[d].T, R[d].T, B[d, :columns], B[d, columns:], peepholes
        cells.append(make_cell(f"ONNX {kind}", *parts, reset_after=reset_after, reverse=direction == "reverse"))
    return cells[0] if directions == 1 else Bidirectional(*cells)


def to_onnx(layer: Layer, *, name: str = "rnn") -> tuple[onnx.NodeProto, dict[str, Array]]:
    """An ONNX LSTM or GRU node with the layer's weights.

    .. code-block:: python

        node, initializers = convert.to_onnx(layer)
        graph = onnx.helper.make_graph(
            [node], "g", [x_info], [y_info],
            initializer=[onnx.numpy_helper.from_array(array, name) for name, array in initializers.items()],
        )

    Parameters
    ----------
    layer : LSTM, GRU or Bidirectional
        Both layers of a `Bidirectional` must be of the same kind.
    name : str
        Name of the node. The names of its inputs and outputs begin with it: ``rnn_X``, ``rnn_W``, ..., ``rnn_Y``,
        ``rnn_Y_h``, ``rnn_Y_c``.

    Returns
    -------
    node : onnx.NodeProto
        It starts from zero states. To feed other ones, give names to ``node.input[5]`` and ``[6]``.
    initializers : dict of str to ndarray
        forget_bias is added into the bias.

    Raises
    ------
    ConversionError
        An LSTM clips its cell state; a stack; an LSTM beside a GRU.
    """
    caller = "to_onnx"
    if isinstance(layer, Stack):
        raise ConversionError(
            f"{caller}: the layer is a Stack, and an ONNX node is one layer. Convert layer.layers one by one, and put a"
            f" Squeeze, or a Transpose and a Reshape, between them"
        )
    cells = cells_of(caller, layer)
    if len({type(cell) for cell in cells}) > 1:
        raise ConversionError(f"{caller}: the layer has an LSTM and a GRU; an ONNX node is one or the other")
    resets = {cell.reset_after for cell in cells if isinstance(cell, GRU)}
    if len(resets) > 1:
        raise ConversionError(
            f"{caller}: one GRU has reset_after=True and the other has not; an ONNX node has one linear_before_reset"
        )
    for cell in cells:
        if isinstance(cell, LSTM) and clips(cell):
            raise ConversionError(
                f"{caller}: the LSTM clips its cell state at {cell.cell_clip:g}; the ONNX attribute clip limits what"
                f" goes into the gates, which is something else. Build the graph of a BlockLSTM instead"
            )
    from onnx import helper

    kind = type(cells[0]).__name__
    parts = [split_cell(cell, f"ONNX {kind}") for cell in cells]
    arrays = {
        "W": np.stack([kernel.T for kernel, *_ in parts]),
        "R": np.stack([recurrent.T for _, recurrent, *_ in parts]),
        "B": np.stack([np.concatenate(biases) for _, _, *biases in parts]),
    }
    if any(has_peepholes(cell) for cell in cells):
        arrays["P"] = np.stack([_peepholes(cell) for cell in cells])
    places = ("X", "W", "R", "B", "", "", "", "P") if "P" in arrays else ("X", "W", "R", "B")
    node = helper.make_node(
        kind,
        [place and f"{name}_{place}" for place in places],
        [f"{name}_{place}" for place in ("Y", "Y_h", "Y_c")[: 3 if kind == "LSTM" else 2]],
        name=name,
        hidden_size=cells[0].hidden_size,
        direction="bidirectional" if len(cells) == 2 else "reverse" if cells[0].reverse else "forward",
    )
    if resets:
        node.attribute.append(helper.make_attribute("linear_before_reset", int(resets.pop())))
    return node, {f"{name}_{place}": np.ascontiguousarray(array) for place, array in arrays.items()}


def _find(caller: str, graph: Any, name: str | None) -> tuple[Any, dict[str, Array]]:
    """The node of that name in a model's graph, and the constants of the graph that it reads."""
    nodes = [node for node in graph.node if node.op_type in ("LSTM", "GRU")]
    if name is not None:
        found = [node for node in nodes if name == node.name or name in node.output]
    else:
        found = nodes
    if len(found) != 1:
        names = [node.name or ", ".join(node.output) for node in nodes]
        hint = "; say which with name=" if name is None and nodes else ""
        raise ValueError(
            f"{caller}: expected one LSTM or GRU node{'' if name is None else f' {name!r}'}, found {names}{hint}"
        )
    tensors = _constants(graph)
    return found[0], {key: _array(caller, key, tensors[key]) for key in found[0].input if key in tensors}


def _constants(graph: Any) -> dict[str, Any]:
    """The tensors that a graph stores, in initializers and in Constant nodes."""
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        values = [attribute.t for attribute in node.attribute if attribute.name == "value"]
        if node.op_type == "Constant" and values and node.output:
            tensors[node.output[0]] = values[0]
    return tensors


def _array(caller: str, name: str, tensor: Any) -> Array:
    from onnx import numpy_helper

    if tensor.data_location == tensor.EXTERNAL:
        raise ValueError(f"{caller}: {name!r} is in another file; onnx.load(path) of the whole model brings it along")
    try:
        return numpy_helper.to_array(tensor)
    except MemoryError:
        raise
    except Exception as error:  # onnx raises many kinds if dims, type and data do not agree
        raise ValueError(f"{caller}: the tensor {name!r} cannot be read: {error}") from error


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


def _refuse(what: str, kind: str, attributes: Mapping[str, Any], direction: str) -> None:
    if direction not in ("forward", "reverse", "bidirectional"):
        raise ValueError(f"{what} has direction={direction!r}; expected 'forward', 'reverse' or 'bidirectional'")
    if "clip" in attributes:
        raise ConversionError(
            f"{what} has clip={attributes['clip'].f:g}, which limits what goes into the gates; the cell_clip of an LSTM"
            f" here limits the cell state. If the limit is never reached, remove the attribute"
        )
    defaults = ["sigmoid", "tanh", "tanh"] if kind == "LSTM" else ["sigmoid", "tanh"]
    defaults *= 2 if direction == "bidirectional" else 1
    if "activations" in attributes:
        activations = [activation.decode() for activation in attributes["activations"].strings]
        if [activation.lower() for activation in activations] != defaults:
            raise ConversionError(
                f"{what} has activations={activations}; only Sigmoid for the gates and Tanh elsewhere can be expressed"
            )
    if "input_forget" in attributes and attributes["input_forget"].i:
        raise ConversionError(
            f"{what} has input_forget=1, which couples the input gate to the forget gate; the gates of the block cells"
            f" are independent"
        )


def _check_states(what: str, given: Mapping[str, str], values: Mapping[str, Any], graph: Any) -> None:
    """Refuse lengths and initial states that the model itself determines: a layer gets them at each call."""
    open_inputs = None if graph is None else {value.name for value in graph.input}
    for k, (place, argument) in enumerate(
        {"sequence_lens": "lengths", "initial_h": "state", "initial_c": "state"}.items(), start=4
    ):
        name = given.get(place, "")
        constant = values.get(name)
        if constant is not None and (place == "sequence_lens" or np.any(np.asarray(constant))):
            which = f"a constant {place}"
        elif not name or constant is not None or open_inputs is None or name in open_inputs:
            continue
        elif place != "sequence_lens" and _is_zero(graph, name):
            continue
        else:
            which = f"{place} {name!r}, which other nodes compute"
        raise ConversionError(
            f"{what} has {which}; a layer gets that when it is called. Remove this input"
            f' (node.input[{k}] = ""), convert the node, and pass {argument}='
        )


_REARRANGING = (
    "Cast",
    "Expand",
    "Flatten",
    "Identity",
    "Reshape",
    "Slice",
    "Squeeze",
    "Tile",
    "Transpose",
    "Unsqueeze",
)


def _is_zero(graph: Any, name: str) -> bool:
    """Whether a value is certainly zero, such as the initial states that exporters compute from the batch size."""
    tensors = _constants(graph)
    makers = {output: node for node in graph.node for output in node.output}
    waiting, seen = [name], {""}
    while waiting:
        each = waiting.pop()
        node = makers.get(each)
        if each in tensors:
            if np.any(_array("from_onnx", each, tensors[each])):
                return False
        elif node is not None and node.op_type == "ConstantOfShape":
            values = [attribute.t for attribute in node.attribute]
            if any(np.any(_array("from_onnx", each, tensor)) for tensor in values):
                return False
        elif node is not None and node.op_type in (*_REARRANGING, "Concat") and node.input:
            inputs = node.input if node.op_type == "Concat" else node.input[:1]
            seen.add(each)
            waiting += [source for source in inputs if source not in seen]
        else:
            return False
    return True


def _peepholes(cell: Cell) -> Array:
    if not has_peepholes(cell):
        return np.zeros(3 * cell.hidden_size, cell.dtype)
    peepholes = np.concatenate([cell.weights[name] for name in ("wci", "wcf", "wco")])
    return reorder(peepholes, ORDERS["peepholes"], ORDERS["ONNX peepholes"])
