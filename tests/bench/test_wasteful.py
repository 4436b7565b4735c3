"""The references rebuild what Slipstream builds once, and build the same thing."""

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask

from slipstream.bench.wasteful import METADATA, PackedRow, choices, kinds, rebuild
from slipstream.device.segments import Segments
from slipstream.model.attention.flex import block_mask

LENGTHS = (9, 1, 30, 24)


def row() -> PackedRow:
    return PackedRow(Segments.from_lengths(LENGTHS).position_ids())


@pytest.mark.parametrize("kind", ["loop", "vectorised"])
def test_boundaries_are_found_again(kind) -> None:
    found, expected = row().boundaries(kind), Segments.from_lengths(LENGTHS)
    assert found.lengths == LENGTHS
    assert found.max_seqlen == expected.max_seqlen == 30
    assert torch.equal(found.cu_seqlens, expected.cu_seqlens)
    assert torch.equal(found.segment_ids, expected.segment_ids)
    assert found.segment_ids.dtype == torch.int32


@pytest.mark.parametrize("kind", ["loop", "vectorised"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_masks_are_ours(kind, dtype) -> None:
    mask = row().boundaries(kind).mask(dtype)
    assert mask.dtype == dtype
    assert torch.equal(mask, Segments.from_lengths(LENGTHS).mask(dtype))


def test_every_rebuild_is_counted() -> None:
    packed = row()
    for _ in range(3):
        rebuild(packed, "sdpa", "loop", torch.float32)
    assert packed.builds == {(METADATA, "cpu"): 3, ("mask", torch.device("cpu"), torch.float32, None): 3}


def test_a_layer_with_a_window_makes_its_own_mask_alone() -> None:
    packed = row()
    segments = rebuild(packed, "sdpa", "vectorised", torch.float32, window=8)
    assert packed.builds == {(METADATA, "cpu"): 1, ("mask", torch.device("cpu"), torch.float32, 8): 1}
    ours = Segments.from_lengths(LENGTHS).mask(torch.float32, 8)
    assert torch.equal(segments.mask(torch.float32, 8), ours)
    assert not torch.equal(ours, Segments.from_lengths(LENGTHS).mask(torch.float32))
    theirs = block_mask(rebuild(row(), "flex", "vectorised", torch.float32, window=8), 8)
    assert torch.equal(theirs.to_dense(), block_mask(Segments.from_lengths(LENGTHS), 8).to_dense())


def test_block_mask_of_the_library_shows_the_same_blocks() -> None:
    lengths = (200, 56, 300, 84)
    packed = PackedRow(Segments.from_lengths(lengths).position_ids())
    segments = rebuild(packed, "flex", "vectorised", torch.float32)
    theirs = block_mask(segments, None)  # finds what was rebuilt
    assert isinstance(theirs, BlockMask)
    assert packed.builds["block_mask", torch.device("cpu"), None, None] == 1
    ours = block_mask(Segments.from_lengths(lengths), None)
    assert torch.equal(theirs.to_dense(), ours.to_dense())
    assert 0 < theirs.to_dense().sum() < theirs.to_dense().numel()


def test_every_choice_has_a_reference() -> None:
    assert set(choices()) == {"varlen", "flex", "xformers", "sdpa"}
    assert kinds("sdpa") == ("loop", "vectorised")
    assert all(kinds(choice) == ("vectorised",) for choice in choices() if choice != "sdpa")
