"""Heartbeats, stalls, stragglers and alerts; no torch."""

ENTRANCES = (
    "alert_outbox",
    "alert_sinks",
    "alerts",
    "first_failure",
    "heartbeat",
    "secret_values",
    "start_monitoring",
)
"""Modules through which other wings enter."""
