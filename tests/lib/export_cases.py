"""Layers to export, and calls of them with the results that their models must give."""

from __future__ import annotations

import numpy as np
from bits import like, zeros
from by_formulas import row_gradients
from cases import rng
from graphs import FLOAT64, checked, on_onnxruntime
from layer_cases import stack

import onnx_export
from blockcell import GRU, LSTM, RNN, Bidirectional, Dense, Stack

T, B, I = 6, 5, 3  # noqa: E741
LENGTHS = np.array([3, 0, 6, 1, 5])
DTYPES = ["float64", "float32", "float16"]


# --------------------------------------------------------------------------------------------------------- the layers
def lstm(size, dtype, inputs=I, **options):
    return drawn(LSTM.init(inputs, size, seed=size, dtype=dtype, **options))


def gru(size, dtype, inputs=I, **options):
    return drawn(GRU.init(inputs, size, seed=size, dtype=dtype, **options))


def rnn(size, dtype, inputs=I, **options):
    return drawn(RNN.init(inputs, size, seed=size, dtype=dtype, **options))


def dense(size, dtype, inputs=I, **options):
    return drawn(Dense.init(inputs, size, seed=size, dtype=dtype, **options))


def drawn(layer):
    """The layer with noise added to all weights, so that its biases differ."""
    g = rng(repr(layer))
    moved = {name: (w + 0.3 * g.standard_normal(w.shape)).astype(w.dtype) for name, w in layer.weights.items()}
    layer.set_weights(**moved)
    return layer


LAYERS = {
    "LSTM": lambda dtype: lstm(5, dtype),
    "LSTM with all": lambda dtype: lstm(4, dtype, use_peephole=True, forget_bias=0.7, cell_clip=0.4, gate_order="ifco"),
    "GRU": lambda dtype: gru(4, dtype),
    "GRU after": lambda dtype: gru(4, dtype, reset_after=True),
    "Reverse": lambda dtype: stack(
        lstm(4, dtype, reverse=True),
        gru(3, dtype, 4, reverse=True),
        gru(3, dtype, 3, reset_after=True, reverse=True),
        gru(2, dtype, 3),
    ),
    "Bidirectional": lambda dtype: Bidirectional(lstm(5, dtype, use_peephole=True), gru(5, dtype)),
    "Stack": lambda dtype: stack(
        Bidirectional(gru(2, dtype), lstm(2, dtype, gate_order="ifco", forget_bias=1.0)),
        lstm(3, dtype, 4, cell_clip=0.3),
        Bidirectional(
            stack(gru(4, dtype, reset_after=True), lstm(2, dtype, 4)),
            stack(
                lstm(5, dtype),
                Bidirectional(gru(1, dtype, 5), gru(1, dtype, 5, reset_after=True)),  # both ways, backwards
            ),
        ),
    ),
}
LAYERS |= {
    "Dense": lambda dtype: dense(4, dtype, activation="tanh"),
    "Classifier": lambda dtype: stack(
        dense(5, dtype, activation="relu"),
        lstm(4, dtype, 5),
        dense(3, dtype, 4, activation="softmax", last=True),
    ),
    "Both ends": lambda dtype: stack(
        Bidirectional(gru(3, dtype), lstm(3, dtype)),
        stack(
            Bidirectional(gru(2, dtype, 6), Bidirectional(gru(1, dtype, 6), gru(1, dtype, 6))),
            dense(3, dtype, 4, activation="sigmoid", last="ends"),
        ),
    ),
    "Head": lambda dtype: stack(  # dense layers that make something of a row without steps
        dense(4, dtype, activation="relu"),
        Bidirectional(stack(gru(3, dtype, 4), dense(2, dtype, 3, activation="tanh")), dense(2, dtype, 4)),
        dense(4, dtype, 4, activation="softmax"),
        stack(dense(3, dtype, 4, activation="sigmoid"), dense(2, dtype, 3, activation="tanh", last=True)),
    ),
    "Dense within": lambda dtype: stack(
        Bidirectional(stack(dense(4, dtype, activation="softmax"), gru(3, dtype, 4)), dense(3, dtype)),
        dense(2, dtype, 6, activation="sigmoid"),
        gru(3, dtype, 2, reverse=True),
        dense(2, dtype, 3),
    ),
}
LAYERS |= {
    "RNN": lambda dtype: rnn(4, dtype, activation="softsign"),
    "Projected": lambda dtype: lstm(5, dtype, use_peephole=True, cell_clip=0.7, proj_size=3, proj_clip=0.3),
    "Variants": lambda dtype: stack(
        Bidirectional(
            lstm(4, dtype, coupled=True, use_peephole=True, forget_bias=0.7),
            rnn(4, dtype, activation=("leaky_relu", 0.3)),
        ),
        gru(3, dtype, 8, activation="elu", recurrent_activation=("hard_sigmoid", 0.2, 0.5)),
        Bidirectional(
            lstm(4, dtype, 3, coupled=True, proj_size=2, activation="softplus"),
            lstm(3, dtype, 3, proj_size=2, gate_order="ifco", recurrent_activation="hard_sigmoid"),
        ),
        gru(3, dtype, 4, reset_after=True, activation="selu", recurrent_activation="tanh", reverse=True),
    ),
}
DEPTH = {"Variants": 4, "Reverse": 4, "Stack": 4, "Classifier": 3, "Both ends": 3, "Dense within": 5}
STREAMING = {
    **{name: LAYERS[name] for name in ("LSTM", "LSTM with all", "GRU", "GRU after")},
    "Stack": lambda dtype: stack(
        lstm(4, dtype, gate_order="ifco"), stack(gru(3, dtype, 4), gru(3, dtype, 3, reset_after=True))
    ),
    "Dense": LAYERS["Dense"],
    "Classifier": LAYERS["Classifier"],
    "Projected": LAYERS["Projected"],
    "Variants": lambda dtype: stack(
        lstm(4, dtype, coupled=True, use_peephole=True, recurrent_activation="hard_sigmoid"),
        gru(3, dtype, 4, activation="elu"),
        lstm(3, dtype, 3, coupled=True, proj_size=4, activation="softsign"),
        rnn(3, dtype, 4, activation="relu"),
    ),
}


