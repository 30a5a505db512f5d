"""Cells of many nodes: BasicLSTMCell, LSTMCell, GRUCell and what else has the layout of the block cells.

Each is found backwards from its last node, and only if every node on the way is one of the cell's own. What looks like
a cell and is none of these is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ..optable import GATE_ORDERS
from .evaluate import step_of
from .found import Found, Step
from .graphs import Node
from .sequences import At
from .trace import Place, Source, Tracer, Unknown

_KINDS = {
    "basic_lstm_cell": "BasicLSTMCell",
    "lstm_cell": "LSTMCell",
    "cudnn_compatible_lstm_cell": "CudnnCompatibleLSTMCell",
    "gru_cell": "GRUCell",
}
_ADD = ("Add", "AddV2")
_CELL = re.compile(r"\A(lstm|gru)|(lstm|gru)\w*_cell(_\d+)?\Z", re.IGNORECASE)
_NORMAL = re.compile(r"layer_?norm|/(gamma|beta)\Z", re.IGNORECASE)
_MOST_TERMS = 8


class Other(Exception):
    """This is not the pattern."""


@dataclass
class Match:
    """A cell's nodes as they were found."""

    cell: str
    body: str
    last: Node
    x: Place
    states: tuple[Place, ...]
    """Before the step: h, or cs and h."""
    results: tuple[Place, ...]
    """After it."""
    weights: dict[str, Place]
    attributes: dict[str, Any] = field(default_factory=dict)


def found_composed(tracer: Tracer, known: set[str]) -> list[Found]:
    """The cells of many nodes in a graph, and those that look like some; `known` are weights of cells that are one node."""
    matches: list[tuple[Match, dict[str, Source]]] = []
    for body, node in tracer.all_nodes():
        for pattern in (_lstm, _gru):
            try:
                match = pattern(tracer, body, node)
                matches.append((match, {role: tracer.source(place) for role, place in match.weights.items()}))
            except (Other, Unknown):
                continue
    products = _products(tracer)
    ends: dict[str, list[Place]] = {}
    for match, sources in matches:
        ends.setdefault(_kernel(sources).name, []).append(match.results[-1])
    refusals: dict[str, str] = {}
    for match, sources in matches:
        name = _kernel(sources).name
        reason = _misused(tracer, match, name, ends[name], products)
        if reason:
            refusals.setdefault(name, reason)
    steps: dict[tuple[object, ...], Step] = {}
    for match, sources in matches:
        key = _kernel(sources).name, match.body, *match.attributes.items()
        if key not in steps and _apart(tracer, match):
            steps[key] = step_of(tracer, match.x, match.states, match.results, match.weights)
    found = []
    for match, sources in matches:
        name = _kernel(sources).name
        scope = re.sub(r"/(gates|candidate)\Z", "", name.partition(" + ")[0].rpartition("/")[0]).rpartition("/")[2]
        kind = _KINDS.get(re.sub(r"_\d+\Z", "", scope), match.cell)
        step, refused = steps.get((name, match.body, *match.attributes.items())), refusals.get(name)
        if step is None:
            refused = refused or "its input and its states are not told apart: they come from one node"
        at = At(match.body, match.x, match.states[-1], match.results[-1])
        more: dict[str, Any] = {"attributes": match.attributes, "step": step, "at": at, "refused": refused}
        found.append(Found(match.last.name, kind, [match.last.name], cell=match.cell, sources=sources, **more))
    covered = {source.name for _, sources in matches for source in sources.values()}
    products = [each for each in products if each[-1].name not in known or not each[1].attrs.get("transpose_b")]
    return found + _refused(tracer, products, covered)


def _apart(tracer: Tracer, match: Match) -> bool:
    """Whether input and states are several tensors: in a first step the states may be one, of zeros."""
    try:
        places = [tracer.straight(place) for place in (match.x, *match.states)]
    except Unknown:
        return False
    return len({*places}) == len(places)


def _kernel(sources: dict[str, Source]) -> Source:
    return sources["w"] if "w" in sources else sources["w_c"]


