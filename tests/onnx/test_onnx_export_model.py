"""What a layer's ONNX model is made of: names, nodes and functions, and where its nodes run on CUDA."""

from __future__ import annotations

import json
from collections import Counter

import onnx
import onnxruntime
import pytest
from export_cases import LAYERS, STREAMING, B, Case, T, exported, gru, lstm, rnn
from graphs import LOOPS, PEEPHOLES, types
from placement import fallbacks, refused_by_cuda_graphs, sizes_left

import onnx_export
from blockcell import Bidirectional, Stack, __version__
from blockcell.optable import OPS
from onnx_export.nodes import graphs, nodes_of


def test_names():
    layer = Stack([Bidirectional(lstm(2, "float32"), gru(2, "float32")), gru(3, "float32", 4, reset_after=True)])
    model = exported(layer, train=True, reset=True)
    states = ["0.fw.cs", "0.fw.h", "0.bw.h", "1.h"]
    weights = ["0.fw.w", "0.fw.b", *(f"{p}.{w}" for p in ("0.bw", "1") for w in ("w_ru", "w_c", "b_ru", "b_c"))]
    weights.append("1.b_hc")
    first = [f"{name}_prev" for name in states]
    d_last = [f"d_{name}" for name in states]
    inputs = ["x", "lengths", "reset", *first, *weights, "d_y", *d_last]
    outputs = ["y", *states, "d_x", *(f"d_{name}" for name in first), *(f"d_{name}" for name in weights)]
    assert [value.name for value in model.graph.input] == inputs
    assert [value.name for value in model.graph.output] == outputs
    assert list(layer.weights) == weights and not model.graph.initializer
    shapes = types(model)
    kind = onnx.TensorProto
    assert shapes["x"] == shapes["d_x"] == (kind.FLOAT, ["T", "B", 3])
    assert shapes["y"] == shapes["d_y"] == (kind.FLOAT, ["T", "B", 3])
    assert shapes["lengths"] == (kind.INT64, ["B"])
    assert shapes["reset"] == (kind.BOOL, ["T", "B"])
    assert shapes["0.fw.cs_prev"] == shapes["d_0.fw.cs"] == (kind.FLOAT, ["B", 2])
    assert shapes["1.w_c"] == shapes["d_1.w_c"] == (kind.FLOAT, [7, 3])
    assert shapes["1.b_hc"] == shapes["d_1.b_hc"] == (kind.FLOAT, [3])


def test_the_file_is_the_model(tmp_path):
    layer = LAYERS["Stack"]("float32")
    model = onnx_export.export(layer, tmp_path / "layer.onnx")
    assert onnx.load(tmp_path / "layer.onnx") == model
    assert [path.name for path in tmp_path.iterdir()] == ["layer.onnx"]
    facts = {entry.key: entry.value for entry in model.metadata_props}
    assert facts["blockcell.version"] == model.producer_version == __version__
    assert json.loads(facts["blockcell.layer"])["type"] == "Stack"
    assert facts["blockcell.loop"] == "scan"
    assert model.ir_version == 8
    assert {(entry.domain, entry.version) for entry in model.opset_import} == {("", 18), ("blockcell", 1)}


def test_cells_that_are_alike_share_a_function():
    same, other = lstm(4, "float32", 4), lstm(4, "float32", 4, cell_clip=0.5)
    grus = [gru(4, "float32", 4, reset_after=after) for after in (False, True, False, True)]
    model = exported(Stack([same, same, other, *grus]))
    assert [made.name for made in model.functions] == ["LSTM", "LSTM_2", "GRU", "GRU_2"]
    calls = [node.op_type for node in model.graph.node if node.domain == "blockcell"]
    assert calls == ["LSTM", "LSTM", "LSTM_2", "GRU", "GRU_2", "GRU", "GRU_2"]


@pytest.mark.parametrize("opset", [15, 17, 19, 21])
def test_opsets(opset):
    layer = LAYERS["Bidirectional"]("float64")
    case = Case(layer, train=True, reset=True)
    case.check(exported(layer, case, opset=opset))


