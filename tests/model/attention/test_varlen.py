"""What variable-length attention hands its kernel, and the arithmetic of sinks around it; the kernel runs on cards."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from attending import by_definition, drawn
from slipstream import Segments
from slipstream.model.attention import varlen
from slipstream.model.attention.call import Call

LENGTHS, TOTAL = (5, 1, 6), 14
SPANS = (*LENGTHS, TOTAL - sum(LENGTHS))


@pytest.fixture(autouse=True)
def _forget_signatures() -> Iterator[None]:
    """What is known of the real kernel's signature is not that of a stand-in."""
    varlen._grouped_heads.cache_clear()
    yield
    varlen._grouped_heads.cache_clear()


@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (2, 2)])
@pytest.mark.parametrize(("window", "expected"), [(None, (-1, 0)), (3, (2, 0)), (1, (0, 0)), (9, (-1, 0))])
def test_what_it_hands_its_kernel(
    monkeypatch: pytest.MonkeyPatch, window: Any, expected: Any, heads: int, groups: int, announced: bool
) -> None:
    """Boundaries as they are, windows by the kernel's convention, grouped heads unrepeated, announced where asked."""
    import torch.nn.attention.varlen as library

    seen: dict[str, Any] = {}

    def kernel(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, **named: Any) -> torch.Tensor:
        seen.update(named, q=q.shape, k=k.shape, v=v.shape, cu=(cu_q, cu_k), longest=(max_q, max_k))
        return q

    def newer(*args: Any, enable_gqa: bool = False, **named: Any) -> torch.Tensor:
        return kernel(*args, enable_gqa=enable_gqa, **named)

    monkeypatch.setattr(library, "varlen_attn", newer if announced else kernel)
    segments = Segments.from_lengths([5, 1], total=8)
    q, k, v = drawn(heads, groups, 8)
    out = varlen.kernel(q, k, v, segments, Call(scale=0.5, window=window).within(segments))
    assert torch.equal(out, q.transpose(1, 2))
    assert seen["q"] == (8, heads, 8)
    assert seen["k"] == seen["v"] == (8, groups, 8)
    assert seen["cu"] == (segments.cu_seqlens, segments.cu_seqlens)
    assert seen["cu"][0].dtype == torch.int32
    assert seen["longest"] == (5, 5)
    assert seen["scale"] == 0.5
    assert seen["window_size"] == expected
    assert seen.get("enable_gqa") == ((heads != groups) if announced else None)
    assert not segments.builds  # no mask, nothing derived


class Flash:
    """The flash operators by their definition, in the dtype given: log-sum-exp out, and gradients from (out, lse)."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def forward(self, q: Any, k: Any, v: Any, ends: Any, ends_k: Any, longest: int, *rest: Any, **named: Any) -> Any:
        self.calls.append("forward")
        assert ends is ends_k
        assert longest == max(SPANS)
        assert rest == (longest, 0.0, named["window_size_left"] == -1, False)
        scores = self.scores(q, k, ends, **named)
        lse = scores.logsumexp(-1)
        out = torch.einsum("hts,shd->thd", (scores - lse[..., None]).exp(), repeated(v, q))
        longer = torch.nn.functional.pad(lse, (0, 2), value=math.inf)  # the operator may round the row's length up
        return out, longer, torch.tensor(7), torch.tensor(8), torch.empty(0)

    def backward(
        self, grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, ends: Any, ends_k: Any, *rest: Any, **named: Any
    ) -> Any:
        self.calls.append("backward")
        assert grad.is_contiguous()
        assert rest[-2:] == (torch.tensor(7), torch.tensor(8))
        assert rest[:4] == (max(SPANS), max(SPANS), 0.0, named["window_size_left"] == -1)
        assert lse.shape == (q.shape[1], q.shape[0])
        weights = (self.scores(q, k, ends, **named) - lse[..., None]).exp()
        taken = (grad * out).sum(-1).transpose(0, 1)
        of_scores = weights * (torch.einsum("thd,shd->hts", grad, repeated(v, q)) - taken[..., None]) * named["scale"]
        grad_k = torch.einsum("hts,thd->shd", of_scores, q)
        grad_v = torch.einsum("hts,thd->shd", weights, grad)
        return torch.einsum("hts,shd->thd", of_scores, repeated(k, q)), summed(grad_k, k), summed(grad_v, v)

    def scores(
        self, q: Any, k: Any, ends: Any, *, scale: float, window_size_left: int, window_size_right: int
    ) -> torch.Tensor:
        """[H, T, T], -inf where nothing is attended."""
        assert window_size_right == 0
        place = torch.arange(q.shape[0])
        segment = torch.searchsorted(ends[1:].contiguous(), place, right=True)
        seen = (segment[:, None] == segment) & (place[:, None] >= place)
        if window_size_left >= 0:
            seen &= place[:, None] - place <= window_size_left
        return (torch.einsum("thd,shd->hts", q, repeated(k, q)) * scale).masked_fill(~seen, -math.inf)


def repeated(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def summed(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return grad.unflatten(1, (x.shape[1], -1)).sum(2)


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (4, 1)])
def test_sinks_by_their_definition(
    monkeypatch: pytest.MonkeyPatch, heads: int, groups: int, window: int | None, scale: float | None
) -> None:
    """Output, and gradients of queries, keys, values and sinks, against autograd through a plain softmax with sinks."""
    flash = Flash()
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash.forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", flash.backward)
    segments = Segments.from_lengths(LENGTHS, total=TOTAL)
    q, k, v = drawn(heads, groups, TOTAL)
    sinks = torch.tensor([-1.5, 0.0, 0.5, 3.0], dtype=torch.float64, requires_grad=True)
    call = Call(scale=scale, window=window, sinks=sinks)
    found = varlen.kernel(q, k, v, segments, call.within(segments))
    expected = by_definition(q, k, v, call, SPANS)
    assert torch.allclose(found, expected, atol=1e-12)
    assert not torch.allclose(found, by_definition(q, k, v, Call(scale=scale, window=window), SPANS), atol=1e-2)
    weight = torch.randn_like(expected)
    inputs = [q, k, v, sinks]
    ours, theirs = (torch.autograd.grad((out * weight).sum(), inputs) for out in (found, expected))
    assert flash.calls == ["forward", "backward"]
    for name, mine, reference in zip(("q", "k", "v"), ours, theirs, strict=False):
        assert torch.allclose(mine, reference, atol=1e-11), name
    assert (theirs[3].abs() > 1e-3).all()
    assert torch.allclose(ours[3], theirs[3], atol=1e-5)  # summed in float32


def test_a_sink_that_takes_nothing_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    flash = Flash()
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash.forward)
    segments = Segments.from_lengths(LENGTHS, total=TOTAL)
    q, k, v = drawn(4, 2, TOTAL)
    found = varlen.kernel(q, k, v, segments, Call(sinks=torch.full((4,), -100.0)))
    assert torch.allclose(found, by_definition(q, k, v, Call(), SPANS), atol=1e-12)
