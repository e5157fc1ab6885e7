"""Processes that train together: backend, FSDP, rendezvous and messages."""

ENTRANCES = (
    "backend",
    "cuda_compat",
    "fsdp",
    "local_shard",
    "messages",
    "nccl_log",
    "object_exchange",
    "rendezvous",
)
"""Modules through which other wings enter."""
