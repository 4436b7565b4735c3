"""Memory that ran out, told as the user's to mend: what was asked for, what there was, and what to lower.

A card's allocator raises an exception of its own, a CPU's a plain ``RuntimeError`` that only its words tell apart, and
NumPy and Python a ``MemoryError``. A step that is being recorded tells it by itself (``step/captured.py``).
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from slipstream.cost.hardware import free_host_memory
from slipstream.errors import InputError

CPU_ALLOCATOR = "DefaultCPUAllocator"
ASKED = re.compile(r"tried to allocate (\d+) bytes")


@contextmanager
def no_memory_told(tokens: int) -> Iterator[None]:
    """Makes memory that runs out on device or host an ``InputError``; ``tokens``: those of a step."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        told = _told(error)
        if told is None:
            raise
        lower = "lower packing.tokens or packing.rows, set memory.activations: recompute or offload"
        raise InputError(
            f"out of memory in a step of {tokens:,} tokens: {told}; {lower}, or take a smaller model "
            "(slipstream plan says what fits)"
        ) from error


def _told(error: Exception) -> str | None:
    """What was asked for and had; None for any other error."""
    words = " ".join(str(error).split())
    if isinstance(error, torch.OutOfMemoryError):
        return words.split(" If reserved", maxsplit=1)[0].rstrip(".")
    if isinstance(error, MemoryError):
        return words or "the host has none left"
    if CPU_ALLOCATOR not in words:
        return None
    asked = ASKED.search(words)
    more = f"{int(asked[1]):,} bytes were asked for at once" if asked else words
    return f"{more}, and {free_host_memory():,} are free"
