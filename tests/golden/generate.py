"""Makes the golden files beside this script: what TensorFlow's own CPU kernels return for seeded inputs.

    python tests/golden/generate.py [FOLDER]        # needs tensorflow-cpu 2.21; FOLDER is this one if not given

There is one ``.npz`` for each family of ops and a ``manifest.json`` that lists the cases: op, dtype, kind, sizes, seed,
attributes, names of inputs and outputs. The arrays of case ``c007`` are

    c007.in.<name>     an input, in the case's dtype (``seq_len_max`` is int64)
    c007.tf.<name>     TensorFlow's output for these inputs

A gradient's case stores those inputs only that its forward case (``forward_case`` in the manifest) does not have: the
others are that case's ``in`` and, for saved states, ``tf`` arrays. So gradients are fed with TF's own states.

``kind`` is "normal", "zeros" (every input 0), "saturated" (weights 20 times as large) or "nan" (a NaN and an Inf in
x). Steps at and after ``seq_len_max`` of i, f, o, ci and co are undefined in TF; zeros are stored there and must not be
compared. TF 2 does not compute the cells' weight gradients: they are made with TF's matmul and reduce_sum from what
the raw ops return, as the wrapper of TF 1 did, and their names stand under ``wg``.
"""

import json
import os
import sys
import zlib
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import numpy as np
import tensorflow as tf

from blockcell.optable import OPS, sizes_of

DTYPES = {"f32": np.float32, "f16": np.float16}
UNDEFINED = ("i", "f", "o", "ci", "co")
manifest: list[dict] = []
files: dict[str, dict[str, np.ndarray]] = {}


def draw(key, dtype, kind, shapes):
    """Uniform numbers, the matrices' scaled by their number of rows. The seed is the key."""
    g = np.random.default_rng(zlib.crc32(repr(key).encode()))
    values = {}
    for name, shape in shapes.items():
        matrix = name.startswith("w") and len(shape) == 2
        scale = 1.5 / np.sqrt(shape[0]) * (20 if kind == "saturated" else 1) if matrix else 1.0
        value = g.uniform(-scale, scale, shape).astype(DTYPES[dtype])
        values[name] = np.zeros_like(value) if kind == "zeros" else value
    if kind == "nan":
        values["x"].flat[0], values["x"].flat[-1] = np.nan, np.inf
    return values


def call(op, inputs, attrs):
    """TF's op; where steps are undefined, zeros."""
    results = {k: v.numpy() for k, v in getattr(tf.raw_ops, op)(**inputs, **attrs)._asdict().items()}
    for name in UNDEFINED if op in ("BlockLSTM", "BlockLSTMV2") else ():
        results[name] = results[name].copy()
        results[name][int(inputs["seq_len_max"]) :] = 0
    return results


def weight_grads(op, inputs, grads):
    """The gradients that the cells' raw ops leave to the caller."""
    x_h = np.concatenate([inputs["x"], inputs["h_prev"]], 1)
    if op == "GRUBlockCellGrad":
        x_hr = np.concatenate([inputs["x"], inputs["h_prev"] * inputs["r"]], 1)
        bars = {"ru": (x_h, grads["d_r_bar_u_bar"]), "c": (x_hr, grads["d_c_bar"])}
        products = {f"d_w_{k}": tf.matmul(a, bar, transpose_a=True) for k, (a, bar) in bars.items()}
        return products | {f"d_b_{k}": tf.reduce_sum(bar, 0) for k, (_, bar) in bars.items()}
    x_h_grad = tf.matmul(grads["dicfo"], inputs["w"], transpose_b=True)
    split = inputs["x"].shape[1]
    return {
        "x_grad": x_h_grad[:, :split],
        "h_prev_grad": x_h_grad[:, split:],
        "w_grad": tf.matmul(x_h, grads["dicfo"], transpose_a=True),
        "b_grad": tf.reduce_sum(grads["dicfo"], 0),
    }


def record(family, op, dtype, kind, sizes, key, inputs, attrs, forward=None):
    """Runs TF, stores the case, returns the outputs and the manifest's entry."""
    outputs = call(op, inputs, attrs)
    entry = {
        "family": family,
        "case": f"c{sum(case['family'] == family for case in manifest):03d}",
        "op": op,
        "dtype": dtype,
        "kind": kind,
        "sizes": sizes,
        "seed": repr(key),
        "attrs": attrs,
        "inputs": list(inputs),
        "forward_case": forward and forward["case"],
    }
    if op in ("GRUBlockCellGrad", "LSTMBlockCellGrad"):
        extra = {k: v.numpy() for k, v in weight_grads(op, inputs, outputs).items()}
        entry["wg"] = list(extra)
        outputs = outputs | extra
    entry["outputs"] = list(outputs)
    manifest.append(entry)
    stored = files.setdefault(family, {})
    known = forward["inputs"] + forward["outputs"] if forward else []
    for name, value in inputs.items():
        if name not in known:
            stored[f"{entry['case']}.in.{name}"] = np.asarray(value)
    for name, value in outputs.items():
        stored[f"{entry['case']}.tf.{name}"] = value
    return outputs, entry


