"""Which experts function a model gets, and putting it there and back.

Registered with transformers under our own keys, chosen per instance by its config; what peft wraps is taken over on the
instance (``expert_lora.py``), also when it is wrapped later; the routing is kept for the recompute
(``experts_kept.py``). A model whose experts can't be computed so keeps its own, and the decision says why.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from slipstream.cost.hardware import Device
from slipstream.decision import Decision
from slipstream.errors import InputError
from slipstream.model.expert_lora import ExpertAdapters
from slipstream.model.experts import ExpertsForward, grouped_experts, looped_experts, up_name
from slipstream.model.experts_kept import KeptRouting
from slipstream.model.experts_products import ALIGNMENT
from slipstream.model.own_kernels import kernels_told

ExpertsChoice = Literal["auto", "grouped", "loop"]
Named = Literal["grouped", "loop"]
FUNCTIONS: Mapping[Named, ExpertsForward] = MappingProxyType({"grouped": grouped_experts, "loop": looped_experts})
WHAT: Mapping[Named, str] = MappingProxyType(
    {
        "grouped": "one sort a layer and one product for all experts, without a host sync",
        "loop": "one sort a layer and a product an expert over its slice, with one host copy a layer",
    }
)
GROUPED_CAPABILITIES = (9, 10)
"""Major compute capabilities with a grouped kernel in PyTorch; elsewhere it loops on the host, and waits for it."""


def find_experts(base: nn.Module) -> dict[str, nn.Module]:
    """The modules that transformers' ``ExpertsInterface`` dispatches, by name: stacks of matrices and a layout."""
    return {
        name: module
        for name, module in base.named_modules()
        if all(hasattr(module, mark) for mark in ("has_gate", "has_bias", "is_transposed", "num_experts", "config"))
    }


def choose_experts(
    asked: ExpertsChoice, base: Any, device: Device, dtype: torch.dtype
) -> tuple[Named | None, Decision]:
    """The experts function for ``base`` computing in ``dtype``, or None to leave its own, and the decision.

    Raises ``InputError`` when the one asked for can't be had here.
    """
    if asked not in get_args(ExpertsChoice):
        raise InputError(f"experts {asked!r} is none of {', '.join(get_args(ExpertsChoice))}")
    experts = list(find_experts(base).values())
    unfit = _unfit(base, experts)
    if unfit is not None:
        if asked != "auto":
            raise InputError(f"experts {asked}: {unfit}; set experts to auto")
        return None, Decision("experts", False, unfit)
    obstacle = grouped_obstacle(experts, device, dtype)
    if asked == "grouped" and obstacle:
        raise InputError(f"experts grouped: {obstacle}; set experts to auto or loop")
    kernels = kernels_told(device.kind)
    if asked != "auto":
        return asked, Decision("experts", True, f"{asked}: {WHAT[asked]} (asked for){kernels}")
    chosen, against = auto_experts(obstacle, device)
    why = f" ({against})" if against else ""
    return chosen, Decision("experts", True, f"{chosen}: {WHAT[chosen]}{why}{kernels}")


def auto_experts(obstacle: str | None, device: Device) -> tuple[Named, str | None]:
    """What ``auto`` takes where ``obstacle`` (or None) stands in the way of grouped products, and why not those."""
    if obstacle is None and device.kind == "cpu":
        obstacle = "nothing waits for a host that computes itself"
    return ("loop" if obstacle else "grouped"), obstacle


def _unfit(base: Any, experts: list[Any]) -> str | None:
    """Why neither function can compute this model's experts."""
    if not experts:
        return "the model has no experts that transformers' ExpertsInterface could dispatch"
    if not base._can_set_experts_implementation():
        return "the model's experts can't be chosen through transformers' ExpertsInterface"
    if any(getattr(module, "_is_expert_parallel", False) for module in experts):
        return "the experts are spread over several devices (expert parallel)"
    for module in experts:
        for name in (up_name(module), "down_proj"):
            stack = getattr(module, name, None)
            if not isinstance(stack, torch.Tensor) or stack.ndim != 3 or not stack.is_floating_point():
                return f"{type(module).__name__}.{name} is no stack of floating-point matrices"
            if stack.dtype.itemsize < 2:
                return f"{type(module).__name__}.{name} is stored in {stack.dtype}"
    return None


def grouped_obstacle(experts: list[Any], device: Device, dtype: torch.dtype) -> str | None:
    """What stands in the way of grouped products, or None."""
    if not hasattr(torch.nn.functional, "grouped_mm"):
        return f"PyTorch {torch.__version__} has no grouped product"
    widths = {width for m in experts for name in (up_name(m), "down_proj") for width in getattr(m, name).shape[1:]}
    if odd := sorted(width for width in widths if width % ALIGNMENT):
        return f"a grouped product takes widths that are multiples of {ALIGNMENT}, and there is {odd[0]}"
    if device.kind == "cpu":
        return None
    if device.kind != "cuda":
        return f"there is no grouped product on {device.kind}"
    if dtype != torch.bfloat16:
        return f"a grouped product computes in bfloat16, and the layers in {str(dtype).removeprefix('torch.')}"
    major, minor = device.compute_capability or (0, 0)
    if major not in GROUPED_CAPABILITIES:
        return f"no grouped kernel for compute capability {major}.{minor}: PyTorch would loop and wait"
    return None


@dataclass
class AppliedExperts:
    """What was done to one model's experts; ``attach`` and ``detach`` are each called once."""

    choice: Named
    previous: dict[str, str | None]
    adapters: ExpertAdapters
    kept: KeptRouting
    hook: RemovableHandle | None = None

    @classmethod
    def to(cls, base: Any, choice: Named) -> "AppliedExperts":
        """Choose the function in the model's config, take over adapters, watch the routing."""
        from transformers.integrations.moe import ExpertsInterface

        functions = {name: _uncompiled(name) for name in FUNCTIONS}
        for name, function in functions.items():
            ExpertsInterface.register(experts_key(name), function)
        found = find_experts(base)
        blocks = {name: base.get_submodule(_block_of(name)) for name in found}
        adapters = ExpertAdapters(functions[choice], list(found.values()))
        applied = cls(choice, base.get_experts_implementation(), adapters, KeptRouting(list(blocks.values())))
        base.set_experts_implementation(experts_key(choice))
        applied.kept.attach()
        applied.hook = base.get_decoder().register_forward_pre_hook(lambda *_: adapters.refresh(base))
        adapters.refresh(base)
        return applied

    def detach(self, base: Any) -> None:
        """Undo all of it."""
        assert self.hook is not None
        self.hook.remove()
        self.adapters.release()
        self.kept.detach()
        base.set_experts_implementation(self.previous)


def _uncompiled(choice: Named) -> ExpertsForward:
    """A choice's function; the loop as one that ``torch.compile`` calls and does not look into.

    The sizes of its slices are Python integers, and compiled code would be made anew for each batch's.
    """
    function = FUNCTIONS[choice]
    if choice == "grouped":
        return function
    outside: ExpertsForward = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return outside


def experts_key(choice: str) -> str:
    """The name under which a choice is registered with transformers."""
    return f"slipstream_{choice}"


def _block_of(name: str) -> str:
    """The module that holds router and experts, by the name of the experts, which peft may have wrapped."""
    while name.endswith(".base_layer"):
        name = name.removesuffix(".base_layer")
    return name.rpartition(".")[0]