# ------------------------------------------------------------------------------------------------------------ patterns
def _made(tracer: Tracer, place: Place, *ops: str) -> tuple[Node, tuple[Place, ...], int]:
    """The node that makes a value, which must be one of these ops; its inputs, and which output this is."""
    node = tracer.node(place)
    for _ in range(_MOST_TERMS):
        if node is None or node.op not in ("Identity", "Snapshot"):
            break
        (place, *_) = tracer.inputs(place.body, node) or [place]
        node = tracer.node(place)
    if node is None or (ops and node.op not in ops):
        raise Other
    return node, tracer.inputs(place.body, node), place.output


def _pair(tracer: Tracer, place: Place, *ops: str) -> tuple[Place, Place]:
    _, inputs, _ = _made(tracer, place, *ops)
    if len(inputs) != 2:
        raise Other
    return inputs[0], inputs[1]


def _op(tracer: Tracer, place: Place) -> str:
    try:
        return _made(tracer, place)[0].op
    except Other:
        return ""


def _only(inputs: tuple[Place, ...]) -> Place:
    if len(inputs) != 1:
        raise Other
    return inputs[0]


def _same(tracer: Tracer, one: Place, other: Place) -> bool:
    return tracer.straight(one) == tracer.straight(other)


def _split_of(tracer: Tracer, place: Place, count: int) -> tuple[Place, int, Node]:
    """What is split, which part this is, and the node."""
    node, inputs, k = _made(tracer, place, "Split")
    if node.attrs.get("num_split") != count or len(inputs) != 2 or tracer.number(inputs[0]) not in (1, -1):
        raise Other
    return inputs[1], k, node


def _affine(tracer: Tracer, place: Place) -> tuple[Place, Place, Place]:
    """What is multiplied, the kernel and the bias."""
    product, bias = _pair(tracer, place, "BiasAdd", *_ADD)
    node, inputs, _ = _made(tracer, product, "MatMul")
    attrs = node.attrs
    if len(inputs) != 2 or attrs.get("transpose_a") or attrs.get("transpose_b"):
        raise Other
    return inputs[0], inputs[1], bias


def _beside(tracer: Tracer, place: Place) -> tuple[Place, Place]:
    """The two arrays that are put beside each other."""
    _, inputs, _ = _made(tracer, place, "ConcatV2")
    if len(inputs) != 3 or tracer.number(inputs[2]) not in (1, -1):
        raise Other
    return inputs[0], inputs[1]


@dataclass
class Gate:
    """The sum that goes into a gate's sigmoid."""

    part: Place | None = None
    constant: float = 0.0
    diagonal: tuple[Place, Place] | None = None
    """Peephole weights and the state that they are for."""


def _gate(tracer: Tracer, place: Place, states: Iterable[Place]) -> Gate:
    """A part of the product, a constant and a peephole, in any order."""
    (_, inputs, _), gate = _made(tracer, place, "Sigmoid"), Gate()
    left = [_only(inputs)]
    for _ in range(_MOST_TERMS):
        if not left:
            return gate
        term = left.pop()
        op = _op(tracer, term)
        if op in _ADD:
            left += _pair(tracer, term, *_ADD)
        elif op == "Split" and gate.part is None:
            gate.part = term
        elif op == "Mul" and gate.diagonal is None:
            one, other = _pair(tracer, term, "Mul")
            known = [tracer.straight(state) for state in states]
            if tracer.straight(one) in known:
                one, other = other, one
            if tracer.straight(other) not in known:
                raise Other
            gate.diagonal = one, other
        else:
            gate.constant += tracer.value(term)
    raise Other


def _lstm(tracer: Tracer, body: str, last: Node) -> Match:
    """From h = sigmoid(o) * tanh(cs)."""
    if last.op != "Mul":
        raise Other
    here = Place(body, last.name)
    one, other = _pair(tracer, here, "Mul")
    out, co = (one, other) if _op(tracer, one) == "Sigmoid" else (other, one)
    if _op(tracer, out) != "Sigmoid" or _op(tracer, co) != "Tanh":
        raise Other
    cs = _only(_made(tracer, co, "Tanh")[1])
    total, clip = _clipped(tracer, cs)
    products = _pair(tracer, total, *_ADD)
    for forget_product, input_product in (products, products[::-1]):
        pair = _pair(tracer, input_product, "Mul")
        ops = [_op(tracer, each) for each in pair]
        if sorted(ops) != ["Sigmoid", "Tanh"]:
            continue
        new, candidate = pair if ops[0] == "Sigmoid" else pair[::-1]
        for keep, cs_prev in _both(_pair(tracer, forget_product, "Mul")):
            if _op(tracer, keep) == "Sigmoid":
                gates = {
                    "i": _gate(tracer, new, [cs_prev]),
                    "f": _gate(tracer, keep, [cs_prev]),
                    "o": _gate(tracer, out, [cs]),
                    "ci": Gate(_only(_made(tracer, candidate, "Tanh")[1])),
                }
                return _lstm_of(tracer, body, last, gates, cs_prev, cs, clip)
    raise Other


