"""Weights from and to Keras, PyTorch, ONNX and TensorFlow 1 checkpoints, where the mathematics is the same.

None of these packages need be installed; only `to_onnx` and models given to `from_onnx` need ``onnx``.  What a layer of
blockcell cannot express is refused with a `ConversionError` that says why, and what to do instead.

Layers here read x as [T,B,I], time first.  Their defaults, forget_bias=0 and cell_clip=0, are what all of these but
TensorFlow 1 compute.  Dropout acts in training only, belongs to no weights, and is not converted.
"""

from __future__ import annotations

import math
import re
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .layers import GRU, LSTM, Bidirectional, Layer, Stack
from .optable import DTYPES, Array

if TYPE_CHECKING:
    import onnx

__all__ = ["ConversionError", "from_keras", "from_onnx", "from_tf1", "from_torch", "to_keras", "to_onnx", "to_torch"]

ORDERS = {  # of the gates, one letter each: input, forget, output and reset gate, update gate u, candidate c
    "LSTM": "icfo",  # the default of blockcell's layer
    "GRU": "ruc",
    "TF1 LSTM": "icfo",
    "Keras LSTM": "ifco",
    "Keras GRU": "urc",  # Keras writes z for u and h for c
    "PyTorch LSTM": "ifco",
    "ONNX LSTM": "iofc",
    "ONNX GRU": "urc",  # likewise
    "peepholes": "ifo",
    "ONNX peepholes": "iof",
}

_RESET_AFTER = (
    "It applies the reset gate after the product with the recurrent weights, TensorFlow's block GRU before it: these"
    " are different functions, for which no weights are equal. Train with reset_after=False (Keras) or GRUBlockCell,"
    " or use an LSTM"
)

Cell = LSTM | GRU


class ConversionError(ValueError):
    """What the one side computes, the other cannot express."""


def reorder(weights: Array, given: str, wanted: str, axis: int = -1) -> Array:
    """The gates along an axis in another order, such as ``reorder(b, "iofc", "icfo")``."""
    parts = dict(zip(given, np.split(weights, len(given), axis), strict=True))
    return np.concatenate([parts[gate] for gate in wanted], axis)


# -------------------------------------------------------------------------------------------------------------- Keras
def from_keras(source: Any, *, reset_after: bool | None = None) -> Layer:
    """A layer with the weights of a Keras LSTM or GRU.

    .. code-block:: python

        layer = convert.from_keras(model.get_layer("lstm"))
        y, state = layer(x.swapaxes(0, 1))          # Keras reads x as [B,T,I]

    Parameters
    ----------
    source : Keras layer, or sequence
        A ``keras.layers.LSTM``, ``GRU`` or ``Bidirectional`` of one of them; or what its ``get_weights()`` returned:
        ``[kernel, recurrent_kernel, bias]`` or, with ``use_bias=False``, the first two, and these twice for
        ``Bidirectional``. A list of any of these becomes a `blockcell.Stack`.
    reset_after : bool, optional
        Of a GRU given as arrays without a bias, whose shapes do not tell: must be False then.

    Returns
    -------
    LSTM, GRU, Bidirectional or Stack
        ``unit_forget_bias`` needs nothing: it only sets the bias that Keras starts from.

    Raises
    ------
    TypeError
        The source is none of these, or an array has a dtype other than float32, float64 and float16.
    ConversionError
        A GRU with ``reset_after=True``, which is Keras's default; activations other than tanh and sigmoid; a lone
        ``go_backwards=True``; a ``merge_mode`` other than "concat".
    ValueError
        The arrays' number or shapes are wrong, or they are those of a Bidirectional with I = H, which two stacked
        layers have too.

    Notes
    -----
    A GRU of TensorFlow's block cells multiplies h by the reset gate before the product with the recurrent kernel
    (``reset_after=False``), ``reset_after=True`` after it. These are different functions.
    """
    caller = "from_keras"
    if hasattr(source, "get_config"):
        return _keras_layer(caller, source)
    if isinstance(source, (str, bytes)) or not isinstance(source, Sequence):
        expected = (
            "expected a Keras LSTM, GRU or Bidirectional layer, the arrays of its get_weights(), or a list of these"
        )
        raise TypeError(f"{caller}: the source is of type {type(source).__name__}; {expected}")
    if source and all(hasattr(part, "get_config") or isinstance(part, (list, tuple)) for part in source):
        return Stack([from_keras(part, reset_after=reset_after) for part in source])
    return _keras_arrays(caller, source, reset_after)


def to_keras(layer: Layer) -> list[Any]:
    """The arrays for ``set_weights`` of a Keras layer.

    .. code-block:: python

        keras_layer.set_weights(convert.to_keras(layer))

    Parameters
    ----------
    layer : LSTM, GRU, Bidirectional or Stack
        For a ``keras.layers.LSTM``, a ``GRU`` with ``reset_after=False``, or a ``Bidirectional`` with its default
        ``merge_mode``, all with ``use_bias=True`` and the default activations.

    Returns
    -------
    list of ndarray
        ``[kernel, recurrent_kernel, bias]``, twice for `Bidirectional`; for a `Stack` a list of such lists.
        An LSTM's forget_bias is added into the bias.

    Raises
    ------
    ConversionError
        An LSTM has peepholes or clips its cell state: Keras has neither.
    """
    caller = "to_keras"
    if isinstance(layer, Stack):
        return [to_keras(part) for part in layer.layers]
    arrays: list[Array] = []
    for cell in _directions(caller, layer):
        _refuse_extras(caller, cell, "Keras's LSTM")
        arrays += _parts(cell, f"Keras {type(cell).__name__}")
    return arrays


def _is_of_keras(thing: Any, name: str) -> bool:
    """Whether it is the class or function of that name in one of Keras's modules; others may be called the same."""
    module = getattr(thing, "__module__", None) or ""
    ours = module.split(".")[0] in ("keras", "tf_keras", "tensorflow")
    return ours and getattr(sys.modules.get(module), name, None) is thing


