"""Before a run: what it will need and take, from the data and the model's configuration alone."""
