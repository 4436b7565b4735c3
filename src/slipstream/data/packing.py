"""Packing documents into rows of fixed length (to be filled)."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt


@dataclass(frozen=True, kw_only=True)
class PackingOptions:
    """How documents share rows (the recipe's ``packing`` section)."""

    enabled: bool = True
    """Pack; off trains one document a row, padded (for models that cannot be packed)."""
    tokens: Annotated[int, Gt(1)] = 4096
    """Tokens in one packed row."""
    rows: Annotated[int, Gt(0)] = 1
    """Packed rows in one batch; they lie end to end, so a batch has ``tokens * rows`` tokens."""
    window: Annotated[int, Gt(0)] | None = None
    """Pack only among this many consecutive documents; none packs the whole set."""
