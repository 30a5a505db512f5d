"""The examples run, at reduced size, and learn; the sunspots' forecasts know nothing of what comes after."""

import importlib.util
import re
import shutil
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from fresh import run

HAS_ONNXRUNTIME = importlib.util.find_spec("onnxruntime") is not None
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lines_of(name, *arguments, by=(), **environment):
    """What an example prints in a process of its own, where it may start others."""
    done = run([*by, str(EXAMPLES / f"{name}.py"), *arguments], 5, environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_adding():
    adding = example("adding")
    x, target = adding.sequences(np.random.default_rng(0), 20, 50)
    halves = x.reshape(2, 10, 50, 2)
    assert (halves[..., 1].sum(axis=1) == 1).all()
    np.testing.assert_array_equal(target[:, 0], halves.prod(axis=-1).sum(axis=(0, 1)))
    lines = []
    mse = adding.train(T=10, steps=500, seed=0, report=lines.append)
    assert mse < 0.02  # always predicting 1 gives 0.167
    assert len(lines) == 10 and lines[-1].endswith(f"{mse:.5f}")


def test_sunspots(tmp_path):
    sunspots, lines = example("sunspots"), []
    errors = sunspots.main(tmp_path / "sunspots.png", seed=0, report=lines.append)
    numbers = sunspots.sunspots.load_pandas().data["SUNACTIVITY"].to_numpy()
    for lead in (1, 11):
        changes = numbers[249 + lead : 298 + lead] - numbers[249:298]  # 1949 is number 249
        assert errors["persistence"][lead - 1] == pytest.approx(np.sqrt(np.mean(changes**2)), rel=1e-5)
    assert 15 < errors["LSTM"][0] < 18 < errors["autoregression"][0] + 1 < 20
    assert errors["LSTM"].mean() < 0.9 * errors["autoregression"].mean()
    assert any(line.startswith("LSTM ") and f"{errors['LSTM'][0]:.1f}" in line for line in lines)
    assert matplotlib.image.imread(tmp_path / "sunspots.png").std() > 0.1


def test_sunspots_forecasts_do_not_look_ahead():
    sunspots = example("sunspots")
    network, rng = sunspots.new_network(0), np.random.default_rng(0)
    series = rng.standard_normal((60, 1)).astype(np.float32)
    sunspots.train(network, series, np.float32(-2), 2, rng, lambda line: None)
    whole = sunspots.forecasts(network, series, 30, 5)
    assert whole.shape == (60 - 5 - 29, 5)
    changed = np.concatenate([series[:40], series[40:] + 1])
    known = 40 - 29  # forecasts of years up to the 40th
    np.testing.assert_array_equal(sunspots.forecasts(network, changed, 30, 5)[:known], whole[:known])
    assert not (sunspots.forecasts(network, changed, 30, 5)[known:] == whole[known:]).any()
    change, _ = network(series[:, None])  # and one call over all years says the same of the next
    expected = (series + change[:, 0])[29:55, 0]
    np.testing.assert_allclose(whole[:, 0], expected, rtol=1e-6)


def test_keyword(monkeypatch, tmp_path):
    """With a language of three tones a word, which it takes no program to speak."""
    keyword = example("keyword_spotting")

    def tones(word, voice, speed, pitch):
        count = int(0.1 * keyword.RATE * 160 / speed)
        hertz = np.random.default_rng(list(word.encode())).uniform(300, 5000, 3) * (0.9 + pitch / 500)
        return np.sin(np.cumsum(np.repeat(hertz, count)) * 2 * np.pi / keyword.RATE).astype(np.float32)

    monkeypatch.setattr(keyword, "spoken", tones)
    lines = []
    spoken, heard, wrong = keyword.main(
        tmp_path / "keyword.png", sequences=200, steps=80, new_voices=["anybody"], seconds=60, report=lines.append
    )
    assert spoken >= 5 and heard == spoken and wrong <= 1
    assert lines[-2] == f"new voices: heard {heard} of {spoken}, {wrong} false alarms in 1 minutes"
    assert matplotlib.image.imread(tmp_path / "keyword.png").std() > 0.1


@pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="needs espeak-ng")
def test_espeak_speaks():
    keyword = example("keyword_spotting")
    short, long = (keyword.spoken(word, "en-us+m1", 150, 50) for word in ("stop", "computer"))
    assert 0.1 * keyword.RATE < len(short) < len(long) < keyword.RATE and 0.1 < abs(long).max() <= 1


