"""Directions and layers of the cells in a graph: what is known of them, and the one layer that they are."""

from __future__ import annotations

import json
from contextlib import nullcontext
from itertools import chain, product

import numpy as np
import pytest
from tf_cells import attributes, called, function, library, number, opened, real, write
from tf_files import GOLDEN as FILES
from tf_files import field, graph, node
from tf_networks import (
    BI,
    A,
    B,
    H,
    I,
    T,
    beside,
    block,
    cast,
    consts,
    loop,
    rows,
    swapped,
    weights,
    whole,
    written_out,
)

import blockcell
from blockcell import LSTM, Bidirectional, Stack, formulas
from blockcell.command import main

LENGTHS = np.array([6, 2, 4])
X = np.random.default_rng(5).standard_normal((T, B, I)).astype(np.float32)
GOLDEN = FILES.with_name("networks.npz")
OTHERWISE = "merges other numbers"
ORDER = "has the output of the backward direction first"
TOP = [beside("both", A, "back"), block("c", "both")]
NETWORKS = {  # nodes; the direction and the input of each cell; the layer that they are, or why they are none
    "stacked": (
        [block("a", "x"), block("b", A)],
        {"a": (False, "x"), "b": (False, ("a",))},
        lambda of: Stack([of("a"), of("b")]),
    ),
    "all reversed": (
        [whole("turned", "x"), block("a", "turned"), whole("back", A)],
        {"a": (True, "x")},
        lambda of: of("a", True),
    ),
    "rows reversed": ([rows("turned", "x"), block("a", "turned")], {"a": (True, "x")}, lambda of: of("a", True)),
    "another axis": (
        [whole("turned", "x", "second"), block("a", "turned")],
        {"a": (False, "turned")},
        lambda of: of("a"),
    ),
    "negative axis": (
        [number("axis", [-3]), whole("turned", "x", "axis"), block("a", "turned")],
        {"a": (True, "x")},
        lambda of: of("a", True),
    ),
    "rows of another axis": (
        [rows("turned", "x", seq_dim=1, batch_dim=0), block("a", "turned")],
        {"a": (False, "turned")},
        lambda of: of("a"),
    ),
    "batch first": (
        [swapped("s", "x"), rows("turned", "s", seq_dim=1), swapped("t", "turned"), block("a", "t")],
        {"a": (True, "x")},
        lambda of: of("a", True),
    ),
    "another permutation": ([swapped("s", "x", "turn"), block("a", "s")], {"a": (False, "s")}, lambda of: of("a")),
    "permutation that keeps": ([swapped("s", "x", "keep"), block("a", "s")], {"a": (False, "x")}, lambda of: of("a")),
    "backwards on top of backwards": (
        [whole("turned", "x"), block("a", "turned"), block("b", A)],
        {"a": (True, "x"), "b": (True, ("a",))},
        lambda of: Stack([of("a", True), of("b", True)]),
    ),
    "forward on top of backwards": (
        [whole("turned", "x"), block("a", "turned"), whole("back", A), block("b", "back")],
        {"a": (True, "x"), "b": (False, ("a",))},
        lambda of: Stack([of("a", True), of("b")]),
    ),
    "backwards on top of forward": (
        [block("a", "x"), whole("turned", A), block("b", "turned")],
        {"a": (False, "x"), "b": (True, ("a",))},
        lambda of: Stack([of("a"), of("b", True)]),
    ),
    "both": (
        [*BI, beside("both", A, "back"), block("c", "both")],
        {"a": (False, "x"), "b": (True, "x"), "c": (False, ("a", "b"))},
        lambda of: Stack([Bidirectional(of("a"), of("b")), of("c")]),
    ),
    "both, and then reversed": (
        [*BI, beside("both", A, "back", axis="last"), rows("again", "both"), block("c", "again")],
        {"a": (False, "x"), "b": (True, "x"), "c": (True, ("a", "b"))},
        lambda of: Stack([Bidirectional(of("a"), of("b")), of("c", True)]),
    ),
    "both on top": (
        [*BI, beside("both", A, "back")],
        {"a": (False, "x"), "b": (True, "x")},
        lambda of: Bidirectional(of("a"), of("b")),
    ),
    "both on top, apart": (BI, {"a": (False, "x"), "b": (True, "x")}, lambda of: Bidirectional(of("a"), of("b"))),
    "each added to something": (
        [*BI, node("sum", "AddV2", [A, "x"]), node("product", "Mul", ["back", "x"]), node("no", "Add", [A, "back:x"])],
        {"a": (False, "x"), "b": (True, "x")},
        lambda of: Bidirectional(of("a"), of("b")),
    ),
    "backward first, on top": (
        [*BI, beside("both", "back", A)],
        {"a": (False, "x"), "b": (True, "x")},
        ORDER,
    ),
    "backward first": (
        [*BI, beside("both", "back", A), block("c", "both")],
        {"a": (False, "x"), "b": (True, "x"), "c": (False, ("b", "a"))},
        "and not forward and then backward",
    ),
    "not turned back": (
        [*BI, beside("both", A, "b/block:6"), block("c", "both")],
        {"a": (False, "x"), "b": (True, "x"), "c": (None, ())},
        "in which direction c runs",
    ),
    "turned back by other lengths": (
        [*BI[:-1], rows("back", "b/block:6", "others"), beside("both", A, "back"), block("c", "both")],
        {"a": (False, "x"), "b": (True, "x"), "c": (None, ())},
        "in which direction c runs",
    ),
    "lengths of another dtype": (
        [*BI[:-1], cast("n", "lengths", "int32", "int64"), rows("back", "b/block:6", "n"), block("c", "back")],
        {"a": (False, "x"), "b": (True, "x"), "c": (False, ("b",))},
        "several cells is read by none of them: a .of x., c",
    ),
    "beside along another axis": (
        [*BI, beside("both", A, "back", axis="one"), block("c", "both")],
        {"a": (False, "x"), "b": (True, "x"), "c": (False, "both")},
        "several cells is read by none",
    ),
    "beside what is no cell": (
        [block("a", "x"), beside("both", A, "x"), block("c", "both")],
        {"a": (False, "x"), "c": (False, "x")},
        "several cells is read by none of them: a .of x., c .of x.",
    ),
    "both forward": (
        [block("a", "x"), block("b", "x"), beside("both", A, "b/block:6"), block("c", "both")],
        {"a": (False, "x"), "b": (False, "x"), "c": (False, ("a", "b"))},
        "and not forward and then backward",
    ),
    "both of other inputs": (
        [block("a", "zeros"), *BI[1:], beside("both", A, "back"), block("c", "both")],
        {"a": (False, "zeros"), "b": (True, "x"), "c": (False, ("a", "b"))},
        "do not read the same: a .of zeros., b .of x.",
    ),
    "dropout": (
        [block("a", "x"), node("dropped", "Mul", [A, "zeros"]), block("b", "dropped")],
        {"a": (False, "x"), "b": (False, "dropped")},
        "several cells is read by none of them: a .of x., b .of dropped.",
    ),
    "not h": (
        [block("a", "x"), block("b", "a/block:1")],
        {"a": (False, "x"), "b": (False, "a/block")},
        "several cells",
    ),
    "wider": ([cast("wide", "x", "float16", "float32"), block("a", "wide")], {"a": (False, "x")}, lambda of: of("a")),
    "rounded": (
        [cast("less", "x", "float32", "float16"), block("a", "less")],
        {"a": (False, "less")},
        lambda of: of("a"),
    ),
    "more cells forward": (
        [*BI, block("c", A), beside("both", "c/block:6", "back")],
        {"a": (False, "x"), "b": (True, "x"), "c": (False, ("a",))},
        "do not read the same: c .of a., b .of x.",
    ),
    "several each way": (
        [*BI[:-1], block("c", A), block("d", "b/block:6"), rows("back", "d/block:6"), beside("y", "c/block:6", "back")],
        {"a": (False, "x"), "b": (True, "x"), "c": (False, ("a",)), "d": (True, ("b",))},
        lambda of: Bidirectional(Stack([of("a"), of("c")]), Stack([of("b"), of("d")])),
    ),
    "a circle": (
        [block("a", "b/block:6"), block("b", A)],
        {"a": (None, ()), "b": (None, ())},
        "in which direction a runs",
    ),
    "its own": ([block("a", A)], {"a": (None, ())}, lambda of: of("a")),
}


