"""Makes ``tensorflow.npz`` beside this script: small files that TensorFlow 2.21 wrote, and what it reads from them.

    python tests/golden/generate_tensorflow.py        # needs tensorflow-cpu 2.21
    python tests/golden/generate_tensorflow.py cells  # makes tensorflow_cells.npz

``file/<path>`` is a file's bytes, ``variable/<checkpoint>/<name>`` what TensorFlow has for a variable, with bfloat16 as
float32, and ``constant/<name>`` what it has for a constant of ``graph.pb``. ``nodes/<path>`` is JSON: of each graph in
a file, and of each of its functions, the nodes by name: op, inputs, attributes.

============  ========================================================================================
``v2``        a checkpoint: all dtypes, two data files, partitioned variables, a string, a ``.meta``
``v1``        the same variables in the old format, but those that it cannot hold
``saved``     a SavedModel
``objects``   a checkpoint of TensorFlow 2, in a folder
``graph.pb``  a graph: constants of all dtypes in all ways to store them, a loop in functions; also as text
============  ========================================================================================

``tensorflow_cells.npz`` has graphs of cells: ``graph/<name>`` is a frozen graph, ``x/<name>`` and ``y/<name>`` are what
goes into the cell and out of it, time first. ``saved/<path>`` are the files of a SavedModel that Keras 3.15.1 exported,
and ``x/saved`` and ``y/saved``, batch first, its own.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import numpy as np
import tensorflow as tf
from google.protobuf.message import Message
from tensorflow.core.protobuf import meta_graph_pb2, saved_model_pb2

v1 = tf.compat.v1
HERE = Path(__file__).parent
DTYPES = ["float32", "float64", "float16", "bfloat16", "int8", "uint8", "int16", "uint16", "int32", "int64", "bool"]
OLD = ["float32", "float64", "float16", "int8", "uint8", "int16", "int32", "int64", "bool"]
stored: dict[str, np.ndarray] = {}


def drawn(name, shape, dtype):
    g = np.random.default_rng(list(name.encode()))
    values = g.standard_normal(shape) if "float" in dtype else g.integers(0, 2 if dtype == "bool" else 100, shape)
    if dtype.startswith("int"):
        values = -values
    return values.astype(tf.as_dtype(dtype).as_numpy_dtype)


def plain(array):
    array = np.asarray(array)
    return array.astype(np.float32) if array.dtype == tf.bfloat16.as_numpy_dtype else array


def make_variables(dtypes, numbers_only):
    for dtype in dtypes:
        v1.get_variable(f"scope/{dtype}", initializer=drawn(dtype, (2, 3), dtype), use_resource=False)
    with tf.device("/cpu:1"):
        v1.get_variable("scope/scalar", initializer=np.float32(3), use_resource=False)
        v1.get_variable("scope/kernel", initializer=drawn("kernel", (3, 8), "float32"))
    for axis, parts in enumerate((2, 3)):
        splits = [1, 1]
        splits[axis] = parts
        partitioner = v1.fixed_size_partitioner(parts, axis)

        def initializer(shape, dtype, partition_info, axis=axis):
            whole = drawn(f"parts{axis}", (130, 4), "float32")
            return whole[tuple(slice(a, a + n) for a, n in zip(partition_info.var_offset, shape, strict=True))]

        v1.get_variable(f"parts{axis}", (130, 4), initializer=initializer, partitioner=partitioner, use_resource=False)
    if not numbers_only:
        v1.get_variable("empty", initializer=np.zeros((0, 5), np.float32), use_resource=False)
        v1.get_variable("text", initializer="a text", dtype=tf.string, use_resource=False)


def keep_files(folder):
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.name.startswith("fingerprint"):
            stored[f"file/{path.relative_to(folder).as_posix()}"] = np.frombuffer(path.read_bytes(), np.uint8)


def checkpoint(folder, name, dtypes, version):
    with tf.Graph().as_default():
        v1.set_random_seed(0)
        make_variables(dtypes, numbers_only=version == 1)
        config = v1.ConfigProto(device_count={"CPU": 2})
        with v1.Session(config=config) as session:
            session.run(v1.global_variables_initializer())
            saver = v1.train.Saver(sharded=version == 2, write_version=version, save_relative_paths=True)
            (folder / name).mkdir()
            saver.save(
                session, str(folder / name / "model.ckpt"), strip_default_attrs=True, write_meta_graph=version == 2
            )
            values = {}
            for variable in v1.global_variables():
                value, part = session.run(variable), variable._save_slice_info
                whole = part.full_name if part else variable.op.name
                axis = next((k for k in range(2) if part and part.var_shape[k] != part.full_shape[k]), 0)
                values[whole] = np.concatenate([values[whole], value], axis) if whole in values else value
    for each, value in values.items():
        if not isinstance(value, bytes):
            stored[f"variable/{name}/{each}"] = plain(value)


def saved_model(folder):
    with tf.Graph().as_default(), v1.Session() as session:
        x = v1.placeholder(tf.float32, (None, 2), "x")
        w = v1.get_variable("w", initializer=drawn("w", (2, 3), "float32"))
        session.run(v1.global_variables_initializer())
        v1.saved_model.simple_save(session, str(folder / "saved"), {"x": x}, {"y": x @ w})
        stored["variable/saved/w"] = session.run(w)


def objects(folder):
    model = tf.train.Checkpoint(kernel=tf.Variable(drawn("objects", (2, 2), "float32")))
    model.save(str(folder / "objects" / "ckpt"))
    stored["variable/objects/kernel/.ATTRIBUTES/VARIABLE_VALUE"] = model.kernel.numpy()


def graph():
    """Constants as TensorFlow makes them, in tensor_content, and in fields of their own, all and fewer of them."""

    def loop(x):
        return tf.while_loop(lambda k, _: k < 3, lambda k, y: (k + 1, y * 2.0), (0, x))[1]

    function = tf.function(loop).get_concrete_function(tf.TensorSpec((2,), tf.float32, "x"))
    definition = function.graph.as_graph_def()
    for dtype in [*DTYPES, "uint32", "uint64"]:
        for way in ("content", "all", "few", "zero"):
            count = {"content": 6, "all": 6, "few": 2, "zero": 0}[way]
            values = drawn(f"{dtype} {way}", (6,), dtype)
            proto = tf.make_tensor_proto(values)
            if way != "content":
                field = {
                    "float32": "float_val",
                    "float64": "double_val",
                    "float16": "half_val",
                    "bfloat16": "half_val",
                    "int64": "int64_val",
                    "bool": "bool_val",
                    "uint32": "uint32_val",
                    "uint64": "uint64_val",
                }
                numbers = values.view(np.uint16) if dtype in ("float16", "bfloat16") else values
                proto.ClearField("tensor_content")
                target = getattr(proto, field.get(dtype, "int_val"))
                del target[:]
                target.extend(number.item() for number in numbers[:count])
            node = definition.node.add(name=f"{dtype}/{way}", op="Const")
            node.attr["dtype"].type = tf.as_dtype(dtype).as_datatype_enum
            node.attr["value"].tensor.CopyFrom(proto)
    text = definition.node.add(name="text", op="Const")
    text.attr["dtype"].type = tf.string.as_datatype_enum
    text.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(["a text"]))
    with tf.Graph().as_default():
        tf.import_graph_def(definition, name="")  # it is one that TensorFlow takes
        with v1.Session() as session:
            for node in definition.node:
                if node.op == "Const" and node.name != "text":
                    stored[f"constant/{node.name}"] = plain(session.run(f"{node.name}:0"))
    return definition


def value_of(value):
    """An AttrValue, for JSON."""
    kind = value.WhichOneof("value")
    if kind == "list":
        return [single(field.name, each) for field, found in value.list.ListFields() for each in found]
    return None if kind is None else single(kind, getattr(value, kind))


def single(kind, value):
    if kind == "s":
        return value.decode()
    if kind == "type":
        return tf.as_dtype(value).base_dtype.name
    if kind == "shape":
        return None if value.unknown_rank else [dim.size if dim.size >= 0 else None for dim in value.dim]
    if kind == "tensor":
        return {"dtype": tf.as_dtype(value.dtype).name, "shape": [dim.size for dim in value.tensor_shape.dim]}
    if kind == "func":
        return {"name": value.name, "attrs": {name: value_of(each) for name, each in value.attr.items()}}
    assert not isinstance(value, Message), kind
    return value


def nodes_of(nodes):
    return {
        node.name: [node.op, list(node.input), {name: value_of(each) for name, each in node.attr.items()}]
        for node in nodes
    }


def keep_nodes(path, graphs):
    found = []
    for each in graphs:
        functions = {
            function.signature.name: {
                "inputs": [argument.name for argument in function.signature.input_arg],
                "outputs": [argument.name for argument in function.signature.output_arg],
                "returned": dict(function.ret),
                "nodes": nodes_of(function.node_def),
            }
            for function in each.library.function
        }
        found.append({"nodes": nodes_of(each.node), "functions": functions})
    stored[f"nodes/{path}"] = np.frombuffer(json.dumps(found).encode(), np.uint8)


# --------------------------------------------------------------------------------------------------------------- cells
def keras_layers():
    import keras

    layers, size = keras.layers, {"return_sequences": True}
    found = {}
    for k in (1, 2):
        more = {**size, "implementation": k}
        found |= {
            f"lstm {k}": layers.LSTM(4, **more),
            f"gru {k}": layers.GRU(4, **more),
            f"gru before {k}": layers.GRU(4, reset_after=False, **more),
            f"gru without bias {k}": layers.GRU(4, use_bias=False, **more),
        }
    found |= {
        "lstm without bias": layers.LSTM(4, use_bias=False, **size),
        "lstm unrolled": layers.LSTM(4, unroll=True, **size),
        "lstm square": layers.LSTM(3, **size),
        "gru square": layers.GRU(3, unroll=True, **size),
        "lstm of relu": layers.LSTM(4, activation="relu", **size),
        "lstm of hard sigmoid": layers.LSTM(4, recurrent_activation="hard_sigmoid", **size),
        "gru of softsign": layers.GRU(4, activation="softsign", **size),
        "gru of hard sigmoid": layers.GRU(4, recurrent_activation="hard_sigmoid", **size),
        "simple rnn": layers.SimpleRNN(4, **size),
    }
    return found


def with_weights(keras, g, inputs, outputs):
    model = keras.Model(inputs, outputs)
    model.set_weights([g.uniform(-1, 1, each.shape).astype(np.float32) for each in model.get_weights()])
    return model


def keras_graphs():
    import keras
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

    g = np.random.default_rng(0)
    for k, (name, layer) in enumerate(keras_layers().items()):
        given = keras.Input((5, 3))
        model = with_weights(keras, g, given, layer(given))
        function = tf.function(lambda x, model=model: model(x)).get_concrete_function(tf.TensorSpec((2, 5, 3)))
        definition = convert_variables_to_constants_v2(function, lower_control_flow=bool(k % 2)).graph.as_graph_def()
        x = g.standard_normal((2, 5, 3)).astype(np.float32)
        keep_cell(f"keras {name}", definition, x.swapaxes(0, 1), model(x).numpy().swapaxes(0, 1))


def keras_saved(folder):
    import keras

    layers, g = keras.layers, np.random.default_rng(1)
    given = keras.Input((None, 3))
    both = layers.Bidirectional(layers.GRU(4, return_sequences=True))(given)
    model = with_weights(keras, g, given, layers.LSTM(2, return_sequences=True)(both))
    model.export(str(folder / "saved"), verbose=False)
    stored["x/saved"] = g.standard_normal((2, 5, 3)).astype(np.float32)
    stored["y/saved"] = model(stored["x/saved"]).numpy()
    for path in sorted((folder / "saved").rglob("*")):
        if path.is_file() and not path.name.startswith("fingerprint"):
            stored[path.relative_to(folder).as_posix()] = np.frombuffer(path.read_bytes(), np.uint8)


def other_graphs(folder):
    """The cells that the random tests beside TensorFlow write out."""
    sys.path.insert(0, str(HERE.parent / "lib"))
    from tf_peers import BAD, GOOD, Cell, frozen, looped, unrolled

    for k, kind in enumerate([*GOOD, *BAD]):
        g = np.random.default_rng([2, k])
        (v1.disable_control_flow_v2 if k % 2 else v1.enable_control_flow_v2)()
        with tf.Graph().as_default(), v1.Session() as session:
            v1.set_random_seed(0)
            x = v1.placeholder("float32", (5, 2, 3), "x")
            cell = Cell(tf, g, "net/thing", 3, kind)
            tf.identity((unrolled if k % 3 == 2 else looped)(tf, cell, x, cell.zeros()), "y")
            session.run(v1.global_variables_initializer())
            given = g.standard_normal((5, 2, 3)).astype(np.float32)
            y = session.run("y:0", {x: given})
            definition = v1.GraphDef.FromString(frozen(tf, session, ["y"], folder).read_bytes())
        keep_cell(kind, definition, given, y)


def keep_cell(name, definition, x, y):
    stored[f"graph/{name}"] = np.frombuffer(definition.SerializeToString(deterministic=True), np.uint8)
    stored[f"x/{name}"], stored[f"y/{name}"] = x, y


def cells():
    with tempfile.TemporaryDirectory() as name:
        keras_graphs()
        keras_saved(Path(name))
        other_graphs(Path(name))
    np.savez_compressed(HERE / "tensorflow_cells.npz", **stored)


def main():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoint(folder, "v2", DTYPES, 2)
        checkpoint(folder, "v1", OLD, 1)
        saved_model(folder)
        objects(folder)
        definition = graph()
        (folder / "graph.pb").write_bytes(definition.SerializeToString(deterministic=True))
        v1.train.write_graph(definition, str(folder), "graph.pbtxt", as_text=True)
        keep_files(folder)
        keep_nodes("graph.pb", [definition])
        meta = meta_graph_pb2.MetaGraphDef.FromString((folder / "v2" / "model.ckpt.meta").read_bytes())
        keep_nodes("v2/model.ckpt.meta", [meta.graph_def])
        saved = saved_model_pb2.SavedModel.FromString((folder / "saved" / "saved_model.pb").read_bytes())
        keep_nodes("saved/saved_model.pb", [each.graph_def for each in saved.meta_graphs])
    np.savez_compressed(HERE / "tensorflow.npz", **stored)


if __name__ == "__main__":
    cells() if sys.argv[1:] == ["cells"] else main()
