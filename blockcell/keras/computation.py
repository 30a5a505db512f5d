"""What an LSTM, GRU or SimpleRNN of Keras computes, forward and backward, of numpy arrays.

Arrays are Keras': x and y are batch first, weights are kernel [I,nH], recurrent kernel [H,nH] and perhaps bias, states
are h and, of an LSTM, c.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..convert.shared import make_cell
from ..gates import ORDERS, reorder
from ..layers.tape import Tape
from ..optable import Array

STATES = {"LSTM": ("h", "cs"), "GRU": ("h",), "RNN": ("h",)}
"""The names of a layer's state, in Keras' order."""


class Computation:
    """A layer's forward and backward pass.

    Parameters
    ----------
    kind : {"LSTM", "GRU", "RNN"}
    options : dict
        Those of the layer of blockcell: activations, ``reset_after``.
    weight_count : int
        2, or 3 with a bias.
    returns_sequences : bool
        Whether y is [B,T,H], or [B,H] of the last step.
    zero_masked : bool
        Whether y is zero at masked steps, or what it was before.
    """

    def __init__(
        self, kind: str, options: dict[str, Any], weight_count: int, returns_sequences: bool, zero_masked: bool
    ) -> None:
        self.kind, self.options, self.weight_count = kind, options, weight_count
        self.returns_sequences, self.masked = returns_sequences, "zero" if zero_masked else "repeat"
        self.state_count = len(STATES[kind])
        self._layer: tuple[Sequence[Array], Any] = (), None
        self._kept: tuple[int, Tape | None] = 0, None
        self._tokens = itertools.count(1)

    def y_shape(self, x: Any, hidden: int) -> tuple[Any, ...]:
        """Return the shape of y for an x [B,T,I], of which a backend may not know all sizes yet."""
        return (*x.shape[: 1 + self.returns_sequences], hidden)

    def forward(
        self, x: Array, mask: Array | None, states: Sequence[Array], weights: Sequence[Array], training: bool
    ) -> tuple[list[Array], Tape | None]:
        """Return y and the last states, and in training the tape."""
        layer = self._layer_of(weights)
        named_states = dict(zip(STATES[self.kind], states, strict=True))
        options: dict[str, Any] = {"batch_first": True}
        if mask is not None:
            options |= {"mask": mask, "masked": self.masked}
        y, last, *tape = (layer.forward if training else layer)(x, named_states, **options)
        if not self.returns_sequences:
            y = y[:, -1]
        return [y, *(getattr(last, name) for name in STATES[self.kind])], tape[0] if tape else None

    def backward(self, tape: Tape, d_results: Sequence[Array]) -> list[Array]:
        """Return the gradients to x, the initial states and the weights, from those to y and the last states."""
        d_y, *d_states = d_results
        if not self.returns_sequences:
            whole = np.zeros((tape.B, tape.T, d_y.shape[-1]), d_y.dtype)
            whole[:, -1:] = d_y[:, None]
            d_y = whole
        layer: Any = tape.layer
        d_x, d_first, grads = layer.backward(tape, d_y, dict(zip(STATES[self.kind], d_states, strict=True)))
        d_weights = self._keras_grads(grads, d_x.shape[-1])
        return [d_x, *(getattr(d_first, name) for name in STATES[self.kind]), *d_weights[: self.weight_count]]

    def forward_with_token(
        self, x: Array, mask: Array | None, states: Sequence[Array], weights: Sequence[Array], training: bool
    ) -> list[Array]:
        """Return a token [], y and the last states: the token tells `backward_of_token` which tape is meant."""
        results, tape = self.forward(x, mask, states, weights, training)
        token = 0
        if tape is not None:
            token = next(self._tokens)
            self._kept = token, tape
        return [np.asarray(token, np.int64), *results]

    def backward_of_token(
        self,
        token: int,
        x: Array,
        mask: Array | None,
        states: Sequence[Array],
        weights: Sequence[Array],
        d_results: Sequence[Array],
    ) -> list[Array]:
        """Return what `backward` does.

        Only the last tape is kept, because nobody tells whether a gradient will be asked for.  An earlier one, as of a
        layer that is called twice, is computed again.
        """
        kept, tape = self._kept
        if kept == token:
            self._kept = 0, None  # which frees the tape's arrays
        else:
            tape = self.forward(x, mask, states, weights, True)[1]
        assert tape is not None
        return self.backward(tape, d_results)

    def _layer_of(self, weights: Sequence[Array]) -> Any:
        """Return a layer with these weights, the last one if they are the same."""
        known, layer = self._layer
        if len(known) == len(weights) and all(map(np.array_equal, known, weights)):
            return layer
        known = [weight.copy() for weight in weights]
        kernel, recurrent, *biases = known
        bias: Any = biases[0] if biases else np.zeros(recurrent.shape[1], recurrent.dtype)
        both = (bias, None) if bias.ndim == 1 else bias
        layer = make_cell(f"Keras {self.kind}", kernel, recurrent, *both, **self.options)
        self._layer = known, layer
        return layer

    def _keras_grads(self, grads: dict[str, Array], input_size: int) -> list[Array]:
        """Return the gradients to kernel, recurrent kernel and bias; both biases of a GRU in one array, as Keras."""
        if self.kind == "GRU":
            w, b = (np.concatenate([grads[f"{name}_ru"], grads[f"{name}_c"]], axis=-1) for name in "wb")
            if self.options["reset_after"]:
                b = np.stack([b, np.concatenate([grads["b_ru"], grads["b_hc"]])])
        else:
            w, b = grads["w"], grads["b"]
        w, b = (reorder(array, ORDERS[self.kind], ORDERS[f"Keras {self.kind}"]) for array in (w, b))
        return [w[:input_size], w[input_size:], b]
