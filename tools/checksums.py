"""Record checksums of results, and compare them bit for bit: ``python tools/checksums.py record|compare FILE``.

For a change that must keep every bit of every result: record with the package as it was, compare with it as it is now.
`compare` lists the cases that differ or are missing, and then fails.  Whichever blockcell is imported is run, so that
PYTHONPATH may lead to another checkout; kinds that were not recorded are not compared.  The cases are random: all ops,
layers and streams at every CPU level and dtype, with sizes and numbers of threads that take every path through the
kernels.

Run by hand, before and after such a change.  Takes about half an hour, with `--cases 2` to record few a quarter of a
minute.
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
from blockcell import GRU, LSTM, RNN, Bidirectional, Dense, _team, activations, ops, optable, raw_ops
from blockcell.optable import sizes_of

SEED, CASES = 20240229, 200  # of each level, dtype and kind
DTYPES = ("float32", "float64", "float16")
OPS = {name: getattr(module, name) for module in (raw_ops, ops) for name in module.__all__}
OTHER_ACTIVATIONS = "with other activations"
VARIANTS = ("projected LSTM", "coupled LSTM", "projected coupled LSTM", "RNN")
VARIANTS += tuple(f"{name} {OTHER_ACTIVATIONS}" for name in ("LSTM", "GRU", "GRU reset_after"))
ACTIVATIONS = [*activations.PARAMETERS, ("leaky_relu", 0.01), ("hard_sigmoid", 0.2, 0.5)]
CELLS = ("LSTM", "GRU", "GRU reset_after", "Dense", *VARIANTS)
QUANTIZED = tuple(f"{name} quantized to {scheme}" for scheme in ("int8", "float16") for name in CELLS)
KINDS = (*OPS, *(f"{form}{name}" for form in ("", "Bidirectional ", "stream of ") for name in CELLS), *QUANTIZED)
SHAPES = {
    tensor.name: tensor.shape for op in ("BlockLSTM", "block_gru_reset_after") for tensor in optable.OPS[op].inputs
}  # of weights
MAX_OPERATIONS = 25 * 10**6  # T * B * H * (I + H)
Generator = np.random.Generator
Results = dict[str, Any]


# ------------------------------------------------------------------------------------------------------------- drawing
def draw_sizes(g: Generator) -> dict[str, int]:
    """Draw T, B, I, H on both sides of the bounds by which the kernels choose their way, and the number of threads."""

    def choose(*values: Any) -> int:
        """Draw one of some numbers."""
        return int(g.choice(values))

    if g.integers(20) == 0:  # weights so large that threads share the units, of one row and of more than a chunk's
        T, B = int(g.integers(1, 3)), choose(1, g.integers(49, 70))
        return {"T": T, "B": B, "I": 300, "H": 300, "threads": 8}
    while True:
        threads = choose(1, 2, 2, 3, 8)
        T = choose(1, 1, 2, 3, 5, g.integers(6, 20), g.integers(20, 80))
        bound = g.choice([2, 4, 16, 32, 64]) * threads + g.integers(-1, 2)
        B = choose(1, 1, g.integers(2, 9), g.integers(15, 28), 64, 100, bound, bound, g.integers(1, 300))
        I, H = (  # noqa: E741
            choose(1, 16, 64, 128, 256, *g.integers(1, 20, 2), *g.integers(20, 301, 5), 300, 300) for _ in range(2)
        )
        if T * B * H * (I + H) <= MAX_OPERATIONS:
            return {"T": T, "B": B, "I": I, "H": H, "threads": threads}


def draw_array(g: Generator, name: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Draw an array for an argument of this name: a matrix of weights, gates that were saved, or other numbers."""
    low = 0 if name in ("i", "f", "o", "r", "u") else -1  # saved gates
    values = g.uniform(low, 1, shape)
    return (values * (2 / np.sqrt(shape[0])) if name[0] == "w" and len(shape) == 2 else values).astype(dtype)


