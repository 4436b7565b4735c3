"""Sorted slots compute what the experts one by one compute: values and gradients, in every layout, on dirty memory."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from mixtures import MIXTURES, Made, dirty_memory, experts_of, mixture_of
from slipstream.bench.experts_reference import HostQueries, where_experts
from slipstream.model.experts import ExpertsForward, LowRank, grouped_experts, looped_experts, no_adapters
from slipstream.model.experts_products import grouped_product, sliced_product
from slipstream.model.routing import route

FUNCTIONS = pytest.mark.parametrize("function", [grouped_experts, looped_experts])
CLOSE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
"""Relative to the norm; in bf16 the reference rounds each partial sum."""


def choices(tokens: int, top_k: int, experts: int, used: Sequence[int] | None = None) -> torch.Tensor:
    """Each token's experts [T, K], drawn from ``used``."""
    draw = torch.Generator().manual_seed(tokens + top_k)
    among = torch.tensor(list(used or range(experts)))
    return torch.stack([among[torch.randperm(len(among), generator=draw)[:top_k]] for _ in range(tokens)])


def computed(
    function: ExpertsForward, module: Any, index: torch.Tensor, dtype: torch.dtype, adapters: Any = no_adapters
) -> dict[str, torch.Tensor]:
    """The output for fixed inputs, and the gradients of everything that has one."""
    draw = torch.Generator().manual_seed(5)
    width = module.down_proj.shape[2 if module.is_transposed else 1]
    x = torch.randn(len(index), width, generator=draw).to(dtype).requires_grad_()
    weights = torch.rand(index.shape, generator=draw).requires_grad_()
    module.zero_grad(set_to_none=True)
    out = function(module, x, index, weights, adapters)
    out.backward(torch.randn(out.shape, generator=draw).to(dtype))
    parameters = {name: p.grad for name, p in module.named_parameters() if p.requires_grad}
    assert x.grad is not None
    return {"out": out.detach(), "x": x.grad, "weights": weights.grad, **parameters}


def assert_same(ours: dict[str, Any], theirs: dict[str, Any], relative: float) -> None:
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        assert ours[name].dtype == expected.dtype
        error, size = (ours[name].float() - expected.float()).norm(), expected.float().norm()
        assert error <= relative * size, f"{name}: {error / size:.1e}"


