"""Memory by part: by hand, beside what autograd keeps, and beside what cards showed."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from cost.configs import GPT_OSS_20B, LLAMA_1B, QWEN3_06B, QWEN3_8B, QWEN3_14B, config, job
from simulated import loss_peak, simulated_peak
from slipstream.cost.estimate import LOSS_CHUNK
from slipstream.cost.hardware import Device
from slipstream.cost.job import NF4_BYTES
from slipstream.cost.memory import CONTEXT, LIBRARIES, ROOM, Memory, layer_bytes, loss_workspace, memory, room
from slipstream.cost.offload import Split
from slipstream.cost.shape import ModelShape
from slipstream.model.lora import AdapterOptions, add_adapter


def parts(found: Memory) -> dict[str, float]:
    return {part.name: part.bytes for part in found.device}


def test_adapters_by_hand() -> None:
    found = parts(memory(job(QWEN3_06B, 4096)))
    adapters = 16 * sum(a + b for a, b in ModelShape.of(QWEN3_06B).adapted())
    assert adapters == 10_092_544
    assert found["weights"] == 2 * ModelShape.of(QWEN3_06B).parameters
    assert (found["adapters"], found["optimizer"], found["casts"]) == (4 * adapters, 8 * adapters, 2 * adapters)
    assert "gradients" not in found  # they come later than the peak
    assert found["loss"] == pytest.approx(10 * LOSS_CHUNK * 151936, rel=0.02)


def test_full_fine_tuning_takes_sixteen_bytes_a_parameter() -> None:
    n = ModelShape.of(QWEN3_06B).parameters
    in_place = parts(memory(job(QWEN3_06B, 64, document=64, full=True, weights="float32")))
    masters = parts(memory(job(QWEN3_06B, 64, document=64, full=True, weights="bfloat16")))
    assert in_place["weights"] + in_place["gradients"] + in_place["optimizer"] == 16 * n
    assert masters["weights"] + masters["gradients"] + masters["optimizer"] == 16 * n
    small = parts(memory(job(QWEN3_06B, 64, document=64, full=True, weights="float32", optimizer="adamw8bit")))
    assert small["optimizer"] == pytest.approx(2.03 * n, rel=0.001)


def test_accumulated_gradients_are_there_at_the_loss() -> None:
    once, twice = (memory(job(QWEN3_06B, 4096, accumulate=n)) for n in (1, 2))
    assert twice.device_bytes - once.device_bytes == 4 * 10_092_544


def test_policies_trade_activations() -> None:
    keep, recompute, offload = (
        memory(job(QWEN3_8B, 8192, activations=name)) for name in ("keep", "recompute", "offload")
    )
    inputs = 8192 * 4096 * 2
    assert parts(recompute)["activations"] == 36 * inputs
    assert parts(offload)["activations"] == inputs  # of the last layer, which is recomputed before it could come back
    assert parts(offload)["reload buffers"] == 2 * inputs
    assert offload.host_bytes == 35 * inputs
    assert keep.device_bytes > 2 * recompute.device_bytes > 2 * offload.device_bytes
    assert keep.host_bytes == recompute.host_bytes == 0


def test_a_split_lies_between() -> None:
    """Kept layers' activations are gone before another layer is recomputed."""
    some = memory(job(QWEN3_8B, 8192, split=Split(6, 20, 10)))
    keep, offload = (memory(job(QWEN3_8B, 8192, activations=name)) for name in ("keep", "offload"))
    assert offload.device_bytes < some.device_bytes < keep.device_bytes
    assert some.host_bytes == 10 * 8192 * 4096 * 2
    assert job(QWEN3_8B, 8192, split=Split(18, 18, 0)).passes == 1.5


def test_a_captured_step_holds_its_gradients() -> None:
    captured, compiled = (parts(memory(job(QWEN3_06B, 1024, mode=mode))) for mode in ("captured", "compiled"))
    assert captured["gradients"] == 4 * 10_092_544
    assert "gradients" not in compiled


def test_nf4_is_for_the_decoders_linear_layers() -> None:
    shape = ModelShape.of(QWEN3_14B)
    plain, small = (parts(memory(job(QWEN3_14B, 1024, nf4=nf4)))["weights"] for nf4 in (False, True))
    assert plain - small == pytest.approx(shape.dense * (2 - NF4_BYTES))
    experts = ModelShape.of(GPT_OSS_20B)
    kept = parts(memory(job(GPT_OSS_20B, 1024, nf4=True)))["weights"]
    assert kept > 2 * experts.routed  # experts are no linear layers, and stay as they are


def test_a_dense_mask_a_distinct_window() -> None:
    one, two = (parts(memory(job(c, 2048, attention="sdpa")))["attention mask"] for c in (QWEN3_06B, GPT_OSS_20B))
    assert (one, two) == (2048**2 * 4, 2048**2 * 6)
    assert "attention mask" not in parts(memory(job(QWEN3_06B, 2048)))


