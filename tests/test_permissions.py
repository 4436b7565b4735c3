"""What is written whole can be read by whom the umask lets read."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from slipstream.model.gguf import config_folder, model_folder, open_gguf
from slipstream.model.merge import written_whole
from slipstream.permissions import as_umask_says
from slipstream.train.run_folder import publish, staging_for, write_atomically
from tiny_gguf import write_gguf

ALONE, MASKS = 0o600, {0o022: 0o644, 0o002: 0o664, 0o077: 0o600}


@pytest.fixture(params=MASKS, ids=oct)
def expected(request: pytest.FixtureRequest) -> Iterator[int]:
    """The rights of a new file under each umask."""
    before = os.umask(request.param)
    yield MASKS[request.param]
    os.umask(before)


def weights_in(folder: Path) -> Path:
    """A file as safetensors leaves it."""
    file = folder / "model.safetensors"
    save_file({"a": torch.zeros(3)}, file)
    file.chmod(ALONE)  # as newer versions do by themselves
    return file


def rights(file: Path) -> int:
    return file.stat().st_mode & 0o777


def test_rights_are_granted_and_none_taken(expected: int, tmp_path: Path) -> None:
    inside = tmp_path / "deep" / "er"
    inside.mkdir(parents=True)
    file, program = weights_in(inside), inside / "program"
    program.touch()
    program.chmod(0o700)
    (inside / "link").symlink_to(tmp_path / "nowhere")
    as_umask_says(tmp_path)
    assert (rights(file), rights(program)) == (expected, 0o700 | expected)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["deep", "er", "link", "model.safetensors", "program"]


def test_run_folders_and_checkpoints(expected: int, tmp_path: Path) -> None:
    target = tmp_path / "adapter"
    staged = staging_for(target)
    staged.mkdir()
    weights_in(staged)
    publish(target)
    write_atomically(tmp_path / "run.json", "{}")
    assert rights(target / "model.safetensors") == rights(tmp_path / "run.json") == expected


def test_merged_models(expected: int, tmp_path: Path) -> None:
    with written_whole(tmp_path / "out") as built:
        weights_in(built)
    assert rights(tmp_path / "out" / "model.safetensors") == expected


def test_converted_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = os.umask(0o022)
    file = open_gguf(write_gguf(tmp_path / "tiny.gguf"))
    made = [path for folder in (config_folder(file), model_folder(file, "float32")) for path in folder.iterdir()]
    os.umask(before)
    assert {path.name for path in made} >= {"config.json", "model.safetensors"}
    assert {rights(path) for path in made} == {0o644}
