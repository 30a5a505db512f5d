"""Models with TensorFlow's nodes in them, as tf2onnx leaves them, linked and run."""

from __future__ import annotations

import re

import numpy as np
import onnx
import pytest
from cases import SIZES, arguments
from graphs import (
    FLOAT64,
    ONNXRUNTIME,
    PEEPHOLES,
    attributes,
    bound,
    checked,
    compare,
    exact,
    on_onnxruntime,
)
from onnx import TensorProto, helper, numpy_helper
from outputs import check_functions

import onnx_export
from blockcell.formulas import FORMULAS
from blockcell.optable import OPS
from onnx_export.link import FROM_TENSORFLOW
from onnx_export.nodes import DOMAIN

node = helper.make_node
ELEMENT = {np.dtype(np.float64): TensorProto.DOUBLE, np.dtype(np.float32): TensorProto.FLOAT,
           np.dtype(np.float16): TensorProto.FLOAT16, np.dtype(np.int64): TensorProto.INT64}  # fmt: skip
RAW_OPS = [name for name, op in OPS.items() if op.module == "raw_ops"]


def taken(op):
    """What the op takes, in TensorFlow's order."""
    return ["seq_len_max"] * OPS[op].sequence + [tensor.name for tensor in OPS[op].inputs]


def tensorflow_node(op, attrs, *, inputs=(), outputs=(), domain="", name=""):
    """All arguments by position, whether they matter or not."""
    attrs = {key: int(value) if isinstance(value, bool) else value for key, value in attrs.items()}
    outputs = outputs or OPS[op].result._fields
    return node(op, inputs or taken(op), outputs, name=name or f"cell_{outputs[-1]}", domain=domain, **attrs)


def typed(name, array):
    """What a graph says of an input or output like this array; its shape remains open."""
    array = np.asarray(array)
    shape = [f"{name}_{axis}" for axis in range(array.ndim)]
    return helper.make_tensor_value_info(name, ELEMENT[array.dtype], shape)


def model_of(nodes, inputs, outputs, *, domain="", opset=18, initializers=(), value_info=(), functions=(), ir=8):
    """A model; inputs are given as arrays, outputs as names to dtypes and ranks."""
    graph = helper.make_graph(
        nodes,
        "model",
        [typed(name, array) for name, array in inputs.items()],
        [typed(name, np.empty((0,) * rank, dtype)) for name, (dtype, rank) in outputs.items()],
        [numpy_helper.from_array(array, name) for name, array in dict(initializers).items()],
        value_info=value_info,
    )
    imports = [helper.make_opsetid("", opset), *([helper.make_opsetid(domain, 1)] if domain else [])]
    return helper.make_model(graph, opset_imports=imports, functions=functions, ir_version=ir)


def single(op, args, attrs, **options):
    """A model of one node, its arguments and results those of the model."""
    results = {tensor.name: (args["h_prev"].dtype, tensor.rank) for tensor in OPS[op].outputs}
    inputs = {name: args[name] for name in taken(op)}
    domain = options.get("domain", "")
    return model_of([tensorflow_node(op, attrs, domain=domain)], inputs, results, **options)


def linked(model):
    """Linked, once it was seen that the model itself stays as it was."""
    before = model.SerializeToString(deterministic=True)
    result = onnx_export.link(model)
    assert model.SerializeToString(deterministic=True) == before
    return checked(result, check_functions)


# ------------------------------------------------------------------------------------------------------- single nodes
@pytest.mark.meet(2)
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
@pytest.mark.parametrize("domain", ["", DOMAIN, FROM_TENSORFLOW])
@pytest.mark.parametrize("op", RAW_OPS)
def test_every_op(op, domain, dtype):
    for use_peephole in [True, False] if op in PEEPHOLES else [False]:
        args = arguments(op, dtype=dtype, use_peephole=use_peephole)
        model = linked(single(op, args, attributes(op, args), domain=domain))
        assert [value.name for value in model.graph.input] == taken(op)
        assert {entry.domain for entry in model.opset_import} == {"", DOMAIN}
        compare(op, on_onnxruntime(model, args), exact(op, args), bound(op, dtype))


@pytest.mark.parametrize("op", ["LSTMBlockCell", "BlockLSTM", "BlockLSTMV2"])
def test_attributes_that_are_missing_have_tensorflows_defaults(op):
    """Old graph definitions leave out what has its default. The states are beyond 3, where the clip is."""
    defaults = {attribute.name: attribute.default for attribute in OPS[op].attributes}
    args = arguments(op, dtype=np.float64, **defaults)
    args["cs_prev"] = args["cs_prev"] * 20
    assert np.abs(args["cs_prev"]).max() > 10
    compare(op, on_onnxruntime(linked(single(op, args, {})), args), exact(op, args), FLOAT64)


