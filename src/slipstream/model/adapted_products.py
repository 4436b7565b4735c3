"""Linear layers with low-rank adapters that read the same input, as one operator for compiled layers.

    low  = x [A_1; A_2; ..]^T * scaling          one product: x is read once, however many layers read it
    out_i = low_i B_i^T                          then the weight's product is added to it in place
    out_i += x W_i^T

    dlow_i = dout_i B_i * scaling                dB_i = dout_i^T low_i
    dx   = dlow [A_1; ..] + sum of dout_i W_i    each product added in place; no tensor of x's size is summed by itself
    dA   = dlow^T x

A compiler that is given these products in a sum makes every one a tensor of its own, and sums them in kernels that only
move bytes; cuBLAS adds a product to what is there for a few microseconds. So the operator is opaque to the compiler, as
attention is. The alternative, the adapter's rows as 16 more columns of the weight, costs one tile more in every
backward product. Sums are rounded once for each product, as autograd's are where several layers read one tensor.

N: tokens; I: inputs; O: a layer's outputs; R: its rank; a list has one entry a layer.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("slipstream::adapted_products", mutates_args=())
def _forward(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    scales: Sequence[float],
) -> list[Tensor]:
    """``low`` [N, sum of R], then each layer's outputs [..., O]; ``biases`` has an entry a layer, or none."""
    x_NI = x.flatten(0, -2)
    low_NR = low_product(x_NI, a, scales)
    outs: list[Tensor] = []
    for index, (weight_OI, b_OR, low) in enumerate(zip(weights, b, _parts(low_NR, a), strict=True)):
        out_NO = torch.addmm(biases[index], low, b_OR.t()) if biases else torch.mm(low, b_OR.t())
        outs.append(out_NO.addmm_(x_NI, weight_OI.t()).view(*x.shape[:-1], weight_OI.shape[0]))
    return [low_NR, *outs]


@_forward.register_fake
def _(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    scales: Sequence[float],
) -> list[Tensor]:
    low_NR = x.new_empty(x.shape[:-1].numel(), sum(one.shape[0] for one in a))
    return [low_NR, *(x.new_empty(*x.shape[:-1], weight.shape[0]) for weight in weights)]


@torch.library.custom_op("slipstream::adapted_products_backward", mutates_args=())
def _backward(
    grads: Sequence[Tensor],
    x: Tensor,
    low_NR: Tensor,
    weights: Sequence[Tensor],
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    scales: Sequence[float],
    wants_x: bool,
) -> list[Tensor]:
    """Gradients: of the stacked A's [sum of R, I], of each B, and of x where ``wants_x``."""
    return gradients_of_products(grads, x, low_NR, weights, a, b, scales, wants_x)


@_backward.register_fake
def _(
    grads: Sequence[Tensor],
    x: Tensor,
    low_NR: Tensor,
    weights: Sequence[Tensor],
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    scales: Sequence[float],
    wants_x: bool,
) -> list[Tensor]:
    grad_a = x.new_empty(low_NR.shape[1], x.shape[-1])
    return [grad_a, *(one.new_empty(one.shape) for one in b), *([x.new_empty(x.shape)] if wants_x else [])]


def low_product(x_NI: Tensor, a: Sequence[Tensor], scales: Sequence[float]) -> Tensor:
    """Each layer's ``x A^T * scaling``, side by side: [N, sum of R]."""
    return _scaled(torch.mm(x_NI, _stacked(a).t()), a, scales)


def gradients_of_products(
    grads: Sequence[Tensor],
    x: Tensor,
    low_NR: Tensor,
    weights: Sequence[Tensor],
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    scales: Sequence[float],
    wants_x: bool,
) -> list[Tensor]:
    """Gradients: of the stacked A's [sum of R, I], of each B, and of x where ``wants_x``."""
    x_NI = x.flatten(0, -2)
    rows = [grad.reshape(-1, grad.shape[-1]) for grad in grads]
    grad_low_NR = torch.empty_like(low_NR)
    for grad_NO, b_OR, part in zip(rows, b, _parts(grad_low_NR, a), strict=True):
        torch.mm(grad_NO, b_OR, out=part)
    grads_b = [torch.mm(grad_NO.t(), low) for grad_NO, low in zip(rows, _parts(low_NR, a), strict=True)]
    _scaled(grad_low_NR, a, scales)
    found = [torch.mm(grad_low_NR.t(), x_NI), *grads_b]
    if wants_x:
        grad_x_NI = torch.mm(grad_low_NR, _stacked(a))
        for grad_NO, weight_OI in zip(rows, weights, strict=True):
            grad_x_NI.addmm_(grad_NO, weight_OI)
        found.append(grad_x_NI.view(x.shape))
    return found


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, weights, biases, a, b, scales = inputs
    ctx.layers, ctx.biases, ctx.scales, ctx.wants_x = len(a), len(biases), scales, x.requires_grad
    ctx.save_for_backward(x, output[0], *weights, *a, *b)


def _gradients(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    x, low_NR, *rest = ctx.saved_tensors
    weights, a, b = (rest[at : at + ctx.layers] for at in range(0, 3 * ctx.layers, ctx.layers))
    outs = [x.new_zeros(*x.shape[:-1], one.shape[0]) if g is None else g for g, one in zip(grads[1:], b, strict=True)]
    grad_a, *others = _backward(outs, x, low_NR, weights, a, b, ctx.scales, ctx.wants_x)
    grad_x = others.pop() if ctx.wants_x else None
    grads_a = list(torch.split(grad_a, [one.shape[0] for one in a]))
    return grad_x, [None] * ctx.layers, [None] * ctx.biases, grads_a, others, None


_forward.register_autograd(_gradients, setup_context=_keep)


def adapted_products(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    scales: Sequence[float],
) -> list[Tensor]:
    """Outputs [..., O] of linear layers with frozen ``weights`` [O, I] and adapters (A [R, I], B [O, R]), all of one
    half-precision dtype and device: ``x W^T + bias + scaling * (x A^T) B^T`` of x [..., I].

    ``biases`` are frozen too, one a layer or none at all. Gradients reach x, A and B.
    """
    low_and_outs: list[Tensor] = _forward(x, weights, biases, a, b, scales)
    return low_and_outs[1:]


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    """Matrices [R, I] one below the other, without a copy where they lie so."""
    first = parts[0]
    store, at = first.untyped_storage().data_ptr(), first.storage_offset()
    for one in parts:
        if (one.untyped_storage().data_ptr(), one.storage_offset()) != (store, at) or not one.is_contiguous():
            return torch.cat(list(parts))
        at += one.numel()
    return first.as_strided((sum(one.shape[0] for one in parts), first.shape[1]), (first.shape[1], 1))


def _parts(stacked_NR: Tensor, a: Sequence[Tensor]) -> list[Tensor]:
    """Each layer's columns, as views."""
    return list(torch.split(stacked_NR, [one.shape[0] for one in a], dim=1))


def _scaled(stacked_NR: Tensor, a: Sequence[Tensor], scales: Sequence[float]) -> Tensor:
    """Each layer's columns times its scaling, in place."""
    if len(set(scales)) == 1:
        return stacked_NR if scales[0] == 1.0 else stacked_NR.mul_(scales[0])
    for part, scale in zip(_parts(stacked_NR, a), scales, strict=True):
        part.mul_(scale)
    return stacked_NR
