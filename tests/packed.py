"""Documents, the row they are packed into, and the plain path that the packed one is compared with."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import nn

from slipstream.device.feed import PackedCollator
from tiny import tiny_model

LENGTHS = (9, 1, 17, 5, 1, 12)
TOKENS = 48
"""Three more than the documents hold: the row has padding."""
WINDOW = 4
"""Shorter than the longest documents."""
ALTERNATING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {
        "num_hidden_layers": 3,
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "qwen3": {},
    "mistral": {"sliding_window": WINDOW},
    "gemma2": {
        **ALTERNATING,
        "attn_logit_softcapping": 0.5,
        "query_pre_attn_scalar": 1,
        "attn_implementation": "eager",  # older transformers take sdpa for it, and compute without the cap
    },
    "gemma3_text": ALTERNATING,
    "phi3": {"sliding_window": WINDOW},
    "granite": {"attention_multiplier": 0.5, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    "olmo2": {},
    "starcoder2": {"sliding_window": WINDOW},
    "cohere2": {**ALTERNATING, "logit_scale": 1.0},
    "glm4": {},
    "smollm3": {"no_rope_layers": [1, 0]},
    "gpt_oss": {
        **ALTERNATING,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    },
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "mixtral": {"num_local_experts": 4},
    "stablelm": {},
}
"""gemma2's cap lies within its scores, and gpt_oss's sinks take a share, so that a kernel without them differs."""
EXPERTS = ("gpt_oss", "qwen3_moe", "mixtral")
"""Which tokens an expert sums together depends on the routing of the whole row, and with it the rounding."""
LINEAR = (
    "q_proj",
    "k_proj",
    "v_proj",
    "qkv_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "gate_up_proj",
    "down_proj",
    "c_fc",
)
"""Names of linear layers; each family has some of them."""
WINDOWS: dict[str, set[int | None]] = {
    family: {None, WINDOW} if "layer_types" in settings else {settings.get("sliding_window")}
    for family, settings in FAMILIES.items()
}
"""The windows of each family's layers: one structure a batch for each."""


def model_of(family: str, seed: int = 0, **overrides: Any) -> Any:
    """The same tiny model whenever it is asked for with the same seed."""
    torch.manual_seed(seed)
    return tiny_model(family, **{**FAMILIES.get(family, {}), **overrides}).train()


def scaled(kind: str, limit: int = 8) -> dict[str, Any]:
    """Settings under which rotary positions change for sequences longer than ``limit``: longrope, dynamic or yarn."""
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 10_000.0, "factor": 4.0}
    if kind == "dynamic":
        return {"max_position_embeddings": limit, "rope_parameters": rope}
    rope["original_max_position_embeddings"] = limit
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 8, "long_factor": [float(2 + i) for i in range(8)]}
    lengths = {"max_position_embeddings": 4 * limit, "original_max_position_embeddings": limit}
    return {**lengths, "rope_parameters": rope}


def with_adapter(model: Any, dropout: float = 0.0) -> Any:
    """The same adapter whenever it is asked for; random on both sides, so that every part has a gradient."""
    torch.manual_seed(1)
    config = LoraConfig(r=2, target_modules=list(LINEAR), init_lora_weights=False, lora_dropout=dropout)
    return get_peft_model(model, config)


def documents(lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[dict[str, list[int]]]:
    """Random documents with labels; about a third of the tokens is not learned."""
    draw = torch.Generator().manual_seed(seed)
    made = []
    for length in lengths:
        ids = torch.randint(5, 300, (length,), generator=draw)
        learned = torch.rand(length, generator=draw) < 0.67
        made.append({"input_ids": ids.tolist(), "labels": torch.where(learned, ids, -100).tolist()})
    return made


def row_of(examples: Sequence[dict[str, list[int]]], tokens: int = TOKENS) -> dict[str, Any]:
    return PackedCollator(tokens=tokens)(examples)


def logits_of(model: nn.Module, row: dict[str, Any]) -> torch.Tensor:
    """[1, T, V], without the model's own loss."""
    return model(**{name: value for name, value in row.items() if name != "labels"}).logits


def logits_alone(model: nn.Module, examples: Sequence[dict[str, list[int]]]) -> torch.Tensor:
    """[documents' tokens, V]: each document by itself through the plain model."""
    return torch.cat([model(input_ids=torch.tensor([example["input_ids"]])).logits[0] for example in examples])


def summed_loss_alone(model: nn.Module, examples: Sequence[dict[str, list[int]]]) -> tuple[torch.Tensor, int]:
    """The summed cross-entropy of predicting each document's labels from what is before them, and their count."""
    total, count = torch.zeros(()), 0
    for example in examples:
        logits = model(input_ids=torch.tensor([example["input_ids"]])).logits[0, :-1]
        labels = torch.tensor(example["labels"][1:], dtype=torch.int64)
        total = total + F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
        count += int((labels != -100).sum())
    return total, count


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_close_gradients(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], relative: float) -> None:
    """Each parameter's gradient, by its norm; those that are nothing but rounding by the norm of all."""
    assert ours.keys() == theirs.keys()
    assert theirs
    whole = torch.stack([g.norm() for g in theirs.values()]).norm()
    assert whole > 0
    for name, expected in theirs.items():
        error = (ours[name] - expected).norm()
        assert error <= relative * expected.norm() + 1e-2 * relative * whole, f"{name}: {error / expected.norm():.1e}"
