"""`ArgumentReader` reads arguments of users one at a time: makes arrays, numbers and switches of them, or raises."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from numbers import Real
from typing import Any

import numpy as np

from . import _threads, activations
from .errors import short
from .optable import DTYPE_NAMES, DTYPES, Array, Attribute

# Byte-swapped arrays are taken too, and converted.
NUMBERS = {order: number for number, dtype in enumerate(DTYPES) for order in (dtype, dtype.newbyteorder())}
ARRAY_PROTOCOLS = ("__array__", "__array_interface__", "__array_struct__")


class ArgumentReader:
    """Reads the arguments of a call; its messages begin with ``caller``."""

    caller: str

    def __init__(self, caller: str) -> None:
        self.caller = caller

    # --------------------------------------------------------------------------------------------- numbers and switches
    def thread_number(self, value: Any) -> int:
        try:
            return _threads.num_threads(value)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{self.caller}: {error}") from None

    def attributes(self, attributes: Iterable[Attribute], values: Iterable[Any]) -> tuple[Any, ...]:
        """Return the values of attributes as kernels take them."""
        read = {bool: self.switch, float: self.number, activations.Numbers: self.activation_numbers}
        return tuple(
            [read[attribute.kind](attribute.name, value) for attribute, value in zip(attributes, values, strict=True)]
        )

    def activation(self, name: str, value: Any) -> activations.Activation:
        """Return an activation in its canonical form."""
        return activations.canonical(f"{self.caller}: {name}", value)

    def activation_numbers(self, name: str, value: Any) -> activations.Numbers:
        return activations.numbers(self.activation(name, value))

    def switch(self, name: str, value: Any) -> bool:
        if not isinstance(value, (bool, np.bool_)):
            raise TypeError(f"{self.caller}: {name} is {short(value)}; expected True or False")
        return bool(value)

    def number(self, name: str, value: Any) -> float:
        if not isinstance(value, Real):
            raise TypeError(f"{self.caller}: {name} is {short(value)}; expected a real number")
        try:
            return float(value)
        except OverflowError:
            raise ValueError(f"{self.caller}: {name} is {short(value)}; expected a number that a float holds") from None

    @staticmethod
    def half(value: float) -> float:
        """Round an attribute to float16, as TensorFlow does."""
        with np.errstate(over="ignore"):
            return float(np.float16(value))

    def integer(self, name: str, value: Any) -> int:
        """Read what ``operator.index`` takes (so also True, which is 1), or a 0-d array of integers."""
        expected = "expected an integer or a 0-d array of integers"
        if isinstance(value, np.ma.MaskedArray):
            raise TypeError(f"{self.caller}: {name} is a masked array; {expected}")
        try:
            return operator.index(value)
        except TypeError:
            pass
        if not isinstance(value, np.generic) and is_array(value):
            array = self.array(name, value)
            if array.dtype.kind not in "iu":
                raise TypeError(f"{self.caller}: {name} has dtype {array.dtype}; {expected}")
            if array.ndim > 0:
                raise ValueError(f"{self.caller}: {name} has shape {array.shape}; {expected}")
            return int(array)
        raise TypeError(f"{self.caller}: {name} is {short(value)}; {expected}")

    def at_least(self, least: int, name: str, value: Any) -> int:
        """Read an `integer` with a bound."""
        number = self.integer(name, value)
        if number < least:
            raise ValueError(f"{self.caller}: {name} is {number}; expected at least {least}")
        return number

    # ----------------------------------------------------------------------------------------------------------- arrays
    def axis_order_hint(self, shape: tuple[int, ...], expected: tuple[int | None, ...]) -> str:
        """Return the end of a message about a shape, where the axes may be in another order."""
        return ""

    def array(self, name: str, value: Any) -> Array:
        if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
            raise TypeError(f"{self.caller}: {name} has masked entries, which have no value; fill them first")
        try:
            return np.asarray(value)
        except MemoryError:
            raise
        except Exception as error:
            kind = ValueError if isinstance(error, ValueError) else TypeError
            raise kind(f"{self.caller}: {name} cannot be read as an array: {error}") from error

    def dtype_number(
        self, values: Iterable[tuple[str, Any, Array | None]], number: int | None = None, source: str = ""
    ) -> int:
        """Return the position in DTYPES of the dtype of all arrays; float32 where there are only lists and numbers.

        `values` holds each argument's name, its value, and what `array` made of it, or None where it is missing.
        The first array fixes the dtype, unless `number` gives it; messages then call it that of `source`.
        """
        first_value = None  # the array that fixes the dtype
        for name, value, array in values:
            if array is None:
                continue
            if not is_array(value):
                if array.dtype.kind not in "fiu":
                    description = short(value) if array.dtype.kind == "O" else f"made of {array.dtype}"
                    raise TypeError(f"{self.caller}: {name} is {description}; expected an array of real numbers")
                continue
            value_number = NUMBERS.get(array.dtype)
            is_real = array.dtype.kind in "fiub"
            if value_number is None and (number is None or not is_real):
                description = f"has dtype {array.dtype}; expected {DTYPE_NAMES}"
                if array.dtype == object and not isinstance(value, np.ndarray):
                    description = f"is {short(value)}; expected an array of {DTYPE_NAMES}"
                raise TypeError(f"{self.caller}: {name} {description}")
            if number is None:
                number, source, first_value = value_number, name, value
            elif value_number != number:
                expected = f"expected {DTYPES[number]}, that of {source}"
                advice = conversion(name, value, DTYPES[number])
                if first_value is not None and value_number is not None and DTYPES[number] == np.float64:
                    # numpy makes float64 where nobody asks for it
                    advice = conversion(source, first_value, DTYPES[value_number])
                raise TypeError(f"{self.caller}: {name} has dtype {array.dtype}; {expected}; {advice}")
        return number or 0

    def rows(self, value: Any, batch: int, once: bool) -> Array:
        """Return the numbers of the rows that `rows` means, from 0 on: it has indices, or one bool for each row.

        `once`: each row at most once, in an array of rank 1.
        """
        array = self.array("rows", value)
        if array.dtype == bool:
            if array.shape != (batch,):
                expected = f"expected ({batch},), one bool for each row"
                raise ValueError(f"{self.caller}: rows has shape {array.shape}; {expected}")
            return np.flatnonzero(array)
        if array.size and array.dtype.kind not in "iu":
            expected = "expected indices, or one bool for each row"
            raise TypeError(f"{self.caller}: rows is {short(value)}, of {array.dtype}; {expected}")
        if once and array.ndim != 1:
            raise ValueError(f"{self.caller}: rows has shape {array.shape}; expected (n,), an index for each of n rows")
        numbers: list[int] = array.ravel().tolist()
        named = set()
        for number in numbers:
            if not -batch <= number < batch:
                raise ValueError(f"{self.caller}: rows has {number}; expected indices from {-batch} to {batch - 1}")
            if once and number % batch in named:
                raise ValueError(f"{self.caller}: rows has {number % batch} twice; expected each row once")
            named.add(number % batch)
        return np.array([number % batch for number in numbers], np.intp)


def conversion(name: str, value: Any, dtype: np.dtype[Any]) -> str:
    """Return the end of a message: the expression that converts an argument of this name to this dtype."""
    if hasattr(value, "astype"):
        return f"{name}.astype(np.{dtype}) converts it"
    return f"np.asarray({name}, np.{dtype}) converts it"


def is_array(value: Any) -> bool:
    """Return whether the value is an array with a dtype of its own, not a list or a number."""
    if isinstance(value, (np.ndarray, np.generic)):
        return isinstance(value, np.ndarray)
    if any(hasattr(value, protocol) for protocol in ARRAY_PROTOCOLS):
        return True
    try:
        memoryview(value)
    except TypeError:
        return False
    return True


def as_kernels_take(array: Array, dtype: np.dtype[Any]) -> Array:
    """Return the array, or a copy, with this dtype, contiguous and aligned."""
    if array.dtype == dtype and array.flags.c_contiguous and array.flags.aligned:
        return array
    return np.array(array, dtype, order="C", copy=True)


def rows_as_kernels_take(array: Array, dtype: np.dtype[Any]) -> Array:
    """Return the array, or a copy, with contiguous rows along the last axis; between rows there may be any strides."""
    size = dtype.itemsize
    if (
        array.dtype == dtype
        and array.flags.aligned
        and (array.shape[-1] <= 1 or array.strides[-1] == size)
        and all(stride % size == 0 for stride in array.strides[:-1])
    ):
        return array
    return np.array(array, dtype, order="C", copy=True)


def form(shape: str) -> str:
    """Write the letters of a shape as a tuple: ``(I+H, 4H)``."""
    words = shape.split()
    return f"({', '.join(words)}{',' if len(words) == 1 else ''})"
