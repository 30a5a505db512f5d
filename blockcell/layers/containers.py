"""Layers that consist of others: `Bidirectional` and `Stack`, and the stream of a stack."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, NoReturn, Self, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike

from .. import _stream
from .._layers import BidirectionalRunner, StackRunner
from ..argument_reader import ArgumentReader
from ..errors import short
from ..misnamed_arguments import explain_arguments
from ..optable import Array
from .arguments import CallReader, read_parts
from .cell import Cell
from .dense import Dense
from .layer import Layer, Leaf
from .quantized import Quantized
from .shared import Directions, GivenState, S_bw_co, S_co, SharedWeights, State


class Composite(Layer[S_co]):
    """A layer that consists of copies of other layers."""

    _layers: dict[str, Layer]

    def _initialize(self, layers: dict[str, Any]) -> None:
        """Copy the layers; from now on their weights are replaced together."""
        caller = type(self).__name__
        for name, layer in layers.items():
            if not isinstance(layer, Layer):
                raise TypeError(f"{caller}: {name} is {short(layer)}; expected a layer")
        self._layers = {name: copy.copy(layer) for name, layer in layers.items()}
        first, *rest = self._layers
        for name in rest:
            if self._layers[name].dtype != self.dtype:
                expected = f"expected {self.dtype}, that of {first}"
                raise TypeError(f"{caller}: {name} has dtype {self._layers[name].dtype}; {expected}")
        shared = SharedWeights({})
        for layer in self._layers.values():
            shared.weights |= layer._shared.weights
        self._share(shared)

    def _without_weights(self) -> Self:
        layer = object.__new__(type(self))
        layer._layers = {name: part._without_weights() for name, part in self._layers.items()}
        layer._runner = layer._new_runner()
        return layer

    def _share(self, shared: SharedWeights) -> None:
        self._shared = shared
        for layer in self._layers.values():
            layer._share(shared)

    @property
    def _is_stateless(self) -> bool:
        return len(self._stateless_parts()) == len(self._layers)

    def _stateless_parts(self) -> list[str]:
        """Return the names of the layers that have no state."""
        return [name for name, layer in self._layers.items() if layer._is_stateless]

    def _leaves(self, prefix: str = "") -> dict[str, Leaf]:
        leaves: dict[str, Leaf] = {}
        for name, layer in self._layers.items():
            leaves |= layer._leaves(f"{prefix}{name}.")
        return leaves

    @property
    def dtype(self) -> np.dtype[Any]:
        return next(iter(self._layers.values())).dtype

    def _read_state(self, reader: ArgumentReader, name: str, state: State, B: int, source: str = "x") -> State:
        return tuple(
            layer._read_state(reader, part, value, B, source)
            for layer, (part, value) in zip(
                self._layers.values(), self._parts_of(reader, name, state).items(), strict=True
            )
        )

    def _read_reset_state(self, reader: CallReader, name: str, state: State) -> State:
        parts = self._parts_of(reader, name, state).items()
        return tuple(
            layer._read_reset_state(reader, part, value)
            for layer, (part, value) in zip(self._layers.values(), parts, strict=True)
        )

    def _new_reset_state(self, T: int, B: int) -> State:
        return tuple(layer._new_reset_state(T, B) for layer in self._layers.values())

    def _parts_of(self, reader: ArgumentReader, name: str, state: State) -> dict[str, Any]:
        """Return the states of its layers, by the names that messages use."""
        return read_parts(reader, name, state, self._layers, f"({', '.join(self._layers)})", self._stateless_parts())


class Bidirectional(Composite[tuple[S_co, S_bw_co]]):
    """Two layers side by side; the second one runs from the last step to the first.

    Parameters
    ----------
    fw, bw : Layer
        The layers of the forward and the backward direction, of the same dtype, input size and output size; they are
        copied. In y, the output of `fw` comes before that of `bw`; the state is a tuple (fw, bw).

    Raises
    ------
    TypeError
        An argument is not a layer, or the dtypes differ.
    ValueError
        The sizes differ, or a layer has ``reverse=True``, or `last`.
    """

    @explain_arguments
    def __init__(self, fw: Layer[S_co], bw: Layer[S_bw_co]) -> None:
        self._initialize({"fw": fw, "bw": bw})
        for name, layer in self._layers.items():
            if isinstance(layer, Cell) and layer.reverse:
                raise ValueError(
                    f"{type(self).__name__}: {name} has reverse=True; expected False, as bw is run backwards anyway"
                )
            if not layer._over_time:
                message = f"{type(self).__name__}: {name} gives only the last step; expected all of them"
                raise ValueError(f"{message}: put the Dense above, in a Stack")
        for size in ("input_size", "output_size"):
            fw_size, bw_size = getattr(fw, size), getattr(bw, size)
            if bw_size != fw_size:
                raise ValueError(f"{type(self).__name__}: bw has {size} {bw_size}; expected {fw_size}, that of fw")
        self._runner = self._new_runner()

    def _new_runner(self) -> BidirectionalRunner:
        return BidirectionalRunner(self)

    @property
    def fw(self) -> Layer:
        """The layer of the forward direction."""
        return self._layers["fw"]

    @property
    def bw(self) -> Layer:
        """The layer of the backward direction."""
        return self._layers["bw"]

    @property
    def input_size(self) -> int:
        return self.fw.input_size

    @property
    def hidden_size(self) -> int:
        """H, the number of cells of the forward direction."""
        return self.fw.hidden_size

    @property
    def output_size(self) -> int:
        """The last dimension of y, twice that of each direction."""
        return 2 * self.fw.output_size

    def __repr__(self) -> str:
        return f"{type(self).__name__}(fw={self.fw!r}, bw={self.bw!r})"

    def _arguments(self) -> dict[str, Any]:
        return {"fw": self.fw, "bw": self.bw}

    def _description(self) -> dict[str, Any]:
        return {"type": "Bidirectional", "fw": self.fw._description(), "bw": self.bw._description()}

    def stream(self, batch: SupportsIndex = 1) -> NoReturn:
        raise TypeError(f"{type(self).__name__}.stream: backward begins at the last step; stream fw alone")

    def _read_reset_state(self, reader: CallReader, name: str, state: State) -> None:
        if state is not None:
            raise ValueError(f"{reader.caller}: {name} is of a Bidirectional; expected None, as bw starts at the end")

    def _new_reset_state(self, T: int, B: int) -> None:
        return None

    def _head_leaves(self) -> tuple[list[Leaf], bool]:
        fw, bw = self.fw._head_leaves(), self.bw._head_leaves()
        return fw[0] + bw[0], fw[1] or bw[1]

    def _directions(self, reverse: bool) -> Directions:
        return [*self.fw._directions(reverse), *self.bw._directions(not reverse)]


class Stack(Composite[tuple[Any, ...]]):
    """Layers on top of each other: the y of each is the x of the next.

    Parameters
    ----------
    layers : sequence of Layer
        At least one, from the input to the output, all of one dtype; they are copied. The state is a tuple of their
        states.

    Raises
    ------
    TypeError
        An element is not a layer, or the dtypes differ.
    ValueError
        There is none, the input size of one is not the output size of the one before it, or a `Dense` with `last` is
        not the last one.
    """

    @explain_arguments
    def __init__(self, layers: Iterable[Layer]) -> None:
        caller = type(self).__name__
        if not isinstance(layers, Iterable):
            raise TypeError(f"{caller}: layers is {short(layers)}; expected a sequence of layers")
        named = {str(k): layer for k, layer in enumerate(layers)}
        if not named:
            raise ValueError(f"{caller}: layers is empty; expected at least one layer")
        self._initialize(named)
        for k, (before, layer) in enumerate(pairwise(self.layers)):
            if layer.input_size != before.output_size:
                expected = f"expected {before.output_size}, the output_size of layer {k}"
                raise ValueError(f"{caller}: layer {k + 1} has input_size {layer.input_size}; {expected}")
            if not before._over_time:
                expected = "expected all steps, but for the last layer"
                raise ValueError(f"{caller}: layer {k} gives only the last step; {expected}")
        for k, layer in enumerate(self.layers):
            if isinstance(layer, Dense):
                layer._set_layer_below(self.layers[k - 1] if k else None)
        if not self._over_time:
            for layer in self._head_leaves()[0]:
                layer._in_head = True
        self._runner = self._new_runner()

    def _new_runner(self) -> StackRunner:
        return StackRunner(self)

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The layers, from the input to the output."""
        return tuple(self._layers.values())

    @property
    def input_size(self) -> int:
        return self.layers[0].input_size

    @property
    def hidden_size(self) -> int:
        """H, the number of cells of the last layer, or of its outputs."""
        return self.layers[-1].hidden_size

    @property
    def output_size(self) -> int:
        return self.layers[-1].output_size

    @property
    def _over_time(self) -> bool:
        return self.layers[-1]._over_time

    def _head_leaves(self) -> tuple[list[Leaf], bool]:
        leaves, passes_x = list[Leaf](), True
        for layer in reversed(self.layers):
            if passes_x:
                layer_leaves, passes_x = layer._head_leaves()
                leaves += layer_leaves
        return leaves, passes_x

    def _directions(self, reverse: bool) -> Directions:
        return self.layers[-1]._directions(reverse)

    def stream(self, batch: SupportsIndex = 1) -> StackStream:
        return StackStream(self, batch)

    def __repr__(self) -> str:
        return f"{type(self).__name__}([{', '.join(map(repr, self.layers))}])"

    def _arguments(self) -> dict[str, Any]:
        return {"layers": self.layers}

    def _description(self) -> dict[str, Any]:
        return {"type": "Stack", "layers": [layer._description() for layer in self.layers]}


