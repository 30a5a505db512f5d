"""One layer of the stack, in one or both directions, or a single step of one: an operator of PyTorch's, and the same
without its dispatcher.

The dispatcher costs more than a small layer computes.  Calls go through it where something asks to see operators, such
as torch.compile or a class derived from Tensor; others call the same functions directly.

With D directions, y is [T,B,D*H], states are [D,B,H], and the tape is [D,parts,T,B,H].  marks [2,T,B], for rows of
different lengths and for resets, are those of `blockcell._layers.marks_of` for both directions.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import has_torch_function

from .. import _kernels, _threads
from .._tensors import TensorPass
from ..optable import Array
from . import internals

Tensors = Sequence[Tensor]

_WEIGHTS = ("w_ih", "w_hh", "b_ih", "b_hh")  # of each direction
DTYPES: dict[Any, np.dtype[Any]] = {
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
}  # in the kernels' order

_KINDS = [np.empty(0, dtype) for dtype in DTYPES.values()]
_MARKS = np.dtype(np.uint8)
_PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None)))

_library = torch.library.Library("blockcell", "DEF")


class Op:
    """A layer of one kind, as the operators ``blockcell::lstm``, ``lstm_forward`` and ``lstm_backward``, or a GRU's.

    The first is what the graph of a model has.  It has gradients, and becomes the others below autograd, which are what
    a compiled graph runs: an operator costs least that has no gradients of its own, and lists of no more than there is.

    The inputs are x, the weights in the order of torch.nn, whether the tape is to be kept, whether there are two
    directions, whether y is the caller's alone, the states, none where they are zero, and marks.  Callers may change
    their y in place; where it is not theirs alone, `backward` is given it and it must stay as it is.

    Parameters
    ----------
    kind : str
    gates : int
    summed : int
        Of how many gates, the first ones, only the sum of the two biases counts.
    parts : int
        How many numbers the tape has for each step and cell.
    states : tuple of str
    """

    _suffixes = "", ""  # of the operator's and the module's name
    _single = False

    def __init__(self, kind: str, gates: int, summed: int, parts: int, states: tuple[str, ...]) -> None:
        self.gates, self.summed, self.parts, self.states = gates, summed, parts, states
        self.name, self.module = (form + end for form, end in zip((kind, kind.upper()), self._suffixes, strict=True))
        self._kernel, self._grad_kernel, name = f"{kind}_torch", f"{kind}_torch_grad", self.name
        self._pass = functools.lru_cache(self._pass_of)
        self._backward_layout = functools.lru_cache(self._backward_layout_of)
        rest = "Tensor[] states, Tensor? marks"
        given, kept = "Tensor x, Tensor[] weights", "Tensor y, Tensor tape, Tensor[] matrices"
        self._op = self._define(
            name, f"{given}, bool bidirectional, bool apart, {rest}", *map(_plain, (self.forward, self._outputs))
        )
        self._forward_op = self._define(
            f"{name}_forward",
            f"{given}, bool keep, bool bidirectional, bool apart, {rest}",
            self.forward,
            self._outputs,
        )
        self._backward_op = self._define(
            f"{name}_backward",
            f"{kept}, Tensor?[] grads, Tensor? x, bool needs_x, bool bias, {rest}",
            self.backward,
            self._gradients,
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
        self,
        x: Tensor,
        weights: Tensors,
        bidirectional: bool,
        apart: bool,
        states: Tensors,
        marks: Tensor | None,
    ) -> Tensors:
        """y and the last states."""
        if _dispatches(x, weights, states, marks):
            outputs: Tensors = self._op(x, weights, bidirectional, apart, states, marks)
        elif internals.transforms_are_active():
            raise self._refusal("torch.func's transforms do not go through it")
        elif _is_recorded(x, weights, states):
            outputs = self._function.apply(bidirectional, apart, marks, len(weights), x, *weights, *states)
        else:
            outputs = self.forward(x, weights, False, bidirectional, apart, states, marks)
        return outputs

    def _shapes(self, I: int, H: int) -> list[tuple[int, ...]]:  # noqa: E741
        """Of the weights of one direction."""
        rows = self.gates * H
        return [(rows, I), (rows, H), (rows,), (rows,)]

    # ---------------------------------------------------------------------------------------------------------- forward
    def _output_shapes(self, T: int, B: int, H: int, D: int, keep: bool, apart: bool) -> list[tuple[int, ...]]:
        """Of what `forward` returns."""
        shapes: list[tuple[int, ...]] = [(T, B, D * H), *[(D, B, H)] * len(self.states)]
        if keep:
            shapes += [(D, self.parts, T, B, H), *shapes[:apart]]
        return shapes

    def _outputs(
        self, x: Tensor, weights: Tensors, keep: bool, bidirectional: bool, apart: bool, *others: Any
    ) -> list[Tensor]:
        """What `forward` returns, without values."""
        T, B, _ = x.shape
        shapes = self._output_shapes(T, B, weights[1].shape[1], 1 + bidirectional, keep, apart)
        return [x.new_empty(shape) for shape in shapes]

    def _pass_of(
        self,
        x: tuple[int, ...],
        w_hh: tuple[int, ...],
        count: int,
        bidirectional: bool,
        keep: bool,
        apart: bool,
        dtype: torch.dtype,
        threads: int,
    ) -> tuple[TensorPass, list[tuple[int, ...]], int, np.dtype[Any]]:
        """What computes `forward` for tensors of these shapes, so many weights and threads; the shapes of the outputs,
        how many rows (t, b) they have, and their dtype."""
        (T, B, I), H, D, stored = x, w_hh[1], 1 + bidirectional, _dtype(dtype)  # noqa: E741
        number, found = list(DTYPES).index(dtype), None
        if T * B * H:
            planned: Any = _kernels.KERNELS[self._kernel][number](_KINDS[number], T, B, I, H, threads)
            found = *planned, *_kernels.WORK[self._kernel](T, B, I, H, stored.itemsize, threads)
        gates = count == 4 * D, self.gates, self.summed
        options = stored.itemsize, (T, B, I, H), D, *gates, self.states, self.parts, threads, self._single
        compute = TensorPass(found, dtype, torch.uint8, *options)
        return compute, self._output_shapes(T, B, H, D, keep, apart), T * B, stored

    def forward(
        self,
        x: Tensor,
        weights: Tensors,
        keep: bool,
        bidirectional: bool,
        apart: bool,
        states: Tensors,
        marks: Tensor | None,
    ) -> list[Tensor]:
        """y, the last states and, if it is to be kept, the tape, and y once more if the first one is the caller's."""
        wanted = len(weights), bidirectional, keep, apart, x.dtype, torch.get_num_threads()
        compute, shapes, rows, dtype = self._pass(x.shape, weights[1].shape, *wanted)
        outputs, _ = _allocated(shapes, rows, x, dtype)
        compute(x, weights, states, marks, outputs)
        return outputs

    # --------------------------------------------------------------------------------------------------------- autograd
    def _differentiable(
        self,
        x: Tensor,
        weights: Tensors,
        bidirectional: bool,
        apart: bool,
        states: Tensors,
        marks: Tensor | None,
    ) -> Tensors:
        """As `__call__`, below the dispatcher."""
        outputs: Tensors
        if _is_recorded(x, weights, states):
            outputs = self._function.apply(bidirectional, apart, marks, len(weights), x, *weights, *states)
        else:
            forward = self._forward_op if _dispatches(x, weights, states, marks) else self.forward
            outputs = forward(x, weights, False, bidirectional, apart, states, marks)
        return outputs

    def _record(
        self, ctx: Any, bidirectional: bool, apart: bool, marks: Tensor | None, count: int, x: Any, *others: Tensor
    ) -> Any:
        """Compute, and keep what `backward` needs.  PyTorch notices if any of it is changed in place."""
        weights, states = others[:count], others[count:]
        forward = self._forward_op if _dispatches(x, weights, states, marks) else self.forward
        outputs = forward(x, weights, True, bidirectional, apart, states, marks)
        y = outputs.pop() if apart else outputs[0]
        tape = outputs.pop()
        ctx.set_materialize_grads(False)
        ctx.count, ctx.matrices = count, 4 if bidirectional else 2
        if not any(ctx.needs_input_grad[5 : 5 + count]):
            x = None  # only the weights' gradients depend on it
        per = 2 * count // ctx.matrices
        matrices = [weight for k, weight in enumerate(weights) if k % per < 2]
        ctx.save_for_backward(x, y, tape, marks, *matrices, *states)
        return tuple(outputs)

    def _differentiate(self, ctx: Any, *grads: Any) -> tuple[Any, ...]:
        x, y, tape, marks, *others = saved = ctx.saved_tensors
        matrices, states = others[: ctx.matrices], others[ctx.matrices :]
        _, _, _, _, needs_x, *needs = ctx.needs_input_grad
        given = [grad for grad in grads if grad is not None]
        backward = self._backward_op if _dispatches(tape, others, given, marks) else self.backward
        with torch.no_grad():
            found = backward(y, tape, matrices, grads, x, needs_x, ctx.count > ctx.matrices, states, marks)
        if torch.is_grad_enabled():  # by create_graph
            found = _Final.apply(self, len(saved) + len(grads), *saved, *grads, *found)
        each = iter(found)
        x_grad = next(each) if needs_x else None
        weights = [None if x is None else next(each) for _ in range(ctx.count)]
        return (
            None,
            None,
            None,
            None,
            x_grad,
            *[g if n else None for g, n in zip((*weights, *each), needs, strict=True)],
        )

    def _refusal(self, what: str) -> RuntimeError:
        name = self.module
        return RuntimeError(f"blockcell.torch.{name}: {what}; use torch.nn.{name}, see blockcell.torch.restore")

    # --------------------------------------------------------------------------------------------------------- backward
    def _gradients(
        self,
        y: Tensor,
        tape: Any,
        matrices: Tensors,
        grads: Any,
        x: Tensor | None,
        needs_x: bool,
        bias: bool,
        states: Tensors,
        marks: Any,
    ) -> list[Tensor]:
        """What `backward` returns, without values."""
        T, B, _ = y.shape
        shapes = self._gradient_shapes(T, B, _sizes(matrices), x is not None, needs_x, bias, len(states) > 0)
        return [y.new_empty(shape) for shape in shapes]

    def _gradient_shapes(
        self, T: int, B: int, sizes: tuple[int, int, int], weights: bool, needs_x: bool, bias: bool, given: bool
    ) -> list[tuple[int, ...]]:
        """Of what `backward` returns."""
        D, I, H = sizes  # noqa: E741
        shapes: list[tuple[int, ...]] = [(T, B, I)] if needs_x else []
        if weights:
            shapes += self._shapes(I, H)[: 4 if bias else 2] * D
        return [*shapes, *[(D, B, H)] * len(self.states)] if given else shapes

    def _backward_layout_of(
        self, T: int, B: int, sizes: tuple[int, int, int], weights: bool, needs_x: bool, bias: bool, given: bool
    ) -> tuple[list[tuple[int, ...]], list[str], list[tuple[int, ...]]]:
        """The shapes of `backward`'s results, and names and shapes of y, the tape, matrices and states."""
        D, I, H = sizes  # noqa: E741
        names, shapes = ["y", "tape", *_WEIGHTS[:2] * D], [(T, B, D * H), (D, self.parts, T, B, H)]
        shapes += self._shapes(I, H)[:2] * D
        if given:
            names, shapes = [*names, *self.states], [*shapes, *[(D, B, H)] * len(self.states)]
        return self._gradient_shapes(T, B, sizes, weights, needs_x, bias, given), names, shapes

    def backward(
        self,
        y: Tensor,
        tape: Tensor,
        matrices: Tensors,
        grads: Sequence[Tensor | None],
        x: Tensor | None,
        needs_x: bool,
        bias: bool,
        states: Tensors,
        marks: Tensor | None,
    ) -> list[Tensor]:
        """The gradients to x, the weights and the states, but not to those that are not asked for.

        Those to the weights are if there is x, and that to x if it is needed.  matrices are the weights without biases.
        """
        dtype, (T, B, _), sizes = _dtype(y.dtype), y.shape, _sizes(matrices)
        given, (D, I, H) = len(states) > 0, sizes  # noqa: E741
        result_shapes, names, shapes = self._backward_layout(T, B, sizes, x is not None, needs_x, bias, given)
        y_grad, *last_grads = grads
        if y_grad is None:
            y_grad = y.new_zeros(D * H).expand(T, B, -1)
        x_array, y_grad_array = _steps(y.new_zeros(I).expand(T, B, -1) if x is None else x), _steps(y_grad)
        _check("x", x_array, (T, B, I), dtype)
        _check("y_grad", y_grad_array, (T, B, D * H), dtype)
        y_array, tape_array, *rest = _arrays(names, [y, tape, *matrices, *states], shapes, dtype)
        zeros = np.zeros((D, B, H), dtype)
        first = rest[2 * D :] or [zeros] * len(self.states)
        last = [
            zeros if grad is None else _arrays([f"{name}_n_grad"], [grad], [(D, B, H)], dtype)[0]
            for name, grad in zip(self.states, last_grads, strict=True)
        ]
        row_marks = (None, None) if marks is None else _row_marks(marks, T, B)
        results, arrays = _allocated(result_shapes, T * B, y, dtype)
        x_grad = arrays.pop(0) if needs_x else None
        state_grads = [np.empty((D, B, H), dtype) for _ in first] if not given else arrays[-len(first) :]
        if y_array.size == 0:
            for grad in arrays:
                grad[...] = 0
            for to, grad in zip(state_grads, last, strict=True):
                to[...] = grad
            return results
        summed, per, y_k, y_grad_k = self.summed * H, 4 if bias else 2, y_array, y_grad_array
        weight_grads: list[Any] = [None] * (3 if self.summed == self.gates else 5)
        for k in range(D):
            if D == 2:
                y_k, y_grad_k = [array[:, :, k * H : (k + 1) * H] for array in (y_array, y_grad_array)]
            if x is not None:
                w_ih, w_hh, *both = arrays[per * k : per * (k + 1)]
                b_ih, b_hh = both or np.empty((2, self.gates * H), dtype)
                weight_grads = [w_ih, w_hh, b_ih[:summed], b_ih[summed:], b_hh[summed:]][: len(weight_grads)]
            before, after = [state[k] for state in first[::-1]], [state[k] for state in last[::-1]]
            arguments = (
                *(x_array, *before, *rest[2 * k : 2 * k + 2], tape_array[k], y_k, y_grad_k, *after, x_grad, k == 1),
                *(*[state[k] for state in state_grads[::-1]], *weight_grads, row_marks[k], k == 1),
            )
            _run(self._grad_kernel, (T, B, I, H), dtype, arguments)
            if x is not None and bias:
                b_hh[:summed] = b_ih[:summed]
        return results


