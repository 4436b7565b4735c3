"""What a run refuses before anything is loaded."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from slipstream import InputError
from slipstream.recipe import load_recipe
from slipstream.run import train

DEMO = Path(__file__).parent.parent / "recipes" / "demo.yaml"


def test_several_processes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """axolotl#494, TorchSpec#126: ranks with different numbers of batches would wait for each other for ever."""
    recipe = load_recipe(DEMO, [f"output={tmp_path / 'run'}"])
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="started as 2 processes > 1; slipstream train runs on one device for now"):
        train(recipe, resume=False, console=Console(file=io.StringIO()))
    assert not (tmp_path / "run").exists()
