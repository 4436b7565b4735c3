"""Host memory for what leaves the device: buffers of exact size, pinned once and reused over steps.

Pinning costs milliseconds a buffer, so buffers are pooled; PyTorch's own pinned allocator would round each to a power
of two (1.7 times the bytes asked for, with the layer inputs of a common row), so pages are taken from the system as
they are and registered. What a pool may take is a budget given from outside: what is free, not what the machine has.
Where the system refuses to pin, the pool goes on with pageable memory, says so once, and copies are slower.

    take ──► a copy out fills it ──► copies back read it, as often as the graph is run backward ──► give (graph freed)
      ▲                                                                                                │
      └────────────── idle, under (device, dtype, bytes); overwritten only after ``busy`` ◄────────────┘

A buffer taken while a CUDA graph is captured is named in that graph, and every replay writes there. From then on it is
lent to captures only: each graph here holds a whole forward and backward, so that what one replay leaves in it
is no loss to the next. Passes outside graphs never see it until ``release_graphs``.

Between trainings a pool rests: what is idle goes back to the system, what is in use when it is given. The next ``take``
ends that, so that whoever trains again pays for the pinning again, and nobody has to say that he begins.
"""

import mmap
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from slipstream.cost.sizes import size_text
from slipstream.decision import Decision
from slipstream.memory.transfers import Mark, Transfers


class BufferKey(NamedTuple):
    """What makes one buffer as good as another."""

    device: torch.device
    dtype: torch.dtype
    nbytes: int


@dataclass(eq=False)
class HostBuffer:
    """A stretch of host memory."""

    key: BufferKey
    memory: torch.Tensor
    """uint8 [nbytes]."""
    transfers: Transfers
    pinned: bool
    in_graph: bool = False
    """Whether a captured graph names it."""
    busy: list[Mark] = field(default_factory=list)
    """Copies that may not be done yet."""
    unpin: "weakref.finalize[..., HostBuffer] | None" = None
    """Unlocks the pages; runs by itself where a pool is dropped unclosed, as pages that stay locked can't be again."""

    def flat(self) -> torch.Tensor:
        """The memory as a flat tensor of its dtype."""
        return self.memory.view(self.key.dtype)