def connections(model):
    """Return direction and input of each cell."""
    return {name: (cell.reverse, cell.source_cells or cell.input or ()) for name, cell in model.cells.items()}


LAST_FIRST = "blockcell.tensorflow: the graph has y of . from the last step to the first, the layer in the order of x"
NO_ORDER = "not compared with the graph, because it does not tell in which direction a runs"
NOT_TURNED_BACK = ["rows reversed", "negative axis", "batch first", "backwards on top of backwards",
                   "backwards on top of forward", "both, and then reversed"]  # fmt: skip
REMARKS = dict.fromkeys(NOT_TURNED_BACK, LAST_FIRST) | {"its own": NO_ORDER}


def warns(remark):
    """Expect a remark, or none if it is None."""
    return nullcontext() if remark is None else pytest.warns(UserWarning, match=remark)


@pytest.mark.parametrize("case", NETWORKS)
def test_networks(tmp_path, case):
    nodes, expected, whole_layer = NETWORKS[case]
    wide = ["c"] if expected.get("c", ((), ()))[1] in (("a", "b"), ("b", "a")) else []
    model = write(tmp_path, *consts(*expected, wide=wide), *nodes)
    assert connections(model) == expected
    for name, (reverse, _) in expected.items():
        assert model.cells[name].layer().reverse is bool(reverse)
        assert not model.cells[name].layer(reverse=False).reverse
    if isinstance(whole_layer, str):
        with pytest.raises(ValueError, match=whole_layer):
            model.cells.layer()
        return

    def of(name, reverse=False):
        arrays = weights([*expected].index(name), 2 * H if name in wide else I)
        return LSTM(**arrays, forget_bias=0.5, cell_clip=-1.0, reverse=reverse)

    with warns(REMARKS.get(case)):
        layer = model.cells.layer()
    same = whole_layer(of)
    assert repr(layer) == repr(same)
    for lengths in (None, LENGTHS):
        np.testing.assert_array_equal(layer(X, lengths=lengths)[0], same(X, lengths=lengths)[0])


