"""`verify`: kernels and runtimes compared with the formulas in float64."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import DTypeLike
from onnx.reference import ReferenceEvaluator

from blockcell import ops as own_ops
from blockcell import raw_ops
from blockcell.formulas import FORMULAS
from blockcell.op_errors import KERNELS, Row, rows_of_outputs, severity
from blockcell.optable import DTYPES, LETTERS, OPS, Array, Op, sizes_of

from .build import build
from .cells.config import cell_name, op_config

Tell = Callable[[str, int, int], None]
RUNTIMES = ("cpu", "cuda", "webgpu", "reference")
CHAIN = 256  # bounds grow from here on: runtimes sum a product in one chain, which rounds with the root of its length
SIZES = {"T": 12, "B": 5, "I": 24, "H": 40}


@dataclass(frozen=True)
class Report:
    """What `verify` found: ``rows``, one for each output of each op, dtype, sizes and runtime."""

    rows: list[Row]

    @property
    def ok(self) -> bool:
        """Whether all errors are within their bounds."""
        return all(row.ok for row in self.rows)

    @property
    def providers(self) -> list[str]:
        """The runtimes that were compared."""
        return list(dict.fromkeys(row.provider for row in self.rows))

    def lines(self) -> list[list[str | bool]]:
        """Return the table's lines: for each op, dtype and sizes the worst output on every runtime, and the verdict.

        The dtype and the sizes stand below the op, so that a line has room in 80 columns.
        """
        rows_by_case: dict[tuple[str, str], list[Row]] = {}
        for row in self.rows:
            sizes = " ".join(f"{letter}{size}" for letter, size in row.sizes.items())
            rows_by_case.setdefault((row.op, f"  {row.dtype} {sizes}"), []).append(row)
        lines: list[list[str | bool]] = []
        for case, rows in rows_by_case.items():
            for label, provider in zip_longest(case, self.providers, fillvalue=""):
                own_rows = [row for row in rows if row.provider == provider]
                if own_rows:
                    worst = max(own_rows, key=severity)
                    place = f"{worst.output}[{','.join(map(str, worst.at))}]"
                    error = f"{worst.error:.2f} of {worst.bound:.0f}"
                    lines.append([label, provider, error, place, all(row.ok for row in own_rows)])
                else:
                    lines.append([label, provider, "", "", ""])
        return lines

    def heading(self) -> list[str]:
        """Return the titles of the table's columns."""
        return ["op", "on", "error", "in", ""]

    def table(self) -> str:
        """Return the table as text: errors in eps of an output's largest entry, with the worst output and its index."""
        verdicts = {True: "ok", False: "FAILED"}
        lines = ([verdicts[cell] if isinstance(cell, bool) else cell for cell in line] for line in self.lines())
        texts = [self.heading(), *lines]
        widths = [max(len(line[k]) for line in texts) for k in range(len(texts[0]))]
        rows = ("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) for line in texts)
        return "\n".join(row.rstrip() for row in rows)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the errors of every output, in parts of their bounds, and write them as PNG. Needs matplotlib."""
        from matplotlib.figure import Figure

        dtypes = list(dict.fromkeys(row.dtype for row in self.rows))
        ops = list(dict.fromkeys(row.op for row in self.rows))
        figure = Figure(figsize=(11, 1 + 2.6 * len(dtypes)), layout="constrained")
        panels = figure.subplots(len(dtypes), 1, sharex=True, squeeze=False)
        for axes, dtype in zip(panels[:, 0], dtypes, strict=True):
            for k, provider in enumerate(self.providers):
                rows = [row for row in self.rows if (row.dtype, row.provider) == (dtype, provider)]
                x = [ops.index(row.op) + 0.15 * (k - (len(self.providers) - 1) / 2) for row in rows]
                axes.plot(x, [row.error / row.bound for row in rows], "o", markersize=4, alpha=0.6, label=provider)
            axes.axhline(1, color="black", linewidth=1)
            axes.set(ylabel="error / bound", title=dtype)
            axes.set_yscale("symlog", linthresh=1e-3)
        panels[0, 0].legend(ncols=len(self.providers), fontsize="small")
        panels[-1, 0].set_xticks(range(len(ops)), ops, rotation=30, ha="right")
        panels[-1, 0].set_xlim(-0.5, len(ops) - 0.5)
        figure.savefig(path, format="png")

    def as_dict(self) -> dict[str, Any]:
        """Return the report for JSON; an error that is not a number is None."""
        rows = [row._asdict() | {"sizes": dict(row.sizes), "at": list(row.at), "ok": row.ok} for row in self.rows]
        for row in rows:
            row["error"] = row["error"] if np.isfinite(row["error"]) else None
        return {"ok": self.ok, "providers": self.providers, "rows": rows}


def verify(
    ops: str | Iterable[str] | None = None,
    *,
    dtypes: str | Iterable[DTypeLike] = DTYPES,
    sizes: Mapping[str, int] | Sequence[Mapping[str, int]] = SIZES,
    providers: str | Iterable[str] | None = None,
    tell: Tell = lambda what, done, of: None,
) -> Report:
    """Run ops on random numbers, on the kernels and on runtimes, and compare all of them with the float64 formulas.

    Parameters
    ----------
    ops : str or iterable of str, optional
        Names of ops; None: all.
    dtypes : str or iterable
        Any of float32, float64 and float16.
    sizes : dict or sequence of dict
        Values of T, B, I and H; those missing are 12, 5, 24 and 40.
    providers : str or iterable of str, optional
        What to ask beside the kernels: ``"cpu"``, ``"cuda"`` and ``"webgpu"``, onnxruntime's providers, and
        ``"reference"``, `onnx.reference`. None: all of these that are here. WebGPU has no float64, and on some GPUs no
        float16: the report has no rows of them.
    tell : callable
        Is called with what is being done, how much of it is done, and of how much.

    Returns
    -------
    Report
        The errors count in eps of the dtype times the output's largest entry. The bounds are 8 for cells and float16,
        24 for sequences in float32, and 1e-13 of the largest entry in float64; where I + H is more than 256, they grow
        with its root, as a runtime's sum of so many terms does.

    Raises
    ------
    ValueError
        An op, dtype, letter or provider is unknown, or a provider has none of the dtypes.
    RuntimeError
        A provider is not here.
    """
    names = [ops] if isinstance(ops, str) else list(OPS if ops is None else ops)
    all_sizes = [SIZES | dict(op_sizes) for op_sizes in ([sizes] if isinstance(sizes, Mapping) else sizes)]
    kinds = [op_config("GRUBlockCell", dtype).dtype for dtype in ([dtypes] if isinstance(dtypes, str) else dtypes)]
    runtimes = list_runtimes() if providers is None else [providers] if isinstance(providers, str) else list(providers)
    for provider in runtimes:
        if provider not in RUNTIMES:
            raise ValueError(f"provider is {provider!r}; expected one of {', '.join(RUNTIMES)}")
    dtypes_of = {provider: _dtypes_of(provider, kinds) for provider in runtimes}
    rows = []
    points = [(name, dtype, op_sizes) for name in names for dtype in kinds for op_sizes in all_sizes]
    for done, (name, dtype, op_sizes) in enumerate(points):
        tell("verifying", done, len(points))
        rows += _rows(name, dtype, op_sizes, [provider for provider in runtimes if dtype in dtypes_of[provider]])
    tell("verifying", len(points), len(points))
    return Report(rows)


def list_runtimes() -> list[str]:
    """Return the runtimes that are installed."""
    from .runtime import why_not

    return [name for name in RUNTIMES if name == "reference" or not why_not(name)]


def _dtypes_of(provider: str, kinds: list[np.dtype[Any]]) -> list[np.dtype[Any]]:
    """Return the dtypes that a runtime has; raise an error if it has none of them."""
    if provider == "reference":
        return kinds
    from .runtime import why_no_dtype, why_not

    if reason := why_not(provider):
        raise RuntimeError(f"provider is {provider!r}, but {reason}")
    reasons = {dtype: why_no_dtype(provider, dtype) for dtype in kinds}
    if kinds and all(reasons.values()):
        raise ValueError(f"provider is {provider!r}, but {reasons[kinds[0]]}")
    return [dtype for dtype in kinds if not reasons[dtype]]


def _rows(name: str, dtype: np.dtype[Any], sizes: dict[str, int], providers: Sequence[str]) -> list[Row]:
    attrs = _all_switches_on(OPS[name]) if name in OPS else {}
    op = op_config(name, dtype, sizes, attrs).op  # complains of what is unknown
    return compare(name, numbers(op, sizes, dtype) | attrs, (KERNELS, *providers))


def _all_switches_on(op: Op) -> dict[str, bool]:
    """Return the attributes with which the op reads all of its arguments."""
    return {attribute.name: True for attribute in op.attributes if attribute.kind is bool}


def compare(
    name: str,
    values: Mapping[str, Any],
    providers: Iterable[str],
    bounds: Mapping[str, float] | None = None,
    **options: str,
) -> list[Row]:
    """Run an op on these arguments, attributes among them; return a row for every output on each runtime.

    ``bounds`` are of outputs, by name, and count where they are larger than those of `verify`.  ``options`` are those
    of `build` for onnxruntime, ``loop`` above all; onnx.reference gets every step written out.
    """
    op = OPS[name]
    dtype = values[op.inputs[0].name].dtype
    dims = [(tensor.shape.split(), np.shape(values[tensor.name])) for tensor in op.inputs]
    sizes = {word: size for words, shape in dims for word, size in zip(words, shape, strict=True) if word in LETTERS}
    attrs = {attribute.name: values[attribute.name] for attribute in op.attributes if attribute.name in values}
    exact = FORMULAS[name](**values)
    eps = float(np.finfo(dtype).eps)
    bound = 1e-13 / eps if dtype == np.float64 else 24.0 if op.sequence and dtype == np.float32 else 8.0
    bound *= max(1.0, ((sizes["I"] + sizes["H"]) / CHAIN) ** 0.5)
    all_bounds = {tensor.name: max(bound, (bounds or {}).get(tensor.name, 0.0)) for tensor in op.outputs}
    rows = []
    for provider in providers:
        results = _results(provider, op, dtype, {"sizes": sizes, "attrs": attrs, **options}, values)
        rows += rows_of_outputs(op, dtype, sizes, provider, results, exact, all_bounds)
    return rows


def _results(
    provider: str, op: Op, dtype: np.dtype[Any], options: dict[str, Any], values: Mapping[str, Any]
) -> Sequence[Array]:
    """Return the results of an op on the kernels or a runtime."""
    if provider == KERNELS:
        results: Sequence[Array] = getattr({"raw_ops": raw_ops, "ops": own_ops}[op.module], op.name)(**values)
    elif provider == "reference":
        model = build(op.name, dtype=dtype, **options | {"loop": "unroll"})  # its Scan works since onnx 1.22
        inputs = {value.name: np.asarray(values[value.name]) for value in model.graph.input}
        with np.errstate(all="ignore"):
            results = [*map(np.asarray, ReferenceEvaluator(model).run(None, inputs))]
    else:
        from .session import Session

        results = Session(op.name, provider=provider, dtype=dtype, **options)(**values)
    return results


def numbers(op: Op, sizes: Mapping[str, int], dtype: np.dtype[Any]) -> dict[str, Any]:
    """Draw random arguments, the same ones every time; saved states are results of the forward op."""
    of_op = (cell_name(op), op.gates, op.sequence)
    forward = next(row for row in OPS.values() if (cell_name(row), row.gates, row.sequence) == of_op)
    saved = [tensor.name for tensor in forward.outputs] if forward is not op else []
    values: dict[str, Any] = {"seq_len_max": sizes["T"]} if op.sequence else {}
    for tensor in op.inputs:
        if tensor.name not in saved:
            rng = np.random.default_rng(zlib.crc32(f"{tensor.name} {dict(sizes)}".encode()))
            shape = sizes_of(tensor.shape, dict(sizes))
            scale = 1.5 / np.sqrt(max(1, shape[0])) if tensor.kind == "matrix" else 1.0
            values[tensor.name] = (scale * rng.uniform(-1, 1, shape)).astype(dtype)
    if saved:
        inputs = {tensor.name for tensor in forward.inputs} | {"seq_len_max"}
        arguments = {key: value for key, value in values.items() if key in inputs} | _all_switches_on(forward)
        states = FORMULAS[forward.name](**arguments)._asdict()
        values |= {t.name: states[t.name].astype(dtype) for t in op.inputs if t.name in saved}
    return values
