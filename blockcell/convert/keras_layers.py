"""Layers and models of Keras, as `KerasLayer` describes them, and arrays alone become layers of blockcell."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..activations import PARAMETERS, Activation
from ..errors import short
from ..layers import Bidirectional, Dense, Layer, Stack
from ..optable import ACTIVATIONS, Array
from .keras_description import CUDNN_CONFIG, LONGEST_NAME, WITHOUT_EFFECT, KerasLayer, tensors_of
from .models import Assembly, Step, labels_left_out
from .shared import (
    KINDS,
    ConversionError,
    RecurrentCell,
    check_shapes,
    count_gates,
    make_cell,
    read_arrays,
)

_TIME_DISTRIBUTED = (
    "it calls its layer for each slice x[:, n] of x (B, N, T, I): pass these, or all as the rows of one batch"
)
OWN_CALL = "its call() is its own"
ZEROS = ", in which y is 0 at masked steps, where Keras gives what its Dense makes of 0"

_Keys = tuple[str | None, ...] | None  # as `Step.inputs`


# -------------------------------------------------------------------------------------------------------------- models
def add_model(caller: str, steps: dict[str, Step], model: KerasLayer, prefix: str = "", inputs: _Keys = ()) -> _Keys:
    """Convert the layers of a model, and add them under their names, which begin with the prefix.

    Return the keys of the steps that the model's results come from, None for a whole model whose call() is its own.
    """
    if model.kind == "Sequential":
        for layer in model.layers:
            inputs = _add_layer(caller, steps, layer, prefix, inputs)
        return inputs
    config = model.config
    entries = {entry.get("name") or entry["config"]["name"]: entry for entry in config.get("layers", ())}
    if not any("inbound_nodes" in entry for entry in entries.values()):
        for layer in model.layers:
            _add_layer(caller, steps, layer, prefix, None)
        return _add_part(steps, prefix[:-1], model.kind, inputs, OWN_CALL) if prefix else None
    layers = {layer.name: layer for layer in model.layers}
    starts = {name: k for k, (name, _) in enumerate(tensors_of(config.get("input_layers")))} if inputs else {}
    results: dict[str, _Keys] = {}
    called_again: list[tuple[str, list[tuple[str, int]]]] = []  # the keys of their parts, and what all calls read

    def keys_of(tensors: Sequence[tuple[str, int]], reader: str) -> _Keys:
        """Return the keys of the steps that results of layers come from."""
        if not tensors or not results.keys() >= {name for name, _ in tensors}:
            raise ValueError(f"{caller}: the model {model.name!r} does not say which of the layers before it {reader}")
        return tuple(_key_of_result(steps, results[name] or (), index) for name, index in tensors)

    for name, entry in entries.items():  # each is behind those that it reads
        key, nodes = prefix + name, entry.get("inbound_nodes")
        nodes = nodes if isinstance(nodes, list) else []
        kind = layers[name].kind if name in layers else str(entry.get("class_name"))
        tensors = [*tensors_of(nodes)]
        is_recurrent = name in layers and layers[name].is_recurrent and len(nodes) == 1
        states = tensors[1:] if is_recurrent else []
        if states:  # those of other layers are not among the results that the model needs: a hint names the layers
            tensors = [tensors[0], *(state for state in states if not state[1])]
        if name in starts or kind == "InputLayer":
            sources: _Keys = (inputs or ())[starts[name] :][:1] if name in starts else ()
        elif len(nodes) > 1:  # a call may read what follows another one
            sources = keys_of([tensor for tensor in tensors if tensor[0] in results], f"{name!r} reads")
        else:
            sources = keys_of(tensors, f"{name!r} reads")
        if states:  # and they keep the layer from being joined with the one before it
            sources = (*(sources or ()), *[None] * (1 + len(states) - len(tensors)))
        if name not in layers:
            steps[key] = Step(f"{key} ({kind})", sources, source=KerasLayer(kind, name, {}))
            results[name] = (key,)
            continue
        results[name] = _add_layer(caller, steps, layers[name], prefix, sources)
        if len(nodes) > 1:
            parts = _add_part(steps, key, kind, results[name], "that it is called more than once")
            results[name] = parts
            called_again.append((parts[0], tensors))
        elif is_recurrent:
            source = steps[key].source
            is_lost = bool(states) and isinstance(nodes[0], Mapping)  # Keras 3 passes masks to calls of x alone
            has_mask = len([*tensors_of(nodes, with_masks=True)]) > len([*tensors_of(nodes)])
            has_mask = has_mask or (False if is_lost else source.has_mask)
            steps[key] = steps[key]._replace(source=source._replace(has_mask=has_mask))
            _add_state_hint(steps, key, [prefix + origin for origin, _ in states])
    for part, tensors in called_again:
        steps[part] = steps[part]._replace(inputs=(*(steps[part].inputs or ()), *(keys_of(tensors, part) or ())))
    return keys_of([*tensors_of(config.get("output_layers"))], "gives its results")


def _add_part(steps: dict[str, Step], key: str, kind: str, inputs: _Keys, hint: str) -> tuple[str, ...]:
    """Add a step for what is dropped of a layer or a model behind its own steps, and return its key.

    Nothing that follows it is joined with these steps.
    """
    part = f"{key}: {hint}"
    steps[part] = Step(f"{key} ({kind})", inputs, hint=hint, source=KerasLayer("", key, {}))
    return (part,) * len(inputs or (None,))


def _key_of_result(steps: dict[str, Step], keys: Sequence[str | None], index: int) -> str | None:
    """Return the key of the step that a result of a layer comes from; of the states of a layer, a step of their own."""
    if 0 <= index < len(keys):
        return keys[index]
    key = keys[0] if len(keys) == 1 else None
    if index < 0 or key is None or steps[key].layer is None:
        return key
    hint = "its states are used, which a call returns beside y"
    _add_part(steps, key, steps[key].source.kind, (), hint)
    return f"{key}: {hint}"


def _add_state_hint(steps: dict[str, Step], key: str, origins: Sequence[str]) -> None:
    """Say of a recurrent layer, if it does so, that its call starts from results of other layers."""
    step = steps[key]
    states = (step.inputs or ())[1:]
    if not all(state and _is_input(steps, state) for state in states):
        what = "results" if any(states) else "state"
        hint = f"it starts from the {what} of {', '.join(dict.fromkeys(origins))}: pass state="
        steps[key] = step._replace(hint="; ".join(filter(None, (hint, step.hint))))


def _is_input(steps: Mapping[str, Step], key: str) -> bool:
    """Return whether a step is an input of the whole model, or of a model in it that gets it."""
    while steps[key].source.kind == "InputLayer" and (inputs := steps[key].inputs) and inputs[0] is not None:
        key = inputs[0]
    return bool(steps[key].source.kind == "InputLayer" and not steps[key].inputs)


def add_mask_hints(steps: dict[str, Step], assembly: Assembly) -> Assembly:
    """Say of layers that make a mask how to pass it to calls of the converted layers, and whom none reaches.

    If there are none, say which layer gets a mask: Keras 3 passes the masks that layers make to each call, too.
    """
    recurrent = [key for key in assembly.keys if steps[key].source.is_recurrent]
    is_one = not isinstance(assembly.layers, dict)
    repeating = [key for key in (recurrent[-1:] if is_one else recurrent) if repeats_masked_steps(steps[key])]
    names = "" if is_one or len(repeating) == len(recurrent) else f" to those of {', '.join(repeating)}"
    masked = f', and masked="repeat"{names}' if repeating else ""
    if is_one and gives_zeros(steps, assembly.keys):
        masked = ZEROS
    makers = {"Masking": "mask=", "Embedding": "mask=ids != 0"}
    has_maker = any(map(makes_mask, steps.values()))
    unmasked = {key for key, step in steps.items() if step.source.has_mask is False}
    if any("/" in key or step.source.kind == "Multiply" for key, step in steps.items()):  # which may pass masks on
        unmasked = {key for key in unmasked if (steps[key].inputs or ())[1:]}  # but not to calls with states
    for key, step in steps.items():
        hint = "no mask reaches it" if has_maker and key in unmasked else ""
        hint = "it gets a mask: pass mask=" if step.source.has_mask and not has_maker else hint
        if makes_mask(step) and not unmasked.issuperset(recurrent):
            hint = f"pass {makers[step.source.kind]} to the layer's calls{masked}"
        steps[key] = step._replace(hint="; ".join(filter(None, (step.hint, hint))))
    return assembly._replace(left_out=labels_left_out(steps, assembly.needed_keys, assembly.keys))


def makes_mask(step: Step) -> bool:
    """Return whether a layer of Keras makes a mask of its input."""
    source = step.source
    return bool(source.kind == "Masking" or (source.kind == "Embedding" and source.config.get("mask_zero")))


def repeats_masked_steps(step: Step) -> bool:
    """Return whether Keras' layer repeats its output at masked steps: all but a Bidirectional do."""
    config = step.source.config
    is_sequence = config.get("return_sequences", False) and step.source.kind != "Bidirectional"
    return bool(is_sequence and not config.get("zero_output_for_mask"))


