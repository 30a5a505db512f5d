"""Weights from and to ONNX's LSTM and GRU nodes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import numpy as np

from .. import files
from ..layers import GRU, LSTM, Bidirectional, Dense, Layer, Stack
from ..optable import ACTIVATIONS, Array
from .models import Step, assemble, listed
from .onnx_graph import FOLDED, QUANTIZED, RESHAPING, SELECTING, Graph, is_quantized, is_recurrent
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
        layer = _from_node(caller, source, initializers or {}, None, remarks)
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
        found = _from_graphs(caller, graphs, remarks)
        _warn(caller, remarks, found)
        return found
    nodes = [(graph, node) for graph in graphs for node in graph.nodes if is_recurrent(node)]
    named = [(graph, node) for graph, node in nodes if name == node.name or name in node.output]
    if len(named) != 1:
        names = [_key(node) for _, node in nodes]
        raise ValueError(f"{caller}: expected one LSTM or GRU node {name!r}, found {names}")
    layer = _from_graph_node(caller, *named[0], remarks)
    _warn(caller, remarks, layer)
    return layer


class Remark(NamedTuple):
    """What calls of a layer must have, or how they differ from the node that it was made of."""

    node: str
    inputs: list[str]
    """Those from which the node has lengths and states."""
    arguments: set[str]
    """What these are in a call."""
    quantized: bool


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


PLACES = {
    "LSTM": ("X", "W", "R", "B", "sequence_lens", "initial_h", "initial_c", "P"),
    "GRU": ("X", "W", "R", "B", "sequence_lens", "initial_h"),
}
PLACES[QUANTIZED] = (*PLACES["LSTM"], "W_scale", "W_zero_point", "R_scale", "R_zero_point")


def _from_graph_node(caller: str, graph: Graph, node: Any, remarks: list[Remark]) -> Layer:
    values = {key: value for key in node.input if (value := graph.constant(key)) is not None}
    return _from_node(caller, node, values, graph, remarks)


def _from_node(
    caller: str, source: Any, values: Mapping[str, Any], graph: Graph | None, remarks: list[Remark]
) -> Layer:
    if not is_recurrent(source):
        raise ConversionError(
            f"{caller}: the node is a {source.domain}::{source.op_type}; expected an ONNX LSTM or GRU"
        )
    what, places = f"{caller}: {source.op_type} {source.name!r}", PLACES[source.op_type]
    kind = "LSTM" if is_quantized(source) else source.op_type
    attributes = _read_attributes(what, source)
    direction = attributes["direction"].s.decode() if "direction" in attributes else "forward"
    directions = 2 if direction == "bidirectional" else 1
    _refuse(what, kind, attributes, direction)
    reset_after = "linear_before_reset" in attributes and attributes["linear_before_reset"].i != 0
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
    left = _left_to_calls(given, values, graph)
    if left or is_quantized(source):
        places_left = [_described(place, given[place], places.index(place), graph) for place in left]
        arguments = {_ARGUMENTS[place] for place in left}
        remarks.append(Remark(what.removeprefix(f"{caller}: "), places_left, arguments, is_quantized(source)))
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


LARGEST = 4096  # of T and B and their product, in a trial of what lies between two layers
_ACTIVATIONS = {name.capitalize(): name for name in ACTIVATIONS if name}  # by ONNX's names
Probe = Callable[[int, int], tuple[dict[str, Array], dict[str, Array]]]


def _key(node: Any) -> str:
    return node.name or next(filter(None, node.output), "")


def _from_graphs(caller: str, graphs: list[Graph], remarks: list[Remark]) -> Layer | dict[str, Layer]:
    steps: dict[str, Step] = {}
    outputs = [key for graph in graphs for key in GraphSteps(caller, graph, steps, remarks).add()]
    return assemble(caller, steps, outputs, stacklevel=4, hint=_named_by_torch(graphs[0]))


def _named_by_torch(graph: Graph) -> str:
    """What to do if the cells of a model are written out, and its weights have PyTorch's names."""
    ends = ("weight_ih", "weight_ih_l0")
    prefixes = [name.removesuffix(end) for end in ends for name in graph.tensors if name.endswith(f".{end}")]
    if not prefixes:
        return ""
    return (
        f"; the weights of cells that are written out have PyTorch's names: tensors = {{tensor.name:"
        f" onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}};"
        f" {' and '.join(f'convert.from_torch(tensors, prefix={prefix!r})' for prefix in prefixes[:3])}"
    )


