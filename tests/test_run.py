"""What a run refuses before anything is loaded."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from slipstream import InputError
from slipstream.recipe import load_recipe
from slipstream.run import planned_steps, train

DEMO = Path(__file__).parent.parent / "recipes" / "demo.yaml"


def test_several_processes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """axolotl#494, TorchSpec#126: ranks with different numbers of batches would wait for each other for ever."""
    recipe = load_recipe(DEMO, [f"output={tmp_path / 'run'}"])
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="started as 2 processes > 1; slipstream train runs on one device for now"):
        train(recipe, resume=False, console=Console(file=io.StringIO()))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "rows", "steps"),
    [
        (["train.steps=7"], 100, 7),
        (["train.steps=null", "train.epochs=2"], 10, 20),
        (["train.steps=null", "train.epochs=0.5"], 11, 6),
        (["train.steps=null", "packing.rows=4", "train.accumulate=2"], 21, 3),
    ],
)
def test_planned_steps_are_the_trainers(changes: list[str], rows: int, steps: int, tmp_path: Path) -> None:
    assert planned_steps(load_recipe(DEMO, changes), rows) == steps
