"""The demo learns, measures what it says and fails when it should; at a third of its epochs."""

from __future__ import annotations

import dataclasses
import importlib.util
import json

import matplotlib.image
import numpy as np
import pytest

import onnx_export
from blockcell import raw_ops
from blockcell.command import cli, demo
from blockcell.formulas import FORMULAS
from blockcell.optable import OPS
from onnx_export import verification


@pytest.fixture(scope="module", autouse=True)
def _short():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "EPOCHS", 20)
        yield


@pytest.fixture(scope="module")
def result():
    return demo.run(0, runtimes=verification.list_runtimes())


def networks(dtype=np.float64, hidden=5):
    """Untrained, with weights that are not zero anywhere."""
    rng = np.random.default_rng(1)
    for network in demo.new_networks(1, hidden, dtype):
        moved = {name: w + 0.3 * rng.standard_normal(w.shape).astype(dtype) for name, w in network.net.weights.items()}
        network.net.set_weights(**moved)
        yield network


def few_digits(dtype=np.float64, count=7):
    digits = demo.load()[1].take(slice(count))
    return digits._replace(x=digits.x.astype(dtype))


# --------------------------------------------------------------------------------------------------------- the training
def test_digits():
    (x, labels), (held_out_x, held_out_labels) = demo.load()
    assert x.shape == (8, 1437, 8) and held_out_x.shape == (8, 360, 8) and x.dtype == np.float32
    assert x.min() == 0 and x.max() == 1
    shares = np.bincount(held_out_labels) / np.bincount(np.concatenate([labels, held_out_labels]))
    assert np.abs(shares - 0.2).max() < 0.01
    np.testing.assert_array_equal(held_out_x, demo.load()[1].x)


@pytest.mark.parametrize("kind", [0, 1], ids=["GRU", "LSTM"])
def test_gradient_is_that_of_the_loss(kind):
    """Along a random direction of every weight, by central differences."""
    network, digits = list(networks())[kind], few_digits()
    rng, h = np.random.default_rng(0), 1e-6
    _, grads = network.loss_and_grads(digits)
    weights = network.net.weights
    assert grads.keys() == weights.keys()
    for name, weight in weights.items():
        direction = rng.standard_normal(weight.shape)
        sides = []
        for sign in (1, -1):
            network.net.set_weights(**weights | {name: weight + sign * h * direction})
            sides.append(network.loss_and_grads(digits)[0])
        assert abs((sides[0] - sides[1]) / (2 * h) - (grads[name] * direction).sum()) < 1e-8, name


def test_learns(result):
    """And the accuracy is what the formulas find with the trained weights."""
    assert result.ok
    values = demo.arguments(*result.networks, result.digits)
    for network, training, op in zip(result.networks, result.trainings, ("block_gru", "BlockLSTM"), strict=True):
        assert training.network == network.name
        assert training.losses[-1] < training.losses[0] / 2 and len(training.losses) == 20
        h = FORMULAS[op](**values[op]).h[-1]
        guesses = (h @ network.net.weights["1.w"] + network.net.weights["1.b"]).argmax(axis=1)
        assert training.accuracies[-1] >= 0.95
        assert training.accuracies[-1] == pytest.approx((guesses == result.digits.labels).mean(), abs=1.01 / 360)


def test_same_seed_same_figures(result, monkeypatch):
    monkeypatch.setattr(demo, "EPOCHS", 1)
    monkeypatch.setattr(demo, "check", lambda *given: None)
    first, second, other = ([t.losses for t in demo.run(seed).trainings] for seed in (3, 3, 4))
    assert first == second != other


# -------------------------------------------------------------------------------------------------------------- the ops
def test_checks_are_errors_against_the_formulas(result):
    """Of the kernels, and of the graphs on every runtime that is here, on the same arguments."""
    assert [check.op for check in result.checks] == list(OPS)
    values = demo.arguments(*result.networks, result.digits.take(slice(demo.CHECKED)))
    for check in result.checks:
        assert {"blockcell", "cpu", "reference"} <= check.worst.keys()
        module = {"ops": demo.ops, "raw_ops": raw_ops}[OPS[check.op].module]
        names = {attribute.name for attribute in OPS[check.op].attributes} & values[check.op].keys()
        session = onnx_export.Session(check.op, attrs={name: values[check.op][name] for name in names})
        exact = FORMULAS[check.op](**values[check.op])._asdict()
        for provider, op in (("blockcell", getattr(module, check.op)), ("cpu", session)):
            row, results = check.worst[provider], op(**values[check.op])._asdict()
            errors = {name: np.abs(results[name] - exact[name]).max() / np.abs(exact[name]).max() for name in exact}
            assert errors[row.output] * 2**23 == pytest.approx(row.error) and 0 < row.error <= row.bound
        assert check.worst["blockcell"].bound >= 5


