"""Half-precision adapters: autocast's arithmetic, float32 masters, and nothing left behind."""

import pytest
import torch

from packed import documents, model_of, row_of, with_adapter
from slipstream.model.half_adapters import HalfAdapters
from slipstream.train.loss import summed_cross_entropy
from slipstream.transform import apply, base_model


def adapted(dropout: float = 0.0):
    """A bfloat16 model with float32 adapters that do something, on segments."""
    model = with_adapter(model_of("llama").to(torch.bfloat16), dropout)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)) * 0.1
            assert parameter.requires_grad
    return apply(model.train())


def gradients_of(model, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    row = row_of(documents())
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        logits = model(**{name: value for name, value in row.items() if name != "labels"}).logits
    summed_cross_entropy(logits, row["labels"]).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


def test_gradients_are_autocasts() -> None:
    model = adapted()
    plain = gradients_of(model)
    adapters, decision = HalfAdapters.attach(base_model(model), torch.bfloat16)
    assert adapters is not None
    assert decision.on
    assert len(adapters.layers) == len(plain) // 2
    half = gradients_of(model)
    calls = [layer._slipstream_half for layer in adapters.layers]
    assert all(a.dtype == b.dtype == torch.bfloat16 for a, b in calls)
    adapters.detach()
    exact = gradients_of(model.float(), torch.float32)
    assert all(gradient.dtype == torch.float32 for gradient in half.values())
    assert 0 < error(plain, exact) < 0.05
    assert 0 < error(half, exact) < 2 * error(plain, exact)


def error(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """How far gradients lie from others, relative to the norm of all."""
    both = [torch.cat([one[name].flatten() for name in wanted]) for one in (found, wanted)]
    return float((both[0] - both[1]).norm() / both[1].norm())


def test_masters_are_cast_anew_in_each_forward() -> None:
    model = adapted()
    HalfAdapters.attach(base_model(model), torch.bfloat16)
    first = gradients_of(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.mul_(2)
    second = gradients_of(model)
    assert any(not torch.equal(first[name], second[name]) for name in first)


def test_an_evaluation_between_forward_and_backward_changes_nothing() -> None:
    model = adapted()
    HalfAdapters.attach(base_model(model), torch.bfloat16)
    wanted = gradients_of(model)
    row = row_of(documents())
    arguments = {name: value for name, value in row.items() if name != "labels"}
    base_model(model).gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    apply(model)
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = summed_cross_entropy(model(**arguments).logits, row["labels"])
        with torch.inference_mode():
            model(**arguments)
    loss.backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(parameter.grad, wanted[name]), name


def test_detach_gives_pefts_forward_back() -> None:
    model = adapted()
    before = {id(module): set(vars(module)) for module in model.modules()}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    wanted = gradients_of(model)
    adapters, _ = HalfAdapters.attach(base_model(model), torch.bfloat16)
    assert adapters is not None
    gradients_of(model)
    adapters.detach()
    assert {id(module): set(vars(module)) for module in model.modules()} == before
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    found = gradients_of(model)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_steps_of_one_model_share_them() -> None:
    model = adapted()
    base = base_model(model)
    first, _ = HalfAdapters.attach(base, torch.bfloat16)
    second, decision = HalfAdapters.attach(base, torch.bfloat16)
    assert first is second is not None
    assert decision.on
    other, decision = HalfAdapters.attach(base, torch.float16)
    assert (other, decision.on) == (None, False)
    first.detach()
    forwards = [vars(layer).get("forward") for layer in first.layers]
    assert all(forwards)
    second.detach()
    assert not any("forward" in vars(layer) for layer in first.layers)
    again, decision = HalfAdapters.attach(base, torch.bfloat16)
    assert again is not first
    assert decision.on


def test_switched_off_adapters_stay_off() -> None:
    model = adapted()
    row = row_of(documents())
    arguments = {name: value for name, value in row.items() if name != "labels"}
    with torch.no_grad(), model.disable_adapter():
        wanted = model(**arguments).logits
    HalfAdapters.attach(base_model(model), torch.bfloat16)
    with torch.no_grad():
        assert not torch.equal(model(**arguments).logits, wanted)
        with model.disable_adapter():
            assert torch.equal(model(**arguments).logits, wanted)


def test_float32_and_half_precision_adapters_stay_pefts() -> None:
    model = adapted()
    nothing, decision = HalfAdapters.attach(base_model(model), torch.float32)
    assert nothing is None
    assert "float32" in decision.reason
    nothing, decision = HalfAdapters.attach(base_model(model.to(torch.bfloat16)), torch.bfloat16)
    assert nothing is None
    assert not decision.on


@pytest.mark.parametrize("setting", [{"use_dora": True}, {"lora_bias": True}])
def test_variants_stay_pefts(setting: dict[str, bool]) -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(model_of("llama"), LoraConfig(target_modules=["q_proj"], **setting))
    nothing, decision = HalfAdapters.attach(base_model(model), torch.bfloat16)
    assert nothing is None
    assert not decision.on
