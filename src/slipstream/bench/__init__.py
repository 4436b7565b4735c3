"""Benchmarks: each optimisation on against off, in turns in one process, with the prediction beside the measurement."""
