"""What offloading layer inputs costs and saves, and which layers to keep, recompute or offload: arithmetic only.

Symbols: L layers; c seconds of one reload (or copy out); g seconds of one layer's backward with its recompute; f
seconds of one layer's forward. Sources: the formulas of the two reload schedules are those of the engineering post of
May 2026 by Unsloth with NVIDIA; the choice of layers is ours.

The choice needs rates of the device's class, not of the very card: they decide only whether a copy is shorter than the
work it hides under, which it is by a factor of three and more wherever layers are wide.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from slipstream.cost.hardware import Device

COPY_TAX = 0.03
"""Share of a layer's work that a copy hidden under it may cost all the same: it takes memory bandwidth and launches."""
BACKWARD_FORWARDS = 3
"""g in units of f with frozen weights: the recompute, the gradients of inputs, and what attention does twice."""


@dataclass(frozen=True)
class Rates:
    """What a class of devices reaches, not its data sheet."""

    flops: float
    """Half-precision matrix arithmetic, FLOP/s."""
    link: float
    """Pinned copies in one direction, bytes/s."""


RATES: Mapping[tuple[int, int], Rates] = MappingProxyType(
    {
        (7, 0): Rates(80e12, 12e9),
        (7, 5): Rates(40e12, 12e9),
        (8, 0): Rates(230e12, 24e9),
        (8, 6): Rates(60e12, 20e9),
        (8, 9): Rates(140e12, 20e9),
        (9, 0): Rates(700e12, 54e9),
        (10, 0): Rates(1400e12, 55e9),
        (12, 0): Rates(200e12, 45e9),
    }
)
"""By compute capability, for the largest common card of each: the most arithmetic for its link, the hardest to hide."""


def rates_of(device: Device) -> Rates:
    """The rates of this device's class: of its capability, or the nearest one below it."""
    capability = device.compute_capability or (0, 0)
    below = [known for known in RATES if known <= capability]
    return RATES[max(below, default=min(RATES))]


def single_buffer_seconds(layers: int, c: float, g: float) -> float:
    """Seconds of a backward whose reloads and layers alternate: L · (c + g)."""
    return layers * (c + g)


def double_buffer_seconds(layers: int, c: float, g: float) -> float:
    """Seconds of one whose reloads run under the layer at hand: c + (L − 1) · max(c, g) + g."""
    return c + (layers - 1) * max(c, g) + g


def reload_saved_seconds(layers: int, c: float, g: float) -> float:
    """What the second buffer saves: (L − 1) · min(c, g), the difference of the two."""
    return (layers - 1) * min(c, g)


def layer_input_bytes(config: Any, tokens: int, itemsize: int) -> int:
    """Bytes of one layer's input: tokens x hidden size x bytes of an element."""
    return int(tokens * config.hidden_size * itemsize)


@dataclass(frozen=True)
class Split:
    """How many layers are treated how. In the model's order: offloaded, recomputed, kept.

    Kept ones come last, since their backward comes first: their memory is free again before another layer recomputes.
    """

    kept: int
    recomputed: int
    offloaded: int

    @property
    def layers(self) -> int:
        """All layers."""
        return self.kept + self.recomputed + self.offloaded


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What the choice is made from; bytes and seconds are for one layer."""

    layers: int
    kept_bytes: int
    """All that a kept layer saves."""
    input_bytes: int
    fixed_bytes: int
    """What the step needs besides (the loss), while all kept layers are there."""
    working_bytes: int = 0
    """Gradients that are there at once in a layer's backward."""
    recomputed_bytes: int | None = None
    """All that a recomputed layer needs while it is at work; None: what a kept one saves, and its gradients."""
    constant_bytes: int = 0
    """What is there all the time (a dense mask)."""
    buffers: int = 2
    forward_seconds: float = 1.0
    copy_seconds: float = 0.0

    def device_bytes(self, split: Split) -> int:
        """The peak of a split: before the backward, or while the last layer that is not kept is recomputed."""
        inputs = split.recomputed * self.input_bytes
        before = inputs + split.kept * self.kept_bytes + max(self.fixed_bytes, self.working_bytes)
        slots = self.buffers * self.input_bytes if split.offloaded else 0
        again = self.kept_bytes + self.working_bytes if self.recomputed_bytes is None else self.recomputed_bytes
        recompute = inputs + slots + again if split.kept < split.layers else 0
        return self.constant_bytes + max(before, recompute)

    def host_bytes(self, split: Split) -> int:
        """Host memory of a split."""
        return split.offloaded * self.input_bytes

    def seconds(self, split: Split) -> float:
        """What a split costs on top of keeping everything."""
        f, c = self.forward_seconds, self.copy_seconds
        g = BACKWARD_FORWARDS * f
        exposed = max(0.0, c - f) + max(0.0, c - g) + COPY_TAX * (f + g)
        return (split.recomputed + split.offloaded) * f + split.offloaded * exposed


def splits(layers: int, *, offload: bool) -> Iterator[Split]:
    """Every split of the layers; the last that is recomputed never leaves the device."""
    for kept in range(layers + 1):
        rest = layers - kept
        for offloaded in range(max(1, rest) if offload else 1):
            yield Split(kept, rest - offloaded, offloaded)


def cheapest_split(demand: Demand, device_bytes: int, host_bytes: int, *, offload: bool) -> Split | None:
    """The cheapest split that fits both memories, or None; of equally cheap ones the one that moves least.

    Nothing is offloaded where a split without it fits: a percent of a step is within the prediction's error, and
    pinned memory is dear to others.
    """
    for allowed in (False, True) if offload else (False,):
        fitting = [
            split
            for split in splits(demand.layers, offload=allowed)
            if demand.device_bytes(split) <= device_bytes and demand.host_bytes(split) <= host_bytes
        ]
        if fitting:
            return min(fitting, key=lambda split: (demand.seconds(split), split.offloaded))
    return None
