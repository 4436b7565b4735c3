"""Which experts a model gets: chosen with a reason, refused with a remedy, and put back."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from mixtures import MIXTURES, mixture_of
from packed import documents, logits_of, model_of, row_of
from slipstream import InputError, Options, apply, decisions, restore
from slipstream.cost.hardware import Device, describe
from slipstream.model import own_kernels
from slipstream.model.experts_choice import choose_experts, find_experts
from slipstream.transform import ATTRIBUTE

CPU = describe("cpu")
HOPPER = Device("cuda", "a card", 2**30, (9, 0), bf16=True, unified_memory=False)


def reason_of(model: Any) -> tuple[bool, str]:
    (decision,) = [decision for decision in decisions(model) if decision.name == "experts"]
    return decision.on, decision.reason


@pytest.mark.parametrize(
    ("device", "dtype", "expected", "reason"),
    [
        (HOPPER, torch.bfloat16, "grouped", "without a host sync"),
        (replace(HOPPER, compute_capability=(10, 0)), torch.bfloat16, "grouped", "without a host sync"),
        (HOPPER, torch.float32, "loop", "computes in bfloat16, and the layers in float32"),
        (HOPPER, torch.float16, "loop", "and the layers in float16"),
        (replace(HOPPER, compute_capability=(8, 9)), torch.bfloat16, "loop", "no grouped kernel for compute cap"),
        (replace(HOPPER, compute_capability=(12, 0)), torch.bfloat16, "loop", "capability 12.0"),
        (CPU, torch.float32, "loop", "nothing waits for a host that computes itself"),
        (replace(CPU, kind="xpu"), torch.bfloat16, "loop", "no grouped product on xpu"),
    ],
)
def test_auto_takes_grouped_where_it_does_not_wait(
    device: Device, dtype: torch.dtype, expected: str, reason: str
) -> None:
    choice, decision = choose_experts("auto", mixture_of("gpt_oss"), device, dtype)
    assert choice == expected
    assert decision.on
    assert decision.reason.startswith(f"{expected}: ")
    assert reason in decision.reason


def test_what_is_asked_for_is_taken_or_refused_with_a_remedy() -> None:
    model = mixture_of("gpt_oss")
    assert choose_experts("loop", model, HOPPER, torch.bfloat16)[0] == "loop"
    assert choose_experts("grouped", model, CPU, torch.float32)[0] == "grouped"
    with pytest.raises(InputError, match=r"experts grouped: .* computes in bfloat16.*; set experts to auto or loop"):
        choose_experts("grouped", model, HOPPER, torch.float32)
    with pytest.raises(InputError, match=r"experts 'sorted' is none of auto, grouped, loop"):
        choose_experts("sorted", model, CPU, torch.float32)  # type: ignore[arg-type]


def test_odd_widths_are_looped() -> None:
    model = mixture_of("mixtral", intermediate_size=20)
    choice, decision = choose_experts("auto", model, HOPPER, torch.bfloat16)
    assert choice == "loop"
    assert "multiples of 8, and there is 20" in decision.reason
    with pytest.raises(InputError, match="multiples of 8"):
        choose_experts("grouped", model, HOPPER, torch.bfloat16)


@pytest.mark.parametrize("experts", ["grouped", "loop"])
def test_a_dense_model_has_none(experts: Any) -> None:
    model = apply(model_of("llama"))
    assert reason_of(model)[0] is False
    assert "no experts" in reason_of(model)[1]
    with pytest.raises(InputError, match=rf"experts {experts}: the model has no experts.*; set experts to auto"):
        apply(model_of("llama"), Options(experts=experts))


def test_experts_that_we_cannot_compute_are_left_as_they_were() -> None:
    model = mixture_of("gpt_oss")
    next(iter(find_experts(model).values()))._is_expert_parallel = True
    apply(model)
    assert reason_of(model) == (False, "the experts are spread over several devices (expert parallel)")
    assert model.config._experts_implementation == "grouped_mm"
    stored = mixture_of("gpt_oss")
    experts = next(iter(find_experts(stored).values()))
    experts.down_proj = torch.nn.Parameter(experts.down_proj.to(torch.uint8), requires_grad=False)
    assert "down_proj is no stack of floating-point matrices" in reason_of(apply(stored))[1]


@pytest.mark.parametrize("given", ["grouped_mm", "eager", "batched_mm"])
@pytest.mark.parametrize("family", MIXTURES)
def test_restore_puts_the_models_own_back(family: str, given: str) -> None:
    model = mixture_of(family).eval()
    model.set_experts_implementation(given)
    forwards = {name: m.forward for name, m in model.named_modules()}
    with torch.no_grad():
        before = model(input_ids=torch.arange(5, 45)[None]).logits
        apply(model, Options(experts="grouped"))
        assert model.config._experts_implementation == "slipstream_grouped"
        during = model(input_ids=torch.arange(5, 45)[None]).logits
        restore(model)
        assert model.config._experts_implementation == given
        assert not hasattr(model, ATTRIBUTE)
        assert {name: m.forward for name, m in model.named_modules()} == forwards
        assert torch.equal(model(input_ids=torch.arange(5, 45)[None]).logits, before)
    assert (during - before).norm() <= 1e-5 * before.norm()


def test_two_instances_do_not_disturb_each_other() -> None:
    ours, other = mixture_of("gpt_oss"), mixture_of("gpt_oss")
    apply(ours, Options(experts="loop"))
    assert other.config._experts_implementation == "grouped_mm"
    with torch.no_grad():
        logits_of(ours, row_of(documents()))
        assert other(input_ids=torch.arange(5, 45)[None]).logits.isfinite().all()


def test_every_mixture_is_found() -> None:
    for family in MIXTURES:
        model = mixture_of(family)
        dense = 1 if "first_k_dense_replace" in MIXTURES[family] else 0
        assert len(find_experts(model)) == 2 - dense


@pytest.mark.parametrize(
    ("cuda", "triton", "told"),
    [("13.0", True, "own kernels where"), ("13.0", False, "Triton is missing"), (None, False, "own kernels where")],
)
def test_own_kernels_are_told(cuda: str | None, triton: bool, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_kernels, "_has_triton", lambda: triton)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert told in own_kernels.kernels_told("cuda")
    assert own_kernels.kernels_told("cpu") == ""
