"""Small files that would take much memory or time if a reader of Keras' files believed them, and what they may take.

`BOMBS` has a function for each, which writes the file at a path and returns the path of its weights, or None.
"""

from __future__ import annotations

import json
import re
import struct
import zlib

import h5py
import keras_forms as forms
import numpy as np
from fresh import run
from keras_forms import drawn, entry, sequential

LAYER = entry("LSTM", "a", units=2)
MEASURE = """
import sys, time, warnings
from blockcell import convert
def peak():
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) * 1024
def read(path, weights):
    try:
        return type(convert.from_keras(path, weights=weights)).__name__
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
warnings.simplefilter("ignore")
good, path, weights = sys.argv[1:]
read(good, None)
before, start = peak(), time.process_time()
outcome = read(path, weights or None)
print(time.process_time() - start, peak() - before, outcome)
"""


def lstm_file(path, put):
    """Write a .h5 with an LSTM; `put` writes its bias into the group, as the dataset "b"."""
    kernel, recurrent, _ = drawn(np.random.default_rng(0), "LSTM", 3, 2)
    with h5py.File(path, "w") as file:
        file.attrs["keras_version"] = "2.15.0"
        file.attrs["model_config"] = json.dumps(sequential(LAYER))
        weights = file.create_group("model_weights")
        weights.attrs["layer_names"] = np.array([b"a"])
        group = weights.create_group("a")
        group.attrs["weight_names"] = np.array([b"k", b"r", b"b"])
        group["k"], group["r"] = kernel, recurrent
        put(group)


def inflating(size, times=1, raw=False):
    """Return a deflated stream of that many zeros, deflated as often as `times` says."""
    compressor = zlib.compressobj(9, zlib.DEFLATED, -15 if raw else 15)
    content = b"".join([compressor.compress(bytes(2**20)) for _ in range(size // 2**20)] + [compressor.flush()])
    return content if times == 1 else zlib.compress(content, 9)


def deflated_twice(path):
    """A chunk that is deflated twice: 1 GB in some kilobytes."""

    def put(group):
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_chunk((8,))
        for _ in range(2):
            properties.set_filter(h5py.h5z.FILTER_DEFLATE, 0, (9,))
        space = h5py.h5s.create_simple((8,))
        dataset = h5py.h5d.create(group.id, b"b", h5py.h5t.IEEE_F32LE, space, properties)
        dataset.write_direct_chunk((0,), inflating(2**30, times=2))

    lstm_file(path, put)


def stream_longer_than_its_chunk(path):
    """A chunk whose stream inflates to 1 GB."""

    def put(group):
        dataset = group.create_dataset("b", (8,), "f4", maxshape=(None,), chunks=(2**18,), compression="gzip")
        dataset.id.write_direct_chunk((0,), inflating(2**30))

    lstm_file(path, put)


def chunks_larger_than_their_array(path):
    """A thousand numbers, each in a chunk of its own that has a MiB."""

    def put(group):
        dataset = group.create_dataset("b", (1000, 1), "f4", maxshape=(None, None), chunks=(1, 2**18), compression=9)
        stream = inflating(2**20)
        for k in range(1000):
            dataset.id.write_direct_chunk((k, 0), stream)

    lstm_file(path, put)


def one_text_many_times(path):
    """An attribute of 4000 texts of variable length, which are all one text of 500 kB."""
    count, length = 4000, 500_000
    names = np.array(["A" * length] + [f"b{k}" for k in range(count - 1)], object)
    with h5py.File(path, "w") as file:
        file.attrs["keras_version"] = "2.15.0"
        file.attrs["model_config"] = json.dumps(sequential(LAYER))
        weights = file.create_group("model_weights")
        weights.attrs["layer_names"] = np.array([b"a"])
        weights.create_group("a").attrs.create("weight_names", names, dtype=h5py.string_dtype())
    content = bytearray(path.read_bytes())
    place = content.index(b"b1".ljust(8, b"\0"))  # the heap with the short texts
    heap = content.rindex(b"GCOL", 0, place)
    long_heap = content.rindex(b"GCOL", 0, content.index(b"A" * length))
    first = content.index(struct.pack("<IQ", length, long_heap))
    assert heap != long_heap
    for k in range(count):
        content[first + 16 * k : first + 16 * k + 16] = content[first : first + 16]
    path.write_bytes(content)


def one_name_many_times(path):
    """A group of 4000 members whose names are all one of 500 kB."""
    long = "x" * 500_000
    with h5py.File(path, "w") as file:
        layers = file.create_group("layers")
        layers[long] = np.zeros(1, "f4")
        for k in range(4000):
            layers[f"b{k:04}"] = layers[long]
    content = bytearray(path.read_bytes())
    heaps = [struct.unpack_from("<QQQ", content, found.start() + 8) for found in re.finditer(b"HEAP", content)]
    (offset,) = (place - data for size, _, data in heaps if data <= (place := content.rindex(b"xxx")) < data + size)
    offset -= len(long) - 3
    node = -1
    while (node := content.find(b"SNOD", node + 1)) >= 0:
        (count,) = struct.unpack_from("<H", content, node + 6)
        for place in range(node + 8, node + 8 + 40 * count, 40):
            struct.pack_into("<Q", content, place, offset)
    path.write_bytes(content)


def heap_with_an_object_of_no_bytes(path):
    """A heap of texts with free space of no bytes, in which libhdf5 goes in a circle."""
    forms.write_h5(path, sequential(LAYER), {"a": drawn(np.random.default_rng(0), "LSTM", 3, 2)})
    content = bytearray(path.read_bytes())
    heap = content.index(b"GCOL")
    (size,) = struct.unpack_from("<Q", content, heap + 8)
    place = heap + 16
    while struct.unpack_from("<H", content, place)[0]:
        place += 16 + -(-struct.unpack_from("<Q", content, place + 8)[0] // 8) * 8
    assert place < heap + size
    struct.pack_into("<Q", content, place + 8, 0)
    path.write_bytes(content)


def directory_that_lies(path):
    """A .keras whose directory says 1000 bytes of a member that inflates to 1 GiB."""
    name, stream = b"metadata.json", inflating(2**30, raw=True)
    sizes = struct.pack("<3I", 0, len(stream), 1000)
    local = struct.pack("<4s5H", b"PK\3\4", 20, 0, 8, 0, 0) + sizes + struct.pack("<2H", len(name), 0) + name + stream
    central = struct.pack("<4s6H", b"PK\1\2", 20, 20, 0, 8, 0, 0) + sizes
    central += struct.pack("<5H2I", len(name), 0, 0, 0, 0, 0, 0) + name
    path.write_bytes(local + central + struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 1, 1, len(central), len(local), 0))


BOMBS = {
    "twice.h5": deflated_twice,
    "longer.h5": stream_longer_than_its_chunk,
    "larger.h5": chunks_larger_than_their_array,
    "texts.h5": one_text_many_times,
    "names.weights.h5": one_name_many_times,
    "circle.h5": heap_with_an_object_of_no_bytes,
    "directory.keras": directory_that_lies,
}


def measure(path, weights=None):
    """Read a file in a process of its own; return seconds of the CPU, bytes of memory at most, and what came of it."""
    good = path.parent / "good.h5"
    forms.write_h5(good, sequential(LAYER), {"a": drawn(np.random.default_rng(0), "LSTM", 3, 2)})
    result = run(["-c", MEASURE, str(good), str(path), str(weights or "")], 2, {})
    assert result.returncode == 0, result.stderr
    seconds, size, outcome = result.stdout.split(maxsplit=2)
    return float(seconds), int(size), outcome.strip()
