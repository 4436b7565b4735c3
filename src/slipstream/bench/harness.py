"""Arms that take turns in one process, timed part by part.

Clocks and neighbours of a machine drift by tens of percent within minutes, so two runs one after the other compare
the minutes. Here every round runs each arm once, in an order that is rotated from round to round, and differences are
taken within a round. What belongs to switching (installing an arm's code, making its batch) is in ``prepare`` and not
timed.

On a card the parts are bounded by CUDA events and the host waits for the device before the first and after the last
only: a wait between forward and backward would take from an arm whose host runs ahead just what it gains.
"""

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from slipstream.bench.progress import Progress
from slipstream.errors import InputError

Times = dict[str, dict[str, list[float]]]
"""Arm → part → seconds, one a round; the part ``WHOLE`` is the sum of an arm's parts."""
WHOLE = "whole"


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Arm:
    """One way to do the job."""

    parts: Mapping[str, Callable[[], None]]
    """What is timed, in this order."""
    prepare: Callable[[], None] = _nothing
    """What comes before, untimed."""


class Clock(Protocol):
    """Times the parts of one run."""

    def start(self) -> None:
        """Begin the first part."""

    def mark(self) -> None:
        """End a part and begin the next."""

    def seconds(self) -> list[float]:
        """Seconds of each part, once all are done."""


class HostClock:
    """Wall-clock time, for work on the CPU."""

    def __init__(self) -> None:
        self._ticks: list[float] = []

    def start(self) -> None:
        """Begin the first part."""
        self._ticks = [time.perf_counter()]

    def mark(self) -> None:
        """End a part and begin the next."""
        self._ticks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Seconds of each part."""
        return [end - begin for begin, end in zip(self._ticks[:-1], self._ticks[1:], strict=True)]


class CudaClock:
    """Time on a card's stream: each part reaches from the end of the one before to its own last kernel."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []

    def start(self) -> None:
        """Wait until the device is idle, then begin the first part."""
        torch.cuda.synchronize(self._device)
        self._events = []
        self.mark()

    def mark(self) -> None:
        """End a part and begin the next; does not wait."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        self._events.append(event)

    def seconds(self) -> list[float]:
        """Wait for the device and give the seconds of each part."""
        torch.cuda.synchronize(self._device)
        pairs = zip(self._events[:-1], self._events[1:], strict=True)
        return [begin.elapsed_time(end) / 1e3 for begin, end in pairs]


def clock_for(device: torch.device) -> Clock:
    """The clock that sees this device's work."""
    return CudaClock(device) if device.type == "cuda" else HostClock()


def measure(arms: Mapping[str, Arm], rounds: int, warmup: int, clock: Clock, progress: Progress | None = None) -> Times:
    """Run each arm once a round, ``warmup`` rounds untimed and then ``rounds`` timed, in rotating order.

    ``progress`` is told how long the first round took.
    """
    if rounds < 2:
        raise InputError(f"rounds {rounds} < 2: an interval needs at least two rounds; raise --rounds")
    names = list(arms)
    times: Times = {name: {part: [] for part in (*arms[name].parts, WHOLE)} for name in names}
    began = time.monotonic()
    for number in range(warmup + rounds):
        if number == 1 and progress is not None:
            progress.rounds(len(names), warmup + rounds - 1, time.monotonic() - began)
        gc.collect()
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            seconds = measure_once(arms[name], clock)
            if number >= warmup:
                for part, value in seconds.items():
                    times[name][part].append(value)
    return times


def measure_once(arm: Arm, clock: Clock) -> dict[str, float]:
    """Prepare and run an arm once: seconds of each part, and of the whole."""
    arm.prepare()
    collects = gc.isenabled()
    gc.disable()
    try:
        clock.start()
        for run in arm.parts.values():
            run()
            clock.mark()
        seconds = clock.seconds()
    finally:
        if collects:
            gc.enable()
    return {**dict(zip(arm.parts, seconds, strict=True)), WHOLE: sum(seconds)}
