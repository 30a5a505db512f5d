"""TensorFlow's graphs through tf2onnx and `onnx_export.link`: onnxruntime gives what TensorFlow gave.

`pytest -m peers`, with tensorflow-cpu and tf2onnx in .venv. docs/onnx/tensorflow.md has the recipe that this follows.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
from cases import arguments
from graphs import on_onnxruntime
from onnx import helper

import blockcell
import onnx_export

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]  # tf2onnx has its own
SIZES = {"T": 5, "B": 2, "I": 3, "H": 4}
BLOCK_OPS = ["GRUBlockCell", "GRUBlockCellGrad", "LSTMBlockCell", "LSTMBlockCellGrad", "BlockLSTM", "BlockLSTMGrad",
             "BlockLSTMV2", "BlockLSTMGradV2"]  # fmt: skip


@pytest.fixture(scope="module")
def tf():
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    pytest.importorskip("tf2onnx")
    return pytest.importorskip("tensorflow")


def lstm_steps(tf, x):
    """As static_rnn."""
    args = arguments("LSTMBlockCell", SIZES, use_peephole=True, cell_clip=0.2)
    states = []
    for t in range(SIZES["T"]):
        cell = tf.raw_ops.LSTMBlockCell(**args | {"x": x[t]})
        args |= {"cs_prev": cell.cs, "h_prev": cell.h}
        states.append(cell.h)
    return tf.stack(states)


def gru_loop(tf, x):
    """As dynamic_rnn: the cell is in the body of a loop, with the weights from around it."""
    args = arguments("GRUBlockCell", SIZES)
    found = tf.TensorArray(tf.float32, SIZES["T"], element_shape=args["h_prev"].shape)

    def step(t, h, found):
        h = tf.raw_ops.GRUBlockCell(**args | {"x": x[t], "h_prev": h}).h
        return t + 1, h, found.write(t, h)

    return tf.while_loop(lambda t, *_: t < SIZES["T"], step, (0, tf.constant(args["h_prev"]), found))[2].stack()


def reversed_sequence(tf, x):
    """As TimeReversedFusedRNN."""
    args = arguments("BlockLSTM", SIZES, seq_len_max=SIZES["T"], use_peephole=True, cell_clip=0.3)
    return tf.reverse(tf.raw_ops.BlockLSTM(**args | {"x": tf.reverse(x, [0])}).h, [0])


def sequence_with_gradient(tf, x):
    args = arguments("BlockLSTM", SIZES, seq_len_max=SIZES["T"], use_peephole=True)
    states = tf.raw_ops.BlockLSTM(**args | {"x": x})
    names = ("x", "cs_prev", "h_prev", "w", "wci", "wcf", "wco", "b")
    given = {name: args[name] for name in names} | states._asdict() | {"cs_grad": states.h, "h_grad": states.cs}
    return tf.raw_ops.BlockLSTMGrad(seq_len_max=SIZES["T"], **given | {"x": x}, use_peephole=True).x_grad


GRAPHS = [lstm_steps, gru_loop, reversed_sequence, sequence_with_gradient]


def frozen(tf, graph, x):
    """The graph definition that TensorFlow 1 would have written, and what it gives."""
    tf.compat.v1.disable_control_flow_v2()
    try:
        with tf.Graph().as_default() as made, tf.compat.v1.Session() as session:
            y = tf.identity(graph(tf, tf.compat.v1.placeholder(tf.float32, x.shape, name="x")), name="y")
            return made.as_graph_def(), session.run(y, {"x:0": x})
    finally:
        tf.compat.v1.enable_control_flow_v2()


@pytest.mark.parametrize("domain", ["", "blockcell", "ai.onnx.converters.tensorflow"])
@pytest.mark.parametrize("source", ["graph", "function"])
@pytest.mark.parametrize("graph", GRAPHS)
def test_what_tensorflow_gave(tf, graph, source, domain):
    """``domain``: where tf2onnx leaves the nodes; the default one when it is told nothing."""
    from tf2onnx import convert

    x = arguments("BlockLSTM", SIZES, seed=1)["x"]
    options = {"opset": 18}
    if domain:
        options |= {"custom_ops": dict.fromkeys(BLOCK_OPS, domain), "extra_opset": [helper.make_opsetid(domain, 1)]}
    if source == "graph":
        definition, expected = frozen(tf, graph, x)
        model, _ = convert.from_graph_def(definition, input_names=["x:0"], output_names=["y:0"], **options)
    else:
        function = tf.function(lambda x: graph(tf, x))
        expected = function(x).numpy()
        model, _ = convert.from_function(function, [tf.TensorSpec(x.shape, tf.float32)], **options)
    linked = onnx_export.link(model)
    (y,) = on_onnxruntime(linked, {model.graph.input[0].name: x})
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-6)
    # But for LSTMBlockCell, which tf2onnx takes to pieces itself when it is told nothing.
    assert bool(linked.functions) or (domain == "" and graph is lstm_steps)


@pytest.mark.parametrize("kind", ["GRU", "SimpleRNN"])
@pytest.mark.parametrize("below", [False, True])
def test_cells_that_tf2onnx_writes_as_single_nodes(tf, kind, below):
    """from_onnx names them, and says what to convert instead."""
    from tf2onnx import convert

    keras = pytest.importorskip("keras")
    layers = [keras.layers.LSTM(3, return_sequences=True)] if below else []
    keras_model = keras.Sequential([keras.layers.Input((5, 3)), *layers, getattr(keras.layers, kind)(4)])
    signature = [tf.TensorSpec((None, 5, 3), tf.float32)]
    model, _ = convert.from_function(tf.function(keras_model, input_signature=signature), signature)
    text = r"it is a GRU, an LSTM or an RNN in single nodes, .* convert.from_keras\(model\)"
    if below:
        with pytest.warns(UserWarning, match=rf"^from_onnx: left out: \S+/while_loop \(Loop\): {text}"):
            assert blockcell.convert.from_onnx(model).hidden_size == 3
    else:
        with pytest.raises(ValueError, match=rf"\. Of '\S+/while_loop': {text}"):
            blockcell.convert.from_onnx(model)
    assert blockcell.convert.from_keras(keras_model).output_size == 4
