"""Damaged files of TensorFlow's, for fuzz.py: bytes changed anywhere, and files that are well-formed and say nonsense.

Everything is done with them that the package can: all is read, cells are found, checked and made to layers, and some
are given to `blockcell inspect`. Whatever a checkpoint with changed bytes still gives must be what was saved, bit for
bit: its checksums tell. A layer that is taken from a graph must compute what the graph's nodes do.

`rewired_graphs` changes one input of one node, or one whole number, of graphs that are right otherwise.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import rewiring
import tf_files
from tf_cells import NAMES, block, checkpoint_of, drawn, inputs, of_all_kinds, write_variables
from tf_composed import GOLDEN, of_other_kinds
from tf_files import field, varint
from tf_names import GIVEN, cell_of_keras, one_cell, restoring, write_all, write_saved

from blockcell import FormatError
from blockcell.command import main
from blockcell.tensorflow import open as opened
from blockcell.tensorflow.mapped import File
from blockcell.tensorflow.table import Table

Generator = np.random.Generator
Change = Callable[[Generator, bytes], bytes]
NUMBERS = [0, 1, 2, 3, 4, 7, 14, 19, 63, 127, 128, 255, 2**16, 2**20, 2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63 - 1,
           2**63, 2**64 - 1]  # fmt: skip
TEXTS = [b"{", b"}", b"[", b"]", b"<", b":", b'"', b"'", b"#", b"\n", b"-inf", b"nan", b"1e999", b"DT_STRING",
         b"{" * 200, b"9" * 5000, b"value {", b"list: [1, 2]", b"\\377", b"-1", b""]  # fmt: skip
DATA = [b"", b"\0", b"a", b"\xff", b"kernel", b"Const", b"f", b"\x08\x01", b"\x12\x00" * 40, b"\x80" * 11, bytes(64),
        b"memmapped_package://.", b"../x", "\u00e4".encode()]  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ messages
def fields_of(data: bytes) -> list[tuple[int, int | bytes]] | None:
    """The fields of a message, 4 and 8 bytes as varints; None if it is none."""
    found: list[tuple[int, int | bytes]] = []
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    try:
        while at < len(data):
            tag = number()
            if tag & 7 == 0:
                found.append((tag >> 3, number()))
            elif tag & 7 == 2:
                length = number()
                if at + length > len(data):
                    return None
                found.append((tag >> 3, data[at : at + length]))
                at += length
            elif tag & 7 in (1, 5):
                at += 8 if tag & 7 == 1 else 4
                found.append((tag >> 3, -1 if at > len(data) else data[at - 4 : at]))
            else:
                return None
    except IndexError:
        return None
    return found if all(number for number, _ in found) else None


def message_changed(g: Generator, data: bytes) -> bytes:
    """With one field changed, in it or in what is in it."""
    found = fields_of(data)
    if not found:
        return DATA[g.integers(len(DATA))]
    k = int(g.integers(len(found)))
    number, value = found[k]
    if isinstance(value, bytes) and len(value) > 1 and fields_of(value) and g.integers(8):
        found[k] = number, message_changed(g, value)
        return joined(found)
    match g.integers(8):
        case 0:
            del found[k]
        case 1:
            found.insert(k, found[g.integers(len(found))])
        case 2:
            found[k] = int(g.integers(1, 18)), value
        case 3:
            found[k] = found[k][0], NUMBERS[g.integers(len(NUMBERS))]
        case 4:
            deep = b"" if isinstance(value, int) else value
            for _ in range(g.integers(1, 300)):
                deep = field(number, deep)
            found[k] = number, deep
        case 5 if isinstance(value, bytes) and value:
            found[k] = number, value[: g.integers(len(value))] * int(g.integers(1, 3))
        case _:
            found[k] = (
                number,
                NUMBERS[g.integers(len(NUMBERS))] if isinstance(value, int) else DATA[g.integers(len(DATA))],
            )
    return joined(found)


def joined(fields: list[tuple[int, int | bytes]]) -> bytes:
    return b"".join(field(number, value) for number, value in fields)


# -------------------------------------------------------------------------------------------------------------- tables
def table_changed(g: Generator, data: bytes) -> bytes:
    """Well-formed, with checksums that are right, and another entry."""
    with tempfile.NamedTemporaryFile() as kept:
        kept.write(data)
        kept.flush()
        items = [(each.key, bytes(each.value.view)) for each in Table(File(kept.name)).entries(check=True)]
    k = int(g.integers(len(items)))
    key, value = items[k]
    match g.integers(6):
        case 0:
            del items[k]
        case 1:
            items[k] = items[g.integers(len(items))][0], value
        case 2:
            items[k] = key + DATA[g.integers(len(DATA))], value
        case _:
            items[k] = key, message_changed(g, value)
    if g.integers(10):
        items = sorted(dict(items).items())
    return tf_files.table(dict(items), int(g.integers(1, 30)), int(g.integers(1, 20)))


def package_changed(g: Generator, data: bytes) -> bytes:
    start = int.from_bytes(data[-8:], "little")
    changed = message_changed(g, data[start:-8])
    return data[:start] + changed + (start if g.integers(4) else NUMBERS[g.integers(20)]).to_bytes(8, "little")


def text_changed(g: Generator, data: bytes) -> bytes:
    """With words in other places."""
    words = data.split(b" ")
    for _ in range(g.integers(1, 4)):
        k, other = g.integers(len(words), size=2)
        words[k] = words[other] if g.integers(3) else TEXTS[g.integers(len(TEXTS))]
    return b" ".join(words)


def blob_changed(g: Generator, data: bytes) -> bytes:
    """Packed varints and such, inside an otherwise good graph."""
    number = int(g.integers(4, 18))
    values = b"".join(varint(NUMBERS[g.integers(len(NUMBERS))]) for _ in range(g.integers(40)))
    sizes = [int(each) for each in g.choice([0, 1, 2, 3, 2**10, 2**20, 2**31, 2**40, 2**62], g.integers(4))]
    value = field(1, int(g.integers(26))) + field(2, tf_files.shape(*sizes)) + field(number, values)
    return data + tf_files.graph(tf_files.constant("blob", value))


# ------------------------------------------------------------------------------------------------------------- running
def everything(path: Path) -> dict[str, Any]:
    """All that can be read, or the error."""
    model = opened(path)
    assert repr(model)
    for each in model.graphs:
        for nodes in [each.nodes, *(function.nodes for function in each.functions.values())]:
            for node in nodes.values():
                assert node.name and isinstance(node.inputs, tuple) and isinstance(node.attrs, dict)
    for cell in model.cells.values():
        if cell.refused is None:
            given = {name: "relu" if name == "activation" else 1.0 for name in cell.unsaid}
            layer, check = cell.layer(**given), cell.check(**given)
            numbers = [*layer.weights.values(), *(value for value in cell.attributes.values() if value is not None)]
            tame = all(np.abs(each).max() < 1e6 for each in numbers if not isinstance(each, (str, tuple)))
            assert check.ok or not tame, (cell, check)
    with contextlib.suppress(ValueError):  # they may be no one layer
        assert sum(len(chain) for level in model.cells.levels() for chain in level)
    return {name: model.variables[name] for name in model.variables}


def inspected(path: Path, json: bool) -> None:
    """As the command does it: one line says what is wrong."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(["inspect", str(path), *["--json"] * json])
    assert status in (0, 1) and (out.getvalue() or err.getvalue().startswith("blockcell inspect: FormatError: "))
    text = out.getvalue() + err.getvalue()
    assert all(line.isprintable() for line in text.split("\n")), text


