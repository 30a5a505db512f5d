"""Makes ``digits.zip`` beside this script: a small model as TensorFlow 1 programs trained and saved them.

    python tests/golden/generate_digits.py        # needs tensorflow-cpu 2.21 and scikit-learn

It reads the rows of handwritten digits, top to bottom, and after each says which digit it believes it sees. It is
moved in docs/move-tensorflow-1.md. In the archive, written by TensorFlow but for the last:

=====================  ===========================================================================
``digits/model.ckpt``  the checkpoint, with the slots of Adam, and its ``.meta``
``digits/digits.pb``   the graph of inference, frozen
``digits/tf.npz``      digits that were held out, ``x`` and ``labels``, and TensorFlow's ``logits`` for them
=====================  ===========================================================================
"""

import os
import tempfile
import zipfile
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_from_session_graph

v1 = tf.compat.v1
CELLS, HELD_OUT, SHOWN, EPOCHS, BATCH = (40, 32), 297, 20, 60, 50


# The classes and gradients of tf.contrib.rnn, which TensorFlow 2 left out; it still has the ops.
class LSTMBlockCell:
    def __init__(self, units, forget_bias, cell_clip):
        self.output_size, self.state_size = units, (units, units)
        self.options = {"forget_bias": forget_bias, "cell_clip": cell_clip}

    def __call__(self, x, state):
        units = self.output_size
        with v1.variable_scope("lstm_cell"):
            w = v1.get_variable("kernel", (x.shape[1] + units, 4 * units))
            b = v1.get_variable("bias", 4 * units, initializer=v1.zeros_initializer())
            zeros = tf.zeros(units)
            out = tf.raw_ops.LSTMBlockCell(
                x=x, cs_prev=state[0], h_prev=state[1], w=w, wci=zeros, wcf=zeros, wco=zeros, b=b, **self.options
            )
        return out.h, (out.cs, out.h)


class GRUBlockCellV2:
    def __init__(self, units):
        self.output_size = self.state_size = units

    def __call__(self, x, h_prev):
        rows, units = x.shape[1] + self.output_size, self.output_size
        with v1.variable_scope("gru_cell"):
            with v1.variable_scope("gates"):
                w_ru = v1.get_variable("kernel", (rows, 2 * units))
                b_ru = v1.get_variable("bias", 2 * units, initializer=v1.ones_initializer())
            with v1.variable_scope("candidate"):
                w_c = v1.get_variable("kernel", (rows, units))
                b_c = v1.get_variable("bias", units, initializer=v1.zeros_initializer())
            h = tf.raw_ops.GRUBlockCell(x=x, h_prev=h_prev, w_ru=w_ru, w_c=w_c, b_ru=b_ru, b_c=b_c).h
        return h, h


class MultiRNNCell:
    def __init__(self, cells):
        self.cells = cells
        self.output_size, self.state_size = cells[-1].output_size, tuple(each.state_size for each in cells)

    def __call__(self, x, state):
        new = []
        with v1.variable_scope("multi_rnn_cell"):
            for k, cell in enumerate(self.cells):
                with v1.variable_scope(f"cell_{k}"):
                    x, after = cell(x, state[k])
                new.append(after)
        return x, tuple(new)


@tf.RegisterGradient("LSTMBlockCell")
def _(op, *grads):
    x, cs_prev, h_prev, w, wci, wcf, wco, b = op.inputs
    i, cs, f, o, ci, co, _ = op.outputs
    cs_prev_grad, d_icfo, *_ = tf.raw_ops.LSTMBlockCellGrad(
        x=x, cs_prev=cs_prev, h_prev=h_prev, w=w, wci=wci, wcf=wcf, wco=wco, b=b, i=i, cs=cs, f=f, o=o, ci=ci, co=co,
        cs_grad=grads[1], h_grad=grads[6], use_peephole=False,
    )  # fmt: skip
    d_xh = tf.matmul(d_icfo, w, transpose_b=True)
    d_w = tf.matmul(tf.concat([x, h_prev], 1), d_icfo, transpose_a=True)
    size = x.shape[1]
    return d_xh[:, :size], cs_prev_grad, d_xh[:, size:], d_w, None, None, None, tf.reduce_sum(d_icfo, 0)


