"""Keep, recompute or offload: what is asked for is done, and ``auto`` takes the cheapest split that fits."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from cost.configs import GPT_OSS_20B, LLAMA_1B, QWEN3_8B, config, job
from slipstream.cost.hardware import Device
from slipstream.cost.job import Job
from slipstream.cost.memory import layer_bytes, memory
from slipstream.cost.offload import Split
from slipstream.cost.sizes import size_text
from slipstream.errors import InputError
from slipstream.memory import policy
from slipstream.memory.host_budget import HostBudget, budget_of
from slipstream.memory.policy import MARGIN, Situation, choose_activations

GIB = 2**30
CONFIG = config("llama", (64, 6, 4, 2, 16, 128, 1000), True)
HOST = Device("cpu", "a host", 2**60, None, bf16=False, unified_memory=True)
H200 = Device("cuda", "NVIDIA H200", 141 * 10**9, (9, 0), bf16=True, unified_memory=False)
LAPTOP = Device("cuda", "NVIDIA GeForce RTX 4060 Laptop GPU", 8 * GIB, (8, 9), bf16=True, unified_memory=False)
TURING = Device("cuda", "NVIDIA GeForce RTX 2080", 8 * GIB, (7, 5), bf16=False, unified_memory=False)
SPARK = Device("cuda", "NVIDIA GB10", 120 * GIB, (12, 1), bf16=True, unified_memory=True)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets what is free on a card."""

    def on_card(nbytes: int) -> None:
        monkeypatch.setattr(policy, "free_bytes", lambda _: nbytes)

    return on_card


def now(device: Device, tokens: int | None = 4096, values: dict[str, Any] = CONFIG, **more: Any) -> Situation:
    host = HostBudget(more.pop("host_bytes", 2**60))
    settings = {"layers": values["num_hidden_layers"], "host": host, **more}
    return Situation(device=device, job=None if tokens is None else job(values, tokens, document=tokens), **settings)


def demand_of(situation: Situation) -> Any:
    assert situation.job is not None
    return policy.demand_of(situation, situation.job)


def everything(situation: Situation) -> int:
    """Bytes that keeping all activations takes."""
    return int(demand_of(situation).device_bytes(Split(situation.layers, 0, 0)))


def names(chosen: policy.Chosen) -> dict[str, bool]:
    return {decision.name: decision.on for decision in chosen.decisions}


# What is asked for


@pytest.mark.parametrize("tokens", [None, 10**9])
@pytest.mark.parametrize(("asked", "split"), [("keep", Split(6, 0, 0)), ("recompute", Split(0, 6, 0))])
def test_what_is_asked_for_is_done(asked: Any, split: Split, tokens: int | None) -> None:
    chosen = choose_activations(asked, now(HOST, tokens))
    assert chosen.split == split
    assert names(chosen) == {"recompute": asked == "recompute", "offload": False}
    assert {decision.reason for decision in chosen.decisions} == {f"asked for: activations {asked}"}


@pytest.mark.parametrize("device", [H200, LAPTOP, TURING])
def test_offload_keeps_one_input_on_the_device(device: Device) -> None:
    chosen = choose_activations("offload", now(device, None))
    assert chosen.split == Split(0, 1, 5)
    assert names(chosen) == {"recompute": True, "offload": True}
    assert "5 of 6 layers" in chosen.decisions[1].reason


def test_offload_on_shared_memory_is_done_and_what_it_is_worth_said() -> None:
    chosen = choose_activations("offload", now(SPARK))
    assert chosen.split == Split(0, 1, 5)
    assert "NVIDIA GB10 shares one memory with the host" in chosen.decisions[1].reason


@pytest.mark.parametrize(
    ("situation", "why"), [(now(HOST), "nowhere to move"), (now(H200, layers=0), "can't be told apart")]
)
def test_offload_where_it_can_not_be_is_recompute_and_a_decision(situation: Situation, why: str) -> None:
    chosen = choose_activations("offload", situation)
    assert chosen.split == Split(0, max(1, situation.layers), 0)
    assert names(chosen) == {"recompute": True, "offload": False}
    assert all(why in decision.reason for decision in chosen.decisions)


