"""Adapters that read one tensor, as one operator: autograd's values, few products, nothing copied that need not be."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.model import adapted_products as module
from slipstream.model.adapted_products import adapted_products, gradients_of_products, low_product

INPUTS = 24
WIDTHS, RANKS = (20, 12, 8), (4, 2, 3)
EPSILON = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


@dataclass
class Layers:
    """What several layers that read ``x`` are made of; each is a leaf."""

    x: Tensor
    weights: list[Tensor]
    biases: list[Tensor]
    a: list[Tensor]
    b: list[Tensor]
    scales: list[float]

    def given(self) -> tuple[Any, ...]:
        return self.x, self.weights, self.biases, self.a, self.b, self.scales

    def trained(self) -> list[Tensor]:
        return [*([self.x] if self.x.requires_grad else []), *self.a, *self.b]

    def exact(self) -> "Layers":
        """The same numbers in float64."""

        def each(tensors: Sequence[Tensor]) -> list[Tensor]:
            return [one.detach().double().requires_grad_(one.requires_grad) for one in tensors]

        (x,) = each([self.x])
        return Layers(x, each(self.weights), each(self.biases), each(self.a), each(self.b), self.scales)


def layers_of(
    count: int,
    *,
    shape: Sequence[int] = (2, 5),
    bias: bool = False,
    dtype: torch.dtype = torch.float32,
    scales: Sequence[float] = (0.5, 0.5, 0.5),
    stacked: bool = False,
    wants_x: bool = True,
) -> Layers:
    draw = torch.Generator().manual_seed(0)

    def random(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=draw).to(dtype)

    widths, ranks = WIDTHS[:count], RANKS[:count]
    a = [random(rank, INPUTS) for rank in ranks]
    if stacked:
        a = list(torch.split(torch.cat(a), ranks))
    b = [random(width, rank) for width, rank in zip(widths, ranks, strict=True)]
    return Layers(
        random(*shape, INPUTS).requires_grad_(wants_x),
        [random(width, INPUTS) for width in widths],
        [random(width) for width in widths] if bias else [],
        [one.detach().requires_grad_() for one in a],
        [one.requires_grad_() for one in b],
        list(scales[:count]),
    )


def plain(layers: Layers) -> list[Tensor]:
    """Each layer by itself, as peft computes it."""
    outs = []
    for index, (weight, a, b, scale) in enumerate(zip(layers.weights, layers.a, layers.b, layers.scales, strict=True)):
        bias = layers.biases[index] if layers.biases else None
        outs.append(F.linear(layers.x, weight, bias) + scale * F.linear(F.linear(layers.x, a), b))
    return outs


def weighed(outs: Sequence[Tensor], used: Sequence[int]) -> Tensor:
    """A loss in which each number of the outputs at ``used`` counts differently."""
    losses = [
        (outs[i] * torch.randn(outs[i].shape, generator=torch.Generator().manual_seed(i)).to(outs[i].dtype)).sum()
        for i in used
    ]
    return torch.stack(losses).sum()


def assert_equal(layers: Layers, products: Callable[..., list[Tensor]] = adapted_products, unused: int = -1) -> None:
    """Outputs and gradients lie as near to float64's as the dtype's rounding lets them; the ``unused`` one has none."""
    exact, epsilon = layers.exact(), EPSILON[layers.x.dtype]
    outs, wanted = products(*layers.given()), plain(exact)
    used = [i for i in range(len(outs)) if i != unused]
    weighed(outs, used).backward()
    weighed(wanted, used).backward()
    for found, expected in zip(outs, wanted, strict=True):
        assert found.shape == expected.shape
        assert found.dtype == layers.x.dtype
        assert far(found, expected) < epsilon
    assert len(layers.trained()) == len(exact.trained())
    for index, (ours, theirs) in enumerate(zip(layers.trained(), exact.trained(), strict=True)):
        if theirs.grad is None:
            assert unused >= 0
            assert not ours.grad.any(), "an output without a use"
            continue
        assert theirs.grad.any()
        assert ours.grad.shape == theirs.grad.shape
        assert far(ours.grad, theirs.grad) < epsilon, index
    assert layers.x.requires_grad or layers.x.grad is None
    assert all(one.grad is None for one in (*layers.weights, *layers.biases))


def far(found: Tensor, expected: Tensor) -> float:
    return float((found.detach().double() - expected.detach()).norm() / expected.detach().norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("scales", [(1.0, 1.0, 1.0), (0.5, 0.5, 0.5), (0.5, 1.0, 2.0)], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_outputs_and_gradients_are_autograds(
    count: int, bias: bool, scales: tuple[float, ...], dtype: torch.dtype
) -> None:
    assert_equal(layers_of(count, bias=bias, scales=scales, dtype=dtype))
    assert_equal(layers_of(count, bias=bias, scales=scales, dtype=dtype, stacked=True))


@pytest.mark.parametrize("shape", [(7,), (2, 5), (1, 1), (1,), (2, 3, 2)], ids=str)
@pytest.mark.parametrize("wants_x", [True, False], ids=["x", "x without gradient"])
def test_any_shape_of_tokens(shape: tuple[int, ...], wants_x: bool) -> None:
    assert_equal(layers_of(3, shape=shape, wants_x=wants_x, scales=(0.5, 1.0, 2.0)))


@pytest.mark.parametrize("unused", [0, 1, 2])
def test_an_output_without_a_use(unused: int) -> None:
    assert_equal(layers_of(3), unused=unused)


def test_inputs_and_gradients_in_any_layout() -> None:
    layers = layers_of(3, shape=(4, 6))
    layers.x = layers.x.detach().transpose(0, 1).requires_grad_()
    assert not layers.x.is_contiguous()
    seen: list[bool] = []

    def turned(*given: Any) -> list[Tensor]:
        outs = adapted_products(*given)
        for out in outs:
            out.register_hook(lambda grad: grad.transpose(0, 2).contiguous().transpose(0, 2))
            out.register_hook(lambda grad: seen.append(grad.is_contiguous()))
        return outs

    assert_equal(layers, turned)
    assert seen == [False] * 3


def test_no_gradients_where_none_are_made() -> None:
    layers = layers_of(2)
    with torch.no_grad():
        outs = adapted_products(*layers.given())
    assert not any(out.requires_grad for out in outs)
    assert all(far(out, wanted) < 2e-6 for out, wanted in zip(outs, plain(layers.exact()), strict=True))


def test_stacked_matrices_are_read_where_they_lie() -> None:
    together, apart = layers_of(3, stacked=True).a, layers_of(3).a
    assert module._stacked(together).data_ptr() == together[0].data_ptr()
    assert module._stacked(apart[:1]).data_ptr() == apart[0].data_ptr()
    assert module._stacked(apart).data_ptr() not in {one.data_ptr() for one in apart}
    for matrices in (together, apart, together[1:], together[::-1], [together[0], together[2]], [together[0].clone()]):
        assert torch.equal(module._stacked(matrices), torch.cat(matrices))
    columns = torch.randn(INPUTS, 6).t()
    for transposed in ([columns], [columns[:3], columns[3:]]):
        assert torch.equal(module._stacked(transposed), columns), "no rows below each other"


class Counted(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("stacked", [True, False])
def test_the_input_is_read_once_for_all_adapters(stacked: bool) -> None:
    """Three layers: one product for all A's and one for their gradients; nothing of its size is summed alone."""
    layers = layers_of(3, stacked=stacked, shape=(10,))
    with torch.no_grad(), Counted() as forward:
        low = low_product(layers.x, layers.a, layers.scales)
    with torch.no_grad(), Counted() as backward:
        grads = [torch.ones(10, width) for width in WIDTHS]
        gradients_of_products(grads, *(layers.x, low, layers.weights, layers.a, layers.b, layers.scales), True)
    assert forward.calls["aten.mm.default"] == 1
    assert backward.calls["aten.mm.default"] == 3 + 1 + 1  # each B, all A's, and x from all A's
    assert backward.calls["aten.mm.out"] == 3
    assert backward.calls["aten.addmm_.default"] == 3
    assert not any(name.startswith("aten.add.") for name in backward.calls)
    assert forward.calls["aten.cat.default"] == backward.calls["aten.cat.default"] == (0 if stacked else 1)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_operators_say_what_they_do(dtype: torch.dtype, bias: bool) -> None:
    layers = layers_of(2, dtype=dtype, bias=bias)
    tolerances = {"rtol": 2e-2, "atol": 2e-1} if dtype == torch.bfloat16 else {}
    torch.library.opcheck(module._forward, layers.given(), **tolerances)
    low = low_product(layers.x.detach().flatten(0, -2), layers.a, layers.scales).detach()
    outs = [torch.randn(2, 5, width).to(dtype) for width in WIDTHS[:2]]
    for wants_x in (True, False):
        frozen = [[one.detach() for one in each] for each in (layers.weights, layers.a, layers.b)]
        torch.library.opcheck(module._backward, (outs, layers.x.detach(), low, *frozen, layers.scales, wants_x))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_code_gives_the_same(backend: str) -> None:
    torch._dynamo.reset()

    @torch.compile(backend=backend, dynamic=False)
    def compiled(*given: Any) -> list[Tensor]:
        x, *rest = given
        return [out * 1.0 for out in adapted_products(x * 1.0, *rest)]

    assert_equal(layers_of(3, scales=(0.5, 1.0, 2.0)), compiled)
    assert_equal(layers_of(2, bias=True), compiled)
    torch._dynamo.reset()


def test_the_compiler_sees_one_operator_each_way() -> None:
    graphs: list[Counter[str]] = []

    def seen(graph: Any, inputs: Any) -> Callable[..., Any]:
        graphs.append(Counter(str(node.target) for node in graph.graph.nodes if node.op == "call_function"))
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    compiled = torch.compile(adapted_products, backend=aot_autograd(fw_compiler=seen), dynamic=False, fullgraph=True)
    assert_equal(layers_of(3), compiled)
    forward, backward = graphs
    assert forward["slipstream.adapted_products.default"] == 1
    assert backward["slipstream.adapted_products_backward.default"] == 1
    products = [name for counts in graphs for name in counts if name.startswith(("aten.mm", "aten.addmm", "aten.add."))]
    assert not products
    torch._dynamo.reset()
