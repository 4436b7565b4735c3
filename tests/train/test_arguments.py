"""The recipe's training options in transformers' words."""

from pathlib import Path

import pytest

from slipstream import InputError
from slipstream.train import options as train_options
from slipstream.train.arguments import training_arguments
from slipstream.train.options import TRACKERS, TrainOptions, check_schedule, check_trackers


def test_a_tracker_that_is_not_installed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        train_options, "find_spec", lambda package: None if package in sum(TRACKERS.values(), ()) else 1
    )
    check_trackers(TrainOptions())
    for tracker in TRACKERS:
        with pytest.raises(InputError, match=rf"train.trackers: {tracker} is not installed; pip install {tracker}"):
            check_trackers(TrainOptions(trackers=[tracker]))


def test_a_tracker_that_is_installed_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(train_options, "find_spec", lambda package: package == "tensorboardX" or None)
    options = TrainOptions(trackers=["tensorboard"])
    check_trackers(options)
    args = training_arguments(options, tmp_path, rows=1, has_eval=False, cpu=True)
    assert args.logging_steps == 1
    assert args.logging_strategy == "steps"
    assert training_arguments(TrainOptions(), tmp_path, rows=1, has_eval=False, cpu=True).logging_strategy == "no"


@pytest.mark.parametrize(
    ("schedule", "kind"), [("cosine", "cosine"), ("linear", "linear"), ("constant", "constant_with_warmup")]
)
def test_schedules(tmp_path: Path, schedule: str, kind: str) -> None:
    options = TrainOptions(schedule=schedule, warmup=0.1, steps=50)  # type: ignore[arg-type]
    args = training_arguments(options, tmp_path, rows=2, has_eval=True, cpu=True)
    assert args.lr_scheduler_type == kind
    assert args.get_warmup_steps(50) == 5
    assert args.per_device_train_batch_size == 2
    assert args.save_total_limit == options.keep + 1  # the best one besides


def test_a_warm_up_that_takes_the_whole_run_is_told() -> None:
    options = TrainOptions(warmup=20, epochs=2)
    check_schedule(options, 21)
    for steps in (20, 3):
        with pytest.raises(InputError, match=rf"train\.warmup: 20 steps >= the run's {steps}, .* raise train\.epochs"):
            check_schedule(options, steps)
    check_schedule(TrainOptions(warmup=0.5), 1)  # a share is never all of it
    with pytest.raises(InputError, match=r"raise train\.steps"):
        check_schedule(TrainOptions(warmup=1, steps=1), 1)
