"""How boundaries reach a model's attention, found out by a probe that leaves no trace."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from packed import FAMILIES, documents, logits_of, model_of, row_of, scaled, with_adapter
from slipstream import apply
from slipstream.model.carrier import attention_modules, find_carrier
from slipstream.transform import base_model, packing_decision
from tiny import tiny_model

BY_MASK = ("stablelm", "nemotron")
"""Their attention is of transformers' new kind, but their layers keep unknown arguments from it."""


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family(family: str) -> None:
    expected = "mask" if family in BY_MASK else "segments"
    carrier, reason = find_carrier(model_of(family))
    assert carrier == expected
    assert reason == {
        "segments": "segments reach every attention module",
        "mask": "its attention is handed a mask but no segments",
    }.get(expected)


@pytest.mark.parametrize("kind", BY_MASK)
@pytest.mark.parametrize("wrap", [lambda model: model, with_adapter])
def test_models_that_carry_a_mask_alone(kind: str, wrap: Any) -> None:
    assert find_carrier(base_model(wrap(tiny_model(kind))))[0] == "mask"


def test_a_mask_is_no_carrier_for_windows() -> None:
    """One mask for all layers could not tell their windows apart."""
    model = tiny_model("stablelm")
    model.config.sliding_window = 4
    assert find_carrier(model) == (
        None,
        "boundaries reach 2 of its 2 attention modules: documents would see each other",
    )


def test_attention_of_its_own() -> None:
    model = tiny_model("bloom", n_layer=2, n_head=2)
    assert find_carrier(model)[0] is None
    decision = packing_decision(model)
    assert not decision.on
    assert decision.reason.endswith("; set packing.enabled: false")


def deafen(module: nn.Module, *names: str) -> None:
    """Let a module drop arguments, as wrappers with a fixed signature do."""
    forward = module.forward
    vars(module)["forward"] = lambda *args, **kwargs: forward(
        *args, **{name: value for name, value in kwargs.items() if name not in names}
    )


def test_a_wrapped_decoder_that_drops_what_it_does_not_know() -> None:
    model = model_of("llama")
    deafen(model.model, "segments")
    assert find_carrier(model)[0] == "mask"  # which would do
    deafen(model.model, "attention_mask")
    assert find_carrier(model) == (
        None,
        "boundaries reach 0 of its 2 attention modules: documents would see each other",
    )


def test_one_deaf_layer_is_enough() -> None:
    model = model_of("llama")
    deafen(model.model.layers[1].self_attn, "segments", "attention_mask")
    assert find_carrier(model) == (
        None,
        "boundaries reach 1 of its 2 attention modules: documents would see each other",
    )


def test_a_forward_that_fails_is_a_reason() -> None:
    model = model_of("llama")

    def fails(*args: Any, **kwargs: Any) -> None:
        raise ValueError("no rows here")

    vars(model.model.layers[1])["forward"] = fails
    assert find_carrier(model) == (None, "a row of two documents fails in it: ValueError: no rows here")
    assert model.config._attn_implementation == "sdpa"
    assert model.training


def without_weights(model: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(model.config)


@pytest.mark.parametrize("family", [*FAMILIES, "nemotron", "xglm"])
def test_a_model_without_weights_is_answered_as_one_with_them(family: str) -> None:
    model = tiny_model(family, **FAMILIES.get(family, {}))
    meta = without_weights(model)
    before = meta.config.to_dict(), meta.config._attn_implementation, meta.get_experts_implementation()
    assert find_carrier(meta) == find_carrier(model)
    assert (meta.config.to_dict(), meta.config._attn_implementation, meta.get_experts_implementation()) == before


def test_a_forward_that_looks_at_values_is_not_tried_without_them() -> None:
    meta = without_weights(tiny_model("llama"))
    meta.model.layers[0].register_forward_pre_hook(lambda _, args: bool(args[0].sum() > 0) and None)
    assert find_carrier(meta) == ("segments", "known to reach every attention module only once weights are loaded")


def test_the_modules_that_attend_are_named() -> None:
    assert set(attention_modules(model_of("llama").model).values()) == {"layers.0.self_attn", "layers.1.self_attn"}


@pytest.mark.parametrize("settings", [{}, scaled("dynamic"), scaled("longrope")], ids=["plain", "dynamic", "longrope"])
@pytest.mark.parametrize("training", [True, False])
def test_the_probe_leaves_no_trace(training: bool, settings: dict[str, Any]) -> None:
    """Not in configuration, training flags, buffers, random state, or what rotary positions recall."""
    model = model_of("llama", attention_dropout=0.5, **settings).train(training)
    model.model.layers[1].eval()  # as for a frozen part
    with torch.no_grad():
        model(input_ids=torch.arange(5, 25)[None])  # dynamic scaling recalls 20 tokens
    rotary = vars(model.model.rotary_emb)
    before = model.config.to_dict(), model.config._attn_implementation, sorted(rotary), model.model.rotary_emb
    modes = [module.training for module in model.modules()]
    tensors = [(value, value.clone()) for value in [*model.parameters(), *model.buffers()]]
    longest = rotary["max_seq_len_cached"]
    torch.manual_seed(5)
    state = torch.get_rng_state()
    assert find_carrier(model)[0] == "segments"
    assert torch.equal(torch.get_rng_state(), state)
    assert (model.config.to_dict(), model.config._attn_implementation, sorted(rotary), model.model.rotary_emb) == before
    assert [module.training for module in model.modules()] == modes
    assert rotary["max_seq_len_cached"] == longest
    after = [*model.parameters(), *model.buffers()]
    assert len(after) == len(tensors)
    assert all(now is kept and torch.equal(now, copy) for now, (kept, copy) in zip(after, tensors, strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_applied_model_tells_what_was_found() -> None:
    """Asking again runs no probe through the hooks of ``apply``, which would refuse its mask."""
    model = apply(model_of("llama").eval())
    assert packing_decision(model).on
    with torch.no_grad():
        assert torch.isfinite(logits_of(model, row_of(documents()))).all()


def test_of_layers_that_are_alike_one_is_asked_without_weights() -> None:
    calls: list[int] = []

    def asked(model: Any) -> int:
        calls.clear()
        for index, layer in enumerate(model.model.layers):
            layer.self_attn.register_forward_pre_hook(lambda *_, index=index: calls.append(index))
        assert find_carrier(model)[0] == "segments"
        assert model.config.num_hidden_layers == len(model.model.layers)
        return len(calls)

    kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    windows = {"num_hidden_layers": 5, "layer_types": kinds, "sliding_window": 4}
    assert asked(without_weights(tiny_model("llama", num_hidden_layers=6))) == 1
    assert asked(without_weights(tiny_model("qwen3", **windows, use_sliding_window=True))) == 3
    assert asked(tiny_model("llama", num_hidden_layers=6)) == 6
