"""Which runtime runs which op, and which training step, in which form: the tables in docs/onnx/runtimes.md and
docs/onnx/training.md are what is found here.

All in float32, inlined, with fixed sizes, as compilers want them. "yes" is within the error bound, with NaN past
seq_len_max; "wrong" is not, without an error; "no" is an error.
"""

from __future__ import annotations

import re
from functools import cache, partial
from importlib import metadata
from itertools import cycle, product
from pathlib import Path

import numpy as np
import pytest
from cases import arguments
from export_cases import LAYERS
from graphs import EPS, attributes, bound, compare, exact, poisoned
from runtimes import RUNTIMES
from training_cases import LOSSES, OPTIMIZERS, Training, errors

import onnx_export
from blockcell.optable import OPS

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "onnx"
DOCUMENT, TRAINING = FOLDER / "runtimes.md", FOLDER / "training.md"
TABLE = re.compile(r"(?<=<!-- (?:runtimes|training) -->\n).*?(?=<!-- /(?:runtimes|training) -->)", re.DOTALL)
SIZES = {"T": 3, "B": 2, "I": 3, "H": 4}
FORMS = {  # what build is told
    "scan": {"loop": "scan"},
    "scan, static": {"loop": "scan", "static": True},
    "unroll": {"loop": "unroll"},
    "loop": {"loop": "loop"},
}


def verdict(op, form, runtime, path):
    """ "yes", "no" or "wrong"."""
    args = arguments(op, SIZES, seq_len_max=2 if OPS[op].sequence else None, use_peephole=True)
    model = onnx_export.build(op, attrs=attributes(op, args), **FORMS[form] | {"sizes": SIZES, "functions": False})
    try:
        results = RUNTIMES[runtime](model, poisoned(op, args) if OPS[op].sequence else args, path)
    except Exception:
        return "no"
    try:
        compare(op, results, exact(op, args), bound(op, np.float32))
    except AssertionError:
        return "wrong"
    return "yes"


def forms(op):
    return [*FORMS] if OPS[op].sequence else ["scan"]


def rows():
    """Those of the table, in its order: cells, then form by form."""
    found = [row(op, form) for form in FORMS for op in OPS if form in forms(op)]
    return list(dict.fromkeys(found))


def version(runtime):
    """Of the runtime that is installed, as far as the table tells it."""
    package = {"onnx.reference": "onnx"}.get(runtime, runtime.lower())
    try:
        return ".".join(metadata.version(package).split(".")[:2])
    except metadata.PackageNotFoundError:
        return None


@cache
def documented(document=DOCUMENT):
    """The runtimes' versions; and of every row of the table, what stands under each runtime."""
    found = TABLE.search(document.read_text())
    assert found is not None
    lines = [[cell.strip() for cell in line.strip("| ").split("|")] for line in found[0].strip().splitlines()]
    versions = dict(head.rsplit(" ", 1) for head in lines[0][1:])
    return versions, {row[0]: dict(zip(RUNTIMES, row[1:], strict=True)) for row in lines[2:]}


def documented_of(runtime, document=DOCUMENT):
    """The table's rows, if the runtime that is installed is the one that the table is about."""
    versions, rows = documented(document)
    if version(runtime) != versions[runtime]:
        pytest.skip(f"the table is about {runtime} {versions[runtime]}, {version(runtime) or 'none'} is installed")
    return rows


def row(op, form):
    """The row of the table that an op's form belongs to: ops for which runtimes do the same share one."""
    if not OPS[op].sequence:
        return "cells and their gradients"
    if (op, form) == ("block_rnn", "scan"):  # whose body is plain enough for tract
        return "scan, forward, RNN"
    return f"{form}, {'gradients' if 'grad' in OPS[op].kernel else 'forward'}"


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("op", OPS)
def test_table(op, runtime, tmp_path):
    rows = documented_of(runtime)
    for form in forms(op):
        found = verdict(op, form, runtime, tmp_path / "model.onnx")
        message = f"{form}: {found}; PYTHONPATH=tests/lib python tests/onnx/test_onnx_runtimes.py writes the table anew"
        assert rows[row(op, form)][runtime] == found, message


def test_table_is_complete():
    assert list(documented()[1]) == rows()


# ------------------------------------------------------------------------------------------------------- training steps
STEPS_OF = ["LSTM", "GRU after", "Both ends"]


def step_verdict(form, runtime, path):
    """Of each layer with both losses, and of each loss with all optimizers."""
    found = []
    for (name, criterion), (optimizer, settings) in zip(product(STEPS_OF, LOSSES), cycle(OPTIMIZERS.items())):
        given = {"sizes": (SIZES["T"], SIZES["B"]), "mask": True, "max_norm": 0.5, **settings}
        training = Training(LAYERS[name]("float32"), criterion, optimizer, **given)
        model = training.model(functions=False, sizes={letter: SIZES[letter] for letter in "TB"}, **FORMS[form])
        try:
            found_outputs, expected = training.first_step(model, partial(RUNTIMES[runtime], path=path))
        except Exception:
            return "no"
        off = errors(found_outputs, expected)
        found.append("yes" if max(off.values()) <= 24 * EPS[np.dtype(np.float32)] else "wrong")
    return max(found, key=["yes", "wrong"].index)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_table_of_training_steps(runtime, form, tmp_path):
    rows = documented_of(runtime, TRAINING)
    assert rows[form][runtime] == step_verdict(form, runtime, tmp_path / "model.onnx")
    assert "yes" in {row[runtime] for row in rows.values()} and [*rows] == [*FORMS]


# ----------------------------------------------------------------------------------------------------------- the tables
def head() -> list[str]:
    heads = [f"{runtime} {version(runtime)}" for runtime in RUNTIMES]
    return [f"| form | {' | '.join(heads)} |", "|---" * (1 + len(RUNTIMES)) + "|"]


def steps_table(path: Path) -> str:
    verdicts = {form: [step_verdict(form, runtime, path) for runtime in RUNTIMES] for form in FORMS}
    return "\n".join([*head(), *(f"| {form} | {' | '.join(cells)} |" for form, cells in verdicts.items())]) + "\n"


def table(path: Path) -> str:
    lines = head()
    for name in rows():
        found = {
            tuple(verdict(op, form, runtime, path) for runtime in RUNTIMES)
            for op in OPS
            for form in forms(op)
            if row(op, form) == name
        }
        assert len(found) == 1, f"{name}: runtimes tell its ops apart, {found}"
        lines.append(f"| {' | '.join([name, *found.pop()])} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    import tempfile

    for document, write in ((DOCUMENT, table), (TRAINING, steps_table)):
        with tempfile.TemporaryDirectory() as folder:
            written = write(Path(folder) / "model.onnx")
        document.write_text(TABLE.sub(lambda _, text=written: text, document.read_text()))
