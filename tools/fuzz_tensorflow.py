"""Damage files of TensorFlow's, for fuzz.py: bytes anywhere, or so that files are well-formed and say nonsense.

Everything is done with them that the package can: all is read, cells are found, checked and made to layers, and some
are given to `blockcell inspect`. Whatever a checkpoint with changed bytes still gives must be what was saved, bit for
bit: its checksums tell. A layer that is taken from a graph must compute what the graph's nodes do.

`fuzz_rewired_graphs` changes one input of one node, or one whole number, of graphs that are right otherwise.
"""

from __future__ import annotations

import contextlib
import io
import math
import struct
import tempfile
import warnings
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import rewiring
import tf_files
from mutations import Generator, change_bytes, pick
from tf_cells import NAMES, block, checkpoint_of, drawn, inputs, of_all_kinds, write_variables
from tf_composed import GOLDEN, of_other_kinds
from tf_files import BYTES, FIXED32, VARINT, Fields, decode_fields, encode_fields, field, varint
from tf_names import GIVEN, cell_of_keras, one_cell, restoring, write_all, write_saved
from tf_networks import both_directions

from blockcell import FormatError
from blockcell.command import main
from blockcell.tensorflow import open as opened
from blockcell.tensorflow.mapped import File
from blockcell.tensorflow.table import Table

Change = Callable[[Generator, bytes], bytes]
NUMBERS = [0, 1, 2, 3, 4, 7, 14, 19, 63, 127, 128, 255, 2**16, 2**20, 2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63 - 1,
           2**63, 2**64 - 1]  # fmt: skip
FLOATS = [0.0, -0.0, 1.0, -1.0, 0.5, 3.0, 1e-40, 1e30, math.inf, -math.inf, math.nan]
TEXTS = [b"{", b"}", b"[", b"]", b"<", b":", b'"', b"'", b"#", b"\n", b"-inf", b"nan", b"1e999", b"DT_STRING",
         b"{" * 200, b"9" * 5000, b"value {", b"list: [1, 2]", b"\\377", b"-1", b""]  # fmt: skip
DATA = [b"", b"\0", b"a", b"\xff", b"kernel", b"Const", b"f", b"\x08\x01", b"\x12\x00" * 40, b"\x80" * 11, bytes(64),
        b"memmapped_package://.", b"../x", "\u00e4".encode()]  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ messages
def fields_in(data: int | bytes) -> Fields:
    """Return the fields of a message, or none if the value of a field is no message."""
    try:
        return decode_fields(data) if isinstance(data, bytes) else []
    except ValueError:
        return []


def draw_value(g: Generator, wire_type: int) -> int | bytes:
    """Draw a value for a field of a wire type."""
    if wire_type == VARINT:
        return pick(g, NUMBERS)
    if wire_type == BYTES:
        return pick(g, DATA)
    return struct.pack("<f" if wire_type == FIXED32 else "<d", pick(g, FLOATS))


def change_message(g: Generator, data: bytes) -> bytes:
    """Change one field, in a message or in a message that is in it; every other field keeps its bytes."""
    fields = fields_in(data)
    if not fields:
        return pick(g, DATA)
    k = int(g.integers(len(fields)))
    number, wire_type, value = fields[k]
    if wire_type == BYTES and isinstance(value, bytes) and fields_in(value) and g.integers(8):
        fields[k] = number, BYTES, change_message(g, value)
        return encode_fields(fields)
    match g.integers(8):
        case 0:
            del fields[k]
        case 1:
            fields.insert(k, pick(g, fields))
        case 2:
            fields[k] = int(g.integers(1, 18)), wire_type, value
        case 3:
            fields[k] = number, VARINT, draw_value(g, VARINT)
        case 4:
            nested = value if wire_type == BYTES and isinstance(value, bytes) else b""
            for _ in range(g.integers(1, 300)):
                nested = field(number, nested)
            fields[k] = number, BYTES, nested
        case 5 if wire_type == BYTES and isinstance(value, bytes) and value:
            fields[k] = number, BYTES, value[: g.integers(len(value))] * int(g.integers(1, 3))
        case _:
            fields[k] = number, wire_type, draw_value(g, wire_type)
    return encode_fields(fields)


