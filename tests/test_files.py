"""Layers survive the way through a file bit for bit; anything else in a file is a ValueError that names it."""

from __future__ import annotations

import json
import math
import os
import pickle
import stat
import sys

import numpy as np
import pytest
import safetensors.numpy

from blockcell import files
from blockcell.layers import GRU, LSTM, Bidirectional, Stack

FORMATS = [".npz", ".safetensors"]
LAYERS = {
    "lstm": lambda **d: LSTM.init(3, 4, seed=0, **d),
    "lstm with everything": lambda **d: LSTM.init(
        3, 4, seed=1, use_peephole=True, forget_bias=0.1, cell_clip=1 / 3, gate_order="ifco", **d
    ),
    "lstm with infinities": lambda **d: LSTM.init(3, 4, seed=1, forget_bias=-math.inf, cell_clip=math.inf, **d),
    "lstm of nothing": lambda **d: LSTM.init(0, 0, seed=2, **d),
    "gru": lambda **d: GRU.init(3, 4, seed=3, **d),
    "bidirectional": lambda **d: Bidirectional(LSTM.init(3, 4, seed=4, **d), GRU.init(3, 4, seed=5, **d)),
    "stack": lambda **d: Stack(
        [
            Bidirectional(Stack([GRU.init(3, 4, seed=6, **d)]), LSTM.init(3, 4, seed=7, cell_clip=3, **d)),
            *(GRU.init(8 if k == 0 else 2, 2, seed=k, **d) for k in range(11)),  # "10.w_ru" is not part of "1."
        ]
    ),
}


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("name", LAYERS)
def test_round_trip(name, dtype, suffix, tmp_path):
    layer = LAYERS[name](dtype=dtype)
    path = tmp_path / f"a layer{suffix}"
    files.save(layer, path)
    assert os.listdir(tmp_path) == [path.name]
    again = files.load(path)
    assert repr(again) == repr(layer) and list(again.weights) == list(layer.weights)
    for key, value in layer.weights.items():
        assert again.weights[key].dtype == dtype
        np.testing.assert_array_equal(again.weights[key].view(np.uint8), value.view(np.uint8), err_msg=key)
    x = np.random.default_rng(0).standard_normal((5, 2, layer.input_size)).astype(dtype)
    np.testing.assert_array_equal(again(x)[0], layer(x)[0])


@pytest.mark.parametrize("suffix", FORMATS)
def test_weights_that_are_not_numbers(suffix, tmp_path):
    b = np.array([np.nan, np.inf, -0.0, 1e-45], np.float32)
    files.save(LSTM(np.zeros((2, 4), np.float32), b), str(tmp_path / f"a{suffix}"))
    np.testing.assert_array_equal(
        files.load(str(tmp_path / f"a{suffix}")).weights["b"].view(np.uint32), b.view(np.uint32)
    )


def test_others_can_read_the_files(tmp_path):
    """The arrays under their names, and a JSON text."""
    layer = LAYERS["bidirectional"]()
    described = {"type": "LSTM", "forget_bias": 0.0, "cell_clip": 0.0, "gate_order": "icfo"}
    expected = {"version": 1, "layer": {"type": "Bidirectional", "fw": described, "bw": {"type": "GRU"}}}
    for suffix in FORMATS:
        files.save(layer, tmp_path / f"a{suffix}")
    with np.load(tmp_path / "a.npz") as file:
        assert json.loads(str(file["blockcell"])) == expected
        assert file.keys() - {"blockcell"} == layer.weights.keys()
        np.testing.assert_array_equal(file["fw.w"], layer.weights["fw.w"])
    with safetensors.safe_open(tmp_path / "a.safetensors", framework="numpy") as file:
        assert json.loads(file.metadata()["blockcell"]) == expected
        np.testing.assert_array_equal(file.get_tensor("fw.w"), layer.weights["fw.w"])


# ------------------------------------------------------------------------------------------------------------- writing
@pytest.mark.parametrize("suffix", FORMATS)
def test_a_failed_write_leaves_what_was_there(suffix, tmp_path, monkeypatch):
    path = tmp_path / f"a{suffix}"
    files.save(LAYERS["gru"](), path)
    before = path.read_bytes()

    def full(number):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as m, pytest.raises(OSError, match="No space left"):
        m.setattr(os, "fsync", full)
        files.save(LAYERS["lstm"](), path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == [path.name]
    files.save(LAYERS["lstm"](), path)
    assert isinstance(files.load(path), LSTM)


@pytest.mark.skipif(os.name != "posix", reason="links and modes as POSIX has them")
def test_links_and_modes(tmp_path):
    """A link stays one, and a new file is as readable as any other."""
    (tmp_path / "link.npz").symlink_to(tmp_path / "target.npz")
    files.save(LAYERS["gru"](), tmp_path / "link.npz")
    (tmp_path / "plain").touch()
    assert (tmp_path / "link.npz").is_symlink() and isinstance(files.load(tmp_path / "target.npz"), GRU)
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("plain", "target.npz")}
    assert len(modes) == 1


def test_save_errors(tmp_path):
    for function in (lambda path: files.save(LAYERS["gru"](), path), files.load):
        with pytest.raises(ValueError, match=r"a.pkl: expected a path that ends in .npz or .safetensors"):
            function(tmp_path / "a.pkl")
        with pytest.raises(FileNotFoundError):
            function(tmp_path / "missing" / "a.npz")
    with pytest.raises(TypeError, match="the layer is of type dict; expected an LSTM, GRU, Bidirectional or Stack"):
        files.save({}, tmp_path / "a.npz")
    assert os.listdir(tmp_path) == []