def test_host_memory_too_small_is_told_with_what_to_change() -> None:
    size = 49_152 * 4096 * 2
    assert choose_activations("offload", now(H200, 49_152, QWEN3_8B, host_bytes=35 * size)).split == Split(0, 1, 35)
    told = r"needs 13.1 GiB of host memory \(35 layer inputs of 384.0 MiB\) and may take 13.1 GiB; .*memory.host_limit"
    with pytest.raises(InputError, match=told):
        choose_activations("offload", now(H200, 49_152, QWEN3_8B, host_bytes=35 * size - 1))


# What auto takes


def test_auto_keeps_where_the_batch_is_unknown() -> None:
    chosen = choose_activations("auto", now(HOST, None))
    assert chosen.split == Split(6, 0, 0)
    assert names(chosen) == {"recompute": False, "offload": False}
    assert "not known" in chosen.decisions[0].reason


def test_auto_keeps_up_to_the_margin_and_recomputes_beyond(free: Any) -> None:
    needed = everything(now(H200))
    free(int(needed / MARGIN) + 1)
    chosen = choose_activations("auto", now(H200))
    assert chosen.split == Split(6, 0, 0)
    assert "4,096 tokens" in chosen.decisions[0].reason
    assert "fits 80%" in chosen.decisions[0].reason
    free(int(needed / MARGIN) - 2)
    chosen = choose_activations("auto", now(H200))
    assert chosen.split == Split(5, 1, 0)
    assert names(chosen) == {"recompute": True, "offload": False}
    assert "doesn't fit 80%" in chosen.decisions[0].reason
    assert "1 of 6 layers is recomputed" in chosen.decisions[0].reason


