"""``restore`` leaves a model as it was; generation is the model's own before, during and after ``apply``."""

from typing import Any

import pytest
import torch

from packed import FAMILIES, documents, logits_of, model_of, row_of, scaled, with_adapter
from slipstream import Options, apply, restore
from slipstream.train.loss import summed_cross_entropy

PROMPTS = torch.tensor([[0, 0, 0, 5, 6, 7], [9, 10, 11, 12, 13, 14], [0, 0, 0, 0, 0, 8]])
MASK = (PROMPTS > 0).long()


def generated(model: Any) -> torch.Tensor:
    return model.generate(input_ids=PROMPTS, attention_mask=MASK, max_new_tokens=8, do_sample=False, pad_token_id=0)


def unpacked(model: Any) -> torch.Tensor:
    """A right-padded batch, as evaluation without packing gives it."""
    with torch.no_grad():
        return model(input_ids=PROMPTS.flip(1), attention_mask=MASK.flip(1)).logits


def state_of(model: Any) -> dict[str, Any]:
    """All that ``apply`` might touch: configuration, plain attributes, hooks, switches of every module."""
    modules = dict(model.named_modules())
    plain = {
        name: {key: value for key, value in vars(module).items() if not key.startswith(("_parameters", "_modules"))}
        for name, module in modules.items()
    }
    return {
        "config": model.config.to_dict(),
        "attention": model.config._attn_implementation,
        "attributes": {name: sorted(values) for name, values in plain.items()},
        "hooks": {
            name: [len(values[kind]) for kind in ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks")]
            for name, values in plain.items()
        },
        "switches": {
            name: (getattr(m, "gradient_checkpointing", None), getattr(m, "_gradient_checkpointing_func", None))
            for name, m in modules.items()
        },
        "training": {name: m.training for name, m in modules.items()},
        "forwards": {name: getattr(m.forward, "__func__", m.forward) for name, m in modules.items()},
    }


def tensors_of(model: Any) -> dict[str, torch.Tensor]:
    """Copies of all parameters and buffers, also of those that are not saved (rotary frequencies)."""
    return {name: value.detach().clone() for name, value in [*model.named_parameters(), *model.named_buffers()]}


@pytest.mark.parametrize("given", ["sdpa", "eager"])
@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("activations", ["auto", "keep", "recompute"])
@pytest.mark.parametrize("family", ["qwen2", "mistral"])
def test_restore_leaves_nothing_behind(family: str, activations: Any, checkpointing: bool, given: str) -> None:
    model = model_of(family)
    model.set_attn_implementation(given)
    if checkpointing:
        model.gradient_checkpointing_enable()
    model.eval()
    tensors = tensors_of(model)
    before, logits = state_of(model), unpacked(model)
    apply(model, Options(activations=activations))
    assert state_of(model) != before
    logits_of(model, row_of(documents()))
    assert restore(model) is model
    assert state_of(model) == before
    assert_same_tensors(tensors_of(model), tensors)
    assert torch.equal(unpacked(model), logits)


def assert_same_tensors(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert any("inv_freq" in name for name in expected)
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


@pytest.mark.parametrize(
    ("family", "scaling"), [(f, None) for f in FAMILIES] + [("llama", "longrope"), ("llama", "dynamic")]
)
def test_restore_after_a_step_of_each_family(family: str, scaling: str | None) -> None:
    """Also where rotary positions follow documents, and the packed forward has changed their frequencies."""
    model = model_of(family, **(scaled(scaling) if scaling else {}))
    tensors, before = tensors_of(model), state_of(model)
    apply(model, Options(activations="recompute"))
    row = row_of(documents())
    summed_cross_entropy(logits_of(model, row), row["labels"]).backward()
    assert state_of(model) != before
    restore(model)
    assert state_of(model) == before
    assert_same_tensors(tensors_of(model), tensors)


@pytest.mark.parametrize("family", FAMILIES)
def test_without_segments_the_model_is_its_own(family: str) -> None:
    model = model_of(family).eval()
    logits, answers = unpacked(model), generated(model)
    assert (MASK == 0).any()  # left-padded
    apply(model)
    assert torch.equal(unpacked(model), logits)
    assert torch.equal(generated(model), answers)
    with torch.no_grad():
        packed = logits_of(model, row_of(documents()))
    assert torch.equal(generated(model), answers)  # also after a packed forward
    restore(model)
    assert torch.equal(unpacked(model), logits)
    assert torch.equal(generated(model), answers)
    with torch.no_grad():
        assert torch.equal(logits_of(apply(model), row_of(documents())), packed)


def test_training_without_segments_gives_the_same_gradients() -> None:
    def gradients(applied: bool) -> list[torch.Tensor]:
        model = model_of("mistral")
        if applied:
            apply(model, Options(activations="recompute"))
        logits = model(input_ids=PROMPTS.flip(1), attention_mask=MASK.flip(1)).logits
        summed_cross_entropy(logits, PROMPTS.flip(1)).backward()
        return [p.grad for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(gradients(True), gradients(False), strict=True))


@pytest.mark.parametrize("restored", ["peft", "base"])
@pytest.mark.parametrize("applied", ["peft", "base"])
def test_apply_and_restore_before_and_after_peft(applied: str, restored: str) -> None:
    base = model_of("qwen2").eval()
    if applied == "base":
        apply(base)
    tuned = with_adapter(base).eval()
    plain = with_adapter(model_of("qwen2")).eval()
    if applied == "peft":
        apply(tuned)
    with torch.no_grad():
        logits_of(tuned, row_of(documents()))
    assert torch.equal(unpacked(tuned), unpacked(plain))
    restore(tuned if restored == "peft" else base)
    assert state_of(tuned)["hooks"] == state_of(plain)["hooks"]
    assert state_of(tuned)["attention"] == "sdpa"
    assert torch.equal(generated(tuned), generated(plain))
    assert torch.equal(unpacked(tuned.merge_and_unload()), unpacked(plain.merge_and_unload()))


def test_a_saved_model_knows_nothing_of_apply(tmp_path: Any) -> None:
    model = apply(model_of("llama"), Options(activations="recompute"))
    model.save_pretrained(tmp_path)
    assert "slipstream" not in (tmp_path / "config.json").read_text()
    loaded = type(model).from_pretrained(tmp_path)
    assert loaded.config._attn_implementation == "sdpa"
    assert torch.equal(unpacked(loaded.eval()), unpacked(restore(model).eval()))
