"""Calls of a `Computation` from programs that XLA has compiled, by its foreign function interface (FFI).

XLA calls a C function with a frame: the addresses of arguments and results, and attributes of the call.  Here that is a
function of Python, by ctypes.  It calls no JAX, and copies no argument.  The structs below are the parts of
``xla/ffi/api/c_api.h``, which is in ``jax.ffi.include_dir()``, that are read or written here.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from ctypes import CFUNCTYPE, POINTER, Structure, c_char_p, c_int, c_int64, c_size_t, c_void_p
from types import SimpleNamespace
from typing import Any, ClassVar

import jax
import numpy as np

from ..optable import Array
from .computation import Computation

_API_VERSION = 0, 1  # major and minor; the oldest whose structs are these
_METADATA, _EXECUTE, _INTERNAL_ERROR = 1, 3, 13  # a type of extensions, a stage of calls, a code of errors
_TYPES = {1: "|b1", 4: np.dtype(np.int32).str, 11: np.dtype(np.float32).str, 12: np.dtype(np.float64).str}


class _Struct(Structure):
    _fields_: ClassVar[Sequence[tuple[str, Any]]] = (("struct_size", c_size_t), ("extension", c_void_p))


class _Buffer(_Struct):
    _fields_ = (("dtype", c_int), ("data", c_void_p), ("rank", c_int64), ("dims", POINTER(c_int64)))


class _Buffers(_Struct):  # XLA_FFI_Args and XLA_FFI_Rets
    _fields_ = (("size", c_int64), ("types", c_void_p), ("buffers", POINTER(POINTER(_Buffer))))


class _Attributes(_Struct):
    _fields_ = (("size", c_int64), ("types", c_void_p), ("names", c_void_p), ("scalars", POINTER(POINTER(c_size_t))))


class _Version(_Struct):
    _fields_ = (("major", c_int), ("minor", c_int))


class _Metadata(Structure):
    _fields_ = (("struct_size", c_size_t), ("version", _Version), ("traits", c_int))


class _MetadataExtension(Structure):
    _fields_ = (("struct_size", c_size_t), ("type", c_int), ("next", c_void_p), ("metadata", POINTER(_Metadata)))


class _Error(_Struct):  # XLA_FFI_Error_Create_Args
    _fields_ = (("message", c_char_p), ("code", c_int))


class _Api(_Struct):
    _fields_ = (("version", _Version), ("internal", c_void_p), ("create_error", CFUNCTYPE(c_void_p, POINTER(_Error))))


class _Frame(_Struct):  # XLA_FFI_CallFrame
    _fields_ = (
        ("api", POINTER(_Api)),
        ("context", c_void_p),
        ("stage", c_int),
        ("arguments", _Buffers),
        ("results", _Buffers),
        ("attributes", _Attributes),
    )


_computations: weakref.WeakValueDictionary[int, Computation] = weakref.WeakValueDictionary()
"""By the numbers that calls have as an attribute."""


def call(task: str, computation: Computation, shapes: Sequence[Any], inputs: Sequence[Any]) -> Any:
    """Call a method of a computation, or have a program call it that is being compiled.

    `task` is the name of the method, `shapes` are those of its results.  The inputs of "backward_of_token" are the
    token, the inputs of the forward pass, and the gradients to its results.
    """
    _computations[computation.number] = computation
    function = jax.ffi.ffi_call(_TARGETS[task], tuple(shapes), vmap_method="sequential")
    return function(*inputs, computation=np.int64(computation.number))


def _run(task: str, frame: _Frame) -> None:
    assert frame.attributes.size == 1
    _, address = frame.attributes.scalars[0][:2]  # of XLA_FFI_Scalar: dtype and value
    computation = _computations.get(c_int64.from_address(address).value)
    if computation is None:
        raise RuntimeError("the layer that this program was compiled for is gone; compile the program anew")
    inputs, outputs = _arrays(frame.arguments, True), _arrays(frame.results, False)
    if task == "backward_of_token":
        token, count = int(inputs[0]), 1 + computation.state_count
        results = computation.backward_of_token(token, inputs[1:-count], inputs[-count:])
    else:
        results = computation.forward_with_token(inputs, task == "forward_with_token")[-len(outputs) :]
    for output, result in zip(outputs, results, strict=True):
        output[...] = result


def _arrays(buffers: _Buffers, are_constant: bool) -> list[Array]:
    """Return the memory of buffers as arrays."""
    arrays = []
    for pointer in buffers.buffers[: buffers.size]:
        buffer = pointer.contents
        memory, shape = (buffer.data or 0, are_constant), tuple(buffer.dims[: buffer.rank])
        interface = {"version": 3, "data": memory, "shape": shape, "typestr": _TYPES[buffer.dtype]}
        arrays.append(np.asarray(SimpleNamespace(__array_interface__=interface)))
    return arrays


def _handler(task: str) -> Any:
    """Return a function of C that XLA calls, also when it asks for the version of the interface."""

    @CFUNCTYPE(c_void_p, POINTER(_Frame))  # type: ignore[untyped-decorator]
    def handle(pointer: Any) -> Any:
        frame = pointer.contents
        if frame.extension:
            extension = _MetadataExtension.from_address(frame.extension)
            if extension.type == _METADATA:
                version = extension.metadata.contents.version
                version.major, version.minor = _API_VERSION
                return None
        try:
            if frame.stage == _EXECUTE:
                _run(task, frame)
        except BaseException as error:  # which C cannot pass on
            text = f"blockcell.keras: {type(error).__name__}: {error}".encode()
            return frame.api.contents.create_error(_Error(ctypes.sizeof(_Error), None, text, _INTERNAL_ERROR))
        return None

    return handle


_TARGETS = {task: f"blockcell_keras_{task}" for task in ("forward", "forward_with_token", "backward_of_token")}
_HANDLERS = {task: _handler(task) for task in _TARGETS}  # as long as XLA may call them
for _task, _target in _TARGETS.items():
    jax.ffi.register_ffi_target(_target, jax.ffi.pycapsule(_HANDLERS[_task]), platform="cpu")
