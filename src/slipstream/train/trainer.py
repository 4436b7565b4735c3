"""``Trainer``: ``transformers.Trainer`` with the packed step, token-weighted, and no host sync in it.

Distribution, saving, resuming and trackers stay transformers' and accelerate's. What differs:

- batches go to the device asynchronously, and ``Segments`` with them, once;
- the loss is summed over learned tokens and divided by those of the whole optimizer step; logits are made in chunks;
- nothing in a step asks the device for a value: the NaN filter, per-step logging and FLOP counting of the base class
  do, so they are off, and scalars arrive some steps late through ``StepLog``;
- evaluation averages over learned tokens, where the base class averages batches.

The alternative, a loop of our own, would be shorter and would have to learn DDP, FSDP and resuming again.
"""

import copy
import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, IntervalStrategy

from slipstream.decision import Decision
from slipstream.device.feed import PackedCollator
from slipstream.step.choice import ModeChoice
from slipstream.step.step import Step
from slipstream.train.checkpoint import rotate, write_manifest
from slipstream.train.circumstances import AUTOCAST, circumstances
from slipstream.train.forward import BatchLoss
from slipstream.train.ignored import (
    has_packed_rows,
    refuse_boundless,
    refuse_ignored,
    refuse_uncollated,
    refuse_unlabelled,
)
from slipstream.train.loss import learned_tokens
from slipstream.train.ranks import summed_over_ranks
from slipstream.train.records import EvalRecord, StepLog, StepRecord
from slipstream.train.run_folder import SAVING, publish, staging_for
from slipstream.train.several import SeveralRanksTrainer
from slipstream.train.tally import StepTally
from slipstream.transform import base_model


