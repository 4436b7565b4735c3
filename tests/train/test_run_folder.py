"""Folders that appear whole, and what a killed process left being put right."""

import os
import threading
from pathlib import Path

import pytest

from slipstream import InputError
from slipstream.train import run_folder
from slipstream.train.run_folder import RunFolder, discard, publish, staging_for


def fill(target: Path, text: str) -> None:
    staged = staging_for(target)
    staged.mkdir()
    (staged / "file").write_text(text)


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def test_a_folder_appears_whole_and_replaces_the_old_one(tmp_path: Path) -> None:
    target = tmp_path / "run/adapter"
    fill(target, "old")
    assert not target.exists()
    publish(target)
    (target / "only in the old one").touch()
    fill(target, "new")
    assert (target / "file").read_text() == "old"
    publish(target)
    assert names(tmp_path / "run") == ["adapter", "adapter/file"]
    assert (target / "file").read_text() == "new"


@pytest.mark.parametrize("stopped_at", ["fsync", "rename"])
@pytest.mark.parametrize("there", [True, False])
def test_stopped_on_the_way_the_old_one_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped_at: str, there: bool
) -> None:
    run = RunFolder(tmp_path / "run")
    if there:
        fill(run.adapter, "old")
        publish(run.adapter)
    fill(run.adapter, "new")

    inner = os.rename

    def stop(source: object, *target: Path) -> None:
        if stopped_at == "fsync" or ".saving" in str(source):
            raise InterruptedError
        inner(source, *target)  # type: ignore[call-overload]

    with monkeypatch.context() as patch:
        patch.setattr(os, stopped_at, stop)
        with pytest.raises(InterruptedError):
            publish(run.adapter)
    assert run.adapter.exists() == (there and stopped_at == "fsync")
    run.clean()
    assert names(run.path) == (["adapter", "adapter/file"] if there else [])
    if there:
        assert (run.adapter / "file").read_text() == "old"


def test_what_is_deleted_goes_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder(tmp_path)
    (run.checkpoints / "checkpoint-3").mkdir(parents=True)
    (run.checkpoints / "checkpoint-3/file").touch()
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", lambda *_, **__: None)
        discard(run.checkpoints / "checkpoint-3")
    assert names(run.checkpoints) == [".removing", ".removing/checkpoint-3", ".removing/checkpoint-3/file"]
    run.clean()
    assert names(run.checkpoints) == []


def test_half_written_files_are_cleaned_away_and_no_others(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for name in (".run.json.12.tmp", ".steps.jsonl.7.tmp", ".report.html.7.tmp"):
        (tmp_path / name).touch()
    (tmp_path / ".mine.tmp").touch()
    run.clean()
    assert names(tmp_path) == [".mine.tmp"]


def test_a_token_is_in_one_folder_and_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "SEEN_WITHIN", 0.05)
    here, there = (RunFolder.create(tmp_path / name) for name in ("here", "there"))
    with here.token() as token, here.token() as another:
        assert token != another
        assert here.holds(token)
        assert not there.holds(token)
        assert not RunFolder(tmp_path / "nowhere").holds(token)
    assert names(here.path) == []


def test_a_token_that_comes_late_is_seen(tmp_path: Path) -> None:
    """As on a file server that shows it some time after it was written."""
    writer = threading.Timer(0.3, (tmp_path / "token").touch)
    writer.start()
    assert not (tmp_path / "token").exists()
    assert RunFolder(tmp_path).holds("token")
    writer.join()


def test_a_token_of_a_killed_process_is_in_nobodys_way(tmp_path: Path) -> None:
    with RunFolder(tmp_path).token() as token:
        assert names(tmp_path) == [token]
        RunFolder.create(tmp_path)
        assert names(tmp_path) == []


def test_a_run_stopped_before_its_first_record_starts_again(tmp_path: Path) -> None:
    (tmp_path / ".run.json.12.tmp").write_text("{")
    with pytest.raises(InputError, match=r"has no run.json.*starts again without --resume"):
        RunFolder.open(tmp_path, resume=True)
    RunFolder.create(tmp_path)
    assert names(tmp_path) == []
