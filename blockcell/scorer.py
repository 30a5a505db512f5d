"""Scoring many sequences of any lengths: `Scorer`."""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, SupportsIndex, overload

import numpy as np

from . import _threads, files
from ._threads import in_forked_child
from .argument_reader import ArgumentReader
from .errors import short
from .layers import BaseLayer
from .layers.arguments import checked_array
from .layers.loading import read_any
from .layers.shared import Directions, columns_of
from .optable import Array

OUTPUTS = "last", "all", "mean"
WINDOW = 32  # batches that are sorted together, of what is not in memory as a whole
ENOUGH = 1 << 24  # numbers in x and y of a window that has one batch at least
READER = ArgumentReader("Scorer")


class Scorer:
    """Runs a layer on many sequences of any lengths.

    Sequences of about the same length are computed together, in batches, so that little is padding. Each result has
    the bits that it has where the layer is called with this sequence alone.

    .. code-block:: python

        scorer = Scorer("model.npz", output="mean")
        means = scorer([np.ones((20, 8), np.float32), np.ones((300, 8), np.float32)])  # two arrays of shape (H,)

    Several threads may call a scorer, and so may a forked child. It can be pickled. If it was made from a path, the
    pickle has the path in place of the layer: a process that gets it reads the file when it scores something for the
    first time, once for all scorers of that file, and raises a ValueError if the layer is another one.

    Parameters
    ----------
    path_or_layer : path_like, Layer or Quantized
        A file that ``save`` of a layer wrote, quantized or not; or a layer, with the weights that it has now.
    output : {"last", "all", "mean"} or callable
        What the result for a sequence of t steps is. H is the last dimension of y.

        - "last": y at the last step, (H,); where a part of y runs backwards, as the second half of a `Bidirectional`,
          that is the first step, where this part has seen the whole sequence; a `Dense` runs in no direction, so
          there it is the last step. If a `Dense` with `last` stands at the end, its y.
        - "all": y at all steps, (t, H).
        - "mean": the sum of y over the steps, added up from zero in their order, divided by t, (H,). Both are done in
          float32, of a float64 layer in float64, and the result is rounded to the layer's dtype.
        - A function: what it returns for y of one sequence. It gets an array of its own, (t, H), or (H,) if a `Dense`
          with `last` stands at the end.
    batch : int
        The most sequences that are computed together. The memory that is needed grows with it and with the longest
        sequence.
    num_threads : int or None
        The most threads that a call may use. None: as many as `set_num_threads` says.

    Raises
    ------
    TypeError
        An argument is of the wrong kind.
    ValueError
        `output` is unknown or the layer does not have it, `batch` or `num_threads` is less than 1, or the file holds
        something else.
    OSError
        The file cannot be read.
    """

    def __init__(
        self,
        path_or_layer: str | os.PathLike[str] | BaseLayer[Any],
        *,
        output: str | Callable[[Array], Any] = "last",
        batch: SupportsIndex = 64,
        num_threads: SupportsIndex | None = 1,
    ) -> None:
        self._path: str | None = None
        if isinstance(path_or_layer, (str, os.PathLike)):
            self._path = os.path.abspath(path_or_layer)
            layer, self._sha256 = _load_once(self._path)
        elif isinstance(path_or_layer, BaseLayer):
            layer = path_or_layer._snapshot()
        else:
            expected = "expected a path or a layer, quantized or not"
            raise TypeError(f"{READER.caller}: path_or_layer is {short(path_or_layer)}; {expected}")
        if not callable(output) and (not isinstance(output, str) or output not in OUTPUTS):
            error = ValueError if isinstance(output, str) else TypeError
            raise error(f"{READER.caller}: output is {short(output)}; expected 'last', 'all', 'mean' or a function")
        if output in ("all", "mean") and not layer._over_time:
            expected = "expected 'last' or a function, as the layer gives only the last step"
            raise ValueError(f"{READER.caller}: output is {output!r}; {expected}")
        self._layer: BaseLayer[Any] | None = layer
        self._output, self._batch = output, READER.at_least(1, "batch", batch)
        READER.thread_number(num_threads)
        self._num_threads = num_threads

    def __repr__(self) -> str:
        source = repr(self._path) if self._path else repr(self._layer)
        options = f"output={self._output!r}, batch={self._batch}, num_threads={self._num_threads}"
        return f"{type(self).__name__}({source}, {options})"

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | ({"_layer": None} if self._path else {})

    # ------------------------------------------------------------------------------------------------------------ calls
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, sequences: list[Any] | tuple[Any, ...] | Array
    ) -> list[Any]: ...
    @overload
    def __call__(self, sequences: Iterable[Any]) -> Iterator[Any]: ...
    def __call__(self, sequences: Iterable[Any]) -> list[Any] | Iterator[Any]:
        """Score sequences.

        Parameters
        ----------
        sequences : iterable of array_like (t, I)
            Each of the layer's dtype, with at least one step, unless a `Dense` with `last` stands at the end; lists
            are converted. A list, a tuple or an array of them; a column of Arrow's, of lists of lists or, if I is 1, of
            lists; or another iterable, such as a generator.

        Returns
        -------
        list or iterator
            A result for each sequence, in their order. Other iterables than those named give an iterator. It reads
            nothing before its first result is asked for, and then up to 32 times `batch` sequences at a time, which it
            sorts; fewer if they are long. It copies them, so the iterable may use its arrays again.

        Raises
        ------
        TypeError
            A sequence has another dtype than the layer, or is no array.
        ValueError
            A sequence has another shape, or no steps, of which the layer has no output.
        """
        layer = self._load_layer()
        pyarrow: Any = sys.modules.get("pyarrow")  # who has a column has imported it
        if pyarrow and isinstance(sequences, (pyarrow.Array, pyarrow.ChunkedArray)):
            sequences = _read_column(sequences, layer.input_size, pyarrow)
        try:
            values = iter(sequences)
        except TypeError:
            values = None
        if values is None or isinstance(sequences, (Mapping, str, bytes)):
            expected = "expected a list, or another iterable, of arrays (t, I)"
            raise TypeError(f"{READER.caller}: sequences is {short(sequences)}; {expected}")
        if not isinstance(sequences, (list, tuple, np.ndarray)):
            return self._score_windows(layer, values)
        arrays = [_read(layer, k, value) for k, value in enumerate(values)]
        return self._score(layer, arrays, 0)

    def _score_windows(self, layer: BaseLayer[Any], values: Iterator[Any]) -> Iterator[Any]:
        """Iterate over the results for sequences, of which as many are in memory at a time as are sorted together."""
        arrays, held, first = list[Array](), 0, 0
        width = layer.input_size + layer.output_size
        for k, value in enumerate(values):
            arrays.append(np.array(_read(layer, k, value), layer.dtype))
            held += len(arrays[-1]) * width
            if len(arrays) >= (self._batch if held >= ENOUGH else WINDOW * self._batch):
                yield from self._score(layer, arrays, first)
                arrays, held, first = [], 0, k + 1
        yield from self._score(layer, arrays, first)

    def _score(self, layer: BaseLayer[Any], arrays: Sequence[Array], first: int) -> list[Any]:
        """Return the results for sequences in memory, of which the first one has the number `first`."""
        threads, results = _threads.num_threads(self._num_threads), list[Any](arrays)
        for numbers in _plan_batches([len(array) for array in arrays], self._batch):
            some = [arrays[k] for k in numbers]
            for k, result in zip(numbers, self._compute_batch(layer, some, threads), strict=True):
                try:
                    results[k] = self._output(result) if callable(self._output) else result
                except Exception as error:
                    error.add_note(f"{READER.caller}: output was called with y of sequences[{first + k}]")
                    raise
        return results

    def _compute_batch(self, layer: BaseLayer[Any], arrays: Sequence[Array], threads: int) -> list[Array]:
        """Return the results of a batch, or y of each sequence for a function; the first sequence is the longest."""
        lengths = np.array([len(array) for array in arrays], np.int64)
        x = np.empty((lengths[0], len(arrays), layer.input_size), layer.dtype)
        for b, array in enumerate(arrays):
            x[: len(array), b] = array
        y, _ = layer._compute(x, None, lengths, None, threads)
        if layer._over_time:
            if self._output not in ("last", "mean"):
                return [y[:length, b].copy() for b, length in enumerate(lengths)]
            y = _mean_rows(y, lengths) if self._output == "mean" else _last_rows(y, lengths, layer._directions(False))
        return [row.copy() for row in y]  # so that none keeps the others in memory

    def _load_layer(self) -> BaseLayer[Any]:
        """Return the layer, which the first call in another process than the scorer's own reads from the file."""
        if self._layer is None:
            assert self._path is not None
            layer, sha256 = _load_once(self._path)
            if sha256 != self._sha256:
                reason = f"{self._path} holds another layer than when this scorer was made"
                raise ValueError(f"{READER.caller}: {reason}; expected one with the checksum {self._sha256}")
            self._layer = layer
        return self._layer


