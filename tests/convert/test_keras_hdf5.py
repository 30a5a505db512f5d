"""HDF5 files from others: nothing outside of the file is read, and nothing is allocated that the file does not hold."""

from __future__ import annotations

import struct
import sys
import zipfile

import keras_bombs
import keras_forms as forms
import numpy as np
import pytest
from convert_cases import H, I, assert_same, from_keras, rng
from keras_forms import drawn, entry, sequential

from blockcell import FormatError

h5py = pytest.importorskip("h5py")
KERNEL = "model_weights/a/a/cell/kernel:0"
GROUP = "model_weights/a"
CHUNKS = "kernel:0 is stored in chunks, or compressed; expected one block .* `h5repack -f NONE -l CONTI` makes it"


@pytest.fixture
def path(tmp_path):
    """Write a file with an LSTM."""
    model = sequential(entry("LSTM", "a", units=H))
    return forms.write_h5(tmp_path / "m.h5", model, {"a": drawn(rng(), "LSTM", I, H)})


def replace_item(path, name, put):
    """Replace an item of a file by `put`, which takes the file, the name and the array that was there, or None."""
    with h5py.File(path, "r+") as file:
        array = file[name][()] if isinstance(file[name], h5py.Dataset) else None
        file.move(name, "kept")
        put(file, name, array)
    return path


def put_virtual(file, name, array):
    """Put a virtual dataset there, of another file."""
    layout = h5py.VirtualLayout(array.shape, array.dtype)
    layout[...] = h5py.VirtualSource("other.h5", "kernel", array.shape, array.dtype)
    file.create_virtual_dataset(name, layout)


def put_external(file, name, array):
    """Put a dataset there whose data is in another file."""
    with open("outside.bin", "wb") as other:
        other.write(array.tobytes())
    file.create_dataset(name, array.shape, array.dtype, external=[("outside.bin", 0, array.nbytes)])


def put_link(file, name, array):
    """Put a link to another file there."""
    with h5py.File("other.h5", "w") as other:
        other["kernel"] = array
    file[name] = h5py.ExternalLink("other.h5", "/kernel")


def put_null(file, name, array):
    """Put a dataset without data there."""
    file[name] = h5py.Empty("f4")


def put_value(value):
    """Return a function that puts a value there, or what a function makes of the array."""

    def put(file, name, array):
        file[name] = value(array) if callable(value) else value

    return put


def put_empty(shape, **options):
    """Return a function that puts an empty dataset there."""

    def put(file, name, array):
        file.create_dataset(name, shape, "f4", **options)

    return put


@pytest.mark.parametrize(
    ("name", "put", "message"),
    [
        (KERNEL, put_link, "is a link, and may lead out of the file"),
        (KERNEL, put_value(h5py.SoftLink("/kept")), "is a link"),
        (GROUP, put_value(h5py.SoftLink("/kept")), "/model_weights/a is a link"),
        ("model_weights/a/a", put_value(h5py.SoftLink("/kept")), "/model_weights/a/a is a link"),
        ("model_weights", put_value(h5py.SoftLink("/kept")), "/model_weights is a link"),
        (GROUP, put_value(h5py.ExternalLink("m.h5", "/kept")), "/model_weights/a is a link"),
        (KERNEL, put_virtual, "is a virtual dataset, which may read other files"),
        (KERNEL, put_external, "has external storage: its numbers are in another file"),
        (KERNEL, put_empty((I, 4 * H)), "has 0 bytes; expected 192"),
        (KERNEL, put_empty((2**40, 4 * H)), "bytes, in a file of"),
        (KERNEL, put_empty((2**40, 4 * H), chunks=(1, 4 * H)), CHUNKS),
        (KERNEL, put_empty((I, 4 * H), compression="gzip"), CHUNKS),
        (KERNEL, put_null, "is no array of numbers"),
        (KERNEL, put_value("text"), "is no array of numbers"),
        (KERNEL, put_value(np.dtype("f4")), "is no group or dataset"),
        (KERNEL, lambda file, name, array: file.create_group(name), "is a group; expected a dataset"),
        (GROUP, put_value(np.zeros(3)), "/model_weights/a is a dataset; expected a group"),
        (KERNEL, put_value(lambda array: array.astype("i4")), "kernel has dtype int32"),
        (KERNEL, put_value(lambda array: array.astype("c8")), "is no array of numbers"),
        (KERNEL, lambda file, name, array: None, "there is no /model_weights/a/a/cell/kernel:0"),
    ],
)
def test_refused(path, name, put, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FormatError, match=message):
        from_keras(replace_item(path, name, put))


