"""The documents are true: their code runs and prints what it says, their tables are those of the code and of the
benchmarks' files, their links lead somewhere.

    PYTHONPATH=tests/lib python tests/repository/test_readme.py        writes the tables anew
"""

import ast
import importlib
import inspect
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tracked import tracked_files

import blockcell
from blockcell import LSTM, RNN, _training, activations
from blockcell.activations import PARAMETERS
from blockcell.optable import OPS, Op

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = ROOT / "docs"
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))]
NAMES = [str(path.relative_to(ROOT)) for path in DOCUMENTS]
TUTORIAL = PAGES / "tutorial.md"
CONSOLE = re.compile(r"^```console\n(.*?)^```", re.DOTALL | re.MULTILINE)
TORCH = re.compile(r"^(import|from) (blockcell\.)?torch\b", re.MULTILINE)
KERAS = re.compile(r"^import keras\b", re.MULTILINE)
ENGINES = re.compile(r"^(import|from) (dask|pyspark|ray)\b", re.MULTILINE)


# ------------------------------------------------------------------------------------------------------------- the code
def in_order(document: Path) -> bool:
    """Whether its blocks are run one after the other: it has commands, or is the tutorial."""
    return document == TUTORIAL or bool(CONSOLE.search(document.read_text()))


def code_blocks():
    """Every block of Python in the documents, with the line that it begins at; one with PyTorch is for `peers`."""
    for document, name in zip(DOCUMENTS, NAMES, strict=True):
        text = document.read_text()
        if in_order(document):
            continue
        for block in re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            line = text.count("\n", 0, block.start(1))
            if ENGINES.search(block[1]):
                continue  # tests/engines runs it, on a cluster
            marks = [pytest.mark.peers] if TORCH.search(block[1]) else []
            if KERAS.search(block[1]):
                marks = [pytest.mark.peers, pytest.mark.filterwarnings("ignore::DeprecationWarning")]  # Keras' own
            yield pytest.param("\n" * line + block[1], document, id=f"{name}:{line + 1}", marks=marks)


@pytest.mark.parametrize("code, document", list(code_blocks()))
def test_code_runs(code, document, tmp_path, monkeypatch, capsys):
    """As a reader would run it: each block by itself. It prints what it says."""
    if TORCH.search(code):
        pytest.importorskip("torch")
    if KERAS.search(code):
        pytest.importorskip("keras", minversion="3.0")
    monkeypatch.chdir(tmp_path)
    exec(compile(code, document, "exec"), {})
    printed = capsys.readouterr().out
    for line in re.findall(r"# prints (.*)", code):
        assert line in printed.splitlines()


def run_page(document, folder, capsys):
    """Run the commands and code of a page, in order and in one folder; return (command, output, output on the page).

    Commands run as processes, blocks of code as in `test_code_runs`; the blocks of the tutorial share their names.
    """
    (folder / "tests").symlink_to(ROOT / "tests")
    text, outputs, names = document.read_text(), [], {}
    for block in re.finditer(r"^```(console|python)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        if block[1] == "python":
            code = "\n" * text.count("\n", 0, block.start(2)) + block[2]
            exec(compile(code, document, "exec"), names if document == TUTORIAL else {})
            printed = capsys.readouterr().out
            for line in re.findall(r"\bprints (.*)", code):
                assert line in [output.rstrip() for output in printed.splitlines()], printed
            continue
        for command, expected in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block[2], re.MULTILINE):
            words = shlex.split(command)
            python = {"python": [sys.executable], "blockcell": [sys.executable, "-m", "blockcell"]}
            result = subprocess.run(python.get(words[0], words[:1]) + words[1:], capture_output=True, text=True)
            outputs.append((command, result.stdout + result.stderr, expected))
    return outputs


def is_close(printed: str, expected: str) -> bool:
    """Return whether texts are equal but for errors in eps, which differ from one CPU level to another."""
    figure = re.compile(r"\b\d+\.\d\d\b")
    pairs = zip(figure.findall(printed), figure.findall(expected), strict=False)
    are_near = all(abs(float(a) - float(b)) <= 4 for a, b in pairs)
    return are_near and figure.sub("#", printed) == figure.sub("#", expected)


