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

Tensors = Sequence[Tensor]

_WEIGHTS = ("w_ih", "w_hh", "b_ih", "b_hh")  # of each direction
DTYPES: dict[Any, np.dtype[Any]] = {
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
}  # in the kernels' order

_MARKS = np.dtype(np.uint8)

_library = torch.library.Library("blockcell", "DEF")


class Op:
    """A layer of one kind, as the operators ``blockcell::lstm``, ``lstm_forward`` and ``lstm_backward``, or a GRU's.

    The first is what the graph of a model has.  It has gradients, and becomes the others below autograd, which are what
    a compiled graph runs: an operator costs least that has no gradients of its own, few arguments and lists of no more
    than there is.

    The inputs are x, the weights in the order of torch.nn, the states, none where they are zero, marks and whether
    there are two directions; and keep, whether the tape is wanted.

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
        inputs = "Tensor x, Tensor[] weights, Tensor[] states, Tensor? marks, bool bidirectional"
        kept = "Tensor? x, Tensor y, Tensor tape, Tensor[] matrices, Tensor[] states, Tensor? marks"
        self._op = self._define(name, inputs, self.forward, self._outputs)
        self._forward_op = self._define(f"{name}_forward", f"{inputs}, bool keep", self.forward, self._outputs)
        self._backward_op = self._define(
            f"{name}_backward", f"{kept}, Tensor?[] grads, bool needs_x, bool bias", self.backward, self._gradients
        )
        _library.impl(name, self._differentiable, "Autograd")
        methods = {"forward": staticmethod(self._record), "backward": staticmethod(self._differentiate)}
        self._function: Any = type(f"blockcell_{name}", (torch.autograd.Function,), methods)

    def _define(self, name: str, inputs: str, compute: Any, allocate: Any) -> Any:
        """An operator with what computes it and what makes its results' tensors."""
        _library.define(f"{name}({inputs}) -> Tensor[]")
        _library.impl(name, compute, "CPU")
        torch.library.register_fake(f"blockcell::{name}", allocate, lib=_library)
        return getattr(torch.ops.blockcell, name).default

    def __call__(
        self, x: Tensor, weights: Tensors, states: Tensors, marks: Tensor | None, bidirectional: bool
    ) -> Tensors:
        """y and the last states."""
        if _dispatches():
            outputs: Tensors = self._op(x, weights, states, marks, bidirectional)
        elif torch._C._are_functorch_transforms_active():
            raise self._refusal("torch.func's transforms do not go through it")
        else:
            outputs = self._differentiable(x, weights, states, marks, bidirectional)
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
    def _output_shapes(self, x: Tensor, weights: Tensors, D: int, keep: bool) -> list[tuple[int, ...]]:
        """Of y, the last states and, if it is to be kept, the tape."""
        (T, B, _), H = x.shape, weights[1].shape[1]
        shapes: list[tuple[int, ...]] = [(T, B, D * H), *[(D, B, H)] * len(self.states)]
        return [*shapes, (D, self.parts, T, B, H)] if keep else shapes

    def _outputs(
        self, x: Tensor, weights: Tensors, states: Tensors, marks: Any, bidirectional: bool, keep: bool = False
    ) -> list[Tensor]:
        """What `forward` returns, without values."""
        return [x.new_empty(shape) for shape in self._output_shapes(x, weights, 1 + bidirectional, keep)]

    def forward(
        self,
        x: Tensor,
        weights: Tensors,
        states: Tensors,
        marks: Tensor | None,
        bidirectional: bool,
        keep: bool = False,
    ) -> list[Tensor]:
        """y, the last states and, if it is to be kept, the tape."""
        D, n, count, dtype = 1 + bidirectional, len(self.states), len(weights), _dtype(x)
        outputs, (y, *last) = _allocated(self._output_shapes(x, weights, D, keep), dtype)
        tape = last.pop() if keep else (None, None)
        (T, B, I), H = x.shape, weights[1].shape[1]  # noqa: E741
        per = 4 if count == 4 * D else 2
        shapes = self._shapes(I, H)[:per] * D
        if states:
            shapes += [(D, B, H)] * n
        arrays = _arrays((*_WEIGHTS[:per] * D, *self.states), (*weights, *states), shapes, dtype)
        first = arrays[count:] or [np.zeros((D, B, H), dtype)] * n
        x_array, row_marks = _steps(x), _row_marks(marks, T, B)
        if y.size == 0:
            for to, given in zip(last, first, strict=True):
                to[...] = given
            return outputs
        summed, y_k = self.summed * H, y
        for k in range(D):
            w_ih, w_hh, *both = arrays[per * k : per * (k + 1)]
            b_ih, b_hh = both or np.zeros((2, self.gates * H), dtype)
            biases = b_ih[:summed] + b_hh[:summed], *self._biases(b_ih, b_hh, H)
            before, after = [state[k] for state in first[::-1]], [state[k] for state in last[::-1]]
            if D == 2:
                y_k = y[:, :, k * H : (k + 1) * H]
            arguments = x_array, *before, w_ih, w_hh, *biases, y_k, tape[k], *after, row_marks[k], k == 1
            _run(self._kernel, (T, B, I, H), dtype, arguments)
        return outputs

    # --------------------------------------------------------------------------------------------------------- autograd
    def _differentiable(
        self, x: Tensor, weights: Tensors, states: Tensors, marks: Tensor | None, bidirectional: bool
    ) -> Tensors:
        """y and the last states, with a history if one is wanted."""
        keep = torch.is_grad_enabled() and any([tensor.requires_grad for tensor in (x, *weights, *states)])
        if keep or forward_ad._current_level >= 0:  # PyTorch refuses forward-mode derivatives of a Function
            outputs: Tensors = self._function.apply(marks, bidirectional, len(weights), x, *weights, *states)
        else:
            forward = self._forward_op if _dispatches() else self.forward
            outputs = forward(x, weights, states, marks, bidirectional, False)
        return outputs

    def _record(self, ctx: Any, marks: Tensor | None, bidirectional: bool, count: int, x: Any, *others: Tensor) -> Any:
        """Compute, and keep what `backward` needs.  PyTorch notices if any of it, y too, is changed in place."""
        weights, states = others[:count], others[count:]
        forward = self._forward_op if _dispatches() else self.forward
        *outputs, tape = forward(x, weights, states, marks, bidirectional, True)
        ctx.set_materialize_grads(False)
        ctx.count, ctx.matrices = count, 4 if bidirectional else 2
        if not any(ctx.needs_input_grad[4 : 4 + count]):
            x = None  # only the weights' gradients depend on it
        per = 2 * count // ctx.matrices
        matrices = [weight for k, weight in enumerate(weights) if k % per < 2]
        ctx.save_for_backward(x, outputs[0], tape, marks, *matrices, *states)
        return tuple(outputs)

    def _differentiate(self, ctx: Any, *grads: Any) -> tuple[Any, ...]:
        x, y, tape, marks, *others = saved = ctx.saved_tensors
        matrices, states = others[: ctx.matrices], others[ctx.matrices :]
        _, _, _, needs_x, *needs = ctx.needs_input_grad
        backward = self._backward_op if _dispatches() else self.backward
        with torch.no_grad():
            found = backward(x, y, tape, matrices, states, marks, grads, needs_x, ctx.count > ctx.matrices)
        if torch.is_grad_enabled():  # by create_graph
            found = _Final.apply(self, len(saved) + len(grads), *saved, *grads, *found)
        each = iter(found)
        x_grad = next(each) if needs_x else None
        weights = [None if x is None else next(each) for _ in range(ctx.count)]
        others = [grad if needed else None for grad, needed in zip((*weights, *each), needs, strict=True)]
        return None, None, None, x_grad, *others

    def _refusal(self, what: str) -> RuntimeError:
        name = self.name.upper()
        return RuntimeError(f"blockcell.torch.{name}: {what}; use torch.nn.{name}, see blockcell.torch.restore")

    # --------------------------------------------------------------------------------------------------------- backward
    def _gradient_shapes(
        self, x: Any, y: Tensor, matrices: Tensors, states: Tensors, needs_x: bool, bias: bool
    ) -> list[tuple[int, ...]]:
        (T, B, _), H, I = y.shape, matrices[1].shape[1], matrices[0].shape[1]  # noqa: E741
        shapes: list[tuple[int, ...]] = [(T, B, I)] if needs_x else []
        if x is not None:
            shapes += self._shapes(I, H)[: 4 if bias else 2] * (len(matrices) // 2)
        return [*shapes, *[state.shape for state in states]]

    def _gradients(
        self,
        x: Any,
        y: Tensor,
        tape: Any,
        matrices: Tensors,
        states: Tensors,
        marks: Any,
        grads: Any,
        needs_x: bool,
        bias: bool,
    ) -> list[Tensor]:
        """What `backward` returns, without values."""
        return [y.new_empty(shape) for shape in self._gradient_shapes(x, y, matrices, states, needs_x, bias)]

    def backward(
        self,
        x: Tensor | None,
        y: Tensor,
        tape: Tensor,
        matrices: Tensors,
        states: Tensors,
        marks: Tensor | None,
        grads: Sequence[Tensor | None],
        needs_x: bool,
        bias: bool,
    ) -> list[Tensor]:
        """The gradients to x, the weights and the states, but not to those that are not asked for.

        Those to the weights are if there is x, and that to x if it is needed.  matrices are the weights without biases.
        """
        n, D, dtype = len(self.states), 2 if len(matrices) > 2 else 1, _dtype(y)
        results, arrays = _allocated(self._gradient_shapes(x, y, matrices, states, needs_x, bias), dtype)
        (T, B, _), H, I = y.shape, matrices[1].shape[1], matrices[0].shape[1]  # noqa: E741
        y_grad, *last_grads = grads
        if y_grad is None:
            y_grad = y.new_zeros(D * H).expand(T, B, -1)
        x_array, y_grad_array = _steps(y.new_zeros(I).expand(T, B, -1) if x is None else x), _steps(y_grad)
        _check("x", x_array, (T, B, I), dtype)
        _check("y_grad", y_grad_array, (T, B, D * H), dtype)
        names = "y", "tape", *self.states, *(f"{state}_n_grad" for state in self.states), *_WEIGHTS[:2] * D
        shapes = [(T, B, D * H), (D, self.parts, T, B, H), *[(D, B, H)] * (2 * n), *self._shapes(I, H)[:2] * D]
        tensors = y, tape, *(states or [None] * n), *last_grads, *matrices
        y_array, tape_array, *rest = _arrays(names, tensors, shapes, dtype)
        first, last, weights = rest[:n], rest[n : 2 * n], rest[2 * n :]
        row_marks = _row_marks(marks, T, B)
        x_grad = arrays.pop(0) if needs_x else None
        state_grads = arrays[-n:] if states else [np.empty((D, B, H), dtype) for _ in range(n)]
        if y_array.size == 0:
            for grad in arrays:
                grad[...] = 0
            for to, given in zip(state_grads, last, strict=True):
                to[...] = given
            return results
        summed, per = self.summed * H, 4 if bias else 2
        for k in range(D):
            columns = slice(k * H, (k + 1) * H)
            weight_grads: list[Any] = [None] * (3 if self.summed == self.gates else 5)
            if x is not None:
                w_ih, w_hh, *both = arrays[per * k : per * (k + 1)]
                b_ih, b_hh = both or np.empty((2, self.gates * H), dtype)
                weight_grads = [w_ih, w_hh, b_ih[:summed], *self._biases(b_ih, b_hh, H)]
            arguments = (
                *(x_array, *[state[k] for state in first[::-1]], *weights[2 * k : 2 * k + 2], tape_array[k]),
                *(y_array[:, :, columns], y_grad_array[:, :, columns], *[state[k] for state in last[::-1]]),
                *(x_grad, k == 1, *[state[k] for state in state_grads[::-1]]),
                *(*weight_grads, row_marks[k], k == 1),
            )
            _run(self._grad_kernel, (T, B, I, H), dtype, arguments)
            if x is not None and bias:
                b_hh[:summed] = b_ih[:summed]
        return results


class _Final(torch.autograd.Function):
    """Gradients with a history that cannot be followed: first what they depend on, then they."""

    @staticmethod
    def forward(ctx: Any, op: Op, count: int, *tensors: Any) -> Any:
        ctx.op = op
        return tensors[count:]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> None:
        raise ctx.op._refusal("there are no second derivatives")


def _dispatches() -> bool:
    """Whether something asks to see operators: a compiler, a tracer or a mode."""
    return bool(torch.compiler.is_compiling() or torch._C._is_tracing() or torch._C._len_torch_dispatch_stack())


# ------------------------------------------------------------------------------------------------------ arrays, kernels
def _dtype(tensor: Tensor) -> np.dtype[Any]:
    if tensor.dtype not in DTYPES:
        raise TypeError(f"blockcell: a tensor is {tensor.dtype}; expected torch.float32 or torch.float64")
    return DTYPES[tensor.dtype]


def _allocated(shapes: list[tuple[int, ...]], dtype: np.dtype[Any]) -> tuple[list[Tensor], list[Array]]:
    """Tensors, and their memory."""
    arrays: list[Array] = [np.empty(shape, dtype) for shape in shapes]
    return [torch.from_numpy(array) for array in arrays], arrays


def _arrays(
    names: Sequence[str], tensors: Sequence[Tensor | None], shapes: list[tuple[int, ...]], dtype: np.dtype[Any]
) -> list[Array]:
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