def test_one_dataset_under_many_names(tmp_path):
    """A file may name an array more than once, but not often enough to fill the memory."""
    array = np.zeros((500, 2000), np.float32)
    layers = [entry("Bidirectional", f"b{k}", layer=entry("LSTM", "x", units=500, use_bias=False)) for k in range(20)]
    path = tmp_path / "m.h5"
    forms.write_h5(path, sequential(*layers), {})
    with h5py.File(path, "r+") as file:
        file["kept"] = array
        for k in range(20):
            group = file[f"model_weights/b{k}"]
            names = [f"{side}_{role}" for side in ("forward", "backward") for role in ("kernel", "recurrent_kernel")]
            group.attrs["weight_names"] = np.array([name.encode() for name in names])
            for name in names:
                group[name] = file["kept"]
    with pytest.raises(FormatError, match=r"has 4000000 bytes, in a file of"):
        from_keras(path)


@pytest.mark.parametrize("form", ["big-endian", "compact", "fixed names", "numbered names"])
def test_accepted(path, form):
    """What a file may be rewritten to without a change of its numbers."""
    expected = from_keras(path)

    def put(file, name, array):
        if form == "big-endian":
            file[name] = array.astype(">f4")
        else:
            properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            properties.set_layout(h5py.h5d.COMPACT)
            space, kind = h5py.h5s.create_simple(array.shape), h5py.h5t.py_create(array.dtype)
            dataset = h5py.h5d.create(file.id, name.encode(), kind, space, properties)
            h5py.Dataset(dataset)[...] = array

    if "names" in form:
        with h5py.File(path, "r+") as file:
            names = file[GROUP].attrs["weight_names"]
            del file[GROUP].attrs["weight_names"]
            if form == "fixed names":
                file[GROUP].attrs["weight_names"] = np.array([name.encode() for name in np.ravel(names).astype(str)])
            else:  # Keras divides what is too long for one attribute
                for k, name in enumerate(np.ravel(names).astype(str)):
                    file[GROUP].attrs[f"weight_names{k}"] = np.array([name.encode()])
    else:
        replace_item(path, KERNEL, put)
    assert_same(from_keras(path), expected)


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("weight_names", 3, "the attribute weight_names is no text"),
        ("weight_names", [], "has arrays of shapes"),
        ("weight_names", ["a/../kernel"], "there is no"),
        ("weight_names", ["."], "there is no /model_weights/a/."),
        ("weight_names", None, "/model_weights/a has no attribute weight_names"),
    ],
)
def test_attributes(path, attribute, value, message):
    with h5py.File(path, "r+") as file:
        del file[GROUP].attrs[attribute]
        if value is not None:
            file[GROUP].attrs[attribute] = value
    with pytest.raises(FormatError, match=message):
        from_keras(path)


def test_names_in_many_attributes(path):
    """libhdf5 looks through all attributes for each: their time would grow with the square of their number."""
    with h5py.File(path, "r+") as file:
        names = [*file[GROUP].attrs.pop("weight_names")]
        for k in range(512):
            file[GROUP].attrs[f"weight_names{k}"] = np.array(names[k : k + 1], "S")
    assert from_keras(path).hidden_size == H
    with h5py.File(path, "r+") as file:
        file[GROUP].attrs["weight_names512"] = np.array([], "S1")
    with pytest.raises(FormatError, match="/model_weights/a has 513 attributes; expected at most 512"):
        from_keras(path)


def test_groups_in_a_circle(tmp_path):
    """Arrays alone have no config that would end a walk through groups."""
    with h5py.File(tmp_path / "m.weights.h5", "w") as file:
        layers = file.create_group("layers")
        for k in range(3):
            layers[f"sequential_{k}"] = file["/"]
    with pytest.raises(FormatError, match=r"has a path of \d+ letters; expected at most 4096"):
        from_keras(tmp_path / "m.weights.h5")


# --------------------------------------------------------------------------------------------- texts of variable length
def copy_file(source, target, **options):
    """Copy a file into one that h5py writes with other options, with all texts of variable length."""

    def copy_attributes(item, other):
        for name, value in item.attrs.items():
            texts = np.ravel(np.array(value, object))
            strings = [text.decode() if isinstance(text, bytes) else text for text in texts]
            other.attrs.create(name, strings if np.ndim(value) else strings[0], dtype=h5py.string_dtype())

    def copy_item(name, item):
        is_group = isinstance(item, h5py.Group)
        copy_attributes(item, new.create_group(name, **groups) if is_group else new.create_dataset(name, data=item[()]))

    groups = {"track_order": options.pop("track_order", None)}
    with h5py.File(source) as old, h5py.File(target, "w", **options) as new:
        copy_attributes(old, new)
        old.visititems(copy_item)
    return target