# --------------------------------------------------------------------------------------------------------------- loops
MASKED = {
    "y_t": ("Select", "past", "none", "a_cell:6"),
    "a_h_new": ("Select", "past", "a_h", "a_cell:6"),
    "a_cs_new": ("Select", "past", "a_cs", "a_cell:1"),
}


def by_mask(mask, otherwise="none"):
    """Return the change for a mask as Keras has it: each step reads it, and gives something else where it is false."""
    return {
        "marks": ("TensorArrayV3", "=steps"),
        "marks_fill": ("TensorArrayScatterV3", "marks", "range", f"={mask}", "marks:1"),
        "marks_filled": ("Enter", "marks_fill"),
        "marks_enter": ("Enter", "marks"),
        "mark": ("TensorArrayReadV3", "marks_enter", "t", "marks_filled"),
        "tiled": ("Tile", "mark", "=tiles"),
        "a_h_new": ("SelectV2", "tiled", "a_cell:6", "a_h"),
        "a_cs_new": ("SelectV2", "tiled", "a_cell:1", "a_cs"),
        "y_enter": ("Enter", "=zeros"),
        "y_merge": ("Merge", "y_enter", "y_next"),
        "y_switch": ("Switch", "y_merge", "cond"),
        "y_prev": ("Identity", "y_switch:1"),
        "y_next": ("NextIteration", "y_t"),
        "y_t": ("SelectV2", "tiled", "a_cell:6", otherwise),
    }


DROPPED = {"mask": ("Floor", "x"), "a_x": ("Mul", "x", "mask")}
BACKWARDS = {"last": ("Enter", "=steps"), "k": ("Sub", "last", "t"), "x": ("TensorArrayReadV3", "given_enter", "k",
                                                                        "filled")}  # fmt: skip
SLICED = {"all": ("Enter", "=x"), "from": ("Pack", "t"), "to": ("Pack", "more"), "by": ("Const", np.int32([1]))}
ZEROS = real("zeros_of_h", np.zeros((B, H), np.float32))
UNIT = real("unit", np.complex64(1j))
SHRINK = {"shrink_axis_mask": field(3, 1)}
LOOPS = {  # what reads x and is changed in the loop of a; the input of a, and that of b, which reads what it writes
    "plain": ("x", {}, (False, "x"), (False, ("a",))),
    "masked": ("x", MASKED, (False, "x"), (False, ("a",))),
    "reversed": ("turned", {}, (True, "x"), (True, ("a",))),
    "reversed as a whole and masked": ("whole", MASKED, (None, ()), (None, ())),
    "rows reversed and masked": ("turned", MASKED, (True, "x"), (True, ("a",))),
    "by a mask": ("x", by_mask("others"), (False, "x"), (False, ("a",))),
    "by a mask, which repeats": ("x", by_mask("others", "y_prev"), (False, "x"), (False, ("a",))),
    "by a mask, else something": ("x", by_mask("others", "x"), (False, "x"), (False, "1/y_t")),
    "by a mask that is reversed, too": ("whole", by_mask("others_turned"), (True, "x"), (True, ("a",))),
    "by a mask that is not reversed": ("whole", by_mask("others"), (None, ()), (None, ())),
    "by a mask that alone is reversed": ("x", by_mask("others_turned"), (None, ()), (None, ())),
    "masked by something": ("x", {"y_t": ("Select", "lengths", "none", "a_cell:6")}, (False, "x"), (False, "1/y_t")),
    "masked with something": ("x", MASKED | {"none": ("Enter", "=x")}, (False, "x"), (None, ())),
    "masked with a complex number": ("x", MASKED | {"none": ("Enter", "=unit")}, (False, "x"), (None, ())),
    "dropout in the loop": ("turned", DROPPED, (True, "1/a_x"), (True, ("a",))),
    "by the step's number": ("turned", {"y_t": ("Mul", "a_cell:6", "number"), "number": ("Cast", "t")}, (True, "x"),
                             (None, ())),
    "dropout of the output": ("turned", {"mask": ("Floor", "a_cell:6"), "y_t": ("Mul", "a_cell:6", "mask")},
                                    (True, "x"), (True, "1/y_t")),
    "from the last step": ("x", BACKWARDS, (None, ()), (None, ())),
    "from the second step": ("x", {"t_enter": ("Enter", "=one")}, (None, ()), (False, "1/y")),
    "every other step": ("x", {"one": ("Const", np.int32(2))}, (None, ()), (False, "1/y")),
    "into the wrong place": ("x", {"write": ("TensorArrayWriteV3", "array_enter", "more", "y_t", "flow")}, (False, "x"),
                             (False, "1/y")),
    "in another order": ("x", {"range": ("Range", "=two", "=steps", "=one")}, (None, ()), (False, "1/y")),
    "another output": ("x", {"y_t": ("Identity", "a_cell:1")}, (False, "x"), (False, "1/a_cell")),
    "its own output": ("x", {"a_x": ("Identity", "a_h")}, (False, "1/a_h_merge"), (False, ("a",))),
    "the same at each step": ("x", {"still": ("Enter", "=zeros"), "a_x": ("Identity", "still")}, (False, "1/still"),
                              (False, ("a",))),
    "sliced": ("x", SLICED | {"x": ("StridedSlice", "all", "from", "to", "by")}, (False, "x"), (False, ("a",))),
    "gathered": ("x", {"all": ("Enter", "=x"), "x": ("GatherV2", "all", "t", "=zero")}, (False, "x"), (False, ("a",))),
}  # fmt: skip


