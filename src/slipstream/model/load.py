"""Models and tokenizers from a hub id, a folder or a GGUF file (to be filled)."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How the base model is loaded (the recipe's ``load`` section)."""

    revision: str | None = None
    """The hub revision: a branch, tag or commit."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """The weights' dtype; ``auto``: bf16 where the device computes in it, else float32."""
    quantize: Literal["none"] = "none"
    """Weight quantisation; only ``none`` is available yet."""
    trust_remote_code: bool = False
    """Run the model repository's own Python code."""
