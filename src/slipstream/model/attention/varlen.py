"""``varlen``: PyTorch's variable-length attention, which takes ``cu_seqlens`` as they are and makes no T x T mask.

The kernel has no attention sinks, and PyTorch drops the gradient of its log-sum-exp, so that scaling its output by
``sigmoid(lse - sink)`` alone would train wrongly. ``_SinkAttention`` does it exactly: a sink s is one more key with
logit s and value 0, so with ``lse' = logaddexp(lse, s)``

    out' = out * exp(lse - lse')          every weight p becomes p' = p * exp(lse - lse')
    backward operator on (out', lse')     it recomputes p' = exp(score - lse') and subtracts rowsum(grad * out')
    grad s = - sum over tokens of exp(s - lse') * rowsum(grad * out')
"""

from collections.abc import Callable
from functools import cache
from inspect import signature
from typing import Any

import torch

from slipstream.cost.hardware import Device
from slipstream.device.segments import Segments
from slipstream.model.attention.call import HALF, Call, Needs

LARGEST_HEAD = 256


def obstacle(needs: Needs, device: Device, dtype: torch.dtype) -> str | None:
    """Why variable-length attention can't be exact here, or None."""
    if needs.mask_only:
        return "this model hands its attention a mask, but no segments"
    if device.kind != "cuda":
        return f"it needs a CUDA device, and this is {device.in_words}"
    if device.compute_capability is None or device.compute_capability < (8, 0):
        return f"its kernel needs compute capability 8.0 or newer, {device.name} has {device.capability}"
    if dtype not in HALF:
        return f"its kernel computes in bfloat16 or float16, not {dtype}"
    if needs.dropout:
        return f"it has no dropout and the model's attention_dropout is {needs.dropout}"
    if needs.softcap:
        return "it has no soft-capped logits"
    if needs.head_width != needs.value_width:
        return f"its kernel takes values as wide as keys, the model has {needs.value_width} and {needs.head_width}"
    if needs.head_width > LARGEST_HEAD or needs.head_width % 8:
        return f"its kernel takes head widths that are multiples of 8 up to {LARGEST_HEAD}, not {needs.head_width}"
    return None


def kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments, call: Call) -> torch.Tensor:
    """See ``call.Kernel``; grouped heads are not repeated."""
    # views whose gradients are views as well: that of x[0] is written into a tensor of zeros, with other strides
    q_THD, k_TGD, v_TGD = (x.transpose(1, 2).squeeze(0) for x in (query, key, value))
    # causal, reaching back window - 1 tokens
    window = (-1 if call.window is None else call.window - 1, 0)
    if call.sinks is not None:
        return _with_sinks(q_THD, k_TGD, v_TGD, segments, call.sinks, call.scale, window)[None]
    from torch.nn.attention.varlen import varlen_attn

    out_THD = varlen_attn(
        q_THD,
        k_TGD,
        v_TGD,
        segments.cu_seqlens,
        segments.cu_seqlens,
        segments.max_seqlen,
        segments.max_seqlen,
        scale=call.scale,
        window_size=window,
        **_grouped_heads(query.shape[1] != key.shape[1]),
    )
    assert isinstance(out_THD, torch.Tensor)  # a pair only where the log-sums are asked for
    return out_THD[None]


@cache
def _grouped_heads(grouped: bool) -> dict[str, Any]:
    """Torch 2.12 and newer want grouped heads announced; 2.11 takes them as they are and has no such argument."""
    from torch.nn.attention.varlen import varlen_attn

    return {"enable_gqa": grouped} if "enable_gqa" in signature(varlen_attn).parameters else {}


def _with_sinks(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    segments: Segments,
    sinks_H: torch.Tensor,
    scale: float | None,
    window: tuple[int, int],
) -> torch.Tensor:
    scale = q_THD.shape[-1] ** -0.5 if scale is None else scale
    ends, longest = segments.cu_seqlens, segments.max_seqlen
    attend: Callable[..., torch.Tensor] = _SinkAttention.apply
    return attend(q_THD, k_TGD, v_TGD, sinks_H, ends, longest, scale, window)


class _SinkAttention(torch.autograd.Function):
    """Variable-length attention with a sink logit a head; see the module's docstring for the arithmetic."""

    @staticmethod
    def forward(
        ctx: Any,
        q_THD: torch.Tensor,
        k_TGD: torch.Tensor,
        v_TGD: torch.Tensor,
        sinks_H: torch.Tensor,
        cu_seqlens: torch.Tensor,
        longest: int,
        scale: float,
        window: tuple[int, int],
    ) -> torch.Tensor:
        causal = window == (-1, 0)
        out_THD, lse_HT, state, unused, _ = torch.ops.aten._flash_attention_forward(
            q_THD,
            k_TGD,
            v_TGD,
            cu_seqlens,
            cu_seqlens,
            longest,
            longest,
            0.0,
            causal,
            False,
            scale=scale,
            window_size_left=window[0],
            window_size_right=window[1],
        )
        lse_HT = lse_HT[:, : q_THD.shape[0]]
        all_HT = torch.logaddexp(lse_HT, sinks_H[:, None])
        share_HT = (lse_HT - all_HT).exp_()
        # multiplied in float32 and rounded once, without a float32 product in memory
        attended_THD = torch.mul(out_THD, share_HT.t()[..., None], out=torch.empty_like(out_THD))
        ctx.save_for_backward(q_THD, k_TGD, v_TGD, sinks_H, cu_seqlens, attended_THD, all_HT, state, unused)
        ctx.settings = longest, scale, window, causal
        return attended_THD

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q_THD, k_TGD, v_TGD, sinks_H, cu_seqlens, out_THD, all_HT, state, unused = ctx.saved_tensors
        longest, scale, window, causal = ctx.settings
        grad_THD = grads[0].contiguous()
        grad_q, grad_k, grad_v = torch.ops.aten._flash_attention_backward(
            grad_THD,
            q_THD,
            k_TGD,
            v_TGD,
            out_THD,
            all_HT,
            cu_seqlens,
            cu_seqlens,
            longest,
            longest,
            0.0,
            causal,
            state,
            unused,
            scale=scale,
            window_size_left=window[0],
            window_size_right=window[1],
        )
        grad_sinks_H = None
        if ctx.needs_input_grad[3]:  # frozen under adapters
            share_HT = torch.exp(sinks_H[:, None] - all_HT)
            taken_HT = (grad_THD.float() * out_THD.float()).sum(-1).t()
            grad_sinks_H = -(share_HT * taken_HT).sum(1).to(sinks_H.dtype)
        return grad_q, grad_k, grad_v, grad_sinks_H, None, None, None, None
