"""The layers of one cell, `LSTM`, `GRU` and `RNN`, and their initial weights."""

from __future__ import annotations

from typing import Any, Self, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from .._read import ArgumentReader, short
from ..activations import Activation
from ..optable import DTYPES, GATE_ORDERS, OPS, Array
from .base import HALF
from .cell import Cell
from .shared import GRUState, LSTMState, RNNState


class LSTM(Cell[LSTMState]):
    """A long short-term memory: `blockcell.raw_ops.BlockLSTM` as a layer, bit for bit.

    .. code-block:: text

        [i_bar | ci_bar | f_bar | o_bar] = [x, h_prev] @ w + b         "ifco": i, f, ci, o
        i = sigmoid(i_bar + cs_prev * wci)
        f = sigmoid(f_bar + cs_prev * wcf + forget_bias)
        ci = tanh(ci_bar)
        cs = i * ci + f * cs_prev                                      clipped to [-cell_clip, cell_clip]
        o = sigmoid(o_bar + cs * wco)
        h = o * tanh(cs)

    tanh, twice, and sigmoid are those of `activation` and `recurrent_activation` unless given.

    **forget_bias and cell_clip are 0 unless given.** The raw ops keep TensorFlow's defaults, 1.0 and 3.0: give these
    for weights that were trained with them.

    Parameters
    ----------
    w : array_like (I+H, 4H)
        Weights: I rows for x, H rows for h; columns by gate, in `gate_order`.
    b : array_like (4H,)
        Bias, with the gates in the same order.
    wci, wcf, wco : array_like (H,), optional
        Peephole weights of the gates i, f and o; all three or none.
    forget_bias : float
        Added to the forget gate.
    cell_clip : float
        Bound of the cell state; 0 or less for none.
    gate_order : {"icfo", "ifco"}
        Order of the columns: "icfo" as in LSTMBlockCell and BlockLSTM, or "ifco" as in BlockLSTMV2.
    activation, recurrent_activation : str or tuple
        What stands for tanh, of ci_bar and of cs, and for sigmoid, of the three gates: one of Keras' names, "tanh",
        "sigmoid", "relu", "leaky_relu", "elu", "selu", "softplus", "softsign", "exponential", "hard_sigmoid" and
        "linear", or a tuple of a name and parameters, such as ``("hard_sigmoid", 0.2, 0.5)``. `blockcell.activations`
        has what they are.
    reverse : bool
        Whether the layer runs from each row's last step to its first. y stays in the order of x; the state before the
        first step is that before the last one in time. Within a `Bidirectional`, leave it False: that turns `bw`.

    Raises
    ------
    TypeError
        The arrays are not all of one dtype of float32, float64 and float16, or an argument is of the wrong kind.
    ValueError
        Shapes do not agree, or the gate order or an activation is unknown.
    """

    _op = OPS["BlockLSTM"]
    _tensors = _op.weights
    _kernel = "lstm"
    _state = LSTMState

    def __init__(
        self,
        w: ArrayLike,
        b: ArrayLike,
        *,
        wci: ArrayLike | None = None,
        wcf: ArrayLike | None = None,
        wco: ArrayLike | None = None,
        forget_bias: float = 0.0,
        cell_clip: float = 0.0,
        gate_order: str = "icfo",
        activation: Activation = "tanh",
        recurrent_activation: Activation = "sigmoid",
        reverse: bool = False,
    ) -> None:
        reader = ArgumentReader(type(self).__name__)
        if not isinstance(gate_order, str) or gate_order not in GATE_ORDERS:
            error = ValueError if isinstance(gate_order, str) else TypeError
            raise error(f"{reader.caller}: gate_order is {short(gate_order)}; expected 'icfo' or 'ifco'")
        self._forget_bias = reader.number("forget_bias", forget_bias)
        self._cell_clip = reader.number("cell_clip", cell_clip)
        self._gate_order = gate_order
        self._read_activations(reader, activation=activation, recurrent_activation=recurrent_activation)
        self._reverse = reader.switch("reverse", reverse)
        peepholes = {"wci": wci, "wcf": wcf, "wco": wco}
        self._use_peephole = any(value is not None for value in peepholes.values())
        self._initialize({"w": w, "b": b} | (peepholes if self._use_peephole else {}))

    @classmethod
    def init(
        cls,
        input_size: SupportsIndex,
        hidden_size: SupportsIndex,
        *,
        seed: Any = None,
        dtype: DTypeLike = np.float32,
        use_peephole: bool = False,
        forget_bias: float = 0.0,
        cell_clip: float = 0.0,
        gate_order: str = "icfo",
        activation: Activation = "tanh",
        recurrent_activation: Activation = "sigmoid",
        reverse: bool = False,
    ) -> Self:
        """A layer with initial weights, the same ones for the same seed.

        The weights of each gate are Glorot uniform for x and a random orthogonal matrix for h. b is 0, except that it
        is 1 for the forget gate if `forget_bias` is 0. Peephole weights are Glorot uniform.

        TensorFlow 1's cells, such as LSTMBlockCell, have other defaults: all of w is Glorot uniform, b is 0,
        forget_bias is 1, and there is no clip (the raw ops clip at 3). Keras also uses Glorot uniform and orthogonal
        matrices, but for all four gates together; b is 1 for the forget gate.

        Parameters
        ----------
        input_size, hidden_size : int
            I and H.
        seed : int, sequence of int or numpy.random.Generator, optional
            Passed to `numpy.random.default_rng`; None, for other weights each time, takes a seed from the system.
        dtype : float32, float64 or float16
        use_peephole : bool
            Whether the layer has peephole weights.
        forget_bias, cell_clip, gate_order, activation, recurrent_activation, reverse
            As in the constructor.
        """
        reader = ArgumentReader(f"{cls.__name__}.init")
        I, H, dtype = _read_sizes(reader, input_size, hidden_size, dtype)  # noqa: E741
        g = np.random.default_rng(seed)
        gates = GATE_ORDERS.get(gate_order, ())
        weights: dict[str, Array] = {"w": _initial_weights(g, I, H, 4), "b": np.zeros(4 * H)}
        if forget_bias == 0 and gates:
            k = gates.index("f")
            weights["b"][k * H : (k + 1) * H] = 1
        if reader.switch("use_peephole", use_peephole):
            weights |= {name: _glorot(g, H, H, (H,)) for name in ("wci", "wcf", "wco")}
        return cls(
            **_rounded(weights, dtype),
            forget_bias=forget_bias,
            cell_clip=cell_clip,
            gate_order=gate_order,
            activation=activation,
            recurrent_activation=recurrent_activation,
            reverse=reverse,
        )

    @property
    def forget_bias(self) -> float:
        return self._forget_bias

    @property
    def cell_clip(self) -> float:
        return self._cell_clip

    @property
    def gate_order(self) -> str:
        return self._gate_order

    @property
    def recurrent_activation(self) -> Activation:
        """What makes the gates i, f and o, likewise."""
        return self._activations["recurrent_activation"]

    def _attributes(self) -> dict[str, Any]:
        return {"forget_bias": self.forget_bias, "cell_clip": self.cell_clip, "gate_order": self.gate_order}

    def _arguments(self) -> dict[str, Any]:
        return super()._arguments() | self._attributes()

    def _description(self) -> dict[str, Any]:
        return self._described(**self._attributes())

    def _remarks(self) -> list[str]:
        usual = {"forget_bias": 0.0, "cell_clip": 0.0, "gate_order": "icfo"}
        unusual = [f"{name}={value!r}" for name, value in self._attributes().items() if value != usual[name]]
        return ["use_peephole=True"] * self._use_peephole + unusual + super()._remarks()

    def _pack_options(self) -> tuple[bool, ...]:
        return self._use_peephole, self.gate_order == "ifco"

    def _forward_options(self) -> tuple[float, ...]:
        numbers = self.forget_bias, self.cell_clip
        return *(map(ArgumentReader.half, numbers) if self._number == HALF else numbers), self._use_peephole


