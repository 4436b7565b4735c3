"""The composition root: a recipe becomes a run, stage by stage, each named once and in this order.

1. folder    ``RunFolder``           refuse to overwrite
2. rows      ``prepare_rows``        rows → documents, cached on disk → packed rows
3. model     ``build_model``         the base model and its adapter
4. apply     ``apply``               attention over segments, memory policy
5. train     ``Trainer``             evaluation before, training, evaluation after
6. results   ``save``                adapter or model, run.json, report.html
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn
from transformers import PrinterCallback, set_seed

from slipstream.cost.hardware import compute_dtype, describe
from slipstream.data.learn import use_template
from slipstream.data.preview import preview
from slipstream.decision import Decision
from slipstream.device.feed import PackedCollator, PaddedCollator
from slipstream.errors import InputError
from slipstream.model.load import check_context, check_revision, load_tokenizer
from slipstream.model.lora import left_out
from slipstream.places import keep_compiled_code
from slipstream.plan.beyond import check_within_reach
from slipstream.plan.command import check_model
from slipstream.plan.facts import Facts, Target, skeleton, this_machine, with_new_tokens
from slipstream.plan.prediction import Taken
from slipstream.plan.record import plan_line, run_facts, run_plan
from slipstream.prepare import (
    Rows,
    build_model,
    check_here,
    checked_tokenizer,
    data_record,
    planned_steps,
    prepare_rows,
    quiet_libraries,
    run_decisions,
    stream_decision,
)
from slipstream.recipe import Recipe
from slipstream.recipe_text import flat
from slipstream.report.html import write_report
from slipstream.resume import Resumption, TakenUp, claimed, resumption, take_up
from slipstream.run_json import describe_run, model_card, now
from slipstream.step.choice import check_mode
from slipstream.summary import RunSummary, complete_run, summary_of, told
from slipstream.train.arguments import KeepBest, training_arguments
from slipstream.train.divergence import StopOnDivergence
from slipstream.train.interrupt import StopRequest
from slipstream.train.late_evaluation import LateEvaluation
from slipstream.train.launcher import check_launcher
from slipstream.train.no_memory import no_memory_told
from slipstream.train.optimizers import choose_optimizer
from slipstream.train.options import check_schedule, idle_start
from slipstream.train.progress import ProgressBar
from slipstream.train.ranks import Ranks
from slipstream.train.records import EvalLog, EvalRecord, RunFolder, StepLog, read_records
from slipstream.train.run_folder import discard, full_disk_told, publish, staging_for
from slipstream.train.sharding import is_divided, whole_weights
from slipstream.train.timeline import FILE as TIMELINE
from slipstream.train.timeline import StepTimeline
from slipstream.train.trackers import tracker_callbacks
from slipstream.train.trainer import Trainer
from slipstream.transform import Options, applied, apply, restore, tell_later_decisions
from slipstream.values import shown


def train(recipe: Recipe, *, resume: bool, console: Console) -> RunSummary:
    """Fine-tune as ``recipe`` says. Raises ``InputError`` before anything is trained where it can't be done.

    Started as several processes (``torchrun``, ``accelerate launch``) they train one model together; only the first
    prints and writes, and what is wrong on one ends all.
    """
    with Ranks.joined() as ranks:
        console = console if ranks.first else Console(quiet=True)
        with ranks.together():
            check_here(recipe)
            here = describe("cuda" if torch.cuda.is_available() else "cpu")
            check_mode(recipe.train.mode, here, packed=recipe.packing.enabled)
            check_launcher(compute_dtype(here), has_card=torch.cuda.is_available())
        keep_compiled_code()
        quiet_libraries()
        same = "start all processes with the same recipe, --set and --resume"
        values = {key: shown(value) for key, value in flat(recipe.to_dict()).items()}
        ranks.agree_in("the recipe", values | {"--resume": shown(resume)}, same)
        with claimed(recipe, ranks, resume=resume) as folder:
            resumed = None
            if resume:
                resumed = ranks.shared(partial(resumption, folder, recipe, console, processes=ranks.count))
                recipe = resumed.recipe
                if resumed.said:
                    console.print(resumed.said)
                if resumed.checkpoint is None:
                    return complete_run(folder)
            with no_memory_told(recipe.packing.tokens * recipe.packing.rows):
                with StopRequest.termination_interrupts():
                    training, autocast = _prepared(recipe, folder, console, ranks)
                return training.run(resumed, autocast)


def _prepared(recipe: Recipe, folder: RunFolder, console: Console, ranks: Ranks) -> tuple["_Training", torch.dtype]:
    """Stages 2 to 4: everything that comes before the first step, and the dtype to compute in."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = ranks.in_turn(this_machine)  # its ceilings are measured, if they never were, while the device is empty
    tokenizer = ranks.in_turn(lambda: checked_tokenizer(recipe))
    sketch = ranks.in_turn(lambda: skeleton(recipe))
    with ranks.together():
        check_model(recipe, sketch, tokenizer)  # before rows and weights are read, which may take long
        tokens = with_new_tokens(recipe, sketch, tokenizer)
    train_rows = ranks.in_turn(lambda: prepare_rows(recipe, recipe.data.train, tokenizer, console))
    eval_rows = None
    if held_out := recipe.data.eval:
        eval_rows = ranks.in_turn(lambda: prepare_rows(recipe, held_out, tokenizer, console))
    with ranks.together():
        use_template(tokenizer, recipe.data.chat_template)
        steps = planned_steps(recipe, len(train_rows.rows), ranks.count)
        check_schedule(recipe.train, steps)
        longest = max(int(rows.tokenised.lengths.max()) for rows in (train_rows, eval_rows) if rows is not None)
        context = check_context(sketch.config, longest, "data.max_length")
        tokenised = (train_rows.tokenised, None if eval_rows is None else eval_rows.tokenised)
        found = run_facts(recipe, sketch, tokenised, tokens=tokens)
        if not isinstance(found, InputError):
            check_within_reach(recipe, found, target)

    console.print(f"loading {recipe.model}")
    model = ranks.in_turn(lambda: build_model(recipe, device))
    autocast: torch.dtype = getattr(torch, compute_dtype(describe(device)))
    with ranks.together():
        decided = _applied(recipe, model, autocast)
    told = (context, left_out(sketch, recipe.adapter), stream_decision(recipe), idle_start(recipe.train, steps))
    decided += filter(None, told)
    for decision in decided:
        console.print(f"  {decision}")
    record = describe_run(recipe, model, device, train_rows, eval_rows, decided, new_tokens=tokens)
    record |= {"plan": _planned(recipe, found, model, target), "processes": ranks.count}
    console.print(f"  {plan_line(record['plan'])}")
    data = repr((record["rows"], record["contents"]))
    ranks.agree("the tokenised data", data, "give all processes the same files and data set caches")
    ranks.agree("the base model", str(record["base"]["digest"]), "give all processes the same weights")
    return _Training(recipe, folder, model, tokenizer, train_rows, eval_rows, console, record, ranks), autocast


