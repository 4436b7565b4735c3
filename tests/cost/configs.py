"""Configurations of known models, as their ``config.json`` has them, and jobs on them."""

from typing import Any

from slipstream.cost.ceilings import Ceilings
from slipstream.cost.job import Job
from slipstream.cost.shape import ModelShape


def config(kind: str, sizes: tuple[int, ...], tied: bool, **more: Any) -> dict[str, Any]:
    """``sizes``: hidden, layers, heads, key/value heads, head width, intermediate, vocabulary."""
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    names += ("intermediate_size", "vocab_size")
    return {"model_type": kind, **dict(zip(names, sizes, strict=True)), "tie_word_embeddings": tied, **more}


QWEN3_06B = config("qwen3", (1024, 28, 16, 8, 128, 3072, 151936), True)
LLAMA_1B = config("llama", (2048, 16, 32, 8, 64, 8192, 128256), True)
QWEN3_8B = config("qwen3", (4096, 36, 32, 8, 128, 12288, 151936), False)
QWEN3_14B = config("qwen3", (5120, 40, 40, 8, 128, 17408, 151936), False)
GPT_OSS_20B = config(
    "gpt_oss",
    (2880, 24, 64, 8, 64, 2880, 201088),
    False,
    num_local_experts=32,
    num_experts_per_tok=4,
    sliding_window=128,
    layer_types=["sliding_attention", "full_attention"] * 12,
)
SMOLLM2 = config("llama", (576, 30, 9, 3, 64, 1536, 49152), True)

H200 = Ceilings("bfloat16", 794e12, 4.27e12, 55.2e9, 55.3e9, 17.5e9, 24.5e-6, 13.6e-6, "measured")
"""What one card reached, on a slow host."""


def job(values: dict[str, Any], tokens: int, *, layers: int | None = None, document: int = 256, **more: Any) -> Job:
    """A rank-16 adapter on all dense linear layers, over a row full of documents of one length."""
    shape = ModelShape.of(values if layers is None else {**values, "num_hidden_layers": layers})
    lengths = [document] * (tokens // document)
    full = more.get("full", False)
    return Job(
        **{
            "shape": shape,
            "tokens": tokens,
            "lengths": lengths,
            "rank": 0 if full else 16,
            "adapted": () if full else shape.adapted(),
            **more,
        }
    )
