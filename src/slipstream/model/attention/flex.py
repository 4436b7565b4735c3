"""``flex``: PyTorch's FlexAttention under a block mask, made once a batch for each distinct window.

It honours soft caps and sinks and skips blocks in which nothing is attended. Its kernels are compiled at first use,
which takes seconds; uncompiled it would compute every score. The blocks come from the documents' lengths on the host
(``device/blocks.py``), so that no T x T mask exists and nothing is looked up on the device.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from slipstream.cost.hardware import Device
from slipstream.device.blocks import BLOCK, Blocks, block_lists
from slipstream.device.segments import Segments
from slipstream.model.attention.call import Call, Needs

SMALLEST_HEAD = 16
RECOMPILE_LIMIT = 64


def obstacle(needs: Needs, device: Device, dtype: torch.dtype) -> str | None:
    """Why FlexAttention can't be used here, or None."""
    if needs.mask_only:
        return "this model hands its attention a mask, but no segments"
    if device.kind != "cuda":
        return f"its kernels train on CUDA devices only, and this is {device.in_words}"
    if device.compute_capability is None or device.compute_capability < (8, 0):
        return f"its kernels need compute capability 8.0 or newer, {device.name} has {device.capability}"
    if needs.dropout:
        return f"it has no dropout and the model's attention_dropout is {needs.dropout}"
    if needs.head_width < SMALLEST_HEAD:
        return f"its kernels take head widths from {SMALLEST_HEAD}, the model has {needs.head_width}"
    return None


def kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments, call: Call) -> torch.Tensor:
    """See ``call.Kernel``."""
    from torch.nn.attention.flex_attention import AuxRequest

    asked: dict[str, Any] = {
        "block_mask": block_mask(segments, call.window),
        "scale": call.scale,
        "enable_gqa": query.shape[1] != key.shape[1],
        "score_mod": None if call.softcap is None else soft_cap(call.softcap),
    }
    if call.sinks is None:
        out = _compiled()(query, key, value, **asked)
    else:
        out, aux = _compiled()(query, key, value, **asked, return_aux=AuxRequest(lse=True))
        # the sink's share of the softmax goes to nothing; FlexAttention differentiates its log-sum-exp
        out = (out * torch.sigmoid(aux.lse - call.sinks.float()[None, :, None])[..., None]).to(query.dtype)
    out = out.transpose(1, 2).contiguous()
    assert isinstance(out, torch.Tensor)
    return out


def block_mask(segments: Segments, window: int | None) -> Any:
    """The ``BlockMask`` of these segments on their device; built once for each window."""
    return segments.derive("block_mask", partial(_build, segments, window), window=window)


def _build(segments: Segments, window: int | None) -> Any:
    from torch.nn.attention.flex_attention import BlockMask

    spans = segments.lengths if not segments.padding else (*segments.lengths, segments.padding)
    lists = block_lists(np.cumsum(spans), segments.total, window)
    return BlockMask.from_kv_blocks(
        _sent(lists.partial_counts, segments.device),
        _sent(lists.partial_indices, segments.device),
        _sent(lists.full_counts, segments.device),
        _sent(lists.full_indices, segments.device),
        BLOCK_SIZE=BLOCK,
        mask_mod=_mask_mod(segments.segment_ids, window),
        seq_lengths=(segments.total, segments.total),
    )


def _sent(array: Blocks, device: torch.device) -> torch.Tensor:
    """[1, 1, ...] on the device, copied from pinned memory, so that the host needn't wait."""
    tensor = torch.from_numpy(array)[None, None]
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _mask_mod(segment_ids: torch.Tensor, window: int | None) -> Callable[..., torch.Tensor]:
    def within(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        seen = (segment_ids[query] == segment_ids[key]) & (key <= query)
        return seen if window is None else seen & (query - key < window)

    return within


@cache
def soft_cap(cap: float) -> Callable[..., torch.Tensor]:
    """The score modification s → cap * tanh(s / cap); one function object for each cap, so that it compiles once."""

    def capped(score: torch.Tensor, batch: Any, head: Any, query: Any, key: Any) -> torch.Tensor:
        return cap * torch.tanh(score / cap)

    return capped


@cache
def _compiled() -> Callable[..., Any]:
    """FlexAttention, compiled: once for each combination of window, cap, sinks and gradient mode that comes by.

    Past PyTorch's default of 8 combinations it would go on uncompiled, with every score in memory, and only warn; so
    the limit is raised for these calls, and passing it is an error.
    """
    from torch._dynamo import config
    from torch.nn.attention.flex_attention import flex_attention

    limits = config.patch(recompile_limit=RECOMPILE_LIMIT, fail_on_recompile_limit_hit=True)
    compiled: Callable[..., Any] = limits(torch.compile(flex_attention, dynamic=False))
    return compiled
