"""A run on any platform: found by what the user names, by an adapter for each platform."""

ENTRANCES = ("adapters", "find_run", "placed_run", "sagemaker.sagemaker_run", "target")
"""Modules through which other wings enter."""
