"""Calling graphs like ops."""

from __future__ import annotations

import re

import numpy as np
import onnx
import onnxruntime
import pytest
from cases import SIZES, arguments
from fresh import printed
from graphs import FLOAT64, SEQUENCES, attributes, bound, compare, exact, tells_placement

import onnx_export
from blockcell.optable import OPS

CUDA = "CUDAExecutionProvider" in onnxruntime.get_available_providers()


def session(op, args, **options):
    return onnx_export.Session(op, attrs=attributes(op, args), **options)


@pytest.mark.parametrize("use_peephole", [True, False])
@pytest.mark.parametrize("op", OPS)
def test_takes_what_the_op_takes(op, use_peephole):
    """All of its arguments, attributes among them, and ``name``; results in the op's named tuple."""
    args = arguments(op, use_peephole=use_peephole)
    result = session(op, args)(**args, name=None)
    assert type(result) is OPS[op].result
    compare(op, result, exact(op, args), bound(op, np.float32))


@pytest.mark.parametrize("op", OPS)
def test_arguments_that_do_not_matter_may_be_anything(op):
    args = arguments(op, use_peephole=False)
    ready = session(op, args)
    needed = {value.name for value in ready.model.graph.input}
    expected = ready(**{name: value for name, value in args.items() if name in needed})
    odd = {name: value if name in needed or name in ready.attributes else None for name, value in args.items()}
    for result, right in zip(ready(**odd), expected, strict=True):
        np.testing.assert_array_equal(result, right)


def test_lists_strides_and_byte_order():
    args = arguments("GRUBlockCell", dtype=np.float64)
    ready = onnx_export.Session("GRUBlockCell", dtype="float64")
    expected = ready(**args)
    for changed in (
        {name: value.tolist() for name, value in args.items()},
        {name: np.asfortranarray(value) for name, value in args.items()},
        {name: np.repeat(value, 2, axis=-1)[..., ::2] for name, value in args.items()},
        {name: value.astype(value.dtype.newbyteorder()) for name, value in args.items()},
        {name: memoryview(value) for name, value in args.items()},
    ):
        for result, right in zip(ready(**changed), expected, strict=True):
            np.testing.assert_array_equal(result, right)


@pytest.mark.parametrize("n", [np.int32(2), np.array(2), True])
def test_seq_len_max_is_any_integer(n):
    args = arguments("block_gru") | {"seq_len_max": n}
    compare(
        "block_gru", onnx_export.Session("block_gru")(**args), exact("block_gru", args), bound("block_gru", "float32")
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("op", SEQUENCES)
def test_no_steps_where_T_is_free(op, dtype):
    """onnxruntime's Scan cannot run no steps: the session has another graph for that."""
    args = arguments(op, {"T": 0}, dtype=dtype)
    results = session(op, args, dtype=dtype)(**args)
    assert all(result.dtype == dtype for result in results)
    compare(op, results, exact(op, args), 0)


def test_a_model():
    """One that build made is known for what it is; of another the outputs are named."""
    args = arguments("LSTMBlockCell", dtype=np.float64)
    model = onnx_export.build("LSTMBlockCell", dtype="float64", attrs={"use_peephole": True}, sizes=SIZES)
    result = onnx_export.Session(model)(**args)
    compare("LSTMBlockCell", result, exact("LSTMBlockCell", args), FLOAT64)
    other = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> g (float[N] a) => (float[N] b) { b = Abs (a) }'
    )
    result = onnx_export.Session(other)(a=np.float32([-1, 2]))
    assert result._fields == ("b",)
    np.testing.assert_array_equal(result.b, [1, 2])


@tells_placement
def test_placement_knows_every_node():
    placed = onnx_export.Session("BlockLSTM").placement
    assert {place.provider for place in placed} == {"CPUExecutionProvider"}
    assert {"Scan", "Tanh"} <= {place.op_type for place in placed}  # Tanh: within the Scan
    assert all(place.name for place in placed)


def test_onnxruntime_is_loaded_by_sessions_alone():
    code = "import sys, onnx_export; onnx_export.build('GRUBlockCell'); print('onnxruntime' in sys.modules)"
    assert printed(code) == "False"


# ------------------------------------------------------------------------------------------------------------ mistakes
def check_refused(ready, args, exception, message):
    with pytest.raises(exception, match=re.escape(message)) as caught:
        ready(**args)
    assert type(caught.value) is exception


