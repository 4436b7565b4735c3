"""The clock of trainers' steps: what it counts as a step, and which ones recorded a graph."""

import time
from pathlib import Path

import pytest
import torch

from slipstream.bench.step_clock import StepClock
from training import packed_rows, trainer_of


def test_a_step_lasts_from_one_mark_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 7.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    clock = StepClock(torch.device("cpu"))
    for later in (1.0, 2.0, 5.0, 0.5):
        now += later
        clock.on_step_end()
    assert clock.first == 8.0
    assert clock.seconds() == [2.0, 5.0, 0.5]


def test_steps_that_recorded_are_named() -> None:
    counts = iter([1, 1, 2, 2, 4])
    clock = StepClock(torch.device("cpu"), lambda: next(counts))
    for _ in range(5):
        clock.on_step_end()
    assert clock.recorded() == [False, True, False, True]
    assert len(clock.seconds()) == 4


def test_in_a_trainer(tmp_path: Path) -> None:
    clock = StepClock(torch.device("cpu"))
    trainer = trainer_of(tmp_path / "out", callbacks=[clock], train_dataset=packed_rows())
    trainer.train()
    assert len(clock.seconds()) == trainer.state.global_step - 1 > 1
    assert min(clock.seconds()) > 0
    assert not any(clock.recorded())
