"""What a graph's variables are called in its checkpoint: what the nodes that restore them say, and captures.

A Saver of TensorFlow 1 may have been given other names, and a checkpoint of objects has keys. In both cases there are
nodes that read a tensor by its name in the checkpoint and assign it to a variable.
"""

from __future__ import annotations

import re

from ...graphs import Graph, Node
from ...objects import Objects, captured
from ...tensors import Tensor
from ...variables import Variables
from ..graph.graph_reader import Place, Reader, Unknown
from ..graph.op_table import op_of
from .weight_sources import Names, Saved, Sources

_RESTORE = {"RestoreV2", "RestoreSlice", "Restore"}
_ASSIGN = {"Assign", "AssignVariableOp"}
_SLICE = re.compile(r"(?:\d{1,18} )+((?:-|\d{1,18},\d{1,18})(?::(?:-|\d{1,18},\d{1,18}))*)")


def sources_of(graph: Graph, variables: Variables | None) -> Sources:
    """A graph's weights, by what variables are called in the checkpoint; `variables` is None for a frozen graph."""
    reader = Reader(graph)
    sources = Sources(reader, variables)
    sources.restored = _restored(reader)
    reader.captures = _captures(sources)
    return sources


def _restored(reader: Reader) -> tuple[Names, Names]:
    """Where variables are, by their nodes: for the Saver that the file names, and for others."""
    own: Names = {}
    others: Names = {}
    texts: dict[tuple[str, str], list[Saved]] = {}
    for body, node in reader.all_nodes():
        if node.op not in _ASSIGN:
            continue
        try:
            variable, value = reader.inputs(body, node)[:2]
            source = reader.straight(value)
            restore = reader.node(source)
            if restore is None or restore.op not in _RESTORE:
                continue
            key = source.body, source.name
            if key not in texts:
                texts[key] = _saved(reader, source.body, restore)
            saved = texts[key][source.output]
            nodes = [reader.node(origin) for origin in reader.origins(variable)]
            found = own if _is_own(reader, source.body, restore) else others
        except (Unknown, ValueError, IndexError):  # it is not what a Saver makes
            continue
        for each in nodes:
            if each is not None and op_of(each).variable:
                found.setdefault(each.name, {})[saved] = None
    return own, others


def _saved(reader: Reader, body: str, node: Node) -> list[Saved]:
    """What a node reads."""
    inputs = reader.inputs(body, node)
    names = _texts(reader, inputs[1])
    slices = _texts(reader, inputs[2]) if len(inputs) > 2 and node.op != "Restore" else [""] * len(names)
    return [Saved(name, _part(text)) for name, text in zip(names, slices, strict=True)]


def _texts(reader: Reader, place: Place) -> list[str]:
    node = reader.node(reader.straight(place))
    tensor = None if node is None else reader.graph.constant(node)
    if not isinstance(tensor, Tensor) or tensor.dtype != "string":
        raise Unknown(f"{place.name!r}, which is no text")
    return tensor.texts()


def _part(text: str) -> tuple[tuple[int, int | None], ...] | None:
    """A slice as a Saver writes it: ``"9 16 0,4:-"`` is ``[0:4, :]`` of an array of shape (9, 16), "" all of it."""
    if not text:
        return None
    found = _SLICE.fullmatch(text)
    if found is None:
        raise Unknown(f"{text!r}, which is no slice")
    part: list[tuple[int, int | None]] = []
    for each in found[1].split(":"):
        start, _, length = each.partition(",")
        part.append((0, None) if each == "-" else (int(start), int(start) + int(length)))
    return tuple(part)


def _is_own(reader: Reader, body: str, node: Node) -> bool:
    """Whether a node belongs to the Saver that the file names, by its last node or by the call of its function."""
    name = reader.graph.saver
    if body:
        return any(caller.node.name == name for caller in reader.callers.get(body, ()))
    scope = name.rpartition("/")[0]
    return bool(scope) and node.name.startswith(f"{scope}/")


def _captures(sources: Sources) -> dict[str, list[Place | None]]:
    """What the last arguments of a SavedModel's functions are, whoever calls them; None is not known."""
    variables, graph = sources.variables, sources.reader.graph
    if graph.objects is None or variables is None or variables.objects is None:
        return {}
    nodes: dict[str, Place | None] = {}
    for name, places in sources.restored[0].items():
        for saved in places:
            nodes.setdefault(saved.key, Place("", name))
    found: dict[str, list[Place | None]] = {}
    for function, inputs in captured(Objects(graph.objects), variables.objects).items():
        if function in graph.functions and len(inputs) <= len(graph.functions[function].inputs):
            found[function] = [
                Place("", each.node) if each.node in graph.nodes else nodes.get(each.key) for each in inputs
            ]
    return found
