"""A batch whose tensors stay where they are: what a captured step reads, refilled in place for each batch.

A CUDA graph replays kernels on fixed addresses. So ids, labels, positions and boundaries live in buffers of their own,
into which each batch is copied behind the step before, on the same stream. Two things about a batch are no tensors:
how many entries ``cu_seqlens`` has, and the length that attention kernels are told as the longest. Both enter the grid
of a kernel's launch, so they are rounded up to a few values, and each combination is captured by itself. (The row's
length would always be right as the longest; but a kernel launches a block for each segment and tile of it, and most of
those would find nothing to do.)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.data.batch import IGNORE
from slipstream.device.segments import Segments
from slipstream.errors import InputError

SMALLEST_COUNT = 64
SMALLEST_LONGEST = 1024


@dataclass(frozen=True)
class BatchShape:
    """What a captured step has fixed about its batches."""

    tokens: int
    """Tokens of the row, T."""
    segments: int
    """Segments that ``cu_seqlens`` has room for."""
    longest: int
    """Upper bound of the longest segment."""

    @classmethod
    def of(cls, batch: Mapping[str, Any]) -> "BatchShape":
        """The shape that takes this batch: counts in powers of four from 64, longest in powers of two from 1,024."""
        segments: Segments | None = batch.get("segments")
        if segments is None:
            raise InputError(
                "the batch holds no segments, so its shape may change from step to step; give batches of "
                "PackedCollator, or use mode eager"
            )
        count = len(segments.lengths) + (segments.padding > 0)
        longest = _next(SMALLEST_LONGEST, 2, segments.max_seqlen)
        return cls(segments.total, _next(SMALLEST_COUNT, 4, count), min(longest, segments.total))

    def holds(self, other: "BatchShape") -> bool:
        """Whether a batch of the other shape can run in this one."""
        return self.tokens == other.tokens and self.segments >= other.segments and self.longest >= other.longest


def _next(smallest: int, factor: int, value: int) -> int:
    found = smallest
    while found < value:
        found *= factor
    return found


class StaticSegments(Segments):
    """Segments on buffers that are refilled in place; structures derived from them belong to one forward."""

    _used: torch.Tensor
    """int32, 0-d: the documents' tokens."""

    @classmethod
    def empty(cls, shape: BatchShape, device: torch.device) -> "StaticSegments":
        """Boundaries of one segment that holds the whole row, on ``device``."""
        cu_seqlens = torch.full((shape.segments + 1,), shape.tokens, dtype=torch.int32, device=device)
        cu_seqlens[0] = 0
        ids = torch.zeros(shape.tokens, dtype=torch.int32, device=device)
        made = cls((), shape.tokens, cu_seqlens, ids, shape.longest)
        object.__setattr__(made, "_used", torch.full((), shape.tokens, dtype=torch.int32, device=device))
        return made

    def __post_init__(self) -> None:
        """Nothing to check: ``fill`` takes over what was checked."""

    def fill(self, segments: Segments) -> None:
        """Take over another batch's boundaries, asynchronously; they must fit."""
        assert segments.total == self.total
        assert segments.max_seqlen <= self.max_seqlen
        room = self.cu_seqlens.shape[0]
        ends = segments.cu_seqlens[: len(segments.lengths) + (segments.padding > 0) + 1]
        assert ends.shape[0] <= room
        self.cu_seqlens[: ends.shape[0]].copy_(ends, non_blocking=True)
        self.cu_seqlens[ends.shape[0] :].fill_(self.total)
        self.segment_ids.copy_(segments.segment_ids, non_blocking=True)
        self._used.fill_(segments.total - segments.padding)

    def real(self) -> torch.Tensor:
        """float32 [T]: 1 for each token of a document, 0 for padding."""
        return (torch.arange(self.total, device=self.device) < self._used).float()

    def forget(self) -> None:
        """Drop derived structures: they are of the boundaries before, or belong to a graph."""
        self._derived.clear()

    def on(self, device: torch.device | str | int) -> Segments:
        """These segments, which are where they are."""
        return self

    def _refuse_edited(self) -> None:
        """Being edited in place is what these are for."""


class StaticBatch:
    """The buffers of one ``BatchShape`` on one device: ``inputs`` for the model, ``labels`` among them."""

    def __init__(self, shape: BatchShape, device: torch.device) -> None:
        """Buffers for batches of ``shape``."""
        self.shape = shape
        row = (1, shape.tokens)
        self.segments = StaticSegments.empty(shape, device)
        self.inputs: dict[str, Any] = {
            "input_ids": torch.zeros(row, dtype=torch.int64, device=device),
            "labels": torch.full(row, IGNORE, device=device),
            "position_ids": torch.zeros(row, dtype=torch.int64, device=device),
            "segments": self.segments,
        }
        self.learned = torch.ones((), dtype=torch.float32, device=device)
        """What the summed loss is divided by: the learned tokens of the whole optimizer step."""

    def fill(self, batch: Mapping[str, Any], learned: torch.Tensor | float) -> None:
        """Copy a batch in, behind what was queued before; the host does not wait. Unknown parts are refused."""
        unknown = sorted(set(batch) - set(self.inputs))
        if unknown:
            raise InputError(f"the batch holds {', '.join(unknown)}, which a captured step has no buffer for")
        for name in ("input_ids", "labels", "position_ids"):
            self.inputs[name].copy_(batch[name], non_blocking=True)
        self.segments.fill(batch["segments"])
        if isinstance(learned, torch.Tensor):
            self.learned.copy_(learned, non_blocking=True)
        else:
            self.learned.fill_(learned)
