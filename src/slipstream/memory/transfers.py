"""Copies between a device and the host that run beside its kernels, and the order they keep with them.

One stream carries copies out of the device, another brings them back; each copy forks from the current stream by an
event, and the current stream joins the copy by another where its result is needed. Nothing here waits on the host
(but for ``Mark.wait``, which is for giving memory back), and nothing depends on the host running ahead, so all of it
can be captured in a CUDA graph. The allocator is told nothing (``record_stream`` delays reuse by the host's clock, and
a graph has none): whoever owns a tensor that a copy touches keeps it until the current stream has joined the copy.

On the CPU a copy is done when the call returns. The seam is there so that the same logic above it is tested without a
card, and with copies that are put off until somebody joins them.
"""

from collections.abc import Iterable
from typing import NamedTuple, Protocol

import torch

HOST_REGISTER_PORTABLE = 1
"""CUDA's flag that makes pinned memory count as pinned for every device."""


class DeviceMemory(NamedTuple):
    """Bytes of a device's memory, as this process sees it."""

    usable: int
    """What PyTorch holds and what it can still get, within its share of the card."""
    allocated: int
    """What tensors take now."""
    peak: int
    """The most they took since the count was last reset."""


class Mark(Protocol):
    """The end of one copy."""

    def wait(self) -> None:
        """Let the host wait for it."""


class Transfers(Protocol):
    """The copies of one device. "Current" is the calling thread's current stream on that device."""

    def out(self, source: torch.Tensor, host: torch.Tensor, after: Iterable[Mark | None]) -> Mark:
        """Copy to the host once all current work and the copies ``after`` are done; both tensors flat, same dtype."""

    def back(self, host: torch.Tensor, slot: torch.Tensor, after: Iterable[Mark | None]) -> Mark:
        """Copy to the device likewise; ``slot`` was allocated on the current stream."""

    def join(self, mark: Mark) -> None:
        """Let current work to come wait for a copy."""

    def capturing(self) -> bool:
        """Whether the current stream is being captured in a graph."""

    def finish(self) -> None:
        """Let the host wait until the device is idle: for giving memory back, never in a step."""

    def memory(self) -> DeviceMemory | None:
        """The device's memory as it stands; None where reload buffers compete for nothing scarce."""

    def forget_peak(self) -> None:
        """Count the peak from here on, for everybody who reads it in this process."""

    def pin(self, memory: torch.Tensor) -> bool:
        """Lock host memory into place; false where the system refuses."""

    def unpin(self, memory: torch.Tensor) -> None:
        """Undo a successful ``pin``."""


class _Done:
    """The end of a copy that is over already."""

    def wait(self) -> None:
        """Nothing to wait for."""


class HostTransfers:
    """Copies within the host's memory: done at once."""

    def out(self, source: torch.Tensor, host: torch.Tensor, after: Iterable[Mark | None]) -> Mark:
        """Copy now."""
        host.copy_(source)
        return _Done()

    def back(self, host: torch.Tensor, slot: torch.Tensor, after: Iterable[Mark | None]) -> Mark:
        """Copy now."""
        slot.copy_(host)
        return _Done()

    def join(self, mark: Mark) -> None:
        """Nothing to wait for."""

    def capturing(self) -> bool:
        """Never."""
        return False

    def finish(self) -> None:
        """Nothing to wait for."""

    def memory(self) -> DeviceMemory | None:
        """None: a buffer in the host's memory is no dearer than where its contents wait."""
        return None

    def forget_peak(self) -> None:
        """No peak is counted."""

    def pin(self, memory: torch.Tensor) -> bool:
        """No device reads this memory, so there is nothing to lock: counts as done."""
        return True

    def unpin(self, memory: torch.Tensor) -> None:
        """Nothing to undo."""


