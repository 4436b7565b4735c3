"""Cross-entropy summed over learned tokens, without float32 logits for the whole batch at once.

The sum, not the mean: the trainer divides by the learned tokens of all batches that make one optimizer step, so that
accumulation, several ranks and one large batch give the same loss. Logits are upcast to float32 a chunk at a time and
again in the backward, which saves several copies of a T x V tensor; the alternative, the model's own loss, keeps them.

Shapes: B batch, T tokens, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from slipstream.cost.estimate import LOSS_CHUNK
from slipstream.data.batch import IGNORE


def summed_cross_entropy(logits_BTV: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
    """The summed cross-entropy in nats, float32, of predicting ``labels_BT[:, t + 1]`` from ``logits_BTV[:, t]``.

    Labels of -100 are left out; with none left the sum is 0. No host sync.
    """
    targets_BT = F.pad(labels_BT[:, 1:], (0, 1), value=IGNORE).to(logits_BTV.device)
    pairs = (torch.split(x, LOSS_CHUNK) for x in (logits_BTV.flatten(0, 1), targets_BT.flatten()))
    total = logits_BTV.new_zeros((), dtype=torch.float32)
    for logits_CV, targets_C in zip(*pairs, strict=True):
        total = total + checkpoint(
            _chunk_cross_entropy, logits_CV, targets_C, use_reentrant=False, preserve_rng_state=False
        )
    return total


def learned_tokens(labels_BT: torch.Tensor) -> torch.Tensor:
    """How many tokens of ``labels_BT`` are learned (int64, 0-d): those with a label that something precedes."""
    return (labels_BT[:, 1:] != IGNORE).sum()


def _chunk_cross_entropy(logits_CV: torch.Tensor, targets_C: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits_CV.float(), targets_C, ignore_index=IGNORE, reduction="sum")
