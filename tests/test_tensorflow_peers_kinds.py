"""Random cells of other kinds that TensorFlow itself writes and runs: of Keras and cuDNN, and those to be refused.

`make test-peers`, with tensorflow-cpu in .venv.  BLOCKCELL_SEED repeats a run.
"""

from __future__ import annotations

import os
import re

import numpy as np
import pytest
from test_tensorflow_peers import CASES, SEED, B, T, control_flow, frozen, looped, unrolled

from blockcell.formulas import error_in_eps
from blockcell.tensorflow import open as opened

pytestmark = pytest.mark.peers
EPS = float(np.finfo(np.float32).eps)


@pytest.fixture(scope="module")
def tf():
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    return pytest.importorskip("tensorflow")


class Cell:
    """A random cell of a kind, as a function of x and its state."""

    dtype = "float32"

    def __init__(self, tf, g, scope, inputs, kind):
        self.tf, self.g, self.scope, self.I, self.kind = tf, g, scope, inputs, kind
        self.H = int(g.integers(1, 12)) if g.integers(4) else inputs
        self.weights = {}
        self.implementation, self.biased = int(g.integers(1, 3)), bool(g.integers(4))
        self.order = g.permutation(4)
        self.units = self.H + 1 if kind == "projection" else self.H
        self.made = False
        self.function = getattr(self, kind)
        self.state_sizes = [self.units, self.H] if self.function(None, None, None) == 2 else [self.H]
        self.made = True
        self.states = len(self.state_sizes)

    def w(self, name, *shape):
        if name not in self.weights:
            values = (self.g.standard_normal(shape) / 2).astype(np.float32)
            options = {"initializer": values, "use_resource": bool(self.g.integers(2))}
            self.weights[name] = self.tf.compat.v1.get_variable(f"{self.scope}/{name}", **options)
        return self.weights[name]

    def zeros(self):
        return [self.tf.zeros((B, size)) for size in self.state_sizes]

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
}
BAD = {
    "layer_norm": "layer normalization",
    "coupled": "its input gate is coupled to its forget gate by the node",
    "projection": "its state is not its output of the step before|it has a projection",
    "relu": "is a Relu",
    "hard_sigmoid": "clips what the block cells do not clip",
    "ugrnn": "it has no reset gate",
    "zoneout": "its (cell )?state is not (its output|that) of the step before",
    "random_zoneout": "it changes its state at random|its state is kept at random, by the node",
    "minimal": "is neither an LSTM nor a GRU",
}


def run(tf, g, kinds, folder):
    """Cells one behind the other with dense layers between them: the cells, what is found, and TensorFlow's results."""
    v1 = tf.compat.v1
    version, saved = int(g.integers(1, 3)), str(g.choice(["checkpoint", "frozen", "saved_model"]))
    print(version, saved)
    with control_flow(v1, version), tf.Graph().as_default(), v1.Session() as session:
        first = int(g.integers(1, 9))
        x = v1.placeholder("float32", (T, B, first), "x")
        inputs, outputs, cells, y = [], [], [], x
        for k, kind in enumerate(kinds):
            scope = str(g.choice(["net", "a/b/thing", "rnn"])) + f"/part_{k}" + str(g.choice(["", "/gru_cell"]))
            cell = Cell(tf, g, scope, int(y.shape[-1]), kind)
            inputs.append(tf.identity(y, f"x{k}"))
            y = (unrolled if g.integers(2) else looped)(tf, cell, inputs[-1], cell.zeros())
            cells.append(cell)
            outputs.append(tf.identity(y, f"y{k}"))
            size = int(y.shape[-1])
            both = tf.reshape(tf.concat([y, y], 2), (T * B, 2 * size))  # what is no cell
            dense = [v1.get_variable(f"dense_{k}/{name}", initializer=g.standard_normal(shape).astype(np.float32))
                     for name, shape in (("kernel", (2 * size, 4)), ("bias", (4,)))]  # fmt: skip
            gate, value = tf.split(tf.nn.bias_add(both @ dense[0], dense[1]), 2, 1)
            y = tf.reshape(tf.sigmoid(gate) * tf.tanh(value), (T, B, 2))
        last = tf.identity(y, "last")
        session.run(v1.global_variables_initializer())
        given = g.standard_normal((T, B, first)).astype(np.float32)
        pairs = session.run([*zip(inputs, outputs, strict=True)], {x: given})
        if saved == "checkpoint":
            path = v1.train.Saver().save(session, str(folder / "model.ckpt"))
        elif saved == "frozen":
            path = frozen(tf, session, ["last"], folder)
        else:
            path = folder / "saved"
            v1.saved_model.simple_save(session, str(path), {"x": x}, {"y": last})
        nodes = {node.name for node in session.graph.as_graph_def().node}
    found = opened(path).cells
    print(kinds, found)
    assert len(found) == len(cells)
    return [(cell, one_of(found, cell.scope), *pair) for cell, pair in zip(cells, pairs, strict=True)], nodes


