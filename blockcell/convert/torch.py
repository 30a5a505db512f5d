"""Weights from and to PyTorch."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..layers import GRU, LSTM, RNN, Bidirectional, Dense, Layer, Stack
from ..layers.structure import snapshot_of
from ..optable import ACTIVATIONS, Array
from .comparison import NotCompared, Outcome
from .models import Assembly, Converted, Step, assemble, nest_states, read_initial_state, warn_once
from .shared import (
    GATE_COUNTS,
    KINDS,
    ConversionError,
    RecurrentCell,
    cells_of,
    check_shapes,
    count_gates,
    is_of,
    make_cell,
    read_arrays,
    read_names,
    split_cell,
    zoneout_remark,
)

CALLER = "from_torch"
"""The name of the function that the user called, for messages."""


def from_torch(
    source: Any,
    *,
    prefix: str | None = None,
    nonlinearity: str | None = None,
    initial_state: Sequence[str] | None = None,
    check: bool | None = None,
) -> Any:
    """Convert a ``torch.nn.LSTM``, ``GRU`` or ``RNN``, or a whole PyTorch model.

    .. code-block:: python

        layer = convert.from_torch(torch.load("model.pt", weights_only=True), prefix="encoder.lstm.")

    Parameters
    ----------
    source : mapping of str to array_like, or module
        A module, a state_dict, or a similar mapping (safetensors, numpy arrays) with PyTorch's names: ``weight_ih_l0``,
        ``weight_hh_l0``, ``bias_ih_l0``, ``bias_hh_l0``, ``_reverse`` for the other direction, ``_l1`` and so on; or
        the names of ``torch.nn.LSTMCell``, ``GRUCell`` and ``RNNCell``, without ``_l0``.
    prefix : str, optional
        The prefix of the names of one LSTM, GRU, RNN or Linear. None converts all.
    nonlinearity : {"tanh", "relu"}, optional
        The activation of plain RNNs, which a state_dict does not contain. None takes it from the module; without a
        module it is "tanh", with a warning.
    initial_state : sequence of str, optional
        The names of the parameters from which the only LSTM, GRU or RNN starts: first h, then c of an LSTM, such as
        ``("h0", "c0")``. The result is then ``(layer, state)``, and calls take the state for any batch:
        ``y, last = layer(x, state)``. Shapes are (num_layers * D, 1, H) as in torch.nn, or without the 1.
    check : bool, optional
        Whether the source runs on random inputs and must compute what the layer computes. None, the default, compares
        where nothing but the model's own code is run; True also where the model has hooks of the user's; False does
        not compare. The module that you pass stays as it is: a copy of it runs.

    Returns
    -------
    LSTM, GRU, RNN, Bidirectional, Stack, Dense, or dict of str to Layer
        A `Stack` for more than one layer. A GRU has ``reset_after=True``, an LSTM with ``proj_size`` has `w_p`.

        Several LSTMs, GRUs and RNNs become a dict by their prefixes, because neither a state_dict nor a module shows
        the order in which ``forward`` calls them. A ``torch.nn.Sequential`` has an order: it becomes a `Stack` if there
        is nothing between them but Dropout and Identity. Linears before and behind them belong to the stack, with their
        activations.

    Warns
    -----
    UserWarning
        Without a prefix, parts of the model are skipped. The nonlinearity of plain RNNs is not known. A module or a
        name says zoneout, which is not converted.

    Raises
    ------
    TypeError
        The source is no mapping, or a tensor cannot be read as an array of float32, float64 or float16.
    ConversionError
        Weights are split by weight or spectral normalization, or by pruning.
    ValueError
        There is no LSTM, GRU or RNN, or none with the prefix, or PyTorch has quantized it; weights are missing or
        unused, or shapes are wrong; a `nonlinearity` is passed without a plain RNN.

    Notes
    -----
    PyTorch trains two biases; a layer has their sum, ``bias_ih + bias_hh``. With the same learning rate, PyTorch's sum
    moves twice as far in a step; docs/convert.md has the cure. Only the candidate of a GRU has both, b_c and b_hc.
    Of weights that AWD-LSTM and fastai drop (``weight_hh_l0_raw``) the layer has those before the drop, as in
    inference.
    PyTorch's states are ``(h, c)``, a layer's are ``LSTMState(cs, h)`` or have names, ``state={"h": h, "cs": c}``.
    ``batch_first`` is an argument of the call.
    """
    module = source
    if callable(getattr(source, "state_dict", None)):
        source = source.state_dict()
    if not isinstance(source, Mapping):
        expected = "expected a module or a state_dict: names and tensors"
        expected += "; pass program.module() of a program that torch.export gave" * hasattr(source, "graph_module")
        raise TypeError(f"{CALLER}: the source is of type {type(source).__name__}; {expected}")
    if nonlinearity not in (None, "tanh", "relu"):
        raise ValueError(f"{CALLER}: nonlinearity is {nonlinearity!r}; expected 'tanh', 'relu' or None")
    tensors, modules = _without_weight_drop(source), getattr(module, "named_modules", dict)
    weights = _Weights(tensors, _groups(tensors), dict(modules()), nonlinearity, {})
    assembly = _convert(module, weights, prefix, initial_state or ())
    layers, remarks = assembly.layers, _remarks_of_nonlinearity(weights)
    state = None if initial_state is None else _initial_state(source, layers, initial_state)
    outcome = Outcome() if check is False else _compare(module, prefix, assembly, state, check)
    if check is False or prefix is not None or outcome.remarks:  # not all of a model was compared
        mixed = [repr(key) if key else "the model" for key in assembly.keys if _is_in_zoneout(weights.modules, key)]
        remarks += [zoneout_remark(" and ".join(mixed))] if mixed and not isinstance(layers, Dense) else []
    warn_once(CALLER, [*assembly.left_out, *outcome.left_out], [*remarks, *outcome.remarks], stacklevel=2)
    return layers if initial_state is None else (layers, state)


class _Weights(NamedTuple):
    """The tensors of a state_dict, and which of them are weights of LSTMs, GRUs and RNNs."""

    tensors: Mapping[str, Any]
    groups: Mapping[str, set[str]]
    """The names of the weights of each module by its prefix, without it."""
    modules: Mapping[str, Any]
    """The modules by name, if there are any."""
    nonlinearity: str | None
    """The activation of all plain RNNs, if the user told it."""
    is_told: dict[str, bool]
    """Whether the activation of a plain RNN is known, by the prefixes of those that were converted."""


def _convert(module: Any, weights: _Weights, prefix: str | None, state_names: Sequence[str]) -> Assembly:
    """Convert the layers of a state_dict, or those with the prefix."""
    source, groups = weights.tensors, weights.groups
    if prefix is not None:
        if prefix in groups or f"{prefix}weight" in source:
            layer = _recurrent(weights, prefix) if prefix in groups else _dense(weights, prefix)
            return Assembly(layer, None, (prefix.removesuffix("."),), [])
        raise ValueError(f"{CALLER}: no LSTM, GRU or RNN has the prefix {prefix!r}; there are {[*groups]}{_QUANTIZED}")
    if is_of(("torch",), type(module), "Linear"):
        return Assembly(_dense(weights, ""), None, ("",), [])
    if not groups:
        mappings = {key: value for key, value in source.items() if isinstance(value, Mapping)}
        inner = [key for key, value in mappings.items() if any(_NAME.match(str(name)) for name in value)]
        advice = f"; they are in source[{inner[0]!r}]: pass that" if inner else ""
        expected = "expected the weights of an LSTM, a GRU or an RNN"
        raise ValueError(f"{CALLER}: {expected}, found none: no name ends in weight_hh_l0{advice}{_QUANTIZED}")
    steps: dict[str, Step] = {}
    if is_of(("torch",), type(module), "Sequential"):
        result = _add_modules(steps, weights, module, "", None)
        return assemble(CALLER, steps, [result])
    _add_groups(steps, weights, "")
    _add_others(steps, weights, [name for name in source if name not in state_names and not _NAME.match(name)])
    return assemble(CALLER, steps, None)


def _compare(module: Any, prefix: str | None, assembly: Assembly, state: Any, check: bool | None) -> Outcome:
    """Compare the layers with the module."""
    torch, advice = sys.modules.get("torch"), "pass the module, or check=False"
    try:
        if isinstance(module, Mapping):
            raise NotCompared(f"only weights were given: {advice}")
        if torch is None or not isinstance(module, torch.nn.Module):
            raise NotCompared(f"it is no PyTorch module: {advice}")
        from .torch_run import Piece, compare_module  # only here, as it imports PyTorch

        layers, keys = assembly.layers, assembly.keys
        pieces = (
            [Piece(layers[key], (key,)) for key in keys] if isinstance(layers, dict) else [Piece(layers, keys, state)]
        )
        part = dict(module.named_modules(remove_duplicate=False)).get(keys[0])
        if prefix is not None and state is None and part is not None:
            module, pieces = part, [pieces[0]._replace(names=("",))]
        is_whole = len(pieces) == 1 and not assembly.left_out and prefix is None
        outcome = compare_module(CALLER, module, pieces, is_whole, check)
    except NotCompared as error:
        return Outcome(remarks=[error.remark])
    return outcome if prefix is None else Outcome(remarks=outcome.remarks)


def _is_in_zoneout(modules: Mapping[str, Any], key: str) -> bool:
    """Return whether a part of a model has zoneout by its name or by the class of a module around it."""
    around = [name for name in modules if f"{key}.".startswith(f"{name}." if name else "")]
    return "zoneout" in " ".join([key, *(type(modules[name]).__name__ for name in around)]).lower()


def _initial_state(source: Mapping[str, Any], layer: Converted, names: Sequence[str]) -> Any:
    """Read the state of a layer from the parameters of these names."""
    if isinstance(layer, (dict, Dense)):
        prefixes = [f"{key}." if key else "" for key in layer] if isinstance(layer, dict) else []
        expected = f"a prefix, too, of {prefixes}" if prefixes else "an LSTM, a GRU or an RNN"
        raise ValueError(f"{CALLER}: initial_state is given; expected {expected}")
    cells: list[Any] = [leaf for leaf in layer._leaves().values() if not isinstance(leaf, Dense)]
    sizes = {"h": cells[0].output_size} | ({"cs": cells[0].hidden_size} if isinstance(cells[0], LSTM) else {})
    if isinstance(names, str) or len(names) != len(sizes) or not {*names} <= source.keys():
        expected = f"expected the names that {' and '.join(sizes)} have in the source, {('h0', 'c0')[: len(sizes)]} say"
        raise ValueError(f"{CALLER}: initial_state is {names!r}; {expected}")
    states: list[dict[str, Array]] = [{} for _ in cells]
    for name, (field, size) in zip(names, sizes.items(), strict=True):
        array = read_arrays(CALLER, {"its weights": np.empty(0, cells[0].dtype), name: source[name]})[name]
        rows = array[:, None] if array.shape == (len(cells), size) else array
        if rows.ndim != 3 or rows.shape[::2] != (len(cells), size) or not rows.size:
            expected = f"expected ({len(cells)}, 1, {size}) or ({len(cells)}, {size})"
            raise ValueError(f"{CALLER}: {name} has shape {array.shape}; {expected}")
        for state, row in zip(states, rows, strict=True):
            state[field] = row
    return read_initial_state(CALLER, layer, nest_states(layer, iter(states)))


# -------------------------------------------------------------------------------------------------------------- models
_NAME = re.compile(r"(|.*\.)(?:weight|bias)_(?:ih|hh|hr)[^.]*$")
_PART_OF_WEIGHT = re.compile(r"(|.*\.)(?:weight|bias)_(?:ih|hh|hr)[^.]*(?:_g|_v|_orig|\.original\d*)$")
_RAW_WEIGHT = re.compile(r"(|.*\.)((?:weight|bias)_(?:ih|hh|hr)[^.]*)_raw$")
_QUANTIZED = (
    ". If PyTorch has quantized it: load the model without that (in EasyOCR by quantize=False), convert it, and call"
    " layer.quantize('int8')"
)
_IDENTITIES = ("AlphaDropout", "Dropout", "Dropout1d", "FeatureAlphaDropout", "Identity")  # in inference


def _groups(source: Mapping[str, Any]) -> dict[str, set[str]]:
    """Return the names of the weights of LSTMs, GRUs and RNNs, by prefix and without it."""
    groups: dict[str, set[str]] = {}
    for name in read_names(CALLER, source):
        if _PART_OF_WEIGHT.match(name):
            raise ConversionError(
                f"{CALLER}: {name} is a part of a weight that is normalized or pruned. Undo that first, by"
                f" torch.nn.utils.remove_weight_norm, remove_spectral_norm, prune.remove or"
                f" parametrize.remove_parametrizations, for every weight"
            )
        if match := _NAME.match(name):
            groups.setdefault(match[1], set()).add(name[len(match[1]) :])
    return groups


def _without_weight_drop(source: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the tensors with the weights before weight drop, which inference has, in place of their dropped copies.

    Of ``rnn.weight_hh_l0_raw`` the copy is ``rnn.module.weight_hh_l0`` in fastai and in AWD-LSTM, or else
    ``rnn.weight_hh_l0``, if it is stored at all.
    """
    matches = [match for name in read_names(CALLER, source) if (match := _RAW_WEIGHT.match(name))]
    tensors = dict(source)
    for match in matches:
        inner = f"{match[1]}module."
        prefix = inner if any(name.startswith(inner) for name in source) else match[1]
        tensors[prefix + match[2]] = tensors.pop(match[0])
    return tensors


