"""Experts' elementwise work in kernels of our own, for layers that aren't compiled. Needs Triton, which CUDA builds of
PyTorch bring along.

Eagerly, gpt-oss's gate is seven kernels forward and a dozen back, most of them over every second number of a tensor
that is the largest of the layer, and the weighted sum of a token's slots another four and eight. Here each is one
kernel each way. Compiled layers have theirs fused by the compiler, and never come here.

    gate       g = min(up[0::2] + b[0::2], limit);  u = clamp(up[1::2] + b[1::2], -limit, limit)
               inner = (u + 1) * g * sigmoid(alpha * g)
    combine    out[t] = sum over k of w[t, k] * y[inverse[t, k]], k in order

Computed in float32 and rounded once; clamps pass their gradient up to and including the limit, as PyTorch's do. No
atomics: the same bits every time.

S: slots, sorted by expert; E: experts; I: inner width; T: tokens; K: slots a token; H: hidden width. One program a slot
(or token) and ``BLOCK`` of its width.
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


@triton.jit
def _combine(out, y, weights, inverse, hidden, K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for k in tl.static_range(K):
        slot = tl.load(inverse + token * K + k)
        weight = tl.load(weights + token * K + k).to(tl.float32)
        total += weight * tl.load(y + slot * hidden + at, mask=at < hidden, other=0).to(tl.float32)
    tl.store(out + token * hidden + at, total.to(out.dtype.element_ty), mask=at < hidden)


@triton.jit
def _combine_backward(
    grad_y, grad_weights, grad, y, weights, order, hidden, K: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr
):
    slot = tl.program_id(0).to(tl.int64)
    assignment = tl.load(order + slot)
    token = assignment // K
    weight = tl.load(weights + assignment).to(tl.float32)
    product = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in tl.static_range(0, WIDTH, BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < hidden
        g = tl.load(grad + token * hidden + at, mask=inside, other=0).to(tl.float32)
        product += g * tl.load(y + slot * hidden + at, mask=inside, other=0).to(tl.float32)
        tl.store(grad_y + slot * hidden + at, (g * weight).to(grad_y.dtype.element_ty), mask=inside)
    tl.store(grad_weights + assignment, tl.sum(product, axis=0).to(grad_weights.dtype.element_ty))


def combine(y_SH: torch.Tensor, weights_TK: torch.Tensor, inverse_S: torch.Tensor) -> torch.Tensor:
    """Each token's weighted sum over its slots, [T, H]; ``inverse_S``: the slot of each assignment."""
    (tokens, top_k), hidden = weights_TK.shape, y_SH.shape[1]
    out_TH = y_SH.new_empty(tokens, hidden)
    if tokens:
        grid = (tokens, triton.cdiv(hidden, BLOCK))
        _combine[grid](out_TH, y_SH.contiguous(), weights_TK.contiguous(), inverse_S, hidden, K=top_k, BLOCK=BLOCK)
    return out_TH


def combine_backward(
    grad_TH: torch.Tensor, y_SH: torch.Tensor, weights_TK: torch.Tensor, order_S: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the slots [S, H] and of the weights [T, K]; ``order_S``: the assignment in each slot."""
    top_k, hidden = weights_TK.shape[1], y_SH.shape[1]
    grad_y_SH, grad_weights_TK = torch.empty_like(y_SH), torch.empty_like(weights_TK)
    if len(y_SH):
        constants = {"K": top_k, "BLOCK": BLOCK, "WIDTH": triton.cdiv(hidden, BLOCK) * BLOCK}
        tensors = grad_TH.contiguous(), y_SH.contiguous(), weights_TK.contiguous(), order_S
        _combine_backward[(len(y_SH),)](grad_y_SH, grad_weights_TK, *tensors, hidden, **constants)
    return grad_y_SH, grad_weights_TK
