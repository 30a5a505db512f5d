"""Random models of Keras whose layers `blockcell.keras.replace` replaces, beside the same models as they were.

    KERAS_BACKEND=jax python tests/lib/keras_trials.py FOLDER 300     # prints a line for each model, and saves it
    KERAS_BACKEND=jax python tests/lib/keras_trials.py FOLDER 300 60  # from number 60 on
    KERAS_BACKEND=jax python tests/lib/keras_trials.py FOLDER load    # loads them without blockcell

Each model is compared: its outputs twice, in case a layer is stateful; the gradients of a call outside of training to
its inputs and weights; its loss in each of three steps of training by plain gradient descent, and its weights after
them; and the outputs of the saved file.  Where outputs or gradients differ by more than BOUND, a line has the errors of
blockcell and Keras against double precision, too.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np

SEED = int(os.environ.get("BLOCKCELL_SEED", 20))  # that of cases.py, which imports blockcell
BOUND = 20  # eps, of the difference to Keras; where it is more, both are compared with double precision
CELLS = "LSTM", "GRU", "SimpleRNN"
ACTIVATIONS = ["tanh"] * 4 + ["relu", "softsign", "elu", "linear"]


def draw_layer(rng: np.random.Generator, sequences: bool, is_stateful: bool) -> Any:
    """Return a recurrent layer with random options."""
    kind, units = str(rng.choice(CELLS)), int(rng.integers(1, 20))
    options: dict[str, Any] = {
        "return_sequences": sequences,
        "use_bias": bool(rng.random() < 0.8),
        "activation": str(rng.choice(ACTIVATIONS)),
        "dropout": float(rng.choice([0, 0, 0.4])),
        "go_backwards": bool(rng.random() < 0.2),
        "unroll": False,
        "stateful": is_stateful,
        "seed": int(rng.integers(1000)),
        "bias_initializer": "random_normal",
    }
    # Keras 3.15 unrolls masked sequences backwards with other outputs than it has without unrolling, or not at all
    if not options["go_backwards"] and keras.backend.backend() != "numpy":
        options["unroll"] = bool(rng.random() < 0.1)
    if kind != "SimpleRNN":
        options["recurrent_activation"] = str(rng.choice(["sigmoid", "sigmoid", "hard_sigmoid"]))
    if kind == "GRU":
        options["reset_after"] = bool(rng.random() < 0.6)
    layer = getattr(keras.layers, kind)(units, **options)
    if is_stateful or rng.random() > 0.3:
        return layer
    merge = [None, "concat", "sum", "ave", "mul"][rng.integers(1, 5)]
    layer = getattr(keras.layers, kind)(units, **options | {"go_backwards": False, "unroll": False})
    return keras.layers.Bidirectional(layer, merge_mode=merge)


def draw_model(rng: np.random.Generator) -> tuple[Any, list[Any], Any]:
    """Return a model, its inputs and what it is to learn."""
    B, T, I = (int(rng.integers(1, n)) for n in (5, 8, 7))  # noqa: E741
    is_stateful, has_mask = bool(rng.random() < 0.15), bool(rng.random() < 0.5)
    x = keras.Input(batch_shape=(B if is_stateful else None, T, I))
    arrays = [rng.standard_normal((B, T, I)).astype(keras.config.floatx())]
    inputs, y = [x], x
    if has_mask:
        counts = rng.random((B, T)) < 0.7
        if rng.random() < 0.5:
            counts = np.sort(counts, axis=1)[:, ::-1]
        arrays[0] *= counts[..., None]
        y = keras.layers.Masking()(y)
    if rng.random() < 0.5:
        y = keras.layers.Dense(int(rng.integers(1, 6)))(y)
    depth = int(rng.integers(1, 4))
    for k in range(depth):
        sequences = k < depth - 1 or rng.random() < 0.4
        layer = draw_layer(rng, sequences, is_stateful)
        is_cell = not isinstance(layer, keras.layers.Bidirectional)
        if is_cell and not is_stateful and rng.random() < 0.3:  # the state of another input
            s = keras.Input((3,))
            inputs.append(s)
            arrays.append(rng.standard_normal((B, 3)).astype(keras.config.floatx()))
            y = layer(y, initial_state=[keras.layers.Dense(layer.units)(s) for _ in layer.state_size])
        elif is_cell and rng.random() < 0.3:
            layer.return_state = True
            y, *states = layer(y)
            if not sequences:
                y = keras.layers.Concatenate()([y, *states])
        else:
            y = layer(y)
    y = keras.layers.Dense(2)(y)
    return keras.Model(inputs, y), arrays, rng.standard_normal((B, *y.shape[1:])).astype(keras.config.floatx())


def error_in_eps(result: Any, expected: Any) -> float:
    """Return the largest error, in eps of the largest expected entry."""
    result, expected = np.asarray(result), np.asarray(expected)
    if not expected.size:
        return 0.0
    return float(np.abs(result - expected).max() / (np.finfo(expected.dtype).eps * max(np.abs(expected).max(), 1e-3)))


def compare(number: int, folder: Path) -> dict[str, Any]:
    """Draw a model, compare it with its copy, and save the one whose layers were replaced."""
    import blockcell.keras

    rng = np.random.default_rng([SEED, number])
    keras.utils.set_random_seed(number)
    model, x, target = draw_model(rng)  # never called before it is copied: a call moves states and seeds
    replaced = keras.models.clone_model(model)
    replaced.set_weights(model.get_weights())
    for old, new in zip(model._flatten_layers(), replaced._flatten_layers(), strict=True):
        if hasattr(old, "seed_generator"):  # SimpleRNN's config has no seed
            new.seed_generator.state.assign(keras.ops.convert_to_numpy(old.seed_generator.state).copy())
            new.seed_generator._initial_seed = old.seed_generator._initial_seed
    report = blockcell.keras.replace(replaced, min_units=0)
    assert report.changed and not report.left, report
    initial, histories = model.get_weights(), []
    backend, is_stateful = keras.backend.backend(), any(getattr(layer, "stateful", False) for layer in model.layers)
    trains = backend != "numpy" and not (backend == "torch" and is_stateful)  # Keras' own cannot be trained there
    computed = [compute(each, x, trains) for each in (replaced, model)]
    errors = [*map(error_in_eps, *computed)]
    exact = compute_exactly(number, x, initial, trains) if max(errors) > BOUND else []
    for each in (replaced, model) if trains else ():
        keras.utils.set_random_seed(number)  # Keras on PyTorch draws by it where a layer has no seed
        each.compile(optimizer=keras.optimizers.SGD(0.1, clipvalue=1.0), loss="mse")
        options = {"epochs": 3, "batch_size": len(x[0]), "shuffle": False, "verbose": 0}
        histories.append(each.fit(x, target, **options).history["loss"])
    weights = [error_in_eps(a, b) for a, b in zip(replaced.get_weights(), model.get_weights(), strict=True)]
    replaced.save(folder / f"{number}.keras")
    for layer in replaced.layers:
        if getattr(layer, "stateful", False):
            layer.reset_state()
    y = replaced.predict(x, verbose=0, batch_size=len(x[0]))
    np.savez(folder / f"{number}.npz", y=y, **{f"x{k}": array for k, array in enumerate(x)})
    loss = max(np.abs(np.subtract(*histories)).max() / max(1, np.abs(histories).max()) if histories else 0, 0)
    row: dict[str, Any] = {"number": number, "loss": float(loss), "weights": max(weights)}
    row |= {"outputs": max(errors[:2]), "gradients": sum(errors[2:])}
    for name, results in zip(("blockcell", "Keras") if exact else (), computed, strict=False):
        row[name] = max(map(error_in_eps, results, exact))
    return row


def compute(model: Any, x: list[Any], differentiates: bool) -> list[Any]:
    """Return the outputs of two calls, and all gradients to the inputs and weights of a third one's mean square."""
    outputs = [model.predict(x, verbose=0, batch_size=len(x[0])) for _ in range(2)]
    weights = [variable.value for variable in model.trainable_variables]
    if not differentiates:
        return outputs
    if keras.backend.backend() == "torch":
        import torch

        inputs = [torch.tensor(array, requires_grad=True) for array in x]
        loss = model(inputs, training=False).square().mean()
        grads = torch.autograd.grad(loss, [*inputs, *weights], allow_unused=True)
    elif keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        inputs = [*map(tf.constant, x)]
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            loss = tf.reduce_mean(tf.square(model(inputs, training=False)))
        grads = tape.gradient(loss, [*inputs, *weights])
    else:
        import jax

        others = [variable.value for variable in model.non_trainable_variables]

        def mean_square(inputs: list[Any], weights: list[Any]) -> Any:
            y, _ = model.stateless_call(weights, others, inputs, training=False)
            return (y * y).mean()

        grads = jax.tree.leaves(jax.jit(jax.grad(mean_square, argnums=(0, 1)))(x, weights))
    grads = [0 if grad is None else keras.ops.convert_to_numpy(grad) for grad in grads]
    whole = [np.broadcast_to(grad, source.shape).ravel() for grad, source in zip(grads, [*x, *weights], strict=True)]
    return [*outputs, np.concatenate(whole)]


