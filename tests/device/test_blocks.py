"""Block lists against every pair of tokens, looked at one by one."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.device.blocks import block_lists


def by_pairs(lengths: list[int], window: int | None, block: int) -> tuple[set, set]:
    """The partial and the full blocks, from the definition."""
    ids = np.repeat(np.arange(len(lengths)), lengths)
    total = len(ids)
    q, k = np.arange(total)[:, None], np.arange(total)[None, :]
    seen = (ids[:, None] == ids[None, :]) & (k <= q)
    if window is not None:
        seen &= q - k < window
    partial, full = set(), set()
    for i in range(0, total, block):
        for j in range(0, total, block):
            part = seen[i : i + block, j : j + block]
            place = (i // block, j // block)
            if part.shape == (block, block) and part.all():
                full.add(place)
            elif part.any():
                partial.add(place)
    return partial, full


def listed(counts: np.ndarray, indices: np.ndarray) -> set:
    return {(row, int(index)) for row, count in enumerate(counts) for index in indices[row, :count]}


@settings(max_examples=300, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=12),
    window=st.none() | st.integers(1, 25),
    block=st.sampled_from([1, 2, 4, 8]),
)
def test_as_by_pairs(lengths: list[int], window: int | None, block: int) -> None:
    lists = block_lists(np.cumsum(lengths), sum(lengths), window, block)
    partial, full = by_pairs(lengths, window, block)
    assert listed(lists.partial_counts, lists.partial_indices) == partial
    assert listed(lists.full_counts, lists.full_indices) == full


@pytest.mark.parametrize("window", [None, 40])
def test_long_documents_have_full_blocks_and_skipped_ones(window: int | None) -> None:
    lists = block_lists(np.array([40, 100]), 100, window, 8)
    blocks = 13
    assert lists.full_counts.sum() > 0
    assert lists.partial_counts.sum() + lists.full_counts.sum() < blocks * (blocks + 1) // 2
    assert lists.partial_indices.shape == lists.full_indices.shape == (blocks, blocks)
    assert {array.dtype for array in vars(lists).values()} == {np.dtype(np.int32)}
