"""Our attention functions, under their own keys in transformers' registries: from a model's call to a kernel's.

Boundaries never come from positions (models that ignore them would leak) but as the ``segments`` object in the
forward's kwargs. Without it (generation, padded batches) the call goes on to the model's own attention.

Registering is additive, and a model opts in by its config, per instance; what a kernel would not honour is refused.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from slipstream.device.segments import Segments
from slipstream.errors import InputError
from slipstream.model.attention.call import Boundaries, Call, Kernel, Needs
from slipstream.model.attention.choice import KERNELS

Unpacked = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


def attention_key(choice: str, needs: Needs) -> str:
    """The name under which a choice is registered with transformers, for a model with these needs.

    transformers reads "sdpa" inside a name as its own, and refuses it for models with soft caps or sinks.
    """
    return _eager_key(choice) if needs.softcap or needs.sinks else _plain_key(choice)


def _plain_key(choice: str) -> str:
    return f"slipstream_{choice}"


def _eager_key(choice: str) -> str:
    return f"slipstream_{choice.replace('sdpa', 'masked')}_eager"


def register_attention(*, outside_graphs: bool = False) -> None:
    """Register all choices with transformers; calling it again changes nothing.

    ``outside_graphs``: as functions that ``torch.compile`` calls and does not look into, so that neither a batch's
    boundaries nor a kernel become part of compiled code.

    Each twice, for what becomes of a call without segments: on to transformers' ``sdpa``, or for models with soft caps
    and sinks, which that has not, to the eager function of the model's own file. The mask functions are transformers'
    own for either; without one, left-padded generation would be wrong.
    """
    for choice, module in KERNELS.items():
        for key, unpacked, mask in (
            (_plain_key(choice), sdpa_attention_forward, sdpa_mask),
            (_eager_key(choice), _eager, eager_mask),
        ):
            function = _over_segments(module.kernel, unpacked)
            if outside_graphs:
                function = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
            AttentionInterface.register(key, function)
            AttentionMaskInterface.register(key, mask)


def mask_placeholder(device: torch.device) -> torch.Tensor:
    """bool [1, 1, 1, 1]: what stands for the mask in a packed forward.

    transformers passes a 4-D mask on as it is. It broadcasts over any scores, so that a model which computes attention
    by itself gets as far as the check that refuses it.
    """
    return torch.ones((1, 1, 1, 1), dtype=torch.bool, device=device)


def _over_segments(kernel: Kernel, unpacked: Unpacked) -> Unpacked:
    def attention(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        segments: Segments | Boundaries | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if isinstance(segments, Boundaries):
            segments = segments.segments
        if segments is None:
            kwargs |= {"scaling": scaling, "dropout": dropout, "sliding_window": sliding_window}
            return unpacked(module, query, key, value, attention_mask, softcap=softcap, s_aux=s_aux, **kwargs)
        _refuse_unhonoured(module, kwargs, attention_mask)
        _refuse_other_shapes(module, query, key, segments)
        if sliding_window is None:
            _refuse_silent_window(module, segments)
        segments.readers.add(id(module))
        query, key, value = _autocast(query, key, value)
        call = Call(scale=scaling, dropout=dropout, window=sliding_window, softcap=softcap, sinks=s_aux)
        return kernel(query, key, value, segments.on(query.device), call.within(segments)), None

    return attention


def _eager(module: nn.Module, *tensors: torch.Tensor | None, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The eager attention function of the file that defines ``module``."""
    given = {name: value for name, value in kwargs.items() if value is not None}
    out: tuple[torch.Tensor, torch.Tensor] = vars(sys.modules[type(module).__module__])["eager_attention_forward"](
        module, *tensors, **given
    )
    return out


def _autocast(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Cast as autocast would; the kernels and the mask's dtype are chosen by what comes out."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return list(tensors)
    return [tensor.to(torch.get_autocast_dtype(kind)) for tensor in tensors]


def _refuse_unhonoured(module: nn.Module, kwargs: dict[str, Any], mask: torch.Tensor | None) -> None:
    name = type(module).__name__
    for option in ("position_bias",):
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
