"""`KerasLayer`, the description of a layer or a model of Keras, whether it is in memory or in a file.

`describe` describes those in memory, and `describe_config` those in the JSON of Keras 2 and 3. `keras_files` adds the
arrays of files, and `keras_layers` converts what is described.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..activations import PARAMETERS, Activation
from ..errors import FormatError, short
from .shared import is_of

CELLS = ("LSTM", "GRU", "SimpleRNN")  # an RNN has one or several of these with "Cell" behind the name
WITHOUT_EFFECT = (  # in inference
    "ActivityRegularization",
    "AlphaDropout",
    "Dropout",
    "GaussianDropout",
    "GaussianNoise",
    "Identity",
    "InputLayer",
    "Masking",
    "SpatialDropout1D",
)
CUDNN = {"CuDNNLSTM": "LSTM", "CuDNNGRU": "GRU"}
"""Keras 2's layers for cuDNN, and what computes the same, with arrays in another layout."""
CUDNN_CONFIG = {"activation": "tanh", "recurrent_activation": "sigmoid", "use_bias": True, "reset_after": True}
KERAS_2_HARD_SIGMOID = ("hard_sigmoid", 0.2, 0.5)
LONGEST_NAME = 2**8  # of a layer, with the names of the models that it is in
_PACKAGES = "keras", "tf_keras", "tensorflow"
MODELS = ("Sequential", "Functional", "Model")
_MOST_NESTED = 2**4  # models and wrappers, one within the other


class KerasLayer(NamedTuple):
    """A layer or a model of Keras."""

    kind: str
    """The name of its class."""
    name: str
    config: Mapping[str, Any]
    """What its get_config() returns in Keras 2 and 3. Activations are as `known_activation` gives them."""
    arrays: Sequence[Any] = ()
    """What its get_weights() returns; empty for kinds that have no counterpart here."""
    layers: tuple[KerasLayer, ...] = ()
    """The layers of a model, the two of a Bidirectional, the cells of an RNN, or the one of a TimeDistributed."""
    is_model: bool = False
    module: str = ""
    """The module of a class that is not one of Keras' own; empty for Keras' own."""
    has_mask: bool | None = None
    """Whether the call of a recurrent layer in a model gets a mask; None if that is not known."""
    instance: Any = None
    """The layer or the model itself, if it is in memory."""

    @property
    def is_cell(self) -> bool:
        """Whether it is one of Keras' LSTM, GRU and SimpleRNN, or a cell of these."""
        return self.kind.removesuffix("Cell") in CELLS and not self.module

    @property
    def is_recurrent(self) -> bool:
        """Whether it is a cell, or named like a layer of Keras that has cells."""
        return self.is_cell or self.kind in ("RNN", "Bidirectional")

    @property
    def cells(self) -> tuple[KerasLayer, ...]:
        """The layers that have the weights: of an RNN its cells, one on the other, else the layer itself."""
        return self.layers if self.kind == "RNN" and not self.module else (self,)


def known_activation(value: Any, *, is_older: bool) -> Any:
    """Return the activation of a config as layers here have it, or the value itself if they have none.

    `is_older` says whether the function is Keras 2's, whose hard_sigmoid is another.
    """
    if value is None:
        return "linear"
    return KERAS_2_HARD_SIGMOID if value == "hard_sigmoid" and is_older else value


def tensors_of(nodes: Any, *, with_masks: bool = False) -> Iterator[tuple[str, int]]:
    """Yield the results that nodes of a model's config read: the layer and the index of its result."""
    waiting = [nodes]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Mapping):
            waiting += [value for name, value in part.items() if with_masks or name != "mask"][::-1]
        elif isinstance(part, (list, tuple)):
            if [type(item) for item in part[:3]] == [str, int, int]:  # with the number of the layer's call
                yield part[0], part[2]
                part = part[3:]
            waiting += part[::-1]


# ------------------------------------------------------------------------------------------ layers and models in memory
def is_model(source: Any) -> bool:
    """Return whether an object is a model of Keras: it has a list of layers."""
    return isinstance(getattr(source, "layers", None), (list, tuple))


