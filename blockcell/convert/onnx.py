"""Weights from and to ONNX: whole models, and LSTM and GRU nodes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from .. import files
from ..layers import GRU, LSTM, Bidirectional, Dense, Layer, Stack
from ..optable import Array
from .models import listed
from .onnx_graph import Graph, is_recurrent
from .onnx_node import Remark, from_graph_node, from_node, key_of
from .onnx_steps import from_graphs
from .shared import (
    ORDERS,
    Cell,
    ConversionError,
    cells_of,
    clips,
    has_peepholes,
    make_cell,
    read_arrays,
    refuse_variants,
    reorder,
    split_cell,
)

if TYPE_CHECKING:
    import onnx


@overload
def from_onnx(source: Any, initializers: Mapping[str, Any], *, name: None = None) -> Layer: ...
@overload
def from_onnx(source: Any, initializers: None = None, *, name: str) -> Layer: ...
@overload
def from_onnx(source: Any, initializers: None = None, *, name: None = None) -> Any: ...
def from_onnx(source: Any, initializers: Mapping[str, Any] | None = None, *, name: str | None = None) -> Any:
    """A layer with the weights of an ONNX LSTM or GRU node, or of a whole model.

    .. code-block:: python

        layer = convert.from_onnx(onnx.load("model.onnx"))

    Parameters
    ----------
    source : onnx.ModelProto or onnx.NodeProto
        A model, or a node and its `initializers`.
    initializers : mapping of str to array_like, optional
        The values of a node's inputs W, R, B and P under the names that they have in the node.
    name : str, optional
        Name of a node in a model, or of one of its outputs. None converts all of the model, the bodies of its loops
        and branches as well.

    Returns
    -------
    LSTM, GRU, Bidirectional, Stack, or dict of str to Layer
        X, sequence_lens, initial_h and initial_c become arguments of its calls: x, ``lengths=`` and ``state=``, whose
        parts may be named, ``state={"h": ..., "cs": ...}``. ONNX's bidirectional Y is [T,2,B,H]; y here is [T,B,2H].
        Weights may be made of constants by nodes such as Slice, Concat and Unsqueeze, and stand in branches of an If.
        A ``DynamicQuantizeLSTM`` of onnxruntime gives the LSTM of the weights that its integers stand for.

        Of a model that has several, a `Stack` if they stand one behind the other, with nothing but changes of shape
        between them, as exporters write them. A dense layer behind them (Gemm, or MatMul and Add), and its activation,
        belong to the stack; the last one gets `last` if the first one reads the last step or Y_h. Otherwise a dict, by
        the names of the nodes. A model that `onnx_export.export` wrote gives the layer that it was made of.

        The node's ``layout=1`` and transpositions before and behind it are not part of the layer: x and y are [T,B,.]
        here unless a call has ``batch_first=True``.

    Warns
    -----
    UserWarning
        Of a model, what else it does and was left out. Of initial states and lengths that are neither inputs of the
        model nor zero states, that they are the caller's. Of a ``DynamicQuantizeLSTM``, that x and h are not rounded.

    Raises
    ------
    TypeError
        The source is neither a model nor a node, or weights have a dtype other than float32, float64 and float16.
    ConversionError
        ``clip``, ``input_forget=1``, other activations than the default ones, and weights that are not constant.
    ValueError
        There is no such node, or its inputs, attributes or shapes are not as ONNX specifies them.
    """
    caller = "from_onnx"
    if not hasattr(source, "graph"):
        if not hasattr(source, "op_type"):
            what = "expected an onnx.ModelProto or an onnx.NodeProto"
            raise TypeError(f"{caller}: the source is of type {type(source).__name__}; {what}")
        remarks: list[Remark] = []
        layer = from_node(caller, source, initializers or {}, None, remarks)
        _warn(caller, remarks, layer)
        return layer
    if initializers is not None:
        raise TypeError(f"{caller}: initializers belong to a node; a model has its own")
    graph = Graph(caller, source.graph, source.opset_import)
    if name is None and (texts := [each.value for each in source.metadata_props if each.key == "blockcell.layer"]):
        try:
            description = files.parse(texts[0])
            files.check(description)
        except ValueError as error:
            raise ValueError(f"{caller}: the model's blockcell.layer cannot be read: {error}") from error
        return _exported(caller, graph, description, "")
    for each in source.functions:
        if any(map(is_recurrent, each.node)):
            raise ConversionError(
                f"{caller}: there is an LSTM or a GRU in the model's function {each.name!r}, which may have its weights"
                f" from elsewhere; convert onnx.inliner.inline_local_functions(model)"
            )
    graphs = [graph, *graph.bodies()]
    remarks = []
    if name is None:
        found = from_graphs(caller, graphs, remarks)
        _warn(caller, remarks, found)
        return found
    nodes = [(graph, node) for graph in graphs for node in graph.nodes if is_recurrent(node)]
    named = [(graph, node) for graph, node in nodes if name == node.name or name in node.output]
    if len(named) != 1:
        names = [key_of(node) for _, node in nodes]
        raise ValueError(f"{caller}: expected one LSTM or GRU node {name!r}, found {names}")
    layer = from_graph_node(caller, *named[0], remarks)
    _warn(caller, remarks, layer)
    return layer


def _warn(caller: str, remarks: list[Remark], found: Layer | dict[str, Layer]) -> None:
    """Say what the remarks say, at the line that called the caller."""
    left = [f"{remark.node} has {' and '.join(remark.inputs)}" for remark in remarks if remark.inputs]
    if left:
        arguments = {argument for remark in remarks for argument in remark.arguments}
        does = {"state": "starts from zeros", "lengths": "takes every step"}
        without = " and ".join(text for argument, text in does.items() if argument in arguments)
        warnings.warn(
            f"{caller}: left to the caller: {listed(left)}. Here a layer {without} unless its call tells it:"
            f" {_example(arguments, found)}",
            stacklevel=3,
        )
    rounded = [remark.node for remark in remarks if remark.quantized]
    if rounded:
        warnings.warn(
            f"{caller}: not rounded: {listed(rounded)}. The layer has the weights that the integers stand for. In each"
            f" step onnxruntime also rounds x and h to 8 bits, the layer does not: results are alike, not equal",
            stacklevel=3,
        )


def _example(arguments: set[str], found: Layer | dict[str, Layer]) -> str:
    """A call of the layer, or of the first of them, with these arguments."""
    named = {"layer": found} if isinstance(found, Layer) else {f"layers[{key!r}]": found[key] for key in found}
    name, layer = next(iter(named.items()))
    values = {"state": _state(layer), "lengths": "..."}
    given = [f"{argument}={value}" for argument, value in values.items() if argument in arguments]
    return f"y, state = {name}({', '.join(['x', *given])})"


def _state(layer: Layer) -> str:
    """How its state is written."""
    if isinstance(layer, LSTM):
        return '{"h": ..., "cs": ...}'
    if isinstance(layer, Bidirectional):
        return f'{{"fw": {_state(layer.fw)}, "bw": {_state(layer.bw)}}}'
    if isinstance(layer, Stack):
        return f"{{{', '.join(f'{k}: {_state(part)}' for k, part in enumerate(layer.layers))}}}"
    return '{"h": ...}' if isinstance(layer, GRU) else "()"


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
        refuse_variants(caller, cell)
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


# -------------------------------------------------------------------------------------------------------------- models
def _exported(caller: str, graph: Graph, description: Mapping[str, Any], prefix: str) -> Layer:
    """The layer that `onnx_export.export` made a model of."""
    kind = description["type"]
    if kind == "Bidirectional":
        return Bidirectional(*(_exported(caller, graph, description[d], f"{prefix}{d}.") for d in ("fw", "bw")))
    if kind == "Stack":
        parts = enumerate(description["layers"])
        return Stack([_exported(caller, graph, part, f"{prefix}{k}.") for k, part in parts])
    names = [prefix + place for place in ("W", "R", "B", "P") if prefix + place in graph.tensors]
    if len(names) >= 3:  # those of a node of ONNX's own
        W, R, B, *P = (
            array[0] for array in read_arrays(caller, {name: _weight(graph, name) for name in names}).values()
        )
        options = {name: bool(description.get(name)) for name in ("reset_after", "reverse")}
        half = len(B) // 2
        return make_cell(f"ONNX {kind}", W.T, R.T, B[:half], B[half:], P[0] if P else None, **options)
    places = [tensor.name for tensor in files.weights_of(description)]
    arguments: dict[str, Any] = {name: value for name, value in description.items() if name != "type"}
    arguments |= {place: _weight(graph, prefix + place) for place in places if prefix + place in graph.tensors}
    if arguments.keys().isdisjoint(places):
        raise ValueError(f"{caller}: the model has no weights of its {kind} {prefix!r}: it gets them with every call")
    return LSTM(**arguments) if kind == "LSTM" else GRU(**arguments) if kind == "GRU" else Dense(**arguments)


def _weight(graph: Graph, name: str) -> Array:
    """A weight of such a model, which may be stored in codes with scales; of unsigned ones, 128 is zero."""
    array, scale = graph.array(name), f"{name}.scale"
    if scale not in graph.tensors:
        return array
    zero = 128 if array.dtype == np.uint8 else 0
    return (array.astype(np.float32) - np.float32(zero)) * graph.array(scale)


def _peepholes(cell: Cell) -> Array:
    if not has_peepholes(cell):
        return np.zeros(3 * cell.hidden_size, cell.dtype)
    peepholes = np.concatenate([cell.weights[name] for name in ("wci", "wcf", "wco")])
    return reorder(peepholes, ORDERS["peepholes"], ORDERS["ONNX peepholes"])
