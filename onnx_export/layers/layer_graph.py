"""The graph of a layer: `op_function` gives the cells, and `LayerGraph` connects them."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import FunctionProto, ModelProto, TensorProto, helper, inliner, numpy_helper

from blockcell.activations import may_overflow
from blockcell.convert.onnx_graph import graph_digest
from blockcell.layers import Bidirectional, Dense, Layer, Stack
from blockcell.layers.cell_ops import CellPass, describe_cell
from blockcell.layers.structure import passes_dense_alone, state_sizes
from blockcell.optable import Array

from ..cells import integers
from ..cells.body import op_function
from ..cells.config import NODE_WEIGHTS, Config, Form
from ..nodes import (
    DOMAIN,
    Nodes,
    add_new_nodes,
    drop_import,
    make_model,
    make_node,
    rename_values,
    select_needed,
    unused_name,
)
from .graph_builder import GraphBuilder
from .signature import LayerArrays, Shape, Signature, layer_signature
from .weights import is_int8, node_weights


@dataclass(frozen=True)
class CellTape:
    """What the backward pass of a cell needs of its forward pass."""

    arguments: dict[str, str]
    """Values of the arguments and results of the cell's function, by their names in it."""
    first_states: dict[str, str]
    reverse: bool


@dataclass
class LayerGraph:
    """Builds the graph of a layer, forward and backward. g, in methods, is the builder of its nodes."""

    caller: str
    """The public function for which it is built, with which messages begin."""
    layer: Layer
    dtype: np.dtype[Any]
    sizes: dict[str, int]
    """T and B, where they are fixed."""
    form: Form
    takes: Collection[str]
    """The inputs beside x, of lengths, reset, state, d_state and, in a step of training, mask."""
    train: bool
    """Whether weights are inputs, for `backward`."""
    streaming: bool = False
    weights: dict[str, Array] = field(default_factory=dict)
    """The initializers; none where weights are inputs."""
    integer: bool = False
    """Whether products with matrices of int8 codes are in integers."""
    results: dict[str, str] = field(default_factory=dict)
    """The values of outputs, by the outputs' names: states, and gradients to states and weights."""
    functions: dict[str, FunctionProto] = field(default_factory=dict)
    """The functions of the model, by their names."""
    _cells: list[tuple[Config, FunctionProto]] = field(default_factory=list)
    """The functions of cells, by what they depend on."""

    def __post_init__(self) -> None:
        self.lengths, self.reset, self.state, self.d_state = (
            name in self.takes for name in ("lengths", "reset", "state", "d_state")
        )
        self.graph = GraphBuilder(self.dtype, self.sizes, self.streaming, self.lengths)

    @property
    def native(self) -> bool:
        return self.form.loop == "native"

    def model(self) -> ModelProto:
        """Return the model of the layer's call and, with `train`, of its gradients."""
        g, layer, arrays = self.graph, self.layer, self.arrays()
        signature = layer_signature(arrays, self.takes, self.train)

        # A gradient multiplies what lies past a row's length by zero, which NaN survives.
        x = g.zero_padding("x") if self.train or self._head_reads_x else "x"
        self.results["y"], tape = self.forward(layer, "", x, False)
        if self.train:
            d_x = self.backward(layer, "", tape, self._zero_padding(layer, "d_y"))
            self.results["d_x"] = g.zero_padding(d_x) if self._head_reads_x else d_x
        model = self.finish(signature, {})
        model.metadata_props.add(key="blockcell.digest", value=graph_digest(model))
        return model

    def finish(self, signature: Signature, metadata: Mapping[str, str]) -> ModelProto:
        """Return the model of all nodes and functions so far, with these metadata beside those of the layer."""
        graph = helper.make_graph(
            self._output_nodes(signature.inputs.keys(), [*signature.outputs]),
            type(self.layer).__name__,
            [self.graph.typed_value(name, *type_) for name, type_ in signature.inputs.items()],
            [self.graph.typed_value(name, *type_) for name, type_ in signature.outputs.items()],
            [numpy_helper.from_array(array, name) for name, array in self.weights.items()],
            doc_string=repr(self.layer),
        )
        about_layer = {"layer": json.dumps(self.layer._description()), "loop": self.form.loop}
        model = make_model(graph, self.form.opset, [*self.functions.values()], about_layer | dict(metadata))
        if self.form.inlined:
            model = inliner.inline_local_functions(model)
            drop_import(model, DOMAIN)
        return model

    def _output_nodes(self, inputs: Collection[str], outputs: Sequence[str]) -> Nodes:
        """Return the nodes that the outputs need, with the outputs' names for their values."""
        names: dict[str, str] = {}
        for name in outputs:
            value = self.results[name]
            if value in inputs or value in names:
                self.graph.nodes.append(make_node("Identity", [value], [name], name=name))
            else:
                names[value] = name
        return select_needed(rename_values(self.graph.nodes, names), outputs)

    def arrays(self) -> LayerArrays:
        """Return the shapes of the layer's arrays."""
        layer, rows = self.layer, ["B"] if self.streaming else ["T", "B"]
        states: dict[str, Shape] = {
            prefix + name: ["B", size]
            for prefix, cell in layer._leaves().items()
            for name, size in state_sizes(cell).items()
        }
        return LayerArrays(
            helper.np_dtype_to_tensor_dtype(self.dtype),
            [*rows, layer.input_size],
            [*(rows if layer._over_time else ["B"]), layer.output_size],
            states,
            {name: array.shape for name, array in layer.weights.items()},
        )

    # ----------------------------------------------------------------------------------------------------------- layers
    def forward(self, layer: Layer, prefix: str, x: str, reverse: bool) -> tuple[str, Any]:
        """Add the forward pass of a layer; return y and the tape for its backward pass."""
        if isinstance(layer, Stack):
            tapes = []
            for k, child in enumerate(layer.layers):
                x, tape = self.forward(child, f"{prefix}{k}.", x, reverse)
                tapes.append(tape)
            return x, tapes
        if isinstance(layer, Bidirectional):
            if self.streaming:
                where = f"{prefix.rstrip('.')} is" if prefix else "layer is"
                raise TypeError(
                    f"{self.caller}: {where} a Bidirectional, which begins at the last step; it cannot be streaming"
                )
            fw, fw_tape = self.forward(layer.fw, f"{prefix}fw.", x, reverse)
            bw, bw_tape = self.forward(layer.bw, f"{prefix}bw.", x, not reverse)
            return self.graph.concat(fw, bw, axis=2), (fw_tape, bw_tape)
        if isinstance(layer, Dense):
            return self._forward_dense(layer, prefix, x)
        return self._forward_cell(layer, prefix, x, reverse)

    def backward(self, layer: Layer, prefix: str, tape: Any, d_y: str, needs_d_x: bool = True) -> str:
        """Add the backward pass of a layer; return the gradient to x, or "" where it is not needed."""
        g = self.graph
        if isinstance(layer, Stack):
            for k, child in reversed([*enumerate(layer.layers)]):
                d_y = self.backward(child, f"{prefix}{k}.", tape[k], d_y, needs_d_x or k > 0)
            return d_y
        if isinstance(layer, Bidirectional):
            n, axis = layer.fw.output_size, g.ints(2)
            fw = g.add("Slice", d_y, g.ints(0), g.ints(n), axis)
            bw = g.add("Slice", d_y, g.ints(n), g.ints(2 * n), axis)
            d_fw = self.backward(layer.fw, f"{prefix}fw.", tape[0], fw, needs_d_x)
            d_bw = self.backward(layer.bw, f"{prefix}bw.", tape[1], bw, needs_d_x)
            return g.add("Add", d_fw, d_bw) if needs_d_x else ""
        if isinstance(layer, Dense):
            return self._backward_dense(layer, prefix, tape, d_y, needs_d_x)
        return self._backward_cell(layer, prefix, tape, d_y, needs_d_x)

    def _forward_cell(self, cell: Any, prefix: str, x: str, reverse: bool) -> tuple[str, CellTape]:
        g, states = self.graph, state_sizes(cell)
        reverse ^= cell.reverse
        first_states = {name: self._first_state(prefix + name, size) for name, size in states.items()}
        arguments = {"x": g.reverse_steps(x) if reverse else x}
        for name, value in first_states.items():
            arguments[f"{name}_prev"] = g.zero_empty_rows(value) if self.train and self.state else value
        arguments |= {name: self._weight(prefix + name) for name in cell.weights}
        arguments |= {f"{name}_scale": f"{prefix}{name}.scale" for name in cell.weights}
        if self.reset:
            arguments["fresh"] = g.reset_steps(reverse)
        if self.lengths:
            arguments["lengths"] = g.add("Cast", "lengths", to=TensorProto.INT32)
        tape = CellTape(arguments, first_states, reverse)
        if self.streaming and reverse:
            where = f"{prefix.rstrip('.')} has" if prefix else "layer has"
            raise TypeError(f"{self.caller}: {where} reverse=True and begins at the last step; it cannot be streaming")
        if self.streaming:
            c = self._config(cell, prefix, describe_cell(cell, "Step", states))
            results = self._call(cell, prefix, "Step", c, arguments)
            self.results |= {prefix + name: results[name] for name in states}
            return results["h"], tape
        y = self._forward_steps(cell, prefix, tape)
        return (g.reverse_steps(y) if reverse else y), tape

    def _forward_steps(self, cell: Any, prefix: str, tape: CellTape) -> str:
        """Add a cell's forward pass over all steps, in the order in which they run; return y."""
        g, states, arguments = self.graph, state_sizes(cell), tape.arguments
        # With lengths, a loop gives the states of all steps; ONNX's own LSTM gives cs only at the rows' last steps.
        gathered = () if not self.lengths else ("h",) if self.native else states
        last_states = [name for name in states if name not in gathered]
        outputs = None if self.train else {"h", *gathered}
        c = self._config(cell, prefix, describe_cell(cell, "", outputs, last_states))
        if self.native:
            names = self._pack(cell, prefix)
            zeros = {} if self.state else {f"{name}_first": self._native_zeros(cell.hidden_size) for name in states}
            arguments |= {name: self._weight(prefix + name) for name in names} | zeros
        results = self._call(cell, prefix, "", c, arguments)
        arguments |= results
        if self.train and may_overflow(cell._activations.values()):
            # Steps past a row's length run, too, and inf or NaN would survive the zeros that are their gradients.
            arguments |= {name: g.zero_padding(array) for name, array in results.items() if not name.endswith("_last")}
        for name in states:
            last = g.gather_steps(results[name], g.last_steps()) if name in gathered else results[f"{name}_last"]
            if self.lengths:
                last = g.add("Where", g.nonempty_rows(), last, tape.first_states[name])
            self.results[prefix + name] = last
        return g.zero_padding(results["h"])

    def _backward_cell(self, cell: Any, prefix: str, tape: CellTape, d_y: str, needs_d_x: bool) -> str:
        g = self.graph
        d_y = g.zero_padding(d_y) if self._is_in_head(cell) else d_y
        unused = [*["cs_grad"] * (not self.d_state), *["x_grad"] * (not needs_d_x)]
        c = self._config(cell, prefix, describe_cell(cell, "Grad", unused=unused))
        arguments = {**tape.arguments, "h_grad": g.reverse_steps(d_y) if tape.reverse else d_y}
        if self.d_state:
            shape = g.concat(g.size("T"), g.size("B"), g.ints(cell.hidden_size))
            arguments["cs_grad"] = g.add("Expand", g.zero(), shape)
            for name in tape.first_states:  # the gradient to the state after the last step
                d_steps, is_last = arguments[f"{name}_grad"], g.is_step(g.last_steps())
                d_sum = g.add("Add", d_steps, f"d_{prefix}{name}")
                arguments[f"{name}_grad"] = g.add("Where", is_last, d_sum, d_steps)
        results = self._call(cell, prefix, "Grad", c, arguments)
        if self.d_state:
            for name in tape.first_states:
                d_first = results[f"{name}_prev_grad"]
                if self.lengths:
                    d_first = g.add("Where", g.nonempty_rows(), d_first, f"d_{prefix}{name}")
                self.results[f"d_{prefix}{name}_prev"] = d_first
        self.results |= {f"d_{prefix}{name}": results[f"{name}_grad"] for name in cell.weights}
        if not needs_d_x:
            return ""
        return g.reverse_steps(results["x_grad"]) if tape.reverse else results["x_grad"]

    # ----------------------------------------------------------------------------------------------------- dense layers
    def _forward_dense(self, layer: Dense, prefix: str, x: str) -> tuple[str, tuple[str, str]]:
        g = self.graph
        if layer.last and not self.streaming:
            x = self._last_rows(layer, x)
        if self._in_integers(layer, prefix):
            y = f"{prefix}z"
            nodes = integers.write_product(x, f"{prefix}w", f"{prefix}w.scale", f"{prefix}b", y)
            names = {name: g.constant(np.asarray(number)) for name, number in integers.CONSTANTS.items()}
            g.nodes = add_new_nodes(g.nodes, rename_values(nodes, names | {"at_last": g.ints(-1)}))
        else:
            product = g.add("MatMul", g.cast_to_compute(x), g.cast_to_compute(self._weight(f"{prefix}w")))
            y = g.add("Add", product, g.cast_to_compute(f"{prefix}b"))
        if layer.activation is not None:
            axis = {"axis": -1} if layer.activation == "softmax" else {}
            y = g.add(layer.activation.capitalize(), y, **axis)
        y = self._zero_padding(layer, g.cast_to_storage(y))
        return y, (x, y)

    def _backward_dense(self, layer: Dense, prefix: str, tape: tuple[str, str], d_y: str, needs_d_x: bool) -> str:
        g = self.graph
        x, y, d = (g.cast_to_compute(array) for array in (*tape, d_y))
        zero, one = (g.constant(np.array(number, g.compute)) for number in (0, 1))
        if layer.activation == "sigmoid":
            d = g.add("Mul", g.add("Mul", d, y), g.add("Sub", one, y))
        elif layer.activation == "tanh":
            d = g.add("Mul", d, g.add("Sub", one, g.add("Mul", y, y)))
        elif layer.activation == "relu":
            d = g.add("Where", g.add("Greater", y, zero), d, zero)
        elif layer.activation == "softmax":
            total = g.add("ReduceSum", g.add("Mul", d, y), g.ints(-1), keepdims=1)
            d = g.add("Mul", y, g.add("Sub", d, total))
        else:
            assert layer.activation is None, layer.activation
        rows, d_rows = (array if layer.last else g.add("Flatten", array, axis=2) for array in (x, d))
        self.results[f"d_{prefix}w"] = g.cast_to_storage(g.add("Gemm", rows, d_rows, transA=1))
        self.results[f"d_{prefix}b"] = g.cast_to_storage(g.add("ReduceSum", d_rows, g.ints(0), keepdims=0))
        if not needs_d_x:
            return ""
        # Before 1.26, onnxruntime fuses MatMul with Transpose in float64, too, for which it then has no kernel.
        d_x = g.add("Gemm", d_rows, g.cast_to_compute(f"{prefix}w"), transB=1)
        shape = g.concat(g.size("T"), g.size("B"), g.ints(layer.input_size))
        d_x = g.cast_to_storage(d_x if layer.last else g.add("Reshape", d_x, shape, allowzero=1))
        return self._spread_last_rows(layer, d_x, shape) if layer.last else d_x

    def _last_rows(self, layer: Dense, x: str) -> str:
        """Return the rows [B, I] of x [T, B, I] that a layer with `last` reads."""
        g, rows = self.graph, []
        for columns, backwards in self._columns_by_direction(layer, x, 2):
            first = g.constant(np.array(0, np.int64))
            last = g.last_steps(self._lengths_of(layer))
            rows.append(g.add("Gather", columns, first, axis=0) if backwards else g.gather_steps(columns, last))
        return g.concat(*rows, axis=1) if len(rows) > 1 else rows[0]

    def _spread_last_rows(self, layer: Dense, d_rows: str, shape: str) -> str:
        """Return the gradient to x, of this shape, of a layer with `last`, from the one to the rows that it reads."""
        g, d_columns = self.graph, []
        for columns, backwards in self._columns_by_direction(layer, d_rows, 1):
            step = g.ints(0) if backwards else g.last_steps(self._lengths_of(layer))
            d_columns.append(g.add("Where", g.is_step(step), columns, g.zero()))
        d_x = g.concat(*d_columns, axis=2) if len(d_columns) > 1 else d_columns[0]
        return g.add("Expand", d_x, shape)  # which some runtimes do not find out

    def _columns_by_direction(self, layer: Dense, array: str, axis: int) -> list[tuple[str, bool]]:
        """Return the columns of each direction of the layer below, and whether it runs backwards."""
        directions, columns, start = layer._directions_of_x(), [], 0
        for size, backwards in directions:
            limits = map(self.graph.ints, (start, start + size, axis))
            columns.append((self.graph.add("Slice", array, *limits) if len(directions) > 1 else array, bool(backwards)))
            start += size
        return columns

    # ------------------------------------------------------------------------------------------------------------ cells
    def configs(self) -> list[Config]:
        """Return a configuration of each cell, of which the form may be refused."""
        pass_name = "Step" if self.streaming else "Grad" if self.train else ""
        cells: dict[str, Any] = {name: cell for name, cell in self.layer._leaves().items() if state_sizes(cell)}
        return [self._config(cell, prefix, describe_cell(cell, pass_name)) for prefix, cell in cells.items()]

    def _config(self, cell: Any, prefix: str, described: CellPass) -> Config:
        """Return the configuration of a cell's function."""
        firsts = () if self.state else tuple(f"{name}_first" for name in state_sizes(cell))
        return Config(
            f"{self.caller}: {prefix.rstrip('.')}" if prefix else self.caller,
            described.op,
            self.dtype,
            {**self.sizes, **described.sizes},
            described.attrs,
            self.form,
            runs_all_steps=True,
            reset=self.reset,
            lengths=self.lengths and self.native and "cs" in state_sizes(cell),
            node_inputs=(*NODE_WEIGHTS, *firsts) if self.native else (),
            integers=self._in_integers(cell, prefix),
        )

    def _call(self, cell: Any, prefix: str, pass_name: str, c: Config, arguments: Mapping[str, str]) -> dict[str, str]:
        """Add a call of a cell's function; return its results, by the names of the function's outputs."""
        called = next((of_cell for called_config, of_cell in self._cells if called_config == c), None)
        if called is None:
            called = op_function(c, unused_name(f"{type(cell).__name__}{pass_name}", self.functions))
            self._cells.append((c, called))
            self.functions[called.name] = called
        return self.graph.call(called, arguments, prefix + called.name)

    # ---------------------------------------------------------------------------------------------------------- weights
    def _weight(self, name: str) -> str:
        """Return the value of a weight; a quantized one is dequantized unless its products are in integers."""
        array, scale = self.weights.get(name), f"{name}.scale"
        if array is None or array.dtype not in (np.int8, np.float16) or self.dtype == np.float16:
            return name
        # No DequantizeLinear: onnxruntime 1.32 fuses it with a product, which then rounds x as well, or computes it in
        # every run. The Concat of one part keeps OpenVINO from fusing Cast and Mul so.
        weight = self.graph.add("Cast", name, to=TensorProto.FLOAT)
        return self.graph.concat(self.graph.add("Mul", weight, scale)) if scale in self.weights else weight

    def _in_integers(self, cell: Any, prefix: str) -> bool:
        """Return whether the products of a cell are integer GEMMs."""
        return self.integer and is_int8(cell, prefix, self.weights)

    def _pack(self, cell: Any, prefix: str) -> list[str]:
        """Put a cell's weights into the layout of ONNX's own LSTM, GRU or RNN; return their names there."""
        if not cell.hidden_size:  # there is no such node
            return []
        names = [name + ending for name in cell.weights for ending in ("", ".scale")]
        stored = {name: self.weights.pop(prefix + name) for name in names if prefix + name in self.weights}
        arrays = node_weights(cell, stored)
        self.weights |= {prefix + name: array for name, array in arrays.items()}
        return [name for name in NODE_WEIGHTS if name in arrays]

    # ----------------------------------------------------------------------------------------------- states and padding
    def _first_state(self, name: str, size: int) -> str:
        """Return a state before the first step, [B, size]."""
        g = self.graph
        if self.state:
            return f"{name}_prev"
        if self.native and size:  # the cell gets `_native_zeros`; only rows without steps read it, so any shape will do
            return g.zero()
        return g.add("Expand", g.zero(), g.concat(g.size("B"), g.ints(size)))

    def _native_zeros(self, size: int) -> str:
        """Return a state of zeros as ONNX's own LSTM, GRU or RNN takes it, [1, B, H]."""
        g = self.graph
        if "B" in self.sizes:
            return g.constant(np.zeros((1, self.sizes["B"], size), self.dtype))
        return g.add("Expand", g.zero(), g.concat(g.ints(1), g.size("B"), g.ints(size)))

    def _lengths_of(self, layer: Layer) -> str:
        """Return the rows' lengths; at least 1 for dense layers at the end, where y is of last steps."""
        if self.lengths and isinstance(layer, Dense) and (layer.last or self._is_in_head(layer)):
            return self.graph.add("Max", "lengths", self.graph.ints(1))
        return "lengths"

    def _is_in_head(self, layer: Any) -> bool:
        """Return whether a dense layer with `last` reads the layer's y, perhaps through other dense layers."""
        return layer._in_head and not self.layer._over_time

    @property
    def _head_reads_x(self) -> bool:
        """Return whether y is of last steps, and x passes only dense layers on its way."""
        return not self.layer._over_time and passes_dense_alone(self.layer)

    def _zero_padding(self, layer: Layer, array: str) -> str:
        """Set a layer's y, or the gradient to it, to zero at padding steps; a y of last steps has none."""
        return self.graph.zero_padding(array, self._lengths_of(layer)) if layer._over_time else array