# -------------------------------------------------------------------------------------------------------------- tables
def change_table(g: Generator, data: bytes) -> bytes:
    """Change an entry of a table, which stays well-formed, with checksums that are right."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        items = [(entry.key, bytes(entry.value.view)) for entry in Table(File(file.name)).entries()]
    k = int(g.integers(len(items)))
    key, value = items[k]
    match g.integers(6):
        case 0:
            del items[k]
        case 1:
            items[k] = pick(g, items)[0], value
        case 2:
            items[k] = key + pick(g, DATA), value
        case _:
            items[k] = key, change_message(g, value)
    if g.integers(10):
        items = sorted(dict(items).items())
    return tf_files.table(dict(items), int(g.integers(1, 30)), int(g.integers(1, 20)))


def change_package(g: Generator, data: bytes) -> bytes:
    """Change the directory of a memmapped package, and sometimes where it starts."""
    start = int.from_bytes(data[-8:], "little")
    message = change_message(g, data[start:-8])
    return data[:start] + message + (start if g.integers(4) else NUMBERS[g.integers(20)]).to_bytes(8, "little")


def change_text(g: Generator, data: bytes) -> bytes:
    """Put words in other places of a text."""
    words = data.split(b" ")
    for _ in range(g.integers(1, 4)):
        k, donor = g.integers(len(words), size=2)
        words[k] = words[donor] if g.integers(3) else pick(g, TEXTS)
    return b" ".join(words)


def add_tensor(g: Generator, data: bytes) -> bytes:
    """Add a constant of packed varints and such to an otherwise good graph."""
    number = int(g.integers(4, 18))
    values = b"".join(varint(pick(g, NUMBERS)) for _ in range(g.integers(40)))
    sizes = [int(size) for size in g.choice([0, 1, 2, 3, 2**10, 2**20, 2**31, 2**40, 2**62], g.integers(4))]
    value = field(1, int(g.integers(26))) + field(2, tf_files.shape(*sizes)) + field(number, values)
    return data + tf_files.graph(tf_files.constant("blob", value))


# ------------------------------------------------------------------------------------------------------------- running
def read_everything(path: Path) -> dict[str, Any]:
    """Read all that can be read of a model, and return its variables, or raise the error."""
    model = opened(path)
    assert repr(model)
    for graph in model.graphs:
        for nodes in [graph.nodes, *(function.nodes for function in graph.functions.values())]:
            for node in nodes.values():
                assert node.name and isinstance(node.inputs, tuple) and isinstance(node.attrs, dict)
    for cell in model.cells.values():
        if cell.refused is None:
            unsaid_values = {name: "relu" if name == "activation" else 1.0 for name in cell.unsaid}
            layer, check = cell.layer(**unsaid_values), cell.check(**unsaid_values)
            numbers = [*layer.weights.values(), *(value for value in cell.attributes.values() if value is not None)]
            are_small = all(np.abs(number).max() < 1e6 for number in numbers if not isinstance(number, (str, tuple)))
            assert check.ok or not are_small, (cell, check)
    with contextlib.suppress(ValueError), warnings.catch_warnings():  # they may be no one layer
        warnings.simplefilter("ignore")
        assert sum(len(chain) for level in model.cells.levels() for chain in level)
        unsaid_values = {name: 1.0 for cell in model.cells.values() for name in cell.unsaid if name != "activation"}
        model.cells.layer(**unsaid_values)
    return {name: model.variables[name] for name in model.variables}


def inspect_file(path: Path, json: bool) -> None:
    """Inspect a file as the command does: one line says what is wrong."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(["inspect", str(path), *["--json"] * json])
    assert status in (0, 1) and (out.getvalue() or err.getvalue().startswith("blockcell inspect: FormatError: "))
    text = out.getvalue() + err.getvalue()
    assert all(line.isprintable() for line in text.split("\n")), text


