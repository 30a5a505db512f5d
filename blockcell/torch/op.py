"""One layer of the stack, in one or both directions, or a single step of one: an operator of PyTorch's, and the same
without its dispatcher.

The dispatcher costs more than a small layer computes.  Calls go through it where something asks to see operators, such
as torch.compile or a class derived from Tensor; others call the same functions directly.

With D directions, y is [T,B,D*P], the state h is [D,B,P], the state c [D,B,H], and the tape is [D,arrays,T,B,H]; P is H
without a projection.  step_mask [2,T,B], for rows of different lengths and for resets, has the step masks of both
directions (`blockcell._layers.step_mask_of`).  reset_states, of one direction, are the states from which rows start
where the step mask resets them, [T,B,.]; none where these are zero.  Of a single step x is [B,I] and states are [B,.].
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.overrides import has_torch_function

from .. import _kernels
from .._tensors import TensorBackward, TensorForward, hold_storage, refuse_count, refuse_reset_states
from ..activations import numbers
from . import internals

Tensors = Sequence[Tensor]
Mask: TypeAlias = Tensor | None
Shape = tuple[int, ...]
Expected = tuple[str, Tensor | None, Sequence[int], torch.dtype]  # of a tensor, by its name

DTYPES: dict[Any, np.dtype[Any]] = {
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
}  # in the kernels' order
DTYPE_NAMES = " or ".join(map(str, DTYPES))
DEVICES = ("cpu", "meta")  # the types of devices that weights may be on

_PLAIN_TYPES = frozenset((Tensor, torch.nn.Parameter, type(None)))
_SMALL = 64  # rows (t, b)

_library = torch.library.Library("blockcell", "DEF")


class LayerSizes(NamedTuple):
    """The sizes of a pass; P is H without a projection."""

    T: int
    B: int
    I: int  # noqa: E741
    H: int
    P: int


class WeightLayout(NamedTuple):
    """Which weights a layer has, in the order of torch.nn: w_ih, w_hh, b_ih, b_hh and w_hr of each direction."""

    directions: int
    has_bias: bool
    has_projection: bool

    @property
    def matrix_count(self) -> int:
        """The number of all weights without the biases."""
        return self.directions * (2 + self.has_projection)


@functools.cache
def layout_of_weights(count: int, bidirectional: bool) -> WeightLayout:
    """Return the layout of so many weights: 2 to 5 for each direction."""
    per_direction = count // (1 + bidirectional)
    return WeightLayout(1 + bidirectional, per_direction > 3, per_direction % 2 == 1)


@functools.cache
def layout_of_matrices(count: int, has_bias: bool) -> WeightLayout:
    """Return the layout of weights with so many matrices: 2 or 3 for each direction."""
    directions = 2 if count > 3 else 1
    return WeightLayout(directions, has_bias, count // directions == 3)


@functools.cache
def _matrix_positions(layout: WeightLayout) -> list[int]:
    """Return the positions of the matrices among the weights."""
    of_direction = [0, 1] + ([4 if layout.has_bias else 2] if layout.has_projection else [])
    per_direction = len(of_direction) + 2 * layout.has_bias
    return [d * per_direction + k for d in range(layout.directions) for k in of_direction]


PassShapes = tuple[LayerSizes, WeightLayout, list[Shape]]  # the list: of the outputs


class _Plan(NamedTuple):
    """A pass over tensors of one set of shapes."""

    compute: Any
    """A `TensorForward` or `TensorBackward`."""
    output_shapes: list[Shape]
    is_small: bool
    """Whether there are few rows (t, b)."""
    dtype: np.dtype[Any]

    def allocate(self, like: Tensor) -> list[Tensor]:
        """Make tensors for the outputs; their memory is numpy's in a small pass, since it is had sooner."""
        _, shapes, is_small, dtype = self
        if is_small:
            return [torch.from_numpy(np.empty(shape, dtype)) for shape in shapes]
        return [like.new_empty(shape) for shape in shapes]