WIDE = config("llama", (768, 2, 8, 2, 96, 2048, 32000), True)
CASES = {
    "adapters, kept": {},
    "adapters, recomputed": {"activations": "recompute"},
    "full, in place": {"full": True, "weights": "float32"},
    "full, recomputed": {"full": True, "weights": "float32", "activations": "recompute"},
    "adapters, float32": {"weights": "float32", "compute": "float32"},
    "adapters, kept, MLPs in tiles": {"tiles": 128},
    "adapters, recomputed, MLPs in tiles": {"activations": "recompute", "tiles": 128},
    "full, recomputed, MLPs in tiles": {"full": True, "weights": "float32", "activations": "recompute", "tiles": 128},
}


@pytest.mark.parametrize("case", CASES)
def test_beside_a_simulated_step(case: str) -> None:
    """Every tensor of a real step counted, the peak within 6%."""
    asked = job(WIDE, 512, document=512, attention="sdpa", **CASES[case])
    peak = simulated_peak(
        WIDE,
        512,
        recompute=asked.activations == "recompute",
        full=asked.full,
        dtype=getattr(torch, asked.weights),
        autocast=asked.compute == "bfloat16",
        tiles=asked.tile,
    )
    predicted = memory(asked).device_bytes - LIBRARIES
    assert peak > 1.2 * parts(memory(asked))["weights"]
    assert predicted == pytest.approx(peak, rel=0.06)


LOSSES = {
    "frozen": {},
    "frozen, a short row": {"tokens": 512},
    "frozen, float32": {"weights": "float32", "compute": "float32"},
    "frozen, soft cap": {"final_logit_softcapping": 30.0},
    "trained": {"full": True},
    "trained, float32": {"weights": "float32", "compute": "float32", "full": True},
}


@pytest.mark.parametrize("case", LOSSES)
def test_beside_a_simulated_loss(case: str) -> None:
    """The eager loss by itself, every tensor counted."""
    more = {"tokens": 2048, **LOSSES[case]}
    tokens, cap = more.pop("tokens"), more.pop("final_logit_softcapping", None)
    values = {**WIDE, "final_logit_softcapping": cap}
    asked = job(values, tokens, document=512, **more)
    peak = loss_peak(WIDE, tokens, dtype=getattr(torch, asked.weights), trained=asked.full, softcap=cap)
    assert 0.97 * peak < loss_workspace(asked) < (1.25 if asked.full else 1.1) * peak  # a trained head's sum twice


def test_beside_what_a_card_showed() -> None:
    """Whole logits, before they were made in chunks (benchmarks/results/train_step_qwen3-0.6b.json)."""
    predicted = memory(job(QWEN3_06B, 4096, chunked_loss=False, half_adapters=False)).device_bytes
    assert predicted / 1e9 == pytest.approx(13.717, rel=0.1)


@pytest.mark.parametrize(
    ("kind", "half"), [("llama", True), ("qwen3", True), ("llama", False)], ids=["llama", "qwen3", "llama float32"]
)
def test_beside_what_autograd_keeps(kind: str, half: bool) -> None:
    """A layer's saved tensors, counted as the difference that one layer more makes."""
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    config = AutoConfig.for_model(kind, **sizes, intermediate_size=768, vocab_size=300, num_hidden_layers=2)
    more = {"half_adapters": False} if half else {"weights": "float32", "compute": "float32"}
    predicted = job({**config.to_dict(), "model_type": kind}, 128, document=128, **more)
    counted = _saved(config, 2, half) - _saved(config, 1, half)
    assert counted > 128 * 256 * 10
    assert layer_bytes(predicted, predicted.shape.layers[0]) * 128 == pytest.approx(counted, rel=0.1)


def _saved(config: Any, layers: int, half: bool) -> int:
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = ["full_attention"] * layers
    dtype = torch.bfloat16 if half else torch.float32
    model = add_adapter(AutoModelForCausalLM.from_config(config, dtype=dtype), AdapterOptions(), seed=0).train()
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in weights:
            held[place] = tensor
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=half),
    ):
        model(input_ids=torch.arange(128)[None], use_cache=False)
    casts = sum(2 * p.numel() for name, p in model.named_parameters() if "lora" in name) if half else 0
    return sum(tensor.untyped_storage().nbytes() for tensor in held.values()) - casts


def test_room() -> None:
    card = Device("cuda", "a card", 8 * 2**30, (8, 9), bf16=True, unified_memory=False)
    assert room(card) == ROOM * (8 * 2**30 - CONTEXT)
    assert room(card, 1e9) == ROOM * 1e9
    host = Device("cpu", "a processor", 2**30, None, bf16=False, unified_memory=True)
    assert room(host) == ROOM * 2**30


def test_smaller_models_keep_less() -> None:
    assert memory(job(LLAMA_1B, 2048)).device_bytes < memory(job(LLAMA_1B, 4096)).device_bytes
    assert memory(job(QWEN3_06B, 4096, mode="captured")).device_bytes < memory(job(QWEN3_06B, 4096)).device_bytes
