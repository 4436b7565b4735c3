"""The trainer: its records are right, its evaluation is by token, and it works as its base class does."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from packed import documents, model_of, row_of, summed_loss_alone, with_adapter
from slipstream import InputError, Options, PackedCollator, Trainer, apply
from slipstream.device.feed import PaddedCollator
from slipstream.train import trainer as trainer_module
from slipstream.train.arguments import KeepBest, training_arguments
from slipstream.train.checkpoint import last_checkpoint
from slipstream.train.options import TrainOptions
from slipstream.train.records import EvalRecord, StepLog, StepRecord, read_records
from training import ROW_TOKENS, ROWS, Gradients, arguments, packed_rows, trainer_of, weights


class Kept:
    """A step log that keeps its records."""

    def __init__(self, trainer: Trainer) -> None:
        self.records: list[StepRecord] = []
        inner = trainer.step_log.on_record
        assert inner is not None

        def both(record: StepRecord) -> None:
            self.records.append(record)
            inner(record)

        trainer.step_log.on_record = both


class Batches:
    """A collator that keeps what it made."""

    def __init__(self, tokens: int) -> None:
        self.collate, self.made = PackedCollator(tokens=tokens), list[dict[str, Any]]()

    def __call__(self, examples: Any) -> dict[str, Any]:
        self.made.append(self.collate(examples))
        return self.made[-1]


# ------------------------------------------------------------------------------------------------------------- records


@pytest.mark.parametrize("accumulate", [1, 2])
def test_records_by_hand(tmp_path: Path, accumulate: int) -> None:
    batches, gradients = Batches(ROW_TOKENS), Gradients()
    log = StepLog(tmp_path / "steps.jsonl")
    trainer = trainer_of(
        tmp_path,
        collator=batches,
        step_log=log,
        callbacks=[gradients],
        max_steps=3,
        gradient_accumulation_steps=accumulate,
        max_grad_norm=1e-3,
        lr_scheduler_type="linear",
        learning_rate=0.3,
    )
    kept = Kept(trainer)
    trainer.train()
    records = kept.records
    assert [record.step for record in records] == [1, 2, 3]
    assert [record.epoch for record in records] == [accumulate * step / len(ROWS) for step in (1, 2, 3)]
    assert [record.learning_rate for record in records] == pytest.approx([0.3, 0.2, 0.1])
    for index, record in enumerate(records):
        made = batches.made[accumulate * index : accumulate * (index + 1)]
        assert record.tokens == sum(sum(batch["segments"].lengths) for batch in made)
        assert record.padding_tokens == sum(batch["segments"].padding for batch in made)
        assert record.tokens + record.padding_tokens == accumulate * ROW_TOKENS
        assert record.documents == sum(len(batch["segments"].lengths) for batch in made)
        assert record.learned_tokens == sum(int((batch["labels"] != -100).sum()) for batch in made)
        assert record.memory_bytes is None
        assert 0 < record.seconds < 30
    # the first step's loss and gradient norm, by the plain model on the same documents
    plain = model_of("llama")
    rows = [split(batch) for batch in batches.made[:accumulate]]
    total, count = summed_loss_alone(plain, [document for row in rows for document in row])
    (total / count).backward()
    norm = torch.stack([p.grad.norm() for p in plain.parameters()]).norm()
    assert records[0].loss == pytest.approx(float(total / count), rel=1e-5)
    assert records[0].grad_norm == pytest.approx(float(norm), rel=1e-4)
    clipped = torch.stack([g.norm() for g in gradients.steps[0].values()]).norm()
    assert float(clipped) == pytest.approx(1e-3, rel=1e-2)  # recorded before clipping


def split(batch: dict[str, Any]) -> list[dict[str, list[int]]]:
    lengths = list(batch["segments"].lengths)
    parts = [batch[name][0, : sum(lengths)].split(lengths) for name in ("input_ids", "labels")]
    return [{"input_ids": ids.tolist(), "labels": labels.tolist()} for ids, labels in zip(*parts, strict=True)]


def test_lines_on_disk_are_the_records(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, step_log=StepLog(tmp_path / "steps.jsonl"))
    kept = Kept(trainer)
    trainer.train()
    assert read_records(tmp_path).steps == kept.records


def test_a_padded_batch_counts_documents_and_padding_apart(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, collator=PaddedCollator(), rows=2, train_dataset=documents((5, 3)), max_steps=1)
    kept, given = Kept(trainer), set[str]()
    trainer.model.register_forward_pre_hook(lambda _, args, named: given.update(named), with_kwargs=True)
    trainer.train()
    assert (kept.records[0].tokens, kept.records[0].documents, kept.records[0].padding_tokens) == (8, 2, 2)
    assert "attention_mask" in given
    assert "lengths" not in given, "what the host counts with is not the model's"


def test_a_padded_batch_of_another_collator_counts_whole(tmp_path: Path) -> None:
    def without_lengths(examples: Any) -> dict[str, Any]:
        return {name: value for name, value in PaddedCollator()(examples).items() if name != "lengths"}

    trainer = trainer_of(tmp_path, collator=without_lengths, rows=2, train_dataset=documents((5, 3)), max_steps=1)
    kept = Kept(trainer)
    trainer.train()
    assert (kept.records[0].tokens, kept.records[0].documents, kept.records[0].padding_tokens) == (10, 2, 0)


def test_a_step_with_nothing_to_learn_has_loss_zero(tmp_path: Path) -> None:
    rows = [{"input_ids": [5, 6, 7], "labels": [-100] * 3, "seq_lengths": [3]}]
    trainer = trainer_of(tmp_path, train_dataset=rows, max_steps=1)
    before, kept = weights(trainer.model), Kept(trainer)
    trainer.train()
    assert (kept.records[0].loss, kept.records[0].grad_norm, kept.records[0].learned_tokens) == (0, 0, 0)
    assert all(torch.equal(value, before[name]) for name, value in weights(trainer.model).items())


def test_clipping_off_still_records_the_norm(tmp_path: Path) -> None:
    gradients = Gradients()
    trainer = trainer_of(tmp_path, max_grad_norm=0.0, callbacks=[gradients], max_steps=2)
    kept = Kept(trainer)
    trainer.train()
    for record, step in zip(kept.records, gradients.steps, strict=True):
        assert record.grad_norm == pytest.approx(float(torch.stack([g.norm() for g in step.values()]).norm()), rel=1e-5)


def test_evaluation_is_in_no_step(tmp_path: Path) -> None:
    def run(**named: Any) -> list[StepRecord]:
        trainer = trainer_of(tmp_path, eval_dataset=packed_rows(seed=50), **named)
        kept = Kept(trainer)
        if named:
            trainer.evaluate()
            trainer.compute_loss(trainer.model.eval(), row_of(documents()))  # as prediction does
        trainer.train()
        return kept.records

    def counts(records: list[StepRecord]) -> list[tuple[Any, ...]]:
        return [(r.step, r.loss, r.grad_norm, r.tokens, r.documents, r.learned_tokens) for r in records]

    assert counts(run(eval_strategy="steps", eval_steps=1)) == counts(run())


def test_evaluation_changes_no_draw_of_dropout(tmp_path: Path) -> None:
    def learned(dropout: float = 0.3, **named: Any) -> dict[str, torch.Tensor]:
        model = apply(with_adapter(model_of("llama"), dropout))
        trainer = trainer_of(tmp_path, model=model, eval_dataset=packed_rows(seed=50), **named)
        trainer.train()
        return weights(trainer.model)

    expected, found = learned(), learned(eval_strategy="steps", eval_steps=1)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    whole = learned(dropout=0.0)
    assert not all(torch.equal(whole[name], value) for name, value in expected.items())


def test_seconds_leave_evaluation_out(tmp_path: Path) -> None:
    class Slow(PackedCollator):
        def __call__(self, examples: Any) -> dict[str, Any]:
            if examples[0]["input_ids"][0] == 3:  # an evaluation row
                time.sleep(0.5)
            return super().__call__(examples)

    rows = [{"input_ids": [3, 6, 7]}]
    trainer = trainer_of(
        tmp_path, collator=Slow(tokens=ROW_TOKENS), eval_dataset=rows, eval_strategy="steps", eval_steps=1
    )
    evals: list[EvalRecord] = []
    trainer.on_eval = evals.append
    kept = Kept(trainer)
    trainer.train()
    assert [e.step for e in evals] == [1, 2, 3]
    assert all(e.seconds >= 0.5 for e in evals)
    assert all(record.seconds < 0.5 for record in kept.records[1:])


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"logging_strategy": "steps", "logging_steps": 1}, [1, 2, 3, 4]),
        ({"logging_strategy": "steps", "logging_steps": 2}, [2, 4]),
        ({"logging_strategy": "steps", "logging_steps": 0.5}, [2, 4]),
        ({"logging_strategy": "no"}, []),
    ],
)
def test_the_base_class_logs_at_the_interval_asked_for(tmp_path: Path, settings: Any, steps: list[int]) -> None:
    trainer = trainer_of(tmp_path, max_steps=4, **settings)
    kept = Kept(trainer)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "at_step" in log]
    assert [log["at_step"] for log in logs] == steps
    by_step = {record.step: record for record in kept.records}
    for log in logs:
        assert log["loss"] == by_step[log["at_step"]].loss
        assert log["grad_norm"] == by_step[log["at_step"]].grad_norm
        assert log["learning_rate"] == by_step[log["at_step"]].learning_rate


# ---------------------------------------------------------------------------------------------------------- evaluation


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_evaluation_averages_over_learned_tokens(tmp_path: Path, rows: int) -> None:
    evals: list[EvalRecord] = []
    trainer = trainer_of(tmp_path, rows=rows, eval_dataset=packed_rows(), on_eval=evals.append)
    metrics = trainer.evaluate()
    examples = [document for index, lengths in enumerate(ROWS) for document in documents(lengths, index)]
    with torch.no_grad():
        total, count = summed_loss_alone(model_of("llama"), examples)
    assert metrics["eval_loss"] == pytest.approx(float(total) / count, rel=1e-5)
    assert metrics["eval_learned_tokens"] == count
    assert evals == [EvalRecord(0, metrics["eval_loss"], count, metrics["eval_runtime"])]
    assert trainer.state.log_history[-1]["eval_loss"] == metrics["eval_loss"]


@pytest.mark.parametrize("training", [True, False])
def test_evaluation_leaves_the_mode_as_it_was(tmp_path: Path, training: bool) -> None:
    model = apply(with_adapter(model_of("llama"), dropout=0.5))
    trainer = trainer_of(tmp_path, model=model, eval_dataset=packed_rows())
    trainer.model.train(training)
    losses = {trainer.evaluate()["eval_loss"] for _ in range(2)}
    assert len(losses) == 1  # no dropout
    assert all(module.training == training for module in trainer.model.modules())
    assert all(p.grad is None for p in trainer.model.parameters())


def test_several_evaluation_sets(tmp_path: Path) -> None:
    parts = {"a": packed_rows(((9, 5),)), "b": packed_rows(((20,), (3, 3)), seed=9)}
    trainer = trainer_of(tmp_path, eval_dataset=parts)
    metrics = trainer.evaluate()
    for name, part in parts.items():
        assert metrics[f"eval_{name}_loss"] == trainer.evaluate(part)["eval_loss"]
    assert metrics["eval_a_loss"] != metrics["eval_b_loss"]


def test_nothing_to_evaluate_is_no_division_by_zero(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, eval_dataset=[{"input_ids": [5], "seq_lengths": [1]}])
    metrics = trainer.evaluate()
    assert (metrics["eval_loss"], metrics["eval_learned_tokens"]) == (0, 0)


# ------------------------------------------------------------------------------------------------- arguments, saving


def test_it_runs_without_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    model = apply(model_of("llama"))
    trainer = Trainer(model, data_collator=PackedCollator(tokens=8 * ROW_TOKENS), train_dataset=packed_rows())
    trainer.train()
    assert trainer.state.global_step == trainer.args.num_train_epochs == 3  # all six rows are one batch
    assert trainer.step_log.last is not None
    assert trainer.step_log.last.documents == sum(map(len, ROWS))


def test_a_trainer_on_the_cpu_warns_of_no_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("transformers.trainer.logger.warning", lambda text, *_: said.append(str(text)))
    trainer_of(tmp_path, dataloader_pin_memory=False)
    assert not [text for text in said if "non_blocking" in text]


def test_the_arguments_given_are_not_changed(tmp_path: Path) -> None:
    args = arguments(tmp_path, logging_strategy="steps", logging_steps=1)
    before = args.to_dict()
    trainer = Trainer(apply(model_of("llama")), args, data_collator=PackedCollator(tokens=ROW_TOKENS))
    assert args.to_dict() == before
    assert trainer.args.logging_strategy == "no"


@pytest.mark.parametrize("ignored", [{"label_smoothing_factor": 0.1}, {"compute_metrics": lambda prediction: {}}])
def test_what_the_packed_loss_would_pass_over_is_refused(tmp_path: Path, ignored: Any) -> None:
    with pytest.raises(InputError, match=rf"{next(iter(ignored))}: .*would pass over it; leave it out"):
        trainer_of(tmp_path, **ignored)


@pytest.mark.parametrize("use", ["train", "evaluate"])
def test_batches_without_labels_are_refused(tmp_path: Path, use: str) -> None:
    def without_labels(examples: Any) -> dict[str, Any]:
        return {name: value for name, value in PackedCollator(tokens=40)(examples).items() if name != "labels"}

    trainer = trainer_of(tmp_path, collator=without_labels, eval_dataset=packed_rows())
    with pytest.raises(InputError, match=r"a batch without labels \(it has input_ids, .*: there is nothing to learn"):
        getattr(trainer, use)()


@pytest.mark.parametrize("use", ["train", "evaluate"])
def test_a_model_without_apply_is_refused(tmp_path: Path, use: str) -> None:
    trainer = trainer_of(tmp_path, model=model_of("llama"), eval_dataset=packed_rows())
    with pytest.raises(InputError, match=r"did not read the segments .*give the trainer slipstream.apply\(model\)"):
        getattr(trainer, use)()


def test_workers_give_the_same_batches(tmp_path: Path) -> None:
    def run(workers: int) -> tuple[list[float], dict[str, torch.Tensor]]:
        trainer = trainer_of(tmp_path, dataloader_num_workers=workers)
        kept = Kept(trainer)
        trainer.train()
        return [record.loss for record in kept.records], weights(trainer.model)

    (losses, found), (expected_losses, expected) = run(2), run(0)
    assert losses == expected_losses
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_dropout_and_recomputing_train_alike(tmp_path: Path, activations: Any) -> None:
    def run(activations: Any) -> dict[str, torch.Tensor]:
        model = apply(with_adapter(model_of("llama"), dropout=0.5), Options(activations=activations))
        trainer = trainer_of(tmp_path, model=model, seed=3)
        trainer.train()
        return weights(trainer.model)

    expected, found = run("keep"), run(activations)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_autocast_is_for_the_layers_and_not_for_the_loss(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, compute_dtype=torch.bfloat16, eval_dataset=packed_rows())
    exact = trainer_of(tmp_path, eval_dataset=packed_rows()).evaluate()["eval_loss"]
    rounded = trainer.evaluate()["eval_loss"]
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=1e-2)
    batch = row_of(documents((9, 5)))
    loss, outputs = trainer.compute_loss(trainer.model, batch, return_outputs=True)
    assert outputs.logits.dtype == torch.bfloat16
    assert loss.dtype == torch.float32


def options(**changes: Any) -> TrainOptions:
    return TrainOptions(**{"steps": 6, "learning_rate": 0.05, "warmup": 0, "schedule": "constant", **changes})


def run_options(folder: Path, chosen: TrainOptions, losses: list[float] | None = None) -> Trainer:
    """A run by our own arguments; ``losses`` stand in for the evaluations."""
    args = training_arguments(chosen, folder, rows=1, has_eval=losses is not None, cpu=True)
    trainer = Trainer(
        apply(model_of("llama")),
        args,
        data_collator=PackedCollator(tokens=ROW_TOKENS),
        train_dataset=packed_rows(),
        eval_dataset=None if losses is None else packed_rows(seed=50),
        callbacks=[KeepBest()],
    )
    if losses is not None:
        left = iter(losses)
        trainer._eval_sums = lambda dataset: (next(left), 1)  # type: ignore[method-assign]
    trainer.train()
    return trainer


def checkpoints(folder: Path) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in folder.glob("checkpoint-*"))


@pytest.mark.parametrize("keep", [1, 2])
def test_the_best_checkpoint_is_kept_besides_the_newest(tmp_path: Path, keep: int) -> None:
    trainer = run_options(tmp_path, options(keep=keep, eval_every=1, save_every=1), [5.0, 3.0, 4.0, 4.5, 4.2, 4.1])
    assert trainer.state.best_metric == 3.0
    assert checkpoints(tmp_path) == [2, *range(7 - keep, 7)]
    assert last_checkpoint(tmp_path).name == "checkpoint-6"


def test_the_best_is_saved_where_no_checkpoint_was_due(tmp_path: Path) -> None:
    run_options(tmp_path, options(keep=2, eval_every=2), [5.0, 3.0, 4.0])
    assert checkpoints(tmp_path) == [2, 4, 6]  # 4 is the best, 2 was until then; 6 is the end


def test_an_evaluation_before_training_is_no_best(tmp_path: Path) -> None:
    state: Any = type("State", (), {"global_step": 0, "best_metric": None})()
    control: Any = type("Control", (), {"should_save": False})()
    args: Any = None
    assert not KeepBest().on_evaluate(args, state, control, metrics={"eval_loss": 1.0}).should_save
    state.global_step = 3
    assert KeepBest().on_evaluate(args, state, control, metrics={"eval_loss": 1.0}).should_save


@pytest.mark.parametrize(
    ("chosen", "steps", "rates"),
    [
        ({"schedule": "constant", "warmup": 0}, 4, [0.05] * 4),
        ({"schedule": "constant", "warmup": 2}, 4, [0.0, 0.025, 0.05, 0.05]),
        ({"schedule": "linear", "warmup": 0}, 4, [0.05, 0.0375, 0.025, 0.0125]),
        ({"schedule": "cosine", "warmup": 0.5}, 4, [0.0, 0.025, 0.05, 0.025]),
        ({"steps": None, "epochs": 2, "accumulate": 3, "clip": 0.0}, 4, [0.05] * 4),
        ({"steps": None, "epochs": 0.5}, 3, [0.05] * 3),
    ],
)
def test_options_in_the_words_of_transformers(tmp_path: Path, chosen: Any, steps: int, rates: list[float]) -> None:
    log = StepLog(tmp_path / "steps.jsonl")
    args = training_arguments(options(**{"steps": 4, **chosen}), tmp_path, rows=1, has_eval=False, cpu=True)
    trainer = Trainer(
        apply(model_of("llama")),
        args,
        data_collator=PackedCollator(tokens=ROW_TOKENS),
        train_dataset=packed_rows(),
        step_log=log,
    )
    trainer.train()
    records = read_records(tmp_path).steps
    assert len(records) == steps
    assert [record.learning_rate for record in records] == pytest.approx(rates)
    assert checkpoints(tmp_path) == [steps]  # saved at the end


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_head_runs_in_the_dtype_that_the_arguments_ask_for(family: str, tmp_path: Path) -> None:
    """``bf16=True`` on float32 weights: accelerate wraps the model's forward, and the loss's head lies outside it."""
    trainer = trainer_of(tmp_path, apply(model_of(family)), bf16=True)
    assert trainer.batch_loss.head is not None
    dtypes = set()
    trainer.batch_loss.head.project.register_forward_hook(lambda module, args, output: dtypes.add(output.dtype))
    trainer.train()
    assert dtypes == {torch.bfloat16}


@pytest.mark.parametrize(
    ("launched", "flags", "dtype"),
    [
        ("no", {}, torch.float32),
        ("fp16", {}, torch.float16),
        ("bf16", {}, torch.bfloat16),
        ("fp16", {"bf16": True}, torch.bfloat16),
    ],
)
def test_a_step_is_made_for_the_precision_that_is_trained_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launched: str, flags: dict[str, bool], dtype: torch.dtype
) -> None:
    """Of the arguments, or of ``accelerate launch`` where they name none: float16's scaler can't meet a recording."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launched)
    asked, made = [], trainer_module.circumstances

    def kept(*positional: Any, **named: Any) -> Any:
        asked.append((named["dtype"], made(*positional, **named)))
        return asked[-1][1]

    monkeypatch.setattr(trainer_module, "circumstances", kept)
    trainer_of(tmp_path, **flags)._make_step().close()
    ((found, about),) = asked
    assert found == dtype
    assert about.scaled_gradients == (dtype == torch.float16)


@pytest.mark.parametrize(("train", "evaluation", "used"), [(1, 8, 1), (2, 1, 1), (2, 2, 2)])
def test_evaluation_takes_no_more_rows_than_fit_the_collator(
    tmp_path: Path, train: int, evaluation: int, used: int
) -> None:
    trainer = trainer_of(tmp_path, rows=train, per_device_eval_batch_size=evaluation)
    assert trainer.args.per_device_eval_batch_size == used
