"""Nodes of ONNX graphs: to make, read, rename and select them, also in the bodies of Scan, Loop and If."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import numpy as np
from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, helper, numpy_helper

from blockcell import __version__

DOMAIN = "blockcell"
make_node, make_value_info = helper.make_node, helper.make_tensor_value_info
Nodes = list[NodeProto]
ElementTypes = Mapping[str, int]  # ONNX's numbers, by the names of values


def constant(name: str, value: Any) -> NodeProto:
    """Return a Constant of this value."""
    tensor = numpy_helper.from_array(np.asarray(value), f"{name}_value")
    return make_node("Constant", [], [name], name=name, value=tensor)


def make_model(
    graph: GraphProto,
    opset: int,
    functions: Sequence[FunctionProto],
    metadata: Mapping[str, str],
    with_domain: bool = True,
) -> ModelProto:
    """Return the model of a graph, with blockcell's version in its metadata.

    `with_domain` says whether it imports the domain of the functions, and of nodes that call them.
    """
    imports = [helper.make_opsetid("", opset)]
    model: ModelProto = helper.make_model(
        graph,
        opset_imports=[*imports, *[helper.make_opsetid(DOMAIN, 1)] * with_domain],
        functions=functions,
        ir_version=max(8, helper.find_min_ir_version_for(imports)),
        producer_name="blockcell",
        producer_version=__version__,
    )
    entries = {"version": __version__, **metadata}
    helper.set_model_props(model, {f"blockcell.{key}": value for key, value in entries.items()})
    return model


def unused_name(base: str, names: Collection[str]) -> str:
    """Return the first of base, base_2, base_3 ... that is not among the names."""
    return base if base not in names else next(name for k in count(2) if (name := f"{base}_{k}") not in names)


# ----------------------------------------------------------------------------------------------------------- all nodes
def bodies(node: NodeProto) -> Iterator[GraphProto]:
    """Yield the graphs among a node's attributes."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def nodes_within(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    """Yield the nodes, and the nodes in their bodies."""
    for node in nodes:
        yield node
        for body in bodies(node):
            yield from nodes_within(body.node)


def nodes_of(model: ModelProto) -> Iterator[NodeProto]:
    """Yield all nodes of a model: those of its graph and its functions, and in their bodies."""
    for container in (model.graph, *model.functions):
        yield from nodes_within(container.node)


# --------------------------------------------------------------------------------------------------- values' names
def names_read(nodes: Iterable[NodeProto]) -> set[str]:
    """Return the names that nodes read; bodies read values from outside, too."""
    names: set[str] = set()
    for node in nodes:
        names.update(name for name in node.input if name)
        for body in bodies(node):
            inside = {value.name for value in body.input} | names_written(body.node)
            names |= (names_read(body.node) | {value.name for value in body.output}) - inside
    return names


def names_written(nodes: Iterable[NodeProto]) -> set[str]:
    """Return the names of the values that nodes compute."""
    return {name for node in nodes for name in node.output if name}


def add_new_nodes(nodes: Nodes, more_nodes: Iterable[NodeProto]) -> Nodes:
    """Return the nodes and those of the others whose values they do not compute already."""
    known = names_written(nodes)
    return [*nodes, *(node for node in more_nodes if node.output[0] not in known)]


def rename_values(nodes: Iterable[NodeProto], names: Mapping[str, str]) -> Nodes:
    """Return copies of the nodes with other names, in bodies too."""
    copies = []
    for node in nodes:
        copy = NodeProto()
        copy.CopyFrom(node)
        copies.append(copy)
    for copy in nodes_within(copies):
        copy.input[:] = [names.get(name, name) for name in copy.input]
        copy.output[:] = [names.get(name, name) for name in copy.output]
        for body in bodies(copy):
            for value in [*body.input, *body.output]:
                value.name = names.get(value.name, value.name)
    return copies


def select_needed(nodes: Iterable[NodeProto], names_wanted: Iterable[str]) -> Nodes:
    """Return the nodes that these names need."""
    names, needed_nodes = set(names_wanted), []
    for node in reversed(list(nodes)):
        if names.intersection(node.output):
            needed_nodes.append(node)
            names |= names_read([node])
    return needed_nodes[::-1]


# ------------------------------------------------------------------------------------------------- graphs and models
def graphs(graph: GraphProto, outer: ElementTypes | None = None) -> Iterator[tuple[GraphProto, ElementTypes]]:
    """Yield a graph and the bodies in it, each with the types of the values that it sees, as far as they are known."""
    types = dict(outer or {})
    types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    types |= {tensor.values.name: tensor.values.data_type for tensor in graph.sparse_initializer}
    for value in (*graph.input, *graph.value_info, *graph.output):
        if kind := value.type.tensor_type.elem_type:
            types[value.name] = kind
    yield graph, types
    for node in graph.node:
        for body in bodies(node):
            yield from graphs(body, types)


def drop_import(model: ModelProto, *domains: str) -> None:
    """Remove the imports of domains that no node is in any more."""
    used = {node.domain for node in nodes_of(model)}
    entries = [entry for entry in model.opset_import if entry.domain not in domains or entry.domain in used]
    del model.opset_import[:]
    model.opset_import.extend(entries)
