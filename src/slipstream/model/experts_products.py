"""The two ways to multiply every expert's slots by that expert's matrix: grouped, and slice by slice.

``grouped_product`` is one kernel for all experts, told by ``offsets`` on the device where each one's slots end: no host
sync. ``sliced_product`` is one matrix product an expert over slices whose sizes are on the host; it runs on every
device and in every dtype. Both leave no row unwritten: an expert without slots has a gradient of zeros (grouped kernels
leave it as the memory was, or worse), and there are no slots past the last offset.

S: slots, sorted by expert; E: experts; I, O: a product's input and output width.
"""

from typing import Any

import torch
import torch.nn.functional as F

from slipstream.model.routing import Routing

ALIGNMENT = 8
"""Widths must be a multiple of it: rows of a grouped product's operands begin every 16 bytes, in half precision."""


def grouped_product(
    x_SI: torch.Tensor, weight_EIO: torch.Tensor, routing: Routing, idle_E: torch.Tensor | None = None
) -> torch.Tensor:
    """``x_SI`` times each slot's expert's matrix, [S, O], in one kernel.

    ``idle_E``: ``routing.idle()``, where several products with trained matrices share it.
    """
    if weight_EIO.requires_grad:
        idle_E = routing.idle() if idle_E is None else idle_E
        trained: torch.Tensor = _Grouped.apply(x_SI, weight_EIO, routing.offsets, idle_E)  # type: ignore[no-untyped-call]
        return trained
    return F.grouped_mm(x_SI, weight_EIO, offs=routing.offsets)


class _Grouped(torch.autograd.Function):
    """A grouped product whose matrices are trained."""

    @staticmethod
    def forward(
        ctx: Any, x_SI: torch.Tensor, weight_EIO: torch.Tensor, offsets_E: torch.Tensor, idle_E: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(x_SI, weight_EIO, offsets_E, idle_E)
        return _grouped(x_SI, weight_EIO, offsets_E)

    @staticmethod
    def backward(ctx: Any, grad_SO: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        x_SI, weight_EIO, offsets_E, idle_E = ctx.saved_tensors
        grad_SO = grad_SO.contiguous()  # may be expanded, which the kernel refuses
        grad_x_SI = _grouped(grad_SO, weight_EIO.transpose(-2, -1), offsets_E)
        if weight_EIO.stride(-1) == 1:
            grad_EIO = _matrix_gradient(x_SI, grad_SO, offsets_E, idle_E)
        else:  # in the layout of the parameter, whose transpose this is
            grad_EIO = _matrix_gradient(grad_SO, x_SI, offsets_E, idle_E).transpose(-2, -1)
        return grad_x_SI, grad_EIO, None, None


def _matrix_gradient(
    left_SI: torch.Tensor, right_SO: torch.Tensor, offsets_E: torch.Tensor, idle_E: torch.Tensor
) -> torch.Tensor:
    """Each expert's ``left.T @ right`` over its slots, [E, I, O]; zeros for one that has none."""
    product_EIO = _grouped(left_SI.t(), right_SO, offsets_E)
    return product_EIO.masked_fill_(idle_E[:, None, None], 0)


def _grouped(left: torch.Tensor, right: torch.Tensor, offsets_E: torch.Tensor) -> torch.Tensor:
    """A grouped product; in compiled code an operator of its own, whose operands keep the strides they have.

    The compiler chooses strides of what it computes (an adapter's factor, cast and permuted) by how it reads, and the
    kernel refuses rows that don't begin every 16 bytes.
    """
    if torch.compiler.is_compiling():
        compiled: torch.Tensor = _grouped_mm(left, right, offsets_E)
        return compiled
    return F.grouped_mm(left, right, offs=offsets_E)


@torch.library.custom_op("slipstream::grouped_mm", mutates_args=())
def _grouped_mm(left: torch.Tensor, right: torch.Tensor, offsets_E: torch.Tensor) -> torch.Tensor:
    """[S, I] with [E, I, O] → [S, O]; [I, S] with [S, O] → [E, I, O]."""
    return F.grouped_mm(left, right, offs=offsets_E)


@_grouped_mm.register_fake
def _(left: torch.Tensor, right: torch.Tensor, offsets_E: torch.Tensor) -> torch.Tensor:
    groups = [offsets_E.shape[0]] if right.ndim == 2 else []
    return left.new_empty(*groups, left.shape[0], right.shape[-1])


def sliced_product(x_SI: torch.Tensor, weight_EIO: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """``x_SI`` times each slot's expert's matrix, [S, O], expert by expert; ``counts`` are each one's slots."""
    sliced: torch.Tensor = _Sliced.apply(x_SI, weight_EIO, counts)  # type: ignore[no-untyped-call]
    return sliced


class _Sliced(torch.autograd.Function):
    """Slices of the sorted slots, written where they belong: nothing is joined afterwards."""

    @staticmethod
    def forward(ctx: Any, x_SI: torch.Tensor, weight_EIO: torch.Tensor, counts: list[int]) -> torch.Tensor:
        ctx.save_for_backward(x_SI if ctx.needs_input_grad[1] else None, weight_EIO)
        ctx.counts = counts
        return _each_slice(x_SI, weight_EIO, counts)

    @staticmethod
    def backward(ctx: Any, grad_SO: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        x_SI, weight_EIO = ctx.saved_tensors
        grad_x = _each_slice(grad_SO, weight_EIO.transpose(-2, -1), ctx.counts) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return grad_x, None, None
        grad_EIO = torch.zeros_like(weight_EIO)
        pairs = zip(torch.split(x_SI, ctx.counts), torch.split(grad_SO, ctx.counts), strict=True)
        for expert, (x_I, grad_O) in enumerate(pairs):
            if len(x_I):
                torch.mm(x_I.t(), grad_O, out=grad_EIO[expert])
        return grad_x, grad_EIO, None


def _each_slice(x_SI: torch.Tensor, weight_EIO: torch.Tensor, counts: list[int]) -> torch.Tensor:
    out_SO = x_SI.new_empty(len(x_SI), weight_EIO.shape[-1])
    pairs = zip(torch.split(x_SI, counts), torch.split(out_SO, counts), strict=True)
    for expert, (x, out) in enumerate(pairs):
        if len(x):
            torch.mm(x, weight_EIO[expert], out=out)
    return out_SO
