"""Weights from and to Keras."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, overload

import numpy as np

from ..activations import DEFAULTS, PARAMETERS, Activation
from ..errors import short
from ..layers import GRU, RNN, Bidirectional, Dense, Layer, Stack
from ..optable import ACTIVATIONS, Array
from .models import Step, assemble
from .shared import (
    KINDS,
    Cell,
    ConversionError,
    cells_of,
    check_shapes,
    count_gates,
    is_of,
    make_cell,
    read_arrays,
    split_cell,
)


@overload
def from_keras(
    source: Sequence[Any],
    *,
    reset_after: bool | None = None,
    activation: Activation | None = None,
    recurrent_activation: Activation | None = None,
) -> Layer: ...
@overload
def from_keras(
    source: Any,
    *,
    reset_after: bool | None = None,
    activation: Activation | None = None,
    recurrent_activation: Activation | None = None,
) -> Any: ...
def from_keras(
    source: Any,
    *,
    reset_after: bool | None = None,
    activation: Activation | None = None,
    recurrent_activation: Activation | None = None,
) -> Any:
    """A layer with the weights of a Keras layer, or of a whole model.

    .. code-block:: python

        layer = convert.from_keras(model)
        y, state = layer(x, batch_first=True)          # Keras reads x as [B,T,I]

    Parameters
    ----------
    source : Keras model or layer, or sequence
        A model; a ``keras.layers.LSTM``, ``GRU``, ``SimpleRNN``, an ``RNN`` of one or several of their cells,
        ``Bidirectional`` of them, or ``Dense``; or what their
        ``get_weights()`` returned: ``[kernel, recurrent_kernel, bias]`` or, with ``use_bias=False``, the first two, and
        these twice for ``Bidirectional``; ``[kernel, bias]`` for ``Dense``. A list of layers or of such lists becomes a
        `blockcell.Stack`, and so does what ``get_weights()`` of a model of such layers alone returned, if the shapes
        tell which array belongs to which layer. Of a model, better pass the model: arrays do not tell the activation
        of a ``Dense``, nor ``return_sequences``.
    reset_after : bool, optional
        Whether a GRU resets after the product. Needed for arrays without a bias, which do not show it. It has nothing
        to do with `reset` of a call, which says where the state is set to zero.
    activation, recurrent_activation : str or tuple, optional
        Those of cells whose arrays these are, which do not tell them, by the names that layers here have; None for
        Keras' defaults, "tanh" and "sigmoid", the second with a warning: before Keras 2.3 and in TensorFlow 1 it was
        ``("hard_sigmoid", 0.2, 0.5)``. **"hard_sigmoid" is Keras 3's.** In a config of Keras 2 that name has those
        parameters.

    Returns
    -------
    LSTM, GRU, RNN, Bidirectional, Dense, Stack, or dict of str to Layer
        Of a model that has several, a `Stack` if its recurrent layers stand one behind the other, with nothing between
        them but layers that do nothing in inference, such as Dropout. Dense layers before and behind them, and
        activations of these, belong to the stack. Behind a layer without ``return_sequences``, the last `Dense` has
        ``last=True``, or behind a Bidirectional or one with ``go_backwards`` the next one ``last="ends"``; if there is
        none, what Keras returns is the h of the state. Otherwise a dict of the recurrent layers by their names, within
        a nested model ``"model/layer"``; so too for a model with a ``call`` of its own, which does not tell their
        order.

        A lone layer with ``go_backwards=True`` has ``reverse=True`` here. ``unit_forget_bias`` does not matter: it only
        sets the initial bias. States are named, not ordered: Keras's ``[h, c]`` is ``state={"h": h, "cs": c}``.

    Warns
    -----
    UserWarning
        Of a model, what else it does and was left out. Masking is: pass ``mask=`` to the layer's calls. Of the arrays
        of a ``Dense``, that it has no activation here, and gives y for each step. Of those of an LSTM or a GRU without
        `recurrent_activation`, that it is sigmoid here.

    Raises
    ------
    TypeError
        The source is none of these, or an array has a dtype other than float32, float64 and float16.
    ConversionError
        Activations that layers here do not have, such as gelu, and functions of one's own; ``go_backwards=True`` of a
        lone layer with ``return_sequences=True``, whose output Keras leaves in the order in which it is computed; a
        ``merge_mode`` other than "concat".
    ValueError
        A model has no LSTM, GRU or SimpleRNN; the number of arrays or their shapes are wrong, or they may be those of a
        Bidirectional with I = H as well as those of two stacked layers; they may be those of an Embedding. An
        activation is given for arrays of layers that have none, or for a model or layer, which has its own.
    """
    caller = "from_keras"
    if hasattr(source, "get_config"):
        if activation is not None or recurrent_activation is not None:
            expected = "expected arrays, as a layer has its own"
            raise ValueError(f"{caller}: activation or recurrent_activation is given; {expected}")
        return _from_model(caller, source) if _is_model(source) else _layer(caller, source)
    if isinstance(source, (str, bytes)) or not isinstance(source, Sequence):
        what = "LSTM, GRU, SimpleRNN or Bidirectional layer"
        expected = f"expected a Keras {what}, the arrays of its get_weights(), or a list of these"
        raise TypeError(f"{caller}: the source is of type {type(source).__name__}; {expected}")
    every = {"activation": activation, "recurrent_activation": recurrent_activation}
    given = {name: value for name, value in every.items() if value is not None}
    layer, from_arrays = _from_list(caller, source, reset_after, DEFAULTS | given)
    cells = _cells_in([layer])
    for name, value in given.items():
        if not any(name in cell._activations for cell in cells):
            kinds = ", ".join({type(cell).__name__: None for cell in layer._cells().values()})
            expected = "expected None, or the arrays of a cell that has one"
            raise ValueError(f"{caller}: {name} is {short(value)}, and the arrays are of {kinds}; {expected}")
    has_gates = any("recurrent_activation" in cell._activations for cell in _cells_in(from_arrays))
    if has_gates and recurrent_activation is None:
        warnings.warn(
            f"{caller}: arrays do not tell recurrent_activation: here it is sigmoid, the default of Keras since 2.3 and"
            f" of TensorFlow 2. Before, and in TensorFlow 1, it was hard_sigmoid. Pass"
            f' recurrent_activation={KERAS_2_HARD_SIGMOID!r} for such a model, else recurrent_activation="sigmoid"',
            stacklevel=2,
        )
    if any(isinstance(each, Dense) for each in from_arrays):
        warnings.warn(
            f"{caller}: arrays do not tell a Dense's activation, nor what return_sequences the layer below it has: here"
            f" it has none, and gives y for each step. Pass the model, or make the Dense anew:"
            f' Stack([*stack.layers[:-1], Dense(**stack.layers[-1].weights, activation="softmax", last=True)])',
            stacklevel=2,
        )
    return layer


def to_keras(layer: Layer) -> list[Any]:
    """The arrays for ``set_weights`` of a Keras layer.

    .. code-block:: python

        keras_layer.set_weights(convert.to_keras(layer))

    Parameters
    ----------
    layer : LSTM, GRU, RNN, Bidirectional, Dense or Stack
        For a ``keras.layers.LSTM``, a ``SimpleRNN``, a ``GRU`` with the same ``reset_after`` as the layer here, whose
        default is another, or a ``Bidirectional`` with its default ``merge_mode``, all with ``use_bias=True``; or a
        ``Dense``. **Activations are not among the weights**: Keras's layer must have those of the layer here, which go
        by the same names in Keras 3. One with parameters is a function there, such as
        ``lambda z: keras.ops.leaky_relu(z, 0.01)``.

    Returns
    -------
    list of ndarray
        ``[kernel, recurrent_kernel, bias]``, twice for `Bidirectional`, and ``[kernel, bias]`` for `Dense`; for a
        `Stack` a list of such lists, which a model's ``set_weights`` takes one after the other, in one list. An
        LSTM's forget_bias is added into the bias.

    Raises
    ------
    ConversionError
        An LSTM has peepholes, a projection or coupled gates, or clips its cell state: Keras has nothing like it. A
        layer has ``reverse=True``.
    """
    caller = "to_keras"
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


def _is_of_keras(thing: Any, name: str) -> bool:
    return is_of(("keras", "tf_keras", "tensorflow"), thing, name)


# -------------------------------------------------------------------------------------------------------------- models
def _is_model(source: Any) -> bool:
    return isinstance(getattr(source, "layers", None), (list, tuple))


def _from_model(caller: str, model: Any) -> Layer | dict[str, Layer]:
    steps: dict[str, Step] = {}
    outputs = _add_model(caller, steps, model, "", ())
    return assemble(caller, steps, outputs, stacklevel=4)[0]


_CELLS = ("LSTM", "GRU", "SimpleRNN")  # with "Cell" behind, what an RNN has one or several of
_LAYERS = {"LeakyReLU": "leaky_relu", "ELU": "elu", "ReLU": "relu"}  # which may be activations, too
KERAS_2_HARD_SIGMOID = ("hard_sigmoid", 0.2, 0.5)
_NOTHING = (  # what does nothing in inference
    "ActivityRegularization",
    "AlphaDropout",
    "Dropout",
    "GaussianDropout",
    "GaussianNoise",
    "Identity",
    "InputLayer",
    "Masking",
    "SpatialDropout1D",
)
_Keys = tuple[str | None, ...] | None  # as `Step.inputs`


def _add_model(caller: str, steps: dict[str, Step], model: Any, prefix: str, given: _Keys) -> _Keys:
    """Add a model's layers under their names; what its results come from."""
    if any(_is_of_keras(each, "Sequential") for each in type(model).__mro__):
        for layer in model.layers:
            given = _add_layer(caller, steps, layer, prefix, given)
        return given
    try:
        config = model.get_config()
    except NotImplementedError:  # a model with a call() of its own
        config = {}
    entries = {entry.get("name") or entry["config"]["name"]: entry for entry in config.get("layers", ())}
    if not any("inbound_nodes" in entry for entry in entries.values()):
        for layer in model.layers:
            _add_layer(caller, steps, layer, prefix, None)
        return None
    layers = {layer.name: layer for layer in model.layers}
    starts = [name for name, _ in _tensors(config.get("input_layers"))]
    results: dict[str, _Keys] = {}

    def keys(tensors: Iterable[tuple[str, int]]) -> _Keys:
        """What these results come from: the first ones of layers are the steps themselves."""
        found: list[str | None] = []
        for name, index in tensors:
            if name not in results:
                results[name] = (None,)  # for a layer that reads its own result
                results[name] = add(name)
            found.append((*(results[name] or ()), *[None] * (index + 1))[index])
        return tuple(found)

    def add(name: str) -> _Keys:
        if name in starts and given:
            inputs: _Keys = given[starts.index(name) :][:1]
        else:
            inputs = keys(_tensors(entries[name]["inbound_nodes"]))
        if name in layers:
            result = _add_layer(caller, steps, layers[name], prefix, inputs)
            if len(entries[name]["inbound_nodes"]) > 1 and (key := prefix + name) in steps:
                steps[key] = steps[key]._replace(hint="that it is called more than once")
            return result
        steps[prefix + name] = Step(f"{prefix}{name} ({entries[name].get('class_name')})", inputs)
        return (prefix + name,)

    return keys(_tensors(config.get("output_layers")))


