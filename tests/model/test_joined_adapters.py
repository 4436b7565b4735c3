"""Which adapters read one tensor, and that compiled layers compute them together, in whatever order they are called."""

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from packed import model_of, with_adapter
from slipstream.model import joined_adapters
from slipstream.model.half_adapters import HALVES, JOINED, HalfAdapters
from slipstream.model.joined_adapters import Joined, can_be_joined, same_inputs
from slipstream.transform import apply, base_model

HALF = torch.bfloat16
NAMES = ("q", "k", "v")
ATTENTION, PAIR = ["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"]


@pytest.fixture(autouse=True)
def _nothing_compiled_before_or_after() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def halved(model: Any) -> Any:
    """Weights in half precision under float32 adapters."""
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if "lora_" in name else HALF)
    return model


def adapted(family: str = "llama", **overrides: Any) -> Any:
    return halved(with_adapter(model_of(family, **overrides)))


def layers_of(base: Any) -> list[Any]:
    adapters, _ = HalfAdapters.attach(base, HALF)
    assert adapters is not None
    adapters.detach()
    return adapters.layers


def groups_of(family: str, **overrides: Any) -> list[list[str]]:
    """The groups of the first decoder layer, by their last names."""
    base = base_model(apply(adapted(family, **overrides)))
    names = {module: name for name, module in base.named_modules()}
    layers = layers_of(base)
    found = [[names[layer] for layer in group] for group in same_inputs(base, layers, HALF)]
    assert sorted(chain(*found)) == sorted(names[layer] for layer in layers), "each layer is in one group"
    first = [group for group in found if ".layers.0." in group[0]]
    assert len(first) < len(found)
    return sorted([name.rpartition(".")[2] for name in group] for group in first)


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama", [ATTENTION, PAIR, ["o_proj"], ["down_proj"]]),
        ("qwen2", [ATTENTION, PAIR, ["o_proj"], ["down_proj"]]),  # biases before attention, none behind it
        ("qwen3", [ATTENTION, PAIR, ["o_proj"], ["down_proj"]]),
        ("phi3", [["qkv_proj"], ["o_proj"], ["gate_up_proj"], ["down_proj"]]),
        ("starcoder2", [ATTENTION, ["o_proj"], ["c_fc"]]),
        ("gpt_oss", [ATTENTION, ["o_proj"]]),
        # attention and MLP read one norm's output: different modules
        ("cohere2", [ATTENTION, PAIR, ["o_proj"], ["down_proj"]]),
    ],
)
def test_which_layers_read_one_tensor(family: str, expected: list[list[str]]) -> None:
    assert groups_of(family) == sorted(expected)


def test_a_parallel_block_reads_one_tensor_twice() -> None:
    """That attention and MLP of cohere2 stay apart is not because their inputs differ."""
    base = base_model(adapted("cohere2"))
    layers = [layer for layer in layers_of(base) if layer.get_base_layer().in_features == base.config.hidden_size]
    calls = [id(x) for layer, x in joined_adapters._calls(base, layers, HALF) if layer in layers[:10]]
    assert max(calls.count(one) for one in calls) == 5


def test_looking_leaves_no_trace() -> None:
    model = apply(adapted())
    base = base_model(model)
    layers = layers_of(base)
    base.get_decoder().layers[0].mlp.eval()  # of a mode of its own
    modes = [module.training for module in base.modules()]
    assert len(set(modes)) == 2
    before = {id(module): set(vars(module)) for module in model.modules()}
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    same_inputs(base, layers, HALF)
    assert torch.equal(torch.rand(3), expected)
    assert [module.training for module in base.modules()] == modes
    assert not any(layer._forward_pre_hooks for layer in layers)
    assert {id(module): set(vars(module)) for module in model.modules()} == before
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_forward_that_fails_leaves_no_trace_either() -> None:
    base = base_model(adapted())
    layers = layers_of(base)
    last = base.get_decoder().layers[-1]

    def broken(*_: Any) -> None:
        raise RuntimeError("no more")

    hook = last.register_forward_pre_hook(broken)
    with pytest.raises(RuntimeError, match="no more"):
        same_inputs(base, layers, HALF)
    hook.remove()
    assert all(module.training for module in base.modules())
    assert not any(layer._forward_pre_hooks for layer in layers)


