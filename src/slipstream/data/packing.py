"""Packing documents into rows of fixed length: best-fit decreasing over the whole set.

Best-fit decreasing places the longest document first, each into the fullest row that still has room. Over a whole set
it comes within a fraction of a percent of the least possible number of rows, where greedy packing in data order leaves
5-15% of every row empty. The price: documents lose their order (rows are shuffled under a seed anyway), and a list of
all rows is in memory, some 40 bytes a document. With a ``window`` of so many consecutive documents each is packed and
shuffled by itself, and only one window's rows are in memory (and 8 bytes a document for its length).

Done one document at a time this is a search a document. Here documents of equal length and rows of equal remaining
room are interchangeable, so one pair (length, room) is moved as one NumPy operation:

    length 3, five documents a b c d e; rows with room 7: [R1, R2], with room 8: [R3]
    the fullest rows that fit have room 7, and each takes 7 // 3 = 2:   R1 <- a b    R2 <- c d
    one document is left, and the next room is 8:                       R3 <- e
    rooms are now 1: [R1, R2], 5: [R3]

Steps: 1. `_checked` lengths; 2. `_Rooms` moves groups, longest first; 3. `_rows_of` collects the rows; 4. `packed`
shuffles them; 5. `pack_dataset` writes them, a bounded number at a time.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from annotated_types import Gt

from slipstream.data.cache import ArrowCache, digest, int32_lists
from slipstream.errors import InputError

if TYPE_CHECKING:
    import datasets

Ints = npt.NDArray[np.int64]

_FORMAT = 2
"""Raised whenever packed rows come out differently for the same input; it is part of the cache key."""
_DOCUMENTS_AT_ONCE = 4096
_MASKS = ("completion_mask", "assistant_masks")


MOST_TOKENS = 2**31 - 1
"""Of a batch: `cu_seqlens` are 32-bit."""


@dataclass(frozen=True, kw_only=True)
class PackingOptions:
    """How documents share rows (the recipe's ``packing`` section)."""

    enabled: bool = True
    """Pack; off trains one document a row, padded (for models that cannot be packed)."""
    tokens: Annotated[int, Gt(1)] = 4096
    """Tokens in one packed row."""
    rows: Annotated[int, Gt(0)] = 1
    """Packed rows in one batch; they lie end to end, so a batch has ``tokens * rows`` tokens."""
    window: Annotated[int, Gt(0)] | None = None
    """Pack only among this many consecutive documents, which bounds memory for sets of many millions; null packs the
    whole set, and fills rows best."""


@dataclass(frozen=True)
class PackingReport:
    """What packing achieved, and what padding would have cost. Sizes are in tokens."""

    documents: int
    tokens: int
    rows: int
    capacity: int
    fill: float
    """tokens / (rows * capacity), between 0 and 1."""
    fill_without_last: float
    """The same without the emptiest row, which holds what was left over; 1.0 where there is one row only."""
    padding_tokens: int
    """What the rows leave empty."""
    padded_tokens: int
    """What padding would have computed: documents in data order, in batches of as many documents as a packed row holds
    on average (so that a step learns from as many), each padded to the longest of its batch."""
    enabled: bool = True
    """Whether documents are packed. Where not, each is a row, ``padding_tokens`` are those that its batch pads it with,
    and ``fill`` is the documents' share of ``padded_tokens``."""

    @property
    def padded_ratio(self) -> float:
        """Tokens that padding would have computed over those that packed rows compute."""
        return self.padded_tokens / max(1, self.rows * self.capacity)

    @classmethod
    def of(
        cls, lengths: Sequence[int] | npt.NDArray[Any], rows: Iterable[Sequence[int]], capacity: int
    ) -> "PackingReport":
        """The report on ``rows`` (indices into ``lengths``) of at most ``capacity`` tokens each."""
        sizes = _checked(lengths, capacity)
        fillings = np.fromiter((int(sizes[list(row)].sum()) for row in rows), dtype=np.int64)
        count = len(fillings)
        tokens, room = int(sizes.sum()), count * capacity
        assert int(fillings.sum()) == tokens, "every document lies in exactly one row"
        fullest = int(fillings.sum() - fillings.min()) if count > 1 else 0
        return cls(
            documents=len(sizes),
            tokens=tokens,
            rows=count,
            capacity=capacity,
            fill=tokens / room if count else 1.0,
            fill_without_last=fullest / (room - capacity) if count > 1 else 1.0,
            padding_tokens=room - tokens,
            padded_tokens=_padded_tokens(sizes, max(1, round(len(sizes) / max(1, count)))),
        )

    @classmethod
    def unpacked(cls, lengths: Sequence[int] | npt.NDArray[Any], batch: int, capacity: int) -> "PackingReport":
        """The report on documents that are padded in data order, ``batch`` at a time."""
        sizes = _checked(lengths, capacity)
        tokens, padded = int(sizes.sum()), _padded_tokens(sizes, batch)
        fill = tokens / padded if padded else 1.0
        return cls(
            documents=len(sizes),
            tokens=tokens,
            rows=len(sizes),
            capacity=capacity,
            fill=fill,
            fill_without_last=fill,
            padding_tokens=padded - tokens,
            padded_tokens=padded,
            enabled=False,
        )


def pack(
    lengths: Sequence[int] | npt.NDArray[Any], capacity: int, *, seed: int = 0, window: int | None = None
) -> list[list[int]]:
    """Rows of indices into ``lengths``, each of at most ``capacity`` tokens, by best-fit decreasing.

    Rows come shuffled, the same way for the same ``seed``; within a row, indices ascend. ``window`` packs and shuffles
    each so many consecutive documents by themselves. Raises `InputError` for a length below 1 or above ``capacity``.
    """
    return list(packed(lengths, capacity, seed=seed, window=window))


def packed(
    lengths: Sequence[int] | npt.NDArray[Any], capacity: int, *, seed: int = 0, window: int | None = None
) -> Iterator[list[int]]:
    """The rows of `pack`, one after another; with a ``window`` no more than one window's are in memory."""
    if window is not None and window < 1:
        raise InputError(f"packing.window is {window}; it must be at least 1, or null to pack the whole set")
    sizes = _checked(lengths, capacity)
    random = np.random.default_rng(seed)
    step = window or max(1, len(sizes))
    for at in range(0, len(sizes), step):
        rows = _best_fit(sizes[at : at + step], capacity, at)
        yield from (rows[i] for i in random.permutation(len(rows)).tolist())


def pack_dataset(
    dataset: "datasets.Dataset",
    tokens: int,
    *,
    seed: int = 0,
    window: int | None = None,
    cache_dir: Path | None = None,
) -> "datasets.Dataset":
    """Packed rows of at most ``tokens`` tokens: ``input_ids``, ``labels``, ``seq_lengths`` and ``position_ids``, all
    lists of int32.

    The documents of a row lie one after another; ``seq_lengths`` holds their lengths. ``position_ids`` count each
    document's tokens from 0: trainers that drop columns keep them, so that a row which has lost its lengths shows it
    (`collate` refuses it). ``dataset`` needs ``input_ids``; its ``labels`` are kept, otherwise every token is learned
    that ``completion_mask`` and ``assistant_masks`` (where they exist) allow. The label at each document's first token
    is -100: nothing stands before it to predict it from. Other columns are left behind. The rows are written to the
    data sets' cache (or ``cache_dir``) and mapped from there, so memory stays bounded.
    """
    return pack_rows(dataset, tokens, seed=seed, window=window, cache_dir=cache_dir, positions=True)


def pack_rows(
    dataset: "datasets.Dataset",
    tokens: int,
    *,
    seed: int = 0,
    window: int | None = None,
    cache_dir: Path | None = None,
    positions: bool = False,
) -> "datasets.Dataset":
    """The rows of `pack_dataset`, without ``position_ids`` for a trainer that is known to keep ``seq_lengths``: they
    would be a third of what is written.
    """
    columns = _columns(dataset)
    extra = ["position_ids"] if positions else []
    key = digest("packed", _FORMAT, dataset._fingerprint, sorted(columns), tokens, seed, window, *extra)
    cache = ArrowCache.at(cache_dir)
    found = cache.find(key)
    if found is None:
        rows = packed(document_lengths(dataset), tokens, seed=seed, window=window)
        found = cache.write(key, _packed_batches(dataset.select_columns(columns), rows, positions), {})
    return found.dataset


def document_lengths(dataset: "datasets.Dataset") -> Ints:
    """The number of tokens of every document, in order; reads a bounded number at a time."""
    parts = [
        pc.list_value_length(table.column("input_ids")).to_numpy().astype(np.int64)
        for table in dataset.select_columns(["input_ids"]).with_format("arrow").iter(_DOCUMENTS_AT_ONCE)
    ]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def _columns(dataset: "datasets.Dataset") -> list[str]:
    import datasets

    if not isinstance(dataset, datasets.Dataset):
        raise InputError(f"pack_dataset takes a datasets.Dataset, not {type(dataset).__name__}: lengths must be known")
    names: list[str] = dataset.column_names
    if "input_ids" not in names:
        raise InputError(f"the data set has no input_ids (columns: {', '.join(names) or 'none'}); tokenise it first")
    if "labels" in names:
        return ["input_ids", "labels"]
    return ["input_ids", *(name for name in _MASKS if name in names)]


def _checked(lengths: Sequence[int] | npt.NDArray[Any], capacity: int) -> Ints:
    if capacity < 1:
        raise InputError(f"a row of {capacity} tokens cannot hold a document; set packing.tokens to at least 2")
    given = np.asarray(lengths)
    if given.ndim != 1 or (given.size and not np.issubdtype(given.dtype, np.integer)):
        raise InputError(f"lengths must be a flat list of whole numbers, not shape {given.shape} of {given.dtype}")
    sizes = given.astype(np.int64)
    wrong = np.flatnonzero((sizes < 1) | (sizes > capacity))
    if wrong.size:
        at, more = int(wrong[0]), f" (and {wrong.size - 1:,} more like it)" if wrong.size > 1 else ""
        if sizes[at] < 1:
            raise InputError(f"document {at} has length {sizes[at]}{more}; the least is 1: leave empty documents out")
        raise InputError(
            f"document {at} has {sizes[at]:,} tokens > {capacity:,}, the tokens of a row{more}; "
            "raise packing.tokens or set data.overlong: truncate"
        )
    return sizes


class _Rooms:
    """Rows grouped by their remaining room; ``row_of`` says where each document went."""

    def __init__(self, documents: int, capacity: int) -> None:
        self.capacity, self.rows = capacity, 0
        self.row_of = np.empty(documents, dtype=np.int64)
        self._groups: dict[int, list[Ints]] = {}
        self._open: list[int] = []  # the rooms that have rows, ascending

    def place(self, items: Ints, length: int) -> None:
        """Places documents of one length, each into the fullest row that has room, else into new rows."""
        while len(items):
            at = bisect_left(self._open, length)
            if at == len(self._open):
                self._fill(items, length, self._new_rows(-(-len(items) // (self.capacity // length))), self.capacity)
                return
            room = self._open[at]
            rows = self._take(room, -(-len(items) // (room // length)))
            taken = min(len(items), len(rows) * (room // length))
            self._fill(items[:taken], length, rows, room)
            items = items[taken:]

    def _fill(self, items: Ints, length: int, rows: Ints, room: int) -> None:
        """Fills ``rows`` (of equal room) in turn; only the last may stay with room for another of this length."""
        each = room // length
        self.row_of[items] = np.repeat(rows, each)[: len(items)] if each > 1 else rows
        in_last = len(items) - (len(rows) - 1) * each
        if in_last == each:
            self._give(room - each * length, rows)
        else:
            self._give(room - each * length, rows[:-1])
            self._give(room - in_last * length, rows[-1:])

    def _new_rows(self, count: int) -> Ints:
        self.rows += count
        return np.arange(self.rows - count, self.rows)

    def _take(self, room: int, count: int) -> Ints:
        """At most ``count`` rows of this room; they leave their group."""
        group = self._groups[room]
        rows = group.pop()
        if len(rows) > count:
            group.append(rows[count:])
            rows = rows[:count]
        if not group:
            del self._groups[room]
            del self._open[bisect_left(self._open, room)]
        return rows

    def _give(self, room: int, rows: Ints) -> None:
        if room == 0 or not len(rows):
            return
        if room not in self._groups:
            self._groups[room] = []
            self._open.insert(bisect_left(self._open, room), room)
        self._groups[room].append(rows)


def _best_fit(sizes: Ints, capacity: int, first: int) -> list[list[int]]:
    """Rows of indices (counted from ``first``), in the order in which they were opened."""
    if not len(sizes):
        return []
    narrow = sizes.astype(np.uint16) if capacity < 2**16 else sizes  # 16 bits sort by radix, eight times as fast
    order = np.argsort(narrow, kind="stable")[::-1]
    ordered = sizes[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=0))
    ends = np.append(starts[1:], len(order))
    rooms = _Rooms(len(sizes), capacity)
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        rooms.place(order[start:end], int(ordered[start]))
    return _rows_of(rooms.row_of, rooms.rows, first)


def _rows_of(row_of: Ints, rows: int, first: int) -> list[list[int]]:
    by_row = (np.argsort(row_of, kind="stable") + first).tolist()
    ends = np.cumsum(np.bincount(row_of, minlength=rows)).tolist()
    return [by_row[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def _padded_tokens(sizes: Ints, batch: int) -> int:
    if not len(sizes):
        return 0
    starts = np.arange(0, len(sizes), batch)
    counts = np.diff(np.append(starts, len(sizes)))
    return int((np.maximum.reduceat(sizes, starts) * counts).sum())


def _packed_batches(
    dataset: "datasets.Dataset", rows: Iterable[list[int]], positions: bool
) -> Iterator[pa.RecordBatch]:
    """Arrow batches of packed rows, each of about `_DOCUMENTS_AT_ONCE` documents; at least one, if empty."""
    source, group, documents, batches = dataset.with_format("arrow"), list[list[int]](), 0, 0
    for row in rows:
        group.append(row)
        documents += len(row)
        if documents >= _DOCUMENTS_AT_ONCE:
            yield _packed_batch(source, group, positions)
            group, documents, batches = [], 0, batches + 1
    if group or not batches:
        yield _packed_batch(source, group, positions)


def _packed_batch(source: "datasets.Dataset", rows: list[list[int]], positions: bool) -> pa.RecordBatch:
    indices = [index for row in rows for index in row]
    table = source[indices]
    lengths = pc.list_value_length(table.column("input_ids")).to_numpy().astype(np.int64)
    ids = _flat(table, "input_ids")
    labels = _labels(table, ids, lengths, indices)
    starts = np.cumsum(lengths) - lengths
    labels[starts] = -100
    documents = np.array([len(row) for row in rows], dtype=np.int64)
    row_ends = np.cumsum(documents)
    tokens = np.add.reduceat(lengths, row_ends - documents) if len(rows) else lengths
    columns = {
        "input_ids": int32_lists(ids, tokens),
        "labels": int32_lists(labels, tokens),
        "seq_lengths": int32_lists(lengths, documents),
    }
    if positions:
        columns["position_ids"] = int32_lists(np.arange(len(ids)) - np.repeat(starts, lengths), tokens)
    return pa.RecordBatch.from_pydict(columns)


def _labels(table: pa.Table, ids: Ints, lengths: Ints, indices: list[int]) -> Ints:
    """Labels [tokens] as the source has them, or ids less what its masks leave out; checked against the lengths."""
    labels = ids.copy()
    for name in (name for name in table.column_names if name != "input_ids"):
        other = pc.list_value_length(table.column(name)).to_numpy()
        wrong = np.flatnonzero(other != lengths)
        if wrong.size:
            at = int(wrong[0])
            raise InputError(
                f"document {indices[at]} has {lengths[at]:,} input_ids and {other[at]:,} {name}; they must agree"
            )
        values = _flat(table, name)
        labels = values if name == "labels" else np.where(values != 0, labels, -100)
    return labels


def _flat(table: pa.Table, name: str) -> Ints:
    values = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in table.column(name).chunks]
    return np.concatenate(values).astype(np.int64) if values else np.zeros(0, dtype=np.int64)
