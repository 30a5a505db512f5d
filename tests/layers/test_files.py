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

import layer_cases
import numpy as np
import pytest
import safetensors.numpy
from bits import same
from traced import peak

import blockcell
from blockcell import files
from blockcell.layers import GRU, LSTM, Bidirectional, Dense, Quantized, Stack
from blockcell.layers.loading import read_any
from blockcell.optable import SCHEMES
from blockcell.quantization import dequantize_matrix, quantize_matrix

FORMATS = [".npz", ".safetensors"]


def of_kind(make, *arguments):
    """A function that makes a layer of a dtype."""
    return lambda dtype=np.float32: make(*arguments, dtype=dtype)


LAYERS = {
    **{name: of_kind(make, 3, 4) for name, make in layer_cases.LAYERS.items()},
    **{
        f"{cell.__name__} {option}": of_kind(
            lambda *pair, dtype: layer_cases.with_option(*pair, dtype)[0], cell, option
        )
        for cell, option in layer_cases.OPTIONS
    },
    "lstm with infinities": lambda **d: LSTM.init(3, 4, seed=1, forget_bias=-math.inf, cell_clip=math.inf, **d),
    "lstm of no numbers": lambda dtype=np.float32: LSTM(
        np.zeros((2, 4), dtype), np.array([np.nan, np.inf, -0.0, 1], dtype)
    ),
    "lstm of nothing": lambda **d: LSTM.init(0, 0, seed=2, **d),
    "dense of nothing": lambda **d: Dense.init(0, 0, seed=8, activation="softmax", **d),
    "LSTM and GRU": lambda **d: Bidirectional(LSTM.init(3, 4, seed=4, **d), GRU.init(3, 4, seed=5, **d)),
    "many": lambda **d: Stack([GRU.init(3 if k == 0 else 2, 2, seed=k, **d) for k in range(12)]),  # 10.b_c is not of 1.
    "last": lambda **d: Stack([GRU.init(3, 4, seed=10, **d), Dense.init(4, 2, seed=11, last=True, **d)]),
    "both ends": lambda **d: Stack(
        [
            Bidirectional(GRU.init(3, 4, seed=12, **d), GRU.init(3, 4, seed=13, **d)),
            Dense.init(8, 2, seed=14, activation="sigmoid", last="ends", **d),
        ]
    ),
}
SOME_LAYERS = "gru", "stack with dense", "LSTM w_p"


@pytest.mark.meet(2)
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


@pytest.mark.meet(2)
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
        for key, array in expected._arrays_of_file().items():
            assert same([again._arrays_of_file()[key]], [array])
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


@pytest.mark.parametrize("scheme", [None, *SCHEMES])
def test_others_can_read_the_files(scheme, tmp_path):
    """The arrays under their names, codes and scales among them, and a JSON text."""
    layer, arrays, codes = LAYERS["LSTM and GRU"](), {}, {"float16": "F16", "int8": "I8"}.get(scheme, "F32")
    for name, array in layer.weights.items():
        arrays[name] = array
        if scheme and array.ndim == 2:
            arrays[name], scale = quantize_matrix(array, scheme)
            assert arrays[name].dtype == scheme
            arrays |= {f"{name}.scale": scale} if scheme == "int8" else {}
    description = {"type": "Bidirectional", "fw": LSTM_LAYER, "bw": {"type": "GRU"}}
    heads = {name: [array.dtype.name, *array.shape] for name, array in arrays.items()}
    content = json.dumps([description, heads]).encode() + b"".join(map(np.ndarray.tobytes, arrays.values()))
    expected = {"version": 2, "quantization": scheme} if scheme else {"version": 1}
    expected |= {"sha256": hashlib.sha256(content).hexdigest(), "layer": description}
    for suffix in FORMATS:
        (layer.quantize(scheme) if scheme else layer).save(tmp_path / f"a{suffix}")
    with np.load(tmp_path / "a.npz") as file:
        assert json.loads(str(file["blockcell"])) == expected
        assert file.keys() - {"blockcell"} == arrays.keys()
        for name, array in arrays.items():
            assert file[name].dtype == array.dtype and np.array_equal(file[name], array)
    with safetensors.safe_open(tmp_path / "a.safetensors", framework="numpy") as file:
        assert json.loads(file.metadata()["blockcell"]) == expected
        assert {*file.keys()} == arrays.keys()
        for name, array in arrays.items():
            assert file.get_slice(name).get_dtype() == (codes if array.ndim == 2 else "F32")
            assert np.array_equal(file.get_tensor(name), array)


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