def test_weights_of_several_dtypes_are_looked_at_under_autocast() -> None:
    """As a step computes: norms that are trained are float32."""
    base = base_model(adapted())
    for name, parameter in base.named_parameters():
        if "norm" in name:
            parameter.data = parameter.data.float()
    found = same_inputs(base, layers_of(base), HALF)
    assert sorted(map(len, found)) == [1, 1, 1, 1, 2, 2, 3, 3]


class Attention(nn.Module):
    """Three layers; which are called, how and in which order is told."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.order, self.doubled = order, ""
        self.q, self.k, self.v = (nn.Linear(16, width, bias=False) for width in (12, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        outs = []
        for name in self.order:
            given = x * 2 if name in self.doubled else x
            outs.append(getattr(self, name)(given))
        return torch.cat(outs, -1)


class Model(nn.Module):
    """As much of a transformers model as adapters ask for."""

    def __init__(self, order: str, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 16)
        self.layers = nn.ModuleList(Attention(order) for _ in range(layers))

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> list[Tensor]:
        x = self.embedding(input_ids)  # all read one tensor, each in a module of its own
        return [layer(x) for layer in self.layers]

    def get_decoder(self) -> "Model":
        return self

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding


def small(order: str, layers: int = 2) -> Model:
    torch.manual_seed(0)
    config = LoraConfig(r=2, lora_alpha=1, target_modules=list(NAMES), init_lora_weights=False)
    model: Any = get_peft_model(Model(order, layers), config)
    return halved(model).base_model.model


def run_each(model: Model, forwards: Callable[[Attention], Callable[[Tensor], Tensor]]) -> dict[str, Any]:
    """Gradients of a pass through each layer as ``forwards`` gives it."""
    model.zero_grad()
    ids = torch.arange(6)[None]
    with torch.autocast("cpu", dtype=HALF):
        model(ids)  # makes copies
        outs = [forwards(layer)(model.embedding(ids).to(HALF)) for layer in model.layers]
    torch.cat(outs).float().square().mean().backward()
    return {name: p.grad for name, p in model.named_parameters() if "lora_" in name}


def compiled(traced: list[int]) -> Callable[..., Tensor]:
    """``Attention``'s forward, compiled; notes how many layers each operator in each trace computes."""

    def noting(graph: Any, inputs: Any) -> Callable[..., Any]:
        for node in graph.graph.nodes:
            if "adapted_products" in str(node.target):
                traced.append(len(node.args[1]))
        ran: Callable[..., Any] = graph.forward
        return ran

    return torch.compile(Attention.forward, backend=noting, dynamic=False)


def compiled_and_not(
    order: str, traced: list[int], change: Callable[[Model], object] = lambda model: None
) -> tuple[Model, Any, Any]:
    """A model after a compiled pass, its gradients, and those of peft's own pass in float32."""
    model = small(order)
    adapters, _ = HalfAdapters.attach(model, HALF)
    assert adapters is not None
    assert adapters.join(model).on
    change(model)
    forward = compiled(traced)
    found = run_each(model, lambda layer: lambda x: forward(layer, x))
    groups = list({id(g): g for layer in adapters.layers for g in [vars(layer)[JOINED][0]]}.values())
    model.groups = groups  # type: ignore[assignment]
    adapters.detach()
    exact = model.float()
    exact.zero_grad()
    ids = torch.arange(6)[None]
    torch.cat([layer(exact.embedding(ids)) for layer in exact.layers]).square().mean().backward()
    return model, found, {name: p.grad for name, p in exact.named_parameters() if "lora_" in name}


def assert_near(found: dict[str, Any], exact: dict[str, Any]) -> None:
    assert found.keys() == exact.keys()
    for name, expected in exact.items():
        if expected is None:
            assert found[name] is None, name
            continue
        assert expected.any()
        assert (found[name] - expected).norm() < 3e-2 * expected.norm(), name


def test_three_layers_are_one_operator_and_share_their_code() -> None:
    traced: list[int] = []
    torch._dynamo.utils.counters.clear()
    model, found, exact = compiled_and_not("qkv", traced)
    assert [len(group.layers) for group in model.groups] == [3, 3]
    assert_near(found, exact)
    assert traced == [3], "traced once for both layers"
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert all(group.ready is None for group in model.groups)


def test_another_tensor_is_computed_by_itself() -> None:
    """Layers that read one tensor when looked at, and then don't."""
    traced: list[int] = []

    def change(model: Model) -> None:
        for layer in model.layers:
            layer.doubled = "k"

    model, found, exact = compiled_and_not("qkv", traced, change)
    assert traced == [3, 1]
    assert_near(found, exact)
    assert all(group.ready is None for group in model.groups)


