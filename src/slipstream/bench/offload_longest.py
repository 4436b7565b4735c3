"""The longest rows that fit a card of a given size, with their layer inputs on the host and without.

The size is a cap on what PyTorch may allocate, so that a large card answers for a smaller one. A try is one forward and
backward of a row; memory grows in a straight line with the tokens (no attention choice here holds T² anything), so two
rows predict the longest one, and tries go on from there. They are rows of short documents, whose memory is that of one
long document and whose attention is not: half a million tokens in one take minutes. Only the length that was found is
run as one document. MLPs run in tiles, as training has them on rows like these.
"""

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.bench.harness import clock_for, measure_once
from slipstream.bench.no_memory import out_of_memory
from slipstream.bench.offload_arms import DOUBLE, RECOMPUTE, Bench, Mode, Row, Step, steps
from slipstream.bench.progress import Progress, Say
from slipstream.bench.shapes import long_documents
from slipstream.cost.tiles import TILE
from slipstream.errors import InputError
from slipstream.model.tiled_mlp import tiled_mlps

ROW_TOKENS = 256_000
PROBES = (2 * TILE, 4 * TILE)
"""Rows from whose peaks the longest is predicted; longer than a tile, from where on memory is a straight line."""
STEP = 2_048
"""Tokens that tries are rounded to."""
NEAR = 1.02
"""How much longer a row must be to be worth another try."""
FARTHER = 4
LONGER_TRIES, TRIES = 8, 4
"""Rows of short documents beyond the probes; single documents."""
LONGEST_DOCUMENT = 8192
TINY_PROBES = (64, 128)
TINY_TILE = 32
NOT_MEASURED = "nothing was measured: without a card there is no memory to fill"


@dataclass(frozen=True, kw_only=True)
class Longest:
    """Which rows are to fit, and into what."""

    shape: str
    mode: Mode
    packed: tuple[int, ...]
    """Tokens of packed rows, each tried with each arm."""
    document: bool
    """Whether the longest single document is looked for, too."""
    arms: tuple[str, ...] = (DOUBLE, RECOMPUTE)
    cap_bytes: int
    host_limit: float | None

    def tries(self) -> list[tuple[str, int | None]]:
        """Arm and tokens of each row of the results, in their order; None for the longest document."""
        packed: list[tuple[str, int | None]] = [(arm, count) for count in self.packed for arm in self.arms]
        return packed + [(arm, None) for arm in self.arms if self.document]

    def names(self) -> list[str]:
        """Each of them in words."""
        return [
            f"longest: {self.shape}, {arm}, {'the longest single document' if n is None else f'a row of {n:,} tokens'}"
            for arm, n in self.tries()
        ]


def rows(config: Any, wanted: Longest, device: torch.device, progress: Progress) -> Iterator[dict[str, Any]]:
    """A row for each arm and packed row, and for each arm its longest single document if asked for."""
    with capped(device, wanted.cap_bytes):
        bench = Bench.of(config, device, wanted.mode, TILE if device.type == "cuda" else TINY_TILE)
        try:
            for name, (arm, count) in zip(wanted.names(), wanted.tries(), strict=True):
                progress.case(name)
                head = _head(bench, wanted.shape, wanted.cap_bytes)
                if count is None:
                    found = longest_document(bench, arm, wanted.cap_bytes, wanted.host_limit, progress.say)
                    yield {**head, "row": "one document", **found}
                else:
                    yield {**head, "row": "packed", **attempt(bench, arm, count, wanted.host_limit)}
        finally:
            bench.close()


def packed_rows(device: torch.device) -> tuple[int, ...]:
    """The packed rows to try where none are asked for."""
    return (ROW_TOKENS,) if device.type == "cuda" else (TINY_PROBES[-1],)


