"""Going on with a run: what may change and is said, what may not and is listed, and what is left to do."""

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from slipstream import InputError
from slipstream.recipe import Recipe, load_recipe
from slipstream.resume import Change, _rounds, resumption
from slipstream.run import train
from slipstream.summary import RunSummary
from slipstream.train.records import RunFolder, read_records
from tiny import tiny_model, tiny_tokenizer

Go = Callable[..., tuple[RunSummary, str]]
pytestmark = pytest.mark.usefixtures("unreported")


def write_inputs(folder: Path) -> None:
    tiny_model().save_pretrained(folder / "base")
    tiny_tokenizer().save_pretrained(folder / "base")
    for name, answer in (("rows", "yes"), ("held", "no"), ("others", "perhaps")):
        lines = (json.dumps({"prompt": f"{i}?", "completion": answer}) + "\n" for i in range(40))
        (folder / f"{name}.jsonl").write_text("".join(lines))
    (folder / "recipe.yaml").write_text(
        "model: base\ndata: {train: rows.jsonl}\npacking: {tokens: 128}\noutput: run\n"
        "train: {steps: 2, schedule: constant, warmup: 0, learning_rate: 0.01, save_every: 1}\n"
    )


def recipe_of(file: Path | str = "recipe.yaml", **changes: Any) -> Recipe:
    return load_recipe(file, [f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in changes.items()])


def go(file: Path | str = "recipe.yaml", *, resume: bool = True, **changes: Any) -> tuple[RunSummary, str]:
    """Train by the recipe, with keywords as its keys (``__`` for the dot); the summary, and what was printed."""
    said = io.StringIO()
    summary = train(recipe_of(file, **changes), resume=resume, console=Console(file=said, width=1000))
    return summary, said.getvalue()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe of relative paths and its finished run of two steps, held-out rows evaluated."""
    folder = tmp_path_factory.mktemp("project")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_inputs(folder)
        go(resume=False, data__eval="held.jsonl")
    return folder


@pytest.fixture
def project(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy to be changed at will, as if it had been trained in; the current folder."""
    shutil.copytree(trained, tmp_path / "project")
    record = tmp_path / "project/run/run.json"
    record.write_text(record.read_text().replace(str(trained), str(tmp_path / "project")))
    monkeypatch.chdir(tmp_path / "project")
    return tmp_path / "project"


def contents(folder: Path) -> dict[Path, tuple[int, bytes]]:
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


def weights(run: Path | str) -> dict[str, Any]:
    return load_file(Path(run) / "adapter/adapter_model.safetensors")


def test_what_is_not_learned_may_change_and_is_said_once(project: Path) -> None:
    changes = {
        "memory__activations": "recompute",
        "memory__tiles": "none",
        "train__mode": "eager",
        "train__keep": 5,
        "train__save_every": 3,
        "train__eval_every": 3,
        "train__steps": 4,
    }
    summary, said = go(data__eval="held.jsonl", **changes)
    assert summary.steps == 4
    (line,) = [line for line in said.splitlines() if "changed since" in line]
    assert line == (
        "changed since the run began: memory.activations: auto → recompute, memory.tiles: auto → none, "
        "train.eval_every: null → 3, train.keep: 2 → 5, train.mode: auto → eager, train.save_every: 1 → 3, "
        "train.steps: 2 → 4; with memory.tiles and train.mode results agree within rounding, not bit for bit; "
        "the result is that of a run of 4 steps from the start, for the learning rate is constant"
    )
    (kept,) = json.loads((project / "run/run.json").read_text())["changed"]
    assert (kept["step"], kept["values"]["train.mode"]) == (2, ["auto", "eager"])
    whole, _ = go(resume=False, output="whole", train__steps=4)  # kept activations, never interrupted
    found, expected = weights("run"), weights("whole")
    assert all((found[name] == expected[name]).all() for name in expected)
    assert whole.loss_last == summary.loss_last != whole.loss_first


def test_what_is_learned_may_not_change_and_all_of_it_is_told(project: Path) -> None:
    before = contents(project / "run")
    with pytest.raises(InputError) as caught:
        go(train__learning_rate=0.5, adapter__rank=4, data__train="others.jsonl", train__steps=9, train__keep=3)
    message = str(caught.value)
    assert message.splitlines()[1:-1] == [
        "  adapter.rank: 16 → 4",
        f"  data.train: {project / 'rows.jsonl'} → {project / 'others.jsonl'}",
        "  train.learning_rate: 0.01 → 0.5",
    ]
    assert message.startswith("3 values alter what is learned, as they were when the run in 'run' began and are now:")
    assert message.endswith("set them back, or start another run with another output")
    assert contents(project / "run") == before


