"""Builds the page that reads handwritten digits and learns them: `make page`, or

    python examples/browser/make_page.py [FOLDER]

Needs the extras demo and onnx, and npm, which fetches onnxruntime-web once.  The folder, build/page by default, then
has all that the page needs; it works without a network.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Collection
from pathlib import Path

import numpy as np
import onnxruntime
from onnx import ModelProto, helper, numpy_helper

from blockcell import Dense, Stack
from blockcell.command import demo
from blockcell.progress import progress
from onnx_export import export, training_step

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SOURCES = ["index.html", "style.css", *(path.name for path in sorted(HERE.glob("*.js")))]
ONNXRUNTIME = "onnxruntime-web", "1.30.0"
INTEGRITY = "q0y+JrrtukXSzsBWEMccVfqX25LRmosXHF+CaRJmg8pZClzcV7svNc4rKY3jL02Vb7QmRMDs1SigqR4CXAfKYQ=="
USED = [  # of onnxruntime-web: a module and its WebAssembly, for the CPU and for WebGPU
    "ort.wasm.bundle.min.mjs",
    "ort-wasm-simd-threaded.wasm",
    "ort.webgpu.bundle.min.mjs",
    "ort-wasm-simd-threaded.asyncify.wasm",
]
ROWS = 8
SEED = 0


def fetched(name: str, version: str, integrity: str | None = None) -> Path:
    """A package of npm as build/npm has it, where npm puts it if need be; with the SHA-512 that is expected of it."""
    folder = ROOT / "build" / "npm"
    archive = folder / f"{name.replace('@', '').replace('/', '-')}-{version}.tgz"
    if not archive.exists():
        folder.mkdir(parents=True, exist_ok=True)
        if shutil.which("npm") is None:
            sys.exit(f"npm, which fetches {name}, is missing; on Debian and Ubuntu: apt-get install npm")
        command = ["npm", "pack", "--silent", "--pack-destination", str(folder), f"{name}@{version}"]
        if subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
            sys.exit(f"npm could not fetch {name} {version}")
    found = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    if integrity not in (None, found):
        sys.exit(f"{archive} is another file than expected: its SHA-512 is {found}; delete it to fetch it again")
    return archive


def unpack(archive: Path, members: Collection[str], folder: Path) -> None:
    """Put these files of a package into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as package:
        for member in members:
            with package.extractfile(f"package/{member}") as source:  # type: ignore[union-attr]
                (folder / Path(member).name).write_bytes(source.read())


def copy_onnxruntime(folder: Path) -> None:
    """The files of onnxruntime-web, and its licence, which is not in that package but in the one for Python."""
    unpack(fetched(*ONNXRUNTIME, INTEGRITY), [f"dist/{name}" for name in USED], folder)
    for name in ("LICENSE", "ThirdPartyNotices.txt"):
        shutil.copy(Path(onnxruntime.__file__).parent / name, folder / name)


def reader(net: Stack, free: Collection[str]) -> ModelProto:
    """A model of the net with these weights as inputs, since they change."""
    model = export(net, None, provider="webgpu", loop="unroll", sizes={"T": ROWS}, lengths=False, state=False)
    for weight in [each for each in model.graph.initializer if each.name in free]:
        array = numpy_helper.to_array(weight)
        model.graph.input.append(helper.make_tensor_value_info(weight.name, weight.data_type, array.shape))
        model.graph.initializer.remove(weight)
    return model


def write_models(folder: Path, net: Stack) -> None:
    """What reads a digit, giving probabilities after each row, and what learns from digits.

    Both have the steps written out, the form for WebGPU, which WebAssembly also runs."""
    lstm, head = net.layers
    belief = Stack([lstm, Dense(head.weights["w"], head.weights["b"], "softmax")])
    (folder / "read.onnx").write_bytes(reader(belief, net.weights.keys()).SerializeToString())
    options = {"loss": "softmax_cross_entropy", "optimizer": "adam", "max_norm": demo.MAX_NORM}
    training_step(net, folder / "learn.onnx", **options, provider="webgpu", sizes={"T": ROWS}, lengths=False)


def as_text(digits: demo.Digits) -> dict[str, str]:
    """For each pixel of each digit, row by row, one of 0 to 9 and a to g, for 0 to 16; and the labels."""
    pixels = np.rint(16 * digits.x).astype(int).swapaxes(0, 1)
    return {"pixels": "".join("0123456789abcdefg"[k] for k in pixels.flat), "labels": "".join(map(str, digits.labels))}


def build(folder: Path) -> None:
    """Write the page, with the LSTM that `blockcell demo` trains."""
    folder.mkdir(parents=True, exist_ok=True)
    digits, held_out = demo.load()
    network = demo.new_networks(SEED)[1]
    network.net.save(folder / "untrained.safetensors")
    with progress() as tell:
        demo.train(network, digits, held_out, np.random.default_rng(SEED), tell)
    network.net.save(folder / "trained.safetensors")
    write_models(folder, network.net)
    (folder / "digits.json").write_text(json.dumps({"practice": as_text(digits), "held_out": as_text(held_out)}))
    for name in SOURCES:
        shutil.copy(HERE / name, folder / name)
    copy_onnxruntime(folder / "onnxruntime")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "build" / "page")
    folder = parser.parse_args().folder
    build(folder)
    print(f"The page is in {folder}. To open it:\n\n    python -m http.server --directory {folder} 8000\n")
    print("and then http://localhost:8000 in a browser.")


if __name__ == "__main__":
    main()
