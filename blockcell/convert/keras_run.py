"""Models and layers of Keras in memory, run on random inputs and compared with what they were converted to.

The user's object is called for each draw of inputs, as ``model(x, training=False)``. While it runs, the calls of its
layers are recorded. Each converted layer is compared with its calls. What enters a layer must be what leaves the layer
before it, by the model's config. Together they show that the model computes what the conversion says. The object's
variables and attributes and all random states are put back. Nothing here imports Keras.
"""

from __future__ import annotations

import functools
import inspect
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain, islice, repeat
from typing import Any, NamedTuple

import numpy as np

from ..layers import Bidirectional, Layer
from ..layers.structure import state_sizes
from ..optable import Array
from .comparison import (
    NOT_COMPARED,
    Crossing,
    NotCompared,
    Sizes,
    choose_sizes,
    compare,
    conversion_error,
    keep_random_states,
)
from .keras_inputs import draw_inputs, flatten, inputs_of
from .keras_layers import ZEROS, cells_in, gives_zeros, is_input, repeats_masked_steps
from .keras_objects import is_model
from .models import Assembly, Step, cell_states, nest_states, read_initial_state

_REPEATED = 1e-4  # relative difference of two runs that sum in another order
_LONGEST = 32  # steps: a model that fixes more is run for one size alone, as each step of a cell takes 2 to 3 ms
_KERAS = "keras", "tf_keras", "tensorflow"
_HOOKS = "_forward_hooks", "_forward_pre_hooks"  # of PyTorch's modules, which layers of Keras may be
_EPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7}
_TF32_EPS = 2.0**-10  # of products of float32 on accelerators
_FLOAT32_EPS = 2.0**-23  # of float64, where Keras computes a part in float32


class LayerCall(NamedTuple):
    """A call of a layer while the model ran."""

    inputs: list[Array]
    """All arrays that it read, x first."""
    mask: Array | None
    states: list[Array]
    """The initial state; empty for zeros."""
    outputs: list[Array]
    """y and, if the layer returns them, its last states."""


def compare_with_source(
    caller: str,
    source: Any,
    check: bool | None,
    steps: Mapping[str, Step],
    outputs: Sequence[str | None] | None,
    assembly: Assembly,
) -> list[str]:
    """Compare converted layers with the model or layer of Keras; return remarks for a warning.

    `source` is the user's object. The others are what it was converted to: the steps, the keys of the steps that its
    results come from, and the layers. Raise a ConversionError if a layer computes something else.
    """
    passed_over = [step.label for step in steps.values() if step.is_identity]
    try:
        if not check and any(getattr(layer, name, None) for layer in _layers_in(source) for name in _HOOKS):
            raise NotCompared("hooks of your own would run, too; pass check=True to run them")
        run = _KerasRun(caller, source, steps, outputs, assembly)
        with _left_as_it_was(source) as run.restore:
            try:
                compare(caller, run, run.choose_sizes(), passed_over)
            except NotCompared:
                former, run.inputs = run.inputs, inputs_of(source, steps, assembly.layers, fixes_steps=True)
                if run.inputs == former:
                    raise
                compare(caller, run, run.choose_sizes(), passed_over)
    except NotCompared as error:
        return [f"{NOT_COMPARED}, because {error}"]
    return run.remarks()


