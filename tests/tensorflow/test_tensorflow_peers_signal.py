"""Graphs of tf.signal around an LSTM, as models of speech have them: the cell is found, beside complex constants.

`pytest -m peers`, with tensorflow-cpu in .venv.
"""

from __future__ import annotations

import os

import numpy as np
import pytest

from blockcell.formulas import error_in_eps
from blockcell.tensorflow import open as opened

pytestmark = pytest.mark.peers

LENGTH, FRAME, STEP, BINS = 400, 64, 32, 33


@pytest.fixture(scope="module")
def tf():
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    return pytest.importorskip("tensorflow")


def stft(tf, audio, window="hann_window"):
    return tf.signal.stft(audio, FRAME, STEP, window_fn=getattr(tf.signal, window))


def log_mel(tf, audio):
    weights = tf.signal.linear_to_mel_weight_matrix(16, BINS, 8000, 80.0, 4000.0)
    return tf.math.log(tf.abs(stft(tf, audio)) @ weights + 1e-6)


def hilbert(tf, audio):
    """Return the envelope of each frame, by the analytic signal."""
    frames = tf.cast(tf.signal.frame(audio, FRAME, STEP), tf.complex64)
    positive = tf.constant(np.repeat([1, 2, 1, 0], [1, 31, 1, 31]), tf.complex64)
    return tf.abs(tf.signal.ifft(tf.signal.fft(frames) * positive))


def as_channels(tf, spectrum):
    return tf.concat([tf.math.real(spectrum), tf.math.imag(spectrum)], -1)


FEATURES = {  # audio [B,LENGTH] to what the LSTM reads [B,T,I]
    "stft": lambda tf, audio: tf.abs(stft(tf, audio)),
    "stft, hamming": lambda tf, audio: tf.abs(stft(tf, audio, "hamming_window")),
    "stft, vorbis": lambda tf, audio: tf.abs(stft(tf, audio, "vorbis_window")),
    "stft, kaiser": lambda tf, audio: tf.abs(stft(tf, audio, "kaiser_window")),
    "stft, kaiser bessel": lambda tf, audio: tf.abs(stft(tf, audio, "kaiser_bessel_derived_window")),
    "phases": lambda tf, audio: tf.math.angle(stft(tf, audio) * tf.constant(0.6 + 0.8j, tf.complex64)),
    "turned by 1j": lambda tf, audio: as_channels(tf, stft(tf, audio) * tf.exp(tf.constant(1j, tf.complex64))),
    "power": lambda tf, audio: tf.math.real(stft(tf, audio) * tf.math.conj(stft(tf, audio))),
    "complex128": lambda tf, audio: tf.cast(tf.abs(1j * stft(tf, tf.cast(audio, tf.float64))), tf.float32),
    "mel": log_mel,
    "mfcc": lambda tf, audio: tf.signal.mfccs_from_log_mel_spectrograms(log_mel(tf, audio)),
    "dct": lambda tf, audio: tf.signal.dct(tf.signal.frame(audio, FRAME, STEP), type=2, norm="ortho"),
    "dct, type 3": lambda tf, audio: tf.signal.dct(tf.signal.frame(audio, FRAME, STEP), type=3),
    "idct": lambda tf, audio: tf.signal.idct(tf.signal.frame(audio, FRAME, STEP), type=2),
    "hilbert": hilbert,
    "frames": lambda tf, audio: tf.signal.frame(audio, FRAME, STEP, pad_end=True),
    "rfft": lambda tf, audio: as_channels(tf, tf.signal.rfft(tf.signal.frame(audio, FRAME, STEP), [48])),
    "shifted": lambda tf, audio: tf.abs(tf.signal.fftshift(stft(tf, audio), axes=-1)),
    "mdct": lambda tf, audio: tf.signal.mdct(audio, FRAME),
    "fft2d": lambda tf, audio: tf.abs(tf.signal.rfft2d(tf.signal.frame(audio, FRAME, STEP))),
}


def to_audio(tf, features, y):
    """Return audio of a mask for each frame, as models that suppress noise do: also frames overlap and are added."""
    spectrum = tf.complex(y, 0.1 * y) * tf.exp(tf.constant(1j, tf.complex64) * tf.cast(y, tf.complex64))
    return tf.signal.inverse_stft(spectrum, 2 * (y.shape[-1] - 1), STEP) + tf.reduce_sum(features) * 1e-3


@pytest.mark.parametrize("form", ["frozen", "saved_model"])
@pytest.mark.parametrize("name", FEATURES)
def test_features_and_audio_of_tf_signal(tf, name, form, tmp_path, seed):
    keras = pytest.importorskip("keras")
    keras.utils.set_random_seed(seed)
    audio = np.random.default_rng(seed).standard_normal((2, LENGTH)).astype(np.float32)
    lstm = keras.layers.LSTM(BINS, return_sequences=True)
    features = FEATURES[name](tf, tf.constant(audio))
    expected = np.asarray(lstm(features))

    class Module(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec((None, LENGTH), tf.float32)])
        def __call__(self, audio):
            features = FEATURES[name](tf, audio)
            return to_audio(tf, features, lstm(features))

    module = Module()
    module.variables_of_lstm = [variable.value for variable in lstm.variables]
    if form == "saved_model":
        path = tmp_path / "saved"
        tf.saved_model.save(module, str(path))
    else:
        from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

        path = tmp_path / "frozen.pb"
        frozen = convert_variables_to_constants_v2(module.__call__.get_concrete_function())
        path.write_bytes(frozen.graph.as_graph_def().SerializeToString())
    (cell,) = opened(path).cells.values()
    assert (cell.kind, cell.refused, cell.hidden_size) == ("Keras LSTM", None, BINS)
    assert cell.check().ok
    y, _ = cell.layer()(features.numpy(), batch_first=True)
    assert error_in_eps(y, expected.astype(np.float64), float(np.finfo(np.float32).eps)) <= 8
