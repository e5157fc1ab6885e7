"""The first processes of a node, which start the others."""

ENTRANCES = ("start_doctor", "training_process")
"""Modules through which other wings enter."""
