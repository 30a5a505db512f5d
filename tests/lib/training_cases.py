"""Steps of training, by layers, losses and optimizers, for the models of `onnx_export.training_step`."""

from __future__ import annotations

import numpy as np
from cases import rng
from export_cases import LENGTHS, B, Case, T, flat, random_state
from graphs import checked, named, on_onnxruntime

import onnx_export
from blockcell import Dense, Stack, loss, optim
from blockcell.layers.structure import ends_in_softmax

LOSSES = [*loss.LOSSES]
OPTIMIZERS = {  # with settings other than the defaults: decays, which are below 1, and small terms
    name: {
        setting: 0.8 + 0.05 * k if below == 1 else 1e-3
        for k, (setting, below) in enumerate(row.settings.items(), start=-1)
        if setting != "learning_rate"
    }
    for name, row in optim.OPTIMIZERS.items()
}


class Training:
    """The training of a layer: batches, and what its steps are by layers, losses and optimizers in float64.

    ``options`` are those of `onnx_export.training_step`; ``full`` leaves no step of any row out of a batch.
    """

    def __init__(self, layer, criterion, optimizer, *, rate=0.05, sizes=(T, B), seed=0, full=False, **options):
        self.takes_classes = loss.LOSSES[criterion].target == "classes"
        if self.takes_classes and ends_in_softmax(layer):  # a Stack, as the loss takes logits
            *below, head = layer.layers
            layer = Stack([*below, Dense(**head.weights, last=head.last)])
        self.layer, self.loss, self.optimizer, self.rate, self.sizes = layer, criterion, optimizer, rate, sizes
        self.options = {"loss": criterion, "optimizer": optimizer, **options}
        self.settings = {name: options[name] for name in optim.OPTIMIZERS[optimizer].settings if name in options}
        self.max_norm, self.full = options.get("max_norm"), full
        self.takes = {name: options.get(name, name == "lengths") for name in ("lengths", "reset", "mask", "state")}
        self.seed = f"{layer!r} {criterion} {optimizer} {sizes} {seed}"
        self.weights, self.memory, self.state = dict(layer.weights), None, None
        if self.takes["state"]:
            self.state = random_state(layer, rng(self.seed, "state"), sizes[1])

    def model(self, **form):
        fixed = {"sizes": {"T": self.sizes[0]}} if form.get("loop") == "unroll" else {}
        return checked(onnx_export.training_step(self.layer, None, **self.options, **fixed | form))

    # ---------------------------------------------------------------------------------------------------------- batches
    def batch(self, number):
        """The arguments of a session's call, but for the learning rate and the state. What does not count is NaN, or no
        class."""
        g = rng(self.seed, number)
        (steps, rows), layer = self.sizes, self.layer
        ends = LENGTHS if self.sizes == (T, B) else g.integers(0, steps + 1, rows)
        ends = np.full(rows, steps) if self.full or not self.takes["lengths"] else ends
        past = np.arange(steps)[:, None] >= ends
        x = g.uniform(-1, 1, (steps, rows, layer.input_size)).astype(layer.dtype)
        x[past] = np.nan
        found = {"x": x}
        counts = ~past if layer._over_time else np.ones(rows, bool)  # a row without steps has a y, too
        if self.takes["lengths"]:
            found["lengths"] = ends
        if self.takes["reset"]:
            found["reset"] = g.random((steps, rows)) < 0.3
        if self.takes["mask"]:
            found["mask"] = g.random(counts.shape) < 0.7
            found["mask"] |= self.full
            counts = counts & found["mask"]
        if self.takes_classes:
            target = g.integers(0, layer.output_size, counts.shape)
            target[~counts] = -7
        else:
            target = g.uniform(-1, 1, (*counts.shape, layer.output_size)).astype(layer.dtype)
            target[~counts] = np.nan
        return found | {"target": target}

    def feeds(self, batch, weights, memory, state=None):
        """The inputs of the model, by name, before a step."""
        wide = np.result_type(self.layer.dtype, np.float32)
        feeds = {**batch, "learning_rate": np.array(self.rate, wide), **weights}
        if self.takes["state"]:
            feeds |= {f"{name}_prev": array for name, array in flat(self.layer, state).items()}
        return feeds | (memory or self.nothing_kept())

    def nothing_kept(self):
        """What the optimizer keeps before the first step: zeros."""
        wide, row = np.result_type(self.layer.dtype, np.float32), optim.OPTIMIZERS[self.optimizer]
        kept = {f"{s}.{n}": np.zeros(w.shape, wide) for s in row.slots for n, w in self.weights.items()}
        return kept | ({"step": np.array(0)} if row.counts_steps else {})

    # ------------------------------------------------------------------------------------------------------------ steps
    def step(self, batch, weights, memory, state=None, change=lambda array: array):
        """The outputs of the model, by name, of numbers in float64, or of others that `change` makes of them."""

        def double(array):
            return change(np.asarray(array, np.float64))

        layer = Case.exactly(self.layer)
        weights = {name: double(weight) for name, weight in weights.items()}
        layer.set_weights(**weights)
        memory = {name: a if name == "step" else np.asarray(a, np.float64) for name, a in (memory or {}).items()}
        (state,) = Case.double(state)
        given = {name: batch.get(name) for name in ("lengths", "reset")}
        y, last, tape = layer.forward(double(batch["x"]), state, **given)
        target = batch["target"] if self.takes_classes else double(batch["target"])
        counted = {name: batch.get(name) for name in ("lengths", "mask")}
        if not layer._over_time:
            del counted["lengths"]
        value, d_y = getattr(loss, self.loss)(y, target, **counted)
        grads = layer.backward(tape, d_y)[2]
        found = {"loss": np.array(value)}
        if self.max_norm is not None:
            grads, norm = optim.clip_global_norm(grads, self.max_norm)
            found["norm"] = np.array(norm)
        settings = {"learning_rate": self.rate, **self.settings}
        weights, memory = getattr(optim, self.optimizer)(weights, grads, memory, **settings)
        found["y"] = y
        found |= flat(layer, last) if self.takes["state"] else {}
        return found | {f"new_{name}": array for name, array in (weights | memory).items()}

    def first_step(self, model, run=on_onnxruntime, batch=None):
        """The outputs of the first step, by name, of the model, and those expected."""
        batch = batch or self.batch(0)
        results = run(model, self.feeds(batch, self.weights, None, self.state))
        return named(model, results), self.step(batch, self.weights, None, self.state)

    def after(self, found):
        """The weights, and what the optimizer keeps, after a step."""
        kept = {name.removeprefix("new_"): array for name, array in found.items() if name.startswith("new_")}
        return {name: kept.pop(name) for name in self.weights}, kept


def errors(found, expected):
    """Return by name how far a step's outputs are off, in largest entries where these exceed 1, and inf for a NaN."""
    assert found.keys() == expected.keys()
    off = {}
    for name, right in expected.items():
        assert found[name].shape == right.shape, name
        largest = max(1.0, np.abs(right).max(initial=0))
        error = np.abs(found[name] - right).max(initial=0) / largest
        off[name] = np.inf if np.isnan(error) else error  # a max over NaN may not be NaN
    return off
