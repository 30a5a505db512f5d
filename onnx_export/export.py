"""`export`: a layer as a model. The graph, the weights as a model has them and the file are in ``layers``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from typing import Any

import numpy as np
from numpy.typing import DTypeLike
from onnx import ModelProto

from blockcell.errors import short
from blockcell.layers import BaseLayer, Dense, Layer, Quantized
from blockcell.optable import Array
from blockcell.quantization import FLOAT32

from .cells import integers
from .cells.config import DEFAULT_OPSET, REDUCE_AXES_OPSET, Form, check_dtype, check_sizes
from .forms import choose_form
from .layers.layer_graph import LayerGraph
from .layers.weights import is_int8, stored_weights
from .layers.writing import check_layer_and_path, write_model

LARGEST = 2**31 - 2**20  # bytes: protobuf's limit, less what a model has beside its weights


def export(
    layer: BaseLayer,
    path: str | PathLike[str] | None,
    *,
    streaming: bool = False,
    train: bool = False,
    provider: str = "cpu",
    loop: str | None = None,
    dtype: DTypeLike | None = None,
    activations: str | None = None,
    lengths: bool = True,
    reset: bool = False,
    state: bool = True,
    sizes: Mapping[str, int | None] | None = None,
    functions: bool = True,
    opset: int = DEFAULT_OPSET,
    static: bool = False,
) -> ModelProto:
    """Write a layer as an ONNX model, weights included.

    The model computes what the layer's call does (`blockcell.LSTM`, `blockcell.GRU`, `blockcell.RNN` and
    `blockcell.Dense` have the equations). A name is that of an argument of the layer, or of a state or weight of one of
    its cells or dense layers, as in ``layer.weights``; it is the same in every model of the layer. The names of states
    and weights begin with their place in the layer: nothing for a cell or Dense alone, ``fw.`` or ``bw.``, ``0.``,
    ``1.bw.``. For a layer of dtype D, the inputs are

    ===================  ==========  =====  ==========================================================================
    ``x``                [T, B, I]   D
    ``lengths``          [B]         int64  steps of each row that count, 0 to T (with ``lengths``)
    ``reset``            [T, B]      bool   where a new episode starts (with ``reset``)
    ``0.fw.cs_prev``     [B, H]      D      cell state of an LSTM before the first step (with ``state``)
    ``0.fw.h_prev``      [B, H]      D      output or state before the first step (with ``state``)
    ===================  ==========  =====  ==========================================================================

    and the outputs

    ===================  ==========  =====  ==========================================================================
    ``y``                [T, B, ..]  D      [B, ..] where a Dense with `last` stands at the end
    ``0.fw.cs``          [B, H]      D      cell state of an LSTM after each row's last step
    ``0.fw.h``           [B, H]      D      output or state after each row's last step
    ===================  ==========  =====  ==========================================================================

    With ``train``, the name of a gradient is that of the array with ``d_`` in front. ``d_y`` and those to the final
    state, ``d_0.fw.cs`` and ``d_0.fw.h``, are inputs, as are the weights, such as ``0.fw.w``, which change from call to
    call. ``d_x``, those to the first state, ``d_0.fw.cs_prev`` and ``d_0.fw.h_prev``, and those to the weights,
    ``d_0.fw.w``, are outputs. Inputs that are not there stand for zeros, and for rows of full length.

    With a projection, ``h`` and ``h_prev`` are [B, P].

    Without ``train`` the weights are initializers. ONNX's own nodes, of ``loop="native"``, have them in ONNX's layout,
    as ``0.fw.W``, ``0.fw.R``, ``0.fw.B`` and, with peepholes, ``0.fw.P``. Of a quantized layer an
    initializer of that name has a matrix' codes, and of int8 ``0.fw.w.scale`` a scale for each column, of ``0.fw.W``
    for each row.

    Parameters
    ----------
    layer : LSTM, GRU, RNN, Dense, Bidirectional, Stack, or one of them quantized
    path : path_like or None
        Where to write; the file is written as a whole or not at all. None: nowhere, the model is only returned.
    streaming : bool
        One step: x is [B, I] and y [B, H], the state is always an input, and there are no lengths and no resets.
    train : bool
        Whether the model also computes the gradients; it then has no weights of its own.
    provider : {"cpu", "cuda", "webgpu"}
        Which of onnxruntime's providers is to run the model; chooses ``loop`` where it is None, and ``static``, as in
        `build`.
    loop : {"scan", "unroll", "native", "loop"}, optional
        What runs the steps, as in `build`, or, of "native", ONNX's own LSTMs, GRUs and RNNs. "unroll" needs
        ``sizes["T"]``; "native" takes LSTMs that do not clip or project, GRUs and RNNs, with activations that ONNX's
        nodes have, neither gradients nor resets, and no float16. None: for "cuda" and "webgpu" "native" where the
        provider has such nodes, and else as in `build`.
    dtype : optional
        float32, float64 or float16; None for that of the layer. The weights are converted.
    activations : {"int8", "float32"}, optional
        Of a layer with matrices quantized to int8; "int8" unless given.

        - "int8": at every step rows are quantized and multiplied in integers, by standard operators that have the
          kernels' sums. The codes are unsigned then, with 128 for zero. Needs opset 18; "native" takes it of dense
          layers alone.
        - "float32": a small file that every runtime takes. The matrices become float32 outside the loop, by a Cast and
          a Mul, and nothing else is rounded: the model is that of ``layer.dequantize()``.

        Matrices in float16 become float32 outside the loop, by a Cast.
    lengths, reset, state : bool
        Which inputs there are beside x: the rows' lengths, where episodes start, and the state before the first step.
        Episodes start from a state of zeros: models have no `reset_state`.
    sizes : dict, optional
        T and B where they are to be fixed. Otherwise they are free; for runtimes T must be at least 1 then, while a
        `Session` takes 0, too.
    functions, opset, static
        As in `build`: cells are functions that the model brings along, or plain nodes, as dense layers and the cells of
        "native" always are; the version of ONNX's operators; Scans as tract demands them, with plain nodes, and no
        Split with more outputs than WebGPU lets it have.

    Returns
    -------
    onnx.ModelProto
        What was written.

    Raises
    ------
    TypeError
        ``layer`` is not a layer, or one with a backward direction is to stream, which begins at the last step.
    ValueError
        An argument is not what is listed above, or the weights have 2 GiB, more than ONNX holds in one file; the
        message says what is possible.
    OSError
        The file cannot be written.
    """
    check_layer_and_path("export", layer, path)
    if streaming and train:
        raise ValueError("export: streaming and train are both True; expected one: a gradient needs all steps")
    if streaming and not state:
        raise ValueError("export: state is False; expected True, as a step needs the state before it")
    if streaming and reset:
        raise ValueError("export: reset is True; expected False, as a step starts anew from a state of zeros")
    fixed = check_sizes("export", sizes, "TB", least=1)
    kind = check_dtype("export", layer.dtype if dtype is None else dtype)
    integer = _check_quantized(layer, kind, train, activations)
    stored = {} if train else stored_weights(layer, kind, integer)
    structure: Layer = layer.dequantize() if isinstance(layer, Quantized) else layer  # type: ignore[assignment]
    inputs = {"lengths": lengths and not streaming, "reset": reset, "state": state, "d_state": state}
    takes = [name for name, is_input in inputs.items() if is_input]

    def graph_in(form: Form) -> LayerGraph:
        # Tools such as quantize_dynamic look for a node of ONNX's own in the graph.
        form = replace(form, inlined=not functions or form.loop == "native")
        # Of the weights a loop "native" makes those of its nodes.
        return LayerGraph("export", structure, kind, fixed, form, takes, train, streaming, dict(stored), integer)

    size = sum(array.nbytes for array in stored.values())
    if size >= LARGEST:
        raise ValueError(f"export: the layer has {size} bytes of weights; a model holds less than {LARGEST}")
    form = Form(opset=opset, static=static)
    form = choose_form("export", provider, loop, form, lambda form: graph_in(form).configs())
    if integer:
        _check_integers(structure, stored, opset)
    return write_model("export", path, graph_in(form).model)


def _check_quantized(layer: BaseLayer, dtype: np.dtype[Any], train: bool, activations: str | None) -> bool:
    """Return whether products are to be in integers; raise an error unless a model can have the layer so."""
    if activations not in (None, FLOAT32, "int8"):
        raise ValueError(f"export: activations is {short(activations)}; expected 'int8' or 'float32'")
    if not isinstance(layer, Quantized):
        if activations is not None:
            message = f"export: activations is {activations!r} and the layer is not quantized"
            raise ValueError(f"{message}; expected layer.quantize('int8'), or no activations")
        return False
    if train:
        message = "export: layer is quantized and train is True"
        raise ValueError(f"{message}; expected the float32 layer: weights are inputs in training")
    if dtype != np.float32:
        raise ValueError(f"export: layer is quantized and dtype {dtype}; expected float32, which scales are in")
    return activations != FLOAT32 and any(name.endswith(".scale") for name in layer._arrays_of_file())


def _check_integers(layer: Layer, weights: Mapping[str, Array], opset: int) -> None:
    """Raise a ValueError unless a model of this opset can have its products in integers."""
    message = "export: activations is 'int8'"
    if opset < REDUCE_AXES_OPSET:
        raise ValueError(f"{message} and opset {opset}; expected {REDUCE_AXES_OPSET} or newer")
    for prefix, cell in layer._leaves().items():
        if not is_int8(cell, prefix, weights):
            continue
        for size in (cell.input_size, *([] if isinstance(cell, Dense) else [cell.hidden_size, cell.output_size])):
            if not 0 < size <= integers.MOST:
                where = f"{prefix.rstrip('.')} has" if prefix else "the layer has"
                raise ValueError(
                    f"{message}, and {where} rows of {size}; expected 1 to {integers.MOST} numbers in a row"
                )
