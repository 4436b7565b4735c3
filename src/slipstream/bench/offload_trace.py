"""How much of the copies' time lies under kernels, read from a profiler's trace of one step.

PyTorch's profiler writes a trace with the begin and duration of every kernel and copy on the device. A copy is hidden
for as long as any kernel runs beside it. Gaps between kernels count as not hidden, also where the host is what leaves
them, so that the share says what a user loses at most.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from slipstream.bench.offload_arms import Step

Interval = tuple[float, float]
DIRECTIONS: Mapping[str, str] = {"out": "DtoH", "back": "HtoD"}


@dataclass(frozen=True)
class CopyTime:
    """The copies of one direction in one step."""

    count: int
    seconds: float
    """Their durations, summed."""
    hidden: float
    """The part of it under kernels."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, with the hidden share."""
        share = self.hidden / self.seconds if self.seconds else None
        return {"count": self.count, "seconds": self.seconds, "hidden_share": share}


def traced(step: Step, nbytes: int) -> dict[str, Any] | None:
    """Run the step once under the profiler: its copies of ``nbytes`` in each direction and both; None on a CPU."""
    device = step.bench.device
    if device.type != "cuda":
        step.run()
        return None
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step.run()
        torch.cuda.synchronize(device)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return shares(events, nbytes)


def shares(events: Sequence[Mapping[str, Any]], nbytes: int) -> dict[str, Any]:
    """Each direction's copies in a Chrome trace, and both; microseconds in the trace, seconds here."""
    kernels = merged(_interval(event) for event in events if event.get("cat") == "kernel")
    copies = {name: list(_copies(events, nbytes, mark)) for name, mark in DIRECTIONS.items()}
    copies["both"] = [copy for found in copies.values() for copy in found]
    return {name: _copy_time(found, kernels).to_dict() for name, found in copies.items()}


def _copies(events: Sequence[Mapping[str, Any]], nbytes: int, mark: str) -> Iterable[Interval]:
    for event in events:
        if event.get("cat") == "gpu_memcpy" and mark in event["name"] and event["args"]["bytes"] == nbytes:
            yield _interval(event)


def _interval(event: Mapping[str, Any]) -> Interval:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def _copy_time(copies: Sequence[Interval], kernels: Sequence[Interval]) -> CopyTime:
    seconds = sum(end - begin for begin, end in copies) / 1e6
    return CopyTime(len(copies), seconds, sum(covered(copy, kernels) for copy in copies) / 1e6)


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of intervals, as disjoint ones in order."""
    union: list[Interval] = []
    for begin, end in sorted(intervals):
        if union and begin <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        else:
            union.append((begin, end))
    return union


def covered(one: Interval, union: Sequence[Interval]) -> float:
    """How much of ``one`` lies in disjoint intervals."""
    return sum(max(0.0, min(one[1], end) - max(one[0], begin)) for begin, end in union)