class CellOp(Op):
    """A single step, as the operators ``blockcell::lstm_cell``, ``lstm_cell_forward`` and ``lstm_cell_backward``.

    They are those of a layer with one direction and without marks, but that x and its gradient are [B,I], states and
    their gradients [B,H], and there is no y but h.
    """

    _suffixes = "_cell", "Cell"
    _single = True

    def _output_shapes(self, T: int, B: int, H: int, D: int, keep: bool, apart: bool) -> list[tuple[int, ...]]:
        shapes: list[tuple[int, ...]] = [(B, H)] * len(self.states)
        return [*shapes, (1, self.parts, 1, B, H), (B, H)] if keep else shapes

    def _outputs(
        self, x: Tensor, weights: Tensors, keep: bool, bidirectional: bool, apart: bool, *others: Any
    ) -> list[Tensor]:
        return super()._outputs(x.unsqueeze(0), weights, keep, False, apart)

    def forward(
        self,
        x: Tensor,
        weights: Tensors,
        keep: bool,
        bidirectional: bool,
        apart: bool,
        states: Tensors,
        marks: Tensor | None,
    ) -> list[Tensor]:
        """The states and, if it is to be kept, the tape, and h once more, since the first one is the caller's."""
        if bidirectional or not apart or marks is not None:
            raise ValueError("blockcell: a single step has one direction, a y apart and no marks")
        wanted = len(weights), False, keep, True, x.dtype, torch.get_num_threads()
        compute, shapes, rows, dtype = self._pass((1, *x.shape), weights[1].shape, *wanted)
        outputs, _ = _allocated(shapes, rows, x, dtype)
        compute(x, weights, states, None, outputs)
        return outputs

    def _gradients(
        self,
        y: Tensor,
        tape: Any,
        matrices: Tensors,
        grads: Any,
        x: Tensor | None,
        needs_x: bool,
        bias: bool,
        states: Tensors,
        marks: Any,
    ) -> list[Tensor]:
        steps = None if x is None else x.unsqueeze(0)
        found = super()._gradients(y.unsqueeze(0), tape, matrices, grads, steps, needs_x, bias, states, None)
        return self._flat(found, needs_x, len(states))

    def backward(
        self,
        y: Tensor,
        tape: Tensor,
        matrices: Tensors,
        grads: Sequence[Tensor | None],
        x: Tensor | None,
        needs_x: bool,
        bias: bool,
        states: Tensors,
        marks: Tensor | None,
    ) -> list[Tensor]:
        y_grad, *others = [None if grad is None else grad.unsqueeze(0) for grad in grads]
        steps, first = None if x is None else x.unsqueeze(0), [state.unsqueeze(0) for state in states]
        given = y.unsqueeze(0), tape, matrices, [y_grad, None, *others], steps  # the gradient to h is that to y
        return self._flat(super().backward(*given, needs_x, bias, first, None), needs_x, len(states))

    def _flat(self, found: list[Tensor], needs_x: bool, states: int) -> list[Tensor]:
        """Gradients to x and the states without their first dimension."""
        last = len(found) - states
        return [g.squeeze(0) if k < needs_x or k >= last else g for k, g in enumerate(found)]