def _both(pair: tuple[Place, Place]) -> Iterator[tuple[Place, Place]]:
    yield pair
    yield pair[1], pair[0]


def _lstm_of(
    tracer: Tracer, body: str, last: Node, gates: dict[str, Gate], cs_prev: Place, cs: Place, clip: float
) -> Match:
    order: dict[int, str] = {}
    wholes = set()
    for name, gate in gates.items():
        if gate.part is None:
            raise Other
        whole, k, split = _split_of(tracer, gate.part, 4)
        wholes.add(split.name)
        order[k] = name
    orders = {gates: key for key, gates in GATE_ORDERS.items()}
    gate_order = orders.get(tuple(order[k] for k in sorted(order)))
    diagonals = {role: gates[name].diagonal for role, name in (("wci", "i"), ("wcf", "f"), ("wco", "o"))}
    peepholes = {role: pair[0] for role, pair in diagonals.items() if pair is not None}
    if len(wholes) != 1 or gate_order is None or gates["i"].constant or gates["o"].constant or len(peepholes) % 3:
        raise Other
    both, kernel, bias = _affine(tracer, whole)
    x, h_prev = _beside(tracer, both)
    attributes = {
        "forget_bias": gates["f"].constant,
        "cell_clip": clip,
        "use_peephole": bool(peepholes),
        "gate_order": gate_order,
    }
    weights = {"w": kernel, **peepholes, "b": bias}
    return Match("LSTM", body, last, x, (cs_prev, h_prev), (cs, Place(body, last.name)), weights, attributes)


def _clipped(tracer: Tracer, place: Place) -> tuple[Place, float]:
    """What is clipped symmetrically, and at what; 0 if it is not."""
    op = _op(tracer, place)
    if op == "ClipByValue":
        _, inputs, _ = _made(tracer, place)
        if len(inputs) != 3:
            raise Other
        inner, low, high = inputs[0], tracer.value(inputs[1]), tracer.value(inputs[2])
    elif op == "Maximum":
        below, bottom = _pair(tracer, place, "Maximum")
        inner, top = _pair(tracer, below, "Minimum")
        low, high = tracer.value(bottom), tracer.value(top)
    else:
        return place, 0.0
    if high <= 0 or low != -high:
        raise Other
    return inner, high


def _gru(tracer: Tracer, body: str, last: Node) -> Match:
    """From h = u * h_prev + (1 - u) * c."""
    if last.op not in _ADD:
        raise Other
    here = Place(body, last.name)
    products = _pair(tracer, here, *_ADD)
    for keep, new in _both(products):
        for rest, candidate in _both(_pair(tracer, new, "Mul")):
            if _op(tracer, rest) != "Sub" or _op(tracer, candidate) != "Tanh":
                continue
            one, u = _pair(tracer, rest, "Sub")
            for update, h_prev in _both(_pair(tracer, keep, "Mul")):
                if _same(tracer, update, u) and tracer.value(one) == 1:
                    return _gru_of(tracer, body, last, u, candidate, h_prev)
    raise Other


