"""The graph of a layer: the functions of `build` are the cells, and `LayerGraph` connects them."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from onnx import (
    FunctionProto,
    GraphProto,
    ModelProto,
    TensorProto,
    ValueInfoProto,
    helper,
    inliner,
    numpy_helper,
)

from blockcell import __version__
from blockcell.activations import unusual
from blockcell.layers import GRU, LSTM, Bidirectional, Dense, Layer, Stack
from blockcell.layers.base import Single
from blockcell.optable import OPS, Array, Op, Tensor

from . import integers
from .activations import may_overflow
from .build import DOMAIN, PACKED, Config, Value, check_native, config, constant, function, packed
from .link import drop_import
from .loops import Nodes, needed, node, renamed


def _step_of(op: Op) -> Op:
    """A sequence's op without time, where there is none of a single step."""
    inputs, outputs = (
        tuple(replace(tensor, shape=tensor.shape.removeprefix("T ")) for tensor in tensors)
        for tensors in (op.inputs, op.outputs)
    )
    return replace(op, sequence=False, inputs=inputs, outputs=outputs)


def _of_layer(op: Op, cell: Any) -> Op:
    """The op with the gates and weights of a layer, which may be an LSTM that is coupled or has a projection."""
    weights: dict[str, Tensor] = {tensor.name: tensor for tensor in cell._tensors}
    missing = {tensor.name for tensor in op.weights} - weights.keys()

    def sized(tensor: Tensor) -> Tensor:
        if known := weights.get(tensor.name.removesuffix("_grad")):
            return replace(tensor, shape=known.shape)
        of_h = "w_p" in weights and tensor.name in ("h", "h_prev", "h_grad", "h_prev_grad")
        return replace(tensor, shape=tensor.shape.replace("H", "P")) if of_h else tensor

    inputs, outputs = (
        [sized(tensor) for tensor in tensors if tensor.name.removesuffix("_grad") not in missing]
        for tensors in (op.inputs, op.outputs)
    )
    if "w_p" in weights:
        inputs.append(weights["w_p"])
        if "grad" in op.kernel:
            outputs.append(Tensor("w_p_grad", weights["w_p"].shape, "output"))
    return replace(op, gates=cell._gates, inputs=tuple(inputs), outputs=tuple(outputs))


# The ops whose texts the functions have, by the order of an LSTM's gates, by where a GRU resets, and of an RNN. A
# function has no op's name, because its inputs and outputs are not those of the op.
RESET_AFTER, PLAIN = OPS["block_gru_reset_after"], OPS["block_rnn"]
OPS_OF = {
    "icfo": {"Step": OPS["LSTMBlockCell"], "": OPS["BlockLSTM"], "Grad": OPS["BlockLSTMGrad"]},
    "ifco": {"Step": OPS["LSTMBlockCell"], "": OPS["BlockLSTMV2"], "Grad": OPS["BlockLSTMGradV2"]},
    "before": {"Step": OPS["GRUBlockCell"], "": OPS["block_gru"], "Grad": OPS["block_gru_grad"]},
    "after": {"Step": _step_of(RESET_AFTER), "": RESET_AFTER, "Grad": OPS["block_gru_reset_after_grad"]},
    "plain": {"Step": _step_of(PLAIN), "": PLAIN, "Grad": OPS["block_rnn_grad"]},
}


def is_int8(cell: Single, prefix: str, weights: Mapping[str, Array]) -> bool:
    """Say whether the matrices of a cell are codes in 8 bits."""
    return f"{prefix}{cell._tensors[0].name}.scale" in weights


# ------------------------------------------------------------------------------------------------------------ the graph
@dataclass(frozen=True)
class _Tape:
    """What the backward pass of a cell needs of its forward pass."""

    arguments: dict[str, str]
    first: dict[str, str]
    reverse: bool