class GraphSteps:
    """Adds the steps of a graph.

    Whether one layer is behind another is tried: numbers in place of the first one's results go through the nodes
    between the two, and must reach the second one as y, perhaps with its axes in another order.
    """

    def __init__(self, caller: str, graph: Graph, steps: dict[str, Step], remarks: list[Remark]) -> None:
        self.caller = caller
        self.graph = graph
        self.steps = steps
        self.remarks = remarks
        self.sources: dict[str, str] = {}
        """The values that steps give, and whose they are."""
        self.states: set[str] = set()
        """Those of them that are states."""
        self.probes: dict[str, Probe] = {}
        """For T and B: numbers for the values that a layer gives, and what y, and parts of it, are then."""
        self.without_bias: dict[str, str] = {}
        """The dense layers whose bias has not been seen, and their products."""
        self.readers: dict[str, list[Any]] = {}
        for node in graph.nodes:
            for name in node.input:
                self.readers.setdefault(name, []).append(node)
        self.taken: list[Any] = []
        """The nodes between layers, which need no mention."""

    def add(self) -> list[str | None]:
        """Add the steps; what the results come from."""
        graph, others = self.graph, []
        nodes = graph.needed()
        for node in nodes:
            if node.op_type in (*RESHAPING, *SELECTING):
                continue
            if is_recurrent(node):
                self._add_recurrent(node)
            elif not (self._add_dense(node) or self._add_bias(node) or self._add_activation(node)):
                others += self._add_other(node, node.output)
        for node in nodes:
            if node.op_type in SELECTING and all(node is not each for each in self.taken):
                origins = {each for name in node.input for each in graph.origins(name, self.sources)[1]}
                others += [] if origins <= self.states else self._add_other(node, ())
        return [*others, *self._inputs(graph.outputs)]

    def _add_other(self, node: Any, results: Iterable[str]) -> list[str]:
        """Add what has an effect. In a body it is that of the node which has the body."""
        if self.graph.is_body or all(map(self.graph.is_fixed, node.output)):
            return []
        return [self._put(node, results, self._inputs(node.input))]

    def _put(self, node: Any, results: Iterable[str], inputs: tuple[str | None, ...], **rest: Any) -> str:
        key = _key(node)
        while key in self.steps:  # nodes need no names, or have the same in two graphs
            key += "'"
        self.steps[key] = Step(f"{key} ({node.op_type})", inputs, **rest)
        self.sources |= dict.fromkeys(filter(None, results), key)
        return key

    def _inputs(self, names: Iterable[str]) -> tuple[str | None, ...]:
        """The steps that values come from; None for states and inputs."""
        origins = dict.fromkeys(each for name in names for each in self.graph.origins(name, self.sources)[1])
        return tuple(None if name in self.states else self.sources.get(name) for name in origins)

    def _source(self, name: str) -> tuple[str, str, list[Any]] | None:
        """The layer whose y a value is, in which form, and the nodes on the way.

        Others may come together with it, such as the states of all layers, of which the last one is taken.
        """
        nodes, origins, shapes = self.graph.origins(name, self.sources)
        keys = {each: self.sources.get(each, "") for each in [*origins, *shapes]}
        probes = {key: self.probes[key] for key in keys.values() if key in self.probes}
        if not origins or {*keys.values()} - probes.keys():
            return None
        sizes = {3, 5}  # and what an export with fixed sizes has
        for each in (each for node in nodes for each in node.input if each in self.graph.tensors):
            array = self.graph.array(each)
            if array.dtype.kind == "i" and array.size <= 4:
                sizes |= {int(size) for size in array.flat if 0 < size <= LARGEST}
        tried = [(T, B) for T, B in product(sorted(sizes)[:8], repeat=2) if T * B <= LARGEST]
        for T, B in sorted(tried, key=lambda sizes: sizes != (5, 3)):
            values, forms, shift = dict[str, Array](), dict[tuple[str, str], Array](), 0
            for key, probe in probes.items():  # no two layers get the same numbers
                given, expected = probe(T, B)
                values |= {each: array + shift for each, array in given.items()}
                forms |= {(key, form): array + shift for form, array in expected.items()}
                shift += sum(array.size for array in given.values())
            if keys.keys() - values.keys():  # such as the cell state
                return None
            found = self.graph.moved(name, nodes, {each: values[each] for each in keys})
            for (key, form), wanted in forms.items():
                if found is not None and found.shape == wanted.shape and np.all(found == wanted):
                    return key, form, nodes
        return None

    def _add_recurrent(self, node: Any) -> None:
        layer = _from_graph_node(self.caller, self.graph, node, self.remarks)
        attributes = {attribute.name: attribute for attribute in node.attribute}
        batch_first = "layout" in attributes and attributes["layout"].i == 1
        source = self._source(node.input[0])
        if source is not None and source[1] == ("y, batch first" if batch_first else "y"):
            inputs: tuple[str | None, ...] = (source[0],)
            self.taken += source[2]
        else:
            inputs = (*self._inputs(node.input[:1]), None)
        for name in node.input[4:7]:  # what is to be said about these is said in remarks
            self.taken += self.graph.origins(name, self.sources)[0]
        outputs = [*node.output, "", ""]
        Y, Y_h = outputs[:2]
        key = self._put(node, node.output, inputs, layer=layer)
        self.states |= {name for name in node.output[1:] if name}
        backwards = [False, True] if isinstance(layer, Bidirectional) else [getattr(layer, "reverse", False)]
        shape = len(backwards), layer.hidden_size

        def probe(T: int, B: int) -> tuple[dict[str, Array], dict[str, Array]]:
            y = np.arange(1.0, 1.0 + T * B * shape[0] * shape[1]).reshape(T, B, *shape)
            h = np.stack([y[0 if back else -1][:, d] for d, back in enumerate(backwards)])
            values = {Y: y.transpose(1, 0, 2, 3) if batch_first else y.swapaxes(1, 2)}
            values[Y_h] = h.swapaxes(0, 1) if batch_first else h
            ends = h.swapaxes(0, 1).reshape(B, -1)
            return values, _forms(y.reshape(T, B, -1)) | {"last": y[-1].reshape(B, -1), "ends": ends}

        self.probes[key] = probe

    def _add_dense(self, node: Any) -> bool:
        """Add a MatMul or a Gemm as a dense layer."""
        names = [*node.input]
        w = self.graph.constant(names[1]) if node.op_type in ("MatMul", "Gemm") and len(names) > 1 else None
        if w is None:
            return False
        source = self._source(names[0])
        attributes = {attribute.name: attribute for attribute in node.attribute}
        factors = {attributes[name].f for name in ("alpha", "beta") if name in attributes}
        if source is None or w.ndim != 2 or ("transA" in attributes and attributes["transA"].i) or factors - {1.0}:
            return False
        if "transB" in attributes and attributes["transB"].i:
            w = w.T
        bias = self.graph.constant(names[2]) if node.op_type == "Gemm" and names[2:] else None
        if len(names) > 2 and (bias is None or not _is_row(bias, w.shape[1])):
            return False
        zeros = np.zeros(w.shape[1], w.dtype)
        arrays = read_arrays(f"{self.caller}: {_key(node)}", {"w": w, "b": zeros if bias is None else bias.reshape(-1)})
        layer = Dense(arrays["w"], arrays["b"])
        key = self._put_behind(source, node, node.output[0], layer.output_size, layer=layer)
        if node.op_type == "MatMul":
            self.without_bias[key] = node.output[0]
        return True

    def _add_bias(self, node: Any) -> bool:
        """Add an Add to the dense layer whose product it follows."""
        for name, other in (node.input, node.input[::-1]) if node.op_type == "Add" and len(node.input) == 2 else ():
            bias = self.graph.constant(other)
            source = None if bias is None else self._source(name)
            if bias is None or source is None or source[0] not in self.without_bias:
                continue
            key, form, nodes = source
            layer = self.steps[key].layer
            alone = len(self.readers.get(self.without_bias[key], ())) == 1
            if isinstance(layer, Dense) and alone and _is_row(bias, layer.output_size):
                arrays = read_arrays(f"{self.caller}: {_key(node)}", {"w": layer.weights["w"], "b": bias.reshape(-1)})
                self.steps[key] = self.steps[key]._replace(layer=Dense(arrays["w"], arrays["b"]))
                del self.without_bias[key]
                self.taken += nodes
                self._put_result(key, form, node.output[0], layer.output_size)
                return True
        return False

    def _add_activation(self, node: Any) -> bool:
        source = self._source(node.input[0]) if node.op_type in _ACTIVATIONS and node.input else None
        if source is None or not isinstance(layer := self.steps[source[0]].layer, Dense):
            return False
        if node.op_type == "Softmax":
            newest = max((opset.version for opset in self.graph.opsets if opset.domain in ("", "ai.onnx")), default=1)
            axes = [attribute.i for attribute in node.attribute if attribute.name == "axis"]
            rank = 3 if source[1] in ("y", "y, batch first") else 2
            if (axes or [-1 if newest >= 13 else 1])[0] not in (-1, rank - 1):
                return False
        self._put_behind(source, node, node.output[0], layer.output_size, activation=_ACTIVATIONS[node.op_type])
        return True

    def _put_behind(self, source: tuple[str, str, list[Any]], node: Any, output: str, size: int, **rest: Any) -> str:
        """Add a dense layer, or its activation, which has results of the same form as its input."""
        before, form, nodes = source
        self.taken += nodes
        if form in ("last", "ends"):
            self.steps[before] = self.steps[before]._replace(last="ends" if form == "ends" else True)
        key = self._put(node, [output], (before,), **rest)
        self._put_result(key, form, output, size)
        return key

    def _put_result(self, key: str, form: str, output: str, size: int) -> None:
        """Say which value a dense layer gives, and in which form."""
        self.sources[output] = key

        def probe(T: int, B: int) -> tuple[dict[str, Array], dict[str, Array]]:
            if form in ("last", "ends"):
                rows = np.arange(1.0, 1.0 + B * size).reshape(B, size)
                return {output: rows}, {form: rows}
            y = np.arange(1.0, 1.0 + T * B * size).reshape(T, B, size)
            return {output: _forms(y)[form]}, _forms(y)

        self.probes[key] = probe


