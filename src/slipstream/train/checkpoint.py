"""Which checkpoint a run goes on from."""

from pathlib import Path

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from slipstream.errors import InputError

NEEDED = ("trainer_state.json", "optimizer.pt", "scheduler.pt", "rng_state.pth")
"""Files without which training can't go on exactly, besides the weights."""
WEIGHTS = ("adapter_model.safetensors", "model.safetensors", "model.safetensors.index.json")
"""One of these is there, whatever is trained."""


def last_checkpoint(folder: Path) -> Path:
    """The newest whole checkpoint in a run's ``checkpoints`` folder.

    Raises ``InputError`` where there is none.
    """
    found = [entry for entry in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if is_whole(entry)]
    if not found:
        raise InputError(
            f"'{folder}' holds no whole checkpoint to resume from; start again with another output "
            f"(set train.save_every to save more often)"
        )
    return max(found, key=checkpoint_step)


def checkpoint_step(folder: Path) -> int:
    """The step a checkpoint was saved after; -1 for a folder that isn't named like one."""
    step = folder.name.rpartition("-")[2]
    return int(step) if step.isdecimal() else -1


def is_whole(folder: Path) -> bool:
    """Whether a checkpoint has all the files that resuming reads."""
    has = {name for name in (*NEEDED, *WEIGHTS) if (folder / name).is_file()}
    return checkpoint_step(folder) >= 0 and has.issuperset(NEEDED) and not has.isdisjoint(WEIGHTS)
