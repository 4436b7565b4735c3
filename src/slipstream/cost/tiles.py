"""How many tokens of a row an MLP computes at a time (``model/tiled_mlp.py``), and what that leaves of its memory."""

from typing import Annotated, Literal

from annotated_types import Ge

TilesChoice = Literal["auto", "none"] | Annotated[int, Ge(16)]
"""Tokens of a tile; ``auto``: ``TILE``, in recomputed layers of rows longer than ``LONG_ROW``."""
TILE = 8_192
"""Tokens of a tile: products of this height run as fast as higher ones."""
LONG_ROW = 4 * TILE
"""Tokens of a batch up to which an MLP's activations are small beside the rest, so that ``auto`` leaves it whole."""


def tile_tokens(asked: TilesChoice, tokens: int | None, *, recomputed: bool) -> int | None:
    """Tokens of a tile, or None where MLPs are left whole. ``recomputed``: whether any layer's activations aren't kept;
    ``tokens``: of a batch, None where that is not known.
    """
    if asked == "none":
        return None
    if asked != "auto":
        return asked
    return TILE if recomputed and tokens is not None and tokens > LONG_ROW else None
