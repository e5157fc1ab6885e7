"""The checks of ``sm-train check``: one module per subject, with the pages of its findings."""

ENTRANCES = ("account.quotas", "account.role", "finding", "training_data")
"""Modules through which other wings enter."""
