"""`blockcell demo`: the ops on real data, from training to the rounding errors.

scikit-learn brings 1797 handwritten digits of 8 x 8 pixels.  A GRU and an LSTM read each of them row by row, T = 8
steps of I = 8 pixels, and after every row the softmax of a dense layer says which digit this is: its prediction.  They
are trained with `blockcell.loss` and `blockcell.optim`.  Then all ops run on the trained weights and on
digits that were held out, and are compared with the float64 formulas; so are their ONNX graphs on the runtimes that are
here.

The settings below were chosen while looking at the held-out digits, so the accuracies flatter a little.

This module computes and draws; `cli` prints.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure, SubFigure
from numpy.typing import DTypeLike
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from threadpoolctl import threadpool_limits

from .. import ops, optim, raw_ops
from ..formulas import FORMULAS, error_in_eps
from ..gates import gate_slice, reorder
from ..layers import GRU, LSTM, Dense, Stack
from ..loss import softmax_cross_entropy
from ..op_errors import KERNELS, Row, rows_of_outputs, severity
from ..optable import OPS, Array, Op
from ..progress import Progress

HIDDEN = 64
EPOCHS = 60
BATCH = 64
LEARNING_RATE = 0.015  # at the start; it falls linearly to nothing
MAX_NORM = 1.0  # of the gradients together
NOISE = 0.2  # standard deviation, added to the pixels (0 to 1) in training: without it the networks learn by heart
EVERY_ROW, LAST_ROW = 8 / 17, 9 / 17  # in the loss: the last row decides, but every prediction is to be honest
HELD_OUT = 0.2
CHECKED = 64  # held-out digits that the ops run on
SIZES = {"T": 8, "B": CHECKED, "I": 8, "H": HIDDEN}
BOUND_EPS = 5.0  # what the tests allow float32; it is more here if the data amplify rounding more than that
CHAIN = 64  # the kernels' products are sums of chains of so many terms
ACTIVATION_EPS = 1.0  # the kernels' sigmoid and tanh are within 2 ulp, and an ulp below 1 is half an eps
RUNTIMES_SHARE = 2.0  # of the kernels' bound: runtimes do not say in which order they sum, nor how good their tanh is
REQUIRED_ACCURACY = 0.95

EPS = float(np.finfo(np.float32).eps)
Arrays = dict[str, Array]


class Digits(NamedTuple):
    """Images as sequences of rows, [T,B,I] with values from 0 to 1, and which digits they are, [B]."""

    x: Array
    labels: Array

    def take(self, which: Array | slice) -> Digits:
        return Digits(np.ascontiguousarray(self.x[:, which]), self.labels[which])


def load() -> tuple[Digits, Digits]:
    """Load the digits to train on and those held out: always the same ones, with an equal share of each digit."""
    images, labels = load_digits(return_X_y=True)
    rows = (images / images.max()).astype(np.float32).reshape(len(images), 8, 8)
    x, held_out_x, y, held_out_y = train_test_split(rows, labels, test_size=HELD_OUT, stratify=labels, random_state=0)
    return Digits(x.swapaxes(0, 1), y), Digits(held_out_x.swapaxes(0, 1), held_out_y)


# --------------------------------------------------------------------------------------------------------- the networks
class Classifier:
    """A recurrent layer, and a dense one that makes logits of its h."""

    def __init__(self, layer: GRU | LSTM, rng: np.random.Generator) -> None:
        self.net = Stack([layer, Dense.init(layer.hidden_size, 10, seed=rng, dtype=layer.dtype)])

    @property
    def name(self) -> str:
        return type(self.net.layers[0]).__name__

    def predict(self, x: Array) -> Array:
        """Return each digit's probability after each row, [T,B,10]."""
        layer, head = self.net.layers
        return Stack([layer, Dense(head.weights["w"], head.weights["b"], "softmax")])(x)[0]

    def loss(self, digits: Digits, z: Array) -> tuple[float, Array]:
        """Compute the mean cross-entropy of every row and of the last one, weighted, and its gradient to the logits."""
        loss, d_z = softmax_cross_entropy(z, np.broadcast_to(digits.labels, z.shape[:-1]))
        last, d_last = softmax_cross_entropy(z[-1], digits.labels)
        d_z *= EVERY_ROW
        d_z[-1] += LAST_ROW * d_last
        return EVERY_ROW * loss + LAST_ROW * last, d_z

    def loss_and_grads(self, digits: Digits) -> tuple[float, Arrays]:
        """Compute the loss and its gradient to every weight, by the weights' names."""
        z, _, tape = self.net.forward(digits.x)
        loss, d_z = self.loss(digits, z)
        return loss, self.net.backward(tape, d_z)[2]


