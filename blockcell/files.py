"""The files of layers: what ``layer.save(path)`` writes and ``blockcell.load(path)`` reads.

The suffix of a path says which of two formats the file has: ``.npz``, numpy's own, or ``.safetensors``. Of a file
object the first bytes say it. Both formats hold the arrays of ``layer.weights`` under their names, and one JSON text
named "blockcell":

.. code-block:: text

    {"version": 1, "sha256": "...", "layer": {"type": "GRU"}}

where the layer has one of these descriptions:

.. code-block:: text

    {"type": "LSTM", "forget_bias": 0.0, "cell_clip": 0.0, "gate_order": "icfo"}
    {"type": "GRU"}
    {"type": "RNN"}
    {"type": "Dense", "activation": "softmax"}
    {"type": "Bidirectional", "fw": {"type": "GRU"}, "bw": {"type": "GRU"}}
    {"type": "Stack", "layers": [{...}, ...]}

An LSTM, GRU or RNN with ``reverse=True`` also has ``"reverse": true``, an LSTM with a projection has its
``"proj_clip"``, one with ``coupled=True`` has ``"coupled": true``, a GRU with ``reset_after=True`` has
``"reset_after": true``, and a Dense with `last` has ``"last": true`` or ``"last": "ends"``. The activation of a Dense
is null where there is none. Other layers have an ``"activation"`` that is not ``"tanh"``, and a
``"recurrent_activation"`` that is not ``"sigmoid"``, as in `blockcell.activations`: ``"relu"``,
``["leaky_relu", 0.01]``.

The file of a `blockcell.Quantized` layer has version 2 and says how it was quantized, by one scheme or by one for each
prefix of the weights' names:

.. code-block:: text

    {"version": 2, "quantization": "int8", "sha256": "...", "layer": {"type": "GRU"}}
    {"version": 2, "quantization": {"0": "int8", "1": "float32"}, "sha256": "...", "layer": {"type": "Stack", ...}}

The matrices are then codes, as in `blockcell.quantization`: float16 (F16 in a ``.safetensors``); or int8 (I8), with a
float32 array ``w.scale`` for each matrix ``w``, one number for each column. All other
arrays are float32.

`checksum` computes "sha256"; files of earlier versions have none.

Reading never unpickles and trusts nothing: names, dtypes, shapes and sizes are checked before an array is read.
Arrays are never compressed, so none is larger than its file.

Nothing here knows a layer: descriptions are dicts and weights are arrays.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import struct
import sys
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BufferedReader, BytesIO, RawIOBase
from typing import IO, Any, BinaryIO, NamedTuple, TypeVar

import numpy as np

from .activations import DEFAULTS, canonical
from .errors import FormatError, short
from .optable import (
    DENSE_WEIGHTS,
    DTYPE_NAMES,
    DTYPES,
    LAYER_OPTIONS,
    OPS,
    SCHEMES,
    Array,
    LayerOption,
    Tensor,
    layer_sizes,
    lstm_weights,
    peephole_names,
    sizes_of,
)
from .quantization import FLOAT32, read_schemes

PLAIN, QUANTIZED = 1, 2  # versions of the format
KEY = "blockcell"
REQUIRED = {  # attributes that a description of each type has in any case
    **{
        kind: sorted(option.name for option in options if option.stored == "always")
        for kind, options in LAYER_OPTIONS.items()
    },
    "Bidirectional": ["bw", "fw"],
    "Stack": ["layers"],
}
PEEPHOLES = peephole_names(coupled=False)
MOST_ARRAYS = 2**14
LONGEST_TEXT = 2**22  # in bytes, twice what MOST_ARRAYS arrays need
CODES: dict[str, np.dtype[Any]] = {  # of .safetensors
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "F16": np.dtype("<f2"),
    "I8": np.dtype("i1"),
}

READERS_OF_OTHERS = {
    **dict.fromkeys((".h5", ".hdf5", ".keras"), "convert.from_keras(path)"),
    **dict.fromkeys((".pt", ".pth"), "convert.from_torch(torch.load(path))"),
    **dict.fromkeys((".ckpt", ".index", ".meta", ".pb", ".pbmm", ".pbtxt"), "tensorflow.open(path)"),
    ".onnx": "convert.from_onnx(path)",
}
"""What of blockcell reads files that it does not write, by their suffix."""

StrPath = str | os.PathLike[str]
F = TypeVar("F")


class ArrayInFile(NamedTuple):
    """An array in a file."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int
    order: str = "C"
    crc: tuple[int, int] | None = None
    """In an ``.npz``: the CRC-32 of the array's header, and that of header and array."""


