"""Cells of Keras's and cuDNN's, composed of single nodes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tf_cells import H, I, looped, real, scoped_nodes, write
from tf_files import graph, node

GOLDEN = Path(__file__).parents[1] / "golden" / "tensorflow_cells.npz"


def cells_of(tmp_path, lines, *states, scope="net/thing", **weights):
    """Find the cells in a graph of lines, in a loop of these states; lines take the place of those of the loop."""
    consts = [real(f"{scope}/{name}", value) for name, value in weights.items()]
    around = looped(*states) if states else {}
    model = write(tmp_path, node("x", "Placeholder"), *consts, *scoped_nodes(scope, around | lines))
    return model.cells


def renamed(lines, names):
    """Return lines whose names are others, by a mapping; names that it does not have stay."""
    return {names.get(name, name): (op, *(names.get(part, part) if isinstance(part, str) else part for part in rest))
            for name, (op, *rest) in lines.items()}  # fmt: skip


def cudnn_gru(**change):
    lines = {
        "axis": ("Const", np.int32(1)),
        "concat": ("ConcatV2", "x", "h_prev", "axis"),
        "product": ("MatMul", "concat", "w_ru"),
        "bar": ("BiasAdd", "product", "b_ru"),
        "gates": ("Sigmoid", "bar"),
        "split": ("Split", "axis", "gates", {"num_split": 2}),
        "from_h": ("MatMul", "h_prev", "w_ch"),
        "from_h_b": ("BiasAdd", "from_h", "b_hc"),
        "reset": ("Mul", "from_h_b", "split"),
        "from_x": ("MatMul", "x", "w_cx"),
        "from_x_b": ("BiasAdd", "from_x", "b_c"),
        "c_bar": ("AddV2", "reset", "from_x_b"),
        "c": ("Tanh", "c_bar"),
        "one": ("Const", 1.0),
        "rest": ("Sub", "one", "split:1"),
        "new": ("Mul", "rest", "c"),
        "keep": ("Mul", "split:1", "h_prev"),
        "h": ("AddV2", "new", "keep"),
    }
    return lines | change


def gru_weights():
    g = np.random.default_rng(2)
    shapes = {"w_ru": (I + H, 2 * H), "b_ru": (2 * H,), "w_cx": (I, H), "w_ch": (H, H), "b_c": (H,), "b_hc": (H,)}
    return {name: g.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def keras_lstm(bias="one", order=(0, 1, 2, 3), **change):
    """Return Keras' LSTM as lines; its gates are parts by StridedSlice, of the product or of the kernel."""
    lines: dict = {"ones": ("Const", np.int32([1, 1])), "zero": ("Const", np.int32(0))}
    lines |= {"from_x": ("MatMul", "x", "kernel"), "from_h": ("MatMul", "h_prev", "recurrent"),
              "sum": ("AddV2", "from_x", "from_h"), "z": ("BiasAdd", "sum", "bias")}  # fmt: skip
    if bias == "none":
        lines["z"] = ("Identity", "sum")
    if bias == "two rows":
        lines |= {"halves": ("Split", "zero", "bias", {"num_split": 2}), "row": ("Squeeze", "halves:1"),
                  "rows": ("Unpack", "bias", {"num": 2, "axis": 0}), "z_1": ("BiasAdd", "sum", "row"),
                  "z": ("AddV2", "z_1", "rows")}  # fmt: skip
    for k, part in enumerate(order):
        lines |= {f"begin_{k}": ("Const", np.int32([0, part * H])), f"end_{k}": ("Const", np.int32([0, part * H + H])),
                  f"part_{k}": ("StridedSlice", "z", f"begin_{k}", f"end_{k}", "ones",
                                {"begin_mask": 1, "end_mask": 1})}  # fmt: skip
    lines |= {"i": ("Sigmoid", "part_0"), "f": ("Sigmoid", "part_1"), "g": ("Tanh", "part_2"),
              "o": ("Sigmoid", "part_3"), "keep": ("Mul", "f", "c_prev"), "new": ("Mul", "i", "g"),
              "c": ("AddV2", "keep", "new"), "t": ("Tanh", "c"), "h": ("Mul", "o", "t")}  # fmt: skip
    return lines | change


