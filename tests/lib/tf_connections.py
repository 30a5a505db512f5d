"""Random networks of Keras and of TensorFlow 1, right ones and such as no layer computes, and what a layer gives."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tf_peers import control_flow, frozen

from blockcell import Bidirectional, Stack
from blockcell.convert import ConversionError
from blockcell.tensorflow import open as opened

T, B = 6, 3
BOUND = 1e-4
BETWEEN = ["", "", "", "", "flip", "every other", "relu", "dense", "normalization", "dropout", "residual", "twice"]
"""What is between two levels, or in front of the merge of one direction."""
MERGES = ["concat", "concat", "concat", "concat", "swapped", "add", "mul", "after each other"]


class Drawn(NamedTuple):
    """A network that was written to a file, with an input and what TensorFlow computes."""

    path: Path
    x: np.ndarray
    lengths: np.ndarray | None
    y: np.ndarray
    """Of the cells, without a Dense behind them."""
    description: str


class Network:
    """Draws a network; a subclass has the ops of Keras or of TensorFlow 1."""

    def __init__(self, g):
        self.g, self.told = g, []

    def choose(self, *options):
        choice = options[self.g.integers(len(options))]
        self.told.append(str(choice))
        return choice

    def network(self, x):
        """Return the outputs of one or two levels of x, batch first."""
        y, states = x, {}
        for _ in range(int(self.g.integers(0, 2))):
            y = self.between(self.level(y, states, last=False))
        below, last = y, not self.g.integers(4)
        y = self.level(y, states, last)
        if below is x or last or self.choose(*[""] * 5, "beside what is below") == "":
            return y
        return self.joined([below, y], -1)

    def level(self, x, states, last):
        """Return the outputs of one direction or of both."""
        if last:
            self.told.append("last step")
        kind = self.choose("forward", "forward", "backward", "both", "both")
        size = int(self.g.integers(2, 6))
        if kind != "both":
            return self.direction(x, size, states, kind == "backward", last)
        parts = [self.direction(x, size, states, backward, last) for backward in (False, True)]
        parts = [self.between(part, dense=size) if not last else part for part in parts]
        merge = self.choose(*MERGES[: -1 if last else None])
        if merge in ("add", "mul"):
            return self.merged(parts, merge)
        return self.joined(parts[:: -1 if merge == "swapped" else 1], 1 if merge == "after each other" else -1)

    def direction(self, x, size, states, backward, last):
        """Return the outputs of one direction, which may start from the states of another cell."""
        below = states.get(size) if not self.g.integers(5) else None
        if below is not None:
            self.told.append("from a state")
        y, states[size] = self.cell(self.flip(x) if backward and self.flips else x, size, below, backward, last)
        if not backward or last:
            return y
        turned = self.choose("back", "back", "back", "back", "not turned back")
        return self.flip(y) if turned == "back" else y

    def between(self, y, dense=None):
        """Return what is made of a sequence."""
        return self.applied(self.choose(*BETWEEN), y, dense or int(self.g.integers(2, 6)))


class KerasNetwork(Network):
    """One of layers of Keras 2 or 3."""

    flips = False

    def __init__(self, keras, g, steps):
        super().__init__(g)
        self.keras, self.steps, self.kind = keras, steps, self.choose("LSTM", "GRU", "SimpleRNN")

    def cell(self, x, size, below, backward, last):
        layer = getattr(self.keras.layers, self.kind)
        sequences, unroll = not last, self.steps is not None and not self.g.integers(5)
        made = layer(size, return_sequences=sequences, return_state=True, go_backwards=backward, unroll=unroll)
        y, *state = made(x) if below is None else made(x, initial_state=below)
        return y, state

    def flip(self, y):
        return self.keras.layers.Lambda(lambda z: z[:, ::-1], output_shape=lambda shape: shape)(y)

    def merged(self, parts, merge):
        return {"add": self.keras.layers.Add, "mul": self.keras.layers.Multiply}[merge]()(parts)

    def joined(self, parts, axis):
        return self.keras.layers.Concatenate(axis=axis)(parts)

    def applied(self, name, y, size):
        layers = self.keras.layers
        if name in ("flip", "twice"):
            return self.flip(y) if name == "flip" else self.flip(self.flip(y))
        if name == "every other":
            return layers.Lambda(lambda z: z[:, ::2], output_shape=lambda shape: (shape[0], T // 2, shape[2]))(y)
        if name == "residual":
            return layers.Add()([y, y])
        made = {"relu": layers.ReLU, "dense": lambda: layers.Dense(size), "normalization": layers.LayerNormalization,
                "dropout": lambda: layers.Dropout(0.5)}.get(name)  # fmt: skip
        return y if made is None else made()(y)


class GraphNetwork(Network):
    """One of ops of TensorFlow 1."""

    flips = True

    def __init__(self, tf, g, lengths):
        super().__init__(g)
        self.tf, self.lengths, self.count = tf, lengths, 0
        self.kind = self.choose("lstm", "gru")

    def cell(self, x, size, below, backward, last):
        tf, g = self.tf, self.g
        self.count += 1
        scope, inputs, is_lstm = f"layer_{self.count}/cell", int(x.shape[-1]), self.kind == "lstm"
        shapes = [(inputs + size, 4 * size), (4 * size,)] if is_lstm else [
            (inputs + size, 2 * size), (inputs + size, size), (2 * size,), (size,)]  # fmt: skip
        names = ["kernel", "bias"] if is_lstm else ["gates/kernel", "candidate/kernel", "gates/bias", "candidate/bias"]
        w = [tf.compat.v1.get_variable(f"{scope}/{name}", initializer=(g.standard_normal(shape) / 2).astype("float32"))
             for name, shape in zip(names, shapes, strict=True)]  # fmt: skip

        def step(x, state):
            if is_lstm:
                zeros = tf.zeros((size,))
                out = tf.raw_ops.LSTMBlockCell(x=x, cs_prev=state[0], h_prev=state[1], w=w[0], b=w[1],
                                               wci=zeros, wcf=zeros, wco=zeros)  # fmt: skip
                return out.cs, out.h
            return (tf.raw_ops.GRUBlockCell(x=x, h_prev=state[0], w_ru=w[0], w_c=w[1], b_ru=w[2], b_c=w[3]).h,)

        zeros = [tf.zeros((tf.shape(x)[0], size))] * (2 if is_lstm else 1)
        state, rows = tuple(below or zeros), tf.transpose(x, [1, 0, 2])
        array = tf.TensorArray("float32", tf.shape(rows)[0]).unstack(rows)
        limit = tf.fill((tf.shape(x)[0],), tf.shape(rows)[0]) if self.lengths is None else self.lengths

        def body(t, y, *state):
            after = step(array.read(t), state)
            done = (t >= limit)[:, None]
            after = [tf.where(done, old, new) for old, new in zip(state, after, strict=True)]
            return (t + 1, y.write(t, tf.where(done, tf.zeros_like(after[-1]), after[-1])), *after)

        y = tf.TensorArray("float32", tf.shape(rows)[0])
        loop = tf.compat.v1.while_loop(lambda t, *_: t < tf.shape(rows)[0], body, (0, y, *state))
        y = tf.transpose(loop[1].stack(), [1, 0, 2])
        y.set_shape((None, None, size))
        return (loop[-1] if last else y), list(loop[2:])

    def flip(self, y):
        if self.lengths is None:
            return self.tf.reverse(y, [1])
        return self.tf.reverse_sequence(y, self.lengths, seq_axis=1, batch_axis=0)

    def merged(self, parts, merge):
        return parts[0] + parts[1] if merge == "add" else parts[0] * parts[1]

    def joined(self, parts, axis):
        return self.tf.concat(parts, axis)

    def applied(self, name, y, size):
        tf = self.tf
        if name in ("flip", "twice"):
            return self.flip(y) if name == "flip" else self.flip(self.flip(y))
        if name == "dense":
            kernel = self.g.standard_normal((int(y.shape[-1]), size)).astype("float32")
            return tf.tensordot(y, tf.constant(kernel), 1)
        if name == "normalization":
            return (y - tf.reduce_mean(y, -1, keepdims=True)) / tf.math.reduce_std(y, -1, keepdims=True)
        return {"every other": lambda: y[:, ::2], "relu": lambda: tf.nn.relu(y), "residual": lambda: y + y}.get(
            name, lambda: y
        )()


def draw_keras(tf, keras, g, folder):
    """Draw a functional model and save it; None if its parts do not fit together."""
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

    inputs, steps = int(g.integers(2, 5)), T if g.integers(3) else None
    network, x_input = KerasNetwork(keras, g, steps), keras.layers.Input((steps, inputs))
    try:
        y = network.network(x_input)
    except (ValueError, TypeError):
        return None
    model = keras.Model(x_input, [y, keras.layers.Dense(2)(y)] if g.integers(2) else y)
    model.set_weights([(g.standard_normal(array.shape) / 2).astype("float32") for array in model.get_weights()])
    x = g.standard_normal((B, T, inputs)).astype("float32")
    spec = tf.TensorSpec((None, *x_input.shape[1:]))
    call = tf.function(lambda x: model(x, training=False), input_signature=[spec])
    try:
        results = call(tf.constant(x))
    except (ValueError, tf.errors.InvalidArgumentError):
        return None
    path = folder / "model.pb"
    if g.integers(3):
        constants = convert_variables_to_constants_v2(
            call.get_concrete_function(), lower_control_flow=bool(g.integers(2))
        )
        path.write_bytes(constants.graph.as_graph_def().SerializeToString())
    else:
        path = folder / "saved"
        save = model.export if hasattr(model, "export") else model.save
        save(str(path))
    y = results[0] if isinstance(results, (list, tuple)) else results
    return Drawn(path, x, None, np.asarray(y), " ".join(network.told))


def draw_graph(tf, g, folder):
    """Draw a graph of TensorFlow 1, with either control flow; None if its parts do not fit together."""
    v1, inputs = tf.compat.v1, int(g.integers(2, 5))
    with control_flow(v1, int(g.integers(1, 3))), tf.Graph().as_default(), v1.Session() as session:
        x = v1.placeholder("float32", (None, None, inputs), "x")
        lengths = v1.placeholder("int32", (None,), "lengths") if g.integers(2) else None
        network = GraphNetwork(tf, g, lengths)
        try:
            y = tf.identity(network.network(x), "y")
        except ValueError:
            return None
        z = tf.nn.tanh(y, "z")
        session.run(v1.global_variables_initializer())
        x_values, counts = g.standard_normal((B, T, inputs)).astype("float32"), np.array([T, 2, 4], np.int32)
        try:
            expected = session.run(y, {x: x_values} | ({} if lengths is None else {lengths: counts}))
        except tf.errors.InvalidArgumentError:
            return None
        path = frozen(tf, session, ["y", z.op.name] if g.integers(2) else ["y"], folder)
    told = [*network.told, *(["lengths"] if lengths is not None else [])]
    return Drawn(path, x_values, None if lengths is None else counts, expected, " ".join(told))


def judge(drawn):
    """Return "right", "refused", "remarked" or "wrong", and why; also of a right layer that is refused or remarked."""
    cells = opened(drawn.path).cells
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        try:
            layer = cells.layer()
        except ConversionError as error:
            is_lost = is_right(cells.layer(check=False), drawn)
            return "refused, and right" if is_lost else "refused", str(error)
        except ValueError as error:
            return "refused", str(error)
    verdict = "right" if is_right(layer, drawn) else "wrong"
    if not record:
        return verdict, repr(layer)
    return f"remarked, and {verdict}", "; ".join(str(warning.message) for warning in record)


def is_right(layer, drawn):
    """Return whether a layer gives what TensorFlow computes: y, its last step, or the last states of each direction."""
    options = {} if drawn.lengths is None else {"lengths": drawn.lengths}
    y, last = layer(drawn.x, batch_first=True, **options)
    counts = np.ones(y.shape[:2], bool) if drawn.lengths is None else np.arange(T) < drawn.lengths[:, None]
    for form in (y, y[:, -1], last_outputs(layer, last)):
        if form.shape == drawn.y.shape:
            differences = np.abs(form - drawn.y).max(-1)
            if (differences[counts] if form.ndim == 3 else differences).max() <= BOUND:
                return True
    return False


def last_outputs(layer, last):
    """Return the last h of the top layer, of both directions side by side."""
    if isinstance(layer, Stack):
        return last_outputs(layer.layers[-1], last[-1])
    if isinstance(layer, Bidirectional):
        return np.concatenate([last_outputs(*pair) for pair in zip((layer.fw, layer.bw), last, strict=True)], -1)
    return last.h
