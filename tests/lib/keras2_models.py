"""Random models of Keras, and those of Keras 2 as it saves them, read by blockcell.tensorflow.

It needs tensorflow-cpu with tf_keras, or a TensorFlow up to 2.15, whose tf.keras is Keras 2.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from blockcell.tensorflow import open as open_model

B, T = 3, 5
BOUND = 2e-5
FORMS = ("saved_model", "frozen")
ACTIVATIONS = ["sigmoid", "relu", "elu", "selu", "softplus", "softsign", "exponential", "hard_sigmoid", "linear"]
GATES = ["hard_sigmoid", "hard_sigmoid", "softsign", "tanh", "relu", "linear"]
MERGE_MODES = "concat", "concat", "sum", "mul", "ave"
WITHOUT_LAYER = ["swish", "gelu", "softmax"]  # activations that layers do not have


class Run(NamedTuple):
    """A cell as Keras runs it, by itself."""

    kernel: np.ndarray
    backwards: bool
    x: np.ndarray
    h: np.ndarray
    """After all steps, in the order of x."""
    states: list[np.ndarray]
    """The last ones: h, and cs of an LSTM."""
    mask: np.ndarray | None
    layer: int
    """The number of the layer that it is in."""
    merge_mode: str | None


@dataclass
class Drawn:
    """A random model: its layers, one behind the other, and what they were drawn with."""

    model: Any
    layers: list[Any]
    first: int
    """The size of x."""
    embedding: bool
    masked: bool
    refused: bool
    """Whether it has something that no layer has."""
    joined: bool
    """Whether nothing but recurrent layers, dropout and masks is before the last cell."""
    turned: bool
    """Whether a layer before the last one goes backwards."""
    stateful: bool


def import_keras() -> Any:
    """Keras 2: tf_keras, or what an old TensorFlow has."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    try:
        import tf_keras
    except ImportError:
        from tensorflow import keras

        return keras
    return tf_keras


def draw_model(keras: Any, g: np.random.Generator, merge_modes: Sequence[str] = MERGE_MODES) -> Drawn:
    """Draw a model of one to three recurrent layers."""
    layers = keras.layers
    steps, batch = (T if g.integers(2) else None), (B if g.integers(3) == 0 else None)
    first, embedding = int(g.integers(1, 9)), not g.integers(8)
    masked = not g.integers(4)
    stack: list[Any] = []
    if embedding:
        stack.append(layers.Embedding(11, first, mask_zero=masked))
    elif masked:
        stack.append(layers.Masking(0.0))
    refused, joined, turned = False, True, False
    count = int(g.choice([1, 1, 2, 3]))
    for k in range(count):
        last = k == count - 1
        if k:
            between = str(g.choice(["", "", "", "dropout", "dense", "time distributed", "normalization"]))
            joined = joined and between in ("", "dropout")
            size = int(g.integers(1, 9))
            stack += {
                "": [],
                "dropout": [layers.Dropout(0.3)],
                "dense": [layers.Dense(size, activation="relu")],
                "time distributed": [layers.TimeDistributed(layers.Dense(size))],
                "normalization": [layers.LayerNormalization()],
            }[between]
        turned = turned or any(getattr(layer, "go_backwards", False) for layer in stack)
        layer, other = draw_layer(keras, g, steps, batch, last, masked, merge_modes)
        refused = refused or other
        stack.append(layer)
    head = not g.integers(2) and not isinstance(stack[-1], layers.Bidirectional)
    if head:
        stack.append(layers.Dense(2, activation="softmax"))
    shape = (steps,) if embedding else (steps, first)
    given = y = keras.Input(shape, batch_size=batch)
    for layer in stack:
        if isinstance(y, (list, tuple)):
            y = y[0]
        y = layer(y)
    model = keras.Model(given, y)
    weights = [g.uniform(-1, 1, np.shape(w)) / max(1, np.shape(w)[0]) ** 0.5 for w in model.get_weights()]
    model.set_weights([w.astype(np.float32) for w in weights])
    stateful = any(getattr(layer, "stateful", False) for layer in stack)
    return Drawn(model, stack, first, embedding, masked, refused, joined, turned, stateful)


