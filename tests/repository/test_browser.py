"""The page of examples/browser in a real browser, a Chromium without a window: `pytest -m browser`."""

from __future__ import annotations

import importlib.util
import re

import numpy as np
import pytest

import blockcell
from blockcell import LSTM, Dense, Stack

pytestmark = pytest.mark.browser
pytest.importorskip("playwright")

from browser import DIGITS, NARROW, SOURCES, WIDE, chromium, draw, name, opened, served  # noqa: E402

from blockcell.command import demo  # noqa: E402
from onnx_export import TrainingSession  # noqa: E402

MINUTES = 240_000  # milliseconds, for a busy machine, and a WebGPU that computes on the CPU

OPEN = """
const [{ Network }, { batch, parse }, { read }] =
  await Promise.all(["model", "digits", "safetensors"].map((name) => import(`./${name}.js`)));
const digits = await (await fetch("digits.json")).json();
const [practice, heldOut] = [parse(digits.practice), parse(digits.held_out)];
const open = async (name, provider) => Network.open(provider, read(await (await fetch(name)).arrayBuffer()));
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    spec = importlib.util.spec_from_file_location("make_page", SOURCES / "make_page.py")
    make_page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_page)
    folder = tmp_path_factory.mktemp("page")
    make_page.build(folder)
    return folder


@pytest.fixture(scope="module")
def address(built):
    with served(built) as address_of_page:
        yield address_of_page


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser_of_tests:
        yield browser_of_tests


@pytest.fixture
def page(browser, address):
    """Of no other origin does the page want anything, and nothing goes wrong in it."""
    context = browser.new_context(viewport=WIDE, reduced_motion="reduce")
    new_page = context.new_page()
    new_page.set_default_timeout(MINUTES)
    asked, wrong = [], []
    new_page.on("request", lambda request: asked.append(request.url))
    new_page.on("pageerror", lambda error: wrong.append(str(error)))
    new_page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    yield opened(new_page, address)
    context.close()
    assert len(asked) > 10
    assert [url for url in asked if not url.startswith((address, "blob:", "data:"))] == []
    assert wrong == []


def guess(page):
    """What it reads, and how sure it is in percent."""
    match = re.fullmatch(r"It reads\s*(\d)\s*and is (\d+) % sure", page.locator("#verdict").inner_text())
    return int(match[1]), int(match[2])


def number(page, part):
    return float(page.locator(f"#{part}").inner_text().removesuffix(" %"))


def heights(page, curve):
    """Of a curve's points, downwards, in pixels."""
    points = page.locator(f"#{curve} .curve").get_attribute("points").split()
    return [float(point.split(",")[1]) for point in points]


# ------------------------------------------------------------------------------------------------- reading and learning
def test_it_reads_what_is_drawn(page):
    read = []
    for strokes in DIGITS:
        page.get_by_role("button", name="Clear").click()
        draw(page, strokes)
        page.wait_for_function("document.querySelectorAll('.row.read').length === 8")
        page.wait_for_timeout(100)
        read.append(guess(page)[0])
    assert read == [*range(10)]


def test_it_learns_ten_examples(page):
    """Of one who writes everything mirrored: it reads most of that after each was named once, and all after twice."""
    mirrored = [[[(1 - x, y) for x, y in stroke] for stroke in strokes] for strokes in DIGITS]
    assert number(page, "before") > 95
    right = []
    for lesson in range(20):
        draw(page, mirrored[lesson % 10])  # a drawing that was named is cleared by this
        assert page.locator("#pad polyline").count() == len(mirrored[lesson % 10])
        page.wait_for_timeout(200)
        right.append(guess(page)[0] == lesson % 10)
        assert "now it is" in name(page, lesson % 10)
    assert number(page, "steps") == 200 and number(page, "drawings") == 20
    assert sum(right[:10]) <= 6 and sum(right[10:]) >= 9
    first, second = np.split(np.array(heights(page, "loss")), 2)
    assert second.mean() > first.mean()  # heights are downwards: the loss fell
    assert number(page, "now") > 90  # it has not forgotten how others write