def pair(family, forward, backward, dtype, kind, sizes, key, attrs, **fixed):
    """A forward case and the case of its gradient."""
    inputs = {t.name: sizes_of(t.shape, sizes) for t in OPS[forward].inputs}
    grads = {
        t.name: sizes_of(t.shape, sizes) for t in OPS[backward].inputs if t.name.endswith("_grad") or t.name == "d_h"
    }
    drawn = draw(key, dtype, kind, inputs | grads)
    if family == "gru" and kind == "zeros":
        drawn["d_h"] = drawn["d_h"] + 1  # or every gradient would be zero
    entries = sizes | {k: int(v) for k, v in fixed.items()}
    given = {k: drawn[k] for k in inputs} | fixed
    states, entry = record(family, forward, dtype, kind, entries, key, given, attrs)
    taken = {t.name for t in OPS[backward].inputs}
    given |= {k: v for k, v in states.items() if k in taken} | {k: drawn[k] for k in grads}
    attrs = {k: v for k, v in attrs.items() if k == "use_peephole"}
    record(family, backward, dtype, kind, entries, key, given, attrs, entry)


def gru_cases():
    shapes = [(1, 1, 1), (2, 3, 4), (3, 5, 7), (4, 33, 17), (16, 8, 32), (1, 64, 48), (7, 1, 19), (2, 0, 3)]
    cases = [("normal", shape) for shape in shapes]
    for kind, (b, i, h) in [*cases, ("zeros", (2, 3, 4)), ("saturated", (5, 6, 7)), ("nan", (4, 3, 5))]:
        sizes = {"B": b, "I": i, "H": h}
        pair("gru", "GRUBlockCell", "GRUBlockCellGrad", "f32", kind, sizes, ("gru", kind, b, i, h), {})


def lstm_cell_cases():
    cases = []
    for dtype in DTYPES:
        for shape in ((1, 1, 1), (2, 3, 4), (3, 5, 7), (8, 16, 24)):
            clips = {-1.0: 1.0, 0.25: -0.5} if shape[0] in (1, 8) else {0.0: 0.0, 0.25: -0.5, 3.0: 1.0}
            for peephole in (False, True):
                cases += [(dtype, "normal", shape, peephole, clip, bias) for clip, bias in clips.items()]
        for kind, shape in (("zeros", (2, 3, 4)), ("saturated", (5, 6, 7)), ("nan", (4, 3, 5))):
            cases += [(dtype, kind, shape, True, 3.0, 1.0), (dtype, kind, shape, False, 0.0, 1.0)]
    cases += [("f32", "normal", (4, 40, 32), True, 0.5, 1.0), ("f32", "normal", (3, 0, 5), False, 3.0, 1.0)]
    for dtype, kind, (b, i, h), peephole, clip, bias in cases:
        sizes, key = {"B": b, "I": i, "H": h}, ("lstm", dtype, kind, b, i, h)
        attrs = {"forget_bias": bias, "cell_clip": clip, "use_peephole": peephole}
        pair("lstm_cell", "LSTMBlockCell", "LSTMBlockCellGrad", dtype, kind, sizes, key, attrs)


def block_lstm_cases():
    for version in (1, 2):
        cases = []
        for dtype in DTYPES:
            for t, *shape in ((1, 1, 1, 1), (3, 2, 3, 4), (5, 3, 4, 6), (6, 3, 5, 7)):
                for n in {1: (0, 1), 3: (1, 3)}.get(t, (0, t - 2, t)):
                    cases += [(dtype, "normal", t, *shape, n, False, 0.0, 1.0)]
                    cases += [(dtype, "normal", t, *shape, n, True, 0.4, 1.0)]
            cases += [
                (dtype, "nan", 4, 3, 2, 5, 3, True, 3.0, 1.0),
                (dtype, "saturated", 5, 4, 6, 8, 5, True, 3.0, 1.0),
            ]
        cases += [("f32", "normal", 20, 4, 8, 16, 17, True, 0.0, 1.0)]
        cases += [("f32", "normal", 12, 16, 20, 24, 12, False, -1.0, 0.5)]
        family, suffix = ("block_lstm", "") if version == 1 else ("block_lstm_v2", "V2")
        for dtype, kind, t, b, i, h, n, peephole, clip, bias in cases:
            sizes, key = {"T": t, "B": b, "I": i, "H": h}, ("seq", version, dtype, kind, t, b, i, h)
            attrs = {"cell_clip": clip, "use_peephole": peephole} | ({"forget_bias": bias} if version == 1 else {})
            forward, backward = f"BlockLSTM{suffix}", f"BlockLSTMGrad{suffix}"
            pair(family, forward, backward, dtype, kind, sizes, key, attrs, seq_len_max=np.int64(n))


def main():
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    gru_cases()
    lstm_cell_cases()
    block_lstm_cases()
    for family, arrays in files.items():
        np.savez_compressed(folder / f"{family}.npz", **arrays)
    versions = {"tensorflow": tf.__version__, "numpy": np.__version__, "device": "CPU"}
    (folder / "manifest.json").write_text(json.dumps(versions | {"cases": manifest}, indent=0))
    print(f"{len(manifest)} cases in {folder}")


if __name__ == "__main__":
    main()