def one_of(found, scope):
    (one,) = (each for each in found.values() if any(f"{scope}/" in name for name in each.weights.values()))
    return one


@pytest.mark.parametrize("case", range(CASES))
def test_random_kinds(tf, case, tmp_path):
    g = np.random.default_rng([SEED, case, 10])
    print(f"seed {SEED}, case {case}")
    kinds = [str(kind) for kind in g.choice([*GOOD], int(g.integers(1, 4)))]
    for cell, one, x, y in run(tf, g, kinds, tmp_path)[0]:
        assert one.refused is None and (one.input_size, one.hidden_size) == (cell.I, cell.H)
        assert GOOD[cell.kind] in one.kind
        assert one.attributes.get("reset_after", False) == (cell.kind in ("cudnn_gru", "keras_gru_after"))
        assert one.attributes.get("forget_bias", 0) == (0.5 if cell.kind == "other_lstm" else 0)
        assert one.check() <= one.bound
        assert error_in_eps(one.layer()(x)[0], y.astype(np.float64), EPS) <= 8


@pytest.mark.parametrize("case", range(CASES))
def test_random_refused(tf, case, tmp_path):
    g = np.random.default_rng([SEED, case, 11])
    print(f"seed {SEED}, case {case}")
    kinds = [str(kind) for kind in g.choice([*BAD], int(g.integers(1, 3)))]
    for cell, one, *_ in run(tf, g, kinds, tmp_path)[0]:
        assert one.refused is not None and re.search(BAD[cell.kind], one.refused), cell.kind
        assert "'" in one.refused  # the node


def keras_layer(keras, g):
    """A random LSTM or GRU of Keras, in one direction or in both; how many cells it has, and if they are understood."""
    layers, size = keras.layers, int(g.integers(1, 9))
    options = {"return_sequences": True, "implementation": int(g.integers(1, 3)), "unroll": not g.integers(4)}
    options |= {"use_bias": bool(g.integers(4))}
    other = g.integers(8) == 0
    if other:
        options[str(g.choice(["activation", "recurrent_activation"]))] = str(g.choice(["relu", "hard_sigmoid"]))
    if g.integers(2):
        made = layers.LSTM(size, **options)
    else:
        made = layers.GRU(size, reset_after=bool(g.integers(2)), **options)
    both = not g.integers(3)
    return (layers.Bidirectional(made) if both else made), 1 + both, not other


@pytest.mark.parametrize("case", range(CASES // 4))
def test_random_models_of_keras(tf, case, tmp_path):
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

    keras = pytest.importorskip("keras")
    g = np.random.default_rng([SEED, case, 12])
    print(f"seed {SEED}, case {case}")
    first, masked = int(g.integers(1, 9)), not g.integers(4)
    given = y = keras.Input((T, first), batch_size=B if g.integers(2) else None)
    if masked:
        y = keras.layers.Masking()(y)
    count, understood = 0, []
    for _ in range(int(g.integers(1, 4))):
        layer, cells, fits = keras_layer(keras, g)
        y, count, understood = layer(y), count + cells, [*understood, *[fits] * cells]
    model = keras.Model(given, y)
    model.set_weights([g.uniform(-1, 1, each.shape).astype(np.float32) for each in model.get_weights()])
    x = g.standard_normal((B, T, first)).astype(np.float32)
    saved = str(g.choice(["export", "frozen"]))
    path = tmp_path / "saved"
    call = tf.function(lambda x: model(x), input_signature=[tf.TensorSpec((B, T, first))])
    if saved == "export":
        model.export(str(path), verbose=False)
    else:
        constants = convert_variables_to_constants_v2(call.get_concrete_function(), lower_control_flow=bool(case % 2))
        path = tmp_path / "frozen.pb"
        path.write_bytes(constants.graph.as_graph_def().SerializeToString())
    found = opened(path).cells
    print(found, understood, saved, masked)
    assert sorted(one.refused is None for one in found.values()) == sorted(understood)
    for one in found.values():
        assert one.refused is None or "the node '" in one.refused
        assert one.refused is not None or one.check() <= one.bound
    if all(understood) and not masked:
        result, _ = found.layer()(x, batch_first=True)
        assert error_in_eps(result, model(x).numpy().astype(np.float64), EPS) <= 16
