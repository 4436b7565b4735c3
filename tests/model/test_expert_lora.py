"""Adapters on experts and routers: what peft computes, saved as peft saves it, without weight-sized products."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from mixtures import MIXTURES, Made, mixture_of
from packed import assert_close_gradients, gradients, model_of
from slipstream import InputError, Options, apply, restore
from slipstream.model.lora import AdapterOptions, add_adapter
from slipstream.model.trainable import trainable_summary
from slipstream.transform import ATTRIBUTE

IDS = torch.arange(5, 101).remainder(300).view(2, 48)
RELATIVE = 2e-5


def adapted(family: str, applied: str, rank: int = 3, **choices: Any) -> Any:
    """A mixture with adapters on everything, ``applied`` before or after peft, or not at all; no adapter is zero."""
    model = mixture_of(family)
    if applied == "before":
        apply(model, Options(**choices))
    options = AdapterOptions(rank=rank, alpha=5, experts=True, router=True)
    tuned = add_adapter(model, options, seed=0)
    draw = torch.Generator().manual_seed(9)
    for name, parameter in tuned.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.3, generator=draw)
    if applied == "after":
        apply(tuned, Options(**choices))
    if applied == "not":
        model.set_experts_implementation("eager")
    return tuned.train()


def logits(model: Any) -> torch.Tensor:
    return model(input_ids=IDS, use_cache=False).logits


@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("experts", ["grouped", "loop"])
@pytest.mark.parametrize("family", MIXTURES)
def test_what_peft_computes(family: str, experts: Any, activations: Any) -> None:
    """unsloth-zoo#606: every trainable parameter has a gradient after one step, and it is the right one."""
    plain = adapted(family, "not")
    logits(plain).square().mean().backward()
    applied = "before" if activations == "keep" else "after"
    ours = adapted(family, applied, experts=experts, activations=activations)
    out = logits(ours)
    out.square().mean().backward()
    assert torch.allclose(out, logits(plain), atol=1e-5)
    trained = [name for name, p in ours.named_parameters() if p.requires_grad]
    assert [name for name in trained if not ours.get_parameter(name).grad.any()] == []
    for part in ("experts.base_layer.lora_A", "experts.lora_B", "router.lora_A|gate.lora_A", "q_proj.lora_B"):
        assert any(word in name for name in trained for word in part.split("|"))
    assert_close_gradients(gradients(ours), gradients(plain), RELATIVE)


@pytest.mark.parametrize("family", MIXTURES)
def test_saved_adapters_load_in_plain_peft_and_theirs_in_ours(family: str, tmp_path: Path) -> None:
    ours = adapted(family, "after", experts="grouped").eval()
    ours.save_pretrained(tmp_path)
    plain = PeftModel.from_pretrained(mixture_of(family), str(tmp_path)).eval()
    loaded = PeftModel.from_pretrained(apply(mixture_of(family)), str(tmp_path)).eval()
    with torch.no_grad():
        expected = logits(ours)
        assert (expected - logits(mixture_of(family).eval())).norm() > 1e-2 * expected.norm()
        for model in (plain, loaded):
            assert (logits(model) - expected).norm() <= RELATIVE * expected.norm()
        assert taken(loaded) == taken(ours) > 0
        merged = restore(loaded).merge_and_unload()
        assert (logits(merged) - expected).norm() <= RELATIVE * expected.norm()


def taken(model: Any) -> int:
    """Wrappers whose forward is ours."""
    base = model.get_base_model()
    return len(getattr(base, ATTRIBUTE).experts.adapters.taken)


@pytest.mark.parametrize("experts", ["grouped", "loop"])
def test_nothing_of_the_size_of_the_weights_is_made(experts: Any) -> None:
    """Counted with few tokens, so that nothing else is as large; plain peft makes several in each layer."""

    def made(model: Any) -> list[str]:
        stack = model.get_base_model().model.layers[0].mlp.experts.get_base_layer().down_proj.numel()
        with Made(stack) as large:
            model(input_ids=IDS[:1, :4], use_cache=False).logits[..., 0].sum().backward()
        return large.names

    wide = {**MIXTURES["gpt_oss"], "num_local_experts": 16, "intermediate_size": 128, "vocab_size": 64}

    def model(applied: bool) -> Any:
        tuned = add_adapter(model_of("gpt_oss", **wide), AdapterOptions(rank=4, experts=True, router=True), seed=0)
        return apply(tuned, Options(experts=experts, activations="recompute")) if applied else tuned

    assert len(made(model(False))) >= 8
    assert made(model(True)) == []


