"""Keras' files without Keras: files of each form that are written with h5py, beside the same models in memory.

`pytest -m peers` has files that Keras wrote.
"""

from __future__ import annotations

import json
import os
import re
import sys
import zipfile

import keras_forms as forms
import numpy as np
import pytest
from convert_cases import (
    H,
    I,
    all_warnings,
    assert_all_same,
    assert_same,
    converted,
    from_keras,
    keras_model,
    rng,
    stored,
)
from generate_layers import weights_of
from keras_forms import COLUMNS, drawn, entry, functional, sequential

from blockcell import FormatError
from blockcell.convert import ConversionError
from blockcell.layers import Bidirectional, Dense, Stack

pytest.importorskip("h5py")

KERAS_2_HARD_SIGMOID = ("hard_sigmoid", 0.2, 0.5)


def result_of(function, *arguments, **options):
    """Return what a function returns, whatever it warns of."""
    return all_warnings(function, *arguments, **options)[0]


def stored_model(case):
    """Return the JSON of a stored model of Keras 3, its arrays by layer, and all that is stored of it."""
    content = stored("keras_models")[case]
    arrays = {}
    for name, array in weights_of(content).items():
        arrays.setdefault(name.rpartition(".")[0], []).append(array)
    return json.loads(bytes(content["model"])), arrays, content


# ------------------------------------------------------------------------------------------------------ the same model
@pytest.mark.parametrize("case", stored("keras_models"))
def test_stored_models(case, tmp_path):
    """Files of all forms give what the model in memory gives, with the same words for what is left out."""
    model, arrays, _ = stored_model(case)
    expected, expected_messages = all_warnings(from_keras, keras_model(model, arrays))
    architecture = tmp_path / "model.json"
    architecture.write_text(json.dumps(model))
    files = [
        (forms.write_h5(tmp_path / "a.h5", model, arrays, "3.9.0"), None),
        (str(forms.write_h5(tmp_path / "b.hdf5", model, arrays, "3.9.0")), None),
        (forms.write_keras(tmp_path / "c.keras", model, arrays), None),
        (forms.write_keras(tmp_path / "d.keras", model, arrays, compression=zipfile.ZIP_DEFLATED, names=False), None),
        (architecture, forms.write_h5_weights(tmp_path / "e.h5", model, arrays, "3.9.0")),
        (architecture, tmp_path / "a.h5"),
        (str(architecture), str(forms.write_weights(tmp_path / "f.weights.h5", model, arrays))),
        (architecture, forms.write_weights(tmp_path / "g.h5", model, arrays, names=False)),
        (
            architecture,
            forms.write_weights(tmp_path / "h.h5", model, arrays, container="_layer_checkpoint_dependencies"),
        ),
    ]
    for path, weights in files:
        layers, messages = all_warnings(from_keras, path, weights=weights)
        assert messages == expected_messages
        assert_all_same(layers, expected)


def test_long_models(tmp_path):
    """A functional model may be a chain of more layers than Python's recursion has levels."""
    count = 2 * sys.getrecursionlimit()
    g = rng()
    arrays = {"a": drawn(g, "LSTM", I, H), "b": drawn(g, "GRU", H, 3)}
    parts = [entry("InputLayer", "in"), entry("LSTM", "a", units=H, return_sequences=True)]
    parts += [entry("Dropout", f"drop_{k}") for k in range(count)]
    parts.append(entry("GRU", "b", units=3, reset_after=False, return_sequences=True))
    names = [forms.name_of(part) for part in parts]
    model = functional(*parts, nodes=[[], *([name] for name in names[:-1])], results=names[-1:])
    path = forms.write_h5_weights(tmp_path / "m.h5", model, arrays)
    (tmp_path / "m.json").write_text(json.dumps(model | {"keras_version": "2.15.0"}))
    expected = Stack([cell_of("LSTM", arrays["a"]), cell_of("GRU", arrays["b"])])
    assert_same(from_keras(tmp_path / "m.json", weights=path), expected)


