"""``sdpa``: scaled dot-product attention under one additive mask, made once a batch for each distinct window.

Runs on every device and dtype. The mask costs T² memory; soft caps and sinks, which PyTorch's fused kernel has not, are
computed on materialised scores, which costs H·T².
"""

import torch
import torch.nn.functional as F

from slipstream.cost.hardware import Device
from slipstream.device.segments import Segments
from slipstream.model.attention.call import Call, Needs


def obstacle(needs: Needs, device: Device, dtype: torch.dtype) -> str | None:
    """Nothing stands in its way."""
    return None


def kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments, call: Call) -> torch.Tensor:
    """See ``call.Kernel``."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:  # masked kernels on CUDA take no grouped heads: enable_gqa would fall back to materialised scores
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    mask = segments.mask(query.dtype, call.window)
    if call.softcap is not None or call.sinks is not None:
        return _materialised(query, key, value, mask, call)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=call.dropout, scale=call.scale)
    return out.transpose(1, 2).contiguous()


def _materialised(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, call: Call
) -> torch.Tensor:
    """The same over explicit scores [1, H, T, T], in the order of transformers' eager: scale, cap, mask, softmax."""
    scale = query.shape[-1] ** -0.5 if call.scale is None else call.scale
    wide = torch.promote_types(query.dtype, torch.float32)  # the sinks' gradient is a sum over all tokens
    scores = (query @ key.transpose(-1, -2)).to(wide) * scale
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    scores = scores + mask
    if call.sinks is not None:
        sinks = call.sinks.to(wide).reshape(1, -1, 1, 1).expand(1, -1, scores.shape[2], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = F.softmax(scores, dim=-1).to(query.dtype)
    weights = F.dropout(weights, call.dropout)[..., : key.shape[2]]
    return (weights @ value).transpose(1, 2).contiguous()
