"""The page of all recipe keys is what its generator writes, and leaves none out."""

import importlib.util
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from slipstream.recipe import REQUIRED, SECTIONS, Recipe
from slipstream.train.options import TrainOptions

ROOT = Path(__file__).parent.parent
KEYS = [item.name for item in fields(Recipe) if item.name not in SECTIONS] + [
    f"{section}.{item.name}" for section, cls in SECTIONS.items() for item in fields(cls)
]


@pytest.fixture(scope="module")
def generator() -> Any:
    spec = importlib.util.spec_from_file_location("recipe_page", ROOT / "docs" / "recipe.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows_of(text: str) -> dict[str, list[str]]:
    lines = [re.split(r"(?<!\\)\|", line.strip("|")) for line in text.splitlines() if line.startswith("| `")]
    return {line[0].strip(" `"): [cell.strip() for cell in line[1:]] for line in lines}


def test_regenerating_changes_nothing(generator: Any) -> None:
    assert generator.main(["--check"]) == 0, "run python docs/recipe.py"


def test_a_changed_default_is_noticed(generator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator, "shown", lambda value: "another")
    assert generator.main(["--check"]) == 1


def test_every_key_is_there_with_what_it_takes_its_default_and_its_meaning(generator: Any) -> None:
    rows = rows_of(generator.PAGE.read_text(encoding="utf-8"))
    assert len(KEYS) > 40
    assert list(rows) == KEYS
    for key, (takes, default, meaning) in rows.items():
        assert takes, key
        assert meaning.endswith("."), key
        assert (default == "required") == (key in REQUIRED), key


def test_choices_bounds_and_defaults(generator: Any) -> None:
    rows = rows_of(generator.table(TrainOptions, fields(TrainOptions), "train."))
    assert rows["train.mode"][:2] == ["one of auto, eager, compiled, captured", "`auto`"]
    assert rows["train.steps"][:2] == ["a whole number > 0 and <= 2,147,483,647, or null", "`null`"]
    assert rows["train.learning_rate"][:2] == ["a number > 0", "`0.0002`"]


def test_the_readme_links_it() -> None:
    assert "(docs/recipe.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
