"""From the command line's words to the packing benchmark, and its result to the terminal and to files.

Everything that can be wrong with the words or the files is told before anything is measured.
"""

from pathlib import Path
from typing import Any, cast, get_args

from rich.console import Console

from slipstream.bench import packing, packing_table
from slipstream.bench.words import carry_out, numbers, words
from slipstream.errors import InputError

ACTIVATIONS = {"keep": False, "recompute": True}


def options(
    *,
    shape: str | None = None,
    tokens: str | None = None,
    attention: str | None = None,
    activations: str = "keep,recompute",
    rounds: int | None = None,
    layers: int | None = None,
    part: str = "all",
    nf4: bool = False,
) -> packing.PackingBench:
    """The benchmark that these words ask for; lists are separated by commas. Raises ``InputError``."""
    if part not in get_args(packing.Part):
        raise InputError(f"--part {part!r} is none of {', '.join(get_args(packing.Part))}")
    kinds = words(activations) or ()
    for kind in kinds:
        if kind not in ACTIVATIONS:
            raise InputError(f"--activations {kind!r} is none of {', '.join(ACTIVATIONS)}")
    if not kinds:
        raise InputError("--activations is empty; give keep, recompute or both")
    return packing.PackingBench(
        shapes=words(shape),
        tokens=numbers(tokens, "2048,16384"),
        attention=words(attention),
        recompute=tuple(ACTIVATIONS[kind] for kind in kinds),
        part=cast(packing.Part, part),
        rounds=rounds,
        layers=layers,
        nf4=nf4,
    )


def run(
    asked: packing.PackingBench, console: Console, *, out: Path | None = None, csv: Path | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Measure, print the tables, write the files; the result document and the summary for the last line."""
    return carry_out(
        lambda save: packing.run(asked, console.print, save),
        lambda result: packing_table.show(result, console),
        packing.csv_rows,
        packing_table.summary,
        out=out,
        csv=csv,
    )
