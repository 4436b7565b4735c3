"""Sizes of a configuration that no model can have, and odd ones that some have."""

from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from slipstream.errors import InputError
from slipstream.model.config_sizes import DENSE_WITHOUT, check_sizes, text_values

FINE: list[dict[str, Any]] = [
    {"model_type": "gpt2", "n_inner": None, "sliding_window": None},
    {"model_type": "granitemoehybrid", "num_local_experts": 0, "num_experts_per_tok": 0},
    {"model_type": "qwen3_moe", "num_experts": 0, "num_experts_per_tok": 8},  # a dense model, as its family builds it
    {"model_type": "jamba", "num_experts": 1, "num_experts_per_tok": 2},
    {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 8},
    {"model_type": "qwen3", "sliding_window": 0, "use_sliding_window": False},
    {"model_type": "qwen3", "sliding_window": 0, "layer_types": ["full_attention"]},
    {"model_type": "gemma3n_text", "intermediate_size": [64, 64]},
    {"model_type": "falcon", "num_attention_heads": 71, "num_kv_heads": 1},
    {"hidden_size": 2**20, "vocab_size": 2**26, "num_hidden_layers": 2**12},
]


@pytest.mark.parametrize("values", FINE, ids=str)
def test_odd_sizes_that_models_have(values: dict[str, Any]) -> None:
    check_sizes(values, "it")


def test_every_familys_defaults_are_fine() -> None:
    """Of configurations as transformers makes them, and of what they write into a file."""
    checked = 0
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        if kind not in CONFIG_MAPPING:
            continue
        try:
            config = AutoConfig.for_model(kind)
        except StrictDataclassError:  # whose own defaults transformers refuses
            continue
        check_sizes(text_values(config), kind)
        check_sizes(text_values(config.to_dict()), kind)
        checked += 1
    assert checked > 100
    assert DENSE_WITHOUT - {kind for kind in DENSE_WITHOUT if kind in CONFIG_MAPPING} <= {"flint"}


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"n_embd": 2**20 + 1}, "n_embd 1,048,577 > 1,048,576, the most that is reckoned with"),
        ({"num_experts": 2**14 + 1}, "num_experts 16,385 > 16,384, the most"),
        ({"model_type": "mixtral", "num_local_experts": 1, "num_experts_per_tok": 2}, "num_experts_per_tok 2 > num_lo"),
        ({"num_experts": 4, "num_experts_per_tok": 0}, "num_experts_per_tok 0 < 1"),
        ({"sliding_window": 0}, "sliding_window 0 < 1"),
        ({"layer_types": ["sliding_attention"], "sliding_window": -1}, "sliding_window -1 < 1"),
    ],
)
def test_sizes_that_no_model_has(values: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError) as refused:
        check_sizes(values, "it")
    assert str(refused.value).startswith(f"model: the config of it has {told}")
    assert str(refused.value).endswith("; mend its config.json")


def test_all_faults_are_told_at_once_and_those_of_a_text_model_in_a_larger_one() -> None:
    inner = {"hidden_size": -1, "num_attention_heads": 4, "num_key_value_heads": 3, "num_experts": -2}
    with pytest.raises(
        InputError, match=r"hidden_size -1 < 1; 4 attention heads, .* 3 key .*; num_experts -2 < 1; mend"
    ):
        check_sizes(text_values({"model_type": "gemma3", "hidden_size": 4, "text_config": inner}), "it")