def test_weights_that_do_not_matter_go():
    """As tf2onnx leaves zeros for the peepholes; but for those that somebody else reads."""
    op = "BlockLSTM"
    args = arguments(op, dtype=np.float64, use_peephole=False)
    weights = {name: args[name] for name in ("w", "b", "wci", "wcf", "wco")}
    inputs = {name: args[name] for name in taken(op) if name not in weights}
    again = node("Identity", ["wcf"], ["y"])
    outputs = {"h": (np.float64, 3), "y": (np.float64, 1)}
    cell = tensorflow_node(op, attributes(op, args))
    model = model_of([cell, again], inputs, outputs, initializers=weights | {"spare": np.float64(1)})
    result = linked(model)
    assert {tensor.name for tensor in result.graph.initializer} == {"w", "b", "wcf", "spare"}
    h, y = on_onnxruntime(result, inputs)
    np.testing.assert_allclose(h, exact(op, args).h, rtol=0, atol=1e-14)
    np.testing.assert_array_equal(y, args["wcf"])


def test_attributes_that_are_not_the_ops_are_dropped():
    args = arguments("GRUBlockCell", dtype=np.float64)
    model = linked(single("GRUBlockCell", args, {"T": 2, "_class": "cell"}))
    assert not model.graph.node[0].attribute
    compare("GRUBlockCell", on_onnxruntime(model, args), exact("GRUBlockCell", args), FLOAT64)


@pytest.mark.parametrize("opset", [opset for opset in (15, 17, 21, 23) if opset <= onnx.defs.onnx_opset_version()])
def test_opsets(opset):
    args = arguments("BlockLSTMGrad", dtype=np.float64)
    model = linked(single("BlockLSTMGrad", args, attributes("BlockLSTMGrad", args), opset=opset, ir=10))
    assert [entry.version for entry in model.functions[0].opset_import] == [opset]
    if opset == 23 and ONNXRUNTIME < (1, 23):
        pytest.skip("onnxruntime runs opset 23 since 1.23")
    compare("BlockLSTMGrad", on_onnxruntime(model, args), exact("BlockLSTMGrad", args), FLOAT64)


def test_models_without_functions_and_without_operators():
    """IR 7 knows no functions; a model that has nothing but the op in it need not import ONNX's."""
    args = arguments("GRUBlockCell", dtype=np.float64)
    model = single("GRUBlockCell", args, {}, domain=DOMAIN, ir=7)
    del model.opset_import[0]
    result = linked(model)
    assert result.ir_version == 8
    compare("GRUBlockCell", on_onnxruntime(result, args), exact("GRUBlockCell", args), FLOAT64)


# -------------------------------------------------------------------------------------------------- graphs around them
CELL = {name: value for name, value in arguments("GRUBlockCell", dtype=np.float64).items() if name not in ("x",)}
WEIGHTS = {name: CELL[name] for name in ("w_ru", "w_c", "b_ru", "b_c")}
SEQUENCE = arguments("block_gru", dtype=np.float64, seq_len_max=SIZES["T"])
X = SEQUENCE["x"]
EXPECTED = FORMULAS["block_gru"](seq_len_max=len(X), x=X, h_prev=CELL["h_prev"], **WEIGHTS).h
STEP = ("x_t", "h_t", *WEIGHTS)
FLOATS = np.float64


def cell_in_body(outputs, **options):
    return tensorflow_node("GRUBlockCell", {}, inputs=STEP, outputs=outputs, **options)


def around(nodes, **options):
    """A model from x and h_prev to y, the weights within."""
    inputs = {"x": X, "h_prev": CELL["h_prev"]}
    return model_of(nodes, inputs, {"y": (FLOATS, 3)}, initializers=WEIGHTS | options.pop("more", {}), **options)


def check_sequence(model, expected=EXPECTED):
    (y,) = on_onnxruntime(linked(model), {"x": X, "h_prev": CELL["h_prev"]})
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-14)


def value(name, rank=2, element=TensorProto.DOUBLE):
    return helper.make_tensor_value_info(name, element, None if rank is None else [None] * rank)