def _keras_layer(caller: str, source: Any) -> Layer:
    kind = type(source).__name__
    if kind not in ("LSTM", "GRU", "Bidirectional") or not _is_of_keras(type(source), kind):
        raise ConversionError(
            f"{caller}: the source is a {type(source).__module__}.{kind}; expected Keras's LSTM, GRU or Bidirectional."
            f" Of a model, pass the recurrent layers of model.layers in a list; of another class that computes the"
            f" same, pass its get_weights()"
        )
    config = source.get_config()
    what = f"{caller}: {kind} {getattr(source, 'name', '')!r}"
    if kind == "Bidirectional":
        if config["merge_mode"] != "concat":
            raise ConversionError(
                f"{what} has merge_mode={config['merge_mode']!r}; only 'concat' can be expressed. Convert its"
                f" get_weights() and combine the two halves of y outside"
            )
        fw, bw = source.forward_layer, source.backward_layer
        if fw.get_config()["go_backwards"]:
            raise ConversionError(
                f"{what} has a forward layer with go_backwards=True; only the backward layer may run backwards"
            )
        return Bidirectional(_keras_cell(caller, fw), _keras_cell(caller, bw))
    if config["go_backwards"]:
        raise ConversionError(
            f"{what} has go_backwards=True; a lone layer runs forwards only. Convert its get_weights() and call the"
            f" layer with x[::-1]: y is then in Keras's order"
        )
    return _keras_cell(caller, source)


def _keras_cell(caller: str, source: Any) -> Cell:
    kind, config = type(source).__name__, source.get_config()
    what = f"{caller}: {kind} {getattr(source, 'name', '')!r}"
    if kind not in ("LSTM", "GRU") or not _is_of_keras(type(source), kind):
        raise ConversionError(f"{what} is neither Keras's LSTM nor its GRU")
    for name, expected in (("activation", "tanh"), ("recurrent_activation", "sigmoid")):
        function = getattr(source, name, None)
        if config[name] != expected or not _is_of_keras(function, expected):
            named = getattr(function, "__module__", None) if config[name] == expected else None
            found = f"{config[name]!r}{f' of {named}' if named else ''}"
            raise ConversionError(
                f"{what} has {name}={found}; only Keras's own {expected!r} can be expressed. Train it with that one, or"
                f" stay with Keras"
            )
    if kind == "GRU" and config["reset_after"]:
        raise ConversionError(f"{what} has reset_after=True (Keras's default). {_RESET_AFTER}")
    arrays = source.get_weights()
    if not arrays:
        raise ValueError(f"{what} has no weights yet; build it, or call it once")
    return _keras_arrays_of_cell(caller, arrays, reset_after=False)


def _keras_arrays(caller: str, source: Sequence[Any], reset_after: bool | None) -> Layer:
    if len(source) in (2, 3):
        return _keras_arrays_of_cell(caller, source, reset_after)
    if len(source) not in (4, 6):
        raise ValueError(
            f"{caller}: got {len(source)} arrays; expected kernel, recurrent_kernel and, unless use_bias=False, bias,"
            f" twice for Bidirectional"
        )
    half = len(source) // 2
    fw, bw = (_keras_arrays_of_cell(caller, part, reset_after) for part in (source[:half], source[half:]))
    if fw.input_size != bw.input_size or fw.hidden_size != bw.hidden_size:
        raise ValueError(
            f"{caller}: the two layers have I={fw.input_size}, H={fw.hidden_size} and I={bw.input_size},"
            f" H={bw.hidden_size}, so they are no Bidirectional; pass stacked layers as a list of lists"
        )
    if fw.input_size == fw.hidden_size:
        raise ValueError(
            f"{caller}: with I = H = {fw.hidden_size}, the {len(source)} arrays are those of a Bidirectional or of two"
            f" layers, one on the other; pass the Keras layers, or convert both halves of the list and put them into a"
            f" blockcell.Bidirectional or a blockcell.Stack"
        )
    return Bidirectional(fw, bw)


def _keras_arrays_of_cell(caller: str, source: Sequence[Any], reset_after: bool | None) -> Cell:
    names = ["kernel", "recurrent_kernel", "bias"][: len(source)]
    arrays = _arrays(caller, dict(zip(names, source, strict=True)))
    kernel, recurrent = arrays["kernel"], arrays["recurrent_kernel"]
    gates = _gates(caller, "recurrent_kernel", recurrent, axis=1)
    hidden = len(recurrent)
    bias = arrays.get("bias")
    if gates == 3 and bias is not None and bias.shape == (2, 3 * hidden):
        raise ConversionError(
            f"{caller}: bias has shape {bias.shape}, so this is a GRU with reset_after=True (Keras's default)."
            f" {_RESET_AFTER}"
        )
    if gates == 3 and bias is None and reset_after is not False:
        raise ConversionError(
            f"{caller}: a GRU without a bias does not show whether it has reset_after=True (Keras's default), which"
            f" cannot be expressed; pass the layer itself, or reset_after=False if that is so"
        )
    if bias is not None and bias.shape == (2 * gates * hidden,):
        raise ConversionError(
            f"{caller}: bias has shape {bias.shape}, that of Keras 2's CuDNNLSTM and CuDNNGRU, whose kernels are laid"
            f" out differently. Load the weights into a keras.layers.LSTM first, which converts them"
        )
    if bias is None:
        bias = np.zeros(gates * hidden, kernel.dtype)
    _shapes(caller, {"kernel": (kernel, (None, gates * hidden)), "bias": (bias, (gates * hidden,))})
    return _cell(f"Keras {'LSTM' if gates == 4 else 'GRU'}", kernel, recurrent, bias)


