"""Keras' files without Keras: files of each form that are written with h5py, beside the same models in memory.

`pytest -m peers` has files that Keras wrote.
"""

from __future__ import annotations

import json
import sys
import warnings

import keras_forms as forms
import numpy as np
import pytest
from convert_cases import H, I, assert_same, converted, keras_model, rng, stored
from generate_layers import weights_of
from keras_forms import drawn, entry, functional, sequential

from blockcell import FormatError, convert
from blockcell.convert import ConversionError
from blockcell.layers import Bidirectional, Dense, Stack

pytest.importorskip("h5py")

KERAS_2_HARD_SIGMOID = ("hard_sigmoid", 0.2, 0.5)


def messages_of(function, *arguments, **options):
    """What a function returns, and what it warns of; the warnings are at a line of this file."""
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        result = function(*arguments, **options)
    assert {warning.filename for warning in record} <= {__file__}
    return result, [str(warning.message) for warning in record]


def quiet(function, *arguments, **options):
    """What a function returns, whatever it warns of."""
    return messages_of(function, *arguments, **options)[0]


def assert_all_same(found, expected):
    """The layers are the same, or those of a dict are."""
    if not isinstance(expected, dict):
        assert_same(found, expected)
        return
    assert found.keys() == expected.keys()
    for name, layer in expected.items():
        assert_same(found[name], layer)


def stored_model(case):
    """The JSON of a stored model of Keras 3, its arrays by layer, and all that is stored of it."""
    content = stored("keras_models")[case]
    arrays = {}
    for name, array in weights_of(content).items():
        arrays.setdefault(name.rpartition(".")[0], []).append(array)
    return json.loads(bytes(content["model"])), arrays, content


# ------------------------------------------------------------------------------------------------------ the same model
@pytest.mark.parametrize("case", stored("keras_models"))
def test_stored_models(case, tmp_path):
    """A file gives what the model in memory gives, with the same words for what is left out."""
    model, arrays, _ = stored_model(case)
    path = forms.write_h5(tmp_path / "model.h5", model, arrays, "3.9.0")
    expected, said = messages_of(convert.from_keras, keras_model(model, arrays))
    for source in (path, str(path)):
        found, messages = messages_of(convert.from_keras, source)
        assert messages == said
        assert_all_same(found, expected)


def cell_of(kind, arrays, activation="tanh", gates="sigmoid", **options):
    """The layer of arrays, made by the conversion of lists."""
    options |= {"activation": activation} | ({} if kind == "SimpleRNN" else {"recurrent_activation": gates})
    return convert.from_keras(arrays, **options)


@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "GRU reset_after", "SimpleRNN"])
def test_recurrent_layers_of_keras_2(kind, use_bias, tmp_path):
    """Each kind alone, as an RNN of its cell, in two directions and backwards."""
    g, (kind, *after) = rng(), kind.split()
    options = {"reset_after": bool(after)} if kind == "GRU" else {}
    config = {"units": H, "activation": "relu", "recurrent_activation": "hard_sigmoid", "use_bias": use_bias} | options
    first, second = (drawn(g, kind, I, H, use_bias=use_bias, reset_after=bool(after)) for _ in range(2))
    fw, bw = (cell_of(kind, arrays, "relu", KERAS_2_HARD_SIGMOID, **options) for arrays in (first, second))
    layer, cell = entry(kind, "a", **config), entry(f"{kind}Cell", "c", **config)
    backwards = {"return_sequences": False, "go_backwards": True}
    cases = [
        (layer, first, fw),
        (entry("RNN", "a", cell=cell, return_sequences=True), first, fw),
        (entry("RNN", "a", cell=entry("StackedRNNCells", "s", cells=[cell])), first, fw),
        (entry("Bidirectional", "a", layer=layer, merge_mode="concat"), first + second, Bidirectional(fw, bw)),
        (entry("Bidirectional", "a", layer=entry("RNN", "r", cell=cell)), first + second, Bidirectional(fw, bw)),
        (entry(kind, "a", **config | backwards), first, type(fw)(**weights_and_options(fw), reverse=True)),
    ]
    for k, (part, arrays, expected) in enumerate(cases):
        path = forms.write_h5(tmp_path / f"{k}.hdf5", sequential(part), {"a": arrays})
        assert_same(convert.from_keras(path), expected)


def weights_and_options(cell):
    """The arguments of a cell that its constructor takes, but for its direction."""
    return {name: value for name, value in cell._arguments().items() if name != "reverse"}


