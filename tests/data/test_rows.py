"""Rows from every kind of file, numbered as users see them; everything unreadable is told by file and line."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipstream.data.rows import RawRow, read_rows
from slipstream.errors import InputError

ROWS = [{"prompt": 'a, "b"\nc', "completion": "é"}, {"prompt": "", "completion": "2"}]


def jsonl(path: Path) -> None:
    path.write_text("\n".join(map(json.dumps, ROWS)) + "\n", encoding="utf-8")


def array(path: Path) -> None:
    path.write_text(json.dumps(ROWS, indent=2), encoding="utf-8")


def parquet(path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), path)


def separated(path: Path) -> None:
    mark = "\t" if path.suffix == ".tsv" else ","
    path.write_text(f'prompt{mark}completion\r\n"a, ""b""\nc"{mark}é\r\n{mark}2\r\n', encoding="utf-8", newline="")


KINDS: list[tuple[str, Callable[[Path], None]]] = [
    ("rows.jsonl", jsonl),
    ("rows.ndjson", jsonl),
    ("rows.json", array),
    ("lines.json", jsonl),
    ("rows.parquet", parquet),
    ("rows.csv", separated),
    ("rows.tsv", separated),
    ("ROWS.JSONL", jsonl),
]


@pytest.mark.parametrize(("name", "write"), KINDS, ids=[name for name, _ in KINDS])
def test_every_kind_of_file(tmp_path: Path, name: str, write: Callable[[Path], None]) -> None:
    write(tmp_path / name)
    rows = read_rows(str(tmp_path / name))
    assert [(row.number, row.fields) for row in rows] == [(1, ROWS[0]), (2, ROWS[1])]
    assert [row.place for row in rows] == ["row 1", "row 2"], "they can be read twice"


def test_a_folder_of_files(tmp_path: Path) -> None:
    jsonl(tmp_path / "b.jsonl")
    (tmp_path / "deep").mkdir()
    parquet(tmp_path / "deep" / "a.parquet")
    (tmp_path / "README.md").write_text("not data")
    (tmp_path / ".hidden").mkdir()
    jsonl(tmp_path / ".hidden" / "c.jsonl")
    assert read_rows(str(tmp_path)).files == ("b.jsonl", "deep/a.parquet")
    assert read_rows(str(tmp_path / "b.jsonl")).files == ()
    rows = list(read_rows(str(tmp_path)))
    assert [row.place for row in rows] == [
        "b.jsonl row 1",
        "b.jsonl row 2",
        "deep/a.parquet row 1",
        "deep/a.parquet row 2",
    ]
    assert [row.fields for row in rows] == ROWS + ROWS


def test_rows_of_different_shape_keep_their_own_keys(tmp_path: Path) -> None:
    """What one schema for all rows would fill up with None."""
    calls: list[dict[str, Any]] = [
        {"arguments": {"city": "Rome", "days": 2}},
        {"arguments": {"city": ["Rome", "Oslo"], "deep": {"x": None}}},
        {"arguments": 5, "id": "k"},
    ]
    path = tmp_path / "calls.jsonl"
    path.write_text("\n".join(json.dumps({"messages": [call]}) for call in calls))
    assert [row.fields for row in read_rows(str(path))] == [{"messages": [call]} for call in calls]


def test_keys_that_arrow_fills_in_are_taken_out(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "at": {"city": "Rome"}}, {"role": "tool", "at": {"days": 2}}]}]
    table = pa.Table.from_pylist(rows)
    assert table.to_pylist() != rows, "Arrow does fill them in"
    pq.write_table(table, tmp_path / "rows.parquet")
    assert [row.fields for row in read_rows(str(tmp_path / "rows.parquet"))] == rows


def test_lines_that_cannot_be_parsed_are_numbered(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"text": "a"}\n\n{"text": \n{"text": "\xff"}\n[1]\n' + b"[" * 100_000 + b'\n{"text": "b"}'
    )
    rows = list(read_rows(str(path)))
    assert [row.number for row in rows] == [1, 3, 4, 5, 6, 7], "numbers are lines"
    assert [row.fields for row in rows if not row.fault] == [{"text": "a"}, {"text": "b"}]
    faults = [row.fault for row in rows if row.fault]
    for fault, expected in zip(
        faults, ["line 3 is not JSON", "line 4 is not UTF-8 (byte 11)", "holds a list", "line 6 is nested"], strict=True
    ):
        assert expected in fault


def test_csv_rows_that_dont_match_the_header(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("prompt,completion\na,b\na,b,c\na\n")
    rows = list(read_rows(str(path)))
    assert [row.fault for row in rows] == ["", "has 3 fields, the header 2", "has 1 fields, the header 2"]


def test_long_csv_fields(tmp_path: Path) -> None:
    import csv

    before = csv.field_size_limit()
    path = tmp_path / "rows.csv"
    path.write_text("text\n" + "x" * (before + 10) + "\n")
    assert [len(row.fields["text"]) for row in read_rows(str(path)) if row.fields] == [before + 10]
    assert csv.field_size_limit() == before, "the module's setting is put back"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl", "", "no rows"),
        ("rows.jsonl", "\n \n", "no rows"),
        ("rows.json", "", "no rows"),
        ("rows.json", "[]", "no rows"),
        ("rows.csv", "", "no rows"),
        ("rows.csv", "text\n", "no rows"),
        ("rows.json", "[1, ", "not JSON"),
        ("rows.json", '"text"', "holds a str"),
        ("rows.csv", 'text\n"a', "not CSV near line 2"),
        ("rows.parquet", "PAR", "cannot be read as parquet"),
        ("rows.txt", "a", r"\.txt is not a known format; known: .*\.jsonl"),
        ("rows", "a", "without suffix"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=message):
        list(read_rows(str(tmp_path / name)))


@pytest.mark.parametrize("name", ["rows.json", "rows.csv"])
def test_files_that_are_not_utf8(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b'["\xff"]\n')
    with pytest.raises(InputError, match=f"{name}: cannot be read"):
        list(read_rows(str(tmp_path / name)))


@pytest.mark.parametrize("source", ["no/such/rows", "rows.jsonl", "./rows", "/no/such"])
def test_missing_files(source: str) -> None:
    with pytest.raises(InputError, match="no such file or folder"):
        read_rows(source)


def test_a_folder_without_data(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no data file; known: \.csv"):
        read_rows(str(tmp_path))


def test_the_fingerprint_follows_the_contents(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl")
    jsonl(tmp_path / "b.jsonl")
    first = read_rows(str(tmp_path / "a.jsonl")).fingerprint
    assert read_rows(str(tmp_path / "a.jsonl")).fingerprint == first
    (tmp_path / "a.jsonl").write_text('{"text": "a"}')
    assert read_rows(str(tmp_path / "a.jsonl")).fingerprint != first
    assert read_rows(str(tmp_path)).fingerprint != first


def test_hub_data_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def load(name: str, split: str) -> datasets.Dataset:
        asked.append((name, split))
        return datasets.Dataset.from_list([{"messages": [{"a": 1}, {"b": 2}]}])

    monkeypatch.setattr(datasets, "load_dataset", load)
    rows = [list(read_rows(source)) for source in ("some/set", "some/set:test")]
    assert asked == [("some/set", "train"), ("some/set", "test")]
    assert rows[0] == [RawRow(1, None, {"messages": [{"a": 1}, {"b": 2}]})]


def test_hub_data_sets_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="some/set: neither a local file nor a hub data set"):
        read_rows("some/set")  # no network here

    def load(name: str, split: str) -> datasets.Dataset:
        return datasets.Dataset.from_list([])

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(InputError, match="some/set: no rows"):
        read_rows("some/set")


def test_parquet_numbers_that_are_no_text(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": [1.5, math.nan]}), tmp_path / "rows.parquet")
    assert [row.number for row in read_rows(str(tmp_path / "rows.parquet"))] == [1, 2]


class Hub:
    """A hub with one data set, whose rows come as they are asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rows: int, fails_after: int | None = None) -> None:
        self.commit, self.given, self.asked = "c0ffee", 0, {}
        info = SimpleNamespace(splits={"train": SimpleNamespace(num_examples=rows)})
        stream = type("Stream", (), {"info": info, "__iter__": lambda _: self.rows(rows, fails_after)})

        def load(name: str, **how: Any) -> Any:
            self.asked = {"name": name, **how}
            return stream()

        monkeypatch.setattr(datasets, "load_dataset", load)
        api = SimpleNamespace(dataset_info=lambda name: SimpleNamespace(sha=self.commit))
        monkeypatch.setattr("huggingface_hub.HfApi", lambda: api)

    def rows(self, rows: int, fails_after: int | None) -> Iterator[dict[str, Any]]:
        for number in range(rows):
            if number == fails_after:
                raise ConnectionError("gone")
            self.given += 1
            yield {"text": f"row {number}", "nothing": None}