def test_sensitivity():
    """Of a product whose terms cancel it is large, of one whose terms agree it is at most half an eps and the sum's."""
    ones = {"x": np.ones((1, 2), np.float32), "h_prev": np.zeros((1, 1), np.float32), "b_c": np.zeros(1, np.float32)}
    gates = {"w_ru": np.zeros((3, 2), np.float32), "b_ru": np.full(2, -20, np.float32)}  # u = 0, so h = c
    factors = {}
    for case, w_c in {"cancels": [[1000], [-999.9], [0]], "agrees": [[0.1], [0.1], [0]]}.items():
        values = ones | gates | {"w_c": np.array(w_c, np.float32)}
        factors[case] = demo.sensitivity("GRUBlockCell", values, FORMULAS["GRUBlockCell"](**values)._asdict())["c"]
    assert factors["cancels"] > 1000 and 0 < factors["agrees"] <= 1


def wrong(monkeypatch, name, factor):
    """Let an op be wrong in one entry of its first result."""
    right = getattr(raw_ops, name)

    def op(**arguments):
        results = right(**arguments)
        results[0].flat[np.abs(results[0]).argmax()] *= np.float32(factor)
        return results

    monkeypatch.setattr(raw_ops, name, op)


def wrong_graph(monkeypatch, name, factor, where="reference"):
    """Let an op be wrong in one entry of its first result on a runtime."""
    right = verification._results

    def spoilt(provider, op, *rest):
        results = [np.array(result) for result in right(provider, op, *rest)]
        if (provider, op.name) == (where, name):
            results[0].flat[np.abs(results[0]).argmax()] *= np.float32(factor)
        return results

    monkeypatch.setattr(verification, "_results", spoilt)


@pytest.mark.parametrize("provider", ["blockcell", "reference"])
def test_what_is_wrong_fails(provider, result, monkeypatch):
    """An op or a graph that is off by more than rounding, or not a number."""
    values = demo.arguments(*result.networks, result.digits.take(slice(demo.CHECKED)))["LSTMBlockCellGrad"]
    share = {"blockcell": 1, "reference": 2}[provider]
    for factor in (1, 1 + share * 2**-19, np.nan):
        with monkeypatch.context() as patch:
            if provider == "blockcell":
                wrong(patch, "LSTMBlockCellGrad", factor)
            else:
                wrong_graph(patch, "LSTMBlockCellGrad", factor)
            check = demo.check("LSTMBlockCellGrad", values, ["cpu", "reference"])
        json.dumps(check.as_dict(), allow_nan=False)
        row = check.worst.pop(provider)
        assert all(other.ok for other in check.worst.values())
        if factor == 1:
            assert row.ok
        else:
            assert not row.ok and row.output == "cs_prev_grad"
            assert np.isnan(row.error) if np.isnan(factor) else 14 < row.error / share < 18


# ---------------------------------------------------------------------------------------------------------- the command
def command(capsys, *arguments):
    status = cli.main(["demo", *arguments])
    out, err = capsys.readouterr()
    assert not err
    return status, out


@pytest.fixture
def trained(monkeypatch, result):
    """What training takes the time for is there already."""
    by_name = {training.network: training for training in result.trainings}
    monkeypatch.setattr(demo, "train", lambda network, *rest: by_name[network.name])


@pytest.fixture
def no_picture(monkeypatch):
    """What is drawn `test_command` shows; drawing takes longer than all else."""
    monkeypatch.setattr(demo, "draw", lambda result, path: None)


