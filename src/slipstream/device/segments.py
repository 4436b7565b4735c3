"""``Segments``: where the documents of a packed row begin and end, worked out once a batch.

Every layer's attention needs the same boundaries. Building them (or the mask made from them) in each layer costs
L times what it must, and finding them on the device makes the host wait. So they are made in the collator from Python
integers, travel with the batch, are copied once a device, and whatever an attention kernel derives from them is made
at first use and kept here, one entry for each distinct structure. The object is immutable and dies with its batch,
so there is no cache to clear and nothing that can go stale; the alternative, a global cache keyed by object identity,
returns old boundaries after an in-place edit.

    lengths      (3, 2, 4), total 12            documents A, B, C and 3 tokens of padding
    cu_seqlens   0 3 5 9 12 12 12 ... 12        int32, the padding is one more segment; filled up to a bucketed count
    segment_ids  0 0 0 1 1 2 2 2 2 3 3 3        int32 [T]

T: tokens of the batch. ``cu_seqlens`` is filled with T to a bucketed count, so that its shape takes few values.
"""

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar

import numpy as np
import torch

from slipstream.cost.estimate import dense_mask_bytes
from slipstream.cost.hardware import free_bytes
from slipstream.cost.sizes import size_text
from slipstream.errors import InputError

Made = TypeVar("Made")
SMALLEST_BUCKET = 16
LARGEST_MASK_BYTES = 16 * 2**30
ASK_FROM_BYTES = 2**30
"""Masks smaller than this are made without asking the device what is free, which costs host time."""


def bucket(count: int) -> int:
    """Number of segments that ``cu_seqlens`` has room for: the next power of two, at least 16."""
    return max(SMALLEST_BUCKET, 1 << (count - 1).bit_length())


