"""Graph text: ONNX's own textual syntax, one op per line, with two additions.

A word left of the bar is a condition, in cells one of `Config.conditions`: the line counts only if it holds.

==========  ============================================================================================
cell        one step alone
sequence    all steps of a sequence
fused       x and h have one product together, [x, h_prev] @ w
split       x and h have a product each
peephole    with peepholes; ``no_peep``: without; ``i_peep``: i has one, too
coupled     an LSTM's i is 1 - f; ``uncoupled``: it is a gate of its own
bias_b      a forget bias that is not zero is added to b
bias_f      it is added to f, after the products, as these are in integers
clip        the cell state is clipped
proj        an LSTM has a projection; ``no_proj``: it has none; ``p_clip``: it has one that is clipped
cs_grad     a sequence has gradients to its cell states from elsewhere than the next step
sigmoid     the recurrent activation is sigmoid; ``generic``: it is another one
float16     a sequence of float16, whose states are rounded at every step
==========  ============================================================================================

**If a condition does not hold, its line has no node, and the line's outputs become aliases of its first input**, of a
Where of its second. So the lines that follow need no conditions. ::

    clip    | cs_new = Clip (cs_sum, clip_low, clip_high)
            | co = Activation (cs_new)

Without a clip, cs_new is another name of cs_sum, and the second line becomes ``co = Activation (cs_sum)``. If two lines
have the same output, the one whose condition holds gives it. Each name must be known, in all lines: a condition, an
operator, an argument, a constant or an output of a line above.

Four names in brackets stand in the order i, ci, f, o and are put into the order of the op's gates; ``gates`` is H for
each of these. In the equations of cells, ``a_from_b`` is what the gradient to b is multiplied with where it becomes the
gradient to a, ``d_b * a_from_b``. In graphs, a name that ends in ``_live`` is an array with zeros at padding steps, and
``Live`` makes it, by `onnx_export.cells.loops.StepMask`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from onnx import NodeProto, defs, parser

LINE = re.compile(r"(\w*) *\| (?P<outputs>.*?) = (?P<op>\w+ (?:<.*?> )?)\((?P<inputs>.*?)\) *(?:#.*)?")
CONDITIONS = (
    *("cell", "sequence", "fused", "split", "peephole", "no_peep", "i_peep", "coupled", "uncoupled", "bias_b"),
    *("bias_f", "clip", "proj", "no_proj", "p_clip", "cs_grad", "sigmoid", "generic", "float16", "float32", "float64"),
    *("masked", "full", "eps", "no_eps"),  # of losses and optimizers
)
STAND_INS = ("Activation", "ActivationSlope", "Recurrent", "RecurrentSlope", "Live")  # in place of operators
BRACKETS = re.compile(r"\[([a-z]\w*(?:, [a-z]\w*){3})\]")


@dataclass(frozen=True)
class Program:
    """The text of an op: ``before`` all steps, one ``step``, ``after`` all steps.

    ``carried`` maps each name that a step reads to the name under which the step before it computed the value. What
    does not depend on these is computed for all steps of a sequence at once.
    """

    carried: Mapping[str, str]
    before: str
    step: str
    after: str = ""


class TextParser:
    """Turns graph text into nodes, given the conditions that hold.

    Lines may read ``names``, arguments and constants, and the outputs of lines above. ``absent`` are arguments and
    constants that only lines whose conditions do not hold read.
    """

    def __init__(
        self, conditions: Collection[str], gates: tuple[str, ...], names: Iterable[str], absent: Iterable[str] = ()
    ) -> None:
        self.conditions = set(conditions)
        self.gates = gates
        self.defined = set(names)
        self.alias = {"gates": "_".join("H" * len(gates)), "T_B_gates": f"T_B_{len(gates)}H"}
        self.known = {*self.defined, *self.alias, *absent}

    def nodes(self, text: str) -> list[NodeProto]:
        """Return the nodes of the lines whose conditions hold.

        Raises
        ------
        SyntaxError
            A line has another form, or a name in it is not known; the message says which.
        """
        nodes = []
        for number, line in enumerate(text.strip().splitlines(), 1):
            try:
                nodes += self._line_nodes(line)
            except SyntaxError as error:
                raise SyntaxError(f"graph text, line {number}, {' '.join(line.split())!r}: {error}") from None
        return nodes

    def _line_nodes(self, line: str) -> list[NodeProto]:
        """Return the node of a line; none, and other names for its outputs, if its condition does not hold."""
        match = LINE.fullmatch(line)
        if match is None:
            raise SyntaxError("expected 'condition | outputs = Operator <attributes> (inputs)'")
        outputs, inputs = ([name.strip(" []") for name in match[side].split(",")] for side in ("outputs", "inputs"))
        op_type, holds = match["op"].split()[0], not match[1] or match[1] in self.conditions
        if match[1]:
            _check_name("condition", match[1], CONDITIONS)
        if op_type not in STAND_INS and not defs.has(op_type):
            _check_name("operator", op_type, [*STAND_INS, *(schema.name for schema in defs.get_all_schemas())])
        for name in inputs:
            _check_name("name", name, self.known)
        self.known.update(outputs)
        if not holds:
            self.alias.update(dict.fromkeys(outputs, inputs[op_type == "Where"]))
            return []
        outputs_text, inputs_text = (BRACKETS.sub(self._ordered, match[side]) for side in ("outputs", "inputs"))
        node = parser.parse_node(f"{outputs_text} = {match['op']}({inputs_text})")
        node.input[:] = [self.name(name) for name in node.input]
        if missing := [name for name in node.input if name not in self.defined]:
            raise SyntaxError(f"{missing[0]} has no value where the line's condition holds")
        self.defined.update(outputs)
        return [node]

    def name(self, name: str) -> str:
        """Return the name under which a value is computed; the name given may be another one of it."""
        while name not in self.defined and name in self.alias:
            name = self.alias[name]
        return name

    def _ordered(self, match: re.Match[str]) -> str:
        by_gate = dict(zip(("i", "ci", "f", "o"), match[1].split(", "), strict=True))
        return ", ".join(by_gate[gate] for gate in self.gates)


def expand_text(
    text: str, values: Mapping[str, str], names: Iterable[str], conditions: Collection[str] = ()
) -> list[NodeProto]:
    """Return the nodes of a text, with values in place of some of its names; it may read `names`, too.

    Where one of the words of another name is such a name, it becomes the value: with h for x, x_exp is h_exp.
    """
    nodes = TextParser(conditions, (), [*values, *names]).nodes(text)

    def name_in_graph(name: str) -> str:
        return values[name] if name in values else "_".join(values.get(word, word) for word in name.split("_"))

    for node in nodes:
        node.input[:] = map(name_in_graph, node.input)
        node.output[:] = map(name_in_graph, node.output)
    return nodes


def _check_name(kind: str, name: str, known_names: Collection[str]) -> None:
    """Raise a SyntaxError unless the name is known."""
    if name not in known_names:
        raise SyntaxError(f"there is no {kind} {name}")
