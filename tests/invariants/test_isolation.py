"""Documents of a row don't see each other: exactly nothing of one depends on another, or on padding."""

import copy
from typing import Any

import pytest
import torch

from packed import EXPERTS, FAMILIES, LENGTHS, TOKENS, documents, gradients, logits_of, model_of, row_of
from slipstream import apply
from slipstream.train.loss import summed_cross_entropy

CHANGED = 3
"""The document that is changed: neither first nor last, and longer than one token."""
START = sum(LENGTHS[:CHANGED])
SPAN = slice(START, START + LENGTHS[CHANGED])
EXTRA: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2},
    "gpt_neox": {},
    "olmo3": {"sliding_window": 4},
}
TESTED = [*FAMILIES, *EXTRA]
ROUNDING = 1e-6
"""For mixtures of experts alone, of the largest value; everything else is compared bit for bit."""


def tiny(family: str) -> Any:
    return apply(model_of(family, **EXTRA.get(family, {})))


def differ(family: str, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """bool, elementwise; beyond rounding where a row's routing decides what is summed together."""
    bound = ROUNDING * float(first.detach().abs().max()) if family in EXPERTS else 0.0
    return (first - second).abs() > bound


def differing(family: str, first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> list[str]:
    """Names of the parameters whose gradients differ."""
    assert first.keys() == second.keys()
    return [name for name in first if differ(family, first[name], second[name]).any()]


def inside(span: slice) -> torch.Tensor:
    return torch.isin(torch.arange(TOKENS), torch.arange(TOKENS)[span])


@pytest.mark.parametrize("family", TESTED)
def test_a_changed_token_changes_its_own_document_alone(family: str) -> None:
    """trl#1230, axolotl#3796: packed documents don't attend to each other, whatever the family."""
    model = tiny(family).eval()
    with torch.no_grad():
        before = logits_of(model, row_of(documents()))
    for token in range(LENGTHS[CHANGED]):
        row = row_of(documents())
        row["input_ids"][0, START + token] += 1
        with torch.no_grad():
            after = logits_of(model, row)
        changed = differ(family, before, after)[0].any(dim=-1)
        assert changed[START + token]
        assert not changed[~inside(SPAN)].any()
        assert not changed[START : START + token].any()  # nor what is before it


@pytest.mark.parametrize("family", TESTED)
def test_gradients_of_the_others_stay_as_they_are(family: str) -> None:
    """trl#1230, axolotl#3796: nor do they contribute to each other's gradients."""

    def learn(row: dict[str, Any], labels: torch.Tensor) -> dict[str, torch.Tensor]:
        model = tiny(family).train()
        summed_cross_entropy(logits_of(model, row), labels).backward()
        return gradients(model)

    before, after = row_of(documents()), row_of(documents())
    after["input_ids"][0, SPAN] += 1
    others = torch.where(inside(SPAN), -100, before["labels"])
    own = torch.where(inside(SPAN), before["labels"], -100)
    assert (own != -100).any()
    first, second = learn(before, others), learn(after, others)
    assert any(g.any() for g in first.values())
    assert differing(family, first, second) == []
    assert differing(family, learn(before, own), learn(after, own))


@pytest.mark.parametrize("family", TESTED)
def test_no_gradient_flows_into_another_document(family: str) -> None:
    model, row = tiny(family), row_of(documents())
    embeddings = model.get_input_embeddings()(row["input_ids"]).detach().requires_grad_()
    logits = model(inputs_embeds=embeddings, position_ids=row["position_ids"], segments=row["segments"]).logits
    logits[0, SPAN].square().sum().backward()
    flow = embeddings.grad[0].abs().sum(dim=-1)
    assert (flow[SPAN] > 0).all()
    assert not flow[~inside(SPAN)].any()


@pytest.mark.parametrize("family", TESTED)
def test_padding_holds_nothing_that_matters(family: str) -> None:
    model, row = tiny(family).eval(), row_of(documents())
    used = sum(LENGTHS)
    assert used < TOKENS

    def learn(row: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        model.zero_grad()
        logits = logits_of(model, row)
        summed_cross_entropy(logits, row["labels"]).backward()
        return logits, gradients(model)

    other = copy.copy(row)
    other["input_ids"] = row["input_ids"].clone()
    other["input_ids"][0, used:] = 77
    (before, first), (after, second) = learn(row), learn(other)
    assert not differ(family, before[0, :used], after[0, :used]).any()
    assert differ(family, before[0, used:], after[0, used:]).any()
    assert differing(family, first, second) == []
