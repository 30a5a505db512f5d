"""Two things swapped in a kernel's source must make the kernel tests fail.

`make test-mutants`: builds each mutant without optimisation in a copy of the checkout; takes some minutes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MUTANTS = {  # what is swapped: the source, and every place that changes
    "lstm i and f": ("_lstm", {"sigmoid(zi[l])": "sigmoid(zf[l])", "sigmoid(zf[l])": "sigmoid(zi[l])"}),
    "lstm i and ci": ("_lstm", {"zi[l] = z[l]": "zi[l] = z[L + l]", "tanh(z[L + l])": "tanh(z[l])"}),
    "lstm f and o": (
        "_lstm",
        {"= z[2 * L + l] + forget": "= z[3 * L + l] + forget", "zo[l] = z[3 * L": "zo[l] = z[2 * L"},
    ),
    "lstm ci and o": ("_lstm", {"tanh(z[L + l])": "tanh(z[3 * L + l])", "zo[l] = z[3 * L + l]": "zo[l] = z[L + l]"}),
    "lstm icfo and ifco": ("_lstm", {"2 if ifco else 1, 1 if ifco else 2": "1 if ifco else 2, 2 if ifco else 1"}),
    "lstm wci and wcf": (
        "_lstm",
        {"cs_state[l] * peep[l]": "cs_state[l] * peep[L + l]", "cs_state[l] * peep[L + l]": "cs_state[l] * peep[l]"},
    ),
    "lstm wcf and wco": (
        "_lstm",
        {
            "zf[l] + cs_state[l] * peep[L + l]": "zf[l] + cs_state[l] * peep[2 * L + l]",
            "zo[l] + cs_state[l] * peep[2 * L + l]": "zo[l] + cs_state[l] * peep[L + l]",
        },
    ),
    "lstm h_prev and cs_prev": (
        "_lstm",
        {"p.Hs, cs + b * p.H": "p.Hs, h + b * p.H", "p.Hs, h + b * p.H": "p.Hs, cs + b * p.H"},
    ),
    "lstm h and cs": ("_lstm", {"y[L + l] = s[l]": "y[6 * L + l] = s[l]", "y[6 * L + l] = y[3": "y[L + l] = y[3"}),
    "lstm d_i and d_f": (
        "_lstm",
        {
            "d[l] = d_cs[l] * ci": "d[2 * L + l] = d_cs[l] * ci",
            "d[2 * L + l] = d_cs[l] * cs_prev": "d[l] = d_cs[l] * cs_prev",
        },
    ),
    "lstm d_ci and d_o": (
        "_lstm",
        {"d[3 * L + l] = h_grad": "d[L + l] = h_grad", "d[L + l] = d_cs": "d[3 * L + l] = d_cs"},
    ),
    "lstm h_grad and cs_grad": (
        "_lstm",
        {
            "load_line(value, h_grad + at, n)": "load_line(value, cs_grad + at, n)",
            "load_line(value, cs_grad + at, n)": "load_line(value, h_grad + at, n)",
        },
    ),
    "lstm wci and wcf in the gradient": (
        "_lstm",
        {"d[l] * peep[l] + d[2 * L + l] * peep[L + l]": "d[l] * peep[L + l] + d[2 * L + l] * peep[l]"},
    ),
    "lstm wci_grad and wcf_grad": ("_lstm", {"out[4] + at": "out[5] + at", "out[5] + at": "out[4] + at"}),
    "gru r and u": ("_gru", {"sigmoid(z[l])": "sigmoid(z[L + l])", "sigmoid(z[L + l])": "sigmoid(z[l])"}),
    "gru c and h_prev": ("_gru", {"u[l] * (h_state[l] - c[l]) + c[l]": "u[l] * (c[l] - h_state[l]) + h_state[l]"}),
    "gru d_r and d_u": (
        "_gru",
        {
            "store_line(d + p.H + j * L, d_u": "store_line(d + j * L, d_u",
            "store_line(d + j * L, d_r": "store_line(d + p.H + j * L, d_r",
        },
    ),
    "gru r and u in the gradient": (
        "_gru",
        {
            "load_line(gate_r, saved[0]": "load_line(gate_r, saved[1]",
            "load_line(u, saved[1] + at, n)\n    load_state": "load_line(u, saved[0] + at, n)\n    load_state",
        },
    ),
}


def succeeds(folder: Path, *command: str) -> bool:
    environment = os.environ | {"BLOCKCELL_LEVELS": "base", "BLOCKCELL_LEVEL": "base", "PYTHONPATH": str(folder)}
    return subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True).returncode == 0


def build_and_test(folder: Path) -> bool:
    assert succeeds(folder, "setup.py", "build_ext", "--inplace"), "the mutant does not compile"
    return succeeds(folder, "-m", "pytest", "-q", "-x", "tests/test_kernels.py", "-k", "test_formulas and float64")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy that builds fast, and whose tests pass."""
    folder = tmp_path_factory.mktemp("mutants") / "blockcell"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".git", ".venv", "build", "*.so"))
    setup = folder / "setup.py"
    setup.write_text(setup.read_text().replace('"-O3"', '"-O1"'))
    assert build_and_test(folder)
    return folder


def swapped(what: str, source: str) -> str:
    """The mutant."""
    changes = MUTANTS[what][1]
    for k, old in enumerate(changes):  # in two steps, so that a swap does not undo itself
        assert source.count(old) == 1, old
        source = source.replace(old, f"@{k}@")
    for k, new in enumerate(changes.values()):
        source = source.replace(f"@{k}@", new)
    return source


@pytest.mark.parametrize("what", MUTANTS)
def test_places(what: str) -> None:
    """What a mutant changes is still there, each once."""
    source = (ROOT / "pyx" / f"{MUTANTS[what][0]}.pyx").read_text()
    assert swapped(what, source) != source


@pytest.mark.slow
@pytest.mark.parametrize("what", MUTANTS)
def test_mutant(what: str, checkout: Path) -> None:
    source = checkout / "pyx" / f"{MUTANTS[what][0]}.pyx"
    original = source.read_text()
    try:
        source.write_text(swapped(what, original))
        assert not build_and_test(checkout), "no test sees it"
    finally:
        source.write_text(original)
