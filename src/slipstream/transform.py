"""Apply what fits this model and device to one model instance, and undo it.

Everything hangs on one ``Applied`` object on the instance (the base model below peft, if peft wraps it): the attention
choice in its config, the hooks of its packed forward, its experts, the layers' checkpoint functions. No class is
patched and no source rewritten; ``restore`` leaves the model as it was. A model that can't be trained packed keeps its
own attention, so that unpacked training is exactly its own.
"""

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, TypeVar, get_type_hints

import torch
from annotated_types import Ge, Le
from torch import nn

from slipstream.cost.hardware import Device, describe
from slipstream.cost.job import BYTES, Job
from slipstream.cost.offload import Split
from slipstream.cost.shape import ModelShape
from slipstream.cost.tiles import TilesChoice
from slipstream.data.packing import MOST_TOKENS
from slipstream.decision import Decision
from slipstream.errors import InputError
from slipstream.memory.checkpointing import (
    Checkpointing,
    checkpoint_layers,
    checkpoints,
    restore_checkpointing,
    set_checkpointing,
)
from slipstream.memory.host_budget import HostBudget, host_budget
from slipstream.memory.offload import ContextFn, Offload
from slipstream.memory.policy import (
    ActivationsChoice,
    BuffersChoice,
    Chosen,
    HostLimit,
    Situation,
    choose_activations,
)
from slipstream.model.attention import AttentionChoice, Needs, attention_key, choose_attention, register_attention
from slipstream.model.carrier import Carrier, find_carrier
from slipstream.model.experts_choice import AppliedExperts, ExpertsChoice, choose_experts
from slipstream.model.norms import Norms, NormsChoice, attach_norms, choose_norms
from slipstream.model.packed_forward import PackedForward
from slipstream.model.tiled_mlp import TiledMLP, tile_mlps
from slipstream.values import checked

logger = logging.getLogger(__name__)
Model = TypeVar("Model", bound=nn.Module)
ATTRIBUTE = "_slipstream"
COMPUTE = tuple(getattr(torch, name) for name in BYTES)
"""The dtypes that layers may compute in."""
ASSUMED_RANK = 16
"""Of adapters that are yet to come."""
RECURRENT = re.compile(
    r"Mamba|SSM|GatedDelta|DeltaNet|ShortConv|RWKV|Rwkv|Recurrent|LinearAttention|LightningAttention"
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What ``apply`` is asked for; each ``"auto"`` or a named choice.

    Constructing one checks each field by its annotation; ``InputError`` lists all values that don't fit.
    """

    attention: AttentionChoice = "auto"
    """``varlen``, ``flex``, ``xformers`` or ``sdpa``."""
    activations: ActivationsChoice = "auto"
    """``keep``, ``recompute`` or ``offload``."""
    buffers: BuffersChoice = "auto"
    """Device buffers for reloading offloaded activations; one reloads a layer's input only when it is needed."""
    host_limit: HostLimit = None
    """GiB of a machine's host memory that offloaded activations may take, in equal parts for its processes, and never
    more than is free; without it, 80% of what is free."""
    tiles: TilesChoice = "auto"
    """``auto``, ``none``, or tokens: how much of a row an MLP computes at a time."""
    experts: ExpertsChoice = "auto"
    """``grouped`` or ``loop``."""
    norms: NormsChoice = "auto"
    """``auto``: RMS norms as one kernel where layers aren't compiled, on a card; ``model``: as the model's file has
    them."""
    tokens: Annotated[int, Ge(1), Le(MOST_TOKENS)] | None = None
    """Tokens in a batch, from which ``activations: auto`` predicts memory; without it activations are kept."""
    compute_dtype: torch.dtype | None = None
    """The dtype that layers compute in, where autocast makes it differ from the weights'."""

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self), include_extras=True)
        named = [item.name for item in fields(self) if item.name != "compute_dtype"]
        problems = [p for name in named for p in checked(f"Options.{name}", getattr(self, name), hints[name])[1]]
        if self.compute_dtype not in (None, *COMPUTE):
            known = ", ".join(map(str, COMPUTE))
            problems.append(f"Options.compute_dtype: {self.compute_dtype} does not fit; give one of {known}, or None")
        if problems:
            raise InputError("; ".join(problems))


@dataclass
class Later:
    """Keeps decisions taken after ``apply``, and tells them as they are taken."""

    decisions: list[Decision] = field(default_factory=list)
    listener: Callable[[Decision], None] | None = None

    def __call__(self, decision: Decision) -> None:
        """One more."""
        self.decisions.append(decision)
        if self.listener is None:
            logger.warning("%s", decision)
        else:
            self.listener(decision)


