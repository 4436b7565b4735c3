"""``xformers``: memory-efficient attention under a block-diagonal causal bias, made once a batch for each window.

For cards older than PyTorch's variable-length kernel asks for, where xFormers is installed (extra ``xformers``).
"""

from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch

from slipstream.cost.hardware import Device
from slipstream.device.segments import Segments
from slipstream.model.attention.call import HALF, Call, Needs

OLDEST = (7, 0)
LARGEST_HEAD = 256


def obstacle(needs: Needs, device: Device, dtype: torch.dtype) -> str | None:
    """Why xFormers can't be used here, or None."""
    if needs.mask_only:
        return "this model hands its attention a mask, but no segments"
    if device.kind != "cuda":
        return f"its kernels need a CUDA device, and this is {device.in_words}"
    if find_spec("xformers") is None:
        return "xFormers is not installed (pip install 'slipstream[xformers]')"
    if not _has_kernels():
        return "the installed xFormers has no CUDA kernels for this PyTorch (python -m xformers.info says more)"
    if device.compute_capability is None or device.compute_capability < OLDEST:
        return f"its kernels need compute capability 7.0 or newer, {device.name} has {device.capability}"
    if dtype not in HALF:
        return f"its fast kernels compute in bfloat16 or float16, not {dtype}"
    if needs.extras():
        return f"it has no {', '.join(needs.extras())}"
    if needs.head_width != needs.value_width or needs.head_width > LARGEST_HEAD or needs.head_width % 8:
        return f"its kernels take heads as wide as values, multiples of 8 up to {LARGEST_HEAD}, not {needs.head_width}"
    return None


@cache
def _has_kernels() -> bool:
    """Whether xFormers' compiled part loads: a wheel for another CUDA imports without an error, and has no kernels."""
    from xformers import _cpp_lib

    return bool(getattr(_cpp_lib, "_built_with_cuda", False))


def kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments, call: Call) -> torch.Tensor:
    """See ``call.Kernel``."""
    from xformers.ops import memory_efficient_attention

    bias = segments.derive("xformers", partial(_build, segments, call.window), window=call.window)
    each = query.shape[1] // key.shape[1]
    if each > 1:  # its kernels have no backward for grouped heads as views
        key, value = (x.repeat_interleave(each, dim=1) for x in (key, value))
    q_BTHD, k_BTHD, v_BTHD = (x.transpose(1, 2) for x in (query, key, value))
    out = memory_efficient_attention(q_BTHD, k_BTHD, v_BTHD, attn_bias=bias, p=call.dropout, scale=call.scale)
    assert isinstance(out, torch.Tensor)
    return out


def _build(segments: Segments, window: int | None) -> Any:
    """The bias over our own offsets: its constructor would copy the lengths to the device and wait."""
    from xformers.ops.fmha.attn_bias import BlockDiagonalCausalMask, _SeqLenInfo

    spans = segments.lengths if not segments.padding else (*segments.lengths, segments.padding)
    offsets = [0]
    for span in spans:
        offsets.append(offsets[-1] + span)
    lengths = _SeqLenInfo(
        seqstart=segments.cu_seqlens[: len(offsets)],
        max_seqlen=max(spans),
        min_seqlen=min(spans),
        seqstart_py=offsets,
    )
    bias = BlockDiagonalCausalMask(q_seqinfo=lengths, k_seqinfo=lengths)
    return bias if window is None else bias.make_local_attention(window)
