"""PyTorch modules beside the layers that were made of them: a copy of the module runs on random inputs.

Nothing but the module that the caller passed is run: a deep copy of it, in inference. Temporary hooks on the copy
record the arrays that enter and leave its modules. Each converted layer is compared with its module on these arrays,
and what else the model's forward does to them is named.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import io
import itertools
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.modules.rnn import RNNBase, RNNCellBase
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from ..layers import Layer
from ..layers.structure import state_sizes
from ..optable import Array
from .comparison import Crossing, NotCompared, Outcome, choose_sizes, compare, keep_random_states
from .models import cell_states, nest_states, read_initial_state
from .shared import ConversionError

_WRAPPERS = {"DataParallel": "module", "DistributedDataParallel": "module", "OptimizedModule": "_orig_mod"}
"""Modules of PyTorch that compute what another one does, and the attribute that has it."""
_SIZES = "input_size", "in_features", "in_channels", "num_features"  # attributes of modules that read features
_HOOKS = "it has hooks of its own: check=True runs them"


class Piece(NamedTuple):
    """A converted layer and the modules that it was made of."""

    layer: Layer
    names: tuple[str, ...]
    """The modules' names, in the order in which they run."""
    state: Any = None
    """The state from which the model starts the layer; None for zeros."""

    @property
    def label(self) -> str:
        """What messages call it."""
        ends = dict.fromkeys((self.names[0], self.names[-1]))
        return " to ".join(map(repr, ends)) if self.names[0] else "the model"


class _Call(NamedTuple):
    """The arrays of a call, or of calls that each start from the last state of the one before; time comes first."""

    x: Array
    state: tuple[Array, ...]
    y: Array
    last: tuple[Array, ...]


class _Event(NamedTuple):
    """The arrays that entered and left a module in one call."""

    name: str
    entering: list[list[Array]]
    """Those of each argument; x and the state come first."""
    leaving: list[Array]
    is_packed: bool
    is_plain: bool
    """Whether there are no further arguments, and no rows of other lengths."""


class _Input(NamedTuple):
    """A kind of input that a model may take."""

    axes: str
    """T, B, and F for features; ids have no F."""
    size: int
    """The number of features, or of ids."""
    padding_id: int | None = None

    def draw(self, T: int, B: int, seed: int, scale: float) -> Array:
        """Draw features, among them a few large ones, which a bound may change, or ids, of which one is the padding."""
        g = np.random.default_rng([seed, T, B])
        shape = [{"T": T, "B": B, "F": self.size}[axis] for axis in self.axes]
        if "F" in self.axes:
            return g.standard_t(3, shape) * scale
        ids = g.integers(0, self.size, shape)
        if self.padding_id is not None:
            ids.flat[-1] = self.padding_id
        return ids


def compare_module(
    caller: str, module: torch.nn.Module, pieces: Sequence[Piece], is_whole: bool, check: bool | None
) -> Outcome:
    """Compare converted layers with the PyTorch module that the user passed.

    `is_whole` says whether the only layer is to compute what the model computes, as nothing is known to be left out.
    With `check`, hooks of the user's own run, too. Raise a ConversionError if a layer computes something else than its
    module or than the model, and `NotCompared` if the model cannot run; where its parts can, they have been compared.
    """
    with _undisturbed():
        return _Source(caller, module, pieces, bool(check)).compare(is_whole)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Run models in inference and without a word, and leave random states as they are."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    with (
        warnings.catch_warnings(action="ignore"),
        keep_random_states(),
        torch.random.fork_rng(devices),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
        torch.backends.mkldnn.flags(enabled=False),  # which computes in bfloat16 if the user has allowed that
        contextlib.redirect_stdout(io.StringIO()),
    ):
        yield


