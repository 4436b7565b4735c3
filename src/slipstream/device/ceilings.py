"""A device's ceilings, measured once in a few seconds and kept on disk.

A prediction needs what this machine does, not what its data sheet says: power limits, drivers and busy neighbours make
tens of percent. Each ceiling is the best of several short timings, since everything that disturbs makes it slower. They
are kept under the device's name, driver, torch version and dtype; another of these measures anew, and ``fresh`` does.
A CPU is measured each time, in under a second, and the best is kept: what else runs on it makes rates four times lower
for minutes, and a prediction from such a minute would be wrong ever after.

    matmul      a large product in the dtype that layers compute in
    copy        tensor to tensor on the device; read and written bytes count
    link        pinned host memory to the device and back, and pageable to the device
    launch      host seconds of one small kernel launched from Python (of one small operator on a CPU)
    sync        host seconds of asking an idle device for a number
"""

import contextlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from slipstream.cost.ceilings import Ceilings
from slipstream.cost.hardware import compute_dtype, describe, free_bytes
from slipstream.data.cache import digest
from slipstream.places import cache_folder

FORMAT = 1
"""Raised whenever ceilings are measured differently; it is part of the key."""
SECONDS = 0.25
"""About how long one ceiling is timed."""
SMALL, LARGE = 2**20, 2**30


def ceilings(torch_device: "torch.device | str", driver: str | None, *, fresh: bool = False) -> Ceilings:
    """The device's ceilings: from disk if they were measured before, else measured now and kept.

    ``driver``: its version, part of the key. ``fresh``: measure in any case. A cache that cannot be written is no
    error: they are measured again next time.
    """
    device = torch.device(torch_device)
    place = _place(device, driver)
    kept = None if fresh else _read(place)
    if kept is not None and device.type == "cuda":
        return kept
    measured = measure(device) if kept is None else better(kept, measure(device))
    _keep(place, measured)
    return measured


def better(one: Ceilings, other: Ceilings) -> Ceilings:
    """The best of two measurements of one device, rate by rate."""
    rates = {name: max(getattr(one, name), getattr(other, name)) for name in ("matmul", "copy")}
    return replace(one, **rates, launch=min(one.launch, other.launch), sync=min(one.sync, other.sync))


def measure(torch_device: "torch.device | str", seconds: float = SECONDS) -> Ceilings:
    """Measure every ceiling of the device, each for about ``seconds``.

    A card's memory is given back and its peak counted anew, so that what is run later does not show this.
    """
    device = torch.device(torch_device)
    described = describe(device)
    dtype = compute_dtype(described)
    card = device.type == "cuda"
    free = free_bytes(device)
    size = max(SMALL, min(LARGE if card else 2**27, free // 16))
    to_device, to_host, pageable = _links(device, size // 4, seconds) if card else (None, None, None)
    found = Ceilings(
        dtype=dtype,
        matmul=_matmul(device, getattr(torch, dtype), free, seconds),
        copy=_copy(device, size, seconds),
        to_device=None if described.unified_memory else to_device,
        to_host=None if described.unified_memory else to_host,
        pageable=None if described.unified_memory else pageable,
        launch=_launch(device),
        sync=_sync(device) if card else 0.0,
        source="measured",
    )
    if card:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return found


def _matmul(device: torch.device, dtype: torch.dtype, free: int, seconds: float) -> float:
    """Operations a second of the largest square product of these that the device has room for and does in time."""
    best = 0.0
    for side in (8192, 4096, 2048) if device.type == "cuda" else (1024,):
        if 4 * side * side * dtype.itemsize > free:
            continue
        a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        out = torch.empty_like(a)
        best = max(best, 2.0 * side**3 / _best(partial(torch.mm, a, b, out=out), device, seconds))
    return best


def _copy(device: torch.device, size: int, seconds: float) -> float:
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    return 2.0 * size / _best(lambda: target.copy_(source), device, seconds)


def _links(device: torch.device, size: int, seconds: float) -> tuple[float, float, float]:
    """Bytes a second: pinned to the device, back, and pageable to the device."""
    there = torch.zeros(size, dtype=torch.uint8, device=device)
    pageable = torch.zeros(size, dtype=torch.uint8)
    pinned = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
    moves: list[Callable[[], Any]] = [
        lambda: there.copy_(pinned, non_blocking=True),
        lambda: pinned.copy_(there, non_blocking=True),
        lambda: there.copy_(pageable),
    ]
    up, down, slow = (size / _best(move, device, seconds) for move in moves)
    return up, down, slow


def _launch(device: torch.device, launches: int = 500) -> float:
    """Host seconds to issue one small operator: the best of five series, so short that no queue fills up."""
    small = torch.zeros(8, device=device)
    best = float("inf")
    for _ in range(5):
        _wait(device)
        began = time.perf_counter()
        for _ in range(launches):
            small.add_(1.0)
        best = min(best, (time.perf_counter() - began) / launches)
    _wait(device)
    return best


def _sync(device: torch.device) -> float:
    small = torch.zeros((), device=device)
    return _best(small.item, device, SECONDS / 5)


def _best(run: Callable[[], Any], device: torch.device, seconds: float) -> float:
    """The shortest of several timings, each of so many runs that reading the clock does not count; two warm up."""
    for _ in range(2):
        run()
    once = _timed(run, device, 1)
    runs = max(1, min(50, int(seconds / 5 / max(once, 1e-7))))
    times = max(3, min(20, int(seconds / max(once * runs, 1e-7))))
    return min(_timed(run, device, runs) for _ in range(times))


def _timed(run: Callable[[], Any], device: torch.device, runs: int) -> float:
    _wait(device)
    began = time.perf_counter()
    for _ in range(runs):
        run()
    _wait(device)
    return (time.perf_counter() - began) / runs


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _place(device: torch.device, driver: str | None) -> Path:
    """The file of this device's ceilings."""
    described = asdict(describe(device))
    threads = torch.get_num_threads() if device.type == "cpu" else None
    key = digest(FORMAT, described, driver, str(torch.__version__), torch.version.cuda, threads)
    return cache_folder("ceilings") / f"{key}.json"


def _read(place: Path) -> Ceilings | None:
    """The ceilings in a file; None where there is none, or not a whole one."""
    try:
        values = json.loads(place.read_text(encoding="utf-8"))
        found = Ceilings(**values)
    except (OSError, ValueError, TypeError):
        return None
    numbers = (found.matmul, found.copy, found.launch)
    return found if all(isinstance(value, float) and value > 0 for value in numbers) else None


def _keep(place: Path, measured: Ceilings) -> None:
    scratch = place.with_suffix(f".{os.getpid()}")
    # a full or read-only disk: measuring again costs seconds, failing would cost the run
    with contextlib.suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_text(json.dumps(asdict(measured)), encoding="utf-8")
        scratch.replace(place)