def _is_row(bias: Array, size: int) -> bool:
    """Whether it adds the same numbers to each row."""
    return bias.size == size and bias.shape[-1:] == (size,)


def _forms(y: Array) -> dict[str, Array]:
    """y [T,B,.], with its axes in other orders, too."""
    by_batch, size = y.swapaxes(0, 1), y.shape[2]
    forms = {"y": y, "y, batch first": by_batch}
    return forms | {f"{name}, in rows": each.reshape(-1, size) for name, each in forms.items()}


# --------------------------------------------------------------------------------------------------------------- nodes
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


def _described(place: str, name: str, k: int, graph: Graph | None) -> str:
    """An input of a node, and what it comes from."""
    origins = graph.origins(name, ())[1] if graph is not None else []
    source = "" if name in origins or not origins else f", of {' and '.join(map(repr, origins[:3]))}"
    return f"{place} {name!r} (input[{k}]{source})"


_ARGUMENTS = {"sequence_lens": "lengths", "initial_h": "state", "initial_c": "state"}  # of a layer's calls


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
        whole, scale = arrays[name], arrays.pop(f"{name}_scale")
        zero = arrays.pop(f"{name}_zero_point", np.zeros(scale.shape, whole.dtype))
        if whole.ndim != 3 or whole.dtype not in (np.int8, np.uint8):
            raise ValueError(
                f"{what}: {name} is of dtype {whole.dtype} and shape {whole.shape}; expected int8 or uint8, [D,.,4H]"
            )
        allowed = (whole.shape[:1], (whole.shape[0], whole.shape[2]))
        for part, array in (("scale", scale), ("zero_point", zero)):
            if array.shape not in allowed:
                raise ValueError(
                    f"{what}: {name}_{part} has shape {array.shape}; expected {' or '.join(map(str, allowed))}"
                )
        scale, zero = (array.reshape(len(array), 1, -1) for array in (scale, zero))
        arrays[name] = ((whole.astype(np.int32) - zero) * scale).astype(scale.dtype).swapaxes(1, 2)
    return arrays


def _peepholes(cell: Cell) -> Array:
    if not has_peepholes(cell):
        return np.zeros(3 * cell.hidden_size, cell.dtype)
    peepholes = np.concatenate([cell.weights[name] for name in ("wci", "wcf", "wco")])
    return reorder(peepholes, ORDERS["peepholes"], ORDERS["ONNX peepholes"])