@tf.RegisterGradient("GRUBlockCell")
def _(op, *grads):
    x, h_prev, w_ru, w_c, b_ru, b_c = op.inputs
    r, u, c, _ = op.outputs
    d_x, d_h_prev, d_c, d_ru = tf.raw_ops.GRUBlockCellGrad(
        x=x, h_prev=h_prev, w_ru=w_ru, w_c=w_c, b_ru=b_ru, b_c=b_c, r=r, u=u, c=c, d_h=grads[3]
    )
    d_w_ru = tf.matmul(tf.concat([x, h_prev], 1), d_ru, transpose_a=True)
    d_w_c = tf.matmul(tf.concat([x, h_prev * r], 1), d_c, transpose_a=True)
    return d_x, d_h_prev, d_w_ru, d_w_c, tf.reduce_sum(d_ru, 0), tf.reduce_sum(d_c, 0)


def dynamic_rnn(cell, x):
    """As tf.nn.dynamic_rnn with time_major=True: a loop over x (T, B, I)."""
    steps, batch = tf.shape(x)[0], tf.shape(x)[1]
    state = tf.nest.map_structure(lambda size: tf.zeros((batch, size)), cell.state_size)
    with v1.variable_scope("rnn"):
        rows, ys = (tf.TensorArray(tf.float32, steps, element_shape=(None, n)) for n in (x.shape[2], cell.output_size))
        rows = rows.unstack(x)

        def body(t, ys, state):
            row = rows.read(t)
            y, state = cell(row, state)
            return t + 1, ys.write(t, y), state

        _, ys, _ = v1.while_loop(lambda t, *_: t < steps, body, (0, ys, state))
        return ys.stack()


def main():
    v1.disable_control_flow_v2()
    v1.disable_resource_variables()
    digits = load_digits()
    x = (digits.images / 16).astype(np.float32).transpose(1, 0, 2)  # rows are the steps: (8, N, 8)
    labels = digits.target
    g = np.random.default_rng(0)
    order = g.permutation(len(labels))
    test, train = order[:HELD_OUT], order[HELD_OUT:]
    with tf.Graph().as_default() as graph, v1.Session() as session:
        v1.set_random_seed(1)
        given = v1.placeholder(tf.float32, (None, None, 8), "x")
        wanted = v1.placeholder(tf.int64, (None,), "labels")
        first, second = CELLS
        cell = MultiRNNCell([LSTMBlockCell(first, forget_bias=1.0, cell_clip=3.0), GRUBlockCellV2(second)])
        y = dynamic_rnn(cell, given)
        with v1.variable_scope("dense"):
            kernel = v1.get_variable("kernel", (second, 10))
            bias = v1.get_variable("bias", 10, initializer=v1.zeros_initializer())
            flat = tf.nn.bias_add(tf.matmul(tf.reshape(y, (-1, second)), kernel), bias)
        logits = tf.reshape(flat, (tf.shape(given)[0], -1, 10), "logits")
        after = logits[3:]  # from the fourth row on
        every = tf.tile(wanted[None], (5, 1))
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=every, logits=after))
        step = v1.train.AdamOptimizer(0.005).minimize(loss, v1.train.get_or_create_global_step())
        session.run(v1.global_variables_initializer())
        for _ in range(EPOCHS):
            order = g.permutation(train)
            for k in range(0, len(order), BATCH):
                part = order[k : k + BATCH]
                lost, _ = session.run([loss, step], {given: x[:, part], wanted: labels[part]})
        found = session.run(logits, {given: x[:, test]})
        print(f"loss {lost:.3f}, right {np.mean(found[-1].argmax(1) == labels[test]):.3f}")
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) / "digits"
            folder.mkdir()
            taken = session.run(v1.train.get_global_step())
            v1.train.Saver(save_relative_paths=True).save(session, str(folder / "model.ckpt"), taken)
            frozen = convert_variables_to_constants_from_session_graph(session, graph.as_graph_def(), ["logits"])
            (folder / "digits.pb").write_bytes(frozen.SerializeToString(deterministic=True))
            shown = test[:SHOWN]
            np.savez(folder / "tf.npz", x=x[:, shown], labels=labels[shown], logits=found[:, :SHOWN])
            with zipfile.ZipFile(Path(__file__).with_name("digits.zip"), "w", zipfile.ZIP_LZMA) as archive:
                for path in sorted(folder.iterdir()):
                    archive.writestr(zipfile.ZipInfo(f"digits/{path.name}"), path.read_bytes(), zipfile.ZIP_DEFLATED, 9)


if __name__ == "__main__":
    main()
