"""What is said about prepared rows: packed or not, the same numbers everywhere, and progress while tokenising."""

import io
import json
import warnings
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from slipstream.model.lora import AdapterOptions, add_adapter
from slipstream.prepare import Rows, prepare_rows, quiet_libraries
from slipstream.recipe import Recipe, load_recipe
from slipstream.run import show_data
from tiny import tiny_model, tiny_tokenizer


def recipe_of(tmp_path: Path, lengths: list[int], *overrides: str) -> Recipe:
    """A recipe over texts that make documents of so many tokens (one a character, and the end)."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": "x" * (n - 1)}) + "\n" for n in lengths))
    path = tmp_path / "recipe.yaml"
    path.write_text(f"model: m\noutput: {tmp_path / 'out'}\ndata: {{train: {tmp_path / 'rows.jsonl'}}}\n")
    return load_recipe(str(path), overrides)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def prepared(recipe: Recipe, *, terminal: bool = False) -> tuple[Rows, str]:
    said = io.StringIO()
    console = Console(file=said, width=400, force_terminal=terminal)
    rows = prepare_rows(recipe, recipe.data.train, tiny_tokenizer(eos="</s>"), console)
    return rows, said.getvalue()


def test_a_warning_that_merging_has_taken_care_of_is_left_out() -> None:
    options = AdapterOptions(modules_to_save=["embed_tokens", "lm_head"])

    def warned() -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.resetwarnings()
            if quiet:
                quiet_libraries()
            add_adapter(tiny_model(tie_word_embeddings=True), options, seed=0)
        return [str(one.message) for one in caught if "tie_word_embeddings" in str(one.message)]

    quiet = False
    assert warned()
    quiet = True
    assert not warned()


def test_packed_rows_and_what_padding_would_have_cost(tmp_path: Path) -> None:
    rows, said = prepared(recipe_of(tmp_path, [4, 3, 2, 2], "packing.tokens=8"))
    assert "packed into 2 rows of 8 tokens: 68.8% full, 5 tokens of padding" in said
    assert "(padded batches would compute 12 tokens, 0.75 times as many)" in said
    assert rows.report.enabled
    assert rows.report.padded_ratio == 12 / (2 * 8)


@pytest.mark.parametrize(
    ("batch", "told", "padding"),
    [
        (2, "one a row, padded in batches of 2: about 21.4% of the tokens computed are padding", 3),
        (1, "one a row and a batch, so nothing is padded", 0),
    ],
)
def test_rows_that_are_not_packed(tmp_path: Path, batch: int, told: str, padding: int) -> None:
    overrides = ("packing.tokens=8", "packing.enabled=false", f"packing.rows={batch}")
    rows, said = prepared(recipe_of(tmp_path, [5, 2, 2, 2], *overrides))
    assert f"not packed: 4 documents, {told}" in said
    assert "packed into" not in said
    assert "full" not in said
    assert len(rows.rows) == 4
    assert (rows.report.enabled, rows.report.padding_tokens) == (False, padding)


def test_one_row_is_singular(tmp_path: Path) -> None:
    _, said = prepared(recipe_of(tmp_path, [7], "packing.tokens=8"))
    assert "packed into 1 row of 8 tokens: 87.5% full, 1 token of padding" in said


def test_tokenising_shows_how_far_it_is_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    update = "rich.progress.Progress.update"
    monkeypatch.setattr(update, lambda *_, **told: shown.append((told["completed"], told["total"], told["rows"])))
    recipe = recipe_of(tmp_path, [3] * 600, "packing.tokens=8")
    prepared(recipe, terminal=True)
    assert shown == [(512, None, "512 rows"), (600, None, "600 rows")]
    shown.clear()
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    prepared(recipe_of(tmp_path, [3], f"data.train={tmp_path / 'rows.parquet'}", "packing.tokens=8"), terminal=True)
    assert shown == [(512, 600, "512 of 600 rows"), (600, 600, "600 of 600 rows")]


def test_tokenising_tells_how_far_it_is_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.prepare.LINE_EVERY_SECONDS", -1.0)
    _, said = prepared(recipe_of(tmp_path, [3] * 600, "packing.tokens=8"))
    assert f"reading {tmp_path / 'rows.jsonl'}: 512 rows\n" in said


def test_a_folder_names_the_files_that_were_read(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, [3], f"data.train={tmp_path / 'set'}")
    (tmp_path / "set").mkdir()
    for index in range(12):
        (tmp_path / "set" / f"{index:02}.jsonl").write_text('{"text": "xy"}\n')
    (tmp_path / "set" / "README.md").write_text("not data")
    _, said = prepared(recipe)
    assert "12 files: 00.jsonl, 01.jsonl, " in said
    assert "09.jsonl and 2 more\n" in said


def test_shown_data_comes_with_account_and_packing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.run.load_tokenizer", lambda *_: tiny_tokenizer(eos="</s>"))
    (tmp_path / "eval.jsonl").write_text('{"text": "xyz"}\n')
    recipe = recipe_of(tmp_path, [4, 3, 2, 2], "packing.tokens=8", f"data.eval={tmp_path / 'eval.jsonl'}")
    said = io.StringIO()
    values = json.loads(json.dumps(show_data(recipe, rows=1, console=Console(file=said, width=400))))
    assert list(values) == ["account", "packing", "eval", "rows"]
    assert (values["account"]["documents"], values["packing"]["rows"], len(values["rows"])) == (4, 2, 1)
    assert values["eval"]["account"]["tokens"] == 4
    assert f"{tmp_path / 'eval.jsonl'}:\n  1 of 1 row kept" in said.getvalue()
    without = recipe_of(tmp_path, [4, 3], "packing.tokens=8")
    assert show_data(without, rows=1, console=Console(file=said))["eval"] is None