def _add_modules(
    steps: dict[str, Step], weights: _Weights, module: Any, prefix: str, source_key: str | None
) -> str | None:
    """Add the modules of a Sequential, which reads the step `source_key`; return the key of its result."""
    for name, child in module.named_children():
        key, kind = prefix + name, type(child).__name__
        is_known = is_of(("torch", "blockcell"), type(child), kind)
        if is_known and kind == "Sequential":
            source_key = _add_modules(steps, weights, child, f"{key}.", source_key)
            continue
        step = Step(f"{key} ({kind})", (source_key,))
        if is_known and f"{key}." in weights.groups:
            step = step._replace(layer=_recurrent(weights, f"{key}."))
        elif is_known and kind == "Linear":
            step = step._replace(layer=_dense(weights, f"{key}."))
        elif is_known and kind.lower() in ACTIVATIONS and getattr(child, "dim", -1) == -1:
            step = step._replace(activation=kind.lower())
        else:  # perhaps a module of the user's own with layers in it
            _add_groups(steps, weights, f"{key}.")
        steps[key] = step._replace(is_identity=is_known and kind in _IDENTITIES)
        source_key = key
    return source_key


def _add_groups(steps: dict[str, Step], weights: _Weights, start: str) -> None:
    """Add the LSTMs, GRUs and RNNs whose prefixes start so, in an unknown order."""
    for prefix in weights.groups:
        if prefix.startswith(start):
            key = prefix.removesuffix(".")
            steps[key] = Step(key, None, layer=_recurrent(weights, prefix))


