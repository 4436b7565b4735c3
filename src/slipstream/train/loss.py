"""Cross-entropy summed over learned tokens, without logits for the whole batch at once.

The sum, not the mean: the trainer divides by the learned tokens of all batches that make one optimizer step, so that
accumulation, several ranks and one large batch give the same loss.

Hidden states become logits, and logits float32, a chunk of tokens at a time; a T x V tensor never exists. With a frozen
output head a chunk's gradient is made right behind its logits, in their place, and multiplied back to hidden states:
the head is used twice, and the backward only scales what is there. With a head that is trained, chunks are recomputed
in the backward. Where the head can't be called by itself (``model/head.py``), the model's logits are taken whole and
only their float32 copies are made in chunks. The alternative, the model's own loss, keeps several T x V tensors, each
larger than all activations of a layer.

Shapes: B batch, T tokens, N tokens of the whole batch, C tokens of a chunk, H hidden width, V vocabulary.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from slipstream.cost.estimate import LOSS_CHUNK
from slipstream.data.batch import IGNORE
from slipstream.model.head import Head

SCALED_AT_ONCE = 16 * LOSS_CHUNK
"""Tokens whose gradients the backward holds in float32 at a time."""


def summed_cross_entropy(
    features_BTX: torch.Tensor, labels_BT: torch.Tensor, head: Head | None = None, *, compiled: bool = False
) -> torch.Tensor:
    """The summed cross-entropy in nats, float32, of predicting ``labels_BT[:, t + 1]`` at token t.

    ``features_BTX`` are logits [B, T, V], or hidden states [B, T, H] with the ``head`` to make logits of a chunk.
    Labels of -100 are left out; with none left the sum is 0. No host sync. ``compiled``: elementwise work of a frozen
    head's chunks in compiled kernels.
    """
    targets_BT = F.pad(labels_BT[:, 1:], (0, 1), value=IGNORE).to(features_BTX.device)
    weight = None if head is None else head.frozen_weight()
    if head is not None and weight is not None and torch.is_grad_enabled() and features_BTX.requires_grad:
        hidden_NH, targets_N = features_BTX.flatten(0, 1), targets_BT.flatten()
        loss_of: Callable[..., torch.Tensor] = _FrozenHeadLoss.apply
        return loss_of(hidden_NH, targets_N, weight, head.scale, head.softcap, compiled)
    pairs = (torch.split(x, LOSS_CHUNK) for x in (features_BTX.flatten(0, 1), targets_BT.flatten()))
    total = features_BTX.new_zeros((), dtype=torch.float32)
    for features_CX, targets_C in zip(*pairs, strict=True):
        total = total + checkpoint(_chunk, features_CX, targets_C, head, use_reentrant=False, preserve_rng_state=False)
    return total


def learned_tokens(labels_BT: torch.Tensor) -> torch.Tensor:
    """How many tokens of ``labels_BT`` are learned (int64, 0-d): those with a label that something precedes."""
    return (labels_BT[:, 1:] != IGNORE).sum()


def _chunk(features_CX: torch.Tensor, targets_C: torch.Tensor, head: Head | None) -> torch.Tensor:
    logits_CV = features_CX if head is None else head(features_CX)
    return F.cross_entropy(logits_CV.float(), targets_C, ignore_index=IGNORE, reduction="sum")


class _FrozenHeadLoss(torch.autograd.Function):
    """The summed loss of hidden states behind a frozen head; their gradients are made in the forward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: torch.Tensor,
        targets_N: torch.Tensor,
        weight_VH: torch.Tensor,
        scale: float,
        softcap: float | None,
        compiled: bool,
    ) -> torch.Tensor:
        kind = hidden_NH.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden_NH.dtype
        gradient_of = _compiled_gradient() if compiled else eager_loss_and_gradient
        weight_VH, total = weight_VH.to(dtype), hidden_NH.new_zeros((), dtype=torch.float32)
        grad_NH = torch.empty_like(hidden_NH, dtype=dtype)
        with torch.autocast(kind, enabled=False):
            for begin in range(0, hidden_NH.shape[0], LOSS_CHUNK):
                rows = slice(begin, begin + LOSS_CHUNK)
                logits_CV = F.linear(hidden_NH[rows].to(dtype), weight_VH)
                loss, logits_CV = gradient_of(logits_CV, targets_N[rows], scale, softcap)
                torch.mm(logits_CV, weight_VH, out=grad_NH[rows])
                total = total + loss
        ctx.save_for_backward(grad_NH)
        ctx.dtype = hidden_NH.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad_NH,) = ctx.saved_tensors
        scaled_NH = torch.empty_like(grad_NH, dtype=ctx.dtype)
        for part, out in zip(*(torch.split(x, SCALED_AT_ONCE) for x in (grad_NH, scaled_NH)), strict=True):
            out.copy_(part.float() * grads[0])
        return scaled_NH, None, None, None, None, None


def loss_and_gradient(
    logits_CV: torch.Tensor, targets_C: torch.Tensor, scale: float, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The chunk's summed cross-entropy (float32) and its gradient by the head's product, in that one's dtype.

    With z the product, s the scale, c the soft cap: logits l = s · c · tanh(z / c), loss = logsumexp(l) − l[target],
    d loss / d z = (softmax(l) − onehot(target)) · s · (1 − tanh²(z / c)); 0 for tokens without a label.
    """
    z_CV = logits_CV.float()
    slope: torch.Tensor | float = scale
    if softcap is not None:
        bent_CV = torch.tanh(z_CV / softcap)
        z_CV, slope = bent_CV * softcap, scale * (1 - bent_CV * bent_CV)
    if scale != 1.0:
        z_CV = z_CV * scale
    learned_C1 = (targets_C != IGNORE)[:, None]
    target_C1 = torch.where(learned_C1, targets_C[:, None], 0)
    sums_C1 = torch.logsumexp(z_CV, dim=-1, keepdim=True)
    loss = torch.where(learned_C1, sums_C1 - z_CV.gather(1, target_C1), 0.0).sum()
    hit_CV = torch.arange(z_CV.shape[1], device=z_CV.device)[None] == target_C1
    grad_CV = torch.where(learned_C1, (torch.exp(z_CV - sums_C1) - hit_CV.float()) * slope, 0.0)
    return loss, grad_CV.to(logits_CV.dtype)


def eager_loss_and_gradient(
    logits_CV: torch.Tensor, targets_C: torch.Tensor, scale: float, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``loss_and_gradient`` for kernels that nobody fuses: four passes over one float32 copy of the chunk."""
    if softcap is not None:
        return loss_and_gradient(logits_CV, targets_C, scale, softcap)
    scaled_CV = logits_CV if scale == 1.0 else logits_CV.float() * scale
    learned_C1 = (targets_C != IGNORE)[:, None]
    target_C1 = torch.where(learned_C1, targets_C[:, None], 0)
    grad_CV = torch.log_softmax(scaled_CV, dim=-1, dtype=torch.float32)
    loss = torch.where(learned_C1, -grad_CV.gather(1, target_C1), 0.0).sum()
    grad_CV.exp_()
    grad_CV.scatter_(1, target_C1, grad_CV.gather(1, target_C1) - 1)
    grad_CV.masked_fill_(~learned_C1, 0)  # not a product: what isn't learned may not be finite
    if scale != 1.0:
        grad_CV *= scale
    return loss, grad_CV.to(logits_CV.dtype)


@cache
def _compiled_gradient() -> Any:
    return torch.compile(loss_and_gradient, dynamic=False)
