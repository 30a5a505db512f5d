"""Variables that a checkpoint has by other names than its graph: object graphs, Savers, captures; and other files."""

from __future__ import annotations

import numpy as np
import pytest
from tf_cells import H, I, X, agrees, exact, number
from tf_files import entry, graph, node, tracked, write_checkpoint, write_objects
from tf_names import BIAS, GIVEN, VALUE, W, cell_of_keras, one_cell, restoring, texts, variable, write_all, write_saved

from blockcell import FormatError, convert
from blockcell.tensorflow import objects as objects_module
from blockcell.tensorflow import open as opened


def numbered(*keys):
    return {key: np.float32(k).reshape(()) for k, key in enumerate(keys)}


# ------------------------------------------------------------------------------------------------------------- objects
def layered(full, *, lists=True):
    """Return a model of two layers, each with a cell of a kernel and a bias, which are in a list of variables, too."""
    keys = [f"variables/{k}{VALUE}" for k in range(4)]
    variables = [tracked({}, (full[k], keys[k])) for k in range(4)]
    objects = [
        tracked({"variables": 1, "layer-0": 2, "layer-1": 3}),
        tracked({str(k): 6 + k for k in range(4)} if lists else {}),
        tracked({"cell": 4}),
        tracked({"cell": 5, "again": 0}),
        tracked({"kernel": 6, "bias": 7}),
        tracked({"kernel": 8, "bias": 9}),
        *variables,
    ]
    return keys, objects


ALL = ["a/kernel", "a/bias", "b/kernel", "b/bias"]
PATHS = ["layer-0/cell/kernel", "layer-0/cell/bias", "layer-1/cell/kernel", "layer-1/cell/bias"]
FULL = {
    "full names": (ALL, ALL),
    "none": ([""] * 4, PATHS),
    "without scopes": (["kernel", "bias", "kernel_1", "bias_1"], PATHS),
    "the same": ([*ALL[:2], *ALL[:2]], PATHS),
    "one the same": ([*ALL[:3], "a/bias"], PATHS),
    "a layer's the same": ([*ALL[:2], "c", "c"], [*ALL[:2], *PATHS[2:]]),
    "another's path": (["layer-1/cell/kernel", "x/bias", "", ""], ["variables/0", "x/bias", "variables/2", PATHS[3]]),
    "another's key": ([f"variables/1{VALUE}", "a/bias", "b/kernel", "b/bias"], ["variables/0", *ALL[1:]]),
}


@pytest.mark.parametrize("case", FULL)
def test_names_of_objects(tmp_path, case):
    full, expected = FULL[case]
    keys, objects = layered(full)
    variables = opened(write_objects(tmp_path / "m", numbered(*keys), graph(*objects))).variables
    wanted = [name + VALUE if name.startswith("variables/") else name for name in expected]
    assert list(variables) == wanted and variables.slots == set()
    for k, (key, name) in enumerate(zip(keys, wanted, strict=True)):
        assert variables[key] == variables[name] == k and key in variables and name in variables
        assert variables.name_of(key) == name and variables.stored[name].shape == ()
    assert "variables/7" not in variables and 5 not in variables


def test_slots_of_objects(tmp_path):
    """Keras' optimizers, old and new, are told from variables by the objects, whatever the names are."""
    keys = [
        f"{name}{VALUE}" for name in ("a/kernel", "a/kernel/.OPTIMIZER_SLOT/o/m", "o/_variables/1", "o/_iterations")
    ]
    full = ["x/kernel", "Adam/x/kernel", "Adam/m/x/kernel", "iteration"]
    objects = [
        tracked({"a": 1, "o": 2}),
        tracked({"kernel": 4}),
        tracked({"_variables": 3, "_iterations": 7}),
        tracked({"0": 7, "1": 6}),
        *(tracked({}, pair) for pair in zip(full, keys, strict=True)),
    ]
    variables = opened(write_objects(tmp_path / "m", numbered(*keys), graph(*objects))).variables
    assert {*variables} == {*full[:3], "o/_iterations"}
    assert variables.slots == {"Adam/x/kernel", "Adam/m/x/kernel", "o/_iterations"}


