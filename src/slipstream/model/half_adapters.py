"""Adapters kept in float32 and computed in half precision, with one cast a forward.

peft keeps LoRA weights in float32, which their updates need. Under autocast, their products then run in half precision,
but each weight is cast by a kernel of its own (and its gradient back), and in every layer the adapter's output is
scaled and added by two more. Here all weights are cast at once before the first layer, and the low-rank product adds
itself to the base's output: ``out = base(x) + scaling * (x A^T) B^T`` is three matrix products. The arithmetic is
autocast's: half-precision products of rounded weights, gradients rounded once and summed in float32 masters. Compiled
layers compute adapters that read one tensor together (``joined_adapters.py``).

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
from slipstream.model.joined_adapters import Joined, can_be_joined, same_inputs
from slipstream.model.last_product import last_product

HALF = (torch.bfloat16, torch.float16)
HALVES, NAME, OWNER = "_slipstream_half", "_slipstream_name", "_slipstream_adapters"
"""What hangs on an adapter layer: its half-precision copies (A, B) or None, its adapter's name, and who casts it."""
JOINED = "_slipstream_joined"
"""The group that compiled layers compute it with, and its place in it; None for a layer that they compute by itself."""


@dataclass
class HalfAdapters:
    """The adapters of one model that are computed from half-precision copies."""

    layers: list[Any]
    """peft's adapter layers, in the model's order."""
    dtype: torch.dtype
    hooks: list[RemovableHandle] = field(default_factory=list)
    users: int = 1
    """How many steps of the model have attached them and not detached them again."""
    groups: list[Joined] = field(default_factory=list)
    """Layers that compiled steps compute together. Their copies of A lie one below the other in memory, as a product
    with all of them reads them."""

    @classmethod
    def attach(cls, base: Any, dtype: torch.dtype) -> tuple["HalfAdapters | None", Decision]:
        """Take over the plain LoRA layers of a transformers model; gives the decision about it too.

        ``dtype``: what layers compute in. Layers with variants (DoRA), several adapters or biases stay peft's. Several
        steps of one model, each in its mode, share what the first has attached.
        """
        if dtype not in HALF:
            return None, Decision("half adapters", False, f"layers compute in {str(dtype).removeprefix('torch.')}")
        found, others = _plain_layers(base)
        shared = next((vars(module)[OWNER] for module in base.modules() if OWNER in vars(module)), None)
        if shared is not None and shared.dtype == dtype:
            shared.users += 1
            return shared, Decision("half adapters", True, f"{len(shared.layers)} adapters, cast for another step too")
        if not found:
            return None, Decision("half adapters", False, "no plain float32 LoRA layers to compute in half precision")
        adapters = cls(found, dtype)
        adapters.hooks.append(base.get_decoder().register_forward_pre_hook(adapters._refresh))
        for layer in found:
            forward = MethodType(_forward, layer)
            vars(layer).update({HALVES: None, NAME: _name(layer), OWNER: adapters, JOINED: None, "forward": forward})
        left = f"; {others} other adapter layers stay peft's" if others else ""
        reason = f"{len(found)} adapters cast together once a forward, float32 masters{left}"
        return adapters, Decision("half adapters", True, reason)

    def detach(self) -> None:
        """Give every layer peft's forward back, once nobody uses these any more."""
        self.users -= 1
        if self.users:
            return
        for hook in self.hooks:
            hook.remove()
        for layer in self.layers:
            for attribute in ("forward", HALVES, NAME, OWNER, JOINED):
                vars(layer).pop(attribute, None)

    def join(self, base: Any) -> Decision:
        """Let compiled layers compute adapters that read the same tensor in one operator; the decision about it.

        Runs the model on a few tokens, to see which do. Layers that can't be computed so stay as they are. Of several
        steps, the newest says which, since the model may have changed in between.
        """
        self._part()
        fitting = [layer for layer in self.layers if can_be_joined(layer, _name(layer), self.dtype)]
        if not fitting:
            return Decision(
                "joined adapters",
                False,
                "weights that are quantized, trained or of another dtype, or dropout before each adapter",
            )
        found = same_inputs(base, fitting, self.dtype)
        self.groups = [Joined(layers, [_name(layer) for layer in layers], HALVES) for layers in found]
        for group in self.groups:
            for index, layer in enumerate(group.layers):
                vars(layer)[JOINED] = group, index
        left = len(self.layers) - len(fitting)
        others = f"; {left} others by themselves" if left else ""
        reason = f"compiled layers compute {len(fitting)} adapters in {len(found)} groups that read one tensor{others}"
        return Decision("joined adapters", True, reason)

    def _part(self) -> None:
        """Every layer by itself again."""
        self.groups = []
        for layer in self.layers:
            vars(layer)[JOINED] = None

    def leave_last_uncompiled(self, base: Any) -> int:
        """Keep each decoder layer's last adapter out of compiled code, and give how many there are.

        A compiled part runs as a whole. Where layers are recomputed, their last product is not needed again, which
        uncompiled code knows (``last_product.py``, ``_added``); it is a quarter of a dense layer's recompute. One that
        is computed with others stays among them: it is not the layer's last product.
        """
        ends = [[m for m in layer.modules() if m in self.layers] for layer in base.get_decoder().layers]
        lasts = [found[-1] for found in ends if found and not _has_company(found[-1])]
        for layer in lasts:
            outside: Callable[..., Any] = torch.compiler.disable(_last_forward)  # type: ignore[no-untyped-call]
            vars(layer)["forward"] = MethodType(outside, layer)
        return len(lasts)

    def _refresh(self, *_: Any) -> None:
        """Cast the masters as they are now. With gradients even in an evaluation: a backward may still come."""
        with torch.inference_mode(False), torch.enable_grad():
            masters = [weight for layer in self.layers for weight in _weights(layer)]
            cast: Callable[..., tuple[torch.Tensor, ...]] = _Cast.apply
            halves = iter(cast(self._places(), *masters))
            for layer in self.layers:
                vars(layer)[HALVES] = (next(halves), next(halves))
        for group in self.groups:
            group.ready = None

    def _places(self) -> list[torch.Tensor]:
        """Memory for the copies: A and B of each layer."""
        stacked: dict[int, torch.Tensor] = {}
        for layers in (group.layers for group in self.groups if len(group.layers) > 1):
            masters = [_weights(layer)[0] for layer in layers]
            ranks = [a_RI.shape[0] for a_RI in masters]
            parts = torch.split(masters[0].new_empty(sum(ranks), masters[0].shape[1], dtype=self.dtype), ranks)
            stacked.update({id(layer): part for layer, part in zip(layers, parts, strict=True)})
        places: list[torch.Tensor] = []
        for layer in self.layers:
            a_RI, b_OR = _weights(layer)
            place = stacked.get(id(layer))
            places.append(torch.empty_like(a_RI, dtype=self.dtype) if place is None else place)
            places.append(torch.empty_like(b_OR, dtype=self.dtype))
        return places