def test_adapters_switched_off_and_on() -> None:
    tuned = adapted("gpt_oss", "after", experts="grouped").eval()
    plain = mixture_of("gpt_oss").eval()
    with torch.no_grad():
        on = logits(tuned)
        with tuned.disable_adapter():
            assert (logits(tuned) - logits(plain)).norm() <= 1e-5 * on.norm()
        assert torch.equal(logits(tuned), on)
        tuned.merge_adapter()
        assert (logits(tuned) - on).norm() <= RELATIVE * on.norm()
        with tuned.disable_adapter():  # unmerges
            assert (logits(tuned) - logits(plain)).norm() <= RELATIVE * on.norm()
        assert (logits(tuned) - on).norm() <= RELATIVE * on.norm()


def test_a_second_adapter_and_both_at_once() -> None:
    def with_two(applied: bool) -> Any:
        tuned = adapted("gpt_oss", "after" if applied else "not", **({"experts": "grouped"} if applied else {}))
        config = tuned.peft_config["default"]
        tuned.add_adapter("other", LoraConfig(**{**config.to_dict(), "r": 2}))
        draw = torch.Generator().manual_seed(2)
        for name, parameter in tuned.named_parameters():
            if "other" in name:
                parameter.data.normal_(0, 0.3, generator=draw)
        return tuned.eval()

    ours, plain = with_two(True), with_two(False)
    found = {}
    for names in ("default", "other", ["default", "other"]):
        for model in (ours, plain):
            model.base_model.set_adapter(names)
        with torch.no_grad():
            found[str(names)] = logits(ours)
            assert (logits(plain) - logits(ours)).norm() <= RELATIVE * logits(ours).norm()
    assert len({float(value.sum()) for value in found.values()}) == 3


def test_restore_gives_the_wrappers_back_to_peft() -> None:
    tuned = adapted("gpt_oss", "after", experts="grouped").eval()
    wrapper = tuned.get_base_model().model.layers[0].mlp.experts
    assert "forward" in vars(wrapper)
    with torch.no_grad():
        before = logits(tuned)
        restore(tuned)
        assert "forward" not in vars(wrapper)
        assert (logits(tuned) - before).norm() <= RELATIVE * before.norm()


def test_an_adapter_on_something_else_of_the_experts_is_left_to_peft() -> None:
    def tuned() -> Any:
        config = LoraConfig(
            r=2, target_modules=[], target_parameters=["down_proj", "down_proj_bias"], init_lora_weights=False
        )
        torch.manual_seed(3)
        return get_peft_model(mixture_of("gpt_oss"), config).eval()

    ours, plain = apply(tuned(), Options(experts="grouped")), tuned()
    assert taken(ours) == 0
    with torch.no_grad():
        assert (logits(ours) - logits(plain)).norm() <= RELATIVE * logits(plain).norm()


def test_the_trainable_parameters_are_listed() -> None:
    """unsloth#3405, #4193: adapters asked for on experts are there, and are told."""
    tuned = adapted("qwen3_moe", "not", rank=4)
    groups = {group.name: group for group in trainable_summary(tuned).groups}
    gate_up = groups["model.layers.*.mlp.experts.base_layer.lora_A"]
    assert (gate_up.tensors, gate_up.parameters) == (2, 2 * 4 * 4 * 32)  # layers, experts, rank, width
    assert groups["model.layers.*.mlp.gate.lora_B"].parameters == 2 * 4 * 4
    assert all(p.dtype == torch.float32 for p in tuned.parameters() if p.requires_grad)


def test_only_what_is_asked_for() -> None:
    def names(**asked: bool) -> set[str]:
        tuned = add_adapter(mixture_of("qwen3_moe"), AdapterOptions(rank=2, **asked), seed=0)
        return {name for name, p in tuned.named_parameters() if p.requires_grad}

    assert not any("experts" in name or "gate" in name for name in names())
    assert any("experts" in name for name in names(experts=True))
    assert not any("mlp.gate." in name for name in names(experts=True))
    assert any("mlp.gate." in name for name in names(router=True))
    assert not any("experts" in name for name in names(router=True))


@pytest.mark.parametrize(
    ("family", "asked", "message"),
    [
        ("llama", {"experts": True}, r"adapter\.experts: LlamaForCausalLM has no experts to adapt; set it to false"),
        ("llama", {"router": True}, r"adapter\.router: LlamaForCausalLM has no router to adapt; set it to false"),
        ("qwen3_moe", {"experts": True, "dropout": 0.1}, r"adapter\.dropout: 0\.1 can't be had .* set it to 0\.0"),
    ],
)
def test_what_can_not_be_had(family: str, asked: dict[str, Any], message: str) -> None:
    model = model_of(family) if family == "llama" else mixture_of(family)
    with pytest.raises(InputError, match=message):
        add_adapter(model, AdapterOptions(**asked), seed=0)
