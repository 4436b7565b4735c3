"""Operations by hand, and against what PyTorch counts."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from cost.configs import GPT_OSS_20B, QWEN3_06B, QWEN3_8B, config, job
from slipstream.cost.flops import attended_pairs, flops
from slipstream.cost.shape import ModelShape
from slipstream.model.lora import AdapterOptions, add_adapter
from tiny import tiny_model


def test_pairs() -> None:
    assert attended_pairs([4, 1]) == 10 + 1
    assert attended_pairs([4, 1], window=2) == (1 + 2 + 2 + 2) + 1
    assert attended_pairs([4], window=9) == attended_pairs([4])


def test_frozen_weights_take_four_and_with_recompute_six() -> None:
    """The floor of the measurements this project began with: 12 ms and 471 ms at 790 TFLOP/s, the head included."""
    small = job(QWEN3_06B, 4096)
    large = job(QWEN3_8B, 8192, activations="recompute", early_gradient=False)  # the head is multiplied again as well
    assert flops(small).floor / 790e12 == pytest.approx(12e-3, rel=0.04)
    assert flops(large).floor / 790e12 == pytest.approx(471e-3, rel=0.01)
    weights = ModelShape.of(QWEN3_06B)
    assert flops(small).floor == 4 * (weights.dense + weights.head) * 4096


def test_trained_weights_take_six() -> None:
    full = job(QWEN3_06B, 4096, full=True, chunked_loss=False)
    weights = ModelShape.of(QWEN3_06B)
    assert flops(full).floor == 6 * (weights.dense + weights.head) * 4096
    assert flops(full).adapters == 0


def test_of_experts_only_the_chosen_count() -> None:
    shape = ModelShape.of(GPT_OSS_20B)
    assert flops(job(GPT_OSS_20B, 1024)).experts == 4 * shape.routed / 8 * 1024


def test_a_window_and_a_dense_mask_change_attention_alone() -> None:
    plain = flops(job(QWEN3_06B, 2048, document=1024))
    windowed = flops(job({**QWEN3_06B, "sliding_window": 128}, 2048, document=1024))
    masked = flops(job(QWEN3_06B, 2048, document=1024, attention="sdpa"))
    assert windowed.attention < plain.attention / 3
    assert masked.attention == pytest.approx(plain.attention * 2048**2 / attended_pairs([1024, 1024]))
    assert windowed.floor == plain.floor == masked.floor


def test_beside_what_pytorch_counts() -> None:
    """A forward and backward of a small model on one document: all but attention's, which it counts without causality.

    The first layer's backward has no input gradient to make for its queries, keys and values.
    """
    tokens, sizes = 64, (32, 2, 2, 1, 16, 64, 320)
    model = add_adapter(tiny_model("llama"), AdapterOptions(rank=16), seed=0)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.ones(1, tokens, dtype=torch.int64), use_cache=False).logits.sum().backward()
    counted = sum(count for name, count in counter.get_flop_counts()["Global"].items() if "attention" not in str(name))
    predicted = flops(job(config("llama", sizes, False), tokens, document=tokens, chunked_loss=False))
    first = 2 * tokens * 32 * (32 + 16 + 16)
    assert counted == pytest.approx(predicted.floor + predicted.adapters - first, rel=0.03)
