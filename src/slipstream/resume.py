"""Whose a run's folder is; may a run go on, from which checkpoint, and with which changes.

A resumed run must end where an uninterrupted one would have: what it learns from, who learns it and how may not change
on the way. What changes only speed, memory, records and places may, and it is said; so may what rounds otherwise, and
that is said too. The length is the one exception: a longer run is what people want most often after looking at a
finished one, so it is allowed, and its learning rates are told. The alternative, a schedule kept as it began, would
train on at a rate of nothing.

    1. same things   ``_refused``       every refused change in one message
    2. same places   ``_in_same_places``  paths as recorded, wherever the command is called from
    3. left to do    ``_left_to_do``    fewer steps than made: refused; as many and finished: complete
    4. checkpoint    ``last_checkpoint``
    5. same records  ``_with_records``  from an earlier one where ``steps.jsonl`` ends before it

A checkpoint is saved after its steps' lines are on the disk, so a killed process leaves no line out. A file that a disk
or a copy has cut does: its steps are made again, for their records, at the cost of their time.
"""

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from slipstream.cost.tiles import tile_tokens
from slipstream.data.rows import DataOptions
from slipstream.errors import InputError
from slipstream.prepare import planned_steps
from slipstream.recipe import Recipe
from slipstream.recipe_paths import PATHS, absolute, is_there, paths, with_absolute_paths, with_values
from slipstream.recipe_text import flat
from slipstream.train.checkpoint import checkpoint_step, checkpoint_until, last_checkpoint
from slipstream.train.fingerprints import differ, not_recorded, recorded_contents, refuse_other_things
from slipstream.train.ranks import Ranks
from slipstream.train.records import (
    EvalLog,
    EvalRecord,
    Records,
    RunFolder,
    StepLog,
    checked_run,
    missing_steps,
    read_records,
)
from slipstream.values import shown

EXACT = frozenset(
    {
        "data.eval",
        "data.stream",
        "memory.activations",
        "memory.buffers",
        "memory.host_limit",
        "train.eval_every",
        "train.save_every",
        "train.keep",
        "train.trackers",
    }
)
"""Keys that change no value that is learned; for ``memory.activations`` see ``_rounds``."""
ROUNDING = frozenset({"memory.tiles", "train.mode"})
"""Keys that compute the same in another order, so that results agree within rounding."""
LENGTH = frozenset({"train.steps", "train.epochs"})


@dataclass(frozen=True)
class Change:
    """A recipe's value that differs from when the run began."""

    key: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key}: {_whole(self.before)} → {_whole(self.now)}"


def _whole(value: Any) -> str:
    """A value as the user would write it; long ones are cut, but for paths, which differ in their ends."""
    return value if isinstance(value, str) and os.path.isabs(value) else shown(value)


@dataclass(frozen=True)
class Resumption:
    """How a run goes on."""

    recipe: Recipe
    """The recipe with paths that hold here."""
    checkpoint: Path | None
    """None: nothing is left to do."""
    changes: tuple[Change, ...]
    said: str
    """What there is to say of the changes, or of a run that is complete; empty where there is nothing."""


@dataclass(frozen=True)
class TakenUp:
    """What of a run's first part the training goes on with."""

    step: int
    """Steps made."""
    last_eval: EvalRecord | None
    """The last evaluation on these held-out rows."""
    evals_since: int | None
    """The step after which the held-out rows became others; None where they never did."""
    best: EvalRecord | None
    """The best evaluation on these held-out rows."""
    owed: bool
    """Whether the checkpoint's step is one to be evaluated and has no record: a signal came in it."""
    told: tuple[str, ...]
    """What there is to say of fingerprints that an older run lacks."""


@contextmanager
def claimed(recipe: Recipe, ranks: Ranks, *, resume: bool) -> Iterator[RunFolder]:
    """The run's folder, claimed by the first rank for all; ``InputError`` where they don't all see it."""
    folder = RunFolder(Path(recipe.output))
    with ExitStack() as held:
        with ranks.together():
            if ranks.first:
                held.enter_context(RunFolder.claimed(folder.path, resume=resume))
        ranks.agree_on(folder)
        yield folder


