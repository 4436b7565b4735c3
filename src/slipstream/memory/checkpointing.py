"""Switching layers to keep, recompute or offload, holding them to it, and putting the switches back.

Through transformers' own switch and checkpoint function, on the instance. Random state is kept only where a layer draws
random numbers: keeping it costs host time in every layer. Libraries switch checkpointing on themselves (TRL does by
default), which would silently replace the functions set here; what was set is therefore looked at before each training
forward and put back, with a ``Decision``. Refusing to run instead would break trainers that are otherwise fine.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.hooks import RemovableHandle
from transformers.modeling_layers import GradientCheckpointingLayer

from slipstream.cost.offload import Split
from slipstream.cost.settings import draws_by_itself, draws_random
from slipstream.decision import Decision
from slipstream.errors import InputError
from slipstream.memory.offload import ContextFn, Offload

SWITCHES = ("gradient_checkpointing", "_gradient_checkpointing_func")
"""The attributes by which transformers' layers know whether and how to recompute."""
CHOOSING = ("aten.topk.default", "slipstream.choose.default")
"""Operators whose result a recompute must not find again by itself: which experts a token goes to."""
Switches = list[tuple[nn.Module, dict[str, Any]]]
"""Each module that has a switch, and its own ``SWITCHES`` at one moment."""


def checkpoints(base: nn.Module) -> bool:
    """Whether any layer of the model is switched to recompute."""
    return any(getattr(module, "gradient_checkpointing", False) for module in base.modules())


def checkpoint_layers(base: Any) -> list[nn.Module]:
    """The decoder's layers that can each be treated in their own way, in the model's order; few models have none.

    Those of a vision or audio part beside the decoder don't count: text doesn't pass through them.
    """
    return [m for m in base.get_decoder().modules() if isinstance(m, GradientCheckpointingLayer)]


@dataclass(eq=False)
class Checkpointing:
    """What ``set_checkpointing`` did to one model, and what undoes it."""

    before: Switches
    wanted: Switches
    decide: Callable[[Decision], None]
    offload: Offload | None
    hooks: list[RemovableHandle] = field(default_factory=list)

    def hold_to_it(self, decoder: nn.Module, args: tuple[Any, ...]) -> None:
        """Before a training forward: put back what somebody else has switched since."""
        if not (decoder.training and torch.is_grad_enabled()):
            return
        changed = [(m, own) for m, own in self.wanted if any(vars(m).get(n) is not own.get(n) for n in SWITCHES)]
        if changed:
            self.put()
            reason = (
                f"checkpointing of {len(changed)} modules was switched by somebody else (some trainers call "
                f"gradient_checkpointing_enable); what apply had chosen was put back. To have it otherwise, apply "
                f"again with other activations, or restore"
            )
            self.decide(Decision("checkpointing", True, reason))

    def release_graphs(self) -> None:
        """Have back the host memory that captured graphs name; none of them may be replayed afterwards."""
        if self.offload is not None:
            self.offload.pool.release_graphs()

    def put(self) -> None:
        """Switch the layers as they were switched by ``set_checkpointing``."""
        _put_back(self.wanted)


def set_checkpointing(
    base: Any,
    split: Split | None,
    *,
    decide: Callable[[Decision], None],
    offload: Offload | None = None,
    context_fn: ContextFn | None = None,
) -> Checkpointing:
    """Treat the decoder layers as ``split`` says (None: as they are treated already), and give what undoes it.

    ``context_fn``: contexts for a layer's forward and its recompute, as ``torch.utils.checkpoint`` takes them.
    ``decide`` is told when somebody else's switch was put back. Raises ``InputError`` for a model without switches.
    """
    modules = [m for m in base.modules() if hasattr(m, "gradient_checkpointing")]
    before = _own_switches(modules)
    if split is not None and split.kept < split.layers:
        check_recomputes(base)
        _recompute(base, split, offload, context_fn)
    elif split is not None and checkpoints(base):
        for module in modules:
            module.gradient_checkpointing = False
    made = Checkpointing(before, _own_switches(modules), decide, offload)
    made.hooks.append(base.get_decoder().register_forward_pre_hook(made.hold_to_it))
    return made


def check_recomputes(base: nn.Module) -> None:
    """Raises ``InputError`` for a model whose layers have no switch; weights may be meta tensors."""
    if not any(hasattr(module, "gradient_checkpointing") for module in base.modules()):
        raise InputError(f"{type(base).__name__} has no layers that can be recomputed; set activations: keep")


def restore_checkpointing(made: Checkpointing) -> None:
    """Undo ``set_checkpointing`` and give back the host memory it took."""
    for hook in made.hooks:
        hook.remove()
    _put_back(made.before)
    if made.offload is not None:
        made.offload.pool.close()


def _recompute(base: Any, split: Split, offload: Offload | None, context_fn: ContextFn | None) -> None:
    draws = _draws(base)
    plain = _plain_checkpoint(draws, context_fn)
    base._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=plain)
    layers: list[Any] = checkpoint_layers(base)
    if not layers:
        assert split.recomputed == split.layers
        return
    assert len(layers) == split.layers
    for index, layer in enumerate(layers):
        if index >= split.layers - split.kept:
            layer.gradient_checkpointing = False
        elif offload is not None:
            leaves = index < split.offloaded
            layer._gradient_checkpointing_func = offload.checkpoint_function(
                index, leaves=leaves, draws=draws, context_fn=context_fn
            )


def _plain_checkpoint(draws: Callable[[], bool], context_fn: ContextFn | None) -> Callable[..., Any]:
    """PyTorch's checkpoint, with random state only where it is needed."""
    own: dict[str, Any] = {} if context_fn is None else {"context_fn": context_fn}
    compiled = {"context_fn": partial(create_selective_checkpoint_contexts, keep_choices)} if own else {}

    def recompute(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        contexts = compiled if torch.compiler.is_compiling() else own  # the compiler takes no context of anyone's own
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=draws(), **contexts, **kwargs)

    return recompute


def _draws(base: Any) -> Callable[[], bool]:
    """Tells whether a layer draws random numbers; asked anew for each set of adapters, since peft may add dropout."""

    @cache
    def sources(adapters: tuple[str, ...]) -> tuple[bool, list[Any]]:
        return _random_settings(base), [m for m in base.modules() if isinstance(m, _DropoutNd)]

    def draws() -> bool:
        named, dropouts = sources(tuple(getattr(base, "peft_config", ())))
        return named or any(dropout.p > 0 for dropout in dropouts)

    return draws


def _random_settings(base: Any) -> bool:
    """Whether a number that asks for random draws stands anywhere in the config, or on a module that has taken it over:
    functional dropout leaves no module to be found.

    Parts of the model that aren't recomputed are looked at too: keeping random state in vain costs little.
    """
    return draws_random(base.config.to_dict()) or any(draws_by_itself(m) for m in base.modules())


def keep_choices(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """What a layer keeps that is recomputed inside a compiled graph: nothing but the experts it chose."""
    return CheckpointPolicy.MUST_SAVE if str(op) in CHOOSING else CheckpointPolicy.PREFER_RECOMPUTE


def _own_switches(modules: list[nn.Module]) -> Switches:
    return [(m, {name: vars(m)[name] for name in SWITCHES if name in vars(m)}) for m in modules]


def _put_back(switches: Switches) -> None:
    for module, own in switches:
        for name in SWITCHES:
            vars(module).pop(name, None)
        vars(module).update(own)
