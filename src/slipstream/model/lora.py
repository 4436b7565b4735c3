"""Low-rank adapters through peft (to be filled)."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Lt


@dataclass(frozen=True, kw_only=True)
class AdapterOptions:
    """What is trained (the recipe's ``adapter`` section)."""

    kind: Literal["lora", "none"] = "lora"
    """``lora`` trains low-rank adapters; ``none`` trains all weights."""
    rank: Annotated[int, Gt(0)] = 16
    """Rank of the adapters."""
    alpha: Annotated[float, Gt(0)] = 16
    """Scale numerator: the adapter's output is scaled by alpha / rank (alpha / sqrt(rank) with ``rslora``)."""
    dropout: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Dropout on the adapters' input."""
    rslora: bool = False
    """Rank-stabilised scaling."""
    targets: str | list[str] = "all-linear"
    """Module names to adapt; ``all-linear`` means the dense linear layers, leaving experts and router alone."""
    experts: Literal[False] = False
    """Adapters on experts; not available yet."""
    router: Literal[False] = False
    """Train the router; not available yet."""
    modules_to_save: list[str] = field(default_factory=list)
    """Modules trained whole and saved beside the adapter, e.g. ``lm_head``."""
