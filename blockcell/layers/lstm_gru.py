"""The layers of one cell, `LSTM`, `GRU` and `RNN`, and their initial weights."""

from __future__ import annotations

from typing import Any, Self, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from .._kernels import LSTMOptions
from ..activations import Activation, numbers
from ..argument_reader import ArgumentReader
from ..errors import short
from ..gates import COUPLED_GATES, GATE_ORDERS
from ..misnamed_arguments import explain_arguments
from ..optable import DTYPE_NAMES, DTYPES, LAYER_OPTIONS, OPS, Array, lstm_weights
from .cell import Cell
from .shared import GRUState, LSTMState, RNNState


class LSTM(Cell[LSTMState]):
    """A long short-term memory: `blockcell.raw_ops.BlockLSTM` as a layer, bit for bit.

    A step has the equations of `blockcell.raw_ops.LSTMBlockCell`, with peepholes if there are weights for them. tanh,
    twice, and sigmoid are `activation` and `recurrent_activation` unless given.

    With ``coupled=True`` the input gate is ``i = 1 - f``, and w and b have three gates, ci, f, o, as TensorFlow's
    CoupledInputForgetGateLSTMCell has. With `w_p` the output is projected, to P numbers:

    .. code-block:: text

        h = (o * tanh(cs)) @ w_p            clipped to [-proj_clip, proj_clip]

    P is then the size of h in the state, of y and of the rows of w for h, while cs and the peepholes have H numbers.

    **forget_bias and cell_clip are 0 unless given.** The raw ops keep TensorFlow's defaults, 1.0 and 3.0: give these
    for weights that were trained with them.

    Parameters
    ----------
    w : array_like (I+H, 4H)
        Weights: I rows for x, H rows for h; columns by gate, in `gate_order`. (I+P, 4H) with `w_p`, and 3H columns with
        `coupled`.
    b : array_like (4H,)
        Bias, with the gates in the same order. (3H,) with `coupled`.
    wci, wcf, wco : array_like (H,), optional
        Peephole weights of the gates i, f and o; all three or none. With `coupled` only `wcf` and `wco`.
    w_p : array_like (H, P), optional
        Weights of the projection, which has no bias.
    forget_bias : float
        Added to the forget gate.
    cell_clip : float
        Bound of the cell state; 0 or less for none. The gradient passes through it as if there were none.
    proj_clip : float
        Bound of the projected output; 0 or less for none. The gradient is zero where it clips.
    coupled : bool
        Whether the input gate is 1 - f.
    gate_order : {"icfo", "ifco"}
        Order of the columns: "icfo" as in LSTMBlockCell and BlockLSTM, or "ifco" as in BlockLSTMV2. With `coupled`
        it is ci, f, o, which goes with "icfo".
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
        Shapes do not agree, or the gate order or an activation is unknown; `wci` or the order "ifco" with `coupled`; a
        `proj_clip` without `w_p`.
    """

    _op = OPS["BlockLSTM"]
    _kernel = "lstm"
    _state = LSTMState
    _options = LAYER_OPTIONS["LSTM"]
    forget_bias: float
    cell_clip: float
    proj_clip: float
    coupled: bool
    """Whether the input gate is 1 - f."""
    gate_order: str
    recurrent_activation: Activation
    """The activation of the gates i, f and o: a name, or a tuple of a name and parameters."""

    @explain_arguments
    def __init__(
        self,
        w: ArrayLike,
        b: ArrayLike,
        *,
        wci: ArrayLike | None = None,
        wcf: ArrayLike | None = None,
        wco: ArrayLike | None = None,
        w_p: ArrayLike | None = None,
        forget_bias: float = 0.0,
        cell_clip: float = 0.0,
        proj_clip: float = 0.0,
        coupled: bool = False,
        gate_order: str = "icfo",
        activation: Activation = "tanh",
        recurrent_activation: Activation = "sigmoid",
        reverse: bool = False,
    ) -> None:
        reader = ArgumentReader(type(self).__name__)
        if not isinstance(gate_order, str) or gate_order not in GATE_ORDERS:
            error = ValueError if isinstance(gate_order, str) else TypeError
            raise error(f"{reader.caller}: gate_order is {short(gate_order)}; expected 'icfo' or 'ifco'")
        self._set_options(
            forget_bias=reader.number("forget_bias", forget_bias),
            cell_clip=reader.number("cell_clip", cell_clip),
            proj_clip=reader.number("proj_clip", proj_clip),
            coupled=reader.switch("coupled", coupled),
            gate_order=gate_order,
        )
        self._read_cell_options(reader, reverse, activation=activation, recurrent_activation=recurrent_activation)
        peepholes = {"wci": wci, "wcf": wcf, "wco": wco}
        if self.coupled:
            if gate_order != "icfo":
                expected = "expected 'icfo', as the gates are then ci, f, o"
                raise ValueError(f"{reader.caller}: gate_order is {gate_order!r} and coupled is True; {expected}")
            if peepholes.pop("wci") is not None:
                expected = "expected wcf and wco alone, as the input gate is then 1 - f"
                raise ValueError(f"{reader.caller}: wci is given and coupled is True; {expected}")
        if w_p is None and self.proj_clip != 0:
            expected = "expected the weights of a projection, w_p, or no proj_clip"
            raise ValueError(f"{reader.caller}: proj_clip is {self.proj_clip:g} and w_p is None; {expected}")
        self._use_peephole = any(value is not None for value in peepholes.values())
        self._tensors = lstm_weights(self.coupled, w_p is not None)
        projection = {} if w_p is None else {"w_p": w_p}
        self._initialize({"w": w, "b": b} | (peepholes if self._use_peephole else {}) | projection)

    @classmethod
    @explain_arguments
    def init(
        cls,
        input_size: SupportsIndex,
        hidden_size: SupportsIndex,
        *,
        seed: Any = None,
        dtype: DTypeLike = np.float32,
        use_peephole: bool = False,
        proj_size: SupportsIndex = 0,
        forget_bias: float = 0.0,
        cell_clip: float = 0.0,
        proj_clip: float = 0.0,
        coupled: bool = False,
        gate_order: str = "icfo",
        activation: Activation = "tanh",
        recurrent_activation: Activation = "sigmoid",
        reverse: bool = False,
    ) -> Self:
        """Make a layer with initial weights, the same ones for the same seed.

        The weights of each gate are Glorot uniform for x and a random orthogonal matrix for h. b is 0, except that it
        is 1 for the forget gate if `forget_bias` is 0. Peephole weights are Glorot uniform, and so is a projection.

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
        proj_size : int
            P, to how many numbers the output is projected, as in PyTorch (TensorFlow's num_proj); 0 for no projection.
        forget_bias, cell_clip, proj_clip, coupled, gate_order, activation, recurrent_activation, reverse
            As in the constructor.
        """
        reader = ArgumentReader(f"{cls.__name__}.init")
        I, H, dtype = _read_sizes(reader, input_size, hidden_size, dtype)  # noqa: E741
        P = reader.at_least(0, "proj_size", proj_size)
        g = np.random.default_rng(seed)
        coupled = reader.switch("coupled", coupled)
        gates = COUPLED_GATES if coupled else GATE_ORDERS.get(gate_order, GATE_ORDERS["icfo"])
        weights: dict[str, Array] = {"w": _initial_weights(g, I, P or H, H, len(gates)), "b": np.zeros(len(gates) * H)}
        if forget_bias == 0:
            k = gates.index("f")
            weights["b"][k * H : (k + 1) * H] = 1
        if reader.switch("use_peephole", use_peephole):
            weights |= {name: _glorot(g, H, H, (H,)) for name in ("wci", "wcf", "wco")[coupled:]}
        if P:
            weights["w_p"] = _glorot(g, H, P, (H, P))
        return cls(
            **_rounded(weights, dtype),
            forget_bias=forget_bias,
            cell_clip=cell_clip,
            proj_clip=proj_clip,
            coupled=coupled,
            gate_order=gate_order,
            activation=activation,
            recurrent_activation=recurrent_activation,
            reverse=reverse,
        )

    @property
    def output_size(self) -> int:
        """H, the last dimension of y; P, if there is a projection."""
        return self._sizes.get("P", self.hidden_size)

    @property
    def _gates(self) -> tuple[str, ...]:
        return COUPLED_GATES if self.coupled else GATE_ORDERS[self.gate_order]

    @property
    def _weight_names(self) -> tuple[str, ...]:
        return tuple(tensor.name for tensor in lstm_weights(False, True))

    def _repr_weights(self) -> list[str]:
        peepholes = ["use_peephole=True"] if self._use_peephole else []
        return peepholes + ([f"proj_size={self.output_size}"] if "P" in self._sizes else [])

    def _kernel_options(self) -> tuple[Any, ...]:
        bounds = {name: getattr(self, name) for name in ("forget_bias", "cell_clip", "proj_clip")}
        if self.dtype == np.float16:  # in the precision of the arrays
            bounds = {name: ArgumentReader.half(value) for name, value in bounds.items()}
        return LSTMOptions(
            P=self._sizes.get("P", 0),
            coupled=self.coupled,
            use_peephole=self._use_peephole,
            ifco=self.gate_order == "ifco",
            **bounds,
            activation=numbers(self.activation),
            recurrent_activation=numbers(self.recurrent_activation),
        )


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
    _options = LAYER_OPTIONS["GRU"]
    reset_after: bool
    """Whether the reset gate is applied after the product with w_c."""
    recurrent_activation: Activation
    """The activation of the gates r and u: a name, or a tuple of a name and parameters."""

    @explain_arguments
    def __init__(
        self,
        w_ru: ArrayLike,
        w_c: ArrayLike,
        b_ru: ArrayLike,
        b_c: ArrayLike,
        *,
        reset_after: bool = False,
        b_hc: ArrayLike | None = None,
        activation: Activation = "tanh",
        recurrent_activation: Activation = "sigmoid",
        reverse: bool = False,
    ) -> None:
        reader = ArgumentReader(type(self).__name__)
        self._set_options(reset_after=reader.switch("reset_after", reset_after))
        self._read_cell_options(reader, reverse, activation=activation, recurrent_activation=recurrent_activation)
        weights = {"w_ru": w_ru, "w_c": w_c, "b_ru": b_ru, "b_c": b_c}
        if self.reset_after:
            self._op, self._kernel = OPS["block_gru_reset_after"], "gru_reset_after"
            self._tensors = self._op.weights
            if b_hc is None:
                b_hc = np.zeros_like(reader.array("b_c", b_c))
            weights["b_hc"] = b_hc
        elif b_hc is not None:
            raise ValueError(f"{reader.caller}: b_hc is given and reset_after is False; b_hc is for reset_after=True")
        self._initialize(weights)

    @classmethod
    @explain_arguments
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
        """Make a layer with initial weights, the same ones for the same seed.

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
        w_ru, w_c = _initial_weights(g, I, H, H, 2), _initial_weights(g, I, H, H, 1)
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
    _options = LAYER_OPTIONS["RNN"]

    @explain_arguments
    def __init__(self, w: ArrayLike, b: ArrayLike, *, activation: Activation = "tanh", reverse: bool = False) -> None:
        reader = ArgumentReader(type(self).__name__)
        self._read_cell_options(reader, reverse, activation=activation)
        self._initialize({"w": w, "b": b})

    @classmethod
    @explain_arguments
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
        """Make a layer with initial weights, the same ones for the same seed.

        As in Keras' SimpleRNN, w is Glorot uniform for x and a random orthogonal matrix for h, and b is 0.

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
        weights = {"w": _initial_weights(np.random.default_rng(seed), I, H, H, 1), "b": np.zeros(H)}
        return cls(**_rounded(weights, dtype), activation=activation, reverse=reverse)


