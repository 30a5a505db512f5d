"""The names of a graph's variables in its checkpoint, by the nodes that restore them and by captures of functions.

In come a graph and the variables of a checkpoint; out go the weights of the graph. A Saver of TensorFlow 1 may use
other names, and a checkpoint of objects has keys; in both cases a node reads a tensor by its name or key in the
checkpoint, and another node assigns it to a variable.
"""

from __future__ import annotations

import re

from ...graphs import Graph, Node
from ...objects import Objects, captured
from ...tensors import Tensor
from ...variables import Variables
from ..graph.graph_reader import GraphReader, Place, UnknownValue
from ..graph.op_table import graph_op
from .weight_sources import SavedNames, SavedTensor, WeightSources

_RESTORE = {"RestoreV2", "RestoreSlice", "Restore"}
_ASSIGN = {"Assign", "AssignVariableOp"}
_SLICE = re.compile(r"(?:\d{1,18} )+((?:-|\d{1,18},\d{1,18})(?::(?:-|\d{1,18},\d{1,18}))*)")


def trace_weights(graph: Graph, variables: Variables | None) -> WeightSources:
    """Return a graph's weights, by the names of variables in the checkpoint; a frozen graph has no `variables`."""
    reader = GraphReader(graph)
    sources = WeightSources(reader, variables)
    sources.restored = _find_restored(reader)
    reader.captures = _find_captures(sources)
    return sources


def _find_restored(reader: GraphReader) -> tuple[SavedNames, SavedNames]:
    """Find the saved tensors of variables: by the Saver that the file names, and by other Savers."""
    own: SavedNames = {}
    other_savers: SavedNames = {}
    texts: dict[tuple[str, str], list[SavedTensor]] = {}
    for body, node in reader.all_nodes():
        if node.op not in _ASSIGN:
            continue
        try:
            variable, value = reader.inputs(body, node)[:2]
            source = reader.resolve(value)
            restore = reader.node(source)
            if restore is None or restore.op not in _RESTORE:
                continue
            key = source.body, source.name
            if key not in texts:
                texts[key] = _read_restore(reader, source.body, restore)
            saved = texts[key][source.output]
            nodes = [reader.node(origin) for origin in reader.origins(variable)]
            saver_names = own if _is_own(reader, source.body, restore) else other_savers
        except (UnknownValue, ValueError, IndexError):  # it is not what a Saver makes
            continue
        for variable_node in nodes:
            if variable_node is not None and graph_op(variable_node).variable:
                saver_names.setdefault(variable_node.name, {})[saved] = None
    return own, other_savers


def _read_restore(reader: GraphReader, body: str, node: Node) -> list[SavedTensor]:
    """List the saved tensors that a restoring node reads."""
    inputs = reader.inputs(body, node)
    names = _constant_texts(reader, inputs[1])
    slices = _constant_texts(reader, inputs[2]) if len(inputs) > 2 and node.op != "Restore" else [""] * len(names)
    return [SavedTensor(name, _parse_slice(text)) for name, text in zip(names, slices, strict=True)]


def _constant_texts(reader: GraphReader, place: Place) -> list[str]:
    node = reader.node(reader.resolve(place))
    tensor = None if node is None else reader.graph.constant(node)
    if not isinstance(tensor, Tensor) or tensor.dtype != "string":
        raise UnknownValue(f"{place.name!r}, which is no text")
    return tensor.texts()


def _parse_slice(text: str) -> tuple[tuple[int, int | None], ...] | None:
    """Parse a slice of a Saver: ``"9 16 0,4:-"`` is ``[0:4, :]`` of an array of shape (9, 16), "" the whole array."""
    if not text:
        return None
    match = _SLICE.fullmatch(text)
    if match is None:
        raise UnknownValue(f"{text!r}, which is no slice")
    part: list[tuple[int, int | None]] = []
    for dimension in match[1].split(":"):
        start, _, length = dimension.partition(",")
        part.append((0, None) if dimension == "-" else (int(start), int(start) + int(length)))
    return tuple(part)


def _is_own(reader: GraphReader, body: str, node: Node) -> bool:
    """Return whether a node is of the Saver that the file names, by its last node or by the call of its function."""
    name = reader.graph.saver
    if body:
        return any(caller.node.name == name for caller in reader.callers.get(body, ()))
    scope = name.rpartition("/")[0]
    return bool(scope) and node.name.startswith(f"{scope}/")


def _find_captures(sources: WeightSources) -> dict[str, list[Place | None]]:
    """Find the last arguments of a SavedModel's functions, whoever calls them; None if one is not known."""
    variables, graph = sources.variables, sources.reader.graph
    if graph.objects is None or variables is None or variables.objects is None:
        return {}
    nodes: dict[str, Place | None] = {}
    for name, places in sources.restored[0].items():
        for saved in places:
            nodes.setdefault(saved.key, Place("", name))
    captures: dict[str, list[Place | None]] = {}
    for function, inputs in captured(Objects(graph.objects), variables.objects).items():
        if function in graph.functions and len(inputs) <= len(graph.functions[function].inputs):
            captures[function] = [Place("", node) if node in graph.nodes else nodes.get(key) for key, node in inputs]
    return captures
