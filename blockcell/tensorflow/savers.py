"""What a graph's variables are called in its checkpoint: what the nodes that restore them say, and captures.

A Saver of TensorFlow 1 may have been given other names, and a checkpoint of objects has keys. In both cases there are
nodes that read a tensor by its name in the checkpoint and assign it to a variable.
"""

from __future__ import annotations

import re

from .graphs import Graph, Node
from .objects import Objects, captured
from .tensors import Tensor
from .trace import VARIABLES, Names, Place, Saved, Tracer, Unknown
from .variables import Variables

_RESTORE = {"RestoreV2", "RestoreSlice", "Restore"}
_ASSIGN = {"Assign", "AssignVariableOp"}
_SLICE = re.compile(r"(?:\d{1,18} )+((?:-|\d{1,18},\d{1,18})(?::(?:-|\d{1,18},\d{1,18}))*)")


def tracer_of(graph: Graph, variables: Variables | None) -> Tracer:
    """A tracer that knows what variables are called in the checkpoint; `variables` is None for a frozen graph."""
    tracer = Tracer(graph, variables)
    tracer.restored = _restored(tracer)
    tracer.captures = _captures(tracer)
    return tracer


def _restored(tracer: Tracer) -> tuple[Names, Names]:
    """Where variables are, by their nodes: for the Saver that the file names, and for others."""
    own: Names = {}
    others: Names = {}
    texts: dict[tuple[str, str], list[Saved]] = {}
    for body, node in tracer.all_nodes():
        if node.op not in _ASSIGN:
            continue
        try:
            variable, value = tracer.inputs(body, node)[:2]
            source = tracer.straight(value)
            restore = tracer.node(source)
            if restore is None or restore.op not in _RESTORE:
                continue
            key = source.body, source.name
            if key not in texts:
                texts[key] = _saved(tracer, source.body, restore)
            saved = texts[key][source.output]
            nodes = [tracer.node(origin) for origin in tracer.origins(variable)]
            found = own if _is_own(tracer, source.body, restore) else others
        except (Unknown, ValueError, IndexError):  # it is not what a Saver makes
            continue
        for each in nodes:
            if each is not None and each.op in VARIABLES:
                found.setdefault(each.name, {})[saved] = None
    return own, others


def _saved(tracer: Tracer, body: str, node: Node) -> list[Saved]:
    """What a node reads."""
    inputs = tracer.inputs(body, node)
    names = _texts(tracer, inputs[1])
    slices = _texts(tracer, inputs[2]) if len(inputs) > 2 and node.op != "Restore" else [""] * len(names)
    return [Saved(name, _part(text)) for name, text in zip(names, slices, strict=True)]


def _texts(tracer: Tracer, place: Place) -> list[str]:
    node = tracer.node(tracer.straight(place))
    tensor = None if node is None else tracer.graph.constant(node)
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


def _is_own(tracer: Tracer, body: str, node: Node) -> bool:
    """Whether a node belongs to the Saver that the file names, by its last node or by the call of its function."""
    name = tracer.graph.saver
    if body:
        return any(caller.name == name for _, caller, *_ in tracer.callers.get(body, []))
    scope = name.rpartition("/")[0]
    return bool(scope) and node.name.startswith(f"{scope}/")


def _captures(tracer: Tracer) -> dict[str, list[Place | None]]:
    """What the last arguments of a SavedModel's functions are, whoever calls them; None is not known."""
    variables, graph = tracer.variables, tracer.graph
    if graph.objects is None or variables is None or variables.objects is None:
        return {}
    nodes: dict[str, Place | None] = {}
    for name, places in tracer.restored[0].items():
        for saved in places:
            nodes.setdefault(saved.key, Place("", name))
    found: dict[str, list[Place | None]] = {}
    for function, inputs in captured(Objects(graph.objects), variables.objects).items():
        if function in graph.functions and len(inputs) <= len(graph.functions[function].inputs):
            found[function] = [
                Place("", each.node) if each.node in graph.nodes else nodes.get(each.key) for each in inputs
            ]
    return found