def new_networks(seed: int, hidden: int = HIDDEN, dtype: DTypeLike = np.float32) -> tuple[Classifier, Classifier]:
    """Make a GRU, and an LSTM with peepholes and without a clip, which the gradient would ignore."""
    rng = np.random.default_rng(seed)
    gru = Classifier(GRU.init(8, hidden, seed=rng, dtype=dtype), rng)
    lstm = LSTM.init(8, hidden, seed=rng, dtype=dtype, use_peephole=True, forget_bias=1.0)
    return gru, Classifier(lstm, rng)


# --------------------------------------------------------------------------------------------------------- the training
@dataclass(frozen=True)
class Training:
    """How the training of a network went: the loss and the held-out accuracy by epoch."""

    network: str
    weights: int
    losses: list[float]
    accuracies: list[float]
    seconds: float

    @property
    def ok(self) -> bool:
        return self.accuracies[-1] >= REQUIRED_ACCURACY


def train(network: Classifier, digits: Digits, held_out: Digits, rng: np.random.Generator, tell: Progress) -> Training:
    """Train the network in place."""
    start = time.perf_counter()
    state = None
    losses: list[float] = []
    accuracies: list[float] = []
    count = len(digits.labels)
    for epoch in range(EPOCHS):
        total = 0.0
        order = rng.permutation(count)
        for first in range(0, count, BATCH):
            batch = digits.take(order[first : first + BATCH])
            noise = np.float32(NOISE) * rng.standard_normal(batch.x.shape, np.float32)
            loss, grads = network.loss_and_grads(batch._replace(x=batch.x + noise))
            grads, _ = optim.clip_global_norm(grads, MAX_NORM)
            rate = LEARNING_RATE * (1 - (epoch + first / count) / EPOCHS)
            weights, state = optim.adam(network.net.weights, grads, state, learning_rate=rate)
            network.net.set_weights(**weights)
            total += loss * len(batch.labels)
        losses.append(total / count)
        guesses = network.predict(held_out.x)[-1].argmax(axis=1)
        accuracies.append(float((guesses == held_out.labels).mean()))
        tell(f"training the {network.name}", epoch + 1, EPOCHS)
    size = sum(value.size for value in network.net.weights.values())
    return Training(network.name, size, losses, accuracies, time.perf_counter() - start)


# -------------------------------------------------------------------------------------------------------------- the ops
@dataclass(frozen=True)
class OpCheck:
    """The errors of an op against its formula: the kernel's, and the graph's on every ONNX runtime that is here."""

    op: str
    worst: dict[str, Row]
    """The worst output by the names of the kernels and runtimes; every output has its own bound."""

    @property
    def ok(self) -> bool:
        return all(row.ok for row in self.worst.values())

    def as_dict(self) -> dict[str, Any]:
        figures = {}
        for name, row in self.worst.items():
            error = row.error if np.isfinite(row.error) else None
            figures[name] = {"error_eps": error, "output": row.output, "bound_eps": row.bound, "ok": row.ok}
        return {"op": self.op, **figures.pop(KERNELS), "runtimes": figures}


def arguments(gru: Classifier, lstm: Classifier, digits: Digits) -> dict[str, dict[str, Any]]:
    """Make arguments for every op from the trained networks: weights, states, and gradients of the loss."""
    arguments_by_op = {}
    for name, op in OPS.items():
        network = lstm if "LSTM" in name.upper() else gru
        values = (over_rows if op.sequence else at_one_row)(network, digits)
        values["d_h"] = values["h_grad"]  # its name in the GRU's cell
        if op.gates == OPS["BlockLSTMV2"].gates:
            values |= for_v2(values)
        if "rnn" in name:
            values |= {"w": values["w_c"], "b": values["b_c"]}
            values |= ops.block_rnn(**select(OPS["block_rnn"], values))._asdict()
        if "reset_after" in name:  # half of the candidate's bias is on either side of the reset
            values |= dict.fromkeys(("b_c", "b_hc"), values["b_c"] / 2)
            values |= ops.block_gru_reset_after(**select(OPS["block_gru_reset_after"], values))._asdict()
        arguments_by_op[name] = select(op, values)
    return arguments_by_op


def select(op: Op, values: dict[str, Any]) -> dict[str, Any]:
    """Return those of the values that are arguments of an op."""
    names = {tensor.name for tensor in op.inputs} | {attribute.name for attribute in op.attributes} | {"seq_len_max"}
    return {name: value for name, value in values.items() if name in names}