@pytest.mark.parametrize("limit", [2**31 - 1, 200])
@pytest.mark.parametrize("offset", [0, 2**31 - 1, 2**32 - 1000, 2**40])
def test_npz_beyond_the_limits_of_32_bits(offset, limit, monkeypatch):
    """Of offsets, and of sizes, by a lower limit: numpy, zipfile and `load` find the arrays."""
    arrays = {"w": np.ones((3, 4), np.float32), "0.\u00e4": np.zeros(0), "1.b": np.full(300, 2, np.float16)}
    file = Far(offset)
    with monkeypatch.context() as patch:
        patch.setattr(zipfile, "ZIP64_LIMIT", limit)
        files._write_npz(file, "{}", arrays)
    content = file.getvalue()
    with zipfile.ZipFile(file) as archive:
        assert archive.testzip() is None
        assert archive.infolist()[0].header_offset == offset
    if not offset:
        with np.load(io.BytesIO(content)) as archive:
            assert [*archive] == ["blockcell", *arrays] and archive["1.b"].tobytes() == arrays["1.b"].tobytes()
        _, stored = files._find_npz(io.BytesIO(content), len(content))
        for name, array in arrays.items():
            assert same(files._read_array(io.BytesIO(content), name, stored[name]), array)


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
    if suffix == ".safetensors":
        assert outcomes == ["saved"] * 4
    else:  # the first .npz loads zipfile
        assert outcomes[0] == "MemoryError" and (suffix == ".onnx" or outcomes[1:] == ["saved"] * 3)
    assert os.listdir(tmp_path) == [path.name]
    assert (path.read_bytes() == b"what was there") == ("saved" not in outcomes)


def test_a_long_name(tmp_path):
    """As long as the file system takes."""
    path = tmp_path / f"{'a' * 251}.npz"
    LAYERS["gru"]().save(path)
    assert isinstance(blockcell.load(path), GRU) and os.listdir(tmp_path) == [path.name]


def test_what_cannot_be_loaded_is_not_saved(tmp_path, monkeypatch):
    for name in ("forget_bias", "cell_clip"):
        with pytest.raises(ValueError, match=f"a.npz: the layer cannot be saved: its LSTM has {name} nan; expected"):
            LSTM.init(3, 4, **{name: math.nan}).save(tmp_path / "a.npz")
    monkeypatch.setattr(files, "MOST_ARRAYS", 10)
    with pytest.raises(ValueError, match="it has 48 arrays or more; expected at most 10"):
        LAYERS["many"]().save(tmp_path / "a.npz")
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
@pytest.mark.parametrize("name", SOME_LAYERS)
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


def of(layer, **fields):
    """The text of a file with this description of a layer."""
    return {"version": 1, "layer": layer} | fields


