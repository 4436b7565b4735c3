"""One layer input that may wait on the host, and the lane on which a device's inputs come and go.

Whose turn a buffer is, with two of them (o: copied out, r: copied back, w: the layer's backward at work on it):

    pass's layers     0        1        2        3 (the last: never leaves)
    forward           o        o        o        stays
    backward of 3                       r        w
    backward of 2              r        w
    backward of 1     r        w

A ``Held`` belongs to the graph that holds it: it lives as long as its layer's checkpoint and knows its predecessor
weakly. There is no table of turns to get out of step under nested checkpoints, two forwards before a backward, or
``retain_graph``; a prediction that goes wrong (a reload nobody asks for) costs a copy, never a value. The price is one
small object a layer and pass.
"""

import weakref
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch

from slipstream.cost.sizes import size_text
from slipstream.decision import Decision
from slipstream.memory.host_buffers import HostBuffer, HostPool
from slipstream.memory.transfers import Mark, Transfers

ALIGNMENT = 16
"""Bytes: the alignment by which kernels choose their widest loads, which buffers have and few views lack."""


@dataclass(frozen=True)
class Layout:
    """How a tensor lies in memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, x: torch.Tensor) -> "Layout":
        """The layout of ``x``."""
        return cls(tuple(x.shape), tuple(x.stride()), x.dtype)

    @property
    def elements(self) -> int:
        """Elements of the tensor."""
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return self.elements * self.dtype.itemsize

    @property
    def dense(self) -> bool:
        """Whether the elements fill a stretch of memory without gaps or overlaps, in any order of dimensions."""
        expected = 1
        for stride, size in sorted((s, n) for n, s in zip(self.shape, self.stride, strict=True) if n != 1):
            if stride != expected:
                return False
            expected *= size
        return self.elements > 0

    def flat(self, x: torch.Tensor) -> torch.Tensor:
        """The elements of a dense ``x`` in the order of memory, without a copy."""
        return x.as_strided((self.elements,), (1,))

    def restored(self, flat: torch.Tensor) -> torch.Tensor:
        """The inverse of ``flat``: the same shape and strides, so that the same kernels compute the same bits."""
        return flat.as_strided(self.shape, self.stride)


@dataclass(eq=False)
class Lane:
    """One device's copies, and what of them is not settled yet."""

    device: torch.device
    transfers: Transfers
    decide: Callable[[Decision], None]
    """Told what turns out otherwise than planned."""
    most: int
    """Reload buffers that may be in use at once; fewer after the device ran out of memory."""
    depth: int
    """Reload buffers for the pass at hand: one at work, the others filling."""
    before: int | None = None
    """Bytes allocated when the pass at hand began its backward."""
    rise: int | None = None
    """Bytes by which a pass's peak lies above that, besides its reload buffers; None before a whole backward."""
    known: int = 0
    """Bytes of an input in the passes that ``rise`` is of."""
    own: bool = False
    """Whether ``rise`` is by their own peak; else by an older one that theirs lay below."""
    floor: int | None = None
    """The peak when the pass at hand began; None: counted from there, so that all of it is the pass's own."""
    filled: "weakref.WeakSet[Held]" = field(default_factory=weakref.WeakSet)
    """Inputs whose reload has begun and that no layer has used yet."""
    told: set[str] = field(default_factory=set)
    """Names of the decisions that were told."""
    given_up: int = 0
    """How often memory ran out, so that fewer buffers are left."""
    leaving: deque[tuple[torch.Tensor, int, Mark]] = field(default_factory=deque)
    """Inputs being copied out, with the version they had."""
    abandoned: deque[tuple[torch.Tensor, Mark]] = field(default_factory=deque)
    """Reloads whose graph was freed before they were used."""
    sent: int = 0
    """Inputs copied out so far, and ``reloads`` back; ``nbytes`` the bytes of both."""
    reloads: int = 0
    nbytes: int = 0

    @property
    def ahead(self) -> int:
        """Buffers filling or filled that no layer has used yet."""
        return len(self.filled) + len(self.abandoned)

    def settle(self) -> None:
        """Let current work wait for copies out and for reloads nobody wants, then let go of the device's side."""
        while self.leaving:
            source, version, mark = self.leaving.popleft()
            self.transfers.join(mark)
            if source._version != version:
                raise RuntimeError(
                    "a layer's input was changed in place while it was being copied to the host, so that its backward "
                    "would compute with other values; change a copy of it, or set activations: recompute"
                )
        while self.abandoned:
            _, mark = self.abandoned.popleft()
            self.transfers.join(mark)

    def begin_forward(self, nbytes: int) -> None:
        """Before a pass's inputs of ``nbytes`` each leave: have its own peak told apart from what was before it.

        The allocator keeps one peak. Where loading or an evaluation drove it so high that the passes' own, not known
        yet, hides below and no buffer would seem to fit, it is counted anew from here; else it is left alone.
        """
        memory = None if self.transfers.capturing() else self.transfers.memory()
        if memory is None:
            return
        self.floor = memory.peak
        if not (self.own and nbytes <= self.known) and memory.usable - memory.peak < (self.most - 1) * nbytes:
            self.transfers.forget_peak()
            self.floor = None
            reason = (
                f"PyTorch's count on {self.device}, {size_text(memory.peak)}, begins anew with a training forward: it "
                f"hid what a step takes, by which reload buffers are chosen"
            )
            self._tell_once(Decision("peak memory", True, reason))

    def begin_backward(self, nbytes: int) -> None:
        """Choose the pass's buffers of ``nbytes`` each: more than one only where memory is free at the highest demand.

        What a backward needs on top is known from those before; longer rows than theirs must do with one buffer.
        """
        memory = None if self.transfers.capturing() else self.transfers.memory()
        if memory is None:
            return
        self.before = memory.allocated
        if self.rise is not None:
            self._fit(memory.usable - memory.allocated - self.rise if nbytes <= self.known else 0, nbytes)

    def end_backward(self, nbytes: int) -> None:
        """Learn from a backward that has reached its first layer; a capture that comes next finds its depth set."""
        memory = None if self.transfers.capturing() else self.transfers.memory()
        if memory is None or self.before is None:
            return
        self._learn(memory.peak, memory.peak - self.before - self.depth * nbytes, nbytes)
        assert self.rise is not None
        self._fit(memory.usable - self.before - self.rise, nbytes)

    def _learn(self, peak: int, most: int, nbytes: int) -> None:
        """The pass rose by ``most`` where the peak is its own; else by no more, and as passes like it have shown."""
        own = self.floor is None or peak > self.floor
        if self.rise is None or own or not self.own or nbytes > self.known:
            self.rise, self.known, self.own = most, nbytes, own
        elif nbytes == self.known:
            self.rise = min(self.rise, most)

    def _fit(self, room: int, nbytes: int) -> None:
        """As many buffers as there is ``room`` for, and one at least."""
        self.depth = max(1, min(self.most, room // nbytes))
        if self.depth < self.most:
            reason = (
                f"{self.depth} of {self.most} on {self.device}: at the highest demand no memory is free for another"
            )
            self._tell_once(Decision("reload buffers", self.depth > 1, reason))

    def _tell_once(self, decision: Decision) -> None:
        if decision.name not in self.told:
            self.told.add(decision.name)
            self.decide(decision)

    def fewer(self, depth: int, nbytes: int | None = None) -> None:
        """Go on with ``depth`` buffers for good, since there was no memory for another (of ``nbytes``, where known)."""
        self.most = self.depth = max(1, depth)
        self.given_up += 1
        size = "" if nbytes is None else f" of {size_text(nbytes)}"
        reason = f"out of memory for another reload buffer{size} on {self.device}; {self.most} left"
        self.decide(Decision("reload buffers", self.most > 1, reason))


class Held:
    """One layer's input in one forward pass: on the device, or on the host until its recompute asks for it."""

    pool: HostPool | None = None
    buffer: HostBuffer | None = None
    copied: Mark | None = None
    """The end of the copy out, and ``loaded`` of the copy back into ``slot``."""
    slot: torch.Tensor | None = None
    loaded: Mark | None = None

    def __init__(self, lane: Lane, x: torch.Tensor, previous: "Held | None") -> None:
        """``x`` stays on the device until ``send``. ``previous``: the layer's before, in the same pass."""
        self.lane = lane
        self.layout, self.requires_grad = Layout.of(x), x.requires_grad
        self.previous = None if previous is None else weakref.ref(previous)
        self.first: torch.Tensor | None = x
        self.kept: torch.Tensor | None = x.detach()
        self.version = x._version

    @property
    def can_leave(self) -> bool:
        """Whether the input would come back just as it was; else it has to stay, which is always right."""
        assert self.kept is not None
        offset = self.kept.storage_offset() * self.layout.dtype.itemsize
        return self.layout.dense and offset % ALIGNMENT == 0

    def send(self, pool: HostPool, buffer: HostBuffer) -> None:
        """Begin to copy the input to ``buffer`` of ``pool``; the lane keeps it alive until the copy is done.

        Where the copy can't be begun the buffer goes back at once, not with a traceback that somebody may keep.
        """
        assert self.kept is not None
        with ExitStack() as failed:
            failed.callback(pool.give, buffer)
            self.copied = self.lane.transfers.out(self.layout.flat(self.kept), buffer.flat(), buffer.busy)
            failed.pop_all()
        buffer.busy[:] = [self.copied]
        self.lane.leaving.append((self.kept, self.version, self.copied))
        self.pool, self.buffer, self.kept = pool, buffer, None
        self.lane.sent += 1
        self.lane.nbytes += self.layout.nbytes

    def take(self) -> torch.Tensor:
        """The layer's input: in the forward the tensor itself, in each recompute its value as a new leaf."""
        if self.first is not None:
            first, self.first = self.first, None
            return first
        value = self._on_device() if self.kept is not None else self._reloaded()
        return value.detach().requires_grad_(self.requires_grad)

    def _on_device(self) -> torch.Tensor:
        assert self.kept is not None
        if self.kept._version != self.version:
            raise RuntimeError(
                "a layer's input was changed in place after the layer's forward, which its backward needs unchanged"
            )
        earlier = self.earlier()
        if earlier is not None and earlier.buffer is not None:
            self.lane.begin_backward(self.layout.nbytes)
        self._look_ahead()
        return self.kept

    def _reloaded(self) -> torch.Tensor:
        if self.slot is None:
            self.begin_reload(self._slot_on_demand())
        self._look_ahead()
        slot = self.slot
        assert slot is not None
        self.drop_reload()
        if self.earlier() is None:
            self.lane.end_backward(self.layout.nbytes)
        return self.layout.restored(slot)

    def begin_reload(self, slot: torch.Tensor) -> None:
        """Begin to copy the input back into ``slot``, flat, on the device.

        Where that fails nothing is kept of it, so that another backward of the same graph tries again.
        """
        assert self.buffer is not None
        self.loaded = self.lane.transfers.back(self.buffer.flat(), slot, (self.copied,))
        self.slot = slot
        self.buffer.busy.append(self.loaded)
        self.lane.filled.add(self)
        self.lane.reloads += 1
        self.lane.nbytes += self.layout.nbytes

    def drop_reload(self) -> None:
        """Let current work wait for the reload, and forget its buffer."""
        assert self.loaded is not None
        self.lane.transfers.join(self.loaded)
        self.slot = self.loaded = None
        self.lane.filled.discard(self)

    def earlier(self) -> "Held | None":
        """The input held before this one in the same pass, on the same device, while its graph lives."""
        found = None if self.previous is None else self.previous()
        return found if found is not None and found.lane is self.lane else None

    def _look_ahead(self) -> None:
        """Begin the reloads of the layers before this one, as deep as there are buffers.

        Not over to another device: its current stream is not known to this thread.
        """
        self.lane.settle()
        spoken_for = self.lane.ahead - (self.slot is not None)
        earlier = self.earlier()
        while earlier is not None and spoken_for < self.lane.depth - 1:
            if earlier.buffer is not None and earlier.slot is None:
                if not earlier.reload_ahead():
                    return
                spoken_for += 1
            earlier = earlier.earlier()

    def reload_ahead(self) -> bool:
        """Begin the reload before anybody asks for it; false where there is no memory for it."""
        try:
            slot = self._slot()
        except torch.OutOfMemoryError:
            self.lane.fewer(self.lane.depth - 1, self.layout.nbytes)
            return False
        self.begin_reload(slot)
        return True

    def _slot_on_demand(self) -> torch.Tensor:
        """A buffer for an input that is needed now; those filled ahead make room if they must."""
        try:
            return self._slot()
        except torch.OutOfMemoryError:
            if not self.let_go_ahead():
                raise
            return self._slot()

    def let_go_ahead(self) -> bool:
        """After memory ran out: give up what was filled ahead, and go on with one buffer; false where nothing was."""
        if not self.lane.ahead:
            return False
        self.lane.settle()
        for other in list(self.lane.filled):
            other.drop_reload()
        self.lane.fewer(1, self.layout.nbytes)
        return True

    def _slot(self) -> torch.Tensor:
        return torch.empty(self.layout.elements, dtype=self.layout.dtype, device=self.lane.device)

    def __del__(self) -> None:
        """The graph is gone: only appends here, since this runs wherever the last reference is dropped."""
        if self.slot is not None and self.loaded is not None:
            self.lane.abandoned.append((self.slot, self.loaded))
        if self.pool is not None and self.buffer is not None:
            self.pool.give(self.buffer)