def _nonlinearity(weights: _Weights, prefix: str) -> str:
    """Return the activation of a plain RNN: tanh, if nothing tells it."""
    own = getattr(weights.modules.get(prefix.removesuffix(".")), "nonlinearity", None)
    told = weights.nonlinearity or (own if own in ("tanh", "relu") else None)
    weights.is_told[prefix] = told is not None
    return told or "tanh"


def _remarks_of_nonlinearity(weights: _Weights) -> list[str]:
    """Return a remark on plain RNNs whose activation is not known; refuse one that is given and that no layer has."""
    if weights.nonlinearity is not None and not weights.is_told:
        found = f"nonlinearity is {weights.nonlinearity!r}, and there is no plain RNN"
        raise ValueError(f"{CALLER}: {found}; expected None")
    names = ", ".join(repr(prefix) for prefix, is_told in weights.is_told.items() if not is_told)
    remark = f"weights do not tell the nonlinearity of plain RNNs; here it is tanh: {names}. Pass"
    return [f"{remark} nonlinearity='tanh' or 'relu'"] if names else []


def _add_others(steps: dict[str, Step], weights: _Weights, names: Sequence[str]) -> None:
    """Add the modules of other parameters. Some may be the initial states of the only LSTM, GRU or RNN."""
    kernels = [prefix + name for prefix in weights.groups for name in weights.groups[prefix] if "weight_hh" in name]
    shape = len(kernels), 1, *np.shape(weights.tensors[kernels[0]])[1:]
    is_only = len(weights.groups) == 1
    states = [name for name in names if is_only and np.shape(weights.tensors[name]) == shape]
    modules: dict[str, list[str]] = {}
    for name in names:
        module, _, leaf = name.rpartition(".")
        modules.setdefault(module, []).append(leaf)
    for module, leaves in modules.items():
        has_states = any(f"{module}.{leaf}".removeprefix(".") in states for leaf in leaves)
        hint = f"if that is what it starts from, pass initial_state={tuple(states)}" if has_states else ""
        steps[f"{module}."] = Step(f"{module} ({', '.join(leaves)})".strip(), None, hint=hint)


