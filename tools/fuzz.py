"""Damage files, models and weights, and give them to their readers: ``python tools/fuzz.py TARGET SEED COUNT [FILE]``.

A reader refuses a mutant, by a ValueError or TypeError with a message, or takes it; what `blockcell.load` takes must be
what was saved, bit for bit. Anything else, more than 256 MB of memory or 30 s for one mutant ends the process; those of
TensorFlow's and Keras' files may take 64 MB and 2 s of the CPU's time. A mutant follows from the seed and its number,
which is written to FILE before the mutant is read; a COUNT of 12:13 is the mutant 12 alone. The program prints how many
were refused and taken, and what the greediest took: seconds of the CPU's time, and MB of address space that none before
had.

Run by tests/reliability/test_fuzz.py, in children, so by `make test` and by CI on every push, longer by `make test-all`
and weekly. A hundred mutants of a target, of TARGETS or MODULES, take seconds, of tf_rewired half a minute; all of
test_fuzz.py's take a quarter of an hour.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import resource
import signal
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from mutations import Generator, change_array, change_bytes, change_json, draw_value, fuzz_reader, pick

from blockcell import GRU, LSTM, RNN, Bidirectional, Dense, Stack, convert, files
from blockcell.layers.loading import read_any
from blockcell.optable import SCHEMES

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "lib"))  # what the other files of fuzzers import
MEMORY, SECONDS = 2**28, 30
SMALL_MEMORY, CPU_SECONDS = 2**26, 2
MODULES = {
    "fuzz_onnx": ("from_onnx", "link", "session"),
    "fuzz_keras": ("keras_files",),
    "fuzz_tensorflow": ("tf_checkpoint", "tf_graph", "tf_cells", "tf_names", "tf_rewired"),
}
SMALL = MODULES["fuzz_keras"] + MODULES["fuzz_tensorflow"]  # which may take no more


# --------------------------------------------------------------------------------------------------------------- files
def make_layers() -> list[Any]:
    """Return layers of every kind, to be saved."""
    return [
        LSTM.init(2, 3, seed=0, use_peephole=True, forget_bias=0.3, cell_clip=2.5, gate_order="ifco"),
        LSTM.init(2, 3, seed=0, use_peephole=True, proj_size=2, proj_clip=0.5, coupled=True),
        GRU.init(2, 2, seed=1, dtype=np.float64),
        Stack([RNN.init(2, 3, seed=0, activation=("leaky_relu", 0.01)),
               LSTM.init(3, 2, seed=1, activation="relu", recurrent_activation=("hard_sigmoid", 0.2, 0.5))]),
        Stack([Bidirectional(LSTM.init(1, 2, seed=2, dtype=np.float16), GRU.init(1, 2, seed=3, dtype=np.float16)),
               GRU.init(4, 1, seed=4, dtype=np.float16)]),
        Stack([Dense.init(2, 3, seed=5), GRU.init(3, 2, seed=6),
               Dense.init(2, 1, seed=7, activation="relu", last=True)]),
    ]  # fmt: skip


def change_npz(g: Generator, content: bytes) -> bytes:
    """Change arrays, names, metadata or bytes in a zip whose own checksums are right, so that the reader must tell."""
    with np.load(io.BytesIO(content)) as archive:
        arrays = dict(archive)
    name = pick(g, [*arrays])
    kind = g.integers(4)
    if kind == 0 and name != files.KEY:
        arrays[name] = change_array(g, arrays[name])
    elif kind == 1:
        arrays[repr(draw_value(g))] = arrays.pop(name)
    elif kind == 2:
        arrays[files.KEY] = np.array(change_json(g, json.loads(str(arrays[files.KEY]))))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED if g.integers(10) == 0 else zipfile.ZIP_STORED) as archive:
        for key, array in arrays.items():
            inner = io.BytesIO()
            np.save(inner, array)
            is_changed = kind == 3 and key == name
            archive.writestr(f"{key}.npy", change_bytes(g, inner.getvalue()) if is_changed else inner.getvalue())
    return buffer.getvalue()


def change_safetensors(g: Generator, content: bytes) -> bytes:
    """Change the header of a file of safetensors, or the JSON of blockcell in it."""
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    if g.integers(2):
        text = header["__metadata__"]["blockcell"]
        header["__metadata__"]["blockcell"] = change_json(g, json.loads(text))
        header_text = json.dumps(header)
    else:
        header_text = change_json(g, header)
    encoded = header_text.encode("utf-8", "replace")
    return len(encoded).to_bytes(8, "little") + encoded + data


def fuzz_files(suffix: str, change_structure: Callable[[Generator, bytes], bytes]) -> Callable[[Generator], bool]:
    """Return a fuzzer of files of layers with this suffix; what is read must be what was saved."""
    folder = Path(tempfile.mkdtemp())
    originals, contents = [], []
    for layer in make_layers():
        for scheme in (None, *SCHEMES) if layer.dtype == np.float32 else (None,):
            originals.append(layer.quantize(scheme) if scheme else layer)
            originals[-1].save(folder / f"original{suffix}")
            contents.append((folder / f"original{suffix}").read_bytes())
    path = folder / f"mutant{suffix}"

    def try_mutant(g: Generator) -> bool:
        """Read a changed file, and return whether it was accepted."""
        k = g.integers(len(contents))
        change = change_bytes if g.integers(2) else change_structure
        path.write_bytes(change(g, contents[k]))
        file = io.BytesIO(path.read_bytes())
        file.name = path.name
        try:
            layer_read = read_any(path if g.integers(2) else file)
        except ValueError as error:
            assert f"mutant{suffix} cannot be read as a layer of blockcell: " in str(error), error
            return False
        finally:
            path.unlink()
        assert repr(layer_read) == repr(originals[k]), layer_read
        arrays = layer_read._arrays_of_file()
        for name, array in originals[k]._arrays_of_file().items():
            assert arrays[name].dtype == array.dtype and arrays[name].tobytes() == array.tobytes(), name
        return True

    return try_mutant


# ------------------------------------------------------------------------------------------------------------- weights
def change_weights(g: Generator, weights: dict[str, Any]) -> dict[Any, Any]:
    """Change one to three weights of a dict: their names, their values, or whether they are there."""
    new_weights: dict[Any, Any] = dict(weights)
    for _ in range(g.integers(1, 4)):
        name = pick(g, [*new_weights])
        match g.integers(6):
            case 0:
                del new_weights[name]
            case 1:
                new_weights[[name[:-1], f"{name}_reverse", f"{name}_l1", name.replace("0", "7"), f"a/{name}", 3][
                    g.integers(6)]] = new_weights.pop(name)  # fmt: skip
            case 2:
                new_weights[name] = draw_value(g)
            case 3:
                new_weights[f"x.{name}"] = new_weights[name]
            case _:
                value = new_weights[name]
                new_weights[name] = change_array(g, np.asarray(value)) if np.ndim(value) else draw_value(g)
        new_weights = new_weights or dict(weights)
        new_weights = {str(key) if key != 3 else key: value for key, value in new_weights.items()}
        if 3 in new_weights:
            break
    return new_weights


def fuzz_weights(read: Callable[[Any], Any], sources: list[dict[str, Any]]) -> Callable[[Generator], bool]:
    """Return a fuzzer that gives changed weights to a function that reads them."""
    return fuzz_reader(read, lambda g: change_weights(g, pick(g, sources)))


def fuzz_torch() -> Callable[[Generator], bool]:
    """Return a fuzzer of PyTorch's weights."""
    lstm = [LSTM.init(2, 2, seed=k) for k in range(4)]
    gru = GRU.init(2, 2, seed=0, reset_after=True)
    stack = Stack([Bidirectional(*lstm[:2]), Bidirectional(LSTM.init(4, 2, seed=4), LSTM.init(4, 2, seed=5))])
    projected = Stack([LSTM.init(2, 3, seed=6, proj_size=2), LSTM.init(2, 3, seed=7, proj_size=2)])
    other_layers = [stack, gru, projected, Bidirectional(RNN.init(2, 2, seed=0), RNN.init(2, 2, seed=1))]
    h0 = {name: np.ones((1, 1, 2), np.float32) for name in ("h0", "c0")}
    sources = [convert.to_torch(lstm[2], prefix="a."), *map(convert.to_torch, other_layers)]
    sources.append(convert.to_torch(lstm[3]) | h0)

    def read(source: Any) -> Any:
        """Read weights, with first states if they have any."""
        return convert.from_torch(source, initial_state=("h0", "c0") if "h0" in source else None, check=False)

    return fuzz_weights(read, sources)


