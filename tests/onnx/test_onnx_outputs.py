"""No output of a model is a constant or an input, which onnxruntime may copy while a GPU still computes."""

from __future__ import annotations

import numpy as np
import pytest
from cases import SIZES, arguments
from export_cases import LAYERS, B, T, dense, exported, gru, lstm, rnn
from graphs import FORMS, PEEPHOLES, attributes_of, checked, converted, on_onnxruntime
from onnx import helper, parser
from outputs import check_model
from placement import constant_outputs

import onnx_export
from blockcell import Stack
from onnx_export.cells import body
from onnx_export.nodes import make_model

COPY = '<domain: "blockcell", opset_import: ["": 18]> Copy (p) => (q) { r = Identity (p) q = Identity (r) }'
SCAN = """z, y = Scan <num_scan_inputs = 1,
    body = step (float s, float x) => (float s1, float y1) {{ s1 = Add (s, x) {} }}> (w0, a)"""


def model_of(nodes):
    """A model with an input a [2], an initializer w [2] and a function, whose output is y."""
    text = f"g (float[2] a) => (float[2] y) <float[2] w = {{1, 2}}, float w0 = {{1}}> {{ {nodes} }}"
    return make_model(parser.parse_graph(text), 18, [parser.parse_function(COPY)], {})


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("y = Identity (w)", "y is a constant"),
        ("y = Constant <value = float[2] {1, 2}> ()", "y is a constant"),
        ("v = Add (w, w) y = Neg (v)", "y is a constant"),
        ("n = Shape (a) y = Expand (w0, n)", "y is a constant"),
        ("y = Identity (a)", "y is an input"),
        ("y = blockcell.Copy (a)", "y is an input"),
        ("y = blockcell.Copy (w)", "y is a constant"),
        (SCAN.format("y1 = Constant <value = float {1}> ()"), "y1 is a constant"),
        (SCAN.format("y1 = Identity (w0)"), "y1 is a constant"),
        (SCAN.format("y1 = Identity (x)"), "y1 is an input"),
    ],
)
def test_what_is_refused(nodes, expected):
    with pytest.raises(AssertionError, match=f"^g: the output {expected}, which no node computes"):
        check_model(model_of(nodes))


@pytest.mark.meet(2)
@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize(("op", "loop"), FORMS)
def test_ops(op, loop, static):
    """Also after onnxruntime has folded what is known when all sizes are fixed."""
    for attrs in attributes_of(op):
        for sizes in (SIZES, *(SIZES | {letter: 0} for letter in "TBIH")):
            for functions in (True, False) if static else (True,):  # which are inlined, and other models only if static
                model = onnx_export.build(op, loop=loop, attrs=attrs, sizes=sizes, static=static, functions=functions)
                check_model(model)
                assert constant_outputs(model) == []


@pytest.mark.meet(2)
@pytest.mark.parametrize("lengths", [True, False])
@pytest.mark.parametrize("state", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name, state, lengths):
    layer, options = LAYERS[name]("float32"), {"state": state, "lengths": lengths, "sizes": {"T": T, "B": B}}
    for loop in ("scan", "unroll"):
        for train in (True, False):
            assert constant_outputs(exported(layer, train=train, loop=loop, **options)) == []
    step = onnx_export.training_step(layer, None, loss="mean_squared_error", optimizer="adam", max_norm=1.0, **options)
    check_model(step)
    assert constant_outputs(step) == []


@pytest.mark.parametrize("make", [lstm, gru, rnn, dense])
@pytest.mark.parametrize("sizes", [(0, 3), (3, 0), (0, 0)])
def test_layers_without_cells_or_inputs(make, sizes):
    cell = make(sizes[1], "float32", sizes[0])
    for layer in (cell, Stack([cell, dense(0, "float32", sizes[1])])):
        for form in ({}, {"train": True}, {"streaming": True}):
            assert exported(layer, **form).graph.output
        for norm in (None, 1.0):
            checked(onnx_export.training_step(layer, None, loss="mean_squared_error", optimizer="sgd", max_norm=norm))


@pytest.mark.parametrize("op", [name for name in PEEPHOLES if "grad" in name.lower() or "vjp" in name])
def test_a_writer_that_makes_constants_is_found(monkeypatch, op):
    def constants(outputs):
        names = {tensor.name: f"{tensor.name}_zeros" for tensor in outputs}
        return [helper.make_node("Constant", [], [name], value_floats=[0.0]) for name in names.values()], names

    models = [converted(op, arguments(op, use_peephole=False))] if op.startswith(("Block", "LSTM")) else []
    models = [lambda model=model: onnx_export.link(model) for model in models]
    models += [lambda f=f: onnx_export.build(op, attrs={"use_peephole": False}, functions=f) for f in (True, False)]
    for make in models:
        check_model(make())
    monkeypatch.setattr(body, "_summed_zeros", constants)
    for make in models:
        with pytest.raises(AssertionError, match=r"the output .*wci_grad.* is a constant"):
            check_model(make())


def test_outputs_of_others_are_theirs():
    """`link` leaves an output that is a constant in the model of somebody else."""
    args = arguments("GRUBlockCell")
    model = converted("GRUBlockCell", args)
    model.graph.initializer.append(helper.make_tensor("own", 1, [2], [1, 2]))
    model.graph.output.append(helper.make_tensor_value_info("own", 1, [2]))
    *_, own = on_onnxruntime(onnx_export.link(model), args)
    np.testing.assert_array_equal(own, [1, 2])
