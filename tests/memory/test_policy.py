"""Keep or recompute: what is asked for is done, and ``auto`` keeps what fits."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.cost.estimate import kept_activation_bytes, loss_bytes
from slipstream.cost.hardware import Device
from slipstream.memory import policy
from slipstream.memory.policy import MARGIN, choose_activations

CONFIG = SimpleNamespace(
    hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=128,
    num_hidden_layers=3,
    vocab_size=1000,
    head_dim=16,
)


def device(memory: int) -> Device:
    return Device("cpu", "a host", memory, None, bf16=False, unified_memory=True)


@pytest.mark.parametrize("tokens", [None, 10**9])
@pytest.mark.parametrize("asked", ["keep", "recompute"])
def test_what_is_asked_for_is_done(asked: Any, tokens: int | None) -> None:
    recompute, decision = choose_activations(asked, CONFIG, device(1), tokens)
    assert recompute == decision.on == (asked == "recompute")
    assert decision.name == "recompute"
    assert decision.reason == f"asked for: activations {asked}"


def test_auto_keeps_where_the_batch_is_unknown() -> None:
    recompute, decision = choose_activations("auto", CONFIG, device(1), None)
    assert not recompute
    assert not decision.on
    assert "not known" in decision.reason


def test_auto_keeps_up_to_the_margin_and_not_beyond() -> None:
    needed = kept_activation_bytes(CONFIG, 4096) + loss_bytes(CONFIG, 4096, whole_logits=False)
    enough = int(needed / MARGIN) + 1
    recompute, decision = choose_activations("auto", CONFIG, device(enough), 4096)
    assert not recompute
    assert not decision.on
    assert "4,096 tokens" in decision.reason
    assert " fit 80%" in decision.reason
    recompute, decision = choose_activations("auto", CONFIG, device(enough - 2), 4096)
    assert recompute
    assert decision.on
    assert "don't fit 80%" in decision.reason


def test_a_hosts_limit_binds_and_is_what_the_reason_says(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = kept_activation_bytes(CONFIG, 4096) + loss_bytes(CONFIG, 4096, whole_logits=False)
    whole = device(100 * needed)
    assert not choose_activations("auto", CONFIG, whole, 4096)[0]  # the machine itself has room
    monkeypatch.setattr(policy, "host_memory_limit", lambda: needed)
    recompute, decision = choose_activations("auto", CONFIG, whole, 4096)
    assert recompute
    assert f"80% of the {needed / 2**30:.1f} GiB free" in decision.reason


def test_a_cards_free_memory_is_what_torch_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    card = replace(device(2**60), kind="cuda")
    monkeypatch.setattr(policy, "free_bytes", lambda _: 5 * 2**30)
    assert "of the 5.0 GiB free" in choose_activations("auto", CONFIG, card, 4096)[1].reason
