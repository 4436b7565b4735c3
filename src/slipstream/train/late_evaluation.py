"""The evaluation that an interruption left out, made up for before the resumed run's first step.

A signal ends the run with the step at hand: whoever stops a run doesn't want to wait for an evaluation. Where that step
was one to be evaluated, its checkpoint has the weights, so the run goes on with the evaluation. It draws no random
number and changes no weight. Alternative: to evaluate before stopping, which may take minutes.
"""

from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from slipstream.train.arguments import KeepBest


class LateEvaluation(TrainerCallback):  # type: ignore[misc]
    """Evaluates when training begins; to be added after all callbacks that are told of evaluations."""

    def __init__(self, evaluate: Callable[[], dict[str, float]], keep_best: KeepBest) -> None:
        """``evaluate``: the trainer's. ``keep_best`` is told the loss: its checkpoint is the one resumed from."""
        self._evaluate, self._keep_best = evaluate, keep_best

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        """The weights of the checkpoint are in the model."""
        metrics = self._evaluate()
        self._keep_best.remember(args, state, state.global_step, metrics["eval_loss"])
        control.should_save = False  # the checkpoint is there
        return control
