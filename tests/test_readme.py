"""The README's example runs and is right, its table of ops is that of the code, and the documents' code runs."""

import re
from pathlib import Path

import numpy as np
import pytest

from blockcell.formulas import FORMULAS
from blockcell.optable import OPS, Op

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
DOCUMENTS = [README, ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
TABLE = re.compile(r"(?<=<!-- ops -->\n).*?(?=<!-- /ops -->)", re.DOTALL)


def code_blocks():
    """Every block of Python in the documents, with the line that it begins at."""
    for document in DOCUMENTS:
        text = document.read_text()
        for block in re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            line = text.count("\n", 0, block.start(1))
            yield pytest.param("\n" * line + block[1], document, id=f"{document.name}:{line + 1}")


def row(op: Op) -> str:
    tensors = [
        [f"{tensor.name} [{tensor.shape.replace(' ', ',')}]" for tensor in part] for part in (op.inputs, op.outputs)
    ]
    attributes = [a.name if a.default is None else f"{a.name}={a.default}" for a in op.attributes]
    arguments = ["seq_len_max"] * op.sequence + tensors[0] + attributes
    return f"| `{op.module}.{op.name}` | {', '.join(arguments)} | {', '.join(tensors[1])} |\n"


def table() -> str:
    return "| op | arguments | results |\n|---|---|---|\n" + "".join(map(row, OPS.values()))


def test_table_of_ops():
    assert TABLE.search(README.read_text())[0] == table(), "python tests/test_readme.py writes it anew"


def test_example(capsys):
    code = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[1]
    names: dict = {}
    exec(code, names)
    assert capsys.readouterr().out.strip() == re.search(r"# prints (.*)", code)[1]
    inputs, states, grads = names["inputs"], names["states"], names["grads"]
    for name, value in FORMULAS["BlockLSTM"](**inputs)._asdict().items():
        np.testing.assert_allclose(getattr(states, name), value, rtol=0, atol=2e-6, err_msg=name)
    expected = FORMULAS["BlockLSTMGrad"](**inputs, **states._asdict(), **names["incoming"], use_peephole=False)
    for name, value in expected._asdict().items():
        bound = 1e-5 * max(1, np.abs(value).max(initial=0))
        np.testing.assert_allclose(getattr(grads, name), value, rtol=0, atol=bound, err_msg=name)


@pytest.mark.parametrize("code, document", list(code_blocks()))
def test_code_runs(code, document, tmp_path, monkeypatch, capsys):
    """As a reader would run it: each block by itself. It prints what it says."""
    monkeypatch.chdir(tmp_path)
    exec(compile(code, document, "exec"), {})
    printed = capsys.readouterr().out
    for line in re.findall(r"# prints (.*)", code):
        assert line in printed.splitlines()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    text = document.read_text()
    headings = {
        path: {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-")
               for heading in re.findall(r"^#+ (.*)", path.read_text(), re.MULTILINE)}
        for path in DOCUMENTS
    }  # fmt: skip
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", text):
        path, _, heading = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        assert file.exists(), f"{document.name} refers to {target}"
        assert not heading or heading in headings[file], f"{document.name} refers to {target}"


if __name__ == "__main__":
    README.write_text(TABLE.sub(lambda _: table(), README.read_text()))