@pytest.mark.parametrize("changes", [{}, {"train__steps": None, "train__epochs": 0.2}], ids=["steps", "epochs"])
def test_a_complete_run_is_told_so_and_left_alone(project: Path, changes: dict[str, Any]) -> None:
    before = contents(project / "run")
    summary, said = go(data__eval="held.jsonl", **changes)
    assert said == (
        "the run in 'run' is complete: its 2 steps are made, nothing is left to do and nothing was changed; raise "
        "train.steps or train.epochs to train on\n"
    )
    assert contents(project / "run") == before
    assert (summary.steps, summary.interrupted, summary.seconds) == (2, False, 0.0)
    assert summary.eval_after is not None
    assert summary.packing.rows == json.loads((project / "run/run.json").read_text())["packing"]["train"]["rows"]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"train__steps": 1}, "train.steps: 1 < the 2 steps that the run in 'run' has made"),
        ({"train__steps": None, "train__epochs": 0.1}, "train.epochs: 0.1, which is 1 steps, < the 2 steps"),
    ],
)
@pytest.mark.parametrize(("outcome", "remedy"), [("finished", "more than 2 to train on"), ("failed", "at least 2")])
def test_fewer_steps_than_made_are_refused(
    project: Path, changes: dict[str, Any], told: str, outcome: str, remedy: str
) -> None:
    record = json.loads((project / "run/run.json").read_text())
    (project / "run/run.json").write_text(json.dumps(record | {"outcome": outcome}))
    before = contents(project / "run")
    with pytest.raises(InputError) as caught:
        go(**changes)
    assert told in str(caught.value)
    assert f"ask for {remedy}, or start another run" in str(caught.value)
    assert contents(project / "run") == before


def test_a_longer_run_of_a_falling_schedule_is_told_its_rates(project: Path) -> None:
    falling = {"train__schedule": "linear", "output": "falling"}
    go(resume=False, **falling)
    _, said = go(train__steps=4, **falling)
    told = "from step 3 on the learning rate follows the linear schedule of 4 steps, so the result is not that of a run"
    assert told in said
    rates = [step.learning_rate for step in read_records(project / "falling").steps]
    assert rates == pytest.approx([0.01, 0.005, 0.005, 0.0025])


def test_it_goes_on_from_any_folder(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "elsewhere").mkdir()
    monkeypatch.chdir(project / "elsewhere")
    where = {"output": "../run", "data__eval": "held.jsonl"}
    summary, said = go("../recipe.yaml", train__steps=3, **where)
    assert summary.steps == 3
    assert f"loading {project / 'base'}" in said
    assert "train.steps: 2 → 3;" in said  # and no other change
    shutil.copytree(project / "base", "base")  # another of that name, which a recipe here would mean
    with pytest.raises(InputError, match=f"model: {project}/base → {project}/elsewhere/base"):
        go("../recipe.yaml", train__steps=4, **where)


