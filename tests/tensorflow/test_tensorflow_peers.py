"""Random graphs that TensorFlow itself writes and runs: what is found in them gives TensorFlow's results.

`pytest -m peers`, with tensorflow-cpu in .venv.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import tf_peers
from tf_peers import CASES, B, T, control_flow, find_cell, frozen, looped, save_model, unrolled

from blockcell.formulas import error_in_eps
from blockcell.tensorflow import open as opened

pytestmark = pytest.mark.peers


class Cell(tf_peers.Cell):
    """A random cell of TensorFlow 1, as a function of x and its state."""

    def __init__(self, tf, g, scope, inputs, dtype, size=None):
        self.tf, self.g, self.scope, self.I, self.dtype = tf, g, scope, inputs, dtype
        self.H = size or int(g.integers(1, 20))
        kinds = ["LSTMBlockCell", "LSTMCell", "GRUCell"] + ["GRUBlockCell"] * (dtype == "float32")
        self.kind = str(g.choice(kinds))  # GRUBlockCell has no other dtype
        self.peephole = "LSTM" in self.kind and bool(g.integers(2))
        self.forget = float(g.choice([0, 0.5, 1, 2]))
        self.clip = float(g.choice([-1, 0.25, 3]))
        self.states = 1 if "GRU" in self.kind else 2
        shapes = {"kernel": (self.I + self.H, 4 * self.H), "bias": (4 * self.H,)}
        if self.states == 1:
            shapes = {"gates/kernel": (self.I + self.H, 2 * self.H), "gates/bias": (2 * self.H,),
                      "candidate/kernel": (self.I + self.H, self.H), "candidate/bias": (self.H,)}  # fmt: skip
        elif self.peephole:
            shapes |= {f"w_{gate}_diag": (self.H,) for gate in "ifo"}
        self.weights = {name: self._variable(f"{scope}/{name}", shape) for name, shape in shapes.items()}

    def _variable(self, name, shape):
        v1, g = self.tf.compat.v1, self.g
        stored = str(g.choice(["float32", self.dtype, "bfloat16"])) if g.integers(4) == 0 else self.dtype
        parts = int(g.integers(1, 4)) if len(shape) == 2 and stored == self.dtype else 1
        # Of ordinary size: larger ones amplify the last bits of either side from step to step, and layer to layer.
        size = max(2, shape[0] ** 0.5) if len(shape) == 2 else 2
        values = (g.standard_normal(shape) / size).astype(np.float32)
        if parts == 1:
            variable = v1.get_variable(name, initializer=self.tf.cast(values, stored), use_resource=bool(g.integers(2)))
            return self.tf.cast(variable, self.dtype)

        def initializer(shape, dtype, partition_info):
            first = partition_info.var_offset[0]
            return self.tf.cast(values[first : first + shape[0]], dtype)

        partitioner = v1.fixed_size_partitioner(parts)
        variable = v1.get_variable(name, shape, self.dtype, initializer, partitioner=partitioner, use_resource=False)
        return self.tf.convert_to_tensor(variable)

    def LSTMBlockCell(self, x, cs, h):
        tf, w = self.tf, self.weights
        zeros = tf.zeros((self.H,), self.dtype)
        diagonals = {f"wc{gate}": w.get(f"w_{gate}_diag", zeros) for gate in "ifo"}
        options = {"forget_bias": self.forget, "cell_clip": self.clip, "use_peephole": self.peephole}
        cell = tf.raw_ops.LSTMBlockCell(x=x, cs_prev=cs, h_prev=h, w=w["kernel"], b=w["bias"], **diagonals, **options)
        return cell.cs, cell.h

    def GRUBlockCell(self, x, _, h):
        names = {"w_ru": "gates/kernel", "w_c": "candidate/kernel", "b_ru": "gates/bias", "b_c": "candidate/bias"}
        weights = {role: self.weights[name] for role, name in names.items()}
        return self.tf.raw_ops.GRUBlockCell(x=x, h_prev=h, **weights).h

    def LSTMCell(self, x, cs, h):
        return self.lstm(self.gates(x, h, 4), cs, forget=self.forget, clip=self.clip)

    def GRUCell(self, x, _, h):
        tf = self.tf
        r, u = tf.split(tf.sigmoid(self.affine("gates/", tf.concat([x, h], 1))), 2, 1)
        return u * h + (1 - u) * tf.tanh(self.affine("candidate/", tf.concat([x, r * h], 1)))


class Steps:
    """Cells on top of each other, for dynamic_rnn."""

    def __init__(self, cells):
        self.cells, self.output_size = cells, cells[-1].H
        self.state_size = tuple((cell.H,) * cell.states for cell in cells)

    def zero_state(self, batch, dtype):
        return tuple(tuple(cell.tf.zeros((B, cell.H), dtype) for _ in range(cell.states)) for cell in self.cells)

    def __call__(self, x, states, scope=None):
        after = []
        for cell, state in zip(self.cells, states, strict=True):
            after.append(tuple(cell(x, *state)))
            x = after[-1][-1]
        return x, tuple(after)


class Network:
    """A random network of cells, which says what should be found."""

    def __init__(self, tf, g, dtype, x, lengths):
        self.tf, self.g, self.dtype, self.lengths = tf, g, dtype, lengths
        self.cells: list[tuple[Cell, bool, list[Cell]]] = []
        """Each cell, whether it is reversed, and those that it reads."""
        self.whole = True
        below: list[Cell] = []
        for k in range(int(g.integers(1, 4))):
            if k and g.integers(8) == 0:
                x, self.whole, below = x * 0.5, False, []
            kind = str(g.choice(["forward", "backward", "both"]))
            fw = self.directed(f"layer_{k}/fw", x, below, False) if kind != "backward" else None
            bw = self.directed(f"layer_{k}/bw", x, below, True, fw) if kind != "forward" else None
            parts = [direction for direction in (fw, bw) if direction is not None]
            if len(parts) == 2 and g.integers(10) == 0:
                parts, self.whole = parts[::-1], False
            x = tf.concat([y for y, _ in parts], 2) if len(parts) == 2 else parts[0][0]
            below = [cells[-1] for _, cells in parts]
        self.y = x

    def directed(self, scope, x, below, reverse, beside=None):
        """Make as many layers as those beside; return their output in the order of x, and their cells."""
        tf, g, cells = self.tf, self.g, []
        for k in range(len(beside[1]) if beside else int(g.integers(1, 3))):
            size = int(x.shape[-1]) if k == 0 else cells[-1].H
            hidden = beside[1][k].H if beside else None
            cells.append(Cell(tf, g, f"{scope}/cell_{k}/cell", size, self.dtype, hidden))
            self.cells.append((cells[-1], reverse, cells[-2:-1] or below))
        batch_first = bool(g.integers(2))
        x = tf.transpose(x, [1, 0, 2]) if batch_first else x
        y = self.run(self.turned(x, batch_first) if reverse else x, cells, batch_first)
        y = self.turned(y, batch_first) if reverse else y
        return tf.transpose(y, [1, 0, 2]) if batch_first else y, cells

    def turned(self, x, batch_first):
        if self.lengths is None:
            return self.tf.reverse(x, [int(batch_first)])
        return self.tf.reverse_sequence(x, self.lengths, seq_axis=int(batch_first), batch_axis=1 - int(batch_first))

    def run(self, x, cells, batch_first):
        tf, steps = self.tf, Steps(cells)
        way = "dynamic" if self.lengths is not None else str(self.g.choice(["dynamic", "index", "array", "unrolled"]))
        if way == "dynamic":
            options = {"time_major": not batch_first, "sequence_length": self.lengths, "dtype": self.dtype}
            with tf.compat.v1.variable_scope(None, "run"):
                return tf.compat.v1.nn.dynamic_rnn(steps, x, **options)[0]
        states, axis = steps.zero_state(B, self.dtype), int(batch_first)
        if way == "unrolled":
            outputs = []
            for row in tf.unstack(x, axis=axis):
                y, states = steps(row, states)
                outputs.append(y)
            return tf.stack(outputs, axis)
        array = tf.TensorArray(self.dtype, T).unstack(tf.transpose(x, [1, 0, 2]) if batch_first else x)
        y = tf.TensorArray(self.dtype, T)

        def body(t, y, states):
            row = array.read(t) if way == "array" else x[:, t] if batch_first else x[t]
            result, states = steps(row, states)
            return t + 1, y.write(t, result), states

        y = tf.compat.v1.while_loop(lambda t, *_: t < T, body, (0, y, states))[1].stack()
        return tf.transpose(y, [1, 0, 2]) if batch_first else y


@pytest.mark.parametrize("case", range(CASES))
def test_random_networks(tf, case, tmp_path, seed):
    """Layers of both directions on top of each other, in one loop and in several, as one layer."""
    g = np.random.default_rng([seed, case, 1])
    v1 = tf.compat.v1
    version, saved = int(g.integers(1, 3)), str(g.choice(["checkpoint", "frozen", "saved_model"]))
    with control_flow(v1, version), tf.Graph().as_default(), v1.Session() as session:
        inputs = int(g.integers(1, 12))
        x = v1.placeholder("float32", (T, B, inputs), "x")
        lengths = v1.placeholder("int32", (B,), "lengths") if g.integers(2) else None
        network = Network(tf, g, "float32", x, lengths)
        y = tf.identity(network.y, "y")
        session.run(v1.global_variables_initializer())
        feeds = {x: g.standard_normal((T, B, inputs)).astype("float32")}
        if lengths is not None:
            feeds[lengths] = g.integers(1, T + 1, B)
        expected = session.run(y, feeds)
        fed = {"x": x} if lengths is None else {"x": x, "n": lengths}
        path = save_model(tf, session, saved, fed, {"y": y}, tmp_path)
    cells = opened(path).cells
    print(cells, saved, version)
    assert len(cells) == len(network.cells)

    for cell, reverse, below in network.cells:
        found_cell = find_cell(cells, cell.scope)
        assert found_cell.reverse is reverse, cell.scope
        if network.whole:
            assert found_cell.source_cells == tuple(find_cell(cells, lower.scope).name for lower in below), cell.scope
    if not network.whole:
        with pytest.raises(ValueError, match=r"belong to|read the same|several cells|side by side|before that of"):
            cells.layer()
        return
    result, _ = cells.layer()(feeds[x], lengths=None if lengths is None else feeds[lengths])
    assert error_in_eps(result, expected.astype(np.float64), float(np.finfo("float32").eps)) <= 16


# ------------------------------------------------------------------------------------------------- names and files
SAVED = [
    "checkpoint",
    "checkpoint",
    "bare",
    "other names",
    "saved_model",
    "saved_model.pbtxt",
    "frozen.pb",
    "frozen.pbtxt",
]


def other_names(v1, g):
    """Return a Saver's dict: each variable, or all parts of one, by a name that tells nothing."""
    whole = {}
    for variable in v1.global_variables():
        part = variable._save_slice_info
        whole.setdefault(part.full_name if part else variable.op.name, []).append(variable)
    numbers = g.permutation(len(whole))
    return {f"v{k}": parts[0] if parts[0]._save_slice_info is None else parts
            for k, parts in zip(numbers, whole.values(), strict=True)}  # fmt: skip


