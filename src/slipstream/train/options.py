"""The options of a training run (the recipe's ``train`` section)."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from slipstream.step.choice import ModeChoice

OptimizerChoice = Literal["adamw", "adamw8bit"]


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """How long, how fast and how safely to train."""

    mode: ModeChoice = "auto"
    """How a step runs: ``captured`` as a CUDA graph, ``compiled`` layers, ``eager``; ``auto``: the first that can."""
    steps: Annotated[int, Gt(0)] | None = None
    """Optimizer steps; overrides ``epochs``."""
    epochs: Annotated[float, Gt(0)] = 1
    """Passes over the data."""
    accumulate: Annotated[int, Gt(0)] = 1
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
    eval_every: Annotated[int, Gt(0)] | None = None
    """Steps between evaluations; none evaluates before the first and after the last step."""
    save_every: Annotated[int, Gt(0)] | None = None
    """Steps between checkpoints; none saves at the end and when interrupted."""
    keep: Annotated[int, Gt(0)] = 2
    """Newest checkpoints to keep; the one with the best evaluation is kept besides."""
    sharding: Literal["none", "fsdp2"] = "none"
    """With several processes: ``none`` keeps all weights in each, ``fsdp2`` divides them, for models too large."""
    trackers: list[Literal["tensorboard", "trackio", "wandb"]] = field(default_factory=list)
    """Experiment trackers to report to, through transformers' integrations."""
