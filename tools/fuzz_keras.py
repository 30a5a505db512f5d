"""Damage Keras' files, for fuzz.py: configs, names, shapes, links, storage, compressed chunks, heaps, bytes and zips.

A file is refused with a FormatError or a ConversionError, or its cells have the weights that were written, unless
numbers, what leads to them, or bytes without a checksum were changed; if no config was changed either, the layer is the
one that was written.
"""

from __future__ import annotations

import io
import json
import re
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import h5py
import keras_forms as forms
import numpy as np
from keras_forms import drawn, entry, functional, sequential
from mutations import EXPECTED_WARNINGS, Generator, change_array, change_bytes, change_json, pick

from blockcell import FormatError, convert
from blockcell.convert import ConversionError

HUGE_SIZE = 2**40
TEXTS = ["", ".", "..", "/", "a/../b", "kernel:0", "lstm", "x" * 9000, "\0", "\u00e4", "/model_weights", "layers"]
NUMBERS = [0, 1, 2, 7, 8, 255, 1000, 2**15, 2**16 - 1, 2**24, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1]
DIRECTORY = {8: 2, 10: 2, 16: 4, 20: 4, 24: 4, 28: 2, 30: 2, 42: 4}
"""Bytes of the fields in an entry of a zip's directory: flags, method, checksum, both sizes, lengths and the place."""
VERSIONS = ["1.2.2", "2.1.6-tf", "2.15.0", "3.9.0", "", "x", "9" * 50, "-1.0"]


def make_models(g: Generator) -> list[tuple[Any, dict[str, list[Any]]]]:
    """Return models of Keras 2, each with its arrays by layer."""
    lstm = entry("LSTM", "lstm", units=3, return_sequences=True)
    gru = entry("GRU", "gru", units=2, reset_after=True, recurrent_activation="hard_sigmoid")
    head = entry("Dense", "head", units=2, activation="softmax")
    bidirectional = entry("Bidirectional", "both", layer=entry("SimpleRNN", "x", units=2, return_sequences=True))
    cells = entry("StackedRNNCells", "s", cells=[entry("LSTMCell", "c", units=2), entry("GRUCell", "d", units=3)])
    arrays = {
        "lstm": drawn(g, "LSTM", 2, 3),
        "gru": drawn(g, "GRU", 3, 2, reset_after=True),
        "head": drawn(g, "Dense", 2, 2),
        "both": drawn(g, "SimpleRNN", 2, 2) + drawn(g, "SimpleRNN", 2, 2),
        "rnn": drawn(g, "LSTM", 4, 2) + drawn(g, "GRU", 2, 3, reset_after=True),
        "emb": [g.standard_normal((5, 2)).astype(np.float32)],
    }
    line = functional(entry("InputLayer", "in"), lstm, gru, nodes=[[], ["in"], ["lstm"]], results=["gru"])
    return [
        (sequential(entry("Embedding", "emb"), lstm, gru, head), arrays),
        (sequential(bidirectional, entry("RNN", "rnn", cell=cells)), arrays),
        (sequential(sequential(lstm, gru), head), arrays),
        (line, arrays),
    ]


# ------------------------------------------------------------------------------------------------------------- changes
def list_objects(file: Any) -> list[str]:
    """Return the names of all groups and datasets in a file."""
    names: list[str] = []
    file.visit(names.append)
    return names


def change_text(g: Generator, text: str) -> str:
    """Change one place of a JSON text, or its bytes."""
    with suppress(ValueError):  # it is damaged already
        if g.integers(3):
            return change_json(g, json.loads(text))
    return change_bytes(g, text.encode()).decode("utf-8", "replace").replace("\0", "")


def change_attribute(g: Generator, file: Any) -> str:
    """Change an attribute, and return its name."""
    holder = pick(g, [file, *(file[name] for name in list_objects(file))])
    names = [*holder.attrs]
    if not names:
        return ""
    name = str(pick(g, names))
    value = holder.attrs[name]
    if name == "model_config" and isinstance(value, str) and g.integers(4):
        holder.attrs[name] = change_text(g, value)
    elif name == "keras_version" and g.integers(4):
        holder.attrs[name] = pick(g, VERSIONS)
    else:
        texts = [str(text) for text in np.ravel(np.array(value, dtype=object))]
        choices: list[Callable[[], Any]] = [
            lambda: 3,
            lambda: np.zeros((2, 2)),
            lambda: pick(g, TEXTS).replace("\0", ""),
            lambda: [pick(g, TEXTS).replace("\0", "") for _ in range(3)],
            lambda: texts * 2,
            lambda: texts[::-1],
            lambda: h5py.Empty("f"),
            lambda: np.array([b"x" * 2**15]),
        ]
        del holder.attrs[name]
        if g.integers(5):
            holder.attrs[name] = pick(g, choices)()
    return name


