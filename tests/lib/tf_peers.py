"""Graphs that TensorFlow makes and freezes."""

from __future__ import annotations

import os
import random
from contextlib import contextmanager

import numpy as np

SEED = int(os.environ.get("BLOCKCELL_SEED", random.randrange(10**6)))
CASES = 200
T, B = 5, 2


@contextmanager
def control_flow(v1, version):
    (v1.enable_control_flow_v2 if version == 2 else v1.disable_control_flow_v2)()
    try:
        yield
    finally:
        v1.enable_control_flow_v2()


def unrolled(tf, cell, x, state):
    found = []
    for t in range(T):
        state = cell(x[t], *state)
        found.append(state[-1])
    return tf.stack(found)


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


def activations(tf):
    """Each as TensorFlow and Keras write it, by what layers have for it.

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
        ("elu", 0.5): lambda z: tf.where(z > 0, tf.nn.elu(z), 0.5 * tf.nn.elu(z)),
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
        self.size = 2.0
        if kind in DRAWN:
            self._draw()
        self.made = False
        self.function = getattr(self, kind)
        self.state_sizes = [self.units, self.H] if self.function(None, None, None) == 2 else [self.H]
        self.made = True
        self.states = len(self.state_sizes)

    def w(self, name, *shape):
        if name not in self.weights:
            values = (self.g.standard_normal(shape) / self.size).astype(np.float32)
            options = {"initializer": values, "use_resource": bool(self.g.integers(2))}
            self.weights[name] = self.tf.compat.v1.get_variable(f"{self.scope}/{name}", **options)
        return self.weights[name]

    def zeros(self):
        return [self.tf.zeros((B, size)) for size in self.state_sizes]

    def _draw(self):
        """Its activations and options."""
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

    def start(self, fed):
        """Its first state: zeros, constants, variables or what is fed, as `begins` says; `fed` gets that."""
        tf, g, begun, made = self.tf, self.g, [], []
        for name, size in zip(("cs", "h")[-self.states :], self.state_sizes, strict=True):
            form = str(g.choice(["zeros", "zeros", "constant", "number", "variable", "tiled", "added", "fed"]))
            one = form in ("tiled", "added")
            rows = g.uniform(-0.5, 0.5, (1 if one else B, size)).astype(np.float32)
            if form == "zeros":
                made.append(tf.zeros((tf.shape(fed)[1], size)))
                continue
            if form == "number":
                rows = np.full((1, size), 0.25, np.float32)
                made.append(tf.fill((tf.shape(fed)[1], size), 0.25))
            elif form == "constant":
                made.append(tf.constant(rows))
            elif form == "fed":
                made.append(tf.compat.v1.placeholder_with_default(rows, (None, size)))
            else:
                shape = rows if form != "added" else rows[0]
                variable = self.tf.compat.v1.get_variable(f"{self.scope}/first_{name}", initializer=shape)
                if form == "tiled":
                    made.append(tf.tile(variable, (tf.shape(fed)[1], 1)))
                else:
                    made.append(tf.zeros((tf.shape(fed)[1], size)) + variable if one else tf.identity(variable))
            begun.append((name, None if form == "fed" else rows, rows))
        self.begins = begun
        return made

    def __call__(self, x, *state):
        with self.tf.compat.v1.name_scope(f"{self.scope.replace('/', '_')}_step"):
            after = self.function(x, state[0] if len(state) == 2 else None, state[-1])
            return after if isinstance(after, tuple) else (after,)

    def affine(self, name, x, size):
        return self.tf.nn.bias_add(x @ self.w(f"{name}kernel", int(x.shape[-1]), size), self.w(f"{name}bias", size))

    # ------------------------------------------------------------------------------------------------ those with layers
    def cudnn_gru(self, x, _, h):
        if not self.made:
            return self._variables({"gates/kernel": (self.I + self.H, 2 * self.H), "gates/bias": (2 * self.H,),
                                    "candidate/input_projection/kernel": (self.I, self.H),
                                    "candidate/input_projection/bias": (self.H,),
                                    "candidate/hidden_projection/kernel": (self.H, self.H),
                                    "candidate/hidden_projection/bias": (self.H,)}, 1)  # fmt: skip
        tf = self.tf
        r, u = tf.split(tf.sigmoid(self.affine("gates/", tf.concat([x, h], 1), 2 * self.H)), 2, 1)
        c = r * self.affine("candidate/hidden_projection/", h, self.H)
        c = tf.tanh(c + self.affine("candidate/input_projection/", x, self.H))
        return (1 - u) * c + u * h

    def keras_lstm(self, x, cs, h):
        if not self.made:
            bias = {"bias": (4 * self.H,)} if self.biased else {}
            return self._variables({"kernel": (self.I, 4 * self.H), "recurrent_kernel": (self.H, 4 * self.H)} | bias, 2)
        tf, w, size = self.tf, self.weights, self.H
        if self.implementation == 2:
            z = x @ w["kernel"] + h @ w["recurrent_kernel"]
            z = tf.split(tf.nn.bias_add(z, w["bias"]) if self.biased else z, 4, 1)
        else:
            z = [x @ part for part in tf.split(tf.convert_to_tensor(w["kernel"]), 4, 1)]
            if self.biased:
                z = [each + b for each, b in zip(z, tf.split(tf.convert_to_tensor(w["bias"]), 4, 0), strict=True)]
            parts = [w["recurrent_kernel"][:, k * size : (k + 1) * size] for k in range(4)]
            z = [each + h @ part for each, part in zip(z, parts, strict=True)]
        cs = tf.sigmoid(z[1]) * cs + tf.sigmoid(z[0]) * tf.tanh(z[2])
        return cs, tf.sigmoid(z[3]) * tf.tanh(cs)

    def other_lstm(self, x, cs, h):
        """Its gates in any order, its kernel for [h, x], its bias in two parts."""
        if not self.made:
            return self._variables({"w": (self.I + self.H, 4 * self.H), "b_1": (4 * self.H,), "b_2": (4 * self.H,)}, 2)
        tf, w = self.tf, self.weights
        z = tf.split(tf.concat([h, x], 1) @ w["w"] + w["b_1"] + w["b_2"], 4, 1)
        i, f, o, c = (z[k] for k in self.order)
        cs = tf.tanh(c) * tf.sigmoid(i) + cs * tf.sigmoid(0.5 + f)
        return cs, tf.tanh(cs) * tf.sigmoid(o)

    def apart_lstm(self, x, cs, h):
        """A kernel and a bias for each gate."""
        if not self.made:
            shapes = {f"{gate}/{name}": shape for gate in "ifco" for name, shape in
                      {"kernel": (self.I + self.H, self.H), "bias": (self.H,)}.items()}  # fmt: skip
            return self._variables(shapes, 2)
        tf, both = self.tf, self.tf.concat([x, h], 1)
        i, f, c, o = (self.affine(f"{gate}/", both, self.H) for gate in "ifco")
        cs = tf.sigmoid(f) * cs + tf.sigmoid(i) * tf.tanh(c)
        return cs, tf.sigmoid(o) * tf.tanh(cs)

    def plain_rnn(self, x, _, h):
        if not self.made:
            return self._joined(1, 1)
        return self.activate(self.affine("", self.tf.concat([x, h], 1), self.H))

    def keras_rnn(self, x, _, h):
        if not self.made:
            bias = {"bias": (self.H,)} if self.biased else {}
            return self._variables({"kernel": (self.I, self.H), "recurrent_kernel": (self.H, self.H)} | bias, 1)
        w = self.weights
        z = x @ w["kernel"]
        z = (self.tf.nn.bias_add(z, w["bias"]) if self.biased else z) + h @ w["recurrent_kernel"]
        return self.activate(z)

    def active_lstm(self, x, cs, h):
        """LSTMCell with whatever it may be given, but a projection."""
        if not self.made:
            diagonals = {f"w_{gate}_diag": (self.H,) for gate in "ifo"} if self.peephole else {}
            return self._joined(4, 2, **diagonals)
        return self._any_lstm(x, cs, h, self.gates(x, h, 4))

    def coupled_lstm(self, x, cs, h):
        if not self.made:
            diagonals = {f"w_{gate}_diag": (self.H,) for gate in "fo"} if self.peephole else {}
            return self._joined(3, 2, **diagonals)
        return self._any_lstm(x, cs, h, [None, *self.gates(x, h, 3)])

    def projected(self, x, cs, h):
        if not self.made:
            diagonals = {f"w_{gate}_diag": (self.units,) for gate in "ifo"} if self.peephole else {}
            return self._joined(4, 2, units=self.units, **diagonals, **{"projection/kernel": (self.units, self.H)})
        z = self.tf.split(self.affine("", self.tf.concat([x, h], 1), 4 * self.units), 4, 1)
        cs, h = self._any_lstm(x, cs, h, z)
        h = h @ self.weights["projection/kernel"]
        return cs, self.tf.clip_by_value(h, -self.proj_clip, self.proj_clip) if self.proj_clip else h

    def _any_lstm(self, x, cs, h, gates):
        tf, w = self.tf, self.weights
        i, j, f, o = gates
        if self.peephole:
            f = f + self.forget + w["w_f_diag"] * cs
            i = None if i is None else i + w["w_i_diag"] * cs
        else:
            f = f + self.forget
        f = self.gate(f)
        cs = f * cs + (1 - f if i is None else self.gate(i)) * self.activate(j)
        cs = tf.clip_by_value(cs, -self.clip, self.clip) if self.clip else cs
        o = o + w["w_o_diag"] * cs if self.peephole else o
        return cs, self.gate(o) * self.activate(cs)

    def active_gru(self, x, _, h):
        """GRUCell, or one that resets after the product."""
        if not self.made:
            shapes = {"gates/kernel": (self.I + self.H, 2 * self.H), "gates/bias": (2 * self.H,)}
            return self._variables(shapes | {"c/kernel": (self.I + self.H, self.H), "c/bias": (self.H,)}, 1)
        tf = self.tf
        r, u = tf.split(self.gate(self.affine("gates/", tf.concat([x, h], 1), 2 * self.H)), 2, 1)
        return u * h + (1 - u) * self.activate(self.affine("c/", tf.concat([x, r * h], 1), self.H))

    # --------------------------------------------------------------------------------------------------- those without
    def gates(self, x, h, count, name=""):
        return self.tf.split(self.affine(name, self.tf.concat([x, h], 1), count * self.H), count, 1)

    def layer_norm(self, x, cs, h):
        if not self.made:
            return self._joined(4, 2, gamma=(self.H,), beta=(self.H,))
        tf = self.tf

        def normal(a):
            mean, variance = tf.nn.moments(a, [1], keepdims=True)
            return tf.nn.batch_normalization(a, mean, variance, self.weights["beta"], self.weights["gamma"], 1e-6)

        i, j, f, o = map(normal, self.gates(x, h, 4))
        cs = normal(cs * tf.sigmoid(f + 1) + tf.sigmoid(i) * tf.tanh(j))
        return cs, tf.tanh(cs) * tf.sigmoid(o)

    def coupled(self, x, cs, h):
        if not self.made:
            return self._joined(3, 2)
        tf = self.tf
        j, f, o = self.gates(x, h, 3)
        f = tf.sigmoid(f + 1)
        cs = f * cs + (1 - f) * tf.tanh(j)
        return cs, tf.sigmoid(o) * tf.tanh(cs)

    def projection(self, x, cs, h):
        if not self.made:
            return self._joined(4, 2, units=self.units, out=(self.units, self.H))
        tf = self.tf
        i, j, f, o = tf.split(self.affine("", tf.concat([x, h], 1), 4 * self.units), 4, 1)
        cs = tf.sigmoid(f + 1) * cs + tf.sigmoid(i) * tf.tanh(j)
        return cs, (tf.sigmoid(o) * tf.tanh(cs)) @ self.weights["out"]

    def relu(self, x, cs, h):
        if not self.made:
            return self._joined(4, 2)
        tf = self.tf
        i, j, f, o = self.gates(x, h, 4)
        cs = tf.sigmoid(f) * cs + tf.sigmoid(i) * tf.nn.relu(j)
        return cs, tf.sigmoid(o) * tf.nn.relu(cs)

    def hard_sigmoid(self, x, cs, h):
        if not self.made:
            return self._joined(4, 2)
        tf = self.tf
        i, j, f, o = self.gates(x, h, 4)
        i, f, o = (tf.clip_by_value(0.2 * a + 0.5, 0.0, 1.0) for a in (i, f, o))
        cs = f * cs + i * tf.tanh(j)
        return cs, o * tf.tanh(cs)

    def swish(self, x, cs, h):
        if not self.made:
            return self._joined(4, 2)
        tf = self.tf
        i, j, f, o = self.gates(x, h, 4)
        cs = tf.sigmoid(f) * cs + tf.sigmoid(i) * (j * tf.sigmoid(j))
        return cs, tf.sigmoid(o) * (cs * tf.sigmoid(cs))

    def swish_rnn(self, x, _, h):
        if not self.made:
            return self._joined(1, 1)
        z = self.affine("", self.tf.concat([x, h], 1), self.H)
        return z * self.tf.sigmoid(z)

    def mixed(self, x, cs, h):
        if not self.made:
            return self._joined(4, 2)
        tf = self.tf
        i, j, f, o = self.gates(x, h, 4)
        cs = tf.sigmoid(f) * cs + tf.sigmoid(i) * tf.nn.softsign(j)
        return cs, tf.sigmoid(o) * tf.tanh(cs)

    def mixed_gates(self, x, cs, h):
        if not self.made:
            return self._joined(4, 2)
        tf = self.tf
        i, j, f, o = self.gates(x, h, 4)
        cs = tf.nn.softsign(f) * cs + tf.sigmoid(i) * tf.tanh(j)
        return cs, tf.sigmoid(o) * tf.tanh(cs)

    def sru(self, x, _, c):
        """Its state is c; what it gives beside that is not looked at."""
        if not self.made:
            return self._variables({"kernel": (self.I, 3 * self.H), "bias": (2 * self.H,)}, 1)
        tf = self.tf
        z, f, r = tf.split(x @ self.weights["kernel"], 3, 1)
        f, r = tf.split(tf.sigmoid(tf.nn.bias_add(tf.concat([f, r], 1), self.weights["bias"])), 2, 1)
        return f * c + (1.0 - f) * z

    def ugrnn(self, x, _, h):
        if not self.made:
            return self._joined(2, 1)
        tf = self.tf
        g, c = self.gates(x, h, 2)
        g = tf.sigmoid(g + 1)
        return g * h + (1 - g) * tf.tanh(c)

    def zoneout(self, x, cs, h):
        """As in inference."""
        if not self.made:
            return self._joined(4, 2)
        after = self._basic(x, cs, h)
        return tuple(0.1 * old + 0.9 * new for old, new in zip((cs, h), after, strict=True))

    def random_zoneout(self, x, cs, h):
        """As in training."""
        if not self.made:
            return self._joined(4, 2)
        after, tf = self._basic(x, cs, h), self.tf
        keep = [tf.random.uniform((B, self.H)) < 0.1 for _ in range(2)]
        return tuple(tf.where(k, old, new) for k, old, new in zip(keep, (cs, h), after, strict=True))

    def minimal(self, x, _, h):
        """A GRU of the other convention: 1 - u keeps the state."""
        if not self.made:
            return self._variables({"u/kernel": (self.I + self.H, self.H), "u/bias": (self.H,),
                                    "c/kernel": (self.I + self.H, self.H), "c/bias": (self.H,)}, 1)  # fmt: skip
        tf = self.tf
        u = tf.sigmoid(self.affine("u/", tf.concat([x, h], 1), self.H))
        return (1 - u) * h + u * tf.tanh(self.affine("c/", tf.concat([x, u * h], 1), self.H))

    def _basic(self, x, cs, h):
        tf = self.tf
        i, j, f, o = self.gates(x, h, 4)
        cs = tf.sigmoid(f + 1) * cs + tf.sigmoid(i) * tf.tanh(j)
        return cs, tf.sigmoid(o) * tf.tanh(cs)

    def _joined(self, count, states, units=None, **more):
        columns = count * (units or self.H)
        return self._variables({"kernel": (self.I + self.H, columns), "bias": (columns,)} | more, states)

    def _variables(self, shapes, states):
        for name, shape in shapes.items():
            self.w(name, *shape)
        return states


def keras_gru(cell, after):
    """Keras' GRU, step by step."""
    size = cell.H

    def step(x, _, h):
        if not cell.made:
            shapes = {"kernel": (cell.I, 3 * size), "recurrent_kernel": (size, 3 * size)}
            bias = {"bias": (2, 3 * size) if after else (3 * size,)} if cell.biased else {}
            return cell._variables(shapes | bias, 1)
        tf, w = cell.tf, cell.weights
        biases = tf.unstack(w["bias"]) if after and cell.biased else [w.get("bias"), None]

        def plus(a, b, k=None):
            return a if b is None else tf.nn.bias_add(a, b) if k is None else a + b[k * size : (k + 1) * size]

        def part(name, k):
            return w[name][:, k * size : (k + 1) * size]

        if cell.implementation == 2:
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

    return step


Cell.keras_gru_after = lambda self, *given: keras_gru(self, True)(*given)
Cell.keras_gru_before = lambda self, *given: keras_gru(self, False)(*given)

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
    "swish": "makes a swish, which is no activation of layers",
    "swish_rnn": "makes a swish, which is no activation of layers",
    "mixed": "goes through a tanh, and what is added up to it through",
    "mixed_gates": "have different activations",
    "sru": "it is an SRU or one like it, whose state goes into no product",
    "ugrnn": "it has no reset gate",
    "zoneout": "its (cell )?state is not (its output|that) of the step before",
    "random_zoneout": "it changes its state at random|its state is kept at random, by the node",
    "minimal": "is no RNN, LSTM or GRU",
}
