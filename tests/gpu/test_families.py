"""Every family and attention choice on the card: packed equals its documents alone, isolated, built once, no sync."""

from importlib.util import find_spec

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from slipstream.decision import Decision
from slipstream.device.feed import PackedCollator
from slipstream.device.segments import Segments
from slipstream.errors import InputError
from slipstream.transform import Options, apply, decisions

SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ALTERNATING = ["sliding_attention", "full_attention"] * 2
FAMILIES: dict[str, dict] = {
    "llama": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": 24, "layer_types": ALTERNATING},
    "qwen3": {},
    "mistral": {"sliding_window": 24},
    "gemma2": {"sliding_window": 24, "layer_types": ALTERNATING},
    "gemma3_text": {"sliding_window": 24, "layer_types": ALTERNATING},
    "phi3": {"sliding_window": 24},
    "granite": {},
    "olmo2": {},
    "starcoder2": {},
    "cohere2": {"sliding_window": 24, "layer_types": ALTERNATING},
    "glm4": {},
    "smollm3": {"no_rope_layers": [1, 0, 1, 0]},
    "gpt_oss": {
        "sliding_window": 24,
        "layer_types": ALTERNATING,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
    },
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
    "mixtral": {"num_local_experts": 4},
    "stablelm": {},
}
CHOICES = ("varlen", "sdpa", "xformers")
FLEX_FAMILIES = ("llama", "mistral", "gemma2", "gpt_oss")
"""FlexAttention compiles for each of these; its kernel is the same for the others."""
CASES = [(family, choice) for family in FAMILIES for choice in CHOICES] + [(f, "flex") for f in FLEX_FAMILIES]
LENGTHS = (70, 1, 200, 33, 5, 1, 64)
TOKENS = 400


def model_of(family: str, dtype: torch.dtype, **settings: int) -> torch.nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SHAPE, **FAMILIES[family], **settings})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).to("cuda", dtype)


def applied(family: str, choice: str, activations: str = "keep") -> torch.nn.Module:
    if choice == "xformers" and find_spec("xformers") is None:
        pytest.skip("xFormers is not installed")
    model = model_of(family, torch.bfloat16)
    try:
        return apply(model, Options(attention=choice, activations=activations))
    except InputError as refused:
        pytest.skip(f"refused: {refused}")


def docs() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 1000, (length,), generator=generator).tolist() for length in LENGTHS]


def packed(model: torch.nn.Module, documents: list[list[int]], tokens: int) -> tuple[torch.Tensor, Segments]:
    batch = PackedCollator(tokens=tokens)([{"input_ids": ids} for ids in documents])
    segments = batch["segments"].pin_memory()
    ids = batch["input_ids"].pin_memory().to("cuda", non_blocking=True)
    positions = batch["position_ids"].pin_memory().to("cuda", non_blocking=True)
    logits = model(input_ids=ids, position_ids=positions, segments=segments).logits
    return logits[0, : sum(map(len, documents))], segments


def of_windows(segments: Segments) -> dict:
    structures = {(key[0], key[3]): count for key, count in segments.builds.items() if key[0] != "position_ids"}
    return structures


@pytest.mark.parametrize(("family", "choice"), CASES)
def test_packed_equals_alone_and_is_isolated(family: str, choice: str) -> None:
    model = applied(family, choice).eval()
    reference = model_of(family, torch.float32).eval()
    documents = docs()
    with torch.no_grad():
        together, segments = packed(model, documents, TOKENS)
        alone = torch.cat([reference(torch.tensor([ids], device="cuda")).logits[0] for ids in documents])
        rounded = model_of(family, torch.bfloat16).eval()
        rounding = torch.cat([rounded(torch.tensor([ids], device="cuda")).logits[0] for ids in documents])
    # as far from float32 as the plain model in bf16 is, document by document
    error, allowed = ((x.float() - alone).norm() / alone.norm() for x in (together, rounding))
    assert error < 1.5 * allowed + 0.002, f"{error:.4f} against {allowed:.4f}"
    with torch.no_grad():
        documents[2] = [(token + 7) % 990 + 3 for token in documents[2]]
        changed, _ = packed(model, documents, TOKENS)
    moved = (together != changed).any(dim=-1)
    start = LENGTHS[0] + LENGTHS[1]
    assert moved[start : start + LENGTHS[2]].all()
    assert not moved[:start].any()
    assert not moved[start + LENGTHS[2] :].any()
    windows = {window for _, window in of_windows(segments)}
    if choice == "varlen":
        assert windows == set()
    else:
        expected = {24} if family in ("mistral", "phi3") else {None}
        assert windows == ({24, None} if "layer_types" in FAMILIES[family] else expected)
    assert set(of_windows(segments).values()) <= {1}


