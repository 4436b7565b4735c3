"""Other people's trainers on an applied model: TRL's and transformers' own see the losses that ours does."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset
from packaging.version import Version
from transformers import TrainingArguments

from packed import TOKENS, documents, model_of, with_adapter
from slipstream import PackedCollator, Trainer, apply, decisions, pack_dataset
from slipstream.train.records import StepLog, read_records
from tiny import tiny_tokenizer

WITHOUT_TRITON = Version("1.16")
"""TRL's head has run on a CPU without Triton since."""
SETTINGS: dict[str, Any] = {
    "use_cpu": True,
    "max_steps": 4,
    "optim": "sgd",  # AdamW makes whole updates of gradients that are nothing but rounding
    "learning_rate": 0.1,
    "lr_scheduler_type": "linear",
    "report_to": "none",
    "disable_tqdm": True,
    "logging_steps": 1,
    "logging_nan_inf_filter": False,
    "save_strategy": "no",
    "log_level": "error",
    "seed": 3,
}
ORDERS = ("apply, then adapter", "adapter, then apply")
pytestmark = pytest.mark.filterwarnings("ignore")


def trl() -> Any:
    """The module; the test is skipped without it, or where it can't train here."""
    module = pytest.importorskip("trl", reason="needs the extra trl")
    if Version(module.__version__) < WITHOUT_TRITON and find_spec("triton") is None:
        pytest.skip(f"TRL {module.__version__} trains on a CPU with Triton's interpreter alone")
    return module


def documents_of_rows() -> list[dict[str, list[int]]]:
    return documents((9, 1, 17, 5, 1, 12, 30, 14, 8, 22, 3, 2, 40))


def rows() -> Dataset:
    packed = pack_dataset(Dataset.from_list(documents_of_rows()), TOKENS)
    assert 1 < len(packed) < len(documents_of_rows())
    assert any(len(lengths) > 2 for lengths in packed["seq_lengths"])  # there are boundaries to be read
    return packed


def applied(order: str) -> Any:
    if order == ORDERS[0]:
        return with_adapter(apply(model_of("qwen3")))
    return apply(with_adapter(model_of("qwen3")))


def losses(trainer: Any) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step."""
    trainer.train()
    seen = [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "grad_norm" in entry]
    assert len(seen) == SETTINGS["max_steps"]
    return seen


def ours(folder: Path, data: Dataset, **changes: Any) -> list[tuple[float, float]]:
    log = StepLog(folder / "steps.jsonl")
    settings = {**SETTINGS, "per_device_train_batch_size": 1, **changes}
    args = TrainingArguments(str(folder / "ours"), **settings)
    collator = PackedCollator(tokens=TOKENS)
    Trainer(applied(ORDERS[1]), args, train_dataset=data, data_collator=collator, step_log=log).train()
    return [(step.loss, step.grad_norm) for step in read_records(folder).steps]


def assert_same(seen: list[tuple[float, float]], expected: list[tuple[float, float]]) -> None:
    torch.testing.assert_close(torch.tensor(seen), torch.tensor(expected), rtol=2e-4, atol=2e-4)
    assert len({round(loss, 3) for loss, _ in expected}) > 1  # something happens from step to step


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("accumulate", "columns"), [(1, {}), (2, {}), (1, {"remove_unused_columns": False})])
def test_transformers_own_trainer(order: str, accumulate: int, columns: dict[str, bool], tmp_path: Path) -> None:
    """As the README has it, with the column removal that is its default, and without."""
    settings = {**SETTINGS, "gradient_accumulation_steps": accumulate, "per_device_train_batch_size": 1}
    args = TrainingArguments(str(tmp_path / "theirs"), **settings, **columns)
    collator = PackedCollator(tokens=TOKENS)
    theirs = transformers.Trainer(applied(order), args, train_dataset=rows(), data_collator=collator)
    assert_same(losses(theirs), ours(tmp_path, rows(), gradient_accumulation_steps=accumulate))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("checkpointing", [True, False])  # TRL's default is True
def test_trls_trainer(order: str, checkpointing: bool, tmp_path: Path) -> None:
    args = trl().SFTConfig(
        str(tmp_path / "theirs"),
        max_length=None,
        bf16=False,
        gradient_checkpointing=checkpointing,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        **SETTINGS,
    )
    model = applied(order)
    theirs = trl().SFTTrainer(
        model,
        args,
        train_dataset=rows(),
        data_collator=PackedCollator(tokens=TOKENS),
        processing_class=tiny_tokenizer(),
    )
    assert_same(losses(theirs), ours(tmp_path, rows(), gradient_accumulation_steps=2))
    assert any(decision.name == "packing" and decision.on for decision in decisions(model))


def test_trl_packed_equals_trl_padded(tmp_path: Path) -> None:
    """TRL with and without Slipstream: the same documents in one step, end to end or each in a row of its own."""
    few = documents((9, 1, 17, 12))
    packed = pack_dataset(Dataset.from_list(few), TOKENS)
    assert len(packed) == 1
    seen = []
    for data, with_slipstream in ((packed, True), (Dataset.from_list(few), False)):
        args = trl().SFTConfig(
            str(tmp_path / "out"), max_length=None, bf16=False, per_device_train_batch_size=len(data), **SETTINGS
        )
        model = applied(ORDERS[1]) if with_slipstream else with_adapter(model_of("qwen3"))
        extra = {"data_collator": PackedCollator(tokens=TOKENS)} if with_slipstream else {}
        trainer = trl().SFTTrainer(model, args, train_dataset=data, processing_class=tiny_tokenizer(), **extra)
        seen.append(losses(trainer))
    assert_same(*seen)
