"""The switches of recomputing: on, off, held to, and back as they were; random state kept only where it is drawn."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from nested import nested_model
from offloading import assert_same_bits, deep, loss_of, offloaded, step
from packed import model_of, with_adapter
from slipstream import InputError, Options, apply, decisions, restore
from slipstream.cost.offload import Split
from slipstream.decision import Decision
from slipstream.memory import checkpointing
from slipstream.memory.checkpointing import (
    SWITCHES,
    checkpoint_layers,
    checkpoints,
    restore_checkpointing,
    set_checkpointing,
)

KEEP, RECOMPUTE, MIXED = Split(2, 0, 0), Split(0, 2, 0), Split(1, 1, 0)


def switches_of(model: nn.Module) -> list[dict[str, Any]]:
    return [{name: vars(m)[name] for name in SWITCHES if name in vars(m)} for m in model.modules()]


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("split", [None, KEEP, RECOMPUTE, MIXED])
def test_switched_and_put_back(split: Split | None, given: bool) -> None:
    model = model_of("llama")
    if given:
        model.gradient_checkpointing_enable()
    before = switches_of(model)
    made = set_checkpointing(model, split, decide=[].append)
    on = [layer.gradient_checkpointing for layer in model.model.layers]
    assert on == {None: [given, given], KEEP: [False, False], RECOMPUTE: [True, True], MIXED: [True, False]}[split]
    restore_checkpointing(made)
    assert switches_of(model) == before
    assert checkpoints(model) == given
    assert not model.get_decoder()._forward_pre_hooks


def test_a_model_whose_layers_cannot_be_recomputed_is_refused() -> None:
    bare: Any = type("Bare", (nn.Module,), {"get_decoder": lambda self: self})()
    with pytest.raises(InputError, match="Bare has no layers that can be recomputed; set activations: keep"):
        set_checkpointing(bare, RECOMPUTE, decide=[].append)
    restore_checkpointing(set_checkpointing(bare, KEEP, decide=[].append))


def test_a_model_that_treats_all_layers_alike_recomputes_all() -> None:
    class Old(nn.Module):
        """As models are that call the checkpoint function in their own loop."""

        def __init__(self) -> None:
            super().__init__()
            self.gradient_checkpointing = False
            self.config = model_of("llama").config

        def get_decoder(self) -> nn.Module:
            return self

        def _set_gradient_checkpointing(self, enable: bool, gradient_checkpointing_func: Any) -> None:
            self.gradient_checkpointing, self._gradient_checkpointing_func = enable, gradient_checkpointing_func

    model: Any = Old()
    made = set_checkpointing(model, Split(0, 1, 0), decide=[].append)
    assert model.gradient_checkpointing
    restore_checkpointing(made)
    assert not model.gradient_checkpointing


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
@pytest.mark.parametrize("offload", [False, True])
def test_random_state_is_kept_where_a_layer_draws(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], dropout: float, kept: bool, offload: bool
) -> None:
    asked: list[bool] = []

    def checkpoint(function: Any, *args: Any, use_reentrant: bool, preserve_rng_state: bool, **kwargs: Any) -> Any:
        assert not use_reentrant
        asked.append(preserve_rng_state)
        return function(*args, **kwargs)

    monkeypatch.setattr(checkpointing, "checkpoint", checkpoint)
    monkeypatch.setattr("slipstream.memory.offload.checkpoint", checkpoint)
    model = model_of("llama", **settings)
    if offload:
        with offloaded(model):
            with_adapter(model, dropout=dropout).train()(input_ids=torch.arange(5, 12)[None])
    else:
        set_checkpointing(model, RECOMPUTE, decide=[].append)
        tuned = with_adapter(model, dropout=dropout).train()  # after the switch, as peft may come later
        tuned(input_ids=torch.arange(5, 12)[None])
    assert asked == [kept] * 2


@pytest.mark.parametrize("activations", ["recompute", "offload"])
def test_dropout_that_a_nested_config_asks_for_is_drawn_again_as_it_was(activations: str) -> None:
    """Attention's is functional: there is no module to find, and the config's top level doesn't name it."""

    def seeded(model: Any) -> None:
        torch.manual_seed(1)
        loss_of(model).backward()

    model = nested_model(4, attention_dropout=0.5)
    assert len(checkpoint_layers(model)) == 4 < sum(isinstance(m, GradientCheckpointingLayer) for m in model.modules())
    assert "attention_dropout" not in vars(model.config)
    expected = step(model, seeded)
    assert any(not torch.equal(expected[name], other) for name, other in step(model).items())  # it did draw
    if activations == "recompute":
        set_checkpointing(model, Split(0, 4, 0), decide=[].append)
        assert_same_bits(step(model, seeded), expected)
    else:
        with offloaded(model, split=Split(0, 1, 3)) as made:
            assert_same_bits(step(model, seeded), expected)
            assert made.lane.reloads == 3


