"""Change bytes, JSON and arrays at random, and give them to readers, for all fuzzers. It is no program itself."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

Generator = np.random.Generator


def pick(g: Generator, items: Sequence[Any]) -> Any:
    """Draw one of some items."""
    return items[g.integers(len(items))]


# ------------------------------------------------------------------------------------------------------ bytes and JSON
WORDS = [b"", b"\0", b"\xff" * 4, b"\xff" * 8, b"\x7f" + b"\xff" * 7, b"\0\0\0\x80", b"PK\3\4", b"PK\1\2", b"PK\5\6",
         b"\x93NUMPY", b"{", b"}", b'"', b"[" * 3000, b"9" * 5000, b"NaN", b"1e999", b"-1", b"true"]  # fmt: skip


def flip_bits(g: Generator, content: bytes) -> bytes:
    """Flip one to three bits."""
    new_content = bytearray(content)
    for _ in range(g.integers(1, 4)):
        new_content[g.integers(len(new_content))] ^= 1 << g.integers(8)
    return bytes(new_content)


def truncate(g: Generator, content: bytes) -> bytes:
    """Cut content off somewhere."""
    return content[: g.integers(len(content))]


def splice(g: Generator, content: bytes) -> bytes:
    """Put a part of the content in place of another, between two others, or take one out."""
    length = int(g.integers(1, 65))
    start, to = g.integers(len(content), size=2)
    part = content[start : start + length] if g.integers(3) else b""
    return content[:to] + part + content[to + int(g.integers(2)) * length :]


def insert_word(g: Generator, content: bytes) -> bytes:
    """Put a word in that means something to some reader, in place of something or between."""
    word, to = pick(g, WORDS), g.integers(len(content))
    return content[:to] + word + content[to + int(g.integers(2)) * len(word) :]


def change_bytes(g: Generator, content: bytes) -> bytes:
    """Change bytes anywhere, in one of these ways."""
    return (flip_bits, flip_bits, truncate, splice, insert_word)[g.integers(5)](g, content)


def draw_value(g: Generator) -> Any:
    """Draw a value that may stand in JSON where another belongs."""
    choices = [None, True, False, 0, 1, -1, 2, 2**31, 2**63, 10**400, 0.5, -0.0, 1e308, float("inf"), float("nan"), "",
               "x", "GRU", "LSTM", "RNN", "F64", "fw", "Dense", "ends", "coupled", "proj_clip", "\ud800", [], [0], [[]],
               {}, {"type": "GRU"}, [True, 2], "int8", "float16", "activation", "relu", "tanh", "gelu",
               ["leaky_relu", 0.3], ["elu", "1"]]  # fmt: skip
    return pick(g, choices)


def change_json(g: Generator, document: Any) -> str:
    """Return a JSON text like the one of the document, with one place changed."""
    document = json.loads(json.dumps(document))
    positions = [*places_in(document)]
    holder, key = pick(g, positions)
    match g.integers(6):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[str(draw_value(g))] = holder.pop(key)
        case 2 if isinstance(holder, list):
            holder.append(holder[key])
        case 3:
            holder[key] = [holder[key]]
        case 4:
            donor, name = pick(g, positions)
            holder[key] = json.loads(json.dumps(donor[name])) if holder is not donor[name] else draw_value(g)
        case _:
            holder[key] = draw_value(g)
    text = json.dumps(document)
    if g.integers(20) == 0:  # the same name twice
        text = text.replace('"type"', '"type": "GRU", "type"', 1).replace('"shape"', '"shape": [1], "shape"', 1)
    return text


def places_in(document: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every dict and list in a document, with each of its keys or positions."""
    if isinstance(document, (dict, list)):
        for key in document if isinstance(document, dict) else range(len(document)):
            yield document, key
            yield from places_in(document[key])


def change_array(g: Generator, array: Any) -> Any:
    """Return an array of another shape, dtype or contents."""
    match g.integers(7):
        case 0:
            return array[:-1]
        case 1:
            dtypes = [np.float32, np.float64, np.float16, np.int64, object, "U3", "V4", np.uint16, np.int8]
            return array.astype(pick(g, dtypes))
        case 2:
            return array[None]
        case 3:
            return np.zeros_like(array)
        case 4:
            return np.zeros((0, *array.shape[1:]), array.dtype)
        case 5:
            return array.T.copy()
        case _:
            return np.zeros((), array.dtype)


# ------------------------------------------------------------------------------------------------------------- readers
EXPECTED_WARNINGS = (
    r"from_\w+: (left out|left to the caller|not rounded|a state of its own|arrays do not|weights do not"
    r"|PyTorch exported|not compared|compared for|the layers are)"
)


def fuzz_reader(read: Callable[[Any], Any], draw_mutant: Callable[[Generator], Any]) -> Callable[[Generator], bool]:
    """Return a fuzzer that gives what it draws to a reader; a TypeError or ValueError with a message refuses it."""

    def try_mutant(g: Generator) -> bool:
        """Read a mutant, and return whether it was accepted."""
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", EXPECTED_WARNINGS, UserWarning)
                read(draw_mutant(g))  # which refuses some changes itself
        except (TypeError, ValueError) as error:
            assert str(error)
            return False
        return True

    return try_mutant
