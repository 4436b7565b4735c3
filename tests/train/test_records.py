"""The records of a run: whole at any moment, in order, and never at the price of a sync."""

import dataclasses
import errno
import json
import math
import os
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.errors import InputError
from slipstream.train.records import (
    EvalLog,
    EvalRecord,
    RunFolder,
    StepLog,
    StepRecord,
    from_line,
    read_records,
    to_line,
    write_atomically,
)
from slipstream.train.scalars import ScalarRing

Usage = namedtuple("Usage", "total used free")


def host_fields(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "epoch": step / 10,
        "learning_rate": 2e-4,
        "tokens": 4000,
        "learned_tokens": 1000,
        "documents": 12,
        "padding_tokens": 96,
        "seconds": 0.25,
        "memory_bytes": None,
    }


def scalars(loss: float, grad_norm: float = 1.0) -> dict[str, torch.Tensor]:
    return {"loss": torch.tensor(loss), "grad_norm": torch.tensor(grad_norm)}


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


class FakeEvent:
    """Arrives when told to; waiting makes it arrive and is counted."""

    def __init__(self) -> None:
        self.arrived, self.waited = True, 0

    def record(self, stream: object = None) -> None:
        self.arrived = False

    def query(self) -> bool:
        return self.arrived

    def synchronize(self) -> None:
        self.waited += 1
        self.arrived = True


def ring_of(depth: int) -> tuple[ScalarRing, list[FakeEvent]]:
    events: list[FakeEvent] = []

    def make() -> FakeEvent:
        events.append(FakeEvent())
        return events[-1]

    return ScalarRing(2, depth, make, pin=False), events


# ---------------------------------------------------------------------------------------------------------- the folder


def test_create_makes_an_empty_folder_and_takes_an_empty_one(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "runs" / "first")
    assert folder.path.is_dir()
    assert RunFolder.create(folder.path) == folder


@pytest.mark.parametrize(("outcome", "saved"), [("diverged", True), ("running", False)])
def test_resuming_is_not_advised_where_it_cannot_help(outcome: str, saved: bool, tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run")
    folder.write_run({"started": "2026-05-04T10:00:00", "outcome": outcome})
    if saved:
        (folder.checkpoints / "checkpoint-2").mkdir(parents=True)
    with pytest.raises(InputError, match=rf"holds another run \(.*{outcome}\); choose another output$"):
        RunFolder.create(folder.path)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("config.json", "this one holds a model"),
        ("adapter_config.json", "this one holds an adapter, which a run has below its own folder"),
        ("notes.txt", "this one holds 'notes.txt'"),
        (None, "this one is empty, as a run leaves it that was stopped before its first checkpoint"),
    ],
)
def test_what_is_no_run_is_told_by_what_it_holds(name: str | None, told: str, tmp_path: Path) -> None:
    if name is not None:
        (tmp_path / name).touch()
    with pytest.raises(InputError, match=rf"is not a run .*; give the output folder of a run; {told}$"):
        RunFolder.open(tmp_path)
    with pytest.raises(InputError, match=r"starts again without --resume$"):
        RunFolder.open(tmp_path, resume=True)


def test_create_refuses_another_run_and_leaves_it_alone(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run")
    folder.write_run({"started": "2026-05-04T10:00:00", "outcome": "finished"})
    (folder.checkpoints / "checkpoint-2").mkdir(parents=True)
    before = folder.run_json.read_bytes()
    with pytest.raises(
        InputError, match=r"holds another run \(started 2026-05-04.*finished\).*another output.*--resume"
    ):
        RunFolder.create(folder.path)
    assert folder.run_json.read_bytes() == before


def test_create_refuses_a_folder_with_other_things_in_it(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "zebra").write_text("mine")
    with pytest.raises(InputError, match=r"not empty \('notes.txt' and 1 more\); choose another output"):
        RunFolder.create(tmp_path)


def test_create_refuses_a_file_in_its_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InputError, match="choose another output"):
            RunFolder.create(path)
    assert (tmp_path / "file").read_text() == "mine"


