"""Attention under a mask, by its definition: loops over queries, in float64."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as gemma2_eager
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as gpt_oss_eager

from attending import by_definition, drawn
from slipstream import Segments
from slipstream.model.attention.call import Call
from slipstream.model.attention.sdpa import kernel

LENGTHS, TOTAL = (5, 1, 6), 14
"""The row has two tokens of padding, a segment of their own."""


@pytest.mark.parametrize("extra", ["none", "softcap", "sinks", "both"])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (4, 1)])
def test_by_its_definition(heads: int, groups: int, window: int | None, scale: float | None, extra: str) -> None:
    segments = Segments.from_lengths(LENGTHS, total=TOTAL)
    q, k, v = drawn(heads, groups, TOTAL)
    sinks = torch.linspace(-1, 1, heads, dtype=torch.float64, requires_grad=True)
    call = Call(
        scale=scale,
        window=window,
        softcap=0.7 if extra in ("softcap", "both") else None,
        sinks=sinks if extra in ("sinks", "both") else None,
    )
    found = kernel(q, k, v, segments, call.within(segments))
    expected = by_definition(q, k, v, call, (*LENGTHS, TOTAL - sum(LENGTHS)))
    assert found.shape == (1, TOTAL, heads, 8)
    assert found.is_contiguous()
    assert torch.allclose(found, expected, atol=1e-12)
    inputs = [q, k, v] + ([sinks] if call.sinks is not None else [])
    weight = torch.randn_like(expected)
    ours, theirs = (torch.autograd.grad((out * weight).sum(), inputs) for out in (found, expected))
    assert all(torch.allclose(a, b, atol=1e-11) for a, b in zip(ours, theirs, strict=True))


def eager_module(groups: int, sinks: torch.Tensor) -> Any:
    module = nn.Module()
    module.num_key_value_groups, module.sinks, module.head_dim = groups, sinks, 8
    return module.eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 3])
def test_caps_and_sinks_as_transformers_eager(window: int | None, dtype: torch.dtype) -> None:
    """In bfloat16 too, within its rounding: the order of scale, cap, mask and softmax is the same."""
    segments = Segments.from_lengths(LENGTHS, total=TOTAL)
    q, k, v = (x.detach() for x in drawn(4, 2, TOTAL, dtype=dtype))
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=dtype)
    module, mask = eager_module(2, sinks), segments.mask(dtype, window)
    capped, _ = gemma2_eager(module, q, k, v, mask, scaling=0.3, softcap=0.7)
    sunk, _ = gpt_oss_eager(module, q, k, v, mask, scaling=0.3)
    bound = 1e-6 if dtype is torch.float32 else 0.02
    ours = kernel(q, k, v, segments, Call(scale=0.3, window=window, softcap=0.7))
    assert (ours - capped).abs().max() < bound
    ours = kernel(q, k, v, segments, Call(scale=0.3, window=window, sinks=sinks))
    assert (ours - sunk).abs().max() < bound
    assert (capped - sunk).abs().max() > 0.1
    plain = kernel(q, k, v, segments, Call(scale=0.3, window=window))
    assert (plain - capped).abs().max() > 0.03
    assert (plain - sunk).abs().max() > 0.03


@pytest.mark.parametrize("extra", [{}, {"softcap": 0.7}])
def test_dropout_drops(extra: dict[str, float]) -> None:
    segments = Segments.from_lengths(LENGTHS, total=TOTAL)
    q, k, v = (x.detach() for x in drawn(2, 2, TOTAL))
    torch.manual_seed(3)
    draws = [kernel(q, k, torch.ones_like(v), segments, Call(dropout=0.5, **extra)) for _ in range(400)]
    assert not torch.allclose(draws[0], draws[1])
    assert abs(torch.stack(draws).mean() - 1) < 0.05
    assert torch.allclose(kernel(q, k, torch.ones_like(v), segments, Call(**extra)), torch.ones(1, dtype=v.dtype))