def cell_of(kind, arrays, activation="tanh", gates="sigmoid", **options):
    """Make the layer of arrays by the conversion of lists."""
    options |= {"activation": activation} | ({} if kind == "SimpleRNN" else {"recurrent_activation": gates})
    return from_keras(arrays, **options)


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
        assert_same(from_keras(path), expected)


def weights_and_options(cell):
    """Return the arguments of a cell that its constructor takes, but for its direction."""
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
    stack = converted(from_keras, path, r"emb \(Embedding\): pass mask=ids != 0 to the layer's calls")
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
    assert_same(converted(from_keras, path, r"sequential/emb \(Embedding\)"), Stack(cells))
    parts = entry("InputLayer", "x"), lstm, lstm_1, gru
    model = functional(*parts, nodes=[[], ["x"], ["lstm"], ["lstm_1"]], results=["gru"])
    path = forms.write_h5(tmp_path / "functional.h5", model, arrays)
    assert_same(from_keras(path), Stack(cells))
    model = functional(entry("InputLayer", "x"), lstm, lstm_1, nodes=[[], ["x"], ["x"]], results=["lstm", "lstm_1"])
    path = forms.write_h5(tmp_path / "two.h5", model, arrays)
    layers, (message,) = all_warnings(from_keras, path)
    assert_all_same(layers, {"lstm": cells[0], "lstm_1": cells[1]})
    assert message == "from_keras: the layers are not one behind the other"


def test_a_mask_that_is_passed_to_a_layer(tmp_path):
    arrays = {"a": drawn(rng(), "LSTM", I, H)}
    model = functional(INPUT, entry("InputLayer", "mask"), LAYER, nodes=[[], [], ["in"]], results=["a"])
    model["config"]["layers"][2]["inbound_nodes"][0][0][3]["mask"] = ["mask", 0, 0]
    path = forms.write_h5(tmp_path / "m.h5", model, arrays)
    assert_same(converted(from_keras, path, r"a \(LSTM\): it gets a mask: pass mask="), cell_of("LSTM", arrays["a"]))


def test_nested_models_whose_arrays_have_other_names(tmp_path):
    g = rng()
    arrays = drawn(g, "LSTM", I, H) + drawn(g, "GRU", H, 3, reset_after=True)
    layers = [entry("LSTM", "a", units=H, return_sequences=True), entry("GRU", "b", units=3)]
    path = forms.write_h5(tmp_path / "m.h5", sequential(entry("RNN", "sequential")), {"sequential": arrays})
    import h5py

    with h5py.File(path, "r+") as file:
        file.attrs["model_config"] = json.dumps(sequential(sequential(*layers)))
    with pytest.raises(FormatError, match="Sequential 'sequential' do not tell to which of its layers they be"):
        from_keras(path)


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
    ],
)
def test_hard_sigmoid_and_the_default_depend_on_the_version(version, gates, expected, tmp_path):
    config = {} if gates is None else {"recurrent_activation": gates}
    model = sequential(entry("LSTM", "a", units=H, **config))
    path = forms.write_h5(tmp_path / "m.h5", model, {"a": drawn(rng(), "LSTM", I, H)}, version)
    layer = from_keras(path)
    assert (layer.activation, layer.recurrent_activation) == ("tanh", expected)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"class_name": "LeakyReLU", "config": {"alpha": 0.25}}, None),
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
            from_keras(path)
    else:
        assert from_keras(path).activation == expected


