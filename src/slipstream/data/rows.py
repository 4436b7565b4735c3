"""Numbered rows from files, folders and the hub.

JSON is parsed here rather than by Arrow: rows of a conversation set differ in their nested fields (every tool has
arguments of its own), and Arrow would force them into one schema and fill in ``None`` where a row lacks a key, which
chat templates then print. What does come out of Arrow (Parquet, the hub) is stripped of such keys. The price is speed,
some 100 MB/s, which tokenising never reaches.

Row numbers are what an editor shows: the line for JSONL, else the row counted from 1 (without a CSV's header).
"""

import csv
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
from annotated_types import Gt

from slipstream.data.cache import digest, file_digest
from slipstream.errors import InputError

if TYPE_CHECKING:
    import datasets

_BATCH = 1000


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Which rows are read and how they become tokens (the recipe's ``data`` section)."""

    train: str
    """A local JSONL, JSON, Parquet or CSV file, a folder of them, or a hub data set (``name``, ``name:split``)."""
    eval: str | None = None
    """Held-out rows, in the same forms; null evaluates nothing."""
    format: Literal["auto", "text", "prompt-completion", "instruction", "messages", "conversations"] = "auto"
    """The shape of a row; ``auto`` recognises it by its fields."""
    fields: dict[str, str] = field(default_factory=dict)
    """Names in the data for the names of the format, e.g. ``{prompt: question, completion: answer}``."""
    chat_template: str | None = None
    """A Jinja template (inline, or a path to one) in place of the tokenizer's; ``none`` renders pairs as plain text."""
    max_length: Annotated[int, Gt(1)] | None = None
    """The most tokens a document may have; null: as many as ``packing.tokens``."""
    overlong: Literal["error", "truncate", "drop", "split"] = "error"
    """What becomes of a document longer than ``max_length``."""
    bad_rows: Literal["error", "skip"] = "error"
    """What becomes of a row that is empty, has nothing to learn, or fails to encode."""
    learn: Literal["auto", "all", "completion", "assistant"] = "auto"
    """Which tokens are learned; ``auto``: assistant turns of conversations, completions of pairs, all of text."""
    stream: bool = False
    """Tokenise a hub data set while it is read from the hub, without a copy of its rows on this disk."""


class RowError(Exception):
    """A row cannot be used. Caught where rows are counted, never seen by users.

    ``reason`` is told for each row, ``remedy`` (what the recipe or the data could do, in the imperative) once for all.
    """

    def __init__(self, reason: str, remedy: str = "") -> None:
        """See the class."""
        super().__init__(f"{reason}; {remedy}" if remedy else reason)
        self.reason, self.remedy = reason, remedy


@dataclass(frozen=True)
class RawRow:
    """One row as it was read: its fields, or why it has none."""

    number: int
    """The row's number in its file, counted from 1."""
    file: str | None
    """The file's name where the source has several."""
    fields: dict[str, Any] | None
    fault: str = ""
    """Why the row could not be read; empty where it could."""

    @property
    def place(self) -> str:
        """How messages name the row: ``row 17``, or ``b.jsonl row 17`` in a folder."""
        return f"{self.file} row {self.number}" if self.file else f"row {self.number}"


@dataclass(frozen=True)
class Rows:
    """The rows of one source; each iteration reads them anew."""

    source: str
    fingerprint: str
    """Changes whenever the contents do."""
    read: Callable[[], Iterator[RawRow]]
    files: tuple[str, ...] = ()
    """The files of a folder, relative to it; empty for other sources."""
    count: int | None = None
    """How many rows there are, where that is known without reading them."""

    def __iter__(self) -> Iterator[RawRow]:
        """The rows in order."""
        return self.read()


def read_rows(source: str, *, stream: bool = False) -> Rows:
    """The rows of a local file, a folder of files, or a hub data set (``name`` or ``name:split``).

    Files are read a bounded number of rows at a time, but for a JSON array, which is parsed whole. ``stream``: a hub
    data set too, instead of downloading it first.
    Rows that cannot be parsed come with a ``fault``. Raises `InputError` for a missing or empty source, a kind of file
    that isn't known, or a file that cannot be read at all.
    """
    path = Path(source).expanduser()
    if lies_here(source):
        files = _files(path)
        parts = [[str(file.relative_to(path)), _digest(file)] for file in files]
        several = path.is_dir()
        names = tuple(name for name, _ in parts) if several else ()
        return Rows(source, digest(parts), lambda: _read_files(files, path, several), names, _count(files))
    if _looks_local(source):
        raise InputError(f"{source}: no such file or folder; set data.train (or data.eval) to one that exists")
    return _streamed_rows(source) if stream else _hub_rows(source)


def _count(files: list[Path]) -> int | None:
    """The rows of all files, where each says so without being read: Parquet."""
    if any(file.suffix.lower() != ".parquet" for file in files):
        return None
    try:
        return sum(int(pq.read_metadata(file).num_rows) for file in files)
    except (OSError, pa.ArrowException):
        return None  # told with the file's name when it is read


def _files(path: Path) -> list[Path]:
    known = ", ".join(sorted(_READERS))
    if not path.is_dir():
        if path.suffix.lower() not in _READERS:
            raise InputError(f"{path}: {path.suffix or 'a file without suffix'} is not a known format; known: {known}")
        return [path]
    found = sorted(
        file
        for file in path.rglob("*")
        if file.suffix.lower() in _READERS and not any(part.startswith(".") for part in file.relative_to(path).parts)
    )
    if not found:
        raise InputError(f"{path}: the folder holds no data file; known: {known}")
    return found


def _digest(file: Path) -> str:
    try:
        return file_digest(file)
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror}") from error


