"""Calling graphs like ops."""

from __future__ import annotations

import json
import os
import re
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from time import sleep
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import pytest
from bits import leaves
from cases import SIZES, arguments
from fresh import printed
from graphs import FLOAT64, SEQUENCES, attributes, bound, compare, exact, same_in_threads, tells_placement
from refusals import refusal

import onnx_export
from blockcell import GRU, LSTM, Bidirectional, Stack
from blockcell.optable import OPS
from onnx_export import runtime

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
    result = onnx_export.Session(OTHER)(a=np.float32([-1, 2]))
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


@pytest.mark.meet(2)
@pytest.mark.parametrize("fixed", ["only those", "H too", "all"])
@pytest.mark.parametrize("nothing", ["T", "B", "I", "H", "BH", "TB"])
@pytest.mark.parametrize("op", OPS)
def test_sizes_of_zero(op, nothing, fixed):
    """Known when the graph is built, so that it may not need all arguments."""
    sizes = SIZES | dict.fromkeys(nothing, 0)
    args = arguments(op, sizes, use_peephole=False)
    known = {letter: sizes[letter] for letter in {"only those": nothing, "H too": nothing + "H", "all": sizes}[fixed]}
    results = session(op, args, sizes=known)(**args)
    compare(op, results, exact(op, args), bound(op, np.float32))


@pytest.mark.parametrize("lengths", [True, False])
@pytest.mark.parametrize("state", [True, False])
@pytest.mark.parametrize("H", [4, 0])
def test_native_layers_without_rows(H, state, lengths):
    grus = [GRU.init(2 * H, 3, seed=2), GRU.init(3, 3, seed=3, reset_after=True)]
    layer = Stack([Bidirectional(LSTM.init(3, H, seed=0), LSTM.init(3, H, seed=1)), *grus])
    layer = layer if H else layer.layers[0]
    ready = onnx_export.Session(onnx_export.export(layer, None, loop="native", state=state, lengths=lengths))
    for x in (np.zeros((5, 0, 3), np.float32), np.ones((5, 2, 3), np.float32)):
        result, expected = ready(x=x), layer(x)
        for found, right in zip(leaves(result), leaves(expected), strict=True):
            np.testing.assert_allclose(found, right, rtol=0, atol=1e-6)
            assert found.dtype == right.dtype


# ------------------------------------------------------------------------------------------------------------ mistakes
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"x": None}, "TypeError: BlockLSTM: x missing; expected seq_len_max, x, cs_prev, h_prev, w, wci, wcf, wco, b"),
        ({"steps": 3}, "TypeError: BlockLSTM: steps unknown; expected seq_len_max, x"),
        ({"forget_bias": 2.0}, "ValueError: BlockLSTM: forget_bias is 2.0; expected 1.0, as the model was built"),
        ({"x": np.zeros((3, 2), np.float32)}, "ValueError: x has shape (3, 2); expected rank 3, (T, B, I)"),
        ({"b": np.zeros(1, np.float32)}, "ValueError: b has shape (1,); expected (4H,) = (20,) with H=5 from cs_prev"),
        ({"h_prev": np.zeros((2, 5), np.float32)}, "ValueError: h_prev has shape (2, 5); expected (B, H) = (3, 5)"),
        ({"w": np.zeros((7, 20))}, "TypeError: as the model was built; w.astype(np.float32) converts it"),
        ({"b": ["a"] * 20}, "TypeError: b is made of <U1; expected an array of real numbers"),
        ({"seq_len_max": 5}, "ValueError: seq_len_max is 5; expected 0 <= seq_len_max <= T = 4 from x"),
        ({"seq_len_max": -1}, "ValueError: seq_len_max is -1; expected 0 <= seq_len_max"),
        ({"seq_len_max": 2.0}, "TypeError: seq_len_max is 2.0; expected an integer"),
    ],
)
def test_bad_calls(changed, said):
    args = arguments("BlockLSTM")
    with refusal(said):
        session("BlockLSTM", args)(**args | changed)


