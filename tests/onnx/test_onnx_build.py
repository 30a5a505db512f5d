"""The graphs against the formulas: every op, dtype and form, on onnxruntime and on onnx.reference."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import pytest
from cases import SIZES, arguments, rng
from graphs import (
    FLOAT64,
    FORMS,
    LOOPS,
    PEEPHOLES,
    SEQUENCES,
    attributes,
    bound,
    checked,
    compare,
    exact,
    on_onnxruntime,
    on_reference,
    poisoned,
)

import onnx_export
from blockcell.optable import OPS
from onnx_export.cells.loops import SPLIT_MOST

DTYPES = [np.float64, np.float32, np.float16]


def draw(op, loop, seed, case):
    """Draw a configuration and arguments for it."""
    g = rng("onnx", op, loop, seed, case)
    sizes = {letter: int(g.integers(1, most)) for letter, most in {"T": 9, "B": 6, "I": 8, "H": 10}.items()}
    dtype = DTYPES[g.integers(3)]
    choices = {
        "forget_bias": [1.0, 0.0, -0.3, 0.7],
        "cell_clip": [3.0, 0.0, 0.3, -1.0],
        "use_peephole": [True, False],
        "activation": ["tanh", "relu", ("leaky_relu", 0.1), ("hard_sigmoid", 0.3, 0.4)],
    }
    names = [attribute.name for attribute in OPS[op].attributes]
    attrs = {name: choices[name][g.integers(len(choices[name]))] for name in names}
    n = int(g.integers(0, sizes["T"] + 1)) if OPS[op].sequence else None
    must = "T" if loop == "unroll" else None
    fixed = {letter: size if g.random() < 0.5 or letter == must else None for letter, size in sizes.items()}
    options = {"sizes": fixed, "functions": bool(g.integers(2)), "opset": int(g.integers(15, 22)), "loop": loop}
    options["static"] = bool(g.integers(2))
    args = arguments(op, sizes, dtype=dtype, seed=case, seq_len_max=n, **{"use_peephole": False, **attrs})
    return np.dtype(dtype), attrs, options, args


@pytest.mark.parametrize("case", range(6))
@pytest.mark.parametrize(("op", "loop"), FORMS)
def test_random_configurations(op, loop, case, seed):
    dtype, attrs, options, args = draw(op, loop, seed, case)
    print(f"{dtype}, {attrs}, {options}, seq_len_max={args.get('seq_len_max')}")
    model = checked(onnx_export.build(op, dtype=dtype, attrs=attrs, **options))
    given = poisoned(op, args) if OPS[op].sequence else args
    results = on_onnxruntime(model, given)
    assert all(result.dtype == dtype for result in results)
    compare(op, results, exact(op, args), bound(op, dtype))


@pytest.mark.meet(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("op", "loop"), FORMS)
def test_every_graph_is_valid(op, loop, dtype):
    """By ONNX's own check: symbolic sizes and fixed ones, functions and inlined, with and without what is optional."""
    must = {"T": SIZES["T"]} if loop == "unroll" else {}
    most = {"use_peephole": True, "forget_bias": 1.0, "cell_clip": 0.5, "activation": "elu"}
    least = {"use_peephole": False, "forget_bias": 0.0, "cell_clip": 0.0, "activation": "tanh"}
    names = {attribute.name for attribute in OPS[op].attributes}
    for values in (most, least) if names else (most,):
        attrs = {name: values[name] for name in names}
        for sizes, functions, static in itertools.product([must, SIZES], [True, False], [True, False]):
            options = {"sizes": sizes, "functions": functions, "static": static}
            checked(onnx_export.build(op, dtype=dtype, attrs=attrs, loop=loop, **options))


@pytest.mark.meet(2)
@pytest.mark.parametrize("functions", [True, False])
@pytest.mark.parametrize(("op", "loop"), [form for form in FORMS if form[1] != "loop"])
def test_reference(op, loop, functions):
    """Not the Loop: onnx.reference concatenates what the standard says to stack."""
    g = rng("reference", op, loop)
    for use_peephole in [True, False] if op in PEEPHOLES else [False]:
        sizes = {"T": 3, "B": int(g.integers(1, 4)), "I": int(g.integers(1, 5)), "H": int(g.integers(1, 6))}
        n = int(g.integers(1, 4)) if OPS[op].sequence else None
        args = arguments(op, sizes, dtype=np.float64, seq_len_max=n, use_peephole=use_peephole)
        model = onnx_export.build(
            op, dtype="float64", sizes=sizes, attrs=attributes(op, args), loop=loop, functions=functions
        )
        given = poisoned(op, args) if OPS[op].sequence else args
        compare(op, on_reference(model, given), exact(op, args), FLOAT64)