# ------------------------------------------------------------------------------------------------------- ops and layers
def run_op(g: Generator, kind: str, dtype: str, T: int, B: int, I: int, H: int, threads: int) -> Results:  # noqa: E741
    """Run an op on arguments that are drawn, and return its results by name."""
    op = OPS[kind]
    sizes = {"T": T, "B": B, "I": I, "H": H}
    shapes = {tensor.name: sizes_of(tensor.shape, sizes) for tensor in optable.OPS[kind].inputs}
    arguments: dict[str, Any] = {}
    for name in inspect.signature(op).parameters:
        if name in shapes:
            arguments[name] = draw_array(g, name, shapes[name], dtype)
        elif name == "seq_len_max":
            arguments[name] = T if g.integers(3) else int(g.integers(T + 1))
        elif name == "use_peephole":
            arguments[name] = bool(g.integers(2))
        elif name == "activation":
            arguments[name] = ACTIVATIONS[g.integers(len(ACTIVATIONS))]
        elif name in ("forget_bias", "cell_clip"):
            arguments[name] = float(g.choice([0, 0.4, 1]))
    return op(**arguments, num_threads=threads)._asdict()  # type: ignore[no-any-return]


def draw_layer(g: Generator, kind: str, dtype: str, I: int, H: int) -> Any:  # noqa: E741
    """Draw a layer of a kind that KINDS names: its weights and its options."""

    def draw_weights(*names: str) -> dict[str, np.ndarray]:
        """Draw the weights of these names."""
        return {name: draw_array(g, name, sizes_of(SHAPES[name], {"I": I, "H": H}), dtype) for name in names}

    options: dict[str, Any] = {}
    if kind.endswith(OTHER_ACTIVATIONS) or kind.endswith("RNN"):
        options["activation"] = ACTIVATIONS[g.integers(len(ACTIVATIONS))]
    if kind.endswith(OTHER_ACTIVATIONS):
        options["recurrent_activation"] = ACTIVATIONS[g.integers(len(ACTIVATIONS))]
    if kind.endswith("RNN"):
        return RNN(draw_array(g, "w", (I + H, H), dtype), draw_array(g, "b", (H,), dtype), **options)
    if "reset_after" in kind:
        return GRU(**draw_weights("w_ru", "w_c", "b_ru", "b_c", "b_hc"), reset_after=True, **options)
    if "Dense" in kind:
        activation = [None, "sigmoid", "tanh", "relu", "softmax"][g.integers(5)]
        return Dense(draw_array(g, "w", (I, H), dtype), draw_array(g, "b", (H,), dtype), activation)
    if "GRU" in kind:
        return GRU(**draw_weights("w_ru", "w_c", "b_ru", "b_c"), **options)
    if "projected" in kind or "coupled" in kind:
        return draw_lstm_variant(g, kind, dtype, I, H)
    peepholes = draw_weights("wci", "wcf", "wco") if g.integers(2) else {}
    options |= {"forget_bias": float(g.choice([0, 1])), "cell_clip": float(g.choice([0, 0.4]))}
    return LSTM(**draw_weights("w", "b"), **peepholes, **options, gate_order=str(g.choice(["icfo", "ifco"])))


