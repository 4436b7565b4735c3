"""Where one step's time goes: a profile of a single step, reduced to what a figure needs.

PyTorch's profiler writes every kernel, copy and call of one step; here they become a few lanes of merged intervals in
``timeline.json``. One step in a run is profiled, late enough that nothing compiles or allocates any more; it alone is
slowed down by it. Trade-off: one step may not be typical. Alternative: the whole trace, tens of megabytes a step.

    lane       what fills it
    compute    kernels on the device
    copies     copies and fills of device memory
    launches   the host's calls that start them
    waits      the host's calls that wait for the device
"""

import json
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from slipstream.train.run_folder import write_atomically

FILE = "timeline.json"
SAMPLED = 12
"""The step that is profiled, counted from the first of the process."""
MOST = 400
"""Intervals of a lane; closer ones are merged."""
WAITS = ("Synchronize", "cudaMemcpy ", "cudaEventQuery")
LANES = {"kernel": "compute", "gpu_memcpy": "copies", "gpu_memset": "copies", "cpu_op": "operators"}
"""The profiler's categories, by the lane they belong to."""
RUNTIME = ("cuda_runtime", "cuda_driver")

Intervals = list[tuple[float, float]]
"""Start and duration."""


class StepTimeline(TrainerCallback):  # type: ignore[misc]
    """Profiles one step of a training and leaves its timeline in the run's folder."""

    def __init__(self, folder: Path, sampled: int = SAMPLED) -> None:
        """``folder``: where ``timeline.json`` goes; ``sampled``: which step of this process, counted from 1."""
        self.folder, self.sampled = folder, sampled
        self._seen = 0
        self._running: profile | None = None

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Start profiling, if this is the step."""
        self._seen += 1
        if self._seen != self.sampled or not state.is_world_process_zero:
            return
        card = torch.cuda.is_available()
        if card:
            torch.cuda.synchronize()
        self._running = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if card else [])])
        self._running.start()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Stop it, and write what it saw."""
        running, self._running = self._running, None
        if running is None:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        running.stop()
        with tempfile.TemporaryDirectory() as scratch:
            trace = Path(scratch) / "trace.json"
            running.export_chrome_trace(str(trace))
            events = json.loads(trace.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
        found = {"step": state.global_step, **timeline(events)}
        write_atomically(self.folder / FILE, json.dumps(found))


def timeline(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """A trace's events as lanes: milliseconds from the first event, and each lane's share of the time.

    Lanes without events are left out. The profiler's own times are microseconds.
    """
    lanes: dict[str, Intervals] = {}
    for event in events:
        lane = _lane(event)
        if lane is not None:
            lanes.setdefault(lane, []).append((float(event["ts"]) / 1e3, float(event["dur"]) / 1e3))
    if not lanes:
        return {"milliseconds": 0.0, "lanes": {}, "busy": {}}
    begin = min(start for spans in lanes.values() for start, _ in spans)
    length = max(start + span for spans in lanes.values() for start, span in spans) - begin
    merged = {name: _merged([(start - begin, span) for start, span in spans], 0.0) for name, spans in lanes.items()}
    return {
        "milliseconds": round(length, 3),
        "lanes": {name: _few(spans, length) for name, spans in merged.items()},
        "busy": {name: round(sum(span for _, span in spans) / max(length, 1e-9), 4) for name, spans in merged.items()},
        "events": {name: len(spans) for name, spans in lanes.items()},
    }


def _lane(event: Mapping[str, Any]) -> str | None:
    if event.get("ph") != "X" or "ts" not in event or "dur" not in event:
        return None
    category = str(event.get("cat", ""))
    if category in RUNTIME:
        return "waits" if any(word in f"{event.get('name', '')} " for word in WAITS) else "launches"
    return LANES.get(category)


def _merged(spans: Intervals, gap: float) -> Intervals:
    """Overlapping intervals as one, and those less than ``gap`` apart."""
    merged: Intervals = []
    for start, span in sorted(spans):
        if merged and start <= merged[-1][0] + merged[-1][1] + gap:
            first, length = merged[-1]
            merged[-1] = (first, max(length, start + span - first))
        else:
            merged.append((start, span))
    return merged


def _few(spans: Intervals, length: float) -> list[list[float]]:
    """At most so many that a figure can show, closer ones merged."""
    gap = length / 4000
    while len(spans) > MOST:
        spans = _merged(spans, gap)
        gap *= 2
    return [[round(start, 4), round(span, 4)] for start, span in spans]
