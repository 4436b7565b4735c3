"""Packing: as good as textbook best-fit decreasing, nothing lost, masks kept."""

import time
from collections import Counter
from pathlib import Path

import datasets
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.data import packing as packing_module
from slipstream.data.packing import PackingReport, document_lengths, pack, pack_dataset, pack_rows, packed
from slipstream.errors import InputError


def best_fit_decreasing(lengths: list[int], capacity: int) -> list[int]:
    """The fillings of the rows, by the textbook: each document into the fullest row that has room."""
    fillings: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [i for i, filling in enumerate(fillings) if filling + length <= capacity]
        if fitting:
            fillings[max(fitting, key=lambda i: fillings[i])] += length
        else:
            fillings.append(length)
    return fillings


def fillings(lengths: list[int], rows: list[list[int]]) -> list[int]:
    return [sum(lengths[i] for i in row) for row in rows]


@st.composite
def sets(draw: st.DrawFn) -> tuple[list[int], int]:
    capacity = draw(st.integers(1, 60))
    few = draw(st.lists(st.integers(1, capacity), min_size=1, max_size=6))  # repeats make whole groups move
    return draw(st.lists(st.sampled_from(few) | st.integers(1, capacity), max_size=150)), capacity


@settings(max_examples=300, deadline=None)
@given(sets(), st.integers(0, 3))
def test_equals_the_textbook(lengths_capacity: tuple[list[int], int], seed: int) -> None:
    lengths, capacity = lengths_capacity
    rows = pack(lengths, capacity, seed=seed)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths))), "each document lies in one row"
    assert Counter(fillings(lengths, rows)) == Counter(best_fit_decreasing(lengths, capacity))
    assert all(row == sorted(row) for row in rows)


@pytest.mark.parametrize("capacity", [2048, 70_000])
def test_equals_the_textbook_on_a_real_spread(capacity: int) -> None:
    lengths = np.clip(np.random.default_rng(1).lognormal(5, 1, 3000).astype(int), 1, 2048).tolist()
    rows = pack(lengths, capacity)
    assert Counter(fillings(lengths, rows)) == Counter(best_fit_decreasing(lengths, capacity))


def test_is_deterministic_and_shuffled_under_a_seed() -> None:
    lengths = np.random.default_rng(0).integers(1, 100, 500)
    first = pack(lengths, 128, seed=3)
    assert pack(lengths, 128, seed=3) == first
    other = pack(lengths, 128, seed=4)
    assert other != first
    assert sorted(other) == sorted(first), "the seed orders rows, it doesn't change them"
    longest = [max(lengths[i] for i in row) for row in first]
    assert longest != sorted(longest, reverse=True), "rows don't come longest first"


def test_a_window_at_a_time_is_in_memory() -> None:
    lengths = np.random.default_rng(0).integers(1, 100, 1000)
    made: list[int] = []

    class Rows(list[list[int]]):
        def __init__(self, rows: list[list[int]]) -> None:
            super().__init__(rows)
            made.append(len(rows))

    rows = packed(lengths, 128, window=100)
    with pytest.MonkeyPatch.context() as patch:
        inner = packing_module._best_fit
        patch.setattr(packing_module, "_best_fit", lambda *arguments: Rows(inner(*arguments)))
        first = [next(rows) for _ in range(10)]
        assert len(made) == 1, "nothing of the next window is packed before it is asked for"
        rest = list(rows)
    assert len(made) == 10
    assert first + rest == pack(lengths, 128, window=100)
    assert max(max(row) for row in first) < 100
    assert [min(row) for row in first] != sorted(min(row) for row in first), "shuffled within the window"


def test_a_packed_data_set_of_windows_has_the_rows_of_pack(tmp_path: Path) -> None:
    lengths = [1 + i % 7 for i in range(300)]
    documents = datasets.Dataset.from_list([{"input_ids": [i % 256] * n} for i, n in enumerate(lengths)])
    rows = pack_dataset(documents, 16, window=50, cache_dir=tmp_path)
    assert rows["seq_lengths"][:] == [[lengths[i] for i in row] for row in pack(lengths, 16, window=50)]


