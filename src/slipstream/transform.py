"""Apply what fits this model and device to one model instance, and undo it.

Everything hangs on one ``Applied`` object on the instance (the base model below peft, if peft wraps it): the attention
choice in its config, forward hooks, the checkpointing switch. No class is patched and no source rewritten; ``restore``
leaves the model as it was.

The decoder's pre-hook puts ``segments`` on the input's device and stops transformers from looking for packed sequences
itself (with a 4-D placeholder for the mask: with ``None`` it compares position ids on the device and waits for the
answer). The post-hook counts at the first packed forward that every attention module did read the boundaries; it is on
the outer model too, since some models keep unknown arguments from their decoder. A model that drops the boundaries on
the way would train with documents that see each other, without an error: it is refused instead. A model that can't be
trained packed keeps its own attention, so that unpacked training is exactly its own.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from slipstream.cost.hardware import Device, describe
from slipstream.decision import Decision
from slipstream.device.segments import Segments
from slipstream.errors import InputError
from slipstream.memory.policy import ActivationsChoice, choose_activations
from slipstream.model.attention import (
    AttentionChoice,
    Needs,
    attention_key,
    choose_attention,
    mask_placeholder,
    register_attention,
)

Model = TypeVar("Model", bound=nn.Module)
ATTRIBUTE = "_slipstream"
RECURRENT = re.compile(
    r"Mamba|SSM|GatedDelta|DeltaNet|ShortConv|RWKV|Rwkv|Recurrent|LinearAttention|LightningAttention"
)
RANDOM = re.compile(r"drop|jitter|noise")
"""Settings of a model's config that make its layers draw random numbers in training."""
SWITCHES = ("gradient_checkpointing", "_gradient_checkpointing_func")
"""The attributes by which transformers' layers know whether and how to recompute."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What ``apply`` is asked for; each ``"auto"`` or a named choice."""

    attention: AttentionChoice = "auto"
    """``varlen``, ``flex``, ``xformers`` or ``sdpa``."""
    activations: ActivationsChoice = "auto"
    """``keep`` or ``recompute``."""
    tokens: int | None = None
    """Tokens in a batch, from which ``activations: auto`` predicts memory; without it activations are kept."""
    compute_dtype: torch.dtype | None = None
    """The dtype that layers compute in, where autocast makes it differ from the weights'."""


@dataclass
class Applied:
    """What hangs on a model after ``apply``, and what ``restore`` needs."""

    decisions: list[Decision]
    attention: str | None
    """The key under which our attention is registered; None where the model's own was left."""
    previous_attention: str
    longest: int | None
    """The longest document for which rotary positions don't depend on the others of its row; None where they never do."""
    checkpointing: list[tuple[nn.Module, dict[str, Any]]] = field(default_factory=list)
    """Each module that has a switch, and its ``SWITCHES`` as they were."""
    hooks: list[RemovableHandle] = field(default_factory=list)
    segments_checked: bool = False


def apply(model: Model, options: Options | None = None) -> Model:
    """Apply everything that fits this model and device, in place, and return the model.

    ``model``: a Hugging Face causal language model, before or after peft wraps it. Applying again with other options
    undoes the first call. Raises ``InputError`` when a named choice can't be honoured.
    """
    options = options or Options()
    restore(model)
    base = base_model(model)
    device = describe(next(base.parameters()).device)
    packing = packing_decision(base)
    key, attention = _attention(options, base, device, packing)
    recompute, memory = choose_activations(options.activations, base.config, device, options.tokens)
    if options.activations == "auto" and _checkpoints(base):
        recompute, memory = False, Decision("recompute", True, "the model was given with checkpointing switched on")
    longest = _longest_independent(base.config.get_text_config())
    applied = Applied([attention, memory, packing], key, base.config._attn_implementation, longest)
    applied.checkpointing = _set_checkpointing(base, options.activations, recompute)
    if key is not None:
        register_attention()
        base.set_attn_implementation(key)
    applied.hooks = _hook(applied, model, base)
    setattr(base, ATTRIBUTE, applied)
    return model


def restore(model: Model) -> Model:
    """Undo ``apply`` completely and return the model; a model without it is left alone."""
    base = base_model(model)
    applied: Applied | None = getattr(base, ATTRIBUTE, None)
    if applied is None:
        return model
    for hook in applied.hooks:
        hook.remove()
    if applied.attention is not None:
        base.set_attn_implementation(applied.previous_attention)
    for module, switches in applied.checkpointing:
        for name in SWITCHES:
            vars(module).pop(name, None)
        vars(module).update(switches)
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
    """Whether this model may be trained packed, as far as can be told before its first forward.

    Not with recurrent layers, whose state would cross documents, nor where attention can't be exchanged for ours.
    """
    base = base_model(model)
    recurrent = sorted(
        {type(m).__name__ for m in base.modules() if isinstance(m, nn.Conv1d) or RECURRENT.search(type(m).__name__)}
    )
    obstacle = None
    if recurrent:
        obstacle = f"layers that carry state across documents ({', '.join(recurrent[:3])})"
    elif not base._can_set_attn_implementation():
        obstacle = "its attention can't be chosen through transformers' AttentionInterface"
    elif not base._supports_sdpa and not (Needs.of(base).sinks or Needs.of(base).softcap):
        obstacle = "its attention does more than scaled dot products (a bias of its own)"
    if obstacle is not None:
        return Decision("packing", False, f"{obstacle}; set packing.enabled: false")
    return Decision("packing", True, "boundaries built once a batch; every attention module is checked to read them")


