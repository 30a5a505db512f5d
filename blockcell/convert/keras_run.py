"""Models and layers of Keras in memory, run on random inputs and compared with what they were converted to.

A model that became one layer is called itself, as ``model(x, training=False)``. If parts of a model are left out, or if
it has several inputs, each converted layer is compared with the layers of Keras that it was made of, which are called
one behind the other. The variables and attributes of the user's object and the random states of Python and numpy are
put back. Nothing here imports Keras.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from ..layers import Bidirectional, Layer
from ..optable import Array
from .comparison import Crossing, NotCompared, Sizes, choose_sizes, compare, keep_random_states
from .keras_description import is_model
from .keras_layers import cells_in, gives_zeros, makes_mask, repeats_masked_steps
from .models import Assembly, Step, cell_states

_LONGEST = 32  # steps: a model that fixes more is run for one size alone, as each step of a cell takes 2 to 3 ms
_HOOKS = "_forward_hooks", "_forward_pre_hooks"  # of PyTorch's modules, which layers of Keras may be
_EPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7}
_TF32_EPS = 2.0**-10  # of products of float32 on accelerators
_FLOAT32_EPS = 2.0**-23  # of float64, where Keras computes a part in float32


def compare_with_source(
    caller: str, source: Any, check: bool | None, steps: Mapping[str, Step], assembly: Assembly, has_graph: bool
) -> list[str]:
    """Compare converted layers with the model or layer of Keras; return remarks for a warning.

    `source` is the user's object, the steps and the assembly are what it was converted to, and `has_graph` says whether
    a config told the order of its layers. Raise a ConversionError if a layer computes something else, and `NotCompared`
    if that cannot be seen.
    """
    if not check and any(getattr(layer, name, None) for layer in _layers_in(source) for name in _HOOKS):
        raise NotCompared("hooks of your own would run, too; pass check=True to run them")
    converted, keys = assembly.layers, assembly.keys
    eps = _eps_of(source, steps)
    has_mask = any(map(makes_mask, steps.values()))
    unmasked = {key for key in keys if steps[key].source.has_mask is False}
    chains = {keys: converted} if isinstance(converted, Layer) else {(key,): part for key, part in converted.items()}
    runs = [
        _Run(layer, {key: steps[key] for key in own}, has_mask and unmasked.isdisjoint(own), eps)
        for own, layer in chains.items()
    ]
    if is_model(source) and is_whole(assembly) and (fixed := _fixed_sizes(source)) is not None:
        runs = [runs[0]._replace(model=source, fixed=fixed)]
    elif not has_graph and is_whole(assembly):
        raise NotCompared("it has several inputs, or x of another rank")
    passed_over = [step.label for step in steps.values() if step.is_identity]
    remarks = []
    with _left_as_it_was(source) as restore:
        for run in runs:
            sizes = run.choose_sizes(is_long=not has_graph)
            compare(caller, run._replace(restore=restore), sizes, passed_over)
            for name in ("T", "B"):
                if (largest := max(getattr(size, name) for size in sizes)) < 3:
                    remarks.append(f"compared for {name} = {largest} alone, which the model fixes")
    return remarks


def is_whole(assembly: Assembly) -> bool:
    """Return whether one layer is all that a model has."""
    return not assembly.left_out and not isinstance(assembly.layers, dict)


# ---------------------------------------------------------------------------------------------------------------- runs
class _Run(NamedTuple):
    """Runs what a layer was converted from on random inputs, as `comparison.Run`."""

    layer: Layer
    chain: Mapping[str, Step]
    """The steps that the layer is made of."""
    is_masked: bool
    """Whether a mask reaches the recurrent layers among them."""
    eps: float | None
    restore: Callable[[], None] = lambda: None
    model: Any = None
    """The whole model, which is run; None to run the layers of the chain."""
    fixed: tuple[int | None, int | None] = (None, None)
    """T and B, None for any size."""

    def choose_sizes(self, is_long: bool) -> list[Sizes]:
        """Choose the sizes of the comparison: a large T for models with a call() of their own alone."""
        T, B = self.fixed
        rows = [state.shape[0] for step in self.chain.values() for state in _states_of(step)]
        sizes = choose_sizes(T, next(iter(rows), B), {self.layer.input_size})
        if T is not None and T > _LONGEST:
            return sizes[:1]
        if T is None and B is None and not rows:  # steps take time, rows hardly any
            sizes = [size if size.is_long else Sizes(size.B, size.T) for size in sizes]
        return [size for size in sizes if is_long or not size.is_long]

    def __call__(self, T: int, B: int, seed: int, scale: float) -> Sequence[Crossing]:
        """Return what enters and leaves the layer."""
        g = np.random.default_rng([seed, T, B])
        shares = g.random(B)
        shares[int(g.integers(B))] = 1.0  # one row has all steps
        x = g.standard_normal((B, T, self.layer.input_size)) * scale
        x = x.astype(np.float16).astype(self.layer.dtype)  # numbers that each dtype of a model's input can hold
        mask = np.arange(T) < np.ceil(shares * T)[:, np.newaxis] if self.is_masked else None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return [self._run_model(x) if self.model is not None else self._run_chain(x, mask)]
        except NotCompared:
            raise
        except Exception as error:
            text = str(error).strip().split("\n")[0][:200]
            raise NotCompared(f"it raises {type(error).__name__} for random inputs: {text}") from error
        finally:
            self.restore()

    def _run_model(self, x: Array) -> Crossing:
        outputs = flatten(_call(self.model, x))
        if len(outputs) != 1:
            raise NotCompared(f"it returns {len(outputs)} arrays")
        return self._crossing("the model", x, _to_numpy(outputs[0]), None)

    def _run_chain(self, x: Array, mask: Array | None) -> Crossing:
        """Call the layers of Keras that the layer is made of, from states of zeros."""
        y: Any = x
        for step in self.chain.values():
            instance, options = step.source.instance, {}
            if step.source.kind == "TimeDistributed":
                instance = instance.layer
            if step.source.is_recurrent:
                options = {} if mask is None else {"mask": mask}
            for state in _states_of(step):
                state.assign(np.zeros_like(_to_numpy(state)))
            y, *_ = flatten(_call(instance, y, **options))  # and the last states, if the layer returns them
        label = next(iter(self.chain.values())).label if len(self.chain) == 1 else "the model"
        return self._crossing(label, x, _to_numpy(y), mask)

    def _crossing(self, label: str, x: Array, y: Array, mask: Array | None) -> Crossing:
        """Return what enters and leaves the layer."""
        *_, top = self.chain.values()
        options: dict[str, Any] = {"batch_first": True}
        if mask is not None:
            recurrent = [step for step in self.chain.values() if step.source.is_recurrent]
            options |= {"mask": mask, "masked": "repeat" if repeats_masked_steps(recurrent[-1]) else "zero"}
            if gives_zeros(self.chain, [*self.chain]):
                y = np.where(mask[..., np.newaxis], y, 0)

        def read(y: Array, state: Any) -> Mapping[str, Array]:
            """Return y as Keras' layers return it: without return_sequences it is h alone, of both directions."""
            if top.dense_last is not None:
                halves = cell_states(state)[-2 if isinstance(top.layer, Bidirectional) else -1 :]
                y = np.concatenate([half.h for half in halves], axis=-1)
            return {"y": y}

        return Crossing(label, self.layer, x, {"y": y}, read, options, self.eps)


