"""Experiment trackers through transformers' integrations, with every number at its own step.

A step's scalars reach the host some steps late, since nothing waits for them, and transformers reports what it is given
at the step that it is at by then. So each integration is given a state that says which step its numbers are from. The
alternative, to wait for them, would cost a synchronisation a step.
"""

import copy
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import get_reporting_integration_callbacks

from slipstream.train.options import TrainOptions

AT_STEP = "at_step"
"""The key under which the trainer logs the step that its numbers are from."""


def tracker_callbacks(options: TrainOptions, run_folder: Path) -> list[TrainerCallback]:
    """A callback for each tracker that the recipe asks for (none by default); TensorBoard writes to the run folder.

    To be added after the trainer's own, so that the last numbers reach a tracker before it closes.
    """
    made = []
    for name, callback in zip(
        options.trackers, get_reporting_integration_callbacks(list(options.trackers)), strict=True
    ):
        tracker = _at_its_step(callback)()
        if name == "tensorboard":
            tracker.logging_dir = str(run_folder / "tensorboard")
        made.append(tracker)
    return made


def _at_its_step(integration: type[TrainerCallback]) -> type[Any]:
    """``integration``, reporting each number at the step it is from."""

    class Tracker(integration):  # type: ignore[misc]
        def on_log(
            self,
            args: TrainingArguments,
            state: TrainerState,
            control: TrainerControl,
            logs: dict[str, Any] | None = None,
            **named: Any,
        ) -> None:
            logs = dict(logs or {})
            then = copy.copy(state)
            then.global_step = logs.pop(AT_STEP, state.global_step)
            super().on_log(args, then, control, logs=logs, **named)

    Tracker.__name__ = integration.__name__
    return Tracker
