"""One layer of the stack, in one or both directions, or a single step of one: an operator of PyTorch's, and the same
without its dispatcher.

The dispatcher costs more than a small layer computes.  Calls go through it where something asks to see operators, such
as torch.compile or a class derived from Tensor; others call the same functions directly.

With D directions, y is [T,B,D*H], states are [D,B,H], and the tape is [D,parts,T,B,H]; with a projection to P, y and h
have P where there is H.  step_mask [2,T,B], for rows of different lengths and for resets, has the step
masks of both directions (`blockcell._layers.step_mask_of`).  Of a single step x is [B,I] and states are [B,H].
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import has_torch_function

from .. import _kernels
from .._tensors import TensorBackward, TensorForward, hold_storage
from ..activations import numbers
from . import internals

Tensors = Sequence[Tensor]
Sizes = tuple[int, int, int, int]
Expected = tuple[str, Tensor | None, Sequence[int], torch.dtype]  # of a tensor, by its name

DTYPES: dict[Any, np.dtype[Any]] = {
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
}  # in the kernels' order

_PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None)))

_library = torch.library.Library("blockcell", "DEF")


class Op:
    """A layer of one kind, as the operators ``blockcell::lstm``, ``lstm_forward`` and ``lstm_backward``, or a GRU's; or
    a single step of one, as ``lstm_cell`` and so on.

    The first is what the graph of a model has.  It has gradients, and becomes the others below autograd, which are what
    a compiled graph runs: an operator costs least that has no gradients of its own, and lists of no more than there is.

    The inputs are x, the weights in the order of torch.nn, whether the tape is to be kept, whether there are two
    directions, whether y is the caller's alone, the states, none where they are zero, and the step mask.  Callers may
    change their y in place; where it is not theirs alone, `backward` is given it and it must stay as it is.  The y of a
    single step is h, which is among the outputs once, and always the caller's alone.

    Parameters
    ----------
    kind : str
        "lstm", "gru" or "rnn".
    gates : int
    summed : int
        Of how many gates, the first ones, only the sum of the two biases counts.
    states : tuple of str
    projects : bool
        Whether there may be a projection.
    activation : str, optional
        Of a plain RNN.
    single : bool
    """

    def __init__(
        self,
        kind: str,
        gates: int,
        summed: int,
        states: tuple[str, ...],
        projects: bool = False,
        activation: str | None = None,
        single: bool = False,
    ) -> None:
        self.gates, self.summed, self.states = gates, summed, states
        self.projects, self.single = projects, single
        self._kernel = "gru_reset_after" if kind == "gru" else kind
        self.parts = _kernels.TAPE_ARRAYS[self._kernel]
        self._activations = (numbers("tanh"), numbers("sigmoid")) if activation is None else (numbers(activation),)
        self.module = f"{kind.upper()}Cell" if single else kind.upper()
        name = "_".join([kind, *([] if activation is None else [activation]), *(["cell"] if single else [])])
        self._pass = functools.lru_cache(self._pass_of)
        self._pass_back = functools.lru_cache(self._pass_back_of)
        rest = "Tensor[] states, Tensor? step_mask"
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
        methods: dict[str, Any] = {
            "forward": staticmethod(self._record),
            "backward": staticmethod(self._differentiate),
            "jvp": staticmethod(self._push_forward),
        }
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
        step_mask: Tensor | None,
    ) -> Tensors:
        """y, unless this is a single step, and the last states."""
        if _dispatches(x, weights, states, step_mask):
            refuse_onnx_export(self.module)
            outputs: Tensors = self._op(x, weights, bidirectional, apart, states, step_mask)
        elif internals.transforms_are_active():
            raise self._refusal("torch.func's transforms do not go through it")
        elif _is_recorded(x, weights, states):
            outputs = self._function.apply(bidirectional, apart, step_mask, len(weights), x, *weights, *states)
        else:
            outputs = self.forward(x, weights, False, bidirectional, apart, states, step_mask)
        return outputs

    # --------------------------------------------------------------------------------------------------- sizes, kernels
    def _sizes(self, steps: tuple[int, ...], w_hh: tuple[int, ...]) -> Sizes:
        """T, B, H and P, of what has a row for each step of x, and of a matrix of weights."""
        T, B = (1, steps[0]) if self.single else steps[:2]
        return T, B, w_hh[0] // self.gates, w_hh[1]

    def _state_shapes(self, B: int, H: int, P: int, D: int) -> list[tuple[int, ...]]:
        rows = (B,) if self.single else (D, B)
        return [(*rows, width) for width in (P, H)[: len(self.states)]]

    def weight_shapes(self, H: int, P: int, I: int, bias: bool, projected: bool) -> dict[str, tuple[int, ...]]:  # noqa: E741
        """The weights of a direction."""
        rows = self.gates * H
        shapes: dict[str, tuple[int, ...]] = {"w_ih": (rows, I), "w_hh": (rows, P if projected else H)}
        if bias:
            shapes |= {"b_ih": (rows,), "b_hh": (rows,)}
        if projected:
            shapes["w_hr"] = P, H
        return shapes

    def _output_shapes(self, sizes: Sizes, D: int, keep: bool, apart: bool) -> list[tuple[int, ...]]:
        """Of what `forward` returns."""
        T, B, H, P = sizes
        y, states = (B, P) if self.single else (T, B, D * P), self._state_shapes(B, H, P, D)
        shapes = states if self.single else [y, *states]
        if keep:
            shapes += [(D, self.parts, T, B, H), *[y] * apart]
        return shapes

    def _gradient_shapes(
        self,
        sizes: Sizes,
        D: int,
        I: int,  # noqa: E741
        weights: int,
        needs_x: bool,
        given: bool,
    ) -> list[tuple[int, ...]]:
        """Of what `backward` returns, where there are so many weights with a gradient."""
        T, B, H, P = sizes
        per = weights // D
        shapes: list[tuple[int, ...]] = [(B, I) if self.single else (T, B, I)] if needs_x else []
        of_weights = [*self.weight_shapes(H, P, I, per > 3, per % 2 == 1).values()] if weights else []
        return [*shapes, *of_weights * D, *(self._state_shapes(B, H, P, D) if given else [])]

    def _planned(
        self,
        task: str,
        sizes: Sizes,
        I: int,  # noqa: E741
        dtype: torch.dtype,
        threads: int,
        projected: bool,
    ) -> tuple[Any, np.dtype[Any], tuple[int, int, int, int], int]:
        """Return the planned kernel for a task, "forward" or "backward", None where nothing is to be computed; the
        dtype; T, B, I and H; and P, or 0 without a projection."""
        T, B, H, P = sizes
        stored, number, planned = DTYPES[dtype], list(DTYPES).index(dtype), None
        projection = P if projected else 0
        options: tuple[Any, ...] = self._activations
        if self.projects:  # an LSTM with the gates in the order i, f, ci, o; the others are off
            coupled = use_peephole = False
            options = (projection, coupled, use_peephole, True, 0.0, 0.0, 0.0, *options)
        if T * B * H:
            planned = _kernels.LAYERS[self._kernel](task, (T, B, I, H), threads, number, 0, True, options)
        return planned, stored, (T, B, I, H), projection

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
    ) -> tuple[TensorForward, list[tuple[int, ...]], int, np.dtype[Any]]:
        """What computes `forward` for tensors of these shapes, so many weights and threads; the shapes of the outputs,
        how many rows (t, b) they have, and their dtype."""
        self._check_forward(x, w_hh, count, bidirectional, apart, dtype)
        sizes, D = self._sizes(x, w_hh), 1 + bidirectional
        planned, stored, four, projection = self._planned("forward", sizes, x[-1], dtype, threads, count // D % 2 == 1)
        options = stored.itemsize, four, D, count // D > 3, self.gates, self.summed, self.states, self.parts, threads
        compute = TensorForward(planned, dtype, torch.uint8, *options, projection, self.single)
        return compute, self._output_shapes(sizes, D, keep, apart), sizes[0] * sizes[1], stored

    def _pass_back_of(
        self,
        y: tuple[int, ...],
        w_ih: tuple[int, ...],
        w_hh: tuple[int, ...],
        count: int,
        bias: bool,
        weights: bool,
        needs_x: bool,
        given: bool,
        dtype: torch.dtype,
        threads: int,
    ) -> tuple[TensorBackward, list[tuple[int, ...]], int, np.dtype[Any]]:
        """What computes `backward` for tensors of these shapes, so many matrices and threads; the shapes of the
        outputs, how many rows (t, b) they have, and their dtype."""
        self._check_backward(y, w_ih, w_hh, count, dtype)
        sizes, D, I = self._sizes(y, w_hh), 2 if count > 3 else 1, w_ih[1]  # noqa: E741
        planned, stored, four, projection = self._planned("backward", sizes, I, dtype, threads, count // D == 3)
        options = stored.itemsize, four, D, bias, self.gates, self.summed, self.states, self.parts, threads
        compute = TensorBackward(planned, dtype, torch.uint8, *options, projection, self.single)
        shapes = self._gradient_shapes(sizes, D, I, (count + 2 * D * bias) * weights, needs_x, given)
        return compute, shapes, sizes[0] * sizes[1], stored

    # ----------------------------------------------------------------------------------- checks of calls made by hand
    # Of tensors with values, `TensorForward` and `TensorBackward` compare the other shapes.
    def _check_forward(
        self,
        x: tuple[int, ...],
        w_hh: tuple[int, ...],
        count: int,
        bidirectional: bool,
        apart: bool,
        dtype: torch.dtype,
    ) -> None:
        """Refuse shapes of x and w_hh, and a number of weights, that `forward` cannot take sizes from."""
        if self.single and (bidirectional or not apart):
            raise ValueError("blockcell: a single step has one direction, and its y is the caller's alone")
        per_direction = (2, 3, 4, 5) if self.projects else (2, 4)
        check_count("weights", count, [(1 + bidirectional) * per for per in per_direction])
        check_rank("x", x, "(B, I)" if self.single else "(T, B, I)")
        check_rank("w_hh", w_hh, f"({self.gates} H, P)" if self.projects else f"({self.gates} H, H)")
        _check_dtype("x", dtype)

    def _check_backward(
        self, y: tuple[int, ...], w_ih: tuple[int, ...], w_hh: tuple[int, ...], count: int, dtype: torch.dtype
    ) -> None:
        """Refuse shapes of y and matrices, and a number of matrices, that `backward` cannot take sizes from."""
        per_direction = (2, 3) if self.projects else (2,)
        check_count("matrices", count, [D * per for D in (1, 2)[: 2 - self.single] for per in per_direction])
        check_rank("y", y, "(B, P)" if self.single else "(T, B, D P)")
        check_rank("w_ih", w_ih, f"({self.gates} H, I)")
        check_rank("w_hh", w_hh, f"({self.gates} H, P)" if self.projects else f"({self.gates} H, H)")
        _check_dtype("y", dtype)

    def _check_states(
        self, tensors: Sequence[Tensor | None], suffix: str, sizes: Sizes, D: int, dtype: torch.dtype
    ) -> None:
        """Refuse states, or their gradients, whose names have a suffix, of other shapes."""
        _, B, H, P = sizes
        names = [name + suffix for name in self.states]
        shapes = self._state_shapes(B, H, P, D)
        check_tensors([(*each, dtype) for each in zip(names, tensors, shapes, strict=True)])

    # ---------------------------------------------------------------------------------------------------------- forward
    def _outputs(
        self,
        x: Tensor,
        weights: Tensors,
        keep: bool,
        bidirectional: bool,
        apart: bool,
        states: Tensors,
        step_mask: Tensor | None,
    ) -> list[Tensor]:
        """What `forward` returns, without values."""
        refuse_onnx_export(self.module)
        count, D, dtype, w_hh = len(weights), 1 + bidirectional, x.dtype, _shape_of(weights, 1)
        self._check_forward(x.shape, w_hh, count, bidirectional, apart, dtype)
        sizes = T, B, H, P = self._sizes(x.shape, w_hh)
        expected = self.weight_shapes(H, P, x.shape[-1], count // D > 3, count // D % 2 == 1)
        check_tensors(
            (name, weight, shape, dtype) for weight, (name, shape) in zip(weights, [*expected.items()] * D, strict=True)
        )
        if states:
            check_count("states", len(states), [len(self.states)])
            self._check_states(states, "", sizes, D, dtype)
        check_tensors([("step_mask", step_mask, (2, T, B), torch.uint8)])
        return [x.new_empty(shape) for shape in self._output_shapes(sizes, D, keep, apart)]

    def forward(
        self,
        x: Tensor,
        weights: Tensors,
        keep: bool,
        bidirectional: bool,
        apart: bool,
        states: Tensors,
        step_mask: Tensor | None,
    ) -> list[Tensor]:
        """y, the last states and, if it is to be kept, the tape, and y once more if the first one is the caller's."""
        wanted = len(weights), bidirectional, keep, apart, x.dtype, torch.get_num_threads()
        compute, shapes, rows, dtype = self._pass(x.shape, _shape_of(weights, 1), *wanted)
        outputs = _allocated(shapes, rows, x, dtype)
        compute(x, weights, states, step_mask, outputs)
        return outputs

    # --------------------------------------------------------------------------------------------------------- autograd
    def _differentiable(
        self,
        x: Tensor,
        weights: Tensors,
        bidirectional: bool,
        apart: bool,
        states: Tensors,
        step_mask: Tensor | None,
    ) -> Tensors:
        """As `__call__`, below the dispatcher."""
        outputs: Tensors
        if _is_recorded(x, weights, states):
            outputs = self._function.apply(bidirectional, apart, step_mask, len(weights), x, *weights, *states)
        else:
            forward = self._forward_op if _dispatches(x, weights, states, step_mask) else self.forward
            outputs = forward(x, weights, False, bidirectional, apart, states, step_mask)
        return outputs

    def _record(
        self, ctx: Any, bidirectional: bool, apart: bool, step_mask: Tensor | None, count: int, x: Any, *others: Tensor
    ) -> Any:
        """Compute, and keep what `backward` needs.  PyTorch notices if any of it is changed in place."""
        weights, states = others[:count], others[count:]
        forward = self._forward_op if _dispatches(x, weights, states, step_mask) else self.forward
        outputs = forward(x, weights, True, bidirectional, apart, states, step_mask)
        y = outputs.pop() if apart else outputs[0]
        tape = outputs.pop()
        ctx.set_materialize_grads(False)
        if not any(ctx.needs_input_grad[5 : 5 + count]):
            x = None  # only the weights' gradients depend on it
        per = count // 2 if bidirectional else count
        matrices = [weight for k, weight in enumerate(weights) if k % per < 2 or k % per == 4 or per == 3]
        ctx.count, ctx.matrices = count, len(matrices)
        ctx.save_for_backward(x, y, tape, step_mask, *matrices, *states)
        return tuple(outputs)

    def _differentiate(self, ctx: Any, *grads: Any) -> tuple[Any, ...]:
        x, y, tape, step_mask, *others = saved = ctx.saved_tensors
        matrices, states = others[: ctx.matrices], others[ctx.matrices :]
        _, _, _, _, needs_x, *needs = ctx.needs_input_grad
        given = [grad for grad in grads if grad is not None]
        backward = self._backward_op if _dispatches(tape, others, given, step_mask) else self.backward
        inputs = y, tape, matrices, grads, x, needs_x, ctx.count > ctx.matrices, states, step_mask
        if torch.is_grad_enabled():  # by create_graph
            with torch.no_grad():
                found = backward(*inputs)
            found = _Final.apply(self, len(saved) + len(grads), *saved, *grads, *found)
        else:
            found = backward(*inputs)
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

    def _push_forward(self, ctx: Any, *tangents: Any) -> None:
        raise self._refusal("there are no forward-mode derivatives", NotImplementedError)

    def _refusal(self, what: str, error: type[RuntimeError] = RuntimeError) -> RuntimeError:
        name = self.module
        return error(f"blockcell.torch.{name}: {what}; use torch.nn.{name}, see blockcell.torch.restore")

    # --------------------------------------------------------------------------------------------------------- backward
    def _gradients(
        self,
        y: Tensor,
        tape: Tensor,
        matrices: Tensors,
        grads: Sequence[Tensor | None],
        x: Tensor | None,
        needs_x: bool,
        bias: bool,
        states: Tensors,
        step_mask: Tensor | None,
    ) -> list[Tensor]:
        """What `backward` returns, without values."""
        count, dtype, w_ih, w_hh = len(matrices), y.dtype, _shape_of(matrices, 0), _shape_of(matrices, 1)
        self._check_backward(y.shape, w_ih, w_hh, count, dtype)
        sizes, D, I = self._sizes(y.shape, w_hh), 2 if count > 3 else 1, w_ih[1]  # noqa: E741
        T, B, H, P = sizes
        expected = self.weight_shapes(H, P, I, False, count // D == 3)
        check_tensors(
            (name, matrix, shape, dtype)
            for matrix, (name, shape) in zip(matrices, [*expected.items()] * D, strict=True)
        )
        rows = (B,) if self.single else (T, B)
        check_tensors(
            [
                ("x", x, (*rows, I), dtype),
                ("y", y, (*rows, D * expected["w_hh"][1]), dtype),
                ("tape", tape, (D, self.parts, T, B, H), dtype),
                ("step_mask", step_mask, (2, T, B), torch.uint8),
            ]
        )
        given = [None, *grads] if self.single else grads
        check_count("grads", len(grads), [len(self.states) + (not self.single)])
        check_tensors([("y_grad", given[0], y.shape, dtype)])
        self._check_states(given[1:], "_grad", sizes, D, dtype)
        if states:
            check_count("states", len(states), [len(self.states)])
            self._check_states(states, "", sizes, D, dtype)
        weights = 0 if x is None else count + 2 * D * bias
        return [y.new_empty(shape) for shape in self._gradient_shapes(sizes, D, I, weights, needs_x, len(states) > 0)]

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
        step_mask: Tensor | None,
    ) -> list[Tensor]:
        """The gradients to x, the weights and the states, but not to those that are not asked for.

        Those to the weights are if there is x, and that to x if it is needed.  matrices are the weights without biases.
        """
        wanted = len(matrices), bias, x is not None, needs_x, len(states) > 0, y.dtype, torch.get_num_threads()
        of_matrices = _shape_of(matrices, 0), _shape_of(matrices, 1)
        compute, shapes, rows, dtype = self._pass_back(y.shape, *of_matrices, *wanted)
        results = _allocated(shapes, rows, y, dtype)
        compute(y, tape, matrices, grads, x, states, step_mask, needs_x, results)
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


