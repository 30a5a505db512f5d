"""Running models, and how far what they give is from the formulas."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from cases import SIZES, arguments
from onnx import helper
from onnx.reference import ReferenceEvaluator
from outputs import check_model

import onnx_export
from blockcell.formulas import FORMULAS
from blockcell.optable import OPS

onnxruntime.set_default_logger_severity(3)
EPS = {np.dtype(np.float64): 2.0**-52, np.dtype(np.float32): 2.0**-23, np.dtype(np.float16): 2.0**-10}
ONNX, ONNXRUNTIME = (tuple(map(int, package.__version__.split(".")[:2])) for package in (onnx, onnxruntime))
SEQUENCES = [name for name, op in OPS.items() if op.sequence]
CELLS = [name for name, op in OPS.items() if not op.sequence]
PEEPHOLES = [name for name, op in OPS.items() if any(part.name == "use_peephole" for part in op.attributes)]
LOOPS = ["scan", "unroll", "loop"]
FORMS = [(op, "scan") for op in CELLS] + [(op, loop) for op in SEQUENCES for loop in LOOPS]
FLOAT64 = 1e-13
tells_placement = pytest.mark.skipif(
    not hasattr(onnxruntime.InferenceSession, "get_provider_graph_assignment_info"),
    reason="onnxruntime tells where nodes run since 1.24",
)


def bound(op, dtype):
    """In units of the outputs' largest entries."""
    dtype = np.dtype(dtype)
    if dtype == np.float64:
        return FLOAT64
    return (24 if dtype == np.float32 and OPS[op].sequence else 8) * EPS[dtype]


def attributes(op, args):
    """Those of the arguments that are attributes."""
    return {attribute.name: args[attribute.name] for attribute in OPS[op].attributes if attribute.name in args}


def feeds(model, args):
    return {value.name: np.asarray(args[value.name]) for value in model.graph.input}


def on_onnxruntime(model, args):
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, feeds(model, args))


@cache
def saturates():
    """Return whether onnxruntime's products of unsigned and signed bytes saturate here, as on CPUs without VNNI."""
    text = """<ir_version: 8, opset_import: ["": 18]>
        product (uint8[1,4] a, int8[4,1] b) => (int32[1,1] c) { c = MatMulInteger (a, b) }"""
    bytes_of = {"a": np.full((1, 4), 255, np.uint8), "b": np.full((4, 1), 127, np.int8)}
    return int(on_onnxruntime(onnx.parser.parse_model(text), bytes_of)[0].item()) != 4 * 255 * 127


def named(model, results):
    """The results by the names of the model's outputs."""
    return dict(zip((value.name for value in model.graph.output), map(np.asarray, results), strict=True))


def types(model):
    """The elements' type and the sizes, or the letters for them, of each input and output, by name."""
    values = {value.name: value.type.tensor_type for value in (*model.graph.input, *model.graph.output)}
    return {
        name: (kind.elem_type, [dim.dim_param or dim.dim_value for dim in kind.shape.dim])
        for name, kind in values.items()
    }


def started_on_reference(model):
    """Return a function that runs the model on onnx.reference."""
    if ONNX < (1, 22) and b"Scan" in model.SerializeToString():
        pytest.skip("onnx.reference lets a Scan's body read values from outside since onnx 1.22")
    evaluator = ReferenceEvaluator(model)

    def run(given):
        with np.errstate(all="ignore"):
            return evaluator.run(None, given)

    return run


def on_reference(model, args):
    return started_on_reference(model)(feeds(model, args))


@cache
def _checked(serialized, check):
    model = onnx.load_from_string(serialized)
    onnx.checker.check_model(model, full_check=True)
    check(model)


def checked(model, check=check_model):
    """The model, after ONNX's own strict check, and that of its outputs."""
    _checked(model.SerializeToString(), check)
    return model


def exact(op, args):
    """The formulas' results, of the very numbers in the arguments."""
    formula = FORMULAS[op]
    with np.errstate(invalid="ignore", over="ignore"):
        return formula(**args)


def compare(op, results, expected, limit):
    """Every output within the limit, which counts in its largest entry, and of the formulas' shape."""
    for tensor, result, right in zip(OPS[op].outputs, results, expected, strict=True):
        assert result.shape == right.shape, tensor.name
        largest = np.abs(right).max(initial=0)
        error = np.abs(result - right).max(initial=0)
        assert error <= limit * largest, f"{tensor.name}: {error / (largest or 1):.2e} > {limit:.2e}"


def same_in_threads(op, provider, calls):
    """Whether 8 threads at one Session get the bits of one thread, with two numbers of rows: two graphs on a GPU."""
    cases = [arguments(op, SIZES | {"B": 1 + k % 2}, seed=k, use_peephole=False) for k in range(8)]
    session = onnx_export.Session(op, provider=provider, attrs=attributes(op, cases[0]))
    expected = [session(**args) for args in cases]

    def same(k):
        found = [session(**cases[k]) for _ in range(calls)]
        return all(a.tobytes() == b.tobytes() for results in found for a, b in zip(results, expected[k], strict=True))

    with ThreadPoolExecutor(8) as threads:
        return all([*threads.map(same, range(8))])


def poisoned(op, args):
    """The arguments with NaN past seq_len_max, where nothing may be read."""
    n = args["seq_len_max"]
    dirty = dict(args)
    for tensor in OPS[op].inputs:
        if tensor.shape.startswith("T "):
            dirty[tensor.name] = args[tensor.name].copy()
            dirty[tensor.name][n:] = np.nan
    return dirty


def converted(op, args):
    """A model with the op as a converter leaves it, which `onnx_export.link` completes."""
    names = ["seq_len_max"] * OPS[op].sequence + [tensor.name for tensor in OPS[op].inputs]
    attrs = {name: int(value) if isinstance(value, bool) else value for name, value in attributes(op, args).items()}
    kinds = {np.dtype(np.float32): onnx.TensorProto.FLOAT, np.dtype(np.int64): onnx.TensorProto.INT64}
    inputs = [
        helper.make_tensor_value_info(name, kinds[np.asarray(args[name]).dtype], np.shape(args[name])) for name in names
    ]
    results = [
        helper.make_tensor_value_info(tensor.name, onnx.TensorProto.FLOAT, [None] * tensor.rank)
        for tensor in OPS[op].outputs
    ]
    node = helper.make_node(op, names, OPS[op].result._fields, name="cell", **attrs)
    graph = helper.make_graph([node], "model", inputs, results)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def attributes_of(op):
    """All that makes the graph larger, and all that makes it smaller."""
    names = {attribute.name for attribute in OPS[op].attributes}
    most = {"use_peephole": True, "cell_clip": 0.3, "forget_bias": 1.0, "activation": ("hard_sigmoid", 0.3, 0.4)}
    least = {"use_peephole": False, "cell_clip": 0.0, "forget_bias": 0.0, "activation": "tanh"}
    for values in (most, least) if names else ({},):
        yield {name: value for name, value in values.items() if name in names}
