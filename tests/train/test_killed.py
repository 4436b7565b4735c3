"""A run that SIGKILL ended at any moment goes on to the same adapter, bit for bit (``killed.py`` has the moments)."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from killed import MOMENTS, STEPS
from slipstream.train.checkpoint import is_whole
from slipstream.train.records import EvalRecord, StepRecord, read_records

TESTS = Path(__file__).parent.parent
FROM = {
    "between two batches of a step": 4,
    "before an optimizer step": 6,
    "in a line of steps.jsonl": 6,
    "in an evaluation": 6,
    "after the weights": 4,
    "in the optimizer's file": 4,
    "before the random state": 3,
    "before the manifest": 3,
    "in the manifest": 4,
    "before the move": 3,
    "after the move": 4,
    "in a removal": 6,
    "before the result": STEPS,
    "in the result": STEPS,
    "three times": 8,
    "damaged": 6,
}
"""The step each run must go on from: with ``save_every: 3``, and whenever the evaluation was the best."""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("killed")
    paths = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    subprocess.run(
        [sys.executable, str(TESTS / "killed.py"), str(folder)],
        check=True,
        timeout=500,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    return folder


def adapter(killed: Path, name: str) -> bytes:
    return (killed / "runs" / name / "adapter/adapter_model.safetensors").read_bytes()


def values_of(record: StepRecord | EvalRecord) -> dict[str, object]:
    return {key: value for key, value in vars(record).items() if key != "seconds"}


def statuses(killed: Path, name: str) -> list[int]:
    told: dict[str, list[int]] = json.loads((killed / "told.json").read_text())
    return told[name]


def log(killed: Path, name: str) -> str:
    return (killed / f"{name}.log").read_text()


@pytest.mark.parametrize("name", FROM)
def test_it_goes_on_to_the_same_adapter(killed: Path, name: str) -> None:
    attempts = len(MOMENTS.get(name, [None]))
    assert statuses(killed, name) == [-9] * attempts + [0], log(killed, name)
    assert re.findall(r"going on from step (\d+)", log(killed, name))[-1] == str(FROM[name])
    assert adapter(killed, name) == adapter(killed, "never")


@pytest.mark.parametrize("name", FROM)
def test_its_records_are_complete_and_none_is_there_twice(killed: Path, name: str) -> None:
    whole, records = read_records(killed / "runs/never"), read_records(killed / "runs" / name)
    assert [step.step for step in records.steps] == list(range(1, STEPS + 1))
    assert [values_of(step) for step in records.steps] == [values_of(step) for step in whole.steps]
    assert [evaluation.step for evaluation in records.evals] == [0, 4, 8, 11]
    assert [values_of(evaluation) for evaluation in records.evals] == [values_of(item) for item in whole.evals]
    assert records.problems == []
    for key in ("eval_before", "eval_after", "best", "outcome"):
        assert records.run[key] == whole.run[key]
    assert records.run["outcome"] == "finished"
    assert records.run["eval_before"] is not None


@pytest.mark.parametrize("name", FROM)
def test_nothing_half_is_left(killed: Path, name: str) -> None:
    run, whole = killed / "runs" / name, killed / "runs/never"
    assert sorted(path.relative_to(run) for path in run.rglob("*")) == sorted(
        path.relative_to(whole) for path in whole.rglob("*")
    )
    checkpoints = list((run / "checkpoints").iterdir())
    assert len(checkpoints) == 2
    assert all(is_whole(checkpoint) for checkpoint in checkpoints)


def test_a_damaged_checkpoint_is_named(killed: Path) -> None:
    told = "checkpoint-8 is damaged (optimizer.pt holds other bytes than were saved); passed over"
    assert log(killed, "damaged").count(told) == 1
    assert "damaged" not in log(killed, "before the manifest")  # it never had its name


def test_a_line_that_was_cut_is_told_once(killed: Path) -> None:
    told = r"steps\.jsonl: line \d was cut off while it was written; it is left out; going on from checkpoint-6: the"
    assert len(re.findall(told, log(killed, "in a line of steps.jsonl"))) == 1
    assert "steps.jsonl" not in log(killed, "before the manifest")


def test_one_that_was_stopped_too_early_is_told_what_to_do(killed: Path) -> None:
    assert statuses(killed, "too early") == [-9, 2]
    assert json.loads((killed / "runs/too early/run.json").read_text())["outcome"] == "running"
    assert re.search(
        r"too early/checkpoints' holds no whole checkpoint to resume from: the run was stopped before its first; "
        r"delete the run's folder or choose another output, and start again without --resume \(set train.save_every",
        log(killed, "too early"),
    )


def test_without_the_random_state_the_adapter_would_be_another(killed: Path) -> None:
    """Or else dropout did nothing here, and the comparisons above would say less than they seem to."""
    name = "without its random state"
    assert statuses(killed, name) == [-9, 0]
    assert adapter(killed, name) != adapter(killed, "never")