@pytest.mark.parametrize("case", LOOPS)
def test_loops(tmp_path, case):
    x, change, first, second = LOOPS[case]
    nodes = loop("1", x, "a", change=change)
    if case == "sliced":
        k = next(k for k, message in enumerate(nodes) if b"StridedSlice" in message)
        nodes[k] = node("1/x", "StridedSlice", ["1/all", "1/from", "1/to", "1/by"], **SHRINK)
    parts = [*consts("a", "b"), ZEROS, UNIT, rows("turned", "x"), whole("whole", "x")]
    parts.append(whole("others_turned", "others"))
    model = write(tmp_path, *parts, *nodes, *loop("2", "1/y", "b"))
    assert connections(model) == {"a": first, "b": second}


FORMS = ["one loop", "two loops", "written out", "written out side by side", "both directions"]


@pytest.mark.parametrize("form", FORMS)
def test_cells_on_top_of_each_other(tmp_path, form):
    parts = [*consts("a", "b"), ZEROS, rows("turned", "x")]
    last = "2/y"
    if form == "one loop":
        nodes, last = loop("1", "turned", "a", "b"), "1/y"
    elif form == "two loops":
        nodes = [*loop("1", "turned", "a"), *loop("2", "1/y", "b")]
    elif form == "written out":
        nodes, last = [*written_out("a", "turned"), *written_out("b", "a/y")][::-1], "b/y"
    elif form == "written out side by side":
        nodes, last = written_out("a", "turned"), "b/y"
        nodes += written_out("b", None, [f"a_{k}:6" for k in range(T)])
    else:
        nodes = [*loop("1", "x", "a"), *loop("2", "turned", "b"), rows("back", "2/y"), beside("y", "1/y", "back")]
    model = write(tmp_path, *parts, *nodes, rows("end", last))
    reverse = form != "both directions"
    assert connections(model) == {"a": (reverse, "x"), "b": (True, ("a",) if reverse else "x")}

    def of(k):
        return LSTM(**weights(k), forget_bias=0.5, cell_clip=-1.0, reverse=reverse)

    same = Stack([of(0), of(1)]) if reverse else Bidirectional(of(0), of(1))
    layer = model.cells.layer()
    assert repr(layer) == repr(same)
    np.testing.assert_array_equal(layer(X, lengths=LENGTHS)[0], same(X, lengths=LENGTHS)[0])


@pytest.mark.parametrize("loops", [True, False])
def test_one_cell_in_both_directions(tmp_path, loops):
    """As in a model whose backward direction has the variables of the forward one."""
    parts = [*consts("a"), ZEROS, rows("turned", "x")]
    if loops:
        nodes = [*loop("s/1", "x", "a"), *loop("s/2", "turned", "a")]
    else:
        nodes = [block("s/1", "x", "a"), block("s/2", "turned", "a")]
    nodes = [
        message.replace(b"s/2/a_cell", b"s/1/a_call") for message in nodes
    ]  # in one scope, as under control flow v2
    cells = write(tmp_path, *parts, *nodes).cells
    assert sorted(cell.reverse for cell in cells.values()) == [False, True]
    same = Bidirectional(*(LSTM(**weights(0), forget_bias=0.5, cell_clip=-1.0) for _ in range(2)))
    with warns("the graph has y of .* from the last step to the first"):
        layer = cells.layer()
    np.testing.assert_array_equal(layer(X, lengths=LENGTHS)[0], same(X, lengths=LENGTHS)[0])
    if loops:
        assert [*cells] == ["a", "a (reversed)"]


def test_cells_of_several_dtypes(tmp_path):
    small = [real(f"a/{role}", value.astype(np.float16)) for role, value in weights(0).items()]
    nodes = [*consts(), *small, *(real(f"b/{role}", value) for role, value in weights(1).items())]
    model = write(tmp_path, *nodes, block("a", "x"), cast("wide", A, "float16", "float32"), block("b", "wide"))
    assert connections(model) == {"a": (False, "x"), "b": (False, ("a",))}
    with pytest.raises(ValueError, match="of float16 and float32; a layer is of one dtype"):
        model.cells.layer()


