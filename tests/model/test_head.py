"""The output head by itself: the model's own logits, and a loss that never holds the whole row's."""

from typing import Any

import pytest
import torch
from torch import nn

from slipstream.model.head import find_head
from slipstream.train import loss as loss_module
from slipstream.train.loss import summed_cross_entropy
from tiny import tiny_model

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"tie_word_embeddings": True},
    "gemma2": {"final_logit_softcapping": 3.0},
    "granite": {"logits_scaling": 4.0},
    "cohere2": {"logit_scale": 0.25},
    "mixtral": {"num_local_experts": 2},
}


def model_of(family: str) -> Any:
    torch.manual_seed(0)
    return tiny_model(family, **FAMILIES[family]).eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_head_gives_the_models_own_logits(family: str) -> None:
    model = model_of(family)
    head, decision = find_head(model)
    assert head is not None
    assert decision.on
    ids = torch.randint(5, 300, (1, 9))
    hidden = model.model(input_ids=ids).last_hidden_state
    expected = model(input_ids=ids).logits
    assert torch.allclose(head(hidden[0]), expected[0], atol=1e-6)
    if family in ("gemma2", "granite", "cohere2"):
        assert not torch.allclose(model.get_output_embeddings()(hidden[0]), expected[0], atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_give_the_loss_and_gradients_of_the_whole_row(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "LOSS_CHUNK", 5)
    model = model_of(family)
    head, _ = find_head(model)
    assert head is not None
    ids = torch.randint(5, 300, (1, 23))
    labels = torch.where(torch.rand(1, 23) < 0.7, ids, -100)
    plain = model(input_ids=ids, labels=labels).loss * (labels[:, 1:] != -100).sum()
    plain.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    rows: list[int] = []
    hook = head.project.register_forward_hook(lambda module, args, output: rows.append(output.shape[0]))
    ours = summed_cross_entropy(model.model(input_ids=ids).last_hidden_state, labels, head)
    ours.backward()
    hook.remove()
    assert rows == [5, 5, 5, 5, 3, 3, 5, 5, 5, 5]  # five chunks, and again in the backward: never 23 tokens at once
    assert ours.item() == pytest.approx(plain.item(), rel=1e-6)
    for name, parameter in model.named_parameters():
        if name in expected:
            assert torch.allclose(parameter.grad, expected[name], rtol=1e-4, atol=1e-6), name


def test_a_tail_of_the_models_own_is_noticed() -> None:
    model = model_of("llama")
    forward = model.forward

    def doubled(**named: Any) -> Any:
        output = forward(**named)
        output.logits = output.logits * 2
        return output

    doubled.__signature__ = __import__("inspect").signature(forward)  # type: ignore[attr-defined]
    model.forward = doubled
    head, decision = find_head(model)
    assert head is None
    assert not decision.on
    assert "the model's logits are not its head's (relative difference 5.0e-01)" in decision.reason


def test_a_model_that_always_makes_all_logits_is_left_alone() -> None:
    model = model_of("llama")
    model.forward = lambda input_ids, use_cache: None
    head, decision = find_head(model)
    assert head is None
    assert "can't be kept from making all logits" in decision.reason


def test_finding_leaves_the_model_as_it_was() -> None:
    model = model_of("llama").train()
    find_head(model)
    assert model.training
    assert not model.model._forward_hooks
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_without_weights_is_not_tried() -> None:
    with torch.device("meta"):
        model = tiny_model("llama")
    assert find_head(model)[0] is None
    assert isinstance(model, nn.Module)
