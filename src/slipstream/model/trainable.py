"""What of a model is trained, counted and listed by name."""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slipstream.model.quantize import parameter_count

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class TrainableGroup:
    """Trainable parameters of one name, over all layers."""

    name: str
    """The parameters' name with layer numbers as ``*``, e.g. ``model.layers.*.self_attn.q_proj.lora_A``."""
    tensors: int
    parameters: int


@dataclass(frozen=True)
class TrainableSummary:
    """What of a model is trained."""

    trainable: int
    """Trainable parameters (numbers, not tensors)."""
    total: int
    """All parameters."""
    groups: tuple[TrainableGroup, ...]
    """The trainable ones by name, in the model's order."""

    def __str__(self) -> str:
        share = self.trainable / self.total if self.total else 0.0
        return f"{self.trainable:,} of {self.total:,} parameters trainable ({share:.2%})"


def trainable_summary(model: "nn.Module") -> TrainableSummary:
    """Count what is trained, and list it by name."""
    counts: dict[str, tuple[int, int]] = {}
    total = 0
    for name, parameter in model.named_parameters():
        total += parameter_count(parameter)
        if parameter.requires_grad:
            group = group_name(name)
            tensors, parameters = counts.get(group, (0, 0))
            counts[group] = (tensors + 1, parameters + parameter.numel())
    groups = tuple(TrainableGroup(name, *count) for name, count in counts.items())
    return TrainableSummary(sum(group.parameters for group in groups), total, groups)


def group_name(parameter: str) -> str:
    """``base_model.model.model.layers.3.mlp.up_proj.lora_A.default.weight`` → ``model.layers.*.mlp.up_proj.lora_A``."""
    name = parameter.removeprefix("base_model.model.")
    name = re.sub(r"\.(lora_\w+)\.[^.]+(\.weight)?$", r".\1", name)
    name = re.sub(r"\.modules_to_save\.[^.]+\.", ".", name)
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
