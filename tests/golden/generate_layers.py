"""Makes ``keras_models.npz`` and ``torch_onnx.npz`` beside this script: what models of Keras and PyTorch return for
seeded inputs.

    python tests/golden/generate_layers.py keras_models        # needs keras and a backend for it
    python tests/golden/generate_layers.py torch_onnx          # needs torch, and onnxscript

The arrays of a case are ``<case>/x``, ``<case>/y`` and ``<case>/model``: for Keras ``to_json()``, with
``weights.<name of a layer>.<k>``, for PyTorch what its two exporters write.
The files are those of Keras 3.15.1 (on PyTorch), PyTorch 2.14.1 and onnxscript 0.7.2.
"""

import os
import sys
from pathlib import Path

import numpy as np

T, B, I, H = 5, 2, 3, 4  # noqa: E741


def keras_models():
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    from keras import Input, Model, Sequential, layers

    every = {"return_sequences": True}

    def start():
        return Input((T, I))

    x, other = start(), Input((T, 2))
    words = Input((T,))
    first = layers.LSTM(H, name="first", **every)(x)
    second = layers.GRU(H, name="second", **every)(first)
    _, h, c = layers.LSTM(H, return_state=True, name="encoder")(x)
    decoded = layers.LSTM(H, name="decoder", **every)(other, initial_state=[h, c])
    inner = Model(x, layers.GRU(H, name="in", **every)(x), name="inner")
    again = layers.LSTM(I, name="again", **every)
    embedded = layers.Embedding(9, I, mask_zero=True, name="embedding")(words)
    embedded = layers.GRU(H, name="two", **every)(layers.LSTM(H, name="one", **every)(embedded))
    return {
        "sequential": Sequential(
            [
                start(),
                layers.LSTM(H, **every),
                layers.Dropout(0.5),
                layers.GRU(2),
                layers.Dense(2, activation="softmax"),
            ]
        ),
        "dense on both sides": Sequential(
            [
                start(),
                layers.Dense(H, activation="relu"),
                layers.Bidirectional(layers.LSTM(H)),
                layers.Dense(2),
                layers.Activation("tanh"),
            ]
        ),
        "two dense": Sequential([start(), layers.GRU(H), layers.Dense(3, activation="relu"), layers.Dense(2)]),
        "backwards": Sequential([start(), layers.GRU(H, go_backwards=True), layers.Dense(2, activation="sigmoid")]),
        "each step": Sequential([start(), layers.LSTM(H, **every), layers.TimeDistributed(layers.Dense(2))]),
        "sequential in it": Sequential([start(), Sequential([layers.LSTM(H, **every)]), layers.GRU(H, **every)]),
        "functional": Model(x, layers.Dense(2)(layers.LSTM(H)(layers.Dropout(0.1)(second)))),
        "functional in it": Model(x, layers.LSTM(H, name="out", **every)(inner(x))),
        "masking": Sequential([start(), layers.Masking(), layers.LSTM(H, **every), layers.GRU(H, **every)]),
        "gelu": Sequential([start(), layers.LSTM(H, **every), layers.Dense(2, activation="gelu")]),
        "embedding": Model(words, embedded),
        "called twice": Model(x, again(again(x))),
        "normalized between": Sequential(
            [start(), layers.LSTM(H, **every), layers.LayerNormalization(), layers.GRU(H, **every)]
        ),
        "encoder and decoder": Model([x, other], layers.Dense(2)(decoded)),
        "residual": Model(x, layers.Add()([first, second])),
        "two results": Model(x, [first, second]),
    }


def layers_of(model):
    """Those of models in it, too."""
    parts = (layers_of(layer) if hasattr(layer, "layers") else [layer] for layer in model.layers)
    return [layer for part in parts for layer in part]


def keras_model_cases(seed):
    """Of every model: itself, and its arrays."""
    from keras.ops import convert_to_numpy

    rng = np.random.default_rng(seed)
    cases = {}
    for case, model in keras_models().items():
        arrays = {"model": np.frombuffer(model.to_json().encode(), np.uint8)}
        for layer in layers_of(model):
            if layer.weights:
                weights = [rng.uniform(-1, 1, w.shape).astype(np.float32) for w in layer.get_weights()]
                layer.set_weights(weights)
                arrays |= {f"weights.{layer.name}.{k}": w for k, w in enumerate(weights)}
        if len(model.inputs) == len(model.outputs) == 1 and case != "embedding":
            arrays["x"] = rng.standard_normal((B, T, I)).astype(np.float32)
            arrays["y"] = convert_to_numpy(model(arrays["x"]))
        cases[case] = model, arrays
    return cases


def torch_models():
    import torch

    class Model(torch.nn.Module):
        def __init__(self, kind, head, **options):
            super().__init__()
            self.rnn = kind(I, H, **options)
            self.dense = torch.nn.Linear(H * (1 + self.rnn.bidirectional), 2)
            self.head = head

        def forward(self, x):
            y, state = self.rnn(x)
            h = state[0] if isinstance(state, tuple) else state
            if self.head == "each step":
                return torch.softmax(self.dense(y), -1)
            if self.head == "last step":
                return torch.relu(self.dense(y[:, -1] if self.rnn.batch_first else y[-1]))
            return self.dense(torch.cat([*h[-2:]], -1) if self.rnn.bidirectional else h[-1])

    lstm, gru = torch.nn.LSTM, torch.nn.GRU
    return {
        "lstm": Model(lstm, "each step"),
        "two lstm": Model(lstm, "last step", num_layers=2, batch_first=True),
        "two bidirectional gru": Model(gru, "each step", num_layers=2, bidirectional=True, batch_first=True),
        "bidirectional lstm": Model(lstm, "state", bidirectional=True, batch_first=True),
        "gru": Model(gru, "state"),
    }


def torch_onnx_cases(seed):
    """Of every model: itself, and its arrays."""
    import io
    import warnings

    import torch

    rng = np.random.default_rng(seed)
    cases = {}
    for name, model in torch_models().items():
        x = rng.standard_normal((B, T, I) if model.rnn.batch_first else (T, B, I)).astype(np.float32)
        with torch.no_grad():
            y = model.eval()(torch.from_numpy(x)).numpy()
        for dynamo in (False, True):
            file = io.BytesIO()
            axes = (
                {"dynamic_shapes": ({1 - model.rnn.batch_first: "b"},)} if dynamo else {"dynamic_axes": {"x": [0, 1]}}
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                exported = torch.onnx.export(
                    model, (torch.from_numpy(x),), None if dynamo else file, input_names=["x"], dynamo=dynamo, **axes
                )
            text = exported.model_proto.SerializeToString() if dynamo else file.getvalue()
            arrays = {"x": x, "y": y, "model": np.frombuffer(text, np.uint8)}
            cases[f"{name}{', dynamo' if dynamo else ''}"] = model, arrays
    return cases


def weights_of(arrays):
    """Without the prefix, in order."""
    return {name.removeprefix("weights."): array for name, array in arrays.items() if name.startswith("weights.")}


if __name__ == "__main__":
    makers = {"keras_models": keras_model_cases, "torch_onnx": torch_onnx_cases}
    for file in sys.argv[1:]:
        cases = makers[file](seed=0)
        arrays = {f"{case}/{name}": array for case, (_, found) in cases.items() for name, array in found.items()}
        np.savez_compressed(Path(__file__).parent / f"{file}.npz", **arrays)