def forget_copies(base: nn.Module) -> None:
    """Drop a model's half-precision copies and the graph behind them, until its next forward, whoever attached them."""
    for module in base.modules():
        if HALVES in vars(module):
            vars(module)[HALVES] = None
            if vars(module)[JOINED] is not None:
                vars(module)[JOINED][0].ready = None


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


def _has_company(layer: Any) -> bool:
    """Whether it is computed together with others."""
    joined: tuple[Joined, int] | None = vars(layer)[JOINED]
    return joined is not None and len(joined[0].layers) > 1


def _weights(layer: Any) -> tuple[nn.Parameter, nn.Parameter]:
    name = _name(layer)
    return layer.lora_A[name].weight, layer.lora_B[name].weight


class _Cast(torch.autograd.Function):
    """float32 masters → half-precision copies, all together; their gradients back to float32, all together."""

    @staticmethod
    def forward(ctx: Any, places: list[torch.Tensor], *masters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)  # a layer that was not called has no gradient, as peft's has none
        torch._foreach_copy_(places, masters)
        return tuple(places)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        given = [grad for grad in grads if grad is not None]
        full = [torch.empty_like(grad, dtype=torch.float32) for grad in given]
        if full:
            torch._foreach_copy_(full, given)
        rest = iter(full)
        return None, *(None if grad is None else next(rest) for grad in grads)


def _forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """peft's LoRA forward from the half-precision copies; peft's own where the adapters are switched off or merged.

    ``x`` [.., I] is called as peft calls it: a model may give it by keyword.
    """
    if self._slipstream_half is None or self.disable_adapters or self.merged or args or kwargs:
        out: torch.Tensor = type(self).forward(self, x, *args, **kwargs)
        return out
    name: str = self._slipstream_name
    a_RI, b_OR = self._slipstream_half
    compiling = torch.compiler.is_compiling()
    if compiling and self._slipstream_joined is not None and x.dtype == a_RI.dtype:
        group, index = self._slipstream_joined
        joined: torch.Tensor = group.output(index, x)
        return joined
    low_NR = F.linear(self.lora_dropout[name](x).to(a_RI.dtype), a_RI)
    if compiling:  # the sum is fused into whatever comes next
        low_NR = low_NR if self.scaling[name] == 1.0 else low_NR * self.scaling[name]
        summed: torch.Tensor = self.base_layer(x) + F.linear(low_NR, b_OR)
        return summed
    return _added(self.base_layer, x, low_NR, b_OR, self.scaling[name])


def _last_forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """``_forward`` of the last adapter of a layer that is recomputed; a product made for it where it fits."""
    halves = self._slipstream_half
    plain = halves is None or self.disable_adapters or self.merged or args or kwargs
    if plain or self._slipstream_joined is None or x.dtype != halves[0].dtype:
        return _forward(self, x, *args, **kwargs)
    base, (a_RI, b_OR) = self.base_layer, halves
    return last_product(x, base.weight, base.bias, a_RI, b_OR, self.scaling[self._slipstream_name])


def _added(base: Any, x_NI: torch.Tensor, low_NR: torch.Tensor, b_OR: torch.Tensor, scaling: float) -> torch.Tensor:
    """``base(x) + scaling * low b^T`` without a sum of its own: one product is added to the other's result.

    The base's product comes last, and autograd takes note of its weight before it runs. So a recompute that needs
    nothing but what this layer keeps ends there, without the product (PyTorch stops it at the last tensor).
    """
    plain = type(base) is nn.Linear and getattr(base, "bias", None) is None and not base._forward_hooks
    if not plain or "forward" in vars(base) or {base.weight.dtype, x_NI.dtype} != {b_OR.dtype}:
        base_NO: torch.Tensor = base(x_NI)
        rows_NO = base_NO.reshape(-1, base_NO.shape[-1])
        return torch.addmm(rows_NO, low_NR.flatten(0, -2), b_OR.t(), alpha=scaling).view(base_NO.shape)
    delta_NO = F.linear(low_NR if scaling == 1.0 else low_NR * scaling, b_OR)
    delta_NO.flatten(0, -2).addmm_(x_NI.flatten(0, -2), base.weight.t())
    return delta_NO
