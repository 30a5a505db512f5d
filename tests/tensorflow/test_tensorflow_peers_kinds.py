"""Random cells of other kinds that TensorFlow itself writes and runs: of Keras and cuDNN, and those to be refused.

`pytest -m peers`, with tensorflow-cpu in .venv.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
from tf_peers import (
    BAD,
    CASES,
    DRAWN,
    GOOD,
    B,
    Cell,
    T,
    control_flow,
    find_cell,
    looped,
    save_model,
    unrolled,
)

from blockcell.formulas import error_in_eps
from blockcell.tensorflow import open as opened

pytestmark = pytest.mark.peers
EPS = float(np.finfo(np.float32).eps)


def run(tf, g, kinds, folder):
    """Cells one behind the other with dense layers between them: the cells, what is found, and TensorFlow's results."""
    v1 = tf.compat.v1
    version, saved = int(g.integers(1, 3)), str(g.choice(["checkpoint", "frozen", "saved_model"]))
    print(version, saved)
    with control_flow(v1, version), tf.Graph().as_default(), v1.Session() as session:
        first = int(g.integers(1, 9))
        x = v1.placeholder("float32", (T, B, first), "x")
        inputs, outputs, cells, y = [], [], [], x
        for k, kind in enumerate(kinds):
            scope = str(g.choice(["net", "a/b/thing", "rnn"])) + f"/part_{k}" + str(g.choice(["", "/gru_cell"]))
            cell = Cell(tf, g, scope, int(y.shape[-1]), kind)
            inputs.append(tf.identity(y, f"x{k}"))
            y = (unrolled if g.integers(2) else looped)(tf, cell, inputs[-1], cell.start(inputs[-1]))
            cells.append(cell)
            outputs.append(tf.identity(y, f"y{k}"))
            size = int(y.shape[-1])
            both = tf.reshape(tf.concat([y, y], 2), (T * B, 2 * size))  # what is no cell
            dense = [v1.get_variable(f"dense_{k}/{name}", initializer=g.standard_normal(shape).astype(np.float32))
                     for name, shape in (("kernel", (2 * size, 4)), ("bias", (4,)))]  # fmt: skip
            gate, value = tf.split(tf.nn.bias_add(both @ dense[0], dense[1]), 2, 1)
            y = tf.reshape(tf.sigmoid(gate) * tf.tanh(value), (T, B, 2))
        last = tf.identity(y, "last")
        session.run(v1.global_variables_initializer())
        x_values = g.standard_normal((T, B, first)).astype(np.float32)
        pairs = session.run([*zip(inputs, outputs, strict=True)], {x: x_values})
        path = save_model(tf, session, saved, {"x": x}, {"last": last}, folder)
        nodes = {node.name for node in session.graph.as_graph_def().node}
    found_cells = opened(path).cells
    print(kinds, found_cells)
    assert len(found_cells) == len(cells)
    return [(cell, find_cell(found_cells, cell.scope), *pair) for cell, pair in zip(cells, pairs, strict=True)], nodes


def attributes_of(cell):
    """Return the attributes of a cell that draws them, as they should be found."""
    attributes = dict(cell.attributes)
    if cell.states == 2:
        attributes |= {"forget_bias": cell.forget, "cell_clip": cell.clip, "use_peephole": cell.peephole}
        attributes |= {"coupled": True} if cell.kind == "coupled_lstm" else {"gate_order": "icfo"}
    if cell.kind == "projected":
        attributes["proj_clip"] = cell.proj_clip
    return attributes