def _tensors(nodes: Any) -> Iterator[tuple[str, int]]:
    """The results that nodes of a model's config read: of which layer, and which of its results. Masks are left out."""
    if isinstance(nodes, Mapping):
        for name, value in nodes.items():
            if name != "mask":
                yield from _tensors(value)
    elif isinstance(nodes, (list, tuple)):
        if [type(part) for part in nodes[:3]] == [str, int, int]:  # with the number of the layer's call
            yield nodes[0], nodes[2]
            nodes = nodes[3:]
        for part in nodes:
            yield from _tensors(part)


def _add_layer(caller: str, steps: dict[str, Step], source: Any, prefix: str, inputs: _Keys) -> _Keys:
    if _is_model(source):
        return _add_model(caller, steps, source, f"{prefix}{source.name}/", inputs)
    key = prefix + source.name
    while key in steps:  # only the models that know the order have different names for all layers
        key += "'"
    steps[key] = _step(caller, source, key, inputs)
    return (key,)


def _step(caller: str, source: Any, key: str, inputs: _Keys) -> Step:
    kind, config = type(source).__name__, source.get_config()
    plain = Step(f"{key} ({kind})", inputs)
    if not _is_of_keras(type(source), kind):
        return plain
    if kind == "RNN" and not all(map(_is_known, _cells_of(source))):
        names = ", ".join(type(cell).__name__ for cell in _cells_of(source))
        return plain._replace(what=f"{key} ({kind} of {names})", hint="not Keras's own cells")
    if kind in (*_CELLS, "RNN", "Bidirectional"):
        sequences = (source.forward_layer.get_config() if kind == "Bidirectional" else config)["return_sequences"]
        layer = _layer(caller, source)
        ends = kind == "Bidirectional" or config["go_backwards"]
        return plain._replace(layer=layer, last=False if sequences else "ends" if ends else True)
    if kind == "TimeDistributed":
        return _step(caller, source.layer, key, inputs)._replace(last=False)
    if kind == "Dense":
        activation = _activation(source)
        if activation == "linear" or activation in ACTIVATIONS[1:]:
            return plain._replace(layer=_dense(caller, source))
        return plain._replace(hint=f"its activation is {config['activation']!r}")
    if kind == "Activation" or (kind == "Softmax" and config["axis"] == -1):
        activation = _activation(source) if kind == "Activation" else "softmax"
        return plain._replace(
            nothing=activation == "linear", activation=activation if activation in ACTIVATIONS else None
        )
    hint = "pass mask= to the layer's calls" if kind == "Masking" else ""
    return plain._replace(nothing=kind in _NOTHING, hint=hint)


