"""From the command line's words to the experts benchmark, and its result to the terminal and to files.

Everything that can be wrong with the words or the files is told before anything is measured.
"""

from pathlib import Path
from typing import Any, cast

from rich.console import Console

from slipstream.bench import experts, experts_table
from slipstream.bench.words import carry_out, words


def options(
    *,
    shape: str | None = None,
    tokens: int | None = None,
    adapters: str | None = None,
    rounds: int | None = None,
    layers: int | None = None,
    part: str = "all",
) -> experts.ExpertsBench:
    """The benchmark that these words ask for; lists are separated by commas. Raises ``InputError``."""
    return experts.ExpertsBench(
        shapes=words(shape),
        tokens=tokens,
        adapters=words(adapters) or experts.ADAPTERS,
        part=cast(experts.Part, part),
        rounds=rounds,
        layers=layers,
    )


def run(
    asked: experts.ExpertsBench, console: Console, *, out: Path | None = None, csv: Path | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Measure, print the tables, write the files; the result document and the summary for the last line."""
    return carry_out(
        lambda save: experts.run(asked, console.print, save),
        lambda result: experts_table.show(result, console),
        experts_table.csv_rows,
        experts_table.summary,
        out=out,
        csv=csv,
    )
