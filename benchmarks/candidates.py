"""Prepare the calls to time: the same work by blockcell and by each peer, in processes of their own (turns.py).

    python benchmarks/candidates.py NAME THREADS       # answers [task, dtype, sizes, budget] with seconds

Everybody gets contiguous arrays made beforehand, may pack its weights beforehand, gives all of its results, and does no
work that can be avoided: onnxruntime and OpenVINO write to bound outputs, PyTorch infers under ``inference_mode``.
"GRU" resets before the product, as TensorFlow's does, and "GRU(reset_after)" after it, as PyTorch's does: another
function, so PyTorch is asked for the second one only.  "LSTM(projected)" has P = H / 2, PyTorch's proj_size.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from turns import Worker, answer_seconds

Call = Callable[[], object]
Sizes = dict[str, int]
RAW = ["GRUBlockCell", "GRUBlockCellGrad", "LSTMBlockCell", "LSTMBlockCellGrad", "BlockLSTM", "BlockLSTMGrad"]
KINDS = ["LSTM", "GRU", "GRU(reset_after)"]
LAYERS = [f"{kind} {work}" for work in ("inference", "training") for kind in KINDS]
STREAMS = [f"{kind} {work}" for work in ("step", "block") for kind in KINDS]
MORE_KINDS = ["RNN", "LSTM(projected)"]  # where they are asked for
MORE_LAYERS = [f"{kind} {work}" for work in ("inference", "training") for kind in MORE_KINDS]
MORE_STREAMS = [f"{kind} {work}" for work in ("step", "block") for kind in MORE_KINDS]


def draw_array(*shape: int, dtype: Any, scale: float = 1.0) -> Any:
    return (scale * np.random.default_rng(0).uniform(-1, 1, shape)).astype(dtype)


def draw_lengths(T: int, B: int, padding: int) -> Any:
    """Draw lengths of B rows, in any order, of which `padding` per cent are padding: if that is high, few are long."""
    shares = ((np.arange(B) + 1) / B) ** (padding / (100 - padding))
    return np.random.default_rng(0).permutation(np.ceil(T * shares).astype(int))


def projection(task: str, H: int) -> int:
    """Return P, or 0 without a projection."""
    return H // 2 if "projected" in task else 0


def raw_arguments(op: str, sizes: Sizes, dtype: str) -> dict[str, Any]:
    from blockcell.optable import OPS, sizes_of

    values: dict[str, Any] = {"seq_len_max": sizes["T"]} if OPS[op].sequence else {}
    for tensor in OPS[op].inputs:
        shape = sizes_of(tensor.shape, sizes)
        scale = shape[0] ** -0.5 if tensor.name in ("w", "w_ru", "w_c") else 1.0
        values[tensor.name] = draw_array(*shape, dtype=dtype, scale=scale)
    return values | ({"use_peephole": False} if "use_peephole" in {a.name for a in OPS[op].attributes} else {})


# ----------------------------------------------------------------------------------------------------------- candidates
def blockcell(threads: int) -> Callable[[str, str, Sizes], Call]:
    import blockcell as bc

    bc.set_num_threads(threads)

    def prepare(task: str, dtype: str, sizes: Sizes) -> Call:
        T, B, I, H = (sizes[letter] for letter in "TBIH")  # noqa: E741
        if task in RAW:
            op, args = getattr(bc.raw_ops, task), raw_arguments(task, sizes, dtype)
            return lambda: op(**args)
        kind, work = task.split()
        options: dict[str, Any] = {"reset_after": True} if "reset_after" in kind else {}
        options |= {"proj_size": projection(kind, H)} if "projected" in kind else {}
        layer = getattr(bc, kind.partition("(")[0]).init(I, H, seed=0, dtype=dtype, **options)
        x, d_y = draw_array(T, B, I, dtype=dtype), draw_array(T, B, layer.output_size, dtype=dtype)
        lengths_option = {"lengths": draw_lengths(T, B, sizes["padding"])} if sizes.get("padding") else {}
        if work == "inference":
            return lambda: layer(x, **lengths_option)
        if work == "training":
            return lambda: layer.backward(layer.forward(x, **lengths_option)[2], d_y)
        stream, out = layer.stream(batch=B), np.empty_like(d_y)
        if work == "block":
            return lambda: stream.run(x, out)
        step, x_t, out_t = stream.step, x[0], out[0]
        return lambda: step(x_t, out_t)

    return prepare


def tensorflow(threads: int) -> Callable[[str, str, Sizes], Call]:
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(threads)

    def prepare(task: str, dtype: str, sizes: Sizes) -> Call:
        args = raw_arguments(task, sizes, dtype)
        args = {key: tf.constant(value) if np.ndim(value) else value for key, value in args.items()}
        if "seq_len_max" in args:
            args["seq_len_max"] = tf.constant(args["seq_len_max"], tf.int64)
        op = getattr(tf.raw_ops, task)
        return lambda: op(**args)

    return prepare


def torch(threads: int) -> Callable[[str, str, Sizes], Call]:
    import torch

    torch.set_num_threads(threads)

    def prepare(task: str, dtype: str, sizes: Sizes) -> Call:
        kind, work = task.split()
        T, B, I, H = (sizes[letter] for letter in "TBIH")  # noqa: E741
        options: dict[str, Any] = {"proj_size": projection(kind, H)} if "projected" in kind else {}
        layer = getattr(torch.nn, kind.partition("(")[0])(I, H, dtype=getattr(torch, dtype), **options)
        x, d_y = (torch.tensor(draw_array(T, B, size, dtype=dtype)) for size in (I, projection(kind, H) or H))
        if work == "inference":
            layer.eval()

            def infer() -> Any:
                with torch.inference_mode():
                    return layer(x)

            return infer
        tensors = [x.requires_grad_(), *layer.parameters()]
        return lambda: torch.autograd.grad(layer(x)[0], tensors, d_y)

    return prepare


def onnx_model(task: str, sizes: Sizes) -> bytes:
    """Build a model of ONNX's own node, with weights and biases inside."""
    from onnx import TensorProto, helper, numpy_helper

    kind, _, after = task.split()[0].partition("(")
    I, H, gates = sizes["I"], sizes["H"], {"LSTM": 4, "GRU": 3, "RNN": 1}[kind]  # noqa: E741
    options = {"linear_before_reset": 1} if after else {}
    shapes = {"W": (1, gates * H, I), "R": (1, gates * H, H), "bias": (1, 2 * gates * H)}
    weights = {name: draw_array(*shape, dtype="float32", scale=H**-0.5) for name, shape in shapes.items()}
    outputs = {"Y": ["T", 1, sizes["B"], H]} | {
        name: [1, sizes["B"], H] for name in (["Y_h", "Y_c"] if kind == "LSTM" else ["Y_h"])
    }
    graph = helper.make_graph(
        [helper.make_node(kind, ["x", *weights], [*outputs], hidden_size=H, **options)],
        kind,
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [sizes["T"], sizes["B"], I])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in outputs.items()],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    return model.SerializeToString()


