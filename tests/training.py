"""A short training run on the CPU, and what it did."""

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback, TrainingArguments

from packed import documents, gradients, model_of
from slipstream import PackedCollator, Trainer, apply

ROWS = ((9, 1, 17, 5), (12, 3), (20,), (1, 1, 2, 8, 8), (30,), (6, 7))
"""Documents of each packed row; their numbers of learned tokens differ."""
ROW_TOKENS = 36


def packed_rows(rows: tuple[tuple[int, ...], ...] = ROWS, seed: int = 0) -> Dataset:
    made = []
    for index, lengths in enumerate(rows):
        row = documents(lengths, seed + index)
        made.append({name: [t for document in row for t in document[name]] for name in ("input_ids", "labels")})
        made[-1]["seq_lengths"] = list(lengths)
    return Dataset.from_list(made)


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "max_steps": 3,
        "per_device_train_batch_size": 1,
        "learning_rate": 1e-2,
        "report_to": "none",
        "disable_tqdm": True,
        "logging_strategy": "no",
        "save_strategy": "no",
        "log_level": "error",
    }
    return TrainingArguments(**{**settings, **changes})


def trainer_of(folder: Path, model: Any = None, collator: Any = None, rows: int = 1, **named: Any) -> Trainer:
    """``named``: arguments of ``TrainingArguments``, or of ``Trainer`` where it has one of that name."""
    own = (
        "optimizer_cls_and_kwargs",
        "step_log",
        "on_eval",
        "compute_dtype",
        "callbacks",
        "train_dataset",
        "eval_dataset",
        "compute_metrics",
    )
    given = {name: named.pop(name) for name in own if name in named}
    given.setdefault("train_dataset", packed_rows())
    return Trainer(
        apply(model_of("llama")) if model is None else model,
        arguments(folder, per_device_train_batch_size=rows, **named),
        data_collator=collator or PackedCollator(tokens=ROW_TOKENS * rows),
        **given,
    )


class Gradients(TrainerCallback):
    """Keeps each step's gradients as the optimizer gets them."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.steps.append(gradients(model))


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}
