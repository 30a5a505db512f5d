"""The comparison of a converted layer with its source: both compute the same random inputs.

The sources are run elsewhere, each in the module of its kind. A run gives a `Crossing` for each converted layer: what
enters the layer in the model, and what leaves it. A comparison counts only if the layer's results depend on all of x,
so inputs that saturate the layer are drawn anew.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, count, islice
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..layers import Dense, Layer
from ..optable import Array
from .shared import ConversionError

NOT_COMPARED = "not compared with the model"
"""How remarks begin that say why a layer is not compared with its source."""
_SCALES = 1.0, 0.25, 3.0, 0.05  # of the inputs of one draw after the other, until the results depend on all of x
_SIZES = 5, 3, 7, 4, 11, 6, 13, 8, 17, 9, 19, 10  # of which the first ones that are no other size of the model
_LONG = 71  # steps, or a few more: a model may leave out what is behind a certain step
_FLOOR = 24.0  # Smallest bound, in eps of the largest entry, for I + H up to 256; as in `blockcell verify`.
_FLOOR_SIZE = 256
_ROUNDING_DRAWS = 3
_ROUNDING_FACTOR = 16.0  # as in blockcell.tensorflow: no right layer is off by more than 6 times the rounding errors
_HALF_FLOOR = 8.0  # in eps of float16
_VISIBLE = 8.0  # bounds by which a result must change if a part of x changes
_LARGEST_BOUND = 1e-2  # of the largest entry: within larger ones, almost any layer would seem right
_COLUMN_GROUPS = 16
_MOST_CHANGES = 20  # steps, and rows, that are changed one by one


class NotCompared(Exception):
    """The source cannot be compared with the layer; the message continues "because ..."."""

    @property
    def remark(self) -> str:
        """The text for the warning."""
        return f"{NOT_COMPARED}, because {self}"


class Outcome(NamedTuple):
    """What a comparison has to say, if it found no difference."""

    left_out: Sequence[str] = ()
    """Labels of what the source does to the arrays beside the layers."""
    remarks: Sequence[str] = ()


class Crossing(NamedTuple):
    """What enters and what leaves a converted layer when its source runs."""

    label: str
    """What the layer was converted from, for messages: "the model", or "LSTM 'encoder'"."""
    layer: Layer
    x: Array
    """In the layer's dtype, as the call takes it."""
    expected: Mapping[str, Array]
    """The arrays that leave, by the names that messages use."""
    read: Callable[[Array, Any], Mapping[str, Array]]
    """Returns arrays in the form of the expected ones, by the same names, from y and the last state of the call."""
    options: Mapping[str, Any] = {}
    """Further arguments of the call: `state`, `batch_first`, `lengths`, `mask`, `masked`."""
    eps: float | None = None
    """The relative rounding error of the source's arithmetic, if it is coarser than that of the layer's dtype."""

    def compute(self, x: Array, layer: Layer | None = None) -> Mapping[str, Array]:
        """Return what the layer gives for x, in the form of the expected arrays."""
        return self.read(*(layer or self.layer)(x, **self.options))


class Run(Protocol):
    """Runs a source on random inputs."""

    def __call__(self, T: int, B: int, seed: int, scale: float) -> Sequence[Crossing]:
        """Return what enters and leaves each converted layer, for B sequences of T steps.

        Equal arguments give equal inputs. Floating-point inputs are drawn from a normal distribution times `scale`.
        The function raises `NotCompared` if the source cannot take the inputs.
        """


class Sizes(NamedTuple):
    """T and B of one comparison."""

    T: int
    B: int
    is_long: bool = False
    """Whether T is large: then the results need not depend on all steps, and the source may refuse the sizes."""


def choose_sizes(T: int | None, B: int | None, others: Collection[int] = ()) -> list[Sizes]:
    """Choose T and B, which differ from each other and from the model's other sizes, unless the source fixes them."""
    free = (size for size in chain(_SIZES, count(max(_SIZES) + 1)) if size not in {T, B, *others})
    pairs = [tuple(islice(free, 2)) for _ in range(2)]
    sizes = [Sizes(T or steps, B or rows) for steps, rows in pairs]
    if T is None:
        steps = next(size for size in count(_LONG, 2) if size not in others)
        sizes.append(Sizes(steps, sizes[0].B, is_long=True))
    return list(dict.fromkeys(sizes))


