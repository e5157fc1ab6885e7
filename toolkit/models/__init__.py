"""Checkpoints and models that a user names: found, fetched, exported, sampled."""

ENTRANCES = ("hub.hub_repository",)
"""Modules through which other wings enter."""
