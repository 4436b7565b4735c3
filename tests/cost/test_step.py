"""Step times beside what was measured on an H200, and what each choice must change.

The measured figures are whole forward and backward passes over documents of 256 tokens, peft's adapters on all linear
layers and a loss that computes its logits twice (``AS_MEASURED``), on the card whose ceilings ``configs.H200`` has;
only constants under "fitted" were chosen by them. Trainings of today stand in ``test_plan_against_run.py``.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from cost.configs import GPT_OSS_20B, H200, LLAMA_1B, QWEN3_06B, QWEN3_8B, QWEN3_14B, job
from slipstream.cost.metadata import METADATA_SECONDS, build_seconds, cached_seconds, dynamic_queries, uncached_seconds
from slipstream.cost.step import (
    EAGER_OPERATION,
    STEP_LAUNCHES,
    boundary_seconds,
    exposed_seconds,
    layer_backward_seconds,
    layer_launches,
    reload_seconds,
    step_times,
)
from slipstream.model.half_adapters import HalfAdapters
from slipstream.model.lora import AdapterOptions, add_adapter

AS_MEASURED: dict[str, Any] = {"half_adapters": False, "early_gradient": False}
MEASURED = [
    ("Qwen3-0.6B", QWEN3_06B, 4096, {}, 58e-3),
    ("Qwen3-8B", QWEN3_8B, 8192, {"activations": "recompute"}, 756e-3),
    ("half of Qwen3-14B NF4", QWEN3_14B, 4096, {"activations": "recompute", "layers": 20, "nf4": True}, 378e-3),
]


@pytest.mark.parametrize(("name", "values", "tokens", "more", "seconds"), MEASURED, ids=[row[0] for row in MEASURED])
def test_captured_steps(name: str, values: Any, tokens: int, more: Any, seconds: float) -> None:
    predicted = step_times(job(values, tokens, mode="captured", **AS_MEASURED, **more), H200)
    assert predicted.total == pytest.approx(seconds, rel=0.2)
    assert predicted.total > predicted.floor


def test_an_eager_step_of_a_small_model_waits_for_launches() -> None:
    """Measured whole steps of the trainer: 241 to 287 ms (benchmarks/results/train_step_qwen3-0.6b.json)."""
    predicted = step_times(job(QWEN3_06B, 4096, **AS_MEASURED), H200)
    assert predicted.host == predicted.total > predicted.device
    assert predicted.total == pytest.approx(0.245, rel=0.2)


def test_an_eager_kernel_takes_python_longer_than_its_launch() -> None:
    quick = replace(H200, launch=9e-6)
    eager, compiled, captured = (job(QWEN3_06B, 4096, mode=mode) for mode in ("eager", "compiled", "captured"))
    slow, fast = step_times(eager, H200).host, step_times(eager, quick).host
    assert slow - fast == pytest.approx(STEP_LAUNCHES * (H200.launch - quick.launch))
    assert fast == pytest.approx(layer_launches(eager) * EAGER_OPERATION + STEP_LAUNCHES * quick.launch)
    assert step_times(eager, replace(H200, launch=1e-4)).host > 2 * slow  # where launching alone takes longer
    for mode in (compiled, captured):
        assert step_times(mode, quick).host == pytest.approx(step_times(mode, H200).host * 9 / 24.5)


@pytest.mark.parametrize("half", [True, False], ids=["half adapters", "peft's own"])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_kernels_of_a_layer_beside_what_autograd_runs(kind: str, half: bool) -> None:
    """Operators other than views of a forward and a backward, as the difference that one layer more makes."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = AutoConfig.for_model(kind, **sizes, intermediate_size=96, vocab_size=300, num_hidden_layers=1)
    counted = _kernels(config, 2, half) - _kernels(config, 1, half)
    predicted = layer_launches(job({**config.to_dict(), "model_type": kind}, 64, document=64, half_adapters=half))
    assert counted > 100
    assert predicted == pytest.approx(counted, rel=0.08)


