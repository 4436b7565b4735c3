"""Mixtures packed: a row teaches what its documents teach one by one, adapters on experts and routers included."""

from typing import Any

import pytest
import torch

from mixtures import MIXTURES, mixture_of
from packed import LENGTHS, assert_close_gradients, documents, gradients, logits_of, row_of, summed_loss_alone
from slipstream import Options, apply
from slipstream.model.lora import AdapterOptions, add_adapter
from slipstream.train.loss import summed_cross_entropy

RELATIVE = 2e-5


def tuned(family: str, **choices: Any) -> Any:
    model = add_adapter(mixture_of(family), AdapterOptions(rank=2, experts=True, router=True), seed=0)
    draw = torch.Generator().manual_seed(4)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.2, generator=draw)
    return apply(model, Options(**choices)).train() if choices else model.train()


@pytest.mark.parametrize("family", MIXTURES)
def test_a_packed_row_equals_its_documents(family: str) -> None:
    row, examples = row_of(documents()), documents()
    assert row["segments"].padding > 0
    assert len(LENGTHS) > 1
    plain = tuned(family)
    total, count = summed_loss_alone(plain, examples)
    (total / count).backward()
    for experts, activations in (("grouped", "recompute"), ("loop", "keep")):
        ours = tuned(family, experts=experts, activations=activations)
        loss = summed_cross_entropy(logits_of(ours, row), row["labels"]) / count
        loss.backward()
        assert abs(loss - total / count) <= RELATIVE * loss
        assert any("experts" in name for name in gradients(ours))
        assert_close_gradients(gradients(ours), gradients(plain), RELATIVE)