def _fixed_sizes(model: Any) -> tuple[int | None, int | None] | None:
    """Return T and B of a model's only input x, None for any size; None for a model with other inputs."""
    inputs = getattr(model, "inputs", None) or ()  # a model of one's own tells none
    if len(inputs) > 1 or (inputs and isinstance(model.input, Mapping)):
        return None
    shape = tuple(inputs[0].shape) if inputs else (None, None, None)
    return (shape[1], shape[0]) if len(shape) == 3 else None


def _states_of(step: Step) -> list[Any]:
    """Return the variables from which a stateful layer starts; none for others."""
    instance = step.source.instance
    is_bidirectional = step.source.kind == "Bidirectional"
    parts = [instance.forward_layer, instance.backward_layer] if is_bidirectional else [instance]
    return [state for part in parts if getattr(part, "stateful", False) for state in flatten(part.states)]


# -------------------------------------------------------------------------------------------------------------- tensors
def _call(source: Any, x: Any, **options: Any) -> Any:
    """Call a model or a layer in inference; a cell step by step, from zeros."""
    if "training" in inspect.signature(source.call).parameters:
        options["training"] = False
    if not hasattr(source, "state_size") or hasattr(source, "cell"):
        return source(x, **options)
    dtype = {"dtype": x.dtype} if "dtype" in inspect.signature(source.get_initial_state).parameters else {}
    states = source.get_initial_state(batch_size=len(x), **dtype)
    ys = []
    for t in range(x.shape[1]):
        y, states = source(x[:, t], states, **options)
        ys.append(_to_numpy(y))
    return np.stack(ys, axis=1)