def change_object(g: Generator, file: Any) -> bool:
    """Change a dataset or a group, and return whether its numbers may be others."""
    names = list_objects(file)
    path = pick(g, names)
    is_array = isinstance(file[path], h5py.Dataset) and not file[path].external  # and not changed before
    is_array = is_array and file[path].id.get_storage_size() in range(1, 2**12)
    array = np.zeros((2, 2), np.float32)
    with suppress(OSError):  # its chunks are damaged already
        array = file[path][()] if is_array else array
    kind = int(g.integers(16))
    if kind == 0:
        file[f"{path}_{g.integers(2**60)}"] = h5py.SoftLink("/" + pick(g, names))
        return False
    if is_array and kind == 1:
        dataset = file[path]
        new_array = change_array(g, array)
        del file[path]
        try:
            file[path] = new_array
        except TypeError:  # an array of objects
            file[path] = dataset[()] if dataset else array
        return True
    del file[path]
    shape, dtype = array.shape, array.dtype
    match kind:
        case 2:
            file[path] = h5py.SoftLink("/" + pick(g, [*names, "nowhere"]))
        case 3:
            file[path] = h5py.ExternalLink(pick(g, ["outside.h5", "/etc/passwd", "m.h5"]), "/" + pick(g, names))
        case 4:
            layout = h5py.VirtualLayout(shape or (1,), dtype)
            layout[...] = h5py.VirtualSource("outside.h5", "/x", shape or (1,), dtype)
            file.create_virtual_dataset(path, layout)
        case 5:
            file.create_dataset(path, shape, dtype, external=[("outside.bin", 0, h5py.h5f.UNLIMITED)])
        case 6:
            huge_shape = (HUGE_SIZE, *shape[1:]) if shape else (HUGE_SIZE,)
            file.create_dataset(path, huge_shape, dtype, chunks=tuple(min(size, 2**20) for size in huge_shape))
        case 7:
            file.create_dataset(path, (2**22, 4), dtype, compression="gzip", fillvalue=0, data=None)
        case 8:
            file.create_dataset(path, shape, dtype, track_times=False)  # without numbers
        case 9:
            donor = pick(g, [name for name in list_objects(file)] or ["/"])
            file[path] = file[donor]
            return True
        case 10:
            file[path] = np.dtype("f4")
        case 11 | 12 | 13 | 14 if is_array and array.ndim:
            compress_dataset(g, file, path, array)
            if kind > 12:
                damage_chunk(g, file[path])
                return True
        case _:
            pass
    return kind == 9


def compress_dataset(g: Generator, file: Any, path: str, array: Any) -> None:
    """Store an array in compressed chunks."""
    chunk = tuple(int(g.integers(1, size + 1)) for size in array.shape)
    filters = {"shuffle": bool(g.integers(2)), "fletcher32": bool(g.integers(2))}
    file.create_dataset(path, data=array, chunks=chunk, compression=pick(g, ["gzip", "gzip", None]), **filters)


