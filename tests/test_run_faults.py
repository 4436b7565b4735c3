"""What may go wrong around a run: nothing is lost, nothing is told wrongly, and the folder says what it holds."""

import io
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors import SafetensorError
from safetensors.torch import load_file

from slipstream import InputError
from slipstream import run as run_module
from slipstream.recipe import load_recipe
from slipstream.run import train
from slipstream.summary import RunSummary
from slipstream.train.options import TrainOptions, idle_start
from slipstream.train.records import read_records
from slipstream.train.run_folder import LOCK, RunFolder, full_disk_told
from tiny import tiny_model, tiny_tokenizer

Start = Callable[..., RunSummary]
pytestmark = pytest.mark.usefixtures("unreported")


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Trains a tiny model in ``tmp_path/run``; keywords are recipe keys with ``__`` for the dot."""
    base = tmp_path / "base"
    tiny_model().save_pretrained(base)
    tiny_tokenizer().save_pretrained(base)
    write_rows(tmp_path / "rows.jsonl", "yes")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model: {base}\ndata: {{train: {tmp_path}/rows.jsonl}}\npacking: {{tokens: 128}}\n"
        f"train: {{steps: 4, schedule: constant, warmup: 0, learning_rate: 0.01}}\noutput: {tmp_path}/run\n"
    )

    def go(resume: bool = False, **changes: Any) -> RunSummary:
        overrides = [f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in changes.items()]
        return train(load_recipe(recipe, overrides), resume=resume, console=Console(file=io.StringIO()))

    return go


def write_rows(path: Path, answer: str) -> None:
    path.write_text("".join(json.dumps({"prompt": f"{i}?", "completion": answer}) + "\n" for i in range(40)))


def outcome(folder: Path) -> str:
    return str(json.loads((folder / "run.json").read_text())["outcome"])


def weights(folder: Path) -> dict[str, Any]:
    return load_file(folder / "adapter" / "adapter_model.safetensors")


def test_a_finished_run_is_not_overwritten(start: Start, tmp_path: Path) -> None:
    start()
    before = weights(tmp_path / "run")
    with pytest.raises(InputError, match=r"holds another run .*finished"):
        start()
    after = weights(tmp_path / "run")
    assert all((before[name] == after[name]).all() for name in before)


def test_two_processes_in_one_folder_are_told_apart(start: Start, tmp_path: Path) -> None:
    busy = pytest.raises(InputError, match="is being written by another process; wait for it")
    with RunFolder.claimed(tmp_path / "run", resume=False), busy:
        start()
    assert start().steps == 4
    assert not (tmp_path / "run" / LOCK).exists()


def test_a_diverged_run_says_so_and_keeps_no_result(start: Start, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"step \d: loss nan.*diverged.*lower train.learning_rate \(it was 1e\+30"):
        start(train__learning_rate=1e30)
    assert outcome(tmp_path / "run") == "diverged"
    assert not (tmp_path / "run" / "adapter").exists()


def test_a_resumed_run_refuses_other_rows(start: Start, tmp_path: Path) -> None:
    start(train__save_every=2)
    write_rows(tmp_path / "rows.jsonl", "no")
    with pytest.raises(InputError, match=r"holds other rows than when the run in .* began"):
        start(resume=True, train__steps=6)


def test_an_interruption_before_the_first_step_leaves_the_folder_free(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM while the data is prepared, then during the evaluation before training."""
    prepare = run_module.prepare_rows

    def terminated(*given: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return prepare(*given)

    monkeypatch.setattr(run_module, "prepare_rows", terminated)
    with pytest.raises(KeyboardInterrupt):
        start()
    monkeypatch.setattr(run_module, "prepare_rows", prepare)
    evaluate = run_module._Training._evaluate

    def interrupted(training: Any, trainer: Any, when: str) -> float:
        os.kill(os.getpid(), signal.SIGINT)
        return evaluate(training, trainer, when)

    monkeypatch.setattr(run_module._Training, "_evaluate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        start(data__eval=str(tmp_path / "rows.jsonl"))
    monkeypatch.setattr(run_module._Training, "_evaluate", evaluate)
    assert list((tmp_path / "run").iterdir()) == []
    assert start().steps == 4


def test_an_interruption_at_the_last_step_leaves_only_the_result_to_write(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = str(tmp_path / "rows.jsonl")
    start(data__eval=rows)
    expected = weights(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "whole")
    push = run_module.Trainer._push_record

    def stopped(trainer: Any) -> None:
        push(trainer)
        if trainer.state.global_step == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(run_module.Trainer, "_push_record", stopped)
    assert start(data__eval=rows).interrupted
    monkeypatch.setattr(run_module.Trainer, "_push_record", push)
    summary = start(resume=True, data__eval=rows)
    assert (summary.steps, summary.interrupted) == (4, False)
    assert summary.eval_after is not None
    assert all((weights(tmp_path / "run")[name] == expected[name]).all() for name in expected)
    assert outcome(tmp_path / "run") == "finished"


def stop_in(patch: pytest.MonkeyPatch, step: int, act: Callable[[], object]) -> None:
    """``act`` comes while ``step`` is made."""
    inner = run_module.Trainer.training_step

    def stopped(trainer: Any, *arguments: Any, **named: Any) -> Any:
        if trainer.state.global_step == step - 1:
            act()
        return inner(trainer, *arguments, **named)

    patch.setattr(run_module.Trainer, "training_step", stopped)


def evaluated(folder: Path) -> list[tuple[int, float, int]]:
    return [(one.step, one.loss, one.learned_tokens) for one in read_records(folder).evals]


def last_state(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "checkpoints/checkpoint-8/trainer_state.json").read_text()))


@pytest.mark.parametrize("best", [4, 8])
def test_the_evaluation_of_an_interrupted_step_is_made_up_for(start: Start, tmp_path: Path, best: int) -> None:
    """The resumed run fails once more before its next checkpoint: what was made up for is not made twice, nor lost."""
    write_rows(tmp_path / "held.jsonl", "no")
    settings = {"data__eval": str(tmp_path / "held.jsonl"), "train__steps": 8, "train__eval_every": 2, "train__keep": 1}
    settings |= {"adapter__dropout": 0.2, "train__save_every": 8}
    with pytest.MonkeyPatch.context() as patch:
        sums = run_module.Trainer._eval_sums

        def shifted(trainer: Any, rows: Any) -> tuple[float, int]:
            loss, count = sums(trainer, rows)
            return loss + 100 * count * abs(trainer.state.global_step - best), count

        patch.setattr(run_module.Trainer, "_eval_sums", shifted)
        start(**settings)
        (tmp_path / "run").rename(tmp_path / "whole")
        with pytest.MonkeyPatch.context() as once:
            stop_in(once, 4, lambda: os.kill(os.getpid(), signal.SIGINT))
            assert start(**settings).interrupted
        assert [step for step, *_ in evaluated(tmp_path / "run")] == [0, 2]
        with pytest.MonkeyPatch.context() as once:
            stop_in(once, 6, lambda: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                start(resume=True, **settings)
        assert [step for step, *_ in evaluated(tmp_path / "run")] == [0, 2, 4]
        start(resume=True, **settings)
    run, whole = tmp_path / "run", tmp_path / "whole"
    assert evaluated(run) == evaluated(whole)
    assert [step for step, *_ in evaluated(run)] == [0, 2, 4, 6, 8]
    assert all((weights(run)[name] == weights(whole)[name]).all() for name in weights(whole))
    assert RunFolder(run).read_run()["best"] == RunFolder(whole).read_run()["best"]
    kept = [sorted(path.name for path in (folder / "checkpoints").glob("checkpoint-*")) for folder in (run, whole)]
    assert kept[0] == kept[1]
    assert {f"checkpoint-{best}", "checkpoint-8"} <= set(kept[0])
    names = ("best_metric", "best_global_step")
    assert [last_state(run)[name] for name in names] == [last_state(whole)[name] for name in names]
    assert last_state(run)["best_global_step"] == best


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
        RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0"),
    ],
)
def test_a_disk_that_fills_up_while_saving(
    error: Exception, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise error

    monkeypatch.setattr(run_module._Training, "_save_result", full)
    with pytest.raises(InputError, match=r"no space left in .* everything before it is whole; free some space"):
        start()
    assert outcome(tmp_path / "run") == "failed"
    monkeypatch.undo()
    assert start(resume=True).steps == 4
    assert outcome(tmp_path / "run") == "finished"


def test_other_errors_are_not_taken_for_a_full_disk(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="shape"), full_disk_told(tmp_path):
        raise RuntimeError("shape mismatch")


def test_memory_that_runs_out_in_a_step(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_in(monkeypatch, 3, lambda: torch.empty(2**56, dtype=torch.uint8))
    with pytest.raises(
        InputError, match=r"out of memory in a step of 128 tokens: .* asked for .*; lower packing.tokens"
    ):
        start(train__save_every=2)
    assert outcome(tmp_path / "run") == "failed"
    monkeypatch.undo()
    assert start(resume=True).steps == 4


def test_the_summary_tells_the_training_loss(start: Start) -> None:
    summary = start()
    assert summary.loss_first is not None
    assert summary.loss_last is not None
    assert summary.loss_last < summary.loss_first
    assert {"loss_first", "loss_last"} <= summary.to_dict().keys()


def test_a_signal_while_the_result_is_saved_changes_nothing(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = run_module._Training._save_result

    def signalled(training: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        save(training)

    monkeypatch.setattr(run_module._Training, "_save_result", signalled)
    assert not start().interrupted
    assert outcome(tmp_path / "run") == "finished"
    assert weights(tmp_path / "run")


def test_a_warm_up_longer_than_the_run_is_told(start: Start) -> None:
    with pytest.raises(InputError, match=r"warmup"):
        start(train__steps=None, train__epochs=1, train__warmup=1000)


def test_what_a_short_run_and_local_data_make_of_settings_is_told(start: Start, tmp_path: Path) -> None:
    start(train__warmup=0.03, data__stream=True)
    told = {one["name"]: one for one in json.loads((tmp_path / "run" / "run.json").read_text())["decisions"]}
    assert told["warm-up"]["reason"].startswith("the first of 4 steps has a learning rate of 0")
    assert read_records(tmp_path / "run").steps[0].learning_rate == 0.0
    assert not told["stream"]["on"]
    assert told["stream"]["reason"].startswith(f"{tmp_path / 'rows.jsonl'} lies here")


def test_nothing_is_told_where_neither_applies(start: Start, tmp_path: Path) -> None:
    start()
    names = {one["name"] for one in json.loads((tmp_path / "run" / "run.json").read_text())["decisions"]}
    assert "packing" in names
    assert names.isdisjoint({"warm-up", "stream"})
    assert idle_start(TrainOptions(warmup=0.03), 10) is not None
    assert idle_start(TrainOptions(warmup=0.03), 11) is None


def test_the_adapter_tells_where_it_comes_from(start: Start, tmp_path: Path) -> None:
    start()
    card = (tmp_path / "run" / "adapter" / "README.md").read_text()
    assert "library_name: peft" in card
    assert f"# Adapter for {tmp_path / 'base'}" in card
    assert "learning_rate: 0.01" in card
