"""The experts benchmark's result for people: a narrow table a part, the published figures and the bars beside ours."""

from collections.abc import Iterable, Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from slipstream.bench.experts_arms import GROUPED, REFERENCE, SORTED, STOCK_GROUPED
from slipstream.bench.harness import WHOLE
from slipstream.bench.words import print_whole

SEES_OTHERS = 0.02
"""A relative distance of token losses above which an arm's documents see each other, or its rounding is no rounding."""


def show(result: Mapping[str, Any], console: Console) -> None:
    """Print the result document of ``bench experts``."""
    console.print(f"experts on {result['device']}, commit {result['commit'][:12]}; times in ms")
    rows = result["rows"]
    for row in rows:
        if "refused" in row:
            console.print(f"  left out: {row['refused']}")
        elif row["part"] == "layer":
            _show_layer(row, result["published"], console)
    if any(row.get("part") == "scaling" for row in rows):
        _show_scaling([row for row in rows if row.get("part") == "scaling"], result["bars"], console)
    for row in rows:
        if row.get("part") == "step":
            _show_step(row, result, console)


def _show_layer(row: Mapping[str, Any], published: Mapping[str, Any], console: Console) -> None:
    title = (
        f"One layer of {row['shape']} ({row['experts']} experts), {row['tokens']:,} tokens: router and experts alone, "
        f"{row['rounds']} rounds"
    )
    table = _table(title, "experts", "part", "ms", "gain", "saved", "interval", "published", "waits")
    for name, arm in row["arms"].items():
        gains = {one["part"]: one for one in row["comparisons"] if one["ours"] == name}
        for part, seconds in arm["seconds"].items():
            told = published["layer_gain"].get(part) if name == SORTED else None
            waits = str(arm["queries"]) if part == "forward" else ""
            table.add_row(name, part, _ms(seconds), *_saving(gains.get(part)), _percent(told), waits)
    print_whole(console, table)


def _show_scaling(rows: list[Mapping[str, Any]], bars: Mapping[str, float], console: Console) -> None:
    title = f"Routing alone, {rows[0]['tokens']:,} tokens to {rows[0]['top_k']} experts each: ms (host waits)"
    table = _table(title, "experts", *rows[0]["arms"])
    for row in rows:
        cells = (f"{_ms(arm['seconds'])} ({arm['queries']})" for arm in row["arms"].values())
        table.add_row(str(row["experts"]), *cells)
    print_whole(console, table)
    if (growth := routing_growth(rows)) is not None:
        word = _met(growth <= bars["routing"])
        console.print(f"  grouped routing takes {growth:.2f} times as long; bar at most {bars['routing']}: {word}")


def _show_step(row: Mapping[str, Any], result: Mapping[str, Any], console: Console) -> None:
    title = (
        f"Steps of {row['shape']}, {row['layers']} layers, {row['tokens']:,} tokens, adapters on {row['adapters']}, "
        f"recompute, {row['rounds']} rounds"
    )
    table = _table(title, "experts", "step", "forward", "backward", "peak GB", "syncs", "distance")
    for name, arm in row["arms"].items():
        seconds = arm["seconds"]
        memory = "" if arm["memory_bytes"] is None else f"{arm['memory_bytes'] / 1e9:.1f}"
        syncs = "" if arm["syncs"] is None else str(arm["syncs"])
        times = (_ms(seconds[part]) for part in (WHOLE, "forward", "backward"))
        table.add_row(name, *times, memory, syncs, f"{arm['distance']['token_losses']:.1e}")
    print_whole(console, table)
    for line in _step_lines(row, result):
        console.print(f"  {line}")


def _step_lines(row: Mapping[str, Any], result: Mapping[str, Any]) -> Iterable[str]:
    low, high = result["published"]["step_gain"]
    for one in row["comparisons"]:
        told = f" (published {low:.0%} to {high:.0%})" if (one["against"], one["ours"]) == (REFERENCE, SORTED) else ""
        bar = bar_of(row, one, result["bars"])
        verdict = "" if bar is None else f"; bar {bar:g}: {_met(one['ratio'] >= bar)}"
        yield f"{one['ours']} against {one['against']}: {one['ratio']:.2f} times as fast{told}{verdict}"
    stock = row["arms"][STOCK_GROUPED]["distance"]["token_losses"]
    if stock > max(SEES_OTHERS, 3 * row["arms"][GROUPED]["distance"]["token_losses"]):
        yield "transformers' steps do not compute the same: without segments, documents see each other here"


def bar_of(row: Mapping[str, Any], comparison: Mapping[str, Any], bars: Mapping[str, float]) -> float | None:
    """The ratio that a comparison is held to: gpt-oss on attention adapters, against transformers' two."""
    held = row["shape"] == "gpt-oss-20b" and row["adapters"] == "attention"
    return bars.get(comparison["against"]) if held and comparison["ours"] == GROUPED else None


def routing_growth(rows: Iterable[Mapping[str, Any]]) -> float | None:
    """How many times longer grouped routing takes with the most experts than with the fewest."""
    seconds = {row["experts"]: row["arms"][GROUPED]["seconds"] for row in rows if row.get("part") == "scaling"}
    return seconds[max(seconds)] / seconds[min(seconds)] if len(seconds) > 1 else None


def summary(result: Mapping[str, Any]) -> dict[str, Any]:
    """The last line, for machines: how many bars there were, how many were met, and what was left out."""
    rows, bars = result["rows"], result["bars"]
    met = [
        one["ratio"] >= bar
        for row in rows
        if row.get("part") == "step"
        for one in row["comparisons"]
        if (bar := bar_of(row, one, bars)) is not None
    ]
    if (growth := routing_growth(rows)) is not None:
        met.append(growth <= bars["routing"])
    return {
        "benchmark": "experts",
        "bars": len(met),
        "met": sum(met),
        "left_out": sum("refused" in row for row in rows),
    }


def csv_rows(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The comparisons of layers and steps, flat."""
    return [
        {
            "device": result["device"],
            "commit": result["commit"],
            **{name: row.get(name) for name in ("part", "shape", "layers", "tokens", "adapters")},
            **{("of" if name == "part" else name): value for name, value in one.items()},
        }
        for row in result["rows"]
        for one in row.get("comparisons", ())
    ]


def _saving(comparison: Mapping[str, Any] | None) -> tuple[str, str, str]:
    if comparison is None:
        return "", "", ""
    low, high = _ms(comparison["saved_low"]), _ms(comparison["saved_high"])
    return _percent(comparison["gain"]), _ms(comparison["saved_seconds"]), f"{low} to {high}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:+.0%}"


def _met(met: bool) -> str:
    return "met" if met else "not met"


def _ms(seconds: float) -> str:
    """Milliseconds to three digits, never in powers of ten."""
    value = seconds * 1e3
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    return table