@pytest.mark.parametrize(
    ("changed", "exception", "message"),
    [
        ({"x": None}, TypeError, "BlockLSTM: x missing; expected seq_len_max, x, cs_prev, h_prev, w, wci, wcf, wco, b"),
        ({"steps": 3}, TypeError, "BlockLSTM: steps unknown; expected seq_len_max, x"),
        ({"forget_bias": 2.0}, ValueError, "BlockLSTM: forget_bias is 2.0; expected 1.0, as the model was built"),
        (
            {"use_peephole": False},
            ValueError,
            "BlockLSTM: use_peephole is False; expected True, as the model was built",
        ),
        ({"x": np.zeros((3, 2), np.float32)}, ValueError, "x has shape (3, 2); expected rank 3, (T, B, I)"),
        ({"b": np.zeros(1, np.float32)}, ValueError, "b has shape (1,); expected (4H,) = (20,) with H=5 from cs_prev"),
        ({"h_prev": np.zeros((2, 5), np.float32)}, ValueError, "h_prev has shape (2, 5); expected (B, H) = (3, 5)"),
        ({"w": np.zeros((7, 20))}, TypeError, "w has dtype float64; expected float32, as the model was built"),
        ({"b": ["a"] * 20}, TypeError, "b is made of <U1; expected an array of real numbers"),
        ({"seq_len_max": 5}, ValueError, "seq_len_max is 5; expected 0 <= seq_len_max <= T = 4 from x"),
        ({"seq_len_max": -1}, ValueError, "seq_len_max is -1; expected 0 <= seq_len_max"),
        ({"seq_len_max": 2.0}, TypeError, "seq_len_max is 2.0; expected an integer"),
    ],
)
def test_bad_calls(changed, exception, message):
    args = arguments("BlockLSTM")
    check_refused(session("BlockLSTM", args), args | changed, exception, message)


def test_sizes_other_than_those_built():
    ready = onnx_export.Session("GRUBlockCell", sizes={"B": 2})
    check_refused(
        ready, arguments("GRUBlockCell"), ValueError, "x has shape (3, 2); expected (2, any), as the model was"
    )


def test_weights_with_fewer_rows_than_cells():
    args = arguments("GRUBlockCellGrad")
    args |= {"w_ru": args["w_ru"][:4], "w_c": args["w_c"][:4]}
    check_refused(
        onnx_export.Session("GRUBlockCellGrad"), args, ValueError, "w_ru has shape (4, 10); expected (I+H, 2H)"
    )


def test_bad_sessions():
    with pytest.raises(ValueError, match="provider is 'tpu'; expected one of cpu, cuda"):
        onnx_export.Session("GRUBlockCell", provider="tpu")
    with pytest.raises(TypeError, match=r"op_or_model is of type int; expected an op's name, an onnx\.ModelProto or"):
        onnx_export.Session(3)
    with pytest.raises(TypeError, match="dtype: options for building an op, but op_or_model is a model"):
        onnx_export.Session(onnx_export.build("GRUBlockCell"), dtype="float64")
    with pytest.raises(ValueError, match="op is 'GRU'; expected one of"):
        onnx_export.Session("GRU")


def test_native_where_onnxruntime_has_no_kernel():
    options = {"loop": "native", "sizes": {"H": 5}}
    with pytest.raises(ValueError, match="loop='native' of float64 does not run on onnxruntime's CPU provider"):
        onnx_export.Session("block_gru", dtype="float64", **options)
    ready, args = onnx_export.Session("block_gru", **options), arguments("block_gru", {"I": 0})
    check_refused(ready, args, ValueError, "x has no inputs, for which onnxruntime's own LSTM and GRU are wrong")


def test_a_node_without_a_kernel_on_cuda(monkeypatch):
    """What onnxruntime says then does not tell what is possible."""

    def refuse(*args, **options):
        raise Exception(
            "This session contains graph nodes that are assigned to the default CPU EP, but fallback to CPU EP"
        )

    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    monkeypatch.setattr(onnxruntime, "InferenceSession", refuse)
    model = onnx_export.build("GRUBlockCell", opset=21)
    with pytest.raises(RuntimeError, match="kernel for a part of GRUBlockCell; expected a model of opset 15 to 20 and"):
        onnx_export.Session(model, provider="cuda")


@pytest.mark.skipif(CUDA, reason="there is a CUDA provider")
def test_cuda_where_there_is_none():
    with pytest.raises(RuntimeError, match=r"onnxruntime [\d.]+ has only .*CPUExecutionProvider here; the package"):
        onnx_export.Session("GRUBlockCell", provider="cuda")