def lies_here(source: str) -> bool:
    """Whether a source is a file or folder on this machine, not a hub data set."""
    return Path(source).expanduser().exists()


def _looks_local(source: str) -> bool:
    path = Path(source)
    return path.suffix.lower() in _READERS or source.startswith((".", "/", "~")) or source.count("/") > 1


def _read_files(files: list[Path], root: Path, several: bool) -> Iterator[RawRow]:
    """The rows of all files; complains where there is not one."""
    any_row = False
    for file in files:
        name = str(file.relative_to(root)) if several else None
        try:
            for number, fields, fault in _READERS[file.suffix.lower()](file):
                any_row = True
                yield RawRow(number, name, fields, fault)
        except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
            raise InputError(f"{file}: cannot be read as {file.suffix.lower()[1:]}: {error}") from error
    if not any_row:
        raise InputError(f"{root}: no rows; give a file with at least one")


_Read = Iterator[tuple[int, dict[str, Any] | None, str]]


def _read_jsonl(path: Path) -> _Read:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, *_parsed(line, number, first=number == 1)


def _parsed(line: bytes, number: int, first: bool) -> tuple[dict[str, Any] | None, str]:
    try:
        value = json.loads(line.decode("utf-8-sig" if first else "utf-8"))
    except UnicodeDecodeError as error:
        return None, f"line {number} is not UTF-8 (byte {error.start + 1})"
    except json.JSONDecodeError as error:
        return None, f"line {number} is not JSON (column {error.colno}: {error.msg})"
    except RecursionError:
        return None, f"line {number} is nested too deeply"
    return _object(value)


def _object(value: object) -> tuple[dict[str, Any] | None, str]:
    if isinstance(value, dict):
        return value, ""
    return None, f"holds a {type(value).__name__}, where an object with named fields is needed"


