"""Run calls that take every region of a workspace, where AddressSanitizer watches these.

    python tools/workspaces.py draw SEED 0:N    N drawn calls of each kind; K:K+1 repeats the calls that case K names
    python tools/workspaces.py PLAN             calls with one kind of plan, of PLANS
    python tools/workspaces.py regions          print as JSON the regions that each PLAN has

Every kind of layer, quantized or not, stream, op, backward pass and PyTorch operator runs on 2 to 64 threads, and must
have the bits that one thread alone gives.  Most grids are those of the least cost, on machines with caches of any
size; the others are drawn.  BLOCKCELL_LEVEL says at which CPU level.

Run by `sanitizers.py memory`, and by hand; checksums.py draws the same calls.  A PLAN takes a second, one drawn call of
each kind a few seconds.
"""

# ruff: noqa: E741 (I is the number of inputs, as everywhere)
from __future__ import annotations

import copy
import importlib.util
import itertools
import json
import os
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "lib"))

import numpy as np
import torch_layout
from bits import CACHES, leaves, like, on_threads, same, with_machine
from cases import arguments
from kernel_cases import DTYPES, run, sizes_of
from layer_cases import LAYERS, can_stream, draw, run_all

import blockcell
from blockcell import LSTM, Dense, _team, activations
from blockcell._kernels import bind
from blockcell.optable import OPS

SCHEMES = ["float16", "int8"]
MAX_OPERATIONS = 4 * 10**7  # T * B * H * (I + H), at most
ACTIVATIONS = [name for name in activations.PARAMETERS if name != "exponential"]  # which soon gives NaNs of any sign
Generator = np.random.Generator
Call = Callable[[], list[np.ndarray]]
comparisons: Counter[str] = Counter()


# ------------------------------------------------------------------------------------------------------------- drawing
def draw_sizes(g: Generator) -> tuple[int, int, int, int]:
    """Draw T, B, I and H, for which plans take many forms of grids."""
    while True:
        T, B = int(g.choice([1, 1, 2, 3, g.integers(4, 20)])), int(g.choice([1, 2, 16, 40, 130, g.integers(3, 130)]))
        I, H = int(g.choice([1, 5, 64, g.integers(1, 200)])), int(g.choice([16, 70, 130, 256, 300, 513]))
        if T * B * H * (I + H) <= MAX_OPERATIONS:
            return T, B, I, H


def draw_machine(g: Generator) -> tuple[dict[str, Any], int]:
    """Draw the caches and perhaps the grid that plans are made for, and the number of threads."""
    threads = int(g.choice([2, 3, 4, 8, 16, 64, g.integers(2, 65)]))
    caches = CACHES[g.integers(len(CACHES))] if g.random() < 0.3 else 2 ** g.integers((10, 12, 14), (17, 22, 26))
    machine: dict[str, Any] = {"caches": tuple(map(int, caches))}
    if g.random() < 0.3:
        machine |= {"groups": int(g.integers(1, 17)), "members": int(g.integers(1, 17))}
    return machine, threads


def run_on_machine(call: Call, machine: dict[str, Any], threads: int) -> list[np.ndarray]:
    """Return the results of a call on a machine that was drawn."""
    with on_threads(threads), with_machine(**machine):
        _team.set(threads, threads)  # on which a grid of more threads makes do with fewer groups or members
        return call()


# --------------------------------------------------------------------------------------------------------------- calls
def op_call(g: Generator, name: str, sizes: tuple[int, ...], dtype: str) -> Call:
    """Return a call of an op, with any activation if it takes one."""
    activation = ACTIVATIONS[g.integers(len(ACTIVATIONS))]
    args = arguments(name, sizes_of(*sizes), dtype=DTYPES[dtype], activation=activation)
    return lambda: list(run(name, args, call=bind(OPS[name]).run))


def layer_call(g: Generator, name: str, sizes: tuple[int, ...], dtype: str) -> Call:
    """Return a call of inference, forward and backward pass, of rows that end or start anew or do neither."""
    T, B, I, H = sizes
    layer = LAYERS[name](I, H, DTYPES[dtype])
    x, state, lengths, reset = draw(layer, T, B)
    rows = {"lengths": lengths, "reset": reset}
    starts = {"reset_state": like(state, lambda a: np.broadcast_to(a, (T, *a.shape)))} if can_stream(layer) else {}
    options: dict[str, Any] = [{}, {"lengths": lengths}, rows, rows | starts][g.integers(4)]

    def call() -> list[np.ndarray]:
        """Run a copy of the layer, and return all arrays."""
        layer_copy = copy.copy(layer)  # has no plan yet
        return [layer_copy(x, state, **options)[0], *itertools.chain(*run_all(layer_copy, x, state, **options))]

    return call


def quantized_call(g: Generator, name: str, sizes: tuple[int, ...], scheme: str) -> Call:
    """Return a call of a quantized layer, of rows that may end."""
    T, B, I, H = sizes
    layer = LAYERS[name](I, H, np.float32)
    x, state, lengths, _ = draw(layer, T, B)
    options = [{}, {"lengths": lengths}][g.integers(2)]

    def call() -> list[np.ndarray]:
        """Quantize and call the layer, and return all arrays."""
        y, last = layer.quantize(scheme)(x, state, **options)
        return [y, *leaves(last)]

    return call