def test_entangled_objects(tmp_path):
    """Cycles, a long chain, the same name or key twice, and what is reached by nothing."""
    keys = [f"{name}{VALUE}" for name in ("far", "twice", "alone", "child")]
    chain = [tracked({"self": k, "next": k + 1, "root": 0}) for k in range(1, 3000)]
    objects = [
        tracked({"chain": 1, "x": 3002}) + tracked({"x": 3004}),
        *chain,
        tracked({"kernel": 3001}),
        tracked({}, ("", keys[0])),
        tracked({}, ("", keys[1]), ("other", keys[2])),
        tracked({}, ("", keys[1]), ("", keys[2])),
        tracked({}, ("a" * 2000, keys[3])),
    ]
    variables = opened(write_objects(tmp_path / "m", numbered(*keys), graph(*objects))).variables
    assert {*variables} == {*keys}  # no name is one's own, so all have their keys


def test_long_paths_take_no_time(tmp_path):
    """A name that is a path is put together once for all that are behind it, and no longer than some."""
    count, depth = 2000, 60
    keys = [f"k{k}{VALUE}" for k in range(count)]
    for name, is_path in (("n", True), ("n" * 900, False)):
        chain = [tracked({f"{name}{k}": k + 1}) for k in range(depth)]
        fan = tracked({f"v{k}": depth + 1 + k for k in range(count)})
        objects = graph(*chain, fan, *(tracked({}, ("", key)) for key in keys))
        names = [*opened(write_objects(tmp_path / "m", numbered(*keys), objects)).variables]
        way = "/".join(f"{name}{k}" for k in range(depth))
        assert {*names} == ({f"{way}/v{k}" for k in range(count)} if is_path else {*keys})


@pytest.mark.parametrize(
    ("objects", "words"),
    [
        ([tracked({"a": 1})], "an object has the number 1; there are 1"),
        ([tracked({"a": -1})], "an object has the number -1"),
        ([tracked({f"a{k}": 0 for k in range(30)})], "more than 20 children"),
        ([tracked({})] * 70, "more than 4. objects"),
        ([b"\x0a\x7f"], "a field ends at byte"),
        ([tracked({}, ("\udcff".encode("utf-8", "surrogateescape"), "a"))], "not UTF-8"),
    ],
)
def test_what_is_no_graph_of_objects(tmp_path, monkeypatch, objects, words):
    monkeypatch.setattr(objects_module, "MOST_CHILDREN", 20)
    monkeypatch.setattr(objects_module, "MOST_OBJECTS", 40)
    path = write_objects(tmp_path / "m", numbered(f"a{VALUE}"), graph(*objects))
    with pytest.raises(FormatError, match=f"m.data-00000-of-00001, byte \\d+: .*{words}"):
        opened(path)


def test_texts_are_checked(tmp_path):
    path = write_objects(tmp_path / "m", numbered(f"a{VALUE}"), graph(*layered(ALL)[1]))
    data = tmp_path / "m.data-00000-of-00001"
    good = data.read_bytes()
    for at in range(4, len(good)):
        data.write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
        with pytest.raises(FormatError, match=r"the checksum of a text|a text of .* bytes, its length|goes on"):
            opened(path)
    data.write_bytes(good[:-1])
    with pytest.raises(FormatError, match="should end"):
        opened(path)
    data.unlink()
    assert list(opened(path).variables) == [f"a{VALUE}"]
    for size in range(5):  # not even a length and a checksum
        entries = {b"_CHECKPOINTABLE_OBJECT_GRAPH": entry("string", (), bytes(size))}
        write_checkpoint(tmp_path / "short", entries, bytes(size))
        with pytest.raises(FormatError, match="a text of 0 bytes" if size else "goes on"):
            opened(tmp_path / "short")


# -------------------------------------------------------------------------------------------------------------- Savers


def is_right(cell, w=W, b=BIAS, **options):
    agrees(cell.layer(**options), exact("BlockLSTM", {"w": w, "b": b}, X, forget_bias=1.0, cell_clip=3.0), X)
    assert cell.check().ok