def saved_as(tf, g, form, session, x, results, folder):
    """Save the model in a form, and return the path to open."""
    v1 = tf.compat.v1
    if form.startswith("frozen"):
        path = frozen(tf, session, [result.op.name for result in results], folder)
        if form.endswith("txt"):
            definition = v1.GraphDef.FromString(path.read_bytes())
            path = Path(v1.train.write_graph(definition, str(folder), form, as_text=True))
        return path
    if form.startswith("saved_model"):
        builder = v1.saved_model.Builder(str(folder / "saved"))
        signature = v1.saved_model.predict_signature_def({"x": x}, {"y": results[-1]})
        builder.add_meta_graph_and_variables(session, ["serve"], {"serving_default": signature},
                                             strip_default_attrs=bool(g.integers(2)))  # fmt: skip
        builder.save(as_text=form.endswith("txt"))
        return folder / "saved"
    if g.integers(3) == 0:  # another one, for something else
        v1.train.Saver(
            {"unrelated": v1.global_variables()[0]} if not v1.global_variables()[0]._save_slice_info else None
        )
    saver = v1.train.Saver(other_names(v1, g) if form == "other names" else None, sharded=bool(g.integers(2)))
    return Path(saver.save(session, str(folder / "model.ckpt"), write_meta_graph=form != "bare"))


