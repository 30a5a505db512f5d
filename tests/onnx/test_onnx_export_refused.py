"""What `export` refuses: options, layers, paths and sizes of weights."""

from __future__ import annotations

import re
import sys

import numpy as np
import pytest
from export_cases import LAYERS, lstm
from refusals import refusal

import onnx_export
from blockcell import LSTM, Bidirectional, Stack


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loop": "while"}, "export: loop is 'while'; expected one of scan, unroll, native, loop"),
        ({"loop": "unroll"}, "export: loop='unroll' writes every step out and so needs sizes['T']"),
        ({"loop": "native"}, "export: loop='native' is not exact: ONNX's clip bounds what goes into the gates, not "
         "the cell state; expected a cell_clip of 0, not 0.3, or another loop"),
        ({"loop": "native", "train": True}, "export: loop='native' is not possible: ONNX's LSTM has no gradient"),
        ({"dtype": "int8"}, "export: dtype is 'int8'; expected float32, float64 or float16"),
        ({"sizes": {"H": 4}}, "export: sizes has 'H'; expected the letters T, B"),
        ({"sizes": {"B": 0}}, "export: sizes['B'] is 0; expected an integer >= 1 or None"),
        ({"opset": 14}, "export: opset is 14; expected an integer from 15 to"),
        ({"streaming": True, "train": True}, "export: streaming and train are both True; expected one"),
        ({"streaming": True, "state": False}, "export: state is False; expected True, as a step needs"),
        ({"streaming": True, "reset": True}, "export: reset is True; expected False, as a step starts anew from"),
    ],
)  # fmt: skip
def test_mistakes(options, message, tmp_path):
    with pytest.raises(ValueError, match=re.escape(message)):
        onnx_export.export(lstm(4, "float32", cell_clip=0.3), tmp_path / "layer.onnx", **options)
    assert not [*tmp_path.iterdir()]


PLAIN, BOTH = lstm(4, "float32"), LAYERS["Bidirectional"]("float32")
MODULE = type("LSTM", (), {"__module__": "torch.nn.modules.rnn", "state_dict": dict})()  # what only looks like it
NO_LAYER = "expected an LSTM, GRU, RNN, Dense, B"


@pytest.mark.parametrize(
    ("layer", "options", "said"),
    [
        (PLAIN, {"loop": "native", "reset": True}, "ValueError: loop='native' is not possible with reset; expected"),
        (
            Stack([PLAIN, Bidirectional(lstm(4, "float32", 4), lstm(4, "float32", 4, cell_clip=0.3))]),
            {"loop": "native"},
            "ValueError: export: 1.bw: loop='native' is not exact",
        ),
        (BOTH, {"streaming": True}, "TypeError: export: layer is a Bidirectional, which begins at the last step"),
        (Stack([BOTH]), {"streaming": True}, "TypeError: export: 0 is a Bidirectional, which begins at the last step"),
        ("LSTM", {}, f"TypeError: export: layer is of type str; {NO_LAYER}"),
        (None, {}, f"TypeError: export: layer is of type NoneType; {NO_LAYER}"),
        (np.zeros(3), {}, f"TypeError: export: layer is of type ndarray; {NO_LAYER}"),
        (LSTM, {}, f"TypeError: export: layer is of type ABCMeta; {NO_LAYER}"),
        (MODULE, {}, f"TypeError: export: layer is of type torch.nn.modules.rnn.LSTM; {NO_LAYER}"),
        (MODULE, {}, "TypeError: Stack: convert.from_torch(layer) makes"),
    ],
)
def test_layers(layer, options, said):
    with refusal(said):
        onnx_export.export(layer, None, **options)


def test_paths_that_cannot_be_written(tmp_path):
    layer = lstm(4, "float32")
    (tmp_path / "layer.onnx").write_bytes(b"before")
    with pytest.raises(TypeError, match="export: path is 3; expected a path or None"):
        onnx_export.export(layer, 3)
    with pytest.raises(FileNotFoundError) as caught:
        onnx_export.export(layer, tmp_path / "missing" / "layer.onnx")
    assert caught.value.filename == str(tmp_path / "missing" / "layer.onnx")
    with pytest.raises(OSError):
        onnx_export.export(layer, tmp_path)
    with pytest.raises(ValueError):
        onnx_export.export(layer, tmp_path / "layer.onnx", loop="while")
    assert [path.name for path in tmp_path.iterdir()] == ["layer.onnx"]
    assert (tmp_path / "layer.onnx").read_bytes() == b"before"


def test_more_than_a_file_holds(monkeypatch, tmp_path):
    monkeypatch.setattr(sys.modules["onnx_export.export"], "LARGEST", 1000)
    layer = lstm(4, "float32")
    size = sum(weights.nbytes for weights in layer.weights.values())
    onnx_export.export(layer, tmp_path / "a.onnx")
    onnx_export.export(layer, tmp_path / "a.onnx", dtype="float64", train=True)
    with pytest.raises(ValueError, match=f"the layer has {2 * size} bytes of weights; a model holds less than 1000"):
        onnx_export.export(layer, tmp_path / "b.onnx", dtype="float64")
    assert [path.name for path in tmp_path.iterdir()] == ["a.onnx"]
