"""A device whose copies are put off until somebody joins them: what the CPU does at once, done as late as a card may.

A reload that is used before it was joined gives NaN; a copy out whose source was let go before it was joined is an
error; a host buffer that is overwritten before it was read gives wrong values.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from slipstream.memory.transfers import DeviceMemory, Mark

NAN_BYTE = 0xFF
"""Every floating-point format reads a stretch of these as NaN."""


class LateMark:
    def __init__(self, run: Callable[[], None], after: Iterable[Any]) -> None:
        self._run: Callable[[], None] | None = run
        self.after = [mark for mark in after if mark is not None]

    @property
    def done(self) -> bool:
        return self._run is None

    def wait(self) -> None:
        if self._run is not None:
            for mark in self.after:
                mark.wait()
            run, self._run = self._run, None
            run()


class LateTransfers:
    """Counts what it is asked for; ``memory_now``, ``graph`` and ``pinnable`` are what it answers."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.log: list[str] = []
        self.copies: list[LateMark] = []
        self.memory_now: DeviceMemory | None = None
        self.graph = False
        self.pinnable = True
        self.pinned: dict[int, int] = {}

    def out(self, source: torch.Tensor, host: torch.Tensor, after: Iterable[Mark | None]) -> LateMark:
        storage, offset, size, dtype = source.untyped_storage(), source.storage_offset(), source.numel(), source.dtype

        def run() -> None:
            assert torch._C._storage_Use_Count(storage._cdata) > 1, "the source was let go before its copy was joined"
            host.copy_(torch.empty(0, dtype=dtype).set_(storage, offset, (size,)))

        self.log.append("out")
        return self._late(run, after)

    def back(self, host: torch.Tensor, slot: torch.Tensor, after: Iterable[Mark | None]) -> LateMark:
        slot.view(torch.uint8).fill_(NAN_BYTE)

        def run() -> None:
            slot.copy_(host)

        self.log.append("back")
        return self._late(run, after)

    def _late(self, run: Callable[[], None], after: Iterable[Any]) -> LateMark:
        mark = LateMark(run, after)
        self.copies.append(mark)
        return mark

    def join(self, mark: Mark) -> None:
        self.log.append("join")
        mark.wait()

    def capturing(self) -> bool:
        return self.graph

    def finish(self) -> None:
        self.log.append("finish")

    def memory(self) -> DeviceMemory | None:
        return self.memory_now

    def forget_peak(self) -> None:
        assert self.memory_now is not None
        self.log.append("forget")
        self.memory_now = self.memory_now._replace(peak=self.memory_now.allocated)

    def pin(self, memory: torch.Tensor) -> bool:
        if self.pinnable:
            self.pinned[memory.data_ptr()] = memory.numel()
        return self.pinnable

    def unpin(self, memory: torch.Tensor) -> None:
        del self.pinned[memory.data_ptr()]