class Plain(Cell):
    """One whose variables are not cast."""

    def _variable(self, name, shape):
        values = (self.g.standard_normal(shape) / 2).astype(self.dtype)
        return self.tf.compat.v1.get_variable(name, initializer=values, use_resource=bool(self.g.integers(2)))


def train(tf, g, session):
    """Run a step of an optimizer, and moving averages."""
    v1 = tf.compat.v1
    variables = v1.trainable_variables()
    optimizer = v1.train.AdamOptimizer(0.1) if g.integers(2) else v1.train.MomentumOptimizer(0.1, 0.9)
    step = optimizer.apply_gradients([(tf.ones_like(variable), variable) for variable in variables])
    average = v1.train.ExponentialMovingAverage(0.5)
    with tf.control_dependencies([step]):
        update = average.apply(variables)
    named = {variable.name for variable in variables}
    session.run(v1.variables_initializer(variables))
    session.run(
        v1.variables_initializer([variable for variable in v1.global_variables() if variable.name not in named])
    )
    session.run(update)


@pytest.mark.parametrize("case", range(2 * CASES))
def test_names_and_files(tf, case, tmp_path, seed):
    g = np.random.default_rng([seed, case, 1])
    v1 = tf.compat.v1
    version, form = int(g.integers(1, 3)), str(g.choice(SAVED))
    dtype = str(g.choice(["float32", "float32", "float16"]))
    config = v1.ConfigProto(device_count={"CPU": 2})
    with control_flow(v1, version), tf.Graph().as_default(), v1.Session(config=config) as session:
        x = y = v1.placeholder(dtype, (T, B, int(g.integers(1, 9))), "x")
        outer, cells, results = str(g.choice(["", "a/", "model/b_1/"])), [], []
        for k in range(int(g.integers(1, 4))):
            with tf.device(f"/cpu:{k % 2}"):
                stored = Plain if form == "bare" else Cell
                cell = stored(tf, g, f"{outer}cell_{k}/lstm_cell", int(y.shape[-1]), dtype)
            y = (unrolled if g.integers(2) else looped)(tf, cell, y, [tf.zeros((B, cell.H), dtype)] * cell.states)
            cells.append(cell)
            results.append(tf.identity(y, f"y{k}"))
        trained = not form.startswith("frozen") and bool(g.integers(2))
        train(tf, g, session) if trained else session.run(v1.global_variables_initializer())
        x_values = g.standard_normal((T, B, int(x.shape[-1]))).astype(dtype)
        expected = session.run(results, {x: x_values})
        path = saved_as(tf, g, form, session, x, results, tmp_path)
        variables = {variable.op.name: session.run(variable) for variable in v1.global_variables()}
    model = opened(path)
    print(model.cells, [(cell.kind, cell.scope) for cell in cells], form, version, trained)
    assert len(model.cells) == len(cells)
    value = x_values
    for cell, result in zip(cells, expected, strict=True):
        found_cell = model.cells[cell.scope]
        assert found_cell.refused is None and (found_cell.input_size, found_cell.hidden_size) == (cell.I, cell.H)
        more = {}
        if form == "bare":
            more = {"forget_bias": cell.forget, "cell_clip": max(cell.clip, 0)} if cell.states == 2 else {}
            assert found_cell.unsaid == [*more]
        elif "Block" in cell.kind:
            assert found_cell.kind == cell.kind
        if cell.states == 2 and form != "bare":
            clip = cell.clip if cell.clip > 0 or "Block" in cell.kind else 0
            attributes = {"forget_bias": cell.forget, "cell_clip": clip, "use_peephole": cell.peephole}
            assert found_cell.attributes == attributes | {"gate_order": "icfo"}
        assert found_cell.check(**more).ok
        y, _ = found_cell.layer(**more)(value)
        assert error_in_eps(y, result.astype(np.float64), float(np.finfo(dtype).eps)) <= 8
        if trained and form != "other names":
            shadow = found_cell.layer(average=True, **more).weights
            for role, name in found_cell.weights.items():
                names = [
                    variable
                    for variable in variables
                    if re.fullmatch(rf"{name}(/part_\d+)?/ExponentialMovingAverage", variable)
                ]
                whole = np.concatenate([variables[name] for name in sorted(names)])
                np.testing.assert_array_equal(shadow[role], whole.astype(dtype))
        value = result


