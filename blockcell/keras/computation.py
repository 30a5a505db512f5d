"""What an LSTM, GRU or SimpleRNN of Keras computes, forward and backward, of numpy arrays.

Arrays are Keras': x and y are batch first, weights are kernel [I,nH], recurrent kernel [H,nH] and perhaps bias, states
are h and, of an LSTM, c.  The inputs of a call are a flat list, as backends take it: x, states, weights, and a mask
[B,T] if there is one.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..gates import ORDERS, reorder
from ..layers import GRU, LSTM, RNN
from ..layers.shared import GRUState, LSTMState, RNNState
from ..layers.tape import Tape
from ..optable import Array

_LAYERS: dict[str, Any] = {"LSTM": LSTM, "GRU": GRU, "RNN": RNN}
_STATES: dict[str, Any] = {"LSTM": LSTMState, "GRU": GRUState, "RNN": RNNState}  # with h last; Keras has it first


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
    begins_with_state : bool
        Whether y is the initial h, and not zero, at masked steps before a row's first other step.
    """

    _numbers = itertools.count()  # one for each computation

    def __init__(
        self, kind: str, options: dict[str, Any], weight_count: int, returns_sequences: bool, zero_masked: bool,
        begins_with_state: bool = False,
    ) -> None:  # fmt: skip
        self.kind, self.options, self.weight_count = kind, dict(options), weight_count
        self.returns_sequences, self.masked = returns_sequences, "zero" if zero_masked else "repeat"
        self.begins_with_state = begins_with_state and not zero_masked
        self.state_count = len(_STATES[kind]._fields)
        self.number = next(Computation._numbers)
        if kind == "LSTM":
            self.options |= {"gate_order": ORDERS["Keras LSTM"]}
        self._layer: tuple[Sequence[Array], Any] = (), None
        self._training_layer: Any = None  # whose weights are replaced at each call, which holds the lock
        self._lock = threading.Lock()
        self._kept: tuple[int, Any] = 0, None
        self._tokens = itertools.count(1)

    def result_shapes(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the shapes of y and the last states; a backend may not know all sizes yet."""
        x, *states = inputs[: 1 + self.state_count]
        return [(*x.shape[: 1 + self.returns_sequences], states[0].shape[-1]), *(state.shape for state in states)]

    def forward(self, inputs: Sequence[Array], training: bool) -> tuple[list[Array], Tape | None]:
        """Return y and the last states, and in training the tape."""
        x, *others = inputs
        states, others = others[: self.state_count], others[self.state_count :]
        weights, mask = others[: self.weight_count], others[self.weight_count :]
        options: dict[str, Any] = {"batch_first": True}
        if mask:
            options |= {"mask": mask[0], "masked": self.masked}
        state, tape = _STATES[self.kind](*reversed(states)), None
        if training:
            with self._lock:
                y, last, tape = self._train(weights).forward(x, state, **options)
        else:
            y, last = self._layer_of(weights)(x, state, **options)
        if mask and self.begins_with_state:
            np.copyto(y, states[0][:, None], where=~np.logical_or.accumulate(mask[0], axis=1)[:, :, None])
        return [y if self.returns_sequences else y[:, -1], *reversed(last)], tape

    def backward(self, tape: Tape, d_results: Sequence[Array]) -> list[Array]:
        """Return the gradients to x, the initial states and the weights, from those to y and the last states."""
        d_y, *d_last = d_results
        if not self.returns_sequences:
            whole = np.zeros((tape.B, tape.T, d_y.shape[-1]), d_y.dtype)
            whole[:, -1] = d_y
            d_y = whole
        layer: Any = tape.layer
        d_x, d_first, grads = layer.backward(tape, d_y, _STATES[self.kind](*reversed(d_last)))
        if tape.counted is not None and self.begins_with_state:
            is_before = ~np.logical_or.accumulate(tape.counted.mask.T, axis=1)
            np.add(d_first.h, (d_y * is_before[:, :, None]).sum(axis=1), out=d_first.h)
        return [d_x, *reversed(d_first), *self._keras_grads(grads, d_x.shape[-1])[: self.weight_count]]

    def forward_with_token(self, inputs: Sequence[Array], training: bool) -> list[Array]:
        """Return a token [], y and the last states: the token tells `backward_of_token` which tape is meant."""
        results, tape = self.forward(inputs, training)
        token = next(self._tokens)
        if tape is not None:
            self._kept = token, tape
        return [np.asarray(token, np.int64), *results]

    def backward_of_token(self, token: int, inputs: Sequence[Array], d_results: Sequence[Array]) -> list[Array]:
        """Return what `backward` does.

        Only the last tape is kept, because nobody tells whether a gradient will be asked for.  An earlier one, as of a
        layer that is called twice, or of a call outside of training, is computed again.
        """
        kept, tape = self._kept
        if kept == token:
            self._kept = 0, None  # which frees the tape's arrays
        else:
            tape = self.forward(inputs, True)[1]
        return self.backward(tape, d_results)

    def _layer_of(self, weights: Sequence[Array]) -> Any:
        """Return a layer with these weights, the last one if they are the same."""
        known, layer = self._layer
        if len(known) == len(weights) and all(map(np.array_equal, known, weights)):
            return layer
        layer = self._new_layer(weights)
        self._layer = [weight.copy() for weight in weights], layer
        return layer

    def _train(self, weights: Sequence[Array]) -> Any:
        """Return the layer for training with these weights, others at each step: a new layer would take three times."""
        if self._training_layer is None:
            self._training_layer = self._new_layer(weights)
        else:
            self._training_layer.set_weights(**self._convert(weights))
        return self._training_layer

    def _new_layer(self, weights: Sequence[Array]) -> Any:
        return _LAYERS[self.kind](**self._convert(weights), **self.options)

    def _convert(self, weights: Sequence[Array]) -> dict[str, Array]:
        """Return Keras' weights as those of the layer, by name."""
        kernel, recurrent, *biases = weights
        w, hidden = np.concatenate([kernel, recurrent]), len(recurrent)
        b: Any = biases[0] if biases else np.zeros(w.shape[1], w.dtype)
        if self.kind != "GRU":
            return {"w": w, "b": b}
        w, b = (reorder(array, ORDERS["Keras GRU"], ORDERS["GRU"]) for array in (w, b))
        b, b_h = b if b.ndim == 2 else (b, np.zeros_like(b))
        gates, candidate = slice(2 * hidden), slice(2 * hidden, None)
        arrays = {"w_ru": w[:, gates], "w_c": w[:, candidate], "b_ru": b[gates] + b_h[gates], "b_c": b[candidate]}
        return arrays | ({"b_hc": b_h[candidate]} if self.options["reset_after"] else {})

    def _keras_grads(self, grads: dict[str, Array], input_size: int) -> list[Array]:
        """Return the gradients to kernel, recurrent kernel and bias; both biases of a GRU in one array, as Keras."""
        if self.kind != "GRU":
            w, b = grads["w"], grads["b"]
        else:
            w, b = (np.concatenate([grads[f"{name}_ru"], grads[f"{name}_c"]], axis=-1) for name in "wb")
            if self.options["reset_after"]:
                b = np.stack([b, np.concatenate([grads["b_ru"], grads["b_hc"]])])
            w, b = (reorder(array, ORDERS["GRU"], ORDERS["Keras GRU"]) for array in (w, b))
        return [w[:input_size], w[input_size:], b]
