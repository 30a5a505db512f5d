"""Files that Keras 3 and Keras 2 (tf_keras) wrote, of random models: each becomes what the model in memory becomes.

`pytest -s -m peers`, with keras, tf_keras and tensorflow in .venv, prints the shares.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter

import keras_forms as forms
import numpy as np
import pytest
from convert_cases import all_warnings, assert_all_same, assert_same, from_keras
from keras2_models import draw_model
from keras_graphs import layers_of

from blockcell import convert
from blockcell.convert import ConversionError

pytestmark = pytest.mark.peers
MODELS = 250
MERGE_MODES = *["concat"] * 8, "sum", "mul", "ave"  # which are refused


def keras_of(package):
    """Import a package of Keras, or skip the test."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    pytest.importorskip("h5py")
    pytest.importorskip("tensorflow")
    return pytest.importorskip(package)


def verdict_on(model):
    """Tell whether Keras computes what the model in memory becomes."""
    try:
        with warnings.catch_warnings(record=True) as record:
            warnings.simplefilter("always")
            layers = convert.from_keras(model)
    except ConversionError as error:
        halves = [getattr(layer, "backward_layer", None) for layer in layers_of(model)]
        assert "something else" in str(error) and any(getattr(half, "unroll", False) for half in halves), error
        return "refused, as Keras masks the wrong steps of a backward layer that is unrolled"
    texts = "; ".join(str(warning.message) for warning in record)
    return "not compared" if "not compared" in texts else f"compared, a {type(layers).__name__}"


@pytest.mark.parametrize("package", ["keras", "tf_keras"])
def test_random_models(package, tmp_path, seed):
    """A file without a comparison says what the model says that is compared with Keras."""
    keras, counts = keras_of(package), Counter()
    for k in range(MODELS):
        g = np.random.default_rng([seed, k])
        keras.backend.clear_session()
        model = draw_model(keras, g, MERGE_MODES).model
        if k % 4 == 0:  # a model in a model
            x = keras.Input(batch_shape=model.input_shape)
            model = keras.Model(x, model(x))
        try:
            expected, texts = all_warnings(from_keras, model)
        except ConversionError as error:
            expected, refusal = None, str(error)
        counts["refused" if expected is None else verdict_on(model)] += 1
        for ending in (".h5", ".keras"):
            path = tmp_path / f"{k}{ending}"
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of Keras, about .h5
                model.save(path if package == "keras" else str(path))
            if expected is None:
                with pytest.raises(ConversionError) as raised:
                    from_keras(path)
                assert str(raised.value) == refusal, f"{package}, model {k}"
                continue
            layers, texts_of_file = all_warnings(from_keras, path)
            assert texts_of_file == texts, f"{package}, model {k}"
            assert_all_same(layers, expected)
    print(f"{package} {keras.__version__}: {dict(counts.most_common())}")


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
@pytest.mark.parametrize("inputs", [3, 4])
def test_arrays_for_cudnn_bit_for_bit(kind, inputs, tmp_path, seed):
    """Keras 2 converts them when it loads them into an LSTM or a GRU; a CuDNNLSTM in memory is read, too."""
    keras = keras_of("tf_keras")
    old_layers = pytest.importorskip(f"tf_keras.src.layers.rnn.cudnn_{kind.lower()}")
    layer = getattr(old_layers, f"CuDNN{kind}")(4, return_sequences=True, name="a")
    layer.build((2, 5, inputs))
    g = np.random.default_rng(seed)
    arrays = [g.standard_normal(array.shape).astype(np.float32) for array in layer.get_weights()]
    layer.set_weights(arrays)
    path = forms.write_h5_weights(tmp_path / "w.h5", forms.sequential(forms.entry(kind, "a")), {"a": arrays}, "2.1.5")
    plain = getattr(keras.layers, kind)(4, return_sequences=True, name="a")
    keras.Sequential([keras.Input((5, inputs)), plain]).load_weights(path, by_name=True)
    expected = convert.from_keras(plain)
    assert_same(from_keras(layer), expected)  # a CuDNNLSTM needs a GPU
    for source in (arrays, path):
        assert_same(from_keras(source, recurrent_activation="sigmoid"), expected)
