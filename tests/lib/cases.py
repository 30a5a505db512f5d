"""Every op's function, random arguments for it, drawn from the table of ops, and the golden cases.

A saved state (``i``, ``cs``, ...) is what the op's own forward formula gives, so a gradient is tested at a point that
exists. Every gate's columns have a scale and an offset of their own: swapping two gates, two peepholes or two states
changes the results.
"""

from __future__ import annotations

import json
import os
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from blockcell import ops, raw_ops
from blockcell.formulas import FORMULAS
from blockcell.optable import OPS, Op, sizes_of

GOLDEN = Path(__file__).parents[1] / "golden"
FUNCTIONS = {name: getattr(raw_ops if op.module == "raw_ops" else ops, name) for name, op in OPS.items()}
FORWARD = {  # the forward op whose results an op's saved states are
    "GRUBlockCellGrad": "GRUBlockCell",
    "gru_block_cell_vjp": "GRUBlockCell",
    "block_gru_grad": "block_gru",
    "block_gru_reset_after_grad": "block_gru_reset_after",
    "LSTMBlockCellGrad": "LSTMBlockCell",
    "lstm_block_cell_vjp": "LSTMBlockCell",
    "BlockLSTMGrad": "BlockLSTM",
    "BlockLSTMGradV2": "BlockLSTMV2",
    "block_rnn_grad": "block_rnn",
}
SEED = int(os.environ.get("BLOCKCELL_SEED", 20))  # tests that draw take it as the fixture `seed`, which shows it
SIZES = {"T": 4, "B": 3, "I": 2, "H": 5}


def rng(*key: object) -> np.random.Generator:
    """Return a generator that depends on the key alone."""
    return np.random.default_rng(zlib.crc32(repr(key).encode()))


def tensors(op: Op, sizes: dict[str, int], seed: int = 0) -> dict[str, np.ndarray]:
    """Draw float64 values for the inputs that are not saved states."""
    saved = OPS[FORWARD[op.name]].result._fields if op.name in FORWARD else ()
    values = {}
    for tensor in op.inputs:
        if tensor.name in saved:
            continue
        g = rng(tensor.name, seed, sorted(sizes.items()))
        shape = sizes_of(tensor.shape, sizes)
        value = g.uniform(-1, 1, shape)
        if tensor.name.startswith("w") and len(shape) == 2:
            value *= 1.5 / np.sqrt(max(shape[0], 1))
        hidden = sizes["H"]
        if tensor.name[0] in "wb" and hidden and shape[-1] % hidden == 0:  # weights: by gate
            for k in range(shape[-1] // hidden):
                value[..., k * hidden : (k + 1) * hidden] *= 0.6 + 0.2 * k
                if tensor.name[0] == "b":
                    value[k * hidden : (k + 1) * hidden] += 0.3 * k - 0.4
        values[tensor.name] = value * {"wci": 0.5, "wcf": 0.8, "wco": 1.1, "cs_prev": 1.4}.get(tensor.name, 1.0)
    return values


def arguments(
    name: str,
    sizes: dict[str, int] | None = None,
    *,
    dtype: Any = np.float32,
    seed: int = 0,
    seq_len_max: int | None = None,
    use_peephole: bool = True,
    **attributes: Any,
) -> dict[str, Any]:
    """Return all arguments of an op, of one dtype; ``attributes`` also apply to the forward that saves the states."""
    op, sizes = OPS[name], {**SIZES, **(sizes or {})}
    values: dict[str, Any] = {k: v.astype(dtype) for k, v in tensors(op, sizes, seed).items()}
    if op.sequence:
        values["seq_len_max"] = sizes["T"] if seq_len_max is None else seq_len_max
    switches = {**attributes, "use_peephole": use_peephole}
    if name in FORWARD:
        states = FORMULAS[FORWARD[name]](**arguments_of(FORWARD[name], {**values, **switches}))._asdict()
        saved_names = {tensor.name for tensor in op.inputs} - values.keys()
        values |= {k: states[k].astype(dtype) for k in saved_names}
    return arguments_of(name, {**values, **switches})


def arguments_of(name: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments among these values that the op takes, in its order."""
    op = OPS[name]
    names = ["seq_len_max"] * op.sequence + [part.name for part in (*op.inputs, *op.attributes)]
    return {k: values[k] for k in names if k in values}


def as_passed(
    name: str, args: dict[str, Any], out: tuple[np.ndarray, ...] | None = None, num_threads: int | None = None
) -> tuple[Any, ...]:
    """Return a call's arguments in the way in which an op's function passes them to its `Call`."""
    inputs = tuple(args[tensor.name] for tensor in OPS[name].inputs)
    attributes = tuple(args.get(attribute.name, attribute.default) for attribute in OPS[name].attributes)
    return inputs, out, num_threads, attributes, args.get("seq_len_max")


@cache
def golden() -> list[dict[str, Any]]:
    """Return every case of the golden files: the manifest's entry with ``inputs`` and TF's ``outputs`` filled in.

    ``compared`` is the number of leading steps that may be compared of each output: TF leaves the gates past
    ``seq_len_max`` undefined.
    """
    cases = json.loads((GOLDEN / "manifest.json").read_text())["cases"]
    files = {family: dict(np.load(GOLDEN / f"{family}.npz")) for family in {case["family"] for case in cases}}
    for case in cases:
        stored, name, forward = files[case["family"]], case["case"], case["forward_case"]
        names, case["inputs"] = case["inputs"], {}
        for key in names:
            places = f"{name}.in.{key}", f"{forward}.in.{key}", f"{forward}.tf.{key}"
            case["inputs"][key] = next(stored[place] for place in places if place in stored)
        case["outputs"] = {key: stored[f"{name}.tf.{key}"] for key in case["outputs"]}
        undefined = ("i", "f", "o", "ci", "co") if OPS[case["op"]].sequence else ()
        case["compared"] = {key: case["sizes"]["seq_len_max"] if key in undefined else None for key in case["outputs"]}
    return cases


def derivative(function, value, direction, step=1e-3):
    """Return the fourth-order central difference of ``function`` at ``value`` along ``direction``."""
    ahead = [function(value + k * step * direction) - function(value - k * step * direction) for k in (1, 2)]
    return (8 * ahead[0] - ahead[1]) / (12 * step)