def test_it_begins_anew(page):
    """The loss falls and the accuracy rises while it practises; then it has the weights that it came with again."""
    came = number(page, "before")
    page.get_by_role("button", name="Forget everything").click()
    page.get_by_text("It knows nothing now").wait_for()
    assert number(page, "before") < 30 and number(page, "steps") == 0
    page.get_by_role("button", name="Practise 100 steps").click()
    page.get_by_text("Practised 100 steps.").wait_for()
    assert number(page, "now") > 60 and number(page, "steps") == 100
    loss = heights(page, "loss")
    assert len(loss) == 100 and np.mean(loss[-10:]) > np.mean(loss[:10]) + 30
    page.get_by_role("button", name="Restore").click()
    page.get_by_text("It is as it came.").wait_for()
    assert number(page, "now") == number(page, "before") == came


@pytest.mark.parametrize("provider", ["wasm", "webgpu"])
def test_numbers_are_those_of_onnxruntime(page, built, provider):
    """Against onnxruntime's CPU in Python: the losses of a hundred steps, on WebGPU of ten; the weights after ten, as
    training amplifies the roundings; and the beliefs with the browser's weights at the end."""
    if provider == "webgpu" and not page.evaluate("navigator.gpu?.requestAdapter().then(Boolean)"):
        pytest.skip("this browser has no WebGPU")
    steps, rows, rate = 100 if provider == "wasm" else 10, 32, 0.01
    code = """
    const network = await open("untrained.safetensors", provider);
    const plain = async () => {
      const { weights } = await network.get();
      return Object.fromEntries(Object.entries(weights).map(([name, { data }]) => [name, Array.from(data)]));
    };
    const losses = [];
    let early;
    for (let k = 0; k < steps; k++) {
      const some = Array.from({ length: rows }, (_, i) => practice[(k * rows + i) % practice.length]);
      losses.push(await network.learn(batch(some), rate));
      if (k === 9) early = await plain();
    }
    const beliefs = await network.read(batch(heldOut.slice(0, 40)).x);
    return { losses, early, late: await plain(), beliefs: Array.from(beliefs) };"""
    arguments = {"provider": provider, "steps": steps, "rows": rows, "rate": rate}
    results = page.evaluate(f"async ({{ {', '.join(arguments)} }}) => {{ {OPEN} {code} }}", arguments)

    digits, held_out = demo.load()
    session = TrainingSession(built / "learn.onnx", blockcell.load(built / "untrained.safetensors"))
    losses = []
    for k in range(steps):
        some = digits.take(np.arange(k * rows, (k + 1) * rows) % len(digits.labels))
        target = np.broadcast_to(some.labels, (8, len(some.labels)))
        losses.append(session(x=some.x, target=target, learning_rate=rate).loss)
        if k == 9:
            early = session.weights
    network = demo.Classifier(LSTM.init(8, 64, seed=0, use_peephole=True), np.random.default_rng(0))
    network.net = session.layer()
    shapes = {name: array.shape for name, array in early.items()}
    network.net.set_weights(**{name: np.float32(results["late"][name]).reshape(shapes[name]) for name in shapes})
    np.testing.assert_allclose(results["losses"], losses, rtol=0, atol=1e-4)
    beliefs = network.predict(held_out.take(slice(40)).x)
    np.testing.assert_allclose(np.reshape(results["beliefs"], beliefs.shape), beliefs, rtol=0, atol=1e-4)
    for key, array in early.items():
        np.testing.assert_allclose(np.reshape(results["early"][key], array.shape), array, rtol=0, atol=1e-4)
    assert losses[-1] < losses[0] - 0.1


def test_webgpu_is_a_choice(page):
    """It goes on from the same weights, and reads and learns."""
    choice = page.get_by_label("GPU, WebGPU")
    page.wait_for_timeout(500)
    if choice.is_disabled():
        pytest.skip("this browser has no WebGPU")
    draw(page, DIGITS[3])
    choice.check()
    page.get_by_text("Ready.").wait_for()
    assert guess(page)[0] == 3
    assert "now it is" in name(page, 8)
    assert number(page, "steps") == 10
    page.get_by_label("CPU, WebAssembly").check()
    page.get_by_text("Ready.").wait_for()
    assert guess(page)[0] == 8


# ------------------------------------------------------------------------------------------------------------ the files
def saved(page, tmp_path):
    with page.expect_download() as download:
        page.get_by_role("button", name="Save weights").click()
    path = tmp_path / download.value.suggested_filename
    download.value.save_as(path)
    return path


def choose(page, path):
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Load weights").click()
    chooser.value.set_files(path)