def compare(caller: str, run: Run, sizes: Sequence[Sizes], passed_over: Collection[str] = ()) -> None:
    """Compare converted layers with their source, at each of the sizes, which `choose_sizes` returned.

    `run` runs the source, and `passed_over` is what the conversion took for something that does nothing, for messages.
    Raise a ConversionError if a layer computes something else than its source, and `NotCompared` if the source cannot
    run, is random, or its results depend on too little of its inputs.
    """
    for T, B, is_long in sizes:
        try:
            _compare_at(caller, run, T, B, is_long, passed_over)
        except NotCompared:
            if not is_long:
                raise


def _compare_at(caller: str, run: Run, T: int, B: int, is_long: bool, passed_over: Collection[str]) -> None:
    reasons: dict[int, str] = {}  # by the numbers of the crossings whose results have not counted yet
    for seed, scale in enumerate(_SCALES):
        crossings, again = run(T, B, seed, scale), run(T, B, seed, scale)
        for k in [*reasons] or range(len(crossings)):
            try:
                _check_numbers(crossings[k], again[k])
                bounds = _check(caller, crossings[k], passed_over)
                if not is_long:
                    _check_dependence(crossings[k], bounds)
                reasons.pop(k, None)
            except NotCompared as error:
                reasons.setdefault(k, str(error))
        if not reasons:
            return
    raise NotCompared(next(iter(reasons.values())))


def _check(caller: str, crossing: Crossing, passed_over: Collection[str]) -> dict[str, float]:
    """Refuse a layer that computes something else; return the largest errors that rounding may make, by result."""
    label, x = crossing.label, crossing.x
    if x.shape[-1] != crossing.layer.input_size:
        text = f"{label} reads x of shape {x.shape}, the layer reads {crossing.layer.input_size} columns"
        raise conversion_error(caller, text, passed_over)
    results = crossing.compute(x)
    rounding: Mapping[str, float] = {}
    bounds: dict[str, float] = {}
    for name, expected in crossing.expected.items():
        result = results[name]
        if result.shape != expected.shape:
            text = f"{name} of {label} has shape {expected.shape}, that of the layer {result.shape}"
            raise conversion_error(caller, text, passed_over)
        errors = np.abs(result.astype(np.float64) - expected)
        bounds[name] = _floor(crossing) * _largest(expected)
        if not np.all(errors <= bounds[name]):
            rounding = rounding or _rounding_errors(crossing, results)
            bounds[name] = max(bounds[name], _ROUNDING_FACTOR * rounding[name])
        if bounds[name] > max(_LARGEST_BOUND, _VISIBLE * _floor(crossing)) * max(map(_largest, (expected, result))):
            raise NotCompared(f"rounding errors alone change {name} of {label} visibly for random inputs")
        if not np.all(errors <= bounds[name]):
            first = tuple(int(k) for k in np.argwhere(~(errors <= bounds[name]))[0])
            values = f"{expected[first]:.6g} in the model and {result[first]:.6g} in the layer"
            largest = np.max(errors, initial=0, where=~np.isnan(errors))
            limits = f"the largest difference is {largest:.2g}, rounding would be below {bounds[name]:.2g}"
            raise conversion_error(caller, f"{name} of {label} at {first} is {values}; {limits}", passed_over)
    return bounds


def conversion_error(caller: str, text: str, passed_over: Collection[str]) -> ConversionError:
    """Return the error for a layer that computes something else than its source, as the text says."""
    over = f". The conversion took these for parts that do nothing: {', '.join(passed_over)}" if passed_over else ""
    return ConversionError(
        f"{caller}: the layer computes something else than the model on random inputs: {text}{over}. If you know"
        f" better, pass check=False"
    )