def damage_chunk(g: Generator, dataset: Any) -> None:
    """Put something else in place of a chunk: a stream that inflates to more or less, damaged bytes, no filters."""
    size = int(np.prod(dataset.chunks)) * dataset.dtype.itemsize
    place = tuple(int(g.integers(-(-n // step))) * step for n, step in zip(dataset.shape, dataset.chunks, strict=True))
    _, stored = dataset.id.read_direct_chunk(place)
    once = zlib.compress(bytes(pick(g, [0, size - 1, size, size + 1, 2 * size, 2**22])))
    stream = pick(g, [once, zlib.compress(once), once[:-1], once + b"x", change_bytes(g, stored), bytes(size)])
    with suppress(OSError):  # libhdf5 has no room for more bytes than the chunk, in a dataset without filters
        dataset.id.write_direct_chunk(place, stream or b"x", filter_mask=int(g.integers(8)) * int(g.integers(2)))


def change_stored(g: Generator, content: bytes) -> bytes:
    """Change numbers in a heap of texts, or in what points to it, or one byte anywhere."""
    new_content = bytearray(content)
    heaps = [found.start() for found in re.finditer(b"GCOL", content)]
    place, size = int(g.integers(len(content))), 1
    if heaps and g.integers(3):
        heap = pick(g, heaps)
        pointers = [found.start() for found in re.finditer(re.escape(heap.to_bytes(8, "little")), content)]
        place, size = pick(g, [heap, *pointers]) + int(g.integers(-4, 48)), pick(g, [1, 2, 4, 8])
    new_content[place : place + size] = pick(g, NUMBERS + heaps).to_bytes(8, "little")[:size]
    return bytes(new_content)


def change_directory(g: Generator, content: bytes) -> bytes:
    """Change a number in the directory of a zip."""
    new_content = bytearray(content)
    place = pick(g, [found.start() for found in re.finditer(b"PK\1\2", content)])
    offset, size = pick(g, [*DIRECTORY.items()])
    new_content[place + offset : place + offset + size] = pick(g, NUMBERS).to_bytes(8, "little")[:size]
    return bytes(new_content)


def change_zip(g: Generator, members: dict[str, bytes]) -> bool:
    """Change a member of a .keras, and return whether it says what is computed."""
    name = pick(g, [*members])
    kind = int(g.integers(4))
    if kind == 0:
        del members[name]
    elif kind == 1:
        members[f"a/{name}"] = members.pop(name)
    elif name.endswith(".json"):
        members[name] = change_text(g, members[name].decode()).encode()
    else:
        members[name] = members[name][: len(members[name]) // 2] if kind == 2 else bytes(2**22)
    return name == "config.json" or name == "metadata.json"


def write_zip(path: Path, members: dict[str, bytes], compression: int) -> None:
    """Write the members of a zip."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)


# ------------------------------------------------------------------------------------------------------------- reading
def cells_of(layer: Any) -> list[bytes]:
    """Return the weights of all cells of a layer, or of a dict of layers, as bytes."""
    layers = [*layer.values()] if isinstance(layer, dict) else [layer]
    cells = [cell for part in layers for cell in part._leaves().values()]
    return [b"".join(np.ascontiguousarray(array).tobytes() for array in cell.weights.values()) for cell in cells]


def fuzz_keras() -> Callable[[Generator], bool]:
    """Return a fuzzer of Keras' files of all forms."""
    folder = Path(tempfile.mkdtemp())
    originals: list[tuple[str, bytes, str | None, Any, list[bytes]]] = []  # with the config that stands apart
    for model, arrays in make_models(np.random.default_rng(0)):
        text = json.dumps(dict(model, keras_version="2.15.0"))
        (folder / "m.json").write_text(text)
        files = {
            "a.h5": forms.write_h5(folder / "a.h5", model, arrays),
            "b.keras": forms.write_keras(folder / "b.keras", model, arrays, "2.15.0"),
            "c.h5": forms.write_h5_weights(folder / "c.h5", model, arrays),
            "d.weights.h5": forms.write_weights(folder / "d.weights.h5", model, arrays),
        }
        for name, path in files.items():
            config = text if name[0] in "cd" else None
            layer = read(folder / "m.json", path) if config else read(path, None)
            originals.append((name, path.read_bytes(), config, layer, cells_of(layer)))

    def change_file(g: Generator, path: Path, content: bytes, config: str | None) -> tuple[str | None, bool, bool]:
        """Write a changed file; return its config, if that may mean another layer, and if all numbers are there.

        The config is that of a file of weights alone.
        """
        is_other, is_same, members, content_of = False, True, {}, io.BytesIO(content)
        if path.suffix == ".keras":
            with zipfile.ZipFile(content_of) as archive:
                members = {member: archive.read(member) for member in archive.namelist()}
            content_of = io.BytesIO(members["model.weights.h5"])
        for _ in range(g.integers(1, 3)):
            kind = int(g.integers(4))
            if kind == 0 and config:
                config, is_other = change_text(g, config), True
            elif kind == 1 and members:
                is_other |= change_zip(g, members)
            else:
                with h5py.File(content_of, "r+") as file:
                    change = change_object if kind > 1 and len(file) else None
                    if change and list_objects(file):
                        is_same &= not change_object(g, file)
                    else:
                        attribute = change_attribute(g, file)
                        is_other |= attribute in ("model_config", "keras_version")
                        is_same &= attribute not in ("weight_names", "layer_names", "name")
                if members:
                    members["model.weights.h5"] = content_of.getvalue()
        if not g.integers(4):
            content_of, is_same = io.BytesIO(change_stored(g, content_of.getvalue())), False
            if "model.weights.h5" in members:
                members["model.weights.h5"] = content_of.getvalue()
        if members:
            write_zip(path, members, zipfile.ZIP_DEFLATED if g.integers(2) else zipfile.ZIP_STORED)
            change = pick(g, [None, None, change_bytes, change_directory])
            if change:
                path.write_bytes(change(g, path.read_bytes()))
        else:
            path.write_bytes(content_of.getvalue())
        return config, is_other, is_same

    def try_mutant(g: Generator) -> bool:
        """Read a changed file, and return whether it was accepted."""
        name, content, config, original, cells = pick(g, originals)
        path, architecture = folder / f"mutant_{name}", folder / "mutant.json"
        config, is_other, is_same = change_file(g, path, content, config)
        if config:
            architecture.write_text(config)
        try:
            layer = read(architecture, path) if config else read(path, None)
        except (FormatError, ConversionError) as error:
            assert str(error)
            return False
        finally:
            path.unlink()
        if is_same:
            assert {*cells_of(layer)} <= {*cells}
            assert is_other or (repr(layer) == repr(original) and cells_of(layer) == cells)
        return True

    return try_mutant


def read(path: Path, weights: Path | None) -> Any:
    """Read a layer from a file, or from an architecture and a file of weights."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", EXPECTED_WARNINGS, UserWarning)
        return convert.from_keras(path, weights=weights)


TARGETS = {"keras_files": fuzz_keras}
