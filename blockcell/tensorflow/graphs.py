"""Graphs: GraphDef (``.pb``), MetaGraphDef (``.meta``) and SavedModel (``saved_model.pb``).

A graph is a dict of nodes by name, and so is the body of each of its functions. What a node has is parsed when it is
asked for, and tensors are read where they lie.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from ..errors import FormatError, plain
from ..optable import Array
from . import schema, wire
from .mapped import File
from .schema import ATTRIBUTE, LIST, NODE, VALUE
from .tensors import Dtype, Stored, Tensor, dtype_named, dtype_of, shape_of, values_of
from .wire import BYTES, Message

MOST_NODES = 2**17  # in a file, besides one for each 100 bytes
MOST_REGIONS = 2**16
MOST_ITEMS = 2**16  # inputs, attributes and such of one node, or in a list that is an attribute
PACKAGE = "memmapped_package://"  # what names in a memory-mapped package begin with


class Called(NamedTuple):
    """A function that an attribute names."""

    name: str


class Node:
    """A node of a graph."""

    __slots__ = ("_message", "name", "op")

    def __init__(self, message: Message) -> None:
        self._message = message
        self.name, self.op = message.last_texts(NODE.name, NODE.op)
        if not self.name or not self.op:
            raise message.error(f"a node has the name {self.name!r} and the op {self.op!r}")

    @property
    def inputs(self) -> tuple[str, ...]:
        """The inputs as written: ``"name"``, ``"name:1"``, ``"^name"``; in functions ``"name:output:0"``."""
        return tuple(text.text() for text in _few(self._message, NODE.input))

    @property
    def attrs(self) -> dict[str, Any]:
        """The attributes that are there; those that have their default may be missing.

        Numbers, bools and texts are Python's, dtypes TensorFlow's names such as ``"float32"``, shapes tuples with None
        for an unknown size, or None, tensors `Tensor`, functions `Called`, lists are lists of these.
        """
        attributes: dict[str, Any] = {}
        for entry in _few(self._message, NODE.attr):
            value = entry.last(ATTRIBUTE.value)
            attributes[entry.last_texts(ATTRIBUTE.key)[0]] = _value(value) if value else None
        return attributes

    def error(self, problem: str, *mend: str) -> FormatError:
        """Make the error to raise for something wrong with the node."""
        return self._message.error(f"the node {self.name!r}: {problem}", *mend)

    def __repr__(self) -> str:
        return f"<{self.op} {self.name!r}>"


class Function(NamedTuple):
    """A function of a graph's library."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: dict[str, Node]
    returned: dict[str, str]
    """The value of each output: ``"name:output:0"`` or an argument."""


class Region(Stored):
    """The tensor of an ImmutableConst, which is a region of a memory-mapped package."""

    __slots__ = ("_region",)

    def __init__(self, region: Message, dtype: Dtype, shape: tuple[int, ...]) -> None:
        size = math.prod(shape) * (dtype.stored.itemsize if dtype.stored else 0)
        if size > len(region):
            raise region.error(f"a region of {len(region)} bytes is for a tensor of {dtype.name} and shape {shape}")
        self._region, self._dtype, self.shape = Message(region.file, region.start, region.start + size), dtype, shape

    def read(self) -> Array:
        """Return the values in place."""
        if self._dtype.stored is None:
            raise self._region.error(f"a tensor is of {self.dtype}", "only numbers are read")
        return values_of(self._region.view, self._dtype).reshape(self.shape)


