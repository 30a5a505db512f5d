"""Bodies for the block ops in models that came from TensorFlow."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager

from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, inliner, shape_inference

from blockcell.errors import short
from blockcell.optable import OPS

from .build import DOMAIN, function
from .config import OLDEST_OPSET, Config, Value, arguments_of, config
from .loops import reads

FROM_TENSORFLOW = "ai.onnx.converters.tensorflow"  # where tf2onnx puts ops that it is told to leave alone
DOMAINS = ("", "ai.onnx", DOMAIN, FROM_TENSORFLOW)
WAITING = f"{DOMAIN}.waiting"  # nobody's: a node without a body must not take the function of one that has its own
MOST_NODES = 2**18
NEW_OPSET = 18  # for a model that has no ONNX operators yet

Types = Mapping[str, int]


def link(model: ModelProto) -> ModelProto:
    """Give a model with TensorFlow's block ops in it what it needs to run.

    Converters such as tf2onnx leave nodes like ``BlockLSTM`` as they are, with TensorFlow's arguments in TensorFlow's
    order and nothing that says what they compute. Such a node, in the default domain, in ``blockcell`` or in
    ``ai.onnx.converters.tensorflow``, becomes a call of a function that the model brings along: the graph of `build`
    for the node's attributes and dtype. Nodes in bodies of Scan, Loop and If are found too. Functions of the model's
    own that have such nodes in them are inlined, because values in functions have no types.

    Parameters
    ----------
    model : onnx.ModelProto
        It is not changed. Attributes that a node lacks have TensorFlow's defaults (``LSTMBlockCell`` and ``BlockLSTM``
        clip at 3.0 and add 1.0 to the forget gate); others than the op's, such as ``T``, are dropped.

    Returns
    -------
    onnx.ModelProto
        Its graph inputs and outputs are those of ``model``. Arguments that cannot influence the results are no longer
        inputs of their nodes; those of them that were initializers for nobody else are gone.

    Raises
    ------
    TypeError
        ``model`` is not a model.
    ValueError
        The version of ONNX's operators is below 15, or a node cannot be completed: an input or a required attribute is
        missing, or the dtype cannot be found or is not float32, float64 or float16. The message names the node.
    """
    if not isinstance(model, ModelProto):
        raise TypeError(f"model is of type {type(model).__name__}; expected an onnx.ModelProto")
    linked = _inlined(model)
    with_body = {(made.domain, made.name) for made in linked.functions}
    found = [each for graph, _ in graphs(linked.graph) for each in graph.node if _is_block_op(each, with_body)]
    if not found:
        return linked
    opset = _opset(linked, found[0])
    given = {name for each in found for name in each.input}
    for each in found:
        each.domain = WAITING
    linked.opset_import.append(helper.make_opsetid(WAITING, 1))
    _add_import(linked, DOMAIN, 1)
    linked.ir_version = max(linked.ir_version, 8)  # from where on there are functions

    names: dict[tuple[object, ...], str] = {}
    while waiting := [each for each in found if each.domain == WAITING]:
        # What a node gives may tell the dtype of the next one, through whatever lies between.
        with _by_onnx("infer the types of"):
            inferred = shape_inference.infer_shapes(linked)
        for (graph, _), (_, types) in zip(graphs(linked.graph), graphs(inferred.graph), strict=True):
            for each in graph.node:
                if each.domain == WAITING and (kind := _kind(each, types)):
                    _complete(linked, each, _config(each, kind, opset), names)
        if len(waiting) == sum(each.domain == WAITING for each in found):
            raise ValueError(_untyped(waiting[0]))
    drop_import(linked, WAITING, FROM_TENSORFLOW)
    _drop_unread(linked.graph, given)
    return linked


# ------------------------------------------------------------------------------------------------------ finding nodes
def bodies(each: NodeProto) -> Iterator[GraphProto]:
    for attribute in each.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def graphs(graph: GraphProto, outer: Types | None = None) -> Iterator[tuple[GraphProto, Types]]:
    """The graph and the bodies in it, each with the types of the values that it sees, as far as they are known."""
    types = dict(outer or {})
    types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    types |= {tensor.values.name: tensor.values.data_type for tensor in graph.sparse_initializer}
    for value in (*graph.input, *graph.value_info, *graph.output):
        if kind := value.type.tensor_type.elem_type:
            types[value.name] = kind
    yield graph, types
    for each in graph.node:
        for body in bodies(each):
            yield from graphs(body, types)


def nodes_within(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    """The nodes and those in their bodies."""
    for each in nodes:
        yield each
        for body in bodies(each):
            yield from nodes_within(body.node)


def _is_block_op(each: NodeProto, with_body: Collection[tuple[str, str]]) -> bool:
    return each.op_type in OPS and each.domain in DOMAINS and (each.domain, each.op_type) not in with_body


@contextmanager
def _by_onnx(what: str) -> Iterator[None]:
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:  # of many kinds, where a model is not what onnx takes it for
        raise ValueError(f"onnx cannot {what} the model: {error}") from error


def _inlined(model: ModelProto) -> ModelProto:
    """A copy of the model without functions that have block ops in them."""
    copy = ModelProto()
    copy.CopyFrom(model)
    while True:
        with_body = {(made.domain, made.name) for made in copy.functions}
        found = [
            (made.domain, made.name)
            for made in copy.functions
            if any(_is_block_op(each, with_body) for each in nodes_within(made.node))
        ]
        if not found:
            return copy
        _check_growth(copy)
        with _by_onnx("inline the functions of"):
            copy = inliner.inline_selected_functions(copy, found)


def _check_growth(model: ModelProto) -> None:
    """Raise a ValueError where a function calls itself, or where there would be too many nodes without functions."""
    functions = {(made.domain, made.name): made for made in model.functions}
    sizes: dict[tuple[str, str], int] = {}

    def size(nodes: Iterable[NodeProto], within: Collection[tuple[str, str]]) -> int:
        total = 0
        for each in nodes_within(nodes):
            key = each.domain, each.op_type
            if key in within:
                raise ValueError(
                    f"the function {key[1]} of the domain {key[0]!r} calls itself, which ONNX does not allow"
                )
            if key in functions and key not in sizes:
                sizes[key] = size(functions[key].node, {*within, key})
            total += sizes.get(key, 1)
        return total

    try:
        most = max(size(part, ()) for part in (model.graph.node, *(made.node for made in model.functions)))
    except RecursionError:
        raise ValueError("the model's functions call one another too deeply") from None
    if most > MOST_NODES:
        raise ValueError(f"the model would have {most} nodes without its functions; expected at most {MOST_NODES}")


# --------------------------------------------------------------------------------------------------- completing a node
def _kind(each: NodeProto, types: Types) -> int:
    """The type of the node's arrays, 0 where it is not known (yet)."""
    op = OPS[each.op_type]
    arguments = dict(zip((tensor.name for tensor in arguments_of(op)), each.input, strict=False))
    arguments.pop("seq_len_max", None)
    results = zip((tensor.name for tensor in op.outputs), each.output, strict=False)
    kinds: dict[int, str] = {}
    for name, value in [*arguments.items(), *results]:
        if kind := types.get(value, 0):
            kinds.setdefault(kind, f"{name} ({value!r}) is {TensorProto.DataType.Name(kind)}")
    if len(kinds) > 1:
        raise ValueError(f"{_called(each)}: {' and '.join(kinds.values())}; expected one dtype")
    return next(iter(kinds), 0)