def _gru_of(tracer: Tracer, body: str, last: Node, u: Place, candidate: Place, h_prev: Place) -> Match:
    gates, k, split = _gate_part(tracer, u)
    both, w_ru, b_ru = _affine(tracer, gates)
    both_c, w_c, b_c = _affine(tracer, _only(_made(tracer, candidate, "Tanh")[1]))
    (x, h), (x_c, reset) = _beside(tracer, both), _beside(tracer, both_c)
    for r, h_reset in _both(_pair(tracer, reset, "Mul")):
        if _op(tracer, r) in ("Split", "Sigmoid") and _same(tracer, h_reset, h_prev):
            _, k_r, split_r = _gate_part(tracer, r)
            fits = (k_r, k) == (0, 1) and split.name == split_r.name
            if fits and _same(tracer, h, h_prev) and _same(tracer, x, x_c):
                weights = {"w_ru": w_ru, "w_c": w_c, "b_ru": b_ru, "b_c": b_c}
                return Match("GRU", body, last, x, (h_prev,), (Place(body, last.name),), weights)
    raise Other


def _gate_part(tracer: Tracer, place: Place) -> tuple[Place, int, Node]:
    """What goes into a sigmoid that is split in two, or is split in two and goes into sigmoids."""
    if _op(tracer, place) == "Sigmoid":
        return _split_of(tracer, _only(_made(tracer, place, "Sigmoid")[1]), 2)
    whole, k, split = _split_of(tracer, place, 2)
    return _only(_made(tracer, whole, "Sigmoid")[1]), k, split


# ------------------------------------------------------------------------------------------------------------ refusals
def _products(tracer: Tracer) -> list[tuple[str, Node, Place, Source]]:
    """All products with a weight: body, node, what is multiplied, and the weight."""
    found = []
    for body, node in tracer.all_nodes():
        if node.op == "MatMul":
            try:
                left, right = _pair(tracer, Place(body, node.name), "MatMul")
                found.append((body, node, tracer.straight(left), tracer.source(right)))
            except (Other, Unknown):
                continue
    return found


def _misused(
    tracer: Tracer, match: Match, kernel: str, ends: list[Place], products: list[tuple[str, Node, Place, Source]]
) -> str | None:
    """Why what goes on is not the cell's own output."""
    scope = kernel.partition(" + ")[0].rpartition("/")[0]
    for _, node, left, source in products:
        if left in ends and scope and source.name.startswith(f"{scope}/"):
            return f"it has a projection, {source.name}: its output goes through the product {node.name!r}"
    try:
        before, looped = tracer.state(match.states[-1])
    except Unknown as unknown:
        return f"its state comes from {unknown}"
    if looped and not any(end in before for end in ends):
        first = next(iter(before), match.states[-1])
        return f"its state is not its output of the step before, but comes from {first.name!r}"
    return None


def _refused(tracer: Tracer, products: list[tuple[str, Node, Place, Source]], covered: set[str]) -> list[Found]:
    """Kernels of cells, by their names, that are in no cell that was understood."""
    scopes = {name.partition(" + ")[0].rpartition("/")[0] for name in covered}
    found: dict[str, Found] = {}
    for _, node, _, source in products:
        scope = source.name.partition(" + ")[0].lstrip("?").rpartition("/")[0]
        last = re.sub(r"/(gates|candidate|projection)\Z", "", scope)
        named = _CELL.search(last.rpartition("/")[2])
        if not named or scope in scopes or source.name in covered or last in found:
            continue
        if any(last == each or each.startswith(f"{last}/") for each in scopes):
            continue
        reason = _reason(products, last, source)
        cell = "GRU" if "gru" in named[0].lower() else "LSTM"
        found[last] = Found(node.name, cell, [node.name], cell=cell, sources={"w": source}, refused=reason)
    return [*found.values()]


def _reason(products: list[tuple[str, Node, Place, Source]], scope: str, source: Source) -> str:
    kernels = sorted({each.name for *_, each in products if each.name.startswith(f"{scope}/")})
    if re.search("coupled", scope):
        return "its input gate is coupled to its forget gate; the gates of the block cells are independent"
    if any(re.search("recurrent_kernel", name) for name in kernels):
        return f"it has two kernels, {' and '.join(kernels[:2])}, as Keras' layers: convert it with convert.from_keras"
    if len(kernels) > 1 and any("projection" in name for name in kernels):
        return f"it has other products, {', '.join(kernels[:4])}; the block cells have one"
    if _NORMAL.search(scope):
        return "it has layer normalization, which the block cells do not have"
    return (
        f"what follows the product with {source.name} is not what BasicLSTMCell, LSTMCell or GRUCell have: perhaps"
        " another activation, layer normalization or coupled gates"
    )
