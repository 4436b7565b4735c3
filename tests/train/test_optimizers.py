"""Optimizers: masters keep what half precision rounds away, and eight bits wait for nothing."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from packed import model_of, with_adapter
from slipstream import InputError, apply
from slipstream.train import optimizers
from slipstream.train import options as train_options
from slipstream.train.optimizers import MasterAdamW, choose_optimizer, trains_half_precision
from slipstream.train.options import TrainOptions, check_optimizer
from training import trainer_of, weights

SHAPES = ((70, 64), (5,), (3, 4), (256, 40))


def parameters(dtype: torch.dtype, seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def with_gradients(chosen: list[nn.Parameter], step: int) -> list[torch.Tensor]:
    """The same gradients each time, in each parameter's dtype; one parameter has none in every third step."""
    generator = torch.Generator().manual_seed(100 + step)
    made = []
    for index, parameter in enumerate(chosen):
        gradient = torch.randn(parameter.shape, generator=generator).to(torch.bfloat16)
        made.append(gradient)
        parameter.grad = None if index == 1 and step % 3 == 2 else gradient.to(parameter.dtype)
    return made


def run(chosen: list[nn.Parameter], optimizer: torch.optim.Optimizer, steps: range) -> None:
    schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for step in steps:
        with_gradients(chosen, step)
        optimizer.step()
        schedule.step()


SETTINGS: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


@pytest.mark.parametrize("chunk", [None, 100])
def test_float32_weights_get_torchs_own_update(chunk: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "CHUNK", chunk or optimizers.CHUNK)
    ours, theirs = parameters(torch.float32), parameters(torch.float32)
    run(ours, MasterAdamW(ours, **SETTINGS), range(7))
    run(theirs, torch.optim.AdamW(theirs, fused=True, **SETTINGS), range(7))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert not torch.equal(ours[0], parameters(torch.float32)[0])


@pytest.mark.parametrize("chunk", [None, 100])
def test_half_precision_weights_are_the_rounding_of_float32_masters(
    chunk: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizers, "CHUNK", chunk or optimizers.CHUNK)
    ours = parameters(torch.bfloat16)
    exact = [nn.Parameter(parameter.detach().float()) for parameter in ours]
    optimizer = MasterAdamW(ours, **SETTINGS)
    run(ours, optimizer, range(7))
    run(exact, torch.optim.AdamW(exact, fused=True, **SETTINGS), range(7))
    for parameter, expected in zip(ours, exact, strict=True):
        state = optimizer.state[parameter]
        assert torch.equal(state["master"], expected)
        assert torch.equal(parameter, expected.bfloat16())
        assert {value.dtype for value in state.values()} == {torch.float32}
    assert any(not torch.equal(p.float(), e) for p, e in zip(ours, exact, strict=True))


def test_small_updates_are_not_lost() -> None:
    """A hundred updates of a thousandth of the weight, each below half a step of bf16."""
    moved = []
    for made in (MasterAdamW, torch.optim.AdamW):
        weight = nn.Parameter(torch.full((8,), 1.0, dtype=torch.bfloat16))
        optimizer = made([weight], lr=1e-3, weight_decay=0.0)
        for _ in range(100):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        moved.append(1 - weight.detach().float().mean().item())
    assert moved[0] == pytest.approx(0.1, rel=0.02)
    assert moved[1] == 0  # the interesting case


def test_an_optimizer_goes_on_from_its_state() -> None:
    chosen = parameters(torch.bfloat16)
    optimizer = MasterAdamW(chosen, **SETTINGS)
    run(chosen, optimizer, range(3))
    again = [nn.Parameter(parameter.detach().clone()) for parameter in chosen]
    loaded = MasterAdamW(again, **SETTINGS)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert any(not torch.equal(loaded.state[p]["master"], p.float()) for p in again)  # more than the weights hold
    for pair in ((chosen, optimizer), (again, loaded)):
        for step in range(3, 6):
            with_gradients(pair[0], step)
            pair[1].step()
    assert all(torch.equal(a, b) for a, b in zip(chosen, again, strict=True))
    for a, b in zip(chosen, again, strict=True):
        assert all(torch.equal(optimizer.state[a][name], loaded.state[b][name]) for name in optimizer.state[a])


