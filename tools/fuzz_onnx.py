"""Damage ONNX models, for fuzz.py: the fields of their messages, and their bytes.

They are read by `convert.from_onnx`, `onnx_export.link` and `onnx_export.Session`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from mutations import Generator, change_bytes, fuzz_reader, pick
from onnx import ModelProto, NodeProto, TensorProto, helper, load_from_string, numpy_helper, parser

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
FOLDED = """
    sizes = Shape (rnn_X)
    T = Gather <axis = 0> (sizes, zero)
    is_five = Equal (T, five)
    rnn_W = If (is_five) <
        then_branch = usual () => (float[] W1) {
            u, v = Split <axis = 0> (w, parts)
            vu = Concat <axis = 0> (v, u)
            t = Transpose <perm = [1, 0]> (vu)
            tt = Transpose <perm = [1, 0]> (t)
            W1 = Unsqueeze (tt, zero)
        },
        else_branch = other () => (float[] W2) {
            s = Slice (w, zero, parts, zero)
            W2 = Cast <to = 1> (s)
        }
    >"""
"""Nodes that make weights of constants, in an If that always takes the same branch."""
LEARNED = """
    sizes = Shape (rnn_X)
    B = Gather (sizes, one)
    to = Concat <axis = 0> (one, B, size)
    z = Expand (h0, to)
    zz = Tile (h0, ones)"""
"""Nodes that repeat a constant first state for each row."""
ZEROS = """
    z = ConstantOfShape (shape)
    zz = Expand (z, shape)"""


def make_model(node: NodeProto, arrays: dict[str, Any], nodes: str = "", shape: str = "T,B,I") -> ModelProto:
    """Return a model of a node with constants, behind nodes in ONNX's text; x has the shape."""
    text = f"(float[{shape}] rnn_X, float[D,B,H] h, float[D,B,H] c) => (float[T,D,B,H] rnn_Y) {{ {nodes} }}"
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["": 18]> g {text}')
    model.graph.node.append(node)
    model.graph.initializer.extend([numpy_helper.from_array(np.asarray(array), name) for name, array in arrays.items()])
    return model


def make_layer_model(layer: Any, states: list[str], nodes: str = "", **constants: Any) -> ModelProto:
    """Return a model of a layer, whose first states have these names, behind nodes that make them of constants."""
    node, arrays = convert.to_onnx(layer)
    node.input.extend([""] * (5 - len(node.input)))
    node.input[5:7] = states
    node.attribute.extend([helper.make_attribute("clip", np.inf)] * isinstance(layer, RNN))
    return make_model(node, arrays | constants, nodes)


def make_folded_model() -> ModelProto:
    """Return a GRU whose weights nodes make of constants, in an If that always takes the same branch."""
    node, arrays = convert.to_onnx(GRU.init(2, 3, seed=0))
    [W] = arrays.pop("rnn_W")
    constants = {"w": np.concatenate([W[6:], W[:6]]), "parts": [3, 6], "zero": [0], "five": [5]}
    return make_model(node, arrays | constants, FOLDED, "5,1,2")


def read_layer(model: ModelProto) -> Any:
    """Read a model with first states and without."""
    convert.from_onnx(model, initial_state=True)
    return convert.from_onnx(model)


def make_models_of_layers() -> Source:
    """Return models that `convert.from_onnx` reads.

    There are nodes with states that are inputs, constants and computed, in either direction; activations with
    parameters, coupled gates and a clip; weights that nodes make of constants, also in a branch that is always taken;
    whole models, as PyTorch's exporters write them, with one node behind another and a head,
    and as onnx_export does.
    """
    set_num_threads(1)  # the stacks of threads count as memory
    golden = np.load(GOLDEN / "torch_onnx.npz")
    lstm = LSTM.init(2, 3, seed=0, use_peephole=True)
    hard = {"recurrent_activation": ("hard_sigmoid", 0.2, 0.5)}
    learned = {"one": [1], "size": [3], "ones": [1, 1, 1], "h0": np.ones((1, 1, 3), np.float32)}
    return read_layer, [
        make_layer_model(RNN.init(2, 3, seed=0), ["z"], LEARNED, **learned),
        make_layer_model(
            LSTM.init(2, 3, seed=0, coupled=True, use_peephole=True, **hard), ["z", "zz"], LEARNED, **learned
        ),
        make_layer_model(GRU.init(2, 3, seed=0, activation=("leaky_relu", 0.01), **hard), ["z"], LEARNED, **learned),
        make_layer_model(lstm, ["h", "c"]),
        make_layer_model(lstm, ["z", "zz"], ZEROS, shape=[1, 2, 3]),
        make_layer_model(Bidirectional(GRU.init(2, 3, seed=0), GRU.init(2, 3, seed=1)), ["zz"], ZEROS, shape=[1, 2, 3]),
        make_folded_model(),
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


def fuzz_models(make_source: Callable[[], Source]) -> Callable[[Generator], bool]:
    """Return a fuzzer that gives changed models to what reads them."""
    read, originals = make_source()
    contents = [model.SerializeToString() for model in originals]
    return fuzz_reader(read, lambda g: change_model(g, pick(g, contents)))


TARGETS: dict[str, Callable[[], Callable[[Generator], bool]]] = {
    "from_onnx": lambda: fuzz_models(make_models_of_layers),
    "link": lambda: fuzz_models(make_models_of_ops),
    "session": lambda: fuzz_models(make_models_for_sessions),
}
