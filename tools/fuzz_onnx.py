"""Damage ONNX models, for fuzz.py: the fields of their messages, and their bytes.

READERS has what reads them, by target: `convert.from_onnx`, `onnx_export.link` and `onnx_export.Session`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from mutations import Generator, change_bytes, pick
from onnx import ModelProto, TensorProto, helper, load_from_string, numpy_helper

import onnx_export
import onnx_export.session
from blockcell import GRU, LSTM, RNN, Bidirectional, Dense, Stack, convert, set_num_threads
from blockcell.optable import OPS

GOLDEN = Path(__file__).resolve().parents[1] / "tests" / "golden"
Source = tuple[Callable[[ModelProto], Any], list[ModelProto]]


# -------------------------------------------------------------------------------------------------------------- changes
def change_model(g: Generator, content: bytes) -> ModelProto:
    """Return a changed ONNX model that protobuf still reads."""
    if g.integers(2):
        model = ModelProto.FromString(content)
        for _ in range(g.integers(1, 4)):
            change_field(g, model)
        return model
    while True:
        try:
            return ModelProto.FromString(change_bytes(g, content))
        except DecodeError:
            continue


def messages_in(message: Any) -> Iterator[Any]:
    """Yield a message of protobuf and all messages in it."""
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None:
            for part in value if field.is_repeated else [value]:
                yield from messages_in(part)


def change_field(g: Generator, model: Any) -> None:
    """Change a field of a message that is in the model."""
    all_messages = [*messages_in(model)]
    message = pick(g, all_messages)
    fields = message.DESCRIPTOR.fields if g.integers(2) else [field for field, _ in message.ListFields()]
    if not fields:
        return
    field = pick(g, fields)
    name, kind = field.name, g.integers(4)
    value = getattr(message, name)
    if kind == 0:
        message.ClearField(name)
    elif field.is_repeated:
        items = [*value]
        if kind == 1 and items:
            items.append(pick(g, items))
        elif kind == 2 and items:
            del items[g.integers(len(items))]
        elif field.message_type is None:
            items.append(draw_scalar(g, field))
        else:
            items = items[::-1]
        message.ClearField(name)
        getattr(message, name).extend(items)
    elif field.message_type is None:
        setattr(message, name, draw_scalar(g, field))
    else:
        alike = [candidate for candidate in all_messages if candidate.DESCRIPTOR == field.message_type]
        if alike:
            copy = type(alike[0])()
            copy.CopyFrom(pick(g, alike))
            value.CopyFrom(copy)


def draw_scalar(g: Generator, field: Any) -> Any:
    """Draw a value for a field of this type."""
    if field.enum_type is not None:
        return pick(g, field.enum_type.values).number
    numbers = [0, 1, 2, 3, 7, 16, 2**20, 2**31 - 1]
    if field.cpp_type in (field.CPPTYPE_INT32, field.CPPTYPE_INT64):
        more_numbers = [-1, -(2**31)] + ([2**40, 2**63 - 1] if field.cpp_type == field.CPPTYPE_INT64 else [])
        return (numbers + more_numbers)[g.integers(8 + len(more_numbers))]
    if field.cpp_type in (field.CPPTYPE_UINT32, field.CPPTYPE_UINT64):
        return numbers[g.integers(8)]
    if field.cpp_type in (field.CPPTYPE_FLOAT, field.CPPTYPE_DOUBLE):
        return [0.0, -1.0, 3.0, float("nan"), float("inf")][g.integers(5)]
    texts = ["", "x", "h", "w", "LSTM", "BlockLSTM", "GRUBlockCell", "T", "reverse", "{}", "ai.onnx", "blockcell", "0"]
    text = pick(g, texts)
    return text.encode() if field.type == field.TYPE_BYTES else text


# --------------------------------------------------------------------------------------------------- convert.from_onnx
def make_constant(array: Any, name: str) -> TensorProto:
    """Return an initializer of this name."""
    return numpy_helper.from_array(np.asarray(array), name)


def make_model(layer: Any, state_nodes: list[Any], state_names: list[str]) -> ModelProto:
    """Return a model of a layer, whose first states have these names, after nodes that make them."""
    node, arrays = convert.to_onnx(layer)
    node.input.extend([""] * (5 - len(node.input)))
    node.input[5:7] = state_names
    infos = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [None] * 3) for name in ("rnn_X", "rnn_Y", "h", "c")
    ]
    initializers = [make_constant(array, name) for name, array in arrays.items()]
    initializers.append(make_constant([1, 2, 3], "shape"))
    graph = helper.make_graph([*state_nodes, node], "g", [infos[0], *infos[2:]], infos[1:2], initializers)
    return helper.make_model(graph)


def make_folded_model() -> ModelProto:
    """Return a GRU whose weights nodes make of constants, in an If that always takes the same branch."""
    model = make_model(GRU.init(2, 3, seed=0), [], ["h"])
    W = numpy_helper.to_array(model.graph.initializer[0])[0]
    model.graph.initializer[0].CopyFrom(make_constant(np.concatenate([W[6:], W[:6]]), "w"))
    branches = [
        helper.make_graph(body, "branch", [], [helper.make_tensor_value_info(body[-1].output[0], 1, None)])
        for body in (
            [helper.make_node("Split", ["w", "parts"], ["u", "v"], axis=0),
             helper.make_node("Concat", ["v", "u"], ["vu"], axis=0),
             helper.make_node("Transpose", ["vu"], ["t"], perm=[1, 0]),
             helper.make_node("Transpose", ["t"], ["tt"], perm=[1, 0]),
             helper.make_node("Unsqueeze", ["tt", "zero"], ["W1"])],
            [helper.make_node("Slice", ["w", "zero", "parts", "zero"], ["s"]),
             helper.make_node("Cast", ["s"], ["W2"], to=TensorProto.FLOAT)],
        )
    ]  # fmt: skip
    first_nodes = [
        helper.make_node("Shape", ["rnn_X"], ["sizes"]),
        helper.make_node("Gather", ["sizes", "zero"], ["T"], axis=0),
        helper.make_node("Equal", ["T", "five"], ["is_five"]),
        helper.make_node("If", ["is_five"], ["rnn_W"], then_branch=branches[0], else_branch=branches[1]),
    ]
    last_nodes = [*model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend([*first_nodes, *last_nodes])
    for size in (5, 1, 2):
        model.graph.input[0].type.tensor_type.shape.dim.add().dim_value = size
    model.graph.value_info.append(helper.make_tensor_value_info("rnn_W", TensorProto.FLOAT, None))
    constants = {"parts": [3, 6], "zero": [0], "five": [5]}
    model.graph.initializer.extend([make_constant(array, name) for name, array in constants.items()])
    return model


def make_model_with_learned_states(layer: Any) -> ModelProto:
    """Return a layer whose first states are constants that nodes repeat for each row."""
    nodes = [
        helper.make_node("Shape", ["rnn_X"], ["sizes"]),
        helper.make_node("Gather", ["sizes", "one"], ["B"]),
        helper.make_node("Concat", ["one", "B", "size"], ["to"], axis=0),
        helper.make_node("Expand", ["h0", "to"], ["z"]),
        helper.make_node("Tile", ["h0", "ones"], ["zz"]),
    ]
    model = make_model(layer, nodes, ["z", "zz"][: 1 + isinstance(layer, LSTM)])
    arrays = {"one": [1], "size": [3], "ones": [1, 1, 1], "h0": np.ones((1, 1, 3), np.float32)}
    model.graph.initializer.extend([make_constant(array, name) for name, array in arrays.items()])
    model.graph.node[-1].attribute.extend([helper.make_attribute("clip", np.inf)] * isinstance(layer, RNN))
    return model


def read_layer(model: ModelProto) -> Any:
    """Read a model with first states and without."""
    convert.from_onnx(model, initial_state=True)
    return convert.from_onnx(model)


def make_models_of_layers() -> Source:
    """Return models that `convert.from_onnx` reads.

    There are nodes with states that are inputs, constants and computed, in either direction; activations with
    parameters, coupled gates and a clip; weights that nodes make of constants, also in a branch that is always taken;
    an LSTM of 8-bit integers; whole models, as PyTorch's exporters write them, with one node behind another and a head,
    and as onnx_export does.
    """
    set_num_threads(1)  # the stacks of threads count as memory
    golden = np.load(GOLDEN / "torch_onnx.npz")
    zeros = [helper.make_node("ConstantOfShape", ["shape"], ["z"]), helper.make_node("Expand", ["z", "shape"], ["zz"])]
    lstm = LSTM.init(2, 3, seed=0, use_peephole=True)
    hard = {"recurrent_activation": ("hard_sigmoid", 0.2, 0.5)}
    unusual_layers = [
        RNN.init(2, 3, seed=0),
        LSTM.init(2, 3, seed=0, coupled=True, use_peephole=True, **hard),
        GRU.init(2, 3, seed=0, activation=("leaky_relu", 0.01), **hard),
    ]
    return read_layer, [
        *map(make_model_with_learned_states, unusual_layers),
        make_model(lstm, [], ["h", "c"]),
        make_model(lstm, zeros, ["z", "zz"]),
        make_folded_model(),
        make_model(Bidirectional(GRU.init(2, 3, seed=0), GRU.init(2, 3, seed=1)), zeros, ["zz"]),
        *(load_from_string(bytes(golden[f"{name}/model"])) for name in ("two lstm", "two bidirectional gru, dynamo")),
        onnx_export.export(Stack([GRU.init(2, 3, seed=0), LSTM.init(3, 2, seed=0)]), None, loop="native"),
    ]


# -------------------------------------------------------------------------------------------------------- onnx_export
def make_model_of_op(op: str, place: str, **attributes: Any) -> ModelProto:
    """Return a model of an op of blockcell: plain, or in an If."""
    row = OPS[op]
    names = ["seq_len_max"] * row.sequence + [tensor.name for tensor in row.inputs]
    node = helper.make_node(op, names, [tensor.name for tensor in row.outputs], name="cell", **attributes)
    infos = [
        helper.make_tensor_value_info(name, TensorProto.INT64 if name == "seq_len_max" else TensorProto.FLOAT, None)
        for name in [*names, node.output[-1], "go_on", "y"]
    ]
    imports = [helper.make_opsetid("", 18)]
    inputs, outputs = infos[:-3], infos[-3:-2]
    if place == "in an If":
        branch = helper.make_graph([node], "branch", [], outputs)
        node = helper.make_node("If", ["go_on"], ["y"], then_branch=branch, else_branch=branch)
        infos[-2].type.tensor_type.elem_type = TensorProto.BOOL
        inputs, outputs = [*inputs, infos[-2]], infos[-1:]
    graph = helper.make_graph([node], "g", inputs, outputs)
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


def make_models_of_ops() -> Source:
    """Return models with ops of blockcell, which `onnx_export.link` replaces."""
    return onnx_export.link, [
        make_model_of_op("GRUBlockCell", "plain"),
        make_model_of_op("BlockLSTM", "plain", cell_clip=0.5, use_peephole=1),
        make_model_of_op("BlockLSTMGrad", "plain", use_peephole=0),
        make_model_of_op("LSTMBlockCell", "in an If", forget_bias=0.5),
    ]


class Runtime:
    """A runtime that computes nothing, in place of onnxruntime, which would have to bear the rest."""

    def __init__(self, model: Any, *_: Any) -> None:
        """Prepare a result for each output of the model."""
        self.results = [np.zeros(1, np.float32)] * len(model.graph.output)

    def run(self, feeds: Any) -> list[Any]:
        """Return the results that were prepared."""
        return self.results


def make_models_for_sessions() -> Source:
    """Return models for `Session`, without onnxruntime."""
    vars(onnx_export.session)["RuntimeModel"] = Runtime
    layer = Stack([Bidirectional(LSTM.init(2, 3, seed=0), GRU.init(2, 3, seed=1)), LSTM.init(6, 2, seed=2)])
    shapes = {"x": (2, 4), "cs_prev": (2, 3), "h_prev": (2, 3), "w": (7, 12), "b": (12,)}
    calls: list[dict[str, Any]] = [
        {name: np.ones(shape, np.float32) for name, shape in shapes.items()},
        {"x": np.ones((4, 0, 2), np.float32)},
        {"x": np.ones((4, 3, 6), np.float32), "weights": layer.layers[1].weights},
    ]

    def read(model: Any) -> Any:
        """Make a session of a model, and call it with several arguments, which it may refuse."""
        session = onnx_export.Session(model)
        for arguments in calls:
            try:
                session(**arguments)
            except (TypeError, ValueError) as error:
                assert str(error)

    return read, [
        onnx_export.build("LSTMBlockCell", attrs={"cell_clip": 0.5}),
        onnx_export.build("block_gru", functions=False),
        onnx_export.export(layer, None, reset=True, loop="scan"),
        onnx_export.export(LSTM.init(2, 3, seed=0), None, loop="native"),
        onnx_export.export(Stack([GRU.init(2, 3, seed=0), Dense.init(3, 2, seed=1, last="ends")]), None),
        onnx_export.export(GRU.init(2, 3, seed=0, reset_after=True), None),
        onnx_export.export(layer.layers[1], None, train=True, reset=True),
    ]


READERS: dict[str, Callable[[], Source]] = {
    "from_onnx": make_models_of_layers,
    "link": make_models_of_ops,
    "session": make_models_for_sessions,
}