@pytest.mark.parametrize(("family", "choice"), CASES)
def test_gradients_builds_and_no_sync(family: str, choice: str) -> None:
    """The step of a family and choice: gradients as sdpa's in float32, nothing built twice, nothing waited for."""
    model = applied(family, choice, "recompute").train()
    if family in ("mixtral", "qwen3_moe", "gpt_oss"):
        model.set_experts_implementation("grouped_mm")  # the loop over experts asks the device which are used
    reference = apply(model_of(family, torch.float32), Options(attention="sdpa", activations="keep")).train()
    expected, _ = packed(reference, docs(), TOKENS)
    expected.square().mean().backward()

    def step() -> Segments:
        model.zero_grad()
        logits, segments = packed(model, docs(), TOKENS)
        logits.float().square().mean().backward()
        return segments

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        segments = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert set(of_windows(segments).values()) <= {1}
    assert dict(segments.copies) == {"cuda:0": 1}
    ours = torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])
    theirs = torch.cat([p.grad.flatten() for p in reference.parameters() if p.grad is not None])
    assert ours.shape == theirs.shape
    cosine = torch.nn.functional.cosine_similarity(ours, theirs, dim=0)
    assert cosine > 0.98, f"{cosine:.4f}"


@pytest.mark.parametrize("choice", ["varlen", "flex", "sdpa"])
def test_sinks_are_trained(choice: str) -> None:
    """gpt-oss: the gradient of each head's sink, against materialised scores in float32.

    Every token goes to every expert: where rounding decides near-ties otherwise, gradients differ by up to a fifth.
    """
    model, reference = (
        apply(model_of("gpt_oss", dtype, num_experts_per_tok=4), Options(attention=attention)).train()
        for dtype, attention in ((torch.bfloat16, choice), (torch.float32, "sdpa"))
    )
    for each in (model, reference):
        logits, _ = packed(each, docs(), TOKENS)
        logits.float().square().mean().backward()
    for layer, expected in zip(model.model.layers, reference.model.layers, strict=True):
        ours, theirs = layer.self_attn.sinks.grad.float(), expected.self_attn.sinks.grad
        assert theirs.abs().max() > 0
        assert (ours - theirs).norm() / theirs.norm() < 0.1


@pytest.mark.parametrize("choice", ["varlen", "flex", "xformers", "sdpa"])
@pytest.mark.parametrize("lengths", [(1,) * 4096, (4096,), (2048, 2048)], ids=["one-token", "one", "full"])
def test_extreme_rows(choice: str, lengths: tuple[int, ...]) -> None:
    model = applied("llama", choice).eval()
    documents = [[3 + (index + token) % 900 for token in range(length)] for index, length in enumerate(lengths)]
    with torch.no_grad():
        logits, _ = packed(model, documents, 4096)
        alone = model(torch.tensor([documents[-1]], device="cuda")).logits[0]
    assert torch.isfinite(logits).all()
    last = logits[-lengths[-1] :]
    assert (last.float() - alone.float()).norm() / alone.float().norm() < 0.05


@pytest.mark.parametrize("family", FAMILIES)
def test_auto_takes_the_fastest_exact_choice(family: str) -> None:
    model = apply(model_of(family, torch.bfloat16))
    attention = next(decision for decision in decisions(model) if decision.name == "attention")
    assert isinstance(attention, Decision)
    assert attention.on
    expected = {"gemma2": "flex", "stablelm": "sdpa"}.get(family, "varlen")
    assert attention.reason.startswith(f"{expected}: "), attention.reason
