"""What is learned can be told from the preview on a terminal and in a file."""

import io
from typing import Any

from datasets import Dataset
from rich.console import Console

from slipstream.data.preview import preview
from tiny import tiny_tokenizer


def shown(*, terminal: bool) -> tuple[dict[str, Any], str]:
    """A packed row of two documents, one of them a single token that isn't learned."""
    tokenizer = tiny_tokenizer(eos="</s>")
    ids = tokenizer("abcdez", add_special_tokens=False)["input_ids"]
    assert len(ids) == 6
    labels = [-100, ids[1], ids[2], -100, ids[4], -100]
    rows = Dataset.from_list([{"input_ids": ids, "labels": labels, "seq_lengths": [5, 1]}])
    said = io.StringIO()
    console = Console(file=said, width=200, force_terminal=terminal, color_system="truecolor" if terminal else None)
    return preview(rows, tokenizer, rows_shown=3, console=console), said.getvalue()


def test_a_file_marks_runs_of_learned_tokens_in_text() -> None:
    _, said = shown(terminal=False)
    assert said.splitlines() == [
        "row 1: 2 documents, 6 tokens",
        "-- document 1: 5 tokens, 3 learned",
        "a«bc»d«e»",
        "-- document 2: 1 token, 0 learned",
        "z",
    ]


def test_a_terminal_marks_them_by_colour_alone() -> None:
    _, said = shown(terminal=True)
    assert "«" not in said
    assert "\x1b[1;32mb" in said
    assert "\x1b[2ma" in said


def test_the_values_are_plain_and_unmarked() -> None:
    values, _ = shown(terminal=False)
    first, second = values["rows"][0]["documents"]
    assert first == {"tokens": 5, "learned": 3, "text": "abcde", "learned_text": "bce"}
    assert (second["text"], second["learned"]) == ("z", 0)


def test_one_document_is_singular() -> None:
    said = io.StringIO()
    rows = Dataset.from_list([{"input_ids": [5], "labels": [-100]}])
    preview(rows, tiny_tokenizer(eos="</s>"), rows_shown=1, console=Console(file=said, width=200))
    assert said.getvalue().startswith("row 1: 1 document, 1 token\n-- document 1: 1 token, 0 learned")
