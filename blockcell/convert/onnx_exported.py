"""Models that `onnx_export.export` wrote on random inputs, beside their layers: `compare_exported`.

Functions and loops run here, node by node, with the bounds of ``onnx_run.py``; a loop's steps count one by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..layers import Layer
from ..layers.structure import state_sizes
from ..optable import Array
from .comparison import Crossing, NotCompared, Outcome, choose_sizes, compare
from .models import cell_states, nest_states, read_initial_state
from .onnx_graph import CALLER, OnnxGraph, fixed_sizes, is_recurrent, is_standard
from .onnx_node import key_of
from .onnx_run import COMPUTED, LARGEST_RUN, LARGEST_WORK, Engine, remarks_on_fixed, size_and_work

_COMPUTED = COMPUTED | {"Clip", "Elu", "Exp", "HardSigmoid", "LeakyRelu", "Range", "Selu", "Softplus", "Softsign"}
_MOST_NODES = 2**14  # that run, with those of each step of a loop
_MOST_SESSIONS = 2**11  # nodes that are not the same one
_DEEPEST = 8  # functions and loops in each other
_LARGEST_INPUT = 2**20  # numbers


def compare_exported(model: Any, layer: Any) -> Outcome:
    """Compare the layer that a model describes with what the model computes.

    Raises
    ------
    ConversionError
        The model computes something else than it says.
    """
    try:
        run = _Run(model, layer)
        sizes = {size for leaf in layer._leaves().values() for size in (leaf.input_size, leaf.output_size)}
        compare(CALLER, run, choose_sizes(run.fixed.get("T"), run.fixed.get("B"), sizes))
    except NotCompared as error:
        return Outcome(remarks=[error.remark])
    return Outcome(remarks=remarks_on_fixed({} if run.is_one_step else run.fixed))


class _Run:
    """Runs a model: a `comparison.Run`."""

    def __init__(self, model: Any, layer: Layer) -> None:
        self.graph = graph = OnnxGraph(model.graph, model.opset_import)
        self.layer = layer
        self.engine = Engine(graph.opsets, ignore_clip=False)
        self.nodes = [*graph.nodes]
        self.functions = {
            (function.domain, function.name): (function, [*function.node]) for function in model.functions
        }
        self.bodies: dict[int, tuple[Any, list[Any]]] = {}
        """The graphs of loops and their nodes, by the numbers of the loops' nodes."""
        self.constants: dict[str, Array] = {}
        shape = fixed_sizes(graph.shape("x") or [], -1)
        self.is_one_step = len(shape) == 2
        sizes = {"T": 1, "B": shape[0]} if self.is_one_step else dict(zip("TB", shape, strict=False))
        self.fixed = {name: size for name, size in sizes.items() if size >= 0}
        cells = {prefix: state_sizes(leaf) for prefix, leaf in layer._leaves().items()}
        self.cells = {prefix: sizes for prefix, sizes in cells.items() if sizes}
        """The sizes of each cell's states, by their names."""
        self.states = {f"{prefix}{name}": size for prefix, cell in cells.items() for name, size in cell.items()}
        if any(tensor.data_type == tensor.UINT8 for tensor in graph.tensors.values()):
            raise NotCompared("it rounds x and h to 8 bits in each step, and the layer does not")
        versions = {
            opset.version for part in (model, *model.functions) for opset in part.opset_import if not opset.domain
        }
        if len(versions) != 1:
            raise NotCompared("its functions are of another version of ONNX's operators")
        known = {"x", "lengths", "reset", *(f"{name}_prev" for name in self.states)}
        if unknown := sorted(graph.inputs - known - graph.tensors.keys()):
            raise NotCompared(f"it has the input {unknown[0]!r}")

    def __call__(self, T: int, B: int, seed: int, scale: float) -> list[Crossing]:
        g, layer = np.random.default_rng(seed), self.layer
        columns = next(iter(layer._leaves().values())).input_size
        if max(T, 1) * B * max(columns, *self.states.values(), 1) > _LARGEST_INPUT:
            raise NotCompared("its inputs are too large")
        x = (g.standard_normal((T, B, columns)) * scale).astype(layer.dtype)
        inputs = {"x": x[0] if self.is_one_step else x}
        options: dict[str, Any] = {}
        if "lengths" in self.graph.inputs:
            options["lengths"] = g.integers(1, T + 1, B)
            options["lengths"][0] = T
        if "reset" in self.graph.inputs:
            options["reset"] = g.random((T, B)) < 0.2
        first = {name: (g.standard_normal((B, size)) * scale).astype(layer.dtype) for name, size in self.states.items()}
        if first and all(f"{name}_prev" in self.graph.inputs for name in first):
            inputs |= {f"{name}_prev": array for name, array in first.items()}
            cells = [{name: first[f"{prefix}{name}"] for name in sizes} for prefix, sizes in self.cells.items()]
            options["state"] = read_initial_state(CALLER, layer, nest_states(layer, iter(cells)))
        inputs |= {name: options[name] for name in ("lengths", "reset") if name in options}
        try:
            values = self._values(inputs)
        except (IndexError, TypeError, ValueError) as error:  # shapes or tensors that no export has
            raise NotCompared(f"it does not run: {error}") from error
        return [Crossing("the model", layer, x, values, self._read, options, self.engine.eps)]

    def _read(self, y: Array, last: Any) -> Mapping[str, Array]:
        """Return the results of a call by the names that they have in the model."""
        results = {"y": y[0] if self.is_one_step and y.ndim == 3 else y}
        for (prefix, sizes), cell in zip(self.cells.items(), cell_states(last), strict=True):
            results |= {f"{prefix}{name}": getattr(cell, name) for name in sizes}
        return results

    # --------------------------------------------------------------------------------------------------------- nodes
    def _values(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return the results of the model."""
        self.constants = self.constants or {name: self.graph.array(name) for name in self.graph.tensors}
        self.count, self.work = 0, 0.0
        self.size = -2.0 * sum(array.size for array in self.constants.values())
        results = self._run(self.nodes, {**self.constants, **inputs}, 0)
        return {name: _value(results, name) for name in ("y", *self.states)}

    def _run(self, nodes: Sequence[Any], values: dict[str, Array], depth: int) -> dict[str, Array]:
        """Return the values with those that nodes compute from them."""
        values = {"": np.empty(0), **values}
        for node in nodes:
            self._count()
            if depth > _DEEPEST:
                raise NotCompared("its functions and loops are too deep in each other")
            inputs = [_value(values, name) for name in node.input]
            if (node.domain, node.op_type) in self.functions:
                results = self._call(node, inputs, depth)
            elif is_standard(node) and node.op_type in ("Loop", "Scan"):
                results = self._loop(node, inputs, values, depth)
            else:
                results = self._compute(node, inputs)
            values |= zip(node.output, results, strict=False)
        return values

    def _count(self, nodes: int = 1) -> None:
        self.count += nodes
        if self.count > _MOST_NODES or len(self.engine.sessions) > _MOST_SESSIONS:
            raise NotCompared("it has too many nodes, or its loops have too many steps")

    def _call(self, node: Any, inputs: Sequence[Array], depth: int) -> list[Array]:
        function, nodes = self.functions[node.domain, node.op_type]
        results = self._run(nodes, dict(zip(function.input, inputs, strict=False)), depth + 1)
        return [_value(results, name) for name in function.output]

    def _loop(self, node: Any, inputs: Sequence[Array], around: dict[str, Array], depth: int) -> list[Array]:
        """Run a Scan along the first axis, or a Loop."""
        attributes = {attribute.name: attribute for attribute in node.attribute}
        if not {"body"} <= attributes.keys() <= {"body", "num_scan_inputs"} or len(inputs) < 2:
            raise NotCompared(f"{key_of(node)} ({node.op_type}) is not as blockcell writes it")
        body, nodes = self.bodies.setdefault(id(node), (attributes["body"].g, [*attributes["body"].g.node]))
        is_scan = node.op_type == "Scan"
        scanned = attributes["num_scan_inputs"].i if "num_scan_inputs" in attributes else 0
        carried, arrays = [*inputs[0 if is_scan else 2 :]], []
        if is_scan:
            carried, arrays = carried[: len(carried) - scanned], carried[len(carried) - scanned :]
        lengths = {len(array) if array.ndim else 0 for array in arrays} if is_scan else {int(inputs[0].item())}
        if len(lengths) != 1 or body.initializer or (not is_scan and not inputs[1].all()):
            raise NotCompared(f"{key_of(node)} ({node.op_type}) is not as blockcell writes it")
        rows: list[list[Array]] = []
        self._count(steps := lengths.pop())
        for t in range(steps):
            step = [*carried, *(array[t] for array in arrays)]
            step = step if is_scan else [np.asarray(t, np.int64), np.asarray(True), *step]
            values = self._run(
                nodes, around | dict(zip((value.name for value in body.input), step, strict=False)), depth + 1
            )
            results = [_value(values, value.name) for value in body.output]
            if not is_scan and not results.pop(0).all():
                raise NotCompared(f"{key_of(node)} (Loop) ends before its last step")
            count = len(carried)
            carried = results[:count]
            rows.append(results[count:])
            self._add(node, sum(array.size for array in rows[-1]), 0)
        return [*carried, *(np.stack(arrays_of_steps) for arrays_of_steps in zip(*rows, strict=True))]

    def _compute(self, node: Any, inputs: Sequence[Array]) -> list[Array]:
        """Compute the results of a node of ONNX's own."""
        if not is_standard(node) or not (is_recurrent(node) or node.op_type in _COMPUTED):
            raise NotCompared(f"{key_of(node)} ({node.op_type}) is no operator that runs here")
        arrays = [array if name else None for array, name in zip(inputs, node.input, strict=True)]
        self._add(node, *size_and_work(node, [array for array in arrays if array is not None]))
        with np.errstate(all="ignore"):
            return self.engine.run(node, arrays)

    def _add(self, node: Any, size: float, work: float) -> None:
        """Count the numbers and the multiplications of a node that is about to run."""
        self.size += size
        self.work += work
        if not (self.work <= LARGEST_WORK and self.size <= LARGEST_RUN):
            raise NotCompared(f"{key_of(node)} ({node.op_type}) would take too long or too much memory")


def _value(values: Mapping[str, Array], name: str) -> Array:
    if name not in values:
        raise NotCompared(f"{name!r} is not in it")
    return values[name]
