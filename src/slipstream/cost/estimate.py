"""What single tensors of a step take, and what metadata built once saves: arithmetic that needs no whole job."""

LOSS_CHUNK = 1024
"""Tokens whose logits are upcast to float32 at a time (see ``train/loss.py``)."""


def packing_saved_seconds(layers: int, build_seconds: float, *, recompute: bool) -> float:
    """Seconds a step saves when packed metadata is built once instead of in each of L layers: (L − 1) · s.

    s (``build_seconds``) is one build with the waits it forces; on the masked path it is one mask build. Recomputing
    the layers in the backward builds L times more: (2L − 1) · s. Source: the engineering post of May 2026 by Unsloth
    with NVIDIA, from L · (A + s) against L · A + s with A a layer's attention; the recompute's term is ours.
    """
    return packing_saved_forward(layers, build_seconds) + (layers * build_seconds if recompute else 0.0)


def packing_saved_forward(layers: int, build_seconds: float) -> float:
    """Seconds that the forward alone saves: (L − 1) · s, by the same source."""
    return (layers - 1) * build_seconds


def dense_mask_bytes(tokens: int, itemsize: int, kept: int = 1) -> int:
    """Bytes of ``kept`` dense masks of T² elements, and of two of booleans while one is made."""
    return tokens**2 * (itemsize * kept + 2)
