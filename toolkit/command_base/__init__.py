"""The class of all commands, and options that several have."""

ENTRANCES = ("command", "options")
"""Modules through which other wings enter."""
