"""Checksums of results, recorded and compared bit for bit: ``python tools/checksums.py record|compare FILE``.

For a change that must keep every bit of every result: record with the package as it was, compare with it as it is now.
`compare` lists the cases that differ or are missing, and then fails.  Whichever blockcell is imported is run, by its
public names alone, so that PYTHONPATH may lead to an older checkout; what that one does not have is not compared.  The
cases are random: all ops, layers and streams
at every CPU level and dtype, with sizes and numbers of threads that take every path through the kernels.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import os
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import blockcell
from blockcell import GRU, LSTM, Bidirectional, Dense, ops, raw_ops

SEED, CASES = 20240229, 200  # of each level, dtype and kind
DTYPES = ("float32", "float64", "float16")
OPS = {name: getattr(module, name) for module in (raw_ops, ops) for name in module.__all__}
VARIANTS = ("projected LSTM", "coupled LSTM", "projected coupled LSTM") if hasattr(LSTM, "coupled") else ()
RNN = getattr(blockcell, "RNN", None)
OTHER = "with other activations"
if RNN is not None:
    VARIANTS += "RNN", f"LSTM {OTHER}", f"GRU {OTHER}", f"GRU reset_after {OTHER}"
    ACTIVATIONS = [*blockcell.activations.PARAMETERS, ("leaky_relu", 0.01), ("hard_sigmoid", 0.2, 0.5)]
CELLS = ("LSTM", "GRU", *(["GRU reset_after"] if "block_gru_reset_after" in OPS else []), "Dense", *VARIANTS)
QUANTIZED = tuple(f"{name} quantized to {scheme}" for scheme in ("int8", "float16") for name in CELLS)
KINDS = (*OPS, *(f"{form}{name}" for form in ("", "Bidirectional ", "stream of ") for name in CELLS), *QUANTIZED)
MOST = 25 * 10**6  # T * B * H * (I + H)
Generator = np.random.Generator
Results = dict[str, Any]


# ------------------------------------------------------------------------------------------------------------- drawing
def sizes_of(g: Generator) -> dict[str, int]:
    """T, B, I, H on both sides of the bounds by which the kernels choose their way, and the number of threads."""

    def one_of(*values: Any) -> int:
        return int(g.choice(values))

    if g.integers(20) == 0:  # weights so large that threads share the units, of one row and of more than a chunk's
        T, B = int(g.integers(1, 3)), one_of(1, g.integers(49, 70))
        return {"T": T, "B": B, "I": 300, "H": 300, "threads": 8}
    while True:
        threads = one_of(1, 2, 2, 3, 8)
        T = one_of(1, 1, 2, 3, 5, g.integers(6, 20), g.integers(20, 80))
        bound = g.choice([2, 4, 16, 32, 64]) * threads + g.integers(-1, 2)
        B = one_of(1, 1, g.integers(2, 9), g.integers(15, 28), 64, 100, bound, bound, g.integers(1, 300))
        I, H = (  # noqa: E741
            one_of(1, 16, 64, 128, 256, *g.integers(1, 20, 2), *g.integers(20, 301, 5), 300, 300) for _ in range(2)
        )
        if T * B * H * (I + H) <= MOST:
            return {"T": T, "B": B, "I": I, "H": H, "threads": threads}


def shape_of(name: str, T: int, B: int, I: int, H: int) -> tuple[int, ...]:  # noqa: E741
    """Of an argument of an op's, by its name, as all ops have the same names."""
    shapes = {
        "x": (T, B, I),
        "h_prev": (B, H),
        "cs_prev": (B, H),
        "w": (I + H, 4 * H),
        "w_ru": (I + H, 2 * H),
        "w_c": (I + H, H),
        "b": (4 * H,),
        "b_ru": (2 * H,),
        "b_c": (H,),
        "b_hc": (H,),
        "wci": (H,),
        "wcf": (H,),
        "wco": (H,),
    }
    return shapes.get(name, (T, B, H))  # saved states and gradients


