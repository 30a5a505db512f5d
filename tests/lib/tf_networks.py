"""Graphs of several LSTMs, node by node: sequences and their reversals, loops of TensorFlow 1, unrolled steps."""

from __future__ import annotations

import numpy as np
from tf_cells import attributes, kind_of, number, real
from tf_files import field, graph, node, shape

T, B, I, H = 6, 3, 4, 4  # noqa: E741 - so that cells can stand on top of each other in any order
TIME_MAJOR = {"seq_dim": 0, "batch_dim": 1}


def weights(seed, inputs=I):
    g = np.random.default_rng(seed)
    return {"w": g.standard_normal((inputs + H, 4 * H)).astype(np.float32), "b": g.standard_normal(4 * H).astype("f4")}


def consts(*names, wide=()):
    nodes = [node("x", "Placeholder"), real("zeros", np.zeros((1, H), np.float32)), node("shape", "Shape", ["x"])]
    nodes += [node("steps", "StridedSlice", ["shape", "first", "second", "second"], **attributes(shrink_axis_mask=1))]
    nodes += [node("lengths", "Placeholder", dtype=kind_of("int32"))]
    nodes += [node("others", "Placeholder", dtype=kind_of("bool"), shape=field(7, shape(-1, -1, 1)))]
    nodes += [number("tiles", [1, H])]
    nodes += [number(name, value) for name, value in (("zero", 0), ("one", 1), ("two", 2), ("last", -1))]
    nodes += [number("swap", [1, 0, 2]), number("keep", [0, 1, 2]), number("turn", [2, 1, 0]), number("first", [0])]
    nodes += [number("second", [1])]
    for k, name in enumerate(names):
        for role, value in weights(k, 2 * H if name in wide else I).items():
            nodes.append(real(f"{name}/{role}", value))
    return nodes


def block(name, x, of=None):
    """Return a cell that runs over all steps; its h is output 6."""
    names = ["steps", x, "zeros", "zeros", f"{of or name}/w", "zeros", "zeros", "zeros", f"{of or name}/b"]
    return node(f"{name}/block", "BlockLSTM", names, **attributes(forget_bias=0.5, cell_clip=-1.0))


def rows(name, x, lengths="lengths", **dims):
    return node(name, "ReverseSequence", [x, lengths], **attributes(**(dims or TIME_MAJOR)))


def whole(name, x, axis="first"):
    return node(name, "ReverseV2", [x, axis])


def swapped(name, x, order="swap"):
    return node(name, "Transpose", [x, order])


def beside(name, *parts, axis="two"):
    return node(name, "ConcatV2", [*parts, axis])


def cast(name, x, source, target):
    return node(name, "Cast", [x], SrcT=kind_of(source), DstT=kind_of(target))


A = "a/block:6"
A2 = "c/block:6"
BI = [block("a", "x"), rows("turned", "x"), block("b", "turned"), rows("back", "b/block:6")]