class LayerOp:
    """A layer of one kind, as the operators ``blockcell::lstm``, ``lstm_forward`` and ``lstm_backward``, or a GRU's; or
    a single step of one, as ``lstm_cell`` and so on.

    The first is what the graph of a model has.  It has gradients, and becomes the others below autograd, which are what
    a compiled graph runs: an operator costs least that has no gradients of its own, and lists of no more than there is.

    The inputs are x, the weights in the order of torch.nn, whether the tape is to be kept, whether there are two
    directions, whether y is the caller's alone, the states, none where they are zero, the step mask, and the states at
    resets.  Callers may
    change their y in place; where it is not theirs alone, `backward` is given it and it must stay as it is.  The y of a
    single step is h, which is among the outputs once, and always the caller's alone.

    Parameters
    ----------
    kind : str
        "lstm", "gru" or "rnn".
    gates : int
    summed_gates : int
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
        summed_gates: int,
        states: tuple[str, ...],
        projects: bool = False,
        activation: str | None = None,
        single: bool = False,
    ) -> None:
        self.gates, self.summed_gates, self.states = gates, summed_gates, states
        self.projects, self.single = projects, single
        self._kernel = "gru_reset_after" if kind == "gru" else kind
        self.tape_arrays = _kernels.TAPE_ARRAYS[self._kernel]
        self._activations: Any = (numbers("tanh"), numbers("sigmoid")) if activation is None else (numbers(activation),)
        self.module = f"{kind.upper()}Cell" if single else kind.upper()
        name = "_".join([kind, *([] if activation is None else [activation]), *(["cell"] if single else [])])
        self._forward_plan = functools.lru_cache(functools.partial(self._plan, "forward", self._forward_shapes))
        self._backward_plan = functools.lru_cache(functools.partial(self._plan, "backward", self._backward_shapes))
        # Saved graphs have the names of the arguments.
        inputs, common = "Tensor x, Tensor[] weights", "Tensor[] states, Tensor? step_mask, Tensor[]? reset_states=None"
        schema = f"{inputs}, bool bidirectional, bool apart, {common}"
        self._op = self._define(name, schema, _without_tape(self.forward))
        schema = f"{inputs}, bool keep, bool bidirectional, bool apart, {common}"
        self._forward_op = self._define(f"{name}_forward", schema, self.forward)
        inputs = "Tensor y, Tensor tape, Tensor[] matrices, Tensor?[] grads, Tensor? x"
        schema = f"{inputs}, bool needs_x, bool bias, {common}, bool needs_reset_states=False"
        self._backward_op = self._define(f"{name}_backward", schema, self.backward)
        _library.impl(name, self._differentiable, "Autograd")
        methods: dict[str, Any] = {
            "forward": staticmethod(self._record),
            "backward": staticmethod(self._differentiate),
            "jvp": staticmethod(self._push_forward),
        }
        self._function: Any = type(f"blockcell_{name}", (torch.autograd.Function,), methods)

    def _define(self, name: str, schema: str, compute: Any) -> Any:
        """Define an operator by a function that also takes `has_values`, which is false of tensors without values."""
        _library.define(f"{name}({schema}) -> Tensor[]")
        _library.impl(name, compute, "CPU")
        torch.library.register_fake(f"blockcell::{name}", functools.partial(compute, has_values=False), lib=_library)
        return getattr(torch.ops.blockcell, name).default

    def __call__(
        self,
        x: Tensor,
        weights: Tensors,
        bidirectional: bool,
        separate_y: bool,
        states: Tensors,
        step_mask: Mask,
        reset_states: Tensors = (),
    ) -> Tensors:
        """Compute y, unless this is a single step, and the last states."""
        options = bidirectional, separate_y, states, step_mask, reset_states
        if needs_dispatcher(x, weights, (*states, *reset_states), step_mask):
            refuse_onnx_export(self.module)
            outputs: Tensors = self._op(x, weights, *options)
            return outputs
        if internals.transforms_are_active():
            raise self._refusal("torch.func's transforms do not go through it")
        return self._differentiable(x, weights, *options, self.forward)

    # --------------------------------------------------------------------------------------------------- sizes, kernels
    def _sizes(self, steps: Shape, I: int, w_hh: Shape, layout: WeightLayout) -> LayerSizes:  # noqa: E741
        """Read the sizes from the shapes of x or y, which has a row for each step, and of w_hh."""
        T, B = (1, steps[0]) if self.single else steps[:2]
        H = w_hh[0] // self.gates
        return LayerSizes(T, B, I, H, w_hh[1] if layout.has_projection else H)

    def _state_shapes(self, sizes: LayerSizes, directions: int) -> list[Shape]:
        rows = (sizes.B,) if self.single else (directions, sizes.B)
        return [(*rows, width) for width in (sizes.P, sizes.H)[: len(self.states)]]

    def _reset_state_shapes(self, sizes: LayerSizes) -> list[Shape]:
        return [(sizes.T, sizes.B, width) for width in (sizes.P, sizes.H)[: len(self.states)]]

    def weight_shapes(self, sizes: LayerSizes, layout: WeightLayout) -> dict[str, Shape]:
        """Return the shapes of the weights of a direction, by name."""
        _, _, I, H, P = sizes  # noqa: E741
        rows = self.gates * H
        shapes: dict[str, Shape] = {"w_ih": (rows, I), "w_hh": (rows, P)}
        if layout.has_bias:
            shapes |= {"b_ih": (rows,), "b_hh": (rows,)}
        if layout.has_projection:
            shapes["w_hr"] = P, H
        return shapes

    def _plan(self, task: str, read_shapes: Callable[..., PassShapes], *key: Any) -> _Plan:
        """Plan a task for tensors of these shapes: the arguments of `read_shapes`, then the number of threads."""
        *arguments, dtype, threads = key
        sizes, layout, outputs = read_shapes(*arguments, dtype)
        planned, options = None, self._activations
        if self.projects:  # an LSTM
            options = _kernels.LSTMOptions(P=sizes.P if layout.has_projection else 0, ifco=True)
        if sizes.T * sizes.B * sizes.H:  # there is something to compute
            number = list(DTYPES).index(dtype)
            planned = _kernels.plan_layer(self._kernel, task, sizes[:4], threads, number, 0, True, options)
        kernel_class = TensorForward if task == "forward" else TensorBackward
        compute = kernel_class(
            planned,
            sizes,
            layout,
            self.weight_shapes(sizes, layout),
            dtype=dtype,
            step_mask_dtype=torch.uint8,
            itemsize=DTYPES[dtype].itemsize,
            summed_gates=self.summed_gates,
            states=self.states,
            tape_arrays=self.tape_arrays,
            single=self.single,
            threads=threads,
        )
        return _Plan(compute, outputs, sizes.T * sizes.B <= _SMALL, DTYPES[dtype])

    # ------------------------------------------------------------------------- shapes, checks of calls made by hand
    # Of tensors with values, `TensorForward` and `TensorBackward` compare the other shapes.
    def _forward_shapes(
        self,
        x: Shape,
        w_hh: Shape,
        weight_count: int,
        bidirectional: bool,
        keep_tape: bool,
        separate_y: bool,
        dtype: torch.dtype,
    ) -> PassShapes:
        """Read the sizes of `forward`; refuse shapes of x and w_hh, and numbers of weights, that do not tell them."""
        if self.single and (bidirectional or not separate_y):
            raise ValueError("blockcell: a single step has one direction, and its y is the caller's alone")
        per_direction = (2, 3, 4, 5) if self.projects else (2, 4)
        check_count("weights", weight_count, [(1 + bidirectional) * per for per in per_direction])
        check_rank("x", x, "(B, I)" if self.single else "(T, B, I)")
        check_rank("w_hh", w_hh, f"({self.gates} H, P)" if self.projects else f"({self.gates} H, H)")
        _check_dtype("x", dtype)
        layout = layout_of_weights(weight_count, bidirectional)
        T, B, _, H, P = sizes = self._sizes(x, x[-1], w_hh, layout)
        y: Shape = (B, P) if self.single else (T, B, layout.directions * P)
        states = self._state_shapes(sizes, layout.directions)
        shapes = states if self.single else [y, *states]
        if keep_tape:
            shapes.append((layout.directions, self.tape_arrays, T, B, H))
            shapes += [y] if separate_y else []
        return sizes, layout, shapes

    def _backward_shapes(
        self,
        y: Shape,
        w_ih: Shape,
        w_hh: Shape,
        matrix_count: int,
        has_bias: bool,
        of_weights: bool,
        needs_x: bool,
        of_states: bool,
        of_reset_states: bool,
        dtype: torch.dtype,
    ) -> PassShapes:
        """Read the sizes of `backward`; refuse shapes of y and matrices, and numbers of these, that tell none.

        The outputs are the gradients that are asked for: to x, the weights, the states and the states at resets.
        """
        per_direction = (2, 3) if self.projects else (2,)
        directions = (1,) if self.single else (1, 2)
        check_count("matrices", matrix_count, [D * per for D in directions for per in per_direction])
        check_rank("y", y, "(B, P)" if self.single else "(T, B, D P)")
        check_rank("w_ih", w_ih, f"({self.gates} H, I)")
        check_rank("w_hh", w_hh, f"({self.gates} H, P)" if self.projects else f"({self.gates} H, H)")
        _check_dtype("y", dtype)
        layout = layout_of_matrices(matrix_count, has_bias)
        sizes = self._sizes(y, w_ih[1], w_hh, layout)
        shapes: list[Shape] = []
        if needs_x:
            shapes.append((sizes.B, sizes.I) if self.single else sizes[:3])
        if of_weights:
            shapes += [*self.weight_shapes(sizes, layout).values()] * layout.directions
        shapes += self._state_shapes(sizes, layout.directions) if of_states else []
        return sizes, layout, shapes + (self._reset_state_shapes(sizes) if of_reset_states else [])

    def check_weights(self, weights: Tensors, sizes: LayerSizes, layout: WeightLayout, dtype: torch.dtype) -> None:
        """Refuse weights of other shapes or dtypes."""
        shapes = [*self.weight_shapes(sizes, layout).items()] * layout.directions
        check_tensors((name, weight, shape, dtype) for weight, (name, shape) in zip(weights, shapes, strict=True))

    def check_states(
        self,
        sizes: LayerSizes,
        directions: int,
        dtype: torch.dtype,
        states: Tensors,
        reset_states: Tensors,
        has_resets: bool,
    ) -> None:
        """Refuse states and states at resets that do not fit: in number, shape or dtype."""
        expected: list[Any] = []
        if states:
            check_count("states", len(states), [len(self.states)])
            expected += zip(self.states, states, self._state_shapes(sizes, directions), strict=True)
        if reset_states:
            if self.single or directions > 1 or not has_resets:
                refuse_reset_states()
            check_count("reset_states", len(reset_states), [len(self.states)])
            names = [f"{name}_reset" for name in self.states]
            expected += zip(names, reset_states, self._reset_state_shapes(sizes), strict=True)
        check_tensors((*tensor, dtype) for tensor in expected)

    # ---------------------------------------------------------------------------------------------------------- forward
    def forward(
        self,
        x: Tensor,
        weights: Tensors,
        keep_tape: bool,
        bidirectional: bool,
        separate_y: bool,
        states: Tensors,
        step_mask: Mask,
        reset_states: Tensors = (),
        has_values: bool = True,
    ) -> list[Tensor]:
        """Compute y, the last states and perhaps the tape, and with it y once more if the first one is separate.

        Of tensors without values the results have none either.
        """
        shapes = x.shape, _shape_of(weights, 1), len(weights), bidirectional, keep_tape, separate_y, x.dtype
        if has_values:
            plan = self._forward_plan(*shapes, torch.get_num_threads())
            outputs = plan.allocate(x)
            plan.compute(x, weights, states, step_mask, outputs, reset_states)
            return outputs
        refuse_onnx_export(self.module)
        sizes, layout, output_shapes = self._forward_shapes(*shapes)
        self.check_weights(weights, sizes, layout, x.dtype)
        check_tensors([("step_mask", step_mask, (2, sizes.T, sizes.B), torch.uint8)])
        self.check_states(sizes, layout.directions, x.dtype, states, reset_states, step_mask is not None)
        return [x.new_empty(shape) for shape in output_shapes]

    # --------------------------------------------------------------------------------------------------------- autograd
    def _differentiable(
        self,
        x: Tensor,
        weights: Tensors,
        bidirectional: bool,
        separate_y: bool,
        states: Tensors,
        step_mask: Mask,
        reset_states: Tensors = (),
        forward: Callable[..., Tensors] | None = None,
    ) -> Tensors:
        """Compute as `__call__` does, below the dispatcher, with a history for autograd where something asks for it."""
        if _is_recorded(x, weights, states, reset_states):
            tensors, counts = (x, *weights, *states, *reset_states), (len(weights), len(states))
            outputs: Tensors = self._function.apply(bidirectional, separate_y, step_mask, counts, *tensors)
            return outputs
        if forward is None:
            dispatches = needs_dispatcher(x, weights, (*states, *reset_states), step_mask)
            forward = self._forward_op if dispatches else self.forward
        return forward(x, weights, False, bidirectional, separate_y, states, step_mask, reset_states)

    def _record(
        self,
        ctx: Any,
        bidirectional: bool,
        separate_y: bool,
        step_mask: Mask,
        counts: tuple[int, int],
        x: Any,
        *others: Tensor,
    ) -> Any:
        """Compute, and keep what `backward` needs.  PyTorch notices if any of it is changed in place."""
        count, state_count = counts
        weights, all_states = others[:count], others[count:]
        states, reset_states = all_states[:state_count], all_states[state_count:]
        forward = self._forward_op if needs_dispatcher(x, weights, all_states, step_mask) else self.forward
        outputs = forward(x, weights, True, bidirectional, separate_y, states, step_mask, reset_states)
        y = outputs.pop() if separate_y else outputs[0]
        tape = outputs.pop()
        ctx.set_materialize_grads(False)
        if not any(ctx.needs_input_grad[5 : 5 + count]):
            x = None  # only the weights' gradients depend on it
        ctx.counts, ctx.layout = counts, (layout := layout_of_weights(count, bidirectional))
        matrices = [weights[k] for k in _matrix_positions(layout)]
        ctx.save_for_backward(x, y, tape, step_mask, *matrices, *all_states)
        return tuple(outputs)

    def _differentiate(self, ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Compute the gradients to the arguments of `_record`; None for those that nobody asks for."""
        x, y, tape, step_mask, *others = saved = ctx.saved_tensors
        (count, state_count), matrix_count = ctx.counts, ctx.layout.matrix_count
        matrices, states = others[:matrix_count], others[matrix_count : matrix_count + state_count]
        reset_states = others[matrix_count + state_count :]
        _, _, _, _, needs_x, *needs = ctx.needs_input_grad
        needs_reset_states = any(needs[count + state_count :])
        tensors = [grad for grad in grads if grad is not None]
        dispatches = needs_dispatcher(tape, others, tensors, step_mask)
        backward = self._backward_op if dispatches else self.backward
        options = needs_x, ctx.layout.has_bias, states, step_mask, reset_states, needs_reset_states
        inputs = y, tape, matrices, grads, x, *options
        if torch.is_grad_enabled():  # by create_graph
            with torch.no_grad():
                gradients = backward(*inputs)
            gradients = _Final.apply(self, len(saved) + len(grads), *saved, *grads, *gradients)
        else:
            gradients = backward(*inputs)
        remaining = iter(gradients)
        x_grad = next(remaining) if needs_x else None
        weight_grads = [None if x is None else next(remaining) for _ in range(count)]
        not_computed = [] if needs_reset_states else [None] * len(reset_states)
        pairs = zip((*weight_grads, *remaining, *not_computed), needs, strict=True)
        return (None, None, None, None, x_grad, *[grad if is_needed else None for grad, is_needed in pairs])

    def _push_forward(self, ctx: Any, *tangents: Any) -> None:
        raise self._refusal("there are no forward-mode derivatives", NotImplementedError)

    def _refusal(self, reason: str, error: type[RuntimeError] = RuntimeError) -> RuntimeError:
        """Return an error with the reason why there is no result, and what to do instead."""
        name = self.module
        return error(f"blockcell.torch.{name}: {reason}; use torch.nn.{name}, see blockcell.torch.restore")

    # --------------------------------------------------------------------------------------------------------- backward
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
        step_mask: Mask,
        reset_states: Tensors = (),
        needs_reset_states: bool = False,
        has_values: bool = True,
    ) -> list[Tensor]:
        """Compute the gradients to x, the weights and the states, but not to those that are not asked for.

        Those to the weights are if there is x, those to x and the states at resets if they are needed.  matrices are
        the weights without biases.  Of tensors without values the results have none either.
        """
        shapes = y.shape, _shape_of(matrices, 0), _shape_of(matrices, 1), len(matrices), bias
        gradients = x is not None, needs_x, len(states) > 0, needs_reset_states
        if has_values:
            plan = self._backward_plan(*shapes, *gradients, y.dtype, torch.get_num_threads())
            outputs = plan.allocate(y)
            of_reset_states = reset_states, needs_reset_states
            plan.compute(y, tape, matrices, grads, x, states, step_mask, needs_x, outputs, *of_reset_states)
            return outputs
        sizes, layout, output_shapes = self._backward_shapes(*shapes, *gradients, y.dtype)
        (T, B, I, H, P), D = sizes, layout.directions  # noqa: E741
        self.check_weights(matrices, sizes, layout._replace(has_bias=False), y.dtype)
        rows = (B,) if self.single else (T, B)
        check_count("grads", len(grads), [len(self.states) + (not self.single)])
        y_grad, *state_grads = [None, *grads] if self.single else grads
        names = [f"{name}_grad" for name in self.states]
        expected: list[Any] = [
            ("x", x, (*rows, I)),
            ("y", y, (*rows, D * P)),
            ("tape", tape, (D, self.tape_arrays, T, B, H)),
            ("y_grad", y_grad, y.shape),
            *zip(names, state_grads, self._state_shapes(sizes, D), strict=True),
        ]
        check_tensors((*tensor, y.dtype) for tensor in expected)
        check_tensors([("step_mask", step_mask, (2, T, B), torch.uint8)])
        self.check_states(sizes, D, y.dtype, states, reset_states, step_mask is not None)
        return [y.new_empty(shape) for shape in output_shapes]


