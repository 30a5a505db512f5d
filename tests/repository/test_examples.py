"""The examples run, at reduced size, and learn; the sunspots' forecasts know nothing of what comes after."""

import importlib.util
import re
import shutil
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from fresh import run

from blockcell import GRU, Dense, Scorer, Stack, loss

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


@pytest.fixture
def keyword(monkeypatch):
    """The example with a language of three tones a word, which it takes no program to speak."""

    def tones(word, voice, speed, pitch):
        count = int(0.1 * keyword.RATE * 160 / speed)
        hertz = np.random.default_rng(list(word.encode())).uniform(300, 5000, 3) * (0.9 + pitch / 500)
        return np.sin(np.cumsum(np.repeat(hertz, count)) * 2 * np.pi / keyword.RATE).astype(np.float32)

    keyword = example("keyword_spotting")
    monkeypatch.setattr(keyword, "spoken", tones)
    return keyword


def test_keyword(keyword, tmp_path):
    lines = []
    spoken, heard, wrong = keyword.main(
        tmp_path / "keyword.png", sequences=200, steps=80, new_voices=["anybody"], seconds=60, report=lines.append
    )
    assert spoken >= 5 and heard == spoken and wrong <= 1
    assert lines[-2] == f"new voices: heard {heard} of {spoken}, {wrong} false alarms in 1 minutes"
    assert matplotlib.image.imread(tmp_path / "keyword.png").std() > 0.1


def test_keyword_is_where_it_is_said_to_be(keyword):
    """And the bands are those of its tones."""
    silent, tone = np.zeros(keyword.RATE, np.float32), np.sin(np.arange(keyword.RATE) * 2 * np.pi * 1000 / keyword.RATE)
    assert (keyword.features(silent) == np.float32(np.log(1e-3) / 3)).all()
    band = np.flatnonzero(keyword.TRIANGLES[:, round(1000 * keyword.WINDOW / keyword.RATE)])
    assert set(keyword.features(tone.astype(np.float32)).argmax(axis=1)) <= {*band}
    rng = np.random.default_rng(0)
    x, words = keyword.sequence(600, *keyword.vocabulary(["anybody"], 1, rng), rng)
    loud = x.max(axis=1) > 0
    assert len(keyword.spans(words)) > 0 and len(words) > len(keyword.spans(words))
    for _, first, end in words:
        assert loud[first + 2 : end - 2].all() and not loud[end + 4]


def test_keyword_is_heard_once(keyword):
    belief = np.zeros(300, np.float32)
    belief[50:80], belief[100:104], belief[200:205] = 0.9, 0.9, 0.6
    hops = keyword.heard(belief)
    np.testing.assert_array_equal(hops, [54, 204])
    words = [("computer", 20, 52), ("water", 90, 110), ("computer", 240, 280)]
    assert keyword.score(words, hops) == (2, 1, 1)


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


def test_scores_are_those_of_one_line_alone():
    scoring, texts = example("scoring"), ["ab", "import numpy as np", "~" * 40]
    net = Stack([GRU.init(128, 16, seed=0), Dense.init(16, 128, seed=1)])
    for text, bits in zip(texts, scoring.score(Scorer(net, output="all"), texts), strict=True):
        codes = np.frombuffer(text.encode(), np.uint8).astype(int)
        logits, _ = net(np.eye(128, dtype=np.float32)[codes[:-1], None])
        mean, _ = loss.softmax_cross_entropy(logits[:, 0], codes[1:])
        assert bits == pytest.approx(mean / np.log(2), rel=1e-6)


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
def test_cartpole_is_the_one_of_1983(cartpole):
    """The equations of Barto, Sutton and Anderson, without friction, for one cart after the other."""
    g = np.random.default_rng(5)
    carts = cartpole.Carts(g)
    for _ in range(60):
        before, push = carts.state.copy(), g.random(cartpole.CARTS) < 0.5
        carts.step(push)
        for k in np.flatnonzero(~carts.start):
            x, v, angle, w = before[:, k]
            force, total, length = 10.0 if push[k] else -10.0, 1.0 + 0.1, 0.5
            inner = (-force - 0.1 * length * w**2 * np.sin(angle)) / total
            d_w = (9.8 * np.sin(angle) + np.cos(angle) * inner) / (length * (4 / 3 - 0.1 * np.cos(angle) ** 2 / total))
            d_v = (force + 0.1 * length * (w**2 * np.sin(angle) - d_w * np.cos(angle))) / total
            expected = [x + 0.02 * v, v + 0.02 * d_v, angle + 0.02 * w, w + 0.02 * d_w]
            np.testing.assert_allclose(carts.state[:, k], expected, rtol=1e-12)
            assert abs(expected[0]) <= 2.4 and abs(expected[2]) <= np.pi / 15
        assert (abs(carts.state[:, carts.start]) <= 0.05).all()
    assert len(carts.finished) > cartpole.CARTS and max(carts.finished) < 60


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


def test_live_compares():
    live = example("live")
    whole = np.zeros((3, 2), np.float32)
    assert np.array_equal(whole, live.stream_by_steps(Stack([Dense(np.zeros((4, 2)), np.zeros(2))]), np.zeros((3, 4))))
    network = Stack([GRU.init(4, 2, seed=0)])
    x = np.random.default_rng(0).standard_normal((9, 4)).astype(np.float32)
    expected = network(x[:, None])[0][:, 0]
    assert expected.std() > 0 and np.array_equal(live.stream_by_steps(network, x), expected)
    (served,) = live.serve_packets(network, [x], np.random.default_rng(1))
    assert np.array_equal(served, expected)


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