@dataclass(frozen=True, eq=False)
class Segments:
    """The documents of one packed batch. Make it with ``from_lengths``.

    Attention of token i reaches token j when both lie in the same segment and j <= i (and i - j < window, for a
    sliding window of that many tokens, transformers' convention).
    """

    lengths: tuple[int, ...]
    """Lengths of the documents in tokens, padding left out."""
    total: int
    """Tokens of the batch, T."""
    cu_seqlens: torch.Tensor
    """int32 [bucket + 1]: 0, each segment's end, then T repeated."""
    segment_ids: torch.Tensor
    """int32 [T]: the segment of each token; the padding segment has the last id."""
    max_seqlen: int
    """Length of the longest segment, the padding segment included."""
    builds: Counter[tuple[Any, ...]] = field(default_factory=Counter, repr=False)
    """How often each derived structure was built, by (kind, device, dtype, window); shared by all device copies."""
    copies: Counter[str] = field(default_factory=Counter, repr=False)
    """How often the tensors were copied to each device; shared by all device copies."""
    readers: set[int] = field(default_factory=set, repr=False)
    """``id`` of each attention module that asked for the boundaries; shared by all device copies."""
    _versions: tuple[int, int] = field(init=False, repr=False)
    _derived: dict[tuple[Any, ...], Any] = field(default_factory=dict, repr=False)
    _on: dict[torch.device, "Segments"] = field(default_factory=dict, repr=False)

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], *, total: int | None = None) -> Self:
        """Segments of documents with these lengths, filled up to ``total`` tokens (default: their sum) by padding.

        No lengths with a ``total`` is a batch that is all padding. Raises ``InputError`` for no documents without one,
        a length below 1, or lengths that sum to more than ``total``.
        """
        checked = () if total and not len(lengths) else _checked_lengths(lengths)
        used = sum(checked)
        total = used if total is None else _whole(total, "total")
        if used > total:
            raise InputError(
                f"lengths sum to {used:,} > {total:,} tokens of the row; give fewer documents or a larger total"
            )
        spans = np.asarray(checked if used == total else (*checked, total - used), dtype=np.int64)
        cu_seqlens = np.full(bucket(spans.size) + 1, total, dtype=np.int32)
        cu_seqlens[0] = 0
        cu_seqlens[1 : spans.size + 1] = np.cumsum(spans)
        segment_ids = np.repeat(np.arange(spans.size, dtype=np.int32), spans)
        with torch.inference_mode(False):  # the batch may be trained on later
            tensors = torch.from_numpy(cu_seqlens), torch.from_numpy(segment_ids)
        return cls(checked, total, *tensors, int(spans.max()))

    def __post_init__(self) -> None:
        """Refuse tensors of the wrong dtype; on the host, boundaries that don't rise to T as well."""
        for name in ("cu_seqlens", "segment_ids"):
            tensor: torch.Tensor = getattr(self, name)
            if tensor.dtype != torch.int32:
                raise InputError(f"{name} is {tensor.dtype}, must be torch.int32; make Segments with from_lengths")
        object.__setattr__(self, "_versions", self._current_versions())
        if not self.cu_seqlens.is_cpu:
            return
        ends = self.cu_seqlens.numpy()
        rises = ends[0] == 0 and ends[-1] == self.total and bool((np.diff(ends) >= 0).all())
        if not rises or not np.array_equal(np.diff(ends[: len(self.lengths) + 1]), self.lengths):
            raise InputError(
                f"cu_seqlens must rise from 0 to {self.total} by the documents' lengths {list(self.lengths[:8])}; "
                f"got {ends[:9].tolist()}; make Segments with from_lengths"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled without counts and derived structures, which belong to a process; so it leaves a loader's worker."""
        return type(self), (self.lengths, self.total, self.cu_seqlens, self.segment_ids, self.max_seqlen)

    @property
    def device(self) -> torch.device:
        """Where the tensors lie."""
        return self.cu_seqlens.device

    @property
    def padding(self) -> int:
        """Tokens of the padding segment."""
        return self.total - sum(self.lengths)

    def on(self, device: torch.device | str | int) -> "Segments":
        """These segments on ``device``; copied at the first call (asynchronously from pinned memory), then kept."""
        self._refuse_edited()
        device = _with_index(torch.device(device))
        if device == self.device:
            return self
        if device not in self._on:
            self.copies[str(device)] += 1
            self._on[device] = self._moved(lambda tensor: tensor.to(device, non_blocking=True))
        return self._on[device]

    def to(self, device: torch.device | str | int, *_: Any, **__: Any) -> "Segments":
        """``on``, under the name that accelerate and transformers call."""
        return self.on(device)

    def pin_memory(self, *_: Any) -> "Segments":
        """These segments in pinned host memory (called by ``DataLoader(pin_memory=True)``)."""
        return self._moved(lambda tensor: tensor.pin_memory())

    def position_ids(self) -> torch.Tensor:
        """Each token's position in its own segment, int64 [1, T]; built once."""

        def build() -> torch.Tensor:
            starts = self.cu_seqlens[self.segment_ids.long()]
            return (torch.arange(self.total, device=self.device) - starts)[None]

        return self._once(("position_ids", self.device, torch.int64, None), build)

    def real(self) -> torch.Tensor:
        """float32 [T]: 1 for each token of a document, 0 for padding; built once."""

        def build() -> torch.Tensor:
            return (torch.arange(self.total, device=self.device) < self.total - self.padding).float()

        return self._once(("real", self.device, torch.float32, None), build)

    def window(self, window: int | None) -> int | None:
        """``window`` in tokens, or None where no segment is longer, so that the window changes nothing."""
        return None if window is None or window >= self.max_seqlen else window

    def mask(self, dtype: torch.dtype, window: int | None = None) -> torch.Tensor:
        """The additive attention mask, ``dtype`` [1, 1, T, T]: 0 where attended, -inf elsewhere.

        Built once for each (dtype, window). Raises ``InputError`` where it could not be held.
        """
        window = self.window(window)
        return self._once(("mask", self.device, dtype, window), lambda: self._build_mask(dtype, window))

    def derive(
        self, kind: str, build: Callable[[], Made], dtype: torch.dtype | None = None, window: int | None = None
    ) -> Made:
        """A kernel's own structure on this device; ``build`` is called once for each (kind, dtype, window)."""
        return self._once((kind, self.device, dtype, window), build)

    def _build_mask(self, dtype: torch.dtype, window: int | None) -> torch.Tensor:
        needed = dense_mask_bytes(self.total, dtype.itemsize)
        room = LARGEST_MASK_BYTES if needed < ASK_FROM_BYTES else min(LARGEST_MASK_BYTES, free_bytes(self.device))
        if needed > room:
            raise InputError(
                f"a dense mask of {self.total:,}² tokens takes {size_text(needed)} > {size_text(room)}; "
                f"use attention varlen or flex, or lower packing.tokens or packing.rows"
            )
        position = torch.arange(self.total, device=self.device)
        hidden = self.segment_ids[:, None] != self.segment_ids[None, :]
        hidden |= position[:, None] < position[None, :]
        if window is not None:
            hidden |= position[:, None] >= position[None, :] + window
        mask = torch.zeros(hidden.shape, dtype=dtype, device=self.device)
        return mask.masked_fill_(hidden, float("-inf"))[None, None]

    def _once(self, key: tuple[Any, ...], build: Callable[[], Made]) -> Made:
        self._refuse_edited()
        if key not in self._derived:
            self.builds[key] += 1
            with torch.inference_mode(False), torch.no_grad():
                self._derived[key] = build()
        made: Made = self._derived[key]
        return made

    def _refuse_edited(self) -> None:
        if self._versions != self._current_versions():
            raise RuntimeError(
                "Segments was edited in place; it is immutable: make a new one with Segments.from_lengths"
            )

    def _current_versions(self) -> tuple[int, int]:
        """PyTorch's count of edits in place; a tensor from another process doesn't begin at 0."""
        return self.cu_seqlens._version, self.segment_ids._version

    def _moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> "Segments":
        with torch.inference_mode(False):
            cu_seqlens, segment_ids = move(self.cu_seqlens), move(self.segment_ids)
        return replace(self, cu_seqlens=cu_seqlens, segment_ids=segment_ids, _derived={}, _on={})


def _checked_lengths(lengths: Sequence[int]) -> tuple[int, ...]:
    checked = tuple(_whole(length, f"length of document {index}") for index, length in enumerate(lengths))
    if not checked:
        raise InputError("no lengths: a packed row holds at least one document")
    for index, length in enumerate(checked):
        if length < 1:
            raise InputError(f"document {index} has length {length}; every document holds at least 1 token")
    return checked


def _whole(value: object, name: str) -> int:
    """``value`` as a Python integer; a bool is refused: it is what a mask cast to boundaries looks like."""
    if isinstance(value, bool) or (isinstance(value, torch.Tensor) and value.dtype == torch.bool):
        raise InputError(f"{name} is {value}, must be a whole number of tokens")
    try:
        return operator.index(value)  # type: ignore[arg-type]  # whether it has an index is the question
    except TypeError as error:
        raise InputError(f"{name} is {value!r}, must be a whole number of tokens") from error


def _with_index(device: torch.device) -> torch.device:
    """``cuda`` and ``cuda:0`` are one device: give the index where it is left out."""
    return torch.device("cuda", torch.cuda.current_device()) if str(device) == "cuda" else device
