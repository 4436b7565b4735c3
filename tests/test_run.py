"""What a run refuses before anything is loaded."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from slipstream import InputError
from slipstream.recipe import load_recipe
from slipstream.run import planned_steps, train

DEMO = Path(__file__).parent.parent / "recipes" / "demo.yaml"


def test_processes_without_a_launcher_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe(DEMO, [f"output={tmp_path / 'run'}"])
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(InputError, match=r"RANK is None in the environment.*start them with torchrun or accelerate"):
        train(recipe, resume=False, console=Console(file=io.StringIO()))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("name", "engine"), [("ACCELERATE_USE_FSDP", "FSDP"), ("ACCELERATE_USE_DEEPSPEED", "DeepSp")])
def test_engines_of_the_launcher_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, engine: str
) -> None:
    recipe = load_recipe(DEMO, [f"output={tmp_path / 'run'}"])
    for key, value in {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", name: "true"}.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(InputError, match=f"accelerate's configuration asks for {engine}.*train.sharding: fsdp2"):
        train(recipe, resume=False, console=Console(file=io.StringIO()))


def test_planned_steps_of_several_processes_are_each_ones() -> None:
    recipe = load_recipe(DEMO, ["train.steps=null", "train.accumulate=2"])
    assert [planned_steps(recipe, 13, processes) for processes in (1, 2, 3)] == [7, 4, 3]


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
