"""MLPs in tiles on a card: every mode learns what whole rows learn, without a sync, in less memory."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from packed import documents
from slipstream import Options, PackedCollator, TrainStep, apply
from slipstream.model.lora import AdapterOptions, add_adapter
from slipstream.model.tiled_mlp import tiled_mlps

TOKENS, TILES = 4096, 512
LENGTHS = [(3000, 90, 1, 1000), (64,) * 60, (4090,)]


def model_of() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=8192,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=1000,
    )
    model = LlamaForCausalLM(config).to("cuda", torch.bfloat16)
    return add_adapter(model, AdapterOptions(rank=8), seed=0).train()


def batches(count: int) -> list[dict]:
    collate = PackedCollator(tokens=TOKENS)
    return [collate(documents(LENGTHS[i % len(LENGTHS)], seed=i)) for i in range(count)]


def stepping(mode: str, tiles: Any, activations: Any) -> TrainStep:
    model = apply(model_of(), Options(activations=activations, tiles=tiles, tokens=TOKENS))
    assert bool(tiled_mlps(model)) == (tiles != "none")
    trained = [p for p in model.parameters() if p.requires_grad]
    return TrainStep(model, torch.optim.AdamW(trained, lr=1e-3, fused=True), mode)


def losses(step: TrainStep, count: int = 8) -> list[float]:
    return [float(step(batch)) for batch in batches(count)]


@pytest.mark.parametrize("activations", ["recompute", "offload"])
@pytest.mark.parametrize("mode", ["eager", "compiled", "captured"])
def test_every_mode_learns_what_whole_rows_learn(mode: str, activations: str) -> None:
    step = stepping(mode, TILES, activations)
    found = losses(step)
    assert step.mode == mode, step.decisions
    whole = losses(stepping("eager", "none", activations))
    assert len(set(whole)) == len(whole)
    assert found == pytest.approx(whole, abs=1e-2)


def test_a_step_does_not_wait() -> None:
    step = stepping("eager", TILES, "recompute")
    losses(step, 2)
    given = [{name: value.pin_memory() for name, value in batch.items()} for batch in batches(2)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in given:
            step(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_less_memory() -> None:
    """A layer at work keeps 8,192 inner numbers a token three times, and as many gradients: all of it but a tile's."""

    def peak(tiles: Any) -> int:
        step = stepping("eager", tiles, "recompute")
        losses(step, 2)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        losses(step, 2)
        return torch.cuda.max_memory_allocated() - before

    tiled, whole = peak(TILES), peak("none")
    inner = TOKENS * 8192 * 2
    assert whole - tiled > 3 * inner