def test_a_classifier_of_keras_2(tmp_path):
    """An Embedding is left out by name, options of Keras 2 such as time_major are no matter, and defaults hold."""
    g = rng()
    arrays = {"emb": [g.uniform(-1, 1, (9, I)).astype(np.float32)], "lstm": drawn(g, "LSTM", I, H)}
    arrays |= {"gru": drawn(g, "GRU", H, 3, reset_after=True), "head": drawn(g, "Dense", 3, 2)}
    model = sequential(
        entry("InputLayer", "in", batch_input_shape=[None, 7], dtype="float32"),
        entry("Embedding", "emb", input_dim=9, output_dim=I, mask_zero=True),
        entry("LSTM", "lstm", units=H, time_major=False, implementation=1, dropout=0.2, return_sequences=True),
        entry("Dropout", "drop", rate=0.5),
        entry("GRU", "gru", units=3),
        entry("Dense", "head", units=2),
        entry("Activation", "soft", activation="softmax"),
    )
    path = forms.write_h5(tmp_path / "m.h5", model, arrays, "2.5.0")
    stack = converted(convert.from_keras, path, r"emb \(Embedding\)")
    head = Dense(*arrays["head"], "softmax", last=True)
    cells = [cell_of("LSTM", arrays["lstm"]), cell_of("GRU", arrays["gru"])]
    assert_same(stack, Stack([*cells, head]))


def test_nested_and_functional_models_of_keras_2(tmp_path):
    """Arrays of a nested model stand in one group, those of an Embedding and of a frozen layer among them."""
    g = rng()
    arrays = {name: drawn(g, "LSTM", H, H) for name in ("lstm", "lstm_1")} | {"gru": drawn(g, "GRU", H, H)}
    arrays |= {"emb": [g.uniform(-1, 1, (9, H)).astype(np.float32)]}
    lstm, lstm_1 = (entry("LSTM", name, units=H, return_sequences=True) for name in ("lstm", "lstm_1"))
    gru = entry("GRU", "gru", units=H, reset_after=False, return_sequences=True)
    inner = sequential(entry("Embedding", "emb"), lstm, lstm_1)
    cells = [cell_of("LSTM", arrays["lstm"]), cell_of("LSTM", arrays["lstm_1"]), cell_of("GRU", arrays["gru"])]
    path = forms.write_h5(tmp_path / "nested.h5", sequential(inner, gru), arrays)
    assert_same(converted(convert.from_keras, path, r"sequential/emb \(Embedding\)"), Stack(cells))
    model = functional(entry("InputLayer", "x"), lstm, gru, lstm_1, nodes=[[], ["x"], ["lstm_1"], ["lstm"]], results="")
    model["config"]["output_layers"] = [["gru", 0, 0]]
    path = forms.write_h5(tmp_path / "functional.h5", model, arrays)
    assert_same(convert.from_keras(path), Stack(cells))
    model = functional(entry("InputLayer", "x"), lstm, lstm_1, nodes=[[], ["x"], ["x"]], results=["lstm", "lstm_1"])
    path = forms.write_h5(tmp_path / "two.h5", model, arrays)
    assert_all_same(convert.from_keras(path), {"lstm": cells[0], "lstm_1": cells[1]})


def test_nested_models_by_the_count_of_arrays(tmp_path):
    """Where the names of arrays have no layer's name, all layers of the nested model must be known."""
    g = rng()
    arrays = {"a": drawn(g, "LSTM", I, H), "b": drawn(g, "GRU", H, 3, reset_after=True)}
    layers = [entry("LSTM", "a", units=H, return_sequences=True), entry("Dropout", "d"), entry("GRU", "b", units=3)]
    for extra, works in ((), True), ([entry("Conv1D", "c")], False):
        nested = sequential(*layers, *extra)
        renamed = {"sequential": arrays["a"] + arrays["b"]}
        path = tmp_path / f"{works}.h5"
        forms.write_h5(path, sequential(entry("RNN", "sequential")), renamed)
        import h5py

        with h5py.File(path, "r+") as file:
            file.attrs["model_config"] = json.dumps(sequential(nested))
        if works:
            assert_same(convert.from_keras(path), Stack([cell_of("LSTM", arrays["a"]), cell_of("GRU", arrays["b"])]))
        else:
            with pytest.raises(FormatError, match="Sequential 'sequential' do not tell to which of its layers they be"):
                convert.from_keras(path)


