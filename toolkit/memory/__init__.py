"""GPU memory of a stage, and the strategy that `sharding: auto` stands for."""

ENTRANCES = ("memory_fit", "sharding_choice")
"""Modules through which other wings enter."""