@dataclass(frozen=True)
class Applied:
    """What hangs on a model after ``apply``, and what ``restore`` needs."""

    decisions: tuple[Decision, ...]
    attention: str | None
    """The attention choice in place; None for the model's own."""
    previous_attention: str
    forward: PackedForward
    checkpointing: Checkpointing
    later: "Later"
    """What turned out otherwise since."""
    experts: AppliedExperts | None
    split: Split | None
    """How many layers are kept, recomputed and offloaded; None: whatever the model did already."""
    tiles: list[TiledMLP]
    """The MLPs that run in tiles."""
    norms: Norms


def apply(model: Model, options: Options | None = None) -> Model:
    """Apply everything that fits this model and device, in place, and return the model.

    ``model``: a Hugging Face causal language model, before or after peft wraps it. Applying again with other options
    undoes the first call. Raises ``InputError`` when a named choice can't be honoured, or ``options`` are none.
    """
    options = Options() if options is None else options
    if not isinstance(options, Options):
        raise InputError(f"options {options!r}: apply takes slipstream.Options(...), e.g. Options(attention='varlen')")
    restore(model)
    base = base_model(model)
    device = describe(next(base.parameters()).device)
    packing, carrier = _packing(base)
    choice, key, attention = _attention(options, base, device, packing, carrier)
    experts_choice, experts = choose_experts(options.experts, base, device, options.compute_dtype or base.dtype)
    host = host_budget(options.host_limit)
    one_kernel, norms = choose_norms(options.norms, base, device)
    memory = _activations(options, base, device, choice, host, one_kernel=norms.on)
    forward = PackedForward(packing, key, carrier)
    previous = base.config._attn_implementation
    mixture = AppliedExperts.to(base, experts_choice) if experts_choice else None
    kept = mixture.kept.contexts if mixture else None  # the forward's routing, for the recompute
    later = Later()
    checkpointing = _set_checkpointing(options, base, memory, host, later, kept)
    try:
        tiles, tiled = _tiles(options, base)
    except InputError:
        _undo(base, checkpointing, mixture)
        raise
    if key is not None:
        register_attention()
        base.set_attn_implementation(key)
    forward.attach(model, base)
    for tile in tiles:
        tile.attach()
    rotary = [_rotary_decision(forward)] if forward.rotary else []
    decided = (attention, *memory.decisions, *([] if tiled is None else [tiled]), packing, experts, norms, *rotary)
    attached = attach_norms(one_kernel)
    made = Applied(decided, choice, previous, forward, checkpointing, later, mixture, memory.split, tiles, attached)
    setattr(base, ATTRIBUTE, made)
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
    for tile in applied.tiles:
        tile.detach()
    applied.norms.detach()
    _undo(base, applied.checkpointing, applied.experts)
    delattr(base, ATTRIBUTE)
    return model


def _undo(base: Any, checkpointing: Checkpointing, experts: AppliedExperts | None) -> None:
    """Put the layers' switches and the model's own experts back."""
    if experts is not None:
        experts.detach(base)
    restore_checkpointing(checkpointing)


def decisions(model: nn.Module) -> list[Decision]:
    """What ``apply`` decided for this model, each with its reason, and what turned out otherwise since; empty without
    ``apply``.
    """
    applied: Applied | None = getattr(base_model(model), ATTRIBUTE, None)
    return [] if applied is None else [*applied.decisions, *applied.later.decisions]


def tell_later_decisions(model: nn.Module, listener: Callable[[Decision], None]) -> None:
    """Have ``listener`` called with what turns out otherwise than ``apply`` decided; without one it is a warning."""
    applied: Applied | None = getattr(base_model(model), ATTRIBUTE, None)
    if applied is not None:
        applied.later.listener = listener


def release_graphs(model: nn.Module) -> None:
    """Have back what captured graphs of this model's step name; none of them may be replayed afterwards."""
    applied: Applied | None = getattr(base_model(model), ATTRIBUTE, None)
    if applied is not None:
        applied.checkpointing.release_graphs()


def rest_host_memory(model: nn.Module) -> None:
    """Have back the host memory of steps that are over, but for what graphs name; another step takes it anew."""
    applied: Applied | None = getattr(base_model(model), ATTRIBUTE, None)
    if applied is not None and applied.checkpointing.offload is not None:
        applied.checkpointing.offload.pool.rest()


def applied(model: nn.Module) -> Applied | None:
    """What ``apply`` has hung on the model, or None."""
    found: Applied | None = getattr(base_model(model), ATTRIBUTE, None)
    return found


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


