"""Segments: right for every row, refused for every wrong one, built and copied once, never stale."""

import pickle
from collections import Counter
from dataclasses import FrozenInstanceError, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import slipstream.device.segments as segments_module
from slipstream import InputError, Segments
from slipstream.device.segments import LARGEST_MASK_BYTES, SMALLEST_BUCKET, bucket

CPU = torch.device("cpu")


def test_the_picture_in_the_docstring() -> None:
    segments = Segments.from_lengths([3, 2, 4], total=12)
    assert segments.lengths == (3, 2, 4)
    assert segments.total == 12
    assert segments.cu_seqlens.tolist() == [0, 3, 5, 9, *[12] * 13]
    assert segments.segment_ids.tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 3]
    assert segments.cu_seqlens.dtype == segments.segment_ids.dtype == torch.int32
    assert segments.max_seqlen == 4
    assert isinstance(segments.max_seqlen, int)
    assert segments.padding == 3
    assert segments.position_ids().tolist() == [[0, 1, 2, 0, 1, 0, 1, 2, 3, 0, 1, 2]]
    assert segments.position_ids().dtype == torch.int64


def test_a_full_row_has_no_padding_segment() -> None:
    segments = Segments.from_lengths([3, 2])
    assert segments.total == 5
    assert segments.padding == 0
    assert segments.segment_ids.tolist() == [0, 0, 0, 1, 1]


def test_padding_may_be_the_longest_segment() -> None:
    assert Segments.from_lengths([2, 1], total=10).max_seqlen == 7


@pytest.mark.parametrize(
    ("count", "room"), [(1, 16), (15, 16), (16, 16), (17, 32), (32, 32), (33, 64), (4096, 4096), (4097, 8192)]
)
def test_buckets(count: int, room: int) -> None:
    assert bucket(count) == room
    assert Segments.from_lengths([1] * count).cu_seqlens.shape == (room + 1,)
    assert room >= SMALLEST_BUCKET


@settings(deadline=None, max_examples=80)
@given(
    st.lists(st.integers(1, 7), min_size=1, max_size=20),
    st.integers(0, 6),
    st.one_of(st.none(), st.integers(1, 9)),
)
def test_the_mask_by_its_definition(lengths: list[int], padding: int, window: int | None) -> None:
    segments = Segments.from_lengths(lengths, total=sum(lengths) + padding)
    total = segments.total
    mask = segments.mask(torch.float32, window)
    assert mask.shape == (1, 1, total, total)
    ids = segments.segment_ids.tolist()
    for i in range(total):
        for j in range(total):
            seen = ids[i] == ids[j] and j <= i and (window is None or i - j < window)
            assert mask[0, 0, i, j] == (0 if seen else -torch.inf)
    assert segments.cu_seqlens[0] == 0
    assert np.diff(segments.cu_seqlens.numpy())[: len(lengths)].tolist() == lengths
    assert int(segments.cu_seqlens[-1]) == total


@pytest.mark.parametrize(
    ("lengths", "total", "message"),
    [
        ([], None, "no lengths"),
        ([3, 0, 2], None, "document 1 has length 0; every document holds at least 1 token"),
        ([3, -1], None, "document 1 has length -1"),
        ([3, 2], 4, "lengths sum to 5 > 4 tokens of the row"),
        ([3, 2.0], None, r"length of document 1 is 2.0, must be a whole number"),
        ([True, True], None, "length of document 0 is True"),
        ([np.True_], None, "must be a whole number"),
        (torch.tensor([True, False]), None, "must be a whole number"),
        (torch.tensor([1.0]), None, "must be a whole number"),
        (["3"], None, "length of document 0 is '3'"),
        ([None], None, "must be a whole number"),
        ([3], 4.0, "total is 4.0, must be a whole number"),
        ([1], True, "total is True"),
    ],
)
def test_wrong_lengths_are_refused(lengths: Any, total: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Segments.from_lengths(lengths, total=total)


@pytest.mark.parametrize("lengths", [np.array([3, 2]), torch.tensor([3, 2], dtype=torch.int32), (np.int64(3), 2)])
def test_whole_numbers_of_any_kind_become_python_integers(lengths: Any) -> None:
    segments = Segments.from_lengths(lengths, total=np.int64(6))
    assert segments.lengths == (3, 2)
    assert {type(number) for number in (*segments.lengths, segments.total)} == {int}


@pytest.mark.parametrize(
    "cu_seqlens", [[0, 3, 4, 5], [1, 3, 5], [0, 3, 4], [0, 3, 2, 5], [0, 2, 5, 5], [0, 5, 3, 5], [0, 5]]
)
def test_wrong_boundaries_are_refused(cu_seqlens: list[int]) -> None:
    good = Segments.from_lengths([3, 2])
    with pytest.raises(InputError, match=r"cu_seqlens must rise from 0 to 5 .*make Segments with from_lengths"):
        replace(good, cu_seqlens=torch.tensor(cu_seqlens, dtype=torch.int32))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32, torch.int16])