@pytest.mark.parametrize("name", LAYERS)
def test_no_gradient_multiplies_by_a_transposed_matrix_in_a_matmul(name):
    """Before 1.26, onnxruntime fuses the two nodes in float64, too, and then has no kernel. It does so with no Gemm."""
    model = exported(LAYERS[name]("float64"), train=True, loop="unroll", functions=False)
    transposed = {node.output[0] for node in model.graph.node if node.op_type == "Transpose"}
    products = [node for node in model.graph.node if node.op_type in ("Gemm", "MatMul")]
    assert products and not [n.name for n in products if n.op_type == "MatMul" and transposed & {*n.input}]


def test_inference_hands_out_no_more_than_it_must():
    """Of all steps the loop keeps h alone, and with lengths also cs; it never keeps the gates."""
    for lengths, collected in ((False, 1), (True, 2)):
        model = exported(lstm(4, "float32"), lengths=lengths, functions=False)
        (scan,) = (node for node in model.graph.node if node.op_type == "Scan")
        assert len(scan.output) == 2 + collected


@pytest.mark.parametrize(("lengths", "turn"), [(False, "Slice"), (True, "Gather")])
def test_layers_of_a_backward_direction_are_turned_once(lengths, turn):
    """x is reversed before the first layer and y after the last; nothing is reversed in between."""
    tower = Stack([gru(4, "float32"), gru(4, "float32", 4), gru(4, "float32", 4)])
    model = exported(Bidirectional(gru(4, "float32"), tower), lengths=lengths)
    turns = [node for node in model.graph.node if node.op_type == turn]
    assert len(turns) == 2 + (4 if lengths else 0)  # and, with lengths, each cell's final state


def test_nothing_is_left_of_what_is_not_asked_for():
    kinds = {node.op_type for node in exported(lstm(4, "float32"), lengths=False).graph.node}
    assert kinds == {"LSTM"}


# ------------------------------------------------------------------------------------------------- ONNX's own LSTM, GRU
SHAPES = {"LSTM": [[1, 16, 3], [1, 16, 4], [1, 32]], "GRU": [[1, 12, 3], [1, 12, 4], [1, 24]]}


@pytest.mark.parametrize("sizes", [{}, {"T": T, "B": B}])
@pytest.mark.parametrize("state", [True, False])
@pytest.mark.parametrize("lengths", [True, False])
def test_no_node_of_native_reads_constants_alone(lengths, state, sizes):
    """Weights are stored as ONNX's nodes read them, and nothing is left to compute of them or of other constants."""
    peepholes = lstm(4, "float32", use_peephole=True, forget_bias=1.0)
    grus = (gru(4, "float32", reset_after=after) for after in (False, True))
    for layer in (Bidirectional(peepholes, lstm(4, "float32")), *grus):
        model = exported(layer, loop="native", functions=False, lengths=lengths, state=state, sizes=sizes)
        stored = {tensor.name: [*tensor.dims] for tensor in model.graph.initializer}
        known = {*stored, *(node.output[0] for node in model.graph.node if node.op_type == "Constant")}
        cells = []
        for node in model.graph.node:
            assert node.op_type == "Constant" or not known.issuperset(filter(None, node.input)), node
            if stored.keys() & set(node.input):
                cells.append(node)
                assert [stored[name] for name in node.input[1:4]] == SHAPES[node.op_type]
        assert [len(node.input) == 8 for node in cells] == ["wci" in cell.weights for cell in layer._leaves().values()]


def test_the_nodes_of_native():
    layer = Bidirectional(lstm(4, "float32"), lstm(4, "float32"))
    kinds = {"LSTM": 2, "Slice": 2, "Squeeze": 6, "Concat": 1}  # x and y are turned; all results lose an axis
    for sizes, more in (({"B": B}, {}), ({}, {"Shape": 1, "Concat": 2, "Expand": 1})):
        model = exported(layer, loop="native", functions=False, lengths=False, state=False, sizes=sizes)
        assert Counter(n.op_type for n in model.graph.node if n.op_type != "Constant") == kinds | more


