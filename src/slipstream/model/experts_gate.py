"""Which experts have their bias and gate computed by one kernel, and that kernel behind a plain call.

gpt-oss alone has a gate that PyTorch has no kernel for; where it isn't compiled it runs in ours (``expert_kernels``).
Every other family keeps the module's own, and so does gpt-oss on devices without Triton and where biases are trained.
"""

from functools import cache
from typing import Any

import torch

from slipstream.model.own_kernels import own_kernels
from slipstream.model.routing import Routing


def fuses_gate(module: Any, x_SH: torch.Tensor) -> bool:
    """Whether ``biased_gate`` computes this module's bias and gate on slots like these."""
    if not own_kernels(x_SH):
        return False
    bias = getattr(module, "gate_up_proj_bias", None)
    frozen = bias is None or not bias.requires_grad
    return frozen and getattr(type(module), "_apply_gate", None) is _gpt_oss_gate()


def biased_gate(module: Any, up_SO: torch.Tensor, routing: Routing) -> torch.Tensor:
    """``up_SO`` with each slot's bias added, gated as gpt-oss does, [S, I]; call it where ``fuses_gate`` says so."""
    from slipstream.model.expert_kernels import clamped_gate

    bias = module.gate_up_proj_bias.to(up_SO.dtype) if module.has_bias else None
    return clamped_gate(up_SO, bias, routing.expert, module.alpha, module.limit)


@cache
def _gpt_oss_gate() -> Any:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    return GptOssExperts._apply_gate
