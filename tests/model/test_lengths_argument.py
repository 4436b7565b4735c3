"""A forward that names ``seq_lengths``, computes what the model's own does, and leaves with ``restore``."""

import copy
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch

from packed import FAMILIES, documents, logits_of, model_of, row_of, with_adapter
from slipstream import InputError, apply, restore

IDS = torch.tensor([[5, 6, 7, 8]])


def names(model: Any) -> list[str]:
    return list(inspect.signature(model.forward).parameters)


@pytest.mark.parametrize("family", FAMILIES)
def test_only_the_name_is_added(family: str) -> None:
    model = model_of(family)
    before = names(model)
    apply(model)
    assert [name for name in names(model) if name != "seq_lengths"] == before
    assert "seq_lengths" in names(model)
    assert "seq_lengths" in names(apply(model)), "applying again adds it again"
    restore(model)
    assert names(model) == before
    assert "forward" not in vars(model)


def test_lengths_beside_segments_change_nothing() -> None:
    model, row = apply(model_of("stablelm")), row_of(documents())  # which takes no arguments that it doesn't name
    logits = logits_of(model, row)
    assert torch.equal(logits_of(model, {**row, "seq_lengths": torch.tensor([[9, 1]])}), logits)
    with pytest.raises(InputError, match="without segments"):
        model(input_ids=IDS, seq_lengths=torch.tensor([[1, 3]]))
    assert torch.equal(model(IDS, seq_lengths=None).logits, restore(model)(IDS).logits)


def test_a_decoder_called_by_itself_refuses_lengths_too() -> None:
    model = apply(with_adapter(model_of("llama")))
    with pytest.raises(InputError, match="without segments"):
        model.get_base_model().get_decoder()(IDS, seq_lengths=torch.tensor([[1, 3]]))


def test_a_copy_is_a_model_of_its_own() -> None:
    model = apply(model_of("llama"))
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert model(IDS).logits.abs().max() == 0
    assert other(IDS).logits.abs().max() > 0
    assert "seq_lengths" in names(other)


def wrapped(model: Any) -> Callable[..., Any]:
    """A forward on the instance, as accelerate puts it there."""
    own = model.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        forward.calls += 1  # type: ignore[attr-defined]
        return own(*args, **kwargs)

    forward.calls = 0  # type: ignore[attr-defined]
    forward.__wrapped__ = own.__func__  # type: ignore[attr-defined]
    model.forward = MethodType(forward, model)
    return forward


def test_a_forward_on_the_instance_is_kept() -> None:
    model = model_of("llama")
    theirs = wrapped(model)
    there = model.forward
    apply(model)
    assert "seq_lengths" in names(model)
    model(IDS)
    assert theirs.calls == 1  # type: ignore[attr-defined]
    restore(model)
    assert model.forward is there


def test_what_is_wrapped_around_it_since_is_left() -> None:
    model = apply(model_of("llama"))
    theirs = wrapped(model)
    assert "seq_lengths" in names(model)
    there = model.forward
    logits = model(IDS).logits
    restore(model)
    assert model.forward is there
    assert torch.equal(model(IDS).logits, logits)
    assert theirs.calls == 2  # type: ignore[attr-defined]


def test_a_whole_model_compiles() -> None:
    model = apply(model_of("llama", num_hidden_layers=1))
    expected = model(IDS).logits
    found = torch.compile(model, backend="eager")(IDS).logits
    assert torch.allclose(found, expected, atol=1e-6)