def test_steps_one_after_the_other():
    """As static_rnn makes them: one function for all, and nothing but the first h_prev and the weights has a type."""
    T = len(X)
    nodes = [node("Split", ["x"], [f"x_{t}" for t in range(T)], axis=0, num_outputs=T)]
    for t in range(T):
        state = "h_prev" if t == 0 else f"h_{t - 1}"
        nodes += [
            node("Squeeze", [f"x_{t}", "axis"], [f"x_{t}_row"]),
            tensorflow_node("GRUBlockCell", {}, inputs=[f"x_{t}_row", state, *WEIGHTS], outputs=["", "", "", f"h_{t}"]),
            node("Unsqueeze", [f"h_{t}", "axis"], [f"h_{t}_row"]),
        ]
    nodes.append(node("Concat", [f"h_{t}_row" for t in range(T)], ["y"], axis=0))
    model = around(nodes, more={"axis": np.int64([0])})
    assert [made.name for made in linked(model).functions] == ["GRUBlockCell"]
    check_sequence(model)


def test_in_a_loop():
    body = helper.make_graph(
        [
            node("Gather", ["x", "step"], ["x_t"], axis=0),
            cell_in_body(["r", "u", "c", "h_new"]),
            node("Identity", ["go_on"], ["going_on"]),
            node("Identity", ["h_new"], ["y_t"]),
        ],
        "body",
        [value("step", 0, TensorProto.INT64), value("go_on", 0, TensorProto.BOOL), value("h_t")],
        [value("going_on", 0, TensorProto.BOOL), value("h_new"), value("y_t")],
    )
    more = {"T": np.int64(len(X)), "true": np.bool_(True)}
    check_sequence(around([node("Loop", ["T", "true", "h_prev"], ["h", "y"], body=body)], more=more))


def test_in_an_if_within_a_scan():
    """Steps with a positive first input run the cell, the others keep the state. Both know the outer bodies' types."""
    keep = helper.make_graph([node("Identity", ["h_t"], ["kept"])], "keep", [], [value("kept")])
    cell = [cell_in_body(["", "", "", "h_cell"]), node("Identity", ["h_cell"], ["h_run"])]
    run = helper.make_graph(cell, "run", [], [value("h_run")])
    body = helper.make_graph(
        [
            node("Slice", ["x_t", "low", "high"], ["first"]),
            node("Squeeze", ["first"], ["scalar"]),
            node("Greater", ["scalar", "zero"], ["positive"]),
            node("If", ["positive"], ["h_new"], then_branch=run, else_branch=keep),
            node("Identity", ["h_new"], ["y_t"]),
        ],
        "body",
        [value("h_t"), value("x_t")],
        [value("h_new"), value("y_t")],
    )
    more = {"low": np.int64([0, 0]), "high": np.int64([1, 1]), "zero": np.float64(0)}
    state, expected = CELL["h_prev"], []
    for x in X:
        state = FORMULAS["GRUBlockCell"](x=x, h_prev=state, **WEIGHTS).h if x[0, 0] > 0 else state
        expected.append(state)
    assert 0 < sum(x[0, 0] > 0 for x in X) < len(X)
    check_sequence(around([node("Scan", ["h_prev", "x"], ["h", "y"], body=body, num_scan_inputs=1)], more=more),
                   np.stack(expected))  # fmt: skip


def test_forward_and_backward_in_one_model():
    """As GradientTape makes them. Of what the second node takes and gives no type is known before the first has one."""
    op = "BlockLSTMGrad"
    args = arguments("BlockLSTM", dtype=np.float64, seq_len_max=SIZES["T"] - 1)
    known = {name: args[name] for name in taken("BlockLSTM")}
    weights = ["x", "cs_prev", "h_prev", "w", "wci", "wcf", "wco", "b"]
    states = OPS["BlockLSTM"].result._fields
    grads = [tensor.name for tensor in OPS[op].outputs]
    inputs = ["seq_len_max", *(f"{name}_again" for name in weights), *states, "cs_grad", "h_grad"]
    nodes = [
        tensorflow_node("BlockLSTM", attributes("BlockLSTM", args)),
        *(node("CastLike", [name, "h"], [f"{name}_again"]) for name in weights),
        node("Add", ["h", "h"], ["h_grad"]),
        node("Add", ["cs", "h"], ["cs_grad"]),
        tensorflow_node(op, {"use_peephole": True}, inputs=inputs, outputs=[f"{name}_found" for name in grads]),
        *(node("Identity", [f"{name}_found"], [name]) for name in grads),
    ]
    first = exact("BlockLSTM", args)
    given = {**known, **first._asdict(), "cs_grad": first.cs + first.h, "h_grad": 2 * first.h, "use_peephole": True}
    model = linked(model_of(nodes, known, {tensor.name: (FLOATS, tensor.rank) for tensor in OPS[op].outputs}))
    assert [made.name for made in model.functions] == ["BlockLSTM", op]
    compare(op, on_onnxruntime(model, known), exact(op, given), FLOAT64)


