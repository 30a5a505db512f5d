"""`replace` and `restore`: the layers of a model, by their method ``inner_loop``.

Keras' `RNN.call` calls ``inner_loop`` for the loop over steps.  It reads states, draws dropout masks, and keeps the
states of a stateful layer itself, before and after that.  So a layer that has another ``inner_loop`` is still Keras'
own in everything else: class, config, weights and files.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any, NoReturn

import keras

from ..argument_reader import ArgumentReader
from ..convert.keras_description import describe
from ..convert.keras_layers import is_cell_activation
from ..replacement import Report
from .computation import Computation

KINDS = {keras.layers.LSTM: "LSTM", keras.layers.GRU: "GRU", keras.layers.SimpleRNN: "RNN"}
_BACKENDS = {"torch": "by_torch", "tensorflow": "by_tf", "jax": "by_jax", "numpy": "by_numpy"}
# Units, and rows times steps of calls and in training, from which we are faster: benchmarks/keras_in_place.py
_MIN_SIZES = {"jax": (64, (32, 512))}
_ACTIVATIONS = "activation", "recurrent_activation"


def replace(model: keras.Layer, *, min_units: int | None = None) -> Report:
    """Make every LSTM, GRU and SimpleRNN of a built Keras 3 model compute by blockcell, in place.

    Those of a `Bidirectional` and of models within the model are among them.  Weights, names and configs stay, so
    ``model.save`` writes a file that Keras reads without blockcell.  Outputs, states and gradients are Keras' within
    rounding, with masks and with dropout, too.

    Parameters
    ----------
    model : keras.Layer
        A model, or a layer alone.
    min_units : int, optional
        Layers with fewer units stay. By default 0. With JAX 64, and Keras computes calls of less than 32 rows times
        steps, in training 512: below these sizes what JAX compiles is faster.

    Returns
    -------
    Report
        The dicts `changed` and `left`, by names of layers: what was replaced, and what was left and why. Layers stay
        that are small, not built, on a GPU, of classes derived from Keras', with recurrent dropout, unrolled backwards
        or in a `Bidirectional`, with activations that blockcell lacks, or in other dtypes than float32 and float64; and
        RNNs of cells.

    Raises
    ------
    TypeError
        `model` is no layer of Keras 3, or `min_units` no integer.
    ValueError
        Keras computes by another backend, or by PyTorch or TensorFlow and the model is compiled with
        ``jit_compile=True``.
    """
    layers, models = _find_parts("replace", model)
    name = keras.backend.backend()
    min_units, min_steps = _MIN_SIZES.get(name, (0, (0, 0))) if min_units is None else (min_units, (0, 0))
    min_units = ArgumentReader("blockcell.keras.replace").integer("min_units", min_units)
    if name not in _BACKENDS:
        raise ValueError(f"blockcell.keras.replace: Keras computes by {name}; expected {', '.join(_BACKENDS)}")
    backend = importlib.import_module(f".{_BACKENDS[name]}", __package__)
    is_compiled = name in ("torch", "tensorflow")
    for part in models if is_compiled else ():
        if _jit_compile(part) is True:
            raise ValueError(
                f"blockcell.keras.replace: {part.name} is compiled with jit_compile=True, but calls of blockcell cannot"
                " be compiled so; expected compile(..., jit_compile=False)"
            )
    report = Report(noun="layer")
    for part in layers:
        reason = _reason(part, min_units)
        if reason:
            report.left[part.name] = reason
            continue
        vars(part)["inner_loop"] = _InnerLoop(part, backend.compute, min_steps)
        vars(part)["supports_jit"] = part.supports_jit and not is_compiled
        report.changed[part.name] = f"{type(part).__name__}({part.units})"
    _forget_functions(models)
    for part in models if report.changed else ():
        vars(part)["export"] = _refuse_export
    return report


def restore(model: keras.Layer) -> Report:
    """Undo `replace`: every layer of a model computes by Keras again, in place.

    Parameters
    ----------
    model : keras.Layer

    Returns
    -------
    Report
        What was restored.

    Raises
    ------
    TypeError
        `model` is no layer of Keras 3.
    """
    layers, models = _find_parts("restore", model)
    report = Report(action="restored", noun="layer")
    for part in layers:
        loop = vars(part).get("inner_loop")
        if isinstance(loop, _InnerLoop):
            del vars(part)["inner_loop"]
            vars(part)["supports_jit"] = loop.supported_jit
            report.changed[part.name] = f"{type(part).__name__}({part.units})"
    for part in models:
        vars(part).pop("export", None)
    _forget_functions(models)
    return report


class _InnerLoop:
    """The loop over the steps of a layer, in place of Keras' own."""

    def __init__(self, layer: Any, compute: Any, min_steps: tuple[int, int]) -> None:
        self.layer, self.compute, self.supported_jit = layer, compute, layer.supports_jit
        self.min_steps = min_steps
        self.keras_loop: Callable[..., tuple[Any, Any, list[Any]]] = layer.inner_loop
        self.computation = Computation(
            KINDS[type(layer)],
            _read_options(layer),
            weight_count=2 + bool(layer.use_bias),
            returns_sequences=bool(layer.return_sequences),
            zero_masked=bool(layer.zero_output_for_mask),
            begins_with_state=keras.backend.backend() in ("jax", "numpy") and not layer.unroll,
        )

    def __call__(
        self, sequences: Any, initial_state: Any, mask: Any = None, training: Any = False
    ) -> tuple[Any, Any, list[Any]]:
        """Compute all steps; return the last output, all outputs, and the last states, as Keras' own loop does."""
        min_steps = self.min_steps[bool(training)]
        if min_steps and math.prod(sequences.shape[:2]) < min_steps:
            return self.keras_loop(sequences, initial_state, mask=mask, training=training)
        layer, cell, ops = self.layer, self.layer.cell, keras.ops
        if isinstance(mask, (list, tuple)):
            mask = mask[0]
        if training and cell.dropout > 0:
            sequences = sequences * ops.expand_dims(cell.get_dropout_mask(sequences[:, 0, :]), 1)
        if layer.go_backwards:
            sequences = ops.flip(sequences, 1)
            mask = None if mask is None else ops.flip(mask, 1)
        masks = [] if mask is None else [ops.cast(mask, "bool")]
        weights = [cell.kernel, cell.recurrent_kernel, *([cell.bias] if layer.use_bias else [])]
        inputs = [sequences, *initial_state, *map(ops.convert_to_tensor, weights), *masks]
        y, *states = self.compute(self.computation, inputs, bool(training))
        if layer.return_sequences:
            return y[:, -1], y, states
        return y, ops.expand_dims(y, 1), states