@pytest.mark.parametrize(("loop", "static"), [("scan", False), ("scan", True), ("unroll", True), ("loop", True)])
@pytest.mark.parametrize("op", SEQUENCES)
def test_every_seq_len_max(op, loop, static):
    """One model; what lies past seq_len_max is never read, and the results are exactly zero there."""
    use_peephole = {"use_peephole": True} if op in PEEPHOLES else {}
    model = onnx_export.build(
        op, dtype="float64", sizes={"T": SIZES["T"]}, attrs=use_peephole, loop=loop, static=static
    )
    for n in range(SIZES["T"] + 1):
        args = arguments(op, dtype=np.float64, seq_len_max=n)
        results = on_onnxruntime(model, poisoned(op, args))
        compare(op, results, exact(op, args), FLOAT64)
        for tensor, result in zip(OPS[op].outputs, results, strict=True):
            if tensor.shape.startswith("T "):
                assert (result[n:] == 0).all()


@pytest.mark.meet(2)
@pytest.mark.parametrize("rows", ["free", "fixed"])
@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("op", SEQUENCES)
def test_steps_that_are_cut_off(op, static, rows):
    """A few at once, or all by one Split; numbers of steps around multiples of what a static Split gives."""
    for T in (1, 2, 7, 8, 15, 50):
        sizes = SIZES | {"T": T}
        args = arguments(op, sizes, dtype=np.float32, seq_len_max=T - 1, use_peephole=False, cell_clip=0.0)
        fixed = sizes if rows == "fixed" else {letter: sizes[letter] for letter in "TH"}
        model = onnx_export.build(op, attrs=attributes(op, args), sizes=fixed, loop="unroll", static=static)
        compare(op, on_onnxruntime(model, poisoned(op, args)), exact(op, args), bound(op, np.float32))
        most = max(len(node.output) for node in model.functions[0].node if node.op_type == "Split")
        assert most <= SPLIT_MOST if static else most >= T


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("op", SEQUENCES)
def test_nothing_is_read_at_length_zero(op, loop):
    """Not even what has no time axis."""
    args = arguments(op, dtype=np.float32, seq_len_max=0)
    dirty = {name: np.full_like(value, np.nan) for name, value in args.items() if isinstance(value, np.ndarray)}
    model = onnx_export.build(op, sizes=SIZES, attrs=attributes(op, args), loop=loop)
    assert all((result == 0).all() for result in on_onnxruntime(model, {**args, **dirty}))


@pytest.mark.meet(2)
@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("empty", ["B", "I", "H"])
@pytest.mark.parametrize(("op", "loop"), FORMS)
def test_sizes_of_zero(op, loop, empty, fixed):
    sizes = {**SIZES, empty: 0}
    args = arguments(op, sizes, dtype=np.float64)
    model = onnx_export.build(
        op,
        dtype="float64",
        sizes=sizes if fixed else {"T": SIZES["T"]},
        attrs=attributes(op, args),
        loop=loop,
    )
    compare(op, on_onnxruntime(checked(model), args), exact(op, args), FLOAT64)


@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("op", SEQUENCES)
def test_no_steps(op, fixed):
    """A graph without a loop; nothing but sizes comes from its inputs, of which one is left where they are fixed."""
    sizes = {**SIZES, "T": 0}
    args = arguments(op, sizes, dtype=np.float32)
    model = onnx_export.build(op, sizes=sizes if fixed else {"T": 0}, attrs=attributes(op, args), functions=False)
    assert not {node.op_type for node in checked(model).graph.node} & {"Scan", "Loop", "MatMul", "Gemm"}
    assert len(model.graph.input) == 1 or not fixed
    dirty = {name: np.full_like(value, np.nan) for name, value in args.items() if isinstance(value, np.ndarray)}
    compare(op, on_onnxruntime(model, args | dirty), exact(op, args), 0)


