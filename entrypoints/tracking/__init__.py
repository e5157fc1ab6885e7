"""Experiment trackers: W&B, MLflow and TensorBoard."""

ENTRANCES = ("feed", "scalars", "tensorboard_files")
"""Modules through which other wings enter."""
