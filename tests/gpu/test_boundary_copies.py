"""On the card: the gradients that the attention kernel wrote go into compiled layers uncopied."""

from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

from slipstream.device.feed import PackedCollator
from slipstream.model.attention import varlen
from slipstream.model.lora import AdapterOptions, add_adapter
from slipstream.train.train_step import TrainStep
from slipstream.transform import Options, apply

LAYERS, TOKENS, LENGTHS = 3, 1024, (300, 500, 200)
HEADS, GROUPS, WIDTH = 8, 4, 64


def model_of(family: str) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family,
        hidden_size=384,
        intermediate_size=768,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        head_dim=WIDTH,
        vocab_size=1000,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to("cuda", torch.bfloat16)
    return add_adapter(model, AdapterOptions(rank=8), seed=0).train()


def batch() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    rows = [{"input_ids": torch.randint(3, 1000, (n,), generator=generator).tolist()} for n in LENGTHS]
    return PackedCollator(tokens=TOKENS)(rows)


def copies(family: str) -> int:
    """How often a compiled step copies a tensor that holds heads of all tokens."""
    torch._dynamo.reset()
    model = apply(model_of(family), Options(attention="varlen"))
    trained = [p for p in model.parameters() if p.requires_grad]
    step = TrainStep(model, torch.optim.AdamW(trained, lr=1e-3, fused=True), "compiled")
    for _ in range(2):
        step(batch())
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as found:
        step(batch())
        torch.cuda.synchronize()
    assert step.mode == "compiled", step.decisions
    step.close()
    shapes = [list(e.input_shapes[0]) for e in found.events() if e.name == "aten::copy_" and e.input_shapes]
    return sum(map(_heads, shapes))


def _heads(shape: list[int]) -> bool:
    return TOKENS in shape and shape[-1:] == [WIDTH] and bool({HEADS, GROUPS} & set(shape))


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_nothing_is_copied_between_compiled_parts(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    assert copies(family) == 0
    kernel = varlen.kernel

    def by_index(query: Any, key: Any, value: Any, segments: Any, call: Any) -> Any:
        return kernel(*(x[0][None] for x in (query, key, value)), segments, call)

    monkeypatch.setattr(varlen, "kernel", by_index)
    assert copies(family) >= 3 * LAYERS, "rows taken by index would be seen"