@contextmanager
def capped(device: torch.device, cap_bytes: int) -> Iterator[None]:
    """PyTorch may allocate this much of the device; nothing to do for a CPU."""
    if device.type != "cuda":
        yield
        return
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, cap_bytes / total), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def attempt(
    bench: Bench, arm: str, tokens: int, host_limit: float | None, longest: int = LONGEST_DOCUMENT
) -> dict[str, Any]:
    """One forward and backward of a row; whether it fitted, its peak and its seconds."""
    documents = long_documents(tokens, longest, min(40_000, bench.base.config.vocab_size))
    found: dict[str, Any] = {"arm": arm, "tokens": tokens, "documents": len(documents)}
    try:
        row = Row.of(documents, tokens, bench.device)
        with steps(bench, row, (arm,), host_limit) as arms:
            found |= _once(arms[arm])
        return {**found, "fits": True}
    except torch.OutOfMemoryError as error:
        reason = out_of_memory(error)
    except InputError as error:  # the host's memory is too small
        reason = str(error)
    bench.optimizer.zero_grad(set_to_none=True)
    gc.collect()  # what the failed step's traceback held
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()
    return {**found, "fits": False, "reason": reason}


def _once(step: Step) -> dict[str, Any]:
    seconds = measure_once(step.arm(), clock_for(step.bench.device))
    return {"seconds": seconds, "peak_bytes": step.peaks[-1] if step.peaks else None}


def longest_document(bench: Bench, arm: str, cap_bytes: int, host_limit: float | None, say: Say) -> dict[str, Any]:
    """The longest single document that went through, and all rows that were tried."""
    card = bench.device.type == "cuda"
    tried: list[dict[str, Any]] = []

    def fits(tokens: int, longest: int = LONGEST_DOCUMENT) -> bool:
        tried.append(attempt(bench, arm, tokens, host_limit, longest))
        say(f"  {tokens:,} tokens in {tried[-1]['documents']} documents: {_ended(tried[-1])}")
        return bool(tried[-1]["fits"])

    probed = [fits(count) for count in (PROBES if card else TINY_PROBES)]
    if card and all(probed):
        _approach(tried, fits, cap_bytes)
    tokens = max((one["tokens"] for one in tried if one["fits"]), default=0)
    for _ in range(TRIES if tokens else 0):
        if fits(tokens, tokens):
            break
        tokens = max(PROBES[-1], tokens * 95 // 100 // STEP * STEP)
    return {**tried[-1], "tried": tried}


def _approach(tried: list[dict[str, Any]], fits: Callable[[int], bool], cap_bytes: int) -> None:
    """Try longer rows until the next would be within ``NEAR`` of one that fitted.

    What a short row's peak is made of (a tile at work) is not what a long one's is, so each try goes at most
    ``FARTHER`` times as far as the last and the line is drawn anew through the longest two.
    """
    too_long: float = float("inf")
    for _ in range(LONGER_TRIES):
        fitted = [(one["tokens"], one["peak_bytes"]) for one in tried if one["fits"]]
        longest = fitted[-1][0]
        guess = min(predicted_tokens(fitted[-2:], cap_bytes), FARTHER * longest)
        if guess >= too_long:
            guess = int(longest + too_long) // 2 // STEP * STEP
        if guess <= longest * NEAR:
            return
        if not fits(guess):
            too_long = guess


def _ended(found: dict[str, Any]) -> str:
    if not found["fits"]:
        return f"too much: {found['reason'][:120]}"
    return f"{found['seconds']['whole']:.1f} s, peak {(found['peak_bytes'] or 0) / 1e9:.1f} GB"


def predicted_tokens(peaks: list[tuple[int, int]], cap_bytes: int) -> int:
    """Tokens at which the straight line through two (tokens, peak bytes) meets the cap, rounded down."""
    (few, low), (many, high) = peaks
    slope = (high - low) / (many - few)
    return max(many, int(few + (cap_bytes - low) / slope) // STEP * STEP)


def _head(bench: Bench, shape: str, cap_bytes: int) -> dict[str, Any]:
    told = {} if bench.device.type == "cuda" else {"not_measured": NOT_MEASURED}
    return {
        **told,
        "part": "longest",
        "shape": shape,
        "layers": bench.layers,
        "mode": bench.mode,
        "cap_bytes": cap_bytes,
        "tiles": tiled_mlps(bench.base)[0].tokens,
        "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "as PyTorch sets it"),
    }
