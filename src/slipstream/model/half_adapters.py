"""Adapters kept in float32 and computed in half precision, with one cast a forward.

peft keeps LoRA weights in float32, which their updates need. Under autocast, their products then run in half precision,
but each weight is cast by a kernel of its own (and its gradient back), and in every layer the adapter's output is
scaled and added by two more. Here all weights are cast at once before the first layer, and the low-rank product adds
itself to the base's output: ``out = base(x) + scaling * (x A^T) B^T`` is three matrix products. The arithmetic is
autocast's: half-precision products of rounded weights, gradients rounded once and summed in float32 masters.

Nothing moves: masters stay peft's parameters, in its state dict and in the optimizer. ``attach`` gives each adapter
layer a ``forward`` of its own on the instance, ``detach`` takes it away. The alternative, adapters in half precision
with a float32 copy inside the optimizer, needs an optimizer of its own and saves rounded weights.

Shapes: N tokens, I inputs, O outputs, R rank.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.hooks import RemovableHandle

from slipstream.decision import Decision

HALF = (torch.bfloat16, torch.float16)
HALVES, NAME = "_slipstream_half", "_slipstream_name"
"""What hangs on an adapter layer: its half-precision copies (A, B) or None, and its adapter's name."""


@dataclass
class HalfAdapters:
    """The adapters of one model that are computed from half-precision copies."""

    layers: list[nn.Module]
    """peft's adapter layers, in the model's order."""
    dtype: torch.dtype
    hooks: list[RemovableHandle] = field(default_factory=list)

    @classmethod
    def attach(cls, base: Any, dtype: torch.dtype) -> tuple["HalfAdapters | None", Decision]:
        """Take over the plain LoRA layers of a transformers model; gives the decision about it too.

        ``dtype``: what layers compute in. Layers with variants (DoRA), several adapters or biases stay peft's.
        """
        if dtype not in HALF:
            return None, Decision("half adapters", False, f"layers compute in {str(dtype).removeprefix('torch.')}")
        found, others = _plain_layers(base)
        if not found:
            return None, Decision("half adapters", False, "no plain float32 LoRA layers to compute in half precision")
        adapters = cls(found, dtype)
        adapters.hooks.append(base.get_decoder().register_forward_pre_hook(adapters._refresh, prepend=True))
        for layer in found:
            vars(layer).update({HALVES: None, NAME: _name(layer), "forward": MethodType(_forward, layer)})
        left = f"; {others} other adapter layers stay peft's" if others else ""
        reason = f"{len(found)} adapters cast together once a forward, float32 masters{left}"
        return adapters, Decision("half adapters", True, reason)

    def detach(self) -> None:
        """Give every layer peft's forward back."""
        for hook in self.hooks:
            hook.remove()
        for layer in self.layers:
            for attribute in ("forward", HALVES, NAME):
                vars(layer).pop(attribute, None)

    def _refresh(self, *_: Any) -> None:
        """Cast the masters as they are now. With gradients even in an evaluation: a backward may still come."""
        with torch.inference_mode(False), torch.enable_grad():
            masters = [weight for layer in self.layers for weight in _weights(layer)]
            cast: Callable[..., tuple[torch.Tensor, ...]] = _Cast.apply
            halves = iter(cast(self.dtype, *masters))
            for layer in self.layers:
                vars(layer)[HALVES] = (next(halves), next(halves))


def _plain_layers(base: nn.Module) -> tuple[list[nn.Module], int]:
    """Adapter layers that ``_forward`` computes as peft does, and how many others there are."""
    from peft.tuners.lora import LoraLayer

    layers = [module for module in base.modules() if isinstance(module, LoraLayer)]
    plain: list[nn.Module] = [layer for layer in layers if _is_plain(layer)]
    return plain, len(layers) - len(plain)


def _is_plain(layer: Any) -> bool:
    """One LoRA adapter in float32, with neither variant nor bias, on a linear layer with nothing put over it."""
    from torch.distributed.tensor import DTensor

    names = list(layer.active_adapters)
    if len(names) != 1 or names[0] not in layer.lora_A or layer.merged or "forward" in vars(layer):
        return False
    (name,) = names
    weights = layer.lora_A[name].weight, layer.lora_B[name].weight
    plain = not getattr(layer, "lora_variant", {}).get(name) and not layer.lora_bias.get(name, False)
    dropout = isinstance(layer.lora_dropout[name], nn.Identity | nn.Dropout)
    kept = all(w.dtype == torch.float32 and not isinstance(w, DTensor) and not w.is_meta for w in weights)
    return plain and dropout and kept and isinstance(layer.get_base_layer(), nn.Linear)


def _name(layer: Any) -> str:
    (name,) = layer.active_adapters
    return str(name)


def _weights(layer: Any) -> tuple[nn.Parameter, nn.Parameter]:
    name = _name(layer)
    return layer.lora_A[name].weight, layer.lora_B[name].weight


class _Cast(torch.autograd.Function):
    """float32 masters → half-precision copies, all together; their gradients back to float32, all together."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *masters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        halves = [torch.empty_like(master, dtype=dtype) for master in masters]
        torch._foreach_copy_(halves, masters)
        return tuple(halves)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        full = [torch.empty_like(grad, dtype=torch.float32) for grad in grads]
        torch._foreach_copy_(full, list(grads))
        return None, *full


def _forward(self: Any, x_NI: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """peft's LoRA forward from the half-precision copies; peft's own where the adapters are switched off or merged."""
    if self._slipstream_half is None or self.disable_adapters or self.merged or args or kwargs:
        out: torch.Tensor = type(self).forward(self, x_NI, *args, **kwargs)
        return out
    name: str = self._slipstream_name
    a_RI, b_OR = self._slipstream_half
    base_NO: torch.Tensor = self.base_layer(x_NI)
    low_NR = F.linear(self.lora_dropout[name](x_NI).to(a_RI.dtype), a_RI)
    rows_NO = base_NO.reshape(-1, base_NO.shape[-1])
    added_NO = torch.addmm(rows_NO, low_NR.reshape(-1, low_NR.shape[-1]), b_OR.t(), alpha=self.scaling[name])
    return added_NO.view(base_NO.shape)