class Kernels(TorchDispatchMode):
    """Counts operators that compute something."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name.partition("::")[2]
        self.count += not (function.is_view or name.startswith(("empty", "new_empty", "_unsafe_view", "detach")))
        return function(*args, **(kwargs or {}))


def _kernels(config: Any, layers: int, half: bool) -> int:
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = ["full_attention"] * layers
    base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    model = add_adapter(base, AdapterOptions(rank=16), seed=0).train()
    if half:
        HalfAdapters.attach(base, torch.bfloat16)
    with Kernels() as counted:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(input_ids=torch.arange(64)[None], use_cache=False).logits
        out.float().sum().backward()
    return counted.count


def test_a_captured_step_waits_for_the_device() -> None:
    eager, compiled, captured = (
        step_times(job(QWEN3_06B, 4096, mode=mode), H200) for mode in ("eager", "compiled", "captured")
    )
    assert captured.total == captured.device
    assert captured.host < compiled.host < eager.host
    assert captured.elementwise == compiled.elementwise < eager.elementwise / 2


def test_accumulation_repeats_all_but_the_update() -> None:
    once, four = (step_times(job(QWEN3_06B, 1024, accumulate=n), H200) for n in (1, 4))
    assert four.matmul == pytest.approx(4 * once.matmul)
    assert four.optimizer == once.optimizer


def test_trained_weights_cost_a_third_more_products_and_an_update() -> None:
    adapters, full = step_times(job(LLAMA_1B, 1024), H200), step_times(job(LLAMA_1B, 1024, full=True), H200)
    assert adapters.matmul < full.matmul < 1.7 * adapters.matmul
    assert full.optimizer > 50 * adapters.optimizer


def test_reloads_hide_under_the_backward_where_it_is_longer() -> None:
    offload = job(QWEN3_8B, 8192, activations="offload")
    copy, backward = reload_seconds(offload, H200), layer_backward_seconds(offload, H200)
    assert copy == pytest.approx(8192 * 4096 * 2 / 55.2e9)
    assert copy < backward
    assert exposed_seconds(offload, H200) == pytest.approx(copy)  # the first; the last layer is not offloaded
    single = job(QWEN3_8B, 8192, activations="offload", buffers=1)
    assert exposed_seconds(single, H200) == pytest.approx(35 * copy)
    slow = replace(H200, to_device=1e9)
    late = reload_seconds(offload, slow) - layer_backward_seconds(offload, slow)
    assert late > 0
    assert exposed_seconds(offload, slow) == pytest.approx(reload_seconds(offload, slow) + 34 * late)
    assert exposed_seconds(job(QWEN3_8B, 8192), H200) == 0


def test_a_loop_over_experts_waits_for_each() -> None:
    loop = step_times(job(GPT_OSS_20B, 4096, experts="loop"), H200)
    grouped = step_times(job(GPT_OSS_20B, 4096), H200)
    assert loop.waits == pytest.approx(24 * 32 * H200.sync)
    assert grouped.waits == 0
    assert loop.host > 2 * grouped.host
    assert dynamic_queries(32, 24, 2, sorted_once=True) * 32 == dynamic_queries(32, 24, 2, sorted_once=False)


def test_published_packing_arithmetic() -> None:
    """A mask build of 13.7 ms: 206 ms over 16 layers, 370 ms over 28."""
    for layers, saved in ((16, 0.206), (28, 0.370)):
        assert uncached_seconds(layers, 5e-3, 13.7e-3) - cached_seconds(layers, 5e-3, 13.7e-3) == pytest.approx(
            saved, abs=1e-3
        )
    twice = uncached_seconds(28, 5e-3, 0.01, recompute=True) - cached_seconds(28, 5e-3, 0.01, recompute=True)
    assert twice == pytest.approx(55 * 0.01)


def test_boundaries_by_attention() -> None:
    """One dense mask of 2,048 tokens took 0.33 ms with its boundaries (benchmarks/results/packing_*_2048_sdpa.json)."""
    assert build_seconds(2048, "varlen", H200.copy) == METADATA_SECONDS
    assert build_seconds(2048, "sdpa", H200.copy) == pytest.approx(0.33e-3, rel=0.4)
    keep = boundary_seconds(job(QWEN3_06B, 2048), H200)
    again = boundary_seconds(job(QWEN3_06B, 2048, activations="recompute"), H200)
    assert keep == pytest.approx(27 * METADATA_SECONDS)
    assert again == pytest.approx(55 * METADATA_SECONDS)
