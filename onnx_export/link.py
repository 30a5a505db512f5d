"""`link`: models from TensorFlow get functions for their block ops."""

from __future__ import annotations

from collections.abc import Collection

from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, shape_inference

from blockcell.convert.onnx_graph import key_of
from blockcell.errors import short
from blockcell.optable import OPS

from .cells.body import op_function
from .cells.config import DEFAULT_OPSET, OLDEST_OPSET, Config, Form, Value, input_tensors, op_config
from .nodes import (
    DOMAIN,
    ElementTypes,
    drop_import,
    graphs,
    names_read,
    nodes_within,
    unused_name,
)

FROM_TENSORFLOW = "ai.onnx.converters.tensorflow"  # where tf2onnx puts ops that it is told to leave alone
DOMAINS = ("", "ai.onnx", DOMAIN, FROM_TENSORFLOW)
WAITING = f"{DOMAIN}.waiting"  # nobody's: a node without a body must not take the function of one that has its own
_TYPES = {  # of attributes other than float: ONNX has none that are true or false
    "use_peephole": (AttributeProto.INT, "the integer 0 or 1"),
    "activation": (AttributeProto.STRING, "a string"),
}


def link(model: ModelProto) -> ModelProto:
    """Give a model with TensorFlow's block ops in it what it needs to run.

    Converters such as tf2onnx leave nodes like ``BlockLSTM`` as they are, with TensorFlow's arguments in TensorFlow's
    order and nothing that says what they compute. Such a node, in the default domain, in ``blockcell`` or in
    ``ai.onnx.converters.tensorflow``, becomes a call of a function that the model brings along: the graph of `build`
    for the node's attributes and dtype. Nodes in bodies of Scan, Loop and If are found too, but not in functions of the
    model's own, where values have no types: `onnx.inliner.inline_local_functions` gives a model without functions.

    Parameters
    ----------
    model : onnx.ModelProto
        It is not changed. Attributes that a node lacks have TensorFlow's defaults (``LSTMBlockCell`` and ``BlockLSTM``
        clip at 3.0 and add 1.0 to the forget gate); others than the op's, such as ``T``, are dropped.

    Returns
    -------
    onnx.ModelProto
        Its graph inputs and outputs are those of ``model``, also an output that is a constant. Arguments that cannot
        influence the results are no longer inputs of their nodes; those of them that were initializers for nobody else
        are gone.

    Raises
    ------
    TypeError
        ``model`` is not a model.
    ValueError
        The version of ONNX's operators is below 15, or a node cannot be completed: it is in a function, an input or a
        required attribute is missing, or the dtype cannot be found or is not float32, float64 or float16. The message
        names the node.
    """
    if not isinstance(model, ModelProto):
        raise TypeError(f"model is of type {type(model).__name__}; expected an onnx.ModelProto")
    linked = ModelProto()
    linked.CopyFrom(model)
    with_body = {(local.domain, local.name) for local in linked.functions}
    for local in linked.functions:
        if node := next((node for node in nodes_within(local.node) if _is_block_op(node, with_body)), None):
            where = f"{_label(node)} is in the function {local.name!r}, where values have no types"
            mend = "onnx.inliner.inline_local_functions(model) returns one"
            raise ValueError(f"{where}; expected a model without functions: {mend}")
    block_nodes = [node for graph, _ in graphs(linked.graph) for node in graph.node if _is_block_op(node, with_body)]
    if not block_nodes:
        return linked
    opset = _opset(linked, block_nodes[0])
    input_names = {name for node in block_nodes for name in node.input}
    for node in block_nodes:
        node.domain = WAITING
    domains = {entry.domain for entry in linked.opset_import}
    linked.opset_import.extend(helper.make_opsetid(name, 1) for name in (WAITING, DOMAIN) if name not in domains)
    linked.ir_version = max(linked.ir_version, 8)  # from where on there are functions

    names: dict[tuple[object, ...], str] = {}
    while waiting := [node for node in block_nodes if node.domain == WAITING]:
        # What a node gives may tell the dtype of the next one, through whatever lies between.
        try:
            inferred = shape_inference.infer_shapes(linked)
        except MemoryError:
            raise
        except Exception as error:  # of many kinds, where a model is not what onnx takes it for
            raise ValueError(f"onnx cannot infer the types of the model: {error}") from error
        for (graph, _), (_, types) in zip(graphs(linked.graph), graphs(inferred.graph), strict=True):
            for node in graph.node:
                if node.domain == WAITING and (kind := _element_type(node, types)):
                    _make_call(linked, node, _node_config(node, kind, opset), names)
        if len(waiting) == sum(node.domain == WAITING for node in block_nodes):
            raise ValueError(_untyped_message(waiting[0]))
    drop_import(linked, WAITING, FROM_TENSORFLOW)
    _drop_unread(linked.graph, input_names)
    return linked


# ------------------------------------------------------------------------------------------------------ finding nodes
def _is_block_op(node: NodeProto, with_body: Collection[tuple[str, str]]) -> bool:
    return node.op_type in OPS and node.domain in DOMAINS and (node.domain, node.op_type) not in with_body


