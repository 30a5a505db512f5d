"""The sums before the activations of gates: products, biases and numbers, each with its slice of a variable.

In comes a place; out goes its sum or gate. Cells differ in whether one product for all gates is split or a kernel is,
and in whether x and h share a kernel. In the sum of a gate all of these are alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ....activations import Activation
from ..graph.activations import LINEAR, find_activation
from ..graph.array_slices import read_strided_index, split_axis, split_range
from ..graph.graph_reader import Place, UnknownValue
from .weight_slices import IndexRange, WeightSlice
from .weight_sources import WeightSources

_MOST_TERMS = 32
_MOST_VIEWS = 6  # parts of parts

ColumnCut = Callable[[int], IndexRange]
"""Returns start and stop of the columns that are taken, by how many there are."""


class NoMatch(Exception):
    """Nodes do not have the form of a pattern."""


class Operand(NamedTuple):
    """The left side of a product, x or the state, and the slice of a kernel on the right side."""

    place: Place
    kernel: WeightSlice
    rows: str = "all"
    """``"first"`` and ``"last"`` are concatenated in one product, and share the rows of the kernel."""

    @property
    def key(self) -> tuple[object, ...]:
        """What identifies the operand in all steps."""
        return self.kernel.key, self.rows

    def kernel_rows(self, hidden: int, is_state: bool) -> WeightSlice:
        """Return the rows of the kernel for the state, of `hidden` units, or for x."""
        row_count = self.kernel.shape[0]
        if self.rows == "all":
            return self.kernel
        size = hidden if is_state else row_count - hidden
        if not 0 < size < row_count:
            raise UnknownValue(f"{self.kernel.source.name} of {row_count} rows, beside {hidden} units")
        return self.kernel.rows(0, size) if self.rows == "first" else self.kernel.rows(row_count - size, row_count)


@dataclass
class GateSum:
    """The terms of a sum."""

    products: list[Operand] = field(default_factory=list)
    biases: list[WeightSlice] = field(default_factory=list)
    constant: float = 0.0
    other_terms: list[Place] = field(default_factory=list)


class Gate(NamedTuple):
    """An activation and the sum that it is applied to."""

    activation: Activation
    sum: GateSum


class GateSums:
    """Reads nodes of a graph as the ops of a pattern, and the sums of gates."""

    def __init__(self, sources: WeightSources) -> None:
        self.reader, self.sources = sources.reader, sources

    # ---------------------------------------------------------------------------------------------------------- nodes
    def op_name(self, place: Place) -> str:
        """Return the name of the op that makes a value."""
        return self.reader.op(self.reader.resolve_in_step(place)).name

    def input_pair(self, place: Place, op: str) -> tuple[Place, Place]:
        """Return the two inputs of the node that makes a value, which must be this op."""
        inputs = self.reader.inputs_of(place, op)
        if len(inputs) != 2:
            raise NoMatch
        return inputs[0], inputs[1]

    def input_orders(self, place: Place, op: str) -> tuple[tuple[Place, ...], ...]:
        """Return the two inputs of a node of an op, in both orders."""
        pair = self.input_pair(place, op)
        return pair, pair[::-1]

    def read_product(self, place: Place) -> Operand:
        """Return the left side and the kernel of the product with a kernel that makes a value."""
        operand, kernel = self.input_pair(place, "MatMul")
        attrs = self.reader.attrs(self.reader.resolve_in_step(place))
        piece = self.sources.slice(kernel)
        if attrs.get("transpose_a") or attrs.get("transpose_b") or len(piece.shape) != 2:
            raise NoMatch
        return Operand(operand, piece)

    # ----------------------------------------------------------------------------------------------------------- sums
    def read_sum(self, place: Place, cuts: Sequence[ColumnCut] = ()) -> GateSum:
        """Read the sum at a place, of which `cuts` take columns, the last one first."""
        total, waiting = GateSum(), [(place, tuple(cuts))]
        for _ in range(_MOST_TERMS):
            if not waiting:
                return total
            current, cuts = waiting.pop(0)
            current = self.reader.resolve_in_step(current)
            op, inputs = self.reader.op(current).name, self.reader.inputs_at(current)
            if op in ("Add", "BiasAdd") and len(inputs) == 2:
                waiting = [*((term, cuts) for term in inputs), *waiting]
            elif (cut := self._column_cut(current)) is not None:
                waiting = [(cut[0], (*cuts, cut[1])), *waiting]
            elif op == "MatMul":
                product = self.read_product(current)
                total.products.append(product._replace(kernel=_cut_columns(product.kernel, cuts)))
            else:
                self._add_term(total, current, cuts)
        raise NoMatch

    def read_gate(self, place: Place) -> Gate | None:
        """Read a gate, of which columns may be taken before or behind the activation; None without a product."""
        try:
            gate = self._read_gate(place)
        except (NoMatch, UnknownValue):
            return None
        return gate if gate.sum.products else None

    def _read_gate(self, place: Place) -> Gate:
        """Read a gate; columns that are taken of an activation are the same columns of the sum in it."""
        current, cuts = place, list[ColumnCut]()
        for _ in range(_MOST_VIEWS):
            current = self.reader.resolve_in_step(current)
            activated = find_activation(self.reader, current)
            if activated is not None:
                return Gate(activated.activation, self.read_sum(activated.inner, cuts))
            if (cut := self._column_cut(current)) is None:
                break
            current = cut[0]
            cuts.append(cut[1])
        # without an activation, all from `place` on belongs to the sum, and read_sum finds what takes columns by itself
        return Gate(LINEAR, self.read_sum(place))

    def _column_cut(self, place: Place) -> tuple[Place, ColumnCut] | None:
        """Return what a node takes columns of, and which; None if it does not take columns."""
        op = self.reader.op(place)
        if op.view != "columns":
            return None
        [array] = self.reader.operands(place)
        if op.name != "StridedSlice":
            is_along_columns = split_axis(self.reader, place) in (1, -1)
            return (array, lambda size: split_range(self.reader, place, size)) if is_along_columns else None
        index = read_strided_index(self.reader, place)
        columns = index[-1]
        if len(index) != 2 or index[0] != slice(None) or not isinstance(columns, slice):
            return None
        return array, lambda size: columns.indices(size)[:2]

    def _add_term(self, total: GateSum, place: Place, cuts: tuple[ColumnCut, ...]) -> None:
        """Add a number, a bias or another term to a sum."""
        try:
            piece = self.sources.slice(place)
        except UnknownValue:
            if cuts:
                raise NoMatch from None
            total.other_terms.append(place)
            return
        if not piece.shape:
            total.constant += self.reader.constant_number(place)
        elif len(piece.shape) == 1:
            total.biases.append(_cut_columns(piece, cuts))
        else:
            raise NoMatch


def _cut_columns(piece: WeightSlice, cuts: tuple[ColumnCut, ...]) -> WeightSlice:
    """Take columns, by the last cut first."""
    for cut in reversed(cuts):
        piece = piece.columns(*cut(piece.shape[-1]))
    return piece
