"""From examples to a model-ready batch: the collator that builds ``Segments``.

It runs in the ``DataLoader``'s workers, on Python integers, so that no boundary is ever looked for on the device. It
emits no attention mask: a mask beside ``segments`` makes other attention paths ignore the boundaries.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from slipstream.data.batch import IGNORE, collate
from slipstream.device.segments import Segments
from slipstream.errors import InputError


class PackedCollator:
    """Examples (documents, or packed rows with ``seq_lengths``) → a model-ready dict.

    The dict holds ``input_ids`` first, ``labels`` and ``position_ids`` (int64 [1, tokens]) and ``segments``. Documents
    keep their order; more tokens than fit, and a packed row that has lost its boundaries, are an ``InputError``.
    """

    def __init__(self, *, tokens: int) -> None:
        """``tokens``: tokens of every batch, T."""
        if tokens < 1:
            raise InputError(f"tokens {tokens} < 1: a batch holds at least one token")
        self.tokens = tokens

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Lay ``examples`` end to end."""
        batch = collate(examples, self.tokens)
        return {
            "input_ids": batch.input_ids,
            "labels": batch.labels,
            "position_ids": batch.position_ids,
            "segments": Segments.from_lengths(batch.lengths, total=self.tokens),
        }


class PaddedCollator:
    """Documents, one a row, padded on the right to the longest: for models that cannot be packed.

    Gives ``input_ids``, ``labels`` (int64 [B, N]), ``attention_mask`` (int64 [B, N]) and ``lengths``, the documents'
    tokens as a tuple of ints, which stays on the host: there the trainer counts, and keeps it from the model. A row
    without documents has length 0 and one token that nothing is learned from. It is also the plain path that packed
    training is compared with.
    """

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Pad ``examples`` to the longest of them. Raises ``InputError`` for a row of several documents."""
        rows = [collate([example], max(1, len(example["input_ids"]))) for example in examples]
        most = max(len(row.lengths) for row in rows)
        if most > 1:
            raise InputError(
                f"a packed row of {most} documents in a padded batch, where they would see each other; "
                f"give PaddedCollator one document an example, or use PackedCollator"
            )
        widths = [row.input_ids.shape[1] for row in rows]
        lengths = tuple(sum(row.lengths) for row in rows)
        shape = (len(rows), max(widths))
        input_ids, mask = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
        labels = torch.full(shape, IGNORE)
        for index, (row, width) in enumerate(zip(rows, widths, strict=True)):
            input_ids[index, :width] = row.input_ids[0]
            labels[index, :width] = row.labels[0]
            mask[index, :width] = 1
        return {"input_ids": input_ids, "labels": labels, "attention_mask": mask, "lengths": lengths}
