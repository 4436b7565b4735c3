import csv
import re
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from slipstream.bench.document import append_csv, check_writable, command_line, commit, document
from slipstream.errors import InputError


def test_document_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_COMMIT", "abc")
    found = document("packing", torch.device("cpu"), [{"a": 1}], rounds=3)
    assert found["benchmark"] == "packing"
    assert found["commit"] == "abc"
    assert found["rows"] == [{"a": 1}]
    assert found["rounds"] == 3
    assert found["versions"]["torch"] == version("torch")  # torch.__version__ has the build's name behind it
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", found["date"])


def test_commit_without_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLIPSTREAM_COMMIT", raising=False)
    monkeypatch.setenv("PATH", "")
    assert commit() == "unknown"


def test_command_keeps_no_paths() -> None:
    words = ["/x/bin/slipstream", "bench", "packing", "--out", "/y/r.json", "--csv=/z.csv", "--tokens", "128,256"]
    assert command_line(words) == "slipstream bench packing --tokens 128,256"


def test_csv_gets_one_header(tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    append_csv(path, [{"a": 1, "b": 2}])
    append_csv(path, [{"a": 3, "b": None}])
    append_csv(path, [])
    with path.open(newline="") as file:
        assert list(csv.reader(file)) == [["a", "b"], ["1", "2"], ["3", ""]]


def test_csv_of_another_kind_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    path.write_text("x,y\n1,2\n")
    with pytest.raises(InputError, match="name another file"):
        append_csv(path, [{"a": 1}])
    assert path.read_text() == "x,y\n1,2\n"


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    check_writable(tmp_path / "new.json")
    for path in (tmp_path, tmp_path / "missing" / "r.json"):
        with pytest.raises(InputError, match="existing folder"):
            check_writable(path)
