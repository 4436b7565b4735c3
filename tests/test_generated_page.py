"""What the scripts that write pages share: writing, comparing, tables."""

from pathlib import Path

import pytest

from slipstream.generated_page import markdown_table, page_command


def test_written_once_it_is_up_to_date(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "docs" / "x.md"
    target.parent.mkdir()

    def run(text: str, *words: str) -> int:
        return page_command("About it.", target, "docs/x.py", lambda: text, words)

    assert run("one", "--check") == 1
    assert not target.exists()
    assert capsys.readouterr().err == "docs/x.md is not what docs/x.py writes; run it\n"
    assert run("one") == 0
    assert target.read_text() == "one"
    assert run("one", "--check") == 0
    assert run("two", "--check") == 1
    assert target.read_text() == "one"


def test_bars_in_cells_are_no_columns() -> None:
    assert markdown_table(["a", "b"], [["x|y", "z"]]) == "| a | b |\n| --- | --- |\n| x\\|y | z |\n"
