"""The graphs on onnxruntime's CUDA provider: no node is left to the CPU, which needs no GPU to tell; and, marked cuda,
the results, which do.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnxruntime
import pytest
from cases import SIZES, arguments, rng
from export_cases import Case, I, exported, gru, lstm, rnn
from graphs import (
    EPS,
    FORMS,
    SEQUENCES,
    attributes,
    attributes_of,
    bound,
    compare,
    converted,
    exact,
    same_in_threads,
    tells_placement,
)
from onnx import helper
from placement import KERNELS, constant_outputs, fallbacks, left, refused_by_cuda_graphs, sizes_left

import onnx_export
from blockcell import Bidirectional, Stack
from blockcell.optable import OPS
from onnx_export.cells import body
from onnx_export.nodes import rename_values
from onnx_export.runtime import RuntimeModel

DTYPES = ["float64", "float32", "float16"]


def models(op, loop, dtype, **options):
    """With functions, which `placement` inlines before it looks at nodes; static models differ without them."""
    for attrs in attributes_of(op):
        for functions in (True, False) if options.get("static") else (True,):
            yield onnx_export.build(op, dtype=dtype, loop=loop, attrs=attrs, functions=functions, **options)


# ------------------------------------------------------------------------------------------- placement, without a GPU
@pytest.mark.meet(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("op", "loop"), FORMS)
def test_no_node_falls_back(op, loop, dtype):
    """With sizes that are fixed, as in a session on CUDA, there is not even arithmetic of sizes."""
    for model in models(op, loop, dtype, sizes=SIZES, static=True):
        assert fallbacks(model) == []
        assert sizes_left(model) == []
        assert constant_outputs(model) == []
    for model in models(op, loop, dtype, sizes={"T": SIZES["T"]} if loop == "unroll" else {}):
        assert fallbacks(model) == []


@tells_placement
@pytest.mark.parametrize(("op", "loop"), FORMS)
def test_onnxruntime_folds_what_is_taken_for_folded(op, loop):
    """Its CPU provider shows what is left before nodes are given to providers."""
    for model in models(op, loop, "float32", sizes=SIZES, static=True):
        placed = Counter(entry.op_type for entry in onnx_export.Session(model).placement)
        expected = Counter(left(model))
        assert (placed - expected).keys() <= {"Gemm", "Reshape"}  # of a MatMul and an Add on arrays of rank 3
        assert (expected - placed).keys() <= {"MatMul", "Add", "Identity"}
        assert {"Gemm", "Reshape"} <= KERNELS.keys()


@pytest.mark.meet(1)
@pytest.mark.parametrize("opset", range(15, 21))
@pytest.mark.parametrize(("op", "loop"), FORMS)
def test_opsets(op, loop, opset):
    for model in models(op, loop, "float32", sizes=SIZES, opset=opset, static=True):
        assert fallbacks(model) == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_cuda_graphs_take_cells_and_steps_written_out(op, dtype):
    for model in models(op, "unroll", dtype, sizes=SIZES, static=True):
        assert refused_by_cuda_graphs(model) == []


@pytest.mark.parametrize("op", SEQUENCES)
def test_cuda_graphs_take_many_steps(op):
    """Only with static=True: a Concat of more than 32 steps is not captured."""
    attrs = attributes(op, {"use_peephole": False})
    for steps, refused in ((32, False), (33, True), (70, True), (1100, True)):
        if steps < 1000 or op == "block_rnn":
            options = {"sizes": {**SIZES, "T": steps}, "attrs": attrs, "loop": "unroll"}
            assert refused_by_cuda_graphs(onnx_export.build(op, static=True, **options)) == []
            found = refused_by_cuda_graphs(onnx_export.build(op, **options))
            assert any(entry.startswith("Concat") for entry in found) == refused


@pytest.mark.parametrize("op", [name for name in OPS if OPS[name].module == "raw_ops"])
def test_linked_models(op):
    model = converted(op, arguments(op))
    assert fallbacks(onnx_export.link(model)) == []
    assert fallbacks(model) == [f"{op} cell: no kernel for it is known"]


# ------------------------------------------------------------------------------------------------ the test of the test
def steps(model):
    """The nodes of the Scan's body."""
    (loop,) = (each for each in model.graph.node if each.op_type == "Scan")
    return next(attribute.g for attribute in loop.attribute if attribute.name == "body").node


