"""What a model, its arguments and its device mean for the mode of a step."""

import torch
from torch import nn

from slipstream.cost.hardware import describe
from slipstream.model.quantize import parameter_count
from slipstream.step.choice import Circumstances, compiler_obstacle, trains_whole
from slipstream.transform import applied, base_model

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""By ``TrainingArguments.mixed_precision``: what its flags ask for, or the launcher where they ask for nothing."""


def circumstances(
    model: nn.Module, *, packed: bool = True, processes: int = 1, dtype: torch.dtype = torch.float32
) -> Circumstances:
    """Read them off ``model`` as ``apply`` left it; ``dtype``: what layers compute in."""
    found = applied(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    device = describe(trained[0].device if trained else next(model.parameters()).device)
    base = base_model(model)
    return Circumstances(
        device=device,
        packed=packed and found is not None and found.forward.packing.on,
        attention=None if found is None else found.attention,
        host_positions=found is not None and bool(found.forward.rotary),
        host_experts=found is not None and found.experts is not None and found.experts.choice == "loop",
        processes=processes,
        devices=len({parameter.device for parameter in base.parameters()}),
        whole=trains_whole(sum(p.numel() for p in trained), sum(map(parameter_count, base.parameters()))),
        scaled_gradients=dtype == torch.float16,
        compiler=compiler_obstacle(device),
    )
