"""What an attention call asks of a kernel, and what a model asks of all its calls.

Shapes, here and in the kernels beside: B batch (1 when packed), H query heads, G key/value heads, T tokens,
D head width.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import nn

from slipstream.cost.settings import attention_dropout
from slipstream.device.segments import Segments

HALF = (torch.bfloat16, torch.float16)


class Boundaries:
    """A batch's segments on their way through a model's layers.

    A plain object, because torch.compile passes it by: it looks into a frozen dataclass such as ``Segments``, and would
    compile a layer anew for each batch's values.
    """

    def __init__(self, segments: Segments) -> None:
        """``segments``: those of one forward, on the layers' device."""
        self.segments = segments


@dataclass(frozen=True, kw_only=True)
class Call:
    """The arguments of one attention call besides queries, keys and values."""

    scale: float | None = None
    """Factor of the scores; None: 1 / sqrt(D)."""
    dropout: float = 0.0
    """Dropout probability of the attention weights."""
    window: int | None = None
    """How many tokens back a token sees, itself included; None: to its document's first."""
    softcap: float | None = None
    """Scores s become softcap * tanh(s / softcap)."""
    sinks: torch.Tensor | None = None
    """[H]: a logit a head that takes its share of the softmax and attends to nothing."""

    def within(self, segments: Segments) -> Self:
        """The same call, without a window that no segment outgrows: it would only make a second structure."""
        return replace(self, window=segments.window(self.window))


Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Segments, Call], torch.Tensor]
"""Queries [1, H, T, D], keys and values [1, G, T, D] on the segments' device → [1, T, H, D]."""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a model's attention needs of a kernel, over all its layers."""

    head_width: int
    value_width: int
    dropout: float = 0.0
    softcap: bool = False
    sinks: bool = False
    mask_only: bool = False
    """Boundaries reach the attention modules as a mask, not as segments (see ``model/carrier.py``)."""

    @classmethod
    def of(cls, base: nn.Module) -> Self:
        """Read off a transformers model: its configuration, and what its attention modules hold."""
        config: Any = base.config
        config = config.get_text_config()
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        attentions = [m for m in base.modules() if type(m).__name__.endswith("Attention")]
        return cls(
            head_width=getattr(config, "qk_head_dim", None) or width,
            value_width=getattr(config, "v_head_dim", None) or width,
            dropout=attention_dropout(config.to_dict()),
            softcap=getattr(config, "attn_logit_softcapping", None) is not None,
            sinks=any(isinstance(getattr(m, "sinks", None), nn.Parameter) for m in attentions),
        )

    def extras(self) -> list[str]:
        """The needs beyond scaled dot products under a mask, by name."""
        asked = {"soft-capped logits": self.softcap, "attention sinks": self.sinks, "dropout": self.dropout > 0}
        return [name for name, needed in asked.items() if needed]
