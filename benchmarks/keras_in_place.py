"""Compare a Keras model with itself after blockcell.keras.replace: predict and a training step.

Needed by: docs/keras-in-place.md

    python benchmarks/keras_in_place.py                                  # every size by every backend, 20 minutes
    python benchmarks/keras_in_place.py --backends jax --layers GRU --widths 128 --bound

A model is a layer with I = H that returns its last output, and a Dense.  A call is predict_on_batch, or train_on_batch
with Adam, as Keras compiles them: by XLA in JAX.  Each candidate is a process of its own, and all are asked in turn
(turns.py), with all CPUs.  Prints the milliseconds of both, medians of the rounds, and their ratio; then for each
backend, task and layer the lowest ratio, the median and the highest.

--bound measures a third candidate, "rest": the model with a layer that has the weights and computes next to nothing.
That is what Keras takes for a call beside the layer, so Keras' time divided by it is the highest ratio there could be.
"""

from __future__ import annotations

import itertools
import os
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

from machine import CPUS
from turns import Worker, answer_seconds, ask_all, make_parser, open_workers, run_program, select_rounds, watch

BACKENDS, LAYERS, TASKS = ("torch", "tensorflow", "jax"), ("LSTM", "GRU"), ("predict", "train")
CANDIDATES = "Keras", "blockcell", "rest"


def prepare(candidate: str, layer: str, task: str, T: int, B: int, H: int) -> Callable[[], object]:
    """Return a call of a model."""
    import keras
    import numpy as np

    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((T, H)), getattr(keras.layers, layer)(H), keras.layers.Dense(1)])
    if candidate == "blockcell":
        import blockcell.keras

        blockcell.keras.replace(model)
    if candidate == "rest":

        def skip_steps(sequences: Any, initial_state: Any, mask: Any = None, training: Any = False) -> Any:
            weights = [keras.ops.reshape(weight, (-1,))[:H] for weight in model.layers[0].weights]
            y = sequences[:, -1] * sum(weights)
            return y, y[:, None], initial_state

        vars(model.layers[0])["inner_loop"] = skip_steps
    model.compile(optimizer="adam", loss="mse")
    rng = np.random.default_rng(0)
    x, target = rng.standard_normal((B, T, H), np.float32), np.zeros((B, 1), np.float32)
    if task == "predict":
        return lambda: model.predict_on_batch(x)
    return lambda: model.train_on_batch(x, target)


def main() -> None:
    parser = make_parser(__doc__, rounds=3, seconds=0.2)
    parser.add_argument("--backends", nargs="+", default=BACKENDS, choices=BACKENDS)
    parser.add_argument("--layers", nargs="+", default=LAYERS, choices=LAYERS)
    for name, values in {"widths": [32, 128, 256], "batches": [1, 32], "steps": [20, 200]}.items():
        parser.add_argument(f"--{name}", nargs="+", type=int, default=values)
    parser.add_argument("--bound", action="store_true", help="measure what Keras takes beside the layer, too")
    arguments = parser.parse_args()
    candidates = CANDIDATES if arguments.bound else CANDIDATES[:2]
    for backend in arguments.backends:
        environment = {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
        own = {name: Worker(os.path.abspath(__file__), "--work", name, **environment) for name in candidates}
        with open_workers(own) as workers:
            guard = watch(workers.values())
            for task, layer in itertools.product(TASKS, arguments.layers):
                ratios = []
                for T, B, H in itertools.product(arguments.steps, arguments.batches, arguments.widths):
                    ask = partial(ask_all, workers, layer, task, T, B, H, arguments.seconds)
                    rounds = select_rounds(guard.rounds(CPUS, ask, arguments.rounds))
                    before, after, *rest = (statistics.median(times[name] for times in rounds) for name in candidates)
                    ratios.append(statistics.median(times["Keras"] / times["blockcell"] for times in rounds))
                    print(f"{backend:10} {task:8} {layer:5} T={T:<4} B={B:<3} H={H:<4}", end=" ")
                    bounds = [f" of {before / rest[0]:.2f}x, the rest {rest[0] * 1e3:.2f} ms"] if rest else []
                    print(f"{before * 1e3:9.2f} ms {after * 1e3:9.2f} ms {ratios[-1]:6.2f}x", *bounds, flush=True)
                low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
                print(f"{backend} {task} {layer}: {low:.2f}x to {high:.2f}x, median {middle:.2f}x", flush=True)


def work(candidate: str) -> None:
    answer_seconds(lambda *task: prepare(candidate, *task))


if __name__ == "__main__":
    run_program(main, work)
