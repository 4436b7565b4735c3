"""Switching the recompute of decoder layers on and off, and putting the switches back.

Through transformers' own switch and checkpoint function, on the instance. Random state is kept only where a layer draws
random numbers: keeping it costs host time in every layer.
"""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from slipstream.errors import InputError
from slipstream.memory.policy import ActivationsChoice

RANDOM = re.compile(r"drop|jitter|noise")
"""Settings of a model's config that make its layers draw random numbers in training."""
SWITCHES = ("gradient_checkpointing", "_gradient_checkpointing_func")
"""The attributes by which transformers' layers know whether and how to recompute."""
ContextFn = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
"""What runs around each checkpointed layer: a context for its forward, and one for its recompute."""
Switches = list[tuple[nn.Module, dict[str, Any]]]
"""Each module that has a switch, and its ``SWITCHES`` as they were."""


def checkpoints(base: nn.Module) -> bool:
    """Whether any layer of the model is switched to recompute."""
    return any(getattr(module, "gradient_checkpointing", False) for module in base.modules())


def set_checkpointing(
    base: Any, asked: ActivationsChoice, recompute: bool, context_fn: ContextFn | None = None
) -> Switches:
    """Switch checkpointing of the decoder layers; gives what to put back.

    ``context_fn`` goes to every layer's checkpoint (what another stage needs to keep from forward to recompute).
    """
    modules = [m for m in base.modules() if hasattr(m, "gradient_checkpointing")]
    before = [(m, {name: vars(m)[name] for name in SWITCHES if name in vars(m)}) for m in modules]
    if recompute and not modules:
        raise InputError(f"{type(base).__name__} has no layers that can be recomputed; set activations: keep")
    if recompute:
        base._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=_checkpoint_of(base, context_fn))
    elif asked == "keep":
        for module in modules:
            module.gradient_checkpointing = False
    return before


def _checkpoint_of(base: Any, context_fn: ContextFn | None) -> Callable[..., Any]:
    """Checkpointing that keeps random state only where a layer draws random numbers.

    Looked up once for each set of adapters, since peft may add dropout after ``apply``.
    """

    @cache
    def sources(adapters: tuple[str, ...]) -> tuple[bool, list[Any]]:
        settings = base.config.to_dict().items()
        named = any(RANDOM.search(k) and isinstance(v, int | float) and v > 0 for k, v in settings)
        return named, [m for m in base.modules() if isinstance(m, _DropoutNd)]

    def recompute(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        contexts: dict[str, Any] = {} if context_fn is None else {"context_fn": context_fn}
        if context_fn is not None and torch.compiler.is_compiling():  # the compiler takes no context of anyone's own
            contexts = {"context_fn": partial(create_selective_checkpoint_contexts, keep_choices)}
        named, dropouts = sources(tuple(getattr(base, "peft_config", ())))
        draws = named or any(dropout.p > 0 for dropout in dropouts)
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=draws, **contexts, **kwargs)

    return recompute


def keep_choices(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """What a layer keeps that is recomputed inside a compiled graph: nothing but the experts it chose."""
    return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.topk.default else CheckpointPolicy.PREFER_RECOMPUTE


def restore_checkpointing(switches: Switches) -> None:
    """Put back what ``set_checkpointing`` gave."""
    for module, before in switches:
        for name in SWITCHES:
            vars(module).pop(name, None)
        vars(module).update(before)