class Content(NamedTuple):
    """What a file holds."""

    description: Any
    arrays: dict[str, Array]
    sha256: str | None
    quantization: Any
    """As it was given to `Layer.quantize`; None if it was not."""


def write(path: StrPath, description: Any, arrays: Mapping[str, Array], quantization: Any = None) -> None:
    """Write the description and the arrays of a layer to a file, or raise and leave what was there."""
    form = _for_suffix(path, {".npz": _write_npz, ".safetensors": _write_safetensors})
    try:
        check(description)
        _check_count(len(arrays))
        version = {"version": PLAIN} if quantization is None else {"version": QUANTIZED, "quantization": quantization}
        text = json.dumps(version | {"sha256": checksum(description, arrays), "layer": description})
        with replacing(path) as file:
            form(file, text, arrays)
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)}: the layer cannot be saved: {error}") from None


@contextmanager
def replacing(path: StrPath) -> Iterator[BinaryIO]:
    """Open a new file to write to. Once complete it replaces the one at the path; if that fails, it is deleted."""
    target = os.path.realpath(path)  # what a link refers to
    part = os.path.join(os.path.dirname(target), f".{os.urandom(16).hex()}")
    try:
        with open(part, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, target)
    except OSError as error:  # it names the temporary file, which means nothing to the caller
        raise type(error)(error.errno, error.strerror, os.fspath(path)) from None
    finally:
        with suppress(FileNotFoundError):
            os.unlink(part)


def check_regular(path: StrPath, expected: str) -> None:
    """Raise a FormatError unless it is a regular file: to open a pipe would wait for a writer, and devices have no end.

    `expected` says what the file should be.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise FormatError(f"{os.fsdecode(path)} is no regular file; expected {expected}")


@contextmanager
def reading(source: StrPath | IO[bytes]) -> Iterator[Content]:
    """Read a file. Errors in it, also those that the caller raises, become FormatErrors that name the file."""
    if isinstance(source, (str, os.PathLike)):
        find = _for_suffix(source, {".npz": _find_npz, ".safetensors": _find_safetensors}, READERS_OF_OTHERS)
        name = os.fspath(source)
        check_regular(source, "a file that layer.save wrote")
        opened = open(source, "rb")
    else:
        opened, find, file_name = BufferedReader(OpenedFile(source)), _find_by_content, getattr(source, "name", None)
        name = os.fsdecode(file_name) if isinstance(file_name, (str, bytes)) else type(source).__name__
    with opened as file:
        try:
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            text, stored = find(file, size)
            description, sha256, quantization = _read_document(text)
            check_arrays(description, stored, quantization)
            arrays = {name: _read_array(file, name, stored_array) for name, stored_array in stored.items()}
            yield Content(description, arrays, sha256, quantization)
        except (RecursionError, TypeError, ValueError) as error:
            raise FormatError(f"{name} cannot be read as a layer of blockcell: {error}") from error


class OpenedFile(RawIOBase):
    """A file object that the caller has opened, and that stays open. Only its read, seek and tell are used."""

    def __init__(self, file: Any) -> None:
        try:
            binary = isinstance(file.read(0), bytes)
            file.seek(file.tell())
        except (AttributeError, OSError):
            binary = False
        if not binary:
            expected = "expected a path, or a binary file object to read and seek in"
            raise TypeError(f"load: path is {short(file)}; {expected}")
        self._file = file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._file.seek(offset, whence)
        return int(self._file.tell())

    def readinto(self, buffer: Any) -> int:
        content = self._file.read(min(len(buffer), 2**20))  # a copy of a part, not of all
        buffer[: len(content)] = content
        return len(content)


# --------------------------------------------------------------------------------------------------------- descriptions
def checksum(description: Any, arrays: Mapping[str, Array]) -> str:
    """Return the SHA-256, in hexadecimal, of a JSON text followed by the arrays' bytes, in C order and little-endian.

    The text is ``json.dumps([description, {name: [dtype, *shape], ...}])``, such as
    ``[{"type": "GRU"}, {"w_ru": ["float32", 7, 8], ...}]``, in the order of ``layer.weights``; a scale follows its
    codes.
    """
    import hashlib  # loads OpenSSL, which calls do not need

    heads = {name: [array.dtype.name, *array.shape] for name, array in arrays.items()}
    try:
        digest = hashlib.sha256(json.dumps([description, heads]).encode())
        for array in arrays.values():
            digest.update(_bytes(np.asarray(array, array.dtype.newbyteorder("<"))))
        return digest.hexdigest()
    except ValueError as error:  # how OpenSSL says that memory is short
        raise MemoryError(str(error)) from error


def parse(text: str) -> Any:
    """Return the value of a JSON text. A name that stands twice in an object is a ValueError."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            raise ValueError(f"its JSON has a name twice among {short(', '.join(name for name, _ in pairs))}")
        return values

    try:
        return json.loads(text, object_pairs_hook=unique)
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None


