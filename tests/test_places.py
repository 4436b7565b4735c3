"""Where things are kept that can be made again."""

import os
from pathlib import Path

import pytest

from slipstream.places import cache_folder, keep_compiled_code


def test_kinds_lie_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder("models") == tmp_path / "slipstream" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder("models") == tmp_path / "home" / ".cache" / "slipstream" / "models"


def test_compiled_code_is_kept_between_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "mine")
    keep_compiled_code()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "mine"
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    keep_compiled_code()
    assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).is_dir()
    assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) == tmp_path / "slipstream" / "compiled"


def test_a_folder_that_can_not_be_made_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "x")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    keep_compiled_code()
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