def test_one_cell_on_top_of_itself(tmp_path):
    """In two scopes it is two cells of one, else it cannot be told apart."""
    model = write(tmp_path, *consts("a"), block("s/1", "x", "a"), block("s/2", "s/1/block:6", "a"))
    assert connections(model) == {"s/1": (False, "x"), "s/2": (False, ("s/1",))}
    nodes = [block("s/1", "x", "a"), block("s/2", "s/1/block:6", "a").replace(b"s/2/block", b"s/1/clock")]
    cells = write(tmp_path, *consts("a"), *nodes).cells
    assert [*cells] == ["a"] and cells["a"].layer().hidden_size == H
    with pytest.raises(ValueError, match="a runs several times"):
        cells.layer()


@pytest.mark.parametrize("name", ["v1", "v2", "whole"])
def test_tensorflow(tmp_path, name):
    """What TensorFlow wrote, in both control flows, gives TensorFlow's result."""
    with np.load(GOLDEN) as golden:
        stored = {key: golden[key] for key in golden.files}
    (tmp_path / "graph.pb").write_bytes(stored[f"file/{name}.pb"].tobytes())
    cells = opened(tmp_path / "graph.pb").cells
    count = 1 if name == "whole" else 2
    sides = {side: [f"{side}/cell_{k}/lstm_cell" for k in range(count)] for side in ("fw", "bw")}
    for side, names in sides.items():
        assert [cells[name].reverse for name in names] == [side == "bw"] * count
        assert [cells[name].source_cells for name in names] == [(), *[(name,) for name in names[:-1]]]
        assert cells[names[0]].input == "x"
    assert cells["top/cell_0/lstm_cell"].source_cells == (sides["fw"][-1], sides["bw"][-1])
    assert cells["top/cell_1/gru_cell"].source_cells == ("top/cell_0/lstm_cell",)
    assert [*cells][-2:] == ["top/cell_0/lstm_cell", "top/cell_1/gru_cell"]
    lengths = None if name == "whole" else stored["lengths"]
    y, _ = cells.layer()(stored["x"], lengths=lengths, batch_first=True)
    assert formulas.error_in_eps(y, stored[f"y/{name}"].astype(np.float64), float(np.finfo("f4").eps)) <= 8


# ------------------------------------------------------------------------------------------------- damaged and made up
def test_entangled_graphs_end(tmp_path):
    """Long ways, joins of joins, circles, loops of other nodes behind each other: quick, and without recursion."""
    swaps = [swapped(f"s{k}", f"s{k + 1}") for k in range(5000)] + [block("a", "s0")]
    assert connections(write(tmp_path, *consts("a"), node("s5000", "Placeholder"), *swaps)) == {"a": (None, ())}
    joins = [beside(f"j{k}", f"j{k + 1}", f"j{k + 1}") for k in range(30)]
    joins += [
        block("a", "j0"),
        node("j30", "Identity", ["x"]),
    ]
    assert connections(write(tmp_path, *consts("a"), *joins)) == {"a": (None, ())}
    circle = [swapped("s", "t"), swapped("t", "s"), block("a", "s")]
    assert connections(write(tmp_path, *consts("a"), *circle)) == {"a": (None, ())}
    change = DROPPED | {"y_t": ("Mul", "a_x", "mask"), "a_cell": ("Identity", "x")}
    loops = chain.from_iterable(loop(f"l{k}", f"l{k - 1}/y" if k else "x", "a", change=change) for k in range(200))
    assert connections(write(tmp_path, *consts("a"), ZEROS, *loops, block("a", "l199/y"))) == {"a": (None, ())}
    cells = [f"c{k}" for k in range(300)]
    below = ["x", *(f"{name}/block:6" for name in cells)]
    stack = [block(name, x) for name, x in zip(cells, below, strict=False)]
    model = write(tmp_path, *consts(*cells), *stack[::-1])
    assert [*model.cells] == cells and len(model.cells.layer().layers) == 300
    steps = [
        message for cell, x in (("a", "x"), ("b", "a/y"), ("c", "b/y")) for message in written_out(cell, x, count=500)
    ]
    model = write(tmp_path, *consts("a", "b", "c"), *steps)
    assert connections(model) == {"a": (False, "x"), "b": (False, ("a",)), "c": (False, ("b",))}
    itself = function("f", ["x"], ["g:0:0"], node("g", "PartitionedCall", ["x"], f=called("f")))
    call = [node("y", "PartitionedCall", ["x"], f=called("f")), block("a", "y")]
    assert connections(write(tmp_path, *consts("a"), *call, more=library(itself))) == {"a": (None, ())}


