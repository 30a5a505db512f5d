"""The command line: `info`, `demo`, `verify`, `inspect` and `extract`, their options, and `main`.

Each command is a function that takes its options and returns an exit status; `_parser` registers it, and `main` turns
the errors it raises into one line on standard error. Exit statuses: 0 all is well, 1 a bound does not hold or something
went wrong, 2 wrong usage. On a terminal rich draws tables and progress; in a pipe tables are plain text and there is no
progress.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import math
import os
import shutil
import sys
import textwrap
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from .. import __version__, build_info
from ..activations import Activation, canonical
from ..errors import plain
from ..layers import Layer, Quantized, Stack
from ..layers.loading import read_any
from ..optable import DTYPES, LETTERS, OPS
from ..progress import progress
from .terminal import print_json, print_table, say

if TYPE_CHECKING:
    from ..tensorflow.cells import Cells
    from ..tensorflow.cells.cell.found_cell import Found
    from ..tensorflow.cells.cell.layer_check import Check

RUNTIMES = {  # by the names that `onnx_export.verify` has for them
    "cpu": "onnxruntime CPU",
    "cuda": "onnxruntime CUDA",
    "webgpu": "onnxruntime WebGPU",
    "reference": "onnx.reference",
}


class MissingPackage(Exception):
    """A command needs packages that are not installed."""


# --------------------------------------------------------------------------------------------------------- the commands
def info(options: argparse.Namespace) -> int:
    """Show what runs here: versions, CPU level, threads, and how the kernels were compiled. Or show a saved layer.

    With the PATH of a file that ``layer.save`` wrote: its layer, the sizes of it, and how it is quantized.
    """
    if options.path is not None:
        return layer_info(options)
    if options.json:
        print_json(build_info())
    else:
        print_machine()
    return 0


def layer_info(options: argparse.Namespace) -> int:
    saved = read_any(options.path)
    layer: Any = saved.dequantize() if isinstance(saved, Quantized) else saved
    about: dict[str, Any] = {
        "layer": repr(layer),
        "input_size": layer.input_size,
        "output_size": layer.output_size,
        "dtype": str(layer.dtype),
        "quantization": saved._quantization,
        "weights": sum(array.size for array in layer.weights.values()),
        "file_bytes": options.path.stat().st_size,
    }
    if options.json:
        print_json(about)
        return 0
    if isinstance(saved._quantization, dict):
        about["quantization"] = ", ".join(f"{prefix}: {scheme}" for prefix, scheme in saved._quantization.items())
    shown = [[name.replace("_", " "), f"{x:,}" if isinstance(x, int) else str(x)] for name, x in about.items()]
    print_table(str(options.path), ["", ""], shown)
    return 0


def demo(options: argparse.Namespace) -> int:
    """Train a GRU and an LSTM on handwritten digits, and check every op on them.

    Both are layers that read scikit-learn's digits row by row. Once they are trained, all ops run on digits that
    were held out and are compared with the float64 formulas, and so are their ONNX graphs on onnxruntime and
    onnx.reference, where these are installed. Writes a picture of the training and of what the
    networks predict after each row. The exit status is 0 if both networks know 95 % of the held-out digits and every op
    keeps its error bound, else 1. The bound is 5 eps of an output's largest entry, or more where the trained weights
    amplify float32's rounding; a graph may be off by twice as much, and in any case by what `blockcell verify` allows.
    """
    require("matplotlib", "rich", "scikit-learn")
    runs_graphs, runtimes = not missing_packages("onnx", "onnxruntime"), []
    if runs_graphs:
        require_own_onnx_export()
    with progress() as tell:
        tell("loading the digits", 0, 1)
        from . import demo

        if runs_graphs:
            from onnx_export.verification import list_runtimes

            runtimes = list_runtimes()
        tell("loading the digits", 1, 1)
        result = demo.run(options.seed, tell, runtimes)
        demo.draw(result, options.output)
    if options.json:
        print_json(result.as_dict() | {"picture": str(options.output), "machine": build_info()})
        return 0 if result.ok else 1

    required = f"{100 * demo.REQUIRED_ACCURACY:.0f} %"
    rows = []
    for part in result.trainings:
        right = f"{100 * part.accuracies[-1]:.1f} %"
        rows.append(
            [part.network, part.weights, f"{part.losses[-1]:.3f}", right, required, f"{part.seconds:.1f}", part.ok]
        )
    print_table(
        f"{demo.EPOCHS} epochs on {result.trained_on} digits, seed {result.seed}; {result.held_out} held out",
        ["network", "weights:", "loss:", "held out, right:", "required:", "time, s:", ""],
        rows,
    )
    _, *runtimes = result.checks[0].worst
    rows = []
    for c in result.checks:
        ours, *theirs = c.worst.values()
        errors = [f"{row.error:.2f}" for row in theirs]
        rows.append([c.op, f"{ours.error:.2f}", f"{ours.bound:.2f}", ours.output, *errors, c.ok])
    print_table(
        f"Every op on {demo.CHECKED} held-out digits: the largest error in eps, against float64",
        ["op", "blockcell:", "bound:", "in output", *(f"{RUNTIMES[name]}:" for name in runtimes), ""],
        rows,
    )
    if not runtimes:
        say("The ONNX graphs were not run: pip install onnx onnxruntime")
        say("")
    print_machine()
    say(f"The picture is {options.output}")
    failed = [part.network for part in result.trainings if not part.ok]
    for c in result.checks:
        names = {name: f"{c.op} on {RUNTIMES[name]}" if name in RUNTIMES else c.op for name in c.worst}
        failed += [names[name] for name, row in c.worst.items() if not row.ok]
    say(f"FAILED: {', '.join(failed)}" if failed else "Both networks and all ops keep their bounds.")
    return 0 if result.ok else 1


def verify(options: argparse.Namespace) -> int:
    """Compare the kernels, onnxruntime and onnx.reference with float64, op by op.

    Runs ops on random numbers and shows the largest error of each, in eps of the output's largest entry, with the
    output and the place of it. Writes a picture of all errors if matplotlib is installed. The exit status is 0 if all
    errors are within their bounds: 8 eps for cells and in float16, 24 for sequences in float32, and in float64 1e-13 of
    the largest entry, more where I + H is more than 256; else 1.
    """
    require("onnx", "onnxruntime")
    require_own_onnx_export()
    picture = None if missing_packages("matplotlib") else options.output
    with progress() as tell:
        import onnx_export

        report = onnx_export.verify(
            options.ops or None,
            dtypes=options.dtypes,
            sizes=options.sizes or {},
            providers=options.providers,
            tell=tell,
        )
        if picture:
            report.plot(picture)
    if options.json:
        print_json(report.as_dict() | {"picture": str(picture) if picture else None, "machine": build_info()})
        return 0 if report.ok else 1
    print_table("The largest errors in eps, against float64", report.heading(), report.lines())
    no_picture = "There is no picture, as matplotlib is not installed: pip install matplotlib"
    say(f"The picture is {picture}" if picture else no_picture)
    failed = list(dict.fromkeys(f"{row.op} on {row.provider}" for row in report.rows if not row.ok))
    say(f"FAILED: {', '.join(failed)}" if failed else f"All {len(report.rows)} errors are within their bounds.")
    return 0 if report.ok else 1


def inspect_file(options: argparse.Namespace) -> int:
    """Show the RNNs, LSTMs and GRUs in a file of TensorFlow's, and check each.

    PATH is a checkpoint, a SavedModel's folder, a frozen graph (.pb, .pbtxt), a .meta or a .pbmm. TensorFlow is not
    needed. Each cell runs beside its layer on random numbers, node by node in float64; the error is in eps of the
    largest entry. An attribute that the file does not say is "?": give it to `blockcell extract`. What is refused has
    the reason. The exit status is 0 if all errors are within their bounds, also where cells are refused; else 1.
    """
    from .. import tensorflow
    from ..tensorflow.cells.cell.found_cell import format_attribute

    with progress() as tell:
        tell("reading", 0, 1)
        model = tensorflow.open(options.path)
        cells = model.cells
        tell("reading", 1, 1)
        results = []
        for k, cell in enumerate(cells.values()):
            tell("checking cells", k, len(cells))
            results.append(None if cell.refused is not None or cell.unsaid else cell.check())
        tell("checking cells", len(cells), len(cells))
    checked = [*zip(cells.values(), results, strict=True)]
    ok = all(check is None or check.ok for _, check in checked)
    reason, remarks = _compare_whole(cells)
    if options.json:
        described = [_describe_cell(cells, *pair) for pair in checked]
        document = {"path": options.path, "cells": described, "one_layer": not reason, "warnings": remarks, "ok": ok}
        print_json(document)
        return 0 if ok else 1
    if not cells:
        say(f"There is no RNN, LSTM or GRU in {options.path}, by what blockcell knows of them. Its variables are in")
        say(f"blockcell.tensorflow.open({options.path!r}).variables")
        return 0
    rows: list[list[Any]] = []
    for cell, check in checked:
        sizes = ["" if size is None else size for size in (cell.input_size, cell.hidden_size)]
        verdict: list[str | bool] = ["", "refused" if cell.refused is not None else "not checked"]
        if check is not None:
            verdict = [f"{check:.2f}", check.ok]
        rows.append([cell.name, cell.kind, *sizes, cell.dtype, *verdict])
    title = f"{len(rows)} cell{'s' * (len(rows) > 1)} in {options.path}"
    print_table(title, ["cell", "kind", "I:", "H:", "dtype", "error, eps:", ""], rows, fold=0)
    for cell in cells.values():
        say(f"{cell.name}:")
        if cell.refused is not None:
            say(f"  refused: {cell.refused}")
            continue
        if cell.attributes:
            say(f"  {' '.join(f'{name}={format_attribute(value)}' for name, value in cell.attributes.items())}")
        if reads := ", ".join(cell.source_cells) or cell.input:
            say(f"  its input is {reads}{', reversed' * bool(cell.reverse)}")
        for role, name in cell.weights.items():
            say(f"  {role} is {name}")
        if sharing := cells.sharing(cell.name):
            say(f"  it shares these with {', '.join(sharing)}")
        if cell.state_from is not None:
            say(f"  it begins with {_describe_state(cell)}")
        if cell.unsaid:
            say(f"  not in the file: {', '.join(cell.unsaid)}")
    if len(rows) > 1:
        say("")
        say(f"They are not one layer: {reason.removesuffix('.')}." if reason else "Together they are one layer.")
    for remark in remarks:
        say(remark)
    return 0 if ok else 1


def _describe_state(cell: Found) -> str:
    """Say what a cell begins with, if not with zeros, and how its layer gets that."""
    if cell.initial_state is None:
        return f"a state that comes from {cell.state_from}: pass it to calls as state="
    return f"the state {cell.state_from}: pass the cell's initial_state to calls as state="


def _compare_whole(cells: Cells) -> tuple[str, list[str]]:
    """Say why all cells are not one layer, or what is remarked of this layer."""
    try:
        cells.levels()
        if any(cell.unsaid for cell in cells.values() if cell.refused is None):
            return "", []
        return "", _make_whole(cells, {})[1]
    except ValueError as error:
        return str(error).removeprefix("blockcell.tensorflow: "), []


def _make_whole(cells: Cells, options: Mapping[str, Any]) -> tuple[Layer, list[str]]:
    """Make the layer of all cells, and return what it warns of."""
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        layer = cells.layer(**options)
    return layer, [str(warning.message).removeprefix("blockcell.tensorflow: ") for warning in record]


def extract(options: argparse.Namespace) -> int:
    """Write the RNNs, LSTMs and GRUs of a file of TensorFlow's as a layer, or some of them.

    OUT ends in .npz or .safetensors, which `blockcell.load` reads, or in .onnx, which needs onnx. Cells that
    the graph has on top of each other, or as two directions, are one layer. --cell takes one of them; given several
    times, it takes a Stack of these cells in this order. What the file does not say is asked for: --forget-bias,
    --cell-clip and so on, for each cell that has it. Each cell is checked first, as by `blockcell inspect`; nothing is
    written if its error is above the bound. A layer begins with zeros: if the graph does not, a line says so.
    """
    if options.out.suffix == ".onnx":
        require("onnx")
        require_own_onnx_export()
    elif options.streaming:
        raise ValueError(f"--streaming is for .onnx, and {options.out} ends in {options.out.suffix}; leave it out")
    from .. import tensorflow

    with progress() as tell:
        tell("reading", 0, 1)
        cells = tensorflow.open(options.path).cells
        tell("reading", 1, 1)
        chosen = _choose_cells(options, cells)
        names = ("forget_bias", "cell_clip", "proj_clip", "activation", "average")
        choices = {name: getattr(options, name) for name in names}
        options_of_cells = [_options_for_cell(choices, cell, chosen) for cell in chosen]
        checks = []
        for k, cell in enumerate(chosen):
            tell("checking cells", k, len(chosen))
            checks.append(_check_chosen(options.path, cell, options_of_cells[k]))
        tell("checking cells", len(chosen), len(chosen))
        remarks: list[str] = []
        if options.cell is None and len(chosen) > 1:
            layer, remarks = _make_whole(cells, choices)
        else:
            layers = [cell.layer(**cell_options) for cell, cell_options in zip(chosen, options_of_cells, strict=True)]
            layer = layers[0] if len(layers) == 1 else Stack(layers)
        if options.out.suffix == ".onnx":
            import onnx_export

            onnx_export.export(layer, options.out, streaming=options.streaming)
        else:
            layer.save(options.out)
    if options.json:
        described = [_describe_cell(cells, *pair) for pair in zip(chosen, checks, strict=True)]
        print_json({"out": str(options.out), "layer": repr(layer), "cells": described, "warnings": remarks})
    else:
        say(f"{options.out} is {layer!r}, off by {max(checks):.2f} eps")
        for cell in chosen:
            if cell.state_from is not None:
                say(f"{cell.name} begins with {_describe_state(cell)}, which is not in {options.out}")
        for remark in remarks:
            say(remark)
    return 0


def _check_chosen(path: str, cell: Found, options: Mapping[str, Any]) -> Check:
    """Check a cell; refuse one for which options are missing, and one that is off by more than its bound."""
    missing_options = [name for name in cell.unsaid if options[name] is None]
    if missing_options and cell.refused is None:
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in missing_options)
        where = "as the program that made it has them, or put the checkpoint's .meta beside it"
        message = f"{path} does not say {' and '.join(missing_options)} of {cell.name}"
        raise ValueError(f"{message}; pass {flags}, {where}")
    check = cell.check(**options)
    if not check.ok:
        message = f"{cell.name} is off by {check:.0f} eps, and {check.bound:.0f} are allowed"
        raise ValueError(f"{message}; nothing is written")
    return check


def _options_for_cell(options: Mapping[str, Any], cell: Found, chosen: Sequence[Found]) -> dict[str, Any]:
    """Return the options for a cell: without those that are for other cells, as forget_bias is not for a GRU."""
    unused = {name for other in chosen for name in other.attributes}.difference(cell.attributes)
    return {name: value for name, value in options.items() if name not in unused}


def _choose_cells(options: argparse.Namespace, cells: Cells) -> list[Found]:
    """Return the cells that are named, in their order, or all if they are one layer."""
    if options.cell is not None:
        if unknown := [name for name in options.cell if name not in cells]:
            names = ", ".join(cells) or "none"
            raise ValueError(f"{options.path} has no cell {unknown[0]}; there are: {names}")
        named_cells = [cells[name] for name in options.cell]
        for below, above in pairwise(named_cells):
            if below.refused is None and above.refused is None and below.output_size != above.input_size:
                gives = f"{below.name} gives {below.output_size} numbers a step"
                takes = f"{above.name}, which is named behind it, takes {above.input_size}"
                raise ValueError(f"{gives}, and {takes}; name cells that fit on each other, the lowest first")
        return named_cells
    usable = [cell for cell in cells.values() if cell.refused is None]
    if not usable:
        refused_cell = next(iter(cells.values()), None)
        why = f"; {refused_cell.name} is refused: {refused_cell.refused}" if refused_cell else ""
        raise ValueError(f"{options.path} has no cell that can be a layer{why}")
    try:
        cells.levels()
    except ValueError as error:
        names = ", ".join(cell.name for cell in usable)
        message = f"{options.path} has {len(usable)} cells; say which with --cell: {names}. Not all: {error}"
        raise ValueError(message) from None
    return usable


def _describe_cell(cells: Cells, cell: Found, check: Check | None) -> dict[str, Any]:
    return {
        "cell": cell.name,
        "kind": cell.kind,
        "input_size": cell.input_size,
        "hidden_size": cell.hidden_size,
        "output_size": cell.output_size,
        "dtype": cell.dtype,
        "attributes": cell.attributes,
        "weights": cell.weights,
        "shares_weights_with": list(cells.sharing(cell.name)),
        "nodes": list(cell.nodes),
        "reverse": cell.reverse,
        "input_from": list(cell.source_cells),
        "input": cell.input,
        "state_from": cell.state_from,
        "refused": cell.refused,
        "error_eps": float(check) if check is not None and math.isfinite(check) else None,
        "bound_eps": None if check is None else check.bound,
    }


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="blockcell",
        description="TensorFlow's fused RNN block cells, without TensorFlow.",
        epilog="example: blockcell info\n\n`blockcell COMMAND --help` tells more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"blockcell {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    columns = shutil.get_terminal_size().columns - 2  # as argparse has it

    def add(run: Callable[[argparse.Namespace], int], example: str, name: str | None = None) -> argparse.ArgumentParser:
        paragraphs = [" ".join(paragraph.split()) for paragraph in (inspect.getdoc(run) or "").split("\n\n")]
        command = commands.add_parser(
            name or run.__name__,
            help=paragraphs[0].partition(". ")[0].removesuffix("."),
            description="\n\n".join(textwrap.fill(paragraph, columns) for paragraph in paragraphs),
            epilog=f"example: {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(run=run)
        command.add_argument("--json", action="store_true", help="print one JSON document instead of text")
        command.add_argument("--debug", action="store_true", help="show the traceback of an error")
        return command

    png, picture = _writable(".png"), "the picture to write (%(default)s)"
    command = add(info, "blockcell info classifier.npz")
    command.add_argument("path", nargs="?", type=Path, metavar="PATH", help="a saved layer, .npz or .safetensors")
    command = add(demo, "blockcell demo --output digits.png")
    command.add_argument("--output", type=png, default="blockcell-demo.png", metavar="PNG", help=picture)
    command.add_argument("--seed", type=_seed, default=0, help="of the first weights and the order (%(default)s)")
    command = add(verify, "blockcell verify BlockLSTM block_gru --sizes T=100,B=16,I=64,H=64")
    command.add_argument("ops", nargs="*", type=_op, metavar="OP", help="names of ops (all)")
    dtypes = [str(dtype) for dtype in DTYPES]
    any_dtypes = f"any of {', '.join(dtypes)} (all)"
    command.add_argument("--dtypes", nargs="+", choices=dtypes, default=dtypes, metavar="DTYPE", help=any_dtypes)
    command.add_argument("--sizes", nargs="+", type=_sizes, metavar="T=..,B=..", help="sizes to try; I and H as well")
    any_providers = f"any of {', '.join(RUNTIMES)}, beside the kernels (those that are here)"
    command.add_argument("--providers", nargs="+", choices=RUNTIMES, metavar="PROVIDER", help=any_providers)
    command.add_argument("--output", type=png, default="blockcell-verify.png", metavar="PNG", help=picture)
    command = add(inspect_file, "blockcell inspect model.ckpt --json", "inspect")
    command.add_argument("path", metavar="PATH", help="a checkpoint, SavedModel, .pb, .pbtxt, .meta or .pbmm")
    command = add(extract, "blockcell extract model.ckpt lstm.npz --cell rnn/lstm_cell")
    command.add_argument("path", metavar="PATH", help="as for `blockcell inspect`")
    command.add_argument(
        "out",
        type=_writable(".npz", ".safetensors", ".onnx"),
        metavar="OUT",
        help="ends in .npz, .safetensors or .onnx",
    )
    command.add_argument(
        "--cell",
        action="append",
        metavar="NAME",
        help="a cell, as `blockcell inspect` names it; again for the next of a Stack",
    )
    command.add_argument("--forget-bias", type=_number, metavar="X", help="where the file does not say it")
    command.add_argument("--cell-clip", type=_number, metavar="X", help="where the file does not say it; 0 for none")
    command.add_argument("--proj-clip", type=_number, metavar="X", help="likewise, of a projection")
    command.add_argument("--activation", type=_activation, metavar="NAME", help="likewise, of RNNs: tanh, relu, ...")
    command.add_argument("--streaming", action="store_true", help="an .onnx of one step, with its state")
    command.add_argument("--average", action="store_true", help="the moving averages of the weights")
    return parser


def _writable(*suffixes: str) -> Callable[[str], Path]:
    """Return a reader of paths of files that end so and can be written: now, and not when all is computed."""

    def read(text: str) -> Path:
        path = Path(text)
        if path.suffix.lower() not in suffixes:
            raise argparse.ArgumentTypeError(f"{text} does not end in {' or '.join(suffixes)}")
        if path.is_dir() or not os.access(path.parent, os.W_OK):
            raise argparse.ArgumentTypeError(f"{text} cannot be written")
        return path

    return read


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text} is not a number")
    return value


def _activation(text: str) -> Activation:
    """Read an activation: a name, or a name and parameters, ``leaky_relu,0.01``."""
    name, *numbers = text.split(",")
    try:
        return canonical("the activation", (name, *map(float, numbers)))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _op(text: str) -> str:
    if text not in OPS:
        raise argparse.ArgumentTypeError(f"{text} is none of {', '.join(OPS)}")
    return text


def _sizes(text: str) -> dict[str, int]:
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(letter in tuple(LETTERS) and size.isdecimal() for letter, _, size in pairs):
        raise argparse.ArgumentTypeError(f"{text} is not like T=100,B=16")
    return {letter: int(size) for letter, _, size in pairs}


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 0 up")
    return int(text)


# --------------------------------------------------------------------------------------------- what they have in common
class Parser(argparse.ArgumentParser):
    """Errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {plain(message)} (`{self.prog} --help` tells more)\n")