def test_classes_of_ones_own(tmp_path):
    """They are left out by name, whatever they are called, and nothing of them is executed."""
    g = rng()
    arrays = {"a": drawn(g, "LSTM", I, H), "b": drawn(g, "LSTM", H, H), "c": drawn(g, "LSTM", H, H)}
    own = entry("LSTM", "b", units=H) | {"module": "own", "registered_name": "own>LSTM"}
    code = {"class_name": "Lambda", "config": {"name": "run", "function": ["4wEA", None, None]}}
    model = sequential(entry("LSTM", "a", units=H), own, code, entry("own>LSTM", "c", units=H))
    path = forms.write_h5(tmp_path / "m.h5", model, arrays)
    text = r"b \(LSTM\), own>LSTM|c \(own>LSTM\)".partition("|")
    layer, (message,) = all_warnings(from_keras, path)
    assert_same(layer, cell_of("LSTM", arrays["a"]))
    assert message == "from_keras: left out: b (LSTM), c (own>LSTM), run (Lambda)" and text
    model["class_name"] = "Own"  # whose call() may be another
    path = forms.write_h5(tmp_path / "n.h5", model, arrays)
    layer, (message,) = all_warnings(from_keras, path)
    own_call = "sequential (Own): its call() is its own"
    assert message == f"from_keras: left out: b (LSTM), c (own>LSTM), run (Lambda), {own_call}"


def test_lstm_over_steps_of_steps(tmp_path):
    """A TimeDistributed of a recurrent layer runs along another axis, and is in no stack."""
    g = rng()
    arrays = {"t": drawn(g, "LSTM", I, H), "b": drawn(g, "LSTM", H, H)}
    model = sequential(entry("TimeDistributed", "t", layer=entry("LSTM", "a", units=H)), entry("LSTM", "b", units=H))
    path = forms.write_h5(tmp_path / "m.h5", model, arrays)
    layers = converted(from_keras, path, r"t \(TimeDistributed\): it calls its layer for each slice .*")
    assert layers.keys() == {"t/a", "b"}
    for name, key in {"t/a": "t", "b": "b"}.items():
        assert_same(layers[name], cell_of("LSTM", arrays[key]))


@pytest.mark.parametrize("version", ["1.2.2", None])
def test_files_of_keras_1(version, tmp_path):
    model = {"class_name": "Sequential", "config": [entry("LSTM", "a", output_dim=H, inner_activation="hard_sigmoid")]}
    for write in (forms.write_h5, forms.write_h5_weights):
        path = write(tmp_path / "m.h5", model, {"a": drawn(rng(), "LSTM", I, H)}, version)
        with pytest.raises(FormatError, match="of Keras 1; load it with Keras 2, and save it again"):
            from_keras(path)


def test_a_list_of_layers(tmp_path):
    """Before Keras 2.2.3, the config of a Sequential was one."""
    arrays = {"a": drawn(rng(), "LSTM", I, H)}
    path = forms.write_h5(tmp_path / "m.h5", sequential(entry("LSTM", "a", units=H)), arrays, "2.2.2")
    expected = from_keras(path)
    model = {"class_name": "Sequential", "config": [entry("LSTM", "a", units=H)]}
    assert_same(from_keras(forms.write_h5(tmp_path / "n.h5", model, arrays, "2.2.2")), expected)


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_layers_for_cudnn(kind, tmp_path):
    """As Keras 2 wrote them, with a config and alone, in one direction and in two."""
    g = rng()
    arrays = [*drawn(g, kind, I, H)[:2], g.uniform(-1, 1, 2 * COLUMNS[kind] * H).astype(np.float32)]
    layer = entry(f"CuDNN{kind}", "a", units=H, return_sequences=True)
    expected = from_keras(arrays, recurrent_activation="sigmoid")
    both = entry("Bidirectional", "b", layer=layer)
    for part, own, result in ((layer, arrays, expected), (both, 2 * arrays, Bidirectional(expected, expected))):
        content = {forms.name_of(part): own}
        path = forms.write_h5(tmp_path / "m.h5", sequential(part), content, "2.1.5")
        assert_same(from_keras(path), result)
        path = forms.write_h5_weights(tmp_path / "w.h5", sequential(part), content, "2.1.5")
        assert_same(from_keras(path, recurrent_activation="sigmoid"), result)
        with pytest.raises(ConversionError, match="that of Keras 2's CuDNNLSTM and CuDNNGRU, whose activations are"):
            from_keras(path)  # which would have hard_sigmoid in this version
    plain = entry(kind, "a", units=H, recurrent_activation="sigmoid", **{"reset_after": True} if kind == "GRU" else {})
    path = forms.write_h5(tmp_path / "m.h5", sequential(plain), {"a": arrays}, "2.1.5")
    assert_same(from_keras(path), expected)


