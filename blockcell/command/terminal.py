"""What the command prints: JSON, lines and tables. All text goes through `say` or `print_table`."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence
from typing import Any

from ..errors import plain

VERDICTS = {True: "ok", False: "FAILED"}


def print_json(document: dict[str, Any]) -> None:
    print(json.dumps(document, indent=2, allow_nan=False))


def say(line: str, err: bool = False) -> None:
    """Print a line, with whatever a terminal would obey escaped; on standard error if `err`."""
    print(plain(line), file=sys.stderr if err else sys.stdout)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], fold: int | None = None) -> None:
    """Print a table. Columns whose heading ends in ":" are flush right, for figures; a bool is printed as a verdict.

    On a terminal that is too narrow, the column `fold` is folded, or all but the first.
    """
    right = [heading.endswith(":") for heading in columns]
    columns = [heading.removesuffix(":") for heading in columns]
    texts = [[VERDICTS[cell] if isinstance(cell, bool) else plain(str(cell)) for cell in row] for row in rows]
    if not (sys.stdout.isatty() and importlib.util.find_spec("rich")):
        lines = [list(columns), *texts] if any(columns) else texts
        widths = [max(len(line[k]) for line in lines) for k in range(len(columns))]
        say(title)
        for line in lines:
            padded = (text.rjust(n) if r else text.ljust(n) for text, n, r in zip(line, widths, right, strict=True))
            say(f"  {'  '.join(padded)}".rstrip())
        say("")
        return
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(plain(title), "bold"), title_justify="left", box=SIMPLE, show_header=any(columns))
    for k, (heading, flush) in enumerate(zip(columns, right, strict=True)):
        whole = k == 0 if fold is None else k != fold
        table.add_column(Text(heading), justify="right" if flush else "left", overflow="fold", no_wrap=whole)
    styles = {VERDICTS[True]: "green", VERDICTS[False]: "bold red"}
    for row in texts:
        table.add_row(*(Text(text, style=styles.get(text, "")) for text in row))
    Console().print(table)