def test_what_training_will_take_besides_is_not_free(free: Any) -> None:
    needed = everything(now(H200))
    free(int(needed / MARGIN) + 1)
    assert choose_activations("auto", now(H200, pending_bytes=needed // 10)).split != Split(6, 0, 0)


def test_with_less_memory_more_is_recomputed_and_then_offloaded(free: Any) -> None:
    """Over all sizes of a card: kept layers give way to recomputed ones, and those to offloaded, and nothing skips."""
    situation = now(H200, 49_152, QWEN3_8B)
    demand = demand_of(situation)
    seen = []
    for gib in range(1000, 0, -4):
        free(gib * GIB // 2)
        chosen = choose_activations("auto", situation)
        assert chosen.split is not None
        if "may not run" in chosen.decisions[0].reason:
            assert chosen.split == Split(0, 1, 35)
            break
        assert demand.device_bytes(chosen.split) <= MARGIN * gib * GIB / 2
        if chosen.split.offloaded:
            assert min(demand.device_bytes(Split(k, 36 - k, 0)) for k in range(37)) > MARGIN * gib * GIB / 2
        seen.append(chosen.split)
    kept, offloaded = [split.kept for split in seen], [split.offloaded for split in seen]
    border = next(index for index, count in enumerate(offloaded) if count)
    for regime in (seen[:border], seen[border:]):
        costs = [demand.seconds(split) for split in regime]
        assert costs == sorted(costs)
    assert not any(offloaded[:border])
    assert all(offloaded[border:])
    assert {1, 36} < set(kept)
    assert max(offloaded) > 25


def test_only_what_does_not_fit_is_offloaded_and_the_host_has_the_last_word(free: Any) -> None:
    situation = whole_rows(now(H200, 49_152, QWEN3_8B))
    demand = demand_of(situation)
    room = demand.device_bytes(Split(0, 26, 10))
    free(int(room / MARGIN) + 1)
    chosen = choose_activations("auto", situation)
    assert chosen.split == Split(1, 26, 9)  # a kept layer in the room that recomputing one needs anyway
    assert names(chosen) == {"recompute": True, "offload": True}
    assert "9 of 36 layers, 3.4 GiB" in chosen.decisions[1].reason
    assert choose_activations("auto", replace(situation, host=HostBudget(9 * demand.input_bytes))).split == chosen.split
    tight = choose_activations("auto", replace(situation, host=HostBudget(8 * demand.input_bytes)))
    assert tight.split == Split(0, 28, 8)
    assert "may not run" in tight.decisions[0].reason
    told = tight.decisions[1]
    assert told.on
    assert "8 of 36 layers, 3.0 GiB, wait in host memory; host memory is short: the step would fit" in told.reason
    assert "with 3.4 GiB there (9 layer inputs), and may take 3.0 GiB; free host memory or raise memory." in told.reason


@pytest.mark.parametrize(
    ("host", "told"),
    [
        (HostBudget(0), "may take 0 B; free host memory or raise memory.host_limit"),
        (budget_of(None, 0), "may take 0 B (80% of the 0 B that are free); free 13.1 GiB more of host memory and set"),
        (budget_of(1.0, 100 * GIB), "may take 1.0 GiB (memory.host_limit); raise memory.host_limit to 13.2"),
    ],
)
def test_no_layer_input_is_said_to_fit_that_only_the_host_lacks_room_for(free: Any, host: Any, told: str) -> None:
    situation = now(H200, 49_152, QWEN3_8B)
    demand = demand_of(situation)
    room = demand.device_bytes(Split(0, 1, 35))
    assert room < MARGIN * 0.95 * demand.device_bytes(Split(0, 36, 0))
    free(int(room / MARGIN) + 1)
    assert choose_activations("auto", situation).split == Split(0, 1, 35)
    chosen = choose_activations("auto", replace(situation, host=host))
    assert chosen.split == Split(0, 36 - host.nbytes // demand.input_bytes, host.nbytes // demand.input_bytes)
    offload = chosen.decisions[1]
    assert "fit the device" not in offload.reason
    assert "with 13.1 GiB there (35 layer inputs), and " in offload.reason
    assert told in offload.reason


def test_where_no_host_memory_would_do_the_host_is_not_blamed(free: Any) -> None:
    free(GIB)
    either = "with all inputs but the last layer's in host memory the step would not fit"
    for host, told in ((HostBudget(0), either), (HostBudget(2**60), "in host memory; even so the step would not fit")):
        chosen = choose_activations("auto", replace(now(H200, 49_152, QWEN3_8B), host=host))
        reason = chosen.decisions[1].reason
        assert told in reason
        assert "short" not in reason


def whole_rows(situation: Situation) -> Situation:
    """The same without MLPs in tiles."""
    assert situation.job is not None
    return replace(situation, job=replace(situation.job, tiles="none"))


def test_tiles_leave_room_for_longer_rows(free: Any) -> None:
    """A recomputed layer at work asks for less, a kept one for as much as ever."""
    situation = now(H200, 131_072, QWEN3_8B)
    tiled, whole = demand_of(situation), demand_of(whole_rows(situation))
    all_again, all_kept = Split(0, 36, 0), Split(36, 0, 0)
    assert tiled.device_bytes(all_again) < 0.75 * whole.device_bytes(all_again)
    assert tiled.device_bytes(all_kept) == whole.device_bytes(all_kept)
    free(int(tiled.device_bytes(all_again) / MARGIN) + 1)
    assert choose_activations("auto", situation).split == all_again
    assert choose_activations("auto", whole_rows(situation)).split != all_again


@pytest.mark.parametrize("device", [SPARK, HOST])
def test_auto_does_not_offload_where_memory_is_shared(device: Device, free: Any, monkeypatch: Any) -> None:
    demand = demand_of(now(H200, 49_152, QWEN3_8B))
    room = int(demand.device_bytes(Split(0, 26, 10)) / MARGIN) + 1
    free(room)
    monkeypatch.setattr(policy, "host_memory_limit", lambda: room)
    chosen = choose_activations("auto", now(device, 49_152, QWEN3_8B))
    assert chosen.split == Split(0, 36, 0)
    assert names(chosen) == {"recompute": True, "offload": False}
    assert "shares one memory" in chosen.decisions[1].reason or "nowhere to move" in chosen.decisions[1].reason


def test_a_hosts_limit_binds_and_is_what_the_reason_says(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = everything(now(H200))
    assert choose_activations("auto", now(replace(HOST, memory_bytes=100 * needed))).split == Split(6, 0, 0)
    monkeypatch.setattr(policy, "host_memory_limit", lambda: needed)
    chosen = choose_activations("auto", now(HOST))
    assert chosen.split != Split(6, 0, 0)
    assert (
        f"80% of the {size_text(needed)} that weights, gradients and optimizer leave free" in chosen.decisions[0].reason
    )


def test_a_cards_free_memory_is_what_torch_tells(free: Any) -> None:
    free(5 * GIB)
    reason = choose_activations("auto", now(H200)).decisions[0].reason
    assert "of the 5.0 GiB that weights, gradients and optimizer leave free" in reason


@pytest.mark.parametrize("values", [QWEN3_8B, LLAMA_1B, GPT_OSS_20B])
@pytest.mark.parametrize("attention", ["varlen", "sdpa"])
def test_bytes_are_those_that_a_plan_predicts(values: dict[str, Any], attention: str) -> None:
    moments = set()
    for tokens, (kept, offloaded) in product((8192, 65_536), ((1.0, 0), (0.5, 0), (0.0, 1), (0.0, 4))):
        situation = now(H200, tokens, values)
        assert situation.job is not None
        depth = situation.layers
        split = Split(int(kept * depth), depth - int(kept * depth) - offloaded, offloaded)
        asked = replace(situation.job, attention=attention, split=split)
        demand, planned = policy.demand_of(situation, asked), memory(asked)
        parts = {part.name: part.bytes for part in planned.device}
        moments.add("loss" if "loss" in parts else "backward")
        of_activations = ("activations", "reload buffers", "attention mask", "loss", "backward")
        assert demand.device_bytes(split) == pytest.approx(sum(parts.get(name, 0) for name in of_activations))
        assert demand.host_bytes(split) == planned.host_bytes
        assert ("attention mask" in parts) == (attention == "sdpa")
    assert moments == {"loss", "backward"}


def test_compiled_experts_keep_no_more_than_eager_ones() -> None:
    """Of a mixture whose experts are narrow beside its hidden width."""
    sizes = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    mixture = {**QWEN3_8B, "model_type": "qwen3_moe", **sizes}
    eager, captured = (job(mixture, 4096, mode=mode) for mode in ("eager", "captured"))
    assert eager.shape.layers[0].experts
    assert layer_bytes(captured, eager.shape.layers[0]) <= layer_bytes(eager, eager.shape.layers[0])


@pytest.mark.parametrize("values", [QWEN3_8B, LLAMA_1B, GPT_OSS_20B, CONFIG])
@pytest.mark.parametrize("full", [False, True])
def test_compiled_layers_keep_no_more_than_is_reckoned_with(values: dict[str, Any], full: bool) -> None:
    def kept(mode: str) -> float:
        asked: Job = job(values, 4096, full=full, mode=mode)
        return layer_bytes(asked, asked.shape.layers[0])

    assert kept("captured") == kept("compiled") < kept("eager")
    assert demand_of(replace(now(H200), job=job(CONFIG, 4096, mode="captured"))) == demand_of(
        replace(now(H200), job=job(CONFIG, 4096))
    )


def test_experts_that_a_token_goes_to_are_counted() -> None:
    """gpt-oss keeps four experts' activations where a dense model of its width keeps one MLP's."""
    dense = {**GPT_OSS_20B, "num_local_experts": None}
    assert everything(now(H200, 8192, GPT_OSS_20B)) > 2 * everything(now(H200, 8192, dense))


def test_a_limit_beyond_what_is_free_is_said_to_be_cut(free: Any) -> None:
    cut = "memory.host_limit is 1000.0 GiB, but only 100.0 GiB of host memory is free"
    host = budget_of(1000.0, 100 * GIB)
    asked = choose_activations("offload", replace(now(H200, 49_152, QWEN3_8B), host=host))
    assert asked.decisions[1].reason.endswith(f"35 of 36 layers wait in host memory; {cut}")
    situation = replace(now(H200, 49_152, QWEN3_8B), host=host)
    free(int(demand_of(situation).device_bytes(Split(0, 1, 35)) / MARGIN) + 1)
    auto = choose_activations("auto", situation)
    assert auto.decisions[1].on
    assert auto.decisions[1].reason.endswith(cut)
    with pytest.raises(InputError, match=r"memory.host_limit is 1000.0 GiB, but only 10.0 GiB of host memory is free"):
        choose_activations("offload", replace(situation, host=budget_of(1000.0, 10 * GIB)))
