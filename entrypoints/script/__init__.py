"""Training scripts and loops of the user's own."""

ENTRANCES = ("folder_data",)
"""Modules through which other wings enter."""
