"""The trainers of ``bench.learning``: Slipstream's as ``slipstream train`` sets it up, and transformers' with peft.

The plain trainer is ``transformers.Trainer`` with ``bf16=True``, float32 adapters as peft makes them, the model's own
loss and attention under a dense mask of each row's documents: nothing of ours runs in its step. Both get one set of
arguments, so sampler, schedule, clipping and optimizer are the same code with the same seeds.

``adapters`` of an arm says how the low-rank product is computed where layers compute in half precision:

- ``default``: as the step decides (one cast a forward, three matrix products that share an output);
- ``peft``: peft's own forward under autocast: two half-precision products, a scaling and a sum, each rounded;
- ``float32``: both products, the scaling and the sum with the base's output in float32, then one rounding to the
  base's dtype, which the next layer wants. Frozen weights and activations are what they are in the other arms, so the
  difference is the adapters' own precision alone; their gradients are float32 products as well.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MethodType
from typing import Any, Literal

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import PrinterCallback, TrainingArguments
from transformers.trainer_utils import SaveStrategy

from slipstream.data.batch import collate
from slipstream.device.feed import PackedCollator
from slipstream.errors import InputError
from slipstream.memory.policy import ActivationsChoice
from slipstream.model.attention import AttentionChoice
from slipstream.step.choice import ModeChoice
from slipstream.train.arguments import training_arguments
from slipstream.train.loss import learned_tokens
from slipstream.train.optimizers import choose_optimizer
from slipstream.train.options import TrainOptions
from slipstream.train.trainer import Trainer
from slipstream.transform import Options, apply, base_model, decisions


@dataclass(frozen=True, kw_only=True)
class Arm:
    """What one arm does otherwise."""

    slipstream: bool = True
    """Slipstream's trainer, or transformers' on the plain peft model."""
    mode: ModeChoice = "auto"
    activations: ActivationsChoice = "keep"
    attention: AttentionChoice = "auto"
    adapters: Literal["default", "peft", "float32"] = "default"
    """How low-rank products are computed; see the module."""
    exact: bool = False
    """The same weights, everything computed in float32."""
    seed: int = 0
    """Of the adapter's first weights and of the rows' order."""


@dataclass
class Watch:
    """What is seen of a training as it runs; values stay on the device until it has ended."""

    losses: list[torch.Tensor] = field(default_factory=list)
    """Mean cross-entropy of each step's learned tokens, 0-d."""
    gradient: dict[str, torch.Tensor] = field(default_factory=dict)
    """Of the first step, before clipping; float32, on the CPU."""
    rows: list[torch.Tensor] = field(default_factory=list)
    """``input_ids`` of each step."""
    held_out: dict[int, float] = field(default_factory=dict)
    """Steps done → loss for each learned token held out, in nats."""
    decisions: list[str] = field(default_factory=list)
    ran: str = "plain"
    """The mode that steps ran in at the end."""

    def stepped(self, model: nn.Module, inputs: Mapping[str, Any], loss: torch.Tensor) -> None:
        """After a step's backward, before clipping."""
        if not self.losses:
            trained = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
            self.gradient = {n: w.grad.detach().float().cpu().clone() for n, w in trained if w.grad is not None}
            assert len(self.gradient) == len(trained), "a trained weight has no gradient"
        self.losses.append(loss.detach())
        self.rows.append(inputs["input_ids"])


class WatchedTrainer(Trainer):
    """Slipstream's trainer, watched."""

    watch: Watch

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *more: Any, **named: Any) -> torch.Tensor:
        """One step as it is, then a look at it."""
        loss = super().training_step(model, inputs, *more, **named)
        self.watch.stepped(self.model, inputs, loss)
        assert self.step is not None
        self.watch.ran = self.step.mode
        return loss


class PlainTrainer(transformers.Trainer):  # type: ignore[misc]
    """transformers' trainer on packed rows: a dense mask keeps documents apart; watched."""

    watch: Watch

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *more: Any, **named: Any) -> torch.Tensor:
        """One step as it is, then a look at it."""
        loss: torch.Tensor = super().training_step(model, inputs, *more, **named)
        self.watch.stepped(self.model, inputs, loss)
        return loss

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *more: Any, **named: Any) -> Any:
        """The model's own loss, with the mask added."""
        mask = document_mask(inputs["position_ids"], base_model(model).dtype)
        return super().compute_loss(model, {**inputs, "attention_mask": mask}, *more, **named)

    @torch.no_grad()
    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Held-out loss for each learned token, where the base class averages batches."""
        self.model.eval()
        total, count = torch.zeros((), device=self.args.device), 0
        for batch in self.get_eval_dataloader():
            inputs = self._prepare_inputs(batch)
            learned = int(learned_tokens(inputs["labels"]))
            with self.accelerator.autocast():
                total += self.compute_loss(self.model, inputs).float() * learned
            count += learned
        self.model.train()
        loss = float(total) / max(count, 1)
        self.watch.held_out[self.state.global_step] = loss
        return {"eval_loss": loss}


class PlainCollator:
    """Packed rows → ``input_ids``, ``labels`` and ``position_ids`` (int64 [1, tokens]), and no boundaries."""

    def __init__(self, tokens: int) -> None:
        """``tokens``: tokens of every batch."""
        self.tokens = tokens

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Lay ``examples`` end to end."""
        batch = collate(examples, self.tokens)
        return {"input_ids": batch.input_ids, "labels": batch.labels, "position_ids": batch.position_ids}


