"""The part of the trainer that several ranks need: rows shared evenly, and weights divided where the recipe says so.

Without dividing, transformers' trainer wraps the model in DistributedDataParallel by itself, unless steps are recorded:
then gradients are exchanged here, behind the recording (`Exchanged` says why). With dividing, the model is divided here
before any optimizer exists, and handed to the base class as one that is wrapped already; what a checkpoint holds of
weights and optimizer is collected and spread here (``sharding.py``). Trade-off: five methods of the base class are met
by name. Alternative: accelerate's FSDP plugin, whose ways of dividing and saving change with its version, and which the
loss, calling the output head after the forward, has to fit by chance.
"""

from collections.abc import Sized
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from slipstream.data.even import EvenOrder, EvenRows
from slipstream.decision import Decision
from slipstream.train.options import ALONE
from slipstream.train.sharding import (
    Shards,
    give_back,
    load_optimizer,
    load_weights,
    shard,
    whole_optimizer,
    whole_weights,
)

WEIGHTS, OPTIMIZER, SCHEDULER = "weights.pt", "optimizer.pt", "scheduler.pt"
"""In a checkpoint of divided weights: the trained ones by name; the optimizer's state by name; as always."""


class Exchanged(nn.Module):
    """A model as a trainer calls it whose gradients ``exchange`` adds together: not to be wrapped again.

    DistributedDataParallel holds each parameter's node of the autograd graph, and with it the stream on which it was
    made, for as long as it lives; a recording runs on another stream and may not meet such a node.
    """

    def __init__(self, module: nn.Module) -> None:
        """``module``: the same weights come out on all ranks, the first one's."""
        super().__init__()
        self.module = module
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.requires_grad:
                    dist.broadcast(parameter.detach(), src=0)

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """The model's own."""
        return self.module(*arguments, **named)


class SeveralRanksTrainer(transformers.Trainer):  # type: ignore[misc]
    """``transformers.Trainer`` whose ranks take the same number of steps, with no row lost and none doubled."""

    sharded = False
    exchanges = False
    """Whether gradients are exchanged here, not by the wrapper around the model."""
    _order: EvenOrder | None = None

    def ranks_decision(self) -> Decision:
        """How many ranks train together, and how."""
        ranks = self.args.world_size
        if ranks == 1:
            return Decision("several ranks", False, "one process")
        how = "each with its share of the weights" if self.sharded else "each with all weights"
        return Decision("several ranks", True, f"{ranks} processes, {how}; gradients are averaged once a step")

    def divide(self, sharding: Literal["none", "fsdp2"], compute_dtype: torch.dtype | None) -> Decision | None:
        """Divide the model over the ranks if ``sharding`` says so, before anything is trained; gives the decision."""
        if sharding == "none":
            return None
        if self.args.world_size == 1:
            return Decision("sharding", False, ALONE)
        self.sharded = True
        return shard(self.model, compute_dtype)

    # ------------------------------------------------------------------------------------------------- gradients

    def _exchanges(self, mode: str) -> bool:
        """A recorded step goes round DistributedDataParallel. What begins so stays so, on all ranks, even where one
        gives its recording up: they must all exchange in the same way.
        """
        return self.args.world_size > 1 and not self.sharded and mode == "captured"

    def exchange(self) -> None:
        """Add the ranks' gradients together, after the last batch of a step; no host wait.

        All at once when the backward has ended, so this is not hidden under it; adapters' gradients are few.
        """
        if not self.exchanges or not self.accelerator.sync_gradients:
            return
        gradients: dict[torch.dtype, list[torch.Tensor]] = {}
        for parameter in (parameter for parameter in self.model.parameters() if parameter.requires_grad):
            if parameter.grad is None:  # others may have one
                parameter.grad = torch.zeros_like(parameter)
            gradients.setdefault(parameter.grad.dtype, []).append(parameter.grad)
        for alike in gradients.values():
            flat = torch.cat([gradient.reshape(-1) for gradient in alike])
            dist.all_reduce(flat)
            parts = torch.split(flat, [gradient.numel() for gradient in alike])
            torch._foreach_copy_(alike, [part.view_as(gradient) for part, gradient in zip(parts, alike, strict=True)])

    # ------------------------------------------------------------------------------------------------- rows

    def _get_dataloader(self, dataset: Any, description: str, batch_size: int, *positional: Any, **named: Any) -> Any:
        if self.args.world_size > 1 and isinstance(dataset, Sized):
            dataset = EvenRows(dataset, batch_size * self.args.world_size)
        return super()._get_dataloader(dataset, description, batch_size, *positional, **named)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        if not isinstance(train_dataset, EvenRows):
            return super()._get_train_sampler(train_dataset)
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        self._order = EvenOrder(train_dataset, seed)
        return self._order

    def _run_epoch(self, *arguments: Any, **named: Any) -> None:
        if self._order is not None:  # accelerate's own doesn't reach it where the epoch begins in its middle
            self._order.set_epoch(named["epoch"])
        super()._run_epoch(*arguments, **named)

    # ------------------------------------------------------------------------------------------------- divided weights

    def _wrap_model(self, model: nn.Module, *positional: Any, **named: Any) -> nn.Module:
        if self.sharded:
            return model if isinstance(model, Shards) else Shards(model)
        if self.exchanges:
            return model if isinstance(model, Exchanged) else Exchanged(model)
        wrapped: nn.Module = super()._wrap_model(model, *positional, **named)
        return wrapped

    def _prepare_for_training(self, *arguments: Any, **named: Any) -> Any:
        if self.sharded:
            give_back(self.model)
        return super()._prepare_for_training(*arguments, **named)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model; all ranks must call it, the first writes."""
        if not self.sharded:
            super().save_model(output_dir, _internal_call)
            return
        folder, weights = Path(output_dir or self.args.output_dir), whole_weights(self.model)
        if self.args.should_save:
            self._save(str(folder), state_dict=weights)
            if _internal_call:
                torch.save(weights, folder / WEIGHTS)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.sharded:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        state = whole_optimizer(self.model, self._plain_optimizer())
        if self.args.should_save:
            torch.save(state, Path(output_dir) / OPTIMIZER)
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if self.sharded:
            load_weights(self.model, self._on_first(Path(resume_from_checkpoint) / WEIGHTS))
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        if self.sharded:
            state = self._on_first(Path(checkpoint) / OPTIMIZER)
            load_optimizer(self.model, self._plain_optimizer(), state)
            self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER, weights_only=True))
        else:
            super()._load_optimizer_and_scheduler(checkpoint)
        self._rates_of_this_length()

    def _rates_of_this_length(self) -> None:
        """The next step's learning rates by the schedule of this run's length, the same where that is unchanged.

        A checkpoint holds those of the length that it was saved under: at the end of a decaying schedule, zero.
        """
        schedule = getattr(self.lr_scheduler, "scheduler", self.lr_scheduler)  # accelerate wraps it
        if not isinstance(schedule, LambdaLR):
            return
        for group, base, share in zip(
            self._plain_optimizer().param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True
        ):
            rate = base * share(schedule.last_epoch)
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _plain_optimizer(self) -> torch.optim.Optimizer:
        plain = getattr(self.optimizer, "optimizer", self.optimizer)  # accelerate wraps it
        assert isinstance(plain, torch.optim.Optimizer)
        return plain

    def _on_first(self, file: Path) -> dict[str, Any]:
        if self.args.process_index:
            return {}
        loaded: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
        return loaded