@pytest.mark.parametrize("order", ["kqv", "vkq", "vqk", "qvk"])
def test_another_order_gives_the_same(order: str) -> None:
    """Called otherwise than when looked at."""
    traced: list[int] = []

    def change(model: Model) -> None:
        for layer in model.layers:
            layer.order = order

    _, found, exact = compiled_and_not("qkv", traced, change)
    assert 3 in traced
    assert_near(found, exact)


def test_what_was_not_fetched_does_not_outlive_the_next_forward() -> None:
    model = small("qkv")
    adapters, _ = HalfAdapters.attach(model, HALF)
    assert adapters is not None
    adapters.join(model)
    for layer in model.layers:
        layer.order = "qk"
    forward = compiled([])
    run_each(model, lambda layer: lambda x: forward(layer, x))
    assert all(group.ready is not None for group in adapters.groups)
    with torch.no_grad():
        model(torch.arange(6)[None])
    assert all(group.ready is None for group in adapters.groups)
    adapters.detach()


def test_a_layer_that_is_never_called_is_alone_and_has_no_gradient() -> None:
    model, found, exact = compiled_and_not("qk", [])
    assert sorted(len(group.layers) for group in model.groups) == [1, 1, 2, 2]
    assert any(gradient is None for gradient in exact.values())
    assert_near(found, exact)


def test_a_layer_that_is_called_twice_is_alone() -> None:
    model, found, exact = compiled_and_not("qkvk", [])
    assert sorted(len(group.layers) for group in model.groups) == [1, 1, 2, 2]
    assert_near(found, exact)


def test_a_layer_that_is_called_by_keyword_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Attention, x: Tensor) -> Tensor:
        return torch.cat([self.q(x), self.k(x=x), self.v(x)], -1)

    monkeypatch.setattr(Attention, "forward", forward)
    model, found, exact = compiled_and_not("qkv", [])
    assert sorted(len(group.layers) for group in model.groups) == [1, 1, 2, 2]
    assert_near(found, exact)


def test_layers_with_and_without_bias_are_no_group() -> None:
    model = small("qkv")
    for layer in model.layers:
        layer.k.base_layer.bias = nn.Parameter(torch.zeros(8, dtype=HALF), requires_grad=False)
    layers = [module for module in model.modules() if hasattr(module, "lora_A")]
    assert [len(group) for group in same_inputs(model, layers, HALF)] == [1] * 6


def test_copies_of_one_group_lie_below_each_other() -> None:
    model = small("qkv")
    adapters, _ = HalfAdapters.attach(model, HALF)
    assert adapters is not None
    adapters.join(model)
    model(torch.arange(6)[None])
    for group in adapters.groups:
        assert isinstance(group, Joined)
        copies = [vars(layer)[HALVES][0] for layer in group.layers]
        assert len(copies) == 3
        below = [one.data_ptr() + one.nbytes for one in copies]
        assert below[:-1] == [one.data_ptr() for one in copies[1:]]
    adapters.detach()


def _trained(layer: Any) -> None:
    layer.base_layer.weight.requires_grad_()


def _other_dtype(layer: Any) -> None:
    layer.base_layer.weight.data = layer.base_layer.weight.data.float()


def _trained_bias(layer: Any) -> None:
    layer.base_layer.bias = nn.Parameter(torch.zeros(12, dtype=HALF))


def _hooked(layer: Any) -> None:
    layer.base_layer.register_forward_hook(lambda *_: None)


def _dropout(layer: Any) -> None:
    layer.lora_dropout["default"] = nn.Dropout(0.1)


def _other_class(layer: Any) -> None:
    class Quantized(nn.Linear):
        pass

    layer.base_layer.__class__ = Quantized


def _own_forward(layer: Any) -> None:
    vars(layer.base_layer)["forward"] = layer.base_layer.forward


@pytest.mark.parametrize(
    "change", [_trained, _other_dtype, _trained_bias, _hooked, _dropout, _other_class, _own_forward]
)
def test_what_can_not_be_joined(change: Callable[[Any], None]) -> None:
    layer = small("qkv").layers[0].q
    assert can_be_joined(layer, "default", HALF)
    layer.lora_dropout["default"] = nn.Dropout(0.0)
    assert can_be_joined(layer, "default", HALF)
    change(layer)
    assert not can_be_joined(layer, "default", HALF)