# ------------------------------------------------------------------------------------------------------------- PyTorch
def from_torch(source: Any, *, prefix: str | None = None) -> Layer:
    """A layer with the weights of a ``torch.nn.LSTM``.

    .. code-block:: python

        layer = convert.from_torch(torch.load("model.pt", weights_only=True), prefix="encoder.lstm.")

    Parameters
    ----------
    source : mapping of str to array_like, or module
        A state_dict, or anything like it (safetensors, numpy arrays), with PyTorch's names: ``weight_ih_l0``,
        ``weight_hh_l0``, ``bias_ih_l0``, ``bias_hh_l0``, ``_reverse`` for the other direction, ``_l1`` and so on.
        ``torch.nn.LSTMCell``'s names, without ``_l0``, are taken too.
    prefix : str, optional
        What stands before these names. Needed where the source has more than one LSTM; None looks for it.

    Returns
    -------
    LSTM, Bidirectional or Stack
        A `Stack` for more than one layer. ``bias_ih + bias_hh`` is the bias.

    Raises
    ------
    TypeError
        The source is no mapping, or a tensor cannot be read as an array of float32, float64 or float16.
    ConversionError
        A GRU, which resets after the product; a plain RNN; a projection (``proj_size``).
    ValueError
        Weights are missing or left over, or the prefix is not unique, or shapes are wrong.

    Notes
    -----
    PyTorch's states are ``(h, c)``, those here ``LSTMState(cs, h)``. ``batch_first`` belongs to the call:
    x is [T,B,I] here.
    """
    caller = "from_torch"
    if hasattr(source, "state_dict"):
        source = source.state_dict()
    if not isinstance(source, Mapping):
        expected = "expected a state_dict: names and tensors"
        raise TypeError(f"{caller}: the source is of type {type(source).__name__}; {expected}")
    found = [match for name in _names(caller, source) if (match := _TORCH_NAME.match(name))]
    prefixes = list(dict.fromkeys(match[1] for match in found))
    if prefix is None:
        if len(prefixes) != 1:
            which = f"several: {prefixes}; say which with prefix=" if prefixes else "none: no name ends in weight_hh_l0"
            raise ValueError(f"{caller}: expected the weights of one LSTM, found {which}")
        prefix = prefixes[0]
    elif prefix not in prefixes:
        raise ValueError(f"{caller}: no LSTM has the prefix {prefix!r}; there are {prefixes}")
    layers: list[Layer] = []
    for suffixes in _torch_suffixes(
        caller, prefix, {match.string[len(prefix) :] for match in found if match[1] == prefix}
    ):
        cells = [_torch_cell(caller, source, prefix, suffix) for suffix in suffixes]
        layers.append(Bidirectional(*cells) if len(cells) == 2 else cells[0])
    return layers[0] if len(layers) == 1 else Stack(layers)


_TORCH_NAME = re.compile(r"(|.*\.)(?:weight|bias)_(?:ih|hh|hr)[^.]*$")


def _torch_suffixes(caller: str, prefix: str, names: set[str]) -> list[list[str]]:
    """What the names of each layer's directions end in; every name must be there, and no others."""
    if projections := sorted(name for name in names if name.startswith("weight_hr")):
        raise ConversionError(
            f"{caller}: {prefix}{projections[0]} is a projection (proj_size), which the block cells do not have; train"
            f" with proj_size=0"
        )
    numbers = [int(match[1]) for name in names if (match := re.search(r"_l(\d+)(_reverse)?$", name))]
    directions = ["", "_reverse"] if any(name.endswith("_reverse") for name in names) else [""]
    kinds = ["weight_ih", "weight_hh"]
    if any(name.startswith("bias") for name in names):
        kinds += ["bias_ih", "bias_hh"]
    left, suffixes = set(names), []
    for layer in [f"_l{k}" for k in range(min(max(numbers), len(names)) + 1)] if numbers else [""]:
        suffixes.append([layer + direction for direction in directions])
        for name in (kind + suffix for suffix in suffixes[-1] for kind in kinds):
            if name not in left:
                raise ValueError(
                    f"{caller}: {prefix}{name} is missing; beside {prefix}{min(names)}, expected {', '.join(kinds)} for"
                    f" every layer and direction"
                )
            left.remove(name)
    if left:
        names_left = ", ".join(prefix + name for name in sorted(left))
        raise ValueError(f"{caller}: {names_left} would be left over; remove what is none of the LSTM's weights")
    return suffixes


def to_torch(layer: Layer, *, prefix: str = "") -> dict[str, Array]:
    """The weights under the names of a ``torch.nn.LSTM``'s state_dict.

    .. code-block:: python

        state = {name: torch.from_numpy(array) for name, array in convert.to_torch(layer).items()}
        torch.nn.LSTM(layer.input_size, layer.hidden_size).load_state_dict(state)

    Parameters
    ----------
    layer : LSTM, Bidirectional or Stack
        A stack's layers are all bidirectional or none is, and all have one H, as in PyTorch.
    prefix : str
        To put before the names.

    Returns
    -------
    dict of str to ndarray
        forget_bias is added into ``bias_ih``; ``bias_hh`` is zero.

    Raises
    ------
    ConversionError
        A GRU; peepholes; a clipped cell state; a stack that no single ``torch.nn.LSTM`` is.
    """
    caller = "to_torch"
    layers = layer.layers if isinstance(layer, Stack) else (layer,)
    if len({(type(part), part.hidden_size) for part in layers if isinstance(part, Layer)}) > 1:
        raise ConversionError(
            f"{caller}: the stack's layers differ in kind or in H; torch.nn.LSTM has one kind and one H for all"
            f" of them. Convert layer.layers one by one"
        )
    arrays: dict[str, Array] = {}
    for k, part in enumerate(layers):
        for cell, direction in zip(_directions(caller, part), ("", "_reverse"), strict=False):
            if isinstance(cell, GRU):
                raise ConversionError(
                    f"{caller}: the layer is a GRU, and torch.nn.GRU is another function. {_RESET_AFTER}"
                )
            _refuse_extras(caller, cell, "torch.nn.LSTM")
            kernel, recurrent, bias = _parts(cell, "PyTorch LSTM")
            suffix = f"_l{k}{direction}"
            arrays[f"{prefix}weight_ih{suffix}"] = np.ascontiguousarray(kernel.T)
            arrays[f"{prefix}weight_hh{suffix}"] = np.ascontiguousarray(recurrent.T)
            arrays[f"{prefix}bias_ih{suffix}"] = bias
            arrays[f"{prefix}bias_hh{suffix}"] = np.zeros_like(bias)
    return arrays


