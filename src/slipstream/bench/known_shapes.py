"""The shapes that can be measured, and what each benchmark takes where nothing is asked for.

Plain data without torch, so that ``--help`` names every shape and default at once; the benchmarks take theirs from
here too, so that the help cannot say another. ``shapes.py`` makes models of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Default(Generic[T]):
    """What is taken on a card, and what without one."""

    card: T
    cpu: T

    def on(self, card: bool) -> T:
        """What is taken there."""
        return self.card if card else self.cpu

    def __str__(self) -> str:
        """In words, for help."""
        card, cpu = (",".join(value) if isinstance(value, tuple) else str(value) for value in (self.card, self.cpu))
        return f"{card} on a card, else {cpu}"


SHAPES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llama-3.2-1b": {
            "model_type": "llama",
            "hidden_size": 2048,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "intermediate_size": 8192,
            "vocab_size": 128256,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
        },
        "qwen3-0.6b": {
            "model_type": "qwen3",
            "hidden_size": 1024,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 3072,
            "vocab_size": 151936,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 40960,
            "tie_word_embeddings": True,
        },
        "qwen3-8b": {
            "model_type": "qwen3",
            "hidden_size": 4096,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 12288,
            "vocab_size": 151936,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 40960,
        },
        "qwen3-14b": {
            "model_type": "qwen3",
            "hidden_size": 5120,
            "num_hidden_layers": 40,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 17408,
            "vocab_size": 151936,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 40960,
        },
        "qwen3-32b": {
            "model_type": "qwen3",
            "hidden_size": 5120,
            "num_hidden_layers": 64,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 25600,
            "vocab_size": 151936,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 40960,
        },
        "tiny": {
            "model_type": "llama",
            "hidden_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "intermediate_size": 128,
            "vocab_size": 512,
            "max_position_embeddings": 4096,
        },
    }
)

MIXTURES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "gpt-oss-20b": {
            "model_type": "gpt_oss",
            "hidden_size": 2880,
            "num_hidden_layers": 24,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "intermediate_size": 2880,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "vocab_size": 201088,
        },
        "qwen3-30b-a3b": {
            "model_type": "qwen3_moe",
            "hidden_size": 2048,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "vocab_size": 151936,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 40960,
        },
        "tiny-mixture": {
            "model_type": "gpt_oss",
            "hidden_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "intermediate_size": 64,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": 32,
            "vocab_size": 512,
        },
    }
)
"""Mixtures of experts; ``tiny-mixture`` is for machines without a card."""

ALL = (*SHAPES, *MIXTURES)
PACKING_SHAPES = Default(("llama-3.2-1b", "qwen3-0.6b"), ("tiny",))
OFFLOAD_SHAPES = Default(("qwen3-8b", "qwen3-14b", "qwen3-32b"), ("tiny",))
EXPERTS_SHAPES = Default(("gpt-oss-20b", "qwen3-30b-a3b"), ("tiny-mixture",))
STEP_SHAPES = Default(("qwen3-0.6b",), ("tiny",))
TOGETHER_SHAPES = Default(("gpt-oss-20b", "qwen3-8b"), ("tiny-mixture", "tiny"))
EXPERTS_TOKENS, STEP_TOKENS, TOGETHER_TOKENS = Default(4096, 128), Default(4096, 256), Default(8192, 128)
PACKING_ROUNDS, OFFLOAD_ROUNDS, STEP_ROUNDS = Default(20, 5), Default(6, 4), Default(15, 3)
EXPERTS_ROUNDS, EXPERTS_STEP_ROUNDS, TOGETHER_ROUNDS = Default(20, 3), Default(5, 2), Default(12, 3)
EXPERTS_LAYERS = Default(12, 2)
"""Decoder layers of whole steps; of routing and one layer there are none to choose."""
