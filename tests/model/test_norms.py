"""Norms as one kernel compute what the model's own do, round where those round, and leave nothing behind."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from packed import gradients, model_of
from slipstream import Options, apply, decisions, restore
from slipstream.cost.hardware import Device
from slipstream.errors import InputError
from slipstream.model import norms
from slipstream.model.norms import attach_norms, choose_norms

CARD = Device(kind="cuda", name="card", memory_bytes=2**34, compute_capability=(9, 0), bf16=True, unified_memory=False)
FIRST = ("llama", "qwen2", "qwen3", "mistral", "phi3", "granite", "glm4", "smollm3", "qwen3_moe", "mixtral")
LAST = ("gpt_oss", "olmo2")
OTHERS = ("gemma2", "gemma3_text", "cohere2", "starcoder2", "stablelm")
IDS = torch.arange(5, 29)[None]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls of PyTorch's norm, by whether it multiplies with the weight itself."""
    calls: list[str] = []
    real = torch.nn.functional.rms_norm

    def counted(x: Any, shape: Any, weight: Any, epsilon: float) -> torch.Tensor:
        calls.append("first" if weight is None else "last")
        return real(x, shape, weight, epsilon)

    monkeypatch.setattr(norms.F, "rms_norm", counted)
    return calls


def model(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """Norm weights that are not all one, so that rounding before and after them differs."""
    made = model_of(family).to(dtype).train()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if "norm" in name:
                weight.add_(torch.rand(weight.shape, generator=generator).to(dtype))
    return made


def outcome(made: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    made.zero_grad()
    logits = made(input_ids=IDS, use_cache=False).logits
    logits.float().square().mean().backward()
    return logits.detach(), gradients(made)


def own_forwards(made: nn.Module) -> int:
    return sum("forward" in vars(module) for module in made.modules())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "rounded"), [(f, "first") for f in FIRST] + [(f, "last") for f in LAST])
def test_outputs_and_gradients_are_the_models_own(
    kernels: list[str], family: str, rounded: str, dtype: torch.dtype
) -> None:
    made = model(family, dtype)
    expected, wanted = outcome(made)
    found, decision = choose_norms("auto", made, CARD)
    assert set(found.values()) == {rounded}
    assert decision.on
    assert f"{len(found)} RMS norms run as PyTorch's kernel" in decision.reason
    attached = attach_norms(found)
    kernels.clear()
    logits, grads = outcome(made)
    assert kernels == [rounded] * len(found)
    assert len(found) >= 2 * made.config.num_hidden_layers + 1
    if dtype == torch.bfloat16:
        assert torch.equal(logits, expected), "on the CPU not even the order of sums differs"
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    for name, gradient in wanted.items():
        assert (grads[name] - gradient).float().norm() <= limit * gradient.float().norm() + 1e-9, name
    attached.detach()
    assert own_forwards(made) == 0
    kernels.clear()
    assert torch.equal(outcome(made)[0], expected)
    assert kernels == []


@pytest.mark.parametrize("family", OTHERS)
def test_other_norms_stay_as_they_are(family: str) -> None:
    found, decision = choose_norms("auto", model(family), CARD)
    assert not found
    assert not decision.on
    assert "Norm" in decision.reason


@pytest.mark.parametrize(
    "norm", [nn.RMSNorm(8, eps=1e-6, elementwise_affine=False), nn.RMSNorm(8, eps=1e-6), nn.RMSNorm(8), nn.LayerNorm(8)]
)
def test_norms_without_weights_or_with_more_stay_as_they_are(norm: nn.Module) -> None:
    found, decision = choose_norms("auto", nn.Sequential(norm), CARD)
    assert not found
    assert f"1 {type(norm).__name__}" in decision.reason


def test_rounding_elsewhere_would_be_noticed() -> None:
    """The two kinds differ in many numbers of half precision: taking one for the other fails the test above."""
    made = model("llama", torch.bfloat16)
    expected, _ = outcome(made)
    found, _ = choose_norms("auto", made, CARD)
    attach_norms(dict.fromkeys(found, "last"))
    differ = (outcome(made)[0] != expected).float().mean()
    assert differ > 0.05


def test_compiled_code_is_the_models_own(kernels: list[str]) -> None:
    norm: Any = model("llama").model.norm
    attach_norms({norm: "first"})
    x = torch.randn(3, norm.weight.numel())
    eager = norm(x)
    assert kernels == ["first"]
    torch._dynamo.reset()
    compiled = torch.compile(norm, backend="eager", fullgraph=True)
    assert torch.allclose(compiled(x), eager)
    assert kernels == ["first"]


def test_under_autocast_the_result_is_half_precision() -> None:
    """PyTorch 2.13 counts this norm among what autocast computes, and gives, in float32."""
    made = model("llama", torch.bfloat16)
    found, _ = choose_norms("auto", made, CARD)
    norm = next(iter(found))
    x = torch.randn(3, norm.weight.numel()).bfloat16()  # type: ignore[union-attr, operator]
    expected = norm(x)
    attach_norms(found)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert norm(x).dtype == torch.bfloat16
    assert torch.equal(norm(x), expected)


def test_a_forward_of_somebody_elses_is_left_alone() -> None:
    made = model("llama")
    theirs = made.model.norm.forward
    vars(made.model.norm)["forward"] = theirs
    found, decision = choose_norms("auto", made, CARD)
    assert made.model.norm not in found
    assert "as before: 1 LlamaRMSNorm" in decision.reason


def test_a_copied_model_has_norms_of_its_own() -> None:
    made = model("llama")
    attach_norms(choose_norms("auto", made, CARD)[0])
    other = copy.deepcopy(made)
    with torch.no_grad():
        other.model.norm.weight.mul_(2)
    x = torch.randn(2, made.model.norm.weight.numel())
    assert torch.allclose(other.model.norm(x), 2 * made.model.norm(x))


def test_apply_and_restore(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU nothing is gained; told to be on a card, ``apply`` takes them and ``restore`` gives them back."""
    made = apply(model("llama"))
    (told,) = [decision for decision in decisions(made) if decision.name == "norms"]
    assert not told.on
    assert "this is a CPU" in told.reason
    assert not any("forward" in vars(m) for m in made.modules() if type(m).__name__ == "LlamaRMSNorm")
    real = choose_norms
    monkeypatch.setattr("slipstream.transform.choose_norms", lambda asked, base, device: real(asked, base, CARD))
    before = own_forwards(restore(made))
    apply(made)
    assert [decision.on for decision in decisions(made) if decision.name == "norms"] == [True]
    assert vars(made.model.norm)["forward"].__func__ is norms._first
    apply(made, Options(norms="model"))
    (told,) = [decision for decision in decisions(made) if decision.name == "norms"]
    assert not told.on
    assert "norms: model" in told.reason
    assert "forward" not in vars(made.model.norm)
    apply(made)
    assert own_forwards(restore(made)) == before == 0
    with pytest.raises(InputError, match=r"Options\.norms"):
        Options(norms="fast")  # type: ignore[arg-type]
