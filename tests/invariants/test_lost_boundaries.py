"""A packed row keeps its boundaries on every road to the model, or is refused: documents never see each other silently.

Each road is one that people take: a trainer that drops columns, a collator that knows none, a loop with PyTorch's own.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    default_data_collator,
)

from packed import documents, model_of, row_of, with_adapter
from slipstream import InputError, PackedCollator, Trainer, TrainStep, apply, pack_dataset, restore
from tiny import tiny_tokenizer
from training import arguments, packed_rows, trainer_of

LENGTHS = (5, 7, 4, 8, 3, 9)
TOKENS = 12
REFUSED = "seq_lengths and without segments"
pytestmark = pytest.mark.filterwarnings("ignore")


def rows() -> Dataset:
    """Three full rows of two documents each."""
    packed = pack_dataset(Dataset.from_list(documents(LENGTHS)), TOKENS)
    assert [len(lengths) for lengths in packed["seq_lengths"]] == [2, 2, 2]
    assert {len(ids) for ids in packed["input_ids"]} == {TOKENS}
    return packed


def theirs(folder: Path, model: Any, collator: Any, data: Any = None, **changes: Any) -> transformers.Trainer:
    """transformers' own trainer with the column removal it has by default."""
    args = arguments(folder, **{"max_steps": 1, **changes})
    assert args.remove_unused_columns
    return transformers.Trainer(model, args, train_dataset=rows() if data is None else data, data_collator=collator)


class Seen(PackedCollator):
    """What of a row is left for the collator, and the documents it was taken for."""

    def __init__(self, tokens: int) -> None:
        super().__init__(tokens=tokens)
        self.columns: list[set[str]] = []
        self.lengths: list[tuple[int, ...]] = []

    def __call__(self, examples: Any) -> dict[str, Any]:
        batch = super().__call__(examples)
        self.columns += map(set, examples)
        self.lengths.append(batch["segments"].lengths)
        return batch


@pytest.mark.parametrize("order", ["apply", "apply, then adapter", "adapter, then apply"])
@pytest.mark.parametrize("packed_by", ["pack_dataset", "the user"])
def test_a_trainer_that_drops_columns_keeps_the_lengths(packed_by: str, order: str, tmp_path: Path) -> None:
    model = apply(model_of("llama")) if order != "adapter, then apply" else apply(with_adapter(model_of("llama")))
    model = with_adapter(model) if order == "apply, then adapter" else model
    data = (rows() if packed_by == "pack_dataset" else packed_rows()).map(lambda row: {**row, "source": "here"})
    assert ("position_ids" in data.column_names) == (packed_by == "pack_dataset")
    collator = Seen(36)
    theirs(tmp_path, model, collator, data, max_steps=len(data)).train()
    assert sorted(collator.lengths) == sorted(tuple(lengths) for lengths in data["seq_lengths"])
    assert all("source" not in columns for columns in collator.columns)  # columns were dropped


def test_rows_streamed_into_such_a_trainer_keep_them_too(tmp_path: Path) -> None:
    collator = Seen(TOKENS)
    theirs(tmp_path, apply(model_of("llama")), collator, rows().to_iterable_dataset()).train()
    assert [len(lengths) for lengths in collator.lengths] == [2] * len(collator.lengths)
    assert collator.lengths


@pytest.mark.parametrize("given", ["nothing applied", "another forward since", "restored"])
def test_a_row_that_has_lost_its_lengths_is_refused(given: str, tmp_path: Path) -> None:
    model = model_of("llama")
    if given != "nothing applied":
        apply(model)
    if given == "restored":
        restore(model)
    if given == "another forward since":  # as kernels' patches put it on the instance
        own = type(model).forward
        model.forward = own.__get__(model)
    with pytest.raises(InputError, match="remove_unused_columns=False"):
        theirs(tmp_path, model, PackedCollator(tokens=TOKENS)).train()


@pytest.mark.parametrize("kind", ["default", "language modeling", "seq2seq"])
def test_collators_that_know_no_boundaries(kind: str, tmp_path: Path) -> None:
    tokenizer, model = tiny_tokenizer(), apply(model_of("llama"))
    collator = {
        "default": default_data_collator,
        "language modeling": DataCollatorForLanguageModeling(tokenizer, mlm=False),
        "seq2seq": DataCollatorForSeq2Seq(tokenizer),
    }[kind]
    with pytest.raises(InputError, match=REFUSED):
        theirs(tmp_path, model, collator).train()


