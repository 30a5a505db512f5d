"""Cells of TensorFlow 1 written as graphs and checkpoints, and what is known of them."""

from __future__ import annotations

import numpy as np
from tf_files import TYPES, constant, field, graph, node, save_variables, tensor

from blockcell import formulas
from blockcell.tensorflow import open as opened

I, H, T, B = 5, 4, 7, 3  # noqa: E741
PEEPHOLES = ("wci", "wcf", "wco")
LSTM_BIASES = {"forget_bias": 0.5, "cell_clip": 0.75}
BLOCKS = {
    "LSTMBlockCell": ["x", "cs_prev", "h_prev", "w", *PEEPHOLES, "b"],
    "BlockLSTM": ["seq_len_max", "x", "cs_prev", "h_prev", "w", *PEEPHOLES, "b"],
    "BlockLSTMV2": ["seq_len_max", "x", "cs_prev", "h_prev", "w", *PEEPHOLES, "b"],
    "GRUBlockCell": ["x", "h_prev", "w_ru", "w_c", "b_ru", "b_c"],
}
NAMES = {
    "w": "rnn/lstm_cell/kernel",
    "b": "rnn/lstm_cell/bias",
    "wci": "rnn/lstm_cell/w_i_diag",
    "wcf": "rnn/lstm_cell/w_f_diag",
    "wco": "rnn/lstm_cell/w_o_diag",
    "w_ru": "rnn/gru_cell/gates/kernel",
    "w_c": "rnn/gru_cell/candidate/kernel",
    "b_ru": "rnn/gru_cell/gates/bias",
    "b_c": "rnn/gru_cell/candidate/bias",
}


def drawn(*roles, seed=0, dtype=np.float32):
    shapes = {"w": (I + H, 4 * H), "b": (4 * H,), "w_ru": (I + H, 2 * H), "w_c": (I + H, H), "b_ru": (2 * H,)}
    g = np.random.default_rng(seed)
    return {role: g.standard_normal(shapes.get(role, (H,))).astype(dtype) for role in roles}


def real(name, value, **more):
    """Return a Const of an array, or of numbers that are float32."""
    value = np.asarray(value, np.float32 if isinstance(value, float) else None)
    return constant(name, tensor(str(value.dtype), value.shape, field(4, value.tobytes())))


def number(name, value):
    return real(name, np.int32(value))


def attributes(**values):
    encoded = {}
    for name, value in values.items():
        kind = 5 if isinstance(value, bool) else 3 if isinstance(value, int) else 4
        encoded[name] = field(kind, int(value) if kind != 4 else value)
    return encoded


def called(name):
    return field(10, field(1, name))


def kind_of(dtype):
    return field(6, TYPES[dtype])


def function(name, inputs, returned, *nodes):
    arguments = b"".join(field(2, field(1, name)) for name in inputs)
    outputs = b"".join(field(3, field(1, f"out{k}")) for k in range(len(returned)))
    ret = b"".join(field(4, field(1, f"out{k}") + field(2, output)) for k, output in enumerate(returned))
    return field(1, field(1, name) + arguments + outputs) + b"".join(field(3, message) for message in nodes) + ret


def library(*functions):
    return field(2, b"".join(field(1, definition) for definition in functions))


def write(tmp_path, *parts, more=b""):
    path = tmp_path / "graph.pb"
    path.write_bytes(graph(*parts) + more)
    return opened(path)


def exact(op, weights, x, **options):
    states = {"h_prev": np.zeros((B, H))} | ({} if op.startswith("GRU") else {"cs_prev": np.zeros((B, H))})
    name = {"LSTMBlockCell": "BlockLSTM", "GRUBlockCell": "block_gru"}.get(op, op)
    return formulas.FORMULAS[name](seq_len_max=len(x), x=x, **states, **weights, **options).h


def agrees(layer, expected, x):
    y, _ = layer(x.astype(layer.dtype))
    assert formulas.error_in_eps(y, expected, float(np.finfo(layer.dtype).eps)) <= 4


X = np.random.default_rng(7).standard_normal((T, B, I)).astype(np.float32)


def block(op, name, names, **attrs):
    others = {"seq_len_max": "steps", "x": "x", "cs_prev": "zeros", "h_prev": "zeros"}
    return node(name, op, [names.get(role, others.get(role, "zeros")) for role in BLOCKS[op]], **attributes(**attrs))


def inputs():
    return [node("x", "Placeholder"), node("zeros", "Placeholder"), node("steps", "Placeholder")]


W, V = (drawn("w", seed=seed)["w"] for seed in (1, 2))


