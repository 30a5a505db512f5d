"""Weights from and to Keras."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from ..activations import DEFAULTS, Activation
from ..errors import FormatError, short
from ..files import StrPath
from ..layers import GRU, RNN, Bidirectional, Dense, Layer, Stack
from ..layers.structure import snapshot_of
from ..optable import Array
from .comparison import NotCompared
from .keras_description import KERAS_2_HARD_SIGMOID, KerasLayer, describe
from .keras_layers import (
    OWN_CALL,
    add_mask_hints,
    add_model,
    cell_from_arrays,
    cells_in,
    convert_layer,
    dense_from_arrays,
    step_of_layer,
)
from .keras_run import compare_with_source, is_whole
from .models import Assembly, Step, assemble, labels_left_out, warn_once
from .shared import ConversionError, cells_of, split_cell


def from_keras(
    source: Any,
    *,
    weights: StrPath | None = None,
    reset_after: bool | None = None,
    activation: Activation | None = None,
    recurrent_activation: Activation | None = None,
    check: bool | None = None,
) -> Any:
    """Convert a Keras layer or a whole Keras model, in memory or in a file.

    .. code-block:: python

        layer = convert.from_keras(model)
        layer = convert.from_keras("model.keras")      # needs h5py alone
        y, state = layer(x, batch_first=True)          # Keras reads x as [B,T,I]

    Parameters
    ----------
    source : path_like, Keras model or layer, or sequence
        A path: ``.h5``, ``.hdf5``, ``.keras``, ``.weights.h5``, or the ``.json`` of an architecture. Files need not be
        trusted: nothing in them is executed.

        A model, or a layer: ``keras.layers.LSTM``, ``GRU``, ``SimpleRNN``, an ``RNN`` of one or several of their cells,
        ``Bidirectional`` of these, or ``Dense``.

        The ``get_weights()`` of a layer: ``[kernel, recurrent_kernel, bias]`` or, with ``use_bias=False``, the first
        two; both directions one after the other for ``Bidirectional``; ``[kernel, bias]`` for ``Dense``. Also the
        ``get_weights()`` of a model of such layers alone, if the shapes assign each array to a layer. Prefer the model:
        arrays contain neither the activation of a ``Dense`` nor ``return_sequences``.

        A list of layers or of such lists becomes a `blockcell.Stack`.
    weights : path_like, optional
        For an architecture's ``.json`` the path of its weights, as ``save_weights`` wrote them.
    reset_after : bool, optional
        Whether a GRU applies the reset gate after the product. Only arrays without a bias need it. It is unrelated to
        `reset` of a call, which sets the state to zero.
    activation, recurrent_activation : str or tuple, optional
        The activations of cells given as arrays, by blockcell's names. None means Keras' defaults, "tanh" and
        "sigmoid", the second with a warning: before Keras 2.3 and in TensorFlow 1 it was
        ``("hard_sigmoid", 0.2, 0.5)``. **"hard_sigmoid" is the function of Keras 3.** In a config of Keras 2 it means
        ``("hard_sigmoid", 0.2, 0.5)``.
    check : bool, optional
        Whether the source runs on random inputs and must compute what the layer computes. None, the default, compares
        where nothing but the model's own code is run; True also where the model has hooks of the user's; False does not
        compare. A model or a layer runs, by ``model(x, training=False)``, and is left as it was; files and arrays do
        not.

    Returns
    -------
    LSTM, GRU, RNN, Bidirectional, Dense, Stack, or dict of str to Layer
        A model with several recurrent layers becomes a `Stack` if each reads the one before it, through nothing but
        layers without effect in inference, such as Dropout. Dense layers before and behind them belong to the stack,
        with their activations. Behind a layer without ``return_sequences``, the last `Dense` has ``last=True``; behind
        a Bidirectional or a layer with ``go_backwards``, the next one has ``last="ends"``. Without a Dense, Keras'
        result is the h of the state.

        Any other model, and a model with its own ``call``, becomes a dict of the recurrent layers by their names,
        within a nested model ``"model/layer"``.

        A single layer with ``go_backwards=True`` gets ``reverse=True``. ``unit_forget_bias`` only sets the initial
        bias. States have names: Keras' ``[h, c]`` is ``state={"h": h, "cs": c}``.

    Warns
    -----
    UserWarning
        Parts of a model are skipped, such as an Embedding; the warning says what to pass to calls for a mask, for the
        state of another layer, or for ``stateful=True``. The layers come in a dict, as they are not one behind the
        other. The source could not be compared with the result. The arrays of a ``Dense`` become a `Dense` without
        activation that runs at each step. The arrays of an LSTM or a GRU without `recurrent_activation` get sigmoid.

    Raises
    ------
    FormatError
        A file is damaged or of another kind, or there is no LSTM, GRU or SimpleRNN in it.
    TypeError
        The source is none of these, or an array has a dtype other than float32, float64 and float16.
    ConversionError
        Layers do not have the activation, such as gelu, or it is your own function; a single layer has
        ``go_backwards=True`` and ``return_sequences=True``, so Keras' output begins with the last step; a
        ``merge_mode`` is not "concat". Or the model computes something else on random inputs.
    ValueError
        A model has no LSTM, GRU or SimpleRNN; the number of arrays or their shapes are wrong or ambiguous: a
        Bidirectional with I = H has the shapes of two stacked layers, and a kernel may be an Embedding. An activation
        is passed for layers without one, or for a model or layer, which has its own.
    """
    caller = "from_keras"
    options = {"activation": activation, "recurrent_activation": recurrent_activation, "reset_after": reset_after}
    if isinstance(source, (str, os.PathLike)):
        converted = _from_file(caller, source, weights, options, check)
    elif weights is not None:
        raise ValueError(f"{caller}: weights is given; expected the path of an architecture's .json before it")
    elif hasattr(source, "get_config"):
        if activation is not None or recurrent_activation is not None:
            expected = "expected arrays, as a layer has its own"
            raise ValueError(f"{caller}: activation or recurrent_activation is given; {expected}")
        converted = _convert(caller, describe(source), check)
    elif isinstance(source, bytes) or not isinstance(source, Sequence):
        kinds = "LSTM, GRU, SimpleRNN or Bidirectional layer"
        expected = f"expected a Keras {kinds}, the arrays of its get_weights(), or a list of these"
        raise TypeError(f"{caller}: the source is of type {type(source).__name__}; {expected}")
    else:
        converted = _from_list(caller, source, options, check)
        _check_activations(caller, converted.layers, options)
    warn_once(caller, converted.left_out, dict.fromkeys(converted.remarks), stacklevel=2)
    return converted.layers


class _Converted(NamedTuple):
    """What a source becomes."""

    layers: Any
    """A layer, or a dict of layers by their names."""
    left_out: list[str]
    """The labels of what is left out."""
    remarks: list[str]


def _convert(caller: str, described: KerasLayer, check: bool | None) -> _Converted:
    """Convert a layer or a model; compare it with the object, if it is in memory."""
    steps: dict[str, Step] = {}
    if described.is_model:
        outputs = add_model(caller, steps, described)
        assembly = add_mask_hints(steps, assemble(caller, steps, outputs))
    else:
        key = described.name
        steps[key] = step_of_layer(caller, described, key, ())._replace(source=described)
        layer = steps[key].layer or convert_layer(caller, described)  # which raises
        outputs = (key,)
        assembly = Assembly(layer, None, outputs, labels_left_out(steps, outputs, outputs))
    layers, left_out = assembly.layers, assembly.left_out
    remarks = ["the layers are not one behind the other"] if isinstance(layers, dict) and outputs is not None else []
    is_proven = False
    if check is not False:
        try:
            if described.instance is None:
                raise NotCompared("a file is never run; load it with Keras and pass the model")
            remarks += compare_with_source(caller, described.instance, check, steps, assembly, outputs is not None)
            is_proven = is_whole(assembly)
        except NotCompared as error:
            remarks.append(error.remark)
    if outputs is None and not is_proven:
        own_call = f"{described.name} ({described.kind}): {OWN_CALL}"
        left_out = [*left_out, own_call if described.name else "the order of the layers, which arrays do not tell"]
    return _Converted(layers, left_out, remarks)


def _from_file(
    caller: str, path: StrPath, weights: StrPath | None, options: Mapping[str, Any], check: bool | None
) -> _Converted:
    """Convert the model in a file; the options are for files without a config."""
    from .keras_files import read_model  # which needs h5py

    file = read_model(path, weights, options)
    names = [name for name, value in options.items() if value is not None]
    if names and file.default_gates is None:
        raise ValueError(f"{caller}: {' and '.join(names)} is given; expected arrays alone, as a model has its own")
    try:
        converted = _convert(caller, file.model, check)
    except ConversionError:
        raise
    except (RecursionError, TypeError, ValueError) as error:  # an object of Keras would not have been built
        raise FormatError(f"{os.fspath(path)}: {error}") from error
    if file.default_gates is None:
        return converted
    layers = [*converted.layers.values()] if isinstance(converted.layers, dict) else [converted.layers]
    gates = file.default_gates if options["recurrent_activation"] is None else None
    return converted._replace(remarks=[*_remarks_of_arrays(layers, gates), *converted.remarks])


def _check_activations(caller: str, layer: Layer, options: Mapping[str, Any]) -> None:
    """Refuse activations that none of the cells has."""
    for name in ("activation", "recurrent_activation"):
        if options[name] is not None and not any(name in cell._activations for cell in cells_in([layer])):
            kinds = ", ".join({type(leaf).__name__: None for leaf in layer._leaves().values()})
            expected = "expected None, or the arrays of a cell that has one"
            raise ValueError(f"{caller}: {name} is {short(options[name])}, and the arrays are of {kinds}; {expected}")


def _remarks_of_arrays(layers: Sequence[Layer], gates: Activation | None) -> list[str]:
    """Say what arrays do not tell of these layers: `gates` is the recurrent_activation that was not given."""
    texts = []
    if gates is not None and any("recurrent_activation" in cell._activations for cell in cells_in(layers)):
        texts.append(
            f"arrays do not tell recurrent_activation: here it is {gates!r}. Pass it: the default is"
            f' recurrent_activation="sigmoid" since Keras 2.3 and in TensorFlow 2, and before it was'
            f" recurrent_activation={KERAS_2_HARD_SIGMOID!r}"
        )
    if any(isinstance(leaf, Dense) for layer in layers for leaf in layer._leaves().values()):
        texts.append(
            "arrays do not tell a Dense's activation, nor what return_sequences the layer below it has: here it has"
            " none, and gives y for each step. Pass the model, or make the Dense anew:"
            ' Stack([*stack.layers[:-1], Dense(**stack.layers[-1].weights, activation="softmax", last=True)])'
        )
    return texts


def to_keras(layer: Layer) -> list[Any]:
    """The arrays for ``set_weights`` of a Keras layer.

    .. code-block:: python

        keras_layer.set_weights(convert.to_keras(layer))

    Parameters
    ----------
    layer : LSTM, GRU, RNN, Bidirectional, Dense or Stack
        The target is a ``keras.layers.LSTM``, a ``SimpleRNN``, a ``GRU`` with the layer's ``reset_after`` (the defaults
        differ), a ``Bidirectional`` with its default ``merge_mode``, all with ``use_bias=True``, or a ``Dense``.
        **Activations are not among the weights**: give Keras' layer the activations of this layer, with the same names
        in Keras 3. An activation with parameters is a function there, such as
        ``lambda z: keras.ops.leaky_relu(z, 0.01)``.

    Returns
    -------
    list of ndarray
        ``[kernel, recurrent_kernel, bias]``, twice for `Bidirectional`, and ``[kernel, bias]`` for `Dense`; for a
        `Stack` a list of such lists; concatenate them for a model's ``set_weights``. An LSTM's forget_bias is added to
        the bias.

    Raises
    ------
    ConversionError
        An LSTM has peepholes, a projection, coupled gates or a clipped cell state, which Keras does not support. A
        layer has ``reverse=True``.
    """
    caller, layer = "to_keras", snapshot_of(layer)
    if isinstance(layer, Stack):
        return [to_keras(part) for part in layer.layers]
    if isinstance(layer, Dense):
        return [array.copy() for array in layer.weights.values()]
    arrays: list[Array] = []
    for cell in cells_of(caller, layer):
        kind = "SimpleRNN" if isinstance(cell, RNN) else type(cell).__name__
        takes = {"activation", "recurrent_activation"}
        split = split_cell(caller, cell, f"Keras's {kind}", f"Keras {type(cell).__name__}", takes)
        kernel, recurrent, bias, recurrent_bias = split
        both = isinstance(cell, GRU) and cell.reset_after
        arrays += kernel, recurrent, np.stack([bias, recurrent_bias]) if both else bias
    return arrays


def _from_list(caller: str, source: Sequence[Any], options: Mapping[str, Any], check: bool | None) -> _Converted:
    """Convert a list of layers, of arrays, or of such lists; the options are for arrays."""
    if not source or not all(hasattr(part, "get_config") or isinstance(part, (list, tuple)) for part in source):
        layer = _from_arrays(caller, source, options)
        remarks = _remarks_of_arrays([layer], "sigmoid" if options["recurrent_activation"] is None else None)
        not_compared = NotCompared("arrays are no model; pass the model or the layer")
        return _Converted(layer, [], remarks + ([] if check is False else [not_compared.remark]))
    parts = [
        _convert(caller, describe(part), check)
        if hasattr(part, "get_config")
        else _from_list(caller, part, options, check)
        for part in source
    ]
    parts_of_stack, *texts = zip(*parts, strict=True)
    return _Converted(Stack(parts_of_stack), *([*chain.from_iterable(lists)] for lists in texts))


def _from_arrays(caller: str, source: Sequence[Any], options: Mapping[str, Any]) -> Layer:
    """Convert the arrays of one layer, or of several, each of which reads the output of the one before it."""
    activations = {name: options[name] or default for name, default in DEFAULTS.items()}
    layers: list[Layer] = []
    start = 0
    for count in _divide(caller, [np.shape(array) for array in source]):
        arrays = source[start : start + count]
        start += count
        if count == 1 or np.ndim(arrays[1]) == 1:
            layers.append(dense_from_arrays(caller, arrays))
            continue
        halves = [arrays] if count < 4 else [arrays[: count // 2], arrays[count // 2 :]]
        cells = [cell_from_arrays(caller, half, options["reset_after"], activations) for half in halves]
        layers.append(Bidirectional(*cells) if cells[1:] else cells[0])
    return layers[0] if len(layers) == 1 else Stack(layers)


def _divide(caller: str, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return how many arrays of these shapes each layer has; refuse shapes that do not tell it."""
    if len(shapes) in (2, 3) and len(shapes[1]) == 2:
        return (len(shapes),)  # a cell, whose shapes are checked later
    half = len(shapes) // 2
    gates = (1, 3, 4) if half in (2, 3) and shapes[:half] == shapes[half:] else (3, 4)
    ways: list[list[tuple[int, ...]]] = [*([] for _ in shapes), [()]]  # from each array on: none, the only one, or two
    for k in reversed(range(len(shapes))):
        for count, outputs in _possible_layers(shapes[k : k + 6], gates, is_first=k == 0):
            if k + count == len(shapes) or shapes[k + count][:1] == (outputs,):
                ways[k] += [(count, *rest) for rest in ways[k + count]]
        del ways[k][2:]
    if shapes and len(ways[0]) == 1:
        return ways[0][0]
    raise ValueError(
        f"{caller}: got arrays of shapes {', '.join(map(str, shapes))[:500]}; expected those of layers one behind the"
        f" other, in one way alone: [kernel, recurrent_kernel, bias] of each LSTM or GRU, of both directions of a"
        f" Bidirectional, and [kernel, bias] of each Dense, whose bias may be np.zeros. Of an Embedding, leave the"
        f" array out: weights[1:]. With I = H, a Bidirectional has the shapes of two layers. Pass the model itself, or"
        f" a list of such a list for each layer, and convert the cells of a Bidirectional one by one"
    )


def _possible_layers(
    shapes: Sequence[tuple[int, ...]], gates: Sequence[int], *, is_first: bool
) -> Iterator[tuple[int, int]]:
    """Yield how many of these arrays the first layer may have, and the size of its output.

    `gates` are the numbers of gates that cells may have: a SimpleRNN, of one gate, has the shapes of two Dense layers.
    The first array of a list is no kernel without bias, as it may be that of an Embedding.
    """
    kernel, second, third = (*shapes, (), ())[:3]
    if len(kernel) != 2:
        return
    columns = kernel[1]
    if second == (columns,):
        yield 2, columns
    elif len(second) == 2 and second[1] == columns and columns in [number * second[0] for number in gates]:
        for count in (2, 3) if third in ((columns,), (2, columns), (2 * columns,)) else (2,):
            yield count, second[0]
            if shapes[count : 2 * count] == shapes[:count]:
                yield 2 * count, 2 * second[0]
    elif not is_first and second != (columns, columns):
        yield 1, columns