# ----------------------------------------------------------------------------------------------- weights by their order
def test_weights_of_a_model_that_was_built_in_another_process(tmp_path):
    """Its layers have other names then: the order tells, or the classes."""
    g = rng()
    layers = [("LSTM", I, H), ("GRU", H, H), ("LSTM", H, H), ("Dense", H, 2)]

    def model(first):
        parts = [entry("Embedding", f"embedding_{first}"), entry("Dropout", f"dropout_{first}")]
        for k, (kind, _, units) in enumerate(layers, first):
            options = {} if kind == "Dense" else {"return_sequences": True}
            options |= {"reset_after": False} if kind == "GRU" else {}
            parts.append(entry(kind, f"{kind.lower()}_{k}", units=units, **options))
        return sequential(*parts, keras_version="2.15.0")

    saved, other = model(1), model(2)
    drawn_arrays = [drawn(g, kind, inputs, units) for kind, inputs, units in layers]
    names = [forms.name_of(part) for part in forms.inner_of(saved)]
    arrays = {names[0]: [g.uniform(-1, 1, (9, I)).astype(np.float32)]}
    arrays |= zip(names[2:], drawn_arrays, strict=True)
    architecture = tmp_path / "model.json"
    architecture.write_text(json.dumps(other))
    cells = [cell_of(kind, own) for (kind, *_), own in zip(layers[:3], drawn_arrays, strict=False)]
    expected = Stack([*cells, Dense(*drawn_arrays[3])])
    for weights in (
        forms.write_h5_weights(tmp_path / "a.h5", saved, arrays),
        forms.write_weights(tmp_path / "b.h5", saved, arrays),
    ):
        stack = converted(from_keras, architecture, r"embedding_2 \(Embedding\)", weights=weights)
        assert_same(stack, expected)


def test_weights_that_do_not_fit(tmp_path):
    g = rng()
    architecture = tmp_path / "model.json"
    architecture.write_text(json.dumps(sequential(entry("LSTM", "a", units=H), entry("Dense", "b", units=2))))
    saved = sequential(entry("LSTM", "c", units=H))
    lstm = {"c": drawn(g, "LSTM", I, H)}
    for weights, message in (
        (forms.write_h5_weights(tmp_path / "a.h5", saved, lstm), "/c has arrays of a layer that the config does not"),
        (forms.write_weights(tmp_path / "b.h5", saved, lstm), "there is no /layers/dense"),
    ):
        with pytest.raises(FormatError, match=message):
            from_keras(architecture, weights=weights)
    more = sequential(entry("LSTM", "a", units=H), entry("Dense", "b", units=2), entry("Dense", "c", units=3))
    arrays = {"a": drawn(g, "LSTM", I, H), "b": drawn(g, "Dense", H, 2), "c": drawn(g, "Dense", 2, 3)}
    for weights, message in (
        (forms.write_h5_weights(tmp_path / "c.h5", more, arrays), "/c has arrays of a layer that the config does not"),
        (forms.write_weights(tmp_path / "d.h5", more, arrays), "/layers has more layers than the config: 3"),
    ):
        with pytest.raises(FormatError, match=message):
            from_keras(architecture, weights=weights)
    with pytest.raises(ValueError, match=r"is an architecture without weights; pass the path of these, too: weights="):
        from_keras(architecture)
    with pytest.raises(ValueError, match=r"weights is given, and .*a\.h5 has weights of its own"):
        from_keras(tmp_path / "a.h5", weights=tmp_path / "b.h5")
    with pytest.raises(ValueError, match=r"weights is given; expected the path of an architecture's"):
        from_keras(lstm["c"], weights=tmp_path / "b.h5")
    with pytest.raises(FormatError, match=r"its weights, .*, are no HDF5"):
        from_keras(architecture, weights=architecture)


