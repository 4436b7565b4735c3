"""The lines that end a training."""

from pathlib import Path

from slipstream.data.packing import PackingReport
from slipstream.summary import RunSummary, told

PACKING = PackingReport(1, 1, 1, 1, 1.0, 1.0, 0, 1)


def summary(steps: int, interrupted: bool = False) -> RunSummary:
    loss = 1.0 if steps else None
    return RunSummary(Path("run"), interrupted, steps, 61.0, 1234.5, PACKING, None, None, loss, loss, Path("report"))


def first_line(steps: int, first_step: int) -> str:
    return next(told(summary(steps), first_step))


def test_speed_is_told_of_steps_that_were_made() -> None:
    assert first_line(9, 0) == "9 steps in 1:01, 1,234 tokens/s after the first"
    assert first_line(1, 0) == "1 step in 1:01, 1,234 tokens/s"
    assert first_line(5, 4) == "1 step (from step 5) in 1:01, 1,234 tokens/s after the first"
    assert first_line(4, 4) == "no step was left to make"


def test_losses_and_interruptions_are_told_where_there_are_any() -> None:
    assert list(told(summary(0), 0)) == ["no step was left to make", "report: report"]
    *_, last = told(summary(3, interrupted=True), 0)
    assert last == "interrupted and saved after step 3; go on with the same command and --resume"