def _check_numbers(crossing: Crossing, repeated: Crossing) -> None:
    """Refuse arrays that are not finite, and those of two runs that differ by more than sums in another order."""
    arrays, repeated_arrays = ([c.x, *(c.expected[name] for name in crossing.expected)] for c in (crossing, repeated))
    for first, second in zip(arrays, repeated_arrays, strict=True):
        if not np.isfinite(first).all():
            raise NotCompared(f"{crossing.label} has numbers that are not finite for random inputs")
        if not np.allclose(first, second, rtol=0, atol=_floor(crossing) * _largest(first)):
            raise NotCompared("it is random: two runs on the same inputs differ")


def _check_dependence(crossing: Crossing, bounds: Mapping[str, float]) -> None:
    """Refuse inputs for which the results do not depend visibly on each step, row and column of x.

    If there are many steps or rows, some are looked at.
    """
    batch_axis = 0 if crossing.options.get("batch_first") else 1
    x, g = crossing.x, np.random.default_rng(3)
    other = g.standard_normal(x.shape) * (float(np.std(x)) or 1.0)
    is_read = np.broadcast_to(crossing.options.get("mask", True), x.shape[:2])
    if (lengths := crossing.options.get("lengths")) is not None:
        is_within = np.arange(x.shape[1 - batch_axis])[:, np.newaxis] < lengths
        is_read = is_read & (is_within if batch_axis else is_within.T)
    results = crossing.compute(x)
    for axis, part in ((1 - batch_axis, "step"), (batch_axis, "row"), (2, "column")):
        size = x.shape[axis]
        ones = np.unique(np.linspace(0, size - 1, min(size, _MOST_CHANGES)).astype(int))[:, np.newaxis]
        for k in np.array_split(np.arange(size), min(size, _COLUMN_GROUPS)) if axis == 2 else ones:
            index: Any = (*[slice(None)] * axis, k)
            if axis < 2 and not is_read[index].any():
                continue
            changed = x.copy()
            changed[index] = other[index]
            new_results = crossing.compute(changed)
            changes = {name: _largest(new_results[name].astype(np.float64) - results[name]) for name in bounds}
            if axis == 2 and not any(changes.values()):
                continue  # the weights of a column may be zero
            if all(change <= _VISIBLE * bounds[name] for name, change in changes.items()):
                raise NotCompared(f"{crossing.label} hardly depends on {part} {k[0]} of random inputs")


def _eps(crossing: Crossing) -> float:
    return max(float(np.finfo(crossing.layer.dtype).eps), crossing.eps or 0.0)


def _floor(crossing: Crossing) -> float:
    """Return the smallest bound, relative to the largest entry."""
    if crossing.layer.dtype == np.float16:  # storage alone: sums are of float32
        return _HALF_FLOOR * _eps(crossing)
    leaves = crossing.layer._leaves().values()
    size = max(leaf.input_size + (0 if isinstance(leaf, Dense) else leaf.hidden_size) for leaf in leaves)
    return _FLOOR * max(1.0, size / _FLOOR_SIZE) * _eps(crossing)


def _rounding_errors(crossing: Crossing, results: Mapping[str, Array]) -> dict[str, float]:
    """Return by how much random rounding errors of x and of the weights change the results.

    Weights in float16 have none, as sums are of float32.
    """
    g = np.random.default_rng(2)
    inexact = copy.deepcopy(crossing.layer)
    errors = dict.fromkeys(results, 0.0)
    for _ in range(_ROUNDING_DRAWS):
        if inexact.dtype != np.float16:
            weights = crossing.layer.weights.items()
            inexact.set_weights(**{name: _with_errors(array, _eps(crossing), g) for name, array in weights})
        for name, array in crossing.compute(_with_errors(crossing.x, _eps(crossing), g), inexact).items():
            errors[name] = max(errors[name], _largest(array.astype(np.float64) - results[name]))
    return errors


def _with_errors(array: Array, eps: float, g: np.random.Generator) -> Array:
    """Return an array with random relative errors of up to 2 eps, which its dtype can hold."""
    inexact: Array = (array * (1 + 2 * eps * g.uniform(-1, 1, array.shape))).astype(array.dtype)
    return inexact


def _largest(array: Array) -> float:
    return float(np.abs(array.astype(np.float64)).max(initial=0))


@contextmanager
def keep_random_states() -> Iterator[None]:
    """Leave the random states of Python and numpy as they are, which a model may draw from."""
    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
