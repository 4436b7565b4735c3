"""Arrow data sets on disk, each under a key that says everything it was made from.

Tokenising is worth doing once: the second start of a run maps the finished file. Entries are folders that appear whole
(written beside their place, then renamed), carry a digest of their bytes, and are made anew where that doesn't hold.
The files are plain Arrow streams that `datasets` maps, so memory stays bounded for writer and reader. `datasets`' own
`from_generator` would also do this, but it keys by pickling the generator, tokenizer included, which is slow and
changes with every call of a fast tokenizer; our keys are made from contents.

    <HF_DATASETS_CACHE>/slipstream/<key>/rows.arrow     the rows
                                        /entry.json     {"sha256": of rows.arrow, "note": what the writer adds}
"""

import errno
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from slipstream.errors import InputError
from slipstream.full_disk import FullDiskTold

if TYPE_CHECKING:
    import datasets

_ROWS, _ENTRY = "rows.arrow", "entry.json"
_WRITING = ".writing-"
_STALE_SECONDS = 24 * 3600
"""Age from which an unfinished entry is taken for one whose writer was killed."""
_ELSEWHERE = "choose another place with the environment variable HF_DATASETS_CACHE"
_REFUSALS = {
    errno.EACCES: f"not writable, so the tokenised data can't be kept there; {_ELSEWHERE}",
    errno.EPERM: f"not writable, so the tokenised data can't be kept there; {_ELSEWHERE}",
    errno.EROFS: f"not writable, so the tokenised data can't be kept there; {_ELSEWHERE}",
    errno.ENOTDIR: f"lies below a file, so the tokenised data can't be kept there; {_ELSEWHERE}",
    errno.EEXIST: f"is a file, so the tokenised data can't be kept there; {_ELSEWHERE}",
    errno.ENOENT: f"can't be made, so the tokenised data can't be kept there; {_ELSEWHERE}",
}
"""What the user can do about an error of writing; any other error is not the user's."""


@dataclass(frozen=True)
class CacheEntry:
    """A finished data set and the note its writer left."""

    place: Path
    note: dict[str, Any]

    @property
    def dataset(self) -> "datasets.Dataset":
        """The rows, mapped from disk."""
        import datasets  # takes a second, which who only counts need not wait

        return datasets.Dataset.from_file(str(self.place / _ROWS))

    def list_lengths(self, column: str) -> npt.NDArray[np.int64]:
        """The length of every list in a column, a batch at a time and without `datasets`."""
        with pa.memory_map(str(self.place / _ROWS)) as source, pa.ipc.open_stream(source) as batches:
            found = [_integers(pc.list_value_length(batch.column(column))) for batch in batches]
        return np.concatenate(found) if found else np.zeros(0, dtype=np.int64)

    def content_digest(self, columns: Sequence[str]) -> str:
        """A fingerprint of every value in ``columns`` of int32 lists, however the rows lie in batches.

        Each column on a core of its own, straight from the mapped file.
        """
        with ThreadPoolExecutor(len(columns)) as pool:
            return digest(*pool.map(self._column_digest, columns))

    def _column_digest(self, column: str) -> bytes:
        lengths, values = hashlib.sha256(), hashlib.sha256()
        with pa.memory_map(str(self.place / _ROWS)) as source, pa.ipc.open_stream(source) as batches:
            for batch in batches:
                lists = batch.column(column)
                lengths.update(_whole(pc.list_value_length(lists)).data)
                values.update(_whole(lists.flatten()).data)
        return lengths.digest() + values.digest()


