"""On the card: norms in one kernel learn what the model's own learn, in fewer launches; compiled layers keep theirs."""

from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

from slipstream.device.feed import PackedCollator
from slipstream.model.lora import AdapterOptions, add_adapter
from slipstream.train.train_step import TrainStep
from slipstream.transform import Options, apply, decisions

DEVICE = torch.device("cuda", 0)
LAYERS, LENGTHS = 4, (300, 500, 200)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def model_of(family: str) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        vocab_size=1000,
        **FAMILIES[family],
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(DEVICE, torch.bfloat16)


def batch() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    rows = [{"input_ids": torch.randint(3, 1000, (n,), generator=generator).tolist()} for n in LENGTHS]
    return PackedCollator(tokens=1024)(rows)


def run(family: str, norms: Any, mode: Any, steps: int = 3) -> tuple[list[float], int, Any]:
    """Losses, the kernels of the last step, and the model."""
    model = apply(add_adapter(model_of(family), AdapterOptions(rank=8), seed=0).train(), Options(norms=norms))
    trained = [p for p in model.parameters() if p.requires_grad]
    step = TrainStep(model, torch.optim.AdamW(trained, lr=1e-3, fused=True), mode)
    losses = [float(step(batch())) for _ in range(steps)]
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        losses.append(float(step(batch())))
        torch.cuda.synchronize()
    assert step.mode == mode, step.decisions
    kernels = [e for e in found.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    step.close()
    return losses, len(kernels), model


@pytest.mark.parametrize("family", FAMILIES)
def test_eager_steps_learn_the_same_in_fewer_launches(family: str) -> None:
    expected, before, plain = run(family, "model", "eager")
    found, after, model = run(family, "auto", "eager")
    assert [d.on for one in (plain, model) for d in decisions(one) if d.name == "norms"] == [False, True]
    assert found == pytest.approx(expected, abs=2e-2)
    assert len(set(expected)) == len(expected)
    assert before - after >= 15 * 2 * LAYERS, (before, after)


def test_compiled_layers_are_the_models_own() -> None:
    expected, before, _ = run("qwen3", "model", "compiled")
    found, after, _ = run("qwen3", "auto", "compiled")
    assert found == pytest.approx(expected, abs=2e-2)
    assert abs(before - after) <= 30, "two fused norms a layer less would be some 40 kernels each"


@pytest.mark.parametrize("autocast", [False, True])
def test_results_are_half_precision(autocast: bool) -> None:
    model = apply(model_of("llama"))
    norm = model.model.norm
    x = torch.randn(64, 512, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        out = norm(x)
    expected = type(norm).forward(norm, x)
    assert "forward" in vars(norm)
    assert out.dtype == expected.dtype == torch.bfloat16
    assert (out != expected).float().mean() < 1e-3
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