class _CudaMark:
    """The end of a copy on a stream, and whether it belongs to a graph."""

    def __init__(self, stream: torch.cuda.Stream, captured: bool) -> None:
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.event.record(stream)
        self.captured = captured

    def wait(self) -> None:
        """A captured event never comes to pass by itself; who replays graphs waits for the replay."""
        if not self.captured:
            self.event.synchronize()


class CudaTransfers:
    """Copies of one card, on two streams of their own."""

    def __init__(self, device: torch.device) -> None:
        """``device`` has an index. The streams come from PyTorch's pool and go back with this object."""
        self._device = device
        self._out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._back = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def out(self, source: torch.Tensor, host: torch.Tensor, after: Iterable[Mark | None]) -> Mark:
        """See ``Transfers``."""
        return self._copy(self._out, source, host, after)

    def back(self, host: torch.Tensor, slot: torch.Tensor, after: Iterable[Mark | None]) -> Mark:
        """See ``Transfers``."""
        return self._copy(self._back, host, slot, after)

    def _copy(
        self, stream: torch.cuda.Stream, source: torch.Tensor, target: torch.Tensor, after: Iterable[Mark | None]
    ) -> _CudaMark:
        stream.wait_stream(torch.cuda.current_stream(self._device))
        captured = self.capturing()
        for mark in after:
            _order(stream, mark, captured)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        return _CudaMark(stream, captured)

    def join(self, mark: Mark) -> None:
        """See ``Transfers``."""
        _order(torch.cuda.current_stream(self._device), mark, self.capturing())

    def capturing(self) -> bool:
        """See ``Transfers``."""
        with torch.cuda.device(self._device):
            return torch.cuda.is_current_stream_capturing()

    def finish(self) -> None:
        """See ``Transfers``."""
        torch.cuda.synchronize(self._device)

    def memory(self) -> DeviceMemory | None:
        """See ``Transfers``; asks the driver and the allocator, not the device."""
        free, total = torch.cuda.mem_get_info(self._device)
        stats = torch.cuda.memory_stats(self._device)
        reserved = int(stats["reserved_bytes.all.current"])
        share = int(total * torch.cuda.get_per_process_memory_fraction(self._device))
        return DeviceMemory(
            usable=reserved + max(0, min(free, share - reserved)),
            allocated=int(stats["allocated_bytes.all.current"]),
            peak=int(stats["allocated_bytes.all.peak"]),
        )

    def forget_peak(self) -> None:
        """See ``Transfers``; asks the allocator, not the device."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def pin(self, memory: torch.Tensor) -> bool:
        """Register the pages with CUDA: exact sizes, where PyTorch's own pinned allocator rounds to powers of two."""
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if int(cudart.cudaHostRegister(memory.data_ptr(), memory.numel(), HOST_REGISTER_PORTABLE)) == 0:
            return True
        self._forget_error()
        return False

    def _forget_error(self) -> None:
        """CUDA hands a failed call's error to whoever asks next; that must not be an innocent kernel of the step."""
        try:
            torch.zeros(1, device=self._device)
        except RuntimeError:  # the error meant, and it is dealt with: the caller goes on with pageable memory
            return

    def unpin(self, memory: torch.Tensor) -> None:
        """See ``Transfers``."""
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = int(cudart.cudaHostUnregister(memory.data_ptr()))
        if status != 0:
            raise RuntimeError(f"host memory could not be unpinned: CUDA error {status}")


def _order(stream: torch.cuda.Stream, mark: Mark | None, captured: bool) -> None:
    """Let ``stream`` wait for ``mark``, unless a graph's border lies between them.

    A capture begins with an idle device, and a replay follows what the current stream did before it, so that work on
    either side of the border is in order as it is; CUDA refuses to have it said by an event.
    """
    assert mark is None or isinstance(mark, _CudaMark)
    if mark is not None and mark.captured == captured:
        stream.wait_event(mark.event)


def transfers_for(device: torch.device) -> Transfers:
    """The copies of this device."""
    return CudaTransfers(device) if device.type == "cuda" else HostTransfers()