class Graph:
    """A graph, with the functions that its nodes call."""

    def __init__(
        self,
        message: Message,
        *,
        tags: Sequence[str] = (),
        regions: Mapping[str, Message] | None = None,
        others: int = 0,
        saver: str = "",
        objects: Message | None = None,
    ) -> None:
        """`regions` are those of a memory-mapped package, `others` the nodes of other graphs in the file."""
        self.saver = saver
        """The node that restores all variables, or the call of the function that does."""
        self.objects = objects
        """The SavedObjectGraph of a SavedModel of TensorFlow 2."""
        self.tags = tuple(tags)
        """The tags of a SavedModel's graph, such as ``"serve"``."""
        self.nodes = _nodes(message.inside(schema.GRAPH.node), others)
        """In the file's order, which may be any."""
        self.functions: dict[str, Function] = {}
        self.size = len(self.nodes) + 8  # with what takes as much memory
        self._regions = regions or {}
        for library in message.inside(schema.GRAPH.library):
            for definition in library.inside(schema.LIBRARY.function):
                function = _function(definition, others + self.size)
                if function.name in self.functions:
                    raise definition.error(f"the function {function.name!r} is there twice")
                self.functions[function.name] = function
                self.size += sum(map(len, function[1:])) + 4
                _count(definition, others + self.size)

    def constant(self, node: Node) -> Stored | None:
        """Return the tensor of a Const or ImmutableConst; None of another node."""
        if node.op not in ("Const", "ImmutableConst"):
            return None
        attrs = node.attrs
        if node.op == "Const":
            if not isinstance(attrs.get("value"), Tensor):
                raise node.error("a Const has no value")
            return cast(Tensor, attrs["value"])
        region = self._regions.get(str(attrs.get("memory_region_name")))
        dtype, shape = attrs.get("dtype"), attrs.get("shape")
        if region is None:
            mend = "open the .pbmm file that it is in"
            raise node.error(f"the memory region {attrs.get('memory_region_name')!r} is not in this file", mend)
        if not isinstance(dtype, str) or not isinstance(shape, tuple) or None in shape:
            raise node.error(f"an ImmutableConst has dtype {dtype!r} and shape {shape!r}")
        return Region(region, dtype_named(dtype), shape)

    def __repr__(self) -> str:
        tags = f" {', '.join(self.tags)}:" if self.tags else ""
        return plain(f"<graph:{tags} {len(self.nodes)} nodes, {len(self.functions)} functions>")


# ---------------------------------------------------------------------------------------------------------------- files
def read(file: File) -> Graph:
    """Read a file that is a graph, such as a frozen one."""
    graph = Graph(Message(file, 0, len(file)))
    if not graph.nodes:
        raise file.error(0, "it has no nodes", "expected a graph of TensorFlow's, a GraphDef")
    return graph


def read_meta(file: File) -> Graph:
    """Read the graph beside a checkpoint."""
    return _meta(Message(file, 0, len(file)), 0)


def read_saved_model(file: File) -> list[Graph]:
    """Read the graphs of a SavedModel."""
    graphs: list[Graph] = []
    others = 0
    for message in Message(file, 0, len(file)).inside(schema.SAVED_MODEL.meta_graphs):
        graphs.append(_meta(message, others))
        others += graphs[-1].size
    if not graphs:
        raise file.error(0, "it has no graphs", "expected a saved_model.pb")
    return graphs


def read_package(file: File) -> Graph:
    """Read the graph of a memory-mapped package such as DeepSpeech's ``.pbmm``."""
    regions = _read_regions(file)
    if PACKAGE + "." not in regions:
        raise file.error(len(file), "its directory names no graph")
    return Graph(regions[PACKAGE + "."], regions=regions)


def _meta(message: Message, others: int) -> Graph:
    fields = schema.META_GRAPH
    graph, info, saver = (message.last(n) for n in (fields.graph_def, fields.meta_info_def, fields.saver_def))
    _count(message, others)
    if graph is None:
        raise message.error("it has no graph", "expected a .meta or saved_model.pb of TensorFlow's")
    tags = [tag.text() for tag in _few(info, schema.META_INFO.tags)] if info else ()
    restore_op_name = saver.last_texts(schema.SAVER.restore_op_name)[0] if saver else ""
    objects = message.last(fields.object_graph_def)
    return Graph(graph, tags=tags, others=others, saver=restore_op_name, objects=objects)