def _activation(source: Any) -> str | None:
    """The name of Keras's own activation function that a layer has."""
    name = source.get_config()["activation"]
    return name if isinstance(name, str) and _is_of_keras(source.activation, name) else None


def _dense(caller: str, source: Any) -> Dense:
    what = f"{caller}: Dense {getattr(source, 'name', '')!r}"
    activation = _activation(source)
    if activation != "linear" and activation not in ACTIVATIONS[1:]:
        raise ConversionError(
            f"{what} has activation={source.get_config()['activation']!r}; only Keras's own linear,"
            f" {', '.join(ACTIVATIONS[1:])} can be expressed"
        )
    arrays = source.get_weights()
    if not arrays:
        raise ValueError(f"{what} has no weights yet; build it, or call it once")
    return _dense_from_arrays(what, arrays, None if activation == "linear" else activation)


# -------------------------------------------------------------------------------------------------------------- layers
def _layer(caller: str, source: Any) -> Layer:
    kind = type(source).__name__
    is_other = kind in ("RNN", "Bidirectional", "Dense") and _is_of_keras(type(source), kind)
    if not is_other and not _is_known(source):
        raise ConversionError(
            f"{caller}: the source is a {type(source).__module__}.{kind}; expected Keras's LSTM, GRU, SimpleRNN,"
            f" their cells, an RNN of these, Bidirectional or Dense, or a model. Of another class that computes the"
            f" same, pass its get_weights()"
        )
    if kind == "Dense":
        return _dense(caller, source)
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
        halves = _cells_of(fw), _cells_of(bw)
        if any(len(cells) != 1 for cells in halves):
            raise ConversionError(
                f"{what} has an RNN of several cells in each direction; only one can be expressed. Convert the cells of"
                f" each and combine the two halves of y outside"
            )
        return Bidirectional(*(_cell(caller, cell) for (cell,) in halves))
    reverse = config.get("go_backwards", False)
    if reverse and config["return_sequences"]:
        raise ConversionError(
            f"{what} has go_backwards=True and return_sequences=True: its output begins with the last step, that of a"
            f" layer with reverse=True with the first. Convert its get_weights() and call the layer with x[::-1]: y is"
            f" then in Keras's order"
        )
    cells = [_cell(caller, cell, reverse) for cell in _cells_of(source)]
    return cells[0] if len(cells) == 1 else Stack(cells)