@pytest.mark.parametrize("options", [{}, {"libver": "latest"}, {"track_order": True}], ids=str)
@pytest.mark.parametrize("count", [1, 40])
def test_texts_of_variable_length(options, count, tmp_path):
    """In headers of both versions, in one block or several, whatever they have beside them."""
    g = rng()
    layers = [entry("LSTM", f"a{k}", units=H, return_sequences=True) for k in range(count)]
    model = sequential(*layers, keras_version="2.15.0")
    arrays = {f"a{k}": drawn(g, "LSTM", H if k else I, H) for k in range(count)}
    path = forms.write_h5(tmp_path / "m.h5", model, arrays)
    with h5py.File(path, "r+") as file:
        for k in range(5):
            file["model_weights"].attrs[f"other_{k}"] = "\u00e4" * 50
    assert_same(from_keras(copy_file(path, tmp_path / "n.h5", **options)), from_keras(path))


def test_many_attributes_of_one_group(path, tmp_path):
    """From nine attributes on, new versions of HDF5 store them in a heap of another kind."""
    with h5py.File(path, "r+") as file:
        for k in range(20):
            file[GROUP].attrs[f"other_{k}"] = "a"
    expected = from_keras(path)
    assert_same(from_keras(copy_file(path, tmp_path / "n.h5")), expected)
    with pytest.raises(FormatError, match="weight_names has texts of variable length, and is not in the header"):
        from_keras(copy_file(path, tmp_path / "o.h5", libver="latest"))


def change_heap(path, change):
    """Change the heap of texts of variable length: `change` takes the file's content and the place of the heap."""
    content = bytearray(path.read_bytes())
    change(content, content.index(b"GCOL"))
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("offset", "pattern", "value", "message"),
    [
        (0, "<4s", b"gcol", "there is no heap at"),
        (8, "<Q", 2**62, "bytes of texts, in a file of"),
        (8, "<Q", 2**15, "it ends before the 32768 bytes at"),
        (24, "<Q", 1, "a text of .* bytes is not in the heap at"),
        (16, "<H", 9, "a text of .* bytes is not in the heap at"),
    ],
)
def test_damaged_heaps(path, offset, pattern, value, message):
    def change(content, heap):
        struct.pack_into(pattern, content, heap + offset, value)

    change_heap(path, change)
    with pytest.raises(FormatError, match=message):
        from_keras(path)


def test_virtual_datasets_are_not_opened(path):
    """A wrong byte in the heap of a virtual dataset would end the process in libhdf5 2.0."""
    replace_item(path, KERNEL, put_virtual)

    def change(content, heap):
        heap = content.rindex(b"GCOL", 0, content.index(b"other.h5"))
        content[heap + 32] = 128

    change_heap(path, change)
    with pytest.raises(FormatError, match="is a virtual dataset, which may read other files"):
        from_keras(path)


def test_compressed_heaps(tmp_path):
    """libhdf5 would inflate a heap with links without a limit."""
    path = tmp_path / "m.weights.h5"
    with h5py.File(path, "w", libver="latest") as file:
        layers = file.create_group("layers")
        for k in range(20):
            layers.create_group(f"lstm_{k}")
    content = bytearray(path.read_bytes())
    struct.pack_into("<H", content, content.index(b"FRHP") + 7, 20)
    path.write_bytes(content)
    with pytest.raises(FormatError, match="a heap of its names is compressed"):
        from_keras(path)


# --------------------------------------------------------------------------------------------------- memory and time
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems do not tell a process' peak memory")
@pytest.mark.parametrize("name", keras_bombs.BOMBS)
def test_what_a_file_may_take(name, tmp_path):
    """No more than docs/reliability.md says, in a process of its own."""
    weights = keras_bombs.BOMBS[name](tmp_path / name)
    seconds, size, outcome = keras_bombs.measure(tmp_path / name, weights)
    print(f"{name}: {seconds:.2f} s, {size / 2**20:.1f} MiB, {outcome}")
    assert outcome.startswith(("FormatError", "LSTM"))
    file_size = (tmp_path / name).stat().st_size
    assert size < 32 * file_size + 2**24
    assert seconds < max(1, 2 * file_size / 1e6)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems do not tell a process' peak memory")
@pytest.mark.parametrize("is_compressed", [False, True])
def test_what_a_large_layer_takes(is_compressed, tmp_path):
    """Four times its weights, of which a compressed .keras may have four times its own bytes."""
    units = 500
    arrays = [rng().integers(0, 64, shape).astype(np.float32) for shape in ((units, 4 * units),) * 2 + ((4 * units,),)]
    content = sequential(entry("LSTM", "a", units=units)), {"a": arrays}
    if is_compressed:
        path = forms.write_keras(tmp_path / "m.keras", *content, compression=zipfile.ZIP_DEFLATED)
    else:
        path = forms.write_h5(tmp_path / "m.h5", *content)
    seconds, size, outcome = keras_bombs.measure(path)
    file_size, array_size = path.stat().st_size, sum(array.nbytes for array in arrays)
    print(f"{file_size} bytes with arrays of {array_size}: {seconds:.2f} s, {size} bytes")
    assert outcome == "LSTM" and (array_size > 3 * file_size) == is_compressed
    assert size < 4 * array_size + 2**24
    assert seconds < 2 * file_size / 1e6