def test_window_packs_neighbours_only() -> None:
    lengths = np.random.default_rng(0).integers(1, 100, 250)
    rows = pack(lengths, 128, window=100)
    assert sorted(i for row in rows for i in row) == list(range(250))
    assert all(len({i // 100 for i in row}) == 1 for row in rows)
    assert len(rows) > len(pack(lengths, 128)), "a window costs rows here"


@pytest.mark.parametrize(
    ("lengths", "capacity", "window", "message"),
    [
        ([3, 0, 2], 8, None, "document 1 has length 0"),
        ([3, -2], 8, None, "document 1 has length -2"),
        ([3, 9, 4, 10], 8, None, r"document 1 has 9 tokens > 8.*1 more.*overlong"),
        ([1], 0, None, r"row of 0 tokens.*packing\.tokens"),
        ([1], 8, 0, "window is 0"),
        ([1.5], 8, None, "whole numbers"),
        ([[1]], 8, None, "flat list"),
    ],
)
def test_refuses(lengths: list[int], capacity: int, window: int | None, message: str) -> None:
    with pytest.raises(InputError, match=message):
        pack(lengths, capacity, window=window)


def test_nothing_to_pack() -> None:
    assert pack([], 8) == []


def test_a_million_documents_are_quick() -> None:
    """The benchmark holds the bar (2 s on one core); this only catches a search a document, which takes minutes."""
    lengths = np.clip(np.random.default_rng(0).lognormal(5.5, 1, 1_000_000).astype(int), 1, 4096)
    start = time.perf_counter()
    rows = pack(lengths, 4096)
    assert time.perf_counter() - start < 10
    assert sum(map(len, rows)) == 1_000_000
    assert len(rows) <= -(-int(lengths.sum()) // 4096) + 2


def alpaca_like(documents: int = 1000) -> np.ndarray:
    return np.clip(np.random.default_rng(7).lognormal(5.1, 0.7, documents).astype(int), 12, 4096)


def test_an_instruction_set_fills_its_rows() -> None:
    lengths = alpaca_like()
    rows = pack(lengths, 4096)
    report = PackingReport.of(lengths, rows, 4096)
    assert report.rows == len(rows) == -(-int(lengths.sum()) // 4096) > 10
    assert report.fill_without_last >= 0.99


def test_report() -> None:
    report = PackingReport.of([4, 3, 5, 1, 2], [[0, 1], [2, 3], [4]], 8)
    assert report == PackingReport(
        documents=5,
        tokens=15,
        rows=3,
        capacity=8,
        fill=15 / 24,
        fill_without_last=13 / 16,
        padding_tokens=9,
        padded_tokens=2 * 4 + 2 * 5 + 2,  # a row holds 5 / 3 documents on average: batches of two
    )
    assert PackingReport.of([4, 3, 1, 2, 2], [[0, 1, 2], [3, 4]], 8).padded_tokens == 8 + 4 + 2
    assert PackingReport.of([], [], 8).fill == 1.0
    assert PackingReport.of([4, 3, 1, 2, 2], [[0, 1, 2], [3, 4]], 8).padded_ratio == 14 / 16


def test_the_report_on_documents_that_are_not_packed() -> None:
    report = PackingReport.unpacked([4, 3, 1, 2, 2], 2, 8)
    assert (report.enabled, report.rows, report.tokens) == (False, 5, 12)
    assert (report.padded_tokens, report.padding_tokens, report.fill) == (8 + 4 + 2, 2, 12 / 14)
    assert PackingReport.unpacked([4, 3], 1, 8).padding_tokens == 0, "a batch of one needs no padding"
    assert PackingReport.unpacked([], 2, 8).fill == 1.0


def test_rows_with_one_only() -> None:
    assert PackingReport.of([8], [[0]], 8).fill_without_last == 1.0


def made(rows: list[list[int]], **columns: list[list[int]]) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"input_ids": rows, **columns})


def documents_of(packed: datasets.Dataset) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    found = []
    for row in packed:
        at = 0
        assert sum(row["seq_lengths"]) == len(row["input_ids"]) == len(row["labels"])
        for length in row["seq_lengths"]:
            piece = slice(at, at + length)
            found.append((tuple(row["input_ids"][piece]), tuple(row["labels"][piece])))
            at += length
    return found


IDS = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10], [11, 12]]


def test_packed_rows_without_labels(tmp_path: Path) -> None:
    source = made(IDS, attention_mask=[[1] * len(ids) for ids in IDS])
    packed = pack_dataset(source, 6, cache_dir=tmp_path)
    assert packed.column_names == ["input_ids", "labels", "seq_lengths", "position_ids"]
    assert all(feature.feature.dtype == "int32" for feature in packed.features.values())
    assert len(packed) == 2
    assert sorted(documents_of(packed)) == sorted((tuple(ids), (-100, *ids[1:])) for ids in IDS)


def test_positions_begin_anew_with_each_document(tmp_path: Path) -> None:
    rows = pack_dataset(made(IDS), 6, cache_dir=tmp_path)
    assert any(len(row["seq_lengths"]) > 1 for row in rows)
    for row in rows:
        assert row["position_ids"] == [at for length in row["seq_lengths"] for at in range(length)]
    without = pack_rows(made(IDS), 6, cache_dir=tmp_path)
    assert without.column_names == ["input_ids", "labels", "seq_lengths"]
    assert without.to_list() == rows.remove_columns("position_ids").to_list()


def test_the_learned_mask_survives_packing(tmp_path: Path) -> None:
    """trl#3728: learning the assistant's tokens alone is not lost with packing."""
    labels = [[1, -100, 3], [4], [-100, 6], [7, -100, -100, 10], [11, -100]]
    packed = pack_dataset(made(IDS, labels=labels), 6, cache_dir=tmp_path)
    assert sum(len(row["seq_lengths"]) > 1 for row in packed) == 2, "rows hold boundaries"
    expected = [(tuple(ids), (-100, *marks[1:])) for ids, marks in zip(IDS, labels, strict=True)]
    assert sorted(documents_of(packed)) == sorted(expected)


@pytest.mark.parametrize("name", ["completion_mask", "assistant_masks"])
def test_masks_of_other_trainers_are_honoured(tmp_path: Path, name: str) -> None:
    masks = [[0, 0, 1], [1], [0, 1], [0, 1, 0, 1], [1, 0]]
    packed = pack_dataset(made(IDS, **{name: masks}), 6, cache_dir=tmp_path)
    expected = [
        (tuple(ids), (-100, *(i if m else -100 for i, m in zip(ids[1:], mask[1:], strict=True))))
        for ids, mask in zip(IDS, masks, strict=True)
    ]
    assert sorted(documents_of(packed)) == sorted(expected)


def test_packs_what_a_selection_shows(tmp_path: Path) -> None:
    selected = made(IDS).select([3, 0, 4])
    assert document_lengths(selected).tolist() == [4, 3, 2]
    assert sorted(ids for ids, _ in documents_of(pack_dataset(selected, 6, cache_dir=tmp_path))) == [
        (1, 2, 3),
        (7, 8, 9, 10),
        (11, 12),
    ]


def test_many_small_documents_in_many_batches(tmp_path: Path) -> None:
    """More documents than are held at once, 4,096 of them in a row of one token each."""
    packed = pack_dataset(made([[i] for i in range(10_000)]), 4096, cache_dir=tmp_path)
    assert sorted(len(row["seq_lengths"]) for row in packed) == [10_000 - 2 * 4096, 4096, 4096]
    assert sorted(i for row in packed for i in row["input_ids"]) == list(range(10_000))


def test_rows_are_written_once(tmp_path: Path) -> None:
    source = made(IDS)
    first = pack_dataset(source, 6, cache_dir=tmp_path)
    file = first.cache_files[0]["filename"]
    written = Path(file).stat().st_mtime_ns
    again = pack_dataset(source, 6, cache_dir=tmp_path)
    assert again.cache_files[0]["filename"] == file
    assert Path(file).stat().st_mtime_ns == written
    others = [pack_dataset(source, 7, cache_dir=tmp_path), pack_dataset(source, 6, seed=1, cache_dir=tmp_path)]
    assert len({file, *(other.cache_files[0]["filename"] for other in others)}) == 3


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (made(IDS, labels=[[1, 2, 3], [4], [5], [7, 8, 9, 10], [11, 12]]), "document 2 has 2 input_ids and 1 labels"),
        (datasets.Dataset.from_dict({"text": ["a"]}), r"no input_ids \(columns: text\)"),
        (made([*IDS, list(range(7))]), "document 5 has 7 tokens > 6"),
        (made([*IDS, []]), "document 5 has length 0"),
        (IDS, "takes a datasets.Dataset, not list"),
    ],
)
def test_refuses_data_sets(tmp_path: Path, source: datasets.Dataset, message: str) -> None:
    with pytest.raises(InputError, match=message):
        pack_dataset(source, 6, cache_dir=tmp_path)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()], "nothing is left behind"
