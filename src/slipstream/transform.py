"""Apply what fits this model and device to one model instance, and undo it.

Everything hangs on one ``Applied`` object on the instance (the base model below peft, if peft wraps it): the attention
choice in its config, two forward hooks on its decoder, the checkpointing switch. No class is patched and no source
rewritten; ``restore`` leaves the model as it was.

The pre-hook puts ``segments`` on the input's device, stops transformers from looking for packed sequences itself (an
empty 4-D mask: with ``None`` it compares position ids on the device and waits for the answer), and the post-hook
counts at the first packed forward that every attention module did read the boundaries. A model that drops them on the
way would train with documents that see each other, without an error: it is refused instead.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from slipstream.cost.hardware import Device, describe
from slipstream.decision import Decision
from slipstream.device.segments import Segments
from slipstream.errors import InputError
from slipstream.memory.policy import ActivationsChoice, choose_activations
from slipstream.model.attention import AttentionChoice, attention_key, choose_attention, register_attention

Model = TypeVar("Model", bound=nn.Module)
ATTRIBUTE = "_slipstream"
RECURRENT = re.compile(
    r"Mamba|SSM|GatedDelta|DeltaNet|ShortConv|RWKV|Rwkv|Recurrent|LinearAttention|LightningAttention"
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What ``apply`` is asked for; each ``"auto"`` or a named choice."""

    attention: AttentionChoice = "auto"
    """``varlen`` or ``sdpa``."""
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
    previous_attention: str
    checkpointing: list[tuple[nn.Module, bool, Any]] = field(default_factory=list)
    hooks: list[RemovableHandle] = field(default_factory=list)
    segments_checked: bool = False


def apply(model: Model, options: Options | None = None) -> Model:
    """Apply everything that fits this model and device, in place, and return the model.

    ``model``: a Hugging Face causal language model, before or after peft wraps it. Applying again with other options
    undoes the first call. Raises ``InputError`` when a named choice can't be honoured.
    """
    options = options or Options()
    base = base_model(model)
    if hasattr(base, ATTRIBUTE):
        restore(model)
    device = describe(next(base.parameters()).device)
    dtype = options.compute_dtype or base.dtype
    attention, attention_decision = choose_attention(options.attention, base.config, device, dtype)
    recompute, memory_decision = choose_activations(options.activations, base.config, device, options.tokens)
    decisions = [attention_decision, memory_decision, packing_decision(base)]
    applied = Applied(decisions, base.config._attn_implementation)
    register_attention()
    base.set_attn_implementation(attention_key(attention))
    decoder = base.get_decoder()
    applied.hooks = [
        decoder.register_forward_pre_hook(partial(_enter, applied), with_kwargs=True),
        decoder.register_forward_hook(partial(_leave, applied), with_kwargs=True),
    ]
    applied.checkpointing = _set_checkpointing(base, recompute)
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
    base.set_attn_implementation(applied.previous_attention)
    for module, flag, function in applied.checkpointing:
        module.gradient_checkpointing = flag
        if function is None:
            vars(module).pop("_gradient_checkpointing_func", None)
        else:
            module._gradient_checkpointing_func = function
    delattr(base, ATTRIBUTE)
    return model


def decisions(model: nn.Module) -> list[Decision]:
    """What ``apply`` decided for this model, each with its reason; empty without ``apply``."""
    applied: Applied | None = getattr(base_model(model), ATTRIBUTE, None)
    return [] if applied is None else list(applied.decisions)


def base_model(model: nn.Module) -> Any:
    """The Hugging Face model below wrappers: peft's, DistributedDataParallel's, torch.compile's."""
    while True:
        if hasattr(model, "get_base_model"):
            model = model.get_base_model()
        elif isinstance(getattr(model, "module", None), nn.Module) and not hasattr(model, "set_attn_implementation"):
            model = model.module
        else:
            break
    if not hasattr(model, "set_attn_implementation") or not hasattr(model, "get_decoder"):
        raise InputError(f"{type(model).__name__} is not a Hugging Face causal language model, which apply needs")
    return model