# ------------------------------------------------------------------------------------------------------ what is special
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("op", ["BlockLSTM", "block_gru", "block_gru_reset_after"])
def test_states_of_float16_are_rounded_at_every_step(op, loop):
    """2048 is where half counts in twos: adding a half at each step changes nothing, unless a state stays in float."""
    T = 20
    args = arguments(op, {"T": T, "B": 1, "I": 1, "H": 1}, dtype=np.float16, use_peephole=False)
    args = {name: np.zeros_like(value) if isinstance(value, np.ndarray) else value for name, value in args.items()}
    if op == "BlockLSTM":  # f and i are 1, ci is 0.5
        args |= {"forget_bias": 0.0, "cell_clip": 0.0}
        args["b"][:] = [30, np.arctanh(0.5), 30, 0]
        args["cs_prev"][:] = 2048
    else:  # u is 0.9998: the old state less a part of 2048 that is less than half of its last place
        args["b_ru"][:] = [0, 8.5]
        args["h_prev"][:] = 2048
    model = onnx_export.build(op, dtype="float16", sizes={"T": T}, attrs=attributes(op, args), loop=loop)
    state = dict(zip(OPS[op].result._fields, on_onnxruntime(model, args), strict=True))
    assert (state["cs" if op == "BlockLSTM" else "h"] == 2048).all()


@pytest.mark.parametrize("loop", LOOPS)
def test_the_lstms_h_of_float16_is_rounded_at_every_step(loop):
    """i_bar is 2^15 h less 2^15 times the h that half has: 0, unless a step gets an h that is not rounded."""
    args = arguments("BlockLSTM", {"T": 5, "B": 1, "I": 1, "H": 1}, dtype=np.float16, use_peephole=False)
    args = {name: np.zeros_like(value) if isinstance(value, np.ndarray) else value for name, value in args.items()}
    args |= {"forget_bias": 0.0, "cell_clip": 0.0}
    args["cs_prev"][:] = 0.3  # which stays, as f is 1 and ci is 0
    h = np.tanh(args["cs_prev"].astype(np.float32))
    args["h_prev"][:] = h
    assert abs(h - args["h_prev"]).max() > 2**-14
    args["w"][1, 0] = 2**15
    args["b"][:] = [-(2**15) * args["h_prev"].item(), 0, 30, 30]
    model = onnx_export.build(
        "BlockLSTM", dtype="float16", sizes={"T": 5}, attrs=attributes("BlockLSTM", args), loop=loop
    )
    states = dict(zip(OPS["BlockLSTM"].result._fields, on_onnxruntime(model, args), strict=True))
    assert (states["i"] == 0.5).all() and (states["h"] == args["h_prev"]).all()


@pytest.mark.parametrize("name", ["forget_bias", "cell_clip"])
def test_attributes_have_the_precision_of_the_dtype(name):
    """Doubles for float64; and float16 rounds them to half, as TensorFlow does."""
    args = arguments("LSTMBlockCell", dtype=np.float64, use_peephole=False, **{name: 0.3})
    model = onnx_export.build("LSTMBlockCell", dtype="float64", attrs=attributes("LSTMBlockCell", args))
    compare("LSTMBlockCell", on_onnxruntime(model, args), exact("LSTMBlockCell", args), FLOAT64)
    for model in (onnx_export.build("LSTMBlockCell", dtype="float16", attrs={name: value}, functions=False)
                  for value in (0.3, float(np.float16(0.3)))):  # fmt: skip
        constants = [onnx.numpy_helper.to_array(node.attribute[0].t) for node in model.graph.node
                     if node.op_type == "Constant"]  # fmt: skip
        assert any((value == np.float32(np.float16(0.3))).any() for value in constants)


@pytest.mark.parametrize(("cell_clip", "clips"), [(3.0, True), (0.0, False), (-1.0, False), (np.inf, False),
                                                  (np.nan, False), (1e-9, True)])  # fmt: skip
def test_clip_is_on_above_zero(cell_clip, clips):
    args = arguments("LSTMBlockCell", dtype=np.float64, use_peephole=False, cell_clip=cell_clip)
    args["cs_prev"][0, 0] = np.nan
    model = onnx_export.build("LSTMBlockCell", dtype="float64", attrs={"cell_clip": cell_clip}, functions=False)
    assert ("Clip" in {node.op_type for node in model.graph.node}) is clips
    results, expected = on_onnxruntime(model, args), exact("LSTMBlockCell", args)
    for result, right in zip(results, expected, strict=True):
        np.testing.assert_array_equal(np.isnan(result), np.isnan(right))
        np.testing.assert_allclose(result, right, rtol=0, atol=1e-14)


