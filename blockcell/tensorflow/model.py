"""`open`: which of TensorFlow's formats a path is, and what all of them become."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import cached_property

from ..errors import FormatError, plain
from . import checkpoint, graphs
from .cells import Cells, find_cells
from .graphs import Graph
from .mapped import File, Folder
from .schema import GRAPH, SAVED_MODEL
from .table import is_table
from .tensors import Stored
from .text import binary, unescaped
from .variables import Variables

_EXPECTED = (
    "expected a checkpoint (its name without .index, or a folder with a file 'checkpoint'), a SavedModel's folder,"
    " a frozen graph (.pb, .pbtxt), a .meta or a .pbmm"
)
_OTHERS = (".h5", ".hdf5", ".keras", ".onnx", ".pt", ".pth", ".npz", ".safetensors")
_HINT = (
    "from_keras, from_torch and from_onnx of blockcell.convert read such models, layer.save(out) saves a layer, and"
    " blockcell.load reads what it wrote"
)
_CHECKPOINT_PATH = re.compile(
    rb"""^[ \t]*model_checkpoint_path[ \t]*:[ \t]*(["'])((?:(?!\1)[^\\\n]|\\.)*)\1""", re.MULTILINE
)
_OLD = (
    "is a checkpoint in V1 format, of TensorFlow before 0.12; load it with tf.train.load_checkpoint, and pass its"
    " variables to blockcell.convert.from_tf1"
)
_MOST_BYTES = 2**20  # of the file 'checkpoint'


class Model:
    """An opened checkpoint, SavedModel or graph of TensorFlow.

    Attributes
    ----------
    path : str
        The path that was opened.
    graphs : list of Graph
        Empty for a checkpoint without a ``.meta`` beside it; one for each set of tags of a SavedModel; else one.
    variables : Variables
        Names and arrays, read on demand. For a frozen graph, its constants by the names of their nodes.
    """

    def __init__(self, path: str, graphs: Sequence[Graph], variables: Variables | None) -> None:
        self.path = path
        self.graphs = list(graphs)
        self.frozen = variables is None
        """Whether the variables are constants of the graph."""
        self._variables = variables

    @cached_property
    def variables(self) -> Variables:
        return _constants(self.graphs) if self._variables is None else self._variables

    @cached_property
    def cells(self) -> Cells:
        """The RNNs, LSTMs and GRUs in the graphs or the checkpoint, by names."""
        return find_cells(self.graphs, self._variables)

    def __repr__(self) -> str:
        parts = [*self.graphs, self.cells, self.variables]
        return "\n".join([plain(f"<model {self.path}>"), *(f"  {part!r}" for part in parts)])


def open(path: str | os.PathLike[str]) -> Model:
    """Open a checkpoint, SavedModel or graph of TensorFlow.

    Parameters
    ----------
    path : path_like
        A checkpoint, by its name without suffix, by that of one of its files or as a folder with a file
        ``checkpoint``; a SavedModel's folder; a frozen graph (``.pb``, ``.pbtxt``); a ``.meta``; a ``.pbmm``. The
        graph of a checkpoint is taken from the ``.meta`` beside it, if there is one.

    Returns
    -------
    Model
        Its files are mapped into memory: do not change them while it is in use.

    Raises
    ------
    FormatError
        A file is damaged, or none of these, or a symbolic link out of the folder that `path` names or that contains it.
        Some damage shows only when the damaged part is read.
    OSError
        A file is missing or cannot be read.
    """
    name = os.fspath(path)
    if not isinstance(name, str):
        raise TypeError(f"open: path is of type {type(path).__name__}; expected text or a path")
    if os.path.isdir(name):
        return Model(name, *_read_folder(name))
    return Model(name, *_read_file(name))


def _read_folder(path: str) -> tuple[list[Graph], Variables]:
    """Read a SavedModel, or the checkpoint that a file 'checkpoint' names."""
    folder = Folder(path)
    saved, text, state = (os.path.join(path, name) for name in ("saved_model.pb", "saved_model.pbtxt", "checkpoint"))
    if os.path.exists(saved) or os.path.exists(text):
        file = folder.file(saved) if os.path.exists(saved) else binary(folder.file(text), SAVED_MODEL)
        return graphs.read_saved_model(file), _read_variables(folder, os.path.join(path, "variables", "variables"))
    if os.path.exists(state):
        return _read_prefix(folder, _last_checkpoint(path, folder.file(state)))
    endings = (".index", ".pb", ".pbtxt", ".meta", ".pbmm", *_OTHERS)
    names = [name for name in sorted(os.listdir(path)) if name.lower().endswith(endings)]
    hint = f"there is {names[0]}: open that" if names else _EXPECTED
    raise FormatError(f"{path} has neither 'saved_model.pb' nor 'checkpoint'; {hint}")


def _read_file(name: str) -> tuple[list[Graph], Variables | None]:
    """Read a checkpoint by its name or by one of its files, or a graph, with what lies beside it."""
    folder, exists = Folder(os.path.dirname(name)), os.path.exists(name)
    prefix = re.sub(r"\.(index|data-\d{5}-of-\d{5})\Z", "", name)
    if prefix != name or (not exists and os.path.exists(f"{name}.index")):
        return _read_prefix(folder, prefix)
    if not exists and os.path.exists(f"{name}.meta"):
        raise FileNotFoundError(2, "there is a .meta, but no .index and no data", name)
    if os.path.basename(name) in ("saved_model.pb", "saved_model.pbtxt") and exists:
        return _read_folder(os.path.dirname(name))
    file = File(name)
    if name.endswith(".meta"):
        return [graphs.read_meta(file)], _read_variables(folder, name.removesuffix(".meta"))
    if is_table(file):
        raise FormatError(f"{name} {_OLD}")
    if name.endswith(".pbmm"):
        return [graphs.read_package(file)], None
    if name.endswith((".pb", ".pbtxt")):
        return [graphs.read(binary(file, GRAPH) if name.endswith("txt") else file)], None
    raise FormatError(f"{name} is of an unknown kind; {_HINT if name.lower().endswith(_OTHERS) else _EXPECTED}")


def _read_prefix(folder: Folder, prefix: str) -> tuple[list[Graph], Variables]:
    """Read the checkpoint with a name, and its graph if it has one."""
    name = f"{prefix}.meta"
    graph = [graphs.read_meta(folder.file(name))] if os.path.exists(name) else []
    return graph, checkpoint.read(folder, prefix)


def _read_variables(folder: Folder, prefix: str) -> Variables:
    """Read the variables of the checkpoint with a name; there are none if there is no such checkpoint."""
    return checkpoint.read(folder, prefix) if os.path.exists(f"{prefix}.index") else Variables({}, {})


def _last_checkpoint(folder: str, file: File) -> str:
    """Return the name of the last checkpoint in a folder, by the file 'checkpoint'."""
    if len(file) > _MOST_BYTES:
        raise file.error(_MOST_BYTES, "it goes on", "expected a short text that names a checkpoint")
    match = _CHECKPOINT_PATH.search(file.buffer)
    if match is None:
        raise file.error(0, "it has no model_checkpoint_path", "open the checkpoint by its name without .index")
    name = unescaped(match[2]).decode("utf-8", "replace")
    if os.path.isabs(name) or "\\" in name:  # of the machine that wrote it: the folder may have moved since
        name = re.split(r"[/\\]", name)[-1]
    if not name or "\0" in name or ".." in name.split("/"):
        raise file.error(match.start(2), f"it names {name!r}, outside its folder", "open that by its own name")
    prefix = os.path.join(folder, name)
    if not os.path.exists(f"{prefix}.index"):
        if os.path.isfile(prefix) or "-?????-of-" in name:
            raise FormatError(f"{prefix} {_OLD}")
        raise file.error(match.start(2), f"it names {name!r}, which is not in its folder", "copy that there, too")
    return prefix


def _constants(graphs: Sequence[Graph]) -> Variables:
    """Return the constants of frozen graphs, by the names of their nodes."""
    stored: dict[str, Stored] = {}
    skipped: dict[str, str] = {}
    for graph in graphs:
        for node in graph.nodes.values():
            tensor = graph.constant(node)
            if tensor is None:
                continue
            if tensor.is_readable:
                stored[node.name] = tensor
            else:
                skipped[node.name] = tensor.dtype
    return Variables(stored, skipped)