def fuzz_tf1() -> Callable[[Generator], bool]:
    """Return a fuzzer of TensorFlow 1's variables."""
    lstm, gru = LSTM.init(2, 3, seed=0, use_peephole=True).weights, GRU.init(2, 3, seed=0).weights
    names = {"w": "kernel", "b": "bias", "wci": "w_i_diag", "wcf": "w_f_diag", "wco": "w_o_diag"}
    sources = [
        {f"rnn/lstm_cell/{names[name]}": array for name, array in lstm.items()},
        {f"rnn/gru_cell/{name}": array for name, array in gru.items()},
    ]

    def read(variables: Any) -> Any:
        """Read variables, with the argument that an LSTM needs."""
        is_lstm = any("lstm" in str(name) for name in variables)
        return convert.from_tf1(variables, **{"forget_bias": 1.0} if is_lstm else {})

    return fuzz_weights(read, sources)


def fuzz_keras_weights() -> Callable[[Generator], bool]:
    """Return a fuzzer of Keras' lists of arrays."""
    recurrent_layers = [Bidirectional(LSTM.init(2, 3, seed=0), LSTM.init(2, 3, seed=1))]
    recurrent_layers += [GRU.init(2, 3, seed=0, reset_after=reset_after) for reset_after in (False, True)]
    recurrent_layers += [RNN.init(2, 3, seed=0), Bidirectional(RNN.init(2, 3, seed=0), RNN.init(2, 3, seed=1))]
    stack = Stack([recurrent_layers[0], LSTM.init(6, 4, seed=0), Dense.init(4, 2, seed=0), Dense.init(2, 3, seed=0)])
    lists = [*map(convert.to_keras, recurrent_layers), [array for part in convert.to_keras(stack) for array in part]]
    sources = [{str(k): array for k, array in enumerate(arrays)} for arrays in lists]
    return fuzz_weights(lambda arrays: convert.from_keras([*arrays.values()], check=False), sources)