class GRU(Cell[GRUState]):
    """A gated recurrent unit: `blockcell.ops.block_gru` or `block_gru_reset_after` as a layer, bit for bit.

    .. code-block:: text

        [r_bar | u_bar] = [x, h_prev] @ w_ru + b_ru
        r = sigmoid(r_bar)
        u = sigmoid(u_bar)
        c = tanh([x, h_prev * r] @ w_c + b_c)                          reset_after=False
        c = tanh(x @ w_cx + b_c + r * (h_prev @ w_ch + b_hc))          reset_after=True; w_cx, w_ch: w_c's rows for x, h
        h = u * h_prev + (1 - u) * c

    tanh and sigmoid are `activation` and `recurrent_activation` unless given.

    **The reset gate is applied before the product with w_c unless** ``reset_after=True``. Before it, as in TensorFlow's
    GRUBlockCell, is the default; PyTorch, cuDNN and Keras by default apply it after the product. These are different
    functions: weights of one mean nothing to the other.

    Parameters
    ----------
    w_ru : array_like (I+H, 2H)
        Weights of the gates: I rows for x, H rows for h; columns r, u.
    w_c : array_like (I+H, H)
        Weights of the candidate: I rows for x, H rows for ``h * r``, or for h with `reset_after`.
    b_ru : array_like (2H,)
        Bias of the gates: r, u.
    b_c : array_like (H,)
        Bias of the candidate.
    reset_after : bool
        Whether the reset gate is applied after the product with w_c.
    b_hc : array_like (H,), optional
        With `reset_after`, the candidate's bias that the reset gate is applied to; None for zeros.
    activation, recurrent_activation : str or tuple
        What stands for tanh and for sigmoid, as for `LSTM`.
    reverse : bool
        Whether the layer runs from each row's last step to its first, as for `LSTM`.

    Raises
    ------
    TypeError
        The arrays are not all of one dtype of float32, float64 and float16.
    ValueError
        Shapes do not agree, an activation is unknown, or there is a `b_hc` without `reset_after`.
    """

    _op = OPS["block_gru"]
    _tensors = _op.weights
    _kernel = "gru"
    _state = GRUState

    def __init__(
        self,
        w_ru: ArrayLike,
        w_c: ArrayLike,
        b_ru: ArrayLike | None = None,  # both biases are needed; so GRU(8, 16) gets to a message that helps
        b_c: ArrayLike | None = None,
        *,
        reset_after: bool = False,
        b_hc: ArrayLike | None = None,
        activation: Activation = "tanh",
        recurrent_activation: Activation = "sigmoid",
        reverse: bool = False,
    ) -> None:
        reader = ArgumentReader(type(self).__name__)
        self._read_activations(reader, activation=activation, recurrent_activation=recurrent_activation)
        self._reverse = reader.switch("reverse", reverse)
        weights = {"w_ru": w_ru, "w_c": w_c, "b_ru": b_ru, "b_c": b_c}
        if reader.switch("reset_after", reset_after):
            self._op, self._kernel = OPS["block_gru_reset_after"], "gru_reset_after"
            self._tensors = self._op.weights
            if b_hc is None and b_c is not None:
                b_hc = np.zeros_like(reader.array("b_c", b_c))
            weights["b_hc"] = b_hc
        elif b_hc is not None:
            raise ValueError(f"{reader.caller}: b_hc is given and reset_after is False; b_hc is for reset_after=True")
        self._initialize(weights)

    @property
    def reset_after(self) -> bool:
        """Whether the reset gate is applied after the product with w_c."""
        return self._op is not GRU._op

    @property
    def recurrent_activation(self) -> Activation:
        """What makes the gates r and u, likewise."""
        return self._activations["recurrent_activation"]

    def _arguments(self) -> dict[str, Any]:
        return super()._arguments() | {"reset_after": self.reset_after}

    def _description(self) -> dict[str, Any]:
        return self._described(**({"reset_after": True} if self.reset_after else {}))

    def _remarks(self) -> list[str]:
        return ["reset_after=True"] * self.reset_after + super()._remarks()

    @classmethod
    def init(
        cls,
        input_size: SupportsIndex,
        hidden_size: SupportsIndex,
        *,
        seed: Any = None,
        dtype: DTypeLike = np.float32,
        reset_after: bool = False,
        activation: Activation = "tanh",
        recurrent_activation: Activation = "sigmoid",
        reverse: bool = False,
    ) -> Self:
        """A layer with initial weights, the same ones for the same seed.

        The weights of each gate and of the candidate are Glorot uniform for x and a random orthogonal matrix for h.
        b_ru is 1; b_c is 0, and b_hc, with `reset_after`.

        TensorFlow 1's cells, such as GRUBlockCell, have the same biases, but all of w_ru and all of w_c are Glorot
        uniform. Keras also uses Glorot uniform and orthogonal matrices, but for both gates and the candidate together;
        its biases are 0.

        Parameters
        ----------
        input_size, hidden_size : int
            I and H.
        seed : int, sequence of int or numpy.random.Generator, optional
            Passed to `numpy.random.default_rng`; None, for other weights each time, takes a seed from the system.
        dtype : float32, float64 or float16
        reset_after, activation, recurrent_activation, reverse
            As in the constructor.
        """
        I, H, dtype = _read_sizes(ArgumentReader(f"{cls.__name__}.init"), input_size, hidden_size, dtype)  # noqa: E741
        g = np.random.default_rng(seed)
        w_ru, w_c = _initial_weights(g, I, H, 2), _initial_weights(g, I, H, 1)
        weights = {"w_ru": w_ru, "w_c": w_c, "b_ru": np.ones(2 * H), "b_c": np.zeros(H)}
        return cls(
            **_rounded(weights, dtype),
            reset_after=reset_after,
            activation=activation,
            recurrent_activation=recurrent_activation,
            reverse=reverse,
        )