def check(description: Any) -> None:
    """Raise a ValueError unless it describes a layer."""
    unchecked = [description]
    while unchecked:
        layer = unchecked.pop()
        if not isinstance(layer, dict) or "type" not in layer:
            raise ValueError(f"it has {short(layer)} for a layer; expected an object with a type")
        kind = layer["type"]
        if not isinstance(kind, str) or kind not in REQUIRED:
            raise ValueError(f"it has a layer of type {short(kind)}; expected one of {', '.join(REQUIRED)}")
        options = [option for option in LAYER_OPTIONS.get(kind, ()) if option.name in layer]
        optional = {option.name for option in options if option.stored != "always"}
        if (names := sorted(layer.keys() - optional - {"type"})) != REQUIRED[kind]:
            raise ValueError(f"its {kind} has the attributes {short(', '.join(names))}; expected {REQUIRED[kind]}")
        for option in options:
            _check_option(kind, option, layer[option.name])
        if kind == "Stack" and (not isinstance(layer["layers"], list) or not layer["layers"]):
            raise ValueError(f"its Stack has {short(layer['layers'])} for layers; expected a list of at least one")
        unchecked += parts_of(layer).values()


def _check_option(kind: str, option: LayerOption, value: Any) -> None:
    """Raise a ValueError unless an option has a value that `LayerOption` says a file has."""
    if option.values:
        allowed = [allowed for allowed in option.values if option.stored or allowed != option.default]
        if not any(type(value) is type(other) and value == other for other in allowed):
            expected = " or ".join(map(json.dumps, allowed)) + ("" if option.stored else ", or nothing")
            raise ValueError(f"its {kind} has {option.name} {short(value)}; expected {expected}")
    elif option.name in DEFAULTS:
        name = f"the {option.name} of its {kind}"
        activation = canonical(name, value)
        shortest = list(activation) if isinstance(activation, tuple) else activation
        if activation == option.default or shortest != value:
            raise ValueError(f"{name} is {short(json.dumps(value))}; expected what is not usual, in its shortest form")
    else:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not (abs(value) <= sys.float_info.max or abs(value) == math.inf):
            expected = "expected a number that a float holds, not NaN"
            raise ValueError(f"its {kind} has {option.name} {short(value)}; {expected}")