def test_a_project_that_was_moved_goes_on_and_says_so(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = project.with_name("moved")
    project.rename(moved)
    monkeypatch.chdir(moved)
    summary, said = go(train__steps=3)
    assert summary.steps == 3
    assert f"model: {project / 'base'} → {moved / 'base'}" in said
    assert f"data.train: {project / 'rows.jsonl'} → {moved / 'rows.jsonl'}" in said


def test_a_base_that_was_moved_is_asked_for_and_taken(project: Path) -> None:
    (project / "base").rename(project / "moved")
    with pytest.raises(
        InputError, match=f"base model {project / 'base'} does not exist any more; put it back, or give"
    ):
        go(data__eval="held.jsonl", train__steps=3)
    _, said = go(data__eval="held.jsonl", train__steps=3, model="moved")
    assert f"model: {project / 'base'} → {project / 'moved'}, train.steps: 2 → 3;" in said


def test_another_model_in_its_place_is_refused(project: Path) -> None:
    tiny_model(num_hidden_layers=3).save_pretrained(project / "base")
    before = contents(project / "run")
    with pytest.raises(InputError, match=r"the model has [\d,]+ parameters, adapters included, and had [\d,]+ when"):
        go(data__eval="held.jsonl", train__steps=3)
    assert contents(project / "run") == before


@pytest.mark.parametrize("kind", ["lora", "none"])
def test_other_weights_of_the_same_shape_are_refused(project: Path, kind: str) -> None:
    """Not where all weights are trained: the checkpoint has them."""
    full = {} if kind == "lora" else {"output": "full", "adapter__kind": "none"}
    if full:
        go(resume=False, **full)
    torch.manual_seed(77)
    tiny_model().save_pretrained(project / "base")
    before = contents(project / "run")
    if full:
        assert go(train__steps=3, **full)[0].steps == 3
        return
    with pytest.raises(InputError, match=r"with the fingerprint .* another model of the same shape; put the weights"):
        go(data__eval="held.jsonl", train__steps=3)
    assert contents(project / "run") == before


def test_rows_with_other_labels_are_refused(project: Path) -> None:
    """The same tokens in the same documents, one of which has another token to learn; no sample of them holds it."""
    pairs = [{"prompt": f"{i}?", "completion": "abcdef"} for i in range(200)]
    rows, settings = (
        project / "many.jsonl",
        {"data__train": "many.jsonl", "output": "many", "data__chat_template": "none"},
    )
    rows.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    go(resume=False, **settings)
    pairs[1] = {"prompt": "1?a", "completion": "bcdef"}
    rows.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    before, record = contents(project / "many"), RunFolder(project / "many").read_run()
    with pytest.raises(InputError, match=r"data.train holds other rows than when the run"):
        go(train__steps=3, **settings)
    assert contents(project / "many") == before
    go(resume=False, **{**settings, "output": "again"})
    again = RunFolder(project / "again").read_run()
    assert again["rows"] == record["rows"]  # lengths and sample: the case is one that they miss


def test_a_run_without_fingerprints_goes_on_and_is_told(project: Path) -> None:
    record = json.loads((project / "run/run.json").read_text())
    del record["base"], record["contents"]
    (project / "run/run.json").write_text(json.dumps(record))
    _, said = go(data__eval="held.jsonl", train__steps=3)
    assert "whether all rows are as they were can't be told" in said
    assert f"whether {project / 'base'} still has the weights that the run was trained on can't be told" in said
    after = RunFolder(project / "run").read_run()
    assert after["base"]["digest"] is not None
    assert after["contents"]["train"] is not None


def test_other_held_out_rows_begin_their_evaluations_anew(project: Path) -> None:
    before = read_records(project / "run").evals
    assert [evaluation.step for evaluation in before] == [0, 2]
    checkpoint = project / "run/checkpoints/checkpoint-2"
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    assert state["best_global_step"] == 2
    (checkpoint / "trainer_state.json").write_text(json.dumps(state | {"best_metric": 0.1}))  # easier rows
    (checkpoint / "slipstream.json").unlink()
    summary, said = go(data__eval="others.jsonl", train__steps=3)
    assert f"data.eval: {project / 'held.jsonl'} → {project / 'others.jsonl'}" in said
    assert [evaluation.step for evaluation in read_records(project / "run").evals] == [3]
    assert len((project / "run/evals-until-step-2.jsonl").read_text().splitlines()) == 2
    record = RunFolder(project / "run").read_run()
    assert (record["eval_before"], record["evals_since"], record["best"]["step"]) == (None, 2, 3)
    after = json.loads((project / "run/checkpoints/checkpoint-3/trainer_state.json").read_text())
    assert (after["best_metric"], after["best_global_step"]) == (summary.eval_after, 3)
    assert summary.eval_after is not None
    assert summary.eval_after > 0.1


def cut(project: Path, lines: int) -> None:
    """Ends ``steps.jsonl`` in the middle of its line ``lines``."""
    file = project / "run/steps.jsonl"
    kept = file.read_text().splitlines()[:lines]
    assert len(kept) == lines
    file.write_text("\n".join(kept)[:-9])


@pytest.mark.parametrize("more", [{}, {"train__steps": 3}], ids=["finished", "longer"])
def test_steps_whose_records_are_gone_are_made_again(project: Path, more: dict[str, Any]) -> None:
    expected, held = weights("run"), {"data__eval": "held.jsonl"}
    cut(project, 2)
    _, said = go(**held, **more)
    assert [line for line in said.splitlines() if "steps.jsonl" in line] == [
        "steps.jsonl: line 2 was cut off while it was written; it is left out; going back to checkpoint-1: the steps "
        "after it are made and recorded again"
    ]
    assert [record.step for record in read_records(project / "run").steps] == [1, 2, 3][: 3 if more else 2]
    if not more:
        assert all((weights("run")[name] == value).all() for name, value in expected.items())


def test_a_cut_line_after_the_checkpoint_is_told(project: Path) -> None:
    with (project / "run/steps.jsonl").open("a") as file:
        file.write('{"step": 3, "ep')
    _, said = go(data__eval="held.jsonl", train__steps=3)
    assert "line 3 was cut off while it was written; it is left out; going on from checkpoint-2: the steps" in said
    assert [record.step for record in read_records(project / "run").steps] == [1, 2, 3]


def test_records_that_no_checkpoint_brings_back_are_told(project: Path) -> None:
    cut(project, 1)
    before = contents(project / "run")
    _, said = go(data__eval="held.jsonl")
    assert "2 steps from 1 to 2 have no record any more, though checkpoint-2 holds what was learned\n" in said
    assert "is complete: its 2 steps are made" in said
    assert contents(project / "run") == before
    (project / "run/steps.jsonl").write_text("")
    _, said = go(data__eval="held.jsonl", train__steps=3)
    assert "steps.jsonl ends with step 0, before checkpoint-2; 2 steps from 1 to 2 have no record" in said
    assert [record.step for record in read_records(project / "run").steps] == [3]


def test_a_line_that_is_gone_from_between_is_told_and_its_step_not_made_again(project: Path) -> None:
    file = project / "run/steps.jsonl"
    file.write_text("spoilt\n" + file.read_text().splitlines()[1] + "\n")
    _, said = go(data__eval="held.jsonl", train__steps=3)
    assert "steps.jsonl: line 1 cannot be read (" in said
    assert "; step 1 has no record any more, though checkpoint-2 holds what was learned\n" in said
    assert [record.step for record in read_records(project / "run").steps] == [2, 3]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"format": 2}, "run.json has format 2; this version reads format 1"),
        ({"rows": {}, "packing": None}, "run.json lacks packing.train, rows.train; use the version"),
    ],
)
def test_a_run_of_another_format_is_not_gone_on_with(project: Path, change: dict[str, Any], told: str) -> None:
    record = json.loads((project / "run/run.json").read_text())
    (project / "run/run.json").write_text(json.dumps(record | change))
    with pytest.raises(InputError, match=told):
        go(train__steps=3)