def loop(name, x, *cells, change=None):
    """Return a while loop of TensorFlow 1's over x, time first, as dynamic_rnn has it; `change` replaces lines."""
    lines = {
        "t_enter": ("Enter", "=zero"),
        "t_merge": ("Merge", "t_enter", "t_next"),
        "steps_enter": ("Enter", "=steps"),
        "goes_on": ("Less", "t_merge", "steps_enter"),
        "cond": ("LoopCond", "goes_on"),
        "t_switch": ("Switch", "t_merge", "cond"),
        "t": ("Identity", "t_switch:1"),
        "one": ("Const", np.int32(1)),
        "more": ("AddV2", "t", "one"),
        "t_next": ("NextIteration", "more"),
        "given": ("TensorArrayV3", "=steps"),
        "range": ("Range", "=zero", "=steps", "=one"),
        "fill": ("TensorArrayScatterV3", "given", "range", f"={x}", "given:1"),
        "filled": ("Enter", "fill"),
        "given_enter": ("Enter", "given"),
        "x": ("TensorArrayReadV3", "given_enter", "t", "filled"),
        "array": ("TensorArrayV3", "=steps"),
        "flow_enter": ("Enter", "array:1"),
        "flow_merge": ("Merge", "flow_enter", "flow_next"),
        "flow_switch": ("Switch", "flow_merge", "cond"),
        "flow": ("Identity", "flow_switch:1"),
        "array_enter": ("Enter", "array"),
        "write": ("TensorArrayWriteV3", "array_enter", "t", "y_t", "flow"),
        "flow_next": ("NextIteration", "write"),
        "flow_exit": ("Exit", "flow_switch"),
        "y": ("TensorArrayGatherV3", "array", "range", "flow_exit"),
        "y_t": ("Identity", f"{cells[-1]}_cell:6"),
        "lengths": ("Enter", "=lengths"),
        "past": ("GreaterEqual", "t", "lengths"),
        "none": ("Enter", "=zeros_of_h"),
    }
    x = "x"
    for cell in cells:
        lines |= {
            f"{cell}_x": ("Identity", x),
            f"{cell}_w": ("Enter", f"={cell}/w"),
            f"{cell}_b": ("Enter", f"={cell}/b"),
            f"{cell}_cell": ("LSTMBlockCell", f"{cell}_x", f"{cell}_cs", f"{cell}_h", f"{cell}_w", *["=zeros"] * 3,
                             f"{cell}_b"),
        }  # fmt: skip
        for state, output in (("cs", 1), ("h", 6)):
            lines |= {
                f"{cell}_{state}_enter": ("Enter", "=zeros"),
                f"{cell}_{state}_merge": ("Merge", f"{cell}_{state}_enter", f"{cell}_{state}_next"),
                f"{cell}_{state}_switch": ("Switch", f"{cell}_{state}_merge", "cond"),
                f"{cell}_{state}": ("Identity", f"{cell}_{state}_switch:1"),
                f"{cell}_{state}_new": ("Identity", f"{cell}_cell:{output}"),
                f"{cell}_{state}_next": ("NextIteration", f"{cell}_{state}_new"),
            }
        x = f"{cell}_cell:6"
    nodes = []
    for key, (op, *operands) in (lines | (change or {})).items():
        if op == "Const":
            nodes.append(real(f"{name}/{key}", operands[0]))
            continue
        more = {"frame_name": field(2, name)} if op == "Enter" else {}
        more |= attributes(forget_bias=0.5, cell_clip=-1.0) if op == "LSTMBlockCell" else {}
        names = [text[1:] if text[0] == "=" else f"{name}/{text}" for text in operands]
        nodes.append(node(f"{name}/{key}", op, names, **more))
    return nodes


def written_out(cell, x, step_inputs=None, count=T):
    """Return the nodes of a cell's steps one by one, over a sequence or over an input for each step."""
    step_inputs = step_inputs or [f"{cell}/x:{k}" for k in range(count)]
    nodes = [] if x is None else [node(f"{cell}/x", "Unpack", [x], num=field(3, count))]
    for k, step_input in enumerate(step_inputs):
        states = [f"{cell}_{k - 1}:{output}" if k else "zeros" for output in (1, 6)]
        inputs = [step_input, *states, f"{cell}/w", *["zeros"] * 3, f"{cell}/b"]
        nodes.append(node(f"{cell}_{k}", "LSTMBlockCell", inputs, **attributes(forget_bias=0.5, cell_clip=-1.0)))
    return [*nodes, node(f"{cell}/y", "Pack", [f"{cell}_{k}:6" for k in range(count)])]


def both_directions():
    """Return a graph of two levels in both directions, with nodes between them, for fuzz_tensorflow.py, too."""
    shapes = [number("flat", [-1, H]), node("steps_first", "Pack", ["steps", "last", "four"]), number("four", H)]
    lower = [*loop("1", "x", "a"), rows("turned", "x"), *loop("2", "turned", "b"), rows("back", "2/y")]
    upper = [
        beside("both", "1/y", "back"),
        rows("turned_again", "both"),
        block("c", "both"),
        block("d", "turned_again"),
    ]
    flat = [node("rows", "Reshape", [A2, "flat"]), node("again", "Reshape", ["rows", "steps_first"])]
    ones = [rows("d_back", "d/block:6"), node("ones", "OnesLike", ["d_back"]), node("kept", "Mul", ["d_back", "ones"])]
    top = [swapped("s", "again"), swapped("t", "kept"), beside("y", "s", "t"), node("z", "Relu", ["y"])]
    names = consts("a", "b", "c", "d", wide=("c", "d"))
    zeros_of_h = real("zeros_of_h", np.zeros((1, H), np.float32))
    return graph(*names, zeros_of_h, *shapes, *lower, *upper, *flat, *ones, *top)