@pytest.mark.usefixtures("trained")
def test_command(capsys, tmp_path):
    path = tmp_path / "digits.png"
    status, out = command(capsys, "--json", "--output", str(path))
    document = json.loads(out)
    assert status == 0 and document["ok"] is True
    assert [network["network"] for network in document["networks"]] == ["GRU", "LSTM"]
    for network in document["networks"]:
        assert len(network["losses"]) == len(network["accuracies"]) == 20
        assert network["ok"] and network["accuracies"][-1] >= document["required_accuracy"] == 0.95
    assert [op["op"] for op in document["ops"]] == list(OPS)
    figures = {"error_eps", "output", "bound_eps", "ok"}
    for op in document["ops"]:
        assert set(op) == figures | {"op", "runtimes"}
        assert {"cpu", "reference"} <= op["runtimes"].keys() and all(set(r) == figures for r in op["runtimes"].values())
    assert document["machine"]["level"] and document["picture"] == str(path)
    picture = matplotlib.image.imread(path)
    assert path.read_bytes().startswith(b"\x89PNG") and picture.shape[0] > 800 and picture.std() > 0.1


@pytest.mark.usefixtures("no_picture")
def test_table(capsys, tmp_path, result, monkeypatch):
    monkeypatch.setattr(demo, "run", lambda *options: result)
    status, out = command(capsys, "--output", str(tmp_path / "a.png"))
    assert status == 0 and "FAILED" not in out and "\x1b" not in out
    for check in result.checks:
        (line,) = (line.split() for line in out.splitlines() if line.split()[:1] == [check.op])
        assert [line[1], *line[4:-1]] == [f"{row.error:.2f}" for row in check.worst.values()]
    assert out.endswith("Both networks and all ops keep their bounds.\n")


@pytest.mark.usefixtures("no_picture", "trained")
def test_a_broken_bound_is_status_1(capsys, tmp_path, monkeypatch):
    wrong(monkeypatch, "LSTMBlockCell", 1 + 1e-5)
    wrong_graph(monkeypatch, "block_gru", 1 + 1e-4)
    status, out = command(capsys, "--output", str(tmp_path / "a.png"))
    assert status == 1 and out.endswith("FAILED: LSTMBlockCell, block_gru on onnx.reference\n")
    verdicts = {line.split()[0]: line.split()[-1] for line in out.splitlines() if line.endswith(("ok", "FAILED"))}
    assert {name for name in OPS if verdicts[name] == "FAILED"} == {"LSTMBlockCell", "block_gru"}


@pytest.mark.usefixtures("no_picture", "trained")
def test_without_onnx(capsys, tmp_path, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnx" else find_spec(name))
    status, out = command(capsys, "--output", str(tmp_path / "a.png"))
    assert status == 0 and "The ONNX graphs were not run: pip install onnx onnxruntime\n" in out
    assert "reference" not in out


@pytest.mark.usefixtures("no_picture")
def test_a_low_accuracy_is_status_1(capsys, tmp_path, monkeypatch, result):
    low = dataclasses.replace(result.trainings[0], accuracies=[*result.trainings[0].accuracies[:-1], 0.949])
    result = dataclasses.replace(result, trainings=[low, result.trainings[1]])
    monkeypatch.setattr(demo, "run", lambda *options: result)
    status, out = command(capsys, "--json", "--output", str(tmp_path / "a.png"))
    document = json.loads(out)
    assert status == 1 and not document["ok"] and [network["ok"] for network in document["networks"]] == [False, True]


@pytest.mark.peers
def test_beside_tensorflow():
    """On trained weights every op is about as far off as TensorFlow's: the mean over six seeds is within a quarter.

    Single cases differ either way, by 1.6 times and above 5 eps too: there the larger of 5 eps and TensorFlow's own
    error does not bound them.
    """
    tf = pytest.importorskip("tensorflow")
    held_out = demo.load()[1]
    ratios = {name: [] for name in raw_ops.__all__}
    for seed in range(6):
        values = demo.arguments(*demo.run(seed).networks, held_out.take(slice(demo.CHECKED)))
        for name, ratios_of_op in ratios.items():
            exact = FORMULAS[name](**values[name])
            ours, theirs = (
                max(
                    demo.error_in_eps(np.asarray(output), reference, demo.EPS)
                    for output, reference in zip(op(**values[name]), exact, strict=True)
                )
                for op in (getattr(raw_ops, name), getattr(tf.raw_ops, name))
            )
            print(f"seed {seed}, {name}: {ours:.2f} eps, TensorFlow {theirs:.2f}")
            ratios_of_op.append(ours / theirs)
    means = {name: np.exp(np.log(ratios_of_op).mean()) for name, ratios_of_op in ratios.items()}
    assert all(mean <= 1.25 for mean in means.values()), means