class RNN(Cell[RNNState]):
    """A plain recurrent layer: `blockcell.ops.block_rnn` as a layer, bit for bit. The RNN of PyTorch and ONNX, Keras'
    SimpleRNN.

    .. code-block:: text

        h = activation([x, h_prev] @ w + b)

    Parameters
    ----------
    w : array_like (I+H, H)
        Weights: I rows for x, H rows for h.
    b : array_like (H,)
        Bias.
    activation : str or tuple
        One of Keras' names, "tanh", "sigmoid", "relu", "leaky_relu", "elu", "selu", "softplus", "softsign",
        "exponential", "hard_sigmoid" and "linear", or a tuple of a name and parameters, such as
        ``("leaky_relu", 0.01)``. `blockcell.activations` has what they are.
    reverse : bool
        Whether the layer runs from each row's last step to its first, as for `LSTM`.

    Raises
    ------
    TypeError
        The arrays are not all of one dtype of float32, float64 and float16, or an argument is of the wrong kind.
    ValueError
        Shapes do not agree, or the activation is unknown.
    """

    _op = OPS["block_rnn"]
    _tensors = _op.weights
    _kernel = "rnn"
    _state = RNNState

    def __init__(self, w: ArrayLike, b: ArrayLike, *, activation: Activation = "tanh", reverse: bool = False) -> None:
        reader = ArgumentReader(type(self).__name__)
        self._read_activations(reader, activation=activation)
        self._reverse = reader.switch("reverse", reverse)
        self._initialize({"w": w, "b": b})

    def _description(self) -> dict[str, Any]:
        return self._described()

    @classmethod
    def init(
        cls,
        input_size: SupportsIndex,
        hidden_size: SupportsIndex,
        *,
        seed: Any = None,
        dtype: DTypeLike = np.float32,
        activation: Activation = "tanh",
        reverse: bool = False,
    ) -> Self:
        """A layer with initial weights, the same ones for the same seed: as Keras has them for its SimpleRNN, Glorot
        uniform for x, a random orthogonal matrix for h, and b is 0.

        Parameters
        ----------
        input_size, hidden_size : int
            I and H.
        seed : int, sequence of int or numpy.random.Generator, optional
            Passed to `numpy.random.default_rng`; None, for other weights each time, takes a seed from the system.
        dtype : float32, float64 or float16
        activation, reverse
            As in the constructor.
        """
        I, H, dtype = _read_sizes(ArgumentReader(f"{cls.__name__}.init"), input_size, hidden_size, dtype)  # noqa: E741
        weights = {"w": _initial_weights(np.random.default_rng(seed), I, H, 1), "b": np.zeros(H)}
        return cls(**_rounded(weights, dtype), activation=activation, reverse=reverse)


