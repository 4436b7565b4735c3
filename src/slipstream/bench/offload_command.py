"""From the command line's words to the offload benchmark, and its result to the terminal and to files.

Everything that can be wrong with the words or the files is told before anything is measured.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any, cast, get_args

from rich.console import Console

from slipstream.bench import offload, offload_table
from slipstream.bench.document import append_csv, check_writable
from slipstream.bench.offload_arms import Mode
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
) -> offload.OffloadBench:
    """The benchmark that these words ask for; lists are separated by commas. Raises ``InputError``."""
    if part not in get_args(offload.Part):
        raise InputError(f"--part {part!r} is none of {', '.join(get_args(offload.Part))}")
    if mode is not None and mode not in get_args(Mode):
        raise InputError(f"--mode {mode!r} is none of {', '.join(get_args(Mode))}")
    return offload.OffloadBench(
        shapes=_words(shape),
        tokens=_numbers(tokens),
        part=cast(offload.Part, part),
        rounds=rounds,
        layers=layers,
        host_limit=host_limit,
        mode=cast(Mode | None, mode),
        cap=cap,
    )


def run(
    asked: offload.OffloadBench, console: Console, *, out: Path | None = None, csv: Path | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Measure, print the tables, write the files; the result document and the summary for the last line."""
    for path in (out, csv):
        if path is not None:
            check_writable(path)
    result = offload.run(asked, console.print, partial(_write, out))
    offload_table.show(result, console)
    if csv is not None:
        append_csv(csv, offload.csv_rows(result))
    return result, offload_table.summary(result)


def _write(path: Path | None, result: dict[str, Any]) -> None:
    """Written after each case, so that a run cut short has not measured for nothing."""
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _words(text: str | None) -> tuple[str, ...] | None:
    """The words between commas; None where there are none."""
    words = tuple(word.strip() for word in (text or "").split(",") if word.strip())
    return words or None


def _numbers(text: str | None) -> tuple[int, ...] | None:
    words = _words(text)
    try:
        return None if words is None else tuple(int(word) for word in words)
    except ValueError as error:
        raise InputError(f"--tokens {text!r} must be whole numbers separated by commas, e.g. 8192,49152") from error
