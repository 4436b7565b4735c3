"""What the benchmarks' commands share: words with commas in them, and a result's way to the terminal and to files."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from slipstream.bench.document import append_csv, check_writable
from slipstream.errors import InputError

Result = dict[str, Any]
WIDEST = 1_000
"""Characters that a table never needs."""


def words(text: str | None) -> tuple[str, ...] | None:
    """The words between commas; None where there are none."""
    found = tuple(word.strip() for word in (text or "").split(",") if word.strip())
    return found or None


def numbers(text: str | None, example: str) -> tuple[int, ...] | None:
    """The whole numbers between commas in ``--tokens``; None where there are none. Raises ``InputError``."""
    found = words(text)
    try:
        return None if found is None else tuple(int(word) for word in found)
    except ValueError as error:
        raise InputError(f"--tokens {text!r} must be whole numbers separated by commas, e.g. {example}") from error


def carry_out(
    measure: Callable[[Callable[[Result], None]], Result],
    show: Callable[[Result], None],
    csv_rows: Callable[[Result], Sequence[Mapping[str, Any]]],
    summary: Callable[[Result], dict[str, Any]],
    *,
    out: Path | None,
    csv: Path | None,
) -> tuple[Result, dict[str, Any]]:
    """Measure, print the tables, write the files; the result document and the summary for the last line.

    ``measure`` is given what writes the document to ``out``, and calls it after each case, so that a run cut short has
    not measured for nothing. Raises ``InputError`` before anything is measured where a file can't be written.
    """
    for path in (out, csv):
        if path is not None:
            check_writable(path)
    result = measure(partial(_write, out))
    show(result)
    if csv is not None:
        append_csv(csv, csv_rows(result))
    return result, summary(result)


def print_whole(console: Console, table: Table) -> None:
    """Print a table with no cell cut: one wider than the terminal, as large numbers make it, gets longer lines."""
    table.width = Measurement.get(console, console.options.update(max_width=WIDEST), table).maximum
    console.print(table)


def _write(path: Path | None, result: Result) -> None:
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
