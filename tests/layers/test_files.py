"""Layers survive the way through a file bit for bit; anything else in a file is a ValueError that names it."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import math
import os
import pickle
import re
import stat
import struct
import subprocess
import sys
import tempfile
import zipfile
import zlib

import numpy as np
import pytest
import safetensors.numpy
from bits import same
from traced import peak

import blockcell
from blockcell import files
from blockcell.layers import GRU, LSTM, RNN, Bidirectional, Dense, Quantized, Stack
from blockcell.layers.loading import read_any
from blockcell.optable import SCHEMES
from blockcell.quantization import arrays_of_file, dequantize_matrix, quantize_matrix

FORMATS = [".npz", ".safetensors"]
LAYERS = {
    "lstm": lambda **d: LSTM.init(3, 4, seed=0, **d),
    "lstm with everything": lambda **d: LSTM.init(
        3, 4, seed=1, use_peephole=True, forget_bias=0.1, cell_clip=1 / 3, gate_order="ifco", **d
    ),
    "lstm with infinities": lambda **d: LSTM.init(3, 4, seed=1, forget_bias=-math.inf, cell_clip=math.inf, **d),
    "projected lstm": lambda **d: LSTM.init(3, 4, seed=0, proj_size=2, **d),
    "coupled lstm": lambda **d: LSTM.init(3, 4, seed=0, use_peephole=True, coupled=True, **d),
    "projected coupled lstm": lambda **d: LSTM.init(
        3, 4, seed=1, use_peephole=True, proj_size=5, proj_clip=1 / 3, coupled=True, reverse=True, **d
    ),
    "lstm of nothing": lambda **d: LSTM.init(0, 0, seed=2, **d),
    "other activations": lambda **d: Stack(
        [
            RNN.init(3, 4, seed=0, activation=("leaky_relu", 0.01), **d),
            Bidirectional(
                LSTM.init(4, 4, seed=1, activation="relu", recurrent_activation=("hard_sigmoid", 0.2, 0.5), **d),
                GRU.init(4, 4, seed=2, recurrent_activation="hard_sigmoid", **d),
            ),
            RNN.init(8, 4, seed=3, reverse=True, **d),
        ]
    ),
    "gru": lambda **d: GRU.init(3, 4, seed=3, **d),
    "gru reset after": lambda **d: GRU(
        **GRU.init(3, 4, seed=3, **d).weights, b_hc=np.arange(4, dtype=d.get("dtype", np.float32)), reset_after=True
    ),
    "bidirectional": lambda **d: Bidirectional(LSTM.init(3, 4, seed=4, **d), GRU.init(3, 4, seed=5, **d)),
    "stack": lambda **d: Stack(
        [
            Bidirectional(Stack([GRU.init(3, 4, seed=6, **d)]), LSTM.init(3, 4, seed=7, cell_clip=3, **d)),
            *(GRU.init(8 if k == 0 else 2, 2, seed=k, **d) for k in range(11)),  # "10.w_ru" is not part of "1."
        ]
    ),
    "dense": lambda **d: Dense.init(3, 4, seed=8, **d),
    "dense of nothing": lambda **d: Dense.init(0, 0, seed=8, activation="softmax", **d),
    "classifier": lambda **d: Stack(
        [
            Dense.init(3, 5, seed=9, activation="relu", **d),
            LSTM.init(5, 4, seed=10, **d),
            Dense.init(4, 2, seed=11, activation="tanh", last=True, **d),
        ]
    ),
    "both ends": lambda **d: Stack(
        [
            Bidirectional(GRU.init(3, 4, seed=12, **d), GRU.init(3, 4, seed=13, **d)),
            Dense.init(8, 2, seed=14, activation="sigmoid", last="ends", **d),
        ]
    ),
}


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("name", LAYERS)
def test_round_trip(name, dtype, suffix, tmp_path):
    layer = LAYERS[name](dtype=dtype)
    path = tmp_path / f"a layer{suffix}"
    layer.save(path)
    assert os.listdir(tmp_path) == [path.name]
    again = blockcell.load(path)
    assert repr(again) == repr(layer) and list(again.weights) == list(layer.weights)
    for key, value in layer.weights.items():
        assert again.weights[key].dtype == dtype
        np.testing.assert_array_equal(again.weights[key].view(np.uint8), value.view(np.uint8), err_msg=key)
    x = np.random.default_rng(0).standard_normal((5, 2, layer.input_size)).astype(dtype)
    np.testing.assert_array_equal(again(x)[0], layer(x)[0])


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", LAYERS)
def test_round_trip_of_quantized_layers(name, scheme, suffix, tmp_path):
    """What is read has the same codes, also when that is saved again."""
    layer, path = LAYERS[name](), tmp_path / f"a{suffix}"
    expected = layer.quantize(scheme)
    expected.save(path)
    for source in (path, io.BytesIO(path.read_bytes())):
        again = Quantized.load(source)
        assert repr(again) == repr(expected)
        for key, matrix in expected._matrices().items():
            assert same(again._matrices()[key], matrix)
        for key, value in expected.dequantize().weights.items():
            np.testing.assert_array_equal(again.dequantize().weights[key].view(np.uint8), value.view(np.uint8))
        again.save(tmp_path / f"b{suffix}")
        assert (tmp_path / f"b{suffix}").read_bytes() == path.read_bytes()


def test_each_kind_of_file_has_its_function(tmp_path):
    path = tmp_path / "a.npz"
    GRU.init(2, 3).save(path)
    message = f"{path} cannot be read as a layer of blockcell: it is not quantized; read it with blockcell.load(path)"
    with pytest.raises(blockcell.FormatError, match=re.escape(message)):
        Quantized.load(path)
    GRU.init(2, 3).quantize("int8").save(path)
    message = "it is quantized, to 'int8'; expected a file of a layer's own save: read this one with blockcell.Quant"
    with pytest.raises(blockcell.FormatError, match=re.escape(message)):
        blockcell.load(path)


@pytest.mark.parametrize("suffix", FORMATS)
def test_the_bytes_of_a_file(suffix, tmp_path):
    """Half or a quarter of those of the weights."""
    layer, path, sizes = LSTM.init(100, 100, seed=0), tmp_path / f"a{suffix}", []
    for layer_or_quantized in (layer, *map(layer.quantize, SCHEMES)):
        layer_or_quantized.save(path)
        sizes.append(path.stat().st_size)
    weights, biases, scales = (4 * size for size in (200 * 400, 400, 400))
    expected = [weights + biases, weights // 2 + biases, weights // 4 + biases + scales]
    print(suffix, sizes)
    assert all(0 < size - expected_size < 3000 for size, expected_size in zip(sizes, expected, strict=True))


@pytest.mark.parametrize("suffix", FORMATS)
def test_weights_that_are_not_numbers(suffix, tmp_path):
    b = np.array([np.nan, np.inf, -0.0, 1e-45], np.float32)
    LSTM(np.zeros((2, 4), np.float32), b).save(str(tmp_path / f"a{suffix}"))
    np.testing.assert_array_equal(
        blockcell.load(str(tmp_path / f"a{suffix}")).weights["b"].view(np.uint32), b.view(np.uint32)
    )


def test_others_can_read_the_files(tmp_path):
    """The arrays under their names, and a JSON text."""
    layer = LAYERS["bidirectional"]()
    described = {"type": "LSTM", "forget_bias": 0.0, "cell_clip": 0.0, "gate_order": "icfo"}
    expected = {"type": "Bidirectional", "fw": described, "bw": {"type": "GRU"}}
    shapes = {name: ["float32", *array.shape] for name, array in layer.weights.items()}
    content = json.dumps([expected, shapes]).encode() + b"".join(map(np.ndarray.tobytes, layer.weights.values()))
    expected = {"version": 1, "sha256": hashlib.sha256(content).hexdigest(), "layer": expected}
    for suffix in FORMATS:
        layer.save(tmp_path / f"a{suffix}")
    with np.load(tmp_path / "a.npz") as file:
        assert json.loads(str(file["blockcell"])) == expected
        assert file.keys() - {"blockcell"} == layer.weights.keys()
        np.testing.assert_array_equal(file["fw.w"], layer.weights["fw.w"])
    with safetensors.safe_open(tmp_path / "a.safetensors", framework="numpy") as file:
        assert json.loads(file.metadata()["blockcell"]) == expected
        assert set(file.keys()) == layer.weights.keys()
        np.testing.assert_array_equal(file.get_tensor("fw.w"), layer.weights["fw.w"])


def test_others_can_read_codes_and_scales(tmp_path):
    layer = LAYERS["bidirectional"]()
    described = {"type": "LSTM", "forget_bias": 0.0, "cell_clip": 0.0, "gate_order": "icfo"}
    described = {"type": "Bidirectional", "fw": described, "bw": {"type": "GRU"}}
    for scheme, code in [("float16", "F16"), ("int8", "I8")]:
        arrays = {}
        for name, array in layer.weights.items():
            if array.ndim == 2:
                codes, scale = quantize_matrix(array, scheme)
                assert codes.dtype == scheme
                arrays |= {name: codes} | ({f"{name}.scale": scale} if scheme == "int8" else {})
            else:
                arrays[name] = array
        heads = {name: [array.dtype.name, *array.shape] for name, array in arrays.items()}
        content = json.dumps([described, heads]).encode() + b"".join(map(np.ndarray.tobytes, arrays.values()))
        sha256 = hashlib.sha256(content).hexdigest()
        expected = {"version": 2, "quantization": scheme, "sha256": sha256, "layer": described}
        for suffix in FORMATS:
            layer.quantize(scheme).save(tmp_path / f"a{suffix}")
        with np.load(tmp_path / "a.npz") as file:
            assert json.loads(str(file["blockcell"])) == expected
            assert file.keys() - {"blockcell"} == arrays.keys()
            for name, array in arrays.items():
                assert file[name].dtype == array.dtype
                np.testing.assert_array_equal(file[name], array)
        with safetensors.safe_open(tmp_path / "a.safetensors", framework="numpy") as file:
            assert json.loads(file.metadata()["blockcell"]) == expected
            assert {*file.keys()} == arrays.keys()
            assert {name: file.get_slice(name).get_dtype() for name in arrays} == {
                name: code if array.ndim == 2 else "F32" for name, array in arrays.items()
            }


# ------------------------------------------------------------------------------------------------------------- writing
@pytest.mark.parametrize("suffix", FORMATS)
def test_weights_that_are_replaced_meanwhile(suffix, tmp_path, monkeypatch):
    """Another thread may do so: the file has all of the old ones."""
    layer, check = LAYERS["gru"](), files.check
    before = layer.weights

    def replacing(description):
        layer.set_weights(b_c=layer.weights["b_c"] + 1)
        check(description)

    with monkeypatch.context() as m:
        m.setattr(files, "check", replacing)
        layer.save(tmp_path / f"a{suffix}")
    for name, value in blockcell.load(tmp_path / f"a{suffix}").weights.items():
        np.testing.assert_array_equal(value, before[name])


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_failed_write_leaves_what_was_there(suffix, tmp_path, monkeypatch):
    path = tmp_path / f"a{suffix}"
    LAYERS["gru"]().save(path)
    before = path.read_bytes()

    def full(number):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as m, pytest.raises(OSError, match="No space left"):
        m.setattr(os, "fsync", full)
        LAYERS["lstm"]().save(path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == [path.name]
    LAYERS["lstm"]().save(path)
    assert isinstance(blockcell.load(path), LSTM)


@pytest.mark.skipif(os.name != "posix", reason="links and modes as POSIX has them")
def test_links_and_modes(tmp_path):
    """A link stays one, and a new file is as readable as any other."""
    (tmp_path / "link.npz").symlink_to(tmp_path / "target.npz")
    LAYERS["gru"]().save(tmp_path / "link.npz")
    (tmp_path / "plain").touch()
    assert (tmp_path / "link.npz").is_symlink() and isinstance(blockcell.load(tmp_path / "target.npz"), GRU)
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("plain", "target.npz")}
    assert len(modes) == 1


def test_save_errors(tmp_path):
    for function in (LAYERS["gru"]().save, blockcell.load):
        with pytest.raises(ValueError, match=r"a.pkl: expected a path that ends in .npz or .safetensors$"):
            function(tmp_path / "a.pkl")
        with pytest.raises(FileNotFoundError):
            function(tmp_path / "missing" / "a.npz")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "reader"),
    [
        ("m.h5", "convert.from_keras(path)"),
        ("m.keras", "convert.from_keras(path)"),
        ("m.onnx", "convert.from_onnx(path)"),
        ("m.pt", "convert.from_torch(torch.load(path))"),
        ("m.pb", "tensorflow.open(path)"),
        ("m.ckpt", "tensorflow.open(path)"),
    ],
)
def test_files_of_other_libraries(name, reader):
    """Whether or not they are there."""
    function = eval(f"blockcell.{reader.partition('(')[0]}")
    assert callable(function)
    reads = f"blockcell.{reader} reads {os.path.splitext(name)[1]}"
    message = f"{name}: expected a path that ends in .npz or .safetensors; {reads}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        blockcell.load(name)


class Far(io.BytesIO):
    """A file whose first bytes, so many, are elsewhere."""

    def __init__(self, offset):
        super().__init__()
        self.offset = offset

    def tell(self):
        return super().tell() + self.offset

    def seek(self, place, whence=0):
        return super().seek(place - self.offset if whence == 0 else place, whence) + self.offset


@pytest.mark.parametrize("offset", [0, 2**31 - 2000, 2**31 - 1, 2**32 - 1000, 2**40])
def test_npz_is_what_zipfile_writes(offset):
    """Byte for byte, as of numpy.savez, beyond 2 and 4 GiB too; and one that zipfile and numpy read."""
    arrays = {
        "w": np.ones((3, 4), np.float32),
        "0.\u00e4": np.zeros(0),
        "1.b": np.float16(2) * np.ones(300, np.float16),
    }
    ours, theirs = Far(offset), Far(offset)
    files._write_npz(ours, "{}", arrays)
    with zipfile.ZipFile(theirs, "w") as archive:
        for name, array in {"blockcell": np.array("{}"), **arrays}.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.save(entry, array)
    if sys.version_info >= (3, 11, 4):  # zipfile wrote invalid local headers with force_zip64 before
        assert ours.getvalue() == theirs.getvalue()
    if not offset:
        with np.load(io.BytesIO(ours.getvalue())) as archive:
            assert [*archive] == ["blockcell", *arrays] and archive["1.b"].tobytes() == arrays["1.b"].tobytes()


@pytest.mark.parametrize("size", [2**31 - 1, 2**31, 2**33])
@pytest.mark.parametrize("start", [0, 2**31 - 1, 2**31, 2**33])
def test_directory_of_large_arrays(size, start):
    """As zipfile writes it."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        entry = zipfile.ZipInfo("w.npy")
        entry.file_size = entry.compress_size = size
        entry.CRC, entry.header_offset, entry.external_attr = 77, start, 0o600 << 16
        entry.create_system, entry.create_version, entry.extract_version = 3, 45, 45
        archive.filelist.append(entry)
        archive._didModify = True
    listed = files._directory_entry(b"w.npy", 0, 77, size, start)
    assert target.getvalue() == listed + files._directory_end(1, len(listed), 0)


