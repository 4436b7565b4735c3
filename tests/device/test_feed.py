"""The collators: a model-ready dict, and no mask where there are segments."""

import pytest
import torch
from torch.utils.data import DataLoader

from packed import documents
from slipstream import InputError, PackedCollator, Segments
from slipstream.device.feed import PaddedCollator


def test_a_packed_batch() -> None:
    """trl#3673: no attention mask is made beside the boundaries."""
    batch = PackedCollator(tokens=8)([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5, 6, 7], "seq_lengths": [1, 3]}])
    assert list(batch) == ["input_ids", "labels", "position_ids", "segments"]  # input_ids first, no attention_mask
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5, 6, 7, 0]]
    assert isinstance(batch["segments"], Segments)
    assert batch["segments"].lengths == (3, 1, 3)
    assert batch["segments"].total == 8


def test_positions_and_segments_agree() -> None:
    batch = PackedCollator(tokens=50)(documents())
    used = 50 - batch["segments"].padding
    assert torch.equal(batch["segments"].position_ids()[0, :used], batch["position_ids"][0, :used])


def test_more_than_fits_is_refused() -> None:
    with pytest.raises(InputError, match="45 tokens in 6 examples > 44"):
        PackedCollator(tokens=44)(documents())
    with pytest.raises(InputError, match="tokens 0 < 1"):
        PackedCollator(tokens=0)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_come_whole_out_of_worker_processes(workers: int) -> None:
    examples = documents((5, 3, 8, 1, 7, 2))
    loader = DataLoader(examples, batch_size=2, collate_fn=PackedCollator(tokens=16), num_workers=workers)
    batches = list(loader)
    assert [batch["segments"].lengths for batch in batches] == [(5, 3), (8, 1), (7, 2)]
    for batch in batches:
        fresh = Segments.from_lengths(batch["segments"].lengths, total=16)
        assert torch.equal(batch["segments"].cu_seqlens, fresh.cu_seqlens)
        assert torch.equal(batch["segments"].mask(torch.float32), fresh.mask(torch.float32))
        assert batch["segments"].readers == set()


def test_a_padded_batch() -> None:
    rows = [{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}, {"input_ids": [4]}, {"input_ids": [5, 6]}]
    batch = PaddedCollator()(rows)
    assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 0, 0], [5, 6, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0], [1, 1, 0]]
    assert batch["lengths"] == (3, 1, 2)
    assert batch["labels"].tolist() == [[-100, 2, 3], [-100, -100, -100], [-100, 6, -100]]


def test_a_packed_row_is_no_row_of_a_padded_batch() -> None:
    rows = [{"input_ids": [1, 2, 3], "seq_lengths": [3]}, {"input_ids": [4, 5, 6], "seq_lengths": [1, 2]}]
    assert PaddedCollator()(rows[:1])["lengths"] == (3,)
    with pytest.raises(InputError, match="a packed row of 2 documents in a padded batch"):
        PaddedCollator()(rows)
