"""Attention that reads ``Segments``: each document of a packed row attends to itself alone.

Two functions are registered with transformers under our own keys (additive; a model opts in by its config, per
instance) and chosen by ``choose_attention``:

- ``varlen``: PyTorch's variable-length attention, which takes ``cu_seqlens`` as they are and never makes a T x T mask.
- ``sdpa``: scaled dot-product attention under one additive mask, made once a batch for each distinct window. Runs on
  every device and dtype; the mask costs T² memory.

Boundaries never come from positions (models that ignore them would leak) but as the ``segments`` object in the
forward's kwargs. Without it (generation, padded batches) both functions hand over to transformers' own ``sdpa``.

Shapes: B batch (1 when packed), H query heads, G key/value heads, T tokens, D head width.
"""

from collections.abc import Callable
from functools import cache
from inspect import signature
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from slipstream.cost.hardware import Device
from slipstream.decision import Decision
from slipstream.device.segments import Segments
from slipstream.errors import InputError

AttentionChoice = Literal["auto", "varlen", "sdpa"]
Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Segments, float | None, float, int | None], torch.Tensor]
HALF = (torch.bfloat16, torch.float16)
LARGEST_FLASH_HEAD = 256


def attention_key(choice: str) -> str:
    """The name under which a choice is registered with transformers."""
    return f"slipstream_{choice}"


def register_attention() -> None:
    """Register both choices with transformers; calling it again changes nothing.

    The mask function is transformers' own for ``sdpa``: without one, left-padded generation would be wrong.
    """
    for choice, kernel in (("varlen", varlen_kernel), ("sdpa", sdpa_kernel)):
        AttentionInterface.register(attention_key(choice), _over_segments(kernel))
        AttentionMaskInterface.register(attention_key(choice), sdpa_mask)


def choose_attention(
    asked: AttentionChoice, config: Any, device: Device, dtype: torch.dtype
) -> tuple[Literal["varlen", "sdpa"], Decision]:
    """The attention to use for a model with this ``config`` on ``device``, computing in ``dtype``.

    Raises ``InputError`` when the one asked for can't be exact here.
    """
    obstacle = varlen_obstacle(config, device, dtype)
    if asked == "varlen" and obstacle:
        raise InputError(f"attention varlen: {obstacle}; set attention to sdpa or auto")
    if asked == "varlen" or (asked == "auto" and not obstacle):
        reason = "variable-length kernel over cu_seqlens, no T x T mask"
        return "varlen", Decision("attention", True, f"varlen: {reason}")
    why = "asked for" if asked == "sdpa" else f"varlen can't be used: {obstacle}"
    return "sdpa", Decision("attention", True, f"sdpa: one mask a batch for each distinct window ({why})")


def mask_placeholder(device: torch.device) -> torch.Tensor:
    """bool [1, 1, 1, 1]: what stands for the mask in a packed forward.

    transformers passes a 4-D mask on as it is. It broadcasts over any scores, so that a model which computes attention
    by itself gets as far as the check that refuses it.
    """
    return torch.ones((1, 1, 1, 1), dtype=torch.bool, device=device)


def varlen_obstacle(config: Any, device: Device, dtype: torch.dtype) -> str | None:
    """Why variable-length attention can't run here, or None."""
    if device.kind != "cuda":
        return f"it needs a CUDA device, the model is on {device.kind}"
    if device.compute_capability is None or device.compute_capability < (8, 0):
        return f"its kernel needs compute capability 8.0 or newer, {device.name} has {device.compute_capability}"
    if dtype not in HALF:
        return f"its kernel computes in bfloat16 or float16, not {dtype}"
    if getattr(config, "attention_dropout", 0.0):
        return f"it has no dropout and the model's attention_dropout is {config.attention_dropout}"
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if width > LARGEST_FLASH_HEAD or width % 8:
        return f"its kernel takes head widths that are multiples of 8 up to {LARGEST_FLASH_HEAD}, the model has {width}"
    return None


