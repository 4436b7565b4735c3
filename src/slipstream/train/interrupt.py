"""Ctrl-C and SIGTERM: finish the step at hand, save, and stop.

The first signal asks; a second Ctrl-C means it and raises ``KeyboardInterrupt``. Handlers are put back on leaving.
Several ranks get the signal at moments of their own, or one alone gets it; they stop after the same step.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from slipstream.train.ranks import Consensus, Ranks


class StopRequest(TrainerCallback):  # type: ignore[misc]
    """Saves and stops the training at the end of the step during which a signal came."""

    def __init__(self, ranks: Ranks | None = None) -> None:
        """No signal has come yet; ``ranks``: those who stop together."""
        self.signal: signal.Signals | None = None
        self._consensus = Consensus(ranks or Ranks())

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        """Asks the trainer to save and stop, if a signal came to any rank."""
        if self._consensus.ask(self.signal is not None):
            control.should_save = True
            control.should_training_stop = True
            control.should_evaluate = False  # made up for when the run goes on (``late_evaluation.py``)
        return control

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        """Ends an evaluation before the first step at once: there is nothing to save yet."""
        if self.signal is not None and state.global_step == 0:
            raise KeyboardInterrupt
        return control

    def came(self) -> bool:
        """Whether a signal has come to any rank; waits for all, so each must ask."""
        return self._consensus.settle(self.signal is not None)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listen to SIGINT and SIGTERM inside the context."""
        before = {number: signal.signal(number, self._ask) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @staticmethod
    @contextmanager
    def termination_interrupts() -> Iterator[None]:
        """Inside the context SIGTERM is as Ctrl-C: for the time before training, when there is nothing to save."""
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def _ask(self, number: int, _: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)