KINDS: dict[str, list[tuple[str, str, Change]]] = {  # what is opened, the file that is changed, and how
    "tf_checkpoint": [
        ("v2", "v2/model.ckpt.index", table_changed),
        ("v2/model.ckpt", "v2/model.ckpt.index", table_changed),
        ("v2/model.ckpt.index", "v2/model.ckpt.data-00000-of-00002", table_changed),
        ("v2", "v2/checkpoint", table_changed),
        ("v1", "v1/model.ckpt", table_changed),
        ("objects", "objects/ckpt-1.index", table_changed),
    ],
    "tf_graph": [
        ("graph.pb", "graph.pb", message_changed),
        ("graph.pb", "graph.pb", blob_changed),
        ("graph.pbtxt", "graph.pbtxt", text_changed),
        ("saved", "saved/saved_model.pb", message_changed),
        ("small.pbmm", "small.pbmm", package_changed),
    ],
    "tf_cells": [
        *[("cells.pb", "cells.pb", message_changed)] * 3,
        *[("others.pb", "others.pb", message_changed)] * 3,
        *[("keras.pb", "keras.pb", message_changed)] * 2,
        ("cells.pb", "cells.pb", blob_changed),
        ("v1.pb", "v1.pb", message_changed),
        ("v2.pb", "v2.pb", message_changed),
        *[("cells.pbmm", "cells.pbmm", package_changed)] * 2,
        *[("bare/model.ckpt", "bare/model.ckpt.index", table_changed)] * 2,
        ("digits", "digits/model.ckpt-1800.index", table_changed),
        ("digits", "digits/model.ckpt-1800.meta", message_changed),
        ("digits/digits.pb", "digits/digits.pb", message_changed),
    ],
    "tf_names": [
        *[("kept/m", "kept/objects", message_changed)] * 3,  # a part of the checkpoint, which is written anew
        *[("captured", "captured/saved_model.pb", message_changed)] * 3,
        ("saver/m", "saver/m.meta", message_changed),
        ("saver/m", "saver/m.index", table_changed),
    ],
}