ACTIVATIONS = ["tanh", "relu", "elu", "softsign", "hard_sigmoid", ("leaky_relu", 0.3)]  # whose slopes are at most 1


def random_layers(g, inputs, dtype, most):
    """Up to three layers, one on top of the other, of cells and of both directions; their sizes are below ``most``."""

    def cell(inputs, size, reverse):
        options = {"seed": int(g.integers(1000)), "dtype": dtype, "reverse": reverse}
        options["activation"] = ACTIVATIONS[g.integers(len(ACTIVATIONS))]
        kind = g.integers(5)
        if kind == 0:
            return drawn(RNN.init(inputs, size, **options))
        options["recurrent_activation"] = ["sigmoid", "hard_sigmoid"][g.integers(2)]
        if kind < 3:
            return drawn(GRU.init(inputs, size, reset_after=bool(kind == 2), **options))
        options |= {"use_peephole": bool(g.integers(2)), "coupled": bool(kind == 4)}
        options |= {"cell_clip": float(g.choice([0.0, 0.3])), "forget_bias": float(g.choice([0.0, 0.6]))}
        options["gate_order"] = "icfo" if options["coupled"] else str(g.choice(["icfo", "ifco"]))
        if g.integers(2):
            size, options["proj_size"] = int(g.integers(1, most)), size
        return drawn(LSTM.init(inputs, size, **options))

    layers = []
    for _ in range(g.integers(1, 4)):
        size = int(g.integers(1, most))
        if g.integers(2):
            layers.append(Bidirectional(cell(inputs, size, False), cell(inputs, size, False)))
        else:
            layers.append(cell(inputs, size, bool(g.integers(2))))
        inputs = layers[-1].output_size
    return layers


# -------------------------------------------------------------------------------------------- calls and their names
def flat(layer, state, prefix=""):
    """A state by the names of its parts."""
    if isinstance(layer, Stack):
        parts = [flat(part, of, f"{prefix}{k}.") for k, (part, of) in enumerate(zip(layer.layers, state, strict=True))]
    elif isinstance(layer, Bidirectional):
        parts = [flat(layer.fw, state[0], f"{prefix}fw."), flat(layer.bw, state[1], f"{prefix}bw.")]
    else:
        return {prefix + name: array for name, array in zip(layer._state._fields, state, strict=True)}
    return {name: array for part in parts for name, array in part.items()}


def random_state(layer, g, batch=B):
    return like(zeros(layer, batch), lambda array: g.uniform(-1, 1, array.shape).astype(array.dtype))