@pytest.mark.parametrize(
    ("settings", "draws"),
    [
        ({"text_config": {"attention_dropout": 0.1}}, True),
        ({"parts": [{"rate": 0.3}, {"deeper": {"drop_rates": [0.0, 0.1]}}]}, True),
        ({"text_config": {"attention_dropout": 0.0, "hidden_size": 8}, "dropout": None}, False),
    ],
)
def test_every_level_of_a_config_is_looked_at(settings: dict[str, Any], draws: bool) -> None:
    base: Any = nn.Linear(2, 2)
    base.config = type("Config", (), {"to_dict": lambda self: settings})()
    assert checkpointing._draws(base)() == draws


def test_a_module_that_draws_with_a_number_of_its_own_is_found() -> None:
    model = model_of("llama")
    assert not checkpointing._draws(model)()
    model.model.layers[1].self_attn.attention_dropout = 0.5  # as if set after loading; the config doesn't say so
    assert checkpointing._draws(model)()


# Held to what was chosen


@pytest.mark.parametrize("activations", ["recompute", "keep", "auto"])
def test_somebody_elses_switch_is_undone_at_the_next_training_forward(activations: Any) -> None:
    """As trainers do that call ``gradient_checkpointing_enable`` themselves."""
    model = apply(with_adapter(model_of("llama")), Options(activations=activations))
    ours = switches_of(model)
    model.gradient_checkpointing_enable()
    assert switches_of(model) != ours
    loss_of(model.eval())
    with torch.no_grad():
        loss_of(model.train())
    assert switches_of(model) != ours  # nothing to hold to without a backward
    loss_of(model).backward()
    assert switches_of(model) == ours
    (told,) = [decision for decision in decisions(model) if decision.name == "checkpointing"]
    assert "gradient_checkpointing_enable" in told.reason
    loss_of(model).backward()
    assert sum(decision.name == "checkpointing" for decision in decisions(model)) == 1
    restore(model)
    model.gradient_checkpointing_enable()
    loss_of(model).backward()
    assert checkpoints(model)  # after restore it is the model's own affair


def test_offload_is_put_back_and_goes_on() -> None:
    model = deep()
    with offloaded(model) as made:
        step(model)
        model.gradient_checkpointing_enable()
        step(model)
        model.gradient_checkpointing_disable()
        step(model)
        assert made.lane.sent == 3 * 4
        assert [note.name for note in made.notes] == ["checkpointing"] * 2


def test_a_model_given_with_checkpointing_keeps_its_own_function() -> None:
    model = model_of("llama")
    model.gradient_checkpointing_enable()
    function = model.model.layers[0]._gradient_checkpointing_func
    apply(model)
    assert model.model.layers[0]._gradient_checkpointing_func is function
    assert {d.name: d.on for d in decisions(model)} | {"recompute": True, "offload": False} == {
        d.name: d.on for d in decisions(model)
    }


def test_decisions_of_later_are_said_and_listed(caplog: pytest.LogCaptureFixture) -> None:
    model = apply(model_of("llama"), Options(activations="recompute"))
    before = decisions(model)
    model.gradient_checkpointing_disable()
    loss_of(model)
    assert decisions(model)[: len(before)] == before
    (later,) = decisions(model)[len(before) :]
    assert isinstance(later, Decision)
    assert str(later) in caplog.text


def test_a_context_reaches_plain_recompute_too() -> None:
    from contextlib import contextmanager

    seen: list[str] = []

    @contextmanager
    def context(name: str) -> Any:
        seen.append(name)
        yield

    model = model_of("llama")
    contexts = lambda: (context("forward"), context("recompute"))  # noqa: E731
    set_checkpointing(model, MIXED, decide=[].append, context_fn=contexts)
    loss_of(model).backward()
    assert seen == ["forward", "recompute"]  # the kept layer has none
