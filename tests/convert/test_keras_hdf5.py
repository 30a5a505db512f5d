"""HDF5 files from others: nothing outside of the file is read, and nothing is allocated that the file does not hold."""

from __future__ import annotations

import keras_forms as forms
import numpy as np
import pytest
from convert_cases import H, I, assert_same, rng
from keras_forms import drawn, entry, sequential

from blockcell import FormatError, convert

h5py = pytest.importorskip("h5py")
KERNEL = "model_weights/a/a/cell/kernel:0"
GROUP = "model_weights/a"


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
        (KERNEL, put_empty((2**40, 4 * H), chunks=(1, 4 * H)), "bytes, in a file of"),
        (KERNEL, put_empty((2**22, 4 * H), compression="gzip"), "bytes, in a file of"),
        (KERNEL, put_empty((I, 4 * H), chunks=(I, 4 * H)), "has 0 chunks; expected 1"),
        (
            KERNEL,
            put_empty((I, 4 * H), chunks=(2**20, 4 * H), maxshape=(None, 4 * H)),
            "a chunk of .* bytes, in a file",
        ),
        (
            KERNEL,
            put_empty((I, 4 * H), chunks=(I, 4 * H), scaleoffset=3),
            "compressed by a filter that is not HDF5's own",
        ),
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
        convert.from_keras(replace_item(path, name, put))


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
        convert.from_keras(path)


@pytest.mark.parametrize("form", ["deflated", "big-endian", "compact", "fixed names", "numbered names"])
def test_accepted(path, form):
    """What a file may be rewritten to without a change of its numbers."""
    expected = convert.from_keras(path)

    def put(file, name, array):
        if form == "deflated":
            file.create_dataset(name, data=array, compression="gzip", shuffle=True, fletcher32=True)
        elif form == "big-endian":
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
    assert_same(convert.from_keras(path), expected)


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
        convert.from_keras(path)


def test_groups_in_a_circle(tmp_path):
    """Arrays alone have no config that would end a walk through groups."""
    with h5py.File(tmp_path / "m.weights.h5", "w") as file:
        layers = file.create_group("layers")
        for k in range(3):
            layers[f"sequential_{k}"] = file["/"]
    with pytest.raises(FormatError, match="has too many layers, or layers within layers"):
        convert.from_keras(tmp_path / "m.weights.h5")
