"""The progress of a run on a terminal: loss, tokens/s, time left.

Reads the latest record that has arrived, so it never asks the device for anything. Where the output is no terminal it
prints a line now and then instead of drawing a bar. The time left is that of the steps and of the evaluations to come,
each as long as it has been; rich's own column knows of steps alone, and takes an evaluation for a slow one.
"""

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy

from slipstream.train.records import StepLog, StepRecord

LINE_EVERY_SECONDS = 10.0


class ProgressBar(TrainerCallback):  # type: ignore[misc]
    """Shows each step of a training on ``console``, from the records in ``log``."""

    def __init__(self, console: Console, log: StepLog) -> None:
        """Nothing is drawn before training begins."""
        self.console, self.log = console, log
        self._began = self._last_line = 0.0
        self.evaluation = 0.0
        """Seconds of the last evaluation; a resumed run has them from its records."""
        self._evaluated = 0.0
        columns = (
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TextColumn("{task.fields[left]}"),
        )
        self._bar = Progress(*columns, console=console, transient=False)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Draw the bar."""
        self._began = self._last_line = time.monotonic()
        self._evaluated = 0.0
        self._first_step = state.global_step
        made, steps = state.global_step, state.max_steps
        self._task = self._bar.add_task("training", total=steps, completed=made, status="", left="")
        if self.console.is_terminal:
            self._bar.start()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Move it on."""
        now = time.monotonic()
        done = state.global_step - self._first_step
        left = f"{clock(self._left(args, state, now))} left"
        self._bar.update(self._task, completed=state.global_step, status=status(self.log.last), left=left)
        if not self.console.is_terminal and (now - self._last_line > LINE_EVERY_SECONDS or done == 1):
            self._last_line = now
            self.console.print(f"step {state.global_step:,}/{state.max_steps:,}  {status(self.log.last)}  {left}")

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **named: Any) -> None:
        """Note how long it took, for those to come; one before training counts for that, too."""
        self.evaluation = float(named["metrics"]["eval_runtime"])
        self._evaluated += self.evaluation

    def _left(self, args: TrainingArguments, state: TrainerState, now: float) -> float:
        """Seconds until the end, as steps and evaluations have taken so far."""
        step = (now - self._began - self._evaluated) / (state.global_step - self._first_step)
        every = int(args.eval_steps) if args.eval_strategy == IntervalStrategy.STEPS else None
        evaluations = evaluations_left(state.global_step, state.max_steps, every)
        left: float = step * (state.max_steps - state.global_step) + self.evaluation * evaluations
        return left

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Leave the finished bar on the screen."""
        if self.console.is_terminal:
            self._bar.stop()


def evaluations_left(step: int, steps: int, every: int | None) -> int:
    """Evaluations from the end of ``step``, its own included, to the end of a run of ``steps``, where one always is.

    ``every``: steps from one to the next; None: there are none.
    """
    if every is None:
        return 0
    return steps // every - (step - 1) // every + (steps % every != 0)


def status(record: StepRecord | None) -> str:
    """Loss and speed of a record, in a few words; empty before the first has arrived."""
    if record is None or record.seconds <= 0:
        return ""
    return f"loss {record.loss:.4f}  {record.tokens / record.seconds:,.0f} tokens/s"


def clock(seconds: float) -> str:
    """A span of time as minutes and seconds, hours where there are any."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
