"""Which checkpoint a run goes on from: the newest whole one, by number and not by name."""

from pathlib import Path

import pytest

from slipstream import InputError
from slipstream.train.checkpoint import NEEDED, WEIGHTS, checkpoint_step, is_whole, last_checkpoint

WHOLE = (*NEEDED, WEIGHTS[0])


def save(folder: Path, name: str, files: tuple[str, ...] = WHOLE) -> Path:
    (folder / name).mkdir(parents=True)
    for file in files:
        (folder / name / file).write_text("{}")
    return folder / name


def test_the_newest_by_number(tmp_path: Path) -> None:
    for step in (9, 100, 20):
        save(tmp_path, f"checkpoint-{step}")
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-100"


@pytest.mark.parametrize("weights", WEIGHTS)
def test_any_kind_of_weights(tmp_path: Path, weights: str) -> None:
    assert is_whole(save(tmp_path, "checkpoint-5", (*NEEDED, weights)))


@pytest.mark.parametrize("missing", WHOLE)
def test_one_that_was_cut_off_is_passed_over(tmp_path: Path, missing: str) -> None:
    whole = save(tmp_path, "checkpoint-5")
    cut = save(tmp_path, "checkpoint-10", tuple(name for name in WHOLE if name != missing))
    assert is_whole(whole)
    assert not is_whole(cut)
    assert last_checkpoint(tmp_path) == whole


def test_other_things_in_the_folder_are_passed_over(tmp_path: Path) -> None:
    whole = save(tmp_path, "checkpoint-5")
    save(tmp_path, "checkpoint-best")
    save(tmp_path, "tmp-checkpoint-9")
    (tmp_path / "checkpoint-7").write_text("a file")
    assert last_checkpoint(tmp_path) == whole


@pytest.mark.parametrize("there", [True, False])
def test_without_one_the_remedy_is_named(tmp_path: Path, there: bool) -> None:
    folder = tmp_path / "checkpoints"
    if there:
        save(folder, "checkpoint-3", NEEDED[:1])
    with pytest.raises(InputError, match=r"checkpoints' holds no whole checkpoint.*another output.*train.save_every"):
        last_checkpoint(folder)


@pytest.mark.parametrize(
    ("name", "step"),
    [("checkpoint-12", 12), ("checkpoint-", -1), ("x", -1), ("checkpoint-²", -1)],
)
def test_steps_of_names(name: str, step: int) -> None:
    assert checkpoint_step(Path(name)) == step
