"""Rows to documents of tokens, with what is learned of each; once, then from disk.

Rows are read one after another, worked on in chunks by all cores (`chunks.ChunkMaker`, `workers.in_order`), and their
documents written to disk in order (`ArrowCache`); a bounded number of rows is in memory, whatever the set's size. The
alternative, `datasets.map` with several processes, loses row numbers and mends what differs between rows into one
schema.

Labels are ids where learned and -100 elsewhere, not yet shifted; a document's first label is always -100.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from slipstream.data.account import Account, counted
from slipstream.data.cache import ArrowCache, CacheEntry, digest
from slipstream.data.chunks import ChunkMaker, Made, in_chunks
from slipstream.data.encode import Encoder, tokenizer_digest
from slipstream.data.formats import recognise
from slipstream.data.learn import Renderer, renderer_for
from slipstream.data.rows import DataOptions, RawRow, Rows, read_rows
from slipstream.data.workers import in_order
from slipstream.errors import InputError

if TYPE_CHECKING:
    import datasets

_FORMAT = 1
"""Raised whenever documents come out differently for the same input; it is part of the cache key."""


Progress = Callable[[int, int | None], None]


@dataclass(frozen=True)
class TokenisedSet:
    """The documents of one source."""

    entry: CacheEntry
    """The documents on disk."""
    account: Account
    files: tuple[str, ...] = ()
    """The files that were read, where the source is a folder."""

    @property
    def documents(self) -> "datasets.Dataset":
        """``input_ids`` and ``labels``, lists of int32 of equal length, one row a document."""
        return self.entry.dataset

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """The number of tokens of every document, in order."""
        return self.entry.list_lengths("input_ids")

    @cached_property
    def content(self) -> str:
        """A fingerprint of every document's tokens and labels: a second or two for each gigabyte of them."""
        return self.entry.content_digest(("input_ids", "labels"))


def tokenise(
    source: str,
    options: DataOptions,
    tokenizer: Any,
    *,
    max_length: int,
    progress: Progress | None = None,
    cache_dir: Path | None = None,
) -> TokenisedSet:
    """The rows of ``source`` as documents of at most ``max_length`` tokens.

    ``progress`` is called with the number of rows read so far and of all, None where only reading them tells (not at
    all where the cache has the documents).
    ``cache_dir`` takes the place of the `datasets` cache. Raises `InputError`: source missing or empty, format not
    recognised, bad or overlong rows that the options don't allow, no document left, disk full.
    """
    if max_length < 2:
        raise InputError(f"data.max_length is {max_length}; at least 2, since the first token has nothing before it")
    rows = read_rows(source, stream=options.stream)
    first = next((row for row in rows if row.fields is not None), None)
    if first is None:
        raise InputError(f"{source}: no row can be read; the first fault: {next(iter(rows)).fault}")
    name = _recognised(source, first, options)
    renderer = renderer_for(tokenizer, name, options.chat_template, options.learn)
    key = _key(rows, name, options, renderer, max_length)
    cache = ArrowCache.at(cache_dir)
    entry = cache.find(key)
    if entry is None:
        maker = _Maker(ChunkMaker(source, name, options, Encoder(renderer), max_length), progress)
        note: dict[str, Any] = {}
        entry = cache.write(key, maker.batches(rows, note), note)
    return TokenisedSet(entry, Account.from_json(entry.note), rows.files)


def _recognised(source: str, first: RawRow, options: DataOptions) -> str:
    try:
        return recognise(first, options)
    except InputError as error:
        raise InputError(f"{source}: {error}") from error


def _key(rows: Rows, name: str, options: DataOptions, renderer: Renderer, max_length: int) -> str:
    how = [name, sorted(options.fields.items()), options.overlong, options.bad_rows, renderer.learn, max_length]
    templates = [renderer.template, renderer.tool_template]
    return digest("documents", _FORMAT, rows.fingerprint, how, templates, tokenizer_digest(renderer.tokenizer))


class _Maker:
    """Puts the chunks of one source together and keeps the books."""

    def __init__(self, make: ChunkMaker, progress: Progress | None) -> None:
        self.make, self.progress, self.total = make, progress, Made()

    def batches(self, rows: Rows, note: dict[str, Any]) -> Iterator[pa.RecordBatch]:
        """Arrow batches of documents; fills ``note`` with the account at the end, or refuses what isn't allowed."""
        for made in in_order(self.make, in_chunks(rows)):
            self.total.add(made)
            yield made.batch
            if self.progress is not None:
                self.progress(self.total.rows, rows.count)
        self._refuse()
        note.update(self.total.books.closed().as_json())

    def _refuse(self) -> None:
        """Raises `InputError` for bad and overlong rows that the options don't allow, or when nothing is left."""
        account, options, total = self.total.books.closed(), self.make.options, self.total
        source, max_length = self.make.source, self.make.max_length
        bad = _first(total.faults, account.rows_bad)
        if account.rows_bad and options.bad_rows == "error":
            count = counted(account.rows_bad, "bad row")
            mend = ["mend it" if account.rows_bad == 1 else "mend them", *total.remedies]
            raise InputError(f"{source}: {count}; {bad}; {', '.join(mend)}, or set data.bad_rows: skip")
        if account.rows_dropped and options.overlong == "error":
            count = f"{counted(account.rows_dropped, 'row')} longer than max_length {max_length:,}"
            raise InputError(
                f"{source}: {count}; {_first(total.overlong, account.rows_dropped)}; "
                "raise data.max_length (and packing.tokens), or set data.overlong: truncate, drop or split"
            )
        if not account.documents:
            why = f"{account.rows_dropped:,} dropped as longer than {max_length:,} tokens, {account.rows_bad:,} bad"
            raise InputError(
                f"{source}: nothing is left of {counted(account.rows_read, 'row')}: {why}"
                + (f" ({'; '.join([bad, *total.remedies])})" if bad else "")
            )


def _first(named: list[str], count: int) -> str:
    return "; ".join(named) + (f"; and {count - len(named):,} more" if count > len(named) else "")