def package_of_cells() -> bytes:
    weights = drawn("w", "b", "w_ru", "w_c", "b_ru", "b_c")
    nodes = [tf_files.immutable(NAMES[role], "float32", array.shape) for role, array in weights.items()]
    names = {role: NAMES[role] for role in weights}
    nodes += [*inputs(), block("BlockLSTM", "lstm", names, cell_clip=0.5), block("GRUBlockCell", "gru", names)]
    return tf_files.package({NAMES[role]: array.tobytes() for role, array in weights.items()} |
                            {".": tf_files.graph(*nodes)})  # fmt: skip


def rewired_graphs() -> Callable[[Generator], bool]:
    """One input of one node or one whole number is another; whether as many cells are taken as before."""
    kept = tempfile.TemporaryDirectory()
    folder = Path(kept.name)
    cases: list[tuple[Path, Path, bytes, int, list[rewiring.Slot]]] = []

    def usable(path: Path) -> int:
        return sum(cell.refused is None for cell in opened(path).cells.values())

    def add(path: Path, changed: Path, *wrapped: int) -> None:
        content = changed.read_bytes()
        cases.append((path, changed, content, usable(path), rewiring.slots(content, *wrapped)))

    graphs = {"cells": of_all_kinds(), "others": of_other_kinds()}
    with np.load(GOLDEN) as golden:
        found = {name.removeprefix("graph/"): golden[name].tobytes() for name in golden.files if "graph/" in name}
    with np.load(GOLDEN.with_name("networks.npz")) as networks:
        found |= {name: networks[f"file/{name}.pb"].tobytes() for name in ("v1", "v2")}
    for name, content in (graphs | found).items():
        path = folder / f"{name}.pb"
        path.write_bytes(content)
        add(path, path)
    zipfile.ZipFile(GOLDEN.with_name("digits.zip")).extractall(folder)
    add(folder / "digits", folder / "digits" / "model.ckpt-1800.meta", 2)
    write_saved(folder / "captured", called=False)
    add(folder / "captured", folder / "captured" / "saved_model.pb", 2, 2)

    def one(g: Generator, kept: object = kept) -> bool:
        path, changed, content, expected, slots = cases[g.integers(len(cases))]
        slot = slots[g.integers(len(slots))]
        changed.write_bytes(rewiring.changed(content, slot, slot.others[g.integers(len(slot.others))]))
        try:
            if not g.integers(4):
                inspected(path, bool(g.integers(2)))
            everything(path)
            return usable(path) == expected
        except FormatError as error:
            assert str(folder) in str(error) and "; " in str(error), error
            return False
        finally:
            changed.write_bytes(content)

    return one


