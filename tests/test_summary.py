"""The lines that end a training."""

from dataclasses import asdict
from pathlib import Path

from slipstream.data.packing import PackingReport
from slipstream.summary import RunSummary, summary_of, told
from slipstream.train.records import Records, RunFolder, StepRecord

PACKING = PackingReport(1, 1, 1, 1, 1.0, 1.0, 0, 1)


def summary(steps: int, interrupted: bool = False) -> RunSummary:
    loss = 1.0 if steps else None
    return RunSummary(Path("run"), interrupted, steps, 61.0, 1234.5, PACKING, None, None, loss, loss, 1, Path("report"))


def of_losses(*losses: float) -> RunSummary:
    """Of a run whose step ``n`` learned ``n`` tokens."""
    lines = [StepRecord(n, 1.0, loss, 1.0, 1e-3, 9, n, 1, 0, 1.0) for n, loss in enumerate(losses, start=1)]
    run = {"outcome": "finished", "packing": {"train": asdict(PACKING)}}
    return summary_of(RunFolder(Path("run")), Records(run, lines), steps=len(losses), seconds=1.0)


def test_losses_at_both_ends_are_means_over_learned_tokens() -> None:
    several = of_losses(3.0, 6.0, 9.0, 9.0, 9.0, 9.0, 1.0, 2.0)
    assert (several.loss_first, several.loss_last, several.loss_steps) == (5.0, (7 + 16) / 15, 2)
    assert list(told(several, 0))[1] == "training loss 5.0000 over the first 2 steps, 1.5333 over the last 2"
    assert of_losses(*[1.0] * 1000).loss_steps == 10


def test_single_steps_are_not_shown_as_progress() -> None:
    assert "1.0000 at the first step, 2.0000 at the last: single steps" in list(told(of_losses(1.0, 5.0, 2.0), 0))[1]
    assert list(told(of_losses(1.0), 0))[1] == "training loss 1.0000 in the one step"


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
