"""Weights & Biases as a listener of a run."""