def _cells_of(source: Any) -> list[Any]:
    """What has the weights of a recurrent layer: the cells of an RNN, one on the other, or the layer itself."""
    if type(source).__name__ != "RNN" or not _is_of_keras(type(source), "RNN"):
        return [source]
    is_stacked = _is_of_keras(type(source.cell), "StackedRNNCells")
    return [*source.cell.cells] if is_stacked else [source.cell]


def _is_known(source: Any) -> bool:
    """Whether it is one of Keras's LSTM, GRU and SimpleRNN, or a cell of these."""
    kind = type(source).__name__
    return kind.removesuffix("Cell") in _CELLS and _is_of_keras(type(source), kind)


def _cell(caller: str, source: Any, reverse: bool = False) -> Cell:
    kind, config = type(source).__name__.removesuffix("Cell"), source.get_config()
    what = f"{caller}: {type(source).__name__} {getattr(source, 'name', '')!r}"
    if not _is_known(source):
        raise ConversionError(f"{what} is none of Keras's LSTM, GRU and SimpleRNN, nor a cell of these")
    names = ("activation",) if kind == "SimpleRNN" else ("activation", "recurrent_activation")
    activations = {name: _cell_activation(what, source, name) for name in names}
    arrays = source.get_weights()
    if not arrays:
        raise ValueError(f"{what} has no weights yet; build it, or call it once")
    return _cell_from_arrays(caller, arrays, kind == "GRU" and config["reset_after"], activations, reverse)