@pytest.mark.parametrize("functions", [True, False])
def test_native_cells_that_are_alike_have_weights_of_their_own(functions):
    layer = Stack([gru(3, "float32"), gru(3, "float32"), gru(3, "float32")])
    model = exported(layer, loop="native", functions=functions)
    assert not model.functions
    assert [tensor.name for tensor in model.graph.initializer] == [f"{k}.{name}" for k in range(3) for name in "WRB"]


# ------------------------------------------------------------------------------------------------------------ providers
def looped(model):
    """What the metadata say, after a look at the nodes."""
    (loop,) = (entry.value for entry in model.metadata_props if entry.key == "blockcell.loop")
    kinds = {node.op_type for node in nodes_of(model)}
    assert ("Scan" in kinds, "Loop" in kinds) == (loop == "scan", loop == "loop")
    assert bool({"LSTM", "GRU"} & kinds) == (loop == "native")
    return loop


@pytest.mark.parametrize(
    ("layer", "options", "webgpu", "cuda"),
    [
        (lambda: Bidirectional(lstm(4, "float32"), gru(4, "float32")), {}, "native", "scan"),
        (lambda: Bidirectional(lstm(4, "float32"), gru(4, "float32", reset_after=True)), {}, "native", "native"),
        (lambda: Stack([gru(4, "float32"), gru(4, "float32", 4, reset_after=True)]), {"lengths": False}, "native",
         "scan"),
        (lambda: lstm(4, "float32", use_peephole=True), {}, "native", "scan"),
        (lambda: lstm(4, "float32", activation="relu"), {}, "native", "scan"),
        (lambda: lstm(4, "float32", coupled=True, gate_order="icfo"), {}, "native", "scan"),
        (lambda: lstm(4, "float32", activation="elu"), {"sizes": {"T": T}}, "unroll", "scan"),
        (lambda: lstm(4, "float32", cell_clip=0.5), {"sizes": {"T": T}}, "unroll", "scan"),
        (lambda: lstm(4, "float32"), {"sizes": {"T": T}, "reset": True}, "unroll", "scan"),
        (lambda: lstm(4, "float32"), {"sizes": {"T": T}, "train": True}, "unroll", "scan"),
        (lambda: lstm(4, "float16"), {"sizes": {"T": T}}, "unroll", "scan"),
        (lambda: lstm(4, "float32"), {"loop": "scan"}, "scan", "scan"),
    ],
)  # fmt: skip
def test_form_of_a_layer_for_a_provider(layer, options, webgpu, cuda):
    layer = layer()
    for provider, expected in (("cpu", "scan"), ("webgpu", webgpu), ("cuda", cuda)):
        assert looped(exported(layer, provider=provider, functions=False, **options)) == expected
    assert exported(layer, **options) == exported(layer, provider="cpu", **options)


def test_no_form_of_a_layer_for_a_provider():
    said = (
        r"^export: there is no form for provider='webgpu': loop='native' is not exact: .*; "
        r"loop='unroll' .* needs sizes\['T'\]; 'scan' and 'loop' do not$"
    )
    with pytest.raises(ValueError, match=said):
        exported(lstm(4, "float32", cell_clip=0.5), provider="webgpu")
    with pytest.raises(ValueError, match=r"'webgpu' has no RNN; expected another; .*so needs sizes"):
        exported(rnn(4, "float32"), provider="webgpu")
    with pytest.raises(ValueError, match=r"^export: provider is 'gpu'; expected one of cpu, cuda, webgpu$"):
        exported(lstm(4, "float32"), provider="gpu")
    with pytest.raises(ValueError, match=r"^export: opset is 3; expected an integer from 15"):
        exported(lstm(4, "float32"), provider="webgpu", opset=3)


@pytest.mark.parametrize("op", OPS)
def test_form_of_an_op_for_a_provider(op):
    """That of a session of the op."""
    attrs = {"use_peephole": False} if op in PEEPHOLES and ("Grad" in op or "vjp" in op) else {}
    for provider, loop in {"cpu": "scan", "cuda": "scan", "webgpu": "unroll"}.items():
        options = {"attrs": attrs, "sizes": {"T": T}}
        static = {"static": True} if provider != "cpu" else {}
        assert onnx_export.build(op, provider=provider, **options) == onnx_export.build(
            op, loop=loop, **options, **static
        )


