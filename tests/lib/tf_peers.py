"""Graphs that TensorFlow makes and freezes."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path

import numpy as np

CASES = 200
T, B = 5, 3


@contextmanager
def control_flow(v1, version):
    (v1.enable_control_flow_v2 if version == 2 else v1.disable_control_flow_v2)()
    try:
        yield
    finally:
        v1.enable_control_flow_v2()


def unrolled(tf, cell, x, state):
    outputs = []
    for t in range(T):
        state = cell(x[t], *state)
        outputs.append(state[-1])
    return tf.stack(outputs)


def looped(tf, cell, x, state):
    y = tf.TensorArray(cell.dtype, T)

    def body(t, y, *state):
        state = cell(x[t], *state)
        return (t + 1, y.write(t, state[-1]), *state)

    return tf.compat.v1.while_loop(lambda t, *_: t < T, body, (0, y, *state))[1].stack()


def frozen(tf, session, names, folder):
    from tensorflow.python.framework import convert_to_constants

    definition = convert_to_constants.convert_variables_to_constants_from_session_graph(
        session, session.graph.as_graph_def(), names
    )
    path = folder / "frozen.pb"
    path.write_bytes(definition.SerializeToString())
    return path


def save_model(tf, session, form, inputs, outputs, folder):
    """Save a session as a checkpoint, a frozen graph or a SavedModel; return the path to open."""
    v1 = tf.compat.v1
    if form == "checkpoint":
        return Path(v1.train.Saver(sharded=len(outputs) % 2 == 0).save(session, str(folder / "model.ckpt")))
    if form == "frozen":
        return frozen(tf, session, [*outputs], folder)
    v1.saved_model.simple_save(session, str(folder / "saved"), inputs, outputs)
    return folder / "saved"


def find_cell(cells, scope):
    """Return the one of the found cells whose weights are in a scope."""
    (cell,) = (cell for cell in cells.values() if any(f"{scope}/" in name for name in cell.weights.values()))
    return cell


def activations(tf):
    """Return each activation as TensorFlow and Keras write it, by the name that layers have for it.

    max(0.3 * z, z) is not among them: of a later part of a Split, a graph of TensorFlow 2.21 gives something else than
    the same ops one by one.
    """
    return {
        "tanh": tf.tanh,
        "sigmoid": tf.sigmoid,
        "relu": tf.nn.relu,
        "leaky_relu": tf.nn.leaky_relu,
        ("leaky_relu", 0.01): lambda z: tf.nn.leaky_relu(z, 0.01),
        "elu": tf.nn.elu,
        ("hard_sigmoid", 0.25, 0.5): lambda z: tf.clip_by_value(z * 0.25 + 0.5, 0.0, 1.0),
        "selu": tf.nn.selu,
        "softplus": tf.math.softplus,
        "softsign": tf.nn.softsign,
        "exponential": tf.exp,
        "hard_sigmoid": lambda z: tf.nn.relu6(z + 3.0) / 6.0,
        ("hard_sigmoid", 0.2, 0.5): lambda z: tf.clip_by_value(z * 0.2 + 0.5, 0.0, 1.0),
        "linear": tf.identity,
    }


GATES = ["sigmoid", "sigmoid", "hard_sigmoid", ("hard_sigmoid", 0.2, 0.5), "softsign", "tanh"]
"""Activations of gates."""


def weight_shapes(cell):
    """Return the shapes of a cell's weights, by their names."""
    inputs, size, units = cell.I, cell.H, cell.units

    def affine(name, rows, columns):
        return {f"{name}kernel": (rows, columns), f"{name}bias": (columns,)}

    def joined(count, columns=size):
        """Return the shapes of one kernel for [x, h] and `count` gates, and of its bias."""
        return affine("", inputs + size, count * columns)

    def keras(count, bias):
        kernels = {"kernel": (inputs, count * size), "recurrent_kernel": (size, count * size)}
        return kernels | ({"bias": bias} if cell.biased else {})

    def diagonals(gates):
        return {f"w_{gate}_diag": (units,) for gate in gates} if cell.peephole else {}

    gates = affine("gates/", inputs + size, 2 * size)
    match cell.kind:
        case "cudnn_gru":
            gates |= affine("candidate/input_projection/", inputs, size)
            return gates | affine("candidate/hidden_projection/", size, size)
        case "active_gru":
            return gates | affine("c/", inputs + size, size)
        case "minimal":
            return affine("u/", inputs + size, size) | affine("c/", inputs + size, size)
        case "keras_lstm":
            return keras(4, (4 * size,))
        case "keras_gru_after":
            return keras(3, (2, 3 * size))
        case "keras_gru_before":
            return keras(3, (3 * size,))
        case "keras_rnn":
            return keras(1, (size,))
        case "other_lstm":
            return {"w": (inputs + size, 4 * size), "b_1": (4 * size,), "b_2": (4 * size,)}
        case "apart_lstm":
            by_gate = [affine(f"{gate}/", inputs + size, size) for gate in "ifco"]
            return {name: shape for shapes in by_gate for name, shape in shapes.items()}
        case "active_lstm":
            return joined(4) | diagonals("ifo")
        case "coupled_lstm":
            return joined(3) | diagonals("fo")
        case "projected":
            return joined(4, units) | diagonals("ifo") | {"projection/kernel": (units, size)}
        case "projection":
            return joined(4, units) | {"out": (units, size)}
        case "layer_norm":
            return joined(4) | {"gamma": (size,), "beta": (size,)}
        case "sru":
            return {"kernel": (inputs, 3 * size), "bias": (2 * size,)}
        case kind:
            return joined({"plain_rnn": 1, "swish_rnn": 1, "ugrnn": 2, "coupled": 3}.get(kind, 4))


