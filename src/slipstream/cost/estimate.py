"""What a training step keeps in device memory: arithmetic on a model's configuration.

Counted from what autograd saves in transformers' decoder layers (RMSNorm upcasts to float32, rotary positions, gated
MLP) with adapters on the linear layers and frozen base weights. It decides whether activations fit; it is a
prediction, so the margin is in the caller.
"""

from typing import Any

LOSS_CHUNK = 1024
"""Tokens whose logits are upcast to float32 at a time (see ``train/loss.py``)."""


def kept_activation_bytes(config: Any, tokens: int, itemsize: int = 2) -> int:
    """Bytes that all decoder layers keep for the backward of ``tokens`` tokens, computing in half precision, or in
    float32 where ``itemsize`` is 4: then nothing is cast, and layers that read the same keep it once (16h + 12q + 12k +
    16i a token).

    A layer and token: float32 inputs of two norms (8h), half-precision inputs of the adapters of q, k, v, gate and up
    (10h), of o (2q) and down (2i); the attention's q, k, v and output (4q + 4k); float32 norms of q and k (4q + 4k);
    gate, its activation and up (6i); h hidden, q query, k key, i intermediate width.
    """
    hidden = config.hidden_size
    heads = config.num_attention_heads
    head = getattr(config, "head_dim", None) or hidden // heads
    query = heads * head
    key = (getattr(config, "num_key_value_heads", None) or heads) * head
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    layer = 18 * hidden + 10 * query + 8 * key + 8 * inner
    if itemsize == 4:
        layer = 16 * hidden + 12 * query + 12 * key + 16 * inner
    return int(layer * tokens * config.num_hidden_layers)


def loss_bytes(config: Any, tokens: int, *, whole_logits: bool = True) -> int:
    """Bytes of the loss's workspace: a chunk's logits in half precision and float32, and their gradients (16 bytes an
    element with cross-entropy's own copy); with ``whole_logits``, all tokens' logits and gradient besides (4 bytes).
    """
    chunk = 16 * min(tokens, LOSS_CHUNK)
    return int(config.vocab_size * (chunk + 4 * tokens if whole_logits else chunk))


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
