"""Apply what fits this model and device to one model instance, and undo it.

Everything hangs on one ``Applied`` object on the instance (the base model below peft, if peft wraps it): the attention
choice in its config, the hooks of its packed forward, its experts, the checkpointing switch. No class is patched and no
source rewritten; ``restore`` leaves the model as it was. A model that can't be trained packed keeps its own attention,
so that unpacked training is exactly its own.
"""

import re
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn

from slipstream.cost.hardware import Device, describe
from slipstream.decision import Decision
from slipstream.errors import InputError
from slipstream.memory.checkpointing import Switches, checkpoints, restore_checkpointing, set_checkpointing
from slipstream.memory.policy import ActivationsChoice, choose_activations
from slipstream.model.attention import AttentionChoice, Needs, attention_key, choose_attention, register_attention
from slipstream.model.carrier import Carrier, find_carrier
from slipstream.model.experts_choice import AppliedExperts, ExpertsChoice, choose_experts
from slipstream.model.packed_forward import PackedForward

Model = TypeVar("Model", bound=nn.Module)
ATTRIBUTE = "_slipstream"
RECURRENT = re.compile(
    r"Mamba|SSM|GatedDelta|DeltaNet|ShortConv|RWKV|Rwkv|Recurrent|LinearAttention|LightningAttention"
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What ``apply`` is asked for; each ``"auto"`` or a named choice."""

    attention: AttentionChoice = "auto"
    """``varlen``, ``flex``, ``xformers`` or ``sdpa``."""
    activations: ActivationsChoice = "auto"
    """``keep`` or ``recompute``."""
    experts: ExpertsChoice = "auto"
    """``grouped`` or ``loop``."""
    tokens: int | None = None
    """Tokens in a batch, from which ``activations: auto`` predicts memory; without it activations are kept."""
    compute_dtype: torch.dtype | None = None
    """The dtype that layers compute in, where autocast makes it differ from the weights'."""


@dataclass(frozen=True)
class Applied:
    """What hangs on a model after ``apply``, and what ``restore`` needs."""

    decisions: tuple[Decision, ...]
    previous_attention: str
    forward: PackedForward
    checkpointing: Switches
    experts: AppliedExperts | None


def apply(model: Model, options: Options | None = None) -> Model:
    """Apply everything that fits this model and device, in place, and return the model.

    ``model``: a Hugging Face causal language model, before or after peft wraps it. Applying again with other options
    undoes the first call. Raises ``InputError`` when a named choice can't be honoured.
    """
    options = options or Options()
    restore(model)
    base = base_model(model)
    device = describe(next(base.parameters()).device)
    packing, carrier = _packing(base)
    key, attention = _attention(options, base, device, packing, carrier)
    experts_choice, experts = choose_experts(options.experts, base, device, options.compute_dtype or base.dtype)
    recompute, memory = choose_activations(options.activations, base.config, device, options.tokens)
    if options.activations == "auto" and checkpoints(base):
        recompute, memory = False, Decision("recompute", True, "the model was given with checkpointing switched on")
    forward = PackedForward(packing, key, carrier)
    previous = base.config._attn_implementation
    mixture = AppliedExperts.to(base, experts_choice) if experts_choice else None
    kept = mixture.kept.contexts if mixture else None  # the forward's routing, for the recompute
    switches = set_checkpointing(base, options.activations, recompute, context_fn=kept)
    if key is not None:
        register_attention()
        base.set_attn_implementation(key)
    forward.attach(model, base)
    rotary = [_rotary_decision(forward)] if forward.rotary else []
    found = (attention, memory, packing, experts, *rotary)
    setattr(base, ATTRIBUTE, Applied(found, previous, forward, switches, mixture))
    return model


def restore(model: Model) -> Model:
    """Undo ``apply`` completely and return the model; a model without it is left alone."""
    base = base_model(model)
    applied: Applied | None = getattr(base, ATTRIBUTE, None)
    if applied is None:
        return model
    applied.forward.detach()
    if applied.forward.attention is not None:
        base.set_attn_implementation(applied.previous_attention)
    if applied.experts is not None:
        applied.experts.detach(base)
    restore_checkpointing(applied.checkpointing)
    delattr(base, ATTRIBUTE)
    return model


def decisions(model: nn.Module) -> list[Decision]:
    """What ``apply`` decided for this model, each with its reason; empty without ``apply``."""
    applied: Applied | None = getattr(base_model(model), ATTRIBUTE, None)
    return [] if applied is None else list(applied.decisions)


def base_model(model: nn.Module) -> Any:
    """The Hugging Face model below wrappers: peft's, DistributedDataParallel's, torch.compile's."""
    inner: Any = model
    while True:
        if isinstance(getattr(inner, "_orig_mod", None), nn.Module):
            inner = inner._orig_mod
        elif hasattr(inner, "get_base_model"):
            inner = inner.get_base_model()
        elif isinstance(getattr(inner, "module", None), nn.Module) and not hasattr(inner, "set_attn_implementation"):
            inner = inner.module
        else:
            break
    if not hasattr(inner, "set_attn_implementation") or not hasattr(inner, "get_decoder"):
        raise InputError(f"{type(inner).__name__} is not a Hugging Face causal language model, which apply needs")
    return inner


def packing_decision(model: nn.Module) -> Decision:
    """Whether this model can be trained packed: not with layers that carry state across documents, nor where
    boundaries don't reach every attention module.
    """
    base = base_model(model)
    applied: Applied | None = getattr(base, ATTRIBUTE, None)
    return _packing(base)[0] if applied is None else applied.forward.packing


def _packing(base: Any) -> tuple[Decision, Carrier | None]:
    obstacle, carrier = _obstacle(base), None
    if obstacle is None:
        carrier, reason = find_carrier(base)
        obstacle = None if carrier else reason
    if obstacle is not None:
        return Decision("packing", False, f"{obstacle}; set packing.enabled: false"), None
    return Decision("packing", True, f"boundaries are built once a batch; {reason}"), carrier


def _obstacle(base: Any) -> str | None:
    """What can be told against packing without a forward."""
    recurrent = {
        type(m).__name__ for m in base.modules() if isinstance(m, nn.Conv1d) or RECURRENT.search(type(m).__name__)
    }
    if recurrent:
        return f"layers that carry state across documents ({', '.join(sorted(recurrent)[:3])})"
    if not base._can_set_attn_implementation():
        return "its attention can't be chosen through transformers' AttentionInterface"
    needs = Needs.of(base)
    if not base._supports_sdpa and not (needs.sinks or needs.softcap):
        return "its attention does more than scaled dot products (a bias of its own)"
    return None


def _attention(
    options: Options, base: Any, device: Device, packing: Decision, carrier: Carrier | None
) -> tuple[str | None, Decision]:
    """The key of the attention to set, or None to leave the model's own, and the decision."""
    if packing.on:
        dtype = options.compute_dtype or base.dtype
        needs = replace(Needs.of(base), mask_only=carrier == "mask")
        choice, decision = choose_attention(options.attention, needs, device, dtype)
        return attention_key(choice, needs), decision
    if options.attention != "auto":
        raise InputError(
            f"attention {options.attention}: not for a model that can't be trained packed: {packing.reason}"
        )
    return None, Decision("attention", False, "left as it was, because this model can't be trained packed")


def _rotary_decision(forward: PackedForward) -> Decision:
    kinds = sorted({type(module).__name__ for module in forward.rotary})
    return Decision(
        "rotary", True, f"positions of {', '.join(kinds)} are scaled by each document's length, not the row's"
    )
