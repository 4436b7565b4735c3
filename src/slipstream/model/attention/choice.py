"""Which attention a model gets: each is asked what stands in its way, and the fastest that is exact is taken."""

from types import ModuleType
from typing import Literal, get_args

import torch

from slipstream.cost.hardware import Device
from slipstream.decision import Decision
from slipstream.errors import InputError
from slipstream.model.attention import flex, sdpa, varlen, xformers
from slipstream.model.attention.call import Needs

AttentionChoice = Literal["auto", "varlen", "flex", "xformers", "sdpa"]
Named = Literal["varlen", "flex", "xformers", "sdpa"]
KERNELS: dict[Named, ModuleType] = {"varlen": varlen, "xformers": xformers, "flex": flex, "sdpa": sdpa}
"""In the order in which ``auto`` prefers them, as measured (``benchmarks/results``)."""
WHAT: dict[Named, str] = {
    "varlen": "variable-length kernel over cu_seqlens, no T x T mask",
    "xformers": "block-diagonal bias, one a batch for each distinct window",
    "flex": "block mask, one a batch for each distinct window, no T x T mask",
    "sdpa": "one mask a batch for each distinct window",
}


def choose_attention(
    asked: AttentionChoice, needs: Needs, device: Device, dtype: torch.dtype
) -> tuple[Named, Decision]:
    """The attention for a model with these ``needs`` on ``device``, computing in ``dtype``.

    Raises ``InputError`` when the one asked for can't be exact here.
    """
    obstacles = {name: kernel.obstacle(needs, device, dtype) for name, kernel in KERNELS.items()}
    if asked not in get_args(AttentionChoice):
        raise InputError(f"attention {asked!r} is none of {', '.join(get_args(AttentionChoice))}")
    if asked != "auto":
        if obstacles[asked]:
            raise InputError(f"attention {asked}: {obstacles[asked]}; set attention to auto or sdpa")
        return asked, Decision("attention", True, f"{asked}: {WHAT[asked]} (asked for)")
    chosen = next(name for name, obstacle in obstacles.items() if obstacle is None)
    passed = [f"{name} can't be used: {obstacles[name]}" for name in KERNELS if obstacles[name]]
    first = f" ({passed[0]})" if passed and chosen != next(iter(KERNELS)) else ""
    return chosen, Decision("attention", True, f"{chosen}: {WHAT[chosen]}{first}")
