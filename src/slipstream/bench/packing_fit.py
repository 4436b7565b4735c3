"""Which rows of the packing benchmark fit the device, by the cost model, before anything is allocated.

The limit is the most wasteful arm's: without recompute every layer keeps a mask of its own. Trying until memory runs
out would be exact, and would leave a fragmented allocator to the cases that follow.
"""

import torch

from slipstream.bench.packing_arms import Workbench
from slipstream.cost.estimate import dense_mask_bytes
from slipstream.cost.hardware import free_bytes
from slipstream.cost.job import Job
from slipstream.cost.memory import kept_bytes, layer_bytes, loss_workspace
from slipstream.cost.shape import ModelShape
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
    job = job_of(bench, tokens, recompute)
    kept = kept_bytes(job) + (tokens * layer_bytes(job, job.shape.layers[0]) if recompute else 0.0)
    masks = dense_mask_bytes(tokens, bench.dtype.itemsize, 1 if recompute else bench.layers)
    return int(kept + loss_workspace(job)) + masks


def job_of(bench: Workbench, tokens: int, recompute: bool) -> Job:
    """The step that the arms take, with all logits at once."""
    shape, dtype = ModelShape.of(bench.base.config), str(bench.dtype).removeprefix("torch.")
    return Job(
        shape=shape,
        tokens=tokens,
        lengths=(tokens,),
        rank=16,
        adapted=shape.adapted(),
        weights=dtype,
        compute=dtype,
        activations="recompute" if recompute else "keep",
        attention="sdpa",
        chunked_loss=False,
        half_adapters=False,
    )


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