def gives_zeros(steps: Mapping[str, Step], keys: Sequence[str]) -> bool:
    """Return whether a converted chain gives zeros at masked steps, where Keras gives what a Dense makes of zeros."""
    top = max((k for k, key in enumerate(keys) if steps[key].source.is_recurrent), default=len(keys) - 1)
    if not any(isinstance(steps[key].layer, Dense) for key in keys[top + 1 :]):
        return False
    return steps[keys[top]].dense_last is None and not repeats_masked_steps(steps[keys[top]])


def _add_layer(caller: str, steps: dict[str, Step], source: KerasLayer, prefix: str, inputs: _Keys) -> _Keys:
    """Add a layer or a nested model; return the keys of the steps that its results come from."""
    if source.is_model:
        return add_model(caller, steps, source, f"{prefix}{source.name}/", inputs)
    key = prefix + source.name
    while key in steps and len(key) <= LONGEST_NAME:  # models that do not know the order may have one name twice
        key += "'"
    if len(key) > LONGEST_NAME:
        raise ValueError(f"{caller}: the layer {short(key)} has a name of more than {LONGEST_NAME} letters")
    if source.kind == "TimeDistributed" and _has_recurrent(source):
        inner_keys = _add_layer(caller, steps, source.layers[0], f"{key}/", (None,)) or ()
        reads = None if inputs is None else (*inputs, *inner_keys)
        steps[key] = Step(f"{key} (TimeDistributed)", reads, hint=_TIME_DISTRIBUTED, source=source)
    else:
        is_masked = _gets_mask(source.instance) if source.is_recurrent and not prefix else None
        source = source._replace(has_mask=is_masked)
        steps[key] = step_of_layer(caller, source, key, inputs)._replace(source=source)
    return (key,)


