"""Files, signals, random numbers and packages: what every process of a job needs."""

ENTRANCES = (
    "atomic_write",
    "digests",
    "error",
    "pip_install",
    "rng",
    "sagemaker_paths",
    "signals",
    "stored_fields",
)
"""Modules through which other wings enter."""