# ---------------------------------------------------------------------------------------------------------------- names
def check_names(model):
    """Every node has one, in functions and bodies too."""
    for node in nodes_of(model):
        assert node.name, node


@pytest.mark.parametrize("functions", [True, False])
@pytest.mark.parametrize(
    "form",
    [*({"loop": loop, "reset": True, "train": train} for loop in LOOPS for train in (False, True)), {"loop": "native"}],
    ids=lambda form: " ".join(map(str, form.values())),
)
def test_every_node_has_a_name(form, functions):
    check_names(exported(Bidirectional(lstm(3, "float32"), gru(3, "float32")), functions=functions, **form))
    check_names(exported(lstm(3, "float32"), functions=functions, streaming=True))
    check_names(onnx_export.build("BlockLSTM", functions=functions))


# ------------------------------------------------------------------------------------------------------------ on WebGPU
@pytest.mark.meet(2)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_no_bools_are_gathered(name, train, loop):
    """onnxruntime-webgpu 1.27 gathers bools by fours; at the end of their indices it reads on, and what is found there
    tells where to read the bools. Where SwiftShader is the GPU, this model ends the process, if its buffers held large
    numbers before: g (bool[15,1] x, int64[15] i) => (bool[15,1] y) { y = Gather (x, i) }
    """
    model = exported(LAYERS[name]("float32"), train=train, loop=loop, reset=True, functions=False, static=True)
    kinds = [
        types[node.input[0]]
        for graph, types in graphs(onnx.shape_inference.infer_shapes(model).graph)
        for node in graph.node
        if node.op_type == "Gather"
    ]
    assert onnx.TensorProto.BOOL not in kinds
    assert onnx.TensorProto.FLOAT in kinds or name == "Dense"  # which has no Gather


# -------------------------------------------------------------------------------------------------------------- on CUDA
@pytest.mark.meet(2)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_no_node_falls_back(name, train, loop):
    layer = LAYERS[name]("float16" if loop == "scan" else "float32")
    options = {"train": train, "loop": loop, "reset": True}
    model = exported(layer, sizes={"T": T, "B": B}, **options)
    assert fallbacks(model) == []
    assert sizes_left(model) == []
    if loop == "unroll":
        assert refused_by_cuda_graphs(model) == []


@pytest.mark.parametrize("name", STREAMING)
def test_no_node_of_a_step_falls_back(name):
    model = exported(STREAMING[name]("float32"), streaming=True, sizes={"B": B})
    assert refused_by_cuda_graphs(model) == []


@pytest.mark.parametrize("lengths", [True, False])
@pytest.mark.parametrize(
    ("layer", "missing"),
    [
        (lstm(4, "float32"), ""),
        (gru(4, "float32", reset_after=True), ""),
        (gru(4, "float32"), "cuDNN resets after the product"),
        (lstm(4, "float32", use_peephole=True), "cuDNN has no peephole"),
        (lstm(4, "float32", coupled=True), "cuDNN is not known to have input_forget"),
    ],
    ids=repr,
)
def test_onnx_own_nodes_on_the_gpu(layer, missing, lengths):
    found = refused_by_cuda_graphs(exported(layer, loop="native", sizes={"T": T, "B": B}, lengths=lengths))
    assert len(found) == bool(missing) and all(missing in entry for entry in found)


@pytest.mark.cuda
@pytest.mark.skipif(
    "CUDAExecutionProvider" not in onnxruntime.get_available_providers(), reason="needs onnxruntime-gpu and a GPU"
)
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_on_a_gpu(name, train):
    layer = LAYERS[name]("float64")
    case = Case(layer, train=train, reset=True)
    session = onnx_export.Session(exported(layer, case), provider="cuda")
    running = session._model_for({"T": T, "B": B})
    case.check(session.model, lambda model, feeds: running.run(feeds), limit=1e-12)