def changed(change, **options):
    """What is found in a Scan where a node of the body was changed."""
    model = onnx_export.build("block_gru", functions=False, sizes=SIZES, static=True, **options)
    assert fallbacks(model) == []
    change(model)
    return fallbacks(model)


def test_ops_and_types_without_a_kernel_are_found_within_a_loop():
    def other_op(model):
        (tanh,) = (each for each in steps(model) if each.op_type == "Tanh")
        tanh.op_type = "Sinh"

    def other_type(model):
        step = steps(model)
        step.append(helper.make_node("Constant", [], ["ints"], value=helper.make_tensor("ints", 7, [1], [1])))
        step.append(helper.make_node("Cast", [next(each.output[0] for each in step if each.op_type == "Tanh")],
                                     ["whole"], to=onnx.TensorProto.INT64))  # fmt: skip
        step.append(helper.make_node("Sum", ["whole", "ints"], ["summed"], name="odd"))

    (found,) = changed(other_op)
    assert found.startswith("Sinh") and found.endswith("no kernel for it is known")
    assert changed(other_type) == ["Sum odd: no kernel for whole of type int64"]


def test_a_version_without_a_kernel_is_found():
    """onnxruntime takes "19+" for 19 alone once ONNX has a newer version of the op: 21 of Scan."""
    assert "19+" in KERNELS["Scan"] and onnx.defs.get_schema("Scan", 21, "").since_version == 21
    model = onnx_export.build("block_gru", sizes=SIZES, static=True, opset=21)
    assert any("Scan" in found and "no kernel for version 21" in found for found in fallbacks(model))


def test_sizes_at_run_time_are_found():
    assert sizes_left(onnx_export.build("BlockLSTM"))
    assert sizes_left(onnx_export.build("BlockLSTM", sizes={**SIZES, "T": None}))


# ----------------------------------------------------------------------------------------------- a GPU that is late
def constant_zeros(outputs):
    """As `onnx_export.body` wrote the zeros once, for sizes that are fixed."""
    names = {tensor.name: f"{tensor.name}_zeros" for tensor in outputs}
    nodes = [helper.make_node("Shape", ["h_prev"], ["cells"], start=1)]
    return [*nodes, *(helper.make_node("Expand", ["zero", "cells"], [name]) for name in names.values())], names


def late_results(op, args, provider, outputs, runs=20, size=4096, products=24):
    """Return the wrong results of an op behind many large products, whose sum, a zero, is added to its first input."""
    sizes = {"T": len(args["x"]), "B": args["h_prev"].shape[0], "I": args["x"].shape[2], "H": args["h_prev"].shape[1]}
    size = size if provider == "cuda" else 8
    options = {"sizes": sizes, "attrs": attributes(op, args), "loop": "scan", "functions": False, "static": True}
    model = onnx_export.build(op, **options)
    made = [helper.make_node("MatMul", [f"late_{k}", "late_0"], [f"late_{k + 1}"]) for k in range(products)]
    made.append(helper.make_node("ReduceSum", [f"late_{products}"], ["nought"], keepdims=0))
    made.append(helper.make_node("Add", ["cs_prev", "nought"], ["cs_late"]))
    inner = rename_values(model.graph.node, {"cs_prev": "cs_late"})
    del model.graph.node[:]
    model.graph.node.extend([*made, *inner])
    model.graph.input.append(helper.make_tensor_value_info("late_0", onnx.TensorProto.FLOAT, [size, size]))
    session, wrong = RuntimeModel(model, provider).session, []
    bound_session, right = session.io_binding(), exact(op, args)
    given = {**args, "late_0": np.zeros((size, size), np.float32)}
    for value in model.graph.input:
        array = np.asarray(given[value.name], order="C")
        where = provider if array.ndim else "cpu"
        bound_session.bind_ortvalue_input(value.name, onnxruntime.OrtValue.ortvalue_from_numpy(array, where, 0))
    for _ in range(runs):
        for name in right._fields:
            bound_session.bind_output(name, outputs)
        session.run_with_iobinding(bound_session)
        for name, result in zip(right._fields, bound_session.copy_outputs_to_cpu(), strict=True):
            error = np.abs(result - getattr(right, name)).max()
            if not error <= bound(op, np.float32) * np.abs(getattr(right, name)).max():
                wrong.append(name)
    return wrong


