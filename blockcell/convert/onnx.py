"""Weights from and to ONNX's LSTM and GRU nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import product
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from .. import files
from ..layers import GRU, LSTM, Bidirectional, Dense, Layer, Stack
from ..optable import ACTIVATIONS, Array
from .models import Step, assemble
from .onnx_graph import RESHAPING, SELECTING, Graph, is_recurrent
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

        Of a model that has several, a `Stack` if they stand one behind the other, with nothing but changes of shape
        between them, as exporters write them. A dense layer behind them (Gemm, or MatMul and Add), and its activation,
        belong to the stack; it gets `last` if it reads the last step or Y_h. Otherwise a dict, by the names of the
        nodes. A model that `onnx_export.export` wrote gives the layer that it was made of.

        The node's ``layout=1`` and transpositions before and behind it are not part of the layer: x and y are [T,B,.]
        here unless a call has ``batch_first=True``.

    Warns
    -----
    UserWarning
        Of a model, what else it does and was left out.

    Raises
    ------
    TypeError
        The source is neither a model nor a node, or weights have a dtype other than float32, float64 and float16.
    ConversionError
        ``clip``, ``input_forget=1``, other activations than the default ones, weights that other nodes compute, and
        lengths or initial states that are constant or that other nodes compute, unless the states are zero.
    ValueError
        There is no such node, or its inputs, attributes or shapes are not as ONNX specifies them.
    """
    caller = "from_onnx"
    if not hasattr(source, "graph"):
        if not hasattr(source, "op_type"):
            what = "expected an onnx.ModelProto or an onnx.NodeProto"
            raise TypeError(f"{caller}: the source is of type {type(source).__name__}; {what}")
        return _from_node(caller, source, initializers or {}, None)
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
    if name is None:
        return _from_graphs(caller, graphs)
    nodes = [(graph, node) for graph in graphs for node in graph.nodes if is_recurrent(node)]
    found = [(graph, node) for graph, node in nodes if name == node.name or name in node.output]
    if len(found) != 1:
        names = [_key(node) for _, node in nodes]
        raise ValueError(f"{caller}: expected one LSTM or GRU node {name!r}, found {names}")
    return _from_graph_node(caller, *found[0])


def _from_graph_node(caller: str, graph: Graph, node: Any) -> Layer:
    initializers = {key: graph.array(key) for key in node.input if key in graph.tensors}
    return _from_node(caller, node, initializers, graph)


def _from_node(caller: str, source: Any, values: Mapping[str, Any], graph: Graph | None) -> Layer:
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


def _from_graphs(caller: str, graphs: list[Graph]) -> Layer | dict[str, Layer]:
    steps: dict[str, Step] = {}
    outputs = [key for graph in graphs for key in GraphSteps(caller, graph, steps).add()]
    return assemble(caller, steps, outputs, stacklevel=4)


class GraphSteps:
    """Adds the steps of a graph.

    Whether one layer is behind another is tried: numbers in place of the first one's results go through the nodes
    between the two, and must reach the second one as y, perhaps with its axes in another order.
    """

    def __init__(self, caller: str, graph: Graph, steps: dict[str, Step]) -> None:
        self.caller = caller
        self.graph = graph
        self.steps = steps
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
        """The only layer that a value comes from, the form in which it is its y, and the nodes on the way."""
        nodes, origins, shapes = self.graph.origins(name, self.sources)
        keys = {self.sources.get(each) for each in origins}
        key = keys.pop() if len(keys) == 1 else None
        probes = {each: self.probes.get(self.sources.get(each, "")) for each in [*origins, *shapes]}
        if key is None or None in probes.values():
            return None
        sizes = {3, 5}  # and what an export with fixed sizes has
        for each in (each for node in nodes for each in node.input if each in self.graph.tensors):
            array = self.graph.array(each)
            if array.dtype.kind == "i" and array.size <= 4:
                sizes |= {int(size) for size in array.flat if 0 < size <= LARGEST}
        tried = [(T, B) for T, B in product(sorted(sizes)[:8], repeat=2) if T * B <= LARGEST]
        for T, B in sorted(tried, key=lambda sizes: sizes != (5, 3)):
            given = {each: probe(T, B)[0] for each, probe in probes.items() if probe}
            if any(each not in values for each, values in given.items()):  # such as the cell state
                return None
            values = {each: values[each] for each, values in given.items()}
            found = self.graph.moved(name, nodes, values)
            for form, expected in self.probes[key](T, B)[1].items():
                if found is not None and found.shape == expected.shape and np.all(found == expected):
                    return key, form, nodes
        return None

    def _add_recurrent(self, node: Any) -> None:
        layer = _from_graph_node(self.caller, self.graph, node)
        attributes = {attribute.name: attribute for attribute in node.attribute}
        batch_first = "layout" in attributes and attributes["layout"].i == 1
        source = self._source(node.input[0])
        if source is not None and source[1] == ("y, batch first" if batch_first else "y"):
            inputs: tuple[str | None, ...] = (source[0],)
            self.taken += source[2]
        else:
            inputs = (*self._inputs(node.input[:1]), None)
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
        tensors = self.graph.tensors
        names = [*node.input]
        if node.op_type not in ("MatMul", "Gemm") or len(names) < 2 or names[1] not in tensors:
            return False
        source = self._source(names[0])
        w = self.graph.array(names[1])
        attributes = {attribute.name: attribute for attribute in node.attribute}
        factors = {attributes[name].f for name in ("alpha", "beta") if name in attributes}
        if source is None or w.ndim != 2 or ("transA" in attributes and attributes["transA"].i) or factors - {1.0}:
            return False
        if "transB" in attributes and attributes["transB"].i:
            w = w.T
        bias = self.graph.array(names[2]) if node.op_type == "Gemm" and names[2:] and names[2] in tensors else None
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
            source = self._source(name) if other in self.graph.tensors else None
            if source is None or source[0] not in self.without_bias:
                continue
            key, form, nodes = source
            bias, layer = self.graph.array(other), self.steps[key].layer
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


def _check_states(what: str, given: Mapping[str, str], values: Mapping[str, Any], graph: Graph | None) -> None:
    """Refuse lengths and initial states that the model itself determines: a layer gets them at each call."""
    for k, (place, argument) in enumerate(
        {"sequence_lens": "lengths", "initial_h": "state", "initial_c": "state"}.items(), start=4
    ):
        name = given.get(place, "")
        constant = values.get(name)
        if constant is not None and (place == "sequence_lens" or np.any(np.asarray(constant))):
            which = f"a constant {place}"
        elif not name or constant is not None or graph is None or graph.is_argument(name):
            continue
        elif place != "sequence_lens" and graph.is_zero(name):
            continue
        else:
            which = f"{place} {name!r}, which other nodes compute"
        raise ConversionError(
            f"{what} has {which}; a layer gets that when it is called. Remove this input"
            f' (node.input[{k}] = ""), convert the node, and pass {argument}='
        )


def _peepholes(cell: Cell) -> Array:
    if not has_peepholes(cell):
        return np.zeros(3 * cell.hidden_size, cell.dtype)
    peepholes = np.concatenate([cell.weights[name] for name in ("wci", "wcf", "wco")])
    return reorder(peepholes, ORDERS["peepholes"], ORDERS["ONNX peepholes"])