def document_mask(position_ids_1T: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The additive mask [1, 1, T, T] of rows whose positions begin again at each document: 0 where a token may look.

    Padding has position 0 throughout, so each of its tokens is a document of its own and no row of the mask is empty.
    """
    document_1T = (position_ids_1T == 0).cumsum(-1)
    tokens = position_ids_1T.shape[1]
    seen = document_1T[:, :, None] == document_1T[:, None, :]
    seen = seen & torch.ones(tokens, tokens, dtype=torch.bool, device=seen.device).tril()
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)[:, None]


def ours(
    model: Any,
    arm: Arm,
    options: TrainOptions,
    tokens: int,
    dtype: torch.dtype,
    rows: Any,
    held_out: Any,
    watch: Watch,
    scratch: Path,
) -> WatchedTrainer:
    """Slipstream's trainer on ``model`` with its adapter, as a run of a recipe makes it. Raises ``InputError``."""
    _compute_adapters(model, arm)
    asked = Options(activations=arm.activations, attention=arm.attention, tokens=tokens, compute_dtype=dtype)
    apply(model, asked)
    watch.decisions += map(str, decisions(model))
    trainer = WatchedTrainer(
        model,
        _arguments(options, scratch, model, held_out),
        data_collator=PackedCollator(tokens=tokens),
        train_dataset=rows,
        eval_dataset=held_out,
        compute_dtype=None if dtype == torch.float32 else dtype,
        optimizer_cls_and_kwargs=choose_optimizer(options, model),
        on_eval=lambda record: watch.held_out.update({record.step: record.loss}),
        mode=arm.mode,
        on_decision=lambda decision: watch.decisions.append(str(decision)),
    )
    trainer.watch = watch
    trainer.remove_callback(PrinterCallback)
    return trainer


def plain(
    model: Any,
    arm: Arm,
    options: TrainOptions,
    tokens: int,
    dtype: torch.dtype,
    rows: Any,
    held_out: Any,
    watch: Watch,
    scratch: Path,
) -> PlainTrainer:
    """transformers' trainer on the peft model. Raises ``InputError`` for a model that one mask doesn't fit."""
    base = base_model(model)
    kinds = set(getattr(base.config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise InputError(
            f"{type(base).__name__} has layers with {', '.join(sorted(kinds))}: the plain arms give all layers one "
            f"mask; take a model of full attention, or --arms slipstream"
        )
    _compute_adapters(model, arm)
    base.config.use_cache = False
    args = _arguments(options, scratch, model, held_out)
    trainer = PlainTrainer(
        model,
        replace(args, bf16=dtype == torch.bfloat16),
        data_collator=PlainCollator(tokens),
        train_dataset=rows,
        eval_dataset=held_out,
    )
    assert trainer.accelerator.mixed_precision == ("bf16" if dtype == torch.bfloat16 else "no")
    trainer.watch = watch
    trainer.remove_callback(PrinterCallback)
    return trainer


def _arguments(options: TrainOptions, scratch: Path, model: nn.Module, held_out: Any) -> TrainingArguments:
    """What a run of a recipe gives its trainer, but nothing is saved."""
    cpu = next(model.parameters()).device.type == "cpu"
    args = training_arguments(options, scratch, rows=1, has_eval=held_out is not None, cpu=cpu)
    args.save_strategy, args.remove_unused_columns = SaveStrategy.NO, False
    args.per_device_eval_batch_size = 1
    return args


def _compute_adapters(model: nn.Module, arm: Arm) -> None:
    """Fix how adapter layers compute; a forward on the instance is left alone by whatever would replace it."""
    from peft.tuners.lora import LoraLayer

    if arm.adapters == "default":
        return
    layers: list[Any] = [module for module in model.modules() if isinstance(module, LoraLayer)]
    assert layers
    for layer in layers:
        vars(layer)["forward"] = layer.forward if arm.adapters == "peft" else MethodType(_float32, layer)


def _float32(self: Any, x_NI: torch.Tensor) -> torch.Tensor:
    """One adapter layer with the low-rank product and its sum in float32."""
    (name,) = self.active_adapters
    out_NO: torch.Tensor = self.base_layer(x_NI)
    with torch.autocast(x_NI.device.type, enabled=False):
        low_NR = F.linear(x_NI.float(), self.lora_A[name].weight)
        added_NO = F.linear(low_NR, self.lora_B[name].weight) * self.scaling[name]
        summed_NO: torch.Tensor = (out_NO.float() + added_NO).to(out_NO.dtype)
    return summed_NO