@contextmanager
def without_avx512() -> Iterator[None]:
    """At level v3, import onnxruntime from a copy that takes the CPU for one without AVX-512; it has no switch.

    Its library asks for AVX-512F, bit 16 of an answer of CPUID's, and then for the registers, bits 5 to 7 of XCR0.  In
    the copy the first question asks for no bit at all.
    """
    if os.environ.get("BLOCKCELL_LEVEL") != "v3":
        yield
        return
    package = Path(importlib.util.find_spec("onnxruntime").origin).parent
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(package, Path(folder, package.name), copy_function=os.symlink)
        [library] = Path(folder).glob("*/capi/onnxruntime_pybind11_state*.so")
        question = rb"(\xf7[\xc0-\xc7])\x00\x00\x01\x00(?=.{0,16}?\xa8\xe0)"  # test $0x10000, %e..; test $0xe0, %al
        code, count = re.subn(question, lambda match: match[1] + bytes(4), library.read_bytes(), flags=re.DOTALL)
        if not count:
            raise ImportError("this onnxruntime cannot be limited to AVX2")
        library.unlink()
        library.write_bytes(code)
        sys.path.insert(0, folder)
        yield
        sys.path.remove(folder)


def onnxruntime(threads: int) -> Callable[[str, str, Sizes], Call]:
    with without_avx512():
        importlib.import_module("onnxruntime")

    def prepare(task: str, dtype: str, sizes: Sizes) -> Call:
        x = draw_array(sizes["T"], sizes["B"], sizes["I"], dtype=dtype)
        return bind_session(open_session(onnx_model(task, sizes), threads), x)

    return prepare


def open_session(model: bytes | Path, threads: int) -> Any:
    """Open an onnxruntime session of a model or its file."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 4
    return ort.InferenceSession(model, options, ["CPUExecutionProvider"])


def bind_session(session: Any, x: Any) -> Call:
    """Return a call of a session of one input, which writes to bound outputs."""
    bound = session.io_binding()
    bound.bind_cpu_input(session.get_inputs()[0].name, x)
    for value in session.get_outputs():
        bound.bind_output(value.name, "cpu")
    return lambda: session.run_with_iobinding(bound)


def openvino(threads: int) -> Callable[[str, str, Sizes], Call]:
    importlib.import_module("openvino")

    def prepare(task: str, dtype: str, sizes: Sizes) -> Call:
        x = draw_array(sizes["T"], sizes["B"], sizes["I"], dtype=dtype)
        return open_request(onnx_model(task, sizes), x, threads, "float32").infer

    return prepare


def open_request(model: bytes, x: Any, threads: int, precision: str) -> Any:
    """Return an OpenVINO request for x; without float32 asked for, it computes in bfloat16 where the CPU has that."""
    import openvino as ov

    options = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
    options |= {"INFERENCE_PRECISION_HINT": "f32"} if precision == "float32" else {}
    core = ov.Core()
    request = core.compile_model(core.read_model(model), "CPU", options).create_infer_request()
    request.set_input_tensor(ov.Tensor(x))  # a copy that the request keeps
    return request


CANDIDATES = {function.__name__: function for function in (blockcell, tensorflow, torch, onnxruntime, openvino)}
NATIVE = [task for task in LAYERS + MORE_LAYERS if "inference" in task and "projected" not in task]
EVERYTHING = (RAW + LAYERS + STREAMS + MORE_LAYERS + MORE_STREAMS, ["float32", "float64", "float16"])
DOES = {  # what a candidate can be asked, in which dtypes
    "blockcell": EVERYTHING,
    "before": EVERYTHING,  # another build of blockcell
    "tensorflow": (RAW, ["float32", "float16"]),
    "torch": ([task for task in LAYERS + MORE_LAYERS if not task.startswith("GRU ")], ["float32", "float64"]),
    "onnxruntime": (NATIVE, ["float32"]),
    "openvino": (NATIVE, ["float32"]),
}


def start_worker(name: str, threads: int, **environment: str) -> Worker:
    """Start a process of a candidate, numpy on one thread: its other threads would spin after they made the weights."""
    return Worker(__file__, name, str(threads), OPENBLAS_NUM_THREADS="1", **environment)


if __name__ == "__main__":
    answer_seconds(CANDIDATES[sys.argv[1]](int(sys.argv[2])))
