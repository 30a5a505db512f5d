"""The dense layer: `Dense`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from .._layers import DenseRunner
from .._stream import Stream
from ..argument_reader import ArgumentReader
from ..errors import short
from ..misnamed_arguments import explain_arguments
from ..optable import ACTIVATIONS, DENSE_WEIGHTS, LAYER_OPTIONS, Array
from .layer import Layer, Leaf
from .lstm_gru import _glorot, _read_sizes, _rounded
from .shared import Directions, NoState


class Dense(Leaf[tuple[()]]):
    """A dense layer: the same product and activation for each step of each row, or for each row's last step alone.

    .. code-block:: text

        y = activation(x @ w + b)

    It has no state: where a call takes or returns one, it is the empty tuple. `reset` changes nothing. In a `Stack` it
    may stand anywhere, and with `last` at the end, as the head of a classifier:

    .. code-block:: python

        Stack([LSTM.init(8, 64), Dense.init(64, 10, last=True)])

    Parameters
    ----------
    w : array_like (I, O)
        Weights: a row for each input, a column for each output.
    b : array_like (O,)
        Bias.
    activation : {None, "sigmoid", "tanh", "relu", "softmax"}
        What is done with ``x @ w + b``. `blockcell.loss.softmax_cross_entropy` takes logits, that is None.
    last : bool or "ends"
        Whether y is (B, O), from each row's last step alone, that before its length. A stream gives the answer after
        each step. "ends", for the end of a `Stack`: from the step at which each direction of the layer below ends,
        which is the row's first one for a backward direction. That is what the Bidirectional of Keras hands on without
        ``return_sequences``. Of a row without steps it reads zeros, as in Keras and ONNX: y is ``activation(b)``,
        whatever the state below, and the row's gradient adds to that of b alone. Dense layers between the cells and
        this one take part: they make ``activation(b)`` of such a row, too, and this one reads that.

    Raises
    ------
    TypeError
        The arrays are not all of one dtype of float32, float64 and float16, or an argument is of the wrong kind.
    ValueError
        Shapes do not agree, or the activation or `last` is unknown.
    """

    _kernel = "dense"
    _state = NoState
    _options = LAYER_OPTIONS["Dense"]
    _repr_attributes = "input_size", "output_size", "dtype"
    _tensors = DENSE_WEIGHTS
    _below: list[tuple[int, bool | None]] | None = None
    activation: str | None
    last: bool | str
    """Whether y is from each row's last step alone, or "ends", from the step at which each direction below ends."""

    @explain_arguments
    def __init__(
        self,
        w: ArrayLike,
        b: ArrayLike,
        activation: str | None = None,
        *,
        last: bool | str = False,
    ) -> None:
        reader = ArgumentReader(type(self).__name__)
        if activation is not None and (not isinstance(activation, str) or activation not in ACTIVATIONS):
            error = ValueError if isinstance(activation, str) else TypeError
            expected = ", ".join(map(repr, ACTIVATIONS))
            raise error(f"{reader.caller}: activation is {short(activation)}; expected one of {expected}")
        if isinstance(last, str) and last != "ends":
            raise ValueError(f"{reader.caller}: last is {short(last)}; expected True, False or 'ends'")
        last = last if isinstance(last, str) else reader.switch("last", last)
        self._set_options(activation=activation, last=last)
        self._initialize({"w": w, "b": b})

    def _new_runner(self) -> DenseRunner:
        return DenseRunner(self)

    @classmethod
    @explain_arguments
    def init(
        cls,
        input_size: SupportsIndex,
        output_size: SupportsIndex,
        *,
        seed: Any = None,
        dtype: DTypeLike = np.float32,
        activation: str | None = None,
        last: bool | str = False,
    ) -> Self:
        """Make a layer with initial weights, the same ones for the same seed.

        w is Glorot uniform and b is 0, as in Keras.

        Parameters
        ----------
        input_size, output_size : int
            I and O.
        seed : int, sequence of int or numpy.random.Generator, optional
            Passed to `numpy.random.default_rng`; None, for other weights each time, takes a seed from the system.
        dtype : float32, float64 or float16
        activation, last
            As in the constructor.
        """
        reader = ArgumentReader(f"{cls.__name__}.init")
        I, O, dtype = _read_sizes(reader, input_size, output_size, dtype, "output_size")  # noqa: E741
        w = _glorot(np.random.default_rng(seed), I, O, (I, O))
        return cls(**_rounded({"w": w, "b": np.zeros(O)}, dtype), activation=activation, last=last)

    @property
    def hidden_size(self) -> int:
        """O, the number of outputs."""
        return self._sizes["O"]

    @property
    def output_size(self) -> int:
        """O, the last dimension of y."""
        return self._sizes["O"]

    @property
    def _over_time(self) -> bool:
        return not self.last

    def _description(self) -> dict[str, Any]:
        return super()._description() | {"type": "Dense"}

    def _sizes_of(self, arrays: Mapping[str, Array], message: str) -> dict[str, int]:
        return dict(zip("IO", arrays["w"].shape, strict=True))

    # ----------------------------------------------------------------------------------------------- the layer below it
    def _set_layer_below(self, layer: Layer | None) -> None:
        """Learn where the directions of the layer below end, if that matters."""
        if self.last == "ends":
            if layer is None:
                raise ValueError("Stack: 0 has last='ends'; expected a layer below it, whose directions end somewhere")
            self._below = layer._directions(False)
            if any(backwards is None for _, backwards in self._below):
                message = "Stack: last='ends' above a Dense, whose outputs have no direction"
                raise ValueError(f"{message}; expected a layer with one")

    def _head_leaves(self) -> tuple[list[Leaf], bool]:
        return [self], True

    def _directions(self, reverse: bool) -> Directions:
        return [(self.output_size, None)]

    def _directions_of_x(self) -> Directions:
        """Return how many columns of x are of each direction of the layer below, and whether it runs backwards."""
        if self.last != "ends":
            return [(self.input_size, False)]
        if self._below is None:
            raise TypeError(
                f"{type(self).__name__}: last is 'ends', but there is no layer below; expected a Stack with both"
            )
        return self._below

    def stream(self, batch: SupportsIndex = 1) -> Stream[tuple[()]]:
        if any(backwards for _, backwards in self._directions_of_x()):
            raise TypeError(f"{type(self).__name__}.stream: a direction of the layer below begins at the last step")
        return super().stream(batch)

    # ---------------------------------------------------------------------------------------------------------- kernels
    def _kernel_options(self) -> tuple[int, ...]:
        return (ACTIVATIONS.index(self.activation),)