# ------------------------------------------------------------------------------------------------------ initial weights
def _read_sizes(
    reader: ArgumentReader, input_size: Any, hidden_size: Any, dtype: Any, name: str = "hidden_size"
) -> tuple[int, int, np.dtype[Any]]:
    sizes = {"input_size": input_size, name: hidden_size}
    for name in sizes:
        sizes[name] = reader.integer(name, sizes[name])
        if sizes[name] < 0:
            raise ValueError(f"{reader.caller}: {name} is {sizes[name]}; expected at least 0")
    dtype = np.dtype(dtype)
    if dtype not in DTYPES:
        raise TypeError(f"{reader.caller}: dtype is {dtype}; expected float32, float64 or float16")
    return sizes["input_size"], sizes[name], dtype


def _glorot(g: np.random.Generator, fan_in: int, fan_out: int, shape: tuple[int, ...]) -> Array:
    bound = np.sqrt(6 / max(fan_in + fan_out, 1))
    return g.uniform(-bound, bound, shape)


def _orthogonal(g: np.random.Generator, size: int) -> Array:
    """A matrix drawn uniformly from all orthogonal ones."""
    q, r = np.linalg.qr(g.standard_normal((size, size)))
    return q * np.copysign(1, np.diagonal(r))  # type: ignore[no-any-return]


def _initial_weights(g: np.random.Generator, inputs: int, hidden: int, gates: int) -> Array:
    """[I+H, gates H]"""
    columns = [
        np.concatenate([_glorot(g, inputs, hidden, (inputs, hidden)), _orthogonal(g, hidden)]) for _ in range(gates)
    ]
    return np.concatenate(columns, axis=1)


def _rounded(weights: dict[str, Array], dtype: np.dtype[Any]) -> dict[str, Array]:
    with np.errstate(under="ignore"):  # weights that are too small for float16 may become 0
        return {name: array.astype(dtype) for name, array in weights.items()}