def check_state(cell, one):
    """Check the state that a cell begins with, and return the state for its layer."""
    known = {name: rows for name, rows, _ in cell.begins if rows is not None}
    states = {name: rows for name, rows in (one.initial_state or {}).items() if rows is not None}
    assert states.keys() == known.keys() and (one.state_from is not None) == bool(cell.begins)
    for name, rows in known.items():
        np.testing.assert_array_equal(states[name], rows)
    names = ("cs", "h")[-cell.states :]
    return dict.fromkeys(names) | {name: np.repeat(rows, B // len(rows), 0) for name, _, rows in cell.begins}


@pytest.mark.parametrize("case", range(CASES))
def test_random_kinds(tf, case, tmp_path, seed):
    g = np.random.default_rng([seed, case, 10])
    kinds = [str(kind) for kind in g.choice([*GOOD, *DRAWN], int(g.integers(1, 4)))]
    for cell, found_cell, x, y in run(tf, g, kinds, tmp_path)[0]:
        assert found_cell.refused is None and (
            found_cell.input_size,
            found_cell.hidden_size,
            found_cell.output_size,
        ) == (
            cell.I,
            cell.units,
            cell.H,
        )
        assert GOOD[cell.kind] in found_cell.kind
        if cell.kind in DRAWN:
            assert found_cell.attributes == attributes_of(cell)
        else:
            assert found_cell.attributes.get("reset_after", False) == (cell.kind in ("cudnn_gru", "keras_gru_after"))
            bias = {"other_lstm": 0.5, "coupled": 1, "projection": 1}
            assert found_cell.attributes.get("forget_bias", 0) == bias.get(cell.kind, 0)
        assert found_cell.check().ok
        result, _ = found_cell.layer()(x, check_state(cell, found_cell))
        assert error_in_eps(result, y.astype(np.float64), EPS) <= 16


@pytest.mark.parametrize("case", range(CASES))
def test_random_refused(tf, case, tmp_path, seed):
    g = np.random.default_rng([seed, case, 11])
    kinds = [str(kind) for kind in g.choice([*BAD], int(g.integers(1, 3)))]
    for cell, found_cell, *_ in run(tf, g, kinds, tmp_path)[0]:
        assert found_cell.refused is not None and re.search(BAD[cell.kind], found_cell.refused), cell.kind
        assert "'" in found_cell.refused  # the node


KERAS = ["tanh", "sigmoid", "relu", "leaky_relu", "elu", "selu", "softplus", "softsign", "exponential", "hard_sigmoid",
         "linear"]  # fmt: skip
REFUSED = ["gelu", "silu", "softmax"]


def keras_layer(keras, g):
    """Draw an RNN, LSTM or GRU of Keras in one direction or both; return its number of cells, and if they are found."""
    layers, size = keras.layers, int(g.integers(1, 9))
    options = {"return_sequences": True, "unroll": not g.integers(4), "use_bias": bool(g.integers(4))}
    other = g.integers(8) == 0
    if g.integers(2):
        options["activation"] = str(g.choice(REFUSED if other else KERAS))
    kind = ("SimpleRNN", "LSTM", "GRU")[g.integers(3)]
    other = options.get("activation") in REFUSED
    if kind != "SimpleRNN":
        options["implementation"] = int(g.integers(1, 3))
        if g.integers(2) and options.get("activation") != "exponential":  # which overflows with gates above 1
            options["recurrent_activation"] = str(g.choice(["sigmoid", "hard_sigmoid", "softsign", "relu", "linear"]))
    if kind == "GRU":
        options["reset_after"] = bool(g.integers(2))
    layer = getattr(layers, kind)(size, **options)
    both = not g.integers(3)
    return (layers.Bidirectional(layer) if both else layer), 1 + both, not other


@pytest.mark.parametrize("case", range(CASES // 4))
def test_random_models_of_keras(tf, case, tmp_path, seed):
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

    keras = pytest.importorskip("keras")
    g = np.random.default_rng([seed, case, 12])
    first, masked = int(g.integers(1, 9)), not g.integers(4)
    x_input = y = keras.Input((T, first), batch_size=B if g.integers(2) else None)
    if masked:
        y = keras.layers.Masking()(y)
    count, understood = 0, []
    for _ in range(int(g.integers(1, 4))):
        layer, cells, fits = keras_layer(keras, g)
        y, count, understood = layer(y), count + cells, [*understood, *[fits] * cells]
    model = keras.Model(x_input, y)
    weights = [g.uniform(-1, 1, array.shape) / len(array) ** 0.5 for array in model.get_weights()]
    model.set_weights([array.astype(np.float32) for array in weights])
    x = g.standard_normal((B, T, first)).astype(np.float32)
    saved = str(g.choice(["export", "frozen"]))
    path = tmp_path / "saved"
    call = tf.function(lambda x: model(x), input_signature=[tf.TensorSpec((B, T, first))])
    if saved == "export":
        model.export(str(path), verbose=False)
    else:
        constants = convert_variables_to_constants_v2(call.get_concrete_function(), lower_control_flow=bool(case % 2))
        path = tmp_path / "frozen.pb"
        path.write_bytes(constants.graph.as_graph_def().SerializeToString())
    found_cells = opened(path).cells
    print(found_cells, understood, saved, masked)
    assert sorted(cell.refused is None for cell in found_cells.values()) == sorted(understood)
    for cell in found_cells.values():
        assert cell.refused is None or re.search("the (node|product) '", cell.refused)
        assert cell.refused is not None or cell.check().ok
    if all(understood) and not masked:
        result, _ = found_cells.layer()(x, batch_first=True)
        exact = model(x).numpy().astype(np.float64)
        scale = max(float(np.abs(exact).max()), 0.125)  # sums of larger numbers may cancel
        assert np.abs(result - exact).max() <= 16 * EPS * scale
