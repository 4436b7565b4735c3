"""Trackers: off by default, every number at its own step, and the last ones before they close."""

from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback, TrainerState

from slipstream.train import trackers
from slipstream.train.options import TrainOptions
from slipstream.train.records import StepLog, read_records
from slipstream.train.trackers import tracker_callbacks
from training import trainer_of


class Seen(TrainerCallback):
    """What a tracker is told, as transformers' integrations hear it."""

    made: list["Seen"]

    def __init__(self) -> None:
        self.logs: list[tuple[int, dict[str, Any]]] = []
        self.closed_after = -1
        self.logging_dir: str | None = None
        self.made.append(self)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.logs.append((state.global_step, logs))

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.closed_after = len(self.logs)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Seen]:
    made: list[Seen] = []
    kind = type("Seen", (Seen,), {"made": made})
    monkeypatch.setattr(trackers, "get_reporting_integration_callbacks", lambda names: [kind for _ in names])
    return made


def test_none_by_default(seen: list[Seen], tmp_path: Path) -> None:
    assert tracker_callbacks(TrainOptions(), tmp_path) == []
    assert seen == []


def test_every_number_is_reported_at_its_own_step(seen: list[Seen], tmp_path: Path) -> None:
    log = StepLog(tmp_path / "steps.jsonl")
    trainer = trainer_of(tmp_path / "out", step_log=log, max_steps=5, logging_strategy="steps", logging_steps=1)
    for tracker in tracker_callbacks(TrainOptions(trackers=["wandb"]), tmp_path):
        trainer.add_callback(tracker)
    trainer.train()
    (tracker,) = seen
    told = [(step, logs["loss"]) for step, logs in tracker.logs if "loss" in logs]
    assert told == [(record.step, record.loss) for record in read_records(tmp_path).steps]
    assert [step for step, _ in told] == [1, 2, 3, 4, 5]
    assert all("at_step" not in logs for _, logs in tracker.logs)
    assert tracker.closed_after >= 5


def test_a_number_that_comes_late_keeps_its_step(seen: list[Seen], tmp_path: Path) -> None:
    (tracker,) = tracker_callbacks(TrainOptions(trackers=["wandb"]), tmp_path)
    state = TrainerState(global_step=9)
    tracker.on_log(None, state, None, logs={"loss": 1.0, "at_step": 4})
    tracker.on_log(None, state, None, logs={"eval_loss": 2.0})
    assert seen[0].logs == [(4, {"loss": 1.0}), (9, {"eval_loss": 2.0})]
    assert state.global_step == 9


def test_tensorboard_writes_to_the_run_folder(seen: list[Seen], tmp_path: Path) -> None:
    tracker_callbacks(TrainOptions(trackers=["tensorboard", "trackio"]), tmp_path)
    assert [tracker.logging_dir for tracker in seen] == [str(tmp_path / "tensorboard"), None]
