"""Rows of text from files and the hub (to be filled)."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Gt


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Which rows are read and how they become tokens (the recipe's ``data`` section)."""

    train: str
    """A local JSONL, JSON, Parquet or CSV file, a folder of them, or a hub data set (``name``, ``name:split``)."""
    eval: str | None = None
    """Held-out rows, in the same forms; none means no evaluation."""
    format: Literal["auto", "text", "prompt-completion", "instruction", "messages", "conversations"] = "auto"
    """The shape of a row; ``auto`` recognises it by its fields."""
    fields: dict[str, str] = field(default_factory=dict)
    """Names in the data for the names of the format, e.g. ``{prompt: question, completion: answer}``."""
    chat_template: str | None = None
    """A Jinja template (inline, or a path to one) in place of the tokenizer's; ``none`` renders pairs as plain text."""
    max_length: Annotated[int, Gt(1)] | None = None
    """The most tokens a document may have; none means ``packing.tokens``."""
    overlong: Literal["error", "truncate", "drop", "split"] = "error"
    """What becomes of a document longer than ``max_length``."""
    bad_rows: Literal["error", "skip"] = "error"
    """What becomes of a row that is empty, has nothing to learn, or fails to encode."""
    learn: Literal["auto", "all", "completion", "assistant"] = "auto"
    """Which tokens are learned; ``auto``: assistant turns of conversations, completions of pairs, all of text."""
