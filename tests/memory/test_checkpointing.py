"""The switches of recomputing: on, off, and back as they were; random state kept only where it is drawn."""

from typing import Any

import pytest
import torch
from torch import nn

from packed import model_of, with_adapter
from slipstream import InputError
from slipstream.memory import checkpointing
from slipstream.memory.checkpointing import SWITCHES, checkpoints, restore_checkpointing, set_checkpointing


def switches_of(model: nn.Module) -> list[dict[str, Any]]:
    return [{name: vars(m)[name] for name in SWITCHES if name in vars(m)} for m in model.modules()]


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize(
    ("asked", "recompute"), [("auto", True), ("auto", False), ("keep", False), ("recompute", True)]
)
def test_switched_and_put_back(asked: Any, recompute: bool, given: bool) -> None:
    model = model_of("llama")
    if given:
        model.gradient_checkpointing_enable()
    before = switches_of(model)
    kept = set_checkpointing(model, asked, recompute)
    assert checkpoints(model) == (recompute or (given and asked == "auto"))
    restore_checkpointing(kept)
    assert switches_of(model) == before
    assert checkpoints(model) == given


def test_a_model_whose_layers_cannot_be_recomputed_is_refused() -> None:
    bare = type("Bare", (nn.Module,), {})()
    with pytest.raises(InputError, match="Bare has no layers that can be recomputed; set activations: keep"):
        set_checkpointing(bare, "recompute", True)
    assert set_checkpointing(bare, "keep", False) == []


@pytest.mark.parametrize(
    ("settings", "dropout", "kept"),
    [
        ({}, 0.0, False),
        ({"attention_dropout": 0.1}, 0.0, True),
        ({"attention_dropout": 0}, 0.0, False),
        ({}, 0.5, True),
    ],
    ids=["none", "attention", "zero", "adapter"],
)
def test_random_state_is_kept_where_a_layer_draws(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], dropout: float, kept: bool
) -> None:
    asked: list[bool] = []

    def checkpoint(function: Any, *args: Any, use_reentrant: bool, preserve_rng_state: bool, **kwargs: Any) -> Any:
        assert not use_reentrant
        asked.append(preserve_rng_state)
        return function(*args, **kwargs)

    monkeypatch.setattr(checkpointing, "checkpoint", checkpoint)
    model = model_of("llama", **settings)
    set_checkpointing(model, "recompute", True)
    tuned = with_adapter(model, dropout=dropout).train()  # after the switch, as peft may come later
    tuned(input_ids=torch.arange(5, 12)[None])
    assert asked == [kept] * 2