@pytest.mark.parametrize("backwards", [True, False])
def test_configurations_have_functions_of_their_own(backwards):
    """Two nodes that differ in an attribute, one that differs in dtype, one that is like the first."""
    args = arguments("LSTMBlockCell", dtype=np.float64, use_peephole=False)
    attrs = [{"cell_clip": 0.5}, {"cell_clip": 0.25}, {"cell_clip": 0.5}]
    half = {f"{name}_half": args[name].astype(np.float16) for name in taken("LSTMBlockCell")}
    nodes = [
        tensorflow_node("LSTMBlockCell", each, outputs=["", "", "", "", "", "", f"h_{number}"])
        for number, each in enumerate(attrs)
    ]
    nodes.append(tensorflow_node("LSTMBlockCell", attrs[0], inputs=list(half), outputs=["", "", "", "", "", "", "h_3"]))
    outputs = {**{f"h_{number}": (FLOATS, 2) for number in range(3)}, "h_3": (np.float16, 2)}
    known = {name: args[name] for name in taken("LSTMBlockCell")}
    model = linked(model_of(nodes[::-1] if backwards else nodes, {**known, **half}, outputs))
    assert {made.name for made in model.functions} == {"LSTMBlockCell", "LSTMBlockCell_2", "LSTMBlockCell_3"}
    results = on_onnxruntime(model, {**known, **half})
    for result, clip in zip(results, [0.5, 0.25, 0.5, 0.5], strict=True):
        right = exact("LSTMBlockCell", args | {"cell_clip": clip}).h
        np.testing.assert_allclose(result, right, rtol=0, atol=1e-14 if result.dtype == FLOATS else 2e-3)


def test_in_functions_of_the_models_own():
    """Where values have no types. What the message says to call makes a model that can be linked."""
    op = "LSTMBlockCell"
    args = arguments(op, dtype=np.float64, use_peephole=False, cell_clip=0.5, forget_bias=1.0)
    cell = tensorflow_node(op, {}, outputs=["", "", "", "", "", "", "h"], name="cell")
    cell.attribute.add(name="cell_clip", ref_attr_name="limit", type=onnx.AttributeProto.FLOAT)
    function = helper.make_function("mine", "F", taken(op), ["h"], [cell], [helper.make_opsetid("", 18)], ["limit"])
    call = node("F", taken(op), ["y"], domain="mine", limit=0.5)
    known = {name: args[name] for name in taken(op)}
    model = model_of([call], known, {"y": (FLOATS, 2)}, domain="mine", functions=[function])
    with pytest.raises(ValueError, match=r"^LSTMBlockCell node 'cell' is in the function 'F', .* expected a"):
        onnx_export.link(model)
    (y,) = on_onnxruntime(linked(onnx.inliner.inline_local_functions(model)), known)
    np.testing.assert_allclose(y, exact(op, args).h, rtol=0, atol=1e-14)


def test_what_has_a_body_is_left_alone():
    """A model that build or link made; and a node of the same name beside one."""
    built = onnx_export.build("GRUBlockCell", dtype="float64")
    assert onnx_export.link(built) == built
    args = arguments("LSTMBlockCell", dtype=np.float64)
    once = linked(single("LSTMBlockCell", args, {"cell_clip": 0.5}, domain=DOMAIN))
    assert onnx_export.link(once) == once
    plain = helper.make_model(helper.make_graph([], "none", [], []))
    assert onnx_export.link(plain) == plain
    outputs = ["", "", "", "h_2"]
    inputs = arguments("GRUBlockCell", dtype=np.float64)
    built.graph.node.append(tensorflow_node("GRUBlockCell", {}, inputs=["x", "h", *WEIGHTS], outputs=outputs))
    built.graph.output.append(value("h_2"))
    *_, second = on_onnxruntime(linked(built), inputs)
    states = exact("GRUBlockCell", inputs)
    np.testing.assert_allclose(second, exact("GRUBlockCell", inputs | {"h_prev": states.h}).h, rtol=0, atol=1e-14)


