"""Speech in real time: silero-vad's network, with its LSTM and decoder in blockcell, for one speaker and for a hundred.

The network says of each chunk of 32 ms how probably somebody speaks.  It reads 512 samples and the last 64 of the chunk
before, and its LSTM keeps a state; who loses either of them gets worse answers, and no error.  Here `Detector` keeps
both for every speaker.  onnxruntime computes the encoder for all speakers whose chunk is there, and
`blockcell.Sessions` the LSTM, each speaker by its own state.

The probabilities are compared with those of the package's own model, one call for each chunk and speaker, and both are
timed on one thread.

    apt install espeak-ng; pip install ".[examples,onnx]" silero-vad
    python examples/vad.py [--wav speech.wav] [--speakers 1 100] [--picture vad.png]
"""

import argparse
import importlib.util
import subprocess
import time
import warnings
import wave
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from matplotlib.figure import Figure
from onnx import helper, numpy_helper

import blockcell
from blockcell import Dense, Sessions, convert

RATE, CHUNK, CONTEXT, HIDDEN = 16000, 512, 64, 128
FEATURES = "/model/encoder/3/activation/Relu_output_0"  # what the encoder gives to the LSTM, (B, 128, 1)
LOUD = 0.5  # the probability from which it is speech
TEXTS = "Good morning, this is a test.", "The second sentence comes after a pause.", "That was all, thank you."


def model_path():
    """Return the path of the package's model for 16 kHz, without importing the package, which imports PyTorch."""
    spec = importlib.util.find_spec("silero_vad")
    if spec is None:
        raise SystemExit("vad.py needs silero-vad: pip install silero-vad")
    return Path(spec.origin).with_name("data") / "silero_vad_16k_op15.onnx"


def new_session(model):
    """Return onnxruntime's session of a model, on one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def encoder_of(model):
    """Return the model of the nodes up to the LSTM's input."""
    graph = model.graph
    count = 1 + next(k for k, node in enumerate(graph.node) if FEATURES in node.output)
    features = helper.make_tensor_value_info(FEATURES, onnx.TensorProto.FLOAT, None)
    nodes, x = graph.node[:count], graph.input[0]
    names = {name for node in nodes for name in node.input}
    weights = [tensor for tensor in graph.initializer if tensor.name in names]
    encoder = helper.make_graph(nodes, "encoder", [x], [features], weights)
    return helper.make_model(encoder, opset_imports=model.opset_import, ir_version=model.ir_version)


class Detector:
    """The network for many speakers at once, who come and go.

    Parameters
    ----------
    model : onnx.ModelProto
        silero-vad's, for 16 kHz.
    capacity : int
        How many speakers there is memory for at first.
    """

    def __init__(self, model, capacity=64):
        self._encoder = new_session(encoder_of(model))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the encoder and the decoder, which are not in the layer
            self._sessions = Sessions(convert.from_onnx(model), capacity=capacity)
        arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
        w, b = (arrays[f"model.decoder.decoder.2.{name}"] for name in ("weight", "bias"))
        self._decoder = Dense(np.ascontiguousarray(w.reshape(1, HIDDEN).T), b, activation="sigmoid")
        self._contexts = {}

    def open(self):
        """Begin a speaker; return their id."""
        speaker = self._sessions.open()
        self._contexts[speaker] = np.zeros(CONTEXT, np.float32)
        return speaker

    def close(self, speaker):
        """End a speaker."""
        self._sessions.close(speaker)
        del self._contexts[speaker]

    def step(self, chunks):
        """Return the probability of speech for each speaker who has a chunk [512] of samples from -1 to 1."""
        x = np.empty((len(chunks), CONTEXT + CHUNK), np.float32)
        for row, (speaker, chunk) in zip(x, chunks.items(), strict=True):
            row[:CONTEXT], row[CONTEXT:] = self._contexts[speaker], chunk
            self._contexts[speaker] = row[-CONTEXT:].copy()
        [features] = self._encoder.run([FEATURES], {"input": x})
        for speaker, feature in zip(chunks, features[:, :, 0], strict=True):
            self._sessions.feed(speaker, feature)
        results = self._sessions.step()
        h = np.stack([results[speaker] for speaker in chunks])
        probabilities, _ = self._decoder(np.maximum(h, 0)[None])
        return dict(zip(chunks, probabilities[0, :, 0], strict=True))


class PackageDetector:
    """One speaker by the package's own model, as its OnnxWrapper calls it: a call for each chunk."""

    def __init__(self, session):
        self._session = session
        self._state, self._context = np.zeros((2, 1, HIDDEN), np.float32), np.zeros((1, CONTEXT), np.float32)

    def step(self, chunk):
        x = np.concatenate([self._context, chunk[None]], axis=1)
        output, self._state = self._session.run(None, {"input": x, "state": self._state, "sr": np.array(RATE)})
        self._context = x[:, -CONTEXT:]
        return output[0, 0]


