"""On the card: packed equals one by one within the kernel's rounding; isolation; one build and one copy a batch."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from slipstream.device.feed import PackedCollator
from slipstream.transform import Options, apply

SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
}
FAMILIES = {
    "llama": {"head_dim": 64},
    "qwen2": {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 2},
    "qwen3": {"head_dim": 64},
    "mistral": {"sliding_window": 24, "head_dim": 64},
}
LENGTHS = (70, 1, 200, 33, 5)
TOKENS = 400
SCALE = 2.0**12  # lifts gradients out of float16's denormals, as loss scaling does
WINDOWS = {"llama": {None}, "qwen2": {None, 24}, "qwen3": {None}, "mistral": {24}}


def model_of(family: str, dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SHAPE, **FAMILIES[family])
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).to("cuda", dtype)


def docs() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 1000, (length,), generator=generator).tolist() for length in LENGTHS]


def alone(model: torch.nn.Module, documents: list[list[int]]) -> torch.Tensor:
    return torch.cat([model(torch.tensor([ids], device="cuda")).logits[0] for ids in documents])


def packed(model: torch.nn.Module, documents: list[list[int]]):
    batch = PackedCollator(tokens=TOKENS)([{"input_ids": ids} for ids in documents])
    segments = batch.pop("segments").pin_memory()
    batch.pop("labels")
    moved = {name: value.to("cuda") for name, value in batch.items()}
    return model(**moved, segments=segments).logits[0, : sum(LENGTHS)], segments


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("attention", "dtype", "tolerance"),
    [
        ("sdpa", torch.float32, 1e-4),
        ("sdpa", torch.bfloat16, 0.03),
        ("varlen", torch.bfloat16, 0.03),
        ("varlen", torch.float16, 0.005),
    ],
)
@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_packed_equals_alone(family, attention, dtype, tolerance, activations) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    reference = model_of(family, torch.float32)
    expected = alone(reference, docs())
    (SCALE * expected.square().mean()).backward()
    model = apply(model_of(family, dtype), Options(attention=attention, activations=activations)).train()
    logits, segments = packed(model, docs())
    relative = (logits.float() - expected).norm() / expected.norm()
    assert relative < tolerance
    (SCALE * logits.float().square().mean()).backward()
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        error = (ours.grad.float() - theirs.grad).norm() / theirs.grad.norm().clamp(min=1e-12)
        assert error < 5 * tolerance, f"{name}: {error:.1e}"
    masks = {key[3]: count for key, count in segments.builds.items() if key[0] == "mask"}
    assert masks == ({} if attention == "varlen" else dict.fromkeys(WINDOWS[family], 1))
    assert dict(segments.copies) == {"cuda:0": 1}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ["sdpa", "varlen"])
def test_one_document_moves_no_other(family, attention) -> None:
    model = apply(model_of(family, torch.bfloat16), Options(attention=attention)).eval()
    documents = docs()
    with torch.no_grad():
        before, _ = packed(model, documents)
        documents[2] = [(token + 7) % 990 + 3 for token in documents[2]]
        after, _ = packed(model, documents)
    start = LENGTHS[0] + LENGTHS[1]
    changed = (before != after).any(dim=-1)
    assert changed[start : start + LENGTHS[2]].all()
    assert not changed[:start].any()
    assert not changed[start + LENGTHS[2] :].any()


@pytest.mark.parametrize("attention", ["sdpa", "varlen"])
def test_many_one_token_documents(attention) -> None:
    model = apply(model_of("llama", torch.bfloat16), Options(attention=attention)).eval()
    batch = PackedCollator(tokens=4096)([{"input_ids": [3 + index % 900]} for index in range(4096)])
    with torch.no_grad():
        logits = model(
            input_ids=batch["input_ids"].cuda(), position_ids=batch["position_ids"].cuda(), segments=batch["segments"]
        ).logits[0]
        first = model(torch.tensor([[3]], device="cuda")).logits[0, 0]
    assert torch.isfinite(logits).all()
    assert (logits[0].float() - first.float()).norm() / first.float().norm() < 0.03
