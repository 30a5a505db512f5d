"""Reading the JSON of Keras 2 and 3: a layer or a model as `KerasLayer` describes it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..activations import Activation
from ..errors import FormatError, short
from .keras_description import (
    CELLS,
    CUDNN,
    CUDNN_CONFIG,
    KERAS_2_HARD_SIGMOID,
    LONGEST_NAME,
    KerasLayer,
    known_activation,
)

MODELS = ("Sequential", "Functional", "Model")
_MOST_NESTED = 2**4  # models and wrappers, one within the other


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