@pytest.mark.parametrize("name", [name for name, path in zip(NAMES, DOCUMENTS, strict=True) if in_order(path)])
def test_page_runs(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for command, printed, expected in run_page(ROOT / name, tmp_path, capsys):
        assert is_close(printed.rstrip(), expected.rstrip()), f"{command}\n{printed}"


def texts(folder):
    """Yield every text in the code of a folder; "..." stands for a value in an f-string."""
    for path in sorted(folder.glob("**/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "..." for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_messages_on_the_page_of_tensorflow_are_those_of_the_code():
    """The page quotes words of reasons to refuse a cell or a file, and no other words."""
    _, _, page = (PAGES / "move-tensorflow-1.md").read_text().partition("## When a cell is refused\n")
    column = " ".join(re.findall(r"^\| (`.*?`) \|", page, re.MULTILINE))
    messages = [*texts(ROOT / "blockcell" / "tensorflow")]
    assert not [words for words in re.findall("`(.*?)`", column) if not any(words in text for text in messages)]


def words_of_sources():
    """Return the words of each tracked source file, with its own name, by its path."""
    words = {}
    for path in tracked_files():
        if path.suffix in SOURCES or path.name == "Makefile":
            words[path] = {path.name, path.stem, *re.findall(r"\w+", (ROOT / path).read_text())}
    return words


SOURCES = {".py", ".pyx", ".pxd", ".h", ".c", ".toml", ".yml", ".js", ".html"}
OTHERS_NAMES = """
    ConvLSTM2D IndRNNCell LayerNormBasicLSTMCell save_weights seq_length snapshot_download share_memory_ with_peepholes
    LiGRU MALLOC_MMAP_THRESHOLD_ MALLOC_TRIM_THRESHOLD_ PyanNet SSeRiouSS a_grad d_h_prev_component_1
    d_h_prevr int16_t mapInArrow w_u_x ZoneoutLSTMCell
""".split()
"""Names on pages that are other libraries'."""


def names_of_code(text):
    """Names in backticks, perhaps with arguments, that look like those of code: snake_case, camelCase, CAPITALS, f().

    A dotted name gives each of its parts, a file its own name.
    """
    for dotted, arguments in re.findall(r"`([a-z_][\w.]*)(\([^`]*\))?`", text, re.ASCII | re.IGNORECASE):
        if re.search(r"\.(py|pyx|pxd)$", dotted):
            yield dotted
            continue
        for part in dotted.split("."):
            capitals = part.isupper() and len(part) > 3
            if "_" in part or re.search("[a-z][A-Z]", part) or capitals or (arguments and dotted.endswith(part)):
                yield part


def test_names_of_code_on_pages_exist():
    """What a page says of a function, a constant or a file can be searched for in the sources."""
    known = set(OTHERS_NAMES).union(*words_of_sources().values())
    pages = {name: document.read_text() for name, document in zip(NAMES, DOCUMENTS, strict=True)}
    unknown = {name: sorted(set(names_of_code(text)) - known) for name, text in pages.items() if name != "CHANGELOG.md"}
    assert not {name: names for name, names in unknown.items() if names}


def test_names_on_pages_are_in_the_file_that_is_named():
    """Where a page has a name "in" a file, the file has it."""
    words = words_of_sources()
    wrong = []
    for page, document in zip(NAMES, DOCUMENTS, strict=True):
        for name, file in re.findall(r"`(\w+)`,? in `([\w/]+\.(?:pyx|pxd|py))`", document.read_text()):
            if not any(name in words[path] for path in words if f"/{path}".endswith(f"/{file}")):
                wrong.append((page, name, file))
    assert not wrong


@pytest.mark.parametrize("name", PARAMETERS)
def test_every_activation_is_documented(name):
    """In the docstrings of its module and of layers, and in the table of its equations."""
    assert re.search(rf"^    {name} ", activations.__doc__, re.MULTILINE)
    assert all(f'"{name}"' in layer.__doc__ for layer in (LSTM, RNN))
    assert f'\n| `"{name}"` | ' in (PAGES / "mathematics.md").read_text()


# ----------------------------------------------------------------------------------------------------------- the claims
def test_layers_that_the_readme_calls_streams():
    """Each of them computes a step, and the one that is not named refuses."""
    sentence = re.search(r"([^.]*) also\s+run as streams", README.read_text())[1]
    cell = {"input_size": 3, "hidden_size": 4, "seed": 1}
    layers = {name: getattr(blockcell, name).init(**cell) for name in ("LSTM", "GRU", "RNN")}
    layers |= {"Dense": blockcell.Dense.init(3, 4, seed=1), "Stack": blockcell.Stack([layers["GRU"]])}
    assert {*re.findall(r"`(\w+)`", sentence)} == {*layers}
    x = np.ones((1, 2, 3), np.float32)
    for layer in layers.values():
        np.testing.assert_array_equal(layer.stream(2).step(x[0]), layer(x)[0][0])
    with pytest.raises(TypeError, match="backward begins at the last step"):
        blockcell.Bidirectional(layers["GRU"], layers["GRU"]).stream()


def test_ratios_that_the_readme_begins_with():
    """Half of the time of PyTorch's LSTM and a quarter of its GRU's are medians of the table."""
    start = " ".join(README.read_text().partition("```python")[0].split())
    assert "half of the time of PyTorch's LSTM and a quarter of the time of its GRU" in start
    for layer, times in (("LSTM", 2), ("GRU of PyTorch and Keras", 4)):
        ratio = re.search(rf"^\| {layer}, inference \| PyTorch [\d.]+ \| ([\d.]+)x", README.read_text(), re.MULTILINE)
        assert round(float(ratio[1])) == times


def test_what_the_changelog_calls_compiled():
    assert "cross-entropy and the optimizers are compiled" in " ".join((ROOT / "CHANGELOG.md").read_text().split())
    compiled = {name for name, value in vars(_training).items() if type(value).__name__ == "cython_function_or_method"}
    assert compiled >= {"cross_entropy", *blockcell.optim.OPTIMIZERS}


# ----------------------------------------------------------------------------------------------------------- the tables
def row(op: Op) -> str:
    """What the op computes is the first line of its help; the equations stand under the heading of its cell."""
    function = getattr(getattr(blockcell, op.module), op.name)
    computes = (inspect.getdoc(function) or "").splitlines()[0].replace("`blockcell.raw_ops.", "`")
    cell = next(cell for cell in ("gru", "rnn", "lstm") if cell in op.kernel)
    place = (
        "gru-that-resets-after-the-product"
        if "reset_after" in op.name
        else f"{cell}-over-time"
        if op.sequence
        else f"{cell}-cell"
    )
    return f"| `{op.module}.{op.name}` | {computes} | [{cell.upper()}](mathematics.md#{place}) |\n"


def table_of_ops() -> str:
    return "| op | what it computes | equations |\n|---|---|---|\n" + "".join(map(row, OPS.values()))


def report():
    """benchmarks/report.py, whose neighbours it imports by their bare names."""
    sys.path.append(str(ROOT / "benchmarks"))
    return importlib.import_module("report")


def table_of_speed() -> str:
    return "\n".join(report().summary(report().FILES[:2], report().QUANTIZATION))


def table_of_speed_in_short() -> str:
    """Of layers and ops that most know, without the peers that few have; ratios with two digits."""
    rest = r"RNN|LSTM with|GRU of TensorFlow|GRU.* 8 bits|LSTM in 8 bits.*(PyTorch|OpenVINO)"
    lines = [line for line in table_of_speed().splitlines() if not re.match(rf"\| ({rest})", line)]
    rounded = re.sub(
        r"(\d+\.\d+)x", lambda ratio: f"{float(ratio[1]):.{1 if float(ratio[1]) < 9.95 else 0}f}x", "\n".join(lines)
    )
    return f"{rounded}\n"


def table_of_torch() -> str:
    return "\n".join(report().torch_summary(report().TORCH))


def table_of_episodes() -> str:
    return "\n".join(report().episodes_table(report().EPISODES))


def table_of_few_bits() -> str:
    return "\n".join(report().few_bits(report().QUANTIZATION))


def table_of_scores() -> str:
    return "\n".join(report().quantization_scores(report().QUANTIZATION.with_name("quantization-scores.csv")))


TABLES = {
    "speed-in-short": (README, table_of_speed_in_short),
    "speed": (PAGES / "performance.md", table_of_speed),
    "ops": (PAGES / "ops.md", table_of_ops),
    "torch": (PAGES / "torch.md", table_of_torch),
    "episodes": (PAGES / "recurrent-policies.md", table_of_episodes),
    "few-bits": (PAGES / "quantization.md", table_of_few_bits),
    "scores": (PAGES / "quantization.md", table_of_scores),
}


def written(name: str) -> re.Pattern[str]:
    return re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- /{name} -->)", re.DOTALL)


@pytest.mark.parametrize("name", TABLES)
def test_table(name):
    document, table = TABLES[name]
    assert written(name).findall(document.read_text()) == [table()], (
        "PYTHONPATH=tests/lib python tests/repository/test_readme.py writes it anew"
    )


def test_figures_are_those_of_the_benchmarks():
    pages = PAGES / "benchmarks"
    assert (pages / "cpu.md").read_text() == report().cpu_page(report().FILES), "benchmarks/report.py writes it anew"
    assert (pages / "torch.md").read_text() == report().torch_page(report().TORCH), "and this one"


# ------------------------------------------------------------------------------------------------------------ the links
def targets(document: Path) -> list[str]:
    return re.findall(r"\]\((?!https?:)([^)\s]+)\)", document.read_text())


def anchors(document: Path) -> set[str]:
    """Return the anchors of the headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    names = [re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings]
    assert len(names) == len(set(names)), f"{document.name} has a heading twice"
    return set(names)


@pytest.mark.parametrize("document", DOCUMENTS, ids=NAMES)
def test_links_lead_somewhere(document):
    if document.name != "CHANGELOG.md":  # where every release has the same headings
        anchors(document)
    for target in targets(document):
        path, _, heading = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        assert file.exists(), f"{document.name} refers to {target}"
        assert not heading or heading in anchors(file), f"{document.name} refers to {target}"


def test_every_page_can_be_reached_from_the_readme():
    reached, linked = set(), {README}
    while linked:
        reached |= linked
        linked = {
            (document.parent / target.partition("#")[0]).resolve()
            for document in linked
            for target in targets(document)
            if target.partition("#")[0].endswith(".md")
        } - reached
    assert set(DOCUMENTS) - reached <= {ROOT / "CHANGELOG.md"}


# -------------------------------------------------------------------------------------------------------- the reference
PARTS = ("convert", "keras", "layers", "loss", "ops", "optim", "raw_ops", "tensorflow", "torch")


@pytest.mark.parametrize("module", ["blockcell", *(f"blockcell.{part}" for part in PARTS), "onnx_export"])
def test_reference_has_every_public_name(module):
    """Those of `blockcell` that are in `blockcell.layers`, too, once."""
    if module in ("blockcell.keras", "blockcell.torch"):
        pytest.importorskip(module.partition(".")[2])
    listed = {}
    for page in PAGES.glob("reference/*.rst"):
        parts = re.split(r"^\.\. currentmodule:: (\S+)$", page.read_text(), flags=re.MULTILINE)
        for name, part in zip(parts[1::2], parts[2::2], strict=True):
            listed.setdefault(name, []).extend(re.findall(r"^   (\w+)$", part, re.MULTILINE))
    public = importlib.import_module(module)
    names = {name for name in public.__all__ if not inspect.ismodule(getattr(public, name))}
    if module == "blockcell.layers":
        names -= {*blockcell.__all__}
    assert sorted(listed[module]) == sorted(names)


if __name__ == "__main__":
    for name, (document, table) in TABLES.items():
        document.write_text(written(name).sub(lambda _, table=table: table(), document.read_text()))
