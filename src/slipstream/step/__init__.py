"""Ways to run a training step's forward and backward: eager, compiled, captured."""
