"""A recomputed layer's last adapter: autograd's values, and a recompute that ends before its product."""

import gc
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from slipstream.model.last_product import last_product

INPUTS, OUTPUTS, RANK = 24, 20, 4
EPSILON = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


def given(
    shape: tuple[int, ...] = (2, 5), dtype: torch.dtype = torch.float32, bias: bool = False, wants_x: bool = True
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    """x, weight, bias, A, B."""
    draw = torch.Generator().manual_seed(0)

    def random(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=draw).to(dtype)

    bias_O = random(OUTPUTS) if bias else None
    a_RI, b_OR = random(RANK, INPUTS).requires_grad_(), random(OUTPUTS, RANK).requires_grad_()
    return random(*shape, INPUTS).requires_grad_(wants_x), random(OUTPUTS, INPUTS), bias_O, a_RI, b_OR


def plain(x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> Tensor:
    return F.linear(x, weight, bias) + scale * F.linear(F.linear(x, a), b)


def far(found: Tensor, expected: Tensor) -> float:
    return float((found.detach().double() - expected.detach()).norm() / expected.detach().norm())


def assert_equal(tensors: tuple[Any, ...], scale: float, run: Any = last_product) -> None:
    exact = [None if t is None else t.detach().double().requires_grad_(t.requires_grad) for t in tensors]
    out, wanted = run(*tensors, scale), plain(*exact, scale)
    assert out.shape == wanted.shape
    assert far(out, wanted) < EPSILON[out.dtype]
    # a gradient that is laid out otherwise than its output
    grad = torch.randn(wanted.shape[::-1], generator=torch.Generator().manual_seed(1)).permute(*range(out.dim())[::-1])
    out.backward(grad.to(out.dtype))
    wanted.backward(grad.to(out.dtype).double())
    for ours, theirs in zip(tensors, exact, strict=True):
        if ours is None or not ours.requires_grad:
            assert ours is None or ours.grad is None
            continue
        assert theirs.grad.any()
        assert far(ours.grad, theirs.grad) < EPSILON[out.dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(7,), (2, 5), (1, 1)], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("wants_x", [True, False], ids=["x", "x without gradient"])
def test_output_and_gradients_are_autograds(
    shape: tuple[int, ...], dtype: torch.dtype, bias: bool, scale: float, wants_x: bool
) -> None:
    assert_equal(given(shape, dtype, bias, wants_x), scale)


def test_the_same_where_it_is_recomputed() -> None:
    def run(*tensors: Any) -> Tensor:
        out: Tensor = checkpoint(last_product, *tensors, use_reentrant=False)
        return out

    assert_equal(given(), 0.5, run)


class Products(TorchDispatchMode):
    """Counts products that read the weight, and those that read A, with the rows they give."""

    def __init__(self, weight: Tensor, a: Tensor) -> None:
        super().__init__()
        self.names = {weight.untyped_storage().data_ptr(): "weight", a.untyped_storage().data_ptr(): "A"}
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            found = [self.names.get(one.untyped_storage().data_ptr()) for one in args if isinstance(one, Tensor)]
            self.counts.update(name for name in found if name)
        return func(*args, **(kwargs or {}))


def layer(x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """The end of a decoder layer: its last product, and the residual's sum, which no backward reads."""
    return x[..., :OUTPUTS] + last_product(torch.tanh(x), weight, bias, a, b, 0.5)


def test_a_recompute_ends_before_the_product() -> None:
    tensors = given()
    with Products(tensors[1], tensors[3]) as forward:
        out = checkpoint(layer, *tensors, use_reentrant=False)
    assert forward.counts == {"weight": 1, "A": 1}
    with Products(tensors[1], tensors[3]) as backward:
        out.sum().backward()
    # the recompute's product with A; the gradient of x from both
    assert backward.counts == {"weight": 1, "A": 2}


def test_a_graph_can_be_gone_through_twice_and_then_frees_what_it_kept() -> None:
    x, weight, bias, a, b = given()
    inner = torch.tanh(x)
    kept = weakref.ref(inner)
    out = last_product(inner, weight, bias, a, b, 0.5)
    del inner
    gc.collect()
    out.sum().backward(retain_graph=True)
    assert a.grad is not None
    once = a.grad.clone()
    gc.disable()
    try:
        assert kept() is not None
        out.sum().backward()
        del out
        assert kept() is None, "freed with its graph, without a collection of garbage"
    finally:
        gc.enable()
    assert torch.allclose(a.grad, 2 * once)


def test_without_gradients() -> None:
    tensors = given(bias=True)
    with torch.no_grad():
        out = last_product(*tensors, 0.5)
    assert not out.requires_grad
    assert far(out, plain(*[t.double() for t in tensors if t is not None], 0.5)) < 2e-6
