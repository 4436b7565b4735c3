"""Rows shared evenly: every rank has as many batches, no row is lost, none is there twice."""

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler, RandomSampler

from slipstream.data.even import NOTHING, EvenOrder, EvenRows
from slipstream.device.feed import PackedCollator, PaddedCollator


def batches(count: int, rows: int, ranks: int, epoch: int = 0) -> list[list[list[int]]]:
    """Each rank's batches, as accelerate hands them out."""
    even = EvenRows(list(range(count)), rows * ranks)
    order = EvenOrder(even, seed=3)
    order.set_epoch(epoch)
    return [
        list(BatchSamplerShard(BatchSampler(order, rows, drop_last=False), ranks, rank, even_batches=True))
        for rank in range(ranks)
    ]


@pytest.mark.parametrize(("count", "rows", "ranks"), [(1, 1, 4), (5, 1, 2), (13, 2, 3), (12, 2, 3), (7, 3, 8)])
def test_no_row_is_lost_and_none_doubled(count: int, rows: int, ranks: int) -> None:
    """axolotl#494, TorchSpec#126: ranks with different numbers of batches would wait for each other for ever."""
    shares = batches(count, rows, ranks)
    assert len({len(share) for share in shares}) == 1
    given = [index for share in shares for batch in share for index in batch]
    assert sorted(index for index in given if index < count) == list(range(count))
    assert len(shares[0]) == -(-count // (rows * ranks))


def test_each_step_of_all_ranks_has_the_rows_of_one_process() -> None:
    even = EvenRows(list(range(13)), 2)
    one = list(EvenOrder(even, seed=3))[:13]
    assert one == list(RandomSampler(range(13), generator=torch.Generator().manual_seed(3)))
    assert one != list(range(13))
    first, second = batches(13, 1, 2)
    steps = [[*a, *b] for a, b in zip(first, second, strict=True)]
    assert [index for step in steps for index in step if index < 13] == one
    assert steps[-1][-1] >= 13  # what stands in comes last


def test_epochs_are_shuffled_anew() -> None:
    assert batches(13, 1, 2, epoch=0) != batches(13, 1, 2, epoch=1)


def test_what_stands_in_is_a_batch_of_padding() -> None:
    even = EvenRows([{"input_ids": [5, 6], "labels": [5, 6]}], 2)
    assert even.__getitems__([0, 1]) == [{"input_ids": [5, 6], "labels": [5, 6]}, NOTHING]
    batch = PackedCollator(tokens=4)([even[1]])
    assert batch["labels"].tolist() == [[-100] * 4]
    assert batch["segments"].lengths == ()
    assert batch["segments"].padding == 4
    assert batch["segments"].cu_seqlens[:3].tolist() == [0, 4, 4]
    mixed = PackedCollator(tokens=4)([even[0], even[1]])
    assert mixed["segments"].lengths == (2,)


def test_what_stands_in_counts_nothing_where_rows_are_padded() -> None:
    batch = PaddedCollator()([NOTHING, {"input_ids": [5, 6, 7], "labels": [5, 6, 7]}])
    assert batch["lengths"] == (0, 3)
    assert batch["labels"][0].tolist() == [-100] * 3
    assert batch["attention_mask"].tolist() == [[1, 0, 0], [1, 1, 1]]
