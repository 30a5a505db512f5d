"""Calls of one session with arrays of other sizes in between give their bits again.

onnxruntime plans its memory by the sizes of a session's first calls; its issue 18672 reports other results in later
ones, of a GRU. So forms are called with sizes A, B, A and B; `pytest -m more` calls the other forms.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from bits import leaves, same
from cases import arguments
from export_cases import DTYPES, LAYERS, Case, I, T
from graphs import CELLS, LOOPS, SEQUENCES, attributes
from training_cases import LOSSES, OPTIMIZERS, Training

import onnx_export
from onnx_export import TrainingSession

SIZES = [{"T": T, "B": 3, "I": I, "H": 5}, {"T": 2 * T, "B": 17, "I": 2 * I, "H": 9}]


def sizes_with(**fixed):
    return [sizes | fixed for sizes in SIZES]


def compare_calls(call, both_arguments):
    """Call with either arguments in turn, twice, and compare the results of the first calls with later ones.

    The first results are kept meanwhile, so a later call that writes to their memory is found, too.
    """
    first_results, later_results = ([call(**arguments) for arguments in both_arguments] for _ in range(2))
    assert all(np.isfinite(array).all() for array in arrays(first_results))
    assert same(first_results, later_results)


def arrays(results):
    """Return all arrays of several calls' results."""
    return leaves([[*part.values()] if isinstance(part, dict) else part for result in results for part in result])


OP_FORMS = [(op, "scan", False, dtype) for op in CELLS for dtype in DTYPES]
OP_FORMS += [(op, *form) for op in SEQUENCES for form in product(LOOPS, [False, True], DTYPES)]


@pytest.mark.meet(2)
@pytest.mark.parametrize(("op", "loop", "static", "dtype"), OP_FORMS)
def test_ops(op, loop, static, dtype):
    fixed = {"T": SIZES[0]["T"]} if loop == "unroll" else {}
    calls = [
        arguments(op, sizes, dtype=np.dtype(dtype), seq_len_max=sizes["T"] - k)
        for k, sizes in enumerate(sizes_with(**fixed))
    ]
    attrs = attributes(op, calls[0])
    session = onnx_export.Session(op, loop=loop, static=static, dtype=dtype, sizes=fixed, attrs=attrs)
    compare_calls(session, calls)


LAYER_FORMS = {
    "scan": {},
    "scan, static": {"static": True, "functions": False},
    "loop": {"loop": "loop"},
    "unroll": {"loop": "unroll", "sizes": {"T": T}},
    "native": {"loop": "native", "reset": False},
    "train": {"train": True},
    "train, loop": {"train": True, "loop": "loop"},
    "train, unroll": {"train": True, "loop": "unroll", "sizes": {"T": T}},
    "int8": {"activations": "int8"},
}
NOT_NATIVE = ["LSTM with all", "Stack", "Projected", "Variants"]  # which clip cs or project h


@pytest.mark.meet(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "form"),
    [(name, form) for name in LAYERS for form in LAYER_FORMS if form != "native" or name not in NOT_NATIVE],
)
def test_layers(name, form, dtype):
    options = {"reset": True} | LAYER_FORMS[form]
    layer = LAYERS[name]("float32" if form in ("native", "int8") else dtype)
    calls = [
        Case(layer, sizes=(sizes["T"], sizes["B"]), reset=options["reset"], train="train" in options).arguments
        for sizes in sizes_with(**options.get("sizes", {}))
    ]
    exported = layer.quantize("int8") if form == "int8" else layer
    compare_calls(onnx_export.Session(onnx_export.export(exported, None, **options)), calls)


@pytest.mark.meet(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("criterion", LOSSES)
@pytest.mark.parametrize("name", LAYERS)
def test_training(name, criterion, optimizer, dtype):
    """Each step equals the first step of another session that goes on from the same weights."""
    trainings = [
        Training(LAYERS[name](dtype), criterion, optimizer, sizes=(sizes["T"], sizes["B"]), reset=True, mask=True)
        for sizes in SIZES
    ]
    model = trainings[0].model()
    session = TrainingSession(model, trainings[0].layer)
    for number, training in enumerate([*trainings, *trainings[::-1]]):  # for each of the two sets of memory both sizes
        restarted = TrainingSession(model, session.layer(), optimizer_state=session.optimizer_state)
        batch = training.batch(number) | {"learning_rate": training.rate}
        result, first_result = ((step(**batch), step.weights, step.optimizer_state) for step in (session, restarted))
        assert np.isfinite(result[0].loss)
        assert same(result, first_result)
