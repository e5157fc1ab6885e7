"""A run in progress: status, logs, watch, stop and alarms."""

ENTRANCES = (
    "alarms.alarms",
    "finished_jobs",
    "remediation",
    "run_state",
    "watch.controller",
    "watch.platform_watch",
)
"""Modules through which other wings enter."""