def _cell_activation(what: str, source: Any, name: str) -> Activation:
    """The activation of a cell, if it is one of Keras's own that layers here have."""
    function, config = getattr(source, name, None), source.get_config()[name]
    if isinstance(config, str) and config in PARAMETERS and _is_of_keras(function, config):
        package = function.__module__.split(".")[0]
        is_newer = package == "keras" and not str(getattr(sys.modules[package], "__version__", "")).startswith("2.")
        return config if config != "hard_sigmoid" or is_newer else KERAS_2_HARD_SIGMOID
    kind = type(function).__name__
    if function is not None and kind in _LAYERS and _is_of_keras(type(function), kind):
        options = function.get_config()
        given = [float(options[key]) for key in ("negative_slope", "alpha") if options.get(key) is not None]
        if kind != "ReLU":
            return (_LAYERS[kind], *given)
        if (options.get("max_value"), options.get("threshold"), *given) == (None, 0, 0):
            return "relu"
    named = f" of {getattr(function, '__module__', None)}" if isinstance(config, str) and config in PARAMETERS else ""
    raise ConversionError(
        f"{what} has {name}={config!r}{named}; expected one of Keras's own {', '.join(PARAMETERS)}. If yours"
        f" computes one of these, convert the arrays: from_keras(layer.get_weights(), {name}=...)"
    )