@dataclass
class LayerGraph:
    """Builds a graph. Values have names; a node that is asked for twice is made once."""

    caller: str
    layer: Layer
    dtype: np.dtype[Any]
    weights: dict[str, Array]
    """The initializers; none where weights are inputs."""
    integer: bool
    """Whether products with matrices of int8 codes are in integers."""
    sizes: Mapping[str, int]
    options: Mapping[str, Any]
    inlined: bool
    streaming: bool
    train: bool
    lengths: bool
    reset: bool
    state: bool
    nodes: Nodes = field(default_factory=list)
    inputs: list[ValueInfoProto] = field(default_factory=list)
    results: dict[str, str] = field(default_factory=dict)
    """The names of the values of the outputs, by the outputs' names."""
    configs: list[tuple[Config, FunctionProto]] = field(default_factory=list)
    _made: dict[Any, str] = field(default_factory=dict)
    _turned: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._products = integers.IntegerProducts()

    @property
    def _takes_d_state(self) -> bool:
        """Whether gradients to the state after the last step are inputs."""
        return self.state

    @property
    def native(self) -> bool:
        return bool(self.options["loop"] == "native")

    @property
    def functions(self) -> list[FunctionProto]:
        return [made for _, made in self.configs]

    @property
    def facts(self) -> dict[str, str]:
        """What the model's metadata say of it."""
        return {"layer": json.dumps(self.layer._description()), "loop": self.options["loop"]}

    def model(self) -> ModelProto:
        imports = [helper.make_opsetid("", self.options["opset"])]
        model: ModelProto = helper.make_model(
            self.graph(),
            opset_imports=[*imports, helper.make_opsetid(DOMAIN, 1)],
            functions=self.functions,
            ir_version=max(8, helper.find_min_ir_version_for(imports)),
            producer_name="blockcell",
            producer_version=__version__,
        )
        if self.inlined:
            model = inliner.inline_local_functions(model)
            drop_import(model, DOMAIN)
        provenance = {"version": __version__, **self.facts}
        helper.set_model_props(model, {f"blockcell.{key}": value for key, value in provenance.items()})
        return model

    def _states(self) -> dict[str, Sequence[int | str]]:
        """The shapes of the states after the last step."""
        return {
            p + s: ["B", size]
            for p, cell in self.layer._cells().items()
            for s, size in zip(cell._state._fields, cell._state_sizes, strict=True)
        }

    def _shapes(self) -> dict[str, Sequence[int | str]]:
        """The shapes of x, y, states and weights."""
        layer, states, rows = self.layer, self._states(), ["B"] if self.streaming else ["T", "B"]
        shapes: dict[str, Sequence[int | str]] = {"x": [*rows, layer.input_size]}
        shapes["y"] = [*(rows if layer._over_time else ["B"]), layer.output_size]
        shapes |= states | {f"{name}_prev": shape for name, shape in states.items()}
        return shapes | {name: array.shape for name, array in layer.weights.items()}

    def graph(self) -> GraphProto:
        layer, weights, states, shapes = self.layer, self.layer.weights, self._states(), self._shapes()
        inputs = ["x", *(f"{name}_prev" for name in states if self.state)]
        if self.train:
            inputs += [*weights, "d_y", *(f"d_{name}" for name in states if self.state)]
        self.inputs = [self._value(name, shapes[name.removeprefix("d_")]) for name in inputs]
        self.inputs[1:1] = self._about_rows()

        # A gradient multiplies what lies past a row's length by zero, which NaN survives.
        y, tape = self._forward(layer, "", self._live("x") if self.train or self._head_reads_x else "x", False)
        self.results["y"] = y
        outputs = ["y", *states]
        if self.train:
            d_x = self._backward(layer, "", tape, self._counted(layer, "d_y"))
            self.results["d_x"] = self._live(d_x) if self._head_reads_x else d_x
            outputs += ["d_x", *(f"d_{name}_prev" for name in states if self.state), *(f"d_{name}" for name in weights)]
        return self._made_of([self._value(name, shapes[name.removeprefix("d_")]) for name in outputs])

    def _about_rows(self) -> list[ValueInfoProto]:
        """The inputs that say where rows end and where episodes start."""
        values = [self._value("lengths", ["B"], TensorProto.INT64)] if self.lengths else []
        return values + ([self._value("reset", ["T", "B"], TensorProto.BOOL)] if self.reset else [])

    def _made_of(self, outputs: Sequence[ValueInfoProto]) -> GraphProto:
        return helper.make_graph(
            self._finished([value.name for value in outputs]),
            type(self.layer).__name__,
            self.inputs,
            outputs,
            [numpy_helper.from_array(array, name) for name, array in self.weights.items()],
            doc_string=repr(self.layer),
        )

    def _value(self, name: str, shape: Sequence[int | str], kind: int | None = None) -> ValueInfoProto:
        # onnxruntime 1.31 fails on a size that it knows to be 0: that one stays unknown.
        sizes = [self.sizes.get(size, size) if isinstance(size, str) else (size or None) for size in shape]
        return helper.make_tensor_value_info(name, kind or helper.np_dtype_to_tensor_dtype(self.dtype), sizes)

    def _finished(self, outputs: Sequence[str]) -> Nodes:
        """The nodes that the outputs need, with the outputs' names for their values."""
        given = {value.name for value in self.inputs}
        names: dict[str, str] = {}
        for name in outputs:
            value = self.results[name]
            if value in given or value in names:
                self.nodes.append(node("Identity", [value], [name], name=name))
            else:
                names[value] = name
        return needed(renamed(self.nodes, names), outputs)

    # ----------------------------------------------------------------------------------------------------------- layers
    def _forward(self, layer: Layer, prefix: str, x: str, reverse: bool) -> tuple[str, Any]:
        """y, and what the backward pass needs."""
        if isinstance(layer, Stack):
            tapes = []
            for k, part in enumerate(layer.layers):
                x, tape = self._forward(part, f"{prefix}{k}.", x, reverse)
                tapes.append(tape)
            return x, tapes
        if isinstance(layer, Bidirectional):
            if self.streaming:
                where = f"{prefix.rstrip('.')} is" if prefix else "layer is"
                raise TypeError(
                    f"{self.caller}: {where} a Bidirectional, which begins at the last step; it cannot be streaming"
                )
            fw, fw_tape = self._forward(layer.fw, f"{prefix}fw.", x, reverse)
            bw, bw_tape = self._forward(layer.bw, f"{prefix}bw.", x, not reverse)
            return self._add("Concat", fw, bw, axis=2), (fw_tape, bw_tape)
        if isinstance(layer, Dense):
            return self._forward_dense(layer, prefix, x)
        return self._forward_cell(layer, prefix, x, reverse)

    def _backward(self, layer: Layer, prefix: str, tape: Any, d_y: str, wanted: bool = True) -> str:
        """The gradient to x, from that to y; empty if it is not wanted."""
        if isinstance(layer, Stack):
            for k, part in reversed([*enumerate(layer.layers)]):
                d_y = self._backward(part, f"{prefix}{k}.", tape[k], d_y, wanted or k > 0)
            return d_y
        if isinstance(layer, Bidirectional):
            n, at_2 = layer.fw.output_size, self._ints(2)
            fw = self._add("Slice", d_y, self._ints(0), self._ints(n), at_2)
            bw = self._add("Slice", d_y, self._ints(n), self._ints(2 * n), at_2)
            d_fw = self._backward(layer.fw, f"{prefix}fw.", tape[0], fw, wanted)
            d_bw = self._backward(layer.bw, f"{prefix}bw.", tape[1], bw, wanted)
            return self._add("Add", d_fw, d_bw) if wanted else ""
        if isinstance(layer, Dense):
            return self._backward_dense(layer, prefix, tape, d_y, wanted)
        return self._backward_cell(layer, prefix, tape, d_y, wanted)

    def _forward_cell(self, cell: Any, prefix: str, x: str, reverse: bool) -> tuple[str, _Tape]:
        names = cell._state._fields
        reverse ^= cell.reverse
        sizes = zip(names, cell._state_sizes, strict=True)
        first = {name: self._first(prefix + name, size) for name, size in sizes}
        arguments = {"x": self._turn(x) if reverse else x}
        for name, value in first.items():
            arguments[f"{name}_prev"] = self._of_begun(value) if self.train and self.state else value
        arguments |= {name: self._weight(prefix + name) for name in cell.weights}
        arguments |= {f"{name}_scale": f"{prefix}{name}.scale" for name in cell.weights}
        if self.reset:
            arguments["fresh"] = self._fresh(reverse)
        if self.lengths:
            arguments["lengths"] = self._add("Cast", "lengths", to=TensorProto.INT32)
        tape = _Tape(arguments, first, reverse)
        if self.streaming and reverse:
            where = f"{prefix.rstrip('.')} has" if prefix else "layer has"
            raise TypeError(f"{self.caller}: {where} reverse=True and begins at the last step; it cannot be streaming")
        if self.streaming:
            c = self._config(cell, prefix, "Step", names)
            found = self._call(cell, prefix, "Step", c, arguments)
            self.results |= {prefix + name: found[name] for name in names}
            return found["h"], tape

        if self.train:
            self._config(cell, prefix, "Grad")  # raises if there is none
        # With lengths, a loop gives the states of all steps; ONNX's own LSTM gives cs only at the rows' last steps.
        gathered = () if not self.lengths else ("h",) if self.native else names
        handed = [name for name in names if name not in gathered]
        c = self._config(cell, prefix, "", None if self.train else {"h", *gathered}, handed)
        if self.native:
            weights = self._pack(cell, prefix, c)
            zeros = {} if self.state else {f"{name}_first": self._zeros(cell.hidden_size) for name in names}
            arguments |= {name: self._weight(prefix + name) for name in weights} | zeros
            c = replace(c, direct=(*PACKED, *zeros))
        found = self._call(cell, prefix, "", c, arguments)
        arguments |= found
        if self.train and may_overflow(cell._activations.values()):
            # Steps past a row's length run, too, and inf or NaN would survive the zeros that are their gradients.
            arguments |= {name: self._live(array) for name, array in found.items() if not name.endswith("_last")}
        for name in names:
            last = self._at_ends(found[name]) if name in gathered else found[f"{name}_last"]
            if self.lengths:
                last = self._add("Where", self._begun(), last, first[name])
            self.results[prefix + name] = last
        y = self._live(found["h"])
        return (self._turn(y) if reverse else y), tape

    def _backward_cell(self, cell: Any, prefix: str, tape: _Tape, d_y: str, wanted: bool) -> str:
        d_y = self._live(d_y) if self._is_in_head(cell) else d_y
        c = self._config(cell, prefix, "Grad")
        unused = ["x_grad"] * (not wanted) + ["cs_grad"] * (not self._takes_d_state)
        inputs, outputs = (
            tuple(each for each in each_of if each.name not in unused) for each_of in (c.op.inputs, c.op.outputs)
        )
        c = replace(c, op=replace(c.op, inputs=inputs, outputs=outputs))
        arguments = {**tape.arguments, "h_grad": self._turn(d_y) if tape.reverse else d_y}
        if self._takes_d_state:
            shape = self._concat(self._size("T"), self._size("B"), self._ints(cell.hidden_size))
            arguments["cs_grad"] = self._add("Expand", self._zero(), shape)
            for name in tape.first:  # the gradient to the state after the last step
                each = arguments[f"{name}_grad"]
                arguments[f"{name}_grad"] = self._add(
                    "Where", self._last(), self._add("Add", each, f"d_{prefix}{name}"), each
                )
        found = self._call(cell, prefix, "Grad", c, arguments)
        for name in tape.first if self._takes_d_state else ():
            d_first = found[f"{name}_prev_grad"]
            if self.lengths:
                d_first = self._add("Where", self._begun(), d_first, f"d_{prefix}{name}")
            self.results[f"d_{prefix}{name}_prev"] = d_first
        self.results |= {f"d_{prefix}{name}": found[f"{name}_grad"] for name in cell.weights}
        if not wanted:
            return ""
        return self._turn(found["x_grad"]) if tape.reverse else found["x_grad"]

    # ----------------------------------------------------------------------------------------------------- dense layers
    def _forward_dense(self, layer: Dense, prefix: str, x: str) -> tuple[str, tuple[str, str]]:
        if layer.last and not self.streaming:
            x = self._at_last(layer, x)
        if not self._in_integers(layer, prefix):
            product = self._add("MatMul", self._computed(x), self._computed(self._weight(f"{prefix}w")))
            y = self._add("Add", product, self._computed(f"{prefix}b"))
        else:
            y = self._product_in_integers(prefix, x)
        if layer.activation is not None:
            axis = {"axis": -1} if layer.activation == "softmax" else {}
            y = self._add(layer.activation.capitalize(), y, **axis)
        y = self._counted(layer, self._stored(y))
        return y, (x, y)

    def _product_in_integers(self, prefix: str, x: str) -> str:
        numbers = integers.CONSTANTS
        names = {name: self._constant(np.asarray(value)) for name, value in numbers.items()}
        z = f"{prefix}z"
        made = self._products(x, f"{prefix}w", f"{prefix}w.scale", f"{prefix}b", z)
        self.nodes += renamed(made, names | {"at_last": self._ints(-1)})
        return z

    def _backward_dense(self, layer: Dense, prefix: str, tape: tuple[str, str], d_y: str, wanted: bool) -> str:
        x, y, d = (self._computed(array) for array in (*tape, d_y))
        zero, one = (self._constant(np.array(value, self.compute)) for value in (0, 1))
        if layer.activation == "sigmoid":
            d = self._add("Mul", self._add("Mul", d, y), self._add("Sub", one, y))
        elif layer.activation == "tanh":
            d = self._add("Mul", d, self._add("Sub", one, self._add("Mul", y, y)))
        elif layer.activation == "relu":
            d = self._add("Where", self._add("Greater", y, zero), d, zero)
        elif layer.activation == "softmax":
            total = self._add("ReduceSum", self._add("Mul", d, y), self._ints(-1), keepdims=1)
            d = self._add("Mul", y, self._add("Sub", d, total))
        rows, d_rows = (array if layer.last else self._add("Flatten", array, axis=2) for array in (x, d))
        self.results[f"d_{prefix}w"] = self._stored(self._add("Gemm", rows, d_rows, transA=1))
        self.results[f"d_{prefix}b"] = self._stored(self._add("ReduceSum", d_rows, self._ints(0), keepdims=0))
        if not wanted:
            return ""
        d_x = self._stored(self._add("MatMul", d, self._add("Transpose", self._computed(f"{prefix}w"))))
        return self._from_last(layer, d_x) if layer.last else d_x

    def _at_last(self, layer: Dense, x: str) -> str:
        """The rows of x that a layer with `last` reads, [B, I]."""
        parts = []
        for part, backwards in self._parts(layer, x, 2):
            first = self._constant(np.array(0, np.int64))
            last = self._last_step(self._lengths_of(layer))
            parts.append(self._add("Gather", part, first, axis=0) if backwards else self._at_steps(part, last))
        return self._concat(*parts, axis=1) if len(parts) > 1 else parts[0]

    def _from_last(self, layer: Dense, d_rows: str) -> str:
        """The gradient to x, [T, B, I], from that to these rows."""
        parts = []
        for part, backwards in self._parts(layer, d_rows, 1):
            step = self._ints(0) if backwards else self._last_step(self._lengths_of(layer))
            parts.append(self._add("Where", self._where(step), part, self._zero()))
        d_x = self._concat(*parts, axis=2) if len(parts) > 1 else parts[0]
        shape = self._concat(self._size("T"), self._size("B"), self._ints(layer.input_size))
        return self._add("Expand", d_x, shape)  # which some runtimes do not find out

    def _parts(self, layer: Dense, array: str, axis: int) -> list[tuple[str, bool]]:
        """The array by the directions of its columns, and whether they run backwards."""
        directions, parts, start = layer._directions_of_x(), [], 0
        for size, backwards in directions:
            ints = map(self._ints, (start, start + size, axis))
            parts.append((self._add("Slice", array, *ints) if len(directions) > 1 else array, bool(backwards)))
            start += size
        return parts

    @property
    def compute(self) -> np.dtype[Any]:
        """The dtype that is computed in: float16 is only for storage."""
        return np.dtype(np.float32) if self.dtype == np.float16 else self.dtype

    def _computed(self, array: str) -> str:
        return array if self.dtype == self.compute else self._add("Cast", array, to=TensorProto.FLOAT)

    def _stored(self, array: str) -> str:
        return array if self.dtype == self.compute else self._add("Cast", array, to=TensorProto.FLOAT16)

    # ------------------------------------------------------------------------------------------------------------ cells
    def _config(
        self, cell: Any, prefix: str, kind: str, outputs: Collection[str] | None = None, last: Iterable[str] = ()
    ) -> Config:
        """The configuration of a cell's function. Its outputs are these of the op's, or all of them, and the states in
        `last`, after the last step."""
        described: dict[str, Value] = {}
        if isinstance(cell, LSTM):
            ops = OPS_OF[cell.gate_order]
            described["use_peephole"] = "wcf" in cell.weights
            if kind != "Grad":
                described |= {"forget_bias": cell.forget_bias, "cell_clip": cell.cell_clip}
            if "w_p" in cell.weights:
                described["proj_clip"] = cell.proj_clip
        elif isinstance(cell, GRU):
            ops = OPS_OF["after" if cell.reset_after else "before"]
        else:
            ops = OPS_OF["plain"]
        described |= unusual(cell._activations)
        row = ops[kind]
        known = {attribute.name for attribute in row.attributes}
        sizes = {**self.sizes, "I": cell.input_size, "H": cell.hidden_size}
        where = f"{self.caller}: {prefix.rstrip('.')}: " if prefix else f"{self.caller}: "
        try:
            c = config(row, sizes=sizes, attrs={k: v for k, v in described.items() if k in known}, **self.options)
        except ValueError as error:
            raise ValueError(str(error).replace(f"{row.name}: ", where, 1)) from None
        if self.native and self.reset:
            raise ValueError(f"{where}loop='native' is not possible with reset; expected 'scan', 'unroll' or 'loop'")
        op = _of_layer(c.op, cell)
        shapes = {tensor.name: tensor.shape.removeprefix("T ") for tensor in op.outputs}
        op = replace(
            op,
            outputs=(
                *(tensor for tensor in op.outputs if outputs is None or tensor.name in outputs),
                *(Tensor(f"{name}_last", shapes[name], "output") for name in last),
            ),
        )
        fresh, lengths = self.reset, self.lengths and self.native and "cs" in cell._state._fields
        c = replace(c, op=op, attrs=described, full_length=True, fresh=fresh, lengths=lengths, inlined=self.inlined)
        c = replace(c, integers=self._in_integers(cell, prefix))
        if c.projected:
            c = replace(c, sizes={**c.sizes, "P": cell.output_size})
        check_native(where.removesuffix(": "), c)
        return c

    def _call(self, cell: Any, prefix: str, kind: str, c: Config, arguments: Mapping[str, str]) -> dict[str, str]:
        """The values of the function's outputs, by the names that these have in the function."""
        made = next((made for known, made in self.configs if known == c), None)
        if made is None:
            base, taken = f"{type(cell).__name__}{kind}", {each.name for each in self.functions}
            numbered = (f"{base}_{number}" for number in range(2, len(taken) + 3))
            made = function(c, next(name for name in (base, *numbered) if name not in taken))
            made.doc_string = f"{c.dtype}, {json.dumps(dict(c.attrs))}\n\n{made.doc_string}"
            self.configs.append((c, made))
        name = prefix + made.name
        found = {output: f"{name}.{output}" for output in made.output}
        inputs = [arguments[each] for each in made.input]
        self.nodes.append(node(made.name, inputs, [*found.values()], name=name, domain=DOMAIN))
        return found

    # ---------------------------------------------------------------------------------------------------------- weights
    def _weight(self, name: str) -> str:
        """Return the value of a weight, float32 again if it has codes and is not multiplied in integers."""
        array, scale = self.weights.get(name), f"{name}.scale"
        if array is None or array.dtype not in (np.int8, np.float16) or self.dtype == np.float16:
            return name
        # No DequantizeLinear: onnxruntime 1.32 fuses it with a product, which then rounds x as well, or computes it in
        # every run. The Concat of one part keeps OpenVINO from fusing Cast and Mul so.
        weight = self._add("Cast", name, to=TensorProto.FLOAT)
        return self._add("Concat", self._add("Mul", weight, scale), axis=0) if scale in self.weights else weight

    def _in_integers(self, cell: Any, prefix: str) -> bool:
        return self.integer and is_int8(cell, prefix, self.weights)

    def _pack(self, cell: Any, prefix: str, c: Config) -> Collection[str]:
        """Replace a cell's weights by those in the layout of ONNX's own LSTM, GRU or RNN; the names of these."""
        stored = {name: self.weights[prefix + name] for name in cell.weights}
        made = packed(c, {name: array.astype(self.dtype) for name, array in stored.items()})
        if not made:
            return ()
        of_columns = {name: self.weights.pop(f"{prefix}{name}.scale", None) for name in stored}
        scales = {name: each for name, each in of_columns.items() if each is not None}
        if scales:  # packed like the weights; all entries of a row of W have the same one
            rows = {name: np.broadcast_to(scales.get(name, array), array.shape) for name, array in stored.items()}
            scale = np.abs(packed(c, rows)["W"][0, :, :1])  # where weights are negated, codes are
            for name in ("W", "R"):
                made[name] = made[name].astype(np.int8)
                self.weights[f"{prefix}{name}.scale"] = scale
        elif stored[cell._tensors[0].name].dtype == np.float16:  # also in a float32 model
            made |= {name: made[name].astype(np.float16) for name in ("W", "R")}
        for name in stored:
            del self.weights[prefix + name]
        self.weights |= {prefix + name: array for name, array in made.items()}
        return made.keys()

    # ------------------------------------------------------------------------------------------------------------ nodes
    def _add(self, op_type: str, *inputs: str, **attributes: Any) -> str:
        key = op_type, inputs, *attributes.items()
        if key not in self._made:
            name = f"{op_type}_{len(self.nodes)}"
            self.nodes.append(node(op_type, inputs, [name], name=name, **attributes))
            self._made[key] = name
        return self._made[key]

    def _constant(self, value: Array) -> str:
        key = "Constant", value.dtype, value.shape, value.tobytes()
        if key not in self._made:
            name = f"Constant_{len(self.nodes)}"
            self.nodes.append(constant(name, value))
            self._made[key] = name
        return self._made[key]

    def _ints(self, *values: int) -> str:
        return self._constant(np.array(values, np.int64))

    def _zero(self) -> str:
        return self._constant(np.zeros((), self.dtype))

    def _size(self, letter: str) -> str:
        """T or B, as a vector of one."""
        if letter in self.sizes:
            return self._ints(self.sizes[letter])
        axis = 0 if letter == "T" or self.streaming else 1
        return self._add("Shape", "x", start=axis, end=axis + 1)

    def _range(self, letter: str) -> str:
        """0, 1, ... up to T or B."""
        if letter in self.sizes:
            return self._constant(np.arange(self.sizes[letter]))
        zero, one = (self._constant(np.array(value, np.int64)) for value in (0, 1))
        return self._add("Range", zero, self._add("Squeeze", self._size(letter)), one)

    def _first(self, name: str, size: int) -> str:
        """A state before the first step."""
        if self.state:
            return f"{name}_prev"
        if self.native and size:  # the cell gets `_zeros`; this is for rows without steps, and so may be of any shape
            return self._zero()
        return self._add("Expand", self._zero(), self._concat(self._size("B"), self._ints(size)))

    def _zeros(self, size: int) -> str:
        """A state of zeros as ONNX's own LSTM, GRU or RNN takes it, [1, B, H]."""
        if "B" in self.sizes:
            return self._constant(np.zeros((1, self.sizes["B"], size), self.dtype))
        return self._add("Expand", self._zero(), self._concat(self._ints(1), self._size("B"), self._ints(size)))

    # -------------------------------------------------------------------------------------------- where rows end, begin
    def _steps(self) -> str:
        """The steps' numbers, [T, 1]."""
        if "T" in self.sizes:
            return self._constant(np.arange(self.sizes["T"])[:, None])
        return self._add("Unsqueeze", self._range("T"), self._ints(1))

    def _lengths_of(self, layer: Layer) -> str:
        """The rows' lengths; for dense layers at the end, where y is of last steps, a row without steps has one."""
        if self.lengths and isinstance(layer, Dense) and (layer.last or self._is_in_head(layer)):
            return self._add("Max", "lengths", self._ints(1))
        return "lengths"

    def _is_in_head(self, layer: Any) -> bool:
        """Whether a dense layer with `last` reads its y, perhaps through other dense layers."""
        return bool(layer._in_head and not self.layer._over_time)

    @property
    def _head_reads_x(self) -> bool:
        """Whether y is of last steps, and x passes only dense layers on its way."""
        return not self.layer._over_time and self.layer._head()[1]

    def _last_step(self, lengths: str = "lengths") -> str:
        """The number of each row's last step, [B], or -1 for a row without steps; without lengths of all rows, [1]."""
        return self._add("Sub", lengths if self.lengths else self._size("T"), self._ints(1))

    def _live(self, array: str, lengths: str = "lengths") -> str:
        """The array, set to zero past the rows' lengths."""
        if not self.lengths:
            return array
        live = self._add("Unsqueeze", self._add("Less", self._steps(), lengths), self._ints(2))
        return self._add("Where", live, array, self._zero())

    def _counted(self, layer: Layer, array: str) -> str:
        """A layer's y, or the gradient to it, set to zero at steps that do not count. Of last steps all rows count."""
        return self._live(array, self._lengths_of(layer)) if layer._over_time else array

    def _of_begun(self, array: str) -> str:
        """Set the array [B, ..] to zero in rows without steps."""
        return self._add("Where", self._begun(), array, self._zero()) if self.lengths else array

    def _begun(self) -> str:
        """Which rows have a step, [B, 1]."""
        return self._add("Unsqueeze", self._add("Greater", "lengths", self._ints(0)), self._ints(1))

    def _last(self) -> str:
        """Where a row's last step is, [T, B, 1] or, without lengths, [T, 1, 1]."""
        return self._where(self._last_step())

    def _where(self, step: str) -> str:
        """Where a row has the step of this number, [T, B, 1], or [T, 1, 1] if it is the same of all rows."""
        return self._add("Unsqueeze", self._add("Equal", self._steps(), step), self._ints(2))

    def _rows(self, steps: str) -> str:
        """The indices in an array [T B, ...] of these steps of all rows of the batch."""
        return self._add("Add", self._add("Mul", steps, self._size("B")), self._range("B"))

    def _at_ends(self, array: str) -> str:
        """The array at the rows' last steps; rows without steps get any values."""
        return self._at_steps(array, self._last_step())

    def _at_steps(self, array: str, steps: str) -> str:
        """The array [T, B, ...] at a step of each row."""
        return self._add("Gather", self._add("Flatten", array, axis=2), self._rows(steps), axis=0)

    def _turn(self, array: str) -> str:
        """The array with each row's steps reversed. What is past the row's length stays there, because indices below
        zero count from the end."""
        if array not in self._turned:
            if self.lengths:
                steps = self._add("Sub", self._last_step(), self._steps())
                turned = self._add("Gather", self._add("Flatten", array, axis=2), self._rows(steps), axis=0)
            else:
                turned = self._add("Slice", array, self._ints(-1), self._ints(-(2**31)), self._ints(0), self._ints(-1))
            self._turned |= {array: turned, turned: array}
        return self._turned[array]

    def _fresh(self, reverse: bool) -> str:
        """Before which steps the state is zero, [T, B, 1], in the order in which they run."""
        starts = self._add("Unsqueeze", "reset", self._ints(2))
        if not reverse:
            return starts
        # An episode that starts at a step hands no state to the step that runs after it, the one before it in time.
        # Numbers are turned, because onnxruntime's Gather of bools on WebGPU, in 1.27, reads past its indices' end.
        starts = self._add("Cast", starts, to=helper.np_dtype_to_tensor_dtype(self.dtype))
        none = self._add("Expand", self._zero(), self._concat(self._ints(1), self._size("B"), self._ints(1)))
        rest = self._add("Slice", self._turn(starts), self._ints(0), self._ints(-1), self._ints(0))
        return self._add("Cast", self._add("Concat", none, rest, axis=0), to=TensorProto.BOOL)

    def _concat(self, *arrays: str, axis: int = 0) -> str:
        return self._add("Concat", *arrays, axis=axis)