def describe(source: Any) -> KerasLayer:
    """Describe a layer or a model of Keras."""
    kind, name = type(source).__name__, getattr(source, "name", "")
    if is_model(source):
        layers = tuple(map(describe, source.layers))
        call = getattr(type(source), "call", None)
        has_own_call = call is not None and str(call.__module__).split(".")[0] not in _PACKAGES
        is_sequential = any(_is_of_keras(base, "Sequential") for base in type(source).__mro__) and not has_own_call
        kind = "Sequential" if is_sequential else "Model" if kind == "Sequential" else kind
        try:
            config = {} if has_own_call else source.get_config()  # which does not tell what another call() computes
        except NotImplementedError:
            config = {}
        return KerasLayer(kind, name, config, layers=layers, is_model=True, instance=source)
    config = source.get_config()
    if not _is_of_keras(type(source), kind):
        return KerasLayer(kind, name, config, module=type(source).__module__, instance=source)
    names = [key for key in ("activation", "recurrent_activation") if key in config]
    config = config | {key: _activation(source, key, config[key]) for key in names}
    if kind in CUDNN:
        kind, config = CUDNN[kind], config | CUDNN_CONFIG
    has_weights = kind.removesuffix("Cell") in CELLS or kind == "Dense"
    arrays = source.get_weights() if has_weights else ()
    return KerasLayer(kind, name, config, arrays, _inner_layers(source, kind), instance=source)


def _inner_layers(source: Any, kind: str) -> tuple[KerasLayer, ...]:
    """Describe the layers in one of Keras' own layers."""
    if kind == "Bidirectional":
        return describe(source.forward_layer), describe(source.backward_layer)
    if kind == "TimeDistributed":
        return (describe(source.layer),)
    if kind != "RNN":
        return ()
    is_stacked = _is_of_keras(type(source.cell), "StackedRNNCells")
    return tuple(map(describe, source.cell.cells if is_stacked else [source.cell]))


def _activation(source: Any, key: str, value: Any) -> Any:
    """Return an activation of a config as layers here have it; a function of one's own as a mapping with its module."""
    function = getattr(source, key, None)
    module = getattr(function, "__module__", None)
    if not isinstance(value, str):
        return value
    if not _is_of_keras(function, value):
        return {"class_name": "function", "config": value, "module": module} if value in PARAMETERS else value
    package = str(module).split(".")[0]
    is_newer = package == "keras" and not str(getattr(sys.modules[package], "__version__", "")).startswith("2.")
    return known_activation(value, is_older=not is_newer)


def _is_of_keras(thing: Any, name: str) -> bool:
    """Return whether an object is the class or function of that name of Keras' own."""
    return is_of(_PACKAGES, thing, name)


# ------------------------------------------------------------------------------------------- layers and models in JSON
class Version(NamedTuple):
    """The version of Keras that wrote a file."""

    major: int
    minor: int
    is_of_tensorflow: bool = False
    """Whether it is 2.2.4-tf, for example, of TensorFlow's own copy."""

    @classmethod
    def parse(cls, text: str) -> Version:
        """Parse a version such as 2.15.0."""
        match = re.match(r"(\d{1,4})(?:\.(\d{1,4}))?", text)
        if match is None:
            raise FormatError(f"the version of Keras is {short(text)}; expected one such as 2.15.0")
        if int(match[1]) < 2:
            raise FormatError("it is of Keras 1; load it with Keras 2, and save it again")
        return cls(int(match[1]), int(match[2] or 0), text.endswith("-tf"))


def snake_case(name: str) -> str:
    """Return the name that Keras makes of a class's: simple_rnn of SimpleRNN."""
    name = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", re.sub(r"\W+", "", name))
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()


def describe_config(entry: Any, version: Version, depth: int = 0) -> KerasLayer:
    """Describe a layer or a model, without its arrays; `depth` is the number of those that it is in."""
    if depth > _MOST_NESTED:
        raise FormatError(f"it has layers within more than {_MOST_NESTED} others")
    entry = _mapping("a layer", entry)
    kind, config = entry.get("class_name"), entry.get("config")
    if not isinstance(kind, str):
        raise FormatError(f"a layer has the class_name {short(kind)}; expected a text")
    if kind == "Sequential" and isinstance(config, list):  # before Keras 2.2.3
        config = {"layers": config}
    config = _mapping(f"the config of {kind}", config)
    name = entry.get("name") or config.get("name") or snake_case(kind)
    if not isinstance(name, str) or len(name) > LONGEST_NAME:
        expected = f"expected a text of at most {LONGEST_NAME} letters"
        raise FormatError(f"a layer of class {short(kind)} has the name {short(name)}; {expected}")
    module = _other_module(entry)
    if isinstance(entries := config.get("layers"), list):
        layers = tuple(describe_config(inner, version, depth + 1) for inner in entries)
        if module or kind not in MODELS:  # its call() may be another
            return KerasLayer(kind, name, {}, layers=layers, is_model=True)
        named_entries = [dict(inner, name=layer.name) for inner, layer in zip(entries, layers, strict=True)]
        return KerasLayer(kind, name, config | {"layers": named_entries}, layers=layers, is_model=True)
    if module:
        return KerasLayer(kind, name, config, module=module)
    return _describe_layer(kind, name, config, version, depth)