@pytest.mark.meet(1)
@pytest.mark.parametrize("use_peephole", [True, False])
@pytest.mark.parametrize("op", OPS)
def test_inputs_are_the_arguments_that_matter(op, use_peephole):
    """Changing any input changes a result; the table knows all others, and without peephole cs of a cell's gradient."""
    attrs = {"use_peephole": use_peephole} if op in PEEPHOLES else {}
    model = onnx_export.build(op, dtype="float64", attrs=attrs)
    names = [value.name for value in model.graph.input]
    table = OPS[op]
    left_out = {t.name for t in table.inputs if not t.read or (t.peephole and not use_peephole)}
    if op in ("LSTMBlockCellGrad", "lstm_block_cell_vjp") and not use_peephole:
        left_out.add("cs")
    arguments_ = ["seq_len_max"] * table.sequence + [tensor.name for tensor in table.inputs]
    assert names == [name for name in arguments_ if name not in left_out]
    assert [value.name for value in model.graph.output] == list(table.result._fields)
    args = arguments(op, dtype=np.float64, use_peephole=use_peephole)
    before = on_onnxruntime(model, args)
    for name in names:
        changed = {**args, name: args[name] - 1 if name == "seq_len_max" else args[name] + 0.1}
        after = on_onnxruntime(model, changed)
        assert any((a != b).any() for a, b in zip(before, after, strict=True)), name


# --------------------------------------------------------------------------------------------------------- the model
@pytest.mark.parametrize("op", OPS)
def test_functions_and_nodes(op):
    attrs = {"use_peephole": True} if op in PEEPHOLES else {}
    model = onnx_export.build(op, attrs=attrs)
    (node,), (function,) = model.graph.node, model.functions
    assert (node.domain, node.op_type) == (function.domain, function.name) == ("blockcell", op)
    assert {(entry.domain, entry.version) for entry in model.opset_import} == {("", 18), ("blockcell", 1)}
    assert model.ir_version == 8
    inlined = onnx_export.build(op, attrs=attrs, functions=False)
    assert not inlined.functions
    assert [(entry.domain, entry.version) for entry in inlined.opset_import] == [("", 18)]
    assert [inner.op_type for inner in inlined.graph.node] == [inner.op_type for inner in function.node]


def test_shapes_are_those_of_the_table():
    model = onnx_export.build("BlockLSTMGrad", sizes={"B": 3, "H": 5, "T": None}, attrs={"use_peephole": True})
    shapes = {
        value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in [*model.graph.input, *model.graph.output]
    }
    assert shapes["x"] == ["T", 3, "I"]
    assert shapes["w"] == shapes["w_grad"] == ["I+5", 20]
    assert shapes["seq_len_max"] == []
    symbolic = onnx_export.build("BlockLSTM")
    (w,) = (value for value in symbolic.graph.input if value.name == "w")
    assert [dim.dim_param for dim in w.type.tensor_type.shape.dim] == ["I+H", "4*H"]


@pytest.mark.parametrize("op", SEQUENCES)
def test_sequences_of_full_length_are_spared_the_masks(op):
    attrs = {"use_peephole": True} if op in PEEPHOLES else {}
    model = onnx_export.build(op, attrs=attrs, functions=False)
    assert "Where" not in {node.op_type for node in model.graph.node}
    (node,) = (node for node in model.graph.node if node.op_type == "If")
    whole, cut = (
        [inner.op_type for inner in onnx.helper.get_node_attr_value(node, branch).node]
        for branch in ("then_branch", "else_branch")
    )
    assert "Where" not in whole
    conditions = ["Greater", "Range", "Less", "Unsqueeze", "Slice"]  # which steps are live, for the masks alone
    assert [op_type for op_type in cut if op_type not in ("Where", *conditions)] == [
        op_type for op_type in whole if op_type not in conditions
    ]
    static = onnx_export.build(op, attrs=attrs, functions=False, static=True)
    assert {"If", "Scan"} & {node.op_type for node in static.graph.node} == {"Scan"}