# --------------------------------------------------------------------------------------------------------- arrays alone
def write_arrays(form, path, model, arrays, version="2.15.0"):
    """Write a file of arrays in one of the two formats."""
    if form == "names":
        return forms.write_h5_weights(path, model, arrays, version)
    return forms.write_weights(path, model, arrays)


@pytest.mark.parametrize("form", ["names", "attributes"])
def test_arrays_alone(form, tmp_path):
    """Shapes tell the cells and, where the file has no order, the order; warnings name the arguments for the rest."""
    g = rng()
    model = sequential(
        entry("Embedding", "emb"),
        entry("LSTM", "lstm"),
        entry("Bidirectional", "bi", layer=entry("GRU", "gru")),
        entry("SimpleRNN", "rnn"),
        entry("Dense", "head"),
    )
    bi = drawn(g, "GRU", H, 3, reset_after=True) + drawn(g, "GRU", H, 3, reset_after=True)
    arrays = {"lstm": drawn(g, "LSTM", I, H), "bi": bi, "rnn": drawn(g, "SimpleRNN", 6, 5)}
    arrays |= {"head": drawn(g, "Dense", 5, 2), "emb": [g.uniform(-1, 1, (9, I)).astype(np.float32)]}
    path = write_arrays(form, tmp_path / "m.weights.h5", model, arrays)
    for gates in ("sigmoid", KERAS_2_HARD_SIGMOID, None):
        options = {} if gates is None else {"recurrent_activation": gates, "activation": "relu"}
        stack, messages = all_warnings(from_keras, path, **options)
        activation = "tanh" if gates is None else "relu"
        cells = [
            cell_of("LSTM", arrays["lstm"], activation, gates or "sigmoid"),
            cell_of("GRU", bi, activation, gates or "sigmoid"),
            cell_of("SimpleRNN", arrays["rnn"], activation),
        ]
        assert_same(stack, Stack([*cells, Dense(*arrays["head"])]))
        (message,) = messages
        assert re.match(r"from_keras: left out: emb(edding)? \([Ee]mbedding\); arrays do not tell ", message)
        assert "; arrays do not tell a Dense's activation" in message
        assert ("; arrays do not tell recurrent_activation: here it is 'sigmoid'" in message) == (gates is None)


def test_arrays_alone_of_old_versions(tmp_path):
    """They had hard_sigmoid by default."""
    g = rng()
    arrays = {"lstm": drawn(g, "LSTM", I, H), "gru": drawn(g, "GRU", H, 3)}
    model = sequential(entry("LSTM", "lstm"), entry("GRU", "gru"))
    path = write_arrays("names", tmp_path / "m.h5", model, arrays, "2.1.5")
    stack, (message,) = all_warnings(from_keras, path)
    cells = [cell_of(name.upper(), part, gates=KERAS_2_HARD_SIGMOID) for name, part in arrays.items()]
    assert_same(stack, Stack(cells))
    assert f"here it is {KERAS_2_HARD_SIGMOID!r}. Pass it: " in message and 'recurrent_activation="sigmoid"' in message
    layer = result_of(from_keras, path, recurrent_activation="sigmoid").layers[0]
    assert_same(layer, cell_of("LSTM", arrays["lstm"]))


@pytest.mark.parametrize("form", ["names", "attributes"])
def test_arrays_alone_of_a_gru_without_bias(form, tmp_path):
    g = rng()
    arrays = {"gru": drawn(g, "GRU", I, H, use_bias=False)}
    path = write_arrays(form, tmp_path / "m.h5", sequential(entry("GRU", "gru")), arrays)
    with pytest.raises(ConversionError, match=r"without a bias does not show whether .* or reset_after="):
        from_keras(path)
    for reset_after in (True, False):
        layer = result_of(from_keras, path, reset_after=reset_after)
        assert_same(layer, cell_of("GRU", arrays["gru"], reset_after=reset_after))