def _config(each: NodeProto, kind: int, opset: int) -> Config:
    op = OPS[each.op_type]
    attrs: dict[str, Value] = {}
    for attribute in each.attribute:
        if attribute.name not in [known.name for known in op.attributes]:
            continue
        if attribute.name in attrs:
            raise ValueError(f"{_called(each)} has the attribute {attribute.name} twice")
        if attribute.ref_attr_name:
            raise ValueError(f"{_called(each)} has {attribute.name} of a function, but it is in none; expected a value")
        value = short(helper.get_attribute_value(attribute))
        if attribute.name == "use_peephole":  # ONNX has no attributes that are true or false
            if attribute.type != AttributeProto.INT or attribute.i not in (0, 1):
                raise ValueError(f"{_called(each)} has use_peephole {value}; expected the integer 0 or 1")
            attrs[attribute.name] = bool(attribute.i)
        elif attribute.name == "activation":
            if attribute.type != AttributeProto.STRING:
                raise ValueError(f"{_called(each)} has activation {value}; expected a string")
            attrs[attribute.name] = attribute.s.decode(errors="replace")
        elif attribute.type != AttributeProto.FLOAT:
            raise ValueError(f"{_called(each)} has {attribute.name} {value}; expected a float")
        else:
            attrs[attribute.name] = attribute.f
    try:
        return config(op.name, helper.tensor_dtype_to_np_dtype(kind), attrs=attrs, opset=opset)
    except ValueError as error:
        raise ValueError(f"{_called(each)}: {error}") from None