def test_without_safetensors(tmp_path, monkeypatch):
    path = tmp_path / "a.safetensors"
    files.save(LAYERS["gru"](), path)
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    for call in (lambda: files.load(path), lambda: files.save(LAYERS["gru"](), path)):
        with pytest.raises(ImportError, match=r"pip install 'blockcell\[safetensors\]'; or use .npz"):
            call()


# ------------------------------------------------------------------------------------------------------------- reading
def write(path, text, arrays):
    if path.suffix == ".npz":
        np.savez(path, **({} if text is None else {"blockcell": np.array(text)}), **arrays)
    else:
        safetensors.numpy.save_file(arrays, path, None if text is None else {"blockcell": text})


GRU_TEXT = {"version": 1, "layer": {"type": "GRU"}}
LSTM_LAYER = {"type": "LSTM", "forget_bias": 0.0, "cell_clip": 0.0, "gate_order": "icfo"}
WEIGHTS = dict(LAYERS["gru"]().weights)


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize(
    ("text", "weights", "message"),
    [
        (None, WEIGHTS, "it has no (entry|metadata) 'blockcell'"),
        ("{", WEIGHTS, "Expecting property name"),
        ("[" * 100000, WEIGHTS, "RecursionError"),
        ([], WEIGHTS, "TypeError"),
        ({"layer": {}}, WEIGHTS, "KeyError: 'version'"),
        (GRU_TEXT | {"version": 2}, WEIGHTS, "its format version is 2; this blockcell reads 1"),
        (GRU_TEXT | {"version": "1"}, WEIGHTS, "its format version is '1'"),
        ({"version": 1, "layer": {"type": "os.system"}}, WEIGHTS, "a layer of type 'os.system'"),
        ({"version": 1, "layer": {"type": "GRU", "clip": 1}}, WEIGHTS, r"its GRU has the attributes \['clip'\]"),
        ({"version": 1, "layer": {"type": "LSTM"}}, WEIGHTS, r"its LSTM has the attributes \[\]; expected"),
        ({"version": 1, "layer": {"type": "Stack", "layers": []}}, {}, "layers is empty"),
        ({"version": 1, "layer": LSTM_LAYER}, WEIGHTS, "TypeError.*(w_ru|b_c)"),
        ({"version": 1, "layer": LSTM_LAYER | {"gate_order": "oooo"}}, {}, "TypeError|gate_order"),
        (GRU_TEXT, WEIGHTS | {"b_c": np.zeros(5, np.float32)}, r"b_c has shape \(5,\)"),
        (GRU_TEXT, WEIGHTS | {"b_c": np.zeros(4)}, "b_c has dtype float64"),
        (GRU_TEXT, {name: value.astype(np.int32) for name, value in WEIGHTS.items()}, "has dtype int32"),
        (GRU_TEXT, {name: value for name, value in WEIGHTS.items() if name != "b_c"}, "TypeError.*b_c"),
        (GRU_TEXT, WEIGHTS | {"fw.b": np.zeros(1)}, "arrays that belong to no layer: fw.b"),
    ],
)
def test_other_content(text, weights, message, suffix, tmp_path):
    path = tmp_path / f"a{suffix}"
    write(path, text if text is None or isinstance(text, str) else json.dumps(text), weights)
    with pytest.raises(ValueError, match=f"a{suffix} cannot be read as a layer of blockcell: .*{message}"):
        files.load(path)


@pytest.mark.parametrize("suffix", FORMATS)
def test_truncated(suffix, tmp_path):
    path = tmp_path / f"a{suffix}"
    files.save(LAYERS["bidirectional"](), path)
    content = path.read_bytes()
    for length in [*range(0, len(content), 97), len(content) - 1]:
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match=f"a{suffix} cannot be read as a layer"):
            files.load(path)


@pytest.mark.parametrize("suffix", FORMATS)
def test_damaged(suffix, tmp_path):
    """Nothing but a ValueError. An .npz has checksums; .safetensors has none, so other weights may come."""
    layer, path = LAYERS["bidirectional"](), tmp_path / f"a{suffix}"
    files.save(layer, path)
    content, g, refused = path.read_bytes(), np.random.default_rng(0), 0
    for _ in range(300):
        damaged = bytearray(content)
        damaged[g.integers(len(content) if suffix == ".npz" else 800)] ^= 1 << g.integers(8)
        path.write_bytes(damaged)
        try:
            again = files.load(path)
        except ValueError as error:
            assert f"a{suffix} cannot be read as a layer" in str(error)
            refused += 1
        else:
            for name, value in layer.weights.items() if suffix == ".npz" else ():
                np.testing.assert_array_equal(again.weights[name], value)
    print(f"{suffix}: {refused} of 300 refused")
    assert refused > 150


class Bomb:
    exploded = False

    def __reduce__(self):
        return setattr, (Bomb, "exploded", True)


def test_nothing_is_unpickled(tmp_path):
    path = tmp_path / "a.npz"
    text = json.dumps(GRU_TEXT)
    bombs = np.array([Bomb()] * 4, dtype=object)
    write(path, text, WEIGHTS | {"b_c": bombs})
    for content in (path.read_bytes(), pickle.dumps(Bomb()), pickle.dumps(bombs)):
        for suffix in FORMATS:
            (tmp_path / f"b{suffix}").write_bytes(content)
            with pytest.raises(ValueError, match=f"b{suffix} cannot be read as a layer"):
                files.load(tmp_path / f"b{suffix}")
    with np.load(path, allow_pickle=True) as file:  # it would have gone off
        assert not Bomb.exploded
        file["b_c"]
    assert Bomb.exploded


def test_a_single_array_is_no_layer(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros(3))
    (tmp_path / "a.npy").rename(tmp_path / "a.npz")
    with pytest.raises(ValueError, match=r"a.npz cannot be read as a layer of blockcell: it is no .npz file"):
        files.load(tmp_path / "a.npz")
