"""How the benchmarks read samples."""

from __future__ import annotations

from sm_train.entrypoints.job_interface.job_config import DataConfig

DATA_CONFIG = DataConfig(
    "png",
    "txt",
    "center",
    "fast",
    "srgb",
    "reject",
    aspect_buckets=False,
    max_bad_fraction=0.01,
)
