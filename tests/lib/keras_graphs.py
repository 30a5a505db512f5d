"""Random functional models of Keras with branches, shared and nested layers, states, masks, merges and calls of one's
own, and what a conversion of each has to say."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from blockcell.convert.keras_description import tensors_of

LENGTH = 6
WITHOUT_EFFECT = "InputLayer", "Dropout", "SpatialDropout1D", "GaussianNoise", "ActivityRegularization"


class Drawn(NamedTuple):
    """A random model."""

    model: object
    facts: list[str]
    """Parts of the text that a warning has to have."""
    is_changed: bool
    """Whether a call() of one's own computes something else."""


class Graph:
    """Draws a model, one layer after the other."""

    def __init__(self, g, keras):
        self.g, self.keras, self.layers = g, keras, keras.layers
        self.facts, self.changed = {}, set()  # the facts by the name of a layer; models that compute something else
        self.values = []  # symbolic tensors [B,T,C]
        self.states = []  # the kind of cell, the units, the symbolic states and the layer's name
        self.shared = []  # layers and models to call once more: the object, its number of columns, its calls
        self.count = 0

    def draw(self, *choices):
        return choices[int(self.g.integers(len(choices)))]

    def chance(self, probability):
        return bool(self.g.random() < probability)

    def name(self, kind):
        self.count += 1
        return f"{kind}{self.count}"

    def pick(self):
        return self.values[int(self.g.integers(len(self.values)))]

    def recurrent(self, sequences=True, **options):
        """Make a recurrent layer."""
        kind = self.draw("LSTM", "GRU", "SimpleRNN")
        options |= {"return_sequences": sequences, "name": self.name(kind.lower())}
        units = int(self.g.integers(2, 6))
        if kind == "GRU":
            options["reset_after"] = self.chance(0.5)
        if self.chance(0.2):
            options["activation"] = "relu"
        if self.chance(0.2):
            cell = {name: options.pop(name) for name in ("reset_after", "activation") if name in options}
            cells = [getattr(self.layers, f"{kind}Cell")(units, **cell) for _ in range(1 + self.chance(0.5))]
            return self.layers.RNN(cells if len(cells) > 1 else cells[0], **options)
        return getattr(self.layers, kind)(units, **options)

    def bidirectional(self, sequences=True):
        kind = self.draw("LSTM", "GRU")
        layer = getattr(self.layers, kind)(int(self.g.integers(2, 5)), return_sequences=sequences)
        return self.layers.Bidirectional(layer, name=self.name("bidirectional"))

    def any_recurrent(self, sequences=True):
        return self.bidirectional(sequences) if self.chance(0.3) else self.recurrent(sequences)

    # ------------------------------------------------------------------------------------------------------- inputs
    def inputs(self):
        """Make one or two inputs, of ids or of numbers, perhaps with a mask."""
        inputs = []
        for _ in range(1 + self.chance(0.35)):
            length = self.draw(None, None, LENGTH)
            if self.chance(0.25):
                inputs.append(self.keras.Input((length,), dtype="int32"))
                masked, name = self.chance(0.6), self.name("embedding")
                value = self.layers.Embedding(9, 4, mask_zero=masked, name=name)(inputs[-1])
                self.facts[name] = f"{name} (Embedding)" + ": pass mask=ids != 0" * masked
            else:
                inputs.append(self.keras.Input((length, 4)))
                value = inputs[-1]
                if self.chance(0.15):
                    name = self.name("masking")
                    value = self.layers.Masking(name=name)(value)
                    self.facts[name] = f"{name} (Masking): pass mask="
            self.values.append(value)
        return inputs

    # ------------------------------------------------------------------------------------------------------- layers
    def add_recurrent(self):
        layer, x = self.any_recurrent(), self.pick()
        if self.chance(0.3):
            self.shared.append([layer, x.shape[-1]])
        self.values.append(layer(x))

    def add_states(self):
        """Add a layer that returns its states."""
        kind = self.draw("LSTM", "GRU")
        units, name = int(self.g.integers(2, 5)), self.name(kind.lower())
        y, *states = getattr(self.layers, kind)(units, return_sequences=True, return_state=True, name=name)(self.pick())
        self.values.append(y)
        self.states.append((kind, units, states, name))

    def add_decoder(self):
        """Add a layer that starts from the states of another one, or from what a Dense makes of an output."""
        if not self.states:
            return self.add_states()
        kind, units, states, _ = self.states[int(self.g.integers(len(self.states)))]
        name = self.name("decoder")
        if self.chance(0.3):
            dense = self.name("dense")
            states = [self.layers.Dense(units, name=dense)(states[0]), *states[1:]]
            self.facts[dense] = f"{dense} (Dense)"
        layer = getattr(self.layers, kind)(units, return_sequences=True, name=name)
        self.values.append(layer(self.pick(), initial_state=states))
        self.facts[name] = f"{name} ({kind}): it starts from"
        return None

    def add_dense(self):
        name, x = self.name("dense"), self.pick()
        layer = self.layers.Dense(int(self.g.integers(2, 6)), activation=self.draw(None, "relu"), name=name)
        self.values.append(self.layers.TimeDistributed(layer)(x) if self.chance(0.3) else layer(x))

    def add_without_effect(self):
        kind = self.draw("Dropout", "SpatialDropout1D", "GaussianNoise")
        self.values.append(getattr(self.layers, kind)(0.3)(self.pick()))

    def add_other(self):
        """Add a layer that has no counterpart."""
        kind = self.draw("LayerNormalization", "Conv1D", "Flip", "Lambda")
        name, x = self.name("other"), self.pick()
        if kind == "Conv1D":
            layer = self.layers.Conv1D(4, 3, padding="causal", name=name)
        elif kind == "LayerNormalization":
            layer = self.layers.LayerNormalization(name=name)
        else:
            layer = self.layers.Lambda((lambda a: a[:, ::-1]) if kind == "Flip" else (lambda a: 2 * a), name=name)
        self.values.append(layer(x))
        self.facts[name] = f"{name} ({type(layer).__name__})"

    def add_merge(self):
        kind, name = self.draw("Add", "Multiply", "Concatenate"), self.name("merge")
        first, second = self.pick(), self.pick()
        if kind != "Concatenate" and first.shape[-1] != second.shape[-1]:
            kind = "Concatenate"
        self.values.append(getattr(self.layers, kind)(name=name)([first, second]))
        self.facts[name] = f"{name} ({kind})"

    def add_again(self):
        """Call a layer or a nested model once more."""
        for entry in self.shared:
            layer, columns = entry
            fitting = [value for value in self.values if value.shape[-1] == columns]
            if fitting:
                self.values.append(layer(fitting[int(self.g.integers(len(fitting)))]))
                return None
        return self.add_nested()

    def add_nested(self):
        """Add a nested model, whose call() may be another."""
        x = self.pick()
        columns = x.shape[-1]
        parts = [self.any_recurrent()]
        if self.chance(0.5):
            parts.append(self.layers.Dense(columns, name=self.name("dense")))
        kind = self.draw("Sequential", "Functional", "own")
        if kind == "Sequential":
            model = self.keras.Sequential([self.keras.Input((None, columns)), *parts], name=self.name("sequential"))
        else:
            inner = y = self.keras.Input((None, columns))
            for part in parts:
                y = part(y)
            name = self.name("nested")
            model = self.own_class(kind == "own", name)(inner, y, name=name)
        if self.chance(0.4):
            self.shared.append([model, columns])
        self.values.append(model(x))

    def own_class(self, is_own, name):
        """Return Keras' Model, or a class with a call() of its own, which may compute the same."""
        if not is_own:
            return self.keras.Model
        how = self.draw("same", "same", "scaled", "flipped", "residual")
        self.changed |= {name} if how != "same" else set()

        class Own(self.keras.Model):
            def call(self, inputs, training=None, mask=None):
                if how == "flipped":
                    inputs = [x[:, ::-1] for x in inputs] if isinstance(inputs, list) else inputs[:, ::-1]
                y = super().call(inputs, training=training, mask=mask)
                ys = y if isinstance(y, (list, tuple)) else [y]
                if how == "residual":
                    ys = [y + 0.5 for y in ys]
                ys = [3 * y for y in ys] if how == "scaled" else ys
                return [*ys] if isinstance(y, (list, tuple)) else ys[0]

        return Own

    # -------------------------------------------------------------------------------------------------------- model
    def model(self):
        """Draw a model."""
        inputs = self.inputs()
        choices = {
            "recurrent": 6,
            "dense": 2,
            "without_effect": 2,
            "states": 1,
            "decoder": 1,
            "other": 1,
            "merge": 1,
            "again": 1,
            "nested": 2,
        }
        weights = np.array([*choices.values()], float)
        for _ in range(int(self.g.integers(1, 5))):
            if self.chance(0.7):  # a chain
                self.values = self.values[-1:]
            kind = [*choices][int(self.g.choice(len(choices), p=weights / weights.sum()))]
            getattr(self, f"add_{kind}")()
        outputs = [self.values[-1]]
        if self.chance(0.4):
            outputs = [self.any_recurrent(sequences=False)(outputs[0])]
            if self.chance(0.6):
                outputs = [self.layers.Dense(2, activation=self.draw(None, "softmax"), name="head")(outputs[0])]
        elif self.chance(0.5):
            outputs = [self.any_recurrent()(outputs[0])]
        if self.chance(0.1) and len(self.values) > 1:
            outputs.append(self.values[0] if self.values[0] is not self.values[-1] else self.values[-1])
        if self.states and self.chance(0.4):
            *_, states, name = self.states[0]
            outputs.append(states[-1])
            self.facts["root"] = f"{name} ({self.states[0][0]}): its state"
        results = outputs[0] if len(outputs) == 1 else outputs
        entries = self.keras.Model(inputs, results).get_config()["layers"]
        read = {name for entry in entries for name, _ in tensors_of(entry["inbound_nodes"])}
        used = [tensor for tensor in inputs if tensor._keras_history[0].name in read]
        model = self.own_class(self.chance(0.15), "root")(used if len(used) > 1 else used[0], results, name="root")
        for variable in model.weights:
            if "float" in str(getattr(variable.dtype, "name", variable.dtype)):
                scale = 1.5 / np.sqrt(variable.shape[0]) if len(variable.shape) > 1 else 0.5
                variable.assign(self.g.uniform(-scale, scale, variable.shape).astype(np.float32))
        return model


def random_graph(g, keras):
    """Draw a model that has a recurrent layer."""
    while True:
        graph = Graph(g, keras)
        model = graph.model()
        layers = [*layers_of(model)]
        names = {"root", *(layer.name for layer in layers)}
        if any(kind in type(layer).__name__ for layer in layers for kind in ("LSTM", "GRU", "RNN", "Bidirectional")):
            facts = [fact for name, fact in graph.facts.items() if name in names]
            entries = model.get_config()["layers"]
            if any(len(entry["inbound_nodes"]) > 1 for entry in entries):
                facts.append("that it is called more than once")
            return Drawn(model, facts, bool(graph.changed & names))


def layers_of(model):
    """Yield the layers of a model, and those of the models in it."""
    for layer in model.layers:
        yield layer
        if isinstance(getattr(layer, "layers", None), (list, tuple)):
            yield from layers_of(layer)
