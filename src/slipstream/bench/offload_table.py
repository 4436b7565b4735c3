"""The offload benchmark's result for people: for each case the two quantities, the arms, prediction and measurement.

Narrow tables, so that they fit a terminal of 80 columns: arms that offload go by their buffers, and shares of the link
and of hidden copy time stand as out/back.
"""

from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from slipstream.bench.harness import WHOLE
from slipstream.bench.offload_arms import BACKWARD, RECOMPUTE, SINGLE
from slipstream.bench.statistics import verdict_word
from slipstream.bench.words import print_whole

MILLI, GIGA = 1e3, 1e9


def show(result: Mapping[str, Any], console: Console) -> None:
    """Print the result document of ``bench offload``."""
    console.print(
        f"offload on {result['device']}, commit {result['commit'][:12]}, {result['rounds']} rounds; times in ms"
    )
    for row in result["rows"]:
        if row.get("part") == "longest":
            console.print(_longest_line(row))
            continue
        console.print(
            f"\n{row['shape']} ({row['layers']} layers), {row['tokens']:,} tokens in {row['documents']} documents"
        )
        if "refused" in row:
            console.print(f"  left out: {row['refused']}")
        else:
            _show_case(row, console)
    print_whole(console, _published_table(result["published"]))


def _show_case(row: Mapping[str, Any], console: Console) -> None:
    link, predicted = row["link_bytes_per_second"], row["predicted"]
    console.print(
        f"  one input {row['input_bytes'] / GIGA:.2f} GB; reload c {_ms(row['c'])} ({link['back'] / GIGA:.1f} GB/s, "
        f"out {link['out'] / GIGA:.1f}), one layer's backward g {_ms(row['g'])}"
    )
    if predicted is not None:
        console.print(
            f"  predicted backward: one buffer {_ms(predicted['T_single'])}, two {_ms(predicted['T_double'])}, "
            f"saved {_ms(predicted['saved'])}"
        )
    print_whole(console, _arms_table(row["arms"]))
    if "not_measured" in row:
        console.print(f"  {row['not_measured']}")
    else:
        print_whole(console, _comparisons_table(row["comparisons"]))
    for note in row["notes"]:
        console.print(f"  {note}")


def summary(result: Mapping[str, Any]) -> dict[str, Any]:
    """The last line, for machines: predictions, how many held, the slowest arm with look-ahead beside recompute."""
    rows = [row for row in result["rows"] if "comparisons" in row and "not_measured" not in row]
    every = [comparison for row in rows for comparison in row["comparisons"]]
    verdicts = [word for word in map(verdict_word, every) if word]
    ratios = [one["ratio"] for one in every if one["against"] == RECOMPUTE and one["arm"] != SINGLE]
    return {
        "benchmark": "offload",
        "predictions": len(verdicts),
        "held": verdicts.count("holds"),
        "noise": verdicts.count("noise"),
        "largest_ratio_to_recompute": max(ratios, default=None),
        "left_out": sum("refused" in row or "not_measured" in row for row in result["rows"]),
    }


def _arms_table(arms: Mapping[str, Any]) -> Table:
    table = _table("", "arm", "buffers", "step", "backward", "peak GB", "moved GB", "link", "hidden")
    for name, arm in arms.items():
        copies = arm.get("copies")
        peak = arm["peak_bytes"]
        table.add_row(
            _short(name),
            "" if copies is None else str(copies["buffers"]),
            _ms(_middle(arm["seconds"][WHOLE])),
            _ms(_middle(arm["seconds"][BACKWARD])),
            "" if peak is None else f"{peak / GIGA:.2f}",
            "" if copies is None else f"{(copies['out_bytes'] + copies['back_bytes']) / GIGA:.2f}",
            "" if copies is None else "/".join(f"{copies['link_share'][name]:.0%}" for name in ("out", "back")),
            "" if copies is None else _hidden(copies["traced"]),
        )
    return table


def _short(arm: str) -> str:
    return arm.removeprefix("offload-")


def _hidden(traced: Mapping[str, Any] | None) -> str:
    if traced is None:
        return ""
    shares = [traced[name]["hidden_share"] for name in ("out", "back")]
    return "/".join("?" if share is None else f"{share:.0%}" for share in shares)


def _comparisons_table(comparisons: list[dict[str, Any]]) -> Table:
    table = _table("", "arm", "against", "part", "ratio", "saved", "95% interval", "predicted", "verdict")
    for one in comparisons:
        predicted = one["predicted_seconds"]
        table.add_row(
            _short(one["arm"]),
            _short(one["against"]),
            one["part"],
            f"{one['ratio']:.3f}",
            _ms(one["saved_seconds"]),
            f"{_ms(one['saved_low'])} to {_ms(one['saved_high'])}",
            "" if predicted is None else _ms(predicted),
            verdict_word(one),
        )
    return table


def _longest_line(row: Mapping[str, Any]) -> str:
    what = f"{row['shape']} ({row['layers']} layers), {row['arm']}, {row['row']}, {row['tokens']:,} tokens"
    cap = f"cap {row['cap_bytes'] / GIGA:.0f} GB"
    if not row["fits"]:
        return f"{what}: does not fit ({cap}): {row['reason']}"
    if "not_measured" in row:
        return f"{what}: {row['not_measured']}"
    peak = "" if row["peak_bytes"] is None else f", peak {row['peak_bytes'] / GIGA:.1f} GB"
    return f"{what}: {row['seconds'][WHOLE]:.1f} s{peak} ({cap})"


def _published_table(published: Mapping[str, Any]) -> Table:
    table = _table(f"Published: {published['source']}", "model", "", "steps/s", "gain", "extra GB", "saved")
    for one in published["models"]:
        before, after = one["steps_per_second"]
        saved, extra = _ms(one["saved_seconds"]), f"{one['extra_bytes'] / GIGA:.2f}"
        table.add_row(one["model"], "", f"{before:.4f} to {after:.4f}", f"{one['gain']:+.2%}", extra, saved)
    return table


def _middle(values: list[float]) -> float:
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def _ms(seconds: float) -> str:
    """Milliseconds to three digits, never in powers of ten."""
    value = seconds * MILLI
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < 2 else "right", no_wrap=True)
    return table