def parts_of(description: Any) -> dict[str, Any]:
    """Return the descriptions of the layers of a Bidirectional or a Stack by their names; none for other layers."""
    if description["type"] == "Stack":
        return {str(k): part for k, part in enumerate(description["layers"])}
    return {name: description[name] for name in ("fw", "bw") if name in description}


def leaf_descriptions(description: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Iterate over the layers with weights of their own: the prefix of the weights' names, and the description."""
    parts = parts_of(description)
    if not parts:
        yield prefix, description
    for name, part in parts.items():
        yield from leaf_descriptions(part, f"{prefix}{name}.")


def weights_of(leaf: Any) -> tuple[Tensor, ...]:
    """Return the weights of a leaf that is described; an LSTM may have no peepholes."""
    if leaf["type"] == "Dense":
        return DENSE_WEIGHTS
    if leaf["type"] == "LSTM":
        return lstm_weights("coupled" in leaf, "proj_clip" in leaf)
    if leaf["type"] == "RNN":
        return OPS["block_rnn"].weights
    return OPS["block_gru_reset_after" if "reset_after" in leaf else "block_gru"].weights


def schemes_of(description: Any, quantization: Any) -> dict[str, str]:
    """Return the schemes of the quantized matrices, by their names, of the layer that is described."""
    if quantization is None:
        return {}
    leaves = dict(leaf_descriptions(description))
    schemes = read_schemes("its quantization", quantization, leaves, np.dtype(np.float32))
    return {
        prefix + tensor.name: schemes[prefix]
        for prefix, leaf in leaves.items()
        for tensor in weights_of(leaf)
        if tensor.kind == "matrix" and schemes[prefix] != FLOAT32
    }


# -------------------------------------------------------------------------------------------- checks, and then an array
def _read_document(text: str) -> tuple[Any, str | None, Any]:
    """Return the layer's description, the checksum if the file has one, and how the layer was quantized, or None."""
    document = parse(text)
    if not isinstance(document, dict) or "version" not in document:
        raise ValueError(f"its text {KEY!r} is {short(document)}; expected an object with a version")
    version = document["version"]
    if version not in (PLAIN, QUANTIZED) or type(version) is not int:
        description = f"its format version is {short(version)}"
        raise ValueError(f"{description}; this blockcell reads {PLAIN} and {QUANTIZED}; a newer one may read it")
    names = ["version", "layer"] if version == PLAIN else ["version", "quantization", "layer"]
    if {*names} - document.keys() or document.keys() - {*names, "sha256"}:
        description = ", ".join(sorted(document))
        raise ValueError(f"its text {KEY!r} has {short(description)}; expected {', '.join(names)} and perhaps sha256")
    quantization = document.get("quantization")
    if version == QUANTIZED and quantization is None:
        raise ValueError(f"its quantization is null; expected one of {', '.join(SCHEMES)}, or an object of them")
    expected = document.get("sha256")
    if "sha256" in document and not (isinstance(expected, str) and re.fullmatch("[0-9a-f]{64}", expected)):
        raise ValueError(f"its sha256 is {short(expected)}; expected 64 hexadecimal digits")
    check(document["layer"])
    return document["layer"], expected, quantization


def _check_count(arrays: int) -> None:
    if arrays > MOST_ARRAYS:
        raise ValueError(f"it has {arrays} arrays or more; expected at most {MOST_ARRAYS}")


def check_arrays(description: Any, stored: Mapping[str, ArrayInFile], quantization: Any = None) -> None:
    """Raise a ValueError unless these are the arrays of the layer, by what is known before they are read."""
    forms: dict[str, str] = {}  # shapes in letters, by the arrays' names
    schemes = schemes_of(description, quantization)
    for prefix, leaf in leaf_descriptions(description):
        missing_peepholes = PEEPHOLES if not any(prefix + name in stored for name in PEEPHOLES) else ()
        tensors = [tensor for tensor in weights_of(leaf) if tensor.name not in missing_peepholes]
        leaf_forms = {tensor.name: tensor.shape for tensor in tensors}
        leaf_forms |= {f"{t.name}.scale": t.shape.split()[1] for t in tensors if schemes.get(prefix + t.name) == "int8"}
        if missing := [prefix + name for name in leaf_forms if prefix + name not in stored]:
            raise ValueError(f"it has no {', '.join(missing)}; expected {', '.join(leaf_forms)} of its {leaf['type']}")
        forms |= {prefix + name: form for name, form in leaf_forms.items()}
    if left := stored.keys() - forms:
        raise ValueError(f"it has arrays that belong to no layer: {short(', '.join(sorted(left)))}")
    first = next(iter(forms))
    for name, form in forms.items():
        shape, dtype = stored[name].shape, stored[name].dtype.newbyteorder("=")
        expected, why = stored[first].dtype.newbyteorder("="), f"that of {first}"
        if quantization is not None:
            expected = SCHEMES[schemes[name]] if name in schemes else np.dtype(np.float32)
            why = f"as its quantization is {short(quantization)}"
        elif dtype not in DTYPES:
            raise ValueError(f"its {name} has dtype {dtype}; expected {DTYPE_NAMES}")
        if dtype != expected:
            raise ValueError(f"its {name} has dtype {dtype}; expected {expected}, {why}")
        if form.startswith("I"):
            projection = (0, *stored[f"{name}_p"].shape)[-1] if "P" in form else None
            sizes = layer_sizes(form, shape, projection)
        if shape != sizes_of(form, sizes):
            wanted_sizes = " and ".join(f"{letter}={size}" for letter, size in sizes.items())
            expected_shape = f"({form.replace(' ', ', ')}) with {wanted_sizes}"
            raise ValueError(f"its {name} has shape {short(str(shape))}; expected {expected_shape}")


def _bytes(array: Array) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _read_array(file: BufferedReader, name: str, stored: ArrayInFile) -> Array:
    file.seek(stored.offset)
    array = np.empty(math.prod(stored.shape), stored.dtype)  # numpy.fromfile raises other errors if memory is short
    if file.readinto(_bytes(array)) != array.nbytes:
        raise ValueError(f"its array {short(name)} is cut off")
    if stored.crc and zlib.crc32(_bytes(array), stored.crc[0]) != stored.crc[1]:
        raise ValueError(f"its array {short(name)} is damaged: its CRC-32 is another")
    return array.reshape(stored.shape, order="F" if stored.order == "F" else "C")


# ---------------------------------------------------------------------------------------------------------- the formats
def _for_suffix(path: StrPath, formats: dict[str, F], others: Mapping[str, str] | None = None) -> F:
    """Return the format that the path ends in; an error about one of the others says what reads it."""
    suffix = os.path.splitext(os.fspath(path))[1]
    if suffix not in formats:
        advice = f"; blockcell.{others[suffix]} reads {suffix}" if others and suffix in others else ""
        raise ValueError(f"{os.fspath(path)}: expected a path that ends in {' or '.join(formats)}{advice}")
    return formats[suffix]


LOCAL = struct.Struct("<4sHHHHHLLLHH")  # the header of an entry of a zip file
LONG = struct.Struct("<HHQQ")  # the entry's sizes in 64 bits, if the header has 0xFFFFFFFF for both
END = struct.Struct("<4sHHHHLLH")  # the end of a zip file


def _write_npz(file: BinaryIO, text: str, arrays: Mapping[str, Array]) -> None:
    """Write an archive that numpy.load reads, without a copy of an array. Any Python writes the same bytes."""
    try:
        import zipfile  # would be a fifth of `import blockcell`
    except ImportError as error:  # how the dynamic linker says that memory is short
        raise MemoryError(str(error)) from error

    with zipfile.ZipFile(file, "w") as archive:
        for name, array in {KEY: np.array(text), **arrays}.items():
            head = BytesIO()
            np.lib.format.write_array_header_1_0(head, np.lib.format.header_data_from_array_1_0(array))
            # Before Python 3.11.4 zipfile wrote wrong headers for smaller entries with sizes in 64 bits.
            is_long = head.tell() + array.nbytes > zipfile.ZIP64_LIMIT
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=is_long) as entry:
                entry.write(head.getvalue())
                entry.write(_bytes(array))


