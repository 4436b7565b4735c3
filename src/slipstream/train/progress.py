"""The progress of a run on a terminal: loss, tokens/s, time left.

Reads the latest record that has arrived, so it never asks the device for anything. Where the output is no terminal it
prints a line now and then instead of drawing a bar.
"""

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from slipstream.train.records import StepLog, StepRecord

LINE_EVERY_SECONDS = 10.0


class ProgressBar(TrainerCallback):  # type: ignore[misc]
    """Shows each step of a training on ``console``, from the records in ``log``."""

    def __init__(self, console: Console, log: StepLog) -> None:
        """Nothing is drawn before training begins."""
        self.console, self.log = console, log
        self._began = self._last_line = 0.0
        columns = (
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=console, transient=False)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Draw the bar."""
        self._began = self._last_line = time.monotonic()
        self._first_step = state.global_step
        self._task = self._bar.add_task("training", total=state.max_steps, completed=state.global_step, status="")
        if self.console.is_terminal:
            self._bar.start()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Move it on."""
        self._bar.update(self._task, completed=state.global_step, status=status(self.log.last))
        now = time.monotonic()
        done = state.global_step - self._first_step
        if not self.console.is_terminal and (now - self._last_line > LINE_EVERY_SECONDS or done == 1):
            self._last_line = now
            left = (now - self._began) / done * (state.max_steps - state.global_step)
            line = f"step {state.global_step:,}/{state.max_steps:,}  {status(self.log.last)}  {clock(left)} left"
            self.console.print(line)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Leave the finished bar on the screen."""
        if self.console.is_terminal:
            self._bar.stop()


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
