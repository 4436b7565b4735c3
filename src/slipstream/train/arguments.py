"""``TrainOptions`` in transformers' words, and the callback that keeps the best checkpoint."""

import math
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from slipstream.train.options import TrainOptions

NEVER = 2**31
"""An interval that no run reaches: transformers still evaluates and saves once at the end."""
SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant_with_warmup"}


def training_arguments(
    options: TrainOptions, checkpoints: Path, *, rows: int, has_eval: bool, cpu: bool
) -> TrainingArguments:
    """``options`` as transformers' ``TrainingArguments``; ``rows``: examples in a batch."""
    arguments = TrainingArguments(
        output_dir=str(checkpoints),
        max_steps=options.steps or -1,
        num_train_epochs=options.epochs,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=options.accumulate,
        learning_rate=options.learning_rate,
        lr_scheduler_type=SCHEDULES[options.schedule],
        warmup_steps=options.warmup,
        optim="adamw_torch_fused",  # where choose_optimizer names no other
        weight_decay=options.weight_decay,
        max_grad_norm=options.clip,
        seed=options.seed,
        data_seed=options.seed,
        eval_strategy="steps" if has_eval else "no",
        eval_steps=(options.eval_every or NEVER) if has_eval else None,
        save_strategy="steps",
        save_steps=options.save_every or NEVER,
        save_total_limit=options.keep + has_eval,  # transformers counts the best one in, and may leave it alone
        metric_for_best_model="loss" if has_eval else None,
        greater_is_better=False if has_eval else None,
        logging_strategy="steps" if options.trackers else "no",
        logging_steps=1,
        report_to="none",  # trackers are given their numbers by tracker_callbacks
        run_name=checkpoints.parent.name,
        project="slipstream",
        use_cpu=cpu,
        dataloader_num_workers=0 if cpu else 2,
        dataloader_pin_memory=not cpu,
        disable_tqdm=True,
        log_level="error",
        log_level_replica="error",
    )
    arguments.mixed_precision = "no"  # it takes the launcher's; our trainer casts by itself (``launcher.py``)
    return arguments


class KeepBest(TrainerCallback):  # type: ignore[misc]
    """Saves a checkpoint whenever an evaluation beats all before it; transformers then keeps that one besides."""

    def __init__(self) -> None:
        """``since``: the step after which held-out rows were changed, so that no earlier evaluation compares;
        ``found``: the step and loss of a resumed run's best evaluation until then, by its records.
        """
        self.since: int | None = None
        self.found: tuple[int, float] | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Forgets a best that was found on other rows, and learns of one that came after its checkpoint was saved."""
        if self.since is not None and (state.best_global_step or 0) <= self.since:
            state.best_metric = state.best_global_step = state.best_model_checkpoint = None
        if self.found is not None:
            self.remember(args, state, *self.found)

    def remember(self, args: TrainingArguments, state: TrainerState, step: int, loss: float) -> None:
        """Takes an evaluation that transformers wasn't told of for the best, if it is."""
        if math.isnan(loss) or (state.best_metric is not None and loss >= state.best_metric):
            return
        state.best_metric, state.best_global_step = loss, step
        checkpoint = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{step}"
        state.best_model_checkpoint = str(checkpoint) if checkpoint.is_dir() else None

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **named: Any
    ) -> TrainerControl:
        """Asks for a checkpoint of the step just evaluated, if it is the best."""
        loss = named["metrics"].get("eval_loss")
        if state.global_step and loss is not None and (state.best_metric is None or loss < state.best_metric):
            control.should_save = True
        return control
