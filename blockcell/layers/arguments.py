"""Readers of the arguments of a layer's calls: arrays, lengths, masks, resets, and the parts of a state."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np

from .._layers import check_lengths
from ..argument_reader import ArgumentReader, as_kernels_take, is_array
from ..errors import short
from ..optable import DTYPES, Array


class CallReader(ArgumentReader):
    """Reads the arguments of a call, whose x has T steps of B rows: time first, or batch first."""

    T: int
    B: int

    def __init__(self, caller: str, batch_first: Any) -> None:
        super().__init__(caller)
        self.batch_first = self.switch("batch_first", batch_first)

    def axes(self, T: Any, B: Any) -> tuple[Any, Any]:
        """Return T and B, or anything in their place, in the order that the user's arrays have."""
        return (B, T) if self.batch_first else (T, B)

    def time_first(self, array: Array) -> Array:
        """Return a view, time first, of an array that has the user's order."""
        return array.swapaxes(0, 1) if self.batch_first else array

    def axis_order_hint(self, shape: tuple[int, ...], expected: tuple[int | None, ...]) -> str:
        if self.T == self.B or {*shape[:1], *expected[:1]} != {self.T, self.B}:
            return ""
        if self.batch_first:
            return "; x is [B, T, I], as batch_first=True says; for [T, B, I] leave that out"
        return "; x is [T, B, I], time first; for [B, T, I] pass batch_first=True"


def checked_array(
    reader: ArgumentReader,
    name: str,
    value: Any,
    dtype: np.dtype[Any],
    shape: tuple[int | None, ...],
    expected: str,
) -> Array:
    """Return the value as an array of this shape that has this dtype or can be converted to it.

    A None in `shape` allows any size; `expected` says in a message what shape was expected.
    """
    array = reader.array(name, value)
    if type(value) is not np.ndarray or array.dtype != dtype:
        reader.dtype_number([(name, value, array)], DTYPES.index(dtype), "the layer")
    if len(array.shape) != len(shape) or not all(b in (a, None) for a, b in zip(array.shape, shape, strict=True)):
        hint = "" if None in shape else reader.axis_order_hint(array.shape, shape)
        raise ValueError(f"{reader.caller}: {name} has shape {array.shape}; expected {expected}{hint}")
    return array


def read_array(
    reader: ArgumentReader,
    name: str,
    value: Any,
    dtype: np.dtype[Any],
    shape: tuple[int | None, ...],
    expected: str,
    copies: bool = False,
) -> Array:
    """Return the `checked_array` of a value as kernels can read it; always a copy if `copies`."""
    array = checked_array(reader, name, value, dtype, shape, expected)
    return np.array(array, dtype, order="C", copy=True) if copies else as_kernels_take(array, dtype)


def repeat_row(value: Any, B: int) -> Any:
    """Return an array of one row as a view of B equal rows; anything else as it is."""
    if isinstance(value, np.ndarray) and value.ndim == 2 and len(value) == 1:
        return np.broadcast_to(value, (B, value.shape[1]))
    return value


def read_lengths(reader: ArgumentReader, value: Any, T: int, B: int, source: str = "x") -> Array | None:
    """Return the lengths of B rows, 0 to T each, as int64; `source` is the argument from which T and B are."""
    if value is None:
        return None
    lengths = reader.array("lengths", value)
    if lengths.dtype.kind not in "iu" and (lengths.size or is_array(value)):
        raise TypeError(f"{reader.caller}: lengths has dtype {lengths.dtype}; expected integers")
    if lengths.shape != (B,):
        hint = reader.axis_order_hint(lengths.shape, (B,))
        expected = f"expected (B,) = ({B},) with B from {source}"
        raise ValueError(f"{reader.caller}: lengths has shape {lengths.shape}; {expected}{hint}")
    steps = lengths.astype(np.int64)
    check_lengths(reader.caller, steps, T, lengths)
    return steps


def read_bools(reader: CallReader, name: str, value: Any) -> Array | None:
    """Return `reset` or `mask`, a bool for every step and row, time first."""
    if value is None:
        return None
    bools = reader.array(name, value)
    if bools.dtype != np.bool_ and (bools.size or is_array(value)):
        raise TypeError(f"{reader.caller}: {name} has dtype {bools.dtype}; expected bool")
    shape = reader.axes(reader.T, reader.B)
    if bools.shape != shape:
        expected = f"expected ({', '.join(reader.axes('T', 'B'))}) = {shape} with both from x"
        hint = reader.axis_order_hint(bools.shape, shape)
        raise ValueError(f"{reader.caller}: {name} has shape {bools.shape}; {expected}{hint}")
    return reader.time_first(bools.astype(np.bool_))


def order_parts(state_name: str, state: Any, names: Iterable[str], stateless: Collection[str] = ()) -> Any:
    """Return the parts of a mapping in the order of their names, which may be integers for a stack; else the state.

    Parts of stateless layers may be missing. All others must be there, so that none is forgotten.
    """
    if not isinstance(state, Mapping):
        return state
    names, parts = [*names], {str(key): part for key, part in state.items()}
    needed = [name for name in names if name not in stateless]
    if {*needed} - {*parts} or {*parts} - {*names} or len(parts) != len(state):
        names_found, expected = ", ".join(map(str, state)) or "nothing", ", ".join(needed) or "nothing"
        perhaps = f", and perhaps {', '.join(stateless)}" if stateless else ""
        zeros = "; give None for zeros" if {*parts} <= {*names} and len(parts) == len(state) else ""
        raise ValueError(f"{state_name} has the names {names_found}; expected {expected}{perhaps}{zeros}")
    return [parts.get(name, {}) for name in names]


def read_parts(
    reader: ArgumentReader, name: str, state: Any, names: Iterable[str], expected: str, stateless: Collection[str] = ()
) -> dict[str, Any]:
    """Return the parts of a state by the names that messages use, ``state.fw``; all are None if the state is None."""
    state = order_parts(f"{reader.caller}: {name}", state, names, stateless)
    names = [f"{name}.{part}" for part in names]
    if state is None:
        return dict.fromkeys(names)
    if not isinstance(state, (tuple, list)):
        raise TypeError(f"{reader.caller}: {name} is {short(state)}; expected {expected} or None")
    if len(state) != len(names):
        raise ValueError(f"{reader.caller}: {name} has {len(state)} parts; expected {expected}")
    return dict(zip(names, state, strict=True))
