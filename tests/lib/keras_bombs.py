"""Small files that would take much memory or time if a reader of Keras' files believed them, and what they may take.

`BOMBS` has a function for each, which writes the file at a path and returns the path of its weights, or None.
"""

from __future__ import annotations

import io
import json
import re
import struct
import zipfile
import zlib

import h5py
import keras_forms as forms
import numpy as np
from fresh import run
from keras_forms import drawn, entry, functional, sequential

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
    """A .keras whose directory says 1000 bytes of a member that inflates to 256 MiB."""
    compressor = zlib.compressobj(9, zlib.DEFLATED, -15)
    zeros = b"".join(compressor.compress(bytes(2**20)) for _ in range(2**8))
    name, stream = b"metadata.json", zeros + compressor.flush()
    sizes = struct.pack("<3I", 0, len(stream), 1000)
    local = struct.pack("<4s5H", b"PK\3\4", 20, 0, 8, 0, 0) + sizes + struct.pack("<2H", len(name), 0) + name + stream
    central = struct.pack("<4s6H", b"PK\1\2", 20, 20, 0, 8, 0, 0) + sizes
    central += struct.pack("<5H2I", len(name), 0, 0, 0, 0, 0, 0) + name
    path.write_bytes(local + central + struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 1, 1, len(central), len(local), 0))


def write_model(path, model, put=None):
    """Write a .h5 with this config and the arrays that `put` writes into the group of the layer "a"."""
    with h5py.File(path, "w") as file:
        file.attrs["keras_version"] = "2.15.0"
        file.attrs.create("model_config", json.dumps(model), dtype=h5py.string_dtype())
        weights = file.create_group("model_weights")
        weights.attrs["layer_names"] = np.array([b"a"])
        group = weights.create_group("a")
        group.attrs["weight_names"] = np.array([], "S1")
        if put:
            put(group)


