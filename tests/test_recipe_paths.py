"""A recipe's paths from any folder; names and templates as they are."""

from pathlib import Path

import pytest

from slipstream.data.rows import DataOptions
from slipstream.recipe import Recipe
from slipstream.recipe_paths import with_absolute_paths


def test_paths_become_absolute_and_names_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("rows.jsonl", "template.jinja", "none"):
        (tmp_path / name).touch()
    (tmp_path / "base").mkdir()
    (tmp_path / "link").symlink_to("base")
    data = DataOptions(train="./rows.jsonl", eval="owner/rows:test", chat_template="template.jinja")
    found = with_absolute_paths(Recipe(model="link", data=data, output="run"))
    assert (found.model, found.output) == (str(tmp_path / "link"), "run")  # the link itself, not where it leads
    assert found.data.train == str(tmp_path / "rows.jsonl")
    assert found.data.eval == "owner/rows:test"
    assert found.data.chat_template == str(tmp_path / "template.jinja")
    assert with_absolute_paths(found) == found


@pytest.mark.parametrize("template", ["none", "{{ messages }}", "x" * 5000 + "{", None])
def test_templates_that_are_no_path(template: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "none").touch()
    recipe = Recipe(model="owner/name", data=DataOptions(train="rows", chat_template=template), output="run")
    assert with_absolute_paths(recipe) == recipe