PRESSED = """
import resource, sys
import numpy as np
from blockcell import LSTM

path = sys.argv[1]
if path.endswith(".onnx"):
    from onnx_export import export as save
    save(LSTM.init(1, 1, seed=0), None)
else:
    save = LSTM.save
layer = LSTM(np.ones((1000, 4000), np.float32), np.ones(4000, np.float32))
size = sum(array.nbytes for array in layer.weights.values())
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
for part in (0.01, 0.3, 0.9, 3.0):  # from 1 to 2 protobuf itself crashes: docs/reliability.md
    resource.setrlimit(resource.RLIMIT_AS, (used + int(part * size), resource.RLIM_INFINITY))
    try:
        save(layer, path)
        print("saved")
    except MemoryError:
        print("MemoryError")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems have no such limit")
@pytest.mark.parametrize("suffix", [*FORMATS, ".onnx"])
def test_without_memory(suffix, tmp_path):
    """It is a MemoryError, and what was there stays; layers need no copy of themselves."""
    path = tmp_path / f"a{suffix}"
    path.write_bytes(b"what was there")
    result = subprocess.run([sys.executable, "-c", PRESSED, str(path)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    outcomes = result.stdout.split()
    print(suffix, outcomes)
    assert outcomes[0] == "MemoryError" if suffix == ".onnx" else outcomes == ["saved"] * 4
    assert os.listdir(tmp_path) == [path.name]
    assert (path.read_bytes() == b"what was there") == ("saved" not in outcomes)


def test_a_long_name(tmp_path):
    """As long as the file system takes."""
    path = tmp_path / f"{'a' * 251}.npz"
    LAYERS["gru"]().save(path)
    assert isinstance(blockcell.load(path), GRU) and os.listdir(tmp_path) == [path.name]


def test_what_cannot_be_loaded_is_not_saved(tmp_path, monkeypatch):
    for name in ("forget_bias", "cell_clip"):
        with pytest.raises(
            ValueError, match=f"a.npz: the layer cannot be saved: its LSTM has {name} nan; expected a num"
        ):
            LAYERS["lstm"](**{name: math.nan}).save(tmp_path / "a.npz")
    monkeypatch.setattr(files, "MOST_ARRAYS", 10)
    with pytest.raises(ValueError, match="it has 50 arrays or more; expected at most 10"):
        LAYERS["stack"]().save(tmp_path / "a.npz")
    monkeypatch.setattr(files, "LONGEST_TEXT", 100)
    with pytest.raises(ValueError, match=r"the layer cannot be saved: its names take \d+ bytes; expected at most 100"):
        LAYERS["gru"]().save(tmp_path / "a.safetensors")
    assert os.listdir(tmp_path) == []


# ------------------------------------------------------------------------------------------------------------- reading
def refused(path, message=""):
    """A file is refused, and as an open file in the same words; what it is shows in its first bytes then."""
    with pytest.raises(ValueError, match=f"{path.name} cannot be read as a layer of blockcell: .*({message})") as named:
        read_any(path)
    with path.open("rb") as file, pytest.raises(ValueError) as opened:
        read_any(file)
    start = f"{path} cannot be read as a layer of blockcell: "
    assert str(opened.value) in (str(named.value), f"{start}it is neither a .npz nor a .safetensors file")


class Plain:
    """A file object that has no more than it must, gives less than it is asked for, and tells its position only."""

    def __init__(self, content):
        self.file = io.BytesIO(content)

    def read(self, size=-1):
        assert size >= 0
        return self.file.read(min(size, 7))

    def seek(self, offset, whence=0):
        self.file.seek(offset, whence)

    def tell(self):
        return self.file.tell()


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("name", LAYERS)
def test_file_objects(name, suffix, tmp_path):
    layer, path = LAYERS[name](), tmp_path / f"a{suffix}"
    layer.save(path)
    content = path.read_bytes()
    with (
        path.open("rb") as file,
        path.open("rb", buffering=0) as raw,
        path.open("r+b") as both,
        tempfile.SpooledTemporaryFile() as spooled,
        zipfile.ZipFile(io.BytesIO(), "w") as archive,
    ):
        archive.writestr("member", content)
        spooled.write(content)  # and now it stands at its end
        raw.seek(3)
        for source in (file, raw, both, spooled, io.BytesIO(content), Plain(content), archive.open("member")):
            again = blockcell.load(source)
            assert repr(again) == repr(layer)
            for key, value in layer.weights.items():
                np.testing.assert_array_equal(again.weights[key], value)
        assert not (file.closed or raw.closed or both.closed or spooled.closed)


@pytest.mark.parametrize("name", [None, "a file", b"a file", 7])
def test_names_of_file_objects(name):
    for content, message in ((b"", "neither a .npz nor a .safetensors"), (b"PK\5\6", "it is no .npz file"),
                             (tensors({}), "it has no metadata 'blockcell'")):  # fmt: skip
        file = io.BytesIO(content)
        if name is not None:
            file.name = name
        shown = "a file" if name in ("a file", b"a file") else "BytesIO"
        with pytest.raises(ValueError, match=f"^{shown} cannot be read as a layer of blockcell: .*{message}"):
            blockcell.load(file)


@pytest.mark.parametrize("name", ["text", "write only", "pipe", "number", "bytes", "None"])
def test_what_is_no_file(name, tmp_path):
    (tmp_path / "a.npz").touch()
    with contextlib.ExitStack() as stack:
        if name == "pipe":
            read, write = os.pipe()
            os.close(write)
        source = {
            "text": lambda: stack.enter_context((tmp_path / "a.npz").open()),
            "write only": lambda: stack.enter_context((tmp_path / "a.npz").open("wb")),
            "pipe": lambda: stack.enter_context(open(read, "rb")),
            "number": lambda: 3,
            "bytes": lambda: b"a.npz",
            "None": lambda: None,
        }[name]()
        expected = "expected a path, or a binary file object to read and seek in"
        with pytest.raises(TypeError, match=f"^load: path is .*; {expected}$"):
            blockcell.load(source)


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
@pytest.mark.parametrize("suffix", FORMATS)
def test_paths_of_no_regular_file(suffix, kind, tmp_path):
    """They are refused before they are opened, which would wait for who writes to a pipe."""
    path = tmp_path / f"a{suffix}"
    {"pipe": lambda: os.mkfifo(path), "device": lambda: path.symlink_to("/dev/zero"), "folder": path.mkdir}[kind]()
    for read in (blockcell.load, blockcell.Scorer):
        with pytest.raises(blockcell.FormatError, match=f"a{suffix} is no regular file; expected a file that layer"):
            read(path)


def test_a_closed_file():
    file = io.BytesIO()
    file.close()
    with pytest.raises(ValueError, match="closed file"):
        blockcell.load(file)


def write(path, text, arrays):
    if path.suffix == ".npz":
        np.savez(path, **({} if text is None else {"blockcell": np.array(text)}), **arrays)
    else:
        safetensors.numpy.save_file(arrays, path, None if text is None else {"blockcell": text})


GRU_LAYER = {"type": "GRU"}
GRU_TEXT = {"version": 1, "layer": GRU_LAYER}
LSTM_LAYER = {"type": "LSTM", "forget_bias": 0.0, "cell_clip": 0.0, "gate_order": "icfo"}
WEIGHTS = dict(LAYERS["gru"]().weights)
DENSE = {"type": "Dense", "activation": None}
DENSE_WEIGHTS = dict(LAYERS["dense"]().weights)


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize(
    ("text", "weights", "message"),
    [
        (None, WEIGHTS, "it has no (entry|metadata) 'blockcell'"),
        ("{", WEIGHTS, "Expecting property name"),
        ("[" * 100000, WEIGHTS, "its JSON is nested too deeply"),
        (
            {
                "version": 1,
                "layer": functools.reduce(lambda d, _: {"type": "Stack", "layers": [d]}, range(450), GRU_LAYER),
            },
            WEIGHTS,
            "nested too deeply|recursion depth|it has no 0.0",
        ),
        ([], WEIGHTS, "its text 'blockcell' is of type list; expected an object with a version"),
        ({"layer": {}}, WEIGHTS, "its text 'blockcell' is of type dict; expected an object with a version"),
        (GRU_TEXT | {"version": 3}, WEIGHTS, "its format version is 3; this blockcell reads 1 and 2"),
        (
            GRU_TEXT | {"version": 2},
            WEIGHTS,
            "has 'layer, version'; expected version, quantization, layer and perhaps sha256",
        ),
        (GRU_TEXT | {"storage": "int8"}, WEIGHTS, "has 'layer, storage, version'; expected version, layer and perhaps"),
        (
            GRU_TEXT | {"version": 2, "storage": "bfloat16"},
            WEIGHTS,
            "it was saved with storage='bfloat16', which blockcell no longer has; expected the file of layer.quantize",
        ),
        (GRU_TEXT | {"version": 2, "quantization": None}, WEIGHTS, "its quantization is null; expected one of floa"),
        *(
            (GRU_TEXT | {"version": 2, "quantization": value}, WEIGHTS, f"its quantization: scheme{shown}; expected ")
            for value, shown in [
                ("int4", " is 'int4'"),
                (["int8"], " is of type list"),
                (8, " is 8"),
                ({"0": "int8"}, " has the key '0'"),
                ({"": "int4"}, r"\[''\] is 'int4'"),
            ]
        ),
        (GRU_TEXT | {"version": "1"}, WEIGHTS, "its format version is '1'"),
        (GRU_TEXT | {"version": True}, WEIGHTS, "its format version is True"),
        (GRU_TEXT | {"version": 1.0}, WEIGHTS, "its format version is 1.0"),
        (
            GRU_TEXT | {"sha265": ""},
            WEIGHTS,
            "its text 'blockcell' has 'layer, sha265, version'; expected version, lay",
        ),
        (GRU_TEXT | {"sha256": None}, WEIGHTS, "its sha256 is None; expected 64 hexadecimal digits"),
        (GRU_TEXT | {"sha256": "0" * 64}, WEIGHTS, "it is not what was saved: its sha256 is another"),
        ('{"version": 1, "layer": {"type": "LSTM", "type": "GRU"}}', WEIGHTS, "a name twice among 'type, type'"),
        ({"version": 1, "layer": "GRU"}, WEIGHTS, "it has 'GRU' for a layer; expected an object with a type"),
        ({"version": 1, "layer": {"type": ["GRU"]}}, WEIGHTS, "a layer of type of type list; expected one of LSTM"),
        ({"version": 1, "layer": {"type": "os.system"}}, WEIGHTS, "a layer of type 'os.system'"),
        (
            {"version": 1, "layer": {"type": "GRU", "clip": 1}},
            WEIGHTS,
            r"its GRU has the attributes 'clip'; expected \[",
        ),
        ({"version": 1, "layer": {"type": "LSTM"}}, WEIGHTS, "its LSTM has the attributes ''; expected"),
        ({"version": 1, "layer": {"type": "Stack", "layers": []}}, {}, "its Stack has of type list for layers"),
        ({"version": 1, "layer": {"type": "Stack", "layers": {"type": "GRU"}}}, WEIGHTS, "Stack has of type dict for"),
        ({"version": 1, "layer": LSTM_LAYER}, WEIGHTS, "it has no w, b; expected w, b of its LSTM"),
        ({"version": 1, "layer": LSTM_LAYER | {"gate_order": "oooo"}}, {}, "its LSTM has gate_order 'oooo'; expected"),
        ({"version": 1, "layer": LSTM_LAYER | {"gate_order": ["icfo"]}}, {}, "its LSTM has gate_order of type list"),
        *(
            ({"version": 1, "layer": LSTM_LAYER | {name: value}}, {}, f"its LSTM has {name} {message}; expected a numb")
            for name in ("forget_bias", "cell_clip")
            for value, message in [
                (math.nan, "nan"),
                (True, "True"),
                (None, "None"),
                ("1", "'1'"),
                ([1.0], "of type list"),
                (10**400, "1000.*000"),
            ]
        ),
        (
            GRU_TEXT,
            WEIGHTS | {"b_c": np.zeros(5, np.float32)},
            r"b_c has shape '\(5,\)'; expected \(H\) with I=3 and H=4",
        ),
        (GRU_TEXT, WEIGHTS | {"w_c": np.zeros((3, 4), np.float32)}, r"w_c has shape '\(3, 4\)'; expected \(I\+H, H\)"),
        (GRU_TEXT, WEIGHTS | {"w_c": np.zeros(4, np.float32)}, r"w_c has shape '\(4,\)'; expected \(I\+H, H\)"),
        (GRU_TEXT, WEIGHTS | {"b_c": np.zeros(4)}, "b_c has dtype float64; expected float32, that of w_ru"),
        (GRU_TEXT, {name: value.astype(np.int32) for name, value in WEIGHTS.items()}, "has dtype (int32|'I32')"),
        (
            GRU_TEXT,
            {name: value for name, value in WEIGHTS.items() if name != "b_c"},
            "it has no b_c; expected w_ru, w",
        ),
        (GRU_TEXT, WEIGHTS | {"fw.b": np.zeros(1)}, "arrays that belong to no layer: 'fw.b'"),
        ({"version": 1, "layer": {"type": "Dense"}}, DENSE_WEIGHTS, r"its Dense has the attributes ''; expected \["),
        *(
            ({"version": 1, "layer": DENSE | {"activation": value}}, DENSE_WEIGHTS, f"its Dense has activation {shown}")
            for value, shown in [("gelu", "'gelu'; expected one of null, \"sigmoid\""), (1, "1"), ([], "of type list")]
        ),
        *(
            ({"version": 1, "layer": DENSE | {"last": value}}, DENSE_WEIGHTS, f"its Dense has last {shown}")
            for value, shown in [(False, 'False; expected true or "ends", or nothing'), (1, "1"), ("first", "'first'")]
        ),
        (
            {"version": 1, "layer": DENSE | {"reverse": True}},
            DENSE_WEIGHTS,
            "its Dense has the attributes 'activation, r",
        ),
        (GRU_TEXT | {"layer": GRU_LAYER | {"last": True}}, WEIGHTS, "its GRU has the attributes 'last'"),
        ({"version": 1, "layer": DENSE}, {"w": DENSE_WEIGHTS["w"]}, "it has no b; expected w, b of its Dense"),
        (
            {"version": 1, "layer": DENSE},
            DENSE_WEIGHTS | {"b": np.zeros(3, np.float32)},
            r"its b has shape '\(3,\)'; expected \(O\) with I=3 and O=4",
        ),
        (
            {"version": 1, "layer": DENSE},
            DENSE_WEIGHTS | {"w": np.zeros((3, 4, 1), np.float32)},
            r"its w has shape '\(3, 4, 1\)'; expected \(I, O\)",
        ),
        ({"version": 1, "layer": DENSE}, DENSE_WEIGHTS | {"b": np.zeros(4)}, "b has dtype float64; expected float32"),
        (
            {"version": 1, "layer": {"type": "Stack", "layers": [DENSE | {"last": "ends"}]}},
            {f"0.{name}": array for name, array in DENSE_WEIGHTS.items()},
            "Stack: 0 has last='ends'; expected a layer below it",
        ),
    ],
)
def test_other_content(text, weights, message, suffix, tmp_path):
    path = tmp_path / f"a{suffix}"
    write(path, text if text is None or isinstance(text, str) else json.dumps(text), weights)
    refused(path, message)


STORED = arrays_of_file(DENSE_WEIGHTS, {"w": quantize_matrix(DENSE_WEIGHTS["w"], "int8")})
CODES = quantize_matrix(DENSE_WEIGHTS["w"], "float16").codes


def one(array, place, value):
    changed = array.copy()
    changed[place] = value
    return changed


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize(
    ("scheme", "arrays", "message"),
    [
        ("int8", {"w.scale": None}, "it has no w.scale; expected w, b, w.scale of its Dense"),
        (
            "int8",
            {"w.scale": np.ones(3, np.float32)},
            r"its w.scale has shape '\(3,\)'; expected \(O\) with I=3 and O=4",
        ),
        ("int8", {"w.scale": np.ones((1, 4), np.float32)}, r"its w.scale has shape '\(1, 4\)'; expected \(O\)"),
        ("int8", {"w.scale": np.ones(4)}, "its w.scale has dtype float64; expected float32, as its quantization"),
        *(
            ("int8", {"w.scale": one(STORED["w.scale"], 2, value)}, rf"its w.scale\[2\] is {shown}; expected 1.17549")
            for value, shown in [(np.nan, "nan"), (np.inf, "inf"), (-0.5, "-0.5"), (0, "0.0"), (1e-40, "1e-40")]
        ),
        (
            "int8",
            {"w.scale": one(STORED["w.scale"], 2, 2.7e36)},
            r"its w.scale\[2\] is 2.7e\+36; expected .* to 2.679388",
        ),
        ("int8", {"b.scale": np.ones(4, np.float32)}, "it has arrays that belong to no layer: 'b.scale'"),
        ("int8", {"w": one(STORED["w"], (1, 3), -128)}, r"its w\[1, 3\] is -128; expected -127 to 127"),
        (
            "int8",
            {"w": STORED["w"].astype(np.float32)},
            "its w has dtype float32; expected int8, as its quantization is 'int8'",
        ),
        ("int8", {"b": STORED["w"][0]}, "its b has dtype int8; expected float32, as its quantization is 'int8'"),
        ("int8", {"b": np.zeros(4)}, "its b has dtype float64; expected float32, as its quantization is 'int8'"),
        ("float16", {}, "arrays that belong to no layer: 'w.scale'"),
        ("float16", {"w.scale": None}, "its w has dtype int8; expected float16, as its quantization is 'float16'"),
        ({"": "float32"}, {"w.scale": None}, "its w has dtype int8; expected float32, as its quantization is"),
        *(
            ("float16", {"w.scale": None, "w": one(CODES, (2, 1), value)}, rf"its w\[2, 1\] is {shown}; expec")
            for value, shown in [(np.nan, "nan"), (-np.inf, "-inf")]
        ),
        (None, {"w.scale": None}, "its w has dtype int8; expected float32, float64 or float16"),
    ],
)
def test_other_codes_and_scales(scheme, arrays, message, suffix, tmp_path):
    path = tmp_path / f"a{suffix}"
    arrays = {name: array for name, array in (STORED | arrays).items() if array is not None}
    text = {"version": 1, "layer": DENSE} if scheme is None else {"version": 2, "quantization": scheme, "layer": DENSE}
    write(path, json.dumps(text), arrays)
    refused(path, message)


@pytest.mark.parametrize("suffix", FORMATS)
def test_truncated(suffix, tmp_path):
    path = tmp_path / f"a{suffix}"
    LAYERS["bidirectional"]().save(path)
    content = path.read_bytes()
    for length in [*range(0, len(content), 97), len(content) - 1]:
        path.write_bytes(content[:length])
        refused(path)


@pytest.mark.parametrize("change", [np.asfortranarray, lambda array: array.astype(array.dtype.newbyteorder())])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_codes_as_others_store_them(scheme, change, tmp_path):
    """In another order of bytes or numbers, without a checksum, and with one, which is of the numbers."""
    layer, path = LAYERS["dense"](), tmp_path / "a.npz"
    matrix = quantize_matrix(layer.weights["w"], scheme)
    arrays = arrays_of_file(layer.weights, {"w": matrix})
    for sha256 in ({}, {"sha256": files.checksum(DENSE, arrays)}):
        text = {"version": 2, "quantization": scheme, "layer": DENSE} | sha256
        write(path, json.dumps(text), {name: change(array) for name, array in arrays.items()})
        again = Quantized.load(path).dequantize().weights
        np.testing.assert_array_equal(again["w"], dequantize_matrix(matrix))
        np.testing.assert_array_equal(again["b"], layer.weights["b"])


@pytest.mark.parametrize("suffix", FORMATS)
def test_files_without_a_checksum(suffix, tmp_path):
    """Those of earlier versions."""
    layer, path = LAYERS["bidirectional"](), tmp_path / f"a{suffix}"
    write(path, json.dumps({"version": 1, "layer": layer._description()}), dict(layer.weights))
    again = blockcell.load(path)
    for name, value in layer.weights.items():
        np.testing.assert_array_equal(again.weights[name], value)


@pytest.mark.parametrize("change", [np.asfortranarray, lambda array: array.astype(array.dtype.newbyteorder())])
def test_arrays_as_others_store_them(change, tmp_path):
    write(tmp_path / "a.npz", json.dumps(GRU_TEXT), {name: change(array) for name, array in WEIGHTS.items()})
    for name, value in blockcell.load(tmp_path / "a.npz").weights.items():
        np.testing.assert_array_equal(value, WEIGHTS[name])


@pytest.mark.parametrize("scheme", [None, *SCHEMES])
@pytest.mark.parametrize("suffix", FORMATS)
def test_damaged(suffix, scheme, tmp_path):
    """Other bits are another layer, or none, and so are refused; but for those that say nothing."""
    layer, path = LAYERS["bidirectional"](), tmp_path / f"a{suffix}"
    layer = layer.quantize(scheme) if scheme else layer
    layer.save(path)
    read = Quantized.load if scheme else blockcell.load
    content, g, refused = path.read_bytes(), np.random.default_rng(0), 0
    for _ in range(300):
        damaged = bytearray(content)
        damaged[g.integers(len(content))] ^= 1 << g.integers(8)
        path.write_bytes(damaged)
        try:
            again = read(path)
        except ValueError as error:
            assert f"a{suffix} cannot be read as a layer" in str(error)
            refused += 1
        else:
            assert repr(again) == repr(layer)
            for name, value in layer._arrays_of_file().items():
                np.testing.assert_array_equal(again._arrays_of_file()[name], value)
    print(f"{suffix}, {scheme}: {refused} of 300 refused")
    assert refused > 150


def entry(name, content, **changed):
    """An entry of a zip file, with its header; the central directory is nobody's concern."""
    fields = {"flags": 0, "method": 0, "crc": zlib.crc32(content), "packed": len(content), "size": len(content)}
    fields |= changed
    head = struct.pack("<4sHHHHHLLLHH", b"PK\3\4", 20, fields["flags"], fields["method"], 0, 0, fields["crc"],
                       fields["packed"], fields["size"], len(name), 0)  # fmt: skip
    return head + name.encode() + content


