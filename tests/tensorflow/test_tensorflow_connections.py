"""Layers of cells that the graph connects in another way: refused, by the nodes between the cells alone."""

from __future__ import annotations

import json
import tracemalloc
import warnings

import numpy as np
import pytest
from tf_cells import attributes, called, function, kind_of, library, number, opened, real, write
from tf_files import GOLDEN, field, node, shape
from tf_names import variable
from tf_networks import BI, A, H, beside, block, consts, loop, swapped, whole, written_out

from blockcell import Bidirectional, FormatError, Stack, load
from blockcell.command import main
from blockcell.convert import ConversionError
from blockcell.tensorflow import Found
from blockcell.tensorflow.cells.structure import layer_stack

LAST = [
    number("minus_one", -1),
    node("times", "Pack", ["steps", "one", "one"]),
    number("flat", [-1, H]),
    number("steps_first", [5, -1, H]),
    number("by_two", [2]),
]
B_H = "b/block:6"


def begun(name, x, below):
    """Return a block that starts from the last state of another one."""
    take = [node(f"{name}/{role}", "GatherV2", [f"{below}/block:{output}", "minus_one", "zero"])
            for role, output in (("cs", 1), ("h", 6))]  # fmt: skip
    names = ["steps", x, f"{name}/cs", f"{name}/h", f"{name}/w", "zeros", "zeros", "zeros", f"{name}/b"]
    return [*take, node(f"{name}/block", "BlockLSTM", names, **attributes(forget_bias=0.5, cell_clip=-1.0))]


def normalized(name, x):
    """Return a normalization of the last axis."""
    return [
        node(f"{name}/mean", "Mean", [x, "last"], **attributes(keep_dims=True)),
        node(f"{name}/squares", "SquaredDifference", [x, f"{name}/mean"]),
        node(f"{name}/variance", "Mean", [f"{name}/squares", "last"], **attributes(keep_dims=True)),
        node(f"{name}/scale", "Rsqrt", [f"{name}/variance"]),
        node(f"{name}/centered", "Sub", [x, f"{name}/mean"]),
        node(name, "Mul", [f"{name}/centered", f"{name}/scale"]),
    ]


def dense(name, x):
    """Return a dense layer of each step."""
    kernel = real(f"{name}/kernel", np.random.default_rng(1).standard_normal((H, H)).astype(np.float32))
    return [
        kernel,
        node(f"{name}/rows", "Reshape", [x, "flat"]),
        node(f"{name}/product", "MatMul", [f"{name}/rows", f"{name}/kernel"]),
        node(name, "Reshape", [f"{name}/product", "steps_first"]),
    ]