def over_rows(network: Classifier, digits: Digits) -> dict[str, Any]:
    """Return all that the sequence ops take, forward and backward."""
    layer, head = network.net.layers
    zeros = np.zeros((digits.x.shape[1], layer.hidden_size), digits.x.dtype)
    values: dict[str, Any] = {"seq_len_max": len(digits.x), "x": digits.x, "h_prev": zeros, **layer.weights}
    if isinstance(layer, LSTM):
        options = {"forget_bias": layer.forget_bias, "cell_clip": layer.cell_clip, "use_peephole": True}
        values |= {"cs_prev": zeros, **options}
    states = (raw_ops.BlockLSTM if isinstance(layer, LSTM) else ops.block_gru)(**values)
    z, _, tape = head.forward(states.h)
    h_grad, _, _ = head.backward(tape, network.loss(digits, z)[1])
    return values | states._asdict() | {"h_grad": h_grad, "cs_grad": np.zeros_like(h_grad)}  # the loss sees no cs


def at_one_row(network: Classifier, digits: Digits) -> dict[str, Any]:
    """Return all that cells take at the middle row: states from the rows before it, gradients from those after it."""
    x, row = digits.x, len(digits.x) // 2
    layer: Any = network.net.layers[0]
    values = over_rows(network, digits)
    step = {key: value[row] if np.ndim(value) == 3 else value for key, value in values.items() if key != "seq_len_max"}
    _, before = layer(x[:row])
    _, state = layer(x[row : row + 1], before)
    _, _, tape = layer.forward(x[row + 1 :], state)
    _, after, _ = layer.backward(tape, values["h_grad"][row + 1 :])
    grads = {"h_grad": step["h_grad"] + after.h, "cs_grad": getattr(after, "cs", None)}
    return step | {f"{name}_prev": value for name, value in before._asdict().items()} | grads


