"""`explain_arguments`, a decorator: TypeErrors about arguments that PyTorch, Keras and TensorFlow call otherwise."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from difflib import get_close_matches
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

REPLACEMENTS = {
    **dict.fromkeys(("dtype", "hidden_size", "input_size", "output_size", "seed"), "init, which makes new weights"),
    **dict.fromkeys(("b", "b_c", "b_hc", "b_ru", "w", "w_c", "w_ru"), "the constructor, which takes weights"),
    **dict.fromkeys(("bias", "use_bias"), "b, which may be zeros"),
    **dict.fromkeys(("batch_first", "time_major"), "batch_first in calls: layer(x, batch_first=True)"),
    **dict.fromkeys(("dropout", "recurrent_dropout"), "dropout of your own, on x"),
    **dict.fromkeys(("num_proj", "proj_size", "w_p"), "w_p in the constructor, proj_size in init"),
    **dict.fromkeys(("num_units", "units"), "hidden_size in init, or output_size of a Dense"),
    **dict.fromkeys(("use_peephole", "use_peepholes"), "wci, wcf and wco in the constructor, use_peephole in init"),
    **dict.fromkeys(("wcf", "wci", "wco"), "use_peephole in init"),
    "backward_layer": "bw",
    "beta_1": "beta1",
    "beta_2": "beta2",
    "betas": "beta1 and beta2",
    "bidirectional": "Bidirectional(fw, bw), of two layers",
    "clip_norm": "max_norm",
    "eps": "epsilon",
    "forward_layer": "fw",
    "go_backwards": "reverse",
    "gradients": "grads",
    "in_features": "input_size in init",
    "input_dim": "input_size in init",
    "lr": "learning_rate",
    "nonlinearity": "activation",
    "num_layers": "Stack([first, second]), of as many layers",
    "out_features": "output_size in init",
    "params": "weights",
    "random_state": "seed in init",
    "return_sequences": "y[-1], or Dense.init(..., last=True) above, for the last step: y has all steps",
    "return_state": "(y, state), which every call returns",
    "stateful": "layer(x, state), or layer.stream()",
}
"""What to use in place of an argument that a function does not have: other libraries' names, and some of our own."""


def explain_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function's TypeErrors about arguments that it does not have say what to use in their place."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except TypeError:
            names = [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]
            for name in kwargs:
                if name not in names:
                    expected = REPLACEMENTS.get(name) or ", ".join(get_close_matches(name, names, 1) or names)
                    caller = function.__qualname__.removesuffix(".__init__")
                    raise TypeError(f"{caller}: there is no argument {name}; expected {expected}") from None
            raise

    return call
