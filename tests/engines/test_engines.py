"""The programs of docs/scoring.md on local clusters of two workers: the bits of one process, each sequence once, also
when a worker is killed in the middle."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from bits import same
from fresh import script

from blockcell import Scorer

parquet = pytest.importorskip("pyarrow.parquet")
pytestmark = pytest.mark.engines

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "scoring.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
ENGINES = {"Ray": "ray", "Dask": "dask.bag", "Spark": "pyspark.sql"}
WITH = 'Scorer("model.npz")'
KEEP = """
if __name__ == "__main__":
    import numpy
    score = numpy.array([row["score"] for row in rows], numpy.float32)
    numpy.savez("found.npz", id=[row["id"] for row in rows], score=score)
"""


def program(module: str) -> str:
    """The block that imports it."""
    [found] = [code for code in BLOCKS if re.search(rf"^(import|from) {re.escape(module)}\b", code, re.MULTILINE)]
    return found


def run(code: str, folder: Path) -> str:
    (folder / "program.py").write_text(code)
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "lib")])
    quiet = {"RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    environment = {"PYTHONPATH": paths, "PYSPARK_PYTHON": sys.executable, **quiet}
    done = script(folder / "program.py", minutes=5, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where a model and sequences are."""
    monkeypatch.chdir(tmp_path)
    [data] = [code for code in BLOCKS if "write_table" in code]
    run(data, tmp_path)
    return tmp_path


BAG = """
import dask.bag
import numpy as np
from blockcell import Scorer
from dask.distributed import Client

if __name__ == "__main__":
    client = Client(n_workers=2, threads_per_worker=1)
    bag = dask.bag.from_sequence(range(1, 100), npartitions=4).map(lambda t: np.full((t, 8), t, np.float32))
    scores = bag.map_partitions(list).map_partitions(Scorer("model.npz")).compute()
    np.save("found.npy", scores)
    client.close()
"""


def test_a_bag_of_sequences(folder):
    assert ".map_partitions(list).map_partitions(scorer)`" in PAGE
    run(BAG, folder)
    expected = Scorer(folder / "model.npz")([np.full((t, 8), t, np.float32) for t in range(1, 100)])
    assert same(np.load(folder / "found.npy"), np.array(expected))


@pytest.mark.parametrize("killed", [False, True], ids=["as it is", "a worker is killed"])
@pytest.mark.parametrize("engine", ENGINES)
def test_engine(engine, killed, folder):
    code = program(ENGINES[engine])
    if killed:
        assert code.count(WITH) == 1
        function = f'partial(last_or_die, "{folder / "killed"}")'
        code = code.replace(WITH, WITH[:-1] + f", output={function})")
        code = f"from functools import partial\nfrom scoring import last_or_die\n{code}"
    said = re.findall(r"# prints (.*)", code)
    assert said and {*said} <= {*run(code + KEEP, folder).splitlines()}
    assert (folder / "killed").exists() == killed
    with np.load(folder / "found.npz") as found:
        order = np.argsort(found["id"])
        numbers, scores = found["id"][order], found["score"][order]
    table = parquet.read_table(folder / "sequences")
    assert numbers.tolist() == sorted(table["id"].to_pylist()) == list(range(2000))  # none is lost, none comes twice
    expected = np.array(Scorer(folder / "model.npz")(table["x"]))[np.argsort(table["id"].to_numpy())]
    assert same(scores, expected)
