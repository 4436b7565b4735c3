"""How a run went: its summary, and the lines that tell it."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slipstream.data.packing import PackingReport
from slipstream.train.progress import clock
from slipstream.train.records import Records, RunFolder, StepRecord, read_records

MOST_AVERAGED = 10
"""Steps at either end of a run whose losses are averaged."""


@dataclass(frozen=True)
class RunSummary:
    """How a run went."""

    run_folder: Path
    interrupted: bool
    steps: int
    seconds: float
    """Wall-clock time of the training loop, evaluations included; 0 where no step was left to make."""
    tokens_per_second: float
    """Document tokens, padding not counted, over all recorded steps but the first."""
    packing: PackingReport
    eval_before: float | None
    """Loss for each learned token on the held-out rows, in nats, before the first step."""
    eval_after: float | None
    loss_first: float | None
    """Training loss for each learned token, in nats, over the first ``loss_steps`` recorded steps, and the last."""
    loss_last: float | None
    loss_steps: int
    """A quarter of the steps, ten at most, one at least: single steps differ by their rows more than by learning."""
    report: Path

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "run_folder": str(self.run_folder), "report": str(self.report)}


def summary_of(folder: RunFolder, records: Records, *, steps: int, seconds: float) -> RunSummary:
    """What a run's records say of it after ``steps`` in all, ``seconds`` of training in this process."""
    run, lines = records.run, records.steps
    ends = max(1, min(MOST_AVERAGED, len(lines) // 4))
    packing = {key: value for key, value in run["packing"]["train"].items() if key != "length_histogram"}
    return RunSummary(
        run_folder=folder.path,
        interrupted=run["outcome"] == "interrupted",
        steps=steps,
        seconds=seconds,
        tokens_per_second=_speed(lines),
        packing=PackingReport(**packing),
        eval_before=run.get("eval_before"),
        eval_after=run.get("eval_after"),
        loss_first=_loss(lines[:ends]),
        loss_last=_loss(lines[-ends:]),
        loss_steps=ends,
        report=folder.report,
    )


def complete_run(folder: RunFolder) -> RunSummary:
    """The summary of a run of which nothing is left to do."""
    records = read_records(folder.path)
    return summary_of(folder, records, steps=records.steps[-1].step if records.steps else 0, seconds=0.0)


def told(summary: RunSummary, first_step: int) -> Iterator[str]:
    """The lines that end a training, which began after ``first_step``."""
    done = summary.steps - first_step
    steps = "1 step" if done == 1 else f"{done:,} steps"
    since = f" (from step {first_step + 1:,})" if first_step else ""
    after = " after the first" if summary.steps > 1 else ""
    speed = f"{summary.tokens_per_second:,.0f} tokens/s{after}"
    yield f"{steps}{since} in {clock(summary.seconds)}, {speed}" if done else "no step was left to make"
    if summary.loss_last is not None:
        yield _losses(summary)
    yield f"report: {summary.report}"
    if summary.interrupted:
        yield f"interrupted and saved after step {summary.steps:,}; go on with the same command and --resume"


def _losses(summary: RunSummary) -> str:
    first, last, steps = f"{summary.loss_first:.4f}", f"{summary.loss_last:.4f}", summary.loss_steps
    if steps > 1:
        return f"training loss {first} over the first {steps} steps, {last} over the last {steps}"
    if summary.steps == 1:
        return f"training loss {first} in the one step"
    return (
        f"training loss {first} at the first step, {last} at the last: single steps, of rows that differ, which tell "
        "little of what was learned"
    )


def _loss(steps: list[StepRecord]) -> float | None:
    """The mean over all learned tokens of the steps."""
    learned = sum(step.learned_tokens for step in steps)
    return sum(step.loss * step.learned_tokens for step in steps) / learned if learned else None


def _speed(steps: list[StepRecord]) -> float:
    steady = steps[1:] or steps
    return sum(step.tokens for step in steady) / max(sum(step.seconds for step in steady), 1e-9)