class _Source:
    """A copy of a module, which runs on random inputs."""

    def __init__(self, caller: str, module: Any, pieces: Sequence[Piece], runs_hooks: bool) -> None:
        self._caller, self._prefix = caller, ""
        while type(module).__name__ in _WRAPPERS and type(module).__module__.startswith("torch."):
            attribute = _WRAPPERS[type(module).__name__]
            module, self._prefix = getattr(module, attribute), f"{self._prefix}{attribute}."
            names = [tuple(name.removeprefix(f"{attribute}.") for name in piece.names) for piece in pieces]
            pieces = [piece._replace(names=n) for piece, n in zip(pieces, names, strict=True)]
        self._pieces = pieces
        self._piece_names = {name for piece in pieces for name in piece.names}
        self._hooked_names = [] if runs_hooks else _names_with_hooks(module)
        self._original = _copy_for_inference(module)
        self._restore()
        if missing := self._piece_names - self._modules.keys():
            raise NotCompared(f"it has no module {min(missing)!r}")
        self._weight = next(
            itertools.chain(self._modules[pieces[0].names[0]].parameters(), self._original.parameters())
        )
        self._model_sizes = {size for parameter in self._original.parameters() for size in parameter.shape}
        self._input = _Input("", 0)
        self._operations: dict[str, None] = {}
        self._more_operations: dict[str, None] = {}  # on the way to further results of the model

    def _restore(self) -> None:
        """Make the model one that has not run yet, as it may keep states; the copies share their parameters."""
        memo = {id(parameter): parameter for parameter in self._original.parameters()}
        self._model = copy.deepcopy(self._original, memo)
        self._modules: dict[str, Any] = dict(self._model.named_modules(remove_duplicate=False))

    # ------------------------------------------------------------------------------------------------- comparisons
    def compare(self, is_whole: bool) -> Outcome:
        """Compare the layers with the model, or, if that cannot run, each layer with its modules alone."""
        reason = None
        if not isinstance(self._model, (RNNBase, RNNCellBase, torch.nn.Linear)):
            try:
                return self._compare_model(is_whole)
            except NotCompared as error:
                reason = error
        hooked = {name for name in self._piece_names if any(_is_within(part, name) for part in self._hooked_names)}
        pieces = [piece for piece in self._pieces if hooked.isdisjoint(piece.names)]
        if not pieces:
            raise NotCompared(_HOOKS)
        kinds = dict.fromkeys(type(self._modules[name]) for piece in pieces for name in piece.names)
        derived = [f"{k.__name__}.forward" for k in kinds if k.__module__.split(".")[0] not in ("torch", "blockcell")]
        try:
            sizes = choose_sizes(None, None, self._model_sizes)
            compare(self._caller, partial(self._run_alone, pieces), sizes, derived)
        except NotCompared as error:
            raise reason or error from error
        if reason is not None:
            raise NotCompared(f"{reason}; its converted parts alone compute the same")
        return Outcome()

    def _compare_model(self, is_whole: bool) -> Outcome:
        """Compare the layer with what the model computes, or layers with what their modules compute in it."""
        if self._hooked_names:
            raise NotCompared(_HOOKS)
        x, results, B = self._find_input()
        is_whole = is_whole and self._fits(x, results[0])
        run, left_out = partial(self._run_model, is_whole), self._operations.keys()
        try:
            compare(self._caller, run, choose_sizes(None, B, self._model_sizes), left_out if is_whole else ())
        except ConversionError as error:
            prefix = f"{self._prefix}{self._pieces[0].names[0]}."
            hint = f", or prefix={prefix!r} for that part alone" if is_whole and prefix != "." else ""
            raise ConversionError(f"{error}{hint}") from None
        remarks = [f"compared for B = {B} alone, which the model fixes"] if B else []
        return Outcome([*(self._more_operations if is_whole else left_out)], remarks)

    def _fits(self, x: Array, result: Array) -> bool:
        """Return whether the model's input and result have the shapes that x and y of the only layer have."""
        layer = self._pieces[0].layer
        if not (x.ndim == result.ndim == 3 and x.shape[2] == layer.input_size and x.dtype.kind == "f"):
            return False
        return result.shape[2] == layer.output_size and {*result.shape[:2]} == {*x.shape[:2]}

    def _find_operations(self, x: Array, results: Sequence[Array], events: Sequence[_Event]) -> None:
        """Name what the forward of a model does to the arrays on their way to the layers and from them.

        An array is known if it is the model's input or what a module gave, perhaps with its axes in another order. A
        module without weights has a label, as it is not among those that are left out anyway.
        """
        calls_of_pieces = [self._calls(piece, events) for piece in self._pieces]
        all_calls = [call for calls in calls_of_pieces for call in calls]
        returned: dict[_Key, str | None] = dict.fromkeys(
            key for a in (x, *(c.y for c in all_calls)) for key in _keys(a)
        )
        arguments = returned | dict.fromkeys(key for call in all_calls for key in _keys_of_permutations(call.y))
        for event in (event for event in events if event.name not in self._piece_names):
            module = self._modules[event.name]
            has_weights = any(True for _ in itertools.chain(module.parameters(), module.buffers()))
            label = None if has_weights else f"{event.name} ({type(module).__name__})"
            keys_entering = {key for arrays in event.entering for array in arrays for key in _keys(array)}
            for array in event.leaving:
                if has_weights or keys_entering.isdisjoint(_keys(array)):
                    for key in _keys_of_permutations(array):
                        returned.setdefault(key, label)
                        arguments.setdefault(key, label)
        states = {key for call in all_calls for array in call.last for key in _keys(array)}
        arguments |= dict.fromkeys(states)
        for piece, calls in zip(self._pieces, calls_of_pieces, strict=True):
            labels: list[str | None] = [] if calls else [f"what its forward does with {piece.label}"]
            for number, call in enumerate(calls):
                labels.append(arguments.get(_keys(call.x)[0], f"operations of its forward before {piece.label}"))
                if piece.state is None and any(array.any() for array in call.state):
                    labels.append(f"the state from which {piece.label} starts")
                elif number:
                    labels.append(f"that {piece.label} is called more than once")
            self._operations |= dict.fromkeys(label for label in labels if label)
        behind = f"operations of its forward behind {events[-1].name!r}" if events else "operations of its forward"
        label = returned.get(_keys(results[0])[0], behind)
        self._operations |= {label: None} if label else {}
        if not all(_keys(result)[0] in returned.keys() | states for result in results[1:]):
            self._more_operations[behind] = None

    # -------------------------------------------------------------------------------------------------------- runs
    def _find_input(self) -> tuple[Array, list[Array], int | None]:
        """Run the model on the first kind of input that it takes; return B, too, if the model fixes it to 1."""
        named = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
        arguments = inspect.signature(self._model.forward).parameters.values()
        names = [a.name for a in arguments if a.default is inspect.Parameter.empty and a.kind in named]
        if len(names) > 1:
            raise NotCompared(f"its forward needs {' and '.join(names)}")
        T, B, _ = choose_sizes(None, None, self._model_sizes)[0]
        first_error = None
        for rows in (B, 1):
            for kind in self._possible_inputs():
                if rows == 1 or "B" in kind.axes:
                    self._input = kind
                    try:
                        return *self._run(T, rows, 0, 1.0)[:2], (1 if rows == 1 else None)
                    except NotCompared as error:
                        first_error = first_error or error
        raise first_error or NotCompared("it takes no input that is known")

    def _possible_inputs(self) -> list[_Input]:
        """Return kinds of input that the model may take: ids if it has an Embedding, and features of its modules."""
        modules = self._modules.values()
        axes = ["BT", "TB"] if any(map(self._is_batch_first, self._pieces)) else ["TB", "BT"]
        embeddings = [m for m in modules if isinstance(m, (torch.nn.Embedding, torch.nn.EmbeddingBag))]
        inputs = []
        if embeddings:
            size = min(module.num_embeddings for module in embeddings)
            padding_ids = [module.padding_idx for module in embeddings if module.padding_idx is not None]
            inputs = [_Input(form, size, *padding_ids[:1]) for form in (*axes, "T")]
        sizes = dict.fromkeys(getattr(module, name, None) for module in modules for name in _SIZES)
        forms = f"{axes[0]}F", f"{axes[1]}F", "BFT", "TF"
        return inputs + [_Input(form, size) for size in sizes if isinstance(size, int) for form in forms]

    def _run(self, T: int, B: int, seed: int, scale: float) -> tuple[Array, list[Array], list[_Event]]:
        """Run the model; return its input, the tensors of its result, and what happened at its modules."""
        self._restore()
        x = self._tensor(self._input.draw(T, B, seed, scale))
        array = _arrays(x)[0]
        with self._recorded() as events:
            is_sequential = type(self._model) is torch.nn.Sequential
            run = partial(_run_sequence, self._model) if is_sequential else self._model
            results = _arrays(_call("its forward", run, x))
        if not results:
            raise NotCompared("its forward returns no tensor")
        return array, results, events

    def _run_model(self, is_whole: bool, T: int, B: int, seed: int, scale: float) -> list[Crossing]:
        """Return what enters and leaves the model, or each layer's modules in it."""
        x, results, events = self._run(T, B, seed, scale)
        if type(self._model) is not torch.nn.Sequential:
            self._find_operations(x, results, events)
        if is_whole:
            return [self._whole_crossing(x, results[0])]
        crossings = []
        for piece in self._pieces:
            calls = self._calls(piece, events)
            crossings += [self._crossing(piece, call) for call in (calls if len(calls) < 3 else [calls[0], calls[-1]])]
            crossings += [] if calls else self._alone_crossings(piece, T, B, seed, scale)
        return crossings

    def _run_alone(self, pieces: Iterable[Piece], T: int, B: int, seed: int, scale: float) -> list[Crossing]:
        """Return what enters and leaves each layer's modules, without the rest of the model."""
        self._restore()
        return [crossing for piece in pieces for crossing in self._alone_crossings(piece, T, B, seed, scale)]

    def _alone_crossings(self, piece: Piece, T: int, B: int, seed: int, scale: float) -> list[Crossing]:
        """Run the modules of a piece from zeros and from a random state."""
        g = np.random.default_rng([seed, T, B])
        x, piece = g.standard_normal((T, B, piece.layer.input_size)) * scale, piece._replace(state=None)
        calls = [self._call_alone(piece, x, ())]
        if calls[0].last:
            state = [g.uniform(-1, 1, array.shape) for array in calls[0].last]
            with contextlib.suppress(NotCompared):  # a derived class may take no state
                calls.append(self._call_alone(piece, x, state))
        return [self._crossing(piece, call) for call in calls]

    def _call_alone(self, piece: Piece, x: Array, state: Sequence[Array]) -> _Call:
        """Call the modules of a piece with x [T,B,I], cells step by step."""
        first, *others = [self._modules[name] for name in piece.names]
        tensors = tuple(map(self._tensor, state))
        hx: Any = [tensors] if len(tensors) > 1 else tensors
        with self._recorded() as events:
            if self._is_cell(piece):
                for step in x:
                    hx = [_call(piece.label, first, self._tensor(step), *hx)]
            else:
                inputs = x.swapaxes(0, 1) if self._is_batch_first(piece) else x
                result = _call(piece.label, first, self._tensor(inputs), *hx)
                for module in others:
                    result = _call(piece.label, module, _tensors(result)[0])
        calls = self._calls(piece, events)
        if not calls:
            raise NotCompared(f"{piece.label} returns something else than PyTorch's")
        return calls[0]

    def _tensor(self, array: Array) -> Any:
        """Return an array as a tensor where the model has its weights; floating-point numbers get its dtype."""
        dtype = self._weight.dtype if array.dtype.kind == "f" else torch.int64
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._weight.device, dtype)

    @contextlib.contextmanager
    def _recorded(self) -> Iterator[list[_Event]]:
        """Record the calls of modules, but of those within a piece and those that contain one."""
        events: list[_Event] = []
        handles: list[Any] = []
        for name, module in self._modules.items():
            is_outside = not any(_is_within(name, other) or _is_within(other, name) for other in self._piece_names)
            if is_outside or name in self._piece_names:
                handles += _record(name, module, events)
        try:
            yield events
        finally:
            for handle in handles:
                handle.remove()

    # --------------------------------------------------------------------------------------------------- crossings
    def _is_cell(self, piece: Piece) -> bool:
        return isinstance(self._modules[piece.names[0]], RNNCellBase)

    def _is_batch_first(self, piece: Piece) -> bool:
        return any(getattr(self._modules[name], "batch_first", False) is True for name in piece.names)

    def _calls(self, piece: Piece, events: Iterable[_Event]) -> list[_Call]:
        """Return the calls of a piece; calls that continue from the state of the one before are one.

        The result is empty if there is no call, or one with arguments or results of another kind than the layer's.
        """
        events_of = {name: [event for event in events if event.name == name] for name in piece.names}
        kind = len(_state_names(piece.layer)), self._is_cell(piece), self._is_batch_first(piece)
        calls: list[_Call] = []
        for first, last in zip(events_of[piece.names[0]], events_of[piece.names[-1]], strict=False):
            call = _read_call(first, last, *kind)
            if call is None:
                return []
            if calls and call.state and all(map(np.array_equal, call.state, calls[-1].last)):
                before = calls.pop()
                x, y = (np.concatenate(pair) for pair in ((before.x, call.x), (before.y, call.y)))
                call = _Call(x, before.state, y, call.last)
            calls.append(call)
        return calls

    def _whole_crossing(self, x: Array, result: Array) -> Crossing:
        """Return what enters and leaves the model, with the batch first if the layer is nearer to the model then."""
        piece = self._pieces[0]
        layer, options = piece.layer, {} if piece.state is None else {"state": piece.state}
        x, is_batch_first, differences = x.astype(layer.dtype), self._is_batch_first(piece), {}
        for batch_first in (is_batch_first, not is_batch_first):
            y = layer(x, **options, batch_first=batch_first)[0]
            differences[batch_first] = float(np.abs(y - result).max()) if y.shape == result.shape else np.inf
        options |= {"batch_first": min(differences, key=lambda key: differences[key])}
        return Crossing("the model", layer, x, {"y": result}, lambda y, _: {"y": y}, options)

    def _crossing(self, piece: Piece, call: _Call) -> Crossing:
        """Return what enters and leaves the modules of a piece in a call."""
        layer, state = piece.layer, piece.state
        if state is None and call.state:
            arrays_of_cells = zip(*(array.astype(layer.dtype) for array in call.state), strict=True)
            cells = [dict(zip(_state_names(layer), arrays, strict=True)) for arrays in arrays_of_cells]
            state = read_initial_state(self._caller, layer, nest_states(layer, iter(cells)))
        names = _state_names(layer) if call.last else ()

        def read(y: Array, last: Any) -> dict[str, Array]:
            return {"y": y} | {name: np.stack([getattr(cell, name) for cell in cell_states(last)]) for name in names}

        expected = {"y": call.y} | dict(zip(names, call.last, strict=True))
        options = {} if state is None else {"state": state}
        return Crossing(piece.label, layer, call.x.astype(layer.dtype), expected, read, options)


