"""The runtimes that ONNX graphs are run on."""

from __future__ import annotations

import importlib

import numpy as np
from graphs import feeds, on_onnxruntime, on_reference


def on_openvino(model, args):
    openvino = importlib.import_module("openvino")
    core = openvino.Core()
    compiled = core.compile_model(
        core.read_model(model.SerializeToString()), "CPU", {"INFERENCE_PRECISION_HINT": "f32"}
    )
    results = compiled(feeds(model, args))
    return [np.array(results[compiled.output(value.name)]) for value in model.graph.output]


def on_tract(model, args, path):
    tract = importlib.import_module("tract")
    path.write_bytes(model.SerializeToString())
    loaded, inputs = tract.onnx().load(str(path)), feeds(model, args)
    for k, array in enumerate(inputs.values()):
        kind = {"float32": "f32", "int64": "i64", "bool": "bool"}[array.dtype.name]
        loaded.set_input_fact(k, ",".join([*map(str, array.shape), kind]))
    return [value.to_numpy() for value in loaded.into_model().into_runnable().run([*inputs.values()])]


RUNTIMES = {
    "onnxruntime": lambda model, args, path: on_onnxruntime(model, args),
    "onnx.reference": lambda model, args, path: on_reference(model, args),
    "OpenVINO": lambda model, args, path: on_openvino(model, args),
    "tract": on_tract,
}