# ------------------------------------------------------------------------------------------------------------ mistakes
def broken(op="GRUBlockCell", *, inputs=(), outputs=(), kinds=None, **options):
    """A model with something wrong."""
    args = arguments(op)
    attrs = options.pop("attrs", {})
    known = {name: array.astype((kinds or {}).get(name, array.dtype)) if isinstance(array, np.ndarray) else array
             for name, array in args.items() if name in taken(op)}  # fmt: skip
    return model_of([tensorflow_node(op, attrs, inputs=inputs, outputs=outputs, name="cell")], known, {}, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"opset": 14}, "GRUBlockCell node 'cell' is in a model of opset 14; expected 15 or newer, which converters"),
        ({"opset": 1000}, "GRUBlockCell node 'cell': GRUBlockCell: opset is 1000; expected an integer from 15 to"),
        ({"op": "BlockLSTMGrad"}, "BlockLSTMGrad node 'cell': BlockLSTMGrad: attrs['use_peephole'] is None; expected"),
        *(
            ({"op": "BlockLSTM", "attrs": {name: value}}, f"BlockLSTM node 'cell' has {name} {message}")
            for name, value, message in [
                ("use_peephole", 2, "2; expected the integer 0 or 1"),
                ("use_peephole", 1.0, "1.0; expected the integer 0 or 1"),
                ("use_peephole", "yes", "b'yes'; expected the integer 0 or 1"),
                ("forget_bias", 1, "1; expected a float"),
                ("cell_clip", [3.0], "of type list; expected a float"),
            ]
        ),
        ({"kinds": {"w_c": np.float16}}, "x ('x') is FLOAT and w_c ('w_c') is FLOAT16; expected one dtype"),
        ({"kinds": dict.fromkeys(taken("GRUBlockCell"), np.int64)}, "dtype is dtype('int64'); expected float32"),
        ({"inputs": taken("GRUBlockCell")[:4]}, "'cell': b_ru, b_c missing; expected all of x, h_prev, w_ru, w_c"),
        ({"inputs": ["x", "", "w_ru", "w_c", "b_ru", "b_c"]}, "'cell': h_prev missing; expected all of x, h_prev, w"),
        ({"inputs": [*taken("GRUBlockCell"), "x"]}, "'cell' has 7 inputs; expected 6: x, h_prev, w_ru, w_c, b_ru, b_c"),
        ({"outputs": ["r", "u", "c", "h", "i"]}, "'cell' has 5 outputs; expected 4: r, u, c, h"),
        (
            {"inputs": ["a", "b", "c_", "d", "e", "f"]},
            "GRUBlockCell node 'cell': no type is known of x ('a'), h_prev ('b'), w_ru ('c_'), w_c ('d'), b_ru ('e'), "
            "b_c ('f'), so its dtype cannot be found; expected at least one of them to be a graph input or an initial",
        ),
    ],
)
def test_models_that_cannot_be_completed(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        onnx_export.link(broken(**options))


def test_attributes_that_are_none():
    model = broken("BlockLSTM", attrs={"cell_clip": 3.0})
    model.graph.node[0].attribute[0].type = onnx.AttributeProto.UNDEFINED
    with pytest.raises(ValueError, match="BlockLSTM node 'cell' has cell_clip None; expected a float"):
        onnx_export.link(model)
    model.graph.node[0].attribute[0].ref_attr_name = "limit"
    with pytest.raises(ValueError, match="BlockLSTM node 'cell' has cell_clip of a function, but it is in none"):
        onnx_export.link(model)
    model = broken("BlockLSTM", attrs={"cell_clip": 3.0})
    model.graph.node[0].attribute.append(model.graph.node[0].attribute[0])
    with pytest.raises(ValueError, match="BlockLSTM node 'cell' has the attribute cell_clip twice"):
        onnx_export.link(model)


def test_a_node_without_a_name_is_called_by_its_result():
    model = broken(opset=14)
    model.graph.node[0].name = ""
    with pytest.raises(ValueError, match="GRUBlockCell node 'r' is in a model"):
        onnx_export.link(model)


@pytest.mark.parametrize("known", [{"value_info": [value("b", 2)]}, {"initializers": {"e": np.zeros(10)}}])
def test_one_type_is_enough(known):
    """Where nothing else is known: behind an op that nobody knows."""
    names = ["a", "b", "c_", "d", "e", "f"]
    model = broken(inputs=names, **known)
    unknown = [name for name in names if name not in known.get("initializers", {})]
    model.graph.node.insert(0, node("Unknown", ["x"], unknown, domain="elsewhere"))
    model.opset_import.append(helper.make_opsetid("elsewhere", 1))
    (made,) = onnx_export.link(model).functions
    assert made.doc_string.startswith("float64, ")


def test_not_a_model():
    with pytest.raises(TypeError, match=r"model is of type str; expected an onnx.ModelProto"):
        onnx_export.link("model.onnx")
