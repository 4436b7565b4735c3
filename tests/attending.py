"""Attention by its definition, query by query: what every kernel is compared with."""

from collections.abc import Sequence

import torch

from slipstream.model.attention.call import Call


def by_definition(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, lengths: Sequence[int]
) -> torch.Tensor:
    """Queries [1, H, T, D], keys and values [1, G, T, D] → [1, T, H, D]; ``lengths`` of all segments sum to T."""
    rows: list[torch.Tensor] = []
    for length in lengths:
        start = len(rows)
        for i in range(start, start + length):
            first = start if call.window is None else max(start, i - call.window + 1)
            rows.append(torch.stack([_one(q, k, v, call, i, first, head) for head in range(q.shape[1])]))
    assert len(rows) == q.shape[2]
    return torch.stack(rows)[None]


def _one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, i: int, first: int, head: int) -> torch.Tensor:
    """[D]: query ``i`` of ``head`` over the keys from ``first`` to itself."""
    group = head // (q.shape[1] // k.shape[1])
    scores = k[0, group, first : i + 1] @ q[0, head, i] * (q.shape[-1] ** -0.5 if call.scale is None else call.scale)
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    weights = scores.exp()
    taken = weights.sum() + (0 if call.sinks is None else call.sinks[head].exp())
    return (weights[:, None] * v[0, group, first : i + 1]).sum(0) / taken


def drawn(
    heads: int, groups: int, tokens: int, width: int = 8, dtype: torch.dtype = torch.float64
) -> list[torch.Tensor]:
    """The same queries, keys and values whenever they are asked for; they take gradients."""
    torch.manual_seed(0)
    return [torch.randn(1, n, tokens, width, dtype=dtype, requires_grad=True) for n in (heads, groups, groups)]
