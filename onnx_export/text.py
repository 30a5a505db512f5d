"""Graph text: ONNX's own textual syntax, one op per line, with two additions.

A word left of the bar is a condition: the line counts only if it holds. ``cell`` and ``sequence`` are the kinds of ops;
``peephole`` and ``plain`` mean with and without peepholes; ``clip`` means a clip, ``bias`` a forget bias that is not
zero, ``rounded`` a float16 sequence; ``joint`` that x and h have one product together, ``apart`` that each has its
own; ``late`` is ``bias`` where products are in integers. Of layers, ``coupled`` means that i is 1 - f and ``single``
that it is not, ``i_sees`` is ``peephole`` where i has one; ``project`` means a projection, ``p_clip`` one with a clip,
and ``entire`` that there is none; ``ending`` that a sequence has gradients to its cell states from elsewhere than the
next step; ``sigmoid`` and ``other`` are kinds of recurrent activations. **If the condition does not hold, the line's
outputs are other names of its first input**, those of a Where of its second. Four names in brackets stand in the order
i, ci, f, o and are put into the order of the op's gates; ``gates`` is H for each of these.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from onnx import NodeProto, parser

LINE = re.compile(r"(\w*) *\| (?P<outputs>.*?) = (?P<op>\w+ (?:<.*?> )?)\((?P<inputs>.*?)\) *(?:#.*)?")
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
    """Turns graph text into nodes, given the conditions that hold."""

    def __init__(self, conditions: Collection[str], gates: tuple[str, ...], names: Iterable[str]) -> None:
        self.conditions = set(conditions)
        self.gates = gates
        self.defined = set(names)
        self.alias = {"gates": "_".join("H" * len(gates)), "T_B_gates": f"T_B_{len(gates)}H"}

    def nodes(self, text: str) -> list[NodeProto]:
        """Return the nodes of the lines whose conditions hold."""
        matches = []
        for line in text.strip().splitlines():
            match = LINE.fullmatch(line)
            assert match is not None, line
            outputs, inputs = ([name.strip(" []") for name in match[side].split(",")] for side in ("outputs", "inputs"))
            if not match[1] or match[1] in self.conditions:
                self.defined.update(outputs)
                matches.append(match)
            else:
                self.alias.update(dict.fromkeys(outputs, inputs[1 if match["op"] == "Where " else 0]))
        nodes = []
        for match in matches:
            outputs_text, inputs_text = (BRACKETS.sub(self._ordered, match[side]) for side in ("outputs", "inputs"))
            node = parser.parse_node(f"{outputs_text} = {match['op']}({inputs_text})")
            node.input[:] = [self.name(name) for name in node.input]
            nodes.append(node)
        return nodes

    def name(self, name: str) -> str:
        """Return the name under which a value is computed; the name given may be another one of it."""
        while name not in self.defined and name in self.alias:
            name = self.alias[name]
        return name

    def _ordered(self, match: re.Match[str]) -> str:
        by_gate = dict(zip(("i", "ci", "f", "o"), match[1].split(", "), strict=True))
        return ", ".join(by_gate[gate] for gate in self.gates)
