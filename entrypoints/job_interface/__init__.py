"""The contract of laptop and job: configuration, events, places of files and checkpoints."""

ENTRANCES = (
    "checkpoint_layout",
    "events",
    "index_location",
    "job_config",
    "lora_layers",
    "node_description",
    "optimizer_rules",
    "user_function",
)
"""Modules through which other wings enter."""