NPY = re.compile(
    rb"\x93NUMPY\x01\x00(..)"
    rb"\{'descr': '([<>|][biufcmMOSUV]\d{0,9})', 'fortran_order': (True|False), 'shape': \(([\d, ]*)\), \} *\n",
    re.DOTALL,
)


def _find_by_content(file: BufferedReader, size: int) -> tuple[str, dict[str, ArrayInFile]]:
    """Return the text, and where the arrays are, of either format: the first bytes say which it is. No .safetensors
    begins with PK, as its header would be too long."""
    head = file.read(9)
    file.seek(0)
    if head[:4] in (b"PK\3\4", b"PK\5\6"):
        return _find_npz(file, size)
    if head[8:] == b"{":
        return _find_safetensors(file, size)
    raise ValueError("it is neither a .npz nor a .safetensors file")


def _find_npz(file: BufferedReader, size: int) -> tuple[str, dict[str, ArrayInFile]]:
    """Return the text of an .npz, and where the arrays are: one after the other, each after its own header."""
    file.seek(max(0, size - END.size))
    signature, _, _, _, entries, _, directory, _ = END.unpack(file.read(END.size).rjust(END.size))
    if signature == b"PK\5\6":
        _check_count(entries - 1)
    file.seek(0)
    text, stored = None, {}
    while (head := file.read(LOCAL.size))[:4] == b"PK\x03\x04" and len(head) == LOCAL.size:
        _, _, flags, method, _, _, crc, packed, length, name_length, extra_length = LOCAL.unpack(head)
        name, extra = file.read(name_length).decode().removesuffix(".npy"), file.read(extra_length)
        if packed == length == 0xFFFFFFFF and len(extra) == LONG.size:
            *_, length, packed = LONG.unpack(extra)
        if method or flags & ~0x0800:  # the flag of names in UTF-8
            raise ValueError(
                f"its entry {short(name)} is compressed, encrypted or streamed; expected it plainly stored"
            )
        if name in stored or (name == KEY and text is not None):
            raise ValueError(f"it has the entry {short(name)} twice")
        start = file.tell()
        if packed != length or start + length > size:
            raise ValueError(f"its entry {short(name)} is to have {length} bytes, more than there are")
        entry = _find_array(name, file.read(min(length, 1024)), start, length, crc)
        if name == KEY:
            text = _read_text(file, entry)
        else:
            stored[name] = entry
            _check_count(len(stored))
        file.seek(start + length)
    end_record = signature, entries, directory
    if end_record != (b"PK\5\6", len(stored) + (text is not None), min(file.tell() - len(head), 0xFFFFFFFF)):
        raise ValueError("it is no .npz file, or a part of one")
    if text is None:
        raise ValueError(f"it has no entry {KEY!r}")
    return text, stored


