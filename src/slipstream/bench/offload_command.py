"""From the command line's words to the offload benchmark, and its result to the terminal and to files.

Everything that can be wrong with the words or the files is told before anything is measured.
"""

from pathlib import Path
from typing import Any, cast, get_args

from rich.console import Console

from slipstream.bench import offload, offload_table
from slipstream.bench.offload_arms import Mode
from slipstream.bench.words import carry_out, numbers, words
from slipstream.errors import InputError


def options(
    *,
    shape: str | None = None,
    tokens: str | None = None,
    rounds: int | None = None,
    layers: int | None = None,
    part: str = "reload",
    host_limit: float | None = None,
    mode: str | None = None,
    cap: float = 80.0,
    arms: str | None = None,
) -> offload.OffloadBench:
    """The benchmark that these words ask for; lists are separated by commas. Raises ``InputError``."""
    if part not in get_args(offload.Part):
        raise InputError(f"--part {part!r} is none of {', '.join(get_args(offload.Part))}")
    if mode is not None and mode not in get_args(Mode):
        raise InputError(f"--mode {mode!r} is none of {', '.join(get_args(Mode))}")
    return offload.OffloadBench(
        shapes=words(shape),
        tokens=numbers(tokens, "8192,49152"),
        part=cast(offload.Part, part),
        rounds=rounds,
        layers=layers,
        host_limit=host_limit,
        mode=cast(Mode | None, mode),
        cap=cap,
        arms=words(arms) or offload.OffloadBench.arms,
    )


def run(
    asked: offload.OffloadBench, console: Console, *, out: Path | None = None, csv: Path | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Measure, print the tables, write the files; the result document and the summary for the last line."""
    return carry_out(
        lambda save: offload.run(asked, console.print, save),
        lambda result: offload_table.show(result, console),
        offload.csv_rows,
        offload_table.summary,
        out=out,
        csv=csv,
    )
