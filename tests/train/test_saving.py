"""Checkpoints of ``slipstream.Trainer`` in a user's own script, and going on from them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from packed import model_of
from slipstream import Trainer, apply
from slipstream.train.checkpoint import MANIFEST, checkpoint_step, damage, is_whole, last_checkpoint
from slipstream.train.records import StepLog
from training import packed_rows, trainer_of, weights


def saving(folder: Path, **changes: Any) -> Trainer:
    settings: dict[str, Any] = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, **changes}
    torch.manual_seed(0)
    return trainer_of(folder, apply(model_of("llama")), **settings)


def steps(folder: Path) -> list[int]:
    return sorted(checkpoint_step(path) for path in folder.iterdir())


def test_checkpoints_are_listed_and_nothing_else_is_left(tmp_path: Path) -> None:
    saving(tmp_path, save_total_limit=2).train()
    assert steps(tmp_path) == [4, 6]
    assert all((path / MANIFEST).is_file() and is_whole(path) for path in tmp_path.iterdir())


def test_one_without_a_list_is_resumed_by_its_files(tmp_path: Path) -> None:
    trainer = saving(tmp_path)
    trainer.train()
    expected = weights(trainer.model)
    (tmp_path / "checkpoint-4" / MANIFEST).unlink()
    (tmp_path / "checkpoint-6/optimizer.pt").unlink()
    checkpoint = last_checkpoint(tmp_path)
    assert checkpoint.name == "checkpoint-4"
    again = saving(tmp_path)
    again.train(resume_from_checkpoint=str(checkpoint))
    found = weights(again.model)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert is_whole(tmp_path / "checkpoint-6")  # the damaged one was replaced


def test_the_best_is_known_by_its_name(tmp_path: Path) -> None:
    trainer = saving(
        tmp_path,
        eval_strategy="steps",
        eval_steps=2,
        metric_for_best_model="loss",
        eval_dataset=packed_rows(seed=50),
        save_total_limit=2,
    )
    left = iter([3.0, 2.0, 4.0])
    trainer._eval_sums = lambda dataset: (next(left), 1)  # type: ignore[method-assign]
    trainer.train()
    for step, best in ((4, "checkpoint-4"), (6, "checkpoint-4")):
        state = json.loads((tmp_path / f"checkpoint-{step}/trainer_state.json").read_text())
        assert state["best_model_checkpoint"] == str(tmp_path / best)
    assert steps(tmp_path) == [4, 6]


def test_a_resumed_run_has_the_intervals_it_is_given(tmp_path: Path) -> None:
    saving(tmp_path, max_steps=2).train()
    saving(tmp_path, save_steps=3).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert steps(tmp_path) == [2, 3, 6]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant_with_warmup"])
def test_a_run_made_longer_has_its_new_lengths_rates_from_the_next_step_on(tmp_path: Path, schedule: str) -> None:
    """A checkpoint at the end of a falling schedule holds a rate of 0 for the next step."""

    def rates(steps: int, checkpoint: str | None = None) -> dict[int, float]:
        log = StepLog(None)
        trainer = saving(tmp_path, max_steps=steps, lr_scheduler_type=schedule, step_log=log)
        seen: dict[int, float] = {}
        log.on_record = lambda record: seen.update({record.step: record.learning_rate})
        trainer.train(resume_from_checkpoint=checkpoint)
        return seen

    rates(4)
    found = rates(8, str(tmp_path / "checkpoint-4"))
    shutil.rmtree(tmp_path)
    expected = rates(8)
    assert sorted(found) == [5, 6, 7, 8]
    assert found == {step: expected[step] for step in found}
    assert found[5] > 0


def test_resumed_after_its_last_step_a_run_adds_none(tmp_path: Path) -> None:
    """The last step is within an epoch of 6, where the base class alone would take one more."""
    trainer = saving(tmp_path, max_steps=4)
    trainer.train()
    again = saving(tmp_path, max_steps=4)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert again.state.global_step == 4
    expected, found = weights(trainer.model), weights(again.model)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_save_that_fails_leaves_the_one_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = saving(tmp_path, save_total_limit=1)

    def full(*_: Any) -> None:
        if trainer.state.global_step == 4:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(trainer, "_save_scaler", full)
    with pytest.raises(OSError, match="No space left"):
        trainer.train()
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-2"
    assert not (tmp_path / "checkpoint-4").exists()
    assert trainer._get_output_dir(None) == str(tmp_path)


def test_a_model_alone_is_no_checkpoint_to_go_on_from(tmp_path: Path) -> None:
    saving(tmp_path, save_only_model=True, max_steps=2).train()
    assert damage(tmp_path / "checkpoint-2") == "optimizer.pt is missing"
