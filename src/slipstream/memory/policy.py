"""Keep or recompute a layer's activations (to be filled)."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    """What becomes of activations (the recipe's ``memory`` section)."""

    activations: Literal["auto", "keep", "recompute"] = "auto"
    """``keep`` stores them, ``recompute`` makes them again in the backward; ``auto`` keeps where they fit."""
    buffers: Literal["auto"] = "auto"
    """Device buffers for reloading; only ``auto`` until offloading is available."""
    host_limit: None = None
    """Host memory for offloading; not available yet."""