class StackStream:
    """Runs a stack step by step and keeps the states in between, as a `Stream` does for a single layer.

    Made by `stack.stream(batch=1)`.

    Attributes
    ----------
    layer : Stack or Quantized
    batch : int
        B, the number of rows that run side by side.
    state : tuple
        Copies of the layers' states. Assigning sets them, from what calls take as `state`.
    """

    def __init__(self, layer: Stack, batch: SupportsIndex = 1) -> None:
        self.layer: Stack | Quantized = layer
        self._stack = layer
        self._parts: list[_stream.Stream | StackStream] = [part.stream(batch) for part in layer.layers]
        self._streams: tuple[_stream.Stream, ...] = tuple(
            stream for part in self._parts for stream in (part._streams if isinstance(part, StackStream) else (part,))
        )
        self._between = self._new_between(self.batch)
        self.refresh()  # the parts took their weights one after the other: now all at the same moment

    @property
    def batch(self) -> int:
        return self._streams[0].batch

    @property
    def _advances(self) -> int:
        return self._streams[0]._advances

    def _new_between(self, batch: int) -> tuple[Array, ...]:
        """Return memory for y of a step of each layer but the last."""
        return tuple([np.empty((batch, stream.layer.output_size), self.layer.dtype) for stream in self._streams[:-1]])

    def _grow(self, batch: int) -> None:
        """Have more rows, whose states are zero."""
        self._between = self._new_between(batch)  # first, as there must not be too little of it, whatever stops this
        _stream.grow(self._streams, batch)

    def step(self, x: ArrayLike, out: Array | None = None, *, rows: ArrayLike | None = None) -> Array:
        """Run one step, of all rows or of those given, as `Stream.step` does."""
        return _stream.advance(self._streams, self._between, x, out, 2, rows, None)

    def run(
        self,
        x: ArrayLike,
        out: Array | None = None,
        *,
        rows: ArrayLike | None = None,
        lengths: ArrayLike | None = None,
    ) -> Array:
        """Run T steps, as `Stream.run` does."""
        return _stream.advance(self._streams, self._between, x, out, 3, rows, lengths)

    def reset(self, rows: ArrayLike | None = None) -> None:
        """Set the states of all rows, or of those given, to zero, as `Stream.reset` does."""
        _stream.reset(self._streams, rows)

    def refresh(self) -> None:
        """Use the weights that the stack has now; the states stay."""
        _stream.refresh(self._streams, self._stack._shared.weights)

    @property
    def state(self) -> tuple[Any, ...]:
        return self.state_of(None)

    @state.setter
    def state(self, value: GivenState) -> None:
        self.set_state(None, value)

    def state_of(self, rows: ArrayLike | None) -> tuple[Any, ...]:
        """Return the states of some rows, a tuple of the layers' states, as `Stream.state_of` does."""
        return self._state_from(iter(_stream.copy_states(self._streams, rows)))

    def set_state(self, rows: ArrayLike | None, states: GivenState) -> None:
        """Set the states of some rows, of all layers at once, as `Stream.set_state` does."""
        _stream.set_states(self._streams, rows, self._state_arrays, states)

    def _state_arrays(self, value: Any, n: int) -> list[Array]:
        """Return the arrays of a user's state of n rows, for all streams in their order."""
        states = self._stack._parts_of(ArgumentReader("Stack.stream"), "state", value).values()
        return [
            array for part, value in zip(self._parts, states, strict=True) for array in part._state_arrays(value, n)
        ]

    def _state_from(self, arrays: Iterator[Array]) -> tuple[Any, ...]:
        """Return a state of the next arrays of an iterator."""
        return tuple([part._state_from(arrays) for part in self._parts])

    def _belong_to(self, quantized: Quantized) -> Self:
        self.layer = quantized
        return self

    def _in_use(self) -> Any:
        if self.layer is not self._stack:
            return self.layer
        return type(self._stack)([part._in_use() for part in self._parts])

    def __reduce__(self) -> tuple[Any, ...]:
        return _stream.restored, (self._in_use(), self.batch, self.state)

    def __repr__(self) -> str:
        return f"<Stream of {self.layer!r}, batch={self.batch}>"