def _plain(function: Any) -> Any:
    """`Op.forward`, or what allocates its results, without the tape."""
    return lambda x, weights, *others: function(x, weights, False, *others)


def _dispatches(x: Tensor, weights: Tensors, others: Tensors, step_mask: Tensor | None) -> bool:
    """Whether something asks to see operators: a compiler, a tracer, a mode, or one of these tensors by its class."""
    return (
        torch.compiler.is_compiling()
        or not internals.COMPLETE
        or not x.is_cpu  # on "meta", from a call by hand
        or not _PLAIN.issuperset(map(type, (x, *weights, *others, step_mask)))
        or has_torch_function((x,))
        or torch.jit.is_tracing()
        or internals.modes_are_active()
    )


def refuse_onnx_export(module: str) -> None:
    """An error that says what to do, in place of the exporters' own, which know nothing of these operators."""
    if torch.onnx.is_in_onnx_export():
        raise RuntimeError(
            f"blockcell.torch.{module}: torch.onnx.export has no ONNX for it; call blockcell.torch.restore(model)"
            " before it, and blockcell.torch.replace(model) again after it"
        )


def _is_recorded(x: Tensor, weights: Tensors, states: Tensors) -> bool:
    """Whether results get a history, or forward-mode derivatives, which `_push_forward` refuses."""
    recorded = torch.is_grad_enabled() and any([tensor.requires_grad for tensor in (x, *weights, *states)])
    return recorded or internals.forward_mode_is_active()


