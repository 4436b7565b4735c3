"""What a trainer is given and would pass over: refused when it is made, since a training without it looks the same."""

from collections.abc import Mapping, Sequence
from typing import Any

import transformers
from transformers import DataCollatorWithPadding
from transformers.data.data_collator import default_data_collator

from slipstream.errors import InputError
from slipstream.model.lengths_argument import refuse_without_segments


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
    if has_packed_rows(trainer):
        raise InputError(
            f"packed rows (they have seq_lengths) without a collator that builds their boundaries: documents would "
            f"see each other; give data_collator=slipstream.PackedCollator(tokens=...), with room for "
            f"per_device_train_batch_size={trainer.args.per_device_train_batch_size} rows"
        )


def has_packed_rows(trainer: transformers.Trainer) -> bool:
    """Whether rows that the trainer was given say that they are packed; a stream may not say what it has."""
    for rows in (trainer.train_dataset, *_parts(trainer.eval_dataset)):
        names = getattr(rows, "column_names", None)
        names = rows[0] if names is None and isinstance(rows, Sequence) and len(rows) else names
        if names and "seq_lengths" in names:
            return True
    return False


def refuse_boundless(inputs: Mapping[str, Any]) -> None:
    """Refuse a batch of packed rows whose collator has lost where documents end (``PaddedCollator`` has one a row)."""
    refuse_without_segments(inputs)
    if inputs.get("segments") is None and "lengths" not in inputs:
        raise InputError(
            "a batch of packed rows (they have seq_lengths) without segments: its documents would see each other; "
            "give data_collator=slipstream.PackedCollator(tokens=...), or hand its segments on"
        )


def refuse_unlabelled(batch: Mapping[str, Any]) -> None:
    """Refuse a batch from which nothing can be learned."""
    if "labels" not in batch:
        raise InputError(
            f"a batch without labels (it has {', '.join(batch) or 'nothing'}): there is nothing to learn; collate "
            f"with slipstream.PackedCollator(tokens=...), or add labels, -100 where not learned"
        )


def _parts(eval_dataset: Any) -> list[Any]:
    return list(eval_dataset.values()) if isinstance(eval_dataset, dict) else [eval_dataset]
