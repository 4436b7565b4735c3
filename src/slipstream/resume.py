"""Whose a run's folder is; may a run go on, and from which checkpoint.

A resumed run must end where an uninterrupted one would have: what it learns from, and who learns it, may not change on
the way. Lengths, intervals and places may.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from slipstream.errors import InputError
from slipstream.recipe import Recipe
from slipstream.train.checkpoint import last_checkpoint
from slipstream.train.ranks import Ranks
from slipstream.train.records import RunFolder

FREE_TO_CHANGE = {"output", "train.steps", "train.epochs", "train.eval_every", "train.save_every", "train.keep"}
"""Recipe keys that may differ when a run is resumed. A changed length changes the learning rates from there on."""


@contextmanager
def claimed(recipe: Recipe, ranks: Ranks, *, resume: bool) -> Iterator[RunFolder]:
    """The run's folder, claimed by the first rank for all."""
    folder = RunFolder(Path(recipe.output))
    with ExitStack() as held:
        with ranks.together():
            if ranks.first:
                held.enter_context(RunFolder.claimed(folder.path, resume=resume))
        yield folder


def checkpoint_to_resume(folder: RunFolder, recipe: Recipe, console: Console, *, processes: int = 1) -> Path:
    """The checkpoint to go on from; ``InputError`` where the run can't go on as ``recipe`` and ``processes`` say."""
    run = folder.read_run()
    _refuse_other_processes(folder, int(run.get("processes", 1)), processes)
    before, now = _flat(run["recipe"]), _flat(recipe.to_dict())
    changed = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    refused = [key for key in changed if key not in FREE_TO_CHANGE]
    if refused:
        key = refused[0]
        raise InputError(
            f"{key} was {before.get(key)!r} when the run in '{folder.path}' began and is {now.get(key)!r} now; "
            f"a resumed run must learn from the same things: set it back, or start another run with another output"
        )
    if run.get("outcome") == "finished" and not {"train.steps", "train.epochs"}.intersection(changed):
        raise InputError(
            f"the run in '{folder.path}' is finished; nothing is left to do: raise train.steps or train.epochs to "
            f"train on, or start another run with another output"
        )
    folder.clean()
    return last_checkpoint(folder.checkpoints, console.print)


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and key != "fields":
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _refuse_other_processes(folder: RunFolder, before: int, now: int) -> None:
    """Each process has a share of the rows and a random state of its own: others would see rows twice, or never."""
    if before != now:
        raise InputError(
            f"the run in '{folder.path}' began as {before} processes and would go on as {now}, which "
            f"would give some rows twice and others never; start {before}, or start another run with another output"
        )