def draw_layer(
    keras: Any,
    g: np.random.Generator,
    steps: int | None,
    batch: int | None,
    last: bool,
    masked: bool,
    merge_modes: Sequence[str],
) -> tuple[Any, bool]:
    """Draw a recurrent layer, and whether it has something that no layer has."""
    layers, size = keras.layers, int(g.integers(1, 9))
    both = not g.integers(3)
    kind = str(g.choice(["LSTM", "LSTM", "GRU", "GRU", "SimpleRNN"]))
    options: dict[str, Any] = {}
    special = g.integers(30) == 0
    if g.integers(3) == 0:
        options["activation"] = str(g.choice(ACTIVATIONS))
    if options.get("activation") == "exponential" and kind != "GRU":  # it overflows
        options["activation"] = "relu"
    if special:
        options["activation"] = str(g.choice(WITHOUT_LAYER))
    if kind != "SimpleRNN":
        if g.integers(2) and keras.__version__.startswith("2."):
            options["implementation"] = int(g.integers(1, 3))
        if g.integers(3) == 0 and options.get("activation") != "exponential":
            options["recurrent_activation"] = str(g.choice(GATES))
    if kind == "GRU" and g.integers(2):
        options["reset_after"] = False
    if g.integers(4) == 0:
        options["use_bias"] = False
    if g.integers(3) == 0:
        options["dropout"] = 0.25
    if g.integers(3) == 0:
        options["recurrent_dropout"] = 0.25
    if kind == "LSTM" and g.integers(4) == 0:
        options["unit_forget_bias"] = False
    sequences = not last or bool(g.integers(2))
    more: dict[str, Any] = {"return_sequences": sequences}
    if last and not both and g.integers(4) == 0:
        more["return_state"] = True
    if not both and (last or not masked) and g.integers(6) == 0:  # Keras does not turn the mask for the next layer
        more["go_backwards"] = True
    if batch is not None and not both and g.integers(6) == 0:
        more["stateful"] = True
    if steps is not None and g.integers(4) == 0:
        more["unroll"] = True
    if masked and sequences and g.integers(4) == 0:
        more["zero_output_for_mask"] = True
    if g.integers(5) == 0:
        made = [getattr(layers, f"{kind}Cell")(size, **options)]
        if g.integers(2) == 0:
            other = str(g.choice(["LSTM", "GRU", "SimpleRNN"]))
            made.append(getattr(layers, f"{other}Cell")(size + 1))
        layer = layers.RNN(made if len(made) > 1 else made[0], **more)
    else:
        layer = getattr(layers, kind)(size, **options, **more)
    if both:
        modes = [*merge_modes, *[None] * last]
        layer = layers.Bidirectional(layer, merge_mode=modes[g.integers(len(modes))])
    return layer, options.get("activation") in WITHOUT_LAYER


def parts_of(layer: Any) -> list[Any]:
    """The recurrent layers that a layer is: both directions of a Bidirectional, itself, or none."""
    if isinstance(getattr(layer, "backward_layer", None), type(None)):
        return [layer] if hasattr(layer, "cell") else []
    return [layer.forward_layer, layer.backward_layer]


def cells_of(part: Any) -> list[Any]:
    """The cells of a recurrent layer, one upon the other."""
    return list(getattr(part.cell, "cells", [part.cell]))


def draw_input(g: np.random.Generator, drawn: Drawn) -> np.ndarray:
    """Draw x; where there is a mask, some steps of it are padding, at the end of all rows but the first."""
    lengths = np.r_[T, g.integers(1, T + 1, B - 1)]
    padding = np.arange(T) >= lengths[:, None]
    if drawn.embedding:
        return np.where(padding, 0, g.integers(1, 11, (B, T))).astype(np.float32)
    x = g.standard_normal((B, T, drawn.first)).astype(np.float32)
    return np.where(padding[..., None], 0, x).astype(np.float32) if drawn.masked else x


def run_cells(keras: Any, drawn: Drawn, x: np.ndarray) -> list[Run]:
    """Run a model layer by layer, and each cell in it by itself."""
    runs: list[Run] = []
    y, mask = x, None
    for number, layer in enumerate(drawn.layers):
        y = y[0] if isinstance(y, (list, tuple)) else y
        parts = parts_of(layer)
        known = None if mask is None else np.asarray(mask)
        for part in parts:
            order = slice(None, None, -1 if part.go_backwards else 1)
            part_x = np.asarray(y)[:, order]
            part_mask = None if known is None else known[:, order]
            for cell in cells_of(part):
                twin = keras.layers.RNN(cell, return_sequences=True, return_state=True)
                h, *states = map(np.asarray, twin(part_x, mask=part_mask))
                mode = getattr(layer, "merge_mode", "concat")
                kernel, backwards = np.asarray(cell.kernel), bool(part.go_backwards)
                runs.append(Run(kernel, backwards, part_x[:, order], h[:, order], states, known, number, mode))
                part_x = h
        new_mask = layer.compute_mask(y, mask)
        y = layer(y, mask=mask) if parts else layer(y)
        mask = new_mask[0] if isinstance(new_mask, (list, tuple)) else new_mask
    return runs