# ---------------------------------------------------------------------------------------------------------------- runs
class _KerasRun:
    """Runs a source on random inputs, as `comparison.Run`."""

    def __init__(
        self,
        caller: str,
        source: Any,
        steps: Mapping[str, Step],
        outputs: Sequence[str | None] | None,
        assembly: Assembly,
    ) -> None:
        self.caller, self.source, self.steps, self.outputs, self.assembly = caller, source, steps, outputs, assembly
        self.inputs = inputs_of(source, steps, assembly.layers)
        self.restore: Callable[[], None]
        self._calls: Mapping[str, list[LayerCall]] = {}
        self._is_masked: dict[str, bool] = {}  # by the keys of recurrent layers
        self._has_state: set[str] = set()
        self._gives_zeros = False
        self._sizes: set[tuple[int, int]] = set()  # T and B of x
        self._is_repeatable = False  # whether two runs on equal inputs gave the same
        self._run_once = functools.lru_cache(maxsize=1)(self._run)  # as each run takes its time
        self._eps = _eps_of(source, steps)

    def choose_sizes(self) -> list[Sizes]:
        """Choose the sizes of the comparison: a large T for models with a call() of their own alone."""
        shapes = [model_input.shape for model_input in flatten(self.inputs)]
        lengths = [shape[1] for shape in shapes if len(shape) > 1]
        T = None if None in lengths else max((length for length in lengths if length is not None), default=None)
        B = next((shape[0] for shape in shapes if shape and shape[0] is not None), None)
        sizes = choose_sizes(T, B, {size for shape in shapes for size in shape if size is not None} - {T, B})
        if T is not None and T > _LONGEST:
            return sizes[:1]
        if T is None and B is None:  # steps take time, rows hardly any
            sizes = [size if size.is_long else Sizes(size.B, size.T) for size in sizes]
        return [size for size in sizes if not size.is_long or has_own_call(self.source)]

    def __call__(self, T: int, B: int, seed: int, scale: float) -> Sequence[Crossing]:
        """Return what enters and leaves each converted layer."""
        return self._run_once(T, B, seed, scale)

    def _run(self, T: int, B: int, seed: int, scale: float) -> Sequence[Crossing]:
        """Run the source; the first time twice, as it may be random."""
        drawn = draw_inputs(self.inputs, self.steps, T, B, seed, scale)
        former = None if self._is_repeatable else self._record(drawn)
        outputs = self._record(drawn)
        if former is not None and not all(_is_equal(*pair, _REPEATED) for pair in zip(former, outputs, strict=False)):
            raise NotCompared("it is random: two runs on the same inputs differ")
        self._is_repeatable = True
        self._check_links([*flatten(drawn)], outputs)
        layers, keys = self.assembly.layers, self.assembly.keys
        chains = [(layers, keys)] if isinstance(layers, Layer) else [(part, (key,)) for key, part in layers.items()]
        crossings = [crossing for layer, keys in chains for crossing in self._crossings(layer, keys)]
        self._sizes |= {(crossing.x.shape[1], crossing.x.shape[0]) for crossing in crossings}
        return crossings

    def _record(self, drawn: Any) -> list[Array]:
        """Call the source; keep the calls of its layers, and return its outputs."""
        records: dict[str, list[Any]] = {}
        try:
            with warnings.catch_warnings(), _recorded(self.source, records):
                warnings.simplefilter("ignore")
                outputs = [_to_numpy(tensor) for tensor in flatten(_call(self.source, drawn))]
            self._calls = {key: _layer_calls(calls) for key, calls in records.items() if key in self.steps}
        except Exception as error:
            text = str(error).strip().split("\n")[0][:200]
            raise NotCompared(f"it raises {type(error).__name__} for random inputs: {text}") from error
        finally:
            self.restore()
        if not is_model(self.source):
            self._calls = {key: [LayerCall([*flatten(drawn)], None, [], outputs)] for key in self.steps}
        return outputs

    # ------------------------------------------------------------------------------------------------ links of layers
    def _check_links(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        """Refuse a model in which a layer reads something else than the steps say, or that returns something else."""
        by_name = dict(zip([part.name for part in flatten(self.inputs)], inputs, strict=True))
        known_outputs, keys = self.outputs, self.assembly.keys
        if known_outputs is None and is_whole(self.assembly):
            known_outputs = keys[-1:]
            self._check_link(inputs, self._calls.get(keys[0], ()), f"what enters {self.steps[keys[0]].label}")
        for key, step in self.steps.items():
            calls = self._calls.get(key, ())
            if len(calls) != 1:  # which call reads what is not known
                continue
            if step.is_identity and step.source.kind != "Masking":
                self._check_link(calls[0].outputs, calls, f"what leaves {step.label}")
            if step.inputs == ():
                self._check_link(inputs, calls, f"what enters {step.label}")
            for source in step.inputs or ():
                if source and not source.startswith(f"{key}/"):  # which a TimeDistributed calls
                    self._check_link(self._arrays_from(source, by_name), calls, f"what enters {step.label}")
        results = [LayerCall([*outputs], None, [], [])]
        for output in known_outputs or ():
            if output is not None:
                label = f"what follows {self.steps[output].label}"
                self._check_link(self._arrays_from(output, by_name), results, label)

    def _arrays_from(self, key: str, inputs: Mapping[str, Array]) -> Sequence[Array] | None:
        """Return what a step gives, in each of its calls; None if that is not known."""
        if key in self._calls:
            return [call.outputs[0] for call in self._calls[key] if call.outputs]
        step = self.steps[key]
        if step.is_identity and step.inputs and step.inputs[0]:
            return self._arrays_from(step.inputs[0], inputs)
        return [inputs[key]] if key in inputs and not step.inputs else None

    def _check_link(self, arrays: Sequence[Array] | None, calls: Sequence[LayerCall], label: str) -> None:
        """Refuse calls that read none of the arrays."""
        for call in calls:
            pairs = [(array, read) for array in arrays or () for read in call.inputs]
            if pairs and not any(_is_equal(*pair, self._eps or 0.0) for pair in pairs):
                text = f"its call() changes {label}{_difference(*pairs[0])}"
                raise conversion_error(self.caller, text, ())

    # ------------------------------------------------------------------------------------------------------ crossings
    def _crossings(self, layer: Layer, keys: Sequence[str]) -> Iterator[Crossing]:
        """Yield a crossing for each call of a chain of steps, which became one layer."""
        calls = [self._calls.get(key, []) for key in keys]
        label = self.steps[keys[0]].label if len(keys) == 1 else "the model"
        if not all(calls) or len({*map(len, calls)}) > 1:
            raise NotCompared(f"not all layers of {label} are called one by one")
        for calls_of_chain in zip(*calls, strict=True):
            yield self._crossing(label, layer, dict(zip(keys, calls_of_chain, strict=True)))

    def _crossing(self, label: str, layer: Layer, calls: Mapping[str, LayerCall]) -> Crossing:
        """Return what enters and leaves a layer in one call of each of the steps that it is made of."""
        steps = {key: self.steps[key] for key in calls}
        recurrent = {key: call for key, call in calls.items() if steps[key].source.is_recurrent}
        cells = {key: cells_in([steps[key].layer]) for key in recurrent}
        keys = [*calls]
        top, x, y = steps[keys[-1]], calls[keys[0]].inputs[0], calls[keys[-1]].outputs[0]
        if x.ndim != 3:
            raise NotCompared(f"{label} reads an array of shape {x.shape}")
        self._is_masked |= {key: call.mask is not None for key, call in recurrent.items()}
        self._has_state |= {key for key, call in recurrent.items() if call.states}
        states = [state for key, call in recurrent.items() for state in _states_of(cells[key], call.states)]
        nested = nest_states(layer, chain(states, repeat(None)))
        options: dict[str, Any] = {"batch_first": True, "state": read_initial_state(self.caller, layer, nested)}
        mask = next((call.mask for call in recurrent.values()), None)
        if mask is not None:
            options |= {"mask": mask, "masked": "repeat" if repeats_masked_steps(steps[[*recurrent][-1]]) else "zero"}
            if gives_zeros(self.steps, keys):
                self._gives_zeros = True
                y = np.where(mask[..., np.newaxis], y, 0)
        expected = {"y": y}
        for key, call in recurrent.items():
            expected |= {f"state {k} of {steps[key].label}": array for k, array in enumerate(call.outputs[1:])}

        def read(y: Array, state: Any) -> Mapping[str, Array]:
            """Return y and the states as Keras' layers return them."""
            last_states = cell_states(state)
            if top.dense_last is not None:  # Keras' y is h alone, of both directions
                halves = last_states[-2:] if isinstance(top.layer, Bidirectional) else last_states[-1:]
                y = np.concatenate([half.h for half in halves], axis=-1)
            results, waiting = {"y": y}, iter(last_states)
            for key in recurrent:
                own = islice(waiting, len(cells[key]))
                arrays = [getattr(state, name) for state in own for name in ("h", "cs") if hasattr(state, name)]
                results |= {f"state {k} of {steps[key].label}": array for k, array in enumerate(arrays)}
            return {name: array for name, array in results.items() if name in expected}

        return Crossing(label, layer, x.astype(layer.dtype), expected, read, options, self._eps)

    # -------------------------------------------------------------------------------------------------------- remarks
    def remarks(self) -> list[str]:
        """Return what the runs showed that the steps do not say."""
        texts = []
        has_hint = any("mask=" in step.hint for step in self.steps.values())
        masked = [key for key, is_masked in self._is_masked.items() if is_masked]
        unmasked = [key for key, is_masked in self._is_masked.items() if not is_masked]
        if masked and not has_hint:
            texts.append(f"{_labels(self.steps, masked)} gets a mask: pass mask={ZEROS if self._gives_zeros else ''}")
        if unmasked and has_hint:
            texts.append(f"no mask reaches {_labels(self.steps, unmasked)}")
        if unknown := [key for key in sorted(self._has_state) if not self._tells_state(self.steps[key])]:
            texts.append(f"{_labels(self.steps, unknown)} starts from a state: pass state=")
        for name, k in (("T", 0), ("B", 1)):
            if (largest := max(sizes[k] for sizes in self._sizes)) < 3:
                texts.append(f"compared for {name} = {largest} alone, which the model fixes")
        return texts

    def _tells_state(self, step: Step) -> bool:
        """Return whether a step says that it starts from a state, or reads this from inputs of the model."""
        states = (step.inputs or ())[1:]
        return "state=" in step.hint or bool(states and all(key and is_input(self.steps, key) for key in states))


def is_whole(assembly: Assembly) -> bool:
    """Return whether one layer is all that a model has."""
    return not assembly.left_out and not isinstance(assembly.layers, dict)


def has_own_call(source: Any) -> bool:
    """Return whether a model, or one within it, has a call() that is not Keras' own."""
    return is_model(source) and (
        str(type(source).call.__module__).split(".")[0] not in _KERAS or any(map(has_own_call, source.layers))
    )


def _labels(steps: Mapping[str, Step], keys: Sequence[str]) -> str:
    return ", ".join(steps[key].label for key in keys[:12])


# -------------------------------------------------------------------------------------------------------------- states
def _states_of(cells: Sequence[Any], arrays: Sequence[Array]) -> list[dict[str, Array] | None]:
    """Return the states of cells from arrays in Keras' order, h before c; None for zeros, if there are none."""
    if not arrays:
        return [None] * len(cells)
    waiting, names = iter(arrays), [sorted(state_sizes(cell), reverse=True) for cell in cells]
    return [{name: next(waiting).astype(cells[0].dtype) for name in own} for own in names]


# ----------------------------------------------------------------------------------------------------- calls of layers
def _call(source: Any, drawn: Any) -> Any:
    """Call a model or a layer in inference; a cell step by step, from zeros."""
    options = {"training": False} if "training" in inspect.signature(source.call).parameters else {}
    if not hasattr(source, "state_size") or hasattr(source, "cell"):
        return source(drawn, **options)
    dtype = {"dtype": drawn.dtype} if "dtype" in inspect.signature(source.get_initial_state).parameters else {}
    states = source.get_initial_state(batch_size=len(drawn), **dtype)
    ys = []
    for t in range(drawn.shape[1]):
        y, states = source(drawn[:, t], states, **options)
        ys.append(_to_numpy(y))
    return np.stack(ys, axis=1)


@contextmanager
def _recorded(source: Any, records: dict[str, list[Any]]) -> Iterator[None]:
    """Append the calls of all layers of a model to their records, by the keys of the steps."""
    path: list[str] = []

    def record(layer: Any) -> Callable[..., Any]:
        """Return a function that calls a layer and records it."""
        call, name = layer.call, layer.name
        signature = inspect.signature(call)

        def recording_call(*arguments: Any, **options: Any) -> Any:
            parts = (layer.forward_layer, layer.backward_layer) if hasattr(layer, "forward_layer") else (layer,)
            variables = [part.states for part in parts if getattr(part, "stateful", False)]
            states = [_to_numpy(state).copy() for state in flatten(variables)]  # which the call changes
            path.append(name)
            try:
                outputs = call(*arguments, **options)
            finally:
                key = "/".join(path)
                path.pop()
            bound = signature.bind(*arguments, **options).arguments
            records.setdefault(key, []).append((bound, states, outputs))
            return outputs

        return recording_call

    layers = {id(layer): layer for layer in _sublayers(source)}.values()
    for layer in layers:
        vars(layer)["call"] = record(layer)  # an attribute of Keras' would be tracked
    yield  # the attributes of the layers are put back with all others


def _sublayers(source: Any) -> Iterator[Any]:
    """Yield the layers of a model, of the models in it, and within a TimeDistributed."""
    inner = source.layers if is_model(source) else [source.layer] if type(source).__name__ == "TimeDistributed" else []
    for layer in inner:
        yield layer
        yield from _sublayers(layer)


def _layer_calls(records: Sequence[Any]) -> list[LayerCall]:
    """Return recorded calls as arrays; none if there are symbolic tensors among them, of a function that is traced."""
    calls = []
    for bound, states, outputs in records:
        tensors = [value for name, value in bound.items() if name not in ("mask", "training")]
        masks = [*flatten(bound.get("mask"))]
        try:
            states = [_to_numpy(state) for state in flatten(bound.get("initial_state"))] or states
            inputs = [_to_numpy(tensor) for tensor in flatten(tensors) if hasattr(tensor, "shape")]
            mask = _to_numpy(masks[0]).astype(bool) if masks else None
            calls.append(LayerCall(inputs, mask, states, [_to_numpy(tensor) for tensor in flatten(outputs)]))
        except (NotImplementedError, TypeError):
            return []
    return calls


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


def _difference(array: Array, read: Array) -> str:
    """Say where two arrays begin to differ, by the steps and by the model."""
    if array.shape != read.shape:
        return f" from shape {array.shape} to {read.shape}"
    first = tuple(int(k) for k in np.argwhere(array != read)[0])
    return f" at {first} from {array[first]:.6g} to {read[first]:.6g}"


def _is_equal(array: Array, read: Array, eps: float) -> bool:
    """Return whether an array is another one, perhaps rounded to its dtype, or to one with that eps."""
    if array.shape != read.shape:
        return False
    largest = float(np.abs(read.astype(np.float64)).max(initial=0, where=np.isfinite(read)))
    return bool(np.allclose(array.astype(read.dtype), read, rtol=0, atol=eps * largest, equal_nan=True))


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
def _left_as_it_was(source: Any) -> Iterator[Callable[[], None]]:
    """Put back the attributes and variables of a source, and random states; yield what to call after each run.

    After a run, the variables of floating-point numbers are put back, such as states: equal inputs give equal results.
    Seeds, which are integers, are put back at the end alone: two runs of a random model differ.
    """
    layers = _layers_in(source)
    attributes = [(vars(layer), dict(vars(layer))) for layer in layers]
    trainable = {id(variable) for variable in source.trainable_weights}
    variables = [variable for variable in source.weights if id(variable) not in trainable]
    variables += [variable for variable in getattr(source, "variables", ()) if id(variable) not in trainable]
    variables += [state for layer in layers for state in flatten(getattr(layer, "states", None))]
    variables += [generator.state for generator in _global_seed_generators()]
    variables = [*{id(variable): variable for variable in variables if hasattr(variable, "assign")}.values()]
    values = [(variable, _to_numpy(variable).copy()) for variable in variables]

    def restore(kinds: str = "f") -> None:
        """Put back attributes, and variables of these kinds of dtypes."""
        for current, former in attributes:
            for name in current.keys() - former.keys():
                del current[name]
            current.update(former)
        for variable, value in values:
            if value.dtype.kind in kinds and not np.array_equal(_to_numpy(variable), value, equal_nan=True):
                variable.assign(value)

    with ExitStack() as stack:
        stack.enter_context(keep_random_states())
        stack.enter_context(_backend_left_as_it_was())
        stack.callback(restore, "fiub")
        yield restore


def _global_seed_generators() -> list[Any]:
    """Return the seed generator that Keras 3 draws from where no other is given."""
    module = sys.modules.get("keras.src.backend.common.global_state")
    generator = module.get_global_attribute("global_seed_generator") if module else None
    return [] if generator is None else [generator]


@contextmanager
def _backend_left_as_it_was() -> Iterator[None]:
    """Keep the random states of TensorFlow and PyTorch, and compute no gradients."""
    context = sys.modules.get("tensorflow.python.eager.context")
    keras_2 = sys.modules.get("tf_keras.src.backend")
    places = [(context.context(), "_rng")] if context else []
    places += [(keras_2._SEED_GENERATOR, "generator")] if keras_2 else []
    torch = sys.modules.get("torch")
    with ExitStack() as stack:
        for place, name in places:  # which draw seeds for operations: others meanwhile, as kernels keep their states
            if generator := getattr(place, name, None):
                stack.callback(setattr, place, name, generator)
                setattr(place, name, random.Random(0))
        if torch is not None:
            stack.enter_context(torch.no_grad())
            stack.callback(torch.set_rng_state, torch.get_rng_state())
        yield