# ---------------------------------------------------------------------------------------------------------------- sound
def read_wav(path):
    """Return the samples of a wave file, from -1 to 1."""
    with wave.open(str(path)) as file:
        if (file.getframerate(), file.getsampwidth()) != (RATE, 2):
            raise SystemExit(
                f"{path} has {file.getframerate()} samples a second of {8 * file.getsampwidth()} bits; "
                f"expected {RATE} of 16 bits: sox {path} -r {RATE} -b 16 speech.wav"
            )
        samples = np.frombuffer(file.readframes(file.getnframes()), np.int16).reshape(-1, file.getnchannels())
    return samples.mean(axis=1).astype(np.float32) / 32768


def speak(seed=0):
    """Return sentences of espeak-ng with pauses between them, and noise over all of it."""
    rng, parts = np.random.default_rng(seed), []
    for text in TEXTS:
        command = ["espeak-ng", "-v", "en-us", "--stdout", text]
        data = subprocess.run(command, check=True, capture_output=True).stdout
        samples = np.frombuffer(data, np.int16, offset=44).astype(np.float32) / 32768  # behind the header
        positions = np.arange(0, len(samples) - 1, 22050 / RATE)  # of espeak-ng's 22,050 a second
        parts += [np.zeros(RATE), np.interp(positions, np.arange(len(samples)), samples)]
    sound = np.concatenate([*parts, np.zeros(RATE)])
    return (sound + 0.002 * rng.standard_normal(len(sound))).astype(np.float32)


def find_segments(probabilities):
    """Return (start, end) in seconds of where chunks follow each other that are probably speech."""
    is_speech = np.concatenate([[False], probabilities >= LOUD, [False]])
    changes = np.flatnonzero(is_speech[1:] != is_speech[:-1])
    return changes.reshape(-1, 2) * CHUNK / RATE


def plot(path, sound, probabilities, segments):
    """Draw the wave, the probability, and the segments."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    upper, lower = figure.subplots(2, sharex=True)
    upper.plot(np.arange(len(sound)) / RATE, sound, linewidth=0.3, color="0.3")
    lower.step(np.arange(len(probabilities)) * CHUNK / RATE, probabilities, where="post")
    for axes, label in ((upper, "sound"), (lower, "probability of speech")):
        axes.set_ylabel(label)
        for start, end in segments:
            axes.axvspan(start, end, color="tab:green", alpha=0.15)
    lower.axhline(LOUD, color="0.6", linewidth=0.8)
    lower.set_xlabel("seconds")
    figure.savefig(path, dpi=110)


# ------------------------------------------------------------------------------------------------------------------ all
def detect(detector, chunks, speakers):
    """Return the probabilities [chunk, speaker], and microseconds for a chunk of one speaker.

    Speaker k hears the sound from chunk k on, so that all hear something else.
    """
    ids = [detector.open() for _ in range(speakers)]
    results, start = [], time.perf_counter()
    for t in range(len(chunks)):
        heard = {speaker: chunks[(t + k) % len(chunks)] for k, speaker in enumerate(ids)}
        results.append([*detector.step(heard).values()])
    taken = time.perf_counter() - start
    for speaker in ids:
        detector.close(speaker)
    return np.array(results), taken / len(results) / speakers * 1e6


def detect_by_package(session, chunks, speakers):
    """Return the same by the package's own model."""
    detectors = [PackageDetector(session) for _ in range(speakers)]
    results, start = [], time.perf_counter()
    for t in range(len(chunks)):
        results.append([own.step(chunks[(t + k) % len(chunks)]) for k, own in enumerate(detectors)])
    return np.array(results), (time.perf_counter() - start) / len(results) / speakers * 1e6


def main(sound, speakers, path=None, report=print):
    """Compare and time both; return the largest difference of a probability."""
    blockcell.set_num_threads(1)
    model = onnx.load(model_path())
    chunks = sound[: len(sound) // CHUNK * CHUNK].reshape(-1, CHUNK)
    detector, session = Detector(model, max(speakers)), new_session(model)
    errors = []
    report(f"{len(sound) / RATE:.1f} s of sound, {len(chunks)} chunks of 32 ms; microseconds for a chunk of a speaker")
    report("speakers   blockcell   silero-vad   ratio   largest difference")
    for count in speakers:
        ours, own_time = detect(detector, chunks, count)
        theirs, package_time = detect_by_package(session, chunks, count)
        errors.append(np.abs(ours - theirs).max())
        report(f"{count:8} {own_time:11.1f} {package_time:12.1f} {package_time / own_time:6.1f}x {errors[-1]:20.1e}")
    probabilities, _ = detect(detector, chunks, 1)
    segments = find_segments(probabilities[:, 0])
    report("speech at " + ", ".join(f"{start:.1f} to {end:.1f} s" for start, end in segments))
    if path is not None:
        plot(path, sound, probabilities[:, 0], segments)
        report(f"{path} shows it")
    return max(errors)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", type=Path, help="where to draw sound, probability and segments")
    parser.add_argument("--wav", type=Path, help="a file of 16,000 samples a second; otherwise espeak-ng speaks")
    parser.add_argument("--speakers", nargs="+", type=int, default=[1, 100])
    arguments = parser.parse_args()
    main(read_wav(arguments.wav) if arguments.wav else speak(), arguments.speakers, arguments.picture)