def _gets_mask(layer: Any) -> bool | None:
    """Return whether a mask reaches a layer in memory, by the symbolic tensor that it reads; None if nothing tells."""
    try:
        x = layer.input
    except (AttributeError, RuntimeError, ValueError):  # the layer was called more than once, or never
        return None
    while isinstance(x, (list, tuple)):
        x = x[0]
    return getattr(x, "_keras_mask", None) is not None


def _has_recurrent(source: KerasLayer) -> bool:
    """Return whether a recurrent layer is in a layer, or in a model in it."""
    return any(inner.is_recurrent or _has_recurrent(inner) for inner in source.layers)


def step_of_layer(caller: str, source: KerasLayer, key: str, inputs: _Keys) -> Step:
    """Return the step of a layer that is no model."""
    kind, config = source.kind, source.config
    plain = Step(f"{key} ({kind})", inputs)
    if source.module:
        return plain
    if kind == "RNN" and not all(cell.is_cell for cell in source.cells):
        names = ", ".join(cell.kind for cell in source.cells)
        return plain._replace(label=f"{key} ({kind} of {names})", hint="not Keras's own cells")
    if source.is_recurrent:
        is_bidirectional = kind == "Bidirectional"
        config = source.layers[0].config if is_bidirectional else config
        hint = "stateful=True: call it as a stream, or pass state=" if config.get("stateful") else ""
        step = plain._replace(layer=convert_layer(caller, source), hint=hint)
        if config.get("return_sequences") or kind.endswith("Cell"):
            return step
        return step._replace(dense_last="ends" if is_bidirectional or config["go_backwards"] else "last")
    if kind == "TimeDistributed" and not source.layers[0].is_model:
        return step_of_layer(caller, source.layers[0], key, inputs)
    if kind == "Dense":
        if _is_dense_activation(config["activation"]):
            return plain._replace(layer=_dense(caller, source))
        return plain._replace(hint=f"its activation is {_shown(config['activation'])}")
    if kind == "Activation" or (kind == "Softmax" and config["axis"] == -1):
        activation = config["activation"] if kind == "Activation" else "softmax"
        is_of_dense = isinstance(activation, str) and activation in ACTIVATIONS
        return plain._replace(is_identity=activation == "linear", activation=activation if is_of_dense else None)
    return plain._replace(is_identity=kind in WITHOUT_EFFECT)


