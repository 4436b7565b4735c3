"""Whether kernels of our own run on a tensor: on a card with Triton, in code that nobody compiles."""

from functools import cache
from importlib.util import find_spec

import torch

EXACT = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that lose nothing by being computed with in float32."""


def own_kernels(x: torch.Tensor) -> bool:
    """Whether ``expert_kernels`` can be called on tensors like this one; compiled code has its kernels fused anyway."""
    return x.device.type == "cuda" and x.dtype in EXACT and not torch.compiler.is_compiling() and _has_triton()


def kernels_told(kind: str) -> str:
    """What a decision about experts adds on a device of this kind; nothing where there are no such kernels.

    A PyTorch without CUDA, which only plans for a card, takes Triton for granted there.
    """
    if kind != "cuda":
        return ""
    missing = torch.version.cuda is not None and not _has_triton()
    return "; no own kernels: Triton is missing" if missing else "; own kernels where layers aren't compiled"


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
