"""Random models whose layers are replaced, beside the same models as they were, by each backend of Keras.

BLOCKCELL_KERAS_MODELS=300 pytest -s -m peers tests/keras/test_keras_backends.py draws so many by each backend.
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest
from fresh import run

pytestmark = pytest.mark.peers
ROOT = Path(__file__).resolve().parents[2]
TRIALS = ROOT / "tests" / "lib" / "keras_trials.py"
MODELS = os.environ.get("BLOCKCELL_KERAS_MODELS", "12")
MODULES = {"numpy": "scipy", "torch": "torch", "tensorflow": "tensorflow", "jax": "jax"}


def environment(backend):
    paths = os.pathsep.join([str(ROOT), str(TRIALS.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"KERAS_BACKEND": backend, "PYTHONPATH": paths, "TF_CPP_MIN_LOG_LEVEL": "3"}


@pytest.fixture(params=MODULES)
def backend(request):
    for name in ("keras", MODULES[request.param]):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    return request.param


def test_random_models(backend, tmp_path):
    """Outputs and gradients within 20 eps of their largest entry, weights within 200, losses within 1e-5.

    Where outputs or gradients differ by more, blockcell's are within 20 eps of those in double precision.  TensorFlow's
    elu is exp(z) - 1, which near 0 is off by an eps of 1.  The saved files need no blockcell.
    """
    done = run([str(TRIALS), str(tmp_path), MODELS], 120, environment(backend))
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"number"')]
    assert len(rows) == int(MODELS)
    worst = {name: max(row[name] for row in rows) for name in ("outputs", "gradients", "loss", "weights")}
    print(backend, MODELS, worst)
    assert not [row for row in rows if max(row["outputs"], row["gradients"]) > 20 and not row["blockcell"] <= 20]
    assert worst["loss"] <= 1e-5
    assert worst["weights"] <= 200
    loaded = run([str(TRIALS), str(tmp_path), "load"], 60, environment(backend))
    assert loaded.returncode == 0, loaded.stderr[-3000:]
    assert json.loads(loaded.stdout.splitlines()[-1])["loaded"] <= 20


def test_other_backends(backend):
    """The tests of test_keras_in_place.py, which know one backend in a process."""
    if backend == os.environ.get("KERAS_BACKEND", "tensorflow"):
        pytest.skip("this process tests it")
    tests = str(ROOT / "tests" / "keras" / "test_keras_in_place.py")
    done = run(["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "peers", tests], 10, environment(backend))
    assert done.returncode == 0, done.stdout[-3000:]
