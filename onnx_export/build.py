"""`build`: the ONNX model of an op."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import DTypeLike
from onnx import FunctionProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from blockcell.optable import LETTERS, Array, Tensor, sizes_of

from .body import CELLS, op_nodes
from .config import Config, Value, input_tensors, make_config
from .nodes import DOMAIN, make_model, make_node, names_read, names_written, nodes_of, select_needed

NODE_WEIGHTS = ("W", "R", "B", "P")  # what ONNX's own LSTM, GRU and RNN call their weights
# The forms for each provider of onnxruntime, where the caller chooses no loop: the first possible one is built.
FORMS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "cpu": [{"loop": "scan"}],
    "cuda": [{"loop": "native", "static": True}, {"loop": "scan", "static": True}],
    "webgpu": [{"loop": "native", "static": True}, {"loop": "unroll", "static": True}],
}
# Which of ONNX's own cells WebGPU has, with which activations, and the only activations that cuDNN has.
WEBGPU_CELLS, WEBGPU_ACTIVATIONS = ("LSTM", "GRU"), {b"Sigmoid", b"Tanh", b"Relu"}
CUDNN_ACTIVATIONS = {"LSTM": [b"Sigmoid", b"Tanh", b"Tanh"], "GRU": [b"Sigmoid", b"Tanh"], "RNN": [b"Tanh"]}
# Nodes that the CPU runs, which fetches the states from the GPU at every step.
SLOW = {"webgpu": ("Scan", "Loop")}


def make_in_form(
    caller: str, provider: str, loop: str | None, static: bool, make: Callable[[str, bool], ModelProto]
) -> ModelProto:
    """Return ``make(loop, static)`` with the given loop or, without one, with the provider's first possible form."""
    if provider not in FORMS:
        raise ValueError(f"{caller}: provider is {provider!r}; expected one of {', '.join(FORMS)}")
    forms = FORMS[provider]
    if loop is not None:
        return make(loop, static or bool(forms[0].get("static")))
    refusals = []
    for form in forms:
        try:
            model = make(form["loop"], static or bool(form.get("static")))
            if form["loop"] == "native":
                _check_kernels(caller, provider, model)
            return model
        except ValueError as error:
            refusals.append(error)
    if len({str(error) for error in refusals}) == 1:  # of an argument that is wrong in any form
        raise refusals[0]
    reasons = "; ".join(str(error).removeprefix(f"{caller}: ") for error in refusals)
    raise ValueError(f"{caller}: there is no form for provider={provider!r}: {reasons}")


def _check_kernels(caller: str, provider: str, model: ModelProto) -> None:
    """Raise a ValueError if the provider does not have all of ONNX's own cells in the model."""
    missing_cell = _missing_on_cudnn if provider == "cuda" else _missing_on_webgpu
    for node in nodes_of(model):
        if node.op_type in CELLS and (cell := missing_cell(node)):
            raise ValueError(f"{caller}: loop='native' is not possible: {provider!r} has no {cell}; expected another")


def _missing_on_webgpu(node: NodeProto) -> str:
    """Return what WebGPU lacks for an LSTM, GRU or RNN, "" if it has a kernel."""
    if node.op_type not in WEBGPU_CELLS:
        return node.op_type
    used = _attributes(node).get("activations", [])
    return "" if WEBGPU_ACTIVATIONS.issuperset(used) else f"{node.op_type} with {b', '.join(used).decode()}"


def _missing_on_cudnn(node: NodeProto) -> str:
    """Return what cuDNN lacks for an LSTM, GRU or RNN, "" if it computes the node."""
    attributes, default = _attributes(node), CUDNN_ACTIVATIONS[node.op_type]
    used = attributes.get("activations", default)
    if used != default * (len(used) // len(default)):
        return f"{node.op_type} with {b', '.join(used).decode()}"
    if node.op_type == "GRU" and not attributes.get("linear_before_reset"):
        return "GRU that resets before the product"
    if node.op_type == "LSTM" and (attributes.get("input_forget") or any(node.input[7:])):
        return "LSTM with peepholes or coupled gates"
    return ""


def _attributes(node: NodeProto) -> dict[str, Any]:
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}