def flatten(structure: Any) -> list[Any]:
    """Return the leaves of nested lists, tuples and dicts, except None."""
    if isinstance(structure, Mapping):
        structure = [*structure.values()]
    if isinstance(structure, (list, tuple)):
        return [leaf for part in structure for leaf in flatten(part)]
    return [] if structure is None else [structure]


def _to_numpy(tensor: Any) -> Array:
    """Return a tensor or a variable of any of Keras' backends as an array."""
    tensor = _value_of(tensor)
    if hasattr(tensor, "detach"):
        tensor = tensor.detach().cpu()
    array: Array = np.asarray(tensor)
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array


def _value_of(variable: Any) -> Any:
    """Return the tensor of a variable; in Keras 2, `value` is a method."""
    value = getattr(variable, "value", variable)
    return value() if callable(value) else value


def _eps_of(source: Any, steps: Mapping[str, Step]) -> float | None:
    """Return the relative rounding error of the source's arithmetic if that is coarser than its dtype's."""
    layers = _layers_in(source)
    errors = [_EPS.get(str(getattr(layer, "compute_dtype", "")), 0.0) for layer in layers]
    for variable in source.weights[:1]:
        value = _value_of(variable)
        errors += [0.0 if "cpu" in str(getattr(value, "device", "cpu")).lower() else _TF32_EPS]
        errors += [0.0 if type(value).__module__.startswith("tensorflow") else _FLOAT32_EPS]
    cells = cells_in(step.layer for step in steps.values())
    if any("leaky_relu" in str(cell._activations) for cell in cells):  # its slope is float32 in TensorFlow
        errors.append(_FLOAT32_EPS)
    return max(errors, default=0.0) or None


# ------------------------------------------------------------------------------------------------- as the user left it
def _layers_in(source: Any) -> list[Any]:
    """Return the source and all layers in it, at any depth."""
    return [*source._flatten_layers()] if hasattr(source, "_flatten_layers") else [source]


@contextmanager
def _left_as_it_was(source: Any) -> Iterator[Callable[..., None]]:
    """Put back the attributes and variables of a source, and random states; yield what to call after each run.

    After a run, the variables of floating-point numbers are put back, such as states: equal inputs give equal results.
    Seeds, which are integers, are put back at the end alone: two runs of a random model differ.
    """
    layers = _layers_in(source)
    attributes = [(vars(layer), dict(vars(layer))) for layer in layers]
    trainable = {id(variable) for variable in source.trainable_weights}
    variables = [*source.weights, *getattr(source, "variables", ())]
    variables += [state for layer in layers for state in flatten(getattr(layer, "states", None))]
    changeable = {id(variable): variable for variable in variables if hasattr(variable, "assign")}
    values = [(changeable[key], _to_numpy(changeable[key]).copy()) for key in changeable.keys() - trainable]

    def restore(kinds: str = "f") -> None:
        """Put back attributes, and variables of these kinds of dtypes."""
        for current, former in attributes:
            for name in current.keys() - former.keys():
                del current[name]
            current.update(former)
        for variable, value in values:
            if value.dtype.kind in kinds and not np.array_equal(_to_numpy(variable), value, equal_nan=True):
                variable.assign(value)

    with keep_random_states():
        try:
            yield restore
        finally:
            restore("fiub")
