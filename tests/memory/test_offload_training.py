"""Offload through ``apply`` and a trainer, as on a card, with copies that are done at once: the same weights after."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback

from offloading import assert_same_bits, deep, loss_of, plain, step
from packed import documents, gradients, logits_of, model_of, row_of, with_adapter
from slipstream import InputError, Options, TrainStep, apply, decisions, restore
from slipstream.memory import host_budget, policy
from slipstream.memory.host_buffers import HostPool
from slipstream.train.loss import summed_cross_entropy
from slipstream.transform import ATTRIBUTE, release_graphs, tell_later_decisions
from training import Gradients, packed_rows, trainer_of, weights


@pytest.fixture
def as_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU offload to its own memory."""
    monkeypatch.setattr(policy, "_obstacle", lambda now: None)


def offload_of(model: Any) -> Any:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return getattr(base, ATTRIBUTE).checkpointing.offload


def reloads(model: Any) -> int:
    return sum(lane.reloads for lane in offload_of(model).lanes.values())


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_trained_model_is_the_same(as_on_a_card: None, tmp_path: Path, family: str) -> None:
    """Accumulation, evaluation in between, an optimizer; with experts, whose routing is kept for the recompute."""

    def run(activations: Any) -> tuple[Any, dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
        model = apply(with_adapter(model_of(family, num_hidden_layers=4)), Options(activations=activations))
        seen = Gradients()
        trainer = trainer_of(
            tmp_path / str(activations),
            model=model,
            eval_dataset=packed_rows(seed=5),
            eval_strategy="steps",
            eval_steps=1,
            gradient_accumulation_steps=2,
            max_steps=4,
            callbacks=[seen],
        )
        trainer.train()
        return model, weights(trainer.model), seen.steps

    _, expected, each = run("recompute")
    model, found, ours = run("offload")
    assert reloads(model) == 4 * 2 * 3
    assert len(ours) == len(each) == 4
    for one, other in zip(ours, each, strict=True):
        assert_same_bits(one, other)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert offload_of(model).pool.held == 0


def pool_watched(model: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[HostPool, list[int]]:
    """The model's pool, and the bytes that it held at each ``take``."""
    pool, seen = offload_of(model).pool, []
    own = pool.take

    def take(*arguments: Any) -> Any:
        found = own(*arguments)
        seen.append(pool.held)
        return found

    monkeypatch.setattr(pool, "take", take)
    return pool, seen


def test_host_memory_is_given_back_when_training_ends_and_taken_again(
    as_on_a_card: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = apply(with_adapter(model_of("llama", num_hidden_layers=4)), Options(activations="offload"))
    pool, seen = pool_watched(model, monkeypatch)
    trainer = trainer_of(tmp_path, model=model, eval_dataset=packed_rows(seed=5))
    for run in (1, 2):
        trainer.train()
        assert len(seen) == run * 3 * 3
        assert seen[-1] == 3 * 36 * 32 * 4  # all of one step's, pooled over steps
        assert pool.held == 0
    trainer.evaluate()
    assert pool.held == 0


class Stops(TrainerCallback):
    """Ends a training in the middle of a layer's backward."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step == 1:
            layer = model.model.layers[1].mlp
            calls: list[int] = []

            def stop(*_: Any) -> None:
                calls.append(1)
                if len(calls) == 2:  # the recompute
                    handle.remove()
                    raise self.error

            handle = layer.register_forward_pre_hook(stop)


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_host_memory_is_given_back_when_training_is_broken_off(
    as_on_a_card: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    model = apply(model_of("llama", num_hidden_layers=4), Options(activations="offload"))
    pool, seen = pool_watched(model, monkeypatch)
    stops = Stops(error := kind("a kernel failed"))
    trainer = trainer_of(tmp_path, model=model, callbacks=[stops])
    with pytest.raises(kind):
        trainer.train()
    assert len(seen) == 2 * 3
    assert trainer.step is None
    error.with_traceback(None)  # its frames hold the broken step
    gc.collect()
    assert pool.held == 0
    trainer.remove_callback(stops)
    trainer.train()
    assert len(seen) == 2 * 3 + 3 * 3
    assert pool.held == 0


def test_a_trainer_that_switches_checkpointing_on_does_not_put_ours_away(as_on_a_card: None, tmp_path: Path) -> None:
    """As transformers' and TRL's trainers do."""
    model = apply(with_adapter(model_of("llama", num_hidden_layers=4)), Options(activations="offload"))
    trainer = trainer_of(tmp_path, model=model, gradient_checkpointing=True)
    told: list[Any] = []
    tell_later_decisions(model, told.append)
    trainer.train()
    assert reloads(model) == 3 * 3
    assert [decision.name for decision in told] == ["checkpointing"]
    assert told[0] in decisions(model)


def test_in_a_loop_of_ones_own(as_on_a_card: None) -> None:
    def run(activations: Any) -> tuple[Any, list[float]]:
        model = apply(with_adapter(model_of("llama", num_hidden_layers=4)), Options(activations=activations)).train()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        train_step = TrainStep(model, optimizer, mode="eager")
        losses = [float(train_step([row_of(documents()), row_of(documents(seed=1))])) for _ in range(3)]
        train_step.close()
        return model, losses

    _, expected = run("recompute")
    model, found = run("offload")
    assert found == expected
    assert expected[2] < expected[0]
    assert reloads(model) == 3 * 2 * 3
    release_graphs(model)  # nothing was captured: nothing to do
    assert offload_of(model).pool.held == 0


@pytest.fixture
def one_process() -> Iterator[None]:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_wrapped_in_distributed_data_parallel(as_on_a_card: None, one_process: None) -> None:
    expected = step(plain(deep()))
    model = apply(deep(), Options(activations="offload"))
    wrapped = DistributedDataParallel(model)
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        loss_of(wrapped).backward()
        assert_same_bits(gradients(model), expected)
    assert reloads(model) == 2 * 4


@pytest.mark.parametrize("before_peft", [False, True])
def test_applied_before_and_after_peft(as_on_a_card: None, before_peft: bool) -> None:
    row = row_of(documents())

    def run(model: Any) -> None:
        summed_cross_entropy(logits_of(model, row), row["labels"]).backward()

    def prepared(activations: Any) -> Any:
        base = model_of("qwen3", num_hidden_layers=4)
        if before_peft:
            return with_adapter(apply(base, Options(activations=activations)))
        return apply(with_adapter(base), Options(activations=activations))

    expected = step(prepared("recompute"), run)
    model = prepared("offload")
    assert_same_bits(step(model, run), expected)
    assert reloads(model) == 3
    restore(model)
    assert_same_bits(step(model, run), step(restore(prepared("keep")), run))


def test_a_copied_model_shares_its_buffers(as_on_a_card: None) -> None:
    import copy

    model = apply(deep(), Options(activations="offload"))
    expected = step(model)
    twin = copy.deepcopy(model)
    assert_same_bits(step(twin), expected)
    restore(twin)
    assert_same_bits(step(model), expected)
    assert reloads(model) == 3 * 4


def test_host_memory_too_small_is_told_at_apply(as_on_a_card: None) -> None:
    with pytest.raises(InputError, match=r"4 layer inputs .* set memory.host_limit|raise memory.host_limit"):
        apply(deep(), Options(activations="offload", tokens=4096, host_limit=1e-6))


def test_on_a_cpu_offload_is_recompute_and_a_decision() -> None:
    model = apply(deep(), Options(activations="offload"))
    assert offload_of(model) is None
    found = {decision.name: decision for decision in decisions(model)}
    assert not found["offload"].on
    assert found["recompute"].on
    assert "nowhere to move" in found["offload"].reason
    assert_same_bits(step(model), step(plain(deep())))


def test_buffers_and_limit_reach_the_offload(as_on_a_card: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_budget, "free_host_memory", lambda: 100 * 2**30)
    offload = offload_of(apply(deep(), Options(activations="offload", buffers=3, host_limit=2.0)))
    assert (offload.buffers, offload.pool.budget, offload.layers, offload.strict) == (3, 2 * 2**30, 4, True)
    assert os.environ.get("LOCAL_WORLD_SIZE") is None
