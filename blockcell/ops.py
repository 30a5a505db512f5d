"""Ops in the style of `blockcell.raw_ops` that TensorFlow does not have: two GRUs and a plain RNN over sequences, and
the gradients of the two cells to all of their arrays.

What the documentation of `blockcell.raw_ops` says of arguments, dtypes and shapes holds here too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import SupportsIndex

from numpy.typing import ArrayLike

from ._kernels import bind
from .activations import Activation
from .optable import (
    OPS,
    Array,
    GRUCellVjp,
    GRUGrads,
    GRUResetAfterGrads,
    GRUResetAfterStates,
    GRUStates,
    LSTMGrads,
    RNNGrads,
    RNNStates,
)

__all__ = [
    "block_gru",
    "block_gru_grad",
    "block_gru_reset_after",
    "block_gru_reset_after_grad",
    "block_rnn",
    "block_rnn_grad",
    "gru_block_cell_vjp",
    "lstm_block_cell_vjp",
]

_block_gru: Callable[..., GRUStates] = bind(OPS["block_gru"]).run
_block_gru_grad: Callable[..., GRUGrads] = bind(OPS["block_gru_grad"]).run
_block_gru_reset_after: Callable[..., GRUResetAfterStates] = bind(OPS["block_gru_reset_after"]).run
_block_gru_reset_after_grad: Callable[..., GRUResetAfterGrads] = bind(OPS["block_gru_reset_after_grad"]).run
_block_rnn: Callable[..., RNNStates] = bind(OPS["block_rnn"]).run
_block_rnn_grad: Callable[..., RNNGrads] = bind(OPS["block_rnn_grad"]).run
_gru_block_cell_vjp: Callable[..., GRUCellVjp] = bind(OPS["gru_block_cell_vjp"]).run
_lstm_block_cell_vjp: Callable[..., LSTMGrads] = bind(OPS["lstm_block_cell_vjp"]).run


def block_gru(
    *,
    seq_len_max: SupportsIndex,
    x: ArrayLike,
    h_prev: ArrayLike,
    w_ru: ArrayLike,
    w_c: ArrayLike,
    b_ru: ArrayLike,
    b_c: ArrayLike,
    out: tuple[Array, ...] | None = None,
    num_threads: SupportsIndex | None = None,
) -> GRUStates:
    """A gated recurrent unit over a sequence: `blockcell.raw_ops.GRUBlockCell` at each step.

    The h of a step is h_prev of the next one. Past seq_len_max nothing is read and all outputs are zero.

    Parameters
    ----------
    seq_len_max : int
        Number of steps to run, 0 to T: an integer or a 0-d array of integers.
    x : array_like (T, B, I)
        Input, time first.
    h_prev : array_like (B, H)
        Hidden state before the first step.
    w_ru, w_c, b_ru, b_c
        The arguments of `GRUBlockCell`: w_ru (I+H, 2H) and b_ru (2H,), with the gates r, u; w_c (I+H, H) and b_c (H,).
    out, num_threads : optional
        See `blockcell.raw_ops`, which describes them for all ops.

    Returns
    -------
    GRUStates
        r, u, c, h, each (T, B, H)
    """
    return _block_gru((x, h_prev, w_ru, w_c, b_ru, b_c), out, num_threads, (), seq_len_max)


def block_gru_grad(
    *,
    seq_len_max: SupportsIndex,
    x: ArrayLike,
    h_prev: ArrayLike,
    w_ru: ArrayLike,
    w_c: ArrayLike,
    b_ru: ArrayLike,
    b_c: ArrayLike,
    r: ArrayLike,
    u: ArrayLike,
    c: ArrayLike,
    h: ArrayLike,
    h_grad: ArrayLike,
    out: tuple[Array, ...] | None = None,
    num_threads: SupportsIndex | None = None,
) -> GRUGrads:
    """The gradient of `block_gru` to all its arrays.

    A step has the equations of `gru_block_cell_vjp`. The steps run backwards: the gradient to h_prev at a step is added
    to h_grad of the step before it. Gradients of weights are sums over the steps. Past seq_len_max nothing is read and
    x_grad is zero.

    Parameters
    ----------
    seq_len_max, x, h_prev, w_ru, w_c, b_ru, b_c
        The arguments of `block_gru`. The values of b_ru and b_c are not used.
    r, u, c, h : array_like (T, B, H)
        What `block_gru` returned.
    h_grad : array_like (T, B, H)
        Gradient of the loss to h of each step.
    out, num_threads : optional
        See `blockcell.raw_ops`, which describes them for all ops.

    Returns
    -------
    GRUGrads
        x_grad (T, B, I), h_prev_grad (B, H), w_ru_grad (I+H, 2H), w_c_grad (I+H, H),
        b_ru_grad (2H,), b_c_grad (H,)
    """
    return _block_gru_grad((x, h_prev, w_ru, w_c, b_ru, b_c, r, u, c, h, h_grad), out, num_threads, (), seq_len_max)


def block_gru_reset_after(
    *,
    seq_len_max: SupportsIndex,
    x: ArrayLike,
    h_prev: ArrayLike,
    w_ru: ArrayLike,
    w_c: ArrayLike,
    b_ru: ArrayLike,
    b_c: ArrayLike,
    b_hc: ArrayLike,
    out: tuple[Array, ...] | None = None,
    num_threads: SupportsIndex | None = None,
) -> GRUResetAfterStates:
    """A gated recurrent unit over a sequence that resets after the product: the GRU of PyTorch, Keras and cuDNN.

    At step t, with ``h_prev`` from step t - 1:

    .. code-block:: text

        [r_bar | u_bar] = [x, h_prev] @ w_ru + b_ru
        r = sigmoid(r_bar)
        u = sigmoid(u_bar)
        hc = h_prev @ w_ch + b_hc
        c = tanh(x @ w_cx + b_c + r * hc)
        h = u * (h_prev - c) + c

    Past seq_len_max nothing is read and all outputs are zero.

    Parameters
    ----------
    seq_len_max : int
        Number of steps to run, 0 to T: an integer or a 0-d array of integers.
    x : array_like (T, B, I)
        Input, time first.
    h_prev : array_like (B, H)
        Hidden state before the first step.
    w_ru : array_like (I+H, 2H)
        Weights of the gates: I rows for x, H rows for h_prev; columns r, u.
    w_c : array_like (I+H, H)
        Weights of the candidate: I rows for x, w_cx, and H rows for h_prev, w_ch.
    b_ru : array_like (2H,)
        Bias of the gates: r, u.
    b_c : array_like (H,)
        Bias of the candidate, outside of what the reset gate acts on.
    b_hc : array_like (H,)
        Bias of the candidate that the reset gate acts on.
    out, num_threads : optional
        See `blockcell.raw_ops`, which describes them for all ops.

    Returns
    -------
    GRUResetAfterStates
        r, u, c, hc, h, each (T, B, H)

    Notes
    -----
    Source: Cho et al., "Learning phrase representations using RNN encoder-decoder", arXiv:1406.1078v1, and the
    equations of ``torch.nn.GRU``, whose z is u, and of ``keras.layers.GRU(reset_after=True)``.
    """
    return _block_gru_reset_after((x, h_prev, w_ru, w_c, b_ru, b_c, b_hc), out, num_threads, (), seq_len_max)


def block_gru_reset_after_grad(
    *,
    seq_len_max: SupportsIndex,
    x: ArrayLike,
    h_prev: ArrayLike,
    w_ru: ArrayLike,
    w_c: ArrayLike,
    b_ru: ArrayLike,
    b_c: ArrayLike,
    b_hc: ArrayLike,
    r: ArrayLike,
    u: ArrayLike,
    c: ArrayLike,
    hc: ArrayLike,
    h: ArrayLike,
    h_grad: ArrayLike,
    out: tuple[Array, ...] | None = None,
    num_threads: SupportsIndex | None = None,
) -> GRUResetAfterGrads:
    """The gradient of `block_gru_reset_after` to all its arrays.

    At each step, with d_h the sum of the gradients from outside and from the step after it:

    .. code-block:: text

        d_c_bar = d_h * (1 - u) * (1 - c * c)
        d_u_bar = d_h * (h_prev - c) * u * (1 - u)
        d_r_bar = d_c_bar * hc * r * (1 - r)
        d_hc = d_c_bar * r
        [d_x_1 | d_h_1] = [d_r_bar | d_u_bar] @ w_ru^T
        d_x = d_x_1 + d_c_bar @ w_cx^T
        d_h_prev = d_h_1 + d_hc @ w_ch^T + d_h * u
        d_w_ru = [x, h_prev]^T @ [d_r_bar | d_u_bar]
        d_w_cx = x^T @ d_c_bar
        d_w_ch = h_prev^T @ d_hc
        d_b_ru, d_b_c, d_b_hc = the sums of [d_r_bar | d_u_bar], d_c_bar and d_hc over the batch

    The steps run as in `block_gru_grad`.

    Parameters
    ----------
    seq_len_max, x, h_prev, w_ru, w_c, b_ru, b_c, b_hc
        The arguments of `block_gru_reset_after`. The values of b_ru, b_c and b_hc are not used.
    r, u, c, hc, h : array_like (T, B, H)
        What `block_gru_reset_after` returned.
    h_grad : array_like (T, B, H)
        Gradient of the loss to h of each step.
    out, num_threads : optional
        See `blockcell.raw_ops`, which describes them for all ops.

    Returns
    -------
    GRUResetAfterGrads
        x_grad (T, B, I), h_prev_grad (B, H), w_ru_grad (I+H, 2H), w_c_grad (I+H, H),
        b_ru_grad (2H,), b_c_grad (H,), b_hc_grad (H,)
    """
    arrays = x, h_prev, w_ru, w_c, b_ru, b_c, b_hc, r, u, c, hc, h, h_grad
    return _block_gru_reset_after_grad(arrays, out, num_threads, (), seq_len_max)


def block_rnn(
    *,
    seq_len_max: SupportsIndex,
    x: ArrayLike,
    h_prev: ArrayLike,
    w: ArrayLike,
    b: ArrayLike,
    activation: Activation = "tanh",
    out: tuple[Array, ...] | None = None,
    num_threads: SupportsIndex | None = None,
) -> RNNStates:
    """A plain recurrent layer over a sequence: the RNN of PyTorch and ONNX, Keras' SimpleRNN.

    At step t, with ``h_prev`` from step t - 1:

    .. code-block:: text

        h = activation([x, h_prev] @ w + b)

    Past seq_len_max nothing is read and h is zero.

    Parameters
    ----------
    seq_len_max : int
        Number of steps to run, 0 to T: an integer or a 0-d array of integers.
    x : array_like (T, B, I)
        Input, time first.
    h_prev : array_like (B, H)
        Hidden state before the first step.
    w : array_like (I+H, H)
        Weights: I rows for x, H rows for h_prev.
    b : array_like (H,)
        Bias: the sum of PyTorch's two.
    activation : str or tuple
        One of Keras' names, or a tuple of a name and parameters: `blockcell.activations` has them.
    out, num_threads : optional
        See `blockcell.raw_ops`, which describes them for all ops.

    Returns
    -------
    RNNStates
        h (T, B, H)
    """
    return _block_rnn((x, h_prev, w, b), out, num_threads, (activation,), seq_len_max)


def block_rnn_grad(
    *,
    seq_len_max: SupportsIndex,
    x: ArrayLike,
    h_prev: ArrayLike,
    w: ArrayLike,
    b: ArrayLike,
    h: ArrayLike,
    h_grad: ArrayLike,
    activation: Activation = "tanh",
    out: tuple[Array, ...] | None = None,
    num_threads: SupportsIndex | None = None,
) -> RNNGrads:
    """The gradient of `block_rnn` to all its arrays.

    At each step, with d_h the sum of the gradients from outside and from the step after it:

    .. code-block:: text

        d_h_bar = d_h * slope(h)
        [d_x | d_h_prev] = d_h_bar @ w^T
        d_w = [x, h_prev]^T @ d_h_bar
        d_b = the sum of d_h_bar over the batch

    ``slope(h)`` is the derivative of the activation where its value is h, such as ``1 - h * h`` for tanh. The steps
    run as in `block_gru_grad`.

    Parameters
    ----------
    seq_len_max, x, h_prev, w, b, activation
        The arguments of `block_rnn`. The values of b are not used.
    h : array_like (T, B, H)
        What `block_rnn` returned.
    h_grad : array_like (T, B, H)
        Gradient of the loss to h of each step.
    out, num_threads : optional
        See `blockcell.raw_ops`, which describes them for all ops.

    Returns
    -------
    RNNGrads
        x_grad (T, B, I), h_prev_grad (B, H), w_grad (I+H, H), b_grad (H,)
    """
    return _block_rnn_grad((x, h_prev, w, b, h, h_grad), out, num_threads, (activation,), seq_len_max)


def gru_block_cell_vjp(
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
) -> GRUCellVjp:
    """The gradient of `blockcell.raw_ops.GRUBlockCell` to all its arrays.

    The equations are those of `blockcell.raw_ops.GRUBlockCellGrad`, and

    .. code-block:: text

        d_w_ru = [x, h_prev]^T @ d_r_bar_u_bar
        d_w_c = [x, h_prev * r]^T @ d_c_bar
        d_b_ru, d_b_c = the sums of d_r_bar_u_bar and d_c_bar over the batch

    Parameters
    ----------
    x, h_prev, w_ru, w_c, b_ru, b_c
        The arguments of `GRUBlockCell`. The values of b_ru and b_c are not used.
    r, u, c : array_like (B, H)
        What `GRUBlockCell` returned.
    d_h : array_like (B, H)
        Gradient of the loss to h.
    out, num_threads : optional
        See `blockcell.raw_ops`, which describes them for all ops.

    Returns
    -------
    GRUCellVjp
        d_x (B, I), d_h_prev (B, H), d_w_ru (I+H, 2H), d_w_c (I+H, H), d_b_ru (2H,), d_b_c (H,)
    """
    return _gru_block_cell_vjp((x, h_prev, w_ru, w_c, b_ru, b_c, r, u, c, d_h), out, num_threads)


def lstm_block_cell_vjp(
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
) -> LSTMGrads:
    """The gradient of `blockcell.raw_ops.LSTMBlockCell` to all its arrays.

    The equations are those of `blockcell.raw_ops.LSTMBlockCellGrad`, and

    .. code-block:: text

        [x_grad | h_prev_grad] = dicfo @ w^T
        w_grad = [x, h_prev]^T @ dicfo
        b_grad = the sum of dicfo over the batch

    Parameters
    ----------
    x, cs_prev, h_prev, w, wci, wcf, wco, b
        The arguments of `LSTMBlockCell`. The values of b are not used.
    i, cs, f, o, ci, co : array_like (B, H)
        What `LSTMBlockCell` returned.
    cs_grad, h_grad : array_like (B, H)
        Gradients of the loss to cs and to h.
    use_peephole : bool
        As in the forward call.
    out, num_threads : optional
        See `blockcell.raw_ops`, which describes them for all ops.

    Returns
    -------
    LSTMGrads
        x_grad (B, I), cs_prev_grad and h_prev_grad (B, H), w_grad (I+H, 4H), b_grad (4H,);
        wci_grad, wcf_grad and wco_grad (H,), or without ``use_peephole`` zeros of the lengths of wci, wcf and wco,
        (H,) for None
    """
    arrays = x, cs_prev, h_prev, w, wci, wcf, wco, b, i, cs, f, o, ci, co, cs_grad, h_grad
    return _lstm_block_cell_vjp(arrays, out, num_threads, (use_peephole,))