class _Final(torch.autograd.Function):
    """Gradients with a history that cannot be followed: first what they depend on, then they."""

    @staticmethod
    def forward(ctx: Any, op: LayerOp, count: int, *tensors: Any) -> Any:
        ctx.op = op
        return tensors[count:]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> None:
        raise ctx.op._refusal("there are no second derivatives")


def _without_tape(forward: Any) -> Any:
    """Return `LayerOp.forward` without the argument that keeps the tape."""
    return lambda x, weights, *others, **options: forward(x, weights, False, *others, **options)


def needs_dispatcher(x: Tensor, weights: Tensors, states: Tensors, step_mask: Mask) -> bool:
    """Return whether something asks to see operators: a compiler, a tracer, a mode, or a tensor by its class."""
    return (
        torch.compiler.is_compiling()
        or not internals.COMPLETE
        or not x.is_cpu  # on "meta", from a call by hand
        or not _PLAIN_TYPES.issuperset(map(type, (x, *weights, *states, step_mask)))
        or has_torch_function((x,))
        or torch.jit.is_tracing()
        or internals.modes_are_active()
    )


def refuse_onnx_export(module: str) -> None:
    """Raise an error that says what to do, in place of the exporters' own, which know nothing of these operators."""
    if torch.onnx.is_in_onnx_export():
        raise RuntimeError(
            f"blockcell.torch.{module}: torch.onnx.export has no ONNX for it; call blockcell.torch.restore(model)"
            " before it, and blockcell.torch.replace(model) again after it"
        )