def test_weights_go_to_a_file_and_back(page, built, tmp_path):
    came = blockcell.load(built / "trained.safetensors")
    same = blockcell.load(saved(page, tmp_path))
    assert repr(same) == repr(came)
    assert {key: array.tobytes() for key, array in same.weights.items()} == {
        key: array.tobytes() for key, array in came.weights.items()
    }

    draw(page, DIGITS[1])
    name(page, 7)
    learned = blockcell.load(saved(page, tmp_path))
    assert not np.array_equal(learned.weights["0.w"], came.weights["0.w"])
    _, held_out = demo.load()
    right = (learned(held_out.x)[0][-1].argmax(axis=1) == held_out.labels).mean()
    assert number(page, "now") == pytest.approx(100 * right, abs=0.06)  # of what it shows the last digit

    page.get_by_role("button", name="Restore").click()
    page.get_by_text("It is as it came.").wait_for()
    assert guess(page)[0] == 1
    learned.save(tmp_path / "again.safetensors")
    choose(page, tmp_path / "again.safetensors")
    page.get_by_text("Loaded again.safetensors.").wait_for()
    assert guess(page)[0] == 7
    assert number(page, "before") == pytest.approx(100 * right, abs=0.06)


def test_what_is_no_such_file_changes_nothing(page, tmp_path):
    draw(page, DIGITS[3])
    before = guess(page)
    Stack([LSTM.init(8, 32, seed=1), Dense.init(32, 10, seed=2)]).save(tmp_path / "small.safetensors")
    (tmp_path / "text.safetensors").write_text("no weights")
    for file, message in (("small", "its layer is .*; expected .*"), ("text", "it is no .safetensors file, .*")):
        choose(page, tmp_path / f"{file}.safetensors")
        page.get_by_text(re.compile(f"{file}.safetensors cannot be loaded: {message}")).wait_for()
    assert guess(page) == before
    assert "now it is" in name(page, 3)


# ----------------------------------------------------------------------------------------- keys, fingers, small screens
def test_with_the_keyboard_alone(page):
    """An angular 0: to the area, to the left, with the pen down right, down, left and up; then it is named."""
    for _ in range(10):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == "pad":
            break
    else:
        pytest.fail("Tab does not lead to the area")

    def press(*keys):
        for key in keys:
            page.keyboard.press(key)

    press("Space", *["ArrowLeft"] * 2, "Space")
    assert page.locator("#pad polyline").count() == 1
    press("Backspace")
    assert page.locator("#pad polyline").count() == 0
    press("Space", *["ArrowRight"] * 4, *["ArrowDown"] * 8, *["ArrowLeft"] * 4, *["ArrowUp"] * 8, "Space")
    page.wait_for_timeout(200)
    assert guess(page)[0] == 0
    press("1")
    page.get_by_text("sure that this is a 1;").wait_for()
    assert number(page, "drawings") == 1
    press("Escape")
    assert page.locator("#pad polyline").count() == 0
    press("2")
    page.get_by_text("Draw a digit first.").wait_for()


def test_with_a_finger_on_a_narrow_screen(browser, address):
    """The finger draws and does not scroll; nothing is wider than the screen."""
    context = browser.new_context(viewport=NARROW, has_touch=True, is_mobile=True, reduced_motion="reduce")
    page = opened(context.new_page(), address)
    box = page.locator("#pad").bounding_box()
    touch = context.new_cdp_session(page)

    def send(kind, *points):
        at = [{"x": box["x"] + box["width"] * x, "y": box["y"] + box["height"] * y} for x, y in points]
        touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": at})

    for first, *others in DIGITS[7]:
        send("touchStart", first)
        corners = [first, *others]
        for (x1, y1), (x2, y2) in zip(corners, others, strict=False):
            for k in range(1, 9):
                send("touchMove", (x1 + k / 8 * (x2 - x1), y1 + k / 8 * (y2 - y1)))
        send("touchEnd")
    page.wait_for_timeout(200)
    assert page.evaluate("scrollY") == 0
    assert page.locator("#pad polyline").count() == 2
    assert guess(page)[0] == 7
    assert page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]
    for button in page.get_by_role("button").all():
        size = button.bounding_box()
        assert size["width"] >= 44 and size["height"] >= 44  # of a finger
    context.close()
