"""Facts of runs and jobs: launch records, states, events, logs and checkpoints."""

ENTRANCES = (
    "checkpoints",
    "job_logs",
    "launch_record",
    "live_state",
    "local_folder",
    "run_job",
    "stage_state",
    "training_job",
)
"""Modules through which other wings enter."""