def packed_needs(model: nn.Module) -> tuple[Decision, Needs | None]:
    """The decision whether a model that nothing was applied to can be trained packed, and what its attention then needs
    of a kernel; weights may be meta tensors.
    """
    base = base_model(model)
    packing, carrier = _packing(base)
    return packing, _needs(base, carrier) if packing.on else None


def _needs(base: Any, carrier: Carrier | None) -> Needs:
    return replace(Needs.of(base), mask_only=carrier == "mask")


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
) -> tuple[str | None, str | None, Decision]:
    """The attention choice and its key, or None to leave the model's own, and the decision."""
    if packing.on:
        dtype = options.compute_dtype or base.dtype
        needs = _needs(base, carrier)
        choice, decision = choose_attention(options.attention, needs, device, dtype)
        return choice, attention_key(choice, needs), decision
    if options.attention != "auto":
        raise InputError(
            f"attention {options.attention}: not for a model that can't be trained packed: {packing.reason}"
        )
    return None, None, Decision("attention", False, "left as it was, because this model can't be trained packed")


def _activations(
    options: Options, base: Any, device: Device, attention: str | None, host: HostBudget, *, one_kernel: bool
) -> Chosen:
    """What becomes of each layer's activations; ``one_kernel``: whether norms are one where layers aren't compiled."""
    if options.activations == "auto" and checkpoints(base):
        given = "the model was given with checkpointing switched on"
        return Chosen(None, (Decision("recompute", True, given), Decision("offload", False, given)))
    job, unknown = _job(options, base, attention)
    job = None if job is None else replace(job, one_kernel_norms=one_kernel)
    now = Situation(
        device=device,
        layers=len(checkpoint_layers(base)),
        job=job,
        unknown=unknown,
        pending_bytes=_pending_bytes(base),
        buffers=options.buffers,
        host=host,
    )
    return choose_activations(options.activations, now)


def _job(options: Options, base: Any, attention: str | None) -> tuple[Job | None, str]:
    """What a step will compute, as far as it can be told; else None and why not.

    Where some weights are frozen already, what is trained is there; else all are taken to be trained.
    """
    if options.tokens is None:
        return None, "batch size not known here"
    try:
        shape = ModelShape.of(base.config)
    except InputError as error:
        return None, str(error)
    full = all(p.requires_grad for p in base.parameters())
    trained = [(name, p) for name, p in base.named_parameters() if p.requires_grad and not full]
    ranks = [p.shape[0] for name, p in trained if "lora_A" in name]
    dtypes = (base.dtype, options.compute_dtype or base.dtype)
    weights, compute = (str(dtype).removeprefix("torch.") for dtype in dtypes)
    job = Job(
        shape=shape,
        tokens=options.tokens,
        lengths=(options.tokens,),
        full=full,
        rank=0 if full else max(ranks, default=ASSUMED_RANK),
        adapted=() if full else shape.adapted(),
        saved=sum(p.numel() for name, p in trained if "lora_" not in name),
        weights=weights if weights in BYTES else "float32",
        compute=compute if compute in BYTES else "float32",
        attention=attention or "sdpa",
        tiles=options.tiles,
    )
    return job, ""


def _pending_bytes(base: nn.Module) -> int:
    """What a gradient and two optimizer moments for each trained parameter will take."""
    return sum(3 * p.numel() * p.element_size() for p in base.parameters() if p.requires_grad)


def _set_checkpointing(
    options: Options,
    base: Any,
    chosen: Chosen,
    host: HostBudget,
    decide: Callable[[Decision], None],
    kept: ContextFn | None,
) -> Checkpointing:
    offload = None
    if chosen.split is not None and chosen.split.offloaded:
        offload = Offload(
            layers=chosen.split.offloaded,
            buffers=options.buffers,
            host=host,
            strict=options.activations == "offload",
            decide=decide,
        )
    return set_checkpointing(base, chosen.split, decide=decide, offload=offload, context_fn=kept)


def _tiles(options: Options, base: Any) -> tuple[list[TiledMLP], Decision | None]:
    """The MLPs to run in tiles, and the decision; after the layers were switched."""
    layers = checkpoint_layers(base)
    recomputed = [layer for layer in layers if getattr(layer, "gradient_checkpointing", False)]
    return tile_mlps(options.tiles, base, recomputed, layers, options.tokens)


def _rotary_decision(forward: PackedForward) -> Decision:
    kinds = sorted({type(module).__name__ for module in forward.rotary})
    return Decision(
        "rotary", True, f"positions of {', '.join(kinds)} are scaled by each document's length, not the row's"
    )
