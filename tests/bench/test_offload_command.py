"""``slipstream bench offload``: words in, one JSON document or tables out."""

import json
import sys
from pathlib import Path

import pytest

from slipstream import cli

QUICK = ["--tokens", "64", "--rounds", "2", "--layers", "2"]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["slipstream", "bench", "offload", *words])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return (caught.value.code or 0, *capfd.readouterr())

    return run


def test_json_is_one_document_and_files_are_written(call, tmp_path: Path) -> None:
    code, out, err = call(*QUICK, "--json", "--out", f"{tmp_path}/r.json", "--csv", f"{tmp_path}/r.csv")
    assert code == 0
    (row,) = json.loads(out)["rows"]
    assert row["layers"] == 2
    assert json.loads((tmp_path / "r.json").read_text()) == json.loads(out)
    assert len((tmp_path / "r.csv").read_text().splitlines()) == 7
    assert "nothing was measured" in err


def test_tables_end_with_a_line_for_machines(call) -> None:
    code, out, _ = call(*QUICK, "--part", "all")
    assert code == 0
    last = json.loads(out.splitlines()[-1])
    assert (last["benchmark"], last["predictions"], last["left_out"]) == ("offload", 0, 5)
    assert " holds" not in out
    assert out.count("nothing was measured") == 5
    for shown in (
        "reload c",
        "recompute",
        "auto",
        "0.3739 to 0.4053",
        "+8.40%",
        "one document, 128 tokens",
        "packed, 64",
    ):
        assert shown in out
    assert max(len(line) for line in out.splitlines() if "─" in line) <= 80
    assert "…" not in out


def test_a_case_left_out_is_shown(call) -> None:
    code, out, _ = call(*QUICK, "--host-limit", "0.000001")
    assert code == 0
    assert "left out: activations: offload needs" in out
    assert json.loads(out.splitlines()[-1])["left_out"] == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shape", "tini"], "did you mean tiny"),
        (["--tokens", "12"], "tokens 12 < 64"),
        (["--tokens", "2k"], "--tokens '2k' must be whole numbers"),
        (["--part", "both"], "--part 'both' is none of reload, longest, document, all"),
        (["--mode", "fast"], "--mode 'fast' is none of eager, compiled"),
        (["--cap", "0"], "--cap 0.0 <= 0"),
        (["--out", "/no/such/folder/r.json"], "existing folder"),
    ],
)
def test_bad_words_are_told(call, words: list[str], message: str) -> None:
    code, out, err = call(*words)
    assert code == 2
    assert out == ""
    assert message in err
    assert "Traceback" not in err