@pytest.mark.parametrize("form", ["names", "attributes"])
def test_arrays_alone_with_others_between(form, tmp_path):
    """Layers that are not known part the others."""
    g = rng()
    arrays = {"a": drawn(g, "LSTM", I, H), "norm": [np.ones(H, np.float32)] * 2, "b": drawn(g, "LSTM", H, H)}
    model = sequential(entry("LSTM", "a"), entry("LayerNormalization", "norm"), entry("LSTM", "b"))
    path = write_arrays(form, tmp_path / "m.h5", model, arrays)
    layers, (message,) = all_warnings(from_keras, path)
    names = {"a": "a", "b": "b"} if form == "names" else {"lstm": "a", "lstm_1": "b"}
    assert_all_same(layers, {name: cell_of("LSTM", arrays[key]) for name, key in names.items()})
    norm = "norm (unknown)" if form == "names" else "layer_normalization (layer_normalization)"
    order = ", the order of the layers, which arrays do not tell" if form == "attributes" else ""
    assert message.startswith(f"from_keras: left out: {norm}{order}; arrays do not tell")
    assert message.endswith("; the layers are not one behind the other") == (form == "names")


def test_arrays_alone_without_an_order(tmp_path):
    """Two layers of one size may stand in either order, and a nested model has the names of both."""
    g = rng()
    arrays = {name: drawn(g, "LSTM", H, H) for name in ("feedforward", "backwards")}  # no Bidirectional's
    nested = sequential(entry("LSTM", "feedforward"), entry("LSTM", "backwards"))
    path = forms.write_weights(tmp_path / "m.h5", sequential(nested), arrays)
    names = {"sequential/lstm": "feedforward", "sequential/lstm_1": "backwards"}
    assert_all_same(result_of(from_keras, path), {name: cell_of("LSTM", arrays[key]) for name, key in names.items()})
    path = forms.write_h5_weights(tmp_path / "n.h5", sequential(nested), arrays)
    assert_same(result_of(from_keras, path), Stack([cell_of("LSTM", arrays[name]) for name in arrays]))
    cells = entry("RNN", "r", cell=entry("StackedRNNCells", "s", cells=[entry("LSTMCell", "x"), entry("GRUCell", "y")]))
    arrays = {"r": drawn(g, "LSTM", I, H) + drawn(g, "GRU", H, 5)}
    expected = Stack([cell_of("LSTM", arrays["r"][:3]), cell_of("GRU", arrays["r"][3:])])
    for write in (forms.write_weights, forms.write_h5_weights):
        assert_same(result_of(from_keras, write(tmp_path / "o.h5", sequential(cells), arrays)), expected)
    many = [(f"d{k}", drawn(g, "Dense", k + 2, k + 3)) for k in range(7)]
    arrays = {"a": drawn(g, "LSTM", I, 2), **dict(many)}
    model = sequential(entry("LSTM", "a"), *(entry("Dense", name) for name, _ in many))
    for count, is_tried in ((8, False), (7, True)):  # layers of which each order is tried
        model["config"]["layers"] = model["config"]["layers"][:count]
        path = forms.write_weights(tmp_path / "p.h5", model, arrays)
        assert isinstance(result_of(from_keras, path), Stack) == is_tried


def test_activations_are_for_arrays_alone(tmp_path):
    path = forms.write_h5(tmp_path / "m.h5", sequential(entry("LSTM", "a", units=H)), {"a": drawn(rng(), "LSTM", I, H)})
    with pytest.raises(ValueError, match="activation and reset_after is given; expected arrays alone, as a model has"):
        from_keras(path, activation="relu", reset_after=True)