def _attention(options: Options, base: Any, device: Device, packing: Decision) -> tuple[str | None, Decision]:
    """The key of the attention to set, or None to leave the model's own, and the decision."""
    if packing.on:
        dtype = options.compute_dtype or base.dtype
        needs = Needs.of(base)
        choice, decision = choose_attention(options.attention, needs, device, dtype)
        return attention_key(choice, needs), decision
    if options.attention != "auto":
        raise InputError(
            f"attention {options.attention}: not for a model that can't be trained packed: {packing.reason}"
        )
    return None, Decision("attention", False, "left as it was, because this model can't be trained packed")


def _longest_independent(config: Any) -> int | None:
    """The length beyond which ``dynamic`` and ``longrope`` positions take other frequencies, for the whole row."""
    rope = getattr(config, "rope_parameters", None) or {}
    each = [part for part in rope.values() if isinstance(part, dict)] or [rope]
    return min(
        (
            int(part.get("original_max_position_embeddings") or config.max_position_embeddings)
            for part in each
            if part.get("rope_type") in ("dynamic", "longrope")
        ),
        default=None,
    )


def _hook(applied: Applied, model: nn.Module, base: Any) -> list[RemovableHandle]:
    """Hooks on the decoder, which all calls reach, and on the models around it, which may keep segments from it."""
    decoder = base.get_decoder()
    hooks = [decoder.register_forward_pre_hook(partial(_enter, applied), with_kwargs=True)]
    for module in dict.fromkeys((decoder, base, model)):
        hooks.append(
            module.register_forward_pre_hook(partial(_refuse_packing, applied), with_kwargs=True, prepend=True)
        )
        hooks.append(module.register_forward_hook(partial(_leave, applied, decoder), with_kwargs=True))
    return hooks


def _refuse_packing(applied: Applied, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if kwargs.get("segments") is None:
        return
    if kwargs.get("attention_mask") is not None:
        raise InputError(
            f"attention_mask of shape {list(kwargs['attention_mask'].shape)} beside segments: a mask would make the "
            f"boundaries ambiguous; give one of them (PackedCollator makes no mask)"
        )
    for decision in applied.decisions:
        if decision.name == "packing" and not decision.on:
            raise InputError(f"this model can't be trained packed: {decision.reason}")


def _enter(
    applied: Applied, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    segments: Segments | None = kwargs.get("segments")
    if segments is None:
        return None
    config: Any = decoder.config
    if config._attn_implementation != applied.attention:
        raise InputError(
            f"attention was set to {config._attn_implementation} after apply, which would let documents see each "
            f"other; apply again, or restore(model) and train without segments"
        )
    tokens = args[0] if args else kwargs.get("input_ids")
    tokens = kwargs.get("inputs_embeds") if tokens is None else tokens
    if tokens is None or tuple(tokens.shape[:2]) != (1, segments.total):
        shape = None if tokens is None else list(tokens.shape)
        raise InputError(
            f"segments hold {segments.total:,} tokens, but the batch has shape {shape}; "
            f"it must be [1, {segments.total}]"
        )
    if applied.longest is not None and max(segments.lengths) > applied.longest:
        raise InputError(
            f"a document of {max(segments.lengths):,} tokens > {applied.longest:,}: this model's rotary positions "
            f"scale with the longest document of a row; set max_length to {applied.longest} or packing.enabled: false"
        )
    segments = segments.on(tokens.device)
    kwargs = dict(kwargs, segments=segments, use_cache=False, attention_mask=mask_placeholder(tokens.device))
    if kwargs.get("position_ids") is None:
        kwargs["position_ids"] = segments.position_ids()
    return args, kwargs


def _leave(
    applied: Applied, decoder: Any, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> None:
    segments: Segments | None = kwargs.get("segments")
    if segments is None or applied.segments_checked:
        return
    reading = {id(m) for m in decoder.modules()} & segments.readers
    expected = {id(m): name for name, m in decoder.named_modules() if type(m).__name__.endswith("Attention")}
    deaf = [name for key, name in expected.items() if key not in reading]
    layers = getattr(decoder.config, "num_hidden_layers", len(expected))
    if deaf or len(reading) < layers:
        raise InputError(
            f"{type(decoder).__name__} does not hand segments to its attention ({len(reading)} of "
            f"{max(len(expected), layers)} modules read them; not {', '.join(deaf[:3]) or 'all layers'}): documents "
            f"would see each other; set packing.enabled: false"
        )
    applied.segments_checked = True


def _checkpoints(base: nn.Module) -> bool:
    return any(getattr(module, "gradient_checkpointing", False) for module in base.modules())


def _set_checkpointing(base: Any, asked: ActivationsChoice, recompute: bool) -> list[tuple[nn.Module, dict[str, Any]]]:
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
