"""Checkpoints of training: written, read and resumed from."""

ENTRANCES = (
    "async_checkpointer",
    "background",
    "checkpoint_files",
    "host_snapshot",
    "resume_point",
    "safetensors_header",
    "sharded_tensors",
    "stored_steps",
)
"""Modules through which other wings enter."""