class Case:
    """A call of a layer: the inputs of a model of it and the outputs expected, by name, and the arguments of a session
    of the model. ``sizes`` are T and B. The rows' lengths are ``ends``; without them `LENGTHS` where they fit, else
    random.
    """

    def __init__(
        self,
        layer,
        *,
        lengths=True,
        reset=False,
        state=True,
        train=False,
        seed=0,
        sizes=(T, B),
        ends=None,
        padding=np.nan,
    ):
        g = rng(repr(layer), lengths, reset, train, seed)
        dtype = layer.dtype
        if ends is None:
            ends = LENGTHS if sizes == (T, B) else g.integers(0, sizes[0] + 1, sizes[1])
        past = (np.arange(sizes[0])[:, None] >= ends) & lengths
        x = g.uniform(-1, 1, (*sizes, layer.input_size)).astype(dtype)
        x[past] = padding
        self.layer = layer
        self.options = {"lengths": lengths, "reset": reset, "state": state, "train": train}
        self.given = {"lengths": ends} if lengths else {}
        self.given |= {"reset": g.random(sizes) < 0.3} if reset else {}
        self.arguments = {"x": x, **self.given}
        self.feeds = {"x": x, **self.given}
        if state:
            first = self.arguments["state"] = random_state(layer, g, sizes[1])
            self.feeds |= {f"{name}_prev": array for name, array in flat(layer, first).items()}
        if train:
            rows = sizes if layer._over_time else sizes[1:]
            d_y = g.uniform(-1, 1, (*rows, layer.output_size)).astype(dtype)
            if layer._over_time:
                d_y[past] = padding
            self.arguments |= {"d_y": d_y, "weights": layer.weights}
            self.feeds |= {"d_y": d_y} | layer.weights
            if state:
                d_last = self.arguments["d_state"] = random_state(layer, g, sizes[1])
                self.feeds |= {f"d_{name}": array for name, array in flat(layer, d_last).items()}
        self.expected = self.computed()

    def computed(self, change=lambda array: array):
        """The layer's results in float64, by name; of other numbers if ``change`` makes some of the given ones."""
        layer = self.exactly(self.layer, change)
        x, first, d_y, d_last = (
            value if value is None else like(value, lambda array: change(array.astype(np.float64)))
            for value in map(self.arguments.get, ("x", "state", "d_y", "d_state"))
        )
        y, last, tape = layer.forward(x, first, **self.given)
        found = {"y": y} | flat(layer, last)
        if self.options["train"]:
            d_x, d_first, grads = layer.backward(tape, d_y, d_last)
            found["d_x"] = d_x
            if self.options["state"]:
                found |= {f"d_{name}_prev": array for name, array in flat(layer, d_first).items()}
            found |= {f"d_{name}": grad for name, grad in grads.items()}
        return found

    def expect_formulas(self):
        """Expect what the formulas give for a Bidirectional in training, row by row, each of its own length."""
        expected = {key: np.zeros_like(value) for key, value in self.expected.items()}
        for way in ("fw", "bw"):
            cell = getattr(self.layer, way)
            states, size = cell._state._fields, cell.output_size
            half = slice(0, size) if way == "fw" else slice(size, 2 * size)
            for b, n in enumerate(self.given["lengths"]):
                state = {s: self.feeds[f"{way}.{s}_prev"][b : b + 1] for s in states}
                d_state = {s: self.feeds[f"d_{way}.{s}"][b : b + 1] for s in states}
                order = np.arange(n) if way == "fw" else np.arange(n)[::-1]
                if n == 0:
                    for s in states:
                        expected[f"{way}.{s}"][b], expected[f"d_{way}.{s}_prev"][b] = state[s], d_state[s]
                    continue
                x, d_y = self.feeds["x"][order, b : b + 1], self.feeds["d_y"][order, b : b + 1, half]
                steps, grads = row_gradients(cell, x, state, d_y, d_state)
                expected["y"][order, b, half] = steps["h"][:, 0]
                expected["d_x"][order, b] += grads["x"][:, 0]
                for s in states:
                    expected[f"{way}.{s}"][b] = steps[s][-1, 0]
                    expected[f"d_{way}.{s}_prev"][b] = grads[f"{s}_prev"][0]
                for key in cell.weights:
                    expected[f"d_{way}.{key}"] += grads[key]
        self.expected = expected

    def by_name(self, results):
        """A session's results by the names of the model's outputs."""
        found = {"y": results.y} | flat(self.layer, results.state)
        if self.options["train"]:
            found["d_x"] = results.d_x
            if self.options["state"]:
                found |= {f"d_{name}_prev": array for name, array in flat(self.layer, results.d_state).items()}
            found |= {f"d_{name}": grad for name, grad in results.grads.items()}
        return found

    @staticmethod
    def exactly(layer, change=lambda array: array):
        """The layer in float64, with the same weights, or changed ones."""
        if isinstance(layer, Stack):
            return Stack([Case.exactly(part, change) for part in layer.layers])
        if isinstance(layer, Bidirectional):
            return Bidirectional(Case.exactly(layer.fw, change), Case.exactly(layer.bw, change))
        weights = {name: change(w.astype(np.float64)) for name, w in layer.weights.items()}
        return type(layer)(**layer._arguments() | weights)

    @staticmethod
    def double(*values):
        """Arrays and states in float64."""
        return [value if value is None else like(value, lambda a: a.astype(np.float64)) for value in values]

    def check(self, model, run=on_onnxruntime, limit=FLOAT64, dtype=np.float64):
        assert {value.name for value in model.graph.input} == self.feeds.keys()
        assert [value.name for value in model.graph.output] == list(self.expected)
        for (name, right), result in zip(self.expected.items(), run(model, self.feeds), strict=True):
            assert result.dtype == dtype and result.shape == right.shape, name
            error, largest = np.abs(result - right).max(initial=0), np.abs(right).max(initial=0)
            assert error <= limit * largest, f"{name}: {error / (largest or 1):.2e} > {limit:.2e}"


def exported(layer, case=None, **options):
    if options.get("loop") == "unroll":
        options["sizes"] = {"T": T, **options.get("sizes", {})}
    return checked(onnx_export.export(layer, None, **(case.options if case else {}), **options))