ONE_STATE = ("cudnn_gru", "keras_gru_after", "keras_gru_before", "plain_rnn", "keras_rnn", "active_gru", "swish_rnn",
             "sru", "ugrnn", "minimal")  # fmt: skip


class Cell:
    """A random cell of a kind, as a function of x and its state."""

    dtype = "float32"
    begins = ()

    def __init__(self, tf, g, scope, inputs, kind):
        self.tf, self.g, self.scope, self.I, self.kind = tf, g, scope, inputs, kind
        self.H = int(g.integers(1, 12)) if g.integers(4) else inputs
        self.weights = {}
        self.implementation, self.biased = int(g.integers(1, 3)), bool(g.integers(4))
        self.order = g.permutation(4)
        self.units = self.H + 1 if kind in ("projection", "projected") else self.H
        self.attributes = {}
        """What is found of it, beside what every cell of its kind has."""
        self.size, self.peephole = 2.0, False
        if kind in DRAWN:
            self._draw()
        for name, shape in weight_shapes(self).items():
            values = (g.standard_normal(shape) / self.size).astype(np.float32)
            options = {"initializer": values, "use_resource": bool(g.integers(2))}
            self.weights[name] = tf.compat.v1.get_variable(f"{scope}/{name}", **options)
        self.state_sizes = [self.H] if kind in ONE_STATE else [self.units, self.H]
        self.states = len(self.state_sizes)

    def zeros(self):
        return [self.tf.zeros((B, size)) for size in self.state_sizes]

    def _draw(self):
        """Draw activations and options."""
        g, known = self.g, [*activations(self.tf)]
        gated = "rnn" not in self.kind
        drawn = {"activation": known[g.integers(len(known))]}
        if gated:
            drawn["recurrent_activation"] = GATES[g.integers(len(GATES))]
        self.activate, self.gate = (activations(self.tf)[drawn.get(name, "sigmoid")] for name in DEFAULTS)
        self.attributes = {name: value for name, value in drawn.items() if not gated or value != DEFAULTS[name]}
        self.size = 2.5 * max(self.H, self.units, self.I) ** 0.5  # so that none of them grows without end
        self.peephole, self.forget = bool(g.integers(2)), float(g.choice([0, 0.5, 1]))
        self.clip, self.proj_clip = (float(g.choice([0, size])) for size in (0.25, 0.125))
        if drawn["activation"] == "exponential":  # which grows without end where nothing clips it
            self.clip = 0.25

    def start(self, fed):
        """Draw the first state: zeros, constants, variables or what is fed; set `begins`. `fed` tells the batch."""
        tf, g, begun, states = self.tf, self.g, [], []
        for name, size in zip(("cs", "h")[-self.states :], self.state_sizes, strict=True):
            form = str(g.choice(["zeros", "zeros", "constant", "number", "variable", "tiled", "added", "fed"]))
            is_one_row = form in ("tiled", "added")
            rows = g.uniform(-0.5, 0.5, (1 if is_one_row else B, size)).astype(np.float32)
            if form == "zeros":
                states.append(tf.zeros((tf.shape(fed)[1], size)))
                continue
            if form == "number":
                rows = np.full((1, size), 0.25, np.float32)
                states.append(tf.fill((tf.shape(fed)[1], size), 0.25))
            elif form == "constant":
                states.append(tf.constant(rows))
            elif form == "fed":
                states.append(tf.compat.v1.placeholder_with_default(rows, (None, size)))
            else:
                shape = rows if form != "added" else rows[0]
                variable = self.tf.compat.v1.get_variable(f"{self.scope}/first_{name}", initializer=shape)
                if form == "tiled":
                    states.append(tf.tile(variable, (tf.shape(fed)[1], 1)))
                elif form == "added":
                    states.append(tf.zeros((tf.shape(fed)[1], size)) + variable)
                else:
                    states.append(tf.identity(variable))
            begun.append((name, None if form == "fed" else rows, rows))
        self.begins = begun
        return states

    def __call__(self, x, *state):
        with self.tf.compat.v1.name_scope(f"{self.scope.replace('/', '_')}_step"):
            after = getattr(self, self.kind)(x, state[0] if len(state) == 2 else None, state[-1])
            return after if isinstance(after, tuple) else (after,)

    def affine(self, name, x):
        return self.tf.nn.bias_add(x @ self.weights[f"{name}kernel"], self.weights[f"{name}bias"])

    def gates(self, x, h, count):
        """Return the sums of gates by one kernel for [x, h]."""
        return self.tf.split(self.affine("", self.tf.concat([x, h], 1)), count, 1)

    def lstm(self, sums, cs, gate=None, activate=None, activate_output=None, forget=None, clip=0.0):
        """Return cs and h by the sums i, j, f and o; i is None where f gives it."""
        tf, w, (i, j, f, o) = self.tf, self.weights, sums
        gate, activate = gate or tf.sigmoid, activate or tf.tanh
        f = f if forget is None else f + forget
        if self.peephole:
            f = f + w["w_f_diag"] * cs
            i = None if i is None else i + w["w_i_diag"] * cs
        f = gate(f)
        cs = f * cs + (1 - f if i is None else gate(i)) * activate(j)
        cs = tf.clip_by_value(cs, -clip, clip) if clip > 0 else cs
        o = o + w["w_o_diag"] * cs if self.peephole else o
        return cs, gate(o) * (activate_output or activate)(cs)

    # ------------------------------------------------------------------------------------------------ those with layers
    def cudnn_gru(self, x, _, h):
        tf = self.tf
        r, u = tf.split(tf.sigmoid(self.affine("gates/", tf.concat([x, h], 1))), 2, 1)
        c = r * self.affine("candidate/hidden_projection/", h)
        c = tf.tanh(c + self.affine("candidate/input_projection/", x))
        return (1 - u) * c + u * h

    def keras_lstm(self, x, cs, h):
        tf, w, size = self.tf, self.weights, self.H
        if self.implementation == 2:
            z = x @ w["kernel"] + h @ w["recurrent_kernel"]
            z = tf.split(tf.nn.bias_add(z, w["bias"]) if self.biased else z, 4, 1)
        else:
            z = [x @ part for part in tf.split(tf.convert_to_tensor(w["kernel"]), 4, 1)]
            if self.biased:
                z = [bar + b for bar, b in zip(z, tf.split(tf.convert_to_tensor(w["bias"]), 4, 0), strict=True)]
            parts = [w["recurrent_kernel"][:, k * size : (k + 1) * size] for k in range(4)]
            z = [bar + h @ part for bar, part in zip(z, parts, strict=True)]
        i, f, c, o = z
        return self.lstm([i, c, f, o], cs)

    def other_lstm(self, x, cs, h):
        """Compute an LSTM with gates in any order, a kernel for [h, x], and a bias in two parts."""
        tf, w = self.tf, self.weights
        z = tf.split(tf.concat([h, x], 1) @ w["w"] + w["b_1"] + w["b_2"], 4, 1)
        i, f, o, c = (z[k] for k in self.order)
        cs = tf.tanh(c) * tf.sigmoid(i) + cs * tf.sigmoid(0.5 + f)
        return cs, tf.tanh(cs) * tf.sigmoid(o)

    def apart_lstm(self, x, cs, h):
        """Compute an LSTM with a kernel and a bias for each gate."""
        both = self.tf.concat([x, h], 1)
        return self.lstm([self.affine(f"{gate}/", both) for gate in "icfo"], cs)

    def plain_rnn(self, x, _, h):
        return self.activate(self.affine("", self.tf.concat([x, h], 1)))

    def keras_rnn(self, x, _, h):
        w = self.weights
        z = x @ w["kernel"]
        z = (self.tf.nn.bias_add(z, w["bias"]) if self.biased else z) + h @ w["recurrent_kernel"]
        return self.activate(z)

    def active_lstm(self, x, cs, h):
        """LSTMCell with whatever it may be given, but a projection."""
        return self.drawn_lstm(self.gates(x, h, 4), cs)

    def coupled_lstm(self, x, cs, h):
        return self.drawn_lstm([None, *self.gates(x, h, 3)], cs)

    def projected(self, x, cs, h):
        cs, h = self.drawn_lstm(self.gates(x, h, 4), cs)
        h = h @ self.weights["projection/kernel"]
        return cs, self.tf.clip_by_value(h, -self.proj_clip, self.proj_clip) if self.proj_clip else h

    def drawn_lstm(self, sums, cs):
        """Return cs and h with the activations and options that were drawn."""
        return self.lstm(sums, cs, self.gate, self.activate, forget=self.forget, clip=self.clip)

    def active_gru(self, x, _, h):
        """GRUCell, or one that resets after the product."""
        tf = self.tf
        r, u = tf.split(self.gate(self.affine("gates/", tf.concat([x, h], 1))), 2, 1)
        return u * h + (1 - u) * self.activate(self.affine("c/", tf.concat([x, r * h], 1)))

    # --------------------------------------------------------------------------------------------------- those without
    def layer_norm(self, x, cs, h):
        tf = self.tf

        def normal(a):
            mean, variance = tf.nn.moments(a, [1], keepdims=True)
            return tf.nn.batch_normalization(a, mean, variance, self.weights["beta"], self.weights["gamma"], 1e-6)

        i, j, f, o = map(normal, self.gates(x, h, 4))
        cs = normal(cs * tf.sigmoid(f + 1) + tf.sigmoid(i) * tf.tanh(j))
        return cs, tf.tanh(cs) * tf.sigmoid(o)

    def coupled(self, x, cs, h):
        return self.lstm([None, *self.gates(x, h, 3)], cs, forget=1)

    def projection(self, x, cs, h):
        cs, h = self.lstm(self.gates(x, h, 4), cs, forget=1)
        return cs, h @ self.weights["out"]

    def relu(self, x, cs, h):
        return self.lstm(self.gates(x, h, 4), cs, activate=self.tf.nn.relu)

    def hard_sigmoid(self, x, cs, h):
        return self.lstm(self.gates(x, h, 4), cs, lambda a: self.tf.clip_by_value(0.2 * a + 0.5, 0.0, 1.0))

    def swish(self, x, cs, h):
        return self.lstm(self.gates(x, h, 4), cs, activate=lambda a: a * self.tf.sigmoid(a))

    def swish_rnn(self, x, _, h):
        z = self.affine("", self.tf.concat([x, h], 1))
        return z * self.tf.sigmoid(z)

    def mixed(self, x, cs, h):
        return self.lstm(self.gates(x, h, 4), cs, activate=self.tf.nn.softsign, activate_output=self.tf.tanh)

    def mixed_gates(self, x, cs, h):
        tf = self.tf
        i, j, f, o = self.gates(x, h, 4)
        cs = tf.nn.softsign(f) * cs + tf.sigmoid(i) * tf.tanh(j)
        return cs, tf.sigmoid(o) * tf.tanh(cs)

    def sru(self, x, _, c):
        """Compute an SRU, whose state is c; what it gives beside that is not looked at."""
        tf = self.tf
        z, f, r = tf.split(x @ self.weights["kernel"], 3, 1)
        f, r = tf.split(tf.sigmoid(tf.nn.bias_add(tf.concat([f, r], 1), self.weights["bias"])), 2, 1)
        return f * c + (1.0 - f) * z

    def ugrnn(self, x, _, h):
        tf = self.tf
        g, c = self.gates(x, h, 2)
        g = tf.sigmoid(g + 1)
        return g * h + (1 - g) * tf.tanh(c)

    def zoneout(self, x, cs, h):
        """Compute an LSTM with zoneout, as in inference."""
        after = self.lstm(self.gates(x, h, 4), cs, forget=1)
        return tuple(0.1 * old + 0.9 * new for old, new in zip((cs, h), after, strict=True))

    def random_zoneout(self, x, cs, h):
        """Compute an LSTM with zoneout, as in training."""
        after, tf = self.lstm(self.gates(x, h, 4), cs, forget=1), self.tf
        keep = [tf.random.uniform((B, self.H)) < 0.1 for _ in range(2)]
        return tuple(tf.where(k, old, new) for k, old, new in zip(keep, (cs, h), after, strict=True))

    def minimal(self, x, _, h):
        """Compute a minimal GRU of the other convention: 1 - u keeps the state."""
        tf = self.tf
        u = tf.sigmoid(self.affine("u/", tf.concat([x, h], 1)))
        return (1 - u) * h + u * tf.tanh(self.affine("c/", tf.concat([x, u * h], 1)))

    def keras_gru_after(self, x, _, h):
        return self._keras_gru(x, h, after=True)

    def keras_gru_before(self, x, _, h):
        return self._keras_gru(x, h, after=False)

    def _keras_gru(self, x, h, after):
        tf, w, size = self.tf, self.weights, self.H
        biases = tf.unstack(w["bias"]) if after and self.biased else [w.get("bias"), None]

        def plus(a, b, k=None):
            return a if b is None else tf.nn.bias_add(a, b) if k is None else a + b[k * size : (k + 1) * size]

        def part(name, k):
            return w[name][:, k * size : (k + 1) * size]

        if self.implementation == 2:
            z = tf.split(plus(x @ w["kernel"], biases[0]), 3, 1)
            columns = w["recurrent_kernel"] if after else w["recurrent_kernel"][:, : 2 * size]
            inner = plus(h @ columns, biases[1])
            inner = [inner[:, k * size : (k + 1) * size] for k in range(3 if after else 2)]
        else:
            z = [plus(x @ part("kernel", k), biases[0], k) for k in range(3)]
            inner = [plus(h @ part("recurrent_kernel", k), biases[1], k) for k in range(3 if after else 2)]
        u, r = tf.sigmoid(z[0] + inner[0]), tf.sigmoid(z[1] + inner[1])
        c = r * inner[2] if after else (r * h) @ part("recurrent_kernel", 2)
        return u * h + (1 - u) * tf.tanh(z[2] + c)


