"""What packed rows look like: text, boundaries, learned tokens. For eyes, before a run is paid for.

Tokens are decoded one by one, so a character that is split over tokens shows as a replacement mark; decoding the whole
text would hide where a token begins and whether it is learned. Where the console has no colours to tell by (a pipe, a
file), runs of learned tokens stand in guillemets, which the text itself may hold as well.
"""

from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from slipstream.data.account import counted
from slipstream.data.batch import IGNORE

if TYPE_CHECKING:
    from datasets import Dataset


def preview(rows: "Dataset", tokenizer: Any, *, rows_shown: int, console: Console) -> dict[str, Any]:
    """Print the first ``rows_shown`` rows and return them as plain values.

    Learned tokens are bold and green on a terminal, and stand between ``«`` and ``»`` elsewhere.
    """
    shown = [_row(rows[index], tokenizer) for index in range(min(rows_shown, len(rows)))]
    for index, row in enumerate(shown):
        lengths = [document["tokens"] for document in row["documents"]]
        amounts = f"{counted(len(lengths), 'document')}, {counted(sum(lengths), 'token')}"
        console.print(f"row {index + 1}: {amounts}")
        for number, document in enumerate(row["documents"], start=1):
            tokens = counted(document["tokens"], "token")
            console.print(f"-- document {number}: {tokens}, {document['learned']:,} learned")
            console.print(_styled(document["pieces"]) if console.is_terminal else _marked(document["pieces"]))
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


def _marked(pieces: list[tuple[str, bool]]) -> Text:
    runs = groupby(pieces, key=lambda piece: piece[1])
    texts = ((learned, "".join(piece for piece, _ in run)) for learned, run in runs)
    return Text("".join(f"«{text}»" if learned else text for learned, text in texts))


def _without_pieces(row: dict[str, Any]) -> dict[str, Any]:
    return {"documents": [{k: v for k, v in document.items() if k != "pieces"} for document in row["documents"]]}
