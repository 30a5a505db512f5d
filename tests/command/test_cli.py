"""The command line: help, forms of output, exit statuses, one-line errors."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys

import pytest
from fresh import on_terminal, printed, python

import blockcell
from blockcell.command import cli

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
