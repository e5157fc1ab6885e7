"""Time and money of a run: estimated before it, projected during it."""

ENTRANCES = (
    "estimate_inputs",
    "history",
    "measured_speeds",
    "price_table",
    "run_price",
    "scope",
    "spent",
    "training_plans",
)
"""Modules through which other wings enter."""