def _is_dense_activation(value: Any) -> bool:
    return isinstance(value, str) and (value == "linear" or value in ACTIVATIONS[1:])


def is_cell_activation(value: Any) -> bool:
    """Return whether cells here have the activation, which `known_activation` returned."""
    return isinstance(value, tuple) or (isinstance(value, str) and value in PARAMETERS)


def _shown(value: Any) -> str:
    """Return an activation of a config for messages; a function of one's own by its name and its module."""
    if isinstance(value, Mapping) and value.get("class_name") == "function":
        return f"{reprlib.repr(value.get('config'))} of {value.get('module')}"
    return reprlib.repr(value)


# -------------------------------------------------------------------------------------------------------------- layers
def convert_layer(caller: str, source: KerasLayer) -> Layer:
    """Convert one of Keras' layers."""
    kind, config = source.kind, source.config
    if source.module or not (source.is_recurrent or kind == "Dense"):
        class_name = f"{source.module}.{kind}" if source.module else kind
        raise ConversionError(
            f"{caller}: the source is a {class_name}; expected Keras's LSTM, GRU, SimpleRNN, their cells, an RNN of"
            f" these, Bidirectional or Dense, or a model. Of another class that computes the same, pass its"
            f" get_weights()"
        )
    if kind == "Dense":
        return _dense(caller, source)
    label = f"{caller}: {kind} {source.name!r}"
    if kind == "Bidirectional":
        if config["merge_mode"] != "concat":
            raise ConversionError(
                f"{label} has merge_mode={short(config['merge_mode'])}; only 'concat' can be expressed. Convert its"
                f" get_weights() and combine the two halves of y outside"
            )
        fw, bw = source.layers
        if fw.config.get("go_backwards") or any(len(half.cells) != 1 for half in (fw, bw)):
            raise ConversionError(
                f"{label} has a forward layer with go_backwards=True, or an RNN of several cells in each direction;"
                f" neither can be expressed. Convert the cells of each and combine the two halves of y outside"
            )
        cells = [_cell(caller, half.cells[0]) for half in (fw, bw)]
        if cells[0].hidden_size != cells[1].hidden_size:
            raise ConversionError(
                f"{label} has a forward layer of {cells[0].hidden_size} units and a backward layer of"
                f" {cells[1].hidden_size}; both must have as many. Convert the get_weights() of each, and combine y of"
                f" the first, fw(x)[0], with that of the other, bw(x[::-1])[0][::-1]"
            )
        return Bidirectional(*cells)
    reverse = config.get("go_backwards", False)
    if reverse and config["return_sequences"]:
        raise ConversionError(
            f"{label} has go_backwards=True and return_sequences=True: its output begins with the last step, that of a"
            f" layer with reverse=True with the first. Convert its get_weights() and call the layer with x[::-1]: y is"
            f" then in Keras's order"
        )
    cells = [_cell(caller, cell, reverse) for cell in source.cells]
    return cells[0] if len(cells) == 1 else Stack(cells)


def _dense(caller: str, source: KerasLayer) -> Dense:
    label = f"{caller}: Dense {source.name!r}"
    activation = source.config["activation"]
    if not _is_dense_activation(activation):
        raise ConversionError(
            f"{label} has activation={_shown(activation)}; only Keras's own linear, {', '.join(ACTIVATIONS[1:])}"
            f" can be expressed"
        )
    if not source.arrays:
        raise ValueError(f"{label} has no weights yet; build it, or call it once")
    return dense_from_arrays(label, source.arrays, None if activation == "linear" else activation)


