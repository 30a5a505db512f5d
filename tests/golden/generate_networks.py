"""Makes ``networks.npz`` beside this script: layers of cells in both directions, by TensorFlow 2.21.

    python tests/golden/generate_networks.py        # needs tensorflow-cpu 2.21

``file/v1.pb`` and ``file/v2.pb`` are the same frozen graph with each control flow: a bidirectional layer of two cells
each way and then an LSTM and a GRU in one loop, all on rows of their own lengths; ``file/whole.pb`` has no lengths, and
reverses all steps. ``x``, ``lengths``, and ``y/<name>``, what TensorFlow computes.
"""

import os
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import numpy as np
import tensorflow as tf
from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_from_session_graph

v1 = tf.compat.v1
HERE = Path(__file__).parent
T, B, I = 5, 3, 4  # noqa: E741


class Cells:
    """LSTMBlockCells, and a GRUBlockCell for each size below 0, on top of each other, for dynamic_rnn."""

    def __init__(self, g, inputs, sizes):
        self.weights = []
        for size in sizes:
            n = abs(size)
            shapes = (
                [(inputs + n, 4 * n), (4 * n,)] if size > 0 else [(inputs + n, 2 * n), (inputs + n, n), (2 * n,), (n,)]
            )
            names = (
                ["kernel", "bias"] if size > 0 else ["gates/kernel", "candidate/kernel", "gates/bias", "candidate/bias"]
            )
            scope = f"cell_{len(self.weights)}/{'lstm' if size > 0 else 'gru'}_cell"
            self.weights.append(
                [
                    v1.get_variable(f"{scope}/{name}", initializer=g.standard_normal(shape).astype(np.float32))
                    for name, shape in zip(names, shapes, strict=True)
                ]
            )
            inputs = n
        self.output_size = inputs
        self.state_size = tuple((size, size) if size > 0 else (-size,) for size in sizes)

    def zero_state(self, batch, dtype):
        return tuple(tuple(tf.zeros((batch, size), dtype) for size in sizes) for sizes in self.state_size)

    def __call__(self, x, states, scope=None):
        after = []
        for weights, state in zip(self.weights, states, strict=True):
            if len(weights) == 2:
                w, b = weights
                none = tf.zeros(b.shape[0] // 4)
                made = tf.raw_ops.LSTMBlockCell(
                    x=x, cs_prev=state[0], h_prev=state[1], w=w, b=b, wci=none, wcf=none, wco=none, forget_bias=0.5
                )
                after.append((made.cs, made.h))
            else:
                w_ru, w_c, b_ru, b_c = weights
                after.append((tf.raw_ops.GRUBlockCell(x=x, h_prev=state[0], w_ru=w_ru, w_c=w_c, b_ru=b_ru, b_c=b_c).h,))
            x = after[-1][-1]
        return x, tuple(after)


def network(g, x, lengths):
    """Batch first."""
    if lengths is None:
        with v1.variable_scope("fw"):
            fw, _ = v1.nn.dynamic_rnn(Cells(g, I, [3]), x, dtype=tf.float32)
        with v1.variable_scope("bw"):
            bw, _ = v1.nn.dynamic_rnn(Cells(g, I, [3]), tf.reverse(x, [1]), dtype=tf.float32)
        both = fw, tf.reverse(bw, [1])
    else:
        with v1.variable_scope("fw"):
            fw = Cells(g, I, [3, 2])
        with v1.variable_scope("bw"):
            bw = Cells(g, I, [3, 2])
        both, _ = v1.nn.bidirectional_dynamic_rnn(fw, bw, x, lengths, dtype=tf.float32)
    y = tf.concat(both, 2)
    with v1.variable_scope("top"):
        return v1.nn.dynamic_rnn(Cells(g, y.shape[-1], [3, -2]), y, lengths, dtype=tf.float32)[0]


def main():
    g = np.random.default_rng(0)
    x, lengths = g.standard_normal((B, T, I)).astype(np.float32), np.array([T, 2, 3], np.int32)
    stored = {"x": x, "lengths": lengths}
    for name in ("v1", "v2", "whole"):
        (v1.disable_control_flow_v2 if name == "v1" else v1.enable_control_flow_v2)()
        with tf.Graph().as_default() as graph, v1.Session() as session:
            given = v1.placeholder(tf.float32, (None, None, I), "x")
            n = None if name == "whole" else v1.placeholder(tf.int32, (None,), "lengths")
            y = tf.identity(network(np.random.default_rng(1), given, n), "y")
            session.run(v1.global_variables_initializer())
            stored[f"y/{name}"] = session.run(y, {given: x} | ({} if n is None else {n: lengths}))
            frozen = convert_variables_to_constants_from_session_graph(session, graph.as_graph_def(), ["y"])
        stored[f"file/{name}.pb"] = np.frombuffer(frozen.SerializeToString(deterministic=True), np.uint8)
    np.savez_compressed(HERE / "networks.npz", **stored)


if __name__ == "__main__":
    main()