def _over_segments(kernel: Kernel) -> Callable[..., tuple[torch.Tensor, None]]:
    def attention(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        segments: Segments | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        if segments is None:
            plain: tuple[torch.Tensor, None] = sdpa_attention_forward(
                module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
            )
            return plain
        _refuse_unhonoured(module, kwargs, attention_mask)
        _refuse_other_shapes(module, query, key, segments)
        if sliding_window is None:
            _refuse_silent_window(module, segments)
        segments.readers.add(id(module))
        query, key, value = _autocast(query, key, value)
        return kernel(query, key, value, segments.on(query.device), scaling, dropout, sliding_window), None

    return attention


def sdpa_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: Segments,
    scale: float | None,
    dropout: float,
    window: int | None,
) -> torch.Tensor:
    """[1, H, T, D], [1, G, T, D] twice → [1, T, H, D], under the batch's dense mask."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:  # masked kernels on CUDA take no grouped heads: enable_gqa would fall back to materialised scores
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    mask = segments.mask(query.dtype, window)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, scale=scale)
    return out.transpose(1, 2).contiguous()


def varlen_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: Segments,
    scale: float | None,
    dropout: float,
    window: int | None,
) -> torch.Tensor:
    """[1, H, T, D], [1, G, T, D] twice → [1, T, H, D], by ``cu_seqlens``; grouped heads are not repeated."""
    from torch.nn.attention.varlen import varlen_attn

    if dropout:
        raise InputError(f"attention dropout {dropout}: varlen attention has none; set attention to sdpa")
    window = segments.window(window)
    q_THD, k_TGD, v_TGD = (x[0].transpose(0, 1) for x in (query, key, value))
    out_THD = varlen_attn(
        q_THD,
        k_TGD,
        v_TGD,
        segments.cu_seqlens,
        segments.cu_seqlens,
        segments.max_seqlen,
        segments.max_seqlen,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),  # causal, reaching back window - 1 tokens
        **_grouped_heads(query.shape[1] != key.shape[1]),
    )
    assert isinstance(out_THD, torch.Tensor)  # a pair only where the log-sums are asked for
    return out_THD[None]


@cache
def _grouped_heads(grouped: bool) -> dict[str, Any]:
    """Torch 2.12 and newer want grouped heads announced; 2.11 takes them as they are and has no such argument."""
    from torch.nn.attention.varlen import varlen_attn

    return {"enable_gqa": grouped} if "enable_gqa" in signature(varlen_attn).parameters else {}


def _autocast(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Cast as autocast would; the kernels and the mask's dtype are chosen by what comes out."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return list(tensors)
    return [tensor.to(torch.get_autocast_dtype(kind)) for tensor in tensors]


def _refuse_unhonoured(module: nn.Module, kwargs: dict[str, Any], mask: torch.Tensor | None) -> None:
    name = type(module).__name__
    for option in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(option) is not None:
            raise InputError(
                f"{name} asks for {option}, which packed attention does not honour yet; set packing.enabled: false"
            )
    if not getattr(module, "is_causal", True) or kwargs.get("is_causal") is False:
        raise InputError(f"{name} attends in both directions; packed training is for causal language models")
    if mask is not None and mask.numel() != 1:
        raise InputError(
            f"{name} makes a mask of its own, {list(mask.shape)}, which packed attention would not honour; "
            f"set packing.enabled: false"
        )


def _refuse_other_shapes(module: nn.Module, query: torch.Tensor, key: torch.Tensor, segments: Segments) -> None:
    if query.shape[0] != 1 or query.shape[2] != segments.total or key.shape[2] != segments.total:
        raise InputError(
            f"segments hold {segments.total:,} tokens in one row, but {type(module).__name__} got queries of shape "
            f"{list(query.shape)} and keys of shape {list(key.shape)}; give the batch as the collator made it, without "
            f"a cache"
        )


def _refuse_silent_window(module: Any, segments: Segments) -> None:
    """Refuse a layer that hides tokens by its mask alone: the mask is not made here, so it would see too far."""
    config = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None)
    kind = kinds[module.layer_idx] if kinds and hasattr(module, "layer_idx") else "sliding_attention"
    setting = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}.get(kind)
    reach = getattr(config, setting, None) if setting else None
    if isinstance(reach, int) and segments.window(reach) is not None:
        raise InputError(
            f"{type(module).__name__} limits its view by {setting} {reach:,} without telling its attention, and a "
            f"segment has {segments.max_seqlen:,} tokens; lower max_length to {reach:,} or set packing.enabled: false"
        )
