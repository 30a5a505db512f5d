"""Object graphs of TensorFlow 2: through which objects a variable is reached, in checkpoints and SavedModels.

A checkpoint of objects has its variables by keys such as ``model/layer-1/cell/kernel/.ATTRIBUTES/VARIABLE_VALUE``, and
among them, as a text, the graph of the objects, a TrackableObjectGraph. A SavedModel has a SavedObjectGraph, too, which
says what its functions have captured. In both, objects are numbered, and each names its children. Their fields are in
`schema`; those of checkpoints besides are the attributes of an object, each with a name such as VARIABLE_VALUE, a full
name such as "gru/gru_cell/kernel", and a key.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from .schema import CAPTURED, CAPTURES, CHILD, CONSTANT, OBJECT, OBJECTS
from .wire import Message

GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
SLOT = "/.OPTIMIZER_SLOT/"
_VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"  # how the key of a variable ends
MOST_OBJECTS = 2**18  # besides one for each 16 bytes
MOST_CHILDREN = 2**17
MOST_CAPTURED = 2**16
_ATTRIBUTES = 2  # the field of an object in a checkpoint
_NAME, _FULL_NAME, _KEY = 1, 2, 3  # the fields of an attribute
_LONGEST = 1000  # characters of a name that is a path
_MOST_LETTERS = 2**24  # of all paths


class Objects:
    """The objects of a graph, by their numbers; the first is the root."""

    def __init__(self, message: Message) -> None:
        self.message = message
        self.messages = [*message.inside(OBJECTS.nodes, MOST_OBJECTS + len(message) // 16, "objects")]

    def check_number(self, k: int, message: Message) -> int:
        """Return the number of an object that a message names, if there is one."""
        if not 0 <= k < len(self.messages):
            raise message.error(f"an object has the number {k}; there are {len(self.messages)}")
        return k

    def children(self, k: int) -> Iterator[tuple[int, str]]:
        """Yield the number and the name of each child."""
        for child in self.messages[k].inside(OBJECT.children, MOST_CHILDREN, "children of an object"):
            yield self.check_number(child.integer(CHILD.node_id), child), child.last_texts(CHILD.local_name)[0]


class Named(NamedTuple):
    """The names of the variables of an object checkpoint, by their keys."""

    names: dict[str, str]
    """A unique name for each: the full name if it is unique and has a scope, else the path through the objects."""
    slots: set[str]
    """The keys of variables that an optimizer keeps for others."""


def named(objects: Objects, keys: Collection[str]) -> Named:
    """Name the keys that are variables in a graph of objects."""
    holders: dict[int, str] = {}
    full: dict[str, str] = {}
    for k, message in enumerate(objects.messages):
        for attribute in message.inside(_ATTRIBUTES):
            kind, full_name, key = attribute.last_texts(_NAME, _FULL_NAME, _KEY)
            if kind == "VARIABLE_VALUE" and key in keys and key not in full and k not in holders:
                holders[k], full[key] = key, full_name
    paths, of_optimizers = _find_paths(objects, holders)
    slots = {key for key in full if SLOT in key} | {holders[k] for k in of_optimizers}
    counts = Counter(full.values())
    scoped = {k for k, key in holders.items() if "/" in full[key] and counts[full[key]] == 1}
    mixed = {path.owner for k, path in paths.items() if k not in scoped}  # what one object has is named alike
    names = {}
    for k, key in holders.items():
        owner, path = paths.get(k, (-1, key))
        names[key] = full[key] if k in scoped and owner not in mixed else path
    uses = Counter([*names.values(), *keys])
    return Named({key: name for key, name in names.items() if uses[name] == 1}, slots)


class _Path(NamedTuple):
    """The object that has a variable, and the names from the root to the variable."""

    owner: int
    path: str


def _find_paths(objects: Objects, variables: Collection[int]) -> tuple[dict[int, _Path], set[int]]:
    """Find the shortest path of names from the root to each variable, and the variables of optimizers.

    Of several paths, one that ends with an attribute, such as "kernel", says more than one with a number in a list.
    """
    paths: dict[int, str] = {0: ""} if objects.messages else {}
    of_variables: dict[int, _Path] = {}
    lists: set[int] = set()
    letters = 0
    for k in (order := [*paths]):  # which grows meanwhile
        children = [*objects.children(k)]
        if any(name == "_iterations" for _, name in children):
            lists.update(child for child, name in children if name == "_variables")
        for child, name in children:
            path = f"{paths[k]}/{name}" if k else name
            if len(path) > _LONGEST or letters > _MOST_LETTERS:
                continue
            if child not in paths:
                paths[child] = path
                order.append(child)
                letters += len(path)
            if child in variables and (
                child not in of_variables or of_variables[child].path.rpartition("/")[2].isdecimal() > name.isdecimal()
            ):
                of_variables[child] = _Path(k, path)
    of_optimizers = {child for number in lists for child, _ in objects.children(number)}
    return of_variables, of_optimizers.intersection(variables)


def captured(saved: Objects, nodes: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the nodes that the functions of a SavedModel have captured, as their last arguments; "" if not known.

    `saved` are the objects of the SavedModel, `nodes` those of its variables, by their keys in the checkpoint.
    """
    variables, node_by_object = _find_variables(saved, nodes), dict[int, str]()
    captured_by: dict[str, list[str]] = {}
    count = 0
    for entry in saved.message.inside(OBJECTS.concrete_functions):
        (function,), value = entry.last_texts(CAPTURES.key), entry.last(CAPTURES.value)
        numbers = value.integers(CAPTURED.bound_inputs, np.dtype(np.int64)).tolist() if value else []
        count += len(numbers)
        entry.limit(count, MOST_CAPTURED + len(saved.message) // 16, "values that functions capture")
        for k in {*numbers} - node_by_object.keys():
            constant = saved.messages[saved.check_number(k, entry)].last(OBJECT.constant)
            node_by_object[k] = constant.last_texts(CONSTANT.operation)[0] if constant else variables.get(k, "")
        captured_by[function] = [node_by_object[k] for k in numbers]
    return captured_by


def _find_variables(saved: Objects, nodes: Mapping[str, str]) -> dict[int, str]:
    """Return the nodes of objects that are variables: a variable's key has the names that lead to its object."""
    variables: dict[int, str] = {}
    children: dict[int, dict[str, int]] = {}
    for key, node in nodes.items():
        k = 0
        for name in key.removesuffix(_VALUE).split("/") if saved.messages else ():
            if k not in children:
                children[k] = {text.replace(".", "..").replace("/", ".S"): child for child, text in saved.children(k)}
            if (k := children[k].get(name, -1)) < 0:
                break
        else:
            variables[k] = node
    return variables
