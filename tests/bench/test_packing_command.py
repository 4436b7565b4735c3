"""``slipstream bench packing``: words in, one JSON document or tables out."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from slipstream import cli
from slipstream.bench import packing, packing_command
from slipstream.bench.words import print_whole
from slipstream.errors import InputError

QUICK = ["--tokens", "64", "--rounds", "2", "--layers", "2", "--activations", "keep", "--attention", "sdpa"]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["slipstream", "bench", "packing", *words])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return (caught.value.code or 0, *capfd.readouterr())

    return run


def test_json_is_one_document_and_files_are_written(call, tmp_path: Path) -> None:
    code, out, err = call(
        *QUICK, "--json", "--part", "all", "--out", f"{tmp_path}/r.json", "--csv", f"{tmp_path}/r.csv"
    )
    assert code == 0
    (row,) = json.loads(out)["rows"]
    assert "comparisons" in row
    assert json.loads((tmp_path / "r.json").read_text()) == json.loads(out)
    assert len((tmp_path / "r.csv").read_text().splitlines()) == 10
    assert "prediction" not in out
    assert "predicted" in err


def test_tables_end_with_a_line_for_machines(call) -> None:
    code, out, _ = call(*QUICK)
    assert code == 0
    assert json.loads(out.splitlines()[-1]) | {"held": 0, "noise": 0} == {
        "benchmark": "packing",
        "predictions": 4,
        "held": 0,
        "noise": 0,
        "left_out": 0,
    }
    assert "…" not in out
    for shown in ("stock ?", "wasteful-loop 2+2", "slipstream 1+1", "13.7", "206", "319", "+43.3%", "one layer"):
        assert shown in out


def test_no_library_speaks(tmp_path: Path) -> None:
    """In a process of its own, where warnings go where a user's go."""
    command = [sys.executable, "-m", "slipstream", "bench", "packing", *QUICK, "--part", "layer"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stderr == ""
    assert "1 of 1: tiny, 64 tokens, sdpa, keep" in done.stdout


def test_refused_choices_are_shown(call) -> None:
    code, out, _ = call("--tokens", "64", "--rounds", "2", "--layers", "2", "--attention", "varlen,xformers")
    assert code == 0
    assert out.count("left out:") == 4
    assert json.loads(out.splitlines()[-1])["left_out"] == 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shape", "tini"], "did you mean tiny"),
        (["--tokens", "12"], "tokens 12 < 64"),
        (["--tokens", "2k"], "--tokens '2k' must be whole numbers"),
        (["--part", "both"], "--part 'both' is none of layer, all"),
        (["--activations", "offload"], "--activations 'offload' is none of keep, recompute"),
        (["--activations", ","], "--activations is empty"),
        (["--out", "/no/such/folder/r.json"], "existing folder"),
    ],
)
def test_bad_words_are_told(call, words: list[str], message: str) -> None:
    code, out, err = call(*words)
    assert code == 2
    assert out == ""
    assert message in err
    assert "Traceback" not in err


def test_lists_are_split_at_commas() -> None:
    asked = packing_command.options(shape="tiny, qwen3-0.6b", tokens="128,256", activations="recompute")
    assert asked.shapes == ("tiny", "qwen3-0.6b")
    assert asked.tokens == (128, 256)
    assert asked.recompute == (True,)
    with pytest.raises(InputError):
        packing_command.options(tokens="128;256")


def test_a_run_cut_short_has_written_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure_case(case: packing.Case, *_: object) -> dict[str, object]:
        if case.recompute:
            raise KeyboardInterrupt
        return {"attention": case.choice}

    monkeypatch.setattr(packing, "measure_case", measure_case)
    asked = packing_command.options(shape="tiny", tokens="64", attention="sdpa", layers=2)
    with pytest.raises(KeyboardInterrupt):
        packing_command.run(asked, Console(stderr=True), out=tmp_path / "r.json")
    written = json.loads((tmp_path / "r.json").read_text())
    assert written["rows"] == [{"attention": "sdpa"}]
    assert written["asked"] == ["tiny, 64 tokens, sdpa, keep", "tiny, 64 tokens, sdpa, recompute"]


def test_no_number_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table()
    for name in "abcd":
        table.add_column(name, no_wrap=True)
    table.add_row(*["123456789.12"] * 4)
    print_whole(Console(width=40, soft_wrap=True), table)
    assert capsys.readouterr().out.count("123456789.12") == 4
