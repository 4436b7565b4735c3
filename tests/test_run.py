"""What a run refuses before anything is loaded."""

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console

from slipstream import InputError
from slipstream.recipe import load_recipe
from slipstream.run import planned_steps, train
from slipstream.train.ranks import Ranks

DEMO = Path(__file__).parent.parent / "recipes" / "demo.yaml"


def test_processes_without_a_launcher_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe(DEMO, [f"output={tmp_path / 'run'}"])
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(InputError, match=r"RANK is not set in the environment.*start the processes with torchrun"):
        train(recipe, resume=False, console=Console(file=io.StringIO()))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"RANK": "2"}, "RANK is 2 in the environment and must be < WORLD_SIZE, which is 2; start the processes"),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"}, "LOCAL_RANK is 1 in the environment and must be < LOCAL_WORLD"),
        ({"LOCAL_RANK": "7"}, "LOCAL_RANK is 7 in the environment and must be < LOCAL_WORLD_SIZE, which is 2"),
        ({"RANK": "1", "WORLD_SIZE": "1"}, "RANK is 1 in the environment and must be < WORLD_SIZE, which is 1"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two' in the environment, not a whole number; start the processes"),
        ({"RANK": "-1"}, "RANK is '-1' in the environment, not a whole number"),
        ({"WORLD_SIZE": "0"}, "RANK is 1 in the environment and must be < WORLD_SIZE, which is 0"),
    ],
)
def test_an_environment_that_no_launcher_gives_is_refused(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], told: str
) -> None:
    """Before anything is joined: the other processes would be waited for."""
    for key, value in {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", **changes}.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_: pytest.fail("joined"))
    with pytest.raises(InputError, match=f"^{told}"), Ranks.joined():
        pass


@pytest.mark.parametrize("environment", [{}, {"WORLD_SIZE": "1"}, {"RANK": "5"}])
def test_one_process_needs_no_launcher(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with Ranks.joined() as ranks:
        assert (ranks.count, ranks.index) == (1, 0)


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
