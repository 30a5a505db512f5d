"""The check of a found cell: right layers pass it whatever size their weights have, and wrong ones do not."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from tf_cells import NAMES, block, inputs, real, write, write_variables

from blockcell.tensorflow import Check

I, H = 34, 58  # noqa: E741
SHAPES = {
    "BlockLSTM": {"w": (I + H, 4 * H), "b": (4 * H,)},
    "BlockLSTM with peepholes": {"w": (I + H, 4 * H), "wci": (H,), "wcf": (H,), "wco": (H,), "b": (4 * H,)},
    "GRUBlockCell": {"w_ru": (I + H, 2 * H), "w_c": (I + H, H), "b_ru": (2 * H,), "b_c": (H,)},
    "Keras GRU": {"kernel": (I, 3 * H), "recurrent_kernel": (H, 3 * H), "bias": (2, 3 * H)},
    "Keras SimpleRNN": {"kernel": (I, H), "recurrent_kernel": (H, H), "bias": (H,)},
}
GATES = {"w": 4, "w_ru": 2}
SCALES = (0.1, 1.0, 5.0, 20.0)


def cell_of(folder, kind, scale, bias_scale=None):
    """Make a cell whose weights, and whose biases, have these standard deviations."""
    g = np.random.default_rng(0)
    weights = {}
    for role, shape in SHAPES[kind].items():
        deviation = scale if bias_scale is None or not role.startswith("b") else bias_scale
        weights[role] = (deviation * g.standard_normal(shape)).astype(np.float32)
    if kind.startswith("Keras"):
        model = write_variables(folder, {f"net/rnn_cell/{role}": array for role, array in weights.items()})
    else:
        nodes = [*inputs(), *(real(NAMES[role], array) for role, array in weights.items())]
        options = {"use_peephole": "wci" in weights, "cell_clip": 0.0} if kind.startswith("BlockLSTM") else {}
        model = write(
            folder, *nodes, block(kind.split()[0], "cell", {role: NAMES[role] for role in weights}, **options)
        )
    (cell,) = model.cells.values()
    return cell


def missing_attributes(cell):
    return {"activation": "tanh"} if cell.unsaid else {}


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("kind", SHAPES)
def test_a_right_layer_passes(tmp_path, kind, scale):
    cell = cell_of(tmp_path, kind, scale)
    check = cell.check(**missing_attributes(cell))
    assert check.ok and check.bound >= 24


def test_large_weights_amplify_rounding_errors(tmp_path):
    """The bound is the old one until the layer is off by more, and then what float32 makes of the same step."""
    folders = [tmp_path / name for name in ("small", "large")]
    for folder in folders:
        folder.mkdir()
    cells = [cell_of(folder, "BlockLSTM", scale) for folder, scale in zip(folders, (0.1, 60.0), strict=True)]
    small, large = (cell.check() for cell in cells)
    assert small < small.bound == 24 < large < large.bound < 50 * large
    copied = pickle.loads(pickle.dumps(large))
    assert (copied, copied.bound, copied.ok) == (large, large.bound, True)
    assert not Check(float("nan"), 24.0).ok


def change_weight(monkeypatch, cell, role, change):
    """Give the layer another weight than the nodes have."""
    definition = cell._definition
    monkeypatch.setattr(definition, "step_sources", definition.step_sources or dict(definition.sources))
    source = definition.sources[role]
    monkeypatch.setitem(definition.sources, role, source._replace(read=lambda more: change(source.read(more))))


def swapped(first, second, count):
    """Return a change that swaps two of the gates of a kernel or a bias."""

    def change(array):
        gates = np.split(array, count, -1)
        gates[first], gates[second] = gates[second], gates[first]
        return np.concatenate(gates, -1)

    return change


def backwards(array):
    return array[::-1].copy()


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("kind", SHAPES)
def test_a_wrong_layer_fails(tmp_path, monkeypatch, kind, scale):
    """Two gates, or the parts for x and for the state, are swapped in the layer's weights, or two biases are."""
    cell = cell_of(tmp_path, kind, scale)
    changes = [("w_c" if "w_c" in cell.weights else "w", backwards)]
    for role, count in GATES.items():
        if role in cell.weights and not kind.endswith("RNN"):
            changes += [(role, swapped(first, second, count)) for second in range(count) for first in range(second)]
    if "b_hc" in cell.weights:
        changes.append(("b_hc", np.zeros_like))
    if "wco" in cell.weights:
        changes += [(role, np.negative) for role in ("wci", "wcf", "wco")]
    for role, change in changes:
        with monkeypatch.context() as patch:
            change_weight(patch, cell, role, change)
            check = cell.check(**missing_attributes(cell))
            assert not check.ok and check > 20 * check.bound, (role, check)


@pytest.mark.parametrize("bias_scale", [1.0, 30.0])
@pytest.mark.parametrize("scale", SCALES)
def test_a_wrong_attribute_fails(tmp_path, monkeypatch, scale, bias_scale):
    """Also where nearly all gates are saturated by large weights or large biases."""
    cell = cell_of(tmp_path, "BlockLSTM", scale, bias_scale)
    step = cell._definition.step
    known = dict(cell.attributes)
    monkeypatch.setattr(cell._definition, "step", lambda weights, x, state, attributes: step(weights, x, state, known))
    assert cell.check().ok
    for name, value in {"forget_bias": 0.0, "cell_clip": 0.5}.items():
        with monkeypatch.context() as patch:
            patch.setitem(cell.attributes, name, value)
            check = cell.check()
            assert not check.ok and check > 20 * check.bound, (name, check)


def test_an_exponential_does_not_overflow(tmp_path):
    cell = cell_of(tmp_path, "Keras SimpleRNN", 20.0, 1.0)
    assert cell.check(activation="exponential").ok
