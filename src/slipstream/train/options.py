"""The options of a training run (the recipe's ``train`` section), and what of them can't be had here.

The checks stand beside the options, not beside what they are for: a plan asks them too, and need not import a trainer.
"""

from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from slipstream.decision import Decision
from slipstream.errors import InputError
from slipstream.step.choice import ModeChoice

OptimizerChoice = Literal["adamw", "adamw8bit"]
TRACKERS = {"tensorboard": ("tensorboard", "tensorboardX"), "trackio": ("trackio",), "wandb": ("wandb",)}
"""The packages of which one must be installed for each tracker."""
MOST_STEPS = 2**31 - 1
"""Steps of a run, and of its intervals: 68 years of steps of a second."""
MOST = 1_000_000
"""Passes over the data, and batches of a step."""
SHORT = 10
"""Steps up to which a run is told that a warm-up costs its first one: a tenth of it, or more."""
ALONE = "one process has no one to divide with; start several"
"""Why ``sharding`` is off where there is one process."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """How long, how fast and how safely to train."""

    mode: ModeChoice = "auto"
    """How a step runs: ``captured`` as a CUDA graph, ``compiled`` layers, ``eager``; ``auto``: the first that can."""
    steps: Annotated[int, Gt(0), Le(MOST_STEPS)] | None = None
    """Optimizer steps; overrides ``epochs``. Null: as many as ``epochs`` takes."""
    epochs: Annotated[float, Gt(0), Le(MOST)] = 1
    """Passes over the data."""
    accumulate: Annotated[int, Gt(0), Le(MOST)] = 1
    """Batches whose gradients are summed into one optimizer step."""
    learning_rate: Annotated[float, Gt(0)] = 2.0e-4
    """Peak learning rate."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Learning rate after the warm-up."""
    warmup: Annotated[float, Ge(0)] = 0.03
    """Warm-up: a share of all steps if below 1, else a number of steps."""
    optimizer: OptimizerChoice = "adamw"
    """``adamw``, or ``adamw8bit`` (bitsandbytes): its two running means in 8 bits, 2 bytes a trained weight, not 8."""
    weight_decay: Annotated[float, Ge(0)] = 0.0
    """Decoupled weight decay."""
    clip: Annotated[float, Ge(0)] = 1.0
    """Largest gradient norm; 0 does not clip."""
    seed: Annotated[int, Ge(0), Le(2**32 - 1)] = 0
    """Seed of packing order, adapter weights and dropout."""
    eval_every: Annotated[int, Gt(0), Le(MOST_STEPS)] | None = None
    """Steps between evaluations; null evaluates before the first and after the last step."""
    save_every: Annotated[int, Gt(0), Le(MOST_STEPS)] | None = None
    """Steps between checkpoints; null saves at the end and when interrupted."""
    keep: Annotated[int, Gt(0), Le(MOST_STEPS)] = 2
    """Newest checkpoints to keep; the one with the best evaluation is kept besides."""
    sharding: Literal["none", "fsdp2"] = "none"
    """With several processes: ``none`` keeps all weights in each, ``fsdp2`` divides them, for models too large."""
    trackers: list[Literal["tensorboard", "trackio", "wandb"]] = field(default_factory=list)
    """Experiment trackers to report to, through transformers' integrations."""


def check_trackers(options: TrainOptions) -> None:
    """Raises ``InputError`` for a tracker whose package is not installed."""
    for tracker in options.trackers:
        if not any(find_spec(package) for package in TRACKERS[tracker]):
            raise InputError(
                f"train.trackers: {tracker} is not installed; pip install {TRACKERS[tracker][0]}, or take it out"
            )


def check_optimizer(options: TrainOptions) -> None:
    """Raises ``InputError`` for an optimizer whose package is not installed."""
    if options.optimizer == "adamw8bit" and find_spec("bitsandbytes") is None:
        raise InputError(
            "train.optimizer: adamw8bit needs bitsandbytes, which is not installed; "
            "pip install 'slipstream[nf4]', or take adamw"
        )


def idle_start(options: TrainOptions, steps: int) -> Decision | None:
    """What to tell of a run so short that its first step, whose learning rate a warm-up makes 0, is a good part of it.

    The schedule stays transformers' own, in which a warm-up of a share takes at least one step.
    """
    if options.warmup == 0 or steps > SHORT:
        return None
    return Decision(
        "warm-up",
        True,
        f"the {'one step' if steps == 1 else f'first of {steps} steps'} has a learning rate of 0 and learns nothing, "
        "as every warm-up's first; set train.warmup: 0 to have it learn",
    )


def check_schedule(options: TrainOptions, steps: int) -> None:
    """Raises ``InputError`` where a run has too many ``steps``, or its warm-up takes all of them; known once its rows
    are counted.
    """
    if steps > MOST_STEPS:
        raise InputError(
            f"train.epochs: {options.epochs:g} makes {steps:,} steps > {MOST_STEPS:,}; lower it, or set train.steps"
        )
    if options.warmup >= 1 and options.warmup >= steps:
        longer = "train.epochs" if options.steps is None else "train.steps"
        raise InputError(
            f"train.warmup: {options.warmup:g} steps >= the run's {steps:,}, so the learning rate would never reach "
            f"its peak; lower train.warmup (below 1 it is a share of the steps) or raise {longer}"
        )