class _Final(torch.autograd.Function):
    """Gradients with a history that cannot be followed: first what they depend on, then they."""

    @staticmethod
    def forward(ctx: Any, op: Op, count: int, *tensors: Any) -> Any:
        ctx.op = op
        return tensors[count:]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> None:
        raise ctx.op._refusal("there are no second derivatives")


def _plain(function: Any) -> Any:
    """`Op.forward`, or what allocates its results, without the tape."""
    return lambda x, weights, *others: function(x, weights, False, *others)


def _dispatches(x: Tensor, weights: Tensors, others: Tensors, marks: Tensor | None) -> bool:
    """Whether something asks to see operators: a compiler, a tracer, a mode, or one of these tensors by its class."""
    return (
        torch.compiler.is_compiling()
        or not internals.COMPLETE
        or not _PLAIN.issuperset(map(type, (x, *weights, *others, marks)))
        or has_torch_function((x,))
        or torch.jit.is_tracing()
        or internals.modes_are_active()
    )


def _is_recorded(x: Tensor, weights: Tensors, states: Tensors) -> bool:
    """Whether results get a history; PyTorch refuses forward-mode derivatives of a Function."""
    recorded = torch.is_grad_enabled() and any([tensor.requires_grad for tensor in (x, *weights, *states)])
    return recorded or internals.forward_mode_is_active()