def save(drawn: Drawn, form: str, folder: Path, g: np.random.Generator) -> Path:
    """Save a model as a SavedModel, or as a frozen graph, in one of the ways that Keras 2 and TensorFlow have."""
    import tensorflow as tf
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

    model, path = drawn.model, folder / "saved"
    if form == "saved_model":
        match str(g.choice(["model.save", "trained", "saved_model.save", "export"])):
            case "export" if hasattr(model, "export"):  # TensorFlow 2.13 has it first
                model.export(str(path))
            case "saved_model.save":
                tf.saved_model.save(model, str(path))
            case way:
                if way == "trained":
                    model.compile("adam", "mse")
                model.save(str(path), save_format="tf")
        return path
    if g.integers(3) == 0 and path.exists():
        loaded = tf.saved_model.load(str(path))  # whose variables live as long as this
        function = loaded.signatures["serving_default"]
    else:
        options = {"training": False} if g.integers(2) else {}
        spec = tf.TensorSpec(model.inputs[0].shape, "float32")
        function = tf.function(lambda x: model(x, **options), input_signature=[spec]).get_concrete_function()
    constants = convert_variables_to_constants_v2(function, lower_control_flow=bool(g.integers(2)))
    path = folder / "frozen.pb"
    path.write_bytes(constants.graph.as_graph_def().SerializeToString())
    return path


def judge(drawn: Drawn, runs: list[Run], path: Path) -> tuple[str, str]:
    """Compare what blockcell reads with Keras: ("right" | "refused" | "wrong", why)."""
    cells = open_model(path).cells
    for cell in cells.values():
        if cell.refused is not None:
            return "refused", cell.refused
    weights = {name: np.concatenate([w.ravel() for w in cell.layer().weights.values()]) for name, cell in cells.items()}
    names = []
    for run in runs:
        fits = [name for name, array in weights.items() if np.isin(run.kernel, array).all()]
        if len(fits) != 1:
            return "refused", f"{len(fits)} cells where Keras has one"
        names += fits
        cell = cells[fits[0]]
        if cell.reverse is None:
            return "refused", "the file does not tell in which direction"
        if cell.reverse != run.backwards and not drawn.turned:
            return "wrong", f"{cell.name} is reversed: {cell.reverse}"
        mask = {} if run.mask is None else {"mask": run.mask, "masked": "repeat"}
        y, last = cell.layer(reverse=run.backwards)(run.x, batch_first=True, **mask)
        ends = [last.h, *([last.cs] if len(run.states) == 2 else [])]
        off = max(distance(*pair) for pair in zip([y, *ends], [run.h, *run.states], strict=True))
        if not off <= BOUND:
            return "wrong", f"{cell.name} is off by {off:.1e}"
    if {*names} != cells.keys():
        return "refused", f"{len(cells)} cells where Keras has {len(runs)}"
    return judge_whole(drawn, runs, cells)


def judge_whole(drawn: Drawn, runs: list[Run], cells: Any) -> tuple[str, str]:
    """Compare the layer of all cells with Keras, where the recurrent layers follow each other."""
    last = [run for run in runs if run.layer == runs[-1].layer]
    merged = {run.merge_mode for run in runs} - {"concat", None}
    if not merged and (not drawn.joined or drawn.turned):
        return "right", "cell by cell"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a remark does not make the layer right
            layer = cells.layer()
    except ValueError as error:
        return ("right", "cell by cell") if merged else ("refused", str(error))
    if merged:
        return "wrong", f"all cells are one layer, in spite of the merge modes {merged}"
    mask = runs[0].mask
    y, _ = layer(runs[0].x, batch_first=True, **({} if mask is None else {"mask": mask, "masked": "repeat"}))
    ends = [run for k, run in enumerate(last) if k + 1 == len(last) or last[k + 1].backwards != run.backwards]
    exact = np.concatenate([run.h for run in ends], -1)
    seen = slice(None) if mask is None else mask
    off = distance(y[seen], exact[seen])
    return ("right", "as one layer") if off <= BOUND else ("wrong", f"all cells are off by {off:.1e}")


def distance(y: np.ndarray, exact: np.ndarray) -> float:
    """The largest difference, relative to the largest entry if that is above one."""
    return float(np.abs(y - exact).max() / max(1.0, np.abs(exact).max()))


def run_case(keras: Any, seed: int, case: int, folder: Path) -> tuple[Drawn, dict[str, tuple[str, str]]]:
    """Draw a model, save it in both forms, and judge what blockcell reads."""
    g = np.random.default_rng([seed, case, 20])
    keras.backend.clear_session()
    drawn = draw_model(keras, g)
    x = draw_input(g, drawn)
    runs = run_cells(keras, drawn, x)
    verdicts = {}
    for form in FORMS[: 1 if drawn.stateful else 2]:  # TensorFlow cannot freeze a state that is assigned
        path = save(drawn, form, folder, g)
        verdicts[form] = judge(drawn, runs, path)
    return drawn, verdicts
