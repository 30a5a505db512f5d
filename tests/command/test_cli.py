"""The command line: help, forms of output, exit statuses, one-line errors."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys

import keras_forms
import numpy as np
import pytest
from fresh import on_terminal, printed, python

import blockcell
from blockcell.command import cli, main

COMMANDS = ["info", "demo", "verify", "inspect", "extract"]


def blocking(*modules: str) -> str:
    """Code that makes imports of these modules fail as if they were not installed."""
    return f"import sys; sys.modules |= dict.fromkeys({modules}); "


# ----------------------------------------------------------------------------------------------------------------- help
@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)], ids=" ".join)
def test_help(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as caught:
        cli.main([*command, "--help"])
    out = capsys.readouterr().out
    assert caught.value.code == 0 and max(map(len, out.splitlines())) < 80
    assert command or "onnxruntime and onnx.reference with float64, op by op" in " ".join(out.split())
    example = re.search(r"^example: blockcell (.*)$", out, re.MULTILINE)[1].split()
    assert cli._parser().parse_args(example).command == example[0]
    assert command in ([], example[:1])
    assert all(name in out for name in COMMANDS) or command


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0 and capsys.readouterr().out == f"blockcell {blockcell.__version__}\n"


def test_entry_points():
    script = importlib.metadata.distribution("blockcell").entry_points
    assert script.select(group="console_scripts", name="blockcell")["blockcell"].load() is cli.main
    result = subprocess.run([sys.executable, "-m", "blockcell", "--version"], capture_output=True, text=True)
    assert result.stdout == f"blockcell {blockcell.__version__}\n"


# ----------------------------------------------------------------------------------------------------------------- info
def test_info(capsys):
    assert cli.main(["info"]) == 0
    out, err = capsys.readouterr()
    shown = dict(line.split(maxsplit=1) for line in out.splitlines()[1:-1])
    assert not err and "\x1b" not in out
    info = blockcell.build_info()
    caches = info.pop("caches")
    assert shown["caches"] == ", ".join(f"{name} {size // 1024} KiB" for name, size in caches.items())
    for key, value in info.items():
        assert shown[key] == (", ".join(value) if isinstance(value, tuple) else str(value))


def test_info_as_json(capsys):
    assert cli.main(["info", "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert info == {k: list(v) if isinstance(v, tuple) else v for k, v in blockcell.build_info().items()}


INFO = "from blockcell.command import main; main(['info'])"


def test_info_on_a_terminal():
    assert "\x1b[1mThis machine" in on_terminal(INFO)
    plain = on_terminal(blocking("rich") + INFO)
    assert "\x1b" not in plain and plain.replace("\r\n", "\n").strip() == printed(INFO)


def test_progress_is_for_terminals(capsys):
    steps = "from blockcell.progress import progress\nwith progress() as tell: tell('working', 1, 2)"
    assert "working" in on_terminal(steps)
    result = python(steps)
    assert result.returncode == 0 and not result.stdout and not result.stderr
    assert on_terminal(blocking("rich") + f"exec({steps!r})") == ""  # verify does not need it


def test_verdicts_have_colours():
    table = ["t", ["[op]", "eps:", ""], [["a", 1, True], ["b", 2, False]]]
    code = f"from blockcell.command.terminal import print_table; print_table(*{table})"
    shown = on_terminal(code)
    assert "\x1b[32mok" in shown and "\x1b[1;31mFAILED" in shown and "[op]" in shown
    assert printed(code).split("\n") == ["t", "  [op]  eps", "  a       1  ok", "  b       2  FAILED"]


def test_names_are_not_cut(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    name = "a_name_of_25_letters_xxxx"
    shown = on_terminal(
        "from blockcell.command.terminal import print_table; "
        f"print_table('t', ['op', 'where'], [[{name!r}, 'a place of {name}']])"
    )
    assert name in shown and f"place of {name}" not in shown


# --------------------------------------------------------------------------------------------------------------- errors
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "COMMAND"),
        (["nonsense"], "nonsense"),
        (["info", "--nonsense"], "--nonsense"),
        (["demo", "extra"], "extra"),
        (["demo", "--seed", "-1"], "--seed"),
        (["demo", "--seed", "1.5"], "1.5 is not a whole number"),
        (["demo", "--output", "picture.pdf"], "picture.pdf does not end in .png"),
        (["demo", "--output", "no/such/folder/picture.png"], "no/such/folder/picture.png cannot be written"),
    ],
    ids=" ".join,
)
def test_usage(arguments, said, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    out, err = capsys.readouterr()
    assert caught.value.code == 2 and not out
    assert said in err and err.count("\n") == 1 and err.startswith("blockcell") and "--help" in err


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (OSError("the disk\nis full"), 1, "blockcell info: OSError: the disk is full\n"),
        (KeyboardInterrupt(), 130, "blockcell info: interrupted\n"),
    ],
    ids=["error", "interrupt"],
)
def test_errors_are_one_line(error, status, said, capsys, monkeypatch):
    def fail():
        raise error

    monkeypatch.setattr(cli, "build_info", fail)
    assert cli.main(["info"]) == status
    assert capsys.readouterr() == ("", said)
    if status == 1:
        with pytest.raises(type(error)):
            cli.main(["info", "--debug"])


@pytest.mark.parametrize(
    "missing", [("rich",), ("matplotlib", "sklearn"), ("matplotlib", "rich", "sklearn")], ids=" ".join
)
def test_missing_extra(missing):
    result = python(blocking(*missing) + "from blockcell.command import main; sys.exit(main(['demo']))")
    assert result.returncode == 1 and not result.stdout
    packages = [{"sklearn": "scikit-learn"}.get(name, name) for name in missing]
    message = f"blockcell demo: {', '.join(packages)} not installed: pip install {' '.join(packages)}\n"
    assert result.stderr == message


@pytest.mark.parametrize("arguments", [["info"], ["info", "--json"], ["--help"]], ids=" ".join)
def test_reader_that_leaves(arguments):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "blockcell", *arguments]
    result = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert not result.stderr and result.returncode in (0, 1)  # argparse drops the error itself in --help


def test_imports():
    """The package does not load the command line, nor the command line what only the demo needs."""
    assert printed("import sys, blockcell; print(*{'blockcell.command', 'argparse'} & set(sys.modules))") == ""
    heavy = {"rich", "matplotlib", "sklearn", "threadpoolctl"}
    code = f"import sys; from blockcell.command import cli; cli._parser(); print(*{heavy} & set(sys.modules))"
    assert printed(code) == ""


# --------------------------------------------------------------------------------------------------------- Keras' files
@pytest.fixture
def keras_file(tmp_path):
    """A .h5 of an LSTM, a GRU and a Dense, and its parts."""
    pytest.importorskip("h5py")
    g = np.random.default_rng(0)
    shapes = ("LSTM", 2, 3), ("GRU", 3, 2), ("Dense", 2, 2)
    arrays = {f"a{k}": keras_forms.drawn(g, *shape) for k, shape in enumerate(shapes)}
    parts = [keras_forms.entry(kind, f"a{k}", units=units) for k, (kind, _, units) in enumerate(shapes)]
    parts[0]["config"]["return_sequences"] = True
    model = keras_forms.sequential(keras_forms.entry("Embedding", "emb"), *parts)
    return keras_forms.write_h5(tmp_path / "m.h5", model, arrays | {"emb": [np.ones((4, 2))]}), model, arrays


def test_inspect_of_keras(keras_file, capsys):
    path = str(keras_file[0])
    assert main(["inspect", path]) == 0
    text = capsys.readouterr().out
    assert [line.split() for line in text.splitlines()[2:5]] == [
        ["0", "LSTM", "2", "3", "float32"],
        ["1", "GRU", "3", "2", "float32"],
        ["2", "Dense", "2", "2", "float32"],
    ]
    assert "\nleft out: emb (Embedding)\n" in text
    assert text.endswith("Together they are one layer.\n")
    assert main(["inspect", path, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [layer["kind"] for layer in document["layers"]] == ["LSTM", "GRU", "Dense"]
    assert document["warnings"] == ["left out: emb (Embedding)"] and document["one_layer"]


@pytest.mark.parametrize("ending", [".npz", ".safetensors", ".onnx"])
def test_extract_of_keras(keras_file, ending, tmp_path, capsys):
    path, out = str(keras_file[0]), tmp_path / f"out{ending}"
    with pytest.warns(UserWarning, match="left out"):
        layer = blockcell.convert.from_keras(path)
    assert main(["extract", path, str(out)]) == 0
    text = capsys.readouterr().out
    assert "\nleft out: emb (Embedding)\n" in text and text.count("ot compared with the model") == 1
    assert out.stat().st_size > 100
    if ending != ".onnx":
        assert repr(blockcell.load(out)) == repr(layer)
        assert main(["extract", path, str(out), "--cell", "1", "--cell", "2", "--json"]) == 0
        assert repr(blockcell.load(out)) == repr(blockcell.Stack(layer.layers[1:]))
        assert json.loads(capsys.readouterr().out)["layer"] == repr(blockcell.load(out))


def test_extract_of_keras_with_weights_apart(keras_file, tmp_path, capsys):
    _, model, arrays = keras_file
    architecture, out = tmp_path / "m.json", tmp_path / "out.npz"
    architecture.write_text(json.dumps(model | {"keras_version": "2.15.0"}))
    weights = str(keras_forms.write_h5_weights(tmp_path / "w.h5", model, arrays))
    assert main(["extract", str(architecture), str(out), "--weights", weights]) == 0
    assert main(["extract", weights, str(out), "--recurrent-activation", "hard_sigmoid,0.2,0.5"]) == 0
    assert blockcell.load(out).layers[0].recurrent_activation == ("hard_sigmoid", 0.2, 0.5)
    capsys.readouterr()
    for arguments, status, message in (
        ([str(architecture)], 1, "is an architecture without weights"),
        ([weights, "--forget-bias", "1"], 2, "--forget-bias is for checkpoints and graphs of TensorFlow"),
        ([weights, "--cell", "x"], 1, "has no layer x; there are: 0, 1, 2"),
        (
            [weights, "--cell", "0", "--cell", "0"],
            1,
            "0 gives 3 numbers a step, and 0, which is named behind it, takes",
        ),
        ([str(tmp_path / "m.pb"), "--weights", weights], 2, "--weights is for files of Keras"),
    ):
        path, *rest = arguments
        assert main(["extract", path, str(out), *rest]) == status
        assert message in capsys.readouterr().err


def test_layers_of_keras_that_are_not_one(tmp_path, capsys):
    pytest.importorskip("h5py")
    g = np.random.default_rng(0)
    arrays = {name: keras_forms.drawn(g, "LSTM", 3, 3) for name in "ab"} | {"n": [np.ones(3)] * 2}
    parts = [keras_forms.entry("LSTM", name, units=3, return_sequences=True) for name in "ab"]
    model = keras_forms.sequential(parts[0], keras_forms.entry("LayerNormalization", "n"), parts[1])
    path, out = str(keras_forms.write_h5(tmp_path / "m.h5", model, arrays)), str(tmp_path / "out.npz")
    assert main(["inspect", path]) == 0
    assert capsys.readouterr().out.endswith("They are not one layer.\n")
    assert main(["extract", path, out]) == 1
    assert "has 2 layers that are not one; say which with --cell: a, b" in capsys.readouterr().err
    assert main(["extract", path, out, "--cell", "b"]) == 0
    np.testing.assert_array_equal(
        blockcell.load(out).weights["w"],
        blockcell.convert.from_keras(arrays["b"], recurrent_activation="sigmoid", check=False).weights["w"],
    )
