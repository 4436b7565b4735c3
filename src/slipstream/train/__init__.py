"""Loss, trainer, checkpoints and the records of a run."""