GRU_LAYER = {"type": "GRU"}
GRU_TEXT = of(GRU_LAYER)
LSTM_LAYER = {"type": "LSTM", "forget_bias": 0.0, "cell_clip": 0.0, "gate_order": "icfo"}
WEIGHTS = dict(LAYERS["gru"]().weights)
DENSE = {"type": "Dense", "activation": None}
DENSE_WEIGHTS = dict(LAYERS["dense alone"]().weights)
TEXTS = [  # of files with the weights of a GRU
    (None, "it has no (entry|metadata) 'blockcell'"),
    ("{", "Expecting property name"),
    ("[" * 100000, "its JSON is nested too deeply"),
    (
        of(functools.reduce(lambda d, _: {"type": "Stack", "layers": [d]}, range(450), GRU_LAYER)),
        "nested too deeply|recursion depth|it has no 0.0",
    ),
    ([], "its text 'blockcell' is of type list; expected an object with a version"),
    ({"layer": {}}, "its text 'blockcell' is of type dict; expected an object with a version"),
    (of(GRU_LAYER, version=3), "its format version is 3; this blockcell reads 1 and 2"),
    (of(GRU_LAYER, version="1"), "its format version is '1'"),
    (of(GRU_LAYER, version=True), "its format version is True"),
    (of(GRU_LAYER, version=1.0), "its format version is 1.0"),
    (of(GRU_LAYER, version=2), "has 'layer, version'; expected version, quantization, layer and perhaps sha256"),
    (of(GRU_LAYER, storage="int8"), "has 'layer, storage, version'; expected version, layer and perhaps"),
    *(
        (of(GRU_LAYER, version=2, quantization=value), f"its quantization{shown}; expected ")
        for value, shown in [
            (None, " is null"),
            ("int4", ": scheme is 'int4'"),
            (["int8"], ": scheme is of type list"),
            (8, ": scheme is 8"),
            ({"0": "int8"}, ": scheme has the key '0'"),
            ({"": "int4"}, r": scheme\[''\] is 'int4'"),
        ]
    ),
    (of(GRU_LAYER, sha265=""), "its text 'blockcell' has 'layer, sha265, version'; expected version, lay"),
    (of(GRU_LAYER, sha256=None), "its sha256 is None; expected 64 hexadecimal digits"),
    (of(GRU_LAYER, sha256="0" * 64), "it is not what was saved: its sha256 is another"),
    ('{"version": 1, "layer": {"type": "LSTM", "type": "GRU"}}', "a name twice among 'type, type'"),
    (of("GRU"), "it has 'GRU' for a layer; expected an object with a type"),
    (of({"type": ["GRU"]}), "a layer of type of type list; expected one of LSTM"),
    (of({"type": "os.system"}), "a layer of type 'os.system'"),
    (of(GRU_LAYER | {"clip": 1}), r"its GRU has the attributes 'clip'; expected \["),
    (of(GRU_LAYER | {"last": True}), "its GRU has the attributes 'last'"),
    (of({"type": "Stack", "layers": []}), "its Stack has of type list for layers"),
    (of({"type": "Stack", "layers": GRU_LAYER}), "Stack has of type dict for"),
    (of({"type": "LSTM"}), "its LSTM has the attributes ''; expected"),
    (of(LSTM_LAYER), "it has no w, b; expected w, b of its LSTM"),
    (of(LSTM_LAYER | {"gate_order": "oooo"}), "its LSTM has gate_order 'oooo'; expected"),
    (of(LSTM_LAYER | {"gate_order": ["icfo"]}), "its LSTM has gate_order of type list"),
    *(
        (of(LSTM_LAYER | {name: value}), f"its LSTM has {name} {shown}; expected a numb")
        for name in ("forget_bias", "cell_clip")
        for value, shown in [
            (math.nan, "nan"),
            (True, "True"),
            (None, "None"),
            ("1", "'1'"),
            ([1.0], "of type list"),
            (10**400, "1000.*000"),
        ]
    ),
]
GRU_ARRAYS = [  # in place of those that a GRU has
    ({"b_c": np.zeros(5, np.float32)}, r"b_c has shape '\(5,\)'; expected \(H\) with I=3 and H=4"),
    ({"w_c": np.zeros((3, 4), np.float32)}, r"w_c has shape '\(3, 4\)'; expected \(I\+H, H\)"),
    ({"w_c": np.zeros(4, np.float32)}, r"w_c has shape '\(4,\)'; expected \(I\+H, H\)"),
    ({"b_c": np.zeros(4)}, "b_c has dtype float64; expected float32, that of w_ru"),
    ({name: value.astype(np.int32) for name, value in WEIGHTS.items()}, "has dtype (int32|'I32')"),
    ({"b_c": None}, "it has no b_c; expected w_ru, w"),
    ({"fw.b": np.zeros(1)}, "arrays that belong to no layer: 'fw.b'"),
]
DENSE_CASES = [  # attributes of the layer, arrays in place of those that it has
    *(
        ({"activation": value}, {}, f"its Dense has activation {shown}")
        for value, shown in [("gelu", "'gelu'; expected null or \"sigmoid\""), (1, "1"), ([], "of type list")]
    ),
    *(
        ({"last": value}, {}, f"its Dense has last {shown}")
        for value, shown in [(False, 'False; expected true or "ends", or nothing'), (1, "1"), ("first", "'first'")]
    ),
    ({"reverse": True}, {}, "its Dense has the attributes 'activation, r"),
    ({}, {"b": None}, "it has no b; expected w, b of its Dense"),
    ({}, {"b": np.zeros(3, np.float32)}, r"its b has shape '\(3,\)'; expected \(O\) with I=3 and O=4"),
    ({}, {"w": np.zeros((3, 4, 1), np.float32)}, r"its w has shape '\(3, 4, 1\)'; expected \(I, O\)"),
    ({}, {"b": np.zeros(4)}, "b has dtype float64; expected float32"),
]


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize(
    ("text", "weights", "message"),
    [
        *((text, WEIGHTS, message) for text, message in TEXTS),
        *((GRU_TEXT, WEIGHTS | arrays, message) for arrays, message in GRU_ARRAYS),
        *((of(DENSE | attributes), DENSE_WEIGHTS | arrays, message) for attributes, arrays, message in DENSE_CASES),
        (of({"type": "Dense"}), DENSE_WEIGHTS, r"its Dense has the attributes ''; expected \["),
        (
            of({"type": "Stack", "layers": [DENSE | {"last": "ends"}]}),
            {f"0.{name}": array for name, array in DENSE_WEIGHTS.items()},
            "Stack: 0 has last='ends'; expected a layer below it",
        ),
    ],
)
def test_other_content(text, weights, message, suffix, tmp_path):
    path = tmp_path / f"a{suffix}"
    weights = {name: array for name, array in weights.items() if array is not None}
    write(path, text if text is None or isinstance(text, str) else json.dumps(text), weights)
    refused(path, message)