def _find_array(name: str, head: bytes, start: int, length: int, crc: int) -> ArrayInFile:
    """Return the array of the entry at `start`, which has `length` bytes and begins with `head`."""
    match = NPY.match(head)
    if match is None or int.from_bytes(match[1], "little") != match.end() - 10:
        raise ValueError(f"its entry {short(name)} does not begin as an array does that numpy.savez wrote")
    dtype = np.dtype(match[2].decode())
    shape = tuple(int(word) for word in match[4].replace(b",", b" ").split())
    if match.end() + dtype.itemsize * math.prod(shape) != length:
        description = f"an array of {dtype} and shape {short(str(shape))} in {length} bytes"
        raise ValueError(f"its entry {short(name)} is {description}, which does not fit")
    order = "F" if match[3] == b"True" else "C"
    return ArrayInFile(dtype, shape, start + match.end(), order, (zlib.crc32(match[0]), crc))


def _read_text(file: BufferedReader, stored: ArrayInFile) -> str:
    if stored.dtype.kind != "U" or stored.shape or stored.dtype.itemsize > LONGEST_TEXT:
        raise ValueError(f"its entry {KEY!r} is no text, or one of more than {LONGEST_TEXT} bytes")
    as_bytes = stored._replace(dtype=np.dtype(np.uint8), shape=(stored.dtype.itemsize,), order="C")
    content = _read_array(file, KEY, as_bytes)
    return content.tobytes().decode("utf-32-be" if stored.dtype.str[0] == ">" else "utf-32-le").rstrip("\0")