def _recurrent(weights: _Weights, prefix: str) -> Layer:
    """Convert the LSTM, GRU or RNN whose weights have the prefix."""
    layers: list[Layer] = []
    for suffixes in _suffixes(prefix, weights.groups[prefix]):
        cells = [_cell(weights, prefix, suffix) for suffix in suffixes]
        layers.append(Bidirectional(*cells) if len(cells) == 2 else cells[0])
    return layers[0] if len(layers) == 1 else Stack(layers)


def _dense(weights: _Weights, prefix: str) -> Dense:
    """Convert the Linear whose weights have the prefix."""
    weight_name, bias_name = f"{prefix}weight", f"{prefix}bias"
    arrays = _read_arrays(weights, (weight_name, bias_name))
    weight = arrays[weight_name]
    if weight.ndim != 2:
        raise ValueError(f"{CALLER}: {weight_name} has shape {weight.shape}; expected (O, I), of a Linear")
    return Dense(weight.T, arrays.get(bias_name, np.zeros(len(weight), weight.dtype)))


def _read_arrays(weights: _Weights, names: Iterable[str]) -> dict[str, Array]:
    """Read the tensors that have one of these names."""
    return read_arrays(CALLER, {name: weights.tensors[name] for name in names if name in weights.tensors})


def _suffixes(prefix: str, names: set[str]) -> list[list[str]]:
    """Return the suffixes of the names, by layer and direction; refuse names if one is missing or left over."""
    numbers = [int(match[1]) for name in names if (match := re.search(r"_l(\d+)(_reverse)?$", name))]
    directions = ["", "_reverse"] if any(name.endswith("_reverse") for name in names) else [""]
    kinds = ["weight_ih", "weight_hh"]
    if any(name.startswith("bias") for name in names):
        kinds += ["bias_ih", "bias_hh"]
    if any(name.startswith("weight_hr") for name in names):
        kinds.append("weight_hr")
    layers = [f"_l{k}" for k in range(min(max(numbers), len(names)) + 1)] if numbers else [""]
    suffixes = [[layer + direction for direction in directions] for layer in layers]
    expected = [kind + suffix for suffixes_of_layer in suffixes for suffix in suffixes_of_layer for kind in kinds]
    if missing := [name for name in expected if name not in names]:
        raise ValueError(
            f"{CALLER}: {prefix}{missing[0]} is missing; beside {prefix}{min(names)}, expected {', '.join(kinds)} for"
            f" every layer and direction"
        )
    if extra_names := sorted(names - {*expected}):
        extra = ", ".join(prefix + name for name in extra_names)
        raise ValueError(f"{CALLER}: {extra} would be left over; remove what is none of its weights")
    return suffixes


