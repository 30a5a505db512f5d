"""TensorFlow's eight block RNN ops: the names, arguments, defaults and results of ``tf.raw_ops``.

Arguments are passed by keyword; results are named tuples. An input is an array of float32, float64 or float16, or
whatever numpy makes an array of: the first one that has a dtype fixes that of the call, lists and numbers are converted
to it (float32 where there are only those), and arrays of different dtypes are an error. The fast path is that of
C-contiguous arrays in native byte order; all others are copied first.

In the shapes T is the number of time steps, B of batch rows, I of inputs and H of cells; any of them may be 0. float16
is for storage: a step is computed in float32, the states cs and h are rounded before the next step reads them, and each
output is rounded once.

All ops, those of `blockcell.ops` too, have these arguments:

* ``out``, a tuple of arrays for the results, in their order: writeable, C-contiguous, of the results' shapes and dtype,
  and sharing no memory with an input or with each other.
* ``num_threads``, at most how many threads to use; None: as `blockcell.set_num_threads` says. The results do not depend
  on it.
* ``name``, which only the eight have, is accepted for TensorFlow's sake, and ignored.

Each op computes what TensorFlow's of this name does, by gru_ops.cc and lstm_ops.cc in tensorflow/core/kernels/rnn.

All ops raise a TypeError where an argument's kind or dtype is wrong, and a ValueError where a rank, size or range is
wrong, or an activation is unknown. The message names the argument and what was expected.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import SupportsIndex

from numpy.typing import ArrayLike

from ._kernels import bind
from .optable import OPS, Array, GRUCellGrad, GRUStates, LSTMCellGrad, LSTMGrads, LSTMStates

__all__ = [
    "BlockLSTM",
    "BlockLSTMGrad",
    "BlockLSTMGradV2",
    "BlockLSTMV2",
    "GRUBlockCell",
    "GRUBlockCellGrad",
    "LSTMBlockCell",
    "LSTMBlockCellGrad",
]

_GRUBlockCell: Callable[..., GRUStates] = bind(OPS["GRUBlockCell"]).run
_GRUBlockCellGrad: Callable[..., GRUCellGrad] = bind(OPS["GRUBlockCellGrad"]).run
_LSTMBlockCell: Callable[..., LSTMStates] = bind(OPS["LSTMBlockCell"]).run
_LSTMBlockCellGrad: Callable[..., LSTMCellGrad] = bind(OPS["LSTMBlockCellGrad"]).run
_BlockLSTM: Callable[..., LSTMStates] = bind(OPS["BlockLSTM"]).run
_BlockLSTMGrad: Callable[..., LSTMGrads] = bind(OPS["BlockLSTMGrad"]).run
_BlockLSTMV2: Callable[..., LSTMStates] = bind(OPS["BlockLSTMV2"]).run
_BlockLSTMGradV2: Callable[..., LSTMGrads] = bind(OPS["BlockLSTMGradV2"]).run


def GRUBlockCell(
    *,
    x: ArrayLike,
    h_prev: ArrayLike,
    w_ru: ArrayLike,
    w_c: ArrayLike,
    b_ru: ArrayLike,
    b_c: ArrayLike,
    out: tuple[Array, ...] | None = None,
    num_threads: SupportsIndex | None = None,
    name: object = None,
) -> GRUStates:
    """One step of a gated recurrent unit.

    .. code-block:: text

        [r_bar | u_bar] = [x, h_prev] @ w_ru + b_ru
        r = sigmoid(r_bar)
        u = sigmoid(u_bar)
        c = tanh([x, h_prev * r] @ w_c + b_c)
        h = u * (h_prev - c) + c

    The reset gate acts before the product with w_c, unlike in cuDNN, and u near 1 keeps the old state.

    Parameters
    ----------
    x : array_like (B, I)
        Input.
    h_prev : array_like (B, H)
        Hidden state of the step before.
    w_ru : array_like (I+H, 2H)
        Weights of the gates: I rows for x, H rows for h_prev; columns r, u.
    w_c : array_like (I+H, H)
        Weights of the candidate: I rows for x, H rows for ``h_prev * r``.
    b_ru : array_like (2H,)
        Bias of the gates: r, u.
    b_c : array_like (H,)
        Bias of the candidate.
    out, num_threads, name : optional
        See `blockcell.raw_ops`, which describes them for all ops.

    Returns
    -------
    GRUStates
        r, u, c, h, each (B, H)
    """
    return _GRUBlockCell((x, h_prev, w_ru, w_c, b_ru, b_c), out, num_threads)


def GRUBlockCellGrad(
    *,
    x: ArrayLike,
    h_prev: ArrayLike,
    w_ru: ArrayLike,
    w_c: ArrayLike,
    b_ru: ArrayLike,
    b_c: ArrayLike,
    r: ArrayLike,
    u: ArrayLike,
    c: ArrayLike,
    d_h: ArrayLike,
    out: tuple[Array, ...] | None = None,
    num_threads: SupportsIndex | None = None,
    name: object = None,
) -> GRUCellGrad:
    """The gradient of `GRUBlockCell` to its input, its state and its pre-activations.

    .. code-block:: text

        d_c_bar = d_h * (1 - u) * (1 - c * c)
        d_u_bar = d_h * (h_prev - c) * u * (1 - u)
        [d_x_2 | d_hr] = d_c_bar @ w_c^T
        d_r_bar = d_hr * h_prev * r * (1 - r)
        d_r_bar_u_bar = [d_r_bar | d_u_bar]
        [d_x_1 | d_h_1] = d_r_bar_u_bar @ w_ru^T
        d_x = d_x_1 + d_x_2
        d_h_prev = d_h_1 + d_hr * r + d_h * u

    `blockcell.ops.gru_block_cell_vjp` gives the gradients to the weights too.

    Parameters
    ----------
    x, h_prev, w_ru, w_c, b_ru, b_c
        The arguments of `GRUBlockCell`. The values of x, b_ru and b_c are not used.
    r, u, c : array_like (B, H)
        What `GRUBlockCell` returned.
    d_h : array_like (B, H)
        Gradient of the loss to h.
    out, num_threads, name : optional
        See `blockcell.raw_ops`, which describes them for all ops.

    Returns
    -------
    GRUCellGrad
        d_x (B, I), d_h_prev (B, H), d_c_bar (B, H), d_r_bar_u_bar (B, 2H)
    """
    return _GRUBlockCellGrad((x, h_prev, w_ru, w_c, b_ru, b_c, r, u, c, d_h), out, num_threads)


def LSTMBlockCell(
    *,
    x: ArrayLike,
    cs_prev: ArrayLike,
    h_prev: ArrayLike,
    w: ArrayLike,
    wci: ArrayLike | None = None,
    wcf: ArrayLike | None = None,
    wco: ArrayLike | None = None,
    b: ArrayLike,
    forget_bias: float = 1.0,
    cell_clip: float = 3.0,
    use_peephole: bool = False,
    out: tuple[Array, ...] | None = None,
    num_threads: SupportsIndex | None = None,
    name: object = None,
) -> LSTMStates:
    """One step of a long short-term memory, with optional peepholes.

    .. code-block:: text

        [i_bar | ci_bar | f_bar | o_bar] = [x, h_prev] @ w + b
        i  = sigmoid(i_bar [+ cs_prev * wci])
        f  = sigmoid(f_bar + forget_bias [+ cs_prev * wcf])
        ci = tanh(ci_bar)
        cs = clip(i * ci + f * cs_prev, -cell_clip, cell_clip)
        co = tanh(cs)
        o  = sigmoid(o_bar [+ cs * wco])
        h  = o * co

    The terms in brackets are there with ``use_peephole``. Note the gates' order in w and b, which
    TensorFlow's own page has wrong, and the default clip.

    Parameters
    ----------
    x : array_like (B, I)
        Input.
    cs_prev : array_like (B, H)
        Cell state of the step before.
    h_prev : array_like (B, H)
        Hidden state of the step before.
    w : array_like (I+H, 4H)
        Weights: I rows for x, H rows for h_prev; columns i, ci, f, o, H of each.
    wci, wcf, wco : array_like (H,), optional
        Peephole weights to the gates i, f and o. Without ``use_peephole`` they may be None or of any length and are
        never read.
    b : array_like (4H,)
        Bias: i, ci, f, o.
    forget_bias : float, default 1.0
        Added to the forget gate before its sigmoid.
    cell_clip : float, default 3.0
        The cell state is clipped to ``[-cell_clip, cell_clip]``. Not where this is 0, negative or NaN.
    use_peephole : bool, default False
        Whether the gates see the cell state.
    out, num_threads, name : optional
        See `blockcell.raw_ops`, which describes them for all ops.

    Returns
    -------
    LSTMStates
        i, cs, f, o, ci, co, h, each (B, H); cs and h are the new states
    """
    attributes = forget_bias, cell_clip, use_peephole
    return _LSTMBlockCell((x, cs_prev, h_prev, w, wci, wcf, wco, b), out, num_threads, attributes)


def LSTMBlockCellGrad(
    *,
    x: ArrayLike,
    cs_prev: ArrayLike,
    h_prev: ArrayLike,
    w: ArrayLike,
    wci: ArrayLike | None = None,
    wcf: ArrayLike | None = None,
    wco: ArrayLike | None = None,
    b: ArrayLike,
    i: ArrayLike,
    cs: ArrayLike,
    f: ArrayLike,
    o: ArrayLike,
    ci: ArrayLike,
    co: ArrayLike,
    cs_grad: ArrayLike,
    h_grad: ArrayLike,
    use_peephole: bool,
    out: tuple[Array, ...] | None = None,
    num_threads: SupportsIndex | None = None,
    name: object = None,
) -> LSTMCellGrad:
    """The gradient of `LSTMBlockCell` to its cell state, its pre-activations and its peepholes.

    .. code-block:: text

        d_o_bar  = h_grad * co * o * (1 - o)
        d_cs     = h_grad * o * (1 - co * co) + cs_grad [+ d_o_bar * wco]
        d_ci_bar = d_cs * i * (1 - ci * ci)
        d_f_bar  = d_cs * cs_prev * f * (1 - f)
        d_i_bar  = d_cs * ci * i * (1 - i)
        cs_prev_grad = d_cs * f [+ d_i_bar * wci + d_f_bar * wcf]
        wci_grad, wcf_grad, wco_grad = the sums of d_i_bar * cs_prev, d_f_bar * cs_prev and d_o_bar * cs over the batch
        dicfo = [d_i_bar | d_ci_bar | d_f_bar | d_o_bar]

    The terms in brackets are there with ``use_peephole``; without, the peepholes' gradients are zeros of the weights'
    own lengths, or (H,) for None. The clip counts as the identity, as in TensorFlow.
    `blockcell.ops.lstm_block_cell_vjp` gives the gradients to x, h_prev, w and b too.

    Parameters
    ----------
    x, cs_prev, h_prev, w, wci, wcf, wco, b
        The arguments of `LSTMBlockCell`. The values of x, h_prev, w and b are not used.
    i, cs, f, o, ci, co : array_like (B, H)
        What `LSTMBlockCell` returned.
    cs_grad, h_grad : array_like (B, H)
        Gradients of the loss to cs and to h.
    use_peephole : bool
        As in the forward call.
    out, num_threads, name : optional
        See `blockcell.raw_ops`, which describes them for all ops.

    Returns
    -------
    LSTMCellGrad
        cs_prev_grad (B, H), dicfo (B, 4H), wci_grad, wcf_grad and wco_grad (H,), or without ``use_peephole`` zeros
        of the lengths of wci, wcf and wco, (H,) for None
    """
    arrays = x, cs_prev, h_prev, w, wci, wcf, wco, b, i, cs, f, o, ci, co, cs_grad, h_grad
    return _LSTMBlockCellGrad(arrays, out, num_threads, (use_peephole,))


def BlockLSTM(
    *,
    seq_len_max: SupportsIndex,
    x: ArrayLike,
    cs_prev: ArrayLike,
    h_prev: ArrayLike,
    w: ArrayLike,
    wci: ArrayLike | None = None,
    wcf: ArrayLike | None = None,
    wco: ArrayLike | None = None,
    b: ArrayLike,
    forget_bias: float = 1.0,
    cell_clip: float = 3.0,
    use_peephole: bool = False,
    out: tuple[Array, ...] | None = None,
    num_threads: SupportsIndex | None = None,
    name: object = None,
) -> LSTMStates:
    """A long short-term memory over a sequence: `LSTMBlockCell` at each step.

    `LSTMBlockCell` has the equations. The cs and h of a step, rounded in float16, are cs_prev and h_prev of the next.
    Past seq_len_max nothing is read and all outputs are zero. (TensorFlow leaves all but cs and h undefined there.)

    Parameters
    ----------
    seq_len_max : int
        Number of steps to run, 0 to T, the same for all rows: an integer or a 0-d array of integers.
    x : array_like (T, B, I)
        Input, time first.
    cs_prev, h_prev : array_like (B, H)
        Cell state and hidden state before the first step.
    w, wci, wcf, wco, b, forget_bias, cell_clip, use_peephole
        The arguments of `LSTMBlockCell`: w (I+H, 4H) and b (4H,), with the gates i, ci, f, o; wci, wcf and wco (H,),
        optional; forget_bias 1.0, cell_clip 3.0 and use_peephole False unless given.
    out, num_threads, name : optional
        See `blockcell.raw_ops`, which describes them for all ops.

    Returns
    -------
    LSTMStates
        i, cs, f, o, ci, co, h, each (T, B, H)
    """
    attributes = forget_bias, cell_clip, use_peephole
    return _BlockLSTM((x, cs_prev, h_prev, w, wci, wcf, wco, b), out, num_threads, attributes, seq_len_max)


def BlockLSTMGrad(
    *,
    seq_len_max: SupportsIndex,
    x: ArrayLike,
    cs_prev: ArrayLike,
    h_prev: ArrayLike,
    w: ArrayLike,
    wci: ArrayLike | None = None,
    wcf: ArrayLike | None = None,
    wco: ArrayLike | None = None,
    b: ArrayLike,
    i: ArrayLike,
    cs: ArrayLike,
    f: ArrayLike,
    o: ArrayLike,
    ci: ArrayLike,
    co: ArrayLike,
    h: ArrayLike,
    cs_grad: ArrayLike,
    h_grad: ArrayLike,
    use_peephole: bool,
    out: tuple[Array, ...] | None = None,
    num_threads: SupportsIndex | None = None,
    name: object = None,
) -> LSTMGrads:
    """The gradient of `BlockLSTM` to all its arrays.

    A step has the equations of `LSTMBlockCellGrad` and of `blockcell.ops.lstm_block_cell_vjp`. The steps run backwards:
    the gradients to cs_prev and h_prev at a step are added to cs_grad and h_grad of the step before it. Gradients of
    weights are sums over the steps. Past seq_len_max nothing is read and x_grad is zero.

    Parameters
    ----------
    seq_len_max, x, cs_prev, h_prev, w, wci, wcf, wco, b
        The arguments of `BlockLSTM`. The values of b are not used.
    i, cs, f, o, ci, co, h : array_like (T, B, H)
        What `BlockLSTM` returned.
    cs_grad, h_grad : array_like (T, B, H)
        Gradients of the loss to cs and to h of each step.
    use_peephole : bool
        As in the forward call.
    out, num_threads, name : optional
        See `blockcell.raw_ops`, which describes them for all ops.

    Returns
    -------
    LSTMGrads
        x_grad (T, B, I), cs_prev_grad and h_prev_grad (B, H), w_grad (I+H, 4H), b_grad (4H,);
        wci_grad, wcf_grad and wco_grad (H,), or without ``use_peephole`` zeros of the lengths of wci, wcf and wco,
        (H,) for None
    """
    arrays = x, cs_prev, h_prev, w, wci, wcf, wco, b, i, cs, f, o, ci, co, h, cs_grad, h_grad
    return _BlockLSTMGrad(arrays, out, num_threads, (use_peephole,), seq_len_max)


def BlockLSTMV2(
    *,
    seq_len_max: SupportsIndex,
    x: ArrayLike,
    cs_prev: ArrayLike,
    h_prev: ArrayLike,
    w: ArrayLike,
    wci: ArrayLike | None = None,
    wcf: ArrayLike | None = None,
    wco: ArrayLike | None = None,
    b: ArrayLike,
    cell_clip: float = 0.0,
    use_peephole: bool = False,
    out: tuple[Array, ...] | None = None,
    num_threads: SupportsIndex | None = None,
    name: object = None,
) -> LSTMStates:
    """`BlockLSTM` with the gates in the order i, f, ci, o, no forget_bias, and no clip by default.

    `LSTMBlockCell` has the equations.

    Parameters
    ----------
    seq_len_max, x, cs_prev, h_prev, wci, wcf, wco, use_peephole
        The arguments of `BlockLSTM`.
    w : array_like (I+H, 4H)
        Weights: I rows for x, H rows for h_prev; columns i, f, ci, o, H of each.
    b : array_like (4H,)
        Bias: i, f, ci, o.
    cell_clip : float, default 0.0
        The cell state is clipped to ``[-cell_clip, cell_clip]``. Not where this is 0, negative or NaN.
    out, num_threads, name : optional
        See `blockcell.raw_ops`, which describes them for all ops.

    Returns
    -------
    LSTMStates
        i, cs, f, o, ci, co, h, each (T, B, H)
    """
    attributes = cell_clip, use_peephole
    return _BlockLSTMV2((x, cs_prev, h_prev, w, wci, wcf, wco, b), out, num_threads, attributes, seq_len_max)


def BlockLSTMGradV2(
    *,
    seq_len_max: SupportsIndex,
    x: ArrayLike,
    cs_prev: ArrayLike,
    h_prev: ArrayLike,
    w: ArrayLike,
    wci: ArrayLike | None = None,
    wcf: ArrayLike | None = None,
    wco: ArrayLike | None = None,
    b: ArrayLike,
    i: ArrayLike,
    cs: ArrayLike,
    f: ArrayLike,
    o: ArrayLike,
    ci: ArrayLike,
    co: ArrayLike,
    h: ArrayLike,
    cs_grad: ArrayLike,
    h_grad: ArrayLike,
    use_peephole: bool,
    out: tuple[Array, ...] | None = None,
    num_threads: SupportsIndex | None = None,
    name: object = None,
) -> LSTMGrads:
    """The gradient of `BlockLSTMV2` to all its arrays.

    `BlockLSTMGrad` with the gates in the order i, f, ci, o. TensorFlow's tape calls ``BlockLSTMGrad`` for both
    versions, which is wrong for this one.

    Parameters
    ----------
    seq_len_max, x, cs_prev, h_prev, w, wci, wcf, wco, b
        The arguments of `BlockLSTMV2`. The values of b are not used.
    i, cs, f, o, ci, co, h : array_like (T, B, H)
        What `BlockLSTMV2` returned.
    cs_grad, h_grad : array_like (T, B, H)
        Gradients of the loss to cs and to h of each step.
    use_peephole : bool
        As in the forward call.
    out, num_threads, name : optional
        See `blockcell.raw_ops`, which describes them for all ops.

    Returns
    -------
    LSTMGrads
        x_grad (T, B, I), cs_prev_grad and h_prev_grad (B, H), w_grad (I+H, 4H), b_grad (4H,);
        wci_grad, wcf_grad and wco_grad (H,), or without ``use_peephole`` zeros of the lengths of wci, wcf and wco,
        (H,) for None
    """
    arrays = x, cs_prev, h_prev, w, wci, wcf, wco, b, i, cs, f, o, ci, co, h, cs_grad, h_grad
    return _BlockLSTMGradV2(arrays, out, num_threads, (use_peephole,), seq_len_max)
