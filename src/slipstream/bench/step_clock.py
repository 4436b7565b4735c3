"""The time of a trainer's steps without making any of them wait.

A mark is set at the end of each step, on a card an event on its stream, and what lies between two marks is a step:
loader, forward, backward, clipping, update and scheduler. The host is free to run ahead, as it is in a training that
nobody times. Waiting for the device at both ends of a step would be simpler, and adds all that the host then issues
while the device is idle: 54 ms instead of 43 for a captured step of Qwen3-0.6B on an H200.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import TrainerCallback

from slipstream.bench.harness import clock_for


class StepClock(TrainerCallback):  # type: ignore[misc]
    """A callback for any trainer of transformers; it waits for the device once, at the end of the first step."""

    def __init__(self, device: torch.device, recordings: Callable[[], int] = lambda: 0) -> None:
        """``recordings``: how many graphs the trainer has recorded so far, for ``recorded``."""
        self.first = 0.0
        """When the first step was done (``time.perf_counter``)."""
        self._clock, self._recordings, self._seen = clock_for(device), recordings, list[int]()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Mark the end of a step."""
        if self._seen:
            self._clock.mark()
        else:
            self._clock.start()
            self.first = time.perf_counter()
        self._seen.append(self._recordings())

    def seconds(self) -> list[float]:
        """Seconds of each step but the first, once the device is done."""
        return self._clock.seconds()

    def recorded(self) -> list[bool]:
        """Whether a graph was recorded in each of these steps: such a step took longer than others ever will."""
        return [after > before for before, after in zip(self._seen[:-1], self._seen[1:], strict=True)]