def npy(array):
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def archive(path, **entries):
    """The entries of WEIGHTS and the text, with these changed."""
    plain = {"blockcell.npy": np.array(json.dumps(GRU_TEXT))} | {
        f"{name}.npy": array for name, array in WEIGHTS.items()
    }
    parts = {name: entry(name, npy(array)) for name, array in plain.items()} | entries
    body = b"".join(parts.values())
    path.write_bytes(body + struct.pack("<4sHHHHLLH", b"PK\5\6", 0, 0, len(parts), len(parts), 0, len(body), 0))


def test_an_archive_by_hand(tmp_path):
    archive(tmp_path / "a.npz")
    assert isinstance(blockcell.load(tmp_path / "a.npz"), GRU)


B_C = npy(WEIGHTS["b_c"])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (entry("b_c.npy", B_C) * 2, "it has the entry 'b_c' twice"),
        (entry("b_c.npy", B_C) + entry("b_c", B_C), "it has the entry 'b_c' twice"),
        (entry("b_c.npy", B_C) + entry("blockcell", B_C), "it has the entry 'blockcell' twice"),
        (
            entry("b_c.npy", B_C, method=8),
            "its entry 'b_c' is compressed, encrypted or streamed; expected it plainly st",
        ),
        (entry("b_c.npy", B_C, flags=1), "its entry 'b_c' is compressed, encrypted or streamed"),
        (entry("b_c.npy", B_C, flags=8, size=0, packed=0), "its entry 'b_c' is compressed, encrypted or streamed"),
        (entry("b_c.npy", B_C, size=2**31), "its entry 'b_c' is to have 2147483648 bytes, more than there are"),
        (
            entry("b_c.npy", B_C, size=2**31, packed=2**31),
            "its entry 'b_c' is to have 2147483648 bytes, more than ther",
        ),
        (entry("b_c.npy", B_C, crc=0), "its array 'b_c' is damaged: its CRC-32 is another"),
        (entry("b_c.npy", B_C[:-1]), r"an array of float32 and shape '\(4,\)' in 143 bytes, which does not fit"),
        (entry("b_c.npy", B_C.replace(b"(4,)", b"(9999999,)")), "does not begin as an array does|which does not fit"),
        (
            entry("b_c.npy", B_C.replace(b"(4,), }      ", b"(9999999,), }")),
            r"shape '\(9999999,\)' in 144 bytes, which",
        ),
        (entry("b_c.npy", B_C.replace(b"<f4", b"<f3")), "data type '<f3' not understood"),
        (entry("b_c.npy", B_C.replace(b"<f4", b"|O4")), "."),
        (entry("b_c.npy", b"\x80\x04."), "its entry 'b_c' does not begin as an array does that numpy.savez wrote"),
        (entry("b_c.npy", B_C.replace(b"False", b"f(x) ")), "its entry 'b_c' does not begin as an array"),
        (entry("b_c.npy", b""), "its entry 'b_c' does not begin as an array"),
        (entry("b_c.npy", B_C) + b"between", "it is no .npz file, or a part of one"),
    ],
)
def test_archives_that_are_not_what_they_say(changed, message, tmp_path):
    archive(tmp_path / "a.npz", **{"b_c.npy": changed})
    refused(tmp_path / "a.npz", message)


