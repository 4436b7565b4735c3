"""The two quantities of the reload formulas, measured alone: c, a copy of one layer's input, and g, one layer's work.

c is the copy between pinned host memory and the device with nothing beside it. g comes from a step whose inputs never
leave: the time between the beginnings of two neighbouring layers' recomputes, on the device's own clock.
"""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from statistics import median
from typing import Any

import torch

from slipstream.bench.harness import clock_for
from slipstream.bench.offload_arms import Bench, Row, Step
from slipstream.cost.offload import Split
from slipstream.errors import InputError
from slipstream.memory.checkpointing import restore_checkpointing
from slipstream.memory.host_buffers import page_aligned
from slipstream.memory.transfers import transfers_for

COPIES = 8


def copy_seconds(nbytes: int, device: torch.device) -> dict[str, float]:
    """Median seconds of one copy ``out`` of the device and one ``back``, pinned. ``InputError`` if pinning fails."""
    host, slot = page_aligned(nbytes), torch.zeros(nbytes, dtype=torch.uint8, device=device)
    transfers = transfers_for(device)
    if not transfers.pin(host):
        raise InputError(f"{nbytes:,} bytes of host memory could not be pinned; raise the limit on locked memory")
    try:
        return {"out": _timed(slot, host, device), "back": _timed(host, slot, device)}
    finally:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        transfers.unpin(host)


def _timed(source: torch.Tensor, target: torch.Tensor, device: torch.device) -> float:
    clock = clock_for(device)
    clock.start()
    for _ in range(COPIES + 1):
        target.copy_(source, non_blocking=True)
        clock.mark()
    return median(clock.seconds()[1:])


class _Begins:
    """Remembers when each layer's recompute began, on the device's clock."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.marks: list[Any] = []

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return nullcontext(), self._recompute()

    @contextmanager
    def _recompute(self) -> Iterator[None]:
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())
        yield

    def gaps(self) -> list[float]:
        """Seconds between the marks."""
        pairs = zip(self.marks[:-1], self.marks[1:], strict=True)
        if self._device.type != "cuda":
            return [end - begin for begin, end in pairs]
        torch.cuda.synchronize(self._device)
        return [begin.elapsed_time(end) / 1e3 for begin, end in pairs]


def layer_backward_seconds(bench: Bench, row: Row, passes: int = 1) -> float:
    """g: median seconds of one layer's recompute and backward, over ``passes`` steps after one that warms up."""
    begins = _Begins(bench.device)
    undo = bench.checkpointing(Split(0, bench.layers, 0), context_fn=begins.contexts)
    step, gaps = Step(bench, row, undo.put), []
    try:
        for number in range(passes + 1):
            begins.marks.clear()
            step.gradient()
            assert len(begins.marks) == bench.layers
            gaps += begins.gaps() if number else []
    finally:
        restore_checkpointing(undo)
    return median(gaps)