@pytest.mark.parametrize("constants", [False, True])
def test_a_late_gpu_on_the_cpu(monkeypatch, constants):
    """The graphs of the test on a GPU, with and without constants, are right where nothing is late."""
    args = arguments("BlockLSTMGrad", {"T": 26, "B": 3, "I": 8, "H": 5}, use_peephole=False)
    if constants:
        monkeypatch.setattr(body, "_summed_zeros", constant_zeros)
    assert late_results("BlockLSTMGrad", args, "cpu", "cpu") == []


# ------------------------------------------------------------------------------------------------------- with a GPU
AVAILABLE = onnxruntime.get_available_providers()
on_cuda = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        "CUDAExecutionProvider" not in AVAILABLE,
        reason=f"onnxruntime {onnxruntime.__version__} has only {', '.join(AVAILABLE)}; onnxruntime-gpu has CUDA",
    ),
]
FLOAT64_ON_CUDA = 1e-12
CUDNN_LAYERS = {
    "LSTM": lambda dtype: lstm(5, dtype),
    "GRU": lambda dtype: gru(5, dtype, reset_after=True),
    "RNN": lambda dtype: rnn(5, dtype),
    "Stack": lambda dtype: Stack(
        [Bidirectional(lstm(5, dtype), rnn(5, dtype)), gru(4, dtype, 10, reset_after=True, reverse=True)]
    ),
}