# --------------------------------------------------------------------------------------------------- completing a node
def _element_type(node: NodeProto, types: ElementTypes) -> int:
    """Return the type of a node's arrays, 0 where it is not known (yet)."""
    op = OPS[node.op_type]
    arguments = dict(zip((tensor.name for tensor in input_tensors(op)), node.input, strict=False))
    arguments.pop("seq_len_max", None)
    results = zip((tensor.name for tensor in op.outputs), node.output, strict=False)
    kinds: dict[int, str] = {}
    for name, value in [*arguments.items(), *results]:
        if kind := types.get(value, 0):
            kinds.setdefault(kind, f"{name} ({value!r}) is {TensorProto.DataType.Name(kind)}")
    if len(kinds) > 1:
        raise ValueError(f"{_label(node)}: {' and '.join(kinds.values())}; expected one dtype")
    return next(iter(kinds), 0)


def _node_config(node: NodeProto, kind: int, opset: int) -> Config:
    op = OPS[node.op_type]
    attrs: dict[str, Value] = {}
    for attribute in node.attribute:
        if attribute.name not in [declared.name for declared in op.attributes]:
            continue
        if attribute.name in attrs:
            raise ValueError(f"{_label(node)} has the attribute {attribute.name} twice")
        if attribute.ref_attr_name:
            raise ValueError(f"{_label(node)} has {attribute.name} of a function, but it is in none; expected a value")
        value = helper.get_attribute_value(attribute)
        expected_type, expected = _TYPES.get(attribute.name, (AttributeProto.FLOAT, "a float"))
        if attribute.type != expected_type or (expected_type == AttributeProto.INT and value not in (0, 1)):
            raise ValueError(f"{_label(node)} has {attribute.name} {short(value)}; expected {expected}")
        is_text, is_integer = isinstance(value, bytes), isinstance(value, int)
        attrs[attribute.name] = value.decode(errors="replace") if is_text else bool(value) if is_integer else value
    try:
        return op_config(op.name, helper.tensor_dtype_to_np_dtype(kind), attrs=attrs, form=Form(opset=opset))
    except ValueError as error:
        raise ValueError(f"{_label(node)}: {error}") from None


def _make_call(model: ModelProto, node: NodeProto, c: Config, names: dict[tuple[object, ...], str]) -> None:
    """Make a node the call of a function, which the model gets if it does not have it."""
    key = (c.op.name, c.dtype, *c.attrs.items())
    with_body = {called.name: called for called in model.functions if called.domain == DOMAIN}
    if key not in names:
        names[key] = unused_name(c.op.name, with_body)
        called = op_function(c, names[key])
        model.functions.append(called)
        with_body[called.name] = called
    called = with_body[names[key]]
    arguments = [tensor.name for tensor in input_tensors(c.op)]
    results = [tensor.name for tensor in c.op.outputs]
    for side, names_given, names_known in [("inputs", node.input, arguments), ("outputs", node.output, results)]:
        if len(names_given) > len(names_known):
            raise ValueError(
                f"{_label(node)} has {len(names_given)} {side}; expected {len(names_known)}: {', '.join(names_known)}"
            )
    values = dict(zip(arguments, node.input, strict=False))
    if missing := [name for name in called.input if not values.get(name)]:
        raise ValueError(f"{_label(node)}: {', '.join(missing)} missing; expected all of {', '.join(called.input)}")
    node.input[:] = [values[name] for name in called.input]
    node.op_type, node.domain = called.name, DOMAIN
    del node.attribute[:]


def _label(node: NodeProto) -> str:
    """Return how messages call a node."""
    return f"{node.op_type} node {key_of(node)!r}"


def _untyped_message(node: NodeProto) -> str:
    arguments = zip((tensor.name for tensor in input_tensors(OPS[node.op_type])), node.input, strict=False)
    values = ", ".join(f"{name} ({value!r})" for name, value in arguments if value and name != "seq_len_max")
    return (
        f"{_label(node)}: no type is known of {values}, so its dtype cannot be found; expected at least one of them "
        "to be a graph input or an initializer or to have an entry in value_info"
    )


def _drop_unread(graph: GraphProto, names: Collection[str]) -> None:
    """Remove initializers with these names that nobody reads any more, of which onnxruntime would complain."""
    read_names = names_read(graph.node) | {value.name for value in (*graph.input, *graph.output)}
    initializers = [tensor for tensor in graph.initializer if tensor.name in read_names or tensor.name not in names]
    del graph.initializer[:]
    graph.initializer.extend(initializers)


# ------------------------------------------------------------------------------------------------------------- imports
def _opset(model: ModelProto, node: NodeProto) -> int:
    """Return the version of ONNX's operators in the model, which imports them then."""
    versions: list[int] = [entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")]
    if not versions:
        model.opset_import.append(helper.make_opsetid("", DEFAULT_OPSET))
        return DEFAULT_OPSET
    if versions[0] < OLDEST_OPSET:
        raise ValueError(
            f"{_label(node)} is in a model of opset {versions[0]}; expected {OLDEST_OPSET} or newer, which converters "
            "can be asked for (tf2onnx: --opset 18)"
        )
    return versions[0]
