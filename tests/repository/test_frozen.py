"""A program that PyInstaller freezes runs by the hook in the package, without options.

`pytest -m frozen`, with PyInstaller in .venv (the extra frozen).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.frozen
ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import hashlib
import numpy as np
import blockcell
from blockcell import GRU, LSTM, RNN, Bidirectional, Dense, Scorer, Stack, loss, optim

def show(name, *arrays):
    print(name, hashlib.sha256(b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)).hexdigest())

x = np.linspace(-1, 1, 7 * 2 * 3, dtype=np.float32).reshape(7, 2, 3)
both = Bidirectional(GRU.init(4, 5, seed=1), GRU.init(4, 5, seed=2, reset_after=True))
lstm = LSTM.init(3, 4, seed=0)
layer = Stack([lstm, both, RNN.init(10, 4, seed=3), Dense.init(4, 2, seed=4)])
y, _, tape = layer.forward(x)
value, d_y = loss.mean_squared_error(y, np.zeros_like(y))
weights, _ = optim.sgd(layer.weights, layer.backward(tape, d_y)[2], learning_rate=0.1)
show("trained", *weights.values())
show("quantized", layer.quantize("int8")(x)[0])
show("scored", *Scorer(lstm)([x[:, 0], x[:3, 1]]))
stream = lstm.stream(2)
show("streamed", *[stream.step(step) for step in x])
show("converted", *blockcell.convert.to_torch(lstm).values())
print(blockcell.build_info()["levels"])
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the package and its entry points, as pip installs them, and the modules compiled here."""
    pytest.importorskip("PyInstaller")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", folder, "dist_info", "--output-dir", folder]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    for file in (ROOT / "blockcell").glob("*.so"):
        shutil.copy(file, folder / "blockcell")
    return folder


def freeze(site: Path, folder: Path, program: str) -> subprocess.CompletedProcess[str]:
    """Freeze a program in a folder, and run it."""
    (folder / "program.py").write_text(program)
    environment = os.environ | {"PYTHONPATH": str(site), "PYINSTALLER_CONFIG_DIR": str(folder / "cache")}
    command = [sys.executable, "-m", "PyInstaller", "--noconfirm", "--log-level", "ERROR", "program.py"]
    frozen = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert frozen.returncode == 0, frozen.stderr
    del environment["PYTHONPATH"]
    return subprocess.run(
        [folder / "dist" / "program" / "program"], cwd=folder, env=environment, capture_output=True, text=True
    )


def test_program_runs(site, tmp_path):
    environment = os.environ | {"PYTHONPATH": str(site)}
    expected = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert expected.returncode == 0, expected.stderr
    result = freeze(site, tmp_path, PROGRAM)
    assert result.returncode == 0, result.stderr
    assert result.stdout == expected.stdout and len(result.stdout.splitlines()) == 6
    assert not [*tmp_path.rglob("libtorch*")]  # which would be hundreds of megabytes


def test_program_without_the_hook(site, tmp_path):
    """As from a checkout on PYTHONPATH: the program says what to do."""
    shutil.copytree(site / "blockcell", tmp_path / "blockcell")
    result = freeze(tmp_path, tmp_path, "import blockcell")
    assert result.returncode != 0
    assert "this program was frozen without the compiled modules of blockcell" in result.stderr
    assert "--collect-submodules blockcell" in result.stderr
