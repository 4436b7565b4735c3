"""Which rows of the packing benchmark fit the device, by the cost model, before anything is allocated.

The limit is the most wasteful arm's: without recompute every layer keeps a mask of its own. Trying until memory runs
out would be exact, and would leave a fragmented allocator to the cases that follow.
"""

import torch

from slipstream.bench.packing_arms import Workbench
from slipstream.cost.estimate import dense_mask_bytes, kept_activation_bytes, loss_bytes
from slipstream.cost.hardware import free_bytes
from slipstream.device.segments import LARGEST_MASK_BYTES
from slipstream.errors import InputError
from slipstream.memory.policy import MARGIN

GIB = 2**30
PUBLISHED_ROW = 2048


def refuse_what_does_not_fit(bench: Workbench, tokens: int, choice: str, recompute: bool) -> None:
    """Raise ``InputError`` where the dense masks of these arms, and what else a step keeps, exceed the free memory."""
    needed = needed_bytes(bench, tokens, recompute)
    free = bench_free_bytes(bench.device)
    single = dense_mask_bytes(tokens, bench.dtype.itemsize)
    if needed > free or (choice == "sdpa" and single > LARGEST_MASK_BYTES):
        raise InputError(
            f"{tokens:,} tokens: one dense mask takes {single:,} bytes and the step's tensors {needed:,} bytes in "
            f"all ({needed / GIB:.1f} GiB), {free:,} bytes ({free / GIB:.1f} GiB) are free and a mask may take "
            f"{LARGEST_MASK_BYTES:,}; lower --tokens"
        )


def needed_bytes(bench: Workbench, tokens: int, recompute: bool) -> int:
    """Bytes that the most wasteful arm takes: activations, loss and dense masks.

    Without recompute every layer keeps a mask of its own for the backward, whatever the attention choice: stock
    transformers is always an arm, and its one mask of booleans is made additive by the kernel in each layer.
    """
    config, itemsize = bench.base.config, bench.dtype.itemsize
    kept = kept_activation_bytes(config, tokens) * itemsize // 2
    inputs = config.hidden_size * tokens * itemsize * bench.layers
    kept = inputs + kept // bench.layers if recompute else kept
    masks = dense_mask_bytes(tokens, itemsize, 1 if recompute else bench.layers)
    return kept + loss_bytes(config, tokens) * itemsize // 2 + masks


def bench_free_bytes(device: torch.device) -> int:
    """Bytes free for a step on this device."""
    return free_bytes(device)


def default_tokens(bench: Workbench) -> tuple[int, ...]:
    """On a card 2,048 and the largest power of two whose dense masks fit with a margin; without a card a short row."""
    if bench.device.type != "cuda":
        return (256,)
    largest = PUBLISHED_ROW
    while (
        needed_bytes(bench, 2 * largest, False) <= MARGIN * bench_free_bytes(bench.device)
        and dense_mask_bytes(2 * largest, bench.dtype.itemsize) <= LARGEST_MASK_BYTES
        and 2 * largest <= bench.base.config.max_position_embeddings
    ):
        largest *= 2
    return tuple(dict.fromkeys((PUBLISHED_ROW, largest)))