def array(g: Generator, name: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    low = 0 if name in ("i", "f", "o", "r", "u") else -1  # saved gates
    values = g.uniform(low, 1, shape)
    return (values * (2 / np.sqrt(shape[0])) if name[0] == "w" and len(shape) == 2 else values).astype(dtype)


# ------------------------------------------------------------------------------------------------------- ops and layers
def run_op(g: Generator, kind: str, dtype: str, T: int, B: int, I: int, H: int, threads: int) -> Results:  # noqa: E741
    op = OPS[kind]
    names = inspect.signature(op).parameters
    arguments: dict[str, Any] = {}
    for name in names:
        if name in ("out", "num_threads", "name"):
            continue
        if name == "seq_len_max":
            arguments[name] = T if g.integers(3) else int(g.integers(T + 1))
        elif name == "use_peephole":
            arguments[name] = bool(g.integers(2))
        elif name == "activation":
            arguments[name] = ACTIVATIONS[g.integers(len(ACTIVATIONS))]
        elif name in ("forget_bias", "cell_clip"):
            arguments[name] = float(g.choice([0, 0.4, 1]))
        else:
            shape = (I + H, H) if "rnn" in kind and name == "w" else shape_of(name, T, B, I, H)
            shape = (H,) if "rnn" in kind and name == "b" else shape
            if len(shape) == 3 and "seq_len_max" not in names:
                shape = shape[1:]
            arguments[name] = array(g, name, shape, dtype)
    return op(**arguments, num_threads=threads)._asdict()  # type: ignore[no-any-return]


def cell(g: Generator, kind: str, dtype: str, I: int, H: int) -> Any:  # noqa: E741
    def drawn(*names: str) -> dict[str, np.ndarray]:
        return {name: array(g, name, shape_of(name, 1, 1, I, H), dtype) for name in names}

    options: dict[str, Any] = {}
    if kind.endswith(OTHER) or kind.endswith("RNN"):
        options["activation"] = ACTIVATIONS[g.integers(len(ACTIVATIONS))]
    if kind.endswith(OTHER):
        options["recurrent_activation"] = ACTIVATIONS[g.integers(len(ACTIVATIONS))]
    if kind.endswith("RNN"):
        return RNN(array(g, "w", (I + H, H), dtype), array(g, "b", (H,), dtype), **options)
    if "reset_after" in kind:
        return GRU(**drawn("w_ru", "w_c", "b_ru", "b_c", "b_hc"), reset_after=True, **options)
    if "Dense" in kind:
        activation = [None, "sigmoid", "tanh", "relu", "softmax"][g.integers(5)]
        return Dense(array(g, "w", (I, H), dtype), array(g, "b", (H,), dtype), activation)
    if "GRU" in kind:
        return GRU(**drawn("w_ru", "w_c", "b_ru", "b_c"), **options)
    if "projected" in kind or "coupled" in kind:
        return variant(g, kind, dtype, I, H)
    peepholes = drawn("wci", "wcf", "wco") if g.integers(2) else {}
    options |= {"forget_bias": float(g.choice([0, 1])), "cell_clip": float(g.choice([0, 0.4]))}
    return LSTM(**drawn("w", "b"), **peepholes, **options, gate_order=str(g.choice(["icfo", "ifco"])))


def variant(g: Generator, kind: str, dtype: str, I: int, H: int) -> Any:  # noqa: E741
    """An LSTM with a projection, or with coupled gates."""
    coupled, P = "coupled" in kind, [1, 16, 64, H // 2 + 1, 2 * H][(I + H) % 5] if "projected" in kind else 0
    gates = 3 if coupled else 4
    shapes: dict[str, tuple[int, ...]] = {"w": (I + (P or H), gates * H), "b": (gates * H,)}
    if g.integers(2):
        shapes |= dict.fromkeys(("wcf", "wco") if coupled else ("wci", "wcf", "wco"), (H,))
    options = {"forget_bias": float(g.choice([0, 1])), "cell_clip": float(g.choice([0, 0.4]))}
    if P:
        shapes["w_p"], options["proj_clip"] = (H, P), float(g.choice([0, 0.2]))
    weights = {name: array(g, name, shape, dtype) for name, shape in shapes.items()}
    return LSTM(**weights, **options, coupled=coupled)


def state_of(g: Generator, layer: Any, B: int) -> Any:
    if isinstance(layer, Bidirectional):
        return state_of(g, layer.fw, B), state_of(g, layer.bw, B)
    if isinstance(layer, Dense):
        return ()
    sizes = [layer.hidden_size, layer.output_size][0 if isinstance(layer, LSTM) else 1 :]
    parts = [array(g, "h", (B, size), layer.dtype) for size in sizes]
    return tuple(parts) if g.integers(4) else None


def run_layer(g: Generator, kind: str, dtype: str, T: int, B: int, I: int, H: int, threads: int) -> Results:  # noqa: E741
    if kind.startswith("Bidirectional"):
        layer = Bidirectional(cell(g, kind, dtype, I, H), cell(g, kind, dtype, I, H))
    else:
        layer = cell(g, kind, dtype, I, H)
    x, d_y = array(g, "x", (T, B, I), dtype), array(g, "d_y", (T, B, layer.output_size), dtype)
    state, d_state = state_of(g, layer, B), state_of(g, layer, B)
    options: dict[str, Any] = {}
    if g.integers(3) == 0:
        options["lengths"] = g.integers(0, T + 1, B)
    if g.integers(3) == 0:
        options["reset"] = g.random((T, B)) < 0.2
    called, (y, last, tape) = layer(x, state, **options), layer.forward(x, state, **options)
    d_x, d_first, grads = layer.backward(tape, d_y, d_state)
    return {"call": called, "y": y, "state": last, "d_x": d_x, "d_state": d_first, **grads}


def run_stream(g: Generator, kind: str, dtype: str, T: int, B: int, I: int, H: int, threads: int) -> Results:  # noqa: E741
    """Steps and blocks of steps in turns, some with a reset before."""
    stream = cell(g, kind, dtype, I, H).stream(B)
    first = state_of(g, stream.layer, B)
    if first is not None:
        stream.state = first
    results: Results = {}
    for k in range(4):
        if g.integers(3) == 0:
            stream.reset(g.integers(0, B, 2))
        if k % 2:
            results[f"run {k}"] = stream.run(array(g, "x", (T, B, I), dtype))
        else:
            results[f"step {k}"] = stream.step(array(g, "x", (B, I), dtype))
        results[f"state {k}"] = stream.state
    return results


def run_quantized(g: Generator, kind: str, dtype: str, T: int, B: int, I: int, H: int, threads: int) -> Results:  # noqa: E741
    """A call and a stream of a quantized layer; one that has no `quantize` yet calls it `packed`."""
    kind, _, scheme = kind.partition(" quantized to ")
    layer = cell(g, kind, dtype, I, H)
    quantize = getattr(layer, "quantize", None)
    quantized = quantize(scheme) if quantize else layer.packed(scheme, "int8" if scheme == "int8" else "float32")
    x, state = array(g, "x", (T, B, I), dtype), state_of(g, layer, B)
    lengths = g.integers(0, T + 1, B) if g.integers(3) == 0 else None
    return {"call": quantized(x, state, lengths=lengths), "run": quantized.stream(B).run(x)}


# ----------------------------------------------------------------------------------------------------------- checksums
def leaves(value: Any) -> Iterator[np.ndarray]:
    if isinstance(value, np.ndarray):
        yield value
    else:
        for part in value:
            yield from leaves(part)


def checksum(value: Any) -> str:
    """Of shape, dtype and bytes of all arrays in it, where every NaN is the same one."""
    found = 0
    for part in leaves(value):
        found = zlib.crc32(f"{part.dtype.str} {part.shape}".encode(), found)
        if np.issubdtype(part.dtype, np.floating):
            part = np.where(np.isnan(part), part.dtype.type(np.nan), part)
        found = zlib.crc32(np.ascontiguousarray(part).tobytes(), found)
    return f"{found:08x}"


def at_this_level(cases: int) -> dict[str, dict[str, str]]:
    """The checksums of each case's results, by the case, for the level that is imported."""
    if hasattr(blockcell, "_team"):
        blockcell._team.adapt(False)  # else a busy machine has one thread at work where several are meant
    found = {}
    for dtype, kind in itertools.product(DTYPES, KINDS):
        if kind in QUANTIZED and dtype != "float32":
            continue
        run = run_op if kind in OPS else run_stream if kind.startswith("stream") else run_layer
        run = run_quantized if kind in QUANTIZED else run
        for number in range(cases):
            g = np.random.default_rng([SEED, zlib.crc32(kind.encode()), number])
            sizes = sizes_of(g)
            blockcell.set_num_threads(sizes["threads"])
            results = run(g, kind, dtype, **sizes)
            what = " ".join(f"{name}={size}" for name, size in sizes.items())
            name = f"{blockcell.build_info()['level']} {dtype} {kind}, {number}: {what}"
            found[name] = {key: checksum(value) for key, value in results.items()}
    return found


def checksums(cases: int) -> dict[str, Any]:
    """Those of every level, each in an interpreter of its own, after what they were made with."""
    info = blockcell.build_info()
    levels = [level for level in info["levels"] if level in info["supported_levels"]]
    kept = {key: info[key] for key in ("version", "numpy", "cpu", "compiler", "flags")}
    found = {"seed": SEED, "cases": cases, "kinds": KINDS, "levels": levels, **kept, "checksums": {}}
    for level in levels:
        command = [sys.executable, __file__, "level", "--cases", str(cases)]
        environment = os.environ | {"BLOCKCELL_LEVEL": level}
        output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout
        found["checksums"] |= json.loads(output)
    return found


def differences(recorded: dict[str, Any], found: dict[str, Any]) -> Iterator[str]:
    for name in sorted({*recorded, *found}):
        if name not in found:
            yield f"{name}: recorded, but not found here"
        elif name not in recorded:
            yield f"{name}: found here, but not recorded"
        elif changed := [key for key in {**recorded[name], **found[name]}
                         if recorded[name].get(key) != found[name].get(key)]:  # fmt: skip
            yield f"{name}: other bits in {', '.join(changed)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["record", "compare", "level"], help="level prints those of one level")
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--cases", type=int, default=CASES, help="of each level, dtype and kind, to record")
    arguments = parser.parse_args()
    if arguments.action == "level":
        print(json.dumps(at_this_level(arguments.cases)))
        return
    print(f"blockcell of {Path(blockcell.__file__).parent}")
    if arguments.action == "record":
        found = checksums(arguments.cases)
        arguments.file.write_text(json.dumps(found, indent=0))
        print(f"{len(found['checksums'])} cases recorded")
        return
    recorded = json.loads(arguments.file.read_text())
    found = checksums(recorded["cases"])
    compared = tuple(f" {kind}," for kind in recorded["kinds"])
    found["checksums"] = {name: each for name, each in found["checksums"].items() if any(k in name for k in compared)}
    for key in recorded:
        if key not in ("checksums", "kinds") and recorded[key] != found[key]:
            print(f"{key} was {recorded[key]} and is {found[key]}")
    changed = [*differences(recorded["checksums"], found["checksums"])]
    for line in changed:
        print(line)
    print(f"{len(changed)} of {len(recorded['checksums'])} cases differ")
    sys.exit(bool(changed))


if __name__ == "__main__":
    main()
