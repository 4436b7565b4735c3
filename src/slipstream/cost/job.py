"""One training job as the arithmetic sees it: sizes and choices, no names of files.

A ``Job`` is what a recipe, a model's configuration and a data set come to once everything is decided; ``plan`` makes
one from a recipe, benchmarks make theirs by hand, and both get the same predictions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slipstream.cost.offload import Split
from slipstream.cost.shape import ModelShape
from slipstream.cost.tiles import TilesChoice, Tiling, tile_tokens

BYTES: Mapping[str, float] = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of an element by dtype."""
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes of a weight in NF4: 4 bits, one byte of scale for each 64, and one float32 for each 256 of those scales.
Source: Dettmers et al. 2023, QLoRA, section 3 (block sizes 64 and 256: 4.127 bits a weight)."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one step computes. Sizes are those of one batch on one device."""

    shape: ModelShape
    tokens: int
    """Tokens that go through the model, padding included."""
    lengths: Sequence[int] | npt.NDArray[np.int64]
    """Lengths of documents; those of ``batches`` batches together."""
    batches: float = 1
    full: bool = False
    """Whether all weights are trained; otherwise adapters are."""
    rank: int = 0
    adapted: tuple[tuple[int, int], ...] = ()
    """Inputs and outputs of each dense linear layer with an adapter."""
    adapted_experts: bool = False
    saved: int = 0
    """Parameters of modules that are trained whole beside the adapters, and of new tokens' rows."""
    weights: str = "bfloat16"
    """Dtype of the base weights."""
    nf4: bool = False
    """Whether the dense linear layers of the decoder are kept in NF4."""
    compute: str = "bfloat16"
    """Dtype that layers compute in."""
    activations: str = "keep"
    """``keep``, ``recompute`` or ``offload``."""
    split: Split | None = None
    """Layers by what becomes of their activations; None: all of them as ``activations`` says."""
    buffers: int = 2
    """Device buffers for reloading, with ``offload``."""
    tiles: TilesChoice = "auto"
    """Tokens of a tile in which MLPs run, or the rule for it."""
    mode: str = "eager"
    """``eager``, ``compiled`` or ``captured``."""
    attention: str = "varlen"
    """``varlen``, ``flex``, ``xformers`` or ``sdpa``."""
    experts: str = "grouped"
    """``grouped`` or ``loop``."""
    optimizer: str = "adamw"
    accumulate: int = 1
    chunked_loss: bool = True
    """Whether logits are made a chunk of tokens at a time."""
    early_gradient: bool = True
    """Whether the gradient by a frozen head's logits is made in the forward, not by computing them again."""
    one_kernel_norms: bool = False
    """Whether RMS norms are one kernel where layers aren't compiled (``model/norms.py``)."""
    half_adapters: bool = True
    """Whether float32 adapters are cast once and summed in their product (``model/half_adapters.py``), not by peft."""

    @property
    def trained(self) -> int:
        """Parameters that are trained."""
        return self.shape.parameters if self.full else self.adapters + self.saved

    @property
    def adapters(self) -> int:
        """Parameters of all adapters: rank × (inputs + outputs) each (Hu et al. 2021, LoRA, section 4.1).

        On fused experts, each expert has a pair for its gate and up projections together and one for down.
        """
        dense = sum(inputs + outputs for inputs, outputs in self.adapted)
        layers = [layer.experts for layer in self.shape.layers if layer.experts and self.adapted_experts]
        routed = sum(each.count * (2 * each.hidden + 3 * each.inner) for each in layers)
        return self.rank * (dense + routed)

    @property
    def layers(self) -> Split:
        """How many layers are kept, recomputed and offloaded."""
        depth = self.shape.depth
        uniform = {"keep": Split(depth, 0, 0), "recompute": Split(0, depth, 0), "offload": Split(0, 1, depth - 1)}
        return uniform[self.activations] if self.split is None else self.split

    @property
    def tile(self) -> int | None:
        """Tokens of a tile in which MLPs run; None where they run on the whole row, as those of mixtures do."""
        if self.shape.routed:
            return None
        size = tile_tokens(self.tiles, self.tokens, recomputed=self.layers.kept < self.layers.layers)
        return None if size is None or size >= self.tokens else size

    @property
    def passes(self) -> float:
        """Forward passes of a layer in one step, on average: one, and one more where activations aren't kept."""
        return 2 - self.layers.kept / self.shape.depth

    @property
    def tiling(self) -> Tiling:
        """How often MLPs in tiles run."""
        counts, size = self.layers, self.tile
        if size is None:
            return Tiling()
        kept, again = counts.kept if self.tiles != "auto" else 0, counts.layers - counts.kept
        return Tiling(
            tiles=-(-self.tokens // size),
            layers=kept + again,
            forwards=kept + 2 * again,
            again=kept + (again if self.shape.norm_behind else 0),
        )

    @property
    def head_once(self) -> bool:
        """Whether the loss makes its gradient right behind the logits, which a trained head does not allow."""
        return self.chunked_loss and self.early_gradient and not self.full and self.saved < self.shape.head

    @property
    def itemsize(self) -> float:
        """Bytes of an activation's element."""
        return BYTES[self.compute]

    @property
    def fused(self) -> bool:
        """Whether layers are compiled, so that elementwise kernels are fused."""
        return self.mode != "eager"