@pytest.mark.parametrize(
    ("op", "within", "products", "products_outside"),
    [
        ("BlockLSTM", 18, 1, 1),
        ("BlockLSTMGrad", 8, 1, 2),
        ("block_gru_grad", 10, 2, 4),
        ("block_gru_reset_after", 10, 1, 1),
        ("block_gru_reset_after_grad", 5, 1, 3),
    ],
)
def test_only_what_must_runs_in_the_loop(op, within, products, products_outside):
    """The product with x, the derivatives' factors and the weights' gradients are outside."""
    attrs = {"use_peephole": True, "cell_clip": 1.0} if op == "BlockLSTM" else {}
    attrs |= {"use_peephole": True} if op == "BlockLSTMGrad" else {}
    model = onnx_export.build(op, attrs=attrs, functions=False, static=True)
    (node,) = (node for node in model.graph.node if node.op_type == "Scan")
    inside = [
        inner.op_type for inner in onnx.helper.get_node_attr_value(node, "body").node if inner.op_type != "Identity"
    ]
    outside = [inner.op_type for inner in model.graph.node]
    assert (inside.count("MatMul") + inside.count("Gemm"), len(inside)) == (products, within)
    assert outside.count("MatMul") + outside.count("Gemm") == products_outside


# ------------------------------------------------------------------------------------------------------------ mistakes
@pytest.mark.parametrize(
    ("op", "options", "message"),
    [
        ("LSTM", {}, "op is 'LSTM'; expected one of GRUBlockCell, GRUBlockCellGrad, LSTMBlockCell"),
        ("BlockLSTM", {"dtype": "bfloat16"}, "dtype is 'bfloat16'; expected float32, float64 or float16"),
        ("BlockLSTM", {"dtype": "int64"}, "dtype is 'int64'; expected float32"),
        ("BlockLSTM", {"sizes": {"N": 3}}, "sizes has 'N'; expected the letters T, B, I, H"),
        ("BlockLSTM", {"sizes": {"T": -1}}, r"sizes\['T'\] is -1; expected an integer >= 0 or None"),
        ("BlockLSTM", {"sizes": {"T": 2.0}}, r"sizes\['T'\] is 2.0; expected an integer"),
        ("BlockLSTM", {"attrs": {"clip": 1.0}}, "attrs has 'clip'; expected forget_bias, cell_clip, use_peephole"),
        ("BlockLSTMV2", {"attrs": {"forget_bias": 1.0}}, "attrs has 'forget_bias'; expected cell_clip, use_peephole"),
        ("GRUBlockCell", {"attrs": {"cell_clip": 1.0}}, "attrs has 'cell_clip'; the op has none"),
        ("BlockLSTM", {"attrs": {"cell_clip": "3"}}, r"attrs\['cell_clip'\] is '3'; expected a real number"),
        ("BlockLSTM", {"attrs": {"cell_clip": 10**400}}, "is 1000.*000; expected a number that a float holds"),
        ("BlockLSTM", {"attrs": {"use_peephole": 1}}, r"attrs\['use_peephole'\] is 1; expected True or False"),
        ("BlockLSTMGrad", {}, r"attrs\['use_peephole'\] is None; expected True or False"),
        ("block_rnn", {"attrs": {"activation": "gelu"}}, r"attrs\['activation'\] is 'gelu'; expected one of tanh"),
        ("block_rnn", {"attrs": {"activation": 3}}, r"attrs\['activation'\] is 3; expected a name or a tuple"),
        ("BlockLSTM", {"loop": "while"}, "loop is 'while'; expected one of scan, unroll, native, loop"),
        ("BlockLSTM", {"loop": "native"}, "ONNX's LSTM gives no gates; expected 'scan', 'unroll' or 'loop', or"),
        ("block_gru_grad", {"loop": "native"}, "ONNX's GRU has no gradient; expected 'scan', 'unroll' or 'loop'"),
        ("GRUBlockCell", {"loop": "native"}, "a cell has no loop; expected 'scan', the default"),
        ("BlockLSTM", {"loop": "unroll"}, r"loop='unroll' writes every step out and so needs sizes\['T'\]"),
        ("BlockLSTM", {"opset": 14}, "opset is 14; expected an integer from 15 to"),
        ("BlockLSTM", {"opset": 1000}, f"to {onnx.defs.onnx_opset_version()}, the newest that onnx"),
    ],
)
def test_mistakes(op, options, message):
    with pytest.raises(ValueError, match=message):
        onnx_export.build(op, **options)