def _from_list(
    caller: str, source: Sequence[Any], reset_after: bool | None, activations: Mapping[str, Activation]
) -> tuple[Layer, list[Layer]]:
    """The layer of a list, and which of its layers were made of arrays."""
    if not source or not all(hasattr(part, "get_config") or isinstance(part, (list, tuple)) for part in source):
        layers = _from_arrays(caller, source, reset_after, activations)
        return layers[0] if len(layers) == 1 else Stack(layers), layers
    parts: list[tuple[Layer, list[Layer]]] = [
        (from_keras(part, reset_after=reset_after), [])
        if hasattr(part, "get_config")
        else _from_list(caller, part, reset_after, activations)
        for part in source
    ]
    return Stack([layer for layer, _ in parts]), [each for _, from_arrays in parts for each in from_arrays]


def _cells_in(layers: Iterable[Layer]) -> list[Cell]:
    return [cell for layer in layers for cell in layer._cells().values() if isinstance(cell, Cell)]


class Part(NamedTuple):
    """Arrays of one cell, or of a Dense."""

    arrays: list[Any]
    shapes: list[tuple[int, ...]]
    outputs: int

    @property
    def is_dense(self) -> bool:
        return len(self.shapes) == 1 or len(self.shapes[1]) == 1


def _from_arrays(
    caller: str, source: Sequence[Any], reset_after: bool | None, activations: Mapping[str, Activation]
) -> list[Layer]:
    """The layers whose arrays these are, one layer after the other."""
    shapes = [np.shape(array) for array in source]
    is_embedded = [*map(len, shapes)] == [2, 2, 2] and shapes[0][1] != shapes[1][1] == shapes[2][1]  # and has no bias
    if len(source) in (2, 3) and len(shapes[1]) != 1 and not is_embedded:
        return [_cell_from_arrays(caller, source, reset_after, activations)]
    parts = _parts(caller, source)
    layers: list[Layer] = []
    for count in _grouping(caller, parts):
        first, *second = parts[:count]
        del parts[:count]
        if first.is_dense:
            layers.append(_dense_from_arrays(caller, first.arrays))
            continue
        cells = [_cell_from_arrays(caller, part.arrays, reset_after, activations) for part in (first, *second)]
        layers.append(Bidirectional(*cells) if second else cells[0])
    return layers


def _parts(caller: str, source: Sequence[Any]) -> list[Part]:
    """The arrays of a list, by the cell or the Dense that they belong to."""
    if not source:
        raise ValueError(f"{caller}: got no arrays; expected those of get_weights() of a layer or a model")
    shapes = [np.shape(array) for array in source]
    parts: list[Part] = []
    k = 0
    while k < len(shapes):
        kernel, second, third = (*shapes[k : k + 3], (), ())[:3]
        if len(kernel) != 2:
            raise ValueError(
                f"{caller}: array {k} has shape {kernel}; expected the kernel of an LSTM, a GRU or a Dense. If the"
                f" model has other layers, too, pass the model itself, or the arrays of these layers alone"
            )
        outputs, count = kernel[1], 0
        if len(second) == 2 and kernel[1] == second[1] and second[1] in (3 * second[0], 4 * second[0]):
            outputs = second[0]
            count = 3 if len(third) == 1 or third == (2, kernel[1]) else 2
        elif second == (outputs, outputs) and len(source) in (4, 6) and _are_twins(shapes):
            count = len(source) // 2  # a Bidirectional of SimpleRNNs: with I = H, `_grouping` finds two ways
        elif second == kernel[1:]:
            count = 2
        elif k and second != (outputs, outputs):  # a SimpleRNN's arrays would begin like that, and an Embedding's at 0
            count = 1
        if not count:
            raise ValueError(
                f"{caller}: array {k} has shape {kernel}, and no bias comes after it: it may be of an Embedding, a"
                f" SimpleRNN or a Dense with use_bias=False. Pass the model itself; or, of an Embedding, leave that"
                f" array out{': weights[1:]' if not k else ''}; or, of a Dense, pass its kernel and np.zeros({outputs})"
                f" as its bias"
            )
        parts.append(Part([*source[k : k + count]], shapes[k : k + count], outputs))
        k += count
    return parts