def to_torch(layer: Layer, *, prefix: str = "") -> dict[str, Array]:
    """Return the weights with the names of a state_dict of ``torch.nn.LSTM``, ``GRU``, ``RNN`` or ``Linear``.

    .. code-block:: python

        state = {name: torch.from_numpy(array) for name, array in convert.to_torch(layer).items()}
        torch.nn.LSTM(layer.input_size, layer.hidden_size).load_state_dict(state)

    Parameters
    ----------
    layer : LSTM, GRU, RNN, Bidirectional, Stack or Dense
        A GRU must have ``reset_after=True``. An LSTM with a projection is for ``torch.nn.LSTM(..., proj_size=P)``, an
        RNN for ``torch.nn.RNN`` with the same `nonlinearity`. The layers of a stack must have the same kind, the same H
        and be all bidirectional or none, as in PyTorch. Activations are not among the weights.
    prefix : str
        The prefix of the names.

    Returns
    -------
    dict of str to ndarray
        forget_bias is added to ``bias_ih``; ``bias_hh`` is zero except for b_hc.

    Raises
    ------
    ConversionError
        The layer has ``reset_after=False``, peepholes, coupled gates, a clipped cell state or output, other activations
        than PyTorch (tanh and sigmoid, in an RNN tanh or relu) or ``reverse=True``, or the stack is not a single module
        of PyTorch.
    """
    caller, layer = "to_torch", snapshot_of(layer)
    if isinstance(layer, Dense):
        w, b = layer.weights.values()
        return {f"{prefix}weight": np.ascontiguousarray(w.T), f"{prefix}bias": b.copy()}
    layers = layer.layers if isinstance(layer, Stack) else (layer,)
    cells = [cells_of(caller, part) for part in layers if not isinstance(part, Dense)]
    pairs = [(len(directions), cell) for directions in cells for cell in directions]
    forms = {(count, type(cell), cell.hidden_size, cell.output_size) for count, cell in pairs}
    if len(cells) < len(layers) or len(forms) > 1:
        raise ConversionError(
            f"{caller}: the stack has a Dense, or its layers differ in kind or in H; torch.nn.LSTM, GRU and RNN have"
            f" one for all of them. Convert layer.layers one by one"
        )
    if len(activations := dict.fromkeys(cell.activation for _, cell in pairs)) > 1:
        raise ConversionError(
            f"{caller}: the layers have the activations {' and '.join(map(str, activations))}; a torch.nn.RNN has one"
        )
    arrays: dict[str, Array] = {}
    for k, directions in enumerate(cells):
        for cell, direction in zip(directions, ("", "_reverse"), strict=False):
            arrays |= {f"{prefix}{name}_l{k}{direction}": array for name, array in _cell_arrays(caller, cell).items()}
    return arrays