@pytest.mark.parametrize("count", ["2", "two", -1, 0, 1.5, True, None, []])
def test_processes_that_are_no_number_of_processes_are_told(project: Path, count: object) -> None:
    place = project / "run/run.json"
    place.write_text(json.dumps({**json.loads(place.read_text()), "processes": count}))
    with pytest.raises(InputError) as refused:
        go(train__steps=3)
    assert f"run.json has {count!r} for processes, a whole number of at least 1 is needed; rest" in str(refused.value)


@pytest.mark.parametrize("file", ["optimizer.pt", "trainer_state.json", "adapter_model.safetensors"])
def test_a_checkpoint_without_its_list_that_is_damaged_is_passed_over(project: Path, file: str) -> None:
    newest = project / "run/checkpoints/checkpoint-2"
    (newest / "slipstream.json").unlink()
    data = (newest / file).read_bytes()
    (newest / file).write_bytes(data[: len(data) // 2])
    summary, said = go(train__steps=3, data__eval="held.jsonl")
    assert said.count(f"checkpoint-2 is damaged ({file} cannot be read") == 1
    assert "going on from step 1 " in said
    assert summary.steps == 3


def test_records_of_another_version_are_filled_in(project: Path) -> None:
    """Keys that came later had their defaults; paths were as they were written."""
    record = json.loads((project / "run/run.json").read_text())
    del record["recipe"]["memory"]["tiles"]
    record["recipe"] |= {"model": "base"}
    (project / "run/run.json").write_text(json.dumps(record))
    quiet = Console(file=io.StringIO())
    found = resumption(RunFolder(project / "run"), recipe_of(train__steps=3, data__eval="held.jsonl"), quiet)
    assert found.changes == (Change("train.steps", 2, 3),)
    assert found.checkpoint is not None
    assert found.checkpoint.name == "checkpoint-2"


@pytest.mark.parametrize(
    ("before", "now", "more", "rounds"),
    [
        ("keep", "recompute", {}, False),
        ("recompute", "offload", {"train__mode": "captured"}, False),
        ("keep", "recompute", {"train__mode": "compiled"}, True),
        ("keep", "recompute", {"packing__tokens": 65_536}, True),  # recomputed, so long a row's MLPs are tiled
        ("keep", "recompute", {"packing__tokens": 65_536, "memory__tiles": "none"}, False),
        ("recompute", "offload", {"packing__tokens": 65_536}, False),
    ],
)
@pytest.mark.usefixtures("project")
def test_which_activations_round_otherwise(before: str, now: str, more: dict[str, Any], rounds: bool) -> None:
    recipe = recipe_of(**more)
    values = {"train.mode": recipe.train.mode, "memory.tiles": recipe.memory.tiles}
    assert _rounds(Change("memory.activations", before, now), values, recipe) == rounds
