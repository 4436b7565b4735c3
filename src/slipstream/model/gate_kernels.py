"""gpt-oss's gate in one kernel each way: bias added, interleaved halves clamped, gated. Needs Triton, which CUDA builds
of PyTorch bring along.

Eagerly that gate is seven kernels forward and a dozen back, most of them over every second number of a tensor that is
the largest of the layer: a third of an uncompiled gpt-oss layer's time. Compiled layers have theirs fused by the
compiler, and never come here.

    g = min(up[0::2] + b[0::2], limit)    u = clamp(up[1::2] + b[1::2], -limit, limit)
    inner = (u + 1) * g * sigmoid(alpha * g)

Computed in float32 and rounded once; clamps pass their gradient up to and including the limit, as PyTorch's do.

S: slots, sorted by expert; E: experts; I: inner width. One program a slot and ``BLOCK`` of its inner width.
"""

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def _halves(up, bias, expert, slot, first, inner, BIASED: tl.constexpr, BLOCK: tl.constexpr):
    """A block of one slot's gate and linear halves before their clamps, float32."""
    at = first * 2 + tl.arange(0, 2 * BLOCK)
    inside = at < 2 * inner
    values = tl.load(up + slot * 2 * inner + at, mask=inside, other=0).to(tl.float32)
    if BIASED:
        row = tl.load(expert + slot).to(tl.int64)
        values += tl.load(bias + row * 2 * inner + at, mask=inside, other=0).to(tl.float32)
    return tl.split(tl.reshape(values, (BLOCK, 2)))


@triton.jit
def _forward(out, up, bias, expert, inner, alpha, limit, BIASED: tl.constexpr, BLOCK: tl.constexpr):
    slot, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    gate, linear = _halves(up, bias, expert, slot, first, inner, BIASED, BLOCK)
    gate = tl.where(gate > limit, limit, gate)  # NaN stays NaN
    linear = tl.where(linear > limit, limit, tl.where(linear < -limit, -limit, linear))
    gated = (linear + 1) * gate * tl.sigmoid(alpha * gate)
    at = first + tl.arange(0, BLOCK)
    tl.store(out + slot * inner + at, gated.to(out.dtype.element_ty), mask=at < inner)


@triton.jit
def _backward(grad_up, grad, up, bias, expert, inner, alpha, limit, BIASED: tl.constexpr, BLOCK: tl.constexpr):
    slot, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    raw_gate, raw_linear = _halves(up, bias, expert, slot, first, inner, BIASED, BLOCK)
    gate = tl.where(raw_gate > limit, limit, raw_gate)
    linear = tl.where(raw_linear > limit, limit, tl.where(raw_linear < -limit, -limit, raw_linear))
    at = first + tl.arange(0, BLOCK)
    grad_out = tl.load(grad + slot * inner + at, mask=at < inner, other=0).to(tl.float32)
    share = tl.sigmoid(alpha * gate)
    grad_gate = grad_out * (linear + 1) * share * (1 + alpha * gate * (1 - share))
    grad_gate = tl.where(raw_gate > limit, 0, grad_gate)
    grad_linear = tl.where((raw_linear > limit) | (raw_linear < -limit), 0, grad_out * gate * share)
    both = tl.reshape(tl.join(grad_gate, grad_linear), (2 * BLOCK,))
    at = first * 2 + tl.arange(0, 2 * BLOCK)
    tl.store(grad_up + slot * 2 * inner + at, both.to(grad_up.dtype.element_ty), mask=at < 2 * inner)


def clamped_gate(
    up_SO: torch.Tensor, bias_EO: torch.Tensor | None, expert_S: torch.Tensor, alpha: float, limit: float
) -> torch.Tensor:
    """Each slot's gate, [S, I], from its interleaved halves [S, 2I] and the frozen biases [E, 2I] of its expert."""
    gated: torch.Tensor = _ClampedGate.apply(up_SO, bias_EO, expert_S, alpha, limit)
    return gated


class _ClampedGate(torch.autograd.Function):
    """Keeps what goes in, and nothing in between."""

    @staticmethod
    def forward(
        ctx: Any,
        up_SO: torch.Tensor,
        bias_EO: torch.Tensor | None,
        expert_S: torch.Tensor,
        alpha: float,
        limit: float,
    ) -> torch.Tensor:
        ctx.save_for_backward(up_SO, bias_EO, expert_S)
        ctx.constants = alpha, limit
        out_SI = up_SO.new_empty(len(up_SO), up_SO.shape[1] // 2)
        _launch(_forward, out_SI, (), up_SO, bias_EO, expert_S, alpha, limit)
        return out_SI

    @staticmethod
    def backward(ctx: Any, grad_SI: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        up_SO, bias_EO, expert_S = ctx.saved_tensors
        grad_SO = torch.empty_like(up_SO)
        _launch(_backward, grad_SO, (grad_SI.contiguous(),), up_SO, bias_EO, expert_S, *ctx.constants)
        return grad_SO, None, None, None, None


def _launch(
    kernel: Any,
    out: torch.Tensor,
    more: tuple[torch.Tensor, ...],
    up_SO: torch.Tensor,
    bias_EO: torch.Tensor | None,
    expert_S: torch.Tensor,
    alpha: float,
    limit: float,
) -> None:
    inner = up_SO.shape[1] // 2
    if not len(up_SO):
        return
    grid = (len(up_SO), triton.cdiv(inner, BLOCK))
    bias = up_SO if bias_EO is None else bias_EO  # a pointer that is not read
    constants = {"BIASED": bias_EO is not None, "BLOCK": BLOCK}
    kernel[grid](out, *more, up_SO, bias, expert_S, inner, alpha, limit, **constants)