def missing_packages(*packages: str) -> list[str]:
    """Return those of the packages that are not installed."""
    modules = {"scikit-learn": "sklearn"}
    return [name for name in packages if importlib.util.find_spec(modules.get(name, name)) is None]


def require(*packages: str) -> None:
    if names := missing_packages(*packages):
        raise MissingPackage(f"{', '.join(names)} not installed: pip install {' '.join(names)}")


def require_own_onnx_export() -> None:
    """Raise an ImportError if another module of that name, perhaps in the working directory, would be imported."""
    spec, own = importlib.util.find_spec("onnx_export"), Path(__file__).parents[2] / "onnx_export" / "__init__.py"
    if spec and spec.origin and Path(spec.origin).resolve() != own.resolve():
        where = f"onnx_export is {spec.origin}, which hides blockcell's own, {own}"
        raise ImportError(f"{where}: rename it, or run blockcell elsewhere")


def print_machine() -> None:
    shown = build_info()
    shown["caches"] = tuple(f"{name} {size >> 10} KiB" for name, size in shown["caches"].items())
    rows = [[key, ", ".join(value) if isinstance(value, tuple) else str(value)] for key, value in shown.items()]
    print_table("This machine", ["", ""], rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    try:
        try:
            return run(arguments)
        finally:
            print(end="", flush=True)  # here, because nothing catches an error at the interpreter's exit
    except BrokenPipeError:  # the reader of the pipe has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def run(arguments: Sequence[str] | None) -> int:
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options)
        return status
    except BrokenPipeError:
        raise
    except KeyboardInterrupt:
        message, status = "interrupted", 130  # what shells expect of an interrupted program
    except MissingPackage as error:
        message, status = str(error), 1
    except Exception as error:
        if options.debug:
            raise
        message, status = f"{type(error).__name__}: {' '.join(str(error).split())}", 1
    say(f"blockcell {options.command}: {message}", err=True)
    return status
