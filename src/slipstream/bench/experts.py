"""``slipstream bench experts``: routing by one sort against a look-up for each expert, and whole steps beside others'.

Three parts, each of arms that take turns in one process and are proven to compute the same first:

- ``layer``: one mixture layer (router and experts, nothing else), forward and backward: the reference that looks up
  each expert's tokens, the sorted loop, grouped products. The published gains stand beside it.
- ``scaling``: tokens fixed, experts from 8 to 256: how often the host must wait, and what routing takes.
- ``step``: whole training steps of real shapes: the same three, and transformers' own grouped and eager experts with
  the attention that it can run packed.

A case that doesn't fit is a row with the reason.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from types import MappingProxyType
from typing import Any, Literal, get_args

import torch

from slipstream.bench.document import document
from slipstream.bench.experts_arms import StepCase, layer_row, scaling_row, step_row
from slipstream.bench.known_shapes import (
    EXPERTS_LAYERS,
    EXPERTS_ROUNDS,
    EXPERTS_SHAPES,
    EXPERTS_STEP_ROUNDS,
    EXPERTS_TOKENS,
    MIXTURES,
)
from slipstream.bench.no_memory import out_of_memory
from slipstream.bench.progress import Progress
from slipstream.bench.shapes import random_documents, shape_config
from slipstream.errors import InputError

Part = Literal["layer", "scaling", "step", "all"]
Say = Callable[[str], None]
Save = Callable[[dict[str, Any]], None]
Measured = Callable[[Progress], dict[str, Any]]
"""A case, ready to be measured."""
COUNTS = (8, 16, 32, 64, 128, 256)
"""Experts of the part ``scaling``."""
ADAPTERS = ("attention", "experts")
"""Where a step's adapters are: on attention alone, or on attention and experts."""
PUBLISHED: Mapping[str, Any] = MappingProxyType(
    {
        "source": "an engineering post of May 2026 by Unsloth with NVIDIA; gpt-oss",
        "layer_gain": {"forward": 0.23, "backward": 0.13},
        "step_gain": (0.10, 0.15),
    }
)
BARS: Mapping[str, float] = MappingProxyType({"transformers-grouped": 2.5, "transformers-eager": 12.0})
"""How many times a grouped step of gpt-oss must be faster than transformers' own, uncompiled."""
ROUTING_BAR = 1.3
"""How much longer grouped routing may take with 256 experts than with 8."""


def _nowhere(result: dict[str, Any]) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class ExpertsBench:
    """What to measure; None takes what suits the device."""

    shapes: tuple[str, ...] | None = None
    """Names from ``shapes.MIXTURES``; on a card the real ones, else ``tiny-mixture``."""
    tokens: int | None = None
    """Tokens of the row; 4,096 on a card, else 128."""
    adapters: tuple[str, ...] = ADAPTERS
    """``attention``, ``experts`` or both: steps with adapters on attention alone, and on attention and experts."""
    part: Part = "all"
    """``layer``, ``scaling``, ``step`` or ``all``."""
    rounds: int | None = None
    """Timed rounds; of layers and routing 20 on a card, else 3, of steps 5 and 2."""
    layers: int | None = None
    """Decoder layers of the steps; on a card 12, of ``tiny-mixture`` 2."""

    def __post_init__(self) -> None:
        """Refuse what can't be measured before any model is made."""
        for shape in self.shapes or ():
            if shape not in MIXTURES:
                raise InputError(f"shape {shape!r} has no experts; there is {', '.join(MIXTURES)}")
            shape_config(shape, self.layers)
        random_documents(self.tokens or 128, 100)
        for kind in self.adapters:
            if kind not in ADAPTERS:
                raise InputError(f"adapters {kind!r} is none of {', '.join(ADAPTERS)}")
        if self.part not in get_args(Part):
            raise InputError(f"part {self.part!r} is none of {', '.join(get_args(Part))}")
        if self.rounds is not None and self.rounds < 2:
            raise InputError(f"rounds {self.rounds} < 2: an interval needs at least two rounds; raise --rounds")


def run(options: ExpertsBench, say: Say, save: Save = _nowhere) -> dict[str, Any]:
    """Measure, and give the result document; ``say`` is told of progress, ``save`` gets the document after each case.

    Raises ``ResultsDifferError`` when two arms don't compute the same.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows: list[dict[str, Any]] = []
    more = {"published": dict(PUBLISHED), "bars": {**BARS, "routing": ROUTING_BAR}}
    cases = list(_cases(options, device))
    result = document("experts", device, rows, asked=[name for name, _ in cases], **more)
    progress = Progress(say, len(cases), device)
    for name, measured in cases:
        progress.case(name)
        rows.append(_row(measured, progress))
        save(result)
    return result


def _row(measured: Measured, progress: Progress) -> dict[str, Any]:
    try:
        return measured(progress)
    except torch.OutOfMemoryError as error:
        return {"refused": out_of_memory(error)}


def _cases(options: ExpertsBench, device: torch.device) -> Iterator[tuple[str, Measured]]:
    """What is measured, by a name for the progress line."""
    card = device.type == "cuda"
    shapes = options.shapes or EXPERTS_SHAPES.on(card)
    tokens = options.tokens or EXPERTS_TOKENS.on(card)
    rounds = options.rounds or EXPERTS_ROUNDS.on(card)
    if options.part in ("layer", "all"):
        yield f"one layer of {shapes[0]}, {tokens:,} tokens", partial(layer_row, shapes[0], tokens, rounds, device)
    if options.part in ("scaling", "all"):
        for experts in COUNTS:
            measured = partial(scaling_row, experts, tokens, rounds, device)
            yield f"routing {tokens:,} tokens to {experts} experts", measured
    if options.part in ("step", "all"):
        for shape, adapters in product(shapes, options.adapters):
            layers = options.layers or EXPERTS_LAYERS.on(card)
            rounds = options.rounds or EXPERTS_STEP_ROUNDS.on(card)
            case = StepCase(shape, layers, tokens, adapters == "experts", rounds, device)
            yield f"steps of {shape}, {layers} layers, adapters on {adapters}", partial(step_row, case)