class TestOnAGPU:
    """Through sessions, which make a node on the CPU an error."""

    pytestmark = on_cuda

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(("op", "loop"), FORMS)
    def test_results(self, op, loop, dtype):
        g = rng("cuda", op, loop, dtype)
        for attrs in attributes_of(op):
            sizes = {letter: int(g.integers(1, most)) for letter, most in {"T": 9, "B": 6, "I": 8, "H": 10}.items()}
            print(sizes, attrs)
            lengths = range(sizes["T"] + 1) if OPS[op].sequence else [None]
            fixed = {"sizes": {"T": sizes["T"]}} if loop == "unroll" else {}
            session = onnx_export.Session(op, provider="cuda", dtype=dtype, loop=loop, attrs=attrs, **fixed)
            for n in lengths:
                args = arguments(op, sizes, dtype=np.dtype(dtype), seq_len_max=n, **{"use_peephole": False, **attrs})
                limit = FLOAT64_ON_CUDA if dtype == "float64" else bound(op, dtype)
                compare(op, session(**args), exact(op, args), limit)
            assert {placed.provider for placed in session.placement} == {"CUDAExecutionProvider"}

    @pytest.mark.parametrize("use_peephole", [False, True])
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("op", OPS)
    def test_the_form_that_nobody_chose(self, op, dtype, use_peephole):
        """Every seq_len_max."""
        options = {"cell_clip": 0.0, "use_peephole": use_peephole}
        attrs = attributes(op, arguments(op, **options))
        session = onnx_export.Session(op, provider="cuda", dtype=dtype, attrs=attrs)
        for n in range(SIZES["T"] + 1) if OPS[op].sequence else [None]:
            args = arguments(op, dtype=np.dtype(dtype), seq_len_max=n, **options)
            limit = FLOAT64_ON_CUDA if dtype == "float64" else bound(op, dtype)
            compare(op, session(**args), exact(op, args), limit)

    @pytest.mark.parametrize(
        ("constants", "outputs", "right"), [(False, "cuda", True), (True, "cpu", True), (True, "cuda", False)]
    )
    @pytest.mark.parametrize(("B", "H"), [(1, 64), (3, 5)])
    def test_constants_beside_a_late_scan(self, monkeypatch, constants, outputs, right, B, H):
        """States and zeros fit in memory of one size, 256 bytes, and the GPU is late. What is right is either that the
        zeros are computed or that outputs are on the CPU; without both, some are overwritten in every run.
        """
        op = "BlockLSTMGrad"
        args = arguments(op, {"T": 26, "B": B, "I": 8, "H": H}, use_peephole=False)
        if constants:
            monkeypatch.setattr(body, "_summed_zeros", constant_zeros)
        assert (late_results(op, args, "cuda", outputs) == []) == right

    @pytest.mark.parametrize("op", ["BlockLSTM", "BlockLSTMGrad", "block_gru"])
    def test_eight_threads(self, op):
        assert same_in_threads(op, "cuda", 50)

    @pytest.mark.parametrize("op", ["BlockLSTM", "BlockLSTMV2", "block_gru_reset_after", "block_rnn"])
    def test_products_are_not_rounded_to_tf32(self, op):
        """Which makes errors of some 4e-4."""
        args = arguments(op, {"T": 20, "B": 64, "I": 512, "H": 512}, cell_clip=0.0, use_peephole=False)
        session = onnx_export.Session(op, provider="cuda", attrs=attributes(op, args))
        compare(op, session(**args), exact(op, args), 1e-5)

    @pytest.mark.parametrize("op", SEQUENCES)
    def test_a_captured_graph_reads_new_numbers(self, op):
        sizes = {**SIZES, "T": 70}
        options = {"cell_clip": 0.0, "use_peephole": False}
        cases = [arguments(op, sizes, seed=seed, seq_len_max=n, **options) for seed, n in enumerate((70, 66, 35, 70))]
        attrs = attributes(op, cases[0])
        model = onnx_export.build(op, sizes=sizes, attrs=attrs, loop="unroll", static=True)
        session = RuntimeModel(model, "cuda", provider_options={"enable_cuda_graph": "1"}).session
        bound_session, values, results = session.io_binding(), {}, []
        for value in model.graph.input:
            array = np.asarray(cases[0][value.name], order="C")
            values[value.name] = onnxruntime.OrtValue.ortvalue_from_numpy(array, "cuda", 0)
            bound_session.bind_ortvalue_input(value.name, values[value.name])
        for value in model.graph.output:
            shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
            results.append(onnxruntime.OrtValue.ortvalue_from_shape_and_type(shape, np.float32, "cuda", 0))
            bound_session.bind_ortvalue_output(value.name, results[-1])
        for args in cases:
            for name, value in values.items():
                value.update_inplace(np.asarray(args[name], order="C"))
            session.run_with_iobinding(bound_session)
            bound_session.synchronize_outputs()
            compare(op, [result.numpy() for result in results], exact(op, args), bound(op, np.float32))

    @pytest.mark.parametrize("dtype", ["float64", "float32"])
    @pytest.mark.parametrize("form", [{"lengths": False, "state": False}, {"lengths": False}, {"lengths": True}])
    @pytest.mark.parametrize("name", CUDNN_LAYERS)
    def test_layers_of_cudnns(self, name, form, dtype):
        """In the form for CUDA. The batch has sequences of no steps."""
        case = Case(CUDNN_LAYERS[name](dtype), **form)
        model = exported(case.layer, case, provider="cuda")
        found = case.by_name(onnx_export.Session(model, provider="cuda")(**case.arguments))
        assert {"LSTM", "GRU", "RNN"} & {node.op_type for node in model.graph.node}
        for key, right in case.computed().items():
            limit = FLOAT64_ON_CUDA if dtype == "float64" else 24 * EPS[np.dtype(np.float32)]
            assert np.abs(found[key] - right).max() <= limit * np.abs(right).max(), key

    def test_products_of_cudnn_are_not_rounded_to_tf32(self):
        layer, x = lstm(512, "float32", 512), rng("tf32").standard_normal((20, 64, 512)).astype(np.float32)
        session = onnx_export.Session(onnx_export.export(layer, None, loop="native"), provider="cuda")
        assert np.abs(session(x=x).y - layer(x)[0]).max() < 1e-5

    def test_onnx_own_gru_is_refused(self):
        session = onnx_export.Session(onnx_export.export(gru(5, "float32"), None, loop="native"), provider="cuda")
        with pytest.raises(RuntimeError, match=r"no kernel for a part of GRU.*fallback to CPU EP"):
            session(x=np.zeros((2, 1, I), np.float32))
