"""The experts one by one, as they are written down most plainly: the reference of tests and benchmark.

For each expert its tokens are looked up with ``torch.where``, an answer whose size the host must wait for, gathered,
multiplied, weighted and added to the result. It is the way that the published comparison starts from. Which matrices,
biases, activations and adapters there are is read from the module by the same functions as in ``model/experts.py``.

T: tokens; K: experts a token; E: experts; H: width of a token.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers.integrations.moe import ExpertsInterface

from slipstream.model.experts import AdaptersOf, activate, computes_in, matrices, no_adapters, up_name
from slipstream.model.routing import Routing, route
from slipstream.transform import ATTRIBUTE, Applied, base_model

WHERE = "slipstream_bench_where"
"""The name under which the reference is registered with transformers."""
WAITING = {
    torch.nonzero,
    torch.bincount,
    torch.Tensor.nonzero,
    torch.Tensor.bincount,
    torch.Tensor.tolist,
    torch.Tensor.item,
    torch.Tensor.cpu,
    torch.Tensor.__bool__,
    torch.Tensor.__int__,
    torch.Tensor.__float__,
    torch.Tensor.__index__,
}
"""Calls for whose answer the host waits, or whose answer has a size that only the data knows."""


def where_experts(
    module: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    adapters: AdaptersOf = no_adapters,
) -> torch.Tensor:
    """Tokens [T, H], their experts and weights [T, K] → [T, H]."""
    dtype = computes_in(module)
    x_TH = hidden_states.to(dtype)
    stacks = {name: matrices(module, name, dtype) for name in (up_name(module), "down_proj")}
    factors = {name: adapters(name, dtype) for name in stacks}

    def project(name: str, expert: int, x: torch.Tensor) -> torch.Tensor:
        y = x @ stacks[name][expert]
        for adapter in factors[name]:
            y = y + (x @ adapter.a[expert] * adapter.scale) @ adapter.b[expert]
        return y + getattr(module, f"{name}_bias")[expert].to(dtype) if module.has_bias else y

    out_TH = torch.zeros_like(x_TH)
    for expert, (tokens, choices) in enumerate(look_up(top_k_index, module.num_experts)):
        inner = activate(module, project(up_name(module), expert, x_TH[tokens]))
        weighted = project("down_proj", expert, inner) * top_k_weights[tokens, choices, None]
        out_TH = out_TH.index_add(0, tokens, weighted.to(dtype))
    return out_TH.to(hidden_states.dtype)


def look_up(top_k_index_TK: torch.Tensor, experts: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each expert's tokens and which of their K choices it is: one answer of unknown size an expert."""
    found = []
    for expert in range(experts):
        tokens, choices = torch.where(top_k_index_TK == expert)
        found.append((tokens, choices))
    return found


def sorted_slices(top_k_index_TK: torch.Tensor, experts: int) -> tuple[Routing, list[int]]:
    """What the sorted loop finds out before it multiplies: the routing, and each expert's slots on the host."""
    routing = route(top_k_index_TK, experts)
    return routing, routing.counts


ROUTINGS: dict[str, Callable[[torch.Tensor, int], Any]] = {
    "where-loop": look_up,
    "sorted-loop": sorted_slices,
    "grouped": route,
}
"""What each variant finds out about a layer's assignments [T, K] before it multiplies."""


def use_where(model: Any) -> None:
    """Give a model on which ``apply`` has chosen experts the reference in their place, adapters included."""
    ExpertsInterface.register(WHERE, where_experts)
    base = base_model(model)
    applied: Applied = getattr(base, ATTRIBUTE)
    assert applied.experts is not None
    base.set_experts_implementation(WHERE)
    applied.experts.adapters.run = where_experts


class HostQueries(TorchFunctionMode):
    """Counts the calls that make a host wait for a device, on every device alike."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += func in WAITING or (func is torch.where and len(args) == 1 and not kwargs)
        return func(*args, **(kwargs or {}))