def test_bad_sizes():
    with refusal("ValueError: x has shape (3, 2); expected (2, any), as the model was"):
        onnx_export.Session("GRUBlockCell", sizes={"B": 2})(**arguments("GRUBlockCell"))
    with refusal("ValueError: w_ru has shape (4, 10); expected (I+H, 2H)"):
        args = arguments("GRUBlockCellGrad")
        onnx_export.Session("GRUBlockCellGrad")(**args | {"w_ru": np.zeros((4, 10), np.float32)})


def test_bad_sessions():
    cell = onnx_export.build("GRUBlockCell")
    for op_or_model, options, said in (
        ("GRUBlockCell", {"provider": "tpu"}, "ValueError: provider is 'tpu'; expected one of cpu, cuda"),
        (3, {}, "TypeError: op_or_model is of type int; expected an op's name, an onnx.ModelProto or"),
        (cell, {"dtype": "float64"}, "TypeError: dtype: options for building an op, but op_or_model is a model"),
        ("GRU", {}, "ValueError: op is 'GRU'; expected one of"),
    ):
        with refusal(said):
            onnx_export.Session(op_or_model, **options)


def changed(model, inputs=None, outputs=None, kinds=(), **facts):
    """A copy with other metadata, and with names and types of inputs and outputs changed."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    found = {entry.key.removeprefix("blockcell."): entry.value for entry in copy.metadata_props} | facts
    named = {f"blockcell.{key}": text for key, text in found.items() if text is not None}
    onnx.helper.set_model_props(copy, named)
    for values, names in ((copy.graph.input, inputs), (copy.graph.output, outputs)):
        for value in values:
            value.name = (names or {}).get(value.name, value.name)
    for value in [*copy.graph.input, *copy.graph.output]:
        if value.name in kinds:
            value.type.CopyFrom(onnx.helper.make_tensor_type_proto(*kinds[value.name]))
    return copy


CELL = onnx_export.build("LSTMBlockCell", attrs={"use_peephole": True})
ATTRIBUTES = {"forget_bias": 1.0, "cell_clip": 3.0, "use_peephole": True}
LAYER = onnx_export.export(LSTM.init(3, 4, seed=0), None)
TRAIN = onnx_export.export(LSTM.init(3, 4, seed=0), None, train=True)
OTHER = onnx.parser.parse_model(
    '<ir_version: 8, opset_import: ["": 18]> g (float[N] a) => (float[N] b) { b = Abs (a) }'
)
FLOAT = onnx.TensorProto.FLOAT


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (changed(CELL, attributes="{"), "and the model are not those that blockcell makes: Expecting property name"),
        (changed(CELL, attributes="[" * 100_000), "its JSON is nested too deeply"),
        (changed(CELL, attributes="[]"), "blockcell.attributes is '[]'; expected forget_bias, cell_clip, use_peephole"),
        (changed(CELL, attributes=None), "blockcell.attributes is '{}'; expected forget_bias, cell_clip, use_peephole"),
        (changed(CELL, attributes=json.dumps(ATTRIBUTES | {"use_peephole": 2})), "use_peephole'] is 2; expected True"),
        (changed(CELL, attributes=json.dumps(ATTRIBUTES | {"more": 2})), "'; expected forget_bias, cell_clip, use_"),
        (changed(CELL, op="LSTM"), "have blockcell.op 'LSTM'; expected one of GRUBlockCell, "),
        (changed(CELL, op="GRUBlockCell", attributes="{}"), "it has the inputs 'x, cs_prev, "),
        (changed(CELL, op="lstm_block_cell_vjp"), "blockcell.attributes is "),
        (changed(CELL, loop="while"), "have blockcell.loop 'while'; expected one of scan, unroll, native, loop"),
        (changed(CELL, loop=None), "have blockcell.loop None; expected one of scan, unroll, native, loop"),
        (changed(CELL, layer="{}"), "have blockcell.op 'LSTMBlockCell'; expected one of GRUBlockCell"),
        (changed(CELL, inputs={"x": "y"}), "it has the inputs 'y, cs_prev, ..."),
        (changed(CELL, outputs={"cs": "cs_"}), "expected some of x, cs_prev, h_prev, w, wci, wcf, wco, b, and i, cs"),
        (changed(CELL, kinds={"x": (FLOAT, ["B"])}), "its input x has another dtype or rank than the op's"),
        (changed(CELL, kinds={"x": (onnx.TensorProto.DOUBLE, "BI")}), "its input x has another dtype or rank than"),
        (changed(CELL, kinds={"i": (FLOAT + 76, "BH")}), "its input x has another dtype or rank than the op's"),
        (changed(OTHER, kinds={"b": (77, "N")}), "g: the model has no output, or the first is no tensor of a known"),
        (changed(LAYER, layer="{"), "Expecting property name"),
        (changed(LAYER, layer="{}"), "it has of type dict for a layer; expected an object with a type"),
        (changed(LAYER, layer='{"type": "GRU"}'), "it has the inputs 'x, lengths, cs_prev, h_prev'; expected x, l"),
        (changed(LAYER, loop="while"), "have blockcell.loop 'while'; expected one of scan, unroll, native, loop"),
        (changed(LAYER, inputs={"x": "z"}), "its input x has the type 0 and shape []; expected floats of (T, B, I) or"),
        (changed(LAYER, inputs={"h_prev": "z"}), "it has the inputs 'x, lengths, cs_prev, z'; expected x, lengths, cs"),
        (changed(LAYER, outputs={"y": "z"}), "it has the outputs 'z, cs, h'; expected y, cs, h"),
        (changed(TRAIN, outputs={"d_w": "z"}), "expected y, cs, h, d_x, d_cs_prev, d_h_prev, d_w, d_b"),
        (changed(TRAIN, inputs={"w": "z"}), "; expected x, lengths, cs_prev, h_prev, w, b, d_y, d_cs, d_h"),
        (changed(TRAIN, kinds={"w": (FLOAT, [8, 16])}), "its output d_w has the type 1 and shape [7, 16]; expected 1"),
        (changed(TRAIN, kinds={"w": (FLOAT, [7, 2**40])}), "d_w has the type 1 and shape [7, 16]; expected 1, [7, 109"),
        *(
            (changed(LAYER, kinds={"x": (kind, shape)}), f"x has the type {kind} and shape {[*shape]}; expected floats")
            for kind, shape in [(77, "TBI"), *((FLOAT, shape) for shape in ("QBI", [0, -1, 3], [], "I", "STBI"))]
        ),
        *(
            (changed(LAYER, kinds={name: (FLOAT, shape)}), f"{name} has the type 1 and shape {shape}; expected {right}")
            for name, shapes, right in [
                ("cs_prev", ([-3, 4], [2**40, 4], ["T", 4], ["B", 2**40], ["B"]), "1, ['B', 4]"),
                ("lengths", [["B"]], "7, ['B']"),
            ]
            for shape in shapes
        ),
    ],
)
def test_broken_metadata(model, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        onnx_export.Session(model)


def test_metadata_that_stand_twice():
    model = changed(CELL)
    model.metadata_props.add(key="blockcell.op", value="BlockLSTM")
    with pytest.raises(ValueError, match=r"have an entry of blockcell's twice: blockcell.attributes, blockcell."):
        onnx_export.Session(model)


def test_metadata_of_no_op():
    """What stands alone says nothing."""
    ready = onnx_export.Session(changed(OTHER, attributes="x", loop="y"))
    np.testing.assert_array_equal(ready(a=np.float32([-1])).b, [1])
    assert ready.attributes == {}


def test_broken_models(tmp_path):
    (tmp_path / "a.onnx").write_bytes(b"\xff" * 10)
    with pytest.raises(ValueError, match=r"a.onnx cannot be read as an ONNX model: "):
        onnx_export.Session(tmp_path / "a.onnx")
    with pytest.raises(FileNotFoundError):
        onnx_export.Session(tmp_path / "b.onnx")
    os.mkfifo(tmp_path / "c.onnx")
    for read in (onnx_export.Session, lambda path: onnx_export.TrainingSession(path, GRU.init(2, 3, seed=1))):
        with pytest.raises(ValueError, match=r"c.onnx is no regular file; expected an ONNX model"):
            read(tmp_path / "c.onnx")
    model = changed(OTHER)
    model.graph.node[0].op_type = "Missing"
    with pytest.raises(ValueError, match=r"onnxruntime cannot load the model 'g': .*Missing"):
        onnx_export.Session(model)


def test_native_where_onnxruntime_has_no_kernel():
    for layer in (GRU.init(3, 4, seed=0), GRU.init(3, 4, seed=0, reset_after=True)):
        model = onnx_export.export(layer, None, loop="native", dtype="float64")
        with pytest.raises(ValueError, match="loop='native' of float64 does not run on onnxruntime's CPU provider"):
            onnx_export.Session(model)
    model = changed(onnx_export.build("block_gru"), loop="native")
    with pytest.raises(ValueError, match="the model is an op with loop='native'; expected one that is built anew"):
        onnx_export.Session(model)


def test_a_node_without_a_kernel_on_cuda(monkeypatch):
    """What onnxruntime says then does not tell what is possible."""

    class Fail(Exception):  # onnxruntime's own class
        pass

    def refuse(*args, **options):
        raise Fail("This session contains graph nodes that are assigned to the default CPU EP, but fallback to CPU EP")

    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    monkeypatch.setattr(onnxruntime, "InferenceSession", refuse)
    model = onnx_export.build("GRUBlockCell", opset=21)
    with pytest.raises(RuntimeError, match="kernel for a part of GRUBlockCell; expected a model of opset 15 to 20 and"):
        onnx_export.Session(model, provider="cuda")


# --------------------------------------------------------------------------------------------- WebGPU, without a GPU
def kinds(placed):
    return {place.op_type for place in placed}


@tells_placement
@pytest.mark.parametrize("loop", ["scan", "loop", "unroll"])
def test_nodes_with_floats_are_told_from_others(loop):
    """All of them are on the CPU here, with the bodies of loops."""
    layer = Stack([LSTM.init(3, 4, seed=0), Bidirectional(GRU.init(4, 4, seed=1), GRU.init(4, 4, seed=2))])
    sizes = {"T": 9, "B": 2}
    options = {"lengths": True, "reset": True, "train": True, "functions": False, "static": True}
    running = runtime.RuntimeModel(onnx_export.export(layer, None, loop=loop, sizes=sizes, **options), "cpu")
    odd = running._float_nodes_on_cpu()
    assert {"Tanh", "Sigmoid", "Gemm", "Where", "Split", "Slice"} <= kinds(odd)
    others = [place for place in running.placement() if place not in odd]
    assert {"Less", "Greater"} <= kinds(others)
    assert kinds(others) <= {"Add", "Cast", "Concat", "Equal", "Expand", "Flatten", "Gather", "Greater", "Identity",
                             "Less", "Loop", "Mul", "Range", "Scan", "Slice", "Split", "Sub", "Unsqueeze"}  # fmt: skip


@tells_placement
def test_a_node_with_floats_on_the_cpu_is_named(monkeypatch):
    monkeypatch.setattr(runtime, "PROVIDERS", dict.fromkeys(("cpu", "webgpu"), "CPUExecutionProvider"))
    monkeypatch.setattr(runtime, "_plugin", lambda: None)
    with pytest.raises(RuntimeError, match=r"would run Tanh b of any on the CPU; expected a model without them or"):
        runtime.RuntimeModel(onnx.parser.parse_model(runtime.ANY), "webgpu")


@pytest.mark.parametrize("loop", ["scan", "loop", "unroll"])
def test_a_slow_form_is_warned_of(monkeypatch, loop):
    """Once for a session of a model with a Scan or Loop on WebGPU, in functions too; never on the CPU."""
    monkeypatch.setattr("onnx_export.session.why_not", lambda provider: "")
    layer = Stack([GRU.init(2, 3, seed=0), LSTM.init(3, 3, seed=1)])
    model = onnx_export.export(layer, None, loop=loop, sizes={"T": 2})
    with warnings.catch_warnings(record=True, action="always") as said:
        onnx_export.Session(model, provider="webgpu")
    assert len(said) == (loop != "unroll")
    for warning in said:
        assert str(warning.message).startswith(f"Stack: its steps run in a {loop.capitalize()}, which 'webgpu' leaves")
        assert warning.filename == __file__ and warning.category is RuntimeWarning
    onnx_export.Session(model)
    onnx_export.Session(onnx_export.export(layer, None, provider="webgpu"), provider="webgpu")
    onnx_export.Session("block_gru", provider="webgpu", loop=loop, sizes={"T": 2})  # whoever says so means it


def test_idle_threads_of_sessions_do_not_wait_long():
    """onnxruntime's wait for tens of milliseconds, in the way of blockcell's."""
    session = onnx_export.Session("GRUBlockCell")._model_for({}).session
    assert session.get_session_options().get_session_config_entry("session.intra_op.spin_duration_us") == "50"


@pytest.mark.parametrize(("op", "attrs"), [("block_gru", {}), ("BlockLSTM", {"cell_clip": 3.0}), ("GRUBlockCell", {})])
def test_the_form_on_webgpu(monkeypatch, op, attrs):
    """All steps are written out, for each set of sizes once."""
    made = []

    class Runtime:
        def __init__(self, model, provider, sizes=None):
            made.append({entry.key: entry.value for entry in model.metadata_props}["blockcell.loop"])
            self.run = runtime.RuntimeModel(model, "cpu").run

    monkeypatch.setattr("onnx_export.session.why_not", lambda provider: "")
    monkeypatch.setattr("onnx_export.session.RuntimeModel", Runtime)
    args = arguments(op, **attrs)
    ready = onnx_export.Session(op, provider="webgpu", attrs=attributes(op, args))
    for _ in range(2):
        compare(op, ready(**args), exact(op, args), bound(op, np.float32))
    assert made == ["unroll"]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("Failed to get a WebGPU adapter: No supported adapters", "there is no GPU with a Vulkan driver; install the "),
        ("something else", "something else"),
    ],
)
def test_webgpu_where_there_is_no_gpu(monkeypatch, said, expected):
    def refuse(*args, **options):
        raise RuntimeError(f"onnxruntime's sources\n{said}")

    monkeypatch.setattr(runtime, "_plugin", lambda: None)
    monkeypatch.setattr(onnxruntime, "InferenceSession", refuse)
    monkeypatch.setattr(runtime, "_why_no_webgpu", runtime._why_no_webgpu.__wrapped__)
    with pytest.raises(RuntimeError, match=f"^provider is 'webgpu', but {expected}"):
        onnx_export.Session("GRUBlockCell", provider="webgpu")


@pytest.mark.parametrize(
    ("version", "plugins", "found", "expected"),
    [
        ("1.23.0", False, True, "onnxruntime 1.23.0 takes no plugins; 1.24.4 does"),
        ("1.31.1", True, False, "the package onnxruntime-ep-webgpu is missing: pip install onnxruntime-ep-webgpu"),
        ("1.31.1", True, True, "onnxruntime finds no GPU; install its driver and the Vulkan loader"),
    ],
)
def test_webgpu_without_its_package(monkeypatch, version, plugins, found, expected):
    monkeypatch.setattr(onnxruntime, "__version__", version)
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    monkeypatch.setattr(onnxruntime, "get_ep_devices", list, raising=False)
    monkeypatch.setattr(onnxruntime, "register_execution_provider_library", lambda *_: None, raising=False)
    if not plugins:
        monkeypatch.delattr(onnxruntime, "register_execution_provider_library")
    if found:
        monkeypatch.setitem(sys.modules, "onnxruntime_ep_webgpu", SimpleNamespace(
            get_library_path=lambda: "webgpu.so", __spec__=object()))  # fmt: skip
    else:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(runtime, "_plugin", runtime._plugin.__wrapped__)
    monkeypatch.setattr(runtime, "_why_no_webgpu", runtime._why_no_webgpu.__wrapped__)
    assert runtime.why_not("webgpu").startswith(expected)
    with pytest.raises(RuntimeError, match=f"provider is 'webgpu', but {re.escape(expected)}"):
        onnx_export.Session("GRUBlockCell", provider="webgpu")


def test_dtypes_on_webgpu(monkeypatch):
    monkeypatch.setattr("onnx_export.session.why_not", lambda provider: "")
    monkeypatch.setattr(runtime, "_has_half", lambda: False)
    with pytest.raises(ValueError, match="GRUBlockCell: dtype is float64 and provider 'webgpu', but WebGPU has no"):
        onnx_export.Session("GRUBlockCell", dtype="float64", provider="webgpu")
    with pytest.raises(ValueError, match="dtype is float16 and provider 'webgpu', but this GPU or its driver has no"):
        onnx_export.Session(onnx_export.export(GRU.init(2, 3, seed=0), None, dtype="float16"), provider="webgpu")


@pytest.mark.parametrize("op", ["BlockLSTM", "BlockLSTMGrad", "block_gru", "GRUBlockCell"])
def test_eight_threads(op):
    assert same_in_threads(op, "cpu", 50)


@pytest.mark.parametrize(("providers", "most"), [("cpu", 4), ("cuda", 1), ("webgpu", 1), ("webgpu webgpu", 1)])
def test_how_many_threads_run_a_model(monkeypatch, providers, most):
    """On the CPU all, on CUDA one, on WebGPU one of all models."""
    counts = [0, 0]  # now, and at most

    def run(names, feeds):
        counts[0] += 1
        counts[1] = max(counts)
        sleep(0.02)
        counts[0] -= 1

    monkeypatch.setattr(runtime.RuntimeModel, "_options", lambda model: None)
    monkeypatch.setattr(runtime.RuntimeModel, "_start_session", lambda model, options: SimpleNamespace(run=run))
    monkeypatch.setattr(runtime.RuntimeModel, "_float_nodes_on_cpu", lambda model: [])
    models = [runtime.RuntimeModel(OTHER, provider) for provider in providers.split()]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda k: models[k % len(models)].run({}), range(4)))
    assert counts == [0, most]


def test_too_many_arrays_for_webgpu(monkeypatch):
    ready = onnx_export.Session(OTHER)

    def refuse(names, feeds):
        raise Exception("Too many storage buffers in shader. Current: 13, Max is 12")

    monkeypatch.setattr(ready._running[()], "session", SimpleNamespace(run=refuse))
    with pytest.raises(RuntimeError, match=r"g: a node has more .* expected a model that is built or exported with st"):
        ready(a=np.float32([1]))


@pytest.mark.skipif(CUDA, reason="there is a CUDA provider")
def test_cuda_where_there_is_none():
    with pytest.raises(RuntimeError, match=r"onnxruntime [\d.]+ has only .*CPUExecutionProvider here; the package"):
        onnx_export.Session("GRUBlockCell", provider="cuda")
