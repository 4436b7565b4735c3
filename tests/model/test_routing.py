"""One sort puts a layer's assignments in order: every slot, every offset, every gradient as by hand."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mixtures import dirty_memory
from slipstream.bench.experts_reference import HostQueries, look_up
from slipstream.model.routing import route


@st.composite
def assignments(draw: st.DrawFn) -> tuple[torch.Tensor, int]:
    """Tokens' experts [T, K], all different within a token, and how many experts there are."""
    experts = draw(st.integers(1, 40))
    top_k, tokens = draw(st.integers(1, min(8, experts))), draw(st.integers(1, 30))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    favourites = draw(st.integers(top_k, experts))  # the others get no tokens
    scores = torch.rand(tokens, experts, generator=generator)
    scores[:, favourites:] = -1
    return scores.topk(top_k).indices, experts


@settings(deadline=None, max_examples=40)
@given(assignments())
def test_every_assignment_has_one_slot_with_its_expert(given_: tuple[torch.Tensor, int]) -> None:
    index, experts = given_
    routing = route(index, experts)
    flat = index.flatten()
    assert torch.equal(routing.expert, flat[routing.order].int())
    assert torch.equal(routing.expert, flat.sort().values.int())
    assert torch.equal(routing.order[routing.inverse], torch.arange(flat.numel()))
    assert routing.offsets.dtype == torch.int32
    assert torch.equal(routing.offsets.long(), torch.bincount(flat, minlength=experts).cumsum(0))
    assert routing.counts == torch.bincount(flat, minlength=experts).tolist()


@settings(deadline=None, max_examples=20)
@given(assignments())
def test_each_experts_slots_are_its_tokens_in_their_order(given_: tuple[torch.Tensor, int]) -> None:
    index, experts = given_
    routing = route(index, experts)
    slots = torch.split(routing.order // index.shape[1], routing.counts)
    for found, (tokens, _) in zip(slots, look_up(index, experts), strict=True):
        assert torch.equal(found, tokens)


@settings(deadline=None, max_examples=25)
@given(assignments())
def test_gather_and_combine_and_their_gradients(given_: tuple[torch.Tensor, int]) -> None:
    index, experts = given_
    tokens, top_k = index.shape
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, 5, dtype=torch.float64, generator=draw).requires_grad_()
    weights = torch.rand(tokens, top_k, dtype=torch.float64, generator=draw).requires_grad_()
    with dirty_memory():
        routing = route(index, experts)
        gathered = routing.gather(x)
        out = routing.combine(gathered.sin() * (routing.expert[:, None] + 1), weights)
        ours = torch.autograd.grad(out.square().sum(), (x, weights))
    assert torch.equal(gathered, x[routing.order // top_k])
    plain = (x.sin()[:, None] * (index[..., None] + 1) * weights[..., None]).sum(1)
    theirs = torch.autograd.grad(plain.square().sum(), (x, weights))
    torch.testing.assert_close(out, plain)
    torch.testing.assert_close(ours, theirs)


def test_gradients_by_finite_differences() -> None:
    routing = route(torch.tensor([[2, 0], [0, 1], [2, 0]]), 4)
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    y = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(3, 2, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(routing.gather, (x,))
    torch.autograd.gradcheck(routing.combine, (y, weights))


def test_the_picture_in_the_module() -> None:
    routing = route(torch.tensor([[2, 0], [0, 1], [2, 0]]), 4)
    assert routing.order.tolist() == [1, 2, 5, 3, 0, 4]
    assert routing.inverse.tolist() == [4, 0, 1, 3, 5, 2]
    assert routing.expert.tolist() == [0, 0, 0, 1, 2, 2]
    assert routing.offsets.tolist() == [3, 4, 6, 6]


def test_the_host_asks_nothing_until_it_asks_for_counts() -> None:
    index = torch.rand(20, 64).topk(4).indices
    with HostQueries() as queries:
        routing = route(index, 64)
        routing.combine(routing.gather(torch.randn(20, 3)), torch.rand(20, 4))
    assert queries.count == 0
    with HostQueries() as queries:
        assert sum(routing.counts) == 80
    assert queries.count == 1
    with HostQueries() as queries:
        look_up(index, 64)
    assert queries.count == 64


def test_half_precision_weights_are_summed_in_more_digits() -> None:
    """Router weights may have more digits than what they weight: they are not rounded first."""
    index = torch.rand(50, 16).topk(8).indices
    routing = route(index, 16)
    y, weights = torch.randn(400, 7, dtype=torch.bfloat16), torch.rand(50, 8)
    exact = (y.double()[routing.inverse].view(50, 8, 7) * weights.double()[..., None]).sum(1)
    assert torch.equal(routing.combine(y, weights), exact.to(torch.bfloat16))