def draw_lstm_variant(g: Generator, kind: str, dtype: str, I: int, H: int) -> Any:  # noqa: E741
    """Draw an LSTM with a projection, or with coupled gates."""
    coupled, P = "coupled" in kind, [1, 16, 64, H // 2 + 1, 2 * H][(I + H) % 5] if "projected" in kind else 0
    gates = 3 if coupled else 4
    shapes: dict[str, tuple[int, ...]] = {"w": (I + (P or H), gates * H), "b": (gates * H,)}
    if g.integers(2):
        shapes |= dict.fromkeys(("wcf", "wco") if coupled else ("wci", "wcf", "wco"), (H,))
    options = {"forget_bias": float(g.choice([0, 1])), "cell_clip": float(g.choice([0, 0.4]))}
    if P:
        shapes["w_p"], options["proj_clip"] = (H, P), float(g.choice([0, 0.2]))
    weights = {name: draw_array(g, name, shape, dtype) for name, shape in shapes.items()}
    return LSTM(**weights, **options, coupled=coupled)


def draw_state(g: Generator, layer: Any, B: int) -> Any:
    """Draw the first state of a layer, or none."""
    if isinstance(layer, Bidirectional):
        return draw_state(g, layer.fw, B), draw_state(g, layer.bw, B)
    if isinstance(layer, Dense):
        return ()
    sizes = [layer.hidden_size, layer.output_size][0 if isinstance(layer, LSTM) else 1 :]
    states = [draw_array(g, "h", (B, size), layer.dtype) for size in sizes]
    return tuple(states) if g.integers(4) else None


def run_layer(g: Generator, kind: str, dtype: str, T: int, B: int, I: int, H: int, threads: int) -> Results:  # noqa: E741
    """Run a call, a forward and a backward pass of a layer, of rows that may end or be reset."""
    if kind.startswith("Bidirectional"):
        layer = Bidirectional(draw_layer(g, kind, dtype, I, H), draw_layer(g, kind, dtype, I, H))
    else:
        layer = draw_layer(g, kind, dtype, I, H)
    x, d_y = draw_array(g, "x", (T, B, I), dtype), draw_array(g, "d_y", (T, B, layer.output_size), dtype)
    state, d_state = draw_state(g, layer, B), draw_state(g, layer, B)
    options: dict[str, Any] = {}
    if g.integers(3) == 0:
        options["lengths"] = g.integers(0, T + 1, B)
    if g.integers(3) == 0:
        options["reset"] = g.random((T, B)) < 0.2
    call_results, (y, last, tape) = layer(x, state, **options), layer.forward(x, state, **options)
    d_x, d_first, grads = layer.backward(tape, d_y, d_state)
    return {"call": call_results, "y": y, "state": last, "d_x": d_x, "d_state": d_first, **grads}


def run_stream(g: Generator, kind: str, dtype: str, T: int, B: int, I: int, H: int, threads: int) -> Results:  # noqa: E741
    """Run steps and blocks of steps of a stream in turns, some after a reset of rows."""
    stream = draw_layer(g, kind, dtype, I, H).stream(B)
    first = draw_state(g, stream.layer, B)
    if first is not None:
        stream.state = first
    results: Results = {}
    for k in range(4):
        if g.integers(3) == 0:
            stream.reset(g.integers(0, B, 2))
        if k % 2:
            results[f"run {k}"] = stream.run(draw_array(g, "x", (T, B, I), dtype))
        else:
            results[f"step {k}"] = stream.step(draw_array(g, "x", (B, I), dtype))
        results[f"state {k}"] = stream.state
    return results


def run_quantized(g: Generator, kind: str, dtype: str, T: int, B: int, I: int, H: int, threads: int) -> Results:  # noqa: E741
    """Run a call and a stream of a quantized layer."""
    kind, _, scheme = kind.partition(" quantized to ")
    layer = draw_layer(g, kind, dtype, I, H)
    quantized = layer.quantize(scheme)
    x, state = draw_array(g, "x", (T, B, I), dtype), draw_state(g, layer, B)
    lengths = g.integers(0, T + 1, B) if g.integers(3) == 0 else None
    return {"call": quantized(x, state, lengths=lengths), "run": quantized.stream(B).run(x)}


# ----------------------------------------------------------------------------------------------------------- checksums
def arrays_in(value: Any) -> Iterator[np.ndarray]:
    """Yield all arrays in an array or in tuples of them."""
    if isinstance(value, np.ndarray):
        yield value
    else:
        for part in value:
            yield from arrays_in(part)


def checksum(value: Any) -> str:
    """Return the CRC-32 of shape, dtype and bytes of all arrays in it, where every NaN is the same one."""
    crc = 0
    for part in arrays_in(value):
        crc = zlib.crc32(f"{part.dtype.str} {part.shape}".encode(), crc)
        if np.issubdtype(part.dtype, np.floating):
            part = np.where(np.isnan(part), part.dtype.type(np.nan), part)
        crc = zlib.crc32(np.ascontiguousarray(part).tobytes(), crc)
    return f"{crc:08x}"


def level_checksums(cases: int) -> dict[str, dict[str, str]]:
    """Return the checksums of the results of each case, for the CPU level that is imported."""
    _team.adapt(False)  # else a busy machine has one thread at work where several are meant
    checksums_of_cases = {}
    for dtype, kind in itertools.product(DTYPES, KINDS):
        if kind in QUANTIZED and dtype != "float32":
            continue
        if kind in OPS:
            run = run_op
        elif kind in QUANTIZED:
            run = run_quantized
        else:
            run = run_stream if kind.startswith("stream") else run_layer
        for number in range(cases):
            g = np.random.default_rng([SEED, zlib.crc32(kind.encode()), number])
            sizes = draw_sizes(g)
            blockcell.set_num_threads(sizes["threads"])
            results = run(g, kind, dtype, **sizes)
            size_text = " ".join(f"{name}={size}" for name, size in sizes.items())
            case = f"{blockcell.build_info()['level']} {dtype} {kind}, {number}: {size_text}"
            checksums_of_cases[case] = {key: checksum(value) for key, value in results.items()}
    return checksums_of_cases


def all_checksums(cases: int) -> dict[str, Any]:
    """Return the checksums of every level, each computed by an interpreter of its own, and what built them."""
    info = blockcell.build_info()
    levels = [level for level in info["levels"] if level in info["supported_levels"]]
    build = {key: info[key] for key in ("version", "numpy", "cpu", "compiler", "flags")}
    record = {"seed": SEED, "cases": cases, "kinds": KINDS, "levels": levels, **build, "checksums": {}}
    for level in levels:
        command = [sys.executable, __file__, "level", "--cases", str(cases)]
        environment = os.environ | {"BLOCKCELL_LEVEL": level}
        output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout
        record["checksums"] |= json.loads(output)
    return record


def differences(recorded: dict[str, Any], computed: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each case whose checksums differ or that one side lacks."""
    for case in sorted({*recorded, *computed}):
        if case not in computed:
            yield f"{case}: recorded, but not found here"
        elif case not in recorded:
            yield f"{case}: found here, but not recorded"
        else:
            results = {**recorded[case], **computed[case]}
            differing = [name for name in results if recorded[case].get(name) != computed[case].get(name)]
            if differing:
                yield f"{case}: other bits in {', '.join(differing)}"


def main() -> None:
    """Record or compare checksums, or print those of one level."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["record", "compare", "level"], help="level prints those of one level")
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--cases", type=int, default=CASES, help="of each level, dtype and kind, to record")
    arguments = parser.parse_args()
    if arguments.action == "level":
        print(json.dumps(level_checksums(arguments.cases)))
        return
    print(f"blockcell of {Path(blockcell.__file__).parent}")
    if arguments.action == "record":
        computed = all_checksums(arguments.cases)
        arguments.file.write_text(json.dumps(computed, indent=0))
        print(f"{len(computed['checksums'])} cases recorded")
        return
    recorded = json.loads(arguments.file.read_text())
    computed = all_checksums(recorded["cases"])
    compared = tuple(f" {kind}," for kind in recorded["kinds"])
    computed["checksums"] = {
        case: results for case, results in computed["checksums"].items() if any(kind in case for kind in compared)
    }
    for key in recorded:
        if key not in ("checksums", "kinds") and recorded[key] != computed[key]:
            print(f"{key} was {recorded[key]} and is {computed[key]}")
    lines = [*differences(recorded["checksums"], computed["checksums"])]
    for line in lines:
        print(line)
    print(f"{len(lines)} of {len(recorded['checksums'])} cases differ")
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