# ------------------------------------------------------------------------------------------------------------ refusals
LAYER, INPUT = entry("LSTM", "a", units=H), entry("InputLayer", "in")


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
        (sequential(LAYER, entry("LSTM", "b", units=H)), FormatError, "no arrays of the layer 'b', but of a"),
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
            "the model 'model' does not say which of the layers before it 'a' reads",
        ),
        (functional(LAYER, nodes=[[]], results=["a"]), FormatError, "which of the layers before it 'a' reads"),
        (functional(INPUT, LAYER, nodes=[[], ["in"]], results=["x"]), FormatError, "before it gives its results"),
        (functional(INPUT, LAYER, nodes=[[], ["in"]], results=[]), FormatError, "before it gives its results"),
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
        assert_same(from_keras(path), cell_of("LSTM", drawn(rng(), "LSTM", I, H)))
        return
    with pytest.raises(error, match=message) as raised:
        from_keras(path)
    assert type(raised.value) is error and (error is ConversionError or str(raised.value).startswith(f"{path}: "))


def test_zips(tmp_path):
    """What is missing in a .keras, or too large, is said."""
    path = forms.write_keras(tmp_path / "m.keras", sequential(LAYER), {"a": drawn(rng(), "LSTM", I, H)})
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}

    def rewrite(**changed):
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in members.items():
                if (new := changed.get(name.split(".")[0], content)) is not None:
                    archive.writestr(name, new)
        return path

    for changed, message in (
        ({"config": None}, "there is no config.json in it"),
        ({"model": None}, "there is no model.weights.h5 in it"),
        ({"metadata": b"{}"}, "the version of Keras is 'None'"),
        ({"metadata": b"[]"}, "the version of Keras is"),
        ({"config": b"{"}, "its config is not JSON"),
        ({"config": b"[" * 10_000}, "its config is not JSON"),
        ({"config": b" " * (2**22 + 1)}, "config.json has 4194305 bytes"),
        ({"model": bytes(2**24)}, "model.weights.h5 has 16777216 bytes"),
        ({"model": b"nothing"}, "its HDF5 cannot be read"),
    ):
        with pytest.raises(FormatError, match=message):
            from_keras(rewrite(**changed))
    content = rewrite().read_bytes()
    place = content.rindex(b"PK\1\2", 0, content.rindex(b"metadata.json"))
    path.write_bytes(content[: place + 20] + b"\xff\xff\xff\x7f" + content[place + 24 :])  # its size in the archive
    with pytest.raises(FormatError, match=r"metadata\.json has .* bytes, 2147483647 of them in the archive"):
        from_keras(path)
    path.write_bytes(content[:200])
    with pytest.raises(FormatError, match="the zip cannot be read"):
        from_keras(path)


def test_files_of_other_kinds(tmp_path):
    other = tmp_path / "a.h5"
    other.write_bytes(b"something else")
    with pytest.raises(FormatError, match=r"a\.h5 is of an unknown kind; expected Keras' \.h5"):
        from_keras(other)
    with pytest.raises(FormatError, match="is a folder; expected"):
        from_keras(tmp_path)
    (tmp_path / "saved_model.pb").write_bytes(b"")
    with pytest.raises(FormatError, match=r"is a folder: a SavedModel is for blockcell\.tensorflow\.open"):
        from_keras(str(tmp_path))
    with pytest.raises(FileNotFoundError, match="nothing"):
        from_keras(tmp_path / "nothing.h5")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with names here")
def test_pipes(tmp_path):
    os.mkfifo(tmp_path / "pipe.h5")
    with pytest.raises(FormatError, match=r"pipe\.h5 is no regular file; expected Keras' \.h5"):
        from_keras(tmp_path / "pipe.h5")


def test_without_h5py(tmp_path, monkeypatch):
    path = forms.write_h5(tmp_path / "m.h5", sequential(LAYER), {"a": drawn(rng(), "LSTM", I, H)})
    for name in ("files", "stored"):
        monkeypatch.delitem(sys.modules, f"blockcell.convert.keras_{name}", raising=False)
    monkeypatch.delitem(sys.modules, "blockcell.convert.hdf5", raising=False)
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ImportError, match=r"h5py is not installed: pip install h5py$"):
        from_keras(path)
