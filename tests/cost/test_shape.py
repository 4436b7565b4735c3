"""Sizes read off configurations: published counts, and beside the models that transformers builds from them."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from cost.configs import GPT_OSS_20B, LLAMA_1B, QWEN3_06B, QWEN3_8B, QWEN3_14B, SMOLLM2
from slipstream.cost.shape import ModelShape
from slipstream.errors import InputError
from slipstream.model.lora import AdapterOptions, resolve_targets


@pytest.mark.parametrize(
    ("config", "billions"),
    [
        (QWEN3_06B, 0.596),
        (LLAMA_1B, 1.236),
        (QWEN3_8B, 8.191),
        (QWEN3_14B, 14.768),
        (GPT_OSS_20B, 20.9),
        (SMOLLM2, 0.1345),
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else "",
)
def test_published_counts(config: dict[str, Any], billions: float) -> None:
    assert ModelShape.of(config).parameters / 1e9 == pytest.approx(billions, rel=0.002)


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"head_dim": None},
    "qwen3": {},
    "mistral": {"sliding_window": 64},
    "gemma2": {},
    "gemma3_text": {},
    "olmo2": {"head_dim": None},
    "granite": {"head_dim": None},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 80},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": None},
}
NARROW = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 192,
    "vocab_size": 300,
    "pad_token_id": 0,
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_beside_the_models_that_transformers_builds(kind: str) -> None:
    sizes = {name: value for name, value in {**NARROW, **FAMILIES[kind]}.items() if value is not None}
    config = AutoConfig.for_model(kind, **sizes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = ModelShape.of(config)
    assert shape.parameters == pytest.approx(sum(p.numel() for p in model.parameters()), rel=0.01)
    assert ModelShape.of(config.to_dict()) == shape  # the mapping says the same
    modules = dict(model.named_modules())
    targets = resolve_targets(model, AdapterOptions())
    sizes = sorted((m.in_features, m.out_features) for m in map(modules.__getitem__, targets))
    assert sorted(shape.adapted()) == sizes


def test_windows_by_layer() -> None:
    shape = ModelShape.of(GPT_OSS_20B)
    assert [layer.window for layer in shape.layers] == [128, None] * 12
    assert {layer.window for layer in ModelShape.of({**QWEN3_06B, "sliding_window": 64}).layers} == {64}
    unused = {**QWEN3_06B, "sliding_window": 64, "use_sliding_window": False}
    assert {layer.window for layer in ModelShape.of(unused).layers} == {None}


def test_dense_layers_among_experts() -> None:
    some = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    shape = ModelShape.of({**QWEN3_06B, "num_hidden_layers": 4, **some, "decoder_sparse_step": 2})
    assert [layer.experts is None for layer in shape.layers] == [True, False, True, False]
    shape = ModelShape.of({**QWEN3_06B, "num_hidden_layers": 3, **some, "first_k_dense_replace": 2})
    assert [layer.experts is None for layer in shape.layers] == [True, True, False]
    assert shape.active_experts * 2 == shape.routed


def test_latent_attention() -> None:
    sizes = {"kv_lora_rank": 32, "q_lora_rank": 48, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 24}
    shape = ModelShape.of({**QWEN3_06B, **sizes, "model_type": "deepseek_v3", "num_attention_heads": 4})
    assert (shape.query, shape.out) == (4 * 48, 4 * 24)
    assert ("kv_b_proj", 32, 4 * 32 + 4 * 24) in {(m.name, m.inputs, m.outputs) for m in shape.layers[0].matrices}


@pytest.mark.parametrize("missing", ["hidden_size", "num_hidden_layers", "vocab_size"])
def test_what_is_missing_is_named(missing: str) -> None:
    with pytest.raises(InputError, match=rf"type 'qwen3'.*{missing}.*complete config.json"):
        ModelShape.of({name: value for name, value in QWEN3_06B.items() if name != missing})


def test_layers_without_attention_are_told_from_incomplete_configurations() -> None:
    bare = {name: value for name, value in QWEN3_06B.items() if name != "num_attention_heads"}
    with pytest.raises(InputError, match=r"type 'qwen3'\) names no attention heads, and of other layers activations"):
        ModelShape.of(bare)


def test_nested_and_older_names() -> None:
    assert ModelShape.of({"model_type": "wrapper", "text_config": QWEN3_06B}) == ModelShape.of(QWEN3_06B)
    gpt2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}
    assert ModelShape.of(gpt2).parameters == pytest.approx(124e6, rel=0.01)
