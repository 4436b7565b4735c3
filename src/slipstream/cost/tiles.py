"""How many tokens of a row an MLP computes at a time (``model/tiled_mlp.py``), and how often it computes them.

An MLP in tiles keeps what it reads and runs forward once more in its backward:

    | layer                             | forward passes of it | of its MLP                           |
    | kept                              | 1                    | 2                                    |
    | recomputed                        | 2                    | 2: the recompute ends before the MLP |
    | recomputed, a norm behind the MLP | 2                    | 3: the norm needs the MLP's output   |

(``tests/cost/test_tiles.py`` counts them.) Every pass reads the MLP's weights, and launches its kernels, once a tile.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge

TilesChoice = Literal["auto", "none"] | Annotated[int, Ge(16)]
"""Tokens of a tile; ``auto``: ``TILE``, in recomputed layers of rows longer than ``LONG_ROW``."""
TILE = 8_192
"""Tokens of a tile: products of this height run as fast as higher ones."""
LONG_ROW = 4 * TILE
"""Tokens of a batch up to which an MLP's activations are small beside the rest, so that ``auto`` leaves it whole."""


@dataclass(frozen=True)
class Tiling:
    """How often MLPs in tiles run in one batch; sums are over the layers that have them."""

    tiles: int = 1
    """Tiles of a batch."""
    layers: int = 0
    forwards: int = 0
    """Forward passes of these layers, recomputes included."""
    again: int = 0
    """Forward passes of their MLPs beyond those."""

    def extra(self, backward: int) -> int:
        """Runs over one MLP's weights or kernels beyond those of whole rows, where a backward counts as ``backward``
        forward passes.
        """
        whole = self.forwards + backward * self.layers
        return self.tiles * (whole + self.again) - whole


def tile_tokens(asked: TilesChoice, tokens: int | None, *, recomputed: bool) -> int | None:
    """Tokens of a tile, or None where MLPs are left whole. ``recomputed``: whether any layer's activations aren't kept;
    ``tokens``: of a batch, None where that is not known.
    """
    if asked == "none":
        return None
    if asked != "auto":
        return asked
    return TILE if recomputed and tokens is not None and tokens > LONG_ROW else None
