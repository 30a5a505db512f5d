"""Makes ``keras.npz`` and ``torch.npz`` beside this script: what layers of Keras and PyTorch return for seeded inputs.

    python tests/golden/generate_layers.py keras        # needs keras and a backend for it
    python tests/golden/generate_layers.py torch        # needs torch

The arrays of a case are ``<case>/x``, its results and its weights: for Keras ``y`` and ``weights.<k>``, those of
``get_weights()`` in order; for PyTorch ``y``, ``h``, of an LSTM ``c``, and ``weights.<name in the state_dict>``.
The files are those of Keras 3.15.1 (on PyTorch) and PyTorch 2.14.1.
"""

import os
import sys
from pathlib import Path

import numpy as np

T, B, I, H = 5, 2, 3, 4  # noqa: E741


def keras_layers():
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    from keras.layers import GRU, LSTM, Bidirectional

    every = {"return_sequences": True}
    return {
        "lstm": LSTM(H, **every),
        "lstm without bias": LSTM(H, use_bias=False, **every),
        "gru": GRU(H, reset_after=False, **every),
        "gru without bias": GRU(H, reset_after=False, use_bias=False, **every),
        "bidirectional lstm": Bidirectional(LSTM(H, **every)),
        "bidirectional gru": Bidirectional(GRU(H, reset_after=False, **every)),
        "gru reset after": GRU(H, **every),
        "gru reset after without bias": GRU(H, use_bias=False, **every),
        "bidirectional gru reset after": Bidirectional(GRU(H, **every)),
    }


def keras_cases(seed):
    """Of every layer: itself, and its arrays."""
    from keras.ops import convert_to_numpy

    rng = np.random.default_rng(seed)
    cases = {}
    for name, layer in keras_layers().items():
        x = rng.standard_normal((B, T, I)).astype(np.float32)
        layer.build(x.shape)
        weights = [rng.uniform(-1, 1, w.shape).astype(np.float32) for w in layer.get_weights()]
        layer.set_weights(weights)
        y = convert_to_numpy(layer(x))
        cases[name] = layer, {"x": x, "y": y, **{f"weights.{k}": w for k, w in enumerate(weights)}}
    return cases


def torch_cases(seed):
    """Of every layer: itself, and its arrays."""
    import torch

    rng = np.random.default_rng(seed)
    cases = {}
    forms = {
        "": {},
        " without bias": {"bias": False},
        "two layers": {"num_layers": 2},
        "bidirectional": {"bidirectional": True},
        "two bidirectional layers": {"num_layers": 2, "bidirectional": True},
    }
    for kind, form in [(kind, form) for kind in ("lstm", "gru") for form in forms]:
        name = f"{kind}{form}" if form[:1] in ("", " ") else f"{form} gru" if kind == "gru" else form
        layer = getattr(torch.nn, kind.upper())(I, H, dtype=torch.float64, **forms[form])
        weights = {key: rng.uniform(-1, 1, value.shape) for key, value in layer.state_dict().items()}
        layer.load_state_dict({key: torch.from_numpy(value) for key, value in weights.items()})
        x = rng.standard_normal((T, B, I))
        with torch.no_grad():
            y, state = layer(torch.from_numpy(x))
        states = zip("hc", state if kind == "lstm" else [state], strict=False)
        arrays = {"x": x, "y": y.numpy()} | {key: value.numpy() for key, value in states}
        cases[name] = layer, arrays | {f"weights.{key}": value for key, value in weights.items()}
    return cases


def weights_of(arrays):
    """Without the prefix, in order."""
    return {name.removeprefix("weights."): array for name, array in arrays.items() if name.startswith("weights.")}


if __name__ == "__main__":
    package = sys.argv[1]
    cases = {"keras": keras_cases, "torch": torch_cases}[package](seed=0)
    arrays = {f"{case}/{name}": array for case, (_, found) in cases.items() for name, array in found.items()}
    np.savez_compressed(Path(__file__).parent / f"{package}.npz", **arrays)
