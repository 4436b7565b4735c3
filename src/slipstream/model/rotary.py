"""Rotary positions whose scaling depends on length, for each document instead of for the packed row.

LongRoPE takes one table of frequencies for short sequences and another for long ones, dynamic NTK a table for each
length beyond the trained one. transformers picks by the longest document of the row, waiting for the device to say
which that is, so that a short document beside a long one is rotated unlike alone. Here each document gets the table of
its own length, known on the host. It costs one evaluation of the positions for each distinct table in the row.

The model's own rotary function computes them, with its own layout; it is reached below transformers' decorator, on the
instance, and ``restore`` puts the class's back.
"""

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from slipstream.device.segments import Segments

SCALED_BY_LENGTH = ("longrope", "dynamic")


def by_document(decoder: nn.Module, current: Callable[[], Segments | None]) -> list[nn.Module]:
    """Let the decoder's length-scaled rotary modules follow ``current()``; gives those changed, for ``by_row``.

    ``current`` gives the segments of the forward at hand, or None for an unpacked one, which stays the model's own.
    """
    found = scaled_by_length(decoder)
    for module in found:
        vars(module)["forward"] = _DocumentRotary(module, current)
    return found


def by_row(modules: list[nn.Module]) -> None:
    """Put the modules' own forward back."""
    for module in modules:
        vars(module).pop("forward", None)


def scaled_by_length(decoder: nn.Module) -> list[nn.Module]:
    """The modules whose rotary positions depend on a document's length; weights may be meta tensors."""
    return [module for module in decoder.modules() if _scales_by_length(module)]


def _scales_by_length(module: Any) -> bool:
    """Whether a module makes rotary positions by a rule that depends on length."""
    kinds = getattr(module, "rope_type", None)
    named = kinds.values() if isinstance(kinds, dict) else [kinds]
    return any(kind in SCALED_BY_LENGTH for kind in named)


class _DocumentRotary:
    """The forward of one rotary module."""

    def __init__(self, module: Any, current: Callable[[], Segments | None]) -> None:
        self.module, self.current = module, current
        self.own = type(module).forward
        self.plain = inspect.unwrap(self.own)
        self.table = lru_cache(maxsize=256)(self._table)

    @torch.no_grad()
    def __call__(self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None) -> Any:
        """cos and sin, each in the model's own layout, [1, T, D]."""
        segments = self.current()
        kind = self.module.rope_type if layer_type is None else self.module.rope_type[layer_type]
        named = {} if layer_type is None else {"layer_type": layer_type}
        if segments is None or kind not in SCALED_BY_LENGTH:
            return self.own(self.module, x, position_ids, **named)
        regimes = [self._regime(length, kind, layer_type) for length in segments.lengths or (segments.total,)]
        chosen = sorted(set(regimes), key=str)
        cos, sin = self._with(chosen[0], x, position_ids, kind, layer_type)
        for regime in chosen[1:]:
            mine_T1 = self._tokens_of(segments, regimes, regime, layer_type)
            other_cos, other_sin = self._with(regime, x, position_ids, kind, layer_type)
            cos, sin = torch.where(mine_T1, other_cos, cos), torch.where(mine_T1, other_sin, sin)
        return cos, sin

    def _regime(self, length: int, kind: str, layer_type: str | None) -> int | None:
        """The length whose table a document takes; None for the table of trained lengths."""
        config = self.module.config
        rope = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
        if kind == "longrope":
            trained = int(rope["original_max_position_embeddings"])
            return None if length <= trained else trained + 1
        return None if length <= int(self.module.original_max_seq_len) else length

    def _tokens_of(
        self, segments: Segments, regimes: list[int | None], regime: int | None, layer_type: str | None
    ) -> torch.Tensor:
        """bool [T, 1]: the tokens of documents in ``regime``."""

        def build() -> torch.Tensor:
            flags = torch.tensor([each == regime for each in regimes] + [False])
            flags = flags.pin_memory() if segments.device.type == "cuda" else flags
            return flags.to(segments.device, non_blocking=True)[segments.segment_ids.long()][:, None]

        return segments.derive(f"rotary {layer_type or ''} {regime}", build)

    def _with(
        self, regime: int | None, x: torch.Tensor, position_ids: torch.Tensor, kind: str, layer_type: str | None
    ) -> Any:
        """The model's own positions with the frequencies of one regime."""
        prefix, named = ("", {}) if layer_type is None else (f"{layer_type}_", {"layer_type": layer_type})
        name = f"{prefix}inv_freq"
        before = self.module._buffers[name]
        self.module._buffers[name] = self.table(regime, kind, layer_type, x.device)
        try:
            return self.plain(self.module, x, position_ids, **named)
        finally:
            self.module._buffers[name] = before

    def _table(self, regime: int | None, kind: str, layer_type: str | None, device: torch.device) -> torch.Tensor:
        """Inverse frequencies [D / 2], float32, made on the host as for a document of that length alone."""
        named = {} if layer_type is None else {"layer_type": layer_type}
        frequencies: torch.Tensor = ROPE_INIT_FUNCTIONS[kind](self.module.config, None, seq_len=regime, **named)[0]
        frequencies = frequencies.cpu()
        return (frequencies.pin_memory() if device.type == "cuda" else frequencies).to(device, non_blocking=True)