def test_functions_that_nothing_runs(tmp_path):
    """Keras stores each layer's function once more: those tell no direction."""
    inside = [real(f"a/{role}", value) for role, value in weights(0).items()]
    names, zeros = ["x", "zeros", "steps"], ["zeros", "zeros"]

    def inner(x):
        return node("a/block", "BlockLSTM", ["steps", x, *zeros, "a/w:output:0", *zeros, "zeros", "a/b:output:0"])

    turned = [number("axis", [0]), node("t", "ReverseV2", ["x", "axis:output:0"])]
    bodies = [
        function("forward", names, ["x"], *inside, inner("x")),
        function("backward", names, ["x"], *inside, *turned, inner("t:output:0")),
    ]
    call = node("call", "PartitionedCall", names, f=called("backward"))
    assert connections(write(tmp_path, *consts(), call, more=library(*bodies))) == {"a": (True, "x")}


WRITTEN = {  # the order in which steps read x, and in which their h are put together
    "forward": (range(T), range(T), False, False),
    "from the last to the first": (range(T)[::-1], range(T), True, True),
    "there and back": (range(T)[::-1], range(T)[::-1], True, False),
    "forward, and then turned": (range(T), range(T)[::-1], False, True),
    "in no order": ([1, 0, 2, 3, 4, 5], range(T), None, None),
    "every other": ([0, 2, 4, 0, 2, 4], range(T), None, None),
    "put together in no order": (range(T), [1, 0, 2, 3, 4, 5], False, False),
}


@pytest.mark.parametrize("case", WRITTEN)
def test_steps_that_are_written_out(tmp_path, case):
    read, put, first, second = WRITTEN[case]
    nodes = written_out("a", None, [f"x_t:{k}" for k in read])[:-1]
    nodes += [node("x_t", "Unpack", ["x"], num=field(3, T)), node("y", "Pack", [f"a_{k}:6" for k in put])]
    model = write(tmp_path, *consts("a", "b"), *nodes, block("b", "y"))
    known = case not in ("in no order", "every other", "put together in no order")
    cells = model.cells
    assert (cells["a"].reverse, cells["b"].reverse) == (first, second)
    assert cells["b"].source_cells == (("a",) if known else ())
    assert cells["b"].input == ("y" if case.startswith("put") else None)


ORDERS = {"forward": (1, 1, False), "backward": (-1, -1, True), "a mask of another order": (-1, 1, None)}


@pytest.mark.parametrize("case", ORDERS)
@pytest.mark.parametrize("count", [1, 2, T])
@pytest.mark.parametrize("repeats", [False, True])
def test_masked_steps_that_are_written_out(tmp_path, case, count, repeats):
    """As Keras unrolls them: what a step gives counts where its mask is true, else the step before keeps its place."""
    x_order, mask_order, reverse = ORDERS[case] if count > 1 else (1, 1, False)
    nodes = [node(name, "Unpack", [x], num=field(3, count)) for name, x in (("x_t", "x"), ("mask_t", "others"))]
    state, y = ("zeros", "zeros"), "zeros_of_h"
    for k in range(count):
        x_k, mask_k = (f":{[*range(count)][::order][k]}" for order in (x_order, mask_order))
        inputs = [f"x_t{x_k}", *state, "a/w", *["zeros"] * 3, "a/b"]
        nodes += [
            node(f"a_{k}", "LSTMBlockCell", inputs, **attributes(forget_bias=0.5, cell_clip=-1.0)),
            node(f"mask_{k}", "Tile", [f"mask_t{mask_k}", "tiles"]),
            node(f"y_{k}", "SelectV2", [f"mask_{k}", f"a_{k}:6", y]),
            node(f"cs_{k}", "SelectV2", [f"mask_{k}", f"a_{k}:1", state[0]]),
            node(f"h_{k}", "SelectV2", [f"mask_{k}", f"a_{k}:6", state[1]]),
        ]
        state, y = (f"cs_{k}", f"h_{k}"), f"y_{k}" if repeats else y
    nodes += [node("y", "Pack", [f"y_{k}" for k in range(count)]), block("b", "y")]
    cells = write(tmp_path, *consts("a", "b"), real("zeros_of_h", np.zeros(H, np.float32)), *nodes).cells
    assert len(cells["a"].nodes) == count and cells["a"].reverse is reverse
    assert (cells["b"].reverse, cells["b"].source_cells) == (reverse, () if reverse is None else ("a",))
    if reverse is False:
        fixed = f"compared with the graph for T = {count} alone, which the graph fixes"
        with pytest.warns(UserWarning, match=f"blockcell.tensorflow: {fixed}") if count < 3 else nullcontext():
            assert isinstance(cells.layer(), Stack)


def sliced(name, x, index, **masks):
    """``x[-1]`` and the like: one step, with the axis of time dropped."""
    return node(name, "StridedSlice", [x, *index], **attributes(**masks))


LAST_STEP = real("last_step", np.int32([-1])), real("past_it", np.int32([0])), real("by_one", np.int32([1]))
INDEX = "last_step", "past_it", "by_one"
KEPT = {"write": ("TensorArrayWriteV3", "array_enter", "nought", "y_t", "flow"), "nought": ("Const", np.int32(0)),
        "y": ("TensorArrayGatherV3", "array", "first", "flow_exit"), "first": ("Const", np.int32([0]))}  # fmt: skip
UP_TO_LENGTHS = {state: MASKED[state] for state in ("a_h_new", "a_cs_new")}


