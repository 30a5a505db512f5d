"""Damaged files, models and weights are refused in words, or read as what they were: `fuzz` makes and reads them.

`make test-fuzz`: 100,000 of them, and 100,000 of TensorFlow's files; takes less than ten minutes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FUZZ = Path(__file__).with_name("fuzz.py")
SEED = int(os.environ.get("BLOCKCELL_SEED", 22))
BUDGET = {
    "npz": 30_000,
    "safetensors": 30_000,
    "from_torch": 5_000,
    "from_tf1": 5_000,
    "from_keras": 5_000,
    "from_onnx": 10_000,
    "link": 7_500,
    "session": 7_500,
}
TENSORFLOW = {"tf_checkpoint": 60_000, "tf_graph": 40_000}

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems have no such limits")


def fuzzed(target: str, count: int, folder: Path) -> None:
    """In a process of its own, which a mutant may end."""
    note = folder / "number"
    command = [sys.executable, "-W", "error", str(FUZZ), target, str(SEED), str(count), str(note)]
    result = subprocess.run(command, capture_output=True, text=True)
    number = note.read_text().strip() if note.exists() else "none"
    what = f"{target}: mutant {number} of seed {SEED} ended with {result.returncode}"
    assert result.returncode == 0, f"{what}\n{result.stderr[-4000:]}"
    counts = json.loads(result.stdout)
    print(f"{target}, seed {SEED}: {count} mutants, {counts['refused']} refused, {counts['taken']} taken")
    assert counts["refused"] + counts["taken"] == count
    assert min(counts.values()) > count / 200, "hardly any of one kind: the mutants show nothing"


def test_budget():
    assert sum(BUDGET.values()) == sum(TENSORFLOW.values()) == 100_000


@pytest.mark.parametrize("target", BUDGET | TENSORFLOW)
def test_some(target, tmp_path):
    fuzzed(target, 300, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("target", BUDGET | TENSORFLOW)
def test_many(target, tmp_path):
    fuzzed(target, (BUDGET | TENSORFLOW)[target], tmp_path)
