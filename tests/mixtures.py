"""Mixtures of experts of every layout, tiny and random, and memory filled with NaN."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from packed import FAMILIES, model_of
from slipstream.model.experts_choice import find_experts

LATENT = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 2,
}
MIXTURES: dict[str, dict[str, Any]] = {
    **{family: FAMILIES[family] for family in ("gpt_oss", "qwen3_moe", "mixtral")},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 4},
    "deepseek_v2": {**LATENT, "topk_method": "group_limited_greedy"},
    "deepseek_v3": LATENT,
    "granitemoe": {"num_local_experts": 8, "num_experts_per_tok": 3},
}
"""gpt_oss: transposed, with biases, interleaved and clamped; deepseek: groups, shared experts, a dense layer first."""


def mixture_of(family: str, **overrides: Any) -> Any:
    """The same tiny mixture at every call, with no parameter that is zero, so that every part has an effect."""
    model = model_of(family, **{**MIXTURES[family], **overrides})
    draw = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.5 if "experts" in name and "shared" not in name else 0.3
            if "experts" in name or not parameter.any():
                parameter.normal_(0, scale, generator=draw)
    return model


def experts_of(model: nn.Module) -> Any:
    """A model's first experts module."""
    return next(iter(find_experts(model).values()))


@contextmanager
def dirty_memory() -> Iterator[None]:
    """New memory holds NaN, so that a row which nobody wrote shows."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(4).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class Made(TorchDispatchMode):
    """Counts the tensors an operator made, by operator; only those of at least ``elements``."""

    def __init__(self, elements: int = 0) -> None:
        super().__init__()
        self.elements, self.names = elements, list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        views = not func._schema.returns or any(r.alias_info is not None for r in func._schema.returns)
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.numel() >= self.elements and not views:
                self.names.append(str(func.overloadpacket))
        return out
