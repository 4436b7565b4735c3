"""What packed rows look like: text, boundaries, learned tokens. For eyes, before a run is paid for.

Tokens are decoded one by one, so a character that is split over tokens shows as a replacement mark; decoding the whole
text would hide where a token begins and whether it is learned.
"""

from typing import Any

from datasets import Dataset
from rich.console import Console
from rich.text import Text

from slipstream.data.batch import IGNORE


def preview(rows: Dataset, tokenizer: Any, *, rows_shown: int, console: Console) -> dict[str, Any]:
    """Print the first ``rows_shown`` rows (learned tokens bold and green) and return them as plain values."""
    shown = [_row(rows[index], tokenizer) for index in range(min(rows_shown, len(rows)))]
    for index, row in enumerate(shown):
        lengths = [document["tokens"] for document in row["documents"]]
        console.print(f"row {index + 1}: {len(lengths)} documents, {sum(lengths):,} tokens")
        for number, document in enumerate(row["documents"], start=1):
            console.print(f"-- document {number}: {document['tokens']:,} tokens, {document['learned']:,} learned")
            console.print(_styled(document["pieces"]))
    return {"rows": [_without_pieces(row) for row in shown]}


def _row(row: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    documents, start = [], 0
    for length in row.get("seq_lengths") or [len(row["input_ids"])]:
        span = slice(start, start + length)
        documents.append(_document(row["input_ids"][span], row["labels"][span], tokenizer))
        start += length
    return {"documents": documents}


def _document(ids: list[int], labels: list[int], tokenizer: Any) -> dict[str, Any]:
    pieces = [(tokenizer.decode([token]), label != IGNORE) for token, label in zip(ids, labels, strict=True)]
    learned = [token for token, label in zip(ids, labels, strict=True) if label != IGNORE]
    return {
        "tokens": len(ids),
        "learned": len(learned),
        "text": tokenizer.decode(ids),
        "learned_text": tokenizer.decode(learned),
        "pieces": pieces,
    }


def _styled(pieces: list[tuple[str, bool]]) -> Text:
    text = Text()
    for piece, learned in pieces:
        text.append(piece, style="bold green" if learned else "dim")
    return text


def _without_pieces(row: dict[str, Any]) -> dict[str, Any]:
    return {"documents": [{k: v for k, v in document.items() if k != "pieces"} for document in row["documents"]]}