def lstm_weights(inputs=I, rows=0):
    g = np.random.default_rng(3)
    shapes = {"kernel": (inputs, 4 * H), "recurrent": (H, 4 * H), "bias": (rows, 4 * H) if rows else (4 * H,)}
    return {name: g.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def keras_gru(after, split="SplitV", sizes=(H, H, -1), **change):
    """GRUCell.call with implementation=2: the products are made at once, and split."""
    more = {"num_split": 3}
    lines = {
        "last": ("Const", np.int32(-1)),
        "sizes": ("Const", np.int32(sizes)),
        "one": ("Const", 1.0),
        "from_x": ("MatMul", "x", "kernel"),
        "x_parts": (split, "x_bar", "sizes", "last", more) if split == "SplitV" else (split, "last", "x_bar", more),
    }
    if after:
        lines |= {
            "rows": ("Unpack", "bias", {"num": 2, "axis": 0}),
            "x_bar": ("BiasAdd", "from_x", "rows"),
            "from_h": ("MatMul", "h_prev", "recurrent"),
            "h_bar": ("BiasAdd", "from_h", "rows:1"),
            "h_parts": (split, "h_bar", "sizes", "last", more) if split == "SplitV" else (split, "last", "h_bar", more),
            "inner": ("Mul", "r", "h_parts:2"),
        }
    else:
        lines |= {
            "x_bar": ("BiasAdd", "from_x", "bias"),
            "origin": ("Const", np.int32([0, 0])),
            "middle": ("Const", np.int32([0, 2 * H])),
            "strides": ("Const", np.int32([1, 1])),
            "u_zr": ("StridedSlice", "recurrent", "origin", "middle", "strides", {"begin_mask": 1, "end_mask": 1}),
            "u_c": ("StridedSlice", "recurrent", "middle", "origin", "strides", {"begin_mask": 1, "end_mask": 3}),
            "from_h": ("MatMul", "h_prev", "u_zr"),
            "two_sizes": ("Const", np.int32([H, -1])),
            "h_parts": ("SplitV", "from_h", "two_sizes", "last", {"num_split": 2}),
            "reset": ("Mul", "r", "h_prev"),
            "inner": ("MatMul", "reset", "u_c"),
        }
    lines |= {
        "z_bar": ("AddV2", "x_parts", "h_parts"),
        "z": ("Sigmoid", "z_bar"),
        "r_bar": ("AddV2", "x_parts:1", "h_parts:1"),
        "r": ("Sigmoid", "r_bar"),
        "c_bar": ("AddV2", "x_parts:2", "inner"),
        "c": ("Tanh", "c_bar"),
        "keep": ("Mul", "z", "h_prev"),
        "rest": ("Sub", "one", "z"),
        "new": ("Mul", "rest", "c"),
        "h": ("AddV2", "keep", "new"),
    }
    return lines | change


def keras_gru_weights(after):
    """Return the weights of Keras' GRU, by its names."""
    g = np.random.default_rng(11)
    shapes = {"kernel": (I, 3 * H), "recurrent": (H, 3 * H), "bias": (2, 3 * H) if after else (3 * H,)}
    return {name: g.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def rnn(activation="Tanh", **change):
    """Return an RNN of one kernel for [x, h], as lines."""
    lines = {"axis": ("Const", np.int32(1)), "concat": ("ConcatV2", "x", "h_prev", "axis"),
             "product": ("MatMul", "concat", "kernel"), "z": ("BiasAdd", "product", "bias"),
             "h": (activation, "z")}  # fmt: skip
    return lines | change


def rnn_weights():
    g = np.random.default_rng(4)
    shapes = {"kernel": (I + H, H), "bias": (H,)}
    return {name: (g.standard_normal(shape) / 2).astype(np.float32) for name, shape in shapes.items()}


def projected_lstm(**change):
    """Keras' nodes with a projection behind them to as many numbers as there are cells less one, which is clipped."""
    lines = keras_lstm() | {"m": ("Mul", "o", "t"), "p": ("MatMul", "m", "projection"), "top": ("Const", 0.25),
                            "bottom": ("Const", -0.25), "below": ("Minimum", "p", "top"),
                            "h": ("Maximum", "below", "bottom")}  # fmt: skip
    return lines | change


def projected_weights():
    weights, g = lstm_weights(), np.random.default_rng(5)
    weights["recurrent"] = weights["recurrent"][: H - 1]
    return weights | {"projection": g.standard_normal((H, H - 1)).astype(np.float32)}


def of_other_kinds():
    """Return a graph with cells of all kinds, one of them refused, for fuzz_tensorflow.py, too."""
    parts = [node("x", "Placeholder")]
    mixed = {"g": ("Relu", "part_2")}
    dropout = {"many": ("OnesLike", "x"), "kept": ("Mul", "x", "many"), "from_x": ("MatMul", "kept", "kernel")}
    masked = {"mark": ("Placeholder",), "tiled": ("Tile", "mark", "strides"), "h_next": ("NextIteration", "held"),
              "held": ("SelectV2", "tiled", "h", "h_prev")}  # fmt: skip
    coupled = {"one": ("Const", 1.0), "i": ("Sub", "one", "f"), "g": ("Softsign", "part_2"), "t": ("Softsign", "c")}
    for scope, lines, weights in (
        ("a", cudnn_gru() | looped("h"), gru_weights()),
        ("b", keras_lstm("two rows", (3, 1, 0, 2)) | looped("c", "h"), lstm_weights(rows=2)),
        ("c", keras_lstm(**mixed) | looped("c", "h"), lstm_weights()),
        ("d", keras_lstm(**coupled) | looped("c", "h"), lstm_weights()),
        ("e", rnn("Relu") | looped("h"), rnn_weights()),
        ("g", keras_gru(False, **dropout) | looped("h") | masked, keras_gru_weights(False)),
        ("f", projected_lstm() | looped("c", "h"), projected_weights()),
    ):
        parts += [*(real(f"{scope}/{name}", value) for name, value in weights.items()), *scoped_nodes(scope, lines)]
    return graph(*parts)
