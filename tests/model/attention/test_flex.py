"""FlexAttention's block mask against PyTorch's own, and its kernel, uncompiled on the CPU, against the masked one."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

from attending import by_definition, drawn
from slipstream import Segments
from slipstream.device.blocks import BLOCK
from slipstream.model.attention import flex
from slipstream.model.attention.call import Call

ROWS: list[tuple[tuple[int, ...], int]] = [
    ((300, 1, 211), 512),  # a document over several blocks
    ((300, 1, 100), 512),  # padding
    ((128, 256, 128), 512),  # boundaries on those of blocks
    ((1,) * 200, 200),
    ((7, 3), 10),  # less than a block
    ((500,), 513),
]


@pytest.mark.parametrize("window", [None, 1, 100, 200])
@pytest.mark.parametrize(("lengths", "total"), ROWS)
def test_the_block_mask_means_what_pytorchs_own_would(lengths: Any, total: int, window: int | None) -> None:
    """Token by token: nothing but what a full block, or a partial one under its condition, lets through."""
    segments = Segments.from_lengths(lengths, total=total)
    ours = flex.block_mask(segments, window)
    seen = create_mask(ours.mask_mod, 1, 1, total, total, device="cpu")
    assert torch.equal(seen, segments.mask(torch.float32, window) == 0)
    theirs = create_block_mask(ours.mask_mod, 1, 1, total, total, device="cpu", BLOCK_SIZE=BLOCK)
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    assert ours.seq_lengths == theirs.seq_lengths == (total, total)
    assert ours.BLOCK_SIZE == theirs.BLOCK_SIZE
    for part in ("", "full_"):
        for side in ("kv", "q"):  # the backward goes by the queries of each block of keys
            assert listed(ours, f"{part}{side}") == listed(theirs, f"{part}{side}")


def listed(mask: Any, name: str) -> set[tuple[int, int]]:
    counts, indices = getattr(mask, f"{name}_num_blocks")[0, 0], getattr(mask, f"{name}_indices")[0, 0]
    assert counts.dtype == indices.dtype == torch.int32
    return {(row, int(i)) for row, count in enumerate(counts) for i in indices[row, :count]}


def test_full_blocks_and_skipped_ones_occur() -> None:
    mask = flex.block_mask(Segments.from_lengths([384, 128]), None)
    assert len(listed(mask, "full_kv")) == 3
    assert len(listed(mask, "kv")) == 4
    assert mask.to_dense().sum() == 7 < 16


def test_a_block_mask_is_built_once_for_each_window() -> None:
    segments = Segments.from_lengths([300, 212])
    first = flex.block_mask(segments, None)
    assert flex.block_mask(segments, None) is first
    assert flex.block_mask(segments, 100) is flex.block_mask(segments, 100) is not first
    assert {(key[0], key[3]): count for key, count in segments.builds.items()} == {
        ("block_mask", None): 1,
        ("block_mask", 100): 1,
    }


def test_no_mask_of_all_pairs_is_made() -> None:
    """unsloth-zoo#582: 65,536 tokens, where a dense mask would take 4 GiB of booleans."""
    segments = Segments.from_lengths([1000] * 60, total=65_536)
    mask = flex.block_mask(segments, None)
    tensors = [value for value in vars(mask).values() if isinstance(value, torch.Tensor)]
    assert len(tensors) >= 8
    assert max(tensor.numel() for tensor in tensors) <= (65_536 // BLOCK) ** 2 + 65_536 // BLOCK
    assert not any(key[0] == "mask" for key in segments.builds)


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling takes a card, or minutes; uncompiled, FlexAttention computes every score under the same functions."""
    monkeypatch.setattr(flex, "_compiled", lambda: flex_attention)


@pytest.mark.parametrize(
    ("heads", "groups", "window", "extra"),
    [
        (4, 4, None, "none"),
        (4, 2, 3, "none"),
        (4, 2, None, "softcap"),
        (4, 4, 3, "softcap"),
        (4, 4, None, "sinks"),
        (4, 2, 3, "sinks"),
        (4, 2, None, "both"),
        (4, 4, 3, "both"),
    ],
)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.usefixtures("uncompiled")
def test_by_its_definition(heads: int, groups: int, window: int | None, extra: str) -> None:
    segments = Segments.from_lengths([5, 1, 6], total=14)
    q, k, v = (x.detach() for x in drawn(heads, groups, 14, 16))
    sinks = torch.linspace(-1, 1, heads, dtype=torch.float64, requires_grad=True)
    call = Call(
        scale=0.3,
        window=window,
        softcap=0.7 if extra in ("softcap", "both") else None,
        sinks=sinks if extra in ("sinks", "both") else None,
    )
    with torch.no_grad():
        found = flex.kernel(q, k, v, segments, call)
        expected = by_definition(q, k, v, call, (5, 1, 6, 2))
    assert found.shape == (1, 14, heads, 16)
    assert found.is_contiguous()
    assert found.dtype == q.dtype
    assert (found - expected).abs().max() < 1e-5
    assert [key[3] for key in segments.builds] == [window]


def test_one_function_for_each_cap() -> None:
    """Another function object would compile anew in every batch."""
    assert flex.soft_cap(50.0) is flex.soft_cap(50.0) is not flex.soft_cap(30.0)
    score = torch.linspace(-100, 100, 9)
    capped = flex.soft_cap(50.0)(score, 0, 0, 0, 0)
    assert np.allclose(capped, 50 * np.tanh(score.numpy() / 50))