def put_names(count, name):
    """Return a function that puts that many names of arrays, in as many attributes as are needed, and one array."""

    def put(group):
        group.attrs.pop("weight_names", None)
        for k, part in enumerate(np.array_split(np.array([name] * count), 1 + count * len(name) // 60_000)):
            group.attrs[f"weight_names{k}"] = part
        group[name] = np.zeros((2, 8), "f4")

    return put


def many_names_in_a_nested_model(path):
    """Two thousand layers, and twenty thousand names of arrays among which each looks for its own."""
    inner = [entry("Dropout", f"x{k}") for k in range(2000)] + [entry("Dense", "d", units=1)]
    nested = {"class_name": "Sequential", "config": {"name": "a", "layers": inner}}
    write_model(path, sequential(nested), put_names(20_000, b"d0/1"))


def one_array_many_times(path):
    """An attribute that names one array 60,000 times."""
    write_model(path, sequential(LAYER), put_names(60_000, b"b"))


def one_array_many_times_alone(path):
    """The same without a config."""
    with h5py.File(path, "w") as file:
        file.attrs["layer_names"] = np.array([b"a"])
        put_names(60_000, b"b")(file.create_group("a"))


def one_group_many_times(path):
    """A thousand layers that are one group, in a file that does not say their order."""
    with h5py.File(path, "w") as file:
        layers = file.create_group("layers")
        forms.write_cell(layers.create_group("lstm/cell"), drawn(np.random.default_rng(0), "LSTM", 2, 2))
        layers["lstm"].create_group("vars")
        for k in range(1, 1000):
            layers[f"lstm_{k}"] = layers["lstm"]


def write_archive(path, model):
    """Write a compressed .keras without arrays."""
    content = io.BytesIO()
    h5py.File(content, "w").close()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("metadata.json", '{"keras_version": "3.9.0"}')
        archive.writestr("config.json", json.dumps(model, separators=(",", ":")))
        archive.writestr("model.weights.h5", content.getvalue())


def many_layers(path):
    """Thousands of layers in few bytes."""
    write_archive(path, sequential(*[entry("Dropout", f"{k}") for k in range(5000)]))


def many_layers_of_one_name(path):
    """Thousands of layers, each with the name that the one before it has."""
    write_archive(path, sequential(*[entry("A", "a")] * 5000) | {"class_name": "Own"})


def layers_in_layers(path):
    """A layer within 300 others, and thousands beside it."""
    model = sequential(*[entry("Dropout", "")] * 5000)
    for _ in range(300):
        model = sequential(model)
    write_archive(path, model)


def chain_with_many_readers(path):
    """A chain of a thousand layers that do nothing, at whose end a thousand others read."""
    chain, readers = [f"x{k}" for k in range(1000)], [f"y{k}" for k in range(1000)]
    parts = [entry("InputLayer", "in"), *(entry("Dropout", name) for name in chain)]
    parts += [entry("A", name) for name in readers]
    sources = [[], ["in"], *([name] for name in chain[:-1]), *([chain[-1]] for _ in readers)]
    write_archive(path, functional(*parts, nodes=sources, results=readers))


def nodes_of_many_lists(path):
    """Lists in lists in lists, with thousands of results at the bottom."""
    nodes = [["in", 0, 0]] * 20_000
    for _ in range(900):
        nodes = [nodes]
    model = functional(entry("InputLayer", "in"), LAYER, nodes=[[], ["in"]], results=["a"])
    model["config"]["layers"][1]["inbound_nodes"] = nodes
    write_model(path, model)


def long_names(path):
    """A model with a long name, which thousands of layers have in theirs."""
    nested = {"class_name": "Sequential", "config": {"name": "x" * 200_000}}
    nested["config"]["layers"] = [entry("A", f"{k}") for k in range(5000)]
    write_model(path, sequential(nested))


def lists_alone(path):
    """A config of nothing but lists, which take fifty bytes for each byte of the text."""
    path.write_text('{"keras_version": "2.15.0", "config": [' + ",".join(["[" * 500 + "]" * 500] * 262) + "]}")
    return forms.write_weights(path.with_suffix(".weights.h5"), sequential(), {})


def layers_alone(path):
    """A config of 60,000 layers, each of which takes a kilobyte in memory."""
    layers = [entry("A", f"{k}") for k in range(60_000)]
    path.write_text(json.dumps(sequential(*layers, keras_version="2.15.0"), separators=(",", ":")))
    return forms.write_weights(path.with_suffix(".weights.h5"), sequential(), {})


def texts_alone(path):
    """A config of nothing but short texts, which take ten bytes for each byte."""
    texts = ",".join(f'"{k:x}"' for k in range(500_000))
    path.write_text('{"keras_version": "2.15.0", "config": [' + texts + "]}")
    return forms.write_weights(path.with_suffix(".weights.h5"), sequential(), {})


def directory_of_many_members(path):
    """A .keras with 20,000 members."""
    with zipfile.ZipFile(path, "w") as archive:
        for k in range(20_000):
            archive.writestr(f"{k}", b"")


BOMBS = {
    "texts.h5": one_text_many_times,
    "names.weights.h5": one_name_many_times,
    "circle.h5": heap_with_an_object_of_no_bytes,
    "directory.keras": directory_that_lies,
    "nested_names.h5": many_names_in_a_nested_model,
    "array.h5": one_array_many_times,
    "array_alone.h5": one_array_many_times_alone,
    "group.weights.h5": one_group_many_times,
    "layers.keras": many_layers,
    "one_name.keras": many_layers_of_one_name,
    "layers_in_layers.keras": layers_in_layers,
    "readers.keras": chain_with_many_readers,
    "nodes.h5": nodes_of_many_lists,
    "long_names.h5": long_names,
    "lists.json": lists_alone,
    "texts.json": texts_alone,
    "layers.json": layers_alone,
    "members.keras": directory_of_many_members,
}


def measure(path, weights=None):
    """Read a file in a process of its own; return seconds of the CPU, bytes of memory at most, and what came of it."""
    good = path.parent / "good.h5"
    forms.write_h5(good, sequential(LAYER), {"a": drawn(np.random.default_rng(0), "LSTM", 3, 2)})
    result = run(["-c", MEASURE, str(good), str(path), str(weights or "")], 2, {})
    assert result.returncode == 0, result.stderr
    seconds, size, outcome = result.stdout.split(maxsplit=2)
    return float(seconds), int(size), outcome.strip()
