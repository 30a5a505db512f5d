"""Weights from and to ONNX: whole models, and LSTM, GRU and RNN nodes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from .. import files
from ..layers import GRU, LSTM, RNN, Bidirectional, Dense, Layer, Stack
from ..optable import Array
from .models import listed, state_of
from .onnx_activations import written_activations
from .onnx_graph import Graph, is_recurrent
from .onnx_node import (
    Remark,
    cell_of,
    dequantize,
    forget_shift,
    from_graph_node,
    from_node,
    is_reset_after,
    key_of,
    with_forget,
)
from .onnx_steps import from_graphs
from .shared import ORDERS, Cell, ConversionError, cells_of, clips, read_arrays, reorder, split_cell

if TYPE_CHECKING:
    import onnx


@overload
def from_onnx(
    source: Any,
    initializers: Any = None,
    *,
    name: str | None = None,
    initial_state: Literal[True],
    ignore_clip: bool = False,
) -> tuple[Any, Any]: ...
@overload
def from_onnx(
    source: Any,
    initializers: Mapping[str, Any],
    *,
    name: None = None,
    initial_state: Literal[False] = False,
    ignore_clip: bool = False,
) -> Layer: ...
@overload
def from_onnx(
    source: Any,
    initializers: None = None,
    *,
    name: str,
    initial_state: Literal[False] = False,
    ignore_clip: bool = False,
) -> Layer: ...
@overload
def from_onnx(
    source: Any,
    initializers: None = None,
    *,
    name: None = None,
    initial_state: Literal[False] = False,
    ignore_clip: bool = False,
) -> Any: ...
def from_onnx(
    source: Any,
    initializers: Mapping[str, Any] | None = None,
    *,
    name: str | None = None,
    initial_state: bool = False,
    ignore_clip: bool = False,
) -> Any:
    """A layer with the weights of an ONNX LSTM, GRU or RNN node, or of a whole model.

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
    initial_state : bool
        Whether to return the states that the model starts from, too: ``(layer, state)``. Those are the `initial_h` and
        `initial_c` that are constants, or rows that the model makes of constants for each batch, as models with a
        learned initial state have them. Calls take it for any batch: ``y, last = layer(x, state)``. It is None where
        the layer starts from zeros; if several layers are returned, it is a dict, too.
    ignore_clip : bool
        Whether to leave out a node's ``clip`` also where it may change results. Without, it is left out only where no
        input can reach it.

    Returns
    -------
    LSTM, GRU, RNN, Bidirectional, Stack, or dict of str to Layer
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
        Of a model, what else it does and was left out. Of a GRU that PyTorch exported with ``linear_before_reset=0``,
        that PyTorch's own has 1. Of initial states and lengths that are neither inputs of the
        model nor constant, that they are the caller's. Of initial states that are constant and not zero, how to get
        them. Of a ``DynamicQuantizeLSTM``, that x and h are not rounded.

    Raises
    ------
    TypeError
        The source is neither a model nor a node, or weights have a dtype other than float32, float64 and float16.
    ConversionError
        Activations that layers do not have; of an LSTM, two that differ for the candidate and the cell state;
        ``input_forget=1`` with others than sigmoid and hard_sigmoid for the gates; a ``clip`` that may change results;
        and weights that are not constant.
    ValueError
        There is no such node, or its inputs, attributes or shapes are not as ONNX specifies them.
    """
    caller = "from_onnx"
    remarks: list[Remark] = []
    if not hasattr(source, "graph"):
        if not hasattr(source, "op_type"):
            what = "expected an onnx.ModelProto or an onnx.NodeProto"
            raise TypeError(f"{caller}: the source is of type {type(source).__name__}; {what}")
        return _result(
            caller, remarks, *from_node(caller, source, initializers or {}, None, remarks, ignore_clip), initial_state
        )
    if initializers is not None:
        raise TypeError(f"{caller}: initializers belong to a node; a model has its own")
    graph = Graph(caller, source.graph, source.opset_import)
    if name is None and (texts := [each.value for each in source.metadata_props if each.key == "blockcell.layer"]):
        try:
            description = files.parse(texts[0])
            files.check(description)
        except ValueError as error:
            raise ValueError(f"{caller}: the model's blockcell.layer cannot be read: {error}") from error
        layer = _exported(caller, graph, description, "", remarks)
        return _result(caller, remarks, layer, None, initial_state)
    for each in source.functions:
        if any(map(is_recurrent, each.node)):
            raise ConversionError(
                f"{caller}: there is an LSTM, a GRU or an RNN in the model's function {each.name!r}, which may have its"
                f" weights from elsewhere; convert onnx.inliner.inline_local_functions(model)"
            )
    graphs = [graph, *graph.bodies()]
    nodes = [(graph, node) for graph in graphs for node in graph.nodes if is_recurrent(node)]
    named = [(graph, node) for graph, node in nodes if name in (None, node.name, *node.output)]
    resets_before = [key_of(node) for _, node in named if node.op_type == "GRU" and not is_reset_after(node)]
    if source.producer_name == "pytorch" and resets_before:
        warnings.warn(
            f"{caller}: PyTorch exported {listed([f'GRU {key!r}' for key in resets_before])} with"
            f" linear_before_reset=0, the reset gate before the product. PyTorch's GRU has it behind, which is 1:"
            f" onnxscript 0.6.2 writes 0 for it (microsoft/onnxscript#2852), and every runtime then computes something"
            f" else. Export it anew with onnxscript 0.7.2 or later, set the attribute to 1, or use"
            f" convert.from_torch(module)",
            stacklevel=2,
        )
    if name is None:
        return _result(caller, remarks, *from_graphs(caller, graphs, remarks, ignore_clip), initial_state)
    if len(named) != 1:
        names = [key_of(node) for _, node in nodes]
        raise ValueError(f"{caller}: expected one LSTM, GRU or RNN node {name!r}, found {names}")
    return _result(caller, remarks, *from_graph_node(caller, *named[0], remarks, ignore_clip), initial_state)


def _result(
    caller: str, remarks: list[Remark], found: Layer | dict[str, Layer], first: Any, initial_state: bool
) -> Any:
    """What is returned; and say what the remarks say, at the line that called the caller."""
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
    learned = [f"{remark.node} has {' and '.join(remark.learned)}" for remark in remarks if remark.learned]
    if learned and not initial_state:
        key = f"[{next(iter(found))!r}]" if isinstance(found, dict) else ""
        layers, states = ("layers", "states") if key else ("layer", "state")
        warnings.warn(
            f"{caller}: a state of its own to start from: {listed(learned)}. Here a layer starts from zeros unless its"
            f" call tells it. With initial_state=True, what calls take comes with the layer: {layers}, {states} ="
            f" convert.{caller}(..., initial_state=True); y, last = {layers}{key}(x, {states}{key})",
            stacklevel=3,
        )
    rounded = [remark.node for remark in remarks if remark.quantized]
    if rounded:
        warnings.warn(
            f"{caller}: not rounded: {listed(rounded)}. The layer has the weights that the integers stand for. In each"
            f" step onnxruntime also rounds x and h to 8 bits, the layer does not unless"
            f" it is quantized, by layer.quantize('int8'): results are alike, not equal",
            stacklevel=3,
        )
    return (found, state_of(caller, found, first)) if initial_state else found


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
    return '{"h": ...}' if isinstance(layer, Cell) else "()"


def to_onnx(layer: Layer, *, name: str = "rnn") -> tuple[onnx.NodeProto, dict[str, Array]]:
    """An ONNX LSTM, GRU or RNN node with the layer's weights.

    .. code-block:: python

        node, initializers = convert.to_onnx(layer)
        graph = onnx.helper.make_graph(
            [node], "g", [x_info], [y_info],
            initializer=[onnx.numpy_helper.from_array(array, name) for name, array in initializers.items()],
        )

    Parameters
    ----------
    layer : LSTM, GRU, RNN or Bidirectional
        Both layers of a `Bidirectional` must be of the same kind.
    name : str
        Name of the node. The names of its inputs and outputs begin with it: ``rnn_X``, ``rnn_W``, ..., ``rnn_Y``,
        ``rnn_Y_h``, ``rnn_Y_c``.

    Returns
    -------
    node : onnx.NodeProto
        It starts from zero states. To feed other ones, give names to ``node.input[5]`` and ``[6]``.
    initializers : dict of str to ndarray
        forget_bias is added into the bias. Of an LSTM with ``coupled=True``, i is made of f, and the node has
        ``input_forget=1``.

    Raises
    ------
    ConversionError
        An LSTM clips its cell state, or has a projection; the activations selu and exponential; a stack; an LSTM beside
        a GRU.
    """
    caller = "to_onnx"
    if isinstance(layer, Stack):
        raise ConversionError(
            f"{caller}: the layer is a Stack, and an ONNX node is one layer. Convert layer.layers one by one, and put a"
            f" Squeeze, or a Transpose and a Reshape, between them"
        )
    cells = cells_of(caller, layer)
    kind = type(cells[0]).__name__
    if any(type(cell) is not type(cells[0]) for cell in cells):
        raise ConversionError(f"{caller}: the layer has an {kind} and a {type(cells[1]).__name__}; a node has one kind")
    resets, couples = ({cell._arguments().get(name) for cell in cells} for name in ("reset_after", "coupled"))
    if len(resets) > 1:
        raise ConversionError(
            f"{caller}: one GRU has reset_after=True and the other has not; an ONNX node has one linear_before_reset"
        )
    if len(couples) > 1:
        raise ConversionError(f"{caller}: one LSTM has coupled=True and the other has not; a node has one input_forget")
    for cell in cells:
        if isinstance(cell, LSTM) and clips(cell.cell_clip):
            raise ConversionError(
                f"{caller}: the LSTM clips its cell state at {cell.cell_clip:g}; the ONNX attribute clip limits what"
                f" goes into the gates, which is something else. Build the graph of a BlockLSTM instead"
            )
    from onnx import helper

    parts = [_node_arrays(caller, cell) for cell in cells]
    arrays = {place: np.stack([part[place] for part in parts]) for place in ("W", "R", "B")}
    if any("P" in part for part in parts):
        none = np.zeros(3 * cells[0].hidden_size, cells[0].dtype)
        arrays["P"] = np.stack([part.get("P", none) for part in parts])
    places = ("X", "W", "R", "B", "", "", "", "P") if "P" in arrays else ("X", "W", "R", "B")
    node = helper.make_node(
        kind,
        [place and f"{name}_{place}" for place in places],
        [f"{name}_{place}" for place in ("Y", "Y_h", "Y_c")[: 3 if kind == "LSTM" else 2]],
        name=name,
        hidden_size=cells[0].hidden_size,
        direction="bidirectional" if len(cells) == 2 else "reverse" if cells[0].reverse else "forward",
    )
    for attribute, values in written_activations(caller, kind, cells).items():
        node.attribute.append(helper.make_attribute(attribute, values))
    if kind == "GRU":
        node.attribute.append(helper.make_attribute("linear_before_reset", int(resets == {True})))
    if couples == {True}:
        node.attribute.append(helper.make_attribute("input_forget", 1))
    return node, {f"{name}_{place}": np.ascontiguousarray(array) for place, array in arrays.items()}


def _node_arrays(caller: str, cell: Cell) -> dict[str, Array]:
    """W, R and B of one direction, and P if it has peepholes."""
    coupled = isinstance(cell, LSTM) and cell.coupled
    source = "ONNX coupled LSTM" if coupled else f"ONNX {type(cell).__name__}"
    takes = {"wci", "wcf", "wco", "activation", "recurrent_activation", "reverse", "coupled"}
    kernel, recurrent, *biases = split_cell(caller, cell, f"an ONNX {type(cell).__name__}", source, takes)
    names = ("wcf", "wco") if coupled else ("wci", "wcf", "wco")
    diagonals = [cell.weights[name] for name in names if name in cell.weights]
    arrays = [kernel.T, recurrent.T, *biases]
    if isinstance(cell, LSTM) and coupled:
        shift = forget_shift(caller, cell.recurrent_activation)
        arrays[2][: cell.hidden_size] -= arrays[2].dtype.type(shift)
        arrays = [with_forget(array) for array in arrays]
        diagonals = [-diagonals[0], diagonals[1], 0 * diagonals[0]] if diagonals else []
    elif diagonals:
        diagonals = [reorder(np.concatenate(diagonals), ORDERS["peepholes"], ORDERS["ONNX peepholes"])]
    W, R, *biases = arrays
    found = {"W": W, "R": R, "B": np.concatenate(biases)}
    return found | ({"P": np.concatenate(diagonals)} if diagonals else {})


# -------------------------------------------------------------------------------------------------------------- models
def _exported(caller: str, graph: Graph, description: Mapping[str, Any], prefix: str, remarks: list[Remark]) -> Layer:
    """The layer that `onnx_export.export` made a model of."""
    kind = description["type"]
    if kind == "Bidirectional":
        return Bidirectional(
            *(_exported(caller, graph, description[d], f"{prefix}{d}.", remarks) for d in ("fw", "bw"))
        )
    if kind == "Stack":
        parts = enumerate(description["layers"])
        return Stack([_exported(caller, graph, part, f"{prefix}{k}.", remarks) for k, part in parts])
    places = ["W", "R", "B", "P"]  # those of a node of ONNX's own
    is_native = sum(_is_there(graph, prefix + place) for place in places) >= 3
    if not is_native:
        places = [tensor.name for tensor in files.weights_of(description)]
    names = {place: prefix + place for place in places if _is_there(graph, prefix + place)}
    rounded = [f"{name}_quantized" for name in names.values() if name not in graph.tensors]
    if rounded:
        remarks.append(Remark(f"{kind} of {' and '.join(map(repr, rounded))}", [], set(), [], True))
    weights = {place: _weight(caller, graph, name, is_native) for place, name in names.items()}
    if any(array.dtype == np.float32 for array in weights.values()):  # matrices may be quantized to float16
        weights = {place: array.astype(np.float32) for place, array in weights.items()}
    if is_native:
        arrays = [array[0] for array in read_arrays(caller, weights).values()]
        told = ("reset_after", "reverse", "coupled", "activation", "recurrent_activation")
        options = {name: description[name] for name in told if name in description}
        return cell_of(caller, kind, arrays, **options)
    missing = [prefix + place for place in places if place not in {*weights, *files.PEEPHOLES}]
    if missing and graph.inputs.isdisjoint(missing):
        raise ValueError(
            f"{caller}: the model has no initializers {', '.join(missing)} of its {kind}, as blockcell exports them:"
            f" another program has changed it. To convert its nodes as they are: del model.metadata_props[:]"
        )
    if missing:
        raise ValueError(f"{caller}: the model has no weights of its {kind} {prefix!r}: it gets them with every call")
    arguments: dict[str, Any] = {name: value for name, value in description.items() if name != "type"}
    classes: dict[str, type[Layer]] = {"LSTM": LSTM, "GRU": GRU, "RNN": RNN, "Dense": Dense}
    return classes[kind](**arguments, **weights)


def _is_there(graph: Graph, name: str) -> bool:
    """Whether a model that `onnx_export.export` wrote has this weight, or what onnxruntime quantized it to."""
    return name in graph.tensors or f"{name}_quantized" in graph.tensors


def _weight(caller: str, graph: Graph, name: str, is_native: bool) -> Array:
    """A weight of such a model, which may be stored in codes with scales; of unsigned ones, 128 is zero."""
    if name not in graph.tensors:
        found = {"": f"{name}_quantized", "_scale": f"{name}_scale", "_zero_point": f"{name}_zero_point"}
        return dequantize(
            caller,
            name,
            {end: graph.array(each) for end, each in found.items() if each in graph.tensors},
            transposed=is_native,
        )
    array, scale = graph.array(name), f"{name}.scale"
    if scale not in graph.tensors:
        return array
    zero = 128 if array.dtype == np.uint8 else 0
    return (array.astype(np.float32) - np.float32(zero)) * graph.array(scale)