def _describe_layer(kind: str, name: str, config: dict[str, Any], version: Version, depth: int) -> KerasLayer:
    """Describe one of Keras' own layers, with the defaults of its version."""
    label = f"{kind} {name!r}"
    if kind in CUDNN:
        kind, config = CUDNN[kind], config | CUDNN_CONFIG
    inner: tuple[KerasLayer, ...] = ()
    is_cell = kind.removesuffix("Cell") in CELLS
    defaults: dict[str, Any] = {}
    if is_cell or kind == "Dense":
        defaults |= {"use_bias": True, "activation": "tanh" if is_cell else "linear"}
    if is_cell and "SimpleRNN" not in kind:
        if version.is_of_tensorflow and version < (2, 3) and "recurrent_activation" not in config:
            raise FormatError(f"{label} has no recurrent_activation, and TensorFlow 1 and 2 have other defaults")
        defaults["recurrent_activation"] = default_gates(version)
    if is_cell or kind == "RNN":
        defaults |= {"return_sequences": False, "go_backwards": False}
    if kind in ("GRU", "GRUCell"):
        defaults["reset_after"] = None  # the bias tells
    if kind == "Activation":
        defaults["activation"] = "linear"
    if kind == "Softmax":
        defaults["axis"] = -1
    if kind == "Bidirectional":
        defaults["merge_mode"] = "concat"
        fw = describe_config(config.get("layer"), version, depth + 1)
        turned = not fw.config.get("go_backwards", False)
        bw = fw._replace(config={**fw.config, "go_backwards": turned})
        other = config.get("backward_layer")
        inner = fw, describe_config(other, version, depth + 1) if other else bw
    elif kind == "TimeDistributed":
        inner = (describe_config(config.get("layer"), version, depth + 1),)
    elif kind == "RNN":
        cell = _mapping(f"the cell of {label}", config.get("cell"))
        cells = [cell]
        if cell.get("class_name") == "StackedRNNCells" and not _other_module(cell):
            cells = _mapping(f"the cell of {label}", cell.get("config")).get("cells", [])
        if not isinstance(cells, list) or not cells:
            raise FormatError(f"{label} has no list of cells")
        inner = tuple(describe_config(part, version, depth + 1) for part in cells)
    config = defaults | config
    for key in defaults:
        value = config[key]
        if key in ("activation", "recurrent_activation"):
            config[key] = known_activation(value, is_older=version.major < 3)
        elif isinstance(defaults[key], bool) and not isinstance(value, bool):
            raise FormatError(f"{label} has {key}={short(value)}; expected true or false")
        elif key == "reset_after" and not (value is None or isinstance(value, bool)):
            raise FormatError(f"{label} has reset_after={short(value)}; expected true or false")
    units = config.get("units")
    if (is_cell or kind == "Dense") and (isinstance(units, bool) or not isinstance(units, int) or units < 0):
        raise FormatError(f"{label} has {short(units)} units; expected a whole number")
    return KerasLayer(kind, name, config, layers=inner)


def default_gates(version: Version) -> Activation:
    """Return the default recurrent_activation in a version of Keras."""
    return KERAS_2_HARD_SIGMOID if version < (2, 3) and not version.is_of_tensorflow else "sigmoid"


def _mapping(label: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FormatError(f"{label} is {short(value)}; expected a mapping")
    return value


def _other_module(entry: Mapping[str, Any]) -> str:
    """Return the module of a class that is not one of Keras' own; empty for Keras' own."""
    module, registered = entry.get("module"), entry.get("registered_name")
    parts = str(module).split(".")
    is_own = module is None or parts[0] in ("keras", "tf_keras") or (parts[0] == "tensorflow" and "keras" in parts)
    if is_own and registered in (None, entry.get("class_name")):
        return ""
    return str(module or registered)