def test_what_needs_masters() -> None:
    model = model_of("llama")
    assert not trains_half_precision(model)
    assert trains_half_precision(model.bfloat16())
    assert not trains_half_precision(with_adapter(model))  # peft's adapters are float32 on frozen bf16
    assert choose_optimizer(TrainOptions(), model_of("llama")) is None
    made = choose_optimizer(TrainOptions(learning_rate=0.5), model_of("llama").bfloat16())
    assert made is not None
    assert made == (MasterAdamW, {"lr": 0.5})


def test_a_run_in_bf16_resumes_bit_for_bit(tmp_path: Path) -> None:
    def trainer(folder: str, **named: Any) -> Any:
        model = apply(model_of("llama").bfloat16())
        choice = choose_optimizer(TrainOptions(learning_rate=3e-4), model)
        return trainer_of(tmp_path / folder, model, optimizer_cls_and_kwargs=choice, learning_rate=3e-4, **named)

    whole = trainer("whole", max_steps=6)
    whole.train()
    cut = trainer("cut", max_steps=6, save_strategy="steps", save_steps=3)
    cut.train()
    resumed = trainer("cut", max_steps=6)
    resumed.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-3"))
    before, after, again = weights(model_of("llama").bfloat16()), weights(whole.model), weights(resumed.model)
    assert all(torch.equal(after[name], again[name]) for name in after)
    assert any(not torch.equal(after[name], before[name]) for name in after)


# Eight bits


@pytest.fixture
def eight_bit() -> Any:
    pytest.importorskip("bitsandbytes", reason="needs the extra nf4")
    from slipstream.train import adamw_8bit

    return adamw_8bit


def test_eight_bits_are_bitsandbytes_own_without_its_waits(eight_bit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import bitsandbytes

    waits: list[torch.Tensor] = []
    monkeypatch.setattr(bitsandbytes.optim.optimizer, "sync_gpu", waits.append)
    ours, theirs = parameters(torch.float32), parameters(torch.float32)
    optimizer = eight_bit.AdamW8bit(ours, **SETTINGS)
    run(ours, optimizer, range(5))
    assert waits == []
    run(theirs, bitsandbytes.optim.AdamW8bit(theirs, **SETTINGS), range(5))
    assert len(waits) >= 5  # theirs does
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert optimizer.state[ours[0]]["state1"].dtype == torch.uint8
    assert optimizer.state[ours[1]]["state1"].dtype == torch.float32  # too small to be worth it


def test_embeddings_keep_their_means_whole(eight_bit: Any) -> None:
    model = model_of("llama", vocab_size=500)
    choice = choose_optimizer(TrainOptions(optimizer="adamw8bit"), model)
    assert choice is not None
    optimizer = choice[0](model.parameters(), **choice[1])
    model(input_ids=torch.arange(20)[None]).logits.square().sum().backward()
    optimizer.step()
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert optimizer.state[embedding]["state1"].dtype == torch.float32
    assert optimizer.state[head]["state1"].dtype == torch.uint8


def test_eight_bits_go_on_from_their_state(eight_bit: Any, tmp_path: Path) -> None:
    def trainer(folder: str, **named: Any) -> Any:
        model = apply(model_of("llama", vocab_size=500))
        choice = choose_optimizer(TrainOptions(optimizer="adamw8bit", learning_rate=1e-2), model)
        return trainer_of(tmp_path / folder, model, optimizer_cls_and_kwargs=choice, **named)

    whole = trainer("whole", max_steps=6, save_strategy="steps", save_steps=3)
    whole.train()
    resumed = trainer("whole", max_steps=6)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    after, again = weights(whole.model), weights(resumed.model)
    assert all(torch.equal(after[name], again[name]) for name in after)


def test_eight_bits_without_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_options, "find_spec", lambda _: None)
    check_optimizer(TrainOptions())
    with pytest.raises(InputError, match=r"train\.optimizer: adamw8bit needs bitsandbytes, .*slipstream\[nf4\]"):
        check_optimizer(TrainOptions(optimizer="adamw8bit"))