# ------------------------------------------------------------------------------------------------------------ sequences
def _read(layer: BaseLayer[Any], k: int, value: Any) -> Array:
    """Return the k-th sequence as an array that can be converted to the layer's dtype."""
    size, dtype = layer.input_size, layer.dtype
    if type(value) is np.ndarray:
        if value.dtype == dtype and value.ndim == 2 and value.shape[1] == size and len(value):
            return value
        if value.dtype == object:
            value = value.tolist()  # what pandas has of lists of lists
    if isinstance(value, (list, tuple)) and not value:
        value = np.empty((0, size), dtype)
    name, expected = f"sequences[{k}]", f"(t, I) with I={size} from the layer"
    array = checked_array(READER, name, value, dtype, (None, size), expected)
    if not len(array) and layer._over_time:
        raise ValueError(f"{READER.caller}: {name} has no steps; expected at least one")
    return array


def _plan_batches(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Iterate over the numbers of sequences for one batch, longest first; no more than half of it is padding."""
    batch: list[int] = []
    steps = 0
    for k in sorted(range(len(lengths)), key=lambda k: -lengths[k]):
        if batch and (len(batch) == most or (len(batch) + 1) * lengths[batch[0]] > 2 * (steps + lengths[k])):
            yield batch
            batch, steps = [], 0
        batch.append(k)
        steps += lengths[k]
    if batch:
        yield batch


def _read_column(column: Any, size: int, pyarrow: Any) -> list[Array]:
    """Return the sequences of a column of Arrow's, whose steps have `size` numbers; nothing is copied."""
    types, sequences = pyarrow.types, list[Array]()

    def without_nulls(values: Any) -> Any:
        if values.null_count:
            raise ValueError(f"{READER.caller}: sequences has a null; expected numbers")
        return values

    def lengths_of(lists: Any) -> Array:
        if types.is_fixed_size_list(lists.type):
            return np.full(len(lists), lists.type.list_size)
        if types.is_list(lists.type) or types.is_large_list(lists.type):
            return np.asarray(lists.value_lengths())
        raise TypeError(f"{READER.caller}: sequences is a column of {column.type}; expected lists of lists of numbers")

    for chunk in column.chunks if isinstance(column, pyarrow.ChunkedArray) else [column]:
        lengths, steps = lengths_of(without_nulls(chunk)), chunk.flatten()
        if size != 1 or types.is_nested(steps.type):
            if (lengths_of(without_nulls(steps)) != size).any():
                reason = f"has a step that is not of {size} numbers; expected (t, I) with I={size}"
                raise ValueError(f"{READER.caller}: sequences {reason}")
            steps = steps.flatten()
        rows = without_nulls(steps).to_numpy(zero_copy_only=False).reshape(lengths.sum(), size)
        sequences += [rows[start:end] for start, end in pairwise([0, *np.cumsum(lengths).tolist()])]
    return sequences


# -------------------------------------------------------------------------------------------------------------- results
def _last_rows(y: Array, lengths: Array, directions: Directions) -> Array:
    """Return y of each row at the last step of each direction, [B,H]."""
    last_rows, rows = np.empty(y.shape[1:], y.dtype), np.arange(len(lengths))
    for columns, reverse in columns_of(directions):
        last_rows[:, columns] = y[0, :, columns] if reverse else y[lengths - 1, rows, columns]
    return last_rows


def _mean_rows(y: Array, lengths: Array) -> Array:
    """Return the mean of each row over its steps, [B,H]; y is zero past them."""
    sums = np.zeros(y.shape[1:], np.promote_types(y.dtype, np.float32))
    with np.errstate(over="ignore", invalid="ignore"):
        for step in y:
            sums += step
        sums /= lengths[:, None].astype(sums.dtype)
    return sums.astype(y.dtype)


# ---------------------------------------------------------------------------------------------------------------- files
_reading = threading.Lock()


def _load_once(path: str) -> tuple[BaseLayer[Any], str]:
    """Read the layer in a file and its checksum: once for each process, unless the file is replaced."""
    status = os.stat(path)
    with _reading:
        layer_and_sum = _read_file(path, status.st_ino, status.st_size, status.st_mtime_ns)
    return layer_and_sum  # not within, where tests let Ctrl-C strike between the reading and the end of the block


@functools.lru_cache(maxsize=8)
def _read_file(path: str, *version: int) -> tuple[BaseLayer[Any], str]:
    layer = read_any(path)
    return layer, files.checksum(layer._description(), layer._arrays_of_file())


@in_forked_child
def _renew_lock() -> None:
    global _reading
    _reading = threading.Lock()