# ------------------------------------------------------------------------------------------------------------- versions
@pytest.mark.parametrize(
    ("version", "gates", "expected"),
    [
        ("3.15.1", "hard_sigmoid", "hard_sigmoid"),
        ("2.15.0", "hard_sigmoid", KERAS_2_HARD_SIGMOID),
        ("2.1.6-tf", "hard_sigmoid", KERAS_2_HARD_SIGMOID),
        ("10.0.1", "hard_sigmoid", "hard_sigmoid"),
        ("10.0.1", None, "sigmoid"),
        ("2.3.0", None, "sigmoid"),
        ("2.2.5", None, KERAS_2_HARD_SIGMOID),
        ("2.3.0-tf", None, "sigmoid"),
        (None, None, KERAS_2_HARD_SIGMOID),
    ],
)
def test_hard_sigmoid_and_the_default_depend_on_the_version(version, gates, expected, tmp_path):
    config = {} if gates is None else {"recurrent_activation": gates}
    model = sequential(entry("LSTM", "a", units=H, **config))
    path = forms.write_h5(tmp_path / "m.h5", model, {"a": drawn(rng(), "LSTM", I, H)}, version)
    layer = convert.from_keras(path)
    assert (layer.activation, layer.recurrent_activation) == ("tanh", expected)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"class_name": "LeakyReLU", "config": {"alpha": 0.25}}, ("leaky_relu", 0.25)),
        ({"class_name": "LeakyReLU", "config": {"alpha": {"type": "ndarray", "value": 0.5}}}, ("leaky_relu", 0.5)),
        ({"class_name": "LeakyReLU", "config": {}}, ("leaky_relu", 0.3)),
        ({"class_name": "ELU", "config": {"alpha": 1.0}}, "elu"),
        ({"class_name": "ReLU", "config": {"max_value": None, "negative_slope": 0.0, "threshold": 0.0}}, "relu"),
        ({"class_name": "ReLU", "config": {"max_value": 6.0}}, None),
        ({"class_name": "LeakyReLU", "config": {"alpha": "x"}}, None),
        ({"class_name": "LeakyReLU", "config": {"alpha": -1}}, None),
        ({"class_name": "LeakyReLU", "config": {}, "module": "own", "registered_name": "own>LeakyReLU"}, None),
        ({"class_name": "function", "config": "tanh", "module": "builtins"}, None),
        (None, "linear"),
        ("gelu", None),
        (3, None),
        ([], None),
    ],
)
def test_activations_of_configs(value, expected, tmp_path):
    model = sequential(entry("SimpleRNN", "a", units=H, activation=value))
    path = forms.write_h5(tmp_path / "m.h5", model, {"a": drawn(rng(), "SimpleRNN", I, H)})
    if expected is None:
        with pytest.raises(
            ConversionError, match=r"SimpleRNN 'a' has activation=.*expected one of Keras's own tanh, s"
        ):
            convert.from_keras(path)
    else:
        assert convert.from_keras(path).activation == expected


def test_classes_of_ones_own(tmp_path):
    """They are left out by name, whatever they are called, and nothing of them is executed."""
    g = rng()
    arrays = {"a": drawn(g, "LSTM", I, H), "b": drawn(g, "LSTM", H, H), "c": drawn(g, "LSTM", H, H)}
    own = entry("LSTM", "b", units=H) | {"module": "own", "registered_name": "own>LSTM"}
    code = {"class_name": "Lambda", "config": {"name": "run", "function": ["4wEA", None, None]}}
    model = sequential(entry("LSTM", "a", units=H), own, code, entry("own>LSTM", "c", units=H))
    path = forms.write_h5(tmp_path / "m.h5", model, arrays)
    text = r"b \(LSTM\), own>LSTM|c \(own>LSTM\)".partition("|")
    layer, (message,) = messages_of(convert.from_keras, path)
    assert_same(layer, cell_of("LSTM", arrays["a"]))
    assert message == "from_keras: left out: b (LSTM), c (own>LSTM), run (Lambda)" and text
    model["class_name"] = "Own"  # whose call() may be another
    path = forms.write_h5(tmp_path / "n.h5", model, arrays)
    layer, (message,) = messages_of(convert.from_keras, path)
    assert message == "from_keras: left out: b (LSTM), c (own>LSTM), run (Lambda)"