def stored(weights, scheme):
    """The arrays that a file has of a Dense, in their order."""
    if scheme is None:
        return dict(weights)
    codes, scale = quantize_matrix(weights["w"], scheme)
    return {"w": codes, **({} if scale is None else {"w.scale": scale}), "b": weights["b"]}


STORED = stored(DENSE_WEIGHTS, "int8")
CODES = quantize_matrix(DENSE_WEIGHTS["w"], "float16").codes


def changed(array, place, value):
    """A copy with another value at a place."""
    copy = array.copy()
    copy[place] = value
    return copy


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize(
    ("scheme", "arrays", "message"),
    [
        ("int8", {"w.scale": None}, "it has no w.scale; expected w, b, w.scale of its Dense"),
        ("int8", {"w.scale": np.ones(3, np.float32)}, r"w.scale has shape '\(3,\)'; expected \(O\) with I=3 and O=4"),
        ("int8", {"w.scale": np.ones((1, 4), np.float32)}, r"its w.scale has shape '\(1, 4\)'; expected \(O\)"),
        ("int8", {"w.scale": np.ones(4)}, "its w.scale has dtype float64; expected float32, as its quantization"),
        *(
            (
                "int8",
                {"w.scale": changed(STORED["w.scale"], 2, value)},
                rf"its w.scale\[2\] is {shown}; expected {bound}",
            )
            for value, shown, bound in [
                *((value, str(float(value)), "1.17549") for value in (np.nan, np.inf, -0.5, 0, 1e-40)),
                (2.7e36, r"2.7e\+36", ".* to 2.679388"),
            ]
        ),
        ("int8", {"b.scale": np.ones(4, np.float32)}, "it has arrays that belong to no layer: 'b.scale'"),
        ("int8", {"w": changed(STORED["w"], (1, 3), -128)}, r"its w\[1, 3\] is -128; expected -127 to 127"),
        *(
            (
                "int8",
                {name: array},
                f"its {name} has dtype {array.dtype}; expected {dtype}, as its quantization is 'int8'",
            )
            for name, array, dtype in [
                ("w", STORED["w"].astype(np.float32), "int8"),
                ("b", STORED["w"][0], "float32"),
                ("b", np.zeros(4), "float32"),
            ]
        ),
        ("float16", {}, "arrays that belong to no layer: 'w.scale'"),
        ("float16", {"w.scale": None}, "its w has dtype int8; expected float16, as its quantization is 'float16'"),
        ({"": "float32"}, {"w.scale": None}, "its w has dtype int8; expected float32, as its quantization is"),
        *(
            ("float16", {"w.scale": None, "w": changed(CODES, (2, 1), value)}, rf"its w\[2, 1\] is {value}; expec")
            for value in (np.nan, -np.inf)
        ),
        (None, {"w.scale": None}, "its w has dtype int8; expected float32, float64 or float16"),
    ],
)
def test_other_codes_and_scales(scheme, arrays, message, suffix, tmp_path):
    path = tmp_path / f"a{suffix}"
    arrays = {name: array for name, array in (STORED | arrays).items() if array is not None}
    text = of(DENSE) if scheme is None else of(DENSE, version=2, quantization=scheme)
    write(path, json.dumps(text), arrays)
    refused(path, message)


