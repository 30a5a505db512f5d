"""One layer of the stack, in one or both directions: an operator of PyTorch's, and the same without its dispatcher.

The dispatcher costs more than a small layer computes.  Calls go through it where something asks to see operators, such
as torch.compile; others call the same functions directly.

With D directions, y is [T,B,D*H], states are [D,B,H], and the tape is [D,parts,T,B,H].  marks [2,T,B], for rows of
different lengths, are those of `blockcell.layers.shared.RowMarks` for both directions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import _kernels, _team, _threads
from ..optable import Array

Tensors = Sequence[Tensor | None]

WEIGHTS = ("w_ih", "w_hh", "b_ih", "b_hh", "w_ih_reverse", "w_hh_reverse", "b_ih_reverse", "b_hh_reverse")
_MATRICES = tuple(name for name in WEIGHTS if name[0] == "w")
DTYPES: dict[Any, np.dtype[Any]] = {
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
}  # in the kernels' order

_MARKS = np.dtype(np.uint8)

_library = torch.library.Library("blockcell", "DEF")


class Op:
    """A layer of one kind, as the operators ``blockcell::lstm`` and ``blockcell::lstm_backward``, or those of a GRU.

    The inputs are x, marks, keep, eight weights, and the states.  keep says whether the tape is wanted.  Weights that
    the layer does not have are None, and so are states that are zero.

    Parameters
    ----------
    name : str
    gates : int
    summed : int
        Of how many gates, the first ones, only the sum of the two biases counts.
    parts : int
        How many numbers the tape has for each step and cell.
    states : tuple of str
    """

    def __init__(self, name: str, gates: int, summed: int, parts: int, states: tuple[str, ...]) -> None:
        self.name, self.gates, self.summed, self.parts, self.states = name, gates, summed, parts, states
        self._kernel, self._grad_kernel = f"{name}_torch", f"{name}_torch_grad"
        given = [f"{state}_0" for state in states]
        last_grads = [f"{state}_n_grad" for state in states]
        self._define(
            name,
            f"Tensor x, Tensor? marks, bool keep, Tensor w_ih, Tensor w_hh, {_optional(*WEIGHTS[2:], *given)}",
            2 + len(states),
            (self.forward, self._outputs),
        )
        self._define(
            f"{name}_backward",
            f"Tensor? x, Tensor? marks, Tensor y, Tensor tape, Tensor w_ih, Tensor w_hh,"
            f" {_optional(*_MATRICES[2:], *given)}, bool needs_x, bool bias, {_optional('y_grad', *last_grads)}",
            9 + len(states),
            (self.backward, self._gradients),
        )
        torch.library.register_autograd(
            f"blockcell::{name}", self._differentiate, setup_context=self._keep_all, lib=_library
        )
        torch.library.register_autograd(f"blockcell::{name}_backward", self._refuse, lib=_library)
        self._op = getattr(torch.ops.blockcell, name).default
        self._backward_op = getattr(torch.ops.blockcell, f"{name}_backward").default
        methods = {"forward": staticmethod(self._record), "backward": staticmethod(self._differentiate)}
        self._function: Any = type(f"blockcell_{name}", (torch.autograd.Function,), methods)

    def _define(self, name: str, inputs: str, outputs: int, functions: tuple[Any, Any]) -> None:
        """An operator with what computes it and what makes its results' tensors."""
        compute, allocate = [lambda *inputs, f=f: tuple(map(_present, f(*inputs))) for f in functions]
        _library.define(f"{name}({inputs}) -> ({', '.join(['Tensor'] * outputs)})")
        _library.impl(name, compute, "CPU")
        torch.library.register_fake(f"blockcell::{name}", allocate, lib=_library)

    def __call__(self, x: Tensor, marks: Tensor | None, weights: Tensors, states: Tensors) -> tuple[Tensor, ...]:
        """y and the last states."""
        keep = torch.is_grad_enabled() and any(
            [tensor is not None and tensor.requires_grad for tensor in (x, *weights, *states)]
        )
        inputs = (x, marks, keep, *weights, *states)
        if _dispatches():
            outputs: tuple[Tensor, ...] = self._op(*inputs)[:-1]
        elif torch._C._are_functorch_transforms_active():
            raise self._refusal("torch.func's transforms do not go through it")
        elif keep or forward_ad._current_level >= 0:  # PyTorch refuses forward-mode derivatives of a Function
            outputs = self._function.apply(*inputs)
        else:
            outputs = self.forward(*inputs)[:-1]
        return outputs

    def _shapes(self, I: int, H: int) -> list[tuple[int, ...]]:  # noqa: E741
        """Of the weights of one direction."""
        rows = self.gates * H
        return [(rows, I), (rows, H), (rows,), (rows,)]

    def _biases(self, b_ih: Array, b_hh: Array, H: int) -> list[Array]:
        """The parts of a direction's biases that are not summed."""
        summed = self.summed * H
        return [b_ih[summed:], b_hh[summed:]] if self.summed < self.gates else []

    # ---------------------------------------------------------------------------------------------------------- forward
    def _outputs(self, x: Tensor, marks: Any, keep: bool, w_ih: Any, w_hh: Tensor, *others: Any) -> tuple[Any, ...]:
        """Tensors for y, the last states and the tape, which is None unless it is to be kept."""
        (T, B, _), H, D = x.shape, w_hh.shape[1], 1 if others[2] is None else 2
        tape = x.new_empty((D, self.parts, T, B, H)) if keep else None
        return x.new_empty((T, B, D * H)), *[x.new_empty((D, B, H)) for _ in self.states], tape

    def forward(self, x: Tensor, marks: Tensor | None, keep: bool, *others: Tensor | None) -> tuple[Any, ...]:
        """y, the last states and the tape, which is None unless it is to be kept."""
        outputs = self._outputs(x, marks, keep, *others)
        y, *last = [output.numpy() for output in outputs[:-1]]
        tape = outputs[-1].numpy() if keep else (None, None)
        (T, B, I), (D, _, H), dtype = x.shape, last[0].shape, _dtype(x)  # noqa: E741
        x_array, n = _steps(x), 4 * D
        shapes = [*self._shapes(I, H) * D, *[(D, B, H)] * len(last)]
        arrays = _arrays((*WEIGHTS[:n], *self.states), (*others[:n], *others[8:]), shapes, dtype)
        weights, first = arrays[:n], arrays[n:]
        row_marks = _row_marks(marks, T, B)
        if y.size == 0:
            for to, given in zip(last, first, strict=True):
                to[...] = given
            return outputs
        summed, y_k = self.summed * H, y
        for k in range(D):
            w_ih, w_hh, b_ih, b_hh = weights[4 * k : 4 * k + 4]
            biases = b_ih[:summed] + b_hh[:summed], *self._biases(b_ih, b_hh, H)
            before, after = [state[k] for state in reversed(first)], [state[k] for state in reversed(last)]
            if D == 2:
                y_k = y[:, :, k * H : (k + 1) * H]
            arguments = x_array, *before, w_ih, w_hh, *biases, y_k, tape[k], *after, row_marks[k], k == 1
            _run(self._kernel, (T, B, I, H), dtype, arguments)
        return outputs

    # --------------------------------------------------------------------------------------------------------- autograd
    def _record(self, ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        outputs = self.forward(*inputs)
        self._keep(ctx, inputs, outputs)
        return outputs[:-1]

    def _keep_all(self, ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output[-1])
        self._keep(ctx, inputs, output)

    def _keep(self, ctx: Any, inputs: Any, outputs: Any) -> None:
        """Keep what `backward` needs.  PyTorch notices if any of it, y too, is changed in place."""
        x, marks, _, w_ih, w_hh, b_ih, _, w_ih_reverse, w_hh_reverse, _, _, *states = inputs
        ctx.set_materialize_grads(False)
        ctx.bias = b_ih is not None
        if not any(ctx.needs_input_grad[3:11]):
            x = None  # only the weights' gradients depend on it
        ctx.save_for_backward(x, marks, outputs[0], outputs[-1], w_ih, w_hh, w_ih_reverse, w_hh_reverse, *states)

    def _differentiate(self, ctx: Any, *grads: Any) -> Tensors:
        needs = ctx.needs_input_grad
        inputs = (*ctx.saved_tensors, needs[0], ctx.bias, *grads[: 1 + len(self.states)])
        # With create_graph the gradients get a history, the operator's, which refuses to be followed.
        through = torch.is_grad_enabled() or _dispatches()
        x_grad, *others = self._backward_op(*inputs) if through else self.backward(*inputs)
        found = x_grad, None, None, *others
        return tuple([grad if needed else None for grad, needed in zip(found, needs, strict=True)])

    def _refuse(self, ctx: Any, *grads: Any) -> None:
        raise self._refusal("there are no second derivatives")

    def _refusal(self, what: str) -> RuntimeError:
        name = self.name.upper()
        return RuntimeError(f"blockcell.torch.{name}: {what}; use torch.nn.{name}, see blockcell.torch.restore")

    # --------------------------------------------------------------------------------------------------------- backward
    def _gradients(
        self, x: Any, marks: Any, y: Tensor, tape: Any, w_ih: Tensor, w_hh: Tensor, *others: Any
    ) -> tuple[Tensor | None, ...]:
        """Tensors for the gradients to x, to eight weights and to the states; None for what is not wanted."""
        n = len(self.states)
        w_ih_reverse, states, (needs_x, bias, *_) = others[0], others[2 : 2 + n], others[2 + n :]
        (T, B, _), H, I = y.shape, w_hh.shape[1], w_ih.shape[1]  # noqa: E741
        x_grad = y.new_empty((T, B, I)) if needs_x else None
        weights: list[Tensor | None] = [None] * 8
        if x is not None:
            for first in (0,) if w_ih_reverse is None else (0, 4):
                for k, shape in enumerate(self._shapes(I, H)[: 4 if bias else 2]):
                    weights[first + k] = y.new_empty(shape)
        return x_grad, *weights, *[None if state is None else y.new_empty(state.shape) for state in states]

    def backward(self, x: Any, marks: Any, y: Tensor, tape: Tensor, *others: Any) -> Tensors:
        """The gradients to x, to eight weights and to the states; None for what is not wanted."""
        n = len(self.states)
        results = self._gradients(x, marks, y, tape, *others)
        matrices, states, (_, _, y_grad, *last_grads) = others[:4], others[4 : 4 + n], others[4 + n :]
        (T, B, _), H, I = y.shape, matrices[1].shape[1], matrices[0].shape[1]  # noqa: E741
        D = 1 if matrices[2] is None else 2
        if y_grad is None:
            y_grad = y.new_zeros(D * H).expand(T, B, -1)
        if x is None:  # it is not read
            x = y.new_zeros(I).expand(T, B, -1)
        dtype = _dtype(y)
        x_array, y_grad_array = _steps(x), _steps(y_grad)
        _check("x", x_array, (T, B, I), dtype)
        _check("y_grad", y_grad_array, (T, B, D * H), dtype)
        names = "y", "tape", *self.states, *(f"{state}_n_grad" for state in self.states), *_MATRICES
        shapes = [(T, B, D * H), (D, self.parts, T, B, H), *[(D, B, H)] * (2 * n), *self._shapes(I, H)[:2] * D]
        tensors = y, tape, *states, *last_grads, *matrices[: 2 * D]
        y_array, tape_array, *rest = _arrays(names, tensors, shapes, dtype)
        first, last, weights = rest[:n], rest[n : 2 * n], rest[2 * n :]
        row_marks = _row_marks(marks, T, B)
        arrays: list[Any] = [None if result is None else result.numpy() for result in results]
        x_grad, weight_grads = arrays[0], arrays[1:9]
        state_grads = [np.empty((D, B, H), dtype) if grad is None else grad for grad in arrays[9:]]
        if y_array.size == 0:
            for grad in weight_grads:
                if grad is not None:
                    grad[...] = 0
            for to, given in zip(state_grads, last, strict=True):
                to[...] = given
            return results
        summed = self.summed * H
        for k in range(D):
            columns = slice(k * H, (k + 1) * H)
            w_ih, w_hh, b_ih, b_hh = weight_grads[4 * k : 4 * k + 4]
            if b_ih is None:
                b_ih, b_hh = np.empty((2, self.gates * H), dtype)
            biases = [b_ih[:summed], *self._biases(b_ih, b_hh, H)]
            arguments = (
                *(x_array, *[state[k] for state in reversed(first)], *weights[2 * k : 2 * k + 2], tape_array[k]),
                *(y_array[:, :, columns], y_grad_array[:, :, columns], *[state[k] for state in reversed(last)]),
                *(x_grad, k == 1, *[state[k] for state in reversed(state_grads)]),
                *(w_ih, w_hh, *(None if w_ih is None else bias for bias in biases)),
                *(row_marks[k], k == 1),
            )
            _run(self._grad_kernel, (T, B, I, H), dtype, arguments)
            b_hh[:summed] = b_ih[:summed]
        return results


def _optional(*names: str) -> str:
    return ", ".join(f"Tensor? {name}" for name in names)


def _present(tensor: Tensor | None) -> Tensor:
    """An operator's result is always a tensor."""
    return torch.empty(0, device="cpu") if tensor is None else tensor


def _dispatches() -> bool:
    """Whether something asks to see operators: a compiler, a tracer or a mode."""
    return bool(torch.compiler.is_compiling() or torch._C._is_tracing() or torch._C._len_torch_dispatch_stack())


# ------------------------------------------------------------------------------------------------------ arrays, kernels
def _dtype(tensor: Tensor) -> np.dtype[Any]:
    if tensor.dtype not in DTYPES:
        raise TypeError(f"blockcell: a tensor is {tensor.dtype}; expected torch.float32 or torch.float64")
    return DTYPES[tensor.dtype]


def _arrays(names: Sequence[str], tensors: Tensors, shapes: list[tuple[int, ...]], dtype: np.dtype[Any]) -> list[Array]:
    """The tensors' memory in C order; zeros for None."""
    arrays: list[Array] = [
        np.zeros(shape, dtype) if tensor is None else tensor.contiguous().numpy(force=True)
        for tensor, shape in zip(tensors, shapes, strict=True)
    ]
    if [array.shape for array in arrays] != shapes or not all([array.dtype is dtype for array in arrays]):
        for each in zip(names, arrays, shapes, strict=False):
            _check(*each, dtype)
    return arrays


def _steps(tensor: Tensor) -> Array:
    """The memory of a tensor [T,B,.], with any strides but that of the last axis."""
    array: Array = tensor.numpy(force=True)
    return array if array.strides[2] == array.itemsize else np.ascontiguousarray(array)


def _row_marks(marks: Tensor | None, T: int, B: int) -> Any:
    """The marks of both directions."""
    return (None, None) if marks is None else _arrays(("marks",), (marks,), [(2, T, B)], _MARKS)[0]


def _check(name: str, array: Array, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Kernels read as far as shapes say, so an operator that is called by hand must not lie."""
    if array.shape != shape or array.dtype != dtype:
        raise ValueError(
            f"blockcell: {name} has shape {array.shape} and dtype {array.dtype}; expected {shape} and {dtype}"
        )


def _run(name: str, sizes: tuple[int, int, int, int], dtype: Any, arguments: tuple[Any, ...]) -> None:
    """Run a kernel on as many of PyTorch's threads as it can use and as can run now."""
    threads = _threads.num_threads(torch.get_num_threads())
    size, planned = _kernels.WORK[name](*sizes, dtype.itemsize, threads)
    ready = 1 if planned == 1 else _team.ready(planned)
    lost = _kernels.KERNELS[name][dtype.itemsize == 8](*arguments, np.empty(size, np.uint8), threads, ready)
    if planned > 1:
        _team.report(lost)


LSTM = Op("lstm", gates=4, summed=4, parts=6, states=("h", "c"))
GRU = Op("gru", gates=3, summed=2, parts=4, states=("h",))
