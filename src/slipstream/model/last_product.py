"""A recomputed layer's last adapter, whose product with the weight is not made again.

Where a layer is recomputed, PyTorch stops as soon as everything is there that the backward reads. The last product's
result is not read by any backward of the layer; but what its own backward reads must have been kept before the product
runs. Kept by the product's own node it would come too late, when the node's forward is over. So two nodes: one keeps,
the other multiplies. It is a quarter of a dense layer's recompute. The backward is ``adapted_products``'s.
"""

from typing import Any

import torch
from torch import Tensor

from slipstream.model.adapted_products import gradients_of_products, low_product


class _Kept:
    """Where ``_Keep`` has put what the backward reads."""

    node: Any = None


class _Keep(torch.autograd.Function):
    """x and the weights, kept; gives x A^T * scaling."""

    @staticmethod
    def forward(
        ctx: Any, kept: _Kept, x: Tensor, weight_OI: Tensor, a_RI: Tensor, b_OR: Tensor, scale: float
    ) -> Tensor:
        low_NR = low_product(x.flatten(0, -2), [a_RI], [scale])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, low_NR, weight_OI, a_RI, b_OR)
        kept.node = ctx
        return low_NR

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        return (None,) * 6  # the other node's backward gives all gradients


class _Multiply(torch.autograd.Function):
    """The adapter's product, and the weight's added to it in place."""

    @staticmethod
    def forward(
        ctx: Any,
        low_NR: Tensor,
        kept: _Kept,
        x: Tensor,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        a_RI: Tensor,
        b_OR: Tensor,
        scale: float,
    ) -> Tensor:
        ctx.kept, ctx.scale = kept, scale
        out_NO = torch.mm(low_NR, b_OR.t()) if bias_O is None else torch.addmm(bias_O, low_NR, b_OR.t())
        out_NO.addmm_(x.flatten(0, -2), weight_OI.t())
        return out_NO.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, low_NR, weight_OI, a_RI, b_OR = ctx.kept.node.saved_tensors
        wants_x = ctx.needs_input_grad[2]
        grad_a, grad_b, *grad_x = gradients_of_products(
            [grads[0]], x, low_NR, [weight_OI], [a_RI], [b_OR], [ctx.scale], wants_x
        )
        return None, None, grad_x[0] if wants_x else None, None, None, grad_a, grad_b, None


def last_product(
    x: Tensor, weight_OI: Tensor, bias_O: Tensor | None, a_RI: Tensor, b_OR: Tensor, scale: float
) -> Tensor:
    """``x W^T + bias + scaling * (x A^T) B^T``, all in one half-precision dtype, weight and bias frozen."""
    kept = _Kept()
    keep: Any = _Keep.apply
    multiply: Any = _Multiply.apply
    low_NR = keep(kept, x, weight_OI, a_RI, b_OR, scale)
    out: Tensor = multiply(low_NR, kept, x, weight_OI, bias_O, a_RI, b_OR, scale)
    return out
