"""Weights from and to ONNX: whole models, and LSTM, GRU and RNN nodes."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import files
from ..gates import ORDERS, reorder
from ..layers import LSTM, Layer, Stack
from ..layers.loading import build_from_leaves, build_leaf
from ..layers.structure import snapshot_of
from ..optable import Array, peephole_names
from .comparison import NotCompared, Outcome
from .models import Assembly, Converted, join_labels, read_initial_state, warn_once
from .onnx_activations import written_activations
from .onnx_graph import CALLER, OnnxGraph, graph_digest, integer_attribute, is_recurrent, key_of, read_model
from .onnx_node import Remarks, forget_shift, from_node, make_node_cell, with_forget
from .onnx_run import OnnxAssembly, OnnxPiece, Result, compare_pieces
from .onnx_steps import from_graphs
from .shared import (
    ConversionError,
    RecurrentCell,
    cells_of,
    read_arrays,
    split_cell,
)

if TYPE_CHECKING:
    import onnx

_NODE_OPSET = 22  # in which a node without a model runs
_MEND = "To convert its nodes as they are: del model.metadata_props[:]"


def from_onnx(
    source: Any,
    initializers: Mapping[str, Any] | None = None,
    *,
    name: str | None = None,
    initial_state: bool = False,
    ignore_clip: bool = False,
    check: bool | None = None,
) -> Any:
    """Convert an ONNX LSTM, GRU or RNN node, or a whole ONNX model.

    .. code-block:: python

        layer = convert.from_onnx("model.onnx")

    Parameters
    ----------
    source : path_like, onnx.ModelProto or onnx.NodeProto
        A model or the path of its file, or a node and its `initializers`.
    initializers : mapping of str to array_like, optional
        The values of a node's inputs W, R, B and P by their names in the node.
    name : str, optional
        Name of a node in a model, or of one of its outputs. None converts the whole model, including the bodies of
        loops and branches.
    initial_state : bool
        Whether to return ``(layer, state)``, where `state` is a learned initial state: `initial_h` and `initial_c` that
        are constants, or constants that the model repeats for each batch. Calls take it for any batch:
        ``y, last = layer(x, state)``. It is None if the layer starts from zeros, and a dict beside a dict of layers.
    ignore_clip : bool
        Whether to ignore a node's ``clip``, which may change results.
    check : bool, optional
        Whether the source runs on random inputs and must compute what the layer computes. None, the default, compares
        where nothing but the model's own code is run; True also where the model has hooks of the user's; False does not
        compare. A model of ONNX has no hooks.

    Returns
    -------
    LSTM, GRU, RNN, Bidirectional, Stack, or dict of str to Layer
        X, sequence_lens, initial_h and initial_c become arguments of its calls: x, ``lengths=`` and ``state=``, with
        names, ``state={"h": ..., "cs": ...}``. ONNX's bidirectional Y is [T,2,B,H]; y of a layer is [T,B,2H]. Weights
        may be constants behind nodes such as Slice, Concat and Unsqueeze, and in branches of an If.

        Several nodes become a `Stack` if each reads the one before it, through nothing but changes of shape, as
        exporters write them. Dense layers behind them (Gemm, or MatMul and Add) belong to the stack, with their
        activations; the last one gets `last` if the first one reads the last step or Y_h. Other models become a dict by
        the names of the nodes. A model that `onnx_export.export` wrote gives back the exported layer; it is not run.

        Transpositions around a node are not part of the layer: x and y are [T,B,.] unless a call has
        ``batch_first=True``.

    Warns
    -----
    UserWarning
        Parts of a model are skipped. PyTorch exported a GRU with ``linear_before_reset=0``, where its own has 1.
        Initial states or lengths are neither inputs of the model nor constant: pass them to calls. Initial states are
        constant and not zero: the warning says how to get them.

    Raises
    ------
    FormatError
        The file at the path is no ONNX model, or no regular file.
    TypeError
        The source is neither a path nor a model nor a node, or weights have another dtype than float32, float64 and
        float16.
    ConversionError
        Layers do not have the activation; an LSTM has different activations for the candidate and the cell state; the
        gates of ``input_forget=1`` have other activations than sigmoid and hard_sigmoid; there is a ``clip`` or
        ``layout=1``; weights are not constant; another program has changed the nodes of a model that
        `onnx_export.export` wrote.
    ValueError
        There is no such node, or its inputs, attributes or shapes are not as ONNX specifies them.
    """
    remarks = Remarks([], set(), [])
    if isinstance(source, (str, os.PathLike)):
        source = read_model(source)
    if not hasattr(source, "graph"):
        if not hasattr(source, "op_type"):
            expected = "expected the path of a model, an onnx.ModelProto or an onnx.NodeProto"
            raise TypeError(f"{CALLER}: the source is of type {type(source).__name__}; {expected}")
        converted = _from_node(source, initializers or {}, remarks, ignore_clip)
    elif initializers is not None:
        raise TypeError(f"{CALLER}: initializers belong to a node; a model has its own")
    else:
        converted = _from_model(source, name, remarks, ignore_clip, check is not False)
    outcome = Outcome()
    if check is not False and converted.pieces:
        outcome = compare_pieces(converted, ignore_clip)
    elif check is not False and any(tensor.data_type == tensor.UINT8 for tensor in source.graph.initializer):
        reason = "it rounds x and h to 8 bits in each step, and the layer does not"
        outcome = Outcome(remarks=[NotCompared(reason).remark])
    layers, state, _, left_out, _ = converted.assembly
    warn_once(CALLER, [*left_out, *outcome.left_out], outcome.remarks, stacklevel=2)
    _warn_of_remarks(remarks, layers, initial_state)
    return (layers, read_initial_state(CALLER, layers, state)) if initial_state else layers


def _from_node(node: Any, initializers: Mapping[str, Any], remarks: Remarks, ignore_clip: bool) -> OnnxAssembly:
    """Convert a node without a model, in a graph of it alone."""
    from onnx import helper, numpy_helper

    graph = OnnxGraph(helper.make_graph([node], "node", [], []), [helper.make_opsetid("", _NODE_OPSET)])
    graph.inputs |= {*node.input}
    values = {name: initializers[name] for name in node.input if name in initializers}
    graph.folded |= values
    assembly = _single(graph, graph.nodes[0], remarks, ignore_clip)
    graph.tensors |= {name: numpy_helper.from_array(np.asarray(value), name) for name, value in values.items()}
    return assembly


def _single(graph: OnnxGraph, node: Any, remarks: Remarks, ignore_clip: bool) -> OnnxAssembly:
    """Convert a single node of a graph."""
    layer, state = from_node(graph, node, remarks, ignore_clip)
    result = Result(graph, node, node.output[0], "Y")
    piece = OnnxPiece(f"{node.op_type} {key_of(node)!r}", layer, state, [node], result)
    return OnnxAssembly(Assembly(layer, state, (), []), [piece])


def _from_model(model: Any, name: str | None, remarks: Remarks, ignore_clip: bool, check: bool) -> OnnxAssembly:
    """Convert all of a model, or the node of that name."""
    graph = OnnxGraph(model.graph, model.opset_import)
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    if name is None and "blockcell.layer" in metadata:
        layer = _from_exported(graph, metadata["blockcell.layer"])
        if check and metadata.get("blockcell.digest") != graph_digest(model):
            raise ConversionError(
                f"{CALLER}: another program has changed the model since blockcell exported it, so it may compute"
                f" something else than its layer. {_MEND}; to get the layer that it was: check=False"
            )
        return OnnxAssembly(Assembly(layer, None, (), []))
    for function in model.functions:
        if any(map(is_recurrent, function.node)):
            raise ConversionError(
                f"{CALLER}: there is an LSTM, a GRU or an RNN in the model's function {function.name!r}, which may have"
                f" its weights from elsewhere; convert onnx.inliner.inline_local_functions(model)"
            )
    graphs = [graph, *graph.bodies()]
    nodes = [(graph, node) for graph in graphs for node in graph.nodes if is_recurrent(node)]
    chosen = [(graph, node) for graph, node in nodes if name in (None, node.name, *node.output)]
    grus = [node for _, node in chosen if node.op_type == "GRU" and not integer_attribute(node, "linear_before_reset")]
    if model.producer_name == "pytorch" and grus:
        warnings.warn(
            f"{CALLER}: PyTorch exported {join_labels(f'GRU {key_of(node)!r}' for node in grus)} with"
            f" linear_before_reset=0, the reset gate before the product. PyTorch's GRU has it behind, which is 1:"
            f" onnxscript 0.6.2 writes 0 for it (microsoft/onnxscript#2852), and every runtime then computes something"
            f" else. Export it anew with onnxscript 0.7.2 or later, set the attribute to 1, or use"
            f" convert.from_torch(module)",
            stacklevel=3,
        )
    if name is None:
        return from_graphs(graphs, remarks, ignore_clip)
    if len(chosen) != 1:
        names = [key_of(node) for _, node in nodes]
        raise ValueError(f"{CALLER}: expected one LSTM, GRU or RNN node {name!r}, found {names}")
    return _single(*chosen[0], remarks, ignore_clip)


def _warn_of_remarks(remarks: Remarks, layers: Converted, initial_state: bool) -> None:
    """Warn of what remarks say, at the line that called the caller."""
    if remarks.calls:
        defaults = {"state": "starts from zeros", "lengths": "takes every step"}
        without = " and ".join(text for argument, text in defaults.items() if argument in remarks.arguments)
        warnings.warn(
            f"{CALLER}: left to the caller: {join_labels(remarks.calls)}. Here a layer {without} unless its call has"
            f" {' and '.join(f'{argument}=' for argument in defaults if argument in remarks.arguments)}",
            stacklevel=3,
        )
    if remarks.constants and not initial_state:
        key = f"[{next(iter(layers))!r}]" if isinstance(layers, dict) else ""
        result, states = ("layers", "states") if key else ("layer", "state")
        warnings.warn(
            f"{CALLER}: a state of its own to start from: {join_labels(remarks.constants)}. Here a layer starts from"
            f" zeros unless its call tells it. With initial_state=True, what calls take comes with the layer: {result},"
            f" {states} = convert.{CALLER}(..., initial_state=True); y, last = {result}{key}(x, {states}{key})",
            stacklevel=3,
        )


def to_onnx(layer: Layer, *, name: str = "rnn") -> tuple[onnx.NodeProto, dict[str, Array]]:
    """Return an ONNX LSTM, GRU or RNN node with the layer's weights.

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
        It starts from zero states. For other states, set the names ``node.input[5]`` and ``[6]``.
    initializers : dict of str to ndarray
        forget_bias is added to the bias. An LSTM with ``coupled=True`` gets i from its f, and ``input_forget=1``.

    Raises
    ------
    ConversionError
        An LSTM clips its cell state or has a projection; the activation is selu or exponential; the layer is a stack,
        or has an LSTM beside a GRU.
    """
    caller, layer = "to_onnx", snapshot_of(layer)
    if isinstance(layer, Stack):
        raise ConversionError(
            f"{caller}: the layer is a Stack, and an ONNX node is one layer. Convert layer.layers one by one, and put a"
            f" Squeeze, or a Transpose and a Reshape, between them"
        )
    cells = cells_of(caller, layer)
    kind = type(cells[0]).__name__
    if any(type(cell) is not type(cells[0]) for cell in cells):
        raise ConversionError(f"{caller}: the layer has an {kind} and a {type(cells[1]).__name__}; a node has one kind")
    is_set = {name: [cell._arguments().get(name) for cell in cells] for name in ("reset_after", "coupled")}
    for name_of_option, values in is_set.items():
        if len({*values}) > 1:
            expected = "expected both alike, as an ONNX node has one attribute for them"
            raise ConversionError(f"{caller}: one {kind} has {name_of_option}=True and the other has not; {expected}")
    from onnx import helper

    parts = [_node_arrays(caller, cell) for cell in cells]
    arrays = {role: np.stack([part[role] for part in parts]) for role in ("W", "R", "B")}
    if any("P" in part for part in parts):
        zeros = np.zeros(3 * cells[0].hidden_size, cells[0].dtype)
        arrays["P"] = np.stack([part.get("P", zeros) for part in parts])
    roles = ("X", "W", "R", "B", "", "", "", "P") if "P" in arrays else ("X", "W", "R", "B")
    node = helper.make_node(
        kind,
        [role and f"{name}_{role}" for role in roles],
        [f"{name}_{role}" for role in ("Y", "Y_h", "Y_c")[: 3 if kind == "LSTM" else 2]],
        name=name,
        hidden_size=cells[0].hidden_size,
        direction="bidirectional" if len(cells) == 2 else "reverse" if cells[0].reverse else "forward",
    )
    for attribute, values in written_activations(caller, kind, cells).items():
        node.attribute.append(helper.make_attribute(attribute, values))
    if kind == "GRU":
        node.attribute.append(helper.make_attribute("linear_before_reset", int(all(is_set["reset_after"]))))
    if all(is_set["coupled"]):
        node.attribute.append(helper.make_attribute("input_forget", 1))
    return node, {f"{name}_{role}": np.ascontiguousarray(array) for role, array in arrays.items()}


def _node_arrays(caller: str, cell: RecurrentCell) -> dict[str, Array]:
    """Return W, R and B of one direction, and P if the cell has peepholes."""
    coupled = isinstance(cell, LSTM) and cell.coupled
    layout = "ONNX coupled LSTM" if coupled else f"ONNX {type(cell).__name__}"
    takes = {*peephole_names(coupled), "activation", "recurrent_activation", "reverse", "coupled"}
    kernel, recurrent, *biases = split_cell(caller, cell, f"an ONNX {type(cell).__name__}", layout, takes)
    diagonals = [cell.weights[name] for name in peephole_names(coupled) if name in cell.weights]
    arrays = [kernel.T, recurrent.T, *biases]
    if isinstance(cell, LSTM) and coupled:
        shift = forget_shift(caller, cell.recurrent_activation)
        arrays[2][: cell.hidden_size] -= arrays[2].dtype.type(shift)
        arrays = [with_forget(array) for array in arrays]
        diagonals = [-diagonals[0], diagonals[1], 0 * diagonals[0]] if diagonals else []
    elif diagonals:
        diagonals = [reorder(np.concatenate(diagonals), ORDERS["peepholes"], ORDERS["ONNX peepholes"])]
    W, R, *biases = arrays
    peepholes = {"P": np.concatenate(diagonals)} if diagonals else {}
    return {"W": W, "R": R, "B": np.concatenate(biases)} | peepholes


# ----------------------------------------------------------------------------------- models that blockcell has exported
def _from_exported(graph: OnnxGraph, text: str) -> Layer:
    """Convert a model that `onnx_export.export` wrote, with the description of its layer."""
    try:
        description = files.parse(text)
        files.check(description)
    except ValueError as error:
        raise ValueError(f"{CALLER}: the model's blockcell.layer cannot be read: {error}") from error

    return build_from_leaves(description, lambda leaf, prefix: _build_exported_leaf(graph, leaf, prefix))


def _build_exported_leaf(graph: OnnxGraph, description: Mapping[str, Any], prefix: str) -> Layer:
    """Build a described cell or `Dense` with the weights whose names begin with the prefix."""
    kind = description["type"]
    names = ["W", "R", "B", "P"]  # those of a node of ONNX's own
    is_native = sum(prefix + name in graph.tensors for name in names) >= 3
    if not is_native:
        names = [tensor.name for tensor in files.weights_of(description)]
    weights = {name: _read_weight(graph, prefix + name) for name in names if prefix + name in graph.tensors}
    if any(array.dtype == np.float32 for array in weights.values()):  # matrices may be quantized to float16
        weights = {name: array.astype(np.float32) for name, array in weights.items()}
    if is_native:
        arrays = [array[0] for array in read_arrays(CALLER, weights).values()]
        arguments = ("reset_after", "reverse", "coupled", "activation", "recurrent_activation")
        options = {name: description[name] for name in arguments if name in description}
        return make_node_cell(CALLER, kind, arrays, **options)
    missing = [prefix + name for name in names if name not in {*weights, *files.PEEPHOLES}]
    if missing:
        raise ValueError(
            f"{CALLER}: the model has no initializers {', '.join(missing)} of its {kind}, as blockcell exports them: it"
            f" gets them with every call, or another program has changed it. {_MEND}"
        )
    return build_leaf(description, weights)


def _read_weight(graph: OnnxGraph, name: str) -> Array:
    """Read a weight of such a model, which may be stored in codes with scales; of unsigned ones, 128 is zero."""
    array, scale = graph.array(name), f"{name}.scale"
    if scale not in graph.tensors:
        return array
    zero = 128 if array.dtype == np.uint8 else 0
    return (array.astype(np.float32) - np.float32(zero)) * graph.array(scale)
