"""From the command line's words to ``bench all``, and its result to the terminal and to files."""

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from slipstream.bench import together
from slipstream.bench.harness import WHOLE
from slipstream.bench.together_arms import ALL, OFF, PUBLISHED
from slipstream.bench.words import carry_out, words
from slipstream.model.attention import AttentionChoice

NAMES: Mapping[str, str] = {OFF: "everything off", PUBLISHED: "published together", ALL: "everything on"}


def options(
    *,
    shape: str | None = None,
    tokens: int | None = None,
    layers: int | None = None,
    rounds: int | None = None,
    attention: str = "auto",
) -> together.TogetherBench:
    """The benchmark that these words ask for; shapes are separated by commas. Raises ``InputError``."""
    return together.TogetherBench(
        shapes=words(shape),
        tokens=tokens,
        layers=layers,
        rounds=rounds,
        attention=cast(AttentionChoice, attention),
    )


def run(
    asked: together.TogetherBench, console: Console, *, out: Path | None = None, csv: Path | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Measure, print the tables, write the files; the result document and the summary for the last line."""
    return carry_out(
        lambda save: together.run(asked, console.print, save),
        lambda result: _show(result, console),
        together.csv_rows,
        summary,
        out=out,
        csv=csv,
    )


def summary(result: Mapping[str, Any]) -> dict[str, Any]:
    """The last line, for machines: every arm's gain by shape."""
    measured = [row for row in result["rows"] if "comparisons" in row]
    return {
        "benchmark": "all",
        "gains": {row["shape"]: {one["arm"]: one["gain"] for one in row["comparisons"]} for row in measured},
        "left_out": len(result["rows"]) - len(measured),
    }


def _show(result: Mapping[str, Any], console: Console) -> None:
    for row in result["rows"]:
        _show_row(row, console)


def _show_row(row: Mapping[str, Any], console: Console) -> None:
    console.print(f"\n{row['shape']} ({row['layers']} layers), {row['tokens']:,} tokens, {row['rounds']} rounds")
    if "refused" in row:
        console.print(f"  left out: {row['refused']}")
        return
    experts = f", experts {row['experts']}" if row["experts"] else ""
    console.print(f"  {row['documents']} documents, attention {row['attention']}{experts}")
    console.print(_table(row))
    for one in row["comparisons"]:
        if "product_gain" in one:
            told = f", published {one['published']}" if one["published"] else ""
            console.print(
                f"  {NAMES[one['arm']]}: {one['gain']:+.1%}; product of its parts {one['product_gain']:+.1%}{told}"
            )
    for note in row["notes"]:
        console.print(f"  {note}")


def _table(row: Mapping[str, Any]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, column in enumerate(("on", "ran", "step, ms", "gain", "95% interval", "published")):
        table.add_column(column, justify="left" if index < 2 else "right")
    gains = {one["arm"]: one for one in row["comparisons"]}
    for name, arm in row["arms"].items():
        cells = ["", "", ""]
        if name in gains:
            one = gains[name]
            cells = [f"{one['gain']:+.1%}", f"{one['gain_low']:+.1%}, {one['gain_high']:+.1%}", one["published"] or ""]
        seconds = statistics.median(arm["seconds"][WHOLE])
        table.add_row(NAMES.get(name, f"{name} alone"), arm["ran"], f"{seconds * 1e3:.1f}", *cells)
    return table