def target(kind: str, bytes_changed: Change) -> Callable[[Generator], bool]:
    kept = tempfile.TemporaryDirectory()
    folder = Path(kept.name)
    tf_files.unpack(folder)
    (folder / "v2" / "model.ckpt.meta").unlink()  # graphs are the other kind
    kernel = np.arange(12, dtype=np.float32)
    nodes = tf_files.graph(tf_files.immutable("kernel", "float32", (3, 4)))
    (folder / "small.pbmm").write_bytes(tf_files.package({"kernel": kernel.tobytes(), ".": nodes}))
    (folder / "cells.pb").write_bytes(of_all_kinds())
    (folder / "others.pb").write_bytes(of_other_kinds())
    with np.load(GOLDEN) as golden:
        (folder / "keras.pb").write_bytes(golden["graph/keras gru 2"].tobytes())
    (folder / "cells.pbmm").write_bytes(package_of_cells())
    with np.load(GOLDEN.with_name("networks.npz")) as networks:
        for name in ("v1.pb", "v2.pb"):
            (folder / name).write_bytes(networks[f"file/{name}"].tobytes())
    (folder / "bare").mkdir()
    write_variables(folder / "bare", checkpoint_of() | checkpoint_of("", ("w_ru", "w_c", "b_ru", "b_c")))
    zipfile.ZipFile(GOLDEN.with_name("digits.zip")).extractall(folder)
    write_saved(folder / "captured", called=False)
    (folder / "saver").mkdir()
    restored = GIVEN | {f"s/kernel/part_{k}": ("k", where) for k, where in enumerate(("9 16 0,4:-", "9 16 4,5:-"))}
    parts = [*one_cell(4, 5), *restoring("save", restored), *restoring("save_1", GIVEN)]
    write_all(folder / "saver", {"k": drawn("w")["w"], "b": drawn("b")["b"]}, *parts)
    (folder / "kept").mkdir()
    values, objects = cell_of_keras(3, 3, (2, 12))
    (folder / "kept" / "objects").write_bytes(objects)
    tf_files.write_objects(folder / "kept" / "m", values, objects)
    cases = [
        (folder / path, folder / changed, (folder / changed).read_bytes(), how, everything(folder / path))
        for path, changed, how in KINDS[kind]
    ]

    def one(g: Generator, kept: object = kept) -> bool:
        path, changed, content, structured, expected = cases[g.integers(len(cases))]
        plain = g.integers(2) or not changed.name.endswith(
            (".index", "ckpt", ".meta", ".pb", ".pbtxt", ".pbmm", "objects")
        )
        mutant = (bytes_changed if plain else structured)(g, content)
        changed.write_bytes(mutant)
        if changed.name == "objects":
            tf_files.write_objects(folder / "kept" / "m", values, mutant)
        try:
            if not g.integers(4):
                inspected(path, bool(g.integers(2)))
            found = everything(path)
        except FormatError as error:
            assert str(folder) in str(error) and "; " in str(error), error
            return False
        finally:
            changed.write_bytes(content)
        if plain and kind == "tf_checkpoint":
            assert all(found[name].tobytes() == expected[name].tobytes() for name in expected), changed
        return True

    return one