def test_names_of_a_saver(tmp_path):
    cell = write_all(tmp_path, {"k": W, "b": BIAS}, *one_cell(), *restoring("save", GIVEN))
    assert cell.weights == {"w": "s/kernel", "b": "s/bias"} and cell.name == "s"
    is_right(cell)


def test_its_own_saver_counts_more(tmp_path):
    """More than another's, and more than the variable's own name."""
    values = {"k": W, "b": BIAS, "other": W + 1, "s/kernel": W + 2}
    other = restoring("save_1", {"s/kernel": ("other", "")})
    is_right(write_all(tmp_path, values, *one_cell(), *other, *restoring("save", GIVEN)))
    cell = write_all(tmp_path, values, *one_cell(), *restoring("save_1", GIVEN))
    is_right(cell, w=W + 2)  # the names of others are the last
    del values["s/kernel"]
    is_right(write_all(tmp_path, values, *one_cell(), *restoring("save_1", GIVEN)))
    cell = write_all(tmp_path, values, *one_cell(), *other, *restoring("save_2", GIVEN))
    assert "'s/kernel', which is saved as k or other: not one weight" in cell.refused


def test_averages_by_a_saver(tmp_path):
    averages = {f"{name}/ExponentialMovingAverage": (f"{key}_average", "") for name, (key, _) in GIVEN.items()}
    parts = [variable(name, 1) for name in averages] + restoring("save", GIVEN | averages)
    values = {"k": W, "b": BIAS, "k_average": W * 2, "b_average": BIAS * 2}
    cell = write_all(tmp_path, values, *one_cell(), *parts)
    is_right(cell, W * 2, BIAS * 2, average=True)
    is_right(cell)


PARTS = {
    "in order": ((4, 5), ["9 16 0,4:-", "9 16 4,5:0,16"], W),
    "in another order": ((5, 4), ["9 16 4,5:0,16", "9 16 0,4:-"], np.concatenate([W[4:], W[:4]])),
    "not all": ((4, 5), ["12 16 0,4:-", "12 16 6,5:-"], np.concatenate([W[:4], W[5:], W[-1:] * 2])),
}


@pytest.mark.parametrize("case", PARTS)
def test_parts_by_a_saver(tmp_path, case):
    """What was one variable, or parts of one, is what the graph joins."""
    sizes, slices, expected = PARTS[case]
    stored = W if case != "not all" else np.concatenate([W[:4], W[:2], W[5:], W[-1:] * 2, W[:1]])
    restored = {f"s/kernel/part_{k}": ("k", text) for k, text in enumerate(slices)} | {"s/bias": ("b", "")}
    averages = {"k/ExponentialMovingAverage": stored * 2, "b/ExponentialMovingAverage": BIAS * 2}
    cell = write_all(tmp_path, {"k": stored, "b": BIAS} | averages, *one_cell(*sizes), *restoring("save", restored))
    is_right(cell, expected)
    is_right(cell, expected * 2, BIAS * 2, average=True)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("9 16 0,4:0,99", "a part of the variable 'k' that it does not have"),
        ("9 16 0,4", "a part of the variable 'k' that it does not have"),
        ("9 16 -1,4:-", "'s/kernel', which is not in the checkpoint"),
        ("9 16 " + "0,4:" * 9999, "'s/kernel', which is not in the checkpoint"),
        ("x", "'s/kernel', which is not in the checkpoint"),
    ],
)
def test_refused_slices(tmp_path, text, words):
    restored = GIVEN | {"s/kernel": ("k", text)}
    assert words in write_all(tmp_path, {"k": W, "b": BIAS}, *one_cell(), *restoring("save", restored)).refused


@pytest.mark.parametrize("change", ["names", "no names", "numbers", "count", "gone", "inputs"])
def test_savers_that_are_none(tmp_path, change):
    """They say nothing, and the names of the variables count."""
    parts = restoring("save", {"s/kernel": ("other", ""), "s/bias": ("other", "")})
    parts[0] = {
        "names": node("save/names", "Placeholder"),
        "no names": texts("save/names"),
        "numbers": number("save/names", 3),
        "count": texts("save/names", "other"),
        "gone": node("save/unused", "NoOp"),
    }.get(change, parts[0])
    if change == "inputs":
        parts[2] = node("save/RestoreV2", "RestoreV2", ["file"])
    is_right(write_all(tmp_path, {"s/kernel": W, "s/bias": BIAS, "other": W + 1}, *one_cell(), *parts))