KINDS: dict[str, list[tuple[str, str, Change]]] = {  # what is opened, the file that is changed, and how
    "tf_checkpoint": [
        ("v2", "v2/model.ckpt.index", change_table),
        ("v2/model.ckpt", "v2/model.ckpt.index", change_table),
        ("v2/model.ckpt.index", "v2/model.ckpt.data-00000-of-00002", change_table),
        ("v2", "v2/checkpoint", change_table),
        ("objects", "objects/ckpt-1.index", change_table),
    ],
    "tf_graph": [
        ("graph.pb", "graph.pb", change_message),
        ("graph.pb", "graph.pb", add_tensor),
        ("graph.pbtxt", "graph.pbtxt", change_text),
        ("saved", "saved/saved_model.pb", change_message),
        ("small.pbmm", "small.pbmm", change_package),
    ],
    "tf_cells": [
        *[("cells.pb", "cells.pb", change_message)] * 3,
        *[("others.pb", "others.pb", change_message)] * 3,
        *[("keras.pb", "keras.pb", change_message)] * 2,
        ("cells.pb", "cells.pb", add_tensor),
        ("v1.pb", "v1.pb", change_message),
        ("v2.pb", "v2.pb", change_message),
        *[("both.pb", "both.pb", change_message)] * 3,
        *[("cells.pbmm", "cells.pbmm", change_package)] * 2,
        *[("bare/model.ckpt", "bare/model.ckpt.index", change_table)] * 2,
        ("digits", "digits/model.ckpt-1800.index", change_table),
        ("digits", "digits/model.ckpt-1800.meta", change_message),
        ("digits/digits.pb", "digits/digits.pb", change_message),
    ],
    "tf_names": [
        *[("kept/m", "kept/objects", change_message)] * 3,  # a part of the checkpoint, which is written anew
        *[("captured", "captured/saved_model.pb", change_message)] * 3,
        ("saver/m", "saver/m.meta", change_message),
        ("saver/m", "saver/m.index", change_table),
    ],
}


def cell_package() -> bytes:
    """Return a memmapped package with an LSTM and a GRU."""
    weights = drawn("w", "b", "w_ru", "w_c", "b_ru", "b_c")
    nodes = [tf_files.immutable(NAMES[role], "float32", array.shape) for role, array in weights.items()]
    names = {role: NAMES[role] for role in weights}
    nodes += [*inputs(), block("BlockLSTM", "lstm", names, cell_clip=0.5), block("GRUBlockCell", "gru", names)]
    return tf_files.package({NAMES[role]: array.tobytes() for role, array in weights.items()} |
                            {".": tf_files.graph(*nodes)})  # fmt: skip


def write_models(folder: Path) -> dict[str, np.ndarray]:
    """Write models of all kinds; return the variables of the one whose tree of objects mutants write anew."""
    tf_files.unpack(folder)
    (folder / "v2" / "model.ckpt.meta").unlink()  # graphs are the other kind
    kernel = np.arange(12, dtype=np.float32)
    nodes = tf_files.graph(tf_files.immutable("kernel", "float32", (3, 4)))
    (folder / "small.pbmm").write_bytes(tf_files.package({"kernel": kernel.tobytes(), ".": nodes}))
    graphs = {"cells.pb": of_all_kinds(), "others.pb": of_other_kinds(), "both.pb": both_directions()}
    with np.load(GOLDEN) as golden, np.load(GOLDEN.with_name("networks.npz")) as networks:
        graphs["keras.pb"] = golden["graph/keras gru 2"].tobytes()
        graphs |= {name: networks[f"file/{name}"].tobytes() for name in ("v1.pb", "v2.pb")}
    for name, content in (graphs | {"cells.pbmm": cell_package()}).items():
        (folder / name).write_bytes(content)
    (folder / "bare").mkdir()
    write_variables(folder / "bare", checkpoint_of() | checkpoint_of("", ("w_ru", "w_c", "b_ru", "b_c")))
    zipfile.ZipFile(GOLDEN.with_name("digits.zip")).extractall(folder)
    write_saved(folder / "captured", called=False)
    (folder / "saver").mkdir()
    restored = GIVEN | {"s/kernel/part_0": ("k", "9 16 0,4:-"), "s/kernel/part_1": ("k", "9 16 4,5:-")}
    cell_nodes = [*one_cell(4, 5), *restoring("save", restored), *restoring("save_1", GIVEN)]
    write_all(folder / "saver", {"k": drawn("w")["w"], "b": drawn("b")["b"]}, *cell_nodes)
    (folder / "kept").mkdir()
    values, objects = cell_of_keras(3, 3, (2, 12))
    (folder / "kept" / "objects").write_bytes(objects)
    tf_files.write_objects(folder / "kept" / "m", values, objects)
    return values