# ------------------------------------------------------------------------------------------------------ initial weights
def _read_sizes(
    reader: ArgumentReader, input_size: Any, hidden_size: Any, dtype: Any, name: str = "hidden_size"
) -> tuple[int, int, np.dtype[Any]]:
    sizes = reader.at_least(0, "input_size", input_size), reader.at_least(0, name, hidden_size)
    dtype = np.dtype(dtype)
    if dtype not in DTYPES:
        raise TypeError(f"{reader.caller}: dtype is {dtype}; expected {DTYPE_NAMES}")
    return *sizes, dtype


def _glorot(g: np.random.Generator, fan_in: int, fan_out: int, shape: tuple[int, ...]) -> Array:
    bound = np.sqrt(6 / max(fan_in + fan_out, 1))
    return g.uniform(-bound, bound, shape)


def _orthogonal(g: np.random.Generator, rows: int, columns: int) -> Array:
    """Draw a matrix uniformly from all with orthonormal columns, or rows if these are fewer."""
    q, r = np.linalg.qr(g.standard_normal((max(rows, columns), min(rows, columns))))
    q = q * np.copysign(1, np.diagonal(r))
    return q.T if rows < columns else q  # type: ignore[no-any-return]


def _initial_weights(g: np.random.Generator, inputs: int, fed_back: int, hidden: int, gates: int) -> Array:
    """Draw a matrix [inputs + fed_back, gates * hidden]: Glorot uniform for x and orthogonal for h, gate by gate."""
    columns = [
        np.concatenate([_glorot(g, inputs, hidden, (inputs, hidden)), _orthogonal(g, fed_back, hidden)])
        for _ in range(gates)
    ]
    return np.concatenate(columns, axis=1)


def _rounded(weights: dict[str, Array], dtype: np.dtype[Any]) -> dict[str, Array]:
    with np.errstate(under="ignore"):  # weights that are too small for float16 may become 0
        return {name: array.astype(dtype) for name, array in weights.items()}