def _torch_cell(caller: str, source: Mapping[str, Any], prefix: str, suffix: str) -> LSTM:
    named = {name: prefix + name + suffix for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")}
    arrays = _arrays(caller, {name: source[name] for name in named.values() if name in source})
    kernel, recurrent = arrays[named["weight_ih"]], arrays[named["weight_hh"]]
    gates = _gates(caller, named["weight_hh"], recurrent, axis=0, known=(1, 3, 4))
    if gates == 3:
        raise ConversionError(
            f"{caller}: {named['weight_hh']} has shape {recurrent.shape}, (3H, H): a GRU. {_RESET_AFTER}"
        )
    if gates == 1:
        raise ConversionError(
            f"{caller}: {named['weight_hh']} has shape {recurrent.shape}, (H, H): a plain RNN, which has no gates;"
            f" there is no such layer here"
        )
    columns = len(recurrent)
    biases = {name: arrays[name] for name in (named["bias_ih"], named["bias_hh"]) if name in arrays}
    _shapes(caller, {named["weight_ih"]: (kernel, (columns, None))})
    _shapes(caller, {name: (bias, (columns,)) for name, bias in biases.items()})
    bias = sum(biases.values(), start=np.zeros(columns, kernel.dtype))
    cell = _cell("PyTorch LSTM", kernel.T, recurrent.T, bias)
    assert isinstance(cell, LSTM)
    return cell


# ---------------------------------------------------------------------------------------------------------------- ONNX
def from_onnx(source: Any, initializers: Mapping[str, Any] | None = None, *, name: str | None = None) -> Layer:
    """A layer with the weights of an ONNX LSTM or GRU node.

    .. code-block:: python

        layer = convert.from_onnx(onnx.load("model.onnx"), name="lstm_1")

    Parameters
    ----------
    source : onnx.ModelProto or onnx.NodeProto
        A model, or a node and its `initializers`.
    initializers : mapping of str to array_like, optional
        The values of a node's inputs W, R, B and P under the names that they have in the node.
    name : str, optional
        Of the node in a model, or of one of its outputs. Needed where it has more than one LSTM or GRU node.

    Returns
    -------
    LSTM, GRU or Bidirectional
        X, sequence_lens, initial_h and initial_c are what it gets when it is called: x, ``lengths=`` and ``state=``.
        ONNX's bidirectional Y is [T,2,B,H]; y here is [T,B,2H].

    Raises
    ------
    TypeError
        The source is neither a model nor a node, or weights have a dtype other than float32, float64 and float16.
    ConversionError
        ``clip``, ``input_forget=1``, ``linear_before_reset=1``, ``layout=1``, other activations than the default ones,
        ``direction="reverse"``, sequence_lens or initial states that are constant or that other nodes compute, unless
        these states are zero, weights that other nodes compute.
    ValueError
        The node is not found or has other inputs, attributes or shapes than ONNX says.
    """
    caller = "from_onnx"
    graph = getattr(source, "graph", None)
    if graph is not None:
        if initializers is not None:
            raise TypeError(f"{caller}: initializers belong to a node; a model has its own")
        source, initializers = _onnx_find(caller, graph, name)
    elif not hasattr(source, "op_type"):
        what = "expected an onnx.ModelProto or an onnx.NodeProto"
        raise TypeError(f"{caller}: the source is of type {type(source).__name__}; {what}")
    kind = source.op_type
    if kind not in ("LSTM", "GRU") or source.domain not in ("", "ai.onnx"):
        raise ConversionError(f"{caller}: the node is a {source.domain}::{kind}; expected an ONNX LSTM or GRU")
    what = f"{caller}: {kind} {source.name!r}"
    attributes = _onnx_attributes(what, source)
    direction = attributes["direction"].s.decode() if "direction" in attributes else "forward"
    directions = 2 if direction == "bidirectional" else 1
    _onnx_refuse(what, kind, attributes, direction)
    places = ("X", "W", "R", "B", "sequence_lens", "initial_h", "initial_c", "P")[: 8 if kind == "LSTM" else 6]
    if len(source.input) > len(places):
        raise ValueError(f"{what} has {len(source.input)} inputs; expected at most {len(places)}: {', '.join(places)}")
    given = {place: name for place, name in zip(places, source.input, strict=False) if name}
    values = initializers or {}
    _onnx_states(what, given, values, graph)
    for place in ("W", "R", "B", "P"):
        if place in given and given[place] not in values:
            raise ConversionError(
                f"{what}: its {place}, {given[place]!r}, is not among the initializers; if nodes compute it, fold"
                f" constants first, as onnxruntime does when it saves an optimized model"
            )
    if missing := [place for place in ("W", "R") if place not in given]:
        raise ValueError(f"{what} has no {' and no '.join(missing)}")
    arrays = _arrays(what, {place: values[given[place]] for place in ("W", "R", "B", "P") if place in given})
    gates = 4 if kind == "LSTM" else 3
    W, R = arrays["W"], arrays["R"]
    hidden = R.shape[-1] if R.ndim == 3 else 0
    if "hidden_size" in attributes and attributes["hidden_size"].i != hidden:
        raise ValueError(f"{what} has hidden_size={attributes['hidden_size'].i}, but its R has shape {R.shape}")
    columns = gates * hidden
    B = arrays.get("B", np.zeros((directions, 2 * columns), W.dtype))
    _shapes(what, {"W": (W, (directions, columns, None)), "R": (R, (directions, columns, hidden))})
    _shapes(what, {"B": (B, (directions, 2 * columns))})
    if "P" in arrays:
        _shapes(what, {"P": (arrays["P"], (directions, 3 * hidden))})
    cells = []
    for d in range(directions):
        bias = B[d, :columns] + B[d, columns:]
        peepholes = arrays["P"][d] if "P" in arrays else None
        cells.append(_cell(f"ONNX {kind}", W[d].T, R[d].T, bias, peepholes))
    return cells[0] if directions == 1 else Bidirectional(*cells)


def to_onnx(layer: Layer, *, name: str = "rnn") -> tuple[onnx.NodeProto, dict[str, Array]]:
    """An ONNX LSTM or GRU node with the layer's weights.

    .. code-block:: python

        node, initializers = convert.to_onnx(layer)
        graph = onnx.helper.make_graph(
            [node], "g", [x_info], [y_info],
            initializer=[onnx.numpy_helper.from_array(array, name) for name, array in initializers.items()],
        )

    Parameters
    ----------
    layer : LSTM, GRU or Bidirectional
        A bidirectional layer has two of one kind.
    name : str
        Of the node, and what its inputs' and outputs' names begin with: ``rnn_X``, ``rnn_W``, ..., ``rnn_Y``,
        ``rnn_Y_h``, ``rnn_Y_c``.

    Returns
    -------
    node : onnx.NodeProto
        It starts from zero states; ``node.input[5]`` and ``[6]`` may be given names to feed others.
    initializers : dict of str to ndarray
        forget_bias is added into the bias.

    Raises
    ------
    ConversionError
        An LSTM clips its cell state; a stack; an LSTM beside a GRU.
    """
    caller = "to_onnx"
    if isinstance(layer, Stack):
        raise ConversionError(
            f"{caller}: the layer is a Stack, and an ONNX node is one layer. Convert layer.layers one by one, and put a"
            f" Squeeze, or a Transpose and a Reshape, between them"
        )
    cells = _directions(caller, layer)
    if len({type(cell) for cell in cells}) > 1:
        raise ConversionError(f"{caller}: the layer has an LSTM and a GRU; an ONNX node is one or the other")
    for cell in cells:
        if isinstance(cell, LSTM) and _clips(cell):
            raise ConversionError(
                f"{caller}: the LSTM clips its cell state at {cell.cell_clip:g}; the ONNX attribute clip limits what"
                f" goes into the gates, which is something else. Build the graph of a BlockLSTM instead"
            )
    from onnx import helper

    kind = type(cells[0]).__name__
    parts = [_parts(cell, f"ONNX {kind}") for cell in cells]
    arrays = {
        "W": np.stack([kernel.T for kernel, _, _ in parts]),
        "R": np.stack([recurrent.T for _, recurrent, _ in parts]),
        "B": np.stack([np.concatenate([bias, np.zeros_like(bias)]) for *_, bias in parts]),
    }
    if any(_has_peepholes(cell) for cell in cells):
        arrays["P"] = np.stack([_onnx_peepholes(cell) for cell in cells])
    places = ("X", "W", "R", "B", "", "", "", "P") if "P" in arrays else ("X", "W", "R", "B")
    node = helper.make_node(
        kind,
        [place and f"{name}_{place}" for place in places],
        [f"{name}_{place}" for place in ("Y", "Y_h", "Y_c")[: 3 if kind == "LSTM" else 2]],
        name=name,
        hidden_size=cells[0].hidden_size,
        direction="bidirectional" if len(cells) == 2 else "forward",
    )
    return node, {f"{name}_{place}": np.ascontiguousarray(array) for place, array in arrays.items()}


def _onnx_find(caller: str, graph: Any, name: str | None) -> tuple[Any, dict[str, Array]]:
    """The node of that name in a model's graph, and those of the graph's constants that it reads."""
    nodes = [node for node in graph.node if node.op_type in ("LSTM", "GRU")]
    if name is not None:
        found = [node for node in nodes if name == node.name or name in node.output]
    else:
        found = nodes
    if len(found) != 1:
        names = [node.name or ", ".join(node.output) for node in nodes]
        hint = "; say which with name=" if name is None and nodes else ""
        raise ValueError(
            f"{caller}: expected one LSTM or GRU node{'' if name is None else f' {name!r}'}, found {names}{hint}"
        )
    tensors = _onnx_constants(graph)
    return found[0], {key: _onnx_array(caller, key, tensors[key]) for key in found[0].input if key in tensors}


def _onnx_constants(graph: Any) -> dict[str, Any]:
    """The tensors of a graph that no node has to compute."""
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        values = [attribute.t for attribute in node.attribute if attribute.name == "value"]
        if node.op_type == "Constant" and values and node.output:
            tensors[node.output[0]] = values[0]
    return tensors


def _onnx_array(caller: str, name: str, tensor: Any) -> Array:
    from onnx import numpy_helper

    if tensor.data_location == tensor.EXTERNAL:
        raise ValueError(f"{caller}: {name!r} is in another file; onnx.load(path) of the whole model brings it along")
    try:
        return numpy_helper.to_array(tensor)
    except MemoryError:
        raise
    except Exception as error:  # of many kinds, where dims, type and data do not agree
        raise ValueError(f"{caller}: the tensor {name!r} cannot be read: {error}") from error


def _onnx_attributes(what: str, node: Any) -> dict[str, Any]:
    attributes: dict[str, Any] = {}
    for attribute in node.attribute:
        kind = _ONNX_ATTRIBUTES.get(attribute.name)
        if kind is None:
            raise ConversionError(f"{what} has the attribute {attribute.name!r}, which ONNX does not know")
        if attribute.type != getattr(attribute, kind) or attribute.ref_attr_name or attribute.name in attributes:
            raise ValueError(f"{what} has the attribute {attribute.name} twice or not as {kind}, as ONNX has it")
        attributes[attribute.name] = attribute
    return attributes


_ONNX_ATTRIBUTES = {
    "activation_alpha": "FLOATS",
    "activation_beta": "FLOATS",
    "activations": "STRINGS",
    "clip": "FLOAT",
    "direction": "STRING",
    "hidden_size": "INT",
    "input_forget": "INT",
    "layout": "INT",
    "linear_before_reset": "INT",
    "output_sequence": "INT",
}


def _onnx_refuse(what: str, kind: str, attributes: Mapping[str, Any], direction: str) -> None:
    if direction not in ("forward", "reverse", "bidirectional"):
        raise ValueError(f"{what} has direction={direction!r}; expected 'forward', 'reverse' or 'bidirectional'")
    if direction == "reverse":
        raise ConversionError(
            f"{what} has direction='reverse'; a lone layer runs forwards only. Remove that attribute from the node,"
            f" convert it, and reverse time outside: y = layer(x[::-1])[0][::-1]"
        )
    if "clip" in attributes:
        raise ConversionError(
            f"{what} has clip={attributes['clip'].f:g}, which limits what goes into the gates; the cell_clip of an LSTM"
            f" here limits the cell state. If the limit is never reached, remove the attribute"
        )
    defaults = ["sigmoid", "tanh", "tanh"] if kind == "LSTM" else ["sigmoid", "tanh"]
    defaults *= 2 if direction == "bidirectional" else 1
    if "activations" in attributes:
        activations = [activation.decode() for activation in attributes["activations"].strings]
        if [activation.lower() for activation in activations] != defaults:
            raise ConversionError(
                f"{what} has activations={activations}; only Sigmoid for the gates and Tanh elsewhere can be expressed"
            )
    if "input_forget" in attributes and attributes["input_forget"].i:
        raise ConversionError(
            f"{what} has input_forget=1, which couples the input gate to the forget gate; the gates of the block cells"
            f" are independent"
        )
    if "linear_before_reset" in attributes and attributes["linear_before_reset"].i:
        raise ConversionError(f"{what} has linear_before_reset=1. {_RESET_AFTER}")
    if "layout" in attributes and attributes["layout"].i:
        raise ConversionError(
            f"{what} has layout=1, batch first; layers here read x as [T,B,I]. Its weights are the same: remove that"
            f" attribute from the node, convert it, and swap the first two axes of x and y"
        )


def _onnx_states(what: str, given: Mapping[str, str], values: Mapping[str, Any], graph: Any) -> None:
    """What a layer would have to be told at each call, where the model itself says what it is."""
    open_inputs = None if graph is None else {value.name for value in graph.input}
    for k, (place, argument) in enumerate(
        {"sequence_lens": "lengths", "initial_h": "state", "initial_c": "state"}.items(), start=4
    ):
        name = given.get(place, "")
        constant = values.get(name)
        if constant is not None and (place == "sequence_lens" or np.any(np.asarray(constant))):
            which = f"a constant {place}"
        elif not name or constant is not None or open_inputs is None or name in open_inputs:
            continue
        elif place != "sequence_lens" and _onnx_is_zero(graph, name):
            continue
        else:
            which = f"{place} {name!r}, which other nodes compute"
        raise ConversionError(
            f"{what} has {which}; a layer gets that when it is called. Remove this input"
            f' (node.input[{k}] = ""), convert the node, and pass {argument}='
        )


_MOVES = ("Cast", "Expand", "Flatten", "Identity", "Reshape", "Slice", "Squeeze", "Tile", "Transpose", "Unsqueeze")


def _onnx_is_zero(graph: Any, name: str) -> bool:
    """Whether a value is sure to be zero, as initial states are that exporters make of the size of the batch."""
    tensors = _onnx_constants(graph)
    makers = {output: node for node in graph.node for output in node.output}
    waiting, seen = [name], {""}
    while waiting:
        each = waiting.pop()
        node = makers.get(each)
        if each in tensors:
            if np.any(_onnx_array("from_onnx", each, tensors[each])):
                return False
        elif node is not None and node.op_type == "ConstantOfShape":
            values = [attribute.t for attribute in node.attribute]
            if any(np.any(_onnx_array("from_onnx", each, tensor)) for tensor in values):
                return False
        elif node is not None and node.op_type in (*_MOVES, "Concat") and node.input:
            inputs = node.input if node.op_type == "Concat" else node.input[:1]
            seen.add(each)
            waiting += [source for source in inputs if source not in seen]
        else:
            return False
    return True


def _onnx_peepholes(cell: Cell) -> Array:
    if not _has_peepholes(cell):
        return np.zeros(3 * cell.hidden_size, cell.dtype)
    peepholes = np.concatenate([cell.weights[name] for name in ("wci", "wcf", "wco")])
    return reorder(peepholes, ORDERS["peepholes"], ORDERS["ONNX peepholes"])


# -------------------------------------------------------------------------------------------------------- TensorFlow 1
FORGET_BIAS = {  # of TensorFlow 1's classes, where it is not given
    "LSTMBlockCell": 1.0,
    "LSTMBlockFusedCell": 1.0,
    "BasicLSTMCell": 1.0,
    "LSTMCell": 1.0,
    "CudnnCompatibleLSTMCell": 0.0,
}
TF1_CELLS = (*FORGET_BIAS, "GRUBlockCell", "GRUBlockCellV2", "GRUCell")
_ALIASES = {"CudnnCompatibleLSTM": "CudnnCompatibleLSTMCell"}
_SCOPES = {  # TensorFlow's own names for the variables' scopes
    "lstm_cell": "LSTMBlockCell",
    "lstm_fused_cell": "LSTMBlockFusedCell",
    "lstm_block_wrapper": "LSTMBlockFusedCell",
    "basic_lstm_cell": "BasicLSTMCell",
    "cudnn_compatible_lstm_cell": "CudnnCompatibleLSTMCell",
}
_TF1_NAMES: dict[str, dict[str, tuple[str, ...]]] = {  # the endings of variables' names, old ones too
    "GRU": {
        "w_ru": ("w_ru", "gates/kernel", "gates/weights", "Gates/Linear/Matrix"),
        "w_c": ("w_c", "candidate/kernel", "candidate/weights", "Candidate/Linear/Matrix"),
        "b_ru": ("b_ru", "gates/bias", "gates/biases", "Gates/Linear/Bias"),
        "b_c": ("b_c", "candidate/bias", "candidate/biases", "Candidate/Linear/Bias"),
    },
    "LSTM": {
        "w": ("kernel", "weights", "W_0", "Linear/Matrix"),
        "b": ("bias", "biases", "B", "Linear/Bias"),
        "wci": ("w_i_diag", "W_I_diag"),
        "wcf": ("w_f_diag", "W_F_diag"),
        "wco": ("w_o_diag", "W_O_diag"),
    },
}


def from_tf1(
    variables: Mapping[str, Any],
    *,
    cell: str | None = None,
    scope: str | None = None,
    forget_bias: float | None = None,
    cell_clip: float = 0.0,
) -> Cell:
    """A layer with the weights of a TensorFlow 1 cell, as a checkpoint holds them.

    .. code-block:: python

        reader = tf.train.load_checkpoint("model.ckpt")
        variables = {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}
        layer = convert.from_tf1(variables, scope="rnn/lstm_cell", forget_bias=1.0)

    A CHECKPOINT DOES NOT SAY WHAT forget_bias AND cell_clip THE CELL HAD. They are arguments of the cell in the program
    that made it, and attributes of its nodes in the graph (``.meta``, ``.pb``). A wrong forget_bias gives wrong results
    without any error, so give it; where it is not given, the class's default is taken with a warning.

    Parameters
    ----------
    variables : mapping of str to array_like
        Names and values. What belongs to no cell, such as ``.../Adam`` or ``global_step``, is ignored.
    cell : str, optional
        The class: LSTMBlockCell, LSTMBlockFusedCell, BasicLSTMCell, LSTMCell, CudnnCompatibleLSTMCell, GRUBlockCell,
        GRUBlockCellV2 or GRUCell. None goes by the names of the variables.
    scope : str, optional
        What the names of the cell's variables begin with, such as ``"rnn/multi_rnn_cell/cell_0/lstm_cell"``. Needed
        where there is more than one cell.
    forget_bias : float, optional
        Of an LSTM. None takes the class's default and warns: 1.0, and 0.0 for CudnnCompatibleLSTMCell.
    cell_clip : float
        Of an LSTM; 0 is none. TensorFlow 1's classes do not clip unless they are told.

    Returns
    -------
    LSTM or GRU
        With peepholes where the cell has them. forget_bias is kept apart from the bias, as in TensorFlow.

    Warns
    -----
    UserWarning
        forget_bias is not given.

    Raises
    ------
    TypeError
        variables is no mapping, or an array has a dtype other than float32, float64 and float16.
    ConversionError
        CudnnCompatibleGRUCell, which resets after the product; projections; coupled gates; layer normalization.
    ValueError
        No cell or several are found, or shapes are wrong.

    Notes
    -----
    Bidirectional and stacked networks are put together from their cells with `blockcell.Bidirectional` and
    `blockcell.Stack`. For the moving averages of the weights, rename them first:
    ``{name.removesuffix("/ExponentialMovingAverage"): ... for name in ... if name.endswith(...)}``.
    Where one build of TensorFlow stored w_ru and w_c under each other's names, their shapes put them right.
    """
    caller = "from_tf1"
    if not isinstance(variables, Mapping):
        expected = "expected names and arrays"
        raise TypeError(f"{caller}: variables is of type {type(variables).__name__}; {expected}")
    _names(caller, variables)
    cell = _ALIASES.get(cell, cell) if cell is not None else None
    if cell == "CudnnCompatibleGRUCell":
        raise ConversionError(f"{caller}: CudnnCompatibleGRUCell is no GRUBlockCell. {_RESET_AFTER}")
    if cell is not None and cell not in TF1_CELLS:
        raise ConversionError(f"{caller}: cell is {cell!r}; expected one of {', '.join(TF1_CELLS)}")
    found_scope, kind, named = _tf1_find(caller, variables, cell, scope)
    arrays = _arrays(caller, {name: variables[name] for name in named.values()})
    values: dict[str, Any] = {key: arrays[name] for key, name in named.items()}
    what = f"{caller}: the cell {found_scope!r}"
    if kind == "GRU":
        if forget_bias is not None or cell_clip:
            raise ValueError(f"{what} is a GRU, which has no forget_bias and no cell_clip")
        return _tf1_gru(what, values)
    _tf1_refuse(what, found_scope, variables, values)
    bias = _tf1_forget_bias(what, found_scope, cell, forget_bias)
    return LSTM(**values, forget_bias=bias, cell_clip=cell_clip, gate_order=ORDERS["TF1 LSTM"])


def _tf1_find(
    caller: str, variables: Mapping[str, Any], cell: str | None, scope: str | None
) -> tuple[str, str, dict[str, str]]:
    """A cell's scope, its kind, and the names of its variables."""
    cells: dict[tuple[str, str], dict[str, str]] = {}
    taken: set[str] = set()
    for kind, roles in _TF1_NAMES.items():
        for role, endings in roles.items():
            for name in variables:
                stem = name.removesuffix(":0")
                ending = next((end for end in endings if stem == end or stem.endswith("/" + end)), None)
                if ending is not None and name not in taken:
                    taken.add(name)
                    cells.setdefault((stem.removesuffix(ending).removesuffix("/"), kind), {})[role] = name
    required = {"GRU": {"w_ru", "w_c", "b_ru", "b_c"}, "LSTM": {"w", "b"}}
    wanted = None if scope is None else scope.strip("/")
    kinds = ("GRU",) if cell and cell.startswith("GRU") else ("LSTM",) if cell else ("GRU", "LSTM")
    full = [
        key for key, named in cells.items()
        if required[key[1]] <= named.keys() and key[1] in kinds and wanted in (None, key[0])
    ]  # fmt: skip
    if len(full) > 1:  # dense layers too have a kernel and a bias
        full = [key for key in full if re.search("lstm|gru", key[0].split("/")[-1], re.IGNORECASE)] or full
    if len(full) != 1:
        _tf1_not_found(caller, variables, cells, full, wanted)
    return *full[0], cells[full[0]]


def _tf1_not_found(
    caller: str,
    variables: Mapping[str, Any],
    cells: Mapping[tuple[str, str], dict[str, str]],
    full: Sequence[tuple[str, str]],
    scope: str | None,
) -> None:
    where = "" if scope is None else f" in the scope {scope!r}"
    inside = [name for name in variables if scope is None or name.startswith(f"{scope}/")]
    if any(re.search("(input|hidden)_projection/", name) for name in inside):
        raise ConversionError(f"{caller}: there is a CudnnCompatibleGRUCell{where}. {_RESET_AFTER}")
    if any(re.search(r"/part_\d+(:0)?$", name) for name in inside):
        raise ValueError(
            f"{caller}: variables are in parts{where} (.../part_0); join them along their first axis under the name"
            f" without /part_0"
        )
    if any(re.search("/(gamma|beta)(:0)?$", name) for name in inside):
        raise ConversionError(f"{caller}: there is layer normalization{where}, which the block cells do not have")
    if full:
        scopes = [key[0] for key in full]
        raise ValueError(f"{caller}: expected one cell{where}, found {scopes}; say which with scope=")
    partly = sorted({name for named in cells.values() for name in named.values() if name in inside})
    raise ValueError(
        f"{caller}: expected one cell{where}: kernel and bias of an LSTM, or w_ru, w_c, b_ru and b_c (gates/kernel"
        f" and so on) of a GRU. Of these there are {partly or 'none'}"
    )


def _tf1_gru(what: str, values: Mapping[str, Array]) -> GRU:
    w_ru, w_c = (values[name] for name in ("w_ru", "w_c"))
    b_ru, b_c = (values[name] for name in ("b_ru", "b_c"))
    if w_ru.ndim == w_c.ndim == 2 and w_c.shape[1] == 2 * w_ru.shape[1]:
        w_ru, w_c = w_c, w_ru
    if b_ru.ndim == b_c.ndim == 1 and len(b_c) == 2 * len(b_ru):
        b_ru, b_c = b_c, b_ru
    hidden = w_c.shape[-1] if w_c.ndim == 2 else 0
    rows = len(w_c) if w_c.ndim == 2 else 0
    expected = {"w_c": (w_c, (rows, hidden)), "w_ru": (w_ru, (rows, 2 * hidden))}
    _shapes(what, expected | {"b_ru": (b_ru, (2 * hidden,)), "b_c": (b_c, (hidden,))})
    return GRU(w_ru, w_c, b_ru, b_c)


def _tf1_refuse(what: str, scope: str, variables: Mapping[str, Any], values: Mapping[str, Array]) -> None:
    w, b = values["w"], values["b"]
    peepholes = {"wci", "wcf", "wco"} & values.keys()
    if scope.endswith("coupled_input_forget_gate_lstm_cell") or peepholes == {"wcf", "wco"}:
        raise ConversionError(
            f"{what} couples its input gate to the forget gate; the gates of the block cells are independent"
        )
    if any(name.startswith(f"{scope}/projection/") for name in variables):
        raise ConversionError(f"{what} has a projection (num_proj), which the block cells do not have")
    if w.ndim != 2 or b.shape != w.shape[1:] or w.shape[1] % 4:
        raise ValueError(f"{what} has weights of shape {w.shape} and a bias of {b.shape}; expected (I+H, 4H) and (4H,)")
    if len(w) < w.shape[1] // 4:
        raise ValueError(
            f"{what} has weights of shape {w.shape}; expected (I+H, 4H), so at least {w.shape[1] // 4} rows"
        )
    if peepholes and len(peepholes) < 3:
        raise ValueError(f"{what} has only {sorted(peepholes)} of the peephole weights wci, wcf and wco")
    _shapes(what, {name: (values[name], (w.shape[1] // 4,)) for name in sorted(peepholes)})


def _tf1_forget_bias(what: str, scope: str, cell: str | None, forget_bias: float | None) -> float:
    if forget_bias is not None:
        return forget_bias
    named = _SCOPES.get(re.sub(r"_\d+$", "", scope.split("/")[-1]))
    default = FORGET_BIAS[cell or named or "LSTMCell"]
    if cell and named and FORGET_BIAS[named] != default:
        raise ValueError(
            f"{what} is named like a {named}, which has forget_bias {FORGET_BIAS[named]}, but cell is {cell}, which has"
            f" {default} by default; say which with forget_bias="
        )
    warnings.warn(
        f"{what}: checkpoints do not hold forget_bias; {default} is taken, the default of"
        f" {cell or named or 'LSTMCell'}. Pass forget_bias= to say what it was",
        stacklevel=3,
    )
    return default


# ----------------------------------------------------------------------------------------------- what all of them share
def _cell(source: str, kernel: Array, recurrent: Array, bias: Array, peepholes: Array | None = None) -> Cell:
    """A layer of weights [I,.], [H,.] and [.] in the gate order of the source, such as "ONNX LSTM"."""
    kind = source.split()[1]
    w, b = (reorder(a, ORDERS[source], ORDERS[kind]) for a in (np.concatenate([kernel, recurrent]), bias))
    hidden = len(recurrent)
    if kind == "GRU":
        return GRU(w[:, : 2 * hidden], w[:, 2 * hidden :], b[: 2 * hidden], b[2 * hidden :])
    if peepholes is None:
        return LSTM(w, b)
    wci, wcf, wco = np.split(reorder(peepholes, ORDERS["ONNX peepholes"], ORDERS["peepholes"]), 3)
    return LSTM(w, b, wci=wci, wcf=wcf, wco=wco)


def _parts(cell: Cell, target: str) -> tuple[Array, Array, Array]:
    """Undoes `_cell`: kernel [I,.], recurrent kernel [H,.] and bias, forget_bias in it, in the target's order."""
    weights = cell.weights
    if isinstance(cell, GRU):
        w, b, order = (
            np.hstack([weights["w_ru"], weights["w_c"]]),
            np.hstack([weights["b_ru"], weights["b_c"]]),
            ORDERS["GRU"],
        )
    else:
        w, b, order = weights["w"], weights["b"], cell.gate_order
    w, b = (reorder(a, order, ORDERS[target]) for a in (w, b))
    if isinstance(cell, LSTM):
        b[_gate(target, "f", cell.hidden_size)] += b.dtype.type(cell.forget_bias)
    return w[: cell.input_size], w[cell.input_size :], b


def _gate(target: str, gate: str, hidden: int) -> slice:
    start = ORDERS[target].index(gate) * hidden
    return slice(start, start + hidden)


def _directions(caller: str, layer: Any) -> tuple[Cell, ...]:
    """The cell, or both of a bidirectional layer."""
    cells = []
    for cell in (layer.fw, layer.bw) if isinstance(layer, Bidirectional) else (layer,):
        if not isinstance(cell, (LSTM, GRU)):
            expected = "expected a blockcell.LSTM, GRU or Bidirectional of one of them"
            raise TypeError(f"{caller}: the layer is of type {type(cell).__name__}; {expected}")
        cells.append(cell)
    return tuple(cells)


def _has_peepholes(cell: Cell) -> bool:
    return "wci" in cell.weights


def _clips(cell: Cell) -> bool:
    return isinstance(cell, LSTM) and cell.cell_clip > 0 and math.isfinite(cell.cell_clip)


def _refuse_extras(caller: str, cell: Cell, target: str) -> None:
    """What blockcell's LSTM has and most others have not."""
    if _has_peepholes(cell):
        raise ConversionError(f"{caller}: the LSTM has peepholes, {target} has none; an ONNX node has (to_onnx)")
    if isinstance(cell, LSTM) and _clips(cell):
        raise ConversionError(
            f"{caller}: the LSTM clips its cell state at {cell.cell_clip:g}; {target} does not. If the limit is never"
            f" reached, make the layer anew with cell_clip=0"
        )


def _names(caller: str, source: Mapping[str, Any]) -> list[str]:
    names = [*source]
    if others := [name for name in names if not isinstance(name, str)]:
        raise TypeError(f"{caller}: there is a name of type {type(others[0]).__name__}; expected those of type str")
    return names


def _arrays(caller: str, values: Mapping[str, Any]) -> dict[str, Array]:
    """The values as arrays of one dtype that layers take."""
    arrays: dict[str, Array] = {}
    for name, value in values.items():
        try:
            array = np.asarray(value)
        except Exception as error:  # such as PyTorch's, for what is not in the CPU's memory
            raise TypeError(f"{caller}: {name} cannot be read as an array: {error}") from error
        if array.dtype not in DTYPES:
            raise TypeError(f"{caller}: {name} has dtype {array.dtype}; expected float32, float64 or float16")
        first = next(iter(arrays), name)
        if arrays and array.dtype != arrays[first].dtype:
            raise TypeError(
                f"{caller}: {name} has dtype {array.dtype}; expected {arrays[first].dtype}, that of {first}"
            )
        arrays[name] = array
    return arrays


def _gates(caller: str, name: str, recurrent: Array, axis: int, known: Iterable[int] = (3, 4)) -> int:
    """How many gates a recurrent kernel has: 4 for an LSTM, 3 for a GRU."""
    if recurrent.ndim == 2:
        for gates in known:
            if recurrent.shape[axis] == gates * recurrent.shape[1 - axis]:
                return gates
    form = "(H, 4H) for an LSTM or (H, 3H) for a GRU" if axis == 1 else "(4H, H)"
    raise ValueError(f"{caller}: {name} has shape {recurrent.shape}; expected {form}")


def _shapes(caller: str, arrays: Mapping[str, tuple[Array, tuple[int | None, ...]]]) -> None:
    for name, (array, expected) in arrays.items():
        fits = array.ndim == len(expected) and all(
            size in (None, found) for size, found in zip(expected, array.shape, strict=True)
        )
        if not fits:
            form = str(expected).replace("None", "I")
            raise ValueError(f"{caller}: {name} has shape {array.shape}; expected {form}")
