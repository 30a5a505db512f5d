"""`explain_arguments`, a decorator: TypeErrors about arguments that PyTorch, Keras and TensorFlow call otherwise."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
OWN = "self", "cls"

RENAMED = {
    "backward_layer": "bw",
    "beta_1": "beta1",
    "beta_2": "beta2",
    "clip_norm": "max_norm",
    "eps": "epsilon",
    "forward_layer": "fw",
    "go_backwards": "reverse",
    "gradients": "grads",
    "in_features": "input_size",
    "input_dim": "input_size",
    "lr": "learning_rate",
    "nonlinearity": "activation",
    "num_proj": "proj_size",
    "num_units": "hidden_size",
    "out_features": "output_size",
    "params": "weights",
    "random_state": "seed",
    "units": "hidden_size output_size",
    "use_peepholes": "use_peephole",
    "w_p": "proj_size",
    "wcf": "use_peephole",
    "wci": "use_peephole",
    "wco": "use_peephole",
}
"""Our names of an argument, by another library's, and what ``init`` has in place of weights."""

ADVICE = {
    "batch_first": "batch_first in calls: layer(x, batch_first=True)",
    "betas": "beta1 and beta2",
    "bias": "b, which may be zeros",
    "bidirectional": "Bidirectional(fw, bw), of two layers",
    "dropout": "dropout of your own, on x",
    "num_layers": "Stack([first, second]), of as many layers",
    "recurrent_dropout": "dropout of your own, on x",
    "return_sequences": "y[-1], or Dense.init(..., last=True) above, for the last step: y has all steps",
    "return_state": "(y, state), which every call returns",
    "stateful": "layer(x, state), or layer.stream()",
    "time_major": "batch_first in calls: layer(x, batch_first=True)",
    "use_bias": "b, which may be zeros",
}
"""What to use in place of an argument that no function here has."""


def explain_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Make the function's TypeErrors about unknown, missing and superfluous arguments say what it expects.

    It may be a function, a constructor, or the class method ``init`` of a class with a constructor that takes weights.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except TypeError:
            if message := _explanation(function, args, kwargs):
                raise TypeError(message) from None
            raise

    return call


def _explanation(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Return what is wrong with the arguments and what is expected; "" if they fit the function."""
    signature = inspect.signature(function)
    try:
        signature.bind(*args, **kwargs)
        return ""
    except TypeError as error:
        problem = str(error)
    caller = function.__qualname__.removesuffix(".__init__")
    names = [name for name in signature.parameters if name not in OWN]
    unknown = next((name for name in kwargs if name not in names), None)
    if unknown is not None:
        return f"{caller}: there is no argument {unknown}; expected {_in_place_of(unknown, names, function)}"
    form = "Stack([first, second])" if caller == "Stack" else f"{caller}({_usual_arguments(function)})"
    advice = ""
    if (other := _counterpart(function)) is not None and other.__name__ == "init":
        advice = f"; for new weights: {caller}.init({_usual_arguments(other)})"
    return f"{caller}: {problem}; expected {form}{advice}"


def _usual_arguments(function: Callable[..., Any]) -> str:
    """Return the names of the arguments that a call passes by position, and of those that it must name."""
    parameters = [value for name, value in inspect.signature(function).parameters.items() if name not in OWN]
    positional = [value.name for value in parameters if value.kind is value.POSITIONAL_OR_KEYWORD]
    named = [value for value in parameters if value.kind is value.KEYWORD_ONLY and value.default is value.empty]
    return ", ".join([*positional, *(f"{value.name}=..." for value in named)])


def _in_place_of(unknown: str, names: list[str], function: Callable[..., Any]) -> str:
    """Return what to use in place of an argument that the function does not have, but these."""
    other = _counterpart(function)
    for renamed in RENAMED.get(unknown, unknown).split():
        if renamed in names:
            return renamed
        if other is not None and renamed in inspect.signature(other).parameters:
            does = "makes new weights" if other.__name__ == "init" else "takes weights"
            return f"{other.__qualname__.removesuffix('.__init__')}({renamed}=...), which {does}"
    if unknown in ADVICE:
        return ADVICE[unknown]
    return ", ".join(get_close_matches(unknown, names, 1) or names)


def _counterpart(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return ``init`` of a constructor's class, and the constructor of an ``init``'s; None of other functions."""
    kind = function.__globals__.get(function.__qualname__.partition(".")[0])
    names = {"__init__": "init", "init": "__init__"}
    return getattr(kind, names[function.__name__], None) if isinstance(kind, type) else None
