"""FLOPs and memory of a training step; no torch but for their measurement."""

ENTRANCES = ("memory", "mfu")
"""Modules through which other wings enter."""