def _read_regions(file: File) -> dict[str, Message]:
    """Read the directory of a package, whose last 8 bytes say where it begins."""
    end = len(file) - 8
    start = int.from_bytes(file.buffer[max(0, end) :], "little")
    if end < 0 or start > end:
        problem = f"its directory is said to be at byte {start}"
        raise file.error(max(0, end), problem, "expected a memory-mapped package, complete")
    messages = Message(file, start, end).inside(1, MOST_REGIONS, "parts")
    elements = [(element.integer(1), element.integer(3), element.last_texts(2)[0]) for element in messages]
    regions: dict[str, Message] = {}
    past = start
    for offset, length, name in sorted(elements, reverse=True):
        stop = offset + length if length else past  # older files have no length
        if not 0 <= offset <= stop <= start:
            raise file.error(start, f"{name!r} is said to be at byte {offset}, of {length} bytes")
        if name in regions:
            raise file.error(start, f"{name!r} is there twice")
        regions[name] = Message(file, offset, stop)
        past = offset
    return regions


# ---------------------------------------------------------------------------------------------------- nodes, attributes
def _nodes(messages: Iterable[Message], others: int) -> dict[str, Node]:
    nodes: dict[str, Node] = {}
    for message in messages:
        node = Node(message)
        if node.name in nodes:
            raise message.error(f"the node {node.name!r} is there twice")
        nodes[node.name] = node
        _count(message, len(nodes) + others)
    return nodes


def _count(message: Message, nodes: int) -> None:
    message.limit(nodes, MOST_NODES + len(message.file) // 100, "nodes")


def _function(message: Message, others: int) -> Function:
    function, fields = schema.FUNCTION, schema.SIGNATURE
    signature = message.last(function.signature)
    if signature is None:
        raise message.error("a function has no signature")
    inputs, outputs = (
        tuple(argument.last_texts(schema.ARGUMENT.name)[0] for argument in _few(signature, number))
        for number in (fields.input_arg, fields.output_arg)
    )
    results = [result.last_texts(schema.RETURNED.key, schema.RETURNED.value) for result in _few(message, function.ret)]
    name = signature.last_texts(fields.name)[0]
    nodes = _nodes(message.inside(function.node_def), others)
    return Function(name, inputs, outputs, nodes, {key: value for key, value in results})


def _few(message: Message, number: int) -> Iterator[Message]:
    """Iterate over the messages in the fields of a number, if they are as few as in any graph."""
    return message.inside(number, MOST_ITEMS, "inputs or such of a node or function")


_INTEGERS: dict[int, Callable[[int], Any]] = {
    LIST.i: int, LIST.b: bool, LIST.type: lambda number: dtype_of(number).name
}  # fmt: skip


def _value(message: Message) -> Any:
    """Return the value of an AttrValue, the last of its fields."""
    value = None
    for number, kind, start, end in message.fields():
        if (number, kind) == (VALUE.list, BYTES):
            value = _list(Message(message.file, start, end))
        else:
            number = LIST.func if number == VALUE.func else number
            value = _single(message.file, number, kind, start, end)
    return value


def _single(file: File, number: int, kind: int, start: int, end: int) -> Any:
    """Return one value, by the number of its field in a list."""
    value = Message(file, start, end)
    match number, kind:
        case LIST.s, wire.BYTES:
            data = bytes(value.view)
            try:
                return data.decode()
            except UnicodeDecodeError:
                return data
        case LIST.f, wire.FIXED32:
            return struct.unpack("<f", value.view)[0]
        case ((LIST.i | LIST.b | LIST.type), wire.VARINT):
            return _INTEGERS[number](value.varint())
        case LIST.shape, wire.BYTES:
            return shape_of(value)
        case LIST.tensor, wire.BYTES:
            return Tensor(value)
        case LIST.func, wire.BYTES:
            return Called(value.last_texts(schema.CALLED.name)[0])
    return None


def _list(message: Message) -> list[Any]:
    items: list[Any] = np.frombuffer(message.numbers(LIST.f, 4), "<f4").tolist()
    for number, kind, start, end in message.fields():
        if kind == BYTES and number in _INTEGERS:
            packed = message.unpack(message.file.buffer[start:end], np.dtype(np.int64))
            items += map(_INTEGERS[number], packed[: MOST_ITEMS + 1].tolist())
        elif number != LIST.f:
            items.append(_single(message.file, number, kind, start, end))
        message.limit(len(items), MOST_ITEMS, "items in an attribute")
    return items