def _is_recorded(x: Tensor, weights: Tensors, states: Tensors, reset_states: Tensors) -> bool:
    """Return whether results get a history, or forward-mode derivatives, which `_push_forward` refuses."""
    tensors = x, *weights, *states, *reset_states
    recorded = torch.is_grad_enabled() and any([tensor.requires_grad for tensor in tensors])
    return recorded or internals.forward_mode_is_active()


# -------------------------------------------------------------------------------------------------------------- tensors
def _check_dtype(name: str, dtype: torch.dtype) -> None:
    if dtype not in DTYPES:
        raise TypeError(f"blockcell: {name} has dtype {dtype}; expected {DTYPE_NAMES}")


def _shape_of(tensors: Tensors, k: int) -> Shape:
    """Return the shape of the k-th tensor; () if there are fewer, which a check of their number refuses later."""
    return tensors[k].shape if k < len(tensors) else ()


def check_count(name: str, count: int, expected: Sequence[int]) -> None:
    """Refuse a list of tensors of another length."""
    if count not in expected:
        refuse_count(name, count, expected)


def check_rank(name: str, shape: Shape, expected: str) -> None:
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
    if not (needs_dispatcher(tensor, (), (), None) or internals.transforms_are_active()):
        hold_storage(name, tensor)


LSTM = LayerOp("lstm", gates=4, summed_gates=4, states=("h", "c"), projects=True)
GRU = LayerOp("gru", gates=3, summed_gates=2, states=("h",))
RNN = {name: LayerOp("rnn", gates=1, summed_gates=1, states=("h",), activation=name) for name in ("tanh", "relu")}
LSTM_CELL = LayerOp("lstm", gates=4, summed_gates=4, states=("h", "c"), projects=True, single=True)
GRU_CELL = LayerOp("gru", gates=3, summed_gates=2, states=("h",), single=True)
RNN_CELL = {
    name: LayerOp("rnn", gates=1, summed_gates=1, states=("h",), activation=name, single=True)
    for name in ("tanh", "relu")
}