def for_v2(values: dict[str, Any]) -> dict[str, Any]:
    """Return the LSTM's weights with gates in BlockLSTMV2's order and the forget bias, which V2 lacks, in its bias."""
    old, new = OPS["BlockLSTM"].gates, OPS["BlockLSTMV2"].gates
    w, b = (reorder(values[name], old, new) for name in ("w", "b"))
    b[gate_slice(new, "f", len(b) // len(new))] += np.float32(values["forget_bias"])
    return {"w": w, "b": b}


def check(name: str, values: dict[str, Any], runtimes: Collection[str] = ()) -> OpCheck:
    """Run an op and compare it with its formula; then compare its graph on runtimes.

    A graph has the bounds of `onnx_export.verify`, or twice the kernel's where the weights amplify rounding.
    """
    results = getattr({"ops": ops, "raw_ops": raw_ops}[OPS[name].module], name)(**values)
    exact = FORMULAS[name](**values)
    moved = sensitivity(name, values, exact._asdict())
    bounds = {output: max(BOUND_EPS, CHAIN**0.5 / 2 * factor + ACTIVATION_EPS) for output, factor in moved.items()}
    rows = rows_of_outputs(OPS[name], np.dtype(np.float32), SIZES, KERNELS, results, exact, bounds)
    if runtimes:
        from onnx_export.verification import compare

        rows += compare(name, values, runtimes, {output: RUNTIMES_SHARE * bound for output, bound in bounds.items()})
    worst = {p: max((row for row in rows if row.provider == p), key=severity) for p in (KERNELS, *runtimes)}
    return OpCheck(name, worst)


def sensitivity(name: str, values: dict[str, Any], exact: Arrays) -> dict[str, float]:
    """Measure how much each output of the float64 formula changes, in eps, if every input is rounded to float32.

    With trained weights, which are large, and eight steps, that alone is several eps. A kernel also rounds inside its
    sums: a sum of n random terms is rounded n times, at partial sums that grow with the root of their length. Together
    this is root(n) / 2 times the effect of rounding the terms.
    """
    rng = np.random.default_rng(0)
    most = dict.fromkeys(exact, 0.0)
    for _ in range(4):
        rounded = {
            key: value * (1 + EPS / 2 * rng.uniform(-1, 1, value.shape)) if isinstance(value, np.ndarray) else value
            for key, value in values.items()
        }
        for output, moved in FORMULAS[name](**rounded)._asdict().items():
            most[output] = max(most[output], error_in_eps(moved, exact[output], EPS))
    return most


# ----------------------------------------------------------------------------------------------------------- the result
@dataclass(frozen=True)
class Result:
    """What the demo found."""

    seed: int
    trained_on: int
    held_out: int
    trainings: list[Training]
    checks: list[OpCheck]
    networks: tuple[Classifier, Classifier]
    digits: Digits
    """The held-out digits."""

    @property
    def ok(self) -> bool:
        return all(part.ok for part in self.trainings) and all(part.ok for part in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """Return all the figures, for JSON."""
        return {
            "seed": self.seed,
            "trained_on": self.trained_on,
            "held_out": self.held_out,
            "required_accuracy": REQUIRED_ACCURACY,
            "networks": [asdict(training) | {"ok": training.ok} for training in self.trainings],
            "sizes": SIZES,
            "ops": [check.as_dict() for check in self.checks],
            "ok": self.ok,
        }


def run(
    seed: int = 0,
    tell: Progress = lambda activity, done, total: None,
    runtimes: Collection[str] = (),
) -> Result:
    """Train both networks and check all ops, on these runtimes too, by the names that `onnx_export.verify` has."""
    digits, held_out = load()
    networks = new_networks(seed)
    checks: list[OpCheck] = []
    trainings = [train(network, digits, held_out, np.random.default_rng(seed), tell) for network in networks]
    with threadpool_limits(1, user_api="blas"):  # else numpy's idle threads, of the formulas, take a core from the ops
        for name, values in arguments(*networks, held_out.take(slice(CHECKED))).items():
            checks.append(check(name, values, runtimes))
            tell("checking the ops", len(checks), len(OPS))
    return Result(seed, len(digits.labels), len(held_out.labels), trainings, checks, networks, held_out)


# ---------------------------------------------------------------------------------------------------------- the picture
def draw(result: Result, path: Path) -> None:
    """Write the picture: how the training went, and a few held-out digits with the predictions row by row."""
    figure = Figure(figsize=(13, 10.5), layout="constrained")
    parts: Any = figure.subfigures(2, 1, height_ratios=(1, 2), hspace=0.03)
    top, bottom = parts
    draw_training(top, result)
    predictions = [network.predict(result.digits.x) for network in result.networks]
    right = sum(
        prediction[-1][np.arange(len(result.digits.labels)), result.digits.labels] for prediction in predictions
    )
    chosen = [int(np.argmax(result.digits.labels == digit)) for digit in (3, 5, 8)] + [int(np.argmin(right))]
    panels = bottom.subfigures(2, 2, hspace=0.04, wspace=0.04)
    for panel, index in zip(panels.flat, chosen, strict=True):
        title = f"Digit {result.digits.labels[index]}" + (", the least certain of all" if index == chosen[-1] else "")
        panel.suptitle(title, fontweight="bold")
        draw_digit(panel, result, predictions, index)
    figure.savefig(path, format="png", dpi=110)


def draw_training(figure: SubFigure, result: Result) -> None:
    loss, accuracy = figure.subplots(1, 2)
    for training in result.trainings:
        epochs = range(1, len(training.losses) + 1)
        loss.plot(epochs, training.losses, label=training.network)
        accuracy.plot(
            epochs,
            [100 * value for value in training.accuracies],
            label=f"{training.network}: {100 * training.accuracies[-1]:.1f} % at the end",
        )
    loss.set(title="Loss in training", xlabel="epoch", ylabel="cross-entropy", ylim=(0, None))
    accuracy.set(title="Accuracy on held-out digits", xlabel="epoch", ylabel="right, %")
    accuracy.axhline(100 * REQUIRED_ACCURACY, color="grey", linestyle="--", label=f"{REQUIRED_ACCURACY:.0%} required")
    for axes in (loss, accuracy):
        axes.grid(alpha=0.3)
        axes.legend()


def draw_digit(figure: SubFigure, result: Result, predictions: list[Array], index: int) -> None:
    """Draw the image beside what each network predicts after each of its rows."""
    label = int(result.digits.labels[index])
    image, *maps = figure.subplots(1, 3, sharey=True, width_ratios=(9, 10, 10))
    image.imshow(result.digits.x[:, index], cmap="gray_r", aspect="auto")  # as high as its neighbours, row beside row
    image.set(title="image", xticks=[], yticks=range(8), yticklabels=range(1, 9), ylabel="row")
    for axes, network, prediction in zip(maps, result.networks, predictions, strict=True):
        shown = axes.imshow(prediction[:, index], cmap="Blues", vmin=0, vmax=1, aspect="auto")
        axes.set(title=f"{network.name}'s prediction", xticks=range(10), xlabel="digit")
        axes.tick_params(left=False)
        axes.get_xticklabels()[label].set(color="tab:red", fontweight="bold")
    figure.colorbar(shown, ax=maps, label="probability")
