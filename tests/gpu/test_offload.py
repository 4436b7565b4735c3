"""On the card: offloaded gradients are bitwise recompute's, copies run beside kernels, nothing waits, nothing stays."""

import gc
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

from slipstream.bench import offload
from slipstream.bench.offload import OffloadBench
from slipstream.bench.offload_trace import shares
from slipstream.cost.hardware import describe
from slipstream.device.feed import PackedCollator
from slipstream.device.segments import Segments
from slipstream.errors import InputError
from slipstream.memory.held import Held
from slipstream.memory.host_budget import host_budget
from slipstream.memory.host_buffers import BufferKey, HostPool, page_aligned
from slipstream.memory.transfers import CudaTransfers
from slipstream.model.lora import AdapterOptions, add_adapter
from slipstream.train.train_step import TrainStep
from slipstream.transform import ATTRIBUTE, Options, apply, base_model, decisions, restore

LAYERS, TOKENS, HIDDEN = 6, 2048, 512
DEVICE = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _repeatable():
    """Attention's fused backward adds in no fixed order; plain products repeat their own bits."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


def model_of(dtype: torch.dtype, layers: int = LAYERS) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama",
        hidden_size=HIDDEN,
        intermediate_size=4 * HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        vocab_size=1000,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(DEVICE, dtype).train()
    model.get_input_embeddings().requires_grad_(False)
    return model


@cache
def segments_of(tokens: int) -> Segments:
    return Segments.from_lengths([tokens // 2, tokens - tokens // 2]).on(DEVICE)


def ids_of(seed: int, tokens: int = TOKENS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 1000, (1, tokens), generator=generator).to(DEVICE)


def loss_on(model: Any, ids: torch.Tensor) -> torch.Tensor:
    segments = segments_of(ids.shape[1])
    positions = segments.position_ids()
    logits = model(input_ids=ids, position_ids=positions, segments=segments, use_cache=False).logits
    return 100 * logits.float().square().mean()


def loss_of(model: Any, seed: int = 0, tokens: int = TOKENS) -> torch.Tensor:
    return loss_on(model, ids_of(seed, tokens))


def step(model: Any, run: Callable[[Any], None] | None = None) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    if run is None:
        loss_of(model).backward()
    else:
        run(model)
    return gradients_of(model)


def gradients_of(model: Any) -> dict[str, torch.Tensor]:
    torch.cuda.synchronize()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_bits(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert any(gradient.abs().max() > 0 for gradient in theirs.values())
    assert [name for name, gradient in theirs.items() if not torch.equal(ours[name], gradient)] == []


def offload_of(model: Any) -> Any:
    return getattr(model, ATTRIBUTE).checkpointing.offload


def options(buffers: Any = 2, **more: Any) -> Options:
    return Options(attention="sdpa", activations="offload", buffers=buffers, **more)


def recomputed(dtype: torch.dtype, run: Callable[[Any], None] | None = None, layers: int = LAYERS) -> Any:
    model = apply(model_of(dtype, layers), Options(attention="sdpa", activations="recompute"))
    first = step(model, run)
    assert_same_bits(step(model, run), first)  # else bits can't be compared
    return first


def two_in_order(model: Any) -> None:
    first, second = loss_of(model, 1), loss_of(model, 2)
    first.backward()
    second.backward()


def interleaved(model: Any) -> None:
    a, b = loss_of(model, 1), loss_of(model, 2, 1024)
    b.backward()
    c = loss_of(model, 3)
    a.backward()
    c.backward()


def retained(model: Any) -> None:
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    loss.backward()


def evaluation_between(model: Any) -> None:
    loss = loss_of(model, 1)
    model.eval()
    with torch.no_grad():
        loss_of(model, 2)
    model.train()
    loss.backward()


@pytest.mark.parametrize("buffers", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_bitwise_those_of_recompute(dtype: torch.dtype, buffers: int) -> None:
    expected = recomputed(dtype)
    model = apply(model_of(dtype), options(buffers))
    for _ in range(3):
        assert_same_bits(step(model), expected)
    (lane,) = offload_of(model).lanes.values()
    assert lane.sent == lane.reloads == 3 * (LAYERS - 1)
    assert lane.depth == buffers  # learned in the first step, used since
    assert [decision.on for decision in decisions(model) if decision.name == "offload"] == [True]


@pytest.mark.parametrize("run", [two_in_order, interleaved, retained, evaluation_between])
def test_any_order_of_forwards_and_backwards(run: Callable[[Any], None]) -> None:
    expected = recomputed(torch.bfloat16, run)
    model = apply(model_of(torch.bfloat16), options(3))
    for _ in range(3):
        assert_same_bits(step(model, run), expected)


def test_fifty_steps_under_allocator_pressure() -> None:
    """torchtune#1867: memory that is given away while a copy still uses it shows as wrong or NaN gradients."""
    expected = recomputed(torch.bfloat16)
    model = apply(model_of(torch.bfloat16), options(2))
    sizes = [HIDDEN * TOKENS * 2, HIDDEN * TOKENS, 3 * HIDDEN * TOKENS]

    def spoil(*_: Any) -> None:
        """Take what was just freed and fill it with NaN, between any two layers."""
        for size in sizes:
            torch.full((size // 2,), float("nan"), dtype=torch.bfloat16, device=DEVICE)

    for layer in model.model.layers:
        layer.input_layernorm.register_forward_pre_hook(spoil)
        layer.mlp.register_forward_pre_hook(spoil)
    for number in range(50):
        if number % 10 == 5:
            loss_of(model, number)  # a forward without a backward
        assert_same_bits(step(model), expected)
        if number == 25:
            torch.cuda.empty_cache()


def test_memory_is_flat_over_200_steps_and_nothing_is_left() -> None:
    model = apply(model_of(torch.bfloat16), Options(attention="sdpa", activations="recompute"))
    step(model)  # libraries take their workspaces
    restore(model)
    model.zero_grad(set_to_none=True)
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    apply(model, options(2))
    for _ in range(5):
        step(model)
    model.zero_grad(set_to_none=True)
    pool, device, host = offload_of(model).pool, torch.cuda.memory_allocated(), offload_of(model).pool.held
    assert host == (LAYERS - 1) * TOKENS * HIDDEN * 2
    for _ in range(200):
        model.zero_grad(set_to_none=True)
        loss_of(model).backward()
    model.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == device
    assert pool.held == pool.idle == host
    assert not [held for held in gc.get_objects() if isinstance(held, Held)]
    restore(model)
    assert pool.held == 0
    gc.collect()
    assert torch.cuda.memory_allocated() <= before


def test_the_host_never_waits() -> None:
    model = apply(model_of(torch.bfloat16), options(2))
    ids = ids_of(0)
    for _ in range(3):
        step(model)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            loss_on(model, ids).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_each_input_leaves_once_and_comes_back_once_on_streams_of_its_own(tmp_path: Path) -> None:
    model = apply(model_of(torch.bfloat16), options(2))
    for _ in range(3):
        step(model)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        loss_of(model).backward()
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    nbytes = TOKENS * HIDDEN * 2
    found = shares(events, nbytes)
    assert found["out"]["count"] == found["back"]["count"] == LAYERS - 1
    copies = [e for e in events if e.get("cat") == "gpu_memcpy" and e["args"]["bytes"] == nbytes]
    assert len({e["args"]["stream"] for e in copies}) == 2
    kernels = {e["args"]["stream"] for e in events if e.get("cat") == "kernel"}
    assert not kernels & {e["args"]["stream"] for e in copies}


def test_pinned_memory_is_exact_and_unpinned() -> None:
    transfers = CudaTransfers(DEVICE)
    memory = page_aligned(5_000_001)
    assert not memory.is_pinned()
    assert transfers.pin(memory)
    assert memory.is_pinned()
    transfers.unpin(memory)
    assert not memory.is_pinned()


def test_a_refused_pin_leaves_no_error_behind() -> None:
    transfers = CudaTransfers(DEVICE)
    memory = page_aligned(1 << 20)
    assert transfers.pin(memory)
    assert not transfers.pin(memory)  # the same pages twice
    torch.ones(4, device=DEVICE).sum().item()  # a kernel that would otherwise be told
    transfers.unpin(memory)


def test_pageable_memory_gives_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = recomputed(torch.bfloat16)
    monkeypatch.setattr(CudaTransfers, "pin", lambda *_: False)
    model = apply(model_of(torch.bfloat16), options(2))
    for _ in range(2):
        assert_same_bits(step(model), expected)
    (told,) = [decision for decision in decisions(model) if decision.name == "pinned memory"]
    assert not told.on


def test_out_of_memory_ahead_goes_on_with_one_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = recomputed(torch.bfloat16)
    model = apply(model_of(torch.bfloat16), options(3))
    for _ in range(2):
        step(model)
    real = Held._slot
    calls = []

    def slot(held: Held) -> torch.Tensor:
        calls.append(held)
        if len(calls) in (2, 4):
            raise torch.OutOfMemoryError("out of memory")
        return real(held)

    monkeypatch.setattr(Held, "_slot", slot)
    assert_same_bits(step(model), expected)
    (lane,) = offload_of(model).lanes.values()
    assert lane.most == 1
    assert [decision.on for decision in decisions(model) if decision.name == "reload buffers"] == [True, False]


def test_too_little_host_memory_is_told_at_apply() -> None:
    with pytest.raises(
        InputError, match=r"needs .* of host memory \(5 layer inputs of .* and may take .* raise memory\.host_limit"
    ):
        apply(model_of(torch.bfloat16), options(2, tokens=TOKENS, host_limit=1e-6))


def test_the_step_can_be_captured_and_replayed() -> None:
    """Streams fork from the capture and join it; a replay computes what the step computes, on new tokens too."""
    expected = {
        seed: recomputed(torch.bfloat16, lambda model, seed=seed: loss_of(model, seed).backward()) for seed in (0, 7)
    }
    model = apply(model_of(torch.bfloat16), options(2))
    ids = ids_of(0)

    def forward_backward() -> None:
        loss_on(model, ids).backward()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            forward_backward()
    torch.cuda.current_stream().wait_stream(side)
    model.zero_grad(set_to_none=True)
    pool = offload_of(model).pool
    held = pool.held
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward_backward()
    assert pool.held == held  # the warm-up's buffers, now the graph's
    assert pool.idle == 0
    for seed in (0, 7, 0):
        ids.copy_(ids_of(seed))
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(gradients_of(model), expected[seed])
    loss = loss_of(model, 7)  # an eager pass beside the graph has buffers of its own
    assert pool.held == 2 * held
    ids.copy_(ids_of(0))
    graph.replay()
    assert_same_bits(gradients_of(model), expected[0])
    model.zero_grad(set_to_none=True)
    loss.backward()
    assert_same_bits(gradients_of(model), expected[7])
    del graph
    getattr(model, ATTRIBUTE).checkpointing.release_graphs()
    assert pool.idle == pool.held


def test_the_trained_step_is_captured_with_offload() -> None:
    """A whole optimizer step, recorded once: replays move the inputs too, and learn what recompute learns."""

    def run(activations: str) -> tuple[TrainStep, Any, list[float]]:
        torch.manual_seed(0)
        model = add_adapter(model_of(torch.bfloat16), AdapterOptions(rank=8), seed=0).train()
        apply(model, Options(attention="sdpa", activations=activations))
        trained = [p for p in model.parameters() if p.requires_grad]
        step = TrainStep(model, torch.optim.AdamW(trained, lr=1e-3, fused=True), mode="captured")
        batches = [
            PackedCollator(tokens=TOKENS)(
                [{"input_ids": ids_of(seed, length)[0].tolist()} for length in (700, 900, 300)]
            )
            for seed in range(6)
        ]
        return step, model, [float(step(batch)) for batch in batches]

    expected_step, _, expected = run("recompute")
    step, model, found = run("offload")
    assert (step.mode, expected_step.mode) == ("captured", "captured"), step.decisions
    assert found == pytest.approx(expected, abs=5e-3)
    assert len(set(expected)) == 6
    pool = offload_of(base_model(model)).pool
    assert pool.held == (LAYERS - 1) * TOKENS * HIDDEN * 2  # one set of buffers for warm-up and graph
    assert pool.idle == 0
    step.close()
    assert pool.held == 0


def test_device_memory_holds_a_few_inputs_instead_of_all() -> None:
    """The peak falls by the inputs that left, and the second buffer costs one input."""
    layers, nbytes = 24, TOKENS * HIDDEN * 2
    peaks = {}
    for name, chosen in {
        "recompute": Options(attention="sdpa", activations="recompute"),
        "one": options(1),
        "two": options(2),
    }.items():
        model = apply(model_of(torch.bfloat16, layers), chosen)
        model.requires_grad_(False)
        model.model.layers[0].input_layernorm.weight.requires_grad_(True)  # gradients take no memory here
        for _ in range(2):
            step(model)
        gc.collect()
        base = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loss_of(model).backward()
        peaks[name] = torch.cuda.max_memory_allocated() - base
        restore(model)
        del model
        gc.collect()
    assert peaks["recompute"] - peaks["one"] >= (layers - 4) * nbytes
    assert peaks["two"] - peaks["one"] <= 1.1 * nbytes


def test_a_pool_on_the_card_waits_before_it_gives_memory_back() -> None:
    pool, transfers = HostPool(1 << 30, [].append), CudaTransfers(DEVICE)
    key = BufferKey(DEVICE, torch.uint8, 64 << 20)
    buffer = pool.take(key, transfers)
    assert buffer is not None
    assert buffer.pinned
    source = torch.ones(key.nbytes, dtype=torch.uint8, device=DEVICE)
    buffer.busy.append(transfers.out(source, buffer.flat(), ()))
    pool.give(buffer)
    pool.close()
    assert pool.held == 0
    assert not pool.idle


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_a_model_split_over_devices() -> None:
    def split(model: Any) -> Any:
        from accelerate import dispatch_model

        half = {f"model.layers.{i}": int(i >= LAYERS // 2) for i in range(LAYERS)}
        rest = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 1, "lm_head": 1}
        return dispatch_model(model, {**half, **rest})

    segments_of.cache_clear()  # counts begin here
    expected = step(apply(split(model_of(torch.bfloat16)), Options(attention="sdpa", activations="recompute")))
    model = apply(split(model_of(torch.bfloat16)), options(2))
    for _ in range(3):
        assert_same_bits(step(model), expected)
    lanes = offload_of(model).lanes
    assert len(lanes) == 2
    assert sum(lane.reloads for lane in lanes.values()) == 3 * (LAYERS - 1)
    segments = segments_of(TOKENS)
    assert segments.copies == {"cuda:0": 1, "cuda:1": 1}
    assert {key[1].index for key in segments.builds if key[0] == "mask"} == {0, 1}
    assert set(segments.builds.values()) == {1}


def test_the_card_is_described_and_host_memory_counted() -> None:
    device = describe(DEVICE)
    assert device.kind == "cuda"
    assert host_budget(None).nbytes > 1 << 30


def test_the_benchmark_runs() -> None:
    asked = OffloadBench(shapes=("tiny",), tokens=(512,), rounds=2, warmup=2, layers=3)
    (row,) = offload.run(asked, lambda _: None)["rows"]
    assert "refused" not in row, row.get("refused")
    for name, buffers in (("offload-1", 1), ("offload-2", 2), ("offload-auto", 2)):
        copies = row["arms"][name]["copies"]
        assert copies["buffers"] == buffers
        assert copies["traced"]["out"]["count"] == copies["traced"]["back"]["count"] == 2
        assert 0 <= copies["traced"]["both"]["hidden_share"] <= 1
        assert row["arms"][name]["peak_bytes"] > 0


@pytest.mark.parametrize("mode", ["eager", "captured"])
def test_a_step_out_of_memory_is_begun_again_with_one_buffer(
    monkeypatch: pytest.MonkeyPatch, mode: Literal["eager", "captured"]
) -> None:
    """Once reloads go ahead an input can't be had: in a backward, or while the step is recorded."""

    def run() -> tuple[list[float], Any]:
        model = add_adapter(model_of(torch.bfloat16), AdapterOptions(rank=8), seed=0).train()
        apply(model, options(2))
        step = TrainStep(
            model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, fused=True), mode
        )
        batches = [
            PackedCollator(tokens=TOKENS)([{"input_ids": ids_of(seed, n)[0].tolist()} for n in (700, 900, 300)])
            for seed in range(4)
        ]
        losses = [float(step(batch)) for batch in batches]
        assert step.mode == mode, step.decisions
        return losses, model

    def told(model: Any) -> list[bool]:
        return [decision.on for decision in decisions(model) if decision.name == "reload buffers"]

    expected, model = run()
    assert told(model) == []
    real, failed = Held.take, []

    def take(held: Held) -> torch.Tensor:
        if held.first is None and held.lane.ahead and not failed:
            failed.append(held)
            raise torch.OutOfMemoryError("out of memory")
        return real(held)

    monkeypatch.setattr(Held, "take", take)
    found, model = run()
    assert len(failed) == 1
    assert told(model) == [False]
    assert found == pytest.approx(expected, abs=1e-6 if mode == "eager" else 5e-3)
    assert len(set(expected)) == 4
