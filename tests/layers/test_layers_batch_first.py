"""`batch_first=True` changes where arrays have their axes: what it costs, and what messages say.

`test_guards.py` and `test_stateful.py` say that it changes no bit, of calls, of gradients and of any threads."""

from __future__ import annotations

import numpy as np
import pytest
from layer_cases import LAYERS
from refusals import refusal
from traced import peak

from blockcell import GRU, LSTM, LSTMState, Stack


@pytest.mark.parametrize("name", ["lstm", "gru", "bidirectional lstm"])
def test_nothing_is_copied(name):
    """A call allocates as much as the same one time first, but a little; so does one of x with gaps between rows."""
    layer = LAYERS[name](256, 8, np.float32)
    wide = np.zeros((100, 64, 512), np.float32)
    most = {}
    for form, x, options in (
        ("time first", wide[:, :, :256].copy(), {}),
        ("batch first", wide.reshape(64, 100, 512)[:, :, :256].copy(), {"batch_first": True}),
        ("with gaps", wide[:, :, :256], {}),
        ("backwards", wide[::-1, :, :256], {}),
    ):
        layer(x, **options)
        _, most[form] = peak(lambda x=x, options=options: layer(x, **options))
    for form, size in most.items():
        assert size < most["time first"] + 0.05 * x.nbytes, (form, most)


# -------------------------------------------------------------------------------------------------------------- errors
def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


TIME_FIRST = "; x is [T, B, I], time first; for [B, T, I] pass batch_first=True"
BATCH_FIRST = "; x is [B, T, I], as batch_first=True says; for [T, B, I] leave that out"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lengths": [1] * 4}, f"lengths has shape (4,); expected (B,) = (20,) with B from x{TIME_FIRST}"),
        ({"lengths": [1] * 5}, "lengths has shape (5,); expected (B,) = (20,) with B from x"),
        (
            {"reset": ones(20, 4, dtype=bool)},
            f"reset has shape (20, 4); expected (T, B) = (4, 20) with both from x{TIME_FIRST}",
        ),
        (
            {"state": (None, LSTMState(ones(20, 5), ones(4, 5)))},
            f"state.1.h has shape (4, 5); expected (B, H) = (20, 5) with B from x, H from the layer{TIME_FIRST}",
        ),
        ({"x": ones(4, 20, 2)}, "x has shape (4, 20, 2); expected (T, B, I) with I=3 from the layer"),
        (
            {"x": ones(4, 20, 2), "batch_first": True},
            "x has shape (4, 20, 2); expected (B, T, I) with I=3 from the layer",
        ),
        (
            {"batch_first": True, "lengths": [1] * 20},
            f"lengths has shape (20,); expected (B,) = (4,) with B from x{BATCH_FIRST}",
        ),
        (
            {"batch_first": True, "mask": ones(20, 4, dtype=bool)},
            f"mask has shape (20, 4); expected (B, T) = (4, 20) with both from x{BATCH_FIRST}",
        ),
        (
            {"batch_first": True, "state": (GRU.init(3, 5, seed=0)(ones(1, 20, 3))[1], None)},
            f"state.0.h has shape (20, 5); expected (B, H) = (4, 5) with B from x, H from the layer{BATCH_FIRST}",
        ),
    ],
)
def test_messages_say_where_the_axes_are(given, message):
    layer = Stack([GRU.init(3, 5, seed=0), LSTM.init(5, 5, seed=1)])
    for call in (layer, layer.forward):
        with refusal(f"ValueError: {message}", "Stack"):
            call(**{"x": ones(4, 20, 3)} | given)


def test_refused():
    layer = LSTM.init(3, 2, seed=0)
    for call in (layer, layer.forward):
        for value in (1, "yes", None):
            with pytest.raises(TypeError, match=r"LSTM: batch_first is .*; expected True or False"):
                call(ones(4, 20, 3), batch_first=value)
    x = ones(4, 20, 3)
    (y, _, rows_first), (_, _, steps_first) = (layer.forward(x, batch_first=first) for first in (True, False))
    for tape, d_y, options, said in (
        (rows_first, y, {"batch_first": False}, "ValueError: batch_first is False; expected True, which forward had f"),
        (steps_first, y, {"batch_first": True}, "ValueError: batch_first is True; expected False, which forward had f"),
        (rows_first, y, {"batch_first": 0}, "TypeError: LSTM: batch_first is 0; expected True or False"),
        (rows_first, y.swapaxes(0, 1), {}, f"ValueError: expected (4, 20, 2), that of y{BATCH_FIRST}"),
        (steps_first, y.swapaxes(0, 1), {}, f"ValueError: {TIME_FIRST}"),
    ):
        with refusal(said):
            layer.backward(tape, d_y, **options)
