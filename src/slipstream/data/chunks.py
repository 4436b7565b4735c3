"""What becomes of a chunk of rows: rendered, tokenised, cut to length, booked.

A chunk needs nothing of the chunks before it and leaves its accounts with its result, so chunks can be made in any
process; `tokens.tokenise` puts results and accounts together in order. Steps: 1. `normalise` and `Renderer.render` give
text and the learned characters; 2. `Encoder.encode` tokenises the chunk at once and carries characters over to tokens;
3. `_cut` applies ``overlong``; 4. the pieces become one Arrow batch.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from slipstream.data.account import Books
from slipstream.data.cache import int32_lists
from slipstream.data.encode import Encoded, Encoder
from slipstream.data.formats import normalise
from slipstream.data.learn import Rendered
from slipstream.data.rows import DataOptions, RawRow, RowError
from slipstream.errors import InputError

CHUNK_ROWS = 512
CHUNK_CHARACTERS = 4_000_000
NAMED = 5
"""Rows that a message names."""

Piece = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
"""``input_ids`` and ``labels`` of one document."""


@dataclass
class Made:
    """Documents, and the accounts of the rows they were made from."""

    rows: int = 0
    batch: pa.RecordBatch | None = None
    books: Books = field(default_factory=Books)
    faults: list[str] = field(default_factory=list)
    """The first bad rows, each with its place and reason."""
    overlong: list[str] = field(default_factory=list)
    """The first rows that are too long, each with its place and length."""
    remedies: dict[str, None] = field(default_factory=dict)
    """What could be done about bad rows, in the order in which they were met."""

    def add(self, other: "Made") -> None:
        """Adds the accounts (not the documents) of rows that come after these."""
        self.rows += other.rows
        self.books.add_books(other.books)
        self.faults = [*self.faults, *other.faults][:NAMED]
        self.overlong = [*self.overlong, *other.overlong][:NAMED]
        self.remedies.update(other.remedies)


@dataclass(frozen=True)
class ChunkMaker:
    """Makes the documents of chunks of one source; it can be sent to another process."""

    source: str
    name: str
    """The format of its rows."""
    options: DataOptions
    encoder: Encoder
    max_length: int

    def __call__(self, chunk: Sequence[RawRow]) -> Made:
        """The chunk's documents. Raises ``InputError`` for what concerns all rows, e.g. a template that can't be."""
        made = Made(rows=len(chunk))
        made.books.add(rows_read=len(chunk))
        made.batch = _batch(
            [piece for row, encoded in self._encoded(chunk, made) for piece in self._pieces(row, encoded, made)]
        )
        return made

    def _encoded(self, chunk: Sequence[RawRow], made: Made) -> Iterator[tuple[RawRow, Encoded]]:
        """The chunk's rows that could be encoded, in order; the others are booked."""
        texts = [self._rendered(row) for row in chunk]
        results = iter(self.encoder.encode([text for text in texts if isinstance(text, Rendered)]))
        for row, text in zip(chunk, texts, strict=True):
            result = next(results) if isinstance(text, Rendered) else text
            if isinstance(result, RowError):
                _fault(made, row, result.reason)
                made.remedies.update({result.remedy: None} if result.remedy else {})
            else:
                yield row, result

    def _rendered(self, row: RawRow) -> Rendered | RowError:
        try:
            return self.encoder.renderer.render(normalise(row, self.name, self.options.fields))
        except RowError as fault:
            return fault
        except InputError as error:
            raise InputError(f"{self.source}: {row.place}: {error}") from error

    def _pieces(self, row: RawRow, encoded: Encoded, made: Made) -> list[Piece]:
        """The documents of one row: none, one, or several; every token of it is booked."""
        size = len(encoded.ids)
        cut = self._cut(row, encoded, made)
        if cut is None:
            return []
        pieces = [piece for piece in cut if (piece[1] != -100).any()]
        if not pieces:
            within = f" in its first {self.max_length:,} tokens" if size > self.max_length else ""
            _fault(made, row, f"nothing to learn{within}", size)
            return []
        kept = sum(len(ids) for ids, _ in pieces)
        reached = sum(len(ids) for ids, _ in cut)
        made.books.add(
            rows_kept=1,
            rows_cut=int(reached < size),
            rows_split=int(len(cut) > 1),
            documents=len(pieces),
            tokens=kept,
            tokens_learned=sum(int((labels != -100).sum()) for _, labels in pieces),
            tokens_cut=size - reached,
            tokens_dropped=reached - kept,
        )
        return pieces

    def _cut(self, row: RawRow, encoded: Encoded, made: Made) -> list[Piece] | None:
        """The row in pieces of at most ``max_length`` tokens; none where it is left out."""
        size, limit = len(encoded.ids), self.max_length
        if size <= limit or self.options.overlong == "truncate":
            return [_piece(encoded, 0, limit)]
        if self.options.overlong == "split":
            return [_piece(encoded, at, at + limit) for at in range(0, size, limit)]
        made.books.add(rows_dropped=1, tokens_dropped=size)
        if self.options.overlong == "error" and len(made.overlong) < NAMED:
            made.overlong.append(f"{row.place}: {size:,} tokens")
        return None


def in_chunks(rows: Iterable[RawRow]) -> Iterator[list[RawRow]]:
    """Rows in groups that are bounded in number and in text: a token takes far more memory than its characters."""
    group: list[RawRow] = []
    size = 0
    for row in rows:
        group.append(row)
        size += _characters(row.fields)
        if len(group) == CHUNK_ROWS or size >= CHUNK_CHARACTERS:
            yield group
            group, size = [], 0
    if group:
        yield group


def _characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_characters, value.values()))
    return sum(map(_characters, value)) if isinstance(value, list) else 0


def _fault(made: Made, row: RawRow, reason: str, tokens: int = 0) -> None:
    made.books.add_bad(row.number, f"{row.file}: {reason}" if row.file else reason, tokens)
    if len(made.faults) < NAMED:
        made.faults.append(f"{row.place}: {reason}")


def _piece(encoded: Encoded, start: int, end: int) -> Piece:
    ids = encoded.ids[start:end]
    labels = np.where(encoded.learned[start:end], ids, -100)
    labels[:1] = -100
    return ids, labels


def _batch(pieces: Sequence[Piece]) -> pa.RecordBatch:
    lengths = np.array([len(ids) for ids, _ in pieces], dtype=np.int64)
    nothing = np.zeros(0, dtype=np.int64)
    columns = [np.concatenate([nothing, *(piece[i] for piece in pieces)]) for i in (0, 1)]
    return pa.RecordBatch.from_arrays(
        [int32_lists(column, lengths) for column in columns], names=["input_ids", "labels"]
    )
