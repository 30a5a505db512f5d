"""Object graphs of TensorFlow 2: through which objects a variable is reached, in checkpoints and SavedModels.

A checkpoint of objects has its variables by keys such as ``model/layer-1/cell/kernel/.ATTRIBUTES/VARIABLE_VALUE``, and
among them, as a text, the graph of the objects, a TrackableObjectGraph. A SavedModel has a SavedObjectGraph, too, which
says what its functions have captured. In both, objects are numbered, and each names its children. Their fields are in
`schema`; those of checkpoints besides are the attributes of an object, each with a name such as VARIABLE_VALUE, a full
name such as "gru/gru_cell/kernel", and a key.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Iterator
from typing import NamedTuple

import numpy as np

from .schema import CAPTURED, CAPTURES, CHILD, CONSTANT, OBJECT, OBJECTS
from .wire import Message

GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
SLOT = "/.OPTIMIZER_SLOT/"
MOST_OBJECTS = 2**18  # besides one for each 16 bytes
MOST_CHILDREN = 2**17
MOST_CAPTURED = 2**16
_ATTRIBUTES = 2  # the field of an object in a checkpoint
_NAME, _FULL_NAME, _KEY = 1, 2, 3  # the fields of an attribute
_DEEPEST, _LONGEST = 64, 1000  # objects and characters of a name that is a path
_MOST_LETTERS = 2**23  # of all such names


class Objects:
    """The objects of a graph, by their numbers; the first is the root."""

    def __init__(self, message: Message) -> None:
        self.message = message
        self._starts, self._ends = array("Q"), array("Q")
        most = MOST_OBJECTS + len(message) // 16
        for entry in message.inside(OBJECTS.nodes):
            self._starts.append(entry.start)
            self._ends.append(entry.end)
            if len(self._starts) > most:
                raise entry.error(f"there are more than {most} objects", "no model has so many")

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, k: int) -> Message:
        return Message(self.message.file, self._starts[k], self._ends[k])

    def children(self, k: int) -> Iterator[tuple[int, Message]]:
        """Yield the number of each child, and the message that names it."""
        for count, child in enumerate(self[k].inside(OBJECT.children)):
            number = child.integer(CHILD.node_id)
            if not 0 <= number < len(self):
                raise child.error(f"an object has the number {number}; there are {len(self)}")
            if count == MOST_CHILDREN:
                raise child.error(f"an object has more than {MOST_CHILDREN} children", "no model has so many")
            yield number, child


def _name(child: Message) -> str:
    return child.last_texts(CHILD.local_name)[0]


class Named(NamedTuple):
    """The names of the variables of an object checkpoint, by their keys."""

    names: dict[str, str]
    """A unique name for each: the full name if it is unique and has a scope, else the path through the objects."""
    full: dict[str, str]
    """Full names, of which several may be the same."""
    slots: set[str]
    """The keys of variables that an optimizer keeps for others."""


def named(objects: Objects, keys: Collection[str]) -> Named:
    """Name the keys that are variables in a graph of objects."""
    holders: dict[int, str] = {}
    full: dict[str, str] = {}
    for k in range(len(objects)):
        for attribute in objects[k].inside(_ATTRIBUTES):
            kind, its_name, key = attribute.last_texts(_NAME, _FULL_NAME, _KEY)
            if kind == "VARIABLE_VALUE" and key in keys and key not in full and k not in holders:
                holders[k], full[key] = key, its_name
    walk = _Walk(objects, holders)
    slots = {key for key in full if SLOT in key}
    slots |= {holders[k] for optimizer in walk.optimizers for k, _ in objects.children(optimizer) if k in holders}
    counts = Counter(full.values())
    scoped = {k for k, key in holders.items() if "/" in full[key] and counts[full[key]] == 1}
    mixed = {walk.edges[k][0] for k in walk.edges if k not in scoped}  # what one object has is named alike
    names = {}
    for k, key in holders.items():
        if k in scoped and not (k in walk.edges and walk.edges[k][0] in mixed):
            names[key] = full[key]
        elif k in walk.edges:
            names[key] = walk.path(k) or key
    uses = Counter([*names.values(), *keys])
    return Named({key: name for key, name in names.items() if uses[name] == 1}, full, slots)


class _Walk:
    """From the root to all objects, by the shortest ways.

    Attributes
    ----------
    edges : dict of int to (int, str)
        Of each variable an object that has it, and its name there. Of several, one that has it as an attribute, such as
        "kernel", which says more than its number in a list.
    optimizers : set of int
        The lists of the variables of optimizers.
    """

    def __init__(self, objects: Objects, holders: Collection[int]) -> None:
        count = len(objects)
        self._objects = objects
        self._parents = array("q", [-1]) * count
        self._starts, self._ends = array("Q", [0]) * count, array("Q", [0]) * count  # of what names it there
        self.edges: dict[int, tuple[int, str]] = {}
        self.optimizers: set[int] = set()
        self._paths = {0: "/"}
        self._left = _MOST_LETTERS
        seen, order = bytearray(count), array("q", [0] if count else [])
        seen[:1] = b"\1"
        for k in order:  # which grows meanwhile
            variables, counts = -1, False
            for child, message in objects.children(k):
                name = _name(message)
                variables = child if name == "_variables" else variables
                counts = counts or name == "_iterations"
                if child in holders and (
                    child not in self.edges or self.edges[child][1].isdecimal() > name.isdecimal()
                ):
                    self.edges[child] = k, name
                if not seen[child]:
                    seen[child] = 1
                    self._parents[child], self._starts[child], self._ends[child] = k, message.start, message.end
                    order.append(child)
            if counts and variables >= 0:
                self.optimizers.add(variables)

    def path(self, k: int) -> str:
        """Return the names from the root to a variable, joined with "/"; "" if they are too many or too long."""
        k, name = self.edges[k]
        to_root: list[int] = []
        while k not in self._paths and len(to_root) < _DEEPEST:
            to_root.append(k)
            k = self._parents[k]
        path = self._paths.get(k, "")
        for ancestor in reversed(to_root if path else []):
            message = Message(self._objects.message.file, self._starts[ancestor], self._ends[ancestor])
            path += f"{_name(message)}/" if path else ""
            path = path if len(path) < _LONGEST and self._left > 0 else ""
            self._paths[ancestor] = path
            self._left -= len(path)
        path = f"{path[1:]}{name}" if path else ""
        self._left -= len(path)
        return path if len(path) < _LONGEST and self._left > 0 else ""


class Capture(NamedTuple):
    """A value that a function of a SavedModel captures: the variable with a key, or a node of the graph."""

    key: str = ""
    node: str = ""


def captured(saved: Objects, tracked: Objects) -> dict[str, list[Capture]]:
    """Return the last arguments of each function of a SavedModel, by the objects of its graph and its checkpoint."""
    keys = _keys(saved, tracked)
    captures_of: dict[str, list[Capture]] = {}
    count = 0
    for entry in saved.message.inside(OBJECTS.concrete_functions):
        (function,), value = entry.last_texts(CAPTURES.key), entry.last(CAPTURES.value)
        captures = []
        for number in map(int, value.integers(CAPTURED.bound_inputs, np.dtype(np.int64))) if value else ():
            if not 0 <= number < len(saved):
                raise entry.error(f"an object has the number {number}; there are {len(saved)}")
            constant = saved[number].last(OBJECT.constant)
            node = constant.last_texts(CONSTANT.operation)[0] if constant else ""
            captures.append(Capture(keys.get(number, ""), node))
            count += 1
            if count > MOST_CAPTURED + len(saved.message) // 16:
                raise entry.error("functions capture more than those of any model")
        captures_of[function] = captures
    return captures_of


def _keys(saved: Objects, tracked: Objects) -> dict[int, str]:
    """Return the keys of a SavedModel's variables: of objects that the same names lead to in its checkpoint."""
    keys: dict[int, str] = {}
    if not len(saved) or not len(tracked):
        return keys
    seen, seen_tracked = bytearray(len(saved)), bytearray(len(tracked))
    seen[0] = seen_tracked[0] = 1
    pairs = array("q", [0, 0])
    at = 0
    while at < len(pairs):
        saved_k, tracked_k = pairs[at], pairs[at + 1]
        at += 2
        if saved[saved_k].last(OBJECT.variable) is not None:
            attributes = (attribute.last_texts(_NAME, _KEY) for attribute in tracked[tracked_k].inside(_ATTRIBUTES))
            key = next((key for kind, key in attributes if kind == "VARIABLE_VALUE"), "")
            keys.update({saved_k: key} if key else {})
        partners = {_name(message): child for child, message in tracked.children(tracked_k)}
        for child, message in saved.children(saved_k):
            partner = partners.get(_name(message), -1)
            if partner >= 0 and not seen[child] and not seen_tracked[partner]:
                seen[child] = seen_tracked[partner] = 1
                pairs.extend((child, partner))
    return keys
