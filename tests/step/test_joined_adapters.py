"""Steps whose compiled layers join adapters: gradients as near to float32's as peft's own, and nothing left behind."""

from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from packed import documents, model_of, row_of, with_adapter
from slipstream import Options, TrainStep, apply
from slipstream.memory import policy
from slipstream.model.half_adapters import JOINED
from slipstream.model.tiled_mlp import tiled_mlps
from slipstream.train import loss
from slipstream.train.loss import summed_cross_entropy
from slipstream.transform import ATTRIBUTE, base_model

LENGTHS = (18, 1, 12, 14)
TOKENS = sum(LENGTHS)
TILES = 16
FORWARD, BACKWARD = "slipstream::adapted_products", "slipstream::adapted_products_backward"


@pytest.fixture(scope="module", autouse=True)
def traced_not_generated() -> Iterator[pytest.MonkeyPatch]:
    """Layers are traced with their backward and run as traced: what a compiler makes of that is not looked at here.

    Models of one family share their code over this file's tests, as steps of one process do.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
        _forget_code()
        yield patch
    _forget_code()


def _forget_code() -> None:
    """Code that was compiled for one backend serves no other."""
    loss._compiled_gradient.cache_clear()
    torch._dynamo.reset()


def adapted(family: str = "llama", targets: list[str] | None = None, dropout: float = 0.0, **overrides: Any) -> Any:
    """Weights in bfloat16 under float32 adapters that do something."""
    model = model_of(family, **overrides).to(torch.bfloat16)
    if targets is None:
        model = with_adapter(model, dropout)
    else:
        model = get_peft_model(model, LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
    draw = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=draw) * 0.1
    return model.train()


def row(seed: int = 0) -> dict[str, Any]:
    return row_of(documents(LENGTHS, seed), TOKENS)


def own_gradients(model: Any, half: bool = True) -> dict[str, Tensor]:
    """Those of the model as it is, under autocast or in float32."""
    model.zero_grad()
    batch = row()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
        logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
    (summed_cross_entropy(logits, batch["labels"]) / 10).backward()
    return taken(model)


def taken(model: Any) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def stepping(model: Any, mode: Any = "compiled") -> TrainStep:
    trained = [p for p in model.parameters() if p.requires_grad]
    return TrainStep(model, torch.optim.SGD(trained, lr=0.0), mode, clip=0)


def step_gradients(step: TrainStep) -> dict[str, Tensor]:
    """Those of one step, before its update."""
    step._step(row(), 10)
    return taken(step.model)


def error(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert found.keys() == wanted.keys()
    both = [torch.cat([one[name].float().flatten() for name in wanted]) for one in (found, wanted)]
    return float((both[0] - both[1]).norm() / both[1].norm())


def exact_gradients(family: str = "llama", **settings: Any) -> dict[str, Tensor]:
    return own_gradients(apply(adapted(family, **settings).float()), half=False)


def operators(step: TrainStep) -> Counter[str]:
    """How often a step calls each of its operators, after the one that compiles."""
    step_gradients(step)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        step_gradients(step)
    return Counter(event.name for event in found.events())


def near(found: dict[str, Tensor], pefts: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    assert 0 < error(pefts, exact) < 0.1
    assert 0 < error(found, exact) < 2 * error(pefts, exact)


@pytest.mark.parametrize(
    ("family", "groups", "activations"),
    [
        ("llama", 4, "keep"),
        ("llama", 4, "recompute"),
        ("qwen2", 4, "recompute"),  # with biases
        ("cohere2", 4, "keep"),
    ],
)
def test_gradients_are_as_near_as_pefts(family: str, groups: int, activations: Any) -> None:
    """``groups``: of one decoder layer. Recomputed layers call each twice, but for the last, which is out of them."""
    model = apply(adapted(family), Options(activations=activations))
    exact, pefts = exact_gradients(family), own_gradients(model)
    step = stepping(model)
    layers = base_model(model).config.num_hidden_layers
    told = {one.name: one for one in step.decisions}
    assert told["joined adapters"].on
    assert f"in {groups * layers} groups" in told["joined adapters"].reason
    near(step_gradients(step), pefts, exact)
    assert step.mode == "compiled"
    calls = operators(step)
    inside = groups if activations == "keep" else groups - 1
    assert calls[FORWARD] == layers * inside * (1 if activations == "keep" else 2)
    assert calls[BACKWARD] == layers * inside
    step.close()
    eager = stepping(model, "eager")
    assert "joined adapters" not in {one.name for one in eager.decisions}
    near(step_gradients(eager), pefts, exact)
    eager.close()


def test_the_last_product_is_not_made_again() -> None:
    """Products of its shape: one forward, and none in the recompute; two are gradients of what gate and up read."""
    model = apply(adapted(intermediate_size=72), Options(activations="recompute"))
    step = stepping(model)
    step_gradients(step)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as found:
        step_gradients(step)
    products = [event.input_shapes[1:3] for event in found.events() if event.name == "aten::addmm_"]
    layers = base_model(model).config.num_hidden_layers
    assert products.count([[TOKENS, 72], [72, 32]]) == layers * (1 + 2)
    assert products.count([[TOKENS, 32], [32, 72]]) == layers * (2 * 2 + 1), "gate and up twice; one gradient"
    step.close()


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"]])
def test_the_last_adapter_of_a_layer_may_be_one_of_a_group(targets: list[str]) -> None:
    """Such a one is computed once, with its group, and not by itself again."""
    model = apply(adapted(targets=targets), Options(activations="recompute"))
    exact, pefts = exact_gradients(targets=targets), own_gradients(model)
    step = stepping(model)
    near(step_gradients(step), pefts, exact)
    calls = operators(step)
    layers = base_model(model).config.num_hidden_layers
    assert (calls[FORWARD], calls[BACKWARD]) == (2 * layers, layers)
    groups = [vars(layer)[JOINED][0] for layer in step._step._adapters.layers]
    assert {len(group.layers) for group in groups} == {len(targets)}
    assert all(group.ready is None for group in groups)
    step.close()


@pytest.mark.parametrize("obstacle", ["dropout", "trained"])
def test_where_nothing_can_be_joined_it_is_said(obstacle: str) -> None:
    model = adapted(dropout=0.1 if obstacle == "dropout" else 0.0, num_hidden_layers=1)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name or (obstacle == "trained" and "proj" in name))
    step = stepping(apply(model))
    (told,) = [one for one in step.decisions if one.name == "joined adapters"]
    assert not told.on
    assert obstacle in told.reason
    assert any("base_layer" in name for name in step_gradients(step)) == (obstacle == "trained")
    assert step.mode == "compiled"
    step.close()


def test_those_that_do_not_fit_are_counted() -> None:
    model = adapted()
    for layer in base_model(model).get_decoder().layers:
        layer.self_attn.k_proj.lora_dropout["default"] = nn.Dropout(0.1)
    step = stepping(apply(model))
    (told,) = [one for one in step.decisions if one.name == "joined adapters"]
    assert told.on
    assert "12 adapters in 8 groups" in told.reason
    assert "2 others by themselves" in told.reason
    assert all(gradient.any() for gradient in step_gradients(step).values())
    step.close()


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_close_leaves_nothing(activations: Any) -> None:
    model = apply(adapted(), Options(activations=activations))
    before = {id(module): set(vars(module)) for module in model.modules()}
    expected = own_gradients(model)
    step = stepping(model)
    assert {id(module): set(vars(module)) for module in model.modules()} != before
    step_gradients(step)
    step.close()
    assert {id(module): set(vars(module)) for module in model.modules()} == before
    found = own_gradients(model)
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def test_an_eager_step_first_and_a_compiled_one_second() -> None:
    model = apply(adapted(), Options(activations="recompute"))
    exact, pefts = exact_gradients(), own_gradients(model)
    eager = stepping(model, "eager")
    first = step_gradients(eager)
    compiled = stepping(model)
    assert compiled._step._adapters is eager._step._adapters
    assert operators(compiled)[FORWARD] > 0
    near(step_gradients(compiled), pefts, exact)
    for found in (step_gradients(eager), first):
        near(found, pefts, exact)
    compiled.close()
    near(step_gradients(eager), pefts, exact)
    eager.close()
    assert not any("forward" in vars(module) for module in base_model(model).get_decoder().modules())


def test_two_compiled_steps_share_code_and_either_may_close() -> None:
    model = apply(adapted())
    exact, pefts = exact_gradients(), own_gradients(model)
    first = stepping(model)
    step_gradients(first)
    torch._dynamo.utils.counters.clear()
    second = stepping(model)
    near(step_gradients(first), pefts, exact)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0, "new groups compile nothing anew"
    near(step_gradients(second), pefts, exact)
    first.close()
    assert operators(second)[FORWARD] > 0
    near(step_gradients(second), pefts, exact)
    second.close()


def test_a_later_step_looks_anew() -> None:
    """Weights that were frozen for the first step and are trained now get their gradient."""
    model = apply(adapted())
    first = stepping(model)
    step_gradients(first)
    for layer in base_model(model).get_decoder().layers:
        layer.self_attn.q_proj.base_layer.weight.requires_grad_()
    found = step_gradients(stepping(model))
    weights = [gradient for name, gradient in found.items() if name.endswith("q_proj.base_layer.weight")]
    assert len(weights) == base_model(model).config.num_hidden_layers
    assert all(gradient.any() for gradient in weights)


def test_tiled_mlps() -> None:
    """A tile's gate and up are one operator; its backward swaps the copies that they compute with."""
    model = apply(adapted(), Options(activations="recompute"))
    exact, pefts = exact_gradients(), own_gradients(model)
    apply(model, Options(activations="recompute", tiles=TILES))
    step = stepping(model)
    assert tiled_mlps(model)
    near(step_gradients(step), pefts, exact)
    assert step.mode == "compiled"
    calls = operators(step)
    layers, tiles = base_model(model).config.num_hidden_layers, -(-TOKENS // TILES)
    assert calls[FORWARD] > 2 * layers * tiles, "each tile runs twice"
    assert calls[BACKWARD] >= layers * tiles
    step.close()


def test_offloaded_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "_obstacle", lambda now: None)  # the CPU offloads to its own memory
    model = apply(adapted(num_hidden_layers=3), Options(activations="recompute"))
    step = stepping(model)
    expected = step_gradients(step)
    step.close()
    apply(model, Options(activations="offload"))
    step = stepping(model)
    found = step_gradients(step)
    assert step.mode == "compiled"
    assert sum(lane.reloads for lane in getattr(base_model(model), ATTRIBUTE).checkpointing.offload.lanes.values()) > 0
    assert operators(step)[FORWARD] > 0
    assert any(gradient.any() for gradient in expected.values())
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name
    step.close()