class Trainer(SeveralRanksTrainer):
    """``transformers.Trainer`` with the packed, sync-free step; same arguments, and six more.

    Give it ``slipstream.apply(model)``, rows from ``slipstream.pack_dataset`` and a ``slipstream.PackedCollator``
    (``per_device_train_batch_size`` packed rows must fit the collator's tokens).

    ``compute_dtype``: layers run under autocast in this dtype (None: in the weights' dtype, or as ``args.bf16`` says).
    ``step_log``: where a ``StepRecord`` a step goes. ``on_eval``: called with each evaluation's ``EvalRecord``.
    ``mode``: ``auto``, ``eager``, ``compiled`` or ``captured``. ``on_decision``: told what is decided about the step.
    ``sharding``: ``fsdp2`` divides weights, gradients and optimizer state over the ranks.
    Raises ``InputError`` for arguments of the base class that the packed loss would pass over, and for packed rows with
    a collator that would.
    """

    control: TrainerControl

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        *positional: Any,
        compute_dtype: torch.dtype | None = None,
        step_log: StepLog | None = None,
        on_eval: Callable[[EvalRecord], None] | None = None,
        mode: ModeChoice = "auto",
        on_decision: Callable[[Decision], None] | None = None,
        sharding: Literal["none", "fsdp2"] = "none",
        **named: Any,
    ) -> None:
        """See the class."""
        args = TrainingArguments() if args is None else args
        self.log_every = _log_interval(args)
        args = _without_syncs(args)
        super().__init__(model, args, *positional, **named)
        refuse_ignored(self)
        refuse_uncollated(self)
        self._packed_rows = has_packed_rows(self)
        self.model_accepts_loss_kwargs = True  # the loss is divided by num_items_in_batch here, not by accumulation
        self.compute_dtype = compute_dtype
        self.step_log = step_log or StepLog(None)
        self.step_log.on_record = self._log_record
        self.on_eval = on_eval
        self.mode, self.on_decision = mode, on_decision
        self.batch_loss = BatchLoss(self.model, self._autocast)
        self.step: Step | None = None
        """How the training at hand runs forward and backward."""
        self.sharding_decision = self.divide(sharding, compute_dtype)
        self._saving = False
        self._tally = StepTally()
        self._step_began = time.perf_counter()
        self.add_callback(_Recorder(self))

    # ------------------------------------------------------------------------------------------------- the step

    def train(self, *positional: Any, **named: Any) -> Any:
        """The base class's; however it ends, the model is as it was, and graphs and host memory are given back."""
        try:
            return super().train(*positional, **named)
        finally:
            self.close_step()

    def close_step(self) -> None:
        """End the training at hand, if there is one; another call of ``train`` begins anew."""
        if self.step is not None:
            self.step.close()
            self.step, self.batch_loss.compiled = None, False

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Forward and backward of one batch as ``step`` runs them; the base class's between compiled layers."""
        step = self.step = self.step or self._make_step()
        model.train()
        refuse_unlabelled(inputs)
        inputs = self._prepare_inputs(inputs)
        if step.mode != "captured" and not self.exchanges:
            tally, own = self._tally, super().training_step

            def once() -> torch.Tensor:
                self._tally = replace(tally)  # of a step that is begun again nothing counts twice
                result: torch.Tensor = own(model, inputs, num_items_in_batch)
                return result

            return step.between_layers(inputs, once)
        learned = learned_tokens(inputs["labels"]) if num_items_in_batch is None else num_items_in_batch
        learned = torch.as_tensor(learned)
        loss = step(inputs, learned.clamp(min=1))
        self._tally.add(inputs, loss * self.args.world_size, learned)  # as compute_loss gives it
        self.exchange()
        return loss

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        if self._packed_rows:
            refuse_boundless(inputs)
        prepared: dict[str, Any] = super()._prepare_inputs(inputs)
        return prepared

    def _wrap_model(self, model: nn.Module, training: bool = True, *positional: Any, **named: Any) -> nn.Module:
        if training and self.args.world_size > 1:  # what it is wrapped in depends on who exchanges gradients
            self.step = self.step or self._make_step()
        return super()._wrap_model(model, training, *positional, **named)

    def _make_step(self) -> Step:
        dtype = self.compute_dtype or AUTOCAST.get(self.args.mixed_precision, base_model(self.model).dtype)
        packed = isinstance(self.data_collator, PackedCollator)
        together = self.args.world_size if self.sharded else 1  # whole gradients are exchanged after a recorded step
        about = circumstances(self.model, packed=packed, processes=together, dtype=dtype)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        step = Step(self.model, self._loss_of, trained, about, self.mode, dtype=dtype, on_change=self._on_decision)
        self.batch_loss.compiled = step.mode != "eager"
        self.exchanges = self._exchanges(step.mode)
        for decision in step.decisions:
            self._on_decision(decision)
        return step

    def _loss_of(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        return self.batch_loss(self.model, inputs, balanced=True)[0]

    def _on_decision(self, decision: Decision) -> None:
        if self.on_decision is not None:
            self.on_decision(decision)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """Mean cross-entropy over the learned tokens of the whole optimizer step, this batch's share (0-d float32).

        A load-balance loss is added as the mean over the step's batches, weighted by their learned tokens.
        """
        labels = inputs["labels"]
        total, outputs = self.batch_loss(model, inputs, whole_logits=return_outputs, balanced=True)
        learned = learned_tokens(labels) if num_items_in_batch is None else torch.as_tensor(num_items_in_batch)
        loss = total / learned.clamp(min=1)
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            loss = loss * self.accelerator.num_processes  # gradients are averaged over ranks, the count is their sum
        if model.training:
            self._tally.add(inputs, loss.detach(), learned)
        return (loss, outputs) if return_outputs else loss

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """0: the base class walks all parameters on the host every step to fill a number that no record uses."""
        return 0

    def _autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        if self.compute_dtype is None:  # as args.bf16 says; the head runs outside the forward that accelerate wraps
            context: AbstractContextManager[Any] = self.accelerator.autocast()
            return context
        return torch.autocast(device.type, dtype=self.compute_dtype)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        self._tally.grad_norm = torch.as_tensor(norm)
        return norm

    # ------------------------------------------------------------------------------------------------- evaluation

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Loss for each learned token of the set, in nats: ``{prefix}_loss``, ``{prefix}_learned_tokens``."""
        eval_dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(eval_dataset, dict):
            return {
                name: value
                for key, part in eval_dataset.items()
                for name, value in self.evaluate(part, ignore_keys, f"{metric_key_prefix}_{key}").items()
            }
        began = time.perf_counter()
        total, count = self._eval_sums(eval_dataset)
        record = EvalRecord(self.state.global_step, total / max(count, 1), count, time.perf_counter() - began)
        if self.on_eval is not None:
            self.on_eval(record)
        metrics = {
            f"{metric_key_prefix}_loss": record.loss,
            f"{metric_key_prefix}_learned_tokens": record.learned_tokens,
            f"{metric_key_prefix}_runtime": record.seconds,
        }
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    @torch.no_grad()
    def _eval_sums(self, eval_dataset: Any) -> tuple[float, int]:
        was_training = self.model.training
        self.model.eval()
        loss = torch.zeros((), device=self.args.device)
        count = torch.zeros((), device=self.args.device, dtype=torch.int64)
        with torch.random.fork_rng(devices=()):  # a loader draws a seed of the host: training's dropout stays as it was
            for inputs in self.get_eval_dataloader(eval_dataset):
                refuse_unlabelled(inputs)
                inputs = self._prepare_inputs(inputs)
                loss += self.batch_loss(self.model, inputs)[0]
                count += learned_tokens(inputs["labels"])
                self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        self.model.train(was_training)
        loss, count = self.accelerator.reduce((loss, count), reduction="sum")
        self._step_began = time.perf_counter()
        return float(loss), int(count)

    # --------------------------------------------------------------------------------------- checkpoints and resuming

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Saves as the base class does, but under a hidden name until the checkpoint is whole and listed."""
        self.step_log.secure()  # a checkpoint's steps are on disk before the checkpoint is
        target = Path(self._get_output_dir(trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if self.args.should_save:
            staging_for(target)
        self.accelerator.wait_for_everyone()
        self._saving = True
        try:
            super()._save_checkpoint(model, trial)  # finds no older checkpoint there, so it removes none
        finally:
            self._saving = False
        self._name_best(target)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            self._publish_checkpoint(target)
        self.accelerator.wait_for_everyone()
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(target))
        self._step_began = time.perf_counter()

    def _get_output_dir(self, trial: Any) -> str:
        folder = str(super()._get_output_dir(trial))
        return str(Path(folder) / SAVING) if self._saving else folder

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if not self._saving:  # it is pushed in the background, from the name that it keeps
            super()._push_from_checkpoint(checkpoint_folder)

    def _name_best(self, target: Path) -> None:
        """Where the best checkpoint is: the base class looked for it beside the hidden name."""
        if self.state.best_global_step:
            best = target.with_name(f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}")
            if best == target or best.is_dir():
                self.state.best_model_checkpoint = str(best)

    def _publish_checkpoint(self, target: Path) -> None:
        staged = target.parent / SAVING / target.name
        self.state.save_to_json(str(staged / TRAINER_STATE_NAME))
        if not self.args.save_only_model:  # without an optimizer training can't go on, so it isn't listed as whole
            write_manifest(staged)
        publish(target)
        best = self.state.best_model_checkpoint
        rotate(target, keep=self.args.save_total_limit, best=None if best is None else Path(best))

    def _run_epoch(self, *arguments: Any, **named: Any) -> None:
        """The base class's epoch; none for a run that is resumed after its last step, where that would add a step."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*arguments, **named)

    # ------------------------------------------------------------------------------------------------- records

    def _push_record(self) -> None:
        """Hand the step's numbers to the log; scalars leave the device asynchronously."""
        tally, self._tally = self._tally, StepTally()
        now = time.perf_counter()
        assert tally.loss is not None
        assert tally.learned is not None
        assert tally.grad_norm is not None
        fields: dict[str, float | None] = {
            "step": self.state.global_step,
            "epoch": self.state.epoch or 0.0,
            "learning_rate": tally.learning_rate,
            "seconds": now - self._step_began,
            "memory_bytes": torch.cuda.max_memory_allocated() if self.args.device.type == "cuda" else None,
        }
        self._step_began = now
        scalars = {"loss": tally.loss, "grad_norm": tally.grad_norm, "learned_tokens": tally.learned}
        counts = {"tokens": tally.tokens, "documents": tally.documents, "padding_tokens": tally.padding}
        if self.args.world_size == 1:
            self.step_log.push(fields | counts, scalars)
            return
        loss, *sums = summed_over_ranks([tally.loss, *counts.values()], self.args.device)
        scalars |= {"loss": loss / self.args.world_size, **dict(zip(counts, sums, strict=True))}
        self.step_log.push(fields, scalars)

    def _log_record(self, record: StepRecord) -> None:
        """Pass a record that has arrived to the base class's log and trackers, at the interval the user asked for."""
        every = self.log_every if self.log_every >= 1 else math.ceil(self.state.max_steps * self.log_every)
        if every and record.step % every == 0:
            self.log(
                {
                    "loss": record.loss,
                    "grad_norm": record.grad_norm,
                    "learning_rate": record.learning_rate,
                    "at_step": record.step,
                }
            )


class _Recorder(TrainerCallback):  # type: ignore[misc]
    """Calls the trainer's record keeping at the right moments of a step."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        state.compute_steps(args, state.max_steps)  # a resumed run has the intervals of its checkpoint until here
        self.trainer._step_began = time.perf_counter()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **named: Any
    ) -> None:
        self.trainer._tally.learning_rate = float(named["optimizer"].param_groups[0]["lr"])

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.trainer._push_record()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.trainer.step_log.drain()
        self.trainer.close_step()


def _log_interval(args: TrainingArguments) -> float:
    """Steps between logs that ``args`` ask for, or below 1 a share of all steps; 0 for none."""
    return float(args.logging_steps) if args.logging_strategy == IntervalStrategy.STEPS else 0


def _without_syncs(args: TrainingArguments) -> TrainingArguments:
    """A copy of ``args`` without what makes the host wait in a step or drops our batch's parts."""
    args = copy.deepcopy(args)
    args.logging_strategy = IntervalStrategy.NO  # reads the loss on the host; StepLog does it asynchronously
    args.logging_nan_inf_filter = False  # looks at every loss
    args.remove_unused_columns = False  # would drop seq_lengths
    fits = args.per_device_train_batch_size  # the collator; transformers' own default for evaluation is 8
    args.per_device_eval_batch_size = min(fits, args.per_device_eval_batch_size)
    args.accelerator_config.dispatch_batches = False  # joins batches of several ranks, which segments can't
    args.accelerator_config.non_blocking = args.device.type == "cuda"  # elsewhere nothing but a warning comes of it
    args.average_tokens_across_devices = True  # the loss is divided by the learned tokens of all ranks
    if args.ddp_find_unused_parameters is None:
        args.ddp_find_unused_parameters = False  # looks through the graph in each forward
    if args.ddp_broadcast_buffers is None:
        args.ddp_broadcast_buffers = False  # they are constants
    args._n_gpu = min(args.n_gpu, 1)  # one process a device: DataParallel would split a packed row
    return args
