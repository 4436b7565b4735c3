"""``Routing``: which expert takes which token, put in order once a layer.

A router gives each of T tokens K experts. One stable sort of the T x K assignments by expert lays every expert's tokens
side by side, so that each expert is a slice and a grouped product needs nothing but where the slices end. All of it has
a shape known beforehand: the host asks the device for nothing. The alternative, looking up each expert's tokens
(``torch.where``), gets an answer of unknown size for each expert, and waits for each. Counts come from a binary search
in what is sorted already, not from ``bincount``, which waits.

    top_k_index     [[2, 0], [0, 1], [2, 0]]      T = 3 tokens, K = 2, E = 4 experts
    assignment       0  1    2  3    4  5         t * K + k
    expert           0  0  0  1  2  2             after sorting
    order            1  2  5  3  0  4             slot -> assignment; ties keep their order
    inverse          4  0  1  3  5  2             assignment -> slot
    offsets          3  4  6  6                   where each expert's slots end; expert 3 has none

T: tokens; K: experts a token; S = T * K slots; E: experts; H: width of a token.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from slipstream.model.own_kernels import own_kernels


@dataclass(frozen=True)
class Routing:
    """One layer's assignments, sorted by expert."""

    order: torch.Tensor
    """int64 [S]: the assignment in each slot."""
    inverse: torch.Tensor
    """int64 [S]: the slot of each assignment."""
    expert: torch.Tensor
    """int32 [S]: the expert of each slot, ascending."""
    offsets: torch.Tensor
    """int32 [E]: where each expert's slots end; the last is S."""
    top_k: int
    """Experts a token, K."""

    @cached_property
    def counts(self) -> list[int]:
        """Slots of each expert, on the host: one copy, for which the host waits the first time."""
        ends = self.offsets.tolist()
        return [end - begin for begin, end in zip([0, *ends[:-1]], ends, strict=True)]

    def idle(self) -> torch.Tensor:
        """bool [E]: the experts without slots."""
        return self.offsets == torch.cat([self.offsets.new_zeros(1), self.offsets[:-1]])

    def gather(self, x_TH: torch.Tensor) -> torch.Tensor:
        """Each slot's token, [S, H]. The backward sums a token's K slots in a fixed order."""
        gathered: torch.Tensor = _Gather.apply(x_TH, self.order, self.inverse, self.top_k)  # type: ignore[no-untyped-call]
        return gathered

    def combine(self, y_SH: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        """Each token's weighted sum over its K slots, [T, H] in the dtype of ``y_SH``, in a fixed order: no atomics."""
        combined: torch.Tensor = _Combine.apply(y_SH, weights_TK, self.order, self.inverse)  # type: ignore[no-untyped-call]
        return combined


def route(top_k_index_TK: torch.Tensor, experts: int) -> Routing:
    """Sort the assignments of ``top_k_index_TK`` (integers below ``experts``) by expert, without a host sync."""
    assert experts <= torch.iinfo(torch.int16).max
    device = top_k_index_TK.device
    keys_S = top_k_index_TK.reshape(-1).to(torch.int16)  # a radix sort goes over the bits of its key
    expert_S, order_S = torch.sort(keys_S, stable=True)
    every_E = torch.arange(experts, dtype=torch.int16, device=device)
    offsets_E = torch.searchsorted(expert_S, every_E, right=True, out_int32=True)
    slots_S = torch.arange(order_S.numel(), device=device)
    inverse_S = torch.empty_like(order_S).scatter_(0, order_S, slots_S)
    return Routing(order_S, inverse_S, expert_S.to(torch.int32), offsets_E, top_k_index_TK.shape[-1])


class _Gather(torch.autograd.Function):
    """Rows by slot; index_select's own backward would add with atomics, in whatever order they come."""

    @staticmethod
    def forward(
        ctx: Any, x_TH: torch.Tensor, order_S: torch.Tensor, inverse_S: torch.Tensor, top_k: int
    ) -> torch.Tensor:
        ctx.save_for_backward(inverse_S)
        ctx.top_k = top_k
        return x_TH.index_select(0, order_S // top_k)

    @staticmethod
    def backward(ctx: Any, grad_SH: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (inverse_S,) = ctx.saved_tensors
        by_token = grad_SH.index_select(0, inverse_S)
        return by_token.view(-1, ctx.top_k, grad_SH.shape[-1]).sum(1), None, None, None


class _Combine(torch.autograd.Function):
    """The weighted sum, with a backward that gathers where the forward's gather would scatter."""

    @staticmethod
    def forward(
        ctx: Any, y_SH: torch.Tensor, weights_TK: torch.Tensor, order_S: torch.Tensor, inverse_S: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(y_SH, weights_TK, order_S, inverse_S)
        if own_kernels(y_SH):
            from slipstream.model.expert_kernels import combine

            return combine(y_SH, weights_TK, inverse_S)
        y_TKH = y_SH.index_select(0, inverse_S).view(*weights_TK.shape, y_SH.shape[-1])
        total_TH = (y_TKH * weights_TK[..., None]).sum(1)
        # not ``to`` of the dtype that it has: compiled by PyTorch 2.11, a node that gives one tensor under two names
        # hands the gradient to the wrong one
        return total_TH if total_TH.dtype == y_SH.dtype else total_TH.to(y_SH.dtype)

    @staticmethod
    def backward(ctx: Any, grad_TH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        y_SH, weights_TK, order_S, inverse_S = ctx.saved_tensors
        if own_kernels(y_SH):
            from slipstream.model.expert_kernels import combine_backward

            return *combine_backward(grad_TH, y_SH, weights_TK, order_S), None, None
        grad_SH = grad_TH.index_select(0, order_S // weights_TK.shape[1])
        weights_S1 = weights_TK.reshape(-1).index_select(0, order_S)[:, None]
        grad_y_SH = (grad_SH * weights_S1).to(y_SH.dtype)
        exact = torch.promote_types(weights_TK.dtype, torch.float32)
        grad_weights_S = (grad_SH * y_SH).sum(-1, dtype=exact)
        grad_weights_TK = grad_weights_S.index_select(0, inverse_S).view_as(weights_TK).to(weights_TK.dtype)
        return grad_y_SH, grad_weights_TK, None, None
