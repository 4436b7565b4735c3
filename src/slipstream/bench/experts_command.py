"""From the command line's words to the experts benchmark, and its result to the terminal and to files.

Everything that can be wrong with the words or the files is told before anything is measured.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any, cast

from rich.console import Console

from slipstream.bench import experts, experts_table
from slipstream.bench.document import append_csv, check_writable


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
        shapes=_words(shape),
        tokens=tokens,
        adapters=_words(adapters) or experts.ADAPTERS,
        part=cast(experts.Part, part),
        rounds=rounds,
        layers=layers,
    )


def run(
    asked: experts.ExpertsBench, console: Console, *, out: Path | None = None, csv: Path | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Measure, print the tables, write the files; the result document and the summary for the last line."""
    for path in (out, csv):
        if path is not None:
            check_writable(path)
    result = experts.run(asked, console.print, partial(_write, out))
    experts_table.show(result, console)
    if csv is not None:
        append_csv(csv, experts_table.csv_rows(result))
    return result, experts_table.summary(result)


def _write(path: Path | None, result: dict[str, Any]) -> None:
    """Written after each case, so that a run cut short has not measured for nothing."""
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _words(text: str | None) -> tuple[str, ...] | None:
    """The words between commas; None where there are none."""
    words = tuple(word.strip() for word in (text or "").split(",") if word.strip())
    return words or None