def resumption(folder: RunFolder, recipe: Recipe, console: Console, *, processes: int = 1) -> Resumption:
    """How the run goes on as ``recipe`` and ``processes`` say; ``InputError`` where it can't. Writes no record."""
    run = checked_run(folder, "recipe.model", "packing.train", "rows.train", "parameters.total")
    _refuse_other_processes(folder, _began_as(folder, run), processes)
    before = _recorded(run["recipe"])
    recipe = _in_same_places(recipe, before)
    _refuse_missing_base(recipe)
    changes = _changes(before, flat(with_absolute_paths(recipe).to_dict()))
    refused = [change for change in changes if not _is_free(change)]
    if refused:
        raise InputError(_refused(folder, refused))
    train = run["packing"]["train"]
    asked = planned_steps(recipe, train["rows"] if recipe.packing.enabled else train["documents"], processes)
    records = read_records(folder.path)
    if run.get("outcome") == "finished" and not _left_to_do(folder, recipe, asked, _last_step(records), finished=True):
        return Resumption(recipe, None, changes, _complete(folder, asked))
    folder.clean()
    newest = last_checkpoint(folder.checkpoints, console.print)
    _left_to_do(folder, recipe, asked, checkpoint_step(newest), finished=False)
    checkpoint = _with_records(folder, records, newest, console)
    made = checkpoint_step(checkpoint)
    if run.get("outcome") == "finished" and made == asked:
        return Resumption(recipe, None, changes, _complete(folder, asked))
    return Resumption(recipe, checkpoint, changes, "; ".join(_told(changes, before, recipe, made, asked)))


def take_up(
    folder: RunFolder,
    record: dict[str, Any],
    resumed: Resumption,
    checkpoint: Path,
    step_log: StepLog,
    eval_log: EvalLog,
) -> TakenUp:
    """Put what the run recorded until ``checkpoint`` into ``record``, its new ``run.json``, and drop what came later.

    ``InputError``, with everything left as it is, where rows or model are others than when the run began.
    """
    step, before = checkpoint_step(checkpoint), folder.read_run()
    refuse_other_things(folder, before, record)
    contents = [recorded_contents(run, "eval") for run in (before, record)]
    same_evals = before["rows"]["eval"] == record["rows"]["eval"] and not differ(*contents)
    record["started"] = before.get("started")
    record["eval_before"] = before.get("eval_before") if same_evals else None
    record["evals_since"] = before.get("evals_since") if same_evals else step
    values = {change.key: [change.before, change.now] for change in resumed.changes}
    record["changed"] = [*before.get("changed", []), *([{"step": step, "values": values}] if values else [])]
    step_log.resume(step)
    eval_log.resume(step)
    if not same_evals:
        _put_aside(folder.evals, step)
    evals = read_records(folder.path).evals
    comparable = [one for one in evals if one.step > (record["evals_since"] or 0) and not math.isnan(one.loss)]
    return TakenUp(
        step,
        evals[-1] if evals else None,
        record["evals_since"],
        min(comparable, key=lambda one: one.loss, default=None),
        _owed(resumed.recipe, evals, step, record["evals_since"]),
        tuple(not_recorded(before, record)),
    )


def _owed(recipe: Recipe, evals: list[EvalRecord], step: int, since: int | None) -> bool:
    """Held-out rows that were changed after ``since`` are evaluated from the next step on, as at a run's start."""
    every = recipe.train.eval_every
    wanted = recipe.data.eval is not None and every is not None and step % every == 0 and step > (since or 0)
    return wanted and all(one.step != step for one in evals)