# --------------------------------------------------------------------------------------------------------- SavedModels


@pytest.mark.parametrize("called", [True, False])
def test_captured_variables(tmp_path, called):
    cell = write_saved(tmp_path / "m", called=called)
    assert cell.weights == {"w": "s/w", "b": "s/b"}
    is_right(cell)


def test_captured_constants(tmp_path):
    is_right(write_saved(tmp_path / "m", called=False, constants=["c"]), W * 2)


@pytest.mark.parametrize("change", [{"numbers": ()}, {"numbers": (2,)}, {"numbers": [2] * 6}, {"names": ("p", "q")},
                                    {"numbers": (0, 1)}, {"constants": ["gone"]}])  # fmt: skip
def test_captures_that_are_none(tmp_path, change):
    assert "which nothing calls" in write_saved(tmp_path / "m", called=False, **change).refused
    is_right(write_saved(tmp_path / "n", called=True, **change))


def test_captures_outside_the_graph(tmp_path):
    with pytest.raises(FormatError, match="an object has the number 4; there are 4"):
        write_saved(tmp_path / "m", called=False, numbers=(2, 4))


# --------------------------------------------------------------------------------------------------------------- Keras


def write_cell(tmp_path, *sizes, **options):
    values, objects = cell_of_keras(*sizes, **options)
    return opened(write_objects(tmp_path / "m", values, objects)).cells, [*values.values()][: len(values) // 2]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize(("gates", "bias"), [(4, (4 * H,)), (4, ()), (3, (3 * H,)), (3, (2, 3 * H))])
def test_cells_of_keras(tmp_path, gates, bias, dtype):
    cells, values = write_cell(tmp_path, gates, gates, bias, dtype)
    (cell,) = cells.values()
    assert (cell.name, cell.kind) == ("gru/gru_cell", "Keras LSTM" if gates == 4 else "Keras GRU")
    assert cell.unsaid == [] and (cell.input_size, cell.hidden_size, cell.refused) == (I, H, None)
    assert cell.weights["w" if gates == 4 else "w_c"] == "gru/gru_cell/kernel + gru/gru_cell/recurrent_kernel"
    values = values if bias else [*values, np.zeros(4 * H, dtype)]
    expected = convert.from_keras(values, recurrent_activation="sigmoid", check=False)
    x = X.astype(dtype)
    agrees(cell.layer(), expected(x)[0].astype(np.float64), x)
    assert cell.check() <= 8
    with pytest.raises(ValueError, match="there is no moving average"):
        cell.layer(average=True)


def test_large_cells_of_keras_are_checked_in_part(tmp_path):
    for gates, bias in ((4, (4 * 800,)), (3, (2, 3 * 800))):
        (cell,) = write_cell(tmp_path, gates, gates, bias, cells=800, inputs=600)[0].values()
        assert cell.check() <= 8


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((3, 3), "it has no bias, whose shape would tell"),
        ((4, 4, (8 * H,)), r"its bias has the shape (32,), as in CuDNN's layers; expected (16,)"),
        ((3, 3, (6 * H,)), r"its bias has the shape (24,), as in CuDNN's layers; expected (12,) or (2, 12)"),
        ((4, 3, (3 * H,)), r"its kernels have the shapes (5, 16) and (4, 12)"),
        ((5, 5, (5 * H,)), r"its kernels have the shapes (5, 20) and (4, 20)"),
    ],
)
def test_refused_cells_of_keras(tmp_path, sizes, words):
    (cell,) = write_cell(tmp_path, *sizes)[0].values()
    assert words in cell.refused


def test_other_cells_of_keras(tmp_path):
    cells, _ = write_cell(tmp_path, 1, 1, (H,))[:2]
    (cell,) = cells.values()
    assert (cell.kind, cell.refused, cell.unsaid) == ("Keras SimpleRNN", None, ["activation"])
    assert cell.check(activation="elu").ok