def test_scoring():
    *rates, last = lines_of("scoring", "300", by=["-W", "error"])
    lines = [re.fullmatch(r"(this|\d+) process.*, (\d+) threads?.* [1-9]\d+ lines per second", line) for line in rates]
    assert [who[1] for who in lines] == ["this", "this", lines[1][2]]  # as many processes as threads
    assert re.fullmatch(r"\d\.\d\d bits per character. All scores equal, bit for bit", last)


def test_sessions():
    """Also beside onnxruntime, where it is installed."""
    first, *_, last = lines = lines_of("sessions", "--quick", by=["-W", "error"])
    assert re.fullmatch(r"40 sessions, \d+ packets of 10 steps", first)
    servers = [line for line in lines if re.fullmatch(r"\S.*( +\d+\.\d){4}", line)]
    assert [line.split("  ")[0] for line in servers] == [
        "blockcell.Sessions",
        *(["onnxruntime, one at a time", "onnxruntime, gathered by numpy"] * HAS_ONNXRUNTIME),
    ]
    assert last == "Sessions: the same bits as each session alone"


@pytest.mark.peers
def test_ddp():
    """Two processes train as one does, but for rounding."""
    pytest.importorskip("torch")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    runs = []
    for processes, by in ((1, []), (1, [*torchrun, "1"]), (2, [*torchrun, "2"])):
        compared, *epochs = lines_of("ddp", "3", by=by, OMP_NUM_THREADS="1")  # PyTorch's wait busily for a free CPU
        count, difference, largest = re.fullmatch(
            r"processes: (\d);.* by (\S+), largest entry (\S+)", compared
        ).groups()
        assert int(count) == processes and float(difference) <= 1e-6 * float(largest)
        pattern = r"epoch +\d, +\S+ s: loss (\S+), accuracy on new digits (\S+)"
        runs.append(np.array([re.fullmatch(pattern, line).groups() for line in epochs], float))
        np.testing.assert_allclose(runs[-1], runs[0], atol=0.01)
    losses, accuracies = runs[0].T
    assert len(losses) == 3 and losses[-1] < 0.7 * losses[0] and accuracies[-1] > 0.6


@pytest.fixture
def cartpole():
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield example("cartpole")
    torch.set_num_threads(before)


@pytest.mark.peers
def test_cartpole(cartpole):
    """Whole rollouts and the loop are the same training; and it learns what cannot be done without memory."""
    lines = []
    episodes = cartpole.main(30, report=lines.append)
    pattern = r"\S.* *: loss (\S+) to (\S+), [\d,]+ steps a second of the update"
    loop, call = (np.array(re.fullmatch(pattern, line).groups(), float) for line in lines[:2])
    np.testing.assert_allclose(call, loop, atol=2e-6)  # they are printed with six digits
    assert re.fullmatch(r"\S+ times as fast; the same \d+ episodes: True", lines[2])
    assert np.mean(episodes[:100]) < 30 and np.mean(episodes[-30:]) > 100


def test_live():
    """A model without state inputs, as a stream and in sessions; `array_equal` in it compares all bits."""
    lines = lines_of("live")
    assert lines == [
        f"{name}: 12 of 12 sequences have the bits of the whole sequence"
        for name in ("a stream, step by step", "Sessions, packet by packet")
    ]


@pytest.mark.peers
def test_vad():
    """The probabilities are the package's own; a lost state or context would be seen."""
    pytest.importorskip("silero_vad")
    vad = example("vad")
    rng = np.random.default_rng(0)
    sound = vad.speak() if shutil.which("espeak-ng") else rng.standard_normal(3 * vad.RATE).astype(np.float32) / 10
    lines = []
    assert vad.main(sound, [1, 3], report=lines.append) < 1e-5
    assert len(lines) == 5
    model, chunks = vad.onnx.load(vad.model_path()), sound[: 80 * vad.CHUNK].reshape(-1, vad.CHUNK)
    detector = vad.Detector(model)
    one, other = detector.open(), detector.open()
    results = []
    for k, chunk in enumerate(chunks):
        results.append([*detector.step({one: chunk, other: chunk}).values()])
        if k % 10 == 9:
            detector._contexts[other][:] = 0
    a, b = np.transpose(results)
    assert np.abs(a - b).max() > 1e-4
    detector.close(one)
    assert [*detector.step({other: chunks[0]})] == [other]