def test_lstm_over_steps_of_steps_is_left_out(tmp_path):
    """A TimeDistributed of a recurrent layer runs along another axis."""
    g = rng()
    arrays = {"t": drawn(g, "LSTM", I, H), "b": drawn(g, "LSTM", H, H)}
    model = sequential(entry("TimeDistributed", "t", layer=entry("LSTM", "a", units=H)), entry("LSTM", "b", units=H))
    path = forms.write_h5(tmp_path / "m.h5", model, arrays)
    assert_same(converted(convert.from_keras, path, r"t \(TimeDistributed\)"), cell_of("LSTM", arrays["b"]))


# ------------------------------------------------------------------------------------------------------------ refusals
LAYER = entry("LSTM", "a", units=H)


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (sequential(entry("LSTM", "a", units=H + 1)), FormatError, r"LSTM 'a' has arrays of shapes .* expected"),
        (sequential(entry("LSTM", "a", units=H, use_bias=False)), FormatError, "has arrays of shapes"),
        (sequential(entry("GRU", "a", units=H)), FormatError, "GRU 'a' has arrays of shapes"),
        (sequential(entry("LSTM", "a")), FormatError, "LSTM 'a' has None units"),
        (sequential(entry("LSTM", "a", units="x" * 99)), FormatError, "LSTM 'a' has 'xxxxx.* units"),
        (sequential(entry("LSTM", "a", units=H, go_backwards=1)), FormatError, "go_backwards=1; expected true or"),
        (sequential(entry("LSTM", "b", units=H)), ValueError, None),
        (sequential(entry("Dense", "a", units=H)), FormatError, "Dense 'a' has arrays of shapes"),
        (sequential(entry("RNN", "a")), FormatError, "the cell of RNN 'a' is None"),
        (sequential({"class_name": "LSTM"}), FormatError, "the config of LSTM is None; expected a mapping"),
        (sequential(["LSTM"]), FormatError, "a layer is of type list; expected a mapping"),
        (sequential(LAYER | {"class_name": 3}), FormatError, "a layer has the class_name 3"),
        (sequential(entry("Dropout", "a")), FormatError, r"expected a model with an LSTM, .* found a \(Dropout\)"),
        (entry("LSTM", "a", units=H), FormatError, "its config is of LSTM 'a'; expected a model"),
        ([], FormatError, "a layer is of type list"),
        (
            functional(LAYER, nodes=[["x"]], results=["a"]),
            FormatError,
            "'a' of the model 'model' does not say which la",
        ),
        (functional(LAYER, nodes=[[]], results=["x"]), FormatError, "does not say which layers give its results"),
        (functional(LAYER, nodes=[[]], results=[]), FormatError, "does not say which layers give its results"),
        (
            sequential(entry("Bidirectional", "a", layer=LAYER, merge_mode="sum")),
            FormatError,
            "arrays of shapes",
        ),
        (
            sequential(entry("LSTM", "a", units=H, go_backwards=True, return_sequences=True)),
            ConversionError,
            r"go_backwards=True and return_sequences=True.*x\[::-1\]",
        ),
    ],
)
def test_refused(model, error, message, tmp_path):
    path = forms.write_h5(tmp_path / "m.h5", sequential(LAYER), {"a": drawn(rng(), "LSTM", I, H)})
    import h5py

    with h5py.File(path, "r+") as file:
        file.attrs["model_config"] = json.dumps(model)
    if message is None:  # the only arrays are of the only layer
        assert_same(convert.from_keras(path), cell_of("LSTM", drawn(rng(), "LSTM", I, H)))
        return
    with pytest.raises(error, match=message) as raised:
        convert.from_keras(path)
    assert type(raised.value) is error and (error is ConversionError or str(raised.value).startswith(f"{path}: "))


def test_files_of_other_kinds(tmp_path):
    other = tmp_path / "a.h5"
    other.write_bytes(b"something else")
    with pytest.raises(FormatError, match=r"a\.h5 is of an unknown kind; expected Keras' \.h5"):
        convert.from_keras(other)
    with pytest.raises(FormatError, match="is a folder; expected"):
        convert.from_keras(tmp_path)
    (tmp_path / "saved_model.pb").write_bytes(b"")
    with pytest.raises(FormatError, match=r"is a folder: a SavedModel is for blockcell\.tensorflow\.open"):
        convert.from_keras(str(tmp_path))
    with pytest.raises(FileNotFoundError, match="nothing"):
        convert.from_keras(tmp_path / "nothing.h5")


def test_without_h5py(tmp_path, monkeypatch):
    path = forms.write_h5(tmp_path / "m.h5", sequential(LAYER), {"a": drawn(rng(), "LSTM", I, H)})
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ImportError, match=r"h5py is not installed: pip install .*\[h5\]"):
        convert.from_keras(path)