def test_texts_that_are_none(tmp_path):
    for content in (np.array(["a"]), np.array(b"{}"), np.zeros((), np.float32), np.zeros((), "U1048577")):
        archive(tmp_path / "a.npz", **{"blockcell.npy": entry("blockcell.npy", npy(content))})
        refused(tmp_path / "a.npz", "its entry 'blockcell' is no text, or one of more than 4194304 bytes")


def tensors(header, data=b""):
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(content).to_bytes(8, "little") + content + data


GRU_HEADER = {"__metadata__": {"blockcell": json.dumps(GRU_TEXT)}}
SOME = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it has no metadata 'blockcell'|Expecting value|its header is to have"),
        (tensors(b"{}")[:-1], "its header is to have 2 bytes; expected at most 4194304, within the file"),
        ((2**63).to_bytes(8, "little") + b"{}", "its header is to have 9223372036854775808 bytes"),
        (tensors(b"\xff"), "can't decode byte"),
        (tensors([]), "it has no metadata 'blockcell'"),
        (tensors({"__metadata__": {"blockcell": {}}}), "it has no metadata 'blockcell'"),
        (tensors(b'{"w": {}, "w": {}}'), "its JSON has a name twice among 'w, w'"),
        (tensors(b'{"__metadata__": {"blockcell": "", "blockcell": ""}}'), "a name twice among 'blockcell, blockcell'"),
        (tensors(GRU_HEADER | {"w": []}), "its array 'w' is of type list; expected dtype, shape and data_offsets"),
        (tensors(GRU_HEADER | {"w": SOME | {"x": 1}}), "its array 'w' is of type dict; expected dtype, shape and"),
        (
            tensors(GRU_HEADER | {"w": SOME | {"dtype": "I16"}}),
            "its 'w' has dtype 'I16'; expected one of F32, F64, F16",
        ),
        (tensors(GRU_HEADER | {"w": SOME | {"dtype": ["F32"]}}), "its 'w' has dtype of type list; expected one of F32"),
        (
            tensors(GRU_HEADER | {"w": SOME | {"shape": [True, 2]}}),
            r"has shape '\[True, 2\]'; expected integers from 0",
        ),
        (
            tensors(GRU_HEADER | {"w": SOME | {"shape": [-1, -2]}}),
            r"has shape '\[-1, -2\]'; expected integers from 0 on",
        ),
        (tensors(GRU_HEADER | {"w": SOME | {"shape": 2}}), "has shape '2'; expected integers from 0 on"),
        (
            tensors(GRU_HEADER | {"w": SOME | {"data_offsets": [0, 8.0]}}),
            r"has data_offsets '\[0, 8.0\]'; expected int",
        ),
        (
            tensors(GRU_HEADER | {"w": SOME | {"data_offsets": [8]}}),
            r"data_offsets '\[8\]' for F32 and shape '\[2\]', w",
        ),
        (tensors(GRU_HEADER | {"w": SOME | {"shape": [10**30]}}), "data_offsets .* which do not fit"),
        (tensors(GRU_HEADER | {"w": SOME | {"data_offsets": [4, 12]}}, b"a" * 12), r"'w' begins at byte \d+; expected"),
        (tensors(GRU_HEADER | {"w": SOME, "b": SOME}, b"a" * 8), r"'b' begins at byte \d+; expected"),
        (tensors(GRU_HEADER | {"w": SOME}, b"a" * 9), r"its arrays end at byte \d+, the file at byte"),
        (tensors(GRU_HEADER | {"w": SOME}, b"a" * 7), r"its arrays end at byte \d+, the file at byte"),
    ],
)
def test_safetensors_that_are_none(content, message, tmp_path):
    (tmp_path / "a.safetensors").write_bytes(content)
    refused(tmp_path / "a.safetensors", message)


