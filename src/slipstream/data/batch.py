"""Documents laid end to end: the host side of a packed batch.

A batch has a fixed number of tokens T, whatever its documents: shapes are static, so a step can later be compiled and
replayed. What the documents leave is one padding segment at the end, which costs its share of compute and is counted
as waste; the alternative, rows as long as their documents, changes shape with every batch.

    documents     A A A   B B   C C C C        T = 12
    input_ids     a a a   b b   c c c c  0 0 0
    labels        · a a   · b   · c c c  · · ·     (· is -100: not learned from)
    position_ids  0 1 2   0 1   0 1 2 3  0 0 0
    lengths       (3, 2, 4)                        padding: 3

The label at each document's first token is -100: models shift labels by one, so it would be predicted from the last
token of the document before it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from slipstream.errors import InputError

IGNORE = -100
"""The label that cross-entropy leaves out (PyTorch's ``ignore_index`` default)."""


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """One batch of documents, end to end.

    ``input_ids``, ``labels`` and ``position_ids`` are int64 tensors of shape [1, T] on the host; ``lengths`` are the
    documents' lengths as Python integers, the padding segment left out.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor
    lengths: tuple[int, ...]


def collate(examples: Sequence[Mapping[str, Any]], tokens: int) -> PackedBatch:
    """Lay examples end to end in order and fill up to ``tokens``.

    An example is a document (``input_ids``, optionally ``labels``) or a packed row, which has ``seq_lengths`` too.
    Of ``position_ids`` only this is read: where they start again and ``seq_lengths`` is gone, a row has lost its
    boundaries. A row without documents (``seq_lengths`` empty) adds nothing; a batch of such rows alone is all padding.
    Raises ``InputError`` when the examples hold more than ``tokens`` tokens, disagree with their own lengths or have
    lost them.
    """
    if not examples:
        raise InputError("a batch of no examples: give at least one document or packed row")
    examples = [example for example in examples if not is_nothing(example)]
    if not examples:
        return _padding(tokens)
    ids = [np.asarray(example["input_ids"], dtype=np.int64) for example in examples]
    lengths = tuple(length for example, row in zip(examples, ids, strict=True) for length in _lengths(example, row))
    used = sum(lengths)
    if used > tokens:
        raise InputError(
            f"{used:,} tokens in {len(examples)} examples > {tokens:,} tokens a batch; "
            f"raise the collator's tokens or give it fewer or shorter examples (a trainer's "
            f"per_device_train_batch_size, and per_device_eval_batch_size, which is 8 by default)"
        )
    input_ids = np.zeros((1, tokens), dtype=np.int64)
    labels = np.full((1, tokens), IGNORE, dtype=np.int64)
    position_ids = np.zeros((1, tokens), dtype=np.int64)
    input_ids[0, :used] = np.concatenate(ids)
    labels[0, :used] = np.concatenate([_labels(e, row) for e, row in zip(examples, ids, strict=True)])
    ends = np.cumsum(lengths)
    starts = ends - np.asarray(lengths)
    labels[0, starts] = IGNORE
    position_ids[0, :used] = np.arange(used) - np.repeat(starts, lengths)
    return PackedBatch(torch.from_numpy(input_ids), torch.from_numpy(labels), torch.from_numpy(position_ids), lengths)


def is_nothing(example: Mapping[str, Any]) -> bool:
    """Whether the example is a row without documents, which stands in where ranks share rows unevenly."""
    return not len(example.get("seq_lengths", (1,))) and not len(example["input_ids"])


def _padding(tokens: int) -> PackedBatch:
    ids = torch.zeros((1, tokens), dtype=torch.int64)
    return PackedBatch(ids, torch.full_like(ids, IGNORE), torch.arange(tokens)[None], ())


def _lengths(example: Mapping[str, Any], row: np.ndarray) -> tuple[int, ...]:
    if row.ndim != 1 or row.size == 0:
        raise InputError(f"input_ids of shape {list(row.shape)}: an example is a non-empty list of token ids")
    if "seq_lengths" not in example:
        _refuse_lost(example.get("position_ids"))
        return (int(row.size),)
    lengths = tuple(int(length) for length in example["seq_lengths"])
    if sum(lengths) != row.size or min(lengths, default=0) < 1:
        raise InputError(
            f"seq_lengths {list(lengths[:8])} sum to {sum(lengths):,}, but the row has {row.size:,} tokens; "
            f"every length must be at least 1 and their sum the row's length"
        )
    return lengths


def _refuse_lost(position_ids: Any) -> None:
    """Refuse a row without ``seq_lengths`` whose positions start again: those of a document go on by one."""
    if position_ids is None:
        return
    jumps = np.flatnonzero(np.diff(np.asarray(position_ids, dtype=np.int64)) != 1)
    if jumps.size:
        raise InputError(
            f"position_ids start again at token {int(jumps[0]) + 1:,} of an example without seq_lengths: a packed row "
            f"that has lost its boundaries, so its documents would see each other. Give a trainer "
            f"slipstream.apply(model) before it drops the column, or set remove_unused_columns=False; "
            f"if it is one document, leave out position_ids"
        )


def _labels(example: Mapping[str, Any], row: np.ndarray) -> np.ndarray:
    if "labels" not in example:
        return row
    labels = np.asarray(example["labels"], dtype=np.int64)
    if labels.shape != row.shape:
        raise InputError(
            f"{labels.size:,} labels for {row.size:,} input_ids; one label a token, -100 where not learned"
        )
    return labels