# ------------------------------------------------------------------------------------------------------ arrays, kernels
def _sizes(matrices: Tensors) -> tuple[int, int, int]:
    """D, I and H."""
    return 2 if len(matrices) > 2 else 1, matrices[0].shape[1], matrices[1].shape[1]


def _dtype(dtype: torch.dtype) -> np.dtype[Any]:
    if dtype not in DTYPES:
        raise TypeError(f"blockcell: a tensor is {dtype}; expected torch.float32 or torch.float64")
    return DTYPES[dtype]


def _allocated(
    shapes: list[tuple[int, ...]], rows: int, like: Tensor, dtype: np.dtype[Any]
) -> tuple[list[Tensor], list[Array]]:
    """Tensors and their memory: numpy's for few rows (t, b), since it is had sooner."""
    if rows <= 64:
        arrays: list[Array] = [np.empty(shape, dtype) for shape in shapes]
        return [torch.from_numpy(array) for array in arrays], arrays
    tensors = [like.new_empty(shape) for shape in shapes]
    return tensors, [tensor.numpy() for tensor in tensors]


def _arrays(
    names: Sequence[str], tensors: Sequence[Tensor], shapes: list[tuple[int, ...]], dtype: np.dtype[Any]
) -> list[Array]:
    """The tensors' memory in C order."""
    arrays: list[Array] = [tensor.contiguous().numpy(force=True) for tensor in tensors]
    if [array.shape for array in arrays] != shapes or not all([array.dtype is dtype for array in arrays]):
        for each in zip(names, arrays, shapes, strict=True):
            _check(*each, dtype)
    return arrays


