"""What a result lacks: cases and arms that were asked for and did not run, and cases that a later run measured again.

Benchmarks write what they were asked for (``asked``, a case for each of their rows, in order). Older files are gone by
their command: a comparison of trainers names its arms there, a packing benchmark its choices.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

Results = Mapping[str, Mapping[str, Any]]
CHOICES = ("varlen", "flex", "xformers", "sdpa")
SAME = ("part", "shape", "model", "layers", "tokens", "attention", "recompute", "activations", "adapters")
"""Facts of a row that tell its case from others; with its arm, where a row is one arm's."""
WAYS = ("mode", "dtype", "row", "choices", "steps")
"""And how it was run."""
STOPPED = "the benchmark ended before"
Lack = tuple[str, str]
"""What is not there, and why."""


def option(command: str, name: str, default: str) -> str:
    """An option's value in a command."""
    words = shlex.split(command)
    return words[words.index(name) + 1] if name in words[:-1] else default


def missing(result: Mapping[str, Any]) -> list[Lack]:
    """Cases and arms that were asked for and are not there, each with the reason."""
    command, rows = str(result.get("command", "")), result.get("rows", [])
    if "asked" in result:
        return [(name, STOPPED) for name in result["asked"][len(rows) :]]
    if result.get("benchmark") == "train_step":
        return list(_missing_arms(command, result.get("runs", [])))
    return list(_missing_choices(command, rows)) if result.get("benchmark") == "packing" else []


def _missing_arms(command: str, runs: Sequence[Mapping[str, Any]]) -> Iterator[Lack]:
    """Arms of a comparison of trainers; one that ran in fewer rounds than the others is told as well."""
    rounds = int(option(command, "--rounds", "3"))
    for arm in option(command, "--arms", "slipstream,trl+liger").split(","):
        of_arm = [run for run in runs if run["arm"] == arm]
        failed = [str(run["error"]).strip().splitlines() or ["no message"] for run in of_arm if "error" in run]
        done = len(of_arm) - len(failed)
        reason = f"failed: {failed[0][-1][:200]}" if failed else STOPPED
        if not done:
            yield arm, reason
        elif done < rounds:
            yield f"{rounds - done} of {rounds} rounds of {arm}", reason


def _missing_choices(command: str, rows: Sequence[Mapping[str, Any]]) -> Iterator[Lack]:
    """Cases of a packing benchmark."""
    shapes = option(command, "--shape", "").split(",")
    tokens = option(command, "--tokens", "").split(",")
    attention = option(command, "--attention", ",".join(CHOICES)).split(",")
    kinds = [kind == "recompute" for kind in option(command, "--activations", "keep,recompute").split(",")]
    if not (shapes[0] and tokens[0]):
        return
    there = {(row["shape"], str(row["tokens"]), row["attention"], row["recompute"]) for row in rows}
    for case in product(shapes, tokens, attention, kinds):
        if case not in there:
            yield f"{case[0]}, {case[1]} tokens, {case[2]}, {'recomputed' if case[3] else 'kept'}", STOPPED


def again(results: Results, name: str, row: Mapping[str, Any]) -> str | None:
    """The newest later result that measured the case of ``row`` of ``name`` again; None where this is the newest."""
    mine = results[name]
    later = [
        (str(other.get("date", "")), other_name)
        for other_name, other in results.items()
        if other_name != name and other.get("benchmark") == mine.get("benchmark")
        if str(other.get("date", "")) > str(mine.get("date", ""))
        if any(_covers(one, row) and "refused" not in one for one in other.get("rows", []))
    ]
    return max(later)[1] if later else None


def _covers(one: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    """Whether ``one`` has the case of ``row`` and all its arms, where several stand in a row."""
    return _case(one) == _case(row) and set(row.get("arms", ())) <= set(one.get("arms", ()))


def _case(row: Mapping[str, Any]) -> tuple[Any, ...]:
    arm = row.get("arm") if isinstance(row.get("arm"), str) else None
    count = row.get("experts") if isinstance(row.get("experts"), int) else None
    return (*(row.get(key) for key in SAME + WAYS), arm, count)


def arms_again(results: Results, name: str) -> dict[str, str]:
    """Arms of a comparison of trainers that a later file has, too, with that file's name."""
    mine = results[name]
    found = {}
    for other_name, other in results.items():
        later = str(other.get("when", "")) > str(mine.get("when", ""))
        if other.get("benchmark") == "train_step" and later and _job(other) == _job(mine):
            found.update({arm: other_name for arm in other["summary"] if arm in mine["summary"]})
    return {arm: file for arm, file in found.items() if isinstance(mine["summary"][arm], dict)}


def _job(result: Mapping[str, Any]) -> tuple[Any, ...]:
    """What was trained, whichever arms trained it."""
    command = str(result.get("command", ""))
    flags = tuple(flag in command.split() for flag in ("--checkpointing", "--nf4"))
    pairs = (("--model", "qwen3-0.6b"), ("--tokens", "4096"), ("--layers", ""), ("--data", ""))
    return (*(option(command, flag, default) for flag, default in pairs), *flags)
