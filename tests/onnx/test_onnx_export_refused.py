"""What `export` refuses: options, layers, paths and sizes of weights."""

from __future__ import annotations

import re
import sys

import numpy as np
import pytest
from export_cases import LAYERS, lstm

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


def test_native_refusals_that_depend_on_the_layer():
    plain = lstm(4, "float32")
    with pytest.raises(ValueError, match="export: loop='native' is not possible with reset; expected 'scan'"):
        onnx_export.export(plain, None, loop="native", reset=True)
    with pytest.raises(ValueError, match=r"export: 1\.bw: loop='native' is not exact"):
        clipped = lstm(4, "float32", 4, cell_clip=0.3)
        onnx_export.export(Stack([plain, Bidirectional(lstm(4, "float32", 4), clipped)]), None, loop="native")


@pytest.mark.parametrize("what", ["LSTM", None, np.zeros(3), LSTM])
def test_what_is_no_layer(what):
    with pytest.raises(TypeError, match=r"export: layer is of type .*; expected an LSTM, GRU, RNN, Dense, B"):
        onnx_export.export(what, None)


def test_modules_of_torch():
    module = type("LSTM", (), {"__module__": "torch.nn.modules.rnn", "state_dict": dict})()
    message = r"layer is of type torch\.nn\.modules\.rnn\.LSTM; expected .* Stack: convert\.from_torch\(layer\) makes"
    with pytest.raises(TypeError, match=message):
        onnx_export.export(module, None)


def test_backward_directions_do_not_stream():
    layer = LAYERS["Bidirectional"]("float32")
    with pytest.raises(TypeError, match="export: layer is a Bidirectional, which begins at the last step"):
        onnx_export.export(layer, None, streaming=True)
    with pytest.raises(TypeError, match=r"export: 0 is a Bidirectional, which begins at the last step"):
        onnx_export.export(Stack([layer]), None, streaming=True)


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