# -------------------------------------------------------------------------------------------------------------- tensors
def _check_dtype(name: str, dtype: torch.dtype) -> None:
    if dtype not in DTYPES:
        raise TypeError(f"blockcell: {name} has dtype {dtype}; expected torch.float32 or torch.float64")


def _shape_of(tensors: Tensors, k: int) -> tuple[int, ...]:
    """The shape of the k-th tensor; () if there are fewer, which a check of their number refuses later."""
    return tensors[k].shape if k < len(tensors) else ()


def check_count(what: str, count: int, expected: Sequence[int]) -> None:
    """Refuse a list of tensors of another length."""
    if count not in expected:
        numbers = " or ".join(map(str, expected))
        raise ValueError(f"blockcell: there are {count} {what}; expected {numbers}")


def check_rank(name: str, shape: tuple[int, ...], expected: str) -> None:
    """Refuse a shape of more or fewer dimensions than are expected, "(T, B, I)" say."""
    if len(shape) != expected.count(",") + 1:
        raise ValueError(f"blockcell: {name} has shape {tuple(shape)}; expected {expected}")


def check_tensors(expected: Iterable[Expected]) -> None:
    """Refuse tensors of other shapes or dtypes; any of them may be None."""
    for name, tensor, shape, dtype in expected:
        if tensor is not None and (tensor.dtype != dtype or tuple(tensor.shape) != tuple(shape)):
            raise ValueError(
                f"blockcell: {name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype};"
                f" expected {tuple(shape)} and {dtype}"
            )


