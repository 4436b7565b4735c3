"""Compiled mixtures learn what eager ones learn: no part of a layer's gradient is lost on the way through a graph."""

from typing import Any

import pytest
import torch
import torch._dynamo

from mixtures import mixture_of
from packed import documents, row_of
from slipstream.model.lora import AdapterOptions, add_adapter
from slipstream.train.train_step import TrainStep
from slipstream.transform import Options, apply

EVERY = 4
"""Experts of a layer; each token goes to all of them, so that no rounding sends one elsewhere."""
COUNTED = {"gpt_oss": "num_local_experts", "qwen3_moe": "num_experts"}
WIDE = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
"""Rows of grouped products begin every 16 bytes."""


@pytest.fixture(autouse=True)
def _traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward are traced as for compiling, and what was traced runs as it is."""
    compile_it = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, **options: compile_it(function, backend="aot_eager", **options)
    )
    torch._dynamo.reset()


def mixture(family: str, adapters: bool) -> Any:
    model = mixture_of(family, **WIDE, **{COUNTED[family]: EVERY, "num_experts_per_tok": EVERY}).to(torch.bfloat16)
    model = add_adapter(model, AdapterOptions(rank=8, experts=adapters), seed=0).train()
    draw = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=draw) * 0.1
    return model


def learned(family: str, adapters: bool, mode: str, activations: str) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of one step and what plain gradient descent of rate 1 has changed: the gradients."""
    asked: dict[str, Any] = {"activations": activations, "experts": "grouped", "compute_dtype": torch.bfloat16}
    model = apply(mixture(family, adapters), Options(**asked))
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    before = {name: parameter.detach().clone() for name, parameter in trained.items()}
    step = TrainStep(model, torch.optim.SGD(trained.values(), lr=1.0), mode, clip=0.0)  # type: ignore[arg-type]
    loss = float(step(row_of(documents())))
    assert step.mode == mode, step.decisions
    step.close()
    return loss, {name: before[name] - parameter.detach() for name, parameter in trained.items()}


@pytest.mark.parametrize(("family", "adapters"), [("gpt_oss", False), ("gpt_oss", True), ("qwen3_moe", True)])
def test_gradients_are_eagers(family: str, adapters: bool) -> None:
    expected_loss, expected = learned(family, adapters, "eager", "keep")
    loss, found = learned(family, adapters, "compiled", "recompute" if adapters else "keep")
    assert loss == pytest.approx(expected_loss, abs=5e-3)
    assert any("experts" in name for name in found) == adapters
    for name, gradient in expected.items():
        assert gradient.norm() > 0, name
        assert (found[name] - gradient).norm() < 0.15 * gradient.norm(), name
