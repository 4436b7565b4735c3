"""The same number of batches for every rank, with no row lost and none doubled.

    5 rows in order c a e b d, 2 ranks, 1 row a batch:     rank 0   c  e  d        rank 1   a  b  -

Ranks must take every step together, and rows rarely divide evenly. Loaders either give the first rows a second time or
leave the last ones out; here ``-`` stands in: a row without documents, whose batch is all padding, adds nothing to the
loss and counts as nothing. The price is at most one wasted batch a rank and epoch. Rows come in the order that a single
process would see, so R ranks learn in each step what one process learns from R batches.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset, Sampler

NOTHING: dict[str, Any] = {"input_ids": [], "labels": [], "seq_lengths": []}
"""The row that stands in; `collate` passes over it."""


class EvenRows(Dataset[Any]):
    """``rows`` followed by as many `NOTHING` as make their number a multiple of ``multiple``."""

    def __init__(self, rows: Any, multiple: int) -> None:
        """``rows``: a data set with a length; ``multiple``: rows of a batch times ranks."""
        self.rows, self.real = rows, len(rows)
        self._length = -(-self.real // multiple) * multiple

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return self.rows[index] if index < self.real else NOTHING

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Several rows at once, as a loader asks for them."""
        return [self[index] for index in indices]


class EvenOrder(Sampler[int]):
    """The indices of `EvenRows`: the rows shuffled under seed and epoch, as one process would; the rest last."""

    def __init__(self, rows: EvenRows, seed: int) -> None:
        """Begins at epoch 0."""
        self.rows, self.seed, self.epoch = rows, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """The epoch that the next iteration is of."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        yield from torch.randperm(self.rows.real, generator=generator).tolist()
        yield from range(self.rows.real, len(self.rows))