def of_loops(change=None, exits=False):
    """Return both directions as loops; `change` is of a, and is renamed for b, whose mask is turned."""

    def for_b(part):
        return part.replace("=others", "=others_turned").replace("a_", "b_") if isinstance(part, str) else part

    change = change or {}
    other = {for_b(key): tuple(map(for_b, line)) for key, line in change.items()}
    nodes = [*loop("1", "x", "a", change=change), *loop("2", "turned", "b", change=other)]
    if exits:
        nodes += [node("1/end", "Exit", ["1/a_h_switch"]), node("2/end", "Exit", ["2/b_h_switch"])]
    return nodes


def of_functions(name, x, cell):
    """Return a direction as a loop of TensorFlow 2's, in a function as Keras has it; its output 2 is the last h."""
    arguments = ["t", "steps", "cs", "h", "array", "w", "b"]
    names = ["step:item:0", "cs", "h", "w", *["h"] * 3, "b"]
    step = node("cell", "LSTMBlockCell", names, **attributes(forget_bias=0.5, cell_clip=-1.0))
    returned = ["more:z:0", "steps", "cell:cs:0", "cell:h:0", "array", "w", "b"]
    body = function(
        f"{name}_body",
        arguments,
        returned,
        node("step", "TensorListGetItem", ["array", "t"]),
        step,
        number("one", 1),
        node("more", "AddV2", ["t", "one:output:0"]),
    )
    inner = ["zero:output:0", "steps", "zeros", "zeros", "filled:output_handle:0", "w", "b"]
    loop_of = {"cond": called(f"{name}_cond"), "body": called(f"{name}_body")}
    whole_of = function(
        f"{name}_rnn",
        ["x", "steps", "zeros", "w", "b"],
        ["x", "steps", "same:output:0"],
        number("zero", 0),
        node("filled", "TensorListFromTensor", ["x"]),
        node("loop", "While", inner, **loop_of),
        node("same", "Identity", ["loop:output:3"]),
    )
    call = node(name, "PartitionedCall", [x, "steps", "zeros", f"{cell}/w", f"{cell}/b"], f=called(f"{name}_rnn"))
    goes_on = function(f"{name}_cond", arguments, ["less:z:0"], node("less", "Less", ["t", "steps"]))
    return call, [body, goes_on, whole_of]


LAST_OF_ALL = [sliced(f"{k}/end", f"{k}/y", INDEX, shrink_axis_mask=1) for k in (1, 2)]
GATHERED = [node("1/end", "GatherV2", [A, "last", "zero"]), node("2/end", "GatherV2", ["back", "zero", "zero"])]
BY_LENGTHS = [node("1/end", "GatherNd", [A, "others"]), node("2/end", "GatherNd", ["back", "others"])]
ENDS = ("1/end", "2/end")
LASTS = {  # nodes of both directions, and where the last h of each is
    "states": (of_loops(exits=True), *ENDS),
    "states up to lengths": (of_loops(UP_TO_LENGTHS, exits=True), *ENDS),
    "states by a mask": (of_loops(by_mask("others"), exits=True), *ENDS),
    "of all steps": ([*of_loops(), *LAST_OF_ALL], *ENDS),
    "turned back": ([*BI, *GATHERED], *ENDS),
    "by lengths": ([*BI, *BY_LENGTHS], *ENDS),
    "kept alone": ([*of_loops(KEPT), *LAST_OF_ALL], *ENDS),
    "written out": ([*written_out("a", "x"), *written_out("b", "turned")], f"a_{T - 1}:6", f"b_{T - 1}:6"),
    "functions": (None, "forward:2", "backward:2"),
}
F, R = "forward's last", "backward's last"
TAILS = {  # what a graph makes of the last outputs, and why the cells are no Bidirectional, if so
    "concat": ([beside("top", F, R, axis="one")], None),
    "concat along the last axis": ([beside("top", F, R, axis="last")], None),
    "concat with a third": ([beside("top", F, R, "x", axis="one")], None),
    "concat, a third between": ([beside("top", F, "x", R, axis="one")], None),
    "concat, backward first": ([beside("top", R, F, axis="one")], ORDER),
    "concat, backward first, with a third": ([beside("top", R, F, "x", axis="one")], ORDER),
    "concat, backward first, a third between": ([beside("top", R, "x", F, axis="one")], ORDER),
    "concat in both orders": ([beside("top", F, R, axis="one"), beside("other", R, F, axis="one")], None),
    "concat of rows": ([beside("top", F, R, axis="zero")], OTHERWISE),
    "sum": ([node("top", "AddV2", [F, R])], OTHERWISE),
    "sum, backward first": ([node("top", "Add", [R, F])], OTHERWISE),
    "sum of three": ([node("top", "AddN", ["x", R, F])], OTHERWISE),
    "mul": ([node("top", "Mul", [F, R])], OTHERWISE),
    "ave": ([node("sum", "AddV2", [F, R]), node("top", "RealDiv", ["sum", "x"])], OTHERWISE),
    "maximum": ([node("top", "Maximum", [F, R])], OTHERWISE),
    "stack": ([node("top", "Pack", [F, R])], OTHERWISE),
    "concat and sum": ([beside("top", F, R, axis="one"), node("sum", "AddV2", [F, R])], OTHERWISE),
    "something else": ([node("top", "AddV2", [F, "x"]), node("too", "Mul", [R, "x"])], None),
    "nothing": ([], None),
}


