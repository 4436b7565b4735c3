"""The choice of attention for cards nobody has at hand, and the kernels by their definition."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface

from slipstream import InputError, Segments
from slipstream.cost.hardware import Device
from slipstream.model.attention import (
    attention_key,
    choose_attention,
    mask_placeholder,
    register_attention,
    sdpa_kernel,
    varlen_kernel,
    varlen_obstacle,
)

CARD = Device("cuda", "a card", 80 * 2**30, (9, 0), bf16=True, unified_memory=False)
HOST = Device("cpu", "a host", 8 * 2**30, None, bf16=False, unified_memory=True)
CONFIG = SimpleNamespace(hidden_size=64, num_attention_heads=2, head_dim=32, attention_dropout=0.0)


def config(**changes: Any) -> Any:
    return SimpleNamespace(**{**vars(CONFIG), **changes})


@pytest.mark.parametrize(
    ("device", "settings", "dtype", "obstacle"),
    [
        (HOST, {}, torch.bfloat16, "needs a CUDA device, the model is on cpu"),
        (replace(CARD, compute_capability=(7, 5)), {}, torch.float16, r"needs compute capability 8.0 .* \(7, 5\)"),
        (CARD, {}, torch.float32, "computes in bfloat16 or float16, not torch.float32"),
        (CARD, {"attention_dropout": 0.1}, torch.bfloat16, "no dropout and the model's attention_dropout is 0.1"),
        (CARD, {"head_dim": 264}, torch.bfloat16, "up to 256, the model has 264"),
        (CARD, {"head_dim": 36}, torch.bfloat16, "multiples of 8 up to 256, the model has 36"),
        (CARD, {"head_dim": None, "hidden_size": 600}, torch.bfloat16, "the model has 300"),
    ],
)
def test_what_is_in_the_way_of_varlen(device: Device, settings: Any, dtype: torch.dtype, obstacle: str) -> None:
    with pytest.raises(InputError, match=rf"attention varlen: .*{obstacle}.*; set attention to sdpa or auto"):
        choose_attention("varlen", config(**settings), device, dtype)
    chosen, decision = choose_attention("auto", config(**settings), device, dtype)
    assert chosen == "sdpa"
    assert decision.on
    assert varlen_obstacle(config(**settings), device, dtype) in decision.reason


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("settings", [{}, {"head_dim": 256}, {"head_dim": None}])
@pytest.mark.parametrize("asked", ["auto", "varlen"])
def test_varlen_where_nothing_is_in_the_way(asked: Any, settings: Any, dtype: torch.dtype) -> None:
    chosen, decision = choose_attention(asked, config(**settings), CARD, dtype)
    assert chosen == "varlen"
    assert decision.reason.startswith("varlen: ")


def test_sdpa_where_it_is_asked_for() -> None:
    chosen, decision = choose_attention("sdpa", CONFIG, CARD, torch.bfloat16)
    assert chosen == "sdpa"
    assert "asked for" in decision.reason


def test_registering_adds_our_keys_and_leaves_others_alone() -> None:
    attention, masks = AttentionInterface(), AttentionMaskInterface()
    before = {key: attention[key] for key in attention.valid_keys() if not key.startswith("slipstream")}
    register_attention()
    register_attention()
    assert {key: attention[key] for key in before} == before
    for choice in ("varlen", "sdpa"):
        assert attention_key(choice) in attention.valid_keys()
        assert masks[attention_key(choice)] is masks["sdpa"]


def test_the_placeholder_changes_no_scores() -> None:
    mask = mask_placeholder(torch.device("cpu"))
    q = torch.randn(1, 2, 5, 8)
    masked = torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)
    assert torch.allclose(masked, torch.nn.functional.scaled_dot_product_attention(q, q, q))


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (4, 1)])
def test_sdpa_by_its_definition(heads: int, groups: int, window: int | None, scale: float | None) -> None:
    segments = Segments.from_lengths([5, 1, 6], total=14)
    torch.manual_seed(0)
    q = torch.randn(1, heads, 14, 8, dtype=torch.float64)
    k, v = (torch.randn(1, groups, 14, 8, dtype=torch.float64) for _ in range(2))
    found = sdpa_kernel(q, k, v, segments, scale, 0.0, window)
    assert found.shape == (1, 14, heads, 8)
    assert found.is_contiguous()
    start = 0
    for length in (5, 1, 6, 2):
        for i in range(start, start + length):
            first = start if window is None else max(start, i - window + 1)
            for head in range(heads):
                group = head // (heads // groups)
                scores = k[0, group, first : i + 1] @ q[0, head, i] * (8**-0.5 if scale is None else scale)
                expected = scores.softmax(0) @ v[0, group, first : i + 1]
                assert torch.allclose(found[0, i, head], expected, atol=1e-12)
        start += length


def test_varlen_refuses_dropout() -> None:
    q = torch.zeros(1, 2, 4, 8)
    with pytest.raises(InputError, match=r"attention dropout 0.1: varlen attention has none; set attention to sdpa"):
        varlen_kernel(q, q, q, Segments.from_lengths([4]), None, 0.1, None)


@pytest.mark.parametrize(("window", "expected"), [(None, (-1, 0)), (3, (2, 0)), (1, (0, 0)), (9, (-1, 0))])
def test_what_varlen_hands_its_kernel(monkeypatch: pytest.MonkeyPatch, window: Any, expected: tuple[int, int]) -> None:
    """Window convention, boundaries and layout; the kernel itself runs on a card alone."""
    import torch.nn.attention.varlen as library

    seen: dict[str, Any] = {}

    def kernel(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, **named: Any) -> torch.Tensor:
        seen.update(named, q=q.shape, k=k.shape, v=v.shape, cu=(cu_q, cu_k), longest=(max_q, max_k))
        return q

    monkeypatch.setattr(library, "varlen_attn", kernel)
    segments = Segments.from_lengths([5, 1], total=8)
    out = varlen_kernel(
        torch.zeros(1, 4, 8, 16), torch.zeros(1, 2, 8, 16), torch.zeros(1, 2, 8, 16), segments, 0.5, 0.0, window
    )
    assert out.shape == (1, 8, 4, 16)
    assert seen["q"] == (8, 4, 16)
    assert seen["k"] == seen["v"] == (8, 2, 16)
    assert seen["cu"] == (segments.cu_seqlens, segments.cu_seqlens)
    assert seen["longest"] == (5, 5)
    assert seen["scale"] == 0.5
    assert seen["window_size"] == expected
