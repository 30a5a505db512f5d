"""`build`: the ONNX model of an op."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from numpy.typing import DTypeLike
from onnx import FunctionProto, ModelProto, TensorProto, ValueInfoProto, helper

from blockcell.optable import LETTERS, Tensor, sizes_of

from .cells.body import doc_string, op_function, op_nodes
from .cells.config import DEFAULT_OPSET, Config, Form, Value, input_tensors, op_config
from .forms import choose_form
from .nodes import DOMAIN, make_model, make_node


def build(
    op: str,
    *,
    dtype: DTypeLike = "float32",
    sizes: Mapping[str, int | None] | None = None,
    attrs: Mapping[str, Value] | None = None,
    provider: str = "cpu",
    loop: str | None = None,
    functions: bool = True,
    opset: int = DEFAULT_OPSET,
    static: bool = False,
) -> ModelProto:
    """Build an op as an ONNX model.

    The graph's inputs and outputs have the op's argument and result names. Arguments that cannot influence the results
    (the peephole weights without ``use_peephole``, say) are not inputs; attributes are constants in the graph.
    ``seq_len_max`` is an int64 scalar input; any value from 0 to T is right when T >= 1.

    Parameters
    ----------
    op : str
        Any op: ``"BlockLSTM"``, ``"block_gru_grad"``, ...
    dtype : str or numpy dtype
        float32, float64 or float16. float16 is for storage: a step computes in float32, as `blockcell.raw_ops` does.
    sizes : dict, optional
        Any of T, B, I and H that are to be fixed; those missing or None stay symbolic. A cell ignores T.
        With T = 0, which has no step to run, all results are zeros.
    attrs : dict, optional
        The op's attributes, such as ``forget_bias``; TensorFlow's defaults for those missing. ``use_peephole`` of a
        gradient has no default. An ``activation`` is a name or a tuple, as of `blockcell.RNN`.
    provider : {"cpu", "cuda", "webgpu"}
        Which of onnxruntime's providers is to run the model; chooses ``loop`` where it is None, and ``static``.
    loop : {"scan", "unroll", "loop"}, optional
        What runs the steps of a sequence: a Scan; nothing, as every step is written out (needs ``sizes["T"]``); a Loop.
        The results are the same. None: "scan"; for "webgpu", where each step of a Scan copies arrays to the host and
        back, "unroll".
    functions : bool
        True: one node, named like the op, with a body that the model brings along. False: the body's nodes themselves,
        for runtimes that know no functions. With ``static``, a Scan's body then ends in copies of its results, as tract
        demands.
    opset : int
        The version of ONNX's operators, 15 or newer.
    static : bool
        A Scan form has two versions of the loop, of which the one for sequences of full length is spared the masks that
        zero what lies past ``seq_len_max``; and steps that are written out read their arrays from one Split. True: for
        runtimes that do without: only the other version, no Split with more than 7 outputs, which WebGPU needs, and no
        Concat with more than 32 inputs, which CUDA graphs do not capture. For the providers of a GPU it is True in any
        case.

    Returns
    -------
    onnx.ModelProto
        Its metadata say which version of blockcell made it of which op, with which attributes.

    Raises
    ------
    ValueError
        An argument is not what is listed above; the message says what is possible.

    Notes
    -----
    Source of the equations: `blockcell.formulas`. The texts of the graphs: `onnx_export.cells` and
    `onnx_export.activations`.
    """

    form = Form(opset=opset, static=static, inlined=not functions)
    form = choose_form(op, provider, loop, form, lambda form: [op_config(op, dtype, sizes, attrs, form)])
    return _model(op_config(op, dtype, sizes, attrs, form))


def _model(c: Config) -> ModelProto:
    """Return the model of an op: a call of its function or, inlined, the nodes themselves."""
    functions: list[FunctionProto] = []
    if c.form.inlined:
        nodes, inputs = op_nodes(c)
    else:
        functions = [op_function(c)]
        inputs = list(functions[0].input)
        nodes = [make_node(functions[0].name, inputs, functions[0].output, name=c.op.name, domain=DOMAIN)]
    graph = helper.make_graph(
        nodes,
        c.op.name,
        [_typed_value(c, tensor) for tensor in input_tensors(c.op) if tensor.name in inputs],
        [_typed_value(c, tensor) for tensor in c.op.outputs],
        doc_string=doc_string(c),
    )
    metadata = {"op": c.op.name, "attributes": json.dumps(c.attrs), "loop": c.form.loop}
    return make_model(graph, c.form.opset, functions, metadata, with_domain=not c.form.inlined)


def _typed_value(c: Config, tensor: Tensor) -> ValueInfoProto:
    """Return a tensor's type and shape; free sizes are symbols such as ``I+H`` and ``4*H``."""
    if tensor.name == "seq_len_max":
        return helper.make_tensor_value_info(tensor.name, TensorProto.INT64, [])
    shape: list[int | str] = []
    for word in tensor.shape.split():
        # onnxruntime 1.31's fusion of MatMul and Add fails on a size that it knows to be 0: that one stays unknown.
        free = [letter for letter in word if letter in LETTERS and not c.sizes.get(letter)]
        if free:
            product = re.sub(r"(\d)([A-Z])", r"\1*\2", word)
            shape.append("".join(str(c.sizes.get(letter, letter)) for letter in product))
        else:
            shape.append(sizes_of(word, dict(c.sizes))[0])
    return helper.make_tensor_value_info(tensor.name, helper.np_dtype_to_tensor_dtype(c.dtype), shape)