def _steps(tensor: Tensor) -> Array:
    """The memory of a tensor [T,B,.], with any strides but that of the last axis."""
    array: Array = tensor.numpy(force=True)
    return array if array.strides[2] == array.itemsize else np.ascontiguousarray(array)


def _row_marks(marks: Tensor, T: int, B: int) -> Any:
    """The marks of both directions."""
    return _arrays(["marks"], [marks], [(2, T, B)], _MARKS)[0]


def _check(name: str, array: Array, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Kernels read as far as shapes say, so an operator that is called by hand must not lie."""
    if array.shape != shape or array.dtype != dtype:
        raise ValueError(
            f"blockcell: {name} has shape {array.shape} and dtype {array.dtype}; expected {shape} and {dtype}"
        )


def _run(name: str, sizes: tuple[int, int, int, int], dtype: Any, arguments: tuple[Any, ...]) -> None:
    """Run a kernel on as many of PyTorch's threads as it can use and as can run now."""
    threads = _threads.num_threads(torch.get_num_threads())
    _kernels.compute(name, dtype.itemsize == 8, (*sizes, dtype.itemsize), threads, arguments)


LSTM = Op("lstm", gates=4, summed=4, parts=6, states=("h", "c"))
GRU = Op("gru", gates=3, summed=2, parts=4, states=("h",))
LSTM_CELL = CellOp("lstm", gates=4, summed=4, parts=6, states=("h", "c"))
GRU_CELL = CellOp("gru", gates=3, summed=2, parts=4, states=("h",))