@pytest.mark.parametrize(
    ("suffix", "change"),
    [
        (".npz", np.asfortranarray),
        (".npz", lambda array: array.astype(array.dtype.newbyteorder())),
        (".safetensors", np.copy),
    ],
)
@pytest.mark.parametrize("scheme", [None, *SCHEMES])
def test_arrays_as_others_store_them(scheme, suffix, change, tmp_path):
    """In another order of bytes or numbers, without a checksum, and with one, which is of the numbers."""
    layer, path = LAYERS["dense alone"](), tmp_path / f"a{suffix}"
    arrays = stored(layer.weights, scheme)
    for sha256 in ({}, {"sha256": files.checksum(DENSE, arrays)}):
        text = of(DENSE, **sha256, **({"version": 2, "quantization": scheme} if scheme else {}))
        write(path, json.dumps(text), {name: change(array) for name, array in arrays.items()})
        again = Quantized.load(path).dequantize() if scheme else blockcell.load(path)
        w = dequantize_matrix(quantize_matrix(layer.weights["w"], scheme)) if scheme else layer.weights["w"]
        np.testing.assert_array_equal(again.weights["w"], w)
        np.testing.assert_array_equal(again.weights["b"], layer.weights["b"])


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


B_C = npy(WEIGHTS["b_c"])
PLAINLY = "is compressed, encrypted or streamed; expected it plainly stored"
NO_ARRAY = "does not begin as an array does that numpy.savez wrote"
TOO_LONG = "is to have 2147483648 bytes, more than there are"


def b_c(content=B_C, **changed):
    """The entry of b_c with another content or header."""
    return entry("b_c.npy", content, **changed)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (b_c() * 2, "it has the entry 'b_c' twice"),
        (b_c() + entry("b_c", B_C), "it has the entry 'b_c' twice"),
        (b_c() + entry("blockcell", B_C), "it has the entry 'blockcell' twice"),
        (b_c(method=8), PLAINLY),
        (b_c(flags=1), PLAINLY),
        (b_c(flags=8, size=0, packed=0), PLAINLY),
        (b_c(size=2**31), TOO_LONG),
        (b_c(size=2**31, packed=2**31), TOO_LONG),
        (b_c(crc=0), "its array 'b_c' is damaged: its CRC-32 is another"),
        (b_c(B_C[:-1]), r"an array of float32 and shape '\(4,\)' in 143 bytes, which does not fit"),
        (b_c(B_C.replace(b"(4,)", b"(9999999,)")), f"{NO_ARRAY}|which does not fit"),
        (b_c(B_C.replace(b"(4,), }      ", b"(9999999,), }")), r"shape '\(9999999,\)' in 144 bytes, which"),
        (b_c(B_C.replace(b"<f4", b"<f3")), "data type '<f3' not understood"),
        (b_c(B_C.replace(b"<f4", b"|O4")), "."),
        (b_c(b"\x80\x04."), NO_ARRAY),
        (b_c(B_C.replace(b"False", b"f(x) ")), NO_ARRAY),
        (b_c(b""), NO_ARRAY),
        (b_c() + b"between", "it is no .npz file, or a part of one"),
    ],
)
def test_archives_that_are_not_what_they_say(changed, message, tmp_path):
    archive(tmp_path / "a.npz")
    assert isinstance(blockcell.load(tmp_path / "a.npz"), GRU)
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


def tensor_w(data=b"", **changed):
    """A file whose header has a tensor w with these fields in place of right ones."""
    return tensors(GRU_HEADER | {"w": SOME | changed}, data)


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
        (tensor_w(x=1), "its array 'w' is of type dict; expected dtype, shape and"),
        (tensor_w(dtype="I16"), "its 'w' has dtype 'I16'; expected one of F32, F64, F16"),
        (tensor_w(dtype=["F32"]), "its 'w' has dtype of type list; expected one of F32"),
        (tensor_w(shape=[True, 2]), r"has shape '\[True, 2\]'; expected integers from 0"),
        (tensor_w(shape=[-1, -2]), r"has shape '\[-1, -2\]'; expected integers from 0 on"),
        (tensor_w(shape=2), "has shape '2'; expected integers from 0 on"),
        (tensor_w(data_offsets=[0, 8.0]), r"has data_offsets '\[0, 8.0\]'; expected int"),
        (tensor_w(data_offsets=[8]), r"data_offsets '\[8\]' for F32 and shape '\[2\]', w"),
        (tensor_w(shape=[10**30]), "data_offsets .* which do not fit"),
        (tensor_w(b"a" * 12, data_offsets=[4, 12]), r"'w' begins at byte \d+; expected"),
        (tensor_w(b"a" * 9), r"its arrays end at byte \d+, the file at byte"),
        (tensor_w(b"a" * 7), r"its arrays end at byte \d+, the file at byte"),
        (tensors(GRU_HEADER | {"w": SOME, "b": SOME}, b"a" * 8), r"'b' begins at byte \d+; expected"),
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
