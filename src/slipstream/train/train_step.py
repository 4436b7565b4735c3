"""``TrainStep``: a whole optimizer step for loops of one's own.

    step = slipstream.TrainStep(slipstream.apply(model), optimizer)
    for batch in loader:                       # dicts of a PackedCollator, on the host or on the device
        loss = step(batch)                     # forward, backward, clip, update; 0-d, on the device
        scheduler.step()

What the trainer does in a step, without its loop: forward and backward in the best mode, the sum over learned tokens
divided by all learned tokens of the step, clipping and the update. Nothing waits for the device; reading the loss does.

What a loop gets wrong is refused: an optimizer of other parameters when the step is made, the rest in the step that
meets it, by looking at names and switches on the host.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from slipstream.cost.hardware import compute_dtype, describe
from slipstream.decision import Decision
from slipstream.errors import InputError
from slipstream.model.lengths_argument import refuse_restarts
from slipstream.step.choice import Mode, ModeChoice
from slipstream.step.step import Step
from slipstream.train.circumstances import circumstances
from slipstream.train.forward import BatchLoss
from slipstream.train.ignored import refuse_unlabelled
from slipstream.train.loss import learned_tokens
from slipstream.transform import base_model

Batch = Mapping[str, Any]


class TrainStep:
    """``loss = step(batch)``: forward, backward, clip, update; eager, compiled or captured."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        mode: ModeChoice = "auto",
        *,
        clip: float = 1.0,
        dtype: torch.dtype | None = None,
    ) -> None:
        """``model``: as ``apply`` gives it, adapters and all, in training mode and on its device.

        ``clip``: largest gradient norm, 0 for none. ``dtype``: what layers compute in; None takes the weights' half
        precision, or for float32 weights on a card that multiplies bfloat16, bfloat16 under autocast. Raises
        ``InputError`` where ``mode`` can't be had, nothing is trained, ``optimizer`` is none or does not hold all that
        is, or ``clip`` is negative.
        """
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise InputError(
                f"optimizer {optimizer!r}: a step needs one that is made, e.g. torch.optim.AdamW("
                "[p for p in model.parameters() if p.requires_grad], fused=True)"
            )
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not trained:
            raise InputError("no parameter of the model is trained; add an adapter, or set requires_grad")
        _refuse_others(trained, optimizer)
        if not clip >= 0:
            raise InputError(f"clip {clip}: the largest gradient norm is at least 0; 0 clips nothing")
        self.model, self.optimizer, self.clip = model, optimizer, clip
        self._trained, self._device = trained, trained[0].device
        weights: torch.dtype = base_model(model).dtype
        wanted = dtype or _best(weights, self._device)
        self._autocast = None if wanted == torch.float32 else wanted
        self._batch_loss = BatchLoss(model, self._context)
        about = circumstances(model, dtype=wanted)
        self._step = Step(model, self._loss, trained, about, mode, dtype=wanted)
        self._batch_loss.compiled = self._step.mode != "eager"
        self._closed = False
        self.grad_norm: torch.Tensor | None = None
        """Norm of the last step's gradients before clipping (0-d, on the device)."""

    def __call__(self, batch: Batch | Sequence[Batch]) -> torch.Tensor:
        """One optimizer step on a batch, or on several whose gradients are summed; the mean loss of a learned token.

        Raises ``InputError`` for a batch without ``labels`` or with documents that the model would not keep apart, and
        for a model in evaluation mode, and after ``close``.
        """
        if self._closed:
            raise InputError(
                "this step is closed, and the model as it was before it; make another TrainStep to train on"
            )
        batches = [batch] if isinstance(batch, Mapping) else list(batch)
        if not batches:
            raise InputError("no batches: a step needs at least one")
        if not self.model.training:
            raise InputError(
                f"{type(self.model).__name__} is in evaluation mode, without dropout; call model.train() before a step"
            )
        for one in batches:
            refuse_restarts(one)
        moved = [self._moved(one) for one in batches]
        learned = torch.stack([learned_tokens(one["labels"]) for one in moved]).sum().clamp(min=1)
        loss = torch.stack([self._step(one, learned) for one in moved]).sum()
        if self.clip > 0:
            self.grad_norm = torch.nn.utils.clip_grad_norm_(self._trained, self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss

    @property
    def mode(self) -> Mode:
        """How steps run now."""
        return self._step.mode

    @property
    def decisions(self) -> list[Decision]:
        """What was decided about the step, with reasons."""
        found = [*self._step.decisions, self._batch_loss.decision]
        balance = self._batch_loss.balance_decision
        return found if balance is None else [*found, balance]

    @property
    def recordings(self) -> int:
        """How many graphs were recorded so far."""
        return self._step.recordings

    def close(self) -> None:
        """Give graphs and the memory of steps back, on device and host, and leave the model as it was."""
        self._closed = True
        self._step.close()

    def _moved(self, batch: Batch) -> dict[str, Any]:
        """The batch on the model's device; asynchronously from pinned memory."""
        refuse_unlabelled(batch)
        return {
            name: value.to(self._device, non_blocking=True) if hasattr(value, "to") else value
            for name, value in batch.items()
        }

    def _context(self, device: torch.device) -> AbstractContextManager[Any]:
        return nullcontext() if self._autocast is None else torch.autocast(device.type, dtype=self._autocast)

    def _loss(self, inputs: Batch) -> torch.Tensor:
        return self._batch_loss(self.model, inputs, balanced=True)[0]


def _refuse_others(trained: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer without some of ``trained``: they would not change, and their gradients never be cleared."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    count = sum(id(parameter) in held for parameter in trained)
    if count < len(trained):
        raise InputError(
            f"the optimizer holds {count:,} of the model's {len(trained):,} trained parameters; make it of all: "
            f"[p for p in model.parameters() if p.requires_grad] (those not to be trained: requires_grad_(False))"
        )


def _best(weights: torch.dtype, device: torch.device) -> torch.dtype:
    """What layers compute in by default."""
    if weights in (torch.bfloat16, torch.float16):
        return weights
    return getattr(torch, compute_dtype(describe(device))) if device.type == "cuda" else torch.float32