def _applied(recipe: Recipe, model: nn.Module, autocast: torch.dtype) -> list[Decision]:
    """Apply to ``model`` what fits it, and give every decision about it."""
    memory = recipe.memory
    options = Options(
        activations=memory.activations,
        buffers=memory.buffers,
        host_limit=memory.host_limit,
        tiles=memory.tiles,
        tokens=recipe.packing.tokens * recipe.packing.rows,
        compute_dtype=autocast,
    )
    apply(model, options)
    return run_decisions(recipe, model)


def _planned(recipe: Recipe, found: Facts | InputError, model: nn.Module, target: Target) -> dict[str, Any]:
    """What the plan says of this run, as it was set up."""
    hung = applied(model)
    taken = Taken() if hung is None else Taken(hung.attention, hung.split, hung.forward.packing)
    return run_plan(recipe, found, target, taken)


class _Training:
    """Stages 5 and 6: one run from its first evaluation to its report."""

    def __init__(
        self,
        recipe: Recipe,
        folder: RunFolder,
        model: Any,
        tokenizer: Any,
        train_rows: Rows,
        eval_rows: Rows | None,
        console: Console,
        record: dict[str, Any],
        ranks: Ranks,
    ) -> None:
        self.recipe, self.folder, self.model, self.tokenizer = recipe, folder, model, tokenizer
        self.train_rows, self.eval_rows, self.console, self.record = train_rows, eval_rows, console, record
        self.ranks = ranks
        self.step_log, self.eval_log = StepLog(folder.steps if ranks.first else None), EvalLog(folder.evals)
        self.last_eval_step: int | None = None
        self.first_step = 0
        self.complete = False
        self.stop, self.divergence = StopRequest(ranks), StopOnDivergence(self.step_log, ranks)
        self.keep_best, self.progress = KeepBest(), ProgressBar(console, self.step_log)

    def run(self, resumed: Resumption | None, autocast: torch.dtype) -> RunSummary:
        """Train to the end or to the first signal, and leave everything in the run folder."""
        tell_later_decisions(self.model, self._decided)
        trainer = self._trainer(autocast)
        loss, about = trainer.batch_loss, (trainer.ranks_decision(), trainer.sharding_decision)
        for decision in filter(None, (loss.decision, loss.balance_decision, *about)):
            self._decided(decision)
        checkpoint = None if resumed is None else resumed.checkpoint
        if resumed is not None and checkpoint is not None:
            taken = self.ranks.shared(partial(self._go_on, resumed, checkpoint))
            self.first_step, self.keep_best.since = taken.step, taken.evals_since
            if taken.best is not None:
                self.keep_best.found = taken.best.step, taken.best.loss
            if taken.owed:
                trainer.add_callback(LateEvaluation(trainer.evaluate, self.keep_best))
            if taken.last_eval is not None:
                self.last_eval_step, self.progress.evaluation = taken.last_eval.step, taken.last_eval.seconds
        if self.ranks.count > 1:
            set_seed((self.recipe.train.seed + self.ranks.index) % 2**32)  # dropout of their own; a checkpoint keeps it
        self._write_run()
        began = time.perf_counter()
        with full_disk_told(self.folder.path), self._outcome_recorded(), self.stop.listening():
            if self.eval_rows is not None and checkpoint is None:
                self.record["eval_before"] = self._evaluate(trainer, "before training")
                self._write_run()  # a run killed outright has it when it goes on
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
            with self.ranks.together():
                self.divergence.raise_if_found()
            seconds = time.perf_counter() - began
            if not self.stop.came():
                self._complete(trainer)
        return self.ranks.shared(lambda: self._finish(trainer, seconds))

    def _decided(self, decision: Decision) -> None:
        """Tell a decision and keep it; a later one of the same name takes the place of the one before."""
        self.console.print(f"  {decision}")
        kept = [one for one in self.record["decisions"] if one["name"] != decision.name]
        self.record["decisions"] = [*kept, asdict(decision)]

    def _complete(self, trainer: Trainer) -> None:
        """What ends a run that was not interrupted: the last evaluation, if it has not been, and the result."""
        step = trainer.state.global_step
        if self.eval_rows is not None and self.last_eval_step != step:
            trainer.evaluate()
        self._save_result()
        self.complete = True  # a signal that comes from here on changes nothing

    def _trainer(self, autocast: torch.dtype) -> Trainer:
        recipe = self.recipe
        tokens, rows = recipe.packing.tokens * recipe.packing.rows, recipe.packing.rows
        args = training_arguments(
            recipe.train,
            self.folder.checkpoints,
            rows=rows,
            has_eval=self.eval_rows is not None,
            cpu=not torch.cuda.is_available(),
        )
        trainer = Trainer(
            self.model,
            args,
            data_collator=PackedCollator(tokens=tokens) if recipe.packing.enabled else PaddedCollator(),
            train_dataset=self.train_rows.rows,
            eval_dataset=None if self.eval_rows is None else self.eval_rows.rows,
            processing_class=self.tokenizer,
            compute_dtype=None if autocast == torch.float32 else autocast,
            sharding=recipe.train.sharding,
            optimizer_cls_and_kwargs=choose_optimizer(recipe.train, self.model),
            step_log=self.step_log,
            on_eval=self._record_eval,
            mode=recipe.train.mode,
            on_decision=self._decided,
            callbacks=[
                self.keep_best,
                self.stop,
                *([StepTimeline(self.folder.path)] if torch.cuda.is_available() else []),
            ],
        )
        trackers = tracker_callbacks(recipe.train, self.folder.path)
        for watcher in (self.progress, self.divergence, *trackers):  # after the records
            trainer.add_callback(watcher)
        trainer.remove_callback(PrinterCallback)
        return trainer

    def _write_run(self) -> None:
        if self.ranks.first:
            self.folder.write_run(self.record)

    def _go_on(self, resumed: Resumption, checkpoint: Path) -> TakenUp:
        taken = take_up(self.folder, self.record, resumed, checkpoint, self.step_log, self.eval_log)
        for line in taken.told:
            self.console.print(line)
        self.console.print(f"going on from step {taken.step:,} ({checkpoint})")
        return taken

    def _evaluate(self, trainer: Trainer, when: str) -> float:
        loss = float(trainer.evaluate()["eval_loss"])
        self.console.print(f"held-out loss {when}: {loss:.4f}")
        return loss

    def _record_eval(self, record: EvalRecord) -> None:
        if self.ranks.first:
            self.eval_log.append(record)
        self.last_eval_step = record.step
        if record.step:
            self.console.print(f"held-out loss after step {record.step:,}: {record.loss:.4f}")

    @contextmanager
    def _outcome_recorded(self) -> Iterator[None]:
        """Whatever ends the training, run.json says how."""
        outcome = "failed"
        try:
            yield
            outcome = "finished" if self.complete else "interrupted"
        except KeyboardInterrupt:
            outcome = "interrupted"
            raise
        finally:
            if self.divergence.found is not None:
                outcome = "diverged"
            self.record.update(outcome=outcome, finished=now())
            if self.ranks.first:
                self._record_outcome()

    def _record_outcome(self) -> None:
        interrupted = self.record["outcome"] == "interrupted"
        if interrupted and not any(self.folder.checkpoints.glob("checkpoint-*")):
            self._forget()
        else:
            self.folder.write_run(self.record)

    def _forget(self) -> None:
        """Leave the folder empty: nothing was trained, and the same command may start again."""
        for place in (self.folder.run_json, self.folder.steps, self.folder.evals, self.folder.path / TIMELINE):
            place.unlink(missing_ok=True)
        discard(self.folder.checkpoints)
        self.console.print("interrupted before a checkpoint was saved: nothing is kept; start again")

    def _finish(self, trainer: Trainer, seconds: float) -> RunSummary:
        records = read_records(self.folder.path)
        evals = [evaluation for evaluation in records.evals if evaluation.step]
        if evals:
            self.record["eval_after"] = evals[-1].loss
            best = min(evals, key=lambda evaluation: math.inf if math.isnan(evaluation.loss) else evaluation.loss)
            self.record["best"] = {"step": best.step, "loss": best.loss}
        self.folder.write_run(self.record)
        write_report(self.folder.path)
        summary = summary_of(
            self.folder, replace(records, run=self.record), steps=trainer.state.global_step, seconds=seconds
        )
        for line in told(summary, self.first_step):
            self.console.print(line)
        return summary

    def _save_result(self) -> None:
        restore(self.model)
        weights = whole_weights(self.model) if is_divided(self.model) else None
        if not self.ranks.first:
            return
        lora = self.recipe.adapter.kind == "lora"
        target = self.folder.adapter if lora else self.folder.model
        staged = staging_for(target)
        staged.mkdir(parents=True, exist_ok=True)
        if lora:
            card = model_card(self.recipe, self.train_rows.report.documents, self.record["base"])
            (staged / "README.md").write_text(card, encoding="utf-8")  # peft fills its header
        self.model.save_pretrained(staged, state_dict=weights)
        self.tokenizer.save_pretrained(staged)
        publish(target)
        self.console.print(f"{'adapter' if lora else 'model'} saved in {target}")


# ------------------------------------------------------------------------------------------------ other commands


def show_data(recipe: Recipe, *, rows: int, console: Console) -> dict[str, Any]:
    """Print the first ``rows`` packed rows: each document's text, its bounds, and which tokens are learned."""
    quiet_libraries()
    check_revision(recipe.model, recipe.load)
    tokenizer = load_tokenizer(recipe.model, recipe.load)
    prepared = prepare_rows(recipe, recipe.data.train, tokenizer, console)
    held_out = prepare_rows(recipe, recipe.data.eval, tokenizer, console) if recipe.data.eval else None
    previewed = preview(prepared.rows, tokenizer, rows_shown=rows, console=console)
    return {**data_record(prepared), "eval": held_out and data_record(held_out), **previewed}
