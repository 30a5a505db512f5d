"""Graph text: ONNX's own textual syntax, one op a line, with two additions.

The margin, left of the bar, says when a line is there: ``cell`` or ``sequence``, the kind of op; ``peephole`` or
``plain``, without; ``clip``; ``bias``, a forget bias that is not zero; ``rounded``, a float16 sequence. **A line that
is not there hands its first input on under the names of its outputs.** A list of four names in brackets is in the order
i, ci, f, o and is brought into the order of the op's gates.
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

    ``carried`` maps a name that a step reads to the name under which the step before computed it. What a step computes
    without reading these, a sequence computes for all steps at once.
    """

    carried: Mapping[str, str]
    before: str
    step: str
    after: str = ""


class Reader:
    """Turns text into nodes, under the conditions that hold."""

    def __init__(self, conditions: Collection[str], gates: tuple[str, ...], given: Iterable[str]) -> None:
        self.conditions = set(conditions)
        self.gates = gates
        self.defined = set(given)
        self.alias: dict[str, str] = {}

    def nodes(self, text: str) -> list[NodeProto]:
        """The nodes of the lines that are there."""
        there = []
        for line in text.strip().splitlines():
            match = LINE.fullmatch(line)
            assert match is not None, line
            outputs, inputs = ([name.strip(" []") for name in match[part].split(",")] for part in ("outputs", "inputs"))
            if not match[1] or match[1] in self.conditions:
                self.defined.update(outputs)
                there.append(match)
            else:
                self.alias.update(dict.fromkeys(outputs, inputs[0]))
        nodes = []
        for match in there:
            outputs_text, inputs_text = (BRACKETS.sub(self._ordered, match[part]) for part in ("outputs", "inputs"))
            node = parser.parse_node(f"{outputs_text} = {match['op']}({inputs_text})")
            node.input[:] = [self.name(name) for name in node.input]
            nodes.append(node)
        return nodes

    def name(self, name: str) -> str:
        """The name that this one stands for."""
        while name not in self.defined and name in self.alias:
            name = self.alias[name]
        return name

    def _ordered(self, match: re.Match[str]) -> str:
        by_gate = dict(zip(("i", "ci", "f", "o"), match[1].split(", "), strict=True))
        return ", ".join(by_gate[gate] for gate in self.gates)
