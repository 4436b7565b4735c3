"""Rows to documents of tokens, with what is learned of each; once, then from disk.

Per chunk of rows: 1. `normalise` and `Renderer.render` give text and the learned characters; 2. `Encoder.encode`
tokenises the chunk at once and carries characters over to tokens; 3. `_Maker._cut` applies ``overlong``; 4. the pieces
become one Arrow batch, which `ArrowCache` writes. Tokenising a chunk at a time (a fast tokenizer spreads it over
cores) bounds memory; the alternative, `datasets.map` with several processes, is faster for sets of many millions of
rows, but loses row numbers and mends what differs between rows into one schema.

Labels are ids where learned and -100 elsewhere, not yet shifted; a document's first label is always -100.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from slipstream.data.account import Account, Books, counted
from slipstream.data.cache import ArrowCache, digest, int32_lists
from slipstream.data.encode import Encoded, Encoder, tokenizer_digest
from slipstream.data.formats import normalise, recognise
from slipstream.data.learn import Rendered, Renderer, renderer_for
from slipstream.data.packing import document_lengths
from slipstream.data.rows import DataOptions, RawRow, RowError, Rows, read_rows
from slipstream.errors import InputError

_FORMAT = 1
"""Raised whenever documents come out differently for the same input; it is part of the cache key."""
_CHUNK_ROWS = 512
_CHUNK_CHARACTERS = 4_000_000
_NAMED = 5


@dataclass(frozen=True)
class TokenisedSet:
    """The documents of one source."""

    documents: datasets.Dataset
    """``input_ids`` and ``labels``, lists of int32 of equal length, one row a document."""
    account: Account
    files: tuple[str, ...] = ()
    """The files that were read, where the source is a folder."""

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """The number of tokens of every document, in order."""
        return document_lengths(self.documents)


def tokenise(
    source: str,
    options: DataOptions,
    tokenizer: Any,
    *,
    max_length: int,
    progress: Callable[[int], None] | None = None,
    cache_dir: Path | None = None,
) -> TokenisedSet:
    """The rows of ``source`` as documents of at most ``max_length`` tokens.

    ``progress`` is called with the number of rows read so far (not at all where the cache has the documents).
    ``cache_dir`` takes the place of the `datasets` cache. Raises `InputError`: source missing or empty, format not
    recognised, bad or overlong rows that the options don't allow, no document left, disk full.
    """
    if max_length < 2:
        raise InputError(f"data.max_length is {max_length}; at least 2, since the first token has nothing before it")
    rows = read_rows(source)
    first = next((row for row in rows if row.fields is not None), None)
    if first is None:
        raise InputError(f"{source}: no row can be read; the first fault: {next(iter(rows)).fault}")
    name = _recognised(source, first, options)
    renderer = renderer_for(tokenizer, name, options.chat_template, options.learn)
    key = _key(rows, name, options, renderer, max_length)
    cache = ArrowCache.at(cache_dir)
    entry = cache.find(key)
    if entry is None:
        maker = _Maker(source, name, options, Encoder(renderer), max_length, progress)
        note: dict[str, Any] = {}
        entry = cache.write(key, maker.batches(rows, note), note)
    return TokenisedSet(entry.dataset, Account.from_json(entry.note), rows.files)


def _recognised(source: str, first: RawRow, options: DataOptions) -> str:
    try:
        return recognise(first, options)
    except InputError as error:
        raise InputError(f"{source}: {error}") from error


def _key(rows: Rows, name: str, options: DataOptions, renderer: Renderer, max_length: int) -> str:
    how = [name, sorted(options.fields.items()), options.overlong, options.bad_rows, renderer.learn, max_length]
    templates = [renderer.template, renderer.tool_template]
    return digest("documents", _FORMAT, rows.fingerprint, how, templates, tokenizer_digest(renderer.tokenizer))


_Rendered = tuple[RawRow, Rendered | RowError]
Piece = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
"""``input_ids`` and ``labels`` of one document."""


class _Maker:
    """Makes the documents of one source and keeps the books."""

    def __init__(
        self,
        source: str,
        name: str,
        options: DataOptions,
        encoder: Encoder,
        max_length: int,
        progress: Callable[[int], None] | None,
    ) -> None:
        self.source, self.name, self.options, self.encoder, self.max_length = source, name, options, encoder, max_length
        self.progress, self.books, self.rows_read = progress, Books(), 0
        self.faults: list[str] = []
        self.remedies: dict[str, None] = {}
        self.overlong: list[str] = []

    def batches(self, rows: Rows, note: dict[str, Any]) -> Iterator[pa.RecordBatch]:
        """Arrow batches of documents; fills ``note`` with the account at the end, or refuses what isn't allowed."""
        for chunk in _chunks((row, self._rendered(row)) for row in rows):
            self.books.add(rows_read=len(chunk))
            yield _batch([piece for row, encoded in self._encoded(chunk) for piece in self._pieces(row, encoded)])
            self.rows_read += len(chunk)
            if self.progress is not None:
                self.progress(self.rows_read)
        self._refuse()
        note.update(self.books.closed().as_json())

    def _encoded(self, chunk: Sequence[_Rendered]) -> Iterator[tuple[RawRow, Encoded]]:
        """The chunk's rows that could be encoded, in order; the others are booked."""
        results = iter(self.encoder.encode([text for _, text in chunk if isinstance(text, Rendered)]))
        for row, text in chunk:
            result = next(results) if isinstance(text, Rendered) else text
            if isinstance(result, RowError):
                self._fault(row, result.reason)
                self.remedies.update({result.remedy: None} if result.remedy else {})
            else:
                yield row, result

    def _rendered(self, row: RawRow) -> Rendered | RowError:
        try:
            return self.encoder.renderer.render(normalise(row, self.name, self.options.fields))
        except RowError as fault:
            return fault
        except InputError as error:
            raise InputError(f"{self.source}: {row.place}: {error}") from error

    def _pieces(self, row: RawRow, encoded: Encoded) -> list[Piece]:
        """The documents of one row: none, one, or several; every token of it is booked."""
        size = len(encoded.ids)
        cut = self._cut(row, encoded)
        if cut is None:
            return []
        pieces = [piece for piece in cut if (piece[1] != -100).any()]
        if not pieces:
            within = f" in its first {self.max_length:,} tokens" if size > self.max_length else ""
            self._fault(row, f"nothing to learn{within}", size)
            return []
        kept = sum(len(ids) for ids, _ in pieces)
        reached = sum(len(ids) for ids, _ in cut)
        self.books.add(
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

    def _cut(self, row: RawRow, encoded: Encoded) -> list[Piece] | None:
        """The row in pieces of at most ``max_length`` tokens; none where it is left out."""
        size, limit = len(encoded.ids), self.max_length
        if size <= limit or self.options.overlong == "truncate":
            return [_piece(encoded, 0, limit)]
        if self.options.overlong == "split":
            return [_piece(encoded, at, at + limit) for at in range(0, size, limit)]
        self.books.add(rows_dropped=1, tokens_dropped=size)
        if self.options.overlong == "error" and len(self.overlong) < _NAMED:
            self.overlong.append(f"{row.place}: {size:,} tokens")
        return None

    def _fault(self, row: RawRow, reason: str, tokens: int = 0) -> None:
        self.books.add_bad(row.number, f"{row.file}: {reason}" if row.file else reason, tokens)
        if len(self.faults) < _NAMED:
            self.faults.append(f"{row.place}: {reason}")

    def _refuse(self) -> None:
        """Raises `InputError` for bad and overlong rows that the options don't allow, or when nothing is left."""
        account, options = self.books.closed(), self.options
        bad = _first(self.faults, account.rows_bad)
        if account.rows_bad and options.bad_rows == "error":
            count = counted(account.rows_bad, "bad row")
            mend = ["mend it" if account.rows_bad == 1 else "mend them", *self.remedies]
            raise InputError(f"{self.source}: {count}; {bad}; {', '.join(mend)}, or set data.bad_rows: skip")
        if account.rows_dropped and options.overlong == "error":
            count = f"{counted(account.rows_dropped, 'row')} longer than max_length {self.max_length:,}"
            raise InputError(
                f"{self.source}: {count}; {_first(self.overlong, account.rows_dropped)}; "
                "raise data.max_length (and packing.tokens), or set data.overlong: truncate, drop or split"
            )
        if not account.documents:
            why = (
                f"{account.rows_dropped:,} dropped as longer than {self.max_length:,} tokens, {account.rows_bad:,} bad"
            )
            raise InputError(
                f"{self.source}: nothing is left of {counted(account.rows_read, 'row')}: {why}"
                + (f" ({'; '.join([bad, *self.remedies])})" if bad else "")
            )


def _chunks(rows: Iterable[_Rendered]) -> Iterator[list[_Rendered]]:
    """Rows in groups that are bounded in number and in text: a token takes far more memory than its characters."""
    group: list[_Rendered] = []
    size = 0
    for row in rows:
        group.append(row)
        size += len(row[1].text) if isinstance(row[1], Rendered) else 0
        if len(group) == _CHUNK_ROWS or size >= _CHUNK_CHARACTERS:
            yield group
            group, size = [], 0
    if group:
        yield group


def _first(named: list[str], count: int) -> str:
    return "; ".join(named) + (f"; and {count - len(named):,} more" if count > len(named) else "")


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
