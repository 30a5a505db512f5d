"""Names in graph text: each must be known, and messages say which line is wrong."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

import onnx_export
from onnx_export.cells import lstm
from onnx_export.text import TextParser

MISTAKES = [  # of the text of a step of the LSTM: what is replaced, by what, and the message
    ("(f_biased, f_see)", "(f_biased, f_sea)", "there is no name f_sea"),
    ("(m, w_p)", "(m, w_pp)", "there is no name w_pp"),  # where the condition does not hold
    ("Mul (i, ci)", "Mul (i, co)", "co has no value where the line's condition holds"),  # but below
    ("Mul (i, ci)", "Mul (i, b_ru)", "b_ru has no value where the line's condition holds"),  # another op's argument
    ("clip      |", "clips     |", "there is no condition clips"),
    ("= Clip (cs_sum", "= Clop (cs_sum", "there is no operator Clop"),
    ("co = Activation (cs_new)", "co = Activation cs_new", "expected 'condition | outputs = Operator <attrib"),
]


@pytest.mark.parametrize(("old", "new", "message"), MISTAKES)
def test_mistakes(old, new, message, monkeypatch):
    lines = lstm.FORWARD.step.strip().splitlines()
    [number] = [k for k, line in enumerate(lines, 1) if old in line]
    monkeypatch.setattr(lstm, "FORWARD", replace(lstm.FORWARD, step=lstm.FORWARD.step.replace(old, new)))
    line = " ".join(lines[number - 1].replace(old, new).split())
    with pytest.raises(SyntaxError, match=re.escape(f"graph text, line {number}, {line!r}: {message}")):
        onnx_export.build("BlockLSTM", provider="webgpu", sizes={"T": 3})  # not taken for a form that is refused


def test_lines_whose_condition_does_not_hold():
    """Their outputs are other names of their first input, of a Where of its second."""
    parser = TextParser({"clip"}, (), ["x", "zero", "low", "high"])
    nodes = parser.nodes(
        "clip | y = Clip (x, low, high)\nproj | z = Neg (y)\nmasked | v = Where (x, z, zero)\n | u = Abs (v)"
    )
    assert [(node.op_type, *node.input, *node.output) for node in nodes] == [
        ("Clip", "x", "low", "high", "y"),
        ("Abs", "y", "u"),
    ]
    assert parser.name("v") == "y"
