"""Memory that runs out is told as the user's, with what was asked for and what to lower."""

import pytest
import torch

from slipstream.errors import InputError
from slipstream.train.no_memory import no_memory_told

CARD = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 1.00 GiB is "
    "free. If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF"
)


def test_the_cpus_allocator() -> None:
    told = r"a step of 64 tokens: [\d,]{20,} bytes were asked for at once, and [\d,]+ are free; lower packing.tokens"
    with pytest.raises(InputError, match=told), no_memory_told(64):
        torch.empty(2**56, dtype=torch.uint8)  # as it says it itself


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            torch.OutOfMemoryError(CARD),
            r"Tried to allocate 2.00 GiB. .* of which 1.00 GiB is free; lower packing.tokens",
        ),
        (MemoryError("Unable to allocate 8.00 EiB for an array"), r"8.00 EiB for an array; lower packing.tokens"),
        (MemoryError(), r"the host has none left; lower"),
    ],
)
def test_others_that_say_so(error: Exception, told: str) -> None:
    with pytest.raises(InputError, match=told), no_memory_told(64):
        raise error


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="shape mismatch"), no_memory_told(64):
        raise RuntimeError("shape mismatch")