def test_evaluation_and_generation_between_steps() -> None:
    model = apply(adapted(), Options(activations="recompute"))
    step = stepping(model)
    expected = step_gradients(step)
    arguments = {name: value for name, value in row().items() if name != "labels"}
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(**arguments).logits
        with model.disable_adapter():
            plain = model(**arguments).logits
        with step._step.layers():
            inside = model(**arguments).logits
            with model.disable_adapter():
                disabled = model(**arguments).logits
        ids = model.generate(input_ids=torch.arange(5, 9)[None], max_new_tokens=3, do_sample=False)
    assert ids.shape == (1, 7)
    assert not torch.equal(logits, plain)
    assert error({"": inside}, {"": logits}) < 0.05 < error({"": plain}, {"": logits})
    assert error({"": disabled}, {"": plain}) < 0.02
    model.train()
    found = step_gradients(step)
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
    step.close()


def test_a_layer_that_is_never_called_has_no_gradient() -> None:
    """As peft's, so that an optimizer leaves it alone."""
    model = apply(adapted("smollm3", num_hidden_layers=2))
    attention = base_model(model).get_decoder().layers[0].self_attn
    attention.spare = attention.q_proj.__class__(nn.Linear(32, 8, bias=False), "default", config=LoraConfig(), r=2)
    for mode in ("eager", "compiled"):
        step = stepping(model, mode)
        found = step_gradients(step)
        assert found
        assert not any("spare" in name for name in found)
        step.close()


def test_generated_code_gives_the_same(traced_not_generated: pytest.MonkeyPatch) -> None:
    """The last of this file: what was traced before is forgotten."""
    traced_not_generated.undo()
    _forget_code()
    model = apply(adapted(num_hidden_layers=1), Options(activations="keep"))
    exact, pefts = exact_gradients(num_hidden_layers=1), own_gradients(model)
    step = stepping(model)
    near(step_gradients(step), pefts, exact)
    assert step.mode == "compiled"
    step.close()