# ------------------------------------------------------------------------------------------------------------- running
TARGETS: dict[str, Callable[[], Callable[[Generator], bool]]] = {
    "npz": lambda: fuzz_files(".npz", change_npz),
    "safetensors": lambda: fuzz_files(".safetensors", change_safetensors),
    "from_torch": fuzz_torch,
    "from_tf1": fuzz_tf1,
    "from_keras": fuzz_keras_weights,
}


def make_fuzzer(target: str) -> Callable[[Generator], bool]:
    """Return the fuzzer of a target, from the module that has it: each needs other packages."""
    modules = [module for module, targets in MODULES.items() if target in targets]
    targets = importlib.import_module(modules[0]).TARGETS if modules else TARGETS
    return targets[target]()  # type: ignore[no-any-return]


def run(target: str, seed: int, numbers: range, note: int | None) -> dict[str, float]:
    """Try the mutants of these numbers, within limits of time and memory; return counts, and what the greediest took.

    The number of each mutant is written to the open file `note` before it is read."""
    try_mutant, counts, seconds = make_fuzzer(target), Counter[str](), 0.0
    np.seterr(all="ignore")  # numbers may be any
    try_mutant(np.random.default_rng(seed))  # whatever is loaded once
    with open("/proc/self/statm") as file:
        memory_before = int(file.read().split()[0]) * resource.getpagesize()
    is_small = target in SMALL
    limit = memory_before + (SMALL_MEMORY if is_small else MEMORY)
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    for number in numbers:
        if note is not None:
            os.pwrite(note, f"{number:10}".encode(), 0)
        signal.setitimer(signal.ITIMER_REAL, 10 * SECONDS if is_small else SECONDS)
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS if is_small else 0)
        start = time.process_time()
        try:
            counts["taken" if try_mutant(np.random.default_rng([seed, number])) else "refused"] += 1
        except BaseException:
            print(f"{target}: mutant {number} of seed {seed}", file=sys.stderr)
            raise
        seconds = max(seconds, time.process_time() - start)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.setitimer(signal.ITIMER_PROF, 0)
    status = Path("/proc/self/status").read_text()
    peak = int(status.split("VmPeak:")[1].split()[0]) * 1024
    megabytes = (peak - memory_before) / 2**20
    return {"refused": counts["refused"], "taken": counts["taken"], "seconds": seconds, "mb": megabytes}


if __name__ == "__main__":
    target, seed, count, *path = sys.argv[1:]
    note = os.open(path[0], os.O_WRONLY | os.O_CREAT) if path else None
    first, _, end = count.rpartition(":")  # "12:13" is the mutant 12 alone
    with tempfile.TemporaryDirectory() as tempfile.tempdir:  # where fuzzers make their folders
        print(json.dumps(run(target, int(seed), range(int(first or 0), int(end)), note)))