def try_reading(g: Generator, folder: Path, path: Path, file: Path, mutant: bytes, read: Callable[[], Any]) -> Any:
    """Put a mutant in place of a file, inspect it sometimes, and read it; return None if it is refused."""
    content = file.read_bytes()
    file.write_bytes(mutant)
    try:
        if not g.integers(4):
            inspect_file(path, bool(g.integers(2)))
        return read()
    except FormatError as error:
        assert str(folder) in str(error) and "; " in str(error), error
        return None
    finally:
        file.write_bytes(content)


def fuzz_rewired_graphs() -> Callable[[Generator], bool]:
    """Return a fuzzer of graphs where one input of one node or one whole number is another.

    A mutant is accepted if as many cells are taken as before."""
    folder = Path(tempfile.mkdtemp())
    write_models(folder)
    with np.load(GOLDEN) as golden:
        stored = {name.removeprefix("graph/"): golden[name].tobytes() for name in golden.files if "graph/" in name}
    for name, content in stored.items():
        (folder / f"{name}.pb").write_bytes(content)
    files: list[tuple[Any, ...]] = [(f"{name}.pb",) * 2 for name in ("cells", "others", "both", *stored, "v1", "v2")]
    files += [("digits", "digits/model.ckpt-1800.meta", 2), ("captured", "captured/saved_model.pb", 2, 2)]

    def count_usable(path: Path) -> int:
        """Return how many cells a file has that are not refused."""
        return sum(cell.refused is None for cell in opened(path).cells.values())

    cases = []
    for name, file, *wrapped in files:
        content = (folder / file).read_bytes()
        slots = rewiring.list_slots(content, *wrapped)
        cases.append((folder / name, folder / file, content, count_usable(folder / name), slots))

    def try_mutant(g: Generator) -> bool:
        """Read a graph with one change, and return whether as many cells are taken as before."""
        path, file, content, usable_before, slots = pick(g, cases)
        slot = pick(g, slots)
        mutant = rewiring.replace_value(content, slot.path, slot.encode(pick(g, slot.replacements)))

        def read() -> int:
            """Read all, and return how many cells are not refused."""
            read_everything(path)
            return count_usable(path)

        return bool(try_reading(g, folder, path, file, mutant, read) == usable_before)

    return try_mutant


def fuzz_tensorflow(kind: str) -> Callable[[Generator], bool]:
    """Return a fuzzer of the files of a kind, of KINDS."""
    folder = Path(tempfile.mkdtemp())
    values = write_models(folder)
    cases = [
        (folder / path, folder / name, (folder / name).read_bytes(), change, read_everything(folder / path))
        for path, name, change in KINDS[kind]
    ]

    def try_mutant(g: Generator) -> bool:
        """Read a changed file, and return whether it was accepted."""
        path, file, content, change_structure, expected = pick(g, cases)
        is_plain = g.integers(2) or not file.name.endswith(
            (".index", "ckpt", ".meta", ".pb", ".pbtxt", ".pbmm", "objects")
        )
        mutant = (change_bytes if is_plain else change_structure)(g, content)
        if file.name == "objects":
            tf_files.write_objects(folder / "kept" / "m", values, mutant)
        variables = try_reading(g, folder, path, file, mutant, lambda: read_everything(path))
        if variables is not None and is_plain and kind == "tf_checkpoint":
            assert all(variables[name].tobytes() == expected[name].tobytes() for name in expected), file
        return variables is not None

    return try_mutant


TARGETS: dict[str, Callable[[], Callable[[Generator], bool]]] = {
    **{kind: partial(fuzz_tensorflow, kind) for kind in KINDS},
    "tf_rewired": fuzz_rewired_graphs,
}
