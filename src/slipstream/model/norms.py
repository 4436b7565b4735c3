"""RMS norms as PyTorch's one kernel, in layers that aren't compiled.

transformers writes a norm as it reads: cast to float32, square, mean, add, root, multiply, cast, multiply. Uncompiled,
that is 9 kernels forward and 13 back, on a card some 120 bytes moved for each number; ``torch.nn.functional.rms_norm``
is one each way and keeps the half-precision input instead of float32 copies. (Zhang and Sennrich 2019, Root mean square
layer normalization: ``y = x / sqrt(mean(x^2) + eps) * w``.) The arithmetic is the same, in float32; only the order in
which squares are summed is the kernel's own, and a few results in a million round to the other side.

Families differ in what is rounded. Each class is tried on a few numbers to see which it is:

    first    w * (x * r).to(dtype)        llama, qwen, mistral: two kernels, to round in the same place
    last     (w * x * r).to(dtype)        gpt-oss, olmo2: one

Others (gemma's ``1 + w``, norms that subtract a mean) stay as they are. So do compiled layers, whose kernels are fused
anyway: the compiler sees the model's own code. ``attach_norms`` sets ``forward`` on the instance, ``Norms.detach``
takes it away.
"""

import copy
import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from slipstream.cost.hardware import Device
from slipstream.decision import Decision

NormsChoice = Literal["auto", "model"]
Rounded = Literal["first", "last"]
"""Whether the normalised input is rounded before it is multiplied with the weight, or the product after."""
EPSILONS = ("variance_epsilon", "eps")
TRIED = 256
"""Vectors that a class is tried on."""
ROUNDING = 0.01
"""Share of the tried numbers that may round to the other side; one that is rounded elsewhere differs in a third."""


@dataclass(frozen=True)
class Norms:
    """The norms of a model that run as one kernel; ``detach`` undoes it."""

    modules: tuple[nn.Module, ...]

    def detach(self) -> None:
        """Give each its class's forward back."""
        for module in self.modules:
            vars(module).pop("forward", None)


def choose_norms(asked: NormsChoice, base: nn.Module, device: Device) -> tuple[dict[nn.Module, Rounded], Decision]:
    """The norms to run as one kernel, with where each rounds, and the decision; weights may be meta tensors."""
    if asked == "model":
        return {}, Decision("norms", False, "as the model computes them: asked for (norms: model)")
    if obstacle := norms_obstacle(device):
        return {}, Decision("norms", False, f"as the model computes them: {obstacle}")
    every = [module for module in base.modules() if type(module).__name__.endswith("Norm")]
    kinds = {kind: _rounded(next(m for m in every if type(m) is kind)) for kind in {type(m) for m in every}}
    found = {m: rounded for m in every if (rounded := kinds[type(m)]) is not None and "forward" not in vars(m)}
    others = Counter(type(m).__name__ for m in every if m not in found)
    left = ", ".join(f"{count} {name}" for name, count in sorted(others.items()))
    if not found:
        return {}, Decision("norms", False, f"as the model computes them: PyTorch has no such norm ({left or 'none'})")
    reason = f"{len(found)} RMS norms run as PyTorch's kernel where layers aren't compiled"
    return found, Decision("norms", True, f"{reason}; as before: {left}" if left else reason)


def norms_obstacle(device: Device) -> str | None:
    """Why norms as one kernel gain nothing on a device, or None."""
    return None if device.kind == "cuda" else f"one kernel saves launches of a card, and this is {device.in_words}"


def attach_norms(found: dict[nn.Module, Rounded]) -> Norms:
    """Override each norm's forward on the instance."""
    for module, rounded in found.items():
        vars(module)["forward"] = MethodType(_FORWARDS[rounded], module)
    return Norms(tuple(found))


def _rounded(module: Any) -> Rounded | None:
    """Where a norm's class rounds, if it is an RMS norm at all: tried on the CPU, with weights of our own."""
    epsilon = next((name for name in EPSILONS if isinstance(getattr(module, name, None), float)), None)
    takes = list(inspect.signature(type(module).forward).parameters)
    if isinstance(module, nn.RMSNorm):  # which is that kernel already
        return None
    weights = [p for p in module._parameters.values() if p is not None]
    if epsilon is None or len(takes) != 2 or [p.dim() for p in weights] != [1] or "weight" not in module._parameters:
        return None
    generator = torch.Generator().manual_seed(0)
    trial = copy.copy(module)
    width = module.weight.numel()
    x = torch.randn(TRIED, width, generator=generator, device="cpu").bfloat16()
    weight = (0.5 + torch.rand(width, generator=generator, device="cpu")).bfloat16()
    trial._parameters = {"weight": nn.Parameter(weight, requires_grad=False)}
    with torch.no_grad():
        expected = type(module).forward(trial, x)
        for rounded, ours in _FORWARDS.items():
            if (ours(trial, x) != expected).float().mean() <= ROUNDING:
                return rounded
    return None


def _first(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    if torch.compiler.is_compiling():
        return _own(self, hidden_states)
    out: torch.Tensor = self.weight * _one_kernel(hidden_states, None, _epsilon(self))
    return out


def _last(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    if torch.compiler.is_compiling():
        return _own(self, hidden_states)
    return _one_kernel(hidden_states, self.weight, _epsilon(self))


_FORWARDS: dict[Rounded, Callable[[Any, torch.Tensor], torch.Tensor]] = {"first": _first, "last": _last}


def _own(module: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = type(module).forward(module, hidden_states)
    return out


def _epsilon(module: Any) -> float:
    return next(float(getattr(module, name)) for name in EPSILONS if hasattr(module, name))


def _one_kernel(x: torch.Tensor, weight: torch.Tensor | None, epsilon: float) -> torch.Tensor:
    """PyTorch's norm over the last dimension; newer ones compute it in float32, and give that, under autocast."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        with torch.autocast(kind, enabled=False):
            return F.rms_norm(x, x.shape[-1:], weight, epsilon)
    return F.rms_norm(x, x.shape[-1:], weight, epsilon)