def refusal(path):
    """The most bytes allocated at once until a file is refused, by its path and as an open file."""

    def refused():
        for source in (path, path.open("rb")):
            with pytest.raises(ValueError, match="cannot be read as a layer"), contextlib.ExitStack() as stack:
                blockcell.load(source if source is path else stack.enter_context(source))

    return peak(refused)[1]


def test_what_a_file_may_take(tmp_path, monkeypatch):
    """Little, where what it says of itself is not what a layer has; however much that is."""
    monkeypatch.setattr(files, "MOST_ARRAYS", 2**8)
    many = {f"w{k}": np.zeros(0, np.float32) for k in range(2**11)}
    large = np.zeros(2**23, np.float32)
    peaks = {}
    for suffix in FORMATS:
        for case, more in {"many": many, "large": {"x": large}, "large weights": {"b_c": large}}.items():
            write(tmp_path / f"a{suffix}", json.dumps(GRU_TEXT), WEIGHTS | more)
            peaks[suffix, case] = refusal(tmp_path / f"a{suffix}")
    np.savez_compressed(tmp_path / "a.npz", blockcell=np.array(json.dumps(GRU_TEXT)), **WEIGHTS, x=large)
    peaks["a bomb"] = refusal(tmp_path / "a.npz")
    with open(tmp_path / "a.safetensors", "wb") as file:  # most of it on no disk
        file.write(tensors(GRU_HEADER | {"w": {"dtype": "F32", "shape": [2**36], "data_offsets": [0, 2**38]}}))
        file.truncate(file.tell() + 2**38)
    peaks["sparse"] = refusal(tmp_path / "a.safetensors")
    print(peaks)
    assert max(peaks.values()) < 2**22


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
                blockcell.load(tmp_path / f"b{suffix}")
    with np.load(path, allow_pickle=True) as file:  # it would have gone off
        assert not Bomb.exploded
        file["b_c"]
    assert Bomb.exploded


def test_a_single_array_is_no_layer(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros(3))
    (tmp_path / "a.npy").rename(tmp_path / "a.npz")
    with pytest.raises(ValueError, match=r"a.npz cannot be read as a layer of blockcell: it is no .npz file, or"):
        blockcell.load(tmp_path / "a.npz")