def _write_safetensors(file: BinaryIO, text: str, arrays: Mapping[str, Array]) -> None:
    header: dict[str, Any] = {"__metadata__": {KEY: text}}
    codes = {dtype.newbyteorder("="): code for code, dtype in CODES.items()}
    end = 0
    for name, array in arrays.items():
        start, end = end, end + array.nbytes
        header[name] = {"dtype": codes[array.dtype], "shape": array.shape, "data_offsets": [start, end]}
    content = json.dumps(header).encode()
    content += b" " * (-len(content) % 8)  # the arrays begin at a multiple of 8
    if len(content) > LONGEST_TEXT:
        raise ValueError(f"its names take {len(content)} bytes; expected at most {LONGEST_TEXT}")
    file.write(len(content).to_bytes(8, "little") + content)
    for array in arrays.values():
        file.write(_bytes(array.astype(CODES[codes[array.dtype]], copy=False)))


def _find_safetensors(file: BufferedReader, size: int) -> tuple[str, dict[str, ArrayInFile]]:
    """Return the text of a .safetensors, and where the arrays are: without gaps up to the end of the file."""
    length = int.from_bytes(file.read(8), "little")
    if length > min(size - 8, LONGEST_TEXT):
        raise ValueError(f"its header is to have {length} bytes; expected at most {LONGEST_TEXT}, within the file")
    header = parse(file.read(length).decode())
    metadata = header.pop("__metadata__", None) if isinstance(header, dict) else None
    if not isinstance(metadata, dict) or not isinstance(metadata.get(KEY), str):
        raise ValueError(f"it has no metadata {KEY!r}")
    _check_count(len(header))
    stored = {name: _read_entry(name, entry, 8 + length) for name, entry in header.items()}
    end = 8 + length
    for name, stored_array in sorted(stored.items(), key=lambda item: (item[1].offset, math.prod(item[1].shape))):
        if stored_array.offset != end:
            raise ValueError(f"its array {short(name)} begins at byte {stored_array.offset}; expected {end}")
        end += stored_array.dtype.itemsize * math.prod(stored_array.shape)
    if end != size:
        raise ValueError(f"its arrays end at byte {end}, the file at byte {size}")
    return metadata[KEY], stored


def _read_entry(name: str, entry: Any, start: int) -> ArrayInFile:
    """Return the array of an entry in the header of a .safetensors file, whose arrays begin at `start`."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"its array {short(name)} is {short(entry)}; expected dtype, shape and data_offsets")
    dtype, shape, offsets = (entry[key] for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in CODES:
        raise ValueError(f"its {short(name)} has dtype {short(dtype)}; expected one of {', '.join(CODES)}")
    for key, numbers in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(numbers, list) or not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError(f"its array {short(name)} has {key} {short(str(numbers))}; expected integers from 0 on")
    if len(offsets) != 2 or offsets[1] - offsets[0] != CODES[dtype].itemsize * math.prod(shape):
        description = f"data_offsets {short(str(offsets))} for {dtype} and shape {short(str(shape))}"
        raise ValueError(f"its array {short(name)} has {description}, which do not fit")
    return ArrayInFile(CODES[dtype], tuple(shape), start + offsets[0])