def _cell(caller: str, source: KerasLayer, reverse: bool = False) -> RecurrentCell:
    kind, config = source.kind.removesuffix("Cell"), source.config
    label = f"{caller}: {source.kind} {source.name!r}"
    if not source.is_cell:
        raise ConversionError(f"{label} is none of Keras's LSTM, GRU and SimpleRNN, nor a cell of these")
    names = ("activation",) if kind == "SimpleRNN" else ("activation", "recurrent_activation")
    for name in names:
        if not is_cell_activation(config[name]):
            raise ConversionError(
                f"{label} has {name}={_shown(config[name])}; expected one of Keras's own {', '.join(PARAMETERS)}. If"
                f" yours computes one of these, convert the arrays: from_keras(layer.get_weights(), {name}=...)"
            )
    if not source.arrays:
        raise ValueError(f"{label} has no weights yet; build it, or call it once")
    activations = {name: config[name] for name in names}
    return cell_from_arrays(caller, source.arrays, kind == "GRU" and config["reset_after"], activations, reverse)


# -------------------------------------------------------------------------------------------------------------- arrays
def dense_from_arrays(caller: str, arrays: Sequence[Any], activation: str | None = None) -> Dense:
    """Make a `Dense` of a kernel and, if there is one, a bias."""
    read = read_arrays(caller, dict(zip(("kernel", "bias"), arrays, strict=False)))
    kernel = read["kernel"]
    return Dense(kernel, read.get("bias", np.zeros(kernel.shape[-1:], kernel.dtype)), activation)


def cell_from_arrays(
    caller: str,
    source: Sequence[Any],
    reset_after: bool | None,
    activations: Mapping[str, Activation],
    reverse: bool = False,
) -> RecurrentCell:
    """Make a cell of a kernel, a recurrent kernel and, if there is one, a bias."""
    names = ["kernel", "recurrent_kernel", "bias"][: len(source)]
    arrays = read_arrays(caller, dict(zip(names, source, strict=True)))
    kernel, recurrent = arrays["kernel"], arrays["recurrent_kernel"]
    gates = count_gates(caller, "recurrent_kernel", recurrent, axis=1)
    columns = gates * len(recurrent)
    bias: Array | None = arrays.get("bias")
    if gates == 3 and bias is None and reset_after is None:
        raise ConversionError(
            f"{caller}: a GRU without a bias does not show whether it has reset_after=True (Keras's default); pass the"
            f" layer itself, or reset_after="
        )
    if bias is not None and bias.shape == (2 * columns,) and gates > 1:
        check_shapes(caller, {"kernel": (kernel, (None, columns))})
        if unlike := [name for name, value in activations.items() if value != CUDNN_CONFIG[name]]:
            raise ConversionError(
                f"{caller}: bias has shape {bias.shape}, that of Keras 2's CuDNNLSTM and CuDNNGRU, whose activations"
                f" are tanh and sigmoid; {unlike[0]} is {activations[unlike[0]]!r}"
            )
        kernel, recurrent, bias = _without_cudnn(kernel, recurrent, bias, gates)
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


def _without_cudnn(kernel: Array, recurrent: Array, bias: Array, gates: int) -> tuple[Array, Array, Array]:
    """Return arrays of Keras 2's CuDNNLSTM or CuDNNGRU as those of an LSTM, or of a GRU with reset_after."""
    kernels = [part.T.reshape(part.shape, order="F") for part in np.split(kernel, gates, axis=1)]
    recurrent_kernels = [part.T for part in np.split(recurrent, gates, axis=1)]
    biases = bias.reshape(2, -1)
    bias = biases if KINDS[gates] == "GRU" else biases[0] + biases[1]
    return np.concatenate(kernels, axis=1), np.concatenate(recurrent_kernels, axis=1), bias


def cells_in(layers: Iterable[Layer | None]) -> list[RecurrentCell]:
    """Return the cells of layers, in the order in which the arrays of Keras stand one after the other."""
    leaves = [leaf for layer in layers if layer is not None for leaf in layer._leaves().values()]
    return [leaf for leaf in leaves if isinstance(leaf, RecurrentCell)]
