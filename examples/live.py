"""A model that was trained on whole sequences and has no inputs for states, run live: step by step, for many at once.

    python examples/live.py [model.h5]

Keras saves an LSTM without its state: predict() wants the whole sequence.  A layer's stream keeps the state, so the
same file computes step by step, and `Sessions` does so for users who come and go with packets of any length.  Whatever
the cut, results have the bits of the whole sequence.  Without a path, a file of random weights is written as Keras 2
writes it.  Needs blockcell and h5py, neither Keras nor TensorFlow.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np

from blockcell import Sessions, convert

INPUTS, STEPS, USERS, SEED = 8, 200, 12, 0


def write_model(path):
    """What model.save("model.h5") writes: two recurrent layers and a Dense at every step."""
    import h5py

    g = np.random.default_rng(SEED)
    layers = [
        ("LSTM", {"name": "lstm", "units": 32, "return_sequences": True}),
        ("GRU", {"name": "gru", "units": 16, "return_sequences": True, "reset_after": True}),
        ("Dense", {"name": "dense", "units": 3, "activation": "softmax"}),
    ]
    shapes = {
        "lstm": {"kernel": (INPUTS, 128), "recurrent_kernel": (32, 128), "bias": (128,)},
        "gru": {"kernel": (32, 48), "recurrent_kernel": (16, 48), "bias": (2, 48)},
        "dense": {"kernel": (16, 3), "bias": (3,)},
    }
    with h5py.File(path, "w") as file:
        config = {"layers": [{"class_name": kind, "config": options} for kind, options in layers]}
        file.attrs["model_config"] = json.dumps({"class_name": "Sequential", "config": config})
        file.attrs["keras_version"] = "2.15.0"
        weights = file.create_group("model_weights")
        weights.attrs["layer_names"] = list(shapes)
        for name, arrays in shapes.items():
            weights.create_group(name).attrs["weight_names"] = [f"{role}:0" for role in arrays]
            for role, shape in arrays.items():
                weights[f"{name}/{role}:0"] = g.uniform(-0.5, 0.5, shape).astype(np.float32)


def stream_by_steps(network, x):
    """y of a sequence [T,I], one step after the other, as a microphone or a sensor would give them."""
    stream = network.stream()
    return np.stack([stream.step(step[None])[0] for step in x])


def serve_packets(network, sequences, g):
    """y of each user's sequence: all send packets of random lengths, and come and go at random times."""
    sessions, results = Sessions(network), {}
    waiting, places = [*range(len(sequences))], {}
    while waiting or places:
        while waiting and g.random() < 0.5:
            user = waiting.pop()
            places[sessions.open()] = user, 0
        for id, (user, start) in [*places.items()]:
            if start == len(sequences[user]):
                sessions.close(id)
                del places[id]
            elif g.random() < 0.7:
                end = start + int(g.integers(1, 20))
                sessions.feed(id, sequences[user][start:end])
                places[id] = user, min(end, len(sequences[user]))
        for id, y in sessions.step().items():
            results.setdefault(places[id][0], []).append(y)
    return [np.concatenate(results[user]) for user in range(len(sequences))]


def main(path=None):
    with tempfile.TemporaryDirectory() as folder:
        if path is None:
            path = Path(folder) / "model.h5"
            write_model(path)
        network = convert.from_keras(path, check=False)  # a file is never run
    g = np.random.default_rng(SEED)
    sequences = [
        g.standard_normal((int(n), network.input_size)).astype(np.float32) for n in g.integers(1, STEPS, USERS)
    ]
    whole = [network(x[:, None])[0][:, 0] for x in sequences]  # [T,O] of each
    steps = [stream_by_steps(network, x) for x in sequences]
    packets = serve_packets(network, sequences, g)
    for name, results in (("a stream, step by step", steps), ("Sessions, packet by packet", packets)):
        same = sum(np.array_equal(y, expected) for y, expected in zip(results, whole, strict=True))
        print(f"{name}: {same} of {USERS} sequences have the bits of the whole sequence")
        if same < USERS:
            sys.exit("not all are the same")


if __name__ == "__main__":
    main(*sys.argv[1:2])
