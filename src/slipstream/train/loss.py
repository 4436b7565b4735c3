"""Cross-entropy summed over learned tokens, without logits for the whole batch at once.

The sum, not the mean: the trainer divides by the learned tokens of all batches that make one optimizer step, so that
accumulation, several ranks and one large batch give the same loss.

Hidden states become logits, and logits float32, a chunk of tokens at a time, and again in the backward. A T x V tensor
never exists; for it the output head is multiplied twice. The alternative, the model's own loss, keeps several of them,
each larger than all activations of a layer. Where the head can't be called by itself (``model/head.py``), the model's
logits are taken whole and only their float32 copies are made in chunks.

Shapes: B batch, T tokens, C tokens of a chunk, H hidden width, V vocabulary.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from slipstream.cost.estimate import LOSS_CHUNK
from slipstream.data.batch import IGNORE

Logits = Callable[[torch.Tensor], torch.Tensor]
"""Features of a chunk of tokens [C, ...] → its logits [C, V]."""


def summed_cross_entropy(
    features_BTX: torch.Tensor, labels_BT: torch.Tensor, logits_of: Logits | None = None
) -> torch.Tensor:
    """The summed cross-entropy in nats, float32, of predicting ``labels_BT[:, t + 1]`` at token t.

    ``features_BTX`` are logits [B, T, V], or hidden states [B, T, H] with ``logits_of`` to make logits of a chunk.
    Labels of -100 are left out; with none left the sum is 0. No host sync.
    """
    targets_BT = F.pad(labels_BT[:, 1:], (0, 1), value=IGNORE).to(features_BTX.device)
    pairs = (torch.split(x, LOSS_CHUNK) for x in (features_BTX.flatten(0, 1), targets_BT.flatten()))
    total = features_BTX.new_zeros((), dtype=torch.float32)
    for features_CX, targets_C in zip(*pairs, strict=True):
        total = total + checkpoint(
            _chunk, features_CX, targets_C, logits_of, use_reentrant=False, preserve_rng_state=False
        )
    return total


def learned_tokens(labels_BT: torch.Tensor) -> torch.Tensor:
    """How many tokens of ``labels_BT`` are learned (int64, 0-d): those with a label that something precedes."""
    return (labels_BT[:, 1:] != IGNORE).sum()


def _chunk(features_CX: torch.Tensor, targets_C: torch.Tensor, logits_of: Logits | None) -> torch.Tensor:
    logits_CV = features_CX if logits_of is None else logits_of(features_CX)
    return F.cross_entropy(logits_CV.float(), targets_C, ignore_index=IGNORE, reduction="sum")
