"""Floating-point operations of one batch, by part. A multiplication and an addition count as two.

A matrix product of T tokens with N weights takes 2·N·T. The backward takes as much again for the gradient of its input
and, where the weights are trained, once more for theirs (Kaplan et al. 2020, section 2.1). With frozen weights a step
is thus 4·N·T, and 6·N·T where layers are computed twice. An MLP in tiles runs forward once more where its layer is
kept (``tiles.py``): another 2·N·T of its weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slipstream.cost.job import Job
from slipstream.cost.shape import Matrix

ATTENTION_BACKWARD = 2.5
"""Backward over forward of attention: five matrix products against two (Dao 2023, FlashAttention-2, section 4.1)."""


@dataclass(frozen=True)
class Flops:
    """Operations of one batch: forward, backward and recompute together."""

    dense: float
    """The decoder's dense linear layers."""
    experts: float
    head: float
    """The output head; one that is trained is multiplied once more by the chunked loss, and for its own gradient."""
    attention: float
    adapters: float

    @property
    def total(self) -> float:
        """All parts."""
        return self.dense + self.experts + self.head + self.attention + self.adapters

    @property
    def floor(self) -> float:
        """What no implementation can do without: the matrix products of base weights and head."""
        return self.dense + self.experts + self.head


def flops(job: Job) -> Flops:
    """The operations of one batch of ``job``, by part."""
    shape, tokens = job.shape, job.tokens
    passes = job.passes + (2 if job.full else 1)
    again = job.tiling.again / shape.depth
    head = (2 if job.head_once or not job.chunked_loss else 3) + job.full
    return Flops(
        dense=2.0 * tokens * (shape.dense * passes + sum(m.parameters for m in mlp_matrices(job)) * again),
        experts=2.0 * shape.active_experts * tokens * passes,
        head=2.0 * shape.head * tokens * head,
        attention=attention_forward(job) * (job.passes + ATTENTION_BACKWARD),
        adapters=2.0 * tokens * (_adapter_weights(job) * (job.passes + 2) + _low_rank(job, mlp_adapters(job)) * again),
    )


def mlp_matrices(job: Job) -> list[Matrix]:
    """The matrices of all dense MLPs."""
    return [matrix for layer in job.shape.layers for matrix in layer.mlp]


def mlp_adapters(job: Job) -> list[tuple[int, int]]:
    """Inputs and outputs of the adapters inside MLPs: those with the MLP's width on one side, or twice that where gate
    and up are one matrix, and not of the size of one in the attention.
    """
    others = {(m.inputs, m.outputs) for layer in job.shape.layers for m in layer.matrices if m not in layer.mlp}
    widths = {job.shape.inner, 2 * job.shape.inner} - {0}
    return [size for size in job.adapted if widths.intersection(size) and size not in others]


def _low_rank(job: Job, sizes: Sequence[tuple[int, int]]) -> float:
    return job.rank * sum(inputs + outputs for inputs, outputs in sizes)


def _adapter_weights(job: Job) -> float:
    """Adapter weights that one token is multiplied with: of experts, only those chosen."""
    shape = job.shape
    routed = sum(
        layer.experts.chosen * (2 * layer.experts.hidden + 3 * layer.experts.inner)
        for layer in shape.layers
        if layer.experts and job.adapted_experts
    )
    return _low_rank(job, job.adapted) + job.rank * routed


def attention_forward(job: Job) -> float:
    """Operations of one forward of all attention layers: 2·(query width + output width) for each pair.

    A pair is a token and one that it sees: products q·k and p·v, 2·D each a head. ``sdpa`` computes all T² pairs.
    """
    return sum(2.0 * (job.shape.query + job.shape.out) * pairs for pairs in _pairs_by_layer(job))


def _pairs_by_layer(job: Job) -> list[float]:
    windows = [layer.window for layer in job.shape.layers]
    each = {window: pairs_of(job, window) for window in set(windows)}
    return [each[window] for window in windows]


def pairs_of(job: Job, window: int | None) -> float:
    """Pairs that one layer of this window computes in one batch."""
    if job.attention == "sdpa":
        return float(job.tokens) ** 2
    return attended_pairs(job.lengths, window) / job.batches


def attended_pairs(lengths: Sequence[int] | npt.NDArray[np.int64], window: int | None = None) -> float:
    """Pairs of a token and one it sees, itself included, over documents of these lengths: l·(l + 1) / 2 each.

    With a window w, a token sees at most w: the pairs beyond, (l − w)·(l − w + 1) / 2, fall away.
    """
    sizes = np.asarray(lengths, dtype=np.float64)
    pairs = sizes * (sizes + 1) / 2
    if window is not None:
        beyond = np.maximum(sizes - window, 0)
        pairs -= beyond * (beyond + 1) / 2
    return float(pairs.sum())
