"""Switching the recompute of decoder layers on and off, and putting the switches back.

Through transformers' own switch and checkpoint function, on the instance. Random state is kept only where a layer draws
random numbers: keeping it costs host time in every layer.
"""

import re
from collections.abc import Callable
from functools import cache
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.checkpoint import checkpoint

from slipstream.errors import InputError
from slipstream.memory.policy import ActivationsChoice

RANDOM = re.compile(r"drop|jitter|noise")
"""Settings of a model's config that make its layers draw random numbers in training."""
SWITCHES = ("gradient_checkpointing", "_gradient_checkpointing_func")
"""The attributes by which transformers' layers know whether and how to recompute."""
Switches = list[tuple[nn.Module, dict[str, Any]]]
"""Each module that has a switch, and its ``SWITCHES`` as they were."""


def checkpoints(base: nn.Module) -> bool:
    """Whether any layer of the model is switched to recompute."""
    return any(getattr(module, "gradient_checkpointing", False) for module in base.modules())


def set_checkpointing(base: Any, asked: ActivationsChoice, recompute: bool) -> Switches:
    """Switch checkpointing of the decoder layers; gives what to put back."""
    modules = [m for m in base.modules() if hasattr(m, "gradient_checkpointing")]
    before = [(m, {name: vars(m)[name] for name in SWITCHES if name in vars(m)}) for m in modules]
    if recompute and not modules:
        raise InputError(f"{type(base).__name__} has no layers that can be recomputed; set activations: keep")
    if recompute:
        base._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=_checkpoint_of(base))
    elif asked == "keep":
        for module in modules:
            module.gradient_checkpointing = False
    return before


def _checkpoint_of(base: Any) -> Callable[..., Any]:
    """Checkpointing that keeps random state only where a layer draws random numbers.

    Looked up once for each set of adapters, since peft may add dropout after ``apply``.
    """

    @cache
    def sources(adapters: tuple[str, ...]) -> tuple[bool, list[Any]]:
        settings = base.config.to_dict().items()
        named = any(RANDOM.search(k) and isinstance(v, int | float) and v > 0 for k, v in settings)
        return named, [m for m in base.modules() if isinstance(m, _DropoutNd)]

    def recompute(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        named, dropouts = sources(tuple(getattr(base, "peft_config", ())))
        draws = named or any(dropout.p > 0 for dropout in dropouts)
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=draws, **kwargs)

    return recompute


def restore_checkpointing(switches: Switches) -> None:
    """Put back what ``set_checkpointing`` gave."""
    for module, before in switches:
        for name in SWITCHES:
            vars(module).pop(name, None)
        vars(module).update(before)
