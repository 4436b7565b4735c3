"""What building a packed batch's boundaries once saves, and what routing by one sort saves: the published formulas.

Source of all three: the engineering post of May 2026 by Unsloth with NVIDIA; the recompute's terms are ours.

L layers, A one layer's attention, s one build of boundaries and attention structure with the waits it forces.
"""

METADATA_SECONDS = 0.2e-3
"""One host-visible build of boundaries where not measured: published as about 0.2 ms, measured 0.21 ms on an H200."""
MASK_BYTES = 12
"""Bytes that one vectorised build of a dense mask moves for each pair of tokens: two masks of booleans and their
combination, the filled mask in half precision, and reading them again."""


def uncached_seconds(layers: int, attention: float, build: float, *, recompute: bool = False) -> float:
    """T_uncached = L·(A + s): every layer builds for itself. Recomputing runs the forward twice, and builds twice."""
    passes = 2 if recompute else 1
    return passes * layers * (attention + build)


def cached_seconds(layers: int, attention: float, build: float, *, recompute: bool = False) -> float:
    """T_cached = L·A + s: one build for all layers, and for the recompute too."""
    passes = 2 if recompute else 1
    return passes * layers * attention + build


def build_seconds(tokens: int, attention: str, copy: float) -> float:
    """s: one build of the boundaries, and with ``sdpa`` one dense mask of T² besides, at ``copy`` bytes a second."""
    mask = MASK_BYTES * tokens**2 / copy if attention == "sdpa" else 0.0
    return METADATA_SECONDS + mask


def dynamic_queries(experts: int, layers: int, passes: int, *, sorted_once: bool) -> int:
    """Answers whose size only the data knows, in one step: a loop asks once for each expert, a sort asks once a layer.

    Slipstream's own sort counts on the device, and its one answer never leaves it.
    """
    return layers * passes * (1 if sorted_once else experts)
