"""Layer inputs that wait in host memory between forward and backward, and are back before they are needed.

A checkpointed layer keeps its input alone. Here that input is copied out while the layer computes, and copied back
while the layer after it runs its backward; device memory then holds a few inputs instead of one a layer. With two
buffers, and c one reload, g one layer's backward with its recompute:

    compute   │ layer 3: g │ layer 2: g │ layer 1: g │
    copies    │ c: input 2 │ c: input 1 │            │      input 3, the last layer's, never left

The reload of input 2 is issued *before* layer 3's recompute is, and starts when the device reaches that point. Nothing
hangs on how far the host runs ahead, so a slow host costs nothing here and the step can be captured in a CUDA graph. A
reload issued when the host reaches the layer that needs it would overlap only by luck.

Reload buffers are ordinary tensors of the current stream, dead as soon as the layer's backward has used them, so that
they cost nothing between steps and a graph's capture finds them in its own memory pool. Fixed buffers would save an
allocation a layer and hold their memory through the loss, where the step's peak often is.
"""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch.utils.checkpoint import checkpoint

from slipstream.decision import Decision
from slipstream.errors import InputError
from slipstream.memory.held import Held, Lane
from slipstream.memory.host_budget import HostBudget
from slipstream.memory.host_buffers import BufferKey, HostPool
from slipstream.memory.transfers import Transfers, transfers_for

Buffers = int | Literal["auto"]
ContextFn = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
"""What ``torch.utils.checkpoint`` takes: contexts for a layer's forward and for its recompute."""
AUTO_BUFFERS = 2
"""One in use and one filling: as long as a reload is shorter than a layer's backward, more hide nothing more."""


class Offload:
    """The checkpoint functions of one model's layers, and what they share."""

    def __init__(
        self,
        *,
        layers: int,
        buffers: Buffers,
        host: HostBudget,
        strict: bool,
        decide: Callable[[Decision], None],
        transfers: Callable[[torch.device], Transfers] = transfers_for,
    ) -> None:
        """``layers``: how many inputs leave the device; ``host``: host memory they may take together.

        ``strict``: too little of it is an ``InputError`` at the first input; else inputs without room stay where they
        are. ``decide`` is told what turns out otherwise than planned.
        """
        self.layers, self.strict = layers, strict
        self.buffers = buffer_count(buffers)
        self.host, self.pool = host, HostPool(host.nbytes, decide)
        self.lanes: dict[torch.device, Lane] = {}
        """By device, from its first layer on."""
        self._decide, self._transfers = decide, transfers
        self._last: weakref.ref[Held] | None = None
        self._index = -1
        self._told: set[str] = set()

    def checkpoint_function(
        self, index: int, *, leaves: bool, draws: Callable[[], bool], context_fn: ContextFn | None = None
    ) -> Callable[..., Any]:
        """What transformers calls in place of layer ``index``: ``function(x, ...)``, recomputed in the backward.

        ``leaves``: whether the input goes to the host. ``draws``: whether layers draw random numbers.
        """
        contexts: dict[str, Any] = {} if context_fn is None else {"context_fn": context_fn}

        def recompute(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return function(*args, **kwargs)
            options = {"use_reentrant": False, "preserve_rng_state": draws(), **contexts, **kwargs}
            if not args or not isinstance(args[0], torch.Tensor):
                self._tell_once(
                    "offload", "this model gives layers their input by keyword; such inputs stay on the device"
                )
                return checkpoint(function, *args, **options)
            held = self._hold(index, args[0], leaves)

            def with_input(_: torch.Tensor, *rest: Any, **kwargs: Any) -> Any:
                value = held.take()
                try:
                    return function(value, *rest, **kwargs)
                except torch.OutOfMemoryError:  # a recompute can't be begun twice; a step can (step/second_try.py)
                    held.let_go_ahead()
                    raise

            # An empty stand-in tells the checkpoint which device the layer is on (autocast, random state).
            return checkpoint(with_input, args[0].new_empty(0), *args[1:], **options)

        # A compiler would trace streams and pools; what it may compile is ``function``.
        untraced: Callable[..., Any] = torch.compiler.disable(recompute)  # type: ignore[no-untyped-call]
        return untraced

    def set_buffers(self, buffers: Buffers) -> None:
        """Reload with another number of buffers from the next backward on, whatever memory allowed before."""
        self.buffers = buffer_count(buffers)
        for lane in self.lanes.values():
            lane.most = lane.depth = self.buffers

    @property
    def given_up(self) -> int:
        """How often memory ran out, so that fewer buffers are left."""
        return sum(lane.given_up for lane in self.lanes.values())

    def retreat(self) -> None:
        """After memory ran out anywhere in a step, which goes no further: go on with one buffer for good."""
        for lane in self.lanes.values():
            lane.settle()
            if lane.depth > 1:
                lane.fewer(1)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Offload":
        """A copied model's layers keep their functions, which are this object's."""
        return self

    def _hold(self, index: int, x: torch.Tensor, leaves: bool) -> Held:
        lane = self._lane(x.device)
        for each in self.lanes.values():
            each.settle()
        previous = self._last() if self._last is not None and index > self._index else None
        held = Held(lane, x, previous)
        if leaves and held.earlier() is None:
            lane.begin_forward(held.layout.nbytes)
        self._last, self._index = weakref.ref(held), index
        if leaves and held.can_leave:
            self._check_budget(held.layout.nbytes)
            buffer = self.pool.take(BufferKey(x.device, x.dtype, held.layout.nbytes), lane.transfers)
            if buffer is not None:
                held.send(self.pool, buffer)
            else:
                self._no_room(held.layout.nbytes)
        return held

    def _lane(self, device: torch.device) -> Lane:
        if device not in self.lanes:
            transfers = self._transfers(device)
            depth = self.buffers if transfers.memory() is None else 1
            self.lanes[device] = Lane(device, transfers, self._decide, self.buffers, depth)
        return self.lanes[device]

    # What is said once

    def _check_budget(self, nbytes: int) -> None:
        """Before the first input leaves: whether all of them will find room, where the user asked for it."""
        if (
            any(lane.sent for lane in self.lanes.values())
            or not self.strict
            or self.layers * nbytes <= self.pool.budget
        ):
            return
        raise InputError(self.host.shortage(self.layers, nbytes))

    def _no_room(self, nbytes: int) -> None:
        """For one more input: within the budget the system may refuse, which ends an offload that was asked for."""
        told = self.host.shortage(self.layers, nbytes, taken=self.pool.held, refused=self.pool.refused)
        if self.strict and self.pool.refused:
            raise InputError(told)
        self._tell_once("host memory", f"{told}; inputs that find no room stay on the device")

    def _tell_once(self, name: str, reason: str) -> None:
        if name not in self._told:
            self._told.add(name)
            self._decide(Decision(name, False, reason))


def buffer_count(buffers: Buffers) -> int:
    """Reload buffers that are asked for."""
    return AUTO_BUFFERS if buffers == "auto" else buffers