def packing_decision(model: nn.Module) -> Decision:
    """Whether this model may be trained packed: not with recurrent layers, whose state would cross documents."""
    base = base_model(model)
    recurrent = sorted(
        {type(m).__name__ for m in base.modules() if isinstance(m, nn.Conv1d) or RECURRENT.search(type(m).__name__)}
    )
    if recurrent:
        reason = f"layers that carry state across documents ({', '.join(recurrent)}); set packing.enabled: false"
        return Decision("packing", False, reason)
    return Decision("packing", True, "boundaries built once a batch; every attention module is checked to read them")


def _enter(
    applied: Applied, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    segments: Segments | None = kwargs.get("segments")
    if segments is None:
        return None
    _refuse_packing(applied, kwargs)
    tokens = args[0] if args else kwargs.get("input_ids")
    tokens = kwargs.get("inputs_embeds") if tokens is None else tokens
    if tokens is None or tuple(tokens.shape[:2]) != (1, segments.total):
        shape = None if tokens is None else list(tokens.shape)
        raise InputError(
            f"segments hold {segments.total:,} tokens, but the batch has shape {shape}; it must be [1, {segments.total}]"
        )
    segments = segments.on(tokens.device)
    kwargs = dict(kwargs, segments=segments, use_cache=False)
    kwargs["attention_mask"] = torch.empty((1, 1, 0, 0), device=tokens.device)
    if kwargs.get("position_ids") is None:
        kwargs["position_ids"] = segments.position_ids()
    return args, kwargs


def _refuse_packing(applied: Applied, kwargs: dict[str, Any]) -> None:
    if kwargs.get("attention_mask") is not None:
        raise InputError(
            f"attention_mask of shape {list(kwargs['attention_mask'].shape)} beside segments: a mask would make the "
            f"boundaries ambiguous; give one of them (PackedCollator makes no mask)"
        )
    for decision in applied.decisions:
        if decision.name == "packing" and not decision.on:
            raise InputError(f"this model can't be trained packed: {decision.reason}")


def _leave(applied: Applied, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    segments: Segments | None = kwargs.get("segments")
    if segments is None or applied.segments_checked:
        return
    expected = {id(m): name for name, m in decoder.named_modules() if type(m).__name__.endswith("Attention")}
    deaf = [name for key, name in expected.items() if key not in segments.readers]
    layers = getattr(decoder.config, "num_hidden_layers", len(expected))
    if deaf or len(segments.readers) < layers:
        raise InputError(
            f"{type(decoder).__name__} does not hand segments to its attention ({len(segments.readers)} of "
            f"{max(len(expected), layers)} modules read them; not {', '.join(deaf[:3]) or 'all layers'}): documents "
            f"would see each other; set packing.enabled: false"
        )
    applied.segments_checked = True


def _set_checkpointing(base: Any, recompute: bool) -> list[tuple[nn.Module, bool, Any]]:
    """Switch checkpointing of the decoder layers; gives what to put back."""
    modules = [m for m in base.modules() if hasattr(m, "gradient_checkpointing")]
    before = [(m, m.gradient_checkpointing, vars(m).get("_gradient_checkpointing_func")) for m in modules]
    if recompute:
        base._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=_checkpoint_of(base))
    return before


def _checkpoint_of(base: nn.Module) -> Callable[..., Any]:
    """Checkpointing that keeps random state only where a layer draws numbers (known at the first call, after peft)."""
    keeps_random_state = cache(partial(_has_dropout, base))

    def recompute(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=keeps_random_state(), **kwargs)

    return recompute


def _has_dropout(base: nn.Module) -> bool:
    """Whether a layer draws random numbers, so that its recompute must draw the same ones."""
    if any(isinstance(m, nn.Dropout) and m.p > 0 for m in base.modules()):
        return True
    config: Any = base.config
    return any(value for key, value in config.to_dict().items() if "dropout" in key and isinstance(value, float))