def _record(name: str, module: torch.nn.Module, events: list[_Event]) -> list[Any]:
    """Record the calls of a module from now on; return the handles of the hooks that do so."""
    begun: list[_Event] = []

    def enter(_: Any, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> None:  # before it may change them
        values = {"input": None, "hx": None} | dict(zip(("input", "hx"), arguments, strict=False)) | dict(options)
        x, state, *others = *values.values(), *arguments[2:]
        is_packed = isinstance(x, PackedSequence)
        lengths = pad_packed_sequence(x)[1] if is_packed else torch.zeros(1)
        is_plain = all(other is None for other in others) and bool((lengths == lengths[0]).all())
        begun.append(_Event(name, [*map(_arrays, (x, state, others))], [], is_packed, is_plain))

    def leave(_module: Any, _arguments: Any, result: Any) -> None:
        events.append(begun.pop()._replace(leaving=_arrays(result)))

    entering = module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
    return [entering, module.register_forward_hook(leave)]


def _names_with_hooks(module: torch.nn.Module) -> list[str]:
    """Return the names of the modules that have hooks of the user's own around their forward."""
    from torch.nn.modules import module as modules

    is_global = bool(modules._global_forward_hooks or modules._global_forward_pre_hooks)
    names = []
    for name, part in module.named_modules():
        hooks = (*part._forward_pre_hooks.values(), *part._forward_hooks.values())
        if is_global or any(not str(getattr(hook, "__module__", "")).startswith("torch.") for hook in hooks):
            names.append(name)
    return names


def _copy_for_inference(module: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of a model in inference."""
    if any(map(torch.nn.parameter.is_lazy, module.parameters())):
        raise NotCompared("it has parameters without values")
    if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
        raise NotCompared("it is compiled by torch.jit: pass the module that was")
    tensors = [tensor for part in module.modules() for tensor in _tensors([*vars(part).values()])]
    memo = {id(tensor): tensor.detach().clone() for tensor in tensors if not tensor.is_leaf}
    try:
        model = copy.deepcopy(module, memo).eval()
    except Exception as error:  # whatever the user's attributes raise
        raise NotCompared(f"it cannot be copied: {error}") from error
    for part in model.modules():
        part._compiled_call_impl = None
        if type(part).__module__.startswith("blockcell."):
            vars(part).pop("quantization", None)  # layers are quantized after the conversion
    return model


def _is_within(name: str, other: str) -> bool:
    """Return whether a module of this name is the other one, or in it."""
    return not other or f"{name}.".startswith(f"{other}.")


def _call(label: str, function: Any, x: Any, *others: Any) -> Any:
    """Call the user's code."""
    try:
        return function(x, *others)
    except Exception as error:
        message = str(error).strip().partition("\n")[0]
        shape = tuple(x.shape)
        raise NotCompared(f"{label} raises {type(error).__name__} for x of shape {shape}: {message}") from error


def _run_sequence(sequence: torch.nn.Sequential, value: Any) -> Any:
    """Run the modules of a Sequential. One that takes no tuple gets the first tensor of it: y of an LSTM."""
    for module in sequence:
        if type(module) is torch.nn.Sequential:
            value = _run_sequence(module, value)
            continue
        try:
            result = module(value)
        except Exception:  # whatever a module raises for a tuple
            if not isinstance(value, tuple):
                raise
            result = module(_tensors(value)[0])
        value = result
    return value


def _tensors(value: Any) -> list[Any]:
    """Return all tensors of an argument or a result, those of packed sequences padded."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, PackedSequence):
        return [pad_packed_sequence(value)[0]]
    if dataclasses.is_dataclass(value):
        value = vars(value)
    members = value.values() if isinstance(value, Mapping) else value if isinstance(value, (tuple, list)) else ()
    return [tensor for member in members for tensor in _tensors(member)]


def _arrays(value: Any) -> list[Array]:
    """Return copies of all tensors of an argument or a result."""
    tensors = [tensor.detach().cpu() for tensor in _tensors(value)]
    return [np.array((t.float() if t.dtype == torch.bfloat16 else t).numpy()) for t in tensors]


def _read_call(first: _Event, last: _Event, state_count: int, is_cell: bool, is_batch_first: bool) -> _Call | None:
    """Read a call of a module, or of a chain of them from the first to the last one, with time and batch first.

    The result is None if there are arguments or results of another kind than those of the layer.
    """
    (inputs, state, _), results = first.entering, last.leaving
    if len(inputs) != 1 or not (first.is_plain and results) or results[0].shape[:-1] != inputs[0].shape[:-1]:
        return None
    x, y = inputs[0], results[0]
    missing_axes = 3 - is_cell - x.ndim  # 1 without a batch
    if missing_axes not in (0, 1):
        return None
    if missing_axes:
        x, y = (array[..., None, :] for array in (x, y))
    if is_cell:
        x, y = x[None], y[None]
    elif is_batch_first and not (first.is_packed or missing_axes):
        x, y = x.swapaxes(0, 1), y.swapaxes(0, 1)
    if first is not last:
        return _Call(x, (), y, ())
    states = [_read_state(arrays, state_count, x.shape[1]) for arrays in (state, results if is_cell else results[1:])]
    return None if state and not states[0] else _Call(x, states[0], y, states[1])


def _read_state(arrays: Sequence[Array], state_count: int, B: int) -> tuple[Array, ...]:
    """Return the arrays of a state as [num_layers * D,B,.], or none of them if they are something else."""
    if len(arrays) != state_count or any(a.ndim == 0 or not a.size or a.size % (B * a.shape[-1]) for a in arrays):
        return ()
    return tuple(array.reshape(-1, B, array.shape[-1]) for array in arrays)


_Key = tuple[tuple[int, ...], int]


def _keys(array: Array) -> list[_Key]:
    """Return what an array has in common with its copies, then with those in another layout.

    The first two axes may be in either order; one of size 1 may be missing.
    """
    layouts = [array, array.swapaxes(0, 1)] if array.ndim > 1 else [array]
    layouts += [array[:, None]] if array.ndim == 2 else [a[0] for a in layouts if array.ndim == 3 and len(a) == 1]
    return [(layout.shape, hash(layout.tobytes())) for layout in layouts]


def _keys_of_permutations(array: Array) -> list[_Key]:
    """Return the keys of an array with its axes in every order."""
    axes = range(array.ndim)
    orders = itertools.permutations(axes) if array.ndim < 4 else [tuple(axes)]
    return [key for order in orders for key in _keys(array.transpose(order))]


def _state_names(layer: Layer) -> tuple[str, ...]:
    """Return the names of the states of a layer's cells in PyTorch's order; chains of several modules have none."""
    sizes = state_sizes(next(iter(layer._leaves().values())))
    return tuple(name for name in ("h", "cs") if name in sizes)
