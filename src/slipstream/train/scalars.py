"""Scalars from the device to the host, without a sync.

Why: a step's loss lives on the device, and asking for it (``.item()``) makes the host stand until the device has caught
up, every step. Here it is copied to pinned host memory behind the step's own work, with an event that says when it has
arrived. Trade-off: values come some steps late. Alternative: keep them on the device and fetch many at a time, which
shows nothing in between and loses more in a crash.

Whose turn a slot is, with ``depth`` 4 after step 6 was started:

    slot     0       1       2        3
    step     5       6       3        4       3 is the oldest: its event is asked first, it is released first,
    event  flying  flying  arrived  flying    and only then may step 7 have slot 2
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """The part of ``torch.cuda.Event`` that the ring uses."""

    def record(self, stream: Any = None) -> None:
        """Marks the work queued so far."""

    def query(self) -> bool:
        """Whether that work is done."""

    def synchronize(self) -> None:
        """Waits for it."""


class ScalarRing:
    """A fixed ring of pinned host slots, each with an event: device scalars arrive without a sync.

    Pinned memory is allocated once (an allocation costs milliseconds and may sync); a slot is taken again only after
    ``release``. Slots are taken and released in order.
    """

    def __init__(
        self, width: int, depth: int = 64, make_event: Callable[[], Event] = torch.cuda.Event, *, pin: bool = True
    ) -> None:
        """``width`` scalars a slot; another ``make_event`` without ``pin`` runs the ring on a machine without CUDA."""
        self._host = torch.zeros(depth, width, dtype=torch.float32, pin_memory=pin)
        self._events = [make_event() for _ in range(depth)]
        self._next = 0
        self._held = 0

    @property
    def full(self) -> bool:
        """Whether every slot is held."""
        return self._held == len(self._events)

    def start(self, scalars: Sequence[Tensor]) -> int:
        """Queues the copies of 0-d tensors behind the work on their device's current stream; returns their slot."""
        assert not self.full, "the oldest slot must be released first"
        slot, self._next = self._next, (self._next + 1) % len(self._events)
        self._held += 1
        for column, scalar in enumerate(scalars):
            self._host[slot, column].copy_(scalar.detach().reshape(()), non_blocking=True)
        device = next((scalar.device for scalar in scalars if scalar.is_cuda), None)
        self._events[slot].record(None if device is None else torch.cuda.current_stream(device))
        return slot

    def arrived(self, slot: int) -> bool:
        """Whether the slot's values are on the host. Doesn't wait."""
        return self._events[slot].query()

    def wait(self, slot: int) -> None:
        """Waits until they are."""
        self._events[slot].synchronize()

    def release(self, slot: int) -> list[float]:
        """The slot's values, which must have arrived; the slot is free again."""
        self._held -= 1
        values: list[float] = self._host[slot].tolist()
        return values