def op_function(c: Config, name: str | None = None) -> FunctionProto:
    """Return the op as a function of the domain `blockcell`; its inputs are the arguments that matter."""
    nodes, inputs = op_nodes(c)
    outputs = [tensor.name for tensor in c.op.outputs]
    opset = [helper.make_opsetid("", c.opset)]
    result: FunctionProto = helper.make_function(DOMAIN, name or c.op.name, inputs, outputs, nodes, opset)
    result.doc_string = _doc(c)
    return result


def node_weights(c: Config, weights: Mapping[str, Array]) -> dict[str, Array]:
    """Return weights in the layout of ONNX's own LSTM, GRU or RNN; none where a size is 0."""
    from onnx.reference import ReferenceEvaluator  # takes a while to load, and few need it

    nodes, _ = op_nodes(c)
    names = [name for name in NODE_WEIGHTS if name in names_written(nodes)]
    nodes = select_needed(nodes, names)
    inputs = [name for name in weights if name in names_read(nodes)]
    packing = helper.make_function(DOMAIN, "packed", inputs, names, nodes, [helper.make_opsetid("", c.opset)])
    with np.errstate(all="ignore"):
        arrays = ReferenceEvaluator(packing).run(names, {name: weights[name] for name in inputs}, attributes={})
    return dict(zip(names, arrays, strict=True))


def build(
    op: str,
    *,
    dtype: DTypeLike = "float32",
    sizes: Mapping[str, int | None] | None = None,
    attrs: Mapping[str, Value] | None = None,
    provider: str = "cpu",
    loop: str | None = None,
    functions: bool = True,
    opset: int = 18,
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
    loop : {"scan", "unroll", "native", "loop"}, optional
        What runs the steps of a sequence: a Scan; nothing, as every step is written out (needs ``sizes["T"]``); ONNX's
        own LSTM, GRU or RNN (forward without clip, needs ``sizes["H"]``), which leaves only the LSTM's cs to a Scan; a
        Loop.
        The results are the same. None: "scan"; for "cuda" "native" where cuDNN computes it, else "scan"; for "webgpu",
        where each step of a Scan copies arrays to the host and back, "native" where it is possible, else "unroll".
    functions : bool
        True: one node, named like the op, with a body that the model brings along. False: the body's nodes themselves,
        for runtimes that know no functions. With ``static``, a Scan's body then ends in copies of its results, as tract
        demands.
    opset : int
        The version of ONNX's operators, 15 or newer.
    static : bool
        A Scan form has two versions of the loop, of which the one for sequences of full length is spared the masks that
        zero what lies past ``seq_len_max``; and steps that are written out read their arrays from one Split. True: for
        runtimes that do without: only the other version, in "native" a loop only where T is free, no Split with more
        than 7 outputs, which WebGPU needs, and no Concat with more than 32 inputs, which CUDA graphs do not capture.
        For the providers of a GPU it is True in any case.

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
    Source of the equations: `blockcell.formulas`. The texts of the graphs: `onnx_export.lstm`, `onnx_export.gru`,
    `onnx_export.gru_reset_after`, `onnx_export.rnn`, `onnx_export.activations`.
    """

    def make(loop: str, static: bool) -> ModelProto:
        return _model(op, replace(make_config(op, dtype, sizes, attrs, loop, opset, static), inlined=not functions))

    return make_in_form(op, provider, loop, static, make)


def _model(op: str, c: Config) -> ModelProto:
    """Return the model of an op: a call of its function or, inlined, the nodes themselves."""
    functions: list[FunctionProto] = []
    if c.inlined:
        nodes, inputs = op_nodes(c)
    else:
        functions = [op_function(c)]
        inputs = list(functions[0].input)
        nodes = [make_node(functions[0].name, inputs, functions[0].output, name=op, domain=DOMAIN)]
    graph = helper.make_graph(
        nodes,
        c.op.name,
        [_value_info(c, tensor) for tensor in input_tensors(c.op) if tensor.name in inputs],
        [_value_info(c, tensor) for tensor in c.op.outputs],
        doc_string=_doc(c),
    )
    metadata = {"op": op, "attributes": json.dumps(c.attrs), "loop": c.loop}
    return make_model(graph, c.opset, functions, metadata, with_domain=not c.inlined)


def _value_info(c: Config, tensor: Tensor) -> ValueInfoProto:
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


def _doc(c: Config) -> str:
    """Return the equations, from the module that has the text."""
    return f"{c.op.name} of blockcell.{c.op.module}.\n\n{c.module.__doc__}"