def check_memory(name: str, tensor: Tensor) -> None:
    """Refuse a tensor whose storage has been made too small for it, before a function of PyTorch's reads it."""
    if not (_dispatches(tensor, (), (), None) or internals.transforms_are_active()):
        hold_storage(name, tensor)


def _allocated(shapes: list[tuple[int, ...]], rows: int, like: Tensor, dtype: np.dtype[Any]) -> list[Tensor]:
    """Tensors; their memory is numpy's for few rows (t, b), since it is had sooner."""
    if rows <= 64:
        return [torch.from_numpy(np.empty(shape, dtype)) for shape in shapes]
    return [like.new_empty(shape) for shape in shapes]


LSTM = Op("lstm", gates=4, summed=4, states=("h", "c"), projects=True)
GRU = Op("gru", gates=3, summed=2, states=("h",))
RNN = {name: Op("rnn", gates=1, summed=1, states=("h",), activation=name) for name in ("tanh", "relu")}
LSTM_CELL = Op("lstm", gates=4, summed=4, states=("h", "c"), projects=True, single=True)
GRU_CELL = Op("gru", gates=3, summed=2, states=("h",), single=True)
RNN_CELL = {
    name: Op("rnn", gates=1, summed=1, states=("h",), activation=name, single=True) for name in ("tanh", "relu")
}