def module_of(family: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    return experts_of(mixture_of(family, **overrides)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", MIXTURES)
@FUNCTIONS
def test_every_layout(function: ExpertsForward, family: str, dtype: torch.dtype) -> None:
    module = module_of(family, dtype)
    index = choices(50, 3, module.num_experts)
    with dirty_memory():
        ours = computed(function, module, index, dtype)
    assert len(ours) == (7 if module.has_bias else 5)
    assert_same(ours, computed(where_experts, module, index, dtype), CLOSE[dtype])


@pytest.mark.parametrize("top_k", range(1, 9))
@FUNCTIONS
def test_every_number_of_experts_a_token(function: ExpertsForward, top_k: int) -> None:
    module = module_of("gpt_oss", num_local_experts=8)
    index = choices(20, top_k, 8)
    with dirty_memory():
        ours = computed(function, module, index, torch.float32)
    assert_same(ours, computed(where_experts, module, index, torch.float32), CLOSE[torch.float32])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("tokens", "used"),
    [(1, None), (1, [6]), (30, [2]), (30, [0]), (30, [7]), (30, [1, 4, 6]), (2, [0, 7]), (200, None)],
    ids=["one token", "one to one", "all to one", "all to the first", "all to the last", "gaps", "ends", "many"],
)
@pytest.mark.parametrize("family", ["gpt_oss", "olmoe"])
@FUNCTIONS
def test_experts_without_tokens_and_all_tokens_to_one(
    function: ExpertsForward, family: str, tokens: int, used: list[int] | None, dtype: torch.dtype
) -> None:
    """transformers#48205, #45621, MSLK#158, torchtitan#1166: zero gradients, on memory that was not zero."""
    module = module_of(family, dtype, **{"num_local_experts" if family == "gpt_oss" else "num_experts": 8})
    index = choices(tokens, min(2, len(used or range(8))), 8, used)
    idle = sorted(set(range(8)) - set(index.flatten().tolist()))
    assert bool(idle) == (tokens < 200)
    with dirty_memory():
        ours = computed(function, module, index, dtype)
    assert_same(ours, computed(where_experts, module, index, dtype), CLOSE[dtype])
    for name in ours.keys() - {"out", "x", "weights"}:
        assert ours[name].isfinite().all()
        assert not ours[name][idle].any()


@FUNCTIONS
def test_the_same_bits_every_time(function: ExpertsForward) -> None:
    module = module_of("gpt_oss", torch.bfloat16)
    index = choices(64, 2, module.num_experts)
    first, second = (computed(function, module, index, torch.bfloat16) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(("function", "waits"), [(grouped_experts, 0), (looped_experts, 1), (where_experts, 4)])
@pytest.mark.parametrize("training", [True, False])
def test_how_often_the_host_waits(function: ExpertsForward, waits: int, training: bool) -> None:
    """unsloth-zoo#1248; unsloth#4069, #3363: the same sparse path in evaluation, with as few waits."""
    module = module_of("gpt_oss").train(training)
    x, index = torch.randn(20, 32), choices(20, 2, 4)
    with HostQueries() as queries, torch.set_grad_enabled(training), Made(20 * 4 * 128) as made:
        function(module, x, index, torch.rand(20, 2))
    assert queries.count == waits
    assert made.names == []  # nothing of the size of all experts on all tokens


def test_experts_without_gate() -> None:
    module = module_of("olmoe")
    module.has_gate = False
    module.up_proj = torch.nn.Parameter(module.gate_up_proj.detach()[:, : module.down_proj.shape[2]].clone())
    del module.gate_up_proj
    index = choices(30, 3, 8)
    expected = computed(where_experts, module, index, torch.float32)
    assert "up_proj" in expected
    for function in (grouped_experts, looped_experts):
        assert_same(computed(function, module, index, torch.float32), expected, CLOSE[torch.float32])


@FUNCTIONS
def test_a_norm_after_each_expert(function: ExpertsForward) -> None:
    module = module_of("olmoe")
    expected = computed(where_experts, module, choices(30, 1, 8), torch.float32)["out"]
    module.has_post_expert_norm, module.post_expert_norm = True, torch.nn.Identity()
    same = computed(function, module, choices(30, 1, 8), torch.float32)["out"]
    assert_same({"out": same}, {"out": expected}, 1e-6)
    module.post_expert_norm.forward = lambda y: y * 3
    tripled = computed(function, module, choices(30, 1, 8), torch.float32)["out"]
    torch.testing.assert_close(tripled, 3 * expected)


@FUNCTIONS
def test_under_autocast_products_are_half_precision(function: ExpertsForward) -> None:
    module = module_of("gpt_oss")
    index, x, weights = choices(40, 2, 4), torch.randn(40, 32), torch.rand(40, 2)
    expected = where_experts(module, x, index, weights)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = function(module, x, index, weights)
    assert found.dtype == torch.float32
    assert 1e-4 < (found - expected).norm() / expected.norm() < 2e-2


@FUNCTIONS
def test_rows_of_several_sequences(function: ExpertsForward) -> None:
    module = module_of("olmoe")
    x, index, weights = torch.randn(2, 7, 32), choices(14, 2, 8), torch.rand(14, 2)
    out = function(module, x, index, weights)
    assert out.shape == x.shape
    assert torch.equal(out.flatten(0, 1), function(module, x.flatten(0, 1), index, weights))


@FUNCTIONS
def test_adapters_are_products_of_low_rank(function: ExpertsForward) -> None:
    rank = 8
    module = module_of("gpt_oss").requires_grad_(False)
    index = choices(30, 2, 4)
    draw = torch.Generator().manual_seed(3)
    shapes = {"gate_up_proj": (32, 128), "down_proj": (64, 32)}
    factors = {
        name: (
            torch.randn(4, inner, rank, generator=draw).requires_grad_(),
            torch.randn(4, rank, outer, generator=draw).requires_grad_(),
        )
        for name, (inner, outer) in shapes.items()
    }

    def adapters(name: str, dtype: torch.dtype) -> list[LowRank]:
        return [LowRank(*factors[name], 0.5), LowRank(*factors[name], 0.25)]  # two at once

    def run(this: ExpertsForward) -> dict[str, Any]:
        found = computed(this, module, index, torch.float32, adapters)
        flat = [factor for pair in factors.values() for factor in pair]
        grads = {str(i): factor.grad for i, factor in enumerate(flat)}
        for factor in flat:
            factor.grad = None
        return {**found, **grads}

    weight = min(p.numel() for name, p in module.named_parameters() if name.endswith("proj"))
    with Made(weight) as made:
        ours = run(function)
    assert made.names == []  # neither W + ΔW nor a gradient of that size
    assert_same(ours, run(where_experts), 5e-6)
    assert len(ours) == 7


def test_grouped_kernels_leave_rows_unwritten_and_we_never_read_them() -> None:
    x, weight = torch.randn(6, 8), torch.randn(3, 8, 8)
    with dirty_memory():
        short = torch.nn.functional.grouped_mm(x, weight, offs=torch.tensor([2, 2, 4], dtype=torch.int32))
        assert short[4:].isnan().all()  # the interesting case: a kernel that leaves rows as they were
        routing = route(torch.tensor([[0], [2], [0], [2], [2], [0]]), 3)
        assert int(routing.offsets[-1]) == len(x)
        assert grouped_product(x, weight, routing).isfinite().all()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_products_agree_and_frozen_matrices_get_no_gradient(transposed: bool, frozen: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    index = torch.tensor([[0], [2], [0], [2], [2], [0], [3], [3]])
    routing = route(index, 4)
    stored = torch.randn(4, 8, 16, generator=draw).requires_grad_(not frozen)
    x = torch.randn(8, 16 if transposed else 8, generator=draw).requires_grad_()
    weight = stored.transpose(1, 2) if transposed else stored
    with dirty_memory():
        ways = [grouped_product(x, weight, routing), sliced_product(x, weight, routing.counts)]
        gradients = [torch.autograd.grad(y.square().sum(), (x,) if frozen else (x, stored)) for y in ways]
    expected = torch.stack([x[slot] @ weight[expert] for slot, expert in enumerate(sorted(index.flatten()))])
    theirs = torch.autograd.grad(expected.square().sum(), (x,) if frozen else (x, stored))
    for way, found in zip(ways, gradients, strict=True):
        torch.testing.assert_close(way, expected)
        torch.testing.assert_close(found, theirs)


def test_kernels_that_leave_idle_experts_as_the_memory_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """As grouped products do on some cards, where a CPU's write zeros."""
    product = torch.nn.functional.grouped_mm
    poisoned = 0

    def kernel(left: torch.Tensor, right: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
        nonlocal poisoned
        out = product(left, right, offs=offs)
        if left.ndim == right.ndim == 2:
            out[torch.diff(offs, prepend=offs.new_zeros(1)) == 0] = float("nan")
            poisoned += 1
        return out

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", kernel)
    module = module_of("gpt_oss", num_local_experts=8)
    found = computed(grouped_experts, module, choices(30, 2, 8, [1, 4, 6]), torch.float32)
    assert poisoned == 4  # two stacks of matrices, two of biases
    assert all(value.isfinite().all() for value in found.values())
    assert not found["down_proj"][[0, 2, 3, 5, 7]].any()