GOOD = {
    "cudnn_gru": "CudnnCompatibleGRUCell",
    "keras_lstm": "Keras LSTM",
    "keras_gru_after": "Keras GRU",
    "keras_gru_before": "Keras GRU",
    "other_lstm": "",
    "apart_lstm": "",
    "coupled": "LSTM",
    "projection": "LSTM",
    "relu": "LSTM",
    "hard_sigmoid": "LSTM",
    "plain_rnn": "RNN",
    "keras_rnn": "Keras SimpleRNN",
    "active_lstm": "LSTM",
    "coupled_lstm": "LSTM",
    "projected": "LSTM",
    "active_gru": "GRU",
}
DEFAULTS = {"activation": "tanh", "recurrent_activation": "sigmoid"}
DRAWN = ("plain_rnn", "keras_rnn", "active_lstm", "coupled_lstm", "projected", "active_gru")
"""Those that draw their activations."""
BAD = {
    "layer_norm": "layer normalization",
    "swish": "is no RNN, LSTM or GRU",
    "swish_rnn": "is no RNN, LSTM or GRU",
    "mixed": "its cell state is not what the block cells have",
    "mixed_gates": "have different activations",
    "sru": "which is a Split, is not what a GRU has there",
    "ugrnn": "which is a Tanh, is not what a GRU has there",
    "zoneout": "its (cell )?state is not (its output|that) of the step before",
    "random_zoneout": "it changes its state at random|its state is kept at random, by the node",
    "minimal": "is no RNN, LSTM or GRU",
}