def test_a_hub_data_set_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(monkeypatch, 1000)
    rows = read_rows("some/set", stream=True)
    assert hub.asked == {"name": "some/set", "split": "train", "revision": "c0ffee", "streaming": True}
    assert rows.count == 1000
    first = next(iter(rows))
    assert first == RawRow(1, None, {"text": "row 0"})
    assert hub.given == 1, "no more is read than is asked for"
    assert len(list(rows)) == 1000
    hub.commit = "decade"
    assert read_rows("some/set", stream=True).fingerprint != rows.fingerprint


def test_a_stream_that_ends_is_told_with_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    Hub(monkeypatch, 10, fails_after=4)
    with pytest.raises(InputError, match=r"the hub's stream ended after row 4 \(ConnectionError: gone\); try again"):
        list(read_rows("some/set", stream=True))
    Hub(monkeypatch, 0)
    with pytest.raises(InputError, match="some/set: no rows"):
        list(read_rows("some/set", stream=True))


def test_parquet_says_how_many_rows_it_has(tmp_path: Path) -> None:
    for name, rows in (("a", 3), ("b", 4)):
        pq.write_table(pa.table({"text": ["x"] * rows}), tmp_path / f"{name}.parquet")
    assert read_rows(str(tmp_path)).count == 7
    (tmp_path / "c.jsonl").write_text('{"text": "x"}')
    assert read_rows(str(tmp_path)).count is None
