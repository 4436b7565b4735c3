"""Which blocks of a packed row's attention hold anything: pure arithmetic on lengths, on the host.

FlexAttention skips blocks of 128 x 128 scores in which nothing is attended, and masks only those in which some are.
PyTorch's ``create_block_mask`` finds the blocks by evaluating every pair of tokens on the device, T² of them; from the
documents' lengths the host knows them without looking.

    documents A A A B B, blocks of 2        keys    AA AB B.
                                 queries AA         part
                                         AB         full part        (full: no pair is hidden, part: some are)
                                         B.               part part
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

BLOCK = 128
"""Queries and keys in a block: FlexAttention's default, and the smallest its kernels take."""
Blocks = npt.NDArray[np.int32]


@dataclass(frozen=True)
class BlockLists:
    """For each block of queries, the blocks of keys: how many, and which (the first so many of each row count).

    ``partial_*``: some pairs are hidden; ``full_*``: none is. Counts [N] and indices [N, N], int32, N = ceil(T / 128).
    """

    partial_counts: Blocks
    partial_indices: Blocks
    full_counts: Blocks
    full_indices: Blocks


def block_lists(ends: npt.NDArray[np.int64], total: int, window: int | None, block: int = BLOCK) -> BlockLists:
    """Blocks for segments that end at ``ends`` (the last at ``total``), causal, each token seeing ``window`` back."""
    first = np.arange(0, total, block)
    last = np.minimum(first + block, total) - 1
    segment_of_first, segment_of_last = (np.searchsorted(ends, tokens, side="right") for tokens in (first, last))
    q_first, q_last = first[:, None], last[:, None]
    k_first, k_last = first[None, :], last[None, :]
    # a pair exists if the nearest one does: same segment in both blocks, key not after query, within the window
    some = (segment_of_first[:, None] <= segment_of_last[None, :]) & (k_first <= q_last)
    starts = np.concatenate([[0], ends[:-1]])
    reach = starts[segment_of_first][:, None]  # how far back the segment of the block's first query goes
    some &= k_last >= reach
    if window is not None:
        some &= q_first - k_last < window
    one_segment = (segment_of_first[:, None] == segment_of_last[:, None]) & (
        segment_of_first[None, :] == segment_of_last[None, :]
    )
    full = one_segment & (segment_of_first[:, None] == segment_of_first[None, :]) & (k_last <= q_first)
    if window is not None:
        full &= q_last - k_first < window
    full &= (q_last - q_first == block - 1) & (k_last - k_first == block - 1)
    return BlockLists(*_listed(some & ~full), *_listed(full))


def _listed(chosen: npt.NDArray[np.bool_]) -> tuple[Blocks, Blocks]:
    counts = chosen.sum(axis=1).astype(np.int32)
    indices = np.argsort(~chosen, axis=1, kind="stable").astype(np.int32)
    return counts, indices