class Object(Cell):
    """One with variables of TensorFlow 2, whose names need not tell them apart."""

    def _variable(self, name, shape):
        values = (self.g.standard_normal(shape) / 2).astype(self.dtype)
        return self.tf.Variable(values, name=str(self.g.choice([name, name.rpartition("/")[2], "Variable"])))


def module_of(tf, cells):
    """Make a module with all cells, by their names there, that computes them one behind the other."""

    class Held(tf.Module):
        def __init__(self, variables):
            super().__init__()
            for name, variable in variables.items():
                setattr(self, name.replace("/", "_"), variable)

    class Model(tf.Module):
        def __init__(self):
            super().__init__()
            self.held = [Held(cell.weights) for cell in cells]

        def __call__(self, x):
            results = []
            for cell in cells:
                x = cell.loop(tf, cell, x, [tf.zeros((B, cell.H), cell.dtype)] * cell.states)
                results.append(x)
            return results

    return Model()


@pytest.mark.parametrize("case", range(CASES // 4))
def test_saved_models_of_objects(tf, case, tmp_path, seed):
    """With a signature and without one, when nothing in the graph calls the function."""
    g = np.random.default_rng([seed, case, 2])
    dtype, cells, inputs = str(g.choice(["float32", "float32", "float16"])), [], int(g.integers(1, 9))
    x_values = g.standard_normal((T, B, inputs)).astype(dtype)
    for k in range(int(g.integers(1, 4))):
        cells.append(Object(tf, g, f"cell_{k}/lstm_cell", cells[-1].H if cells else inputs, dtype))
        cells[-1].loop = unrolled if g.integers(2) else looped
    model = module_of(tf, cells)
    call = tf.function(model.__call__, input_signature=[tf.TensorSpec((T, B, inputs), dtype)])
    expected = [result.numpy() for result in call(tf.constant(x_values))]
    signature = bool(g.integers(2))
    if signature:
        named = tf.function(lambda x: {"y": call(x)[-1]}, input_signature=[tf.TensorSpec((T, B, inputs), dtype)])
        tf.saved_model.save(model, str(tmp_path / "saved"), signatures=named.get_concrete_function())
    else:
        model.run = call
        tf.saved_model.save(model, str(tmp_path / "saved"))
    read_model = opened(tmp_path / "saved")
    print(read_model, [(cell.kind, cell.scope) for cell in cells], signature)
    left = {*read_model.cells}
    value = x_values
    for cell, result in zip(cells, expected, strict=True):
        values = {name: variable.numpy() for name, variable in cell.weights.items()}
        kernel = values["kernel" if cell.states == 2 else "candidate/kernel"]
        role = "w" if cell.states == 2 else "w_c"
        layers = {name: read_model.cells[name].layer() for name in left}
        (name,) = (name for name, layer in layers.items() if np.array_equal(layer.weights.get(role), kernel))
        left.remove(name)
        found_cell = read_model.cells[name]
        assert (found_cell.input_size, found_cell.hidden_size) == (cell.I, cell.H)
        assert found_cell.check().ok
        y, _ = found_cell.layer()(value)
        assert error_in_eps(y, result.astype(np.float64), float(np.finfo(dtype).eps)) <= 8
        value = result
    assert not left


@pytest.mark.parametrize("case", range(CASES // 20))
def test_checkpoints_of_keras(tf, case, tmp_path, seed):
    """Layers and an optimizer, saved as objects without a graph."""
    keras = pytest.importorskip("keras")
    g = np.random.default_rng([seed, case, 3])
    inputs, layers = int(g.integers(1, 9)), []
    for _ in range(int(g.integers(1, 4))):
        kind, option = (("GRU", "reset_after"), ("LSTM", "use_bias"))[g.integers(2)]
        options = {option: bool(g.integers(2)), "return_sequences": True}
        layers.append(getattr(keras.layers, kind)(int(g.integers(1, 20)), **options))
    model = keras.Sequential([keras.layers.Input((T, inputs)), *layers])
    for weight in model.trainable_variables:
        weight.assign((g.standard_normal(weight.shape) / 2).astype(np.float32))
    x = g.standard_normal((B, T, inputs)).astype(np.float32)
    if g.integers(2):
        model.compile("adam", "mse")
        model.fit(x, np.zeros((B, T, layers[-1].units)), verbose=0)
    path = tf.train.Checkpoint(net=model).save(str(tmp_path / "ckpt"))
    cells = opened(path).cells
    print(cells)
    assert len(cells) == len(layers)
    for layer in layers:
        (cell,) = (cell for cell in cells.values() if f"/{layer.name}/" in f"/{cell.name}/")
        result = np.asarray(layer(x))
        assert cell.check().ok
        y, _ = cell.layer()(x, batch_first=True)
        assert error_in_eps(y, result.astype(np.float64), float(np.finfo(np.float32).eps)) <= 8
        x = result
