"""The load-balance loss: the model's own formula, without padding, weighted by tokens, without a wait."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mixtures import MIXTURES, Made, mixture_of
from packed import assert_close_gradients, documents, gradients, model_of, row_of, summed_loss_alone
from slipstream import Options, PackedCollator, apply
from slipstream.bench.experts_reference import HostQueries
from slipstream.device.feed import PaddedCollator
from slipstream.train.balance import balance_loss, find_balance
from training import Gradients, packed_rows, trainer_of

WITH_ONE = ("gpt_oss", "qwen3_moe", "mixtral", "olmoe", "granitemoe")
COEFFICIENT = 0.5
ASKED = {"output_router_logits": True, "router_aux_loss_coef": COEFFICIENT}


def own_loss(model: Any, logits: tuple[torch.Tensor, ...], top_k: int, mask: torch.Tensor | None) -> torch.Tensor:
    """transformers' function, from the file that defines the model."""
    return vars(sys.modules[type(model).__module__])["load_balancing_loss_func"](
        logits, logits[0].shape[-1], top_k, mask
    )


@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("padding", [0, 5])
def test_the_models_own_formula(padding: int, top_k: int) -> None:
    model = mixture_of("gpt_oss")
    logits = tuple(torch.randn(20, 8, requires_grad=True) for _ in range(3))
    real = torch.ones(20)
    real[20 - padding :] = 0
    ours = balance_loss(logits, top_k, real if padding else None)
    theirs = own_loss(model, logits, top_k, real[None] if padding else None)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(torch.autograd.grad(ours, logits), torch.autograd.grad(theirs, logits))


def test_an_equal_share_is_least() -> None:
    even = torch.eye(4).repeat(5, 1) * 20
    assert balance_loss([even], 1) == pytest.approx(1, abs=1e-4)
    assert balance_loss([even[:1].repeat(20, 1)], 1) == pytest.approx(4, abs=1e-4)


@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("family", WITH_ONE)
def test_padding_is_left_out_of_a_step(family: str, activations: Any, tmp_path: Path) -> None:
    """Megatron-LM#1984: a packed row with padding teaches what its documents without it teach."""
    lengths = (9, 1, 17, 5)
    model = apply(mixture_of(family, **ASKED), Options(activations=activations))
    watch = Gradients()
    trainer = trainer_of(
        tmp_path,
        model,
        collator=PackedCollator(tokens=60),  # 28 of them padding
        train_dataset=packed_rows((lengths,)),
        callbacks=[watch],
        max_steps=1,
        max_grad_norm=0.0,
    )
    decision = trainer.batch_loss.balance_decision
    assert decision is not None
    if family == "granitemoe" and not decision.on:  # transformers 5.17
        assert "gives no router logits" in decision.reason
        trainer.train()
        return
    assert decision.on
    trainer.train()
    examples, plain = documents(lengths), mixture_of(family, **ASKED)
    total, count = summed_loss_alone(plain, examples)
    outputs = [plain(input_ids=torch.tensor([e["input_ids"]]), output_router_logits=True) for e in examples]
    layers = zip(*(output.router_logits for output in outputs), strict=True)
    logits = tuple(torch.cat([one.reshape(-1, one.shape[-1]) for one in layer]) for layer in layers)
    assert len(logits[0]) == sum(lengths)
    balance = own_loss(plain, logits, plain.config.num_experts_per_tok, None)
    (total / count + COEFFICIENT * balance).backward()
    assert_close_gradients(watch.steps[0], gradients(plain), 2e-5)
    without = watch.steps[0]
    plain.zero_grad()
    (summed_loss_alone(plain, examples)[0] / count).backward()
    assert any((without[n] - g).norm() > 1e-2 * g.norm() for n, g in gradients(plain).items())  # it does have a part


def test_padded_batches_leave_padding_out_too(tmp_path: Path) -> None:
    def first_step(rows: tuple[tuple[int, ...], ...], collator: Any, width: int) -> dict[str, torch.Tensor]:
        watch = Gradients()
        data = packed_rows(rows)
        data = data if isinstance(collator, PackedCollator) else data.remove_columns("seq_lengths")
        model = apply(mixture_of("mixtral", **ASKED))
        named = {"train_dataset": data, "callbacks": [watch], "max_steps": 1, "max_grad_norm": 0.0}
        trainer_of(tmp_path, model, collator=collator, **named, rows=width, data_seed=1).train()
        return watch.steps[0]

    padded = first_step(((9,), (20,)), PaddedCollator(), 2)
    packed = first_step(((9,), (20,)), PackedCollator(tokens=40), 2)
    assert_close_gradients(padded, packed, 2e-5)


def test_accumulation_weights_each_batch_by_its_learned_tokens(tmp_path: Path) -> None:
    rows = ((9, 1, 17), (12, 3))
    watch = Gradients()
    model = apply(mixture_of("mixtral", **ASKED))
    named = {"callbacks": [watch], "max_steps": 1, "max_grad_norm": 0.0, "gradient_accumulation_steps": 2}
    trainer_of(tmp_path, model, train_dataset=packed_rows(rows), **named).train()
    plain = mixture_of("mixtral", **ASKED)
    parts = []
    for index, lengths in enumerate(rows):
        examples = documents(lengths, index)
        total, count = summed_loss_alone(plain, examples)
        outputs = [plain(input_ids=torch.tensor([e["input_ids"]]), output_router_logits=True) for e in examples]
        layers = zip(*(output.router_logits for output in outputs), strict=True)
        logits = tuple(torch.cat(layer) for layer in layers)
        parts.append((total + count * COEFFICIENT * own_loss(plain, logits, 2, None), count))
    (sum(part for part, _ in parts) / sum(count for _, count in parts)).backward()
    assert_close_gradients(watch.steps[0], gradients(plain), 2e-5)


def test_evaluation_is_cross_entropy_alone(tmp_path: Path) -> None:
    def evaluated(**asked: Any) -> float:
        trainer = trainer_of(tmp_path, apply(mixture_of("mixtral", **asked)), eval_dataset=packed_rows())
        return trainer.evaluate()["eval_loss"]

    assert evaluated(**ASKED) == evaluated()


def test_it_is_off_unless_the_model_asks(tmp_path: Path) -> None:
    balance, decision = find_balance(mixture_of("gpt_oss"))
    assert balance is None
    assert decision is not None
    assert not decision.on
    assert "output_router_logits: false" in decision.reason
    assert find_balance(model_of("llama")) == (None, None)
    assert trainer_of(tmp_path).batch_loss.balance_decision is None
    assert set(WITH_ONE) | {"deepseek_v2", "deepseek_v3"} == set(MIXTURES)


def test_the_host_waits_for_nothing_and_transformers_own_is_not_computed() -> None:
    model = apply(mixture_of("gpt_oss", **ASKED))
    balance, _ = find_balance(model)
    assert balance is not None
    row = row_of(documents())
    inputs = {name: value for name, value in row.items() if name != "labels"}
    with balance.listen(model) as logits, HostQueries() as queries, Made() as made:
        outputs = model(**inputs)
        balance.loss(logits, row)
    assert len(logits) == 2
    assert outputs.aux_loss is None
    assert queries.count == 2  # looped experts: one a layer
    assert "aten.bincount" not in made.names
    assert model(**inputs).aux_loss is not None  # outside, the model does as it is asked