OF_BOTH = [whole("turned", "x"), block("a", "x"), block("b", "turned"), whole("back", B_H)]
MASK = node("mask", "OnesLike", [A])
WRONG = {  # nodes, and why they are no layer
    "not turned back": ([*OF_BOTH[:3], beside("y", A, B_H)], "the node 'y' merges other numbers"),
    "the last step repeated": (
        [*OF_BOTH[:3], node("end", "GatherV2", [B_H, "minus_one", "zero"]), node("row", "ExpandDims", ["end", "zero"]),
         node("repeated", "Tile", ["row", "times"]), beside("y", A, "repeated")],
        "the node 'y' merges other numbers",
    ),
    "one after the other": (
        [*OF_BOTH, *dense("l", A), *dense("r", "back"), beside("y", "l", "r", axis="zero")],
        "the node 'l/product', which is a MatMul is before the node 'y'",
    ),
    "a step less": (
        [*OF_BOTH, node("later", "ReverseV2", ["back", "second"]), beside("y", A, "later")],
        "the node 'y' merges other numbers",
    ),
    "a sum with what is not known": (
        [*OF_BOTH, node("l", "Mystery", [A]), node("y", "AddV2", ["l", "back"])],
        "the node 'y', which is a AddV2, merges a and b",
    ),
    "from the state below": ([block("a", "x"), *begun("b", A, "a")], "b starts from the state of a"),
    "backward from the state of forward": (
        [whole("turned", "x"), block("a", "x"), *begun("b", "turned", "a"), whole("back", B_H), beside("y", A, "back")],
        "b starts from the state of a",
    ),
    "relu": (
        [*OF_BOTH, node("l", "Relu", [A]), node("r", "Relu", ["back"]), beside("y", "l", "r")],
        "the node 'y' merges other numbers",
    ),
    "normalization": (
        [*OF_BOTH, *normalized("l", A), *normalized("r", "back"), beside("y", "l", "r")],
        "the node 'y' merges other numbers",
    ),
    "dense, then added": (
        [*OF_BOTH, *dense("l", A), *dense("r", "back"), node("y", "AddV2", ["l", "r"])],
        "the node 'l/product', which is a MatMul is before the node 'y'",
    ),
    "rows turned back as a whole": (
        [*BI[:3], whole("back", B_H), beside("y", A, "back")],
        "the node 'y' reverses a direction by other lengths",
    ),
    "every other step": (
        [*OF_BOTH, *(node(name, "StridedSlice", [h, "first", "first", "by_two"], **attributes(end_mask=1))
                     for name, h in (("l", A), ("r", "back"))), beside("y", "l", "r")],
        "the node 'y' merges other numbers",
    ),
    "half of the columns": (
        [*OF_BOTH, node("l", "Split", ["two", A], num_split=field(3, 2)), beside("y", "l", "back")],
        "the node 'y' merges other numbers",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_graphs_that_are_another_layer(tmp_path, case):
    nodes, reason = WRONG[case]
    cells = write(tmp_path, *consts("a", "b"), *LAST, *nodes).cells
    with pytest.raises(ConversionError, match=f"(?s){reason}.*pass check=False"):
        cells.layer()
    with pytest.raises(ConversionError):
        cells.layer(check=True)
    assert isinstance(cells.layer(check=False), Stack if case == "from the state below" else Bidirectional)


RIGHT = {
    "plain": [*OF_BOTH, beside("y", A, "back")],
    "rows": [*BI, beside("y", A, "back")],
    "batch first": [*OF_BOTH, swapped("s", A), swapped("t", "back"), beside("y", "s", "t")],
    "all rows of all steps": [*OF_BOTH, node("s", "Reshape", [A, "flat"]), node("t", "Reshape", ["back", "flat"]),
                              beside("y", "s", "t", axis="one")],
    "times ones": [*OF_BOTH, MASK, node("s", "Mul", [A, "mask"]), node("t", "Mul", ["mask", "back"]),
                   beside("y", "s", "t")],
    "plus zeros in the form of a product": [*OF_BOTH, *dense("l", A), node("zeros_like", "ZerosLike", ["l"]),
                                            node("s", "AddV2", [A, "zeros_like"]), beside("y", "s", "back")],
    "a relu behind": [*OF_BOTH, beside("y", A, "back"), node("z", "Relu", ["y"])],
    "with the input": [*OF_BOTH, beside("y", "x", A, "back"), node("z", "Relu", ["y"])],
    "dense of each, too": [*OF_BOTH, beside("y", A, "back"), *dense("l", A), *dense("r", "back"),
                           node("z", "AddV2", ["l", "r"])],
    "the last step": [*OF_BOTH, node("s", "GatherV2", [A, "minus_one", "zero"]),
                      node("t", "GatherV2", ["back", "minus_one", "zero"]), beside("y", "s", "t", axis="one")],
    "the end of each": [*OF_BOTH, node("s", "GatherV2", [A, "minus_one", "zero"]),
                        node("t", "GatherV2", [B_H, "minus_one", "zero"]), beside("y", "s", "t", axis="one")],
    "the cell state of each": [*OF_BOTH, node("s", "GatherV2", ["a/block:1", "minus_one", "zero"]),
                               node("t", "GatherV2", ["b/block:1", "minus_one", "zero"]),
                               beside("y", "s", "t", axis="one")],
    "in loops": [*loop("1", "x", "a"), whole("turned", "x"), *loop("2", "turned", "b"), whole("back", "2/y"),
                 beside("y", "1/y", "back")],
    "written out": [*written_out("a", "x"), whole("turned", "x"), *written_out("b", "turned"), whole("back", "b/y"),
                    beside("y", "a/y", "back")],
}  # fmt: skip


@pytest.mark.parametrize("case", RIGHT)
def test_graphs_that_are_the_layer(tmp_path, case):
    cells = write(tmp_path, *consts("a", "b"), *LAST, *RIGHT[case]).cells
    assert isinstance(cells.layer(), Bidirectional)


# ------------------------------------------------------------------------------------------------- what is not compared
@pytest.mark.parametrize("unknown", [("Mystery", [A]), ("AddV2", [A, A, A])], ids=["op", "sum of three"])
def test_nodes_that_are_not_known(tmp_path, unknown):
    """An Add of three inputs, too, which TensorFlow refuses and numpy would write into the third."""
    nodes = [*OF_BOTH, node("l", *unknown), beside("y", "l", "back")]
    cells = write(tmp_path, *consts("a", "b"), *LAST, *nodes).cells
    with pytest.warns(UserWarning) as record:
        cells.layer()
    (warning,) = record
    inputs = " of 3 inputs" if len(unknown[1]) > 1 else ""
    reason = f"this is not understood: the node 'l', which is a {unknown[0]}{inputs}"
    assert str(warning.message) == f"blockcell.tensorflow: not compared with the graph, because {reason}"
    assert warning.filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(cells.layer(check=False), Bidirectional)


def test_weights_that_are_not_numbers(tmp_path):
    """The layer has them, too, so that its cells can be told apart."""
    not_numbers = [real("b/w", np.full((2 * H, 4 * H), np.nan, np.float32)), real("b/b", np.zeros(4 * H, np.float32))]
    cells = write(tmp_path, *consts("a"), *not_numbers, block("a", "x"), block("b", A)).cells
    assert isinstance(cells.layer(), Stack)


def in_loop_beside(name):
    """Return a loop of two cells that gives the sum of their outputs."""
    sum_of_both = {"sum": ("AddV2", "a_cell:6", "b_cell:6"), "y_t": ("Identity", "sum")}
    return loop(name, "x", "a", "b", change=sum_of_both)


BESIDE = {  # nodes that read a lower cell beside the top one
    "sum": [block("a", "x"), block("b", A), node("y", "AddV2", [A, B_H])],
    "concat": [block("a", "x"), block("b", A), swapped("s", A), swapped("t", B_H), beside("y", "s", "t")],
    "in a loop": in_loop_beside("1"),
    "steps that are written out": [*written_out("a", "x"), *written_out("b", "a/y"),
                                   node("y", "Add", ["a_1:6", "b_2:6"])],
}  # fmt: skip


@pytest.mark.parametrize("case", BESIDE)
def test_lower_outputs_beside_those_of_the_top(tmp_path, case):
    cells = write(tmp_path, *consts("a", "b"), *BESIDE[case]).cells
    with pytest.warns(
        UserWarning, match=r"reads y of a beside y of b, by the node '(1/sum|y)': the layer gives the la"
    ):
        assert isinstance(cells.layer(), Stack)


def test_a_variable_that_is_not_in_the_file(tmp_path):
    """A SavedModel may lack variables of an optimizer, which may be behind the cells."""
    nodes = [variable("v", H), node("r", "ReadVariableOp", ["v"]), node("l", "AddV2", [A, "r"])]
    cells = write(tmp_path, *consts("a", "b"), *OF_BOTH, *nodes, beside("y", "l", "back")).cells
    with pytest.warns(UserWarning, match="not compared with the graph, because .* the variable 'v' of the shape"):
        cells.layer()


@pytest.mark.parametrize("state", ["fed", "computed"])
def test_states_that_are_not_known(tmp_path, state):
    """An input is passed to calls as it is; for a state that is computed, a warning names the node."""
    fed = node("fed", "Placeholder", dtype=kind_of("float32"), shape=field(7, shape(-1, H)))
    names = ["steps", A, "zeros", state, "b/w", "zeros", "zeros", "zeros", "b/b"]
    nodes = [fed, node("computed", "Tanh", ["fed"]), block("a", "x")]
    nodes.append(node("b/block", "BlockLSTM", names, **attributes(forget_bias=0.5, cell_clip=-1.0)))
    cells = write(tmp_path, *consts("a", "b"), *nodes).cells
    if state == "fed":
        assert isinstance(cells.layer(), Stack)
        return
    with pytest.warns(UserWarning, match="b starts from computed: pass the state to calls of the layer as state="):
        assert isinstance(cells.layer(), Stack)


TURNED = {  # what the graph gives is from the last step to the first
    "forward": ([block("a", "x"), whole("y", A)], "a"),
    "both": ([*OF_BOTH, beside("both", A, "back"), whole("y", "both")], "a and b"),
    "backward alone": ([whole("turned", "x"), block("a", "turned"), node("y", "Relu", [A])], "a"),
}


@pytest.mark.parametrize("case", TURNED)
def test_outputs_that_are_turned_around(tmp_path, case):
    """Unless the graph reads y in the order of x, too."""
    nodes, names = TURNED[case]
    cells = write(tmp_path, *consts("a", "b"), *nodes).cells
    with pytest.warns(UserWarning, match=f"the graph has y of {names} from the last step to the first, the layer in"):
        cells.layer()
    read = {"forward": A, "both": "both", "backward alone": "back"}[case]
    more = [whole("back", A)] if case == "backward alone" else []
    write(tmp_path, *consts("a", "b"), *nodes, *more, node("z", "Relu", [read])).cells.layer()


def test_one_step_that_the_graph_fixes(tmp_path):
    cells = write(tmp_path, *consts("a"), *written_out("a", "x", count=1)).cells
    with pytest.warns(UserWarning, match="compared with the graph for T = 1 alone, which the graph fixes"):
        cells.layer()


def test_random_numbers(tmp_path):
    """Dropout of each direction, which may be off, and is random where it is on."""
    dims = [node("shape_of_h", "Shape", [A]), node("kept", "Placeholder", dtype=kind_of("float32"))]
    dims.append(real("half", np.float32(0.5)))
    for probability, remark in (("kept", None), ("half", "which depends on random numbers")):
        nodes = [*OF_BOTH, *dims]
        for name, h in (("l", A), ("r", "back")):
            nodes += [
                node(f"{name}/u", "RandomUniform", ["shape_of_h"]),
                node(f"{name}/s", "Add", [f"{name}/u", probability]),
                node(f"{name}/floor", "Floor", [f"{name}/s"]),
                node(f"{name}/up", "RealDiv", [h, probability]),
                node(name, "Mul", [f"{name}/up", f"{name}/floor"]),
            ]
        cells = write(tmp_path, *consts("a", "b"), *nodes, beside("y", "l", "r")).cells
        if remark is None:
            assert isinstance(cells.layer(), Bidirectional)
            continue
        with pytest.warns(UserWarning, match=f"not compared .* {remark}"):
            cells.layer()


def test_commands(tmp_path, capsys):
    """What `inspect` and `extract` say of another layer, and of one that is not compared."""
    path, out = tmp_path / "graph.pb", tmp_path / "layer.npz"
    write(tmp_path, *consts("a", "b"), *LAST, *WRONG["relu"][0])
    assert main(["inspect", str(path)]) == 0
    assert "They are not one layer: the layer computes something else than the graph: " in capsys.readouterr().out
    assert main(["extract", str(path), str(out)]) == 1 and not out.exists()
    assert "the layer computes something else than the graph" in capsys.readouterr().err
    write(tmp_path, *consts("a", "b"), *OF_BOTH, node("l", "Mystery", [A]), beside("y", "l", "back"))
    remark = "not compared with the graph, because this is not understood: the node 'l', which is a Mystery"
    assert main(["inspect", str(path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["one_layer"] and document["warnings"] == [remark]
    assert main(["extract", str(path), str(out)]) == 0
    assert remark in capsys.readouterr().out and isinstance(load(out), Bidirectional)


# ------------------------------------------------------------------------------------------- graphs that are made up
def nested_calls(depth):
    """Return functions that call the one before twice, and one call of the last."""
    bodies = [function("f0", ["x"], ["y:z:0"], node("y", "Neg", ["x"]))]
    for k in range(depth):
        calls = [node(name, "PartitionedCall", [x], f=called(f"f{k}")) for name, x in (("u", "x"), ("v", "u:output:0"))]
        bodies.append(function(f"f{k + 1}", ["x"], ["v:output:0"], *calls))
    return [node("l", "PartitionedCall", [A], f=called(f"f{depth}"))], bodies


def endless_loop():
    """Return a loop whose condition always holds."""
    body = function("body", ["t", "h"], ["t", "h"])
    goes_on = function("cond", ["t", "h"], ["yes:y:0"], node("yes", "OnesLike", ["t"]))
    loop_of = {"cond": called("cond"), "body": called("body")}
    return [node("l_loop", "While", ["one", A], **loop_of), node("l", "Identity", ["l_loop:1"])], [body, goes_on]


HUGE = [real("huge", np.int64([2**20, 2**20])), real("end", np.int64(2**60)), real("start", np.int64(0))]
CHAIN = [node(f"n{k}", "Neg", [f"n{k - 1}" if k else A]) for k in range(20_000)]
DOUBLED = [beside(f"d{k}", *[f"d{k - 1}" if k else A] * 2, axis="zero") for k in range(60)]
ITSELF = function("f", ["x"], ["g:output:0"], node("g", "PartitionedCall", ["x"], f=called("f")))
MADE_UP = {  # nodes that make l of the forward direction, and functions
    "a fill": ([node("f", "Fill", ["huge", "half"]), node("l", "Mul", [A, "f"])], []),
    "a range": ([node("r", "Range", ["start", "end", "one"]), node("l", "GatherV2", [A, "r", "zero"])], []),
    "a tile": ([node("t", "Tile", ["half_row", "huge"]), node("l", "Mul", [A, "t"])], []),
    "doubled": ([*DOUBLED, node("l", "Identity", ["d59"])], []),
    "a chain": ([*CHAIN, node("l", "Identity", ["n19999"])], []),
    "a circle": ([node("u", "Neg", ["l"]), node("l", "Add", ["u", A])], []),
    "calls of calls": nested_calls(16),
    "calls of calls of calls": nested_calls(200),
    "a function that calls itself": ([node("l", "PartitionedCall", [A], f=called("f"))], [ITSELF]),
    "an endless loop": endless_loop(),
    "a list": ([node("new", "TensorListReserve", ["zero", "end"]), node("l", "TensorListStack", ["new", "zero"])], []),
    "an empty reshape": ([node("l", "Reshape", [A, "zero"])], []),
    "no inputs": ([node("l", "Relu")], []),
    "an attribute of another type": ([node("l", "Pack", [A, A], axis=field(2, "first"))], []),
}  # fmt: skip


@pytest.mark.parametrize("case", MADE_UP)
def test_graphs_that_are_made_up_end(tmp_path, case):
    """In memory that the size of the file bounds, refused or not compared."""
    nodes, functions = MADE_UP[case]
    more = [*HUGE, real("half", np.float32(0.5)), real("half_row", np.float32([[0.5]]))]
    parts = [*consts("a", "b"), *OF_BOTH, *more, *nodes, beside("y", "l", "back")]
    cells = write(tmp_path, *parts, more=library(*functions)).cells
    cells.levels()
    tracemalloc.start()
    try:
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            cells.layer()
    except (ConversionError, FormatError):
        pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 2**26 + 8 * (tmp_path / "graph.pb").stat().st_size  # Python's objects are some of it


# -------------------------------------------------------------------------------------------------------- the mutants
def swap_directions(monkeypatch):
    monkeypatch.setattr(layer_stack, "Bidirectional", lambda fw, bw: Bidirectional(bw, fw))


def swap_levels(monkeypatch):
    monkeypatch.setattr(layer_stack, "Stack", lambda layers: Stack([*layers][::-1]))


def drop_directions(monkeypatch):
    make = Found.layer
    monkeypatch.setattr(Found, "layer", lambda cell, **options: make(cell, **(options | {"reverse": False})))


def reverse_all(monkeypatch):
    make = Found.layer
    monkeypatch.setattr(Found, "layer", lambda cell, **options: make(cell, **({"reverse": True} | options)))


STACKED = [block("a", "x"), block("b", A)]
BACKWARD = [whole("turned", "x"), block("a", "turned"), whole("back", A), block("b", "back")]
MUTANTS = {  # what is wrong with `Cells.layer`, and a graph that shows it
    "directions swapped": (swap_directions, [*OF_BOTH, beside("y", A, "back")]),
    "directions swapped, in loops": (swap_directions, RIGHT["in loops"]),
    "directions swapped, nothing above": (swap_directions, OF_BOTH),
    "levels swapped": (swap_levels, STACKED),
    "levels swapped, in one loop": (swap_levels, loop("1", "x", "a", "b")),
    "levels swapped, written out": (swap_levels, [*written_out("a", "x"), *written_out("b", "a/y")]),
    "a reversal dropped": (drop_directions, BACKWARD),
    "a reversal added": (reverse_all, STACKED),
}


@pytest.mark.parametrize("case", MUTANTS)
@pytest.mark.filterwarnings("ignore")
def test_mutants_of_the_layer(tmp_path, monkeypatch, case):
    """The comparison alone finds them, also in a graph that is right."""
    mutate, nodes = MUTANTS[case]
    cells = write(tmp_path, *consts("a", "b"), *LAST, *nodes).cells
    cells.layer()
    mutate(monkeypatch)
    with pytest.raises(ConversionError):
        cells.layer()


@pytest.mark.parametrize("name", ["v1", "v2", "whole"])
@pytest.mark.parametrize("mutate", [swap_directions, swap_levels])
def test_mutants_of_what_tensorflow_wrote(tmp_path, monkeypatch, name, mutate):
    with np.load(GOLDEN.with_name("networks.npz")) as golden:
        (tmp_path / "graph.pb").write_bytes(golden[f"file/{name}.pb"].tobytes())
    mutate(monkeypatch)
    with pytest.raises((ConversionError, ValueError)):
        opened(tmp_path / "graph.pb").cells.layer()
