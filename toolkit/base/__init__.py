"""Errors, settings, extras and wings."""

ENTRANCES = ("errors", "extras", "settings", "wings")
"""Modules through which other wings enter."""
