"""``slipstream bench experts``: words in, one JSON document or tables out."""

import json
import sys
from pathlib import Path

import pytest

from slipstream import cli
from slipstream.bench import experts, experts_arms

QUICK = ["--tokens", "64", "--rounds", "2", "--layers", "2", "--shape", "tiny-mixture"]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    monkeypatch.setattr(experts_arms, "REPEATS", 1)
    monkeypatch.setattr(experts_arms, "WARMUP", 0)
    monkeypatch.setattr(experts, "COUNTS", (8, 16))

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["slipstream", "bench", "experts", *words])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return (caught.value.code or 0, *capfd.readouterr())

    return run


def test_json_is_one_document_and_files_are_written(call, tmp_path: Path) -> None:
    code, out, err = call(
        *QUICK, "--json", "--part", "layer", "--out", f"{tmp_path}/r.json", "--csv", f"{tmp_path}/r.csv"
    )
    assert code == 0
    (row,) = json.loads(out)["rows"]
    assert row["part"] == "layer"
    assert json.loads((tmp_path / "r.json").read_text()) == json.loads(out)
    assert len((tmp_path / "r.csv").read_text().splitlines()) == 7
    assert "grouped" in err


def test_tables_end_with_a_line_for_machines(call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "step_row", lambda case, _: {"refused": f"{case.layers} layers are too many"})
    code, out, _ = call(*QUICK, "--adapters", "attention")
    assert code == 0
    last = json.loads(out.splitlines()[-1])
    assert (last["benchmark"], last["bars"], last["left_out"]) == ("experts", 1, 1)
    for shown in ("+23%", "+13%", "(16)", "sorted-loop", "bar at most", "left out: 2 layers"):
        assert shown in out


def test_bad_words_are_told_before_anything_is_measured(call) -> None:
    code, out, err = call("--out", "/no/such/folder/r.json")
    assert (code, out) == (2, "")
    assert "existing folder" in err
    assert "Traceback" not in err