def _are_twins(shapes: Sequence[tuple[int, ...]]) -> bool:
    """Whether these are the shapes of two layers that are alike."""
    half = len(shapes) // 2
    return shapes[:half] == shapes[half:]


def _grouping(caller: str, parts: list[Part]) -> tuple[int, ...]:
    """How many parts each layer has: two make a Bidirectional, and each layer's input is the one before's output."""
    ways: list[list[tuple[int, ...]]] = [[()]]  # from each part on: none, the only one, or two of several
    for k in reversed(range(len(parts))):
        twins = not parts[k].is_dense and parts[k + 1 :] and parts[k].shapes == parts[k + 1].shapes
        fitting = [
            count
            for count in ((1, 2) if twins else (1,))
            if k + count == len(parts) or parts[k + count].shapes[0][0] == count * parts[k].outputs
        ]
        ways.insert(0, [(count, *rest) for count in fitting for rest in ways[count - 1]][:2])
    if len(ways[0]) == 1:
        return ways[0][0]
    if ways[0]:
        first, second = ways[0]
        k = next(sum(first[:j]) for j in range(len(first)) if first[j] != second[j])
        raise ValueError(
            f"{caller}: with I = H = {parts[k].outputs}, the {2 * len(parts[k].arrays)} arrays are those of a"
            f" Bidirectional or of two layers, one on the other; pass the Keras model or its layers, or convert the"
            f" arrays of each cell alone and put the cells into a blockcell.Bidirectional or a blockcell.Stack"
        )
    sizes = [(part.shapes[0][0], part.outputs) for part in parts]
    raise ValueError(
        f"{caller}: the arrays are of layers with {', '.join(f'{i} inputs and {o} outputs' for i, o in sizes)}, which"
        f" do not stand one behind the other; convert the arrays of each alone"
    )


def _dense_from_arrays(caller: str, arrays: Sequence[Any], activation: str | None = None) -> Dense:
    read = read_arrays(caller, dict(zip(("kernel", "bias"), arrays, strict=False)))
    kernel = read["kernel"]
    return Dense(kernel, read.get("bias", np.zeros(kernel.shape[-1:], kernel.dtype)), activation)


def _cell_from_arrays(
    caller: str,
    source: Sequence[Any],
    reset_after: bool | None,
    activations: Mapping[str, Activation],
    reverse: bool = False,
) -> Cell:
    names = ["kernel", "recurrent_kernel", "bias"][: len(source)]
    arrays = read_arrays(caller, dict(zip(names, source, strict=True)))
    kernel, recurrent = arrays["kernel"], arrays["recurrent_kernel"]
    gates = count_gates(caller, "recurrent_kernel", recurrent, axis=1)
    columns = gates * len(recurrent)
    bias = arrays.get("bias")
    if gates == 3 and bias is None and reset_after is None:
        raise ConversionError(
            f"{caller}: a GRU without a bias does not show whether it has reset_after=True (Keras's default); pass the"
            f" layer itself, or reset_after="
        )
    if bias is not None and bias.shape == (2 * columns,):
        raise ConversionError(
            f"{caller}: bias has shape {bias.shape}, that of Keras 2's CuDNNLSTM and CuDNNGRU, whose kernels are laid"
            f" out differently. Load the weights into a keras.layers.LSTM or GRU first, which converts them"
        )
    if reset_after is None:
        reset_after = bias is not None and bias.ndim == 2
    reset_after = reset_after and gates == 3
    shape = (2, columns) if reset_after else (columns,)
    if bias is None:
        bias = np.zeros(shape, kernel.dtype)
    check_shapes(caller, {"kernel": (kernel, (None, columns)), "bias": (bias, shape)})
    biases = bias if reset_after else (bias, None)
    options: dict[str, Any] = {"reset_after": reset_after} if gates == 3 else {}
    options |= {name: value for name, value in activations.items() if gates > 1 or name == "activation"}
    return make_cell(f"Keras {KINDS[gates]}", kernel, recurrent, *biases, reverse=reverse, **options)
