"""The packing benchmark's result for people: for each case what a build costs, what was predicted and what was saved.

One narrow table a case, so that it fits a terminal of 80 columns; forward and backward stand under each other, since
the claim is that they save about the same time. The published figures come last.
"""

from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from slipstream.bench.harness import WHOLE
from slipstream.bench.packing_arms import BACKWARD, FORWARD
from slipstream.bench.statistics import verdict_word
from slipstream.bench.words import print_whole

MILLI = 1e3


def show(result: Mapping[str, Any], console: Console) -> None:
    """Print the result document of ``bench packing``."""
    console.print(
        f"packing on {result['device']}, commit {result['commit'][:12]}, {result['rounds']} rounds; times in ms"
    )
    for row in result["rows"]:
        console.print(f"\n{_case(row)}")
        if "refused" in row:
            console.print(f"  left out: {row['refused']}")
        if "layer" in row:
            console.print(f"  builds alone: {_builds_line(row['builds'])}")
            console.print(f"  one layer: {', '.join(f'{name} {_ms(value)}' for name, value in row['layer'].items())}")
            adds = ", ".join(f"{kind} {_ms(seconds)}" for kind, seconds in row["rebuild_adds"].items())
            console.print(f"  a rebuild adds to a layer, with the waits it forces: {adds}")
        if "comparisons" in row:
            console.print(f"  built in a step, boundaries + structures: {_counts_line(row['arms'])}")
            print_whole(console, _case_table(row))
    print_whole(console, _published_table(result["published"]))


def summary(result: Mapping[str, Any]) -> dict[str, Any]:
    """The last line, for machines: how many predictions there were, how many held or can't be told from no saving at
    all, and what was left out."""
    told = [verdict_word(one) for row in result["rows"] for one in row.get("comparisons", ())]
    verdicts = [word for word in told if word]
    counts = {"predictions": len(verdicts), "held": verdicts.count("holds"), "noise": verdicts.count("noise")}
    return {"benchmark": "packing", **counts, "left_out": sum("refused" in row for row in result["rows"])}


def _builds_line(builds: Mapping[str, float]) -> str:
    rebuilt = (
        f"m {name.removeprefix('rebuild-')} {_ms(value)}" for name, value in builds.items() if name != "metadata"
    )
    return ", ".join([f"boundaries s {_ms(builds['metadata'])}", *rebuilt])


def _counts_line(arms: Mapping[str, Any]) -> str:
    """A question mark where transformers does not tell."""
    counts = {name: arm["builds"] for name, arm in arms.items()}
    shown = {name: f"{each['metadata']}+{each['structures']}" if each else "?" for name, each in counts.items()}
    return ", ".join(f"{name} {value}" for name, value in shown.items())


def _case_table(row: Mapping[str, Any]) -> Table:
    """Every other arm against ours, part by part."""
    table = _table("", "against", "part", "gain", "saved", "95% interval", "predicted", "ratio", "verdict")
    for one in row["comparisons"]:
        table.add_row(
            one["against"].removeprefix("wasteful-"),
            one["part"],
            f"{one['gain']:+.1%}",
            _ms(one["saved_seconds"]),
            f"{_ms(one['saved_low'])} to {_ms(one['saved_high'])}",
            "" if one["predicted_seconds"] is None else _ms(one["predicted_seconds"]),
            "" if one["ratio"] is None else f"{one['ratio']:.2f}",
            verdict_word(one),
        )
    return table


def _published_table(published: Mapping[str, Any]) -> Table:
    """The figures that ours stand beside."""
    title = (
        f"Published: {published['source']}.\nA metadata call {_ms(published['metadata_seconds'])}, "
        f"a mask build {_ms(published['mask_seconds'])}"
    )
    table = _table(title, "model", "layers", "predicted", "saved", "of step", "forward", "backward", "step")
    for one in published["models"]:
        gain = one.get("gain", {})
        table.add_row(
            one["model"],
            str(one.get("layers", "")),
            *(_ms(one[name]) if name in one else "" for name in ("predicted_seconds", "saved_seconds")),
            f"{one['share_of_step']:.1%}" if "share_of_step" in one else "",
            *(f"{gain[part]:+.1%}" if gain else "" for part in (FORWARD, BACKWARD, WHOLE)),
        )
    return table


def _case(row: Mapping[str, Any]) -> str:
    activations = "recompute" if row["recompute"] else "keep"
    row_of = f"{row['tokens']:,} tokens in {row['documents']:,} documents"
    return f"{row['shape']} ({row['layers']} layers), {row_of}, {row['attention']}, {activations}"


def _ms(seconds: float) -> str:
    """Milliseconds to three digits, never in powers of ten."""
    value = seconds * MILLI
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < 2 else "right", no_wrap=True)
    return table
