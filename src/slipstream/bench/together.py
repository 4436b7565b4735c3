"""``slipstream bench all``: every optimisation off, each alone, the published three together, everything on.

The arms take turns on one model of a mixture's shape, where all three published changes apply, and on a dense one. The
gain of a combination stands beside the product of its parts' gains, which it would be if they took nothing from one
another, and beside the published gain of all three (about 25% in one edition, 15% in another). The published experts
are the sorted loop, in an eager step; "everything on" has what ``auto`` takes here, experts and step alike, so that its
parts' product is no bound for it. All arms are first shown to compute the same.
"""

import gc
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, get_args

import torch

from slipstream.bench.document import document
from slipstream.bench.harness import WHOLE, Times, clock_for, measure
from slipstream.bench.known_shapes import MIXTURES, TOGETHER_ROUNDS, TOGETHER_SHAPES, TOGETHER_TOKENS
from slipstream.bench.no_memory import out_of_memory
from slipstream.bench.progress import Progress
from slipstream.bench.shapes import random_documents, shape_config
from slipstream.bench.statistics import saving
from slipstream.bench.together_arms import ALL, EXPERTS, OFF, PACKING, PUBLISHED, RELOAD, STEP, Bench, prove_equal
from slipstream.errors import InputError
from slipstream.model.attention import AttentionChoice

Say = Callable[[str], None]
Save = Callable[[dict[str, Any]], None]
PARTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {PUBLISHED: (PACKING, RELOAD, EXPERTS), ALL: (PACKING, RELOAD, EXPERTS, STEP)}
)
"""What is combined in the arms that combine."""
PUBLISHED_GAINS: Mapping[str, tuple[float, ...]] = MappingProxyType(
    {PACKING: (0.143,), RELOAD: (0.0461, 0.0840), EXPERTS: (0.10, 0.15), PUBLISHED: (0.15, 0.25)}
)
"""Of whole steps; two numbers are a range, or two editions."""
SOURCE = "an engineering post of May 2026 by Unsloth with NVIDIA"


def _nowhere(result: dict[str, Any]) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class TogetherBench:
    """What to measure; None takes what suits the device."""

    shapes: tuple[str, ...] | None = None
    """Names from ``shapes.SHAPES`` and ``MIXTURES``; on a card a mixture and a dense model, else the tiny ones."""
    tokens: int | None = None
    """Tokens of the row; 8,192 on a card, else 128."""
    layers: int | None = None
    """Decoder layers; 8 on a card, else all."""
    rounds: int | None = None
    """Timed rounds; 12 on a card, else 3."""
    attention: AttentionChoice = "auto"

    def __post_init__(self) -> None:
        """Refuse what can't be measured before any model is made."""
        for shape in self.shapes or ():
            shape_config(shape, self.layers)
        random_documents(self.tokens or 128, 100)
        if self.attention not in get_args(AttentionChoice):
            raise InputError(f"--attention {self.attention!r} is none of {', '.join(get_args(AttentionChoice))}")
        if self.rounds is not None and self.rounds < 2:
            raise InputError(f"rounds {self.rounds} < 2: an interval needs at least two rounds; raise --rounds")


def run(options: TogetherBench, say: Say, save: Save = _nowhere) -> dict[str, Any]:
    """Measure, and give the result document; ``say`` is told of progress, ``save`` gets the document after each shape.

    Raises ``ResultsDifferError`` when two arms don't compute the same.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows: list[dict[str, Any]] = []
    told = {name: list(gains) for name, gains in PUBLISHED_GAINS.items()}
    shapes = options.shapes or TOGETHER_SHAPES.on(device.type == "cuda")
    result = document("all", device, rows, asked=list(shapes), published={"source": SOURCE, "gains": told})
    progress = Progress(say, len(shapes), device)
    for shape in shapes:
        progress.case(shape)
        rows.append(_row(options, shape, device, progress))
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        save(result)
    return result


def _row(options: TogetherBench, shape: str, device: torch.device, progress: Progress) -> dict[str, Any]:
    """One shape's row; its model is gone afterwards."""
    card = device.type == "cuda"
    tokens, rounds = options.tokens or TOGETHER_TOKENS.on(card), options.rounds or TOGETHER_ROUNDS.on(card)
    config = shape_config(shape, options.layers or (8 if card else None))
    row = {"shape": shape, "layers": config.num_hidden_layers, "tokens": tokens, "rounds": rounds}
    bench: Bench | None = None
    try:
        bench = Bench.of(config, tokens, options.attention, device)
        return {**row, **_measured(bench, shape, rounds, progress)}
    except InputError as error:
        return {**row, "refused": str(error)}
    except torch.OutOfMemoryError as error:
        return {**row, "refused": out_of_memory(error)}
    finally:
        if bench is not None:
            bench.close()


def _measured(bench: Bench, shape: str, rounds: int, progress: Progress) -> dict[str, Any]:
    steps = bench.arms()
    arms = prove_equal(steps)
    times = measure({name: step.arm() for name, step in steps.items()}, rounds, 1, clock_for(bench.device), progress)
    for name, values in times.items():
        arms[name]["seconds"] = {part: [round(value, 6) for value in series] for part, series in values.items()}
    return {
        "documents": len(bench.lengths),
        "attention": bench.fitted.attention,
        "experts": bench.experts,
        "mixture": shape in MIXTURES,
        "dtype": str(bench.dtype).removeprefix("torch."),
        "arms": arms,
        "left_out": bench.left_out(),
        "comparisons": comparisons(times),
        "notes": [str(note) for note in (*bench.fallbacks(), *bench.notes)],
    }


def comparisons(times: Times) -> list[dict[str, Any]]:
    """Each arm against ``off``, over whole steps; for combinations with the product of their parts' gains.

    ``gain`` is how much more work a second does, with its interval, from what is saved within a round.
    """
    gains = {name: _gain(times, name) for name in times if name != OFF}
    for name, parts in PARTS.items():
        if name in gains:
            factors = [1 + gains[part]["gain"] for part in parts if part in gains]
            gains[name]["product_gain"] = math.prod(factors) - 1
    return list(gains.values())


def _gain(times: Times, name: str) -> dict[str, Any]:
    found = saving(times[OFF][WHOLE], times[name][WHOLE])
    gain = found.gain
    return {
        "arm": name,
        "against": OFF,
        "seconds": found.ours_seconds,
        "saved_seconds": found.saved.median,
        "gain": gain.median,
        "gain_low": gain.low,
        "gain_high": gain.high,
        "published": published(name),
    }


def published(name: str) -> str | None:
    """The published gain of an arm in words; None where there is none."""
    gains = PUBLISHED_GAINS.get(name)
    if gains is None:
        return None
    words = [f"+{gain:.1%}" if gain * 100 % 1 > 1e-6 else f"+{gain:.0%}" for gain in dict.fromkeys(gains)]
    return (" / " if name == PUBLISHED else " to ").join(words)


def csv_rows(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The comparisons of a result document, flat."""
    head = {name: result[name] for name in ("date", "commit", "device")}
    names = ("shape", "layers", "tokens", "documents", "attention")
    return [
        {**head, **{name: row[name] for name in names}, "product_gain": None, **comparison}
        for row in result["rows"]
        for comparison in row.get("comparisons", ())
    ]