def _cell_arrays(caller: str, cell: RecurrentCell) -> dict[str, Array]:
    """Return PyTorch's weights of one direction by their names."""
    kind = type(cell).__name__
    if isinstance(cell, GRU) and not cell.reset_after:
        raise ConversionError(
            f"{caller}: the layer is a GRU with reset_after=False, which applies the reset gate before the"
            f" product with the recurrent weights, torch.nn.GRU after it: these are different functions, for"
            f" which no weights are equal. Train with GRU.init(..., reset_after=True)"
        )
    takes = {"w_p"} | ({"activation"} if isinstance(cell, RNN) and cell.activation == "relu" else set())
    split = split_cell(caller, cell, f"torch.nn.{kind}", f"PyTorch {kind}", takes)
    kernel, recurrent, bias, recurrent_bias = split
    arrays = {
        "weight_ih": np.ascontiguousarray(kernel.T),
        "weight_hh": np.ascontiguousarray(recurrent.T),
        "bias_ih": bias,
        "bias_hh": recurrent_bias,
    }
    if "w_p" in cell.weights:
        arrays["weight_hr"] = np.ascontiguousarray(cell.weights["w_p"].T)
    return arrays


def _cell(weights: _Weights, prefix: str, suffix: str) -> RecurrentCell:
    """Convert one direction of a layer, whose weights' names end with the suffix."""
    roles = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")
    names = {role: prefix + role + suffix for role in roles}
    arrays = _read_arrays(weights, names.values())
    kernel, recurrent = arrays[names["weight_ih"]], arrays[names["weight_hh"]]
    columns = recurrent.shape[0] if recurrent.ndim == 2 else 0
    options: dict[str, Any] = {}
    if (projection := arrays.get(names["weight_hr"])) is not None:
        gates, size = GATE_COUNTS["LSTM"], len(projection) if projection.ndim else 0
        shapes = {"weight_hr": (projection, (size, columns // gates)), "weight_hh": (recurrent, (columns, size))}
        check_shapes(CALLER, {names[role]: shape for role, shape in shapes.items()})
        options["w_p"] = projection.T
    else:
        gates = count_gates(CALLER, names["weight_hh"], recurrent, axis=0)
    zeros = np.zeros(columns, kernel.dtype)
    biases = {names[role]: arrays.get(names[role], zeros) for role in ("bias_ih", "bias_hh")}
    check_shapes(CALLER, {names["weight_ih"]: (kernel, (columns, None))})
    check_shapes(CALLER, {name: (bias, (columns,)) for name, bias in biases.items()})
    if KINDS[gates] == "RNN":
        options["activation"] = _nonlinearity(weights, prefix)
    elif KINDS[gates] == "GRU":
        options["reset_after"] = True
    return make_cell(f"PyTorch {KINDS[gates]}", kernel.T, recurrent.T, *biases.values(), **options)
