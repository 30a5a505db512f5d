"""Fresh random cases, H up to 1024: no float32 output is further from float64 than 5 eps of its largest entry or
TensorFlow's own error, whichever is larger.  Where weights are so large that sequences become chaotic, and an error is
a matter of luck, ours are no larger than TensorFlow's on the geometric mean of many.

`pytest -m peers`, with tensorflow-cpu in .venv.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
from cases import arguments

from blockcell import ops, raw_ops
from blockcell.formulas import FORMULAS, error_in_eps
from blockcell.optable import OPS

pytestmark = pytest.mark.peers
CASES = 40


def error(result, expected):
    return error_in_eps(np.asarray(result), expected, 2.0**-23)


@pytest.mark.parametrize("name", OPS)
def test_errors(name, seed):
    tf = None
    if OPS[name].module == "raw_ops":
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        tf = pytest.importorskip("tensorflow")
    g = np.random.default_rng([seed, list(OPS).index(name)])
    worst = 0.0
    for case in range(CASES):
        H = int(g.choice([5, 16, 33, 64, 100, 128, 256, 300, 512, 777, 1024]))
        sizes = {"T": int(g.choice([1, 2, 5, 20])), "B": int(g.choice([1, 3, 16, 64])), "H": H}
        sizes["I"] = int(g.choice([H, g.integers(1, 300), g.integers(1, H + 1)]))
        if H > 256:
            sizes |= {"T": min(sizes["T"], 5), "B": min(sizes["B"], 16)}
        args = arguments(name, sizes, seed=seed + case, use_peephole=bool(g.integers(2)))
        expected = FORMULAS[name](**args)
        results = getattr(raw_ops if tf else ops, name)(**args)
        theirs = getattr(tf.raw_ops, name)(**args) if tf else expected
        for output, result, their_result, reference in zip(expected._fields, results, theirs, expected, strict=True):
            ours = error(result, reference)
            bound = max(5.0, error(their_result, reference))
            worst = max(worst, ours / bound)
            place = f"case {case}, {sizes}: {output} is {ours:.2f} eps off, the bound is {bound:.2f}"
            assert ours <= bound, place
    print(f"{name}: {CASES} cases, worst {worst:.2f} of the bound")


@pytest.mark.parametrize("scale", [5, 20])
@pytest.mark.parametrize("name", ["GRUBlockCell", "LSTMBlockCell", "BlockLSTM", "BlockLSTMV2"])
def test_errors_with_saturating_weights(name, scale, seed):
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    tf = pytest.importorskip("tensorflow")
    g = np.random.default_rng([seed, scale, list(OPS).index(name)])
    logs = []
    for case in range(2 * CASES):
        sizes = {"T": int(g.choice([5, 20])), "B": int(g.choice([1, 4, 16])), "I": int(g.integers(1, 64))}
        sizes["H"] = int(g.choice([8, 16, 48, 100]))
        args = arguments(name, sizes, seed=seed + case, use_peephole=bool(g.integers(2)))
        args |= {key: args[key] * np.float32(scale) for key in ("w", "w_ru", "w_c") if key in args}
        expected = FORMULAS[name](**args)
        results, theirs = (getattr(module, name)(**args) for module in (raw_ops, tf.raw_ops))
        for result, their_result, reference in zip(results, theirs, expected, strict=True):
            logs.append(np.log((error(result, reference) + 0.1) / (error(their_result, reference) + 0.1)))
    ratio = np.exp(np.mean(logs))
    print(f"{name}: weights times {scale}, our errors are {ratio:.2f} of TensorFlow's")
    assert ratio <= 1.1
