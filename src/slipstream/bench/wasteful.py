"""The two references that packing is measured against: boundaries and mask made again in every layer.

Neither is a straw man. Frameworks that carry only position ids or a tensor of lengths find the boundaries on the
device in each attention call, wait for the answer, and build the structure the kernel wants from it:

- ``loop`` makes the dense mask document by document, one block after the other (``sdpa`` only);
- ``vectorised`` makes whatever the kernel wants by whole-tensor operations: the dense mask with the very code that
  Slipstream uses once a batch, a block mask or bias with the constructor of the library that defines it.

Both then call Slipstream's own attention for the choice, so that what is computed is the same to the last kernel and
the difference is the rebuilding alone. Their keys are registered with transformers like any other attention and chosen
per instance. A layer finds its ``PackedRow`` in the forward's kwargs, as ours finds its ``Segments``.

T: tokens of the row; N: its documents.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Literal, get_args

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from slipstream.device.segments import Segments, bucket
from slipstream.model.attention import AttentionChoice, Needs, attention_key, register_attention

Kind = Literal["loop", "vectorised"]
METADATA = "metadata"
"""The key under which rebuilt boundaries are counted."""


class LoopSegments(Segments):
    """Segments whose dense mask is made one document after the other."""

    def _build_mask(self, dtype: torch.dtype, window: int | None) -> torch.Tensor:
        assert window is None, "the benchmark's shapes have no windows"
        mask_TT = torch.full((self.total, self.total), float("-inf"), dtype=dtype, device=self.device)
        ends = torch.tensor([0, *self.lengths]).cumsum(0).tolist()
        for begin, end in pairwise(ends):
            block = torch.full((end - begin, end - begin), float("-inf"), dtype=dtype, device=self.device)
            mask_TT[begin:end, begin:end] = block.triu_(diagonal=1)
        return mask_TT[None, None]


@dataclass(eq=False)
class PackedRow:
    """A packed row as a framework without ``Segments`` knows it: positions that begin again at each document."""

    position_ids: torch.Tensor
    """int64 [1, T] on the device; documents fill the row."""
    builds: Counter[tuple[Any, ...]] = field(default_factory=Counter)
    """What was built how often, boundaries (under ``METADATA``) and structures."""

    def boundaries(self, kind: Kind) -> Segments:
        """Find the documents on the device; the host waits for their number, their lengths and the longest."""
        device, total = self.position_ids.device, self.position_ids.shape[1]
        self.builds[METADATA, str(device)] += 1
        first_T = self.position_ids[0] == 0
        starts_N = first_T.nonzero()[:, 0]
        ends_N = torch.cat([starts_N[1:], starts_N.new_full((1,), total)])
        lengths_N = ends_N - starts_N
        longest = int(lengths_N.max().item())
        lengths = tuple(lengths_N.tolist())
        cu_seqlens = torch.full((bucket(len(lengths)) + 1,), total, dtype=torch.int32, device=device)
        cu_seqlens[: len(lengths)] = starts_N
        segment_ids = (first_T.cumsum(0) - 1).to(torch.int32)
        made = LoopSegments if kind == "loop" else Segments
        return made(lengths, total, cu_seqlens, segment_ids, longest, builds=self.builds)


def rebuild(row: PackedRow, choice: str, kind: Kind, dtype: torch.dtype, window: int | None = None) -> Segments:
    """What one layer of a reference does before it attends: boundaries, and the structure that the choice wants.

    ``dtype`` is the queries', ``window`` the layer's. The structure lies on the segments, where the choice's kernel
    finds it.
    """
    segments = row.boundaries(kind)
    STRUCTURES[choice](segments, dtype, segments.window(window))
    return segments


def _dense_mask(segments: Segments, dtype: torch.dtype, window: int | None) -> None:
    segments.mask(dtype, window)


def _block_mask(segments: Segments, dtype: torch.dtype, window: int | None) -> None:
    """FlexAttention's block mask as PyTorch makes it: every pair of tokens is looked at on the device."""
    from torch.nn.attention.flex_attention import create_block_mask

    ids, total = segments.segment_ids, segments.total

    def within(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        seen = (ids[query] == ids[key]) & (key <= query)
        return seen if window is None else seen & (query - key < window)

    build = partial(create_block_mask, within, None, None, total, total, device=segments.device)
    segments.derive("block_mask", build, window=window)


def _block_diagonal_bias(segments: Segments, dtype: torch.dtype, window: int | None) -> None:
    """xFormers' bias by its own constructor, which copies the offsets to the device; the kernel makes one of its own
    for a window."""
    if window is not None:
        return
    from xformers.ops.fmha.attn_bias import BlockDiagonalCausalMask

    build = partial(BlockDiagonalCausalMask.from_seqlens, list(segments.lengths), device=segments.device)
    segments.derive("xformers", build)


def _nothing(segments: Segments, dtype: torch.dtype, window: int | None) -> None:
    """Variable-length attention takes the boundaries as they are."""


STRUCTURES: Mapping[str, Callable[[Segments, torch.dtype, int | None], None]] = MappingProxyType(
    {"varlen": _nothing, "flex": _block_mask, "xformers": _block_diagonal_bias, "sdpa": _dense_mask}
)
"""What each attention choice derives from segments, in a layer with a window or without."""


def kinds(choice: str) -> tuple[Kind, ...]:
    """The references there are for an attention choice: a document loop makes a dense mask only."""
    return ("loop", "vectorised") if choice == "sdpa" else ("vectorised",)


def choices() -> tuple[str, ...]:
    """Every attention choice that ``Options`` accepts by name."""
    return tuple(choice for choice in get_args(AttentionChoice) if choice != "auto")


def wasteful_key(choice: str, kind: Kind) -> str:
    """The name under which a reference is registered with transformers, which refuses "sdpa" in it for some models."""
    return f"slipstream_bench_{kind}_{choice.replace('sdpa', 'masked')}"


def register_wasteful(*, outside_graphs: bool = False) -> None:
    """Register all references with transformers; calling it again changes nothing.

    ``outside_graphs``: as functions that ``torch.compile`` calls and does not look into, as ours in compiled layers.
    """
    register_attention(outside_graphs=outside_graphs)
    for choice in choices():
        for kind in kinds(choice):
            function: Callable[..., Any] = partial(wasteful_attention, choice, kind)
            AttentionInterface.register(wasteful_key(choice, kind), _outside(function) if outside_graphs else function)
            AttentionMaskInterface.register(wasteful_key(choice, kind), sdpa_mask)


def _outside(function: Callable[..., Any]) -> Callable[..., Any]:
    def attention(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    disabled: Callable[..., Any] = torch.compiler.disable(attention)  # type: ignore[no-untyped-call]
    return disabled


def attention_function(choice: str) -> Callable[..., tuple[torch.Tensor, None]]:
    """Slipstream's own attention for a choice, as transformers finds it for a model of plain dot products."""
    plain = Needs(head_width=64, value_width=64)
    found: Callable[..., tuple[torch.Tensor, None]] = AttentionInterface()[attention_key(choice, plain)]
    return found


def wasteful_attention(
    choice: str, kind: Kind, module: nn.Module, query: torch.Tensor, *tensors: Any, packed_row: PackedRow, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """One layer's attention: boundaries found, structure built, attended, and all but the result thrown away."""
    kind_of_device = query.device.type
    autocast = torch.is_autocast_enabled(kind_of_device)
    dtype = torch.get_autocast_dtype(kind_of_device) if autocast else query.dtype
    segments = rebuild(packed_row, choice, kind, dtype, kwargs.get("sliding_window"))
    return attention_function(choice)(module, query, *tensors, segments=segments, **kwargs)