@pytest.mark.parametrize("applied", [True, False])
def test_our_trainer_with_such_a_collator(applied: bool, tmp_path: Path) -> None:
    model = apply(model_of("llama")) if applied else model_of("llama")
    collator = DataCollatorForSeq2Seq(tiny_tokenizer())
    trainer = Trainer(model, arguments(tmp_path), train_dataset=rows(), data_collator=collator)
    with pytest.raises(InputError, match=REFUSED):
        trainer.train()
    with pytest.raises(InputError, match=REFUSED):
        trainer.evaluate(rows())


@pytest.mark.parametrize("data", ["train", "evaluation", "named evaluation", "a list"])
@pytest.mark.parametrize("processing", [True, False])  # whose default collator pads
def test_our_trainer_without_a_collator(data: str, processing: bool, tmp_path: Path) -> None:
    named: dict[str, Any] = {"processing_class": tiny_tokenizer()} if processing else {}
    plain = Dataset.from_list(documents((6, 6)))
    named |= {
        "train": {"train_dataset": rows()},
        "evaluation": {"train_dataset": plain, "eval_dataset": rows()},
        "named evaluation": {"train_dataset": plain, "eval_dataset": {"one": plain, "two": rows()}},
        "a list": {"train_dataset": rows().to_list()},
    }[data]
    with pytest.raises(InputError, match=r"=slipstream.PackedCollator\(tokens=\.\.\.\).*batch_size=3 rows"):
        Trainer(apply(model_of("llama")), arguments(tmp_path, per_device_train_batch_size=3), **named)
    unpacked = {"train_dataset": plain, "eval_dataset": {"one": plain}}
    Trainer(apply(model_of("llama")), arguments(tmp_path), **unpacked).train()  # documents of one length


@pytest.mark.parametrize("family", ["llama", "stablelm"])  # the latter hands no unknown argument on
@pytest.mark.parametrize("wrapped", [True, False])
def test_a_plain_loop_with_pytorchs_collation(family: str, wrapped: bool) -> None:
    model = apply(model_of(family))
    model = with_adapter(model) if wrapped else model
    batch = next(iter(DataLoader(rows().with_format("torch"), batch_size=1)))
    assert batch["seq_lengths"].shape == (1, 2)
    with pytest.raises(InputError, match=REFUSED):
        model(**batch)
    del batch["seq_lengths"], batch["position_ids"]
    assert model(**batch).loss.isfinite()  # one document of as many tokens


@pytest.mark.parametrize("applied", [True, False])
def test_a_step_with_pytorchs_collation(applied: bool) -> None:
    model = apply(model_of("llama")) if applied else model_of("llama")
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in DataLoader(rows().with_format("torch"), batch_size=1):
        with pytest.raises(InputError, match=REFUSED):
            step(batch)


def test_a_row_cut_short_is_refused() -> None:
    row = rows()[0]
    cut = {name: values[: TOKENS - 3] for name, values in row.items()}
    with pytest.raises(InputError, match="but the row has 9 tokens"):
        PackedCollator(tokens=TOKENS)([cut])
    batch = PackedCollator(tokens=TOKENS)([row])
    short = {name: value[:, :9] if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
    with pytest.raises(InputError, match="segments hold 12 tokens"):
        apply(model_of("llama"))(**short)


def _dropping(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A collator of somebody's own, which hands on neither lengths nor positions."""
    return {name: torch.tensor([example[name] for example in examples]) for name in ("input_ids", "labels")}


@pytest.mark.parametrize("collator", [_dropping, DataCollatorWithFlattening()], ids=["own", "flattening"])
def test_our_trainer_refuses_what_a_collator_has_lost(tmp_path: Path, collator: Any) -> None:
    trainer = trainer_of(tmp_path, collator=collator, remove_unused_columns=False)
    with pytest.raises(InputError, match=r"packed rows .* without segments.*PackedCollator"):
        trainer.train()


def test_a_loop_refuses_positions_that_start_again() -> None:
    model = apply(model_of("llama").train())
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), "eager")
    batch = row_of(documents((5, 4, 3)))
    step(dict(batch))
    del batch["segments"]
    with pytest.raises(InputError, match=r"position_ids start again \d times .* without segments"):
        step(batch)