def _put_aside(evals: Path, step: int) -> None:
    """Keeps evaluations on other rows under another name: their losses don't compare with those to come."""
    if evals.exists() and evals.stat().st_size:
        evals.replace(evals.with_name(f"evals-until-step-{step}.jsonl"))


# Which values may change


def _recorded(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """A recorded recipe's values by key: defaults for those that came later, paths absolute."""
    defaults = Recipe(model="", data=DataOptions(train=""), output="").to_dict()
    values = flat(defaults) | flat(recipe)
    return values | {key: absolute(values[key]) for key in PATHS if values[key] and is_there(values[key])}


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[Change, ...]:
    keys = sorted((before.keys() | now.keys()) - {"output"})  # the run's folder is the one that was found
    return tuple(Change(key, before.get(key), now.get(key)) for key in keys if before.get(key) != now.get(key))


def _is_free(change: Change) -> bool:
    return change.key in EXACT | ROUNDING | LENGTH or _was_moved(change)


def _was_moved(change: Change) -> bool:
    """Whether a path is another because what it named is no longer there and the new one is; data is compared later."""
    if change.key not in PATHS or change.before is None or change.now is None:
        return False
    return Path(change.before).is_absolute() and not is_there(change.before) and is_there(change.now)


def _refused(folder: RunFolder, refused: list[Change]) -> str:
    values = "1 value alters" if len(refused) == 1 else f"{len(refused)} values alter"
    lines = [f"{values} what is learned, as they were when the run in '{folder.path}' began and are now:"]
    lines += map(str, refused)
    return "\n  ".join(lines) + (
        "\na resumed run must learn the same things in the same way: set "
        f"{'it' if len(refused) == 1 else 'them'} back, or start another run with another output"
    )


def _told(
    changes: tuple[Change, ...], before: Mapping[str, Any], recipe: Recipe, made: int, asked: int
) -> Iterator[str]:
    """What there is to say of changes that are allowed."""
    if changes:
        yield f"changed since the run began: {', '.join(map(str, changes))}"
    rounding = [change.key for change in changes if _rounds(change, before, recipe)]
    if rounding:
        yield f"with {' and '.join(rounding)} results agree within rounding, not bit for bit{_draws(rounding, recipe)}"
    if any(change.key in LENGTH for change in changes):
        yield _rates(recipe, made, asked)


def _rounds(change: Change, before: Mapping[str, Any], recipe: Recipe) -> bool:
    """Whether a change rounds otherwise. What becomes of activations does where their layers are compiled anew for it,
    or where only recomputed layers have their MLPs in tiles; offloading changes no recompute.
    """
    if change.key != "memory.activations" or {change.before, change.now} <= {"recompute", "offload"}:
        return change.key in ROUNDING
    modes = {before["train.mode"], recipe.train.mode}
    compiled = bool(modes & {"compiled", "captured"}) or ("auto" in modes and torch.cuda.is_available())
    tokens = recipe.packing.tokens * recipe.packing.rows
    tiled = [tile_tokens(asked, tokens, recomputed=True) for asked in (before["memory.tiles"], recipe.memory.tiles)]
    return compiled or any(tiled)


def _draws(rounding: list[str], recipe: Recipe) -> str:
    return " (and adapter.dropout draws others)" if "train.mode" in rounding and recipe.adapter.dropout else ""


def _rates(recipe: Recipe, made: int, asked: int) -> str:
    train = recipe.train
    if train.schedule == "constant" and (train.warmup == 0 or train.warmup >= 1):
        return f"the result is that of a run of {asked:,} steps from the start, for the learning rate is constant"
    return (
        f"from step {made + 1:,} on the learning rate follows the {train.schedule} schedule of {asked:,} steps, so the "
        f"result is not that of a run of {asked:,} steps from the start"
    )


# Where things are


def _in_same_places(recipe: Recipe, before: Mapping[str, Any]) -> Recipe:
    """The recipe with recorded paths in place of relative ones that name nothing here: the ends of those recorded."""
    recorded = {
        key: before[key]
        for key, value in paths(recipe).items()
        if not is_there(value) and before[key] is not None and _ends(before[key], value)
    }
    return with_values(recipe, recorded)


def _refuse_missing_base(recipe: Recipe) -> None:
    if os.path.isabs(recipe.model) and not is_there(recipe.model):
        raise InputError(
            f"model: the run's base model {recipe.model} does not exist any more; put it back, or give its new place "
            "(--set model=...)"
        )


def _ends(recorded: str, relative: str) -> bool:
    """Whether a recorded path is absolute and ends with ``relative``, its leading ``..`` aside."""
    parts = [part for part in os.path.normpath(relative).split(os.sep) if part != os.pardir]
    return os.path.isabs(recorded) and recorded.split(os.sep)[-len(parts) :] == parts


# What is left to do


def _last_step(records: Records) -> int:
    return records.steps[-1].step if records.steps else 0


def _with_records(folder: RunFolder, records: Records, newest: Path, console: Console) -> Path:
    """The checkpoint to go on from so that each step has its record: ``newest``, or where ``steps.jsonl`` ends before
    it, one from before that end. What is wrong with the records is told, and what becomes of it.

    A line that is gone from between others stays gone: it is not worth all the steps after it.
    """
    made, last = checkpoint_step(newest), _last_step(records)
    earlier = checkpoint_until(folder.checkpoints, last) if last < made else None
    taken = newest if earlier is None else earlier
    told = [one for one in records.problems if one.startswith((folder.steps.name, folder.evals.name))]
    if last < made and not told:
        told = [f"{folder.steps.name} ends with step {last:,}, before {newest.name}"]
    if lost := missing_steps(records, checkpoint_step(taken)):
        told.append(f"{_counted(lost)} no record any more, though {newest.name} holds what was learned")
    if taken != newest or (told and not lost):
        going = "going on from" if taken == newest else "going back to"
        told.append(f"{going} {taken.name}: the steps after it are made and recorded again")
    if told:
        console.print("; ".join(told))
    return taken


def _counted(steps: list[int]) -> str:
    """``step 3 has``, ``2 steps from 3 to 7 have``."""
    if len(steps) == 1:
        return f"step {steps[0]:,} has"
    return f"{len(steps):,} steps from {steps[0]:,} to {steps[-1]:,} have"


def _left_to_do(folder: RunFolder, recipe: Recipe, asked: int, made: int, *, finished: bool) -> bool:
    """Whether steps are left; ``InputError`` where fewer are asked for than made."""
    if asked >= made:
        return asked > made
    train = recipe.train
    what = f"train.steps: {asked:,}" if train.steps else f"train.epochs: {train.epochs:g}, which is {asked:,} steps,"
    enough = f"more than {made:,} to train on" if finished else f"at least {made:,}"
    raise InputError(
        f"{what} < the {made:,} steps that the run in '{folder.path}' has made; ask for {enough}, or start another run "
        "with another output"
    )


def _complete(folder: RunFolder, steps: int) -> str:
    return (
        f"the run in '{folder.path}' is complete: its {steps:,} steps are made, nothing is left to do and nothing was "
        "changed; raise train.steps or train.epochs to train on"
    )


def _began_as(folder: RunFolder, run: Mapping[str, Any]) -> int:
    """The processes that a run began as, one where its record is from before they were kept."""
    count = run.get("processes", 1)
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise InputError(
            f"'{folder.path}': run.json has {count!r} for processes, a whole number of at least 1 is needed; restore "
            "run.json, or start another run with another output"
        )
    return count


def _refuse_other_processes(folder: RunFolder, before: int, now: int) -> None:
    """Each process has a share of the rows and a random state of its own: others would see rows twice, or never."""
    if before != now:
        raise InputError(
            f"the run in '{folder.path}' began as {before} processes and would go on as {now}, which "
            f"would give some rows twice and others never; start {before}, or start another run with another output"
        )