@dataclass(frozen=True)
class ArrowCache:
    """A folder of entries."""

    folder: Path

    @classmethod
    def at(cls, folder: Path | None) -> "ArrowCache":
        """The cache in ``folder``; none means beside the data sets that `datasets` caches."""
        return cls(folder if folder is not None else _datasets_cache() / "slipstream")

    def find(self, key: str) -> CacheEntry | None:
        """The entry under ``key``; none where there is none, or it is damaged (then it is removed).

        What a killed writer left more than a day ago is removed too. Raises `InputError` where the folder can't be
        searched.
        """
        place = self.folder / key
        with self._errors_told():
            self._remove_stale()
            if not place.is_dir():
                return None
        note = _intact(place)
        if note is None:
            shutil.rmtree(place, ignore_errors=True)
            return None
        return CacheEntry(place, note)

    def write(self, key: str, batches: Iterable[pa.RecordBatch], note: dict[str, Any]) -> CacheEntry:
        """Writes ``batches`` (at least one, if empty) and, read when they are finished, ``note``; returns the entry.

        Raises `InputError` where the disk is full or the folder can't be made or written. Nothing is left behind on
        failure.
        """
        with self._errors_told():
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=_WRITING, dir=self.folder) as made:
                _write(Path(made), batches, note)
                self._publish(Path(made), key)
        found = self.find(key)
        assert found is not None, "what was just written can be read"
        return found

    def _publish(self, made: Path, key: str) -> None:
        """Renames the finished folder into place; one that another process finished first stays."""
        finished = made / "finished"
        try:
            finished.rename(self.folder / key)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise

    @contextmanager
    def _errors_told(self) -> Iterator[None]:
        """Makes `InputError` of what the user can mend."""

        def full(room: str) -> str:
            return (
                f"{self.folder}: no space left for the tokenised data ({room}); free some space there, or {_ELSEWHERE}"
            )

        try:
            with FullDiskTold(self.folder, full):
                yield
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise
            raise InputError(f"{self.folder}: {_REFUSALS[error.errno]}") from error

    def _remove_stale(self) -> None:
        """Removes entries that nothing has been written to for a day; their writers were killed."""
        for left in self.folder.glob(f"{_WRITING}*"):
            if time.time() - _last_written(left) > _STALE_SECONDS:
                shutil.rmtree(left, ignore_errors=True)


def _integers(array: pa.Int32Array) -> npt.NDArray[np.int64]:
    """An array without nulls as numpy has it; pyarrow's own way imports pandas first."""
    return _whole(array).astype(np.int64)


def _whole(array: pa.Int32Array) -> npt.NDArray[np.int32]:
    """An array without nulls where it lies."""
    if not len(array):
        return np.zeros(0, dtype=np.int32)
    return np.frombuffer(array.buffers()[1], dtype=np.int32)[array.offset : array.offset + len(array)]


def _datasets_cache() -> Path:
    """Where `datasets` caches, as its configuration says, or will say when it is imported."""
    if (loaded := sys.modules.get("datasets")) is not None:
        return Path(loaded.config.HF_DATASETS_CACHE)
    caches = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = os.environ.get("HF_HOME", os.path.join(caches, "huggingface"))
    return Path(os.environ.get("HF_DATASETS_CACHE", os.path.join(home, "datasets"))).expanduser()


def digest(*parts: object) -> str:
    """A key (hex) for ``parts``: JSON values or bytes."""
    total = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else json.dumps(part, sort_keys=True, ensure_ascii=True).encode()
        total.update(len(data).to_bytes(8, "little"))
        total.update(data)
    return total.hexdigest()[:40]


def file_digest(path: Path) -> str:
    """The SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def int32_lists(values: npt.NDArray[Any], lengths: npt.NDArray[Any]) -> pa.ListArray:
    """An Arrow column of int32 lists: ``values`` cut into pieces of ``lengths``."""
    ends = np.cumsum(lengths, dtype=np.int64)
    assert int(ends[-1]) == len(values) if len(ends) else not len(values), "the pieces cover the values"
    offsets = np.concatenate([[0], ends]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values.astype(np.int32)))


def _write(made: Path, batches: Iterable[pa.RecordBatch], note: dict[str, Any]) -> None:
    folder = made / "finished"
    folder.mkdir()
    rows = iter(batches)
    first = next(rows)
    with pa.OSFile(str(folder / _ROWS), "wb") as sink, pa.ipc.new_stream(sink, first.schema) as writer:
        writer.write_batch(first)
        for batch in rows:
            writer.write_batch(batch)
    entry = {"sha256": file_digest(folder / _ROWS), "note": note}
    with (folder / _ENTRY).open("w", encoding="utf-8") as file:
        json.dump(entry, file)
        file.flush()
        os.fsync(file.fileno())


def _last_written(folder: Path) -> float:
    """When anything in ``folder`` was last written (seconds since the epoch); now, where it is just being removed."""
    try:
        return max(path.stat().st_mtime for path in (folder, *folder.rglob("*")))
    except FileNotFoundError:
        return time.time()


def _intact(place: Path) -> dict[str, Any] | None:
    """The note of the entry, or none where a file is missing, cut short or changed."""
    try:
        entry = json.loads((place / _ENTRY).read_text(encoding="utf-8"))
        whole = file_digest(place / _ROWS) == entry["sha256"]
        note = entry["note"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return note if whole and isinstance(note, dict) else None
