"""What a trainer is given and would pass over: refused when it is made, since a training without it looks the same."""

from collections.abc import Sequence
from typing import Any

import transformers
from transformers import DataCollatorWithPadding
from transformers.data.data_collator import default_data_collator

from slipstream.errors import InputError


def refuse_ignored(trainer: transformers.Trainer) -> None:
    """Refuse what the base class would have used and the packed loss and evaluation would not."""
    given = {
        "label_smoothing_factor": bool(trainer.args.label_smoothing_factor),
        "compute_loss_func": trainer.compute_loss_func is not None,
        "compute_metrics": trainer.compute_metrics is not None,
        "preprocess_logits_for_metrics": trainer.preprocess_logits_for_metrics is not None,
    }
    ignored = [name for name, there in given.items() if there]
    if ignored:
        raise InputError(
            f"{', '.join(ignored)}: Slipstream's Trainer computes the summed cross-entropy over learned tokens and "
            f"would pass over it; leave it out, or use transformers' Trainer on the applied model"
        )


def refuse_uncollated(trainer: transformers.Trainer) -> None:
    """Refuse packed rows under the base class's default collators, which know no boundaries.

    Not replaced by ours: a batch's tokens are for the user to say, since the step's memory follows from them.
    """
    collator = trainer.data_collator
    if collator is not default_data_collator and type(collator) is not DataCollatorWithPadding:
        return
    for rows in (trainer.train_dataset, *_parts(trainer.eval_dataset)):
        names = getattr(rows, "column_names", None)
        names = rows[0] if names is None and isinstance(rows, Sequence) and len(rows) else names
        if names and "seq_lengths" in names:
            raise InputError(
                f"packed rows (they have seq_lengths) without a collator that builds their boundaries: documents would "
                f"see each other; give data_collator=slipstream.PackedCollator(tokens=...), with room for "
                f"per_device_train_batch_size={trainer.args.per_device_train_batch_size} rows"
            )


def _parts(eval_dataset: Any) -> list[Any]:
    return list(eval_dataset.values()) if isinstance(eval_dataset, dict) else [eval_dataset]
