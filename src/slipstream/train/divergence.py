"""A loss that is no number: the weights are lost from the next update on, so training stops and saves none of it.

Read from the records that have arrived, so no step waits for its loss; the stop comes some steps late on a card.
"""

import math
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from slipstream.errors import InputError
from slipstream.train.ranks import Consensus, Ranks
from slipstream.train.records import StepLog, StepRecord


class StopOnDivergence(TrainerCallback):  # type: ignore[misc]
    """Stops a training whose loss or gradient has become NaN or infinite."""

    def __init__(self, log: StepLog, ranks: Ranks | None = None) -> None:
        """``log``: where the records arrive; ``ranks``: those who stop together, each with a log of the same losses."""
        self.log = log
        self._consensus = Consensus(ranks or Ranks())
        self.found: StepRecord | None = None
        """The first record seen with such a loss or gradient."""

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        """Asks the trainer to stop, and to save nothing."""
        self.look()
        if self._consensus.ask(self.found is not None):
            control.should_training_stop = True
            control.should_save = control.should_evaluate = False
        return control

    def look(self) -> None:
        """Look at the latest record that has arrived."""
        last = self.log.last
        if self.found is None and last is not None and not math.isfinite(last.loss + last.grad_norm):
            self.found = last

    def raise_if_found(self) -> None:
        """Raises ``InputError`` with the step, the values and the remedy; waits for all ranks."""
        self.log.drain()
        self.look()
        if self._consensus.settle(self.found is not None):
            self.found = self.found or self.log.last  # another rank saw it when its last record had arrived here
        if self.found is None:
            return
        raise InputError(
            f"step {self.found.step}: loss {self.found.loss}, gradient norm {self.found.grad_norm}: training has "
            f"diverged and nothing later was saved; lower train.learning_rate (it was {self.found.learning_rate:g} "
            f"there) or train.clip, and start again with another output"
        )