def _complete(model: ModelProto, each: NodeProto, c: Config, names: dict[tuple[object, ...], str]) -> None:
    """Make the node a call of a function that the model has then."""
    key = (c.op.name, c.dtype, *c.attrs.items())
    with_body = {made.name: made for made in model.functions if made.domain == DOMAIN}
    if key not in names:
        numbered = (f"{c.op.name}_{number}" for number in range(2, len(with_body) + 3))
        names[key] = next(name for name in (c.op.name, *numbered) if name not in with_body)
        made = function(c, names[key])
        made.doc_string = f"{c.dtype}, {json.dumps(c.attrs)}\n\n{made.doc_string}"
        model.functions.append(made)
        with_body[made.name] = made
    made = with_body[names[key]]
    arguments = [tensor.name for tensor in arguments_of(c.op)]
    results = [tensor.name for tensor in c.op.outputs]
    for part, has, takes in [("inputs", each.input, arguments), ("outputs", each.output, results)]:
        if len(has) > len(takes):
            raise ValueError(f"{_called(each)} has {len(has)} {part}; expected {len(takes)}: {', '.join(takes)}")
    given = dict(zip(arguments, each.input, strict=False))
    if missing := [name for name in made.input if not given.get(name)]:
        raise ValueError(f"{_called(each)}: {', '.join(missing)} missing; expected all of {', '.join(made.input)}")
    each.input[:] = [given[name] for name in made.input]
    each.op_type, each.domain = made.name, DOMAIN
    del each.attribute[:]


def _called(each: NodeProto) -> str:
    """The node in messages."""
    name = each.name or next((output for output in each.output if output), "")
    return f"{each.op_type} node {name!r}"


def _untyped(each: NodeProto) -> str:
    arguments = zip((tensor.name for tensor in arguments_of(OPS[each.op_type])), each.input, strict=False)
    values = ", ".join(f"{name} ({value!r})" for name, value in arguments if value and name != "seq_len_max")
    return (
        f"{_called(each)}: no type is known of {values}, so its dtype cannot be found; expected at least one of them "
        "to be a graph input or an initializer or to have an entry in value_info"
    )


def _drop_unread(graph: GraphProto, names: Collection[str]) -> None:
    """Those of the names' initializers that nobody reads any more, of which onnxruntime would complain."""
    read = reads(graph.node) | {value.name for value in (*graph.input, *graph.output)}
    kept = [tensor for tensor in graph.initializer if tensor.name in read or tensor.name not in names]
    del graph.initializer[:]
    graph.initializer.extend(kept)


# ------------------------------------------------------------------------------------------------------------- imports
def _opset(model: ModelProto, each: NodeProto) -> int:
    """The version of ONNX's operators in the model."""
    versions: list[int] = [entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")]
    if not versions:
        model.opset_import.append(helper.make_opsetid("", NEW_OPSET))
        return NEW_OPSET
    if versions[0] < OLDEST_OPSET:
        raise ValueError(
            f"{_called(each)} is in a model of opset {versions[0]}; expected {OLDEST_OPSET} or newer, which converters "
            "can be asked for (tf2onnx: --opset 18)"
        )
    return versions[0]


def _add_import(model: ModelProto, domain: str, version: int) -> None:
    if all(entry.domain != domain for entry in model.opset_import):
        model.opset_import.append(helper.make_opsetid(domain, version))


def drop_import(model: ModelProto, *domains: str) -> None:
    """Those of the domains that no node is in any more."""
    used = {each.domain for part in (model.graph, *model.functions) for each in nodes_within(part.node)}
    kept = [entry for entry in model.opset_import if entry.domain not in domains or entry.domain in used]
    del model.opset_import[:]
    model.opset_import.extend(kept)