class HostPool:
    """Buffers up to a budget. ``give`` may be called from any thread; the rest by the thread that trains."""

    def __init__(self, budget: int, decide: Callable[[Decision], None]) -> None:
        """``budget``: bytes. ``decide`` is told what turned out otherwise than planned."""
        self.budget = budget
        self.held = 0
        """Bytes taken from the system."""
        self.refused = ""
        """How the system refused memory within the budget; from then on nothing more is asked of it."""
        self._decide = decide
        self._idle: dict[BufferKey, list[HostBuffer]] = {}
        self._returned: deque[HostBuffer] = deque()
        self._pinning = True
        self._closed = self._resting = False
        self._graphs: list[HostBuffer] = []
        self._capturing = False

    def take(self, key: BufferKey, transfers: Transfers) -> HostBuffer | None:
        """A buffer of this kind, or None where the budget has no room for it.

        Raises ``RuntimeError`` during a capture, when none can be made, if none is idle.
        """
        self._resting = False
        self._collect()
        if transfers.capturing():
            return self._for_graph(key)
        self._capturing = False
        return self._from_idle(key) or self._new(key, transfers)

    def give(self, buffer: HostBuffer) -> None:
        """Take a buffer back; it is overwritten only after the copies in ``buffer.busy``."""
        self._returned.append(buffer)
        if self._closed or self._resting:
            self._collect()

    def release_graphs(self) -> None:
        """Lend what graphs named to everybody again; no graph captured so far may be replayed afterwards."""
        self._collect()
        for transfers in {buffer.transfers for buffer in self._graphs}:
            transfers.finish()
        for buffer in self._graphs:
            buffer.in_graph = False
            buffer.busy.clear()
            self.give(buffer)
        self._graphs.clear()

    def rest(self) -> None:
        """Give back what nobody uses, and the rest as soon as nobody does, but for what graphs name; until ``take``."""
        self._resting = True
        self._collect()

    def close(self) -> None:
        """Give everything back to the system; what a graph still holds follows when the graph is freed."""
        self._closed = True
        self.release_graphs()
        self._collect()

    @property
    def idle(self) -> int:
        """Bytes that nobody uses at the moment."""
        self._collect()
        return sum(key.nbytes * len(buffers) for key, buffers in self._idle.items())

    def _collect(self) -> None:
        """Sort in what was given back."""
        while self._returned:
            buffer = self._returned.popleft()
            if buffer.in_graph:
                self._graphs.append(buffer)
            else:
                self._idle.setdefault(buffer.key, []).append(buffer)
        if self._closed or self._resting:
            self._shrink(0)

    def _for_graph(self, key: BufferKey) -> HostBuffer:
        """One that graphs share, else an idle one, which is theirs from now on."""
        if not self._capturing:  # another capture has begun: events of the last one mean nothing in it
            self._capturing = True
            for buffer in self._graphs:
                buffer.busy.clear()
        found = next((buffer for buffer in self._graphs if buffer.key == key), None)
        if found is not None:
            self._graphs.remove(found)
            return found
        taken = self._from_idle(key)
        if taken is None:
            raise RuntimeError(
                f"no idle host buffer of {key.nbytes:,} bytes while a CUDA graph is captured, when none can be made; "
                f"run the step once before it is captured"
            )
        taken.in_graph = True
        return taken

    def _from_idle(self, key: BufferKey) -> HostBuffer | None:
        buffers = self._idle.get(key)
        return buffers.pop() if buffers else None

    def _new(self, key: BufferKey, transfers: Transfers) -> HostBuffer | None:
        if self.held + key.nbytes > self.budget:
            self._shrink(max(0, self.budget - key.nbytes))
        if self.held + key.nbytes > self.budget:
            return None
        try:
            memory = page_aligned(key.nbytes)
            pinned = self._pinning and transfers.pin(memory)
        except (OSError, MemoryError, RuntimeError) as error:  # the system's, Python's and CUDA's way to say so
            self.refused, self.budget = f"{type(error).__name__}: {error}", self.held
            return None
        self.held += key.nbytes
        if self._pinning and not pinned:
            self._go_on_unpinned(key.nbytes)
        buffer = HostBuffer(key, memory, transfers, pinned=pinned)
        if buffer.pinned:
            buffer.unpin = weakref.finalize(buffer, _unpin, transfers, memory)
            buffer.unpin.atexit = False  # the driver may be gone by then, and takes the pages with it
        return buffer

    def _go_on_unpinned(self, nbytes: int) -> None:
        self._pinning = False
        reason = (
            f"the system refused to pin {nbytes:,} bytes of host memory ({size_text(self.held)} with those before), so "
            f"copies go through pageable memory, which is slower; raise the limit on locked memory, or lower "
            f"memory.host_limit"
        )
        self._decide(Decision("pinned memory", False, reason))

    def _shrink(self, target: int) -> None:
        """Free idle buffers, the kinds unused longest first, until no more than ``target`` bytes are held."""
        for key in list(self._idle):
            while self._idle[key] and self.held > target:
                self._free(self._idle[key].pop())
            if not self._idle[key]:
                del self._idle[key]

    def _free(self, buffer: HostBuffer) -> None:
        for mark in buffer.busy:
            mark.wait()
        buffer.busy.clear()
        if buffer.unpin is not None and buffer.unpin.detach():
            buffer.transfers.unpin(buffer.memory)
        self.held -= buffer.key.nbytes
        buffer.memory = torch.empty(0, dtype=torch.uint8)


def _unpin(transfers: Transfers, memory: torch.Tensor) -> None:
    transfers.finish()
    transfers.unpin(memory)


def page_aligned(nbytes: int) -> torch.Tensor:
    """uint8 [nbytes] of fresh zeroed pages, which go back to the system with the tensor.

    Pages of its own, because registering a page twice is an error and malloc lets neighbours share one.
    """
    return torch.frombuffer(mmap.mmap(-1, nbytes, **PRIVATE), dtype=torch.uint8)


PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
"""Not shared with children (shared pages count against /dev/shm in containers); Windows knows no such flags."""
