"""Mixture-of-experts layers over sorted slots: what an experts module of transformers computes, in one pass.

    1. route     ``experts_kept.kept_route``   which slots are whose; once a layer
    2. gather    ``Routing.gather``            tokens → slots
    3. up        ``_project``, ``_biased``     products with each expert's matrix, its adapters, its bias
                 ``activate``                  the gate; gpt-oss's with its bias in one kernel (``experts_gate.py``)
    4. down      ``_project``, ``_biased``
    5. combine   ``Routing.combine``           weighted sum, slots → tokens

Adapters are products of low rank over the same slots, added to the base's: neither W + ΔW nor anything else of the
size of the weights is ever formed. Layouts (transposed, biased, gated or not) are read from the module, and the gate is
the module's own, so that a family's activation stays its own.

T: tokens; K: experts a token; S = T * K slots; E: experts; I, O: a product's input and output width; R: rank.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from slipstream.model.experts_gate import biased_gate, fuses_gate
from slipstream.model.experts_kept import kept_route
from slipstream.model.experts_products import ALIGNMENT, grouped_product, sliced_product
from slipstream.model.routing import Routing


@dataclass(frozen=True)
class LowRank:
    """One adapter of one stack of matrices: ``x @ a @ b * scale`` is added to ``x @ weight``."""

    a: torch.Tensor
    """[E, I, R]."""
    b: torch.Tensor
    """[E, R, O]."""
    scale: float


AdaptersOf = Callable[[str, torch.dtype], list[LowRank]]
"""A parameter's name and the dtype to compute in → the adapters on it."""
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Slots [S, I] and matrices [E, I, O] → [S, O]."""


class ExpertsForward(Protocol):
    """What computes an experts module; transformers calls it without adapters."""

    def __call__(
        self,
        module: Any,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        adapters: AdaptersOf = ...,
    ) -> torch.Tensor:
        """Tokens [T, H], their experts and weights [T, K] → [T, H]."""


def no_adapters(name: str, dtype: torch.dtype) -> list[LowRank]:
    """None on any parameter."""
    return []


def grouped_experts(
    module: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    adapters: AdaptersOf = no_adapters,
) -> torch.Tensor:
    """The experts by grouped products: no host sync."""
    routing = kept_route(module, top_k_index, module.num_experts)
    trained = torch.is_grad_enabled() and (adapters is not no_adapters or module.down_proj.requires_grad)
    multiply = partial(grouped_product, routing=routing, idle_E=routing.idle() if trained else None)
    return _run(module, hidden_states, top_k_weights, routing, multiply, adapters)


def looped_experts(
    module: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    adapters: AdaptersOf = no_adapters,
) -> torch.Tensor:
    """The experts one after the other over slices of the sorted slots: one host copy of their sizes a layer."""
    routing = kept_route(module, top_k_index, module.num_experts)
    multiply = partial(sliced_product, counts=routing.counts)
    return _run(module, hidden_states, top_k_weights, routing, multiply, adapters)


def _run(
    module: Any,
    hidden_states: torch.Tensor,
    top_k_weights: torch.Tensor,
    routing: Routing,
    multiply: Product,
    adapters: AdaptersOf,
) -> torch.Tensor:
    project = partial(_project, module, multiply, adapters)
    x_SH = routing.gather(hidden_states.flatten(0, -2).to(computes_in(module)))
    if fuses_gate(module, x_SH):
        inner_SI = biased_gate(module, project("gate_up_proj", x_SH), routing)
    else:
        name = up_name(module)
        inner_SI = activate(module, _biased(module, routing, multiply, name, project(name, x_SH)))
    y_SH = _biased(module, routing, multiply, "down_proj", project("down_proj", inner_SI))
    if getattr(module, "has_post_expert_norm", False):
        y_SH = module.post_expert_norm(y_SH)
    return routing.combine(y_SH, top_k_weights).to(hidden_states.dtype).view_as(hidden_states)


def _project(module: Any, multiply: Product, adapters: AdaptersOf, name: str, x_SI: torch.Tensor) -> torch.Tensor:
    """One stack of matrices with its adapters, [S, O]."""
    y_SO = multiply(x_SI, matrices(module, name, x_SI.dtype))
    for adapter in adapters(name, x_SI.dtype):
        low_SR = multiply(x_SI, adapter.a)
        y_SO += multiply(low_SR if adapter.scale == 1.0 else low_SR * adapter.scale, adapter.b)
    return y_SO


def _biased(module: Any, routing: Routing, multiply: Product, name: str, y_SO: torch.Tensor) -> torch.Tensor:
    """Slots with their expert's bias, where the module has any, added in place."""
    if not module.has_bias:
        return y_SO
    bias_EO = getattr(module, f"{name}_bias").to(y_SO.dtype)
    if not bias_EO.requires_grad:
        return y_SO.add_(bias_EO.index_select(0, routing.expert))
    return y_SO.add_(_trained_bias(bias_EO, multiply, len(y_SO)))


def _trained_bias(bias_EO: torch.Tensor, multiply: Product, slots: int) -> torch.Tensor:
    """Each slot's bias, as a product with ones: its gradient is then summed in a fixed order, too."""
    ones_SA = bias_EO.new_zeros(slots, ALIGNMENT)
    ones_SA[:, 0] = 1
    return multiply(ones_SA, nn.functional.pad(bias_EO[:, None], (0, 0, 0, ALIGNMENT - 1)))


def matrices(module: Any, name: str, dtype: torch.dtype) -> torch.Tensor:
    """The stack of an experts module as [E, I, O], whichever way it is stored."""
    weight: torch.Tensor = getattr(module, name).to(dtype)
    return weight if module.is_transposed else weight.transpose(-2, -1)


def activate(module: Any, up_SO: torch.Tensor) -> torch.Tensor:
    """The module's own gate, or its plain activation where it has none, [S, I]."""
    inner: torch.Tensor = module._apply_gate(up_SO) if module.has_gate else module.act_fn(up_SO)
    return inner


def up_name(module: Any) -> str:
    """The name of the first stack of matrices."""
    return "gate_up_proj" if module.has_gate else "up_proj"


def computes_in(module: Any) -> torch.dtype:
    """The dtype of the products: what autocast asks for, or the weights' own."""
    weight: torch.Tensor = module.down_proj
    kind = weight.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
