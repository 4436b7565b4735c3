"""What a run shows while it goes: a bar on a terminal, lines elsewhere, and never a wait for the device."""

import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from slipstream.train import progress
from slipstream.train.progress import ProgressBar, clock, evaluations_left, status
from slipstream.train.records import StepLog, StepRecord


def record(step: int, loss: float = 1.25, seconds: float = 0.5) -> StepRecord:
    return StepRecord(step, 0.1, loss, 1.0, 1e-4, 1000, 400, 12, 24, seconds)


def console(terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=120)


def run(screen: Console, log: StepLog, steps: int, first: int = 0, every: int | None = None) -> str:
    """``every``: steps between evaluations."""
    bar: Any = ProgressBar(screen, log)
    state = SimpleNamespace(global_step=first, max_steps=first + steps)
    args = SimpleNamespace(eval_strategy="no" if every is None else "steps", eval_steps=every)
    if every is not None:
        bar.on_evaluate(args, state, None, metrics={"eval_runtime": 50.0})  # before training
    bar.on_train_begin(args, state, None)
    for step in range(first + 1, first + steps + 1):
        state.global_step = step
        log.last = record(step)
        bar.on_step_end(args, state, None)
        if every is not None and step % every == 0:
            progress.time.sleep(30.0)
            bar.on_evaluate(args, state, None, metrics={"eval_runtime": 30.0})
    bar.on_train_end(args, state, None)
    return screen.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_words_for_a_record() -> None:
    assert status(record(1)) == "loss 1.2500  2,000 tokens/s"
    assert status(None) == ""
    assert status(record(1, seconds=0.0)) == ""


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (59.9, "0:59"), (61, "1:01"), (3600, "1:00:00"), (36_061, "10:01:01")]
)
def test_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text


@pytest.fixture
def _steps_of_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock is two seconds after the one before."""
    now = [1000.0]

    def later(seconds: float = 2.0) -> float:
        now[0] += seconds
        return now[0]

    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=later, sleep=later))


@pytest.mark.usefixtures("_steps_of_two_seconds")
def test_evaluations_to_come_are_time_left_and_those_past_make_no_step_longer() -> None:
    lines = run(console(False), StepLog(None), 20, every=8).splitlines()
    assert [line.split()[1] for line in lines] == ["1/20", "7/20", "9/20", "15/20", "17/20"]
    left = [line.split()[-2] for line in lines]
    assert left[:2] == [clock(19 * 2 + 3 * 50), clock(13 * 2 + 3 * 50)]  # after 8, 16 and the last
    assert left[2:] == [clock(11 * 2 + 2 * 30), clock(5 * 2 + 2 * 30), clock(3 * 2 + 1 * 30)]
    bar = run(console(True), StepLog(None), 8, every=8)
    assert f"{clock(7 * 2 + 50)} left" in bar or f"{clock(50)} left" in bar


@pytest.mark.parametrize(
    ("step", "steps", "every", "left"),
    [(1, 20, None, 0), (1, 20, 2**31, 1), (1, 20, 8, 3), (8, 20, 8, 3), (9, 20, 8, 2), (1, 16, 8, 2), (16, 16, 8, 1)],
)
def test_evaluations_left(step: int, steps: int, every: int | None, left: int) -> None:
    assert evaluations_left(step, steps, every) == left


@pytest.mark.usefixtures("_steps_of_two_seconds")
def test_off_a_terminal_the_first_step_is_a_line_and_then_one_now_and_then() -> None:
    lines = run(console(False), StepLog(None), 20, first=5).splitlines()
    assert lines[0] == "step 6/25  loss 1.2500  2,000 tokens/s  0:38 left"  # 2 s a step, 19 to go
    assert [line.split()[1] for line in lines] == ["6/25", "12/25", "18/25", "24/25"]


def test_on_a_terminal_a_bar_with_loss_and_speed() -> None:
    screen = run(console(True), StepLog(None), 4)
    assert "4/4" in screen
    assert "loss 1.2500" in screen
    assert "2,000 tokens/s" in screen


def test_before_the_first_record_arrives_the_bar_moves_without_numbers() -> None:
    bar: Any = ProgressBar(console(False), StepLog(None))
    state = SimpleNamespace(global_step=0, max_steps=3)
    args = SimpleNamespace(eval_strategy="no")
    bar.on_train_begin(args, state, None)
    state.global_step = 1
    bar.on_step_end(args, state, None)
    assert "step 1/3" in bar.console.file.getvalue()