def compute_exactly(number: int, x: list[Any], weights: list[Any], differentiates: bool) -> list[Any]:
    """Return what `compute` does of a model of Keras, in double precision, rounded once."""
    floatx = keras.config.floatx()
    set_precision("float64")
    try:
        model, *_ = draw_model(np.random.default_rng([SEED, number]))
        model.set_weights(weights)
        x = [array.astype("float64") for array in x]
        return [array.astype(floatx) for array in compute(model, x, differentiates)]
    finally:
        set_precision(floatx)


def set_precision(floatx: str) -> None:
    """Set Keras' default precision; JAX has double precision only when asked."""
    keras.config.set_floatx(floatx)
    keras.config.set_dtype_policy(floatx)
    if keras.backend.backend() == "jax":
        import jax

        jax.config.update("jax_enable_x64", floatx == "float64")


def load(folder: Path) -> float:
    """Return the largest error of the saved models, in a process that has no blockcell."""
    errors = []
    for path in sorted(folder.glob("*.keras")):
        data = np.load(path.with_suffix(".npz"))
        model = keras.models.load_model(path)
        for layer in model.layers:
            if getattr(layer, "stateful", False):
                layer.reset_state()
        x = [data[f"x{k}"] for k in range(len(data.files) - 1)]
        errors.append(error_in_eps(model.predict(x, verbose=0, batch_size=len(x[0])), data["y"]))
    assert "blockcell" not in sys.modules
    return max(errors)


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
    if sys.argv[2] == "load":
        print(json.dumps({"loaded": load(folder)}))
    else:
        end, first = int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0
        for number in range(first, end):
            print(json.dumps(compare(number, folder)), flush=True)
