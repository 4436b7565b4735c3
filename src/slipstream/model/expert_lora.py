"""Low-rank adapters on the experts' matrices: peft's parameters, multiplied slot by slot.

peft puts an adapter on a stack of matrices by wrapping the experts module (``ParamWrapper``, one for each stack, one
inside the other), and forms W + ΔW for all experts in every forward. Here the outermost wrapper's ``forward`` is
overridden on the instance: it hands the adapters to our experts function, which multiplies by their two factors. The
parameters, their names and their layout stay peft's, so what is saved loads in plain peft, and what plain peft saved
loads here. A router's one small matrix may be added to: it is, without the parametrisation that peft registers and
removes in every forward.

    lora_A.weight   [E * R, I]   row e * R + r
    lora_B.weight   [O, R * E]   column r * E + e

E: experts; I, O: input and output width of a matrix; R: rank.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from slipstream.model.experts import ExpertsForward, LowRank, up_name
from slipstream.model.experts_products import ALIGNMENT


@dataclass
class ExpertAdapters:
    """Takes over the wrappers of one model's experts; ``refresh`` whenever adapters may have been added."""

    run: ExpertsForward
    """What computes an experts module with its adapters."""
    modules: list[nn.Module]
    """The experts modules that ``run`` can compute."""
    taken: list[nn.Module] = field(default_factory=list)
    """Outermost wrappers whose forward is ours."""
    seen: tuple[str, ...] = ()
    """The adapters' names when it was last looked."""

    def refresh(self, base: Any) -> None:
        """Look for wrappers, if the set of adapters has changed."""
        names = tuple(getattr(base, "peft_config", ()))
        if names != self.seen:
            self.release()
            self.seen = names
            self._take(base)

    def release(self) -> None:
        """Give the wrappers their own forward back."""
        for wrapper in self.taken:
            vars(wrapper).pop("forward", None)
        self.taken, self.seen = [], ()

    def _take(self, base: nn.Module) -> None:
        inside: set[int] = set()
        for module in base.modules():  # the outermost comes first
            chain = _wrappers(module)
            if not chain or id(module) in inside:
                continue
            inside |= {id(wrapper) for wrapper in chain}
            forward = self._forward_of(chain)
            if forward is not None:
                module.forward = forward
                self.taken.append(module)

    def _forward_of(self, chain: list[Any]) -> Callable[..., Any] | None:
        """What the outermost wrapper of a chain shall compute; None for wrappers that are left to peft."""
        inner = chain[-1].base_layer
        names = {wrapper.parameter_name for wrapper in chain}
        if any(inner is known for known in self.modules) and names <= {up_name(inner), "down_proj"}:
            return self._experts_forward(chain, inner)
        if len(chain) == 1 and chain[0].num_experts == 1:
            return _matrix_forward(chain[0])
        return None

    def _experts_forward(self, chain: list[Any], experts: nn.Module) -> Callable[..., torch.Tensor]:
        by_name = {wrapper.parameter_name: wrapper for wrapper in chain}

        def adapters(name: str, dtype: torch.dtype) -> list[LowRank]:
            wrapper = by_name.get(name)
            if wrapper is None:
                return []
            return [low_rank(wrapper, adapter, dtype) for adapter in _active(wrapper)]

        def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
            if _left_to_peft(chain, kwargs):
                own: torch.Tensor = type(chain[0]).forward(chain[0], *args, **kwargs)
                return own
            run: Callable[..., torch.Tensor] = self.run
            return run(experts, *args, adapters=adapters, **kwargs)

        return forward


def _matrix_forward(wrapper: Any) -> Callable[..., Any]:
    """A module with one adapted matrix, such as a router: called with the sum in the matrix's place."""
    module, name = wrapper.base_layer, wrapper.parameter_name

    def forward(*args: Any, **kwargs: Any) -> Any:
        if _left_to_peft([wrapper], kwargs):
            return type(wrapper).forward(wrapper, *args, **kwargs)
        weight = getattr(module, name)
        for adapter in _active(wrapper):
            weight = weight + wrapper.get_delta_weight(adapter).to(weight.dtype)
        return torch.func.functional_call(module, {name: weight}, args, kwargs)

    return forward


def _active(wrapper: Any) -> list[str]:
    return [adapter for adapter in wrapper.active_adapters if adapter in wrapper.lora_A]


def _left_to_peft(chain: list[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a call needs what peft does: adapters switched off or merged, or a choice of them for each row."""
    return chain[0].disable_adapters or any(wrapper.merged for wrapper in chain) or "adapter_names" in kwargs


def _wrappers(module: Any) -> list[Any]:
    """The chain of wrappers around a parameter's module, outermost first; empty for anything else."""
    from peft.tuners.lora.layer import ParamWrapper

    chain = []
    while isinstance(module, ParamWrapper):
        chain.append(module)
        module = module.base_layer
    return chain


def low_rank(wrapper: Any, adapter: str, dtype: torch.dtype) -> LowRank:
    """One adapter's factors in the dtype to compute in; the rank is filled up with zeros to what kernels take."""
    experts, rank = wrapper.num_experts, wrapper.r[adapter]
    a, b = wrapper.lora_A[adapter].weight, wrapper.lora_B[adapter].weight
    a_ERI = a.to(dtype).view(experts, rank, a.shape[1])
    b_ERO = b.view(b.shape[0], rank, experts).permute(2, 1, 0)
    b_ERO = b_ERO.to(dtype, copy=True, memory_format=torch.contiguous_format)
    if missing := -rank % ALIGNMENT:
        a_ERI, b_ERO = (nn.functional.pad(factor, (0, 0, 0, missing)) for factor in (a_ERI, b_ERO))
    return LowRank(a_ERI.transpose(1, 2), b_ERO, wrapper.scaling[adapter])