@pytest.mark.parametrize("name", ["cu_seqlens", "segment_ids"])
def test_boundaries_of_another_dtype_are_refused(name: str, dtype: torch.dtype) -> None:
    """LlamaFactory#8919: a cast breaks boundaries without an error."""
    good = Segments.from_lengths([3, 2])
    with pytest.raises(InputError, match=f"{name} is {dtype}, must be torch.int32"):
        replace(good, **{name: getattr(good, name).to(dtype)})


def test_segments_are_frozen() -> None:
    segments = Segments.from_lengths([3, 2])
    with pytest.raises(FrozenInstanceError):
        segments.total = 6  # type: ignore[misc]


@pytest.mark.parametrize("name", ["cu_seqlens", "segment_ids"])
@pytest.mark.parametrize("use", ["mask", "position_ids", "on"])
@pytest.mark.parametrize("built_before", [True, False])
def test_an_edit_in_place_is_found(name: str, use: str, built_before: bool) -> None:
    """unsloth#10879: what was derived from boundaries is stale once they are edited."""
    uses = {
        "mask": lambda s: s.mask(torch.float32),
        "position_ids": lambda s: s.position_ids(),
        "on": lambda s: s.on("cpu"),
    }
    segments = Segments.from_lengths([3, 2])
    if built_before:
        uses[use](segments)
    getattr(segments, name)[1] += 1
    with pytest.raises(RuntimeError, match=r"edited in place.*make a new one"):
        uses[use](segments)


def test_each_structure_is_built_once() -> None:
    segments = Segments.from_lengths([5, 9], total=20)
    first = segments.mask(torch.float32)
    assert segments.mask(torch.float32) is first
    assert segments.mask(torch.float32, 9) is first  # a window that hides nothing
    assert segments.mask(torch.float32, 3) is segments.mask(torch.float32, 3)
    assert segments.mask(torch.bfloat16) is not first
    assert segments.position_ids() is segments.position_ids()
    assert segments.builds == Counter(
        {
            ("mask", CPU, torch.float32, None): 1,
            ("mask", CPU, torch.float32, 3): 1,
            ("mask", CPU, torch.bfloat16, None): 1,
            ("position_ids", CPU, torch.int64, None): 1,
        }
    )


def test_a_mask_that_could_not_be_held_is_refused_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """unsloth-zoo#582: beyond what memory holds, an error instead of a dense mask."""
    monkeypatch.setattr(segments_module, "free_bytes", lambda _: 2**40)
    segments = Segments.from_lengths([1], total=200_000)
    with pytest.raises(InputError, match=r"mask of 200,000² tokens takes 149.0 GiB > 16.0 GiB; use attention varlen"):
        segments.mask(torch.bfloat16)
    assert LARGEST_MASK_BYTES == 16 * 2**30
    with pytest.raises(InputError, match="dense mask"):  # and again
        segments.mask(torch.bfloat16)
    monkeypatch.setattr(segments_module, "free_bytes", lambda _: 3 * 2**30)
    with pytest.raises(InputError, match=r"mask of 32,768² tokens takes 4.0 GiB > 3.0 GiB"):
        Segments.from_lengths([1], total=2**15).mask(torch.bfloat16)


def test_one_copy_a_device() -> None:
    segments = Segments.from_lengths([3, 2], total=8)  # meta stands for a card
    assert segments.on("cpu") is segments
    assert segments.to(CPU, non_blocking=True) is segments
    moved = segments.on("meta")
    assert segments.on(torch.device("meta")) is moved
    assert moved.device == torch.device("meta")
    assert moved.on("meta") is moved
    assert moved.copies is segments.copies
    assert segments.copies == Counter({"meta": 1})
    assert (moved.lengths, moved.total, moved.max_seqlen) == (segments.lengths, segments.total, segments.max_seqlen)


def test_copies_share_counts_but_no_structures() -> None:
    segments = Segments.from_lengths([3, 2], total=8)
    segments.mask(torch.float32)
    moved = segments.on("meta")
    assert moved.mask(torch.float32).device.type == "meta"
    assert segments.builds == moved.builds
    assert len(segments.builds) == 2
    moved.readers.add(1)
    assert segments.readers == {1}


def test_segments_survive_pickling() -> None:
    segments = Segments.from_lengths([3, 2], total=8)
    segments.mask(torch.float32)
    segments.readers.add(1)
    twin: Segments = pickle.loads(pickle.dumps(segments))
    assert twin.readers == set()  # modules of this process
    assert twin.builds == Counter()
    assert twin.lengths == segments.lengths
    assert torch.equal(twin.cu_seqlens, segments.cu_seqlens)
    assert torch.equal(twin.mask(torch.float32), segments.mask(torch.float32))
    assert twin.on("cpu") is twin
    twin.cu_seqlens[1] = 2
    with pytest.raises(RuntimeError, match="edited in place"):
        twin.on("cpu")


def test_structures_made_in_inference_mode_can_be_trained_with() -> None:
    with torch.inference_mode():
        segments = Segments.from_lengths([3, 2], total=8)
        moved = segments.on("meta")
        mask = segments.mask(torch.float32)
        moved.position_ids()
    assert not any(tensor.is_inference() for tensor in (segments.cu_seqlens, moved.cu_seqlens, mask))
    assert segments.mask(torch.float32) is mask
    weight = torch.ones(8, requires_grad=True)
    (mask.exp() * weight).sum().backward()
    assert weight.grad is not None