def stream_call(g: Generator, name: str, sizes: tuple[int, ...], storage: tuple[str, str | None]) -> Call:
    """Return a call of steps and runs of a stream, of all rows and of some; the layer may be quantized."""
    (T, B, I, H), (dtype, scheme) = sizes, storage
    layer = LAYERS[name](I, H, DTYPES[dtype])
    streaming_layer = layer.quantize(scheme) if scheme else layer
    x, rows = draw(layer, T, B)[0], np.flatnonzero(g.random(B) < 0.5)
    lengths = g.integers(0, T + 1, len(rows))

    def call() -> list[np.ndarray]:
        """Run a new stream, and return outputs and states."""
        stream = streaming_layer.stream(B)
        outputs = [stream.step(x[0]), stream.run(x), stream.step(x[0, rows], rows=rows)]
        return [*outputs, stream.run(x[:, rows], rows=rows, lengths=lengths), *leaves(stream.state)]

    return call


def layout_call(g: Generator, kind: str, sizes: tuple[int, ...], dtype: str) -> Call:
    """Return a call of the kernels of PyTorch's operators on arrays, forward and back, in one direction."""
    T, B, I, H = sizes
    projection = int(g.integers(1, H)) if kind == "lstm" and H > 1 and g.random() < 0.4 else 0
    P, array_dtype = projection or H, np.dtype(DTYPES[dtype])
    weights, _ = torch_layout.weights_of(g, kind, I, H, array_dtype, projection=projection)
    widths = (P, H)[: len(torch_layout.STATES[kind])]
    x, d_y, *states = (
        g.standard_normal(shape).astype(array_dtype)
        for shape in [(T, B, I), (T, B, P), *[(1, B, width) for width in widths * 2]]
    )
    first, d_last = states[: len(widths)], states[len(widths) :]
    matrices = weights[:2] + weights[4:]

    def call() -> list[np.ndarray]:
        """Run the kernels forward and back, and return all arrays."""
        call_arguments = kind, (T, B, I, H), blockcell.get_num_threads()
        tape = np.zeros((1, torch_layout.SAVED[kind], T, B, H), array_dtype)
        outputs = [np.zeros_like(d_y), *map(np.zeros_like, first), tape]
        torch_layout.forward(*call_arguments, x, weights, first, None, outputs, projection=projection)
        grads = [np.zeros_like(x), *map(np.zeros_like, weights), *map(np.zeros_like, first)]
        incoming = [d_y, *d_last]
        torch_layout.backward(
            *call_arguments, outputs[0], tape, matrices, incoming, x, first, None, True, grads, projection=projection
        )
        return outputs + grads

    return call


def torch_call(g: Generator, kind: str, sizes: tuple[int, ...], dtype: str) -> Call:
    """Return a call of a PyTorch module of two layers, in one or both directions, or of a single step."""
    import torch

    import blockcell.torch

    T, B, I, H = sizes
    torch.manual_seed(0)
    is_cell = g.random() < 0.2
    if is_cell:
        module: Any = getattr(blockcell.torch, f"{kind}Cell")(I, H)
        x = torch.from_numpy(g.standard_normal((B, I)).astype(np.float32))
    else:
        module = getattr(blockcell.torch, kind)(I, H, num_layers=2, bidirectional=bool(g.random() < 0.5))
        x = torch.from_numpy(g.standard_normal((T, B, I)).astype(np.float32))

    def call() -> list[np.ndarray]:
        """Run the module with gradients and without, and return all arrays."""
        torch.set_num_threads(blockcell.get_num_threads())
        leaf_x = x.clone().requires_grad_()
        module.zero_grad()
        result = module(leaf_x)
        y = result if is_cell and kind != "LSTM" else result[0]
        y.square().sum().backward()
        with torch.no_grad():
            inference_y = module(x)
        inference_y = inference_y if is_cell and kind != "LSTM" else inference_y[0]
        arrays = [y.detach(), inference_y, leaf_x.grad, *[parameter.grad for parameter in module.parameters()]]
        return [array.numpy().copy() for array in arrays]

    return call


STORAGE = [*((dtype, None) for dtype in DTYPES), *(("float32", scheme) for scheme in SCHEMES)]
KINDS: dict[str, tuple[Callable[..., Callable[[], list[np.ndarray]]], Collection[str], Sequence[Any]]] = {
    "ops": (op_call, OPS, [*DTYPES]),
    "layers": (layer_call, LAYERS, [*DTYPES]),
    "quantized": (quantized_call, LAYERS, SCHEMES),
    "streams": (stream_call, [name for name in LAYERS if can_stream(LAYERS[name](1, 1, np.float32))], STORAGE),
    "PyTorch's layout": (layout_call, torch_layout.GATES, [*DTYPES]),
    "PyTorch": (torch_call, ["LSTM", "GRU", "RNN"], ["float32"]),
}
"""What makes calls of a kind, of what, and how numbers are stored."""


