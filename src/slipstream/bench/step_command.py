"""From the command line's words to the benchmark of whole steps, and its result to the terminal and to files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast, get_args

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from slipstream.bench import step
from slipstream.bench.words import carry_out, words
from slipstream.errors import InputError
from slipstream.memory.policy import ActivationsChoice
from slipstream.step.choice import Mode


def options(
    *,
    shape: str | None = None,
    tokens: int | None = None,
    activations: str = "keep",
    mode: str | None = None,
    rounds: int | None = None,
    layers: int | None = None,
) -> step.StepBench:
    """The benchmark that these words ask for; lists are separated by commas. Raises ``InputError``."""
    if activations not in get_args(ActivationsChoice):
        raise InputError(f"--activations {activations!r} is none of {', '.join(get_args(ActivationsChoice))}")
    return step.StepBench(
        shapes=words(shape),
        tokens=tokens,
        activations=cast(ActivationsChoice, activations),
        modes=cast(tuple[Mode, ...], words(mode) or step.MODES),
        rounds=rounds,
        layers=layers,
    )


def run(
    asked: step.StepBench, console: Console, *, out: Path | None = None, csv: Path | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Measure, print the tables, write the files; the result document and the summary for the last line."""
    return carry_out(
        lambda save: step.run(asked, console.print, save),
        lambda result: _show(result, console),
        csv_rows,
        _summary,
        out=out,
        csv=csv,
    )


def csv_rows(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One flat row for each shape and mode that ran."""
    head = {name: result[name] for name in ("date", "commit", "device")}
    names = ("shape", "layers", "tokens", "activations", "floor_seconds")
    times = ("seconds", "tokens_per_second", "share_of_floor", "first_step_seconds")
    return [
        {**head, **{name: row[name] for name in names}, "mode": mode, **{name: found[name] for name in times}}
        for row in result["rows"]
        for mode, found in row["modes"].items()
        if "seconds" in found
    ]


def _summary(result: Mapping[str, Any]) -> dict[str, Any]:
    modes = [found for row in result["rows"] for found in row["modes"].values()]
    return {
        "benchmark": "step",
        "measured": sum("seconds" in found for found in modes),
        "left_out": sum("refused" in found for found in modes),
    }


def _show(result: Mapping[str, Any], console: Console) -> None:
    for row in result["rows"]:
        _show_row(row, console)


def _show_row(row: Mapping[str, Any], console: Console) -> None:
    console.print(
        f"\n{row['shape']} ({row['layers']} layers), {row['tokens']:,} tokens in {row['documents']} documents, "
        f"{row['activations']}; matmul floor {row['floor_seconds'] * 1e3:.1f} ms"
    )
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, column in enumerate(
        ("mode", "step, ms", "tokens/s", "of floor", "first step, s", "peak, GB", "launches")
    ):
        table.add_column(column, justify="left" if index == 0 else "right")
    for mode, found in row["modes"].items():
        if "refused" in found:
            console.print(f"  {mode} left out: {found['refused']}")
            continue
        peak = f"{found['peak_bytes'] / 1e9:.2f}" if "peak_bytes" in found else ""
        table.add_row(
            mode if found["ran"] == mode else f"{mode} (ran {found['ran']})",
            f"{found['seconds'] * 1e3:.1f}",
            f"{found['tokens_per_second']:,.0f}",
            f"{found['share_of_floor']:.0%}",
            f"{found['first_step_seconds']:.1f}",
            peak,
            f"{found['shares']['host_launches']:,}" if "shares" in found else "",
        )
    console.print(table)
    for mode, found in row["modes"].items():
        if shares := found.get("shares"):
            total = sum(shares["seconds"].values())
            parts = ", ".join(
                f"{name} {value * 1e3:.1f} ms ({value / total:.0%})" for name, value in shares["seconds"].items()
            )
            console.print(f"  kernels, {mode}: {parts}")
