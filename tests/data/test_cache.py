"""The cache's folder: every way in which it can't be used is told with a remedy; nothing of killed writers stays."""

import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from slipstream.data.cache import ArrowCache, int32_lists
from slipstream.errors import InputError

DAY = 24 * 3600


def batches(error: OSError | None = None) -> Iterator[pa.RecordBatch]:
    if error is not None:
        raise error
    yield pa.RecordBatch.from_arrays([int32_lists(np.arange(3), np.array([3]))], names=["input_ids"])


@pytest.mark.parametrize(
    ("below", "told"), [("file", "is a file"), ("file/deep", "lies below a file"), ("file/a/b", "lies below a file")]
)
def test_a_place_where_a_file_is(tmp_path: Path, below: str, told: str) -> None:
    (tmp_path / "file").write_text("")
    place = tmp_path / below
    assert ArrowCache(place).find("key") is None
    with pytest.raises(InputError, match=rf"^{place}: {told}, .*choose another place with .*HF_DATASETS_CACHE"):
        ArrowCache(place).write("key", batches(), {})


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a file system without new folders")
def test_a_place_that_cannot_be_made() -> None:
    with pytest.raises(InputError, match=r"^/proc/nu/slipstream: can't be made, .*HF_DATASETS_CACHE"):
        ArrowCache(Path("/proc/nu/slipstream")).write("key", batches(), {})


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EPERM])
def test_a_read_only_place_isnt_told_to_free_space(tmp_path: Path, number: int) -> None:
    with pytest.raises(InputError, match=r"not writable, .*choose another place with .*HF_DATASETS_CACHE") as raised:
        ArrowCache(tmp_path).write("key", batches(OSError(number, os.strerror(number))), {})
    assert "free some space" not in str(raised.value)


def test_an_error_that_is_not_the_users_stays_itself(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="Input/output error"):
        ArrowCache(tmp_path).write("key", batches(OSError(errno.EIO, os.strerror(errno.EIO))), {})


def test_what_killed_writers_left_goes_after_a_day(tmp_path: Path) -> None:
    now = time.time()
    for name, folder_age, file_age in (("old", 2 * DAY, 2 * DAY), ("new", 60, 60), ("slow", 2 * DAY, 60)):
        left = tmp_path / f".writing-{name}"
        left.mkdir()
        (left / "rows.arrow").write_bytes(b"half")
        os.utime(left / "rows.arrow", (now - file_age,) * 2)
        os.utime(left, (now - folder_age,) * 2)
    assert ArrowCache(tmp_path).find("key") is None
    assert sorted(path.name for path in tmp_path.iterdir()) == [".writing-new", ".writing-slow"]


def test_lengths_are_read_without_the_rows(tmp_path: Path) -> None:
    """Over several batches, one of them empty and one a slice that does not begin where its memory does."""
    lengths = [3, 0, 5, 1, 1, 7, 2]
    whole = pa.RecordBatch.from_arrays([int32_lists(np.arange(19), np.array(lengths))], names=["input_ids"])
    entry = ArrowCache(tmp_path).write("key", [whole.slice(0, 2), whole.slice(2, 0), whole.slice(2)], {})
    assert entry.list_lengths("input_ids").tolist() == lengths
    assert [len(ids) for ids in entry.dataset["input_ids"]] == lengths
    assert ArrowCache(tmp_path).write("none", [whole.slice(0, 0)], {}).list_lengths("input_ids").tolist() == []


def test_the_fingerprint_is_of_all_values_and_not_of_batches(tmp_path: Path) -> None:
    def digest_of(name: str, cuts: list[int], change: int | None = None, lengths: list[int] | None = None) -> str:
        values, sizes = np.arange(1000), np.array(lengths or [100] * 10)
        if change is not None:
            values[change] = -100
        whole = pa.RecordBatch.from_arrays([int32_lists(values, sizes)], names=["labels"])
        ends = [*cuts, 10]
        parts = [whole.slice(start, end - start) for start, end in zip([0, *cuts], ends, strict=True)]
        return ArrowCache(tmp_path).write(name, parts, {}).content_digest(["labels"])

    first = digest_of("one", [])
    assert digest_of("many", [1, 1, 7]) == first
    assert digest_of("value", [], change=555) != first
    assert digest_of("lengths", [], lengths=[99, 101, *[100] * 8]) != first