@pytest.mark.parametrize(
    ("form", "tail"),
    [*(("states", tail) for tail in TAILS), *product([*LASTS][1:], ["concat", "concat, backward first", "sum"])],
)
def test_last_outputs_of_both_directions(tmp_path, form, tail):
    """As behind a Bidirectional of Keras with return_sequences=False, whose merge mode is any."""
    (nodes, *ends), (tail_nodes, reason) = LASTS[form], TAILS[tail]
    functions = []
    if nodes is None:
        forward, forward_functions = of_functions("forward", "x", "a")
        backward, backward_functions = of_functions("backward", "turned", "b")
        nodes, functions = [forward, backward], [*forward_functions, *backward_functions]
    last = [node(name, "Identity", [end]) for name, end in zip((F, R), ends, strict=True)]
    parts = [*consts("a", "b"), ZEROS, *LAST_STEP, whole("others_turned", "others")]
    if nodes[: len(BI)] != BI:
        parts.append(rows("turned", "x") if "lengths" in form else whole("turned", "x"))
    model = write(tmp_path, *parts, *nodes, *last, *tail_nodes, more=library(*functions))
    remark = LAST_FIRST if tail in ("something else", "nothing") else None
    check_both(model, reason, remark)


def check_both(model, reason, remark=None):
    """Check that the cells a and b are a Bidirectional, perhaps with a remark, or are none for a reason."""
    assert connections(model) == {"a": (False, "x"), "b": (True, "x")}
    if reason is not None:
        with pytest.raises(ValueError, match=reason):
            model.cells.layer()
        return
    with warns(remark):
        assert isinstance(model.cells.layer(), Bidirectional)


BESIDE, ADDED = beside("y", A, "back"), node("y", "AddV2", [A, "back"])
ENDS_BESIDE, ENDS_ADDED = beside("top", F, R, axis="one"), node("top", "AddV2", [F, R])
SHUFFLED = node("shuffled", "GatherV2", [A, "others", "zero"])
SEVERAL = {  # what a graph makes of all outputs, and of the last ones
    "sequences beside each other, states added": (BESIDE, ENDS_ADDED, None),
    "sequences beside each other, states backward first": (BESIDE, beside("top", R, F, axis="one"), None),
    "sequences added, states beside each other": (ADDED, ENDS_BESIDE, OTHERWISE),
    "sequences backward first, states not": (beside("y", "back", A), ENDS_BESIDE, ORDER),
    "steps in an order that is not known": (SHUFFLED, beside("y", "shuffled", "back"), None),
    "sequences one after the other": (beside("y", A, "back", axis="zero"), ENDS_BESIDE, OTHERWISE),
}


@pytest.mark.parametrize("case", SEVERAL)
def test_all_outputs_count_before_the_last_ones(tmp_path, case):
    """The layer's y is the outputs of all steps."""
    *nodes, reason = SEVERAL[case]
    last = [sliced(name, x, INDEX, shrink_axis_mask=1) for name, x in ((F, A), (R, "b/block:6"))]
    remark = "not compared .* 'shuffled'" if SHUFFLED in nodes and reason is None else None
    check_both(write(tmp_path, *consts("a", "b"), *LAST_STEP, *BI, *last, *nodes), reason, remark)


def test_commands(tmp_path, capsys):
    """What `inspect` shows of a network, and that `extract` writes all of it, or one cell with its direction."""
    (tmp_path / "graph.pb").write_bytes(graph(*consts("a", "b", "c", wide="c"), *BI, *TOP))
    path = str(tmp_path / "graph.pb")
    assert main(["inspect", path]) == 0
    out = capsys.readouterr().out
    assert "its input is x, reversed" in out and "its input is a, b\n" in out and "Together they are one layer." in out
    assert main(["inspect", path, "--json"]) == 0
    cells = {cell["cell"]: cell for cell in json.loads(capsys.readouterr().out)["cells"]}
    assert [cells[name]["reverse"] for name in "abc"] == [False, True, False]
    assert (cells["b"]["input"], cells["c"]["input"], cells["c"]["input_from"]) == ("x", None, ["a", "b"])
    layer = opened(path).cells.layer()
    for name, same in {"all": layer, "b": opened(path).cells["b"].layer()}.items():
        out = tmp_path / f"{name}.npz"
        assert main(["extract", path, str(out), *([] if name == "all" else ["--cell", name])]) == 0
        loaded = blockcell.load(out)
        assert repr(loaded) == repr(same) and ("reverse=True" in repr(loaded)) == (name == "b")
        np.testing.assert_array_equal(loaded(X, lengths=LENGTHS)[0], same(X, lengths=LENGTHS)[0])