def draw_calls(seed: int, number: int, kinds: Collection[str]) -> Iterator[tuple[str, Call, dict[str, Any], int]]:
    """Yield a call of each op or layer of these kinds: what was drawn, what runs it, a machine, a number of threads.

    A call follows from the seed, the number, and what is called."""
    for kind in kinds:
        make_call, names, storages = KINDS[kind]
        for name in names:
            g = np.random.default_rng([seed, number, zlib.crc32(f"{kind} {name}".encode())])
            case = name, draw_sizes(g), storages[g.integers(len(storages))]
            yield f"{kind}: {case}", make_call(g, *case), *draw_machine(g)


def check_drawn_calls(seed: int, numbers: range) -> None:
    """Check the drawn calls that have these numbers, and print each before, as it may end the process."""
    kinds = [kind for kind in KINDS if kind != "PyTorch" or importlib.util.find_spec("torch")]
    for number in numbers:
        for case, call, machine, threads in draw_calls(seed, number, kinds):
            os.write(2, f"draw {seed} {number}:{number + 1}, {case} {machine} on {threads} threads\n".encode())
            with on_threads(1), with_machine(groups=1, members=1):
                expected = call()
            if not same(run_on_machine(call, machine, threads), expected):
                sys.exit("not the bits of one thread")
            comparisons[case.partition(":")[0]] += 1


# --------------------------------------------------------------------------------------------------- one kind of plan
def run_op(name: str, dtype: str) -> None:
    """Run an op once."""
    args = arguments(name, sizes_of(3, 30, 64, 128), dtype=DTYPES[dtype])
    run(name, args, call=bind(OPS[name]).run)


def run_layer(layer: Any, B: int = 30, scheme: str | None = None) -> None:
    """Call a layer, quantized or not, once; one row ends early."""
    layer = layer.quantize(scheme) if scheme else layer
    x, state, _, _ = draw(layer, 3, B)
    layer(x, state, lengths=[2] + (B - 1) * [3])


def run_backward(layer: Any) -> None:
    """Run a backward pass; no region of the forward pass before is short."""
    short_region = os.environ.pop("SHORT_REGION", None)
    x, state, _, _ = draw(layer, 3, 30)
    y, last, tape = layer.forward(x, state, lengths=[2] + 29 * [3])
    if short_region is not None:
        os.environ["SHORT_REGION"] = short_region
    layer.backward(tape, y, last)


PLANS: dict[str, tuple[Callable[[], None], list[str]]] = {  # what makes calls, and the regions that these use
    "op": (lambda: run_op("BlockLSTM", "float32"), ["weights", "h", "h of odd steps", "cs", "x", "z"]),
    "cell grad": (lambda: run_op("LSTMBlockCellGrad", "float16"), ["peepholes", "d"]),
    "layer": (lambda: run_layer(LAYERS["lstm"](64, 128, np.float32)), ["h", "h of odd steps", "cs", "x", "z", "slots"]),
    "gru": (lambda: run_layer(LAYERS["gru"](64, 128, np.float32)), ["h", "h_prev * r", "u", "x", "z", "slots"]),
    "integers": (
        lambda: run_layer(LSTM.init(40, 300, seed=0, proj_size=300), 30, "int8"),
        ["h", "cs", "m", "x", "codes of h", "codes of m", "z", "slots"],
    ),
    "backward": (
        lambda: run_backward(LAYERS["lstm"](64, 128, np.float32)),
        ["w.T", "d_h", "d_cs", "peepholes", "d", "tiles of x", "tiles of h", "sums of d", "panels", "slots"],
    ),
    "dense": (
        lambda: run_layer(Dense.init(40, 130, seed=0, activation="softmax", dtype=np.float16), 130),
        ["x", "z", "row numbers"],
    ),
    "dense backward": (
        lambda: run_backward(Dense.init(40, 130, seed=0, activation="softmax", dtype=np.float16)),
        ["w.T", "w_grad", "d_z", "sums of d_z", "slots", "y", "tiles of x", "panel of d_z"],
    ),
}


if __name__ == "__main__":
    start = time.perf_counter()
    _team.adapt(False)  # as many threads as are asked for, also where the machine is busy
    if sys.argv[1] == "draw":
        check_drawn_calls(int(sys.argv[2]), range(*map(int, sys.argv[3].split(":"))))
        counts = ", ".join(f"{count} of {kind}" for kind, count in comparisons.items())
        level, seconds = blockcell.build_info()["level"], time.perf_counter() - start
        print(f"drawn calls at level {level}, seed {sys.argv[2]}: {counts}; {seconds:.0f} s")
    elif sys.argv[1] == "regions":
        print(json.dumps({plan: regions for plan, (_, regions) in PLANS.items()}))
    else:
        with on_threads(1), with_machine(groups=1, members=1):  # so that who passes a region comes to its zone
            PLANS[sys.argv[1]][0]()
