"""Every learned token weighs the same: accumulation, one large batch, and documents one by one agree."""

from pathlib import Path
from typing import Any

import pytest
import torch

from packed import assert_close_gradients, documents, gradients, model_of, summed_loss_alone
from slipstream import PackedCollator
from slipstream.device.feed import PaddedCollator
from training import ROW_TOKENS, ROWS, Gradients, trainer_of

RELATIVE = 1e-5
DOCUMENTS = [document for index, lengths in enumerate(ROWS) for document in documents(lengths, index)]


@pytest.fixture(scope="module")
def one_by_one() -> tuple[float, dict[str, torch.Tensor]]:
    model = model_of("llama")
    total, count = summed_loss_alone(model, DOCUMENTS)
    (total / count).backward()
    return float(total / count), gradients(model)


def learned(lengths: tuple[int, ...], index: int) -> int:
    return sum(label != -100 for document in documents(lengths, index) for label in document["labels"][1:])


def one_step(folder: Path, **settings: Any) -> tuple[float, dict[str, torch.Tensor]]:
    kept = Gradients()
    trainer = trainer_of(folder, callbacks=[kept], max_steps=1, max_grad_norm=0.0, **settings)
    trainer.train()
    assert trainer.step_log.last is not None
    return trainer.step_log.last.loss, kept.steps[0]


@pytest.mark.parametrize(
    "settings",
    [
        {"rows": 1, "gradient_accumulation_steps": 6},
        {"rows": 2, "gradient_accumulation_steps": 3},
        {"rows": 3, "gradient_accumulation_steps": 2},
        {"rows": 6, "gradient_accumulation_steps": 1},
        {"rows": 6, "collator": PackedCollator(tokens=500)},  # mostly padding
        {"rows": 4, "gradient_accumulation_steps": 4, "train_dataset": DOCUMENTS, "collator": PaddedCollator()},
        {"rows": 4, "gradient_accumulation_steps": 4, "train_dataset": DOCUMENTS},
    ],
    ids=["1x6", "2x3", "3x2", "6x1", "padding", "padded documents", "documents"],
)
def test_all_ways_to_one_step_agree(tmp_path: Path, settings: Any, one_by_one: Any) -> None:
    """transformers#34191, transformers#37474, unsloth-zoo#1066: accumulation weighs tokens as one large batch does."""
    counts = [learned(lengths, index) for index, lengths in enumerate(ROWS)]
    assert len(set(counts)) > 1  # a mean of means would differ
    if settings.get("train_dataset") is DOCUMENTS and "collator" not in settings:
        settings = {**settings, "collator": PackedCollator(tokens=4 * ROW_TOKENS)}
    loss, found = one_step(tmp_path, **settings)
    assert loss == pytest.approx(one_by_one[0], rel=RELATIVE)
    assert_close_gradients(found, one_by_one[1], RELATIVE)


def test_a_last_step_with_fewer_batches_is_weighted_by_its_own_tokens(tmp_path: Path) -> None:
    """Six rows, four a step: the second step has two."""
    kept = Gradients()
    trainer = trainer_of(
        tmp_path, callbacks=[kept], max_steps=2, gradient_accumulation_steps=4, learning_rate=0.0, max_grad_norm=0.0
    )
    trainer.train()
    assert len(kept.steps) == 2
    counts = [sum(learned(lengths, i) for i, lengths in enumerate(ROWS))]
    model = model_of("llama")
    total, count = summed_loss_alone(model, DOCUMENTS)
    total.backward()
    assert count == counts[0]
    last = trainer.step_log.last
    assert last is not None
    first = count - last.learned_tokens
    assert 0 < last.learned_tokens < first
    whole = {n: kept.steps[0][n] * first + kept.steps[1][n] * last.learned_tokens for n in kept.steps[0]}
    assert_close_gradients(whole, gradients(model), RELATIVE)
