"""A step that ran out of memory with offloaded activations: begun again with one reload buffer.

Reload buffers beyond the first are only there to save time, so that a step which fails for want of memory may fit
without them. A recompute can't be begun twice, nor can a backward that has freed half of its graph; the whole step can,
as long as nothing of it is left: its gradients apart from those of earlier batches, and the random state as it was. Not
so where most weights are trained, whose gradients have no room for being kept apart, or where other processes wait in
this step's collectives; there the error stays, and the next step has one buffer. A recording has gradients of its own
and can always be begun again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import nn

from slipstream.memory.offload import Offload
from slipstream.transform import applied


@dataclass(frozen=True)
class Retreat:
    """What a model's offloading was before a step."""

    offload: Offload | None
    given_up: int

    @classmethod
    def before(cls, model: nn.Module) -> Self:
        """Of a model that ``apply`` has seen, or not."""
        found = applied(model)
        offload = None if found is None else found.checkpointing.offload
        return cls(offload, 0 if offload is None else offload.given_up)

    def gains(self) -> bool:
        """After the step ran out of memory: go on with one buffer; whether that leaves more memory than it had."""
        if self.offload is None:
            return False
        self.offload.retreat()
        return self.offload.given_up > self.given_up


class Rewind:
    """What a step must find in place to be the same step once more."""

    def __init__(self, parameters: Sequence[nn.Parameter], *, whole: bool) -> None:
        """``parameters``: those whose gradients the step adds to; ``whole``: whether they are most of the model's.

        Before the step: gradients that are there are put aside until ``done``.
        """
        self.parameters = parameters
        self.earlier = [p.grad for p in parameters]
        added_to = any(grad is not None for grad in self.earlier)
        self.possible = not (_others() or (added_to and whole))
        self.aside = self.possible and added_to
        if self.aside:
            self._forget()
        devices = {p.device for p in parameters if p.device.type == "cuda"}
        self.states = {device: torch.cuda.get_rng_state(device) for device in devices}
        self.host_state = torch.get_rng_state()

    def __call__(self) -> None:
        """Make everything what it was."""
        self._forget()
        torch.set_rng_state(self.host_state)
        for device, state in self.states.items():
            torch.cuda.set_rng_state(state, device)

    def done(self) -> None:
        """After the step, or its failure: its gradients, as far as it got, are added to those of earlier batches."""
        if not self.aside:
            return
        both = [(p, old) for p, old in zip(self.parameters, self.earlier, strict=True) if old is not None]
        added = [(old, p.grad) for p, old in both if p.grad is not None]
        if added:
            torch._foreach_add_([old for old, _ in added], [new for _, new in added])
        for parameter, old in both:
            parameter.grad = old

    def _forget(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


def _others() -> bool:
    """Whether other processes train with this one."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
