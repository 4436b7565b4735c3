"""Keep or recompute: what becomes of a decoder layer's activations between forward and backward.

Keeping costs memory that grows with tokens x layers; recomputing costs a second forward (a third of the step's
arithmetic with frozen weights). ``auto`` keeps where the prediction fits the device with a margin.
"""

from dataclasses import dataclass
from typing import Any, Literal

from slipstream.cost.estimate import kept_activation_bytes, loss_bytes
from slipstream.cost.hardware import Device, free_bytes, host_memory_limit
from slipstream.decision import Decision

ActivationsChoice = Literal["auto", "keep", "recompute"]
MARGIN = 0.8
"""Share of the free memory that a prediction may fill: the formula is not exact and the allocator fragments."""


@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    """What becomes of activations (the recipe's ``memory`` section)."""

    activations: ActivationsChoice = "auto"
    """``keep`` stores them, ``recompute`` makes them again in the backward; ``auto`` keeps where they fit."""
    buffers: Literal["auto"] = "auto"
    """Device buffers for reloading; only ``auto`` until offloading is available."""
    host_limit: None = None
    """Host memory for offloading; not available yet."""


def choose_activations(
    asked: ActivationsChoice, config: Any, device: Device, tokens: int | None
) -> tuple[bool, Decision]:
    """Whether to recompute, and the decision, for a batch of ``tokens`` tokens on ``device``."""
    if asked != "auto":
        return asked == "recompute", Decision("recompute", asked == "recompute", f"asked for: activations {asked}")
    if tokens is None:
        return False, Decision("recompute", False, "batch size not known here, so activations are kept")
    needed = kept_activation_bytes(config, tokens) + loss_bytes(config, tokens, whole_logits=False)
    free = _free_on(device)
    recompute = needed > MARGIN * free
    verb = "don't fit" if recompute else "fit"
    reason = (
        f"activations of {tokens:,} tokens take about {needed / 2**30:.1f} GiB and {verb} "
        f"{MARGIN:.0%} of the {free / 2**30:.1f} GiB free"
    )
    return recompute, Decision("recompute", recompute, reason)


def _free_on(device: Device) -> int:
    """Bytes free for activations: a card's, as torch tells it, or what this process may use of a host's memory."""
    return free_bytes("cuda") if device.kind == "cuda" else min(device.memory_bytes, host_memory_limit())
