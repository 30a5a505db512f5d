"""The modules of examples/browser that need no browser, under Node."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import struct
import subprocess
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import blockcell
from blockcell import GRU, LSTM, Dense, Stack

SOURCES = Path(__file__).resolve().parents[2] / "examples" / "browser"
FINE, PEN = 32, 2.6  # a digit is drawn on so many points a side, with a pen of this radius

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="needs node")


def node(code, **given):
    """What a module prints as JSON; it finds what is given in `given`."""
    imports = f'import {{ readFileSync, writeFileSync }} from "node:fs"; process.chdir({json.dumps(str(SOURCES))});'
    text = f"{imports}\nconst given = {json.dumps(given)};\n{code}"
    done = subprocess.run(
        ["node", "--input-type=module"], input=text, cwd=SOURCES, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# --------------------------------------------------------------------------------------------------------------- files
COPY = """
import { read, write } from "./safetensors.js";
const bytes = readFileSync(given.from);
const saved = read(bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length));
writeFileSync(given.to, new Uint8Array(write(saved)));
const sums = Object.entries(saved.weights).map(([name, { shape, data }]) => [name, [shape, data.at(-1)]]);
console.log(JSON.stringify({ layer: saved.layer, weights: Object.fromEntries(sums) }));
"""
READ = """
import { checkSame, read } from "./safetensors.js";
const message = (bytes) => {
  try {
    const saved = read(Uint8Array.from(bytes).buffer);
    if (given.like) checkSame(saved, given.like);
    return "read";
  } catch (error) {
    return error.message;
  }
};
console.log(JSON.stringify(given.files.map(message)));
"""


def net(**options):
    return Stack([LSTM.init(3, 5, seed=1, use_peephole=True, **options), Dense.init(5, 4, seed=2)])


@pytest.mark.parametrize(
    "layer", [net(forget_bias=1.0), net(cell_clip=2.5), GRU.init(2, 3, seed=3)], ids=["peephole", "clip", "gru"]
)
def test_files_go_through_the_page(layer, tmp_path):
    """What `save` writes is read and written again, and `load` reads that: the same layer, to the last bit."""
    first, second = tmp_path / "first.safetensors", tmp_path / "second.safetensors"
    layer.save(first)
    arrays = node(COPY, **{"from": str(first), "to": str(second)})
    assert arrays["weights"] == {name: [[*array.shape], array.flat[-1]] for name, array in layer.weights.items()}
    again = blockcell.load(second)
    assert repr(again) == repr(layer)
    assert {name: array.tobytes() for name, array in again.weights.items()} == {
        name: array.tobytes() for name, array in layer.weights.items()
    }


def test_a_file_of_another_layer_is_refused(tmp_path):
    def saved(layer):
        layer.save(tmp_path / "layer.safetensors")
        return [*(tmp_path / "layer.safetensors").read_bytes()]

    layer = net()
    shapes = {name: {"shape": [*array.shape]} for name, array in layer.weights.items()}
    cell = {"type": "LSTM", "gate_order": "icfo", "cell_clip": 0, "forget_bias": 0}  # in another order
    like = {"layer": {"layers": [cell, {"type": "Dense", "activation": None}], "type": "Stack"}, "weights": shapes}
    wider = Stack([LSTM.init(4, 5, seed=1, use_peephole=True), Dense.init(5, 4, seed=2)])
    plain = Stack([LSTM.init(3, 5, seed=1), Dense.init(5, 4, seed=2)])
    double = Dense.init(3, 5, seed=1, dtype="float64")
    files = [saved(layer_to_save) for layer_to_save in (layer, wider, plain, double, net(forget_bias=1.0))]
    *messages, last = node(READ, files=files, like=like)
    assert messages == [
        "read",
        "its 0.w is [9, 20]; expected [8, 20]",
        "its 0.wci is missing; expected [5]",
        "its w has dtype F64; expected F32",
    ]
    assert re.fullmatch('its layer is .*"forget_bias":1,.*; expected .*"forget_bias":0,.*', last)


def test_damaged_files_are_refused(tmp_path):
    path = tmp_path / "layer.safetensors"
    net().save(path)
    content = [*path.read_bytes()]
    start = 8 + struct.unpack("<Q", bytes(content[:8]))[0]
    newer = bytes(content).replace(b'"version\\": 1', b'"version\\": 2')
    unknown = bytes(content).replace(b'"blockcell": "', b'"blackcell": "')
    assert bytes(content) not in (newer, unknown)
    other = "it is no .safetensors file, or only a part of one"
    expected = [
        ([], other),
        (content[: start - 1], other),
        ([255] * 8 + content[8:], other),
        (content[:-1], "its 1.b is damaged or cut off"),
        ([*content[:8], ord("["), *content[9:]], "its header is damaged: it is no JSON"),
        ([*newer], "its format version is 2; expected 1, plain float32"),
        ([*unknown], "it has no layer of blockcell"),
    ]
    files, messages = zip(*expected, strict=True)
    assert node(READ, files=files) == [*messages]


# -------------------------------------------------------------------------------------------------------------- digits
DIGITS_OF = """
import { digitOf } from "./drawing.js";
const strokes = (drawing) => drawing.map((stroke) => stroke.map(([x, y]) => ({ x, y })));
console.log(JSON.stringify(given.drawings.map((drawing) => Array.from(digitOf(strokes(drawing))))));
"""


def digits_of(*drawings):
    return np.array(node(DIGITS_OF, drawings=drawings)).reshape(-1, 8, 8)


def drawn(strokes):
    """The same, by sampling the strokes densely."""
    points = np.concatenate([np.array(stroke, float) for stroke in strokes])
    low, high = points.min(axis=0), points.max(axis=0)
    scale = (FINE - 2 * PEN) / max(*(high - low), 0.2)
    grid = np.stack(np.meshgrid(np.arange(FINE), np.arange(FINE)), axis=-1) + 0.5
    inked = np.zeros((FINE, FINE), bool)
    for stroke in strokes:
        placed = FINE / 2 + scale * (np.array(stroke, float) - (low + high) / 2)
        parts = [np.linspace(a, b, 501) for a, b in zip(placed, [*placed[1:], placed[-1]], strict=True)]
        for part in parts:
            inked |= (np.hypot(*np.moveaxis(grid[:, :, None] - part, -1, 0)) <= PEN).any(axis=-1)
    return inked.reshape(8, 4, 8, 4).mean(axis=(1, 3))


def test_a_drawing_becomes_a_digit():
    """Of any form, wherever it stands; a dot is no larger than the pen, and nothing is no dot."""
    rng = np.random.default_rng(0)
    drawings = [[rng.uniform(0, 1, (n, 2)).tolist() for n in (1, 4, 7)] for _ in range(4)]
    drawings += [[[[0.5, 0.1], [0.5, 0.9]]], [[[0.3, 0.8]]]]
    *digits, nothing = digits_of(*drawings, [])
    for digit, drawing in zip(digits, drawings, strict=True):
        # a point just at the pen's edge may fall on either side: one of the 16 in a block
        assert np.abs(digit - drawn(drawing)).max() <= 1 / 16
        assert np.abs(digit - drawn(drawing)).sum() <= 3 / 16
    assert not nothing.any()


def module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module_of_page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module_of_page)
    return module_of_page


def test_the_digits_that_ship_are_those_of_the_demo():
    pytest.importorskip("onnxruntime")
    from blockcell.command import demo

    _, held_out = demo.load()
    code = """
    import { batch, parse } from "./digits.js";
    const { x, labels } = batch(parse(given));
    console.log(JSON.stringify({ x: Array.from(x), labels }));
    """
    batch_read = node(code, **module(SOURCES / "make_page.py").as_text(held_out))
    np.testing.assert_array_equal(np.array(batch_read["x"], np.float32).reshape(held_out.x.shape), held_out.x)
    assert batch_read["labels"] == held_out.labels.tolist()


def test_guesses_are_those_after_the_last_row():
    beliefs = np.random.default_rng(0).uniform(size=(8, 5, 10)).astype(np.float32)
    code = (
        'import { guesses } from "./digits.js"; console.log(JSON.stringify(guesses(Float32Array.from(given.beliefs))));'
    )
    assert node(code, beliefs=beliefs.ravel().tolist()) == beliefs[-1].argmax(axis=1).tolist()


# --------------------------------------------------------------------------------------------------------- the sources
def test_the_page_loads_nothing_from_elsewhere():
    """It works offline: no source has an address but that of SVG's names."""
    for source in [*SOURCES.glob("*.js"), *SOURCES.glob("*.html"), *SOURCES.glob("*.css")]:
        addresses = re.findall(r"https?://[^\s\"'`)]+", source.read_text())
        assert set(addresses) <= {"http://www.w3.org/2000/svg"}, source.name


def test_the_page_has_all_parts_that_its_program_asks_for():
    page, program = (SOURCES / "index.html").read_text(), (SOURCES / "page.js").read_text()
    asked = set(re.findall(r'part\("([\w-]+)"\)', program))
    assert len(asked) > 15
    assert asked <= set(re.findall(r'id="([\w-]+)"', page))