def _find_parts(caller: str, model: Any) -> tuple[list[Any], list[Any]]:
    """Return the recurrent layers of a model, and the models of it."""
    if not isinstance(model, keras.Layer):
        raise TypeError(
            f"blockcell.keras.{caller}: model is of type {type(model).__module__}.{type(model).__name__}; expected a"
            " model or a layer of Keras 3"
        )
    parts = [*model._flatten_layers()]
    models = [part for part in parts if isinstance(part, keras.Model)]
    return [part for part in parts if isinstance(part, keras.layers.RNN)], models


def _jit_compile(model: Any) -> Any:
    """Return the argument of a model's ``compile``; None of a model that is not compiled."""
    config = getattr(model, "_compile_config", None)
    return None if config is None else config.config.get("jit_compile", "auto")


def _read_options(layer: Any) -> dict[str, Any]:
    """Return the options of a layer that blockcell's layer has, too."""
    config = describe(layer).config
    return {name: config[name] for name in (*_ACTIVATIONS, "reset_after") if name in config}


def _reason(layer: Any, min_units: int) -> str | None:
    """Return why a layer stays as it is; None if it does not."""
    if type(layer) not in KINDS:
        return f"its class is {type(layer).__name__}, which may compute something else than LSTM, GRU or SimpleRNN"
    if isinstance(vars(layer).get("inner_loop"), _InnerLoop):
        return "it is replaced already"
    if not layer.built:
        return "it is not built; call the model once, then replace"
    cell = layer.cell
    if cell.recurrent_dropout:
        return f"recurrent_dropout is {cell.recurrent_dropout}"
    if cell.dropout and getattr(cell, "implementation", 2) == 1:
        return "implementation is 1, which draws a dropout mask for each gate"
    if layer.unroll and (layer.go_backwards or layer.zero_output_for_mask):
        return "it is unrolled backwards or in a Bidirectional, where Keras' outputs at masked steps are others"
    if layer.compute_dtype != layer.variable_dtype or layer.compute_dtype not in ("float32", "float64"):
        return f"its dtype policy is {layer.dtype_policy.name}; expected float32 or float64"
    for name, value in _read_options(layer).items():
        if name in _ACTIVATIONS and not is_cell_activation(value):
            return f"its {name}, {getattr(layer, name).__name__}, is none of blockcell's"
    if layer.units < min_units:
        return f"it has {layer.units} units, fewer than min_units={min_units}"
    device = str(getattr(cell.kernel.value, "device", "cpu"))  # arrays of an older numpy have none
    return None if "cpu" in device.lower() else f"Keras computes on {device}"


def _forget_functions(models: list[Any]) -> None:
    """Make Keras compile its functions anew, which have the old loops in them."""
    for model in models:
        for name in ("train_function", "test_function", "predict_function"):
            if hasattr(model, name):
                setattr(model, name, None)
        if getattr(model, "_jit_compile", None) is not None and model.compiled and _jit_compile(model) == "auto":
            model._jit_compile = None


def _refuse_export(*_: Any, **__: Any) -> NoReturn:
    raise ValueError("export: layers of this model compute by blockcell; call blockcell.keras.restore(model) before")