def composed_lstm(peephole, clip, *, loop=True, order="icfo", forget=0.5, change=None):
    """Return the nodes of LSTMCell as TensorFlow 1.15 makes them; `change` puts other lines in place of some."""
    index = {gate: f":{k}" if k else "" for k, gate in enumerate(order)}
    scope = "rnn/while/lstm_cell"
    lines = {
        "axis": ("Const", 1),
        "concat": ("ConcatV2", "x", "h_prev", "axis"),
        "kernel": ("Enter", "=rnn/lstm_cell/kernel"),
        "bias": ("Enter", "=rnn/lstm_cell/bias"),
        "MatMul": ("MatMul", "concat", "kernel"),
        "BiasAdd": ("BiasAdd", "MatMul", "bias"),
        "split": ("Split", "axis", "BiasAdd", {"num_split": 4}),
        "forget": ("Const", float(forget)),
        "f_bar": ("AddV2", f"split{index['f']}", "forget"),
        "f": ("Sigmoid", "f_peep" if peephole else "f_bar"),
        "i": ("Sigmoid", "i_peep" if peephole else f"split{index['i']}"),
        "j": ("Tanh", f"split{index['c']}"),
        "keep": ("Mul", "f", "c_prev"),
        "new": ("Mul", "i", "j"),
        "total": ("AddV2", "keep", "new"),
        "top": ("Const", 0.25),
        "bottom": ("Const", -0.25),
        "below": ("Minimum", "total", "top"),
        "clipped": ("Maximum", "below", "bottom"),
        "c": ("Identity", "clipped" if clip else "total"),
        "o": ("Sigmoid", "o_peep" if peephole else f"split{index['o']}"),
        "co": ("Tanh", "c"),
        "h": ("Mul", "o", "co"),
    }
    if peephole:
        for gate, of, state in (("i", f"split{index['i']}", "c_prev"), ("f", "f_bar", "c_prev"),
                                ("o", f"split{index['o']}", "c")):  # fmt: skip
            lines[f"{gate}_times"] = ("Mul", f"=rnn/lstm_cell/w_{gate}_diag", state)
            lines[f"{gate}_peep"] = ("AddV2", of, f"{gate}_times")
    lines |= looped("c", "h") if loop else {"c_prev": ("Placeholder",), "h_prev": ("Placeholder",)}
    return scoped_nodes(scope, lines | (change or {}))


def composed_gru(change=None):
    lines = {
        "axis": ("Const", 1),
        "concat": ("ConcatV2", "x", "h_prev", "axis"),
        "MatMul": ("MatMul", "concat", "=rnn/gru_cell/gates/kernel"),
        "BiasAdd": ("BiasAdd", "MatMul", "=rnn/gru_cell/gates/bias"),
        "gates": ("Sigmoid", "BiasAdd"),
        "split": ("Split", "axis", "gates", {"num_split": 2}),
        "reset": ("Mul", "split", "h_prev"),
        "concat_1": ("ConcatV2", "x", "reset", "axis"),
        "MatMul_1": ("MatMul", "concat_1", "=rnn/gru_cell/candidate/kernel"),
        "BiasAdd_1": ("BiasAdd", "MatMul_1", "=rnn/gru_cell/candidate/bias"),
        "c": ("Tanh", "BiasAdd_1"),
        "keep": ("Mul", "split:1", "h_prev"),
        "one": ("Const", 1.0),
        "rest": ("Sub", "one", "split:1"),
        "new": ("Mul", "rest", "c"),
        "h": ("AddV2", "keep", "new"),
    }
    return scoped_nodes("rnn/while/gru_cell", lines | looped("h") | (change or {}))


def looped(*states):
    lines = {"cond": ("Placeholder",), "start": ("Placeholder",)}
    for state in states:
        lines |= {
            f"{state}_enter": ("Enter", "start"),
            f"{state}_merge": ("Merge", f"{state}_enter", f"{state}_next"),
            f"{state}_switch": ("Switch", f"{state}_merge", "cond"),
            f"{state}_prev": ("Identity", f"{state}_switch:1"),
            f"{state}_next": ("NextIteration", state),
        }
    return lines


def scoped_nodes(scope, lines):
    """Make nodes of lines: name: (op, inputs..., attributes); "=name" and "x" are names outside of the scope."""
    nodes = []
    for name, (op, *operands) in lines.items():
        if op == "Const":
            value = operands[0]
            nodes.append(real(f"{scope}/{name}", np.int32(value) if isinstance(value, int) else value))
            continue
        values = operands.pop() if operands and isinstance(operands[-1], dict) else {}
        names = [text[1:] if text[0] == "=" else text if text == "x" else f"{scope}/{text}" for text in operands]
        attrs = {key: value if isinstance(value, bytes) else attributes(k=value)["k"] for key, value in values.items()}
        nodes.append(node(f"{scope}/{name}", op, names, **attrs))
    return nodes


def lstm_consts(peephole):
    weights = drawn("w", "b", *(PEEPHOLES if peephole else ()))
    return weights, [real(NAMES[role], value) for role, value in weights.items()]


def of_all_kinds():
    """Return a graph with a cell of each kind, for fuzz_tensorflow.py, too."""
    _, consts = lstm_consts(True)
    weights = drawn("w_ru", "w_c", "b_ru", "b_c")
    parts = [*inputs(), *consts, *composed_lstm(True, True)]
    parts += [*(real(NAMES[role], value) for role, value in weights.items()), *composed_gru()]
    parts += [block("BlockLSTM", "block", {"w": NAMES["w"], "b": NAMES["b"]}, **LSTM_BIASES)]
    parts += [real("v/part_0", W[:3]), real("v/part_1", W[3:]), number("zero", 0), real("c", drawn("b")["b"])]
    parts += [node("v", "ConcatV2", ["v/part_0", "v/part_1", "zero"])]
    arguments = ["x", "zeros", "steps", "w", "b"]
    body = function("body", arguments, arguments, block("LSTMBlockCell", "cell", {"w": "w", "b": "b"}))
    cond = function("cond", arguments, ["steps"])
    loops = {"body": called("body"), "cond": called("cond")}
    parts += [node("loop", "While", ["x", "zeros", "steps", "v", "c"], **loops)]
    return graph(*parts) + library(body, cond)


def write_variables(tmp_path, values):
    return opened(save_variables(tmp_path / "model.ckpt", values))


def checkpoint_of(scope="rnn/lstm_cell", roles=("w", "b", *PEEPHOLES), seed=0):
    return {NAMES[role].replace("rnn/lstm_cell", scope): value for role, value in drawn(*roles, seed=seed).items()}