def test_open_wants_a_run(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a folder"):
        RunFolder.open(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"not a run \(it has no run.json\)"):
        RunFolder.open(tmp_path)
    RunFolder(tmp_path).write_run({"format": 1})
    assert RunFolder.open(tmp_path).read_run() == {"format": 1}


@pytest.mark.parametrize("text", ["{", "[1]", ""])
def test_a_damaged_run_is_the_users_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(InputError, match=r"run\.json.*restore it"):
        RunFolder.open(tmp_path).read_run()


def test_places_are_those_of_the_architecture(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    places = [folder.run_json, folder.steps, folder.evals, folder.checkpoints, folder.adapter, folder.report]
    assert [place.name for place in places] == [
        "run.json",
        "steps.jsonl",
        "evals.jsonl",
        "checkpoints",
        "adapter",
        "report.html",
    ]


def test_nan_in_run_json_is_null_and_named(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    folder.write_run({"eval_after": math.nan, "best": {"loss": math.inf}, "shares": [0.5, math.nan]})
    run = json.loads(folder.run_json.read_text(), parse_constant=lambda name: pytest.fail(name))
    assert run["eval_after"] is None
    assert run["nonfinite"] == ["eval_after", "best.loss", "shares.1"]


def test_no_space_left_keeps_the_old_contents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder.create(tmp_path)
    folder.write_run({"outcome": "running"})

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(100, 90, 10))
    with pytest.raises(
        InputError, match=r"no space left for '.*run\.json': 28 bytes needed, 10 bytes .*free.*another output"
    ):
        folder.write_run({"outcome": "finished"})
    assert folder.read_run() == {"outcome": "running"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.json"], "the temporary file is gone"


def test_a_reader_never_sees_a_part(tmp_path: Path) -> None:
    write_atomically(tmp_path / "file", "old contents")
    with (tmp_path / "file").open() as reader:
        write_atomically(tmp_path / "file", "new")
        assert reader.read() == "old contents", "replaced by a move, not written over"
    assert (tmp_path / "file").read_text() == "new"


def test_other_failures_are_not_called_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(handle: int) -> None:
        raise OSError(errno.EIO, "I/O error")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="I/O error"):
        write_atomically(tmp_path / "file", "text")


# ------------------------------------------------------------------------------------------------------------ the lines


def test_a_line_reads_back_as_it_was() -> None:
    record = StepRecord(loss=2.5, grad_norm=0.75, **host_fields(3) | {"memory_bytes": 123})
    assert from_line(StepRecord, to_line(record)) == (record, [])
    evaluation = EvalRecord(step=0, loss=3.25, learned_tokens=10, seconds=1.5)
    assert from_line(EvalRecord, to_line(evaluation)) == (evaluation, [])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_stays_valid_json_and_is_surfaced(tmp_path: Path, value: float) -> None:
    log = StepLog(tmp_path / "steps.jsonl")
    log.push(host_fields(1), scalars(value))
    raw = json.loads((tmp_path / "steps.jsonl").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert raw["loss"] is None
    assert raw["nonfinite"] == {"loss": str(value)}
    assert log.last is not None
    assert str(log.last.loss) == str(value)
    assert str(read_records(tmp_path).steps[0].loss) == str(value)


def test_on_the_cpu_values_are_taken_at_once(tmp_path: Path) -> None:
    log = StepLog(tmp_path / "steps.jsonl")
    loss = torch.tensor(2.0)
    log.push(host_fields(1), {"loss": loss, "grad_norm": torch.tensor(1.0)})
    loss.fill_(9.0)
    assert log.last == StepRecord(loss=2.0, grad_norm=1.0, **host_fields(1))
    assert steps_in(tmp_path / "steps.jsonl") == [1]


def test_push_refuses_a_wrong_or_missing_name_at_once(tmp_path: Path) -> None:
    log = StepLog(tmp_path / "steps.jsonl")
    with pytest.raises(TypeError, match="los"):
        log.push(host_fields(1), {"los": torch.tensor(1.0), "grad_norm": torch.tensor(1.0)})
    with pytest.raises(AssertionError, match="twice"):
        log.push(host_fields(1) | {"loss": 1.0}, scalars(1.0))


def test_lines_come_late_but_in_order(tmp_path: Path) -> None:
    ring, events = ring_of(4)
    log = StepLog(tmp_path / "steps.jsonl", ring)
    for step in (1, 2, 3):
        log.push(host_fields(step), scalars(float(step)))
    assert (steps_in(tmp_path / "steps.jsonl"), log.last) == ([], None)
    events[1].arrived = True
    log.poll()
    assert steps_in(tmp_path / "steps.jsonl") == [], "step 2 waits for step 1"
    events[0].arrived = True
    log.push(host_fields(4), scalars(4.0))
    assert steps_in(tmp_path / "steps.jsonl") == [1, 2]
    assert log.last is not None
    assert (log.last.step, log.last.loss) == (2, 2.0)
    assert sum(event.waited for event in events) == log.waits == 0


def test_drain_waits_for_all(tmp_path: Path) -> None:
    ring, events = ring_of(4)
    log = StepLog(tmp_path / "steps.jsonl", ring)
    for step in (1, 2, 3):
        log.push(host_fields(step), scalars(float(step)))
    events[0].arrived = True
    log.drain()
    assert steps_in(tmp_path / "steps.jsonl") == [1, 2, 3]
    assert [event.waited for event in events] == [0, 1, 1, 0], "what has arrived is not waited for"


def test_a_full_ring_waits_for_the_oldest_and_counts_it(tmp_path: Path) -> None:
    ring, events = ring_of(2)
    log = StepLog(tmp_path / "steps.jsonl", ring)
    for step in range(1, 8):
        log.push(host_fields(step), scalars(float(step), step / 2))
    assert log.waits == 5
    assert len(events) == 2, "slots and events are made once"
    assert steps_in(tmp_path / "steps.jsonl") == [1, 2, 3, 4, 5]
    log.drain()
    records = read_records(tmp_path).steps
    assert [(record.step, record.loss, record.grad_norm) for record in records] == [(s, s, s / 2) for s in range(1, 8)]


def test_no_space_left_for_a_line_keeps_the_lines_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = StepLog(tmp_path / "steps.jsonl")
    log.push(host_fields(1), scalars(1.0))
    before = (tmp_path / "steps.jsonl").read_bytes()
    opened = Path.open

    class Full:
        """A file on a disk that takes seven more bytes."""

        def __init__(self, path: Path) -> None:
            self.file = opened(path, "ab", buffering=0)

        def __enter__(self) -> "Full":
            return self

        def __exit__(self, *error: object) -> None:
            self.file.close()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def write(self, data: bytes) -> int | None:
            return self.file.write(data[:7])

    monkeypatch.setattr(Path, "open", lambda path, *mode, **options: Full(path))
    with pytest.raises(InputError, match=r"no space left for '.*steps\.jsonl'"):
        log.push(host_fields(2), scalars(2.0))
    monkeypatch.undo()
    assert (tmp_path / "steps.jsonl").read_bytes() == before


def test_resume_drops_what_comes_after_the_checkpoint(tmp_path: Path) -> None:
    steps, evals = StepLog(tmp_path / "steps.jsonl"), EvalLog(tmp_path / "evals.jsonl")
    for step in range(1, 8):
        steps.push(host_fields(step), scalars(float(step)))
    for step in (0, 4, 8):
        evals.append(EvalRecord(step, 2.0, 100, 0.5))
    with (tmp_path / "steps.jsonl").open("a") as file:
        file.write('{"step": 4, "epo')
    again = StepLog(tmp_path / "steps.jsonl")
    again.resume(4)
    EvalLog(tmp_path / "evals.jsonl").resume(4)
    assert again.last is not None
    assert again.last.step == 4
    again.push(host_fields(5), scalars(50.0))
    records = read_records(tmp_path)
    assert [(record.step, record.loss) for record in records.steps] == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 50)]
    assert [record.step for record in records.evals] == [0, 4]


def test_resume_before_the_first_step_is_fine(tmp_path: Path) -> None:
    log = StepLog(tmp_path / "steps.jsonl")
    log.resume(0)
    assert log.last is None


# ------------------------------------------------------------------------------------------------------------ read back


def complete_run() -> dict[str, Any]:
    names = ("slipstream", "started", "outcome", "recipe", "versions", "device", "decisions", "data", "packing")
    return {"format": 1, **{name: {} for name in names}}


def test_whole_records_have_no_problems(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run")
    folder.write_run(complete_run())
    StepLog(folder.steps).push(host_fields(1), scalars(1.0))
    records = read_records(folder.path)
    assert (records.problems, records.evals, records.run) == ([], [], complete_run())


def test_a_cut_last_line_and_unknown_fields_are_borne(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run")
    folder.write_run(complete_run())
    lines = [dataclasses.asdict(StepRecord(loss=1.0, grad_norm=1.0, **host_fields(s))) | {"new": "x"} for s in (1, 2)]
    folder.steps.write_text("\n".join(json.dumps(line) for line in lines)[:-20])
    records = read_records(folder.path)
    assert [record.step for record in records.steps] == [1]
    assert records.problems == ["steps.jsonl: line 2 was cut off while it was written; it is left out"]


@pytest.mark.parametrize(
    "line",
    ["nonsense", "[1]", '{"loss": 1.0}', '{"step": 1, "loss": "high"}', '{"step": 1, "nonfinite": {"loss": "x"}}'],
)
def test_a_line_that_is_no_record_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "steps.jsonl").write_text(f"{line}\n")
    records = read_records(tmp_path)
    assert records.steps == []
    assert any(problem.startswith("steps.jsonl: line 1 cannot be read") for problem in records.problems)


def test_an_older_format_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"started": "2026", "outcome": "finished", "recipe": {}}')
    (tmp_path / "steps.jsonl").write_text(
        '{"step": 1, "loss": 2.0, "tokens": 5}\n{"step": 2, "loss": 2.0, "tokens": 5}\n'
    )
    records = read_records(tmp_path)
    assert "run.json has format unknown; this version reads format 1" in records.problems
    assert "run.json lacks slipstream, versions, device, decisions, data, packing" in records.problems
    assert "steps.jsonl: 2 lines lack padding_tokens" in records.problems
    assert math.isnan(records.steps[0].learning_rate)
    assert records.steps[1].tokens == 5


def test_a_folder_with_nothing_has_problems_not_errors(tmp_path: Path) -> None:
    records = read_records(tmp_path)
    assert (records.run, records.steps, records.evals) == ({}, [], [])
    assert len(records.problems) == 2
    assert "steps.jsonl is missing" in records.problems
