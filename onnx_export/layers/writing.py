"""What `export`, `training_step` and `TrainingSession` do before and after a graph: checks, and the file."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from typing import Any

from google.protobuf.message import EncodeError
from onnx import ModelProto

from blockcell.errors import short
from blockcell.files import replacing
from blockcell.layers import GRU, LSTM, RNN, Bidirectional, Dense, Quantized, Stack


def check_layer_and_path(caller: str, layer: Any, path: Any) -> None:
    """Raise a TypeError unless they are a layer and a path or None."""
    if isinstance(layer, Quantized) and caller != "export":
        message = f"{caller}: layer is quantized, and has no gradients"
        raise TypeError(f"{message}; expected the float32 layer, or the one that layer.dequantize() gives")
    if not isinstance(layer, (LSTM, GRU, RNN, Dense, Bidirectional, Stack, Quantized)):
        kind, expected = type(layer).__name__, "an LSTM, GRU, RNN, Dense, Bidirectional or Stack"
        if hasattr(layer, "state_dict"):  # a module of PyTorch
            kind, expected = f"{type(layer).__module__}.{kind}", f"{expected}: convert.from_torch(layer) makes one"
        raise TypeError(f"{caller}: layer is of type {kind}; expected {expected}")
    if not (path is None or isinstance(path, (str, PathLike))):
        raise TypeError(f"{caller}: path is {short(path)}; expected a path or None")


def write_model(caller: str, path: str | PathLike[str] | None, make: Callable[[], ModelProto]) -> ModelProto:
    """Write the model that ``make()`` makes, unless the path is None; return it."""
    try:
        model = make()
        if path is not None:
            with replacing(path) as file:
                file.write(model.SerializeToString())
    except EncodeError as error:  # as protobuf calls it
        raise MemoryError(f"{caller}: there is too little memory for the model") from error
    return model