def _read_json(path: Path) -> _Read:
    """An array of objects; a file that starts with an object is read as JSON lines, which often go by this suffix."""
    with path.open("rb") as file:
        start = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    if not start:
        return
    if start.startswith(b"{"):
        yield from _read_jsonl(path)
        return
    try:
        values = json.loads(path.read_text(encoding="utf-8-sig"))
    except (json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"{path}: not JSON ({error}); give an array of objects, or JSON lines") from error
    if not isinstance(values, list):
        raise InputError(f"{path}: holds a {type(values).__name__}; give an array of objects, or JSON lines")
    for number, value in enumerate(values, start=1):
        yield number, *_object(value)


def _read_csv(path: Path) -> _Read:
    """Every field is text. A row with more or fewer fields than the header is a fault, never shifted silently."""
    limit = csv.field_size_limit(sys.maxsize)  # the module's limit of 131,072 characters is below a long document
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = csv.reader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True)
            header = next(lines, None)
            for number, values in enumerate((line for line in lines if line), start=1):
                if header is None or len(values) != len(header):
                    yield number, None, f"has {len(values)} fields, the header {len(header or ())}"
                else:
                    yield number, dict(zip(header, values, strict=True)), ""
    except csv.Error as error:
        raise InputError(
            f"{path}: not CSV near line {lines.line_num}: {error}; quote fields as RFC 4180 says"
        ) from error
    finally:
        csv.field_size_limit(limit)


def _read_parquet(path: Path) -> _Read:
    with pq.ParquetFile(path) as file:
        number = 0
        for batch in file.iter_batches(batch_size=_BATCH):
            for value in batch.to_pylist():
                number += 1
                yield number, _without_none(value), ""


_READERS: dict[str, Callable[[Path], _Read]] = {
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_parquet,
}


def _without_none(value: Any) -> Any:
    """The value without the ``None`` that Arrow puts where an object lacks a key of its neighbours."""
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_none(inner) for inner in value]
    return value


def _hub_rows(source: str) -> Rows:
    import datasets

    name, _, split = source.partition(":")
    with _loading(source):
        loaded = datasets.load_dataset(name, split=split or "train")
    if not len(loaded):
        raise InputError(f"{source}: no rows; give a data set with at least one")
    return Rows(source, digest("hub", loaded._fingerprint), lambda: _read_dataset(loaded), count=len(loaded))


def _streamed_rows(source: str) -> Rows:
    """The rows of the newest commit of a hub data set, as they come; the commit stands for their contents."""
    import datasets

    name, _, split = source.partition(":")
    split = split or "train"
    with _loading(source):
        commit = huggingface_hub.HfApi().dataset_info(name).sha
        loaded = datasets.load_dataset(name, split=split, revision=commit, streaming=True)
    splits = loaded.info.splits or {}
    count = splits[split].num_examples if split in splits else None
    return Rows(source, digest("stream", name, split, commit), lambda: _read_stream(source, loaded), count=count)


@contextmanager
def _loading(source: str) -> Iterator[None]:
    """Makes `InputError` of what keeps a hub data set from being loaded."""
    import datasets

    try:
        yield
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise InputError(
            f"{source}: neither a local file nor a hub data set that can be loaded ({type(error).__name__}: "
            f"{_first_line(error)}); give a path, or name:split"
        ) from error


def _read_stream(source: str, loaded: "datasets.IterableDataset") -> Iterator[RawRow]:
    import datasets

    number = 0
    try:
        for row in _read_dataset(loaded):
            number = row.number
            yield row
    except (OSError, datasets.exceptions.DatasetsError) as error:
        raise InputError(
            f"{source}: the hub's stream ended after row {number:,} ({type(error).__name__}: {_first_line(error)}); "
            "try again, or download it first: data.stream: false"
        ) from error
    if not number:
        raise InputError(f"{source}: no rows; give a data set with at least one")


def _read_dataset(loaded: "datasets.Dataset | datasets.IterableDataset") -> Iterator[RawRow]:
    for number, value in enumerate(loaded, start=1):
        yield RawRow(number, None, _without_none(value))


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no reason given"])[0]
